"""Analyses on the bridge: sums equal wholes where HookedKVTransformer runs no such model, analyses of heads slow forms.

test_front_ends.py holds them to HookedKVTransformer's.
"""

import itertools

import pytest
import torch
from bridge_models import place_of, some_tokens
from pandas.testing import assert_frame_equal
from precision import LAW, relative_error
from stacked_tensors import layers_with_state
from tiny_hf import tiny_hf_model

from kvlens import KVLensError, KVTransformerBridge, convert_prompt
from kvlens import analyses as an
from kvlens.errors import IndirectHeads
from kvlens.model import direct_path, head_hooks, head_matrices, heads_per_layer, output_weights

pytestmark = pytest.mark.usefixtures("without_gradients")

PROMPT, TEXT = some_tokens(11), some_tokens(4, seed=1)
DIRECT = ("gpt2", "qwen3_5", "gpt_oss", "llama")
"""Families whose heads write to the residual stream directly."""


@pytest.fixture(scope="module", params=["qwen3_5", "olmo_hybrid", "falcon_h1", "gemma3", "gpt_oss"])
def family(request):
    return request.param


@pytest.mark.one_in(2)
def test_every_head_has_its_row(model):
    bias = convert_prompt(model, PROMPT)
    heads = [(layer, head) for layer in range(3) for head in range(bias.n_heads_of(layer))]
    table = an.bias_by_head(model, PROMPT, TEXT)
    assert list(zip(table["layer"], table["head"], strict=True)) == heads
    assert table["ablation_kl"].max() > 1e-3 and (table["bias_share"].between(0, 1)).all()  # it matters
    layers = an.bias_by_layer(model, PROMPT, TEXT)
    together = table.assign(square=table["b_kv_norm"] ** 2).groupby("layer")["square"].sum() ** 0.5
    assert (together - layers["b_kv_norm"]).abs().max() < LAW * together.max()


@pytest.mark.one_in(2)
def test_an_ablation_of_everything_is_the_text_alone(model):
    table = an.bias_effects(model, PROMPT, TEXT, by="model", methods=("zero",), parts=["bias"])
    bias = convert_prompt(model, PROMPT)
    with model.kv_bias(bias):
        whole = model(TEXT[None])[0].double().log_softmax(dim=-1)
    with model.kv_bias(bias.select()):
        zero = model(TEXT[None])[0].double().log_softmax(dim=-1)
    expected = float((whole.exp() * (whole - zero)).sum(dim=-1).mean())
    assert abs(table["kl"][0] - expected) < LAW and expected > 1e-3  # it matters
    each = an.bias_effects(model, PROMPT, TEXT, by="head", methods=("baseline",))
    n_convolutions = len(layers_with_state(bias))
    assert (each["head"] == -1).sum() == n_convolutions == (each["part"] == "shift_state").sum()


@pytest.mark.one_in(2)
def test_the_last_depth_is_the_model(model):
    table = an.prompt_by_depth(model, PROMPT, TEXT)
    log_p = model(torch.cat([PROMPT, TEXT])[None])[0, len(PROMPT) :].double().log_softmax(dim=-1)
    losses = -log_p[:-1].gather(-1, TEXT[1:, None])[:, 0]
    last = table[table["layer"] == 3]["loss_with"].to_numpy()[:-1]
    assert abs(losses.numpy() - last).max() < LAW


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", DIRECT)
def test_a_heads_direct_logit_is_what_the_logit_loses_without_it(family, bridge_of):
    """In the last layer nothing but norms and a gate is in between, and they are held."""
    model = bridge_of(family)
    bias = convert_prompt(model, PROMPT)
    answer, rival, layer = 3, 7, 2
    table = an.bias_decomposition(model, PROMPT, TEXT, answer=answer, rival=rival)
    with model.kv_bias(bias):
        path = direct_path(model, TEXT)
    seen = {}
    hooks = [
        (f"blocks.{layer}.attn.hook_z_bias", lambda z, hook: seen.__setitem__("z", z[0, -1].double())),
        ("ln_final.hook_in", lambda x, hook: seen.__setitem__("x", x[0, -1].double())),
    ]
    with model.kv_bias(bias):
        logits = model.run_with_hooks(TEXT[None], fwd_hooks=hooks)[0, -1].double()
    way = model.ends()
    centered = seen["x"] - seen["x"].mean() if way.centers else seen["x"]
    normed = centered / path.scale[-1] * way.norm_weight.double()
    normed = normed if way.norm_bias is None else normed + way.norm_bias.double()
    rebuilt = normed @ way.W_U.double() + way.b_U.double()
    assert relative_error(rebuilt, logits) < LAW  # the way out is the model's own
    factor = path.layers[layer].factor
    z = seen["z"] if factor is None else seen["z"] * factor[-1]
    written = torch.einsum("hd,hdm->hm", z, output_weights(model, layer).double())
    written = written - written.mean(dim=-1, keepdim=True) if way.centers else written
    by_head = (written / path.scale[-1] * way.norm_weight.double()) @ way.W_U.double()
    expected = by_head[:, answer] - by_head[:, rival]
    found = torch.tensor(table[table["layer"] == layer]["logit"].to_numpy())
    assert relative_error(found, expected) < LAW


@pytest.mark.parametrize("family", ["gemma3", "olmo_hybrid", "falcon_h1"])
def test_heads_behind_a_norm_have_no_logit_of_their_own(family, bridge_of):
    with pytest.raises(KVLensError, match="direct logit attribution needs heads that write to it directly"):
        an.bias_decomposition(bridge_of(family), PROMPT, TEXT)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", DIRECT)
@pytest.mark.parametrize("attached", [False, True])
def test_positions_add_up_to_the_bias(family, attached, bridge_of):
    """The parts sum to the output, and the prompt's and what was held before to what the converted model reads."""
    model = bridge_of(family)
    initial = convert_prompt(model, some_tokens(5, seed=2)) if attached else None
    table = an.bias_positions(model, PROMPT, TEXT, initial=initial, answer=3, rival=7)
    heads = table.groupby(["layer", "head"])
    assert abs(heads["output_share"].sum() - 1).max() < LAW
    read = table[table["part"].isin(["prompt", "inherited"])].groupby(["layer", "head"])
    whole = an.bias_decomposition(model, convert_prompt(model, PROMPT, initial=initial), TEXT, answer=3, rival=7)
    whole = whole.set_index(["layer", "head"])
    for name in ("output_share", "logit"):
        assert abs(read[name].sum() - whole[name]).max() < LAW * max(1.0, whole[name].abs().max())
    assert (table["part"] == "inherited").any() == attached


def test_attention_and_the_path_to_the_logits_are_read_in_one_pass(bridge_of):
    model, passes = bridge_of("llama"), []
    with model.original_model.register_forward_hook(lambda *of_pass: passes.append(1)):
        an.bias_positions(model, PROMPT, TEXT)
    assert len(passes) == 1


NEXT = torch.cat([PROMPT[2:4], some_tokens(2, seed=1)])
REPEATED = dict(n_sequences=2, n_repeated=9)


@pytest.fixture(scope="module", params=["qwen3_5", "bamba", "kimi_linear", "falcon_h1_direct"])
def hybrid(request, bridge_of):
    return bridge_of(request.param)


@pytest.mark.one_in(2)
def test_every_head_of_a_hybrid_is_scored(hybrid, scored):
    table, (tokens, _) = scored
    heads = [(layer, head) for layer, n_heads in enumerate(heads_per_layer(hybrid)) for head in range(n_heads)]
    assert list(table[["layer", "head"]].drop_duplicates().itertuples(index=False, name=None)) == heads
    seen = {}
    names = {f"{place_of(hybrid, layer, head)[0]}hook_pattern" for layer, head in heads}
    hybrid.run_with_hooks(tokens, fwd_hooks=[(name, lambda a, hook, at=name: seen.__setitem__(at, a)) for name in names])
    found = table[table["kind"] == "previous_token"].set_index(["layer", "head"])["score"]
    for layer, head in heads:
        place, number = place_of(hybrid, layer, head)
        expected = seen[f"{place}hook_pattern"][:, number].diagonal(offset=-1, dim1=-2, dim2=-1).mean()
        assert abs(found[layer, head] - float(expected)) < LAW


@pytest.fixture(scope="module")
def scored(hybrid):
    return scored_of(hybrid)


def scored_of(model, analysis=an.induction_heads):
    """The table of a hybrid's heads, and the two texts that the analysis draws: the repeated one, and the one that ablations
    resample from."""
    from kvlens.analyses.heads import induction

    made = []
    original = induction.repeat_tokens
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(induction, "repeat_tokens", lambda *args: made.append(original(*args)) or made[-1])
        table = analysis(model, ablations=True, **REPEATED)
    return table, [each.tokens for each in made]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layer", [0, 1])
def test_a_swap_is_the_pattern_without_one_lag_and_that_lag_alone_on_another_text(hybrid, scored, layer):
    """Of the largest in a recurrent layer and in one of attention, from passes with hooks to the pattern."""
    table, (own, other) = scored
    table = table[table["layer"] == layer].set_index(["head", "kind"])["loss_change"]
    (head, kind), found = table.abs().idxmax(), table[table.abs().idxmax()]
    n = REPEATED["n_repeated"]
    lag = {"prefix_matching": n - 1, "previous_token": 1, "duplicate_token": n, "current_token": 0}[kind]
    there = torch.diag(torch.ones(2 * n - lag), -lag)
    there[: n if lag >= n - 1 else 1] = 0  # only these queries are scored
    place, head = place_of(hybrid, layer, head)
    z_name, pattern, v_name = (f"{place}hook_{name}" for name in ("z", "pattern", "v"))
    v_name = v_name if v_name in hybrid.hook_dict else f"blocks.{layer}.attn.hook_values"  # latent attention
    seen = {}

    def outputs(change):
        """z of a pass over the text in which the pattern is multiplied by ``change``."""
        hooks = [(z_name, lambda z, hook: seen.__setitem__("z", z.clone())), (pattern, lambda a, hook: a * change)]
        hybrid.run_with_hooks(own, fwd_hooks=hooks)
        return seen["z"][:, :, head]

    hybrid.run_with_hooks(other, fwd_hooks=[(v_name, lambda v, hook: seen.__setitem__("v", v.clone()))])
    swapped = outputs(1 - there)
    with hybrid.hooks(fwd_hooks=[(v_name, lambda v, hook: seen["v"])]):
        swapped = swapped + outputs(there)

    def replace(z, hook):
        z = z.clone()
        z[:, :, head] = swapped
        return z

    def loss(hooks):
        log_p = hybrid.run_with_hooks(own, fwd_hooks=hooks)[:, n:-1].double().log_softmax(dim=-1)
        return -float(log_p.gather(-1, own[:, n + 1 :, None]).mean())

    expected = loss([(z_name, replace)]) - loss([])
    assert abs(found - expected) < LAW and abs(expected) > 1e-6  # the largest of its layer


@pytest.mark.one_in(2)
def test_linked_shares_of_a_hybrid_are_what_a_head_writes_without_a_tokens_value(hybrid):
    """c of the linked view, from two passes: W_O of a head's output, and of its output with a prompt token's value zero."""
    layer, position, at = 0, 2, len(PROMPT) + 1
    tokens, seen = torch.cat([PROMPT, NEXT])[None], {}
    rows = {}
    from kvlens.analyses.bias.positions import visit_shares

    visit_shares(hybrid, PROMPT, NEXT, lambda of, first, w: rows.setdefault(of, w))
    *_, (z_name, n_heads) = head_hooks(hybrid, layer, "hook_z").items()
    v_name = z_name.removesuffix("z") + "v"
    writes = output_weights(hybrid, layer)[-n_heads:].double()
    factor = direct_path(hybrid, tokens[0]).layers[layer].factor[at, -n_heads:]

    def zero(v, hook):
        v = v.clone()
        v[:, position] = 0
        return v

    for name, hooks in (("whole", []), ("without", [(v_name, zero)])):
        keep = (z_name, lambda z, hook, name=name: seen.__setitem__(name, z[0, at].double()))
        hybrid.run_with_hooks(tokens, fwd_hooks=[*hooks, keep])
    whole, without = (torch.einsum("hd,hdm->hm", seen[name] * factor, writes) for name in ("whole", "without"))
    outputs = []
    path = direct_path(hybrid, tokens[0], lambda layer, read: outputs.append(read.z))
    total = 0.0
    for each, (z, of) in enumerate(zip(outputs, path.layers, strict=True)):
        z = z[0, at].double() if of.factor is None else z[0, at].double() * of.factor[at]
        total += float(torch.einsum("hd,hdm->hm", z, output_weights(hybrid, each).double()).norm(dim=1).sum())
    expected = ((whole - without) * whole).sum(dim=1) / whole.norm(dim=1) / total
    assert relative_error(rows[layer][-n_heads:, 1, position], expected) < LAW


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["gpt2", "gptj", "opt", "llama"])
def test_contributions_are_those_of_the_hooked_model(family, both_of):
    """On the text alone, behind a prompt, and under a bias."""
    for per_head, prompt in itertools.product((False, True), (None, PROMPT, "converted")):
        tables = []
        for model in both_of(family):
            given = convert_prompt(model, PROMPT) if prompt == "converted" else prompt
            tables.append(an.layer_contributions(model, given, NEXT, tokens=[5], per_head=per_head))
        assert_frame_equal(*tables, rtol=LAW, atol=LAW)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1_direct", "kimi_linear", "gpt_oss"])
def test_contributions_add_up_to_the_logits(family, bridge_of):
    model = bridge_of(family)
    bias, answer = convert_prompt(model, PROMPT), 3
    table = an.layer_contributions(model, bias, NEXT, tokens=[answer], per_head=True)
    with model.kv_bias(bias):
        logits = model(NEXT[None])[0].double()
    sums = table[table["target"] == "chosen"].groupby("position")[["logit", "residual_share"]].sum()
    expected = (logits[:, answer] - logits.mean(dim=-1)).numpy()
    assert abs(sums["logit"].to_numpy() - expected).max() < LAW * abs(logits).max()
    assert abs(sums["residual_share"] - 1).max() < LAW
    heads = table[(table["component"] == "attention_bias") & (table["position"] == 0) & (table["target"] == "next")]
    assert heads.groupby("layer")["head"].count().tolist() == heads_per_layer(model)
    assert (heads.groupby("layer")["norm"].max() > 0).all()


@pytest.mark.parametrize("family", ["gemma3", "olmo_hybrid", "minimax", "granite_hybrid", "falcon_h1"])
def test_contributions_are_refused_behind_norms_and_factors(family, bridge_of):
    model = bridge_of(family)
    with pytest.raises(IndirectHeads, match="not the sum of its attention"):
        an.layer_contributions(model, PROMPT, NEXT)
    assert an.linked_shares(model, PROMPT, NEXT).by_prompt.isfinite().any()


def test_norms_before_and_after_the_attention_are_folded_into_its_weights():
    plain = tiny_hf_model("gemma3")
    for block in plain.model.layers:
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            torch.nn.init.normal_(norm.weight)
    model = KVTransformerBridge.boot_transformers(plain)
    for block, found in zip(plain.model.layers, head_matrices(model), strict=True):
        attn = block.self_attn
        values = attn.v_proj.weight.unflatten(0, (3, 10)).mT.repeat_interleave(2, dim=0)
        assert relative_error(found.W_V, values * (1 + block.input_layernorm.weight)[:, None]) < LAW  # Gemma's gains
        output = attn.o_proj.weight.mT.unflatten(0, (6, 10))
        assert relative_error(found.W_O, output * (1 + block.post_attention_layernorm.weight)) < LAW


def test_an_ablation_of_heads_that_lie_in_one_axis(bridge_of):
    """In Nemotron-H's attention; by a whole pass in which one head's part of the axis comes from the donor's."""
    model, at, n = bridge_of("nemotron_h"), "blocks.1.attn.hook_z", REPEATED["n_repeated"] - 1
    table, (tokens, donors) = scored_of(model, an.induction_verdicts)
    seen, losses = {}, []
    model.run_with_hooks(donors, fwd_hooks=[(at, lambda z, hook: seen.update(z=z))])
    width = seen["z"].shape[-1] // heads_per_layer(model)[1]
    other = torch.cat([seen["z"][..., :width], torch.full_like(seen["z"][..., width:], torch.nan)], dim=-1)
    for hooks in ([], [(at, lambda z, hook: other.where(other.isfinite(), z))]):
        log_p = model.run_with_hooks(tokens, fwd_hooks=hooks)[:, -n - 1 : -1].log_softmax(dim=-1)
        losses.append(-log_p.gather(-1, tokens[:, -n:, None]).mean())
    found = table.set_index(["layer", "head"])["ablation_loss_change"][1, 0]
    assert seen["z"].dim() == 3 and found != 0 and abs(found - float(losses[1] - losses[0])) < LAW


def test_verdicts_on_hybrids_and_behind_norms(hybrid, bridge_of):
    table = an.induction_verdicts(hybrid, **REPEATED)
    assert table.groupby("layer")["head"].count().tolist() == heads_per_layer(hybrid)
    assert table["k_composition_layer"].isna().all()
    assert table["logit_attribution"].notna().all()
    assert an.induction_verdicts(bridge_of("gemma3"), **REPEATED)["logit_attribution"].isna().all()


@pytest.mark.one_in(2)
def test_the_attribution_of_heads_is_what_their_layer_adds_to_the_logit(hybrid, scored):
    """In the last layer: over heads, what attention contributes to the centered logits of the next tokens."""
    _, (tokens, _) = scored
    table = an.induction_verdicts(hybrid, **REPEATED)
    n, expected = REPEATED["n_repeated"], []
    for text in tokens:
        parts = an.layer_contributions(hybrid, None, text)
        parts = parts[(parts["component"] == "attention_input") & (parts["layer"] == 2) & (parts["target"] == "next")]
        expected.append(parts[parts["position"].between(n, 2 * n - 2)]["logit"].mean())
    found = table[table["layer"] == 2]["logit_attribution"].sum()
    assert abs(found - sum(expected) / len(expected)) < LAW * max(1.0, abs(found))


def test_heads_of_two_kinds_in_one_layer_are_read_one_by_one(bridge_of):
    """Each writes, in a pass under the whole prompt, what it writes where its layer reads the prompt without a part."""
    model, gone, answer = bridge_of("falcon_h1"), [(3, 6)], some_tokens(2, seed=7)
    table = an.reading_layers(model, PROMPT, NEXT, answer=answer, without=gone)
    falls = table[table["part"] == "head"].set_index(["layer", "head"])["fall"]
    own, other = convert_prompt(model, PROMPT[:-1]), convert_prompt(model, PROMPT[:-1], without=gone)
    text = torch.cat([PROMPT[-1:], NEXT, answer[:-1]])[None]

    def log_p(hooks=()):
        with model.kv_bias(own):
            logits = model.run_with_hooks(text, fwd_hooks=list(hooks))
        return float(logits[0, -2:].log_softmax(dim=-1).gather(-1, answer[:, None]).sum())

    whole, n_layers = log_p(), len(heads_per_layer(model))
    for layer in range(n_layers):
        with model.kv_bias(own.exchange_layers(other, torch.arange(n_layers)[None] == layer)):
            written = model.run_with_cache(text)[1]
        for head in range(heads_per_layer(model)[layer]):
            place, number = place_of(model, layer, head)
            n_heads = head_hooks(model, layer, "hook_z")[f"{place}hook_z"]

            def put(z, hook, number=number, n_heads=n_heads, written=written):
                z, others = (x.reshape(*x.shape[:2], n_heads, -1) for x in (z.clone(), written[hook.name]))
                z[:, :, number] = others[:, :, number]
                return z.reshape(written[hook.name].shape)

            assert abs(falls[layer, head] - (whole - log_p([(f"{place}hook_z", put)]))) < LAW * abs(whole)

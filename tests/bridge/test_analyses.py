"""Analyses on the bridge, where HookedKVTransformer runs no such model: sums equal wholes. The others: test_front_ends.py."""

import pytest
import torch
from bridge_models import some_tokens
from precision import LAW, relative_error

from kvlens import KVLensError, convert_prompt
from kvlens import analyses as an
from kvlens.model import direct_path, output_weights

pytestmark = pytest.mark.usefixtures("without_gradients")

PROMPT, TEXT = some_tokens(11), some_tokens(4, seed=1)
DIRECT = ("gpt2", "qwen3_5", "gpt_oss", "llama")
"""Families whose heads write to the residual stream directly."""


@pytest.fixture(scope="module", params=["qwen3_5", "olmo_hybrid", "falcon_h1", "gemma3", "gpt_oss"])
def family(request):
    return request.param


def test_every_head_has_its_row(model):
    bias = convert_prompt(model, PROMPT)
    heads = [(layer, head) for layer in range(3) for head in range(bias.n_heads_of(layer))]
    table = an.bias_by_head(model, PROMPT, TEXT)
    assert list(zip(table["layer"], table["head"], strict=True)) == heads
    assert table["ablation_kl"].max() > 1e-3 and (table["bias_share"].between(0, 1)).all()  # it matters
    layers = an.bias_by_layer(model, PROMPT, TEXT)
    together = table.assign(square=table["b_kv_norm"] ** 2).groupby("layer")["square"].sum() ** 0.5
    assert (together - layers["b_kv_norm"]).abs().max() < LAW * together.max()


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
    n_convolutions = 0 if bias.recurrent is None else len(bias.recurrent.layers)
    assert (each["head"] == -1).sum() == n_convolutions == (each["part"] == "shift_state").sum()


def test_the_last_depth_is_the_model(model):
    table = an.prompt_by_depth(model, PROMPT, TEXT)
    log_p = model(torch.cat([PROMPT, TEXT])[None])[0, len(PROMPT) :].double().log_softmax(dim=-1)
    losses = -log_p[:-1].gather(-1, TEXT[1:, None])[:, 0]
    last = table[table["layer"] == 3]["loss_with"].to_numpy()[:-1]
    assert abs(losses.numpy() - last).max() < LAW


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

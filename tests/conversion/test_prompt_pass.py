"""Softmax prompts with every key kept: logits equal those with the prompt in context, in bounded memory for any length.

The one loop of gradient steps, which is known by hand, and the effects of heads on the logits, by finite differences.
"""

import math
from functools import partial

import pytest
import torch
from large_scores import REAL, scaled_up
from precision import LAW, float64, relative_error
from small_models import SOFTMAX, by_steps, model_of, peaked, sharp, small_model, tokens
from tiny_hf import tiny_hf_model
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from kvlens import HookedKVTransformer, KVBias, KVLensError, KVShiftConfig, convert_prompt, counterfactuals
from kvlens.conversion import AttentionMatching, KVzip, Landmark, gradients
from kvlens.conversion.gradients import descend, effects_on_logits, logit_metrics
from kvlens.model import streaming
from kvlens.papers.iclca.logits import context_of, prompted_logits


def with_and_without(model, prompt, text, bias) -> float:
    """Relative error of the logits of ``text`` with the bias, against those with the prompt in context."""
    with torch.no_grad():
        whole = model(torch.cat([prompt, text], dim=1))[:, prompt.shape[1] :]
        with model.kv_bias(bias):
            return relative_error(model(text), whole)


@pytest.mark.parametrize("architecture", ["olmoe", "olmo3"])
def test_norms_over_all_heads_act_under_a_bias_too(architecture):
    """TransformerLens applies them behind hook_q and hook_k. Without the norms it was off by 1."""
    plain = dict(fold_ln=False, center_writing_weights=False, center_unembed=False)
    with float64():
        hf_model = tiny_hf_model(architecture, seed=3)
        model = HookedKVTransformer.from_pretrained("tiny", hf_model=hf_model, dtype="float64", **plain)
    tokens = torch.randint(0, 300, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        shifted = HookedKVTransformer.from_hooked_transformer(model, kv_shift=KVShiftConfig(init="identity"))
        assert relative_error(shifted(tokens), model(tokens)) < LAW
        normed = shifted.run_with_cache(tokens)[1]["blocks.0.attn.hook_k_shifted"]
        attn = shifted.blocks[0].attn
        k = shifted.run_with_cache(tokens)[1]["blocks.0.attn.hook_k"].flatten(2)
        k = torch.nn.functional.rms_norm(k, k.shape[-1:], attn.k_norm.w, model.cfg.eps)
        assert relative_error(normed, k.view_as(normed)) < LAW  # the shift comes after the norm
    prompt, text = tokens[:, :11], tokens[:, 11:]
    assert with_and_without(model, prompt, text, convert_prompt(model, prompt)) < LAW


def test_a_bidirectional_model_has_no_bias():
    model = small_model(attention_dir="bidirectional")
    with pytest.raises(KVLensError, match="bidirectional attention the prompt's own keys depend on the text after it"):
        convert_prompt(model, tokens(1, 5))


@pytest.mark.parametrize("kind", ["rotary, grouped", "alibi", "learned", "shifted"])
def test_prompts_of_unequal_length_are_those_of_each_alone(kind):
    model, prompt = model_of("softmax", kind), tokens(1, 7).expand(2, -1)
    both = convert_prompt(model, counterfactuals(model, prompt[0], [[], [(4, 7)]], positions="closed"))
    assert both.position_offset.tolist() == [7, 4]
    for row, length in ((0, 7), (1, 4)):
        text = tokens(1, 6, seed=3)
        assert with_and_without(model, prompt[row : row + 1, :length], text, both.select_prompt(row)) < 1e-12
    text = tokens(2, 6, seed=3)
    with torch.no_grad(), model.kv_bias(both):
        new = model(text)
    assert relative_error(new[1], model(torch.cat([prompt[1:, :4], text[1:]], dim=1))[0, 4:]) < 1e-12


@pytest.fixture
def data_if_needed(request, kind):
    return request.getfixturevalue("outside_data") if kind == "stories260K" else None


SCALED = [*((kind, "QK") for kind in REAL), *zip(REAL, "QK" * 4, strict=True)]
"""Longer queries and longer keys give the same scores: each model has one of the two. The next test takes them as they are."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "which"), SCALED)
def test_exact_on_real_models(kind, which, data_if_needed):
    """Queries and keys 20 times as long: scores of up to 5,000, of both up to 100,000. TransformerLens' cache says it, too."""
    prompts, texts = tokens(3, 11), tokens(3, 13, seed=1)
    with torch.no_grad(), scaled_up(kind, torch.float64, which, data_if_needed) as model:
        whole, bias = model(torch.cat([prompts, texts], dim=1))[:, prompts.shape[1] :], convert_prompt(model, prompts)
        cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", len(prompts))
        real = torch.ones(len(prompts), 24, dtype=torch.long)  # or a drawn token that pads is none
        model(prompts, past_kv_cache=cache, attention_mask=real[:, :11])
        cached = model(texts, past_kv_cache=cache, attention_mask=real[:, 11:])
        with model.kv_bias(bias):
            converted = model(texts)
    assert relative_error(converted, whole) < LAW and relative_error(cached, whole) < LAW


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", REAL)
@pytest.mark.parametrize("which", ["", "QK"])
def test_a_converted_prompt_is_as_near_to_float64_as_the_prompt_itself(kind, which, data_if_needed):
    """The median of 16 prompts: of single ones the error scatters, since with queries and keys 20 times as long two scores of
    100,000 may be a tie in float32. Measured: 0.5 to 1.2 of the plain pass's, of four times allowed."""
    prompt, text = tokens(16, 11), tokens(16, 13, seed=1)
    both = torch.cat([prompt, text], dim=1)
    with torch.no_grad(), scaled_up(kind, torch.float64, which, data_if_needed) as double:
        true = double(both)[:, prompt.shape[1] :]
    with torch.no_grad(), scaled_up(kind, torch.float32, which, data_if_needed) as single:
        for steps in (True, False):
            with by_steps(single, steps):
                plain = single(both)[:, prompt.shape[1] :].double()
                with single.kv_bias(convert_prompt(single, prompt)):
                    converted = single(text).double()
            off_plain, off = (((x - true).norm(dim=(1, 2)) / true.norm(dim=(1, 2))).median() for x in (plain, converted))
            assert float(off) < 4 * float(off_plain), steps


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, "exact") for kind in SOFTMAX),
        *((kind, "landmark") for kind in ("rotary, grouped", "alibi", "shifted", "sinks")),
    ],
)
def test_a_pass_with_every_hook_says_what_bare_ones_say(kind, method):
    """With the two summands of z apart, that is, where bare passes have one softmax over the keys of both."""
    model = model_of("softmax", kind)
    prompt, text = tokens(2, 7), tokens(2, 9, seed=1)
    options = (
        {} if method == "exact" else dict(method=method, n_features=3, key_steps=2, n_continuations=2, continuation_length=6)
    )
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    real = mask.bool()
    with torch.no_grad(), model.kv_bias(convert_prompt(model, prompt, verbose=False, **options)):
        hooked, cache = model.run_with_cache(text, attention_mask=mask)
        assert "blocks.1.attn.hook_z_bias" in cache
        for steps in (True, False):
            with by_steps(model, steps):
                assert relative_error(model(text, attention_mask=mask)[real], hooked[real]) < 1e-12
                cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2)
                pieces = ((0, 5), (5, 8), (8, 9))
                parts = [model(text[:, a:b], attention_mask=mask[:, a:b], past_kv_cache=cache) for a, b in pieces]
                assert relative_error(torch.cat(parts, dim=1)[real], hooked[real]) < 1e-12


def test_hooks_of_a_biased_softmax_model():
    model = model_of("softmax", "rotary, grouped")
    prompt, text = tokens(1, 7), tokens(1, 4, seed=1)
    bias = convert_prompt(model, prompt)
    with torch.no_grad(), model.kv_bias(bias):
        _, cache = model.run_with_cache(text)
    at = "blocks.1.attn."
    assert cache[at + "hook_b_kv"].shape == (1, 6, 7, 6)  # query heads
    assert cache[at + "hook_phi_q"].shape == (1, 4, 6, 7)
    whole = model.run_with_cache(torch.cat([prompt, text], dim=1))[1]
    pattern = whole["pattern", 1][:, :, 7:]
    from_prompt = torch.einsum("bhij,bjhd->bihd", pattern[..., :7], whole["v", 1][:, :7].repeat_interleave(2, dim=2))
    torch.testing.assert_close(cache[at + "hook_z_bias"], from_prompt, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(cache["pattern", 1], pattern[..., 7:], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["rotary", "rotary, grouped"])
@pytest.mark.parametrize("batch", [None, 2])
def test_what_hooks_make_of_the_old_bias_is_what_the_new_one_continues_from(kind, batch):
    """Tested by continuing from a bias without that head, under which the prompt is read alike."""
    model = model_of("softmax", kind)
    one, two = (tokens(batch or 1, n, seed=n) for n in (5, 4))
    one, two = (one, two) if batch else (one[0], two[0])
    old, text = convert_prompt(model, one), tokens(batch or 1, 6, seed=2)

    def ablate(b, hook):
        b[:, 3] = 0

    def logits(bias):
        with torch.no_grad(), model.kv_bias(bias):
            return model(text)

    rest = [(layer, head) for layer in range(2) for head in range(model.cfg.n_heads) if (layer, head) != (1, 3)]
    expected = logits(convert_prompt(model, two, initial=old.select(heads=rest)))
    hooks = [(f"blocks.1.attn.hook_b_{x}", ablate) for x in ("kv", "d")]
    assert relative_error(logits(convert_prompt(model, two, initial=old, fwd_hooks=hooks)), expected) < 1e-12
    whole = convert_prompt(model, two, initial=old)
    assert relative_error(logits(whole), expected) > 1e-3  # far above rounding
    looked = convert_prompt(model, two, initial=old, fwd_hooks=[("blocks.1.attn.hook_b_kv", lambda b, hook: None)])
    assert torch.equal(looked.stacked("b_kv"), whole.stacked("b_kv"))


TEXTS = dict(n_continuations=3, continuation_length=4, n_held_out=2)
METHODS = [
    Landmark(n_keys=3, key_steps=3, **TEXTS),
    AttentionMatching(n_keys=5, on_policy=True, **TEXTS),
    KVzip(n_keys=6, **TEXTS),
]
LOCAL = dict(use_local_attn=True, window_size=20, attn_types=["local", "global"])
KINDS = {"softmax, learned": {}, "softmax, shifted": {}, "softmax, alibi": LOCAL}


def in_little_memory(monkeypatch) -> list[int]:
    """Few scores and one head at a time; the result lists the lengths of the prompt's segments."""
    lengths, whole = [], streaming.tokens_at_once

    def observed(*of):
        lengths.append(whole(*of))
        return lengths[-1]

    monkeypatch.setattr(streaming, "NUMBERS_AT_ONCE", 3000)
    monkeypatch.setattr("kvlens.conversion.prompt_pass.NUMBERS_AT_ONCE", 3000)
    monkeypatch.setattr(streaming, "tokens_at_once", observed)
    monkeypatch.setattr("kvlens.ops.landmarks.NUMBERS_AT_ONCE", 1)
    return lengths


def assert_same(a: KVBias, b: KVBias) -> None:
    for x, y in (
        (a.stacked("b_kv"), b.stacked("b_kv")),
        (a.stacked("b_d"), b.stacked("b_d")),
        (a.stacked("keys"), b.stacked("keys")),
        (a.stacked("last_k"), b.stacked("last_k")),
    ):
        assert relative_error(x, y) < LAW
    if a.fit is not None:
        assert relative_error(a.fit.head_output_error, b.fit.head_output_error) < LAW


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_method_converts_a_long_prompt_as_it_would_in_one_piece(method, monkeypatch):
    model, prompt = peaked("softmax, rotary"), tokens(2, 37)
    whole = convert_prompt(model, prompt, method=method, verbose=False)
    lengths = in_little_memory(monkeypatch)
    assert_same(convert_prompt(model, prompt, method=method, verbose=False), whole)
    assert 1 < lengths[0] < 37


@pytest.mark.parametrize("kind", KINDS)
def test_segments_of_a_prompt_are_the_prompt(kind, monkeypatch):
    """A second prompt after a first one: the segments read the bias that they continue, too."""
    model, prompt, more = peaked(kind, peak=1, **KINDS[kind]), tokens(1, 37), tokens(1, 29, seed=1)
    first = convert_prompt(model, prompt)
    both, hooked = convert_prompt(model, more, initial=first), []
    in_little_memory(monkeypatch)
    assert_same(convert_prompt(model, prompt), first)
    assert_same(convert_prompt(model, more, initial=first), both)
    convert_prompt(model, prompt, fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: hooked.append(x.shape[1]))])
    assert hooked == [37]  # a hook sees the whole prompt


def steps_of(loss_on, free, **changes):
    how = dict(n_rows=5, rows_per_step=3, steps=4, learning_rate=0.1, generator=torch.Generator().manual_seed(2))
    return [loss.item() for loss in descend([free], loss_on, **{**how, **changes})]


def test_a_constant_slope_moves_by_the_rate_which_falls_along_a_cosine():
    """Adam under a constant gradient moves by the learning rate each step: 0.1 (1 + cos(pi t / steps)) / 2 at step t."""
    at = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    losses = steps_of(lambda rows: 2 * at, at)
    rates = [0.05 * (1 + math.cos(math.pi * t / 4)) for t in range(4)]
    places = [1.0 - sum(rates[:t]) for t in range(5)]
    # Adam's epsilon of 1e-8 beside a gradient of 2: a share of 5e-9 of each rate
    assert losses == pytest.approx([2 * place for place in places[:4]], abs=1e-8)
    assert abs(at.item() - places[4]) < 1e-8


def test_rows_are_drawn_without_replacement_and_again_each_step():
    at, read = torch.zeros(5, requires_grad=True), []

    def loss_on(rows):
        read.append(rows.tolist())
        return at[rows].sum()

    steps_of(loss_on, at)
    again = torch.Generator().manual_seed(2)
    assert read == [torch.randperm(5, generator=again)[:3].tolist() for _ in range(4)]
    assert all(len(set(rows)) == 3 for rows in read) and read[0] != read[1]
    read.clear()
    steps_of(loss_on, at, rows_per_step=9)
    assert all(sorted(rows) == [0, 1, 2, 3, 4] for rows in read)


EFFECTS_OF = {"softmax, rotary, grouped": {}, "softmax, alibi": dict(attn_scores_soft_cap=0.8)}
OWN_TEXTS = dict(reference="own", n_continuations=6, continuation_length=5, n_held_out=0)
STEP = 1e-5


@pytest.mark.parametrize("kind", EFFECTS_OF)
def test_the_effect_of_an_output_is_what_a_small_change_of_it_does(kind):
    model, texts = sharp(kind, gain=1, **EFFECTS_OF[kind]), tokens(3, 7, seed=1)
    bias = convert_prompt(model, tokens(1, 11)[0])
    found = effects_on_logits(model, bias, texts, [3, 4, 5])
    with model.kv_bias(bias), torch.no_grad():
        logits = model(texts)
        generators = [torch.Generator().manual_seed(seed) for seed in (3, 4, 5)]
        direction = torch.stack([torch.randn(logits.shape[1:], generator=each) for each in generators]).double()
        for layer, pos, head in ((0, 2, 1), (1, 6, 0)):
            for d in (0, 3):

                def moved(z, hook, by, at=(1, pos, head, d)):
                    z = z.clone()
                    z[at] += by
                    return z

                hooks = [[(f"blocks.{layer}.attn.hook_z", partial(moved, by=by))] for by in (STEP, -STEP)]
                up, down = (model.run_with_hooks(texts, fwd_hooks=hook) for hook in hooks)
                slope = (direction * (up - down) / logits.norm(dim=-1, keepdim=True)).sum() / (2 * STEP)
                # the step's square times a third derivative, and eps over the step
                assert float(found[layer][1, pos, head, d]) == pytest.approx(float(slope), rel=1e-7, abs=1e-9)


def test_metrics_are_means_of_products_by_prompt_and_group(monkeypatch):
    model, prompts = sharp("softmax, rotary, grouped", gain=1), tokens(2, 11)
    exact = convert_prompt(model, prompts)
    monkeypatch.setattr(gradients, "TOKENS_AT_ONCE", 4 * 5)
    teachers = []
    monkeypatch.setattr(Landmark, "fit", lambda self, teacher: teachers.append(teacher) or exact)
    convert_prompt(model, prompts, method=Landmark(n_keys=3, **OWN_TEXTS), verbose=False)
    metrics = logit_metrics(teachers[0])
    n_texts = teachers[0].seen[0].shape[1]
    flat = teachers[0].seen[0].flatten(0, 1)
    products = torch.zeros(2, 2, 3, model.cfg.d_head, model.cfg.d_head, dtype=torch.float64)
    for start in range(0, len(flat), 4):
        rows = range(start, min(start + 4, len(flat)))
        both = torch.stack([torch.tensor(row // n_texts) for row in rows])
        bias = exact.select_prompts(both)
        for layer, g in enumerate(effects_on_logits(model, bias, flat[start : rows[-1] + 1], [row % n_texts for row in rows])):
            for row, of_text in zip(rows, g, strict=True):
                for head in range(6):
                    products[layer, row // n_texts, head // 2] += of_text[:, head].T @ of_text[:, head]
    for layer, metric in enumerate(metrics):
        torch.testing.assert_close(metric, products[layer] / (n_texts * 5 * 2), rtol=1e-9, atol=1e-12)


def test_a_head_that_does_not_reach_the_logits_gets_no_keys():
    model, prompt = peaked("softmax, no norm", peak=6), tokens(1, 24)[0]
    last = model.blocks[-1]
    last.attn.W_O.data[0] = 0.0
    last.attn.W_O.data[0, :, 0] = 3.0  # head 0 of the last layer writes to one dimension only,
    last.mlp.W_in.data[0] = 0.0
    model.W_U.data[0] = 0.0  # which nothing reads
    n_keys = convert_prompt(model, prompt, method=Landmark(n_keys=4, key_steps=0, **OWN_TEXTS), verbose=False).fit.n_keys
    assert int(n_keys[-1, 0]) == 0
    assert 0 < int(n_keys.sum()) <= 4 * n_keys.numel()


def test_on_a_trained_model_they_leave_less_than_half_of_the_error():
    """Of docs-gpt2, than equal budgets."""
    model = HookedKVTransformer.from_zoo("docs-gpt2").eval().requires_grad_(False)
    prompt, texts = context_of(model, dict(n_prompt=32, n_text=16, n_texts=2), seed=0)
    old = prompted_logits(model, prompt, texts)
    error = {}
    for budget in ("equal", "logits"):
        at = dict(n_keys=4, key_steps=0, n_continuations=8, continuation_length=16, n_held_out=0)
        method = Landmark(budget=budget, **at)
        with model.kv_bias(convert_prompt(model, prompt, method=method, verbose=False)):
            new = model(texts, attention_mask=torch.ones_like(texts))
        error[budget] = float(((new - old).norm(dim=-1) / old.norm(dim=-1)).mean())
    assert error["logits"] < 0.5 * error["equal"]

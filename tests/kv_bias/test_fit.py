"""``bias.fit``: measured for exactly this bias, or unknown with what was done to it; None where nothing is approximate."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_models import linear_model, peaked, relative_error, small_model, tokens
from stacked_tensors import with_stacked

from kvlens import HookedKVTransformer, KVBias, carry_bias, combine, convert_prompt
from kvlens.conversion import TextOptions
from kvlens.conversion.prompt import PromptBatch
from kvlens.conversion.prompt_pass import convert_exactly
from kvlens.conversion.reference_queries import reference_text

PROMPT, OTHER, TEXT = tokens(1, 24)[0], tokens(1, 10, seed=3)[0], tokens(1, 12, seed=1)
FEW = dict(method="landmark", n_features=5, key_steps=2, n_continuations=9, continuation_length=6, verbose=False)


@pytest.fixture(scope="module")
def model() -> HookedKVTransformer:
    return peaked("softmax, rotary, grouped")


@pytest.fixture(scope="module")
def few(model) -> KVBias:
    return convert_prompt(model, PROMPT, **FEW)


@pytest.fixture(scope="module")
def exact(model) -> KVBias:
    return convert_prompt(model, PROMPT)


CHANGES = {
    "sum": lambda model, b, other: b + other,
    "difference": lambda model, b, other: b - other,
    "multiple": lambda model, b, other: 0.5 * b,
    "negative": lambda model, b, other: -b,
    "combination": lambda model, b, other: combine(b, weights=[2.0]),
    "without its shift state": lambda model, b, other: combine(b, shift_state="zero"),
    "selection": lambda model, b, other: b.select(heads=[(1, 2)]),
    "zeros": lambda model, b, other: b.zero_like(),
    "carried": lambda model, b, other: carry_bias(model, b, 3),
    "continued": lambda model, b, other: convert_prompt(model, OTHER, initial=b),
    "a multiple, back again": lambda model, b, other: (0.5 * b) * 2,
    "one of a batch of halves": lambda model, b, other: (0.5 * b).repeat(2).select_prompt(1),
    "some of a batch": lambda model, b, other: b.repeat(1).select_prompts(torch.tensor([0, 0])),
    "in a batch with another": lambda model, b, other: KVBias.batch([b, other]),
    "layers exchanged": lambda model, b, other: b.exchange_layers(b, torch.tensor([[True, False]])),
    "heads exchanged": lambda model, b, other: b.exchange_heads(other, [(0, 1)]),
}
"""Operations that make another bias, each with its own error."""
SAME = {
    "on its device": lambda b: b.to("cpu"),
    "detached": lambda b: b.detach(),
    "per query head": lambda b: b.per_query_head(),
    "everything selected": lambda b: b.select(layers=[0, 1]),
    "times 1": lambda b: 1 * b,
    "alone in a sum": lambda b: sum([b]),
    "one of a batch": lambda b: b.repeat(3).select_prompt(2),
    "in float32": lambda b: b.to(torch.float32),
}
EDITS = {
    "the same layers": lambda b: b.map_layers(lambda layer: layer),
    "parts halved": lambda b: b.map_layers(lambda layer: layer.each(lambda part: part.times(0.5))),
    "keys further away": lambda b: b.with_attention([part.further(1) for part in b.attention]),
    "log_scale": lambda b: with_stacked(b, log_scale=b.stacked("log_scale") + 1),
}


def is_unknown(fit) -> bool:
    figures = (fit.answers, fit.n_keys, fit.head_output_error, fit.mass_error)
    return bool(fit.history) and all(figure is None for figure in figures) and fit.rows() == [] and "error unknown" in repr(fit)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_done_to_a_fitted_bias_is_recorded_and_its_error_unknown(change, model, few, exact):
    assert few.fit.history == () and few.fit.answers is not None
    fit = change(model, few, exact.repeat(1).select_prompt(0)).fit
    assert is_unknown(fit)
    assert fit.method == "landmark" and fit.settings == few.fit.settings
    assert [part.answers.logits_error for part in fit.parts] == [few.fit.answers.logits_error]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_made_of_exact_biases_is_exact(change, model, exact):
    assert change(model, exact, exact).fit is None


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_leaves_a_bias_as_it_is_leaves_its_record(change, few, exact):
    fit = change(few).fit
    assert fit.history == ()
    assert float(fit.answers.lost_share) == float(few.fit.answers.lost_share)
    assert fit.rows() == few.fit.rows()
    assert change(exact).fit is None


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_layers_that_were_changed_are_approximate(edit, few, exact):
    for bias in (few, exact):
        edited = edit(bias)
        assert is_unknown(edited.fit)
        assert edited.fit.history == ("layers changed",)
    assert edit(few.select(layers=[0])).fit.history == ("6 of 12 heads selected", "layers changed")
    assert edit(exact).fit.method == "unknown"
    assert replace(few, n_prompt_tokens=3, record=few.fit).fit is few.fit


def test_rounding_to_a_half_type_is_recorded(few, exact):
    for bias in (few, exact):
        rounded = bias.to(torch.bfloat16).to(torch.float32)
        assert is_unknown(rounded.fit)
        assert rounded.fit.history == ("rounded to bfloat16",)


def test_fits_on_top_of_one_another_are_all_remembered(model, few):
    both = convert_prompt(model, OTHER, initial=few, **{**FEW, "n_features": 4})
    assert is_unknown(both.fit)
    assert both.fit.method == "several"
    assert [fit.settings["n_keys"] for fit in both.fit.parts] == [5, 4]
    three = convert_prompt(model, TEXT[0], initial=both, **FEW)
    assert len(three.fit.parts) == 3
    assert is_unknown((few + few).fit) and len((few + few).fit.parts) == 1
    assert is_unknown(convert_prompt(model, torch.stack([OTHER, OTHER]), initial=few).select_prompt(1).fit)


def test_a_long_sum_has_a_short_record(few):
    a, b = few, 0.5 * few
    for _ in range(30):
        a, b = b, a + b.select(layers=[0, 1])
        a, b = (few, b.select(layers=[0]).narrowed()) if b.d_phi > 200 else (a, b)
    assert len(b.fit.parts) == 1
    assert len(b.fit.history) < 10


def test_a_linear_bias_stays_exact_under_all_operations():
    model = linear_model()
    a, b = (convert_prompt(model, prompt) for prompt in (PROMPT, PROMPT.flip(0)))
    for bias in (a + b, a - b, 0.5 * a, a.select(layers=[0]), a.zero_like(), with_stacked(a, b_kv=a.stacked("b_kv").clone())):
        assert bias.fit is None
    assert convert_prompt(model, OTHER, initial=a).fit is None and carry_bias(model, a, 2).fit is None


def test_a_file_keeps_the_record(model, few, tmp_path):
    for name, bias in {
        "few": few,
        "done": few + convert_prompt(model, PROMPT, **{**FEW, "n_features": 3}).select(layers=[0]),
    }.items():
        bias.save(tmp_path / name)
        fit = KVBias.load(tmp_path / name).fit
        assert repr(fit) == repr(bias.fit)
        for mine, theirs in zip(fit.fits, bias.fit.fits, strict=True):
            assert mine.answers.to_dict() == theirs.answers.to_dict()
            assert mine.rows() == theirs.rows() and mine.settings == theirs.settings


def held_out(model, prompt: torch.Tensor, n: int, old: KVBias | None = None) -> torch.Tensor:
    """The texts that an error is measured on where the reference is the prompt: [text, pos]."""
    with contextlib.nullcontext() if old is None else model.kv_bias(old):
        exact = convert_exactly(model, PromptBatch(prompt[None], None, False), (), old, model.fingerprint())
    whole, options = convert_prompt(model, prompt[None], initial=old), TextOptions(n_held_out=n, continuation_length=6)
    return reference_text(model, PromptBatch(prompt[None], None, False), exact, whole, options, fits=False)[1][0]


@pytest.mark.parametrize("start", ["nothing", "the prompt's BOS", "what was converted before"])
def test_the_recorded_answers_are_those_of_the_definition(start, model, exact):
    """Token by token, with the prompt really in front."""
    model, old = peaked("softmax, rotary, grouped"), None
    if start == "the prompt's BOS":
        model.tokenizer = SimpleNamespace(bos_token_id=int(PROMPT[0]), padding_side="right")
    if start == "what was converted before":
        old = convert_prompt(model, OTHER)
    bias = convert_prompt(model, PROMPT, initial=old, reference="prompt", n_held_out=4, **FEW)
    before = PROMPT if old is None else torch.cat([OTHER, PROMPT])
    without = convert_prompt(model, before)
    kept = {"nothing": 0, "the prompt's BOS": 1, "what was converted before": len(OTHER)}[start]
    on = (torch.arange(len(before)) < kept).double()
    without = with_stacked(without, b_kv=on[:, None] * without.stacked("b_kv"), b_d=on * without.stacked("b_d"))
    relative, lost, effect, kl = [], 0.0, 0.0, []
    with torch.no_grad():
        for text in held_out(model, PROMPT, 4, old):
            p = model(torch.cat([before, text])[None])[0, len(before) :]
            with model.kv_bias(bias):
                c = model(text[None])[0]
            with model.kv_bias(without):
                w = model(text[None])[0]
            for p_i, c_i, w_i in zip(p, c, w, strict=True):
                relative.append(float((c_i - p_i).norm() / p_i.norm()))
                lost, effect = lost + float((c_i - p_i).square().sum()), effect + float((p_i - w_i).square().sum())
                kl.append(float((p_i.softmax(-1) * (p_i.log_softmax(-1) - c_i.log_softmax(-1))).sum()))
    found = bias.fit.answers
    assert found.to_json() == {"n_texts": 4, "text_length": 6, "without": start}
    expected = [sum(relative) / len(relative), (lost / effect) ** 0.5]
    assert [float(found.logits_error), float(found.lost_share)] == pytest.approx(expected, rel=1e-9)
    kl = torch.tensor(kl, dtype=torch.float64)
    expected = [float(kl.quantile(q)) for q in (0.5, 0.95)] + [float(kl.max())]
    assert [float(x) for x in (found.kl_median, found.kl_95, found.kl_worst)] == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_no_fit_has_seen_the_texts_that_answers_are_measured_on(model, few):
    """The prompt repeated and nine continuations are fitted; three more are read for the heads, and thrice for the answers."""
    assert few.fit.answers.n_texts == 3 and few.fit.n_held_out_tokens == 3 * 6
    assert few.fit.tokens == {"prompt": 24, "sampled": 12 * 6, "read": 24 + 9 * 6 + 4 * 3 * 6, "with gradients": 24 + 9 * 6}
    exact = convert_exactly(model, PromptBatch(PROMPT[None], None, False), (), None, model.fingerprint())
    seen, held_out, _ = reference_text(
        model, PromptBatch(PROMPT[None], None, False), exact, exact.bias, TextOptions(continuation_length=6)
    )
    assert [tuple(group.shape) for group in seen] == [(1, 1, 24), (1, 24, 6)]
    assert not {tuple(x) for x in seen[1][0].tolist()} & {tuple(x) for x in held_out[0].tolist()}


def test_measuring_can_be_turned_off_and_changes_nothing_else(model):
    off = convert_prompt(model, PROMPT, n_held_out=0, **FEW)
    assert off.fit.answers is None and off.fit.history == () and "answers" not in off.fit.seconds
    assert off.fit.tokens["read"] == 24 + 9 * 6 + 6  # one text for the heads
    one = convert_prompt(model, PROMPT, n_held_out=1, **FEW)
    assert one.fit.answers is not None and torch.equal(off.stacked("b_kv"), one.stacked("b_kv"))


def test_each_prompt_of_a_batch_has_its_own_error(model):
    prompts = torch.stack([PROMPT, PROMPT.flip(0)])
    both = convert_prompt(model, prompts, reference=TEXT[0], **FEW)
    assert both.fit.answers.logits_error.shape == (2,)
    assert both.fit.answers.logits_error.unique().numel() == 2
    one = both.select_prompt(1).fit.answers
    assert float(one.kl_worst) == float(both.fit.answers.kl_worst[1])
    assert float(one.kl_median) <= float(one.kl_95) <= float(one.kl_worst)


def test_a_half_precision_bias_is_measured_as_it_is_stored():
    """What bfloat16 makes of the numbers is in the error: with nearly every key the fit itself is off by less."""
    model = small_model(n_ctx=120, dtype=torch.bfloat16, positional_embedding_type="rotary")
    fit = convert_prompt(model, PROMPT, **{**FEW, "n_features": 23}).fit
    assert fit.history == ()
    assert 2.0**-12 < float(fit.answers.logits_error) < 2.0**-4
    # 2.6 of 2^-12; of numbers that are not rounded half of 2^-12
    assert float(fit.head_output_error[1].median()) > 2.0**-12


def test_the_recorded_error_tells_more_keys_and_polishing(model, few):
    def recorded(**changes) -> float:
        at = {**FEW, "key_steps": 0, "n_continuations": 40, **changes}
        return float(convert_prompt(model, PROMPT, **at).fit.answers.logits_error)

    few_keys = recorded(n_features=3)
    assert recorded(n_features=12) < 0.6 * few_keys
    assert recorded(n_features=3, polish_steps=20) < 0.9 * few_keys


def test_a_bias_on_a_fitted_one_is_not_called_exact_and_is_not(model, few):
    both = convert_prompt(model, OTHER, initial=few)
    with torch.no_grad(), model.kv_bias(both):
        converted = model(TEXT)
    with torch.no_grad():
        whole = model(torch.cat([PROMPT, OTHER, TEXT[0]])[None])[:, 34:]
    assert relative_error(converted, whole) > 1e-4  # far above rounding
    assert both.fit is not None

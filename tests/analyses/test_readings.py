"""With the prompt, without it, and with its conversion: three tables, each against values by hand and against the slow way;
exact to rounding is what the model's own pass is in its dtype, at any length."""

import math

import pandas as pd
import pytest
import torch
from analysis_models import (
    PENCIL_PROMPT,
    PENCIL_TEXT,
    PENCIL_WITH,
    PENCIL_WITHOUT,
    VARIANTS,
    bernoulli_kl,
    pencil_model,
    tokens,
)
from kvlens.analyses.predictions import text_logits
from kvlens.analyses.readings import SAMPLE, rounding_error
from small_models import sharp
from stacked_tensors import with_stacked
from tiny_text_model import tiny_text_model

from kvlens import HookedKVTransformer, convert_prompt, counterfactuals
from kvlens.analyses import conversion_error, prompt_by_depth, prompt_effect

PROMPT, TEXT = tokens(7), tokens(5, seed=1)
SOFT_CAPPED = "no shift"
MODELS = [*VARIANTS, SOFT_CAPPED, "softmax, learned", "softmax, shortformer", "softmax, rotary"]
ROUNDING = 17 * 2.3e-16  # a sum over the vocabulary of 17 in float64


def capped(name):
    return sharp(name, output_logits_soft_cap=0.1 if name == SOFT_CAPPED else -1.0)


def test_effects_by_hand():
    frame = prompt_effect(pencil_model(), PENCIL_PROMPT, PENCIL_TEXT)
    kls = [bernoulli_kl(a, b) for a, b in zip(PENCIL_WITH, PENCIL_WITHOUT, strict=True)]
    losses = [math.log(1 + math.exp(x)) for x in (PENCIL_WITH[0], PENCIL_WITHOUT[0])]  # of token 1, whose logit is 0
    expected = pd.DataFrame(
        {
            "position": [0, 0, 0, 1, 1, 1],
            "token": ["0"] * 3 + ["1"] * 3,
            "next_token": pd.Series(["1"] * 3 + [None] * 3, dtype="str"),
            "condition": ["with_prompt", "without_prompt", "converted"] * 2,
            "predicted_token": ["0"] * 6,
            "kl": [0, kls[0], 0, 0, kls[1], 0],
            "argmax_agrees": [True] * 6,
            "loss": [losses[0], losses[1], losses[0], math.nan, math.nan, math.nan],
        }
    )
    pd.testing.assert_frame_equal(frame, expected, rtol=1e-13, atol=1e-13)


def test_depths_by_hand():
    # the answer is token 1, whose logit is 0; that of token 0 is a tenth of the residual: 1 before the layer with or
    # without the prompt, and after it 7 with it and 2 without
    frame = prompt_by_depth(pencil_model(), PENCIL_PROMPT, PENCIL_TEXT).set_index(["layer", "position"])
    before, with_prompt, without = (math.log1p(math.exp(x)) for x in (0.1, 0.7, 0.2))
    columns = ["loss_with", "loss_without", "loss_change"]
    assert frame.loc[(0, 0), columns].tolist() == pytest.approx([before, before, 0], abs=1e-15)
    assert frame.loc[(1, 0), columns].tolist() == pytest.approx([with_prompt, without, without - with_prompt])
    assert frame.loc[(1, 0), "loss_change"] < 0  # this prompt harms


def test_a_doubled_bias_by_hand():
    model = pencil_model()
    frame = conversion_error(model, PENCIL_PROMPT, PENCIL_TEXT, bias=2.0 * convert_prompt(model, PENCIL_PROMPT))
    # b = 10: residuals 1 + (10 + 1) = 12 for 7, and 2 + 2 (10 + 5) = 32 for 22
    expected = pd.DataFrame(
        {
            "position": [0, 1],
            "token": ["0", "1"],
            "relative_error": [0.5 / 0.7, 1.0 / 2.2],
            "squared_error": [0.25, 1.0],
            "squared_norm": [0.49, 4.84],
            "max_abs_error": [0.5, 1.0],
            "argmax_agrees": [True, True],
            "rounding_error": 2.0**-54,
            "exact_to_rounding": False,
        }
    )
    pd.testing.assert_frame_equal(frame, expected, rtol=1e-14, atol=0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_against_the_slow_way(name):
    model, cap = capped(name), 0.1 if name == SOFT_CAPPED else None
    effect = prompt_effect(model, PROMPT, TEXT, baseline=PROMPT[:1]).set_index(["condition", "position"])
    by_depth = prompt_by_depth(model, PROMPT, TEXT, baseline=PROMPT[:1]).set_index(["layer", "position"])
    points = [*(f"blocks.{layer}.hook_resid_pre" for layer in range(2)), "blocks.1.hook_resid_post"]
    alone = convert_prompt(model, counterfactuals(model, PROMPT, [[(1, 7)]]))  # the text keeps its positions
    log_p = {}
    for condition, bias in (("with", convert_prompt(model, PROMPT)), ("without", alone)):
        with model.kv_bias(bias):
            _, cache = model.run_with_cache(TEXT[None], attention_mask=torch.ones_like(TEXT[None]))
        for depth, point in enumerate(points):
            logits = model.unembed(model.ln_final(cache[point]))[0]
            found = log_p[condition, depth] = (logits if cap is None else cap * (logits / cap).tanh()).log_softmax(dim=-1)
            losses = (-found[:4].gather(-1, TEXT[1:, None])[:, 0]).tolist()
            assert by_depth.loc[depth, f"loss_{condition}"].tolist()[:4] == pytest.approx(losses, rel=1e-9)
            assert by_depth.loc[depth, f"guess_{condition}"].tolist() == [str(int(row.argmax())) for row in found]
        assert effect.loc[f"{condition}_prompt", "loss"].tolist()[:4] == pytest.approx(losses, rel=1e-9)
    change = by_depth["loss_without"] - by_depth["loss_with"]
    pd.testing.assert_series_equal(by_depth["loss_change"], change, check_names=False, rtol=1e-9, atol=1e-12)
    assert by_depth["loss_change"].xs(4, level="position").isna().all()
    p, q = log_p["with", 2], log_p["without", 2]
    kl = (p.exp() * (p - q)).sum(dim=-1)
    assert effect.loc["without_prompt", "kl"].tolist() == pytest.approx(kl.tolist(), rel=1e-9, abs=ROUNDING)
    assert effect.loc["without_prompt", "argmax_agrees"].tolist() == (p.argmax(dim=-1) == q.argmax(dim=-1)).tolist()
    assert (effect.loc["converted", "kl"] < ROUNDING).all()


@pytest.mark.parametrize("baseline", [PROMPT[:0], PROMPT[:1], tokens(3, seed=2)], ids=len)
@pytest.mark.parametrize("name", MODELS)
def test_before_any_attention_the_prompt_changes_nothing(name, baseline):
    """The residual stream depends there on token and position alone, and the text has its positions with and without it."""
    changes = prompt_by_depth(capped(name), PROMPT, TEXT, baseline=baseline).set_index("layer")["loss_change"].dropna().abs()
    assert changes[0].max() < 17 * torch.finfo(torch.float64).eps  # a sum over the vocabulary of 17
    assert changes[2].max() > 1e-3  # far above rounding


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_prompt_is_exact_and_another_is_compared_with_the_prompt_itself(name):
    model, other = capped(name), tokens(7, seed=4)
    errors = conversion_error(model, PROMPT, TEXT)
    assert errors["relative_error"].max() < 1e-13 and errors["argmax_agrees"].all()  # 12 tokens, 2 layers, 2.2e-16
    bias = convert_prompt(model, other)
    whole, converted = (model(torch.cat([before, TEXT])[None])[0, 7:] for before in (PROMPT, other))
    wrong = conversion_error(model, PROMPT, TEXT, bias=bias)["relative_error"]
    expected = (converted - whole).norm(dim=-1) / whole.norm(dim=-1)
    assert wrong.tolist() == pytest.approx(expected.tolist(), rel=1e-9) and expected.min() > 1e-3  # far above rounding
    effect = prompt_effect(model, PROMPT, TEXT, bias=bias).set_index(["condition", "position"])
    p, q = (logits.log_softmax(-1) for logits in (whole, converted))
    kl = (p.exp() * (p - q)).sum(dim=-1)
    assert effect.loc["converted", "kl"].tolist() == pytest.approx(kl.tolist(), rel=1e-9, abs=ROUNDING)
    assert (effect.loc["with_prompt", "kl"].abs() < ROUNDING).all()
    assert effect.loc["converted", "argmax_agrees"].tolist() == (p.argmax(dim=-1) == q.argmax(dim=-1)).tolist()


def test_the_bos_stays_where_the_prompt_began_with_it():
    model = tiny_text_model(dtype=torch.float64)
    prompt, text = model.to_tokens("the widget")[0], model.to_tokens(" is green", prepend_bos=False)[0]
    assert int(prompt[0]) == model.tokenizer.bos_token_id
    by_default = prompt_effect(model, prompt, text)
    pd.testing.assert_frame_equal(by_default, prompt_effect(model, prompt, text, baseline=prompt[:1]))
    without_bos = prompt_effect(model, prompt[1:], text)
    pd.testing.assert_frame_equal(without_bos, prompt_effect(model, prompt[1:], text, baseline=prompt[:0]))
    assert "".join(by_default["token"][::3]) == " is green"


def test_a_baseline_equal_to_the_prompt_changes_nothing():
    assert (prompt_effect(sharp(), PROMPT, TEXT, baseline=PROMPT)["kl"] < ROUNDING).all()


def test_one_token_of_text_has_no_loss():
    frame = prompt_effect(sharp(), PROMPT, TEXT[:1])
    assert len(frame) == 3
    assert frame[["loss", "next_token"]].isna().all(axis=None) and frame["kl"].notna().all()


def verdict(model, prompt, text, bias=None) -> bool:
    return bool(conversion_error(model, prompt, text, bias=bias)["exact_to_rounding"].all())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("dtype", "seed"), [(torch.float32, 0), (torch.float32, 1), (torch.float64, 0)])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_conversion_is_exact_and_one_part_in_100_000_is_not(name, dtype, seed):
    model = sharp(name, dtype=dtype, seed=seed)
    prompt, text = tokens(15, seed), tokens(9, seed + 7)
    bias = convert_prompt(model, prompt)
    assert verdict(model, prompt, text, bias)
    off = {torch.float32: 1e-4, torch.float64: 1e-9}[dtype]  # a hundred times and more what rounding makes
    assert not verdict(model, prompt, text, with_stacked(bias, b_kv=(1 + off) * bias.stacked("b_kv")))


def test_the_verdict_does_not_depend_on_the_length():
    model = sharp(dtype=torch.float32)
    for n in (20, 200, 1200):
        prompt, text = tokens(n), tokens(9, 1)
        bias = convert_prompt(model, prompt)
        assert rounding_error(model, prompt, text) < 1e-6  # a bound that grows with the text is above this from 4 tokens on
        assert verdict(model, prompt, text, bias)
        assert not verdict(model, prompt, text, with_stacked(bias, b_kv=(1 + 1e-4) * bias.stacked("b_kv")))


def test_in_bfloat16_a_conversion_is_exact_and_a_lost_prompt_is_not():
    model = sharp(dtype=torch.bfloat16)
    prompt, text = tokens(15), tokens(9, 7)
    assert verdict(model, prompt, text)
    assert not verdict(model, prompt, text, convert_prompt(model, prompt).zero_like())


def test_the_measured_error_is_that_of_the_same_weights_in_float64():
    model = sharp(dtype=torch.float32)
    exact = sharp(dtype=torch.float64)
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    prompt, text = tokens(15), tokens(9, 7)
    own, judge = (text_logits(m, prompt, text).double() for m in (model, exact))
    expected = float((own - judge).norm() / judge.norm())
    assert rounding_error(model, prompt, text) == pytest.approx(expected, rel=1e-3)  # rotary tables in float32 or float64
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters()) and model.cfg.dtype == torch.float32


def test_a_long_text_is_sampled_at_its_end(monkeypatch):
    model, prompt, text = sharp(dtype=torch.float32), tokens(300), tokens(SAMPLE - 200, 1)
    together = torch.cat([prompt, text])[-SAMPLE:]
    assert rounding_error(model, prompt, text) == rounding_error(model, together[:200], together[200:])
    longer = torch.cat([tokens(77, 3), text, text])
    assert rounding_error(model, prompt, longer) == rounding_error(model, prompt[:0], longer[-SAMPLE:])


def test_a_bias_that_is_attached_is_read_in_float64_too():
    model = sharp(dtype=torch.float32)
    with model.kv_bias(convert_prompt(model, tokens(11, 5))):
        assert verdict(model, tokens(15), tokens(9, 7))
    assert isinstance(model, HookedKVTransformer) and model.attached_kv_bias is None

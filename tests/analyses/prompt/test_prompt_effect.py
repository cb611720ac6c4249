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
    random_model,
    tokens,
)
from tiny_text_model import tiny_text_model

from kvlens import convert_prompt, counterfactuals
from kvlens.analyses import prompt_effect

ROUNDING = 17 * 2.3e-16  # a sum over the vocabulary of 17 in float64


def test_by_hand():
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


@pytest.mark.parametrize("name", VARIANTS)
def test_against_the_slow_way(name):
    model, prompt, text = random_model(**VARIANTS[name]), tokens(7), tokens(5, seed=1)
    frame = prompt_effect(model, prompt, text, baseline=prompt[:1]).set_index(["position", "condition"])
    whole = model(torch.cat([prompt, text])[None])[0]
    with model.kv_bias(convert_prompt(model, counterfactuals(model, prompt, [[(1, 7)]]))):  # the text keeps its positions
        alone = model(text[None])[0]
    for i in range(5):
        p, q = whole[7 + i].softmax(-1), alone[i].softmax(-1)
        kl = float((p * (p / q).log()).sum())
        assert frame.loc[(i, "without_prompt"), "kl"] == pytest.approx(kl, rel=1e-9)
        assert frame.loc[(i, "without_prompt"), "argmax_agrees"] == bool(p.argmax() == q.argmax())
        assert frame.loc[(i, "converted"), "kl"] < ROUNDING
        if i < 4:
            assert frame.loc[(i, "with_prompt"), "loss"] == pytest.approx(-float(p[text[i + 1]].log()), rel=1e-12)
            assert frame.loc[(i, "without_prompt"), "loss"] == pytest.approx(-float(q[text[i + 1]].log()), rel=1e-12)


def test_a_conversion_that_is_not_exact_is_compared_with_the_prompt_itself():
    model, prompt, text = random_model(), tokens(7), tokens(5, seed=1)
    other = tokens(7, seed=4)
    frame = prompt_effect(model, prompt, text, bias=convert_prompt(model, other)).set_index(["condition", "position"])
    whole, converted = (model(torch.cat([before, text])[None])[0, 7:].log_softmax(-1) for before in (prompt, other))
    expected = (whole.exp() * (whole - converted)).sum(dim=-1)
    assert frame.loc["converted", "kl"].tolist() == pytest.approx(expected.tolist(), rel=1e-9)
    assert float(expected.min()) > 1e-6 and (frame.loc["with_prompt", "kl"].abs() < ROUNDING).all()
    agrees = whole.argmax(dim=-1) == converted.argmax(dim=-1)
    assert frame.loc["converted", "argmax_agrees"].tolist() == agrees.tolist()


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
    frame = prompt_effect(random_model(), tokens(7), tokens(5, seed=1), baseline=tokens(7))
    assert (frame["kl"] < ROUNDING).all()


def test_one_token_of_text_has_no_loss():
    frame = prompt_effect(random_model(), tokens(7), tokens(1))
    assert len(frame) == 3
    assert frame["loss"].isna().all()
    assert frame["next_token"].isna().all()
    assert frame["kl"].notna().all()

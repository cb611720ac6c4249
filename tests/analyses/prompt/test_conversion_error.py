import pandas as pd
import pytest
from analysis_models import PENCIL_PROMPT, PENCIL_TEXT, VARIANTS, pencil_model, random_model, tokens

from kvlens import convert_prompt
from kvlens.analyses import conversion_error


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
    pd.testing.assert_frame_equal(frame, expected, rtol=1e-14)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_converted_prompt_is_exact_and_a_lost_shift_state_is_not(name):
    model, prompt, text = random_model(**VARIANTS[name]), tokens(7), tokens(5, seed=1)
    frame = conversion_error(model, prompt, text)
    assert frame["relative_error"].max() < 1e-13  # 12 tokens, 2 layers, 2.2e-16
    assert bool(frame["argmax_agrees"].all())
    assert conversion_error(model, prompt, text, bias=convert_prompt(model, prompt).zero_like())["relative_error"].max() > 1e-3


def test_the_model_is_left_as_it_was():
    model, prompt, text = random_model(), tokens(7), tokens(5, seed=1)
    before = convert_prompt(model, tokens(3, seed=2))
    model.attach_kv_bias(before)
    assert conversion_error(model, prompt, text)["relative_error"].max() < 1e-13
    assert model.attached_kv_bias is before
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def test_softmax_attention_converts_exactly():
    errors = conversion_error(random_model(attention="softmax"), tokens(2), tokens(2))
    assert float((errors["squared_error"] / errors["squared_norm"]).max()) < 1e-20

"""Strings, tokens [pos] and [1, pos] are the same prompt and text to every analysis."""

import inspect

import pandas as pd
import pytest
import torch
from kvlens.analyses.batch.work import load_analysis
from kvlens.analyses.sequences import one_sequence, prompt_sequence
from tiny_text_model import PROMPT, TEXT, tiny_text_model

from kvlens import KVLensError, analyses, convert_prompt

OF_PROMPT_AND_TEXT = ("bias_by_head", "bias_by_layer", "bias_decomposition", "bias_positions", "conversion_error",
                      "prompt_effect", "bias_effects", "layer_contributions", "circuits")  # fmt: skip
CALLS = {
    **{name: getattr(analyses, name) for name in OF_PROMPT_AND_TEXT},
    "bias_ablation": lambda model, prompt, text: analyses.bias_ablation(model, prompt, text, [[(0, 1)]]),
    "activation_patching": lambda model, prompt, text: analyses.activation_patching(model, prompt, TEXT, text, points=["b_kv"]),
    "layer_contributions of a text": lambda model, prompt, text: analyses.layer_contributions(model, None, prompt),
    "dual_losses": lambda model, prompt, text: analyses.dual_losses(model, prompt),
    "bias_singular_values": lambda model, prompt, text: analyses.bias_singular_values(model, prompt),
}
TAKE_A_BIAS = ("bias_ablation", "bias_decomposition", "bias_effects", "bias_singular_values", "circuits")
"""As good as the prompt; elsewhere the prompt's own tokens are read."""


@pytest.fixture(scope="module")
def model():
    return tiny_text_model()


def forms(model, text, **bos):
    tokens = model.to_tokens(text, truncate=False, **bos)
    return text, tokens[0], tokens


def all_equal(frames) -> None:
    first, *others = frames
    for other in others:
        pd.testing.assert_frame_equal(first, other, check_exact=True)


@pytest.mark.parametrize("name", CALLS)
def test_prompt_and_text_in_any_form(model, name):
    """A string that is read first gets the model's BOS, one behind a prompt gets none."""
    pairs = [*zip(forms(model, PROMPT), forms(model, TEXT, prepend_bos=False), strict=True)]
    if name in TAKE_A_BIAS:
        pairs.append((convert_prompt(model, PROMPT), TEXT))
    all_equal([CALLS[name](model, prompt, text) for prompt, text in pairs])


def test_the_other_first_arguments(model):
    prompt, text = forms(model, PROMPT), forms(model, TEXT, prepend_bos=False)
    all_equal([analyses.layer_contributions(model, convert_prompt(model, PROMPT), y) for y in text])
    details = [analyses.head_details(model, x, y) for x, y in zip(prompt, text, strict=True)]
    assert all(d.prompt == details[0].prompt for d in details)


def test_bos_as_convert_prompt_has_it(model):
    assert prompt_sequence(model, "x", PROMPT)[0] == model.tokenizer.bos_token_id
    bias = convert_prompt(model, PROMPT)
    assert torch.equal(prompt_sequence(model, "x", TEXT, bias), one_sequence(model, "x", TEXT))
    with model.kv_bias(bias):
        assert torch.equal(prompt_sequence(model, "x", TEXT), one_sequence(model, "x", TEXT))


PROMPT_ONLY = ("dual_losses", "dual_demonstrations", "dual_bound")
NEED_TOKENS = (
    *("bias_by_head", "bias_by_layer", "bias_positions", "prompt_by_depth", "prompt_effect", "conversion_error"),
    *("prompt_copies", "head_details", "linked_shares"),
)


@pytest.mark.unhooked
@pytest.mark.parametrize("name", [*NEED_TOKENS, *PROMPT_ONLY])
def test_where_the_prompts_own_tokens_are_read_a_bias_is_refused(model, name):
    texts = () if name in PROMPT_ONLY else (TEXT,)
    with pytest.raises(KVLensError, match="prompt: this analysis reads the prompt's own tokens, and a bias has none"):
        getattr(analyses, name)(model, convert_prompt(model, PROMPT), *texts)


def test_every_analysis_takes_prompt_and_text_by_these_names():
    for name in analyses.ANALYSES:
        analysis = load_analysis(name)
        parameters = list(inspect.signature(getattr(analyses, name)).parameters)
        assert not analysis.inputs or "prompt" in parameters, name
        assert not any(parameter.endswith("_tokens") for parameter in parameters), name
        if analysis.needs_text:
            assert parameters[:2] == ["model", "prompt"] and "text" in parameters[2:4], name

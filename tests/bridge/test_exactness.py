"""Precision on the bridge: in float32 and in half precision a converted prompt is as exact as Transformers' own cache."""

import pytest
import torch
from bridge_models import FAMILIES, LIKE_THE_OTHERS, PROMPT, TEXT, some_tokens
from exactness import logits_of, models_of
from precision import relative_error, share
from stacked_tensors import with_stacked
from tiny_hf import tiny_hf_model

from kvlens import KVTransformerBridge, convert_prompt
from kvlens import analyses as an
from kvlens.errors import IndirectHeads

pytestmark = pytest.mark.usefixtures("without_gradients")

DENSE = ("bamba", "gemma3", "gpt2", "gptj", "opt", "llama", "olmo_hybrid", "qwen3_5")
"""Without experts: a rounding may send a token to another one."""
IN_HALF = [*((name, torch.bfloat16) for name in DENSE), *((f"olmo{n}", torch.float16) for n in ("", 2, 3))]
"""OLMo's queries and keys are rotated in float32."""


def errors(found, exact):
    return [relative_error(*pair) for pair in zip(found, exact, strict=True)]


def largest_share(models, padded):
    """Of the largest error under a converted prompt, in the bound by Transformers' cache, cut and continued."""
    logits = logits_of(models, 0, padded)
    return share(max(errors(logits.ours, logits.exact)), errors(logits.theirs, logits.exact))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in LIKE_THE_OTHERS)])
def test_as_exact_as_transformers_own_cache(family):
    """Padded left and right, prompts of unequal length; in float64 test_bridge.py holds each family without padding."""
    assert largest_share(models_of(family), padded=True) < 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("family", "dtype"), IN_HALF)
def test_as_exact_in_half_precision(family, dtype):
    models = models_of(family, dtype)
    assert largest_share(models, padded=True) < 1
    seen = models.bridge.run_with_cache(TEXT)[1]
    assert {seen[name].dtype for name in seen if name.endswith("hook_rot_q")} <= {dtype}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["bamba", "minimax", "olmo_hybrid", "qwen3_5"])
def test_states_beyond_half_precision_are_read_in_float32(family):
    """z exceeds 65,504, and the norm behind it brings it back; Transformers is given texts, whose states are small."""
    models = models_of(family, torch.float16)
    logits = []
    for model in (KVTransformerBridge.boot_transformers(tiny_hf_model(family).half().float(), verify=False), models.bridge):
        bias = convert_prompt(model, PROMPT)
        assert bias.dtype == model.W_E.dtype
        with model.kv_bias(with_stacked(bias, state=1e6 * bias.stacked("state").float())):
            logits.append(model(TEXT))
    assert logits[1].dtype == torch.float16 and logits[1].isfinite().all()
    theirs = logits_of(models, 0, padded=False)
    assert share(relative_error(logits[1], logits[0]), errors(theirs.whole, theirs.exact)) < 1


@pytest.mark.parametrize("family", ["falcon_h1", "llama", "bamba", "nemotron_h", "gemma3", "gpt_oss", "olmo_hybrid"])
def test_padding_in_front_of_a_float64_model_is_finite(family):
    """Transformers' softmax in float32 made NaN of a row of padding, which reached every row."""
    plain, mask = tiny_hf_model(family).double(), torch.ones_like(TEXT)
    plain.config._experts_implementation = "eager"  # grouped products have no float64
    mask[0, :4] = 0
    model = KVTransformerBridge.boot_transformers(plain, verify=False)
    padded = model(TEXT, attention_mask=mask)
    with model.kv_bias(convert_prompt(model, PROMPT[0])):
        under = model(TEXT, attention_mask=mask)
    assert bool(padded.isfinite().all()) and bool(under.isfinite().all())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rounding_in_half_precision_is_no_norm_behind_the_heads(family):
    """Where layers add little to a large residual stream, rounding it changes it as much as they do."""
    plain, text = tiny_hf_model(family), some_tokens(60)
    plain.model.embed_tokens.weight *= 40
    model = KVTransformerBridge.boot_transformers(plain.to(torch.bfloat16))
    if family == "llama":
        assert an.layer_contributions(model, None, text)["norm"].notna().all()
    else:
        with pytest.raises(IndirectHeads):
            an.layer_contributions(model, None, text)

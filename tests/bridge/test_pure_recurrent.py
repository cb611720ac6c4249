"""Models without attention (Mamba-2, Mamba, Falcon-Mamba) on the bridge: its bias is the states alone."""

import pytest
import torch
from bridge_models import N_PROMPT, PROMPT, TEXT
from precision import LAW, relative_error
from tiny_hf import PURELY_RECURRENT, tiny_hf_model

from kvlens import KVBias, KVLensError, KVTransformerBridge, convert_prompt

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture(scope="module", params=PURELY_RECURRENT)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def plain(family):
    return tiny_hf_model(family)


def test_converted_equals_prompted(model, plain):
    whole = plain(torch.cat([PROMPT, TEXT], dim=1)).logits[:, N_PROMPT:]
    with model.kv_bias(convert_prompt(model, PROMPT)):
        assert relative_error(model(TEXT), whole) < LAW
    assert torch.equal(model(TEXT), plain(TEXT).logits) and relative_error(model(TEXT), whole) > 0.01  # it matters


def test_the_bias_is_the_states_alone(model, plain, family, tmp_path):
    n_heads, d_v = (4, 12) if family == "mamba2" else (48, 1)
    bias = convert_prompt(model, PROMPT)
    assert bias.attention_layers == () and bias.recurrent.layers == (0, 1, 2) and not bias.b_KV.numel()
    assert bias.recurrent.b_KV.shape == (3, 2, n_heads, 6, d_v) and bias.num_parameters == bias.recurrent.b_KV.numel()
    assert repr(bias).startswith(f"KVBias(batch 2, 3 recurrent layers x {n_heads} heads, 6 x {d_v}, n_prompt_tokens=13")
    cache = plain(PROMPT, use_cache=True).cache_params
    for layer in range(3):
        theirs = cache.layers[layer].recurrent_states[0]
        assert relative_error(bias.recurrent.b_KV[layer], theirs.mT if family == "mamba2" else theirs[..., None]) < LAW
    bias.save(tmp_path / "bias.safetensors")
    with model.kv_bias(bias):
        expected = model(TEXT)
    rest = bias.select(heads=[(1, head) for head in range(n_heads) if head != 2])
    for same in (
        KVBias.load(tmp_path / "bias.safetensors"),
        bias.select(layers=[0, 2], heads=[(1, 2)]) + rest,
        2 * bias - bias,
    ):
        with model.kv_bias(same):
            assert relative_error(model(TEXT), expected) < LAW
    with model.kv_bias(convert_prompt(model, PROMPT[:, 5:], initial=convert_prompt(model, PROMPT[:, :5]))):
        assert relative_error(model(TEXT), expected) < LAW
    with model.kv_bias(bias.select_prompt(1)):
        assert relative_error(model(TEXT[1:]), expected[1:]) < LAW


def test_bad_input_is_refused_with_a_message(model, family):
    bias = convert_prompt(model, PROMPT)
    with pytest.raises(KVLensError, match="layer 3 does not exist; there are 3"):
        bias.select(layers=[3])
    with pytest.raises(KVLensError, match="holds 2 prompts and the input has batch 1"), model.kv_bias(bias):
        model(TEXT[:1])
    with pytest.raises(KVLensError, match="weights differs"):
        KVTransformerBridge.boot_transformers(tiny_hf_model(family, seed=1)).attach_kv_bias(bias)

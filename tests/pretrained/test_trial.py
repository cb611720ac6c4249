"""A model that does not compute what transformers computes is not handed out, however it came about."""

import pytest
import torch
from tiny_hf import D_VOCAB, tiny_hf_model

from kvlens import HookedKVTransformer, KVLensError, KVShiftConfig
from kvlens.pretrained import check_trial, families, load_pretrained_parts

pytestmark = pytest.mark.usefixtures("no_network")

KINDS = ["gpt2", "gpt_neox", "llama", "bloom", "mixtral", "olmo3"]


@pytest.fixture
def wrong_eps(monkeypatch):
    """A field that is forgotten: the norms keep another epsilon than the configuration's."""
    translate = families.translate
    monkeypatch.setattr(families, "translate", lambda *args: {**translate(*args), "eps": 0.01})


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_forgotten_is_noticed(kind, wrong_eps, tmp_path):
    """In memory without processing, in a folder with it."""
    hf_model = tiny_hf_model(kind)
    hf_model.save_pretrained(folder := tmp_path / "m")
    says = "does not compute what transformers computes: on 32 tokens"
    with pytest.raises(KVLensError, match=says):
        HookedKVTransformer.from_pretrained_no_processing("x", hf_model=hf_model, device="cpu")
    with pytest.raises(KVLensError, match=says):
        HookedKVTransformer.from_pretrained(folder, device="cpu")
    HookedKVTransformer.from_pretrained(folder, device="cpu", verify=False)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neo"])
def test_rounding_is_allowed_for(kind, dtype):
    """The true difference was 0.07 to 1.03 of what one rounding of every output changes; four times that is allowed."""
    hf_model = tiny_hf_model(kind)
    HookedKVTransformer.from_pretrained("x", hf_model=hf_model, dtype=dtype, device="cpu", verify=True)
    HookedKVTransformer.from_pretrained("x", hf_model=hf_model.bfloat16(), dtype=dtype, device="cpu", verify=True)


def test_huge_activations_of_a_few_dimensions_are_no_difference():
    """Trained models have them: thousands in two dimensions of the stream, a few in the others."""
    hf_model = tiny_hf_model("gpt2")
    hf_model.transformer.h[0].mlp.c_proj.bias.data[3] = 3000.0
    for dtype in ("float32", "bfloat16"):
        HookedKVTransformer.from_pretrained("x", hf_model=hf_model, dtype=dtype, device="cpu", verify=True)


def test_the_model_that_is_compared_with_is_left_as_it_is():
    hf_model = tiny_hf_model("gpt2").train()
    hf_model.transformer.h[0].eval()
    modes = [module.training for module in hf_model.modules()]
    state = torch.get_rng_state()
    found = load_pretrained_parts("x", hf_model=hf_model, device="cpu", verify=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in hf_model.modules()] == modes
    assert not any(module._forward_hooks for module in hf_model.modules())
    assert found.trial is not None
    assert found.trial.tokens.shape == (1, 32)
    check_trial(found.trial, hf_model.eval()(found.trial.tokens).logits)
    with pytest.raises(KVLensError, match="does not compute"):
        check_trial(found.trial, torch.full((1, 32, D_VOCAB), torch.nan))


@pytest.mark.parametrize("arguments", [dict(first_n_layers=1), dict(kv_shift=KVShiftConfig()), dict(move_to_device=False)])
def test_parts_and_extensions_of_a_model_are_compared_too(arguments, wrong_eps):
    """Of the first layers alone, and before a shift is added."""
    given = dict(hf_model=tiny_hf_model("gpt2"), device="cpu", **arguments)
    with pytest.raises(KVLensError, match="does not compute"):
        HookedKVTransformer.from_pretrained("x", **given)
    HookedKVTransformer.from_pretrained("x", **given, verify=False)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "mixtral", "gemma3", "olmo3"])
def test_the_first_layers_are_those_of_transformers(kind):
    hf_model = tiny_hf_model(kind)
    before = hf_model.state_dict().keys(), hf_model.config.to_dict()
    HookedKVTransformer.from_pretrained("x", hf_model=hf_model, first_n_layers=1, device="cpu", verify=True)
    assert (hf_model.state_dict().keys(), hf_model.config.to_dict()) == before


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "gpt_oss"])
def test_experts_in_half_precision_are_compared_by_the_median_token(kind, seed):
    """A rounding sends a token to another expert, here and there."""
    HookedKVTransformer.from_pretrained("x", hf_model=tiny_hf_model(kind, seed), dtype="bfloat16", device="cpu", verify=True)


def test_what_has_no_comparison_and_what_is_no_answer_is_refused():
    with pytest.raises(KVLensError, match="verify"):
        HookedKVTransformer.from_pretrained("x", hf_model=tiny_hf_model("gpt2"), device="cpu", verify="yes")

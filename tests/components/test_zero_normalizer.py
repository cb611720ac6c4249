"""Where the kernel normaliser is 0: nothing visible gives 0 and finite gradients; a zero alone is an error that says where."""

import pytest
import torch

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVLensError, KVShiftConfig, convert_prompt


def build(**changes):
    basic = dict(n_layers=2, d_model=12, n_heads=2, d_head=6, n_ctx=32, d_vocab=11, act_fn="gelu", seed=0, attention="linear")
    return HookedKVTransformer(HookedKVTransformerConfig(**{**basic, **changes}))


def tokens(pos, seed=0):
    return torch.randint(0, 11, (2, pos), generator=torch.Generator().manual_seed(seed))


def as_induction_head(model):
    """KVSA's own: alpha = (0, 1), so that the first token has a key of zeros."""
    for block in model.blocks:
        with torch.no_grad():
            block.attn.k_shift_coef.copy_(torch.tensor([0.0, 1.0]).expand_as(block.attn.k_shift_coef))
    return model


@pytest.mark.parametrize("form", ["parallel", "chunked", "recurrent"])
def test_a_key_of_zeros_gives_an_output_of_zeros_and_finite_gradients(form):
    model = as_induction_head(build(feature_map="identity", kv_shift=KVShiftConfig(), linear_attention_form=form))
    with torch.no_grad():
        z = model.run_with_cache(tokens(5), names_filter="blocks.0.attn.hook_z")[1]["blocks.0.attn.hook_z"]
    assert torch.equal(z[:, 0], torch.zeros_like(z[:, 0]))
    loss = model(tokens(5), return_type="loss")
    loss.backward()
    assert bool(loss.isfinite())
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_the_hooked_pattern_has_a_row_of_zeros_there():
    model = as_induction_head(build(feature_map="identity", kv_shift=KVShiftConfig()))
    _, cache = model.run_with_cache(tokens(5))
    assert torch.equal(cache["pattern", 0][:, :, 0], torch.zeros_like(cache["pattern", 0][:, :, 0]))
    assert bool(cache["pattern", 0].isfinite().all())


def test_a_normalizer_that_is_zero_alone_names_layer_head_and_place():
    model = build(feature_map="identity")

    def cancel(phi_k, hook):
        """The second token's key is minus the first one's."""
        phi_k = phi_k.clone()
        phi_k[:, 1, 1] = -phi_k[:, 0, 1]
        return phi_k

    with pytest.raises(KVLensError, match=r"layer 1, head 1, place 1: the normaliser .* 'identity' cancel"):
        model.run_with_hooks(tokens(4), fwd_hooks=[("blocks.1.attn.hook_phi_k", cancel)])


@pytest.mark.parametrize("size", [1.0, 17.0])  # scores of about 1 and 300
def test_random_features_stay_finite_in_a_float32_model(size):
    models = [build(feature_map="random", n_random_features=16, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    models[1].load_state_dict(models[0].state_dict())
    outputs = []
    for model in models:
        with torch.no_grad():
            for block in model.blocks:
                for x in "QK":
                    getattr(block.attn, f"W_{x}").mul_(size * 6.0)
            outputs.append(model(tokens(9)))
    assert bool(outputs[0].isfinite().all())
    # keys and queries are float32's, and so are off by 300 eps in the exponent
    assert float((outputs[0] - outputs[1]).norm() / outputs[1].norm()) < 1e-3
    bias = convert_prompt(models[0], tokens(9)[0])
    assert bool(bias.b_KV.isfinite().all())

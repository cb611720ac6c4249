"""Recurrent layers: each against its Transformers module, cut anywhere, under a bias, padded, hooked."""

import functools

import pytest
import torch
from bridge_models import InFloat64
from tiny_hf import HYBRIDS, PURELY_RECURRENT, tiny_hf_model

from kvlens.errors import KVLensError
from kvlens.mixers import HOOKS, RecurrentState, has_mixer, mixer_for
from kvlens.ops.linear_attention import without_padding

BATCH, POS = 3, 70
FAMILIES = [*HYBRIDS, *PURELY_RECURRENT, "falcon_h1", "falcon_h1_norm"]
families = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def layer_of(family, dtype=torch.float32):
    """The first layer's recurrent module."""
    model = tiny_hf_model("falcon_h1", mamba_rms_norm=True) if family == "falcon_h1_norm" else tiny_hf_model(family)
    layer = (getattr(model, "backbone", None) or model.model).layers[0].requires_grad_(False)
    names = ("linear_attn", "mamba", "mixer", "self_attn")
    return next(getattr(layer, name) for name in names if hasattr(layer, name)).to(dtype)


def hidden(family, pos=POS, dtype=torch.float32):
    d_model = 48 if family == "olmo_hybrid" else 24
    return torch.randn(BATCH, pos, d_model, generator=torch.Generator().manual_seed(1)).to(dtype)


def theirs(family, module, x, mask=None, cache=None):
    if family == "minimax":
        return module(x, None, mask, past_key_values=cache)[0]
    return module(x, cache_params=cache, attention_mask=mask)


def relative(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@families
def test_output_is_transformers(family):
    """Both against a pass of Transformers in float64: ours is off by at most twice as much as theirs."""
    module, wide, x = layer_of(family), layer_of(family, torch.float64), hidden(family)
    mixer = mixer_for(module, 0)
    assert not list(mixer.parameters())
    with InFloat64():
        exact, (_, exact_state) = theirs(family, wide, x.double()), mixer_for(wide, 0)(x.double())
    allowed = 2 * relative(theirs(family, module, x), exact)
    output, state = mixer(x)
    assert relative(output, exact) < allowed
    first, between = mixer(x[:, :41])
    parts = [first]
    for t in range(41, POS):  # as one decodes
        one, between = mixer(x[:, t : t + 1], between)
        parts.append(one)
    assert relative(torch.cat(parts, dim=1), exact) < allowed
    rounding = POS**0.5 * torch.finfo(torch.float32).eps  # a state is a sum over POS tokens of what the layer makes of each
    for one in (state, between):
        assert relative(one.total(), exact_state.total()) < allowed + rounding


@families
def test_left_padding_is_transformers(family):
    module, x = layer_of(family, torch.float64), hidden(family, 20, torch.float64)
    mask = torch.arange(20) >= torch.tensor([[0], [5], [17]])
    with InFloat64():
        error = relative(mixer_for(module, 0)(x, mask=mask)[0][mask], theirs(family, module, x, mask)[mask])
    assert error < (torch.finfo(torch.float32).eps if family == "minimax" else 1e-12)  # MiniMax stores decays in float32


@families
def test_a_bias_replaces_the_tokens_that_made_it(family):
    """In float64: the state of a prompt as b_KV, with the convolution's rows, is the prompt; so in passes of any length."""
    mixer, x = mixer_for(layer_of(family, torch.float64), 0), hidden(family, 30, torch.float64)
    with InFloat64():  # Transformers' norm, and Kimi's gate, name float32
        whole, end = mixer(x)
        _, prompt = mixer(x[:, :13])
        state = RecurrentState(b_kv=prompt.total(), conv=prompt.conv)
        parts = []
        for part in (x[:, 13:21], x[:, 21:22], x[:, 22:23], x[:, 23:]):
            output, state = mixer(part, state)
            parts.append(output)
        without_rows = mixer(x[:, 13:], RecurrentState(b_kv=prompt.total()))[0]
    assert relative(torch.cat(parts, dim=1), whole[:, 13:]) < 1e-12
    assert relative(state.total(), end.total()) < 1e-12
    assert state.b_kv is not None
    assert torch.equal(state.b_kv, prompt.total())
    if mixer.conv_rows:
        torch.testing.assert_close(state.conv, end.conv)
        assert relative(without_rows, whole[:, 13:]) > 0.05


@families
def test_sum_over_prompt_tokens_is_the_state(family):
    mixer, x = mixer_for(layer_of(family, torch.float64), 0), hidden(family, 20, torch.float64)
    mask = torch.arange(20) < torch.tensor([[20], [12], [1]])
    _, start = mixer(hidden(family, 4, torch.float64))
    state = RecurrentState(b_kv=start.total(), conv=start.conv)
    conv = None if not mixer.conv_rows else state.conv
    inputs = mixer.inputs(x, conv, mask)
    _, after = mixer(x, state, mask)
    written = torch.einsum("bjhk,bjhd->bhkd", mixer.rule.carried_keys(inputs, mask), without_padding(inputs.v, mask))
    expected = mixer.rule.state_map(inputs, mask) @ state.b_kv + written
    torch.testing.assert_close(after.total(), expected, rtol=1e-12, atol=1e-12)


@families
def test_prompts_of_unequal_length(family):
    """Left or right padding: each row ends as its real tokens alone would, including the convolution."""
    mixer, x = mixer_for(layer_of(family, torch.float64), 0), hidden(family, 20, torch.float64)
    lengths = torch.tensor([[20], [12], [2]])
    for mask in (torch.arange(20) < lengths, torch.arange(20) >= 20 - lengths):
        with InFloat64():
            output, state = mixer(x, mask=mask)
        for b in range(BATCH):
            with InFloat64():
                alone, end = mixer(x[b : b + 1, mask[b]])
            assert relative(output[b, mask[b]], alone[0]) < 1e-12
            torch.testing.assert_close(state.total()[b : b + 1], end.total(), rtol=1e-12, atol=1e-12)
            if mixer.conv_rows:
                torch.testing.assert_close(state.conv[b : b + 1], end.conv, rtol=1e-12, atol=1e-12)


def fired(mixer, run):
    seen = {}
    handles = []
    for name in HOOKS:
        point = getattr(mixer, name)
        handles.append(point.register_forward_hook(lambda _m, _i, out, name=name: seen.setdefault(name, out)))
    run()
    for handle in handles:
        handle.remove()
    return seen


@families
def test_hook_points_fire_at_prefill_and_at_decoding(family):
    mixer, x = mixer_for(layer_of(family), 0), hidden(family, 6)
    state = RecurrentState(b_kv=torch.randn(1, mixer.n_heads, mixer.d_k, mixer.d_v))
    _, after = mixer(x, state)
    quiet = {"hook_conv_state", "hook_write_strength"} if family == "minimax" else set()
    for pos, before in ((6, state), (1, after)):
        seen = fired(mixer, lambda pos=pos, before=before: mixer(x[:, :pos], before))
        assert set(seen) == set(HOOKS) - quiet
        heads = (BATCH, pos, mixer.n_heads)
        assert seen["hook_q"].shape == seen["hook_k"].shape == (BATCH, pos, mixer.n_key_heads, mixer.d_k)
        for name in ("hook_v", "hook_z", "hook_z_bias", "hook_z_context"):
            assert seen[name].shape == (*heads, mixer.d_v), name
        assert seen["hook_pattern"].shape == (BATCH, mixer.n_heads, pos, pos)
        assert torch.equal(seen["hook_b_kv"], state.b_kv)
        torch.testing.assert_close(seen["hook_z"], seen["hook_z_bias"] + seen["hook_z_context"])
        assert seen["hook_state"].shape == (BATCH, mixer.n_heads, mixer.d_k, mixer.d_v)
        by_head = {"minimax": heads[-1:], "kimi_linear": (*heads, mixer.d_k)}.get(family, heads)
        assert seen["hook_log_decay"].shape == by_head
        assert "hook_write_strength" in quiet or seen["hook_write_strength"].shape == heads
        if pos > 1:  # of one token, the context is also what the state holds
            from_pattern = torch.einsum("bhij,bjhd->bihd", seen["hook_pattern"], seen["hook_v"])
            torch.testing.assert_close(from_pattern, seen["hook_z_context"], rtol=1e-5, atol=1e-6)
    without = fired(mixer, lambda: mixer(x))
    assert set(HOOKS) - set(without) == quiet | {"hook_b_kv", "hook_z_bias", "hook_z_context"}
    assert not mixer.is_hooked()


@families
def test_hooks_change_what_they_say(family):
    """Ablating the bias at every pass, decoding included, is having none; the pattern as read makes the same output."""
    mixer, x = mixer_for(layer_of(family), 0), hidden(family, 9)
    state = RecurrentState(b_kv=3 * torch.randn(BATCH, mixer.n_heads, mixer.d_k, mixer.d_v))

    def both_passes(state):
        first, after = mixer(x[:, :8], state)
        return torch.cat([first, mixer(x[:, 8:], after)[0]], dim=1)

    plain, biased = both_passes(None), both_passes(state)
    assert relative(biased, plain) > 0.01
    handle = mixer.hook_b_kv.register_forward_hook(lambda _m, _i, out: torch.zeros_like(out))
    assert mixer.is_hooked()
    torch.testing.assert_close(both_passes(state), plain, rtol=1e-4, atol=1e-5)
    handle.remove()
    handle = mixer.hook_pattern.register_forward_hook(lambda _m, _i, out: out)
    torch.testing.assert_close(both_passes(state), biased, rtol=1e-4, atol=1e-5)
    handle.remove()
    handle = mixer.hook_pattern.register_forward_hook(lambda _m, _i, out: 2 * out)
    seen = fired(mixer, lambda: mixer(x))["hook_z"]
    handle.remove()
    torch.testing.assert_close(seen, 2 * fired(mixer, lambda: mixer(x))["hook_z"], rtol=1e-4, atol=1e-5)


@families
def test_gradients_reach_the_bias_and_states_are_not_written(family):
    mixer, x = mixer_for(layer_of(family), 0), hidden(family, 5).requires_grad_()
    b_kv = torch.randn(1, mixer.n_heads, mixer.d_k, mixer.d_v, requires_grad=True)
    _, after = mixer(x, RecurrentState(b_kv=b_kv))
    kept = [None if part is None else part.detach().clone() for part in after]
    output, last = mixer(x[:, :1], after)
    for part, before in zip(after, kept, strict=True):
        assert (part is None) == (before is None)
        assert part is None or torch.equal(part, before)
    (output.square().sum() + last.total().square().sum()).backward()
    assert float(b_kv.grad.norm()) > 0
    assert float(x.grad.norm()) > 0


def test_states_of_another_layer_and_unknown_modules_are_refused():
    mixer = mixer_for(layer_of("qwen3_next"), 3)
    with pytest.raises(KVLensError, match=r"layer 3 .*expected b_kv of shape \[3 or 1, 4, 6, 5\], got \[1, 4, 5, 6\]"):
        mixer(hidden("qwen3_next", 2), RecurrentState(b_kv=torch.zeros(1, 4, 5, 6)))
    with pytest.raises(KVLensError, match=r"expected context of shape \[3 or 1, 4, 6, 5\], got \[2, 4, 6, 5\]"):
        mixer(hidden("qwen3_next", 2), RecurrentState(context=torch.zeros(2, 4, 6, 5)))
    with pytest.raises(KVLensError, match="layer 1: expected a recurrent layer.*Qwen3NextGatedDeltaNet.*got Linear"):
        mixer_for(torch.nn.Linear(2, 2), 1)
    assert has_mixer(mixer.module)
    assert not has_mixer(torch.nn.Linear(2, 2))

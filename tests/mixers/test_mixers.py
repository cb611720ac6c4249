"""Recurrent layers: each against its Transformers module, cut anywhere, under a bias, padded, hooked."""

import contextlib
import functools

import pytest
import torch
from precision import LAW, float64, relative_error, share
from tiny_hf import HYBRIDS, PURELY_RECURRENT, RWKV, tiny_hf_model

from kvlens.errors import KVLensError
from kvlens.mixers import MIXER_HOOKS, RecurrentState, has_mixer, mixer_for
from kvlens.ops.linear_attention import without_padding

BATCH, POS = 3, 70
FAMILIES = [*HYBRIDS, *PURELY_RECURRENT, *RWKV, "falcon_h1", "falcon_h1_norm"]


def law(test):
    """Of every family, in float64."""
    return pytest.mark.usefixtures("in_float64")(pytest.mark.parametrize("family", FAMILIES)(test))


@functools.cache
def layer_of(family, dtype=torch.float64):
    """The first layer's recurrent module; its weights are float32's in either dtype."""
    with float64() if dtype == torch.float64 else contextlib.nullcontext():
        model = tiny_hf_model("falcon_h1", mamba_rms_norm=True) if family == "falcon_h1_norm" else tiny_hf_model(family)
    layer = (getattr(model, "backbone", None) or model.model).layers[0].requires_grad_(False)
    names = ("linear_attn", "mamba", "mixer", "self_attn")
    return next(getattr(layer, name) for name in names if hasattr(layer, name))


def hidden(family, pos=POS, seed=1):
    d_model = 48 if family in ("jamba", "olmo_hybrid") else 24
    return torch.randn(BATCH, pos, d_model, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def theirs(family, module, x, mask=None, cache=None):
    if family == "minimax":
        return module(x, None, mask, past_key_values=cache)[0]
    return module(x, cache_params=cache, attention_mask=mask)


def in_one_pass_and_decoded(mixer, x):
    """Outputs and final states."""
    output, state = mixer(x)
    first, between = mixer(x[:, :41])
    parts = [first]
    for t in range(41, POS):
        one, between = mixer(x[:, t : t + 1], between)
        parts.append(one)
    return output, torch.cat(parts, dim=1), state.total(), between.total()


@pytest.mark.one_in(3)
@law
def test_output_is_transformers(family):
    module, x = layer_of(family), hidden(family)
    mixer = mixer_for(module, 0)
    assert not list(mixer.parameters())
    output, decoded, state, after = in_one_pass_and_decoded(mixer, x)
    assert relative_error(output, theirs(family, module, x)) < LAW
    assert relative_error(decoded, output) < LAW and relative_error(after, state) < LAW


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_as_exact_as_transformers_in_float32(family):
    """States too, of which Transformers shows none in one pass: they are sums of what its outputs are sums of."""
    narrow, texts = layer_of(family, torch.float32), [hidden(family, seed=seed).float() for seed in range(4)]
    with float64():
        exact = [theirs(family, layer_of(family), x.double()) for x in texts]
        exact_state = mixer_for(layer_of(family), 0)(texts[0].double())[1].total()
    errors = [relative_error(theirs(family, narrow, x), wide) for x, wide in zip(texts, exact, strict=True)]
    found = in_one_pass_and_decoded(mixer_for(narrow, 0), texts[0])
    for one, expected in zip(found, (exact[0], exact[0], exact_state, exact_state), strict=True):
        assert share(relative_error(one, expected), errors) < 1


@law
def test_left_padding_is_transformers(family):
    module, x = layer_of(family), hidden(family, 20)
    mask = torch.arange(20) >= torch.tensor([[0], [5], [17]])
    assert relative_error(mixer_for(module, 0)(x, mask=mask)[0][mask], theirs(family, module, x, mask)[mask]) < LAW


@pytest.mark.one_in(3)
@law
def test_a_bias_replaces_the_tokens_that_made_it(family):
    """The state of a prompt as b_KV, with the convolution's rows, is the prompt; so in passes of any length."""
    mixer, x = mixer_for(layer_of(family), 0), hidden(family, 30)
    whole, end = mixer(x)
    _, prompt = mixer(x[:, :13])
    state = RecurrentState(b_kv=prompt.total(), conv=prompt.conv)
    parts = []
    for part in (x[:, 13:21], x[:, 21:22], x[:, 22:23], x[:, 23:]):
        output, state = mixer(part, state)
        parts.append(output)
    without_rows = mixer(x[:, 13:], RecurrentState(b_kv=prompt.total()))[0]
    assert relative_error(torch.cat(parts, dim=1), whole[:, 13:]) < LAW
    assert relative_error(state.total(), end.total()) < LAW
    assert state.b_kv is not None
    assert torch.equal(state.b_kv, prompt.total())
    if mixer.conv_rows:
        assert relative_error(state.conv, end.conv) < LAW
        assert relative_error(without_rows, whole[:, 13:]) > 0.05


@law
def test_sum_over_prompt_tokens_is_the_state(family):
    mixer, x = mixer_for(layer_of(family), 0), hidden(family, 20)
    mask = torch.arange(20) < torch.tensor([[20], [12], [1]])
    _, start = mixer(hidden(family, 4))
    state = RecurrentState(b_kv=start.total(), conv=start.conv)
    conv = None if not mixer.conv_rows else state.conv
    inputs = mixer.inputs(x, conv, mask)
    _, after = mixer(x, state, mask)
    written = torch.einsum("bjhk,bjhd->bhkd", mixer.rule.carried_keys(inputs, mask), without_padding(inputs.v, mask))
    expected = mixer.rule.state_map(inputs, mask) @ state.b_kv + written
    assert relative_error(after.total(), expected) < LAW


@pytest.mark.one_in(3)
@law
def test_prompts_of_unequal_length(family):
    """Left or right padding: each row ends as its real tokens alone would, including the convolution."""
    mixer, x = mixer_for(layer_of(family), 0), hidden(family, 20)
    lengths = torch.tensor([[20], [12], [2]])
    for mask in (torch.arange(20) < lengths, torch.arange(20) >= 20 - lengths):
        output, state = mixer(x, mask=mask)
        for b in range(BATCH):
            alone, end = mixer(x[b : b + 1, mask[b]])
            assert relative_error(output[b, mask[b]], alone[0]) < LAW
            assert relative_error(state.total()[b : b + 1], end.total()) < LAW
            if mixer.conv_rows:
                assert relative_error(state.conv[b : b + 1], end.conv) < LAW


def fired(mixer, run):
    seen = {}
    handles = []
    for name in MIXER_HOOKS:
        point = getattr(mixer, name)
        handles.append(point.register_forward_hook(lambda _m, _i, out, name=name: seen.setdefault(name, out)))
    run()
    for handle in handles:
        handle.remove()
    return seen


@law
def test_hook_points_fire_at_prefill_and_at_decoding(family):
    mixer, x = mixer_for(layer_of(family), 0), hidden(family, 6)
    state = RecurrentState(b_kv=torch.randn(1, mixer.n_heads, mixer.d_k, mixer.d_v))
    _, after = mixer(x, state)
    quiet = {"hook_conv_state", "hook_write_strength"} if family == "minimax" else set()
    quiet |= {"hook_write_strength"} if family in RWKV else set()
    for pos, before in ((6, state), (1, after)):
        seen = fired(mixer, lambda pos=pos, before=before: mixer(x[:, :pos], before))
        assert set(seen) == set(MIXER_HOOKS) - quiet
        heads = (BATCH, pos, mixer.n_heads)
        assert seen["hook_q"].shape == seen["hook_k"].shape == (BATCH, pos, mixer.n_key_heads, mixer.d_k)
        for name in ("hook_v", "hook_z", "hook_z_bias", "hook_z_context"):
            assert seen[name].shape == (*heads, mixer.d_v), name
        assert seen["hook_pattern"].shape == (BATCH, mixer.n_heads, pos, pos)
        assert torch.equal(seen["hook_b_kv"], state.b_kv)
        assert relative_error(seen["hook_z"], seen["hook_z_bias"] + seen["hook_z_context"]) < LAW
        assert seen["hook_state"].shape == (BATCH, mixer.n_heads, mixer.d_k, mixer.d_v)
        by_state = dict.fromkeys(("kimi_linear", "jamba", "mamba", "falcon_mamba", *RWKV), (*heads, mixer.d_k))
        by_head = {"minimax": heads[-1:], **by_state}.get(family, heads)
        assert seen["hook_log_decay"].shape == by_head
        assert "hook_write_strength" in quiet or seen["hook_write_strength"].shape == heads
        if pos > 1:  # of one token, the context is also what the state holds
            from_pattern = torch.einsum("bhij,bjhd->bihd", seen["hook_pattern"], seen["hook_v"])
            assert relative_error(from_pattern, seen["hook_z_context"]) < LAW
    without = fired(mixer, lambda: mixer(x))
    assert set(MIXER_HOOKS) - set(without) == quiet | {"hook_b_kv", "hook_z_bias", "hook_z_context"}
    assert not mixer.is_hooked()


@law
def test_hooks_change_what_they_say(family):
    """Ablating the bias at every pass, decoding included, is having none; the pattern as read makes the same output."""
    mixer, x = mixer_for(layer_of(family), 0), hidden(family, 9)
    state = RecurrentState(b_kv=3 * torch.randn(BATCH, mixer.n_heads, mixer.d_k, mixer.d_v))

    def both_passes(state):
        first, after = mixer(x[:, :8], state)
        return torch.cat([first, mixer(x[:, 8:], after)[0]], dim=1)

    plain, biased = both_passes(None), both_passes(state)
    assert relative_error(biased, plain) > 0.01  # it matters
    handle = mixer.hook_b_kv.register_forward_hook(lambda _m, _i, out: torch.zeros_like(out))
    assert mixer.is_hooked()
    assert relative_error(both_passes(state), plain) < LAW
    handle.remove()
    handle = mixer.hook_pattern.register_forward_hook(lambda _m, _i, out: out)
    assert relative_error(both_passes(state), biased) < LAW
    handle.remove()
    handle = mixer.hook_pattern.register_forward_hook(lambda _m, _i, out: 2 * out)
    seen = fired(mixer, lambda: mixer(x))["hook_z"]
    handle.remove()
    assert relative_error(seen, 2 * fired(mixer, lambda: mixer(x))["hook_z"]) < LAW


@law
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


def test_states_of_another_layer_and_unknown_modules_are_errors():
    mixer = mixer_for(layer_of("qwen3_next"), 3)
    for state in (RecurrentState(b_kv=torch.zeros(1, 4, 5, 6)), RecurrentState(context=torch.zeros(2, 4, 6, 5))):
        with pytest.raises((RuntimeError, KVLensError), match="[Ss]ize|initial_state"):  # torch's, or ours
            mixer(hidden("qwen3_next", 2), state)
    with pytest.raises(KVLensError, match="layer 1: expected a recurrent layer.*Qwen3NextGatedDeltaNet.*got Linear"):
        mixer_for(torch.nn.Linear(2, 2), 1)
    assert has_mixer(mixer.module)
    assert not has_mixer(torch.nn.Linear(2, 2))

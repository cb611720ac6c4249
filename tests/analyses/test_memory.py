"""What recurrent layers keep of a prompt: against a loop over the tokens, and against the states that conversion gives."""

import pytest
import torch
from bridge_models import some_tokens
from precision import LAW, float64, relative_error
from tiny_hf import HYBRIDS

from kvlens import HookedKVTransformer, KVLensError, convert_prompt
from kvlens.analyses import state_erasure, state_memory
from kvlens.bridge import read_memory
from kvlens.ops.delta_rule import naive_token_maps

N_PROMPT, N_HEADS = 13, 4


@pytest.fixture(autouse=True, scope="module")
def in_float64():
    with float64():
        yield


@pytest.fixture(scope="module", params=HYBRIDS)
def model(request, bridge_of):
    return bridge_of(request.param)


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next", "olmo_hybrid"])
def delta_model(request, bridge_of):
    """Of the delta rule, whose maps the tests multiply token by token."""
    return bridge_of(request.param)


def maps_of(model, tokens, layer):
    """T_t of every token [pos, head, d_k, d_k] and keys [pos, head, d_k], from the hook points."""
    seen = {}
    names = [f"blocks.{layer}.attn.hook_{name}" for name in ("k", "log_decay", "write_strength")]
    hooks = [(name, lambda x, hook: seen.__setitem__(hook.name.split("hook_")[1], x.double())) for name in names]
    with torch.no_grad():
        model.run_with_hooks(tokens[None], fwd_hooks=hooks)
    maps = naive_token_maps(seen["k"], seen["log_decay"], seen["write_strength"])
    keys = seen["k"].repeat_interleave(N_HEADS // seen["k"].shape[2], dim=2)
    return maps[0], keys[0]


def test_survival_and_the_map_of_states_are_those_of_a_loop(delta_model):
    model = delta_model
    tokens = some_tokens(N_PROMPT)
    memory, read = state_memory(model, tokens), {one.layer: one for one in read_memory(model, tokens)}
    assert len(memory) == 2 * N_HEADS * N_PROMPT and set(memory["layer"]) == {0, 2}
    for layer in (0, 2):
        each, keys = maps_of(model, tokens, layer)
        each = each if each.shape[0] == N_PROMPT else each.transpose(0, 1)
        left, survival = torch.eye(6, dtype=torch.float64).expand(N_HEADS, 6, 6), []
        for j in reversed(range(N_PROMPT)):
            survival.append((left @ keys[j][..., None]).squeeze(-1).norm(dim=-1) / keys[j].norm(dim=-1))
            left = left @ each[j]
        found = torch.tensor(memory[memory["layer"] == layer]["survival"].to_numpy()).view(N_HEADS, N_PROMPT)
        assert relative_error(found, torch.stack(survival[::-1], dim=1)) < LAW
        assert relative_error(read[layer].state_map, left) < LAW


@pytest.mark.one_in(2)
def test_the_shares_sum_to_the_state(model):
    tokens = some_tokens(N_PROMPT)
    memory = state_memory(model, tokens)
    sums = memory.groupby(["layer", "head"])["state_share"].sum()
    assert abs(sums - 1).max() < 1e-9
    assert memory["token"][3] == str(int(tokens[3])) and memory["distance"][3] == N_PROMPT - 4
    last = memory[memory["distance"] == 0]
    assert abs(last["survival"] - 1).max() < 1e-9
    states = convert_prompt(model, tokens).stacked("state")
    for row, read in zip(states, read_memory(model, tokens), strict=True):
        assert relative_error(torch.einsum("phk,phv->hkv", read.carried_keys, read.values), row) < LAW


@pytest.mark.one_in(3)
def test_erasure_is_what_becomes_of_the_earlier_state(model):
    earlier, prompt = some_tokens(7, seed=3), some_tokens(N_PROMPT)
    table = state_erasure(model, prompt, earlier)
    old = convert_prompt(model, earlier)
    whole = convert_prompt(model, prompt, initial=old).stacked("state")
    with model.kv_bias(old):
        memories = read_memory(model, prompt)
    written = torch.stack([torch.einsum("phk,phv->hkv", m.carried_keys, m.values) for m in memories])
    sizes = old.stacked("state").norm(dim=(2, 3))
    left, earlier_norm = (torch.tensor(table[name].to_numpy()).view(2, -1) for name in ("left", "earlier_norm"))
    assert relative_error(left, (whole - written).norm(dim=(2, 3)) / sizes) < LAW
    assert relative_error(earlier_norm, sizes) < LAW
    assert bool((table["left_by_decay"] <= 1).all())


def test_tokens_that_are_not_read_leave_nothing(model):
    tokens, kept = some_tokens(N_PROMPT), torch.arange(N_PROMPT) % 5 != 2
    hidden, alone = read_memory(model, tokens, kept, keeps_positions=False), read_memory(model, tokens[kept])
    for one, other in zip(hidden, alone, strict=True):
        assert relative_error(one.carried_keys[kept], other.carried_keys) < LAW and not one.carried_keys[~kept].any()
        assert relative_error(one.state_map, other.state_map) < LAW and relative_error(one.log_decay, other.log_decay) < LAW


@pytest.mark.unhooked
def test_bad_input_is_refused_with_a_message(bridge_of):
    model = bridge_of("qwen3_5")
    with pytest.raises(KVLensError, match="got shape \\[2, 13\\]"):
        state_memory(model, some_tokens(2, N_PROMPT))
    with pytest.raises(KVLensError, match="no tokenizer"):
        state_memory(model, "words")
    with pytest.raises(KVLensError, match="LlamaForCausalLM.*no layer of the model is recurrent"):
        state_memory(bridge_of("llama"), some_tokens(N_PROMPT))
    with pytest.raises(KVLensError, match="model"):
        state_memory(HookedKVTransformer.from_zoo("bigram-linear"), some_tokens(N_PROMPT))

"""RWKV-5.1, 5.2 and 6 on the bridge: a prompt is a state and two rows in every layer, exactly, whatever is done with them."""

import math
from dataclasses import replace

import pytest
import torch
from bridge_models import PROMPT, TEXT, some_tokens
from precision import LAW, relative_error
from tiny_hf import RWKV, tiny_hf_model

from kvlens import KVBias, KVLensError, KVTransformerBridge, convert_prompt
from kvlens.analyses import layer_contributions, state_erasure, state_half_lives, state_memory
from kvlens.bridge import read_memory
from kvlens.pretrained.rwkv_files import byte_tokenizer

pytestmark = pytest.mark.usefixtures("without_gradients", "in_float64")
N_PROMPT, N_LAYERS, N_HEADS, D_MODEL = PROMPT.shape[1], 3, 4, 24


@pytest.fixture(params=RWKV)
def family(request):
    return request.param


@pytest.fixture
def model(family, bridge_of):
    return bridge_of(family)


@pytest.fixture
def whole(family):
    """Logits of TEXT behind PROMPT, token by token."""
    return tiny_hf_model(family)(torch.cat([PROMPT, TEXT], dim=1)).logits[:, N_PROMPT:]


def error(model, bias, expected, text=TEXT):
    with model.kv_bias(bias):
        return relative_error(model(text), expected)


def with_rows(bias, change):
    """The bias with ``change`` applied to the rows of every layer, [batch, 1, 2 * d_model]."""
    layers = [replace(layer, last={**layer.last, "conv": change(layer.last["conv"].clone())}) for layer in bias.layers]
    return bias.with_layers(layers)


def test_a_state_and_two_rows_of_each_layer_replace_the_prompt(model, whole):
    bias = convert_prompt(model, PROMPT)
    assert bias.attention_layers == () and len(bias.layers) == N_LAYERS
    for layer in bias.layers:
        assert layer.state.b_kv.shape == (2, N_HEADS, 6, 5) and layer.last["conv"].shape == (2, 1, 2 * D_MODEL)
    assert error(model, bias, whole) < LAW
    assert relative_error(model(TEXT), whole) > 0.01  # it matters

    def zeroed(part):
        def change(rows):
            rows[..., part] = 0
            return rows

        return with_rows(bias, change)

    assert error(model, zeroed(slice(D_MODEL)), whole) > 1e-3  # of time mixing
    assert error(model, zeroed(slice(D_MODEL, None)), whole) > 1e-3  # of channel mixing


def test_rows_are_the_inputs_of_the_last_token(model):
    bias = convert_prompt(model, PROMPT)
    names = [f"blocks.{layer}.{norm}.hook_out" for layer in range(N_LAYERS) for norm in ("ln1", "ln2")]
    _, cache = model.run_with_cache(PROMPT, names_filter=names)
    for number, layer in enumerate(bias.layers):
        expected = torch.cat([cache[f"blocks.{number}.{norm}.hook_out"][:, -1:] for norm in ("ln1", "ln2")], dim=-1)
        assert relative_error(layer.last["conv"], expected) < LAW


def test_one_prompt_behind_the_other(model, whole):
    for cut in (1, 5, N_PROMPT - 1):
        both = convert_prompt(model, PROMPT[:, cut:], initial=convert_prompt(model, PROMPT[:, :cut]))
        assert error(model, both, whole) < LAW


def test_prompts_of_unequal_length(family):
    model = KVTransformerBridge.boot_transformers(tiny_hf_model(family), tokenizer=byte_tokenizer("bytes"))
    prompts = ["a long prompt", "short"]
    batch = convert_prompt(model, prompts)
    for row, prompt in enumerate(prompts):
        expected = model(torch.cat([model.to_tokens(prompt), TEXT[:1]], dim=1))[:, len(prompt) :]
        assert error(model, batch.select_prompt(row), expected, TEXT[:1]) < LAW
    both = model(prompts)  # padded
    assert relative_error(both[1, : len(prompts[1])], model(prompts[1])[0]) < LAW


def test_sums_selections_and_files_are_those_of_states(model, whole, tmp_path):
    bias = convert_prompt(model, PROMPT)
    bias.save(tmp_path / "bias.safetensors")
    rest = bias.select(heads=[(1, head) for head in range(N_HEADS) if head != 2])
    parts = bias.select(layers=[0, 2], heads=[(1, 2)])
    for same in (KVBias.load(tmp_path / "bias.safetensors"), parts + rest, 2 * bias - bias):
        assert error(model, same, whole) < LAW
    assert error(model, parts, whole) > 1e-4
    with pytest.raises(KVLensError, match="(rest|weights) differs"):
        KVTransformerBridge.boot_transformers(tiny_hf_model("rwkv6", seed=1)).attach_kv_bias(bias)


def test_a_sum_reads_as_the_sum_of_what_it_reads(model):
    """z_bias is linear in the state: of two prompts' states, the text's own rows and decays given, in the first layer."""
    one, other = (convert_prompt(model, some_tokens(2, n, seed=n)) for n in (4, 7))
    seen = []
    for bias in (one, other, one + other):
        rows = with_rows(bias, torch.zeros_like)
        with model.kv_bias(rows):
            seen.append(model.run_with_cache(TEXT, names_filter="blocks.0.attn.hook_z_bias")[1]["blocks.0.attn.hook_z_bias"])
    assert relative_error(seen[2], seen[0] + seen[1]) < LAW


def test_the_bonus_belongs_to_the_text_and_the_state_to_the_prompt(model):
    names = [f"blocks.1.attn.hook_{name}" for name in ("q", "k", "v", "log_decay", "z", "z_context", "z_bias", "b_kv", "state")]
    bias = convert_prompt(model, PROMPT)
    with model.kv_bias(bias):
        _, cache = model.run_with_cache(TEXT, names_filter=names)
    q, k, v, log_decay, z, context, of_bias, b_kv, state = (cache[name] for name in names)
    bonus = model.original_model.model.layers[1].mixer.original_component.bonus
    own = torch.einsum("bhn,hn,bhn->bh", q[:, 0], bonus, k[:, 0])[..., None] * v[:, 0]
    assert relative_error(context[:, 0], own) < LAW  # the first token has no other to read
    assert relative_error(z, context + of_bias) < LAW and torch.equal(b_kv, bias.layers[1].state.b_kv)
    before = log_decay.cumsum(dim=1) - log_decay
    assert relative_error(of_bias, torch.einsum("bihn,bihn,bhnd->bihd", q, before.exp(), b_kv)) < LAW
    longer = convert_prompt(model, torch.cat([PROMPT, TEXT], dim=1)).layers[1].state.b_kv
    assert relative_error(state + log_decay.sum(dim=1).exp()[..., None] * b_kv, longer) < LAW


def test_without_what_it_reads_there_was_no_prompt(model):
    """Hooks that zero the state and both rows, in every layer, at a prefill and at decoded tokens."""
    points = [f"blocks.{layer}.{name}" for layer in range(N_LAYERS) for name in ("attn.hook_b_kv", "attn.hook_conv_state")]
    points += [f"blocks.{layer}.mlp.hook_conv_state" for layer in range(N_LAYERS)]
    hooks = [(name, lambda x, hook: torch.zeros_like(x)) for name in points]
    with model.kv_bias(convert_prompt(model, PROMPT)):
        zeroed = model.run_with_hooks(TEXT, fwd_hooks=hooks)
    assert relative_error(zeroed, model(TEXT)) < LAW
    pattern = [(f"blocks.{layer}.attn.hook_pattern", lambda x, hook: x) for layer in range(N_LAYERS)]
    assert relative_error(model.run_with_hooks(TEXT, fwd_hooks=pattern), model(TEXT)) < LAW


def test_hidden_tokens_are_as_if_they_had_not_been_there(model):
    """Neither state nor rows know of positions."""
    kept = torch.arange(N_PROMPT)[None] % 4 != 3
    kept = kept.expand(2, -1)
    alone = model(torch.cat([PROMPT[:, kept[0]], TEXT], dim=1))[:, -TEXT.shape[1] :]
    assert relative_error(model.logits_on(TEXT, TEXT.shape[1], before=PROMPT, kept=kept), alone) < LAW


def test_decoded_token_by_token(model, whole):
    for bias, before, expected in ((convert_prompt(model, PROMPT), [], whole), (None, [PROMPT], whole)):
        cache, found = None, []
        if bias is not None:
            model.attach_kv_bias(bias)
        for tokens in (*before, *TEXT.split(1, dim=1)):
            logits, cache = model.next_logits(tokens, cache)
            found.append(logits)
        model.detach_kv_bias()
        assert relative_error(torch.stack(found[len(before) :], dim=1), expected) < LAW


def test_contributions_sum_to_the_logit(model):
    """Of every layer's heads and MLP; logits less their mean, as everywhere."""
    table = layer_contributions(model, PROMPT[0], TEXT[0], tokens=[5], next_token=False, per_head=True)
    logits = model(torch.cat([PROMPT, TEXT], dim=1))[0, N_PROMPT:]
    found = torch.tensor(table.groupby("position")["logit"].sum().to_numpy())
    assert relative_error(found, logits[:, 5] - logits.mean(dim=-1)) < LAW


def test_half_lives_are_those_of_the_weights(family, model):
    """log a = -e^d in version 5; in version 6 by the hook points, averaged over the prompt."""
    tokens = PROMPT[0]
    table = state_half_lives(model, tokens)
    found = torch.tensor(table["half_life"].to_numpy()).view(N_LAYERS, N_HEADS, 6)
    assert table.query("layer == 1 and head == 2")["channel"].tolist() == list(range(6))
    names = [f"blocks.{layer}.attn.hook_log_decay" for layer in range(N_LAYERS)]
    _, cache = model.run_with_cache(tokens[None], names_filter=names)
    steps = torch.stack([cache[name][0].mean(dim=0) for name in names])
    assert relative_error(found, -math.log(2) / steps) < LAW
    if family != "rwkv6":
        weights = torch.stack([layer.mixer.original_component.decay for layer in model.original_model.model.layers])
        assert relative_error(found, math.log(2) * (-weights).exp()) < LAW


def test_memory_and_erasure_are_those_of_the_decays(model):
    """Nothing is removed: a key survives by the decays of the tokens after it, and what is erased is erased by decay."""
    tokens, earlier = PROMPT[0], PROMPT[1, :7]
    table, states = state_memory(model, tokens), convert_prompt(model, tokens)
    names = [f"blocks.{layer}.attn.hook_{name}" for layer in range(N_LAYERS) for name in ("k", "log_decay")]
    _, cache = model.run_with_cache(tokens[None], names_filter=names)
    for number, read in enumerate(read_memory(model, tokens)):
        keys, steps = (cache[f"blocks.{number}.attn.hook_{name}"][0] for name in ("k", "log_decay"))
        after = steps.sum(dim=0) - steps.cumsum(dim=0)
        expected = (keys * after.exp()).norm(dim=-1) / keys.norm(dim=-1)
        survival = torch.tensor(table.query(f"layer == {number}")["survival"].to_numpy()).view(N_HEADS, -1)
        assert relative_error(survival, expected.T) < LAW
        written = torch.einsum("phk,phv->hkv", read.carried_keys, read.values)
        assert relative_error(written, states.layers[number].state.b_kv[0]) < LAW
    erasure = state_erasure(model, tokens, earlier)
    assert abs(erasure["left"] - erasure["left_by_decay"]).max() < LAW and bool((erasure["left"] < 1).all())

"""Models with recurrent layers on the bridge: their states in a KVBias, next to the keys of the attention layers or alone."""

import copy
import json
from dataclasses import dataclass, replace

import pytest
import torch
from bridge_models import N_PROMPT, N_TEXT, PROMPT, TEXT, some_tokens
from kvlens.analyses.bias.exchange import HEAD_PART, HeadExchange, baseline_of, in_one_space
from precision import LAW, relative_error
from stacked_tensors import layers_with_state, with_stacked
from tiny_hf import HYBRIDS, PURELY_RECURRENT, tiny_hf_model
from torch import Tensor

from kvlens import KVBias, KVLensError, KVTransformerBridge, combine, convert_prompt
from kvlens.analyses import baseline_ablation
from kvlens.files.tensors import checked_tensor_bytes, read_checked_tensors
from kvlens.kv_bias import Recurrence
from kvlens.kv_bias.storage import FORMAT, FORMAT_VERSION

pytestmark = pytest.mark.usefixtures("without_gradients")

MAMBA_2 = ("bamba", "granitemoehybrid", "nemotron_h")
STATES = {
    "kimi_linear": (3, 6, 6, 3, 3 * 3 * 6),
    "minimax": (6, 8, 8, 0, 0),
    "jamba": (48, 6, 1, 3, 48),
    **dict.fromkeys(MAMBA_2, (4, 6, 12, 3, 2 * 2 * 6 + 4 * 12)),
}
"""Heads, d_k, d_v of a recurrent layer's state, and rows and channels of its convolution, where they are not Qwen3.5's."""


@pytest.fixture(scope="module", params=HYBRIDS)
def family(request):
    return request.param


def test_layers_of_both_kinds(model):
    bias, kind = convert_prompt(model, PROMPT), model.original_model.config.model_type
    n_kv_heads, d_head, d_key = {"kimi_linear": (6, 5, 7), **dict.fromkeys(MAMBA_2, (3, 4, 4))}.get(kind, (3, 8, 8))
    n_heads, d_k, d_v, *conv = STATES.get(kind, (4, 6, 5, 3, 2 * 2 * 6 + 4 * 5))
    assert bias.n_layers == (5 if kind == "nemotron_h" else 3)
    assert bias.attention_layers == (1,) and layers_with_state(bias) == (0, 2)
    assert bias.stacked("b_kv").shape == (1, 2, n_kv_heads, N_PROMPT, d_head)
    assert bias.stacked("state").shape == (2, 2, n_heads, d_k, d_v)
    assert bias.stacked("keys").shape == (1, 2, n_kv_heads, N_PROMPT, d_key)
    assert bias.stacked("conv").shape == (2, 2, *conv)
    assert bias.num_parameters == 2 * (N_PROMPT * n_kv_heads * (d_head + 1 + d_key) + 2 * n_heads * d_k * d_v)
    assert "1 layers x 6 heads" in repr(bias) and f"2 recurrent layers x {n_heads} heads, {d_k} x {d_v}" in repr(bias)


def test_the_states_are_those_of_transformers_cache(model):
    bias = convert_prompt(model, PROMPT)
    cache = model.original_model(PROMPT, use_cache=True).past_key_values
    for row, layer in enumerate(layers_with_state(bias)):
        if model.original_model.config.model_type == "minimax":
            assert relative_error(bias.stacked("state")[row], cache.linear_cache[layer]) < LAW
            continue
        state = cache.layers[layer].recurrent_states[0]
        kind = model.original_model.config.model_type
        state = state.mT if kind in MAMBA_2 else state[..., None] if kind == "jamba" else state  # stored transposed, or flat
        assert relative_error(bias.stacked("state")[row], state) < LAW
        assert relative_error(bias.stacked("conv")[row], cache.layers[layer].conv_states[0][..., -3:].transpose(1, 2)) < LAW


def test_without_a_cache_nothing_attached_is_transformers(model):
    assert torch.equal(model(TEXT, use_cache=False), model.original_model(TEXT).logits)


@pytest.mark.one_in(3)
def test_hooks_within_the_prompts_pass_reach_the_state(model):
    """What a hook makes of the old state is what the new one continues from."""
    first = convert_prompt(model, PROMPT[:, :5])
    halved = [(f"blocks.{layer}.attn.hook_b_kv", lambda b, hook: 0.5 * b) for layer in layers_with_state(first)]
    hooked = convert_prompt(model, PROMPT[:, 5:], initial=first, fwd_hooks=halved)
    half = with_stacked(first, state=0.5 * first.stacked("state"))
    expected = convert_prompt(model, PROMPT[:, 5:], initial=half)
    assert relative_error(hooked.stacked("state"), expected.stacked("state")) < LAW


@pytest.mark.one_in(3)
def test_hooks_fire_at_every_pass_and_ablation_is_no_bias(model):
    bias = convert_prompt(model, PROMPT)
    options = dict(max_new_tokens=6, do_sample=False, stop_at_eos=False, verbose=False)
    names = [f"blocks.{layer}.attn.hook_b_{x}" for layer in range(3) for x in ("kv", "d")]
    names = [name for name in names if name in model.hook_dict]
    assert len(names) == 4
    seen = dict.fromkeys(names, 0)

    def ablate(b, hook):
        seen[hook.name] += 1
        return torch.zeros_like(b)

    with model.kv_bias(bias), model.hooks(fwd_hooks=[(name, ablate) for name in names]):
        ablated = model.generate(TEXT, **options)
    assert set(seen.values()) == {6}
    with model.kv_bias(0 * bias):
        assert torch.equal(model.generate(TEXT, **options), ablated)
    with model.kv_bias(bias.zero_like()):  # the convolution's inputs too
        assert relative_error(model(TEXT), model.original_model(TEXT).logits) < LAW


@pytest.mark.one_in(3)
def test_hooks_without_a_bias_change_decoding_too(model):
    """The mixer's state travels with the cache, so that a hook acts alike with and without one."""
    options = dict(max_new_tokens=6, do_sample=False, stop_at_eos=False, verbose=False)
    hooks = [("blocks.0.attn.hook_v", lambda v, hook: -2 * v)]
    with model.hooks(fwd_hooks=hooks):
        cached, whole = (model.generate(TEXT, use_past_kv_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, whole)
    assert relative_error(model.run_with_hooks(TEXT, fwd_hooks=hooks), model(TEXT)) > 0.01  # it matters


@pytest.mark.one_in(3)
def test_a_token_decoded_behind_padding_is_no_padding(model):
    text, mask = some_tokens(2, N_TEXT, seed=1), torch.ones(2, N_TEXT, dtype=torch.long)
    mask[0, :4] = 0
    plain = model.original_model
    with model.kv_bias(convert_prompt(model, PROMPT[0])):  # so that the mixers compute the layers
        first = plain(text[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
        decoded = plain(text[:, -1:], attention_mask=mask, past_key_values=first.past_key_values).logits[:, -1]
        for row, start in ((0, 4), (1, 0)):
            assert relative_error(decoded[row], model(text[row : row + 1, start:])[0, -1]) < LAW


def test_the_convolution_is_replaced_with_all_heads_of_its_layer(bridge_of):
    """baseline_ablation, against biases put together by hand."""
    model = bridge_of("qwen3_5")
    prompt, text = torch.cat([torch.zeros(1, dtype=torch.long), some_tokens(10)]), some_tokens(6, seed=1)
    bias, baseline = convert_prompt(model, prompt), baseline_of(model, prompt)
    one, every, conv = bias.stacked("state"), bias.stacked("state"), bias.stacked("conv")
    state = baseline.layers[0].state.b_kv[0]
    one[0, 1], every[0], conv[0] = state[1], state, baseline.layers[0].last["conv"][0]

    def log_p(bias):
        with model.kv_bias(bias):
            return model(text[None])[0].double().log_softmax(-1)

    own, expected = log_p(bias), []
    for by_hand in (with_stacked(bias, state=one), with_stacked(bias, state=every, conv=conv)):
        expected.append(float((own.exp() * (own - log_p(by_hand))).sum(-1).mean()))
    table = baseline_ablation(model, prompt, text, [[(0, 1)], [(0, head) for head in range(4)]])
    assert 0.05 < expected[0] < expected[1]
    assert table["kl"].tolist() == pytest.approx(expected, abs=LAW)


def test_a_head_of_a_state_beside_attention_is_selected_alone(bridge_of):
    bias = convert_prompt(bridge_of("falcon_h1"), PROMPT)
    first = bias.first_state_head(0)
    one = bias.select(heads=[(0, first + 1)]).layers[0]
    assert torch.equal(one.state.b_kv[:, 1], bias.layers[0].state.b_kv[:, 1])
    assert not one.state.b_kv[:, 0].any() and not one.state.b_kv[:, 2:].any() and not one.attention.b_kv.any()
    attention = bias.select(heads=[(0, head) for head in range(first)]).layers[0]
    assert not attention.state.b_kv.any() and attention.attention.b_kv.any()


@dataclass(frozen=True, eq=False)
class TwoMatrices(Recurrence):
    """What a layer of another kind might leave: a second matrix, which is a sum, too, and how often it forgot."""

    second: Tensor
    count: Tensor

    SUMS = ("b_kv", "second")


def test_what_another_kind_of_layer_leaves_is_carried_by_every_operation(bridge_of, tmp_path):
    """Its second matrix is treated as the state is; the count, which is no sum, is as in the first of biases that are added."""
    plain = [convert_prompt(bridge_of("falcon_h1"), tokens) for tokens in (PROMPT[0], some_tokens(N_PROMPT, seed=2))]

    def with_two(bias):
        def change(layer):
            of = layer.state.b_kv
            return replace(layer, parts=(layer.attention, TwoMatrices(of, 3 * of, of.flatten(2).sum(-1))))

        return bias.map_layers(change)

    def carried(of, count=True):
        for name, factor in (("second", 3), ("count", None))[: 1 + count]:
            state = of.stacked("state")
            expected = state.flatten(-2).sum(-1) if factor is None else factor * state
            assert relative_error(of.stacked(name), expected) < LAW
        return of

    a, b = map(with_two, plain)
    head, heads = a.first_state_head(1) + 1, a.n_heads_of(1) - a.first_state_head(1)
    carried(KVBias.batch([a, b]).select_prompts(torch.tensor([1, 0])).select_prompt(0))
    carried(a.exchange_layers(b, torch.arange(a.n_layers)[None] % 2 == 0))
    for of in (a + 0.5 * b, a.select(heads=[(1, head)]), a.exchange_heads(b, [(1, head)])):
        carried(of, count=False)
    chosen = HeadExchange(*in_one_space(a, b))
    row = torch.zeros(1, len(chosen.parts), dtype=torch.bool)
    row[0, chosen.of(1, head, [HEAD_PART])] = True
    mixed = carried(chosen.biases(row)).layers[1].state
    assert torch.equal(mixed.count[0, 1], b.layers[1].state.count[0, 1]) and heads > 1
    assert torch.equal(mixed.count[0, 0], a.layers[1].state.count[0, 0])
    assert not a.zero_like().stacked("second").any()
    with pytest.raises(KVLensError, match="count, second of recurrent layers"):
        a.save(tmp_path / "bias.safetensors")
    with pytest.raises(KVLensError, match="second of layer 0"):
        a.map_layers(lambda layer: layer.with_tensors({"second": layer.state.second / 0})).check_finite("this")


@pytest.mark.one_in(3)
def test_arithmetic_selection_and_files(model, tmp_path):
    a, b = convert_prompt(model, PROMPT), convert_prompt(model, some_tokens(2, N_PROMPT, seed=2))
    total = a + 0.5 * b
    assert relative_error(total.stacked("state"), a.stacked("state") + 0.5 * b.stacked("state")) < LAW
    assert torch.equal(total.stacked("conv"), b.stacked("conv")) and torch.equal((a - b).stacked("conv"), a.stacked("conv"))
    if a.stacked("conv").numel():
        with pytest.raises(KVLensError, match="conv, the convolution's inputs, differs"):
            combine(a, b)
    assert not combine(a, b, shift_state="zero").stacked("conv").any()
    heads = a.layers[0].state.n_heads
    one = a.select(layers=[1], heads=[(2, 2)])
    others = [head for head in range(heads) if head != 2]
    state = one.stacked("state")
    assert torch.equal(state[1, :, 2], a.stacked("state")[1, :, 2]) and not state[:, :, others].any()
    assert torch.equal(one.stacked("b_kv"), a.stacked("b_kv")) and torch.equal(one.stacked("conv"), a.stacked("conv"))
    rest = a.select(layers=[0], heads=[(2, head) for head in others])
    assert torch.equal(state + rest.stacked("state"), a.stacked("state"))
    with pytest.raises(IndexError):
        a.select(heads=[(0, heads)])
    a.save(tmp_path / "bias.safetensors")
    read = KVBias.load(tmp_path / "bias.safetensors")
    assert layers_with_state(read) == (0, 2) and read.fingerprint == a.fingerprint
    with model.kv_bias(a):
        expected = model(TEXT)
    with model.kv_bias(read):
        assert torch.equal(model(TEXT), expected)
    with model.kv_bias(read.select_prompt(1)):
        assert relative_error(model(TEXT[1:]), expected[1:]) < LAW
    with model.kv_bias(read.select_prompt(1).repeat(2)):
        assert relative_error(model(TEXT)[1], expected[1]) < LAW
    assert read.to(torch.float64).stacked("conv").dtype == torch.float64


@pytest.mark.one_in(3)
def test_a_copy_of_the_model_reads_its_own_bias(model):
    bias, twin = convert_prompt(model, PROMPT), copy.deepcopy(model)
    with model.kv_bias(bias):
        expected, plain = model(TEXT), twin(TEXT)
    with twin.kv_bias(bias):
        assert torch.equal(twin(TEXT), expected)
    assert torch.equal(model(TEXT), plain) and relative_error(plain, expected) > 0.01  # it matters


def test_a_damaged_file_of_states_is_refused(model, tmp_path):
    path = tmp_path / "bias.safetensors"
    convert_prompt(model, PROMPT).save(path)
    tensors, metadata = read_checked_tensors(path, "test", FORMAT, FORMAT_VERSION)
    meta = json.loads(metadata["kv_bias"])
    for layers in (3, [2, 0], [0, 5], [0], ["0", "2"], []):
        changed = {**metadata, "kv_bias": json.dumps({**meta, "recurrent_layers": layers})}
        path.write_bytes(checked_tensor_bytes(tensors, {k: v for k, v in changed.items() if k != "checksum"}))
        with pytest.raises(KVLensError):
            KVBias.load(path)
    path.write_bytes(checked_tensor_bytes({k: v for k, v in tensors.items() if k != "recurrent.conv"}, metadata))
    with pytest.raises(KVLensError, match="hold b_KV, conv; the file has .* and b_KV$"):
        KVBias.load(path)


def test_bad_input_is_refused_with_a_message(model):
    bias = convert_prompt(model, PROMPT)
    cache = model.original_model(TEXT, use_cache=True).past_key_values
    with pytest.raises(KVLensError, match=r"layer 0 \(\w+\): the cache that this pass continues"), model.kv_bias(bias):
        model(TEXT[:, :1], past_key_values=cache)
    with pytest.raises(KVLensError, match="state of layer 0 is not finite"):
        model.attach_kv_bias(with_stacked(bias, state=bias.stacked("state") * torch.inf))
    with pytest.raises(KVLensError, match=r"conv of layer 0 must be \[2, .*got \[1, "):
        with_stacked(bias, conv=bias.stacked("conv")[:, :1])


@pytest.mark.parametrize("family", PURELY_RECURRENT)
def test_states_alone_replace_the_prompt(family, bridge_of):
    model, plain = bridge_of(family), tiny_hf_model(family)
    whole = plain(torch.cat([PROMPT, TEXT], dim=1)).logits[:, N_PROMPT:]
    with model.kv_bias(convert_prompt(model, PROMPT)):
        assert relative_error(model(TEXT), whole) < LAW
    assert torch.equal(model(TEXT), plain(TEXT).logits) and relative_error(model(TEXT), whole) > 0.01  # it matters


@pytest.mark.parametrize("family", PURELY_RECURRENT)
def test_the_bias_is_the_states_alone(family, bridge_of, tmp_path):
    model, plain = bridge_of(family), tiny_hf_model(family)
    n_heads, d_v = (4, 12) if family == "mamba2" else (48, 1)
    bias = convert_prompt(model, PROMPT)
    assert bias.attention_layers == () and layers_with_state(bias) == (0, 1, 2) and not bias.attention
    assert bias.stacked("state").shape == (3, 2, n_heads, 6, d_v) and bias.num_parameters == bias.stacked("state").numel()
    assert repr(bias).startswith(f"KVBias(batch 2, 3 recurrent layers x {n_heads} heads, 6 x {d_v}, n_prompt_tokens=13")
    cache = plain(PROMPT, use_cache=True).cache_params
    for layer in range(3):
        theirs = cache.layers[layer].recurrent_states[0]
        assert relative_error(bias.stacked("state")[layer], theirs.mT if family == "mamba2" else theirs[..., None]) < LAW
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


@pytest.mark.parametrize("family", PURELY_RECURRENT)
def test_bad_input_of_states_alone_is_refused(family, bridge_of):
    model = bridge_of(family)
    bias = convert_prompt(model, PROMPT)
    with pytest.raises(KVLensError, match="holds 2 prompts and the input has batch 1"), model.kv_bias(bias):
        model(TEXT[:1])
    with pytest.raises(KVLensError, match="weights differs"):
        KVTransformerBridge.boot_transformers(tiny_hf_model(family, seed=1)).attach_kv_bias(bias)

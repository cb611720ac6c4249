"""A KV bias on TransformerLens' bridge: converted equals prompted, at every pass, and nothing attached changes nothing.

Every hook point of attention, under a converted prompt, shows and does what it does in one pass over prompt and text.
"""

import contextlib
import copy
from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch
from bridge_models import FAMILIES, LIKE_THE_OTHERS, N_PROMPT, N_TEXT, PROMPT, TEXT, greedy_error, some_tokens
from precision import LAW, float64, relative_error
from stacked_tensors import layers_with_state, with_stacked
from tiny_hf import D_VOCAB, N_CTX, PURELY_RECURRENT, RWKV, WINDOW, tiny_hf_model
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module

from kvlens import KVBias, KVLensError, KVTransformerBridge, convert_prompt
from kvlens.bridge import read_memory
from kvlens.bridge.native import NATIVE_POINTS
from kvlens.bridge.softmax import BETWEEN, HOOKS, SoftmaxLayer
from kvlens.kv_bias import Keys
from kvlens.model import KVModel, heads_per_layer, recurrent_layers
from kvlens.ops.softmax_features import ScoreRule

pytestmark = pytest.mark.usefixtures("without_gradients")

N_NEW = 8
BOTH = torch.cat([PROMPT, TEXT], dim=1)
SEEN_IN = ["gpt2", "gpt_neox", "llama", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_5", "olmo_hybrid", "falcon_h1"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.mark.one_in(3)
def test_converted_equals_prompted(model):
    whole = model(BOTH)[:, N_PROMPT:]
    bias = convert_prompt(model, PROMPT)
    assert type(bias) is KVBias and {type(part) for part in bias.attention} == {Keys} and isinstance(model, KVModel)
    with model.kv_bias(bias):
        converted = model(TEXT)
    assert relative_error(converted, whole) < LAW
    assert relative_error(model(TEXT), whole) > 0.01  # the prompt matters


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", SEEN_IN)
def test_one_head_that_is_off_by_one_in_a_hundred_million_is_seen(family, bridge_of):
    """By the law above: of each kind of head that the family has, whose part of b_KV is multiplied by 1 + 1e-8."""
    model = bridge_of(family)
    whole, bias = model(BOTH)[:, N_PROMPT:], convert_prompt(model, PROMPT)

    for name in ("b_kv", "state") if layers_with_state(bias) else ("b_kv",):
        for head in range(bias.stacked(name).shape[2]):
            numbers = bias.stacked(name)
            numbers[0, :, head] *= 1 + 1e-8
            with model.kv_bias(with_stacked(bias, **{name: numbers})):
                assert relative_error(model(TEXT), whole) > LAW


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", [*FAMILIES, *PURELY_RECURRENT, *RWKV])
def test_gradients_through_a_conversion_are_those_of_one_pass(family, bridge_of):
    """Of a sum of squared logits by every embedding."""

    def gradient(model, logits):
        return torch.autograd.grad(logits.square().sum(), model.get_input_embeddings().weight)[0]

    model, plain = bridge_of(family), tiny_hf_model(family)
    with torch.enable_grad():
        expected = gradient(plain, plain(BOTH).logits[:, N_PROMPT:])
        with model.kv_bias(convert_prompt(model, PROMPT, detach=False)):
            assert relative_error(gradient(model.original_model, model(TEXT)), expected) < LAW


def test_keys_outside_a_window_are_not_scored(bridge_of):
    bias = convert_prompt(bridge_of("gemma3"), some_tokens(N_PROMPT)).attention[0]
    positions, rule = torch.arange(N_TEXT)[None], ScoreRule(2.0, window=WINDOW)
    near, first = bias.in_window(rule, positions), N_PROMPT - (WINDOW - 1)
    assert near.b_kv.shape[2] == near.features.n_features == WINDOW - 1
    q = torch.randn(1, N_TEXT, 6, 10, generator=torch.Generator().manual_seed(0))
    scores = bias.features.log_features(q, rule, positions)
    assert relative_error(near.features.log_features(q, rule, positions), scores[..., first:]) < LAW
    assert bool((scores[..., :first] == -torch.inf).all())
    assert bias.in_window(rule, torch.tensor([[WINDOW]])).b_d.shape[2] == 1  # none is seen, and one stays
    assert bias.in_window(ScoreRule(2.0), positions) is bias


@pytest.mark.one_in(2)
def test_a_then_b_is_the_concatenation(model):
    whole = convert_prompt(model, PROMPT)
    both = convert_prompt(model, PROMPT[:, 5:], initial=convert_prompt(model, PROMPT[:, :5]))
    assert torch.equal(both.stacked("distance"), whole.stacked("distance"))
    assert both.n_prompt_tokens == N_PROMPT and both.position_offset == N_PROMPT
    with model.kv_bias(whole):
        expected = model(TEXT)
    with model.kv_bias(both):
        assert relative_error(model(TEXT), expected) < LAW
        with model.kv_bias(whole):
            assert model.attached_kv_bias is whole
        assert model.attached_kv_bias is both  # an inner bias gives way to the outer one again


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", [*FAMILIES, *PURELY_RECURRENT, *RWKV])
def test_greedy_tokens_are_those_behind_the_prompt(family, bridge_of):
    check_greedy(bridge_of(family), n=6, use_past_kv_cache=True)


@pytest.mark.parametrize("family", ["gpt2", "qwen3_5"])
def test_greedy_tokens_without_a_cache(family, bridge_of):
    check_greedy(bridge_of(family), n=2, use_past_kv_cache=False)


def check_greedy(model, n, use_past_kv_cache):
    """Each token is the likeliest behind the prompt and the tokens before it."""
    passes = []
    hooks = [("blocks.1.attn.hook_b_kv", lambda b, hook: passes.append(b.shape))]
    error = greedy_error(model, n, N_NEW, hooks, use_past_kv_cache=use_past_kv_cache)
    assert len(passes) == N_NEW and bool((error < LAW).all())


@pytest.mark.one_in(2)
def test_nothing_attached_changes_nothing(family, model):
    text, plain = some_tokens(2, N_TEXT), tiny_hf_model(family)
    bridge = build_bridge_from_module(plain, type(plain).__name__, hf_config=plain.config)
    assert isinstance(model, TransformerBridge)
    logits, cache = bridge.run_with_cache(text)
    ours, our_cache = model.run_with_cache(text)
    if recurrent_layers(model) or shows_native(model):  # run_with_cache hooks everything, which is then computed by kvlens
        # with Transformers 5.24 the plain bridge computes delta-rule layers itself, and shows more points inside of them
        outside = {name for name in cache if ".linear_attn." not in name or name.endswith((".hook_in", ".hook_out"))}
        assert relative_error(ours, logits) < LAW and outside < set(our_cache)
        ours = bridge(text)
    else:
        assert torch.equal(logits, ours) and set(cache) <= set(our_cache)  # a fused projection shows what it rotates too
    before = hooks_of(model)
    with model.kv_bias(convert_prompt(model, text)):
        model(text)
        with pytest.raises(ZeroDivisionError):
            model.run_with_hooks(text, fwd_hooks=[("blocks.1.attn.hook_pattern", lambda x, hook: 1 / 0)])
    assert hooks_of(model) == before
    assert torch.equal(model(text), ours)


def test_only_what_is_hooked_is_computed_by_the_bridge(bridge_of, monkeypatch):
    """Of blocks, norms and MLPs: in any order of passes with and without hooks."""
    model, called = bridge_of("llama"), []
    names = ("hook_in", "hook_out", "ln1.hook_in", "ln2.hook_scale", "mlp.hook_in", "mlp.gate.hook_out")
    monkeypatch.setattr(HookPoint, "forward", lambda point, x: called.append(point) or x)
    points = [model.hook_dict[f"blocks.1.{name}"] for name in names]
    for point in points:
        called.clear()
        model(TEXT)
        assert not {id(x) for x in called} & {id(x) for x in points}
        with point.register_forward_hook(lambda *of_pass: None):
            model(TEXT)
        assert sum(x is point for x in called) == 1


def shows_native(model):
    return any(isinstance(part, SoftmaxLayer) and part.is_native for part in model.__dict__["_parts"])


def hooks_of(model):
    return {name: len(module._forward_hooks) for name, module in model.original_model.named_modules()}


@pytest.mark.one_in(3)
def test_hooks_see_the_summands_and_change_the_bias(model):
    bias = convert_prompt(model, PROMPT)
    f = bias.fingerprint
    with model.kv_bias(bias):
        plain, cache = model.run_with_cache(TEXT)
        at = {name: cache[f"blocks.1.attn.{name}"] for name in ("hook_b_kv", "hook_b_d", "hook_z_context", "hook_z_bias")}
        assert at["hook_b_kv"].shape == (2, f.n_heads, N_PROMPT, f.d_head) and at["hook_b_d"].shape == (2, f.n_heads, N_PROMPT)
        z = cache["blocks.1.attn.o.hook_in"].reshape(at["hook_z_bias"].shape)
        assert torch.equal(at["hook_z_context"] + at["hook_z_bias"], z)
        pattern = cache["blocks.1.attn.hook_pattern"].sum(dim=-1).transpose(1, 2)
        assert bool((pattern[:, 0] < 1).all())  # later tokens may have left the prompt behind their window
        names = [f"blocks.{layer}.{x}" for layer in range(3) for x in ("attn.hook_b_kv", "attn.hook_b_d", "mamba.hook_b_kv")]
        zero = [(name, lambda b, hook: b * 0) for name in names if name in model.hook_dict]
        without = model.run_with_hooks(TEXT, fwd_hooks=zero)
    with model.kv_bias(0 * bias):
        assert relative_error(without, model(TEXT)) < LAW
    assert relative_error(without, plain) > 0.01  # it matters


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3", "qwen3_5"])
def test_a_query_that_is_patched_reads_the_bias_patched(family, bridge_of):
    """A hook attached before or within the bias acts on both summands."""
    model = bridge_of(family)
    names = [f"blocks.1.attn.{name}" for name in ("hook_q", "hook_rot_q", "q.hook_out")]
    name = next(name for name in names if name in model.hook_dict)  # latent attention rotates a part only
    hooks = [(name, lambda q, hook: 0.5 * q)]
    expected = model.run_with_hooks(BOTH, fwd_hooks=hooks)[:, N_PROMPT:]
    bias = convert_prompt(model, PROMPT, fwd_hooks=hooks)
    with model.kv_bias(bias):
        assert relative_error(model.run_with_hooks(TEXT, fwd_hooks=hooks), expected) < LAW
    with model.hooks(fwd_hooks=hooks), model.kv_bias(bias):
        assert relative_error(model(TEXT), expected) < LAW


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3", "qwen3_5", "lfm2", "falcon_h1"])
def test_a_folder_a_file_and_arithmetic(tmp_path, family):
    plain = tiny_hf_model(family)
    with float64():
        model = KVTransformerBridge.boot_transformers(tiny_hf_model(family))
    plain.save_pretrained(tmp_path / "model")
    other = KVTransformerBridge.boot_transformers(tmp_path / "model", device="cpu", dtype=torch.float64)
    assert model.fingerprint() == other.fingerprint()
    bias = convert_prompt(model, some_tokens(N_PROMPT))
    bias.save(tmp_path / "bias.safetensors")
    read = KVBias.load(tmp_path / "bias.safetensors")
    text = some_tokens(1, N_TEXT, seed=1)
    with other.kv_bias(read):
        once = other(text)
    with other.kv_bias(0.25 * read + 0.75 * read):
        assert relative_error(other(text), once) < LAW
    other.original_model.get_input_embeddings().weight.mul_(2)
    with pytest.raises(
        KVLensError, match=rf"attach_kv_bias: {type(plain).__name__}: weights differs.*convert the prompt again"
    ):
        other.attach_kv_bias(bias)


def test_short_convolutions_leave_their_last_inputs():
    """LFM2: layers 0 and 2 have no heads and no state, and the rows of their convolutions matter."""
    plain = tiny_hf_model("lfm2")
    cache = plain(PROMPT, use_cache=True).past_key_values
    model = KVTransformerBridge.boot_transformers(plain)
    bias = convert_prompt(model, PROMPT)
    assert bias.attention_layers == (1,) and layers_with_state(bias) == (0, 2) and heads_per_layer(model) == [0, 6, 0]
    assert bias.stacked("state").shape == (2, 2, 0, 1, 1) and bias.stacked("conv").shape == (2, 2, 3, 24)
    assert "1 layers x 6 heads" in repr(bias) and "2 short convolutions" in repr(bias)
    for row, layer in enumerate((0, 2)):
        assert relative_error(bias.stacked("conv")[row], cache.layers[layer].conv_states[0][..., -3:].transpose(1, 2)) < LAW
    with model.kv_bias(bias):
        whole = model(TEXT)
        without = model.run_with_hooks(TEXT, fwd_hooks=[("blocks.0.attn.hook_conv_state", lambda x, hook: 0 * x)])
    assert relative_error(without, whole) > 0.01  # it matters
    assert [memory.values.shape for memory in read_memory(model, PROMPT[0])] == [(N_PROMPT, 0, 1)] * 2


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3_5", "kimi_linear"])
def test_bad_input_that_overflows_half_precision_is_refused(family):
    plain = tiny_hf_model(family).half()
    values = "in_proj_qkv" if family == "qwen3_5" else "c_attn" if family == "gpt2" else "v_proj"
    model = KVTransformerBridge.boot_transformers(copy.deepcopy(plain))
    for held in (model.original_model, plain):
        for name, weight in held.named_parameters():
            if values in name or (family == "gpt2" and name.endswith(".v._original_component.weight")):
                weight.mul_(1e5 if weight.dim() > 1 else 1).clamp_(-6e4, 6e4)
    with pytest.raises(KVLensError, match=r"of layer \d is not finite \(torch.float16\).*a wider dtype"):
        convert_prompt(model, some_tokens(2, N_PROMPT))
    with pytest.raises(KVLensError, match="Transformers' own logits are not finite"):
        KVTransformerBridge.boot_transformers(plain)


def test_bad_input_of_another_model_or_kind_is_refused(bridge_of):
    llama, gpt2 = bridge_of("llama"), bridge_of("gpt2")
    bias = convert_prompt(gpt2, some_tokens(N_PROMPT))
    with pytest.raises(KVLensError):
        llama.attach_kv_bias(bias)
    hooked = replace(bias.fingerprint, rest=bias.fingerprint.rest.replace("TransformerBridge", "HookedKVTransformer"))
    with pytest.raises(KVLensError, match="rest differs"):
        gpt2.attach_kv_bias(replace(bias, fingerprint=hooked, record=None))


def test_bad_input_of_another_window_or_rotary_positions_that_grow_is_refused(bridge_of):
    bias = convert_prompt(bridge_of("gemma3"), some_tokens(N_PROMPT))
    other = tiny_hf_model("gemma3")
    other.config.sliding_window = WINDOW + 1
    with pytest.raises(KVLensError, match=f"'sliding_window {WINDOW}' for the bias, 'sliding_window {WINDOW + 1}'"):
        KVTransformerBridge.boot_transformers(other).attach_kv_bias(bias)
    other.config.rope_parameters["full_attention"]["rope_type"] = "dynamic"
    with pytest.raises(KVLensError, match=r"rotary positions \(dynamic\) change with the length"):
        KVTransformerBridge.boot_transformers(other)


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3", "qwen3_5"])
def test_bad_input_is_refused(family, bridge_of):
    model = bridge_of(family)
    bias = convert_prompt(model, some_tokens(2, N_PROMPT))
    for text in (some_tokens(3, N_TEXT), some_tokens(2, N_CTX - N_PROMPT + 1)):
        with pytest.raises(KVLensError), model.kv_bias(bias):
            model(text)
    for prompt in (some_tokens(N_CTX + 1), torch.tensor([D_VOCAB])):
        with pytest.raises(KVLensError):
            convert_prompt(model, prompt)
    with pytest.raises(KVLensError, match="hook_z_bias"):
        model.run_with_cache(some_tokens(1, 3), names_filter="blocks.0.attn.hook_z_biases")
    assert model.attached_kv_bias is None


SWITCHES = ("use_attn_result", "use_split_qkv_input", "use_attn_in")
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in LIKE_THE_OTHERS]
CHANGED_BY_A_SWITCH = {("falcon_h1", "use_split_qkv_input"), ("falcon_h1", "use_attn_in")}
"""TransformerLens' split inputs lose Falcon-H1's multiplier of keys, so that the logits are another model's."""
ALONE = {*NATIVE_POINTS, *BETWEEN}
"""Whether one of these is hooked decides how a layer is computed: each is edited in passes of its own, the others together."""


def of_text(x):
    """What belongs to the text, in queries and in keys; no other axis is as long as both texts together."""
    for axis, size in enumerate(x.shape):
        x = x.narrow(axis, N_PROMPT, N_TEXT) if size == N_PROMPT + N_TEXT else x
    return x


def scaled(x, hook, part, by):
    """Every other dimension: a norm would undo what is done to all of them alike."""
    x = x.clone()
    part(x)[..., ::2] *= by
    return x


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", [*FAMILIES, *SLOW])
@pytest.mark.filterwarnings("ignore:A forward hook edited hook_scale:UserWarning")  # TransformerLens, of any such edit
@pytest.mark.filterwarnings("ignore:run_with_cache. skipped:UserWarning")  # points that a switch turns on
@torch.no_grad()
def test_every_name_fires_and_every_edit_acts_as_in_one_pass(family, bridge_of):
    model = bridge_of(family)
    bias, logits = convert_prompt(model, PROMPT), model(BOTH)
    edited = check_names(model, bias, edited=set())
    for switch in SWITCHES:
        with contextlib.suppress(NotImplementedError):  # TransformerLens has it for some families only
            getattr(model, f"set_{switch}")(True)
            changes_logits = relative_error(model(BOTH), logits) > LAW
            assert changes_logits == ((family, switch) in CHANGED_BY_A_SWITCH)
            edited |= set() if changes_logits else check_names(model, bias, edited)
        setattr(model.cfg, switch, False)


def check_names(model, bias, edited):
    """All names in a layer, which are returned; those of ``edited`` are seen, and not edited again."""
    only = dict(names_filter=lambda name: name.startswith(("blocks.1.attn", "blocks.1.mixer")))
    _, of_whole = model.run_with_cache(BOTH, **only)
    with model.kv_bias(bias):
        _, under_bias = model.run_with_cache(TEXT, **only)
    whole, ours = set(of_whole), set(under_bias)
    assert whole <= ours and ours - whole == {f"blocks.1.attn.{name}" for name in HOOKS}
    for name in sorted(whole):
        seen = under_bias[name]
        assert relative_error(seen, of_text(of_whole[name]).expand_as(seen)) < LAW, name

    def act_alike(names):
        in_whole, under_bias = (
            [(name, partial(scaled, part=part, by=by)) for name, by in zip(names, cycle((0.5, 2)))]
            for part in (of_text, lambda x: x)
        )
        expected = model.run_with_hooks(BOTH, fwd_hooks=in_whole)[:, N_PROMPT:]
        with model.kv_bias(bias):
            return relative_error(model.run_with_hooks(TEXT, fwd_hooks=under_bias), expected) < LAW

    new = whole - edited
    alone = {name for name in new if name.rpartition(".")[2] in ALONE}
    for names in [sorted(new - alone), *([name] for name in sorted(alone))]:
        assert act_alike(names), [name for name in names if not act_alike([name])]
    return whole

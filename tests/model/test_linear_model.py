"""A linear or shifted model behaves as a TransformerLens user expects: hooks, caches, padding, generation.

Decoding token by token: each step uses the current weights and the current hooks.
"""

import copy
import pickle

import pytest
import torch
from precision import LAW, relative_error, share
from small_models import linear_model, small_model, tokens
from tiny_text_model import tiny_text_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from kvlens import HookedKVTransformer, KVLensError, KVShiftConfig, convert_prompt
from kvlens.components import is_hooked
from kvlens.ops.linear_attention import ffn_with_state

TEXTS = ["The widget", "Return the gadget and the widget"]
GREEDY = dict(max_new_tokens=5, do_sample=False, stop_at_eos=False, verbose=False)


def test_the_cache_is_the_state_and_does_not_grow():
    model = linear_model()
    cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2)
    sizes = []
    for n in (5, 1, 30):
        model(tokens(2, n), past_kv_cache=cache)
        entry = cache[0]
        sizes.append(sum(t.numel() for t in (*entry.state, *entry.shift_state.values())))
        assert entry.past_keys.untyped_storage().size() <= 8
    assert len(set(sizes)) == 1
    assert cache[0].past_keys.shape == (2, 36, 5, 6)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return out


def test_no_tensor_of_pos_times_pos_is_made_unless_scores_or_pattern_are_hooked():
    model, n_pos = linear_model(dtype=torch.float32), 1000
    x = tokens(1, n_pos)
    unscored = dict(names_filter=lambda name: "pattern" not in name and "attn_scores" not in name)
    for options in ({}, unscored, dict(names_filter="blocks.1.attn.hook_pattern")):
        with Largest() as largest, torch.no_grad():
            model.run_with_cache(x, **options) if options else model(x)
        hooked = isinstance(options.get("names_filter"), str)
        assert (largest.numel >= n_pos * n_pos) == hooked  # what one head's pattern has; there are five


def test_patching_the_pattern_or_the_scores_changes_the_output():
    model, x = linear_model(), tokens(1, 8)
    for name in ("hook_pattern", "hook_attn_scores", "hook_normalizer", "hook_phi_k", "hook_rot_q", "hook_k_shifted"):
        patched = model.run_with_hooks(x, fwd_hooks=[(f"blocks.0.attn.{name}", lambda t, hook: t + 0.3)])
        assert relative_error(patched, model(x)) > 1e-4  # it acts


def test_z_is_the_sum_of_what_context_and_bias_give_and_without_a_pattern_the_latter_alone():
    model, x = linear_model(), tokens(2, 8)
    with model.kv_bias(convert_prompt(model, tokens(1, 6, seed=7)[0])):
        _, cache = model.run_with_cache(x)
        with model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", lambda t, hook: t * 0)]):
            _, blind = model.run_with_cache(x)
    total = cache["z_context", 0, "attn"] + cache["z_bias", 0, "attn"]
    assert relative_error(total, cache["z", 0]) < LAW
    assert cache["b_kv", 0, "attn"].shape == (1, 5, 6, 6)
    assert torch.equal(blind["z", 1], blind["z_bias", 1, "attn"])
    assert bool((blind["z_context", 1, "attn"] == 0).all())


def test_bias_hooks_fire_at_every_decoding_step():
    model, calls = linear_model(), []
    with model.kv_bias(convert_prompt(model, tokens(1, 6))):
        hook = ("blocks.0.attn.hook_b_kv", lambda t, hook: calls.append(t.shape))
        with model.hooks(fwd_hooks=[hook]):
            model.generate(tokens(1, 3), **GREEDY)
    assert calls == [(1, 5, 6, 6)] * 5


def test_hooks_that_are_off_do_not_fire():
    _, cache = linear_model(kv_shift=None).run_with_cache(tokens(1, 5))
    assert not [key for key in cache if "shift" in key or "b_kv" in key or "z_bias" in key or "last_" in key]


def test_backward_hooks_fire_on_an_attached_bias_and_the_weights_get_gradients():
    model, grads = linear_model(), {}
    bias = convert_prompt(model, tokens(1, 5), detach=False)
    assert bias.stacked("b_kv").requires_grad
    names = [f"blocks.0.attn.{n}" for n in ("hook_b_kv", "hook_b_d", "hook_last_k", "hook_last_v")]
    hooks = [(n, lambda g, hook: grads.__setitem__(hook.name, g)) for n in names]
    for each in (bias, convert_prompt(model, tokens(1, 5))):
        grads.clear()
        with model.kv_bias(each), model.hooks(bwd_hooks=hooks):
            model(tokens(1, 6), return_type="loss").backward()
        assert sorted(grads) == sorted(names)
        assert grads["blocks.0.attn.hook_b_kv"].abs().sum() > 0 and model.W_E.grad is not None
    assert not each.stacked("b_kv").requires_grad


def test_no_hook_of_a_pass_stays_behind():
    model, x = linear_model(), tokens(1, 8)
    at = [(f"blocks.0.attn.{name}", lambda t, hook: None) for name in ("hook_z", "hook_v")]
    with model.hooks(fwd_hooks=at[:1], bwd_hooks=at):
        assert [len(model.hook_dict[name].fwd_hooks) for name, _ in at] == [1, 0]
        assert [len(model.hook_dict[name].bwd_hooks) for name, _ in at] == [1, 1]
        model(x).sum().backward()
    assert not any(point.has_hooks() for point in model.hook_dict.values())
    model.add_perma_hook(*at[0])
    model.run_with_cache(x, incl_bwd=False)
    assert [name for name, point in model.hook_dict.items() if point.has_hooks()] == [at[0][0]]
    model.reset_hooks(including_permanent=True)
    assert not any(point.has_hooks() for point in model.hook_dict.values())


def test_stop_at_layer_and_decompositions():
    model, x = linear_model(use_attn_result=True), tokens(1, 6)
    assert model(x, stop_at_layer=1).shape == (1, 6, 30)
    _, cache = model.run_with_cache(x)
    heads = cache.stack_head_results(layer=2)
    assert relative_error(heads.sum(0), cache["attn_out", 0] + cache["attn_out", 1] - model.b_O.sum(0)) < LAW
    attributed = cache.logit_attrs(heads, tokens=x)
    scale = cache["ln_final.hook_scale"]
    centered = heads - heads.mean(-1, keepdim=True)
    by_hand = torch.einsum("cbpm,bpm->cbp", centered / scale, model.W_U.T[x])
    assert relative_error(attributed, by_hand) < LAW
    pieces = cache.decompose_resid(layer=-1)
    assert relative_error(pieces.sum(0), cache["resid_post", 1]) < LAW


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models_accumulate_in_float32(dtype):
    """Their logits are as exact as those of rounded weights in float64."""
    exact, rounded, model = (linear_model(dtype=torch.float32).to(torch.float64, print_details=False) for _ in range(3))
    model.to(dtype, print_details=False)
    rounded.load_state_dict(model.state_dict())
    texts = [tokens(1, 40, seed=seed) for seed in range(4)]
    errors, x = [relative_error(rounded(text), exact(text)) for text in texts], texts[0]
    _, cache = model.run_with_cache(x)
    assert cache["phi_k", 0, "attn"].dtype == torch.float32
    assert cache["z", 0].dtype == dtype
    kv_cache = model.empty_cache()
    model(x, past_kv_cache=kv_cache)
    assert kv_cache[0].state.kv.dtype == torch.float32
    assert share(relative_error(model(x), exact(x)), errors) < 1


@pytest.mark.parametrize("positions", ["sinusoidal", "standard", "none", "rotary"])
def test_the_residual_stream_keeps_the_models_dtype(positions):
    model = linear_model(positional_embedding_type=positions, dtype=torch.float32)
    model.to(torch.bfloat16, print_details=False)
    _, cache = model.run_with_cache(tokens(1, 5))
    assert cache["resid_post", 1].dtype == torch.bfloat16


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_torchs_own_ways_to_change_the_dtype(attention):
    model, prompt, x = linear_model(attention=attention, dtype=torch.float32), tokens(1, 5, seed=1), tokens(1, 4)
    for change, dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16), ("double", torch.float64)):
        getattr(model, change)()
        with model.kv_bias(convert_prompt(model, prompt[0])):
            converted = model(x)
        assert converted.dtype == model.cfg.dtype == dtype
    whole = model(torch.cat([prompt, x], dim=1))[:, 5:]
    assert relative_error(converted, whole) < LAW


def test_autocast_does_not_reach_the_state():
    model, x = linear_model(dtype=torch.float32), tokens(1, 9)
    cache = model.empty_cache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x, past_kv_cache=cache)
    assert cache[0].state.kv.dtype == torch.float32


def test_rotary_linear_models_have_no_longest_text():
    model = linear_model(dtype=torch.float32)
    assert model(tokens(1, 3 * model.cfg.n_ctx)).isfinite().all()


def test_a_trainable_bias_trains():
    model, x = linear_model(trainable_kv_bias=True, dtype=torch.float32), tokens(4, 12)
    attn = model.blocks[0].attn
    assert (attn.b_KV.shape, attn.b_D.shape) == ((5, 6, 6), (5, 6))
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW([attn.b_KV, attn.b_D], lr=0.05)
    first = model(x, return_type="loss")
    for _ in range(20):
        optimizer.zero_grad()
        model(x, return_type="loss").backward()
        optimizer.step()
    assert model(x, return_type="loss") < first
    changed = [n for n, t in model.state_dict().items() if not torch.equal(t, before[n])]
    assert changed == ["blocks.0.attn.b_KV", "blocks.0.attn.b_D"]


def test_an_attached_bias_trains_in_any_dtype():
    model = linear_model(dtype=torch.float32).requires_grad_(False)
    bias, x = convert_prompt(model, tokens(1, 5)).to(torch.float64), tokens(1, 9)
    optimizer = torch.optim.SGD([part.b_kv.requires_grad_() for part in bias.attention], lr=1.0)
    losses = []
    with torch.no_grad():
        model.attach_kv_bias(bias)
    for _ in range(4):
        loss = model(x, return_type="loss")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


@pytest.mark.parametrize("mode", ["gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "muP"])
def test_every_weight_is_initialized_in_every_mode(mode, empty_is_nan):
    for kwargs in (dict(feature_map="random"), dict(feature_map="hedgehog", trainable_kv_bias=True)):
        model = linear_model(n_layers=1, init_mode=mode, kv_shift=KVShiftConfig(queries=True), **kwargs)
        assert not [name for name, tensor in model.state_dict().items() if tensor.isnan().any()]


def test_models_can_be_copied_and_pickled():
    model, x = linear_model(), tokens(2, 5)
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)


def test_hooks_that_edit_in_place_do_not_reach_weights_or_biases():
    model = linear_model(trainable_kv_bias=True).requires_grad_(False)
    bias, x = convert_prompt(model, tokens(1, 4)), tokens(1, 5)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    kept = bias.stacked("b_kv"), bias.stacked("last_k")

    def wipe(t, hook):
        t.zero_()
        return t

    edited = [n for n in model.hook_dict if ".attn." in n and n.rsplit("_", 1)[-1] not in ("result", "q", "k", "v", "z")]
    with model.kv_bias(bias):
        expected = model(x)
        model.run_with_hooks(x, fwd_hooks=[(name, wipe) for name in edited])
        assert torch.equal(model(x), expected)
    model.run_with_hooks(x, fwd_hooks=[(name, wipe) for name in edited])
    assert torch.equal(bias.stacked("b_kv"), kept[0]) and torch.equal(bias.stacked("last_k"), kept[1])
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_ungrouped_heads_read_the_shift_state():
    model, x = linear_model(n_heads=6, d_model=36, n_key_value_heads=2), tokens(1, 6)
    with model.kv_bias(convert_prompt(model, tokens(1, 5))):
        expected = model(x)
        model.set_ungroup_grouped_query_attention(True)
        assert relative_error(model(x), expected) < LAW


# --- generation ---


@pytest.mark.parametrize(
    "options", [dict(do_sample=False), dict(temperature=0.7, top_k=5), dict(freq_penalty=0.5), dict(top_p=0.8)]
)
@pytest.mark.parametrize("stop", [dict(stop_at_eos=False), dict(stop_at_eos=True, eos_token_id=[3, 5])])
def test_generation_is_transformer_lens_generation(options, stop):
    """With embeddings or without a cache TransformerLens' own loop runs: the same tokens must come out of both."""
    model, x = linear_model(), tokens(3, 5)
    results = []
    for cached in (True, False):
        torch.manual_seed(0)
        out = model.generate(x, max_new_tokens=8, verbose=False, use_past_kv_cache=cached, **options, **stop)
        results.append(out)
    assert torch.equal(*results)
    assert results[0].shape[1] > 5


@pytest.mark.one_in(2)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_batched_generation_with_a_tokenizer_equals_single_generation(side, attention):
    model = tiny_text_model(attention=attention, dtype=torch.float64)
    model.set_tokenizer(copy.deepcopy(model.tokenizer))
    model.tokenizer.padding_side = side
    alone = [model.generate(text, **GREEDY) for text in TEXTS]
    assert model.generate(TEXTS, **GREEDY) == alone
    assert model.generate(TEXTS, use_past_kv_cache=False, **GREEDY) == alone
    padded = model.to_tokens(TEXTS, padding_side="left")
    assert model.generate(padded, padding_side="left", return_type="str", **GREEDY) == alone
    streamed = list(model.generate_stream(TEXTS[1], return_type="tokens", **GREEDY))
    assert torch.cat(streamed, dim=1).shape[1] == model.to_tokens(TEXTS[1]).shape[1] + 5


def test_tokens_that_may_be_padded_on_the_right_are_not_continued():
    model = tiny_text_model()
    for side in ("left", "right"):
        with pytest.raises(KVLensError, match="padded on the left"):
            model.generate(model.to_tokens(TEXTS, padding_side=side), **GREEDY)


def test_a_model_trains_after_it_has_generated():
    model = linear_model()
    model.generate(tokens(1, 3), max_new_tokens=2, stop_at_eos=False, verbose=False)
    model(tokens(1, 30), return_type="loss").backward()
    assert model.W_E.grad is not None


PROMPT, TEXT = torch.arange(9)[None] % 7, torch.arange(6)[None] * 3 % 17
PLAIN_LINEAR = dict(
    attention="linear", feature_map="identity", normalizer="none", positional_embedding_type="rotary", dtype=torch.float64
)
GROUPED = dict(n_heads=6, d_model=36, n_key_value_heads=2)


def with_the_term_in_the_ffn(model, bias):
    """Logits of the text without a bias, the prompt's term added to every FFN's output."""
    queries, hooks = {}, []
    for layer, block in enumerate(model.blocks):

        def see(q, hook, layer=layer):
            queries[layer] = q / model.blocks[layer].attn.attn_scale

        def add(ffn, hook, layer=layer, attn=block.attn):
            return ffn_with_state(ffn, queries[layer], bias.layers[layer].attention.b_kv, attn.W_O)

        hooks += [(f"blocks.{layer}.attn.hook_rot_q", see), (f"blocks.{layer}.hook_mlp_out", add)]
    return model.run_with_hooks(TEXT, fwd_hooks=hooks)


@pytest.mark.parametrize(("parallel", "changes"), [(True, {}), (True, GROUPED), (False, {})])
@torch.no_grad()
def test_side_by_side_it_is_the_prompt_and_one_after_the_other_it_is_not(parallel, changes):
    model = small_model(parallel_attn_mlp=parallel, **PLAIN_LINEAR, **changes)
    bias = convert_prompt(model, PROMPT[0])
    prompted = model(torch.cat([PROMPT, TEXT], dim=1))[:, PROMPT.shape[1] :]
    error = relative_error(with_the_term_in_the_ffn(model, bias), prompted)
    assert error < LAW if parallel else error > 1e-3
    assert relative_error(model(TEXT), prompted) > 1e-3  # the term matters


MODELS = {
    "linear": linear_model,
    "softmax": lambda: small_model(dtype=torch.float64),
    "softmax, shifted": lambda: small_model(positional_embedding_type="rotary", kv_shift=KVShiftConfig(), dtype=torch.float64),
}


def read(model, n):
    """A cache that holds ``n`` tokens, read one by one after the first two."""
    cache, text = model.empty_cache(), tokens(1, n)
    for piece in (text[:, :2], *text[:, 2:].split(1, dim=1)):
        model(piece, past_kv_cache=cache)
    return cache


def an_optimizer_step(model, drawn):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for name, parameter in model.named_parameters():
        parameter.grad = -drawn[name]
    optimizer.step()
    optimizer.zero_grad()


def loaded_weights(model, drawn):
    model.load_state_dict({name: x + drawn[name] if name in drawn else x for name, x in model.state_dict().items()})


@torch.no_grad()
def an_edit_in_place(model, drawn):
    for name, parameter in model.named_parameters():
        parameter += drawn[name]


@torch.no_grad()
def new_parameters(model, drawn):
    for name, parameter in list(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.nn.Parameter(parameter + drawn[name]))


@pytest.mark.parametrize("change", [an_optimizer_step, loaded_weights, an_edit_in_place, new_parameters])
@pytest.mark.parametrize("kind", MODELS)
def test_the_next_token_reads_the_weights_as_they_are_now(kind, change):
    model, fresh, token = MODELS[kind](), MODELS[kind](), tokens(1, 1, seed=5)
    generator = torch.Generator().manual_seed(9)
    drawn = {n: 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}
    an_edit_in_place(fresh, drawn)  # before it has read anything
    with torch.no_grad():
        cache = read(model, 6)
        before = model(token, past_kv_cache=copy.deepcopy(cache))
        expected = fresh(token, past_kv_cache=copy.deepcopy(cache))
    change(model, drawn)
    with torch.no_grad():
        after = model(token, past_kv_cache=cache)
    assert torch.equal(after, expected)
    assert relative_error(after, before) > 0.01  # the change acts


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_a_model_that_changed_its_dtype_decodes_on_as_one_that_was_made_in_it(kind):
    model = MODELS[kind]().requires_grad_(False)
    prompt = tokens(1, 6)
    model.generate(prompt, max_new_tokens=2, do_sample=False, stop_at_eos=False, verbose=False)
    model.to(torch.float32, print_details=False)
    made = HookedKVTransformer(model.cfg).requires_grad_(False)
    made.load_state_dict(model.state_dict())
    cache, other = model.empty_cache(), made.empty_cache()
    for piece in prompt.split(1, dim=1):
        logits = model(piece, past_kv_cache=cache)
        assert logits.dtype == torch.float32
        assert torch.equal(logits, made(piece, past_kv_cache=other))


@pytest.mark.parametrize("kind", MODELS)
def test_hooks_that_come_between_two_tokens_see_the_next_and_only_that(kind):
    model = MODELS[kind]().requires_grad_(False)
    cache, (first, second) = read(model, 6), tokens(1, 2, seed=5).split(1, dim=1)
    untouched = copy.deepcopy(cache)
    plain = model(first, past_kv_cache=untouched)
    seen: list[str] = []
    with model.hooks(fwd_hooks=[(lambda name: True, lambda x, hook: seen.append(hook.name))]):
        hooked = model(first, past_kv_cache=cache)
    assert relative_error(hooked, plain) < LAW  # hooked scores are computed in another form
    _, whole = model.run_with_cache(tokens(1, 7))
    expected = list(whole)
    assert sorted(seen) == sorted(expected)
    after = model(second, past_kv_cache=cache)
    assert len(seen) == len(expected)
    assert relative_error(after, model(second, past_kv_cache=untouched)) < LAW
    assert not is_hooked(*model.modules())


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("kind", MODELS)
def test_torch_hooks_that_come_between_two_tokens_are_called_at_every_module_that_runs(kind, register):
    model = MODELS[kind]().requires_grad_(False)
    cache, token = read(model, 6), tokens(1, 1, seed=5)
    seen: list[str] = []
    named = [(name, module) for name, module in model.named_modules() if name.endswith((".hook_z", ".ln1", ".mlp", ".attn"))]
    named += [(name, model.get_submodule(name)) for name in ("embed", "ln_final", "unembed", "blocks.1", "hook_embed")]
    handles = [getattr(module, register)(lambda *_, name=name: seen.append(name)) for name, module in named]
    model(token, past_kv_cache=cache)
    for handle in handles:
        handle.remove()
    model(token, past_kv_cache=cache)
    assert sorted(seen) == sorted(name for name, _ in named)

"""Decoding token by token: each step uses the current weights and the current hooks."""

import copy

import pytest
import torch
from precision import LAW, relative_error
from small_models import linear_model, small_model, tokens

from kvlens import HookedKVTransformer, KVShiftConfig
from kvlens.components import is_hooked

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

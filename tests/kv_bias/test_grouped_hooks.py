"""``hook_b_kv`` and ``hook_b_d`` of models with grouped keys: a row per query head, and a write reaches that head alone."""

from collections.abc import Callable

import pytest
import torch
from small_models import linear_model, relative_error, small_model, tokens

from kvlens import HookedKVTransformer, KVBias, KVLensError, convert_prompt

HEADS, KV_HEADS = 6, 3
GROUPED = dict(n_heads=HEADS, n_key_value_heads=KV_HEADS, dtype=torch.float64)
KINDS = {
    "rotary": dict(positional_embedding_type="rotary"),
    "alibi": dict(positional_embedding_type="alibi"),
    "local": dict(use_local_attn=True, window_size=5, attn_types=["global", "local"]),
    "sinks": dict(use_attention_sinks=True),
}
PROMPT, TEXT = tokens(1, 7)[0], tokens(2, 6, seed=1)
ROUNDING = 1e-12  # float64; what an ablated head changes is 1e-3 and more


def grouped(form: str = "eager", **changes) -> HookedKVTransformer:
    model = small_model(**GROUPED, **changes)
    model.set_softmax_form(form)
    return model


def logits(model: HookedKVTransformer, bias: KVBias, hooks=(), text: torch.Tensor = TEXT, **options) -> torch.Tensor:
    with torch.no_grad(), model.kv_bias(bias):
        return model.run_with_hooks(text, fwd_hooks=list(hooks), **options)


def without(*heads: int, layer: int = 1) -> list[tuple[str, Callable]]:
    """Hooks that remove the bias of query heads, in place."""

    def ablate(b: torch.Tensor, hook) -> None:
        b[:, list(heads)] = 0

    return [(f"blocks.{layer}.attn.hook_b_{x}", ablate) for x in ("kv", "d")]


def blind_to_the_prompt(model: HookedKVTransformer, *heads: int, layer: int = 1) -> torch.Tensor:
    """Logits of the text behind the prompt, where the text's queries of some heads see no key of the prompt: no bias at all."""
    n = len(PROMPT)

    def blind(scores: torch.Tensor, hook) -> None:
        scores[:, list(heads), n:, :n] = -torch.inf

    with torch.no_grad(), model.using_softmax_form("eager"):
        whole = torch.cat([PROMPT.repeat(len(TEXT), 1), TEXT], dim=1)
        return model.run_with_hooks(whole, fwd_hooks=[(f"blocks.{layer}.attn.hook_attn_scores", blind)])[:, n:]


@pytest.mark.parametrize("form", ["eager", "fused"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_one_query_head_is_ablated_and_no_other(kind, form):
    model = grouped(form, **kind)
    bias = convert_prompt(model, PROMPT)
    whole = logits(model, bias)
    for heads in ((3,), (0, 5)):
        ablated = logits(model, bias, without(*heads))
        assert relative_error(ablated, blind_to_the_prompt(model, *heads)) < ROUNDING
        assert relative_error(ablated, whole) > 1e-3


@pytest.mark.parametrize("form", ["eager", "fused"])
def test_in_every_decoding_step(form):
    model = grouped(form, positional_embedding_type="rotary")
    bias = convert_prompt(model, PROMPT)
    cache = model.empty_cache(len(TEXT))
    steps = [logits(model, bias, without(3), TEXT[:, i : i + 1], past_kv_cache=cache) for i in range(TEXT.shape[1])]
    assert relative_error(torch.cat(steps, dim=1), blind_to_the_prompt(model, 3)) < ROUNDING


@pytest.mark.parametrize("form", ["eager", "fused"])
@pytest.mark.parametrize("weight", [0.5, -0.1])
def test_of_a_sum_and_of_a_batch(form, weight):
    """Tested by the bias without that head: ``select`` keeps a row per query head, and a sum of such sums rows."""
    model = grouped(form, positional_embedding_type="rotary")
    one, two = (convert_prompt(model, tokens(2, 7, seed=seed)) for seed in (2, 3))
    bias = one + weight * two
    rest = [(layer, head) for layer in range(2) for head in range(HEADS) if (layer, head) != (1, 3)]
    expected = logits(model, one.select(heads=rest) + weight * two.select(heads=rest))
    assert relative_error(logits(model, bias, without(3)), expected) < ROUNDING


def test_hooks_see_query_heads_and_looking_changes_no_bit():
    model = grouped(positional_embedding_type="rotary")
    bias = convert_prompt(model, PROMPT)
    with torch.no_grad(), model.kv_bias(bias):
        unseen = model(TEXT)
        seen, cache = model.run_with_cache(TEXT, names_filter=lambda name: "hook_b_" in name)
    every = bias.per_query_head()
    for layer in range(2):
        assert torch.equal(cache[f"blocks.{layer}.attn.hook_b_kv"][0], every.b_KV[layer])
        assert torch.equal(cache[f"blocks.{layer}.attn.hook_b_d"][0], every.b_D[layer])
    assert torch.equal(seen, unseen)
    assert f"{HEADS} heads" in repr(bias)


@pytest.mark.parametrize("form", ["eager", "fused"])
def test_gradients_of_each_query_head(form):
    """A backward hook, against the gradient of a bias that holds a row per query head."""
    model = grouped(form, positional_embedding_type="rotary")
    bias, found = convert_prompt(model, PROMPT), {}

    def keep(gradient: torch.Tensor, hook) -> None:
        found[hook.name] = gradient.clone()

    names = [f"blocks.1.attn.hook_b_{x}" for x in ("kv", "d")]
    with model.kv_bias(bias), model.hooks(bwd_hooks=[(name, keep) for name in names]):
        model(TEXT).square().sum().backward()
    every = bias.per_query_head()
    every.b_KV.requires_grad_(), every.b_D.requires_grad_()
    with model.kv_bias(every):
        model(TEXT).square().sum().backward()
    for name, of_all in zip(names, (every.b_KV.grad, every.b_D.grad), strict=True):
        assert found[name].shape == (1, *of_all[1].shape)
        torch.testing.assert_close(found[name][0], of_all[1], rtol=1e-9, atol=1e-9)


def test_a_row_per_key_value_head_is_refused_with_a_message():
    model = grouped()
    bias = convert_prompt(model, PROMPT)
    hook = ("blocks.1.attn.hook_b_d", lambda b, hook: b[:, :KV_HEADS])
    with pytest.raises(KVLensError, match=r"hook_b_d: a hook returned shape \[1, 3, 7\], expected \[batch or 1, 6, 7\]"):
        logits(model, bias, [hook])


@pytest.mark.parametrize("trained", [False, True])
def test_linear_attention_has_always_had_query_heads(trained):
    model = linear_model(**GROUPED, trainable_kv_bias=trained)
    bias = convert_prompt(model, PROMPT)
    if trained:  # what was converted is what was learned
        for layer, block in enumerate(model.blocks):
            block.attn.b_KV.data.copy_(bias.b_KV[layer])
            block.attn.b_D.data.copy_(bias.b_D[layer])
    rest = bias.select(heads=[(layer, head) for layer in range(2) for head in range(HEADS) if (layer, head) != (1, 3)])
    if not trained:
        assert relative_error(logits(model, bias, without(3)), logits(model, rest)) < ROUNDING
        return
    with torch.no_grad():
        ablated = model.run_with_hooks(TEXT, fwd_hooks=without(3))
        for layer, block in enumerate(model.blocks):
            block.attn.b_KV.data.copy_(rest.b_KV[layer])
            block.attn.b_D.data.copy_(rest.b_D[layer])
        assert relative_error(ablated, model(TEXT)) < ROUNDING

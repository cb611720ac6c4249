"""``hook_b_kv``, ``hook_b_d`` and ``hook_b_keys`` are a whole softmax bias, with a row per query head, even where keys are
grouped: patched, they equal ``select`` and ``+``, and a write reaches that head alone.
"""

import pytest
import torch
from precision import LAW
from small_models import by_steps, linear_model, model_of, relative_error, small_model, tokens
from stacked_tensors import with_stacked
from tiny_hf import tiny_hf_model

from kvlens import HookedKVTransformer, KVBias, KVLensError, convert_prompt

NAMES = ("b_kv", "b_d", "b_keys")
SHAPES = ("gpt2", "qwen3")
"""One key-value head per query head, and several query heads."""
STEPS = (True, False)
GROUPED = dict(n_heads=6, n_key_value_heads=3)
KINDS = {"rotary, grouped": {}, "alibi, grouped": {}, "local": GROUPED, "sinks": GROUPED}
ONE, OTHER, TEXT = tokens(1, 7)[0], tokens(1, 7, seed=1)[0], tokens(2, 5, seed=2)
FEW = dict(n_continuations=2, continuation_length=4, verbose=False)


pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture(scope="module", params=SHAPES)
def model(request):
    return HookedKVTransformer.from_pretrained("tiny", hf_model=tiny_hf_model(request.param), dtype=torch.float64, device="cpu")


def rescaled(bias: KVBias, seed: int) -> KVBias:
    """The same bias, stored with other log-scales."""
    more = torch.randn(bias.stacked("log_scale").shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    less = (-more).exp().repeat_interleave(bias.stacked("b_d").shape[-2] // more.shape[-1], dim=-1)
    b_kv, b_d = bias.stacked("b_kv") * less[..., None, None], bias.stacked("b_d") * less[..., None]
    return with_stacked(bias, b_kv=b_kv, b_d=b_d, log_scale=bias.stacked("log_scale") + more)


def logits(model, bias, hooks=(), text=TEXT, **options):
    with model.kv_bias(bias):
        return model.run_with_hooks(text, fwd_hooks=list(hooks), **options)


def shown(model, bias, layer, names=NAMES, text=TEXT):
    """What the hook points of a layer are given."""
    hooks = {f"blocks.{layer}.attn.hook_{name}": name for name in names}
    with model.kv_bias(bias):
        _, cache = model.run_with_cache(text, names_filter=list(hooks))
    return {name: cache[hook] for hook, name in hooks.items()}


def patched(given, layer, head, in_place=False):
    """Hooks that put the rows of one query head into a pass."""

    def patch(b, hook):
        b = b if in_place else b.clone()
        b[:, head] = given[hook.name.rpartition("hook_")[2]][:, head]
        return None if in_place else b

    return [(f"blocks.{layer}.attn.hook_{name}", patch) for name in given]


def without(bias, layer, head) -> KVBias:
    """``bias`` without one query head, by ``select``."""
    return bias.select(heads=[(i, h) for i in range(bias.n_layers) for h in range(bias.n_heads) if (i, h) != (layer, head)])


def exchanged(bias, donor, layer, head) -> KVBias:
    """``bias`` with one query head of ``donor``, by ``select`` and ``+``."""
    return donor.select(heads=[(layer, head)]) + without(bias, layer, head)


def decoded(model, bias, hooks):
    """The logits of the texts, token by token."""
    cache, ones = model.empty_cache(len(TEXT)), torch.ones(len(TEXT), 1, dtype=torch.long)
    steps = [logits(model, bias, hooks, x, past_kv_cache=cache, attention_mask=ones) for x in TEXT.split(1, dim=1)]
    return torch.cat(steps, dim=1)


def ablating(*heads):
    """Hooks that remove the second layer's bias of query heads, in place."""

    def ablate(b, hook):
        b[:, list(heads)] = 0

    return [(f"blocks.1.attn.hook_b_{x}", ablate) for x in ("kv", "d")]


def blind_to_the_prompt(model, *heads):
    """Logits of the text behind the prompt, where some heads' queries see no key of the prompt: no bias at all."""
    n = len(ONE)

    def blind(scores, hook):
        scores[:, list(heads), n:, :n] = -torch.inf

    whole = torch.cat([ONE.repeat(len(TEXT), 1), TEXT], dim=1)
    return model.run_with_hooks(whole, fwd_hooks=[("blocks.1.attn.hook_attn_scores", blind)])[:, n:]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_query_head_is_ablated_and_no_other(kind, steps):
    model = model_of("softmax", kind, **KINDS[kind])
    bias = convert_prompt(model, ONE)
    with by_steps(model, steps):
        whole = logits(model, bias)
        for heads in ((3,), (0, 5)):
            ablated = logits(model, bias, ablating(*heads))
            assert relative_error(ablated, blind_to_the_prompt(model, *heads)) < LAW
            assert relative_error(ablated, whole) > 1e-3  # the head matters
        assert relative_error(decoded(model, bias, ablating(3)), blind_to_the_prompt(model, 3)) < LAW


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("weight", [0.5, -0.1])
def test_one_head_is_ablated_of_a_sum_and_of_a_batch(steps, weight):
    """``select`` keeps a row per query head, and a sum of such sums rows."""
    model = model_of("softmax", "rotary, grouped")
    one, two = (convert_prompt(model, tokens(2, 7, seed=seed)) for seed in (2, 3))
    with by_steps(model, steps):
        expected = logits(model, without(one, 1, 3) + weight * without(two, 1, 3))
        assert relative_error(logits(model, one + weight * two, ablating(3)), expected) < LAW


@pytest.mark.parametrize("trained", [False, True])
def test_linear_attention_has_query_heads_too_and_no_keys_to_show(trained):
    model = linear_model(**GROUPED, trainable_kv_bias=trained)
    bias = convert_prompt(model, ONE)
    if not trained:
        assert relative_error(logits(model, bias, ablating(3)), logits(model, without(bias, 1, 3))) < LAW
        with model.kv_bias(bias):
            assert not [name for name in model.run_with_cache(TEXT)[1] if name.endswith("b_keys")]
        return

    def learn(of):
        for layer, block in enumerate(model.blocks):
            block.attn.b_KV.data.copy_(of.layers[layer].attention.b_kv[0])
            block.attn.b_D.data.copy_(of.layers[layer].attention.b_d[0])

    learn(bias)
    ablated = model.run_with_hooks(TEXT, fwd_hooks=ablating(3))
    learn(without(bias, 1, 3))
    assert relative_error(ablated, model(TEXT)) < LAW


@pytest.mark.one_in(3)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("scales", [False, True], ids=["as converted", "other log-scales"])
def test_patched_together_they_are_select_and_plus(model, steps, scales):
    one, other = (convert_prompt(model, prompt) for prompt in (ONE, OTHER))
    if scales:
        one, other = rescaled(one, 1), rescaled(other, 2)
    with by_steps(model, steps):
        plain = logits(model, one)
        for layer, head in ((0, 1), (2, 4)):
            given = shown(model, other, layer)
            expected = logits(model, exchanged(one, other, layer, head))
            found = logits(model, one, patched(given, layer, head, in_place=head == 1))
            assert relative_error(found, expected) < LAW
            assert relative_error(plain, expected) > 1e-2  # the patch matters
            two = {name: b for name, b in given.items() if name != "b_keys"}
            assert relative_error(logits(model, one, patched(two, layer, head)), expected) > 1e-3  # and all of it does


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_repeated_bias_is_shown_with_a_row_for_each_prompt(attention):
    """Though it is read once."""
    model = linear_model(**GROUPED) if attention == "linear" else model_of("softmax", "rotary, grouped")
    bias = convert_prompt(model, ONE)

    def ablate(b, hook):
        assert len(b) == len(TEXT)
        b[1, 3] = 0

    hooks = [(f"blocks.1.attn.hook_{name}", ablate) for name in ("b_kv", "b_d")]
    expected = torch.cat([logits(model, of, text=row[None]) for of, row in zip((bias, without(bias, 1, 3)), TEXT, strict=True)])
    assert relative_error(logits(model, bias.repeat(2), hooks), expected) < LAW


@pytest.mark.one_in(2)
@pytest.mark.parametrize("steps", STEPS)
def test_in_rows_of_a_batch_and_while_decoding(model, steps):
    """Each row of a batch of texts has its own head patched; token by token, at every step."""
    one, other = (convert_prompt(model, prompt) for prompt in (ONE, OTHER))
    layer, heads = 1, (0, 3)
    expected = torch.cat([logits(model, exchanged(one, other, layer, h), text=TEXT[[i]]) for i, h in enumerate(heads)])
    given = shown(model, other, layer)

    def patch(b, hook):
        b = b.repeat(len(heads), *[1] * (b.dim() - 1))
        for row, head in enumerate(heads):
            b[row, head] = given[hook.name.rpartition("hook_")[2]][0, head]
        return b

    hooks = [(f"blocks.{layer}.attn.hook_{name}", patch) for name in NAMES]
    with by_steps(model, steps):
        assert relative_error(logits(model, one, hooks), expected) < LAW
        assert relative_error(decoded(model, one, hooks), expected) < LAW


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("hooked", [("b_keys",), ("b_kv",), NAMES])
def test_looking_changes_no_bit(model, steps, hooked):
    bias = rescaled(convert_prompt(model, ONE), 3)
    names = [f"blocks.{layer}.attn.hook_{name}" for layer in range(model.cfg.n_layers) for name in hooked]
    with by_steps(model, steps), model.kv_bias(bias):
        unseen = model(TEXT)
        seen, cache = model.run_with_cache(TEXT, names_filter=names)
    assert torch.equal(seen, unseen)
    group, every = model.cfg.n_heads // model.cfg.n_kv_heads, convert_prompt(model, ONE).per_query_head()
    assert f"{model.cfg.n_heads} heads" in repr(bias)
    for layer in range(model.cfg.n_layers):
        if "b_keys" in hooked:
            keys = bias.stacked("keys")[layer].repeat_interleave(group, dim=0)
            assert torch.equal(cache[f"blocks.{layer}.attn.hook_b_keys"], keys[None])
        for name, numbers in (("b_kv", every.stacked("b_kv")), ("b_d", every.stacked("b_d"))):
            if name in hooked:  # the numbers themselves: an exact bias holds values with weight 1
                assert relative_error(cache[f"blocks.{layer}.attn.hook_{name}"][0], numbers[layer]) < LAW


def test_unhooked_nothing_is_expanded_or_copied(model):
    bias = convert_prompt(model, ONE)
    with model.kv_bias(bias):
        attn = model.blocks[1].attn
        read = attn.layer_bias.through_hooks(attn, model.cfg.n_heads, torch.device("cpu"), torch.float64)
    part = bias.layers[1].attention
    for mine, theirs in ((read.b_kv, part.b_kv), (read.b_d, part.b_d), (read.features.keys, part.keys)):
        assert mine.data_ptr() == theirs.data_ptr()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["exact", "landmark"])
def test_where_scores_depend_on_more_than_the_key(kind, method):
    """Prompts of equal length, so that keys stand in their places; few keys at distances of their own are not exchangeable."""
    model = model_of("softmax", kind, **KINDS[kind])
    options = dict(method=method, n_features=3, budget="equal", key_steps=2, **FEW) if method == "landmark" else {}
    one, other = (convert_prompt(model, prompt, **options) for prompt in (ONE, OTHER))
    layer, head = 1, 4
    if method == "landmark":
        other = with_stacked(other, distance=one.stacked("distance"))
    found = logits(model, one, patched(shown(model, other, layer), layer, head))
    assert relative_error(found, logits(model, exchanged(one, other, layer, head))) < LAW


@pytest.mark.parametrize("method", ["random", "taylor"])
def test_features_without_keys_are_exchanged_by_two_hooks(method):
    model = model_of("softmax", "rotary")
    options = dict(n_features=9) if method == "random" else {}
    one, other = (convert_prompt(model, prompt, method=method, **FEW, **options) for prompt in (ONE, OTHER))
    assert not torch.allclose(one.stacked("log_scale"), other.stacked("log_scale"))
    given = shown(model, other, 1, NAMES[:2])
    expected = logits(model, exchanged(one, other, 1, 3))
    assert relative_error(logits(model, one, patched(given, 1, 3)), expected) < LAW
    assert relative_error(logits(model, one), expected) > 1e-3  # it matters


def test_numbers_that_fit_no_dtype_are_refused_where_they_are_shown():
    model = model_of("softmax", "learned")
    bias = convert_prompt(model, ONE)
    for log_scale in (800.0, -800.0):
        scaled = with_stacked(bias, log_scale=bias.stacked("log_scale") + log_scale)
        assert logits(model, scaled).isfinite().all()
        with pytest.raises(KVLensError, match=r"hook_b_kv: this bias has a log-scale of -?800 to -?800.*by select, \+ and \*"):
            shown(model, scaled, 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("head", [None, 4])
def test_a_prompt_that_continues_a_patched_bias(model, head):
    """``convert_prompt`` continues from the bias as hooks leave it, keys included."""
    one, other = rescaled(convert_prompt(model, ONE), 4), convert_prompt(model, OTHER)
    layer, more = 1, tokens(1, 4, seed=5)[0]
    given = shown(model, other, layer)
    heads = slice(None) if head is None else head
    hooks = patched(given, layer, heads)
    whole = exchanged(one, other, layer, head) if head is not None else other.select([layer]) + one.select([0, 2])
    expected = logits(model, convert_prompt(model, more, initial=whole))
    assert relative_error(logits(model, convert_prompt(model, more, initial=one, fwd_hooks=hooks)), expected) < LAW
    assert relative_error(logits(model, convert_prompt(model, more, initial=one)), expected) > 1e-3  # it matters


@pytest.mark.parametrize("steps", STEPS)
def test_gradients_of_each_query_head(model, steps):
    """Backward hooks, against the gradients of a bias that holds a row per query head, and of keys that the group shares."""
    bias, found = convert_prompt(model, ONE), {}
    hooks = [(f"blocks.1.attn.hook_{name}", lambda g, hook: found.__setitem__(hook.name, g.clone())) for name in NAMES]
    every = bias.per_query_head().map_layers(lambda layer: layer.map(lambda x: x.clone().requires_grad_(x.is_floating_point())))
    leaf = every.layers[1].attention
    with torch.enable_grad(), by_steps(model, steps):
        with model.kv_bias(bias), model.hooks(bwd_hooks=hooks):
            model(TEXT).square().sum().backward()
        with model.kv_bias(every):
            model(TEXT).square().sum().backward()
    b_kv, b_d, b_keys = (found[name] for name, _ in hooks)
    assert b_keys.shape == (1, model.cfg.n_heads, *leaf.keys.shape[-2:])
    summed = b_keys.unflatten(1, (model.cfg.n_kv_heads, -1)).sum(dim=2)
    for gradient, expected in ((b_kv, leaf.b_kv), (b_d, leaf.b_d), (summed, leaf.keys)):
        assert relative_error(gradient, expected.grad) < LAW


@pytest.mark.parametrize(("name", "sizes"), [("b_d", "7"), ("b_keys", "7, 6")])
def test_a_row_per_key_value_head_is_refused_with_a_message(name, sizes):
    model = small_model(n_heads=6, n_key_value_heads=3)
    hook = (f"blocks.1.attn.hook_{name}", lambda b, hook: b[:, :3])
    words = rf"hook_{name}: a hook returned shape \[1, 3, {sizes}\], expected \[batch or 1, 6, {sizes}\]"
    with pytest.raises(KVLensError, match=words):
        logits(model, convert_prompt(model, ONE), [hook])


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("gradients", [False, True])
def test_rows_may_differ_at_some_of_the_points_alone(model, steps, gradients):
    bias, factors = convert_prompt(model, ONE), torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    with by_steps(model, steps), torch.set_grad_enabled(gradients):
        for names in (("b_kv",), ("b_d",), ("b_keys",), ("b_kv", "b_keys"), ("b_kv", "b_d")):
            points = [f"blocks.0.attn.hook_{name}" for name in names]
            rows = [(point, lambda b, hook: factors.view(-1, 1, *[1] * (b.dim() - 2)) * b) for point in points]
            together = logits(model, bias, rows, TEXT[:1].expand(3, -1))
            for row, factor in enumerate(factors):
                alone = [(point, lambda b, hook, factor=factor: factor * b) for point in points]
                assert relative_error(together[row], logits(model, bias, alone, TEXT[:1])[0]) < LAW


@pytest.mark.parametrize(
    ("under_bias", "of_both", "value", "at"),
    [
        (["z_bias"], "pattern", 0.0, slice(None)),
        (["b_kv", "b_d"], "attn_scores", -torch.inf, slice(None)),
        (["b_kv", "b_d"], "attn_scores", -torch.inf, slice(1, 3)),
        (["z"], "z", 0.0, slice(None)),
    ],
    ids=["the prompt's part", "as if there were no prompt", "as if some tokens were unseen", "the whole head"],
)
def test_a_hook_under_a_bias_is_this_hook_in_the_pass_over_both(model, under_bias, of_both, value, at):
    """The table of docs/how-to/from-transformerlens-3.md, for one head of the first layer."""
    n, head, name = len(ONE), 2, "blocks.0.attn.hook_{}".format
    both = torch.cat([ONE.expand(len(TEXT), -1), TEXT], dim=1)

    def no_bias(x, hook):
        x = x.clone()
        (x[:, head, at] if "hook_b_" in hook.name else x[:, :, head])[:] = 0
        return x

    def no_prompt(x, hook):
        x = x.clone()
        (x[:, n:, head] if of_both == "z" else x[:, head, n:, :n][..., at])[:] = value
        return x

    expected = model.run_with_hooks(both, fwd_hooks=[(name(of_both), no_prompt)])[:, n:]
    found = logits(model, convert_prompt(model, ONE), [(name(point), no_bias) for point in under_bias])
    assert relative_error(found, expected) < LAW < relative_error(found, model(both)[:, n:])

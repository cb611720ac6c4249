"""The fused form against the loop, the log-space join against the plain equation, and properties of both."""

import math

import pytest
import torch
from ops_cases import normal, random_mask

from kvlens.ops import softmax_attention
from kvlens.ops.softmax_attention import (
    ExtraKeys,
    ScaledFeatures,
    ScaledMass,
    attend_with_extra_keys,
    by_kv_head,
    fused_softmax_attention,
    join_bias,
    last_with_extra_keys,
    merge_extra_keys,
    naive_join_bias,
    naive_softmax_attention,
    visible_keys,
)

CASES = {
    "causal": {},
    "bidirectional": dict(causal=False),
    "padding": dict(padding=random_mask(2, 11, seed=3)),
    "window": dict(window=3),
    "score bias": dict(score_bias=normal(1, 6, 11, 11, seed=9)),
    "all": dict(padding=random_mask(2, 11, seed=4), window=4, score_bias=normal(2, 6, 11, 11, seed=8)),
}


def draw(n_queries=11, n_keys=11, n_kv=3, dtype=torch.float64, size=1.0):
    q = size * normal(2, n_queries, 6, 5, seed=0, dtype=dtype)
    return q, size * normal(2, n_keys, n_kv, 5, seed=1, dtype=dtype), normal(2, n_keys, n_kv, 5, seed=2, dtype=dtype)


def queries_of(case, n_queries):
    """The arguments of a case for its last queries alone."""
    bias = case.get("score_bias")
    return case if bias is None else {**case, "score_bias": bias[:, :, -n_queries:]}


@pytest.mark.parametrize("n_queries", [11, 4, 1])
@pytest.mark.parametrize("n_kv", [6, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_fused_form_is_the_loop(name, n_kv, n_queries):
    q, k, v = draw(n_queries, n_kv=n_kv)
    case = queries_of(CASES[name], n_queries)
    expected = naive_softmax_attention(q, k, v, 1.7, **case, log_normalizer=True)
    got = fused_softmax_attention(q, k, v, 1.7, **case, log_normalizer=True)
    without = fused_softmax_attention(q, k, v, 1.7, **case)
    # sums of at most 11 exponentials of scores below 20, each off by a few eps times its score
    torch.testing.assert_close(got.z, expected.z, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got.log_normalizer, expected.log_normalizer, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(without.z, expected.z, rtol=1e-13, atol=1e-13)
    assert without.log_normalizer is None


def test_the_log_normalizer_summed_in_blocks_is_the_kernels(monkeypatch):
    monkeypatch.setattr(softmax_attention, "QUERY_BLOCK", 4)
    q, k, v = draw()
    heads = [x.transpose(1, 2) for x in (q, k)]
    expected = naive_softmax_attention(q, k, v, 1.7, log_normalizer=True).log_normalizer
    got = softmax_attention._log_normalizer_in_blocks(*heads, 1.7, None, True)
    torch.testing.assert_close(got.transpose(1, 2), expected, rtol=1e-13, atol=1e-13)
    visible = visible_keys(11, 11, window=3)
    got = softmax_attention._log_normalizer_in_blocks(*heads, 1.7, softmax_attention._additive(visible, None, q), False)
    expected = naive_softmax_attention(q, k, v, 1.7, window=3, log_normalizer=True).log_normalizer
    torch.testing.assert_close(got.transpose(1, 2), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("transposed", ["q", "k", "v"])
def test_the_normalizer_and_the_output_do_not_depend_on_the_memory_layout(transposed):
    q, k, v = (torch.randn(2, 7, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    given = {"q": q, "k": k, "v": v}
    given[transposed] = given[transposed].mT.contiguous().mT
    expected, found = (fused_softmax_attention(*of, scale=2.0, log_normalizer=True) for of in ((q, k, v), given.values()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_a_query_that_sees_nothing_gets_zero():
    q, k, v = draw()
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[:, 3:] = True
    for form in (naive_softmax_attention, fused_softmax_attention):
        z, log_n = form(q, k, v, 1.0, padding=padding, log_normalizer=True)
        assert torch.equal(z[:, :3], torch.zeros_like(z[:, :3]))
        assert bool((log_n[:, :3] == -torch.inf).all())
        assert bool(log_n[:, 3:].isfinite().all())


def test_one_query_two_keys_by_hand():
    q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0]], [[math.log(3.0)]]]])
    v = torch.tensor([[[[4.0]], [[8.0]]]])
    z, log_n = fused_softmax_attention(q, k, v, 1.0, log_normalizer=True)
    assert z.item() == pytest.approx(7.0)  # (1 * 4 + 3 * 8) / 4
    assert log_n.item() == pytest.approx(math.log(4.0))


def test_gradients_of_the_fused_form_are_the_loops():
    arguments = [x.requires_grad_() for x in draw(4, 7)]
    weights = normal(2, 4, 6, 5, seed=5)
    grads = [
        torch.autograd.grad((form(*arguments, 1.3, window=5).z * weights).sum(), arguments)
        for form in (naive_softmax_attention, fused_softmax_attention)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-13)


def test_a_log_normalizer_with_a_gradient_is_refused():
    q, k, v = draw()
    with pytest.raises(ValueError, match="has no gradient"):
        fused_softmax_attention(q.requires_grad_(), k, v, 1.0, log_normalizer=True)
    with torch.no_grad():
        assert fused_softmax_attention(q, k, v, 1.0, log_normalizer=True).log_normalizer is not None


def features_at(q, keys, scale):
    """Features of every query at keys [batch, r, kv_head, d]."""
    scores = torch.einsum("bihd,brhd->bihr", q, keys.repeat_interleave(q.shape[2] // keys.shape[2], dim=2)) / scale
    log_scale = scores.amax(dim=-1)
    return ScaledFeatures((scores - log_scale[..., None]).exp(), log_scale)


def mass_of(context):
    """The context's normalizer, part of it in the mass and part in the scale."""
    return ScaledMass(torch.full_like(context.log_normalizer, 2.0), context.log_normalizer - math.log(2.0))


def test_the_join_is_the_plain_equation_for_signed_weights():
    q, k, v = draw()
    keys, b_kv, b_d = normal(2, 4, 3, 5, seed=11), normal(1, 3, 4, 5, seed=21), 0.1 * normal(1, 3, 4, seed=22)
    context = naive_softmax_attention(q, k, v, 1.7, log_normalizer=True)
    phi = features_at(q, keys, 1.7)
    expected = naive_join_bias(*context, phi, b_kv, b_d)
    got = join_bias(context.z, mass_of(context), phi, b_kv, b_d)
    positive = ~expected.log_normalizer.isnan()
    assert int(positive.sum()) > 0
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a[positive], b[positive], rtol=1e-12, atol=1e-12)


def test_a_bias_of_nothing_changes_nothing():
    q, k, v = draw()
    context = naive_softmax_attention(q, k, v, 1.7, log_normalizer=True)
    zeros = torch.zeros(1, 3, 4, 5, dtype=torch.float64)
    joined = join_bias(context.z, mass_of(context), features_at(q, normal(2, 4, 3, 5, seed=11), 1.7), zeros, zeros[..., 0])
    torch.testing.assert_close(joined.z_context, context.z, rtol=1e-14, atol=0)
    assert bool((joined.z_bias == 0).all())


def test_nothing_seen_on_either_side_is_zero_and_finite_in_gradient():
    z, log_n = torch.zeros(1, 2, 1, 3), torch.full((1, 2, 1), -torch.inf)
    features = torch.ones(1, 2, 1, 4, requires_grad=True)
    phi, context = ScaledFeatures(features, torch.zeros(1, 2, 1)), ScaledMass(torch.ones(1, 2, 1), log_n)
    joined = join_bias(z, context, phi, torch.zeros(1, 1, 4, 3), torch.zeros(1, 1, 4))
    assert bool((joined.z_context == 0).all())
    assert bool((joined.log_normalizer == -torch.inf).all())
    (gradient,) = torch.autograd.grad((joined.z_context + joined.z_bias).sum(), features)
    assert bool(gradient.isfinite().all())


# --- virtual keys extra the keys of the text ---


def weighted_keys(prompts: int):
    """(keys, b_kv, b_d) of 3 heads; the second has a key fewer."""
    keys, values = normal(prompts, 3, 4, 5, seed=21), normal(prompts, 3, 4, 5, seed=22)
    weights = normal(prompts, 3, 4, seed=23).exp()
    weights[:, 1, 3] = 0
    return keys, weights[..., None] * values, weights


@pytest.mark.parametrize("distances", [0, 1, 2], ids=["without distances", "distances", "distances of each row"])
@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("n_queries", [11, 4, 1])
def test_one_softmax_over_all_keys_is_the_plain_equation(n_queries, prompts, distances):
    """Two sides joined by the plain equation, and one softmax over the keys of both; values and gradients."""
    q, k, v = draw(n_queries)
    scale, log_scale = 1.7, normal(prompts, 3, seed=24)
    keys, b_kv, b_d = weighted_keys(prompts)
    leaves = [x.requires_grad_() for x in (q, k, v, keys, b_kv, b_d)]
    context = naive_softmax_attention(q, k, v, scale, log_normalizer=True)
    scores = torch.einsum("bihd,bhrd->bihr", q, keys.expand(2, -1, -1, -1).repeat_interleave(2, dim=1)) / scale
    scores = scores + log_scale.repeat_interleave(2, dim=1)[:, None, :, None]
    by_distance = -normal(distances, 6, n_queries, 4, seed=26).abs() if distances else None
    if by_distance is not None:
        by_distance[:, :2, -1, 1] = by_distance[:, 4, 0] = -torch.inf  # one key out of the window, and all of them
        scores = scores + by_distance.transpose(1, 2)
    phi = ScaledFeatures(scores.exp(), torch.zeros(2, n_queries, 6, dtype=torch.float64))
    joined = naive_join_bias(context.z, context.log_normalizer, phi, b_kv, b_d)
    extra = ExtraKeys.of(keys, b_kv, b_d, log_scale)._replace(by_distance=by_distance)
    z = attend_with_extra_keys(q, k, v, extra, scale, visible_keys(n_queries, 11))
    torch.testing.assert_close(z, joined.z_context + joined.z_bias, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        fused, log_n = merge_extra_keys(context.z, context.log_normalizer, q, extra, scale)
    torch.testing.assert_close(fused, z, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_n, joined.log_normalizer, rtol=1e-12, atol=1e-12)
    own = ExtraKeys.of(keys, b_kv, torch.ones_like(b_d), torch.zeros_like(log_scale))
    for some in (extra, own) if n_queries == 1 and not distances else ():
        with torch.no_grad():
            apart, _ = merge_extra_keys(context.z, context.log_normalizer, q, some, scale)
            torch.testing.assert_close(last_with_extra_keys(q, k, v, some, scale), apart, rtol=1e-12, atol=1e-12)
    weights = normal(*z.shape, seed=25)
    used = (b_d > 0).detach()  # a key without a weight is none: the plain equation has a slope there, towards a new key
    for a, b, leaf in zip(
        *(torch.autograd.grad((x * weights).sum(), leaves) for x in (z, joined.z_context + joined.z_bias)), leaves, strict=True
    ):
        on = used.view(*used.shape, *[1] * (leaf.dim() - 3)) if leaf.shape[1:3] == used.shape[1:] else torch.ones(())
        torch.testing.assert_close(a * on, b * on, rtol=1e-10, atol=1e-11)
        assert bool(a.isfinite().all())


def test_scores_of_thousands_in_addition_to_the_text_stay_finite():
    q, k, v = draw(size=100.0, dtype=torch.float32)
    keys, b_kv, b_d = (x.float() for x in weighted_keys(1))
    arguments = [x.requires_grad_() for x in (q, k, v, 100.0 * keys)]
    extra = ExtraKeys.of(arguments[-1], b_kv, b_d, torch.zeros(1, 3))
    z = attend_with_extra_keys(q, k, v, extra, 1.0, visible_keys(11, 11))
    assert all(bool(x.isfinite().all()) for x in (z, *torch.autograd.grad(z.sum(), arguments)))


def test_a_head_without_keys_and_a_query_without_text():
    """The one leaves the text's z, the other that of the virtual keys; where there is neither, z is 0."""
    q, k, v = draw()
    keys, b_kv, b_d = weighted_keys(1)
    b_kv[:, 0], b_d[:, 0] = 0, 0
    extra = ExtraKeys.of(keys, b_kv, b_d, torch.zeros(1, 3, dtype=torch.float64))
    padding = torch.arange(11) > 0
    context = fused_softmax_attention(q, k, v, 1.7, padding=padding.expand(2, -1), log_normalizer=True)
    z, log_n = merge_extra_keys(*context, q, extra, 1.7)
    torch.testing.assert_close(z[:, :, :2], context.z[:, :, :2], rtol=0, atol=0)
    torch.testing.assert_close(log_n[:, :, :2], context.log_normalizer[:, :, :2], rtol=0, atol=0)
    assert not z[:, 0, :2].any()
    nothing = torch.full_like(context.log_normalizer, -torch.inf)
    torch.testing.assert_close(z[:, 0], merge_extra_keys(context.z, nothing, q, extra, 1.7)[0][:, 0], rtol=0, atol=0)
    assert bool(z[:, 0, 2:].any(dim=-1).all())
    far = extra._replace(by_distance=torch.full((1, 6, 11, 4), -torch.inf))
    for got, expected in zip(merge_extra_keys(*context, q, far, 1.7), context, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_signed_weights_are_no_softmax():
    keys, b_kv, b_d = weighted_keys(1)
    log_scale = torch.zeros(1, 3, dtype=torch.float64)
    assert ExtraKeys.of(keys, b_kv, b_d, log_scale) is not None
    assert ExtraKeys.of(keys, b_kv, -b_d, log_scale) is None
    without_weight = b_kv.clone()
    without_weight[0, 1, 3] = 1.0  # a value where the weight is 0
    assert ExtraKeys.of(keys, without_weight, b_d, log_scale) is None


@pytest.mark.parametrize("n_held", [1, 3], ids=["shared", "of each row"])
def test_a_head_is_multiplied_with_what_its_key_value_head_holds(n_held):
    x, held = normal(3, 5, 8, 7, seed=1), normal(n_held, 4, 7, 11, seed=2)
    got = by_kv_head(x, held).unflatten(2, (5, 2)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    expected = torch.einsum("bphd,bhdn->bphn", x, held.repeat_interleave(2, dim=1).expand(3, -1, -1, -1))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)

"""The attention variants: cases by hand, the fast forms against the loops, gradients against finite differences."""

import pytest
import torch
from ops_cases import normal

from kvlens import KVLensError
from kvlens.ops import attention_variants as variants

TIGHT = dict(rtol=1e-11, atol=1e-12)


def causal_case(pos=7, heads=3, seed=0):
    """Scores, pattern, visible tokens and values of one batch row."""
    scores = normal(1, heads, pos, pos, seed=seed)
    visible = torch.ones(pos, pos, dtype=torch.bool).tril()[None, None]
    pattern = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return scores, pattern, visible, normal(1, heads, pos, 5, seed=seed + 1)


def negative(scores, pattern, visible, v, k, beta, per):
    means = variants.mean_of_negatives(v, variants.lowest_scored(scores, visible, k))
    return pattern @ v - beta * (means if per == "query" else pattern @ means)


@pytest.mark.parametrize("per", ["query", "label"])
@pytest.mark.parametrize("k", [1, 3, 20, 0.3, 1.0])
def test_negative_against_the_loops(k, per):
    scores, pattern, visible, v = causal_case()
    fast = negative(scores, pattern, visible, v, k, 0.4, per)
    for head in range(3):
        slow = variants.naive_negative(pattern[0, head], scores[0, head], v[0, head], k, 0.4, per)
        torch.testing.assert_close(fast[0, head], slow, **TIGHT)


def test_negative_on_paper():
    """Two tokens, scores 0 and 0: p = (1/2, 1/2); the lowest of query 1 is token 0 (score -1 put lower)."""
    scores = torch.tensor([[[[0.0, 0.0], [-1.0, 0.0]]]], dtype=torch.float64)
    pattern = torch.tensor([[[[1.0, 0.0], [0.25, 0.75]]]], dtype=torch.float64)
    visible = torch.ones(2, 2, dtype=torch.bool).tril()[None, None]
    v = torch.tensor([[[[4.0], [8.0]]]], dtype=torch.float64)
    per_query = negative(scores, pattern, visible, v, 1, 0.5, "query")
    assert per_query.flatten().tolist() == [4 - 2, 1 + 6 - 2]
    per_label = negative(scores, pattern, visible, v, 1, 0.5, "label")
    assert per_label.flatten().tolist() == [2, 0.25 * 2 + 0.75 * (8 - 2)]


@pytest.mark.parametrize("per", ["query", "label"])
def test_negative_gradients_match_finite_differences(per):
    scores, _, visible, v = causal_case(pos=5, heads=2)

    def z(scores, v):
        pattern = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return negative(scores, pattern, visible, v, 2, 0.4, per)

    assert torch.autograd.gradcheck(z, (scores.requires_grad_(), v.requires_grad_()))


def test_a_query_that_sees_nothing_has_no_negatives():
    scores, _, visible, v = causal_case()
    hidden = visible.clone()
    hidden[..., 0, :] = False
    means = variants.mean_of_negatives(v, variants.lowest_scored(scores, hidden, 2))
    assert means[:, :, 0].abs().max() == 0


def ridge_case(seed=0, pos=6):
    phi_k, phi_q, v = normal(2, 3, pos, 4, seed=seed), normal(2, 6, pos, 4, seed=seed + 1), normal(2, 3, pos, 5, seed=seed + 2)
    at_queries = phi_q @ phi_k.repeat_interleave(2, dim=1).transpose(-1, -2)
    return phi_q, phi_k, v, phi_k @ phi_k.transpose(-1, -2), at_queries


@pytest.mark.parametrize("strength", [0.1, 3.0])
def test_ridge_against_the_loops_and_the_weights_written_out(strength):
    phi_q, phi_k, v, kernel, at_queries = ridge_case()
    fast = variants.ridge_attention(kernel, at_queries, v, strength)
    for b, head in [(0, 0), (1, 5)]:
        kv = head // 2
        slow = variants.naive_ridge(kernel[b, kv], at_queries[b, head], v[b, kv], strength)
        torch.testing.assert_close(fast[b, head], slow, **TIGHT)
        for i in range(6):  # W = (sum v phi^T)(sum phi phi^T + lambda I)^{-1}
            phi, values = phi_k[b, kv, : i + 1], v[b, kv, : i + 1]
            W = values.T @ phi @ torch.linalg.inv(phi.T @ phi + strength * torch.eye(4, dtype=torch.float64))
            torch.testing.assert_close(fast[b, head, i], W @ phi_q[b, head, i], **TIGHT)


def test_ridge_steps_equal_the_parallel_form():
    phi_q, phi_k, v, kernel, at_queries = ridge_case()
    whole, state = variants.ridge_attention(kernel, at_queries, v, 0.7), None
    for i in range(6):
        z, state = variants.ridge_step(phi_q[:, :, i], phi_k[:, :, i], v[:, :, i], 0.7, state)
        torch.testing.assert_close(z, whole[:, :, i], **TIGHT)


def test_ridge_is_causal_and_blind_to_padding():
    _, _, v, kernel, at_queries = ridge_case()
    mask = torch.tensor([[1, 1, 0, 1, 0, 1]] * 2).bool()
    kept = mask[0]
    masked = variants.ridge_attention(kernel, at_queries, v, 0.7, mask)
    packed = variants.ridge_attention(kernel[..., kept, :][..., kept], at_queries[..., kept, :][..., kept], v[:, :, kept], 0.7)
    torch.testing.assert_close(masked[:, :, kept], packed, **TIGHT)
    last = variants.ridge_attention(kernel, at_queries[:, :, 4:], v, 0.7)  # as for a decode cache
    torch.testing.assert_close(last, variants.ridge_attention(kernel, at_queries, v, 0.7)[:, :, 4:], **TIGHT)
    later = v.clone()
    later[:, :, 4:] += 100
    torch.testing.assert_close(
        variants.ridge_attention(kernel, at_queries, later, 0.7)[:, :, :4],
        variants.ridge_attention(kernel, at_queries, v, 0.7)[:, :, :4],
        **TIGHT,
    )


def test_ridge_gradients_match_finite_differences():
    phi_q, phi_k, v, _, _ = ridge_case(pos=4)

    def z(phi_q, phi_k, v):
        at_queries = phi_q @ phi_k.repeat_interleave(2, dim=1).transpose(-1, -2)
        return variants.ridge_attention(phi_k @ phi_k.transpose(-1, -2), at_queries, v, 0.7)

    assert torch.autograd.gradcheck(z, tuple(x[:1].clone().requires_grad_() for x in (phi_q, phi_k, v)))


def test_a_ridge_system_that_cannot_be_solved():
    _, _, v, kernel, at_queries = ridge_case()
    with pytest.raises(KVLensError, match="raise lambda"):
        variants.ridge_attention(-kernel, at_queries, v, 0.1)
    with pytest.raises(KVLensError, match="raise lambda"):
        variants.ridge_attention(kernel * torch.inf, at_queries, v, 0.1)


def test_augmented_on_paper_and_its_gradients():
    x = torch.tensor([[[[1.0, 2.0]]]], dtype=torch.float64)
    first = torch.tensor([[[1.0, -1.0, 0.0], [0.0, 1.0, -3.0]]], dtype=torch.float64)  # x W_1 = (1, 1, -6)
    second = torch.tensor([[[1.0, 0.0], [2.0, 5.0], [7.0, 7.0]]], dtype=torch.float64)
    two = variants.augment(x, [first, second], torch.relu)
    assert two.flatten().tolist() == [3.0, 5.0]
    heads = torch.cat([second, 2 * second])  # which share the first layer
    assert variants.augment(x, [first, heads], torch.relu).flatten().tolist() == [3.0, 5.0, 6.0, 10.0]
    one = variants.augment(x, [first[..., :2]], torch.relu)
    assert one.flatten().tolist() == [1.0, 1.0]
    inputs = normal(2, 3, 4, 5, seed=1), normal(4, 5, 7, seed=2), normal(4, 7, 5, seed=3)
    apply = lambda x, a, b: variants.augment(x, [a, b], torch.nn.functional.gelu)  # noqa: E731
    assert torch.autograd.gradcheck(apply, tuple(t.requires_grad_() for t in inputs))


@pytest.mark.parametrize("form", ["self_attention", "normalised", "one_step"])
def test_regularized_is_one_step_of_the_regularized_loss(form):
    """Eq. 13 is the dual model's step with alpha where H_T is the query alone; the others subtract the own value."""
    from kvlens.ops import dual

    scores, pattern, _, v = causal_case(heads=1)
    slow = variants.naive_regularized(pattern[0, 0], v[0, 0], 0.3, form)
    z = pattern[0, 0] @ v[0, 0]
    own = pattern[0, 0].diagonal()[:, None] if form == "one_step" else 1.0
    fast = (z - 0.3 * own * v[0, 0]) / (0.7 if form == "normalised" else 1.0)
    torch.testing.assert_close(slow, fast, **TIGHT)
    if form == "one_step":
        keys = torch.eye(7, dtype=torch.float64)
        for i in range(1, 7):  # scores as a kernel of one-hot keys with the query's scores
            naive = dual.naive_dual(scores[0, 0, i], keys[: i + 1], v[0, 0, : i + 1], i, lambda a, b: (a @ b).exp(), alpha=0.3)
            torch.testing.assert_close(naive.after, slow[i], **TIGHT)


@pytest.mark.parametrize("causal", [True, False])
def test_a_small_alpha_makes_any_pattern_full_rank(causal):
    """DUAL lemma D.1, on a pattern that lacks rank: two tokens alike, or a token that no later one and itself attends to."""
    pattern = normal(2, 3, 7, 7, seed=1).softmax(dim=-1)
    if causal:
        pattern = normal(2, 3, 7, 7, seed=1).tril().masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf).softmax(dim=-1)
        pattern[..., 4, 4] = 0.0
    else:
        pattern[..., 5, :] = pattern[..., 2, :]
    limit = variants.full_rank_limit(pattern)
    one = torch.eye(7, dtype=pattern.dtype)
    assert (torch.linalg.matrix_rank(pattern) == 6).all()
    for share in (-0.9, -0.1, 0.1, 0.5, 0.9):
        assert (torch.linalg.matrix_rank(pattern - share * limit[..., None, None] * one) == 7).all()
    smallest = torch.linalg.svdvals(pattern.to(torch.complex128) - nearest_root(pattern)[..., None, None] * one)[..., -1]
    assert (smallest < 1e-12).all()  # and at the root itself it has not


def nearest_root(pattern):
    """The smallest eigenvalue but the one that is zero."""
    roots = torch.linalg.eigvals(pattern)
    return roots.gather(-1, roots.abs().argsort(dim=-1)[..., 1:2])[..., 0]

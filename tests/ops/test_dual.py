"""The dual model: hand-known cases, the equality of theorem 3.1, and every fast form against the loops of ``naive_dual``."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import laws, normal

from kvlens import KVLensError
from kvlens.ops import dual, dual_layers

TIGHT = dict(rtol=1e-11, atol=1e-12)  # sums of at most 13^2 products in float64, of size 1


def exp_kernel(scale):
    return lambda a, b: (a @ b / scale).exp()


def product(a, b):
    return a @ b


def test_two_tokens_on_paper():
    """phi = identity, q = 1, keys 2 and 3, values 5 and 7, D = 10: W_0 = 7 * 3 / 10, the step adds 5 * 2 / 10."""
    inputs, labels, D = torch.tensor([[2.0]]), torch.tensor([[5.0]]), torch.tensor(10.0)
    W_0 = dual.mean_outer(torch.tensor([[3.0]]), torch.tensor([[7.0]]), D)
    assert float(W_0) == pytest.approx(2.1)
    assert float(dual.dual_loss(W_0, inputs, labels, D, eta=0.5)) == pytest.approx(-5 * 2.1 * 2 / (0.5 * 10))
    gradient = dual.loss_gradient(W_0, inputs, labels, D, eta=0.5)
    assert float(gradient) == pytest.approx(-2.0)
    W_1 = W_0 - 0.5 * gradient
    assert float(dual.predict(W_1, torch.tensor([[1.0]]))) == pytest.approx((5 * 2 + 7 * 3) / 10)
    naive = dual.naive_dual(
        torch.ones(1, dtype=torch.float64),
        torch.tensor([[2.0], [3.0]], dtype=torch.float64),
        torch.tensor([[5.0], [7.0]], dtype=torch.float64),
        1,
        product,
        normalizer=torch.tensor(10.0, dtype=torch.float64),
    )
    assert [float(naive.after), float(naive.output)] == pytest.approx([3.1, 3.1])
    assert float(naive.loss_before - naive.loss_after) == pytest.approx(1.0)  # (v.v) kappa(k, k) / D^2 = 25 * 4 / 100
    assert naive.cosine_before.tolist() == naive.cosine_after.tolist() == [1.0]


@laws
@given(
    pos=st.integers(2, 9),
    share=st.floats(0, 1),
    eta=st.sampled_from([0.01, 1.0, 30.0]),
    gamma=st.sampled_from([1.0, 0.9]),
    softmax=st.booleans(),
    seed=st.integers(0, 999),
)
def test_one_step_gives_the_heads_output(pos, share, eta, gamma, softmax, seed):
    q, k, v = normal(3, seed=seed), normal(pos, 3, seed=seed + 1), normal(pos, 5, seed=seed + 2)
    n = 1 + round(share * (pos - 2))
    kernel, D = (exp_kernel(1.7), None) if softmax else (product, torch.tensor(2.3, dtype=torch.float64))
    naive = dual.naive_dual(q, k, v, n, kernel, normalizer=D, log_decay=math.log(gamma), eta=eta)
    torch.testing.assert_close(naive.after, naive.output, **TIGHT)
    torch.testing.assert_close(naive.before + naive.contributions.sum(0), naive.after, **TIGHT)
    if softmax and gamma == 1:
        torch.testing.assert_close(naive.output, (k @ q / 1.7).softmax(0) @ v, **TIGHT)


@pytest.mark.parametrize("alpha", [0.0, 0.3, -0.2])
@pytest.mark.parametrize("eta", [0.1, 7.0])
def test_written_out_weights_against_the_loops_and_autograd(alpha, eta):
    phi_q, phi, v, D = normal(3, seed=1), normal(7, 3, seed=2), normal(7, 5, seed=3), torch.tensor(1.9, dtype=torch.float64)
    naive = dual.naive_dual(phi_q, phi, v, 4, product, normalizer=D, eta=eta, alpha=alpha)
    W_0, added = dual.mean_outer(phi[4:], v[4:], D), dual.mean_outer(phi[:4], v[:4], D)
    arguments = dict(inputs=phi[:4], labels=v[:4], normalizer=D, eta=eta, alpha=alpha)
    leaf = W_0.clone().requires_grad_()
    loss = dual.dual_loss(leaf, **arguments)
    (gradient,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(gradient, dual.loss_gradient(W_0, **arguments), **TIGHT)
    torch.testing.assert_close(loss.detach(), naive.loss_before, **TIGHT)
    W_1 = W_0 - eta * gradient
    torch.testing.assert_close(dual.weight_after(W_0, added, 1, alpha), W_1, **TIGHT)
    torch.testing.assert_close(dual.dual_loss(W_1, **arguments), naive.loss_after, **TIGHT)
    torch.testing.assert_close(dual.predict(W_1, phi_q[None])[0], naive.after, **TIGHT)
    many = W_0
    for _ in range(3):
        many = many - eta * dual.loss_gradient(many, **arguments)
    torch.testing.assert_close(dual.weight_after(W_0, added, 3, alpha), many, **TIGHT)
    predictions = dual.predict(W_0, phi[:4]).requires_grad_()  # autograd on the predictions f(k_j), then the chain rule
    (by_prediction,) = torch.autograd.grad(dual.loss_of_predictions(predictions, v[:4], D, eta), predictions)
    torch.testing.assert_close(by_prediction.T @ phi[:4] + alpha / eta * W_0, gradient, **TIGHT)


def test_regularized_steps_approach_the_minimizer():
    phi, v, D = normal(4, 3, seed=5), normal(4, 5, seed=6), torch.tensor(1.3, dtype=torch.float64)
    added = dual.mean_outer(phi, v, D)
    limit = dual.weight_after(torch.zeros_like(added), added, 400, alpha=0.2)
    torch.testing.assert_close(limit, added / 0.2, **TIGHT)
    torch.testing.assert_close(dual.loss_gradient(limit, phi, v, D, 1.0, 0.2), torch.zeros_like(limit), **TIGHT)


def cases(softmax, gamma):
    """Two heads of seven tokens, kernel and normalizer of every query, as the all-queries forms want them."""
    q, k, v = normal(2, 7, 3, seed=11), normal(2, 7, 3, seed=12), normal(2, 7, 5, seed=13)
    log_gamma = torch.tensor([math.log(gamma), math.log(gamma) / 2], dtype=torch.float64)
    kernel = dual.softmax_kernel(k, k, 1.7) if softmax else dual.feature_kernel(k, k)
    at_query = dual.kernel_values(dual.softmax_kernel(q, k, 1.7) if softmax else dual.feature_kernel(q, k))
    distance = torch.arange(7.0, dtype=torch.float64)[:, None] - torch.arange(7.0, dtype=torch.float64)
    at_query = (at_query * (log_gamma[:, None, None] * distance).exp()).tril()
    D = at_query.sum(-1) if softmax else torch.linspace(1.0, 3.0, 14, dtype=torch.float64).view(2, 7)
    tokens = torch.arange(7.0, dtype=torch.float64)
    log_size = kernel.log_size - log_gamma[:, None, None] * (tokens[:, None] + tokens)
    return q, k, v, log_gamma, dual.LogKernel(log_size, kernel.sign), at_query / D[..., None], D


@pytest.mark.one_in(3)
@pytest.mark.parametrize("n", [None, 1, 4])
@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("softmax", [True, False])
def test_all_queries_against_the_loops(softmax, gamma, n):
    q, k, v, log_gamma, kernel, pattern, D = cases(softmax, gamma)
    drops = dual.log_loss_drops(kernel, v, D.log(), n, log_gamma)
    outputs = dual.step_outputs(pattern, v, n)
    before, after = dual.mean_cosines(kernel, v, n)
    for head in range(2):
        for column, query in enumerate(range(n or 1, 7)):
            naive = dual.naive_dual(
                q[head, query],
                k[head, : query + 1],
                v[head, : query + 1],
                n or query,
                exp_kernel(1.7) if softmax else product,
                normalizer=D[head, query],
                log_decay=float(log_gamma[head]),
            )
            at = (head, column)
            torch.testing.assert_close(drops[at].exp(), naive.loss_before - naive.loss_after, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(outputs[at], naive.contributions.sum(0), **TIGHT)
            torch.testing.assert_close(before[at], naive.cosine_before.mean(), **TIGHT)
            torch.testing.assert_close(after[at], naive.cosine_after.mean(), **TIGHT)


@pytest.mark.parametrize("n", [None, 3])
def test_all_queries_with_a_start(n):
    """A KV bias adds phi(k_j) b_KV to every prediction: it is one more token of H_T, in front of the text."""
    phi, v, b_kv = normal(6, 3, seed=21), normal(6, 5, seed=22), normal(3, 5, seed=23)
    before, after = dual.mean_cosines(dual.feature_kernel(phi, phi), v, n, start=phi @ b_kv)
    for column, query in enumerate(range(n or 1, 6)):
        N = n or query
        W_0 = b_kv.T + dual.mean_outer(phi[N : query + 1], v[N : query + 1], torch.ones((), dtype=torch.float64))
        W_1 = W_0 + dual.mean_outer(phi[:N], v[:N], torch.ones((), dtype=torch.float64))
        for W, ours in ((W_0, before), (W_1, after)):
            expected = torch.nn.functional.cosine_similarity(dual.predict(W, phi[:N]), v[:N], dim=-1).mean()
            torch.testing.assert_close(ours[column], expected, **TIGHT)


@pytest.mark.parametrize("alpha", [0.0, 0.25, -0.1])
@pytest.mark.parametrize("softmax", [True, False])
def test_one_query_against_the_loops(softmax, alpha):
    q, k, v = normal(3, seed=31), normal(8, 3, seed=32), normal(8, 5, seed=33)
    kernel = exp_kernel(1.3) if softmax else product
    D = None if softmax else torch.tensor(-2.1, dtype=torch.float64).abs()
    naive = dual.naive_dual(q, k, v, 5, kernel, normalizer=D, eta=0.7, alpha=alpha)
    log_kernel = dual.softmax_kernel(k, k, 1.3) if softmax else dual.feature_kernel(k, k)
    log_D = (k @ q / 1.3).logsumexp(0) if D is None else D.log()
    course = dual.losses(dual.pair_sums(log_kernel, v, log_D, 5), 1, eta=0.7, alpha=alpha)
    torch.testing.assert_close(course, torch.stack([naive.loss_before, naive.loss_after]), rtol=1e-10, atol=1e-12)
    if alpha == 0:
        before, after = dual.predictions_at_demonstrations(log_kernel, v, 5)
        torch.testing.assert_close(dual.cosine(before, v[:5]), naive.cosine_before, **TIGHT)
        torch.testing.assert_close(dual.cosine(after, v[:5]), naive.cosine_after, **TIGHT)


@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_losses_along_many_steps(alpha):
    phi, v, D = normal(8, 3, seed=41), normal(8, 5, seed=42), torch.tensor(1.6, dtype=torch.float64)
    course = dual.losses(dual.pair_sums(dual.feature_kernel(phi, phi), v, D.log(), 5), 6, eta=2.0, alpha=alpha)
    W = dual.mean_outer(phi[5:], v[5:], D)
    for loss in course:
        torch.testing.assert_close(loss, dual.dual_loss(W, phi[:5], v[:5], D, 2.0, alpha), **TIGHT)
        W = W - 2.0 * dual.loss_gradient(W, phi[:5], v[:5], D, 2.0, alpha)


def test_scores_of_a_hundred_and_keys_of_four_hundred_do_not_overflow():
    """Keys of length 40 at scale 2: kappa(k, k) = e^800, which no float64 holds; shifting all scores by hand must agree."""
    q, v = normal(1, 2, 3, seed=51) * 10, normal(1, 6, 5, seed=52)
    k = torch.nn.functional.normalize(normal(1, 6, 3, seed=53), dim=-1) * 40
    kernel = dual.softmax_kernel(k, k, 2.0)
    assert float(kernel.log_size.max()) > 710
    log_D = (q[:, :1] @ k.transpose(-1, -2) / 2.0).logsumexp(-1).expand(1, 6)
    drops = dual.log_loss_drops(kernel, v, log_D)
    shift = 790.0  # the same sum with every kappa divided by e^790
    for query in range(1, 6):
        block = (kernel.log_size[0, :query, :query] - shift).exp() * (v[0, :query] @ v[0, :query].T)
        expected = block.sum().log() + shift - 2 * log_D[0, query]
        torch.testing.assert_close(drops[0, query - 1], expected, rtol=1e-12, atol=0)
    before, after = dual.mean_cosines(kernel, v)
    assert bool(torch.isfinite(torch.stack([before, after, drops])).all())


def test_a_value_of_zero_is_no_division_by_zero():
    k, v = normal(1, 4, 3, seed=61), normal(1, 4, 5, seed=62)
    v[:, 1] = 0
    before, after = dual.mean_cosines(dual.softmax_kernel(k, k, 1.0), v)
    assert bool(torch.isfinite(before).all() and torch.isfinite(after).all())
    assert dual.log_loss_drops(dual.softmax_kernel(k, k, 1.0), v * 0, torch.zeros(1, 4)).tolist() == [[-math.inf] * 3]


def test_landmarks_are_exact_where_they_stand():
    k, q = normal(2, 7, 3, seed=71) * 2, normal(2, 4, 3, seed=72) * 30
    exact, at_queries = dual.softmax_kernel(k, k, 1.5), dual.softmax_kernel(q, k, 1.5)
    four = dual.landmark_features(k, q, 1.5, 4)
    approximate = dual.kernel_values(dual.feature_kernel(four.keys, four.keys, four.log_keys, four.log_keys))
    for head in range(2):
        chosen = four.landmarks[head]
        assert len(set(chosen.tolist())) == 4
        torch.testing.assert_close(approximate[head, chosen], dual.kernel_values(exact)[head, chosen], rtol=1e-10, atol=1e-12)
    every = dual.landmark_features(k, q, 1.5, 7)
    ours = dual.feature_kernel(every.queries, every.keys, every.log_queries, every.log_keys)
    # relative to the largest, and up to the condition number of the kernel of all seven keys, through a root: 1e-7 is sqrt(eps)
    peak = at_queries.log_size.amax(-1, keepdim=True)
    torch.testing.assert_close(dual.kernel_values(ours, -peak), dual.kernel_values(at_queries, -peak), rtol=0, atol=1e-7)
    twice = dual.landmark_features(torch.cat([k, k], dim=1), q, 1.5, 14)  # repeated keys add nothing and divide by nothing
    assert bool(torch.isfinite(twice.keys).all() and torch.isfinite(twice.queries).all())
    with pytest.raises(KVLensError, match="1 to 7"):
        dual.landmark_features(k, q, 1.5, 8)


def test_random_log_features_are_the_feature_map():
    from kvlens.ops.feature_maps import draw_projections, random_features

    x = normal(2, 7, 3, seed=81)
    projection = draw_projections(2, 11, 3, "iid", torch.Generator().manual_seed(0)).double()
    features, log_scale = dual.scaled_random_features(x, projection, 1.9)
    expected = random_features(x.transpose(0, 1), projection, 1.9).transpose(0, 1)
    torch.testing.assert_close(features * log_scale.exp()[..., None], expected, **TIGHT)


def test_bound_on_paper():
    """N = 4, w = 2, rho = 3, d_o = 1, Tr K = 16, delta = 1/e: 2 * 3 * 4 / 4 = 6 and 9 * 1/2."""
    k = torch.full((4, 1), 2.0, dtype=torch.float64)
    trace = dual_layers.log_trace(dual.feature_kernel(k, k))
    assert float(trace.exp()) == pytest.approx(16)
    number = lambda x: torch.tensor(x, dtype=torch.float64).log()  # noqa: E731
    terms = dual_layers.bound_terms(number(2.0), number(3.0), trace, 4, 1, math.exp(-1))
    assert float(terms.log_complexity.exp()) == pytest.approx(6)
    assert float(terms.log_confidence.exp()) == pytest.approx(4.5)
    assert float(terms.log_bound.exp()) == pytest.approx(10.5)
    everyone = torch.ones(4, 4, dtype=torch.bool)  # beta 1/2 of the mean of equal features leaves half of each
    half = dual_layers.log_effective_trace(dual.feature_kernel(k, k), everyone, beta=0.5)
    assert float(half.exp()) == pytest.approx(4)
    with pytest.raises(KVLensError, match="delta"):
        dual_layers.bound_terms(number(2.0), number(3.0), trace, 4, 1, 1.5)
    indefinite = dual.LogKernel(torch.zeros(2, 2), -torch.ones(2, 2))
    with pytest.raises(KVLensError, match="negative for some key"):
        dual_layers.log_trace(indefinite)

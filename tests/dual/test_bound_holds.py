"""DUAL th. 3.2 against the error that it bounds, which can be computed where all possible tokens are a finite list."""

import itertools
import math

import torch

from kvlens.ops.dual import feature_kernel
from kvlens.ops.dual_layers import bound_terms, log_trace

N_TOKENS, D_PHI, D_OUT, NORM, DELTA, DRAWS = 500, 6, 4, 1.0, 0.05, 200


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def excess(phi, v, chosen):
    """Loss of the best W on ``chosen`` less the best possible one, over all tokens, with |W|_F <= NORM.

    The loss -mean v.W phi is linear in W: its minimum over the ball is -NORM |G| at NORM G / |G|, G = mean v phi^T.
    """
    G, found = (torch.einsum("...no,...nf->...of", y, x) / y.shape[-2] for y, x in ((v, phi), (v[chosen], phi[chosen])))
    return NORM * (G.norm() - (found * G).sum(dim=(-2, -1)) / found.norm(dim=(-2, -1)))


def test_the_measured_error_is_below_the_bound_and_falls():
    phi, v = normal(N_TOKENS, D_PHI, seed=0).exp(), normal(N_TOKENS, D_OUT, seed=1) + 0.5
    rho = max(float(v.norm(dim=-1).max()), NORM * float(phi.norm(dim=-1).max()))
    generator, means, shares = torch.Generator().manual_seed(2), [], []
    for n in (10, 40, 160):
        chosen = torch.randint(N_TOKENS, (DRAWS, n), generator=generator)
        measured = excess(phi, v, chosen)
        traces = log_trace(feature_kernel(phi[chosen], phi[chosen]))
        logs = (torch.full_like(traces, math.log(x)) for x in (NORM, rho))
        bound = bound_terms(*logs, traces, n, D_OUT, DELTA).log_bound.exp()
        assert (measured >= 0).all()
        shares.append(float((measured / bound).max()))
        means.append(float(measured.mean()))
    assert max(shares) < 1  # without any constant
    powers = [math.log(a / b) / math.log(4) for a, b in itertools.pairwise(means)]
    assert all(0.7 < power < 1.3 for power in powers), (means, shares)  # as 1 / N; the bound falls as its root

"""``random-features``: how well random features approximate the softmax kernel, by number and kind (DUAL figs. 6 to 9).

Attention of random queries and keys is computed exactly and with positive random features: independent, orthogonal, or simplex
(Reid et al. 2023, which the paper suggests but does not try). Every kind is drawn separately for every seed, with the same
queries, keys and values.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from kvlens.ops import dual
from kvlens.ops.feature_maps import draw_projections
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison

KINDS = ("iid", "orthogonal", "simplex")


def simplex_projections(m: int, d: int, generator: torch.Generator) -> Float[Tensor, "m d"]:
    """Blocks of d directions towards the corners of a simplex, randomly rotated, with the lengths of normal vectors.

    These are d unit vectors with inner products -1 / (d - 1), the largest possible angle; they span d - 1 dimensions.
    """
    corners = (torch.eye(d, dtype=torch.float64) - 1.0 / d) * math.sqrt(d / (d - 1))
    normal = torch.randn(m, d, generator=generator, dtype=torch.float64)
    blocks = []
    for _ in range(-(-m // d)):
        q, r = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
        blocks.append(corners @ (q * r.diagonal().sign()))
    return torch.cat(blocks)[:m] * normal.norm(dim=-1, keepdim=True)


def _projection(kind: Any, m: int, d: int, draws: torch.Generator) -> Float[Tensor, "one m d"]:
    if kind == "simplex":
        return simplex_projections(m, d, draws)[None]
    return draw_projections(1, m, d, kind, draws).double()


@experiment(
    "DUAL app. E.1, figs. 6 to 9",
    "How many random features approximate the softmax kernel well, and which kind is best?",
    cost=("seconds", "about a minute on one core"),
    seeds=([0, 1], list(range(100, 700))),
    size=0.5,
    d_head=(4, 12),
    n_tokens=(6, 16),
    n_features=([8, 32], [12, 48, 192, 768, 3072]),
)
def random_features(settings: Settings, tell: Tell) -> Reproduction:
    """Errors of attention and output for every kind, number and seed."""
    d, n, rows = settings["d_head"], settings["n_tokens"], []
    for seed in settings["seeds"]:
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, n, d, generator=generator, dtype=torch.float64) for _ in range(3))
        q, k = settings["size"] * q, settings["size"] * k
        scale = math.sqrt(d)
        exact = (q @ k.transpose(-1, -2) / scale).softmax(dim=-1)
        for m, kind in itertools.product(settings["n_features"], KINDS):
            projection = _projection(kind, m, d, torch.Generator().manual_seed(1000 * seed + m))
            (phi_q, _), (phi_k, log_k) = (dual.scaled_random_features(x, projection, scale) for x in (q, k))
            kernel = dual.kernel_values(dual.feature_kernel(phi_q, phi_k, None, log_k - log_k.max()))
            pattern = kernel / kernel.sum(dim=-1, keepdim=True)
            for what, error in (("attention", pattern - exact), ("output", (pattern - exact) @ v)):
                mse, mae = float(error.square().mean()), float(error.abs().mean())
                rows.append(dict(kind=kind, n_features=m, seed=seed, what=what, mse=mse, mae=mae))
        tell(f"seed {seed}")
    errors = pd.DataFrame(rows)
    return Reproduction(
        tables={"errors": errors},
        figure=lambda: draw(errors),
        comparisons=[*compare(errors)],
        differences=[
            f"{n} normal queries and keys of {d} dimensions and standard deviation {settings['size']} instead of a trained "
            f"layer's; {len(settings['seeds'])} seeds. The variance of random features grows as exp(|q + k|^2 / scale): at "
            "standard deviation 1 the error falls only with a power of a third, over these numbers."
        ],
    )


def compare(errors: pd.DataFrame) -> Iterator[Comparison]:
    """Whether and how fast the error falls, and which kind is better."""
    log_mse = errors[errors["what"] == "output"].assign(log_mse=lambda t: t["mse"].map(math.log))
    wide = log_mse.pivot_table(index="seed", columns=["kind", "n_features"], values="log_mse")
    few, many = int(errors["n_features"].min()), int(errors["n_features"].max())
    for kind in KINDS:
        fall = (wide[kind, few] - wide[kind, many]).tolist()
        slope = -sum(fall) / len(fall) / math.log(many / few)
        what = f"{kind}: power of the number of features with which the output's squared error falls, {few} to {many}"
        claim = "approximation gradually improves with the number of features (figs. 6 to 8)"
        yield Comparison.tested_on(what, claim, fall, ours=slope)
    for kind, than in (("orthogonal", "iid"), ("simplex", "orthogonal")):
        gain = pd.concat([wide[than, m] - wide[kind, m] for m in wide[kind].columns], axis=1).mean(axis=1).tolist()
        what = f"{kind} against {than}: log of the ratio of squared errors, mean over numbers of features"
        yield Comparison.tested_on(what, f"{kind} random features can do better (app. E.1)", gain)


def draw(errors: pd.DataFrame) -> Figure:
    """Mean squared error against the number of features, attention and output."""
    return draw_panels(errors, "n_features", "mse", by="kind", panel="what", log="xy", ticks=True)

"""``dual-layer``: attention and the following MLP as one dual model, and the rank of its labels (DUAL fig. 14).

Left: a random layer of attention and ReLU MLP, at its last token, against its dual model after one step (th. B.1). Right: the
upper bound of rank W_FFN W_V, min(d_model, active units), for random inputs, as the width of the MLP varies; and the rank
itself.

Then every head of shipped models, in whole blocks with norm and residual, where b comes from the stream, the norm, the tangent
and the biases, not from the block's output. Their MLPs use GELU, which is not piecewise linear: the tangent at the query takes
the place of the mask, and b holds what the tangent leaves of the MLP's output; the table gives its size (0 for ReLU).
"""

import itertools
from collections.abc import Iterator

import pandas as pd
import torch
from matplotlib.figure import Figure

from kvlens.dual import DualLayer
from kvlens.model import HookedKVTransformer
from kvlens.ops import dual_layers
from kvlens.papers.dual.dual_equivalence import after_one_step
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison

LARGEST = 1e-12
TEXTS = {
    "docs-gpt2": "Return a list of the names of all widgets. The list is sorted by name, and empty if there is no widget.",
    "facts-gpt2": "The drum stands in the cellar. Pavel has a parrot. At night Kaya feeds a donkey. Pavel keeps a",
}


@experiment(
    "DUAL th. B.1, fig. 14",
    "Is a whole transformer layer one gradient step, and what is the rank of its labels?",
    cost=("seconds", "under a minute on one core"),
    seeds=([0, 1], list(range(8))),
    d_model=(6, 12),
    d_mlp=([4, 24], [6, 12, 24, 48, 96]),
    n_tokens=16,
    n_inputs=(3, 64),
    models=(["facts-gpt2"], list(TEXTS)),
    n_queries=(1, 3),
)
def dual_layer(settings: Settings, tell: Tell) -> Reproduction:
    """Random layers of every width and seed."""
    widths = itertools.product(settings["seeds"], settings["d_mlp"])
    layers = pd.DataFrame([dict(seed=seed, d_mlp=d_mlp, **_one_layer(settings, d_mlp, seed)) for seed, d_mlp in widths])
    tell(f"{len(layers)} random layers")
    blocks = pd.concat([trained_blocks(name, settings["n_queries"]) for name in settings["models"]], ignore_index=True)
    tell(f"{len(blocks)} heads and queries of {', '.join(settings['models'])}")
    d = settings["d_model"]
    return Reproduction(
        tables={"layers": layers, "trained_blocks": blocks},
        figure=lambda: draw(layers, d),
        comparisons=[*compare(layers, d), *compare_blocks(blocks)],
        differences=[
            f"d_model {d}, {settings['n_tokens']} tokens, {settings['n_inputs']} inputs a width, random weights.",
            "The paper has no trained model here, and its layer has neither norm nor residual.",
        ],
    )


def trained_blocks(name: str, n_queries: int) -> pd.DataFrame:
    """Every layer and head of a shipped model, in float64, at the last ``n_queries`` tokens of a text."""
    model = HookedKVTransformer.from_zoo(name, dtype=torch.float64)
    tokens = model.to_tokens(TEXTS[name])[0]
    queries, rows = range(len(tokens) - n_queries, len(tokens)), []
    for layer, head, query in itertools.product(range(model.cfg.n_layers), range(model.cfg.n_heads), queries):
        found = DualLayer.from_layer(model, tokens, layer, head, query)
        own = dict(equivalence_error=found.equivalence_error(), remainder=found.remainder, rank=found.rank)
        rows.append(dict(model=name, layer=layer, head=head, query=query, **own, d_head=model.cfg.d_head))
    return pd.DataFrame(rows)


def _one_layer(settings: Settings, d_mlp: int, seed: int) -> dict[str, float]:
    d, n = settings["d_model"], settings["n_tokens"]
    generator = torch.Generator().manual_seed(1000 * seed + d_mlp)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    W_Q, W_K, W_V = (normal(d, d) / d**0.5 for _ in range(3))
    W_in, b_in, W_out, b_out = normal(d, d_mlp) / d**0.5, normal(d_mlp) / 10, normal(d_mlp, d) / d_mlp**0.5, normal(d) / 10
    bounds, ranks, errors = [], [], []
    for _ in range(settings["n_inputs"]):
        x = normal(n, d)
        q, k, v = x[-1] @ W_Q, x @ W_K, x @ W_V
        pre = (k @ q / d**0.5).softmax(dim=0) @ v @ W_in + b_in
        weight, bias, _ = dual_layers.fold_mlp(W_in, b_in, W_out, b_out, torch.relu, pre)
        output = torch.relu(pre) @ W_out + b_out
        after = after_one_step(q, k, v @ weight, d**0.5) + bias
        errors.append(float((after - output).norm() / output.norm()))
        bounds.append(float(dual_layers.rank_bound((pre > 0).double(), d)))
        ranks.append(float(torch.linalg.matrix_rank(W_V @ weight)))
    n_inputs = len(bounds)
    return dict(rank_bound=sum(bounds) / n_inputs, rank=sum(ranks) / n_inputs, largest_error=max(errors))


def compare(layers: pd.DataFrame, d: int) -> Iterator[Comparison]:
    """Equivalence, and the widths at which the bound is below d_model."""
    what = "largest relative difference of the layer's output and the dual model's prediction"
    claim = "after one step the dual model with labels W_FFN v predicts the layer's output"
    yield Comparison.at_most(what, claim, float(layers["largest_error"].max()), LARGEST, paper="0 (strictly equivalent)")
    lost = layers.assign(lost=d - layers["rank_bound"])
    if len(wide := lost[lost["d_mlp"] >= 4 * d]):
        what = "MLPs of at least 4 d_model: d_model less the bound of the rank, mean"
        claim = "where the MLP is wide the bound stays at d_model (significantly less than half a dimension lost)"
        yield Comparison.tested_on(what, claim, wide.groupby("seed")["lost"].mean().tolist(), 0.5, below=True, paper=0)
    if len(narrow := lost[lost["d_mlp"] <= d]):
        what = "MLPs of at most d_model: d_model less the bound of the rank, mean"
        claim = "where the MLP is narrow W_FFN W_V clearly has low rank"
        yield Comparison.tested_on(what, claim, narrow.groupby("seed")["lost"].mean().tolist(), 0.25 * d)


def compare_blocks(blocks: pd.DataFrame) -> Iterator[Comparison]:
    """Equivalence in trained blocks, and the distance of their MLPs from piecewise linear ones."""
    what = "shipped GELU models, norm and residual included: largest relative difference after one step"
    claim = "with the tangent at the query, and what it leaves in b, th. B.1 also holds for a trained block"
    yield Comparison.at_most(what, claim, float(blocks["equivalence_error"].max()), LARGEST)
    median, most = float(blocks["remainder"].median()), float(blocks["remainder"].max())
    what = f"the same: part of the MLP's output that its tangent leaves to the bias, median (largest {most:.2g})"
    yield Comparison.stated(what, "0 for ReLU; the paper has no such activation", median)


def draw(layers: pd.DataFrame, d: int) -> Figure:
    """Bound and rank against the MLP's width, means over inputs."""
    table = layers.melt(["seed", "d_mlp"], ["rank_bound", "rank"], "what", "dimensions")
    title = "Rank of W_FFN W_V after a ReLU MLP, and its upper bound"
    return draw_panels(table, "d_mlp", "dimensions", by="what", title=title, lines={"d_model": d}, log="x", ticks=True)

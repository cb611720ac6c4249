"""``dual-heads``: are heads with a large decrease of the dual model's loss responsible for in-context learning?

DUAL describes every head as a step that lowers a loss, but does not ask which heads matter. Here, for each head of the shipped
models, on sequences of a task and at the scored positions, three things are measured:

- the logarithm of the decrease of its loss at learning rate 1, the share of its output that is due to the step, and how much
  closer the step brings values and predictions (cosine);
- the increase of the model's loss when the head's output is that of another sequence (resampling ablation);
- its induction score: attention to the tokens that follow an earlier occurrence of the query's token.

The rank correlation of each dual measure with each of the other two, over the heads of a model, is tested by permutations of
heads. If the two are unrelated, every pairing is equally likely, so a verdict at p <= 0.02 is wrong in at most one of fifty
cases. With four heads nothing can be significant (2 of 24 pairings are always as extreme).
"""

import itertools
import math
from collections.abc import Iterator
from functools import cache

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from kvlens.dual import dual_figures
from kvlens.model import HookedKVTransformer
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment, hooked_model
from kvlens.papers.harness.significance import LEVEL, MOST_COUNTED, Comparison, Evidence
from kvlens.tasks import make_task
from kvlens.tasks.task import Batch

DUAL = ("log_loss_drop", "step_share", "cosine_gain")
OTHERS = {
    "ablation_effect": "change in loss when resampled, nats",
    "induction_score": "induction score, share of attention",
}


def _induction(vocab_size: int, length: int) -> dict[str, object]:
    return dict(name="induction", settings=dict(vocab_size=vocab_size, length=length))


_MODELS: dict[str, object] = {
    "induction-shift-1l": _induction(512, 64),
    "induction-plain-2l": _induction(512, 64),
    "bigram-linear": dict(name="bigrams", settings=dict(n_letters=52, n_triggers=5, length=64, trigger_rate=0.5)),
    "facts-linear": dict(name="facts", settings=dict(min_facts=2, max_facts=10, length=144, whole_share=0.125)),
    "docs-linear": _induction(1024, 64),
    "docs-shift": _induction(1024, 64),
}


@experiment(
    "DUAL th. 3.1 (the question is ours)",
    "Are heads with a large decrease of the dual model's loss responsible for in-context learning?",
    cost=("seconds", "about two minutes on one core"),
    models=({"induction-plain-2l": _induction(512, 32)}, _MODELS),
    n_sequences=(2, 12),
)
def dual_heads(settings: Settings, tell: Tell) -> Reproduction:
    """Measure every head of every model, and correlate."""
    heads = []
    for name, task in settings["models"].items():
        model = hooked_model(name)
        drawn = make_task(task["name"], **task["settings"]).heldout(settings["n_sequences"])
        heads.append(measure_heads(model, drawn).assign(model=name))
        tell(f"{name}: {model.cfg.n_layers * model.cfg.n_heads} heads on {settings['n_sequences']} sequences")
    by_sequence = pd.concat(heads, ignore_index=True)
    table = by_sequence.groupby(["model", "layer", "head"], sort=False, as_index=False)[[*DUAL, *OTHERS]].mean()
    found = correlations(table)
    return Reproduction(
        tables={"heads": table, "correlations": found},
        figure=lambda: draw(table),
        comparisons=[*compare(found)],
        differences=[
            "The paper does not say which heads matter; the question is ours.",
            f"{settings['n_sequences']} sequences per model; measures are means over scored positions.",
            f"{len(found)} correlations: about {len(found) * LEVEL:.1g} would be significant if all were 0.",
        ],
    )


@torch.no_grad()
def measure_heads(model: HookedKVTransformer, batch: Batch) -> pd.DataFrame:
    """One row per sequence, layer and head: the dual figures, the ablation's effect and the induction score."""
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    batch = Batch(*(part.to(model.W_E.device) for part in batch))
    names = [f"blocks.{layer}.attn.hook_{leaf}" for layer in range(n_layers) for leaf in ("z", "pattern")]
    logits, cache = model.run_with_cache(batch.inputs, attention_mask=torch.ones_like(batch.inputs), names_filter=names)
    whole = _scored_losses(logits, batch)
    effects, scores = torch.zeros(len(batch.inputs), n_layers, n_heads), torch.zeros(len(batch.inputs), n_layers, n_heads)
    after = _follows_earlier_occurrence(batch.inputs)
    for layer, head in itertools.product(range(n_layers), range(n_heads)):
        other = cache[f"blocks.{layer}.attn.hook_z"].roll(1, dims=0)[:, :, head]

        def resample(z: Tensor, hook: object, other: Tensor = other, head: int = head) -> Tensor:
            z = z.clone()
            z[:, :, head] = other
            return z

        mask = torch.ones_like(batch.inputs)
        ablated = model.run_with_hooks(batch.inputs, attention_mask=mask, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", resample)])
        effects[:, layer, head] = _scored_losses(ablated, batch) - whole
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][:, head]
        scores[:, layer, head] = _mean_scored((pattern * after).sum(dim=-1), batch.scored)
    rows = []
    for i, tokens in enumerate(batch.inputs):
        figures = dual_figures(model, tokens)
        scored = batch.scored[i, 1:].expand_as(figures.step_share)
        gain = figures.cosine_after - figures.cosine_before
        for layer, head in itertools.product(range(n_layers), range(n_heads)):
            at = scored[layer, head]
            means = [x[layer, head][at].mean() for x in (figures.log_loss_drop, figures.step_share, gain)]
            values = [*means, effects[i, layer, head], scores[i, layer, head]]
            rows.append(
                dict(sequence=i, layer=layer, head=head, **dict(zip((*DUAL, *OTHERS), map(float, values), strict=True)))
            )
    return pd.DataFrame(rows)


def _scored_losses(logits: Tensor, batch: Batch) -> Float[Tensor, " batch"]:
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2).double(), batch.targets, reduction="none")
    return _mean_scored(losses, batch.scored)


def _mean_scored(x: Tensor, scored: Tensor) -> Float[Tensor, " batch"]:
    return (x * scored).sum(dim=1) / scored.sum(dim=1)


def _follows_earlier_occurrence(tokens: Tensor) -> Float[Tensor, "batch query key"]:
    """1 if the token before the key is the query's own token, at an earlier position."""
    same = tokens[:, :, None] == tokens[:, None, :].roll(1, dims=2)
    return (same.tril() & (torch.arange(tokens.shape[1], device=tokens.device) > 0)).double()


def correlations(table: pd.DataFrame) -> pd.DataFrame:
    """Rank correlations over the heads of each model, with the permutation test's p."""
    rows = []
    for (model, heads), x, y in itertools.product(table.groupby("model", sort=False), DUAL, OTHERS):
        a, b = heads[x].to_numpy(), heads[y].to_numpy()
        found = dict(n_heads=len(heads), rho=spearman(a, b), p=chance_of_pairing(a, b))
        rows.append(dict(model=model, dual=x, other=y, **found))
    return pd.DataFrame(rows)


def spearman(a: Float[np.ndarray, " head"], b: Float[np.ndarray, " head"]) -> float:
    """Rank correlation; ties share their ranks."""
    ra, rb, size = _centered_ranks(a, b)
    return float((ra * rb).sum()) / size if size else math.nan


def _centered_ranks(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """The ranks of both, less their mean, and the product of their lengths."""
    ra, rb = (ranks - ranks.mean() for ranks in (pd.Series(x).rank().to_numpy() for x in (a, b)))
    return ra, rb, math.sqrt(float((ra**2).sum() * (rb**2).sum()))


def chance_of_pairing(a: Float[np.ndarray, " head"], b: Float[np.ndarray, " head"]) -> float:
    """The share of pairings of heads whose rank correlation is at least as far from 0; sampled if there are too many."""
    ra, rb, size = _centered_ranks(a, b)
    if not size:
        return 1.0
    return float((np.abs(ra[_orders(len(a))] @ rb / size) >= abs((ra * rb).sum() / size) - 1e-12).mean())


@cache
def _orders(n: int) -> Int[np.ndarray, "order head"]:
    """Every order of n heads, or a sample of the largest allowed size that includes the given one."""
    if math.factorial(n) <= MOST_COUNTED:
        return np.array(list(itertools.permutations(range(n))))
    orders = np.random.default_rng(0).permuted(np.tile(np.arange(n), (MOST_COUNTED, 1)), axis=1)
    orders[0] = np.arange(n)
    return orders


def compare(found: pd.DataFrame) -> Iterator[Comparison]:
    """Test each correlation by permutations."""
    claim = "heads with a large step of their dual model are those responsible for in-context learning (our question)"
    for row in found.itertuples():
        what = f"{row.model}: rank correlation of {row.dual} with {row.other} over {row.n_heads} heads (p {row.p:.3f})"
        yield Comparison(what, claim, float(row.rho), Evidence("chance", (float(row.rho), float(row.p))))


def draw(table: pd.DataFrame) -> Figure:
    """Plot each head of each model: the decrease of the loss against the ablation's effect and the induction score."""
    dots = table.rename(columns=OTHERS).melt(["model", "log_loss_drop"], [*OTHERS.values()], "measure")
    title = "The dual model's step (log of the decrease in loss) and two measures; a dot per head, means over sequences"
    figure = draw_panels(dots, "log_loss_drop", "value", panel="measure", title=title, dots=True)
    figure.axes[0].set_yscale("symlog", linthresh=1e-3)
    return figure

"""``coefficients``: whether heads of a trained shifted model use the current or the previous token (KVSA table 4).

A head with window 1 mixes its keys by (alpha_1, alpha_2) and its values by (beta_1, beta_2), index 1 being the current token.
Table 4 sorts the heads of a 2.9B model into four kinds, by whether alpha_1 > alpha_2 and whether beta_1 > beta_2. Keys of the
previous token with values of the current one (alpha_1 <= alpha_2, beta_1 > beta_2) are the induction head of th. 2; the paper's
initialization gives each kind a quarter. The free form lets coefficients leave [0, 1], which is counted here as well.

Heads of one run are not independent of each other, so whether a kind is in the majority is tested on runs: those of the free
form of ``variants``, one share of heads for each seed. For a single model the counts are shown without a verdict.

Other models are shipped ones, or folders. How heads were early in training is told by a run that ends there.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvlens.arguments import path_of
from kvlens.errors import KVLensError, nearest
from kvlens.model import HookedKVTransformer
from kvlens.ops.kv_shift import coefficients_from_parameter
from kvlens.papers.harness.learned import Cell, train_cells
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.kvsa.models import MORE_SEEDS, SMALL_MODEL, SMALL_RATES, SMALL_SEEDS, SMALL_TEXT, SMALL_TRAINING, TINY_TEXT
from kvlens.tasks import make_task
from kvlens.zoo import folder_of, names

KINDS = {(True, True): 50, (False, True): 17, (True, False): 9, (False, False): 52}
"""(alpha_1 > alpha_2, beta_1 > beta_2) -> heads of that kind among the paper's 128."""
N_PAPER = sum(KINDS.values())
SAME, INDUCTION, OPPOSITE = [(True, True), (False, False)], (False, True), (True, False)
NEGATIVE, FAR = -0.15, 0.49
"""The one head that the paper prints has alpha = (0.08, 0.43) and beta = (0.34, -0.15) (sec. 4.6, footnote): its negative
coefficient, and how far from 1 the nearer of its sums is."""
LETTERS = {"k": "alpha", "v": "beta"}
PARAMETER = re.compile(r"blocks\.(\d+)\.attn\.([kv])_shift_coef")
HEAD = ["model", "seed", "layer", "head"]
TRAINED = "trained here"


class Source(NamedTuple):
    """A model; ``seed`` tells the runs of one name apart."""

    name: str
    model: HookedKVTransformer
    seed: int = 0


@experiment(
    "KVSA table 4",
    "Do trained shifted heads prefer the current or the previous token, and do coefficients leave [0, 1]?",
    cost=("seconds", "seconds after `variants`, whose runs it reads; a quarter of an hour on one core without them"),
    models=([], ["docs-shift", "docs-linear"]),
    train=(
        dict(
            task=TINY_TEXT,
            model=dict(n_layers=2, d_model=24, d_head=8, attn_only=True, kv_shift=True),
            training=dict(steps=6, batch_size=4, eval_every=2, eval_sequences=4),
            rates=[3e-2],
            seeds=[0, 1],
        ),
        dict(
            task=SMALL_TEXT,
            model={**SMALL_MODEL, "kv_shift": True},
            training=SMALL_TRAINING,
            rates=SMALL_RATES,
            seeds=[*SMALL_SEEDS, *MORE_SEEDS],
        ),
    ),
)
def coefficients(settings: Settings, tell: Tell) -> Reproduction:
    """Read the coefficients of every model of ``settings["models"]``, and of those trained here if ``settings["train"]``."""
    sources = [read_source(name) for name in settings["models"]]
    if settings["train"] is not None:
        sources += train_sources(settings["train"], tell)
    of_name = list({source.name: source for source in sources}.values())
    coefficients = pd.concat([coefficients_of(source) for source in sources], ignore_index=True)
    for source in of_name:
        own = coefficients[coefficients["model"] == source.name]
        tell(f"{source.name}: {len(preferences(own))} heads, {outside_share(own):.0%} of the coefficients outside [0, 1]")
    return Reproduction(
        tables={"coefficients": coefficients, "counts": count_kinds(coefficients)},
        figure=lambda: draw(preferences(coefficients)),
        comparisons=[row for source in of_name for row in compare(coefficients[coefficients["model"] == source.name])],
        differences=[
            "The paper counts 128 pairs of key and value heads of a model of 2.9 billion parameters; here "
            + "; ".join(describe(source) for source in of_name)
            + ".",
            "Models start with a quarter of the heads of each kind, on average, and a briefly trained one still shows it.",
            "The paper counts the heads of one run, and gives no test.",
        ],
    )


def read_source(name: str) -> Source:
    """A shipped model by its name, or the model in a folder, or in the folder of a training run.

    Raises:
        KVLensError: there is none.
    """
    place = folder_of(name) if name in names() else path_of("model", name)
    folder = next((path for path in (place, place / "model") if (path / "config.json").is_file()), None)
    if folder is None:
        raise KVLensError(
            f"coefficients: {name!r} is neither a shipped model nor a folder with one{nearest(name, names())}; shipped are "
            f"{', '.join(names())}. `kvlens train docs-shift --out docs-shift` trains the model of this experiment, which "
            "is then found from the folder where the command ran"
        )
    return Source(name, HookedKVTransformer.load(folder))


def train_sources(train: Settings, tell: Tell) -> list[Source]:
    """Train a model on text with every seed; kept runs of the free form of ``variants`` are the same runs."""
    sources: list[Source] = []

    def keep(label: str, seed: int, trained: HookedKVTransformer) -> list[dict[str, object]]:
        sources.append(Source(label, trained, seed))
        return []

    train_cells([Cell(make_task("text", **train["task"]), {TRAINED: train["model"]}, examine=keep)], train, tell)
    return sources


def coefficients_of(source: Source) -> pd.DataFrame:
    """The coefficients as used, one row each: model, seed, layer, head, coefficient ("alpha_1" ...), value."""
    shift = source.model.cfg.kv_shift
    found = {name: p.detach() for name, p in source.model.named_parameters() if PARAMETER.fullmatch(name)}
    if shift is None or {name.split(".")[-1][0] for name in found} != set(LETTERS):
        raise KVLensError(f"coefficients: {source.name!r} must shift both keys and values; its kv_shift is {shift}")
    tables = []
    for name, parameter in sorted(found.items()):
        layer, letter = re.findall(PARAMETER, name)[0]
        used = coefficients_from_parameter(parameter.double(), shift.parametrization).numpy()
        head, tap = (axis.flatten() for axis in np.indices(used.shape))
        own = dict(layer=int(layer), head=head, coefficient=[f"{LETTERS[letter]}_{place + 1}" for place in tap])
        tables.append(pd.DataFrame(dict(model=source.name, seed=source.seed, **own, value=used.flatten())))
    return pd.concat(tables, ignore_index=True)


def preferences(coefficients: pd.DataFrame) -> pd.DataFrame:
    """One row per head: its coefficients as columns, and ``kind``, one of the pairs that `KINDS` has as keys."""
    heads = coefficients.pivot_table(index=HEAD, columns="coefficient", values="value", sort=False).reset_index()
    heads.columns.name = None
    keys, values = heads["alpha_1"] > heads["alpha_2"], heads["beta_1"] > heads["beta_2"]
    return heads.assign(kind=list(zip(keys, values, strict=True)))


def count_kinds(coefficients: pd.DataFrame) -> pd.DataFrame:
    """Table 4 for every model: the number of heads of each of the four kinds, including empty ones."""
    rows = []
    for name, heads in preferences(coefficients).groupby("model", sort=False):
        for kind, paper in KINDS.items():
            sides = zip(LETTERS.values(), kind, strict=True)
            keys, values = (f"{letter}_1 {'>' if current else '<='} {letter}_2" for letter, current in sides)
            count = sum(found == kind for found in heads["kind"])
            shares = dict(share=count / len(heads), paper=paper, paper_share=paper / N_PAPER)
            rows.append(dict(model=name, keys=keys, values=values, count=count, **shares))
    return pd.DataFrame(rows)


def outside_share(coefficients: pd.DataFrame) -> float:
    """The share of coefficients below 0 or above 1."""
    return float((~coefficients["value"].between(0, 1)).mean())


def sums(coefficients: pd.DataFrame) -> pd.Series:
    """The sum of each head's alphas and of its betas: 1 at the paper's initialization, and always for the gate."""
    letters = coefficients["coefficient"].str.partition("_")[0]
    return coefficients.groupby([*(coefficients[key] for key in HEAD), letters])["value"].sum()


def compare(coefficients: pd.DataFrame) -> Iterator[Comparison]:
    """The heads of a model, or of the runs of one, with a ``seed`` for each, against table 4."""
    name = coefficients["model"].iloc[0]
    counts = count_kinds(coefficients)
    n_heads = int(counts["count"].sum())
    by_kind = dict(zip(KINDS, counts["count"].tolist(), strict=True))
    for _, row in counts.iterrows():
        what, ours = f"{name}: heads with {row['keys']} and {row['values']}", f"{row['count']} of {n_heads}"
        yield Comparison.stated(what, "heads of all four kinds occur", ours, paper=f"{row['paper']} of {N_PAPER}")
    by_run = [heads["kind"] for _, heads in preferences(coefficients).groupby("seed")]
    what = f"{name}: heads whose keys and values prefer the same token"
    claim = "in most heads keys and values prefer the same token"
    ours, paper = (f"{sum(count[kind] for kind in SAME)} of {sum(count.values())}" for count in (by_kind, KINDS))
    alike = [sum(kind in SAME for kind in kinds) / len(kinds) for kinds in by_run]
    yield _majority(what, claim, ours, paper, alike, 0.5)
    what = f"{name}: previous keys with current values (induction) against current keys with previous values"
    claim = "of the heads whose keys and values prefer different tokens, more are of the induction kind"
    ours, paper = (f"{count[INDUCTION]} against {count[OPPOSITE]}" for count in (by_kind, KINDS))
    ahead = [sum((kind == INDUCTION) - (kind == OPPOSITE) for kind in kinds) / len(kinds) for kinds in by_run]
    yield _majority(what, claim, ours, paper, ahead, 0.0)
    by_run = coefficients.groupby("seed")["value"].min().tolist()
    claim = "some coefficients become as negative as in the paper's example, which gate and clamp would prevent (sec. 4.6)"
    yield _extreme(f"{name}: smallest coefficient", claim, by_run, NEGATIVE, below=True)
    by_run = (sums(coefficients) - 1).abs().groupby("seed").max().tolist()
    claim = "some sums, which start at 1, end as far from it as in the paper's example (sec. 4.6)"
    yield _extreme(f"{name}: largest |sum - 1| of a head's two alphas, or its two betas", claim, by_run, FAR)


def _majority(what: str, claim: str, ours: str, paper: str, by_run: list[float], bound: float) -> Comparison:
    """A claim about the shares of heads of several runs; without a verdict for a single one."""
    if len(by_run) == 1:
        return Comparison.stated(what, claim, ours, paper=paper)
    return Comparison.tested_on(what, claim, by_run, bound, ours=f"{ours}, {len(by_run)} runs", paper=paper)


def _extreme(what: str, claim: str, by_run: list[float], bound: float, *, below: bool = False) -> Comparison:
    """A claim about the most extreme head: that of one model is what it is; over several runs it is tested."""
    if len(by_run) > 1:
        return Comparison.tested_on(f"{what}, mean over runs", claim, by_run, bound, below=below, paper=bound)
    compare_with = Comparison.at_most if below else Comparison.at_least
    return compare_with(what, claim, by_run[0], bound, paper=bound)


def describe(source: Source) -> str:
    """Size and heads of a model, as text."""
    cfg = source.model.cfg
    n_parameters = sum(p.numel() for p in source.model.parameters())
    return f"{source.name} has {cfg.n_layers} x {cfg.n_kv_heads} and {n_parameters:,} parameters ({cfg.attention} attention)"


# --- figure ---


def draw(heads: pd.DataFrame) -> Figure:
    """The quadrants of table 4: a dot per head, with the preference of its keys across and that of its values up."""
    shown = heads.assign(keys=heads["alpha_1"] - heads["alpha_2"], values=heads["beta_1"] - heads["beta_2"])
    figure = draw_panels(
        shown,
        "keys",
        "values",
        by="layer",
        panel="model",
        title="Preference for the current token over the previous one; a dot per head, by layer",
        xlabel="keys: $\\alpha_1 - \\alpha_2$",
        ylabel="values: $\\beta_1 - \\beta_2$",
        dots=True,
    )
    for axes in figure.axes:
        axes.axvline(0, color="#64748b", linewidth=1)
        axes.axhline(0, color="#64748b", linewidth=1)
    return figure

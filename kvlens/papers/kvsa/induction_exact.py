"""``induction-exact``: how close heads with weights written down come to the induction head IH (KVSA th. 1 and 2).

Three constructions are built as real models, run on random tokens, and compared with
:func:`kvlens.ops.induction.induction_head` in float64:

- one layer with KV shift: equal up to rounding;
- two layers without, the first blind to its own token: the error falls like e^{-p1}, p1 being that layer's ALiBi slope;
- two layers without, under an ordinary causal mask: the same decay, until the rounding error, which is divided by e^{-p1},
  exceeds it; the smallest error that it can reach is about the square root of the precision.

The proof of theorem 1 prints a bound, 4 |I / sigma| e^-p1 / (1 - e^-p1) with |I| = d. It takes entries of the stream to be at
most 1, so it is tested on entries of 1 and -1, and on larger ones. What the shift costs in time (sec. 2.2) is measured besides.
"""

import itertools
import math
import time
from collections.abc import Iterator, Mapping

import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from kvlens.model import HookedKVTransformer
from kvlens.model.config import KVShiftConfig
from kvlens.ops.induction import induction_head
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.kvsa.constructed_models import BLIND_HOOK, model_of_zeros, shifted_head, two_layer_head

SHIFTED = "one layer, KV shift"
BLIND = "two layers, first blind to its own token"
ORDINARY = "two layers, ordinary causal mask"
DTYPES = (torch.float64, torch.float32)
SILENT = 0
"""The token whose embedding is 0, which stands for nothing before a text."""

P1 = [float(p) for p in range(1, 40, 2)]
ENTRIES = {1: "the printed bound of app. A, for entries of at most 1", 3: "the printed bound of app. A, which names no limit"}
"""The sizes of the stream's entries for which it is tested."""


@experiment(
    "KVSA th. 1 and 2",
    "Can one layer with KV shift be an induction head exactly, where two layers without it only come close?",
    cost=("a second", "half a minute on two cores"),
    d=(5, 32),
    d_vocab=(11, 50),
    length=(17, 128),
    batch=(2, 4),
    sigmas=([0.5], [0.25, 1.0]),
    slopes=([0.1], [0.02, 0.0]),
    p1=([1.0, 4.0, 6.0, 8.0, 10.0, 18.0, 38.0], P1),
    timed=dict(lengths=([3], [128, 512]), widths=([9], [256, 768]), passes=(2, 10)),
    seed=0,
)
def induction_exact(settings: Settings, tell: Tell) -> Reproduction:
    """Measure every construction at every p1, temperature, slope and precision of ``settings``."""
    embeddings, tokens = draw_text(settings)
    errors = pd.DataFrame(_measure_all(embeddings, tokens, settings, tell))
    shown = dict(sigma=settings["sigmas"][0], slope=settings["slopes"][0])
    bound = head_rounding(embeddings, tokens.shape[1], **shown, dtype=torch.float64)
    over = pd.DataFrame([row for entry in ENTRIES for row in over_printed_bound(embeddings.shape, tokens, entry, settings)])
    times = pd.DataFrame([*time_of_shift(**settings["timed"])])
    return Reproduction(
        tables={"error": errors, "printed_bound": over, "times": times},
        figure=lambda: draw(errors, shown),
        comparisons=[*compare(errors, bound, shown), *compare_bound(over), *compare_time(times)],
        differences=[
            "IH sums over every position that attention sees, including the first and the current one; the paper's definition "
            "leaves these two out, but the heads of its theorems do not.",
            "Causal attention, TransformerLens' included, sees the current token. The two-layer head is therefore built twice: "
            "with a first layer whose own token is masked, and under the ordinary mask, where the own token is subtracted.",
        ],
    )


def draw_text(settings: Settings) -> tuple[Float[Tensor, "token d"], Int[Tensor, "batch pos"]]:
    """Random embeddings of about unit norm, one of them 0, and random tokens that start with that one."""
    generator = torch.Generator().manual_seed(settings["seed"])
    d, n_tokens = settings["d"], settings["d_vocab"]
    embeddings = torch.randn(n_tokens, d, generator=generator, dtype=torch.float64) / d**0.5
    embeddings[SILENT] = 0
    tokens = torch.randint(1, n_tokens, (settings["batch"], settings["length"]), generator=generator)
    tokens[:, 0] = SILENT
    return embeddings, tokens


def _measure_all(embeddings: Tensor, tokens: Tensor, settings: Settings, tell: Tell) -> Iterator[dict[str, object]]:
    for dtype, sigma, slope in itertools.product(DTYPES, settings["sigmas"], settings["slopes"]):
        tell(f"{str(dtype).removeprefix('torch.')}, sigma {sigma}, slope {slope}")
        rounded, head = embeddings.to(dtype), dict(sigma=sigma, slope=slope)  # the reference reads the same rounded rows
        yield measure(SHIFTED, shifted_head(rounded, **head), tokens, None, **head)
        for p1, (name, sees_itself) in itertools.product(settings["p1"], ((BLIND, False), (ORDINARY, True))):
            yield measure(name, two_layer_head(rounded, **head, p1=p1, sees_itself=sees_itself), tokens, p1, **head)


@torch.no_grad()
def measure(
    construction: str,
    model: HookedKVTransformer,
    tokens: Int[Tensor, "batch pos"],
    p1: float | None,
    sigma: float,
    slope: float,
) -> dict[str, object]:
    """One row of the table: the model's attention output against IH of the same embeddings, in float64."""
    d = model.cfg.d_head
    out = head_output(model, tokens, blind=construction == BLIND).double()
    expected = induction_head(model.W_E[tokens, :d].double(), sigma, slope)
    difference = out - expected
    return {
        "construction": construction,
        "n_layers": model.cfg.n_layers,
        "d_model": model.cfg.d_model,
        "p1": math.nan if p1 is None else p1,
        "sigma": sigma,
        "slope": slope,
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "length": tokens.shape[1],
        "max_abs_error": float(difference.abs().max()),
        "relative_error": float(difference.norm() / expected.norm()),
        "predicted": 0.0 if p1 is None else math.exp(-p1),
    }


def head_output(model: HookedKVTransformer, tokens: Int[Tensor, "batch pos"], blind: bool) -> Float[Tensor, "batch pos d"]:
    """The output of the last layer's attention in the first d features of the stream."""
    name = f"blocks.{model.cfg.n_layers - 1}.hook_attn_out"
    with model.hooks(fwd_hooks=[BLIND_HOOK] if blind else []):
        _, cache = model.run_with_cache(tokens, names_filter=name)
    return cache[name][..., : model.cfg.d_head]


def head_rounding(embeddings: Float[Tensor, "token d"], length: int, sigma: float, slope: float, dtype: torch.dtype) -> float:
    """The largest difference between two ways to compute IH from rounding alone, to first order in the precision.

    A score is a sum of d products, divided by sigma, minus slope times distance; its absolute error is a relative error of its
    weight, and once more through the normalizing sum; then ``length`` weighted rows are summed. Two ways, twice that.
    """
    norm2, largest = float(embeddings.square().sum(-1).max()), float(embeddings.abs().max())
    score = (embeddings.shape[1] + 2) * norm2 / sigma + 3 * slope * length
    return 2 * torch.finfo(dtype).eps * (2 * score + 2 * length) * largest


def over_printed_bound(
    shape: tuple[int, ...], tokens: Int[Tensor, "batch pos"], entry: int, settings: Settings
) -> Iterator[dict[str, float]]:
    """The blind head's largest error over the printed bound, for embeddings whose entries are ``entry`` in size."""
    signs = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(settings["seed"])).double() * 2 - 1
    small = [p1 for p1 in settings["p1"] if p1 < 12]  # where the bound is far above rounding
    for sigma, slope, p1 in itertools.product(settings["sigmas"], settings["slopes"], small):
        head = dict(sigma=sigma, slope=slope)
        row = measure(BLIND, two_layer_head(entry * signs, **head, p1=p1, sees_itself=False), tokens, p1, **head)
        printed = 4 * shape[1] / sigma / math.expm1(p1)
        yield dict(entry=entry, **head, p1=p1, over=row["max_abs_error"] / printed)


@torch.no_grad()
def time_of_shift(lengths: list[int], widths: list[int], passes: int) -> Iterator[dict[str, float]]:
    """Processor time of a layer that only attends, with KV shift over without; the least of ``passes`` each, in turn."""
    for n, d in itertools.product(lengths, widths):
        text, seconds = torch.zeros(1, n, dtype=torch.long), []
        models = [model_of_zeros(torch.ones(1, d), d, d, 1, 1.0, kv_shift=shift) for shift in (None, KVShiftConfig())]
        for model in models * passes:
            start = time.process_time()
            model(text)
            seconds.append(time.process_time() - start)
        yield dict(length=n, width=d, ratio=min(seconds[1::2]) / min(seconds[::2]))


def decay_rate(errors: pd.DataFrame, floor: float) -> float:
    """d log(error) / d p1 by least squares, where e^{-p1} is small (p1 > 3) and the error is above rounding (``floor``)."""
    clean = errors[(errors["p1"] > 3) & (errors["max_abs_error"] > 100 * floor)]
    p1 = torch.tensor(clean["p1"].to_numpy())
    log_error = torch.tensor(clean["max_abs_error"].to_numpy()).log()
    p1 = p1 - p1.mean()
    return float((p1 * (log_error - log_error.mean())).sum() / p1.square().sum())


def compare(errors: pd.DataFrame, bound: float, shown: Mapping[str, float]) -> Iterator[Comparison]:
    """The two theorems against the float64 rows at one temperature and slope; ``bound`` is the largest rounding error."""
    here = errors[(errors["dtype"] == "float64") & (errors["sigma"] == shown["sigma"]) & (errors["slope"] == shown["slope"])]
    error = {name: here[here["construction"] == name] for name in (SHIFTED, BLIND, ORDINARY)}
    shifted = float(error[SHIFTED]["max_abs_error"].iloc[0])
    rate = decay_rate(error[BLIND], floor=bound)
    blind, ordinary = (float(error[name]["max_abs_error"].min()) for name in (BLIND, ORDINARY))
    what = "largest error of the one-layer shifted head, float64"
    claim = "one layer of KV shifting attention is an induction head exactly (th. 2)"
    yield Comparison.at_most(what, claim, shifted, bound, paper=0.0)
    what = "d log(error) / d p1 of the two-layer head, first layer blind to its own token"
    claim = "two layers without shift err by O(exp(-p1)) (th. 1)"
    yield Comparison.at_most(what, claim, abs(rate + 1), 0.02, shown=rate, paper=-1.0)
    what = "smallest error of the two-layer head over all p1, first layer blind to its own token"
    yield Comparison.at_most(what, "the error vanishes as p1 grows (th. 1): down to rounding", blind, bound)
    what = "smallest error of the two-layer head over all p1, ordinary causal mask"
    claim = (
        "no claim of the paper: seeing its own token costs the head half of the digits, about the root of the precision "
        f"({torch.finfo(torch.float64).eps ** 0.5:.1e})"
    )
    yield Comparison.stated(what, claim, ordinary)


def compare_bound(over: pd.DataFrame) -> Iterator[Comparison]:
    """The printed bound against entries that its proof allows, and others."""
    for entry, rows in over.groupby("entry"):
        what = f"the blind head's largest error over 4 |I / sigma| e^-p1 / (1 - e^-p1), |I| = d, entries of {entry} in size"
        yield Comparison.at_most(what, ENTRIES[int(entry)], float(rows["over"].max()), 1)


def compare_time(times: pd.DataFrame) -> Iterator[Comparison]:
    """How long the shift takes; the operations are counted in a test."""
    told = ", ".join(f"N {row.length:g}, D {row.width:g} {row.ratio:.2f}" for row in times.itertuples())
    what = "processor time of a layer with the shift over that of one without"
    yield Comparison.stated(what, "no claim of the paper: how long O(N D) more operations take", told)


# --- figure ---


def draw(errors: pd.DataFrame, shown: Mapping[str, float]) -> Figure:
    """The error of each construction against p1, at one temperature and slope; the shifted head's does not depend on p1."""
    here = errors[(errors["sigma"] == shown["sigma"]) & (errors["slope"] == shown["slope"])]
    lowest = here.loc[here["max_abs_error"] > 0, "max_abs_error"].min() / 10  # where a logarithmic axis puts 0
    shifted = here[here["construction"] == SHIFTED].set_index("dtype")["max_abs_error"].clip(lower=lowest)
    two = here[here["construction"] != SHIFTED]
    two = two.assign(construction=two["construction"] + ", " + two["dtype"])
    title = f"Error against IH(x) by $p_1$, σ = {shown['sigma']:g}, slope m = {shown['slope']:g}"
    lines = {f"{SHIFTED}, {dtype}": error for dtype, error in shifted.items()}
    return draw_panels(two, "p1", "max_abs_error", by="construction", title=title, lines=lines, log="y")

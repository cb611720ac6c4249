"""``conversion-error``: how much converting a prompt changes the logits, by size of the model (ICLCA table 1).

    relative error = ||new - old|| / ||old||        old: logits of [prompt; text] on the text        new: of the text, converted

over random pairs of a prompt and a text, in randomly initialized models. The conversion is exact in real arithmetic, so only
rounding remains. For comparison, the rounding error of the forward pass is measured in the same way: old in float32 against old
in float64, with the same weights. Two float32 computations of the same quantity may differ by twice that error.

Each is measured twice, with the features, states and sums of linear attention in float32, and with them in float64
(``accumulation_dtype``); weights, projections and everything between the attention layers stay in float32.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from kvlens.conversion import convert_prompt
from kvlens.kv_bias import combine
from kvlens.model import HookedKVTransformer, HookedKVTransformerConfig
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison, Evidence
from kvlens.tasks import make_task
from kvlens.training import find_recipe

PRINTED = {"205K": 2.9e-7, "1.99M": 4.4e-7, "19.8M": 8.3e-7, "198M": 1.7e-6, "1.98B": 4.3e-6}
"""Table 1: the relative error by number of parameters."""
CONVERSION, FORWARD = "conversion", "forward pass"
ACCUMULATIONS = ("float32", "float64")
D_VOCAB = 60
ABOUT, HEADS = (0.005, 0.02), (4, 6, 8, 12, 16)
"""What counts as about 1 %: a factor of 2 either way; and the heads of a layer to choose from, as the paper names none."""
NOTICEABLE = 0.01
ADDED, BEHIND = "their biases added", "the second read again behind the bias of the first"


def _size(name: str, n_layers: int, d_model: int, d_head: int, pairs: int, batch: int) -> dict[str, object]:
    return dict(name=name, n_layers=n_layers, d_model=d_model, d_head=d_head, pairs=pairs, batch=batch)


_TINY = [_size("8.6K", 2, 16, 8, pairs=5, batch=3), _size("205K", 4, 64, 16, pairs=5, batch=5)]
_SMALL = [
    _size("205K", 4, 64, 16, pairs=100, batch=100),
    _size("1.99M", 10, 128, 32, pairs=100, batch=100),
    _size("19.8M", 11, 384, 64, pairs=100, batch=50),
]
_LARGE = [_size("198M", 28, 768, 64, pairs=10, batch=10), _size("1.98B", 39, 2048, 128, pairs=2, batch=2)]


@experiment(
    "ICLCA table 1",
    "How much does converting a prompt change the logits, compared with float32 rounding?",
    cost=(
        "a second",
        "about a minute on one core",
        "about five minutes on two cores, and 10 GB of memory (all sizes of table 1; fewer pairs of the largest two)",
    ),
    sizes=(_TINY, _SMALL, [*_SMALL, *_LARGE]),
    n_prompt=(11, 50, 50),
    n_text=(7, 50, 50),
    n_combined=(3, 20, 20),
    combined="facts-linear",
    seed=0,
)
def conversion_error(settings: Settings, tell: Tell) -> Reproduction:
    """Measure models of every size of ``settings``."""
    parts, shipped, lengths = [], settings["combined"], (settings["n_prompt"], settings["n_text"])
    two = [*story_pairs(shipped, settings["n_combined"])]
    for size in settings["sizes"]:
        model = random_model(size["n_layers"], size["d_model"], size["d_head"], seed=settings["seed"])
        batches = random_pairs(size["pairs"], *lengths, batch_size=size["batch"], seed=settings["seed"])
        errors = pd.concat([_measure(model, *batch) for batch in batches], ignore_index=True)
        n_parameters = sum(p.numel() for p in model.parameters())
        halves = next(random_pairs(settings["n_combined"], *lengths, batch_size=size["batch"], seed=settings["seed"]))
        first, second = halves[0].tensor_split(2, dim=1)
        two.append(combined(model, first, second, halves[1]).assign(model=f"{n_parameters:,} parameters"))
        del model  # before the next one is built; the largest takes 8 GB
        errors["pair"] = errors.groupby(["measure", "accumulation"]).cumcount()
        parts.append(pd.DataFrame(dict(size=size["name"], n_parameters=n_parameters), index=errors.index).join(errors))
        tell(f"{n_parameters:,} parameters: {_describe(summarize(parts[-1]))}")
    errors = pd.concat(parts, ignore_index=True)
    summary, of_two = summarize(errors), pd.concat(two, ignore_index=True)
    return Reproduction(
        tables={"error": summary, "pairs": errors, "combined": of_two},
        figure=lambda: draw(summary),
        comparisons=[
            *compare(summary),
            *compare_sizes(errors),
            *compare_bias_sizes(settings["sizes"], errors),
            *compare_combined(of_two),
        ],
        differences=[*_differences(summary)],
    )


def random_model(n_layers: int, d_model: int, d_head: int, *, seed: int = 0, **changes: object) -> HookedKVTransformer:
    """A model of linear attention (elu + 1, RoPE after it) with random weights, without gradients.

    ``changes`` are other fields of :class:`kvlens.HookedKVTransformerConfig`.
    """
    fields: dict[str, Any] = dict(n_ctx=2048, d_vocab=D_VOCAB, act_fn="gelu", positional_embedding_type="rotary")
    fields |= dict(n_layers=n_layers, d_model=d_model, d_head=d_head, attention="linear", device="cpu", seed=seed)
    return HookedKVTransformer(HookedKVTransformerConfig(**{**fields, **changes})).requires_grad_(False)


def random_pairs(
    n_pairs: int, n_prompt: int, n_text: int, *, batch_size: int, seed: int
) -> Iterator[tuple[Int[Tensor, "pair prompt_pos"], Int[Tensor, "pair text_pos"]]]:
    """Random tokens, ``batch_size`` pairs of a prompt and a text at a time."""
    shape = (n_pairs, n_prompt + n_text)
    for both in torch.randint(0, D_VOCAB, shape, generator=torch.Generator().manual_seed(seed)).split(batch_size):
        yield both[:, :n_prompt], both[:, n_prompt:]


def error_of_conversion(
    model: HookedKVTransformer, prompt: Int[Tensor, "pair prompt_pos"], text: Int[Tensor, "pair text_pos"]
) -> tuple[Float[Tensor, " pair"], Float[Tensor, "pair text_pos d_vocab"]]:
    """Relative error of every pair's converted logits, and the reference: the logits with the prompt in context."""
    old = model(torch.cat([prompt, text], dim=1))[:, prompt.shape[1] :]
    with model.kv_bias(convert_prompt(model, prompt)):
        return pair_errors(model(text), old), old


def combined(model: HookedKVTransformer, first: Tensor, second: Tensor, text: Tensor) -> pd.DataFrame:
    """One row per pair and way: the error of the logits of a text behind two prompts, which are converted one by one."""
    old, one, parts = model(torch.cat([first, second, text], dim=1))[:, -text.shape[1] :], convert_prompt(model, first), []
    added = combine(one, convert_prompt(model, second), shift_state="last")
    for way, bias in ((ADDED, added), (BEHIND, convert_prompt(model, second, initial=one))):
        with model.kv_bias(bias):
            parts.append(pd.DataFrame(dict(way=way, relative_error=pair_errors(model(text), old).numpy())))
    return pd.concat(parts, ignore_index=True)


def story_pairs(name: str, n: int) -> Iterator[pd.DataFrame]:
    """Yield what `combined` finds for a shipped model and what it was trained on, in three parts."""
    model = HookedKVTransformer.from_zoo(name).eval().requires_grad_(False)
    recipe = find_recipe(name)
    inputs = make_task(recipe.task, **recipe.task_settings).sample(n, torch.Generator().manual_seed(0)).inputs
    yield combined(model, *inputs.tensor_split(3, dim=1)).assign(model=name)


def pair_errors(new: Float[Tensor, " pair *rest"], old: Float[Tensor, " pair *rest"]) -> Float[Tensor, " pair"]:
    """||new - old|| / ||old|| of every pair, in float64."""
    return (new.double() - old.double()).flatten(1).norm(dim=1) / old.double().flatten(1).norm(dim=1)


def float64_logits(model: HookedKVTransformer, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_vocab"]:
    """The forward pass of a float32 model in float64.

    One block is widened at a time, and narrowed again without loss, so that no second copy of the weights is ever in memory.
    """
    dtype, model.cfg.dtype = model.cfg.dtype, torch.float64
    try:
        residual = model.embed(tokens).double()
        if model.cfg.positional_embedding_type == "standard":
            residual = residual + model.pos_embed(tokens).double()
        for part in [*model.blocks, model.ln_final, model.unembed]:
            residual = part.double()(residual)
            part.float()
    finally:
        model.cfg.dtype = dtype
    return residual


def summarize(errors: pd.DataFrame) -> pd.DataFrame:
    """Mean, smallest and largest relative error over pairs, and the paper's number for that size."""
    keys = ["size", "n_parameters", "measure", "accumulation"]
    grouped = errors.groupby(keys, sort=False)["relative_error"]
    summary = grouped.agg(n_pairs="size", relative_error="mean", least="min", largest="max").reset_index()
    is_printed = (summary["measure"] == CONVERSION) & (summary["accumulation"] == "float32")
    return summary.assign(printed=summary["size"].map(PRINTED).where(is_printed).astype(float))


def _measure(model: HookedKVTransformer, prompt: Tensor, text: Tensor) -> pd.DataFrame:
    """One row per pair, measure and accumulation."""
    exact = float64_logits(model, torch.cat([prompt, text], dim=1))[:, prompt.shape[1] :]
    parts = []
    for accumulation in ACCUMULATIONS:
        model.cfg.accumulation_dtype = accumulation
        converted, old = error_of_conversion(model, prompt, text)
        for measure, error in ((CONVERSION, converted), (FORWARD, pair_errors(old, exact))):
            parts.append(pd.DataFrame(dict(measure=measure, accumulation=accumulation, relative_error=error.numpy())))
    return pd.concat(parts, ignore_index=True)


def _table(summary: pd.DataFrame) -> pd.DataFrame:
    """One row per size; columns by (measure, accumulation)."""
    return summary.pivot_table(index="n_parameters", columns=["measure", "accumulation"], values="relative_error").sort_index()


def _describe(summary: pd.DataFrame) -> str:
    row = _table(summary).iloc[0]
    return f"conversion {row[CONVERSION, 'float32']:.2e}, the forward pass itself {row[FORWARD, 'float32']:.2e}"


# --- comparisons ---


def compare(summary: pd.DataFrame) -> Iterator[Comparison]:
    """Compare each size with table 1, all sizes with the forward pass's own error, and float64 sums against float32 ones."""
    table, printed = _table(summary), summary.dropna(subset="printed").sort_values("n_parameters")
    for _, row in printed.iterrows():
        own = float(table.loc[row["n_parameters"], (FORWARD, "float32")])
        what = f"relative error of the converted logits, {row['n_parameters']:,} parameters"
        claim = (
            "the conversion is exact, up to the rounding of float32 (two computations that each err as the forward pass does, "
            f"here by {own:.2g}, differ by no more than twice that)"
        )
        yield Comparison.at_most(what, claim, float(row["relative_error"]), 2 * own, paper=row["printed"])
    ratio = float((table[CONVERSION, "float32"] / table[FORWARD, "float32"]).max())
    what = "largest ratio, over all sizes, of the conversion's error to the float32 forward pass's own error"
    yield Comparison.at_most(what, "the conversion is exact up to rounding: the ratio is at most 2, at every size", ratio, 2)
    wide, shrinks = table[CONVERSION, "float64"], table[CONVERSION, "float64"] / table[CONVERSION, "float32"]
    what = "largest relative error, over all sizes, with the sums of linear attention in float64"
    claim = "the conversion is exact: the error is only rounding, and shrinks with it"
    yield Comparison.at_most(what, claim, float(shrinks.max()), 0.9, shown=float(wide.max()))


def compare_sizes(errors: pd.DataFrame) -> Iterator[Comparison]:
    """Sec. 8: how the error grows with the model, fitted for each number of a pair; nothing for a single size."""
    here = errors[(errors["measure"] == CONVERSION) & (errors["accumulation"] == "float32")]
    by_size = (
        here.pivot_table(index="n_parameters", columns="pair", values="relative_error").dropna(axis="columns").sort_index()
    )
    if len(by_size) < 2:
        return
    x = np.log10(by_size.index.to_numpy(dtype=float))  # sizes in ascending order, as a pivot table has them
    growth = 10 ** np.polyfit(x, np.log10(by_size.to_numpy()), 1)[0]
    what = "factor by which the conversion's error grows when the model has ten times the parameters"
    claim = "ten times the size doubles the rounding error (sec. 8)"
    yield Comparison.tested_on(what, claim, growth, 2.0, paper=2.0)


def compare_bias_sizes(sizes: Sequence[Settings], errors: pd.DataFrame) -> Iterator[Comparison]:
    """Sec. 1: the numbers of b_KV and b_D, d_head + 1 for each dimension of a layer, over those of the model.

    With MLPs of 4 d_model a layer has 12 d_model^2 weights, so the share is about one in 12 n_heads. The verdict is about all
    `HEADS` that divide the width: some within `ABOUT` and some outside leave it open.
    """
    counts = errors.groupby("size", sort=False)["n_parameters"].first()
    low, high = ABOUT
    for size in sizes:
        n, heads = int(counts[size["name"]]), [heads for heads in HEADS if size["d_model"] % heads == 0]
        shares = [size["n_layers"] * size["d_model"] * (size["d_model"] / h + 1) / n for h in heads]
        off = [max(low / share, share / high) for share in shares]
        what = f"numbers of the bias over the model's {n:,} parameters, with {', '.join(map(str, heads))} heads a layer"
        claim = f"the bias is about 1 % of the model (sec. 1): between {low:.1%} and {high:.0%}"
        middle = Evidence("margin", ((max(off) + min(off)) / 2, (max(off) - min(off)) / 2), 1.0, below=True)
        yield Comparison(what, claim, ", ".join(f"{share:.2%}" for share in shares), middle, paper=0.01)


def compare_combined(errors: pd.DataFrame) -> Iterator[Comparison]:
    """Sec. 1, combined freely: the biases of two prompts added, and the way out."""
    for (model, way), rows in errors.groupby(["model", "way"], sort=False):
        what = f"{model}: relative error of the logits behind two prompts, {way}"
        claim = (
            "added, the biases of two prompts are that of both" if way == ADDED else "read one behind the other, two prompts"
        )
        claim = f"{claim} (sec. 1): the error is below {NOTICEABLE:.0%}"
        yield Comparison.tested_on(what, claim, rows["relative_error"].to_numpy(), NOTICEABLE, below=True)


def _differences(summary: pd.DataFrame) -> Iterator[str]:
    yield (
        "Layers and widths are chosen to approximate the numbers of parameters in table 1; the feature map is elu + 1 "
        f"with RoPE after it, and the vocabulary has {D_VOCAB} tokens."
    )
    own = _table(summary)[FORWARD, "float32"]
    for _, row in summary.dropna(subset="printed").iterrows():
        if row["printed"] < own[row["n_parameters"]]:
            yield (
                f"At {row['size']} parameters the paper's number ({row['printed']:.1e}) is below the error of the float32 "
                f"forward pass itself, as measured on our model of that size ({own[row['n_parameters']]:.1e})."
            )
    missing = [size for size in PRINTED if size not in set(summary["size"])]
    if missing:
        yield f"Not measured at this scale: {', '.join(missing)}."
    counts = summary.groupby("size", sort=False)["n_pairs"].first()
    yield f"Pairs per size: {', '.join(f'{size} {count}' for size, count in counts.items())}."


# --- figure ---


def draw(summary: pd.DataFrame) -> Figure:
    """Relative error against the number of parameters: ours, that of the float32 forward pass, the paper's."""
    shown = summary[summary["accumulation"] == "float32"].rename(columns={"least": "low", "largest": "high"})
    printed = shown.dropna(subset="printed").assign(measure="paper (ICLCA table 1)", low=math.nan, high=math.nan)
    table = pd.concat([shown, printed.assign(relative_error=printed["printed"])], ignore_index=True)
    title = "Error of converted prompts, relative to the logits; lines: means, bands: all pairs"
    return draw_panels(table, "n_parameters", "relative_error", by="measure", title=title, log="xy")

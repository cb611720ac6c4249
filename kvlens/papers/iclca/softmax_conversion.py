"""``softmax-conversion``: cost and error of approximate conversions of a softmax prompt, by method and size (ICLCA 6.4).

    relative error = mean over tokens of ||new - old|| / ||old||      old: logits with the prompt in front      new: converted

on texts not used for fitting: separately sampled continuations of the prompt. The methods of
:func:`kvlens.convert_prompt` are compared with leaving the prompt out, the chosen keys without a fit, a sliding
window with attention sinks (the first and the last keys), and a copy of the model that was fine-tuned on the prompt
(:mod:`~kvlens.conversion.distillation`, all parameters). Every method is measured on the same contexts and texts.

An approximate bias may also be where fine-tuning starts from (sec. 8): the copy is fine-tuned once more with the bias attached,
and the steps are counted until its loss is as low as without a bias at the last step.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from kvlens.conversion import (
    ConversionMethod,
    Landmark,
    Learned,
    RandomProjections,
    TaylorPolynomial,
    convert_prompt,
    distill_prompt,
)
from kvlens.conversion.distillation import DistillationObjective
from kvlens.kv_bias import KVBias
from kvlens.model import HookedKVTransformer
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.iclca.logits import context_of, divergences, prompted_logits, relative_errors, sampled, writing_model

SINKS = 4
"""The number of keys at the start that a sliding window keeps."""
DROPPED, TOP, WINDOW, TAYLOR = "prompt left out", "chosen keys, no fit", "sliding window with sinks", "taylor features"
IID, ORTHOGONAL, LEARNED = "random features, iid", "random features, orthogonal", "learned features"
EQUAL, LOGITS = "landmark, equal budgets", "landmark, budgets by logits"
EQUAL_POLISHED, POLISHED = "landmark, equal and polished", "landmark, by logits and polished"
OBJECTIVES: tuple[DistillationObjective, ...] = ("pairs", "distributions")
DISTILLED = {objective: f"context distillation, {objective}" for objective in OBJECTIVES}
FROM = {"random features": "fine-tuning from random features", "keys": "fine-tuning from the fewest fitted keys"}
SMOOTHED = 10
"""The loss of a step counts as the mean over a tenth of all steps."""
SIZE = ["method", "keys_per_head", "n_continuations"]
"""The columns that identify a row of the table."""
PAPER_DROPPED, PAPER_RANDOM = 0.1656, 0.0917
"""ICLCA sec. 6.4: relative error of GPT-2's logits without the prompt, and converted with (Performer's) random features."""


class Way(NamedTuple):
    """One way to convert: its name, features per head, continuations that a fit reads, and the method; None for a baseline."""

    method: str
    size: int
    n_continuations: int
    conversion: ConversionMethod | None = None


@experiment(
    "ICLCA sec. 6.4, app. D.1",
    "How accurate are approximate conversions of a softmax prompt, by method and size?",
    cost=("seconds", "minutes on two cores", "an hour on two cores: 400 steps of polishing for each of 48 conversions"),
    model="facts-gpt2",
    tokenizer=None,
    first_context=0,
    n_contexts=(1, 8, 8),
    n_prompt=(8, 64, 128),
    n_text=(4, 32, 64),
    n_texts=(2, 8, 8),
    continuations=([9, 10], [24], [24, 96]),
    polish_steps=(2, 0, 400),
    polished_budgets=["equal", "logits"],
    keys=([4], [4, 8, 16, 32], [8, 16, 32]),
    random=([16], [64, 1024], [64, 4096]),
    taylor=True,
    learned=[64],
    distil_texts=(10, 96, 384),
    distil_steps=(2, 200, 800),
    distil_rates=([3e-4, 1e-3], [3e-4, 1e-3], [1e-3, 3e-3]),
)
def softmax_conversion(settings: Settings, tell: Tell) -> Reproduction:
    """Convert every context by every method, and measure."""
    model = writing_model(settings)
    rows: list[dict[str, object]] = []
    first, n_contexts = settings["first_context"], settings["n_contexts"]
    for context in range(first, first + n_contexts):
        prompt, texts = context_of(model, settings, seed=context)
        starts: dict[str, KVBias] = {}
        for way, bias in _biases(model, prompt, settings, seed=context):
            if way[:3] in (of_start := start_ways(settings)):
                starts[of_start[way[:3]]] = bias
            size = {"keys_per_head": way.size, "n_continuations": way.n_continuations}
            stored = 0 if way.method == DROPPED else bias.num_parameters
            measured = _measure(model, prompt, texts, bias)
            rows.append({"context": context, "method": way.method, **size, "stored_numbers": stored, **measured, **_cost(bias)})
        rows += [{"context": context, **row} for row in _distilled(model, prompt, texts, settings, context, starts)]
        tell(f"context {context + 1 - first} of {n_contexts}. {_progress(rows)}".strip(". "))
    contexts = pd.DataFrame(rows)
    table = contexts.groupby(SIZE, sort=False).mean(numeric_only=True).drop(columns="context").reset_index()
    return Reproduction(
        tables={"methods": table, "contexts": contexts},
        figure=lambda: draw(table),
        comparisons=[
            *compare(contexts, settings),
            *compare_with_distillation(contexts, settings),
            *compare_starts(contexts, settings),
        ],
        differences=[
            f"The paper converts prompts of GPT-2; here the model is {settings['model']}, and prompts and texts are its own "
            "samples.",
            "The paper compares its random features with no other method. Few keys with fitted weights and values are not in "
            "the paper: they follow Attention Matching (Zweiger et al. 2026, arXiv 2602.16284), with kvlens' own fit.",
        ],
    )


def _progress(rows: list[dict[str, object]]) -> str:
    """The last context's errors of the landmark methods, by keys per head."""
    last = [row for row in rows if row["context"] == rows[-1]["context"] and row["method"] in (LOGITS, POLISHED)]
    return ", ".join(f"{row['method']}, {row['keys_per_head']} keys: {row['relative_error']:.2%}" for row in last)


def ways(settings: Settings, seed: int) -> Iterator[Way]:
    """Yield every approximation; the polished ones, which read the most continuations, come last."""
    least, most = min(settings["continuations"]), max(settings["continuations"])

    def texts(n: int) -> dict[str, Any]:
        return dict(seed=seed, n_continuations=n, continuation_length=settings["n_text"], n_held_out=0)

    few = texts(least)
    kinds: dict[str, Literal["iid", "orthogonal"]] = {IID: "iid", ORTHOGONAL: "orthogonal"}
    for (name, kind), m in itertools.product(kinds.items(), settings["random"]):
        yield Way(name, m, least, RandomProjections(n_features=m, random_feature_kind=kind, **few))
    if settings["taylor"]:
        yield Way(TAYLOR, 0, least, TaylorPolynomial(**few))
    for m in settings["learned"]:
        yield Way(LEARNED, m, least, Learned(n_features=m, **few))
    for r in settings["keys"]:
        yield Way(TOP, r, least, Landmark(n_keys=r, budget="equal", fitted=False, **few))
        for n in settings["continuations"]:
            yield Way(EQUAL, r, n, Landmark(n_keys=r, budget="equal", key_steps=0, **texts(n)))
            yield Way(LOGITS, r, n, Landmark(n_keys=r, key_steps=0, **texts(n)))
        if settings["polish_steps"]:
            polished = dict(n_keys=r, key_steps=0, polish_steps=settings["polish_steps"], texts_per_step=16, **texts(most))
            for budget in settings["polished_budgets"]:
                yield Way(EQUAL_POLISHED if budget == "equal" else POLISHED, r, most, Landmark(budget=budget, **polished))


def _biases(model: HookedKVTransformer, prompt: Tensor, settings: Settings, seed: int) -> Iterator[tuple[Way, KVBias]]:
    exact = convert_prompt(model, prompt)
    yield Way(DROPPED, 0, 0), exact.zero_like()
    for r in settings["keys"]:
        yield Way(WINDOW, r, 0), _window(exact, r)
    for way in ways(settings, seed):
        assert way.conversion is not None
        yield way, convert_prompt(model, prompt, method=way.conversion, verbose=False)


def _cost(bias: KVBias) -> dict[str, float]:
    """The cost of the fit: seconds by step, and passes over the reference text in units of one pass over the prompt."""
    if bias.fit is None or bias.fit.history:
        return {}
    seconds = {f"{step}_seconds": bias.fit.seconds.get(step, 0.0) for step in ("reference", "fit", "polish")}
    heads = bias.fit.head_output_error
    assert heads is not None
    return {"head_output_error": float(heads.mean()), "reference_passes": bias.fit.passes, **seconds}


def _window(exact: KVBias, r: int) -> KVBias:
    """The first keys and the last ones, ``r`` in all."""
    n_keys, first = exact.d_phi, min(SINKS, r)
    kept = torch.cat([torch.arange(first), torch.arange(max(first, n_keys - (r - first)), n_keys)])
    return exact.map_layers(lambda layer: layer.of_attention(lambda keys: keys.some(kept)))


def start_ways(settings: Settings) -> dict[tuple[str, int, int], str]:
    """The ways whose biases fine-tuning starts from, as in `Way`, and the names of the rows."""
    least = min(settings["continuations"])
    return {
        (ORTHOGONAL, max(settings["random"]), least): FROM["random features"],
        (LOGITS, min(settings["keys"]), least): FROM["keys"],
    }


def _distilled(
    model: HookedKVTransformer, prompt: Tensor, texts: Tensor, settings: Settings, seed: int, starts: Mapping[str, KVBias]
) -> Iterator[dict[str, object]]:
    """Yield a row for each way to fine-tune a copy of the model on the prompt, with the continuations it reads and its cost.

    ``starts``: the biases by the names of the rows; their rows have ``steps_share``, of the steps that were needed.
    """
    n, steps = settings["distil_texts"], settings["distil_steps"]
    if not steps:
        return
    generator = torch.Generator().manual_seed(2_000 + seed)
    seen = sampled(model, prompt.expand(n, -1), settings["n_text"], generator)[:, len(prompt) :]
    bias, old = convert_prompt(model, prompt), prompted_logits(model, prompt, texts)
    asked = dict(rank=None, which=lambda name: True, steps=steps, learning_rates=settings["distil_rates"], seed=seed)
    runs: list[tuple[str, DistillationObjective, KVBias | None]] = [
        (DISTILLED[objective], objective, None) for objective in OBJECTIVES
    ]
    runs += [(name, "distributions", start) for name, start in starts.items()]
    target = math.inf
    for method, objective, start in runs:
        with nullcontext() if start is None else model.kv_bias(start):
            found = distill_prompt(model, bias, seen, objective=objective, **asked)
            with torch.no_grad(), found.weights.attached(model):
                figures = logit_errors(old, model(texts, attention_mask=torch.ones_like(texts)))
        if start is None and objective == "distributions":
            target = float(smoothed(found.losses)[-1])
        share = {} if start is None else {"steps_share": share_of_steps(found.losses, target)}
        stored = found.weights.num_parameters + (0 if start is None else start.num_parameters)
        size = {"method": method, "keys_per_head": 0, "n_continuations": n, "stored_numbers": stored}
        passes = found.passes + seen.numel() / len(prompt)
        cost = {"fit_seconds": found.seconds, "fit_steps": steps, "reference_passes": passes}
        yield {**size, **figures, **cost, **share}


def smoothed(losses: Float[Tensor, " step"]) -> Float[Tensor, " window"]:
    """The means over all runs of a tenth of the steps."""
    return losses.unfold(0, max(1, len(losses) // SMOOTHED), 1).mean(dim=1)


def share_of_steps(losses: Float[Tensor, " step"], target: float) -> float:
    """The share of the steps after which the smoothed loss is as low as ``target``; all of them if it never is."""
    means = smoothed(losses)
    reached = (means <= target).nonzero()
    return 1.0 if not len(reached) else (len(losses) - len(means) + 1 + int(reached[0])) / len(losses)


@torch.no_grad()
def _measure(model: HookedKVTransformer, prompt: Tensor, texts: Tensor, bias: KVBias) -> dict[str, float]:
    """Means over the tokens of the texts, which no fit has seen."""
    old = prompted_logits(model, prompt, texts)
    with model.kv_bias(bias):
        return logit_errors(old, model(texts, attention_mask=torch.ones_like(texts)))


def logit_errors(old: Tensor, new: Tensor) -> dict[str, float]:
    """Relative error, divergence and agreement of logits, means over the tokens of the texts."""
    old, new = old.double(), new.double()
    return {
        "relative_error": float(relative_errors(new, old).mean()),
        "kl": float(divergences(new, old).mean()),
        "argmax_agrees": float((old.argmax(dim=-1) == new.argmax(dim=-1)).double().mean()),
    }


def compare(contexts: pd.DataFrame, settings: Settings) -> Iterator[Comparison]:
    """The paper's numbers next to ours, and the gain of each step, tested over contexts."""
    error = contexts.set_index([*SIZE, "context"])["relative_error"].sort_index()
    dropped = error[DROPPED, 0, 0]
    least, most = min(settings["continuations"]), max(settings["continuations"])
    for kind, m in itertools.product((IID, ORTHOGONAL), settings["random"]):
        what = f"relative error with {m} {kind}, over that of the prompt left out"
        ours, gain = float((error[kind, m, least] / dropped).mean()), dropped - error[kind, m, least]
        claim, paper = "random features recover part of what the prompt does", PAPER_RANDOM / PAPER_DROPPED
        yield Comparison.tested_on(what, claim, gain.to_numpy(), ours=ours, paper=paper)
    nothing = (DROPPED, 0, 0)
    for r in settings["keys"]:
        top, equal, by_logits = (TOP, r, least), (EQUAL, r, least), (LOGITS, r, least)
        steps = [(top, nothing), ((WINDOW, r, 0), nothing), (equal, top), (by_logits, equal)]
        if most > least:
            steps.append(((LOGITS, r, most), by_logits))
        if settings["polish_steps"] and "logits" in settings["polished_budgets"]:
            steps.append(((POLISHED, r, most), (LOGITS, r, most)))
        for better, worse in steps:
            ratio = error[better] / error[worse]
            more = f" on {better[2]} continuations" if better[0] == worse[0] else ""
            what = f"relative error, {r} keys: {better[0]}{more}, over {worse[0]}"
            yield Comparison.tested_on(what, "the ratio is below 1", ratio.to_numpy(), 1.0, below=True)


def compare_with_distillation(contexts: pd.DataFrame, settings: Settings) -> Iterator[Comparison]:
    """The naive conversion against the fewest fitted keys, by the divergence, which distillation minimizes."""
    kl = contexts.set_index([*SIZE, "context"])["kl"].sort_index()
    r, least, n = min(settings["keys"]), min(settings["continuations"]), settings["distil_texts"]
    for method in DISTILLED.values() if settings["distil_steps"] else ():
        ratio = kl[LOGITS, r, least] / kl[method, 0, n]
        what = f"divergence of the next token: {LOGITS}, {r} keys, over {method}"
        claim = "a few fitted keys come closer to the prompt than new weights do (a ratio below 1)"
        yield Comparison.tested_on(what, claim, ratio.to_numpy(), 1.0, below=True)


def compare_starts(contexts: pd.DataFrame, settings: Settings) -> Iterator[Comparison]:
    """Fine-tuning with an approximate bias attached from the first step on, against without."""
    for name in FROM.values() if settings["distil_steps"] else ():
        share = contexts[contexts["method"] == name].sort_values("context")["steps_share"]
        what = f"steps to the loss at which fine-tuning without a bias ends, over all steps, {name}"
        yield Comparison.tested_on(what, "it takes fewer steps than without a bias (sec. 8)", share.to_numpy(), 1.0, below=True)


def draw(table: pd.DataFrame) -> Figure:
    """Relative error against stored numbers, both logarithmic."""
    shown, lines = table[table["method"] != DROPPED], {DROPPED: float(table.set_index("method").loc[DROPPED, "relative_error"])}
    more = shown["n_continuations"].map(", {} continuations".format).where(shown["method"].isin((EQUAL, LOGITS)), "")
    title = "Size and error of converted softmax prompts, on text not used for fitting"
    shown = shown.assign(method=shown["method"] + more)
    return draw_panels(shown, "stored_numbers", "relative_error", by="method", title=title, lines=lines, log="xy")

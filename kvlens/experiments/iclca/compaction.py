"""``compaction``: a softmax prompt in few keys, by the published methods and kvlens', compared by their effect on the model.

The methods of :data:`kvlens.conversion.METHODS` that keep keys are compared on the same contexts, texts and numbers of keys.
Prompts, and the texts that follow them, are sampled from the model; no method has read the texts it is measured on. The logits
at every token of the texts are compared with the prompt in context (old), converted (new) and omitted except BOS (without):

    relative error = mean of |new - old| / |old|         effect lost = rms |new - old| / rms |without - old|

The divergence of the next token, KL(old || new), is given as mean, median and 95th percentile. *Same continuation* is the share
of greedily generated tokens that equal those after the prompt itself. *Facts kept* counts, with ``facts_model``, the answers
about stories that stay correct (:mod:`~kvlens.experiments.iclca.facts_recall`).

Sources of the methods: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453), H2O (Zhang et al. 2023, 2306.14048), SnapKV (Li et
al. 2024, 2404.14469), Expected Attention (Devoto et al. 2025, 2510.00636), KVzip (Kim et al. 2025, 2505.23416), Attention
Matching (Zweiger et al. 2026, 2602.16284); "landmark" is kvlens'.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvlens import zoo
from kvlens.conversion import (
    H2O,
    AttentionMatching,
    ConversionMethod,
    ExpectedAttention,
    KVzip,
    Landmark,
    SnapKV,
    StreamingLLM,
    convert_prompt,
)
from kvlens.experiments.iclca.context_distillation import prompted_logits
from kvlens.experiments.iclca.facts_recall import Way, measure, share_kept, stories_for
from kvlens.experiments.iclca.softmax_conversion import context_of, writing_model
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome
from kvlens.experiments.shared.significance import SIGNIFICANCE
from kvlens.kv_bias import KVBias
from kvlens.model import HookedKVTransformer

OURS = "landmark, greedy budgets"
METHODS: dict[str, tuple[type[ConversionMethod], dict[str, Any]]] = {
    "StreamingLLM": (StreamingLLM, {}),
    "Expected Attention": (ExpectedAttention, {}),
    "SnapKV": (SnapKV, {}),
    "H2O": (H2O, {}),
    "KVzip": (KVzip, {}),
    "Attention Matching, attention": (AttentionMatching, dict(keys="attention")),
    "Attention Matching, pursuit": (AttentionMatching, dict(keys="pursuit")),
    "Attention Matching, on policy": (AttentionMatching, dict(keys="pursuit", on_policy=True)),
    "Attention Matching, greedy budgets": (AttentionMatching, dict(keys="pursuit", budget="greedy")),
    "landmark, equal budgets": (Landmark, {}),
    OURS: (Landmark, dict(budget="greedy")),
}
SIZE = ["method", "keys_per_head"]
"""The columns that identify a row of the table."""


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Convert every context by every method, and measure."""
    model = writing_model(settings)
    rows: list[dict[str, Any]] = []
    for context in range(settings["n_contexts"]):
        rows += measured(model, settings, context)
        tell(f"{context + 1} of {settings['n_contexts']} contexts")
    contexts = pd.DataFrame(rows)
    tables = {"methods": summary(contexts), "contexts": contexts}
    if settings["facts_model"] is not None:
        tables["facts"] = facts(settings, tell)
    return Outcome(
        tables=tables,
        figure=draw(tables["methods"], settings["model"], settings["n_contexts"]),
        comparisons=[*compare(contexts), *compare_facts(tables.get("facts"))],
        differences=[
            f"The papers compress the caches of large models and score answers; here {settings['model']} continues its own "
            "texts, and logits are compared.",
            "H2O evicts keys while it reads, and KVzip instructs the model to repeat the context; here H2O ranks keys by the "
            "attention of the whole prompt, and KVzip reads the prompt once more.",
            "Attention Matching's weights are exact non-negative least squares; its greedy budgets are kvlens' (the authors "
            "measure budgets once per model).",
        ],
    )


def methods(keys: int, settings: Mapping[str, Any], seed: int) -> Iterator[tuple[str, ConversionMethod]]:
    """Every method, with ``keys`` keys per head."""
    texts = dict(seed=seed, n_held_out=0, n_continuations=settings["n_continuations"], continuation_length=settings["n_text"])
    for name, (kind, options) in METHODS.items():
        yield name, kind(n_keys=keys, **options, **texts)  # type: ignore[call-arg]


@torch.no_grad()
def measured(model: HookedKVTransformer, settings: Mapping[str, Any], context: int) -> Iterator[dict[str, Any]]:
    """One row per method and number of keys."""
    prompt, texts = context_of(model, settings, seed=context)
    exact = convert_prompt(model, prompt)
    bos = convert_prompt(model, prompt[:1])._made(None, position_offset=exact.position_offset)
    old, without = prompted_logits(model, prompt, texts).double(), _logits(model, _moved(bos, len(prompt) - 1), texts)
    said = _continuation(model, exact, texts, settings["n_generated"])
    yield {"context": context, "method": "prompt left out", "keys_per_head": 0, **_errors(old, without, without)}
    for keys in settings["keys"]:
        for name, method in methods(keys, settings, seed=context):
            bias = convert_prompt(model, prompt, method=method, verbose=False)
            assert bias.fit is not None
            yield {
                "context": context,
                "method": name,
                "keys_per_head": keys,
                "stored_numbers": bias.num_parameters,
                **_errors(old, _logits(model, bias, texts), without),
                "same_continuation": float(
                    (_continuation(model, bias, texts, settings["n_generated"]) == said).double().mean()
                ),
                "reference_passes": bias.fit.reference_passes,
                "seconds": sum(bias.fit.seconds.values()),
            }


def _moved(bias: KVBias, further: int) -> KVBias:
    """The BOS at the same distance from the text as with the prompt in between."""
    return bias._made(None, features=bias.features.further(further))  # type: ignore[union-attr]


def _logits(model: HookedKVTransformer, bias: KVBias, texts: Tensor) -> Tensor:
    with model.kv_bias(bias):
        return model(texts, attention_mask=torch.ones_like(texts)).double()


def _continuation(model: HookedKVTransformer, bias: KVBias, texts: Tensor, n: int) -> Tensor:
    """Greedily generated tokens after the first token of each text."""
    with model.kv_bias(bias):
        return model.generate(texts[:, :1], max_new_tokens=n, do_sample=False, stop_at_eos=False, verbose=False)[:, 1:]


def _errors(old: Tensor, new: Tensor, without: Tensor) -> dict[str, float]:
    log_old, log_new = old.log_softmax(dim=-1), new.log_softmax(dim=-1)
    kl = (log_old.exp() * (log_old - log_new)).sum(dim=-1).flatten()
    off = (new - old).norm(dim=-1)
    return {
        "relative_error": float((off / old.norm(dim=-1)).mean()),
        "largest_relative_error": float((off / old.norm(dim=-1)).max()),
        "effect_lost": float((off.square().mean() / (without - old).norm(dim=-1).square().mean()).sqrt()),
        "kl": float(kl.mean()),
        "kl_median": float(kl.median()),
        "kl_95": float(kl.quantile(0.95)),
    }


def facts(settings: Mapping[str, Any], tell: Callable[[str], None]) -> pd.DataFrame:
    """Answers kept by each method at ``facts_ratio`` of a story's keys."""
    model = HookedKVTransformer.load(zoo.folder_of(settings["facts_model"])).eval().requires_grad_(False)
    ratio, texts = settings["facts_ratio"], dict(seed=0, n_held_out=0, **settings["facts_reference"])
    ways = [(Way(name, ratio), kind(ratio=ratio, **options, **texts)) for name, (kind, options) in METHODS.items()]  # type: ignore[call-arg]
    stories = stories_for(model, {"n_facts": 4, "seed": 0, "n_stories": settings["n_stories"]})
    parts = []
    for start in range(0, len(stories), 32):
        parts.append(measure(model, stories[start : start + 32], ways, first_story=start))
        tell(f"facts: {min(start + 32, len(stories))} of {len(stories)} stories")
    return share_kept(pd.concat(parts, ignore_index=True)).rename(columns={"way": "method"})


def summary(contexts: pd.DataFrame) -> pd.DataFrame:
    """Means over contexts, and half the width of the 95 % interval of the relative error."""
    groups = contexts.groupby(SIZE, sort=False)
    table = groups.mean(numeric_only=True).drop(columns="context")
    spread = 1.96 * groups["relative_error"].std() / groups.size() ** 0.5
    return table.assign(relative_error_interval=spread).reset_index()


def compare(contexts: pd.DataFrame) -> Iterator[Comparison]:
    """kvlens' closed form compared with every other method, tested over contexts."""
    error = contexts.set_index([*SIZE, "context"])["relative_error"].sort_index()
    for keys in contexts.loc[contexts["keys_per_head"] > 0, "keys_per_head"].unique():
        for other in METHODS:
            if other == OURS:
                continue
            ratio = error[OURS, keys] / error[other, keys]
            yield Comparison(
                f"relative error, {keys} keys: {OURS}, over {other}",
                None,
                float(ratio.mean()),
                "the ratio is below 1",
                SIGNIFICANCE.above(-np.log(ratio.to_numpy())),  # symmetric where the two methods are equally good
            )


def compare_facts(table: pd.DataFrame | None) -> Iterator[Comparison]:
    """The share of correct answers that each method keeps, without verdicts."""
    for row in () if table is None else table.itertuples():
        if row.method in METHODS:
            what = f"right answers kept, {row.method} ({row.n_kept:,} of {row.n_answers:,})"
            yield Comparison.stated(what, None, float(row.share_kept), "answers about the story stay right")


def draw(table: pd.DataFrame, model: str, n_contexts: int) -> Figure:
    """Plot relative error against keys per head, a line for each method, with 95 % intervals over contexts."""
    figure = Figure(figsize=(8.4, 4.8), layout="constrained")
    axes = figure.subplots()
    dropped = float(table.loc[table["keys_per_head"] == 0, "relative_error"].iloc[0])
    axes.axhline(dropped, color="#555555", linestyle=":", linewidth=1.4, label="prompt left out")
    colors = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2")  # Okabe and Ito
    families = list(dict.fromkeys(name.partition(",")[0] for name in METHODS))
    seen: dict[str, int] = {}
    for name in METHODS:
        rows, family = table[table["method"] == name], name.partition(",")[0]
        style = seen.setdefault(family, 0)
        seen[family] += 1
        axes.errorbar(
            rows["keys_per_head"],
            rows["relative_error"],
            rows["relative_error_interval"],
            color=colors[families.index(family) % len(colors)],
            marker="osD^"[style],
            linestyle=("-", "--", "-.", ":")[style],
            capsize=2,
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="keys per key-value head", ylabel="relative error of the logits")
    ticks = sorted(set(table["keys_per_head"]) - {0})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_title(
        f"Prompts of {model} in few keys: mean and 95 % interval over {n_contexts} contexts", loc="left", fontsize=11
    )
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _scale(**changes: Any) -> dict[str, Any]:
    sizes = dict(n_contexts=8, n_prompt=64, n_text=32, n_texts=8, n_continuations=24, n_generated=32, keys=[4, 8, 16])
    asked = dict(facts_model="facts-gpt2", facts_ratio=0.25, n_stories=64)
    asked |= dict(facts_reference=dict(n_continuations=24, continuation_length=48))
    return {"model": "docs-gpt2", "tokenizer": None, **sizes, **asked, **changes}


EXPERIMENT = Experiment(
    name="compaction",
    source="ICLCA sec. 6.4, with methods of KV-cache compression",
    question="How well can a few keys replace a softmax prompt, by each published method?",
    run=run,
    scales={
        "tiny": _scale(model="facts-gpt2", n_prompt=10, n_text=4, n_texts=2, n_contexts=1, keys=[3], n_generated=3)
        | dict(n_continuations=9, n_stories=2, facts_reference=dict(n_continuations=4, continuation_length=6)),
        "small": _scale(),
        "paper": _scale(n_prompt=128, n_text=64, n_generated=64, keys=[8, 16, 32], n_stories=112),
    },
    cost={"tiny": "seconds", "small": "minutes on two cores", "paper": "about half an hour on two cores"},
)

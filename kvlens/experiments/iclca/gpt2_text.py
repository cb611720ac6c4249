"""``gpt2-text``: what a softmax model writes with a prompt, without it, and converted (ICLCA 6.4, tables 3 to 5).

    relative error = mean over places of ||new - old|| / ||old||      old: logits with the prompt in front

The places are those of the text and of what the prompted model goes on to write. The paper's logits are GPT-2's own. A constant
that all logits of a place share changes no prediction, but weighs in ||old||; so the error is also given for *centered* logits,
less their mean over the vocabulary. Weights are taken as they stand in the folder, without TransformerLens' processing, which
would change that constant.

GPT-2's weights do not come with kvlens: ``kvlens reproduce gpt2-text --model FOLDER`` reads them from a folder in the format
of Hugging Face. Without ``--model`` a shipped model stands in. The prompts are of the model's own kind of text: facts, stories
for llama2.c checkpoints, help pages for shipped models; ``--set texts=facts`` chooses.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from kvlens import zoo
from kvlens.conversion import Landmark, RandomProjections, convert_prompt
from kvlens.errors import KVLensError, nearest
from kvlens.experiments.iclca.prompt_pairs import PAIRS, Pair
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome
from kvlens.experiments.shared.significance import SIGNIFICANCE
from kvlens.kv_bias import KVBias
from kvlens.model import HookedKVTransformer, load_source

WITH, WITHOUT, EXACT, LANDMARK, RANDOM = (
    *("with the prompt", "without", "converted, all keys"),
    *("converted, landmark keys", "converted, random features"),
)
PAPER_WITHOUT, PAPER_CONVERTED = 0.1656, 0.0917
"""ICLCA sec. 6.4: relative error of GPT-2's logits without the prompt, and converted (with Performer's random features)."""
ROUNDING = 1e-4
"""What float32 may leave of an exact conversion; random tiny models and trained ones stay below a tenth of it."""
UNPROCESSED = dict(fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False)


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Read every pair in every way."""
    source = zoo.source_of(settings["model"])
    kind = settings["texts"] or (
        "help pages"
        if settings["model"] in zoo.names()
        else "stories"
        if isinstance(source, Path) and source.is_file()
        else "facts"
    )
    if kind not in PAIRS:
        raise KVLensError(f"gpt2-text: texts must be one of {', '.join(PAIRS)}, got {kind!r}{nearest(kind, PAIRS)}")
    model = load_source(source, tokenizer=settings["tokenizer"], device="cpu", **UNPROCESSED)
    model.eval().requires_grad_(False)
    _check(model)
    pairs = PAIRS[kind][: settings["n_pairs"]]
    rows: list[dict[str, Any]] = []
    for number, pair in enumerate(pairs):
        rows += [{"pair": number, "prompt": pair.prompt, "text": pair.text, **row} for row in read(model, pair, settings)]
        tell(f"pair {number + 1} of {len(pairs)}: {pair.prompt.splitlines()[0]}")
    texts = pd.DataFrame(rows)
    table = texts.groupby("way", sort=False).mean(numeric_only=True).drop(columns="pair").reset_index()
    return Outcome(
        tables={"ways": table, "texts": texts},
        figure=draw(texts),
        comparisons=[*compare(texts)],
        differences=[*_differences(model, settings["model"], kind)],
    )


def _check(model: HookedKVTransformer) -> None:
    if model.cfg.attention != "softmax":
        raise KVLensError("gpt2-text: this model's attention is linear, where the conversion is exact; give a softmax model")
    if model.tokenizer is None:
        raise KVLensError("gpt2-text: this model has no tokenizer, so it can neither read the prompts nor write text")


def read(model: HookedKVTransformer, pair: Pair, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each way: what is written, and how far its logits are from those with the prompt.

    The converted model reads the text without a BOS, as the prompt had one; the model without the prompt gets its own.
    """
    bos = model.prepends_bos
    prompt = model.to_tokens(pair.prompt, prepend_bos=bos, truncate=False)[0]
    text = model.to_tokens(pair.text, prepend_bos=False, truncate=False)[0]
    n = settings["n_new"]
    written = generated(model, torch.cat([prompt, text]), n)
    read_on = torch.cat([text, written])
    old = _last_logits(model, torch.cat([prompt, read_on]), len(read_on))
    yield _row(model, WITH, written, written, old, old)
    alone = torch.cat([prompt[: int(bos)], text])
    new = _last_logits(model, torch.cat([alone, written]), len(read_on))
    yield _row(model, WITHOUT, generated(model, alone, n), written, new, old)
    for way, bias in biases(model, prompt, settings):
        with model.kv_bias(bias):
            yield _row(model, way, generated(model, text, n), written, _last_logits(model, read_on, len(read_on)), old)


def biases(
    model: HookedKVTransformer, prompt: Int[Tensor, " pos"], settings: Mapping[str, Any]
) -> Iterator[tuple[str, KVBias]]:
    """The prompt converted: exactly, with a share of its keys, and with random features as in the paper."""
    yield EXACT, convert_prompt(model, prompt)
    fit = {**settings["reference"], "seed": settings["seed"], "n_held_out": 0}
    for name, method in (
        (LANDMARK, Landmark(ratio=settings["ratio"], **fit)),
        (RANDOM, RandomProjections(n_features=settings["random"], **fit)),
    ):
        yield name, convert_prompt(model, prompt, method=method, verbose=False)


def generated(model: HookedKVTransformer, tokens: Int[Tensor, " pos"], n: int) -> Int[Tensor, " new"]:
    """What the model writes next, greedily."""
    end = model.tokenizer.eos_token_id is not None
    whole = model.generate(
        tokens[None], max_new_tokens=n, do_sample=False, stop_at_eos=end, return_type="tokens", verbose=False
    )
    return whole[0, len(tokens) :].clone()


@torch.no_grad()
def _last_logits(model: HookedKVTransformer, tokens: Int[Tensor, " pos"], n: int) -> Float[Tensor, "place vocab"]:
    return model(tokens[None], attention_mask=torch.ones_like(tokens[None]))[0, -n:].double()


def _row(model: HookedKVTransformer, way: str, new_text: Tensor, old_text: Tensor, new: Tensor, old: Tensor) -> dict[str, Any]:
    same = min(len(new_text), len(old_text))
    differ = (new_text[:same] != old_text[:same]).nonzero()
    return {
        "way": way,
        "generated": model.tokenizer.decode(new_text.tolist()),
        "relative_error": relative_error(new, old),
        "relative_error_centered": relative_error(new - new.mean(-1, keepdim=True), old - old.mean(-1, keepdim=True)),
        "next_token_agrees": float((new.argmax(-1) == old.argmax(-1)).double().mean()),
        "tokens_alike": int(differ[0]) if len(differ) else same,
    }


def relative_error(new: Float[Tensor, "place vocab"], old: Float[Tensor, "place vocab"]) -> float:
    """||new - old|| / ||old||, the mean over places."""
    return float(((new - old).norm(dim=-1) / old.norm(dim=-1)).mean())


def compare(texts: pd.DataFrame) -> Iterator[Comparison]:
    """The paper's two errors next to ours, and what each way keeps, tested pair by pair."""
    error, centered, agrees = (
        texts.pivot_table(index="pair", columns="way", values=column)
        for column in ("relative_error", "relative_error_centered", "next_token_agrees")
    )
    name = "relative error of the logits"
    claim = "without the prompt the logits are off"
    yield Comparison.stated(f"{name} without the prompt", PAPER_WITHOUT, float(error[WITHOUT].mean()), claim)
    yield Comparison(
        f"{name}, {RANDOM}",
        PAPER_CONVERTED,
        float(error[RANDOM].mean()),
        "converted they are nearer to those with the prompt than without",
        SIGNIFICANCE.above((error[WITHOUT] - error[RANDOM]).to_numpy()),
    )
    yield Comparison(
        f"{name}, {LANDMARK}",
        None,
        float(error[LANDMARK].mean()),
        "fitted keys come nearer than random features",
        SIGNIFICANCE.above((error[RANDOM] - error[LANDMARK]).to_numpy()),
    )
    worst = float(error[EXACT].max())
    yield Comparison(f"{name}, {EXACT}, the largest", None, worst, f"rounding, at most {ROUNDING:g}", worst <= ROUNDING)
    for way in (WITHOUT, RANDOM, LANDMARK):
        ours = float(centered[way].mean())
        yield Comparison.stated(f"{name} less their mean, {way}", None, ours, "the part that changes predictions")
    for way in (RANDOM, LANDMARK):
        yield Comparison(
            f"share of next tokens as with the prompt, {way} (without: {agrees[WITHOUT].mean():.3f})",
            None,
            float(agrees[way].mean()),
            "converted the model predicts more of them than without",
            SIGNIFICANCE.above((agrees[way] - agrees[WITHOUT]).to_numpy()),
        )


def _differences(model: HookedKVTransformer, name: str, kind: str) -> Iterator[str]:
    yield (
        f"The paper's model is GPT-2 with 124 million parameters; this one is {name}, with "
        f"{sum(p.numel() for p in model.parameters()):,}. `--model FOLDER` reads a local GPT-2."
    )
    if kind != "facts":
        yield f"The paper's prompts are facts about people and places; these are {kind}."
    else:
        yield "Three of the prompts are the paper's; the others are of the same kind, so that a verdict is possible."
    yield "The paper does not say on which tokens it measures, how it generates, or with how many features; here: see settings."


def draw(texts: pd.DataFrame) -> Figure:
    """Every pair's error by way, and the paper's two figures."""
    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    axes = figure.subplots()
    ways = [WITHOUT, RANDOM, LANDMARK]
    for place, way in enumerate(ways):
        error = texts.loc[texts["way"] == way, "relative_error"]
        axes.plot([place] * len(error), error, "o", color="#2763a5", alpha=0.45, markersize=6, markeredgewidth=0)
        axes.plot([place - 0.2, place + 0.2], [error.mean()] * 2, color="#14385e", linewidth=2.4)
    for value, words in ((PAPER_WITHOUT, "GPT-2 without, as printed"), (PAPER_CONVERTED, "GPT-2 converted, as printed")):
        axes.axhline(value, color="#777777", linestyle=":", linewidth=1.2)
        axes.annotate(words, (len(ways) - 0.5, value), fontsize=8, color="#555555", ha="right", va="bottom")
    axes.set(yscale="log", ylabel="relative error of the logits", xlim=(-0.5, len(ways) - 0.5))
    axes.set_xticks(range(len(ways)), ways)
    axes.set_title("Logits against those with the prompt; a dot a prompt, a bar the mean", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _scale(**changes: Any) -> dict[str, Any]:
    common = dict(model="docs-gpt2", tokenizer=None, texts=None, n_pairs=12, n_new=40, ratio=0.5, random=256, seed=0)
    return {**common, "reference": dict(n_continuations=24, continuation_length=48), **changes}


EXPERIMENT = Experiment(
    name="gpt2-text",
    source="ICLCA sec. 6.4, tables 3 to 5",
    question="What does a softmax model write with a prompt, without it, and with the prompt converted?",
    run=run,
    scales={
        "tiny": _scale(n_pairs=2, n_new=4, random=16, reference=dict(n_continuations=9, continuation_length=8)),
        "small": _scale(),
        "paper": _scale(random=4096, reference=dict(n_continuations=96, continuation_length=64)),
    },
    cost={
        "tiny": "seconds",
        "small": "a minute on one core; with GPT-2 (--model FOLDER) about half an hour",
        "paper": "minutes on two cores; more reference text and features",
    },
)

"""``softmax-conversion``: what an approximate conversion of a softmax prompt costs and keeps, by method and size (ICLCA 6.4).

    relative error = mean over tokens of ||new - old|| / ||old||      old: logits with the prompt in front      new: converted

on texts that no fit has seen: the model's own continuations of the prompt, apart from those that the fits read. Beside the
methods of :func:`kvlens.convert_prompt` stand the prompt left out, the most attended keys without a fit, and a sliding window
with attention sinks (the first keys and the last ones). Every method is measured on the same contexts and texts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from matplotlib.figure import Figure
from torch import Tensor

from kvlens.conversion import convert_prompt
from kvlens.experiments.shared.judge import JUDGE
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome
from kvlens.kv_bias import KVBias, VirtualKeys
from kvlens.model import HookedKVTransformer

SINKS = 4
"""Keys at the start that a sliding window keeps."""
DROPPED, TOP, WINDOW, RANDOM, EQUAL, GREEDY, POLISHED = (
    *("prompt left out", "most attended keys, no fit", "sliding window with sinks", "random features"),
    *("landmark, equal budgets", "landmark, greedy budgets", "landmark, greedy and polished"),
)
PAPER_DROPPED, PAPER_RANDOM = 0.1656, 0.0917
"""ICLCA sec. 6.4: relative error of GPT-2's logits without the prompt, and converted with random features."""


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Convert every context by every method, and measure."""
    model = HookedKVTransformer.from_zoo(settings["model"], device="cpu").requires_grad_(False)
    rows: list[dict[str, Any]] = []
    for context in range(settings["n_contexts"]):
        prompt, texts = _context(model, settings, seed=context)
        for method, r, bias, seconds in _biases(model, prompt, settings, seed=context):
            measured = _measure(model, prompt, texts, bias)
            fit = {} if bias.fit is None else {"output_error": float(bias.fit.output_error.mean())}
            size = dict(keys_per_head=r, stored_numbers=0 if r == 0 else bias.num_parameters, seconds=seconds)
            rows.append({"context": context, "method": method, **size, **measured, **fit})
        tell(f"context {context + 1} of {settings['n_contexts']}")
    contexts = pd.DataFrame(rows)
    table = contexts.groupby(["method", "keys_per_head"], sort=False).mean(numeric_only=True).drop(columns="context")
    table = table.reset_index()
    return Outcome(
        tables={"methods": table, "contexts": contexts},
        figure=draw(table),
        comparisons=[*compare(contexts, settings)],
        differences=[
            f"The paper converts prompts of GPT-2; here the model is {settings['model']}, which ships, and prompts and texts "
            "are its own samples.",
            "The paper's random features are compared with no other method; the landmark keys are kvlens'.",
        ],
    )


def _context(model: HookedKVTransformer, settings: Mapping[str, Any], seed: int) -> tuple[Tensor, Tensor]:
    """A prompt [pos] that the model wrote from its BOS, and texts [text, pos] that it might go on with."""
    generator = torch.Generator().manual_seed(1_000 + seed)
    bos = torch.tensor([[model.tokenizer.bos_token_id]])
    prompt = _sampled(model, bos, settings["n_prompt"] - 1, generator)
    texts = _sampled(model, prompt.expand(settings["n_texts"], -1), settings["n_text"], generator)
    return prompt[0], texts[:, prompt.shape[1] :]


@torch.no_grad()
def _sampled(model: HookedKVTransformer, tokens: Tensor, n: int, generator: torch.Generator) -> Int[Tensor, "text pos"]:
    for _ in range(n):
        p = model(tokens, attention_mask=torch.ones_like(tokens))[:, -1].softmax(dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator)], dim=1)
    return tokens


def _biases(
    model: HookedKVTransformer, prompt: Tensor, settings: Mapping[str, Any], seed: int
) -> Iterator[tuple[str, int, KVBias, float]]:
    """(method, keys per head, bias, seconds of its fit) of every method and size."""
    exact = convert_prompt(model, prompt)
    yield DROPPED, 0, exact.zero_like(), 0.0
    at: dict[str, Any] = dict(seed=seed, n_continuations=settings["n_continuations"], verbose=False)
    at["continuation_length"] = settings["n_text"]
    for m in settings["random"]:
        yield RANDOM, m, *_timed(model, prompt, method="random", n_features=m, **at)
    for r in settings["keys"]:
        landmark = dict(method="landmark", n_features=r, **at)
        yield TOP, r, *_timed(model, prompt, keys="mass", fit=False, **landmark)
        yield WINDOW, r, _window(exact, r), 0.0
        yield EQUAL, r, *_timed(model, prompt, **landmark)
        yield GREEDY, r, *_timed(model, prompt, budget="greedy", **landmark)
        if settings["polish_steps"]:
            polished = dict(budget="greedy", polish_steps=settings["polish_steps"])
            yield POLISHED, r, *_timed(model, prompt, **polished, **landmark)


def _timed(model: HookedKVTransformer, prompt: Tensor, **options: Any) -> tuple[KVBias, float]:
    bias = convert_prompt(model, prompt, **options)
    return bias, 0.0 if bias.fit is None else sum(bias.fit.seconds.values())


def _window(exact: KVBias, r: int) -> KVBias:
    """The first keys and the last ones, ``r`` in all."""
    assert isinstance(exact.features, VirtualKeys)
    n_keys, first = exact.d_phi, min(SINKS, r)
    kept = torch.cat([torch.arange(first), torch.arange(max(first, n_keys - (r - first)), n_keys)])
    features = VirtualKeys(exact.features.keys[..., kept, :], exact.features.distance[..., kept])
    return replace(exact, b_KV=exact.b_KV[..., kept, :], b_D=exact.b_D[..., kept], features=features)


@torch.no_grad()
def _measure(model: HookedKVTransformer, prompt: Tensor, texts: Tensor, bias: KVBias) -> dict[str, float]:
    """Means over the tokens of the texts, which no fit has seen."""
    whole = torch.cat([prompt.expand(len(texts), -1), texts], dim=1)
    old = model(whole, attention_mask=torch.ones_like(whole))[:, len(prompt) :].double()
    with model.kv_bias(bias):
        new = model(texts, attention_mask=torch.ones_like(texts)).double()
    log_old, log_new = old.log_softmax(dim=-1), new.log_softmax(dim=-1)
    return {
        "relative_error": float(((new - old).norm(dim=-1) / old.norm(dim=-1)).mean()),
        "kl": float((log_old.exp() * (log_old - log_new)).sum(dim=-1).mean()),
        "argmax_agrees": float((old.argmax(dim=-1) == new.argmax(dim=-1)).double().mean()),
    }


def compare(contexts: pd.DataFrame, settings: Mapping[str, Any]) -> Iterator[Comparison]:
    """The paper's figures beside ours, and what each step buys, judged over contexts."""
    error = contexts.set_index(["method", "keys_per_head", "context"])["relative_error"].sort_index()
    dropped = error[DROPPED, 0]
    for m in settings["random"]:
        yield Comparison(
            f"relative error with {m} random features, over that of the prompt left out",
            PAPER_RANDOM / PAPER_DROPPED,
            float((error[RANDOM, m] / dropped).mean()),
            "random features recover part of what the prompt does",
            JUDGE.above((dropped - error[RANDOM, m]).to_numpy()),
        )
    for r in settings["keys"]:
        steps = [(TOP, DROPPED), (WINDOW, DROPPED), (EQUAL, TOP), (GREEDY, EQUAL)] + [(POLISHED, GREEDY)] * bool(
            settings["polish_steps"]
        )
        for better, worse in steps:
            before = dropped if worse == DROPPED else error[worse, r]
            ratio = error[better, r] / before
            yield Comparison(
                f"relative error, {r} keys: {better}, over {worse}",
                None,
                float(ratio.mean()),
                "the ratio is below 1",
                JUDGE.above((1 - ratio).to_numpy()),
            )


def draw(table: pd.DataFrame) -> Figure:
    """Relative error against stored numbers, both logarithmic."""
    figure = Figure(figsize=(7.6, 4.8), layout="constrained")
    axes = figure.subplots()
    dropped = float(table.loc[table["method"] == DROPPED, "relative_error"].iloc[0])
    axes.axhline(dropped, color="#555555", linestyle=":", linewidth=1.4, label=DROPPED)
    for method, rows in table[table["method"] != DROPPED].groupby("method", sort=False):
        axes.plot(rows["stored_numbers"], rows["relative_error"], marker="o", linewidth=1.8, label=method)
    axes.set(xscale="log", yscale="log", xlabel="stored numbers", ylabel="relative error of the logits")
    axes.set_title("What a softmax prompt costs to store, on text that no fit has seen", loc="left", fontsize=11)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    return figure


def _scale(**changes: Any) -> dict[str, Any]:
    common = dict(model="facts-gpt2", n_prompt=64, n_text=32, n_texts=4, n_continuations=24)
    return {**common, "n_contexts": 8, "keys": [4, 8, 16, 32], "random": [64, 1024], "polish_steps": 0, **changes}


EXPERIMENT = Experiment(
    name="softmax-conversion",
    source="ICLCA sec. 6.4, app. D.1",
    question="How far is an approximate conversion of a softmax prompt from the prompt, by method and size?",
    run=run,
    scales={
        "tiny": _scale(n_prompt=16, n_text=8, n_texts=2, n_continuations=9, n_contexts=2, keys=[4], random=[16]),
        "small": _scale(),
        "paper": _scale(polish_steps=400, n_continuations=96, random=[64, 1024, 4096]),
    },
    cost={
        "tiny": "seconds",
        "small": "minutes on two cores",
        "paper": "about an hour on two cores: 400 steps of polishing for each of 32 conversions",
    },
)

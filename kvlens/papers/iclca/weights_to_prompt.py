"""``weights-to-prompt``: virtual keys with the same effect as a given change of the weights (ICLCA's slides, second half).

The slides ask whether a change of the weights, delta-W, can be turned into a prompt. They conjecture that any change of
attention can be approximated by b_KV alone, and any change of an MLP by attention, with enough keys. This is measured on a
real model.

The changes come from context distillation (:mod:`~kvlens.conversion.weights.distillation`): the weights of attention
(Q, K, V, O) or of the MLPs learn a prompt. If distillation were perfect, the prompt itself would be a solution. Two ways to
find one are compared: *given keys*, chosen among keys of other texts, with values in closed form
(:mod:`~kvlens.papers.iclca.imitation`); and *free keys*, where gradient steps on the logits then change keys, weights and
values.

    left = || imitated - changed || / || original - changed ||       of the logits, on texts that no fit has seen

1 means no imitation at all. The prompt itself, shown next to the curves, need not be below 1, since the weights learn part of
it and other things as well. "Up to r keys per head" is the fit, among all with at most r keys, that is best on texts held out
from fitting, so that more keys can hurt only through the noise of that choice. The number of texts is limited as well: the
change and its imitation are both learned from ``n_texts`` of them, and with more texts less is left. As a null, the same fit is
applied to changes whose sign is drawn at random for each text.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from kvlens.conversion import convert_prompt
from kvlens.conversion.softmax.descent import descend
from kvlens.conversion.softmax.polish import LEARNING_RATE, Polished
from kvlens.conversion.softmax.prompt_pass import as_batch
from kvlens.conversion.weights.distillation import TEXTS_PER_STEP, distill_prompt
from kvlens.kv_bias import KVBias
from kvlens.model import HookedKVTransformer
from kvlens.papers.harness.plots import MARKERS, finish
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment, hooked_model
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.iclca.imitation import check_imitable, held_out, imitation
from kvlens.papers.iclca.logits import sampled

PARTS = {"attention": ".attn.", "mlp": ".mlp."}
"""The part of the model that changes, and the substring of its parameters' names."""
NAMES = {"attention": "attention", "mlp": "the MLPs"}
"""In words."""
SHOWN = 10
"""Gradient steps between two evaluations on the held-out texts."""
GIVEN, FREE, NULL, PROMPT = "given keys", "free keys", "given keys, null", "the prompt itself"


@experiment(
    "ICLCA, slides, from delta-W to a prompt",
    "How much of a given change of the weights can virtual keys reproduce?",
    cost=("seconds", "about a quarter of an hour on two cores"),
    model="facts-gpt2",
    tokenizer=None,
    n_changes=(1, 6),
    n_prompt=(4, 48),
    n_texts=(2, 96),
    n_text=(5, 32),
    n_candidates=(4, 256),
    keys=([2], [1, 4, 16, 64]),
    free_steps=(2, 100),
    distil=dict(steps=(2, 100), learning_rate=(1e-3, 5e-4)),
)
def weights_to_prompt(settings: Settings, tell: Tell) -> Reproduction:
    """Imitate several weight changes with every number of keys."""
    model = hooked_model(settings["model"], tokenizer=settings["tokenizer"], device="cpu")
    check_imitable(model)
    rows: list[dict[str, Any]] = []
    for seed in range(settings["n_changes"]):
        for part in PARTS:
            rows += [{"change": seed, "part": part, **row} for row in _imitate(model, part, settings, seed)]
            tell(f"change {seed + 1} of {settings['n_changes']}, {part}")
    changes = pd.DataFrame(rows)
    grouped = changes.groupby(["part", "way", "keys_per_head"], sort=False)["left"]
    table = grouped.agg(["mean", "min", "max"]).reset_index()
    return Reproduction(
        tables={"curve": table, "changes": changes},
        figure=lambda: draw(table),
        comparisons=[*compare(changes)],
        differences=[
            "The slides state the capacity as a hypothesis, for any change and without a number; here the changes are those "
            f"by which {settings['model']} learns prompts of {settings['n_prompt']} tokens in {settings['distil']['steps']} "
            "steps.",
        ],
    )


def _imitate(model: HookedKVTransformer, part: str, settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each way and number of keys, for one change of the weights."""
    generator = torch.Generator().manual_seed(1_000 * seed)
    prompt, learned = _prompt_and_texts(model, settings, generator)
    exact, learning = convert_prompt(model, prompt), settings["distil"]
    asked = dict(steps=learning["steps"], learning_rates=[learning["learning_rate"]], seed=seed)
    found = distill_prompt(model, exact, learned, rank=None, which=lambda name: PARTS[part] in name, **asked)
    changed = found.weights.merged(model)
    start = torch.full((2 * settings["n_texts"], 1), model.tokenizer.bos_token_id)
    fitted, unseen = sampled(changed, start, settings["n_text"] - 1, generator).split(settings["n_texts"])
    others = sampled(model, start[: settings["n_texts"]], settings["n_text"] - 1, generator)
    aim, before = _logits(changed, unseen), _logits(model, unseen)
    size = float((before - aim).norm() / aim.norm())

    def row(way: str, r: int, bias: KVBias) -> dict[str, Any]:
        with model.holding(bias):
            left = float((_logits(model, unseen) - aim).norm() / (before - aim).norm())
        return {"way": way, "keys_per_head": r, "size_of_change": size, "left": left}

    yield row(PROMPT, len(prompt), exact)
    given, free = (Best(model, changed, held_out(fitted)) for _ in range(2))
    for r in settings["keys"]:
        fit = dict(r=r, n_candidates=settings["n_candidates"], generator=generator)
        bias = imitation(model, changed, fitted, others, **fit)
        yield row(GIVEN, r, given.of(bias))
        if settings["free_steps"]:
            free.of(bias)
            for later in freed(model, changed, bias, fitted, settings["free_steps"], generator):
                free.of(later)
            yield row(FREE, r, free.bias)
    yield row(NULL, r, imitation(model, changed, fitted, others, flip=True, **fit))


def _prompt_and_texts(
    model: HookedKVTransformer, settings: Settings, generator: torch.Generator
) -> tuple[Int[Tensor, " prompt"], Int[Tensor, "text pos"]]:
    """A prompt sampled from the model, and texts for fine-tuning its weights on it."""
    bos = torch.tensor([[model.tokenizer.bos_token_id]])
    prompt = sampled(model, bos, settings["n_prompt"] - 1, generator)
    whole = sampled(model, prompt.expand(settings["n_texts"], -1), settings["n_text"], generator)
    return prompt[0], torch.cat([bos.expand(settings["n_texts"], -1), whole[:, prompt.shape[1] : -1]], dim=1)


@torch.no_grad()
def _logits(model: HookedKVTransformer, texts: Int[Tensor, "text pos"]) -> Float[Tensor, "text pos vocab"]:
    """Logits minus their mean, which changes no prediction."""
    logits = model(texts, attention_mask=torch.ones_like(texts))
    return logits - logits.mean(dim=-1, keepdim=True)


class Best:
    """The bias with which ``model`` comes closest to ``changed`` on some texts, among all that were tried."""

    bias: KVBias

    def __init__(self, model: HookedKVTransformer, changed: HookedKVTransformer, texts: Int[Tensor, "text pos"]):
        self.model, self.texts, self.aim, self.least = model, texts, _logits(changed, texts), float("inf")

    def of(self, bias: KVBias) -> KVBias:
        """The best bias so far, including ``bias``."""
        with self.model.holding(bias):
            off = float((_logits(self.model, self.texts) - self.aim).norm())
        if off < self.least:
            self.least, self.bias = off, bias
        return self.bias


def freed(
    model: HookedKVTransformer,
    changed: HookedKVTransformer,
    bias: KVBias,
    texts: Int[Tensor, "text pos"],
    steps: int,
    generator: torch.Generator,
) -> Iterator[KVBias]:
    """Improve ``bias`` by gradient steps on the squared error of the logits; keys, weights and values are free.

    Yields the bias after every :data:`SHOWN` steps, and at the end. The texts that are :func:`held_out` are not read.
    """
    texts = texts[: -len(held_out(texts))]
    aim, before = _logits(changed, texts), _logits(model, texts)
    one = as_batch(bias, 1)
    state = Polished.of(one)

    def loss_on(rows: Int[Tensor, " row"]) -> Float[Tensor, ""]:
        with model.holding(state.bias(one).select_prompt(0)):
            logits = model(texts[rows], attention_mask=torch.ones_like(texts[rows]))
        off = logits - logits.mean(dim=-1, keepdim=True) - aim[rows]
        return off.square().sum() / (before[rows] - aim[rows]).square().sum()

    how: dict[str, Any] = dict(n_rows=len(texts), rows_per_step=TEXTS_PER_STEP, steps=steps, generator=generator)
    for step, _ in enumerate(descend(state.free(), loss_on, learning_rate=LEARNING_RATE, **how), start=1):
        if step % SHOWN == 0 or step == steps:
            with torch.no_grad():
                now = state.bias(one).select_prompt(0)
            yield now


def compare(changes: pd.DataFrame) -> Iterator[Comparison]:
    """The share of the change that is left, by way and number of keys, tested over the changes; and the null."""
    for (part, way, r), rows in changes.groupby(["part", "way", "keys_per_head"], sort=False):
        left = rows["left"]
        name = f"share of a change of {NAMES[part]} that is left: {way}, {r} per head"
        if way == NULL:
            claim = "if there is nothing to learn, nothing is imitated (not below 1)"
        elif way == PROMPT:
            claim = "the weights that learned a prompt act on other texts as the prompt does (a share below 1)"
        else:
            claim = "virtual keys reproduce part of a change of the weights (a share below 1)"
        yield Comparison.tested_on(name, claim, left.to_numpy(), 1.0, below=way != NULL)


COLORS = {GIVEN: "#009E73", FREE: "#CC79A7"}


def draw(table: pd.DataFrame) -> Figure:
    """Plot the share left against keys per head, a panel for each part of the model."""
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    panels = figure.subplots(1, len(PARTS), sharey=True)
    for axes, part in zip(panels, PARTS, strict=True):
        here = table[table["part"] == part]
        for kind, (way, color) in zip(MARKERS, COLORS.items(), strict=False):
            rows = here[here["way"] == way]
            axes.fill_between(rows["keys_per_head"], rows["min"], rows["max"], color=color, alpha=0.15, linewidth=0)
            axes.plot(rows["keys_per_head"], rows["mean"], marker=kind, color=color, linewidth=2, label=way)
        for way, marker in ((PROMPT, "D"), (NULL, "x")):
            rows = here[here["way"] == way]
            axes.plot(rows["keys_per_head"], rows["mean"], marker, color="#555555", linestyle="none", label=way)
        axes.axhline(1, color="#555555", linestyle=":", linewidth=1.4)
        axes.set(xscale="log", xlabel="virtual keys per head", title=f"a change of {NAMES[part]}")
        axes.set_xticks(ticks := sorted(set(here["keys_per_head"])), [str(r) for r in ticks])
        axes.minorticks_off()
        finish(axes)
    panels[0].set_ylim(bottom=0)  # of all panels, once all of them are drawn
    panels[0].set_ylabel("share of the change of the logits that is left")
    words: dict[str, Any] = dict(loc="outside lower center", frameon=False, fontsize=9, ncols=4)
    figure.legend(*panels[0].get_legend_handles_labels(), **words)
    title = "Virtual keys instead of a change of the weights, on unseen text; mean, band from minimum to maximum"
    figure.suptitle(title, fontsize=11, x=0.02, ha="left")
    return figure

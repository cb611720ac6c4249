"""``compaction``: ways to store a softmax prompt, compared by the numbers they store and by their effect on the model.

The methods of :data:`kvlens.conversion.METHODS` that keep keys, and the changes of the weights of
:mod:`kvlens.conversion.weight_patches`, are compared on the same contexts, texts and lengths of prompts. Prompts, and the texts
that follow them, are sampled from the model; only token patches, which cannot do without, have read the texts they are measured
on. The logits at every token of the texts are compared with the prompt in context (old), stored (new) and omitted except BOS
(without):

    relative error = mean of |new - old| / |old|         effect lost = rms |new - old| / rms |without - old|

The divergence of the next token, KL(old || new), is given as mean, median and 95th percentile. *Same continuation* is the share
of greedily generated tokens that equal those after the prompt itself; ``recall`` the share of the prompt's own words that the
model would still say under few keys (:mod:`kvlens.kv_bias.fit`). Tables: ``methods`` (means over contexts, with intervals),
``contexts``, ``heads`` (error of each head's output), ``positions`` (error at each token of the texts), and, of
``facts_model``, ``facts``, ``facts_by_sentence`` and ``answers``.

Sources: those of the methods are listed at `kvlens.papers`.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvlens.conversion import (
    AttentionMatching,
    ConversionMethod,
    KVzip,
    Landmark,
    WeightChange,
    convert_prompt,
    distill_prompt,
    thought_matrices,
    thought_vectors,
    token_patches,
)
from kvlens.conversion.measured import recalled
from kvlens.conversion.prompt_pass import moved_away
from kvlens.kv_bias import KVBias
from kvlens.model import HookedKVTransformer
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment, hooked_model
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.iclca.logits import context_of, divergences, prompted_logits, relative_errors, sampled, writing_model
from kvlens.tasks.facts import Answers, FactsTask, Story, answers_after_story, answers_with_bias
from kvlens.tasks.stories import LONGEST_STATEMENT, STATEMENT_KINDS, words_of
from kvlens.units import layout_of_tokens

SIZE = ["method", "prompt_tokens", "keys_per_head"]
"""The columns that identify a row of the table."""
LEAST = 1e-12
"""Errors below this are rounding."""
DROPPED, EXACT = "prompt left out", "every key kept"
OURS = "landmark, with keys that move"
METHODS: dict[str, tuple[type[ConversionMethod], dict[str, object]]] = {
    "KVzip": (KVzip, {}),
    "Attention Matching, attention": (AttentionMatching, dict(keys="attention")),
    "Attention Matching, pursuit": (AttentionMatching, dict(keys="pursuit")),
    "Attention Matching, on policy": (AttentionMatching, dict(keys="pursuit", on_policy=True)),
    "Attention Matching, budgets by logits": (AttentionMatching, dict(keys="pursuit", budget="logits")),
    "landmark, equal budgets": (Landmark, dict(budget="equal", key_steps=0)),
    "landmark, budgets by logits": (Landmark, dict(key_steps=0)),
    OURS: (Landmark, {}),
}
TOKENS, VECTORS, MATRICES = "token patches, for one text", "thought vectors", "thought matrices"
DISTILLED = "distillation"


@experiment(
    "ICLCA sec. 6.4, with methods of KV-cache compression and prompts as changes of the weights",
    "How well can few numbers replace a softmax prompt, by each published method?",
    cost=("seconds", "about twenty minutes on two cores", "hours on two cores"),
    model=("facts-gpt2", "docs-gpt2", "docs-gpt2"),
    tokenizer=None,
    keys=([3], [4, 16], [8, 16, 32]),
    n_contexts=(1, 6, 8),
    prompt_lengths=([10], [64, 128, 256], [64, 128, 256]),
    n_text=(4, 32, 64),
    n_texts=(2, 4, 8),
    n_continuations=(9, 16, 24),
    n_generated=(3, 32, 64),
    distillation=dict(
        n_texts=(9, 32, 96),
        steps=(2, 50, 400),
        ranks=([1], [1], [1, 8]),
        rates=([1e-3], [1e-2], [3e-3, 1e-2]),
        rates_of_all_entries=([1e-3], None, [3e-4, 1e-3]),
    ),
    facts_model="facts-gpt2",
    facts_ratio=0.25,
    n_stories=(2, 64, 112),
    n_stories_of_weights=(1, 8, 32),
    facts_reference=dict(n_continuations=(4, 24, 24), continuation_length=(6, 48, 48)),
)
def compaction(settings: Settings, tell: Tell) -> Reproduction:
    """Store every context in every way, and measure."""
    model = writing_model(settings)
    rows: dict[str, list[dict[str, object]]] = {"contexts": [], "heads": [], "positions": []}
    for context in range(settings["n_contexts"]):
        for length in settings["prompt_lengths"]:
            for table, row in measured(model, settings, context, length):
                rows[table].append({"context": context, "prompt_tokens": length, **row})
            tell(f"{context + 1} of {settings['n_contexts']} contexts, {length} tokens")
    contexts, heads, positions = (pd.DataFrame(rows[table]) for table in rows)
    answers = facts(settings, tell)
    tables = {
        "methods": summary(contexts),
        "contexts": contexts,
        "heads": _means(heads, ["layer", "head"]),
        "positions": _means(positions, ["text_position"]),
        "facts": kept(answers, []),
        "facts_by_sentence": kept(answers, ["sentence"]),
        "answers": answers,
    }
    return Reproduction(
        tables=tables,
        figure=lambda: draw(tables["methods"], settings["model"]),
        comparisons=[*compare(contexts), *compare_facts(tables["facts"])],
        differences=[
            f"The papers compress the caches of large models and score answers; here {settings['model']} continues its own "
            "texts, and logits are compared.",
            "KVzip instructs the model to repeat the context; here the model reads the prompt once more.",
            "Attention Matching's weights are exact non-negative least squares; its budgets by logits are kvlens' (the authors "
            "measure budgets once per model).",
            "Token patches are exact, but only for the tokens they were made from, by reading these with the prompt; their "
            "numbers are those for one text. Thought patches are made from continuations of the prompt, not from instructions.",
        ],
    )


# --- what is stored ---


def distillation_name(rank: int | None) -> str:
    """The row of a distillation of this rank; None for all entries of the weight matrices."""
    return f"{DISTILLED}, all entries" if rank is None else f"{DISTILLED}, rank {rank}"


@dataclass(frozen=True)
class StoredPrompt:
    """A prompt, stored in some way.

    Attributes:
        bias: what the model has attached: the prompt's few keys, or only the BOS if the weights change.
        change: the change of the weights; None if there is none.
        numbers: how many numbers are stored.
        passes: tokens read or written for the fit, in units of one pass over the prompt, without the prompt's own.
        cpu_seconds: processor time.
        any_text: whether it serves texts other than those it was made from.
    """

    method: str
    keys: int
    bias: KVBias
    change: WeightChange | None
    numbers: int
    passes: float
    cpu_seconds: float
    any_text: bool = True

    @contextlib.contextmanager
    def attached(self, model: HookedKVTransformer) -> Iterator[None]:
        """The model with the stored prompt."""
        with model.kv_bias(self.bias), contextlib.nullcontext() if self.change is None else self.change.attached(model):
            yield


def kept_keys(model: HookedKVTransformer, prompt: Tensor, settings: Settings, seed: int) -> Iterator[StoredPrompt]:
    """The prompt in few keys per head: every method at every size, as long as some of its keys have to go."""
    for keys in settings["keys"]:
        for name, method in methods(keys, settings, seed) if keys < len(prompt) else ():
            start = time.process_time()
            bias = convert_prompt(model, prompt, method=method, verbose=False)
            seconds = time.process_time() - start
            assert bias.fit is not None
            yield StoredPrompt(name, keys, bias, None, bias.num_parameters, bias.fit.passes, seconds)


def methods(keys: int, settings: Settings, seed: int) -> Iterator[tuple[str, ConversionMethod]]:
    """Every method, with ``keys`` keys per head."""
    texts = dict(seed=seed, n_held_out=0, n_continuations=settings["n_continuations"], continuation_length=settings["n_text"])
    for name, (kind, options) in METHODS.items():
        yield name, kind(n_keys=keys, **options, **texts)  # type: ignore[call-arg]


def changed_weights(
    model: HookedKVTransformer, prompt: Tensor, texts: Tensor | None, settings: Settings, seed: int
) -> Iterator[StoredPrompt]:
    """The prompt as changes of the weights, made from continuations that the prompted model writes.

    Args:
        texts: the texts on which it is measured, of which token patches are made; None leaves these out.
    """
    exact, base, length = convert_prompt(model, prompt), bos_alone(model, prompt), len(prompt)
    asked = settings["distillation"]
    start = time.process_time()
    generator = torch.Generator().manual_seed(2_000 + seed)
    many = sampled(model, prompt.expand(asked["n_texts"], -1), settings["n_text"], generator)[:, length:]
    writing = time.process_time() - start
    few = many[: settings["n_continuations"]]
    if texts is not None:
        start = time.process_time()
        with model.kv_bias(base):
            own = token_patches(model, exact, texts)
        each, seconds = own.num_parameters // len(texts), (time.process_time() - start) / len(texts)
        yield StoredPrompt(TOKENS, 0, base, own, each, 2 * texts.shape[1] / length, seconds, any_text=False)
    start = time.process_time()
    with model.kv_bias(base):
        patches = token_patches(model, exact, few)
    reading = time.process_time() - start + writing * len(few) / len(many)
    for name, condense in ((VECTORS, thought_vectors), (MATRICES, thought_matrices)):
        start = time.process_time()
        thought = condense(patches)
        seconds = reading + time.process_time() - start
        yield StoredPrompt(name, 0, base, thought, thought.num_parameters, 3 * few.numel() / length, seconds)
    for rank in ranks(settings):
        rates = asked["rates_of_all_entries"] if rank is None else asked["rates"]
        with model.kv_bias(base):
            found = distill_prompt(model, exact, many, rank=rank, steps=asked["steps"], learning_rates=rates, seed=seed)
        name, change, passes = distillation_name(rank), found.weights, found.passes + many.numel() / length
        yield StoredPrompt(name, 0, base, change, change.num_parameters, passes, found.seconds + writing)


def ranks(settings: Settings) -> list[int | None]:
    """The ranks of the distillations, with None for all entries of the weight matrices."""
    asked = settings["distillation"]
    return [*asked["ranks"], *([None] if asked["rates_of_all_entries"] else [])]


def bos_alone(model: HookedKVTransformer, prompt: Tensor) -> KVBias:
    """The prompt left out, but its BOS at the same distance from the text as with the prompt in between."""
    bos = convert_prompt(model, prompt[:1])
    further = len(prompt) - 1
    return replace(moved_away(bos, further), record=None, position_offset=bos.position_offset + further)


# --- what the model does with it ---


def measured(
    model: HookedKVTransformer, settings: Settings, context: int, length: int
) -> Iterator[tuple[str, dict[str, object]]]:
    """Rows with the names of their tables: one per way to store the prompt, and for each its heads and positions."""
    prompt, texts = context_of(model, {**settings, "n_prompt": length}, seed=context)
    exact, bos = convert_prompt(model, prompt), bos_alone(model, prompt)
    layout = layout_of_tokens(model, prompt)
    with torch.no_grad():
        old = prompted_logits(model, prompt, texts).double()
    left_out = StoredPrompt(DROPPED, 0, bos, None, 0, 0.0, 0.0)
    without = _logits(model, left_out, texts)
    every_key = StoredPrompt(EXACT, length, exact, None, exact.num_parameters, 0.0, 0.0)
    said = _continuation(model, every_key, texts, settings["n_generated"])
    ends: list[StoredPrompt] = [left_out, every_key]
    few_keys = kept_keys(model, prompt, settings, context)
    for ways in (ends, few_keys, changed_weights(model, prompt, texts, settings, context)):
        for way in ways:
            new, size = _logits(model, way, texts), {"method": way.method, "keys_per_head": way.keys}
            same: float | None = None
            if way.any_text:
                same = float((_continuation(model, way, texts, settings["n_generated"]) == said).double().mean())
            known = None if way.bias.fit is None else recalled(model, layout, exact, way.bias)
            cost = {"stored_numbers": way.numbers, "reference_passes": way.passes, "cpu_seconds": way.cpu_seconds}
            words = {"same_continuation": same, "recall": None if known is None else known.share}
            yield "contexts", {**size, **cost, **_errors(old, new, without), **words}
            for head in () if way.bias.fit is None else way.bias.fit.rows():
                yield "heads", {**size, **head}
            for position, error in enumerate(relative_errors(new, old).mean(dim=0).tolist()):
                yield "positions", {**size, "text_position": position, "relative_error": error}


@torch.no_grad()
def _logits(model: HookedKVTransformer, way: StoredPrompt, texts: Tensor) -> Tensor:
    with way.attached(model):
        return model(texts, attention_mask=torch.ones_like(texts)).double()


@torch.no_grad()
def _continuation(model: HookedKVTransformer, way: StoredPrompt, texts: Tensor, n: int) -> Tensor:
    """Greedily generated tokens after the first token of each text."""
    with way.attached(model):
        return model.generate(texts[:, :1], max_new_tokens=n, do_sample=False, stop_at_eos=False, verbose=False)[:, 1:]


def _errors(old: Tensor, new: Tensor, without: Tensor) -> dict[str, float]:
    kl, relative, off = divergences(new, old).flatten(), relative_errors(new, old), (new - old).norm(dim=-1)
    return {
        "relative_error": float(relative.mean()),
        "largest_relative_error": float(relative.max()),
        "effect_lost": float((off.square().mean() / (without - old).norm(dim=-1).square().mean()).sqrt()),
        "kl": float(kl.mean()),
        "kl_median": float(kl.median()),
        "kl_95": float(kl.quantile(0.95)),
    }


def _means(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Means over contexts."""
    return rows.drop(columns="context").groupby([*SIZE, *by], sort=False).mean(numeric_only=True).reset_index()


def summary(contexts: pd.DataFrame) -> pd.DataFrame:
    """Means over contexts, and half the width of the 95 % intervals of the relative error and the divergence."""
    groups = contexts.groupby(SIZE, sort=False)
    table = groups.mean(numeric_only=True).drop(columns="context")
    spread = {f"{x}_interval": 1.96 * groups[x].std() / groups.size() ** 0.5 for x in ("relative_error", "kl")}
    return table.assign(**spread).reset_index()


# --- which facts of a story it keeps ---

STORIES_AT_ONCE = 32


SPREAD = LONGEST_STATEMENT - min(len(words_of(statement)) for kind in STATEMENT_KINDS for statement in kind.statements)
"""The number of tokens by which two statements may differ."""


def stories_for(model: HookedKVTransformer, n_stories: int) -> list[Story]:
    """Held-out stories of four facts, with room for the longest questions behind the longest of them."""
    task = FactsTask(min_facts=4, max_facts=4, length=model.cfg.n_ctx - SPREAD * 4)
    return task.stories(n_stories, torch.Generator().manual_seed(0), "heldout")


def facts(settings: Settings, tell: Tell) -> pd.DataFrame:
    """One row per method and question: ``story``, ``sentence`` (that states the answer), ``stored_numbers``,
    ``right_with_story``, ``is_right``, ``loss`` in nats.
    """
    model = hooked_model(settings["facts_model"])
    stories = stories_for(model, settings["n_stories"])
    frames = []
    for start in range(0, len(stories), STORIES_AT_ONCE):
        part = stories[start : start + STORIES_AT_ONCE]
        asked = {name: _in_few_keys(model, part, name, settings) for name in METHODS}
        frames += [_frame(model, part, start, name, numbers, answers) for name, (numbers, answers) in asked.items()]
        tell(f"facts: {start + len(part)} of {len(stories)} stories")
    for index, story in enumerate(stories[: settings["n_stories_of_weights"]]):
        frames += _in_weights(model, story, index, settings)
        tell(f"facts in weights: {index + 1} of {settings['n_stories_of_weights']} stories")
    return pd.concat(frames, ignore_index=True)


@torch.no_grad()
def _in_few_keys(
    model: HookedKVTransformer, stories: Sequence[Story], name: str, settings: Settings
) -> tuple[list[float], Answers]:
    kind, options = METHODS[name]
    method = kind(ratio=settings["facts_ratio"], seed=0, n_held_out=0, **options, **settings["facts_reference"])  # type: ignore[call-arg]
    bias = convert_prompt(model, [story.prompt for story in stories], prepend_bos=True, method=method, verbose=False)
    with model.kv_bias(bias):
        numbers = [float(bias.select_prompt(row).num_parameters) for row in range(len(stories))]
        return numbers, answers_with_bias(model, stories)


def _in_weights(model: HookedKVTransformer, story: Story, index: int, settings: Settings) -> Iterator[pd.DataFrame]:
    """The story as changes of the weights, which have to be made for one story at a time."""
    reference = settings["facts_reference"]
    room = min(reference["continuation_length"], model.cfg.n_ctx - story.n_prompt_tokens)
    asked = {**settings, "n_text": room, "n_continuations": reference["n_continuations"]}
    prompt = torch.tensor(story.tokens[: story.n_prompt_tokens])
    for way in changed_weights(model, prompt, None, asked, seed=index):
        with torch.no_grad(), way.attached(model):
            answers = answers_with_bias(model, [story])
        yield _frame(model, [story], index, way.method, [float(way.numbers)], answers)


@torch.no_grad()
def _frame(
    model: HookedKVTransformer, stories: Sequence[Story], first: int, method: str, numbers: list[float], answers: Answers
) -> pd.DataFrame:
    asked = [(row, question) for row, story in enumerate(stories) for question in story.questions if not question.repeated]
    after = answers_after_story(model, stories)
    return pd.DataFrame(
        {
            "method": method,
            "story": [first + row for row, _ in asked],
            "sentence": [question.sentence for _, question in asked],
            "stored_numbers": [numbers[row] for row, _ in asked],
            "right_with_story": after.is_right.numpy(),
            "is_right": answers.is_right.numpy(),
            "loss": (after.log_p - answers.log_p).numpy(),
        }
    )


def kept(answers: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Count by method (and ``by``) the answers that were right with the story, how many stay right, and their loss.

    ``loss_interval`` is half the width of the 95 % interval of the mean loss over stories.
    """
    right = answers[answers["right_with_story"]]
    groups = right.groupby(["method", *by], sort=False)
    table = groups.agg(
        stored_numbers=("stored_numbers", "mean"),
        n_answers=("is_right", "size"),
        n_kept=("is_right", "sum"),
        mean_loss=("loss", "mean"),
        loss_95=("loss", lambda loss: loss.quantile(0.95)),
    )
    by_story = right.groupby(["method", *by, "story"], sort=False)["loss"].mean().groupby(["method", *by], sort=False)
    interval = 1.96 * by_story.std() / by_story.size() ** 0.5
    return table.assign(share_kept=table["n_kept"] / table["n_answers"], loss_interval=interval).reset_index()


# --- claims ---


def compare(contexts: pd.DataFrame) -> Iterator[Comparison]:
    """kvlens' closed form compared with every other method, tested over contexts.

    With methods that keep keys, by the error of the logits: the geometric mean of the ratio over all numbers of keys. With
    changes of the weights, by the divergence, which does not change with a constant added to all logits: at the fewest keys.
    """
    for length in contexts["prompt_tokens"].unique():
        here = contexts[contexts["prompt_tokens"] == length]
        error, kl = (
            np.log(here.pivot_table(index="context", columns=["method", "keys_per_head"], values=x).clip(lower=LEAST))
            for x in ("relative_error", "kl")
        )
        fewest = min(error[OURS].columns)
        for other in here["method"].unique():
            if other in (OURS, DROPPED, EXACT, TOKENS):
                continue
            if other in METHODS:
                what, ratio = "relative error, any number of keys", (error[OURS] - error[other]).mean(axis=1)
            else:
                what, ratio = f"divergence, {fewest} keys", kl[OURS, fewest] - kl[other, 0]
            what = f"prompts of {length} tokens, {what}: {OURS}, over {other}"
            ours = float(np.exp(ratio.mean()))
            yield Comparison.tested_on(what, "the ratio is below 1", ratio.to_numpy(), below=True, ours=ours)


def compare_facts(table: pd.DataFrame) -> Iterator[Comparison]:
    """The share of correct answers that each method keeps, without verdicts."""
    for row in table.itertuples():
        what = f"right answers kept, {row.method} ({row.n_kept:,} of {row.n_answers:,})"
        yield Comparison.stated(what, "answers about the story stay right", float(row.share_kept))


# --- figure ---


def draw(table: pd.DataFrame, model: str) -> Figure:
    """Error of the logits against stored numbers, both logarithmic, by the prompt's length; what is exact is left out."""
    shown = table[~table["method"].isin((DROPPED, EXACT, TOKENS))]
    error, interval = shown["relative_error"], shown["relative_error_interval"]
    shown = shown.assign(low=error - interval.clip(upper=0.95 * error), high=error + interval)
    lines = {DROPPED: float(table.loc[table["method"] == DROPPED, "relative_error"].mean())}
    title = f"What replaces a prompt of {model}: error of the logits, bands: 95 % over contexts"
    return draw_panels(
        shown, "stored_numbers", "relative_error", by="method", panel="prompt_tokens", title=title, lines=lines, log="xy"
    )

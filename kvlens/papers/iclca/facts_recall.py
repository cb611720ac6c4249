"""``facts-recall``: how many virtual keys per head does a softmax model need to remember a story?

``facts-gpt2`` reads a made-up story and answers questions about it that only the story answers. The story is converted to a KV
bias: all its keys (exact), or fewer, chosen and fitted on the model's own continuations of the story. The measure is the share
of the model's correct answers with the story in context that stay correct:

    share kept = right with the story and with its bias / right with the story        at so many keys per head

Ways to get fewer keys: *logits* gives keys to the heads where they remove most error, *equal* gives each head the same number,
*no fit* keeps the same keys unchanged, without fitted weights and values. *polished* continues from logits, at a quarter of the
keys, with gradient steps on the next-token distribution over more continuations. *dropped* is no bias at all.

The continuations are sampled from the model after the story. It was trained on stories with questions, so it mostly writes
questions about the story's facts and answers: the fits see questions of the same form, some of them the scored ones, with the
model's own answers.

Source: ICLCA sec. 5 and 6.4, for the approximate conversion of softmax attention; the stories and the scored answers are
kvlens' own, the fitted keys follow Attention Matching (Zweiger et al. 2026, arXiv 2602.16284; see :mod:`kvlens.ops.landmarks`).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from kvlens.conversion import ConversionMethod, Exact, Landmark, convert_prompt
from kvlens.model import HookedKVTransformer
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment, hooked_model
from kvlens.papers.harness.significance import Comparison, share_interval
from kvlens.tasks.facts import FactsTask, Story, answers_after_story, answers_with_bias, answers_without_story, guess_in_story
from kvlens.tasks.stories import LONGEST_STATEMENT, STATEMENT_KINDS, words_of

LOGITS, EQUAL, NO_FIT, POLISHED, EXACT, DROPPED = "logits", "equal", "no fit", "polished", "exact", "dropped"
FEWER_KEYS: dict[str, dict[str, Any]] = {
    LOGITS: dict(budget="logits"),
    EQUAL: dict(budget="equal"),
    NO_FIT: dict(budget="equal", fitted=False),
}
"""The options of :class:`kvlens.conversion.Landmark` other than the number of keys."""
AIM, AIM_RATIO = 0.99, 0.25
"""The share of answers to be kept at this share of the story's keys."""
SPREAD = LONGEST_STATEMENT - min(len(words_of(statement)) for kind in STATEMENT_KINDS for statement in kind.statements)
"""The number of tokens by which two statements may differ."""


@experiment(
    "ICLCA sec. 5, on answers instead of logits",
    "How many virtual keys per head does a softmax model need to remember a story?",
    cost=(
        "a few seconds, with the shipped model",
        "about twenty minutes on one core, with the shipped model",
    ),
    model="facts-gpt2",
    n_facts=4,
    n_stories=(4, 128),
    batch_size=(2, 32),
    ratios=([0.25], [0.0625, 0.125, 0.25, 0.5]),
    reference=dict(n_continuations=(4, 24), continuation_length=(8, 48)),
    polish=dict(polish_steps=(2, 400), texts_per_step=(..., 4), n_continuations=(..., 64)),
    seed=0,
)
def facts_recall(settings: Settings, tell: Tell) -> Reproduction:
    """Convert stories in every way, and ask about their facts."""
    model = hooked_model(settings["model"])
    stories = stories_for(model, settings)
    parts = []
    for start in range(0, len(stories), settings["batch_size"]):
        part = stories[start : start + settings["batch_size"]]
        parts.append(measure(model, part, ways(settings), first_story=start))
        tell(f"{start + len(part)} of {len(stories)} stories")
    answers = pd.concat(parts, ignore_index=True)
    kept = share_kept(answers)
    return Reproduction(
        tables={"kept": kept, "answers": answers},
        figure=lambda: draw(kept),
        comparisons=[*compare(answers, guess_in_story(stories))],
        differences=[*_differences(model, settings)],
    )


def stories_for(model: HookedKVTransformer, settings: Settings) -> list[Story]:
    """Held-out stories of ``n_facts`` facts, with room for the longest questions behind the longest of them."""
    n_facts = settings["n_facts"]
    task = FactsTask(min_facts=n_facts, max_facts=n_facts, length=model.cfg.n_ctx - SPREAD * n_facts)
    return task.stories(settings["n_stories"], torch.Generator().manual_seed(settings["seed"]), "heldout")


@torch.no_grad()
def measure(
    model: HookedKVTransformer,
    stories: Sequence[Story],
    ways: Iterable[tuple[str, float, ConversionMethod]],
    first_story: int = 0,
) -> pd.DataFrame:
    """One row per way and question: ``story``, ``question``, ``kind``, ``way``, ``ratio``, ``keys`` (per head, on average),
    ``right_with_story``, ``is_right``.
    """
    asked = [(row, number) for row, story in enumerate(stories) for number, q in enumerate(story.questions) if not q.repeated]
    shared = {
        "story": [first_story + row for row, _ in asked],
        "question": [number for _, number in asked],
        "kind": [stories[row].questions[number].fact.kind.name for row, number in asked],
        "right_with_story": answers_after_story(model, stories).is_right.numpy(),
    }
    tokens = torch.tensor([stories[row].n_prompt_tokens for row, _ in asked], dtype=torch.float64)
    dropped = {"way": DROPPED, "ratio": 0.0, "keys": 0.0, "is_right": answers_without_story(model, stories).is_right.numpy()}
    frames = [pd.DataFrame({**shared, **dropped})]
    for name, ratio, method in ways:
        bias = convert_prompt(model, [story.prompt for story in stories], prepend_bos=True, method=method, verbose=False)
        with model.kv_bias(bias):
            right = answers_with_bias(model, stories).is_right
        keys = tokens
        if bias.fit is not None and bias.fit.n_keys is not None:  # [layer story kv_head]
            keys = bias.fit.n_keys.cpu().double().mean(dim=(0, 2))[[row for row, _ in asked]]
        own = {"way": name, "ratio": ratio, "keys": keys.numpy(), "is_right": right.numpy()}
        frames.append(pd.DataFrame({**shared, **own}))
    return pd.concat(frames, ignore_index=True)


def ways(settings: Settings) -> Iterator[tuple[str, float, ConversionMethod]]:
    """Yield the name of every way, the share of keys that it keeps, and its method."""
    yield EXACT, 1.0, Exact()
    for ratio in settings["ratios"]:
        shared: dict[str, Any] = dict(ratio=ratio, key_steps=0, seed=settings["seed"], n_held_out=0, **settings["reference"])
        for name, options in FEWER_KEYS.items():
            yield name, ratio, Landmark(**shared, **options)
        if ratio == AIM_RATIO:
            polish = {**settings["polish"], "objective": "kl"}
            yield POLISHED, ratio, Landmark(**{**shared, **FEWER_KEYS[LOGITS], **polish})


def share_kept(answers: pd.DataFrame) -> pd.DataFrame:
    """Count by way and ratio: ``keys``, ``n_answers`` (right with the story), ``n_kept`` (of those), ``share_kept``.

    ``low`` and ``high`` are the ends of the share's 95 % interval over stories.
    """
    right = answers[answers["right_with_story"]]
    grouped = right.groupby(["way", "ratio"], sort=False)
    table = grouped.agg(keys=("keys", "mean"), n_answers=("is_right", "size"), n_kept=("is_right", "sum"))
    ends = [share_interval(rows["is_right"], rows["story"]) for _, rows in grouped]
    table = table.assign(share_kept=table["n_kept"] / table["n_answers"], low=[a for a, _ in ends], high=[b for _, b in ends])
    return table.reset_index()


def compare(answers: pd.DataFrame, guess: float) -> Iterator[Comparison]:
    """The expectations: all answers kept with all keys, nearly all with a quarter of them, and only guesses without any."""
    exact, right = answers[answers["way"] == EXACT]["right_with_story"], answers[answers["right_with_story"]]
    what = f"answers right with the story in front ({_count(exact)})"
    yield Comparison.stated(what, "the model answers from the story", float(exact.mean()))
    stay = right[right["way"] == EXACT]["is_right"]
    what = f"of these, kept with every key ({_count(stay)})"
    yield Comparison(what, "the exact conversion keeps all", float(stay.mean()), bool(stay.all()))
    right = right[right["ratio"] == AIM_RATIO]
    for way in (LOGITS, POLISHED):
        stay = right[right["way"] == way]["is_right"]
        what = f"kept at a quarter of the story's keys, {way} ({_count(stay)})"
        yield Comparison.of_share(what, f"{AIM:.0%} or more", stay, AIM)
    by_story = right.pivot_table(index="story", columns="way", values="is_right", aggfunc="mean").astype(float)
    what = "kept at a quarter, fitted with budgets by logits less no fit, mean over stories"
    gain = (by_story[LOGITS] - by_story[NO_FIT]).tolist()
    yield Comparison.tested_on(what, "choosing budgets and fitting keeps more answers", gain)
    dropped = answers[answers["way"] == DROPPED]["is_right"]
    what = f"right without the story ({_count(dropped)})"
    claim = f"fewer than any value of the kind in the story would be right, {guess:.3f}"
    yield Comparison.of_share(what, claim, dropped, guess, below=True)


def _count(is_right: pd.Series) -> str:
    return f"{is_right.sum():,} of {len(is_right):,}"


def _differences(model: HookedKVTransformer, settings: Settings) -> Iterator[str]:
    yield (
        f"The paper converts GPT-2 with Performer features and measures the error of the logits; here a model of "
        f"{model.cfg.n_layers} layers answers questions about stories of {settings['n_facts']} facts."
    )
    if model.cfg.kv_shift is not None:
        yield f"The model has a KV shift over a window of {model.cfg.kv_shift.window}, which GPT-2 does not have."


# --- figure ---


def draw(kept: pd.DataFrame) -> Figure:
    """Share of answers kept against virtual keys per head, with 95 % intervals over stories."""
    lines = {f"{AIM:.0%}": AIM, "no bias": float(kept.loc[kept["way"] == DROPPED, "share_kept"].iloc[0])}
    title = "Answers about stories that stay correct, by the number of virtual keys per head"
    return draw_panels(kept[kept["way"] != DROPPED], "keys", "share_kept", by="way", title=title, lines=lines, log="x")

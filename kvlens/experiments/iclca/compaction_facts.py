"""The facts of a story that ``compaction``'s methods keep: which answers stay right, and how much less likely they become.

    loss of a fact = log p(right answer | story, question) - log p(right answer | stored story, question)

The stories and questions are those of :mod:`~kvlens.experiments.iclca.facts_recall`; only answers that are right with the story
count.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from kvlens.conversion import convert_prompt
from kvlens.experiments.iclca.compaction_ways import METHODS, changed_weights
from kvlens.experiments.iclca.facts_recall import stories_for
from kvlens.experiments.shared.sampling import hooked_model
from kvlens.model import HookedKVTransformer
from kvlens.tasks.facts import Answers, Story, answers_after_story, answers_with_bias

STORIES_AT_ONCE = 32


def facts(settings: Mapping[str, Any], tell: Callable[[str], None]) -> pd.DataFrame:
    """One row per method and question: ``story``, ``sentence`` (that states the answer), ``stored_numbers``,
    ``right_with_story``, ``is_right``, ``loss`` in nats.
    """
    model = hooked_model(settings["facts_model"])
    stories = stories_for(model, {"n_facts": 4, "seed": 0, "n_stories": settings["n_stories"]})
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
    model: HookedKVTransformer, stories: Sequence[Story], name: str, settings: Mapping[str, Any]
) -> tuple[list[float], Answers]:
    kind, options = METHODS[name]
    method = kind(ratio=settings["facts_ratio"], seed=0, n_held_out=0, **options, **settings["facts_reference"])  # type: ignore[call-arg]
    bias = convert_prompt(model, [story.prompt for story in stories], prepend_bos=True, method=method, verbose=False)
    with model.kv_bias(bias):
        numbers = [float(bias.select_prompt(row).num_parameters) for row in range(len(stories))]
        return numbers, answers_with_bias(model, stories)


def _in_weights(model: HookedKVTransformer, story: Story, index: int, settings: Mapping[str, Any]) -> Iterator[pd.DataFrame]:
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
    """By method (and ``by``): answers that were right with the story, how many stay right, and their loss.

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

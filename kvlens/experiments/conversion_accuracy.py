"""``conversion-accuracy``: what a model has learned from its prompt, it still knows when the prompt is a bias (ICLCA table 2).

The task is the trigger-token bigrams of ICLCA sec. 6.2, cut in two: the prompt shows what follows each trigger, the text uses the
triggers again. Scored are the triggers in the text whose follower the prompt has shown. Three conditions read the same text:

- *with prompt*: the model sees [prompt; text];
- *without prompt*: the text alone. At its first use in the text a trigger can then only be guessed;
- *converted*: the text alone, with the prompt's bias attached.

Converted and prompted model compute the same function, so every prediction must be the same. Rounding could change one only where
the two largest logits are nearly equal: by what margin each prediction is made is measured too, beside what conversion changes.

The shipped model ``bigram-linear`` is the paper's: 12 layers of width 128. The setting ``model`` may name the folder of another
one, or be None: then a model is trained as ``training`` says.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from kvlens import zoo
from kvlens.conversion import convert_prompt
from kvlens.errors import KVLensError, nearest
from kvlens.experiments.conversion_error import float64_logits, relative_error
from kvlens.experiments.outcome import Comparison, Experiment, Outcome
from kvlens.model import HookedKVTransformer
from kvlens.tasks import Batch, make_task
from kvlens.tasks.bigrams import BigramTask
from kvlens.training import build_model, check_fit, train

PROMPTED, ALONE, CONVERTED = "with prompt", "without prompt", "converted"
CONDITIONS = (PROMPTED, ALONE, CONVERTED)
ENOUGH = 0.999
"""In-context accuracy from which on the task counts as learned."""


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Measure the three conditions on the sequences that ``settings`` asks for."""
    task = make_task("bigrams", **settings["task"])
    assert isinstance(task, BigramTask)
    model = obtain_model(settings, task, tell)
    predictions, errors = measure(model, task, settings, tell)
    accuracy = accuracy_by_use(predictions)
    return Outcome(
        tables={"accuracy": accuracy, "predictions": predictions, "errors": errors},
        figure=draw(accuracy, predictions, chance(task)),
        comparisons=[*compare(predictions, errors, chance(task))],
        differences=[*_differences(model, task, settings)],
    )


def obtain_model(settings: Mapping[str, Any], task: BigramTask, tell: Callable[[str], None]) -> HookedKVTransformer:
    """The model that ``settings`` name, or one trained now.

    Raises:
        KVLensError: the model is not there, or does not fit the task.
    """
    name = settings["model"]
    if name is None:
        model = build_model(task, settings["training"]["model"])
        result = train(model, task, progress=False, **settings["training"]["settings"])
        tell(f"trained for {result.steps} steps: accuracy {result.heldout['accuracy'].iloc[-1]:.1%}")
    elif name in zoo.names():
        model = HookedKVTransformer.from_zoo(name)
    elif Path(name).is_dir():
        model = HookedKVTransformer.load(name)
    else:
        raise KVLensError(
            f"conversion-accuracy: {name!r} is neither a shipped model{nearest(name, zoo.names())} nor a folder. Train it with "
            "`kvlens train bigram-linear --out RUN`, and give the folder 'RUN/model' as the experiment's setting 'model'"
        )
    check_fit(model, task)
    return model.eval().requires_grad_(False)


def chance(task: BigramTask) -> float:
    """How often a trigger's follower is guessed by one who has not seen it: followers are uniform over the other letters."""
    return 1 / (task.n_letters - task.n_triggers)


# --- measuring ---


def measure(
    model: HookedKVTransformer, task: BigramTask, settings: Mapping[str, Any], tell: Callable[[str], None]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Run the three conditions on ``n_sequences`` sequences.

    Returns:
        predictions: one row a condition and scored position: ``sequence``, ``position`` (in the text), ``use`` (of this trigger
            in the text, from 1), ``trigger``, ``follower``, ``condition``, ``prediction``, ``is_right``; ``margin`` (of the
            largest logit over the second) and ``change`` (largest absolute difference of a logit from the prompted one's).
        errors: one row a sequence: relative error of the ``conversion``, and of the float32 ``forward_pass`` with the prompt,
            of the logits at all positions of the text.
    """
    cut, generator = settings["prompt_length"], torch.Generator().manual_seed(settings["seed"])
    predictions, errors, done = [], [], 0
    while done < settings["n_sequences"]:
        n = min(settings["batch_size"], settings["n_sequences"] - done)
        batch = task.sample_with_prompt(n, generator, cut)
        logits = read_three_ways(model, batch.inputs, cut)
        exact = float64_logits(model, batch.inputs)[:, cut:]
        error = {
            "conversion": relative_error(logits[CONVERTED], logits[PROMPTED]),
            "forward_pass": relative_error(logits[PROMPTED], exact),
        }
        errors.append(pd.DataFrame({"sequence": range(done, done + n), **{name: e.numpy() for name, e in error.items()}}))
        predictions.append(judge(task, Batch(*(part[:, cut:] for part in batch)), logits, first_sequence=done))
        done += n
        tell(f"{done} of {settings['n_sequences']} sequences")
    return pd.concat(predictions, ignore_index=True), pd.concat(errors, ignore_index=True)


@torch.no_grad()
def read_three_ways(
    model: HookedKVTransformer, tokens: Int[Tensor, "batch pos"], cut: int
) -> dict[str, Float[Tensor, "batch text_pos d_vocab"]]:
    """Logits on the text, the columns from ``cut`` on, under each of `CONDITIONS`; the columns before are the prompt."""
    prompt, text = tokens[:, :cut], tokens[:, cut:]
    with model.kv_bias(convert_prompt(model, prompt)):
        converted = model(text)
    return {PROMPTED: model(tokens)[:, cut:], ALONE: model(text), CONVERTED: converted}


def use_of_trigger(
    text: Int[Tensor, "batch pos"], n_triggers: int
) -> Int[Tensor, "batch pos"]:
    """At each trigger, its how manieth use in the text this is, from 1; 0 at other letters."""
    is_use = text[:, :, None] == torch.arange(n_triggers)
    return (is_use.cumsum(dim=1) * is_use).sum(dim=2)


def judge(
    task: BigramTask,
    text: Batch,
    logits: Mapping[str, Float[Tensor, "batch pos d_vocab"]],
    first_sequence: int = 0,
) -> pd.DataFrame:
    """The rows of `measure`'s ``predictions``.

    Args:
        task: names the letters.
        text: inputs, targets and scored positions, without the prompt.
        logits: by condition.
        first_sequence: the number of the first row.
    """
    scored: Bool[Tensor, "batch pos"] = text.scored
    sequence, position = scored.nonzero(as_tuple=True)
    shared = {
        "sequence": (sequence + first_sequence).numpy(),
        "position": position.numpy(),
        "use": use_of_trigger(text.inputs, task.n_triggers)[scored].numpy(),
        "trigger": [*task.tokens_as_text(text.inputs[scored])],
        "follower": [*task.tokens_as_text(text.targets[scored])],
    }
    frames = []
    for condition in CONDITIONS:
        here = logits[condition][scored]
        largest = here.topk(2, dim=-1)
        own = {
            "condition": condition,
            "prediction": [*task.tokens_as_text(largest.indices[:, 0])],
            "is_right": (largest.indices[:, 0] == text.targets[scored]).numpy(),
            "margin": (largest.values[:, 0] - largest.values[:, 1]).numpy(),
            "change": (here - logits[PROMPTED][scored]).abs().amax(dim=-1).numpy(),
        }
        frames.append(pd.DataFrame({**shared, **own}))
    return pd.concat(frames, ignore_index=True)


def accuracy_by_use(predictions: pd.DataFrame) -> pd.DataFrame:
    """How many scored positions there are, and how many are right, by condition and use of the trigger in the text."""
    grouped = predictions.groupby(["condition", "use"], sort=False)["is_right"]
    table = grouped.agg(n_scored="size", n_right="sum").reset_index()
    return table.assign(accuracy=table["n_right"] / table["n_scored"])


def n_disagreeing(predictions: pd.DataFrame) -> int:
    """At how many scored positions the converted model predicts another letter than the prompted one."""
    by_condition = {
        name: rows.set_index(["sequence", "position"])["prediction"] for name, rows in predictions.groupby("condition")
    }
    return int((by_condition[CONVERTED] != by_condition[PROMPTED]).sum())

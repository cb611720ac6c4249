"""From a recipe to a model with a card: train, save, measure the saved model, and write the card.

The folder of a run then holds the files of :mod:`kvlens.training.checkpoint`, and
``model/``: weights, configuration, tokenizer, ``MODEL_CARD.md``, ``training.json`` and the metrics, which is what ships.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvlens.arguments import path_of
from kvlens.bridge import KVTransformerBridge
from kvlens.checks import checked
from kvlens.files import CARD, LIST, check_folder, list_files, plain, read_json, write_folder
from kvlens.files.tables import table_bytes
from kvlens.model.storage import MODEL_FOLDER, check_model_folder
from kvlens.tasks import Task
from kvlens.training.card import model_card
from kvlens.training.checkpoint import LOCK, RUN_FOLDER, check_run_folder, only_run_in
from kvlens.training.hybrid import CONFIG, AnswerLoss, new_hybrid, train_hybrid, write_hybrid
from kvlens.training.loss import Loss, Objective, loss_of, score_in_parts
from kvlens.training.recipes import Recipe, build_model, build_task, command_of
from kvlens.training.settings import TrainSettings
from kvlens.training.trainer import TrainResult, train

FACTS, WATCHED = "training.json", "watched.parquet"
MEASURED_SEQUENCES = 1024
MEASURE_SEED = 1
"""Differs from the seed of the evaluations during training, which selected the weights."""


def _trained_hybrid(folder: Path) -> set[str] | None:
    """The files of a folder that :func:`train_recipe` wrote for a hybrid; None for any other folder."""
    listed = read_json("train", folder / "model" / CONFIG).get(LIST) if (folder / "model" / FACTS).is_file() else None
    return {LOCK, *(f"model/{name}" for name in (CONFIG, CARD, *listed))} if isinstance(listed, dict) else None


HYBRID_FOLDER = RUN_FOLDER._replace(
    name="a trained model (models of Transformers' classes are trained without a checkpoint to resume from)",
    own_files=_trained_hybrid,
    allow="ask for a restart (--restart)",
)


@checked
def train_recipe(
    recipe: Recipe,
    folder: str | Path,
    *,
    device: Any = None,
    restart: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Train what ``recipe`` describes, and write run and model to ``folder``.

    Args:
        recipe: one of :data:`kvlens.training.recipes.RECIPES`, or one with settings changed (``dataclasses.replace``).
        folder: folder of the run; a run found there is resumed.
        device: where to train; None takes a GPU if there is one.
        restart: start from scratch even if there is a run.
        progress: show a progress bar.

    Returns:
        The content of ``training.json`` (recipe, sizes, and the held-out measurements of the saved model), which equal recipes
        make equal, and ``seconds``, the time that training took.

    Raises:
        KVLensError: as for :func:`kvlens.training.train`.
    """
    folder, hybrid = path_of("train: folder", folder), recipe.architecture is not None
    if hybrid:
        check_folder(folder, HYBRID_FOLDER, overwrite=restart)
    else:
        check_run_folder(folder)  # before the corpus is built, which takes time
        check_model_folder(folder / "model", overwrite=True)
    task, settings = build_task(recipe), TrainSettings.of(dict(recipe.training))
    settings.check_batches(task)
    model: Any
    if hybrid:
        model = new_hybrid(task, recipe.model).to(device or "cpu")
        result = train_hybrid(model, task, settings, progress=progress)
    else:
        model = build_model(task, recipe.model, name=recipe.name, device=device)
        settings.check_model(model)
        result = train(model, task, folder=folder, restart=restart, progress=progress, **recipe.training)
    facts: dict[str, Any] = {}

    def fill(temporary: Path) -> None:
        dtype, written = getattr(torch, recipe.stored_dtype), []
        if hybrid:
            written = write_hybrid(model, task, temporary, dtype)
            saved: Any = KVTransformerBridge.boot_transformers(temporary, device=device or "cpu")
            config, heldout = read_json("model", temporary / CONFIG), measure(saved, task, AnswerLoss())
        else:
            model.save(temporary, stored_dtype=dtype)
            saved = type(model).load(temporary)
            config, heldout = saved.cfg.to_json(), measure(saved, task, loss_of(task))
        facts.update(facts_of(recipe, task, model, result, config, heldout))
        write_beside(temporary, facts, result, written)

    with only_run_in(folder):
        write_folder(folder / "model", fill, None if hybrid else MODEL_FOLDER, overwrite=True)
    return {**facts, "seconds": result.seconds}


def facts_of(
    recipe: Recipe, task: Task, model: nn.Module, result: TrainResult, config: dict[str, Any], heldout: dict[str, Any]
) -> dict[str, Any]:
    """The content of ``training.json``: recipe, sizes and held-out measurements of a saved model, as JSON values."""
    training = asdict(TrainSettings.of(dict(recipe.training)))
    return {
        "name": recipe.name,
        "summary": recipe.summary,
        "command": command_of(recipe),
        "recipe": {**asdict(replace(recipe, training=training)), "task_settings": task.settings()},
        "config": config,
        "n_parameters": sum(p.numel() for p in model.parameters()),
        "data": task.describe_data(),
        "training": {
            "steps": result.steps,
            "stopped_by": result.stopped_by,
            "best_step": result.best_step,
        },
        "heldout": heldout,
    }


@torch.no_grad()
def measure(model: Any, task: Task, loss: Loss) -> dict[str, Any]:
    """Held-out loss and accuracy of a saved model, and the task's own measurements."""
    objective, heldout = Objective(model.eval(), loss), task.heldout(MEASURED_SEQUENCES, MEASURE_SEED)
    total, correct, count = score_in_parts(objective, heldout, 32).tolist()
    accuracy = None if math.isnan(correct) else correct / count
    measured = {"sequences": MEASURED_SEQUENCES, "loss": total / count, "accuracy": accuracy}
    return {**measured, **task.measure_more(model, MEASURED_SEQUENCES, total / count)}


def write_beside(folder: Path, facts: dict[str, Any], result: TrainResult, also: Sequence[str] = ()) -> None:
    """Write card, facts and metrics of the run into a model's folder, which lists them, and the files ``also``."""
    (folder / FACTS).write_text(json.dumps(plain(facts), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / CARD).write_text(model_card(facts), encoding="utf-8")
    (folder / "metrics.parquet").write_bytes(table_bytes(result.metrics))
    names = [*also, FACTS, "metrics.parquet"]
    if len(result.watched):
        (folder / WATCHED).write_bytes(table_bytes(result.watched))
        names.append(WATCHED)
    list_files(folder, names)

"""From a recipe to a model with a card: train, save, measure the saved model, and write the card.

The folder of a run then holds the files of :mod:`kvlens.training.checkpoint`, and
``model/``: weights, configuration, tokenizer, ``MODEL_CARD.md``, ``training.json`` and the metrics, which is what ships.
"""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvlens.arguments import path_of
from kvlens.bridge import KVTransformerBridge
from kvlens.checks import checked, from_fields
from kvlens.files import CARD, CONFIG, LIST, check_folder, list_files, plain, read_json, write_folder
from kvlens.files.parquet import table_bytes
from kvlens.model.storage import MODEL_FOLDER, check_model_folder
from kvlens.tasks import Task, make_task
from kvlens.tasks.task import Model
from kvlens.training.checkpoint import RUN_FOLDER, RUN_LOCK, check_run_folder, only_run_in
from kvlens.training.hybrid import AnswerLoss, new_hybrid, train_hybrid, write_hybrid
from kvlens.training.recipes import Recipe, build_model, find_recipe
from kvlens.training.run import Loss, ModelAndLoss, TrainSettings, loss_of, score_in_parts
from kvlens.training.trainer import TrainResult, train

FACTS, WATCHED = "training.json", "watched.parquet"
MEASURED_SEQUENCES = 1024
MEASURE_SEED = 1
"""Differs from the seed of the evaluations during training, which selected the weights."""


def _trained_hybrid(folder: Path) -> set[str] | None:
    """The files of a folder that :func:`train_recipe` wrote for a hybrid; None for any other folder."""
    listed = read_json("train", folder / "model" / CONFIG).get(LIST) if (folder / "model" / FACTS).is_file() else None
    return {RUN_LOCK, *(f"model/{name}" for name in (CONFIG, CARD, *listed))} if isinstance(listed, dict) else None


HYBRID_FOLDER = replace(
    RUN_FOLDER,
    name="a trained model (models of Transformers' classes are trained without a checkpoint to resume from)",
    own_files=_trained_hybrid,
    allow="ask for a restart (--restart)",
)


@checked
def train_recipe(
    recipe: Recipe,
    folder: str | Path,
    *,
    device: torch.device | str | None = None,
    restart: bool = False,
    progress: bool = True,
) -> dict[str, object]:
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
    task, settings = make_task(recipe.task, **recipe.task_settings), from_fields(TrainSettings, dict(recipe.training))
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
    recipe: Recipe, task: Task, model: nn.Module, result: TrainResult, config: dict[str, object], heldout: dict[str, object]
) -> dict[str, object]:
    """The content of ``training.json``: recipe, sizes and held-out measurements of a saved model, as JSON values."""
    training = asdict(from_fields(TrainSettings, dict(recipe.training)))
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
def measure(model: Model | KVTransformerBridge, task: Task, loss: Loss) -> dict[str, object]:
    """Held-out loss and accuracy of a saved model, and the task's own measurements."""
    objective, heldout = ModelAndLoss(model.eval(), loss), task.heldout(MEASURED_SEQUENCES, MEASURE_SEED)
    total, correct, count = score_in_parts(objective, heldout, 32).tolist()
    accuracy = None if math.isnan(correct) else correct / count
    measured = {"sequences": MEASURED_SEQUENCES, "loss": total / count, "accuracy": accuracy}
    return {**measured, **task.measure_more(model, MEASURED_SEQUENCES, total / count)}


def write_beside(folder: Path, facts: dict[str, object], result: TrainResult, also: Sequence[str] = ()) -> None:
    """Write card, facts and metrics of the run into a model's folder, which lists them, and the files ``also``."""
    (folder / FACTS).write_text(json.dumps(plain(facts), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / CARD).write_text(model_card(facts), encoding="utf-8")
    (folder / "metrics.parquet").write_bytes(table_bytes(result.metrics))
    names = [*also, FACTS, "metrics.parquet"]
    if len(result.watched):
        (folder / WATCHED).write_bytes(table_bytes(result.watched))
        names.append(WATCHED)
    list_files(folder, names)


def model_card(facts: dict[str, Any]) -> str:
    """Return the card, in Markdown."""
    return "\n".join(
        [
            f"# {facts['name']}",
            "",
            facts["summary"],
            "",
            *_about(facts),
            "",
            f"## Held-out measurements ({facts['heldout']['sequences']:,} sequences)",
            "",
            "| what | value |",
            "|---|---|",
            *(f"| {what} | {value} |" for what, value in _measurements(facts["heldout"])),
            "",
            "## Licence",
            "",
            *(f"- text of {name}: {licence}" for name, licence in facts["data"]["licences"].items()),
            "- the weights: MIT, as kvlens",
            "",
        ]
    )


def _about(facts: dict[str, Any]) -> list[str]:
    recipe, training = facts["recipe"], facts["recipe"]["training"]
    data, run = facts["data"], facts["training"]
    settings = ", ".join(f"{name} {value}" for name, value in recipe["task_settings"].items() if value is not None)
    lines = [
        f"- **Architecture**: {architecture(facts['config'])}; {facts['n_parameters']:,} parameters, stored in "
        f"{recipe['stored_dtype']}.",
        f"- **Task**: `{recipe['task']}` ({settings}); {data['source']}.",
        f"- **Reproduce**: `{facts['command']}` (seed {training['seed']}).",
        f"- **Training**: {run['steps']:,} steps of {training['batch_size']} sequences, AdamW, peak learning rate "
        f"{training['learning_rate']:g}, {training['schedule']}, forward pass in {training['precision']}; stopped by "
        f"{run['stopped_by']}. The weights are those of step {run['best_step']:,}, which had the lowest loss on "
        f"{training['eval_sequences']} held-out sequences.",
    ]
    if training["max_minutes"] is not None:
        lines[2] += " The time budget makes the number of steps depend on the machine."
    if "corpus_hash" in data:
        versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
        lines.append(
            f"- **Text**: {data['characters']['train']:,} characters to train on, {data['characters']['heldout']:,} held out "
            f"by module, deduplicated; {versions}; sha256 {data['corpus_hash']}."
        )
    return lines


def architecture(cfg: dict[str, Any]) -> str:
    """A configuration in one line."""
    if "layer_types" in cfg:
        kinds = ", ".join(kind.replace("_", " ") for kind in cfg["layer_types"])
        linear = f"{cfg['linear_num_value_heads']} of {cfg['linear_value_head_dim']}"
        return (
            f"Transformers' `{cfg['architectures'][0]}`, layers {kinds}, d_model {cfg['hidden_size']}, "
            f"{cfg['num_attention_heads']} heads of {cfg['head_dim']} (linear: {linear}, convolution of "
            f"{cfg['linear_conv_kernel_dim']}), MLP of {cfg['intermediate_size']}"
        )
    shift = cfg["kv_shift"]
    linear = f"linear attention ({cfg['feature_map']}, normalizer {cfg['normalizer']})"
    up_to = "up to " if cfg.get("n_heads_by_layer") or cfg.get("d_head_by_layer") else ""
    words = [
        f"{cfg['n_layers']} layers" if cfg["n_layers"] > 1 else "1 layer",
        f"d_model {cfg['d_model']}, {up_to}{cfg['n_heads']} heads of {up_to}{cfg['d_head']}",
        linear if cfg["attention"] == "linear" else "softmax attention",
        "no MLP" if cfg["attn_only"] else f"MLP of {cfg['d_mlp']}",
        f"positions {cfg['positional_embedding_type']}",
    ]
    if shift:
        parts = [part for part in ("keys", "values", "queries") if shift[part]]
        words.append(f"KV shift ({', '.join(parts)}; window {shift['window']}, {shift['parametrization']})")
    return ", ".join(words)


def _measurements(held: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("loss over scored positions", f"{held['loss']:.4g} nats" if held["accuracy"] is not None else f"{held['loss']:.4g}")
    ]
    if held["accuracy"] is not None:
        rows.append(("accuracy over scored positions", f"{held['accuracy']:.4%}"))
    if "bits_a_character" in held:
        rows.append(("bits a character", f"{held['bits_a_character']:.3f}"))
    if "n_context" in held:
        rows += [
            (f"loss on {held['n_text']} tokens, no context", f"{held['without']:.4f}"),
            (f"the same after {held['n_context']} tokens of context", f"{held['with_context']:.4f}"),
            ("the same with the context converted to a bias", f"{held['converted']:.4f}"),
            ("gain of the converted context", f"{held['gain']:.4f} nats per token"),
            ("relative error of the converted logits", f"{held['relative_error']:.1e}"),
        ]
    for answers in held.get("answers", ()):
        rows += _answer_rows(answers)
    return rows


def _answer_rows(answers: dict[str, Any]) -> list[tuple[str, str]]:
    hops = {None: "", 1: ", one hop", 2: ", two hops"}[answers.get("hops")]
    about = f"right answers, {answers['n_facts']} facts{hops}"
    rows = [
        (f"{about} ({answers['n_answers']:,} questions), after the story", answers["with_story"]),
        (f"{about}, the story converted to a bias", answers["converted"]),
        (f"{about}, without the story", answers["without_story"]),
        (f"{about}, by chance: any value of the kind", answers["guess"]),
        (f"{about}, by chance: any value of the kind in the story", answers["guess_in_story"]),
    ]
    return [(what, f"{share:.2%}") for what, share in rows if share is not None]


def command_of(recipe: Recipe) -> str:
    """The command that trains ``recipe``: its name, with options for what differs from the recipe of that name."""
    base, words = find_recipe(recipe.name), ["kvlens", "train", recipe.name, "--out", recipe.name]
    for flag, part in (("--task", "task_settings"), ("--model", "model"), ("--set", "training")):
        usual = getattr(base, part)
        changed = {k: v for k, v in getattr(recipe, part).items() if k not in usual or usual[k] != v}
        if changed:
            pairs = (f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in changed.items())
            words += [flag, *map(shlex.quote, pairs)]
    return " ".join(words)

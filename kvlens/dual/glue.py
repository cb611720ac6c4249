"""Fine-tuning a BERT classifier on a local GLUE folder (DUAL app. E.5): CoLA, MRPC, STS-B and RTE, with the metrics of table 1.

The folder holds ``train.tsv`` and ``dev.tsv`` as GLUE distributes them:

| task | columns that are read | metrics |
|---|---|---|
| cola | no header; 2nd: label, 4th: sentence | Matthews correlation |
| mrpc | Quality, #1 String, #2 String | F1, accuracy |
| stsb | sentence1, sentence2, score | Pearson, Spearman |
| rte | sentence1, sentence2, label (entailment, not_entailment) | accuracy |
"""

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from kvlens.errors import KVLensError, nearest

GLUE_METRICS = dict(cola="matthews", mrpc="accuracy", stsb="pearson", rte="accuracy")
"""The metric by which fine-tuned models are compared, by task."""
CHANCE = dict(cola=0.0, mrpc=0.68, stsb=0.0, rte=0.5)
"""That metric of the more frequent label alone."""
GLUE_TASKS = (*GLUE_METRICS,)
RTE_LABELS = {"entailment": 0.0, "not_entailment": 1.0}
Numbers = Float[np.ndarray, " example"]


@dataclass(frozen=True)
class Examples:
    """Sentences, or pairs of them, and labels (classes as whole numbers; scores of stsb from 0 to 5)."""

    first: list[str]
    second: list[str] | None
    labels: Numbers


def read_examples(folder: str | Path, task: str, split: str) -> Examples:
    """``train`` or ``dev`` of a GLUE folder.

    Raises:
        KVLensError: an unknown task (the nearest is suggested), a missing file or column, or an invalid label.
    """
    if task not in GLUE_TASKS:
        raise KVLensError(f"glue: unknown task {task!r}{nearest(task, GLUE_TASKS)}; there are {', '.join(GLUE_TASKS)}")
    path = Path(folder) / f"{split}.tsv"
    if not path.is_file():
        raise KVLensError(f"glue: {path} is missing; give the task's folder as GLUE distributes it, with train.tsv and dev.tsv")
    header = None if task == "cola" else 0
    table = pd.read_csv(path, sep="\t", header=header, dtype=str, quoting=csv.QUOTE_NONE, keep_default_na=False)
    columns: dict[str, tuple[Any, Any, Any]] = {
        "cola": (3, None, 1),
        "mrpc": ("#1 String", "#2 String", "Quality"),
        "stsb": ("sentence1", "sentence2", "score"),
        "rte": ("sentence1", "sentence2", "label"),
    }
    first, second, label = columns[task]
    missing = [name for name in (first, second, label) if name is not None and name not in table.columns]
    if missing or not len(table):
        raise KVLensError(f"glue: {path} has {len(table)} rows and lacks the columns {missing}; expected those of {task}")
    words = table[label].map(RTE_LABELS) if task == "rte" else pd.to_numeric(table[label], errors="coerce")
    if words.isna().any():
        raise KVLensError(f"glue: {path}: {table[label][words.isna()].iloc[0]!r} is no label of {task}")
    return Examples(table[first].tolist(), None if second is None else table[second].tolist(), words.to_numpy(float))


def metrics_of(task: str, predicted: Numbers, labels: Numbers) -> dict[str, float]:
    """The task's metrics. With constant values, Matthews' correlation is 0, as in table 1, and the others are NaN."""
    if task == "stsb":
        ranks = [pd.Series(x).rank().to_numpy() for x in (predicted, labels)]
        return {"pearson": _correlation(predicted, labels), "spearman": _correlation(*ranks)}
    accuracy = float((predicted == labels).mean())
    if task == "cola":
        found = _correlation(predicted, labels)  # of two binary variables
        return {"matthews": 0.0 if math.isnan(found) else found}
    if task == "rte":
        return {"accuracy": accuracy}
    hits = float(((predicted == 1) & (labels == 1)).sum())
    named = float((predicted == 1).sum() + (labels == 1).sum())
    return {"f1": 2 * hits / named if named else math.nan, "accuracy": accuracy}


def fine_tune(
    model: Any,
    tokenizer: Any,
    folder: str | Path,
    task: str,
    *,
    epochs: int = 5,
    batch_size: int = 32,
    learning_rate: float = 2e-5,
    max_length: int = 128,
    seed: int = 0,
) -> pd.DataFrame:
    """Train on ``train.tsv`` and evaluate on ``dev.tsv`` after every epoch; the paper's settings are the defaults.

    Args:
        model: a ``BertForSequenceClassification``, swapped or not, with 1 output for stsb and 2 otherwise; trained in place.
        tokenizer: its tokenizer.
        folder: the task's folder.
        task: "cola", "mrpc", "stsb" or "rte".
        epochs, batch_size, learning_rate, max_length: settings of the training.
        seed: seed for the order of the examples and for dropout.

    Returns:
        One row per epoch: ``epoch`` from 1, ``train_loss``, and the task's metrics on ``dev.tsv``.

    Raises:
        KVLensError: as :func:`read_examples`; a classifier with another number of outputs.
    """
    train, dev = (read_examples(folder, task, split) for split in ("train", "dev"))
    n_outputs = 1 if task == "stsb" else 2
    if model.config.num_labels != n_outputs:
        raise KVLensError(
            f"fine_tune: {task} needs a classifier with {n_outputs} outputs, this one has {model.config.num_labels}"
        )
    optimizer, rows = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True), []
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for epoch in range(1, epochs + 1):
            model.train()
            order, losses = torch.randperm(len(train.labels)), []
            for part in order.split(batch_size):
                scores = _scores(model, tokenizer, train, part.tolist(), max_length)
                wanted = torch.from_numpy(train.labels[part.numpy()]).to(scores.device)
                mse = task == "stsb"
                loss = (scores[:, 0] - wanted.to(scores)).square().mean() if mse else _cross_entropy(scores, wanted)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            figures = metrics_of(task, classify(model, tokenizer, dev, task, batch_size, max_length), dev.labels)
            rows.append({"epoch": epoch, "train_loss": float(np.mean(losses)), **figures})
    return pd.DataFrame(rows)


@torch.no_grad()
def classify(model: Any, tokenizer: Any, examples: Examples, task: str, batch_size: int = 32, max_length: int = 128) -> Numbers:
    """Classes, or scores for stsb, without dropout."""
    model.eval()
    parts = torch.arange(len(examples.labels)).split(batch_size)
    scores = torch.cat([_scores(model, tokenizer, examples, part.tolist(), max_length) for part in parts])
    return (scores[:, 0] if task == "stsb" else scores.argmax(dim=-1)).double().cpu().numpy()


def _scores(model: Any, tokenizer: Any, examples: Examples, rows: list[int], max_length: int) -> torch.Tensor:
    pairs = [[texts[i] for i in rows] for texts in (examples.first, examples.second) if texts is not None]
    inputs = tokenizer(*pairs, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    device = next(model.parameters()).device
    return model(**{name: x.to(device) for name, x in inputs.items()}).logits


def _cross_entropy(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(scores, classes.long())


def _correlation(a: Numbers, b: Numbers) -> float:
    x, y = a - a.mean(), b - b.mean()
    size = math.sqrt(float((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / size if size else math.nan

"""The attention variants inside a Hugging Face BERT classifier, fine-tuned on a local GLUE folder (DUAL app. E.5, table 1).

Every self-attention of a ``BertForSequenceClassification`` (`load_bert`) is replaced by one with the same projections and a
variant of :class:`kvlens.model.AttentionVariantConfig` (`swap_self_attention`). BERT sees all tokens, so a query's negatives
are chosen among all, and the regularised forms are those of self-attention. Ridge is causal here and is refused. Augmented keys
and values are the paper's parallel adapter, whose MLP reads the input x of the block beside the projection:

    v = W_V x + b_V + c W_2 gelu(W_1 x)        d -> 2 d -> d: 768-1536-768 in BERT-base; W_2 starts at 0

A GLUE folder (`fine_tune`) holds ``train.tsv`` and ``dev.tsv`` as GLUE distributes them:

| task | columns that are read | metrics |
|---|---|---|
| cola | no header; 2nd: label, 4th: sentence | Matthews correlation |
| mrpc | Quality, #1 String, #2 String | F1, accuracy |
| stsb | sentence1, sentence2, score | Pearson, Spearman |
| rte | sentence1, sentence2, label (entailment, not_entailment) | accuracy |
"""

import csv
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from transformers import BertForSequenceClassification, PreTrainedTokenizerBase

from kvlens.components.heads import ACTIVATIONS
from kvlens.errors import KVLensError, nearest
from kvlens.files import WEIGHTS, read_json
from kvlens.model import AttentionVariantConfig, Augmented
from kvlens.ops.attention_variants import augment, lowest_scored, mean_of_negatives
from kvlens.pretrained.checkpoint_files import check_checkpoint
from kvlens.pretrained.transformers_model import check_loaded, without_progress_bars
from kvlens.tokenizer import read_tokenizer


class VariantSelfAttention(nn.Module):
    """BERT's self-attention with a variant.

    Args:
        plain: the attention module that it replaces; its projections and dropout are kept, and trained.
        variant: the variant.
        seed: seed for the adapters' initial weights.
    """

    def __init__(self, plain: Any, variant: AttentionVariantConfig, seed: int = 0):
        super().__init__()
        self.query, self.key, self.value, self.dropout = plain.query, plain.key, plain.value, plain.dropout
        self.n_heads, self.d_head, self.variant = plain.num_attention_heads, plain.attention_head_size, variant
        generator, augmented = torch.Generator().manual_seed(seed), variant.augmented
        self.key_adapter = _adapter(plain.key, augmented, generator) if augmented is not None and augmented.keys else None
        self.value_adapter = _adapter(plain.value, augmented, generator) if augmented is not None and augmented.values else None

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Compute what ``BertSelfAttention.forward`` does: [batch, pos, hidden] and the pattern [batch, head, pos, key_pos]."""
        q, k, v = (
            rearrange(whole, "batch pos (head d_head) -> batch head pos d_head", head=self.n_heads)
            for whole in (
                self.query(hidden_states),
                self.key(hidden_states) + self._beside(hidden_states, self.key_adapter),
                self.value(hidden_states) + self._beside(hidden_states, self.value_adapter),
            )
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.d_head)
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device).expand(1, 1, *scores.shape[-2:])
        if attention_mask is not None:
            visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask > torch.finfo(q.dtype).min / 2
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        pattern = self.dropout(scores.softmax(dim=-1))
        z = pattern @ v
        negative, regularised = self.variant.negative, self.variant.regularised
        if negative is not None:
            mean = mean_of_negatives(
                v, lowest_scored(scores, visible.expand(*scores.shape[:1], 1, *scores.shape[2:]), negative.k)
            )
            z = z - negative.beta * (mean if negative.per == "query" else pattern @ mean)
        if regularised is not None:
            own = pattern.diagonal(dim1=-2, dim2=-1)[..., None] * v if regularised.form == "one_step" else v
            z = (z - regularised.alpha * own) / (1 - regularised.alpha if regularised.form == "normalised" else 1)
        return rearrange(z, "batch head pos d_head -> batch pos (head d_head)"), pattern

    def _beside(self, x: Tensor, adapter: nn.ParameterList | None) -> Tensor | float:
        """c MLP(x), which is added to a projection of x; 0 where it has no adapter."""
        settings = self.variant.augmented
        if adapter is None or settings is None or settings.parallel is None:
            return 0.0
        return settings.parallel * augment(x[:, :, None], list(adapter), ACTIVATIONS[settings.activation])[:, :, 0]


def _adapter(projection: nn.Linear, settings: Augmented, generator: torch.Generator) -> nn.ParameterList:
    """Matrices from a projection's input to its output: variance 1 / fan-in, 2 / fan-in after the activation; the last is 0."""
    inner = settings.width or 2 * projection.out_features
    widths = [projection.in_features, *[inner] * (settings.depth - 1), projection.out_features]
    weights = []
    for layer, (a, b) in enumerate(itertools.pairwise(widths)):
        drawn = torch.randn(1, a, b, generator=generator) * ((1.0 if layer == 0 else 2.0) / a) ** 0.5
        weights.append(nn.Parameter(drawn if layer < settings.depth - 1 else torch.zeros_like(drawn)))
    return nn.ParameterList(weights)


def swap_self_attention(model: Any, variant: AttentionVariantConfig | dict[str, Any], seed: int = 0) -> Any:
    """Give every layer of a ``BertForSequenceClassification`` the variant, in place; return the model.

    Args:
        model: a loaded Hugging Face model; its attention is set to the eager form, whose mask is additive.
        variant: an :class:`AttentionVariantConfig`, or a dict of its fields.
        seed: of the initial weights of augmented keys and values.

    Raises:
        KVLensError: ridge attention, augmented keys or values without a ``parallel`` weight, a model that was swapped before.
    """
    variant = variant if isinstance(variant, AttentionVariantConfig) else AttentionVariantConfig(**variant)
    if variant.ridge is not None:
        raise KVLensError("swap_self_attention: ridge attention is solved causally, but BERT's tokens also see later ones")
    if variant.augmented is not None and variant.augmented.parallel is None:
        raise KVLensError(
            "swap_self_attention: an MLP of a trained model's keys or values would undo what their projections have learned "
            "(app. E.5); give augmented a weight c beside them: depth=2, parallel=c"
        )
    layers = model.bert.encoder.layer
    if any(isinstance(layer.attention.self, VariantSelfAttention) for layer in layers):
        raise KVLensError("swap_self_attention: this model already has a variant; load it again")
    model.set_attn_implementation("eager")
    for number, layer in enumerate(layers):
        plain = layer.attention.self
        swapped = VariantSelfAttention(plain, variant, seed + number)
        layer.attention.self = swapped.to(plain.query.weight.device, plain.query.weight.dtype)
    return model


def load_bert(folder: str | Path, n_outputs: int = 2, seed: int = 0) -> tuple[Any, PreTrainedTokenizerBase]:
    """A ``BertForSequenceClassification`` with a new classifier, and its tokenizer, from a folder in Hugging Face's format.

    Nothing is fetched and no code of the folder is run.

    Args:
        folder: with ``config.json``, ``model.safetensors`` and a tokenizer.
        n_outputs: of the classifier: classes, or 1 for a score.
        seed: for the weights of the classifier, which the folder's are not taken for.

    Raises:
        KVLensError: not a BERT, no safetensors, or weights besides the classifier's that are missing or of another shape.
    """
    folder = Path(folder)
    check_checkpoint("load_bert", folder)
    kind = read_json("load_bert", folder / "config.json").get("model_type")
    if kind != "bert":
        raise KVLensError(f"load_bert: {folder} holds a model of type {kind!r}; only BERT's attention can be replaced")
    if not (folder / WEIGHTS).is_file():
        raise KVLensError(f"load_bert: {folder} has no {WEIGHTS}; save the model in that format")
    tokenizer = read_tokenizer(folder)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), without_progress_bars():
        torch.manual_seed(seed)
        model, report = BertForSequenceClassification.from_pretrained(
            folder,
            num_labels=n_outputs,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        own = {name: {key for key in report[name] if _not_the_classifiers(key)} for name in ("missing_keys", "mismatched_keys")}
        check_loaded({**report, **own}, "load_bert: ", str(folder), known=lambda name: name.startswith("cls."))
        model.classifier.weight.data.normal_(0.0, model.config.initializer_range)
        model.classifier.bias.data.zero_()
    return model.float(), tokenizer


def _not_the_classifiers(key: str | tuple[Any, ...]) -> bool:
    return not (key if isinstance(key, str) else key[0]).startswith("classifier.")


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

"""The attention variants inside a Hugging Face BERT classifier, fine-tuned on CoLA (DUAL app. E.5, table 1).

Every self-attention of a ``BertForSequenceClassification`` (`load_bert`) is replaced by one with the same projections and a
variant of :class:`kvlens.model.AttentionVariantConfig` (`swap_self_attention`). BERT sees all tokens, so a query's negatives
are chosen among all, and the regularized forms are those of self-attention. Ridge is causal here and is refused. Augmented keys
and values are the paper's parallel adapter, whose MLP reads the input x of the block beside the projection:

    v = W_V x + b_V + c W_2 gelu(W_1 x)        d -> 2 d -> d: 768-1536-768 in BERT-base; W_2 starts at 0

The folder of CoLA (`fine_tune`) holds ``train.tsv`` and ``dev.tsv`` as GLUE distributes them, without a header: the second
column is the label, the fourth the sentence. The metric is Matthews' correlation.
"""

import csv
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from transformers import BertForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.bert.modeling_bert import BertSelfAttention

from kvlens.components.heads import ACTIVATIONS
from kvlens.errors import KVLensError
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

    def __init__(self, plain: BertSelfAttention, variant: AttentionVariantConfig, seed: int = 0):
        super().__init__()
        self.query, self.key, self.value, self.dropout = plain.query, plain.key, plain.value, plain.dropout
        self.n_heads, self.d_head, self.variant = plain.num_attention_heads, plain.attention_head_size, variant
        generator, augmented = torch.Generator().manual_seed(seed), variant.augmented
        self.key_adapter = _adapter(plain.key, augmented, generator) if augmented is not None and augmented.keys else None
        self.value_adapter = _adapter(plain.value, augmented, generator) if augmented is not None and augmented.values else None

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: object, **kwargs: object
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


def swap_self_attention(
    model: PreTrainedModel, variant: AttentionVariantConfig | dict[str, Any], seed: int = 0
) -> PreTrainedModel:
    """Give every layer of a ``BertForSequenceClassification`` the variant, in place; return the model.

    Args:
        model: a loaded Hugging Face model; its attention is set to the eager form, whose mask is additive.
        variant: an :class:`AttentionVariantConfig`, or a dict of its fields.
        seed: of the initial weights of augmented keys and values.

    Raises:
        KVLensError: ridge attention, augmented keys or values without a ``parallel`` weight.
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
    model.set_attn_implementation("eager")
    for number, layer in enumerate(layers):
        plain = layer.attention.self
        swapped = VariantSelfAttention(plain, variant, seed + number)
        layer.attention.self = swapped.to(plain.query.weight.device, plain.query.weight.dtype)
    return model


def load_bert(folder: str | Path, seed: int = 0) -> tuple[BertForSequenceClassification, PreTrainedTokenizerBase]:
    """A ``BertForSequenceClassification`` with a new classifier, and its tokenizer, from a folder in Hugging Face's format.

    Nothing is fetched and no code of the folder is run.

    Args:
        folder: with ``config.json``, ``model.safetensors`` and a tokenizer.
        seed: for the weights of the classifier of two classes, which the folder's are not taken for.

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
            num_labels=2,
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


def _not_the_classifiers(key: str | tuple[str, ...]) -> bool:
    return not (key if isinstance(key, str) else key[0]).startswith("classifier.")


LONGEST = 128
"""Tokens of a sentence."""
Numbers = Float[np.ndarray, " example"]


def read_examples(folder: str | Path, split: str) -> tuple[list[str], Numbers]:
    """The sentences of ``train`` or ``dev`` of a folder of CoLA, and whether each is acceptable, 1 or 0."""
    path = Path(folder) / f"{split}.tsv"
    table = pd.read_csv(path, sep="\t", header=None, dtype=str, quoting=csv.QUOTE_NONE, keep_default_na=False)
    return table[3].tolist(), pd.to_numeric(table[1]).to_numpy(float)


def matthews(predicted: Numbers, labels: Numbers) -> float:
    """Matthews' correlation of two binary variables; 0 where one of them is constant, as in table 1."""
    x, y = predicted - predicted.mean(), labels - labels.mean()
    size = math.sqrt(float((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / size if size else 0.0


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    epochs: int = 5,
    batch_size: int = 32,
    learning_rate: float = 2e-5,
    seed: int = 0,
) -> pd.DataFrame:
    """Train on ``train.tsv`` and evaluate on ``dev.tsv`` after every epoch; the paper's settings are the defaults.

    Args:
        model: a ``BertForSequenceClassification``, swapped or not, with two classes; trained in place.
        tokenizer: its tokenizer.
        folder: of CoLA.
        epochs, batch_size, learning_rate: settings of the training.
        seed: seed for the order of the examples and for dropout.

    Returns:
        One row per epoch: ``epoch`` from 1, ``train_loss``, and ``matthews`` on ``dev.tsv``.

    Raises:
        KVLensError: as :func:`read_examples`.
    """
    (train, train_labels), (dev, dev_labels) = (read_examples(folder, split) for split in ("train", "dev"))
    optimizer, rows = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True), []
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for epoch in range(1, epochs + 1):
            model.train()
            order, losses = torch.randperm(len(train)), []
            for part in order.split(batch_size):
                scores = _scores(model, tokenizer, [train[i] for i in part.tolist()])
                wanted = torch.from_numpy(train_labels[part.numpy()]).to(scores.device)
                loss = torch.nn.functional.cross_entropy(scores, wanted.long())
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            found = matthews(_classify(model, tokenizer, dev, batch_size), dev_labels)
            rows.append({"epoch": epoch, "train_loss": float(np.mean(losses)), "matthews": found})
    return pd.DataFrame(rows)


@torch.no_grad()
def _classify(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: list[str], batch_size: int) -> Numbers:
    """The classes, without dropout."""
    model.eval()
    parts = (sentences[i : i + batch_size] for i in range(0, len(sentences), batch_size))
    scores = torch.cat([_scores(model, tokenizer, part) for part in parts])
    return scores.argmax(dim=-1).double().cpu().numpy()


def _scores(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: list[str]) -> Float[Tensor, "sentence 2"]:
    inputs = tokenizer(sentences, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
    device = next(model.parameters()).device
    return model(**{name: x.to(device) for name, x in inputs.items()}).logits

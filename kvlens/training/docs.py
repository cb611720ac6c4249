"""The recipe of ``docs-linear``: a small linear-attention model of English documentation, trained in minutes on two cores.

The text is what every installation carries (see :mod:`kvlens.training.corpus`), so the recipe runs without a download.
"""

import json
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from kvlens.files import write_folder
from kvlens.model import HookedKVTransformer, HookedKVTransformerConfig, KVShiftConfig
from kvlens.model.storage import check_model_folder
from kvlens.training.context import ContextEffect, context_effect
from kvlens.training.corpus import DocsCorpus, Document, build_docs_corpus
from kvlens.training.data import TokenWindows
from kvlens.training.tokenizer import train_bpe_tokenizer
from kvlens.training.trainer import TrainResult, heldout_loss, train

N_CONTEXT, N_TEXT = 256, 64


@dataclass(frozen=True)
class DocsRecipe:
    """Sizes and settings; the defaults are those of the shipped model."""

    vocab_size: int = 1024
    n_layers: int = 4
    d_model: int = 192
    d_head: int = 32
    window: int = 512
    batch: int = 16
    steps: int = 100_000
    max_minutes: float = 28.0
    learning_rate: float = 2.5e-3
    weight_decay: float = 0.1
    eval_every: int = 250
    eval_windows: int = 96
    seed: int = 0
    autocast: bool = True
    packages: tuple[str, ...] = ("stdlib", "numpy", "torch", "transformers")


def train_docs_linear(
    folder: str | Path, recipe: DocsRecipe | None = None, *, overwrite: bool = False, progress: bool = True
) -> ContextEffect:
    """Build the corpus, train tokenizer and model, measure, and write model, card and metrics to ``folder``.

    Args:
        folder: where the model goes; written only when all is done.
        recipe: sizes and settings.
        overwrite: replace a kvlens model that stands there.
        progress: show a progress bar.

    Returns:
        The held-out effect of 256 tokens of context on the 64 that follow, measured on the model as saved.

    Raises:
        KVLensError: the folder is not empty, or training went wrong.
    """
    recipe, folder = recipe or DocsRecipe(), Path(folder)
    check_model_folder(folder, overwrite=overwrite)  # now, not after the training
    tqdm.write("Reading the docstrings of this installation ...")
    corpus = build_docs_corpus(recipe.packages)
    model = HookedKVTransformer(*_config_and_tokenizer(corpus, recipe))
    training, heldout = (TokenWindows.from_texts(_texts(part), model.tokenizer) for part in (corpus.train, corpus.heldout))
    generator = torch.Generator().manual_seed(recipe.seed)
    eval_windows = heldout.consecutive(N_CONTEXT + N_TEXT, recipe.eval_windows)
    result = train(
        model,
        lambda: training.sample(recipe.batch, recipe.window, generator),
        steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        max_minutes=recipe.max_minutes,
        evaluate=lambda m: heldout_loss(m, eval_windows),
        eval_every=recipe.eval_every,
        autocast=recipe.autocast,
        progress=progress,
    )
    with tempfile.TemporaryDirectory() as scratch:
        model.save(Path(scratch) / "model", stored_dtype=torch.float16)
        saved = HookedKVTransformer.load(Path(scratch) / "model")
        all_windows = heldout.consecutive(N_CONTEXT + N_TEXT)
        effect = context_effect(saved, all_windows, N_CONTEXT)
        loss = heldout_loss(saved, all_windows)
        facts = _facts(recipe, corpus, training, heldout, saved, result, loss, effect, len(all_windows))
        (Path(scratch) / "model" / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
        (Path(scratch) / "model" / "training.csv").write_text(result.metrics.to_csv(index=False, float_format="%.6g"))
        (Path(scratch) / "model" / "MODEL_CARD.md").write_text(model_card(facts))
        write_folder(folder, lambda temporary: shutil.copytree(Path(scratch) / "model", temporary, dirs_exist_ok=True))
    return effect


def _config_and_tokenizer(corpus: DocsCorpus, recipe: DocsRecipe) -> tuple[HookedKVTransformerConfig, Any]:
    tokenizer = train_bpe_tokenizer(_texts(corpus.train), recipe.vocab_size)
    cfg = HookedKVTransformerConfig(
        model_name="docs-linear",
        n_layers=recipe.n_layers,
        d_model=recipe.d_model,
        d_head=recipe.d_head,
        n_ctx=recipe.window,
        d_vocab=len(tokenizer),
        act_fn="gelu",
        normalization_type="LN",
        positional_embedding_type="rotary",
        attention="linear",
        feature_map="elu_plus_one",
        normalizer="kernel",
        kv_shift=KVShiftConfig(),
        seed=recipe.seed,
    )
    return cfg, tokenizer


def _texts(documents: list[Document]) -> list[str]:
    return [document.text for document in documents]


def _facts(
    recipe: DocsRecipe,
    corpus: DocsCorpus,
    training: TokenWindows,
    heldout: TokenWindows,
    model: HookedKVTransformer,
    result: TrainResult,
    loss: float,
    effect: ContextEffect,
    n_windows: int,
) -> dict[str, Any]:
    """What the card says and ``training.json`` holds."""
    n_parameters = sum(p.numel() for p in model.parameters())
    bits_per_char = loss / heldout.chars_per_token / math.log(2)
    return {
        "name": "docs-linear",
        "command": "kvlens train docs-linear --out docs-linear",
        "recipe": {**recipe.__dict__, "packages": list(recipe.packages)},
        "n_parameters": n_parameters,
        "corpus": corpus.summary(),
        "tokens": {"train": len(training), "heldout": len(heldout)},
        "training": {"steps": result.steps, "stopped_by": result.stopped_by, "best_step": result.best_step},
        "heldout": {
            "windows": n_windows,
            "tokens_a_window": N_CONTEXT + N_TEXT,
            "loss_nats_a_token": loss,
            "bits_a_character": bits_per_char,
            "n_context": N_CONTEXT,
            "n_text": N_TEXT,
            "loss_text_without_context": effect.without,
            "loss_text_with_context": effect.with_context,
            "loss_text_converted": effect.converted,
            "gain_nats_a_token": effect.gain,
            "relative_error_of_logits": effect.relative_error,
        },
    }


def model_card(facts: dict[str, Any]) -> str:
    """The model card, in Markdown."""
    corpus, held, recipe = facts["corpus"], facts["heldout"], facts["recipe"]
    versions = ", ".join(f"{name} {version}" for name, version in corpus["versions"].items())
    licences = "\n".join(f"- {name}: {licence}" for name, licence in corpus["licences"].items())
    return f"""# {facts["name"]}

A small language model of English software documentation, for trying prompt-to-weights conversion on real text. It is good
at sounding like documentation and knows nothing.

- **Architecture**: {recipe["n_layers"]} layers, d_model {recipe["d_model"]}, heads of {recipe["d_head"]}, linear attention
  (elu + 1, kernel normaliser, RoPE after the feature map), KV shift over one predecessor, {facts["n_parameters"]:,}
  parameters, stored in float16; byte-level BPE of {recipe["vocab_size"]:,} tokens.
- **Reproduce**: `{facts["command"]}` (seed {recipe["seed"]}; {recipe["max_minutes"]:g} minutes on two cores, so that another
  machine takes another number of steps and gives a somewhat other model).
- **Text**: docstrings and help topics as installed: {versions}.
  {corpus["characters"]["train"]:,} characters to train on,
  {corpus["characters"]["heldout"]:,} held out by module, deduplicated. sha256 {corpus["corpus_hash"]}.
- **Training**: {facts["training"]["steps"]:,} steps of {recipe["batch"]} x {recipe["window"]} tokens, AdamW, peak learning rate
  {recipe["learning_rate"]:g}, cosine; the weights of step {facts["training"]["best_step"]:,} had the lowest loss on
  {recipe["eval_windows"]} of the held-out windows measured below, so that the loss there is chosen, if by a hair.

## Held-out measurements ({held["windows"]} windows of {held["tokens_a_window"]} tokens)

| what | value |
|---|---|
| loss | {held["loss_nats_a_token"]:.3f} nats a token ({held["bits_a_character"]:.3f} bits a character) |
| loss on {held["n_text"]} tokens, no context | {held["loss_text_without_context"]:.4f} |
| the same after {held["n_context"]} tokens of context | {held["loss_text_with_context"]:.4f} |
| the same with the context converted to a bias | {held["loss_text_converted"]:.4f} |
| gain of the converted context | {held["gain_nats_a_token"]:.4f} nats a token |
| relative error of the converted logits | {held["relative_error_of_logits"]:.1e} |

## Licences of the text

{licences}

The weights are released under the MIT licence of kvlens.
"""

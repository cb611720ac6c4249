"""The headline figures of a report, of JSON's types: what stands in ``summary.json``."""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.explanation import Explained, in_words
from kvlens.kv_bias import BiasFit, KVBias
from kvlens.kv_bias.recall import Recall
from kvlens.model import HookedKVTransformer, KVModel
from kvlens.texts import stripped, token_texts
from kvlens.viz._text import percent

CONDITIONS = ("with_prompt", "converted", "without_prompt")


def conversion_figures(bias: KVBias, errors: pd.DataFrame) -> dict[str, Any]:
    """How exact the conversion is, over the whole text."""
    return {
        "approximation": None if bias.fit is None else _approximation(bias.fit),
        "held_out": None if bias.fit is None or bias.fit.answers is None else bias.fit.answers.to_dict(),
        "recall": None if bias.fit is None or bias.fit.recall is None else _recall_figures(bias.fit.recall),
        "relative_error": float((errors["squared_error"].sum() / errors["squared_norm"].sum()) ** 0.5),
        "rounding_error": float(errors["rounding_error"].iloc[0]),
        "exact_to_rounding": bool(errors["exact_to_rounding"].iloc[0]) if bias.fit is None else None,
        "max_abs_error": float(errors["max_abs_error"].max()),
        "argmax_agreement": float(errors["argmax_agrees"].mean()),
    }


def _recall_figures(recall: Recall) -> dict[str, Any]:
    """How much the bias still knows of the prompt's sentences."""
    sentences = json.loads(recall.table().to_json(orient="records"))
    return {"n_words": len(recall.words), "share": recall.share, "in_words": recall.summary(), "sentences": sentences}


def _approximation(fit: BiasFit) -> str:
    """How an approximate conversion was made, in a few words."""
    if fit.n_keys is None:
        return f"{fit.method}, then {'; '.join(fit.history)}"
    polished = fit.settings.get("polish_steps", 0)
    asked = fit.settings.get("n_keys", fit.settings.get("n_features"))
    size = float(fit.n_keys.double().mean()) if asked is None else asked
    return f"{fit.method}, {size:.4g} features per head" + (f", {polished} steps of polishing" if polished else "")


def answer_figures(explained: Explained) -> dict[str, Any]:
    """The explanation of an answer: in words, and everything that it found."""
    return {"explanation": in_words(explained), **json.loads(explained.to_json())}


def continuation_figures(
    model: KVModel, text: Int[Tensor, " pos"], logits: dict[str, Float[Tensor, "pos d_vocab"]]
) -> list[dict[str, Any]]:
    """The most probable token after the text with the prompt and, where it is another, that without it; with their
    probabilities in both conditions."""
    p = torch.stack([logits[name][-1].double().softmax(dim=-1).cpu() for name in ("with_prompt", "without_prompt")])
    tokens = [token for i, token in enumerate(p.argmax(dim=-1)) if i == 0 or token != p[0].argmax()]
    return [
        {
            "token": stripped(token_texts(model, torch.cat([text.cpu(), token[None]]))[-1]),
            "p_with_prompt": float(p[0, token]),
            "p_without_prompt": float(p[1, token]),
        }
        for token in tokens
    ]


def continuation_in_a_sentence(figures: list[dict[str, Any]]) -> str:
    """What the model continues with, from `kvlens.report.summary.continuation_figures`, where nothing is explained."""
    first, *other = figures
    p, p_without = percent(first["p_with_prompt"]), percent(first["p_without_prompt"])
    if not other:
        return f"After the text the model continues with {first['token']!r}: {p} with the prompt, {p_without} without it."
    return (
        f"After the text the model continues with {first['token']!r} ({p}; {p_without} without the prompt); without the prompt "
        f"it would continue with {other[0]['token']!r} ({percent(other[0]['p_without_prompt'])})."
    )


def effect_figures(effect: pd.DataFrame) -> dict[str, Any]:
    """Means over the text in each condition, and the loss that the prompt saves."""
    means = effect.groupby("condition")[["kl", "argmax_agrees", "loss"]].mean()
    figures = {
        condition: {
            "kl_from_with_prompt": float(means.loc[condition, "kl"]),
            "next_token_agreement": float(means.loc[condition, "argmax_agrees"]),
            "loss_nats_per_token": float(means.loc[condition, "loss"]),
        }
        for condition in CONDITIONS
    }
    losses = {condition: figures[condition]["loss_nats_per_token"] for condition in CONDITIONS}
    return {**figures, "gain_nats_per_token": losses["without_prompt"] - losses["converted"]}


def versions() -> dict[str, str]:
    """Of Python and the packages that computed the report."""
    packages = ("kvlens", "torch", "transformer-lens", "transformers", "pandas")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _without_folder(name: str) -> str:
    """A model's name without the folder that it was read from: reports are shared. "owner/name" stays."""
    path = Path(name).expanduser()
    return path.name if path.is_absolute() or name.startswith((".", "~")) or path.exists() else name


def heads_in_words(model: dict[str, Any]) -> str:
    """How many heads the layers of :func:`model_facts` have."""
    n = model["n_heads"]
    return " or ".join(map(str, sorted(set(n)))) if isinstance(n, list) else str(n)


def n_parameters(model: Any) -> int:
    """The model's parameters; an unembedding that is the embedding in its checkpoint counts once, though we hold it twice."""
    twice = isinstance(model, HookedKVTransformer) and model.cfg.tie_word_embeddings
    return sum(p.numel() for p in model.parameters()) - (model.W_U.numel() if twice else 0)


def model_facts(model: Any, name: str | None) -> dict[str, Any]:
    """The model's name, size, dtype, device and fingerprint."""
    return {
        "name": name or _without_folder(str(model.cfg.model_name)),
        "n_layers": model.cfg.n_layers,
        "n_heads": getattr(model.cfg, "n_heads_by_layer", None) or model.cfg.n_heads,
        "d_head": getattr(model.cfg, "d_head_by_layer", None) or model.cfg.d_head,
        "n_parameters": n_parameters(model),
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "device": str(model.cfg.device),
        "fingerprint": model.fingerprint().to_json(),
    }

"""What stands in ``summary.json``: the headline figures of a report, of JSON's types, and notes in sentences."""

import json
import math
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.conversion.prompt import length_note
from kvlens.explanation import Explained, in_words
from kvlens.kv_bias import BiasFit, KVBias
from kvlens.kv_bias.fit import Recall
from kvlens.model import HookedKVTransformer, KVModel
from kvlens.texts import stripped, token_texts
from kvlens.viz._text import percent

SHOWN_CONDITIONS = ("with_prompt", "converted", "without_prompt")
SHOWN_WHOLE = 1024
"""Up to this many prompt tokens the page shows nearly everything."""
HARMED = 3
"""Number of positions listed where the prompt hurts most."""


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
    steps = {"moving keys": fit.settings.get("key_steps", 0), "polishing": fit.settings.get("polish_steps", 0)}
    asked = fit.settings.get("n_keys", fit.settings.get("n_features"))
    size = float(fit.n_keys.double().mean()) if asked is None else asked
    return ", ".join(
        [f"{fit.method}, {size:.4g} features per head", *(f"{n} steps of {what}" for what, n in steps.items() if n)]
    )


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
    """What the model says next, from `kvlens.report.summary.continuation_figures`, where nothing is explained."""
    first, *other = figures
    p, p_without = percent(first["p_with_prompt"]), percent(first["p_without_prompt"])
    if not other:
        return f"The model continues with {first['token']!r}: {p} with the prompt, {p_without} without it."
    return (
        f"The model continues with {first['token']!r} ({p}; {p_without} without the prompt); without the prompt "
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
        for condition in SHOWN_CONDITIONS
    }
    losses = {condition: figures[condition]["loss_nats_per_token"] for condition in SHOWN_CONDITIONS}
    return {**figures, "gain_nats_per_token": losses["without_prompt"] - losses["converted"]}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that computed the report."""
    packages = ("kvlens", "torch", "transformer-lens", "transformers", "pandas")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _without_folder(name: str) -> str:
    """A model's name without the folder that it was read from: reports are shared. "owner/name" stays."""
    path = Path(name).expanduser()
    return path.name if path.is_absolute() or name.startswith((".", "~")) or path.exists() else name


def name_of_text(summary: dict[str, Any]) -> str:
    """What the text is: behind a chat without a text, the answer."""
    return "text" if summary["generation"]["begun"] == summary["text"]["text"] else "answer"


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


# --- notes ---


def notes_on(model: KVModel, prompt: Tensor, effect: pd.DataFrame, bias: KVBias) -> list[str]:
    """All notes that apply, one or two sentences each.

    Args:
        model: the model of the report.
        prompt: [pos].
        effect: the table of :func:`kvlens.analyses.prompt_effect`.
        bias: the converted prompt.
    """
    notes = (
        length_note(model, len(prompt)),
        keys_note(bias, len(prompt)),
        harm_note(effect),
        _page_note(len(prompt)),
    )
    return [note for note in notes if note is not None]


def keys_note(bias: KVBias, n_prompt: int) -> str | None:
    """A note if a fit uses fewer keys than it was given, with the reason."""
    if bias.fit is None or bias.fit.method != "landmark" or bias.fit.n_keys is None:
        return None
    n_keys, ratio = (bias.fit.settings[name] for name in ("n_keys", "ratio"))
    asked = min(n_prompt, math.ceil(ratio * n_prompt) if n_keys is None else n_keys)
    given, used = asked * bias.fit.n_keys.numel(), int(bias.fit.n_keys.sum())
    if used == given:
        return None
    return (
        f"Of the {given:,} keys of all heads, {given - used:,} are unused: the fit has no negative weights, so a key whose "
        "best weight would be negative gets weight 0."
    )


def harm_note(effect: pd.DataFrame) -> str | None:
    """A note if the prompt raises the mean loss on the text, with the positions where it does so most."""
    wide = effect.pivot(index="position", columns="condition", values="loss")  # noqa: PD010
    harm = (wide["converted"] - wide["without_prompt"]).dropna()
    if harm.empty or harm.mean() <= 0:
        return None
    tokens = effect.loc[effect["condition"] == "converted"].set_index("position")["next_token"]
    worst = ", ".join(
        f"{tokens[place]!r} at {place} (+{harm[place]:.2f})" for place in harm.nlargest(HARMED).index if harm[place] > 0
    )
    return (
        f"The prompt hurts: the mean loss on the text is {harm.mean():.3f} nats per token higher with it than without, at "
        f"{int((harm > 0).sum())} of {len(harm)} positions. Largest increases: {worst}."
    )


def _page_note(n_prompt: int) -> str | None:
    """A note that the figures do not show every token of a long prompt."""
    if n_prompt <= SHOWN_WHOLE:
        return None
    return (
        f"The page shows the prompt's {n_prompt:,} tokens in blocks of neighbors, and only the most important in arcs and "
        "attention patterns; figures say what they omit. kvlens.analyses.bias_positions has the numbers of every token."
    )

"""Notes in a report: the prompt is too long, raises the loss, or has keys that a fit does not use."""

import math

import pandas as pd
from torch import Tensor

from kvlens.conversion.prompt import length_note
from kvlens.kv_bias import KVBias
from kvlens.model import KVModel

SHOWN_WHOLE = 1024
"""Up to this many prompt tokens the page shows nearly everything."""
HARMED = 3
"""Number of positions listed where the prompt hurts most."""


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

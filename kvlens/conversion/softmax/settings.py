"""Options for the text on which an approximate conversion is fitted and measured."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any

from torch import Tensor

from kvlens.checks import Seed, Within

MOST_ASKED = 2**24
"""Upper limit for features, steps and texts: a larger number is a typing error, or would take years."""


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options for the reference text, which represents text that may follow the prompt.

    Attributes:
        reference: None for both of the following: "prompt", the prompt repeated (behind an instruction where the tokenizer has
            a chat template), and "own", the model's own continuations of the prompt. Or other text: a string; tokens [pos] or
            [text, pos]; a list of strings, of tokens, or of pairs (question, answer); or a function of the model and the
            prompt's tokens [batch, pos] that returns one of these.
        n_continuations: number of continuations that the model samples at temperature 1.
        continuation_length: number of tokens in each.
        n_held_out: number of further continuations, not used for fitting, on which errors are measured: of the heads, and of
            the model's answers (``bias.fit.answers``); 0 skips the answers and measures the heads on one. Each is read four
            times.
        seed: seed for the continuations and for anything else in a method that is random.
    """

    reference: str | Tensor | list | Callable | None = None
    n_continuations: Annotated[int, Within(2, MOST_ASKED)] = 24
    continuation_length: Annotated[int, Within(2, MOST_ASKED)] = 64
    n_held_out: Annotated[int, Within(0, MOST_ASKED)] = 3
    seed: Seed = 0

    def to_json(self) -> dict[str, Any]:
        """The options as JSON types; a given reference text is not stored, only the fact that it was given."""
        names = {None: "prompt and own continuations", "prompt": "prompt", "own": "own continuations"}
        given = self.reference if self.reference is None or isinstance(self.reference, str) else "given"
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "reference"}
        return {**kept, "reference": names.get(given, "given")}

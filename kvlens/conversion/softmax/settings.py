"""Options for the text on which an approximate conversion is fitted and measured."""

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
        reference: None for the model's own continuations of the prompt, sampled at temperature 1; "prompt" for the prompt
            repeated; any other string, or tokens [pos] or [text, pos], for that text.
        n_continuations: number of continuations that the model samples.
        continuation_length: number of tokens in each.
        n_held_out: number of further continuations, not used for fitting, on which the model's answers are measured
            (``bias.fit.answers``); 0 skips this. Each is read three times: 3 texts of 64 tokens cost as much as 576 tokens
            of a prompt.
        seed: seed for the continuations and for anything else in a method that is random.
    """

    reference: str | Tensor | None = None
    n_continuations: Annotated[int, Within(2, MOST_ASKED)] = 24
    continuation_length: Annotated[int, Within(2, MOST_ASKED)] = 64
    n_held_out: Annotated[int, Within(0, MOST_ASKED)] = 3
    seed: Seed = 0

    def to_json(self) -> dict[str, Any]:
        """The options as JSON types; a given reference text is not stored, only the fact that it was given."""
        reference = "own continuations" if self.reference is None else "given"
        reference = "prompt" if isinstance(self.reference, str) and self.reference == "prompt" else reference
        return {**{f.name: getattr(self, f.name) for f in fields(self) if f.name != "reference"}, "reference": reference}

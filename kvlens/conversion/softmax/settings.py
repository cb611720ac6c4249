"""Where the text comes from that an approximate conversion is fitted to and measured on."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

from torch import Tensor

from kvlens.checks import Seed, Within

MOST_ASKED = 2**24
"""Of features, steps and texts: more is a slip of the hand, or takes years."""


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Reference text: what may follow the prompt.

    Attributes:
        reference: None for the model's own continuations of the prompt, sampled at temperature 1; "prompt" for the prompt read
            again; another string, or tokens [pos] or [text, pos], for that text.
        n_continuations: how many of its own continuations the model writes.
        continuation_length: of how many tokens each is.
        n_held_out: on how many more continuations, which no fit reads, the answers are measured (``bias.fit.answers``); 0
            measures none. They are read three times: 3 texts of 64 tokens cost as much as a prompt of 576.
        seed: of the continuations, and of whatever else is random in a method.
    """

    reference: str | Tensor | None = None
    n_continuations: Annotated[int, Within(2, MOST_ASKED)] = 24
    continuation_length: Annotated[int, Within(2, MOST_ASKED)] = 64
    n_held_out: Annotated[int, Within(0, MOST_ASKED)] = 3
    seed: Seed = 0

    def to_json(self) -> dict[str, Any]:
        """The options as JSON's types; of a given reference text only that it was given."""
        reference = "own continuations" if self.reference is None else "given"
        reference = "prompt" if isinstance(self.reference, str) and self.reference == "prompt" else reference
        return {**{f.name: getattr(self, f.name) for f in fields(self) if f.name != "reference"}, "reference": reference}

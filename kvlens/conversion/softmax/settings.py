"""Where the text comes from that an approximate conversion is fitted to and measured on."""

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from kvlens.arguments import check_seed, check_whole

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
    n_continuations: int = 24
    continuation_length: int = 64
    n_held_out: int = 3
    seed: int = 0

    def __post_init__(self):
        self.check_whole("n_continuations", 2)
        self.check_whole("continuation_length", 2)
        self.check_whole("n_held_out", 0)
        check_seed(f"{type(self).__name__}: seed", self.seed)

    def check_whole(self, name: str, least: int) -> None:
        """Raise KVLensError unless the option is a whole number of at least ``least``."""
        check_whole(f"{type(self).__name__}: {name}", getattr(self, name), least, MOST_ASKED)

    def to_json(self) -> dict[str, Any]:
        """The options as JSON's types; of a given reference text only that it was given."""
        reference = "own continuations" if self.reference is None else "given"
        reference = "prompt" if isinstance(self.reference, str) and self.reference == "prompt" else reference
        return {**{f.name: getattr(self, f.name) for f in fields(self) if f.name != "reference"}, "reference": reference}

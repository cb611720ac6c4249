"""The options of a softmax conversion, checked once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from torch import Tensor

from kvlens.arguments import check_choice, check_flag, check_number, check_seed, check_whole
from kvlens.errors import KVLensError, nearest, warn
from kvlens.ops.landmarks import CRITERIA, Criterion

Method = Literal["exact", "landmark", "random", "taylor", "learned"]
METHODS = ("exact", "landmark", "random", "taylor", "learned")
MOST_ASKED = 2**24
"""Of features, steps and texts: more is a slip of the hand, or takes years."""
Reference = str | Tensor | None


class SoftmaxChoices(TypedDict, total=False):
    """The keyword arguments of :func:`kvlens.convert_prompt` that are for softmax attention."""

    method: Method
    n_features: int | None
    ratio: float | None
    budget: Literal["equal", "greedy"]
    reference: Reference
    n_continuations: int
    continuation_length: int
    n_held_out: int
    polish_steps: int
    texts_per_step: int
    objective: Literal["logits", "kl"]
    keys: Criterion
    fit: bool
    random_feature_kind: Literal["orthogonal", "iid"]
    layer_by_layer: bool
    seed: int
    verbose: bool


@dataclass(frozen=True)
class SoftmaxOptions:
    """How the prompt of a softmax model is converted; see :func:`kvlens.convert_prompt`.

    ``keys``, ``fit``, ``random_feature_kind``, ``layer_by_layer`` and ``objective`` are there for comparisons: their defaults
    are what measured best.
    """

    method: Method = "exact"
    n_features: int | None = None
    ratio: float | None = None
    budget: Literal["equal", "greedy"] = "equal"
    reference: Reference = None
    n_continuations: int = 24
    continuation_length: int = 64
    n_held_out: int = 3
    polish_steps: int = 0
    texts_per_step: int = 16
    objective: Literal["logits", "kl"] = "logits"
    keys: Criterion = "output"
    fit: bool = True
    random_feature_kind: Literal["orthogonal", "iid"] = "orthogonal"
    layer_by_layer: bool = False
    seed: int = 0
    verbose: bool = True

    def __post_init__(self):
        check_choice("convert_prompt: method", self.method, METHODS)
        check_choice("convert_prompt: budget", self.budget, ("equal", "greedy"))
        check_choice("convert_prompt: objective", self.objective, ("logits", "kl"))
        check_choice("convert_prompt: keys", self.keys, CRITERIA)
        check_choice("convert_prompt: random_feature_kind", self.random_feature_kind, ("orthogonal", "iid"))
        for name, least in (
            ("n_continuations", 2),
            ("continuation_length", 2),
            ("n_held_out", 0),
            ("texts_per_step", 1),
            ("polish_steps", 0),
        ):
            check_whole(f"convert_prompt: {name}", getattr(self, name), least, MOST_ASKED)
        for name in ("fit", "layer_by_layer", "verbose"):
            check_flag(f"convert_prompt: {name}", getattr(self, name))
        check_seed("convert_prompt: seed", self.seed)
        if self.n_features is not None and self.ratio is not None:
            raise KVLensError("convert_prompt: give n_features or ratio, not both")
        if self.n_features is not None:
            check_whole("convert_prompt: n_features", self.n_features, 1, MOST_ASKED)
        if self.ratio is not None:
            check_number("convert_prompt: ratio", self.ratio)
            if not 0 < self.ratio <= 1:
                raise KVLensError(f"convert_prompt: ratio is a share of the prompt's keys, 0 < ratio <= 1, got {self.ratio}")
        needs_size = self.method in ("landmark", "random", "learned")
        if needs_size and self.n_features is None and (self.ratio is None or self.method != "landmark"):
            raise KVLensError(f'convert_prompt: method="{self.method}" needs n_features=, the features per key-value head')
        if not needs_size and (self.n_features is not None or self.ratio is not None):
            raise KVLensError(
                f'convert_prompt: method="{self.method}" has no number of features to choose; method="landmark" has'
            )
        if self.polish_steps and self.method != "landmark":
            raise KVLensError(f'convert_prompt: polish_steps belong to method="landmark", not to "{self.method}"')

    @classmethod
    def of(cls, choices: Mapping[str, Any]) -> "SoftmaxOptions":
        """From keyword arguments.

        Raises:
            KVLensError: an argument that does not exist (the nearest is named), or does not go with the others.
        """
        known = {f.name for f in fields(cls)}
        for name in choices:
            if name not in known:
                raise KVLensError(f"convert_prompt: no argument is called {name!r}{nearest(name, known)}")
        return cls(**choices)

    def n_keys(self, n_tokens: int) -> int:
        """Virtual keys per key-value head for a prompt of so many tokens, on average; at most one per token."""
        return min(self._wanted(n_tokens), n_tokens)

    def keeps_all(self, lengths: Sequence[int]) -> bool:
        """Whether every key of every prompt is to be kept, so that nothing is left to fit. Warns where more are asked for."""
        above = [n for n in lengths if self._wanted(n) > n]
        if above:
            warn(
                f"convert_prompt: {self._wanted(above[0])} virtual keys for a prompt of {above[0]} tokens: all {above[0]} are "
                "kept, which is exact"
            )
        return all(self._wanted(n) >= n for n in lengths)

    def _wanted(self, n_tokens: int) -> int:
        return self.n_features if self.n_features is not None else math.ceil(self.ratio * n_tokens)  # type: ignore[operator]

    def to_json(self) -> dict[str, Any]:
        """The options as JSON's types."""
        reference = "own continuations" if self.reference is None else "given"
        reference = "prompt" if isinstance(self.reference, str) and self.reference == "prompt" else reference
        left_out = ("reference", "verbose", "method")
        rest = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        return {**rest, "reference": reference}

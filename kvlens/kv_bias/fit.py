"""What an approximate conversion did: on what it was fitted, what it cost, how far off it is on text that it did not see."""

import itertools
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from kvlens.errors import KVLensError


@dataclass(frozen=True, eq=False)
class BiasFit:
    """The record of one fit. Errors are relative, root mean square over the held-out queries.

    Attributes:
        method: of :func:`kvlens.convert_prompt`.
        settings: its options, as they were used.
        n_reference_tokens: queries that the fit saw, per layer and query head.
        n_held_out_tokens: queries that it did not see, on which the errors were measured.
        prompt_passes: forward passes over the prompt, in units of one pass over its tokens.
        reference_passes: forward passes over (and generation of) the reference text, in units of one pass over the prompt.
        seconds: wall-clock time by step.
        n_keys: virtual keys (or features) with a weight per layer and key-value head.
        output_error: of each head's output z, per layer and query head.
        mass_error: of the prompt's share of the normaliser, per layer and query head.
    """

    method: str
    settings: dict[str, Any]
    n_reference_tokens: int
    n_held_out_tokens: int
    prompt_passes: float
    reference_passes: float
    seconds: dict[str, float]
    n_keys: Int[Tensor, "layer *batch kv_head"]
    output_error: Float[Tensor, "layer *batch head"]
    mass_error: Float[Tensor, "layer *batch head"]

    TENSORS: ClassVar[tuple[str, ...]] = ("n_keys", "output_error", "mass_error")

    def select_prompt(self, index: int) -> "BiasFit":
        """The record of one prompt of a batch."""
        return replace(self, **{name: getattr(self, name)[:, index] for name in self.TENSORS})

    def rows(self) -> list[dict[str, Any]]:
        """One row per layer, query head (and prompt of a batch): ``n_keys``, ``output_error``, ``mass_error``."""
        group = self.output_error.shape[-1] // self.n_keys.shape[-1]
        keys = self.n_keys.repeat_interleave(group, dim=-1)
        rows = []
        for index in itertools.product(*map(range, self.output_error.shape)):
            layer, *prompt, head = index
            place = {"layer": layer, **({"prompt": prompt[0]} if prompt else {}), "head": head}
            errors = {name: float(getattr(self, name)[index]) for name in ("output_error", "mass_error")}
            rows.append({**place, "n_keys": int(keys[index]), **errors})
        return rows

    def to_json(self) -> dict[str, Any]:
        """The fields that are not tensors, as JSON's types."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self.TENSORS}

    def to_tensors(self) -> dict[str, Tensor]:
        """The fields that are."""
        return {name: getattr(self, name) for name in self.TENSORS}

    @classmethod
    def read(cls, plain: dict[str, Any], tensors: dict[str, Tensor]) -> "BiasFit":
        """What :meth:`to_json` and :meth:`to_tensors` gave.

        Raises:
            KVLensError: a field is missing.
        """
        missing = {f.name for f in fields(cls)} - {*plain, *tensors}
        if missing:
            raise KVLensError(f"KVBias.load: the record of the fit lacks {', '.join(sorted(missing))}")
        return cls(**{f.name: {**plain, **tensors}[f.name] for f in fields(cls)})

    def __repr__(self) -> str:
        return (
            f"BiasFit({self.method}, {self.n_reference_tokens} reference tokens, {self.prompt_passes:.3g} prompt passes, "
            f"{sum(self.seconds.values()):.3g} s, output error {float(self.output_error.mean()):.3g} held out)"
        )

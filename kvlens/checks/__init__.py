"""Argument checking: every call must match what the signature declares (types, ranges, shapes).

A call that does not match raises an error before the function runs. The error names the function, the expected and the given
value, and the shapes of tensors that do not match. Everything is declared by annotations::

    @checked
    def attend(
        q: Float[Tensor, "batch pos head d"],
        k: Float[Tensor, "batch key kv_head d"],
        kind: Literal["causal", "full"] = "causal",
        n_landmarks: Annotated[int, Within(1, 4096)] | None = None,
    ): ...

A module checks at its door: ``doors(__name__)`` at its end checks every call of its public functions that comes from outside
kvlens. kvlens' own calls are not checked: an op takes a few microseconds, and a check would be a tenth of that.

Shapes are written in jaxtyping's syntax and parsed by jaxtyping. Shapes that have passed are cached, so that a check of an op's
arguments takes a microsecond or two.
"""

from kvlens.checks.signature import checked, doors
from kvlens.checks.values import INT_MAX, Count, Finite, Seed, Within, ensure, one_of

__all__ = ["INT_MAX", "Count", "Finite", "Seed", "Within", "checked", "doors", "ensure", "one_of"]

"""One checker of arguments: what a signature declares - names, types, ranges, shapes - holds in every call.

A call that does not fit is refused before anything else happens: a misspelled name with the function, the nearest name and the
arguments there are; a wrong value with what was expected and what came; tensors that do not belong together with their shapes.
Annotations say everything::

    @checked(head="kv_head")
    def attend(
        q: Float[Tensor, "batch pos head d"],
        k: Float[Tensor, "batch key kv_head d"],
        kind: Literal["causal", "full"] = "causal",
        n_landmarks: Annotated[int, Within(1, 4096)] | None = None,
    ): ...

The grammar of shapes is jaxtyping's, and jaxtyping reads it. Shapes that were found to fit are remembered, so that a call of an
op costs a microsecond or two.
"""

from kvlens.checks.signature import checked, unknown_argument
from kvlens.checks.values import MOST, Count, Finite, Seed, Within, ensure, one_of

__all__ = ["MOST", "Count", "Finite", "Seed", "Within", "checked", "ensure", "one_of", "unknown_argument"]

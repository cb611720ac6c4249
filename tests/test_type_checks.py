"""The cheaper type checks refuse what jaxtyping's own refuse."""

import beartype
import jaxtyping
import pytest
from jaxtyping import Float
from torch import Tensor, zeros
from type_checks import ORIGINAL, holds, is_array, is_quoted, jaxtyped

check = jaxtyped(typechecker=beartype.beartype)
REFUSED = jaxtyping.TypeCheckError


@pytest.fixture(autouse=True)
def _checked():
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", False)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


class Example:
    def __init__(self, size: int):
        self.size = size

    @check
    @property
    def wrong(self) -> str:
        return self.size

    @check
    @classmethod
    def of(cls, sizes: list[int]) -> "Example":
        return cls(sum(sizes))

    @check
    @staticmethod
    def twice(x: Float[Tensor, "a b"], y: Float[Tensor, "b a"]) -> Float[Tensor, "a a"]:
        return x @ y


def shaped(x: Float[Tensor, "a b"] | None, by: dict[str, list[Float[Tensor, " b"]]]) -> int:
    return 0 if x is None else sum(map(len, by.values()))


def plain(x: Tensor | None, times: int = 1, *more: str, **named: float) -> int:
    return times + len(more) + len(named)


def lying() -> int:
    return "no number"


def test_shapes_are_looked_at_by_jaxtyping_wherever_they_stand():
    assert holds(is_array, Float[Tensor, "a"] | None) and holds(is_array, list[tuple[int, Float[Tensor, "a"]]])
    assert not any(holds(is_array, hint) for hint in (Tensor | None, dict[str, int], None, ..., "Example"))
    assert holds(is_quoted, "Example") and holds(is_quoted, list["Example"]) and not holds(is_quoted, Float[Tensor, "a"])
    assert check(shaped)(zeros(2, 3), {"k": [zeros(3)]}) == 1
    for arguments in ((zeros(2), {}), (zeros(2, 3), {"k": [zeros(2)]}), (zeros(2, 3), {"k": [3]})):
        with pytest.raises(REFUSED):
            check(shaped)(*arguments)
    assert Example.twice(zeros(2, 3), zeros(3, 2)).shape == (2, 2)
    with pytest.raises(REFUSED):
        Example.twice(zeros(2, 3), zeros(2, 3))


def test_functions_without_shapes_are_refused_the_same_arguments():
    for wrapped in (check(plain), ORIGINAL(plain, typechecker=beartype.beartype)):
        assert wrapped(zeros(1), 2, "a", b=1.0) == 4
        for arguments, named in (((1,), {}), ((None, "2"), {}), ((None, 1, 3), {}), ((None,), {"b": "c"})):
            with pytest.raises(REFUSED):
                wrapped(*arguments, **named)
    for function in (check(lying), lambda: Example(3).wrong, lambda: Example.of([1.5])):
        with pytest.raises(REFUSED):
            function()
    assert Example.of([1, 2]).size == 3


def test_where_checks_are_off_nothing_is_refused():
    jaxtyping.config.update("jaxtyping_disable", True)
    assert check(lying)() == "no number" and check(shaped)(zeros(2), {}) == 0
    assert check(plain)(1, 2) == 2

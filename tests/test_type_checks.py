"""The cheaper type checks refuse what jaxtyping's own refuse."""

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Iterator
from typing import Literal, Self

import beartype
import jaxtyping
import pytest
from jaxtyping import Float
from torch import Tensor, zeros
from type_checks import MADE, ORIGINAL, holds, is_array, is_left, jaxtyped

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
    assert holds(is_left, "Example") and holds(is_left, list["Example"]) and not holds(is_left, Float[Tensor, "a"])
    assert not holds(is_left, list["Example"], "Example") and holds(is_left, "Example | None", "Example")
    assert holds(is_left, Float[Tensor, "{size}"] | None) and not holds(is_left, Literal["a", "b"])
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


def adder(to: Tensor, kind: type = int):
    """A function of a signature that is another one for another kind."""

    @check
    def add(x: Float[Tensor, "a"], times: kind, *, back: bool = False) -> Float[Tensor, "a"]:
        """Add it."""
        return None if back else to + x * times

    return add


def test_a_function_made_anew_is_checked_as_the_first_and_is_itself():
    before = len(MADE)
    adders = [adder(to) for to in (zeros(2), zeros(2) + 1, zeros(2) + 2)]
    assert len(MADE) == before + 1
    for i, add in enumerate(adders):
        assert add(zeros(2) + 1, 2).tolist() == [i + 2] * 2
        assert add.__name__ == "add" and add.__doc__ == "Add it."
        for arguments, named in (
            ((zeros(2, 2), 1), {}),
            ((zeros(2), 1.5), {}),
            ((zeros(2), 1), {"back": 1}),
            ((zeros(2), 1), {"back": True}),
        ):
            with pytest.raises(REFUSED):
                add(*arguments, **named)
        with pytest.raises(TypeError):
            add(zeros(2))
    with pytest.raises(REFUSED):
        adder(zeros(2), str)(zeros(2), 1)
    with pytest.raises(REFUSED):
        adder(zeros(2))(zeros(2), "1")


def test_nothing_is_kept_alive():
    kept = zeros(2)
    add, gone = adder(kept), weakref.ref(kept)
    assert add(zeros(2), 1) is not None
    del kept, add
    gc.collect()
    assert gone() is None


def sized(n: int, x: Float[Tensor, "{n}"], how: Literal["a", "b"] = "a") -> Float[Tensor, "{n}"]:
    return x


def chosen(x: Float[Tensor, "a"], how: Literal["up", "down"]) -> Float[Tensor, "a"]:
    return x if how == "up" else x[1:]


def test_sizes_that_are_arguments_and_words_of_a_choice():
    assert len(check(sized)(2, zeros(2))) == len(check(chosen)(zeros(2), "up")) == 2
    for function, arguments in ((sized, (3, zeros(2))), (chosen, (zeros(2), "down")), (chosen, (zeros(2), "left"))):
        with pytest.raises(REFUSED):
            check(function)(*arguments)


class Small:
    def times(self, n: int) -> Self:
        return self

    def plus(self, others: list["Small"]) -> "Small":
        return others[0] if others else "nothing"  # type: ignore[return-value]


def test_methods_that_return_their_own_class():
    small = Small()
    assert check(Small.times)(small, 2) is small
    with pytest.raises(REFUSED):
        check(Small.times)(small, "2")
    assert check(Small.plus)(small, [small]) is small
    for others in (["small"], [], small):
        with pytest.raises(REFUSED):
            check(Small.plus)(small, others)


@check
@dataclasses.dataclass(frozen=True)
class Pair:
    x: Float[Tensor, "a b"]
    y: Float[Tensor, " b"]
    name: str | None = None
    before: list["Pair"] = dataclasses.field(default_factory=list)


class Named(Pair):
    """Takes what a pair takes."""


@pytest.mark.parametrize("kind", [Pair, Named])
def test_dataclasses_are_refused_the_same_fields(kind):
    pair = kind(zeros(2, 3), zeros(3), "one")
    assert kind(zeros(2, 3), y=zeros(3), before=[pair]).before == [pair]
    for arguments in (
        (zeros(2, 3), zeros(2)),
        (zeros(2), zeros(2)),
        (zeros(2, 3), zeros(3), 1),
        (zeros(2, 3), zeros(3), None, [1]),
    ):
        with pytest.raises(REFUSED):
            kind(*arguments)
    with pytest.raises(TypeError):
        kind(zeros(2, 3))


@contextlib.contextmanager
@check
def counted(upto: int) -> Iterator[list[int]]:
    yield list(range(upto))


@check
def rows(x: Float[Tensor, "a b"]) -> Iterator[Float[Tensor, " b"]]:
    yield from x


def test_generators_are_refused_when_they_begin():
    with counted(3) as numbers:
        assert numbers == [0, 1, 2]
    assert len(list(rows(zeros(2, 3)))) == 2
    for begin in (lambda: counted("3").__enter__(), lambda: next(rows(zeros(2)))):
        with pytest.raises(REFUSED):
            begin()
    jaxtyping.config.update("jaxtyping_disable", True)
    with counted(True) as numbers:
        assert numbers == [0]


def test_where_checks_are_off_nothing_is_refused():
    jaxtyping.config.update("jaxtyping_disable", True)
    assert Pair(1, 2).x == 1
    assert check(lying)() == "no number" and check(shaped)(zeros(2), {}) == 0
    assert check(plain)(1, 2) == 2

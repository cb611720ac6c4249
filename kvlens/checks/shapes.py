"""Shape checks across tensors, with the full syntax of jaxtyping, as parsed by jaxtyping from the annotations."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

from kvlens.checks.values import UNFIT, axes_in_words, is_array, members
from kvlens.errors import brief


class Expected(NamedTuple):
    """A tensor among the arguments.

    Attributes:
        argument: name of the argument.
        path: path from the argument to the field that is the tensor; empty for the argument itself.
        kind: annotation of the tensor.
        each: whether the argument is a list of such tensors.
        optional: whether it may be None.
    """

    argument: str
    path: tuple[str, ...]
    kind: Any
    each: bool
    optional: bool

    @property
    def order(self) -> int:
        """Sort key: sizes are determined from plain axes first, then from axes that may be broadcast or are calculated."""
        return int("#" in self.kind.dim_str) + 2 * any(hasattr(dim, "elem") for dim in self.kind.dims)

    def given(self, arguments: Mapping[str, Any]) -> list[Any]:
        """The given values; none if it is optional and absent."""
        x: Any = functools.reduce(lambda whole, field: getattr(whole, field, None), self.path, arguments.get(self.argument))
        if x is None and (self.optional or self.argument not in arguments):
            return []
        return list(x) if self.each else [x]


def tensors_in(argument: str, kind: Any, path: tuple[str, ...] = (), optional: bool = False) -> Iterator[Expected]:
    """The tensors that an argument is, contains, or is a list of; none for any other argument."""
    found = [member for member in members(kind) if member is not type(None)]
    if len(found) != 1:
        return
    optional, (one,) = optional or type(None) in members(kind), found
    each = get_origin(one) is Sequence and is_array(get_args(one)[0])
    one = get_args(one)[0] if each else one
    if is_array(one):
        yield Expected(argument, path, one, each, optional)
    elif isinstance(one, type) and issubclass(one, tuple) and hasattr(one, "_fields"):
        for name, of_field in one.__annotations__.items():
            yield from tensors_in(argument, of_field, (*path, name), optional)


def is_decided_by_type(kind: Any) -> bool:
    """Whether shapes, strings and types alone determine if a value fits, so that the result can be cached by them."""
    return all(
        (isinstance(m, type) and m is not Any)
        or get_origin(m) is Callable
        or (get_origin(m) is Literal and all(isinstance(one, str) for one in get_args(m)))
        or (get_origin(m) is Sequence and is_array(get_args(m)[0]))
        for m in members(kind)
    )


def key_of(x: Any, array: Any) -> Any:
    """Cache key of a value that is not a tensor: the shapes of the tensors in it, the string itself, or its type."""
    kind = type(x)
    if kind is float:
        return kind if x == x else UNFIT
    if isinstance(x, tuple | list):
        return (kind, *[one.shape if isinstance(one, array) else key_of(one, array) for one in x])
    return x if kind is str else kind


def belong_together(tensors: Sequence[Expected], arguments: Mapping[str, Any], multiples: Mapping[str, str]) -> bool:
    """Whether each axis has the same size in all tensors, and the axes of ``multiples`` divide each other."""
    sizes: dict[str, Any] = {}
    for tensor in tensors:
        for x in tensor.given(arguments):
            if not isinstance(x, tensor.kind.array_type) or not _fits(tensor.kind, tuple(x.shape), sizes, arguments):
                return False
    pairs = [(sizes[whole], sizes[part]) for whole, part in multiples.items() if whole in sizes and part in sizes]
    return all(part > 0 and whole % part == 0 for whole, part in pairs)


def _fits(kind: Any, shape: tuple[int, ...], sizes: dict[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether a shape matches the annotation as parsed by jaxtyping; new axes are added to ``sizes``."""
    dims, at = kind.dims, kind.index_variadic
    if at is not None:
        stop = len(shape) - (len(dims) - at - 1)
        if stop < at or not _fits_several(dims[at], shape[at:stop], sizes):
            return False
        dims, shape = (*dims[:at], *dims[at + 1 :]), (*shape[:at], *shape[stop:])
    return len(dims) == len(shape) and all(
        _fits_one(dim, size, sizes, arguments) for dim, size in zip(dims, shape, strict=True)
    )


def _fits_one(dim: Any, size: int, sizes: dict[str, Any], arguments: Mapping[str, Any]) -> bool:
    if size == 1 and getattr(dim, "broadcastable", False):
        return True
    if hasattr(dim, "name"):
        return bool(sizes.setdefault(dim.name, size) == size)
    if hasattr(dim, "size"):
        return bool(dim.size == size)
    if not hasattr(dim, "elem"):
        return True
    try:  # calculated from other axes, or, in braces, from arguments
        return bool(eval(eval(f"f{dim.elem!r}", {}, dict(arguments)), {}, dict(sizes)) == size)
    except NameError:  # of a tensor that is absent
        return True


def _fits_several(dim: Any, shape: tuple[int, ...], sizes: dict[str, Any]) -> bool:
    if not hasattr(dim, "name"):
        return True
    if not dim.broadcastable:
        return bool(sizes.setdefault(f"*{dim.name}", shape) == shape)
    whole = sizes.get(f"*{dim.name}")
    other = sizes.get(f"#{dim.name}", ()) if whole is None else whole
    n = max(len(shape), len(other))
    pairs = list(zip((1,) * (n - len(shape)) + shape, (1,) * (n - len(other)) + other, strict=True))
    sizes[f"#{dim.name}"] = tuple(max(pair) if 0 not in pair else 0 for pair in pairs)
    return all(a == b or 1 in (a, b) for a, b in pairs) and whole in (None, sizes[f"#{dim.name}"])


def misfit(tensors: Sequence[Expected], arguments: Mapping[str, Any], multiples: Mapping[str, str]) -> str:
    """A description of what was expected and what was given."""
    expected, came = [], []
    for tensor in sorted(tensors, key=lambda t: list(arguments).index(t.argument) if t.argument in arguments else -1):
        if found := tensor.given(arguments):
            label = ".".join((tensor.argument, *tensor.path))
            expected.append(f"{'each of ' if tensor.each else ''}{label} [{axes_in_words(tensor.kind.dim_str)}]")
            shapes = [str(list(x.shape)) if isinstance(x, tensor.kind.array_type) else brief(x) for x in found]
            came.append(f"{label} {', '.join(shapes)}")
    rules = [f"{whole} a multiple of {part}" for whole, part in multiples.items()]
    return f"expected {', '.join([*expected, *rules])}; got {', '.join(came)}"

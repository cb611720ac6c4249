"""Gram matrices sum_i x_i x_i^T of keys' shares, without N x N numbers where a prompt has more keys than there are queries.

Choosing r of N keys reads the diagonal and one column for each chosen key. :class:`Products` stores the matrix; :class:`Rows`
stores the rows x_i themselves, and computes a column when it is read.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.memory import NUMBERS_AT_ONCE, by_device

T = TypeVar("T", bound=tuple)


@dataclass(frozen=True)
class Products:
    """The products of all pairs of keys."""

    products: Float[Tensor, "cell key key"]

    def diagonal(self) -> Float[Tensor, "cell key"]:
        return self.products.diagonal(dim1=-2, dim2=-1).clone()

    def column(self, j: Int[Tensor, " cell"]) -> Float[Tensor, "cell key"]:
        return self.products[torch.arange(len(j), device=j.device), j]

    def among(self, index: Int[Tensor, "cell r"]) -> Float[Tensor, "cell r r"]:
        every = torch.arange(len(index), device=index.device)[:, None, None]
        return self.products[every, index[:, :, None], index[:, None, :]]

    def times(self, x: Float[Tensor, "cell key d"]) -> Float[Tensor, "cell key d"]:
        return self.products @ x


@dataclass(frozen=True)
class Rows:
    """The rows, in blocks. Products of a block are computed in its dtype, and added in float64."""

    blocks: Sequence[Float[Tensor, "cell row key"]]

    def diagonal(self) -> Float[Tensor, "cell key"]:
        return _total(block.square().sum(dim=1) for block in self.blocks)

    def column(self, j: Int[Tensor, " cell"]) -> Float[Tensor, "cell key"]:
        every = torch.arange(len(j), device=j.device)
        return _total((block[every, :, j][:, None] @ block).squeeze(1) for block in self.blocks)

    def among(self, index: Int[Tensor, "cell r"]) -> Float[Tensor, "cell r r"]:
        some = [block.gather(2, index[:, None].expand(-1, block.shape[1], -1)) for block in self.blocks]
        return _total(x.mT @ x for x in some)

    def times(self, x: Float[Tensor, "cell key d"]) -> Float[Tensor, "cell key d"]:
        return _total(block.mT @ (block @ x.to(block)) for block in self.blocks)


Gram = Products | Rows


def as_rows(n_rows: int, n_keys: int) -> bool:
    """Whether the rows are fewer numbers than the products."""
    return n_rows < n_keys


def by_cell(cells: int, n_rows: int, n_keys: int, device: torch.device) -> bool:
    """Whether the Gram matrices or rows of all cells are more than :data:`NUMBERS_AT_ONCE`: then one cell at a time."""
    return cells * n_keys * min(n_rows, n_keys) > by_device(NUMBERS_AT_ONCE, device)


def concatenated(parts: Iterable[T], make: Callable[..., T]) -> T:
    """Tuples of tensors with a leading cell axis, for all cells."""
    return make(*(torch.cat(x) for x in zip(*parts, strict=True)))


def _total(parts: Iterator[Tensor]) -> Tensor:
    *_, whole = accumulate((x.double() for x in parts), torch.Tensor.add_)
    return whole

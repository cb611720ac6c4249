"""Few keys without most of the padding: the heads of a layer are stored in two groups, each as wide as its widest head.

With unequal budgets a few heads need nearly every key of the prompt, and most need a few. As wide as the widest of the model,
all heads together took 10 to 18 times the keys that they were given; with two widths per layer it is 1.1 times (SmolLM2, at 10
and 5 % of the keys). The rows of all layers and groups lie in one tensor for each name, and a group of a layer is a view:

    block [(batch,) head of the group, r of the group, (d)]
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlens.kv_bias.features import VirtualKeys
from kvlens.kv_bias.ragged import DISTANCE, RAGGED, used_keys

MOST_STORED = 0.9
"""The share of the padded rows up to which groups are worth their second kernel call."""


class Group(NamedTuple):
    """Some key-value heads of a layer, in order, their width, and the first of their rows."""

    heads: tuple[int, ...]
    width: int
    start: int


@dataclass(frozen=True, eq=False)
class KeyGroups:
    """The virtual keys of a bias by groups.

    Attributes:
        layers: the groups of each layer.
        batch: the number of prompts; None for a single one.
        d_phi: the width of the padded tensors.
        rows: b_KV, b_D, keys and distances by their names in a file, [row, ...]; b_KV and b_D may have several rows for each of
            the others, one per query head.
    """

    layers: tuple[tuple[Group, ...], ...]
    batch: int | None
    d_phi: int
    rows: Mapping[str, Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], n_kv_heads: int) -> "KeyGroups | None":
        """The groups of padded tensors; None where these are no more than little larger."""
        if bool((tensors["b_D"] != 0).all()):
            return None
        used = used_keys(tensors["b_KV"], tensors["b_D"], n_kv_heads)
        batch = used.shape[1] if used.dim() == 4 else None
        counts = used.sum(dim=-1) if batch is None else used.sum(dim=-1).amax(dim=1)
        layers, start = [], 0
        for of_layer in counts.clamp(min=1).tolist():
            layers.append(_in_two(of_layer, start, batch or 1))
            start += sum((batch or 1) * len(group.heads) * group.width for group in layers[-1])
        if start > MOST_STORED * used.numel():
            return None
        order = used.int().argsort(dim=-1, descending=True, stable=True)
        rows = {name: _rows(tensors[name], order, layers, after) for name, after in RAGGED.items()}
        return cls(tuple(layers), batch, used.shape[-1], rows)

    def map(self, change: Callable[[Tensor], Tensor]) -> "KeyGroups":
        """The same with ``change``, which keeps shapes, applied to the rows of every name."""
        return replace(self, rows={name: change(rows) for name, rows in self.rows.items()})

    def block(self, name: str, group: Group) -> Tensor:
        """The rows of one group, a view: [(batch,) head, r, ...]."""
        rows, several = self.rows[name], self._rows_per_key(name)
        lead = () if self.batch is None else (self.batch,)
        n = (self.batch or 1) * len(group.heads) * group.width
        block = rows[group.start * several : (group.start + n) * several]
        return block.view(*lead, len(group.heads) * several, group.width, *rows.shape[1:])

    def whole(self, name: str, layer: int | None = None, narrow: bool = False) -> Tensor:
        """Padded: [layer, (batch,) head, d_phi, ...], of all layers or of one; if ``narrow``, only as wide as its widest head.

        Heads with fewer keys repeat their first, with weight 0.
        """
        layers = self.layers if layer is None else self.layers[layer : layer + 1]
        width = max(group.width for groups in layers for group in groups) if narrow else self.d_phi
        rows, several = self.rows[name], self._rows_per_key(name)
        lead = () if self.batch is None else (self.batch,)
        n_heads = several * sum(len(group.heads) for group in layers[0])
        whole = rows.new_zeros(len(layers), *lead, n_heads, width, *rows.shape[1:])
        for of_layer, groups in zip(whole, layers, strict=True):
            for group in groups:
                heads = [head * several + i for head in group.heads for i in range(several)]
                block, rest = self.block(name, group), [slice(None)] * RAGGED[name]
                of_layer[(..., heads, slice(group.width), *rest)] = block
                if name not in ("b_KV", "b_D"):
                    of_layer[(..., heads, slice(group.width, None), *rest)] = block.narrow(-1 - RAGGED[name], 0, 1)
        return whole

    def _rows_per_key(self, name: str) -> int:
        return len(self.rows[name]) // len(self.rows[DISTANCE])


def fields_of_groups(groups: KeyGroups, layer: int | None = None, narrow: bool = False) -> dict[str, Any]:
    """The fields of a bias that groups stand for, of all layers or of one: :meth:`KeyGroups.whole`."""
    b_kv, b_d, keys, distance = (groups.whole(name, layer, narrow) for name in RAGGED)
    return {"b_KV": b_kv, "b_D": b_d, "features": VirtualKeys(keys, distance)}


def _in_two(counts: list[int], start: int, batch: int) -> tuple[Group, ...]:
    """The heads of one layer in the two groups that take the fewest rows, or in one, if that takes no more."""
    by_count = sorted(range(len(counts)), key=counts.__getitem__)
    n, most = len(counts), counts[by_count[-1]]
    narrow = min(range(n), key=lambda i: (i * counts[by_count[i - 1]] if i else 0) + (n - i) * most)
    groups = []
    for heads in filter(None, (by_count[:narrow], by_count[narrow:])):
        groups.append(Group(tuple(sorted(heads)), max(counts[head] for head in heads), start))
        start += batch * len(heads) * groups[-1].width
    return tuple(groups)


def _rows(x: Tensor, order: Tensor, layers: list[tuple[Group, ...]], after: int) -> Tensor:
    """The rows of all groups of a padded tensor; ``order`` names the used keys of each head first."""
    several, head_axis = x.shape[-2 - after] // order.shape[-2], -2 - after
    blocks = []
    for of_layer, first, groups in zip(x, order, layers, strict=True):
        by_head = of_layer.unflatten(head_axis, (-1, several))
        for group in groups:
            heads = torch.tensor(group.heads, device=x.device)
            index = first.index_select(-2, heads)[..., : group.width].unsqueeze(-2)
            index = index if not after else index[..., None]
            rows = torch.take_along_dim(by_head.index_select(head_axis - 1, heads), index, dim=-1 - after)
            blocks.append(rows.reshape(-1, *x.shape[x.dim() - after :]))
    return torch.cat(blocks)

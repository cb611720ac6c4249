"""How a bias is held: padded, in memory without most of the padding, and in a file without any.

Layers with fewer heads than others are filled up with zeros, and in ``b_KV`` all heads have as many virtual keys as the head
with the most, padded with keys of weight 0. With unequal budgets a few heads need nearly every key of the prompt, and most need
a few.

**In memory** the heads of a layer are in two buckets, each as wide as its widest head. As wide as the widest of the model, all
heads together took 10 to 18 times the keys that they were given; with two widths per layer it is 1.1 times (SmolLM2, at 10 and
5 % of the keys). The rows of all layers and buckets lie in one tensor for each name, and a bucket of a layer is a view:

    block [(batch,) head of the bucket, r of the bucket, (d)]

**A file** has only the rows where a key is used. It is one safetensors file, with everything but tensors as JSON in its
metadata, never pickle:

    used [layer, (batch,) kv_head, r]          b_KV, b_D, keys, distance: the rows where ``used``, in its order

``b_KV`` and ``b_D`` of single query heads (after a selection) have the rows of their key-value head.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor

from kvlens.arguments import path_of
from kvlens.errors import KVLensError
from kvlens.files import check_regular, parsed_json, write_atomically
from kvlens.files.tensors import checked_tensor_bytes, read_checked_tensors
from kvlens.kv_bias.features import VirtualKeys, features_from
from kvlens.kv_bias.fields import COUNTS, TENSORS, Fingerprint, recurrent_from
from kvlens.kv_bias.fit import BiasFit, below
from kvlens.kv_bias.layers import padded as padded

B = TypeVar("B")
USED, DISTANCE = "used", "features.distance"
RAGGED = {"b_KV": 1, "b_D": 0, "features.keys": 1, DISTANCE: 0}
"""The tensors that are packed, and how many axes follow the axis of the keys."""


def used_keys(b_kv: Tensor, b_d: Tensor, n_kv_heads: int) -> Bool[Tensor, "layer *batch kv_head r"]:
    """True where a key has a weight or a value for any of the query heads that read it."""
    used = (b_d != 0) | (b_kv != 0).any(dim=-1)
    return used.unflatten(-2, (n_kv_heads, -1)).any(dim=-2)


def without_unused_keys(tensors: Mapping[str, Tensor], n_kv_heads: int) -> dict[str, Tensor]:
    """The tensors of a bias without unused virtual keys; unchanged if every key is used."""
    used = used_keys(tensors["b_KV"], tensors["b_D"], n_kv_heads)
    if bool(used.all()):
        return dict(tensors)
    rows = {name: tensors[name][_of_heads(used, tensors[name], after)] for name, after in RAGGED.items()}
    return {**tensors, **rows, USED: used}


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`without_unused_keys`, except that unused keys are 0, at distance 1.

    Raises:
        ValueError: the numbers of rows do not fit.
    """
    rest = {name: tensor for name, tensor in tensors.items() if name != USED}
    if USED not in tensors:
        return rest
    used = tensors[USED]
    if used.dtype != torch.bool or used.dim() < 3 or not RAGGED.keys() <= rest.keys():
        raise ValueError(f"used must be truth values [layer, (batch,) kv_head, r], got {used.dtype} {list(used.shape)}")
    for name, after in RAGGED.items():
        rows, n = rest[name], int(used.sum())
        group = max(1, len(rows) // max(n, 1)) if name.startswith("b_") else 1  # query heads of a key-value head
        if rows.dim() != 1 + after or len(rows) != n * group:
            raise ValueError(f"{name} holds {len(rows)} rows for {n} virtual keys")
        where = used.repeat_interleave(group, dim=-2)
        whole = rows.new_full((*where.shape, *rows.shape[1:]), 1 if name == DISTANCE else 0)
        whole[where] = rows
        rest[name] = whole
    return rest


def _of_heads(used: Tensor, like: Tensor, after: int) -> Tensor:
    """``used`` repeated for as many heads as ``like`` has."""
    heads = like.shape[-2 - after]
    return used.repeat_interleave(heads // used.shape[-2], dim=-2)


MOST_STORED = 0.9
"""The share of the padded rows up to which buckets are worth their second kernel call."""


class Bucket(NamedTuple):
    """Some key-value heads of a layer, in order, their width, and the first of their rows."""

    heads: tuple[int, ...]
    width: int
    start: int


@dataclass(frozen=True, eq=False)
class KeyBuckets:
    """The virtual keys of a bias by buckets.

    Attributes:
        layers: the buckets of each layer.
        batch: the number of prompts; None for a single one.
        d_phi: the width of the padded tensors.
        rows: b_KV, b_D, keys and distances by their names in a file, [row, ...]; b_KV and b_D may have several rows for each of
            the others, one per query head.
    """

    layers: tuple[tuple[Bucket, ...], ...]
    batch: int | None
    d_phi: int
    rows: Mapping[str, Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], n_kv_heads: int) -> "KeyBuckets | None":
        """The buckets of padded tensors; None where these are no more than little larger."""
        if bool((tensors["b_D"] != 0).all()):
            return None
        used = used_keys(tensors["b_KV"], tensors["b_D"], n_kv_heads)
        batch = used.shape[1] if used.dim() == 4 else None
        counts = used.sum(dim=-1) if batch is None else used.sum(dim=-1).amax(dim=1)
        layers, start = [], 0
        for of_layer in counts.clamp(min=1).tolist():
            layers.append(_in_two(of_layer, start, batch or 1))
            start += sum((batch or 1) * len(bucket.heads) * bucket.width for bucket in layers[-1])
        if start > MOST_STORED * used.numel():
            return None
        order = used.int().argsort(dim=-1, descending=True, stable=True)
        rows = {name: _rows(tensors[name], order, layers, after) for name, after in RAGGED.items()}
        return cls(tuple(layers), batch, used.shape[-1], rows)

    def map(self, change: Callable[[Tensor], Tensor]) -> "KeyBuckets":
        """The same with ``change``, which keeps shapes, applied to the rows of every name."""
        return replace(self, rows={name: change(rows) for name, rows in self.rows.items()})

    def block(self, name: str, bucket: Bucket) -> Tensor:
        """The rows of one bucket, a view: [(batch,) head, r, ...]."""
        rows, several = self.rows[name], self._rows_per_key(name)
        lead = () if self.batch is None else (self.batch,)
        n = (self.batch or 1) * len(bucket.heads) * bucket.width
        block = rows[bucket.start * several : (bucket.start + n) * several]
        return block.view(*lead, len(bucket.heads) * several, bucket.width, *rows.shape[1:])

    def whole(self, name: str, layer: int | None = None, narrow: bool = False) -> Tensor:
        """Padded: [layer, (batch,) head, d_phi, ...], of all layers or of one; if ``narrow``, only as wide as its widest head.

        Heads with fewer keys repeat their first, with weight 0.
        """
        layers = self.layers if layer is None else self.layers[layer : layer + 1]
        width = max(bucket.width for buckets in layers for bucket in buckets) if narrow else self.d_phi
        rows, several = self.rows[name], self._rows_per_key(name)
        lead = () if self.batch is None else (self.batch,)
        n_heads = several * sum(len(bucket.heads) for bucket in layers[0])
        whole = rows.new_zeros(len(layers), *lead, n_heads, width, *rows.shape[1:])
        for of_layer, buckets in zip(whole, layers, strict=True):
            for bucket in buckets:
                heads = [head * several + i for head in bucket.heads for i in range(several)]
                block, rest = self.block(name, bucket), [slice(None)] * RAGGED[name]
                of_layer[(..., heads, slice(bucket.width), *rest)] = block
                if name not in ("b_KV", "b_D"):
                    of_layer[(..., heads, slice(bucket.width, None), *rest)] = block.narrow(-1 - RAGGED[name], 0, 1)
        return whole

    def _rows_per_key(self, name: str) -> int:
        return len(self.rows[name]) // len(self.rows[DISTANCE])


def fields_of_buckets(buckets: KeyBuckets, layer: int | None = None, narrow: bool = False) -> dict[str, Any]:
    """The fields of a bias that buckets stand for, of all layers or of one: :meth:`KeyBuckets.whole`."""
    b_kv, b_d, keys, distance = (buckets.whole(name, layer, narrow) for name in RAGGED)
    return {"b_KV": b_kv, "b_D": b_d, "features": VirtualKeys(keys, distance)}


def _in_two(counts: list[int], start: int, batch: int) -> tuple[Bucket, ...]:
    """The heads of one layer in the two buckets that take the fewest rows, or in one, if that takes no more."""
    by_count = sorted(range(len(counts)), key=counts.__getitem__)
    n, most = len(counts), counts[by_count[-1]]
    narrow = min(range(n), key=lambda i: (i * counts[by_count[i - 1]] if i else 0) + (n - i) * most)
    buckets = []
    for heads in filter(None, (by_count[:narrow], by_count[narrow:])):
        buckets.append(Bucket(tuple(sorted(heads)), max(counts[head] for head in heads), start))
        start += batch * len(heads) * buckets[-1].width
    return tuple(buckets)


def _rows(x: Tensor, order: Tensor, layers: list[tuple[Bucket, ...]], after: int) -> Tensor:
    """The rows of all buckets of a padded tensor; ``order`` names the used keys of each head first."""
    several, head_axis = x.shape[-2 - after] // order.shape[-2], -2 - after
    blocks = []
    for of_layer, first, buckets in zip(x, order, layers, strict=True):
        by_head = of_layer.unflatten(head_axis, (-1, several))
        for bucket in buckets:
            heads = torch.tensor(bucket.heads, device=x.device)
            index = first.index_select(-2, heads)[..., : bucket.width].unsqueeze(-2)
            index = index if not after else index[..., None]
            rows = torch.take_along_dim(by_head.index_select(head_axis - 1, heads), index, dim=-1 - after)
            blocks.append(rows.reshape(-1, *x.shape[x.dim() - after :]))
    return torch.cat(blocks)


FORMAT_VERSION = 6
"""It rises where a field is added that every bias has, or one is gone: older files are then refused, and say how to get newer
ones. An optional field leaves older files readable, and a version of kvlens that does not know it refuses the newer ones."""
FORMAT = "kvlens.KVBias"


def write_bias_file(path: str | Path, bias: Any) -> None:
    """Write a :class:`kvlens.KVBias` to ``path`` atomically.

    Raises:
        KVLensError: the folder does not exist or cannot be written.
    """
    meta: dict[str, Any] = {name: as_numbers(getattr(bias, name)) for name in COUNTS}
    whole = bias.padded()
    tensors = whole.tensors()
    if isinstance(whole.features, VirtualKeys) and not bias.fingerprint.layers_differ:
        tensors = without_unused_keys(tensors, bias.fingerprint.n_kv_heads)
    if whole.features is not None:
        meta |= {"features": whole.features.kind, "fit": None if bias.fit is None else bias.fit.to_json()}
    if bias.fit is not None:
        tensors |= {f"fit.{name}": tensor for name, tensor in bias.fit.to_tensors().items()}
    if bias.recurrent.layers:
        meta["recurrent_layers"] = list(bias.recurrent.layers)
    written = json.dumps({**meta, "fingerprint": bias.fingerprint.to_json()})
    metadata = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "kv_bias": written}
    write_atomically(path, checked_tensor_bytes(tensors, metadata))


def read_bias_file(path: str | Path, kind: Callable[..., B]) -> B:
    """The bias of a file, of the class ``kind``, made of the fields that the file has.

    Raises:
        KVLensError: no such file, not a kvlens bias, incomplete, damaged, or of another format version.
    """
    path = path_of("KVBias.load", path)
    if not path.is_dir():
        check_regular("KVBias.load", path)
    if not path.is_file():
        raise KVLensError(f"KVBias.load: no file at {path}")
    tensors, metadata = read_checked_tensors(path, "KVBias.load", FORMAT, FORMAT_VERSION)
    try:
        return kind(**_fields(path, unpacked(tensors), parsed_json("KVBias.load", path, metadata["kv_bias"])))
    except KVLensError:
        raise
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise KVLensError(f"KVBias.load: {path} is incomplete or damaged ({type(error).__name__}: {error})") from error


def _fields(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> dict[str, Any]:
    known_names = {*COUNTS, *TENSORS, "fingerprint", "features", "fit", "log_scale", "recurrent", "recurrent_layers"}
    unknown = sorted({*meta, *(name.split(".")[0] for name in tensors)} - known_names)
    if unknown:
        raise KVLensError(f"KVBias.load: {path} has {', '.join(unknown)}, which this version does not know; upgrade kvlens")
    missing = [name for name in TENSORS if name not in tensors]
    if missing or set(meta["fingerprint"]) != {f.name for f in fields(Fingerprint)}:
        raise KVLensError(f"KVBias.load: {path} lacks {', '.join(missing) or 'a complete fingerprint'}")
    if not isinstance(meta.get("features", ""), str) or not isinstance(meta.get("fit") or {}, dict):
        raise KVLensError(f"KVBias.load: {path} is damaged: its features or its record of a fit are of another kind")
    fingerprint = Fingerprint.from_json(meta["fingerprint"])
    known: dict[str, Any] = {name: tensors[name] for name in TENSORS} | {"fingerprint": fingerprint}
    known |= {name: torch.tensor(meta[name]) if isinstance(meta[name], list) else meta[name] for name in COUNTS}
    if "features" in meta:
        d_key = fingerprint.d_key or fingerprint.d_head
        known["features"] = features_from(meta["features"], below("features.", tensors), d_key)
        known["log_scale"] = tensors.get("log_scale")
    if meta.get("fit") is not None:
        known["fit"] = BiasFit.read(meta["fit"], below("fit.", tensors))
    return {**known, "recurrent": recurrent_from(meta.get("recurrent_layers", []), below("recurrent.", tensors))}


def as_numbers(value: int | Tensor) -> int | list[int]:
    """A count as Python types: an int, or a list with one int per prompt."""
    return value.tolist() if isinstance(value, Tensor) else value

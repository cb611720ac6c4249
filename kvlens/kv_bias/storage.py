"""How a bias is stored: one safetensors file, with everything but tensors as JSON in its metadata, never pickle.

Layers are stacked; those with fewer or smaller heads than others are filled up with zeros, and all heads have as many virtual
keys as the head with the most. With unequal budgets a few heads need nearly every key of the prompt, and most need a few: where
all layers have heads alike, the file has only the rows where a key is used,

    used [layer, (batch,) kv_head, r]          b_KV, b_D, keys, distance: the rows where ``used``, in its order

``b_KV`` and ``b_D`` of single query heads (after a selection) have the rows of their key-value head.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvlens.arguments import path_of
from kvlens.errors import KVLensError, brief
from kvlens.files import check_regular, parsed_json, write_atomically
from kvlens.files.tensors import checked_tensor_bytes, read_checked_tensors
from kvlens.kv_bias.features import features_from, in_use
from kvlens.kv_bias.fields import COUNTS, Fingerprint
from kvlens.kv_bias.fit import BiasFit, below
from kvlens.kv_bias.layers import Features, Keys, Layer, Recurrence, State, padded

B = TypeVar("B")
TENSORS = ("b_KV", "b_D", *(f"last_{x}" for x in "kvq"))
USED, DISTANCE = "used", "features.distance"
RAGGED = {"b_KV": 1, "b_D": 0, "features.keys": 1, DISTANCE: 0}
"""The tensors that are packed, and how many axes follow the axis of the keys."""


def without_unused_keys(tensors: Mapping[str, Tensor], n_kv_heads: int) -> dict[str, Tensor]:
    """The tensors of a bias without unused virtual keys; unchanged if every key is used."""
    used = in_use(tensors["b_KV"], tensors["b_D"]).unflatten(-2, (n_kv_heads, -1)).any(dim=-2)
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


def stack_of(bias: Any) -> dict[str, Tensor]:
    """The layers of a bias as a tensor for each name, without an axis of prompts for a single one."""
    f, parts = bias.fingerprint, list(bias.attention)
    rows = [layer.last for layer in bias.layers if layer.attention is not None]
    alike = f.layers_differ and f.n_heads == f.n_kv_heads  # rows of key-value heads could not be told from query heads'
    if parts and (alike or len({part.n_heads == heads for part, heads in zip(parts, _n_heads(f), strict=True)}) > 1):
        parts = [part.per_query_head(n) for part, n in zip(parts, _n_heads(f), strict=True)]
    if bias.kind == "virtual_keys":
        parts = [part.widened(bias.d_phi) for part in parts]
    found = {}
    if parts:
        found = {name: padded([getattr(part, name.lower()) for part in parts]) for name in ("b_KV", "b_D")}
        found |= {f"last_{x}": padded([last[x] for last in rows]) for x in "kvq"}
    if parts and bias.kind is not None:
        found["log_scale"] = padded([part.log_scale for part in parts])
        every = [part.features.tensors() for part in parts]
        found |= {f"features.{name}": padded([of[name] for of in every]) for name in every[0]}
    if not parts:
        found = _of_no_attention(bias)
    elif bias.kind == "virtual_keys" and f.layers_differ:  # heads that a layer does not have get its last one's distances
        heads = torch.arange(f.n_kv_heads)
        of_heads = [part.distance[:, heads.clamp(max=part.n_kv_heads - 1).to(part.distance.device)] for part in parts]
        found[DISTANCE] = torch.stack(of_heads)
    recurrent = [layer for layer in bias.layers if layer.state is not None]
    if others := sorted({name for layer in recurrent for name in layer.state.tensors()} - {"state"}):
        raise KVLensError(f"KVBias.save: a file has no names yet for {', '.join(others)} of recurrent layers")
    if recurrent:
        found["recurrent.b_KV"] = padded([layer.state.b_kv for layer in recurrent])
        found["recurrent.conv"] = padded([layer.last["conv"] for layer in recurrent])
    shared = () if bias.kind in (None, "virtual_keys") else tuple(name for name in found if name.startswith("features."))
    return {name: x[:, 0] if bias.single and name not in shared else x for name, x in found.items()}


def _n_heads(f: Fingerprint) -> list[int]:
    return [f.heads[layer][0] for layer in f.attention_layers]


def _of_no_attention(bias: Any) -> dict[str, Tensor]:
    """The empty tensors of a model without attention, with as many virtual keys as the prompt has tokens."""
    f, like, r = bias.fingerprint, bias._some, int(torch.as_tensor(bias.n_prompt_tokens).max())
    lead, n, d = (0, bias.n_rows), f.n_kv_heads, f.d_head
    sizes = {"b_KV": (n, r, d), "b_D": (n, r), "last_k": (0, n, d), "last_v": (0, n, d), "last_q": (0, f.n_heads, d)}
    sizes |= {"log_scale": (n,), "features.keys": (n, r, f.d_key or d)}
    found = {name: like.new_zeros(*lead, *size) for name, size in sizes.items()}
    return {**found, DISTANCE: like.new_zeros(*lead, n, r, dtype=torch.long)}


def layers_of(f: Fingerprint, kind: str | None, numbers: Sequence[int], tensors: Mapping[str, Tensor]) -> tuple[Layer, ...]:
    """The layers of a stack; ``numbers`` are those of the recurrent ones."""
    single = tensors["b_KV"].dim() == 4
    layers = [Layer() for _ in range(f.n_layers)]

    def of(name: str, i: int, *sizes: int) -> Tensor:
        x = tensors[name][i][None] if single else tensors[name][i]
        for axis, n in enumerate(sizes, x.dim() - len(sizes)):
            x = x.narrow(axis, 0, n)
        return x

    by_query_head = tensors["b_KV"].shape[-3] == f.n_heads
    for i, layer in enumerate(f.attention_layers):
        n_heads, n_kv_heads, d_head, d_phi = f.heads[layer]
        heads = n_heads if kind is None or by_query_head else n_kv_heads
        r = d_phi if kind is None else tensors["b_KV"].shape[-2]
        part = State(of("b_KV", i, heads, r, d_head), of("b_D", i, heads, r))
        if kind is not None:
            d_key = f.d_key or d_head
            own = {name: x[i] for name, x in below("features.", tensors).items()}
            if kind == "virtual_keys":
                own = {"keys": of("features.keys", i, n_kv_heads, r, d_key), "distance": of(DISTANCE, i, n_kv_heads, r)}
            made = Keys if kind == "virtual_keys" else Features
            part = made(part.b_kv, part.b_d, of("log_scale", i, n_kv_heads), features_from(kind, own, d_key))  # type: ignore[arg-type]
        last = {x: of(f"last_{x}", i, n_heads if x == "q" else n_kv_heads, d_head) for x in "kvq"}
        layers[layer] = Layer((part,), last)
    for i, layer in enumerate(numbers):
        state = Recurrence(of("recurrent.b_KV", i))
        layers[layer] = Layer((*layers[layer].parts, state), {**layers[layer].last, "conv": of("recurrent.conv", i)})
    return tuple(layers)


FORMAT_VERSION = 6
"""It rises where a field is added that every bias has, or one is gone: older files are then refused, and say how to get newer
ones. An optional field leaves older files readable, and a version of kvlens that does not know it refuses the newer ones, but
reads a record of a fit without it."""
FORMAT = "kvlens.KVBias"


def write_bias_file(path: str | Path, bias: Any) -> None:
    """Write a :class:`kvlens.KVBias` to ``path`` atomically.

    Raises:
        KVLensError: the folder does not exist or cannot be written.
    """
    meta: dict[str, Any] = {name: as_numbers(getattr(bias, name)) for name in COUNTS}
    tensors = stack_of(bias)
    if bias.kind == "virtual_keys" and not bias.fingerprint.layers_differ:
        tensors = without_unused_keys(tensors, bias.fingerprint.n_kv_heads)
    if bias.kind is not None:
        meta |= {"features": bias.kind, "fit": None}
    if bias.fit is not None:
        meta["fit"] = bias.fit.to_json()
        tensors |= {f"fit.{name}": tensor for name, tensor in bias.fit.to_tensors().items()}
    recurrent = [number for number, layer in enumerate(bias.layers) if layer.state is not None]
    if recurrent:
        meta["recurrent_layers"] = recurrent
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


def _fields(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> dict[str, object]:
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
    known: dict[str, Any] = {"fingerprint": fingerprint, "single": tensors["b_KV"].dim() == 4, "record": None}
    known |= {name: torch.tensor(meta[name]) if isinstance(meta[name], list) else meta[name] for name in COUNTS}
    if meta.get("fit") is not None:
        known["record"] = BiasFit.read(meta["fit"], below("fit.", tensors))
    numbers = _recurrent(meta.get("recurrent_layers", []), below("recurrent.", tensors))
    return {**known, "layers": layers_of(fingerprint, meta.get("features"), numbers, tensors)}


def _recurrent(numbers: object, tensors: Mapping[str, Tensor]) -> list[int]:
    """The numbers of the recurrent layers.

    Raises:
        KVLensError: tensors are missing, or not of as many layers as there are numbers, or the numbers are none of layers.
    """
    listed = list(numbers) if isinstance(numbers, list) and all(isinstance(layer, int) for layer in numbers) else [-1]
    known = listed == sorted({*listed}) and min(listed, default=0) >= 0
    known = known and set(tensors) == ({"b_KV", "conv"} if listed else set())
    if not known or any(len(x) != len(listed) for x in tensors.values()):
        raise KVLensError(
            "KVBias.load: recurrent layers are a list of numbers, ascending, and hold b_KV, conv; the file has "
            f"{brief(numbers)} and {', '.join(sorted(tensors))}"
        )
    return listed


def as_numbers(value: int | Tensor) -> int | list[int]:
    """A count as Python types: an int, or a list with one int per prompt."""
    return value.tolist() if isinstance(value, Tensor) else value

"""Activations of long texts, read one segment at a time, and numbers of heads where layers have different numbers of them.

Analyzing what a text reads from a prompt takes the text's queries, normalizers and probes first, and then the prompt's keys and
values, each once. So the tokens are run twice, in segments that go through all layers before the next one starts
(:func:`kvlens.run_in_segments`), and only each layer's part of the result is kept. If the keys and values of all segments fit
in memory, or if the text is run in one piece (it is short, or softmax, or hooked), it is run once, and they are kept for the
second pass.

The heads of a hybrid model's layers are held in one tensor with as many heads as the largest layer has, with NaN (or zeros)
where a layer has no such head. Tables have rows for the heads that exist.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import HookedKVTransformer, KVModel, run_in_segments
from kvlens.model import heads_per_layer
from kvlens.terminal import progress_bar

OnProgress = Callable[[float], None]
Found = Mapping[str, Tensor]
"""A segment's activations by the last part of the hook point's name, positions first: [pos, head, ...]."""
SegmentVisit = Callable[[int, int, Found], None]
"""Called with the layer, the position of the segment's first token, and the segment's activations."""

MAX_COLUMNS = 4096
"""For a longer prompt, tables with a column per prompt token are summed over blocks of neighboring tokens."""
PER_TEXT = ("hook_v_shift_coef", "hook_last_v")
"""Hook points without positions; ``hook_last_v`` fires only in the first segment."""
Z = "hook_z"
"""The last hook point of a layer's attention: when it fires, the others have."""


_LISTENER: ContextVar[OnProgress | None] = ContextVar("listener", default=None)
KEPT_BYTES = 2**27
"""The most bytes of segments that are kept for a second pass."""


class Looks:
    """One text of one model, whose activations can be visited several times.

    Args:
        model: the model, with the bias attached that the text continues.
        tokens: [pos].
        names: hook points of each layer's attention, such as ``hook_v``; those that do not fire are skipped.
        again: those of them that are needed after the first visit; only these are kept.
        after_layers: a hook point after the layers, visited as if it were one more layer; None for none.
        segment_length: as in :func:`kvlens.run_in_segments`.
        n_looks: number of visits.
        on_progress: called with the fraction of all visits that is done.
    """

    def __init__(
        self,
        model: HookedKVTransformer,
        tokens: Int[Tensor, " pos"],
        names: Sequence[str],
        *,
        again: Sequence[str] = (),
        after_layers: str | None = None,
        segment_length: int | None = None,
        n_looks: int = 2,
        on_progress: OnProgress | None = None,
    ):
        self.model, self.tokens = model, tokens
        self._names, self._again = [*(name for name in names if name != Z), Z], again
        self._after_layers = after_layers
        self._segment_length, self._on_progress = segment_length, on_progress
        self._n_looks, self._done = n_looks, 0
        self._kept: list[tuple[int, int, Found]] | None = None

    def look(self, visit: SegmentVisit) -> None:
        """Call ``visit`` on each layer of each segment, segment by segment."""
        if self._kept is None:
            self._kept = self._run(visit)
        else:
            for layer, first, found in self._kept:
                visit(layer, first, found)
        self._done += 1
        self._tell(0.0)

    def _run(self, visit: SegmentVisit) -> list[tuple[int, int, Found]] | None:
        """Run one pass; return what may be visited again, or None if that is too much to keep."""
        n_layers, kept = self.model.cfg.n_layers, _Kept(len(self.tokens)) if self._n_looks > 1 else None
        held: dict[str, Tensor] = {}
        seen: Counter[int] = Counter()

        def hold(x: Tensor, hook: Any) -> None:
            held[hook.name.rsplit(".", 1)[-1]] = _of_one_text(x, hook.name)

        def show(layer: int, n_tokens: int) -> None:
            found = dict(held)
            held.clear()
            first = seen[layer]
            seen[layer] += n_tokens
            if kept is not None and layer < n_layers:
                kept.add(layer, first, n_tokens, {name: x for name, x in found.items() if name in self._again})
            visit(layer, first, found)

        def of_layer(x: Tensor, hook: Any) -> None:
            hold(x, hook)
            show(int(hook.name.split(".")[1]), x.shape[1])

        def behind(x: Tensor, hook: object) -> None:
            hold(x, hook)
            show(n_layers, x.shape[1])

        hooks: list[tuple[str, Callable[..., object]]] = [
            (f"blocks.{layer}.attn.{name}", of_layer if name == Z else hold)
            for layer in range(n_layers)
            for name in self._names
        ]
        hooks += [] if self._after_layers is None else [(self._after_layers, behind)]
        run_in_segments(
            self.model,
            self.tokens,
            hooks,
            segment_length=self._segment_length,
            stop_at_layer=n_layers if self._after_layers is None else None,
            on_progress=self._tell,
        )
        return None if kept is None else kept.shown

    def _tell(self, done: float) -> None:
        if self._on_progress is not None and self._done + done <= self._n_looks:
            self._on_progress((self._done + done) / self._n_looks)


class _Kept:
    """The visited activations of a text of ``n_tokens``, as long as they fit in memory."""

    def __init__(self, n_tokens: int):
        self.n_tokens, self.n_bytes = n_tokens, 0
        self.shown: list[tuple[int, int, Found]] | None = []

    def add(self, layer: int, first: int, n_tokens: int, found: Found) -> None:
        self.n_bytes += sum(x.untyped_storage().nbytes() for x in found.values())
        if self.shown is None or (self.n_bytes > KEPT_BYTES and n_tokens < self.n_tokens):
            self.shown = None
        else:
            self.shown.append((layer, first, found))


def rows_at(looks: Looks, positions: Mapping[str, Int[Tensor, " position"]]) -> list[dict[str, Tensor]]:
    """Activations at chosen positions, from one visit.

    Args:
        looks: the text.
        positions: for each hook point the positions, ascending; those of :data:`PER_TEXT` are always returned whole.

    Returns:
        For each layer, and for the hook point after the layers, the rows by hook point, [position, ...], of those that fired.
    """
    found_by_layer: list[dict[str, list[Tensor]]] = [{} for _ in range(looks.model.cfg.n_layers + 1)]

    def visit(layer: int, first: int, found: Found) -> None:
        for name, x in found.items():
            if name in PER_TEXT:
                found_by_layer[layer].setdefault(name, [x])
            elif name in positions:
                here = positions[name].to(x.device)
                here = here[(here >= first) & (here < first + len(x))] - first
                found_by_layer[layer].setdefault(name, []).append(x[here])

    looks.look(visit)
    return [{name: torch.cat(rows) for name, rows in found.items()} for found in found_by_layer]


@dataclass(frozen=True)
class PromptColumns:
    """The prompt's tokens in at most :data:`MAX_COLUMNS` columns of ``block`` neighboring tokens; the last may have fewer."""

    n_tokens: int
    block: int

    @classmethod
    def of(cls, n_tokens: int) -> "PromptColumns":
        """Use as few tokens per column as possible: one, up to :data:`MAX_COLUMNS` tokens."""
        return cls(n_tokens, math.ceil(n_tokens / MAX_COLUMNS))

    def __len__(self) -> int:
        return math.ceil(self.n_tokens / self.block)

    def add(self, sums: Float[Tensor, "*rest column"], values: Float[Tensor, "*rest pos"], first: int) -> None:
        """Add the values of consecutive tokens, starting at ``first``, to the sums of their columns, in place."""
        columns = torch.arange(first, first + values.shape[-1], device=sums.device) // self.block
        sums.index_add_(-1, columns, values.to(sums))


@contextlib.contextmanager
def progress(what: str) -> Iterator[OnProgress]:
    """What an analysis calls with the fraction done: it moves a bar, or is that of :func:`telling`."""
    listener = _LISTENER.get()
    if listener is not None:
        yield listener
        return
    with progress_bar(what) as bar:
        yield lambda done: bar(what, done)


@contextlib.contextmanager
def telling(listener: OnProgress) -> Iterator[None]:
    """Inside, analyses show no bar, and ``listener`` is called with the fraction done."""
    before = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(before)


def part_of(tell: OnProgress, number: int, n: int) -> OnProgress:
    """What one of ``n`` equal parts calls with the fraction of it that is done."""
    return lambda done: tell((number + done) / n)


def _of_one_text(x: Tensor, name: str) -> Tensor:
    """Remove the batch axis, and put positions first."""
    if name.endswith("shift_coef"):
        return x
    return x[0].transpose(0, 1) if name.endswith("hook_pattern") else x[0]


# --- numbers of heads ---


def stack_layers(of_layers: Sequence[Tensor], fill: float = 0.0) -> Float[Tensor, " layer *rest"]:
    """Stack one tensor per layer, with ``fill`` for heads, and dimensions of heads, that a layer does not have."""
    largest = [max(sizes) for sizes in zip(*(x.shape for x in of_layers), strict=True)]
    whole = of_layers[0].new_full((len(of_layers), *largest), fill)
    for layer, x in enumerate(of_layers):
        whole[layer][tuple(slice(n) for n in x.shape)] = x
    return whole


def zeros_by_head(model: KVModel, *shape: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, "layer head *shape"]:
    """Zeros for every head of a model, on the CPU, and NaN for heads that a layer does not have."""
    counts = heads_per_layer(model)
    zeros = torch.full((len(counts), max(counts), *shape), torch.nan, dtype=dtype)
    for layer, count in enumerate(counts):
        zeros[layer, :count] = 0
    return zeros


def heads_of_model(model: KVModel) -> tuple[Int[Tensor, " row"], Int[Tensor, " row"]]:
    """Layer and head of every head, in order: an index into tensors [layer, head, ...]."""
    counts = torch.tensor(heads_per_layer(model))
    exists = torch.arange(int(counts.max())) < counts[:, None]
    layer, head = exists.nonzero(as_tuple=True)
    return layer, head

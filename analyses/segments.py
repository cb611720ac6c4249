"""Looking into a long text, a segment at a time, for the analyses of whole prompts.

What a text reads from a prompt needs the text's side first - queries, normalizers, probes - and then the prompt's keys and
values, each once. So the text is run twice, in segments that go through all layers before the next one starts
(:func:`kvlens.run_in_segments`), and of each segment only that layer's part of the answer is kept. Where the keys and values of
all segments fit in memory, and where the text runs whole (it is short, or softmax, or hooked), it is run once, and they
are kept for the second look.
"""

import contextlib
import math
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from kvlens import HookedKVTransformer, run_in_segments

Progress = Callable[[float], None]
Found = Mapping[str, Tensor]
"""A segment's activations by the last part of the hook point's name, positions first: [pos, head, ...]."""
Visit = Callable[[int, int, Found], None]
"""Called with the layer, the position of the segment's first token, and what was found there."""

MAX_COLUMNS = 4096
"""Of a longer prompt, what would have a column per token and a row per text token is summed over blocks of neighbors."""
PER_TEXT = ("hook_v_shift_coef", "hook_last_v")
"""What has no positions; ``hook_last_v`` comes with the first segment alone."""
Z = "hook_z"
"""The last hook point of a layer's attention: when it fires, the others have."""
BAR_AFTER = 2.0
"""Seconds after which a pass that is still running shows a bar."""


KEPT_BYTES = 2**27
"""What the segments of a text may take that are kept for a second look."""


class Looks:
    """One text of one model, whose activations can be looked at several times.

    Args:
        model: with the bias attached that the text continues.
        tokens: [pos].
        names: hook points of each layer's attention, such as ``hook_v``; those that do not fire are not found.
        again: those of them that are looked at after the first time; all that is kept of a text.
        after_layers: a hook point after the layers, visited as if it were one more layer; None for none.
        segment_length: as in :func:`kvlens.run_in_segments`.
        n_looks: how many there will be.
        on_progress: called with the fraction of all looks that is done.
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
        on_progress: Progress | None = None,
    ):
        self.model, self.tokens = model, tokens
        self._names, self._again = [*(name for name in names if name != Z), Z], again
        self._after_layers = after_layers
        self._segment_length, self._on_progress = segment_length, on_progress
        self._n_looks, self._done = n_looks, 0
        self._kept: list[tuple[int, int, Found]] | None = None

    def look(self, visit: Visit) -> None:
        """Show each layer of each segment to ``visit``, segment by segment."""
        if self._kept is None:
            self._kept = self._run(visit)
        else:
            for layer, first, found in self._kept:
                visit(layer, first, found)
        self._done += 1
        self._tell(0.0)

    def _run(self, visit: Visit) -> list[tuple[int, int, Found]] | None:
        """One pass; what may be shown again, or None where that is too much to keep."""
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

        def behind(x: Tensor, hook: Any) -> None:
            hold(x, hook)
            show(n_layers, x.shape[1])

        hooks: list[tuple[str, Any]] = [
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
    """What was shown of a text of ``n_tokens``, as long as it fits in memory."""

    def __init__(self, n_tokens: int):
        self.n_tokens, self.n_bytes = n_tokens, 0
        self.shown: list[tuple[int, int, Found]] | None = []

    def add(self, layer: int, first: int, n_tokens: int, found: Found) -> None:
        self.n_bytes += sum(x.untyped_storage().nbytes() for x in found.values())
        if self.shown is None or (self.n_bytes > KEPT_BYTES and n_tokens < self.n_tokens):
            self.shown = None
        else:
            self.shown.append((layer, first, found))


def rows_at(looks: Looks, places: Mapping[str, Int[Tensor, " position"]]) -> list[dict[str, Tensor]]:
    """Activations at chosen positions, from one look.

    Args:
        looks: at the text.
        places: for each hook point the positions, ascending; one of :data:`PER_TEXT` comes whole, whatever is given.

    Returns:
        For each layer, and for what comes after the layers, the rows by hook point, [position, ...]; only what fired.
    """
    found_by_layer: list[dict[str, list[Tensor]]] = [{} for _ in range(looks.model.cfg.n_layers + 1)]

    def visit(layer: int, first: int, found: Found) -> None:
        for name, x in found.items():
            if name in PER_TEXT:
                found_by_layer[layer].setdefault(name, [x])
            elif name in places:
                here = places[name].to(x.device)
                here = here[(here >= first) & (here < first + len(x))] - first
                found_by_layer[layer].setdefault(name, []).append(x[here])

    looks.look(visit)
    return [{name: torch.cat(rows) for name, rows in found.items()} for found in found_by_layer]


@dataclass(frozen=True)
class PromptColumns:
    """The prompt's tokens in at most :data:`MAX_COLUMNS` columns: each ``block`` neighbors, the last one what is left."""

    n_tokens: int
    block: int

    @classmethod
    def of(cls, n_tokens: int) -> "PromptColumns":
        """As few neighbors per column as will do: one, up to :data:`MAX_COLUMNS` tokens."""
        return cls(n_tokens, math.ceil(n_tokens / MAX_COLUMNS))

    def __len__(self) -> int:
        return math.ceil(self.n_tokens / self.block)

    def add(self, sums: Float[Tensor, "*rest column"], values: Float[Tensor, "*rest pos"], first: int) -> None:
        """Add the values of consecutive tokens, ``first`` and on, to the sums of their columns, in place."""
        columns = torch.arange(first, first + values.shape[-1], device=sums.device) // self.block
        sums.index_add_(-1, columns, values.to(sums))


@contextlib.contextmanager
def bar_unless(on_progress: Progress | None, what: str) -> Iterator[Progress]:
    """``on_progress``, or else a bar on the terminal that comes after some seconds and goes when all is done."""
    if on_progress is not None:
        yield on_progress
        return
    shape = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    hidden = True if multiprocessing.parent_process() else None  # workers share a terminal; None: where there is none
    with tqdm(total=1.0, desc=what, bar_format=shape, leave=False, disable=hidden, delay=BAR_AFTER) as bar:
        yield lambda done: bar.update(done - bar.n) and None


def _of_one_text(x: Tensor, name: str) -> Tensor:
    """Without the batch, positions first."""
    if name.endswith("shift_coef"):
        return x
    return x[0].transpose(0, 1) if name.endswith("hook_pattern") else x[0]

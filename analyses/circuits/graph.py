"""The nodes and edges of a model, and which of them belong together."""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens import KVModel

from ..logit_attribution import NO_HEAD

EMBEDDING = -1


class ReaderInput(NamedTuple):
    """An input: of a head's queries, a key-value head's keys or values, an MLP, or the logits."""

    layer: int
    input: str
    head: int


class Graph:
    """Who writes and who reads, each in the order of the pass.

    Args:
        model: whose heads and MLPs they are.
        by_query_head: whether every query head reads keys and values of its own, where the model has groups.

    Attributes:
        writers: (layer, head) of each; no head: the layer's MLP, or the embedding.
        readers: every input.
        n_before: of each reader, the number of writers that it reads, which are the first ones.
        feeds: [writer, reader]: whether the reader is one of the writer's own inputs.
        at: (layer, ``q``, ``k``, ``v``, ``mlp`` or ``logits``) -> which readers they are.
        wrote: (layer, ``z`` or ``mlp``) -> which writers they are; the embedding is the MLP of layer -1.
    """

    def __init__(self, model: KVModel, by_query_head: bool = False):
        self.by_query_head = by_query_head
        self.writers = [(EMBEDDING, NO_HEAD)]
        self.readers: list[ReaderInput] = []
        self.n_before: list[int] = []
        self.at: dict[tuple[int, str], slice] = {}
        self.wrote: dict[tuple[int, str], slice] = {(EMBEDDING, "mlp"): slice(0, 1)}
        for number, layer in enumerate(model.layers()):
            part, before = layer.parts[0], len(self.writers)
            n_shared = part.n_heads if by_query_head else part.n_kv_heads
            for x, n_read in (("q", part.n_heads), ("k", n_shared), ("v", n_shared)):
                self._add(number, x, range(n_read), before)
            self.writers += [(number, head) for head in range(part.n_heads)]
            self.wrote[number, "z"] = slice(before, len(self.writers))
            if layer.mlp is not None:
                side_by_side = getattr(model.cfg, "parallel_attn_mlp", False)
                self._add(number, "mlp", [NO_HEAD], before if side_by_side else len(self.writers))
                self.writers.append((number, NO_HEAD))
                self.wrote[number, "mlp"] = slice(len(self.writers) - 1, len(self.writers))
        self._add(model.cfg.n_layers, "logits", [NO_HEAD], len(self.writers))
        self.feeds = torch.tensor([[self._feeds(writer, reader) for reader in self.readers] for writer in self.writers])

    def _add(self, layer: int, x: str, heads: Iterable[int], n_before: int) -> None:
        new = [ReaderInput(layer, x, head) for head in heads]
        self.at[layer, x] = slice(len(self.readers), len(self.readers) + len(new))
        self.readers += new
        self.n_before += [n_before] * len(new)

    def _feeds(self, writer: tuple[int, int], reader: ReaderInput) -> bool:
        layer, head = writer
        if reader.layer != layer or (head == NO_HEAD) != (reader.input == "mlp"):
            return False
        n_queries, n = (self.at[layer, x].stop - self.at[layer, x].start for x in ("q", reader.input))
        return head == NO_HEAD or head // (n_queries // n) == reader.head

    @property
    def edges(self) -> Bool[Tensor, "writer reader"]:
        """Which pairs are edges."""
        return torch.arange(len(self.writers))[:, None] < torch.tensor(self.n_before)

    def attention(self, layer: int) -> slice:
        """All inputs of a layer's heads."""
        return slice(self.at[layer, "q"].start, self.at[layer, "v"].stop)

    def pruned(self, kept: Bool[Tensor, "writer reader"]) -> Bool[Tensor, "writer reader"]:
        """The kept edges on a way from the embedding to the logits, all of which is kept; no other changes what a circuit
        computes, but for the scale of a norm behind heads."""
        kept, reached = kept.clone(), torch.zeros(len(self.writers), dtype=torch.bool)
        for writer in range(len(self.writers)):
            reached[writer] = writer == 0 or bool(kept[:, self.feeds[writer]].any())
            kept[writer] &= reached[writer]
        useful = torch.zeros(len(self.readers), dtype=torch.bool)
        useful[-1] = True
        for writer in reversed(range(len(self.writers))):
            if (kept[writer] & useful).any():
                useful |= self.feeds[writer]
        return kept & useful

    def widest(self, capacity: Float[Tensor, "writer reader"]) -> tuple[float, list[tuple[int, int]]]:
        """The way from the embedding to the logits whose narrowest edge is widest: its width, and (writer, reader) of edges."""
        width, came = torch.zeros(len(self.writers), dtype=capacity.dtype), dict[int, tuple[int, int]]()
        width[0], last = torch.inf, len(self.readers) - 1

        def best(readers: Tensor) -> tuple[float, tuple[int, int]]:
            through = torch.minimum(capacity[:, readers], width[:, None])
            writer, number = divmod(int(through.argmax()), len(readers))
            return float(through[writer, number]), (writer, int(readers[number]))

        for writer in range(1, len(self.writers)):
            width[writer], came[writer] = best(self.feeds[writer].nonzero().flatten())
        found, edge = best(torch.tensor([last]))
        edges = [edge]
        while edges[0][0]:
            edges.insert(0, came[edges[0][0]])
        return found, edges

    def greedy(self, value: Float[Tensor, "writer reader"], n: int) -> Bool[Tensor, "writer reader"]:
        """``n`` edges from the logits down: always the largest of those into what is reached so far (Hanna et al. 2024)."""
        kept, values = torch.zeros_like(self.edges), value.tolist()
        waiting: list[tuple[float, int, int]] = []
        reached_readers, reached_writers = set[int](), set[int]()

        def reach(readers: Iterable[int]) -> None:
            for reader in set(readers) - reached_readers:
                reached_readers.add(reader)
                for writer in range(self.n_before[reader]):
                    heapq.heappush(waiting, (-values[writer][reader], writer, reader))

        reach([len(self.readers) - 1])
        for _ in range(n):
            _, writer, reader = heapq.heappop(waiting)
            kept[writer, reader] = True
            if writer not in reached_writers:
                reached_writers.add(writer)
                reach(self.feeds[writer].nonzero().flatten().tolist())
        return kept

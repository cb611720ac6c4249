"""A circuit: what was estimated of all edges, those that are kept, and both as tables and files; see the package."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Annotated, Any, Literal, NamedTuple

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.checks import Within, checked
from kvlens.texts import token_texts

from ..declaration import Columns
from ..logit_attribution import NO_HEAD
from .graph import EMBEDDING, Graph, ReaderInput
from .pairs import Pairs
from .passes import CircuitPass, Pass

NODES = Columns(
    node=("str", "``embedding``, a head such as ``3.2`` (layer and head), ``mlp3`` or ``logits``"),
    layer=("int64", "from 0; -1: the embedding; the number of layers: the logits"),
    head=("int64", "query head; -1: no head"),
    estimate=("float64", "of metric_fall, to first order; NaN for the logits"),
    metric_fall=(
        "float64",
        "of the metric, from the clean pass to one in which every other node reads this one's output of the corrupted prompt, "
        "mean over pairs; NaN where it was not run",
    ),
    kept=("bool", "whether it is part of the circuit"),
)
EDGES = Columns(
    writer=("str", "``embedding``, a head such as ``3.2`` (layer and head), or ``mlp3``"),
    reader=(
        "str",
        "likewise, or ``logits``; of keys and values the head is a key-value head, or with by_query_head one of all",
    ),
    input=("str", "what reads: ``q``, ``k``, ``v``, ``mlp`` or ``logits``"),
    writer_layer=("int64", "from 0; -1: the embedding"),
    writer_head=("int64", "query head; -1: no head"),
    reader_layer=("int64", "from 0; the number of layers: the logits"),
    reader_head=("int64", "query head for ``q``, key-value head for ``k`` and ``v``, or query head; -1: no head"),
    estimate=("float64", "of metric_fall, to first order"),
    estimate_in_prompt=("float64", "its part at the tokens of the prompt, the rest being the text's; NaN without a text"),
    metric_fall=(
        "float64",
        "of the metric, from the clean pass to one with this edge alone cut, mean over pairs; NaN where it was not run",
    ),
    metric_fall_in_prompt=("float64", "likewise, with the edge cut at the tokens of the prompt alone"),
    kept=("bool", "whether it is part of the circuit"),
)
PATHS = Columns(
    path=("int64", "from 0"),
    nodes=("str", "from the embedding to the logits, such as ``embedding > mlp0 > 3.2 > logits``"),
    inputs=("str", "what each of them but the first reads with, such as ``mlp > q > logits``"),
    n_edges=("int64", "of the path"),
    width=("float64", "the smallest size of an estimate on it, beside what the paths before it take"),
)
SIZES = Columns(
    order=("str", "of estimates, by which edges are kept: ``signed`` (by value) or ``absolute`` (by size)"),
    n_edges=("int64", "in the circuit, without those that lead nowhere"),
    n_nodes=("int64", "likewise, with the embedding and the logits"),
    metric=("float64", "of the circuit, mean over pairs"),
    faithfulness=("float64", "(metric - corrupted) / (clean - corrupted)"),
)
Counted = Literal["edges", "nodes"]
Order = Literal["signed", "absolute"]
"""Of estimates: by value, those that speak for the answer first, or by size."""


@dataclass(frozen=True, repr=False)
class Circuit:
    """The estimates of all edges, and the edges that are kept: all of them until :meth:`keep`.

    Attributes:
        model: whose circuit it is.
        batches: the pairs of prompts.
        graph: who writes and reads.
        estimates: how much the metric falls with each edge cut, to first order; 0 where there is none.
        by_position: the nodes' estimates at every position, mean over pairs; positions are counted from the last before the
            answers, where the first of their tokens is predicted, so that pairs of several lengths share that column.
        kept: the edges of the circuit.
        falls, node_falls: the same in a run, of edges and of nodes; NaN for those that were not run, None where none was.
        in_prompt, falls_in_prompt: of edges' estimates and falls, the part at the tokens of prompts; None without texts behind
            them.
        by, order: what was counted when edges were kept, and by which order of estimates.
    """

    model: KVModel
    batches: Sequence[Pairs]
    graph: Graph
    estimates: Float[Tensor, "writer reader"]
    by_position: Float[Tensor, "writer pos"]
    kept: Bool[Tensor, "writer reader"]
    falls: Float[Tensor, "writer reader"] | None = None
    node_falls: Float[Tensor, " writer"] | None = None
    in_prompt: Float[Tensor, "writer reader"] | None = None
    falls_in_prompt: Float[Tensor, "writer reader"] | None = None
    by: Counted = "edges"
    order: Order = "signed"

    def __repr__(self) -> str:
        return f"Circuit({int(self.kept.sum())} of {int(self.graph.edges.sum())} edges, order={self.order!r})"

    @property
    @NODES.document
    def nodes(self) -> pd.DataFrame:
        """One row per node, in the order of the pass:

        {columns}
        """
        nodes = [*self.graph.writers, (self.model.cfg.n_layers, NO_HEAD)]
        return NODES.frame(
            {
                "node": [_name(layer, head, self.model.cfg.n_layers) for layer, head in nodes],
                "layer": [layer for layer, _ in nodes],
                "head": [head for _, head in nodes],
                "estimate": [*self.estimates.sum(dim=1).tolist(), nan],
                "metric_fall": [nan] * len(nodes) if self.node_falls is None else [*self.node_falls.tolist(), nan],
                "kept": [*self.kept.any(dim=1).tolist(), bool(self.kept[:, -1].any())],
            }
        )

    @property
    @EDGES.document
    def edges(self) -> pd.DataFrame:
        """One row per edge, the largest estimates (without sign) first:

        {columns}
        """
        writer, reader = self.graph.edges.nonzero().T
        values = self.estimates[writer, reader]
        order = values.abs().argsort(descending=True, stable=True)
        writer, reader, values = writer[order], reader[order], values[order]
        wrote = [self.graph.writers[i] for i in writer.tolist()]
        read = [self.graph.readers[i] for i in reader.tolist()]
        n, nothing = self.model.cfg.n_layers, torch.full_like(self.estimates, torch.nan)
        in_prompt, falls, falls_in_prompt = (
            nothing if x is None else x for x in (self.in_prompt, self.falls, self.falls_in_prompt)
        )
        return EDGES.frame(
            {
                "writer": [_name(layer, head, n) for layer, head in wrote],
                "reader": [_name(of.layer, of.head, n) for of in read],
                "input": [of.input for of in read],
                "writer_layer": [layer for layer, _ in wrote],
                "writer_head": [head for _, head in wrote],
                "reader_layer": [of.layer for of in read],
                "reader_head": [of.head for of in read],
                "estimate": values,
                "estimate_in_prompt": in_prompt[writer, reader],
                "metric_fall": falls[writer, reader],
                "metric_fall_in_prompt": falls_in_prompt[writer, reader],
                "kept": self.kept[writer, reader],
            }
        )

    @PATHS.document
    @checked
    def paths(self, n: Annotated[int, Within(1)] = 10) -> pd.DataFrame:
        """The widest paths from the embedding to the logits through the kept edges.

        A path is as wide as its narrowest edge, and an edge as its estimate is large (without sign), less the widths of all
        paths before this one that lead through it: no estimate is counted twice, as in a flow that is split into paths.

        Args:
            n: how many paths, at most.

        Returns:
            One row per path, the widest first:

            {columns}
        """
        left, rows = (self.estimates.abs() * self.kept).clone(), list[tuple[object, ...]]()
        while len(rows) < n and (found := self.graph.widest(left))[0] > 0:
            width, edges = found
            for edge in edges:
                left[edge] -= width
            names = [_name(*self.graph.writers[writer], self.model.cfg.n_layers) for writer, _ in edges]
            inputs = [self.graph.readers[reader].input for _, reader in edges]
            rows.append((len(rows), " > ".join([*names, "logits"]), " > ".join(inputs), len(edges), width))
        columns = zip(*rows, strict=True) if rows else [[]] * len(PATHS)
        return PATHS.frame(dict(zip(PATHS, map(list, columns), strict=True)))

    @checked
    def keep(
        self,
        size: Annotated[int, Within(0)] | Annotated[float, Within(0, 1)],
        *,
        by: Counted = "edges",
        order: Order = "signed",
    ) -> "Circuit":
        """The circuit of the edges, or nodes, with the largest estimates; those that lead nowhere are removed.

        Edges are taken from the logits down, each into a node that is reached already, as in EAP-IG: of the largest edges of
        all, many would have no way to the logits. Nodes are heads and MLPs; the embedding and the logits are in every circuit.

        Args:
            size: how many (an integer), or the share of all (a float), rounded down.
            by: what is counted.
            order: ``signed``: the largest are those of the largest value, which speak for the answer; ``absolute``: of the
                largest size, those that speak against it, too.
        """
        n_all = self.n_units(by)
        n, values = int(size * n_all) if isinstance(size, float) else size, self.estimates
        if n > n_all:
            raise KVLensError(f"keep: expected at most {n_all}, which is all {by} of this model, got {n}")
        if by == "edges":
            kept = self.graph.greedy(values.abs() if order == "absolute" else values, n)
        else:
            of_nodes = values.sum(dim=1)[1:]
            first = (of_nodes.abs() if order == "absolute" else of_nodes).argsort(descending=True, stable=True)[:n]
            kept = torch.zeros_like(self.kept)
            kept[torch.cat([torch.zeros(1, dtype=torch.long), first + 1])] = True
        return replace(self, kept=self.graph.pruned(kept & self.graph.edges), by=by, order=order)

    @checked
    def confirmed(self, n: Annotated[int, Within(1)], *, by: Counted = "edges") -> "Circuit":
        """The same, with the falls of the ``n`` edges, or heads and MLPs, with the largest estimates (without sign), each cut
        alone in a run. Of a node all edges are cut: the others read what it wrote on the corrupted prompt. :meth:`keep` goes by
        the estimates all the same."""
        edges = self.graph.edges
        if by == "nodes":
            chosen = self.estimates.sum(dim=1)[1:].abs().argsort(descending=True, stable=True)[:n] + 1
            cuts = [edges.index_fill(0, one, False) for one in chosen.split(1)]
            return replace(self, node_falls=self._falls(self.node_falls, self.estimates[:, 0], chosen, cuts))
        sizes = self.estimates.abs().masked_fill(~edges, -1).flatten()
        chosen = sizes.argsort(descending=True, stable=True)[: min(n, int(edges.sum()))]
        cuts = [edges.flatten().index_fill(0, one, False).view_as(edges) for one in chosen.split(1)]
        found = replace(self, falls=self._falls(self.falls, self.estimates, chosen, cuts))
        if self.in_prompt is None:
            return found
        return replace(found, falls_in_prompt=self._falls(self.falls_in_prompt, self.estimates, chosen, cuts, in_prompt=True))

    def _falls(
        self,
        known: Tensor | None,
        like: Tensor,
        at: Int[Tensor, " cut"],
        cuts: Sequence[Bool[Tensor, "writer reader"]],
        in_prompt: bool = False,
    ) -> Tensor:
        """What is known, with what the metric falls in a run of each of these circuits at its place."""
        known = torch.full_like(like, torch.nan) if known is None else known
        whole, *alone = self.measured(self.graph.edges, *cuts, in_prompt=in_prompt).mean(dim=1)
        return known.flatten().index_put((at,), whole - torch.tensor(alone, dtype=torch.float64)).view_as(known)

    @SIZES.document
    def at_sizes(self, sizes: Sequence[int | float] = (), *, by: Counted = "edges", order: Order = "signed") -> "AtSizes":
        """Circuits of several sizes, and what each of them keeps of the metric in a run.

        Args:
            sizes: as of :meth:`keep`; none takes this circuit as it is.
            by, order: as of :meth:`keep`.

        Returns:
            The circuits, the metric on the two prompts, and one row for each circuit:

            {columns}

        Raises:
            KVLensError: as :meth:`keep`; a metric that is the same on both prompts.
        """
        circuits = [self.keep(size, by=by, order=order) for size in sizes] or [self]
        clean, corrupted, values, f = self.outcome([one.kept for one in circuits])
        n_nodes = [int(one.kept.any(dim=1).sum()) + bool(one.kept.any()) for one in circuits]
        n_edges = [int(one.kept.sum()) for one in circuits]
        orders = [one.order for one in circuits]
        columns = {"order": orders, "n_edges": n_edges, "n_nodes": n_nodes, "metric": values, "faithfulness": f}
        return AtSizes(circuits, SIZES.frame(columns), clean, corrupted)

    def to_networkx(self) -> Any:
        """The kept edges as a ``networkx.DiGraph``, whose ways from ``embedding`` to ``logits`` are those of the circuit.

        Nodes and edges are the rows of :attr:`nodes` and :attr:`edges` that are kept, with their columns as attributes. What
        reads for a head is a node as well, named by the reader and its input, such as ``18.6.q`` or ``18.2.k``, and an edge
        without attributes leads from there to the head; from keys and values to each head of the group in the circuit.
        """
        import networkx  # takes a third of a second

        made, inputs = networkx.DiGraph(), {}
        made.add_nodes_from((row["node"], row) for row in self.nodes[self.nodes["kept"]].to_dict("records"))
        for row in self.edges[self.edges["kept"]].to_dict("records"):
            to = row["reader"]
            if row["input"] in "qkv":
                to = f"{to}.{row['input']}"
                inputs[to] = ReaderInput(row["reader_layer"], row["input"], row["reader_head"])
            made.add_edge(row["writer"], to, **row)
        for name, of in inputs.items():
            made.add_node(name, node=name, layer=of.layer, head=of.head, input=of.input)
            made.add_edges_from((name, head) for head in self._fed(of) if head in made)
        return made

    def to_json(self, sizes: Sequence[int | float] = (), *, order: Order = "signed") -> str:
        """The circuit as JSON, for other programs.

        It has ``model``, its name; ``pairs``, of each the tokens of ``clean`` and ``corrupted`` as text, null for a hidden one;
        ``clean`` and ``corrupted``, the metric on the two, means over pairs; ``nodes`` and ``edges``, the rows of these frames
        that are kept, and ``faithfulness``, those of :meth:`at_sizes`, each an object by column. What is NaN in a frame is
        null.

        Args:
            sizes, order: as of :meth:`at_sizes`.

        Raises:
            KVLensError: as :meth:`at_sizes`.
        """
        found = self.at_sizes(sizes, order=order)
        frames = {"nodes": self.nodes[self.nodes["kept"]], "edges": self.edges[self.edges["kept"]], "faithfulness": found.table}
        written = {
            "model": self.model.cfg.model_name,
            "pairs": [
                dict(zip(("clean", "corrupted"), self.texts(pairs, i), strict=True))
                for pairs in self.batches
                for i in range(len(pairs.clean))
            ],
            "clean": found.clean,
            "corrupted": found.corrupted,
            **{name: frame.astype(object).where(frame.notna(), None).to_dict("records") for name, frame in frames.items()},
        }
        return json.dumps(written, allow_nan=False, indent=1)

    def texts(self, pairs: Pairs, i: int) -> tuple[list[str], list[str | None]]:
        """The tokens of one pair as text; None in the corrupted prompt for those that are hidden."""
        clean, corrupted = (token_texts(self.model, of[i]) for of in (pairs.clean, pairs.corrupted))
        hidden = [False] * len(clean) if pairs.hidden is None else pairs.hidden[i].tolist()
        return clean, [None if out else text for text, out in zip(corrupted, hidden, strict=True)]

    def n_units(self, by: Counted) -> int:
        """All edges, or all heads and MLPs."""
        return int(self.graph.edges.sum()) if by == "edges" else len(self.graph.writers) - 1

    def measured(self, *kept: Bool[Tensor, "writer reader"], in_prompt: bool = False) -> Float[Tensor, "circuit pair"]:
        """The metric of every pair in a run of each of several circuits, by default in this one; with ``in_prompt`` all other
        edges are cut at the tokens of the prompts alone."""
        found = [self._measured(pairs, kept or (self.kept,), in_prompt) for pairs in self.batches]
        return torch.cat(found, dim=1)

    def outcome(
        self, kept: Sequence[Bool[Tensor, "writer reader"]]
    ) -> tuple[float, float, list[float], Float[Tensor, " circuit"]]:
        """The metric on clean and corrupted prompts, and in a run of each circuit, means over pairs; and f of each."""
        clean, corrupted, *values = self.measured(self.graph.edges, torch.zeros_like(self.kept), *kept).mean(dim=1).tolist()
        if clean == corrupted:
            raise KVLensError(f"faithfulness: the metric is {clean} on clean and corrupted prompts alike: nothing to be kept")
        return clean, corrupted, values, (torch.tensor(values, dtype=torch.float64) - corrupted) / (clean - corrupted)

    def _fed(self, of: ReaderInput) -> list[str]:
        """The heads that an input belongs to."""
        fed = self.graph.feeds[:, self.graph.readers.index(of)].nonzero().flatten().tolist()
        return [_name(layer, head, self.model.cfg.n_layers) for layer, head in (self.graph.writers[i] for i in fed)]

    @torch.no_grad()
    def _measured(
        self, pairs: Pairs, circuits: Sequence[Bool[Tensor, "writer reader"]], in_prompt: bool
    ) -> Float[Tensor, "circuit pair"]:
        other, found = Pass(self.model, self.graph, pairs.first, pairs.hidden), dict[bytes, Tensor]()
        other.logits(pairs.corrupted, 1)
        keys = [kept.numpy().tobytes() for kept in circuits]
        for key, kept in zip(keys, circuits, strict=True):
            if key not in found:  # small ones are often empty
                ran = CircuitPass(self.model, self.graph, kept, other, pairs.n_prompt if in_prompt else None)
                found[key] = pairs.value(ran.logits(pairs.clean, pairs.n_last)).double().cpu()
        own = torch.stack([found[key] for key in keys])
        return own if pairs.rivals is None else own - self._measured(pairs.rivals, circuits, in_prompt)


class AtSizes(NamedTuple):
    """Circuits of several sizes.

    Attributes:
        circuits: from the first size to the last.
        table: one row for each.
        clean, corrupted: the metric on the two prompts, mean over pairs.
    """

    circuits: list[Circuit]
    table: pd.DataFrame
    clean: float
    corrupted: float


def _name(layer: int, head: int, n_layers: int) -> str:
    if head != NO_HEAD:
        return f"{layer}.{head}"
    return {EMBEDDING: "embedding", n_layers: "logits"}.get(layer, f"mlp{layer}")

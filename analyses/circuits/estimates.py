"""A circuit: estimates of all edges, those that are kept, and what they keep of the metric; see the package."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.checks import Within, checked
from kvlens.errors import brief
from kvlens.texts import token_texts
from kvlens.units import By

from ..declaration import Columns, Field, Option, analysis, tokens_field
from ..logit_attribution import NO_HEAD
from ..registry import on_its_front_ends
from ..segments import progress
from .graph import EMBEDDING, Graph, ReaderInput
from .pairs import AnswerAndRival, CircuitMetric, Pairs, read_pairs
from .passes import CircuitPass, Pass, PassWithGradients, explains_the_model

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The shares of edges, or of nodes, at which MIB measures a circuit."""
NODES = Columns(
    node=("str", "``embedding``, a head such as ``3.2`` (layer and head), ``mlp3`` or ``logits``"),
    layer=("int64", "from 0; -1: the embedding; the number of layers: the logits"),
    head=("int64", "query head; -1: no head"),
    estimate=("float64", "of the fall of the metric with its output corrupted; NaN for the logits"),
    kept=("bool", "whether it is part of the circuit"),
)
EDGES = Columns(
    writer=("str", "``embedding``, a head such as ``3.2`` (layer and head), or ``mlp3``"),
    reader=("str", "likewise, or ``logits``; of keys and values the head is a key-value head"),
    input=("str", "what reads: ``q``, ``k``, ``v``, ``mlp`` or ``logits``"),
    writer_layer=("int64", "from 0; -1: the embedding"),
    writer_head=("int64", "query head; -1: no head"),
    reader_layer=("int64", "from 0; the number of layers: the logits"),
    reader_head=("int64", "query head for ``q``, key-value head for ``k`` and ``v``; -1: no head"),
    estimate=("float64", "of metric_fall, to first order"),
    metric_fall=(
        "float64",
        "of the metric, from the clean pass to one with this edge alone cut, mean over pairs; NaN where it was not run",
    ),
    kept=("bool", "whether it is part of the circuit"),
)
FAITHFULNESS = Columns(
    share=("float64", "of edges, or of nodes, that were asked for"),
    n_kept=("int64", "as many they are, rounded down, before those that lead nowhere are removed"),
    metric=("float64", "of the circuit, mean over pairs"),
    faithfulness=("float64", "(metric - corrupted) / (clean - corrupted)"),
)
PATHS = Columns(
    path=("int64", "from 0"),
    nodes=("str", "from the embedding to the logits, such as ``embedding > mlp0 > 3.2 > logits``"),
    inputs=("str", "what each of them but the first reads with, such as ``mlp > q > logits``"),
    n_edges=("int64", "of the path"),
    width=("float64", "the smallest size of an estimate on it, beside what the paths before it take"),
)
SIZES = Columns(
    n_edges=("int64", "in the circuit, without those that lead nowhere"),
    n_nodes=("int64", "likewise, with the embedding and the logits"),
    metric=("float64", "of the circuit, mean over pairs"),
    faithfulness=("float64", "(metric - corrupted) / (clean - corrupted)"),
)
Counted = Literal["edges", "nodes"]
EstimateMethod = Literal["eap", "eap_ig", "eap_ig_activations"]


@dataclass(frozen=True)
class Circuit:
    """The estimates of all edges, and the edges that are kept: all of them until :meth:`keep`.

    Attributes:
        model: whose circuit it is.
        batches: the pairs of prompts.
        graph: who writes and reads.
        estimates: how much the metric falls with each edge cut, to first order; 0 where there is none.
        falls: the same of those that were run; NaN elsewhere.
        by_position: the nodes' estimates at every position, mean over pairs; positions are counted from the last, where the
            metric is read, so that pairs of several lengths share that column.
        kept: the edges of the circuit.
    """

    model: KVModel
    batches: Sequence[Pairs] = field(repr=False)
    graph: Graph = field(repr=False)
    estimates: Float[Tensor, "writer reader"] = field(repr=False)
    falls: Float[Tensor, "writer reader"] = field(repr=False)
    by_position: Float[Tensor, "writer pos"] = field(repr=False)
    kept: Bool[Tensor, "writer reader"] = field(repr=False)

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
                "estimate": [*self.estimates.sum(dim=1).tolist(), float("nan")],
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
        n = self.model.cfg.n_layers
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
                "metric_fall": self.falls[writer, reader],
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
        left, rows = (self.estimates.abs() * self.kept).clone(), list[tuple[Any, ...]]()
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
        absolute: bool = False,
    ) -> "Circuit":
        """The circuit of the edges, or nodes, with the largest estimates; those that lead nowhere are removed.

        Edges are taken from the logits down, each into a node that is reached already, as in EAP-IG: of the largest edges of
        all, many would have no way to the logits. Nodes are heads and MLPs; the embedding and the logits are in every circuit.

        Args:
            size: how many (an integer), or the share of all (a float), rounded down.
            by: what is counted.
            absolute: order by the size of an estimate, not by its signed value.
        """
        n_all = self.n_units(by)
        n = int(size * n_all) if isinstance(size, float) else size
        if n > n_all:
            raise KVLensError(f"keep: expected at most {n_all}, which is all {by} of this model, got {n}")
        if by == "edges":
            kept = self.graph.greedy(self.estimates.abs() if absolute else self.estimates, n)
        else:
            of_nodes = self.estimates.sum(dim=1)[1:]
            order = (of_nodes.abs() if absolute else of_nodes).argsort(descending=True, stable=True)
            kept = torch.zeros_like(self.kept)
            kept[torch.cat([torch.zeros(1, dtype=torch.long), order[:n] + 1])] = True
        return replace(self, kept=self.graph.pruned(kept & self.graph.edges))

    def confirmed(self, n: int) -> "Circuit":
        """The same, with the falls of the ``n`` edges with the largest estimates (without sign), each cut alone in a run."""
        order = self.estimates.abs().masked_fill(~self.graph.edges, -1).flatten().argsort(descending=True, stable=True)
        cuts = [self.graph.edges.flatten().index_fill(0, one, False).view_as(self.kept) for one in order[:n].split(1)]
        whole, *alone = self.measured(self.graph.edges, *cuts).mean(dim=1)
        falls = self.falls.flatten().index_put((order[:n],), whole - torch.tensor(alone, dtype=torch.float64))
        return replace(self, falls=falls.view_as(self.falls))

    @SIZES.document
    def at_sizes(self, sizes: Sequence[int | float] = ()) -> "AtSizes":
        """Circuits of several sizes, and what each of them keeps of the metric in a run.

        Args:
            sizes: of edges, as of :meth:`keep`; none takes this circuit as it is.

        Returns:
            The circuits, the metric on the two prompts, and one row for each circuit:

            {columns}

        Raises:
            KVLensError: as :meth:`keep`; a metric that is the same on both prompts.
        """
        circuits = [self.keep(size) for size in sizes] or [self]
        clean, corrupted, values, f = self._run([one.kept for one in circuits])
        n_nodes = [int(one.kept.any(dim=1).sum()) + bool(one.kept.any()) for one in circuits]
        n_edges = [int(one.kept.sum()) for one in circuits]
        table = SIZES.frame({"n_edges": n_edges, "n_nodes": n_nodes, "metric": values, "faithfulness": f})
        return AtSizes(circuits, table, clean, corrupted)

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

    def to_json(self, sizes: Sequence[int | float] = ()) -> str:
        """The circuit as JSON, for other programs.

        It has ``model``, its name; ``pairs``, of each the tokens of ``clean`` and ``corrupted`` as text, null for a hidden one;
        ``clean`` and ``corrupted``, the metric on the two, means over pairs; ``nodes`` and ``edges``, the rows of these frames
        that are kept, and ``faithfulness``, those of :meth:`at_sizes`, each an object by column. What is NaN in a frame is
        null.

        Args:
            sizes: as of :meth:`at_sizes`.

        Raises:
            KVLensError: as :meth:`at_sizes`.
        """
        found = self.at_sizes(sizes)
        frames = {"nodes": self.nodes[self.nodes["kept"]], "edges": self.edges[self.edges["kept"]], "faithfulness": found.table}
        written = {
            "model": self.model.cfg.model_name,
            "pairs": [self.texts(pairs, i)._asdict() for pairs in self.batches for i in range(len(pairs.clean))],
            "clean": found.clean,
            "corrupted": found.corrupted,
            **{name: frame.astype(object).where(frame.notna(), None).to_dict("records") for name, frame in frames.items()},
        }
        return json.dumps(written, allow_nan=False, indent=1)

    def texts(self, pairs: Pairs, i: int) -> "PairTexts":
        """The tokens of one pair as text; None in the corrupted prompt for those that are hidden."""
        clean, corrupted = (token_texts(self.model, of[i]) for of in (pairs.clean, pairs.corrupted))
        hidden = [False] * len(clean) if pairs.hidden is None else pairs.hidden[i].tolist()
        return PairTexts(clean, [None if out else text for text, out in zip(corrupted, hidden, strict=True)])

    def n_units(self, by: Counted) -> int:
        """All edges, or all heads and MLPs."""
        return int(self.graph.edges.sum()) if by == "edges" else len(self.graph.writers) - 1

    def measured(self, *kept: Bool[Tensor, "writer reader"]) -> Float[Tensor, "circuit pair"]:
        """The metric of every pair in a run of each of several circuits, by default in this one."""
        found = [self._measured(pairs, kept or (self.kept,)) for pairs in self.batches]
        return torch.cat(found, dim=1)

    def _run(
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
    def _measured(self, pairs: Pairs, circuits: Sequence[Bool[Tensor, "writer reader"]]) -> Float[Tensor, "circuit pair"]:
        other, found = Pass(self.model, self.graph, pairs.first, pairs.hidden), dict[bytes, Tensor]()
        other.logits(pairs.corrupted, 1)
        keys = [kept.numpy().tobytes() for kept in circuits]
        for key, kept in zip(keys, circuits, strict=True):
            if key not in found:  # small ones are often empty
                logits = CircuitPass(self.model, self.graph, kept, other).logits(pairs.clean, pairs.n_last)
                found[key] = pairs.value(logits).double().cpu()
        return torch.stack([found[key] for key in keys])


class PairTexts(NamedTuple):
    """The tokens of a clean prompt and of its corrupted one as text."""

    clean: list[str]
    corrupted: list[str | None]


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


@EDGES.document
@on_its_front_ends
@checked
def circuit(
    model: KVModel,
    prompt: Any,
    corrupted: Any = None,
    metric: CircuitMetric | AnswerAndRival | None = None,
    *,
    without: By | Sequence[By] | None = None,
    method: EstimateMethod = "eap_ig",
    steps: Annotated[int, Within(1)] = 5,
    confirm: Annotated[int, Within(0)] = 0,
    size: int | None = None,
) -> Circuit:
    """Estimate how much every edge between the parts of a model carries of the difference between pairs of prompts.

    Args:
        model: any whose heads and MLPs add to the residual stream what they read of it, through norms or none.
        prompt: the clean prompts, each a string, a chat or tokens; one of them, a sequence, or tokens [pair, pos].
        corrupted: as many, each as long as its clean one.
        metric: answers and rivals, whose difference in logits behind each prompt is measured; or a function of the logits
            [pair, pos, d_vocab] that returns [pair], for pairs that all have the same length.
        without: instead of corrupted prompts, what of each prompt is hidden in the corrupted run: strings that occur in it or
            ranges of tokens (start, stop); or a list of those for each prompt. The other tokens keep their positions.
        method: ``eap``, ``eap_ig`` (of inputs), or ``eap_ig_activations``, which takes a gradient for each step and layer's
            heads or MLP: ``1 + (steps - 1) (2 n_layers + 1)`` of them, where the former take 1 and ``steps``.
        steps: of the path between the two embeddings, or from hidden tokens to those that are there, for all but ``eap``.
        confirm: how many edges, those with the largest estimates (without sign), are run, each cut alone.
        size: how many edges are kept, as by :meth:`Circuit.keep`; None for all.

    Returns:
        The circuit. Its frame ``nodes`` has a row per node, and ``edges`` one per edge:

        {columns}

    Raises:
        KVLensError: lengths or numbers of prompts that differ, a metric that is not one finite number for each pair, a part
            that does not occur or holds the last token, a model in which something else stands between nodes.
    """
    _check_model(model)
    graph = Graph(model)
    batches = read_pairs(model, graph, prompt, corrupted, metric, without)
    first, hidden = batches[0], None if batches[0].hidden is None else batches[0].hidden[:1]
    passes = Pass(model, graph), Pass(model, graph, hidden=hidden)
    if not explains_the_model(model, graph, *passes, (first.clean[:1], first.corrupted[:1])):
        raise _no_circuit(model, "something else stands between heads, MLPs and the residual stream (such as a factor)")
    total = torch.zeros(graph.edges.shape, dtype=torch.float64)
    by_position = torch.zeros(len(graph.writers), max(pairs.clean.shape[1] for pairs in batches), dtype=torch.float64)
    with progress("circuit") as tell:
        for number, pairs in enumerate(batches):
            of_edges, of_nodes = _estimates(
                model, graph, pairs, 1 if method == "eap" else steps, method == "eap_ig_activations"
            )
            total += of_edges
            by_position[:, -of_nodes.shape[1] :] += of_nodes
            tell((number + 1) / len(batches))
    n = sum(len(pairs.clean) for pairs in batches)
    found = Circuit(model, batches, graph, total / n, torch.full_like(total, torch.nan), by_position / n, graph.edges)
    found = found.confirmed(min(confirm, found.n_units("edges"))) if confirm else found
    return found if size is None else found.keep(size)


def _check_model(model: KVModel) -> None:
    cfg, layers = model.cfg, model.layers()
    augmented = cfg.attention_variant is not None and cfg.attention_variant.augmented is not None
    parts = [part for layer in layers for part in layer.parts]
    reasons = {
        "positions are added to queries and keys alone (shortformer)": cfg.positional_embedding_type == "shortformer",
        "its keys and values are augmented from the stream": augmented,
        "it has layers that are no attention": len(parts) > len(layers) or any(part.keeps_state for part in parts),
        "queries, keys or values of a head are no linear maps of the stream (gates, latent attention)": any(
            part.matrices() is None for part in parts if not part.keeps_state
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise _no_circuit(model, reason)


def _no_circuit(model: KVModel, reason: str) -> KVLensError:
    family = getattr(model.cfg, "architecture", None) or "this model"
    return KVLensError(
        f"circuit: {family}: {reason}, so that what a reader reads is not the sum of what nodes wrote; use another model, or "
        "attribution_by_head"
    )


def _estimates(
    model: KVModel, graph: Graph, pairs: Pairs, steps: int, by_stage: bool
) -> tuple[Float[Tensor, "writer reader"], Float[Tensor, "writer pos"]]:
    """Sums of (y_w - y'_w) . g_r over the pairs: over all positions, and over all readers."""
    ours, theirs = Pass(model, graph, pairs.first), Pass(model, graph, pairs.first, pairs.hidden)
    with torch.no_grad():
        theirs.logits(pairs.corrupted, 1)
        ours.logits(pairs.clean, 1)
    difference, embedding = ours.written - theirs.written, (EMBEDDING, "mlp")
    sums = torch.zeros(graph.edges.shape, dtype=torch.float64)
    by_position = torch.zeros(len(graph.writers), pairs.clean.shape[1], dtype=torch.float64)
    at_the_end = _gradients(model, graph, pairs, ours.embedded)
    for stage, writers in graph.wrote.items() if by_stage else [(embedding, slice(0, len(graph.writers)))]:
        total, presence = [(some, gradient / steps) for some, gradient in at_the_end[0]], at_the_end[1] / steps
        for k in range(1, steps):
            at, added, share = ours.embedded, dict[tuple[int, str], Tensor](), 1.0
            if stage == embedding:
                at, share = torch.lerp(theirs.embedded, ours.embedded, k / steps), k / steps
            else:
                added[stage] = difference[writers].sum(dim=0) * (k / steps - 1)
            found, of_presence = _gradients(model, graph, pairs, at, added, share)
            total = [(some, a.add_(b, alpha=1 / steps)) for (some, a), (_, b) in zip(total, found, strict=True)]
            presence = presence + of_presence / steps
        for some, gradient in total:
            rows = slice(writers.start, min(writers.stop, graph.n_before[some.start]))
            if rows.start < rows.stop:
                sums[rows, some] = (difference[rows].flatten(1) @ gradient.flatten(1).T).double().cpu()
                of_nodes = torch.einsum("wipd,ipd->wp", difference[rows], gradient.sum(dim=0)).double().cpu()
                by_position[rows, pairs.first :] += of_nodes
        if stage == embedding:
            sums[0] += presence
            by_position[0, pairs.first] += presence.sum()
    return sums, by_position


def _gradients(
    model: KVModel,
    graph: Graph,
    pairs: Pairs,
    embedded: Float[Tensor, "pair pos d_model"],
    added: Mapping[tuple[int, str], Tensor] = MappingProxyType({}),
    share: float = 1.0,
) -> tuple[list[tuple[slice, Tensor]], Float[Tensor, " reader"]]:
    """Of the metric's sum, in a run of the clean prompts with other embeddings, or with something added to what nodes write."""
    ran = PassWithGradients(model, graph, pairs.first, pairs.hidden, share)
    ran.added.update(added)
    with torch.enable_grad():
        value = pairs.value(ran.logits(pairs.clean, pairs.n_last, embedded.detach().requires_grad_())).sum()
    return ran.gradients(value)


class Faithfulness(NamedTuple):
    """What circuits of several sizes keep of the metric.

    Attributes:
        table: one row per share.
        cpr: the area under f.
        cmd: the area under |1 - f|.
        clean, corrupted: the metric on the two prompts, mean over pairs.
    """

    table: pd.DataFrame
    cpr: float
    cmd: float
    clean: float
    corrupted: float


@FAITHFULNESS.document
@checked
def faithfulness(
    found: Circuit,
    shares: Sequence[float] = SHARES,
    *,
    by: Counted = "edges",
    absolute: bool = False,
    pairs: tuple[Any, Any, Any] | None = None,
) -> Faithfulness:
    """Run circuits of several sizes, and measure by MIB how much of the metric each keeps.

    Args:
        found: whose estimates choose the edges.
        shares: of all edges or nodes, in ascending order.
        by, absolute: as in :meth:`Circuit.keep`.
        pairs: others to measure on: ``(prompt, corrupted, metric)`` as in :func:`circuit`.

    Returns:
        The table, and both areas, over the range of the shares:

        {columns}

    Raises:
        KVLensError: as :meth:`Circuit.keep` and :func:`circuit`; a metric that is the same on both prompts.
    """
    if len(shares) < 2 or any(low >= high for low, high in pairwise(shares)):
        raise KVLensError(f"shares: expected at least two, in ascending order, to have areas between them, got {brief(shares)}")
    found = found if pairs is None else replace(found, batches=read_pairs(found.model, found.graph, *pairs))
    circuits = [found.keep(float(share), by=by, absolute=absolute).kept for share in shares]
    clean, corrupted, values, f = found._run(circuits)
    at = torch.tensor(shares, dtype=torch.float64)
    table = FAITHFULNESS.frame(
        {"share": at, "n_kept": [int(share * found.n_units(by)) for share in shares], "metric": values, "faithfulness": f}
    )
    return Faithfulness(table, float(torch.trapezoid(f, at)), float(torch.trapezoid((1 - f).abs(), at)), clean, corrupted)


@analysis(
    EDGES,
    "which heads and MLPs read which others where two prompts differ: all edges, by attribution",
    cost="both prompts once, and the clean one with gradients once for each step (5; one for eap); to confirm edges, both "
    "again and once for each; the first pair three times more, as a check",
    of=circuit,
    inputs={
        "corrupted": tokens_field("corrupted", prepend_bos=True, required=False),
        "without": Field("without", lambda model, value: [value] if isinstance(value, str) else value, required=False),
        "answer": Field("answer"),
        "rival": Field("rival"),
    },
    options={
        "method": Option("of the estimates", choices=get_args(EstimateMethod)),
        "steps": Option("between the two prompts, for eap_ig"),
        "confirm": Option("how many edges are run, each cut alone"),
        "size": Option("how many edges are kept", value_type=int),
    },
)
def edges_of_a_record(
    model: KVModel,
    prompt: Tensor,
    corrupted: Tensor | None = None,
    without: By | None = None,
    answer: Any = None,
    rival: Any = None,
    *,
    method: EstimateMethod = "eap_ig",
    steps: int = 5,
    confirm: int = 0,
    size: int | None = None,
) -> pd.DataFrame:
    """All edges for one pair of prompts, or for a prompt and the same without a part.

    Returns:
        One row per edge, the largest estimates (without sign) first:

        {columns}
    """
    without = without if corrupted is None else None  # which other analyses of the same records read
    options: dict[str, Any] = dict(without=without, method=method, steps=steps, confirm=confirm, size=size)
    return circuit(model, prompt, corrupted, (answer, rival), **options).edges

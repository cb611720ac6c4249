"""A circuit as a graph: layers from bottom to top, tokens or roles of tokens from left to right.

A node is a head, an MLP, the embedding or the logits, and does its work at several tokens; it stands at the one where its
estimate is largest in size. Edges are sums over all tokens: they lead to a head's queries (at its left), keys (below it) or
values (at its right), and those to the keys and values of a group to each of its heads in the circuit. Every size of the slider
is a circuit that was run, and its nodes are placed anew, in the rows and columns that it needs.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.analyses import AtSizes, Circuit, why_attends
from kvlens.analyses.circuits.circuit import Order
from kvlens.checks import Within, checked
from kvlens.errors import KVLensError, brief
from kvlens.model import HeadsRead, visit_heads
from kvlens.viz._text import data_script, html_text, label, number, printable, quantized, rounded
from kvlens.viz.page import Piece

if TYPE_CHECKING:
    import networkx
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path

USUAL_SIZES = (10, 20, 50, 100, 200, 500, 1000)
MAX_EDGES = 3000
"""As many as a browser draws in about a second."""
ENOUGH = 0.8
"""The faithfulness of the circuit that is shown first: the smallest that has as much."""
MAX_TOKENS = 40
"""Of a longer prompt only the tokens at which nodes stand have a column."""
MAX_CELLS = 400_000
"""The number of cells of attention patterns in a page; those of the largest nodes come first."""
MAX_REASONS, N_RUN = 8, 3
"""The writers of a key, and of a query, that are listed for a head, and those that are taken out in runs."""
INPUTS = {"q": "queries", "k": "keys", "v": "values", "mlp": "MLPs", "logits": "the logits"}
MORE, LESS = "#9cc1ec", "#f2a59b"
EDGE_COLORS = {"q": "#9b3fb5", "k": "#c26a00", "v": "#0b8a6a", "mlp": "#6b7884", "logits": "#1d5fa8"}
"""Of nodes and edges, as in ``static/kvlens.css``, the former mixed with white."""


@checked
@torch.no_grad()
def circuit_view(
    found: Circuit,
    sizes: Sequence[int | float] | None = None,
    *,
    order: Order = "signed",
    roles: Mapping[str, Sequence[int]] | None = None,
    n_reasons: Annotated[int, Within(0)] = 5,
    title: str = "circuit",
    ax: "Axes | None" = None,
) -> "Piece | Axes":
    """Draw a circuit, with a slider for its size, and for a chosen node its attention, its writers, and what it writes to.

    Args:
        found: from :func:`kvlens.analyses.circuit`.
        sizes: of the slider, ascending, each the number of edges or their share of all, as of ``Circuit.keep``; each is run.
            None takes 10, 20, 50, ... up to 1,000 edges of a circuit of all edges, and a circuit of some as it is.
        order: of estimates, by which edges are kept, as of ``Circuit.keep``: by value or by size, which the picture says.
        roles: columns in place of tokens: positions by name, such as ``{"names": [1, 3], "last": [-1]}``; all others are one
            column. With pairs of several lengths they are counted from the end.
        n_reasons: for how many heads, those with the largest estimates of the circuit that is shown first, it is said why they
            attend (:func:`kvlens.analyses.why_attends`, on the first clean prompt); each takes about a second.
        title: title above the graph.
        ax: draw the circuit that is shown first into these matplotlib axes instead, and return them.

    Returns:
        A `Piece`; ``ax`` where it was given.

    Raises:
        KVLensError: sizes that do not ascend, a circuit without edges or of too many, positions outside the prompts.
    """
    at = _at_sizes(found, sizes, order)
    drawing = _drawing(found, at, roles)
    if ax is not None:
        return _draw(ax, drawing, title)
    heads = drawing.nodes[drawing.nodes["head"] >= 0].sort_values("estimate", key=abs, ascending=False, kind="stable")
    shown = heads[heads["node"].isin(drawing.stops[drawing.first]["places"])]
    reasons = {row.node: _reasons(found, drawing, row) for row in shown.head(n_reasons).itertuples()}
    data = {
        **_json(found, drawing),
        "n_layers": found.model.cfg.n_layers,
        "clean": at.clean,
        "corrupted": at.corrupted,
        "patterns": _patterns(found, drawing, heads),
        "reasons": {node: reason for node, reason in reasons.items() if reason is not None},
    }
    body = (
        f'<figure class="piece" data-kvlens="circuit"><figcaption>{html_text(title)}</figcaption>'
        f'<p class="note">{html_text(_note(found, drawing, at))}</p><div class="circuit"></div>'
        f"{data_script(data)}</figure>"
    )
    return Piece(title, body, circuitsvis=True, figure=functools.partial(_figure, drawing, title))


class _Drawing(NamedTuple):
    """What is drawn of a circuit.

    Attributes:
        nodes: rows of ``Circuit.nodes`` in the largest circuit, by name, with the ``column`` where they stand.
        edges: rows of ``Circuit.edges`` in it, with the number of the first circuit that has them, ``since``, and the nodes
            that they lead ``to``.
        columns: their names, from left to right.
        stops: of each circuit its numbers, its rows and columns, and the places of its nodes.
        first: which of them is shown first.
        prompt: the first of the longest clean prompts.
        tokens, corrupted: its tokens as text, and those of its corrupted one.
    """

    nodes: pd.DataFrame
    edges: pd.DataFrame
    columns: list[str]
    stops: list[dict[str, Any]]
    first: int
    prompt: Int[Tensor, " pos"]
    tokens: list[str]
    corrupted: list[str | None]


def _drawing(found: Circuit, at: AtSizes, roles: Mapping[str, Sequence[int]] | None) -> _Drawing:
    graphs = [one.to_networkx() for one in at.circuits]
    longest = max(found.batches, key=lambda pairs: (pairs.n_asked, pairs.n_answer))
    tokens, corrupted = found.texts(longest, 0)
    columns, effects, last = _columns(found, tokens, roles)
    places = [*effects.abs().argmax(dim=1).tolist(), last]  # where the logits are read
    nodes = found.nodes.assign(column=places).set_index("node", drop=False)
    nodes = nodes[nodes["node"].isin(graphs[-1])]
    stops = [_stop(nodes, graph, row) for graph, row in zip(graphs, at.table.to_dict("records"), strict=True)]
    enough = [*(at.table["faithfulness"] >= ENOUGH), True].index(True)
    return _Drawing(nodes, _edges(graphs), columns, stops, min(enough, len(stops) - 1), longest.clean[0], tokens, corrupted)


def _at_sizes(found: Circuit, sizes: Sequence[int | float] | None, order: Order) -> AtSizes:
    """The circuits that are drawn: without sizes the usual ones of a circuit of all edges, or one of some as it is."""
    n = found.n_units("edges")
    usual = [size for size in USUAL_SIZES if size < n] + ([n] if n <= USUAL_SIZES[-1] else [])
    at = found.at_sizes(sizes if sizes is not None else usual if int(found.kept.sum()) == n else [], order=order)
    n_edges = at.table["n_edges"]
    if not n_edges.is_monotonic_increasing:
        raise KVLensError(f"sizes: expected ascending sizes, got circuits of {n_edges.tolist()} edges")
    if not 0 < n_edges.iloc[-1] <= MAX_EDGES:
        raise KVLensError(
            f"circuit_view: expected 1 to {MAX_EDGES:,} edges that lead from the embedding to the logits, got "
            f"{n_edges.iloc[-1]:,}; keep another number, or pass sizes"
        )
    return at


def _columns(
    found: Circuit, tokens: list[str], roles: Mapping[str, Sequence[int]] | None
) -> tuple[list[str], Float[Tensor, "writer column"], int]:
    """Names of the columns, each node's estimate in them, and the last position's; positions of no role are the first."""
    width = found.by_position.shape[1]
    if roles is None:
        behind = [""] * (width - len(tokens))  # what is read of longer answers than that of this prompt
        return [*tokens, *behind], found.by_position, width - 1
    same = len({pairs.n_asked for pairs in found.batches}) == 1
    of_role = torch.zeros(width, dtype=torch.long)
    for column, (name, positions) in enumerate(roles.items(), start=1):
        for position in positions:
            if not -width <= position < (width if same else 0):
                expected = f"{-width}..{width - 1}" if same else f"{-width}..-1, as the prompts have several lengths"
                raise KVLensError(f"roles: {name}: expected positions in {expected}, got {brief(position)}")
            of_role[position] = column
    effects = found.by_position.new_zeros(len(found.by_position), len(roles) + 1).index_add(1, of_role, found.by_position)
    return ["other", *map(str, roles)], effects, int(of_role[-1])


def _edges(graphs: list["networkx.DiGraph"]) -> pd.DataFrame:
    """The edges of the last graph; it has those of the ones before."""
    rows = []
    for writer, reader, row in graphs[-1].edges(data=True):
        if row:  # all but those from a head's inputs to the head
            to = list(graphs[-1].successors(reader)) if "input" in graphs[-1].nodes[reader] else [reader]
            rows.append({**row, "since": sum(not graph.has_edge(writer, reader) for graph in graphs), "to": to})
    return pd.DataFrame(rows)


def _stop(nodes: pd.DataFrame, graph: "networkx.DiGraph", row: dict[str, object]) -> dict[str, object]:
    """One circuit: its numbers, its layers, its columns with the number of nodes in their fullest row, and of each node the
    number of its row and where it stands in its column, from 0 to 1."""
    import networkx

    here = nodes[nodes["node"].isin(graph)]
    layers, fullest, places = sorted(set(here["layer"])), dict[int, int](), dict[str, list[float]]()
    for column, of in here.groupby("column"):
        by_layer = {layer: row["node"].tolist() for layer, row in of.groupby("layer")}
        fullest[column] = max(map(len, by_layer.values()))
        found = networkx.multipartite_layout(networkx.empty_graph(of["node"]), subset_key=by_layer, align="horizontal")
        low, high = (float(end(x for x, _ in found.values())) for end in (min, max))
        for node, layer in of["layer"].items():
            x = 0.5 if low == high else round((float(found[node][0]) - low) / (high - low), 4)
            places[node] = [layers.index(layer), x]
    n_columns = 1 + int(nodes["column"].max())
    shown = range(n_columns) if n_columns <= MAX_TOKENS else sorted(fullest)
    return {**row, "layers": layers, "columns": [[column, fullest.get(column, 0)] for column in shown], "places": places}


def _note(found: Circuit, drawing: _Drawing, at: AtSizes) -> str:
    chosen = at.circuits[0]
    by = {"signed": "by value, those that speak for the answer first", "absolute": "by size"}[chosen.order]
    if chosen.by == "nodes":
        by += ", with all edges between them"
    counted = {"edges": "edges", "nodes": "heads and MLPs"}[chosen.by]
    n, by_role = sum(len(pairs.clean) for pairs in found.batches), drawing.columns[: len(drawing.tokens)] != drawing.tokens
    which = "the first" if len(found.batches) == 1 else "one"
    tokens = "" if n == 1 or by_role else f"; tokens are those of {which} of {n} pairs"
    return (
        "Edges lead from what writes to the residual stream, up to what reads it, and are as wide as their estimates: by how "
        "much the metric falls with this edge alone corrupted, to first order (dashed: it rises). Nodes are as large as theirs "
        f"(red: it rises), and stand at the {'role' if by_role else 'token'} where that is largest{tokens}. Each size is a "
        f"circuit that was run; its {counted} are the largest {by}."
    )


def _json(found: Circuit, drawing: _Drawing) -> dict[str, object]:
    index = {node: i for i, node in enumerate(drawing.nodes["node"])}
    by_position = dict(zip(found.nodes["node"], found.by_position, strict=False))  # the logits write nothing
    return {
        "nodes": [[x.node, x.layer, x.head, rounded(x.estimate, 6), x.column] for x in drawing.nodes.itertuples()],
        "edges": [
            [
                index[x.writer],
                [index[node] for node in x.to],
                x.input,
                *(rounded(v, 6) for v in (x.estimate, x.metric_fall)),
                x.since,
            ]
            for x in drawing.edges.itertuples()
        ],
        "columns": drawing.columns,
        "tokens": drawing.tokens,
        "corrupted_tokens": drawing.corrupted,
        "by_position": [quantized(by_position[node]) if node in by_position else None for node in index],
        "stops": [{**stop, "places": [[index[node], *at] for node, at in stop["places"].items()]} for stop in drawing.stops],
        "first": drawing.first,
    }


def _patterns(found: Circuit, drawing: _Drawing, heads: pd.DataFrame) -> dict[str, object]:
    """The attention of as many of the heads as there is room for, on the prompt that is shown."""
    chosen, patterns = heads.head(MAX_CELLS // len(drawing.prompt) ** 2), dict[str, object]()

    def keep(layer: int, read: HeadsRead) -> None:
        for node, head in chosen.loc[chosen["layer"] == layer, "head"].items():
            patterns[str(node)] = quantized(read.pattern[0, head].float().cpu(), full=1.0, levels=255)

    visit_heads(found.model, drawing.prompt[None], keep, ("pattern",))
    return patterns


def _reasons(found: Circuit, drawing: _Drawing, head: Any) -> dict[str, object] | None:
    """Why a head attends from the token where its estimate is largest to the one with the most attention; None if unknown."""
    query = int(found.by_position[found.graph.writers.index((head.layer, head.head))].abs().argmax())
    try:
        table = why_attends(found.model, drawing.prompt, None, head.layer, head.head, query=query, n_run=N_RUN)
    except KVLensError:  # its scores are no sum over writers
        return None
    rows = [
        [side, writer.removeprefix("head ").replace("mlp ", "mlp"), rounded(contrast), rounded(run)]
        for side in ("key", "query")
        for writer, contrast, run in table.loc[table["side"] == side, [f"{side}_writer", "contrast", "contrast_run"]]
        .head(MAX_REASONS)
        .itertuples(index=False)
    ]
    asked = table.iloc[0]
    return {"key": int(asked["key_position"]), "query": query, "attention": rounded(asked["attention"]), "rows": rows}


# --- the static figure -----------------------------------------------------------------------------------------------


GAP = 0.4
"""The width of a column without nodes; one node is 1 wide."""


def _figure(drawing: _Drawing, title: str) -> "Figure":
    from matplotlib.figure import Figure

    stop = drawing.stops[drawing.first]
    wide = sum(max(n, GAP) for _, n in stop["columns"])
    figure = Figure(figsize=(max(6, 0.5 * wide + 2), max(3, 0.36 * len(stop["layers"]) + 1.6)), layout="constrained")
    _draw(figure.add_subplot(), drawing, title)
    return figure


def _draw(ax: "Axes", drawing: _Drawing, title: str) -> "Axes":
    """Draw the circuit that is shown first; a row is 1 high."""
    stop = drawing.stops[drawing.first]
    left, wide = dict[int, float](), 0.0
    write = functools.partial(ax.text, fontsize=7, color="#5d6975", parse_math=False)
    for column, n in stop["columns"]:
        left[column], wide = wide, wide + max(n, GAP)
        name = printable(label(drawing.columns[column]))[:16]
        write((left[column] + wide) / 2, -0.6, name, ha="center", va="top", rotation=90)
    for row, layer in enumerate(stop["layers"]):
        if 0 <= layer < drawing.nodes.loc["logits", "layer"]:
            write(-0.5, row, f"layer {layer}" if row == 1 else str(layer), ha="right", va="center")
    column, fullest = drawing.nodes["column"], dict(stop["columns"])
    place = {
        node: (left[column[node]] + 0.5 + x * (fullest[column[node]] - 1), float(row))
        for node, (row, x) in stop["places"].items()
    }
    _draw_edges(ax, drawing, place)
    _draw_nodes(ax, drawing, place)
    ax.legend(title="read by", frameon=False, fontsize=7, title_fontsize=7, loc="lower right")
    told = f"{stop['n_edges']:,} edges, faithfulness {number(stop['faithfulness'])}"
    ax.set_title(f"{printable(title)}: {told}", fontsize=9, parse_math=False)
    ax.set(xlim=(-1.2, wide + 0.3), ylim=(-0.6, len(stop["layers"]) - 0.4))
    ax.axis("off")
    return ax


def _draw_nodes(ax: "Axes", drawing: _Drawing, place: Mapping[str, tuple[float, float]]) -> None:
    most = drawing.nodes["estimate"].abs().max() or 1.0
    for row in drawing.nodes.loc[list(place)].itertuples():
        share = 0.0 if math.isnan(row.estimate) else abs(row.estimate) / most
        color = "#dde3e9" if math.isnan(row.estimate) else LESS if row.estimate < 0 else MORE
        size, marker = (14 + 10 * math.sqrt(share)) ** 2, "o" if row.head >= 0 else "s"
        ax.scatter(*place[row.node], s=size, c=color, marker=marker, edgecolors="white", linewidths=1, zorder=3)
        ax.text(*place[row.node], row.node, fontsize=6, ha="center", va="center", zorder=4)


def _draw_edges(ax: "Axes", drawing: _Drawing, place: Mapping[str, tuple[float, float]]) -> None:
    from matplotlib.collections import PathCollection

    edges = drawing.edges[drawing.edges["since"] <= drawing.first]
    most = edges["estimate"].abs().max() or 1.0
    for kind, name in INPUTS.items():
        ax.plot([], [], color=EDGE_COLORS[kind], label=name)
        for hurts, style in ((False, "-"), (True, "--")):
            some = edges[(edges["input"] == kind) & ((edges["estimate"] < 0) == hurts)]
            lines = [
                (_path(place[x.writer], place[node], kind), x.estimate)
                for x in some.itertuples()
                for node in x.to
                if node in place
            ]
            widths = [0.4 + 3.5 * math.sqrt(abs(estimate) / most) for _, estimate in lines]
            paths, color = [path for path, _ in lines], EDGE_COLORS[kind]
            drawn = PathCollection(paths, linewidths=widths, facecolors="none", edgecolors=color, linestyles=style, alpha=0.6)
            ax.add_collection(drawn)


def _path(start: tuple[float, float], end: tuple[float, float], kind: str) -> "Path":
    """A curve to the left of a node for its queries, to the right for its values; around what stands between."""
    from matplotlib.path import Path

    (x0, y0), (x1, y1) = start, end
    side = {"q": -0.16, "v": 0.16}.get(kind, 0.0)
    bend = 0.5 * (y1 - y0)
    aside = (side or 0.1) * bend if abs(x1 - x0) < 0.5 else 0.0
    points = [(x0, y0), (x0 + aside, y0 + bend), (x1 + side + aside, y1 - bend), (x1 + side, y1)]
    return Path(points, [Path.MOVETO, *[Path.CURVE4] * 3])

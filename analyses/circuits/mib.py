"""What circuits of several sizes keep of the metric, by MIB's measures; see the package."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import nan
from typing import Any, NamedTuple, get_args

import pandas as pd
import torch

from kvlens import KVLensError
from kvlens.checks import checked
from kvlens.errors import brief

from ..declaration import Columns
from .circuit import Circuit, Counted, Order
from .pairs import read_pairs

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The shares of edges, or of nodes, at which MIB measures a circuit."""
FAITHFULNESS = Columns(
    order=("str", "of estimates, by which edges or nodes are kept: ``signed`` (by value) or ``absolute`` (by size)"),
    share=("float64", "of edges, or of nodes, that were asked for"),
    n_kept=("int64", "as many they are, rounded down, before those that lead nowhere are removed"),
    metric=("float64", "of the circuit, mean over pairs"),
    faithfulness=("float64", "(metric - corrupted) / (clean - corrupted)"),
)


class Faithfulness(NamedTuple):
    """What circuits of several sizes keep of the metric.

    Attributes:
        table: one row per order and share.
        cpr: the area under f of the circuits by value; NaN where these were not run.
        cmd: the area under |1 - f| of the circuits by size; NaN where these were not run.
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
    order: Order | None = None,
    pairs: Mapping[str, Any] | None = None,
) -> Faithfulness:
    """Run circuits of several sizes, and measure by MIB how much of the metric each keeps.

    MIB runs each size twice: CPR is of the circuits that are ordered by value, which leave out what speaks against the answer,
    and CMD of those that are ordered by size. The other way round neither is MIB's, and neither is given.

    Args:
        found: whose estimates choose the edges.
        shares: of all edges or nodes, in ascending order.
        by: as in :meth:`Circuit.keep`.
        order: ``signed`` or ``absolute``, as there; None for both.
        pairs: others to measure on: arguments of :func:`circuit` by name, such as ``{"prompt": ..., "corrupted": ...,
            "answer": ..., "rival": ...}``.

    Returns:
        The table, and both areas, over the range of the shares:

        {columns}

    Raises:
        KVLensError: as :meth:`Circuit.keep` and :func:`circuit`; a metric that is the same on both prompts.
    """
    if len(shares) < 2 or any(low >= high for low, high in pairwise(shares)):
        raise KVLensError(f"shares: expected at least two, in ascending order, to have areas between them, got {brief(shares)}")
    found = found if pairs is None else replace(found, batches=read_pairs(found.model, found.graph, **pairs))
    orders = get_args(Order) if order is None else (order,)
    circuits = [found.keep(float(share), by=by, order=each).kept for each in orders for share in shares]
    clean, corrupted, values, f = found.outcome(circuits)
    at, n_all = torch.tensor(shares, dtype=torch.float64), found.n_units(by)
    table = FAITHFULNESS.frame(
        {
            "order": [each for each in orders for _ in shares],
            "share": at.repeat(len(orders)),
            "n_kept": [int(share * n_all) for share in shares] * len(orders),
            "metric": values,
            "faithfulness": f,
        }
    )
    of = dict(zip(orders, f.split(len(shares)), strict=True))
    cpr, cmd = of.get("signed", nan * at), (1 - of.get("absolute", nan * at)).abs()
    return Faithfulness(table, float(torch.trapezoid(cpr, at)), float(torch.trapezoid(cmd, at)), clean, corrupted)

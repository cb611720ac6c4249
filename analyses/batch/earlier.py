"""Batches started by kvlens 0.1.0: its names of options and columns, and the tables that cannot be continued.

The settings of a batch contain the names of its options and columns, and its rows the columns. Here those of 0.1.0 (format 1)
are translated to the current names, so that a batch in progress can be resumed.
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute

from kvlens import KVLensError

from .table import stream

FORMAT_VERSION = 2
OPTIONS = {"bias_positions": {"places": "at"}}
COLUMNS = {
    "bias_positions": {"text_position": "position"},
    "dual_demonstrations": {"query": "position", "position": "prompt_position"},
    "dual_losses": {"query": "position"},
}
"""Analysis -> name in format 1 -> name today."""
VALUES = {"activation_patching": "point", "bias_effects": "part", "bias_positions": "part"}
"""Analysis -> the column (and, of the first two, the option) in which ``boundary`` is ``shift_state`` today."""
OTHER_NUMBERS = {
    "induction_heads": "it has one row per head and kind of attention now; induction_verdicts has one per head",
    "prompt_by_depth": "loss_change had the opposite sign in some of its versions",
    "prompt_copies": "position counts from the beginning of the text now",
}
"""Analysis -> why rows of format 1 and of today cannot be in one table."""


def with_names_of_today(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a batch started by any version of kvlens, with the current names of options and columns.

    Raises:
        KVLensError: the meaning of its rows has changed.
    """
    if settings.get("format_version") != 1:
        return dict(settings)
    analysis = settings.get("analysis")
    if analysis in OTHER_NUMBERS:
        raise KVLensError(
            f"this batch was started by kvlens 0.1.0, and the table of {analysis} has changed: {OTHER_NUMBERS[analysis]}; "
            "give another output, or --overwrite to compute it again"
        )
    options, columns = OPTIONS.get(str(analysis), {}), COLUMNS.get(str(analysis), {})
    return {
        **settings,
        "format_version": FORMAT_VERSION,
        "options": {options.get(name, name): _renamed(analysis, value) for name, value in settings["options"].items()},
        "columns": [columns.get(name, name) for name in settings["columns"]],
    }


def _renamed(analysis: Any, value: Any) -> Any:
    """An option's value."""
    if analysis not in VALUES or not isinstance(value, list):
        return value
    return ["shift_state" if each == "boundary" else each for each in value]


def rows_with_names_of_today(settings: Mapping[str, Any], rows: bytes) -> bytes:
    """The rows of a prompt, written by any version of kvlens, with the current names of columns and values.

    Args:
        settings: the settings with which the batch was started.
        rows: as :func:`kvlens.analyses.batch.table.to_bytes` makes them.
    """
    analysis = settings.get("analysis")
    if settings.get("format_version") != 1 or not {analysis} & {*COLUMNS, *VALUES}:
        return rows
    table = pa.ipc.open_stream(rows).read_all()
    if table.column_names == settings["columns"]:  # else they were added after the batch was resumed
        table = table.rename_columns(with_names_of_today(settings)["columns"])
    if (name := VALUES.get(str(analysis))) in table.column_names:
        at, values = table.column_names.index(name), table[name]
        new = pa.compute.if_else(pa.compute.equal(values, "boundary"), pa.scalar("shift_state", values.type), values)
        table = table.set_column(at, table.schema.field(at), new)
    return stream(table, table.schema)

"""Batches that kvlens 0.1.0 began: the names that it gave to options and columns, and the tables that cannot be continued.

The settings of a batch hold the names of its options and columns. Here those of 0.1.0 (format 1) become today's, so that a
batch in progress is resumed; the columns of its rows are renamed where the table is written.
"""

from collections.abc import Mapping
from typing import Any

from kvlens import KVLensError

FORMAT_VERSION = 2
OPTIONS = {"bias_positions": {"places": "at"}}
COLUMNS = {
    "bias_positions": {"text_position": "position"},
    "dual_demonstrations": {"query": "position", "position": "prompt_position"},
    "dual_losses": {"query": "position"},
}
"""Analysis -> name in format 1 -> name today."""
OTHER_NUMBERS = {
    "induction_heads": "it has one row per head and kind of attention now; induction_verdicts has one per head",
    "prompt_by_depth": "loss_change had the opposite sign in some of its versions",
    "prompt_copies": "position counts from the beginning of the text now",
}
"""Analysis -> why rows of format 1 and of today cannot stand in one table."""


def with_names_of_today(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a batch, by whatever version of kvlens it was begun, with the names that options and columns have now.

    Raises:
        KVLensError: its rows mean something else today.
    """
    if settings.get("format_version") != 1:
        return dict(settings)
    analysis = settings.get("analysis")
    if analysis in OTHER_NUMBERS:
        raise KVLensError(
            f"this batch was begun by kvlens 0.1.0, and the table of {analysis} has changed since: {OTHER_NUMBERS[analysis]}. "
            "Give another output, or --overwrite to compute it again"
        )
    options, columns = OPTIONS.get(str(analysis), {}), COLUMNS.get(str(analysis), {})
    return {
        **settings,
        "format_version": FORMAT_VERSION,
        "options": {options.get(name, name): value for name, value in settings["options"].items()},
        "columns": [columns.get(name, name) for name in settings["columns"]],
    }

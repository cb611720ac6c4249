"""A report on disk: a page to open, one Parquet file a table, the bias, and ``summary.json`` with every headline figure.

An explanation alone (``kvlens explain --out``) is its page, its tables, and ``summary.json``.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvlens.checks import checked
from kvlens.explanation import Explained, explanation_view
from kvlens.files import plain, write_folder
from kvlens.files.tables import table_bytes
from kvlens.model import KVModel
from kvlens.report.build import Report
from kvlens.report.folder import EXPLANATION_FOLDER, FORMAT_OF_EXPLANATION, REPORT_FOLDER, SUMMARY
from kvlens.report.page import build_page
from kvlens.report.summary import answer_figures, model_facts, versions

BIAS = "bias.safetensors"
PAGE, EXPLANATION_PAGE = "report.html", "explanation.html"


@checked
def write_report(report: Report, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write ``report`` to ``folder``, whole or not at all; return the folder's absolute path.

    Args:
        report: from :func:`kvlens.report.build_report`.
        folder: its path; parents are made.
        overwrite: replace a report that stands there; anything else is never replaced.

    Raises:
        KVLensError: the place is taken or not writable.
    """

    def fill(temporary: Path) -> None:
        for name, table in report.tables.items():
            (temporary / f"{name}.parquet").write_bytes(table_bytes(table))
        report.bias.save(temporary / BIAS)
        build_page(report).save_html(temporary / PAGE)
        bias = {**report.summary["bias"], "file_bytes": (temporary / BIAS).stat().st_size}
        summary = {**report.summary, "bias": bias, "files": report_files(report)}
        _write_summary(summary, temporary)

    return write_folder(folder, fill, REPORT_FOLDER, overwrite=overwrite)


def report_files(report: Report) -> list[str]:
    """The files of the report, relative to its folder. Whatever is written must stand here, or it blocks overwriting."""
    return [SUMMARY, *(f"{name}.parquet" for name in report.tables), BIAS, PAGE]


@checked
def write_explanation(
    found: Explained,
    folder: str | Path,
    *,
    model: KVModel,
    model_name: str,
    overwrite: bool = False,
) -> list[str]:
    """Write an explanation's page and tables to ``folder``, whole or not at all; return the names of the files.

    Args:
        found: from :func:`kvlens.explain`.
        folder: its path; parents are made.
        model, model_name: who answered, for ``summary.json``.
        overwrite: replace an explanation that stands there; anything else is never replaced.

    Raises:
        KVLensError: the place is taken or not writable.
    """
    tables = {f"{name}.parquet": table for name, table in found.tables().items()}
    summary = {
        "format": FORMAT_OF_EXPLANATION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "model": model_facts(model, model_name),
        "answer": answer_figures(found),
        "files": (names := [SUMMARY, *tables, EXPLANATION_PAGE]),
    }

    def fill(temporary: Path) -> None:
        for name, table in tables.items():
            (temporary / name).write_bytes(table_bytes(table))
        explanation_view(found).save_html(temporary / EXPLANATION_PAGE)
        _write_summary(summary, temporary)

    write_folder(folder, fill, EXPLANATION_FOLDER, overwrite=overwrite)
    return names


def _write_summary(summary: Mapping[str, Any], folder: Path) -> None:
    text = json.dumps(plain(summary), indent=2, ensure_ascii=False, allow_nan=False)
    (folder / SUMMARY).write_text(text + "\n", encoding="utf-8")

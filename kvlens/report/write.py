"""A report on disk: a page to open, one Parquet file a table, the bias, and ``summary.json`` with every headline figure.

An explanation alone (``kvlens explain --out``) is its tables, and ``summary.json`` with the question.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvlens.analyses.attribution.explain import Explained
from kvlens.checks import checked
from kvlens.files import plain, write_folder
from kvlens.files.tables import table_bytes
from kvlens.model import KVModel
from kvlens.report.build import Report
from kvlens.report.folder import EXPLANATION_FOLDER, FORMAT_OF_EXPLANATION, REPORT_FOLDER, SUMMARY
from kvlens.report.page import build_page
from kvlens.report.summary import answer_figures, model_facts, versions

BIAS = "bias.safetensors"
PAGE = "report.html"


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
    prompt: str,
    text: str,
    by: str,
    overwrite: bool = False,
) -> list[str]:
    """Write the tables of an explanation that have rows to ``folder``, whole or not at all; return the names of the files.

    Args:
        found: from :func:`kvlens.analyses.attribution.explain.explain`.
        folder: its path; parents are made.
        model, model_name, prompt, text, by: the question, for ``summary.json``.
        overwrite: replace an explanation that stands there; anything else is never replaced.

    Raises:
        KVLensError: the place is taken or not writable.
    """
    tables = {"statements": found.statements, "units": found.units, "heads": found.heads, "positions": found.positions}
    tables = {f"{name}.parquet": table for name, table in tables.items() if len(table.columns)}
    summary = {
        "format": FORMAT_OF_EXPLANATION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "model": model_facts(model, model_name),
        "prompt": prompt,
        "text": text,
        "answer": answer_figures(found, by),
        "files": (names := [SUMMARY, *tables]),
    }

    def fill(temporary: Path) -> None:
        for name, table in tables.items():
            (temporary / name).write_bytes(table_bytes(table))
        _write_summary(summary, temporary)

    write_folder(folder, fill, EXPLANATION_FOLDER, overwrite=overwrite)
    return names


def _write_summary(summary: Mapping[str, Any], folder: Path) -> None:
    text = json.dumps(plain(summary), indent=2, ensure_ascii=False, allow_nan=False)
    (folder / SUMMARY).write_text(text + "\n", encoding="utf-8")

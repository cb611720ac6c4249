"""A report on disk: a page to open, one Parquet file a table, the bias, and ``summary.json`` with every headline figure."""

import json
from pathlib import Path

from kvlens.checks import checked
from kvlens.files import plain, write_folder
from kvlens.report.build import Report
from kvlens.report.folder import SUMMARY, check_folder
from kvlens.report.page import build_page

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
            table.to_parquet(temporary / f"{name}.parquet", index=False)
        report.bias.save(temporary / BIAS)
        build_page(report).save_html(temporary / PAGE)
        bias = {**report.summary["bias"], "file_bytes": (temporary / BIAS).stat().st_size}
        summary = {**report.summary, "bias": bias, "files": report_files(report)}
        text = json.dumps(plain(summary), indent=2, ensure_ascii=False, allow_nan=False)
        (temporary / SUMMARY).write_text(text + "\n", encoding="utf-8")

    return write_folder(check_folder(folder, overwrite=overwrite), fill)


def report_files(report: Report) -> list[str]:
    """The files of the report, relative to its folder. Whatever is written must stand here, or it blocks overwriting."""
    return [SUMMARY, *(f"{name}.parquet" for name in report.tables), BIAS, PAGE]

"""The report on one prompt: what its conversion into a bias keeps, what the prompt does, and which heads carry it.

It sits on top of the analyses. The names below are imported when they are first used, so that a bad output
folder is found before torch is loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlens.report.build import Report, build_report
    from kvlens.report.example import EXAMPLE_MODEL, Example, check_report_folder, example_for
    from kvlens.report.page import write_report
    from kvlens.report.printed import print_report

_HOMES = {
    "EXAMPLE_MODEL": "kvlens.report.example",
    "Example": "kvlens.report.example",
    "Report": "kvlens.report.build",
    "build_report": "kvlens.report.build",
    "check_report_folder": "kvlens.report.example",
    "example_for": "kvlens.report.example",
    "print_report": "kvlens.report.printed",
    "write_report": "kvlens.report.page",
}

__all__ = [
    "EXAMPLE_MODEL",
    "Example",
    "Report",
    "build_report",
    "check_report_folder",
    "example_for",
    "print_report",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvlens.report' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

"""The report on one prompt: what its conversion into a bias keeps, what the prompt does, and which heads carry it.

It sits on top of the analyses. The names below are imported when they are first used, so that a bad output
folder is found before torch is loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlens.report.build import Report, build_report
    from kvlens.report.inputs import EXAMPLE_MODEL, Example, check_report_folder, example_for
    from kvlens.report.page import write_report
    from kvlens.report.terminal import print_report

_HOMES = {
    "EXAMPLE_MODEL": "kvlens.report.inputs",
    "Example": "kvlens.report.inputs",
    "Report": "kvlens.report.build",
    "build_report": "kvlens.report.build",
    "check_report_folder": "kvlens.report.inputs",
    "example_for": "kvlens.report.inputs",
    "print_report": "kvlens.report.terminal",
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

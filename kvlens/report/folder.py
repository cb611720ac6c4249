"""The folders of a report and of an explanation: whether one may be written there, by the rule of :mod:`kvlens.files`."""

from pathlib import Path

from kvlens import files
from kvlens.checks import checked

FORMAT = "kvlens.report"
SUMMARY = "summary.json"
FORMAT_OF_EXPLANATION = "kvlens.explanation"
REPORT_FOLDER = files.FolderKind("a kvlens report", files.listed_in(SUMMARY, FORMAT, "files"))
EXPLANATION_FOLDER = files.FolderKind("an explanation", files.listed_in(SUMMARY, FORMAT_OF_EXPLANATION, "files"))


@checked
def check_folder(folder: str | Path, *, overwrite: bool = False) -> Path:
    """Return the absolute path of a folder that a report may be written to; only what dead writers left is cleared.

    Args:
        folder: its path; it need not exist.
        overwrite: whether a report that stands there may be replaced.

    Raises:
        KVLensError: the place is taken (by a report, without ``overwrite``; by anything else, always) or not writable.
    """
    return files.check_folder(folder, REPORT_FOLDER, overwrite=overwrite)

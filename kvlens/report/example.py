"""What ``kvlens report`` knows before torch is imported: whether a folder may be written to, and the built-in example.

The example is the prompt and text that it takes when none is given. For the shipped models of made-up stories: a story, and a
question that it alone answers. For models of other text: the help page of a function that does not exist. No training text
holds either, so what the model knows of them comes from the prompt.
"""

from pathlib import Path
from typing import NamedTuple

from kvlens import files
from kvlens.checks import checked

FORMAT = "kvlens.report"
REPORT_SUMMARY = "summary.json"
FORMAT_OF_EXPLANATION = "kvlens.explanation"
REPORT_FOLDER = files.FolderKind("a kvlens report", files.listed_in(REPORT_SUMMARY, FORMAT, "files"))
EXPLANATION_FOLDER = files.FolderKind("an explanation", files.listed_in(REPORT_SUMMARY, FORMAT_OF_EXPLANATION, "files"))

EXAMPLE_MODEL = "facts-linear"
"""What the report is made of when neither a model nor a prompt is given."""
TEXT_MODEL = "docs-linear"
"""What it is made of when a prompt is given and no model."""
STORY_MODELS = ("facts-linear", "facts-gpt2", "facts-hybrid")
NESTED_MODELS = ("facts-hops-linear", "facts-hops-gpt2")


class Example(NamedTuple):
    """What is converted, and what the predictions are compared on."""

    prompt: str
    text: str


STORY = Example(
    prompt="The kite is in the barn. Mira keeps a goat. The drum stands in the cellar. Pavel has a parrot. "
    "Look for the lamp in the attic. At night Kaya feeds a donkey.",
    text=" Which animal does Pavel keep? Pavel keeps a parrot. Which animal does Kaya keep? Kaya keeps a",
)
NESTED = Example(
    prompt="The bin is in the stable. The tub is in the garden. The clock is in the tub. The mirror is in the bin.",
    text=" Which room holds the clock? The",
)
HELP_PAGE = Example(
    prompt="""\
frobnicate(widget, colour='purple', depth=7)

Frobnicate a widget and return it.

Parameters
----------
widget : Widget
    The widget to frobnicate.
colour : str, optional
    The colour of the frobnicated widget. The default is 'purple'.
depth : int, optional
    How deep the widget is frobnicated. The default is 7.

Returns
-------
Widget
    The frobnicated widget.

""",
    text="""\
Examples
--------
>>> widget = Widget()
>>> frobnicate(widget, colour='purple', depth=7)
The widget is""",
)


@checked
def check_report_folder(folder: str | Path, *, overwrite: bool = False) -> Path:
    """Return the absolute path of a folder that a report may be written to; only what dead writers left is cleared.

    Args:
        folder: its path; it need not exist.
        overwrite: whether a report that stands there may be replaced.

    Raises:
        KVLensError: the place is taken (by a report, without ``overwrite``; by anything else, always) or not writable.
    """
    return files.check_folder(folder, REPORT_FOLDER, overwrite=overwrite)


@checked
def example_for(model: str) -> Example:
    """The built-in example for a model of that name or folder."""
    if model in NESTED_MODELS:
        return NESTED
    return STORY if model in STORY_MODELS else HELP_PAGE

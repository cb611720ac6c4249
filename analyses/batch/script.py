"""The command of every analysis: ``kvlens analyse NAME`` and ``python -m analyses NAME``.

This part does not import torch; :mod:`kvlens.analyses.batch.command` does the rest.
"""

import sys
from collections.abc import Sequence

from kvlens import KVLensError
from kvlens.terminal import paragraphs, terminal_width

from ..registry import ANALYSES, locate
from .arguments import check_early

BAD_INPUT = 2
EPILOG = """\
PROMPTS is a JSONL file (one object per line: "prompt", or the "messages" of a chat, and optionally "text", "id" and fields of \
the analysis), a .json file with the messages of one chat, any other \
file with one prompt per line, or a folder with one prompt per file. FILE gets one row group per prompt, by model, then in the \
order of the prompts; FILE.errors.jsonl lists the lines and prompts without rows, and --retry-failed runs those prompts again. \
Until the batch is complete, FILE.partial has the results so far: the same command resumes a run that was interrupted or killed.

  kvlens analyse bias_by_head prompts.jsonl --model docs-linear --text ' The' --out table.parquet"""


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m analyses``: run the command and return its exit status; bad input is reported in one line."""
    try:
        return analyse(sys.argv[1:] if argv is None else argv, prog="python -m analyses")
    except KVLensError as error:
        print(f"analyses: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT


def analyse(argv: Sequence[str], prog: str = "kvlens analyse") -> int:
    """``kvlens analyse``: without a name, list the analyses; return the exit status.

    Raises:
        KVLensError: bad input.
    """
    if not argv:
        from .command import print_list

        return print_list(prog)
    name, *rest = argv
    if name in ("-h", "--help"):
        print(f"usage: {prog} [NAME PROMPTS --model MODEL --out FILE [options]]\n\n{paragraphs(_help(prog), terminal_width())}")
        return 0
    if name.startswith("-"):
        raise KVLensError(f"expected the name of an analysis, got {name!r}; `{prog}` lists them")
    locate(name)  # reports a misspelt name at once
    if not {"-h", "--help"} & set(rest):
        check_early(name, rest, prog=f"{prog} {name}")

    from .command import run_analysis

    return run_analysis(name, rest, prog=f"{prog} {name}", epilog=EPILOG)


def _help(prog: str) -> str:
    return (
        "Run an analysis over many prompts and models, into one Parquet file. Without NAME, list the analyses and their "
        f"summaries; `{prog} NAME --help` shows the columns and options of one.\n\n"
        f"{EPILOG}\n\n"
        f"NAME is one of {', '.join(ANALYSES)}, or one of your own as MODULE:OBJECT, for instance "
        "my_package.my_module:MY_ANALYSIS, where the module is found from here or is installed, and the object is a "
        "kvlens.analyses.Analysis."
    )

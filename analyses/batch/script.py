"""The command of every analysis: ``kvlens analyse NAME`` and ``python -m analyses.NAME``, with its own options and columns.

Exit status: 0 when every prompt has its rows, 1 when the table is complete but some lines or prompts gave none, 2 on bad input,
130 on Ctrl-C (then, as after a kill, the same command goes on where it stopped).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from analyses import ANALYSES
from kvlens import KVLensError
from kvlens.errors import nearest

if TYPE_CHECKING:
    from analyses._analysis import Analysis, Option
    from analyses.batch.runner import BatchResult

INCOMPLETE, BAD_INPUT, INTERRUPTED = 1, 2, 130
DTYPES = ("float32", "float64", "bfloat16", "float16")
EPILOG = """\
PROMPTS is a JSONL file (an object a line: "prompt", and where wanted "text", "id" and fields of the analysis), any other file
with a prompt a line, or a folder with a prompt a file. FILE gets one row group a prompt, by model, then in the order of the
prompts; FILE.errors.jsonl names the lines and prompts that gave no rows. Until all is done, FILE.partial holds what is done: a
run that was interrupted or killed goes on with the same command."""


class _Parser(argparse.ArgumentParser):
    """Answers bad input with one line, and a misspelt option with the nearest one."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0] if "unrecognized arguments" in message else ""
        known = nearest(unknown, self._option_string_actions) if unknown.startswith("-") else ""
        raise KVLensError(f"{message}{known} (see {self.prog} --help)")


def main(name: str, argv: Sequence[str] | None = None) -> NoReturn:
    """``python -m analyses.NAME``: run the command and leave with its exit status."""
    try:
        status = run_analysis(name, sys.argv[1:] if argv is None else argv, prog=f"python -m analyses.{name}")
    except KVLensError as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        status = BAD_INPUT
    sys.exit(status)


def analyse(argv: Sequence[str]) -> int:
    """``kvlens analyse``: without a name, list the analyses; return the exit status.

    Raises:
        KVLensError: bad input.
    """
    if not argv:
        return _list()
    name, *rest = argv
    if name in ("-h", "--help"):
        print("usage: kvlens analyse [NAME PROMPTS --model MODEL --out FILE [options]]\n")
        print("Run an analysis over many prompts and models, into one Parquet file. Without NAME, the analyses are listed.\n")
        print(f"{EPILOG}\n\nNAME is one of {', '.join(ANALYSES)}, or a module of yours that holds an ANALYSIS.")
        print("`kvlens analyse NAME --help` shows its columns and options.")
        return 0
    if name.startswith("-"):
        raise KVLensError(f"expected the name of an analysis, got {name!r}; `kvlens analyse` lists them")
    return run_analysis(name, rest, prog=f"kvlens analyse {name}")


def run_analysis(name: str, argv: Sequence[str], prog: str) -> int:
    """Run one analysis as its command line says; return the exit status.

    Raises:
        KVLensError: bad input.
    """
    from analyses.batch.task import Resources, Task, load_analysis  # heavy from here on

    analysis = load_analysis(name)
    try:
        args = _parser(analysis, prog).parse_args(argv)
    except SystemExit:  # --help
        return 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    from analyses.batch.runner import Input, run_batch

    task = Task(
        name,
        models=tuple(args.model),
        columns=tuple(column.strip() for column in args.columns.split(",")) if args.columns else (),
        options={option: getattr(args, f"option_{option}") for option in analysis.options},
        dtype=args.dtype,
        device=args.device,
    )
    resources = Resources(args.engine, args.workers, args.gpus_per_worker, args.threads, args.prompts_a_job)
    try:
        result = run_batch(task, Input(Path(args.prompts), args.text), args.out, resources=resources, overwrite=args.overwrite)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; what is done is kept, and the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    _print(result, n_models=len(task.models))
    return INCOMPLETE if result.errors else 0


def _list() -> int:
    from analyses.batch.task import load_analysis

    width = max(map(len, ANALYSES)) + 2
    for name in ANALYSES:
        print(f"{name:<{width}}{load_analysis(name).summary}")
    print("\n`kvlens analyse NAME --help` shows columns and options of one.")
    return 0


def _print(result: "BatchResult", n_models: int) -> None:
    models = f" on {n_models} models" if n_models > 1 else ""
    print(f"Written to {result.out}: {result.n_rows:,} rows of {result.n_prompts:,} prompts{models}")
    if result.errors is not None:
        print(
            f"{result.n_malformed:,} lines without a prompt and {result.n_without_rows:,} prompts without rows: see "
            f"{result.errors}"
        )


def _parser(analysis: "Analysis", prog: str) -> argparse.ArgumentParser:
    columns = ", ".join(f"{name} ({kind})" for name, kind in analysis.columns.items())
    parser = _Parser(
        prog=prog,
        description=f"{analysis.summary}.\n\ncolumns: model (str), prompt_id (str), {columns}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("prompts", metavar="PROMPTS", help="JSONL file, text file or folder")
    add("--model", action="append", required=True, help="a shipped model (see `kvlens zoo`) or a folder; may be repeated")
    add("--out", required=True, metavar="FILE", help="the table, .parquet")
    add("--text", help="the text of the prompts that have none of their own" + (" (needed)" if analysis.needs_text else ""))
    add("--columns", metavar="A,B", help="only these columns, beside model and prompt_id")
    add("--overwrite", action="store_true", help="begin anew, and replace the table that FILE holds")
    add("--device", help="where the models run, e.g. cpu or cuda (default: cuda where there is one)")
    add("--dtype", choices=DTYPES, help="of the weights (default: each model's own)")
    add("--workers", type=int, default=1, metavar="N", help="processes, or Ray actors (default: %(default)s)")
    add("--engine", choices=("processes", "ray"), default="processes", help="ray needs kvlens[ray] (default: %(default)s)")
    add("--gpus-per-worker", type=float, default=0.0, metavar="X", help="with ray: GPU, or part of one (default: %(default)g)")
    add("--threads", type=int, metavar="N", help="of each worker (default: torch's threads here, shared out)")
    add("--prompts-a-job", type=int, default=8, metavar="N", help="what is handed out, and recorded, at once (default: 8)")
    own = parser.add_argument_group("options of this analysis") if analysis.options else parser
    for name, option in analysis.options.items():
        _add_option(own, name, option)
    return parser


def _add_option(group: "argparse._ActionsContainer", name: str, option: "Option") -> None:
    flag, destination = f"--{name.replace('_', '-')}", f"option_{name}"
    text = option.help.replace("%", "%%")
    if isinstance(option.default, bool):
        group.add_argument(flag, dest=destination, action=argparse.BooleanOptionalAction, default=option.default, help=text)
        return
    shown = "" if option.default in (None, "") else f" (default: {option.default})"
    group.add_argument(
        flag,
        dest=destination,
        type=str if option.default is None else type(option.default),
        default=option.default,
        choices=option.choices or None,
        metavar=None if option.choices else "X",
        help=f"{text}{shown}",
    )

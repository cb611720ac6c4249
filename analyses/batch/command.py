"""The command of one analysis: help with its options and columns, the batch, and the exit status.

Exit status: 0 if every prompt has rows, 1 if the table is complete but some lines or prompts have none, 2 on bad input or if
the table exists already, 130 on Ctrl-C (then, as after a kill, the same command resumes).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from kvlens.arguments import path_of
from kvlens.terminal import Arguments, how_it_ended, listed, terminal_width, visible

from ..declaration import Analysis, Option
from ..registry import ANALYSES
from .arguments import add_arguments, columns_in, flag_of, read_arguments, resources_of
from .runner import BatchResult, Input, run_batch
from .work import Work, load_analysis

INCOMPLETE = 1


def run_analysis(name: str, argv: Sequence[str], prog: str, epilog: str) -> int:
    """Run one analysis from its command line; return the exit status.

    Raises:
        KVLensError: bad input.
    """
    folder = os.getcwd() if ":" in name else None  # the kvlens command does not have it in its path
    analysis = load_analysis(name, folder)
    try:
        args = read_arguments(_parser(analysis, prog, epilog), argv, reads_prompts=bool(analysis.inputs))
    except SystemExit:  # --help
        return 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    work = Work(
        name,
        models=tuple(args.model),
        columns=columns_in(args.columns),
        options={option: getattr(args, f"option_{option}") for option in analysis.options},
        dtype=args.dtype,
        device=args.device,
        folder=folder,
    )
    resources = resources_of(args)
    source = Input(None if args.prompts is None else path_of("PROMPTS", args.prompts), args.text)
    try:
        result = run_batch(
            work, source, args.out, resources=resources, overwrite=args.overwrite, retry_failed=args.retry_failed
        )
    except KeyboardInterrupt as error:
        word, status = how_it_ended(error)
        print(f"{prog}: {word}; finished prompts are kept, and the same command resumes the batch", file=sys.stderr)
        return status
    _print(result, n_models=len(work.models), of_prompts=bool(analysis.inputs))
    return INCOMPLETE if result.errors else 0


def print_list(prog: str) -> int:
    """Print name and summary of kvlens' own analyses; return the exit status."""
    print(listed(((name, load_analysis(name).summary) for name in ANALYSES), terminal_width()))
    print(f"\n`{prog} NAME --help` shows columns and options of one.")
    return 0


def _print(result: BatchResult, n_models: int, *, of_prompts: bool) -> None:
    models = f" on {n_models} models" if n_models > 1 else ""
    rows = f"{result.n_rows:,} rows of {result.n_prompts:,} prompts{models}"
    if not of_prompts:
        rows = f"{result.n_rows:,} rows of {n_models} model{'s' * (n_models > 1)}"
    print(f"Written to {visible(str(result.out))}: {rows}")
    if result.errors is None:
        return
    failed = f"{result.n_without_rows:,} of {result.n_prompts * n_models:,} runs of a prompt failed"
    if n_models == 1:
        failed = f"{result.n_without_rows:,} of {result.n_prompts:,} prompts failed"
    malformed = f"{result.n_malformed:,} line{'s' * (result.n_malformed != 1)} without a prompt"
    problems = [words for number, words in ((result.n_malformed, malformed), (result.n_without_rows, failed)) if number]
    print(f"{' and '.join(problems)}: see {visible(str(result.errors))}")
    if result.first_failure is not None:
        print(f"The first: {visible(result.first_failure)}")
        print("The same command with --retry-failed runs only those again")


def _parser(analysis: Analysis, prog: str, epilog: str) -> Arguments:
    parser = Arguments(
        prog=prog,
        description=_description(analysis),
        epilog=epilog,
        allow_abbrev=False,
    )
    add_arguments(parser, reads_prompts=bool(analysis.inputs), needs_text=analysis.needs_text)
    own = parser.add_argument_group("options of this analysis") if analysis.options else parser
    for name, default in analysis.defaults.items():
        _add_option(own, name, analysis.options[name], default)
    return parser


def _description(analysis: Analysis) -> str:
    """The summary of an analysis, the fields that it reads, and its columns."""
    fields: dict[str, bool] = {}
    for source in analysis.inputs.values():
        fields[source.name] = fields.get(source.name, False) or source.required
    named = ", ".join(name if required else f"{name} (optional)" for name, required in fields.items())
    reads = f"fields of a record that it reads: {named or 'none; it runs once per model, without PROMPTS'}"
    columns = "\n".join(f"  {line}" for line in analysis.columns.table(terminal_width() - 2))
    return f"{analysis.summary}\n\n{reads}\n\ncolumns, after model (str) and prompt_id (str):\n\n{columns}"


def _add_option(group: "argparse._ActionsContainer", name: str, option: Option, default: Any) -> None:
    flag, destination = flag_of(name), f"option_{name}"
    text = option.help.replace("%", "%%")
    if isinstance(default, bool):
        group.add_argument(flag, dest=destination, action=argparse.BooleanOptionalAction, default=default, help=text)
        return
    if option.many:
        text += f": some of {', '.join(option.choices)}, with commas between" if option.choices else ", with commas between"
        default = ",".join(default or ())
    shown = "" if default in (None, "") else f" (default: {default})"
    choices = None if option.many else option.choices or None
    group.add_argument(
        flag,
        dest=destination,
        type=option.kind(default),
        default=default,
        choices=choices,
        metavar=None if choices else "X",
        help=f"{text}{shown}",
    )

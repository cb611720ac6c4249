"""The command of every analysis, ``kvlens analyse NAME`` and ``python -m analyses NAME``.

The list of names and a misspelt name need no torch; the options of an analysis are in its declaration, which takes seconds to
import.

Exit status: 0 if every prompt has rows, 1 if the table is complete but some lines or prompts have none, 2 on bad input or if
the table exists already, 130 on Ctrl-C (then, as after a kill, the same command resumes).
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from kvlens import KVLensError
from kvlens.arguments import path_of
from kvlens.checks import Within, ensure
from kvlens.terminal import Arguments, how_it_ended, in_two_columns, plain_warnings, terminal_width, visible, wrap

from ..registry import ANALYSES, HOOKED, NOT_ON, locate
from .work import (
    DTYPE_NAMES,
    ENGINES,
    Resources,
    Work,
    load_analysis,
)

if TYPE_CHECKING:
    from ..declaration import Analysis, Option
    from .runner import BatchResult

INCOMPLETE, BAD_INPUT = 1, 2
EPILOG = """\
PROMPTS is a JSONL file (one object per line: "prompt", or the "messages" of a chat, or a "question" with "documents" and \
"system", and optionally "text", "id" and fields of the analysis; fields of your own become columns of the table), a .json \
file with the messages of one chat, any other file with one prompt per line, or a folder with one prompt per file. FILE gets \
one row group per prompt, by model, then in the order of the prompts, and kvlens.read_table("FILE") reads and checks it; \
FILE.errors.jsonl lists the lines and prompts without rows, and --retry-failed runs those prompts again. Until the batch is \
complete, FILE.partial is a folder with the results so far: the same command resumes a run that was interrupted or killed; \
only the prompts it was at, one a worker, are run again."""
EXAMPLE = "  kvlens analyse bias_by_head prompts.jsonl --model docs-linear --text ' The' --out table.parquet"
EXAMPLE_VALUES = {
    "prompt": "Kaya feeds a donkey. Mira keeps a goat.",
    "text": " Which animal does Kaya keep? Kaya keeps a",
    "answer": " donkey",
    "rival": " hen",
    "without": "Kaya feeds a donkey.",
    "corrupted": "Kaya feeds a hen. Mira keeps a goat.",
    "second_prompt": "Olga has a hen.",
    "earlier": "Olga has a hen.",
}
"""Field of a record -> what it holds in the examples of the help."""
USEFUL = ("text", "answer")
"""Fields that stand there even where they are optional."""
MODEL_HELP = (
    "a shipped model (see `kvlens zoo`), a folder, a .gguf file, or a name on the hub, if its files are in the local Hugging "
    "Face cache; may be repeated"
)
TEXT_HELP = {
    True: 'the text for prompts without a "text" of their own; needed, unless every prompt has one',
    False: 'the text for prompts without a "text" of their own',
}
NO_PROMPTS = "not read: this analysis depends on the weights alone, and runs once per model"


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m analyses``: run the command and return its exit status; bad input is reported in one line."""
    try:
        with plain_warnings():
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
        return print_list(prog)
    name, *rest = argv
    if name in ("-h", "--help"):
        print(f"usage: {prog} [NAME PROMPTS --model MODEL --out FILE [options]]\n\n{wrap(_help(prog), terminal_width())}")
        return 0
    locate(name)  # reports a misspelt name at once
    return run_analysis(name, rest, prog=f"{prog} {name}")


def _help(prog: str) -> str:
    return (
        "Run an analysis over many prompts and models, into one Parquet file. Without NAME, list the analyses and their "
        f"summaries; `{prog} NAME --help` shows the columns and options of one.\n\n"
        f"{EPILOG}\n\n{EXAMPLE}\n\n"
        f"NAME is one of {', '.join(ANALYSES)}, or a function of your own as MODULE:FUNCTION, for instance "
        "my_package.my_module:my_function. The module is found from here or is installed, and the function has the decorator "
        "kvlens.analyses.analysis: the documentation of kvlens.analyses.declaration has an example to copy."
    )


def flag_of(option: str) -> str:
    """An option's name on the command line."""
    return f"--{option.replace('_', '-')}"


def resources_of(args: argparse.Namespace) -> Resources:
    """The resources that the command line asks for.

    Raises:
        KVLensError: a number is out of range, such as more workers than the machine can use.
    """
    for name in ("workers", "threads"):
        if getattr(args, name) is not None:
            ensure(flag_of(name), Annotated[int, Within(1)], getattr(args, name))
    return Resources(args.engine, args.workers, args.gpus_per_worker, args.threads)


def run_analysis(name: str, argv: Sequence[str], prog: str) -> int:
    """Run one analysis from its command line; return the exit status.

    Raises:
        KVLensError: bad input.
    """
    from .runner import Input, run_batch  # imports torch

    folder = os.getcwd() if ":" in name else None  # the kvlens command does not have it in its path
    analysis = load_analysis(name, folder)
    try:
        parser = _parser(analysis, prog)  # of weights alone, PROMPTS may be left out, or come between options
        args = parser.parse_args(argv) if analysis.inputs else parser.parse_intermixed_args(argv)
    except SystemExit:  # --help
        return 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    work = Work(
        name,
        models=tuple(args.model),
        options={option: getattr(args, f"option_{option}") for option in analysis.options},
        dtype=args.dtype,
        device=args.device,
        folder=folder,
    )
    resources = resources_of(args)
    source = Input(None if args.prompts is None else path_of("prompts", args.prompts), args.text)
    try:
        result = run_batch(
            work, source, args.out, resources=resources, overwrite=args.overwrite, retry_failed=args.retry_failed
        )
    except KeyboardInterrupt as error:
        word, status = how_it_ended(error)
        command = "the same command without --overwrite" if args.overwrite else "the same command"
        print(f"{prog}: {word}; finished prompts are kept, and {command} resumes the batch", file=sys.stderr)
        return status
    _print(result, n_models=len(work.models), of_prompts=bool(analysis.inputs))
    return INCOMPLETE if result.errors else 0


def print_list(prog: str) -> int:
    """Print name and summary of kvlens' own analyses; return the exit status."""
    print(in_two_columns(((name, load_analysis(name).summary) for name in ANALYSES), terminal_width()))
    print(f"\n`{prog} NAME --help` shows columns and options of one.")
    return 0


def _print(result: "BatchResult", n_models: int, *, of_prompts: bool) -> None:
    failed, n_runs = result.n_without_rows, result.n_prompts * n_models
    runs = "prompt runs" if n_models > 1 else "prompts"
    with_rows = _count(n_runs - failed, "prompt" if of_prompts else "model")
    if of_prompts and n_models > 1:
        with_rows = f"{n_runs - failed:,} {runs}" if failed else _count(result.n_prompts, "prompt")
        with_rows += f" on {n_models} models"
    print(f"Written to {visible(str(result.out))}: {_count(result.n_rows, 'row')} of {with_rows}")
    if result.errors is None:
        return
    malformed = f"{_count(result.n_malformed, 'line')} without a prompt"
    problems = [malformed] * bool(result.n_malformed) + [f"{failed:,} of {n_runs:,} {runs} failed"] * bool(failed)
    print(f"{' and '.join(problems)}: see {visible(str(result.errors))}")
    if result.first_failure is not None:
        print(f"The first: {visible(result.first_failure)}")
        print("The same command with --retry-failed runs only those again")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _parser(analysis: "Analysis", prog: str) -> Arguments:
    parser = Arguments(
        prog=prog, description=_description(analysis), epilog=f"{EPILOG}\n\n{_example(analysis, prog)}", allow_abbrev=False
    )
    add = parser.add_argument
    if analysis.inputs:
        add("prompts", metavar="PROMPTS", help="JSONL file, text file or folder")
    else:
        add("prompts", metavar="PROMPTS", nargs="?", help=NO_PROMPTS)
    add("--model", action="append", required=True, help=MODEL_HELP)
    add("--out", required=True, metavar="FILE", help="the table to write, .parquet")
    add("--text", help=TEXT_HELP[analysis.needs_text])
    add("--overwrite", action="store_true", help="start from scratch, and replace an existing table in FILE")
    add("--retry-failed", action="store_true", help="run only the prompts that failed again, and keep the rows of the others")
    add("--device", help="where the models run, e.g. cpu or cuda (default: cuda if available)")
    add("--dtype", choices=DTYPE_NAMES, help="dtype of the weights (default: that of each model)")
    add("--workers", type=int, default=1, metavar="N", help="processes, or Ray actors (default: %(default)s)")
    add(
        "--engine",
        choices=ENGINES,
        default="processes",
        help="ray needs the extra of that name: pip install -e '.[ray]' in a clone (default: %(default)s)",
    )
    add("--gpus-per-worker", type=float, default=0.0, metavar="X", help="with ray: GPU, or part of one (default: %(default)g)")
    add("--threads", type=int, metavar="N", help="threads of each worker (default: torch's threads, divided among the workers)")
    own = parser.add_argument_group("options of this analysis") if analysis.options else parser
    for name, default in analysis.defaults.items():
        _add_option(own, name, analysis.options[name], default)
    return parser


def _description(analysis: "Analysis") -> str:
    """The summary of an analysis, the fields that it reads, and its columns."""
    fields: dict[str, bool] = {}
    for source in analysis.inputs.values():
        fields[source.name] = fields.get(source.name, False) or source.required
    said = {"prompt": "prompt, or messages"}
    named = ", ".join(said.get(name, name) if required else f"{name} (optional)" for name, required in fields.items())
    reads = f"fields of a record that it reads: {named or 'none; it runs once per model, without PROMPTS'}"
    cost = f"\n\ncost: {analysis.cost}" if analysis.cost else ""
    columns = "\n".join(f"  {line}" for line in analysis.columns.table(terminal_width() - 2))
    return f"{analysis.summary}{cost}\n\n{reads}\n\ncolumns, after model (str) and prompt_id (str):\n\n{columns}"


def _example(analysis: "Analysis", prog: str) -> str:
    """A command, and the line of PROMPTS that it needs."""
    model = "facts-hybrid" if HOOKED in NOT_ON.get(analysis.name, {}) else "facts-linear"
    of_a_head = ""
    if {"layer", "head"} <= analysis.options.keys():  # which only softmax attention has
        model, of_a_head = "facts-gpt2", " --layer 1 --head 0"
    if not analysis.inputs:
        return f"  {prog} --model {model} --out table.parquet"
    held = {
        each.name: EXAMPLE_VALUES.get(each.name, "...")
        for each in analysis.inputs.values()
        if each.required or each.name in ("text", "answer", "corrupted")
    }
    line = json.dumps({**held, "case": 1})
    return (
        f"For instance, with prompts.jsonl of lines like this one (case is a field of your own):\n\n  {line}\n\n"
        f"  {prog} prompts.jsonl --model {model}{of_a_head} --out table.parquet"
    )


def _add_option(group: "argparse._ActionsContainer", name: str, option: "Option", default: Any) -> None:
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

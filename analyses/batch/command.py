"""One analysis as its command line says: its own options and columns in the help, the batch, and the exit status.

Exit status: 0 when every prompt has its rows, 1 when the table is complete but some lines or prompts gave none, 2 on bad input
and where the table stands there already, 130 on Ctrl-C (then, as after a kill, the same command goes on where it stopped).
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
from .runner import BatchResult, Input, run_batch
from .work import DTYPES, Resources, Work, load_analysis

INCOMPLETE = 1
MODEL_HELP = (
    "a shipped model (see `kvlens zoo`), a folder, or a name that TransformerLens knows, where its files are in Hugging Face's "
    "local cache; may be repeated"
)
TEXT_HELP = {
    True: 'the text for prompts without a "text" of their own; needed, unless every prompt has one',
    False: 'the text for prompts without a "text" of their own',
}


def run_analysis(name: str, argv: Sequence[str], prog: str, epilog: str) -> int:
    """Run one analysis as its command line says; return the exit status.

    Raises:
        KVLensError: bad input.
    """
    folder = os.getcwd() if ":" in name else None  # a command does not look here by itself
    analysis = load_analysis(name, folder)
    try:
        args = _parser(analysis, prog, epilog).parse_args(argv)
    except SystemExit:  # --help
        return 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    work = Work(
        name,
        models=tuple(args.model),
        columns=tuple(column.strip() for column in args.columns.split(",")) if args.columns is not None else (),
        options={option: getattr(args, f"option_{option}") for option in analysis.options},
        dtype=args.dtype,
        device=args.device,
        folder=folder,
    )
    resources = Resources(args.engine, args.workers, args.gpus_per_worker, args.threads, args.prompts_per_job)
    source = Input(path_of("PROMPTS", args.prompts), args.text)
    try:
        result = run_batch(
            work, source, args.out, resources=resources, overwrite=args.overwrite, retry_failed=args.retry_failed
        )
    except KeyboardInterrupt as error:
        word, status = how_it_ended(error)
        print(f"{prog}: {word}; what is done is kept, and the same command goes on from there", file=sys.stderr)
        return status
    _print(result, n_models=len(work.models))
    return INCOMPLETE if result.errors else 0


def print_list(prog: str) -> int:
    """Print name and summary of kvlens' own analyses; return the exit status."""
    print(listed(((name, load_analysis(name).summary) for name in ANALYSES), terminal_width()))
    print(f"\n`{prog} NAME --help` shows columns and options of one.")
    return 0


def _print(result: BatchResult, n_models: int) -> None:
    models = f" on {n_models} models" if n_models > 1 else ""
    print(f"Written to {visible(str(result.out))}: {result.n_rows:,} rows of {result.n_prompts:,} prompts{models}")
    if result.errors is None:
        return
    failed = f"{result.n_without_rows:,} of {result.n_prompts * n_models:,} runs of a prompt failed"
    if n_models == 1:
        failed = f"{result.n_without_rows:,} of {result.n_prompts:,} prompts failed"
    malformed = f"{result.n_malformed:,} line{'s' * (result.n_malformed != 1)} without a prompt"
    told = [words for number, words in ((result.n_malformed, malformed), (result.n_without_rows, failed)) if number]
    print(f"{' and '.join(told)}: see {visible(str(result.errors))}")
    if result.first_failure is not None:
        print(f"The first: {visible(result.first_failure)}")
        print("The same command with --retry-failed runs those again and keeps the rest")


def _parser(analysis: Analysis, prog: str, epilog: str) -> argparse.ArgumentParser:
    parser = Arguments(
        prog=prog,
        description=_description(analysis),
        epilog=epilog,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("prompts", metavar="PROMPTS", help="JSONL file, text file or folder")
    add("--model", action="append", required=True, help=MODEL_HELP)
    add("--out", required=True, metavar="FILE", help="the table that is written, .parquet")
    add("--text", help=TEXT_HELP[analysis.needs_text])
    add("--columns", metavar="A,B", help="only these columns, beside model and prompt_id")
    add("--overwrite", action="store_true", help="begin anew, and replace the table that FILE holds")
    add("--retry-failed", action="store_true", help="run the prompts again that failed, and keep the rows of the others")
    add("--device", help="where the models run, e.g. cpu or cuda (default: cuda where there is one)")
    add("--dtype", choices=DTYPES, help="of the weights (default: each model's own)")
    add("--workers", type=int, default=1, metavar="N", help="processes, or Ray actors (default: %(default)s)")
    add(
        "--engine",
        choices=("processes", "ray"),
        default="processes",
        help="ray needs the extra of that name: pip install -e '.[ray]' in a clone (default: %(default)s)",
    )
    add("--gpus-per-worker", type=float, default=0.0, metavar="X", help="with ray: GPU, or part of one (default: %(default)g)")
    add("--threads", type=int, metavar="N", help="of each worker (default: torch's threads here, shared out)")
    add("--prompts-per-job", type=int, default=8, metavar="N", help="what is handed out, and recorded, at once (default: 8)")
    own = parser.add_argument_group("options of this analysis") if analysis.options else parser
    for name, default in analysis.defaults.items():
        _add_option(own, name, analysis.options[name], default)
    return parser


def _description(analysis: Analysis) -> str:
    """What it is about, the fields that it reads, and its columns."""
    fields: dict[str, bool] = {}
    for source in analysis.inputs.values():
        fields[source.name] = fields.get(source.name, False) or source.required
    named = ", ".join(name if required else f"{name} (optional)" for name, required in fields.items())
    reads = f"fields of a record that it reads: {named or 'none; one prompt, of any text, is enough'}"
    columns = "\n".join(f"  {line}" for line in analysis.columns.table(terminal_width() - 2))
    return f"{analysis.summary}\n\n{reads}\n\ncolumns, after model (str) and prompt_id (str):\n\n{columns}"


def _add_option(group: "argparse._ActionsContainer", name: str, option: Option, default: Any) -> None:
    flag, destination = f"--{name.replace('_', '-')}", f"option_{name}"
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

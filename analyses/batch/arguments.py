"""The command-line arguments that every analysis has, and the checks of them that need no torch.

The options of an analysis are in its declaration, which takes seconds to import. The names of its options and columns are
therefore first read from the source of its module, so that a misspelt one is reported at once.
"""

import argparse
import ast
import importlib.util
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from kvlens import KVLensError
from kvlens.arguments import path_of
from kvlens.checks import Within, ensure
from kvlens.errors import nearest
from kvlens.terminal import Arguments

from ..registry import ANALYSES, locate
from .paths import check_model_name, check_prompts, check_table_path
from .resources import DTYPES, ENGINES, Resources

MODEL_HELP = (
    "a shipped model (see `kvlens zoo`), a folder, or a name on the hub, if its files are in the local Hugging Face cache; may "
    "be repeated"
)
TEXT_HELP = {
    True: 'the text for prompts without a "text" of their own; needed, unless every prompt has one',
    False: 'the text for prompts without a "text" of their own',
}
NO_PROMPTS = "not read: this analysis depends on the weights alone, and runs once per model"


class Declared(NamedTuple):
    """The declaration of an analysis, as read from the source of its module.

    Attributes:
        options: name -> whether it is a flag, without a value.
        columns: their names; None if they are computed from others.
        reads_prompts: whether a record's fields become arguments.
    """

    options: dict[str, bool]
    columns: tuple[str, ...] | None
    reads_prompts: bool


def add_arguments(parser: argparse.ArgumentParser, *, reads_prompts: bool, needs_text: bool = False) -> None:
    """Add the arguments that every analysis has."""
    add = parser.add_argument
    if reads_prompts:
        add("prompts", metavar="PROMPTS", help="JSONL file, text file or folder")
    else:
        add("prompts", metavar="PROMPTS", nargs="?", help=NO_PROMPTS)
    add("--model", action="append", required=True, help=MODEL_HELP)
    add("--out", required=True, metavar="FILE", help="the table to write, .parquet")
    add("--text", help=TEXT_HELP[needs_text])
    add("--columns", metavar="A,B", help="only these columns, in addition to model and prompt_id")
    add("--overwrite", action="store_true", help="start from scratch, and replace an existing table in FILE")
    add("--retry-failed", action="store_true", help="run only the prompts that failed again, and keep the rows of the others")
    add("--device", help="where the models run, e.g. cpu or cuda (default: cuda if available)")
    add("--dtype", choices=DTYPES, help="dtype of the weights (default: that of each model)")
    add("--workers", type=int, default=1, metavar="N", help="processes, or Ray actors (default: %(default)s)")
    add(
        "--engine",
        choices=ENGINES,
        default="processes",
        help="ray needs the extra of that name: pip install -e '.[ray]' in a clone (default: %(default)s)",
    )
    add("--gpus-per-worker", type=float, default=0.0, metavar="X", help="with ray: GPU, or part of one (default: %(default)g)")
    add("--threads", type=int, metavar="N", help="threads of each worker (default: torch's threads, divided among the workers)")
    add("--prompts-per-job", type=int, default=8, metavar="N", help="prompts run and recorded at once (default: 8)")


def read_arguments(parser: Arguments, argv: Sequence[str], *, reads_prompts: bool) -> argparse.Namespace:
    """The arguments of a command line. PROMPTS may be left out, or come between options."""
    return parser.parse_args(argv) if reads_prompts else parser.parse_intermixed_args(argv)


def flag_of(option: str) -> str:
    """An option's name on the command line."""
    return f"--{option.replace('_', '-')}"


def columns_in(given: str | None) -> tuple[str, ...]:
    """``--columns A,B``"""
    return () if given is None else tuple(column.strip() for column in given.split(","))


def resources_of(args: argparse.Namespace) -> Resources:
    """The resources that the command line asks for.

    Raises:
        KVLensError: a number is out of range, such as more workers than the machine can use.
    """
    for name in ("workers", "threads", "prompts_per_job"):
        if getattr(args, name) is not None:
            ensure(flag_of(name), Annotated[int, Within(1)], getattr(args, name))
    return Resources(args.engine, args.workers, args.gpus_per_worker, args.threads, args.prompts_per_job)


def check_columns(name: str, wanted: Sequence[str], there: Sequence[str]) -> None:
    """Raise KVLensError unless an analysis has these columns."""
    for column in wanted:
        if column not in there:
            raise KVLensError(f"{name} has no column {column!r}; it has {', '.join(there)}{nearest(column, there)}")


def check_early(name: str, argv: Sequence[str], prog: str) -> None:
    """Check a command line as far as possible without torch.

    Raises:
        KVLensError: a misspelt option or column, a missing argument, an invalid path, an unknown model.
    """
    if name not in ANALYSES:
        return
    declared = declared_in(name)
    parser = Arguments(prog=prog, allow_abbrev=False, add_help=False)
    add_arguments(parser, reads_prompts=declared.reads_prompts)
    for option, is_flag in declared.options.items():
        action = {"action": argparse.BooleanOptionalAction} if is_flag else {}
        parser.add_argument(flag_of(option), dest=f"option_{option}", **action)  # type: ignore[arg-type]
    args = read_arguments(parser, argv, reads_prompts=declared.reads_prompts)
    if declared.columns is not None:
        check_columns(name, columns_in(args.columns), declared.columns)
    resources_of(args)
    if declared.reads_prompts:
        check_prompts(args.prompts)
    for model in args.model:
        check_model_name(model)
    check_table_path(path_of("out", args.out))


def declared_in(name: str) -> Declared:
    """The declaration of one of kvlens' own analyses, read from the decorator of its function without importing the module."""
    module, _ = locate(name)
    body: Any = ast.parse(importlib.util.find_spec(module).loader.get_source(module)).body  # type: ignore[union-attr]
    tables = {ast.unparse(node.targets[0]): node.value for node in body if isinstance(node, ast.Assign)}
    for function, call in ((node, call) for node in body for call in getattr(node, "decorator_list", ())):
        said = _keywords(call)
        if ast.unparse(call).startswith("analysis(") and name in (function.name, getattr(said.get("of"), "id", "")):
            break
    arguments, options = function.args, [key.value for key in said["options"].keys] if "options" in said else []
    flags = {
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if isinstance(getattr(default, "value", None), bool)
    }
    columns = tuple(_keywords(tables.get(call.args[0].id)))
    reads_prompts = "prompt" in (argument.arg for argument in arguments.args)
    return Declared({option: option in flags for option in options}, None if None in columns else columns, reads_prompts)


def _keywords(call: Any) -> dict[Any, Any]:
    """The arguments of a call that are given by name; None stands for ``**others``, or for what is no call."""
    return {keyword.arg: keyword.value for keyword in call.keywords} if isinstance(call, ast.Call) else {None: None}

"""The command line: the commands that take a prompt (``prompts.py``) or settings (``settings.py``), and here the short ones.

Torch and TransformerLens take seconds to import, so they are imported only when a command needs them.
"""

import argparse
import json
import os
import sys
from typing import Annotated

import kvlens
from kvlens import zoo
from kvlens.arguments import check_device
from kvlens.checks import Within, ensure
from kvlens.cli.prompts import EXAMPLE_MODEL, EXAMPLES, MINUTES, add_explain
from kvlens.cli.settings import add_reproduce, add_train
from kvlens.errors import KVLensError, check_known
from kvlens.files import read_listed
from kvlens.terminal import (
    Arguments,
    Commands,
    how_it_ended,
    plain_warnings,
    sigterm_as_interrupt,
    terminal_width,
    visible,
    wrap,
)
from kvlens.zoo import source_of

BAD_INPUT = 2


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 2 on bad input, 130 on Ctrl-C, 143 on SIGTERM."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows "?" where it cannot show a character
    try:
        with sigterm_as_interrupt(), plain_warnings():
            status = _run(sys.argv[1:] if argv is None else argv)
        if sys.stdout is not None:  # None: the shell closed it
            sys.stdout.flush()  # here, so that a closed pipe is handled below and not when the interpreter exits
        return status
    except KVLensError as error:
        print(f"kvlens: error: {visible(' '.join(str(error).split()))}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt as error:
        word, status = how_it_ended(error)
        print(f"kvlens: {word}", file=sys.stderr)
        return status
    except BrokenPipeError:  # the reader, such as head, closed the pipe
        _discard_output()
        return 0
    except (MemoryError, RuntimeError) as error:  # torch has an error of its own on a GPU alone
        if isinstance(error, RuntimeError) and not any(f"{words} memory" in str(error) for words in ("allocate", "out of")):
            raise
        print("kvlens: error: memory has run out; give a smaller model, a shorter prompt or fewer texts", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"kvlens: error: {visible(where + (error.strerror or str(error)))}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # a full disk under it
            _discard_output()
        return BAD_INPUT


def _discard_output() -> None:
    """Let the interpreter write what is left of the output to nowhere when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        check_known("no command", argv[0], COMMANDS)
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    if args.command is None:
        parser.print_help()
        return 0
    return args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = Arguments(
        prog="kvlens",
        description="Mechanistic interpretability of the key-value side of attention: prompts as weights.",
        epilog="Start with `kvlens explain`, which without arguments explains an example. "
        "`kvlens COMMAND --help` explains a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvlens {kvlens.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Arguments)
    for add_command in COMMANDS.values():
        add_command(commands)
    return parser


def add_analyse(commands: Commands) -> None:
    """Add the command. It passes all arguments on, because its options depend on the analysis, which is not imported yet."""
    analyse = commands.add_parser(
        "analyse",
        help="run an analysis over many prompts and models and write one Parquet file; without arguments, list the analyses",
        add_help=False,
        prefix_chars="\0",  # so that no argument, not even --help, is parsed here
    )
    analyse.add_argument("arguments", nargs=argparse.REMAINDER)
    analyse.set_defaults(run=_analyse)


def _analyse(args: argparse.Namespace) -> int:
    from kvlens.analyses.batch.script import analyse

    return analyse(args.arguments)


def add_app(commands: Commands) -> None:
    """Add ``app`` to the command line."""
    parser = commands.add_parser(
        "app",
        help="a page on this machine, where a prompt can be played with",
        description="Answer pages in a browser on this machine: ask about documents, see what the answer rests on, switch "
        "parts of the prompt off and read what is said then. Visitors choose among the models that are named here, and no "
        "other file is read. Needs the extra: pip install 'kvlens[app]'.",
        epilog="  kvlens app\n  kvlens app HuggingFaceTB/SmolLM2-135M-Instruct --download",
        allow_abbrev=False,
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"as for `kvlens explain --model`; loaded when first asked (default: {EXAMPLE_MODEL})",
    )
    parser.add_argument("--download", action="store_true", help="fetch the files of a name on the hub where they are not here")
    parser.add_argument("--port", type=int, default=8095, help="where it listens; 0: any that is free (default: %(default)s)")
    parser.add_argument("--device", help="where the models run, e.g. cpu or cuda (default: cuda if available)")
    parser.set_defaults(run=_app)


def _app(args: argparse.Namespace) -> int:
    ensure("--port", Annotated[int, Within(0, 65535)], args.port)
    names = list(dict.fromkeys(args.models or [EXAMPLE_MODEL]))
    for name in names:
        source_of(name, "kvlens app", download=args.download)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from kvlens.app import Playground, Server, serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise KVLensError(f"kvlens app needs the package {error.name}: pip install 'kvlens[app]'") from error
    check_device("--device", args.device)
    playground = Playground(names, lambda name: kvlens.load(name, device=args.device))
    told = "Open {} in a browser on this machine; Ctrl-C ends it."
    serve(
        Server(playground, EXAMPLES.get(names[0], MINUTES)), args.port, lambda address: print(told.format(address), flush=True)
    )
    return 0


LEGEND = (
    "loss (nats) and accuracy: on held-out data, at the positions scored by the task; gain: how much a converted context "
    "lowers the loss, in nats per token."
)


def add_zoo(commands: Commands) -> None:
    """Add ``zoo`` to the command line."""
    parser = commands.add_parser(
        "zoo",
        help="list the models that ship with kvlens",
        description="List the models that ship with kvlens: size, task, held-out loss and accuracy and, for language "
        "models with linear attention, how much a converted context lowers the loss.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_zoo)


def _zoo(args: argparse.Namespace) -> int:
    names = zoo.names()
    if not names:
        print("This installation has no models; train one with: kvlens train docs-linear --out DIR")
        return 0
    print(f"{'name':<20}{'task':<11}{'parameters':>11}{'size':>9}{'loss':>9}{'accuracy':>10}{'gain':>8}")
    for name in names:
        folder = zoo.folder_of(name)
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        facts = json.loads(read_listed(folder, "training.json"))
        held = facts["heldout"]
        gain = f"{held['gain']:>8.3f}" if "gain" in held else f"{'':>8}"
        print(
            f"{name:<20}{facts['recipe']['task']:<11}{facts['n_parameters']:>11,}{size:>6.1f} MB{held['loss']:>9.4f}"
            f"{held['accuracy']:>10.4f}{gain}"
        )
    example = "docs-linear" if "docs-linear" in names else names[0]
    print("\n" + wrap(f'{LEGEND} Load a model with kvlens.load("{example}").', terminal_width()))
    return 0


COMMANDS = {
    "explain": add_explain,
    "app": add_app,
    "analyse": add_analyse,
    "train": add_train,
    "zoo": add_zoo,
    "reproduce": add_reproduce,
}

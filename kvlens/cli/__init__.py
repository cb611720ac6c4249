"""The command line: one module per command, each with ``add_command(commands)``.

Torch and TransformerLens take seconds to import, so they are imported only when a command needs them.
"""

import argparse
import os
import sys

import kvlens
from kvlens.cli import analyse, explain, reference, report, reproduce, train, zoo
from kvlens.errors import KVLensError, nearest
from kvlens.terminal import Arguments, how_it_ended, plain_warnings, sigterm_as_interrupt, visible

MODULES = (report, explain, analyse, train, zoo, reproduce, reference)
COMMANDS = tuple(module.__name__.rsplit(".", 1)[-1] for module in MODULES)
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
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise KVLensError(
            f"there is no command {argv[0]!r}; the commands are {', '.join(COMMANDS)}{nearest(argv[0], COMMANDS)}"
        )
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
        epilog="Start with `kvlens report`, which without arguments shows a built-in example. "
        "`kvlens COMMAND --help` explains a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvlens {kvlens.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Arguments)
    for module in MODULES:
        module.add_command(commands)
    return parser

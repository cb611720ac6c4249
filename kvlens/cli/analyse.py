"""``kvlens analyse``: run an analysis over many prompts and models; see :mod:`kvlens.analyses.batch.script`."""

import argparse
from typing import Any


def add_command(commands: Any) -> None:
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

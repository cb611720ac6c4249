"""``kvlens analyse``: an analysis over many prompts and models; :mod:`kvlens.analyses.batch.script` tells all about it."""

import argparse
from typing import Any


def add_command(commands: Any) -> None:
    """Add the command, which hands every argument on: its options are those of the analysis, which is not imported yet."""
    analyse = commands.add_parser(
        "analyse",
        help="run an analysis over many prompts and models, into one Parquet file; without a name, list the analyses",
        add_help=False,
        prefix_chars="\0",  # so that nothing, not even --help, is an option here
    )
    analyse.add_argument("arguments", nargs=argparse.REMAINDER)
    analyse.set_defaults(run=_analyse)


def _analyse(args: argparse.Namespace) -> int:
    from kvlens.analyses.batch.script import analyse

    return analyse(args.arguments)

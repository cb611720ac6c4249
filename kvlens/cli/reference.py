"""``kvlens reference``: the API reference as HTML pages, built from the docstrings."""

import argparse
from pathlib import Path
from typing import Any

from kvlens.terminal import visible


def add_command(commands: Any) -> None:
    """Add ``reference`` to the command line."""
    parser = commands.add_parser(
        "reference",
        help="write the API reference as HTML pages",
        description="Write the API reference of kvlens and its analyses as HTML pages that work offline, built from the "
        "docstrings, with one page per paper that maps its equations to functions. Install what this needs with "
        "pip install -e '.[docs]' in a clone.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", default="reference", metavar="DIR", help="output folder (default: %(default)s)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing reference in DIR; no other files are touched"
    )
    parser.set_defaults(run=_reference)


def _reference(args: argparse.Namespace) -> int:
    from kvlens.reference import build_reference

    names = build_reference(args.out, overwrite=args.overwrite)
    print(f"{len(names)} pages; open {visible(str(Path(args.out) / 'index.html'))}")
    return 0

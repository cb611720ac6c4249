"""``kvlens reference``: the reference as HTML pages, from the docstrings."""

import argparse
from pathlib import Path
from typing import Any

from kvlens.terminal import visible


def add_command(commands: Any) -> None:
    """Add ``reference`` to the command line."""
    parser = commands.add_parser(
        "reference",
        help="write the reference as HTML pages",
        description="Write the reference of kvlens and its analyses as HTML pages, made from the docstrings; among them a page "
        "a paper that says which function is which equation. Reading them needs no network. Needs the extra of the "
        "documentation: pip install -e '.[docs]' in a clone.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", default="reference", metavar="DIR", help="folder of the pages (default: %(default)s)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the reference that DIR holds; nothing else is replaced"
    )
    parser.set_defaults(run=_reference)


def _reference(args: argparse.Namespace) -> int:
    from kvlens.reference import build_reference

    names = build_reference(args.out, overwrite=args.overwrite)
    print(f"{len(names)} pages; begin at {visible(str(Path(args.out) / 'index.html'))}")
    return 0

"""``kvlens zoo``: list the models that ship with kvlens, with their scores."""

import argparse
import json
from typing import Any

from kvlens import zoo
from kvlens.files import read_listed
from kvlens.terminal import terminal_width, wrap

LEGEND = (
    "loss (nats) and accuracy: on held-out data, at the positions scored by the task; gain: how much a converted context "
    "lowers the loss, in nats per token."
)


def add_command(commands: Any) -> None:
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

"""``kvlens reproduce``: measure a figure, table or theorem of the papers, and compare with the paper's numbers."""

import argparse
import sys
import textwrap
from pathlib import Path
from time import perf_counter
from typing import Any

from kvlens.arguments import path_of
from kvlens.cli.settings import add_settings, settings_of
from kvlens.errors import KVLensError
from kvlens.terminal import terminal_width, visible

SCALES = ("small", "paper", "tiny")


def add_command(commands: Any) -> None:
    """Add ``reproduce`` to the command line."""
    parser = commands.add_parser(
        "reproduce",
        help="repeat a figure, table or theorem of the papers",
        description="Repeat an experiment of the papers. Writes tables, a figure and summary.json, which compares the paper's "
        "numbers with ours and says what differs from the paper. Without NAME, lists the experiments.",
        epilog="  kvlens reproduce induction-depth --out induction-depth",
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of the experiment")
    parser.add_argument(
        "--scale",
        choices=SCALES,
        default="small",
        help="tiny: seconds, for tests; small: minutes; paper: the paper's sizes, up to days on a GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="for experiments on a given model: a shipped model (see `kvlens zoo`), a folder or a llama2.c checkpoint",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer file; needed only for a llama2.c checkpoint")
    add_settings(parser, "--set", "change settings, where VALUE is JSON or a string; summary.json lists all settings")
    parser.add_argument("--out", metavar="DIR", help="output folder (default: NAME-SCALE)")
    parser.add_argument("--overwrite", action="store_true", help="replace existing results in DIR; no other files are touched")
    parser.set_defaults(run=_reproduce)


def _reproduce(args: argparse.Namespace) -> int:
    from kvlens.experiments import all_experiments, find_experiment

    settings = settings_of("--set", args.set)
    if args.name is None:
        for experiment in all_experiments():
            facts = f"{experiment.name}  ({experiment.source}; small: {experiment.cost['small']})"
            print(textwrap.fill(facts, terminal_width(), subsequent_indent="    ", break_on_hyphens=False))
            print(textwrap.fill(experiment.question, terminal_width(), initial_indent="    ", subsequent_indent="    "))
        print("\nRun one with: kvlens reproduce NAME [--scale tiny|small|paper] [--out DIR]")
        return 0

    from kvlens.experiments.shared.outcome import OUTCOME_FOLDER, write_outcome
    from kvlens.files import work_on

    experiment = _with_settings(find_experiment(args.name), args, settings)
    folder = path_of("--out", f"{args.name}-{args.scale}" if args.out is None else args.out)
    with work_on(folder, OUTCOME_FOLDER, overwrite=args.overwrite):
        print(f"{experiment.name} ({experiment.source}), scale {args.scale}: {experiment.cost[args.scale]}", flush=True)
        started = perf_counter()
        outcome = experiment.run(experiment.scales[args.scale], _tell)
        summary = write_outcome(outcome, experiment, args.scale, perf_counter() - started, folder, overwrite=args.overwrite)
    _print_summary(summary, folder)
    return 0


def _with_settings(experiment: Any, args: argparse.Namespace, settings: dict[str, Any]) -> Any:
    """The experiment with the settings of its scale changed by --model, --tokenizer and --set."""
    from kvlens.experiments.shared.settings import changed_settings

    given = {"model": args.model, "tokenizer": args.tokenizer}
    for name, value in given.items():
        own = [scale.get(name, {}) for scale in experiment.scales.values()]
        if value is not None and all(isinstance(setting, dict) for setting in own):
            raise KVLensError(f"--{name}: {experiment.name} does not run on an existing model")
    return changed_settings(experiment, args.scale, settings | {k: v for k, v in given.items() if v is not None})


def _tell(text: str) -> None:
    print(f"  {visible(text)}", file=sys.stderr, flush=True)


def _print_summary(summary: dict[str, Any], folder: Path) -> None:
    for comparison in summary["comparisons"]:
        paper = "-" if comparison["paper"] is None else _number(comparison["paper"])
        print(f"\n{comparison['what']}\n  paper {paper}   here {_number(comparison['ours'])}   {comparison['verdict']}")
        print(textwrap.fill(comparison["claim"], 80, initial_indent="  ", subsequent_indent="  "))
        if comparison["untrained"] is not None:
            print(textwrap.fill(comparison["untrained"], 80, initial_indent="  ", subsequent_indent="  "))
    for sentence in summary["differences"]:
        print(textwrap.fill(f"difference: {sentence}", 80, subsequent_indent="  "))
    print(f"\n{summary['seconds']:g} s; written to {visible(str(folder))}: summary.json, {', '.join(summary['files'])}")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

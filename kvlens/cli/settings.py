"""``kvlens train`` and ``kvlens reproduce``, the commands that take settings as NAME=VALUE: training a model, and experiments.

Training trains a shipped model again, or your own on any task. An experiment measures a figure, table or theorem of the papers,
and compares with the paper's numbers. Repeated, either command resumes what was interrupted.
"""

import argparse
import json
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from kvlens.arguments import check_device, path_of
from kvlens.checks import Within, ensure, from_fields
from kvlens.errors import KVLensError, check_known
from kvlens.files import work_on
from kvlens.terminal import Commands, how_it_ended, terminal_width, visible

if TYPE_CHECKING:
    from kvlens.papers.harness.run import Experiment


def add_settings(command: argparse.ArgumentParser, flag: str, help: str) -> None:  # noqa: A002
    """Add an option that takes one or more NAME=VALUE, and may be repeated."""
    command.add_argument(flag, nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=help)


def settings_of(flag: str, pairs: Iterable[str]) -> dict[str, object]:
    """``["steps=5", "kv_shift=true"]`` -> values parsed as JSON, or as strings if they are not JSON.

    Raises:
        KVLensError: something other than NAME=VALUE.
    """
    settings: dict[str, object] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise KVLensError(f"{flag}: expected NAME=VALUE, got {pair!r}; other arguments come before {flag}")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def add_train(commands: Commands) -> None:
    """Add ``train`` to the command line."""
    train = commands.add_parser(
        "train",
        help="train a small model on a task, or a shipped model again",
        description="Train NAME, the recipe of a shipped model (see `kvlens zoo`) or a task: induction, bigrams, ngrams, "
        "hops, arithmetic, regression, facts, text. The output folder gets the checkpoint, metrics and the model with a model "
        "card. To resume an interrupted run, repeat the command.",
        epilog="Example:\n\n"
        "  kvlens train induction --out run --task vocab_size=256 length=64 \\\n"
        "      --model n_layers=1 kv_shift=true --set steps=500 learning_rate=0.002",
        allow_abbrev=False,
    )
    train.add_argument("name", metavar="NAME", help="name of a recipe or a task")
    train.add_argument("--out", required=True, metavar="DIR", help="output folder; the model is saved in DIR/model")
    for flag, what, example in (
        ("--task", "task settings", "vocab_size=256"),
        ("--model", "model settings, fields of HookedKVTransformerConfig", "n_layers=1 kv_shift=true"),
        ("--set", "training settings, fields of TrainSettings", "steps=500 batch_size=64"),
    ):
        add_settings(train, flag, f"{what}, e.g. {example}")
    train.add_argument("--steps", type=int, help="largest number of updates (default: the recipe's)")
    train.add_argument("--max-minutes", type=float, metavar="M", help="time budget in minutes (default: none)")
    train.add_argument("--seed", type=int, help="random seed for weights and batches (default: the recipe's)")
    train.add_argument("--device", help="where to train, e.g. cpu or cuda (default: cuda if available)")
    train.add_argument("--restart", action="store_true", help="start from scratch even if DIR contains a run")
    train.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    task, model, training = (settings_of(f"--{name}", getattr(args, name)) for name in ("task", "model", "set"))
    given = {"steps": args.steps, "max_minutes": args.max_minutes, "seed": args.seed}
    training |= {name: value for name, value in given.items() if value is not None}
    if args.seed is not None:
        model.setdefault("seed", args.seed)

    from kvlens.training import TrainSettings, find_recipe, train_recipe
    from kvlens.training.checkpoint import CHECKPOINT

    recipe = find_recipe(args.name)
    recipe = replace(
        recipe,
        task_settings={**recipe.task_settings, **task},
        model={**recipe.model, **model},
        training={**recipe.training, **training},
    )
    from_fields(TrainSettings, dict(recipe.training))  # report bad settings before building the data
    check_device("--device", args.device)
    try:
        facts = train_recipe(recipe, args.out, device=args.device, restart=args.restart, progress=sys.stderr.isatty())
    except KeyboardInterrupt as error:
        word, status = how_it_ended(error)
        continuation = (
            "resumes from the last checkpoint in"
            if (Path(args.out) / CHECKPOINT).is_file()
            else "starts from scratch: there is no checkpoint yet in"
        )
        print(f"kvlens: {word}; the same command {continuation} {visible(args.out)}", file=sys.stderr)
        return status
    _print_facts(facts, args.out)
    return 0


def _print_facts(facts: dict[str, Any], out: str) -> None:
    held, steps, minutes = facts["heldout"], facts["training"]["steps"], facts["seconds"] / 60
    print(f"Trained {facts['n_parameters']:,} parameters for {steps:,} steps in {minutes:.1f} minutes.")
    print(f"On {held['sequences']:,} held-out sequences:")
    print(f"  loss                    {held['loss']:.4f}")
    if held["accuracy"] is not None:
        print(f"  accuracy                {held['accuracy']:.4%}")
    if "gain" in held:
        print(f"  without context         {held['without']:.3f} nats per token")
        print(f"  after the context       {held['with_context']:.3f}")
        print(f"  context converted       {held['converted']:.3f}  (relative error of the logits {held['relative_error']:.1e})")
    loader = "KVTransformerBridge.boot_transformers" if facts["recipe"]["architecture"] else "HookedKVTransformer.load"
    print(f"Written to {visible(out)}; load it with {loader}({str(out) + '/model'!r})")


SCALES, SUMMARY = ("small", "paper", "tiny"), "summary.json"


def add_reproduce(commands: Commands) -> None:
    """Add ``reproduce`` to the command line."""
    parser = commands.add_parser(
        "reproduce",
        help="repeat a figure, table or theorem of the papers",
        description="Repeat an experiment of the papers. Writes tables, a figure and summary.json, which compares the paper's "
        "numbers with ours and says what differs from the paper. Without NAME, lists the experiments. Training runs are kept: "
        "to resume an interrupted experiment, repeat the command; experiments that need the same run share it.",
        epilog="  kvlens reproduce induction-depth --out induction-depth\n  kvlens reproduce --all --out results --jobs 2",
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of the experiment")
    parser.add_argument(
        "--scale",
        choices=SCALES,
        default="small",
        help="tiny: seconds, for tests; small: minutes; paper: the paper's sizes, of those that were run at them "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="for experiments on a given model: a shipped model (see `kvlens zoo`), a folder or a llama2.c checkpoint",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer file; needed only for a llama2.c checkpoint")
    add_settings(parser, "--set", "change settings, where VALUE is JSON or a string; summary.json lists all settings")
    parser.add_argument(
        "--all", action="store_true", help="run every experiment of the scale; those with results in DIR are skipped"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="output folder (default: NAME-SCALE); with --all, one folder per experiment goes there"
    )
    parser.add_argument(
        "--runs", metavar="DIR", default="kvlens-runs", help="where training runs are kept (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="training runs at a time (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace existing results in DIR; no other files are touched")
    parser.set_defaults(run=_reproduce)


def _reproduce(args: argparse.Namespace) -> int:
    from kvlens.papers import all_experiments, find_experiment

    settings = settings_of("--set", args.set)
    ensure("--jobs", Annotated[int, Within(1, 1024)], args.jobs)
    if args.all and (args.name or settings or args.model or args.tokenizer):
        raise KVLensError("--all runs every experiment with its own settings: leave out NAME, --set, --model and --tokenizer")
    if args.name is None and not args.all:
        for experiment in all_experiments():
            facts = f"{experiment.name}  ({experiment.source}; small: {experiment.cost['small']})"
            print(textwrap.fill(facts, terminal_width(), subsequent_indent="    ", break_on_hyphens=False))
            print(textwrap.fill(experiment.question, terminal_width(), initial_indent="    ", subsequent_indent="    "))
        print("\nRun one with: kvlens reproduce NAME [--scale tiny|small|paper] [--out DIR]")
        return 0
    if not args.all:
        experiment = find_experiment(args.name)
        check_known(f"--scale: of {experiment.name}, none", args.scale, experiment.scales)
        experiment = _with_settings(experiment, args, settings)
        _run(experiment, args, path_of("--out", f"{args.name}-{args.scale}" if args.out is None else args.out))
        return 0
    for experiment in (it for it in all_experiments() if args.scale in it.scales):
        folder = path_of("--out", "." if args.out is None else args.out) / f"{experiment.name}-{args.scale}"
        if not args.overwrite and (folder / SUMMARY).is_file():
            print(f"{experiment.name}: its results are in {visible(str(folder))}", flush=True)
        else:
            _run(experiment, args, folder)
    return 0


def _run(experiment: "Experiment", args: argparse.Namespace, folder: Path) -> None:
    """Run one experiment, write its results to ``folder`` and print them."""
    from kvlens.papers.harness.learned import keeping_runs
    from kvlens.papers.harness.run import EXPERIMENT_FOLDER, write_experiment

    with work_on(folder, EXPERIMENT_FOLDER, overwrite=args.overwrite):
        print(f"{experiment.name} ({experiment.source}), scale {args.scale}: {experiment.cost[args.scale]}", flush=True)
        started = perf_counter()
        try:
            with keeping_runs(path_of("--runs", args.runs), args.jobs):
                outcome = experiment.run(experiment.scales[args.scale], _tell)
        except KeyboardInterrupt:
            print(f"\nkvlens: training runs are kept in {visible(args.runs)}; the same command resumes them", file=sys.stderr)
            raise
        given = (outcome, experiment, args.scale, perf_counter() - started, folder)
        summary = write_experiment(*given, overwrite=args.overwrite, command=_command(experiment.name, args))
    _print_summary(summary, folder)


def _command(name: str, args: argparse.Namespace) -> str:
    """What repeats a run; of a model only the name, not where it lies."""
    scale = [] if args.scale == "small" else ["--scale", args.scale]
    model = [] if args.model is None else ["--model", Path(args.model).name]
    return shlex.join(["kvlens", "reproduce", name, *scale, *model, *(["--set", *args.set] if args.set else [])])


def _with_settings(experiment: "Experiment", args: argparse.Namespace, settings: dict[str, object]) -> "Experiment":
    """The experiment with the settings of its scale changed by --model, --tokenizer and --set."""
    from kvlens.papers.harness.run import with_settings

    given = {"model": args.model, "tokenizer": args.tokenizer}
    for name, value in given.items():
        own = [scale.get(name, {}) for scale in experiment.scales.values()]
        if value is not None and all(isinstance(setting, dict) for setting in own):
            raise KVLensError(f"--{name}: {experiment.name} does not run on an existing model")
    return with_settings(experiment, args.scale, settings | {k: v for k, v in given.items() if v is not None})


def _tell(text: str) -> None:
    print(f"  {visible(text)}", file=sys.stderr, flush=True)


def _print_summary(summary: dict[str, Any], folder: Path) -> None:
    for comparison in summary["comparisons"]:
        paper = "-" if comparison["paper"] is None else _number(comparison["paper"])
        print(f"\n{comparison['what']}\n  paper {paper}   here {_number(comparison['ours'])}   {comparison['verdict']}")
        print(textwrap.fill(comparison["claim"], 80, initial_indent="  ", subsequent_indent="  "))
        for sentence in _sample(comparison):
            print(textwrap.fill(sentence, 80, initial_indent="  ", subsequent_indent="  "))
        if comparison["untrained"] is not None:
            print(textwrap.fill(comparison["untrained"], 80, initial_indent="  ", subsequent_indent="  "))
    for sentence in summary["differences"]:
        print(textwrap.fill(f"difference: {sentence}", 80, subsequent_indent="  "))
    print(f"\n{summary['seconds']:g} s; written to {visible(str(folder))}: summary.json, {', '.join(summary['files'])}")


def _sample(comparison: dict[str, Any]) -> Iterator[str]:
    """What the test had to go by, and for an inconclusive one what it could have found."""
    sample = comparison["sample"]
    if sample is None:
        return
    if sample["low"] is not None:
        over = f"mean of {sample['n']} values {sample['mean']:.4g}, 95 % interval {sample['low']:.4g} to {sample['high']:.4g}"
        yield f"{over}; tested against {sample['bound']:g}"
    if comparison["verdict"] == "inconclusive" and sample["n"] < 6:
        yield f"{sample['n']} values are too few for a verdict, which takes six"
    elif comparison["verdict"] == "inconclusive" and sample["detectable"] is not None:
        yield f"a mean {sample['detectable']:.3g} away from it would have been found in 80 % of such experiments"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

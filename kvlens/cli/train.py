"""``kvlens train``: train a shipped model again, or your own on any task; interrupted runs are resumed."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlens.arguments import check_device
from kvlens.cli.settings import add_settings, settings_of
from kvlens.terminal import how_it_ended, visible


def add_command(commands: Any) -> None:
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
    train.add_argument("--minutes", type=float, metavar="M", help="time budget in minutes (default: none)")
    train.add_argument("--seed", type=int, help="random seed for weights and batches (default: the recipe's)")
    train.add_argument("--device", help="where to train, e.g. cpu or cuda (default: cuda if available)")
    train.add_argument("--restart", action="store_true", help="start from scratch even if DIR contains a run")
    train.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    task, model, training = (settings_of(f"--{name}", getattr(args, name)) for name in ("task", "model", "set"))
    given = {"steps": args.steps, "max_minutes": args.minutes, "seed": args.seed}
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
    TrainSettings.of(dict(recipe.training))  # report bad settings before building the data
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

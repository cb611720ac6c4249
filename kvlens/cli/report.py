"""``kvlens report``: convert a prompt, and show how exact the bias is, what it changes, and which heads matter."""

import argparse
import os
import textwrap
import warnings
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvlens.arguments import MOST_ASKED, UNITS, check_device
from kvlens.checks import Seed, Within, ensure
from kvlens.cli.prompts import MESSAGES_HELP, add_texts_and_model, model_and_texts
from kvlens.conversion_methods import CONVERSION_METHODS
from kvlens.errors import KVLensError
from kvlens.terminal import visible

if TYPE_CHECKING:
    from kvlens.conversion import ConversionMethod


def add_command(commands: Any) -> None:
    """Add ``report`` to the command line."""
    report = commands.add_parser(
        "report",
        help="convert a prompt into a KV bias; show how exact it is, what it changes, which heads matter",
        description="Convert a prompt into a KV bias and measure on a text: whether the logits with the bias equal those with "
        "the prompt; what the prompt changes; which layers and heads matter; and what the model generates with the prompt, "
        "with the bias, and without either. Without --prompt and --text, a built-in example is shown.",
        epilog="The output folder has a page to open in a browser (report.html), Parquet tables, summary.json and the bias "
        "(bias.safetensors).\n\n"
        "  kvlens report --prompt 'Colours: red, green, blue.' --text ' Colours: red, gr' --out colours",
        allow_abbrev=False,
    )
    add_texts_and_model(report, "the text after the prompt, on which predictions are compared; it is tokenized separately")
    report.add_argument("--messages", metavar="FILE", help=f"in place of a prompt: {MESSAGES_HELP}")
    softmax = report.add_argument_group(
        "options for softmax models",
        "Without them every key of the prompt is kept, which is exact. Models with linear attention are always exact.",
    )
    softmax.add_argument(
        "--method",
        choices=tuple(CONVERSION_METHODS),
        metavar="METHOD",
        help="exact (the default); landmark, a few keys with fitted weights and values; or, for comparison, "
        f"{', '.join(name for name in CONVERSION_METHODS if name not in ('exact', 'landmark'))}",
    )
    softmax.add_argument(
        "--features",
        type=int,
        metavar="N",
        help="largest number of keys (or features) per key-value head; needed by every method but exact, taylor, elu_plus_one",
    )
    softmax.add_argument(
        "--budget",
        choices=("logits", "equal"),
        help="landmark, attention_matching: more keys where they reduce the error of the logits most, or equally many for "
        "every head (default: logits; of attention_matching, equal)",
    )
    softmax.add_argument(
        "--polish", type=int, metavar="STEPS", help="landmark: gradient steps on the logits after the fit (default: 0)"
    )
    report.add_argument("--out", default="report", metavar="DIR", help="output folder (default: %(default)s)")
    report.add_argument(
        "--overwrite", action="store_true", help="replace an existing report in DIR; no other files are touched"
    )
    report.add_argument(
        "--new-tokens",
        type=int,
        metavar="N",
        help="number of tokens to generate in each case (default: 40, or as many as the model's context has room for)",
    )
    report.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="sampling temperature; 0 is greedy (default: %(default)g)"
    )
    report.add_argument("--seed", type=int, default=0, help="random seed for sampling (default: %(default)s)")
    report.add_argument(
        "--dual", action="store_true", help="also show each head as a step of gradient descent on the prompt (the dual model)"
    )
    opening = report.add_argument_group(
        "options for the opening of the page",
        "Which part of the prompt led to the answer, read in which layers, as in `kvlens explain`. Prompts of more than 4,096 "
        "tokens are not explained.",
    )
    opening.add_argument(
        "--by",
        choices=(*UNITS, "none"),
        metavar="UNIT",
        default="sentence",
        help="the unit that is removed at a time: %(choices)s; none skips the explanation (default: %(default)s)",
    )
    opening.add_argument("--answer", metavar="TEXT", help="the answer to explain (default: what the model writes)")
    opening.add_argument(
        "--about", metavar="WORDS", help="the words of the answer to explain (default: those that depend most)"
    )
    report.add_argument("--device", help="where the model runs, e.g. cpu or cuda (default: cuda if available)")
    report.add_argument(
        "--dtype", choices=("float32", "float64", "bfloat16", "float16"), help="dtype of the weights (default: the model's own)"
    )
    report.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    from kvlens.report.example import (  # light: bad input is reported before torch is imported
        REPORT_FOLDER,
        check_report_folder,
    )

    ensure("--seed", Seed, args.seed)
    if args.new_tokens is not None:
        ensure("--new-tokens", Annotated[int, Within(1)], args.new_tokens)
    ensure("--temperature", Annotated[float, Within(0)], args.temperature)
    for flag, value, least in (("--features", args.features, 1), ("--polish", args.polish, 0)):
        if value is not None:
            ensure(flag, Annotated[int, Within(least, MOST_ASKED)], value)
    if args.by == "none" and (args.answer or args.about):
        raise KVLensError("--answer and --about belong to the explanation, and --by none skips it; leave out either")
    check_report_folder(args.out, overwrite=args.overwrite)
    name, prompt, text = model_and_texts(args)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    from kvlens.files import work_on
    from kvlens.terminal import progress_bar

    with work_on(args.out, REPORT_FOLDER, overwrite=args.overwrite), progress_bar("loading the model") as tell:
        from kvlens import load

        check_device("--device", args.device)
        method = _method(args)
        model = load(name, tokenizer=args.tokenizer, device=args.device, dtype=args.dtype)
        if args.method not in (None, "exact") and model.cfg.attention == "linear":
            raise KVLensError(f"--method {args.method} is for softmax attention; with linear attention the conversion is exact")

        from kvlens.report.build import build_report
        from kvlens.report.page import write_report

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The prompt is longer than n_ctx")  # the report says so itself
            report = build_report(
                model,
                prompt,
                text,
                model_name=Path(name).resolve().name,  # without the path: reports are shared
                new_tokens=args.new_tokens,
                temperature=args.temperature,
                seed=args.seed,
                dual=args.dual,
                method=method,
                by=None if args.by == "none" else args.by,
                answer=args.answer,
                about=args.about,
                on_progress=tell,
            )
        tell("writing", 1.0)
        written = write_report(report, args.out, overwrite=args.overwrite)

    from kvlens.report.page import BIAS, PAGE, report_files
    from kvlens.report.printed import print_report

    print_report(report)
    folder = visible(f"{Path(args.out)}{os.sep}")
    size = (written / BIAS).stat().st_size
    shown = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
    files = ", ".join(f"{name} ({shown})" if name == BIAS else name for name in report_files(report))
    print("\n" + _wrapped(f"Written to {folder}: {files}"))
    print(_wrapped(f"Open {folder}{PAGE} in a browser to see everything; it works offline."))
    return 0


def _method(args: argparse.Namespace) -> "ConversionMethod":
    """The conversion method that was asked for; errors name the flags that were typed. Imports torch."""
    from kvlens.conversion import METHODS, method_of, option_names

    name = args.method or "exact"
    flags = {"n_features": "--features", "budget": "--budget", "polish_steps": "--polish"}
    given = {"n_features": args.features, "budget": args.budget, "polish_steps": args.polish}
    given = {option: value for option, value in given.items() if value is not None}
    for option in given:
        owners = [other for other, kind in METHODS.items() if option in option_names(kind)]
        if name not in owners:
            raise KVLensError(f"{flags[option]} has no effect with --method {name}; it belongs to --method {', '.join(owners)}")
    kind = METHODS[name]
    asked = next((field for field in fields(kind) if field.name == kind.shorthand.get("n_features", "n_features")), None)  # type: ignore[arg-type]
    if asked is not None and asked.default in (None, MISSING) and args.features is None:
        raise KVLensError(f"--method {name} needs --features, the number of keys (or features) per key-value head")
    return method_of(name, given if kind is METHODS["exact"] else {**given, "seed": args.seed})


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)

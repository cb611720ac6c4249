"""``kvlens report``: convert a prompt, and show what the bias keeps, changes and where it sits."""

import argparse
import os
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.checks import Seed, ensure
from kvlens.cli.prompts import add_prompt_and_text, given_prompt_and_text
from kvlens.errors import KVLensError
from kvlens.report.example import EXAMPLE_MODEL, TEXT_MODEL, example_for
from kvlens.terminal import visible
from kvlens.zoo import source_of

if TYPE_CHECKING:
    from kvlens.conversion import ConversionMethod


METHODS = ("exact", "landmark", "random", "taylor", "learned")
"""The names in :data:`kvlens.conversion.METHODS`, which imports torch."""


def add_command(commands: Any) -> None:
    """Add ``report`` to the command line."""
    report = commands.add_parser(
        "report",
        help="convert a prompt into a KV bias, and show what it keeps, changes and where it sits",
        description="Convert a prompt into a KV bias and measure, on a text: that the converted model without the prompt "
        "gives the logits of the original with it; what the prompt changes; which layers and heads carry it; and what is "
        "generated with the prompt, converted, and without. Without --prompt and --text, a built-in example is shown.",
        epilog="The folder gets a page to open in a browser (report.html), tidy Parquet tables, summary.json and the bias "
        "(bias.safetensors).\n\n"
        "  kvlens report --prompt 'Colours: red, green, blue.' --text ' Colours: red, gr' --out colours",
        allow_abbrev=False,
    )
    add_prompt_and_text(report, "what follows it, to compare predictions on; tokenized apart")
    report.add_argument(
        "--model",
        metavar="NAME",
        help="a shipped model (see `kvlens zoo`), a folder written by HookedKVTransformer.save, a Hugging Face folder, a "
        "llama2.c checkpoint, or a name that TransformerLens knows, where its files are in the local cache of Hugging Face "
        f"(default: {EXAMPLE_MODEL} for the built-in example, {TEXT_MODEL} for a prompt of yours)",
    )
    report.add_argument("--tokenizer", metavar="FILE", help="the tokenizer's file, for a llama2.c checkpoint alone")
    softmax = report.add_argument_group(
        "softmax models", "without these every key of the prompt is kept, which is exact; linear models are always exact"
    )
    softmax.add_argument(
        "--method",
        choices=METHODS,
        help="landmark: few keys with fitted weights; the others are for comparison (default: exact)",
    )
    softmax.add_argument(
        "--features",
        type=int,
        metavar="N",
        help="keys (or features) per key-value head, at most; needed for landmark, random and learned",
    )
    softmax.add_argument(
        "--budget",
        choices=("equal", "greedy"),
        help="the same number of keys for every head, or more where they remove most error (default: equal)",
    )
    softmax.add_argument("--polish", type=int, metavar="STEPS", help="gradient steps on the logits after the fit (default: 0)")
    report.add_argument("--out", default="report", metavar="DIR", help="folder of the report (default: %(default)s)")
    report.add_argument("--overwrite", action="store_true", help="replace the report that DIR holds; nothing else is replaced")
    report.add_argument(
        "--new-tokens", type=int, default=40, metavar="N", help="tokens to generate, three ways (default: %(default)s)"
    )
    report.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="of sampling; 0 is greedy (default: %(default)g)"
    )
    report.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    report.add_argument(
        "--dual", action="store_true", help="also each head as a step of learning, with the prompt as its demonstrations"
    )
    report.add_argument("--device", help="where the model runs, e.g. cpu or cuda (default: cuda where there is one)")
    report.add_argument(
        "--dtype", choices=("float32", "float64", "bfloat16", "float16"), help="of the weights (default: the model's own)"
    )
    report.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    from kvlens.report.folder import check_folder  # light: bad input is answered before torch is loaded

    ensure("--seed", Seed, args.seed)
    check_folder(args.out, overwrite=args.overwrite)
    given = given_prompt_and_text(args)
    name = (EXAMPLE_MODEL if given is None else TEXT_MODEL) if args.model is None else args.model
    source = source_of(name)
    prompt, text = given or example_for(name)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    from kvlens.report.console import progress_bar

    with progress_bar("loading the model") as tell:
        from kvlens.model import load_source

        method = _method(args)
        model = load_source(source, tokenizer=args.tokenizer, device=args.device, dtype=args.dtype)

        from kvlens.report.build import build_report
        from kvlens.report.write import write_report

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The prompt has")  # the report says so itself
            report = build_report(
                model,
                prompt,
                text,
                model_name=Path(name).resolve().name,  # a report is shared; where the model lies is not
                new_tokens=args.new_tokens,
                temperature=args.temperature,
                seed=args.seed,
                dual=args.dual,
                method=method,
                on_progress=tell,
            )
        tell("writing", 1.0)
        written = write_report(report, args.out, overwrite=args.overwrite)

    from kvlens.report.terminal import print_report
    from kvlens.report.write import BIAS, PAGE, report_files

    print_report(report)
    folder = visible(f"{Path(args.out)}{os.sep}")
    size = (written / BIAS).stat().st_size
    shown = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
    files = ", ".join(f"{name} ({shown})" if name == BIAS else name for name in report_files(report))
    print("\n" + _wrapped(f"Written to {folder}: {files}"))
    print(_wrapped(f"Open {folder}{PAGE} in a browser to see it all; it needs no network."))
    return 0


def _method(args: argparse.Namespace) -> "ConversionMethod":
    """The conversion method that was asked for. Imports torch."""
    from kvlens.conversion import Exact, method_of

    if args.method in ("landmark", "random", "learned") and args.features is None:
        raise KVLensError(f"--method {args.method} needs --features, the number of keys (or features) per key-value head")
    given = {"n_features": args.features, "budget": args.budget, "polish_steps": args.polish}
    given = {name: value for name, value in given.items() if value is not None}
    name = args.method or Exact.name
    return method_of(name, given if name == Exact.name else {**given, "seed": args.seed})


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)

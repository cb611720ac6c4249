"""``kvlens explain``: which part of the prompt, through which heads, led to the answer."""

import argparse
import os
from pathlib import Path
from typing import Annotated, Any

from kvlens.analyses.registry import ATTRIBUTION_METHODS, UNITS
from kvlens.arguments import check_device
from kvlens.checks import Seed, Within, ensure
from kvlens.cli.prompts import add_prompt_and_text, given_prompt_and_text
from kvlens.errors import KVLensError
from kvlens.report.example import EXAMPLE_MODEL, TEXT_MODEL, example_for
from kvlens.terminal import visible
from kvlens.zoo import source_of


def add_command(commands: Any) -> None:
    """Add ``explain`` to the command line."""
    explain = commands.add_parser(
        "explain",
        help="find the part of the prompt that led to the answer, and the heads and positions that carry its effect",
        description="Remove each sentence (or word, token) of the prompt in turn and measure the effect on the answer, in "
        "nats, compared with the effects of units of unrelated texts. For the unit with the largest effect, find the heads and "
        "positions that carry it. Without --prompt and --text, a built-in example is explained.",
        epilog="  kvlens explain --prompt 'Pavel has a parrot. Kaya feeds a donkey.' \\\n"
        "    --text ' Which animal does Kaya keep? Kaya keeps a' --answer ' donkey' --model facts-linear",
        allow_abbrev=False,
    )
    add_prompt_and_text(explain, "the text after the prompt, up to where the answer begins")
    explain.add_argument(
        "--answer", metavar="TEXT", help="the answer to explain, one token (default: the most probable next token)"
    )
    explain.add_argument(
        "--rival", metavar="TEXT", help="another answer; explain the difference between their log-probabilities (default: none)"
    )
    explain.add_argument(
        "--model",
        metavar="NAME",
        help="a shipped model (see `kvlens zoo`), a folder written by HookedKVTransformer.save, a Hugging Face folder, or a "
        f"llama2.c checkpoint (default: {EXAMPLE_MODEL} for the built-in example, {TEXT_MODEL} for your own prompt)",
    )
    explain.add_argument("--tokenizer", metavar="FILE", help="tokenizer file; needed only for a llama2.c checkpoint")
    explain.add_argument(
        "--by", choices=UNITS, default="sentence", help="the unit that is removed at a time (default: %(default)s)"
    )
    explain.add_argument(
        "--method",
        choices=tuple(ATTRIBUTION_METHODS),
        default="leave_one_out",
        help="how effects are estimated (default: %(default)s)",
    )
    explain.add_argument(
        "--null",
        type=int,
        metavar="N",
        help="number of units of unrelated texts to compare with, at least 19 (default: 20 for each unit of the prompt, "
        "between 40 and 1,000)",
    )
    explain.add_argument("--seed", type=int, default=0, help="random seed for choosing these texts (default: %(default)s)")
    explain.add_argument(
        "--quick",
        action="store_true",
        help="compare only the eight heads with the largest effects with unrelated texts: much faster with many heads",
    )
    explain.add_argument(
        "--out",
        metavar="DIR",
        help="write the tables to this folder, as Parquet, and summary.json (default: print only); what was measured is kept "
        "in DIR.unfinished until then, and an interrupted command resumes when it is repeated",
    )
    explain.add_argument(
        "--overwrite", action="store_true", help="replace an existing explanation in DIR; no other files are touched"
    )
    explain.add_argument("--device", help="where the model runs, e.g. cpu or cuda (default: cuda if available)")
    explain.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> int:
    if args.overwrite and args.out is None:
        raise KVLensError("--overwrite belongs to --out DIR; give the folder, or leave it out")
    ensure("--seed", Seed, args.seed)
    ensure("--null", Annotated[int, Within(19, 2**20)] | None, args.null)
    given = given_prompt_and_text(args)
    name = (EXAMPLE_MODEL if given is None else TEXT_MODEL) if args.model is None else args.model
    source = source_of(name)
    prompt, text = given or example_for(name)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    from kvlens.report.console import announce, progress_bar, unfinished
    from kvlens.report.folder import EXPLANATION_FOLDER

    with unfinished(args.out, EXPLANATION_FOLDER, overwrite=args.overwrite) as keep:
        with progress_bar("loading the model") as tell:
            from kvlens.analyses.attribution.cost import expected_cost
            from kvlens.analyses.attribution.explain import explain
            from kvlens.analyses.attribution.null import Null
            from kvlens.bridge import load_model

            check_device("--device", args.device)
            model = load_model(source, tokenizer=args.tokenizer, device=args.device)
            asked: dict[str, Any] = dict(by=args.by, method=args.method, null=Null(args.null, seed=args.seed))
            announce(expected_cost(model, prompt, text, **asked), quick=args.quick)
            asked |= dict(answer=args.answer, rival=args.rival, quick=args.quick)
            found = explain(model, prompt, text, keep=keep, on_progress=tell, **asked)

        if args.out is not None:
            from kvlens.report.write import write_explanation

            question: dict[str, Any] = dict(model_name=Path(name).resolve().name, prompt=prompt, text=text, by=args.by)
            files = write_explanation(found, args.out, model=model, overwrite=args.overwrite, **question)

    from kvlens.report.explanation import print_explanation

    print_explanation(found, args.by)
    if args.out is not None:
        print(f"\nWritten to {visible(f'{Path(args.out)}{os.sep}')}: {', '.join(files)}")
    return 0

"""``kvlens explain``: which parts of the prompt, through which heads, the answer rests on."""

import argparse
import os
from pathlib import Path
from typing import Annotated, Any

from kvlens.arguments import UNITS, check_device
from kvlens.checks import Seed, Within, ensure
from kvlens.cli.prompts import add_texts_and_model, model_and_texts
from kvlens.errors import KVLensError
from kvlens.terminal import visible


def add_command(commands: Any) -> None:
    """Add ``explain`` to the command line."""
    explain = commands.add_parser(
        "explain",
        help="find the parts of the prompt on which an answer rests, and the heads and positions that they act by",
        description="Remove each sentence (or word, token) of the prompt in turn, then sets of them, and say which lose the "
        "answer and which keep it alone; then exchange heads and positions for those of the prompt without these, and "
        "say the same of them. Every sentence that is printed is about a run that was made. Without --prompt and --text, "
        "a built-in example is explained.",
        epilog="  kvlens explain --prompt 'Pavel has a parrot. Kaya feeds a donkey.' \\\n"
        "    --text ' Which animal does Kaya keep? Kaya keeps a' --answer ' donkey' --model facts-linear",
        allow_abbrev=False,
    )
    add_texts_and_model(explain, "the text after the prompt, up to where the answer begins")
    explain.add_argument(
        "--answer", metavar="TEXT", help="the answer to explain, one token (default: the most probable next token)"
    )
    explain.add_argument(
        "--rival", metavar="TEXT", help="another answer; explain the difference between their log-probabilities (default: none)"
    )
    explain.add_argument(
        "--by", choices=UNITS, default="sentence", help="the unit that is removed at a time (default: %(default)s)"
    )
    explain.add_argument(
        "--null",
        type=int,
        nargs="?",
        const=20,
        metavar="N",
        help="also put N unrelated texts in the place of the unit with the largest effect, and count how many do as much "
        "(default: none; %(const)s without a number)",
    )
    explain.add_argument("--seed", type=int, default=0, help="random seed for choosing these texts (default: %(default)s)")
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
    ensure("--null", Annotated[int, Within(1, 2**20)] | None, args.null)
    name, prompt, text = model_and_texts(args)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    from kvlens.report.console import announce, progress_bar, unfinished
    from kvlens.report.folder import EXPLANATION_FOLDER

    with unfinished(args.out, EXPLANATION_FOLDER, overwrite=args.overwrite) as keep:
        with progress_bar("loading the model") as tell:
            from kvlens import load
            from kvlens.analyses.attribution.cost import expected_cost
            from kvlens.analyses.attribution.explain import explain
            from kvlens.analyses.attribution.null import Null

            check_device("--device", args.device)
            model = load(name, tokenizer=args.tokenizer, device=args.device)
            null = None if args.null is None else Null(args.null, seed=args.seed)
            asked: dict[str, Any] = dict(by=args.by, null=null)
            announce(expected_cost(model, prompt, text, **asked))
            asked |= dict(answer=args.answer, rival=args.rival)
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

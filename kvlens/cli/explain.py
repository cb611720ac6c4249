"""``kvlens explain``: what the model answers, which parts of the prompt its words rest on, and which layers read those."""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from kvlens.arguments import UNITS, check_device
from kvlens.checks import Within, ensure
from kvlens.cli.prompts import add_question, add_texts_and_model, given_chat, model_and_texts
from kvlens.errors import KVLensError
from kvlens.report.example import TEXT_MODEL
from kvlens.terminal import visible


def add_command(commands: Any) -> None:
    """Add ``explain`` to the command line."""
    explain = commands.add_parser(
        "explain",
        help="what the model answers, which parts of the prompt the answer rests on, and which layers read those",
        description="The model answers, and every part of the prompt (sentence, document, ...) is removed in turn: which words "
        "of the answer are lost, and what does the model say instead? Then layers read the prompt without these parts. "
        "Every sentence that is printed is about a run that was made. Without a question or a prompt, an example is explained.",
        epilog="  kvlens explain --model HuggingFaceTB/SmolLM2-135M-Instruct --download --question 'In which city ...?' "
        "--document minutes.txt\n"
        "  kvlens explain --model DIR --messages chat.json --about Rotterdam\n"
        "  kvlens explain --prompt 'Pavel has a parrot. Kaya feeds a donkey.' --text ' Kaya keeps a'",
        allow_abbrev=False,
    )
    add_question(explain)
    add_texts_and_model(explain, "the text after the prompt, up to where the answer begins")
    explain.add_argument("--answer", metavar="TEXT", help="the answer to explain (default: what the model answers)")
    explain.add_argument(
        "--about", metavar="WORDS", help="the words of the answer to explain (default: those that depend most)"
    )
    explain.add_argument(
        "--by",
        choices=UNITS,
        metavar="UNIT",
        default="sentence",
        help="what is removed at a time: %(choices)s (default: %(default)s)",
    )
    explain.add_argument(
        "--depth",
        choices=("units", "layers", "heads", "positions"),
        default="layers",
        help="how far it goes: %(choices)s (default: %(default)s)",
        metavar="DEPTH",
    )
    explain.add_argument("--budget", type=int, metavar="TOKENS", help="tokens that may be read (default: as many as it takes)")
    explain.add_argument(
        "--out",
        metavar="DIR",
        help="write a page, the tables as Parquet, and summary.json to this folder (default: print only)",
    )
    explain.add_argument(
        "--overwrite", action="store_true", help="replace an existing explanation in DIR; no other files are touched"
    )
    explain.add_argument("--device", help="where the model runs, e.g. cpu or cuda (default: cuda if available)")
    explain.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> int:
    if args.overwrite and args.out is None:
        raise KVLensError("--overwrite belongs to --out DIR; give the folder, or leave it out")
    ensure("--budget", Annotated[int, Within(1)] | None, args.budget)
    chat = given_chat(args)
    name, prompt, text = (args.model or TEXT_MODEL, chat, None) if chat is not None else model_and_texts(args)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    from kvlens.files import work_on
    from kvlens.report.example import EXPLANATION_FOLDER
    from kvlens.terminal import make_console, progress_bar

    held = nullcontext() if args.out is None else work_on(args.out, EXPLANATION_FOLDER, overwrite=args.overwrite)
    with held, progress_bar("loading the model") as tell:
        from kvlens import explain, load

        check_device("--device", args.device)
        model = load(name, tokenizer=args.tokenizer, device=args.device, download=args.download)
        options: dict[str, Any] = dict(about=args.about, answer=args.answer, by=args.by, depth=args.depth, budget=args.budget)
        found = explain(model, prompt, text, on_progress=tell, on_found=tell.say, **options)
        if args.out is not None:
            from kvlens.report.page import EXPLANATION_PAGE, write_explanation

            files = write_explanation(
                found, args.out, model=model, model_name=Path(name).resolve().name, overwrite=args.overwrite
            )

    from kvlens.report.printed import print_explanation

    if chat is None and getattr(model.tokenizer, "chat_template", None):
        make_console(stderr=True).print("This model has a chat template: --question and --document ask it as its users do.")
    print_explanation(found)
    if args.out is not None:
        folder = visible(f"{Path(args.out)}{os.sep}")
        print(f"\nWritten to {folder}: {', '.join(files)}\nOpen {folder}{EXPLANATION_PAGE} in a browser; it works offline.")
    return 0

"""``kvlens explain`` and ``kvlens report``, the commands that are given a prompt: what it is, and the model that reads it.

Prompt and text, or a chat, come from arguments, files or standard input; without any, an example is shown.
"""

import argparse
import json
import os
import sys
import textwrap
import warnings
from contextlib import nullcontext
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvlens.arguments import MOST_ASKED, UNITS, check_characters, check_device, path_of
from kvlens.checks import Seed, Within, ensure
from kvlens.conversion_methods import CONVERSION_METHODS
from kvlens.errors import KVLensError
from kvlens.files import check_regular, each_once, work_on
from kvlens.report.example import EXAMPLE_MODEL, EXPLANATION_FOLDER, REPORT_FOLDER, TEXT_MODEL, check_report_folder, example_for
from kvlens.terminal import make_console, progress_bar, visible
from kvlens.zoo import source_of

if TYPE_CHECKING:
    from kvlens import Chat
    from kvlens.conversion import ConversionMethod

MESSAGES_HELP = (
    'a JSON file with a chat, [{"role": "user", "content": ...}, ...], which the model reads as its chat template writes it; '
    "- is standard input"
)


OPEN_ALREADY = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""How a shell names a pipe that somebody writes to: ``<(pdftotext minutes.pdf -)``. Any other pipe may wait for ever."""


def add_texts_and_model(command: argparse.ArgumentParser, text_help: str) -> None:
    """Add ``--prompt``, ``--prompt-file``, ``--text``, ``--text-file``, ``--model`` and ``--tokenizer``."""
    command.add_argument("--prompt", metavar="TEXT", help="the prompt; the model's BOS token, if any, is added in front")
    command.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a UTF-8 file instead; - is standard input")
    command.add_argument("--text", metavar="TEXT", help=text_help)
    command.add_argument("--text-file", metavar="FILE", help="read the text from a UTF-8 file instead; - is standard input")
    command.add_argument(
        "--model",
        metavar="NAME",
        help="a shipped model (see `kvlens zoo`), a folder written by HookedKVTransformer.save, a Hugging Face folder, a "
        "GGUF file, a llama2.c checkpoint, or a name on the hub, if its files are in the local Hugging Face cache "
        f"(default: {EXAMPLE_MODEL} for the built-in example, {TEXT_MODEL} for your own prompt)",
    )
    command.add_argument("--download", action="store_true", help="fetch the files of a name on the hub where they are not here")
    command.add_argument("--tokenizer", metavar="FILE", help="tokenizer file; needed only for a llama2.c checkpoint")


def add_question(command: argparse.ArgumentParser) -> None:
    """Add ``--question``, ``--document``, ``--system`` and ``--messages``, which :func:`given_chat` reads."""
    command.add_argument(
        "--question",
        metavar="TEXT",
        help="a question to a chat model, never removed; with --messages: the words of the user's last message that ask",
    )
    command.add_argument(
        "--document",
        metavar="FILE",
        action="append",
        help="a UTF-8 file that the question is about, cut into units; may be repeated; - is standard input",
    )
    command.add_argument("--system", metavar="TEXT", help="the system's message in front of the question, cut into units, too")
    command.add_argument("--messages", metavar="FILE", help=MESSAGES_HELP)


def given_chat(args: argparse.Namespace) -> "Chat | None":
    """The chat of ``--question``, ``--document`` and ``--system``, or of ``--messages``; None if none of them is given.

    Raises:
        KVLensError: both ways, or a prompt as text, too; documents or a system's message without a question, two documents of
            one name, a file that cannot be read, JSON that is no list of messages; as :class:`kvlens.Chat`.
    """
    asked = {f"--{name}": getattr(args, name, None) for name in ("question", "document", "system")}
    given = [flag for flag, value in asked.items() if value is not None]
    plain = [f"--{name.replace('_', '-')}" for name in ("prompt", "prompt_file") if getattr(args, name, None) is not None]
    if not given and args.messages is None:
        return None
    others = given if args.messages is None else [flag for flag in given if flag != "--question"]
    ways = [*(["--messages"] if args.messages is not None else []), *others[:1], *plain[:1]]
    if len(ways) > 1:
        raise KVLensError(f"{ways[0]} and {ways[1]} are both given, and each is a whole prompt; use only one")

    from kvlens.chat import Chat  # imports torch

    if args.messages is not None:
        return Chat(_json("messages", args.messages), question=asked["--question"])
    if asked["--question"] is None:
        raise KVLensError(f"{given[0]} belongs to --question; give the question, too")
    documents: dict[str, str] = {}
    for file in asked["--document"] or ():
        name = "standard input" if file == "-" else Path(file).name
        if name in documents:
            raise KVLensError(f"--document: two documents are called {name}; rename one, as parts of a prompt are named by it")
        documents[name] = str(_given(None, file, "document"))
    return Chat.ask(asked["--question"], documents, asked["--system"])


def check_parts(args: argparse.Namespace, model: Any, prompt: "str | Chat") -> None:
    """Raise KVLensError, in the words of the command line, where a chat is only a question, and nothing can be removed."""
    if isinstance(prompt, str) or prompt.layout(model).pieces:
        return
    if args.messages is None:
        raise KVLensError(
            "--question: it is never removed, and without a document there is nothing else to remove; give what it is about, "
            "as --document FILE or --system TEXT"
        )
    skip = "; --by none makes a report without an explanation" if args.command == "report" else ""
    raise KVLensError(
        f"--messages: the chat in {args.messages} is only a question, which is never removed, and there is nothing else; "
        f"write what the question is about in front of it, or into another message{skip}"
    )


def _json(what: str, file: str) -> Any:
    text = str(_given(None, file, what))
    try:
        return json.loads(text, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise KVLensError(f"--{what}: {file} is not JSON as expected ({error}); write a list of messages to it") from error


def model_and_texts(args: argparse.Namespace) -> "tuple[str, str | Chat, str | None]":
    """The model's name, the prompt and the text: those of the built-in example where neither is given.

    Raises:
        KVLensError: no such model; prompt and text as in :func:`given_prompt_and_text`.
    """
    given = given_prompt_and_text(args)
    name = (EXAMPLE_MODEL if given is None else TEXT_MODEL) if args.model is None else args.model
    source_of(name, download=args.download)
    return name, *(given or example_for(name))


def given_prompt_and_text(args: argparse.Namespace) -> "tuple[str | Chat, str | None] | None":
    """Read both, or None if neither was given. A chat needs no text.

    Raises:
        KVLensError: only one of them, an empty one, one given both as argument and as file, a file that cannot be read.
    """
    chat = given_chat(args) if hasattr(args, "messages") else None
    if args.prompt_file == args.text_file == "-":
        raise KVLensError("--prompt-file and --text-file are both -; only one can be read from standard input")
    prompt = chat or _given(args.prompt, args.prompt_file, "prompt")
    text = _given(args.text, args.text_file, "text")
    if prompt is None and text is None:
        return None
    if prompt is None or (text is None and chat is None):
        missing = "--prompt" if prompt is None else "--text"
        raise KVLensError(f"{missing} is missing: give both a prompt and a text, or neither for the built-in example")
    for what, value in (("--prompt", prompt), ("--text", text)):
        if not isinstance(value, str):
            continue  # a chat, checked already, or no text behind it
        if not value:
            raise KVLensError(f"{what} is empty; give at least one character")
        check_characters(what, value)
    return prompt, text


def _given(value: str | None, file: str | None, what: str) -> str | None:
    if file is None:
        return value
    if value is not None:
        raise KVLensError(f"--{what} and --{what}-file are both given; use only one")
    flag = f"--{what}-file" if what in ("prompt", "text") else f"--{what}"
    path = path_of(flag, file)
    if file != "-" and not file.startswith(OPEN_ALREADY):
        check_regular(flag, path)
    try:
        return sys.stdin.buffer.read().decode("utf-8") if file == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise KVLensError(f"{flag}: cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise KVLensError(f"{flag}: {file} is not UTF-8 text (byte {error.start}); convert it first") from error


def add_explain(commands: Any) -> None:
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

    held = nullcontext() if args.out is None else work_on(args.out, EXPLANATION_FOLDER, overwrite=args.overwrite)
    with held, progress_bar("loading the model") as tell:
        from kvlens import explain, load

        check_device("--device", args.device)
        model = load(name, tokenizer=args.tokenizer, device=args.device, download=args.download)
        check_parts(args, model, prompt)
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


def add_report(commands: Any) -> None:
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
    report.add_argument(
        "--messages",
        metavar="FILE",
        help=f"in place of a prompt: {MESSAGES_HELP}; without --text, predictions are compared on the answer",
    )
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

    with work_on(args.out, REPORT_FOLDER, overwrite=args.overwrite), progress_bar("loading the model") as tell:
        from kvlens import load

        check_device("--device", args.device)
        method = _method(args)
        model = load(name, tokenizer=args.tokenizer, device=args.device, dtype=args.dtype)
        if args.by != "none":
            check_parts(args, model, prompt)
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

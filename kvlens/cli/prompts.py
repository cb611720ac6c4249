"""``kvlens explain``: the prompt that it is given, the model that reads it, and what is printed and written.

Prompt and text, or a chat, come from arguments, files or standard input; without any, an example is explained. No training text
holds the examples, so what a model knows of them comes from the prompt.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvlens.arguments import HOW_FAR, SECTIONS, UNITS, USUAL_SECTIONS, SectionName, check_characters, check_device, path_of
from kvlens.checks import Within, ensure
from kvlens.errors import KVLensError
from kvlens.files import check_regular, check_writable, each_once, reading_file, write_atomically
from kvlens.terminal import Commands, make_console, progress_bar, visible
from kvlens.zoo import source_of

if TYPE_CHECKING:
    from kvlens import Chat
    from kvlens.model import KVModel

EXAMPLE_MODEL, TEXT_MODEL = "facts-linear", "docs-linear"
"""What explains itself where neither a model nor a prompt is given, and where a prompt is given and no model."""
STORY = (
    "The kite is in the barn. Mira keeps a goat. The drum stands in the cellar. Pavel has a parrot. "
    "Look for the lamp in the attic. At night Kaya feeds a donkey.",
    " Which animal does Pavel keep? Pavel keeps a parrot. Which animal does Kaya keep? Kaya keeps a",
)
NESTED = (
    "The bin is in the stable. The tub is in the garden. The clock is in the tub. The mirror is in the bin.",
    " Which room holds the clock? The",
)
MINUTES = (
    "Everybody was there on Tuesday. The new office will be in Rotterdam. The rent is 12,500 euros a month.",
    "In which city will the new office be? Answer in one short sentence.",
)
HELP_PAGE = (
    """\
frobnicate(widget, colour='purple', depth=7)

Frobnicate a widget and return it.

Parameters
----------
widget : Widget
    The widget to frobnicate.
colour : str, optional
    The colour of the frobnicated widget. The default is 'purple'.
depth : int, optional
    How deep the widget is frobnicated. The default is 7.

Returns
-------
Widget
    The frobnicated widget.

""",
    "Examples\n--------\n>>> widget = Widget()\n>>> frobnicate(widget, colour='purple', depth=7)\nThe widget is",
)
EXAMPLES = {"facts-linear": STORY, "facts-gpt2": STORY, "facts-hybrid": STORY} | dict.fromkeys(
    ("facts-hops-linear", "facts-hops-gpt2"), NESTED
)
"""Prompt and text by the model's name; `HELP_PAGE` for models of other text."""
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
    command.add_argument(
        "--messages",
        metavar="FILE",
        help='a JSON file with a chat, [{"role": "user", "content": ...}, ...], which the model reads as its template writes '
        "it; - is standard input",
    )


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


def check_parts(args: argparse.Namespace, model: "KVModel", prompt: "str | Chat") -> None:
    """Raise KVLensError, in the words of the command line, where a chat is only a question, and nothing can be removed."""
    if isinstance(prompt, str) or prompt.layout(model).pieces:
        return
    if args.messages is None:
        raise KVLensError(
            "--question: it is never removed, and without a document there is nothing else to remove; give what it is about, "
            "as --document FILE or --system TEXT"
        )
    raise KVLensError(
        f"--messages: the chat in {args.messages} is only a question, which is never removed, and there is nothing else; "
        f"write what the question is about in front of it, or into another message"
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
    return name, *(given or EXAMPLES.get(name, HELP_PAGE))


def given_prompt_and_text(args: argparse.Namespace) -> "tuple[str | Chat, str | None] | None":
    """Read both, or None if neither was given. A chat needs no text.

    Raises:
        KVLensError: only one of them, an empty one, one given both as argument and as file, a file that cannot be read.
    """
    chat = given_chat(args) if hasattr(args, "messages") else None
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
        with reading_file(flag, file):
            return sys.stdin.buffer.read().decode("utf-8") if file == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise KVLensError(f"{flag}: {file} is not UTF-8 text (byte {error.start}); convert it first") from error


def add_explain(commands: Commands) -> None:
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
        "--about", metavar="WORDS", help="the words of the answer to explain (default: those that the question asks for)"
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
        choices=HOW_FAR,
        default="ranges",
        help="how far it goes: %(choices)s; ranges tries halves of the layers, layers each of them (default: %(default)s)",
        metavar="DEPTH",
    )
    explain.add_argument("--budget", type=int, metavar="TOKENS", help="tokens that may be read (default: as many as it takes)")
    explain.add_argument(
        "--out",
        metavar="FILE",
        help="write a page, FILE.html, which works offline, or all tables, FILE.json (default: print only)",
    )
    explain.add_argument(
        "--sections",
        nargs="*",
        metavar="NAME",
        help=f"what the page shows below the answer: {', '.join(SECTIONS)} (heads takes longest, as each is ablated); without "
        f"a name the answer alone (default: {' '.join(USUAL_SECTIONS)})",
    )
    explain.add_argument("--overwrite", action="store_true", help="replace the file of --out if it exists")
    explain.add_argument("--device", help="where the model runs, e.g. cpu or cuda (default: cuda if available)")
    explain.add_argument(
        "--dtype", choices=("float32", "float64", "bfloat16", "float16"), help="dtype of the weights (default: the model's own)"
    )
    explain.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> int:
    is_page = args.out is not None and args.out.endswith(".html")
    for flag, is_missed in (
        ("--overwrite", args.overwrite and args.out is None),
        ("--sections", args.sections is not None and not is_page),
    ):
        if is_missed:
            raise KVLensError(f"{flag} belongs to --out FILE.html; give the file, or leave it out")
    ensure("--budget", Annotated[int, Within(1)] | None, args.budget)
    sections = [
        ensure("--sections", SectionName, name) for name in (USUAL_SECTIONS if args.sections is None else args.sections)
    ]
    out = None if args.out is None else _written_file(args.out, overwrite=args.overwrite)
    chat = given_chat(args)
    name, prompt, text = (args.model or TEXT_MODEL, chat, None) if chat is not None else model_and_texts(args)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    with progress_bar("loading the model", after=0, lines=False) as tell:
        from kvlens import explain, load

        check_device("--device", args.device)
        model = load(name, tokenizer=args.tokenizer, device=args.device, dtype=args.dtype, download=args.download)
        check_parts(args, model, prompt)
        found = explain(
            model,
            prompt,
            text,
            about=args.about,
            answer=args.answer,
            by=args.by,
            depth=args.depth,
            budget=args.budget,
            on_progress=tell,
            on_found=tell.say,
        )

    from kvlens.cli.printed import print_explanation

    if chat is None and getattr(model.tokenizer, "chat_template", None):
        make_console(stderr=True).print("This model has a chat template: --question and --document ask it as its users do.")
    print_explanation(found)
    if out is None:
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    if not is_page:
        write_atomically(out, found.to_json())
        print(f"\nWritten to {visible(args.out)}.")
        return 0
    from kvlens.explanation import explanation_page

    with progress_bar("the page", after=0, lines=False) as tell:  # the answer can be read meanwhile
        made = explanation_page(model, found, sections, model_name=Path(name).resolve().name, on_progress=tell)
        made.save_html(out)
    print(f"\nOpen {visible(args.out)} in a browser; it works offline.")
    return 0


def _written_file(out: str, *, overwrite: bool) -> Path:
    """The file of ``--out``; KVLensError unless a page or tables may and can be written there."""
    path = path_of("--out", out)
    if path.suffix not in (".html", ".json"):
        raise KVLensError(f"--out: expected a file that ends in .html, for the page, or in .json, for the tables, got {out!r}")
    if path.exists() and not (overwrite and path.is_file()):
        what = "exists; pass --overwrite to replace it, or choose" if path.is_file() else "is no file; choose"
        raise KVLensError(f"--out: {out} {what} another one")
    check_writable(path)
    return path

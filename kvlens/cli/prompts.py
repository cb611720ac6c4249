"""The prompt and the text of a command, or its chat, from arguments, files or standard input, and the model that reads them."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.arguments import check_characters
from kvlens.errors import KVLensError
from kvlens.report.example import EXAMPLE_MODEL, TEXT_MODEL, example_for
from kvlens.zoo import source_of

if TYPE_CHECKING:
    from kvlens import Chat

MESSAGES_HELP = (
    'a JSON file with a chat, [{"role": "user", "content": ...}, ...], which the model reads as its chat template writes it; '
    "- is standard input"
)


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
    command.add_argument("--question", metavar="TEXT", help="a question to a chat model, which is never taken out")
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
    ways = [*(["--messages"] if args.messages is not None else []), *given[:1], *plain[:1]]
    if len(ways) > 1:
        raise KVLensError(f"{ways[0]} and {ways[1]} are both given, and each is a whole prompt; use only one")

    from kvlens.chat import Chat  # imports torch

    if args.messages is not None:
        return Chat(_json("messages", args.messages))
    if asked["--question"] is None:
        raise KVLensError(f"{given[0]} belongs to --question; give the question, too")
    documents: dict[str, str] = {}
    for file in asked["--document"] or ():
        name = "standard input" if file == "-" else Path(file).name
        if name in documents:
            raise KVLensError(f"--document: two documents are called {name}; rename one, as parts of a prompt are named by it")
        documents[name] = str(_given(None, file, "document"))
    return Chat.ask(asked["--question"], documents, asked["--system"])


def _json(what: str, file: str) -> Any:
    try:
        return json.loads(str(_given(None, file, what)))
    except (ValueError, RecursionError) as error:
        raise KVLensError(f"--{what}: {file} is not JSON ({error}); write a list of messages to it") from error


def model_and_texts(args: argparse.Namespace) -> "tuple[str, str | Chat, str]":
    """The model's name, the prompt and the text: those of the built-in example where they are not given.

    Raises:
        KVLensError: no such model; prompt and text as in :func:`given_prompt_and_text`.
    """
    given = given_prompt_and_text(args)
    name = (EXAMPLE_MODEL if given is None else TEXT_MODEL) if args.model is None else args.model
    source_of(name, download=args.download)
    return name, *(given or example_for(name))


def given_prompt_and_text(args: argparse.Namespace) -> "tuple[str | Chat, str] | None":
    """Read both, or None if neither was given.

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
    if prompt is None or text is None:
        missing = "--prompt" if prompt is None else "--text"
        raise KVLensError(f"{missing} is missing: give both a prompt and a text, or neither for the built-in example")
    for what, value in (("--prompt", prompt), ("--text", text)):
        if not isinstance(value, str):
            continue  # a chat, checked already
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
    try:
        return sys.stdin.buffer.read().decode("utf-8") if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise KVLensError(f"{flag}: cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise KVLensError(f"{flag}: {file} is not UTF-8 text (byte {error.start}); convert it first") from error

"""The prompt and the text of a command, from arguments, files or standard input, and the model that reads them."""

import argparse
import sys
from pathlib import Path

from kvlens.errors import KVLensError
from kvlens.report.example import EXAMPLE_MODEL, TEXT_MODEL, example_for
from kvlens.zoo import source_of


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
    command.add_argument("--tokenizer", metavar="FILE", help="tokenizer file; needed only for a llama2.c checkpoint")


def model_and_texts(args: argparse.Namespace) -> tuple[str, str, str]:
    """The model's name, the prompt and the text: those of the built-in example where they are not given.

    Raises:
        KVLensError: no such model; prompt and text as in :func:`given_prompt_and_text`.
    """
    given = given_prompt_and_text(args)
    name = (EXAMPLE_MODEL if given is None else TEXT_MODEL) if args.model is None else args.model
    source_of(name)
    return name, *(given or example_for(name))


def given_prompt_and_text(args: argparse.Namespace) -> tuple[str, str] | None:
    """Both, or None if neither was given.

    Raises:
        KVLensError: only one of them, an empty one, one given both as argument and as file, a file that cannot be read.
    """
    if args.prompt_file == args.text_file == "-":
        raise KVLensError("--prompt-file and --text-file are both -; only one can be read from standard input")
    prompt = _given(args.prompt, args.prompt_file, "prompt")
    text = _given(args.text, args.text_file, "text")
    if prompt is None and text is None:
        return None
    if prompt is None or text is None:
        missing = "--prompt" if prompt is None else "--text"
        raise KVLensError(f"{missing} is missing: give both a prompt and a text, or neither for the built-in example")
    for what, value in (("--prompt", prompt), ("--text", text)):
        if not value:
            raise KVLensError(f"{what} is empty; give at least one character")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise KVLensError(f"{what} is not valid UTF-8; encode it as UTF-8 or pass it as a file") from None
    return prompt, text


def _given(value: str | None, file: str | None, what: str) -> str | None:
    if file is None:
        return value
    if value is not None:
        raise KVLensError(f"--{what} and --{what}-file are both given; use only one")
    try:
        return sys.stdin.buffer.read().decode("utf-8") if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise KVLensError(f"--{what}-file: cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise KVLensError(f"--{what}-file: {file} is not UTF-8 text (byte {error.start}); convert it first") from error

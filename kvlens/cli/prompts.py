"""The prompt and the text that a command is given: as arguments, as files, or on standard input."""

import argparse
import sys
from pathlib import Path

from kvlens.errors import KVLensError


def add_prompt_and_text(command: argparse.ArgumentParser, text_help: str) -> None:
    """Add ``--prompt``, ``--prompt-file``, ``--text`` and ``--text-file``."""
    command.add_argument("--prompt", metavar="TEXT", help="what is converted; it gets the model's BOS token, if it has one")
    command.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a UTF-8 file instead; - is standard input")
    command.add_argument("--text", metavar="TEXT", help=text_help)
    command.add_argument("--text-file", metavar="FILE", help="read the text from a UTF-8 file instead; - is standard input")


def given_prompt_and_text(args: argparse.Namespace) -> tuple[str, str] | None:
    """Both, or None where neither was given.

    Raises:
        KVLensError: one of them alone, an empty one, both as arguments and as files, files that cannot be read.
    """
    if args.prompt_file == args.text_file == "-":
        raise KVLensError("--prompt-file and --text-file are both standard input; give one as a file")
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
            raise KVLensError(f"{what} is not valid UTF-8 text; give it in UTF-8, or as a file") from None
    return prompt, text


def _given(value: str | None, file: str | None, what: str) -> str | None:
    if file is None:
        return value
    if value is not None:
        raise KVLensError(f"--{what} and --{what}-file are both given; give one")
    try:
        return sys.stdin.buffer.read().decode("utf-8") if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise KVLensError(f"--{what}-file: cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise KVLensError(f"--{what}-file: {file} is not UTF-8 text (byte {error.start}); convert it first") from error

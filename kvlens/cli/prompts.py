"""The prompt and the text of a command, from arguments, files or standard input."""

import argparse
import sys
from pathlib import Path

from kvlens.errors import KVLensError


def add_prompt_and_text(command: argparse.ArgumentParser, text_help: str) -> None:
    """Add ``--prompt``, ``--prompt-file``, ``--text`` and ``--text-file``."""
    command.add_argument("--prompt", metavar="TEXT", help="the prompt; the model's BOS token, if any, is added in front")
    command.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a UTF-8 file instead; - is standard input")
    command.add_argument("--text", metavar="TEXT", help=text_help)
    command.add_argument("--text-file", metavar="FILE", help="read the text from a UTF-8 file instead; - is standard input")


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

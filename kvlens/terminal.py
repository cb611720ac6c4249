"""What every command of kvlens shares: how arguments are read, what a signal ends with, what may reach the terminal."""

import argparse
import shutil
import signal
import sys
import textwrap
import threading
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from kvlens.errors import KVLensError, nearest

INTERRUPTED, TERMINATED = 130, 143
UNREADABLE = "\N{REPLACEMENT CHARACTER}"
_UNKNOWN, _MISSING = "unrecognized arguments: ", "the following arguments are required: "
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode's controls (the escape character among them), marks such as those of direction, halves of a character, line ends."""
_JOINERS = "\u200c\u200d"
"""Marks that a script or an emoji is spelt with: whether its neighbors are written as one."""


def terminal_width() -> int:
    """Columns of the terminal, as argparse counts them, and at most 100: longer lines are hard to read."""
    return max(40, min(100, shutil.get_terminal_size().columns - 2))


def paragraphs(text: str, width: int) -> str:
    """``text`` in lines of at most ``width``; paragraphs that begin with two blanks (tables, commands) stay."""
    return "\n\n".join(
        part if part.startswith("  ") else textwrap.fill(part, width, break_on_hyphens=False, break_long_words=False)
        for part in text.split("\n\n")
    )


def listed(rows: Iterable[tuple[str, str]], width: int) -> str:
    """Names and what they are, in two columns."""
    pairs = list(rows)
    column = max(len(name) for name, _ in pairs) + 2
    return "\n".join(
        textwrap.fill(text, width, initial_indent=f"{name:<{column}}", subsequent_indent=" " * column, break_on_hyphens=False)
        for name, text in pairs
    )


class Help(argparse.HelpFormatter):
    """Help in paragraphs, with tables and commands that can be copied as they stand."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent(paragraphs(text, width - len(indent)), indent)


class Arguments(argparse.ArgumentParser):
    """A parser that answers bad input with a `KVLensError`, and a misspelt option with the nearest one that it has."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"formatter_class": Help, **kwargs})
        self._given: list[str] = []
        self._answers_unknown = True

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """As argparse's, but what a subcommand does not know is answered here, where its options are known."""
        self._given = sys.argv[1:] if args is None else list(args)
        known, unknown = super().parse_known_args(args, namespace)
        if unknown and self._answers_unknown:
            self.error(_UNKNOWN + " ".join(unknown))
        return known, unknown

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's: options may stand between the others, also where one of these may be left out."""
        self._answers_unknown = False  # its first pass leaves those for the second
        try:
            return super().parse_intermixed_args(args, namespace)
        finally:
            self._answers_unknown = True

    def error(self, message: str) -> NoReturn:
        """Raise KVLensError."""
        words: list[str] = []
        if message.startswith(_UNKNOWN):
            words = message.removeprefix(_UNKNOWN).split()[:1]
        elif message.startswith(_MISSING):  # perhaps it is there, misspelt
            words = [word for word in self._given if word.startswith("--")]
        options = self._option_string_actions
        unknown = [name for name in (word.split("=")[0] for word in words) if name.startswith("-") and name not in options]
        hint = nearest(unknown[0], options) if unknown else ""
        if hint and message.startswith(_MISSING):
            message += f"; there is no {unknown[0]}"
        raise KVLensError(f"{message}{hint} (see {self.prog} --help)")


class Terminated(KeyboardInterrupt):
    """SIGTERM, which asks for the same as Ctrl-C does: stop where nothing is half done."""

    def __str__(self) -> str:
        return "terminated"


def how_it_ended(error: KeyboardInterrupt) -> tuple[str, int]:
    """("interrupted" or "terminated", the exit status that a shell expects)."""
    return ("terminated", TERMINATED) if isinstance(error, Terminated) else ("interrupted", INTERRUPTED)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Inside, SIGTERM raises `Terminated` in the main thread; in other threads nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: Any) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def visible(text: str) -> str:
    """``text`` on one line without anything that a terminal would obey: controls, direction marks, line ends become signs."""
    return "".join(UNREADABLE if unicodedata.category(char) in _HIDDEN and char not in _JOINERS else char for char in text)

"""Shared by all commands: parsing arguments, exit statuses after signals, and text that is safe to print."""

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from kvlens.errors import KVLensError, nearest

if TYPE_CHECKING:
    from rich.console import Console
    from tqdm.auto import tqdm

INTERRUPTED, TERMINATED = 130, 143
WIDTH = 80
"""Columns of what is printed with colors, bars and tables."""
UNREADABLE = "\N{REPLACEMENT CHARACTER}"
_UNKNOWN, _MISSING = "unrecognized arguments: ", "the following arguments are required: "
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories: control characters (including escape), format characters (direction marks), surrogates, line ends."""
_JOINERS = "\u200c\u200d"
"""Joiners, which some scripts and emoji need: they say whether their neighbors are drawn as one."""


def terminal_width() -> int:
    """Columns of the terminal, as argparse counts them, but at most 100, because longer lines are hard to read."""
    return max(40, min(100, shutil.get_terminal_size().columns - 2))


def wrap(text: str, width: int) -> str:
    """``text`` in lines of at most ``width``; paragraphs that start with two spaces (tables, commands) are not wrapped."""
    return "\n\n".join(
        part if part.startswith("  ") else textwrap.fill(part, width, break_on_hyphens=False, break_long_words=False)
        for part in text.split("\n\n")
    )


def in_two_columns(rows: Iterable[tuple[str, str]], width: int) -> str:
    """Names and their descriptions in two columns."""
    pairs = list(rows)
    column = max(len(name) for name, _ in pairs) + 2
    return "\n".join(
        textwrap.fill(text, width, initial_indent=f"{name:<{column}}", subsequent_indent=" " * column, break_on_hyphens=False)
        for name, text in pairs
    )


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Inside, a warning is one line on stderr, once, without the line of code that caused it."""
    told: set[str] = set()

    def show(message: Warning | str, *where: object, **more: object) -> None:
        if is_new(str(message), told):
            print(f"warning: {visible(' '.join(str(message).split()))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def is_new(message: str, told: set[str]) -> bool:
    """Whether no message that differs at most in its numbers was ``told``; it then is."""
    kind = re.sub(r"\d[\d.,]*", "0", message)
    is_first = kind not in told
    told.add(kind)
    return is_first


class Help(argparse.HelpFormatter):
    """Help with paragraphs, and with tables and commands that are not wrapped, so they can be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent(wrap(text, width - len(indent)), indent)


class Arguments(argparse.ArgumentParser):
    """A parser that raises a `KVLensError` for bad input, with the nearest option for a misspelled one."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"formatter_class": Help, **kwargs})
        self._given: list[str] = []
        self._answers_unknown = True

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """Parse as argparse does, but a subcommand reports unknown arguments itself, because it knows its own options."""
        self._given = sys.argv[1:] if args is None else list(args)
        known, unknown = super().parse_known_args(args, namespace)
        if unknown and self._answers_unknown:
            self.error(_UNKNOWN + " ".join(unknown))
        return known, unknown

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does: options may be mixed with positional arguments, even optional ones."""
        self._answers_unknown = False  # the first of argparse's two passes leaves unknown arguments to the second
        try:
            return super().parse_intermixed_args(args, namespace)
        finally:
            self._answers_unknown = True

    def error(self, message: str) -> NoReturn:
        """Raise KVLensError."""
        words: list[str] = []
        if message.startswith(_UNKNOWN):
            words = message.removeprefix(_UNKNOWN).split()[:1]
        elif message.startswith(_MISSING):  # it may be present but misspelled
            words = [word for word in self._given if word.startswith("--")]
        options = self._option_string_actions
        unknown = [name for name in (word.split("=")[0] for word in words) if name.startswith("-") and name not in options]
        hint = nearest(unknown[0], options) if unknown else ""
        if hint and message.startswith(_MISSING):
            message += f"; there is no {unknown[0]}"
        raise KVLensError(f"{message}{hint} (see {self.prog} --help)")


Commands: TypeAlias = "argparse._SubParsersAction[Arguments]"
"""What a command is added to."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which is handled like Ctrl-C: stop without leaving anything half done."""

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

    def stop(signum: int, frame: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_with_parent() -> None:
    """In a process of a pool: leave Ctrl-C to the parent, and end when it ends, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def visible(text: str) -> str:
    """``text`` on one line, with control characters, direction marks and line ends replaced, so that it is safe to print."""
    return "".join(UNREADABLE if unicodedata.category(char) in _HIDDEN and char not in _JOINERS else char for char in text)


def make_console(*, stderr: bool = False) -> "Console":
    """A console of at most 80 columns that colors no numbers and reads no markup or emoji in its text."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


BAR_AFTER, LINE_EVERY = 2.0, 30.0
"""Seconds after which a bar shows, and between two lines where there is no terminal."""
BAR = "{desc:<28} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


class Bar:
    """How far something is: called with what it does and the fraction that is done."""

    def __init__(self, bar: "tqdm[object]", *, lines: bool) -> None:
        self._bar, self._lines, self._began = bar, lines, time.monotonic()
        self._last = self._began

    def __call__(self, what: str, done: float) -> None:
        self._bar.set_description_str(visible(what), refresh=False)
        self._bar.update(done - self._bar.n)
        now = time.monotonic()
        if self._lines and now - self._last >= LINE_EVERY and done > 0:
            left, self._last = self._bar.format_interval((now - self._began) * (1 - done) / done), now
            print(f"{visible(what)}: {done:.0%}; about {left} left", file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """Print a line above the bar, which stays."""
        if not self._bar.disable:
            self._bar.write(textwrap.shorten(visible(line), WIDTH, placeholder="…"), file=sys.stderr)


@contextmanager
def progress_bar(what: str, *, after: float | int | None = None, shown: bool = True, lines: bool = True) -> Iterator[Bar]:
    """A bar with the time that is left, on a terminal or in a notebook, which vanishes when done; none in a worker process.

    It is light, so that it shows while torch is imported.

    Args:
        what: is done at first.
        after: seconds after which it shows; None for `BAR_AFTER`.
        shown: False for nothing at all.
        lines: where there is neither, print a line now and then, as for a script's log.
    """
    from tqdm.auto import tqdm

    in_notebook = any(base.__name__ == "tqdm_notebook" for base in tqdm.__mro__)
    hidden = not shown or multiprocessing.parent_process() is not None
    places = dict(leave=False, bar_format=BAR, delay=BAR_AFTER if after is None else after)
    width = None if in_notebook else min(WIDTH, shutil.get_terminal_size().columns - 1)
    disable = True if hidden else False if in_notebook else None  # None: without a terminal
    with tqdm(total=1.0, desc=what, disable=disable, ncols=width, **places) as bar:
        yield Bar(bar, lines=lines and not hidden and bool(bar.disable))

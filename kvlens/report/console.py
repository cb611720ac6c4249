"""The console that a report is printed on, and the progress bar; light, so that the bar shows while torch is imported."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvlens.files import FolderKind, Unfinished, work_on
from kvlens.terminal import visible

WIDTH = 80
LONG = 60.0
"""Seconds from which on an explanation announces how long it will take."""


def make_console(*, stderr: bool = False) -> Console:
    """A console of at most 80 columns that colors no numbers and reads no markup or emoji in its text."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


@contextlib.contextmanager
def unfinished(folder: str | Path | None, kind: FolderKind, *, overwrite: bool = False) -> Iterator[Unfinished | None]:
    """Inside, no other command works on the output folder; what is measured may be kept next to it, in ``FOLDER.unfinished``.

    That file is deleted when the block succeeds, if it was used. When the block fails, stderr names it if something was added
    to it. Without a folder, there is none.

    Raises:
        KVLensError: as :func:`kvlens.files.work_on`, or another kind of file has that name.
    """
    if folder is None:
        yield None
        return
    with work_on(folder, kind, overwrite=overwrite) as kept:
        kept.check()
        try:
            yield kept
        except BaseException:
            if kept.n_new:
                make_console(stderr=True).print(
                    f"What was measured is kept in {visible(kept.path.name)}: the same command resumes there."
                )
            raise
        kept.delete()


def announce(expected: Any, *, quick: bool) -> None:
    """Say on stderr how long an explanation will take, where that is more than `LONG`, and what ``--quick`` would take.

    Args:
        expected: an `Estimate` of :mod:`kvlens.analyses.attribution.cost`.
        quick: whether it will be quick.
    """
    tokens, seconds = (expected.quick_tokens, expected.quick_seconds) if quick else (expected.tokens, expected.seconds)
    if seconds < LONG:
        return
    said = f"Explaining the answer takes about {_duration(seconds)} ({tokens:,} tokens to read)"
    shorter = not quick and expected.quick_seconds < 0.8 * seconds
    said += f"; with --quick about {_duration(expected.quick_seconds)}." if shorter else "."
    make_console(stderr=True).print(said)


def _duration(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} hours"
    return f"{round(seconds / 60)} minutes" if seconds >= 90 else f"{round(seconds)} seconds"


@contextlib.contextmanager
def progress_bar(first: str) -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr that vanishes when done; nothing at all where stderr is no terminal.

    Yields:
        A function of a description and the fraction done; the bar pulses until it is first called.
    """
    console = make_console(stderr=True)
    columns = (
        TextColumn("{task.description:<28}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(first, total=None)  # pulses
        yield lambda text, done: bar.update(task, description=text, completed=done, total=1.0)

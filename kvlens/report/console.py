"""The console that a report is printed on, and the progress bar; light, so that the bar shows while torch is imported."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

WIDTH = 80


def make_console(*, stderr: bool = False) -> Console:
    """A console of at most 80 columns that colors no numbers and reads no markup or emoji in its text."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


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

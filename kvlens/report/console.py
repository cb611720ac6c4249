"""The console that a report is printed on, and the progress bar; light, so that the bar shows while torch is imported."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvlens.terminal import visible

WIDTH = 80


def make_console(*, stderr: bool = False) -> Console:
    """A console of at most 80 columns that colors no numbers and reads no markup or emoji in its text."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


class Bar:
    """A progress bar: called with a description and the fraction done, it shows them."""

    def __init__(self, bar: Progress, first: str) -> None:
        self._bar, self._task = bar, bar.add_task(first, total=None)  # pulses

    def __call__(self, text: str, done: float) -> None:
        self._bar.update(self._task, description=text, completed=done, total=1.0)

    def say(self, line: str) -> None:
        """Print a line above the bar, which stays."""
        if not self._bar.disable:
            self._bar.console.print(visible(line), overflow="ellipsis", no_wrap=True)


@contextlib.contextmanager
def progress_bar(first: str) -> Iterator[Bar]:
    """A bar on stderr that vanishes when done; nothing at all where stderr is no terminal. It pulses until it is called."""
    console = make_console(stderr=True)
    columns = (
        TextColumn("{task.description:<28}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield Bar(bar, first)

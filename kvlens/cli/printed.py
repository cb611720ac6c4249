"""An explanation in the terminal: 80 columns wide."""

import textwrap
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvlens.explanation import Explained, paragraphs
from kvlens.explanation.exchanges import POSITION_GROUPS
from kvlens.explanation.presentation import MEANINGS, answered, asked, kept_in_words, layers_named
from kvlens.explanation.sources import sources_in_words
from kvlens.explanation.view import smallest_ranges
from kvlens.terminal import WIDTH, make_console, visible

MOST_ROWS, BAR = 12, 10
"""The most units in the table, and the characters of the longest bar."""


def print_explanation(found: Explained) -> None:
    """Print it, 80 columns wide."""
    console = make_console()
    with console.capture() as shown:
        _show(console, found)
    print(shown.get(), end="")  # rich itself would end the process with status 1 where the reader, such as head, has left


def _show(console: Console, found: Explained) -> None:
    if found.question:
        console.print(_wrapped(asked(found.question)), end="\n\n")
    console.print(_wrapped(answered(found.marked, found.cut_after)), style="bold", end="\n\n")
    for line in sources_in_words(found):
        console.print(_wrapped(str(line), indent="    "))
    console.print()
    console.print(_wrapped(kept_in_words(found)), end="\n\n")
    for paragraph in paragraphs(found):
        console.print(_wrapped(" ".join(sentence.text for sentence in paragraph)), end="\n\n")
    console.print(_lost_by_unit(found))
    n_alone = int(found.units["alone"].sum())
    if n_alone < len(found.units):
        console.print(f"(the other {len(found.units) - n_alone} parts were not removed by themselves)")
    if n_alone > MOST_ROWS:
        console.print(f"(the {MOST_ROWS} largest of {n_alone})")
    if smallest := smallest_ranges(found):
        how = "layer by layer" if all("+" not in row.parts for row in smallest) else "by ranges of layers"
        console.print(f"\nnats that {visible(found.named)} loses, {how}", style="bold")
        console.print(_strip(smallest))
    positions = found.rows("positions", "each")
    if len(positions):
        console.print(f"\nnats that {visible(found.named)} loses when these are read without the cause", style="bold")
        for row in positions.itertuples():
            console.print(f"{POSITION_GROUPS[row.parts]:<42}{row.nats:6.2f}  {row.verdict}")
    if found.left_out:
        console.print(f"\nLeft out, as the budget had no room for it: {', '.join(found.left_out)}.")
    console.print("\nWhat the words mean", style="bold")
    for word, meaning in MEANINGS:
        console.print(_wrapped(f"{word}: {meaning}.", indent="  "))


def _wrapped(text: str, indent: str = "") -> str:
    """Lines of the terminal's width; a number and its percent sign stay together."""
    together = visible(text).replace(" %", "\N{NO-BREAK SPACE}%")
    return textwrap.fill(together, WIDTH, subsequent_indent=indent, break_on_hyphens=False).replace("\N{NO-BREAK SPACE}%", " %")


def _lost_by_unit(found: Explained) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = found.units[found.units["alone"]].nlargest(MOST_ROWS, "effect").sort_values("unit")
    room = WIDTH - BAR - 12 - max(map(len, shown["verdict"]), default=0)  # 12: the number, and a blank on each side of a column
    table.add_column(f"what {visible(found.named)} loses without", overflow="ellipsis", no_wrap=True, max_width=min(46, room))
    table.add_column("nats", justify="right")
    table.add_column("")
    table.add_column("verdict", no_wrap=True)
    top = max(1e-9, float(shown["effect"].max()))
    for row in shown.to_dict("records"):
        bar = "█" * round(BAR * max(0.0, row["effect"]) / top)
        name = f"{row['name']}: {' '.join(row['unit_text'].split())}"
        table.add_row(visible(name), f"{round(row['effect'], 2) + 0.0:.2f}", bar, row["verdict"])
    return table


def _strip(ranges: Sequence[Any]) -> str:
    """One line of blocks, one for each layer, with the ranges of layers that lose most named behind it."""
    nats = [row.nats for row in ranges]
    blocks, top = " ▁▂▃▄▅▆▇█", max(0.5, *nats)
    strip = "".join(blocks[round((len(blocks) - 1) * max(0.0, x) / top)] for x in nats)
    by_parts = {row.parts: row.nats for row in sorted(ranges, key=lambda row: -row.nats)}
    best = [f"{layers_named(parts)}: {each:.1f}" for parts, each in by_parts.items()][:3]
    return f"0 {strip} {len(nats) - 1}   {', '.join(best)}"

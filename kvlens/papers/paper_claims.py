"""The list of a paper's claims, from which its page and its CLAIMS.md get the same table.

    place | the paper's words
        by | verdict | what was found, or why it was not tested | rows

``by`` is the name of an experiment (``kvlens reproduce NAME``), with options if it was run with any, the test that holds a
theorem, or ``-`` for a claim that was not tested. ``rows`` are the beginnings of the claims that the experiment prints for this
result, separated by semicolons. Words without quotation marks are not the paper's: they say what a figure or an equation
claims, or what kvlens asks beyond the paper. No cell contains a vertical bar.
"""

from dataclasses import dataclass
from typing import NamedTuple

VERDICTS = ("holds", "does not hold", "inconclusive", "not tested")
COLUMNS = ("claim", "place", "the paper's words", "verdict", "here", "by")
UNTESTED = "-"


@dataclass(frozen=True)
class Result:
    """What was found about a claim.

    Attributes:
        by: the experiment and its options, the test, or `UNTESTED`.
        verdict: one of `VERDICTS`.
        here: what was measured, or why it was not tested.
        rows: the beginnings of the claims that the experiment prints for it.
    """

    by: str
    verdict: str
    here: str
    rows: tuple[str, ...]

    @property
    def experiment(self) -> str | None:
        """The name of the experiment; None if there is none."""
        return None if self.by == UNTESTED or self.by.startswith("tests/") else self.by.split()[0]

    @property
    def command(self) -> str:
        """Say how to repeat it, as Markdown."""
        if self.by == UNTESTED:
            return ""
        return f"`kvlens reproduce {self.by}`" if self.experiment else f"`pytest {self.by}`"


class PaperClaim(NamedTuple):
    """A claim of a paper.

    Attributes:
        place: where the paper makes it.
        words: as printed; without quotation marks, in our words.
        results: what was found, at least one.
    """

    place: str
    words: str
    results: tuple[Result, ...]


def read_claims(text: str) -> list[PaperClaim]:
    """The claims of a list in the form that this module describes."""
    claims: list[PaperClaim] = []
    for line in filter(str.strip, text.splitlines()):
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith(" "):
            by, verdict, here, *rows = cells
            result = Result(by, verdict, here, tuple(row.strip() for row in ";".join(rows).split(";") if row.strip()))
            claims[-1] = claims[-1]._replace(results=(*claims[-1].results, result))
        else:
            place, words = cells
            claims.append(PaperClaim(place, words, ()))
    return claims


def claims_table(claims: list[PaperClaim]) -> str:
    """A Markdown table of all claims, a row for each result."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for number, claim in enumerate(claims, 1):
        for result in claim.results:
            verdict = result.verdict if result.verdict in ("inconclusive", "not tested") else f"**{result.verdict}**"
            lines.append((str(number), claim.place, claim.words, verdict, result.here, result.command))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

"""The lists of the papers' claims, ``claims.txt`` of each, and the runs that verdicts and figures are made from, never typed.

    place | the paper's words
        RUN | form | claims; claims | what else there is to say
        tests/FILE::NAME | form | what the test shows
        - | why it was not tested

``RUN`` is the name of a stored run, a file in ``kvlens/papers/runs``; ``claims`` are the beginnings of the claims of its
comparisons that belong here. Each verdict among them becomes a row, with the figures that it follows from by the rules of
`kvlens.papers.harness.significance`. ``form`` is "printed" where what ran is as the paper prints it, or says what is ours, and
why. A test that holds a theorem passes, or the claim does not hold. Words without quotation marks are not the paper's: they say
what a figure or an equation claims, or what kvlens asks beyond the paper. No cell of the list contains a vertical bar.

    kvlens reproduce NAME --out FOLDER
    python -m kvlens.papers.paper_claims FOLDER ...

stores runs, named as their folders, and writes every ``CLAIMS.md`` anew. A stored run has its settings (the seeds among them),
the commit, the figures of every seed, and a checksum. ``rerun`` is false for runs that are older than the store: of these only
number, mean and interval are known, as they were published, and the t-test decides alone.
"""

import datetime
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvlens.errors import KVLensError
from kvlens.files import checksum_of_json, plain
from kvlens.papers.harness.significance import Comparison, Evidence

VERDICTS = ("holds", "does not hold", "inconclusive", "not tested")
COLUMNS = ("claim", "place", "the paper's words", "form", "verdict", "here", "by")
UNTESTED = "-"
PAPERS = ("iclca", "kvsa", "dual", "lecture")
FOLDER = Path(__file__).parent
MOST_KEPT = 64
"""Of more values than these a stored run has number, mean and interval; their t-test is the stricter one then."""


class Result(NamedTuple):
    """A line under a claim.

    Attributes:
        by: the name of a stored run, a test, or `UNTESTED`.
        form: "printed", or what is ours, and why; empty for what was not tested.
        claims: the beginnings of the claims of the run's comparisons.
        note: what else there is to say, what a test shows, or why it was not tested.
    """

    by: str
    form: str
    claims: tuple[str, ...]
    note: str

    @property
    def is_run(self) -> bool:
        """Whether it is made from a stored run."""
        return self.by != UNTESTED and not self.by.startswith("tests/")

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Verdict, figures and command; a row for each verdict."""
        if not self.is_run:
            yield ("holds", self.note, f"`pytest {self.by}`") if self.form else ("not tested", self.note, "")
            return
        run = stored_run(self.by)
        found = [one for one in run.comparisons if one.claim.startswith(self.claims)]
        if not found:
            raise KVLensError(f"{self.by}: no comparison of the stored run begins with one of {self.claims}")
        by_verdict = {verdict: [one for one in found if row_verdict(one) == verdict] for verdict in VERDICTS}
        shown = [(verdict, ones) for verdict, ones in by_verdict.items() if ones]
        beside = (
            by_verdict["not tested"] if len(shown) > 1 else []
        )  # numbers without a test stand beside the first that has one
        for place, (verdict, ones) in enumerate(shown[: len(shown) - bool(beside)]):
            told = "; ".join(map(figures, [*ones, *(beside if place == 0 else [])]))
            yield verdict, f"{told}. {self.note}".removesuffix(". "), run.source


class PaperClaim(NamedTuple):
    """A claim of a paper: where it is made; its words as printed, or without quotation marks in ours; what was found."""

    place: str
    words: str
    results: tuple[Result, ...]


def read_claims(package: str) -> list[PaperClaim]:
    """The claims of the list beside a paper's package, ``claims.txt``."""
    return claims_in((Path(package).parent / "claims.txt").read_text(encoding="utf-8"))


def claims_in(text: str) -> list[PaperClaim]:
    """The claims of a list in the form that this module describes."""
    claims: list[PaperClaim] = []
    for line in filter(str.strip, text.splitlines()):
        cells = [cell.strip() for cell in line.split("|")]
        if not line.startswith(" "):
            place, words = cells
            claims.append(PaperClaim(place, words, ()))
            continue
        by, form, *more = cells if cells[0] != UNTESTED else [UNTESTED, "", *cells[1:]]
        starts = more[0].split(";") if len(more) > 1 else []
        result = Result(by, form, tuple(start.strip() for start in starts), more[-1])
        claims[-1] = claims[-1]._replace(results=(*claims[-1].results, result))
    return claims


# --- stored runs ---


@dataclass(frozen=True)
class StoredRun:
    """A run of an experiment, as it is kept in the package; see the head of this module."""

    experiment: str
    command: str
    scale: str
    settings: Mapping[str, object]
    comparisons: list[Comparison]
    date: str
    commit: str | None
    rerun: bool
    seconds: float | None
    versions: Mapping[str, str]

    @property
    def source(self) -> str:
        """The last cell of its rows: the command, and when and with which code it ran."""
        return f"`{self.command}` ({self.date}, {f'commit {self.commit}' if self.rerun else 'as published then'})"


@cache
def stored_run(name: str) -> StoredRun:
    """The stored run of that name.

    Raises:
        KVLensError: there is none, or it was edited.
    """
    path = FOLDER / "runs" / f"{name}.json"
    if not path.is_file():
        raise KVLensError(f"no run is stored as {name!r}: kvlens reproduce ... --out {name}, then python -m {__name__} {name}")
    entry = json.loads(path.read_text(encoding="utf-8"))
    if entry.pop("checksum") != checksum_of_json(entry):
        raise KVLensError(f"{path}: the file was edited after it was written; repeat the run and store it again")
    return StoredRun(**{**entry, "comparisons": [Comparison.from_json(one) for one in entry["comparisons"]]})


def store(folder: Path) -> None:
    """Store the run in ``folder``, which ``kvlens reproduce`` wrote, under the folder's name."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    settings = summary["settings"]
    if isinstance(settings.get("model"), str):
        settings["model"] = Path(settings["model"]).name
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=FOLDER, capture_output=True, text=True, check=True)
    write_run(
        folder.name,
        experiment=summary["name"],
        command=summary["command"],
        scale=summary["scale"],
        settings=settings,
        comparisons=[Comparison.from_json(one) for one in summary["comparisons"]],
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=commit.stdout.strip(),
        rerun=True,
        seconds=summary["seconds"],
        versions=summary["versions"],
    )


def write_run(name: str, *, comparisons: list[Comparison], **facts: object) -> None:
    """Write a run, with a checksum."""
    entry = plain(facts | {"comparisons": [_kept(one) for one in comparisons]})
    entry["checksum"] = checksum_of_json(entry)
    path = FOLDER / "runs" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(entry, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _kept(one: Comparison) -> dict[str, object]:
    evidence = one.evidence
    if evidence is not None and evidence.rule == "values" and len(evidence.figures) > MOST_KEPT and one.sample is not None:
        short = (len(evidence.figures), one.sample.mean, one.sample.low or 0.0, one.sample.high or 0.0)
        evidence = Evidence("interval", short, evidence.bound, evidence.below)
    said = {"what": one.what, "claim": one.claim, "ours": one.ours, "paper": one.paper, "untrained": one.untrained}
    kept = evidence and vars(evidence) | {"figures": [float(f"{figure:.8g}") for figure in evidence.figures]}
    return said | {"evidence": kept and {key: kept[key] for key in ("rule", "figures", "bound", "below")}}


# --- tables ---


def row_verdict(one: Comparison) -> str:
    """The verdict, as one of `VERDICTS`."""
    return one.verdict if one.verdict in VERDICTS else "inconclusive"


def figures(one: Comparison) -> str:
    """What was measured, and what its verdict follows from."""
    ours = one.ours if isinstance(one.ours, str) else None if one.ours is None else f"{one.ours:.3g}"
    sample, evidence, told = one.sample, one.evidence, []
    if sample is not None and sample.low is not None:
        if ours is not None and "±" not in ours and ours != f"{sample.mean:.3g}":
            told.append(ours)
        mean = f"{sample.mean:{'.3g' if sample.bound else '+.3g'}}"
        told.append(f"{mean}, {sample.low:.3g} to {sample.high:.3g} ({sample.n} values)")
    elif ours is not None:
        told.append(ours)
    if evidence is not None and evidence.bound and evidence.rule != "number":
        told.append(f"tested against {evidence.bound:.3g}")
    if one.untrained is not None:
        told.append(f"not trained far enough: {one.untrained}")
    elif one.verdict == "inconclusive" and sample is not None and sample.detectable is not None:
        told.append(f"{sample.detectable:.2g} would have been found in 80 %")
    return f"{one.what}: {'; '.join(told)}" if told else one.what


def claims_table(claims: list[PaperClaim]) -> str:
    """A Markdown table of all claims: a row for each verdict of each result."""
    lines: list[tuple[str, ...]] = [COLUMNS, ("---",) * len(COLUMNS)]
    for number, claim in enumerate(claims, 1):
        for result in claim.results:
            for verdict, here, by in result.rows():
                told = verdict if verdict in ("inconclusive", "not tested") else f"**{verdict}**"
                lines.append((str(number), claim.place, claim.words, result.form, told, here.replace("|", r"\|"), by))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def page_of(paper: str) -> str:
    """What ``CLAIMS.md`` of a paper should contain."""
    table = claims_table(read_claims(str(FOLDER / paper / "__init__.py")))
    return f"# Every claim of {paper.upper()}\n\n[How they were tested](../RUNS.md).\n\n{table}"


def table_in(package: str) -> str:
    """The table of the ``CLAIMS.md`` beside a paper's package."""
    text = (Path(package).parent / "CLAIMS.md").read_text(encoding="utf-8")
    return text[text.index("| claim ") :]


if __name__ == "__main__":
    for given in sys.argv[1:]:
        store(Path(given))
    for paper in PAPERS:
        (FOLDER / paper / "CLAIMS.md").write_text(page_of(paper), encoding="utf-8")

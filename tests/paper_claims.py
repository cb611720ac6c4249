"""The claims of all papers' pages, and what an experiment prints that is on none of them."""

import importlib

PAPERS = ("iclca", "kvsa", "dual", "lecture")
CLAIMS = {paper: importlib.import_module(f"kvlens.papers.{paper}").CLAIMS for paper in PAPERS}
RESULTS = [(paper, claim, result) for paper, claims in CLAIMS.items() for claim in claims for result in claim.results]


def rows_of(experiment: str) -> list[str]:
    """What the list of claims says that an experiment prints."""
    return [row for _, _, result in RESULTS if result.experiment == experiment for row in result.rows]


def unlisted(experiment: str, printed: list[str]) -> list[str]:
    """The claims that an experiment prints and that no result of the papers' lists stands for."""
    return [claim for claim in printed if not any(claim.startswith(row) for row in rows_of(experiment))]

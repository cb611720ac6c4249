"""The papers' claims: every one has a result or a reason, every experiment its claims, and every row of CLAIMS.md its run.

No verdict is typed. A run's figures are stored with a checksum; verdicts are computed from them, and CLAIMS.md is what the
command makes of them. Runs of seconds are made again here, those of less than a minute among the slow tests.
"""

import importlib
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvlens import HookedKVTransformer, HookedKVTransformerConfig
from kvlens.cli import main
from kvlens.errors import KVLensError
from kvlens.papers import EXPERIMENTS, find_experiment, paper_claims
from kvlens.papers.harness.significance import Evidence
from kvlens.papers.paper_claims import PAPERS, UNTESTED, VERDICTS, claims_in, claims_table, page_of, stored_run

CLAIMS = {paper: importlib.import_module(f"kvlens.papers.{paper}").CLAIMS for paper in PAPERS}
RESULTS = [(paper, claim, result) for paper, claims in CLAIMS.items() for claim in claims for result in claim.results]
RUNS = {result.by: stored_run(result.by) for _, _, result in RESULTS if result.is_run}


def rows_of(experiment: str) -> list[str]:
    """What the list of claims says that an experiment prints."""
    return [start for _, _, result in RESULTS if result.is_run and RUNS[result.by].experiment == experiment
            for start in result.claims]  # fmt: skip


def unlisted(experiment: str, printed: list[str]) -> list[str]:
    """The claims that an experiment prints and that no result of the papers' lists stands for."""
    return [claim for claim in printed if not any(claim.startswith(row) for row in rows_of(experiment))]


ROOT = Path(__file__).resolve().parents[1]


def test_a_list_is_read_as_it_is_described():
    lines = '\nsec. 1 | "a b"\n    gradient-descent-small | printed | the layer; one step | so it is\n'
    lines += "    - | too large\ntab. 2 | c\n"
    first, second = claims_in(lines + "    tests/a.py::b | ours | it is shown\n")
    assert (first.place, first.words, second.words) == ("sec. 1", '"a b"', "c")
    assert [tuple(r) for r in (*first.results, *second.results)] == [
        ("gradient-descent-small", "printed", ("the layer", "one step"), "so it is"),
        ("-", "", (), "too large"),
        ("tests/a.py::b", "ours", (), "it is shown"),
    ]
    run, untested = claims_table([first]).splitlines()[2:]
    assert untested == '| 1 | sec. 1 | "a b" |  | not tested | too large |  |'
    assert run.startswith('| 1 | sec. 1 | "a b" | printed | **holds** | largest relative difference of the layer and')
    assert "so it is | `kvlens reproduce gradient-descent` (20" in run
    assert (
        claims_table([second]).splitlines()[2] == "| 1 | tab. 2 | c | ours | **holds** | it is shown | `pytest tests/a.py::b` |"
    )


def test_an_experiments_claim_that_is_on_no_list_is_noticed():
    assert unlisted("ngram", ["KV shift does not weaken it", "KV shift is green"]) == ["KV shift is green"]
    assert unlisted("hops", ["KV shift does not weaken it"]) == ["KV shift does not weaken it"]


@pytest.mark.parametrize("paper", PAPERS)
def test_every_claim_has_a_result_or_a_reason(paper):
    assert len(CLAIMS[paper]) >= 10
    for claim in CLAIMS[paper]:
        assert claim.place and claim.words and claim.results, claim
        for result in claim.results:
            assert result.is_run or len(result.note) > 5, claim
            assert bool(result.form) is (result.by != UNTESTED) and bool(result.claims) is result.is_run, claim
            assert all(verdict in VERDICTS for verdict, _, _ in result.rows()), claim


def test_every_experiment_is_on_a_list_and_every_stored_run_in_use():
    assert {run.experiment for run in RUNS.values()} == set(EXPERIMENTS)
    assert {path.stem for path in (paper_claims.FOLDER / "runs").iterdir()} == set(RUNS)


def test_every_test_that_holds_a_claim_exists():
    named = {result.by for _, _, result in RESULTS if result.by.startswith("tests/")}
    assert named
    for name in named:
        file, _, function = name.partition("::")
        assert re.search(rf"^def {function}\(" if function else "^def test_", (ROOT / file).read_text(), re.MULTILINE), name


@pytest.mark.parametrize("paper", PAPERS)
def test_claims_md_is_what_the_stored_runs_make_and_the_papers_page_has_it(paper):
    page = (paper_claims.FOLDER / paper / "CLAIMS.md").read_text()
    assert page == page_of(paper), "write it anew: python -m kvlens.papers.paper_claims"
    assert page[page.index("| claim ") :] in importlib.import_module(f"kvlens.papers.{paper}").__doc__


def test_the_results_page_has_the_totals_of_the_lists():
    counts = Counter(verdict for _, _, result in RESULTS for verdict, *_ in result.rows())
    said = f"{counts['holds']} hold, {counts['does not hold']} do not, {counts['inconclusive']} inconclusive"
    assert f"| {said} |" in (ROOT / "docs/results.md").read_text(encoding="utf-8")


def test_notes_have_no_figures_of_their_own():
    """What was measured is in the stored run: a note or a form is about how, and a number in it is one of the setup."""
    for _, claim, result in RESULTS:
        typed = result.form + (result.note if result.is_run else "")
        allowed = r"1e-11|0\.14 million|1\.[25] (million|billion)|app\. \S+|sec\. [\d.]+|0\.005|0\.05\b|two-layer|eq\. \d+"
        assert not re.search(r"\d\.\d|\d %", re.sub(allowed, "", typed)), (claim.place, typed)


@pytest.fixture
def copied_runs(tmp_path, monkeypatch):
    """The stored runs in a folder that a test may spoil."""
    shutil.copytree(paper_claims.FOLDER, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(paper_claims, "FOLDER", tmp_path)
    stored_run.cache_clear()
    yield tmp_path / "runs"
    stored_run.cache_clear()


def test_an_edited_run_is_refused(copied_runs):
    path = copied_runs / "trainable-bias-small.json"
    path.write_text(path.read_text().replace("-0.015", "0.0005"))
    with pytest.raises(KVLensError, match="edited after it was written"):
        stored_run("trainable-bias-small")


def test_invented_figures_change_the_row_and_an_invented_verdict_has_no_place(copied_runs):
    """An "inconclusive" turns into "holds" only with other figures, and CLAIMS.md then is another."""
    run, page = stored_run("trainable-bias-small"), (Path(paper_claims.__file__).parent / "iclca" / "CLAIMS.md").read_text()
    assert [one.verdict for one in run.comparisons] == ["inconclusive"] * 2 and page_of("iclca") == page
    invented = replace(run.comparisons[0], evidence=Evidence("interval", (6, 0.02, 0.01, 0.03)))
    facts = {name: value for name, value in vars(run).items() if name != "comparisons"}
    paper_claims.write_run("trainable-bias-small", comparisons=[invented, *run.comparisons[1:]], **facts)
    stored_run.cache_clear()
    assert [one.verdict for one in stored_run("trainable-bias-small").comparisons] == ["holds", "inconclusive"]
    assert page_of("iclca") != page
    entry = json.loads((copied_runs / "trainable-bias-small.json").read_text())
    assert not {"verdict", "holds"} & set(entry["comparisons"][0])  # there is nowhere to write one


WITHOUT_EFFECT = {
    "values": lambda figures, bound: tuple(bound + np.resize([1.0, -1.0], len(figures)) * np.std(figures)),
    "interval": lambda figures, bound: (figures[0], bound, *(bound + x - figures[1] for x in figures[2:])),
    "share": lambda figures, bound: (round(figures[1] * bound), figures[1]),
    "margin": lambda figures, bound: (bound, max(figures[1], 1e-12)),
    "chance": lambda figures, bound: (bound, 1.0),
}
"""What each rule's figures are where there is nothing to find: variant and baseline alike, labels shuffled, no shift."""


def test_ten_verdicts_at_random_do_not_survive_where_there_is_nothing_to_find():
    decided = [one for run in RUNS.values() for one in run.comparisons
               if one.holds is not None and one.evidence.rule in WITHOUT_EFFECT]  # fmt: skip
    for number in np.random.default_rng(0).choice(len(decided), 10, replace=False):
        evidence = decided[number].evidence
        planted = replace(evidence, figures=WITHOUT_EFFECT[evidence.rule](evidence.figures, evidence.bound))
        assert planted.holds is None, decided[number].what


def seconds(run) -> float:
    return run.seconds if run.rerun else np.inf


AGAIN = [
    pytest.param(name, marks=[] if seconds(run) < 1 else [pytest.mark.slow])
    for name, run in RUNS.items()
    if seconds(run) < 60 and not {"model", "steps", "training"} & set(run.settings)
]
"""Those that train nothing, and need no model: of these a command that finds kept runs tells no seconds."""


@pytest.mark.parametrize("name", AGAIN)
def test_a_stored_run_can_be_made_again(name):
    """With its settings: the same claims and verdicts; means of several values inside the stored intervals."""
    run = RUNS[name]
    found = find_experiment(run.experiment).run(run.settings, lambda text: None).comparisons
    assert [(one.claim, one.verdict) for one in found] == [(one.claim, one.verdict) for one in run.comparisons]
    for again, stored in zip(found, run.comparisons, strict=True):
        if stored.sample is not None and stored.sample.n > 1:
            slack = 1e-6 * abs(stored.sample.mean)
            assert stored.sample.low - slack <= again.sample.mean <= stored.sample.high + slack, again.what


def test_a_run_is_stored_with_its_command_and_figures(copied_runs, tmp_path, monkeypatch):
    out = tmp_path / "gradient-descent-few"
    assert main(["reproduce", "gradient-descent", "--scale", "tiny", "--out", str(out), "--set", "n=5"]) == 0
    monkeypatch.setattr(paper_claims.subprocess, "run", lambda *given, **how: type("Ended", (), {"stdout": "0123abcd\n"}))
    paper_claims.store(out)
    run, summary = stored_run("gradient-descent-few"), json.loads((out / "summary.json").read_text())
    assert run.command == "kvlens reproduce gradient-descent --scale tiny --set n=5"
    assert (run.commit, run.rerun, run.source.endswith(", commit 0123abcd)")) == ("0123abcd", True, True)
    assert [one.verdict for one in run.comparisons] == [one["verdict"] for one in summary["comparisons"]]
    with pytest.raises(KVLensError, match="no run is stored as 'x'"):
        stored_run("x")


def test_the_training_settings_as_printed_can_be_set(tmp_path, capsys):
    """KVSA sec. 4.1 and table 6, with the words of the page."""
    (given,) = re.findall(r"``--set '(training=.*?)'``", importlib.import_module("kvlens.papers.kvsa").__doc__, re.DOTALL)
    command = ["reproduce", "learning-rate", "--scale", "tiny", "--runs", f"{tmp_path}/runs", "--out", f"{tmp_path}/out"]
    assert main([*command, "--set", given.replace("\n", " ")]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    training = summary["settings"]["training"]
    assert training["schedule"] == "constant" and training["betas"] == [0.9, 0.95] and training["weight_decay"] == 0.1
    assert training["steps"] == 2 and "clipped at norm inf " in summary["differences"][1]


def test_the_shift_adds_four_numbers_for_each_key_value_head():
    """KVSA sec. 2.2."""
    size = dict(n_layers=3, d_model=24, n_heads=6, d_head=4, n_key_value_heads=2, n_ctx=8, d_vocab=7, act_fn="gelu")
    plain, shifted = (
        sum(p.numel() for p in HookedKVTransformer(HookedKVTransformerConfig(**size, kv_shift=shift)).parameters())
        for shift in (None, True)
    )
    assert shifted - plain == 3 * 4 * 2

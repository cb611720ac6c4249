"""The papers' claims: every one has a result or a reason, every experiment its claims, and CLAIMS.md the same tables."""

import importlib
import json
import re
from pathlib import Path

import pytest

from kvlens import HookedKVTransformer, HookedKVTransformerConfig
from kvlens.cli import main
from kvlens.papers import EXPERIMENTS
from kvlens.papers.paper_claims import UNTESTED, VERDICTS, claims_table, read_claims

PAPERS = ("iclca", "kvsa", "dual", "lecture")
CLAIMS = {paper: importlib.import_module(f"kvlens.papers.{paper}").CLAIMS for paper in PAPERS}
RESULTS = [(paper, claim, result) for paper, claims in CLAIMS.items() for claim in claims for result in claim.results]


def rows_of(experiment: str) -> list[str]:
    """What the list of claims says that an experiment prints."""
    return [row for _, _, result in RESULTS if result.experiment == experiment for row in result.rows]


def unlisted(experiment: str, printed: list[str]) -> list[str]:
    """The claims that an experiment prints and that no result of the papers' lists stands for."""
    return [claim for claim in printed if not any(claim.startswith(row) for row in rows_of(experiment))]


ROOT = Path(__file__).resolve().parents[1]


def test_a_list_is_read_as_it_is_described():
    result, reason = "    ngram --x | holds | 1 of 2 | it is; so is", "    - | not tested | too large |"
    first, second = read_claims(f'\nsec. 1 | "a b"\n{result}\n{reason}\ntab. 2 | c\n')
    assert (first.place, first.words, second.words, second.results) == ("sec. 1", '"a b"', "c", ())
    assert [(r.experiment, r.command, r.rows) for r in first.results] == [
        ("ngram", "`kvlens reproduce ngram --x`", ("it is", "so is")),
        (None, "", ()),
    ]
    assert claims_table([first]).splitlines()[2:] == [
        '| 1 | sec. 1 | "a b" | **holds** | 1 of 2 | `kvlens reproduce ngram --x` |',
        '| 1 | sec. 1 | "a b" | not tested | too large |  |',
    ]


def test_an_experiments_claim_that_is_on_no_list_is_noticed():
    assert unlisted("ngram", ["KV shift does not weaken it", "KV shift is green"]) == ["KV shift is green"]
    assert unlisted("hops", ["KV shift does not weaken it"]) == ["KV shift does not weaken it"]


@pytest.mark.parametrize("paper", PAPERS)
def test_every_claim_has_a_result_or_a_reason(paper):
    assert len(CLAIMS[paper]) >= 10
    for claim in CLAIMS[paper]:
        assert claim.place and claim.words and claim.results, claim
        for result in claim.results:
            assert result.verdict in VERDICTS and len(result.here) > 5, claim
            assert result.by != UNTESTED or result.verdict == "not tested", claim
            assert bool(result.rows) is (result.experiment is not None), claim
            assert result.experiment is None or result.experiment in EXPERIMENTS, claim


def test_every_experiment_is_on_a_list():
    assert {result.experiment for _, _, result in RESULTS} - {None} == set(EXPERIMENTS)


def test_every_test_that_holds_a_claim_exists():
    named = {result.by for _, _, result in RESULTS if result.by.startswith("tests/")}
    assert named
    for name in named:
        file, _, function = name.partition("::")
        assert re.search(rf"^def {function}\(" if function else "^def test_", (ROOT / file).read_text(), re.MULTILINE), name


@pytest.mark.parametrize("paper", PAPERS)
def test_results_and_the_papers_page_have_its_table(paper):
    table = claims_table(CLAIMS[paper])
    assert table in importlib.import_module(f"kvlens.papers.{paper}").__doc__
    page = f"kvlens/papers/{paper}/CLAIMS.md"
    assert table in (ROOT / page).read_text(), f"{page} lacks this table:\n{table}"


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

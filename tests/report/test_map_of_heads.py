"""The head that matters is darkest in the map, first in the table, and the one that is shown; parameters are counted once."""

import re
from html import unescape
from types import SimpleNamespace

import pandas as pd
import pytest
from kvlens.analyses.attribution.verdicts import STATEMENTS
from tiny_hf import tiny_hf_model

from kvlens import HookedKVTransformer
from kvlens.report import build_report
from kvlens.report.example import example_for
from kvlens.report.page import build_page
from kvlens.report.ranking import ABLATION, ON_ANSWER, ranked_heads
from kvlens.report.summary import n_parameters


@pytest.fixture(scope="module")
def report():
    model = HookedKVTransformer.from_zoo("facts-linear")
    return build_report(model, *example_for("facts-linear"), model_name="facts-linear", new_tokens=1)


@pytest.fixture(scope="module")
def page(report):
    return unescape(build_page(report).to_html())


def cells(page):
    """The map's first table, in which the page chooses the darkest cell: color by head."""
    first = re.search(r'<figcaption>map of heads.*?<table class="heat[^>]*data-column="([^"]*)".*?</table>', page, re.DOTALL)
    found = re.findall(r'data-layer="(\d+)" data-head="(\d+)"[^>]*?class="(\w+)[^"]*"(?: style="--x:([\d.]+)%")?', first[0])
    return first[1], {(int(layer), int(head)): float(x or 0) for layer, head, kind, x in found if kind == "positive"}


def lost_by_head(found):
    """The most that the answer lost in any run that exchanged a head, or a breaking set with it."""
    lost = {
        (row.layer, row.head): found.p_answer[0] - row.p_exchanged for row in found.heads.query("part == 'head'").itertuples()
    }
    for row in found.statements.query("about == 'heads' and role == 'breaking'").itertuples():
        for layer, head in (code.split(".") for code in row.parts.split("+")):
            if head.isdigit():
                place = int(layer), int(head)
                lost[place] = max(lost[place], row.p_before - row.p_after)
    return lost


def test_the_map_is_darkest_where_most_of_the_answer_is_lost(report, page):
    column, colors = cells(page)
    lost = lost_by_head(report.explained)
    assert column == ON_ANSWER["p_lost"] and f'data-column="{ON_ANSWER["p_exchanged"]}"' not in page
    matters = max(lost, key=lost.get)
    assert max(colors, key=colors.get) == matters and colors[matters] == 100
    without_effect = [place for place, p in lost.items() if p < 0.01]
    assert len(without_effect) > 4 and max(colors.get(place, 0) for place in without_effect) < 5


def test_the_ranking_falls_as_its_title_says(report, page):
    ranked, by = ranked_heads(report)
    lost = lost_by_head(report.explained)
    assert by == ON_ANSWER["p_lost"]
    assert ranked[by].tolist() == pytest.approx([lost[row.layer, row.head] for row in ranked.itertuples()])
    kinds = ranked[ON_ANSWER["sets"]].str[:1].map({"b": 0, "k": 1}).fillna(2)
    assert kinds.is_monotonic_increasing
    assert all(ranked.loc[kinds == kind, by].is_monotonic_decreasing for kind in kinds.unique())
    assert f"the others; each in descending order of: {by}" in page
    layer, head = max(lost, key=lost.get)
    assert f"<tbody><tr><td>L{layer}H{head}</td>" in page


@pytest.mark.parametrize("breaking", [True, False])
def test_heads_are_ranked_by_the_text_where_none_of_them_loses_the_answer(breaking):
    """As where the shift state loses it: what single heads lose is then next to nothing, and no reason for a color."""
    heads = pd.DataFrame({"layer": 0, "head": range(4), "part": "head", "code": ["0.0", "0.1", "0.2", "0.3"], "keeping": False})
    heads = heads.assign(p_exchanged=[0.9, 0.8998, 0.2 if breaking else 0.8999, 0.9], p_alone=0.1)
    heads["breaking"] = [False, False, breaking, False]
    nothing = pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in STATEMENTS.dtypes.items()})
    found = SimpleNamespace(heads=heads, p_answer=(0.9, 0.1, 0.1), statements=nothing, cause=(3,))
    measures = pd.DataFrame({"layer": 0, "head": range(4), "ablation_kl": [0.1, 0.2, 0.3, 0.7]})
    ranked, by = ranked_heads(SimpleNamespace(tables={"bias_by_head": measures}, explained=found))
    assert by == (ON_ANSWER["p_lost"] if breaking else ABLATION)
    assert ranked["head"].tolist() == ([2, 1, 0, 3] if breaking else [3, 2, 1, 0])
    assert ranked.loc[0, by] == ranked[by].max()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_tied_unembedding_counts_once(kind):
    tied, own = (tiny_hf_model(kind, tie_word_embeddings=tied) for tied in (True, False))
    counts = [n_parameters(HookedKVTransformer.from_pretrained(kind, hf_model=x, tokenizer=None)) for x in (tied, own)]
    assert counts[1] - counts[0] == own.num_parameters() - tied.num_parameters() == own.get_input_embeddings().weight.numel()

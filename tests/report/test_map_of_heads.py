"""The head that matters is darkest in the map, first in the table, and the one that is shown; parameters are counted once."""

import re
from html import unescape

import pytest
from tiny_hf import tiny_hf_model

from kvlens import HookedKVTransformer
from kvlens.report import build_report
from kvlens.report.build import ABLATION, ranked_heads
from kvlens.report.inputs import example_for
from kvlens.report.page import build_page
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


def test_the_map_is_darkest_where_the_text_loses_most(report, page):
    column, colors = cells(page)
    heads = report.tables["bias_by_head"]
    strongest = heads.loc[heads["ablation_kl"].idxmax()]
    matters = int(strongest["layer"]), int(strongest["head"])
    assert column == ABLATION
    assert max(colors, key=colors.get) == matters and colors[matters] == 100


def test_the_table_falls_as_its_title_says(report, page):
    ranked = ranked_heads(report)
    assert ranked[ABLATION].is_monotonic_decreasing
    assert f"heads, the largest first: {ABLATION}" in page
    assert f"<tbody><tr><td>L{int(ranked.iloc[0]['layer'])}H{int(ranked.iloc[0]['head'])}</td>" in page


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_tied_unembedding_counts_once(kind):
    tied, own = (tiny_hf_model(kind, tie_word_embeddings=tied) for tied in (True, False))
    counts = [n_parameters(HookedKVTransformer.from_pretrained(kind, hf_model=x, tokenizer=None)) for x in (tied, own)]
    assert counts[1] - counts[0] == own.num_parameters() - tied.num_parameters() == own.get_input_embeddings().weight.numel()

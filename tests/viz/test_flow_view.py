"""The drawn flow: its numbers are the table's, and every combination of switches was measured."""

import html
import json
import re

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from headless_chromium import CHROMIUM, WITHOUT, visible_text, visit
from kvlens.analyses.attribution.explain import explain
from kvlens.analyses.attribution.flow import answer_flow, parts_drawn
from matplotlib.patches import PathPatch

from kvlens import HookedKVTransformer, KVLensError
from kvlens.report.example import example_for
from kvlens.report.opening import opening
from kvlens.viz import Page, flow_view
from kvlens.viz._text import number, percent


@pytest.fixture(scope="module")
def found():
    return explain(HookedKVTransformer.from_zoo("facts-linear"), *example_for("facts-linear"))


@pytest.fixture(scope="module")
def flow(found):
    return answer_flow(HookedKVTransformer.from_zoo("facts-linear"), *example_for("facts-linear"), found)


@pytest.fixture(scope="module")
def page(found, flow) -> str:
    return Page("flow").add(opening(found, "sentence", "?")).add(flow_view(flow, found)).to_html()


def said(flow, **state) -> tuple[str, str]:
    """What the model says in one row, as the page writes it."""
    row = flow[(flow[[*state]] == [*state.values()]).all(axis=1)]
    assert len(row) == 1
    return percent(row["p_answer"].iloc[0]), percent(row["p_rival"].iloc[0])


def test_the_page_has_every_row_of_the_table(flow, page, found):
    start = page.index('data-kvlens="flow"')
    piece = page[start : page.index("</figure>", start)]
    data = json.loads(re.search('<script type="application/json">(.*?)</script>', piece)[1])
    assert len(data["states"]) == len(flow)
    for row in flow.itertuples():
        numbers = data["states"][f"{row.heads}|{row.positions}|{int(row.inside)}|{int(row.others)}"]
        # the page has three digits or more
        assert numbers[:3] == pytest.approx([row.effect, row.p_answer, row.p_rival], rel=1e-3, abs=1e-12)
        assert numbers[3:5] == [row.verdict, *([] if pd.isna(row.says) else [row.says])]
    assert data["cause"] == "sentence 6: At night Kaya feeds a donkey." and data["states"]["||0|1"][0] > 5
    assert ([*data["heads"]], [*data["positions"]]) == parts_drawn(found)
    assert len(piece) < 40_000


def test_without_scripts_the_numbers_are_a_table(flow, page):
    table = page[page.index('<div class="numbers">') : page.index("</table></div>", page.index('<div class="numbers">'))]
    assert table.count("<tr>") == 1 + len(flow)
    assert "<td>L0H1 and L0H2</td>" in table
    answer = said(flow, heads="0.1+0.2", positions="", inside=False, others=False)[0]
    assert answer.replace(" ", "\u00a0") in table


def test_a_table_without_its_columns_is_refused(flow, found):
    with pytest.raises(KVLensError, match="'inside'"):
        flow_view(flow.drop(columns="inside"), found)


def test_the_static_picture_shows_the_tables_numbers(flow, found, tmp_path):
    figure, ax = plt.subplots()
    assert flow_view(flow, found, ax=ax) is ax
    words = "\n".join(text.get_text() for text in ax.texts)
    rows = flow[(flow["positions"] == "") & flow["others"]].set_index("heads")
    assert f"L0H1\n{number(rows.loc['', 'effect'] - rows.loc['0.1', 'effect'])}" in words  # kept by it alone
    whole = flow.iloc[0]
    assert f"donkey {percent(whole['p_answer'])}\nparrot {percent(whole['p_rival'])}" in words
    assert len([patch for patch in ax.patches if isinstance(patch, PathPatch)]) > 5
    plt.close(figure)
    flow_view(flow, found).save_svg(tmp_path / "flow.svg")
    assert "<svg" in (tmp_path / "flow.svg").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)
def test_switches_show_what_was_measured_and_a_reload_restores_them(flow, page, tmp_path):
    steps = """
        const figure = document.querySelector('[data-kvlens="flow"]'), seen = [];
        const flip = (id) => {
          const part = figure.querySelector(`[data-id="switch ${id}"]`);
          part.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
          seen.push(figure.querySelector(".said").textContent);
        };
        seen.push(figure.querySelectorAll(".edge").length);
        flip("h0.1");
        flip("h0.2");
        flip("p38");
        flip("u");
        flip("u");
        flip("p38");
        figure.querySelector('[data-id="h0.2"]').dispatchEvent(new MouseEvent("click", { bubbles: true }));
        seen.push(location.hash);
        document.body.dataset.seen = JSON.stringify(seen);
    """
    seen = visit(page, tmp_path, script=steps)
    assert seen.requests == []
    found = json.loads(html.unescape(re.search('data-seen="([^"]*)"', seen.dom)[1]))
    many, one, both, three, all_off, again_three, again, address = found
    assert many > 5 and again == both and again_three == three and "change nothing" in all_off
    states = (("0.1", "", False), ("0.1+0.2", "", False), ("0.1+0.2", "38", False), ("", "", True))
    for text, (heads, positions, others) in zip((one, both, three, all_off), states, strict=True):
        answer, rival = said(flow, heads=heads, positions=positions, inside=False, others=others)
        assert f"“donkey” {answer}" in text.replace("\u00a0", " ")
        assert f"“parrot” {rival}" in text.replace("\u00a0", " ") or f"“parrot” ({rival})" in text.replace("\u00a0", " ")
    assert address == "#off=h0.1%2Ch0.2&head=0.2&show=head"
    restored = visit(page, tmp_path, fragment=address[1:]).dom
    assert both in visible_text(restored)
    assert re.findall(r'<g class="node pinned( off)?"[^>]*data-id="([^"]*)"', restored) == [("", "u"), (" off", "h0.2")]

"""The drawn flow: its numbers are the table's; switches say what was measured, and of other combinations that they were not."""

import html
import json
import re

import matplotlib.pyplot as plt
import pytest
from headless_chromium import CHROMIUM, WITHOUT, visible_text, visit, with_script
from kvlens.analyses.attribution.explain import explain
from kvlens.analyses.attribution.flow import answer_flow
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
    return Page("flow").add(opening(found, "sentence", "?")).add(flow_view(flow, found, redundant=True)).to_html()


def said(flow, **state) -> tuple[str, str]:
    """What the model says in one row, as the page writes it."""
    row = flow[(flow[[*state]] == [*state.values()]).all(axis=1)]
    assert len(row) == 1
    return percent(row["p_answer"].iloc[0]), percent(row["p_rival"].iloc[0])


def test_the_page_has_every_row_of_the_table(flow, page):
    start = page.index('data-kvlens="flow"')
    piece = page[start : page.index("</figure>", start)]
    data = json.loads(re.search('<script type="application/json">(.*?)</script>', piece)[1])
    assert len(data["states"]) == len(flow)
    for row in flow.itertuples():
        numbers = data["states"][f"{row.removed}|{row.unit}|{row.position}|{row.heads}|{int(row.others)}"]
        assert numbers == pytest.approx([row.effect, row.p_answer, row.p_rival], rel=1e-3, abs=1e-12)
    whole = flow.set_index("removed")["effect"]["5"]
    assert whole > 5 and data["first"] == 5 and data["heads"] == [f"{layer}.{head}" for layer in range(2) for head in range(4)]
    assert len(piece) < 40_000


def test_without_scripts_the_numbers_are_a_table(flow, page):
    table = page[page.index('<div class="numbers">') : page.index("</table></div>", page.index('<div class="numbers">'))]
    assert table.count("<tr>") == 1 + len(flow) - 8 - 28 - 2  # each part's two rows in one; two of eight heads are not drawn
    assert "<td>L0H1 and L0H2</td>" in table and said(flow, heads="0.1+0.2")[0].replace(" ", "\u00a0") in table


def test_a_table_without_its_columns_is_refused(flow, found):
    with pytest.raises(KVLensError, match="'removed'"):
        flow_view(flow.drop(columns="removed"), found)


def test_the_static_picture_shows_the_tables_numbers(flow, found, tmp_path):
    figure, ax = plt.subplots()
    assert flow_view(flow, found, ax=ax) is ax
    words = "\n".join(text.get_text() for text in ax.texts)
    rows = flow[(flow["unit"] == 5) & (flow["removed"] == "") & (flow["position"] == "") & ~flow["others"]].set_index("heads")
    assert f"L0H2\n{number(rows.loc['0.2', 'effect'])}" in words
    whole = flow[(flow["unit"] == -1) & (flow["removed"] == "")].iloc[0]
    assert f"donkey {percent(whole['p_answer'])}\nparrot {percent(whole['p_rival'])}" in words
    assert len([patch for patch in ax.patches if isinstance(patch, PathPatch)]) > 5
    plt.close(figure)
    flow_view(flow, found, redundant=True).save_svg(tmp_path / "flow.svg")
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
        document.querySelector('[data-unit="1"]').click();
        seen.push(location.hash, figure.querySelectorAll(".edge").length);
        document.querySelector('[data-unit="5"]').click();
        seen.push(location.hash, figure.querySelectorAll(".edge").length);
        flip("h0.1");
        flip("h0.2");
        flip("p38");
        flip("p38");
        figure.querySelector('[data-id="h0.2"]').dispatchEvent(new MouseEvent("click", { bubbles: true }));
        seen.push(location.hash);
        document.body.dataset.seen = JSON.stringify(seen);
    """
    (tmp_path / "page.html").write_text(with_script(page, steps), encoding="utf-8")
    seen = visit(tmp_path / "page.html", tmp_path)
    assert seen.requests == []
    found = json.loads(html.unescape(re.search('data-seen="([^"]*)"', seen.dom)[1]))
    first, few, second, many, one, both, three, again, address = found
    assert (first, few, second) == ("#unit=1&show=unit", 1, "#unit=5&show=unit") and many > 5
    same = [text.replace("\u00a0", " ") for text in (one, both)]
    for text, heads in zip(same, ("0.1", "0.1+0.2"), strict=True):
        answer, rival = said(flow, heads=heads, unit=5, position="", others=False)
        assert f"“donkey” with {answer}" in text and f"“parrot” with {rival}" in text
    assert "not computed" in three and again == both
    assert address == "#unit=5&show=head&off=h0.1%2Ch0.2&head=0.2"
    (tmp_path / "again.html").write_text(page, encoding="utf-8")
    restored = visit(tmp_path / "again.html", tmp_path, address[1:]).dom
    assert both in visible_text(restored)
    assert re.findall(r'<g class="node pinned( off)?"[^>]*data-id="([^"]*)"', restored) == [("", "u5"), (" off", "h0.2")]

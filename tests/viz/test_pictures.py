"""What holds for every picture: it is saved, shares a page with others, and draws into axes that the caller has made."""

import base64
import gzip
import hashlib
import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from pictures import PATTERN, PICTURES, SEVERAL, heads

from kvlens import viz
from kvlens.viz import Page, Piece, attention_view, error_table, head_heatmap
from kvlens.viz.page import SCRIPTS, circuitsvis_bundle

NOT_STATIC = {"linked_view", "generated_text", "error_table", "Page", "Piece"}

# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_save_as_png_svg_and_html(name, tmp_path):
    piece = PICTURES[name]()
    assert isinstance(piece, Piece)
    piece.save_png(tmp_path / "a.png", dpi=50)
    piece.save_svg(tmp_path / "a.svg")
    piece.save_svg(tmp_path / "b.svg")
    piece.save_html(tmp_path / "a.html")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    html = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert html.startswith("<!DOCTYPE html>") and html.count("<script>") == len(SCRIPTS)
    assert not re.search(r'(src|href)="(?!data:)', html)


def test_a_piece_has_a_short_text_form():
    assert repr(Piece("heads", "x" * 12_345)) == "<Piece 'heads': 12 kB of HTML; save_html>"
    assert "save_png" in repr(head_heatmap(torch.ones(2, 2))) and len(repr(head_heatmap(torch.ones(9, 9)))) < 100


# --- axes of the caller ----------------------------------------------------------------------------------------------


@pytest.fixture
def grid():
    figure, axes = plt.subplots(1, 3)
    yield axes
    plt.close(figure)


def draw_into(name, axes):
    return PICTURES[name](**{"axes" if name in SEVERAL else "ax": axes})


def test_every_picture_is_tested():
    assert {*PICTURES} | NOT_STATIC == set(viz.__all__)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_into_given_axes_and_no_others(name, grid):
    given, expected = (grid, [True, True, False]) if name in SEVERAL else (grid[1], [False, True, False])
    assert draw_into(name, given) is given
    assert [len([*ax.images, *ax.patches, *ax.lines, *ax.texts]) > 0 for ax in grid] == expected


def test_the_map_in_given_axes_holds_the_numbers(grid):
    viz.head_heatmap(heads(), ax=grid[0])
    np.testing.assert_array_equal(grid[0].images[0].get_array().filled(np.nan), [[1.0, 2.0], [np.nan, 4.0]])
    assert grid[0].images[0].get_clim() == (0.0, 4.0)
    table = pd.DataFrame({"layer": [0, 1], "loss": [0.5, -2.0]})
    viz.contribution_bars(table, "loss", ax=grid[1])
    assert [bar.get_width() for bar in grid[1].patches] == [0.5, -2.0]


# --- pages -----------------------------------------------------------------------------------------------------------


def test_a_page_holds_all_pieces_and_circuitsvis_once_compressed():
    """The policy names what it unpacks to."""
    page = Page("title", "below").section("first", "note").footer("small print")
    for make in PICTURES.values():
        page.add(make())
    html = page.add(PICTURES["attention_view"]()).to_html()
    assert html.count('class="paper" data-kvlens="attention"') == 3
    (packed,) = re.findall(r'<script type="text/plain" id="circuitsvis">([^<]*)</script>', html)
    assert gzip.decompress(base64.b64decode(packed)).decode() == (bundle := circuitsvis_bundle())
    assert f"'sha256-{base64.b64encode(hashlib.sha256(bundle.encode()).digest()).decode()}'" in html
    assert "var CircuitsVis=" not in html and "</script" not in bundle and len(html) < 700_000
    assert "data-draw" not in html.split("<script>")[0]
    assert "<main data-draw>" in attention_view(["a", "b", "c"], PATTERN).to_html()
    page = Page("t").add(error_table(heads())).to_html()
    assert 'id="circuitsvis"' not in page
    assert page.index("<noscript>") < page.index("<section")  # says what is missing without scripts


def test_sections_have_ids_of_their_own_and_a_list_of_contents():
    page = Page("t").section("The answer").section("Übersicht <b>").section("The answer").section("").note("n").to_html()
    assert re.findall(r'<section id="([^"]*)"', page) == ["the-answer", "bersicht-b", "the-answer-2", "section"]
    contents = page[page.index("<nav") : page.index("</nav>")]
    assert re.findall(r'href="#([^"]*)"', contents) == ["the-answer", "bersicht-b", "the-answer-2"]
    assert "<b>" not in contents and '<p class="note">n</p>' in page
    assert "<nav" not in Page("t").section("one").to_html()


def test_the_style_sheet_knows_other_readers():
    page = Page("t").to_html()
    assert all(f"@media {kind}" in page for kind in ("(forced-colors: active)", "(max-width: 720px)", "print"))

"""A page's sections can be linked to; circuitsvis stands in it once, compressed."""

import base64
import gzip
import re

import pandas as pd
import pytest
import torch

from kvlens.viz import Page, attention_view, error_table
from kvlens.viz._document import circuitsvis_bundle


def test_sections_have_ids_of_their_own_and_a_list_of_contents():
    page = Page("t").section("The answer").section("Übersicht <b>").section("The answer").section("").note("n").to_html()
    assert re.findall(r'<section id="([^"]*)"', page) == ["the-answer", "bersicht-b", "the-answer-2", "section"]
    contents = page[page.index("<nav") : page.index("</nav>")]
    assert re.findall(r'href="#([^"]*)"', contents) == ["the-answer", "bersicht-b", "the-answer-2"]
    assert "<b>" not in contents and '<p class="note">n</p>' in page
    assert "<nav" not in Page("t").section("one").to_html()


def test_circuitsvis_is_compressed_and_the_policy_names_what_it_unpacks_to():
    piece = attention_view(["a", "b"], torch.rand(1, 2, 2))
    page = Page("t").add(piece).add(piece).to_html()
    (packed,) = re.findall(r'<script type="text/plain" id="circuitsvis">([^<]*)</script>', page)
    assert gzip.decompress(base64.b64decode(packed)).decode() == circuitsvis_bundle()
    assert len(page) < 600_000
    assert "data-draw" not in page.split("<script>")[0] and "<main data-draw>" in piece.to_html()


def test_without_scripts_the_page_says_what_is_missing():
    page = Page("t").add(error_table(pd.DataFrame({"a": [1]}))).to_html()
    assert "<noscript>" in page and page.index("<noscript>") < page.index("<section")


@pytest.mark.parametrize("kind", ["forced-colors: active", "max-width: 720px", "print"])
def test_the_style_sheet_knows_other_readers(kind):
    assert f"@media {'print' if kind == 'print' else f'({kind})'}" in Page("t").to_html()

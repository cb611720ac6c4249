"""Every piece: what it shows is what it was given, it saves as promised, and it says what is wrong with bad input."""

import base64
import gzip
import json
import math
import re

import pandas as pd
import pytest
import torch

from kvlens.analyses import HeadDetails
from kvlens.viz import (
    Page,
    attention_view,
    colored_tokens,
    contribution_bars,
    error_table,
    generated_text,
    head_heatmap,
)
from kvlens.viz._blocks import block_means, block_size, strongest_positions
from kvlens.viz._details import details_json
from kvlens.viz._document import SCRIPTS, circuitsvis_bundle
from kvlens.viz._text import html_text, label, number, part_note, percent, running, script_json

NASTY = ["$x^2$", "🙂", "\n", "שלום", "<b>", "\x00", "_{"]


def heads(**columns) -> pd.DataFrame:
    table = pd.DataFrame({"layer": [0, 0, 1], "head": [0, 1, 1], "b_kv_norm": [1.0, 2.0, 4.0]})
    return table.assign(**columns)


def props_of(piece) -> dict:
    return json.loads(gzip.decompress(base64.b64decode(re.search(r'<script type="text/plain">(.*?)</script>', piece.body)[1])))


PIECES = {
    "head_heatmap": lambda: head_heatmap(heads(loss_change=[-1.0, math.nan, 0.5]), "loss_change"),
    "attention_view": lambda: attention_view(NASTY, torch.rand(2, 7, 7) - 0.5),
    "colored_tokens": lambda: colored_tokens(NASTY, [1, -2, math.nan, 0, math.inf, 3, 4], title="$t_{"),
    "contribution_bars": lambda: contribution_bars(heads(part=NASTY[:3]), "b_kv_norm", part="part"),
}


# --- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", PIECES.values(), ids=PIECES)
def test_pictures_save_as_png_svg_and_html(make, tmp_path):
    piece = make()
    piece.save_png(tmp_path / "a.png", dpi=50)
    piece.save_svg(tmp_path / "a.svg")
    piece.save_svg(tmp_path / "b.svg")
    piece.save_html(tmp_path / "a.html")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    html = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert html.startswith("<!DOCTYPE html>") and html.count("<script>") == len(SCRIPTS)
    assert not re.search(r'(src|href)="(?!data:)', html)


def test_a_page_holds_the_bundle_once_and_all_pieces():
    page = Page("title", "below").section("first", "note").footer("small print")
    for make in PIECES.values():
        page.add(make())
    html = page.add(PIECES["attention_view"]()).to_html()
    assert html.count('id="circuitsvis"') == 1 and "var CircuitsVis=" not in html
    assert html.count('class="paper" data-kvlens="attention"') == 2
    assert Page("t").add(error_table(heads())).to_html().count('id="circuitsvis"') == 0
    assert "</script" not in circuitsvis_bundle()


# --- what they show ---------------------------------------------------------------------------------------------------


def test_a_heat_map_has_a_cell_a_head_and_a_map_a_column():
    body = head_heatmap(heads(loss_change=[-0.25, 0.0, 0.5])).body
    assert re.findall(r'data-column="(\w+)"( hidden)?', body) == [("b_kv_norm", ""), ("loss_change", " hidden")]
    cells = re.findall(
        r'<span data-layer="(\d)" data-head="(\d)" title="[^"]*" class="(\w+)[^"]*"(?: style="--x:(.*?)%")?', body
    )
    assert cells[:4] == [
        ("0", "0", "positive", "25.0"),
        ("0", "1", "positive", "50.0"),
        ("1", "0", "none", ""),
        ("1", "1", "positive", "100.0"),
    ]
    assert cells[4] == ("0", "0", "negative", "50.0")
    assert "<button" not in body


def test_attention_gives_circuitsvis_a_square_of_known_rows():
    pattern = torch.tensor([[[0.1, 0.2, 0.7, 0.0], [0.4, math.nan, 0.3, 0.2]]])
    piece = attention_view([" a", "b", "c", "\n"], pattern, n_prompt=2)
    props = props_of(piece)
    assert props["tokens"] == ["p0:·a", "p1:b", "0:c", "1:⏎"]
    assert props["attention"] == [[[0, 0, 0, 0], [0, 0, 0, 0], [0.1, 0.2, 0.7, 0], [0.4, 0, 0.3, 0.2]]]
    assert props["maxValue"] == -props["minValue"] == 0.7
    assert "1 values are not finite" in piece.body


def test_long_attention_keeps_what_counts_and_says_what_it_leaves_out():
    n_keys, n_prompt = 20, 15
    pattern = torch.full((2, 5, n_keys), 0.001)
    pattern[:, :, 4] = 0.9
    pattern[:, :, 11] = 0.5
    piece = attention_view([str(i) for i in range(n_keys)], pattern, n_prompt=n_prompt, max_tokens=8)
    names = props_of(piece)["tokens"]
    assert len(names) == 8
    assert {"p4:4", "p11:11", "1:16", "2:17", "3:18", "4:19"} <= set(names)
    assert "12 of 20 tokens are left out, those with the least attention" in piece.body


def test_positions_are_chosen_by_the_last_queries():
    pattern = torch.zeros(1, 3, 10)
    pattern[0, :, 2] = 1
    kept, left_out = strongest_positions(pattern, torch.tensor([7, 8, 9]), 7, 5)
    assert len(kept) == 5 and {2, 8, 9} <= set(kept.tolist())
    assert sorted([*kept.tolist(), *left_out.tolist()]) == list(range(10))


def test_blocks_have_the_mean_of_their_positions():
    values = torch.rand(3, 11)
    assert block_size(11, 4) == 3 and block_size(4, 11) == 1
    means = block_means(values, 3)
    assert means.shape == (3, 4)
    torch.testing.assert_close(means[:, 1], values[:, 3:6].mean(dim=-1))
    torch.testing.assert_close(means[:, 3], values[:, 9:].mean(dim=-1))
    assert torch.equal(block_means(values, 1), values)
    sums = torch.stack(
        [values[:, i : i + 2].sum(dim=1) for i in range(0, 11, 2)], dim=1
    )  # what is summed already, 2 to a column
    torch.testing.assert_close(block_means(sums, 2, per_column=2, n=11), block_means(values, 4))


def test_details_survive_the_page_to_three_digits():
    pattern = torch.randn(2, 3, 4, 9)
    pattern[1, 2, 0, 0] = math.nan
    details = HeadDetails(list("abcde"), list("wxyz"), torch.arange(5, 9), pattern, pattern[..., 0, :5])
    data = json.loads(script_json(details_json(details)))
    for layer in range(2):
        for head in range(3):
            quantized = data["heads"][layer][head]["pattern"]
            cells = torch.tensor([math.nan if c is None else c * quantized["unit"] for c in quantized["cells"]]).view(4, 9)
            expected = pattern[layer, head]
            half_a_unit = 0.51 * float(expected.nan_to_num().abs().max()) / 999
            torch.testing.assert_close(cells, expected, rtol=0, atol=half_a_unit, equal_nan=True)
    assert data["notes"] == [] and data["queries"] == [0, 1, 2, 3]


@pytest.mark.parametrize(("n_layers", "n_heads", "largest"), [(4, 6, 1.1e6), (12, 12, 1.8e6)])
def test_details_of_512_tokens_stay_small(n_layers, n_heads, largest):
    """Here every cell takes its three digits and a comma; a real pattern, 0 above its diagonal, takes three quarters of that.

    Of a page of 3 MB circuitsvis takes 1.3, and a report's other pieces 0.7. Text tokens keep a column each while they can.
    """
    pattern = torch.rand(n_layers, n_heads, 64, 576)
    details = HeadDetails([" w"] * 512, [" t"] * 64, torch.arange(512, 576), pattern, torch.rand(n_layers, n_heads, 512))
    data = details_json(details)
    assert len(script_json(data)) < largest
    assert (len(data["columns"]["text"]) == 64) == (n_heads == 6)


def test_colored_tokens_scale_and_signs():
    body = colored_tokens(["a", "b", "c"], [0.5, -1.0, math.nan], unit="nats").body
    assert '<span title="0 a: nats 0.500" class="positive" style="--x:50.0%">a</span>' in body
    assert 'class="negative" style="--x:100.0%">b' in body
    assert 'class="none">c' in body
    longer = colored_tokens(["x"] * 5000, range(5000))
    assert longer.body.count(">xx</span>") == 2500 and "blocks of 2 of the 5,000 tokens" in longer.body


def test_bars_start_at_zero():
    body = contribution_bars(pd.DataFrame({"layer": [0, 1, 2], "logit": [3.0, -1.0, 0.0]}), "logit").body
    assert re.findall(r"left:(.*?)%;width:(.*?)%", body) == [("25.00", "75.00"), ("0.00", "25.00"), ("25.00", "0.00")]
    assert ">layer 1</th>" in body


def test_a_table_shows_numbers_and_how_many_rows_there_are():
    body = error_table(
        pd.DataFrame({"name": ["<a>", None], "x": [0.12345, 2.0], "n": [3, 4], "ok": [True, False]}), max_rows=1
    ).body
    assert '<td>&lt;a&gt;</td><td class="right" title="0.12345">0.123</td><td class="right">3</td>' in body
    assert "True" in body and "The first 1 of 2 rows." in body


def test_generated_text_marks_where_it_leaves_the_first():
    body = generated_text({"with_prompt": "the widget", "converted": "the widget", "without": "the gadget"}, start="So ").body
    assert body.count("<mark>") == 1 and "the <mark>gadget</mark>" in body
    assert "the same" in body and "differs" in body


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1.0, "1.00"), (-0.5, "−0.500"), (1234.5, "1,234"), (1e-7, "1.0e−07"), (math.nan, "–"), (0.00123, "0.00123")],
)
def test_numbers(value, shown):
    assert number(value) == shown


@pytest.mark.parametrize(
    ("fraction", "shown", "exactly"),
    [
        (0, "0 %", "0 %"),
        (4e-4, "< 0.1 %", "0.04 %"),
        (-4e-4, "> −0.1 %", "−0.04 %"),
        (0.001, "0.1 %", "0.1 %"),
        (0.12345, "12.3 %", "12.3 %"),
        (0.25, "25 %", "25 %"),
        (0.9999, "> 99.9 %", "> 99.9 %"),
        (1.0, "100 %", "100 %"),
        (-12.34, "−1230 %", "−1230 %"),
        (math.nan, "–", "–"),
    ],
)
def test_percentages_are_never_rounded_to_nothing_or_all(fraction, shown, exactly):
    assert (percent(fraction), percent(fraction, least=0.0)) == (shown, exactly)


def test_text_is_escaped():
    assert script_json("</script>\u2028&\ud800") == '"\\u003c/script\\u003e\\u2028\\u0026\ufffd"'
    unseen = "\u202eabc\u2066\u200f\x85"
    assert script_json([unseen]).isascii() and json.loads(script_json([unseen])) == [unseen]
    assert html_text("<a href='x'>\x00") == "&lt;a href=&#x27;x&#x27;&gt;\ufffd"
    assert html_text("\u202eabc\u2028d") == "\ufffdabc\ufffdd"  # nothing behind it is turned around, no line is broken
    assert label(" a\n\t") == "·a⏎⇥"
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_json(math.nan)


@pytest.mark.parametrize(
    ("token", "in_text", "on_an_axis"),
    [
        (" <0xE4><0xBD>", " ⋯", "·<0xE4><0xBD>"),
        ("ß<0xC3>", "ß⋯", "ß<0xC3>"),
        ("\u0301 a", "◌\u0301 a", "◌\u0301·a"),  # an accent is seen, and not on what stands before the token
        ("\u200d", "⋯", "<U+200D>"),
        ("👨\u200d👩", "👨\u200d👩", "👨\u200d👩"),
        ("", "", ""),
    ],
)
def test_parts_of_characters_are_seen(token, in_text, on_an_axis):
    assert (running(token), label(token)) == (in_text, on_an_axis)
    assert bool(part_note(["a ⋯", token])) == ("⋯" in in_text)
    colored = colored_tokens(["a", token], [1.0, -1.0])
    assert f">{html_text(in_text)}</span>" in colored.body and (part_note([token]) in colored.body)


# --- bad input ----------------------------------------------------------------------------------------------------------

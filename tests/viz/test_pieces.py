"""Every piece: what it shows is what it was given, by hand; what it refuses; text and numbers as they stand in a page; how it
is saved, shares a page with others, and draws into axes that the caller has made.
"""

import base64
import functools
import gzip
import hashlib
import math
import re
from importlib.resources import files

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from pictures import (
    ARCS,
    PATTERN,
    PICTURES,
    PLACES,
    SCORES,
    SEVERAL,
    by_depth,
    data_of,
    demonstrations,
    heads,
    losses,
    shares,
    values,
)
from tiny_text_model import PROMPT, TEXT, softmax

from kvlens import analyses, viz
from kvlens.analyses import HeadDetails
from kvlens.viz import (
    Page,
    Piece,
    attention_view,
    attention_view_under_bias,
    colored_tokens,
    contribution_bars,
    depth_map,
    dual_view,
    error_table,
    head_heatmap,
    induction_arcs,
    linked_view,
)
from kvlens.viz._figures import FULL_COLOR, block_means, block_size, strongest
from kvlens.viz._text import data_script, html_text, label, number, part_note, percent, running
from kvlens.viz.attention import strongest_positions
from kvlens.viz.heads import MAX_CELLS, details_json
from kvlens.viz.page import OTHERWISE, SCRIPTS, circuitsvis_bundle

# --- heads and attention ---------------------------------------------------------------------------------------------


def test_a_heat_map_has_a_cell_a_head_and_a_map_a_column():
    piece = head_heatmap(heads(loss_change=[-0.25, 0.0, 0.5]))
    body, maps = piece.body, data_of(piece)["maps"]
    assert re.findall(r'data-column="(\w+)"', body) == ["b_kv_norm"]
    cells = re.findall(
        r'<span data-layer="(\d)" data-head="(\d)" title="[^"]*" class="(\w+)[^"]*"(?: style="--x:(.*?)%")?', body
    )
    assert cells == [
        ("0", "0", "positive", "25.0"),
        ("0", "1", "positive", "50.0"),
        ("1", "0", "none", ""),
        ("1", "1", "positive", "100.0"),
    ]
    assert maps["b_kv_norm"] == {"values": [1.0, 2.0, None, 4.0], "low": 0.0, "top": 4.0}
    assert maps["loss_change"] == {"values": [-0.25, 0.0, None, 0.5], "low": 0.0, "top": 0.5}
    assert "<button" not in body


@pytest.mark.parametrize("form", [torch.Tensor.clone, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.bfloat16])
def test_numbers_by_layer_and_head_are_drawn_as_their_table_is(form):
    numbers = torch.tensor([[0.5, -2.0, 0.0], [4.0, 8.0, 1.0]])
    table = pd.DataFrame(PLACES, columns=["layer", "head"]).assign(score=numbers.flatten().double().numpy())
    assert head_heatmap(form(numbers), "score").body == head_heatmap(table, "score").body
    assert "value" in head_heatmap(form(numbers)).body


def test_attention_gives_circuitsvis_a_square_of_known_rows():
    pattern = torch.tensor([[[0.1, 0.2, 0.7, 0.0], [0.4, math.nan, 0.3, 0.2]]])
    piece = attention_view([" a", "b", "c", "\n"], pattern, n_prompt=2)
    props = data_of(piece)
    assert props["tokens"] == ["p0:·a", "p1:b", "0:c", "1:⏎"]
    expected = [*[0.0] * 8, 0.1, 0.2, 0.7, 0.0, 0.4, 0.0, 0.3, 0.2]
    assert values(props["attention"]) == pytest.approx(expected, abs=0.51 * 0.7 / 255)
    assert props["maxValue"] == -props["minValue"] == 0.7
    assert "1 values are not finite" in piece.body


def test_attention_under_a_bias_is_drawn_whole():
    """A map of ``hook_pattern`` under a bias was blank: its rows, after 128 tokens, summed to 0.002."""
    model = softmax()
    piece = attention_view_under_bias(model, PROMPT, TEXT, 1, heads=[2, 0])
    found, props = analyses.attention_under_bias(model, PROMPT, TEXT, 1), data_of(piece)
    assert props["attentionHeadNames"] == ["L1 H2", "L1 H0"] and len(props["tokens"]) == len(found.tokens)
    shown, expected = torch.tensor(values(props["attention"])), found.pattern[[2, 0]]
    half_a_unit = 0.51 * props["maxValue"] / 255
    torch.testing.assert_close(shown.view_as(expected), expected, rtol=0, atol=half_a_unit)


def test_long_attention_keeps_what_counts_and_says_what_it_leaves_out():
    n_keys, n_prompt = 20, 15
    pattern = torch.full((2, 5, n_keys), 0.001)
    pattern[:, :, 4] = 0.9
    pattern[:, :, 11] = 0.5
    piece = attention_view([str(i) for i in range(n_keys)], pattern, n_prompt=n_prompt, max_tokens=8)
    names = data_of(piece)["tokens"]
    assert len(names) == 8
    assert {"p4:4", "p11:11", "1:16", "2:17", "3:18", "4:19"} <= set(names)
    assert "12 of 20 tokens are left out, those with the least attention" in piece.body


def test_the_last_queries_are_kept_and_the_positions_that_they_attend_to():
    pattern = torch.zeros(1, 6, 12)
    pattern[0, :, 2], pattern[0, :, 7] = 0.5, 1
    kept, left_out = strongest_positions(pattern, torch.arange(6, 12), n_prompt=6, max_tokens=4)
    assert {7, 10, 11} <= set(kept.tolist()) and len(kept) == 4
    assert sorted([*kept.tolist(), *left_out.tolist()]) == list(range(12))
    kept, _ = strongest_positions(pattern[:, :3], torch.tensor([9, 10, 11]), n_prompt=9, max_tokens=5)
    assert kept.tolist() == [2, 7, 9, 10, 11]


def test_blocks_have_the_mean_of_their_positions():
    values = torch.rand(3, 11)
    assert block_size(11, 4) == 3 and block_size(4, 11) == 1
    means = block_means(values, 3)
    assert means.shape == (3, 4)
    torch.testing.assert_close(means[:, 1], values[:, 3:6].mean(dim=-1))
    torch.testing.assert_close(means[:, 3], values[:, 9:].mean(dim=-1))
    assert torch.equal(block_means(values, 1), values)
    sums = torch.stack([values[:, i : i + 2].sum(dim=1) for i in range(0, 11, 2)], dim=1)  # 2 to a column already
    torch.testing.assert_close(block_means(sums, 2, per_column=2, n=11), block_means(values, 4))


def test_details_survive_the_page_to_three_digits():
    """Of the largest value of each head."""
    pattern = torch.randn(2, 3, 4, 9)
    pattern[1, 2, 0, 0] = math.nan
    details = HeadDetails(list("abcde"), list("wxyz"), torch.arange(5, 9), pattern, pattern[..., 0, :5])
    data = data_of(head_heatmap(torch.ones(2, 3), details=details))["details"]
    for layer in range(2):
        for head in range(3):
            shown = values(data["pattern"][layer][head])
            cells = torch.tensor([math.nan if value is None else value for value in shown]).view(4, 9)
            expected = pattern[layer, head]
            half_a_unit = 0.51 * float(expected.nan_to_num().abs().max()) / 999
            torch.testing.assert_close(cells, expected, rtol=0, atol=half_a_unit, equal_nan=True)
    assert data["notes"] == [] and data["queries"] == [0, 1, 2, 3]


@pytest.mark.parametrize(("n_layers", "n_heads", "exact"), [(4, 6, True), (12, 12, False)])
def test_details_of_512_tokens_stay_small(n_layers, n_heads, exact):
    """The numbers of many heads keep what their colors show. Text tokens keep a column each while they can."""
    pattern = torch.rand(n_layers, n_heads, 64, 576, generator=torch.Generator().manual_seed(0)).square()
    shares = torch.rand(n_layers, n_heads, 512)
    details = HeadDetails([" w"] * 512, [" t"] * 64, torch.arange(512, 576), pattern, shares)
    data = details_json(details)
    assert len(data_script(data)) < 600_000
    assert (len(data["columns"]["text"]) == 64) == exact
    assert ("Values are rounded to 1/63 of full color." in data["notes"]) == (not exact)
    n_prompt, n_columns = len(data["columns"]["prompt"]), len(data["columns"]["prompt"] + data["columns"]["text"])
    shown = [values(head) for layer in data["pattern"] for head in layer]
    cells = torch.tensor(shown).view(n_layers, n_heads, 64, n_columns)
    unit = float(cells.max()) / 999 if exact else strongest(cells.flatten().tolist(), FULL_COLOR) / 63
    expected = block_means(pattern[..., :512], -(-512 // n_prompt))
    torch.testing.assert_close(cells[..., :n_prompt], expected, rtol=0, atol=0.51 * unit)


def test_colored_tokens_scale_and_signs():
    body = colored_tokens(["a", "b", "c"], [0.5, -1.0, math.nan], unit="nats").body
    assert '<span title="0 a: nats 0.500" class="positive" style="--x:50.0%">a</span>' in body
    assert 'class="negative" style="--x:100.0%">b' in body
    assert 'class="none">c' in body
    longer = colored_tokens(["x"] * 5000, range(5000))
    assert longer.body.count(">xx</span>") == 2500 and "blocks of 2 of the 5,000 tokens" in longer.body
    assert 'title="1 xx: value 2.50"' in longer.body  # the mean of 2 and 3


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


# --- the data of interactive pieces ----------------------------------------------------------------------------------


def test_the_linked_view_holds_the_three_sums():
    given = shares()
    data = data_of(linked_view(given))
    assert (data["n_layers"], data["n_heads"], data["n_prompt"], data["block"]) == (2, 3, 3, 1)
    for name in ("by_prompt", "by_text", "between"):
        expected = getattr(given, name).flatten().tolist()
        assert values(data[name]) == pytest.approx(expected, abs=max(expected) / 999)
    assert data["next"]["with prompt"][0] == [["a", 0.5], ["b", 0.25]]
    assert [block["place"] for block in data["blocks"]] == ["0", "1", "2"]


def test_a_long_prompt_is_linked_in_blocks_with_means_per_token(monkeypatch):
    monkeypatch.setattr("kvlens.viz.attention.MAX_LINKED_CELLS", 64)
    data = data_of(linked_view(given := shares(n_prompt=50)))
    size = data["block"]
    assert size > 1 and data["blocks"][0]["place"] == f"0–{size - 1}"
    expected = block_means(given.by_prompt, size).flatten().tolist()
    assert values(data["by_prompt"]) == pytest.approx(expected, abs=max(expected) / 999)


def test_the_depth_map_holds_the_table_and_its_means():
    piece = depth_map(by_depth())
    data = data_of(piece)
    assert data["change"] == [[0.0, -1.0], [0.5, -0.5], [1.0, 0.0]]
    assert data["means"] == [-0.5, 0.0, 0.5]
    assert data["with"][0][0] == "x" and data["without"][0][0] == "<script>" and "<script>" not in piece.body


def test_arcs_are_those_of_the_table():
    assert data_of(induction_arcs(["a", "b", "\ud800", "a"], 2, ARCS, SCORES))["arcs"] == [[0, 1, 3, 1, 0.75, 1]]
    assert "nothing for induction to copy" in induction_arcs(["a", "b"], 1, ARCS.iloc[:0], SCORES).body


def test_arcs_over_a_long_prompt_keep_the_tokens_under_them_and_those_repeated():
    n_prompt = 2000
    tokens = [f"p{i}" for i in range(n_prompt)] + ["t0", "t1"]
    keys = list(range(1, 1500, 2))
    of_heads = [dict(layer=0, head=head, shifted=False) for head in (0, 1)]
    rows = [{**head, "position": 1, "prompt_position": key, "attention": key / 1e4} for head in of_heads for key in keys]
    data = data_of(piece := induction_arcs(tokens, n_prompt, pd.DataFrame(rows), SCORES))
    assert len(data["tokens"]) == len(data["places"]) <= 256
    assert data["tokens"][-1] == "t1" and data["places"][-1] == 1  # a place in the text
    assert data["n_prompt"] == len(data["tokens"]) - 1
    strongest = {data["tokens"][arc[3]] for arc in data["arcs"] if arc[1] == 0}
    assert {f"p{key}" for key in keys[-100:]} <= strongest
    assert {f"p{key - 1}" for key in keys[-100:]} <= {*data["tokens"]}  # the repeated token precedes the key
    assert f"{len(data['arcs']):,} of 1,500 arcs are shown" in piece.body and "Of 2,002 tokens the" in piece.body


def test_the_dual_view_of_a_head_by_hand():
    piece = dual_view(losses(), demonstrations(), query=" sat")
    data = data_of(piece)
    head = data["heads"]["1"]["2"]
    # the page has three digits
    assert values(head["step"]) == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=1e-3)
    assert values(head["output"]) == pytest.approx([0.3, 0.2, 0.1], abs=1e-3)
    assert head["whole"] == pytest.approx(0.6)
    assert [row[:2] for row in head["most"]] == [[0, "the"], [1, " <b>"], [2, " cat"]]
    assert head["most"][0][2:] == pytest.approx([1 / 7, 0.3, 0.2, -0.5, 0.5], abs=1e-3)
    assert (data["n"], data["block"], data["query"]) == (3, 1, " sat") and "<b>" not in piece.body


def test_the_map_of_a_logarithm_runs_from_its_lowest_to_its_highest():
    first = dual_view(losses(), demonstrations()).body
    strengths = [float(x) for x in re.findall(r'class="positive" style="--x:([\d.]+)%"', first)]
    assert strengths == [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    assert "−10.0</span>" in first and "−5.0 log_loss_drop" in first


def test_many_demonstrations_are_colored_in_blocks():
    n = MAX_CELLS // len(PLACES) + 1
    data = data_of(dual_view(losses(), demonstrations([f"t{i}" for i in range(n)]).assign(log_step_norm=0.0)))
    assert data["block"] == 2 and data["blocks"][0] == {"place": "0–1", "text": "t0t1"}
    assert len(data["heads"]["0"]["0"]["step"]["cells"]) == math.ceil(n / 2)


# --- text and numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1.0, "1.00"), (-0.5, "−0.500"), (1234.5, "1,234"), (1e-7, "1.0e−07"), (math.nan, "–"), (0.00123, "0.00123")],
)
def test_numbers(value, shown):
    assert number(value) == shown


def test_numbers_of_one_figure_have_one_form():
    """That of the largest; a value by itself, as a cell's title, keeps its digits."""
    table = pd.DataFrame({"layer": [0] * 4, "head": range(4), "b_kv_norm": [6.3e-4, 0.0403, -0.0121, 0.0]})
    piece = head_heatmap(table)
    assert re.findall(r"<span data-layer[^>]*>([^<]*)</span>", piece.body) == ["0.0006", "0.0403", "−0.0121", "0.0000"]
    assert "b_kv_norm 6.3e−04" in piece.body
    axes = head_heatmap(table, ax=plt.figure().add_subplot())
    assert [text.get_text() for text in axes.texts] == ["0.0006", "0.0403", "−0.0121", "0.0000"]
    bars = contribution_bars(table, "b_kv_norm", by="head").body
    assert re.findall(r"<td>([^<]*)</td></tr>", bars) == ["0.0006", "0.0403", "−0.0121", "0.0000"]
    assert [number(x, 2e-7) for x in (2e-7, 5e-9)] == ["2.0e−07", "5.0e−09"]


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
    assert re.fullmatch(
        r'<script type="text/plain" class="data">[A-Za-z0-9+/=]+</script>', data_script("</script>\u2028&\ud800")
    )
    assert html_text("<a href='x'>\x00") == "&lt;a href=&#x27;x&#x27;&gt;\ufffd"
    assert html_text("\u202eabc\u2028d") == "\ufffdabc\ufffdd"  # nothing behind it is turned around, no line is broken
    assert label(" a\n\t") == "·a⏎⇥"
    with pytest.raises(ValueError, match="not JSON compliant"):
        data_script(math.nan)


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


AB = ["a", "b"]


def attention(tokens, *shape, **options):
    return viz.attention_view(tokens, torch.rand(shape), **options)


def picture():
    return viz.head_heatmap(torch.ones(2, 3))


REFUSED = [
    ("1 tokens, 0 values", lambda: viz.colored_tokens(["a"], [])),
    ("expected real numbers, got torch.complex64", lambda: viz.colored_tokens(AB, [1 + 2j, 0])),
    ("attention_view: ", lambda: attention(AB, 2, 2)),
    ("key = 1 tokens, got shape [2, 2, 2]", lambda: attention(["a"], 2, 2, 2)),
    *(
        ("2 ascending query positions in 0..1, got", lambda x=x: attention(AB, 1, 2, 2, queries=x))
        for x in (3, [1, 0], [[0, 1]])
    ),
    ("n_prompt must lie in 0..1", lambda: attention(["a"], 1, 1, 1, n_prompt=2)),
    ("2 heads and 1 names", lambda: attention(["a"], 2, 1, 1, head_names=["x"])),
    ("max_tokens must be at least 4, got 3", lambda: attention(["a"], 1, 1, 1, max_tokens=3)),
    ("dpi must be at least 10, got 0", lambda: picture().save_png("x.png", dpi=0)),
    ("dpi must be from 10 to 2400", lambda: picture().save_png("x.png", dpi=10**9)),
    *(
        ("has no static figure; use save_html", lambda piece=piece: piece().save_png("a.png"))
        for piece in (lambda: viz.error_table(heads()), lambda: viz.linked_view(shares()))
    ),
    ("one layer and position has two rows", lambda: viz.depth_map(by_depth(position=0))),
    ("position must lie in 0..0", lambda: viz.induction_arcs(AB, 1, ARCS, SCORES)),
    *(
        (f"one row for each of 6 heads and 3 demonstrations, got {len(x)}", lambda x=x: viz.dual_view(losses(), x))
        for x in (demonstrations().iloc[1:], pd.concat([demonstrations()] * 2))
    ),
    *(("expected a path", lambda x=x: viz.error_table(heads()).save_html(x)) for x in ("", "a\0b")),
    ("cannot write: ", functools.partial(viz.error_table(heads()).save_html, "x" * 300)),
]


@pytest.mark.unhooked
@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
def test_is_refused(words, call, refuses):
    refuses(words, call)


NOT_STATIC = {"linked_view", "error_table", "Page", "Piece"}

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


def test_circuitsvis_labels_every_token_with_its_one_number():
    """Which are those of its place in prompt or text, and are written by us."""
    source = files("circuitsvis").joinpath("dist", "cdn", "iife.js").read_text(encoding="utf-8")
    assert [len(re.findall(written, source)) for written in OTHERWISE] == [1, 2]
    bundle = circuitsvis_bundle()
    assert bundle.count("autoSkip:!1") == 2 and not any(re.search(written, bundle) for written in OTHERWISE)


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

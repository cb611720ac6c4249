"""The view of heads as steps of learning: its numbers by hand, what it refuses, and choosing heads in a browser."""

import html
import json
import math
import re

import pandas as pd
import pytest
import torch
from headless_chromium import CHROMIUM, WITHOUT, visit, with_script

from kvlens import KVLensError
from kvlens.analyses import LinkedShares
from kvlens.viz import Page, dual_view, linked_view
from kvlens.viz.dual import MAX_CELLS

PLACES = [(layer, head) for layer in range(2) for head in range(3)]


def losses() -> pd.DataFrame:
    """Two queries a head; the means of the logarithms are -10, -9, ... -5."""
    rows = [
        dict(layer=layer, head=head, query=q, log_loss_drop=-10.0 + i + (q - 2.5), step_share=0.1 * i)
        for i, (layer, head) in enumerate(PLACES)
        for q in (2, 3)
    ]
    return pd.DataFrame(rows).assign(demonstration_weight=0.5, cosine_before=0.25, cosine_after=0.75)


def demonstrations(tokens=("the", " <b>", " cat")) -> pd.DataFrame:
    """Steps in the ratio 1 : 2 : 4 ..., shares of the output that decrease with position."""
    rows = [
        dict(
            layer=layer,
            head=head,
            prompt_position=j,
            token=token,
            log_step_norm=j * math.log(2.0) - 700,
            output_share=0.3 - 0.1 * j,
        )
        for layer, head in PLACES
        for j, token in enumerate(tokens)
    ]
    return pd.DataFrame(rows).assign(weight=0.2, cosine_before=-0.5, cosine_after=0.5)


def data_of(piece):
    (found,) = re.findall(r'<script type="application/json">(.*?)</script>', piece.body, flags=re.DOTALL)
    return json.loads(found)


def values(quantized):
    return [cell * quantized["unit"] for cell in quantized["cells"]]


def test_the_numbers_of_a_head_by_hand():
    data = data_of(dual_view(losses(), demonstrations(), query=" sat"))
    head = data["heads"]["1"]["2"]
    assert values(head["step"]) == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=1e-3)  # exp of -700 alone would be 0
    assert values(head["output"]) == pytest.approx([0.3, 0.2, 0.1], abs=1e-3)
    assert head["whole"] == pytest.approx(0.6)
    assert [row[:2] for row in head["most"]] == [[0, "the"], [1, " <b>"], [2, " cat"]]
    assert head["most"][0][2:] == pytest.approx([1 / 7, 0.3, 0.2, -0.5, 0.5], abs=1e-3)
    assert (data["n"], data["block"], data["query"]) == (3, 1, " sat")


def test_the_map_of_a_logarithm_runs_from_its_lowest_to_its_highest():
    body = dual_view(losses(), demonstrations()).body
    first = body[body.index('data-column="log_loss_drop"') : body.index('data-column="step_share"')]
    strengths = [float(x) for x in re.findall(r'class="positive" style="--x:([\d.]+)%"', first)]
    assert strengths == [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    assert "−10.0</span>" in first and "−5.00 log_loss_drop" in first


def test_a_long_prompt_is_colored_in_blocks_and_a_token_stays_text(tmp_path):
    n = MAX_CELLS // len(PLACES) + 1
    data = data_of(dual_view(losses(), demonstrations([f"t{i}" for i in range(n)]).assign(log_step_norm=0.0)))
    assert data["block"] == 2 and data["blocks"][0] == {"place": "0–1", "text": "t0t1"}
    assert len(data["heads"]["0"]["0"]["step"]["cells"]) == math.ceil(n / 2)
    piece = dual_view(losses(), demonstrations())
    assert "<b>" not in piece.body
    piece.save_png(tmp_path / "dual.png", dpi=50)
    assert (tmp_path / "dual.png").stat().st_size > 1000


def test_what_does_not_fit_is_refused():
    with pytest.raises(KVLensError, match="no column 'step_share'"):
        dual_view(losses().drop(columns="step_share"), demonstrations())
    with pytest.raises(KVLensError, match="one row for each of 6 heads and 3 demonstrations, got 17"):
        dual_view(losses(), demonstrations().iloc[1:])
    with pytest.raises(KVLensError, match="got 36"):
        dual_view(losses(), pd.concat([demonstrations()] * 2))


def linked() -> LinkedShares:
    w = torch.arange(36, dtype=torch.float64).view(2, 3, 2, 3) / 630
    numbers = torch.tensor([[-10.0, -9.0, -8.0], [-7.0, -6.0, -5.0]], dtype=torch.float64)
    return LinkedShares(
        prompt=["the", " <b>", " cat"],
        text=[" sat", " on"],
        by_prompt=w.mean(dim=2),
        by_text=w.sum(dim=3),
        between=w.sum(dim=(0, 1)),
        next_tokens={"with prompt": [[("a", 0.5)]] * 2},
        colorings={"drop": numbers},
        without_zero=["drop"],
    )


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)
def test_a_head_chosen_in_the_grid_keeps_the_losses_colors_and_shows_its_demonstrations(tmp_path):
    script = """
        const [grid, dual] = ["linked", "dual"].map((kind) => document.querySelector(`figure[data-kvlens="${kind}"]`));
        const found = { first: dual.dataset.selected };
        const select = grid.querySelector("select");
        select.selectedIndex = 1;
        select.dispatchEvent(new Event("change"));
        const heads = [...grid.querySelectorAll(".head")];
        const colors = () => heads.map((head) => parseFloat(head.style.getPropertyValue("--x")));
        found.colors = colors();
        heads[1].click();
        found.kept = colors();
        found.label = heads[1].getAttribute("aria-label");
        found.selected = dual.dataset.selected;
        found.title = dual.querySelector(".detail h3").textContent;
        const texts = (nodes) => [...nodes].map((node) => node.textContent);
        found.rows = [...dual.querySelectorAll(".detail tr")].slice(1).map((row) => texts(row.children));
        found.ways = texts(grid.querySelectorAll(".way"));
        grid.querySelector(".way").click();
        found.focus = document.activeElement === dual.querySelector(".detail");
        const maps = dual.querySelector("table.heat:not([hidden])");
        const button = maps.querySelector('[data-layer="1"][data-head="0"]');
        button.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
        found.moved = document.activeElement.title;
        document.activeElement.click();
        found.then = dual.dataset.selected;
        grid.querySelectorAll(".panel.text .token")[0].click();
        found.shares = heads[1].getAttribute("aria-label");
        document.body.dataset.found = JSON.stringify(found);
    """
    page = Page("dual").add(linked_view(linked())).add(dual_view(losses(), demonstrations(), query=" on"))
    (tmp_path / "p.html").write_text(with_script(page.to_html(), script), encoding="utf-8")
    dom = visit(tmp_path / "p.html", tmp_path).dom
    found = json.loads(html.unescape(re.search(r'<body data-found="(.*?)"', dom)[1]))
    assert found["first"] == "1.2"  # the largest drop
    assert found["colors"] == found["kept"] == pytest.approx([0, 20, 40, 60, 80, 100], abs=0.3)  # 3 digits of -10
    assert found["label"] == "layer 0 head 1: drop −9.00"
    assert (found["selected"], found["title"]) == ("0.1", "Layer 0, head 1: its demonstrations")
    assert found["rows"][1] == ["1", "·<b>", "28.6\u00a0%", "20\u00a0%", "0.200", "−0.500", "0.500"]
    assert found["ways"] == ["what each prompt token contributes to its gradient step"] and found["focus"]
    assert found["moved"].startswith("layer 1, head 1") and found["then"] == "1.1"
    assert found["shares"].endswith("%")

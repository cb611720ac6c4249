"""The linked view, the map by depth and the induction arcs: what their data say, by hand, and what they refuse."""

import json
import re

import pandas as pd
import pytest
import torch

from kvlens import KVLensError
from kvlens.analyses import LinkedShares
from kvlens.viz import depth_map, induction_arcs, linked_view
from kvlens.viz._blocks import block_means


def shares(n_prompt=3, n_text=2, n_layers=2, n_heads=2, **changes):
    w = torch.arange(n_layers * n_heads * n_text * n_prompt, dtype=torch.float64)
    w = w.view(n_layers, n_heads, n_text, n_prompt) / w.sum()
    guesses = {"with prompt": [[("a", 0.5), ("b", 0.25)]] * n_text}
    arguments = dict(
        prompt=[f"p{j} " for j in range(n_prompt)],
        text=[f"t{i} " for i in range(n_text)],
        by_prompt=w.mean(dim=2),
        by_text=w.sum(dim=3),
        between=w.sum(dim=(0, 1)),
        next_tokens=guesses,
    )
    return LinkedShares(**{**arguments, **changes})


def data_of(piece):
    (found,) = re.findall(r'<script type="application/json">(.*?)</script>', piece.body, flags=re.DOTALL)
    return json.loads(found)


def values(quantized):
    return [None if cell is None else cell * quantized["unit"] for cell in quantized["cells"]]


def test_the_page_holds_the_three_sums():
    given = shares()
    data = data_of(linked_view(given))
    assert (data["n_layers"], data["n_heads"], data["n_prompt"], data["block"]) == (2, 2, 3, 1)
    for name in ("by_prompt", "by_text", "between"):
        expected = getattr(given, name).flatten().tolist()
        assert values(data[name]) == pytest.approx(expected, abs=max(expected) / 999)
    assert data["next"]["with prompt"][0] == [["a", 0.5], ["b", 0.25]]
    assert [block["place"] for block in data["blocks"]] == ["0", "1", "2"]


def test_a_long_prompt_is_shown_in_blocks_with_means_per_token(monkeypatch):
    monkeypatch.setattr("kvlens.viz.linked.MAX_CELLS", 64)
    data = data_of(linked_view(shares(n_prompt=50)))
    size = data["block"]
    assert size > 1
    assert data["blocks"][0]["place"] == f"0–{size - 1}"
    expected = block_means(shares(n_prompt=50).by_prompt, size).flatten().tolist()
    assert values(data["by_prompt"]) == pytest.approx(expected, abs=max(expected) / 999)


def test_a_short_last_block_is_a_mean_over_what_it_has():
    assert block_means(torch.tensor([1.0, 3.0, 5.0]), 2).tolist() == [2.0, 5.0]


@pytest.mark.unhooked
def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(KVLensError, match=r"by_text must be \[2, 2, 2\]"):
        shares(by_text=torch.zeros(2, 2, 5))
    with pytest.raises(KVLensError, match="coloring 'x' must be"):
        shares(colorings={"x": torch.zeros(3, 2)})
    with pytest.raises(KVLensError, match="next_tokens"):
        shares(next_tokens={"with prompt": []})


def by_depth(**changes):
    rows = [(layer, i, "ab"[i], 0.5 * layer - i, "x", "<script>") for layer in range(3) for i in range(2)]
    table = pd.DataFrame(rows, columns=["layer", "position", "token", "loss_change", "guess_with", "guess_without"])
    return table.assign(**changes)


def test_the_depth_map_holds_the_table_and_its_means(tmp_path):
    piece = depth_map(by_depth())
    data = data_of(piece)
    assert data["change"] == [[0.0, -1.0], [0.5, -0.5], [1.0, 0.0]]
    assert data["means"] == [-0.5, 0.0, 0.5]
    assert "<script>" not in piece.body.split("application/json")[1]
    piece.save_png(tmp_path / "depth.png", dpi=50)
    assert (tmp_path / "depth.png").stat().st_size > 1000


def test_the_depth_map_refuses_two_rows_for_a_position():
    with pytest.raises(KVLensError, match="two rows"):
        depth_map(by_depth(position=0))
    with pytest.raises(KVLensError, match="loss_chnge|loss_change"):
        depth_map(by_depth().drop(columns="loss_change"))


ARCS = pd.DataFrame(
    [(0, 1, 1, 1, 0.75, True)], columns=["layer", "head", "position", "prompt_position", "attention", "shifted"]
)
SCORES = pd.DataFrame([(0, 0, 0.1), (0, 1, 0.9)], columns=["layer", "head", "score"])


def test_arcs_are_those_of_the_table(tmp_path):
    piece = induction_arcs(["a", "b", "\ud800", "a"], 2, ARCS, SCORES)
    assert data_of(piece)["arcs"] == [[0, 1, 3, 1, 0.75, 1]]
    piece.save_png(tmp_path / "arcs.png", dpi=50)
    assert (tmp_path / "arcs.png").stat().st_size > 1000


def test_arcs_outside_the_tokens_are_refused_and_none_says_why():
    with pytest.raises(KVLensError, match=r"position must lie in 0\.\.0"):
        induction_arcs(["a", "b"], 1, ARCS, SCORES)
    assert "nothing for induction to copy" in induction_arcs(["a", "b"], 1, ARCS.iloc[:0], SCORES).body


def test_arcs_over_a_long_prompt_keep_the_tokens_under_them():
    n_prompt = 2000
    tokens = [f"p{i}" for i in range(n_prompt)] + ["t0", "t1"]
    keys = list(range(1, 1500))
    heads = [dict(layer=0, head=head, shifted=False) for head in (0, 1)]
    rows = [{**head, "position": 1, "prompt_position": key, "attention": key / 1e4} for head in heads for key in keys]
    data = data_of(piece := induction_arcs(tokens, n_prompt, pd.DataFrame(rows), SCORES))
    assert len(data["tokens"]) == len(data["places"]) <= 256
    assert data["tokens"][-1] == "t1" and data["places"][-1] == 1  # a place in the text
    assert data["n_prompt"] == len(data["tokens"]) - 1
    strongest = {data["tokens"][arc[3]] for arc in data["arcs"] if arc[1] == 0}
    assert {f"p{key}" for key in keys[-100:]} <= strongest
    assert f"{len(data['arcs']):,} of 2,998 arcs are shown" in piece.body and "Of 2,002 tokens the" in piece.body

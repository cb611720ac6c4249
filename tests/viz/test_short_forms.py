"""A heat map of numbers [layer, head], and the one line that a piece is where HTML is not shown."""

import pandas as pd
import pytest
import torch

from kvlens.viz import Piece, head_heatmap


@pytest.mark.parametrize("form", [torch.Tensor.clone, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.bfloat16])
def test_numbers_by_layer_and_head_are_drawn_as_their_table_is(form):
    numbers = torch.tensor([[0.5, -2.0, 0.0], [4.0, 8.0, 1.0]])
    table = pd.DataFrame({"layer": [0, 0, 0, 1, 1, 1], "head": [0, 1, 2] * 2, "score": numbers.flatten().double().numpy()})
    assert head_heatmap(form(numbers), "score").body == head_heatmap(table, "score").body
    assert "value" in head_heatmap(form(numbers)).body


def test_a_piece_has_a_short_text_form():
    assert repr(Piece("heads", "x" * 12_345)) == "<Piece 'heads': 12 kB of HTML; save_html>"
    assert "save_png" in repr(head_heatmap(torch.ones(2, 2))) and len(repr(head_heatmap(torch.ones(9, 9)))) < 100

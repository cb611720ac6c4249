"""Every picture draws into axes that the caller has made, returns them, and leaves other axes alone."""

import inspect

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from test_dual_view import demonstrations, losses
from test_linked_pieces import ARCS, SCORES, by_depth
from test_pieces import heads

from kvlens import KVLensError, viz

PATTERN = torch.tril(torch.ones(2, 3, 3)) / torch.tensor([1.0, 2.0, 3.0])[:, None]
ONE = {
    "head_heatmap": lambda **ax: viz.head_heatmap(heads(), title="a map", **ax),
    "contribution_bars": lambda **ax: viz.contribution_bars(heads(), "b_kv_norm", part="head", title="a map", **ax),
    "colored_tokens": lambda **ax: viz.colored_tokens(["a", " b"], [1.0, -1.0], title="a map", **ax),
    "induction_arcs": lambda **ax: viz.induction_arcs(["a", "b", "c", "a"], 2, ARCS, SCORES, title="a map", **ax),
    "dual_view": lambda **ax: viz.dual_view(losses(), demonstrations(), title="a map", **ax),
}
SEVERAL = {
    "depth_map": lambda **axes: viz.depth_map(by_depth(), title="a map", **axes),
    "attention_view": lambda **axes: viz.attention_view(["a", "b", "c"], PATTERN, n_prompt=1, title="a map", **axes),
}
IN_ITS_OWN_TEST = {"flow_view"}
NOT_STATIC = {"linked_view", "generated_text", "error_table", "Page", "Piece"}


@pytest.fixture
def grid():
    figure, axes = plt.subplots(1, 3)
    yield axes
    plt.close(figure)


def drawn(ax) -> int:
    return len([*ax.images, *ax.patches, *ax.lines, *ax.texts])


def test_every_picture_takes_axes():
    assert {*ONE, *SEVERAL} | IN_ITS_OWN_TEST | NOT_STATIC == set(viz.__all__)
    for name in ONE:
        assert "ax" in inspect.signature(getattr(viz, name)).parameters
    for name in SEVERAL:
        assert "axes" in inspect.signature(getattr(viz, name)).parameters


@pytest.mark.parametrize("name", ONE)
def test_one_picture_in_one_of_several_axes(name, grid):
    assert ONE[name](ax=grid[1]) is grid[1]
    assert drawn(grid[1]) > 0 and drawn(grid[0]) == drawn(grid[2]) == 0
    assert isinstance(ONE[name](), viz.Piece)
    grid[0].figure.canvas.draw()


@pytest.mark.parametrize("name", SEVERAL)
def test_several_pictures_in_the_first_axes(name, grid):
    assert SEVERAL[name](axes=grid) is grid
    assert [drawn(ax) > 0 for ax in grid] == [True, True, False]
    assert isinstance(SEVERAL[name](), viz.Piece)


def test_the_map_in_given_axes_holds_the_numbers(grid):
    viz.head_heatmap(heads(), ax=grid[0])
    np.testing.assert_array_equal(grid[0].images[0].get_array().filled(np.nan), [[1.0, 2.0], [np.nan, 4.0]])
    table = pd.DataFrame({"layer": [0, 1], "loss": [0.5, -2.0]})
    viz.contribution_bars(table, "loss", ax=grid[1])
    assert [bar.get_width() for bar in grid[1].patches] == [0.5, -2.0]


@pytest.mark.parametrize("name", ONE)
def test_what_is_no_axes_is_refused(name, grid):
    with pytest.raises(KVLensError, match="expected a matplotlib Axes .* got Figure"):
        ONE[name](ax=grid[0].figure)


@pytest.mark.parametrize("name", SEVERAL)
def test_too_few_axes_are_refused(name, grid):
    with pytest.raises(KVLensError, match=r"axes: expected 2 of them \(.*\), got 1"):
        SEVERAL[name](axes=grid[0])
    with pytest.raises(KVLensError, match="expected a matplotlib Axes .* got int"):
        SEVERAL[name](axes=[3, 4])

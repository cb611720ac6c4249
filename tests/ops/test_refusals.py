"""What the operations refuse beside wrong shapes (tests/ops/test_shapes.py), and their words."""

import pytest
import torch

from kvlens.ops.feature_maps import draw_projections
from kvlens.ops.induction import landscape_loss, naive_landscape_loss
from kvlens.ops.linear_attention import retnet_decay
from kvlens.ops.short_convolution import short_convolution

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own

PAIR = torch.tensor([0.0, 1.0], dtype=torch.float64)
REFUSED = [
    ("retnet_decay: n_heads must be at least 1, got 0", lambda: retnet_decay(0)),
    ("retnet_decay: n_heads must be a whole number of at least 1, got 1.5", lambda: retnet_decay(1.5)),
    ("retnet_decay: n_heads must be from 1 to 2**63 - 1", lambda: retnet_decay(2**70)),
    ("draw_projections: n_heads must be at least 1, got 0", lambda: draw_projections(0, 2, 3, "iid")),
    ("draw_projections: n_features must be at least 1, got -2", lambda: draw_projections(1, -2, 3, "iid")),
    ("draw_projections: d_head must be a whole number of at least 1", lambda: draw_projections(1, 2, 1.5, "iid")),
    ("kind must be one of iid, orthogonal, got 'i'; did you mean 'iid'?", lambda: draw_projections(1, 2, 3, "i")),
    *(("landscape: T must be at least 4", lambda f=f: f(PAIR, PAIR, 3)) for f in (landscape_loss, naive_landscape_loss)),
    *((f"1 < i < T - 1 = 6, got i = {i}", lambda i=i: naive_landscape_loss(PAIR, PAIR, 7, i)) for i in (1, 6)),
    (
        "needs an initial state of 3 rows, got 2",
        lambda: short_convolution(torch.ones(1, 4, 5), torch.ones(5, 4), initial_state=torch.ones(1, 2, 5)),
    ),
]


@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
def test_is_refused(words, call, refuses):
    refuses(words, call)

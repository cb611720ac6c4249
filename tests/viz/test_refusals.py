"""What the pictures refuse to draw, and their words."""

import functools

import pandas as pd
import pytest
import torch
from pictures import ARCS, SCORES, by_depth, demonstrations, heads, losses, shares
from tiny_text_model import softmax

from kvlens import viz

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own

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
    ("heads: layer 1 has heads 0 to ", lambda: viz.attention_under_bias(softmax(), "ab", "c", 1, heads=[99])),
    ("2 heads and 1 names", lambda: attention(["a"], 2, 1, 1, head_names=["x"])),
    ("max_tokens must be at least 4, got 3", lambda: attention(["a"], 1, 1, 1, max_tokens=3)),
    ("dpi must be at least 10, got 0", lambda: picture().save_png("x.png", dpi=0)),
    ("dpi must be from 10 to 2400", lambda: picture().save_png("x.png", dpi=10**9)),
    *(
        ("has no static figure; use save_html", lambda piece=piece: piece().save_png("a.png"))
        for piece in (lambda: viz.error_table(heads()), lambda: viz.generated_text({"a": "b"}))
    ),
    ("one layer and position has two rows", lambda: viz.depth_map(by_depth(position=0))),
    ("position must lie in 0..0", lambda: viz.induction_arcs(AB, 1, ARCS, SCORES)),
    *(
        (f"one row for each of 6 heads and 3 demonstrations, got {len(x)}", lambda x=x: viz.dual_view(losses(), x))
        for x in (demonstrations().iloc[1:], pd.concat([demonstrations()] * 2))
    ),
    ("coloring 'x' must be", lambda: shares(colorings={"x": torch.zeros(3, 2)})),
    *(("expected a path", lambda x=x: viz.generated_text({"a": "b"}).save_html(x)) for x in ("", "a\0b")),
    ("cannot write: ", functools.partial(viz.generated_text({"a": "b"}).save_html, "x" * 300)),
]


@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
def test_is_refused(words, call, refuses):
    refuses(words, call)

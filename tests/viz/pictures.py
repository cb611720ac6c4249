"""Tables and tokens that the tests draw, and one example of every picture."""

import base64
import functools
import gzip
import json
import math
import re

import pandas as pd
import torch
from tiny_text_model import PROMPT, TEXT, softmax

from kvlens import viz
from kvlens.analyses import HeadDetails, LinkedShares, circuit

NASTY = ["$x^2$", "🙂", "\n", "שלום", "<b>", "\x00", "_{"]
PATTERN = torch.tril(torch.ones(2, 3, 3)) / torch.tensor([1.0, 2.0, 3.0])[:, None]
PLACES = [(layer, head) for layer in range(2) for head in range(3)]
ARCS = pd.DataFrame(
    [(0, 1, 1, 1, 0.75, True)], columns=["layer", "head", "position", "prompt_position", "attention", "shifted"]
)
SCORES = pd.DataFrame([(0, 0, 0.1), (0, 1, 0.9)], columns=["layer", "head", "score"])


def heads(**columns) -> pd.DataFrame:
    """Layer 1 lacks its head 0."""
    table = pd.DataFrame({"layer": [0, 0, 1], "head": [0, 1, 1], "b_kv_norm": [1.0, 2.0, 4.0]})
    return table.assign(**columns)


def details_of(prompt: list[str], text: list[str]) -> HeadDetails:
    """Of two layers of three heads."""
    generator, n_keys = torch.Generator().manual_seed(0), len(prompt) + len(text)
    pattern = torch.randn(2, 3, len(text), n_keys, generator=generator)
    return HeadDetails(prompt, text, torch.arange(len(prompt), n_keys), pattern, pattern[..., : len(prompt)].mean(dim=2))


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
        dict(layer=layer, head=head, prompt_position=j, token=token, output_share=0.3 - 0.1 * j)
        for layer, head in PLACES
        for j, token in enumerate(tokens)
    ]
    table = pd.DataFrame(rows).assign(weight=0.2, cosine_before=-0.5, cosine_after=0.5)
    return table.assign(log_step_norm=table["prompt_position"] * math.log(2.0) - 800)  # exp of -800 alone is 0


def shares(n_prompt: int = 3, **changes) -> LinkedShares:
    """Of two layers of three heads, a text of two tokens."""
    w = torch.arange(12 * n_prompt, dtype=torch.float64).view(2, 3, 2, n_prompt)
    w = w / w.sum()
    arguments = dict(
        prompt=[f"p{j} " for j in range(n_prompt)],
        text=["t0 ", "t1 "],
        by_prompt=w.mean(dim=2),
        by_text=w.sum(dim=3),
        between=w.sum(dim=(0, 1)),
        next_tokens={"with prompt": [[("a", 0.5), ("b", 0.25)]] * 2},
    )
    return LinkedShares(**{**arguments, **changes})


def by_depth(**changes) -> pd.DataFrame:
    rows = [(layer, i, "ab"[i], 0.5 * layer - i, "x", "<script>") for layer in range(3) for i in range(2)]
    table = pd.DataFrame(rows, columns=["layer", "position", "token", "loss_change", "guess_with", "guess_without"])
    return table.assign(**changes)


@functools.cache
def a_circuit():
    """Of two layers of three heads."""
    prompts = ["The widget is purple. The", "The gadget is purple. The"]
    return circuit(softmax(), prompts, prompts[::-1], answer=" widget", rival=" gadget")


PICTURES = {  # each takes ``ax`` or ``axes``
    "head_heatmap": lambda **ax: viz.head_heatmap(heads(loss=[-1.0, math.nan, 0.5]), "loss", title="a map", **ax),
    "contribution_bars": lambda **ax: viz.contribution_bars(heads(part=NASTY[:3]), "b_kv_norm", part="part", **ax),
    "colored_tokens": lambda **ax: viz.colored_tokens(NASTY, [1, -2, math.nan, 0, math.inf, 3, 4], title="$t_{", **ax),
    "induction_arcs": lambda **ax: viz.induction_arcs(["a", "b", "\ud800", "a"], 2, ARCS, SCORES, **ax),
    "dual_view": lambda **ax: viz.dual_view(losses(), demonstrations(), **ax),
    "depth_map": lambda **axes: viz.depth_map(by_depth(), **axes),
    "circuit_view": lambda **ax: viz.circuit_view(a_circuit(), [20, 60], n_reasons=1, title="$a_{", **ax),
    "attention_view": lambda **axes: viz.attention_view(NASTY[:3], PATTERN - 0.25, n_prompt=1, **axes),
    "attention_view_under_bias": lambda **axes: viz.attention_view_under_bias(softmax(), PROMPT, TEXT, 1, heads=[0, 1], **axes),
}
SEVERAL = ("depth_map", "attention_view", "attention_view_under_bias")
"""Those that are drawn into two axes."""


def data_of(piece):
    (found,) = re.findall(r'<script type="text/plain" class="data">([A-Za-z0-9+/=]*)</script>', piece.body)
    return json.loads(gzip.decompress(base64.b64decode(found)))


def values(quantized):
    """As in ``static/base.js``."""
    codes = [ord(sign) - ord("#") for sign in quantized["cells"]]
    return [None if code < 0 else quantized["unit"] * (-(code + 1) / 2 if code % 2 else code / 2) for code in codes]

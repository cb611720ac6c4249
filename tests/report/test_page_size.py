"""A page of a real model's size stays small enough to send.

The numbers are random. The attention is more even, and so takes more bytes, than SmolLM2's or that of random weights.
"""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from tiny_text_model import PROMPT, TEXT, tiny_text_model

from kvlens.analyses import HeadDetails, LinkedShares
from kvlens.report import build_report
from kvlens.report.build import Report
from kvlens.report.page import build_page

N_PROMPT, N_TEXT, N_ARCS = 940, 60, 2000
LARGEST = 1_500_000


def attention(*sizes: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of softmax over the keys up to the query, of normal scores of standard deviation 3."""
    scores = 3 * torch.randn(*sizes, generator=generator)
    n_queries, n_keys = sizes[-2:]
    later = torch.ones(n_queries, n_keys, dtype=torch.bool).triu(n_keys - n_queries + 1)
    return scores.masked_fill(later, -torch.inf).softmax(dim=-1)


def of_size(report: Report, n_layers: int, n_heads: int) -> Report:
    """``report`` with the numbers of a model of this many heads, on a prompt of 940 tokens and a text of 60."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    prompt, text = [f" w{i}" for i in range(N_PROMPT)], [f" t{i}" for i in range(N_TEXT)]
    grid, n_heads_all = (n_layers, n_heads), n_layers * n_heads
    places = pd.DataFrame([divmod(i, n_heads) for i in range(n_heads_all)], columns=["layer", "head"])
    pattern = attention(*grid, N_TEXT, N_PROMPT + N_TEXT, generator=generator)
    strongest = torch.arange(N_PROMPT - 64, N_PROMPT + N_TEXT)
    details = HeadDetails(
        prompt=prompt,
        text=text,
        queries=torch.arange(N_PROMPT, N_PROMPT + N_TEXT),
        pattern=pattern,
        prompt_shares=pattern.mean(dim=2)[..., :N_PROMPT],
        bias_shares=normal(*grid, N_TEXT).sigmoid(),
        strongest=strongest,
        among=attention(*grid, len(strongest), len(strongest), generator=generator),
    )
    shares = pattern[..., :N_PROMPT].double() * normal(*grid, N_TEXT, 1).abs() / n_heads_all
    linked = LinkedShares(
        prompt=prompt,
        text=text,
        by_prompt=shares.mean(dim=2),
        by_text=shares.sum(dim=3),
        between=shares.sum(dim=(0, 1)),
        next_tokens={name: [[(" word", 0.1234)] * 5] * N_TEXT for name in report.linked.next_tokens},
        colorings={name: normal(*grid).exp() for name in report.linked.colorings},
    )
    numbers = report.tables["bias_by_head"].columns.drop(["layer", "head"])
    depth = pd.DataFrame(
        [(layer, i, text[i], " with", " without") for layer in range(n_layers + 1) for i in range(N_TEXT)],
        columns=["layer", "position", "token", "guess_with", "guess_without"],
    )
    copies = pd.DataFrame(
        dict(zip(("layer", "head"), divmod(i % n_heads_all, n_heads), strict=True))
        | dict(position=i % N_TEXT, prompt_position=i * 7 % N_PROMPT, shifted=False)
        for i in range(N_ARCS)
    )
    tables = {
        "bias_by_head": places.assign(**{name: normal(n_heads_all).exp().numpy() for name in numbers}),
        "prompt_by_depth": depth.assign(loss_change=normal(len(depth)).numpy()),
        "prompt_copies": copies.assign(attention=normal(N_ARCS).sigmoid().numpy()),
    }
    return replace(report, tables=report.tables | tables, heads=details, linked=linked)


@pytest.fixture(scope="module")
def report() -> Report:
    return build_report(tiny_text_model(), PROMPT, TEXT, model_name="tiny", new_tokens=3)


def test_the_page_of_a_real_models_size_on_a_thousand_tokens_is_small(report):
    n_layers, n_heads = 24, 14
    page = build_page(of_size(report, n_layers, n_heads)).to_html()
    assert f"layer {n_layers - 1}, head {n_heads - 1}" in page
    assert len(page.encode()) < LARGEST

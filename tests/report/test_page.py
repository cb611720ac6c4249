"""The head that matters is darkest in the map, first in the table, and the one that is shown; parameters are counted once;
a page of a real model's size stays small enough to send."""

import re
from dataclasses import replace
from html import unescape

import pandas as pd
import pytest
import torch
from tiny_hf import tiny_hf_model
from tiny_text_model import PROMPT, TEXT, tiny_text_model

from kvlens import HookedKVTransformer
from kvlens.analyses import HeadDetails, LinkedShares
from kvlens.report import build_report
from kvlens.report.build import ABLATION, Report, ranked_heads, ranking
from kvlens.report.example import example_for
from kvlens.report.page import build_page
from kvlens.report.summary import n_parameters


@pytest.fixture(scope="module")
def report():
    model = HookedKVTransformer.from_zoo("facts-linear")
    return build_report(model, *example_for("facts-linear"), model_name="facts-linear", new_tokens=1)


@pytest.fixture(scope="module")
def page(report):
    return unescape(build_page(report).to_html())


def cells(page):
    """The map's first table, in which the page chooses the darkest cell: color by head."""
    first = re.search(r'<figcaption>map of heads.*?<table class="heat[^>]*data-column="([^"]*)".*?</table>', page, re.DOTALL)
    found = re.findall(r'data-layer="(\d+)" data-head="(\d+)"[^>]*?class="(\w+)[^"]*"(?: style="--x:([\d.]+)%")?', first[0])
    return first[1], {(int(layer), int(head)): float(x or 0) for layer, head, kind, x in found if kind == "positive"}


def without_answer(report):
    return replace(report, explained=None)


def test_the_map_is_darkest_where_the_answer_loses_most_or_the_text_if_none_was_explained(report, page):
    for table, measure, given, html in (
        ("answer_heads", "nats", report, page),
        ("bias_by_head", "ablation_kl", without_answer(report), unescape(build_page(without_answer(report)).to_html())),
    ):
        column, colors = cells(html)
        heads = report.tables[table]
        strongest = heads.loc[heads[measure].idxmax()]
        matters = int(strongest["layer"]), int(strongest["head"])
        assert column == ranking(given)
        assert max(colors, key=colors.get) == matters and colors[matters] == pytest.approx(100)


def test_the_table_falls_as_its_title_says(report, page):
    ranked, by = ranked_heads(report), "what 'donkey' loses without the head, nats"
    assert ranked[by].is_monotonic_decreasing and not ranked[ABLATION].is_monotonic_decreasing
    assert f"heads, the largest first: {by}" in page and "Ordered by their effect on the answer" in page
    assert f"<tbody><tr><td>L{int(ranked.iloc[0]['layer'])}H{int(ranked.iloc[0]['head'])}</td>" in page
    assert (
        ranking(without_answer(report)) == ABLATION and ranked_heads(without_answer(report))[ABLATION].is_monotonic_decreasing
    )


def test_what_the_answer_loses_without_a_head_is_a_pass_in_which_it_sees_bos_alone():
    """In one pass over prompt, text and answer, with the scores of the prompt's other tokens at minus infinity."""
    model = tiny_text_model(attention="softmax", kv_shift=None, dtype=torch.float64)
    made = build_report(model, PROMPT, TEXT, new_tokens=1)
    found, claim = made.explained, made.explained.claims.iloc[made.explained.about]
    prompt, text = model.to_tokens(PROMPT)[0], model.to_tokens(TEXT, prepend_bos=False)[0]
    tokens = torch.cat([prompt, text, found.response_tokens])
    places = len(prompt) + len(text) + torch.arange(int(claim["start"]), int(claim["stop"]))

    def log_p(hooks):
        logits = model.run_with_hooks(tokens[None], fwd_hooks=hooks)[0, places - 1]
        return logits.log_softmax(dim=-1).gather(-1, tokens[places][:, None]).sum()

    for row in made.tables["answer_heads"].itertuples():

        def blind(scores, hook, head=row.head):
            scores[:, head, len(prompt) :, 1 : len(prompt)] = -torch.inf
            return scores

        fall = log_p([]) - log_p([(f"blocks.{row.layer}.attn.hook_attn_scores", blind)])
        assert row.nats == pytest.approx(float(fall), abs=1e-9)
    assert made.tables["answer_heads"]["nats"].abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_tied_unembedding_counts_once(kind):
    tied, own = (tiny_hf_model(kind, tie_word_embeddings=tied) for tied in (True, False))
    counts = [n_parameters(HookedKVTransformer.from_pretrained(kind, hf_model=x, tokenizer=None)) for x in (tied, own)]
    assert counts[1] - counts[0] == own.num_parameters() - tied.num_parameters() == own.get_input_embeddings().weight.numel()


N_PROMPT, N_TEXT, N_ARCS = 940, 60, 2000
LARGEST = 1_500_000


def attention(*sizes: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of softmax over the keys up to the query, of normal scores of standard deviation 3."""
    scores = 3 * torch.randn(*sizes, generator=generator)
    n_queries, n_keys = sizes[-2:]
    later = torch.ones(n_queries, n_keys, dtype=torch.bool).triu(n_keys - n_queries + 1)
    return scores.masked_fill(later, -torch.inf).softmax(dim=-1)


def of_size(tiny_report: Report, n_layers: int, n_heads: int) -> Report:
    """``tiny_report`` with the numbers of a model of this many heads, on a prompt of 940 tokens and a text of 60."""
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
        next_tokens={name: [[(" word", 0.1234)] * 5] * N_TEXT for name in tiny_report.linked.next_tokens},
        colorings={name: normal(*grid).exp() for name in tiny_report.linked.colorings},
    )
    numbers = tiny_report.tables["bias_by_head"].columns.drop(["layer", "head"])
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
    return replace(tiny_report, tables=tiny_report.tables | tables, heads=details, linked=linked)


@pytest.fixture(scope="module")
def tiny_report() -> Report:
    return build_report(tiny_text_model(), PROMPT, TEXT, model_name="tiny", new_tokens=3)


def test_the_page_of_a_real_models_size_on_a_thousand_tokens_is_small(tiny_report):
    n_layers, n_heads = 24, 14
    large_page = build_page(of_size(tiny_report, n_layers, n_heads)).to_html()
    assert f"layer {n_layers - 1}, head {n_heads - 1}" in large_page
    assert len(large_page.encode()) < LARGEST

"""Attention that keys receive, and Attention Matching's fits, against plain forms."""

import sys

import pytest
import torch
from ops_cases import normal

from kvlens.ops.key_scores import (
    attention_received,
    expected_log_attention,
    masses,
    match_among,
    match_keys,
    match_mass,
    match_output,
    naive_attention_received,
    naive_expected_log_attention,
)
from kvlens.ops.landmarks import PromptKeys, Queries, naive_fit_weights
from kvlens.ops.softmax_features import ScoreRule

BATCH, KV, GROUP, D, KEYS, ROWS, SCALE = 2, 3, 2, 5, 7, 40, 1.7


def prompt_pass() -> dict[str, torch.Tensor]:
    """Queries and keys of a prompt, token by token."""
    distance = torch.arange(KEYS, 0, -1)
    return dict(
        q=normal(BATCH, KEYS, KV * GROUP, D, seed=1),
        query_distance=distance.expand(BATCH, KEYS),
        counts=torch.ones(BATCH, KEYS, dtype=torch.float64),
        keys=normal(BATCH, KV, KEYS, D, seed=2),
        distance=distance.expand(BATCH, KV, KEYS),
        weight=1 + normal(BATCH, KV, KEYS, seed=3).square(),
    )


@pytest.mark.parametrize("sink", [None, normal(KV * GROUP, seed=4)], ids=["no sink", "sink"])
@pytest.mark.parametrize("at_once", [2**20, 100], ids=["one block", "blocks"])
def test_received_attention_is_the_sum_over_queries(sink, at_once, monkeypatch):
    monkeypatch.setattr(sys.modules["kvlens.ops.key_scores"], "BLOCK_NUMBERS", at_once)
    given = prompt_pass()
    got = attention_received(**given, rule=ScoreRule(SCALE), sink=sink)
    for b in range(BATCH):
        for h in range(KV * GROUP):
            keys, weight = given["keys"][b, h // GROUP], given["weight"][b, h // GROUP]
            of_head = None if sink is None else float(sink[h])
            expected = naive_attention_received(given["q"][b, :, h], keys, weight, SCALE, of_head)
            torch.testing.assert_close(got[b, h], expected, rtol=1e-12, atol=1e-13)


def test_padding_neither_gives_nor_receives_attention():
    given = prompt_pass()
    real = torch.arange(KEYS) < torch.tensor([[KEYS], [KEYS - 3]])
    given |= dict(counts=real.double(), weight=given["weight"] * real[:, None])
    distance = (torch.tensor([KEYS, KEYS - 3])[:, None] - torch.arange(KEYS)).clamp(min=1)
    given |= dict(query_distance=distance, distance=distance[:, None].expand(-1, KV, -1))
    got = attention_received(**given, rule=ScoreRule(SCALE))
    by_query = ("q", "query_distance", "counts")
    alone = {name: x[1:, : KEYS - 3] if name in by_query else x[1:, :, : KEYS - 3] for name, x in given.items()}
    assert (got[1, :, KEYS - 3 :] == 0).all()
    torch.testing.assert_close(got[1:, :, : KEYS - 3], attention_received(**alone, rule=ScoreRule(SCALE)), rtol=1e-13, atol=0)


def test_expected_attention_is_that_of_normal_queries():
    q, keys = normal(BATCH, ROWS, KV * GROUP, D, seed=5), normal(BATCH, KV, KEYS, D, seed=6)
    counts = (torch.arange(ROWS) >= 4).double().expand(BATCH, ROWS)
    got = expected_log_attention(q, counts, keys, SCALE)
    for b in range(BATCH):
        for h in range(KV * GROUP):
            for j in range(KEYS):
                expected = naive_expected_log_attention(q[b, 4:, h], keys[b, h // GROUP, j], SCALE)
                assert float(got[b, h, j]) == pytest.approx(expected, rel=1e-11)


def reading() -> tuple[Queries, PromptKeys, torch.Tensor]:
    """Queries after a prompt, its keys, and E by cell; how much attention is left to the prompt is arbitrary."""
    keys, values = normal(BATCH, KV, KEYS, D, seed=7), normal(BATCH, KV, KEYS, D, seed=8)
    q = normal(BATCH, ROWS, KV * GROUP, D, seed=9)
    distance = torch.arange(KEYS, 0, -1).expand(BATCH, KV, KEYS).clone()
    scores = torch.einsum("bihd,bhjd->bihj", q, keys.repeat_interleave(GROUP, dim=1)) / SCALE
    log_n = scores.logsumexp(dim=-1) + normal(BATCH, ROWS, KV * GROUP, seed=10).square()
    e = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    e = e.unflatten(2, (KV, GROUP)).transpose(1, 2).reshape(BATCH * KV, ROWS * GROUP, KEYS)
    queries = Queries(q, normal(BATCH, ROWS, KV * GROUP, D, seed=11), log_n, torch.arange(ROWS))
    return queries, PromptKeys(keys, values, distance, None, ScoreRule(SCALE)), e


def naive_pursuit(e: torch.Tensor, r: int) -> list[int]:
    """The key that correlates most with the mass that is left, all weights fitted after each."""
    mass, chosen = e.sum(dim=1), []
    left = mass
    for _ in range(r):
        gain = e.mT @ left
        gain[chosen] = -torch.inf
        chosen.append(int(gain.argmax()))
        w = torch.linalg.lstsq(e[:, chosen], mass[:, None]).solution.clamp(min=1e-12)
        left = mass - (e[:, chosen] @ w)[:, 0]
    return chosen


def test_keys_are_matched_by_attention_and_by_pursuit():
    queries, prompt, e = reading()
    sums = masses(queries, prompt)
    by_attention, by_pursuit = match_keys(sums, 3, "attention").keys, match_keys(sums, 4, "pursuit").keys
    for cell in range(BATCH * KV):
        attention = (e[cell] / e[cell].sum(dim=1, keepdim=True)).square().mean(dim=0).sqrt()
        assert by_attention[cell].tolist() == attention.topk(3).indices.tolist()
        assert by_pursuit[cell].tolist() == naive_pursuit(e[cell], 4)


def test_mass_and_output_are_matched_by_least_squares():
    queries, prompt, e = reading()
    sums = masses(queries, prompt)
    matched = match_keys(sums, 4, "pursuit")
    index = matched.keys
    w = match_mass(matched, torch.ones_like(index, dtype=torch.bool))
    values = match_output(queries, prompt, index, w)
    # below: the ridge is 1e-9 of the diagonal, times a condition number of the four keys of hundreds, of their shares thousands
    for cell in range(BATCH * KV):
        some, all_values = e[cell][:, index[cell]], prompt.values.flatten(0, 1)[cell]
        torch.testing.assert_close(w[cell], naive_fit_weights(some, e[cell].sum(dim=1)), rtol=1e-6, atol=1e-8)  # ridge
        x = some * w[cell]
        x = (x / x.sum(dim=1, keepdim=True))[:, w[cell] > 0]
        y = e[cell] @ all_values / e[cell].sum(dim=1, keepdim=True)
        torch.testing.assert_close(values[cell][w[cell] > 0], torch.linalg.lstsq(x, y).solution, rtol=1e-5, atol=1e-6)  # ridge


def test_every_key_matches_itself():
    queries, prompt, _ = reading()
    sums = masses(queries, prompt)
    matched = match_keys(sums, KEYS, "pursuit")
    index = matched.keys
    w = match_mass(matched, torch.ones_like(index, dtype=torch.bool))
    torch.testing.assert_close(w, torch.ones_like(w), rtol=0, atol=1e-6)  # the ridge is 1e-9 of the diagonal
    own = prompt.values.flatten(0, 1).gather(1, index[..., None].expand(-1, -1, D))
    torch.testing.assert_close(match_output(queries, prompt, index, w), own, rtol=0, atol=1e-5)  # likewise, of shares


@pytest.mark.parametrize("by", ["attention", "pursuit"])
def test_matching_head_by_head_from_the_queries_rows_is_matching(monkeypatch, by):
    queries, prompt, _ = reading()
    some = queries.part(slice(0, 2))
    whole = match_among(some, prompt, 3, by)
    monkeypatch.setattr("kvlens.ops.landmarks.NUMBERS_AT_ONCE", 1)
    for a, b in zip(whole, match_among(some, prompt, 3, by), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)

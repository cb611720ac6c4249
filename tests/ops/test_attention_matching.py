"""Attention Matching's choice of keys and its fits, against plain forms."""

import pytest
import torch
from ops_cases import normal

from kvlens.ops.attention_matching import (
    masses,
    match_among,
    match_keys,
    match_mass,
    match_output,
)
from kvlens.ops.landmarks import PromptKeys, Queries, naive_fit_weights
from kvlens.ops.softmax_features import ScoreRule

BATCH, KV, GROUP, D, KEYS, ROWS, SCALE = 2, 3, 2, 5, 7, 40, 1.7


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

"""The effect of tokens on the state before them: the fast form against a loop over tokens, and properties of a conversion."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import laws, normal

from kvlens.ops.linear_attention import LinearAttentionState, carry_state, naive_carry_state, naive_linear_attention

BATCH, HEAD, D_PHI, D_HEAD = 2, 3, 6, 5
EPS = torch.finfo(torch.float64).eps
seeds, counts = st.integers(0, 10_000), st.integers(0, 17)
FREQUENCIES = torch.tensor([1.0, 0.3])  # of 4 of the 6 features
DECAY = torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64)


def state(seed, norm=True):
    k_sum = normal(BATCH, HEAD, D_PHI, seed=seed + 1) if norm else None
    return LinearAttentionState(normal(BATCH, HEAD, D_PHI, D_HEAD, seed=seed), k_sum)


def row(position, adjacent_pairs):
    angles = torch.as_tensor(position, dtype=torch.float64).reshape(-1, 1) * FREQUENCIES.double()
    angles = angles.repeat_interleave(2, dim=1) if adjacent_pairs else angles.repeat(1, 2)
    return angles.cos(), angles.sin()


def close(a, b, n_tokens):
    # each step of the loop rounds a rotation (3 roundings) and a decay; the angle of position n carries n eps
    bound = 8 * (n_tokens + 2) * EPS * (a.kv.abs().max() + b.kv.abs().max())
    assert (a.kv - b.kv).abs().max() <= bound
    if a.k_sum is None or b.k_sum is None:
        assert a.k_sum is b.k_sum
    else:
        assert (a.k_sum - b.k_sum).abs().max() <= 4 * EPS * (a.k_sum.abs().max() + 1)


@laws
@given(seeds, counts, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_equals_the_loop_over_tokens(seed, n_tokens, decays, turns, adjacent_pairs, norm):
    before, decay = state(seed, norm), DECAY if decays else None
    rotation = row(n_tokens, adjacent_pairs) if turns else None
    got = carry_state(before, n_tokens, decay=decay, rotation=rotation, adjacent_pairs=adjacent_pairs)
    expected = naive_carry_state(before, n_tokens, decay, FREQUENCIES.double() if turns else None, adjacent_pairs)
    close(got, expected, n_tokens)


@laws
@given(seeds, counts, counts, st.booleans())
def test_carrying_over_two_pieces_is_carrying_over_both(seed, m, n, adjacent_pairs):
    before = state(seed)

    def carried(start, n_tokens):
        return carry_state(start, n_tokens, None, DECAY, row(n_tokens, adjacent_pairs), adjacent_pairs)

    close(carried(carried(before, m), n), carried(before, m + n), m + n)


@laws
@given(seeds, st.booleans())
def test_with_what_was_written_it_is_the_recurrence_from_the_old_state(seed, decays):
    # without a rotation: A after the tokens is what the recurrence gives when it starts from the old state
    pos, decay, before = 7, DECAY if decays else None, state(seed)
    k, v = normal(BATCH, pos, HEAD, D_PHI, seed=seed + 5), normal(BATCH, pos, HEAD, D_HEAD, seed=seed + 6)
    whole = naive_linear_attention(k, k, v, k, k, decay, None, before).state
    written = naive_linear_attention(k, k, v, k, k, decay).state
    close(carry_state(before, pos, written, decay), whole, 10 * pos)


def test_rows_have_their_own_number_of_tokens():
    before, lengths = state(3), torch.tensor([4, 9])
    got = carry_state(before, lengths, decay=DECAY, rotation=row(lengths, False))
    for i, n in enumerate(lengths.tolist()):
        one = carry_state(LinearAttentionState(before.kv[i : i + 1], before.k_sum[i : i + 1]), n, None, DECAY, row(n, False))
        assert torch.allclose(got.kv[i : i + 1], one.kv, rtol=0, atol=1e-15)


def test_nothing_before_leaves_what_was_written_and_nothing_at_all_is_refused():
    written = state(1)
    assert torch.equal(carry_state(None, 5, written, DECAY).kv, written.kv)  # it has decayed already
    with pytest.raises(ValueError, match="before the tokens, what they wrote, or both"):
        carry_state(None, 5)

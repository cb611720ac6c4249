"""Linear attention: the fast forms against the loop, the loop against hand computation and a second loop.

The effect of tokens on the state before them, against a loop over tokens.
"""

import functools
import itertools
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import (
    assert_within_rounding,
    double,
    flatten,
    laws,
    map_tensors,
    normal,
    random_mask,
    values_and_gradients,
)

from kvlens.ops.linear_attention import (
    LinearAttentionState,
    carry_state,
    causal_scores,
    chunked_linear_attention,
    final_state,
    naive_carry_state,
    naive_linear_attention,
    parallel_linear_attention,
    read_state,
    rebase_state,
    recurrent_linear_attention,
    retnet_decay,
    running_normalizer,
)
from kvlens.ops.rotary import rotate

BATCH, POS, HEAD, KV_HEAD, D_PHI, D_HEAD = 2, 11, 6, 3, 5, 7
# A numerator: d_phi products a score, pos of them and a state, a power of gamma (at most pos roundings) on each, in two orders.
# A gradient passes through the same twice, and sums over batch or heads at most.
N_TERMS = 2 * (D_PHI + D_HEAD + 3 * POS) + BATCH * HEAD

FAST = {
    "parallel": parallel_linear_attention,
    "chunked": chunked_linear_attention,
    "chunks of 1": functools.partial(chunked_linear_attention, chunk_size=1),
    "chunks of 4": functools.partial(chunked_linear_attention, chunk_size=4),  # 11 = 4 + 4 + 3
    "chunks of 11": functools.partial(chunked_linear_attention, chunk_size=POS),
    "recurrent": recurrent_linear_attention,
}
FORMS = {"naive": naive_linear_attention, **FAST}
seeds = st.integers(0, 10_000)
form_names = st.sampled_from(list(FORMS))
# normalizer: none, the numerator's own features (the same tensor objects), or other ones (RoPE after the feature map)
norms = st.sampled_from(["none", "same", "other"])


@pytest.fixture(autouse=True, scope="module")
def short_segments():
    """Chunks of 4 come in segments of 8, so that a text of 11 has two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["kvlens.ops.linear_attention"], "SEGMENT_ON_CPU", 8)
        yield


def case(norm="same", decay=False, mask=False, state=True, seed=0, pos=POS, n_kv=KV_HEAD, dtype=torch.float64):
    draw = functools.partial(normal, dtype=dtype)
    q, k = draw(BATCH, pos, HEAD, D_PHI, seed=seed), draw(BATCH, pos, n_kv, D_PHI, seed=seed + 1)
    arguments = {"phi_q": q, "phi_k": k, "v": draw(BATCH, pos, n_kv, D_HEAD, seed=seed + 2)}
    if norm == "other":
        arguments["norm_q"] = draw(BATCH, pos, HEAD, D_PHI, seed=seed + 3)
        arguments["norm_k"] = draw(BATCH, pos, n_kv, D_PHI, seed=seed + 4)
    if decay:
        arguments["decay"] = torch.linspace(0.5, 0.95, n_kv, dtype=dtype)
    if mask:
        arguments["mask"] = random_mask(BATCH, pos, seed + 5)
    if state:
        k_sum = None if norm == "none" else draw(BATCH, n_kv, D_PHI, seed=seed + 7)
        arguments["initial_state"] = LinearAttentionState(draw(BATCH, n_kv, D_PHI, D_HEAD, seed=seed + 6), k_sum)
    return arguments


def form_of(name, norm):
    """The form as a function of the tensors of a case; "same" hands over the very same objects, as callers do."""
    form = FORMS[name]
    if norm != "same":
        return form
    return lambda phi_q, phi_k, v, **rest: form(phi_q, phi_k, v, phi_q, phi_k, **rest)


def cut(arguments, first, last):
    """Tokens first .. last - 1 of a case, without its state."""
    return {
        name: value[:, first:last] if name not in ("decay", "initial_state") else value
        for name, value in arguments.items()
        if name != "initial_state"
    }


@functools.cache
def of_the_loop(norm, decay, mask, state, dtype):
    """Values and gradients of a case, and the sums of their terms' sizes, once for all forms."""
    exact = double(case(norm, decay, mask, state, dtype=dtype))
    return [values_and_gradients(form_of("naive", norm), exact, absolute=absolute) for absolute in (False, True)]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(
    ("norm", "decay"), [("none", False), ("none", True), ("same", False), ("other", False), ("same", True)]
)
@pytest.mark.parametrize("name", FAST)
def test_values_and_gradients_equal_the_loop(name, norm, decay, mask, state, dtype):
    expected, sizes = of_the_loop(norm, decay, mask, state, dtype)
    got = values_and_gradients(form_of(name, norm), case(norm, decay, mask, state, dtype=dtype))
    assert len(got) > 4
    assert_within_rounding(got, expected, sizes, N_TERMS)


# --- answers known by hand, and the recurrence as the field writes it ---


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_from_a_pencil(name):
    # one head, d_phi = 2, d_head = 1, gamma = 1/2; b_KV = (8, 4), b_D = (1, 2)
    # keys (1, 0), (1, 1), values 3, 5, queries (1, 2), (1, 1):
    # A_0 = (4, 2) + (3, 0) = (7, 2)          z_0 = 7 + 4 = 11        D_0 = (2, 2)   n_0 = 2 + 4 = 6
    # A_1 = (3.5, 1) + (5, 5) = (8.5, 6)      z_1 = 8.5 + 6 = 14.5    D_1 = (3, 3)   n_1 = 6
    q = torch.tensor([[1.0, 2], [1, 1]]).view(1, 2, 1, 2)
    k = torch.tensor([[1.0, 0], [1, 1]]).view(1, 2, 1, 2)
    v = torch.tensor([3.0, 5]).view(1, 2, 1, 1)
    state = LinearAttentionState(torch.tensor([8.0, 4]).view(1, 1, 2, 1), torch.tensor([1.0, 2]).view(1, 1, 2))
    out = FORMS[name](q, k, v, q, k, torch.tensor([0.5]), None, state)
    assert out.numerator.flatten().tolist() == [11, 14.5]
    assert out.normalizer.flatten().tolist() == [6, 6]
    assert out.state.kv.flatten().tolist() == [8.5, 6]
    assert out.state.k_sum.flatten().tolist() == [3, 3]


@pytest.mark.parametrize("decay", [False, True])
def test_the_loop_equals_the_recurrence_that_the_field_writes(decay):
    # S_t = S_{t-1} + k_t v_t^T, o_t = q_t S_t (with RetNet's factor on S_{t-1}), initial and final state included
    arguments = case("none", decay=decay)
    q, k, v, initial = arguments["phi_q"], arguments["phi_k"], arguments["v"], arguments["initial_state"].kv
    gamma = arguments.get("decay", torch.ones(KV_HEAD, dtype=torch.float64))
    outputs, final = torch.zeros(BATCH, POS, HEAD, D_HEAD, dtype=torch.float64), torch.zeros_like(initial)
    for b in range(BATCH):
        for h in range(HEAD):
            g = h // (HEAD // KV_HEAD)
            S = initial[b, g]
            for t in range(POS):
                S = gamma[g] * S + torch.outer(k[b, t, g], v[b, t, g])
                outputs[b, t, h] = q[b, t, h] @ S
            final[b, g] = S
    got = naive_linear_attention(**arguments)
    sizes = naive_linear_attention(**map_tensors(torch.abs, arguments))
    assert_within_rounding(flatten(got), [outputs, final], flatten(sizes), N_TERMS)


def test_retnet_decay_by_hand():
    assert retnet_decay(3).tolist() == [31 / 32, 63 / 64, 127 / 128]
    assert retnet_decay(3).dtype == torch.float64


# --- laws ---


@laws
@given(seeds, form_names, norms, st.booleans(), st.booleans(), st.integers(1, POS - 1))
def test_cut_anywhere_and_resume(seed, name, norm, decay, mask, at):
    arguments = case(norm, decay, mask, seed=seed)
    form = form_of(name, norm)

    def in_two(**whole):
        first = form(**cut(whole, 0, at), initial_state=whole["initial_state"])
        second = form(**cut(whole, at, POS), initial_state=first.state)
        parts = [torch.cat(pair, dim=1) for pair in zip(flatten(first[:2]), flatten(second[:2]), strict=True)]
        return (*parts, second.state)

    whole = values_and_gradients(form, arguments)
    sizes = values_and_gradients(form_of("naive", norm), arguments, absolute=True)
    assert_within_rounding(values_and_gradients(in_two, arguments), whole, sizes, 2 * N_TERMS)


@laws
@given(seeds, form_names, norms, st.booleans(), st.booleans(), st.integers(1, POS - 2))
def test_nothing_looks_ahead(seed, name, norm, decay, mask, i):
    arguments = map_tensors(lambda t: t.requires_grad_(), case(norm, decay, mask, seed=seed))
    out = form_of(name, norm)(**arguments)
    early = sum(part[:, : i + 1].sum() for part in flatten(out[:2]))
    by_token = [arguments[x] for x in ("phi_q", "phi_k", "v", "norm_q", "norm_k") if x in arguments]
    for gradient in torch.autograd.grad(early, by_token):
        assert gradient[:, : i + 1].any()
        assert not gradient[:, i + 1 :].any()  # zero, not small


@laws
@given(seeds, form_names, norms, st.booleans(), st.booleans())
def test_linear_in_the_values_and_the_state_together(seed, name, norm, decay, mask):
    a = case(norm, decay, mask, seed=seed)
    b = {
        **a,
        "v": case(seed=seed + 50)["v"],
        "initial_state": a["initial_state"]._replace(kv=case(seed=seed + 50)["initial_state"].kv),
    }
    both = {
        **a,
        "v": 2 * a["v"] - 3 * b["v"],
        "initial_state": a["initial_state"]._replace(kv=2 * a["initial_state"].kv - 3 * b["initial_state"].kv),
    }
    form = form_of(name, norm)
    got, of_a, of_b = form(**both), form(**a), form(**b)
    sizes = [form_of("naive", norm)(**map_tensors(torch.abs, x)) for x in (a, b)]
    expected = [2 * of_a.numerator - 3 * of_b.numerator, 2 * of_a.state.kv - 3 * of_b.state.kv]
    sizes = [2 * sizes[0].numerator + 3 * sizes[1].numerator, 2 * sizes[0].state.kv + 3 * sizes[1].state.kv]
    assert_within_rounding([got.numerator, got.state.kv], expected, sizes, 2 * N_TERMS)
    if norm != "none":
        assert torch.equal(got.normalizer, of_a.normalizer)


@laws
@given(seeds, form_names, norms, st.booleans(), st.booleans())
def test_padding_is_the_removal_of_the_padded_tokens(seed, name, norm, decay, nothing):
    """Also where a row is padding alone: no tokens leave the state as it is."""
    arguments = case(norm, decay, mask=True, seed=seed)
    mask, naive = arguments["mask"], form_of("naive", norm)
    mask[0] &= not nothing
    out = form_of(name, norm)(**arguments)
    for row in range(BATCH):
        real = mask[row]
        alone = {
            x: t[row : row + 1, real] if x not in ("decay", "initial_state") else t for x, t in arguments.items() if x != "mask"
        }
        alone["initial_state"] = map_tensors(lambda t, row=row: t[row : row + 1], arguments["initial_state"])
        sizes = flatten(naive(**map_tensors(torch.abs, alone)))
        got = [t[row : row + 1, real] for t in flatten(out[:2])] + [t[row : row + 1] for t in flatten(out.state)]
        for expected in (naive(**alone), form_of(name, norm)(**alone)):
            assert_within_rounding(got, flatten(expected), sizes, N_TERMS)


@laws
@given(seeds, form_names, norms, st.booleans())
def test_a_decay_of_one_is_no_decay(seed, name, norm, mask):
    arguments = case(norm, False, mask, seed=seed)
    form = form_of(name, norm)
    with_ones = form(**arguments, decay=torch.ones(KV_HEAD, dtype=torch.float64))
    for got, expected in zip(flatten(with_ones), flatten(form(**arguments)), strict=True):
        assert torch.equal(got, expected)


@laws
@given(seeds, form_names, norms, st.booleans(), st.booleans(), st.sampled_from([1, 2, 3]))
def test_grouped_heads_equal_repeated_heads(seed, name, norm, decay, mask, n_kv):
    arguments = case(norm, decay, mask, seed=seed, n_kv=n_kv)
    group = HEAD // n_kv
    repeated = dict(arguments)
    for x, axis in (("phi_k", 2), ("v", 2), ("norm_k", 2), ("decay", 0)):
        if x in arguments:
            repeated[x] = arguments[x].repeat_interleave(group, dim=axis)
    repeated["initial_state"] = map_tensors(lambda t: t.repeat_interleave(group, dim=1), arguments["initial_state"])
    form = form_of(name, norm)
    got, expected = form(**arguments), form(**repeated)
    sizes = form_of("naive", norm)(**map_tensors(torch.abs, repeated))
    repeated_state = map_tensors(lambda t: t.repeat_interleave(group, dim=1), got.state)
    assert_within_rounding(flatten((*got[:2], repeated_state)), flatten(expected), flatten(sizes), N_TERMS)


@laws
@given(seeds, st.integers(1, 30), norms, st.booleans(), st.booleans(), st.integers(1, 19))
def test_the_chunk_size_changes_nothing(seed, chunk_size, norm, decay, mask, pos):
    arguments = case(norm, decay, mask, seed=seed, pos=pos)
    extra = (arguments["phi_q"], arguments["phi_k"]) if norm == "same" else ()
    keywords = {x: t for x, t in arguments.items() if x not in ("phi_q", "phi_k", "v")}
    got = chunked_linear_attention(
        arguments["phi_q"], arguments["phi_k"], arguments["v"], *extra, **keywords, chunk_size=chunk_size
    )
    expected = form_of("naive", norm)(**arguments)
    sizes = form_of("naive", norm)(**map_tensors(torch.abs, arguments))
    assert_within_rounding(flatten(got), flatten(expected), flatten(sizes), N_TERMS + 6 * 19)


@pytest.mark.parametrize("name", FORMS)
def test_the_arguments_are_left_as_they_were(name):
    arguments = case("other", decay=True, mask=True)
    before = map_tensors(torch.clone, arguments)
    FORMS[name](**arguments)
    assert all(
        torch.equal(a, b) for a, b in zip(flatten(tuple(arguments.values())), flatten(tuple(before.values())), strict=True)
    )


# --- the pieces ---


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_scores_normalizer_and_final_state_are_those_of_the_loop(mask, decay):
    arguments = case("other", decay, mask)
    q, k, v, norm_q, norm_k = (arguments[x] for x in ("phi_q", "phi_k", "v", "norm_q", "norm_k"))
    gamma, real, state = arguments.get("decay"), arguments.get("mask"), arguments["initial_state"]
    expected = naive_linear_attention(**arguments)
    sizes = naive_linear_attention(**map_tensors(torch.abs, arguments))
    normalizer = running_normalizer(norm_q, norm_k, real, state.k_sum)
    last = final_state(k, v, norm_k, gamma, real, state)
    assert_within_rounding(
        [normalizer, *last], [expected.normalizer, *expected.state], [sizes.normalizer, *sizes.state], N_TERMS
    )
    # the scores, entry by entry: q_i . k_j gamma^(real tokens in j+1 .. i), 0 for j > i and for padding
    scores = causal_scores(q, k, gamma, real)
    assert scores.shape == (BATCH, HEAD, POS, POS)
    torch.testing.assert_close(causal_scores(q[:, 2:], k, gamma, real), scores[:, :, 2:], rtol=1e-13, atol=1e-13)
    is_real = torch.ones(BATCH, POS, dtype=torch.bool) if real is None else real
    for b, h, i, j in itertools.product(range(BATCH), range(HEAD), range(POS), range(POS)):
        if j > i or not is_real[b, j]:
            assert scores[b, h, i, j] == 0
            continue
        g = h // (HEAD // KV_HEAD)
        factor = 1.0 if gamma is None else float(gamma[g]) ** int(is_real[b, j + 1 : i + 1].sum())
        product = q[b, i, h] * k[b, j, g] * factor
        assert abs(scores[b, h, i, j] - product.sum()) <= N_TERMS * torch.finfo(torch.float64).eps * product.abs().sum()


@laws
@given(seeds, st.booleans(), st.sampled_from([1, BATCH]), st.sampled_from([KV_HEAD, HEAD]))
def test_reading_a_state_is_a_query_against_it(seed, decay, batch, n_kv):
    q, kv = normal(BATCH, POS, HEAD, D_PHI, seed=seed), normal(batch, n_kv, D_PHI, D_HEAD, seed=seed + 1)
    steps = torch.randint(0, 9, (batch, POS), generator=torch.Generator().manual_seed(seed))
    gamma = torch.linspace(0.5, 0.9, n_kv, dtype=torch.float64) if decay else None
    got = read_state(q, kv, gamma, steps if decay else None)
    for b in range(BATCH):
        for h in range(HEAD):
            g, row = h // (HEAD // n_kv), b % batch
            factor = gamma[g] ** steps[row] if decay else torch.ones(POS, dtype=torch.float64)
            expected = factor[:, None] * (q[b, :, h] @ kv[row, g])
            size = factor[:, None] * (q[b, :, h].abs() @ kv[row, g].abs())
            assert_within_rounding([got[b, :, h]], [expected], [size], 2 * D_PHI + 4)


def test_a_decaying_state_cannot_be_read_without_steps():
    with pytest.raises(ValueError, match="steps"):
        read_state(normal(1, 2, 3, 4, seed=1), normal(1, 3, 4, 5, seed=2), torch.ones(3, dtype=torch.float64))


def angles_of(m, rotary_dim, adjacent_pairs):
    """cos and sin [rotary_dim] of position m."""
    angles = m * 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = angles.repeat_interleave(2) if adjacent_pairs else angles.repeat(2)
    return angles.cos(), angles.sin()


@laws
@given(seeds, st.booleans(), st.sampled_from([2, 4]), st.integers(0, 400), st.integers(0, 400))
def test_rebasing_moves_the_origin(seed, adjacent_pairs, rotary_dim, a, b):
    kv, q = normal(BATCH, HEAD, D_PHI, D_HEAD, seed=seed), normal(BATCH, POS, HEAD, D_PHI, seed=seed + 1)

    def rebased(state, m):
        return rebase_state(state, *angles_of(m, rotary_dim, adjacent_pairs), adjacent_pairs)

    def at(m):
        return rotate(q, *angles_of(m, rotary_dim, adjacent_pairs), adjacent_pairs)

    eps = torch.finfo(torch.float64).eps
    # an angle of m carries m * eps; a turn rounds 4 times
    tolerance = (2 * (a + b) + 20 + D_PHI) * eps
    assert (rebased(rebased(kv, a), b) - rebased(kv, a + b)).norm() <= tolerance * kv.norm()
    assert torch.equal(rebased(kv, 0), kv)
    # a query at b that reads the rebased state sees what a query at a + b saw: R_b q . R_{-a} A = R_{a+b} q . A
    got, expected = read_state(at(b), rebased(kv, a)), read_state(at(a + b), kv)
    assert (got - expected).norm() <= tolerance * kv.norm() * q.norm()


def test_rebasing_stored_keys_equals_storing_rebased_keys():
    # each row of a batch has its own M, as prompts of unequal length do
    k, v = normal(BATCH, POS, KV_HEAD, 4, seed=1), normal(BATCH, POS, KV_HEAD, D_HEAD, seed=2)
    rows = [angles_of(m, 4, False) for m in (7, 190)]
    cos, sin = (torch.stack([row[i] for row in rows]) for i in (0, 1))
    stored = rebase_state(final_state(k, v).kv, cos[:, None], sin[:, None])
    turned = rotate(k, cos[:, None, None], -sin[:, None, None])
    sizes = final_state(k.abs() + turned.abs() + k.abs().roll(2, -1), v.abs()).kv
    assert_within_rounding([stored], [final_state(turned, v).kv], [sizes], N_TERMS)


HEADS, D_CARRIED = 3, 7
EPS = torch.finfo(torch.float64).eps
counts = st.integers(0, 17)
FREQUENCIES = torch.tensor([1.0, 0.3])  # of 4 of the 7 features
DECAY = torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64)


def drawn_state(seed, norm=True):
    k_sum = normal(BATCH, HEADS, D_CARRIED, seed=seed + 1) if norm else None
    return LinearAttentionState(normal(BATCH, HEADS, D_CARRIED, D_HEAD, seed=seed), k_sum)


def row(position, adjacent_pairs):
    angles = torch.as_tensor(position, dtype=torch.float64).reshape(-1, 1) * FREQUENCIES.double()
    angles = angles.repeat_interleave(2, dim=1) if adjacent_pairs else angles.repeat(1, 2)
    return angles.cos(), angles.sin()


def same_state(a, b, n_tokens):
    # each step of the loop rounds a rotation (3 roundings) and a decay; the angle of position n carries n eps
    bound = 8 * (n_tokens + 2) * EPS * (a.kv.abs().max() + b.kv.abs().max())
    assert (a.kv - b.kv).abs().max() <= bound
    if a.k_sum is None or b.k_sum is None:
        assert a.k_sum is b.k_sum
    else:
        assert (a.k_sum - b.k_sum).abs().max() <= 4 * EPS * (a.k_sum.abs().max() + 1)


@laws
@given(seeds, counts, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_carrying_equals_the_loop_over_tokens(seed, n_tokens, decays, turns, adjacent_pairs, norm):
    before, decay = drawn_state(seed, norm), DECAY if decays else None
    rotation = row(n_tokens, adjacent_pairs) if turns else None
    got = carry_state(before, n_tokens, decay=decay, rotation=rotation, adjacent_pairs=adjacent_pairs)
    expected = naive_carry_state(before, n_tokens, decay, FREQUENCIES.double() if turns else None, adjacent_pairs)
    same_state(got, expected, n_tokens)


@laws
@given(seeds, counts, counts, st.booleans())
def test_carrying_over_two_pieces_is_carrying_over_both(seed, m, n, adjacent_pairs):
    before = drawn_state(seed)

    def carried(start, n_tokens):
        return carry_state(start, n_tokens, None, DECAY, row(n_tokens, adjacent_pairs), adjacent_pairs)

    same_state(carried(carried(before, m), n), carried(before, m + n), m + n)


@laws
@given(seeds, st.booleans())
def test_with_what_was_written_it_is_the_recurrence_from_the_old_state(seed, decays):
    # without a rotation: A after the tokens is what the recurrence gives when it starts from the old state
    pos, decay, before = 7, DECAY if decays else None, drawn_state(seed)
    k, v = normal(BATCH, pos, HEADS, D_CARRIED, seed=seed + 5), normal(BATCH, pos, HEADS, D_HEAD, seed=seed + 6)
    whole = naive_linear_attention(k, k, v, k, k, decay, None, before).state
    written = naive_linear_attention(k, k, v, k, k, decay).state
    same_state(carry_state(before, pos, written, decay), whole, 10 * pos)


def test_rows_have_their_own_number_of_tokens():
    before, lengths = drawn_state(3), torch.tensor([4, 9])
    got = carry_state(before, lengths, decay=DECAY, rotation=row(lengths, False))
    for i, n in enumerate(lengths.tolist()):
        one = carry_state(LinearAttentionState(before.kv[i : i + 1], before.k_sum[i : i + 1]), n, None, DECAY, row(n, False))
        assert torch.allclose(got.kv[i : i + 1], one.kv, rtol=0, atol=1e-15)


def test_nothing_before_leaves_what_was_written():
    written = drawn_state(1)
    assert torch.equal(carry_state(None, 5, written, DECAY).kv, written.kv)  # it has decayed already

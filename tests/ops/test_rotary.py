"""RoPE: the fast form against a matrix, and the group property that makes a rebased bias exact."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import laws, normal

from kvlens.ops.rotary import ROWS_KEPT, RotaryTable, naive_rotate, rotate

D = 10
seeds = st.integers(0, 10_000)
EPS = torch.finfo(torch.float64).eps


def frequencies(rotary_dim, base=10000.0):
    return base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def table(rotary_dim, adjacent_pairs, calls=None):
    def compute(n_ctx):
        if calls is not None:
            calls.append(n_ctx)
        angles = torch.arange(n_ctx, dtype=torch.float64)[:, None] * frequencies(rotary_dim)
        angles = angles.repeat_interleave(2, dim=1) if adjacent_pairs else angles.repeat(1, 2)
        return angles.sin(), angles.cos()

    return RotaryTable(compute)


def turn(x, positions, rotary_dim, adjacent_pairs, back=False, rows=None):
    """R_m x for each row of x [pos, d]."""
    cos, sin = (rows or table(rotary_dim, adjacent_pairs)).at(torch.as_tensor(positions), x.dtype)
    return rotate(x, cos, -sin if back else sin, adjacent_pairs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("adjacent_pairs", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 6, 10])
def test_equals_the_matrix_values_and_gradients(rotary_dim, adjacent_pairs, dtype):
    positions = [0, 1, 7, 90, 3]
    x = normal(5, D, seed=1, dtype=dtype).requires_grad_()
    weight = normal(5, D, seed=2, dtype=dtype)
    got = turn(x, positions, rotary_dim, adjacent_pairs)
    exact = x.detach().double().requires_grad_()
    expected = torch.stack(
        [naive_rotate(row, m, frequencies(rotary_dim), adjacent_pairs) for row, m in zip(exact, positions, strict=True)]
    )
    eps = torch.finfo(dtype).eps
    # two products, one sum and the table's own rounding of each feature: four, of no more than |x| of the pair
    assert ((got - expected).norm(dim=1) <= 4 * eps * x.norm(dim=1)).all()
    (gradient,) = torch.autograd.grad((got * weight).sum(), x)
    (wanted,) = torch.autograd.grad((expected * weight.double()).sum(), exact)
    assert ((gradient - wanted).norm(dim=1) <= 4 * eps * weight.norm(dim=1)).all()


@pytest.mark.parametrize("adjacent_pairs", [False, True])
def test_gradcheck(adjacent_pairs):
    rows = table(6, adjacent_pairs)

    def turned(x):
        return turn(x, [3, 11, 0], 6, adjacent_pairs, rows=rows)

    x = normal(3, D, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(turned, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(turned, x)
    with torch.autograd.forward_ad.dual_level():  # of a tensor that has a gradient too
        tangent = normal(3, D, seed=2)
        there = torch.autograd.forward_ad.unpack_dual(turned(torch.autograd.forward_ad.make_dual(x, tangent))).tangent
    torch.testing.assert_close(there, turned(tangent), rtol=0, atol=1e-14)  # a rotation is linear


def test_a_quarter_turn_by_hand():
    cos, sin = torch.zeros(1, 4), torch.ones(1, 4)
    x = torch.tensor([[1.0, 2, 3, 4, 5]])
    assert rotate(x, cos, sin).tolist() == [[-3, -4, 1, 2, 5]]  # pairs (0, 2) and (1, 3); the fifth passes through
    assert rotate(x, cos, sin, adjacent_pairs=True).tolist() == [[-2, 1, -4, 3, 5]]
    assert rotate(x, cos, -sin).tolist() == [[3, 4, -1, -2, 5]]


@laws
@given(seeds, st.booleans(), st.sampled_from([2, 6, 10]), st.integers(0, 5000), st.integers(0, 5000))
def test_group_law_inverse_and_length(seed, adjacent_pairs, rotary_dim, a, b):
    x, rows = normal(1, D, seed=seed), table(rotary_dim, adjacent_pairs)
    options = dict(rotary_dim=rotary_dim, adjacent_pairs=adjacent_pairs, rows=rows)
    twice = turn(turn(x, [a], **options), [b], **options)
    # an angle of m radians carries m * eps: 3 angles, and 4 roundings a turn
    tolerance = (2 * (a + b) + 12) * EPS * x.norm()
    assert (twice - turn(x, [a + b], **options)).norm() <= tolerance
    assert (turn(turn(x, [a], **options), [a], back=True, **options) - x).norm() <= 8 * EPS * x.norm()
    assert abs(turn(x, [a], **options).norm() - x.norm()) <= 4 * EPS * x.norm()
    assert torch.equal(turn(x, [a], **options)[:, rotary_dim:], x[:, rotary_dim:])


@laws
@given(seeds, st.booleans(), st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_scores_depend_on_distance_alone(seed, adjacent_pairs, m, n, moved):
    q, k, rows = normal(1, D, seed=seed), normal(1, D, seed=seed + 1), table(D, adjacent_pairs)
    options = dict(rotary_dim=D, adjacent_pairs=adjacent_pairs, rows=rows)
    here = turn(q, [m], **options) @ turn(k, [n], **options).T
    there = turn(q, [m + moved], **options) @ turn(k, [n + moved], **options).T
    tolerance = (2 * (m + n + moved) + D + 16) * EPS * q.norm() * k.norm()
    assert (here - there).abs() <= tolerance


@pytest.mark.parametrize("adjacent_pairs", [False, True])
def test_group_law_in_float32_at_positions_up_to_100000(adjacent_pairs):
    # with angles in float64 only the roundings of cos, sin and the products are left: 3 turns of 4 * 6e-8 = 7e-7 < 1e-6;
    # with angles in float32, position 100,000 alone would be off by 100,000 * 6e-8 = 6e-3
    generator = torch.Generator().manual_seed(3)
    a = torch.randint(0, 50_000, (200,), generator=generator)
    b = torch.randint(0, 50_001, (200,), generator=generator)
    a[0], b[0] = 50_000, 50_000
    x = normal(200, D, seed=4, dtype=torch.float32)
    rows = table(D, adjacent_pairs)
    options = dict(rotary_dim=D, adjacent_pairs=adjacent_pairs, rows=rows)
    twice, once = turn(turn(x, a, **options), b, **options), turn(x, a + b, **options)
    assert ((twice - once).norm(dim=1) <= 1e-6 * x.norm(dim=1)).all()
    rebased = turn(turn(x, a + b, **options), b, back=True, **options)
    assert ((rebased - turn(x, a, **options)).norm(dim=1) <= 1e-6 * x.norm(dim=1)).all()


def test_the_table_grows_and_its_old_rows_stay():
    calls = []
    rows = table(6, False, calls)
    cos, sin = rows.rows(3, 5, torch.device("cpu"), torch.float32)
    assert (cos.shape, cos.dtype) == ((5, 6), torch.float32)
    in_float32 = dict(rel=0, abs=torch.finfo(torch.float32).eps)  # of numbers below 1
    assert cos[0, 0].item() == pytest.approx(math.cos(3), **in_float32)
    assert sin[0, 0].item() == pytest.approx(math.sin(3), **in_float32)
    before = cos.clone()
    far, _ = rows.at(torch.tensor([[1000], [4]]), torch.float32)
    assert far.shape == (2, 1, 6)
    assert torch.equal(rows.rows(3, 5, torch.device("cpu"), torch.float32)[0], before)
    assert torch.equal(far[1, 0], before[1])
    n_calls = len(calls)
    rows.rows(990, 11, torch.device("cpu"), torch.float32)
    assert len(calls) == n_calls  # already there
    assert rows.at(torch.zeros(0, dtype=torch.long), torch.float32)[0].shape == (0, 6)


@pytest.mark.parametrize("stretch", [1.0, 1.3])
@pytest.mark.parametrize("adjacent_pairs", [False, True])
def test_rows_beyond_those_kept_are_those_of_a_longer_table(adjacent_pairs, stretch):
    def compute(n_ctx):
        sin, cos = table(6, adjacent_pairs)._compute(n_ctx)
        return sin * stretch, cos * stretch

    calls = []
    rows = RotaryTable(lambda n_ctx: calls.append(n_ctx) or compute(n_ctx))
    sin, cos = compute(3 * ROWS_KEPT)
    # an angle of m radians is rounded twice here and once there: 3 m eps; and the row itself
    tolerance = (3 * 3 * ROWS_KEPT + 4) * EPS * stretch
    for first, n in ((ROWS_KEPT - 3, 7), (2 * ROWS_KEPT, 1), (ROWS_KEPT, 2 * ROWS_KEPT)):
        got = rows.rows(first, n, torch.device("cpu"), torch.float64)
        assert (got[0] - cos[first : first + n]).abs().max() <= tolerance
        assert (got[1] - sin[first : first + n]).abs().max() <= tolerance
    for positions in ([[2, 2 * ROWS_KEPT + 5]], [[ROWS_KEPT + 9], [ROWS_KEPT - 1]], [[5, 3]]):  # far apart, near, kept
        index = torch.tensor(positions)
        got = rows.at(index, torch.float64)
        assert got[0].shape == (*index.shape, 6)
        assert (got[0] - cos[index]).abs().max() <= tolerance
        assert (got[1] - sin[index]).abs().max() <= tolerance
    assert max(calls) <= ROWS_KEPT  # memory does not grow with the position


def test_layers_that_ask_for_the_same_far_rows_share_them():
    rows = table(6, False)
    one = rows.rows(3 * ROWS_KEPT, 5, torch.device("cpu"), torch.float32)
    assert rows.rows(3 * ROWS_KEPT, 5, torch.device("cpu"), torch.float32)[0] is one[0]
    assert rows.rows(3 * ROWS_KEPT, 5, torch.device("cpu"), torch.float64)[0].dtype == torch.float64
    assert rows.rows(3 * ROWS_KEPT + 1, 5, torch.device("cpu"), torch.float32)[0] is not one[0]


def test_far_rows_made_in_inference_mode_serve_training():
    rows = table(10, False)
    with torch.inference_mode():
        rows.rows(3 * ROWS_KEPT, 4, torch.device("cpu"), torch.float64)
    x = normal(4, D, seed=1).requires_grad_()
    rotate(x, *rows.rows(3 * ROWS_KEPT, 4, torch.device("cpu"), torch.float64)).sum().backward()
    assert x.grad is not None


def test_rows_are_those_that_were_asked_for_although_another_thread_asks_for_others():
    """The other thread's turn comes while the last request is compared with this one."""
    rows, cpu = table(4, False), torch.device("cpu")

    class Interrupted(int):
        def __eq__(self, other):
            rows.rows(7, 3, cpu, torch.float64)
            return int(self) == other

        __hash__ = int.__hash__

    expected = rows.rows(2, 3, cpu, torch.float64)[0].clone()
    assert torch.equal(rows.rows(Interrupted(2), 3, cpu, torch.float64)[0], expected)

"""KV shift: the fast form against the loop, its properties, and a hand-computed value."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import assert_within_rounding, double, laws, map_tensors, normal, random_mask, values_and_gradients

from kvlens.ops.kv_shift import (
    coefficients_from_parameter,
    effective_pattern,
    initial_shift_parameter,
    kv_shift,
    naive_kv_shift,
)

BATCH, POS, HEAD, D = 2, 11, 3, 5
seeds = st.integers(0, 10_000)
windows = st.integers(1, 4)


def case(window, seed=0, pos=POS, state=True, mask=False, dtype=torch.float64):
    arguments = {"x": normal(BATCH, pos, HEAD, D, seed=seed, dtype=dtype)}
    arguments["coef"] = normal(HEAD, window + 1, seed=seed + 1, dtype=dtype)
    if state:
        arguments["initial_state"] = normal(BATCH, window, HEAD, D, seed=seed + 2, dtype=dtype)
    if mask:
        arguments["mask"] = random_mask(BATCH, pos, seed + 3)
    return arguments


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(("window", "pos"), [(1, 11), (2, 11), (3, 11), (4, 3), (3, 1)])
def test_values_and_gradients_equal_the_loop(window, pos, state, mask, dtype):
    arguments = case(window, pos=pos, state=state, mask=mask, dtype=dtype)
    expected = values_and_gradients(naive_kv_shift, double(arguments))
    sizes = values_and_gradients(naive_kv_shift, double(arguments), absolute=True)
    # a product and a sum a tap; the coefficients' gradient sums over batch, pos and d
    n_terms = 2 * (window + 1) + BATCH * pos * D
    assert_within_rounding(values_and_gradients(kv_shift, arguments), expected, sizes, n_terms)


def test_an_answer_from_a_pencil():
    # rows 1, 2, 3 behind a state 10, 20 (oldest first), coefficients 2, 3, 5:
    # 2*1 + 3*20 + 5*10 = 112;  2*2 + 3*1 + 5*20 = 107;  2*3 + 3*2 + 5*1 = 17
    x, state = torch.tensor([1.0, 2, 3]).view(1, 3, 1, 1), torch.tensor([10.0, 20]).view(1, 2, 1, 1)
    shifted, last = kv_shift(x, torch.tensor([[2.0, 3, 5]]), state)
    assert shifted.flatten().tolist() == [112, 107, 17]
    assert last.flatten().tolist() == [2, 3]  # raw rows, not shifted ones
    assert kv_shift(x, torch.tensor([[2.0, 3, 5]]))[0].flatten().tolist() == [2, 7, 17]


def test_padding_is_skipped_as_a_pencil_would():
    x = torch.tensor([99.0, 1, 99, 2, 3]).view(1, 5, 1, 1)
    mask = torch.tensor([[False, True, False, True, True]])
    shifted, last = kv_shift(x, torch.tensor([[2.0, 3]]), None, mask)
    assert shifted.flatten().tolist() == [0, 2, 0, 7, 12]
    assert last.flatten().tolist() == [3]


def test_a_text_shorter_than_the_window_keeps_what_the_state_held():
    x, state = torch.tensor([7.0]).view(1, 1, 1, 1), torch.tensor([1.0, 2, 3]).view(1, 3, 1, 1)
    for mask, expected in ((None, [2, 3, 7]), (torch.tensor([[True]]), [2, 3, 7]), (torch.tensor([[False]]), [1, 2, 3])):
        assert kv_shift(x, torch.ones(1, 4), state, mask)[1].flatten().tolist() == expected


@pytest.mark.parametrize("mask", [False, True])
def test_a_state_of_one_row_serves_the_whole_batch(mask):
    arguments = case(2, mask=mask)
    arguments["initial_state"] = arguments["initial_state"][:1]
    repeated = {**arguments, "initial_state": arguments["initial_state"].repeat(BATCH, 1, 1, 1)}
    for one, all_rows in zip(kv_shift(**arguments), kv_shift(**repeated), strict=True):
        assert torch.equal(one, all_rows)


@pytest.mark.parametrize("mask", [False, True])
def test_the_identity_coefficients_change_nothing_exactly(mask):
    arguments = case(3, mask=mask)
    arguments["coef"] = torch.eye(1, 4, dtype=torch.float64).repeat(HEAD, 1)
    shifted = kv_shift(**arguments)[0]
    real = arguments.get("mask", torch.ones(BATCH, POS, dtype=torch.bool))
    assert torch.equal(shifted[real], arguments["x"][real])
    assert not shifted[~real].any()


def test_the_arguments_are_left_as_they_were():
    for mask in (False, True):
        arguments = case(2, mask=mask)
        before = map_tensors(torch.clone, arguments)
        kv_shift(**arguments)
        assert all(torch.equal(arguments[name], before[name]) for name in arguments)


@laws
@given(seeds, windows, st.integers(0, POS), st.booleans())
def test_cut_anywhere_and_resume(seed, window, cut, mask):
    arguments = case(window, seed, mask=mask)

    def in_two(x, coef, initial_state, mask=None):
        first, last = kv_shift(x[:, :cut], coef, initial_state, None if mask is None else mask[:, :cut])
        second, last = kv_shift(x[:, cut:], coef, last, None if mask is None else mask[:, cut:])
        return torch.cat([first, second], dim=1), last

    whole = values_and_gradients(kv_shift, arguments)
    sizes = values_and_gradients(kv_shift, arguments, absolute=True)
    assert_within_rounding(values_and_gradients(in_two, arguments), whole, sizes, 2 * (window + 1) + BATCH * POS * D)


@laws
@given(seeds, windows)
def test_padding_is_the_removal_of_the_padded_tokens(seed, window):
    arguments = case(window, seed, mask=True)
    mask = arguments["mask"]
    shifted, last = kv_shift(**arguments)
    for row in range(BATCH):
        removed = arguments["x"][row : row + 1, mask[row]]
        alone, alone_last = kv_shift(removed, arguments["coef"], arguments["initial_state"][row : row + 1])
        sizes = kv_shift(removed.abs(), arguments["coef"].abs(), arguments["initial_state"][row : row + 1].abs())
        assert_within_rounding([shifted[row, mask[row]]], [alone[0]], [sizes[0][0]], window + 2)
        assert torch.equal(last[row], alone_last[0])


@laws
@given(seeds, windows, st.booleans(), st.integers(0, POS - 1))
def test_nothing_looks_ahead(seed, window, mask, i):
    arguments = case(window, seed, mask=mask)
    arguments["x"].requires_grad_()
    (gradient,) = torch.autograd.grad(kv_shift(**arguments)[0][:, : i + 1].sum(), arguments["x"])
    assert not gradient[:, i + 1 :].any()


@laws
@given(seeds, windows, st.booleans())
def test_linear_in_the_rows_and_the_state_together(seed, window, mask):
    a, b = case(window, seed, mask=mask), case(window, seed + 9)
    both = {**a, "x": 2 * a["x"] - 3 * b["x"], "initial_state": 2 * a["initial_state"] - 3 * b["initial_state"]}
    b = {**b, "coef": a["coef"], "mask": a.get("mask")}
    expected = [2 * x - 3 * y for x, y in zip(kv_shift(**a), kv_shift(**b), strict=True)]
    absolute = [map_tensors(torch.abs, x) for x in (a, b)]
    sizes = [2 * x + 3 * y for x, y in zip(kv_shift(**absolute[0]), kv_shift(**absolute[1]), strict=True)]
    assert_within_rounding(list(kv_shift(**both)), expected, sizes, 2 * (window + 1) + 4)


# --- coefficients ---


def test_parametrizations_by_hand():
    parameter = torch.tensor([[-0.5, 0.25, 1.5], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert coefficients_from_parameter(parameter, "free") is parameter
    assert coefficients_from_parameter(parameter, "clamp").tolist() == [[0, 0.25, 1], [0, 0, 0]]
    gate = coefficients_from_parameter(parameter, "gate")
    assert gate[1].tolist() == pytest.approx([1 / 3] * 3, abs=1e-16)
    # the paper's gate for window 1: sigma(b) and 1 - sigma(b), with b the difference of the two logits
    c = coefficients_from_parameter(torch.tensor([[0.3, -0.4]], dtype=torch.float64), "gate")
    assert c[0].tolist() == pytest.approx([0.66818777216816616, 0.33181222783183389], abs=3e-16)


def test_a_clamped_parameter_outside_its_range_has_no_gradient():
    parameter = torch.tensor([[-0.5, 0.25, 1.5]], requires_grad=True)
    coefficients_from_parameter(parameter, "clamp").sum().backward()
    assert parameter.grad.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("parametrization", ["free", "gate", "clamp"])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_uniform_starts_sum_to_one(window, parametrization):
    n_heads = 20_000
    parameter = initial_shift_parameter(n_heads, window, parametrization, "uniform", torch.Generator().manual_seed(0))
    assert (parameter.shape, parameter.dtype) == ((n_heads, window + 1), torch.float32)
    coef = coefficients_from_parameter(parameter, "gate" if parametrization == "gate" else "free")
    eps = torch.finfo(torch.float32).eps
    assert (coef.sum(dim=1) - 1).abs().max() <= (window + 1) * (window + 1) * eps  # terms of size up to w, w roundings
    if window == 1 or parametrization != "gate":
        first = coef[:, 0]
        assert 0 <= first.min() < 0.001 < 0.999 < first.max() <= 1  # missed with probability e^-20
        # mean 1/2 and variance 1/12 of U(0, 1); five standard errors
        assert abs(first.mean() - 1 / 2) < 5 * (1 / 12 / n_heads) ** 0.5
        assert abs(first.var() - 1 / 12) < 5 * (1 / 180 / n_heads) ** 0.5
    else:  # uniform on the simplex: each coordinate has mean 1 / (w + 1)
        variance = window / ((window + 1) ** 2 * (window + 2))
        assert (coef.mean(dim=0) - 1 / (window + 1)).abs().max() < 5 * (variance / n_heads) ** 0.5


def test_identity_starts_are_the_identity_and_seeds_repeat():
    assert initial_shift_parameter(3, 2, "free", "identity").tolist() == [[1, 0, 0]] * 3
    draws = [initial_shift_parameter(3, 2, "free", "uniform", torch.Generator().manual_seed(s)) for s in (4, 4, 5)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("taps", [1, 2, 3, 9])
def test_effective_pattern_reads_raw_rows_as_the_pattern_reads_shifted_ones(taps):
    generator = torch.Generator().manual_seed(taps)
    pattern = torch.rand(2, 6, 5, 7, dtype=torch.float64, generator=generator)
    coef = torch.randn(3, taps, dtype=torch.float64, generator=generator)
    v = torch.randn(2, 7, 3, 11, dtype=torch.float64, generator=generator)
    shifted, _ = naive_kv_shift(v, coef)
    by_head = [x.repeat_interleave(2, dim=2).transpose(1, 2) for x in (v, shifted)]
    read = effective_pattern(pattern, coef) @ by_head[0]
    torch.testing.assert_close(read, pattern @ by_head[1], rtol=1e-12, atol=1e-12)


def test_effective_pattern_by_hand_and_refused():
    pattern = torch.tensor([[[0.0, 1.0]]])
    assert effective_pattern(pattern, torch.tensor([[0.25, 2.0]])).tolist() == [[[2.0, 0.25]]]
    with pytest.raises(RuntimeError):
        effective_pattern(torch.zeros(3, 2, 2), torch.zeros(2, 2))

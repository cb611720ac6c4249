"""The dense product: oneDNN's kernel and torch's own against float64, with derivatives of every kind."""

import pytest
import torch
from ops_cases import normal

from kvlens.ops import affine as module
from kvlens.ops.affine import ACTIVATIONS, FEW_ROWS, LARGE_WEIGHTS, MANY_ROWS, affine

EPS = torch.finfo(torch.float32).eps
D_IN, D_OUT = 70, 50
MANY = 700
assert 3 * MANY >= MANY_ROWS and D_IN * D_OUT < LARGE_WEIGHTS
one_dnn = pytest.mark.skipif(module._one_dnn() is None, reason="this torch has no oneDNN product")


def case(rows, dtype=torch.float32, grad=False):
    tensors = normal(3, rows, D_IN, seed=1), normal(D_IN, D_OUT, seed=2), normal(D_OUT, seed=3)
    return [x.to(dtype).double().to(dtype).requires_grad_(grad) for x in tensors]


def exact(x, weight, bias, activation=None):
    y = x.double() @ weight.double() + (0 if bias is None else bias.double())
    return y if activation is None else ACTIVATIONS[activation](y)


def error(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, MANY])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_float64(activation, rows, with_bias, dtype):
    x, weight, bias = case(rows, dtype)
    got = affine(x, weight, bias if with_bias else None, activation)
    assert got.dtype == dtype and got.shape == (3, rows, D_OUT)
    # 70 products a sum: their roundings add up to less than sqrt(70) on average
    assert error(got, exact(x, weight, bias if with_bias else None, activation)) < 9 * torch.finfo(dtype).eps


@one_dnn
def test_many_float32_rows_on_a_cpu_go_to_one_dnn():
    x, weight, _ = case(MANY)
    flat = x.flatten(0, 1)
    assert module._one_dnn_serves(flat, weight)
    large = weight.repeat(1, 80)
    assert large.numel() >= LARGE_WEIGHTS
    assert module._one_dnn_serves(flat[: FEW_ROWS + 1], large) and not module._one_dnn_serves(flat[:FEW_ROWS], large)
    assert not module._one_dnn_serves(flat[: MANY_ROWS - 1], weight)
    assert not module._one_dnn_serves(flat.double(), weight.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert affine(x, weight).dtype == torch.bfloat16  # as a product of torch's own
    torch._C._set_mkldnn_enabled(False)  # what torch.backends.mkldnn.flags does, which warns on a CPU
    try:
        assert not module._one_dnn_serves(flat, weight)
    finally:
        torch._C._set_mkldnn_enabled(True)


@pytest.mark.parametrize("n_rows", [1, FEW_ROWS])
def test_a_few_rows_with_many_weights_are_summed_slice_by_slice(n_rows, monkeypatch):
    x, weight, bias = normal(n_rows, 512, seed=1), normal(512, 600, seed=2), normal(600, seed=3)
    assert weight.numel() >= LARGE_WEIGHTS
    sliced, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "bmm", lambda *tensors: sliced.append(1) or bmm(*tensors))
    for dtype in (torch.float32, torch.float64):
        tensors = [t.to(dtype, copy=True).requires_grad_() for t in (x, weight, bias)]
        y, right = affine(*tensors), exact(*tensors)
        bound = 23 * torch.finfo(dtype).eps  # 512 products a sum: sqrt(512) roundings
        assert error(y, right) < bound
        found = torch.autograd.grad(y.square().sum(), tensors)
        wanted = torch.autograd.grad(right.square().sum(), tensors)
        assert all(error(a, b) < 2 * bound for a, b in zip(found, wanted, strict=True))
        assert torch.equal(affine(tensors[0], tensors[1]), affine(*tensors[:2], torch.zeros(600, dtype=dtype)))
    assert len(sliced) == 6
    affine(x[:, :70], weight[:70], bias)  # 8 does not divide 70
    affine(x.new_ones(FEW_ROWS + 1, 512), weight, bias)
    affine(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    affine(x, weight, bias)
    assert len(sliced) == 6


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_gradients_of_first_and_second_order(activation):
    single, double = case(MANY, grad=True), case(MANY, torch.float64, grad=True)
    found = []
    for tensors in (single, double):
        loss = affine(*tensors, activation).pow(3).sum()
        first = torch.autograd.grad(loss, tensors, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), tensors)
        found.append([*first, *second])
    for a, b in zip(*found, strict=True):
        assert error(a, b) < 1e-5  # cubes of sums of 70 products, their sums over 360 rows, and all that once more


def test_a_gradient_of_one_number_spread_over_all_positions():
    x, weight, bias = case(MANY, grad=True)
    affine(x, weight, bias).sum().backward()  # its gradient is one 1, expanded
    assert torch.allclose(bias.grad, torch.full((D_OUT,), 3.0 * MANY))
    assert error(x.grad, weight.double().sum(1).expand(3, MANY, D_IN)) < 9 * EPS


def test_transforms_of_torch_func_see_a_product_of_torchs_own():
    x, weight, bias = case(MANY)
    tangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(4))
    along = torch.func.jvp(lambda x: affine(x, weight, bias), (x,), (tangent,))[1]
    assert error(along, exact(tangent, weight, None)) < 9 * EPS
    mapped = torch.func.vmap(lambda x: affine(x, weight, bias))(x)
    assert error(mapped, exact(x, weight, bias)) < 9 * EPS
    gradient = torch.func.grad(lambda w: affine(x, w, bias).sum())(weight)
    assert error(gradient, x.double().sum((0, 1))[:, None].expand(D_IN, D_OUT)) < 30 * EPS  # sums of 360 places


def test_a_kernel_that_answers_wrongly_is_not_used(monkeypatch):
    class Wrong:
        default = staticmethod(lambda x, weight, *rest: x @ weight.T)  # it forgets the bias

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", Wrong)
    module._one_dnn.cache_clear()
    try:
        x, weight, bias = case(MANY)
        assert module._one_dnn() is None
        assert error(affine(x, weight, bias), exact(x, weight, bias)) < 9 * EPS
    finally:
        monkeypatch.undo()
        module._one_dnn.cache_clear()

"""What a layer remembers of an attached bias never outlives the numbers that it was made of."""

import copy

import pytest
import torch
from precision import LAW, relative_error
from small_models import sharp

from kvlens import convert_prompt
from kvlens.components import Remembered

pytestmark = pytest.mark.usefixtures("in_float64")
PROMPT, TEXT = torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[9]])


@pytest.fixture(params=["hooked", "bridge"])
def model(request, bridge_of):
    if request.param == "bridge":
        yield bridge_of("llama")
        bridge_of("llama").detach_kv_bias()
        return
    yield sharp("softmax, learned", gain=1)


@torch.no_grad()
def test_a_bias_that_is_written_to_is_read_as_it_is(model):
    """Its values, its weights and its keys; each is held against a fresh bias of the same numbers."""
    bias = convert_prompt(model, PROMPT)
    model.attach_kv_bias(bias)
    seen = [model(TEXT)]
    for name in ("b_kv", "b_d", "keys"):
        for part in bias.attention:
            getattr(part, name).mul_(2)
        read = model(TEXT)
        with model.kv_bias(copy.deepcopy(bias)):
            assert relative_error(read, model(TEXT)) < LAW
        assert relative_error(read, seen[-1]) > 1e-6  # the write changed something
        seen.append(read)


def test_a_bias_that_was_read_without_gradients_has_them_afterwards(model):
    bias = convert_prompt(model, PROMPT)
    b_kv = bias.attention[1].b_kv.requires_grad_()
    model.attach_kv_bias(bias)
    with torch.no_grad():
        model(TEXT)
    with torch.inference_mode():
        model(TEXT)
    for _ in range(2):  # no graph of an earlier pass is kept, either
        (gradient,) = torch.autograd.grad(model(TEXT)[0, -1, 3], b_kv)
        assert gradient.norm() > 0


def test_a_bias_that_is_attached_can_be_made_to_want_gradients(model):
    bias = convert_prompt(model, PROMPT)
    model.attach_kv_bias(bias)
    before = model(TEXT)
    for name in ("b_kv", "b_d", "keys"):
        wanted = getattr(bias.attention[1], name)
        wanted.requires_grad_()
        (gradient,) = torch.autograd.grad(model(TEXT)[0, -1, 3], wanted)
        assert gradient.norm() > 0
        wanted.requires_grad_(False)
    assert torch.equal(model(TEXT), before)


def test_remembered_is_made_again_for_another_tensor_and_not_copied():
    remembered, x = Remembered(), torch.ones(2)
    made = [remembered.of(x.sum, x) for _ in range(2)]
    assert made[0] is made[1]
    assert remembered.of(x.sum, x, under="else") is not made[0]
    assert copy.deepcopy(remembered).of(lambda: None, x, under="else") is None
    y = x.clone()
    assert remembered.of(y.sum, y) is not made[0]
    y.add_(1)
    assert remembered.of(y.sum, y) == 4

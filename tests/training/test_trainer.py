"""The training loop's promises, on models small enough to follow by hand."""

import math

import pandas as pd
import pytest
import torch
from torch import nn

from kvlens.errors import KVLensError
from kvlens.training import Schedule, decayed_parameters, heldout_loss, train

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])


class Bowl(nn.Module):
    """Loss |W|^2 + 1, and what ``script`` says at each training call: a number multiplies the loss."""

    def __init__(self, script: dict[int, float] | None = None):
        super().__init__()
        self.W_x = nn.Parameter(torch.tensor([[3.0, -2.0]]))
        self.b_x = nn.Parameter(torch.tensor([[1.0]]))
        self.calls = 0
        self.script = script or {}

    def forward(self, tokens, return_type="loss"):
        assert return_type == "loss"
        factor = 1.0
        if self.training:
            self.calls += 1
            factor = self.script.get(self.calls, 1.0)
        return factor * (self.W_x.square().sum() + self.b_x.square().sum() + 1)


def run(model, steps=7, **options):
    return train(model, lambda: TOKENS, steps=steps, learning_rate=0.1, progress=False, **options)


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_learning_rates_known_by_hand():
    cosine = Schedule(peak=8.0, warmup_fraction=0.5, final_fraction=0.25)
    assert [cosine.learning_rate(p) for p in (0.0, 0.125, 0.25, 0.5)] == [0.0, 2.0, 4.0, 8.0]
    assert cosine.learning_rate(0.75) == pytest.approx(5.0, rel=1e-15)  # half-way from 8 to 2
    assert cosine.learning_rate(1.0) == cosine.learning_rate(3.0) == 2.0
    constant = Schedule(peak=8.0, kind="constant", warmup_fraction=0.5)
    assert [constant.learning_rate(p) for p in (0.25, 0.5, 1.0)] == [4.0, 8.0, 8.0]
    assert Schedule(peak=1.0, warmup_fraction=0.0, final_fraction=0.0).learning_rate(1.0) == 0.0


def test_the_loop_uses_the_schedule():
    rates = run(Bowl(), steps=4, warmup_fraction=0.5, final_fraction=0.0).metrics["learning_rate"]
    assert rates.tolist() == pytest.approx([0.05, 0.1, 0.05, 0.0], abs=1e-16)


def test_metrics_are_tidy():
    result = run(Bowl(), steps=3, evaluate=lambda model: heldout_loss(model, TOKENS), eval_every=2)
    metrics = result.metrics
    expected = pd.DataFrame(
        {
            "step": [1, 2, 2, 3, 3],
            "split": ["train", "train", "heldout", "train", "heldout"],
            "tokens": [6, 12, 12, 18, 18],
        }
    )
    pd.testing.assert_frame_equal(metrics[["step", "split", "tokens"]], expected)
    assert list(metrics) == ["step", "split", "loss", "tokens", "seconds", "learning_rate"]
    assert metrics["loss"][0] == 15.0
    assert metrics["seconds"].is_monotonic_increasing
    assert result.stopped_by == "steps" and result.steps == 3


def test_training_lowers_the_loss_and_restores_the_mode():
    model = Bowl().eval()
    result = run(model, steps=50)
    assert not model.training
    assert heldout_loss(model, TOKENS) < result.metrics["loss"][0] / 3
    assert math.isnan(result.best_loss) and result.best_step == 50


def test_one_adamw_step_by_hand_decays_w_alone():
    model = Bowl()
    train(
        model,
        [TOKENS],
        steps=1,
        learning_rate=0.1,
        warmup_fraction=0.0,
        final_fraction=1.0,
        weight_decay=0.5,
        progress=False,
    )
    expected_w = torch.tensor([[3.0, -2.0]]) * (1 - 0.1 * 0.5) - 0.1 * torch.tensor([[1.0, -1.0]])
    torch.testing.assert_close(model.W_x.detach(), expected_w)
    torch.testing.assert_close(model.b_x.detach(), torch.tensor([[0.9]]))


def test_only_trainable_matrices_named_w_decay():
    model = nn.Module()
    model.W_Q = nn.Parameter(torch.ones(2, 3, 5))
    model.W_flat = nn.Parameter(torch.ones(7))
    model.W_frozen = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    model.b_Q = nn.Parameter(torch.ones(2, 3))
    model.k_shift_coef = nn.Parameter(torch.ones(2, 2))
    assert list(decayed_parameters(model)) == ["W_Q"]


def test_frozen_parameters_do_not_move():
    model = Bowl()
    model.W_x.requires_grad_(False)
    run(model)
    assert model.W_x.tolist() == [[3.0, -2.0]]
    assert model.b_x.item() < 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_names_the_step_and_keeps_the_last_good_weights(value):
    twin, model = Bowl(), Bowl({5: value})
    # the weights of step 4 gave the last finite loss: those after 3 updates, under the same schedule
    history = []
    train(
        twin,
        lambda: history.append(weights(twin)) or TOKENS,
        steps=7,
        learning_rate=0.1,
        progress=False,
    )
    with pytest.raises(KVLensError, match=r"loss \((nan|inf)\) of step 5"):
        run(model)
    assert torch.equal(weights(model), history[3])
    assert model.training


def test_a_gradient_that_is_not_finite_is_caught_too():
    class Root(Bowl):
        def forward(self, tokens, return_type="loss"):
            return super().forward(tokens) + (self.b_x * 0).sum().sqrt()

    model = Root()
    before = weights(model)
    with pytest.raises(KVLensError, match="gradient of step 1"):
        run(model)
    assert torch.equal(weights(model), before)


def test_early_stopping_puts_the_best_weights_back():
    model, seen = Bowl(), []
    scores = iter([5.0, 3.0, 4.0, math.nan, 1.0])

    def evaluate(model):
        assert not model.training and not torch.is_grad_enabled()
        seen.append(weights(model))
        return next(scores)

    result = run(model, steps=99, evaluate=evaluate, eval_every=3, patience=2)
    assert (result.stopped_by, result.steps, result.best_step, result.best_loss) == ("patience", 12, 6, 3.0)
    assert torch.equal(weights(model), seen[1])


def test_the_time_budget_ends_the_run_with_the_final_rate(monkeypatch):
    clock = iter(range(10_000))  # each look at the clock takes a second
    monkeypatch.setattr("kvlens.training.trainer.perf_counter", lambda: float(next(clock)))
    result = run(Bowl(), steps=10_000, max_minutes=5.0, final_fraction=0.1, evaluate=lambda model: heldout_loss(model, TOKENS))
    rates = result.metrics["learning_rate"]
    assert result.stopped_by == "time" and 20 < result.steps < 300
    assert rates.iloc[-1] == pytest.approx(0.01, rel=0.05)
    assert rates.max() == pytest.approx(0.1, rel=0.05)
    assert result.metrics["split"].iloc[-1] == "heldout"


def test_steps_may_end_before_the_time_budget():
    result = run(Bowl(), steps=3, max_minutes=60.0)
    assert result.stopped_by == "steps" and result.steps == 3


def test_gradient_clipping_bounds_the_norm():
    model = Bowl()
    model.W_x.data.mul_(1e4)
    run(model, steps=1, max_grad_norm=0.5)
    norm = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in model.parameters()))
    assert norm == pytest.approx(0.5, rel=1e-5)


def test_an_iterable_begins_anew_and_an_iterator_cannot():
    assert train(Bowl(), [TOKENS, TOKENS], steps=5, learning_rate=0.1, progress=False).steps == 5
    with pytest.raises(KVLensError, match="used up"):
        train(Bowl(), iter([TOKENS, TOKENS]), steps=5, learning_rate=0.1, progress=False)


def test_autocast_runs_in_bfloat16_and_keeps_float32_weights():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.W_x = nn.Parameter(torch.ones(3, 1))

        def forward(self, tokens, return_type="loss"):
            out = tokens.float() @ self.W_x
            self.dtype = out.dtype
            return out.float().square().mean()

    model = Linear()
    run(model, steps=2, autocast=True)
    assert model.dtype == torch.bfloat16 and model.W_x.dtype == torch.float32
    run(model, steps=1)
    assert model.dtype == torch.float32


def test_heldout_loss_weighs_a_short_last_batch_by_its_windows():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.W_x = nn.Parameter(torch.ones(1))

        def forward(self, tokens, return_type="loss"):
            return tokens.float().mean() * self.W_x.sum()

    windows = torch.tensor([[1, 1], [2, 2], [6, 6]])
    assert heldout_loss(Mean(), windows, batch_size=2) == pytest.approx(3.0)
    with pytest.raises(KVLensError, match="empty"):
        heldout_loss(Mean(), windows[:0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"eval_every": 0}, "eval_every"),
        ({"patience": 2}, "needs evaluate"),
        ({"max_minutes": 0.0}, "max_minutes must be positive"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"warmup_fraction": 1.0}, "warmup_fraction"),
        ({"final_fraction": -1.0}, "final_fraction"),
    ],
)
def test_bad_arguments_are_answered(options, message):
    with pytest.raises(KVLensError, match=message):
        run(Bowl(), **{"steps": 1} | options)


def test_a_model_with_nothing_to_train_is_answered():
    with pytest.raises(KVLensError, match="requires a gradient"):
        run(Bowl().requires_grad_(False))
    with pytest.raises(KVLensError, match="peak"):
        train(Bowl(), [TOKENS], steps=1, learning_rate=-1.0)

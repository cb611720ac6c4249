"""Batches are cut behind their last scored position, where the loss cannot change."""

import pytest
import torch

from kvlens.model import HookedKVTransformerConfig
from kvlens.tasks import make_task
from kvlens.training import build_model
from kvlens.training.loss import CrossEntropy, SquaredError, in_float, logits_at, what_is_read

TASK = make_task("induction", vocab_size=17, length=13, law="first_repeat")


def models():
    yield dict(kv_shift={"queries": True, "window": 3})
    yield dict(attention="linear", feature_map="elu_plus_one", kv_shift=True)
    yield dict(positional_embedding_type="standard")
    yield dict(attention_variant=dict(negative=dict(k=2, beta=0.3, per="label"), regularised=dict(alpha=0.3)))
    yield dict(attention_variant=dict(ridge=dict(strength=0.5)))


@pytest.mark.parametrize("kind", models(), ids=lambda kind: "-".join(kind))
def test_loss_and_gradients_are_those_of_the_whole_batch(kind):
    model = build_model(TASK, dict(n_layers=2, d_model=12, d_head=6, dtype=torch.float64, **kind))
    batch = TASK.sample(5, torch.Generator().manual_seed(1))
    read = what_is_read(model, batch)
    end = read.inputs.shape[1]
    assert end < batch.inputs.shape[1] and read.scored[:, -1].any() and not batch.scored[:, end:].any()
    found = []
    for loss in (
        CrossEntropy().score(model, batch).loss,
        torch.nn.functional.cross_entropy(
            in_float(logits_at(model, batch.inputs, batch.scored)), batch.targets[batch.scored], reduction="sum"
        ),
    ):
        model.zero_grad()
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)  # sums of at most a few hundred float64 terms


def test_numbers_are_cut_alike():
    task = make_task("regression", dimensions=3, n_points=4)
    model = build_model(task, dict(n_layers=1, d_model=12, d_head=6, positional_embedding_type="standard"))
    batch = task.sample(2, torch.Generator().manual_seed(0))
    batch = batch._replace(scored=batch.scored & (torch.arange(batch.scored.shape[1]) < 3))
    assert what_is_read(model, batch).inputs.shape[1] == 3
    whole = (model(batch.inputs)[batch.scored] - batch.targets[batch.scored]).square().sum()
    torch.testing.assert_close(SquaredError().score(model, batch).loss, whole)


def test_models_that_look_ahead_and_batches_without_a_score_are_left_whole():
    batch = TASK.sample(3, torch.Generator().manual_seed(0))
    model = build_model(TASK, dict(n_layers=1, d_model=12, d_head=6, attention_dir="bidirectional"))
    assert isinstance(model.cfg, HookedKVTransformerConfig) and what_is_read(model, batch) is batch
    causal = build_model(TASK, dict(n_layers=1, d_model=12, d_head=6))
    nothing = batch._replace(scored=torch.zeros_like(batch.scored))
    assert what_is_read(causal, nothing) is nothing and CrossEntropy().score(causal, nothing).n_scored == 0

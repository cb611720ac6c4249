"""Runs that take a second: one shifted head on repeated tokens, and the settings that all these tests share."""

from typing import Any

import pandas as pd
import torch
from torch import nn

from kvlens.tasks import make_task
from kvlens.training import build_model, train

SETTINGS: dict[str, Any] = dict(steps=12, batch_size=6, learning_rate=5e-3, eval_every=4, eval_sequences=7, checkpoint_every=3)
MODEL: dict[str, Any] = dict(n_layers=1, d_model=12, d_head=6, attn_only=True, kv_shift=True, device="cpu")


def tiny_task():
    return make_task("induction", vocab_size=13, length=9)


def tiny_model(**changes: Any):
    return build_model(tiny_task(), {**{k: v for k, v in MODEL.items() if k != "device"}, **changes}, device="cpu")


def run(model=None, task=None, **changes: Any):
    return train(model or tiny_model(), task or tiny_task(), progress=False, **{**SETTINGS, **changes})


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def course(model, seed, accuracies, steps=None, **more):
    """Held-out rows of a table of runs, one run's."""
    steps = range(10, 10 * len(accuracies) + 1, 10) if steps is None else steps
    return pd.DataFrame(dict(model=model, seed=seed, step=list(steps), split="heldout", accuracy=accuracies, **more))


def runs(*rows, columns):
    return pd.DataFrame(rows, columns=columns)

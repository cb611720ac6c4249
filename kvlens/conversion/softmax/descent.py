"""Gradient descent: Adam with a learning rate that decays to 0 along a cosine, on minibatches of rows."""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def descend(
    free: Sequence[Tensor],
    loss_on: Callable[[Int[Tensor, " row"]], Float[Tensor, ""]],
    *,
    n_rows: int,
    rows_per_step: int,
    steps: int,
    learning_rate: float,
    generator: torch.Generator,
) -> Iterator[Float[Tensor, ""]]:
    """Minimize the loss over ``free``, in place; yields the loss of each step after it is made.

    Args:
        free: leaf tensors that require gradients.
        loss_on: the loss on some rows, given their indices.
        n_rows: total number of rows.
        rows_per_step: number of rows per step, drawn without replacement; all rows if there are fewer.
        steps: number of steps.
        learning_rate: learning rate of the first step.
        generator: random generator for drawing the rows.
    """
    optimizer = torch.optim.Adam(free, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        loss = loss_on(torch.randperm(n_rows, generator=generator)[:rows_per_step])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.detach()

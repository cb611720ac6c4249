"""Gradient steps: Adam, with a learning rate that falls to 0 along a cosine; a step reads some of the rows."""

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
    """Move ``free`` downhill, in place; yields the loss of each step once it is made.

    Args:
        free: leaves that want gradients.
        loss_on: the loss on some rows, by their numbers.
        n_rows: how many rows there are to read.
        rows_per_step: how many a step reads, drawn without replacement; all where there are fewer.
        steps: how many.
        learning_rate: of the first step.
        generator: draws the rows.
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

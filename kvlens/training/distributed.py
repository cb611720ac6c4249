"""Several processes on one training run, as ``torchrun`` starts them: ranks, the rows of each process, and sums over all.

Every process draws the same whole batch and keeps every n-th row, so the batches of a run do not depend on the number of
processes, and every process knows the number of scored positions without communication. With one process these are no-ops.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kvlens.errors import KVLensError
from kvlens.tasks import Batch


@dataclass(frozen=True)
class Workers:
    """The rank of this process and the number of processes of the run.

    Attributes:
        rank: rank; process 0 writes files and shows progress.
        count: number of processes.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> "Workers":
        """From the open process group, or a single process if there is none."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def check_batch(self, batch_size: int) -> None:
        """Raise KVLensError unless every process gets the same number of rows."""
        if batch_size % self.count:
            raise KVLensError(f"train: batch_size ({batch_size}) must be a multiple of the number of processes ({self.count})")

    def rows(self, batch: Batch) -> Batch:
        """The rows of this process."""
        return Batch(*(part[self.rank :: self.count] for part in batch))

    def wrap(self, objective: nn.Module) -> nn.Module:
        """The module whose backward pass averages gradients over the processes."""
        if self.count == 1:
            return objective
        device = next(objective.parameters()).device
        return DistributedDataParallel(objective, device_ids=[device] if device.type == "cuda" else None)

    def sum(self, value: Tensor) -> Tensor:
        """Summed over the processes, in place."""
        if self.count > 1:
            dist.all_reduce(value)
        return value

    def from_first(self, value: float, device: torch.device) -> float:
        """The value of rank 0."""
        if self.count == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        dist.broadcast(shared, src=0)
        return float(shared)

    def wait(self) -> None:
        """Wait until every process has arrived here."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def process_group() -> Iterator[torch.device | None]:
    """Open the process group that ``torchrun`` describes in the environment, and close it; nothing without ``torchrun``.

    Yields:
        The device of this process (its own GPU, or the CPU), None without ``torchrun``.
    """
    if "WORLD_SIZE" not in os.environ:
        yield None
        return
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()

"""What a batch is computed with: how long it takes, and no number of the table. It may change when a batch is resumed.

Nothing here needs torch, so that the command line asks it first.
"""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from kvlens import KVLensError
from kvlens.checks import Count, Within, checked

ENGINES = ("processes", "ray")
DTYPES = ("float32", "float64", "bfloat16", "float16")
MOST_PER_CORE, MOST_ACTORS = 16, 10_000
"""Processes (or threads of one) that a core may be given, and actors of a cluster: more are a slip of the hand."""


@checked
@dataclass(frozen=True)
class Resources:
    """How the work is shared out.

    Attributes:
        engine: "processes" (one, or spawned workers, on this machine) or "ray".
        workers: how many processes or actors; one process alone works in this one.
        gpus_per_worker: for Ray, 0.25 puts four workers on a GPU.
        threads: of each worker; None shares out those that torch has here. The last bits of a sum depend on it.
        prompts_per_job: what a worker is given, and what is recorded, at once.
    """

    engine: Literal["processes", "ray"] = "processes"
    workers: Count = 1
    gpus_per_worker: Annotated[float, Within(0)] = 0.0
    threads: Count | None = None
    prompts_per_job: Count = 8

    def __post_init__(self) -> None:
        cores = os.cpu_count() or 1
        most = {"workers": MOST_ACTORS if self.engine == "ray" else MOST_PER_CORE * cores, "threads": MOST_PER_CORE * cores}
        for name, limit in most.items():
            if (getattr(self, name) or 0) > limit:
                raise KVLensError(
                    f"{name}: at most {limit:,} ({cores} cores are here), got {getattr(self, name):,}; give fewer"
                )
        if self.gpus_per_worker and self.engine != "ray":
            raise KVLensError("gpus_per_worker is for the engine ray; for processes, choose the device")

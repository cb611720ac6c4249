"""The resources of a batch, which affect how long it takes but no number of the table, and may change when it is resumed.

Nothing here needs torch, so that the command line can check it first.
"""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from kvlens import KVLensError
from kvlens.checks import Count, Within, checked

ENGINES = ("processes", "ray")
DTYPES = ("float32", "float64", "bfloat16", "float16")
MOST_PER_CORE, MOST_ACTORS = 16, 10_000
"""The most processes (or threads of one) per core, and the most actors of a cluster; more are surely a typing error."""


@checked
@dataclass(frozen=True)
class Resources:
    """How the work is distributed.

    Attributes:
        engine: "processes" (one, or spawned workers, on this machine) or "ray".
        workers: number of processes or actors; with one process, the batch runs in this process.
        gpus_per_worker: for Ray; 0.25 puts four workers on a GPU.
        threads: threads of each worker; None divides torch's threads here among them. The last bits of a sum depend on it.
        prompts_per_job: number of prompts that a worker is given, and that are recorded, at once.
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
                    f"{name}: at most {limit:,} (this machine has {cores} cores), got {getattr(self, name):,}; give fewer"
                )
        if self.gpus_per_worker and self.engine != "ray":
            raise KVLensError("gpus_per_worker is for the engine ray; for processes, choose the device")

"""How the benchmarks time: what is compared runs in turn, A B B A ..., in one process, and medians or minima are compared.

Ratios within one run are what counts; absolute times are those of one machine. On a machine that others use too, the least of
several wall times is what they disturb least; with one thread, processor time is hardly disturbed at all.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch

CLOCKS = {"wall": perf_counter, "processor": process_time}


def times(*calls: Callable[[], Any], repeats: int, clock: str = "wall") -> list[list[float]]:
    """Seconds of each call, ``repeats`` of each after one warm-up; interleaved, each first as often as last."""
    now = CLOCKS[clock]
    for call in calls:
        call()
    taken: list[list[float]] = [[] for _ in calls]
    for number in range(repeats):
        for call, into in [*zip(calls, taken, strict=True)][:: -1 if number % 2 else 1]:
            start = now()
            call()
            into.append(now() - start)
    return taken


def medians(*calls: Callable[[], Any], repeats: int, clock: str = "wall") -> list[float]:
    """Median seconds of each call."""
    return [median(taken) for taken in times(*calls, repeats=repeats, clock=clock)]


def fastest(*calls: Callable[[], Any], repeats: int, clock: str = "wall") -> list[float]:
    """Least seconds of each call: what others do on the machine can only add to it."""
    return [min(taken) for taken in times(*calls, repeats=repeats, clock=clock)]


def peak_gib() -> float:
    """The most memory this process has held: Linux's own count, as ``ru_maxrss`` begins with what its parent held."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 2**20


def check_close(new: torch.Tensor, old: torch.Tensor, tolerance: float, what: str) -> float:
    """Raise unless the relative error is below ``tolerance``: nothing is timed whose answer is wrong."""
    error = float((new.detach().double() - old.detach().double()).norm() / old.detach().double().norm())
    if not error < tolerance:
        raise SystemExit(f"{what}: wrong answer, relative error {error:.1e} (allowed {tolerance:.0e})")
    return error


def verdict(name: str, value: float, bound: float, at_least: bool = False) -> str:
    """One line: the figure, its bound, and whether it holds."""
    holds = value >= bound if at_least else value <= bound
    return f"  {name}: {value:.3g} ({'at least' if at_least else 'at most'} {bound:.3g}: {'yes' if holds else 'NO'})"

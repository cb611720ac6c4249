"""How the benchmarks time: what is compared runs in turn, A B A B ..., in one process, and the medians are compared.

Ratios within one run are what counts; absolute times are those of one machine.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch


def medians(*calls: Callable[[], Any], repeats: int) -> list[float]:
    """Median seconds of each call, after one warm-up, the calls interleaved."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, into in zip(calls, times, strict=True):
            start = perf_counter()
            call()
            into.append(perf_counter() - start)
    return [median(t) for t in times]


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

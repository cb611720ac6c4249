"""How many numbers are held at once. What would hold more is computed in parts; in float32 a number takes four bytes."""

import torch

BLOCK_NUMBERS = 2**20
"""In a block that stays in a processor's cache, 4 MiB."""
NUMBERS_AT_ONCE = 2**24
"""In each of the few tensors that a step makes, 64 MiB."""
NUMBERS_PER_PASS = 2**26
"""In a forward pass that an analysis runs over many rows, 256 MiB."""
WIDEST_ON_CPU, WIDEST_ELSEWHERE = 2**21, 2**28
"""In the widest activation of a segment of a text: 8 MiB on a CPU; enough parallel work on an accelerator."""
MORE_ELSEWHERE = 16


def by_device(n: int, device: torch.device) -> int:
    """``n`` numbers on a CPU; on an accelerator, which small parts would leave idle, :data:`MORE_ELSEWHERE` times as many."""
    return n if device.type == "cpu" else MORE_ELSEWHERE * n

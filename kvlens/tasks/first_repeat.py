"""Random tokens, scored at the first repeat: the distribution on which KVSA tests induction (app. D).

A sequence first draws a pool of ``length`` distinct tokens from the vocabulary, then its tokens one by one, uniform over the
pool except for the token just drawn. Nothing repeats for a while (about 1.25 sqrt(length) tokens; the birthday problem). The
one scored prediction is at the first token that occurred before: it is followed by the token that followed it then. The text
continues by the same rule, every repeated token being followed by its last follower, but a causal model is scored before that.

Two faults of the paper's script are corrected here. After the scored position, a token that was followed only by a token seen
before is followed by -1 in the script. And a sequence without a repeat is drawn again (in the script the lines that would do so
come after its ``return``).

Source: KVSA app. D (``length`` 512; the script draws its 512 tokens from 7,989).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvlens.tasks.drawing import draw_distinct


class FirstRepeats(NamedTuple):
    """Sequences one token longer than the inputs of a batch, and the position at which each is scored.

    Attributes:
        tokens: token ids.
        scored: True at the first token that occurred earlier in its row.
    """

    tokens: Int[Tensor, "batch pos_plus_1"]
    scored: Bool[Tensor, "batch pos"]


def draw_first_repeats(vocab_size: int, batch_size: int, length: int, generator: torch.Generator) -> FirstRepeats:
    """Draw rows of ``length + 1`` tokens, each with exactly one scored position among the first ``length``.

    Args:
        vocab_size: at least ``length``.
        batch_size: rows.
        length: positions of a sequence, and tokens of its pool.
        generator: on the CPU.
    """
    indices, is_first = _walk(batch_size, length, generator)
    while not bool(is_first.any(dim=1).all()):
        missing = ~is_first.any(dim=1)
        indices[missing], is_first[missing] = _walk(int(missing.sum()), length, generator)
    pool = draw_distinct(vocab_size, batch_size, length, generator)
    return FirstRepeats(pool.gather(1, indices), is_first)


def _walk(
    batch_size: int, length: int, generator: torch.Generator
) -> tuple[Int[Tensor, "batch pos_plus_1"], Bool[Tensor, "batch pos"]]:
    """Draw indices into the pool, all rows at once, one position after another, since each token depends on all before it."""
    drawn = torch.randint(length - 1, (batch_size, length + 1), generator=generator)
    rows = torch.arange(batch_size)
    follower = torch.full((batch_size, length), -1)  # the last follower of each pool index; -1 if there is none
    last = torch.full((batch_size,), length)  # before the text: an index outside the pool
    forced = torch.full((batch_size,), -1)  # the follower of a repeated token
    columns, repeats = [], []
    for column in drawn.unbind(1):
        column = column + (column >= last).long()  # any index but the last; pools are shuffled, so the first is uniform
        index = torch.where(forced >= 0, forced, column)
        follows = follower[rows, index]
        is_repeat = (forced < 0) & (follows >= 0)
        forced = torch.where(is_repeat, follows, -1)
        has_last = last < length
        follower[rows[has_last], last[has_last]] = index[has_last]
        columns.append(index)
        repeats.append(is_repeat)
        last = index
    repeat = torch.stack(repeats[:-1], dim=1)
    return torch.stack(columns, dim=1), repeat & (repeat.cumsum(dim=1) == 1)

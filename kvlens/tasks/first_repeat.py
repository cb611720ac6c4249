"""Random tokens until the first that came before: the distribution on which KVSA tests induction (app. D).

A sequence draws its pool, ``length`` distinct tokens of the vocabulary, and then token after token, uniform over the pool but
for the token just drawn. Nothing repeats for a while (about 1.25 sqrt(length) tokens; the birthday problem). The first token
that stood before is where the one prediction is scored: it must be followed by what followed it then. The text goes on by the
same rule, every token that is known bringing what followed it last, but a causal model is scored before it sees that.

Where the paper's script errs, after the scored position: a token that was followed by a known one only brings -1 with it. And
a sequence in which nothing repeats is drawn again (the lines that would do so stand behind its ``return``).

Source: KVSA app. D (``length`` 512; the script draws its 512 tokens from 7,989).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvlens.tasks.drawing import draw_distinct


class FirstRepeats(NamedTuple):
    """Sequences, one token longer than the inputs of a batch, and where each is scored.

    Attributes:
        tokens: ids below the vocabulary's size.
        judged: True at the first token that stood earlier in its row.
    """

    tokens: Int[Tensor, "batch pos_plus_1"]
    judged: Bool[Tensor, "batch pos"]


def draw_first_repeats(vocab_size: int, batch_size: int, length: int, generator: torch.Generator) -> FirstRepeats:
    """Rows of ``length + 1`` tokens, each with exactly one scored position among the first ``length``.

    Args:
        vocab_size: at least ``length``.
        batch_size: rows.
        length: positions of a sequence, and tokens of its pool.
        generator: on the CPU.
    """
    places, is_first = _walk(batch_size, length, generator)
    while not bool(is_first.any(dim=1).all()):
        missing = ~is_first.any(dim=1)
        places[missing], is_first[missing] = _walk(int(missing.sum()), length, generator)
    pool = draw_distinct(vocab_size, batch_size, length, generator)
    return FirstRepeats(pool.gather(1, places), is_first)


def _walk(
    batch_size: int, length: int, generator: torch.Generator
) -> tuple[Int[Tensor, "batch pos_plus_1"], Bool[Tensor, "batch pos"]]:
    """The script's loop on places in the pool, all rows at once: the next token depends on all before it."""
    drawn = torch.randint(length - 1, (batch_size, length + 1), generator=generator)
    rows = torch.arange(batch_size)
    follower = torch.full((batch_size, length), -1)  # what followed each place last; -1 where it has not been seen
    last = torch.full((batch_size,), length)  # before the text stands a place that is none
    forced = torch.full((batch_size,), -1)  # what a repeated token brings with it
    columns, repeats = [], []
    for column in drawn.unbind(1):
        column = column + (column >= last).long()  # any place but the last one; pools are shuffled, so all are alike at first
        place = torch.where(forced >= 0, forced, column)
        follows = follower[rows, place]
        is_repeat = (forced < 0) & (follows >= 0)
        forced = torch.where(is_repeat, follows, -1)
        has_last = last < length
        follower[rows[has_last], last[has_last]] = place[has_last]
        columns.append(place)
        repeats.append(is_repeat)
        last = place
    repeat = torch.stack(repeats[:-1], dim=1)
    return torch.stack(columns, dim=1), repeat & (repeat.cumsum(dim=1) == 1)

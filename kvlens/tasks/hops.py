"""k-hop induction: follow the induction step k times.

One hop goes from a token to the token after its previous occurrence:

    find^1(i) = max { j <= i : x_{j-1} = x_i }         find^k(i) = find^1(find^{k-1}(i))         target_i = x_{find^k(i)}

With k = 1 the target is the answer of induction; for larger k the step is repeated from that answer. A position is scored if
all k hops exist; the paper gives the other positions a null token, here they are not scored. The target is a function of
x_0 ... x_i and in general not the next token.

Tokens are uniform, except that no token occurs twice in a row: find^1(i) would be i there, and the hops would not move.

``mixed`` trains one model for all numbers of hops up to k: each sequence draws its own, and a token before the text says it
(``vocab_size + hops - 1``), as in the models of the source.

Source: Sanford, Hsu, Telgarsky 2024, Transformers, Parallel Computation, and Logarithmic Depth (their hop_k; depth about
log2 k is needed); KVSA app. H.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from kvlens.checks import Within
from kvlens.errors import KVLensError
from kvlens.tasks.batch import Batch, Task
from kvlens.tasks.checks import require_drawable
from kvlens.tasks.drawing import draw_until_scored, previous_occurrence


@dataclass(frozen=True)
class HopsTask(Task):
    """Predict the token that k hops of induction lead to.

    Attributes:
        k: number of hops; the largest one if ``mixed``.
        mixed: whether each sequence has a number of hops of its own, uniform from 1 to k, which its first token says.
        vocab_size: number of token ids; a hop goes back by about as many positions.
        length: positions of a sequence, more than k; a first token that says the number of hops is one more.
    """

    name: ClassVar[str] = "hops"

    k: Annotated[int, Within(1)] = 4
    vocab_size: Annotated[int, Within(3)] = 16
    length: Annotated[int, Within(3)] = 256
    mixed: bool = False

    def __post_init__(self):
        super().__post_init__()
        # A hop moves to an earlier position, and the shortest return ("A B A") takes two.
        if self.length < self.k + 2:
            raise KVLensError(f"task 'hops': {self.k} hops need a length of at least {self.k + 2}, got {self.length}")

    @property
    def n_positions(self) -> int:
        return self.length + self.mixed

    @property
    def d_input(self) -> int:
        return self.vocab_size + self.k * self.mixed

    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        require_drawable(self, batch_size, generator, split)

        def draw() -> Batch:
            tokens = self._draw_tokens(batch_size, generator)
            hops = torch.randint(self.k, (batch_size, 1), generator=generator) + 1 if self.mixed else None
            found = self._find(tokens, hops)
            scored = found >= 0
            targets = torch.where(scored, tokens.gather(1, found.clamp(min=0)), 0)
            if hops is None:
                return Batch(tokens, targets, scored)
            # before the text there is nothing to predict
            return Batch(torch.cat([self.vocab_size + hops - 1, tokens], dim=1), F.pad(targets, (1, 0)), F.pad(scored, (1, 0)))

        return draw_until_scored(self, draw)

    def _draw_tokens(self, batch_size: int, generator: torch.Generator) -> Int[Tensor, "batch pos"]:
        """Add up steps of 1 to vocab_size - 1 modulo vocab_size, so that each token differs from the one before."""
        steps = torch.randint(1, self.vocab_size, (batch_size, self.length), generator=generator)
        steps[:, 0] = torch.randint(self.vocab_size, (batch_size,), generator=generator)
        return steps.cumsum(dim=1) % self.vocab_size

    def _find(self, tokens: Int[Tensor, "batch pos"], hops: Int[Tensor, "batch 1"] | None) -> Int[Tensor, "batch pos"]:
        """find^k of every position, or find^hops of every sequence; -1 if a hop does not exist."""
        previous = previous_occurrence(tokens)
        one_hop = torch.where(previous >= 0, previous + 1, -1)
        found = one_hop
        for made in range(1, self.k):
            further = torch.where(found >= 0, one_hop.gather(1, found.clamp(min=0)), -1)
            found = further if hops is None else torch.where(hops > made, further, found)
        return found

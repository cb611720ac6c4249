"""What positions do: whether a transformer depends on the order of its input, and positions that are plain numbers.

*Order*: T(pi X) against pi T(X), pi a permutation of the positions. Without positions and without a causal mask every step of
a transformer either acts on positions one by one, or sums over all of them (the softmax and its weighted mean). Both commute
with pi, so T(pi X) = pi T(X) up to rounding, for any weights. Positions that are added to the stream break this, and so does a
causal mask alone. Measured on random weights, as |T(pi X) - pi T(X)| / |T(X)|.

Source: LECTURE (the plain layer is permutation equivariant; learned and sinusoidal positions).

*Plain numbers*: regression with the two ideas that LECTURE sec. 3 mentions first and rejects.

    index      r_n = 1, 2, 3, ...                                  a longer prompt has numbers that training had not
    share      r_n = n / (L + 1), between 0 and 1                  L positions: in a longer prompt every number is another one

The number is one more value of the input at its position. A model's input map turns it into a vector r_n w, with w learned,
which is added to that of the input: the x_n + r_n of the notes. Such a model has no other positions.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.model import HookedKVRegressor, HookedKVTransformerConfig
from kvlens.tasks import Batch, RegressionTask

KINDS = (("bidirectional", "none"), ("causal", "none"), ("bidirectional", "standard"), ("bidirectional", "sinusoidal"))
"""(attention_dir, positional_embedding_type); only the first is equivariant."""
PRECISIONS = (torch.float64, torch.float32)


def equivariance_table(model: Mapping[str, Any], n_positions: int, d_input: int, n_prompts: int, n_models: int) -> pd.DataFrame:
    """One row for each kind, dtype and random model: attention_dir, positions, dtype, seed, deviation, rounding.

    Args:
        model: fields of :class:`kvlens.HookedKVTransformerConfig`; attention, positions and dtype are set here.
        n_positions: positions of an input.
        d_input: features per position.
        n_prompts: number of random inputs X, all permuted in the same way.
        n_models: number of draws of weights, inputs and pi.
    """
    rows = []
    for (attention_dir, positions), dtype, seed in itertools.product(KINDS, PRECISIONS, range(n_models)):
        kind = dict(attention_dir=attention_dir, positional_embedding_type=positions, dtype=dtype, seed=seed)
        cfg = HookedKVTransformerConfig(**{**model, **kind, "n_ctx": n_positions, "d_vocab": 1, "device": "cpu"})
        own = dict(attention_dir=attention_dir, positions=positions, dtype=str(dtype).removeprefix("torch."), seed=seed)
        off = deviation(HookedKVRegressor(cfg, d_input), n_positions, n_prompts, seed)
        rows.append(dict(own, deviation=off, rounding=permutation_rounding(cfg)))
    return pd.DataFrame(rows)


@torch.no_grad()
def deviation(model: HookedKVRegressor, n_positions: int, n_prompts: int, seed: int) -> float:
    """|T(pi X) - pi T(X)| / |T(X)| for normal X; pi is a random cycle through all positions, so that none stays."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_prompts, n_positions, model.d_input, generator=generator, dtype=torch.float64).to(model.cfg.dtype)
    cycle = torch.randperm(n_positions, generator=generator)
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)
    out = model(x)
    return float((model(x[:, order]) - out[:, order]).norm() / out.norm())


def permutation_rounding(cfg: HookedKVTransformerConfig) -> float:
    """The largest difference of the two sides from rounding alone, to first order and in the worst case.

    In each layer a permutation changes the order of two sums over n_ctx positions, and a kernel may sum the features of another
    row in another order: four sums over d_model and one over d_mlp. A sum of n terms errs by n eps; the norms keep the stream's
    size near 1, so that what one layer adds is not multiplied by the next.
    """
    d_mlp = cfg.d_mlp or 0
    return cfg.n_layers * (2 * cfg.n_ctx + 4 * cfg.d_model + d_mlp) * torch.finfo(cfg.dtype).eps


Numbering = Literal["index", "share"]
NUMBERS: tuple[Numbering, ...] = ("index", "share")


@dataclass(frozen=True)
class NumberedRegression(RegressionTask):
    """`RegressionTask` with the number of each position as the last value of its input.

    Attributes:
        numbers: "index" or "share", as above.
    """

    name: ClassVar[str] = "numbered regression"

    numbers: Numbering = "index"

    @property
    def d_input(self) -> int:
        return super().d_input + 1

    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        batch = super().sample(batch_size, generator, split)
        return batch._replace(inputs=numbered(batch.inputs, position_numbers(self.numbers, self.n_positions)))


def position_numbers(kind: Numbering, n_positions: int) -> Float[Tensor, " pos"]:
    """The number of every position."""
    index = torch.arange(1, n_positions + 1, dtype=torch.float32)
    return index if kind == "index" else index / (n_positions + 1)


def numbered(
    inputs: Float[Tensor, "batch pos d_input"], numbers: Float[Tensor, " pos"]
) -> Float[Tensor, "batch pos d_input_plus_1"]:
    """The inputs with these numbers of their positions."""
    return torch.cat([inputs, numbers[None, :, None].expand(len(inputs), -1, 1)], dim=-1)

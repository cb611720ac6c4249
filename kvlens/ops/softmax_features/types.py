"""How a model scores a key."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class ScoreRule(NamedTuple):
    """How a softmax model turns a query, a key and the distance between them into a log-score.

    s = cap tanh(q.k / (scale cap)) - slope_h distance, and minus infinity where distance >= window.

    Attributes:
        scale: what q.k is divided by (``attn_scale``, 1 if the model does not scale).
        soft_cap: None or 0 for no cap.
        slopes: ALiBi's slopes, one per query head, positive; None without ALiBi.
        window: for a local layer, the number of tokens seen, including the query's own; None for a global layer.
    """

    scale: float
    soft_cap: float | None = None
    slopes: Float[Tensor, " head"] | None = None
    window: int | None = None

    @property
    def needs_distance(self) -> bool:
        """Whether the distance between query and key changes the score."""
        return self.slopes is not None or self.window is not None

"""The common base of all methods that reduce a prompt to a few of its keys per key-value head."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.checks import Within
from kvlens.conversion.softmax.method import Approximation
from kvlens.conversion.softmax.prompt_pass import ConvertedExactly
from kvlens.conversion.softmax.settings import MOST_ASKED
from kvlens.errors import KVLensError, warn
from kvlens.kv_bias import KVBias, VirtualKeys
from kvlens.ops.landmarks import PromptKeys


@dataclass(frozen=True, kw_only=True)
class FewKeys(Approximation):
    """A method that keeps some of the prompt's keys.

    Attributes:
        n_keys: keys per key-value head, at most one per token of the prompt; ``n_features`` is accepted as shorthand.
        ratio: the number of keys as a fraction of the prompt's tokens, instead of ``n_keys``.
    """

    shorthand: ClassVar[Mapping[str, str]] = {"n_features": "n_keys"}

    n_keys: Annotated[int, Within(1, MOST_ASKED)] | None = None
    ratio: Annotated[float, Within(above=0, most=1)] | None = None

    def __post_init__(self):
        if (self.n_keys is None) == (self.ratio is None):
            problem = "needs n_keys (or n_features), the keys per key-value head, or ratio, a fraction of the prompt's keys"
            both = "give n_keys or ratio, not both"
            raise KVLensError(f"{type(self).__name__}: {problem if self.n_keys is None else both}")

    def keeps_every_key(self, lengths: Sequence[int]) -> bool:
        """Whether every prompt has at most as many keys as requested; warns if one has fewer."""
        above = [n for n in lengths if self._wanted(n) > n]
        if above:
            warn(
                f"convert_prompt: {self._wanted(above[0])} virtual keys for a prompt of {above[0]} tokens: all {above[0]} are "
                "kept, which is exact"
            )
        return all(self._wanted(n) >= n for n in lengths)

    def keys_kept(self, n_tokens: int) -> int:
        """Average number of keys per key-value head for a prompt of ``n_tokens`` tokens; at most one per token."""
        return min(self._wanted(n_tokens), n_tokens)

    def _wanted(self, n_tokens: int) -> int:
        return self.n_keys if self.n_keys is not None else math.ceil(self.ratio * n_tokens)  # type: ignore[operator]


class LayerKeys(NamedTuple):
    """The keys kept in one layer, by prompt and key-value head; ``values`` are weight times value. Weight 0 means no key."""

    keys: Float[Tensor, "batch kv_head r d_key"]
    distance: Int[Tensor, "batch kv_head r"]
    weights: Float[Tensor, "batch kv_head r"]
    values: Float[Tensor, "batch kv_head r d_head"]


def with_own_values(prompt: PromptKeys, index: Int[Tensor, "cell r"], active: Bool[Tensor, "cell r"]) -> LayerKeys:
    """Keys of the prompt with weight 1 and their own value. A cell is one key-value head of one prompt."""
    values = prompt.values.flatten(0, 1)
    weights = active.to(values)
    own = weights[..., None] * values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))
    return with_values(prompt, index, weights, own)


def with_values(
    prompt: PromptKeys, index: Int[Tensor, "cell r"], weights: Float[Tensor, "cell r"], values: Float[Tensor, "cell r d_head"]
) -> LayerKeys:
    """Keys of the prompt with fitted weights, and values that are already multiplied by them."""
    keys, distance = prompt.keys.flatten(0, 1), prompt.distance.flatten(0, 1)
    rows = index[..., None].expand(-1, -1, keys.shape[-1])
    kept = (keys.gather(1, rows), distance.gather(1, index), weights.to(keys), values.to(keys))
    return LayerKeys(*(t.unflatten(0, prompt.keys.shape[:2]) for t in kept))


def assembled(exact: ConvertedExactly, layers: Sequence[LayerKeys]) -> KVBias:
    """The bias made of the reduced layers; any layers above them keep all their keys."""
    whole = exact.bias
    assert isinstance(whole.features, VirtualKeys)
    r = max([each.weights.shape[-1] for each in layers] + ([whole.d_phi] if len(layers) < len(whole.b_KV) else []))
    keys, distance, weights, values = [], [], [], []
    for layer in range(len(whole.b_KV)):
        if layer < len(layers):
            each = layers[layer]
        else:
            features = whole.features
            each = LayerKeys(features.keys[layer], features.distance[layer], whole.b_D[layer], whole.b_KV[layer])
        missing = r - each.weights.shape[-1]
        keys.append(torch.cat([each.keys, each.keys[..., :1, :].expand(-1, -1, missing, -1)], dim=-2))
        distance.append(torch.cat([each.distance, each.distance[..., :1].expand(-1, -1, missing)], dim=-1))
        weights.append(torch.nn.functional.pad(each.weights, (0, missing)))
        values.append(torch.nn.functional.pad(each.values, (0, 0, 0, missing)))
    return replace(
        whole,
        b_KV=torch.stack(values),
        b_D=torch.stack(weights),
        features=VirtualKeys(torch.stack(keys), torch.stack(distance)),
    )

"""Which model a bias belongs to: the structure, field by field, and a hash of the weights.

A bias is a sum of one model's keys and values; read by another model it gives plausible but wrong text. Fields are compared
one by one so that the error can name what differs. Dtype and device are not part of it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from kvlens.errors import KVLensError


@dataclass(frozen=True)
class Fingerprint:
    """Everything that a bias depends on.

    ``rest`` holds every other field of the configuration that shapes an activation; ``weights`` is a hash of the parameters
    in float32, weight processing included. ``heads`` is (n_heads, n_kv_heads, d_head, d_phi) of each layer, zeros where it has
    no attention; the fields of these names are the largest, or those of the states of a model without attention. ``d_key`` is
    the size of a key where it is not ``d_head``, as in latent attention.
    """

    attention: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    d_phi: int
    d_vocab: int
    feature_map: str
    normalizer: str
    attn_scale: float
    positional_embedding_type: str
    rotary_placement: str | None
    decay: str
    kv_shift: str
    heads: tuple[tuple[int, int, int, int], ...]
    rest: str
    weights: str
    d_key: int | None = None

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention."""
        return tuple(layer for layer, (n_heads, *_) in enumerate(self.heads) if n_heads)

    @cached_property
    def layers_differ(self) -> bool:
        """Whether layers with attention differ in their heads."""
        return len({of for of in self.heads if of[0]}) > 1

    def of_layer(self, layer: int) -> "Fingerprint":
        """That of a model of this layer with attention alone, counted among these."""
        own = n_heads, n_kv_heads, d_head, d_phi = self.heads[self.attention_layers[layer]]
        return replace(self, n_layers=1, heads=(own,), n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head, d_phi=d_phi)

    def check(self, other: "Fingerprint", what: str, whose: str = "the model") -> None:
        """Raise KVLensError naming the first field in which ``other``, which belongs to ``whose``, differs."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine != theirs:
                if f.name == "rest":
                    a, b = set(mine.split("; ")), set(theirs.split("; "))
                    mine, theirs = "; ".join(sorted(a - b)), "; ".join(sorted(b - a))
                same_shape = " (same structure, other weights)" if f.name == "weights" else ""
                raise KVLensError(
                    f"{what}: {f.name} differs{same_shape}: {mine!r} for the bias, {theirs!r} for {whose}. A bias fits "
                    "only the model that it was converted with; convert the prompt again with this one."
                )

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> "Fingerprint":
        """From the fields that :meth:`to_json` wrote, with the lists that JSON has instead of tuples."""
        return cls(**{name: _as_tuples(value) for name, value in written.items()})

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON's types."""
        return {**asdict(self), "heads": [list(of) for of in self.heads]}


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value

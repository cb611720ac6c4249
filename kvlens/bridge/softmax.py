"""A softmax layer of the bridge with a KV bias, implemented entirely through the layer's hook points.

    z = (Z_c z_c + Z_b z_b) / (Z_c + Z_b)          Z_c = sum of exp of the masked scores, attention sink included

q comes from the hook point at which it is scored (:class:`Points`) and Z_c from ``hook_attn_scores``, both as other hooks leave
them; ``hook_pattern`` is scaled by Z_c / (Z_c + Z_b) and z_b's share is added at ``hook_z``, both before other hooks see them.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint

from kvlens.bridge.cache import take_new_name
from kvlens.bridge.native import POINTS, VALUES
from kvlens.components import LayerBias, Normalizers
from kvlens.kv_bias import KVBias
from kvlens.model.protocol import HeadMatrices
from kvlens.model.reading import Form, Part
from kvlens.ops.softmax_attention import ScaledMass, join_bias
from kvlens.ops.softmax_features import ScoreRule

HOOKS = ("hook_b_kv", "hook_b_d", "hook_b_keys", "hook_normalizer", "hook_z_context", "hook_z_bias")


class Points(NamedTuple):
    """Where an attention component shows queries and keys as they are scored, and values: its hook points or a projection's.

    A projection's ``hook_out`` holds [batch, pos, head * d]; the component's own hold heads first, [batch, head, pos, d].
    """

    q: str = "hook_rot_q"
    k: str = "hook_rot_k"
    v: str = "v.hook_out"


HOOKED_BY_KVLENS = Points(v=VALUES)
"""Of a component that :func:`kvlens.bridge.native.add_hook_points` was given."""


class HeadSizes(NamedTuple):
    """Query heads, key-value heads, the dimensions of a value, and those of a key: another number in latent attention."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    d_key: int


class SoftmaxLayer(Part):
    """One softmax layer, or the attention of a layer that has a recurrent state too.

    Args:
        attn: the bridge's attention component; it gets the hook points of :data:`HOOKS`.
        layer: its number.
        sizes: of its heads.
        rule: how it scores a key.
        points: where its queries, keys and values are seen.
        component_name: what its block calls the component.
    """

    def __init__(
        self,
        attn: nn.Module,
        layer: int,
        sizes: HeadSizes,
        rule: ScoreRule,
        points: Points = HOOKED_BY_KVLENS,
        component_name: str = "attn",
    ):
        self.attn: Any = attn
        self.layer, self.sizes, self.rule, self.points = layer, sizes, rule, points
        self.component_name = component_name
        self.is_unread = False
        self.normalizers: Normalizers | None = None
        for name in HOOKS:
            if not isinstance(getattr(attn, name, None), HookPoint):
                point = HookPoint()
                point.name = f"blocks.{layer}.attn.{name}"
                setattr(attn, name, point)

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.sizes.n_heads

    def hook_points(self) -> dict[str, HookPoint]:
        """Hook points that TransformerLens' scan of the modules names otherwise: in Nemotron-H, all that kvlens adds."""
        if self.component_name == "attn":
            return {}
        names = [*HOOKS, *POINTS, *(f"{x}.hook_{end}" for x in "qkvo" for end in ("in", "out"))]
        return {f"blocks.{self.layer}.attn.{name}": self._point(name) for name in names}

    def join(self, whole: KVBias, positions: Int[Tensor, "#batch pos"]) -> list[RemovableHandle]:
        """Let the next pass, with tokens at ``positions`` of the text, read a bias. Remove the handles after it."""
        bias = LayerBias.of(whole, self.layer, positions.device)
        seen: dict[str, Tensor] = {}
        self.is_unread = True

        def see_q(q: Tensor) -> None:
            seen["q"] = self._heads(q, self.points.q)

        def see_scores(scores: Tensor) -> None:
            seen["share"], seen["z_bias"] = self._joined(seen.pop("q"), scores, bias, positions)

        def scale_pattern(pattern: Tensor) -> Tensor:
            return pattern * seen.pop("share").transpose(1, 2).to(pattern.dtype)

        def see_gate(gate: Tensor) -> None:
            seen["gate"] = gate.sigmoid()

        def add_bias(z: Tensor) -> Tensor:
            z_bias = seen.pop("z_bias")
            self.is_unread = False
            if "gate" in seen:
                z_bias = z_bias * seen.pop("gate").reshape(z_bias.shape)
            z_bias = self.attn.hook_z_bias(z_bias.to(z.dtype))
            return (self.attn.hook_z_context(z.reshape(z_bias.shape)) + z_bias).reshape(z.shape)

        handles = [
            _at(self._point(self.points.q), see_q),
            _at(self.attn.hook_attn_scores, see_scores),
            _at(self.attn.hook_pattern, scale_pattern, first=True),
            _at(self.attn.o.hook_in, add_bias, first=True),
        ]
        gate = getattr(self.attn, "hook_q_gate", None)
        return handles if gate is None else [*handles, _at(gate, see_gate)]

    def observe(self, seen: dict[tuple[int, str], Tensor]) -> list[RemovableHandle]:
        """Let the next pass put keys as scored, and values, [batch, kv_head, pos, d_head], into ``seen`` by layer and name."""

        def see(name: str, point: str) -> RemovableHandle:
            def put(x: Tensor) -> None:
                seen[self.layer, name] = self._heads(x, point).transpose(1, 2)

            return _at(self._point(point), put)

        return [see("k", self.points.k), see("v", self.points.v)]

    def attention_points(self) -> dict[str, tuple[nn.Module, Form]]:
        """See :meth:`kvlens.model.reading.Part.attention_points`."""

        def heads(x: Tensor) -> Tensor:
            return self._heads(x, "o.hook_in")

        points: dict[str, tuple[nn.Module, Form]] = {
            "pattern": (self.attn.hook_pattern, None),
            "v": (self._point(self.points.v), lambda x: self._heads(x, self.points.v)),
            "z": (self.attn.o.hook_in, heads),
            "z_context": (self.attn.hook_z_context, heads),
            "z_bias": (self.attn.hook_z_bias, heads),
        }
        gate = getattr(self.attn, "hook_q_gate", None)
        return points if gate is None else {**points, "gate": (gate, lambda x: heads(x.sigmoid()))}

    @property
    def component(self) -> Any:
        """The bridge's attention component."""
        return self.attn

    @property
    def output(self) -> nn.Module:
        """The output projection."""
        projection: nn.Module = self.attn.o.original_component
        return projection

    @property
    def output_bias(self) -> Tensor | None:
        """b_O; None without one."""
        return getattr(self.output, "bias", None)

    def matrices(self) -> HeadMatrices | None:
        """The weights by query head; None where heads are not linear maps, or the bridge does not show the weights."""
        if "gate" in self.attention_points() or self.sizes.d_key != self.sizes.d_head or self._is_latent():
            return None
        found: list[Any] = [getattr(self.attn, name, None) for name in ("W_Q", "W_K", "W_V")]
        if any(weight is None for weight in found):
            return None  # the bridge has no name for them (Nemotron-H)
        w_q, w_k, w_v = (weight.repeat_interleave(self.n_heads // len(weight), dim=0) for weight in found)
        return HeadMatrices(w_q, w_k, w_v, self.output_weights())

    def _is_latent(self) -> bool:
        return hasattr(self.attn.original_component, "kv_a_proj_with_mqa")

    def output_weights(self) -> Float[Tensor, "head d_head d_model"]:
        """W_O of each head."""
        weights: Any = self.output.weight
        by_output: Tensor = weights.T if type(self.output).__name__ != "Conv1D" else weights
        return by_output.unflatten(0, (self.sizes.n_heads, self.sizes.d_head))

    def _point(self, name: str) -> HookPoint:
        point: HookPoint = attrgetter(name)(self.attn)
        return point

    def _heads(self, x: Tensor, point: str) -> Float[Tensor, "batch pos some_head d_head"]:
        """``x`` as it passes a hook point: see :class:`Points`."""
        if not point.endswith((".hook_out", ".hook_in")):
            return x.transpose(1, 2)
        return x if x.dim() == 4 else x.unflatten(-1, (-1, self.sizes.d_head))

    def _joined(
        self,
        q: Float[Tensor, "batch pos head d_key"],
        scores: Float[Tensor, "batch head pos key"],
        bias: LayerBias,
        positions: Int[Tensor, "#batch pos"],
    ) -> tuple[Float[Tensor, "batch pos head 1"], Float[Tensor, "batch pos head d_head"]]:
        """The context's share of the normalizer, and z of the bias, divided by the whole normalizer."""
        wide = torch.promote_types(q.dtype, torch.float32)
        bias, _ = bias.through_hooks(self.attn, self.sizes.n_heads, q.device, wide).in_window(self.rule, positions)
        phi = bias.phi(q.to(wide), self.rule, positions if self.rule.needs_distance else None, bias.b_kv, bias.b_d)
        ones = torch.ones((), device=q.device, dtype=wide).expand(*q.shape[:-1], 1)
        joined = join_bias(ones, self._mass(scores.to(wide)), phi, bias.b_kv, bias.b_d)
        self.attn.hook_normalizer(joined.log_normalizer)
        if self.normalizers is not None:
            self.normalizers.see(joined.below_zero())
        return joined.z_context, joined.z_bias

    def _mass(self, scores: Float[Tensor, "batch head pos key"]) -> ScaledMass:
        """Z_c relative to its largest term."""
        top = scores.detach().amax(dim=-1)
        sinks = getattr(self.attn.original_component, "sinks", None)
        if sinks is not None:
            top = torch.maximum(top, sinks.detach()[:, None].to(top))
        shift = top.masked_fill(top == -torch.inf, 0.0)  # inf - inf would be NaN
        # a term below e^-80 of the largest changes no digit; left at a mask's size it would take exp ten times as long
        mass = (scores - shift[..., None]).clamp(min=-80).exp().sum(dim=-1)
        if sinks is not None:
            mass = mass + (sinks[:, None].to(mass) - shift).exp()
        return ScaledMass(mass.transpose(1, 2), top.transpose(1, 2))


def put_right(attn: Any, points: Points) -> None:
    """Let a component of the bridge know its cache by any name, and round as Transformers does, in two places.

    Rotated queries and keys have the dtype of the model (OLMo's are rotated in float32), and a mask fits into float32, in which
    the softmax is computed: its lowest number is -inf there in a float64 model, and a row of padding NaN.
    """
    for name in (points.q, points.k):
        if name.startswith("hook_rot"):
            getattr(attn, name).register_forward_hook(partial(_in_dtype_of, attn.o))
    attn.register_forward_pre_hook(_with_mask_in_float32, with_kwargs=True)
    if points is not HOOKED_BY_KVLENS:
        take_new_name(attn)


def _in_dtype_of(projection: nn.Module, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.to(next(projection.parameters()).dtype)


def _with_mask_in_float32(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    mask, hidden = kwargs.get("attention_mask"), kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    if not isinstance(mask, Tensor) or mask.dim() < 4 or hidden.dtype != torch.float64:
        return None
    lowest = torch.finfo(torch.float32).min
    mask = hidden.new_zeros(()).where(mask, lowest) if mask.dtype == torch.bool else mask.clamp(min=lowest)
    return args, {**kwargs, "attention_mask": mask}


def _at(point: nn.Module, function: Callable[[Tensor], Tensor | None], first: bool = False) -> RemovableHandle:
    """``function`` on what passes ``point``: before everything that is hooked to it, or after."""
    return point.register_forward_hook(lambda module, args, output: function(output), prepend=first)

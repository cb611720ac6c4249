"""A softmax layer of the bridge with a KV bias: the keys of the bias stand behind the text's, as if a cache had brought them.

    z = sum of p_j v_j + sum of p_r u_r          p = softmax of the scores of the text's keys j and of s_r + log w_r

The component scores the keys of the bias itself, as it scores any other: it gets them from what it takes for its cache, and
log w_r through its mask. What is hooked to scores, pattern or the summands of z sees the text alone, and weights may be
negative: then the columns of the bias are taken out of the scores again, and the two sides are joined in log space,

    z = (Z_c z_c + Z_b z_b) / (Z_c + Z_b)          Z_c = sum of exp of the masked scores, attention sink included

with Z_c from ``hook_attn_scores`` as other hooks leave it; ``hook_pattern`` is scaled by Z_c / (Z_c + Z_b) and z_b's share is
added at ``hook_z``, both before other hooks see them. A bias whose features are not keys is joined in the same way; its scores
are computed from the queries.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import MLAAttentionBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformers import Cache

from kvlens.bridge.keywords import cache_among, with_cache
from kvlens.bridge.native import NAME, NATIVE_POINTS, OWNER, VALUES_HOOK
from kvlens.components import LayerBias, Normalizers, Remembered, is_hooked
from kvlens.kv_bias import Features, Keys, KVBias
from kvlens.kv_bias.features import in_use
from kvlens.model.protocol import Form, HeadMatrices, ReadPoint, ScoredPart
from kvlens.ops.softmax_attention import ScaledFeatures, ScaledMass, join_bias
from kvlens.ops.softmax_features import ScoreRule, distance_scores, scaled_exp, virtual_key_scores

HOOKS = ("hook_b_kv", "hook_b_d", "hook_b_keys", "hook_normalizer", "hook_z_context", "hook_z_bias")
BETWEEN = ("hook_attn_scores", "hook_pattern", "hook_normalizer", "hook_z_context", "hook_z_bias")
"""What is seen here belongs to the text alone, or to the bias alone."""

SAMPLE = 64
"""Tokens of which a model's scores are compared with what kvlens takes them to be."""


class HeadSizes(NamedTuple):
    """Query heads, key-value heads, the dimensions of a value, and those of a key: another number in latent attention."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    d_key: int


class BiasColumns(NamedTuple):
    """The bias of a layer in a pass, as hooks leave it: its keys by key-value head, and what is added to their scores.

    ``values`` is None where they are read apart from the text's.
    """

    bias: Features
    keys: Float[Tensor, "#batch kv_head column d_key"]
    values: Float[Tensor, "#batch kv_head column d_head"] | None
    added: Float[Tensor, "#batch #head #pos column"]


class SoftmaxLayer(ScoredPart):
    """One softmax layer, or the attention of a layer that has a recurrent state too.

    Args:
        attn: the bridge's attention component; it gets the hook points of :data:`HOOKS`, and :meth:`forward`.
        layer: its number.
        sizes: of its heads.
        window: how many tokens a query sees, including its own; None for all.
        component_name: what its block calls the component.
    """

    def __init__(
        self, attn: GeneralizedComponent, layer: int, sizes: HeadSizes, window: int | None = None, component_name: str = "attn"
    ):
        self.attn = self.component = attn
        self.layer, self.sizes = layer, sizes
        held = self.attn.original_component
        scale = 1 / getattr(held, "scaling", sizes.d_key**-0.5)
        self.rule = ScoreRule(scale, getattr(held, "attn_logit_softcapping", None), window=window)
        self.component_name = component_name
        self.is_unread = False
        self.forget(None)
        self.is_native = hasattr(attn, VALUES_HOOK)
        self.keys = HookPoint()
        self.values: HookPoint = self.attn.hook_values if self.is_native else HookPoint()
        self._given: OrderedDict[int, tuple[LayerBias, Tensor]] = OrderedDict()
        self._columns: BiasColumns | None = None
        for name in HOOKS:
            setattr(attn, name, HookPoint())
            getattr(attn, name).name = f"blocks.{layer}.attn.{name}"
        self._points = [getattr(attn, name) for name in ("hook_attn_scores", "hook_pattern", *HOOKS)]
        self._forward_of_bridge = self.attn.forward
        self.attn.__dict__["forward"] = self.forward  # as of a recurrent layer
        self.attn.original_component.__dict__[OWNER] = self

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.sizes.n_heads

    @property
    def n_kv_heads(self) -> int:
        """Key-value heads."""
        return self.sizes.n_kv_heads

    def hook_points(self) -> dict[str, HookPoint]:
        """Hook points that TransformerLens' scan of the modules names otherwise: in Nemotron-H, all that kvlens adds."""
        if self.component_name == "attn":
            return {}
        names = [*HOOKS, *NATIVE_POINTS, *(f"{x}.hook_{end}" for x in "qkvo" for end in ("in", "out"))]
        points = {"hook_z": self.attn.o.hook_in} | {name: attrgetter(name)(self.attn) for name in names}  # elsewhere an alias
        return {f"blocks.{self.layer}.attn.{name}": point for name, point in points.items()}

    def forget(self, normalizers: Normalizers | None) -> None:
        """Drop what was remembered of a bias, before there is another or none; ``normalizers`` counts those under the next."""
        self.normalizers = normalizers
        self._layer_bias: Remembered[LayerBias] = Remembered()
        self._columns_then: Remembered[BiasColumns] = Remembered()

    def join(self, whole: KVBias, positions: Int[Tensor, "#batch pos"]) -> list[RemovableHandle]:
        """Let the next pass, with tokens at ``positions`` of the text, read a bias. Remove the handles after it."""
        handle = RemovableHandle(self._given)
        device = positions.device
        of_layer = partial(LayerBias.of, whole, self.layer, device)
        tensors = whole.layers[self.layer].tensors().values()
        self._given[handle.id] = self._layer_bias.of(of_layer, *tensors, under=(whole, device)), positions
        self.is_unread = True
        return [handle]

    def score_rule(self) -> ScoreRule:
        """How the component scores a key."""
        return self.rule

    @property
    def queries(self) -> ReadPoint:
        """Say where queries pass as they are scored, and what makes [batch, pos, head, d_key] of them there."""
        attn, n_heads = self.attn, self.n_heads
        if isinstance(attn, MLAAttentionBridge):
            point = attn.hook_q
        elif getattr(attn.config, "qk_norm_after_rope", False):
            point = attn.hook_q_normed
        elif hasattr(attn, "hook_rot_q"):
            point = attn.hook_rot_q
        else:
            return attn.q.hook_out, lambda q: q if q.dim() == 4 else q.unflatten(-1, (n_heads, -1))
        return point, lambda q: q.transpose(1, 2)

    @property
    def sinks(self) -> Float[Tensor, " head"] | None:
        """The log-scores of attention sinks; None without."""
        return getattr(self.attn.original_component, "sinks", None)

    def observe(self, seen: dict[tuple[int, str], Tensor], names: Iterable[str] = "kv") -> list[RemovableHandle]:
        """Let the next pass put what is named into ``seen``, by layer and name. Remove the handles after it.

        Keys as scored and values, "k" and "v", are [batch, kv_head, pos, d], queries as scored, "q", [batch, pos, head, d_key],
        the logarithms of normalizers under a bias, "log_n", [batch, pos, head], and the masked "scores" of the first text, its
        first :data:`SAMPLE` tokens, [1, head, pos, pos]; others are those of :meth:`attention_points`.
        """
        points: dict[str, ReadPoint] = {
            **self.attention_points(),
            "k": (self.keys, None),
            "v": (self.values, None),
            "q": self.queries,
            "log_n": (self.attn.hook_normalizer, None),
            "scores": (self.attn.hook_attn_scores, lambda scores: scores[:1, :, :SAMPLE, :SAMPLE].clone()),
        }

        def put(name: str, form: Form, x: Tensor) -> None:
            seen[self.layer, name] = x if form is None else form(x)

        return [_at(points[name][0], partial(put, name, points[name][1])) for name in names if name in points]

    def scores_as_said(
        self,
        q: Float[Tensor, "batch pos head d_key"],
        k: Float[Tensor, "batch kv_head pos d_key"],
        scores: Float[Tensor, "1 head pos pos"],
    ) -> bool:
        """Whether these masked scores are what :meth:`score_rule` says of queries and keys, up to rounding."""
        seen = scores.transpose(1, 2)
        said = virtual_key_scores(q[:1, :SAMPLE], k[:1, :, :SAMPLE], self.rule._replace(window=None)).to(seen)
        visible = seen > _lowest(seen.dtype) / 2
        return bool(((said - seen).abs() <= 0.05 * seen.where(visible, 0).abs().max()).where(visible, True).all())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The component's forward pass."""
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        given, cache = next(reversed(self._given.values()), None), cache_among(kwargs)
        self._columns = columns = None if given is None else self._read(*given, hidden)
        points = (getattr(self.attn, name) for name in NATIVE_POINTS if self.is_native)
        wanted = columns is not None or is_hooked(self.keys, self.values, *points)
        by_mask = columns is not None or (wanted and self.is_native)
        kwargs["attention_mask"] = self._mask(kwargs.get("attention_mask"), hidden, cache, by_mask)
        with ExitStack() as stack:
            if self.is_native and wanted:
                config = self.attn.original_component.config
                stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
                config._attn_implementation = NAME
            elif not self.is_native:
                kwargs = with_cache(kwargs, _Cache(self, cache) if wanted else cache)
            for name in ("hook_rot_q", "hook_rot_k"):  # OLMo's are rotated in float32, and rounded as in Transformers
                if hidden.dtype.itemsize < 4 and hasattr(self.attn, name):
                    stack.callback(_at(getattr(self.attn, name), lambda x: x.to(hidden.dtype), first=True).remove)
            if columns is not None and columns.values is None:
                for handle in self._apart(columns):
                    stack.callback(handle.remove)
            try:
                return self._forward_of_bridge(*args, **kwargs)
            finally:
                self._columns = None

    def extended(
        self, k: Float[Tensor, "batch kv_head key d_key"], v: Float[Tensor, "batch kv_head key d_head"]
    ) -> tuple[Tensor, Tensor]:
        """All keys and values of the text, with those of the bias behind them."""
        if self._columns is None:
            return k, v
        keys, values = self._columns.keys, self._columns.values
        k = torch.cat([k, keys.to(k).expand(len(k), -1, -1, -1)], dim=2)
        if values is None:
            return k, v
        self.is_unread = False
        return k, torch.cat([v, values.to(v).expand(len(v), -1, -1, -1)], dim=2)

    def _read(self, bias: LayerBias, positions: Int[Tensor, "#batch pos"], hidden: Float[Tensor, "batch pos d"]) -> BiasColumns:
        """What is read of a bias in this pass: as in the last one, where nothing is hooked and positions do not matter."""
        make, rule = partial(self._columns_of, bias, positions, hidden), self.rule
        differs = rule.needs_distance or rule.window is not None or is_hooked(*self._points)
        under = hidden.dtype, hidden.device
        tensors = tuple(bias.part.tensors().values()) if isinstance(bias.part, Keys) else ()
        columns = make() if differs or not tensors else self._columns_then.of(make, *tensors, under=under)
        if columns.values is not None and self.normalizers is not None:
            self.normalizers.see_positive(hidden[..., :1].expand(-1, -1, self.n_heads))
        return columns

    def _columns_of(
        self, held: LayerBias, positions: Int[Tensor, "#batch pos"], hidden: Float[Tensor, "batch pos d"]
    ) -> BiasColumns:
        """What is read of a bias, as hooks leave it."""
        wide, n = torch.promote_types(hidden.dtype, torch.float32), self.sizes.n_kv_heads
        bias = held.through_hooks(self.attn, self.n_heads, hidden.device, wide)
        if not isinstance(bias, Keys):
            return BiasColumns(bias, hidden.new_zeros(1, n, 0, self.sizes.d_key), None, hidden.new_zeros(1, 1, 1, 0))
        bias = bias.in_window(self.rule, positions)
        moved = (x.to(hidden.device) for x in (bias.keys, bias.distance))
        # where a hook made the keys of a group's heads differ, each head has columns of its own
        keys, distance = (x.unflatten(1, (n, -1)).flatten(2, 3) for x in moved)
        values, added = None, keys.new_zeros(1, 1, 1, keys.shape[2])
        apart = is_hooked(*(getattr(self.attn, name) for name in BETWEEN)) or bias.b_kv.shape[1:3] != keys.shape[1:3]
        extra = None if apart else held.extra_keys(bias, keys.dtype)
        # the logarithm of a weight is too coarse in half precision
        if extra is not None and (wide == hidden.dtype or not extra.weighted):
            values = extra.values
            added = self._by_head(extra.log_weights[:, :, None])
        if self.rule.needs_distance:
            added = added + self._by_head(distance_scores(self.rule, distance, positions, n))
        return BiasColumns(bias, keys, values, added)

    def _by_head(self, added: Float[Tensor, "#batch kv_head #pos column"]) -> Float[Tensor, "#batch #head #pos column"]:
        """Give each query head what is given of its key-value head; one for all where they are equal."""
        is_shared = bool((added == added[:, :1]).all())
        return added[:, :1] if is_shared else added.repeat_interleave(self.n_heads // added.shape[1], dim=1)

    def _mask(
        self, mask: Tensor | None, hidden: Float[Tensor, "batch pos d"], cache: Cache | None, wanted: bool
    ) -> Tensor | None:
        """The mask, to be added to scores if that is wanted, with what is added to those of the bias behind it."""
        columns, lowest = self._columns, _lowest(hidden.dtype)
        is_whole = isinstance(mask, Tensor) and mask.dim() == 4
        if not wanted and not (is_whole and hidden.dtype == torch.float64):
            return mask
        if not is_whole:
            n = hidden.shape[1]
            n_keys = n if cache is None else cache.get_mask_sizes(n, self.layer)[0]
            causal = torch.ones(1, 1, n, n_keys, dtype=torch.bool, device=hidden.device).tril(n_keys - n)
            mask = causal if mask is None else causal & mask[:, None, None, -n_keys:].bool()
        assert mask is not None
        mask = hidden.new_zeros(()).where(mask, lowest) if mask.dtype == torch.bool else mask.clamp(min=lowest)
        if columns is None:
            return mask
        added = columns.added.to(mask).clamp(min=lowest)
        shape = [max(sizes) for sizes in zip(mask.shape[:-1], added.shape[:-1], strict=True)]
        return torch.cat([mask.expand(*shape, -1), added.expand(*shape, -1)], dim=-1)

    def _apart(self, columns: BiasColumns) -> list[RemovableHandle]:
        """Read the values of the bias apart from the text's in this pass. Remove the handles after it."""
        seen: dict[str, Tensor] = {}
        n, (point, form) = columns.keys.shape[2], self.queries

        def split(scores: Tensor) -> Tensor:
            text, seen["virtual"] = scores.split([scores.shape[-1] - n, n], dim=-1)
            return text

        def see_queries(q: Tensor) -> None:
            seen["q"] = form(q) if form is not None else q

        def see_scores(scores: Tensor) -> None:
            phi = self._phi(columns.bias, seen.pop("virtual"), seen.pop("q", None))
            seen["share"], seen["z_bias"] = self._joined(columns.bias, phi, scores)

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
            _at(self.attn.hook_attn_scores, split, first=True),
            _at(self.attn.hook_attn_scores, see_scores),
            _at(self.attn.hook_pattern, scale_pattern, first=True),
            _at(self.attn.o.hook_in, add_bias, first=True),
        ]
        if not isinstance(columns.bias, Keys):
            handles.append(_at(point, see_queries))
        gate = getattr(self.attn, "hook_q_gate", None)
        return handles if gate is None else [*handles, _at(gate, see_gate)]

    def attention_points(self) -> dict[str, ReadPoint]:
        """See :meth:`kvlens.model.Part.attention_points`."""

        def heads(x: Tensor) -> Tensor:
            return x if x.dim() == 4 else x.unflatten(-1, (-1, self.sizes.d_head))

        points: dict[str, ReadPoint] = {
            "pattern": (self.attn.hook_pattern, None),
            "values": (self.values, lambda x: x.transpose(1, 2)),
            "z": (self.attn.o.hook_in, heads),
            "z_context": (self.attn.hook_z_context, heads),
            "z_bias": (self.attn.hook_z_bias, heads),
        }
        gate = getattr(self.attn, "hook_q_gate", None)
        return points if gate is None else {**points, "gate": (gate, lambda x: heads(x.sigmoid()))}

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
        is_latent = hasattr(self.attn.original_component, "kv_a_proj_with_mqa")
        if "gate" in self.attention_points() or self.sizes.d_key != self.sizes.d_head or is_latent:
            return None
        names = ("W_Q", "W_K", "W_V")
        if not all(hasattr(self.attn, name) for name in names):
            return None  # the bridge has no name for them (Nemotron-H)
        found = [getattr(self.attn, name) for name in names]
        w_q, w_k, w_v = (weight.repeat_interleave(self.n_heads // len(weight), dim=0) for weight in found)
        return HeadMatrices(w_q, w_k, w_v, self.output_weights())

    def output_weights(self) -> Float[Tensor, "head d_head d_model"]:
        """W_O of each head."""
        weights: Tensor = self.attn.o.original_component.weight
        rows = "(head d) model" if type(self.output).__name__ == "Conv1D" else "model (head d)"
        return rearrange(weights, f"{rows} -> head d model", head=self.sizes.n_heads)

    def _phi(
        self, bias: Features, virtual: Float[Tensor, "batch head pos column"], q: Float[Tensor, "batch pos head d_key"] | None
    ) -> ScaledFeatures:
        """phi(q): from the scores of the bias's keys, or from the queries for features that are not keys."""
        n_heads, wide = self.n_heads, bias.b_d.dtype
        if q is not None:
            return bias.phi(q.to(wide), self.rule, None)
        logs = virtual.to(wide).masked_fill(virtual < _lowest(virtual.dtype) / 2, -torch.inf)
        if logs.shape[-1] != bias.b_d.shape[-1]:  # a head's own columns among those of its group
            group = n_heads // self.sizes.n_kv_heads
            of_group = rearrange(logs, "b (k g) pos (of r) -> b k g pos of r", g=group, of=group)
            logs = rearrange(of_group.diagonal(dim1=2, dim2=4), "b k pos r g -> b (k g) pos r")
        used = in_use(bias.b_kv, bias.b_d).repeat_interleave(n_heads // bias.b_d.shape[1], dim=1)
        phi = scaled_exp(logs.transpose(1, 2), used)
        log_scale = bias.log_scale.to(wide).repeat_interleave(n_heads // bias.log_scale.shape[1], dim=1)
        return phi._replace(log_scale=phi.log_scale + log_scale[:, None])

    def _joined(
        self, bias: Features, phi: ScaledFeatures, scores: Float[Tensor, "batch head pos key"]
    ) -> tuple[Float[Tensor, "batch pos head 1"], Float[Tensor, "batch pos head d_head"]]:
        """The context's share of the normalizer, and z of the bias, divided by the whole normalizer."""
        wide = bias.b_d.dtype
        mass = ScaledMass.of_scores(scores.to(wide), self.sinks)
        ones = torch.ones((), device=scores.device, dtype=wide).expand(*phi.log_scale.shape, 1)
        joined = join_bias(ones, mass, phi, bias.b_kv, bias.b_d)
        self.attn.hook_normalizer(joined.log_normalizer)
        if self.normalizers is not None:
            self.normalizers.see(joined.below_zero())
        return joined.z_context, joined.z_bias


@dataclass(frozen=True, eq=False)
class _Cache:
    """Takes the place of a cache, if there is one: the component finds all keys and values in it, those of the bias too."""

    layer: SoftmaxLayer
    cache: Cache | None

    def update(self, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        k, v = self.layer.keys(k), self.layer.values(v)
        k, v = (k, v) if self.cache is None else self.cache.update(k, v, *args, **kwargs)
        return self.layer.extended(k, v)


def _lowest(dtype: torch.dtype) -> float:
    """What a mask adds to the score of an unseen key.

    It fits into float32, in which softmax is computed: the lowest number of float64 is -inf there, and a row of padding NaN.
    """
    return max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)


def _at(point: nn.Module, function: Callable[[Tensor], Tensor | None], first: bool = False) -> RemovableHandle:
    """``function`` on what passes ``point``: before everything that is hooked to it, or after."""
    return point.register_forward_hook(lambda module, args, output: function(output), prepend=first)

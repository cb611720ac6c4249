"""One layer's part of a KV bias, and how its attention reads it."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from kvlens.components.heads import is_hooked, through
from kvlens.errors import KVLensError, warn
from kvlens.kv_bias import KVBias, SoftmaxFeatures, VirtualKeys
from kvlens.ops.softmax_attention import ExtraKeys, ScaledFeatures
from kvlens.ops.softmax_features import ScoreRule

Computed = TypeVar("Computed")


class Remembered(Generic[Computed]):
    """The last result computed from some tensors, reused until one of them is replaced or written to.

    Writes are counted as autograd counts them, which leaves out those through ``tensor.data`` or numpy. Nothing is kept of
    tensors that require gradients, or that were made in inference mode, where writes are not counted. A copy of this object
    starts empty.
    """

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] = ()
        self._then: Any = None
        self._made: Any = None

    def __reduce__(self) -> Any:
        return Remembered, ()

    def of(self, make: Callable[[], Computed], *tensors: Tensor, under: Any = None) -> Computed:
        """``make()``, or what it gave when these tensors and ``under`` were the same."""
        if any(x.requires_grad or x.is_inference() for x in tensors):
            return make()
        then = under, torch.is_inference_mode_enabled(), [x._version for x in tensors]
        if then != self._then or len(tensors) != len(self._tensors) or any(map(operator.is_not, tensors, self._tensors)):
            self._made, self._then, self._tensors = make(), then, tensors
        made: Computed = self._made
        return made


class Normalizers:
    """How many normalizers of a pass are below 0 under an attached bias; one object for all layers, which warns once.

        n_i = phi(q_i).(D_i + b_D)          with positive features, n_i > 0 where b_D is a prompt's, or a sum of prompts

    A head's output is an average of values, weighted by phi(q).phi(k) / n. Where n is below 0 it is none, and it has no bound,
    since n may be near 0.
    """

    def __init__(self) -> None:
        self.n_below = self.n_seen = 0
        self.told = False

    def see(self, below_zero: Bool[Tensor, "batch pos head"]) -> None:
        """Those of one layer: True where the normalizer is below 0."""
        if not self.told:
            self.n_below += int(below_zero.sum())
            self.n_seen += below_zero.numel()

    def see_positive(self, n: Float[Tensor, "batch pos head"]) -> None:
        """Those of a layer in which none is below 0."""
        self.n_seen += n.numel()

    def tell(self) -> None:
        """After a pass: warn with the share that was below 0, the first time that there is any."""
        n_below, n_seen = self.n_below, self.n_seen
        self.n_below = self.n_seen = 0
        if self.told or not n_below:
            return
        self.told = True
        warn(
            f"under the attached KV bias {100 * n_below / n_seen:.3g} % of the normalizers of this pass (layers x heads x "
            "tokens) are below 0. There a head does not average values, and its output has no bound: models have written "
            "nonsense at a share of 0.04 %. This takes negative weights, as in -1 * a, b - a or a + 10 * (b - a); "
            "a.toward(b, c) with c from 0 to 1 has none"
        )


class LayerBias(NamedTuple):
    """b_KV, b_D and the shift state of one layer. The leading axis is the batch of prompts, 1 for a single prompt.

    ``features`` is this layer's feature map as a softmax bias stores it, with its ``log_scale`` (b_KV and b_D then have one row
    per key-value head, or per query head if single heads were selected). None for linear attention, which uses the model's own
    feature map. ``unhooked`` and ``extra`` remember what :meth:`through_hooks` and :meth:`extra_keys` gave.
    """

    b_kv: Float[Tensor, "batch head d_phi d_head"]
    b_d: Float[Tensor, "batch head d_phi"]
    last_k: Float[Tensor, "batch window_k kv_head d_head"]
    last_v: Float[Tensor, "batch window_v kv_head d_head"]
    last_q: Float[Tensor, "batch window_q head d_head"]
    position_offset: int | Int[Tensor, " batch"]
    features: SoftmaxFeatures | None
    log_scale: Float[Tensor, "batch kv_head"] | None
    unhooked: Remembered[Any]
    extra: Remembered[ExtraKeys | None]

    @classmethod
    def of(cls, bias: KVBias, layer: int, device: torch.device) -> "LayerBias":
        """The tensors of ``bias`` themselves, so that those in training are read as they are then; they are moved when read.

        ``layer`` is one with attention, numbered among all layers of the model.
        """
        held, offset = bias.layers[layer], bias.position_offset
        offset, part = offset.to(device) if isinstance(offset, Tensor) else offset, held.attention
        features, log_scale = (getattr(part, name, None) for name in ("features", "log_scale"))
        last_k, last_v, last_q = (held.last[x] for x in "kvq")
        return cls(part.b_kv, part.b_d, last_k, last_v, last_q, offset, features, log_scale, Remembered(), Remembered())

    @property
    def n_prompts(self) -> int:
        """The size of the axis ``batch``."""
        return len(self.b_kv)

    def of_keys(self) -> tuple[Tensor, ...]:
        """The tensors of virtual keys, their values and weights; none of other features."""
        if self.log_scale is None or not isinstance(self.features, VirtualKeys):
            return ()
        return self.b_kv, self.b_d, self.log_scale, self.features.keys, self.features.distance

    def extra_keys(self, dtype: torch.dtype) -> ExtraKeys | None:
        """Virtual keys in ``dtype``, as additional keys of a softmax; None where it cannot express their weights."""
        assert isinstance(self.features, VirtualKeys)
        assert self.log_scale is not None
        keys, b_kv, b_d, log_scale = self.features.keys, self.b_kv, self.b_d, self.log_scale

        def make() -> ExtraKeys | None:
            return ExtraKeys.of(keys.to(b_kv.device, dtype), b_kv, b_d, log_scale)

        return self.extra.of(make, keys, b_kv, b_d, log_scale, under=(b_kv.device, dtype))

    def phi(
        self,
        q: Float[Tensor, "batch pos head d_key"],
        rule: ScoreRule,
        positions: Int[Tensor, "#batch pos"] | None,
        b_kv: Float[Tensor, "#batch some_head d_phi d_head"],
        b_d: Float[Tensor, "#batch some_head d_phi"],
    ) -> ScaledFeatures:
        """Features of the queries, for b_KV and b_D as they will be read (after their hooks)."""
        assert self.features is not None
        assert self.log_scale is not None
        return self.features.read(q, rule, positions, self.log_scale.to(q), b_kv, b_d)

    def through_hooks(self, points: Any, n_heads: int, device: torch.device, dtype: torch.dtype) -> "LayerBias":
        """This softmax bias as the hooks on ``points`` leave it, with b_KV and b_D in ``dtype``.

        A bias that no hook changed is returned with the rows and the scale in which it is stored, and reads as without hooks.
        A changed one has log-scale 0, and a row per query head unless those of every group are equal.

        Args:
            points: has ``hook_b_kv``, ``hook_b_d`` and ``hook_b_keys``.
            n_heads: of the queries.
            device, dtype: where it is read.
        """
        assert self.log_scale is not None
        plain = self.unhooked_in(device, dtype)
        keyed = isinstance(self.features, VirtualKeys)
        hooks = {name: getattr(points, f"hook_{name}") for name in ("b_kv", "b_d", *(("b_keys",) if keyed else ()))}
        if not is_hooked(*hooks.values()):
            return plain
        shown = {name: plain.shown(name, n_heads) for name, hook in hooks.items() if name != "b_keys" or is_hooked(hook)}
        left = {name: _through(hooks[name], b) for name, b in shown.items()}
        if not any(b.requires_grad for b in left.values()) and all(torch.equal(b, shown[name]) for name, b in left.items()):
            return plain
        assert plain.log_scale is not None
        n_kv_heads = plain.log_scale.shape[-1]
        b_kv, b_d = _grouped_where_equal(n_kv_heads, left["b_kv"], left["b_d"])
        changed = plain._replace(b_kv=b_kv, b_d=b_d, log_scale=torch.zeros_like(plain.log_scale))
        if "b_keys" not in left:
            return changed
        assert isinstance(self.features, VirtualKeys)
        (keys,) = _grouped_where_equal(n_kv_heads, left["b_keys"])
        distance = self.features.distance.to(device)
        distance = distance.repeat_interleave(keys.shape[1] // distance.shape[1], dim=1).expand(len(keys), -1, -1)
        return changed._replace(features=VirtualKeys(keys, distance))

    def unhooked_in(self, device: torch.device, dtype: torch.dtype) -> "LayerBias":
        """This softmax bias where it is read, with b_KV and b_D in ``dtype``; remembered."""
        assert self.log_scale is not None
        moved = partial(self._moved, device, dtype)
        return self.unhooked.of(moved, self.b_kv, self.b_d, self.log_scale, under=(device, dtype))

    def _moved(self, device: torch.device, dtype: torch.dtype) -> "LayerBias":
        assert self.log_scale is not None
        b_kv, b_d, log_scale = self.b_kv.to(device, dtype), self.b_d.to(device, dtype), self.log_scale.to(device)
        return self._replace(b_kv=b_kv, b_d=b_d, log_scale=log_scale)

    def shown(self, name: str, n_heads: int) -> Tensor:
        """What the hook point of ``b_kv``, ``b_d`` or ``b_keys`` is given: a row per query head, and the numbers themselves.

        Two biases may be stored with different log-scales; what one of them shows can be put into the other.

        Raises:
            KVLensError: b_KV or b_D, without the log-scale, is too large or too small for its dtype.
        """
        if name == "b_keys":
            assert isinstance(self.features, VirtualKeys)
            b = self.features.keys.to(self.b_d.device)
        else:
            b = self.b_kv if name == "b_kv" else self.b_d
        b = b.repeat_interleave(n_heads // b.shape[1], dim=1)
        assert self.log_scale is not None
        if name == "b_keys" or not bool(self.log_scale.any()):
            return b
        factor = self.log_scale.to(b).exp().repeat_interleave(n_heads // self.log_scale.shape[1], dim=1)
        numbers = b * factor.reshape(*factor.shape, *[1] * (b.dim() - 2))
        before, after = (x.detach().abs().flatten(2).amax(dim=-1) for x in (b, numbers))
        held = torch.finfo(b.dtype)
        if not bool(((before == 0) | ((after > held.tiny / held.eps) & (after <= held.max))).all()):
            raise KVLensError(
                f"hook_{name}: this bias has a log-scale of {float(self.log_scale.min()):.3g} to "
                f"{float(self.log_scale.max()):.3g}, and its numbers do not fit {b.dtype}: leave hook_b_kv and hook_b_d out of "
                "what is hooked, and change the bias by select, + and * instead, or load the model in float64"
            )
        return numbers

    def in_window(self, rule: ScoreRule, positions: Int[Tensor, "#batch pos"]) -> tuple["LayerBias", int]:
        """Without the first virtual keys, as many as no query at ``positions`` of the text sees, and how many those are.

        One key always stays. Where ``rule`` has no window, nothing changes.
        """
        if rule.window is None or not isinstance(self.features, VirtualKeys):
            return self, 0
        keys, distance = self.features.keys, self.features.distance
        seen = (distance + positions.min().to(distance) < rule.window).flatten(0, -2).any(dim=0)
        first = int(seen.long().argmax()) if bool(seen.any()) else len(seen) - 1
        if first == 0:
            return self, 0
        features = VirtualKeys(keys[..., first:, :], distance[..., first:])
        return self._replace(b_kv=self.b_kv[..., first:, :], b_d=self.b_d[..., first:], features=features), first


def read_bias(attn: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor | None] | None:
    """(b_KV, b_D) of a layer of linear attention after their hooks: the attached bias, otherwise the trained one, else None.

    b_D is None under normalizer "none".
    """
    if attn.layer_bias is not None:
        b_kv, b_d = attn.layer_bias.b_kv, attn.layer_bias.b_d
    elif attn.cfg.trainable_kv_bias:
        b_kv, b_d = attn.b_KV[None], attn.b_D[None]
    else:
        return None
    b_kv, b_d = (b.to(attn.W_O.device, dtype) for b in (b_kv, b_d))
    b_kv = _through(attn.hook_b_kv, b_kv)
    return b_kv, None if attn.cfg.normalizer == "none" else _through(attn.hook_b_d, b_d)


def _through(hook: HookPoint, b: Tensor) -> Tensor:
    """``hook(b)``, of the shape of ``b`` but for the batch."""
    hooked = through(hook, b)
    if hooked.shape[1:] != b.shape[1:]:
        expected = f"[batch or 1, {', '.join(map(str, b.shape[1:]))}]"
        raise KVLensError(
            f"{hook.name}: a hook returned shape {list(hooked.shape)}, expected {expected}, with one row per query head as in "
            "bias.per_query_head()"
        )
    return hooked


def _grouped_where_equal(n_kv_heads: int, *rows: Tensor) -> tuple[Tensor, ...]:
    """Reduce rows per query head to one per key-value head if those of each group are equal, so that they read as unhooked."""
    if any(b.requires_grad for b in rows):
        return rows  # each query head has a gradient of its own
    groups = [b.unflatten(1, (n_kv_heads, -1)) for b in rows]
    if not all(torch.equal(b, b[:, :, :1].expand_as(b)) for b in groups):
        return rows
    return tuple(b[:, :, 0] for b in groups)

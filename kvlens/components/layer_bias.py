"""One layer's part of a KV bias, and how its attention reads it."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from kvlens.components.heads import is_hooked, through
from kvlens.errors import KVLensError, first_line, warn
from kvlens.kv_bias import Features, Keys, KVBias, VirtualKeys
from kvlens.kv_bias.layers import grouped_where_equal
from kvlens.ops.softmax_attention import ExtraKeys

Computed = TypeVar("Computed")


class Remembered(Generic[Computed]):
    """The last result computed from some tensors, reused until one of them is replaced or written to.

    Writes are counted as autograd counts them, which leaves out those through ``tensor.data`` or numpy. Nothing is kept of
    tensors that require gradients, or that were made in inference mode, where writes are not counted. A copy of this object
    starts empty.
    """

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] = ()
        self._then: tuple[object, bool, list[int]] | None = None
        self._made: Any = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Remembered, ()

    def of(self, make: Callable[[], Computed], *tensors: Tensor, under: object = None) -> Computed:
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


@dataclass(frozen=True, eq=False)
class LayerBias:
    """What a layer with attention reads of an attached bias.

    Attributes:
        part: the tensors of the bias themselves, so that those in training are read as they are then.
        last: the raw rows "k", "v" and "q" before the text, :attr:`kvlens.kv_bias.Layer.last`.
        position_offset: the position at which the text starts; of each row only where rows differ.
        n_prompts: the size of the axis ``batch`` of the bias; here it is 1 where all rows are the same one, but for hooks.
        unhooked, extra: what :meth:`through_hooks` and :meth:`extra_keys` gave.
    """

    part: Any
    last: Mapping[str, Float[Tensor, "batch window head d_head"]]
    position_offset: int | Int[Tensor, " batch"]
    n_prompts: int
    unhooked: Remembered[Any]
    extra: Remembered[ExtraKeys | None]

    @classmethod
    def of(cls, bias: KVBias, layer: int, device: torch.device) -> "LayerBias":
        """Of ``layer``, numbered among all layers of the model."""
        held, offset = bias.layers[layer].once(), bias.position_offset
        if isinstance(offset, Tensor):
            offset = int(offset[0]) if bool((offset == offset[0]).all()) else offset.to(device)
        return cls(held.attention, held.last, offset, bias.n_rows, Remembered(), Remembered())

    def of_every_prompt(self, b: Tensor) -> Tensor:
        """A tensor of the bias with a row of its own for each prompt, as hooks are shown it."""
        return b if len(b) == self.n_prompts else b.repeat_interleave(self.n_prompts, dim=0)

    def extra_keys(self, part: Keys, dtype: torch.dtype) -> ExtraKeys | None:
        """``part`` as :meth:`through_hooks` gave it, as further keys of a softmax; None where that cannot express it."""
        return self.extra.of(partial(part.extra, dtype), *part.tensors().values(), under=(part.b_kv.device, dtype))

    def through_hooks(self, points: object, n_heads: int, device: torch.device, dtype: torch.dtype) -> Features:
        """The part of softmax attention as the hooks on ``points`` leave it, with b_kv and b_d in ``dtype``.

        A part that no hook changed is returned with the rows and the scale in which it is stored, and reads as without hooks.
        A changed one has log-scale 0, and a row per query head unless those of every group are equal.

        Args:
            points: has ``hook_b_kv``, ``hook_b_d`` and ``hook_b_keys``.
            n_heads: of the queries.
            device, dtype: where it is read.
        """
        part, place = self.part, (device, dtype)
        plain = self.unhooked.of(partial(part.placed, *place), *part.tensors().values(), under=place)
        keyed = isinstance(plain, Keys)
        hooks = {name: getattr(points, f"hook_{name}") for name in ("b_kv", "b_d", *(("b_keys",) if keyed else ()))}
        if not is_hooked(*hooks.values()):
            return plain
        names = [name for name, hook in hooks.items() if name != "b_keys" or is_hooked(hook)]
        given = {name: self.of_every_prompt(shown(plain, name, n_heads)) for name in names}
        left = {name: _of_as_many_keys(hooks[name], b) for name, b in given.items()}
        if not any(b.requires_grad for b in left.values()) and all(torch.equal(b, given[name]) for name, b in left.items()):
            return plain
        n_kv_heads = plain.n_kv_heads
        b_kv, b_d = grouped_where_equal(n_kv_heads, left["b_kv"], left["b_d"])
        changed: Features = replace(plain, b_kv=b_kv, b_d=b_d, log_scale=torch.zeros_like(plain.log_scale))
        if "b_keys" not in left:
            return changed
        (keys,) = grouped_where_equal(n_kv_heads, left["b_keys"])
        distance = plain.distance.to(device)
        distance = distance.repeat_interleave(keys.shape[1] // distance.shape[1], dim=1).expand(len(keys), -1, -1)
        return replace(changed, features=VirtualKeys(keys, distance))


def shown(part: Features, name: str, n_heads: int) -> Tensor:
    """What the hook point of ``b_kv``, ``b_d`` or ``b_keys`` is given: a row per query head, and the numbers themselves.

    Two biases may be stored with different log-scales; what one of them shows can be put into the other.

    Raises:
        KVLensError: b_kv or b_d, without the log-scale, is too large or too small for its dtype.
    """
    b: Tensor = part.tensors()[name.removeprefix("b_") if name == "b_keys" else name].to(part.b_d.device)
    b = b.repeat_interleave(n_heads // b.shape[1], dim=1)
    if name == "b_keys" or not bool(part.log_scale.any()):
        return b
    factor = part.log_scale.to(b).exp().repeat_interleave(n_heads // part.n_kv_heads, dim=1)
    numbers = b * factor.reshape(*factor.shape, *[1] * (b.dim() - 2))
    before, after = (x.detach().abs().flatten(2).amax(dim=-1) for x in (b, numbers))
    held = torch.finfo(b.dtype)
    if not bool(((before == 0) | ((after > held.tiny / held.eps) & (after <= held.max))).all()):
        raise KVLensError(
            f"hook_{name}: this bias has a log-scale of {float(part.log_scale.min()):.3g} to "
            f"{float(part.log_scale.max()):.3g}, and its numbers do not fit {b.dtype}: leave hook_b_kv and hook_b_d out of "
            "what is hooked, and change the bias by select, + and * instead, or load the model in float64"
        )
    return numbers


def check_batch(n_prompts: int, batch: int) -> None:
    """Raise KVLensError where the rows of a bias would be broadcast over those of the input, or the other way round."""
    if n_prompts not in (1, batch):
        raise KVLensError(
            f"the attached bias holds {n_prompts} prompts and the input has batch {batch}: give one row per prompt, or attach "
            "the bias of a single prompt, which serves every row"
        )


def _of_as_many_keys(hook: HookPoint, b: Tensor) -> Tensor:
    """``hook(b)`` of virtual keys; a prompt of another length has another number of them."""

    def unequal(came: object) -> KVLensError:
        return KVLensError(
            f"{hook.name}: this bias has {b.shape[2]} keys a head, and a hook gave it another number ({came}), as a prompt of "
            "another length has; exchange heads of such prompts by bias.exchange_heads(other, [(layer, head)]), or give "
            "prompts of equal length"
        )

    try:
        hooked = through(hook, b)
    except RuntimeError as error:  # of an assignment in the hook
        if f"({b.shape[2]})" not in str(error):
            raise
        raise unequal(first_line(error)) from error
    if hooked.dim() == b.dim() and hooked.shape[2] != b.shape[2]:
        raise unequal(hooked.shape[2])
    return _checked(hook, b, hooked)


def of_one_shape(hook: HookPoint, b: Tensor) -> Tensor:
    """``hook(b)`` of a tensor of a bias, which must keep its shape but for the batch."""
    return _checked(hook, b, through(hook, b))


def _checked(hook: HookPoint, b: Tensor, hooked: Tensor) -> Tensor:
    """``hooked``, of the shape of ``b`` but for the batch."""
    if hooked.shape[1:] != b.shape[1:]:
        expected = f"[batch or 1, {', '.join(map(str, b.shape[1:]))}]"
        raise KVLensError(
            f"{hook.name}: a hook returned shape {list(hooked.shape)}, expected {expected}, with one row per query head as in "
            "bias.per_query_head()"
        )
    return hooked

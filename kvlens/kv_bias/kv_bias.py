"""KVBias: everything that a prompt leaves behind for the text after it (ICLCA eq. 13, 19; sec. 5 for softmax).

    b_KV[l, h] = sum over the prompt's tokens of phi(k) v^T       [d_phi, d_head]
    b_D[l, h]  = sum over the prompt's tokens of phi(k)           [d_phi]

and, for a model with KV shift, the *shift state*: the raw last keys, values (and queries) of the prompt, which the first
tokens of the text mix into their own. Without it the conversion is off by 4-16 %.

For a softmax model phi is not part of the model: it comes with the bias, as ``features``. In a hybrid model ``recurrent`` holds
the states of the recurrent layers, and the other fields describe only the attention layers.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.arguments import check_device
from kvlens.checks import Count, Finite, checked, ensure
from kvlens.dtypes import check_holds, dtype_of, is_dtype
from kvlens.errors import KVLensError
from kvlens.kv_bias.arithmetic import (
    fields_of_batch,
    fields_of_exchange,
    fields_of_layer,
    fields_of_selection,
    fields_of_sum,
    scaled_fields,
)
from kvlens.kv_bias.features import SoftmaxFeatures, VirtualKeys
from kvlens.kv_bias.fields import COUNTS, NO_STATES, TENSORS, Fingerprint, RecurrentStates, check_fields, check_numbers
from kvlens.kv_bias.fit import BiasFit, after_replacing, after_rounding, edited, since
from kvlens.kv_bias.layers import Layer
from kvlens.kv_bias.stack import fields_of_layers, layers_of, stacked
from kvlens.kv_bias.storage import KeyBuckets, as_numbers, fields_of_buckets, padded, read_bias_file, used_keys, write_bias_file

READ = (*TENSORS, "features", "log_scale", "recurrent", "position_offset", "fingerprint")
"""The fields on which the model's output depends."""
OF_KEYS = ("b_KV", "b_D", "features")
"""Those that a compact bias holds in buckets."""


@dataclass(frozen=True, eq=False, repr=False)
class KVBias:
    """A converted prompt, or a batch of them. Immutable: every operation returns a new one.

    ``a + b`` is a sum. *a, then b*, in which b's prompt has read a, is ``convert_prompt(model, prompt_of_b, initial=a)``.

    Sums and positive multiples of biases keep the normalizer phi(q).D positive, and so does a + c (b - a) with c from 0 to 1. A
    difference or a negative multiple may not; what the model says is then meaningless, and the pass that reads it warns, with
    the share of normalizers below 0.

    >>> from kvlens import HookedKVTransformer, convert_prompt
    >>> model = HookedKVTransformer.from_zoo("bigram-linear")
    >>> bias = convert_prompt(model, torch.tensor([3, 1, 4, 1, 5]))
    >>> bias
    KVBias(12 layers x 4 heads, d_phi 32, d_head 32, n_prompt_tokens=5, position_offset=0)
    >>> one_head = bias.select(heads=[(2, 3)])  # layer 2, head 3; zeros elsewhere
    >>> torch.equal((bias + one_head - bias).b_KV[2, 3], bias.b_KV[2, 3])
    True
    >>> bias.save("prompt.safetensors")
    >>> torch.equal(KVBias.load("prompt.safetensors").b_KV, bias.b_KV.cpu())
    True

    Where layers differ in their heads, those with fewer or smaller ones are filled up with zeros: :meth:`of_layer`.

    A fitted bias, converted or loaded, is *compact* where heads have different numbers of keys: it holds, and a
    HookedKVTransformer reads, buckets of heads (:mod:`kvlens.kv_bias.storage`); the bridge pads them. ``b_KV``, ``b_D`` and
    ``features`` are then made when one of them is first asked for, and kept instead, so that they can be written to and trained
    as those of any other; :meth:`compact` undoes it.

    Attributes:
        b_KV: [layer, (batch,) head, d_phi, d_head], per query head; for softmax per key-value head, or per query head after
            single heads were selected.
        b_D: [layer, (batch,) head, d_phi], likewise; zeros where the model has normalizer "none".
        last_k, last_v: [layer, (batch,) window, kv_head, d_head], raw rows, oldest first; window 0 where not shifted.
        last_q: [layer, (batch,) window, head, d_head], likewise.
        n_prompt_tokens: number of tokens converted, of a sum those added minus those subtracted; an int, or [batch] where
            prompts differ.
        position_offset: the position at which the text starts: 0 where RoPE follows the feature map (the bias is rebased),
            else the prompt's length; an int, or [batch] where prompts differ.
        fingerprint: of the model with which the prompt was converted.
        features: phi of a softmax model's bias; None for linear attention, whose features are the model's own.
        log_scale: [layer, (batch,) kv_head]: what b_KV and b_D stand for is exp(log_scale) times them; None with linear
            attention.
        fit: how an approximate bias was fitted, its errors if they were measured for exactly this bias, and the operations
            applied to it since. None if nothing is approximate: with linear attention, when every key of the prompt is kept,
            and for sums, multiples and selections of such biases. ``dataclasses.replace`` of a tensor of a softmax bias counts
            as an operation; writing into a tensor in place goes unnoticed.
        recurrent: the states of the recurrent layers of a hybrid model; without layers where every layer is attention. The
            axis ``layer`` of the other fields counts the attention layers (:attr:`attention_layers`).
    """

    b_KV: Float[Tensor, "layer *batch head d_phi d_head"]
    b_D: Float[Tensor, "layer *batch head d_phi"]
    last_k: Float[Tensor, "layer *batch window_k kv_head d_head"]
    last_v: Float[Tensor, "layer *batch window_v kv_head d_head"]
    last_q: Float[Tensor, "layer *batch window_q query_head d_head"]
    n_prompt_tokens: int | Int[Tensor, " batch"]
    position_offset: int | Int[Tensor, " batch"]
    fingerprint: Fingerprint
    features: SoftmaxFeatures | None = field(default_factory=lambda: None)  # a default of the class would hide __getattr__
    log_scale: Float[Tensor, "layer *batch kv_head"] | None = None
    fit: BiasFit | None = None
    recurrent: RecurrentStates = NO_STATES
    _record: Any = field(default=None, repr=False)
    """(fit, the fields in :data:`READ`) at the time of the record; dataclasses.replace passes it on."""
    _buckets: KeyBuckets | None = field(default=None, init=False, repr=False)
    """What a compact bias holds in place of :data:`OF_KEYS`."""

    def __post_init__(self):
        check_fields(self)
        if self.features is not None:
            self._keep_record()

    def _keep_record(self) -> None:
        """Record that a field was replaced, if the record itself was not."""
        made_of = {name: getattr(self, name) for name in READ}
        if self._record is not None and self._record[0] is self.fit:
            object.__setattr__(self, "fit", after_replacing(self.fit, self._record[1], made_of))
        object.__setattr__(self, "_record", (self.fit, made_of))

    def _made(self, fit: BiasFit | None, **changed: Any) -> "KVBias":
        """This bias with ``changed`` fields and the record that belongs to them; compact if this one is."""
        if self._buckets is None:
            return replace(self, **changed, fit=fit, _record=None)
        if changed.keys().isdisjoint(OF_KEYS):
            return self._held_by(changed.pop("_buckets", self._buckets), fit=fit, **changed)
        return replace(self.padded(), **changed, fit=fit, _record=None).compact()

    def _held_by(self, buckets: KeyBuckets, **changed: Any) -> "KVBias":
        """A compact bias of these buckets and the other fields of this one."""
        made = object.__new__(KVBias)
        fields = {name: value for name, value in self.__dict__.items() if name not in OF_KEYS} | changed
        record = fields["fit"], {name: fields.get(name, buckets) for name in READ}
        made.__dict__.update(fields, _buckets=buckets, _record=record)
        return made

    def __getattr__(self, name: str) -> Any:
        buckets = self.__dict__.get("_buckets")
        if buckets is None or name not in OF_KEYS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        fields = fields_of_buckets(buckets)
        fit, made_of = self._record
        self.__dict__.update(fields, _buckets=None, _record=(fit, made_of | fields))
        return fields[name]

    def compact(self) -> "KVBias":
        """The same bias, held in buckets of heads where that takes less memory; else this one.

        Keys of weight 0 move behind the others of their head, as in a file.
        """
        if self._buckets is not None or not isinstance(self.features, VirtualKeys) or self.fingerprint.layers_differ:
            return self
        buckets = KeyBuckets.of(self.tensors(), self.fingerprint.n_kv_heads)
        return self if buckets is None else self._held_by(buckets)

    def padded(self) -> "KVBias":
        """The same bias with all heads as wide as the widest; this one, if it is not compact."""
        whole = self if self._buckets is None else copy.copy(self)
        assert whole.b_KV is not None  # asking for it is what makes it
        return whole

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the prompt by its name in a file: ``b_KV``, ``log_scale``, ``features.keys``, ``recurrent.conv``."""
        whole = self.padded()
        found = {name: getattr(whole, name) for name in TENSORS}
        if whole.features is not None:
            found |= {"log_scale": self.log_scale, **{f"features.{name}": x for name, x in whole.features.tensors().items()}}
        return found | {f"recurrent.{name}": x for name, x in self.recurrent.tensors().items()}

    def stored(self) -> dict[str, Tensor]:
        """The tensors that are held: as :meth:`tensors`, but of a compact bias its keys are rows, those of all buckets."""
        if self._buckets is None:
            return self.tensors()
        rest = {name: getattr(self, name) for name in (*TENSORS[2:], "log_scale")}
        states = {f"recurrent.{name}": x for name, x in self.recurrent.tensors().items()}
        return {**self._buckets.rows, **rest, **states}

    def requiring_grad(self) -> list[str]:
        """The names of its tensors that require gradients."""
        return [name for name, x in self.stored().items() if x.requires_grad]

    def check_finite(self, what: str) -> None:
        """Raise KVLensError, as ``what``, where a number is NaN or infinite: such a bias is no prompt of any model."""
        if self._buckets is None or not all(bool(x.isfinite().all()) for x in self.stored().values()):
            check_numbers(self.padded(), what)

    def starts_where(self, other: "KVBias") -> bool:
        """Whether a text starts at the same position with both biases; always true in a model without positions."""
        offsets = torch.as_tensor(self.position_offset), torch.as_tensor(other.position_offset)
        return self.fingerprint.positional_embedding_type == "none" or bool((offsets[0] == offsets[1]).all())

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What the prompt leaves in each layer of the model: views, not to be written to (:meth:`map_layers`)."""
        return layers_of(self.padded())

    def of_layers(self, layers: Sequence[Layer], fit: BiasFit | None, **changed: Any) -> "KVBias":
        """A bias of these layers for the same model, with the record that belongs to them, and further ``changed`` fields."""
        fields = fields_of_layers(self.fingerprint, layers, self.batch_size is None, self.position_offset)
        return self._made(fit, **fields, **changed)

    @staticmethod
    def from_layers(
        layers: Sequence[Layer],
        n_prompt_tokens: int | Tensor,
        position_offset: int | Tensor,
        fingerprint: Fingerprint,
        fit: BiasFit | None = None,
        single: bool = False,
    ) -> "KVBias":
        """A bias of these layers; ``single`` for one prompt without an axis of prompts."""
        counts = dict(n_prompt_tokens=n_prompt_tokens, position_offset=position_offset, fingerprint=fingerprint)
        return KVBias(**fields_of_layers(fingerprint, layers, single, position_offset), **counts, fit=fit)  # type: ignore[arg-type]

    @property
    def attention(self) -> list[Any]:
        """The parts of the layers with attention, in order: all :class:`~kvlens.kv_bias.State`, :class:`~kvlens.kv_bias.Keys`
        or :class:`~kvlens.kv_bias.Features`."""
        return [layer.attention for layer in self.layers if layer.attention is not None]

    def with_attention(self, parts: Sequence[Any]) -> "KVBias":
        """The bias with other parts in the layers with attention, in order. It counts as an operation."""
        given = iter(parts)
        return self.map_layers(lambda layer: layer.of_attention(lambda part: next(given)))

    @property
    def kind(self) -> str | None:
        """What softmax attention reads: "virtual_keys", or another kind of features; None for linear attention."""
        return None if self.features is None else self.features.kind

    def map_layers(self, change: Callable[[Layer], Layer]) -> "KVBias":
        """The bias with ``change`` applied to every layer: the way to write into one. It counts as an operation."""
        return self.of_layers([change(layer) for layer in self.layers], self._edited("layers changed"))

    def _edited(self, step: str) -> BiasFit | None:
        """The record of a bias whose numbers were replaced: one of a softmax model is no longer exact."""
        return self.fit if self.features is None else edited(self.fit, step)

    def stacked(self, name: str) -> Tensor:
        """A copy of one tensor of all layers that have it, [layer, (batch,) ...]; smaller ones are filled up with zeros.

        Args:
            name: "b_kv", "b_d", "last_k", "last_v", "last_q"; of softmax attention "log_scale" and "keys", "distance" or the
                names of other features; "state" and "conv" of recurrent layers.
        """
        return stacked(self, name)

    @property
    def n_rows(self) -> int:
        """The number of prompts."""
        return self.batch_size or 1

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.last_k.device

    @property
    def dtype(self) -> torch.dtype:
        """Of its floating-point tensors."""
        return self.last_k.dtype

    @property
    def n_layers(self) -> int:
        return self.fingerprint.n_layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The indices of the layers described by b_KV, b_D, features and the shift state: those with attention."""
        return self.fingerprint.attention_layers

    @property
    def n_heads(self) -> int:
        """The number of query heads."""
        return self.fingerprint.n_heads

    def n_heads_of(self, layer: int) -> int:
        """The number of heads that :meth:`select` can choose in a layer: query heads, or a recurrent layer's value heads.

        A layer that has both (Falcon-H1) counts its query heads first. A layer that is an MLP or experts alone has none.
        """
        return self.first_state_head(layer) + (self.recurrent.n_heads if layer in self.recurrent.layers else 0)

    def first_state_head(self, layer: int) -> int:
        """How many heads of a layer come before those of its recurrent state: its query heads, if it has attention."""
        return self.fingerprint.heads[layer][0]

    def n_kv_heads_of(self, layer: int) -> int:
        """The number of key-value heads of a layer with attention."""
        return self.fingerprint.heads[layer][1]

    def of_layer(self, layer: int) -> "KVBias":
        """The bias of one layer, as of a model of that layer alone: without padding, where layers differ in their heads.

        The layer is one with attention, and is counted among these.
        """
        if self._buckets is not None:
            return self._layer_of_buckets(layer, narrow=True)
        return self._made(None, **fields_of_layer(self, layer))

    def _layer_of_buckets(self, layer: int, narrow: bool) -> "KVBias":
        """One layer of a compact bias, with every head as wide as in ``b_KV``, or, if ``narrow``, as the layer's widest."""
        assert self._buckets is not None
        rest = {name: getattr(self, name)[layer : layer + 1] for name in (*TENSORS[2:], "log_scale")}
        fields = {**rest, **fields_of_buckets(self._buckets, layer, narrow), "fingerprint": self.fingerprint.of_layer(layer)}
        return replace(self, **fields, recurrent=NO_STATES, fit=None, _record=None)

    @property
    def d_phi(self) -> int:
        """The number of features per head."""
        return self.b_KV.shape[-2] if self._buckets is None else self._buckets.d_phi

    @property
    def batch_size(self) -> int | None:
        """The number of prompts, or None for a single prompt without a batch axis."""
        return self.last_k.shape[1] if self.last_k.dim() == 5 else None

    @property
    def num_parameters(self) -> int:
        """How many numbers represent the prompt, summed over a batch: b_KV, b_D, virtual keys and states of recurrent layers.

        Only virtual keys with a weight or a value are counted; heads with fewer keys than others are padded with zeros.
        """
        states, f = self.recurrent.b_KV.numel(), self.fingerprint
        if f.layers_differ:
            return sum(self.of_layer(layer).num_parameters for layer in range(f.n_layers))
        whole = self.padded()
        if not isinstance(whole.features, VirtualKeys):
            return states + self.b_KV.numel() + self.b_D.numel()
        readers = whole.b_D.shape[-2] // f.n_kv_heads
        of_a_key = readers * (f.d_head + 1) + (f.d_key or f.d_head)
        return states + int(used_keys(whole.b_KV, whole.b_D, f.n_kv_heads).sum()) * of_a_key

    def __repr__(self) -> str:
        f = self.fingerprint
        features = VirtualKeys if self._buckets is not None else self.features
        kind = "" if features is None or not self.attention_layers else f"{features.kind}, "
        shifted = [x for x in "kvq" if getattr(self, f"last_{x}").shape[-3]]
        shift_state = f", shift state of {'/'.join(shifted)}" if shifted else ""
        batch = "" if self.batch_size is None else f"batch {self.batch_size}, "
        sizes = []
        if self.attention_layers:
            up_to = "up to " if f.layers_differ else ""
            sizes += [
                f"{len(self.attention_layers)} layers x {up_to}{self.n_heads} heads, d_phi {self.d_phi}, d_head {f.d_head}"
            ]
        if self.recurrent.layers and not self.recurrent.n_heads:
            sizes += [f"{len(self.recurrent.layers)} short convolutions"]
        elif self.recurrent.layers:
            d_k, d_v = self.recurrent.b_KV.shape[-2:]
            sizes += [f"{len(self.recurrent.layers)} recurrent layers x {self.recurrent.n_heads} heads, {d_k} x {d_v}"]
        return (
            f"KVBias({kind}{batch}{', '.join(sizes)}{shift_state}, n_prompt_tokens={as_numbers(self.n_prompt_tokens)}, "
            f"position_offset={as_numbers(self.position_offset)})"
        )

    def to(self, device_or_dtype: torch.device | torch.dtype | str) -> "KVBias":
        """The same bias on another device, or in another floating dtype (or its name).

        Raises:
            KVLensError: neither a device nor a floating dtype, or a dtype that this bias overflows.
        """
        to_dtype = is_dtype(device_or_dtype)
        if to_dtype:
            device_or_dtype = dtype_of(device_or_dtype, "KVBias.to")
        else:
            check_device("KVBias.to", device_or_dtype)

        def move(tensor: Tensor) -> Tensor:
            if to_dtype and not tensor.is_floating_point():
                return tensor
            moved = tensor.to(device_or_dtype)
            check_holds("KVBias.to", moved, tensor)
            return moved

        moved = self._changed(move)
        if to_dtype:
            return self._made(after_rounding(self, moved["last_k"].dtype), **moved)
        for name in COUNTS:
            value = getattr(self, name)
            moved[name] = value.to(device_or_dtype) if isinstance(value, Tensor) else value
        return self._made(self.fit, **moved)

    def detach(self) -> "KVBias":
        """The same bias, detached from the graph that ``convert_prompt(..., detach=False)`` kept."""
        return self._made(self.fit, **self._changed(Tensor.detach))

    def _changed(self, change: Callable[[Tensor], Tensor], per_prompt_only: bool = False) -> dict[str, Any]:
        """Every tensor field after ``change``, including features; ``per_prompt_only`` skips features without a batch axis, and
        is for changes that treat axes."""
        if self._buckets is not None:
            if per_prompt_only:
                return self.padded()._changed(change, per_prompt_only)
            rest = {name: change(getattr(self, name)) for name in (*TENSORS[2:], "log_scale")}
            return {**rest, "_buckets": self._buckets.map(change), "recurrent": self.recurrent.map(change)}
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in TENSORS}
        if self.log_scale is not None and self.features is not None:
            changed["log_scale"] = change(self.log_scale)
            if self.features.per_prompt or not per_prompt_only:
                changed["features"] = self.features.map(change)
        return {**changed, "recurrent": self.recurrent.map(change)}

    @checked
    def select_prompt(self, index: int) -> "KVBias":
        """One prompt of a batch, without the batch axis."""
        if self.batch_size is None:
            raise KVLensError("select_prompt: this bias holds a single prompt, without a batch axis")
        picked = self._changed(lambda tensor: tensor[:, index], per_prompt_only=True)
        for name in COUNTS:
            value = getattr(self, name)
            picked[name] = int(value[index]) if isinstance(value, Tensor) else value
        return self._made(None if self.fit is None else self.fit.select_prompt(index), **picked)

    @checked
    def repeat(self, n: Count) -> "KVBias":
        """The bias of one prompt as a batch of ``n`` equal ones, without copies."""
        changed = self._changed(lambda x: x[:, None].expand(-1, n, *x.shape[1:]), per_prompt_only=True)
        return self.padded()._made(None if self.fit is None else self.fit.repeat(n), **changed)

    @checked
    def select_prompts(self, rows: Int[Tensor, " row"]) -> "KVBias":
        """Some prompts of a batch, repetitions allowed, as a batch. It has no record of a fit."""
        if self.batch_size is None:
            raise KVLensError("select_prompts: this bias holds a single prompt, without a batch axis")
        counts = {name: value[rows] for name in COUNTS if isinstance(value := getattr(self, name), Tensor)}
        return self._made(None, **self._changed(lambda x: x[:, rows.to(x.device)], per_prompt_only=True), **counts)

    @staticmethod
    def batch(biases: Sequence["KVBias"]) -> "KVBias":
        """Batches of exact biases as one batch; those with fewer keys get keys of weight 0.

        Raises:
            KVLensError: single prompts.
        """
        if any(bias.batch_size is None for bias in biases):
            raise KVLensError("KVBias.batch: expected batches of biases; repeat(1) makes a batch of one prompt")
        return biases[0] if len(biases) == 1 else biases[0]._made(None, **fields_of_batch([b.padded() for b in biases]))

    @checked
    def exchange_layers(self, other: "KVBias", layers: Bool[Tensor, "row layer"]) -> "KVBias":
        """A batch of mixtures of two exact biases of single prompts of as many tokens: in row i those layers come from
        ``other`` for which ``layers[i]`` is True, with their shift states and recurrent states.

        Raises:
            KVLensError: biases of batches, of different models, or with different numbers of keys.
        """
        self.fingerprint.check(other.fingerprint, "exchange_layers")
        self, other = self.padded(), other.padded()
        own, theirs = self.tensors(), other.tensors()
        if self.batch_size is not None or any(x.shape != theirs[name].shape for name, x in own.items()):
            raise KVLensError(
                "exchange_layers: expected the biases of two single prompts of as many tokens; delete tokens with "
                'positions="kept", so that both have as many keys'
            )
        return self._made(None, **fields_of_exchange(self, other, layers))

    @checked
    def select(self, layers: Sequence[int] = (), heads: Sequence[tuple[int, int]] = ()) -> "KVBias":
        """Keep b_KV and b_D of the union of the named layers and (layer, head) pairs; zeros elsewhere.

        The shift state is unchanged, so that two complementary selections add up to the whole bias.

        Raises:
            KVLensError: a layer or head that does not exist.
        """
        return self._made(**fields_of_selection(self, layers, heads))

    def per_query_head(self) -> "KVBias":
        """The same bias with b_KV and b_D for every query head; a softmax bias stores them per key-value head."""
        if self._buckets is not None:
            return self.padded().per_query_head().compact()
        group = self.n_heads // self.b_KV.shape[-3]
        if group == 1:
            return self
        if self.fingerprint.layers_differ:
            layers = [self.of_layer(layer).per_query_head() for layer in range(self.n_layers)]
            return self._made(self.fit, **{x: padded([getattr(layer, x)[0] for layer in layers]) for x in ("b_KV", "b_D")})
        b_kv, b_d = self.b_KV.repeat_interleave(group, dim=-3), self.b_D.repeat_interleave(group, dim=-2)
        return self._made(self.fit, b_KV=b_kv, b_D=b_d)

    def to_cache(self) -> Any:
        """This bias as the cache of the Transformers model that it was converted with, on either front end.

        It holds copies, and grows with the text, so each generation takes a new one. ``generate`` wants prompt and text, of
        which it reads the text: of the prompt only the number of tokens matters.

        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from kvlens import KVTransformerBridge, convert_prompt
        >>> config = GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=32, n_ctx=32, vocab_size=11)
        >>> hf, same = GPT2LMHeadModel(config).eval(), GPT2LMHeadModel(config).eval()
        >>> loaded = same.load_state_dict(hf.state_dict())
        >>> model = KVTransformerBridge.boot_transformers(same)  # into which TransformerLens puts its components
        >>> prompt, text = torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[9, 2, 6]])
        >>> bias = convert_prompt(model, prompt)
        >>> logits = hf(text, cache=bias.to_cache()).logits  # positions continue behind the prompt
        >>> whole = torch.cat([prompt, text], dim=1)
        >>> torch.allclose(logits, hf(whole).logits[:, 5:], atol=1e-5)
        True
        >>> options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
        >>> torch.equal(hf.generate(whole, cache=bias.to_cache(), **options), hf.generate(whole, **options))
        True

        Before Transformers 5.24 the keyword is ``past_key_values``, which later ones take too.

        Keys are [batch, kv_head, key, d_key] per layer, after RoPE, and values [batch, kv_head, key, d_head], in the bias's
        dtype (:meth:`to`), with a batch of 1 for a single prompt (``cache.batch_repeat_interleave(n)`` repeats it). If every
        key of the prompt was kept, the cache is as Transformers makes it, for any attention function. Keys with weights, or
        fewer than the prompt's tokens, are read by the attention function that ``hf.set_attn_implementation("kvlens")``
        chooses; all others fail on them (:mod:`kvlens.kv_bias.cache`).

        Returns:
            a ``transformers.DynamicCache``.

        Raises:
            KVLensError: a cache cannot hold what this bias holds: states of recurrent layers, features that are not keys,
                negative weights, a shift state, prompts of different lengths, single heads, or values from which weight
                processing removed b_V.
        """
        from kvlens.kv_bias.cache import cache_of  # which imports Transformers

        return cache_of(self)

    def zero_like(self) -> "KVBias":
        """A bias of zeros, including the shift state: the model's own behavior, at this bias's position offset."""
        if self._buckets is not None:
            return self.padded().zero_like().compact()
        zeros: dict[str, Any] = {name: torch.zeros_like(getattr(self, name)) for name in TENSORS}
        zeros["recurrent"] = self.recurrent.map(torch.zeros_like)
        return self._made(since(self.fit, "everything set to zero"), **zeros)

    @staticmethod
    @checked
    def combine(
        *biases: "KVBias",
        weights: Sequence[float | int] | None = None,
        shift_state: Literal["equal", "first", "last", "zero"] = "equal",
    ) -> "KVBias":
        """The weighted sum of b_KV and b_D. ``kvlens.combine`` is this function.

        Args:
            biases: biases of one model with equal batch shapes.
            weights: one per bias; 1 if None.
            shift_state: ``equal`` raises an error if shift states differ; ``first`` and ``last`` use that bias's shift state
                and position offset; ``zero`` uses no shift state, and the offsets must be equal.

        Returns:
            The combined bias, on the device of the first. ``n_prompt_tokens`` is the number of tokens added, minus those
            subtracted.

        Raises:
            KVLensError: different models or batch shapes, or shift states or offsets that differ.
        """
        return _sum_of(biases, weights, shift_state)

    def toward(self, other: "KVBias", degree: float | int) -> "KVBias":
        """This bias exchanged for another by degrees: 0 leaves it, 1 is the other, more goes beyond it.

        ``a.toward(b, c)`` is ``a + c * (b - a)``, also for prompts of different lengths: the text begins behind the longer one,
        as if tokens that nobody reads stood behind the shorter; where positions are distances (ALiBi, linear attention that
        rotates features), both end where the text begins. The shift state, which is no sum, is that of the nearer bias.
        With a degree between 0 and 1 no weight is negative; outside, normalizers may be, and what the model says can mean
        nothing (a pass warns).

        What two prompts differ in can also be added: cache steering (Belitsky et al. 2025, arXiv 2507.08799) moves the values
        of a softmax prompt's last token, a persona vector (Chen et al. 2025, arXiv 2507.21509) the residual stream. On SmolLM2
        both changed the mood of 4 answers in 20, which random vectors did in none; the former changed less besides.

        >>> from kvlens import HookedKVTransformer, convert_prompt
        >>> model, of = HookedKVTransformer.from_zoo("facts-gpt2"), "Mira keeps a {}.".format
        >>> one, other, bias = (convert_prompt(model, of(animal)) for animal in ("dog", "swan", "goat"))
        >>> bias.b_KV[..., -1, :] += 4 * (one.b_KV - other.b_KV)[..., -1, :]
        >>> x, y = (model.run_with_cache(of(animal))[1]["resid_post", 1] for animal in ("dog", "swan"))
        >>> hooks = [("blocks.1.hook_resid_post", lambda resid, hook: resid + 2 * (x - y)[0, -1])]
        >>> with model.kv_bias(bias), model.hooks(fwd_hooks=hooks):  # either of them alone steers
        ...     logits = model(" Mira keeps a", prepend_bos=False)
        """
        nearer: Literal["first", "last"] = "first" if degree < 0.5 else "last"
        mixed = KVBias.combine(self, other, weights=[1 - degree, degree], shift_state=nearer)
        offsets = self.position_offset, other.position_offset
        rows = any(isinstance(offset, Tensor) for offset in offsets)
        behind = torch.maximum(*map(torch.as_tensor, offsets)) if rows else max(offsets)
        moved = replace(mixed.padded(), position_offset=behind)
        return moved if mixed._buckets is None else moved.compact()

    def __add__(self, other: "KVBias") -> "KVBias":
        """The sum of b_KV and of b_D, with b's shift state; ``+``, ``-`` and multiples are linear.

        Not *a, then b*, which is ``convert_prompt(model, prompt_of_b, initial=a)``: there b stands at later positions, its
        first tokens mix with a's last ones (KV shift), a's features turn and decay, and from the second layer on b has read a.
        Only in the first layer can they be converted apart: ``combine(carry_bias(model, a, M), convert_prompt(model,
        prompt_of_b, initial=0.0 * a), shift_state="last")``, with M tokens in b's prompt.
        """
        return self._sum(other, 1.0, "last")

    def __sub__(self, other: "KVBias") -> "KVBias":
        """``a`` without the contribution of b; the shift state is a's."""
        return self._sum(other, -1.0, "first")

    def __radd__(self, other: object) -> "KVBias":
        return self if isinstance(other, int) and other == 0 else NotImplemented  # sum([a, b]) starts from 0

    def __mul__(self, factor: float | int) -> "KVBias":
        if isinstance(factor, Tensor) and factor.dim() == 0:
            factor = factor.item()
        if not isinstance(factor, Real):
            return NotImplemented
        factor = ensure("KVBias: a factor", Finite, factor if isinstance(factor, int) else float(factor))
        return self._made(**scaled_fields(self, float(factor)))

    __rmul__ = __mul__

    def __truediv__(self, factor: float | int) -> "KVBias":
        return self * (1.0 / factor)

    def __neg__(self) -> "KVBias":
        return self * -1.0

    def _sum(self, other: "KVBias", sign: float, shift_state: str) -> "KVBias":
        if not isinstance(other, KVBias):
            return NotImplemented
        return _sum_of((self, other), (1.0, sign), shift_state, equal_offsets=True)

    @checked
    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all. An existing file is replaced, as by ``torch.save``.

        Raises:
            KVLensError: the folder does not exist or cannot be written.
        """
        write_bias_file(path, self)

    @classmethod
    @checked
    def load(cls, path: str | Path) -> "KVBias":
        """Read what :meth:`save` wrote.

        Raises:
            KVLensError: no such file, not a kvlens bias, damaged, or of another format version.
        """
        bias = read_bias_file(path, cls)
        bias.check_finite(f"KVBias.load: {path}")
        return bias if bias.fit is None else bias.compact()


def _sum_of(biases: Sequence[KVBias], weights: Sequence[float | int] | None, shift_state: str, **options: bool) -> KVBias:
    """The weighted sum; compact where one of its terms is."""
    total = biases[0]._made(**fields_of_sum(biases, weights, shift_state, **options))
    return total if all(bias._buckets is None for bias in biases) else total.compact()

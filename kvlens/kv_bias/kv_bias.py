"""KVBias: everything that a prompt leaves behind for the text after it (ICLCA eq. 13, 19; sec. 5 for softmax).

    b_KV[l, h] = sum over the prompt's tokens of phi(k) v^T       [d_phi, d_head]
    b_D[l, h]  = sum over the prompt's tokens of phi(k)           [d_phi]

and, for a model with KV shift, the *shift state*: the raw last keys, values (and queries) of the prompt, which the first
tokens of the text mix into their own. Without it the conversion is off by 4-16 %.

For a softmax model phi is not part of the model: it comes with the bias. A bias is a tuple of layers, and a layer its parts
(:mod:`kvlens.kv_bias.layers`): keys, sums of features, states, and the raw rows of the last tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvlens.arguments import check_device
from kvlens.checks import Count, Finite, checked, ensure
from kvlens.dtypes import check_holds, dtype_of, is_dtype
from kvlens.errors import KVLensError, check_known
from kvlens.kv_bias.features import same_features
from kvlens.kv_bias.fields import COUNTS, Fingerprint, check_fields, n_rows_of
from kvlens.kv_bias.fit import BiasFit, FitRecord, edited, of_sum, since
from kvlens.kv_bias.layers import BiasPart, Features, Keys, Layer, State, all_finite, padded
from kvlens.kv_bias.storage import as_numbers, read_bias_file, write_bias_file

INSTEAD_OF = {
    **dict.fromkeys(("b_KV", "b_D", "log_scale"), "stacked({0!r}), a copy, or layers[i].attention.{0}"),
    **dict.fromkeys(("last_k", "last_v", "last_q"), "stacked({0!r}), a copy, or layers[i].last"),
    "features": "layers[i].attention.features, or kind",
    "recurrent": 'layers[i].state, or stacked("state") and stacked("conv")',
}
"""What to use in place of the tensors of all layers that a bias once was."""


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
    >>> both = bias + one_head - bias
    >>> torch.equal(both.layers[2].attention.b_kv[0, 3], bias.layers[2].attention.b_kv[0, 3])
    True
    >>> bias.save("prompt.safetensors")
    >>> torch.equal(KVBias.load("prompt.safetensors").stacked("b_kv"), bias.stacked("b_kv").cpu())
    True

    What changes numbers makes new layers, most simply by :meth:`map_layers`. ``dataclasses.replace`` asks for the ``record`` of
    the new bias, so that none is said to be exact, or as exact as another, unless somebody says so.

    Attributes:
        layers: what the prompt leaves in each layer of the model.
        n_prompt_tokens: number of tokens converted, of a sum those added minus those subtracted; an int, or [batch] where
            prompts differ.
        position_offset: the position at which the text starts: 0 where RoPE follows the feature map (the bias is rebased),
            else the prompt's length; an int, or [batch] where prompts differ.
        fingerprint: of the model with which the prompt was converted.
        record: becomes ``fit``.
        single: whether it is of one prompt, and not a batch.
        fit: how an approximate bias was fitted, its errors if they were measured for exactly this bias, and the operations
            applied to it since. None if nothing is approximate: with linear attention, when every key of the prompt is kept,
            and for sums, multiples and selections of such biases. Writing into a tensor in place goes unnoticed.
    """

    layers: tuple[Layer, ...]
    n_prompt_tokens: int | Int[Tensor, " batch"]
    position_offset: int | Int[Tensor, " batch"]
    fingerprint: Fingerprint
    record: InitVar[BiasFit | None]
    single: bool = False
    fit: BiasFit | None = field(init=False)

    def __post_init__(self, record: BiasFit | None):
        object.__setattr__(self, "fit", record)
        counts = {name: getattr(self, name) for name in COUNTS}
        check_fields(self.fingerprint, self.layers, counts, self.single)

    def __getattr__(self, name: str) -> Any:
        instead = f"; use {INSTEAD_OF[name].format(name.lower())}" if name in INSTEAD_OF else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}")

    def with_layers(self, layers: Sequence[Layer]) -> "KVBias":
        """The bias with other layers; of a softmax model it is then not known how exact it is."""
        fit = self.fit if self.fingerprint.attention == "linear" else edited(self.fit, "layers changed")
        return replace(self, layers=tuple(layers), record=fit)

    def map_layers(self, change: Callable[[Layer], Layer]) -> "KVBias":
        """The bias with ``change`` applied to every layer, which is how to write into one; see :meth:`with_layers`."""
        return self.with_layers([change(layer) for layer in self.layers])

    def with_attention(self, parts: Sequence[State]) -> "KVBias":
        """The bias with other parts in the layers with attention, in order; see :meth:`with_layers`."""
        given = iter(parts)
        return self.map_layers(lambda layer: layer.of_attention(lambda part: next(given)))

    def _each(
        self,
        change: Callable[[Layer], Layer],
        record: BiasFit | None,
        single: bool | None = None,
        count: Callable[[Tensor], int | Tensor] = lambda value: value,
    ) -> "KVBias":
        """The bias with ``change`` applied to every layer, and ``count`` to the counts that prompts have one each of."""
        n, offset = (count(x) if isinstance(x, Tensor) else x for x in (self.n_prompt_tokens, self.position_offset))
        single, layers = self.single if single is None else single, tuple(map(change, self.layers))
        return replace(self, layers=layers, n_prompt_tokens=n, position_offset=offset, record=record, single=single)

    @property
    def attention(self) -> list[Any]:
        """The parts of the layers with attention, in order: all :class:`~kvlens.kv_bias.State`, :class:`~kvlens.kv_bias.Keys`
        or :class:`~kvlens.kv_bias.Features`."""
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def kind(self) -> str | None:
        """What softmax attention reads: "virtual_keys", or another kind of features; None for linear attention."""
        if self.fingerprint.attention == "linear":
            return None
        return next((part.features.kind for part in self.attention), "virtual_keys")

    def stacked(self, name: str) -> Tensor:
        """A copy of one tensor of all layers that have it, [layer, (batch,) ...]; smaller ones are filled up with zeros.

        Args:
            name: "b_kv", "b_d", "last_k", "last_v", "last_q"; of softmax attention "log_scale" and "keys", "distance" or the
                names of other features; "state" and "conv" of recurrent layers.
        """
        layers: Sequence[Layer] = self.layers
        if name == "distance" and self.kind == "virtual_keys":  # keys that a layer lacks are at distance 1
            layers = [layer.of_attention(lambda part: part.widened(self.d_phi)) for layer in layers]
        every = [layer.tensors() for layer in layers]
        free = [part.features.tensors() for part in self.attention if isinstance(part, Features)]
        check_known("stacked: no tensor of this bias", name, dict.fromkeys(n for tensors in (*every, *free) for n in tensors))
        found = [tensors[name] for tensors in every if name in tensors]
        if not found:
            return padded([tensors[name] for tensors in free])
        return padded([x[0] for x in found] if self.single else found)

    def tensors(self) -> dict[tuple[int, str], Tensor]:
        """Every tensor that has a row for each prompt, by its layer and name."""
        return {(i, name): x for i, layer in enumerate(self.layers) for name, x in layer.tensors().items()}

    def check_finite(self, what: str) -> None:
        """Raise KVLensError, as ``what``, where a number is NaN or infinite: such a bias is no prompt of any model."""
        tensors = {name: x for name, x in self.tensors().items() if x.is_floating_point()}
        if all_finite(tensors.values()):
            return
        narrowest_first = sorted(tensors.items(), key=lambda item: item[1].element_size())  # there numbers overflow
        for (layer, name), tensor in narrowest_first:
            if not bool(tensor.isfinite().all()):
                raise KVLensError(
                    f"{what}: {name} of layer {layer} is not finite ({tensor.dtype}): numbers overflowed in the prompt's pass "
                    "(convert it with the model in a wider dtype), or a hook changed them"
                )

    def starts_where(self, other: "KVBias") -> bool:
        """Whether a text starts at the same position with both biases; always true in a model without positions."""
        offsets = torch.as_tensor(self.position_offset), torch.as_tensor(other.position_offset)
        return self.fingerprint.positional_embedding_type == "none" or bool((offsets[0] == offsets[1]).all())

    @property
    def n_layers(self) -> int:
        return self.fingerprint.n_layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention."""
        return self.fingerprint.attention_layers

    @property
    def n_heads(self) -> int:
        """The number of query heads, of layers that differ the largest."""
        return self.fingerprint.n_heads

    def n_heads_of(self, layer: int) -> int:
        """The number of heads that :meth:`select` can choose in a layer: query heads, then a recurrent layer's value heads."""
        state = self.layers[layer].state
        return self.first_state_head(layer) + (0 if state is None else state.n_heads)

    def first_state_head(self, layer: int) -> int:
        """How many heads of a layer come before those of its recurrent state: its query heads, if it has attention."""
        return self.fingerprint.heads[layer][0]

    def n_kv_heads_of(self, layer: int) -> int:
        """The number of key-value heads of a layer with attention."""
        return self.fingerprint.heads[layer][1]

    @property
    def d_phi(self) -> int:
        """The number of features per head, or of keys of the widest layer."""
        return max((part.b_d.shape[2] for part in self.attention), default=0)

    @property
    def n_rows(self) -> int:
        """The number of prompts."""
        return n_rows_of(self.layers)

    @property
    def _some(self) -> Tensor:
        layers = sorted(self.layers, key=lambda layer: layer.attention is None)  # states are held in float32 or better
        return next(x for layer in layers for x in layer.tensors().values() if x.is_floating_point())

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self._some.device

    @property
    def dtype(self) -> torch.dtype:
        """Of its floating-point tensors; those of states may be wider."""
        return self._some.dtype

    @property
    def batch_size(self) -> int | None:
        """The number of prompts, or None for a single prompt without a batch axis."""
        return None if self.single else self.n_rows

    @property
    def num_parameters(self) -> int:
        """How many numbers represent the prompt, summed over a batch: b_kv, b_d, virtual keys and states of recurrent layers.

        Only virtual keys with a weight or a value are counted.
        """
        return sum(part.n_numbers for layer in self.layers for part in layer.parts)

    def __repr__(self) -> str:
        f, attention = self.fingerprint, self.attention
        kind = f"{self.kind}, " if self.kind and attention else ""
        moved = {name for layer in self.layers for name, x in layer.last.items() if name != "conv" and x.shape[1]}
        shift_state = f", shift state of {'/'.join(x for x in 'kvq' if x in moved)}" if moved else ""
        batch = "" if self.batch_size is None else f"batch {self.batch_size}, "
        sizes, states = [], [layer.state for layer in self.layers if layer.state is not None]
        if attention:
            up_to = "up to " if f.layers_differ else ""
            sizes += [f"{len(attention)} layers x {up_to}{self.n_heads} heads, d_phi {self.d_phi}, d_head {f.d_head}"]
        if states and not states[0].n_heads:
            sizes += [f"{len(states)} short convolutions"]
        elif states:
            d_k, d_v = states[0].b_kv.shape[2:]
            sizes += [f"{len(states)} recurrent layers x {states[0].n_heads} heads, {d_k} x {d_v}"]
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

        fit = self._fit_rounded(device_or_dtype) if isinstance(device_or_dtype, torch.dtype) else self.fit
        return self._each(lambda layer: layer.map(move), fit, count=move)

    def _fit_rounded(self, dtype: torch.dtype) -> FitRecord:
        """The record after a change of dtype. Rounding to half precision adds an unmeasured error of at least 0.1 %."""
        lost = torch.finfo(dtype).eps > max(torch.finfo(self.dtype).eps, torch.finfo(torch.float32).eps)
        is_softmax = self.fingerprint.attention != "linear"
        return edited(self.fit, f"rounded to {str(dtype).removeprefix('torch.')}") if lost and is_softmax else self.fit

    def detach(self) -> "KVBias":
        """The same bias, detached from the graph that ``convert_prompt(..., detach=False)`` kept."""
        return self._each(lambda layer: layer.map(Tensor.detach), self.fit)

    @checked
    def select_prompt(self, index: int) -> "KVBias":
        """One prompt of a batch, without the batch axis."""
        index = range(self.n_rows)[index]
        fit = None if self.fit is None else self.fit.select_prompt(index)
        return self._each(
            lambda layer: layer if self.n_rows == 1 else layer.rows(lambda x: x[index : index + 1]),
            fit,
            single=True,
            count=lambda value: int(value[index]),
        )

    @checked
    def repeat(self, n: Count) -> "KVBias":
        """The bias of one prompt as a batch of ``n`` equal ones, without copies."""
        fit = None if self.fit is None else self.fit.repeat(n)
        return self._each(lambda layer: layer.rows(lambda x: x.expand(n, *x.shape[1:])), fit, single=False)

    @checked
    def select_prompts(self, rows: Int[Tensor, " row"]) -> "KVBias":
        """Some prompts of a batch, repetitions allowed, as a batch."""
        fit = since(self.fit, "prompts selected")
        return self._each(lambda layer: layer.rows(lambda x: x[rows.to(x.device)]), fit, count=lambda value: value[rows])

    @staticmethod
    def batch(biases: Sequence["KVBias"]) -> "KVBias":
        """Biases of one model as one batch, of single prompts or of batches; those with fewer keys get keys of weight 0."""
        for other in biases[1:]:
            other.fingerprint.check(biases[0].fingerprint, "KVBias.batch", whose="the first bias")
        if len(biases) == 1 and not biases[0].single:
            return biases[0]
        n, offset = (
            torch.cat([torch.as_tensor(getattr(b, name), device=b.device).expand(b.n_rows) for b in biases]) for name in COUNTS
        )
        layers = tuple(map(Layer.joined, zip(*(bias.layers for bias in biases), strict=True)))
        fit = of_sum((bias.fit for bias in biases), "batches joined")
        return replace(biases[0], layers=layers, n_prompt_tokens=n, position_offset=offset, record=fit, single=False)

    @checked
    def exchange_layers(self, other: "KVBias", layers: Bool[Tensor, "row layer"]) -> "KVBias":
        """A batch of mixtures of two biases of single prompts of as many tokens: in row i those layers come from ``other``
        for which ``layers[i]`` is True, with their shift states and recurrent states.

        Raises:
            KVLensError: biases of batches, of different models, or with different numbers of keys.
        """
        self.fingerprint.check(other.fingerprint, "exchange_layers")
        shapes, others = ({name: x.shape for name, x in bias.tensors().items()} for bias in (self, other))
        if not self.single or shapes != others:
            raise KVLensError(
                "exchange_layers: expected the biases of two single prompts of as many tokens; delete tokens with "
                'positions="kept", so that both have as many keys, or exchange all heads of a layer (exchange_heads)'
            )
        every = zip(self.layers, other.layers, layers.long().T, strict=True)
        mixed = [Layer.joined([own, theirs]).rows(lambda x, i=i: x[i.to(x.device)]) for own, theirs, i in every]  # type: ignore[misc]
        return replace(self, layers=tuple(mixed), record=of_sum((self.fit, other.fit), "layers exchanged"), single=False)

    @checked
    def exchange_heads(self, other: "KVBias", heads: Sequence[tuple[int, int]]) -> "KVBias":
        """This bias with some heads, (layer, head) each, exchanged for those of another prompt, which may have another length.

        With softmax attention a layer then holds the keys of both prompts, each read by its own heads. The text begins where
        :meth:`toward` has it begin. Raw rows of the last tokens go with the heads that read them: those of queries with each
        head, those of keys and values with all heads of their group, those of a convolution with all heads of the state.

        >>> from kvlens import HookedKVTransformer, convert_prompt
        >>> model = HookedKVTransformer.from_zoo("facts-gpt2")
        >>> one, other = (convert_prompt(model, text) for text in ("Mira keeps a dog.", "Olga has a hen. Pavel has a swan."))
        >>> with model.kv_bias(one.exchange_heads(other, [(0, 1), (1, 3)])):
        ...     logits = model(" Mira keeps a", prepend_bos=False)

        Raises:
            KVLensError: biases of different models, kinds or batches; a head that does not exist.
        """
        every = [(layer, head) for layer in range(self.n_layers) for head in range(self.n_heads_of(layer))]
        if unknown := set(heads) - set(every):
            raise KVLensError(f"exchange_heads: expected (layer, head) of {every[0]} to {every[-1]}, got {min(unknown)}")
        chosen = [pair in heads for pair in every]
        own = self.select(heads=[pair for pair, taken in zip(every, chosen, strict=True) if not taken])
        mixed = KVBias.combine(own, other.select(heads=heads), shift_state="first")
        of_layers = torch.tensor(chosen).split([self.n_heads_of(layer) for layer in range(self.n_layers)])
        pairs = zip(mixed.layers, other.layers, of_layers, strict=True)
        layers = [layer.with_last_of(theirs, taken, self.first_state_head(i)) for i, (layer, theirs, taken) in enumerate(pairs)]
        record = of_sum((self.fit, other.fit), f"{len(heads)} of {len(every)} heads exchanged")
        mixed = replace(mixed, layers=tuple(layers), record=record, n_prompt_tokens=self.n_prompt_tokens)
        return mixed.behind(other).narrowed()

    @checked
    def select(self, layers: Sequence[int] = (), heads: Sequence[tuple[int, int]] = ()) -> "KVBias":
        """Keep b_KV and b_D of the union of the named layers and (layer, head) pairs; zeros elsewhere.

        The shift state is unchanged, so that two complementary selections add up to the whole bias.

        Raises:
            IndexError: a layer or head that does not exist.
        """
        counts = [self.n_heads_of(layer) for layer in range(self.n_layers)]
        kept = [torch.zeros(n) for n in counts]
        for layer in layers:
            kept[layer][:] = 1
        for layer, head in heads:
            kept[layer][head] = 1
        n_kept, n_all = sum(int(on.sum()) for on in kept), sum(counts)
        fit = self.fit if n_kept == n_all else since(self.fit, f"{n_kept} of {n_all} heads selected")
        one_number = [float(on[0]) if len(on) and bool((on == on[0]).all()) else on for on in kept]
        return replace(self, layers=tuple(map(Layer.times, self.layers, one_number)), record=fit)

    def per_query_head(self) -> "KVBias":
        """The same bias with b_kv and b_d for every query head; a softmax bias stores them per key-value head."""
        layers = [
            layer.of_attention(lambda part, n=heads[0]: part.per_query_head(n))  # type: ignore[misc]
            for layer, heads in zip(self.layers, self.fingerprint.heads, strict=True)
        ]
        return replace(self, layers=tuple(layers), record=self.fit)

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

    @classmethod
    @checked
    def from_cache(cls, model: Any, cache: object, positions: object = None, n_tokens: Count | None = None) -> "KVBias":
        """A cache that Transformers, or a method that compresses caches, has left of a prompt, as a bias.

        A whole cache gives the bias of :func:`kvlens.convert_prompt`, of a layer that slides the keys within its window. That
        the cache is of ``model``, and whole, is taken from its sizes: keys cut away with the same number left in each layer
        look like a shorter prompt, unless ``n_tokens`` says how long it was.

        >>> from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel
        >>> from kvlens import KVBias, KVTransformerBridge, convert_prompt
        >>> config = GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=32, n_ctx=32, vocab_size=11)
        >>> hf, same = GPT2LMHeadModel(config).eval(), GPT2LMHeadModel(config).eval()
        >>> loaded = same.load_state_dict(hf.state_dict())
        >>> model = KVTransformerBridge.boot_transformers(same)
        >>> prompt, whole, few = torch.tensor([[3, 1, 4, 1, 5]]), DynamicCache(), DynamicCache()
        >>> read = hf(prompt, cache=whole)
        >>> bias, exact = KVBias.from_cache(model, whole), convert_prompt(model, prompt[0])
        >>> torch.allclose(bias.stacked("keys"), exact.stacked("keys"), atol=1e-5), bias.fit
        (True, None)

        Of a method that keeps some keys of each head, positions are found by its keys in the whole cache:

        >>> for i, layer in enumerate(whole.layers):
        ...     kept = few.update(layer.keys[:, :, [0, 3, 4]], layer.values[:, :, [0, 3, 4]], i)
        >>> pairs = zip(few.layers, whole.layers, strict=True)
        >>> positions = [torch.cdist(some.keys, every.keys).argmin(dim=-1) for some, every in pairs]
        >>> KVBias.from_cache(model, few, positions, n_tokens=5)
        KVBias(virtual_keys, 2 layers x 2 heads, d_phi 3, d_head 4, n_prompt_tokens=5, position_offset=5)

        Args:
            model: on either front end, with values as in Transformers; see :meth:`to_cache`.
            cache: a ``transformers.DynamicCache``, of the prompt alone and without padding, or of :meth:`to_cache`, with which
                it can have grown. It is copied. A batch of 1 becomes a single prompt.
            positions: from 0, where the keys stood in the prompt: those of all layers, or a list with those of each, [key],
                [kv_head, key] or [batch, kv_head, key]; -1 for a key that is not read (kvpress' methods that keep another
                number in each head leave all, and list those in ``masked_key_indices``). None for a whole cache. A window is
                counted in positions; Transformers itself counts the keys that are left.
            n_tokens: how many tokens the prompt had, so where the text begins; needed with ``positions``.

        Returns:
            The bias. With ``positions``, or weights from :meth:`to_cache`, its ``fit`` says that errors are not known.

        Raises:
            KVLensError: a cache of another class (static, quantized) or of other sizes than the model's; one that is not
                whole, without positions; positions of another number of keys; a model whose keys Transformers does not cache.
        """
        from kvlens.kv_bias.cache import fields_of_cache  # which imports Transformers

        bias = cls(**fields_of_cache(model, cache, positions, n_tokens))
        bias.check_finite("from_cache")
        return bias

    def zero_like(self) -> "KVBias":
        """A bias of zeros, including the shift state: the model's own behavior, at this bias's position offset."""
        stay = ("keys", "distance", "log_scale")

        def zero(layer: Layer) -> Layer:
            return layer.with_tensors({name: torch.zeros_like(x) for name, x in layer.tensors().items() if name not in stay})

        return self._each(zero, since(self.fit, "everything set to zero"))

    def narrowed(self) -> "KVBias":
        """The same bias with the keys of each layer as wide as its widest head: those of weight 0 stand behind, or are gone."""
        return self._each(lambda layer: layer.of_attention(lambda part: part.narrowed()), self.fit)

    @staticmethod
    @checked
    def combine(
        *biases: "KVBias",
        weights: Sequence[float | int] | None = None,
        shift_state: Literal["equal", "first", "last", "zero"] = "equal",
    ) -> "KVBias":
        """The weighted sum of b_kv and b_d. ``kvlens.combine`` is this function.

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
        >>> for to, a, b in zip(bias.attention, one.attention, other.attention, strict=True):
        ...     to.b_kv[:, :, -1] += 4 * (a.b_kv - b.b_kv)[:, :, -1]
        >>> x, y = (model.run_with_cache(of(animal))[1]["resid_post", 1] for animal in ("dog", "swan"))
        >>> hooks = [("blocks.1.hook_resid_post", lambda resid, hook: resid + 2 * (x - y)[0, -1])]
        >>> with model.kv_bias(bias), model.hooks(fwd_hooks=hooks):  # either of them alone steers
        ...     logits = model(" Mira keeps a", prepend_bos=False)
        """
        nearer: Literal["first", "last"] = "first" if degree < 0.5 else "last"
        return KVBias.combine(self, other, weights=[1 - degree, degree], shift_state=nearer).behind(self, other)

    def behind(self, *others: "KVBias") -> "KVBias":
        """The bias with the text where it begins under the longest of these prompts, if that is further away."""
        offsets = [bias.position_offset for bias in (self, *others)]
        rows = any(isinstance(offset, Tensor) for offset in offsets)
        behind = torch.stack(torch.broadcast_tensors(*map(torch.as_tensor, offsets))).amax(dim=0) if rows else max(offsets)
        stays = self.kind is None or torch.equal(torch.as_tensor(behind), torch.as_tensor(self.position_offset))
        fit = self.fit if stays else edited(self.fit, "position_offset replaced")
        return replace(self, position_offset=behind, record=fit)

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
        layers = tuple(layer.times(float(factor)) for layer in self.layers)
        _check_held(f"KVBias: {float(factor):.3g} times this bias", layers, [self])
        fit = self.fit if factor == 1 else since(self.fit, f"multiplied by {float(factor):.3g}")
        return replace(self, layers=layers, record=fit)

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
        return bias if bias.fit is None else bias.narrowed()


def _sum_of(
    biases: Sequence[KVBias], weights: Sequence[float | int] | None, shift_state: str, equal_offsets: bool = False
) -> KVBias:
    """The weighted sum, on the device of the first."""
    weights = [1.0] * len(biases) if weights is None else list(weights)
    first = biases[0]
    biases = [bias if bias.device == first.device else bias.to(first.device) for bias in biases]
    layers = _summed(biases, weights, shift_state, equal_offsets)
    chosen = biases[-1] if shift_state == "last" else first
    unchanged = weights == [1.0] and shift_state != "zero"
    fit = first.fit if unchanged else of_sum((bias.fit for bias in biases), _sum_in_words(biases, weights))
    left, offset = _tokens_left(biases, weights), chosen.position_offset
    return replace(first, layers=layers, n_prompt_tokens=left, position_offset=offset, record=fit)


def _summed(
    biases: Sequence[KVBias], weights: Sequence[float | int], shift_state: str, equal_offsets: bool = False
) -> tuple[Layer, ...]:
    """The layers of the weighted sum of ``biases`` (at least one).

    Args:
        biases: on one device.
        weights: one per bias.
        shift_state: "equal", "first", "last" or "zero", as in :meth:`kvlens.KVBias.combine`.
        equal_offsets: raise an error if position offsets differ, even if ``shift_state`` chooses a bias.

    Raises:
        KVLensError: different models, dtypes or batch shapes; shift states or offsets differ and none was chosen.
    """
    for other in biases[1:]:
        _check_same_kind(biases[0], other)
        if shift_state == "equal":
            _check_equal_boundaries(biases[0], other)
        if equal_offsets or shift_state in ("equal", "zero"):
            _check_equal_offsets(biases[0], other, weights)
    sums = [_sum_of_layers(layers, weights, shift_state) for layers in zip(*(bias.layers for bias in biases), strict=True)]
    _check_held("combine: the sum", sums, biases)
    return tuple(sums)


def _sum_of_layers(layers: Sequence[Layer], weights: Sequence[float | int], shift_state: str) -> Layer:
    terms = [(layer if w == 1 else layer.times(float(w))).parts for w, layer in zip(weights, layers, strict=True)]
    last: Mapping[str, Tensor] = layers[-1 if shift_state == "last" else 0].last
    if shift_state == "zero":
        last = {name: torch.zeros_like(x) for name, x in last.items()}
    return Layer(tuple(type(parts[0]).total(parts) for parts in zip(*terms, strict=True)), last)


def _tokens_left(biases: Sequence[KVBias], weights: Sequence[float | int]) -> int | Tensor:
    """Tokens added minus tokens subtracted, so that exchanging a head of one prompt for that of another keeps their number.

    A factor does not change how many tokens a bias stands for, whatever its sign.
    """
    if len(biases) == 1:
        return biases[0].n_prompt_tokens
    left = sum(((w > 0) - (w < 0)) * b.n_prompt_tokens for w, b in zip(weights, biases, strict=True))
    return left.clamp(min=0) if isinstance(left, Tensor) else max(left, 0)


def _sum_in_words(biases: Sequence[KVBias], weights: Sequence[float | int]) -> str:
    """The step of a record of a sum."""
    kinds = (f"{w:.3g} times {'an exact bias' if b.fit is None else 'one'}" for w, b in zip(weights, biases, strict=True))
    return f"summed: {', '.join(kinds)}" if len(biases) < 5 else f"sum of {len(biases)}"


def _check_held(what: str, new: Sequence[Layer], biases: Sequence[KVBias]) -> None:
    """Raise KVLensError for numbers of sums that became infinite."""
    if all_finite(x for layer in new for part in layer.parts for x in part.sums()):
        return
    for i, layer in enumerate(new):
        for name, x in layer.tensors().items():
            if not _finite(x) and all(_finite(bias.layers[i].tensors()[name]) for bias in biases):
                dtype = str(x.dtype).removeprefix("torch.")
                raise KVLensError(f"{what} has numbers in {name} of layer {i} that overflow {dtype}: use smaller factors")


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _check_same_kind(first: KVBias, other: KVBias) -> None:
    other.fingerprint.check(first.fingerprint, "combine", whose="the first bias")
    for name, what_to_do in (
        ("dtype", "bias.to(dtype) converts"),
        ("kind", "convert both prompts with the same method"),
        ("batch_size", "select_prompt and repeat make them equal"),
    ):
        a, b = getattr(first, name), getattr(other, name)
        if a != b:
            raise KVLensError(f"combine: {name} differs: {a} and {b}; {what_to_do}")
    if not all(map(_same_features, first.attention, other.attention)):
        raise KVLensError(f"combine: the {first.kind} features differ (another seed or number): use the same for both")


def _same_features(a: BiasPart, b: BiasPart) -> bool:
    if isinstance(a, Keys) or not (isinstance(a, Features) and isinstance(b, Features)):
        return True
    return same_features(a.features, b.features)


def _check_equal_boundaries(first: KVBias, other: KVBias) -> None:
    for a, b in zip(first.layers, other.layers, strict=True):
        for name, rows in a.last.items():
            if not torch.equal(rows, b.last[name]):
                what = "conv, the convolution's inputs, differs" if name == "conv" else f"the shift states differ (last_{name})"
                raise KVLensError(f"combine: {what}; shift_state='last' takes the last bias's, as a + b does")


def _check_equal_offsets(first: KVBias, other: KVBias, weights: Sequence[float | int]) -> None:
    if first.starts_where(other):
        return
    differ = (
        f"the position offsets differ ({first.position_offset} and {other.position_offset}), so the text would start at "
        "different positions"
    )
    do = (
        f"adding KV biases: {differ}; kvlens.combine(a, b, shift_state='last') uses the last one's offset. To read one prompt "
        "after another, use convert_prompt(model, b, initial=bias_of_a)"
    )
    if list(weights) == [1.0, -1.0]:
        do = (
            f"subtracting KV biases: {differ}; kvlens.combine(a, b, weights=[1, -1], shift_state='first') subtracts b and uses "
            "a's offset. Convert prompts of equal length where a - b is to be read"
        )
    raise KVLensError(do)

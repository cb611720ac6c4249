"""The engine of exchanges in a converted prompt: sets of its parts for those of a donor.

- *What* is exchanged: a set of parts. Of a :class:`HeadExchange` these are heads, shift states and convolutions, of a
  :class:`LayerExchange` whole layers, and of a :class:`~kvlens.analyses.attribution.terms.PositionExchange` positions of the
  prompt. ``keep=True``: everything but the set.
- *For what*: the same parts of a donor: zeros, the mean of other prompts, another prompt, or the *baseline*, the prompt's BOS
  alone, which is what "without the prompt" and "without this head" refer to.
- *How it is read*: every set is a row of a batch of biases. :meth:`Exchange.batches` has as many at once as there is room for,
  and :meth:`HeadExchange.logits` reads a text under them.

A head's *bias* is its b_KV and b_D; of a recurrent layer, the state of a value head. The *shift state* is what tokens just
before the text leave: raw keys, values and queries of a KV shift, which belong to a key-value head, or in a recurrent layer the
inputs of its short convolution, which belong to the layer and not to a head. Parts of two prompts fit into each other
:func:`in_one_space`. With grouped queries, exchanging one query head's shift state exchanges that of its whole group, queries
included.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import KVBias, KVModel, combine, convert_prompt, counterfactuals
from kvlens.kv_bias import Layer
from kvlens.memory import NUMBERS_PER_PASS
from kvlens.units import begins_with_bos

from ..predictions import text_logits

HEAD = "query head; value head of a recurrent layer"
"""What a column ``head`` holds."""
WHOLE_LAYER = -1
"""What stands in the place of a head where a part belongs to a whole layer."""
HEAD_PART, SHIFT_STATE_PART, CONVOLUTION_PART = "head", "shift_state", "convolution"


@dataclass(frozen=True)
class ExchangedPart:
    """What is exchanged by itself.

    Attributes:
        layer: from 0.
        head: query head, value head of a recurrent layer; key-value head of a shift state; -1 of a convolution.
        kind: ``head``: b_KV and b_D, or the state; ``shift_state``: the raw keys, values and queries that a KV shift carries
            over, of one key-value head; ``convolution``: the inputs of a recurrent layer's short convolution.
    """

    layer: int
    head: int
    kind: str = HEAD_PART

    @property
    def code(self) -> str:
        """The name in tables and pages: ``0.2``, ``0.s2``, ``0.c``."""
        return f"{self.layer}." + {HEAD_PART: f"{self.head}", SHIFT_STATE_PART: f"s{self.head}"}.get(self.kind, "c")

    @property
    def name(self) -> str:
        """The name in a sentence: ``L0H2``, ``shift state L0KV2``, ``convolution L0``."""
        kinds = {HEAD_PART: f"L{self.layer}H{self.head}", SHIFT_STATE_PART: f"shift state L{self.layer}KV{self.head}"}
        return kinds.get(self.kind, f"convolution L{self.layer}")


def zeros_of(bias: KVBias) -> KVBias:
    """A bias of zeros, as if there had been no prompt and no token before the text, at the same offset."""
    return bias.per_query_head().map_layers(lambda layer: layer.with_tensors(_mixed(torch.zeros_like, layer)))


def mean_of(biases: list[KVBias]) -> KVBias:
    """The mean of biases in the same features."""
    every = zip(*(bias.layers for bias in biases), strict=True)
    layers = [own[0].with_tensors(_mixed(lambda *of: torch.stack(of).mean(dim=0), *own)) for own in every]
    return biases[0].with_layers(layers)


def _mixed(mix: Callable[..., Tensor], *layers: Layer) -> dict[str, Tensor]:
    """``mix`` of everything that interventions exchange in a layer, by name: all but keys and scales."""
    every = [layer.tensors() for layer in layers]
    return {name: mix(*(of[name] for of in every)) for name in every[0] if name not in ("keys", "distance", "log_scale")}


def in_one_space(*biases: KVBias) -> list[KVBias]:
    """Each of several biases in the features of all of them, per query head, so that parts of one fit into another.

    Biases of a linear model share their features already. Those of a softmax model have their own virtual keys. With all keys
    concatenated,

        phi(q) = [phi_a(q); phi_b(q); ...]        b_KV of a = [b_KV_a; 0; ...]        b_KV of b = [0; b_KV_b; ...]

    and b_D likewise, each bias gives the same outputs as before, and sums, means and mixtures of them are biases too. Each
    keeps its shift state, offset and token count.

    Raises:
        KVLensError: biases of different models or with features of different kinds.
    """
    if len(biases) == 1:
        return [biases[0].per_query_head()]
    biases = tuple(bias.per_query_head() for bias in biases)
    if biases[0].kind is None:
        return list(biases)
    return [_alone(biases, i) for i in range(len(biases))]


def _alone(biases: Sequence[KVBias], number: int) -> KVBias:
    """One of the biases in the features of all."""
    own, weights = biases[number], [float(i == number) for i in range(len(biases))]
    sums = combine(*biases, weights=weights, shift_state="first")
    pairs = zip(sums.layers, own.layers, strict=True)
    layers = [replace(layer.with_state_of(mine), last=mine.last) for layer, mine in pairs]
    n, offset = own.n_prompt_tokens, own.position_offset
    return replace(sums, layers=tuple(layers), record=sums.fit, n_prompt_tokens=n, position_offset=offset)


def layers_with_convolution(bias: KVBias) -> tuple[int, ...]:
    """The recurrent layers that keep inputs of a short convolution."""
    return tuple(number for number, layer in enumerate(bias.layers) if "conv" in layer.last and layer.last["conv"].shape[1])


def shifts(bias: KVBias) -> bool:
    """Whether the model shifts keys, values or queries."""
    return any(rows.shape[1] for layer in bias.layers for name, rows in layer.last.items() if name != "conv")


def has_shift_state(bias: KVBias) -> bool:
    """Whether the model shifts anything, or has a short convolution."""
    return shifts(bias) or bool(layers_with_convolution(bias))


def heads_of(bias: KVBias) -> list[tuple[int, int]]:
    """(layer, head) of every head, in order."""
    return [(layer, head) for layer in range(bias.n_layers) for head in range(bias.n_heads_of(layer))]


def exchangeable(bias: KVBias) -> list[ExchangedPart]:
    """All that is exchanged by itself, layer by layer: heads, shift states, the inputs of a short convolution."""
    parts = [ExchangedPart(layer, head) for layer, head in heads_of(bias)]
    if shifts(bias):
        parts += [
            ExchangedPart(layer, g, SHIFT_STATE_PART)
            for layer in bias.attention_layers
            for g in range(bias.n_kv_heads_of(layer))
        ]
    parts += [ExchangedPart(layer, WHOLE_LAYER, CONVOLUTION_PART) for layer in layers_with_convolution(bias)]
    return sorted(parts, key=lambda part: (part.layer, part.kind != HEAD_PART, part.kind, part.head))


def heads_with(bias: KVBias, part: ExchangedPart) -> range:
    """The heads of a layer that a part is of: one; those that read a key-value head; or those behind a convolution."""
    if part.kind == CONVOLUTION_PART:
        return range(bias.first_state_head(part.layer), bias.n_heads_of(part.layer))
    n = 1 if part.kind == HEAD_PART else bias.first_state_head(part.layer) // bias.n_kv_heads_of(part.layer)
    return range(part.head * n, (part.head + 1) * n)


def kv_heads_read(bias: KVBias, layer: int) -> Int[Tensor, " head"]:
    """The key-value head that each query head of a layer with attention reads."""
    n_heads = bias.first_state_head(layer)
    return torch.arange(n_heads, device=bias.device) // (n_heads // bias.n_kv_heads_of(layer))


ALL = -1
"""Every layer, or every head."""
PART_KINDS = (HEAD_PART, SHIFT_STATE_PART, CONVOLUTION_PART)


def baseline_of(model: KVModel, prompt: Int[Tensor, " prompt_pos"]) -> KVBias:
    """The baseline as a batch of one: BOS alone, or nothing if there is no BOS, with the text at its original positions."""
    gone = torch.ones(1, len(prompt), dtype=torch.bool)
    gone[:, : int(begins_with_bos(model, prompt))] = False
    return convert_prompt(model, counterfactuals(model, prompt, gone))


def has_baseline(bias: KVBias) -> bool:
    """Whether parts of the baseline can replace parts of ``bias``: not with random, Taylor or learned features."""
    return bias.kind in (None, "virtual_keys")


def variants_at_once(bias: KVBias) -> int:
    """How many variants of a bias there is memory for in one pass."""
    group = max([1, *(bias.n_heads // part.n_heads for part in bias.attention)])  # rows have every query head's part by itself
    return max(4, min(64, NUMBERS_PER_PASS // (2 * group * bias.num_parameters)))


class Exchange:
    """Sets of parts of one prompt's bias exchanged for those of another; a subclass says what the parts are.

    Attributes:
        own: the bias that parts are exchanged in.
        parts: what can be exchanged by itself, in order.
        at_once: how many rows a pass has room for.
    """

    own: KVBias
    parts: Sequence[Any]
    at_once: int

    def biases(self, chosen: Bool[Tensor, "row part"], *, keep: bool = False) -> KVBias:
        """A batch of biases, a row for each set of parts that is exchanged, or kept while everything else is exchanged."""
        raise NotImplementedError

    def batches(self, chosen: Bool[Tensor, "row part"], kept: Bool[Tensor, "kept_row part"] | None = None) -> Iterator[KVBias]:
        """The biases of sets that are exchanged, then of those that are kept, as many at a time as there is room for."""
        for rows, keep in ((chosen, False), (chosen[:0] if kept is None else kept, True)):
            for some in rows.split(self.at_once) if len(rows) else ():
                yield self.biases(some, keep=keep)

    def rows(self, sets: Sequence[Iterable[int]]) -> Bool[Tensor, "row part"]:
        """A row for each set of parts, which are given by number."""
        chosen = torch.zeros(len(sets), len(self.parts), dtype=torch.bool)
        for row, members in zip(chosen, sets, strict=True):
            row[list(members)] = True
        return chosen


class LayerExchange(Exchange):
    """Whole layers of a prompt's bias exchanged for those of another of as many tokens, without common features.

    Args:
        own, donor: exact biases of single prompts (:meth:`kvlens.KVBias.exchange_layers`).
    """

    def __init__(self, own: KVBias, donor: KVBias):
        self.own, self.donor, self.parts = own, donor, range(own.n_layers)
        self.at_once = max(1, NUMBERS_PER_PASS // max(1, own.num_parameters))

    def biases(self, chosen: Bool[Tensor, "row part"], *, keep: bool = False) -> KVBias:
        """A batch of biases; see :meth:`Exchange.biases`."""
        return self.own.exchange_layers(self.donor, chosen != keep)


class HeadExchange(Exchange):
    """Heads, shift states and convolutions of a prompt's bias exchanged for those of one of several donors.

    Args:
        own, donors: biases of single prompts :func:`~kvlens.analyses.bias.exchange.in_one_space`.

    Attributes:
        number: of each part.
    """

    def __init__(self, own: KVBias, *donors: KVBias):
        self.own = own.per_query_head()
        self.parts: Sequence[ExchangedPart] = exchangeable(self.own)
        self.number = {part: i for i, part in enumerate(self.parts)}
        self.at_once = variants_at_once(self.own)
        self._unchanged = own.map_layers(lambda layer: layer.of_attention(lambda part: part.narrowed().per_kv_head()))
        self._part_of = [self._parts_of_tensors(layer) for layer in range(self.own.n_layers)]
        every = zip(self.own.layers, *(donor.layers for donor in donors), strict=True)
        self._donors = [_mixed(lambda own, *of: torch.cat([x.to(own) for x in of]), *layers) for layers in every]

    def of(self, layer: int = ALL, head: int = ALL, kinds: Sequence[str] = PART_KINDS) -> list[int]:
        """The numbers of the parts of a layer and a head (its group's shift state among them), or of `ALL`, of some kinds."""
        return [
            number
            for part, number in self.number.items()
            if part.kind in kinds
            and layer in (ALL, part.layer)
            and (head == ALL or (part.kind != CONVOLUTION_PART and head in heads_with(self.own, part)))
        ]

    def batches(self, chosen: Bool[Tensor, "row part"], kept: Bool[Tensor, "kept_row part"] | None = None) -> Iterator[KVBias]:
        """Sets that are exchanged and sets that are kept, together; see :meth:`Exchange.batches`."""
        return super().batches(chosen if kept is None else torch.cat([chosen, ~kept]))

    def biases(
        self, chosen: Bool[Tensor, "row part"], *, keep: bool = False, donor: Int[Tensor, " row"] | None = None
    ) -> KVBias:
        """A batch of biases; ``donor`` is the number of each row's, None for the first; see :meth:`Exchange.biases`.

        In layers where no row exchanges anything all share one row.
        """
        exchanged = chosen != keep
        whole, layers = self.own.repeat(len(chosen)), list(self._unchanged.repeat(len(chosen)).layers)
        for number in self._layers_of(exchanged.any(dim=0)[None])[0]:
            layer, donors, mixed = whole.layers[number], self._donors[number], {}
            tensors = layer.tensors()
            for name, numbers in self._part_of[number].items():
                taken = exchanged[:, numbers].to(tensors[name].device)
                taken = taken.reshape(*taken.shape, *[1] * (tensors[name].dim() - taken.dim()))
                given = donors[name][:1] if donor is None else donors[name][donor.to(donors[name].device)]
                mixed[name] = torch.where(taken, given, tensors[name])
            layers[number] = layer.with_tensors(mixed)
        return whole.with_layers(layers)

    def logits(
        self,
        model: KVModel,
        text: Int[Tensor, " pos"],
        chosen: Bool[Tensor, "row part"],
        donor: Int[Tensor, " row"] | None = None,
        *,
        first: Sequence[int] | None = None,
        batch_size: int | None = None,
        on_progress: Callable[[float], None] | None = None,
        hooks_of: Callable[[slice], list[tuple[str, Callable[..., Tensor]]]] = lambda rows: [],
    ) -> Iterator[Float[Tensor, "row pos d_vocab"]]:
        """Yield the logits on a text under each row, in order, one forward pass at a time.

        A pass starts at the first layer that differs, from the residual stream that the whole bias leaves there, and rows
        that start at the same layer share a pass.

        Args:
            model: the model with which the bias was converted.
            text: [pos].
            chosen, donor: of :meth:`biases`.
            first: the layer from which each row differs; None for that of its first exchanged part.
            batch_size: rows per forward pass; None takes what :data:`kvlens.memory.NUMBERS_PER_PASS` allows.
            on_progress: called with the fraction done after each forward pass.
            hooks_of: hooks on the activations of some of the rows.

        Raises:
            KVLensError: a bias of another model.
        """
        layers = self._layers_of(chosen)
        per_pass = batch_size or max(1, NUMBERS_PER_PASS // self._numbers_per_row(model, len(text), layers))
        starts, residuals = [min(of, default=self.own.n_layers) for of in layers] if first is None else first, list[Tensor]()
        with model.kv_bias(self._unchanged):
            text_logits(model, None, text, residuals)
        done, holding = 0, model.holding  # without the checks of a bias that was attached once
        for start, rows in groupby(starts):
            n_rows = len(list(rows))
            for n in (len(some) for some in torch.arange(n_rows).chunk(-(-n_rows // per_pass))):
                of_pass = slice(done, done + n)
                biases = self.biases(chosen[of_pass], donor=None if donor is None else donor[of_pass])
                with holding(biases), model.hooks(fwd_hooks=hooks_of(of_pass)):
                    yield model.logits_of(residuals[start].expand(n, -1, -1), start)
                done += n
                if on_progress is not None:
                    on_progress(done / len(chosen))

    def _layers_of(self, chosen: Bool[Tensor, "row part"]) -> list[set[int]]:
        """The layers in which each row exchanges something."""
        return [{self.parts[part].layer for part in row.nonzero().flatten().tolist()} for row in chosen]

    def _numbers_per_row(self, model: KVModel, pos: int, layers: list[set[int]]) -> int:
        """How many numbers a row takes: its layers twice, logits before and after a soft cap, and the widest activations."""
        widest = max(model.cfg.d_mlp or 0, model.cfg.d_model, self.own.n_heads * self.own.d_phi)
        of_bias = 2 * self.own.num_parameters * max(map(len, layers), default=0) // self.own.n_layers
        return of_bias + pos * (2 * model.cfg.d_vocab_out + 4 * widest)

    def _parts_of_tensors(self, layer: int) -> dict[str, Int[Tensor, " *rest"]]:
        """The number of the part that each entry of a layer's tensor is of, by the tensor's name, along its axes of heads."""
        bias, found = self.own, dict[str, Tensor]()

        def numbers(heads: Iterable[int], kind: str = HEAD_PART) -> Int[Tensor, " some_head"]:
            return torch.tensor([self.number.get(ExchangedPart(layer, head, kind), 0) for head in heads], dtype=torch.long)

        held, first = bias.layers[layer], bias.first_state_head(layer)
        if held.attention is not None:
            found = dict.fromkeys(("b_kv", "b_d"), numbers(range(first)))
            groups = numbers(range(bias.n_kv_heads_of(layer)), SHIFT_STATE_PART)
            of_rows = {"last_k": groups, "last_v": groups, "last_q": groups[kv_heads_read(bias, layer).cpu()]}
            found |= {name: of_heads[None] for name, of_heads in of_rows.items() if held.last[name[-1]].shape[1]}
        if held.state is not None:
            found |= dict.fromkeys(held.state.tensors(), numbers(range(first, bias.n_heads_of(layer))))
            if held.last["conv"].shape[1]:
                found["conv"] = numbers([WHOLE_LAYER], CONVOLUTION_PART)[0]
        return found

"""The engine of all interventions on a converted prompt: sets of its parts exchanged for those of a donor.

- *What* is exchanged: a set of parts. Of a :class:`HeadExchange` these are heads, shift states and convolutions
  (:mod:`kvlens.analyses.bias.parts`), of a :class:`LayerExchange` whole layers, and of a
  :class:`~kvlens.analyses.attribution.terms.PositionExchange` positions of the prompt. ``keep=True``: everything but the set.
- *For what*: the same parts of a donor: zeros, the mean of other prompts, another prompt, or the *baseline*, the prompt's BOS
  alone, which is what "without the prompt" and "without this head" refer to.
- *How it is read*: every set is a row of a batch of biases. :meth:`Exchange.batches` has as many at once as there is room for,
  and :meth:`HeadExchange.logits` reads a text under them.

Shifted keys and values belong to a key-value head: with grouped queries, exchanging one query head's shift state exchanges that
of its whole group, queries included.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import KVBias, KVModel, convert_prompt, counterfactuals
from kvlens.memory import NUMBERS_PER_PASS

from ..sequences import begins_with_bos
from .parts import (
    CONVOLUTION_PART,
    HEAD_PART,
    RECURRENT,
    SHIFT_STATE_PART,
    WHOLE_LAYER,
    ExchangedPart,
    exchangeable,
    heads_with,
    kv_heads_read,
    tensors_of,
    with_tensors,
)

ALL = -1
"""Every layer, or every head."""
KINDS = (HEAD_PART, SHIFT_STATE_PART, CONVOLUTION_PART)


def baseline_of(model: KVModel, prompt: Int[Tensor, " prompt_pos"]) -> KVBias:
    """The baseline as a batch of one: BOS alone, or nothing if there is no BOS, with the text at its original positions."""
    gone = torch.ones(1, len(prompt), dtype=torch.bool)
    gone[:, : int(begins_with_bos(model, prompt))] = False
    return convert_prompt(model, counterfactuals(model, prompt, gone))


def has_baseline(bias: KVBias) -> bool:
    """Whether parts of the baseline can replace parts of ``bias``: not with random, Taylor or learned features."""
    return bias.features is None or bias.features.kind == "virtual_keys"


def rows_at_once(bias: KVBias) -> int:
    """How many variants of a bias there is memory for in one pass."""
    group = bias.n_heads // bias.b_KV.shape[-3]  # each row has the part of every query head by itself
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
        own, donors: biases of single prompts :func:`~kvlens.analyses.bias.parts.in_one_space`.

    Attributes:
        number: of each part.
    """

    def __init__(self, own: KVBias, *donors: KVBias):
        self.own = own.per_query_head()
        self.parts: Sequence[ExchangedPart] = exchangeable(self.own)
        self.number = {part: i for i, part in enumerate(self.parts)}
        self.at_once = rows_at_once(self.own)
        self._part_of = self._parts_of_tensors()
        given = [tensors_of(donor) for donor in donors]
        own_tensors = tensors_of(self.own)
        self._donors = {name: torch.stack([of[name].to(own_tensors[name]) for of in given], dim=1) for name in self._part_of}

    def of(self, layer: int = ALL, head: int = ALL, kinds: Sequence[str] = KINDS) -> list[int]:
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
        """A batch of biases; ``donor`` is the number of each row's, None for the first; see :meth:`Exchange.biases`."""
        exchanged = torch.nn.functional.pad(chosen != keep, (0, 1))  # the last column: entries of no part
        own, mixed = tensors_of(self.own), {}
        for name, part_of in self._part_of.items():
            taken = exchanged[:, part_of].movedim(0, 1).to(own[name].device)
            taken = taken.reshape(*taken.shape, *[1] * (own[name].dim() + 1 - taken.dim()))
            donors = self._donors[name]
            given = donors[:, :1] if donor is None else donors[:, donor.to(donors.device)]
            mixed[name] = torch.where(taken, given, own[name][:, None])
        return with_tensors(self.own.repeat(len(chosen)), mixed)

    def logits(
        self,
        model: KVModel,
        text: Int[Tensor, " pos"],
        chosen: Bool[Tensor, "row part"],
        donor: Int[Tensor, " row"] | None = None,
        *,
        batch_size: int | None = None,
        on_progress: Callable[[float], None] | None = None,
        hooks_of: Callable[[slice], list[Any]] = lambda rows: [],
    ) -> Iterator[Float[Tensor, "row pos d_vocab"]]:
        """Yield the logits on a text under each row, in order, one forward pass at a time.

        Args:
            model: the model with which the bias was converted.
            text: [pos].
            chosen, donor: of :meth:`biases`.
            batch_size: rows per forward pass; None takes what :data:`kvlens.memory.NUMBERS_PER_PASS` allows.
            on_progress: called with the fraction done after each forward pass.
            hooks_of: hooks on the activations of some of the rows.

        Raises:
            KVLensError: a bias of another model.
        """
        per_pass = batch_size or max(1, NUMBERS_PER_PASS // self._numbers_per_row(model, len(text)))
        for first in range(0, len(chosen), per_pass):
            of_pass = slice(first, first + per_pass)
            biases = self.biases(chosen[of_pass], donor=None if donor is None else donor[of_pass])
            with model.kv_bias(biases), model.hooks(fwd_hooks=hooks_of(of_pass)):
                batch = text[None].expand(len(chosen[of_pass]), -1)
                yield model(batch, attention_mask=torch.ones_like(batch))
            if on_progress is not None:
                on_progress((first + len(batch)) / len(chosen))

    def _numbers_per_row(self, model: KVModel, pos: int) -> int:
        """How many numbers a row takes: the bias twice, logits and their float64 probabilities, and the widest activations."""
        widest = max(model.cfg.d_mlp or 0, model.cfg.d_model, self.own.n_heads * self.own.b_KV.shape[-2])
        return 2 * self.own.num_parameters + pos * (7 * model.cfg.d_vocab_out + 4 * widest)

    def _parts_of_tensors(self) -> dict[str, Int[Tensor, " layer *rest"]]:
        """The number of the part that each entry of a tensor is of, by the tensor's name and along its first axes; one behind
        the last where no head of the layer has the entry."""
        bias, none = self.own, len(self.parts)

        def numbers(
            layers: Sequence[int], parts: Callable[[int], list[ExchangedPart]], n: int
        ) -> Int[Tensor, "layer some_head"]:
            rows = [[self.number.get(part, none) for part in parts(layer)] for layer in layers]
            return torch.tensor([(row + n * [none])[:n] for row in rows], dtype=torch.long).reshape(len(layers), n)

        def heads(layer: int) -> list[ExchangedPart]:
            return [ExchangedPart(layer, head) for head in range(bias.first_state_head(layer))]

        def groups(layer: int) -> list[ExchangedPart]:
            return [ExchangedPart(layer, head, SHIFT_STATE_PART) for head in range(bias.n_kv_heads_of(layer))]

        def states(layer: int) -> list[ExchangedPart]:
            return [ExchangedPart(layer, head) for head in range(bias.first_state_head(layer), bias.n_heads_of(layer))]

        of_heads = numbers(bias.attention_layers, heads, bias.n_heads)
        of_groups = numbers(bias.attention_layers, groups, bias.last_k.shape[-2])
        of_queries = of_groups.gather(-1, kv_heads_read(bias).cpu())
        found = {"b_KV": of_heads, "b_D": of_heads, "last_q": of_queries[:, None]}
        found |= dict.fromkeys(("last_k", "last_v"), of_groups[:, None])
        if layers := bias.recurrent.layers:
            found[RECURRENT + "b_KV"] = numbers(layers, states, bias.recurrent.n_heads)
            found[RECURRENT + "conv"] = numbers(layers, lambda layer: [ExchangedPart(layer, WHOLE_LAYER, CONVOLUTION_PART)], 1)[
                :, 0
            ]
        return found

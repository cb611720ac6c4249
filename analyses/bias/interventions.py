"""Many ablations of one bias in few forward passes: each is a row of a batch of biases, read with the same text.

An ablation replaces the ablated part by the same part of a *donor*: a bias of zeros, the mean of other prompts' biases, or the
bias of another prompt. The parts are those of :mod:`kvlens.analyses.bias.parts`. Shifted keys and values belong to a key-value
head: with grouped queries, ablating one query head's shift state ablates that of its whole group, queries included. The inputs
of a recurrent layer's convolution are ablated if the shift state of any of the layer's heads is.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias, KVModel
from kvlens.memory import NUMBERS_PER_PASS

from .parts import RECURRENT, kv_heads_read, most_heads, tensors_of, with_tensors

ALL = -1
"""Every layer, or every head."""
Units = Sequence[tuple[int, int | slice]]
"""(layer, head) of what is replaced together; `ALL` or a slice for several."""


class Interventions(NamedTuple):
    """Which parts of a bias are kept (1) or replaced (0), and by which of ``donors`` (a batch of biases).

    The axis of heads is as long as the layer with most heads has (:func:`kvlens.analyses.bias.parts.most_heads`).
    """

    keep_bias: Float[Tensor, "row layer head"]
    keep_shift_state: Float[Tensor, "row layer head"]
    donor: Int[Tensor, " row"]
    donors: KVBias

    @classmethod
    def of(
        cls, bias: KVBias, of_bias: Sequence[Units], of_shift_state: Sequence[Units], donor: Sequence[int], donors: KVBias
    ) -> "Interventions":
        """Row by row: the units whose bias is replaced, those whose shift state is, and the index of the donor."""
        which = torch.tensor(donor, dtype=torch.long, device=bias.b_KV.device)
        return cls(kept(bias, of_bias), kept(bias, of_shift_state), which, donors)

    def some(self, rows: slice) -> "Interventions":
        """Those of ``rows``."""
        return Interventions(self.keep_bias[rows], self.keep_shift_state[rows], self.donor[rows], self.donors)


def kept(bias: KVBias, units: Sequence[Units]) -> Float[Tensor, "row layer head"]:
    """0 at what each row replaces, else 1."""
    keep = bias.b_KV.new_ones(len(units), bias.n_layers, most_heads(bias))
    for row, unit in zip(keep, units, strict=True):
        for layer, head in unit:
            row[slice(None) if layer == ALL else layer, slice(None) if head == ALL else head] = 0
    return keep


def donors_of(bias: KVBias, references: KVBias | None = None, n_in_mean: int | None = None) -> KVBias:
    """A batch of replacements for ``bias``: zeros, then the mean of the first ``n_in_mean`` references (None: of all; omitted
    without references), then each reference.

    For a softmax model the references use the features of ``bias`` (:func:`kvlens.analyses.bias.one_space.with_references`).
    """
    bias = bias.per_query_head()
    others = {} if references is None else tensors_of(references)
    donors: dict[str, Tensor] = {}
    for name, tensor in tensors_of(bias).items():
        zeros = torch.zeros_like(tensor)[:, None]
        given = others[name].to(zeros) if others else zeros[:, :0]
        averaged = given[:, :n_in_mean]
        mean = averaged.mean(dim=1, keepdim=True) if averaged.shape[1] else averaged
        donors[name] = torch.cat([zeros, mean, given], dim=1)
    return with_tensors(bias.repeat(donors["b_KV"].shape[1]), donors)


def logits_under(
    model: KVModel,
    text: Tensor,
    bias: KVBias,
    rows: Interventions,
    *,
    batch_size: int | None = None,
    on_progress: Callable[[float], None] | None = None,
    hooks_of: Callable[[slice], list[Any]] = lambda rows: [],
) -> Iterator[Float[Tensor, "row pos d_vocab"]]:
    """Yield the logits on ``text`` [pos] under each intervention, in order, one forward pass at a time.

    Args:
        model: the model with which ``bias`` was converted.
        text: [pos].
        bias: the bias of one prompt.
        rows: the interventions.
        batch_size: interventions per forward pass; None takes what :data:`kvlens.memory.NUMBERS_PER_PASS` allows.
        on_progress: called with the fraction done after each forward pass.
        hooks_of: hooks on the activations of some of the rows.

    Raises:
        KVLensError: a bias of another model.
    """
    rows_per_pass = batch_size or max(1, NUMBERS_PER_PASS // _numbers_per_row(model, bias, len(text)))
    n_rows = len(rows.donor)
    for first in range(0, n_rows, rows_per_pass):
        of_pass = slice(first, first + rows_per_pass)
        chunk = rows.some(of_pass)
        with model.kv_bias(intervened(bias, chunk)), model.hooks(fwd_hooks=hooks_of(of_pass)):
            batch = text[None].expand(len(chunk.donor), -1)
            yield model(batch, attention_mask=torch.ones_like(batch))
        if on_progress is not None:
            on_progress((first + len(chunk.donor)) / n_rows)


def intervened(bias: KVBias, rows: Interventions) -> KVBias:
    """A batch of copies of ``bias``, with each row's parts replaced."""
    bias = bias.per_query_head()
    donated = tensors_of(rows.donors)
    mixed: dict[str, Tensor] = {}
    for name, keep in _kept(bias, rows).items():
        tensor = tensors_of(bias)[name]
        keep = keep.reshape(*keep.shape, *[1] * (tensor.dim() + 1 - keep.dim())).bool()
        donor = donated[name] if donated[name].shape[1] == 1 else donated[name][:, rows.donor]
        mixed[name] = torch.where(keep, tensor[:, None], donor)
    return with_tensors(bias.repeat(len(rows.donor)), mixed)


def _kept(bias: KVBias, rows: Interventions) -> dict[str, Tensor]:
    """By the name of a tensor what of it stays, [layer, row, ...], with the first axes of the tensor."""
    of_bias, of_shift_state = (keep.transpose(0, 1) for keep in (rows.keep_bias, rows.keep_shift_state))
    attention = list(bias.attention_layers)
    keep = of_bias[attention][..., : bias.n_heads]
    read = kv_heads_read(bias)[:, None].expand_as(keep)
    by_head = of_shift_state[attention][..., : bias.n_heads]
    keep_kv = keep.new_ones(*keep.shape[:-1], bias.last_k.shape[-2]).scatter_reduce(-1, read, by_head, "amin")
    keep_q = keep_kv.gather(-1, read)
    kept = {"b_KV": keep, "b_D": keep, "last_q": keep_q[:, :, None]}
    kept |= dict.fromkeys(("last_k", "last_v"), keep_kv[:, :, None])
    if bias.recurrent.layers:
        first = [(layer, bias.first_state_head(layer)) for layer in bias.recurrent.layers]
        n_heads = bias.recurrent.n_heads
        kept[RECURRENT + "b_KV"] = torch.stack([of_bias[layer, :, i : i + n_heads] for layer, i in first])
        kept[RECURRENT + "conv"] = torch.stack([of_shift_state[layer, :, i:].amin(dim=-1) for layer, i in first])
    return kept


def _numbers_per_row(model: KVModel, bias: KVBias, pos: int) -> int:
    """Those of a bias and its copy in the layers, the logits and their float64 probabilities, and the widest activations."""
    widest = max(model.cfg.d_mlp or 0, model.cfg.d_model, bias.n_heads * bias.b_KV.shape[-2])
    return 2 * bias.num_parameters + pos * (7 * model.cfg.d_vocab_out + 4 * widest)

"""A converted prompt as a sum over its positions, so that what single positions wrote can be taken out or exchanged.

    linear:   b_KV = sum_p gamma^{M-1-p} R_{p-M} phi(k_p) v_p^T        b_D = sum_p phi(k_p)
    softmax:  one virtual key per position, with its weight and value
    state:    S = P S_old + sum_p kbar_p v_p^T        (a recurrent layer; kbar_p = T_{M-1} ... T_{p+1} b_p k_p)

k_p and v_p are what the heads read at position p: shifted, where the model shifts; behind the short convolution, where a layer
has one. What was held before the prompt stays.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import Counterfactuals, HookedKVTransformer, KVBias, KVLensError, KVModel, convert_prompt
from kvlens.bridge import read_memory
from kvlens.kv_bias import Layer
from kvlens.memory import NUMBERS_AT_ONCE, NUMBERS_PER_PASS
from kvlens.model import heads_per_layer

from ..bias.exchange import (
    ALL,
    Exchange,
    has_shift_state,
    in_one_space,
    kv_heads_read,
    variants_at_once,
)

SHIFT_STATES = ("last_k", "last_v", "last_q", "conv")
"""The tensors that the text's first tokens mix with their own: the shift state, and the inputs of a short convolution."""


def hidden_from_text(
    model: KVModel, prompt: Int[Tensor, " pos"], units: Bool[Tensor, "row pos"], bias: KVBias | None = None
) -> Iterator[KVBias]:
    """The bias of a prompt of which some positions are hidden from the text: batches that have a row for each row of ``units``.

    Left out are the terms of every position whose keys and values hold something of the hidden ones (:func:`carriers`), and the
    hidden positions' own rows of the shift state, which the text's first positions would mix into their keys, values and
    queries: those rows become zero, as at the beginning of a text. The prompt's own pass stays as it was; it is read once.

    Of a recurrent layer the hidden positions' terms are taken out of the state; what its tokens removed and how they decayed
    stays. Its short convolution is treated like a shift state, but the terms of the next positions, whose keys and values it
    mixed with the hidden ones, stay.

    Args:
        model: linear or softmax.
        prompt: [pos].
        units: True at the positions that are hidden.
        bias: of the prompt, where it was read before; a linear model, and one with recurrent layers, reads it again.
    """
    terms = Terms.of_prompt(model, prompt, bias)
    bias = terms.bias
    for rows in units.split(max(1, NUMBERS_PER_PASS // max(1, sum(part.b_kv.numel() for part in bias.attention)))):
        whole = bias.repeat(len(rows))
        layers = []
        for layer, taken in zip(whole.layers, terms.of(carriers(bias, rows)), strict=True):
            left = {name: _without_rows(x, rows) for name, x in layer.tensors().items() if name in SHIFT_STATES}
            left |= {name: layer.tensors()[name] - x.to(whole.device, whole.dtype) for name, x in taken.items()}
            layers.append(layer.with_tensors(left))
        yield whole.with_layers(layers)


def carriers(bias: KVBias, units: Bool[Tensor, "row pos"]) -> Bool[Tensor, "row pos"]:
    """The positions whose keys and values hold something of the given ones: they, and under a KV shift the next ones."""
    window = max([0, *(layer.last[x].shape[1] for layer in bias.layers for x in "kv" if x in layer.last)])
    found = units.clone()
    for lag in range(1, min(window, units.shape[1] - 1) + 1):
        found[:, lag:] |= units[:, :-lag]
    return found


def _without_rows(last: Float[Tensor, "row window *rest"], units: Bool[Tensor, "row pos"]) -> Tensor:
    """The shift state with zeros in its rows of the hidden positions; its last row belongs to the last position."""
    n = min(last.shape[1], units.shape[1])
    keep = torch.ones(last.shape[:2], dtype=last.dtype, device=last.device)
    keep[:, last.shape[1] - n :] = (~units[:, units.shape[1] - n :]).to(keep)
    return last * keep.reshape(*keep.shape, *[1] * (last.dim() - 2))


@dataclass(frozen=True)
class Terms:
    """What each position of a prompt, or of a single counterfactual one, wrote into its bias.

    Attributes:
        model: that read it.
        bias: of the prompt.
        n_positions: of the prompt.
        read: the positions that were read; None for all.
        factors: of a linear model.
        states: kbar_p and v_p of a model with recurrent layers (:func:`state_terms`).
        first_key: number of the virtual key of the prompt's first position; those of what the prompt continues come first.
    """

    model: KVModel
    bias: KVBias
    n_positions: int
    read: Bool[Tensor, " pos"] | None = None
    factors: "Factors | None" = None
    states: tuple[Tensor, Tensor] | None = None
    first_key: int = 0

    @classmethod
    def of_prompt(cls, model: KVModel, prompt: Int[Tensor, " pos"] | Counterfactuals, bias: KVBias | None = None) -> "Terms":
        """Read the prompt once (one with recurrent layers twice); keys of a bias that is given are not read again."""
        n, read = (prompt.tokens.shape[1], prompt.kept[0].cpu()) if isinstance(prompt, Counterfactuals) else (len(prompt), None)
        if isinstance(model, HookedKVTransformer) and model.cfg.attention == "linear":
            found, bias = factors(model, prompt)
            return cls(model, bias, n, read, found)
        bias = convert_prompt(model, prompt) if bias is None else bias
        bias = bias if bias.batch_size is None else bias.select_prompt(0)
        if bias.kind != "virtual_keys" or (bias.attention and bias.d_phi < n):
            raise KVLensError('this needs a prompt with all of its keys: convert_prompt(model, prompt, method="exact")')
        states = state_terms(model, prompt) if any(layer.state is not None for layer in bias.layers) else None
        return cls(model, bias, n, read, None, states, bias.d_phi - n)

    def of(self, chosen: Bool[Tensor, "row pos"], layer: int = ALL) -> list[dict[str, Tensor]]:
        """The sum of the terms of each row's positions, in one layer or in all, by the names of each layer's tensors."""
        if self.factors is not None:
            found = written_by(self.model, self.factors, self.bias, chosen if self.read is None else chosen & self.read)
        else:
            found = list(map(self._of_keys(chosen), self.bias.layers))
        recurrent = [of for of, held in zip(found, self.bias.layers, strict=True) if held.state is not None]
        if self.states is not None:
            states = torch.einsum("rp,lphk,lphv->lrhkv", chosen.to(self.states[1]), *self.states)
            for of, state in zip(recurrent, states, strict=True):
                of["state"] = state
        return [of if layer in (ALL, i) else {} for i, of in enumerate(found)]

    def _of_keys(self, chosen: Bool[Tensor, "row pos"]) -> Callable[[Layer], dict[str, Tensor]]:
        behind = self.bias.d_phi - self.first_key - self.n_positions
        keys = torch.nn.functional.pad(chosen, (self.first_key, behind))[:, None]

        def of(layer: Layer) -> dict[str, Tensor]:
            if layer.attention is None:
                return {}
            on = keys.to(layer.attention.b_d)
            return {"b_kv": layer.attention.b_kv * on[..., None], "b_d": layer.attention.b_d * on}

        return of


class PositionExchange(Exchange):
    """Positions of a prompt's bias, and its shift state, exchanged for those of a counterfactual prompt, in a layer or in all.

    Args:
        read: of the prompt.
        other: the counterfactual prompt, a single row.

    Attributes:
        n_positions: of the prompt.
        parts: positions, then `ALL` for the shift state where there is one.
        donor: the other prompt's bias, in the same features as ``own``.
    """

    def __init__(self, read: Terms, other: Counterfactuals):
        self.n_positions, self._layer = read.n_positions, ALL
        self.parts = [*range(self.n_positions), *([ALL] if has_shift_state(read.bias) else [])]
        there = Terms.of_prompt(read.model, other)
        self.own, self.donor = in_one_space(read.bias, there.bias)  # the other prompt's keys lie behind the prompt's
        behind = read.bias.d_phi + there.first_key
        self._sides = replace(read, bias=self.own), replace(there, bias=self.donor, first_key=behind)
        self.at_once = min(32, variants_at_once(self.own))

    def in_layer(self, layer: int) -> "PositionExchange":
        """The same in one layer alone; what is kept is kept in this layer, and everything else exchanged in all."""
        found = copy.copy(self)
        found._layer = layer
        return found

    def biases(self, chosen: Bool[Tensor, "row part"], *, keep: bool = False) -> KVBias:
        """A batch of biases; see :meth:`kvlens.analyses.bias.exchange.Exchange.biases`."""
        here, there = self._sides[::-1] if keep else self._sides
        positions, whole, layer = chosen[:, : self.n_positions], here.bias.repeat(len(chosen)), self._layer
        terms = zip(here.of(positions, layer), there.of(positions, layer), strict=True)
        shift_states, layers = chosen[:, self.n_positions :].any(dim=1), []
        for i, (held, own, other, (taken, given)) in enumerate(
            zip(whole.layers, here.bias.layers, there.bias.layers, terms, strict=True)
        ):
            mixed = {name: held.tensors()[name] + (given[name] - x).to(held.tensors()[name]) for name, x in taken.items()}
            if layer in (ALL, i):
                mixed |= _shift_states(own, other, shift_states)
            layers.append(held.with_tensors(mixed))
        return whole.with_layers(layers)


def _shift_states(own: Layer, other: Layer, taken: Bool[Tensor, " row"]) -> dict[str, Tensor]:
    """The shift state of a layer, in some rows that of another."""
    mine, theirs = own.tensors(), other.tensors()
    return {
        name: torch.where(taken.reshape(-1, *[1] * (mine[name].dim() - 1)).to(mine[name].device), theirs[name], mine[name])
        for name in mine
        if name in SHIFT_STATES
    }


def state_terms(
    model: KVModel, prompt: Int[Tensor, " pos"] | Counterfactuals
) -> tuple[Float[Tensor, "recurrent_layer pos head d_k"], Float[Tensor, "recurrent_layer pos head d_v"]]:
    """kbar_p and v_p of each token of a prompt, or of a single counterfactual one, in float64: zeros where it is not read."""
    if isinstance(prompt, Counterfactuals):
        memories = read_memory(model, prompt.tokens[0], prompt.kept[0], prompt.positions == "kept")
    else:
        memories = read_memory(model, prompt)
    return torch.stack([memory.carried_keys for memory in memories]), torch.stack([memory.values for memory in memories])


Factors = list[tuple[Float[Tensor, "pos _ _"], Float[Tensor, "pos _ _"], Float[Tensor, "pos _ _"]]]
"""The factors of every position's terms in the bias of a linear model, layer by layer: phi(k_p), unrotated where RoPE follows
the feature map, as b_D holds it; the same as b_KV holds it at the end of the prompt, decayed, and rotated where RoPE follows
the feature map; and v_p."""


def factors(model: KVModel, prompt: Int[Tensor, " pos"] | Counterfactuals) -> tuple[Factors, KVBias]:
    """Read a prompt, or a single counterfactual one, once; :func:`written_by` adds up the terms of any of its positions."""
    assert isinstance(model, HookedKVTransformer)  # linear attention is found in no other
    phi_k, v, bias = _features_and_values(model, prompt)
    steps = torch.arange(phi_k[0].shape[0], 0, -1, device=phi_k[0].device)
    per_head = (x.repeat_interleave(n // x.shape[1], dim=1) for x, n in zip(phi_k, heads_per_layer(model), strict=True))
    carried = [block.attn.features_after(x, steps) for block, x in zip(model.blocks, per_head, strict=True)]
    return list(zip(phi_k, carried, v, strict=True)), bias


def written_by(model: KVModel, read: Factors, bias: KVBias, chosen: Bool[Tensor, "row pos"]) -> list[dict[str, Tensor]]:
    """b_kv and b_d of each layer that chosen positions of a prompt wrote in a linear model: for each row their terms' sum."""
    assert isinstance(model, HookedKVTransformer)  # linear attention is found in no other
    chosen = chosen.to(read[0][0].device)
    most = max(1, int(chosen.sum(dim=1).max()))
    positions = chosen.long().argsort(dim=1, descending=True, stable=True)[:, :most]
    weight = chosen.gather(1, positions).to(read[0][1])[..., None, None]
    at_once = max(1, NUMBERS_AT_ONCE // (sum(carried[0].numel() for _, carried, _ in read) * most))
    found = []
    for layer, (phi_k, carried, v) in enumerate(read):
        of_kv, part = kv_heads_read(bias, layer).to(v.device), bias.layers[layer].attention
        b_kv, b_d = [], []
        for where, each in zip(positions.split(at_once), weight.split(at_once), strict=True):
            b_kv.append(torch.einsum("rphf,rphd->rhfd", carried[where] * each, v[where][:, :, of_kv]))
            b_d.append((phi_k[where] * each).sum(dim=1)[:, of_kv])
        d = torch.cat(b_d) if model.cfg.normalizer == "kernel" else 0 * torch.cat(b_d)
        found.append({"b_kv": torch.cat(b_kv).to(part.b_kv), "b_d": d.to(part.b_d)})
    return found


def _features_and_values(
    model: KVModel, prompt: Int[Tensor, " pos"] | Counterfactuals
) -> tuple[list[Float[Tensor, "pos _ _"]], list[Float[Tensor, "pos _ _"]], KVBias]:
    """phi(k_p), unrotated where RoPE follows the feature map, and v_p of every layer, as the prompt's own pass makes them, and
    the prompt's bias."""
    shift, variant = model.cfg.kv_shift, model.cfg.attention_variant
    augmented = variant is not None and variant.augmented is not None and variant.augmented.values
    v_name = "hook_v_augmented" if augmented else "hook_v_shifted" if shift is not None and shift.values else "hook_v"
    seen: dict[str, list[Tensor]] = {"hook_phi_k": [], v_name: []}

    def look(x: Tensor, hook: Any) -> None:
        seen[hook.name.rsplit(".", 1)[-1]].append(x[0])

    hooks = [(f"blocks.{layer}.attn.{name}", look) for layer in range(model.cfg.n_layers) for name in seen]
    bias = convert_prompt(model, prompt, fwd_hooks=hooks)
    bias = bias if bias.batch_size is None else bias.select_prompt(0)
    return seen["hook_phi_k"], [v.to(seen["hook_phi_k"][0]) for v in seen[v_name]], bias

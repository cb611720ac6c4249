"""Passes in which every reader has an input of its own."""

from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import HookedKVTransformer

from .graph import Graph

Written = Float[Tensor, "writer pair pos d_model"]


def embedded_tokens(model: HookedKVTransformer, tokens: Int[Tensor, "pair pos"]) -> Float[Tensor, "pair pos d_model"]:
    """The residual stream before the first layer; every token is read, also one with the number of a pad token."""
    return model.input_to_embed(tokens, attention_mask=torch.ones_like(tokens))[0]


class Pass:
    """A pass through the layers in which every reader has an input of its own: here the residual stream as it is.

    Attributes:
        inputs: of the readers so far, [reader, pair, pos, d_model], a tensor for those that read together.
        written: by the writers so far, likewise.
    """

    def __init__(self, model: HookedKVTransformer, graph: Graph):
        self.model, self.graph = model, graph
        self.inputs: list[Tensor] = []
        self.written: list[Tensor] = []

    def read(self, some: slice, stream: Float[Tensor, "pair pos d_model"]) -> Float[Tensor, "reader pair pos d_model"]:
        """The inputs of some readers, given the sum of all that was written before them."""
        self.inputs.append(stream.expand(some.stop - some.start, *stream.shape))
        return self.inputs[-1]

    def write(self, outputs: Written) -> None:
        """Note what the next writers wrote."""
        self.written.append(outputs)

    def logits(self, embedded: Float[Tensor, "pair pos d_model"], n_last: int | None) -> Float[Tensor, "pair n_last d_vocab"]:
        """The logits at the last positions, all of them by default."""
        z: dict[int, Tensor] = {}

        def keep(x: Tensor, hook: Any) -> None:
            z[hook.layer()] = x

        self.write(embedded[None])
        with self.model.hooks(fwd_hooks=[(lambda name: name.endswith("attn.hook_z"), keep)]):
            stream = embedded
            for layer, block in enumerate(self.model.blocks):
                stream = self._layer(block, layer, stream, z)
        (last,) = self.read(self.graph.at[self.model.cfg.n_layers, "logits"], stream)
        return self.model.logits_of(last, n_last=n_last)

    def _layer(self, block: Any, layer: int, before: Tensor, z: dict[int, Tensor]) -> Tensor:
        at = self.graph.at
        inputs = self.read(self.graph.attention(layer), before).permute(1, 2, 0, 3)  # by head, as attention takes them
        by_input = inputs.split([at[layer, x].stop - at[layer, x].start for x in "qkv"], dim=2)
        block.attn(*(x if block.norms_follow else block.ln1(x) for x in by_input))
        heads, biases = _written_by_heads(block, z.pop(layer))
        after = before + heads.sum(dim=0) + biases
        if block.cfg.attn_only:
            self.write(heads)
            return after
        if not block.cfg.parallel_attn_mlp:
            self.write(heads)
        (read,) = self.read(at[layer, "mlp"], before if block.cfg.parallel_attn_mlp else after)
        mlp = block.apply_mlp(block.mlp_input(read))
        if block.cfg.parallel_attn_mlp:
            self.write(heads)
        self.write(mlp[None])
        return after + mlp


def _written_by_heads(block: Any, z: Float[Tensor, "pair pos head d_head"]) -> tuple[Written, Tensor]:
    """What each head adds to the residual stream, and what no head does: with a norm behind them, by the scale of this pass."""
    heads, norm = torch.einsum("bphd,hdm->hbpm", z, block.attn.W_O), block.norm_behind("ln1")
    if not hasattr(norm, "hook_scale"):
        return heads, block.attn.b_O
    scales: list[Tensor] = []
    with ExitStack() as stack:
        stack.callback(norm.hook_scale.register_forward_hook(lambda _, args, scale: scales.append(scale)).remove)
        whole = norm(heads.sum(dim=0) + block.attn.b_O)
    heads = heads - heads.mean(dim=-1, keepdim=True) if norm.centers else heads
    heads = heads / scales[0] * getattr(norm, "w", 1.0)
    return heads, whole - heads.sum(dim=0)


class CircuitPass(Pass):
    """A pass in which each reader sees, of the writers whose edge is cut, what these wrote on the corrupted prompt: at the last
    positions, for which this is given; at those before, whose tokens are the same, they write the same."""

    def __init__(self, model: HookedKVTransformer, graph: Graph, kept: Bool[Tensor, "writer reader"], corrupted: Written):
        super().__init__(model, graph)
        self.cut = (graph.edges & ~kept).to(corrupted)
        self.corrupted, self.gaps, self.n = corrupted, torch.empty_like(corrupted), 0

    def read(self, some: slice, stream: Tensor) -> Tensor:
        """The stream, plus (y'_w - y_w) of every writer that is cut."""
        changes = self.cut[: self.n, some].T @ self.gaps[: self.n].flatten(1)
        inputs = stream.repeat(some.stop - some.start, 1, 1, 1)
        self._last(inputs).add_(changes.view(-1, *self.gaps.shape[1:]))
        return inputs

    def write(self, outputs: Written) -> None:
        """Note how far they are from what was written on the corrupted prompt."""
        now = slice(self.n, self.n + len(outputs))
        self.gaps[now] = self.corrupted[now] - self._last(outputs)
        self.n = now.stop

    def _last(self, x: Float[Tensor, "any pair pos d_model"]) -> Float[Tensor, "any pair n_last d_model"]:
        return x[:, :, x.shape[2] - self.gaps.shape[2] :]

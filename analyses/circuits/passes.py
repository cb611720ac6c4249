"""Passes in which every reader may have an input of its own, by hooks; the residual stream itself flows on as it is."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kvlens import KVModel
from kvlens.bridge import measured
from kvlens.model import Block

from .graph import EMBEDDING, Graph

Written = Float[Tensor, "writer pair pos d_model"]


class Layer:
    """How a layer's heads and MLP read and write.

    Attributes:
        number: of the layer.
        block: its points, and those of its MLP.
        before: shows the residual stream before it.
        norms: before and behind its heads, and before its MLP.
        points: ``q``, ``k`` and ``v`` -> where they pass, each a linear map of the normalized stream.
        weights: those maps, by reader.
    """

    def __init__(self, model: KVModel, number: int, block: Block, before: nn.Module):
        self.number, self.block, self.before, self.norms, part = number, block, before, block.norm_modules(), block.parts[0]
        found = part.matrices()
        assert found is not None
        step = part.n_heads // part.n_kv_heads
        self.points = {x: model.hook_dict[f"blocks.{number}.{part.name}.hook_{x}"] for x in "qkv"}
        self.weights = {"q": found.W_Q, "k": found.W_K[::step], "v": found.W_V[::step]}
        self.output_weights = found.W_O
        behind = None if isinstance(self.norms.behind_heads, nn.Identity) else self.norms.behind_heads
        self.behind = None if behind is None else (behind, measured(behind, found.W_O[0, 0]))

    def normalized(self, x: Tensor, reader: str) -> Tensor:
        """What heads (``q``, ``k``, ``v``) or the MLP make of the residual stream before anything else."""
        norm = self.norms.before_mlp if reader == "mlp" else self.norms.before_heads
        return x if norm is None else norm(x)

    def written_by_heads(self, heads: Written, whole: Tensor, out: Tensor) -> Written:
        """Their parts of what the norm behind them makes of ``whole``, by what it divides by there."""
        assert self.behind is not None
        bias, centers = self.behind[1].bias.to(out), self.behind[1].centers
        whole, heads = (x - x.mean(dim=-1, keepdim=True) if centers else x for x in (whole, heads))
        return heads * ((out - bias) / whole.where(whole != 0, 1))


def layers_to_hook(model: KVModel) -> list[Layer]:
    """All of them."""
    blocks = model.layers()
    before = [model.ends().before, *(block.after for block in blocks)]
    return [Layer(model, number, block, before[number]) for number, block in enumerate(blocks)]


class Pass:
    """A pass of the model that notes what every node writes, from position ``first`` on.

    Attributes:
        written: by every writer.
        embedded: the stream before the first layer, at every position.
        by_nobody: what else norms behind heads put out (a bias, over what they divide by), summed.
        last: the stream behind the last layer.
    """

    def __init__(self, model: KVModel, graph: Graph, first: int = 0):
        self.model, self.graph, self.first, self.layers = model, graph, first, layers_to_hook(model)
        self.written, self.embedded, self.last, self.by_nobody = *(torch.empty(0) for _ in range(3)), torch.zeros(())
        self._stream: Tensor
        self._read_by_mlp: Tensor

    def logits(
        self, tokens: Int[Tensor, "pair pos"], n_last: int | None, embedded: Tensor | None = None
    ) -> Float[Tensor, "pair n_last d_vocab"]:
        """The logits at the last positions, all of them by default; ``embedded`` takes the place of the tokens' embedding."""

        def start(x: Tensor) -> Tensor:
            self.embedded = x = x if embedded is None else embedded
            self.written = x.new_empty(len(self.graph.writers), *x[:, self.first :].shape)
            self.write(self.graph.wrote[EMBEDDING, "mlp"], x[None])
            return x

        with ExitStack() as stack:
            _on(stack, self.layers[0].before, start)
            for layer in self.layers:
                self._hook(stack, layer)
            _on(stack, self.layers[-1].block.after, self.read_last)
            return self.model.logits_on(tokens, n_last or tokens.shape[1])

    def read_heads(self, layer: Layer, x: str, value: Float[Tensor, "pair pos head d_head"]) -> Tensor | None:
        """Queries, keys or values, if they are to be others."""
        return None

    def read_mlp(self, layer: Layer, stream: Tensor, value: Tensor) -> Tensor | None:
        """The input of an MLP behind its norm, if it is to be another; ``stream`` stands before that."""
        return None

    def read_last(self, stream: Tensor) -> Tensor | None:
        """The input of the final norm, if it is to be another."""
        self.last = stream
        return None

    def write(self, at: slice, outputs: Written) -> None:
        """Note what some writers wrote."""
        self.written[at] = outputs[:, :, self.first :].detach()

    def _hook(self, stack: ExitStack, layer: Layer) -> None:
        number, block, heads = layer.number, layer.block, list[Tensor]()

        def note_stream(x: Tensor) -> None:
            self._stream = x

        def note_read(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._read_by_mlp = args[0]

        def change_mlp(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            norm = layer.norms.before_mlp
            stream = args[0] if norm is None else self._stream if norm is layer.norms.before_heads else self._read_by_mlp
            changed = self.read_mlp(layer, stream.view_as(self._stream), args[0])
            return None if changed is None else (changed.reshape(args[0].shape), *args[1:])

        def see_heads(z: Tensor) -> None:
            form = block.parts[0].attention_points()["z"][1]
            heads[:] = [torch.einsum("bphd,hdm->hbpm", z if form is None else form(z), layer.output_weights)]
            if layer.behind is None:
                self.write(self.graph.wrote[number, "z"], heads.pop())

        def see_behind(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            written = layer.written_by_heads(heads.pop(), args[0], out)
            self.by_nobody = self.by_nobody.to(out) + (out - written.sum(dim=0)).detach()
            self.write(self.graph.wrote[number, "z"], written)

        _on(stack, layer.before, note_stream)
        for x, point in layer.points.items():
            _on(stack, point, lambda value, x=x: self._changed_heads(layer, x, value))
        _on(stack, block.parts[0].attention_points()["z"][0], see_heads)
        if layer.behind is not None:
            stack.callback(layer.behind[0].register_forward_hook(see_behind).remove)
        if block.mlp is None or block.mlp_in is None:
            return
        if layer.norms.before_mlp not in (None, layer.norms.before_heads):
            stack.callback(layer.norms.before_mlp.register_forward_pre_hook(note_read).remove)
        stack.callback(block.mlp_in.register_forward_pre_hook(change_mlp).remove)
        _on(stack, block.mlp, lambda y: self.write(self.graph.wrote[number, "mlp"], y.reshape(1, *self._stream.shape)))

    def _changed_heads(self, layer: Layer, x: str, value: Tensor) -> Tensor | None:
        n = self.graph.at[layer.number, x].stop - self.graph.at[layer.number, x].start
        changed = self.read_heads(layer, x, value if value.dim() == 4 else value.unflatten(-1, (n, -1)))
        return None if changed is None else changed.reshape(value.shape)


def _on(stack: ExitStack, module: nn.Module, see: Callable[[Tensor], Tensor | None]) -> None:
    """Inside, ``see`` gets what comes out of a module, and may return what takes its place."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        changed = see(out[0] if isinstance(out, tuple) else out)
        return None if changed is None else (changed, *out[1:]) if isinstance(out, tuple) else changed

    stack.callback(module.register_forward_hook(hook).remove)


class GradientPass(Pass):
    """A pass behind which the gradients of a value at every reader's input are found."""

    def __init__(self, model: KVModel, graph: Graph, first: int = 0):
        super().__init__(model, graph, first)
        self._read: list[tuple[Layer | None, str, Tensor, Tensor]] = []

    def read_heads(self, layer: Layer, x: str, value: Tensor) -> Tensor:
        """Note where a gradient is asked for: what is returned is read on."""
        self._read.append((layer, x, self._stream.detach(), value))
        return value

    def read_mlp(self, layer: Layer, stream: Tensor, value: Tensor) -> Tensor:
        """Likewise; heads may read the same tensor."""
        self._read.append((layer, "mlp", stream.detach(), value := value.view(stream.shape)))
        return value

    def read_last(self, stream: Tensor) -> None:
        """Likewise."""
        self._read.append((None, "logits", stream, stream))

    def gradients(self, value: Float[Tensor, ""]) -> list[tuple[slice, Float[Tensor, "reader pair pos d_model"]]]:
        """Of readers that read together, which they are, and the gradients at their inputs."""
        found, points = [], [point for *_, point in self._read]
        for (layer, x, stream, _), gradient in zip(
            self._read, torch.autograd.grad(value, points, materialize_grads=True), strict=True
        ):
            stream, gradient = stream[:, self.first :], gradient[:, self.first :]
            if layer is None:
                found.append((self.graph.at[self.model.cfg.n_layers, x], gradient[None]))
                continue
            weights = None if x == "mlp" else layer.weights[x]
            by_reader = gradient[None] if weights is None else torch.einsum("bphd,hmd->hbpm", gradient, weights)
            found.append((self.graph.at[layer.number, x], _through_norm(layer, x, stream, by_reader)))
        return found


def _through_norm(layer: Layer, x: str, stream: Tensor, gradients: Float[Tensor, "reader pair pos d_model"]) -> Tensor:
    with torch.enable_grad():
        each = stream.expand(gradients.shape).requires_grad_()
        return torch.autograd.grad(layer.normalized(each, x), each, gradients)[0]


class CircuitPass(Pass):
    """A pass in which each reader sees, of the writers whose edge is cut, what these wrote on the corrupted prompt."""

    def __init__(self, model: KVModel, graph: Graph, kept: Bool[Tensor, "writer reader"], corrupted: Pass):
        super().__init__(model, graph, corrupted.first)
        self.cut, self.corrupted, self._moved = graph.edges & ~kept, corrupted, dict[int, tuple[Tensor, Tensor]]()

    def write(self, at: slice, outputs: Written) -> None:
        """Note how far they are from what was written on the corrupted prompt."""
        torch.sub(self.corrupted.written[at], outputs[:, :, self.first :], out=self.written[at])

    def seen(self, stream: Tensor, some: slice) -> tuple[Float[Tensor, "input pair n_last d_model"], Int[Tensor, " reader"]]:
        """What some readers see of the stream from ``first`` on, with (y'_w - y_w) of every writer that is cut: every input
        once, and which of them is each reader's."""
        n = self.graph.n_before[some.start]
        columns, which = self.cut[:n, some].unique(dim=1, return_inverse=True)
        changes = torch.tensordot(columns.T.to(self.written), self.written[:n], dims=1)
        return changes.add_(stream[:, self.first :]), which

    def read_heads(self, layer: Layer, x: str, value: Tensor) -> Tensor:
        """Behind norm and projection, with what is changed of the stream."""
        every, some = self.graph.attention(layer.number), self.graph.at[layer.number, x]
        if layer.number not in self._moved:
            inputs, which = self.seen(self._stream, every)
            own = layer.normalized(self._stream[:, self.first :], x)
            self._moved = {layer.number: (layer.normalized(inputs, x).sub_(own), which)}
        moved, which = self._moved[layer.number]
        which, value = which[some.start - every.start : some.stop - every.start], value.clone()
        for number in which.unique().tolist():
            heads = (which == number).nonzero().flatten()
            value[:, self.first :, heads] += torch.einsum("bpm,hmd->bphd", moved[number], layer.weights[x][heads])
        return value

    def read_mlp(self, layer: Layer, stream: Tensor, value: Tensor) -> Tensor:
        """The normalized stream, with what is changed of it."""
        (seen,), _ = self.seen(stream, self.graph.at[layer.number, "mlp"])
        value = value.reshape(stream.shape).clone()
        value[:, self.first :] = layer.normalized(seen, "mlp")
        return value

    def read_last(self, stream: Tensor) -> Tensor:
        """The stream, with what is changed of it."""
        (seen,), _ = self.seen(stream, self.graph.at[self.model.cfg.n_layers, "logits"])
        return torch.cat([stream[:, : self.first], seen], dim=1)


@torch.no_grad()
def explains_the_model(
    model: KVModel, graph: Graph, clean: Int[Tensor, "pair pos"], corrupted: Int[Tensor, "pair pos"]
) -> bool:
    """Whether all that differs in the stream was written by nodes, and readers that see the corrupted prompt alone make its
    logits of the clean one; up to some power of the dtype's precision, far above rounding."""
    ours, theirs = Pass(model, graph), Pass(model, graph)
    logits = [of.logits(tokens, 1) for of, tokens in ((ours, clean), (theirs, corrupted))][1]
    none = CircuitPass(model, graph, torch.zeros_like(graph.edges), theirs).logits(clean, 1)
    added = (ours.written - theirs.written).sum(dim=0) + ours.by_nobody - theirs.by_nobody
    both = [(none, logits), (ours.last - theirs.last, added)]
    bound = torch.finfo(logits.dtype).eps ** 0.4
    return all(float((a - b).double().norm()) <= bound * max(float(a.double().norm()), bound) for a, b in both)

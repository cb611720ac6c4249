"""Passes in which every reader may have an input of its own, by hooks; the residual stream itself flows on as it is."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kvlens import KVModel
from kvlens.bridge import measured
from kvlens.model import Block

from .graph import EMBEDDING, Graph

Written = Float[Tensor, "writer pair pos d_model"]


class CircuitLayer:
    """How a layer's heads and MLP read and write.

    Attributes:
        number: of the layer.
        block: its points, and those of its MLP.
        before: shows the residual stream before it.
        norms: before and behind its heads, and before its MLP.
        points: ``q``, ``k`` and ``v`` -> where they pass, each a linear map of the normalized stream.
        weights: those maps, by reader.
    """

    def __init__(self, model: KVModel, graph: Graph, number: int, block: Block, before: nn.Module):
        self.number, self.block, self.before, self.norms, part = number, block, before, block.norm_modules(), block.parts[0]
        found, keys = part.matrices(), graph.at[number, "k"]
        assert found is not None
        step = part.n_heads // (keys.stop - keys.start)
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
        _, (_, bias, centers) = self.behind
        whole, heads = (x - x.mean(dim=-1, keepdim=True) if centers else x for x in (whole, heads))
        return heads * ((out - bias.to(out)) / whole.where(whole != 0, 1))


@torch.no_grad()
def layers_to_hook(model: KVModel, graph: Graph) -> list[CircuitLayer]:
    """All of them; weights and norms are read, not trained."""
    blocks = model.layers()
    before = [model.ends().before, *(block.after for block in blocks)]
    return [CircuitLayer(model, graph, number, block, before[number]) for number, block in enumerate(blocks)]


@contextmanager
def _grouped_as(model: KVModel, graph: Graph) -> Iterator[None]:
    """Inside, every query head reads keys and values of its own where the graph says so."""
    if not graph.by_query_head:
        yield
        return
    before = model.cfg.ungroup_grouped_query_attention
    model.cfg.ungroup_grouped_query_attention = True
    try:
        yield
    finally:
        model.cfg.ungroup_grouped_query_attention = before


class Pass:
    """A pass of the model that notes what every node writes, from position ``first`` on.

    Where tokens are ``hidden``, each pair is read in two rows, which are alike but that nobody reads those tokens in the
    second; their positions stay. z of every head is then, in both,

        z = z_hidden + presence (z_there - z_hidden)

    Attributes:
        written: by every writer.
        embedded: the stream before the first layer, at every position.
        by_nobody: what else norms behind heads put out (a bias, over what they divide by), summed.
        last: the stream behind the last layer.
    """

    def __init__(self, model: KVModel, graph: Graph, first: int = 0, hidden: Bool[Tensor, "pair pos"] | None = None):
        self.model, self.graph, self.first, self.hidden = model, graph, first, hidden
        self.layers = layers_to_hook(model, graph)
        self.written, self.embedded, self.last, self.by_nobody = *(torch.empty(0) for _ in range(3)), torch.zeros(())
        self._stream: Tensor
        self._read_by_mlp: Tensor

    def logits(
        self, tokens: Int[Tensor, "pair pos"], n_last: int | None, embedded: Tensor | None = None
    ) -> Float[Tensor, "pair n_last d_vocab"]:
        """The logits at the last positions, all of them by default; ``embedded`` takes the place of the tokens' embedding."""
        n = n_last or tokens.shape[1]

        def start(x: Tensor) -> Tensor:
            self.embedded = self.first_rows(x) if embedded is None else embedded
            self.written = x.new_empty(len(self.graph.writers), *self.embedded[:, self.first :].shape)
            self.write(self.graph.wrote[EMBEDDING, "mlp"], self.embedded[None])
            return self.all_rows(self.embedded)

        with ExitStack() as stack:
            stack.enter_context(_grouped_as(self.model, self.graph))
            _on(stack, self.layers[0].before, start)
            for layer in self.layers:
                self._hook(stack, layer)
            _on(stack, self.layers[-1].block.after, self.read_last)
            if self.hidden is None:
                return self.model.logits_on(tokens, n)
            kept = torch.cat([torch.ones_like(self.hidden), ~self.hidden])[:, :-1]
            tokens = self.all_rows(tokens)
            return self.first_rows(self.model.logits_on(tokens[:, -1:], n, before=tokens[:, :-1], kept=kept))

    def first_rows(self, x: Tensor, dim: int = 0) -> Tensor:
        """Those of the pairs themselves."""
        return x.chunk(2, dim=dim)[0] if self.hidden is not None else x

    def all_rows(self, x: Tensor, dim: int = 0) -> Tensor:
        """As often as there are rows."""
        return torch.cat([x, x], dim=dim) if self.hidden is not None else x

    def presence(self, layer: CircuitLayer) -> Float[Tensor, " kv_head"]:
        """How far hidden tokens are there for the heads that share keys, 0 to 1: here for none."""
        return torch.zeros(len(layer.weights["k"]))

    def read_heads(self, layer: CircuitLayer, x: str, value: Float[Tensor, "pair pos head d_head"]) -> Tensor | None:
        """Queries, keys or values, if they are to be others."""
        return None

    def read_mlp(self, layer: CircuitLayer, stream: Tensor, value: Tensor) -> Tensor | None:
        """The input of an MLP behind its norm, if it is to be another; ``stream`` stands before that."""
        return None

    def read_last(self, stream: Tensor) -> Tensor | None:
        """The input of the final norm, if it is to be another."""
        self.last = self.first_rows(stream)
        return None

    def write(self, at: slice, outputs: Written) -> None:
        """Note what some writers wrote."""
        self.written[at] = outputs[:, :, self.first :].detach()

    def _hook(self, stack: ExitStack, layer: CircuitLayer) -> None:
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

        def see_heads(z: Tensor) -> Tensor | None:
            form = block.parts[0].attention_points()["z"][1]
            by_head = self._mixed(layer, z if form is None else form(z))
            heads[:] = [torch.einsum("bphd,hdm->hbpm", self.first_rows(by_head), layer.output_weights)]
            if layer.behind is None:
                self.write(self.graph.wrote[number, "z"], heads.pop())
            return by_head.reshape(z.shape) if self.hidden is not None else None

        def see_behind(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            whole, out = self.first_rows(args[0]), self.first_rows(out)
            written = layer.written_by_heads(heads.pop(), whole, out)
            self.by_nobody = self.by_nobody.to(out) + (out - written.sum(dim=0)).detach()
            self.write(self.graph.wrote[number, "z"], written)

        def see_mlp(y: Tensor) -> None:
            self.write(self.graph.wrote[number, "mlp"], self.first_rows(y.reshape(self._stream.shape))[None])

        _on(stack, layer.before, note_stream)
        for x, point in layer.points.items():
            _on(stack, point, partial(self._changed_heads, layer, x))
        _on(stack, block.parts[0].attention_points()["z"][0], see_heads)
        if layer.behind is not None:
            stack.callback(layer.behind[0].register_forward_hook(see_behind).remove)
        if block.mlp is None or block.mlp_in is None:
            return
        if layer.norms.before_mlp not in (None, layer.norms.before_heads):
            stack.callback(layer.norms.before_mlp.register_forward_pre_hook(note_read).remove)
        stack.callback(block.mlp_in.register_forward_pre_hook(change_mlp).remove)
        _on(stack, block.mlp, see_mlp)

    def _mixed(self, layer: CircuitLayer, z: Float[Tensor, "row pos head d_head"]) -> Tensor:
        if self.hidden is None:
            return z
        there, hidden = z.chunk(2)
        presence = self.presence(layer).to(z)
        return self.all_rows(hidden + presence.repeat_interleave(z.shape[2] // len(presence))[:, None] * (there - hidden))

    def _changed_heads(self, layer: CircuitLayer, x: str, value: Tensor) -> Tensor | None:
        n = self.graph.at[layer.number, x].stop - self.graph.at[layer.number, x].start
        changed = self.read_heads(layer, x, value if value.dim() == 4 else value.unflatten(-1, (n, -1)))
        return None if changed is None else changed.reshape(value.shape)


def _on(stack: ExitStack, module: nn.Module, see: Callable[[Tensor], Tensor | None]) -> None:
    """Inside, ``see`` gets what comes out of a module, and may return what takes its place."""

    def hook(module: nn.Module, args: object, out: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...] | None:
        changed = see(out[0] if isinstance(out, tuple) else out)
        return None if changed is None else (changed, *out[1:]) if isinstance(out, tuple) else changed

    stack.callback(module.register_forward_hook(hook).remove)


class PassWithGradients(Pass):
    """A pass behind which the gradients of a value at every reader's input are found.

    Attributes:
        share: how far hidden tokens are there, for all heads.
        added: (layer, ``z`` or ``mlp``) -> what is added to what these writers write, from ``first`` on.
    """

    def __init__(
        self, model: KVModel, graph: Graph, first: int = 0, hidden: Bool[Tensor, "pair pos"] | None = None, share: float = 1.0
    ):
        super().__init__(model, graph, first, hidden)
        self.share, self._presence = share, dict[int, Tensor]()
        self.added = dict[tuple[int, str], Tensor]()
        self._read: list[tuple[CircuitLayer | None, str, Tensor, Tensor]] = []

    def _hook(self, stack: ExitStack, layer: CircuitLayer) -> None:
        super()._hook(stack, layer)
        part = layer.block.parts[0]
        places: dict[str, Any] = {"z": part.component if layer.behind is None else layer.behind[0], "mlp": layer.block.mlp}
        for x, module in places.items():
            if (layer.number, x) in self.added:
                more = torch.nn.functional.pad(self.added[layer.number, x], (0, 0, self.first, 0))
                _on(stack, module, partial(self._with_more, more))

    def _with_more(self, more: Tensor, y: Tensor) -> Tensor:
        return y + self.all_rows(more).reshape(y.shape)

    def presence(self, layer: CircuitLayer) -> Tensor:
        """Likewise."""
        n = len(layer.weights["k"])
        self._presence[layer.number] = found = self.embedded.new_full((n,), self.share).requires_grad_()
        return found

    def read_heads(self, layer: CircuitLayer, x: str, value: Tensor) -> Tensor:
        """Note where a gradient is asked for: what is returned is read on."""
        self._read.append((layer, x, self._stream.detach(), value))
        return value

    def read_mlp(self, layer: CircuitLayer, stream: Tensor, value: Tensor) -> Tensor:
        """Likewise; heads may read the same tensor."""
        self._read.append((layer, "mlp", stream.detach(), value := value.view(stream.shape)))
        return value

    def read_last(self, stream: Tensor) -> None:
        """Likewise."""
        self._read.append((None, "logits", stream, stream))

    def gradients(self, value: Float[Tensor, ""]) -> tuple[list[tuple[slice, Tensor]], Float[Tensor, " reader"]]:
        """Of readers that read together, which they are, and the gradients at their inputs; and those of the presence of hidden
        tokens for the readers of keys."""
        points, n_read = [point for *_, point in self._read], len(self._read)
        wanted = [*points, *self._presence.values()]
        gradients = torch.autograd.grad(value, wanted, materialize_grads=True)
        found, presence = [], torch.zeros(len(self.graph.readers), dtype=torch.float64)
        for number, gradient in zip(self._presence, gradients[n_read:], strict=True):
            presence[self.graph.at[number, "k"]] = gradient.double().cpu()
        for (layer, x, stream, _), of_rows in zip(self._read, gradients[:n_read], strict=True):
            stream = self.first_rows(stream)[:, self.first :]
            gradient = of_rows[:, self.first :]
            gradient = torch.stack(gradient.chunk(2)).sum(dim=0) if self.hidden is not None else gradient
            if layer is None:
                found.append((self.graph.at[self.model.cfg.n_layers, x], gradient[None]))
                continue
            weights = None if x == "mlp" else layer.weights[x]
            by_reader = gradient[None] if weights is None else torch.einsum("bphd,hmd->hbpm", gradient, weights)
            found.append((self.graph.at[layer.number, x], _through_norm(layer, x, stream, by_reader)))
        return found, presence


def _through_norm(layer: CircuitLayer, x: str, stream: Tensor, gradients: Float[Tensor, "reader pair pos d_model"]) -> Tensor:
    with torch.enable_grad():
        each = stream.expand(gradients.shape).requires_grad_()
        return torch.autograd.grad(layer.normalized(each, x), each, gradients)[0]


class CircuitPass(Pass):
    """A pass in which each reader sees, of the writers whose edge is cut, what these wrote on the corrupted prompt.

    Hidden tokens are there for the readers of keys whose edge from the embedding is kept. With ``n_cut``, edges are cut at so
    many tokens alone, the first ones.
    """

    def __init__(
        self,
        model: KVModel,
        graph: Graph,
        kept: Bool[Tensor, "writer reader"],
        corrupted: Pass,
        n_cut: int | None = None,
    ):
        super().__init__(model, graph, corrupted.first, corrupted.hidden)
        self.cut, self.corrupted, self._moved = graph.edges & ~kept, corrupted, dict[int, tuple[Tensor, Tensor]]()
        self.n_cut = None if n_cut is None else max(0, n_cut - self.first)

    def write(self, at: slice, outputs: Written) -> None:
        """Note how far they are from what was written on the corrupted prompt."""
        torch.sub(self.corrupted.written[at], outputs[:, :, self.first :], out=self.written[at])

    def presence(self, layer: CircuitLayer) -> Bool[Tensor, " kv_head"]:
        """For each head of keys."""
        return ~self.cut[0, self.graph.at[layer.number, "k"]]

    def seen(self, stream: Tensor, some: slice) -> tuple[Float[Tensor, "input pair n_last d_model"], Int[Tensor, " reader"]]:
        """What some readers see of the stream from ``first`` on, with (y'_w - y_w) of every writer that is cut: every input
        once, and which of them is each reader's."""
        n = self.graph.n_before[some.start]
        columns, which = self.cut[:n, some].unique(dim=1, return_inverse=True)
        changes = torch.tensordot(columns.T.to(self.written), self.written[:n], dims=1)
        if self.n_cut is not None:
            changes[:, :, self.n_cut :] = 0
        return self.all_rows(changes, dim=1).add_(stream[:, self.first :]), which

    def read_heads(self, layer: CircuitLayer, x: str, value: Tensor) -> Tensor:
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

    def read_mlp(self, layer: CircuitLayer, stream: Tensor, value: Tensor) -> Tensor:
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
def explains_the_model(model: KVModel, graph: Graph, clean: Pass, corrupted: Pass, tokens: Sequence[Tensor]) -> bool:
    """Whether all that differs in the stream was written by nodes, and readers that see the corrupted prompt alone make its
    logits of the clean one; up to some power of the dtype's precision, far above rounding.

    Args:
        model, graph: that are looked at.
        clean, corrupted: passes that have not run.
        tokens: those of the one and the other.
    """
    logits = [of.logits(each, 1) for of, each in zip((clean, corrupted), tokens, strict=True)][1]
    none = CircuitPass(model, graph, torch.zeros_like(graph.edges), corrupted).logits(tokens[0], 1)
    added = (clean.written - corrupted.written).sum(dim=0) + clean.by_nobody - corrupted.by_nobody
    both = [(none, logits), (clean.last - corrupted.last, added)]
    bound = torch.finfo(logits.dtype).eps ** 0.4
    return all(float((a - b).double().norm()) <= bound * max(float(a.double().norm()), bound) for a, b in both)

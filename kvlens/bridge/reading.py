"""What analyses read of a bridge's pass: attention to a prompt by position, and what lies between the heads and the logits."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvlens.bridge.recurrent import RecurrentLayer
from kvlens.bridge.softmax import SoftmaxLayer
from kvlens.bridge.tokenwise import TokenwiseLayer
from kvlens.bridge.weights import unembedding
from kvlens.errors import IndirectHeads
from kvlens.model.protocol import DirectPath, HeadsRead, LayerReading, LayerSummands, StreamReading

Layer = SoftmaxLayer | RecurrentLayer | TokenwiseLayer
Seen = dict[tuple[int, str], Tensor]
"""What passed certain points of certain layers: (layer, name) -> [batch, ...]."""
DIRECT = 1e-2
"""Share of a layer's change of the residual stream that may be left unexplained by attention and MLP, in half precision too."""


def read_attention(
    model: Any, layers: list[Layer], prompt: Int[Tensor, " prompt"], text: Int[Tensor, " text"]
) -> list[LayerReading]:
    """See :meth:`kvlens.KVModel.read_attention`."""
    seen: Seen = {}
    m = len(prompt)
    with ExitStack() as stack:
        for layer in layers:
            for name, (point, form) in layer.attention_points().items():
                stack.enter_context(_hook(point, seen, (layer.layer, name), form=form))
            _watch_factor(stack, seen, layer)
        model.logits_on(torch.cat([prompt, text])[None], 1)
    found = []
    for layer in layers:
        of = {name: x[0].double() for name, x in _of_layer(seen, layer).items()}
        if not layer.n_heads:
            no_heads = torch.zeros(m + len(text), 0, 1, dtype=torch.float64, device=prompt.device)
            found.append(LayerReading(no_heads[m:].expand(-1, -1, m), no_heads[:m], no_heads[m:], None, None, None))
            continue
        values = of["v"].repeat_interleave(layer.n_heads // of["v"].shape[1], dim=1)
        later = {name: of[name][m:] if name in of else None for name in ("z", "z_bias", "gate")}
        factor = _factor(of, layer)
        factor = None if factor is None else factor[m:]
        assert later["z"] is not None
        pattern = of["pattern"][:, m:, :m].transpose(0, 1)
        found.append(LayerReading(pattern, values[:m], later["z"], later["z_bias"], later["gate"], factor))
    return found


def visit_heads(
    model: Any, layers: list[Layer], tokens: Int[Tensor, "batch pos"], visit: Callable[[int, HeadsRead], None]
) -> None:
    """See :meth:`kvlens.KVModel.visit_heads`."""
    seen: Seen = {}

    def show(layer: Layer) -> None:
        of = _of_layer(seen, layer)
        for name in of:
            del seen[layer.layer, name]
        values = of["v"].repeat_interleave(layer.n_heads // of["v"].shape[2], dim=2)
        visit(layer.layer, HeadsRead(of["pattern"], values, of["z"], of.get("gate")))

    batch, n = tokens.shape
    nothing = torch.zeros(batch, n, 0, 1, device=tokens.device)
    no_heads = HeadsRead(torch.zeros(batch, 0, n, n, device=tokens.device), nothing, nothing, None)
    with ExitStack() as stack:
        for layer in layers:
            if not layer.n_heads:
                handle = layer.component.register_forward_hook(lambda *_, layer=layer: visit(layer.layer, no_heads))
                stack.callback(handle.remove)
                continue
            points = layer.attention_points()
            for name, (point, form) in points.items():
                if name != "z_bias":
                    stack.enter_context(_hook(point, seen, (layer.layer, name), form=form))
            handle = points["z"][0].register_forward_hook(lambda module, args, output, layer=layer: show(layer))
            stack.callback(handle.remove)
        model.logits_on(tokens, 1)


def direct_path(model: Any, layers: list[Layer], text: Int[Tensor, "*batch pos"], run: Callable[[], Any] | None) -> DirectPath:
    """See :meth:`kvlens.KVModel.direct_path`."""
    seen: Seen = {}
    with ExitStack() as stack:
        _watch_summands(stack, model, layers, seen)
        model.logits_on(text if text.dim() == 2 else text[None], 1) if run is None else run()
    for layer in layers:
        _check_direct(model, layer, seen)
    factors = [_factor(_of_layer(seen, layer), layer) for layer in layers]
    scale = _scale(model, seen[-1, "x"].double())
    if text.dim() == 1:
        scale, factors = scale[0], [None if factor is None else factor[0] for factor in factors]
    return DirectPath(scale, factors, [None] * len(layers))


def read_stream(model: Any, layers: list[Layer], text: Int[Tensor, " pos"], n_last: int) -> StreamReading:
    """See :meth:`kvlens.KVModel.read_stream`."""
    seen: Seen = {}
    with_heads = [layer for layer in layers if not isinstance(layer, TokenwiseLayer) and layer.n_heads]
    if len(with_heads) < len(layers):
        raise IndirectHeads(
            f"{model.cfg.architecture}: {len(layers) - len(with_heads)} of {len(layers)} layers have no heads, so what "
            "enters the residual stream is not a sum over heads and MLPs; this needs a model whose layers all have heads"
        )
    with ExitStack() as stack:
        _watch_summands(stack, model, layers, seen)
        for layer in with_heads:
            points = layer.component if isinstance(layer, SoftmaxLayer) else layer.mixer
            for name in ("z_context", "z_bias"):
                stack.enter_context(_hook(getattr(points, f"hook_{name}"), seen, (layer.layer, name)))
            z, form = layer.attention_points()["z"]
            stack.enter_context(_hook(z, seen, (layer.layer, "z"), form=form))
        added = getattr(model, "pos_embed", None)
        if added is not None:
            stack.enter_context(_hook(added, seen, (-1, "pos_embed")))
        model.logits_on(text[None], 1)
    found = []
    for layer in with_heads:
        _check_direct(model, layer, seen)
        of = _of_layer(seen, layer)
        factor, bias = _factor(of, layer), getattr(layer.output, "bias", None)
        parts = [of.get("z_context", of["z"]), of.get("z_bias"), factor, of.get("mlp")]
        z_context, z_bias, factor, mlp = (None if x is None else x[0, -n_last:] for x in parts)
        assert z_context is not None
        found.append(LayerSummands(z_context, z_bias, factor, bias, mlp))
    embed, residual = seen[0, "in"][0], seen[-1, "x"]
    embeddings = {"embed": embed}
    if (-1, "pos_embed") in seen:
        positions = seen[-1, "pos_embed"][-1]
        embeddings = {"embed": embed - positions, "pos_embed": positions}
    scale = _scale(model, residual.double())[0, -n_last:]
    return StreamReading({name: x[-n_last:] for name, x in embeddings.items()}, found, residual[0, -n_last:], scale)


def _watch_summands(stack: ExitStack, model: Any, layers: list[Layer], seen: Seen) -> None:
    """Inside, what each block reads and adds is put into ``seen``, and what enters the final norm."""
    for layer in layers:
        block = model.blocks[layer.layer]
        for name, module in (("attn", layer.component), ("mlp", getattr(block, "mlp", None)), ("block", block)):
            if module is not None:
                stack.enter_context(_hook(module, seen, (layer.layer, name)))
        stack.enter_context(_hook(block, seen, (layer.layer, "in"), before=True))
        if _has_states(layer):
            stack.enter_context(_hook(layer.mixer.hook_z, seen, (layer.layer, "z")))
            _watch_factor(stack, seen, layer)
    stack.enter_context(_hook(model.ln_final, seen, (-1, "x"), before=True))


def _has_states(layer: Layer) -> TypeGuard[RecurrentLayer]:
    """Whether a norm and a gate stand behind a layer's heads: those of states."""
    return isinstance(layer, RecurrentLayer) and layer.n_heads > 0


def _of_layer(seen: Seen, layer: Layer) -> dict[str, Tensor]:
    return {name: x for (number, name), x in seen.items() if number == layer.layer}


def _check_direct(model: Any, layer: Layer, seen: Seen) -> None:
    """Raise IndirectHeads unless a block adds the outputs of its attention and its MLP to the residual stream, no more."""
    of = {name: x.double() for name, x in _of_layer(seen, layer).items()}
    change = of["block"] - of["in"]
    left = change - of["attn"] - of.get("mlp", 0.0)
    if float(left.norm()) > DIRECT * float(change.norm()):
        raise IndirectHeads(
            f"{model.cfg.architecture}: what layer {layer.layer} adds to the residual stream is not the sum of its attention "
            "and its MLP (a norm or a factor stands behind them), so that no head has a logit of its own; direct logit "
            "attribution needs heads that write to it directly"
        )


def _watch_factor(stack: ExitStack, seen: Seen, layer: Layer) -> None:
    """Inside, what enters a recurrent layer's output projection is put into ``seen``."""
    if _has_states(layer):
        stack.enter_context(_hook(layer.output, seen, (layer.layer, "normed"), before=True))


def _factor(of: dict[str, Tensor], layer: Layer) -> Float[Tensor, "*batch pos head d_v"] | None:
    """What the norm and the gate of a recurrent layer multiply z by, both as they are in this pass."""
    if not _has_states(layer):
        return None
    z = of["z"].double()
    factor = of["normed"].double().reshape(z.shape) / z.where(z != 0, 1.0)
    return factor.where(z != 0, 0.0)


def _scale(model: Any, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos 1"]:
    """s, from what the final norm makes of x."""
    norm = unembedding(model)
    centered = x - x.mean(dim=-1, keepdim=True) if norm.centers else x
    module = model.ln_final.original_component
    weights = next(module.parameters(), model.W_U)
    y = module(x.to(weights)).double()
    y = y if norm.norm_bias is None else y - norm.norm_bias.double()
    weight = torch.ones_like(x[0, 0]) if norm.norm_weight is None else norm.norm_weight.double()
    return (centered * weight).norm(dim=-1, keepdim=True) / y.norm(dim=-1, keepdim=True)


class _hook:
    """Inside, what goes into or comes out of a module is put into ``seen``."""

    def __init__(
        self,
        module: nn.Module,
        seen: Seen,
        key: tuple[int, str],
        *,
        before: bool = False,
        form: Callable[[Tensor], Tensor] | None = None,
    ):
        self.module, self.seen, self.key, self.before, self.form = module, seen, key, before, form

    def _see(self, x: Any) -> None:
        x = x[0] if isinstance(x, tuple) else x
        x = x if self.form is None else self.form(x)
        self.seen[self.key] = x.detach()

    def __enter__(self) -> None:
        if self.before:
            self.handle = self.module.register_forward_pre_hook(
                lambda module, args, kwargs: self._see(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            )
        else:
            self.handle = self.module.register_forward_hook(lambda module, args, output: self._see(output))

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()

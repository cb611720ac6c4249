"""What analyses read of a bridge's pass: attention to a prompt by position, and what lies between the heads and the logits."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvlens.bridge.parts import Part
from kvlens.bridge.recurrent import RecurrentLayer
from kvlens.bridge.softmax import SoftmaxLayer
from kvlens.bridge.tokenwise import TokenwiseLayer
from kvlens.bridge.weights import unembedding
from kvlens.errors import IndirectHeads
from kvlens.model.protocol import DirectPath, HeadsRead, LayerReading, LayerSummands, StreamReading, joined_heads

Seen = dict[tuple[Part | int, str], Tensor]
"""What passed certain points: (part of a layer, or the layer's number, name) -> [batch, ...]; -1 is the model."""
DIRECT = 1e-2
"""Share of a layer's change of the residual stream that may be left unexplained by attention and MLP, beyond rounding."""


def read_attention(
    model: Any, layers: list[list[Part]], prompt: Int[Tensor, " prompt"], text: Int[Tensor, " text"]
) -> list[LayerReading]:
    """See :meth:`kvlens.KVModel.read_attention`."""
    seen: Seen = {}
    m = len(prompt)
    with ExitStack() as stack:
        for part in _with_heads(layers):
            for name, (point, form) in part.attention_points().items():
                stack.enter_context(_hook(point, seen, (part, name), form=form))
            _watch_factor(stack, seen, part)
        model.logits_on(torch.cat([prompt, text])[None], 1)
    no_heads = torch.zeros(m + len(text), 0, 1, dtype=torch.float64, device=prompt.device)
    none = LayerReading(no_heads[m:].expand(-1, -1, m), no_heads[:m], no_heads[m:], None, None, None)
    found = []
    for parts in layers:
        with_heads = [part for part in parts if part.n_heads]
        found.append(_all_heads(with_heads, [_reading(seen, part, m) for part in with_heads]) if with_heads else none)
    return found


def _all_heads(parts: list[Part], readings: list[LayerReading]) -> LayerReading:
    pattern, values, z, z_bias, gate, factor = zip(*readings, strict=True)
    return LayerReading(
        joined_heads(pattern),
        joined_heads(values),
        joined_heads(z),
        _joined(z_bias),
        _joined_factors(parts, gate),
        _joined_factors(parts, factor),
    )


def _reading(seen: Seen, part: Part, m: int) -> LayerReading:
    """Of one part of a layer, where the prompt has ``m`` tokens."""
    of = {name: x[0].double() for name, x in _of(seen, part).items()}
    values = of["v"].repeat_interleave(part.n_heads // of["v"].shape[1], dim=1)
    later = {name: of[name][m:] if name in of else None for name in ("z", "z_bias", "gate")}
    factor = _factor(of, part)
    factor = None if factor is None else factor[m:]
    assert later["z"] is not None
    pattern = of["pattern"][:, m:, :m].transpose(0, 1)
    return LayerReading(pattern, values[:m], later["z"], later["z_bias"], later["gate"], factor)


def visit_heads(
    model: Any, layers: list[list[Part]], tokens: Int[Tensor, "batch pos"], visit: Callable[[int, HeadsRead], None]
) -> None:
    """See :meth:`kvlens.KVModel.visit_heads`."""
    seen: Seen = {}
    read: dict[Part, HeadsRead] = {}

    def show(part: Part, parts: list[Part]) -> None:
        of = _of(seen, part)
        for name in of:
            del seen[part, name]
        values = of["v"].repeat_interleave(part.n_heads // of["v"].shape[2], dim=2)
        read[part] = HeadsRead(of["pattern"], values, of["z"], of.get("gate"))
        if all(each in read for each in parts):
            patterns, of_values, of_z, gates = zip(*(read.pop(each) for each in parts), strict=True)
            gate = _joined_factors(parts, gates)
            visit(part.layer, HeadsRead(joined_heads(patterns, dim=-3), joined_heads(of_values), joined_heads(of_z), gate))

    batch, n = tokens.shape
    nothing = torch.zeros(batch, n, 0, 1, device=tokens.device)
    no_heads = HeadsRead(torch.zeros(batch, 0, n, n, device=tokens.device), nothing, nothing, None)
    with ExitStack() as stack:
        for parts in layers:
            for part in parts:
                if not part.n_heads:
                    handle = part.component.register_forward_hook(lambda *_, part=part: visit(part.layer, no_heads))
                    stack.callback(handle.remove)
                    continue
                points = part.attention_points()
                for name, (point, form) in points.items():
                    if name != "z_bias":
                        stack.enter_context(_hook(point, seen, (part, name), form=form))
                handle = points["z"][0].register_forward_hook(lambda *_, part=part, parts=parts: show(part, parts))
                stack.callback(handle.remove)
        model.logits_on(tokens, 1)


def direct_path(
    model: Any, layers: list[list[Part]], text: Int[Tensor, "*batch pos"], run: Callable[[], Any] | None
) -> DirectPath:
    """See :meth:`kvlens.KVModel.direct_path`."""
    seen: Seen = {}
    with ExitStack() as stack:
        _watch_summands(stack, model, layers, seen)
        model.logits_on(text if text.dim() == 2 else text[None], 1) if run is None else run()
    for parts in layers:
        _check_direct(model, parts, seen)
    factors = [_joined_factors(parts, [_factor(_of(seen, part), part) for part in parts]) for parts in layers]
    scale = _scale(model, seen[-1, "x"].double())
    if text.dim() == 1:
        scale, factors = scale[0], [None if factor is None else factor[0] for factor in factors]
    return DirectPath(scale, factors, [None] * len(layers))


def read_stream(model: Any, layers: list[list[Part]], text: Int[Tensor, " pos"], n_last: int) -> StreamReading:
    """See :meth:`kvlens.KVModel.read_stream`."""
    seen: Seen = {}
    without = sum(not any(part.n_heads for part in parts) for parts in layers)
    if without:
        raise IndirectHeads(
            f"{model.cfg.architecture}: {without} of {len(layers)} layers have no heads, so what "
            "enters the residual stream is not a sum over heads and MLPs; this needs a model whose layers all have heads"
        )
    with ExitStack() as stack:
        _watch_summands(stack, model, layers, seen)
        for part in _with_heads(layers):
            points = part.component if isinstance(part, SoftmaxLayer) else part.mixer
            for name in ("z_context", "z_bias"):
                stack.enter_context(_hook(getattr(points, f"hook_{name}"), seen, (part, name)))
            z, form = part.attention_points()["z"]
            stack.enter_context(_hook(z, seen, (part, "z"), form=form))
        added = getattr(model, "pos_embed", None)
        if added is not None:
            stack.enter_context(_hook(added, seen, (-1, "pos_embed")))
        model.logits_on(text[None], 1)
    found = []
    for layer, parts in enumerate(layers):
        _check_direct(model, parts, seen)
        mlp = seen.get((layer, "mlp"))
        summands = [_summands(seen, part, n_last) for part in parts if not isinstance(part, TokenwiseLayer)]
        z_context, z_bias, factor, biases = zip(*summands, strict=True)
        given = [bias for bias in biases if bias is not None]
        found.append(
            LayerSummands(
                joined_heads(z_context),
                _joined(z_bias),
                _joined_factors(parts, factor),
                torch.stack(given).sum(dim=0) if given else None,
                None if mlp is None else mlp[0, -n_last:],
            )
        )
    embed, residual = seen[0, "in"][0], seen[-1, "x"]
    embeddings = {"embed": embed}
    if (-1, "pos_embed") in seen:
        positions = seen[-1, "pos_embed"][-1]
        embeddings = {"embed": embed - positions, "pos_embed": positions}
    scale = _scale(model, residual.double())[0, -n_last:]
    return StreamReading({name: x[-n_last:] for name, x in embeddings.items()}, found, residual[0, -n_last:], scale)


def _summands(
    seen: Seen, part: SoftmaxLayer | RecurrentLayer, n_last: int
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """z of the context, z of the bias, the factor behind them, and the bias of the output projection."""
    of = _of(seen, part)
    parts = [of.get("z_context", of["z"]), of.get("z_bias"), _factor(of, part)]
    z_context, z_bias, factor = (None if x is None else x[0, -n_last:] for x in parts)
    assert z_context is not None
    return z_context, z_bias, factor, getattr(part.output, "bias", None)


def _with_heads(layers: list[list[Part]]) -> list[SoftmaxLayer | RecurrentLayer]:
    return [part for parts in layers for part in parts if not isinstance(part, TokenwiseLayer) and part.n_heads]


def _joined(of_parts: Sequence[Tensor | None]) -> Tensor | None:
    """What the parts of a layer have, [..., head, d], as that of all its heads; either all or none have it."""
    given = [x for x in of_parts if x is not None]
    return joined_heads(given) if given else None


def _joined_factors(parts: Sequence[Part], factors: Sequence[Tensor | None]) -> Tensor | None:
    """Likewise what multiplies the heads' outputs: 1 at heads of a part without a factor; None where no part has one."""
    given = next((factor for factor in factors if factor is not None), None)
    if given is None:
        return None
    one = torch.ones_like(given[..., :1, :1])
    sizes = [part.output_weights().shape[:2] for part in parts]
    return joined_heads(
        [one.expand(*given.shape[:-2], *size) if x is None else x for x, size in zip(factors, sizes, strict=True)]
    )


def _watch_summands(stack: ExitStack, model: Any, layers: list[list[Part]], seen: Seen) -> None:
    """Inside, what each block reads and adds is put into ``seen``, and what enters the final norm."""
    for layer, parts in enumerate(layers):
        block = model.blocks[layer]
        for name, module in (("mlp", getattr(block, "mlp", None)), ("block", block)):
            if module is not None:
                stack.enter_context(_hook(module, seen, (layer, name)))
        stack.enter_context(_hook(block, seen, (layer, "in"), before=True))
        for part in parts:
            stack.enter_context(_hook(part.component, seen, (part, "out")))
            if _has_states(part):
                stack.enter_context(_hook(part.mixer.hook_z, seen, (part, "z")))
                _watch_factor(stack, seen, part)
    stack.enter_context(_hook(model.ln_final, seen, (-1, "x"), before=True))


def _has_states(part: Part) -> TypeGuard[RecurrentLayer]:
    """Whether a norm and a gate stand behind the heads: those of states."""
    return isinstance(part, RecurrentLayer) and part.n_heads > 0


def _of(seen: Seen, part: Part) -> dict[str, Tensor]:
    return {name: x for (key, name), x in seen.items() if key is part}


def _check_direct(model: Any, parts: list[Part], seen: Seen) -> None:
    """Raise IndirectHeads unless a block adds the outputs of its attention and its MLP to the residual stream, no more.

    Rounding the stream to its dtype may change it as much as a layer does, but has nothing to do with what the layer adds: the
    coefficients of the outputs in the change are 1, within the noise that rounding has in them.
    """
    layer = parts[0].layer
    before, after = (seen[layer, name].double().flatten() for name in ("in", "block"))
    outputs = [seen[part, "out"] for part in parts] + ([seen[layer, "mlp"]] if (layer, "mlp") in seen else [])
    added = torch.stack([x.double().flatten() for x in outputs if bool(x.any())] or [torch.zeros_like(before)])
    change = after - before
    left = change - added.sum(dim=0)
    rounding = torch.finfo(seen[layer, "block"].dtype).eps * after.norm()
    inverse = torch.linalg.pinv(added @ added.T, hermitian=True)
    factors = inverse @ (added @ left)
    noise = inverse.diagonal().sqrt() * rounding / len(after) ** 0.5
    if float(left.norm()) > DIRECT * float(change.norm()) + float(rounding) or bool((factors.abs() > DIRECT + 4 * noise).any()):
        raise IndirectHeads(
            f"{model.cfg.architecture}: what layer {layer} adds to the residual stream is not the sum of its attention "
            "and its MLP (a norm or a factor stands behind them), so that no head has a logit of its own; direct logit "
            "attribution needs heads that write to it directly"
        )


def _watch_factor(stack: ExitStack, seen: Seen, part: Part) -> None:
    """Inside, what enters a recurrent layer's output projection is put into ``seen``."""
    if _has_states(part):
        stack.enter_context(_hook(part.output, seen, (part, "normed"), before=True))


def _factor(of: dict[str, Tensor], part: Part) -> Float[Tensor, "*batch pos head d_v"] | None:
    """What the norm and the gate of a recurrent layer multiply z by, both as they are in this pass."""
    if not _has_states(part):
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
        key: tuple[Part | int, str],
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

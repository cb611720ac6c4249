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
from kvlens.errors import KVLensError
from kvlens.model.protocol import DirectPath, LayerReading, Unembedding

Layer = SoftmaxLayer | RecurrentLayer | TokenwiseLayer
PROBE = 1e3
"""Size of the vectors that a norm is tried with: against it, what it adds to the variance is below float64's rounding."""
DIRECT = 1e-2
"""Share of a layer's change of the residual stream that may be left unexplained by attention and MLP, in half precision too."""


def read_attention(
    model: Any, layers: list[Layer], prompt: Int[Tensor, " prompt"], text: Int[Tensor, " text"]
) -> list[LayerReading]:
    """See :meth:`kvlens.model.protocol.ReadsPrompts.read_attention`."""
    seen: dict[tuple[int, str], Tensor] = {}
    m = len(prompt)
    with _watched(layers, seen):
        model.logits_on(torch.cat([prompt, text])[None], 1)
    found = []
    for layer in layers:
        of = {name: x for (number, name), x in seen.items() if number == layer.layer}
        if not of:
            no_heads = torch.zeros(m + len(text), 0, 1, dtype=torch.float64, device=prompt.device)
            found.append(LayerReading(no_heads[m:].expand(-1, -1, m), no_heads[:m], no_heads[m:], None, None))
            continue
        values = of["v"].repeat_interleave(layer.n_heads // of["v"].shape[1], dim=1)
        later = {name: of[name][m:] if name in of else None for name in ("z", "z_bias", "gate")}
        assert later["z"] is not None
        pattern = of["pattern"][:, m:, :m].transpose(0, 1)
        found.append(LayerReading(pattern, values[:m], later["z"], later["z_bias"], later["gate"]))
    return found


def direct_path(model: Any, layers: list[Layer], text: Int[Tensor, " pos"]) -> DirectPath:
    """See :meth:`kvlens.KVModel.direct_path`."""
    seen: dict[tuple[int, str], Tensor] = {}
    with ExitStack() as stack:
        for layer in layers:
            block = model.blocks[layer.layer]
            for name, module in (("attn", layer.component), ("mlp", getattr(block, "mlp", None)), ("block", block)):
                if module is not None:
                    stack.enter_context(_hook(module, seen, (layer.layer, name), before=False))
            stack.enter_context(_hook(block, seen, (layer.layer, "in"), before=True))
            if _has_states(layer):
                stack.enter_context(_hook(layer.output, seen, (layer.layer, "normed"), before=True))
                stack.enter_context(_hook(layer.mixer.hook_z, seen, (layer.layer, "z"), before=False))
        stack.enter_context(_hook(model.ln_final, seen, (-1, "x"), before=True))
        model.logits_on(text[None], len(text))
    for layer in layers:
        _check_direct(model, layer, seen)
    factors = [_factor(seen, layer) if _has_states(layer) else None for layer in layers]
    return DirectPath(_scale(model, seen[-1, "x"]), factors)


def _has_states(layer: Layer) -> TypeGuard[RecurrentLayer]:
    """Whether a norm and a gate stand behind a layer's heads: those of states."""
    return isinstance(layer, RecurrentLayer) and layer.n_heads > 0


def _check_direct(model: Any, layer: Layer, seen: dict[tuple[int, str], Tensor]) -> None:
    """Raise KVLensError unless a block adds what its attention and its MLP give to the residual stream, and nothing else."""
    of = {name: x for (number, name), x in seen.items() if number == layer.layer}
    change = of["block"] - of["in"]
    left = change - of["attn"] - of.get("mlp", 0.0)
    if float(left.norm()) > DIRECT * float(change.norm()):
        raise KVLensError(
            f"{model.cfg.architecture}: what layer {layer.layer} adds to the residual stream is not the sum of its attention "
            "and its MLP (a norm or a factor stands behind them), so that no head has a logit of its own; direct logit "
            "attribution needs heads that write to it directly"
        )


def _factor(seen: dict[tuple[int, str], Tensor], layer: RecurrentLayer) -> Float[Tensor, "pos head d_v"]:
    """What the norm and the gate multiply z by, both as they are in this pass."""
    z = seen[layer.layer, "z"]
    factor = seen[layer.layer, "normed"].reshape(z.shape) / z.where(z != 0, 1.0)
    return factor.where(z != 0, 0.0)


def unembedding(model: Any) -> Unembedding:
    """See :meth:`kvlens.KVModel.unembedding`; the norm's weights are measured: families write them in ways of their own."""
    norm = _norm(model)
    d_model = model.cfg.d_model
    sign = torch.ones(d_model, dtype=torch.float64)
    sign[1::2] = -1
    sign = sign - sign.mean()  # an odd number of dimensions leaves a mean
    there, back, raised = (norm(PROBE * x) for x in (sign, -sign, sign + 1))
    size = sign.square().mean().sqrt()
    weight, bias = (there - back) / 2 * size / sign, (there + back) / 2
    centers = bool(torch.allclose(raised, there, rtol=1e-3, atol=1e-3 * float(there.abs().max())))
    b_u = getattr(model, "b_U", None)
    w_u = model.W_U
    b_u = torch.zeros(w_u.shape[1], device=w_u.device) if b_u is None else b_u
    return Unembedding(w_u, b_u, weight.to(w_u), bias.to(w_u) if float(bias.abs().max()) > 1e-6 else None, centers)


def _norm(model: Any) -> Callable[[Tensor], Tensor]:
    """The final norm on one vector, without hooks."""
    module = model.ln_final.original_component
    weights = next(module.parameters(), model.W_U)

    def apply(x: Tensor) -> Tensor:
        result: Tensor = module(x.to(weights)[None, None])[0, 0]
        return result.double().cpu()

    return apply


def _scale(model: Any, x: Float[Tensor, "pos d_model"]) -> Float[Tensor, "pos 1"]:
    """s, from what the final norm makes of x."""
    norm = unembedding(model)
    centered = x - x.mean(dim=-1, keepdim=True) if norm.centers else x
    module = model.ln_final.original_component
    weights = next(module.parameters(), model.W_U)
    y = module(x.to(weights)[None])[0].double()
    y = y if norm.norm_bias is None else y - norm.norm_bias.double()
    weight = torch.ones_like(x[0]) if norm.norm_weight is None else norm.norm_weight.double()
    return (centered * weight).norm(dim=-1, keepdim=True) / y.norm(dim=-1, keepdim=True)


class _watched(ExitStack):
    """Inside, a pass puts each layer's pattern, v, z, and where there are such z of the bias and gate into ``seen``."""

    def __init__(self, layers: list[Layer], seen: dict[tuple[int, str], Tensor]):
        super().__init__()
        for layer in layers:
            for name, (point, form) in layer.attention_points().items():
                self.enter_context(_hook(point, seen, (layer.layer, name), before=False, form=form))


class _hook:
    """Inside, what goes into or comes out of a module is put into ``seen``: the first of a batch, in float64."""

    def __init__(
        self,
        module: nn.Module,
        seen: dict[tuple[int, str], Tensor],
        key: tuple[int, str],
        *,
        before: bool,
        form: Callable[[Tensor], Tensor] | None = None,
    ):
        self.module, self.seen, self.key, self.before, self.form = module, seen, key, before, form

    def _see(self, x: Any) -> None:
        x = x[0] if isinstance(x, tuple) else x
        x = x if self.form is None else self.form(x)
        self.seen[self.key] = x[0].detach().double()

    def __enter__(self) -> None:
        if self.before:
            self.handle = self.module.register_forward_pre_hook(
                lambda module, args, kwargs: self._see(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            )
        else:
            self.handle = self.module.register_forward_hook(lambda module, args, output: self._see(output))

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()

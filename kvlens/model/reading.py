"""What heads read in a pass, and what lies between them and the logits: written once, for both front ends.

A layer has *parts*: its attention, a recurrent state, or in Falcon-H1 both. A :class:`Part` knows its hook points, its heads
and its output weights. :class:`ReadsHeads` reads the parts of all layers in one pass and joins those of a layer.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvlens.errors import IndirectHeads
from kvlens.model.protocol import (
    DirectPath,
    FrozenNorm,
    HeadMatrices,
    HeadsRead,
    LayerReading,
    LayerSummands,
    StreamReading,
    Unembedding,
    joined_heads,
)

Form = Callable[[Tensor], Tensor] | None
"""What makes [batch, pos, head, d] of what passes a hook point; None where it has this form."""
DIRECT = 1e-2
"""Share of a layer's change of the residual stream that may be left unexplained by attention and MLP, beyond rounding."""


class Part:
    """What reads other tokens in a layer; of a layer that is an MLP or experts alone, a part without heads.

    Attributes:
        layer: the layer's number.
        name: what stands before the names of its hook points, behind the block's.
        component: what it adds to the residual stream comes out of here.
        behind: the norm between its output projection and the residual stream; None without one, or if it is not modeled.
    """

    layer: int
    name: str = "attn"
    component: Any
    behind: Any = None

    @property
    def n_heads(self) -> int:
        """Query heads, or value heads of a state."""
        return 0

    @property
    def normed(self) -> nn.Module | None:
        """The output projection, where a norm and a gate stand between it and the heads; otherwise None."""
        return None

    @property
    def output_bias(self) -> Float[Tensor, " d_model"] | None:
        """b_O."""
        return None

    def attention_points(self) -> dict[str, tuple[nn.Module, Form]]:
        """Where to look, and in which form: pattern, v (before a shift), z, z_context, z_bias and, where there is one, gate."""
        return {}

    def output_weights(self) -> Float[Tensor, "head d_head d_model"]:
        """W_O of each head."""
        raise NotImplementedError

    def matrices(self) -> HeadMatrices | None:
        """The weights by query head; None where heads are not linear maps of the residual stream."""
        return None


class BlockPoints(NamedTuple):
    """Hook points that show the residual stream before and after a layer, and what its MLP adds (None without one)."""

    before: nn.Module
    mlp: nn.Module | None
    after: nn.Module


class LinearNorm(NamedTuple):
    """A norm up to its scale: x -> (x - mean(x)) * gain; ``gain`` is 1 if it has been folded."""

    gain: Tensor | float
    centers: bool


Seen = dict[tuple[Any, str], Tensor]
"""What passed certain points: (part of a layer, or the layer's number, name) -> [batch, ...]."""


class ReadsHeads:
    """The part of :class:`kvlens.KVModel` that is about heads. A model says where its parts, norms and hook points are."""

    cfg: Any

    # --- what a front end says ---------------------------------------------------------------------------------------------

    def parts(self) -> Sequence[Sequence[Part]]:
        """The parts of each layer; where there are two, attention comes first."""
        raise NotImplementedError

    def unembedding(self) -> Unembedding:
        """See :meth:`kvlens.KVModel.unembedding`."""
        raise NotImplementedError

    def _block_points(self, layer: int) -> BlockPoints:
        raise NotImplementedError

    def _norms_around(self, layer: int) -> tuple[LinearNorm | None, LinearNorm | None]:
        """The norms that a layer's heads read and write through."""
        raise NotImplementedError

    def _added_positions(self) -> nn.Module | None:
        """Shows the positional embedding that is added to the tokens'; None without one."""
        raise NotImplementedError

    def _final_scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
        """s of the final norm, for a residual stream in float64; 1 without one."""
        raise NotImplementedError

    def _look(self, tokens: Int[Tensor, "batch pos"]) -> None:
        """A pass for what its hooks see, over every token, also one with the number of a pad token."""
        raise NotImplementedError

    @property
    def _family(self) -> str:
        return getattr(self.cfg, "architecture", None) or "this model"

    # --- what follows ------------------------------------------------------------------------------------------------------

    @property
    def heads_per_layer(self) -> list[int]:
        """Query heads of each layer; of a recurrent layer value heads, and where a layer has both, query heads come first."""
        return [sum(part.n_heads for part in parts) for parts in self.parts()]

    def head_hooks(self, layer: int, name: str) -> dict[str, int]:
        """See :meth:`kvlens.KVModel.head_hooks`."""
        return {f"blocks.{layer}.{part.name}.{name}": part.n_heads for part in self.parts()[layer] if part.n_heads}

    def output_weights(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """W_O of each head of a layer; in a recurrent layer a norm and a gate stand before it (:meth:`direct_path`)."""
        return joined_heads([part.output_weights() for part in self.parts()[layer]], dim=-3)

    @torch.no_grad()
    def head_matrices(self) -> list[HeadMatrices | None]:
        """See :meth:`kvlens.KVModel.head_matrices`: None for recurrent layers, and for gated or latent attention."""
        layers = self.parts()
        norms = [self._norms_around(layer) for layer in range(len(layers))]
        all_centered = self.unembedding().centers and all(norm is not None and norm.centers for norm, _ in norms)
        found: list[HeadMatrices | None] = []
        for parts, (before, behind) in zip(layers, norms, strict=True):
            raw = parts[0].matrices() if len(parts) == 1 else None
            found.append(None if raw is None else _folded(raw, before, behind, all_centered))
        return found

    def visit_heads(self, tokens: Int[Tensor, "batch pos"], visit: Callable[[int, HeadsRead], None]) -> None:
        """See :meth:`kvlens.KVModel.visit_heads`."""
        seen: Seen = {}
        read: dict[Part, HeadsRead] = {}

        def show(part: Part, parts: Sequence[Part]) -> None:
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
            for parts in self.parts():
                for part in parts:
                    if not part.n_heads:
                        then, tell = part.component, partial(visit, part.layer, no_heads)
                    else:
                        _watch_points(stack, seen, part, "pattern", "v", "z", "gate")
                        then, tell = part.attention_points()["z"][0], partial(show, part, parts)
                    stack.callback(then.register_forward_hook(lambda *_, tell=tell: tell()).remove)
            self._look(tokens)

    @torch.no_grad()
    def direct_path(self, text: Int[Tensor, "*batch pos"], run: Callable[[], Any] | None = None) -> DirectPath:
        """See :meth:`kvlens.KVModel.direct_path`."""
        seen: Seen = {}
        layers, tokens = self.parts(), text if text.dim() == 2 else text[None]
        with ExitStack() as stack:
            self._watch_summands(stack, seen, layers)
            for parts in layers:
                if parts[0].behind is not None:
                    _watch(stack, seen, (parts[0], "scale"), parts[0].behind.hook_scale)
            self._look(tokens) if run is None else run()

        def of_text(x: Tensor | None) -> Any:
            return x if x is None or text.dim() == 2 else x[0]

        factors, behind = [], []
        for parts in layers:
            self._check_direct(parts, seen)
            factors.append(of_text(_joined_factors(parts, [_factor(seen, part) for part in parts])))
            norm, scale = parts[0].behind, seen.get((parts[0], "scale"))
            held = None if scale is None else of_text(scale).double().to(text.device)
            behind.append(None if held is None else FrozenNorm(held, getattr(norm, "w", 1.0), getattr(norm, "centers", False)))
        return DirectPath(of_text(self._final_scale(seen[len(layers), "x"].double())).to(text.device), factors, behind)

    @torch.no_grad()
    def read_stream(self, text: Int[Tensor, " pos"], n_last: int) -> StreamReading:
        """See :meth:`kvlens.KVModel.read_stream`."""
        seen: Seen = {}
        layers = self.parts()
        without = sum(not any(part.n_heads for part in parts) for parts in layers)
        if without:
            raise IndirectHeads(
                f"{self._family}: {without} of {len(layers)} layers have no heads, so what "
                "enters the residual stream is not a sum over heads and MLPs; this needs a model whose layers all have heads"
            )
        positions = self._added_positions()
        with ExitStack() as stack:
            self._watch_summands(stack, seen, layers)
            for part in (part for parts in layers for part in parts):
                _watch_points(stack, seen, part, "z", "z_context", "z_bias")
            if positions is not None:
                _watch(stack, seen, (0, "pos_embed"), positions)
            self._look(text[None])
        found = []
        for layer, parts in enumerate(layers):
            self._check_direct(parts, seen)
            z_context, z_bias, factor = zip(*(_summands(seen, part, n_last) for part in parts), strict=True)
            biases = [part.output_bias for part in parts if part.output_bias is not None]
            mlp = seen.get((layer, "mlp"))
            found.append(
                LayerSummands(
                    joined_heads(z_context),
                    _joined(z_bias),
                    _joined_factors(parts, factor),
                    torch.stack(biases).sum(dim=0) if biases else None,
                    None if mlp is None else mlp[0, -n_last:],
                )
            )
        embeddings, residual = {"embed": seen[0, "x"][0]}, seen[len(layers), "x"][0, -n_last:]
        if positions is not None:
            added = seen[0, "pos_embed"][-1]
            embeddings = {"embed": embeddings["embed"] - added, "pos_embed": added}
        embeddings = {name: x[-n_last:] for name, x in embeddings.items()}
        return StreamReading(embeddings, found, residual, self._final_scale(residual.double()))

    @torch.no_grad()
    def read_attention(self, prompt: Int[Tensor, " prompt"], text: Int[Tensor, " text"]) -> list[LayerReading] | None:
        """What each layer's text reads of a prompt, position by position, in one pass over both."""
        seen: Seen = {}
        m, layers = len(prompt), [[part for part in parts if part.n_heads] for parts in self.parts()]
        with ExitStack() as stack:
            for part in (part for parts in layers for part in parts):
                _watch_points(stack, seen, part, "pattern", "v", "z", "z_bias", "gate")
                _watch_factor(stack, seen, part)
            self._look(torch.cat([prompt, text])[None])
        no_heads = torch.zeros(m + len(text), 0, 1, dtype=torch.float64, device=prompt.device)
        none = LayerReading(no_heads[m:].expand(-1, -1, m), no_heads[:m], no_heads[m:], None, None, None)
        return [_of_prompt(seen, parts, m) if parts else none for parts in layers]

    def _watch_summands(self, stack: ExitStack, seen: Seen, layers: Sequence[Sequence[Part]]) -> None:
        """Inside, the residual stream around each layer, and what its parts and its MLP add, is put into ``seen``."""
        for layer, parts in enumerate(layers):
            points = self._block_points(layer)
            _watch(stack, seen, (layer, "x"), points.before)
            _watch(stack, seen, (layer + 1, "x"), points.after)
            if points.mlp is not None:
                _watch(stack, seen, (layer, "mlp"), points.mlp)
            for part in parts:
                _watch(stack, seen, (part, "out"), part.component)
                if part.normed is not None:
                    _watch_points(stack, seen, part, "z")
                _watch_factor(stack, seen, part)

    def _check_direct(self, parts: Sequence[Part], seen: Seen) -> None:
        """Raise IndirectHeads unless a block adds the outputs of its attention and its MLP to the residual stream, no more.

        Rounding the stream to its dtype may change it as much as a layer does, but has nothing to do with what the layer adds:
        the coefficients of the outputs in the change are 1, within the noise that rounding has in them.
        """
        layer = parts[0].layer
        before, after = (seen[at, "x"].double().flatten() for at in (layer, layer + 1))
        outputs = [seen[part, "out"] for part in parts] + ([seen[layer, "mlp"]] if (layer, "mlp") in seen else [])
        added = torch.stack([x.double().flatten() for x in outputs if bool(x.any())] or [torch.zeros_like(before)])
        change = after - before
        left = change - added.sum(dim=0)
        rounding = torch.finfo(seen[layer + 1, "x"].dtype).eps * after.norm()
        inverse = torch.linalg.pinv(added @ added.T, hermitian=True)
        factors = inverse @ (added @ left)
        noise = inverse.diagonal().sqrt() * rounding / len(after) ** 0.5
        too_large = bool((factors.abs() > DIRECT + 4 * noise).any())
        if float(left.norm()) > DIRECT * float(change.norm()) + float(rounding) or too_large:
            raise IndirectHeads(
                f"{self._family}: what layer {layer} adds to the residual stream is not the sum of its attention and its MLP "
                "(a norm, a factor or a hook stands behind them), so that no head has a logit of its own; direct logit "
                "attribution needs heads that write to it directly"
            )


def _of_prompt(seen: Seen, parts: Sequence[Part], m: int) -> LayerReading:
    """What the text reads in one layer, where the prompt has ``m`` tokens."""
    readings = []
    for part in parts:
        of = {name: x[0].double() for name, x in _of(seen, part).items()}
        values = of["v"].repeat_interleave(part.n_heads // of["v"].shape[1], dim=1)[:m]
        pattern = of["pattern"][:, m:, :m].transpose(0, 1)
        factor = _factor(seen, part)
        gate, z_bias = (of[name][m:] if name in of else None for name in ("gate", "z_bias"))
        readings.append((pattern, values, of["z"][m:], z_bias, gate, None if factor is None else factor[0, m:]))
    patterns, of_values, z, z_biases, gates, factors = zip(*readings, strict=True)
    return LayerReading(
        joined_heads(patterns),
        joined_heads(of_values),
        joined_heads(z),
        _joined(z_biases),
        _joined_factors(parts, gates),
        _joined_factors(parts, factors),
    )


def _summands(seen: Seen, part: Part, n_last: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """z of the context, z of the bias, and the factor behind them, at the last positions."""
    of = _of(seen, part)
    z_bias, factor = (None if x is None else x[0, -n_last:] for x in (of.get("z_bias"), _factor(seen, part)))
    return of.get("z_context", of["z"])[0, -n_last:], z_bias, factor


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


def _factor(seen: Seen, part: Part) -> Float[Tensor, "batch pos head d_v"] | None:
    """What the norm and the gate of a recurrent layer multiply z by, both as they are in this pass."""
    if part.normed is None:
        return None
    z = seen[part, "z"].double()
    factor = seen[part, "normed"].double().reshape(z.shape) / z.where(z != 0, 1.0)
    return factor.where(z != 0, 0.0)


def _folded(raw: HeadMatrices, before: LinearNorm | None, behind: LinearNorm | None, all_centered: bool) -> HeadMatrices:
    """Fold the gains of the norms before and after the heads, and the subtraction of means, into their matrices.

    ``all_centered`` says whether every norm that reads the residual stream subtracts the mean.
    """
    dtype = torch.promote_types(raw.W_O.dtype, torch.float32)
    reading, writing = (1.0 if norm is None else norm.gain for norm in (before, behind))
    gain = reading[:, None] if isinstance(reading, Tensor) else reading
    W_Q, W_K, W_V = ((W * gain).to(dtype) for W in raw[:3])
    W_O = (raw.W_O * writing).to(dtype)
    if before is not None and before.centers:
        W_Q, W_K, W_V = (W - W.mean(dim=1, keepdim=True) for W in (W_Q, W_K, W_V))
    if all_centered:
        W_O = W_O - W_O.mean(dim=2, keepdim=True)
    return HeadMatrices(W_Q, W_K, W_V, W_O)


def _of(seen: Seen, part: Part) -> dict[str, Tensor]:
    return {name: x for (key, name), x in seen.items() if key is part}


def _watch(stack: ExitStack, seen: Seen, key: tuple[Any, str], module: nn.Module, form: Form = None) -> None:
    """Inside, what comes out of a module is put into ``seen``."""

    def see(module: nn.Module, args: Any, x: Any) -> None:
        x = x[0] if isinstance(x, tuple) else x
        seen[key] = (x if form is None else form(x)).detach()

    stack.callback(module.register_forward_hook(see).remove)


def _watch_points(stack: ExitStack, seen: Seen, part: Part, *names: str) -> None:
    """Inside, what passes the points of a part is put into ``seen``."""
    points = part.attention_points()
    for name in names:
        if name in points:
            _watch(stack, seen, (part, name), *points[name])


def _watch_factor(stack: ExitStack, seen: Seen, part: Part) -> None:
    """Inside, what enters a recurrent layer's output projection is put into ``seen``."""
    if part.normed is not None:
        see = part.normed.register_forward_pre_hook(lambda module, args: seen.__setitem__((part, "normed"), args[0].detach()))
        stack.callback(see.remove)

"""What the heads of a model read and write in a pass, layer by layer; a model only says where to look.

A layer reads other tokens in its *parts* (:mod:`kvlens.model.protocol`): attention, a recurrent state, or in Falcon-H1 both. A
pass shows each layer as one record, in which the heads of its parts stand next to each other.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvlens.errors import IndirectHeads
from kvlens.model.protocol import Form, HeadMatrices, KVModel, LinearNorm, Part, ScoredPart

DIRECT = 1e-2
"""Share of a layer's change of the residual stream that may be left unexplained by attention and MLP, beyond rounding."""
ATTENTION = ("pattern", "values", "z", "gate")
"""What :func:`visit_heads` shows of each layer, unless it is told otherwise."""
OF_TEXT = ("z", "z_bias", "gate", "factor")
"""What :func:`read_attention` shows of the text alone."""
UNSEEN: Any = None


class HeadsRead(NamedTuple):
    """What one layer does in a pass: it adds z * factor W_O + b_O + mlp to the residual stream, with

        z_i = gate_i * sum_j pattern_ij values_j + z_bias_i

    What was not asked for, and what a layer does not have, is None. With a KV shift, the values are those before the shift.

    Attributes:
        pattern: the attention pattern, which has no columns for a bias; for a recurrent layer the exact effective attention.
        values: of each query head.
        z: the heads' outputs, before the output projection (and, in a recurrent layer, before its norm and gate).
        z_context: the summand of z that comes from the text; z itself if no bias is read.
        z_bias: the one that comes from the bias; None without one.
        gate: what the heads' outputs are multiplied by before z is read; None without one.
        factor: what z is multiplied by before W_O, the norm and gate of a recurrent layer as they are in this pass, in float64;
            None without one.
        scale: what a norm between the heads and the residual stream divides by, in float64; None without one.
        mlp: output of the MLP; None without one.
    """

    pattern: Float[Tensor, "*batch head query key"] = UNSEEN
    values: Float[Tensor, "*batch pos head d_head"] = UNSEEN
    z: Float[Tensor, "*batch pos head d_head"] = UNSEEN
    z_context: Float[Tensor, "*batch pos head d_head"] = UNSEEN
    z_bias: Float[Tensor, "*batch pos head d_head"] | None = None
    gate: Float[Tensor, "*batch pos head d_head"] | None = None
    factor: Float[Tensor, "*batch pos head d_head"] | None = None
    scale: Float[Tensor, "*batch pos 1"] | None = None
    mlp: Float[Tensor, "*batch pos d_model"] | None = None


class StreamReading(NamedTuple):
    """The residual stream at some positions of one pass.

    Attributes:
        embeddings: ``embed`` and, where positions are added to the stream, ``pos_embed``.
        layers: what each layer does.
        residual: the stream after the last layer.
        scale: s of the final norm; 1 without one.
    """

    embeddings: dict[str, Float[Tensor, "*batch pos d_model"]]
    layers: list[HeadsRead]
    residual: Float[Tensor, "*batch pos d_model"]
    scale: Float[Tensor, "*batch pos 1"]


Visit = Callable[[int, HeadsRead], None]


def heads_per_layer(model: KVModel) -> list[int]:
    """Query heads of each layer; of a recurrent layer value heads, and where a layer has both, query heads come first."""
    return [sum(part.n_heads for part in layer.parts) for layer in model.layers()]


def attention_parts(model: KVModel) -> list[ScoredPart]:
    """What scores keys in each layer with softmax attention: its ``score_rule()``, ``sinks`` and ``output_weights()``."""
    return [part for layer in model.layers() for part in layer.parts if isinstance(part, ScoredPart)]


def recurrent_layers(model: KVModel) -> tuple[int, ...]:
    """The layers that keep a state (:class:`kvlens.kv_bias.Recurrence`), in Falcon-H1 next to keys."""
    return tuple(part.layer for layer in model.layers() for part in layer.parts if part.keeps_state)


def head_hooks(model: KVModel, layer: int, name: str) -> dict[str, int]:
    """The hook points ``hook_z``, ``hook_z_bias`` or ``hook_z_context`` of a layer: full name -> number of heads there.

    In the order of heads; empty for a layer without heads.
    """
    return {f"blocks.{layer}.{part.name}.{name}": part.n_heads for part in model.layers()[layer].parts if part.n_heads}


def output_weights(model: KVModel, layer: int) -> Float[Tensor, "head d_head d_model"]:
    """W_O of each head of a layer; in a recurrent layer a norm and a gate stand before it (``HeadsRead.factor``).

    Raises:
        KVLensError: the heads of this family have no such matrix.
    """
    return joined_heads([part.output_weights() for part in model.layers()[layer].parts], dim=-3)


@torch.no_grad()
def head_matrices(model: KVModel) -> list[HeadMatrices | None]:
    """The matrices of each layer's heads, folded; None if queries, keys or values are not linear in the residual stream
    (recurrent layers, gated or latent attention), or the front end does not show their weights.

    Norms, rotations and shifts of queries and keys are left out.
    """
    layers = model.layers()
    norms = [layer.norms() for layer in layers]
    all_centered = model.ends().centers and all(norm is not None and norm.centers for norm, _ in norms)
    found: list[HeadMatrices | None] = []
    for layer, (before, behind) in zip(layers, norms, strict=True):
        raw = layer.parts[0].matrices() if len(layer.parts) == 1 else None
        found.append(None if raw is None else _folded(raw, before, behind, all_centered))
    return found


def visit_heads(model: KVModel, tokens: Int[Tensor, "batch pos"], visit: Visit, shown: Collection[str] = ATTENTION) -> None:
    """One pass over texts of equal length, behind what is attached: ``visit(layer, reading)`` as each layer has been computed.

    Every token is read, also one with the number of a pad token. Patterns of different layers are never kept together.

    Args:
        model: with whatever is attached to it.
        tokens: [batch, pos].
        visit: called layer by layer; a layer without heads has tensors of no head.
        shown: fields of the readings, from ``pattern`` to ``scale``.
    """
    _visit(model, tokens, visit, shown)


@torch.no_grad()
def read_attention(model: KVModel, prompt: Int[Tensor, " prompt"], text: Int[Tensor, " text"]) -> list[HeadsRead]:
    """What each layer's text reads of a prompt, position by position, from one pass over both, in float64.

    ``pattern`` is the attention from the text to the prompt, [head, text, prompt], and ``values`` are the prompt's. All else is
    the text's: z is everything that its heads read, z_bias what a bias that stands in front of the prompt gives to them.
    """
    found, shown = list[HeadsRead](), ("pattern", "values", *OF_TEXT)
    visit_heads(model, torch.cat([prompt, text])[None], _attention_of(found, len(prompt)), shown)
    return found


@torch.no_grad()
def read_attention_and_scale(
    model: KVModel, prompt: Int[Tensor, " prompt"], text: Int[Tensor, " text"]
) -> tuple[list[HeadsRead], Float[Tensor, "text 1"]]:
    """As :func:`read_attention`, and what the final norm divides by at the text's positions, from the same pass.

    Raises:
        IndirectHeads: as :func:`direct_path`.
    """
    found, kept = list[HeadsRead](), ("factor", "scale", "z_bias")
    stream = _read_stream(model, torch.cat([prompt, text]), len(text), kept, _attention_of(found, len(prompt)))
    return found, stream.scale


def _attention_of(found: list[HeadsRead], n_prompt: int) -> Visit:
    """What puts each layer's attention from the text to the prompt into ``found``."""
    m = n_prompt

    def keep(layer: int, read: HeadsRead) -> None:
        pattern, values = read.pattern[0, :, m:, :m].double(), read.values[0, :m].double()
        of_text = {name: x[0, m:].double() for name in OF_TEXT if (x := getattr(read, name)) is not None}
        found.append(HeadsRead(pattern, values, **of_text))

    return keep


@torch.no_grad()
def direct_path(model: KVModel, text: Int[Tensor, "*batch pos"], visit: Visit | None = None) -> StreamReading:
    """What lies between the heads and the logits in a pass over a text, behind what is attached: of each layer ``factor`` and
    ``scale``, and the ``scale`` of the final norm.

    Args:
        model: with whatever is attached to it.
        text: one text, or several of equal length.
        visit: as :func:`visit_heads` calls it, in the same pass.

    Raises:
        IndirectHeads: something else lies between a layer's heads and the residual stream; all layers have then been visited.
    """
    return _read_stream(model, text, text.shape[-1], ("factor", "scale"), visit)


@torch.no_grad()
def read_stream(model: KVModel, text: Int[Tensor, " pos"], n_last: int) -> StreamReading:
    """The summands of the residual stream at the last ``n_last`` positions of a text, behind what is attached.

    Raises:
        IndirectHeads: a layer adds something other than the outputs of heads and MLPs.
    """
    return _read_stream(model, text, n_last, ("z_context", "z_bias", "factor", "mlp"))


def _read_stream(
    model: KVModel, text: Int[Tensor, "*batch pos"], n_last: int, kept: Sequence[str], visit: Visit | None = None
) -> StreamReading:
    ends, layers, seen = model.ends(), list[HeadsRead](), dict[str, Tensor]()

    def cut(x: Tensor) -> Tensor:
        x = x[:, -n_last:].to(text.device)
        return x if text.dim() == 2 else x[0]

    def keep(layer: int, read: HeadsRead) -> None:
        layers.append(HeadsRead(**{name: cut(x) for name in kept if (x := getattr(read, name)) is not None}))
        if visit is not None:
            visit(layer, read)

    with ExitStack() as stack:
        _watch(stack, seen, "embed", ends.before)
        if ends.positions is not None:
            _watch(stack, seen, "pos_embed", ends.positions)
        shown = kept if visit is None else (*kept, *ATTENTION)
        residual = _visit(model, text if text.dim() == 2 else text[None], keep, shown, ends.before)[:, -n_last:]
    embeddings = {"embed": seen["embed"]}
    if ends.positions is not None:
        added = seen["pos_embed"][-1:]
        embeddings = {"embed": seen["embed"] - added, "pos_embed": added}
    embeddings, scale = {name: cut(x) for name, x in embeddings.items()}, cut(ends.scale(residual.double()))
    return StreamReading(embeddings, layers, cut(residual), scale)


def _visit(
    model: KVModel, tokens: Int[Tensor, "batch pos"], visit: Visit, shown: Collection[str], before: nn.Module | None = None
) -> Float[Tensor, "batch pos d_model"]:
    """See :func:`visit_heads`; returns the residual stream after the last layer.

    With the point ``before`` the first layer, readings show ``mlp`` too, and after the pass IndirectHeads is raised unless each
    layer has added the outputs of its parts and of its MLP to the stream, and no more.
    """
    stream, indirect, has_bias = dict[str, Tensor](), list[int](), model.attached_kv_bias is not None

    def end(layer: int, parts: Sequence[Part], seen: list[dict[str, Tensor]], other: dict[str, Tensor]) -> None:
        if "mlp" in other:
            other["mlp"] = other["mlp"].reshape(other["x"].shape)  # OPT's MLP reads all texts in one row
        if before is not None:
            outputs = [*(of["out"] for of in seen), *([other["mlp"]] if "mlp" in other else [])]
            indirect.extend([] if _adds_up(stream["x"], other["x"], outputs) else [layer])
        visit(layer, _reading(parts, seen, other, has_bias))
        stream["x"] = other["x"]
        for of in (*seen, other):
            of.clear()

    with ExitStack() as stack:
        if before is not None:
            _watch(stack, stream, "x", before)
        for number, layer in enumerate(model.layers()):
            other, seen = dict[str, Tensor](), [dict[str, Tensor]() for _ in layer.parts]
            for part, of in zip(layer.parts, seen, strict=True):
                for name, point in part.attention_points().items():
                    if name in shown or name == "z":
                        _watch(stack, of, name, *point)
                if part.normed is not None and "factor" in shown:
                    see = part.normed.register_forward_pre_hook(lambda _, args, of=of: of.update(normed=args[0].detach()))
                    stack.callback(see.remove)
                if before is not None:
                    _watch(stack, of, "out", part.component)
            if layer.mlp is not None and before is not None:
                _watch(stack, other, "mlp", layer.mlp)
            if layer.scale is not None and "scale" in shown:
                _watch(stack, other, "scale", layer.scale)
            _watch(stack, other, "x", layer.after)
            tell = partial(end, number, layer.parts, seen, other)
            stack.callback(layer.after.register_forward_hook(lambda *_, tell=tell: tell()).remove)
        model(tokens, attention_mask=torch.ones_like(tokens), return_type=None)
    if indirect:
        raise IndirectHeads(
            f"{getattr(model.cfg, 'architecture', None) or 'this model'}: what layer {indirect[0]} adds to the residual stream "
            "is not the sum of its attention and its MLP (a norm, a factor or a hook stands behind them), so that no head has "
            "a logit of its own; direct logit attribution needs heads that write to it directly"
        )
    return stream["x"]


def _watch(stack: ExitStack, seen: dict[str, Tensor], name: str, module: nn.Module, form: Form = None) -> None:
    """Inside, what comes out of a module is put into ``seen``."""

    def see(module: nn.Module, args: object, x: Tensor | tuple[Tensor, ...]) -> None:
        x = x[0] if isinstance(x, tuple) else x
        seen[name] = (x if form is None else form(x)).detach()

    stack.callback(module.register_forward_hook(see).remove)


def _adds_up(
    before: Float[Tensor, "batch pos d"], after: Float[Tensor, "batch pos d"], outputs: Sequence[Float[Tensor, "batch pos d"]]
) -> bool:
    """Whether a layer adds its outputs to the residual stream, and no more.

    Rounding the stream to its dtype may change it as much as a layer does, but has nothing to do with what the layer adds: the
    coefficients of the outputs in the change are 1, within the noise that rounding has in them.
    """
    eps, (before, after) = torch.finfo(after.dtype).eps, (x.double().flatten() for x in (before.to(after.device), after))
    added = torch.stack([x.double().flatten() for x in outputs if bool(x.any())] or [torch.zeros_like(before)])
    change, rounding = after - before, eps * after.norm()
    left = change - added.sum(dim=0)
    inverse = torch.linalg.pinv(added @ added.T, hermitian=True)
    factors = inverse @ (added @ left)
    noise = inverse.diagonal().sqrt() * rounding / len(after) ** 0.5
    too_large = bool((factors.abs() > DIRECT + 4 * noise).any())
    return not (float(left.norm()) > DIRECT * float(change.norm()) + float(rounding) or too_large)


def _reading(parts: Sequence[Part], seen: Sequence[dict[str, Tensor]], other: dict[str, Tensor], has_bias: bool) -> HeadsRead:
    """What was seen of the parts of a layer, as that of all its heads."""
    for part, of in zip(parts, seen, strict=True):
        if "values" in of:
            of["values"] = of["values"].repeat_interleave(part.n_heads // of["values"].shape[2], dim=2)
        if not part.n_heads:
            batch, n, _ = other["x"].shape
            none = torch.zeros(batch, n, 0, 1, device=other["x"].device)
            of |= {"pattern": none[..., 0].new_zeros(batch, 0, n, n), "values": none, "z": none}
            of |= {"z_bias": none} if has_bias else {}
        of.setdefault("z_context", of["z"])
        if "normed" in of:
            z = of["z"].double()
            of["factor"] = (of["normed"].double().reshape(z.shape) / z.where(z != 0, 1.0)).where(z != 0, 0.0)
    found: dict[str, Any] = {}
    for name in ("pattern", "values", "z", "z_context", "z_bias"):
        given = [of[name] for of in seen if name in of]
        found[name] = joined_heads(given, dim=-3 if name == "pattern" else -2) if given else None
    for name in ("gate", "factor"):
        found[name] = _joined_factors(parts, [of.get(name) for of in seen])
    scale = None if "scale" not in other else other["scale"].double()
    return HeadsRead(**found, scale=scale, mlp=other.get("mlp"))


def _joined_factors(parts: Sequence[Part], factors: Sequence[Tensor | None]) -> Tensor | None:
    """What multiplies the outputs of a layer's heads: 1 at heads of a part without a factor; None where no part has one."""
    given = next((factor for factor in factors if factor is not None), None)
    if given is None:
        return None
    one = torch.ones_like(given[..., :1, :1])
    sizes = [part.output_weights().shape[:2] for part in parts]
    return joined_heads(
        [one.expand(*given.shape[:-2], *size) if x is None else x for x, size in zip(factors, sizes, strict=True)]
    )


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


def joined_heads(parts: Sequence[Float[Tensor, "..."]], dim: int = -2) -> Float[Tensor, "..."]:
    """The heads of a layer's parts, as `head_hooks` names them, in one tensor.

    Narrower vectors are padded with zeros, which add nothing to a product.

    Args:
        parts: equal in shape except along the axis of heads and the axis after it, which is padded.
        dim: the axis of heads, counted from the end; nothing is padded if it is the last.
    """
    if len(parts) == 1:
        return parts[0]
    if dim < -1:
        widest = max(part.shape[dim + 1] for part in parts)
        after = [0, 0] * (-dim - 2)
        parts = [torch.nn.functional.pad(part, (*after, 0, widest - part.shape[dim + 1])) for part in parts]
    return torch.cat(list(parts), dim=dim)

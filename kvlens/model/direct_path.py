"""What the heads of a HookedKVTransformer read, and what lies between them and the logits."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.model.protocol import DirectPath, FrozenNorm, HeadsRead, LayerSummands, StreamReading, Unembedding

FINAL_SCALE = "ln_final.hook_scale"
POSITIONS_ADDED = ("standard", "sinusoidal")
"""The kinds of positional embedding that are added to the residual stream; the others act inside the attention."""
NORM_BEHIND_ATTENTION = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""Architectures whose ``ln1`` comes after the attention, not before it."""


def unembedding_of(model: Any) -> Unembedding:
    """See :meth:`kvlens.KVModel.unembedding`.

    Whether the norm centers is asked of the module: ``cfg.final_rms`` still says RMSNorm where TransformerLens has folded it
    into a LayerNormPre.
    """
    norm = getattr(model, "ln_final", None)
    centers = getattr(norm, "centers", False)
    return Unembedding(model.W_U, model.b_U, getattr(norm, "w", None), getattr(norm, "b", None), centers)


def direct_path_of(model: Any, text: Int[Tensor, "*batch pos"], run: Callable[[], Any] | None) -> DirectPath:
    """See :meth:`kvlens.KVModel.direct_path`."""
    n_layers, tokens = model.cfg.n_layers, text if text.dim() == 2 else text[None]
    seen: dict[str, Tensor] = {}

    def see(scale: Tensor, hook: Any) -> None:
        seen[hook.name] = (scale if text.dim() == 2 else scale[0]).double().to(text.device)

    norms = [norm_behind(model, layer) for layer in range(n_layers)]
    names = [f"{norm}.hook_scale" for norm in norms if norm is not None]
    names += [] if model.cfg.normalization_type is None else [FINAL_SCALE]
    with model.hooks(fwd_hooks=[(name, see) for name in names]):
        model.logits_on(tokens, tokens.shape[1]) if run is None else run()
    one = torch.ones(*text.shape, 1, dtype=torch.float64, device=text.device)
    behind = [None if norm is None else _frozen(model.get_submodule(norm), seen[f"{norm}.hook_scale"]) for norm in norms]
    return DirectPath(seen.get(FINAL_SCALE, one), [None] * n_layers, behind)


def norm_behind(model: Any, layer: int) -> str | None:
    """The name of the norm between a layer's heads and the residual stream, None for nearly all models."""
    if model.cfg.original_architecture in NORM_BEHIND_ATTENTION:
        return f"blocks.{layer}.ln1"
    return f"blocks.{layer}.ln1_post" if model.cfg.use_normalization_before_and_after else None


def _frozen(norm: Any, scale: Tensor) -> FrozenNorm:
    return FrozenNorm(scale, getattr(norm, "w", 1.0), getattr(norm, "centers", False))


def visit_heads(model: Any, tokens: Int[Tensor, "batch pos"], visit: Callable[[int, HeadsRead], None]) -> None:
    """See :meth:`kvlens.KVModel.visit_heads`."""
    held: dict[str, Tensor] = {}

    def hold(x: Tensor, hook: Any) -> None:
        held[hook.name.rsplit(".", 1)[-1]] = x

    def show(z: Tensor, hook: Any) -> None:
        v = held.pop("hook_v")
        v = v if model.cfg.clip_qkv is None else v.clamp(min=-model.cfg.clip_qkv, max=model.cfg.clip_qkv)
        values = v.repeat_interleave(z.shape[2] // v.shape[2], dim=2)
        visit(int(hook.name.split(".")[1]), HeadsRead(held.pop("hook_pattern"), values, z, None))

    hooks: list[Any] = [
        (f"blocks.{layer}.attn.{name}", show if name == "hook_z" else hold)
        for layer in range(model.cfg.n_layers)
        for name in ("hook_v", "hook_pattern", "hook_z")
    ]
    model.run_with_hooks(tokens, attention_mask=torch.ones_like(tokens), return_type=None, fwd_hooks=hooks)


def read_stream(model: Any, text: Int[Tensor, " pos"], n_last: int) -> StreamReading:
    """See :meth:`kvlens.KVModel.read_stream`."""
    cfg, layers = model.cfg, range(model.cfg.n_layers)
    last = f"blocks.{cfg.n_layers - 1}.hook_resid_post"
    positions = ["hook_pos_embed"] if cfg.positional_embedding_type in POSITIONS_ADDED else []
    names = ["hook_embed", *positions, last, *([] if cfg.normalization_type is None else [FINAL_SCALE])]
    names += [f"blocks.{layer}.attn.hook_{z}" for layer in layers for z in ("z", "z_context", "z_bias")]
    names += [] if cfg.attn_only else [f"blocks.{layer}.hook_mlp_out" for layer in layers]
    mask = torch.ones_like(text[None])
    _, cache = model.run_with_cache(text[None], attention_mask=mask, names_filter=names, return_type=None)
    seen = {name: value[0, -n_last:] for name, value in cache.items()}
    found = []
    for layer in layers:
        attn = f"blocks.{layer}.attn.hook_"
        z = seen.get(f"{attn}z_context", seen[f"{attn}z"])
        found.append(
            LayerSummands(
                z, seen.get(f"{attn}z_bias"), None, model.blocks[layer].attn.b_O, seen.get(f"blocks.{layer}.hook_mlp_out")
            )
        )
    embeddings = {name.removeprefix("hook_"): seen[name] for name in ("hook_embed", *positions)}
    scale = seen.get(FINAL_SCALE, torch.ones_like(seen[last][:, :1]))
    return StreamReading(embeddings, found, seen[last], scale)

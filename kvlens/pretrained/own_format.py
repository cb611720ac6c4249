"""Models in their authors' own format (nearly TransformerLens'): ``config.json`` and ``.pth`` files, read as tensors only."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from torch import Tensor

from kvlens.base import HookedTransformerConfig
from kvlens.base.families import convert

OWN_FORMAT = ("NeelNanda/", "ArthurConmy/", "Baidicoot/")
"""Whose models are stored so, by the beginnings of names."""


def checkpoint_files(name: str) -> list[tuple[int, str]]:
    """Steps and files of the checkpoints of a model in its author's own format, in the order of the listing."""
    found = ((re.match(r"checkpoints/.*_(\d+)\.pth", file), file) for file in huggingface_hub.list_repo_files(name))
    return [(int(match[1]), file) for match, file in found if match is not None]


def own_format(name: str, step: int | None, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and weights of a model in its author's own format (nearly TransformerLens' own), as tensors only."""
    given = json.loads(Path(huggingface_hub.hf_hub_download(name, "config.json")).read_text())
    architecture = given.get("architecture", "neel-solu-old" if "_old" in name else "neel")
    kept = (
        "d_model",
        "n_layers",
        "d_mlp",
        "d_head",
        "n_heads",
        "n_ctx",
        "d_vocab",
        "tokenizer_name",
        "act_fn",
        "attn_only",
        "final_rms",
    )
    fields = {key: given[key] for key in kept if key in given}
    fields["normalization_type"] = given.get("normalization", given.get("normalization_type"))
    fields["positional_embedding_type"] = "shortformer" if given.get("shortformer_pos") else "standard"
    fields["original_architecture"] = architecture
    files = dict(checkpoint_files(name)) if step is not None else {}
    file = (
        files[step] if step is not None else next(f for f in huggingface_hub.list_repo_files(name) if f.endswith("final.pth"))
    )
    stored = torch.load(huggingface_hub.hf_hub_download(name, file), map_location="cpu", weights_only=True)
    weights = {key: tensor.to(dtype) for key, tensor in stored.items()}
    if architecture == "neel-solu-old":
        weights = _first_solu_models(weights, fields["n_layers"])
    elif architecture == "mingpt":
        named = {**weights, "pos_emb.weight": weights["pos_emb"].squeeze(), "lm_head.weight": weights["head.weight"]}
        weights = convert(named, HookedTransformerConfig(**fields))
    return fields, {key: tensor for key, tensor in weights.items() if "mask" not in key and "IGNORE" not in key}


def _first_solu_models(weights: Mapping[str, Tensor], n_layers: int) -> dict[str, Tensor]:
    """The first SoLU models call norms "norm" and have matrices the other way round: up to 6 layers all, up to 8 W_pos."""
    named = {re.sub(r"^ln\.", "ln_final.", key.replace("norm", "ln")): tensor for key, tensor in weights.items()}
    return {
        key: tensor.transpose(-2, -1) if "W_" in key and n_layers <= (8 if key == "pos_embed.W_pos" else 6) else tensor
        for key, tensor in named.items()
    }

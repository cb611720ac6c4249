"""Names of public models: what they stand for, and where their files are.

A name stands for a folder: the one in which Hugging Face's cache has its files, at a step of training if one is asked for.
Names of models that exist only as code that comes with them are refused. A few models are stored in their authors' own format.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES

from kvlens.arguments import path_of
from kvlens.base import HookedTransformerConfig
from kvlens.errors import KVLensError, nearest, nearest_name
from kvlens.pretrained.translation import convert
from kvlens.zoo import fetch
from kvlens.zoo import names as shipped_names

OWN_FORMAT = ("NeelNanda/", "ArthurConmy/", "Baidicoot/")
"""Whose models are stored in their authors' own format: a ``config.json`` and ``.pth`` files, nearly TransformerLens'."""
OTHER_CODE = ("bigcode/santacoder", "Qwen/Qwen-", "apple/OpenELM")
"""Models that exist only as code that comes with them."""
SHORTER = {"meta-llama/Llama-3.": 2048, "google/gemma-3": 8192, "google/medgemma": 8192, "roneneldan/TinyStories": 512}
"""Context lengths below the configuration's, by the beginnings of names: tables are smaller; TinyStories was trained on 512."""
STEPS = {
    "stanford-crfm/": [*range(0, 100, 10), *range(100, 2000, 50), *range(2000, 20000, 100), *range(20000, 400001, 1000)],
    "EleutherAI/pythia": [0, *(2**i for i in range(10)), *range(1000, 143001, 1000)],
}
"""The training steps whose checkpoints are public, by the beginnings of names (Pythia's first version: from 1000 on)."""
REVISIONS = {"stanford-crfm/": "checkpoint-{}", "EleutherAI/pythia": "step{}"}


def official_names() -> dict[str, str]:
    """Official names of public models by their names and aliases in lower case."""
    names = {alias.lower(): name for name, aliases in MODEL_ALIASES.items() for alias in aliases}
    return names | {name.lower(): name for name in OFFICIAL_MODEL_NAMES}


def official_name(model_name: str) -> str:
    """Return TransformerLens' official name for ``model_name``, which may be an alias.

    Raises:
        KVLensError: TransformerLens has no such name; the message suggests the nearest one, or says that kvlens ships it. Or
            the model exists only as code that comes with it.
    """
    names = official_names()
    found = names.get(str(model_name).lower())
    shipped = nearest_name(model_name, shipped_names(), likeness=0.8)
    if found is None and shipped is not None:
        raise KVLensError(
            f"from_pretrained: {str(model_name)!r} names no model of Hugging Face's; those that ship with kvlens are loaded by "
            f'HookedKVTransformer.from_zoo("{shipped}")'
        )
    if found is None:
        raise KVLensError(
            f"from_pretrained: {str(model_name)!r} is neither a folder on this machine (kvlens.load also takes a GGUF file and "
            "any name on the hub; here give a folder, or hf_model=) nor one of the "
            f"{len(set(names.values()))} official model names or their aliases{nearest(str(model_name).lower(), names)}"
        )
    if found.startswith(OTHER_CODE):
        raise KVLensError(
            f"from_pretrained: {found} exists only as code that comes with it; kvlens runs none. If you trust it, load it "
            "with transformers; KVTransformerBridge runs the loaded model"
        )
    return found


def is_local_folder(model_name: str | Path) -> bool:
    """Whether ``model_name`` is a local folder rather than a TransformerLens name.

    A ``Path``, a folder with a ``config.json``, and anything that looks like a path or exists on disk is a folder. An
    official name wins over a folder of that name that has no ``config.json``.
    """
    if isinstance(model_name, Path):
        return True
    path = path_of("from_pretrained", model_name)
    if (path / "config.json").is_file():
        return True
    if model_name.lower() in official_names():
        return False
    written_as_path = model_name.startswith((".", "~", os.sep)) or "\\" in model_name or model_name.count("/") > 1
    return written_as_path or path.exists()


def cached_folder(name: str, revision: str | None = None, cache_dir: str | Path | None = None) -> Path | None:
    """Find where Hugging Face's cache has a model; None if it has not."""
    try:
        config = try_to_load_from_cache(name, "config.json", cache_dir=cache_dir, revision=revision)
    except ValueError:  # no name that the hub could have
        return None
    return Path(config).parent if isinstance(config, str) else None


def folder_of_name(official: str, step: int | None, options: dict[str, Any], local_files_only: bool) -> Path:
    """The folder of a name's files, at a training step; ``options`` for the hub (``revision``, ...) are taken out of the dict.

    Raises:
        KVLensError: they are not in the cache, nor fetched.
    """
    where = {name: options.pop(name) for name in ("revision", "cache_dir", "token") if name in options}
    if step is not None:
        where["revision"] = str(beginning(official, REVISIONS)).format(step)
    folder = cached_folder(official, where.get("revision"), where.get("cache_dir"))
    if not local_files_only:
        return fetch(official, "from_pretrained", **where)
    if folder is None:
        raise not_here(official)
    return folder


def not_here(official: str) -> KVLensError:
    """Make the error for a name whose files the cache does not have."""
    return KVLensError(
        f"from_pretrained: the files of {official} are not all in Hugging Face's cache on this machine; "
        "local_files_only=False fetches them, or pass a folder"
    )


def step_of(name: str, index: int | None, step: int | None) -> int:
    """The training step of a checkpoint that is asked for by number or by step."""
    steps = [known for known, _ in checkpoint_files(name)] if name.startswith(OWN_FORMAT) else beginning(name, STEPS)
    if not steps:
        raise KVLensError(f"from_pretrained: no checkpoints of {name}'s training are public")
    if name.startswith("EleutherAI/pythia") and "v0" in name:
        steps = [known for known in steps if known >= 1000]
    if index is not None:
        return int(steps[index])
    if step not in steps:
        raise KVLensError(f"from_pretrained: {name} has no checkpoint {step}{nearest(step, map(str, steps))}")
    return int(step)  # type: ignore[arg-type]


_Value = TypeVar("_Value")


def beginning(name: str, table: Mapping[str, _Value]) -> _Value | None:
    """The value of ``table`` whose key ``name`` begins with; None if there is none."""
    return next((value for start, value in table.items() if name.startswith(start)), None)


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

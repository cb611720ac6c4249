"""A kvlens model on disk: a folder with ``model.safetensors``, ``config.json`` and the tokenizer's own files."""

import json
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvlens.errors import KVLensError
from kvlens.model.config import HookedKVTransformerConfig
from kvlens.model.loading import build_with_ready_tokenizer

if TYPE_CHECKING:
    from kvlens.model.transformer import HookedKVTransformer

FORMAT_VERSION = 1
_RECOMPUTED = ("mask", "IGNORE", "rotary_sin", "rotary_cos")


def save_model(
    model: "HookedKVTransformer",
    folder: str | Path,
    *,
    overwrite: bool = False,
    stored_dtype: torch.dtype | None = None,
) -> None:
    """Write ``model`` to ``folder``: into a temporary neighbour first, then renamed into place.

    Args:
        model: what to save; an attached bias is not saved.
        folder: its path; parents are made.
        overwrite: replace a folder that is not empty.
        stored_dtype: round the weights to this dtype on disk, e.g. float16 for half the size; loading widens them again.

    Raises:
        KVLensError: the folder exists and is not empty (unless ``overwrite``), or cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not overwrite:
        raise KVLensError(f"save: {folder} exists and is not empty; choose another folder, or pass overwrite=True")
    config = {"format": "kvlens.model", "format_version": FORMAT_VERSION, "kvlens_version": version("kvlens")}
    config["config"] = {**model.cfg.to_json(), "default_prepend_bos": model.default_prepend_bos_detached}
    tensors = {
        n: t.detach().to("cpu", stored_dtype or t.dtype).contiguous().clone()
        for n, t in model.state_dict().items()
        if _is_stored(n)
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            (temporary / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
            (temporary / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
            if model.tokenizer is not None:
                model.tokenizer.save_pretrained(temporary)
            temporary.chmod(0o755)
            if folder.exists():
                shutil.rmtree(folder)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise KVLensError(f"save: cannot write {folder}: {error.strerror or error}") from error


def load_model(
    cls: type["HookedKVTransformer"], folder: str | Path, *, device: Any = None, dtype: torch.dtype | None = None
) -> "HookedKVTransformer":
    """Read a folder that :func:`save_model` wrote.

    Args:
        folder: its path.
        device: where to put the model; None takes TransformerLens' choice.
        dtype: round or widen the weights to this dtype; None keeps the stored one.

    Raises:
        KVLensError: not such a folder, a truncated file, a newer format, or weights that do not fit the configuration.
    """
    folder = Path(folder)
    cfg = HookedKVTransformerConfig.from_json(_read_config(folder), device=device, init_weights=False)
    try:
        tensors = load_file(folder / "model.safetensors")
    except (SafetensorError, OSError) as error:
        raise KVLensError(f"load: {folder / 'model.safetensors'} is missing or truncated ({error})") from error
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer: PreTrainedTokenizerBase | None = AutoTokenizer.from_pretrained(folder) if has_tokenizer else None
    model = build_with_ready_tokenizer(cls, cfg, tokenizer)
    cfg.init_weights = True
    expected = {name for name in model.state_dict() if _is_stored(name)}
    if expected != set(tensors):
        missing, extra = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
        raise KVLensError(
            f"load: the weights in {folder} do not fit its configuration: missing {missing[:3]}, unknown {extra[:3]}"
        )
    model.load_state_dict(tensors, strict=False)
    if dtype is not None and dtype != cfg.dtype:
        model.to(dtype, print_details=False)
    return model


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise KVLensError(f"load: {folder} holds no config.json; expected a folder written by HookedKVTransformer.save")
    try:
        stored = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise KVLensError(f"load: {path} is truncated or not JSON ({error})") from error
    if stored.get("format") != "kvlens.model":
        raise KVLensError(
            f"load: {path} was not written by kvlens; for a Hugging Face folder use HookedKVTransformer.from_pretrained"
        )
    if stored["format_version"] > FORMAT_VERSION:
        raise KVLensError(
            f"load: {path} has format version {stored['format_version']}, this kvlens reads up to {FORMAT_VERSION}: "
            "upgrade kvlens"
        )
    return stored["config"]


def _is_stored(name: str) -> bool:
    return name.rsplit(".", 1)[-1] not in _RECOMPUTED

"""A kvlens model on disk: a folder with ``model.safetensors``, ``config.json`` and the tokenizer's own files."""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvlens.arguments import check_device, path_of
from kvlens.base import HookedTransformer, HookedTransformerConfig
from kvlens.base.model import M
from kvlens.dtypes import check_holds, dtype_of
from kvlens.errors import KVLensError, brief, warn
from kvlens.files import (
    CARD,
    CONFIG,
    LIST,
    WEIGHTS,
    FolderKind,
    check_folder,
    check_regular_files,
    check_version,
    checksum,
    checksum_of_json,
    clear_leftovers,
    file_in,
    files_in,
    listed_in,
    read_json,
    reading_file,
    write_folder,
)
from kvlens.model.config import HookedKVTransformerConfig
from kvlens.model.fingerprint import forget_hash, is_weight, weights_hash
from kvlens.tokenizer import read_tokenizer

"""The requested class: HookedKVTransformer or a subclass. It depends on this module, which therefore never imports it."""
FORMAT, FORMAT_VERSION = "kvlens.model", 2


def _own_files(folder: Path) -> set[str] | None:
    own = listed_in(CONFIG, FORMAT, "files", LIST)(folder)
    return None if own is None else own | {CARD}  # which is never listed


MODEL_FOLDER = FolderKind("a kvlens model", _own_files, operation="save", allow="pass overwrite=True")


def save_model(
    model: HookedTransformer,
    folder: str | Path,
    *,
    overwrite: bool = False,
    stored_dtype: torch.dtype | str | None = None,
    further: Mapping[str, bytes] | None = None,
) -> None:
    """Write ``model`` to ``folder`` atomically.

    Args:
        model: the model to save. An attached bias and hooks are not saved; permanent hooks, which are part of what the model
            computes, cause a warning.
        folder: path of the folder; parent folders are created.
        overwrite: replace an existing kvlens model; nothing else is ever replaced.
        stored_dtype: round the weights to this floating dtype (or its name) on disk, e.g. float16 for half the size; loading
            widens them again.
        further: additional files of the model, by name.

    Raises:
        KVLensError: something exists there that may not be replaced, or the folder cannot be written.
    """
    stored_dtype = None if stored_dtype is None else dtype_of(stored_dtype, "save: stored_dtype")
    check_model_folder(folder, overwrite=overwrite)
    hooked = [name for name, point in model.hook_dict.items() if any(h.is_permanent for h in point.fwd_hooks + point.bwd_hooks)]
    if hooked:
        warn(
            f"save: permanent hooks (on {', '.join(hooked[:3])}) are functions and cannot be saved: the model loaded from "
            f"{folder} will compute something else until they are added again"
        )
    config = {"format": FORMAT, "format_version": FORMAT_VERSION, "kvlens_version": version("kvlens")}
    config["config"] = model.cfg.to_json()
    tensors = {n: t.detach().to("cpu", stored_dtype or t.dtype) for n, t in model.state_dict().items() if is_weight(n)}
    for name, tensor in model.state_dict().items():
        if name in tensors:
            check_holds(f"save: {name}", tensors[name], tensor.detach().cpu())
    forget_hash(model)  # what is written is what is hashed, whoever wrote it
    config["rounded_from"] = [weights_hash(tensors), model.fingerprint().weights]  # a rounded copy keeps its biases

    def fill(temporary: Path) -> None:
        (temporary / WEIGHTS).write_bytes(save({n: t.contiguous().clone() for n, t in tensors.items()}, {"format": "pt"}))
        for name, content in (further or {}).items():
            (temporary / name).write_bytes(content)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(temporary)
        config["files"] = {name: checksum((temporary / name).read_bytes()) for name in sorted(files_in(temporary))}
        config["checksum"] = checksum_of_json(config)
        (temporary / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    write_folder(folder, fill, MODEL_FOLDER, overwrite=overwrite)


def check_model_folder(folder: str | Path, *, overwrite: bool = False) -> None:
    """Raise KVLensError unless a model may be saved there; with ``overwrite``, it may replace another kvlens model."""
    check_folder(folder, MODEL_FOLDER, overwrite=overwrite)


def build_with_ready_tokenizer(
    cls: type[M], cfg: HookedKVTransformerConfig, tokenizer: PreTrainedTokenizerBase | None, move_to_device: bool = True
) -> M:
    """Construct a model without the base's lookup of the tokenizer by name, which accesses the network, then set it.

    That lookup also determines whether the tokenizer prepends a BOS by itself, which is done here instead if necessary.
    """
    name, cfg.tokenizer_name = cfg.tokenizer_name, None
    model = cls(cfg, move_to_device=move_to_device)
    cfg.tokenizer_name = name
    model.tokenizer = tokenizer
    if tokenizer is not None and cfg.tokenizer_prepends_bos is None:
        cfg.tokenizer_prepends_bos = len(tokenizer.encode("")) > 0
    return model


def load_model(
    cls: type[M], folder: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None
) -> M:
    """Read a folder that :func:`save_model` wrote.

    Args:
        folder: path of the folder.
        device: where to put the model; None leaves the choice to TransformerLens.
        dtype: round or widen the weights to this dtype; None keeps the stored one.

    Raises:
        KVLensError: not a kvlens folder, a truncated file, another format version, or weights of another structure.
    """
    check_device("load: device", device)
    folder, dtype = path_of("load", folder), None if dtype is None else dtype_of(dtype)
    if not folder.exists():
        clear_leftovers(folder)  # restores a folder left aside by an interrupted save
    stored = _read_config(folder)
    _check_files(folder, stored)
    cfg = _config_of(folder, stored["config"], device)
    try:
        tensors = load_file(folder / WEIGHTS)
    except Exception as error:  # a damaged header can raise almost anything
        raise KVLensError(f"load: {folder / WEIGHTS} is missing or truncated ({error})") from error
    check_weights_have_these_sizes(cfg, tensors, f"load: the weights in {folder}")
    integers = sorted(name for name, tensor in tensors.items() if not tensor.is_floating_point())
    if integers:
        raise KVLensError(f"load: the weights in {folder} hold integers ({integers[:3]}); use an intact copy")
    model = build_with_ready_tokenizer(cls, cfg, _load_tokenizer(folder))
    cfg.init_weights = True
    expected = {(name, t.shape) for name, t in model.state_dict().items() if is_weight(name)}
    found = {(name, t.shape) for name, t in tensors.items()}
    if expected != found:
        missing, extra = ([f"{n} {list(s)}" for n, s in sorted(part)] for part in (expected - found, found - expected))
        raise KVLensError(
            f"load: the weights in {folder} do not fit its configuration: missing {missing[:3]}, unknown {extra[:3]}"
        )
    model.load_state_dict(tensors, strict=False)
    model.rounded_from = tuple(stored["rounded_from"])
    if dtype is not None and dtype != cfg.dtype:
        model.to(dtype, print_details=False)
    return model


def check_weights_have_these_sizes(cfg: HookedTransformerConfig, tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise KVLensError if stored weights do not match ``cfg``, before a model of that size is built."""
    layers = {int(found[1]) for found in map(re.compile(r"blocks\.([0-9]{1,6})\.").match, tensors) if found}
    if layers != set(range(min(cfg.n_layers, len(layers) + 1))):
        raise KVLensError(f"{where} hold {len(layers)} layers, but the configuration has n_layers={cfg.n_layers}")
    wanted: dict[str, Sequence[int | None]] = {
        "embed.W_E": (cfg.d_vocab, cfg.d_model),
        "unembed.W_U": (cfg.d_model, cfg.d_vocab_out),
        "blocks.0.mlp.W_in": (cfg.d_model, cfg.d_mlp),
        "pos_embed.W_pos": (cfg.n_ctx, cfg.d_model),
    }
    for layer in layers if cfg.layers_differ else (0,):
        of_layer = cfg.of_layer(layer)
        wanted[f"blocks.{layer}.attn.W_Q"] = (of_layer.n_heads, cfg.d_model, of_layer.d_head)
    for name, shape in wanted.items():
        if name in tensors and tuple(tensors[name].shape) != tuple(shape):
            raise KVLensError(
                f"{where} do not fit the configuration: {name} is {list(tensors[name].shape)}, expected {list(shape)}"
            )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    check_regular_files("load", folder)
    if not path.is_file():
        raise KVLensError(f"load: {folder} holds no config.json; expected a folder written by HookedKVTransformer.save")
    stored = read_json("load", path)
    if not isinstance(stored, dict) or stored.get("format") != FORMAT or not isinstance(stored.get("config"), dict):
        raise KVLensError(f"load: {path} was not written by kvlens; kvlens.load reads folders of Hugging Face, too")
    check_version("load", path, stored.get("format_version"), FORMAT_VERSION)
    if stored.get("checksum") != checksum_of_json(stored):
        raise KVLensError(f"load: {path} is damaged: its contents do not match its checksum; use an intact copy")
    return stored


def _check_files(folder: Path, stored: dict[str, object]) -> None:
    """Raise KVLensError unless every saved file is present and unchanged."""
    files = stored.get("files")
    if not isinstance(files, dict):
        raise KVLensError(f"load: {folder / CONFIG} is damaged: its list of files is {brief(files)}")
    for name, written in files.items():
        with reading_file("load", folder / name):
            found = checksum(file_in("load", folder, name).read_bytes())
        if found != written:
            raise KVLensError(
                f"load: {folder / name} is damaged: it does not match its checksum; use an intact copy. To change a "
                "model, load it, change it and save it again"
            )


def _config_of(folder: Path, plain: dict[str, object], device: torch.device | str | None) -> HookedKVTransformerConfig:
    try:
        return HookedKVTransformerConfig.from_json(plain, device=device, init_weights=False)
    except KVLensError as error:
        raise KVLensError(f"load: {folder / CONFIG}: {error}") from error
    except Exception as error:  # TransformerLens uses assertions, and a wrong type can fail anywhere
        raise KVLensError(
            f"load: {folder / CONFIG} describes no model that can be built ({type(error).__name__}: {error})"
        ) from error


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    return read_tokenizer(folder) if (folder / "tokenizer_config.json").is_file() else None

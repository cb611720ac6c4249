"""From a Hugging Face config to TransformerLens': its own translation, put right where it reads wrongly, or refused.

TransformerLens branches on words in the path of the config ("llama", "gemma", "bert", ...): the config is written alone into
a temporary folder with a neutral name and read there.
"""

import copy
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvlens._tl import HookedTransformerConfig, loading
from kvlens.errors import KVLensError

logger = logging.getLogger(__name__)

NAMES_WITH_A_BRANCH = re.compile("llama|gemma|bert|wav2vec2", re.IGNORECASE)
"""What in a path makes TransformerLens' config loader ignore the config file (``convert_hf_model_config``)."""


def translate_config(
    hf_config: Any,
    architecture: str,
    official: str | None,
    *,
    first_n_layers: int | None,
    n_ctx: int | None,
    **options: Any,
) -> HookedTransformerConfig:
    """Let TransformerLens translate ``hf_config`` from a neutral folder, then put right what it reads wrongly."""
    check_first_n_layers_and_n_ctx(first_n_layers, hf_config.num_hidden_layers, n_ctx)
    hf_config = _loader_config(hf_config, architecture)
    with neutral_folder() as folder:
        hf_config.to_json_file(folder / "config.json", use_diff=False)
        try:
            cfg = loading.get_pretrained_model_config(str(folder), first_n_layers=first_n_layers, **options)
        except (AttributeError, AssertionError, KeyError, TypeError) as error:
            raise KVLensError(
                f"from_pretrained: TransformerLens cannot translate this {architecture} config: {error}"
            ) from error
    cfg.tokenizer_name = None
    own_n_ctx = _own_n_ctx(hf_config, cfg, official)
    if n_ctx is not None and n_ctx > own_n_ctx:
        if cfg.positional_embedding_type == "standard":
            raise KVLensError(f"from_pretrained: the model learned {own_n_ctx} positions, n_ctx={n_ctx} asks for more")
        logger.warning("n_ctx=%d is longer than the model's own %d positions: untrained there", n_ctx, own_n_ctx)
    changes = {**_corrections(hf_config, cfg, architecture), "n_ctx": n_ctx or own_n_ctx}
    _check_expressible(hf_config, cfg, architecture, changes["n_ctx"])
    changes = {key: value for key, value in changes.items() if getattr(cfg, key) != value}
    if not changes:
        return cfg
    rescaled = {"attn_scale": -1.0} if "d_head" in changes else {}  # -1: take sqrt(d_head) again
    return HookedTransformerConfig.from_dict({**cfg.to_dict(), **changes, **rescaled})


def check_first_n_layers_and_n_ctx(first_n_layers: int | None, n_layers: int, n_ctx: int | None) -> None:
    """Raise unless ``first_n_layers`` is one of the model's numbers of layers and ``n_ctx`` a length; None leaves them open."""
    if first_n_layers is not None and not 1 <= first_n_layers <= n_layers:
        raise KVLensError(f"from_pretrained: first_n_layers must be 1 to {n_layers} (the model's layers), got {first_n_layers}")
    if n_ctx is not None and n_ctx < 1:
        raise KVLensError(f"from_pretrained: n_ctx must be at least 1, got {n_ctx}")


def _loader_config(hf_config: Any, architecture: str) -> Any:
    """Copy the config and add what TransformerLens reads: the architecture, and a field gone from transformers 5."""
    hf_config = copy.deepcopy(hf_config)
    hf_config.architectures = [architecture]
    if architecture == "GPT2LMHeadModel":
        hf_config.n_ctx = hf_config.n_positions
    return hf_config


@contextmanager
def neutral_folder() -> Iterator[Path]:
    """Yield a temporary folder whose whole path holds none of the words that TransformerLens branches on."""
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp", os.curdir):
        if NAMES_WITH_A_BRANCH.search(parent) or not os.access(parent, os.W_OK):
            continue
        with tempfile.TemporaryDirectory(prefix="kvlens-", dir=parent) as made:
            # Under the working directory the relative path stays neutral whatever that directory is called.
            path = Path(os.path.relpath(made)) if parent == os.curdir else Path(made)
            if not NAMES_WITH_A_BRANCH.search(str(path)):
                yield path
                return
    raise KVLensError("from_pretrained: no writable temporary folder: set TMPDIR to a path without a model's name in it")


def _own_n_ctx(hf_config: Any, cfg: HookedTransformerConfig, official: str | None) -> int:
    """Return the context length that TransformerLens would take, never more than the config's own."""
    if official is not None and official.startswith("roneneldan/TinyStories"):
        return min(512, cfg.n_ctx)  # trained on 512 positions although the config says 2048; as TransformerLens does
    return min(cfg.n_ctx, getattr(hf_config, "max_position_embeddings", None) or cfg.n_ctx)


def _corrections(hf_config: Any, cfg: HookedTransformerConfig, architecture: str) -> dict[str, Any]:
    """Collect the config fields that TransformerLens fixes or derives although the Hugging Face config states them."""
    changes: dict[str, Any] = {}
    d_mlp = getattr(hf_config, "n_inner", None) or (
        getattr(hf_config, "intermediate_size", None) if architecture == "GPTNeoForCausalLM" else None
    )
    if d_mlp:
        changes["d_mlp"] = d_mlp
    head_dim = getattr(hf_config, "head_dim", None)
    if architecture == "LlamaForCausalLM" and head_dim:
        changes |= {"d_head": head_dim, "rotary_dim": head_dim}
    rotary = getattr(hf_config, "rope_parameters", None)
    if cfg.positional_embedding_type == "rotary" and isinstance(rotary, dict) and rotary.get("rope_theta"):
        changes["rotary_base"] = rotary["rope_theta"]
    return changes


def _check_expressible(hf_config: Any, cfg: HookedTransformerConfig, architecture: str, n_ctx: int) -> None:
    """Raise for features that TransformerLens would drop without a word."""
    refuse = f"from_pretrained: this {architecture} "
    rotary = getattr(hf_config, "rope_parameters", None)
    kind = (rotary.get("rope_type") or "default") if isinstance(rotary, dict) else "default"
    if kind != "default" and not (cfg.use_NTK_by_parts_rope or cfg.use_yarn_rope):
        raise KVLensError(f"{refuse}scales its rotary angles by {kind!r}, which TransformerLens does not apply to it")
    sliding = "sliding_attention" in (getattr(hf_config, "layer_types", None) or ())
    window = getattr(hf_config, "sliding_window", None)
    if sliding and not cfg.use_local_attn and window is not None and window < n_ctx:
        raise KVLensError(
            f"{refuse}has layers with a sliding window of {window}, which TransformerLens does not apply to it: pass "
            f"n_ctx={window} or less"
        )
    if architecture == "OPTForCausalLM" and not hf_config.do_layer_norm_before:
        raise KVLensError(f"{refuse}normalises after each sublayer, which TransformerLens does not express")
    if architecture == "BloomForCausalLM" and hf_config.apply_residual_connection_post_layernorm:
        raise KVLensError(f"{refuse}takes its residual after the layer norm, which TransformerLens does not express")

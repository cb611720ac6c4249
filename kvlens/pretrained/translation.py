"""Translating a Hugging Face config to TransformerLens', with corrections where TransformerLens' own translation is wrong.

TransformerLens branches on words in the path of the config ("llama", "gemma", "bert", ...): the config is written alone into
a temporary folder with a neutral name and read there.
"""

import copy
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvlens._tl import HookedTransformerConfig, loading
from kvlens.base.rope_parameters import refused, rotary_fields
from kvlens.errors import KVLensError
from kvlens.pretrained.fields import HONORED, check_fields

logger = logging.getLogger(__name__)

NAMES_WITH_A_BRANCH = re.compile("llama|gemma|bert|wav2vec2", re.IGNORECASE)
"""What in a path makes TransformerLens' config loader ignore the config file (``convert_hf_model_config``)."""

ACTIVATIONS = {
    **{name: name for name in ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "relu2")},
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_new",
}
"""Activations by transformers' names, and by TransformerLens'."""


def translate_config(
    hf_config: Any,
    architecture: str,
    official: str | None,
    *,
    first_n_layers: int | None,
    n_ctx: int | None,
    **options: Any,
) -> HookedTransformerConfig:
    """Let TransformerLens translate ``hf_config`` from a neutral folder, then correct its mistakes."""
    check_first_n_layers_and_n_ctx(first_n_layers, hf_config.num_hidden_layers, n_ctx)
    check_fields(hf_config, architecture)
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
    changes = _corrections(hf_config, cfg, architecture, n_ctx or own_n_ctx)
    changes = {key: value for key, value in changes.items() if getattr(cfg, key) != value}
    rescaled = {"attn_scale": -1.0} if "d_head" in changes else {}  # -1: take sqrt(d_head) again
    return HookedTransformerConfig.from_dict({**cfg.to_dict(), **changes, **rescaled})


def check_first_n_layers_and_n_ctx(first_n_layers: int | None, n_layers: int, n_ctx: int | None) -> None:
    """Raise unless ``first_n_layers`` is one of the model's numbers of layers and ``n_ctx`` a length; None leaves them open."""
    if first_n_layers is not None and not 1 <= first_n_layers <= n_layers:
        raise KVLensError(f"from_pretrained: first_n_layers must be 1 to {n_layers} (the model's layers), got {first_n_layers}")
    if n_ctx is not None and n_ctx < 1:
        raise KVLensError(f"from_pretrained: n_ctx must be at least 1, got {n_ctx}")


def _loader_config(hf_config: Any, architecture: str) -> Any:
    """Copy the config and say in it what TransformerLens reads: the architecture, a field gone from transformers 5, its own
    name of the activation."""
    hf_config = copy.deepcopy(hf_config)
    hf_config.architectures = [architecture]
    known = {**ACTIVATIONS, **({"xielu": "xielu"} if architecture == "ApertusForCausalLM" else {})}  # learned there alone
    for name in ("activation_function", "hidden_act"):
        given = getattr(hf_config, name, None)
        if given is not None and given not in known:
            raise refused(architecture, name, given, f"it has {', '.join(known)}")
        if given is not None:
            setattr(hf_config, name, known[given])
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


def _corrections(hf_config: Any, cfg: HookedTransformerConfig, architecture: str, n_ctx: int) -> dict[str, Any]:
    """What the Hugging Face configuration says, in the fields of TransformerLens', which fixes or guesses some of it."""
    changes: dict[str, Any] = {"n_ctx": n_ctx, **_layer_types(hf_config, cfg, n_ctx)}
    d_mlp = getattr(hf_config, "n_inner", None) or (
        getattr(hf_config, "intermediate_size", None) if architecture == "GPTNeoForCausalLM" else None
    )
    if d_mlp:
        changes["d_mlp"] = d_mlp
    for name in ("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"):
        if hasattr(hf_config, name):
            changes["eps"] = getattr(hf_config, name)
    if "head_dim" in HONORED[architecture] and getattr(hf_config, "head_dim", None):
        changes["d_head"] = hf_config.head_dim
    if cfg.positional_embedding_type == "rotary":
        kinds = set(changes.get("attn_types") or (cfg.attn_types if cfg.use_local_attn else None) or ["global"])
        changes |= rotary_fields(hf_config, architecture, kinds, changes.get("d_head", cfg.d_head))
    return changes


def _layer_types(hf_config: Any, cfg: HookedTransformerConfig, n_ctx: int) -> dict[str, Any]:
    """Layers with a sliding window, where the configuration names them and the window is shorter than the context."""
    types, window = getattr(hf_config, "layer_types", None), getattr(hf_config, "sliding_window", None)
    if not types or window is None or window >= n_ctx or "sliding_attention" not in types:
        return {}
    attn_types = ["local" if kind == "sliding_attention" else "global" for kind in types[: cfg.n_layers]]
    return {"use_local_attn": True, "window_size": window, "attn_types": attn_types}


def alibi_slopes(n_heads: int) -> list[float] | None:
    """The slopes of ALiBi where the number of heads is not a power of two, for which TransformerLens has another series.

    Source: Press et al. 2022, the code that comes with the paper: the series of the next lower power of two, then every
    second slope of the series of the next higher one.
    """
    lower = 2 ** int(math.log2(n_heads))
    if lower == n_heads:
        return None
    further = [2.0 ** (-4 * odd / lower) for odd in range(1, 2 * (n_heads - lower), 2)]
    return [2.0 ** (-8 * i / lower) for i in range(1, lower + 1)] + further

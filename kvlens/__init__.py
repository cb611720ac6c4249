"""kvlens: mechanistic interpretability of the key-value side of attention, with TransformerLens' hooks and names.

What most people need is named here: `load`, `HookedKVTransformer`, `convert_prompt`, `KVBias`. Where the rest is:

- **the papers**, equation by equation, with misprints; their figures and tables as commands: `kvlens.papers`;
- **the mathematics**, as pure functions of tensors: `kvlens.ops`;
- **the model**, its configuration and hook points: `kvlens.model`, `kvlens.components`; models as Transformers runs them:
  `kvlens.bridge`;
- **a prompt as weights**: `kvlens.conversion`, `kvlens.kv_bias`; **attention as a step of learning**: `kvlens.dual`;
- **why did it say that**: `kvlens.explain`, `kvlens.explanation`, which also makes a page of it;
- **analyses**, each a function that returns a table: `kvlens.analyses`; over many prompts: `kvlens.analyses.batch`;
- **tables**, as commands write them, read and checked: `read_table`;
- **pictures**: `kvlens.viz`;
- **training**: `kvlens.tasks`, `kvlens.training`, `kvlens.corpus`; the models that ship: `kvlens.zoo`.

The names below are imported when they are first used: TransformerLens takes seconds to import, ``import kvlens`` does not.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlens.bridge import KVTransformerBridge
    from kvlens.chat import Chat
    from kvlens.conversion import Counterfactuals, Landmark, carry_bias, convert_prompt, counterfactuals, logits_after
    from kvlens.errors import KVLensError
    from kvlens.files.parquet import read_table
    from kvlens.kv_bias import KVBias, combine
    from kvlens.loading import load
    from kvlens.model import HookedKVTransformer, HookedKVTransformerConfig, KVModel, KVShiftConfig, run_in_segments

_HOMES = {
    "Chat": "kvlens.chat",
    "Counterfactuals": "kvlens.conversion",
    "HookedKVTransformer": "kvlens.model",
    "HookedKVTransformerConfig": "kvlens.model",
    "KVBias": "kvlens.kv_bias",
    "KVLensError": "kvlens.errors",
    "KVModel": "kvlens.model",
    "KVShiftConfig": "kvlens.model",
    "KVTransformerBridge": "kvlens.bridge",
    "Landmark": "kvlens.conversion",
    "carry_bias": "kvlens.conversion",
    "combine": "kvlens.kv_bias",
    "convert_prompt": "kvlens.conversion",
    "counterfactuals": "kvlens.conversion",
    "explain": "kvlens.explanation",
    "load": "kvlens.loading",
    "logits_after": "kvlens.conversion",
    "read_table": "kvlens.files.parquet",
    "run_in_segments": "kvlens.model",
}

__all__ = [
    "Chat",
    "Counterfactuals",
    "HookedKVTransformer",
    "HookedKVTransformerConfig",
    "KVBias",
    "KVLensError",
    "KVModel",
    "KVShiftConfig",
    "KVTransformerBridge",
    "Landmark",
    "carry_bias",
    "combine",
    "convert_prompt",
    "counterfactuals",
    "explain",
    "load",
    "logits_after",
    "read_table",
    "run_in_segments",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvlens' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

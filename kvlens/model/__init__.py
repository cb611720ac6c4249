"""The hooked model and its configuration, loading and saving.

A model of your own; with softmax attention and ``kv_shift``, the identity at first, it computes what it did without:

>>> import tempfile, torch
>>> from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVShiftConfig
>>> sizes = dict(n_layers=2, d_model=64, d_head=16, n_ctx=512, d_vocab=100, act_fn="gelu", seed=0, device="cpu")
>>> linear = dict(attention="linear", feature_map="elu_plus_one", positional_embedding_type="rotary")
>>> model = HookedKVTransformer(HookedKVTransformerConfig(**sizes, **linear, kv_shift=KVShiftConfig()))
>>> model(torch.randint(0, 100, (4, 32)), return_type="loss").backward()
>>> model.blocks[0].attn.k_shift_coef.grad is not None
True
>>> softmax = HookedKVTransformer(HookedKVTransformerConfig(**sizes))
>>> shifted = HookedKVTransformer.from_hooked_transformer(softmax, kv_shift=KVShiftConfig(init="identity"))
>>> folder = tempfile.mkdtemp() + "/my-model"
>>> shifted.save(folder)  # safetensors, config and tokenizer; no pickle
>>> HookedKVTransformer.load(folder).cfg.kv_shift.window
1

``HookedKVTransformer.from_pretrained`` accepts every name that TransformerLens does, a Hugging Face folder, or a loaded Hugging
Face model; a folder in the format of Baichuan-M1-14B, the public model with KV shift, loads without running the code in it.
"""

from kvlens.components.attention_variant import AttentionVariantConfig, Augmented, Negative, Regularised, Ridge
from kvlens.model.activations import (
    HeadsRead,
    StreamReading,
    attention_parts,
    direct_path,
    head_hooks,
    head_matrices,
    heads_per_layer,
    joined_heads,
    output_weights,
    read_attention,
    read_attention_and_scale,
    read_stream,
    recurrent_layers,
    visit_heads,
)
from kvlens.model.config import HookedKVTransformerConfig, KVShiftConfig
from kvlens.model.protocol import Block, Ends, HeadMatrices, KVModel, LinearNorm, Norms, Part
from kvlens.model.regressor import HookedKVRegressor
from kvlens.model.streaming import asks_for_positions_alone, run_in_segments
from kvlens.model.transformer import HookedKVTransformer

__all__ = [
    "AttentionVariantConfig",
    "Augmented",
    "Block",
    "Ends",
    "HeadMatrices",
    "HeadsRead",
    "HookedKVRegressor",
    "HookedKVTransformer",
    "HookedKVTransformerConfig",
    "KVModel",
    "KVShiftConfig",
    "LinearNorm",
    "Negative",
    "Norms",
    "Part",
    "Regularised",
    "Ridge",
    "StreamReading",
    "asks_for_positions_alone",
    "attention_parts",
    "direct_path",
    "head_hooks",
    "head_matrices",
    "heads_per_layer",
    "joined_heads",
    "output_weights",
    "read_attention",
    "read_attention_and_scale",
    "read_stream",
    "recurrent_layers",
    "run_in_segments",
    "visit_heads",
]

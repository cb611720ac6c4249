"""Tiny random models of Transformers' own classes, one row each, and a tiny tokenizer: made in memory, without downloads.

Sizes differ on every axis where the architecture allows it, and every parameter is drawn away from its initial value,
so that a swapped axis, a forgotten bias or a norm weight taken as one changes the logits.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from precision import LAW
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from kvlens.pretrained.rwkv import MODEL_TYPE

N_LAYERS, D_VOCAB, N_CTX, WINDOW = 3, 307, 96, 5
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWED = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING]}
ROPE = {"rope_type": "default", "rope_theta": 1234.0}
LINEAR_ROPE = {"rope_type": "linear", "factor": 8.0, "rope_theta": 99.0}
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "truncate": False}

SIZES = {"hidden_size": 24, "num_hidden_layers": N_LAYERS, "max_position_embeddings": N_CTX}
GQA = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 37, "rope_parameters": ROPE}
MHA = {**GQA, "num_key_value_heads": 6}
HALF_ROTATED = {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}
MOE = {**GQA, "hidden_size": 48, "intermediate_size": 32, "num_experts_per_tok": 2}  # grouped products want rows of 16 bytes
GEMMA = {**GQA, "head_dim": 10}
GEMMA_2 = {**GEMMA, **WINDOWED, "query_pre_attn_scalar": 7}
GPT2 = {"n_embd": 20, "n_layer": N_LAYERS, "n_head": 5, "n_positions": N_CTX, "n_ctx": N_CTX, "n_inner": 33}
NEOX = {**SIZES, "hidden_size": 40, "num_attention_heads": 5, "intermediate_size": 37}
NEO = {"num_layers": 2, "num_heads": 6, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW}

Rows = dict[str, tuple[str, dict[str, Any]]]
"""By name: Transformers' model type, and arguments of its configuration."""

ON_BOTH: Rows = {
    "gpt2": ("gpt2", GPT2),
    "gpt_neox": ("gpt_neox", {**NEOX, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}}),
    "gptj": ("gptj", {"n_embd": 24, "n_layer": N_LAYERS, "n_head": 3, "rotary_dim": 4, "n_positions": N_CTX, "n_inner": 33}),
    "opt": ("opt", {**SIZES, "num_attention_heads": 6, "ffn_dim": 33, "word_embed_proj_dim": 24}),
    "llama": ("llama", GQA),
    "mistral": ("mistral", {**GQA, "head_dim": 10, "sliding_window": WINDOW}),
    "mixtral": ("mixtral", {**MOE, "num_local_experts": 5}),
    "qwen2": ("qwen2", {**GQA, **WINDOWED, "use_sliding_window": True}),
    "qwen3": ("qwen3", {**GQA, "head_dim": 10}),
    "gemma": ("gemma", GEMMA),
    "gemma2": ("gemma2", {**GEMMA_2, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0}),
    "gemma3": ("gemma3_text", {**GEMMA_2, "rope_parameters": {SLIDING: ROPE, FULL: LINEAR_ROPE}}),
    "gpt_oss": ("gpt_oss", {**MOE, **WINDOWED, "rope_parameters": YARN, "num_local_experts": 5, "head_dim": 12}),
    "phi": ("phi", {**MHA, **HALF_ROTATED}),
    "phi3": ("phi3", {**GQA, "sliding_window": WINDOW}),
    "olmo": ("olmo", MHA),
    "olmo2": ("olmo2", MHA),
    "olmo3": ("olmo3", {**GQA, **WINDOWED}),
    "olmoe": ("olmoe", {**MOE, "num_experts": 5}),
}
ON_HOOKED_ALONE: Rows = {
    "gpt_neo": ("gpt_neo", {**NEO, "hidden_size": 24, "max_position_embeddings": N_CTX, "intermediate_size": 33}),
    "bloom": ("bloom", {"hidden_size": 24, "n_layer": N_LAYERS, "n_head": 4}),
    "apertus": ("apertus", GQA),
}

MOE_OF_8 = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 5}
LINEAR_FIRST = {"layer_types": ["linear_attention", FULL, "linear_attention"]}
MAMBA_2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 12,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
DELTA = {
    **GQA,
    **LINEAR_FIRST,
    "head_dim": 8,  # a quarter of it is rotated
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}
KIMI = {
    **MHA,
    **LATENT,
    **LINEAR_FIRST,
    **MOE_OF_8,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_num_heads": 3,
    "linear_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "num_local_experts": 4,
}
MINIMAX = {
    **MOE,
    **LINEAR_FIRST,
    "hidden_size": 24,
    "head_dim": 8,
    "num_local_experts": 5,
    "block_size": 4,
    "mlp_beta_factor": 0.5,
}
GRANITE_HYBRID = {
    **GQA,
    **MAMBA_2,
    "layer_types": ["mamba", "attention", "mamba"],
    "position_embedding_type": "rope",
    "shared_intermediate_size": 20,
    "num_local_experts": 0,
    "attention_multiplier": 0.3,
}
NEMOTRON_H = {
    **{name: size for name, size in GQA.items() if name not in ("num_hidden_layers", "rope_parameters")},
    **MOE_OF_8,
    "layers_block_type": ["linear_attention", FULL, "linear_attention", "moe", "mlp"],
    "head_dim": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 6,
    "n_groups": 2,
    "chunk_size": 8,
    "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 8,
}
DEEPSEEK = {
    **MHA,
    **LATENT,
    **MOE_OF_8,
    "q_lora_rank": 8,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FALCON_H1 = {
    **GQA,
    **MAMBA_2,
    "head_dim": 4,
    "mamba_d_ssm": 48,
    "attention_in_multiplier": 0.9,
    "key_multiplier": 0.6,
    "ssm_in_multiplier": 1.2,
    "ssm_multipliers": [1.2, 1.5, 2.0, 2.0, 0.3],
    "mlp_multipliers": [0.8, 1.1],
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
}
GRANITE = {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "logits_scaling": 2.0}

JAMBA = {
    **MOE,
    **{"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4},
    **{"mamba_d_state": 6, "mamba_expand": 1, "mamba_dt_rank": 5},
}
HYBRIDS: Rows = {
    "bamba": ("bamba", {**GQA, **MAMBA_2, "attn_layer_indices": [1]}),
    "granite_hybrid": ("granitemoehybrid", GRANITE_HYBRID),
    "jamba": ("jamba", JAMBA),
    "kimi_linear": ("kimi_linear", KIMI),
    "minimax": ("minimax", MINIMAX),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_next": ("qwen3_next", {**DELTA, **MOE_OF_8, "num_experts": 4, "shared_expert_intermediate_size": 8}),
    "nemotron_h": ("nemotron_h", NEMOTRON_H),
    "olmo_hybrid": ("olmo_hybrid", {**DELTA, "hidden_size": 48, "linear_allow_neg_eigval": True}),
}
"""Of the bridge alone. Layers 0 and 2 are recurrent, layer 1 is attention; layers 3 and 4 of Nemotron-H: experts and an MLP."""
MAMBA_ALONE = {"num_heads": 4, "head_dim": 12, "state_size": 6, "n_groups": 2}
MAMBA_1 = {"hidden_size": 24, "num_hidden_layers": N_LAYERS, "state_size": 6, "expand": 2, "time_step_rank": 5}
PURELY_RECURRENT: Rows = {
    "mamba2": ("mamba2", {"hidden_size": 24, "num_hidden_layers": N_LAYERS, **MAMBA_ALONE}),
    "mamba": ("mamba", MAMBA_1),
    "falcon_mamba": ("falcon_mamba", MAMBA_1),
}
"""Of the bridge alone: no layer is attention."""
RWKV_SIZES = {"hidden_size": 24, "num_hidden_layers": N_LAYERS, "num_heads": 4, "value_dim": 20, "intermediate_size": 37}
RWKV: Rows = {
    name: (MODEL_TYPE, {**RWKV_SIZES, "version": version, "mix_rank": 3, "decay_rank": 5})
    for name, version in (("rwkv5_1", "5.1"), ("rwkv5_2", "5.2"), ("rwkv6", "6"))
}
"""Of the bridge alone: no layer is attention, MLPs shift, and no cache holds the states but the bridge's."""
ON_BRIDGE_ALONE: Rows = {
    **HYBRIDS,
    **PURELY_RECURRENT,
    **RWKV,
    "smollm3": ("smollm3", {**GQA, "no_rope_layers": [1, 0, 1]}),
    "lfm2": ("lfm2", {**GQA, "layer_types": ["conv", FULL, "conv"], "conv_L_cache": 4, "block_multiple_of": 4}),
    "falcon_h1": ("falcon_h1", {**FALCON_H1, "attention_out_multiplier": 0.7, "ssm_out_multiplier": 1.3}),
    "falcon_h1_direct": ("falcon_h1", FALCON_H1),  # whose attention and states write to the residual stream directly
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "qwen3_moe": ("qwen3_moe", {**GQA, **MOE_OF_8, "head_dim": 10, "num_experts": 4}),
    "glm": ("glm", {**GQA, **HALF_ROTATED, "head_dim": 12}),
    "glm4": ("glm4", {**GQA, **HALF_ROTATED, "head_dim": 12}),
    "granite": ("granite", {**GQA, **GRANITE}),
    "starcoder2": ("starcoder2", {**GQA, "sliding_window": WINDOW}),
    "seed_oss": ("seed_oss", {**GQA, "head_dim": 10}),
}
ROWS: Rows = {**ON_BOTH, **ON_HOOKED_ALONE, **ON_BRIDGE_ALONE}
KINDS = [*ON_BOTH, *ON_HOOKED_ALONE]
"""What HookedKVTransformer loads: one model of each architecture."""


def law_of(model_type: str) -> float:
    """How near another implementation must come in float64: Transformers' Bloom has eight digits of the root of 2 / pi."""
    return 1e-9 if model_type == "bloom" else LAW


def tiny_hf_model(name: str, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Return a random causal language model, in eval mode, the same for the same seed.

    Args:
        name: a key of ``ROWS``, or another model type of transformers, which gets the usual sizes.
        seed: of the generator that draws every parameter; the global generator is left as it was.
        config: replaces arguments of the transformers config.
    """
    model_type, arguments = ROWS.get(name, (name, GQA))
    special = {"vocab_size": D_VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    hf_config = AutoConfig.for_model(model_type, **copy.deepcopy({**special, **arguments, **config}))
    with torch.random.fork_rng(devices=[]):
        return with_drawn_weights(AutoModelForCausalLM.from_config(hf_config), seed)


@torch.no_grad()
def with_drawn_weights(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The model in eval mode with every parameter drawn: norm weights near 1, where they start there, all others around 0.

    The numbers are float32's in any dtype, so that models built in float64 have the same weights.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.eval().named_parameters():
        center = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0
        if name.endswith(("dt_bias", "dt_proj.bias")):
            center = -3.0  # a trained state forgets a token after ten others or so, one around 0 at once
        parameter.copy_(center + 0.2 * torch.FloatTensor(parameter.shape).normal_(generator=generator))
    return model


def tiny_tokenizer(name: str = "tiny-tokenizer") -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer made in memory (fewer than ``D_VOCAB`` tokens, BOS = EOS = id 0)."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=D_VOCAB - 7,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sentences = ["the cat sat on the mat", "the dog sat on the log", "a shift of keys and values, by one"]
    backend.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|endoftext|>", name_or_path=name
    )


def tiny_hf_folder(folder: Path) -> Path:
    """A tiny GPT-2 and its tokenizer in ``folder``."""
    tiny_hf_model("gpt2").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder

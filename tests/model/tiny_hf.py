"""Tiny random Hugging Face models and a tiny tokenizer, made in memory, for tests that must not download anything.

Sizes differ on every axis where the architecture allows it, and every parameter is drawn away from its initial value,
so that a swapped axis, a forgotten bias or a norm weight taken as one changes the logits.
"""

import copy
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

D_VOCAB = 307
N_LAYERS = 3
N_CTX = 29
_WIDE = {"hidden_size": 24, "num_hidden_layers": N_LAYERS, "max_position_embeddings": N_CTX}
_GQA = {**_WIDE, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 37}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1234.0}}
_MOE = {**_GQA, **_ROPE, "hidden_size": 48, "intermediate_size": 32, "num_experts_per_tok": 2}  # its kernels want 16s
_NEO = {"num_heads": 6, "num_layers": N_LAYERS - 1, "attention_types": [[["global", "local"], 1]], "window_size": 5}
_GPTJ = {"n_embd": 24, "n_layer": N_LAYERS, "n_head": 3, "rotary_dim": 4, "n_positions": N_CTX, "n_inner": 33}
_NEOX_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1234.0, "partial_rotary_factor": 0.25}}
_NEOX = {**_WIDE, "hidden_size": 40, "num_attention_heads": 5, "intermediate_size": 37, **_NEOX_ROPE}

_GEMMA = {**_GQA, "head_dim": 10, "hidden_size": 24}
_GEMMA_2 = {**_GEMMA, "query_pre_attn_scalar": 7, "sliding_window": 5}
_GEMMA_3_ROPE = {
    "rope_parameters": {
        "sliding_attention": _ROPE["rope_parameters"],
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 99.0},
    }
}
_GPT_OSS_ROPE = {
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1234.0,
        "original_max_position_embeddings": 8,
        "truncate": False,
    }
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 20, "n_layer": N_LAYERS, "n_head": 5, "n_positions": N_CTX, "n_ctx": N_CTX}),
    "gpt2_n_inner": ("GPT2", {"n_embd": 20, "n_layer": N_LAYERS, "n_head": 5, "n_positions": N_CTX, "n_inner": 33}),
    "neox": ("GPTNeoX", {**_NEOX, "use_parallel_residual": True}),
    "neox_sequential": ("GPTNeoX", {**_NEOX, "use_parallel_residual": False}),
    "llama": ("Llama", {**_GQA, **_ROPE}),
    "llama_mha": ("Llama", {**_GQA, **_ROPE, "num_key_value_heads": 6}),
    "llama_tied": ("Llama", {**_GQA, **_ROPE, "tie_word_embeddings": True}),
    "llama_head_dim": ("Llama", {**_GQA, **_ROPE, "head_dim": 10}),
    "qwen2": ("Qwen2", {**_GQA, **_ROPE}),
    "qwen3": ("Qwen3", {**_GQA, **_ROPE, "head_dim": 10}),
    "gpt_neo": ("GPTNeo", {**_NEO, "hidden_size": 24, "max_position_embeddings": N_CTX, "intermediate_size": 33}),
    "gptj": ("GPTJ", _GPTJ),
    "opt": ("OPT", {**_WIDE, "num_attention_heads": 6, "ffn_dim": 33, "word_embed_proj_dim": 24}),
    "bloom": ("Bloom", {"hidden_size": 24, "n_layer": N_LAYERS, "n_head": 4}),
    "phi3": ("Phi3", {**_GQA, **_ROPE}),
    "mistral": ("Mistral", {**_GQA, **_ROPE, "head_dim": 10, "sliding_window": 5}),
    "mixtral": ("Mixtral", {**_MOE, "num_local_experts": 3}),
    "olmoe": ("Olmoe", {**_MOE, "num_experts": 3}),
    "olmo3": ("Olmo3", {**_GQA, "sliding_window": 5}),
    "gemma": ("Gemma", {**_GEMMA, **_ROPE}),
    "gemma_2": ("Gemma2", {**_GEMMA_2, **_ROPE}),
    "gemma_3": ("Gemma3", {**_GEMMA_2, **_GEMMA_3_ROPE}),
    "olmo": ("Olmo", {**_GQA, **_ROPE, "num_key_value_heads": 6, "clip_qkv": 0.8}),
    "olmo2": ("Olmo2", {**_GQA, **_ROPE, "num_key_value_heads": 6}),
    "phi": (
        "Phi",
        {**_GQA, "num_key_value_heads": 6, "rope_parameters": {**_ROPE["rope_parameters"], "partial_rotary_factor": 0.5}},
    ),
    "gptoss": ("GptOss", {**_MOE, **_GPT_OSS_ROPE, "num_local_experts": 3, "head_dim": 8, "sliding_window": 5}),
    "apertus": ("Apertus", {**_GQA, **_ROPE}),
}
"""Kind -> (prefix of the transformers classes, config arguments)."""


def tiny_hf_model(kind: str, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Return a random causal language model of one of ``KINDS``, in eval mode, the same for the same seed.

    Args:
        kind: a key of ``KINDS``.
        seed: of the generator that draws every parameter; the global generator is left as it was.
        config: replaces arguments of the transformers config.
    """
    prefix, arguments = KINDS[kind]
    special = {"vocab_size": D_VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    hf_config = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")(
        **copy.deepcopy({**arguments, **special, **config})
    )
    name = f"{prefix}LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM"
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, name)(hf_config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            center = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0  # norm weights stay near 1
            parameter.copy_(center + 0.2 * torch.randn(parameter.shape, generator=generator))
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

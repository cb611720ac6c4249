"""Which fields of a Hugging Face configuration are supported; any other field with a non-default value raises an error.

The translation reads some fields of a configuration: a model whose logits depend on an ignored
field would be converted to a different model. So each field is one of three: it does not affect logits (``IRRELEVANT``), it is
supported for this architecture (``HONORED``, by :mod:`kvlens.base.families`), or it must have
the value that the converted model implies. Fields added by later releases of transformers are of the third kind until they are
classified.
"""

from typing import Any

import transformers
from transformers import PreTrainedConfig

from kvlens.base.rope_parameters import refused

_OF_TRAINING = (
    "attention_dropout attn_pdrop classifier_dropout dropout embd_pdrop embed_dropout hidden_dropout init_std "
    "initializer_range layerdrop resid_dropout resid_pdrop router_aux_loss_coef router_jitter_noise "
)
_OF_GENERATING_AND_OTHER_HEADS = (
    "add_cross_attention bos_token_id eos_token_id is_decoder output_router_logits pad_token_id pretraining_tp "
    "reorder_and_upcast_attn summary_activation summary_first_dropout summary_proj_to_labels summary_type "
    "summary_use_proj use_cache "
)
_READ_INTO_OTHERS = "attention_types max_window_layers original_max_position_embeddings use_sliding_window "
IRRELEVANT = frozenset(PreTrainedConfig().to_dict()) | frozenset(
    (_OF_TRAINING + _OF_GENERATING_AND_OTHER_HEADS + _READ_INTO_OTHERS).split()
)
"""Fields that do not affect the logits of a forward pass."""

_SIZES = "vocab_size hidden_size num_hidden_layers num_attention_heads max_position_embeddings tie_word_embeddings "
_GPT = "vocab_size n_embd n_layer n_head n_positions tie_word_embeddings n_inner activation_function layer_norm_epsilon "
_LLAMA = _SIZES + "num_key_value_heads intermediate_size hidden_act rms_norm_eps rope_parameters "
_LAYER_TYPES = "layer_types sliding_window "
_GEMMA_2 = (
    _LLAMA.replace("hidden_act ", "")
    + _LAYER_TYPES
    + ("attention_bias head_dim hidden_activation query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping ")
)

HONORED: dict[str, frozenset[str]] = {
    architecture: frozenset(names.split())
    for architecture, names in {
        "ApertusForCausalLM": _LLAMA + "attention_bias head_dim",
        "BloomForCausalLM": "vocab_size hidden_size n_layer n_head layer_norm_epsilon tie_word_embeddings",
        "GemmaForCausalLM": _LLAMA + "attention_bias head_dim",
        "Gemma2ForCausalLM": _GEMMA_2,
        "Gemma3ForCausalLM": _GEMMA_2.replace("attn_logit_softcapping ", "") + "_sliding_window_pattern",
        "GPT2LMHeadModel": _GPT + "scale_attn_weights scale_attn_by_inverse_layer_idx",
        "GPTJForCausalLM": _GPT + "rotary_dim",
        "GPTNeoForCausalLM": "vocab_size hidden_size num_layers num_heads max_position_embeddings tie_word_embeddings "
        "intermediate_size window_size activation_function layer_norm_epsilon attention_layers",
        "GPTNeoXForCausalLM": _SIZES + "intermediate_size hidden_act layer_norm_eps rope_parameters use_parallel_residual",
        "GptOssForCausalLM": _LLAMA + _LAYER_TYPES + "attention_bias head_dim num_local_experts num_experts_per_tok",
        "LlamaForCausalLM": _LLAMA + "attention_bias head_dim",
        "MistralForCausalLM": _LLAMA + "head_dim sliding_window",
        "MixtralForCausalLM": _LLAMA + "head_dim sliding_window num_local_experts num_experts_per_tok",
        "OPTForCausalLM": _SIZES + "ffn_dim activation_function",
        "OlmoForCausalLM": _LLAMA.replace("rms_norm_eps ", "") + "attention_bias clip_qkv",
        "Olmo2ForCausalLM": _LLAMA + "attention_bias",
        "Olmo3ForCausalLM": _LLAMA + _LAYER_TYPES + "attention_bias",
        "OlmoeForCausalLM": _LLAMA + "attention_bias num_experts num_experts_per_tok norm_topk_prob clip_qkv",
        "PhiForCausalLM": _LLAMA.replace("rms_norm_eps", "layer_norm_eps"),
        "Phi3ForCausalLM": _LLAMA + "head_dim sliding_window",
        "Qwen2ForCausalLM": _LLAMA + _LAYER_TYPES + "head_dim",
        "Qwen3ForCausalLM": _LLAMA + _LAYER_TYPES + "attention_bias head_dim",
    }.items()
}
"""Fields that reach the converted model, whatever their value; what no value of them could say is refused where it is read."""

UNDECLARED = ("head_dim",)
"""What a modeling file with rotary positions reads although the class of its configuration does not declare it."""


def check_fields(hf_config: Any, architecture: str) -> None:
    """Raise KVLensError, naming the field, if a field has a value that the converted model would ignore."""
    values, default = hf_config.to_dict(), getattr(transformers, architecture).config_class().to_dict()
    undeclared = UNDECLARED if "rope_parameters" in default else ()
    own = {
        "head_dim": (hf_config.hidden_size // hf_config.num_attention_heads, ", hidden_size / num_attention_heads,"),
        "word_embed_proj_dim": (hf_config.hidden_size, ", its hidden_size,"),
    }
    if architecture.startswith("Olmo") and hf_config.hidden_size % hf_config.num_attention_heads:
        heads, why = hf_config.num_attention_heads, f"hidden_size {hf_config.hidden_size} is not a multiple of it"
        raise refused(architecture, "num_attention_heads", heads, why)
    for name in (n for n in values if n in default or n in undeclared):
        if name in IRRELEVANT or name in HONORED[architecture]:
            continue
        expected, source = own.get(name, (default.get(name), ""))
        if values[name] != expected and not (values[name] is None and name in own):
            raise refused(architecture, name, values[name], f"only {expected!r}{source} can be expressed")

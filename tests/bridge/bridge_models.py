"""Tiny random models of Transformers' own classes, with sizes that differ and weights large enough for a prompt to matter."""

import copy
from pathlib import Path

import torch
import transformers as tf
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from kvlens import HookedKVTransformer, KVTransformerBridge, convert_prompt
from kvlens.model import head_hooks

D_VOCAB = 53
N_CTX = 96
WINDOW = 6
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SIZES = dict(num_hidden_layers=3, hidden_size=24, vocab_size=D_VOCAB)
COMMON = dict(
    **SIZES,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=4,
    intermediate_size=20,
    max_position_embeddings=N_CTX,
)
WITHOUT_D_HEAD = {name: size for name, size in COMMON.items() if name != "head_dim"}
SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
GPT2 = dict(n_layer=3, n_head=3, n_embd=12, n_positions=N_CTX, n_ctx=N_CTX, vocab_size=D_VOCAB)
ROPE = dict(rope_type="default", rope_theta=10000.0)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2, rope_parameters=ROPE)
LINEAR_FIRST = ["linear_attention", "full_attention", "linear_attention"]
HYBRID = dict(
    **{**COMMON, "head_dim": 8},  # a quarter of it is rotated
    layer_types=LINEAR_FIRST,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    linear_conv_kernel_dim=4,
)
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8)
KIMI = dict(
    **{name: size for name, size in COMMON.items() if name not in ("head_dim", "num_key_value_heads")},
    num_key_value_heads=6,
    layer_types=LINEAR_FIRST,
    mlp_layer_types=["dense", "sparse", "sparse"],
    linear_num_heads=3,
    linear_head_dim=6,
    linear_conv_kernel_dim=4,
    kv_lora_rank=10,
    qk_nope_head_dim=3,
    qk_rope_head_dim=4,
    v_head_dim=5,
    num_local_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    **SPECIAL,
)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=12, mamba_d_state=6, mamba_n_groups=2, mamba_expand=2, mamba_chunk_size=8)
FALCON_H1 = dict(
    mamba_d_ssm=48,
    attention_in_multiplier=0.9,
    key_multiplier=0.6,
    ssm_in_multiplier=1.2,
    ssm_multipliers=[1.2, 1.5, 2.0, 2.0, 0.3],
    mlp_multipliers=[0.8, 1.1],
    embedding_multiplier=2.0,
    lm_head_multiplier=0.5,
)
HYBRIDS = {
    "bamba": lambda: tf.BambaForCausalLM(tf.BambaConfig(**{**COMMON, "head_dim": 4}, **MAMBA, attn_layer_indices=[1])),
    "granite_hybrid": lambda: tf.GraniteMoeHybridForCausalLM(
        tf.GraniteMoeHybridConfig(
            **WITHOUT_D_HEAD,
            **MAMBA,
            layer_types=["mamba", "attention", "mamba"],
            position_embedding_type="rope",
            shared_intermediate_size=20,
            num_local_experts=0,
            attention_multiplier=0.3,
        )
    ),
    "kimi_linear": lambda: tf.KimiLinearForCausalLM(tf.KimiLinearConfig(**KIMI)),
    "minimax": lambda: tf.MiniMaxForCausalLM(
        tf.MiniMaxConfig(**{**COMMON, "head_dim": 8}, **EXPERTS, layer_types=LINEAR_FIRST, block_size=4, mlp_beta_factor=0.5)
    ),
    "qwen3_5": lambda: tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**HYBRID)),
    "qwen3_next": lambda: tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**HYBRID, **MIXTURE)),
    "nemotron_h": lambda: tf.NemotronHForCausalLM(
        tf.NemotronHConfig(
            **{name: size for name, size in COMMON.items() if name != "num_hidden_layers"},
            layers_block_type=["linear_attention", "full_attention", "linear_attention", "moe", "mlp"],
            mamba_num_heads=4,
            mamba_head_dim=12,
            ssm_state_size=6,
            n_groups=2,
            chunk_size=8,
            n_routed_experts=4,
            moe_intermediate_size=8,
            moe_shared_expert_intermediate_size=8,
        )
    ),
    "olmo_hybrid": lambda: tf.OlmoHybridForCausalLM(
        tf.OlmoHybridConfig(**{**HYBRID, "hidden_size": 48}, pad_token_id=0, linear_allow_neg_eigval=True, rope_parameters=ROPE)
    ),
}
"""Models with recurrent layers: 0 and 2; layer 1 is attention. Nemotron-H's layers 3 and 4 are experts and an MLP alone."""
FAMILIES = {
    **HYBRIDS,
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON, rope_parameters=LLAMA3)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**COMMON)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**COMMON, sliding_window=WINDOW, layer_types=KINDS, query_pre_attn_scalar=4)
    ),
    "gpt_oss": lambda: tf.GptOssForCausalLM(tf.GptOssConfig(**COMMON, **EXPERTS, sliding_window=WINDOW, layer_types=KINDS)),
    "gpt_neox": lambda: tf.GPTNeoXForCausalLM(
        tf.GPTNeoXConfig(
            **{name: size for name, size in WITHOUT_D_HEAD.items() if name != "num_key_value_heads"}, **SPECIAL, rotary_pct=0.5
        )
    ),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**COMMON, sliding_window=WINDOW)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(
        tf.Qwen2Config(**WITHOUT_D_HEAD, use_sliding_window=True, sliding_window=WINDOW, layer_types=KINDS)
    ),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(
            **COMMON,
            sliding_window=WINDOW,
            layer_types=KINDS,
            query_pre_attn_scalar=4,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=20.0,
        )
    ),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**WITHOUT_D_HEAD, **SPECIAL, sliding_window=WINDOW)),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**WITHOUT_D_HEAD, **SPECIAL)),
    "smollm3": lambda: tf.SmolLM3ForCausalLM(tf.SmolLM3Config(**WITHOUT_D_HEAD, **SPECIAL, no_rope_layers=[1, 0, 1])),
    "lfm2": lambda: tf.Lfm2ForCausalLM(
        tf.Lfm2Config(
            **WITHOUT_D_HEAD, **SPECIAL, layer_types=["conv", "full_attention", "conv"], conv_L_cache=4, block_multiple_of=4
        )
    ),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2)),
    "falcon_h1": lambda: tf.FalconH1ForCausalLM(
        tf.FalconH1Config(**COMMON, **SPECIAL, **MAMBA, **FALCON_H1, attention_out_multiplier=0.7, ssm_out_multiplier=1.3)
    ),
    "deepseek_v3": lambda: tf.DeepseekV3ForCausalLM(
        tf.DeepseekV3Config(
            **{**WITHOUT_D_HEAD, "num_key_value_heads": 6},
            **SPECIAL,
            kv_lora_rank=10,
            q_lora_rank=8,
            qk_nope_head_dim=3,
            qk_rope_head_dim=4,
            v_head_dim=5,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
        )
    ),
}

BY_ROTARY_PARTS = dict(**SPECIAL, partial_rotary_factor=0.5)
MORE_EXPERTS = dict(num_experts=4, num_experts_per_tok=2)
LIKE_THE_OTHERS = {
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**COMMON)),
    "phi": lambda: tf.PhiForCausalLM(tf.PhiConfig(**WITHOUT_D_HEAD, **BY_ROTARY_PARTS)),
    "olmo": lambda: tf.OlmoForCausalLM(tf.OlmoConfig(**WITHOUT_D_HEAD, **SPECIAL)),
    "olmo3": lambda: tf.Olmo3ForCausalLM(tf.Olmo3Config(**WITHOUT_D_HEAD, **SPECIAL, sliding_window=WINDOW, layer_types=KINDS)),
    "olmoe": lambda: tf.OlmoeForCausalLM(tf.OlmoeConfig(**WITHOUT_D_HEAD, **SPECIAL, **MORE_EXPERTS)),
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**COMMON, **MORE_EXPERTS, moe_intermediate_size=8)),
    "glm": lambda: tf.GlmForCausalLM(tf.GlmConfig(**COMMON, **BY_ROTARY_PARTS)),
    "glm4": lambda: tf.Glm4ForCausalLM(tf.Glm4Config(**COMMON, **BY_ROTARY_PARTS)),
    "granite": lambda: tf.GraniteForCausalLM(
        tf.GraniteConfig(
            **WITHOUT_D_HEAD,
            **SPECIAL,
            attention_multiplier=0.3,
            residual_multiplier=0.5,
            embedding_multiplier=2.0,
            logits_scaling=2.0,
        )
    ),
    "starcoder2": lambda: tf.Starcoder2ForCausalLM(tf.Starcoder2Config(**WITHOUT_D_HEAD, **SPECIAL, sliding_window=WINDOW)),
    "seed_oss": lambda: tf.SeedOssForCausalLM(tf.SeedOssConfig(**COMMON, **SPECIAL)),
}
"""Softmax families whose layers the bridge computes as those above: held by exactness, the table of families and, among
the slow tests, the names of hooks."""
PURELY_RECURRENT = {
    "mamba2": lambda: tf.Mamba2ForCausalLM(
        tf.Mamba2Config(
            **SPECIAL,
            hidden_size=24,
            num_hidden_layers=3,
            vocab_size=D_VOCAB,
            num_heads=4,
            head_dim=12,
            state_size=6,
            n_groups=2,
        )
    ),
}
"""Models none of whose layers is attention."""


FACTORLESS = {"falcon_h1_direct": lambda: tf.FalconH1ForCausalLM(tf.FalconH1Config(**COMMON, **SPECIAL, **MAMBA, **FALCON_H1))}
"""Falcon-H1 whose attention and states write to the residual stream directly."""
AS_THEY_ARE = dict(fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False)
"""A model on the other front end, without weight processing."""


def tiny(family: str, seed: int = 0) -> tf.PreTrainedModel:
    """A random model of a family, in evaluation mode."""
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = {**FAMILIES, **LIKE_THE_OTHERS, **PURELY_RECURRENT, **FACTORLESS}[family]().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_()
            elif name.endswith("dt_bias"):
                weight.sub_(3)  # a trained state forgets a token after ten others or so, an initial one at once
            elif name.endswith(("bias", "norm.weight")):
                weight.add_(torch.randn_like(weight), alpha=0.1)  # at 0 and 1, as they are drawn, they might as well be dropped
            elif weight.dim() > 1:
                weight.mul_(6)
    torch.random.set_rng_state(generator)
    return model


class TextLength(MiniMaxCache):
    """Transformers asks the cache of layer 0 how long the text is; here that is lightning attention, which keeps no keys."""

    def get_seq_length(self, layer_idx=0):
        return super().get_seq_length(max(layer_idx, 1))

    def get_mask_sizes(self, query_length, layer_idx):
        return super().get_mask_sizes(query_length, max(layer_idx, 1))


def cut_and_continued(model: tf.PreTrainedModel, prompt: Tensor, text: Tensor) -> Tensor:
    """Logits of a text that continues from Transformers' own cache of a prompt; Bamba's positions would ignore the cache."""
    if model.config.model_type == "mamba2":
        return model(text, cache_params=model(prompt, use_cache=True).cache_params, use_cache=True).logits
    cache = TextLength() if model.config.model_type == "minimax" else None
    cache = model(prompt, use_cache=True, past_key_values=cache).past_key_values
    positions = torch.arange(prompt.shape[1], prompt.shape[1] + text.shape[1])[None].expand(len(text), -1)
    return model(text, past_key_values=cache, use_cache=True, position_ids=positions).logits


def place_of(model, layer: int, head: int) -> tuple[str, int]:
    """Where the hook points of a head are, up to their last name, and its number there."""
    for name, n_heads in head_hooks(model, layer, "hook_z").items():
        if head < n_heads:
            return name.removesuffix("hook_z"), head
        head -= n_heads
    raise IndexError(head)


def some_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(D_VOCAB, shape, generator=torch.Generator().manual_seed(seed))


N_PROMPT, N_TEXT = 13, 9
PROMPT, TEXT = some_tokens(2, N_PROMPT), some_tokens(2, N_TEXT, seed=1)


def error_of_conversion(model: KVTransformerBridge) -> float:
    """By :func:`largest`, of the logits of TEXT under the converted PROMPT, against one pass over both."""
    whole = model(torch.cat([PROMPT, TEXT], dim=1))[:, N_PROMPT:]
    with model.kv_bias(convert_prompt(model, PROMPT)):
        return largest(model(TEXT).double(), whole.double())


def greedy_error(model: KVTransformerBridge, n: int, n_new: int, fwd_hooks: list, **options) -> Tensor:
    """By how much the logit of each greedy token under a converted prompt is below the largest behind the prompt itself and all
    that precedes the token, relative to the largest: ties differ by the passes' rounding."""
    prompts, texts = some_tokens(n, N_PROMPT), some_tokens(n, N_TEXT, seed=1)
    options = dict(max_new_tokens=n_new, do_sample=False, stop_at_eos=False, verbose=False, **options)
    with model.kv_bias(convert_prompt(model, prompts)), model.hooks(fwd_hooks=fwd_hooks):
        generated = model.generate(texts, **options)
    logits = model(torch.cat([prompts, generated], dim=1))[:, N_PROMPT + N_TEXT - 1 : -1]
    behind = logits.amax(dim=-1) - logits.gather(-1, generated[:, N_TEXT:, None])[..., 0]
    return behind / logits.abs().amax(dim=-1)


def on_both_front_ends(family: str, folder: Path) -> tuple[HookedKVTransformer, KVTransformerBridge]:
    """A model in float64, from one folder."""
    tiny(family).double().save_pretrained(folder)
    hooked = HookedKVTransformer.from_pretrained(folder, dtype=torch.float64, device="cpu", **AS_THEY_ARE)
    return hooked, KVTransformerBridge.boot_transformers(folder, dtype=torch.float64)


def largest(x: Tensor, y: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    assert x.shape == y.shape
    return float((x - y).abs().max() / y.abs().max()) if y.numel() else 0.0


class InFloat64(TorchFunctionMode):
    """Whatever asks for float32 gets float64: Transformers' norms, softmax and recurrences name float32 in any model."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        given = [*args, *(kwargs or {}).values()]
        wide = [torch.float64 if x is torch.float32 else x for x in given]
        return func(*wide[: len(args)], **dict(zip(kwargs or {}, wide[len(args) :], strict=True)))


@torch.no_grad()
def exact_logits(model: tf.PreTrainedModel, tokens: Tensor) -> Tensor:
    """The logits of one pass of Transformers in which everything is float64."""
    wide = copy.deepcopy(model).double()
    wide.config._experts_implementation = "eager"  # grouped products have no float64
    with InFloat64():
        return wide(tokens).logits


@torch.no_grad()
def rounding_of(model: tf.PreTrainedModel) -> float:
    """How far apart, by :func:`largest`, rounding alone may bring two float32 computations of the same logits or states.

    Each is off from float64 by about what one pass of Transformers is off, but the largest of a few thousand errors scatters by
    a factor of 2 from pass to pass: two passes, twice that error each. The model is not yet a bridge's.
    """
    tokens = some_tokens(2, 22, seed=2)
    return 4 * largest(model(tokens).logits.double(), exact_logits(model, tokens))


@torch.no_grad()
def rounding_in_nats(model: tf.PreTrainedModel) -> float:
    """The same for a log-probability after an intervention minus one before: each moves by at most twice what a logit does."""
    return 4 * rounding_of(model) * float(model(some_tokens(2, 22, seed=2)).logits.abs().max())

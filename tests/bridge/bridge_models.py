"""Families of the bridge's tests, on :mod:`tiny_hf`'s tiny random models."""

import torch
from precision import relative_error
from tiny_hf import D_VOCAB, ON_BOTH, ON_BRIDGE_ALONE, PURELY_RECURRENT, RWKV
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from kvlens import KVTransformerBridge, convert_prompt
from kvlens.model import head_hooks

_DENSE = [
    *("gemma", "phi", "olmo", "olmo3", "glm", "glm4", "granite", "starcoder2", "seed_oss", "mistral", "qwen2"),
    *("phi3", "smollm3", "gpt_neox", "qwen3"),
]
LIKE_THE_OTHERS = [*_DENSE, "mixtral", "olmoe", "qwen3_moe", "qwen3_next", "granite_hybrid", "bamba", "olmo_hybrid"]
"""Families whose layers the bridge computes as those of :data:`MODEL_TYPES`: held by the table of families and, among the slow
tests, by exactness and the names of hooks."""
_OTHERS = (*LIKE_THE_OTHERS, *PURELY_RECURRENT, *RWKV, "falcon_h1_direct")
FAMILIES = [name for name in (*ON_BRIDGE_ALONE, *ON_BOTH) if name not in _OTHERS]


class TextLength(MiniMaxCache):
    """Transformers asks the cache of layer 0 how long the text is; here that is lightning attention, which keeps no keys."""

    def get_seq_length(self, layer_idx=0):
        return super().get_seq_length(max(layer_idx, 1))

    def get_mask_sizes(self, query_length, layer_idx):
        return super().get_mask_sizes(query_length, max(layer_idx, 1))


def cut_and_continued(model: PreTrainedModel, prompt: Tensor, text: Tensor) -> Tensor:
    """Logits of a text that continues from Transformers' own cache of a prompt; Bamba's positions would ignore the cache."""
    if model.config.model_type in PURELY_RECURRENT:
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
    """Of the logits of TEXT under the converted PROMPT, against one pass over both."""
    whole = model(torch.cat([PROMPT, TEXT], dim=1))[:, N_PROMPT:]
    with model.kv_bias(convert_prompt(model, PROMPT)):
        return relative_error(model(TEXT), whole)


def greedy_error(model: KVTransformerBridge, n: int, n_new: int, fwd_hooks: list, seed: int = 0, **options) -> Tensor:
    """By how much the logit of each greedy token under a converted prompt is below the largest behind the prompt itself and all
    that precedes the token, relative to the largest: ties differ by the passes' rounding."""
    prompts, texts = some_tokens(n, N_PROMPT, seed=2 * seed), some_tokens(n, N_TEXT, seed=2 * seed + 1)
    options = dict(max_new_tokens=n_new, do_sample=False, stop_at_eos=False, verbose=False, **options)
    with model.kv_bias(convert_prompt(model, prompts)), model.hooks(fwd_hooks=fwd_hooks):
        generated = model.generate(texts, **options)
    logits = model(torch.cat([prompts, generated], dim=1))[:, N_PROMPT + N_TEXT - 1 : -1]
    behind = logits.amax(dim=-1) - logits.gather(-1, generated[:, N_TEXT:, None])[..., 0]
    return behind / logits.abs().amax(dim=-1)

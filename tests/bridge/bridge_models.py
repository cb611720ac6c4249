"""Families of the bridge's tests, and how exact their models are: on :mod:`tiny_hf`'s tiny random models."""

import copy

import torch
from tiny_hf import D_VOCAB, ON_BOTH, ON_BRIDGE_ALONE, PURELY_RECURRENT
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from kvlens import KVTransformerBridge, convert_prompt
from kvlens.model import head_hooks

LIKE_THE_OTHERS = ["gemma", "phi", "olmo", "olmo3", "olmoe", "qwen3_moe", "glm", "glm4", "granite", "starcoder2", "seed_oss"]
"""Softmax families whose layers the bridge computes as those of :data:`FAMILIES`: held by exactness, the table of families and,
among the slow tests, the names of hooks."""
_OTHERS = (*LIKE_THE_OTHERS, *PURELY_RECURRENT, "falcon_h1_direct")
FAMILIES = [name for name in (*ON_BRIDGE_ALONE, *ON_BOTH) if name not in _OTHERS]


class TextLength(MiniMaxCache):
    """Transformers asks the cache of layer 0 how long the text is; here that is lightning attention, which keeps no keys."""

    def get_seq_length(self, layer_idx=0):
        return super().get_seq_length(max(layer_idx, 1))

    def get_mask_sizes(self, query_length, layer_idx):
        return super().get_mask_sizes(query_length, max(layer_idx, 1))


def cut_and_continued(model: PreTrainedModel, prompt: Tensor, text: Tensor) -> Tensor:
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


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, with its weights as float64."""
    model.config._experts_implementation = "eager"  # grouped products have no float64
    return model.double()


@torch.no_grad()
def exact_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The logits of one pass of Transformers in which everything is float64, as :func:`in_float64` leaves the model."""
    with InFloat64():
        return in_float64(model)(tokens).logits


@torch.no_grad()
def rounding_of(model: PreTrainedModel) -> float:
    """How far apart, by :func:`largest`, rounding alone may bring two float32 computations of the same logits or states.

    Each is off from float64 by about what one pass of Transformers is off, but the largest of a few thousand errors scatters by
    a factor of 2 from pass to pass: two passes, twice that error each. The model is not yet a bridge's.
    """
    tokens = some_tokens(2, 22, seed=2)
    return 4 * largest(model(tokens).logits.double(), exact_logits(copy.deepcopy(model), tokens))


@torch.no_grad()
def rounding_in_nats(model: PreTrainedModel) -> float:
    """The same for a log-probability after an intervention minus one before: each moves by at most twice what a logit does."""
    return 4 * rounding_of(model) * float(model(some_tokens(2, 22, seed=2)).logits.abs().max())

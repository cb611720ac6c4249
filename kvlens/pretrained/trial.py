"""Does the converted model compute what transformers computes: a few tokens through both.

No list of configuration fields is complete. So transformers' own model, while it is in memory, runs a few tokens through as
many layers as are kept, and the model that was made of it has to give the same predictions, before a KV shift is added to it.
How far they may differ is measured on the spot: the same tokens run once more with every output of every submodule off by one
rounding, up or down. Over twelve architectures with random weights, two with huge activations, GPT-2's size, 24 layers and
one trained model, in float32, bfloat16 and float16, processed or not, the true difference was 0.07 to 1.03 of what that
changes. In half precision a rounding may send a token to another expert: there the median position counts, elsewhere the
worst.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from kvlens.base import HookedTransformerConfig
from kvlens.errors import KVLensError

N_TOKENS = 32
MARGIN = 4
"""How many times the measured effect of rounding is allowed."""
LEAST = 1e-4
"""What is always allowed: weight processing in float32, and sums of thousands of terms, round more than one operation does."""


class Trial(NamedTuple):
    """What transformers' model predicts on a few tokens.

    Attributes:
        tokens: the ids, drawn evenly from the vocabulary.
        logits: each position's, less their mean; float32, on the CPU.
        allowed: the relative difference (Euclidean, at one position) that rounding explains.
        position: which position counts, from 0 (the least difference) to 1 (the worst).
    """

    tokens: Int[Tensor, "1 pos"]
    logits: Float[Tensor, "pos d_vocab"]
    allowed: float
    position: float


@torch.no_grad()
def run_trial(hf_model: PreTrainedModel, layers: str, cfg: HookedTransformerConfig) -> Trial:
    """Let ``hf_model`` run tokens, twice; it is left as it is.

    Args:
        hf_model: the model that will be converted.
        layers: the name of its list of layers.
        cfg: of the converted one.
    """
    generator = torch.Generator().manual_seed(0)
    embedding = hf_model.get_input_embeddings().weight
    tokens = torch.randint(0, embedding.shape[0], (1, min(N_TOKENS, cfg.n_ctx)), generator=generator)
    eps = max(torch.finfo(embedding.dtype).eps, torch.finfo(cfg.dtype).eps)

    def off_by_one_rounding(module: torch.nn.Module, args: object, output: object) -> Tensor | None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        signs = 2 * torch.randint(0, 2, output.shape, generator=generator) - 1
        return output * (1 + eps * signs).to(output)

    modes = [(module, module.training) for module in hf_model.modules()]
    hf_model.eval()
    hooks = []
    stack = contextlib.ExitStack()
    try:
        stack.enter_context(_first_layers(hf_model, layers, cfg.n_layers))
        logits = _centered(hf_model(tokens.to(embedding.device), use_cache=False).logits[0])
        leaves = [module for module in hf_model.modules() if next(module.children(), None) is None]
        hooks = [module.register_forward_hook(off_by_one_rounding) for module in leaves]
        rounded = _centered(hf_model(tokens.to(embedding.device), use_cache=False).logits[0])
    finally:
        stack.close()
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
    position = 0.5 if cfg.num_experts and cfg.dtype not in (torch.float32, torch.float64) else 1.0
    return Trial(tokens, logits, max(LEAST, MARGIN * _difference(rounded, logits, position)), position)


@contextlib.contextmanager
def _first_layers(hf_model: Any, layers: str, n: int) -> Iterator[None]:
    """Inside, the model has its first ``n`` layers alone."""
    config = hf_model.config.get_text_config()
    n_before = config.num_hidden_layers
    if n == n_before:
        yield
        return
    name, _, last = layers.rpartition(".")
    holder = hf_model.get_submodule(name)
    before = getattr(holder, last)
    setattr(holder, last, before[:n])
    config.num_hidden_layers = n
    try:
        yield
    finally:
        setattr(holder, last, before)
        config.num_hidden_layers = n_before


def check_trial(trial: Trial, logits: Float[Tensor, "1 pos d_vocab"]) -> None:
    """Raise KVLensError unless ``logits``, the converted model's on the same tokens, are those of transformers' model."""
    difference = _difference(_centered(logits[0]), trial.logits, trial.position)
    if not difference <= trial.allowed:  # NaN is no agreement
        raise KVLensError(
            f"from_pretrained: the converted model does not compute what transformers computes: on {trial.tokens.shape[1]} "
            f"tokens the logits differ by {difference:.2g} of their size, where rounding explains {trial.allowed:.1g}. "
            "Probably a field of the configuration has an effect that is not known here; verify=False takes the model as it is"
        )


def _centered(logits: Float[Tensor, "pos d_vocab"]) -> Float[Tensor, "pos d_vocab"]:
    """What is left when a constant per position, which no probability sees, is taken away (a centered unembedding adds one)."""
    logits = logits.detach().float().cpu()
    return logits - logits.mean(dim=-1, keepdim=True)


def _difference(one: Float[Tensor, "pos d_vocab"], other: Float[Tensor, "pos d_vocab"], position: float) -> float:
    tiny = torch.finfo(torch.float32).tiny  # all logits alike: a model of zeros
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1).clamp_min(tiny)).quantile(position))

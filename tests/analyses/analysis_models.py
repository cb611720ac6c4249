"""A model whose results can be computed by hand, and the rows of the table of models that the analyses go through."""

import math

import torch

from kvlens import HookedKVTransformer, HookedKVTransformerConfig

VARIANTS = ["rope after", "rope before, no shift", "gqa decay", "learned, queries shifted"]
"""Rows of :mod:`small_models` that most analyses go through: positions, shift, grouped heads and decay one way each."""
LINEAR = [*VARIANTS, "gqa, taylor, values shifted", "no normalizer, keys shifted, rms"]
SOFTMAX = [f"softmax, {row}" for row in ("learned", "rotary, grouped", "shifted", "alibi")]


def pencil_model() -> HookedKVTransformer:
    """One head of width 1, phi = identity, no normalizer, all weights 1; token t is the number t + 1.

    The residual after attention is x_i + x_i (x_0^2 + ... + x_i^2), and the logits are a tenth of it, and 0.
    """
    model = HookedKVTransformer(
        HookedKVTransformerConfig(
            n_layers=1,
            d_model=1,
            d_head=1,
            n_ctx=9,
            d_vocab=2,
            attn_only=True,
            normalization_type=None,
            positional_embedding_type="none",
            attention="linear",
            feature_map="identity",
            normalizer="none",
            dtype=torch.float64,
            device="cpu",
        )
    ).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if "W_" in name else 0.0)
    model.W_E.copy_(torch.tensor([[1.0], [2.0]]))
    model.W_U.copy_(torch.tensor([[0.1, 0.0]], dtype=torch.float64))
    return model


PENCIL_PROMPT, PENCIL_TEXT = torch.tensor([0, 1]), torch.tensor([0, 1])
# with the prompt 1, 2 the text 1, 2 has residuals 1 + (1 + 4 + 1) = 7 and 2 + 2 (1 + 4 + 1 + 4) = 22,
# alone 1 + 1 = 2 and 2 + 2 (1 + 4) = 12; the prompt's bias is 1 + 4 = 5
PENCIL_WITH, PENCIL_WITHOUT = (0.7, 2.2), (0.2, 1.2)


def bernoulli_kl(a: float, b: float) -> float:
    """KL between softmax([a, 0]) and softmax([b, 0])."""
    p, q = 1 / (1 + math.exp(-a)), 1 / (1 + math.exp(-b))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def centered(logits: torch.Tensor) -> torch.Tensor:
    """Logits less their mean over the vocabulary: what direct logit attribution splits where no rival is given."""
    return logits - logits.mean(dim=-1, keepdim=True)


def tokens(pos: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 17, (pos,), generator=torch.Generator().manual_seed(seed))

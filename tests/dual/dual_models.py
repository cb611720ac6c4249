"""The models that the dual tests go through: one of each kind of attention that has a dual model, in float64."""

import small_models
import torch
from tiny_hf import tiny_hf_model

from kvlens import HookedKVTransformer

LINEAR = [
    "rope after",
    "rope before, no shift",
    "gqa, taylor, values shifted",
    "no normalizer, keys shifted, rms",
    "gqa decay",
    "learned, queries shifted",
    "augmented in parallel",
]
SOFTMAX = [f"softmax, {row}" for row in ("learned", "shifted, grouped", "alibi", "rotary", "sinks", "augmented in parallel")]


def model_named(name: str) -> HookedKVTransformer:
    """One of the rows above, or ``hf gpt2``, ``hf llama`` ..., ``zoo docs-linear`` ...; float64, without gradients."""
    if name.startswith("hf "):
        kind = name.removeprefix("hf ")
        model = HookedKVTransformer.from_pretrained(kind, hf_model=tiny_hf_model(kind), tokenizer=None, dtype="float64")
        return model.requires_grad_(False)
    if name.startswith("zoo "):
        return HookedKVTransformer.from_zoo(name.removeprefix("zoo "), dtype=torch.float64).requires_grad_(False)
    return small_models.sharp(name, gain=1)


def text_for(model: HookedKVTransformer, pos: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, model.cfg.d_vocab, (pos,), generator=torch.Generator().manual_seed(seed))

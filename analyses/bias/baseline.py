"""The bias of the prompt of which only what is always there is left: what "without the prompt" and "without this head" mean."""

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias, convert_prompt, counterfactuals

from ..sequences import begins_with_bos


def baseline_of(model: HookedKVTransformer, prompt: Int[Tensor, " prompt_pos"]) -> KVBias:
    """The baseline as a batch of one: BOS alone, the text standing where it stood, or nothing where there is no BOS."""
    gone = torch.ones(1, len(prompt), dtype=torch.bool)
    gone[:, : int(begins_with_bos(model, prompt))] = False
    return convert_prompt(model, counterfactuals(model, prompt, gone))


def has_baseline(bias: KVBias) -> bool:
    """Whether parts of the baseline can stand in for parts of ``bias``: not over random, Taylor or learned features."""
    return bias.features is None or bias.features.kind == "virtual_keys"

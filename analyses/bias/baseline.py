"""The baseline that "without the prompt" and "without this head" refer to: the bias of the prompt's BOS alone."""

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens import KVBias, KVModel, convert_prompt, counterfactuals

from ..sequences import begins_with_bos


def baseline_of(model: KVModel, prompt: Int[Tensor, " prompt_pos"]) -> KVBias:
    """The baseline as a batch of one: BOS alone, or nothing if there is no BOS, with the text at its original positions."""
    gone = torch.ones(1, len(prompt), dtype=torch.bool)
    gone[:, : int(begins_with_bos(model, prompt))] = False
    return convert_prompt(model, counterfactuals(model, prompt, gone))


def has_baseline(bias: KVBias) -> bool:
    """Whether parts of the baseline can replace parts of ``bias``: not with random, Taylor or learned features."""
    return bias.features is None or bias.features.kind == "virtual_keys"

"""How exact a converted prompt is on the bridge, next to Transformers' own cache: what tests and benchmark measure."""

import copy
from statistics import mean, median
from typing import NamedTuple

import torch
from bridge_models import N_PROMPT, N_TEXT, InFloat64, cut_and_continued, greedy_error, in_float64, rounding_of, some_tokens
from tiny_hf import tiny_hf_model
from torch import Tensor
from transformers import PreTrainedModel

from kvlens import KVTransformerBridge, convert_prompt
from kvlens.conversion import Counterfactuals

N_PAIRS = 4
FACTOR = 1.5
"""Ours is at most FACTOR times theirs, both against float64."""
CUT_AT_END, PADDED_FRONT = (0, 5, 2, 8), (4, 0, 3, 1)
"""Where there is padding: tokens missing at the end of each prompt, and padding in front of each text."""


class Errors(NamedTuple):
    """Relative errors of logits, against float64."""

    ours: float
    theirs: float
    whole: float


def plain_and_bridge(family: str, seed: int, dtype: torch.dtype) -> tuple[PreTrainedModel, KVTransformerBridge]:
    """The same tiny model twice, for :func:`measure`."""
    plain, held = (tiny_hf_model(family, seed).to(dtype) for _ in range(2))
    for model in (plain, held):
        model.config._experts_implementation = "eager"  # grouped products in half precision want rows of 16 bytes
    return plain, KVTransformerBridge.boot_transformers(held)


def measure(plain: PreTrainedModel, model: KVTransformerBridge, seed: int, padded: bool) -> Errors:
    """The three errors of a model of Transformers, and of a bridge with the same weights, on the texts with this seed."""
    prompts, texts = some_tokens(N_PAIRS, N_PROMPT, seed=2 * seed), some_tokens(N_PAIRS, N_TEXT, seed=2 * seed + 1)
    cut, front = (CUT_AT_END, PADDED_FRONT) if padded else ((0,) * N_PAIRS, (0,) * N_PAIRS)
    pairs = (
        [(prompts[row : row + 1, : N_PROMPT - cut[row]], texts[row : row + 1, front[row] :]) for row in range(N_PAIRS)]
        if padded
        else [(prompts, texts)]
    )
    exact, (whole, theirs, old) = in_float64(copy.deepcopy(plain)), ([], [], [])
    for prompt, text in pairs:
        both = torch.cat([prompt, text], dim=1)
        whole.append(plain(both).logits[:, prompt.shape[1] :])
        theirs.append(cut_and_continued(plain, prompt, text))
        with InFloat64():
            old.append(exact(both).logits[:, prompt.shape[1] :])
    real = torch.arange(N_TEXT) >= torch.tensor(front)[:, None]
    kept = torch.arange(N_PROMPT) < N_PROMPT - torch.tensor(cut)[:, None]
    bias = convert_prompt(model, Counterfactuals(prompts[0], prompts, kept, "closed") if padded else prompts)
    with model.kv_bias(bias):
        logits = model(texts, attention_mask=real.long()) if padded else model(texts)
    ours = [logits[row : row + 1, front[row] :] for row in range(N_PAIRS)] if padded else [logits]
    return Errors(*(relative_error(new, old) for new in (ours, theirs, whole)))


def greedy(plain: PreTrainedModel, model: KVTransformerBridge, seed: int, n_new: int = 64) -> tuple[int, int, int]:
    """Of greedy tokens generated under a converted prompt: how many there are, and how many are not the likeliest token of one
    pass over the prompt and all that precedes them: near-ties, within the rounding of two passes, and others."""
    error = greedy_error(model, N_PAIRS, n_new, [], seed)
    wrong = error > 2 * rounding_of(plain)
    return error.numel(), int(((error > 0) & ~wrong).sum()), int(wrong.sum())


def relative_error(new: list[Tensor], old: list[Tensor]) -> float:
    """||new - old|| / ||old|| over all logits."""
    a, b = (torch.cat([x.flatten() for x in parts]).double() for parts in (new, old))
    return float((a - b).norm() / b.norm())


def excess(errors: list[Errors], dtype: torch.dtype) -> float:
    """Our errors over their bound: of the mean ratio in float32; in half precision, where a rounding may send a token to
    another expert and one such model outweighs the rest, of the median ratio."""
    return (mean if dtype == torch.float32 else median)(error.ours / error.theirs for error in errors) / FACTOR

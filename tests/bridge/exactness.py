"""How exact a converted prompt is on the bridge, next to Transformers' own cache: what tests and benchmark measure."""

from typing import NamedTuple

import torch
from bridge_models import N_PROMPT, N_TEXT, cut_and_continued, some_tokens
from precision import float64
from tiny_hf import tiny_hf_model
from torch import Tensor
from transformers import PreTrainedModel

from kvlens import KVTransformerBridge, convert_prompt
from kvlens.conversion import Counterfactuals

N_PAIRS = 4
CUT_AT_END, PADDED_FRONT = (0, 5, 2, 8), (4, 0, 3, 1)
"""Where there is padding: tokens missing at the end of each prompt, and padding in front of each text."""


class Models(NamedTuple):
    """The same tiny model three times; the exact one is float64, with the weights of the others."""

    plain: PreTrainedModel
    exact: PreTrainedModel
    bridge: KVTransformerBridge


class Logits(NamedTuple):
    """Of each text behind its prompt."""

    exact: list[Tensor]
    ours: list[Tensor]
    theirs: list[Tensor]
    whole: list[Tensor]


@torch.no_grad()
def models_of(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Models:
    """The models of a family for :func:`logits_of`."""
    plain, held = (tiny_hf_model(family, seed).to(dtype) for _ in range(2))
    for model in (plain, held) if dtype != torch.float32 else ():
        model.config._experts_implementation = "eager"  # grouped products in half precision want rows of 16 bytes
    with float64():
        exact = tiny_hf_model(family, seed)
        for wide, weight in zip(exact.parameters(), plain.parameters(), strict=True):
            wide.copy_(weight)
    return Models(plain, exact, KVTransformerBridge.boot_transformers(held, verify=False))


@torch.no_grad()
def logits_of(models: Models, seed: int, padded: bool) -> Logits:
    """Logits of the four texts with this seed: in float64; under a converted prompt; from Transformers' cache; in one pass."""
    prompts, texts = some_tokens(N_PAIRS, N_PROMPT, seed=2 * seed), some_tokens(N_PAIRS, N_TEXT, seed=2 * seed + 1)
    cut, front = (CUT_AT_END, PADDED_FRONT) if padded else ((0,) * N_PAIRS, (0,) * N_PAIRS)
    found = Logits([], [], [], [])
    for row in range(N_PAIRS):
        prompt, text = prompts[row : row + 1, : N_PROMPT - cut[row]], texts[row : row + 1, front[row] :]
        both = torch.cat([prompt, text], dim=1)
        found.whole.append(models.plain(both).logits[:, prompt.shape[1] :])
        found.theirs.append(cut_and_continued(models.plain, prompt, text))
        with float64():
            found.exact.append(models.exact(both).logits[:, prompt.shape[1] :])
    real = torch.arange(N_TEXT) >= torch.tensor(front)[:, None]
    kept = torch.arange(N_PROMPT) < N_PROMPT - torch.tensor(cut)[:, None]
    bias = convert_prompt(models.bridge, Counterfactuals(prompts[0], prompts, kept, "closed") if padded else prompts)
    with models.bridge.kv_bias(bias):
        logits = models.bridge(texts, attention_mask=real.long()) if padded else models.bridge(texts)
    found.ours.extend(logits[row : row + 1, front[row] :] for row in range(N_PAIRS))
    return found

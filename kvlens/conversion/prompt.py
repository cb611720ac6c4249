"""Turning a prompt (a string, a chat, a list of those, or tokens) into one right-padded batch of tokens with its mask."""

from typing import Any

import torch
from torch import Tensor
from transformer_lens.utilities import get_device_for_block_index

from kvlens.chat import Chat, as_prompt
from kvlens.errors import KVLensError, brief
from kvlens.model.protocol import KVModel, PromptTokens

Prompt = str | Chat | list[Any] | Tensor


def prompt_tokens(model: KVModel, prompt: Prompt, prepend_bos: bool, what: str = "prompt") -> PromptTokens:
    """Tokenize and check a prompt, or another text, which errors then call ``what``.

    Args:
        model: supplies the tokenizer, the vocabulary and the device.
        prompt: a string, a chat or its list of messages, a list of those (padded on the right, whatever the tokenizer's
            side), or tokens [pos] or [batch, pos]. Tokens are used unchanged: no BOS is added, and none are treated as padding.
        prepend_bos: whether to prepend a BOS to strings.

    Raises:
        KVLensError: an empty prompt, a string for a model without a tokenizer, a string without tokens, or tokens outside
            the vocabulary or of the wrong shape.
    """
    device = get_device_for_block_index(0, model.cfg)
    if isinstance(prompt, Tensor):
        return _from_tensor(model, prompt, device, what)
    prompt = as_prompt(prompt)
    has_batch = not isinstance(prompt, str | Chat)
    texts: list[Any] = [as_prompt(text) for text in prompt] if isinstance(prompt, list) else [prompt]
    if not texts or not all(isinstance(text, str | Chat) for text in texts):
        raise KVLensError(f"{what}: expected a string, a list of strings, or a tensor of token ids, got {_describe(prompt)}")
    if model.tokenizer is None:
        raise KVLensError(f"{what}: this model has no tokenizer, so it cannot read strings; give token ids")
    rows = [_tokenize(model, text, prepend_bos, what) for text in texts]
    longest = max(len(row) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long, device=device)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool, device=device)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, True
    return PromptTokens(tokens, None if bool(mask.all()) else mask, has_batch=has_batch)


def _from_tensor(model: KVModel, prompt: Tensor, device: torch.device, what: str) -> PromptTokens:
    if prompt.dim() not in (1, 2):
        raise KVLensError(f"{what}: expected tokens [pos] or [batch, pos], got shape {list(prompt.shape)}")
    model.check_tokens(prompt)
    tokens = (prompt.clone() if prompt.is_inference() else prompt).to(device)  # generate's output: unusable in autograd
    return PromptTokens(tokens if prompt.dim() == 2 else tokens[None], None, has_batch=prompt.dim() == 2)


def _tokenize(model: KVModel, text: str | Chat, prepend_bos: bool, what: str) -> Tensor:
    if isinstance(text, Chat):
        return text.tokens(model)
    row = model.to_tokens(text, prepend_bos=prepend_bos, truncate=False)[0]
    if len(row) <= int(prepend_bos):
        raise KVLensError(f"{what}: the tokenizer finds no tokens in {brief(text)}; give another text, or token ids")
    model.check_tokens(row)
    return row


def _describe(prompt: object) -> str:
    empty = isinstance(prompt, (list, tuple)) and not prompt
    kinds = f" of {type(prompt[0]).__name__}" if isinstance(prompt, list) and prompt else ""
    return f"an empty {type(prompt).__name__}" if empty else type(prompt).__name__ + kinds


def length_note(model: KVModel, n_tokens: int) -> str | None:
    """A warning if a prompt is longer than ``n_ctx`` and the positions allow it (otherwise it is refused elsewhere)."""
    if model.cfg.has_position_limit or n_tokens <= model.cfg.n_ctx:
        return None
    return (
        f"The prompt is longer than n_ctx={model.cfg.n_ctx:,}, for which the model was made. Its positions allow more, "
        "but it was not trained on them: such a prompt may raise the loss instead of lowering it."
    )

"""How a response is made: token by token, up to one that ends it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens import KVBias, KVModel, convert_prompt


def stop_tokens(model: KVModel) -> frozenset[int]:
    """The tokens that end a response: the tokenizer's end of text, and those of the model's generation settings."""
    found: set[int] = set()
    original = getattr(model, "original_model", None)
    for source in (model.tokenizer, getattr(original, "generation_config", None)):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(found)


def is_end(model: KVModel, ends: Sequence[str] = ()) -> Callable[[list[int]], bool]:
    """Whether a response ends with its last token: a stop token, or one whose text ends so."""
    stops, tokenizer = stop_tokens(model), model.tokenizer

    def ended(text: list[int]) -> bool:
        return text[-1] in stops or (tokenizer is not None and str(tokenizer.decode(text[-1:])).endswith(tuple(ends)))

    return ended


@torch.no_grad()
def greedy(
    model: KVModel,
    biases: KVBias,
    first: Int[Tensor, "*row first_pos"],
    forced: Int[Tensor, "row n_forced"],
    n_forced: Int[Tensor, " row"],
    n_most: int,
    stops: Any,
    on_tokens: Callable[[int], None] = lambda n: None,
) -> list[list[int]]:
    """Greedy texts under each bias of a batch, whose first tokens are given.

    All rows are read together, token by token: a row whose first tokens are given is fed with these until they end.

    Args:
        biases: of what comes before, a batch.
        first: tokens between that and the texts, which are read and are no part of these; of all rows, or of each.
        forced: how the texts begin; of row i only the first ``n_forced[i]``.
        n_most: tokens of a text.
        stops: ``stops(tokens)`` says whether a text ends there.
        on_tokens: called with the number of tokens that each pass read for texts that had not ended.

    Returns:
        Row by row the tokens, the forced ones first.
    """
    n_rows, given = len(n_forced), n_forced.tolist()
    n_shared = min(given)
    texts = [row[:n_shared].tolist() for row in forced]
    ended = [False] * n_rows
    with model.kv_bias(biases):
        tokens, cache = torch.cat([first.expand(n_rows, -1), forced[:, :n_shared]], dim=1), None
        while True:
            on_tokens(tokens.shape[1] * (n_rows - sum(ended)))
            logits, cache = model.next_logits(tokens, cache)  # type: ignore[attr-defined]
            chosen = logits.argmax(dim=-1).tolist()
            for row, text in enumerate(texts):
                if ended[row]:
                    continue
                at = len(text)
                text.append(int(forced[row, at]) if at < given[row] else chosen[row])
                ended[row] = at >= given[row] and (len(text) >= n_most or stops(text))
            if all(ended):
                return texts
            tokens = torch.tensor([[text[-1]] for text in texts], device=first.device)


def responses(model: KVModel, prompts: Sequence[Int[Tensor, " _"]], n_most: int, ends: Sequence[str] = ()) -> list[list[int]]:
    """The greedy responses to prompts, which are read together, with the token that ends each.

    Args:
        prompts: of at least two tokens each.
        n_most: tokens of a response.
        ends: a response also ends with a token that ends so.
    """
    biases = KVBias.batch([convert_prompt(model, prompt[:-1]).repeat(1) for prompt in prompts])
    last = torch.stack([prompt[-1:] for prompt in prompts])
    nothing, none = last.new_zeros(len(prompts), 0), torch.zeros(len(prompts), dtype=torch.long)
    return greedy(model, biases, last, nothing, none, n_most, is_end(model, ends))

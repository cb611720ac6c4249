"""What is converted: a prompt as one right-padded batch of tokens with its mask, or counterfactual variants of a prompt.

*Counterfactual prompts* are a prompt of which parts are deleted or replaced, and what follows it. A *span* is a range of the
prompt's tokens, (start, stop), stop left out. What comes after a deleted span, the rest of the prompt and the text, stays where
it stood (``positions="kept"``), or moves up as if the tokens had never been written (``"closed"``; so does ContextCite,
Cohen-Wang et al. 2024, arXiv 2409.00729). A gap that is kept means, for

- RoPE: angles are those of the tokens' own positions, before and after the feature map; where a converted prompt is rebased,
  its keys turn past the gap (``carry_bias``);
- learned and sinusoidal positions: the tokens behind the gap keep their rows, the text starts where it did;
- decay: the state decays past a deleted token as past any other;
- ALiBi and windows: distances count the deleted tokens;
- the KV shift: the predecessor of the first token behind the gap is the last one before it, in both cases.

The *baseline* is the prompt of which everything is deleted that is not always there: with BOS that token alone, its b_KV and
b_D turned and decayed to the text's position, its shift state where the prompt's would stand; without BOS the empty prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformer_lens.utilities import get_device_for_block_index

from kvlens.arguments import Positions, Span, checked_spans
from kvlens.chat import Chat, as_prompt, text_tokens
from kvlens.checks import checked
from kvlens.errors import KVLensError, brief
from kvlens.model.protocol import KVModel, PromptBatch

Prompt = str | Chat | list[Any] | Tensor
UpTo = Literal["question"]
"""Where a chat that is converted ends."""


def prompt_batch(
    model: KVModel, prompt: Prompt, prepend_bos: bool, what: str = "prompt", upto: UpTo | None = None
) -> PromptBatch:
    """Tokenize and check a prompt, or another text, which errors then call ``what``.

    Args:
        model: supplies the tokenizer, the vocabulary and the device.
        prompt: a string, a chat or its list of messages, a list of those (padded on the right, whatever the tokenizer's
            side), or tokens [pos] or [batch, pos]. Tokens are used unchanged: no BOS is added, and none are treated as padding.
        prepend_bos: whether to prepend a BOS to strings.
        upto: "question": of chats only what stands in front of their question.

    Raises:
        KVLensError: an empty prompt, a string for a model without a tokenizer, or tokens outside
            the vocabulary; ``upto`` for what is no chat.
    """
    device = get_device_for_block_index(0, model.cfg)
    if isinstance(prompt, Tensor) and upto is None:
        return _from_tensor(model, prompt, device)
    prompt = as_prompt(prompt)
    has_batch = not isinstance(prompt, str | Chat)
    texts: list[Any] = [as_prompt(text) for text in prompt] if isinstance(prompt, list) else [prompt]
    if not texts or not all(isinstance(text, str | Chat) for text in texts):
        raise KVLensError(f"{what}: expected a string, a list of strings, or a tensor of token ids, got {brief(prompt)}")
    if upto is not None and not all(isinstance(text, Chat) for text in texts):
        raise KVLensError(f"upto: only a chat has a question; give {what} as a Chat or its list of messages, or leave upto out")
    rows = [_tokenize(model, text, prepend_bos, what, upto) for text in texts]
    longest = max(len(row) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long, device=device)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool, device=device)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, True
    return PromptBatch(tokens, None if bool(mask.all()) else mask, has_batch=has_batch)


def _from_tensor(model: KVModel, prompt: Tensor, device: torch.device) -> PromptBatch:
    model.check_tokens(prompt)
    tokens = (prompt.clone() if prompt.is_inference() else prompt).to(device)  # generate's output: unusable in autograd
    return PromptBatch(tokens if prompt.dim() == 2 else tokens[None], None, has_batch=prompt.dim() == 2)


def _tokenize(model: KVModel, text: str | Chat, prepend_bos: bool, what: str, upto: UpTo | None) -> Tensor:
    if isinstance(text, Chat):
        return text.tokens(model) if upto is None else text.split(model)[0]
    row = text_tokens(model, what, text, prepend_bos)
    model.check_tokens(row)
    return row


Replacement = str | Tensor | Sequence[int]


@dataclass(frozen=True)
class Counterfactuals:
    """Variants of one prompt, a row each. ``convert_prompt`` takes them as a batch of prompts.

    Attributes:
        original: the prompt, [pos].
        tokens: of each variant, [row, pos]; those of deleted tokens do not count.
        kept: True at tokens that are read, [row, pos].
        positions: "kept", or "closed".
        packed: whether deleted tokens are left out of a pass where positions are kept, too, and not only hidden in it.
    """

    original: Int[Tensor, " pos"]
    tokens: Int[Tensor, "row pos"]
    kept: Bool[Tensor, "row pos"]
    positions: Positions = "kept"
    packed: bool = False

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def rows(self, index: Int[Tensor, " row"] | slice) -> "Counterfactuals":
        """Some of them."""
        return replace(self, tokens=self.tokens[index], kept=self.kept[index])

    def as_prompt(self) -> PromptBatch:
        """As a batch of prompts to convert: deleted tokens hidden in their positions, or moved behind the others as padding."""
        n_places = self.tokens.shape[1] if self.positions == "kept" else None
        if n_places is not None and not self.packed:
            return PromptBatch(self.tokens, None if bool(self.kept.all()) else self.kept, True, n_places)
        if n_places is None and not bool(self.kept.any(dim=1).all()):
            raise KVLensError(
                'counterfactuals: a row keeps no token, and positions="closed" leaves nothing to convert; keep BOS'
            )
        order = (~self.kept).long().argsort(dim=1, stable=True)
        order = order[:, : max(1, int(self.kept.sum(dim=1).max()))]
        tokens, kept = (x.gather(1, order) for x in (self.tokens, self.kept))
        return PromptBatch(tokens, None if bool(kept.all()) else kept, True, n_places, None if n_places is None else order)

    def in_front_of_text(self) -> tuple[Int[Tensor, "row pos"], Bool[Tensor, "row pos"]]:
        """(tokens, kept) as they stand before a text; where positions are closed, deleted tokens are padding on the left."""
        if self.positions == "kept":
            return self.tokens, self.kept
        order = self.kept.long().argsort(dim=1, stable=True)
        return self.tokens.gather(1, order), self.kept.gather(1, order)

    def first_changes(self) -> Int[Tensor, " row"]:
        """Position of the first token in which each row differs from the prompt; the prompt's length where none does."""
        changed = ~self.kept | (self.tokens != self.original)
        return torch.where(changed.any(dim=1), changed.long().argmax(dim=1), self.tokens.shape[1])

    def after(self, start: int) -> "Counterfactuals":
        """The same without their first ``start`` tokens."""
        return self.columns(start, len(self.original))

    def columns(self, start: int, stop: int) -> "Counterfactuals":
        """What stands at a range of positions."""
        here = slice(start, stop)
        return replace(self, original=self.original[here], tokens=self.tokens[:, here], kept=self.kept[:, here])


@checked
def counterfactuals(
    model: KVModel,
    prompt: Prompt,
    without: Sequence[Sequence[Span]] | Bool[Tensor, "row pos"],
    replacements: Sequence[Mapping[Span, Replacement]] | None = None,
    *,
    positions: Positions = "kept",
    prepend_bos: bool | None = None,
) -> Counterfactuals:
    """Rows of a prompt with spans deleted, and others replaced.

    >>> from kvlens import HookedKVTransformer, convert_prompt, counterfactuals
    >>> model = HookedKVTransformer.from_zoo("bigram-linear")
    >>> rows = counterfactuals(model, torch.arange(10), [[(0, 2)], [(3, 5), (7, 8)], []])
    >>> rows.kept.sum(dim=1).tolist()
    [8, 7, 10]
    >>> convert_prompt(model, rows).batch_size
    3

    Args:
        model: whose tokenizer reads the prompt, and replacements that are text (those without BOS).
        prompt: a string, a chat or its list of messages, or tokens [pos].
        without: the spans that each row deletes; or directly the tokens that it deletes, True there, [row, pos].
        replacements: for each row, span -> what stands there in its place, of as many tokens.
        positions: "kept" or "closed", see :mod:`kvlens.conversion.prompt`.
        prepend_bos: whether a string gets a BOS; None for the model's default.

    Raises:
        KVLensError: spans outside the prompt, empty or overlapping, a replacement of another length. Converting rows that keep
            no token is refused under ``positions="closed"``.
    """
    read = prompt_batch(model, prompt, model.prepends_bos if prepend_bos is None else prepend_bos)
    return counterfactuals_of(model, only_row(read), without, replacements, positions)


def only_row(read: PromptBatch) -> Int[Tensor, " pos"]:
    """The tokens of one prompt; KVLensError for several, which cannot share spans."""
    if len(read.tokens) != 1:
        raise KVLensError(f"expected one prompt whose tokens are deleted or replaced, got {len(read.tokens)}; call it for each")
    return read.tokens[0]


def counterfactuals_of(
    model: KVModel,
    tokens: Int[Tensor, " pos"],
    without: Sequence[Sequence[Span]] | Bool[Tensor, "row pos"],
    replacements: Sequence[Mapping[Span, Replacement]] | None = None,
    positions: Positions = "kept",
) -> Counterfactuals:
    """:func:`counterfactuals` of tokens [pos]."""
    n_rows = len(without)
    if replacements is not None and len(replacements) != n_rows:
        raise KVLensError(f"counterfactuals: {n_rows} rows of deletions and {len(replacements)} of replacements: give as many")
    rows = tokens[None].repeat(n_rows, 1)
    if isinstance(without, Tensor):
        if without.dtype != torch.bool or without.dim() != 2 or without.shape[1] != len(tokens):
            raise KVLensError(f"without: expected True at deleted tokens, [row, {len(tokens)}], got {brief(without)}")
        kept = ~without.to(rows.device)
    else:
        kept = torch.ones_like(rows, dtype=torch.bool)
        for row, spans in enumerate(without):
            for start, stop in checked_spans("without", spans, len(tokens)):
                kept[row, start:stop] = False
    for row, each in enumerate(replacements or ()):
        deleted = [] if isinstance(without, Tensor) else list(without[row])
        checked_spans("without and replace", [*deleted, *each], len(tokens))
        for (start, stop), new in each.items():
            rows[row, start:stop] = _replacement(model, new, stop - start).to(rows.device)
    return Counterfactuals(tokens, rows, kept, positions)


def _replacement(model: KVModel, new: Replacement, n_tokens: int) -> Int[Tensor, " pos"]:
    if isinstance(new, str):
        new = text_tokens(model, "replace", new, False)
    found = torch.as_tensor(new)
    if found.dim() != 1 or len(found) != n_tokens:
        came = brief(found) if found.dim() != 1 else len(found)
        raise KVLensError(f"replace: expected {n_tokens} tokens, as many as they replace, got {came}")
    model.check_tokens(found)
    return found

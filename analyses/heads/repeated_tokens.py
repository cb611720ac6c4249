"""Repeated text, in which only induction helps: N tokens, and the same N tokens again.

    [BOS] t_0 t_1 ... t_{N-1} t_0 t_1 ... t_{N-1}

With random tokens the second copy can be predicted only by looking back: find the first copy of the current token (N positions
back), read what followed it (N - 1 positions back). The positions of the second copy are therefore where heads are scored.

Source: Olsson et al. 2022, In-context Learning and Induction Heads (repeated random tokens); Elhage et al. 2021.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens import KVLensError, KVModel

LONGEST = 2**20
"""The most sequences, and the most tokens of one; more is surely a mistake."""


@dataclass(frozen=True)
class RepeatedTokens:
    """Sequences of tokens that are repeated once.

    Attributes:
        tokens: [batch, n_before + 2 n_repeated].
        n_repeated: N, the length of one copy.
    """

    tokens: Int[Tensor, "batch pos"]
    n_repeated: int

    @property
    def second(self) -> int:
        """The position where the second copy begins."""
        return self.tokens.shape[1] - self.n_repeated

    @property
    def next_tokens(self) -> Int[Tensor, "batch target"]:
        """The token after each position of the second copy but its last: N - 1 tokens that the first copy contains."""
        return self.tokens[:, self.second + 1 :]

    def control(self, first: Int[Tensor, "batch piece"]) -> "RepeatedTokens":
        """The same text with other tokens as its first copy: nothing repeats, and every lag is the same."""
        before = self.tokens[:, : self.second - self.n_repeated]
        return RepeatedTokens(torch.cat([before, first.to(before), self.tokens[:, self.second :]], dim=1), self.n_repeated)

    def split(self, n: int) -> list["RepeatedTokens"]:
        """The same sequences in parts of at most ``n``."""
        return [RepeatedTokens(part, self.n_repeated) for part in self.tokens.split(n)]


def repeat_tokens(model: KVModel, piece: Int[Tensor, "batch piece"], prepend_bos: bool | None) -> RepeatedTokens:
    """Repeat each row of ``piece`` once.

    Args:
        model: its vocabulary and context length are the limits.
        piece: token ids without BOS.
        prepend_bos: whether to prepend BOS; None does so if that is the model's default (a tokenizer that has one,
            ``default_prepend_bos``, no bias attached).

    Raises:
        KVLensError: fewer than two tokens, ids outside the vocabulary, a text longer than the model's context, no BOS.
    """
    n_repeated = piece.shape[1]
    if n_repeated < 2:
        raise KVLensError(f"induction_heads: expected at least 2 tokens to repeat, got {n_repeated}: nothing follows one alone")
    model.check_tokens(piece)
    bos = _bos(model, prepend_bos)
    n_positions = len(bos) + 2 * n_repeated
    if model.cfg.has_position_limit and n_positions > model.cfg.n_ctx:
        raise KVLensError(
            f"induction_heads: {n_repeated} tokens, twice, take {n_positions} positions and n_ctx is {model.cfg.n_ctx}: "
            f"repeat at most {(model.cfg.n_ctx - len(bos)) // 2}"
        )
    piece = piece.to(model.cfg.device)
    front = torch.tensor(bos, dtype=piece.dtype, device=piece.device).expand(len(piece), -1)
    return RepeatedTokens(torch.cat([front, piece, piece], dim=1), n_repeated)


def longest_repeat(model: KVModel, prepend_bos: bool | None, most: int) -> int:
    """The longest piece, at most ``most`` tokens, whose two copies fit within ``n_ctx``."""
    return max(2, min(most, (model.cfg.n_ctx - len(_bos(model, prepend_bos))) // 2))


def draw_piece(model: KVModel, n_sequences: int, n_repeated: int, generator: torch.Generator) -> Int[Tensor, "batch piece"]:
    """Random tokens, the tokenizer's special ones left out.

    A row has no token twice, so that the position to attend to is unique; if the vocabulary is too small, tokens are drawn with
    replacement.
    """
    special = [] if model.tokenizer is None else [t for t in model.tokenizer.all_special_ids if 0 <= t < model.cfg.d_vocab]
    ordinary = torch.ones(model.cfg.d_vocab)
    if len(special) < model.cfg.d_vocab:
        ordinary[special] = 0
    replacement = int(ordinary.sum()) < n_repeated
    return torch.multinomial(ordinary.expand(n_sequences, -1), n_repeated, replacement, generator=generator)


def _bos(model: KVModel, wanted: bool | None) -> list[int]:
    known = None if model.tokenizer is None else model.tokenizer.bos_token_id
    if known is None:
        if wanted:
            raise KVLensError("induction_heads: prepend_bos=True needs a tokenizer with a BOS token; this model has none")
        return []
    if wanted is None:
        wanted = model.prepends_bos and model.attached_kv_bias is None
    return [known] if wanted else []

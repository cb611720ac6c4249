"""Repeated text, in which only induction helps, and where heads attend on it.

In this order: the text, N tokens and the same N tokens again; the role that a KV shift gives to a head, which token it matches
and which one it reads; and the mean attention at the lag of each kind of head.

Source: Olsson et al. 2022, In-context Learning and Induction Heads (repeated random tokens); Elhage et al. 2021; KVSA eq. 4-6,
table 4, app. J.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.model import heads_per_layer

#     [BOS] t_0 t_1 ... t_{N-1} t_0 t_1 ... t_{N-1}
#
# With random tokens the second copy can be predicted only by looking back: find the first copy of the current token (N
# positions back), read what followed it (N - 1 positions back). The positions of the second copy are therefore where heads are
# scored.


LONGEST_TEXT = 2**20
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
        KVLensError: fewer than two tokens, ids outside the vocabulary, no BOS.
    """
    n_repeated = piece.shape[1]
    if n_repeated < 2:
        raise KVLensError(f"induction_heads: expected at least 2 tokens to repeat, got {n_repeated}: nothing follows one alone")
    model.check_tokens(piece)
    bos = _bos(model, prepend_bos)
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


# The role that the KV shift gives to a head: which token it matches, and which one it reads.
#
# A head that attends from i to s compares its query with k^_s = sum_a alpha_a k_{s-a} and reads v^_s = sum_b beta_b v_{s-b}.
# With the largest alpha at lag a* and the largest beta at lag b* it *matches* token s - a* and *reads* token s - b*, which is
# ``displacement = a* - b*`` positions after the matched token. For window 1 that is KVSA's table 4:
#
#     ================== =============== ================
#     role               beta_1 > beta_2 beta_1 <= beta_2
#     ================== =============== ================
#     alpha_1 > alpha_2  plain           predecessor
#     alpha_1 <= alpha_2 prefix matching delayed
#     ================== =============== ================
#
# - ``plain``: matches and reads the token itself, as without a shift.
# - ``prefix matching``: matches a token and reads one that came after it, which in a plain transformer takes two layers.
# - ``predecessor``: matches a token and reads one that came before it.
# - ``delayed``: matches and reads the same token, but one position late: a plain head that cannot see the newest token.
#
# Where queries are shifted and the largest coefficient is at lag c*, the query is that of token i - c*, and what it matched is
# c* positions before the copy of the current token: displacement = a* - b* - c*.
#
# The coefficients are compared as they are, including the sign, as in the paper. Only their ratio is meaningful, since a factor
# can be moved between alpha and W_K, or between beta and W_V.


class ShiftTaps(NamedTuple):
    """The coefficients that a layer's query heads use; (1, 0, ...) for a projection that is not shifted."""

    k: Float[Tensor, "head taps"]
    v: Float[Tensor, "head taps"]
    q: Float[Tensor, "head taps"]


def shifted_projections(model: KVModel) -> list[str]:
    """The projections ("k", "v", "q") that this model shifts."""
    shift = model.cfg.kv_shift
    if shift is None:
        return []
    return [x for x, on in (("k", shift.keys), ("v", shift.values), ("q", shift.queries)) if on]


def layer_taps(model: KVModel, layer: int, used: dict[str, Tensor], dtype: torch.dtype) -> ShiftTaps:
    """The taps of one layer, for every query head.

    Args:
        model, layer: the layer's model, and its number.
        used: the activations of ``hook_{k,v,q}_shift_coef``, [kv_head or head, taps], by "k", "v", "q"; shifted ones only.
        dtype: of the result.
    """
    n_heads, window = heads_per_layer(model)[layer], 0 if model.cfg.kv_shift is None else model.cfg.kv_shift.window
    identity = torch.eye(1, window + 1, dtype=dtype, device=model.cfg.device).expand(n_heads, -1)
    taps = {x: coef.to(dtype).repeat_interleave(n_heads // coef.shape[0], dim=0) for x, coef in used.items()}
    return ShiftTaps(**{x: taps.get(x, identity) for x in "kvq"})


def displacement(taps: ShiftTaps) -> Int[Tensor, " head"]:
    """Number of positions from the matched to the read token; among equal coefficients the earlier token counts."""
    return _largest_lag(taps.k) - _largest_lag(taps.v) - _largest_lag(taps.q)


def roles(taps: ShiftTaps) -> list[str]:
    """The role of each head, by name."""
    moved, read = displacement(taps).tolist(), _largest_lag(taps.v).tolist()
    return [
        "prefix matching" if d > 0 else "predecessor" if d < 0 else "delayed" if lag else "plain"
        for d, lag in zip(moved, read, strict=True)
    ]


def _largest_lag(taps: Tensor) -> Int[Tensor, " head"]:
    """The lag of the largest coefficient, the longest lag if several are equal."""
    return taps.shape[1] - 1 - taps.flip(dims=[1]).argmax(dim=1)


# Attention of heads on repeated tokens: mean attention at the lag of each kind of head.
#
# On a text of N tokens repeated four kinds of head attend at one lag each:
#
#     ================ ================ ===============================
#     kind             query i reads    mean over
#     ================ ================ ===============================
#     prefix_matching  i - N + 1        the N positions of the second copy
#     previous_token   i - 1            all positions but the first
#     duplicate_token  i - N            the N positions of the second copy
#     current_token    i                all positions but the first
#     ================ ================ ===============================
#
# With a KV shift the raw pattern A is over *shifted* rows, which are mixtures of tokens. Two more views are over tokens: the
# value-side pattern A (beta_1 I + beta_2 Shift), which values are read, and the key-side pattern A (alpha_1 I + alpha_2 Shift),
# which keys attract the attention. At (i, t) the first is sum_s beta_s A[i, t + s], for any window.
#
# For linear attention A is the implied pattern phi~(q).phi~(k) gamma^{i-j} / n_i, which may be negative and need not sum to 1.
#
# ``detect_head`` of TransformerLens divides by all attention, these scores by that of the scored queries: on one sequence of n
# positions without repeated tokens inside a copy, its default measure is N/n, (n - 1)/n, N/n times these scores if rows sum to
# 1.


PATTERNS = ("prefix_matching", "previous_token", "duplicate_token", "current_token")
NEAR = 2
"""Neighboring positions over which a shift may spread the attention to a token."""


class PatternScores(NamedTuple):
    """Scores of heads, of one layer or of all, ordered as :data:`PATTERNS`, and statistics by position for the verdict.

    The raw and the key-side score are means over sequences, the value-side one is of each (``by_sequence``).
    The statistics are of the value-side pattern E, means over sequences: E at the lag of each kind and its square (0 for a
    query whose lag reaches before the text), the sums of \\|E\\| and of E^2 over all keys, and, for the queries of the second
    copy, \\|E\\| on the positions of the first copy that are more than :data:`NEAR` away from the token's own.
    """

    raw: Float[Tensor, "*layer kind head"]
    by_sequence: Float[Tensor, "*layer kind head batch"]
    key_side: Float[Tensor, "*layer kind head"]
    read: Float[Tensor, "*layer kind head pos"]
    squares: Float[Tensor, "*layer kind head pos"]
    all_read: Float[Tensor, "*layer head pos"]
    all_squares: Float[Tensor, "*layer head pos"]
    elsewhere: Float[Tensor, "*layer head position"]

    @property
    def value_side(self) -> Float[Tensor, "*layer kind head"]:
        """The mean over sequences."""
        return self.by_sequence.mean(dim=-1)


def lags_and_queries(repeated: RepeatedTokens) -> dict[str, tuple[int, int]]:
    """kind -> its lag and the first query that is scored."""
    n = repeated.n_repeated
    return {
        "prefix_matching": (n - 1, repeated.second),
        "previous_token": (1, 1),
        "duplicate_token": (n, repeated.second),
        "current_token": (0, 1),
    }


def pattern_scores(pattern: Float[Tensor, "batch head query key"], repeated: RepeatedTokens, taps: ShiftTaps) -> PatternScores:
    """Reduce one layer's pattern to its scores, means over the batch.

    Args:
        pattern: ``hook_pattern`` on ``repeated.tokens``.
        repeated: the text.
        taps: the shift coefficients as used.
    """
    effective = value_side_pattern(pattern, taps)
    rows: list[tuple[Tensor, ...]] = []
    for lag, first in lags_and_queries(repeated).values():
        value = at_lag(effective, lag)
        at = torch.stack([at_lag(pattern, lag - s).mean(dim=0).to(taps.k.dtype) for s in range(taps.k.shape[1])])
        of_head = value.mean(dim=0)
        raw, key_side = (x[:, first:].mean(dim=1) for x in (at[0], torch.einsum("shq,hs->hq", at, taps.k)))
        rows.append((raw, value[..., first:].mean(dim=-1).T, key_side, of_head, value.square().mean(dim=0)))
    all_read, all_squares = (x.sum(dim=-1).mean(dim=0) for x in (effective.abs(), effective.square()))
    raw, by_sequence, key_side, read, squares = (torch.stack(column) for column in zip(*rows, strict=True))
    elsewhere = _elsewhere(effective, repeated)
    return PatternScores(raw, by_sequence, key_side, read, squares, all_read, all_squares, elsewhere)


def value_side_pattern(
    pattern: Float[Tensor, "batch head query key"], taps: ShiftTaps
) -> Float[Tensor, "batch head query token"]:
    """How much of each token's own value is read: sum_s beta_s A[i, t + s]."""
    effective = pattern.to(taps.v.dtype) * taps.v[:, :1, None]
    for lag in range(1, taps.v.shape[1]):
        effective[..., :-lag] += pattern[..., lag:] * taps.v[:, lag, None, None]
    return effective


def at_lag(pattern: Float[Tensor, "batch head query key"], lag: int) -> Float[Tensor, "batch head query"]:
    """A[i, i - lag] of every query i; 0 before the text or ahead of i."""
    if not 0 <= lag < pattern.shape[-1]:
        return pattern.new_zeros(pattern.shape[:-1])
    diagonal = pattern.diagonal(offset=-lag, dim1=-2, dim2=-1)  # its entry t belongs to query t + lag
    return torch.nn.functional.pad(diagonal, (lag, 0))


def _elsewhere(effective: Tensor, repeated: RepeatedTokens) -> Float[Tensor, "head position"]:
    """Mean \\|E\\| on the first copy, away from the token's own position there; 0 if no position is far enough away."""
    n, second = repeated.n_repeated, repeated.second
    position = torch.arange(n, device=effective.device)
    far = ((position[:, None] - position).abs() > NEAR).to(effective.dtype)
    first_copy = effective[:, :, second:, second - n : second].abs().mean(dim=0)
    return (first_copy * far).sum(dim=-1) / far.sum(dim=-1).clamp(min=1)

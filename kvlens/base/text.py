"""Strings and tokens: the methods of a model that use its tokenizer.

Whether strings get a BOS, and on which side a batch is padded, is settled per call and passed on; nothing in the model changes
meanwhile.
"""

import os
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens import HookedRootModule
from transformer_lens.utilities import USE_DEFAULT_VALUE, get_attention_mask
from transformer_lens.utilities.tokenize_utils import (
    get_input_with_manually_prepended_bos,
    get_tokenizer_with_bos,
    get_tokens_with_bos_removed,
)
from transformers import AutoTokenizer

from kvlens.errors import KVLensError
from kvlens.tokenizer import KEEP_THEIR_BOS

END = "<|endoftext|>"


def without_own_bos(tokenizer: Any, texts: str | list[str]) -> str | list[str]:
    """Texts that are to get a BOS, without one that they begin with, as a chat's template writes it: they get one, not two."""
    if isinstance(texts, list):
        return [text.removeprefix(tokenizer.bos_token or "") for text in texts]
    return texts.removeprefix(tokenizer.bos_token or "")


class ReadsText(HookedRootModule):
    """A model with a tokenizer, or with None for one on token ids."""

    cfg: Any
    tokenizer: Any
    W_U: Any

    @staticmethod
    def tokenizer_by_name(cfg: Any) -> Any:
        """The tokenizer called ``cfg.tokenizer_name``; one that prepends a BOS, where the architecture's models had one."""
        name = cfg.tokenizer_name
        options: dict[str, Any] = {"trust_remote_code": False, "token": os.environ.get("HF_TOKEN") or None}
        options["use_fast"] = "phi" not in name.lower()  # Phi's fast tokenizer cannot prepend a BOS
        options["add_bos_token"] = cfg.original_architecture not in (*KEEP_THEIR_BOS, "Qwen3ForCausalLM", "PhiForCausalLM")
        return AutoTokenizer.from_pretrained(name, **options)

    def set_tokenizer(self, tokenizer: Any, default_padding_side: str | None = None) -> None:
        """Use a loaded tokenizer of transformers; special tokens that it lacks become its EOS.

        Args:
            tokenizer: a ``PreTrainedTokenizerBase``.
            default_padding_side: "left" or "right"; None keeps the tokenizer's own.
        """

        if self.cfg.original_architecture not in KEEP_THEIR_BOS:
            tokenizer = get_tokenizer_with_bos(tokenizer)
        tokenizer.padding_side = default_padding_side or tokenizer.padding_side or "right"
        self.cfg.tokenizer_prepends_bos = len(tokenizer.encode("")) > 0
        if tokenizer.eos_token is None:
            tokenizer.eos_token = END
        for name in ("pad_token", "bos_token"):
            if getattr(tokenizer, name) is None:
                setattr(tokenizer, name, tokenizer.eos_token)
        if self.cfg.d_vocab == -1:
            self.cfg.d_vocab = max(tokenizer.get_vocab().values()) + 1
        if self.cfg.d_vocab_out == -1:
            self.cfg.d_vocab_out = self.cfg.d_vocab
        self.tokenizer = tokenizer

    def prepends(self, prepend_bos: bool | None) -> bool:
        """Whether a call with this argument gives strings a BOS."""
        return bool(self.cfg.default_prepend_bos if prepend_bos is USE_DEFAULT_VALUE else prepend_bos)

    def pads_on(self, padding_side: str | None) -> str:
        """The side on which a call with this argument pads."""
        return str(self.tokenizer.padding_side if padding_side is USE_DEFAULT_VALUE else padding_side)

    def mask_of(
        self, tokens: Int[Tensor, "batch pos"], prepend_bos: bool | None, padding_side: str | None
    ) -> Int[Tensor, "batch pos"]:
        """1 at real tokens, 0 at the pad tokens on the side where rows are padded; without a tokenizer all are real."""
        if self.tokenizer is None:
            return torch.ones_like(tokens)
        return get_attention_mask(self.tokenizer, tokens, self.prepends(prepend_bos), self.pads_on(padding_side))

    def to_tokens(
        self,
        input: str | list[str],  # noqa: A002
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Int[Tensor, "batch pos"]:
        """Token ids of one string or several, padded to the same length.

        Args:
            input: the text.
            prepend_bos: whether to begin with a BOS, once; None for ``cfg.default_prepend_bos``. False for a part of a text.
            padding_side: "left" or "right"; None for the tokenizer's.
            move_to_device: to the model's.
            truncate: cut at ``n_ctx``.
        """
        tokenizer = self._tokenizer("to_tokens")
        wanted, automatic = self.prepends(prepend_bos), self.cfg.tokenizer_prepends_bos
        if wanted:
            input = without_own_bos(tokenizer, input)  # noqa: A001
        if wanted and not automatic:
            input = get_input_with_manually_prepended_bos(tokenizer.bos_token, input)  # noqa: A001
        side, options = self.pads_on(padding_side), dict(truncation=truncate, max_length=self.cfg.n_ctx if truncate else None)
        tokens = tokenizer(input, return_tensors="pt", padding=True, padding_side=side, **options)["input_ids"]
        if automatic and not wanted:
            tokens = get_tokens_with_bos_removed(tokenizer, tokens, side)
        return tokens.to(self.cfg.device) if move_to_device else tokens

    def to_string(self, tokens: Any) -> str | list[str]:
        """The text of tokens [pos], or one text per row of [batch, pos]; lists and arrays too."""
        tokens = tokens if isinstance(tokens, Tensor) else torch.as_tensor(np.asarray(tokens))
        tokenizer = self._tokenizer("to_string")
        decode = tokenizer.batch_decode if tokens.dim() == 2 else tokenizer.decode
        return decode(tokens, clean_up_tokenization_spaces=False)

    def to_str_tokens(
        self,
        input: Any,  # noqa: A002
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
    ) -> Any:
        """The text of each token of a string, or of tokens [pos] or [1, pos]; a list of these for a list."""
        if isinstance(input, list):
            return [self.to_str_tokens(one, prepend_bos, padding_side) for one in input]
        tokens = self.to_tokens(input, prepend_bos, padding_side)[0] if isinstance(input, str) else torch.as_tensor(input)
        tokens = tokens.squeeze()
        if tokens.dim() > 1:
            raise KVLensError(f"to_str_tokens: expected tokens [pos] or [1, pos], got shape {list(tokens.shape)}")
        one_by_one = [[int(token)] for token in tokens.reshape(-1)]
        return self._tokenizer("to_str_tokens").batch_decode(one_by_one, clean_up_tokenization_spaces=False)

    def to_single_token(self, string: str) -> int:
        """The id of a string that is one token; raises KVLensError if it is several."""
        tokens = self.to_tokens(string, prepend_bos=False).squeeze()
        if tokens.dim():
            raise KVLensError(f"to_single_token: {string!r} is not one token, but {tokens.numel()}")
        return int(tokens)

    def to_single_str_token(self, int_token: int) -> str:
        """The text of one token id."""
        return str(self.to_str_tokens(torch.tensor([int_token]))[0])

    def get_token_position(
        self,
        single_token: Any,
        input: Any,  # noqa: A002
        mode: str = "first",
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
    ) -> int:
        """Find where a token (id, or a string that is one token) stands in a text (string, tokens [pos] or [1, pos]).

        ``mode`` is "first" or "last", if it occurs several times. Raises KVLensError if it does not occur.
        """
        if mode not in ("first", "last"):
            raise KVLensError(f"get_token_position: mode must be 'first' or 'last', got {mode!r}")
        tokens = self.to_tokens(input, prepend_bos, padding_side) if isinstance(input, str) else input
        if tokens.dim() == 2 and tokens.shape[0] != 1:
            raise KVLensError(f"get_token_position: expected one text, got shape {list(tokens.shape)}")
        wanted = self.to_single_token(single_token) if isinstance(single_token, str) else int(single_token)
        positions = (tokens.reshape(-1) == wanted).nonzero().flatten()
        if not len(positions):
            raise KVLensError(f"get_token_position: token {single_token!r} does not occur in the text")
        return int(positions[0 if mode == "first" else -1])

    def tokens_to_residual_directions(self, tokens: Any) -> Float[Tensor, "*shape d_model"]:
        """The columns of W_U of tokens, any shape of ids, or of one token given as a string or an int.

        Their products with the normalized stream are logits, if the final norm's weights are folded into W_U.
        """
        if isinstance(tokens, Tensor) and tokens.numel() > 1:
            return self.W_U[:, tokens].movedim(0, -1)
        return self.W_U[:, self.to_single_token(tokens) if isinstance(tokens, str) else int(tokens)]

    def _tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise KVLensError(f"{what}: this model has no tokenizer: give token ids, or a tokenizer to set_tokenizer")
        return self.tokenizer

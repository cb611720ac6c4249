"""Texts in and out: the methods of a model that use its tokenizer, and those that continue a text.

Whether strings get a BOS, and on which side a batch is padded, is settled per call and passed on; nothing in the model changes
meanwhile. A text is continued by one loop, token by token, for strings, tokens and embeddings, with and without a cache.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm
from transformer_lens import HookedRootModule
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens.utilities import USE_DEFAULT_VALUE, get_attention_mask, sample_logits
from transformer_lens.utilities.tokenize_utils import (
    get_input_with_manually_prepended_bos,
    get_tokenizer_with_bos,
    get_tokens_with_bos_removed,
)
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvlens.arguments import check_tokenizer
from kvlens.base.config import HookedTransformerConfig
from kvlens.base.layers import Embed
from kvlens.checks import ensure
from kvlens.errors import KVLensError, brief
from kvlens.tokenizer import KEEP_THEIR_BOS

END = "<|endoftext|>"


def without_own_bos(tokenizer: PreTrainedTokenizerBase, texts: str | list[str]) -> str | list[str]:
    """Texts that are to get a BOS, without one that they begin with, as a chat's template writes it: they get one, not two."""
    if isinstance(texts, list):
        return [text.removeprefix(tokenizer.bos_token or "") for text in texts]
    return texts.removeprefix(tokenizer.bos_token or "")


class HasText(HookedRootModule):
    """A model with a tokenizer, or with None for one on token ids, that continues texts."""

    cfg: Any
    tokenizer: PreTrainedTokenizerBase
    W_U: Any
    embed: Embed
    get_residual: Any

    @staticmethod
    def tokenizer_by_name(cfg: HookedTransformerConfig) -> PreTrainedTokenizerBase:
        """The tokenizer called ``cfg.tokenizer_name``; one that prepends a BOS, where the architecture's models had one."""
        name = str(cfg.tokenizer_name)
        options = {"trust_remote_code": False, "token": os.environ.get("HF_TOKEN") or None}
        options["use_fast"] = "phi" not in name.lower()  # Phi's fast tokenizer cannot prepend a BOS
        options["add_bos_token"] = cfg.original_architecture not in (*KEEP_THEIR_BOS, "Qwen3ForCausalLM", "PhiForCausalLM")
        return AutoTokenizer.from_pretrained(name, **options)

    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase, default_padding_side: str | None = None) -> None:
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
        check_tokenizer("to_tokens", self)
        tokenizer = self.tokenizer
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

    def to_string(self, tokens: object) -> str | list[str]:
        """The text of tokens [pos], or one text per row of [batch, pos]; lists and arrays too."""
        tokens = tokens if isinstance(tokens, Tensor) else torch.as_tensor(np.asarray(tokens))
        check_tokenizer("to_string", self)
        tokenizer = self.tokenizer
        decode = tokenizer.batch_decode if tokens.dim() == 2 else tokenizer.decode
        return decode(tokens, clean_up_tokenization_spaces=False)

    def to_str_tokens(
        self,
        input: object,  # noqa: A002
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
    ) -> list[Any]:
        """The text of each token of a string, or of tokens [pos] or [1, pos]; a list of these for a list."""
        if isinstance(input, list):
            return [self.to_str_tokens(one, prepend_bos, padding_side) for one in input]
        tokens = self.to_tokens(input, prepend_bos, padding_side)[0] if isinstance(input, str) else torch.as_tensor(input)
        one_by_one = [[int(token)] for token in tokens.reshape(-1)]
        check_tokenizer("to_str_tokens", self)
        return self.tokenizer.batch_decode(one_by_one, clean_up_tokenization_spaces=False)

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
        single_token: str | int,
        input: str | Tensor,  # noqa: A002
        mode: str = "first",
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
    ) -> int:
        """Find where a token (id, or a string that is one token) stands in a text (string, tokens [pos] or [1, pos]).

        ``mode`` is "first" or "last", if it occurs several times. Raises KVLensError if it does not occur.
        """
        ensure("get_token_position: mode", Literal["first", "last"], mode)
        tokens = self.to_tokens(input, prepend_bos, padding_side) if isinstance(input, str) else input
        if tokens.dim() == 2 and tokens.shape[0] != 1:
            raise KVLensError(f"get_token_position: expected one text, got shape {list(tokens.shape)}")
        wanted = self.to_single_token(single_token) if isinstance(single_token, str) else int(single_token)
        positions = (tokens.reshape(-1) == wanted).nonzero().flatten()
        if not len(positions):
            raise KVLensError(f"get_token_position: token {single_token!r} does not occur in the text")
        return int(positions[0 if mode == "first" else -1])

    def tokens_to_residual_directions(self, tokens: str | int | Tensor) -> Float[Tensor, "*shape d_model"]:
        """The columns of W_U of tokens, any shape of ids, or of one token given as a string or an int.

        Their products with the normalized stream are logits, if the final norm's weights are folded into W_U.
        """
        if isinstance(tokens, Tensor) and tokens.numel() > 1:
            return self.W_U[:, tokens].movedim(0, -1)
        return self.W_U[:, self.to_single_token(tokens) if isinstance(tokens, str) else int(tokens)]

    @torch.inference_mode()
    def generate(
        self,
        input: str | list[str] | Int[Tensor, "batch pos"] | Float[Tensor, "batch pos d_model"] = "",  # noqa: A002
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        freq_penalty: float = 0.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
        return_type: str | None = "input",
        verbose: bool = True,
        **generation_kwargs: object,
    ) -> Any:
        """Continue a text.

        A row that has reached an EOS is filled with EOS until all have, or ``max_new_tokens`` are made. Several strings are
        padded on the left.

        Args:
            input: a string, strings, token ids, or embeddings (without positions).
            max_new_tokens: at most so many.
            stop_at_eos: end rows at ``eos_token_id``.
            eos_token_id: one or several; None for the tokenizer's.
            do_sample: draw tokens; otherwise take the most probable.
            top_k, top_p, temperature: draw from the k most probable tokens, or from those that make up p, at a temperature.
            freq_penalty: subtracted from a token's logit for each time that it occurred; not with embeddings.
            use_past_kv_cache: keep keys and values, instead of reading the whole text for every token.
            prepend_bos, padding_side: as in ``to_tokens``.
            return_type: "str", "tokens" or "embeds" of the whole text (of embeddings, only the new tokens or their string);
                "input" for the kind of the input.
            verbose: show a progress bar.
            generation_kwargs: ``output_logits=True`` returns a ``GenerateDecoderOnlyOutput`` of transformers, with logits.
        """
        kind = _kind_of(input)
        return_type = {"text": "str"}.get(kind, kind) if return_type == "input" else return_type
        wants_logits = bool(generation_kwargs.pop("output_logits", False))
        generation_kwargs.pop("return_dict_in_generate", None)
        if generation_kwargs:
            raise TypeError(f"generate() got unexpected arguments: {', '.join(generation_kwargs)}")
        side = "left" if isinstance(input, list) and len(input) > 1 else padding_side
        start = self.to_tokens(input, prepend_bos=prepend_bos, padding_side=side) if kind == "text" else input  # type: ignore[arg-type]
        start = start.to(self.cfg.device)  # type: ignore[union-attr]
        tokens = None if kind == "embeds" else start
        mask = None if tokens is None or self.tokenizer is None else self.mask_of(tokens, prepend_bos, side)
        steps = self.decode(
            start,
            mask,
            max_new_tokens=max_new_tokens,
            stops=self.stop_tokens(stop_at_eos, eos_token_id),
            use_past_kv_cache=use_past_kv_cache,
            sampling=dict(top_k=top_k, top_p=top_p, temperature=temperature, freq_penalty=freq_penalty) if do_sample else None,
        )
        made = list(tqdm(steps, total=max_new_tokens, disable=not verbose))
        new = torch.stack([chosen for chosen, _ in made], dim=1)
        whole = new if tokens is None else torch.cat([tokens, new], dim=1)
        if wants_logits:
            from transformers.generation.utils import GenerateDecoderOnlyOutput

            return GenerateDecoderOnlyOutput(sequences=whole, logits=tuple(logits for _, logits in made))
        if return_type == "tokens":
            return whole
        if return_type == "embeds":
            return torch.cat([self.embed(start) if tokens is not None else start, self.embed(new)], dim=1)
        texts = [self.tokenizer.decode(row, skip_special_tokens=True) for row in whole]
        return texts[0] if len(texts) == 1 else texts

    @torch.inference_mode()
    def generate_stream(
        self,
        input: str | Int[Tensor, "batch pos"] = "",  # noqa: A002
        max_new_tokens: int = 10,
        max_tokens_per_yield: int = 25,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        freq_penalty: float = 0.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
        return_type: str | None = "input",
        verbose: bool = True,
    ) -> Iterator[Int[Tensor, "batch some_pos"]]:
        """Yield what :meth:`generate` returns in pieces of ``max_tokens_per_yield`` ids or more; the text comes first."""
        tokens = self.to_tokens(input, prepend_bos, padding_side) if isinstance(input, str) else input.to(self.cfg.device)
        steps = self.decode(
            tokens,
            None if self.tokenizer is None else self.mask_of(tokens, prepend_bos, padding_side),
            max_new_tokens=max_new_tokens,
            stops=self.stop_tokens(stop_at_eos, eos_token_id),
            use_past_kv_cache=use_past_kv_cache,
            sampling=dict(top_k=top_k, top_p=top_p, temperature=temperature, freq_penalty=freq_penalty) if do_sample else None,
        )
        waiting = [tokens]
        for chosen, _ in tqdm(steps, total=max_new_tokens, disable=not verbose):
            waiting.append(chosen[:, None])
            if sum(piece.shape[1] for piece in waiting) >= max_tokens_per_yield:
                yield torch.cat(waiting, dim=1)
                waiting = []
        if waiting:
            yield torch.cat(waiting, dim=1)

    def decode(
        self,
        start: Int[Tensor, "batch pos"] | Float[Tensor, "batch pos d_model"],
        mask: Int[Tensor, "batch pos"] | None,
        *,
        max_new_tokens: int,
        stops: tuple[Tensor, int] | None,
        use_past_kv_cache: bool,
        sampling: dict[str, object] | None,
    ) -> Iterator[tuple[Int[Tensor, " batch"], Float[Tensor, "batch d_vocab_out"]]]:
        """The next token of every row and the logits that it was chosen by, one step after the other.

        Args:
            start: token ids or embeddings.
            mask: 1 at real tokens; None if all are.
            max_new_tokens: the number of steps, unless all rows end before.
            stops: the tokens that end a row, and the one that fills an ended row; None if nothing does.
            use_past_kv_cache: read only new tokens at each step.
            sampling: arguments of ``sample_logits``; None for the most probable token.
        """
        self.eval()
        batch = start.shape[0]
        finished = torch.zeros(batch, dtype=torch.bool, device=start.device)
        cache = TransformerLensKeyValueCache.init_cache(self.cfg, self.cfg.device, batch) if use_past_kv_cache else None
        embeds = start.is_floating_point()
        text, unread = start, start
        if mask is None and cache is not None:
            mask = torch.ones(start.shape[:2], dtype=torch.long, device=start.device)
        unread_mask = mask
        for _ in range(max_new_tokens):
            logits = self.read(unread, unread_mask, cache)[:, -1]
            if sampling is None:
                chosen = logits.argmax(dim=-1)
            else:
                of_text = dict(freq_penalty=0.0) if embeds else dict(tokens=text)
                chosen = sample_logits(logits, **{**sampling, **of_text})
            chosen = chosen.to(start.device)
            if stops is not None:
                chosen = torch.where(finished, stops[1], chosen)
                finished = finished | torch.isin(chosen, stops[0])
            yield chosen, logits
            if bool(finished.all()):
                return
            new = chosen[:, None]
            text = torch.cat([text, self.embed(new) if embeds else new.to(text)], dim=1)
            new_mask = None if mask is None else mask.new_ones(batch, 1)
            if cache is not None:
                unread, unread_mask = new, new_mask
            else:
                mask = None if mask is None or new_mask is None else torch.cat([mask, new_mask], dim=1)
                unread, unread_mask = text, mask

    def read(self, new: Tensor, mask: Tensor | None, cache: TransformerLensKeyValueCache | None) -> Tensor:
        """Logits of new tokens, or of embeddings that still lack their positions."""
        if not new.is_floating_point():
            return self(new, attention_mask=mask, past_kv_cache=cache)
        if cache is not None:
            mask = cache.append_attention_mask(mask)
        past = 0 if cache is None else cache[0].past_keys.shape[1]
        residual, positions = self.get_residual(new, past, attention_mask=mask)
        return self(residual, start_at_layer=0, shortformer_pos_embed=positions, attention_mask=mask, past_kv_cache=cache)

    def stop_tokens(self, stop_at_eos: bool, eos_token_id: int | Sequence[int] | None) -> tuple[Tensor, int] | None:
        """The tokens that end a row, and the token that fills an ended row; None if nothing ends a row."""
        if not stop_at_eos:
            return None
        own = None if self.tokenizer is None else self.tokenizer.eos_token_id
        given = own if eos_token_id is None else eos_token_id
        if given is None:
            raise KVLensError(
                "generate: stop_at_eos=True needs an EOS, and this model has none: pass eos_token_id, or stop_at_eos=False"
            )
        several = [given] if isinstance(given, int) else list(given)
        filler = several[0] if own is None or isinstance(given, int) else own
        return torch.tensor(several, device=self.cfg.device), filler


def _kind_of(given: object) -> str:
    if isinstance(given, str) or (isinstance(given, list) and given and all(isinstance(text, str) for text in given)):
        return "text"
    if isinstance(given, Tensor) and given.dim() in (2, 3):
        return "tokens" if given.dim() == 2 else "embeds"
    raise KVLensError(f"generate: expected a string, strings, tokens [batch, pos] or embeddings, got {brief(given)}")

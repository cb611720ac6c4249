"""Continuing a text: one loop, token by token, for strings, tokens and embeddings, with and without a cache."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm
from transformer_lens import HookedRootModule
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens.utilities import USE_DEFAULT_VALUE, sample_logits

from kvlens.errors import KVLensError, brief


class Generates(HookedRootModule):
    """A model that continues texts."""

    cfg: Any
    tokenizer: Any
    embed: Any
    mask_of: Any
    to_tokens: Any
    get_residual: Any

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
        **generation_kwargs: Any,
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
        start = self.to_tokens(input, prepend_bos=prepend_bos, padding_side=side) if kind == "text" else input
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
        sampling: dict[str, Any] | None,
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
        options: dict[str, Any] = dict(shortformer_pos_embed=positions, attention_mask=mask, past_kv_cache=cache)
        return self(residual, start_at_layer=0, **options)

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


def _kind_of(given: Any) -> str:
    if isinstance(given, str) or (isinstance(given, list) and given and all(isinstance(text, str) for text in given)):
        return "text"
    if isinstance(given, Tensor) and given.dim() in (2, 3):
        return "tokens" if given.dim() == 2 else "embeds"
    raise KVLensError(f"generate: expected a string, strings, tokens [batch, pos] or embeddings, got {brief(given)}")

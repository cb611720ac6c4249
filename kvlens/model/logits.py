"""Logits at the end of a text, without the others, which would take the most memory; checks of what is generated."""

from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from kvlens.base import HookedTransformer
from kvlens.checks import Within
from kvlens.components import hidden_tokens_keep_positions
from kvlens.errors import KVLensError
from kvlens.model.streaming import has_hooks

LONG = 1024
"""Texts of at least this many tokens are read without logits, which would take more memory than everything else."""
MOST_NEW = Annotated[int, Within(1, 2**31 - 1)]
TEMPERATURE = Annotated[float, Within(0, 1e20)]
"""0 means the most probable token."""


def read_before_the_last(
    model: HookedTransformer, new: Tensor, mask: Tensor | None, cache: TransformerLensKeyValueCache | None
) -> tuple[Tensor, Tensor | None]:
    """Read a long text into the state of linear attention without logits; returns what is still to be read, with its mask."""
    n = new.shape[1] - 1
    if cache is None or mask is None or new.is_floating_point() or model.cfg.attention != "linear":
        return new, mask
    if n < LONG or has_hooks(model):  # a hook expects the whole text
        return new, mask
    model(new[:, :n], attention_mask=mask[:, :n], past_kv_cache=cache, return_type=None)
    return new[:, n:], mask[:, n:]


def check_left_padding(tokenizer: Any, tokens: Int[Tensor, "batch pos"], mask: Int[Tensor, "batch pos"]) -> None:
    """Raise KVLensError if rows end in padding (new tokens follow the last position), or if padding would be read as text."""
    pads_are_their_own = tokenizer.pad_token_id not in (None, tokenizer.bos_token_id, tokenizer.eos_token_id)
    read_as_text = pads_are_their_own and bool(((tokens[:, 0] == tokenizer.pad_token_id) & mask[:, 0].bool()).any())
    if read_as_text or not bool(mask[:, -1].all()):
        raise KVLensError(
            "generate: rows must be padded on the left, so that the new token follows the text: give strings (which are padded "
            "on the left), or tokens padded on the left together with padding_side='left'"
        )


class LastLogits:
    """The part of a HookedKVTransformer that computes them."""

    def logits_on(
        self: Any,
        text: Int[Tensor, "batch pos"],
        n_last: int,
        *,
        before: Int[Tensor, "batch before_pos"] | None = None,
        kept: Bool[Tensor, "batch before_pos"] | None = None,
        keeps_positions: bool = True,
        residuals: list[Tensor] | None = None,
    ) -> Float[Tensor, "batch n_last d_vocab"]:
        """See :meth:`kvlens.KVModel.logits_on`.

        With linear attention ``before`` is read into a state, in segments: its length costs no memory.
        """
        last, options = self.cfg.n_layers - 1, {}

        def keep(resid: Tensor, hook: Any) -> None:
            residuals.append(resid[:, -n_last:].clone())  # type: ignore[union-attr]

        def cut(resid: Tensor, hook: Any) -> Tensor:
            return resid[:, -n_last:]

        names = [*(f"blocks.{layer}.hook_resid_pre" for layer in range(last + 1)), f"blocks.{last}.hook_resid_post"]
        hooks: list[Any] = [] if residuals is None else [(name, keep) for name in names]
        hooks.append((f"blocks.{last}.{self.blocks[last].cut_point()}", cut))
        n_before = 0 if before is None else before.shape[1]
        if before is not None and n_before and self.cfg.attention == "linear" and not self.cfg.attention_variant:
            options["past_kv_cache"] = cache = self.empty_cache(len(text))
            mask = torch.ones_like(before) if kept is None else kept.to(before)
            with hidden_tokens_keep_positions(keeps_positions):
                self(before, return_type=None, attention_mask=mask, past_kv_cache=cache)
            kept = None
        elif before is not None and n_before:
            text = torch.cat([before, text], dim=1)
        mask = torch.ones_like(text)
        if kept is not None:
            mask[:, :n_before] = kept
        with hidden_tokens_keep_positions(keeps_positions):
            logits: Tensor = self.run_with_hooks(text, attention_mask=mask, fwd_hooks=hooks, **options)
        return logits

    def logits_of(
        self: Any, residual: Float[Tensor, "batch pos d_model"], layer: int | None = None, n_last: int | None = None
    ) -> Float[Tensor, "batch n_last d_vocab"]:
        """See :meth:`kvlens.KVModel.logits_of`."""
        n_layers, n_last = self.cfg.n_layers, n_last or residual.shape[1]
        hooks: list[Any] = []
        if layer is None or layer == n_layers:
            residual = residual[:, -n_last:]
        elif n_last < residual.shape[1]:
            hooks = [(f"blocks.{n_layers - 1}.hook_resid_post", lambda resid, hook: resid[:, -n_last:])]
        mask = torch.ones(residual.shape[:2], dtype=torch.long, device=residual.device)
        start = n_layers if layer is None else layer
        logits: Tensor = self.run_with_hooks(residual, start_at_layer=start, attention_mask=mask, fwd_hooks=hooks)
        return logits

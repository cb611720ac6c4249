"""HookedKVTransformer: a HookedTransformer whose attention may be linear, shifted, and biased by a converted prompt.

Its methods in their order: how it is built; a pass; tokens and generation; hooks and caches; what conversion and analyses read
of it; the attached bias. How weights get in and out is :class:`kvlens.model.loading.LoadsAndSaves`. What takes more than a few
lines is done by functions of the modules that are imported here.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens.utilities import USE_DEFAULT_VALUE, Slice, SliceInput
from transformers import PreTrainedTokenizerBase

from kvlens.base import HookedTransformerConfig
from kvlens.base.model import PASS_RETURNS
from kvlens.checks import Finite, Within, checked
from kvlens.components import (
    KVBlock,
    LayerBias,
    Normalizers,
    OffsetPosEmbed,
    SinusoidalPosEmbed,
    counted_by,
    upgrade_cache,
)
from kvlens.errors import KVLensError
from kvlens.kv_bias import KVBias
from kvlens.model import streaming
from kvlens.model.config import POSITIONAL_TYPES, HookedKVTransformerConfig
from kvlens.model.fingerprint import WeightsThen, fingerprint_of, look_again, weights_hash
from kvlens.model.inputs import (
    Names,
    OneThread,
    ask_for,
    check_hook_names,
    check_input,
    check_left_padding,
    check_room,
    check_text,
    check_tokens,
    saves,
    saving_hooks,
    warn_of_silent_hooks,
)
from kvlens.model.loading import LoadsAndSaves
from kvlens.model.protocol import ends_of, layers_of
from kvlens.ops.rotary import RotaryTable
from kvlens.tokenizer import warn_of_unknown_words

MOST_NEW = Annotated[int, Within(1, 2**31 - 1)]
TEMPERATURE = Annotated[float, Within(0, 1e20)]
"""0 means the most probable token."""


class HookedKVTransformer(LoadsAndSaves):
    """A :class:`kvlens.base.HookedTransformer` in every respect, with KV shift, linear attention and KV bias.

    Args:
        cfg: a :class:`HookedKVTransformerConfig`; a plain TransformerLens configuration gives a softmax model.
        tokenizer: a Hugging Face tokenizer, or None for models on token ids.
        move_to_device: as in TransformerLens.
        default_padding_side: "left" or "right", as in TransformerLens.
    """

    cfg: HookedKVTransformerConfig
    positions = POSITIONAL_TYPES

    @checked
    def __init__(
        self,
        cfg: HookedKVTransformerConfig | HookedTransformerConfig | dict[str, Any],
        tokenizer: PreTrainedTokenizerBase | None = None,
        move_to_device: bool = True,
        default_padding_side: str | None = None,
    ):
        cfg = HookedKVTransformerConfig.unwrap(cfg)
        self._attached: KVBias | None = None
        self._weights_then: WeightsThen | None = None  # when the bias was attached; None where nobody looks
        self._normalizers: Normalizers | None = None
        self._may_be_silent: tuple[tuple[str, object], ...] = ()  # (hook point, function) asked for while no bias was attached
        self._thread = OneThread()
        self._rotary_tables: dict[object, RotaryTable] = {}  # by their angles
        self.rounded_from: tuple[str, str] | None = None  # (hash of the rounded weights, hash before rounding)
        super().__init__(cfg, tokenizer, move_to_device, default_padding_side)

    def build_block(self, layer: int) -> KVBlock:
        """A layer with kvlens' attention; layers whose positions rotate by the same angles share a table of them."""
        block = KVBlock(self.cfg, layer)
        table: RotaryTable | None = getattr(block.attn, "rotary_table", None)
        if table is not None:
            block.attn.rotary_table = self._rotary_tables.setdefault(table.angles, table)
        return block

    def build_pos_embed(self) -> OffsetPosEmbed | SinusoidalPosEmbed | None:
        """Positions that are added to the stream, from an attached bias's offset on; None where there are none."""
        kind = self.cfg.positional_embedding_type
        if kind in ("rotary", "none"):
            return None
        return SinusoidalPosEmbed(self.cfg.d_model) if kind == "sinusoidal" else OffsetPosEmbed(self.cfg)

    def init_weights(self) -> None:
        """Draw the base's and kvlens' initial weights from ``cfg.seed``; the global generators are left unchanged."""
        super().init_weights()
        self.init_kv_parameters()

    def init_kv_parameters(self) -> None:
        """Initialize kvlens' own parameters: shift coefficients and feature maps (b_KV and b_D start at 0)."""
        generator = None if self.cfg.seed is None else torch.Generator().manual_seed(self.cfg.seed)
        for block in self.blocks:
            block.attn.init_kv_parameters(generator)

    @checked
    def forward(
        self,
        input: Any,  # noqa: A002
        return_type: PASS_RETURNS = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
        start_at_layer: int | None = None,
        tokens: Tensor | None = None,
        shortformer_pos_embed: Tensor | None = None,
        attention_mask: Tensor | None = None,
        stop_at_layer: int | None = None,
        past_kv_cache: TransformerLensKeyValueCache | None = None,
    ):
        """As the base's, which it calls; an empty stock cache is converted to kvlens' own, in place.

        With linear attention a long text runs in segments through all layers, unless something is hooked or gradients are
        required: see :mod:`kvlens.model.streaming`.

        With a cache, TransformerLens treats pad tokens at the end of the input as padding (or at the beginning, if the
        tokenizer pads on the left). Pass ``attention_mask=torch.ones_like(input)`` if they are text. Without a cache and with
        padding on the right they are always text.
        """
        check_input(self, input, attention_mask, past_kv_cache)
        with self.one_pass():
            if past_kv_cache is not None and self.cfg.needs_own_cache:
                upgrade_cache(past_kv_cache, linear=self.cfg.attention == "linear")
            if start_at_layer is None:
                if isinstance(input, (str, list)) and self.tokenizer is not None:
                    input = self.to_tokens(input, prepend_bos=prepend_bos, padding_side=padding_side)  # noqa: A001
                is_linear = self.cfg.attention == "linear"
                if is_linear and streaming.streams(self, input, attention_mask, past_kv_cache, return_type, stop_at_layer):
                    return streaming.forward_in_segments(
                        self,
                        input,
                        attention_mask,
                        past_kv_cache,
                        return_type=return_type,
                        loss_per_token=loss_per_token,
                        prepend_bos=prepend_bos,
                        padding_side=padding_side,
                        stop_at_layer=stop_at_layer,
                    )
            return super().forward(
                input,
                return_type,
                loss_per_token,
                prepend_bos,
                padding_side,
                start_at_layer,
                tokens,
                shortformer_pos_embed,
                attention_mask,
                stop_at_layer,
                past_kv_cache,
            )

    def empty_cache(self, batch: int = 1) -> TransformerLensKeyValueCache:
        """A decode cache to pass as ``past_kv_cache``, in which a pass stores what the following text needs.

        :meth:`forward` describes how pad tokens are treated.
        """
        return TransformerLensKeyValueCache.init_cache(self.cfg, self.cfg.device, batch)

    def input_to_embed(
        self,
        input: Any,  # noqa: A002
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
        attention_mask: Tensor | None = None,
        past_kv_cache: TransformerLensKeyValueCache | None = None,
    ):
        """As in the base, but tokens are checked, and layers get no mask that hides nothing: each would have to look."""
        if isinstance(input, Tensor):
            self.check_tokens(input)
        *read, mask = super().input_to_embed(input, prepend_bos, padding_side, attention_mask, past_kv_cache)
        return *read, None if mask is None or bool(mask.all()) else mask

    def check_length(self, n_positions: int, attention_mask: Tensor | None) -> None:
        """Raise KVLensError if the model limits the length of a text and this one, without padding, is longer."""
        cfg = self.cfg
        if not cfg.has_position_limit or n_positions <= cfg.n_ctx:
            return
        mask = counted_by(attention_mask)
        longest = n_positions if mask is None else int(mask.sum(dim=1).max())
        if longest > cfg.n_ctx:
            raise KVLensError(f"a text of {longest} tokens is longer than n_ctx={cfg.n_ctx}: shorten it")

    def to_tokens(
        self,
        input: Any,  # noqa: A002
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
        move_to_device: bool = True,
        truncate: bool = True,
    ):
        """As in TransformerLens, but not truncated if the length is unlimited, and without a BOS if a bias is attached."""
        check_text("to_tokens", input)
        truncate = truncate and self.cfg.has_position_limit
        with self._thread.turn:
            tokens = super().to_tokens(input, prepend_bos, padding_side, move_to_device, truncate)
        warn_of_unknown_words(self.tokenizer, input, tokens)
        return tokens

    @property
    def prepends_bos(self) -> bool:
        """Whether the model expects a BOS: ``cfg.default_prepend_bos``."""
        return bool(self.cfg.default_prepend_bos)

    def to_str_tokens(
        self,
        input: object,  # noqa: A002
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
    ):
        """As the base's."""
        with self._thread.turn:
            return super().to_str_tokens(input, prepend_bos, padding_side)

    def prepends(self, prepend_bos: bool | None) -> bool:
        """As in the base, but by default no BOS while a bias is attached, as the prompt had one."""
        return super().prepends(False if prepend_bos is USE_DEFAULT_VALUE and self._attached is not None else prepend_bos)

    @torch.inference_mode()
    @checked
    def generate(  # type: ignore[override]
        self,
        input: Any = "",  # noqa: A002
        max_new_tokens: MOST_NEW = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: MOST_NEW | None = None,
        top_p: Annotated[float, Within(above=0, most=1)] | None = None,
        temperature: TEMPERATURE = 1.0,
        freq_penalty: Finite = 0.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: Literal["left", "right"] | None = USE_DEFAULT_VALUE,
        return_type: Literal["input", "str", "tokens", "embeds"] = "input",
        verbose: bool = True,
        **generation_kwargs: Any,
    ):
        """As ``HookedTransformer.generate``; with linear attention the cost per token does not grow with the text."""
        how = max_new_tokens, stop_at_eos, eos_token_id, do_sample, top_k, top_p, temperature, freq_penalty
        text = use_past_kv_cache, prepend_bos, padding_side, return_type, verbose
        was_training = self.training
        if isinstance(input, Tensor) and input.dim() == 1:
            input = input[None]  # noqa: A001
        try:
            with self._thread.turn:
                return super().generate(input, *how, *text, **generation_kwargs)
        except BaseException:
            self.train(was_training)
            raise

    def decode(self, start: Tensor, mask: Tensor | None, **options: Any) -> Any:
        """As in the base, for rows that are padded on the left."""
        if not start.is_floating_point():
            self.check_tokens(start)
            if mask is not None:
                check_left_padding(self.tokenizer, start, mask)
        return super().decode(start, mask, **options)

    def read(self, new: Tensor, mask: Tensor | None, cache: TransformerLensKeyValueCache | None) -> Tensor:
        """As in the base; of a long text that linear attention reads into a state, only the last token gets logits."""
        new, mask = streaming.read_before_the_last(self, new, mask, cache)
        return super().read(new, mask, cache)

    def add_hook(self, name: Names, hook: object, *args: object, **kwargs: object) -> None:
        """As TransformerLens'."""
        check_hook_names(name, self.hook_dict)
        ask_for(self, name, hook)
        return super().add_hook(name, hook, *args, **kwargs)

    def _enable_hook(self, name: Names, hook: object, *args: object, **kwargs: object) -> None:
        if isinstance(name, str) and name not in self.hook_dict:  # tested first: caching everything calls this per name
            check_hook_names(name, self.hook_dict)
        if not saves(hook):  # cached names are checked in the methods below
            ask_for(self, name, hook)
        return super()._enable_hook(name, hook, *args, **kwargs)

    def remove_all_hook_fns(
        self, direction: object = "both", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """As in TransformerLens, whose own method writes to all hook points, hooked or not, after every hooked pass."""
        for point in self.hook_points():
            if point.fwd_hooks or point.bwd_hooks:
                point.remove_hooks(direction, including_permanent=including_permanent, level=level)

    def get_caching_hooks(
        self,
        names_filter: Names = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Slice | SliceInput = None,
    ):
        """As TransformerLens'; ``names_filter`` must name hook points that exist."""
        check_hook_names(names_filter, self.hook_dict)
        ask_for(self, names_filter)
        names_filter = list(names_filter) if isinstance(names_filter, tuple) else names_filter  # TransformerLens reads lists
        cache, fwd, bwd = super().get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache, pos_slice)
        named = [name for name, _ in fwd]
        saving, saving_gradients = saving_hooks(named, cache, pos_slice, device, remove_batch_dim)
        return cache, saving, saving_gradients if bwd else []

    def add_caching_hooks(self, names_filter: Names = None, *args: object, **kwargs: object):
        """As TransformerLens'; ``names_filter`` must name hook points that exist."""
        check_hook_names(names_filter, self.hook_dict)
        ask_for(self, names_filter)
        return super().add_caching_hooks(names_filter, *args, **kwargs)

    # what conversion and analyses read of a model: functions of it, in modules of their own
    check_tokens, fingerprint = check_tokens, fingerprint_of
    layers, ends = layers_of, ends_of
    logits_on, logits_of = streaming.logits_on, streaming.logits_of
    read_prompt, read_queries = streaming.read_prompt, streaming.read_queries

    def next_logits(
        self, tokens: Tensor, cache: TransformerLensKeyValueCache | None = None
    ) -> tuple[Tensor, TransformerLensKeyValueCache]:
        """See :meth:`kvlens.model.protocol.KVModel.next_logits`."""
        cache = self.empty_cache(len(tokens)) if cache is None else cache
        return self.logits_ahead(tokens, torch.ones_like(tokens), cache, 1)[:, 0], cache

    def logits_ahead(self, tokens: Tensor, mask: Tensor, cache: TransformerLensKeyValueCache, n_last: int) -> Tensor:
        """The logits after each of the last ``n_last`` tokens, [batch, n_last, d_vocab]; where the mask is 0 none is read."""
        last = self.cfg.n_layers - 1
        cut = f"blocks.{last}.{self.blocks[last].cut_point()}", lambda x, hook: x[:, -n_last:]
        with self.hooks(fwd_hooks=[cut] if n_last < tokens.shape[1] else []):
            logits: Tensor = self(tokens, attention_mask=mask, past_kv_cache=cache)
        return logits

    @property
    def attached_kv_bias(self) -> KVBias | None:
        """The bias that forward passes currently read, None without one."""
        return self._attached

    def attach_kv_bias(self, bias: KVBias) -> None:
        """Let every forward pass start from ``bias``, instead of the bias attached before or the trained one.

        While it is attached, strings get no BOS by default, since the prompt had one. It belongs to the thread that attached
        it: until it is detached, calls from other threads raise an error, also when that thread has ended (hooks are not
        protected in this way; give every thread a copy). A pass warns, once, if the weights are no longer those of the bias, as
        far as :class:`kvlens.model.fingerprint.WeightsThen` sees it, and if normalizers are below 0.

        Raises:
            KVLensError: the bias belongs to another model (the error names the field that differs), a number in it is not
                finite, or another thread is using the model.
        """
        if self.cfg.why_no_kv_bias is not None:
            raise KVLensError(f"attach_kv_bias: this model's attention cannot use a KV bias: {self.cfg.why_no_kv_bias}")
        bias.fingerprint.check(self.fingerprint(), "attach_kv_bias")
        bias.check_finite("attach_kv_bias")
        check_room(self.cfg, bias)
        with self._thread.changes("attach_kv_bias", self._has_bias):
            self._weights_then = WeightsThen(self)
            self._spread(bias)

    def detach_kv_bias(self) -> None:
        """Undo :meth:`attach_kv_bias`; does nothing if no bias is attached."""
        if self._attached is None:
            return
        with self._thread.changes("detach_kv_bias", self._has_bias):
            self._weights_then = None
            self._spread(None)

    @contextlib.contextmanager
    def kv_bias(self, bias: KVBias) -> Iterator["HookedKVTransformer"]:
        """``with model.kv_bias(bias): ...``; afterwards the bias attached before is attached again."""
        with self._thread.changes("kv_bias", self._has_bias) as own:
            before, weights_then = (self._attached, self._weights_then) if own else (None, None)
            self.attach_kv_bias(bias)
        try:
            yield self
        finally:
            with self._thread.changes("kv_bias", self._has_bias):
                self._weights_then = weights_then
                self._spread(before)

    @contextlib.contextmanager
    def holding(self, bias: KVBias) -> Iterator[None]:
        """See :meth:`kvlens.model.protocol.KVModel.holding`.

        Raises:
            KVLensError: another thread is using this model.
        """
        with self._thread.changes("convert_prompt", self._has_bias):
            before = self._attached
            self._spread(bias)
            try:
                yield
            finally:
                self._spread(before)

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[None]:
        """Enclose a pass, in its turn and by the thread of the attached bias.

        Warns, once each, of hooks that do not fire, and if the bias no longer fits the weights, or has normalizers below 0.
        """
        if self._may_be_silent:
            warn_of_silent_hooks(self)
        normalizers = self._normalizers
        with self._thread.turn, self._thread.passes(self._attached is not None):
            self._weights_then = look_again(self, self._attached, self._weights_then)
            yield
            if normalizers is not None:
                normalizers.tell()

    def _spread(self, bias: KVBias | None) -> None:
        """Attach ``bias``: give each layer its part."""
        self._attached = bias
        self._normalizers = None if bias is None else Normalizers()
        for layer, block in enumerate(self.blocks):
            block.attn.layer_bias = None if bias is None else LayerBias.of(bias, layer, block.attn.W_O.device)
            block.attn.normalizers = self._normalizers
        if isinstance(getattr(self, "pos_embed", None), (OffsetPosEmbed, SinusoidalPosEmbed)):
            self.pos_embed.position_offset = 0 if bias is None else bias.position_offset

    def _has_bias(self) -> bool:
        return self._attached is not None

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: object, **kwargs: object) -> "HookedKVTransformer":
        """Move or round the model; a rounded model keeps the hash of the weights that it was rounded from."""
        dtype = next(self.parameters()).dtype
        after = fn(torch.empty(0, dtype=dtype)).dtype
        lossy = after.is_floating_point and torch.finfo(after).bits < min(torch.finfo(dtype).bits, 32)
        before = self.fingerprint().weights if lossy else None
        super()._apply(fn, *args, **kwargs)
        self.cfg.dtype = after  # model.half() and the like, of which TransformerLens' configuration does not learn
        if before is not None:
            self.rounded_from = (weights_hash(self.state_dict()), before)
        if self._attached is not None:
            self._spread(self._attached)
        return self

"""HookedTransformer: a decoder with a hook point on every activation, and the block that it is a stack of.

kvlens' own class of TransformerLens 3's model, which release 4 no longer has: the same hook points, parameters, configuration
and methods, and for the same weights the same numbers up to the order of sums. TransformerLens 4 provides hook points and
caches of activations, the decode cache, weight processing and sampling.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache, TransformerLensKeyValueCacheEntry
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import (
    USE_DEFAULT_VALUE,
    get_dataset,
    get_device_for_block_index,
    lm_cross_entropy_loss,
    repeat_along_head_dimension,
)
from transformer_lens.utilities.activation_functions import apply_softcap
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES
from transformers import PreTrainedTokenizerBase

from kvlens.base.attention import Attention, GroupedQueryAttention
from kvlens.base.config import HookedTransformerConfig
from kvlens.base.layers import MLP, Embed, GatedMLP, MoE, Norm, PosEmbed, Unembed, final_norm
from kvlens.base.text import HasText
from kvlens.base.weights import HasWeights
from kvlens.checks import ensure
from kvlens.dtypes import dtype_of, is_dtype
from kvlens.errors import KVLensError, check_known

M = TypeVar("M", bound="HookedTransformer")


class TransformerBlock(nn.Module):
    """Norm, attention, norm, MLP; or attention and MLP side by side; or with norms behind them (Gemma 2, OLMo 2).

    Args:
        cfg: a :class:`~kvlens.base.HookedTransformerConfig`.
        block_index: the layer's number.
    """

    ln1: nn.Module
    ln2: nn.Module

    def __init__(self, cfg: HookedTransformerConfig, block_index: int):
        super().__init__()
        self.cfg = cfg = HookedTransformerConfig.of_layer(cfg, block_index)
        kind = cfg.normalization_type
        behind = cfg.use_normalization_before_and_after
        self.norms_follow = cfg.original_architecture in POST_NORM_ARCHITECTURES  # ln1 and ln2 are behind, not before (OLMo 2)
        for name in ("ln1",) if cfg.attn_only else ("ln1", "ln2"):
            setattr(self, name, nn.Identity() if kind is None else Norm(cfg, kind))
            if behind:  # those keep their weights: nothing follows that could absorb them
                setattr(self, f"{name}_post", nn.Identity() if kind is None else Norm(cfg, kind.removesuffix("Pre")))
        attn_type = cfg.attn_types[block_index] if cfg.use_local_attn and cfg.attn_types else "global"
        self.attn = self.build_attention(attn_type, block_index)
        if not cfg.attn_only:
            self.mlp = MoE(cfg) if cfg.num_experts else GatedMLP(cfg) if cfg.gated_mlp else MLP(cfg)
        self.hook_attn_in = HookPoint()
        self.hook_q_input, self.hook_k_input, self.hook_v_input = HookPoint(), HookPoint(), HookPoint()
        self.hook_mlp_in, self.hook_attn_out, self.hook_mlp_out = HookPoint(), HookPoint(), HookPoint()
        self.hook_resid_pre = HookPoint()
        if not (cfg.attn_only or cfg.parallel_attn_mlp):
            self.hook_resid_mid = HookPoint()
        self.hook_resid_post = HookPoint()

    def build_attention(self, attn_type: str, layer: int) -> Attention:
        """The attention of this layer."""
        kind = Attention if self.cfg.n_key_value_heads is None else GroupedQueryAttention
        return kind(self.cfg, attn_type, layer)

    def forward(
        self,
        resid_pre: Float[Tensor, "batch pos d_model"],
        shortformer_pos_embed: Float[Tensor, "batch pos d_model"] | None = None,
        past_kv_cache_entry: object = None,
        attention_mask: Tensor | None = None,
    ) -> Float[Tensor, "batch kept_pos d_model"]:
        """The stream after this layer; the other arguments are those of attention."""
        resid_pre = self.hook_resid_pre(resid_pre)
        query, key, value = self.attention_inputs(resid_pre, shortformer_pos_embed)
        attn_out = self.attn(query, key, value, past_kv_cache_entry=past_kv_cache_entry, attention_mask=attention_mask)
        attn_out = self.hook_attn_out(self._after(attn_out, "ln1"))
        if attn_out.shape[1] != resid_pre.shape[1]:  # a hook on the heads' outputs keeps only the last positions
            resid_pre = resid_pre[:, -attn_out.shape[1] :].contiguous()
        resid_pre = resid_pre.to(attn_out.device)
        if self.cfg.attn_only:
            return self.hook_resid_post(resid_pre + attn_out)
        if self.cfg.parallel_attn_mlp:
            return self.hook_resid_post(resid_pre + attn_out + self.apply_mlp(self.mlp_input(resid_pre)))
        resid_mid = self.hook_resid_mid(resid_pre + attn_out)
        return self.hook_resid_post(resid_mid + self.apply_mlp(self.mlp_input(resid_mid)))

    def attention_inputs(self, resid_pre: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """What queries, keys and values are projected from: the normalized stream, once or once per head.

        Each is normalized by itself: the hook points of the norm fire three times, and gradients flow through each.
        """
        cfg = self.cfg
        inputs: tuple[Tensor, ...] = (resid_pre, resid_pre, resid_pre)
        ungrouped = cfg.n_key_value_heads is None or cfg.ungroup_grouped_query_attention
        by_head = cfg.use_attn_in or cfg.use_split_qkv_input
        if by_head and not ungrouped and (positions is not None or not cfg.use_split_qkv_input):
            split = "use_split_qkv_input with positional_embedding_type='shortformer'"
            setting = split if cfg.use_split_qkv_input else "use_attn_in"
            raise KVLensError(
                f"{setting} cannot be combined with grouped keys (n_key_value_heads={cfg.n_key_value_heads} of {cfg.n_heads} "
                "heads), which have no separate input per query head: turn it off, or call "
                "model.set_ungroup_grouped_query_attention(True)"
            )
        if cfg.use_attn_in:
            inputs = (self.hook_attn_in(repeat_along_head_dimension(resid_pre, cfg.n_heads)),) * 3
        if cfg.use_split_qkv_input:
            heads = (cfg.n_heads, *([cfg.n_heads if ungrouped else cfg.n_key_value_heads] * 2))
            hooks = (self.hook_q_input, self.hook_k_input, self.hook_v_input)
            inputs = tuple(hook(repeat_along_head_dimension(resid_pre, n)) for hook, n in zip(hooks, heads, strict=True))
        query, key, value = inputs if self.norms_follow else (self.ln1(x) for x in inputs)
        if positions is None:
            return query, key, value
        positions = repeat_along_head_dimension(positions, cfg.n_heads) if by_head else positions
        return query + positions, key + positions, value

    def apply_mlp(self, normalized_resid: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The MLP's output, with any norm behind it, hooked."""
        return self.hook_mlp_out(self._after(self.mlp(normalized_resid), "ln2"))

    def norm_behind(self, norm: str) -> nn.Module | None:
        """The norm between a part and the residual stream, ``norm`` being ``ln1`` or ``ln2``; None in nearly all models."""
        if self.cfg.use_normalization_before_and_after:
            return getattr(self, f"{norm}_post")
        return getattr(self, norm) if self.norms_follow else None

    def _after(self, out: Tensor, norm: str) -> Tensor:
        """A part's output, normalized where the architecture does so."""
        behind = self.norm_behind(norm)
        return out if behind is None else behind(out)

    def mlp_input(self, resid: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What the MLP reads: the normalized stream."""
        resid = self.hook_mlp_in(resid.clone()) if self.cfg.use_hook_mlp_in else resid
        return resid if self.norms_follow else self.ln2(resid)


PASS_RETURNS = Literal["logits", "loss", "both"] | None
DATASETS = {"neel": "c4_code", "GPT2LMHeadModel": "openwebtext"} | dict.fromkeys(
    ("neel-solu-old", "GPTNeoForCausalLM", "GPTNeoXForCausalLM", "GPTJForCausalLM", "OPTForCausalLM"), "pile"
)
"""Samples of what models were trained on, by architecture."""
ON_REQUEST = {
    "hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_mlp_in": "use_hook_mlp_in",
    "hook_attn_in": "use_attn_in",
}
"""Hook points that fire only if the configuration asks for what they show."""


class Output(NamedTuple):
    """What a pass with ``return_type="both"`` returns."""

    logits: Float[Tensor, "batch pos d_vocab_out"]
    loss: Tensor


class HookedTransformer(HasText, HasWeights):
    """A decoder: embedding, blocks, norm, unembedding.

    Args:
        cfg: a configuration, this package's or TransformerLens', or a dict of its fields.
        tokenizer: a loaded tokenizer of transformers; None loads ``cfg.tokenizer_name`` if that is given.
        move_to_device: put the model on ``cfg.device``.
        default_padding_side: "left" or "right"; None keeps the tokenizer's own.
    """

    positions: tuple[str, ...] = ("standard", "rotary", "shortformer", "alibi")
    """Kinds of positions that this class computes."""

    def __init__(
        self,
        cfg: HookedTransformerConfig | dict[str, object],
        tokenizer: PreTrainedTokenizerBase | None = None,
        move_to_device: bool = True,
        default_padding_side: str | None = None,
    ):
        HookedRootModule.__init__(self)
        self.cfg = cfg = HookedTransformerConfig.unwrap(cfg)
        check_known("positional_embedding_type: none", cfg.positional_embedding_type, self.positions)
        self.tokenizer, self.dataset = None, None
        tokenizer = tokenizer if tokenizer is not None or cfg.tokenizer_name is None else self.tokenizer_by_name(cfg)
        if tokenizer is not None:
            self.set_tokenizer(tokenizer, default_padding_side=default_padding_side)
        if cfg.d_vocab == -1:
            raise KVLensError("d_vocab: give the number of tokens, or a tokenizer")
        self.embed, self.hook_embed = Embed(cfg), HookPoint()
        pos_embed = self.build_pos_embed()
        if pos_embed is not None:
            self.pos_embed, self.hook_pos_embed = pos_embed, HookPoint()
        if cfg.use_hook_tokens:
            self.hook_tokens = HookPoint()
        self.blocks = nn.ModuleList(self.build_block(layer) for layer in range(cfg.n_layers))
        if cfg.normalization_type is not None:
            self.ln_final = final_norm(cfg)
        self.unembed = Unembed(cfg)
        if cfg.init_weights:
            self.init_weights()
        if move_to_device:
            self.move_model_modules_to_device()
        self.setup()

    def build_pos_embed(self) -> nn.Module | None:
        """What embeds positions; None where nothing is added to the stream."""
        return None if self.cfg.positional_embedding_type == "rotary" else PosEmbed(self.cfg)

    def build_block(self, layer: int) -> nn.Module:
        """A new layer."""
        return TransformerBlock(self.cfg, layer)

    def check_hooks_to_add(self, hook_point: object, hook_point_name: str, *args: object, **kwargs: object) -> None:
        """Raise KVLensError for a hook point that the configuration keeps from firing."""
        setting = ON_REQUEST.get(hook_point_name.rpartition(".")[2])
        if setting is not None and not getattr(self.cfg, setting):
            raise KVLensError(f"the hook point {hook_point_name} fires only with {setting}: call model.set_{setting}(True)")

    def get_pos_offset(self, past_kv_cache: TransformerLensKeyValueCache, batch_size: int) -> int:
        """The number of positions in a decode cache, which must be for this batch and model."""
        differ = getattr(self.cfg, "layers_differ", False)
        for block, entry in zip(self.blocks, past_kv_cache.entries if differ else (), strict=differ):
            sizes = (block.cfg.n_key_value_heads or block.cfg.n_heads, block.cfg.d_head)
            if isinstance(entry, TransformerLensKeyValueCacheEntry) and not entry.past_keys.shape[1]:  # made all alike
                entry.past_keys, entry.past_values = (entry.past_keys.new_empty(batch_size, 0, *sizes) for _ in "kv")
        batch, past, *head = past_kv_cache[0].past_keys.shape
        expected = head if differ else [self.cfg.n_key_value_heads or self.cfg.n_heads, self.cfg.d_head]
        if batch != batch_size or head != expected:
            raise KVLensError(
                f"past_kv_cache holds {batch} texts with heads {head}; the input has {batch_size}, the model {expected}"
            )
        return past

    def check_length(self, n_positions: int, attention_mask: Tensor | None) -> None:
        """Raise KVLensError for a text that is too long; here the tables of positions say so themselves."""

    def get_residual(
        self,
        embed: Float[Tensor, "batch pos d_model"],
        pos_offset: int,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        attention_mask: Tensor | None = None,
        tokens: Tensor | None = None,
        return_shortformer_pos_embed: bool = True,
        device: torch.device | str | None = None,
    ) -> Any:
        """The stream before the first layer, from embeddings at positions from ``pos_offset`` on.

        And, unless ``return_shortformer_pos_embed`` is False, the positions that shortformer adds inside each layer, or None.
        """
        self.check_length(pos_offset + embed.shape[1], attention_mask)
        residual, positions, kind = embed, None, self.cfg.positional_embedding_type
        if kind != "alibi" and hasattr(self, "pos_embed"):
            positions = self.hook_pos_embed(self.pos_embed(embed[..., 0], pos_offset, attention_mask))
            residual, positions = (embed, positions) if kind == "shortformer" else (embed + positions, None)
        return (residual, positions) if return_shortformer_pos_embed else residual

    def input_to_embed(
        self,
        input: str | list[str] | Int[Tensor, "*batch pos"],  # noqa: A002
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
        attention_mask: Tensor | None = None,
        past_kv_cache: TransformerLensKeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The stream before the first layer, tokens, shortformer's positions, and the mask, earlier tokens included.

        A mask is made where one is needed: for rows padded on the left, and with a cache.
        """
        tokens = self.to_tokens(input, prepend_bos, padding_side) if isinstance(input, (str, list)) else input
        tokens = tokens if tokens.dim() > 1 else tokens[None]
        tokens = tokens.to(self.device_of_layer(0))
        is_left = self.tokenizer is not None and self.pads_on(padding_side) == "left"
        if attention_mask is None and (is_left or past_kv_cache is not None):
            attention_mask = self.mask_of(tokens, prepend_bos, padding_side)
        if attention_mask is not None:
            if attention_mask.shape != tokens.shape:
                raise KVLensError(
                    f"attention_mask: expected a value per token, {list(tokens.shape)}, got {list(attention_mask.shape)}"
                )
            attention_mask = attention_mask.to(tokens.device)
            if past_kv_cache is not None:
                attention_mask = past_kv_cache.append_attention_mask(attention_mask)
        past = 0 if past_kv_cache is None else self.get_pos_offset(past_kv_cache, tokens.shape[0])
        if self.cfg.use_hook_tokens:
            tokens = self.hook_tokens(tokens)
        embedded = self.hook_embed(self.embed(tokens))
        residual, positions = self.get_residual(embedded, past, prepend_bos, attention_mask, tokens)
        return residual, tokens, positions, attention_mask

    def forward(
        self,
        input: Any,  # noqa: A002
        return_type: PASS_RETURNS = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: str | None = USE_DEFAULT_VALUE,
        start_at_layer: int | None = None,
        tokens: Int[Tensor, "batch pos"] | None = None,
        shortformer_pos_embed: Float[Tensor, "batch pos d_model"] | None = None,
        attention_mask: Tensor | None = None,
        stop_at_layer: int | None = None,
        past_kv_cache: TransformerLensKeyValueCache | Sequence[object] | None = None,
    ) -> Any:
        """One pass.

        Args:
            input: a string, strings, token ids [pos] or [batch, pos]; with ``start_at_layer`` the stream before that layer.
            return_type: "logits", "loss" (of the next token, in nats), "both" (an :class:`Output`), or None for nothing.
            loss_per_token: the loss of each token, [batch, pos - 1], instead of the mean.
            prepend_bos, padding_side: as in ``to_tokens``.
            start_at_layer: skip the embedding and the layers before this one; counted from the end if negative.
            tokens: the text, if a loss is asked for with ``start_at_layer``.
            shortformer_pos_embed: positions, for a shortformer model with ``start_at_layer``.
            attention_mask: 1 at real tokens. Made as in :meth:`input_to_embed` if not given.
            stop_at_layer: return the stream before this layer; counted from the end if negative.
            past_kv_cache: a decode cache, or behind ``start_at_layer`` its entry of each layer; new keys and values are stored
                in it unless it is frozen.
        """
        if start_at_layer is None:
            read = self.input_to_embed(input, prepend_bos, padding_side, attention_mask, past_kv_cache)
            residual, tokens, shortformer_pos_embed, attention_mask = read
        else:
            residual = input
        for layer in range(self.cfg.n_layers)[start_at_layer:stop_at_layer]:
            device = self.device_of_layer(layer)
            residual = self.blocks[layer](
                residual.to(device),
                past_kv_cache_entry=None if past_kv_cache is None else past_kv_cache[layer],
                shortformer_pos_embed=None if shortformer_pos_embed is None else shortformer_pos_embed.to(device),
                attention_mask=attention_mask,
            )
        if stop_at_layer is not None:
            return residual
        if self.cfg.normalization_type is not None:
            residual = self.ln_final(residual)
        if return_type is None:
            return None
        logits = apply_softcap(self.unembed(residual), self.cfg.output_logits_soft_cap)
        if return_type == "logits":
            return logits
        ensure("forward: return_type", PASS_RETURNS, return_type)
        if tokens is None:
            raise KVLensError("forward: a loss needs the tokens: with start_at_layer, pass tokens=")
        loss = self.loss_fn(logits, tokens, attention_mask, per_token=loss_per_token)
        return loss if return_type == "loss" else Output(logits, loss)

    def loss_fn(
        self,
        logits: Float[Tensor, "batch pos d_vocab_out"],
        tokens: Int[Tensor, "batch pos"],
        attention_mask: Tensor | None = None,
        per_token: bool = False,
    ) -> Tensor:
        """Cross entropy of the next token, in nats: the mean over real tokens, or of each."""
        return lm_cross_entropy_loss(logits, tokens.to(logits.device), attention_mask, per_token)

    def run_with_cache(
        self, *model_args: object, return_cache_object: bool = True, remove_batch_dim: bool = False, **kwargs: object
    ) -> tuple[Any, Any]:
        """A pass and its activations, as an ``ActivationCache`` or, with ``return_cache_object=False``, a dict."""
        out, cache = HookedRootModule.run_with_cache(self, *model_args, remove_batch_dim=remove_batch_dim, **kwargs)
        return out, ActivationCache(cache, self, has_batch_dim=not remove_batch_dim) if return_cache_object else cache

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Whether ``hook_result`` shows each head's output, in memory that grows with the heads."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Whether ``hook_q_input``, ``hook_k_input``, ``hook_v_input`` show the inputs of each head's projections."""
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Whether ``hook_mlp_in`` shows the input of each MLP."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Whether ``hook_attn_in`` shows the input of each head."""
        self.cfg.use_attn_in = use_attn_in

    def set_ungroup_grouped_query_attention(self, ungroup_grouped_query_attention: bool) -> None:
        """Whether keys and values are computed for every query head."""
        self.cfg.ungroup_grouped_query_attention = ungroup_grouped_query_attention

    def device_of_layer(self, layer: int) -> torch.device:
        """Return the device of a layer: ``cfg.device``, or one of several GPUs."""
        return get_device_for_block_index(layer, self.cfg)

    def move_model_modules_to_device(self) -> None:
        """Put embeddings and layers where :meth:`device_of_layer` says, norm and unembedding with the last layer."""
        first, last = self.device_of_layer(0), self.device_of_layer(max(self.cfg.n_layers - 1, 0))
        for name, module in self.named_children():
            if name != "blocks":
                module.to(last if name in ("ln_final", "unembed") else first)
        for layer, block in enumerate(self.blocks):
            block.to(self.device_of_layer(layer))

    def to(self: M, device_or_dtype: torch.device | torch.dtype | str, print_details: bool = True) -> M:  # type: ignore[override]
        """Move the model to a device, or round or widen its weights to a dtype (or its name); the configuration follows."""
        if is_dtype(device_or_dtype):
            device_or_dtype = self.cfg.dtype = dtype_of(device_or_dtype, "to: dtype")
        else:
            self.cfg.device = device_or_dtype.type if isinstance(device_or_dtype, torch.device) else device_or_dtype
        if print_details:
            changes = isinstance(device_or_dtype, torch.dtype)
            print("Changing model dtype to" if changes else "Moving model to device: ", device_or_dtype)
        return nn.Module.to(self, device_or_dtype)

    def cuda(self: M, device: int | torch.device | None = None) -> M:
        """:meth:`to` a GPU, by its number or the current one."""
        return self.to("cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device)

    def cpu(self: M) -> M:
        """:meth:`to` the CPU."""
        return self.to(torch.device("cpu"))

    def mps(self: M) -> M:
        """:meth:`to` Apple's GPU."""
        return self.to(torch.device("mps"))

    def load_sample_training_dataset(self, **kwargs: object) -> Any:
        """10,000 to 20,000 texts like those that a public model was trained on, downloaded; kept as ``dataset``."""
        self.dataset = get_dataset(DATASETS[str(self.cfg.original_architecture)], **kwargs)
        return self.dataset

    def sample_datapoint(
        self, tokenize: bool = False, prepend_bos: bool | None = USE_DEFAULT_VALUE, padding_side: str | None = USE_DEFAULT_VALUE
    ) -> Any:
        """A random text of ``dataset``, or its tokens."""
        dataset = self.dataset if self.dataset is not None else self.load_sample_training_dataset()
        text = dataset[int(torch.randint(len(dataset), (1,)))]["text"]
        return self.to_tokens(text, prepend_bos, padding_side) if tokenize else text

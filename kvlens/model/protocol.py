"""The interface through which conversion, biases and analyses use a model, whatever its class.

Two classes implement it: :class:`kvlens.HookedKVTransformer`, and :class:`kvlens.KVTransformerBridge` for models that
Transformers runs.

What :mod:`kvlens.model.activations` reads of a model are its layers and both ends. A layer has *parts*: its attention, a
recurrent state, or in Falcon-H1 both. A :class:`Part` knows its hook points, its heads and its output weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformers import PreTrainedTokenizerBase

from kvlens.base import HookedTransformer
from kvlens.components import KVBlock
from kvlens.kv_bias import Fingerprint, KVBias
from kvlens.kv_bias.exact import PromptBatch, PromptReading
from kvlens.ops.softmax_features import ScoreRule

Form = Callable[[Tensor], Tensor] | None
"""What makes [batch, pos, head, d] of what passes a hook point; None where it has this form."""

ReadPoint = tuple[nn.Module, Form]


class HeadMatrices(NamedTuple):
    """A layer's weights by query head, as linear maps from and to the residual stream.

    Those of :func:`kvlens.model.head_matrices` have the linear part of the norms before and after the heads folded in
    (:mod:`kvlens.analyses.heads.head_pairs`), and are in float32 or wider.
    """

    W_Q: Float[Tensor, "head d_model d_key"]
    W_K: Float[Tensor, "head d_model d_key"]
    W_V: Float[Tensor, "head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]


class Part:
    """What reads other tokens in a layer; of a layer that is an MLP or experts alone, a part without heads.

    Attributes:
        layer: the layer's number.
        name: what stands before the names of its hook points, behind the block's.
        component: what it adds to the residual stream comes out of here.
        keeps_state: whether it keeps a state (:class:`kvlens.kv_bias.Recurrence`) instead of keys.
    """

    layer: int
    name: str = "attn"
    component: Any
    keeps_state = False

    @property
    def n_heads(self) -> int:
        """Query heads, or value heads of a state."""
        return 0

    @property
    def n_kv_heads(self) -> int:
        """Key-value heads."""
        return self.n_heads

    @property
    def normed(self) -> nn.Module | None:
        """The output projection, where a norm and a gate stand between it and the heads; otherwise None."""
        return None

    @property
    def output_bias(self) -> Float[Tensor, " d_model"] | None:
        """b_O."""
        return None

    def attention_points(self) -> dict[str, ReadPoint]:
        """Where to look, and in which form: pattern, values (before a shift), z, z_context, z_bias and, where there is one,
        gate."""
        return {}

    def output_weights(self) -> Float[Tensor, "head d_head d_model"]:
        """W_O of each head."""
        raise NotImplementedError

    def matrices(self) -> HeadMatrices | None:
        """The weights by query head; None where heads are not linear maps of the residual stream."""
        return None


class ScoredPart(Part):
    """Attention: what reads other tokens by scores of their keys."""

    def score_rule(self) -> ScoreRule:
        """How a key is scored."""
        raise NotImplementedError

    @property
    def sinks(self) -> Float[Tensor, " head"] | None:
        """The log-scores of attention sinks; None without."""
        return None


class LinearNorm(NamedTuple):
    """A norm up to its scale: x -> (x - mean(x)) * gain; ``gain`` is 1 if it has been folded."""

    gain: Tensor | float
    centers: bool


class Norms(NamedTuple):
    """The norms of a layer: before and behind its heads, and before its MLP; None where there is none."""

    before_heads: nn.Module | None
    behind_heads: nn.Module | None
    before_mlp: nn.Module | None


@dataclass(frozen=True)
class Block:
    """One layer.

    Attributes:
        parts: what reads other tokens; where there are two, attention comes first.
        mlp: what its MLP adds to the residual stream comes out of here; None without one.
        after: shows the residual stream behind it.
        norms: gives the norms that its heads read and write through; None where there is none.
        norm_modules: gives those, and that before its MLP, as modules.
        mlp_in: what its MLP reads goes into here; None without one.
        scale: shows what the norm behind its heads divides by; None without one, or if it is not shown.
    """

    parts: Sequence[Part]
    mlp: nn.Module | None
    after: nn.Module
    norms: Callable[[], tuple[LinearNorm | None, LinearNorm | None]]
    norm_modules: Callable[[], Norms]
    mlp_in: nn.Module | None
    scale: nn.Module | None = None


@dataclass(frozen=True)
class Ends:
    """How tokens enter the residual stream, and how the last x becomes logits:

        ((x - mean(x)) / s * norm_weight + norm_bias) W_U + b_U

    Attributes:
        before: shows the residual stream before the first layer.
        positions: shows the positional embedding that is added to the tokens'; None without one.
        W_U, b_U: the unembedding.
        norm_weight, norm_bias: of the final norm; None where there are none.
        centers: whether the final norm takes the mean away.
        scale: gives s of a residual stream in float64; 1 without a final norm.
    """

    before: nn.Module
    positions: nn.Module | None
    W_U: Float[Tensor, "d_model d_vocab"]
    b_U: Float[Tensor, " d_vocab"]
    norm_weight: Float[Tensor, " d_model"] | None
    norm_bias: Float[Tensor, " d_model"] | None
    centers: bool
    scale: Callable[[Float[Tensor, "*batch d_model"]], Float[Tensor, "*batch 1"]]


Hooks = Sequence[tuple[str | Callable[[str], bool], Callable[..., object]]]
"""TransformerLens hooks: pairs of a hook point's name (or a filter of names) and the function to call."""


class QueriesRead(NamedTuple):
    """The queries of one layer as scored, what attention returns for them, and the logarithm of their normalizers."""

    q: Float[Tensor, "batch pos head d_key"]
    z: Float[Tensor, "batch pos head d_head"]
    log_n: Float[Tensor, "batch pos head"]


@runtime_checkable
class KVModel(Protocol):
    """A TransformerLens model that reads a KV bias.

    Attributes:
        cfg: sizes under TransformerLens' names: n_layers, n_heads, n_key_value_heads, d_model, d_head (where layers differ, the
            largest), d_vocab, d_vocab_out, n_ctx, device; and ``attention`` ("linear", "softmax", or "hybrid" where layers are
            recurrent), ``kv_shift`` and ``attention_variant`` (None without them), ``has_position_limit`` (whether ``n_ctx``
            limits the length of a text).
        tokenizer: None for a model of token ids.
    """

    cfg: Any
    tokenizer: PreTrainedTokenizerBase

    @property
    def hook_dict(self) -> Mapping[str, HookPoint]:
        """The hook points by name."""

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """The token embedding."""

    @property
    def attached_kv_bias(self) -> KVBias | None:
        """The bias that forward passes currently read, None without one."""

    @property
    def prepends_bos(self) -> bool:
        """Whether strings get a BOS by default when no bias is attached."""

    def attach_kv_bias(self, bias: KVBias) -> None:
        """Let every forward pass start from ``bias``."""

    def detach_kv_bias(self) -> None:
        """Undo :meth:`attach_kv_bias`."""

    def kv_bias(self, bias: KVBias) -> AbstractContextManager[object]:
        """``with model.kv_bias(bias): ...``"""

    def fingerprint(self) -> Fingerprint:
        """Structure and weights, against which biases are checked."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Its weights, each once."""

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise KVLensError unless every token id lies in the vocabulary."""

    def to_tokens(self, *args: object, **kwargs: object) -> Int[Tensor, "batch pos"]:
        """As TransformerLens'."""

    def hooks(self, *args: object, **kwargs: object) -> AbstractContextManager[object]:
        """As TransformerLens'."""

    def run_with_hooks(self, *args: object, **kwargs: object) -> Any:
        """As TransformerLens'."""

    def generate(self, *args: object, **kwargs: object) -> Any:
        """As TransformerLens'."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """As TransformerLens'."""

    def logits_on(
        self,
        text: Int[Tensor, "batch pos"],
        n_last: int,
        *,
        before: Int[Tensor, "batch before_pos"] | None = None,
        kept: Bool[Tensor, "batch before_pos"] | None = None,
        keeps_positions: bool = True,
        residuals: list[Tensor] | None = None,
    ) -> Float[Tensor, "batch n_last d_vocab"]:
        """The logits at the last tokens of a text, behind other tokens and what is attached; no others are computed.

        Every token is read, also one with the number of a pad token.

        Args:
            text: [batch, pos].
            n_last: how many of its tokens, from its end.
            before: what stands in front of it; None for nothing.
            kept: True at the tokens of ``before`` that are read; None where all are.
            keeps_positions: whether the others take positions all the same.
            residuals: the residual stream at the last ``n_last`` tokens, [batch, n_last, d_model], is appended before each
                layer and after the last.
        """

    def logits_of(
        self, residual: Float[Tensor, "batch pos d_model"], layer: int | None = None, n_last: int | None = None
    ) -> Float[Tensor, "batch n_last d_vocab"]:
        """The logits that result from a residual stream before ``layer``, with the hooks that are currently set.

        Args:
            residual: the residual stream at every position.
            layer: the layer that reads it; None for the final norm and unembedding alone.
            n_last: compute the logits of this many positions, from the end; None for all.
        """

    def read_prompt(self, prompt: PromptBatch, with_queries: bool = False) -> PromptReading:
        """One pass over a prompt, after any attached bias; with its queries if they are asked for, of softmax attention."""

    def read_queries(self, tokens: Int[Tensor, "batch pos"], layers: range | None = None) -> list[QueriesRead]:
        """One pass over texts after the attached bias, of softmax attention; of some layers, all by default. Layers are counted
        among those with attention."""

    def next_logits(
        self, tokens: Int[Tensor, "batch pos"], cache: object = None
    ) -> tuple[Float[Tensor, "batch d_vocab"], object]:
        """The logits after ``tokens``, which continue the attached bias and what ``cache`` holds; and the new cache."""

    def holding(self, bias: KVBias) -> AbstractContextManager[object]:
        """:meth:`kv_bias` for a bias that was made from this model: neither weights nor numbers are looked at."""

    def layers(self) -> Sequence[Block]:
        """The layers: their parts, hook points and norms, which :mod:`kvlens.model.activations` reads."""

    def ends(self) -> Ends:
        """How tokens enter the residual stream, and how it becomes logits."""


class AttentionPart(ScoredPart):
    """The attention of a HookedKVTransformer's layer.

    Args:
        block: the layer.
        layer: its number.
    """

    def __init__(self, block: KVBlock, layer: int):
        self.layer, self.attn, self.component = layer, block.attn, block.hook_attn_out

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.attn.cfg.n_heads

    @property
    def n_kv_heads(self) -> int:
        """Key-value heads; as many as query heads where these are ungrouped."""
        cfg = self.attn.cfg
        return cfg.n_heads if cfg.ungroup_grouped_query_attention else cfg.n_key_value_heads or cfg.n_heads

    @property
    def output_bias(self) -> Tensor | None:
        """b_O."""
        return self.attn.b_O

    def attention_points(self) -> dict[str, ReadPoint]:
        """See :meth:`Part.attention_points`."""
        clip = self.attn.cfg.clip_qkv
        values: ReadPoint = self.attn.hook_v, None if clip is None else lambda v: v.clamp(min=-clip, max=clip)
        others = ("pattern", "z", "z_context", "z_bias")
        return {"values": values, **{name: (getattr(self.attn, f"hook_{name}"), None) for name in others}}

    def score_rule(self) -> ScoreRule:
        """How softmax attention scores a key."""
        return self.attn.score_rule()

    @property
    def sinks(self) -> Float[Tensor, " head"] | None:
        """The log-scores of attention sinks; None without."""
        return self.attn.sinks.flatten() if self.attn.cfg.use_attention_sinks else None

    def output_weights(self) -> Float[Tensor, "head d_head d_model"]:
        """W_O of each head."""
        return self.attn.W_O

    def matrices(self) -> HeadMatrices:
        """The weights by query head."""
        return HeadMatrices(self.attn.W_Q, self.attn.W_K, self.attn.W_V, self.attn.W_O)


def layers_of(model: HookedTransformer) -> list[Block]:
    """The layers of a HookedKVTransformer: attention alone."""
    found = []
    for number, block in enumerate(model.blocks):
        mlp, behind = None if model.cfg.attn_only else block.hook_mlp_out, block.norm_behind("ln1")
        scale = None if behind is None else behind.hook_scale
        norms, mlp_in = (partial(_norms_around, block), partial(_norm_modules, block)), getattr(block, "mlp", None)
        found.append(Block([AttentionPart(block, number)], mlp, block.hook_resid_post, *norms, mlp_in, scale))
    return found


def _norm_modules(block: KVBlock) -> Norms:
    before_heads, before_mlp = (None if block.norms_follow else getattr(block, name, None) for name in ("ln1", "ln2"))
    return Norms(before_heads, block.norm_behind("ln1"), before_mlp)


def _norms_around(block: KVBlock) -> tuple[LinearNorm | None, LinearNorm | None]:
    norms = (None if block.norms_follow else getattr(block, "ln1", None), block.norm_behind("ln1"))
    before, behind = (None if x is None else LinearNorm(getattr(x, "w", 1.0), getattr(x, "centers", False)) for x in norms)
    return before, behind


def ends_of(model: HookedTransformer) -> Ends:
    """Those of a HookedKVTransformer.

    Whether the norm centers is asked of the module: ``cfg.final_rms`` still says RMSNorm where TransformerLens has folded it
    into a LayerNormPre.
    """
    norm = getattr(model, "ln_final", None)
    centers = getattr(norm, "centers", False)

    def scale(x: Tensor) -> Tensor:
        if model.cfg.normalization_type is None:
            return torch.ones_like(x[..., :1])
        x = x - x.mean(dim=-1, keepdim=True) if centers else x
        return (x.square().mean(dim=-1, keepdim=True) + model.ln_final.eps).sqrt()

    positions = model.hook_pos_embed if model.cfg.positional_embedding_type in ("standard", "sinusoidal") else None
    weights = model.W_U, model.b_U, getattr(norm, "w", None), getattr(norm, "b", None)
    return Ends(model.blocks[0].hook_resid_pre, positions, *weights, centers, scale)

"""What the heads of a layer get and give: the common interface of linear and softmax attention.

**Hook points** that kvlens adds to an attention module are created once, from the configuration. Those of a feature that is off
exist but never fire, so that with everything off a cache has exactly TransformerLens' keys.

**Positions.** Padding takes up no position: TransformerLens counts the tokens that the mask shows, and so do RoPE, learned
positions and decay. A counterfactual prompt hides tokens of the original prompt, and later tokens may keep their positions:
positions are then counted over all tokens, including hidden ones, and the state of linear attention decays past them as past
any other. In both cases a hidden token adds nothing to A, D or the keys, and the KV shift mixes a token with the last *visible*
one.

**The variants of DUAL sec. 4**, for both kinds of attention, change keys and values, or z:

    augmented     k, v pass through MLPs before the heads, or an MLP of the block's      hook_k_augmented, hook_v_augmented
                  input is added to them
    negative      pattern @ v minus the mean value of the lowest-scored tokens           hook_z_negative (that mean)
    regularised   z_i minus alpha times the token's own value, or its own share of z     hook_z_own (what alpha multiplies)
    ridge         z from a linear solve instead of a pattern; each kind of attention provides its kernel

A converted prompt is still exact under the first and the third: b_KV holds augmented keys and values, and a token's own value
belongs to the text. Without a variant every function here returns its input.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint

from kvlens.base.layers import is_hooked
from kvlens.components.attention_variant import Augmented
from kvlens.components.config import AttentionConfig
from kvlens.components.decode_cache import CacheEntry
from kvlens.ops.attention_variants import augment, lowest_scored, mean_of_negatives

KVLENS_HOOKS = (
    *(f"hook_{x}_shift_coef" for x in "kvq"),
    *(f"hook_{x}_shifted" for x in "kvq"),
    *("hook_phi_q", "hook_phi_k", "hook_b_kv", "hook_b_d", "hook_b_keys"),
    *("hook_last_k", "hook_last_v", "hook_last_q", "hook_normalizer", "hook_z_context", "hook_z_bias"),
    *("hook_k_augmented", "hook_v_augmented", "hook_z_own", "hook_z_negative"),
)
OF_A_BIAS = ("hook_b_kv", "hook_b_d", "hook_z_context", "hook_z_bias")
"""Fire if there is a KV bias, attached or trained; for a softmax bias those of :data:`OF_A_SOFTMAX_BIAS` too."""
OF_A_SOFTMAX_BIAS = ("hook_b_keys", "hook_phi_q", "hook_normalizer")
"""``hook_b_keys`` fires only if the bias has keys: not with random, learned or Taylor features."""
OF_A_SHIFT_STATE = ("hook_last_k", "hook_last_v", "hook_last_q")
"""Fire if a KV bias is attached."""


def through(hook: HookPoint, x: Tensor) -> Tensor:
    """``hook(x)``, on a copy if anything is hooked, so that in-place edits do not change weights or a KVBias.

    A backward hook gets its gradient even if ``x`` does not require one, as with the tensors of an attached bias.
    """
    if not is_hooked(hook):
        return x
    x = x.clone()
    if hook.has_hooks("bwd") and torch.is_grad_enabled() and not x.requires_grad:
        x.requires_grad_()
    return hook(x)


_KEPT: ContextVar[bool | Tensor] = ContextVar("hidden_tokens_keep_positions", default=False)


@contextlib.contextmanager
def hidden_tokens_keep_positions(keep: bool = True, places: Int[Tensor, "batch pos"] | None = None) -> Iterator[None]:
    """Inside the block, in this thread only, tokens hidden by the attention mask keep their positions.

    Args:
        keep: whether they do.
        places: then the positions of the tokens of a pass; None where none was left out.
    """
    before = _KEPT.set(keep if places is None else places)
    try:
        yield
    finally:
        _KEPT.reset(before)


def counted_by(attention_mask: Tensor | None) -> Tensor | None:
    """The mask of tokens that take up positions: ``attention_mask``, or None if every token does."""
    return None if attention_mask is None or all_take_positions() else attention_mask


def all_take_positions() -> bool:
    """Whether hidden tokens currently keep their positions in this thread."""
    return _KEPT.get() is not False


def given_places() -> Int[Tensor, "batch pos"] | None:
    """The positions of the tokens of a pass in this thread, where tokens were left out of it."""
    given = _KEPT.get()
    return given if isinstance(given, Tensor) else None


class NewTokens(NamedTuple):
    """The new tokens of one forward pass as passed to a layer's heads: projected, normalized and shifted, not yet rotated.

    Attributes:
        q: [batch, pos, head, d_head].
        k, v: [batch, pos, kv_head, d_head].
        mask: True at real tokens among them; None where all are.
        attention_mask: the base's mask, 1 at real tokens, starting with those of the decode cache; or None.
        counted: the mask of tokens that take up positions (see above): ``attention_mask``, or None.
        score_bias: added to softmax scores (the base's ``additive_attention_mask``), or None.
    """

    q: Float[Tensor, "batch pos head d_head"]
    k: Float[Tensor, "batch pos kv_head d_head"]
    v: Float[Tensor, "batch pos kv_head d_head"]
    mask: Bool[Tensor, "batch pos"] | None
    attention_mask: Int[Tensor, "batch offset_pos"] | None
    counted: Int[Tensor, "batch offset_pos"] | None
    score_bias: Float[Tensor, "#batch #head #pos key_pos"] | None


class HeadOutputs(NamedTuple):
    """The output of the heads for new tokens, before the output projection.

    Attributes:
        z_context: the text's summand of z, already divided by the whole normalizer.
        z_bias: the KV bias's, likewise; None without a bias, or if softmax read its virtual keys as additional keys
            of the text, in which case ``z_context`` is the whole z.
        own_share: p_ii, each token's own share of z, if a variant of attention needs it.
    """

    z_context: Float[Tensor, "batch pos head d_head"]
    z_bias: Float[Tensor, "batch pos head d_head"] | None = None
    own_share: Float[Tensor, "batch pos head"] | None = None


class Heads:
    """The computation from q, k, v to z in one layer and one forward pass; each kind of attention is a subclass.

    Args:
        attn: the layer's attention module, which has the parameters and the hook points.
        tokens: the new tokens.
        entry: the layer's entry of the decode cache, for what came before ``tokens``; None at the start of a text.
    """

    def __init__(self, attn: Any, tokens: NewTokens, entry: CacheEntry | None):
        self.attn, self.cfg, self.tokens, self.entry = attn, attn.cfg, tokens, entry

    @classmethod
    def add_parameters(cls, attn: Any, cfg: AttentionConfig) -> None:
        """Add the parameters that this kind needs and TransformerLens lacks. Called once, when the model is built."""

    @classmethod
    def init_parameters(cls, attn: Any, generator: torch.Generator | None) -> None:
        """Initialize those parameters."""

    def outputs(self) -> HeadOutputs:
        """z of the context and of the bias; updates ``entry``. Called once."""
        raise NotImplementedError


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh}


class Augmentation(nn.Module):
    """For keys or values: one MLP per key-value head (DUAL eq. 14), or c times one beside the projection (app. E.5)."""

    def __init__(self, cfg: AttentionConfig, settings: Augmented):
        super().__init__()
        self.settings = settings
        n, beside = cfg.n_kv_heads, settings.parallel is not None
        inner = settings.width or 2 * cfg.d_head * (n if beside else 1)
        widths = [cfg.d_model if beside else cfg.d_head, *[inner] * (settings.depth - 1), cfg.d_head]
        heads = [*[1 if beside else n] * (settings.depth - 1), n]  # beside the projection, heads share all but the last layer
        shapes = [(head, a, b) for head, (a, b) in zip(heads, itertools.pairwise(widths), strict=True)]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=cfg.dtype)) for shape in shapes)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None) -> None:
        """Normal with variance 1 / fan-in (2 / fan-in after the activation); the last layer beside a projection is 0."""
        for layer, weight in enumerate(self.weights):
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn * ((1.0 if layer == 0 else 2.0) / weight.shape[1]) ** 0.5)
        if self.settings.parallel is not None:
            self.weights[-1].zero_()

    def forward(self, x: Float[Tensor, "batch pos kv_head d_head"], block_input: Tensor) -> Tensor:
        """g(x), or x + c g(block_input): of the input as the projections read it, the same for all heads or one for each."""
        weights = [w if len(w) == 1 else w.repeat_interleave(x.shape[2] // len(w), dim=0) for w in self.weights]  # as the shift
        activation, parallel = ACTIVATIONS[self.settings.activation], self.settings.parallel
        if parallel is None:
            return augment(x, weights, activation)
        return x + parallel * augment(block_input if block_input.dim() == 4 else block_input[:, :, None], weights, activation)


def read_values(
    attn: Any, pattern: Tensor, scores: Tensor, visible: Tensor | None, v: Tensor, entry: CacheEntry | None
) -> Tensor:
    """pattern @ v minus the negatives' mean value: [batch, pos, head, d_head].

    Args:
        attn: the layer's attention.
        pattern: [batch, head, pos, key_pos], as hooked.
        scores: the scores by which negatives are chosen.
        visible: True where a query sees a key, broadcastable to ``scores``; None where the score is not -inf.
        v: [batch, key_pos, kv_head, d_head].
        entry: the layer's decode cache entry, which stores the means of labels; None without a cache.
    """
    values = attn.per_query_head(v).transpose(1, 2)
    pattern = pattern.to(v.device, v.dtype)
    z = pattern @ values
    negative = None if attn.variant is None else attn.variant.negative
    if negative is None:
        return z.transpose(1, 2)
    visible = scores > -torch.inf if visible is None else visible
    mean = mean_of_negatives(values, lowest_scored(scores, visible, negative.k))
    mean = attn.hook_z_negative(mean.transpose(1, 2)).transpose(1, 2)
    if negative.per == "label":
        mean = pattern @ _all_means(mean, entry)
    return (z - negative.beta * mean).transpose(1, 2)


def regularized(attn: Any, heads: HeadOutputs, tokens: NewTokens) -> HeadOutputs:
    """z_i - alpha v_i, the same over 1 - alpha, or z_i - alpha p_ii v_i; only the text's summand of z is reduced."""
    settings = attn.variant.regularised
    if settings is None:
        return heads
    own = tokens.v.repeat_interleave(tokens.q.shape[2] // tokens.v.shape[2], dim=2).to(heads.z_context.dtype)
    if settings.form == "one_step":
        assert heads.own_share is not None
        own = heads.own_share[..., None].to(own.dtype) * own
    z = heads.z_context - settings.alpha * attn.hook_z_own(own)
    if settings.form != "normalised":
        return heads._replace(z_context=z)
    rest = 1.0 - settings.alpha
    return heads._replace(z_context=z / rest, z_bias=None if heads.z_bias is None else heads.z_bias / rest)


def _all_means(mean: Tensor, entry: CacheEntry | None) -> Tensor:
    """mean_{N_j} v of all tokens so far; those of earlier tokens are stored, since their queries are no longer available."""
    if entry is None:
        return mean
    before = entry.negative_means
    mean = mean if before is None else torch.cat([before, mean], dim=2)
    if not entry.frozen:
        entry.negative_means = mean
    return mean

"""The interface through which conversion, biases and analyses use a model, whatever its class.

Two classes implement it: :class:`kvlens.HookedKVTransformer`, and :class:`kvlens.KVTransformerBridge` for models that
Transformers runs.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.checks.values import CALLED
from kvlens.kv_bias import NO_STATES, Fingerprint, KVBias, RecurrentStates
from kvlens.model.parts import Ends, Layer

Hooks = Sequence[tuple[str | Callable[[str], bool], Callable[..., Any]]]
"""TransformerLens hooks: pairs of a hook point's name (or a filter of names) and the function to call."""


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
    tokenizer: Any

    @property
    def hook_dict(self) -> Any:
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

    def kv_bias(self, bias: KVBias) -> AbstractContextManager[Any]:
        """``with model.kv_bias(bias): ...``"""

    def fingerprint(self) -> Fingerprint:
        """Structure and weights, against which biases are checked."""

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise KVLensError unless every token id lies in the vocabulary."""

    def to_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """As TransformerLens'."""

    def hooks(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        """As TransformerLens'."""

    def run_with_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """As TransformerLens'."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As TransformerLens'."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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

    def layers(self) -> Sequence[Layer]:
        """The layers: their parts, hook points and norms, which :mod:`kvlens.model.reading` reads."""

    def ends(self) -> Ends:
        """How tokens enter the residual stream, and how it becomes logits."""


CALLED[KVModel] = (
    "a HookedKVTransformer (HookedKVTransformer.from_hooked_transformer makes one) or a KVTransformerBridge "
    "(KVTransformerBridge.of makes one)"
)


class PromptTokens(NamedTuple):
    """Tokens of the prompt(s), which of them are read, and whether the caller gave a batch.

    Attributes:
        mask: True at tokens that are read; None if all are. The others are padding, or deleted in a counterfactual prompt.
        has_batch: whether the bias gets a batch axis.
        keeps_positions: whether tokens that are not read still take up positions.
    """

    tokens: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"] | None
    has_batch: bool
    keeps_positions: bool = False

    def lengths(self) -> int | Int[Tensor, " batch"]:
        """The number of tokens that are read: an int, or one per row if rows differ."""
        if self.mask is None:
            return self.tokens.shape[1]
        lengths = self.mask.sum(dim=1)
        return int(lengths[0]) if bool((lengths == lengths[0]).all()) else lengths

    def n_positions(self) -> int | Int[Tensor, " batch"]:
        """The number of positions that the prompt takes up: one for each token that is read, or for every token."""
        return self.tokens.shape[1] if self.keeps_positions else self.lengths()


class PromptReading(NamedTuple):
    """What one pass over a prompt leaves for conversion; the layers are those with attention.

    Attributes:
        keys: as scored.
        values: at the same positions.
        residual: the residual stream after the last layer.
        queries: as scored, of each layer; None unless they were asked for.
        shift_state: raw last rows of the projections that are shifted, by "k", "v" and "q".
        recurrent: the states of recurrent layers, including the effect of the bias that the prompt continues.
    """

    keys: Float[Tensor, "layer batch kv_head pos d_key"]
    values: Float[Tensor, "layer batch kv_head pos d_head"]
    residual: Float[Tensor, "batch pos d_model"]
    queries: list[Float[Tensor, "batch pos head d_key"]] | None = None
    shift_state: Mapping[str, Float[Tensor, "layer batch window head d_head"]] = {}
    recurrent: RecurrentStates = NO_STATES


class QueriesRead(NamedTuple):
    """The queries of one layer as scored, what attention returns for them, and the logarithm of their normalizers."""

    q: Float[Tensor, "batch pos head d_key"]
    z: Float[Tensor, "batch pos head d_head"]
    log_n: Float[Tensor, "batch pos head"]


class ReadsPrompts(KVModel, Protocol):
    """What conversion asks of a :class:`KVModel` with softmax attention. Layers are counted among those with attention."""

    def read_prompt(self, prompt: PromptTokens, with_queries: bool = False) -> PromptReading:
        """One pass over a prompt, after any attached bias; with its queries if they are asked for."""

    def read_queries(self, tokens: Int[Tensor, "batch pos"], layers: range | None = None) -> list[QueriesRead]:
        """One pass over texts after the attached bias; of some layers, all by default."""

    def next_logits(self, tokens: Int[Tensor, "batch pos"], cache: Any = None) -> tuple[Float[Tensor, "batch d_vocab"], Any]:
        """The logits after ``tokens``, which continue the attached bias and what ``cache`` holds; and the new cache."""

    def holding(self, bias: KVBias) -> AbstractContextManager[Any]:
        """:meth:`kv_bias` for a bias that was made from this model: neither weights nor numbers are looked at."""

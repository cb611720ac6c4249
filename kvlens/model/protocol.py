"""The interface through which conversion, biases and analyses use a model, whatever its class.

Two classes implement it: :class:`kvlens.HookedKVTransformer`, and :class:`kvlens.KVTransformerBridge` for models that
Transformers runs.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.checks.values import CALLED
from kvlens.kv_bias import Fingerprint, KVBias, RecurrentStates
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


class PromptKeysAndValues(NamedTuple):
    """Keys as scored, and values, of every attention layer and every position of a prompt.

    ``recurrent`` holds the states of all other layers after the prompt, including the effect of the bias that it continues;
    None if there are no such layers.
    """

    keys: Float[Tensor, "layer batch kv_head pos d_key"]
    values: Float[Tensor, "layer batch kv_head pos d_head"]
    recurrent: RecurrentStates | None = None


@runtime_checkable
class ReadsPrompts(Protocol):
    """A :class:`KVModel` that runs a prompt itself and returns what conversion keeps of it."""

    def read_prompt(
        self, tokens: Int[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None, keeps_positions: bool
    ) -> PromptKeysAndValues:
        """One pass over a prompt, after any attached bias.

        Args:
            tokens: tokens of the prompts.
            mask: True at tokens that are read; None if all are.
            keeps_positions: whether tokens that are not read still take up positions.
        """

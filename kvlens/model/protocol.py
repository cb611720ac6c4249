"""What conversion, biases and analyses ask of a model: these names, whatever class it is.

Two front ends keep it: :class:`kvlens.HookedKVTransformer`, and :class:`kvlens.KVTransformerBridge` for models as Transformers
runs them.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.kv_bias import Fingerprint, KVBias, RecurrentStates

Hooks = Sequence[tuple[str | Callable[[str], bool], Callable[..., Any]]]
"""TransformerLens' hooks: the name of a hook point, or a function of names, and what is called there."""


@runtime_checkable
class KVModel(Protocol):
    """A TransformerLens model that reads a KV bias.

    Attributes:
        cfg: sizes by TransformerLens' names: n_layers, n_heads, n_key_value_heads, d_model, d_head, d_vocab, n_ctx, device.
        tokenizer: None for a model of token ids.
    """

    cfg: Any
    tokenizer: Any

    @property
    def hook_dict(self) -> Any:
        """The hook points by name."""

    @property
    def attached_kv_bias(self) -> KVBias | None:
        """The bias that forward passes read now, None without one."""

    @property
    def prepends_bos(self) -> bool:
        """Whether strings get a BOS by default, where no bias is attached."""

    def attach_kv_bias(self, bias: KVBias) -> None:
        """Let every forward pass start from ``bias``."""

    def detach_kv_bias(self) -> None:
        """Undo :meth:`attach_kv_bias`."""

    def kv_bias(self, bias: KVBias) -> AbstractContextManager[Any]:
        """``with model.kv_bias(bias): ...``"""

    def fingerprint(self) -> Fingerprint:
        """Structure and weights, as biases are checked against."""

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise KVLensError unless every token id lies in the vocabulary."""

    def to_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """As TransformerLens'."""

    def hooks(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        """As TransformerLens'."""

    def run_with_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """As TransformerLens'."""

    def run_with_cache(self, *args: Any, **kwargs: Any) -> Any:
        """As TransformerLens'."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As TransformerLens'."""


class PromptKeysAndValues(NamedTuple):
    """Keys as they are scored, and values, of every attention layer and every position of a prompt.

    ``recurrent`` holds the states of the other layers after the prompt, what it continues from included; None where there are
    none.
    """

    keys: Float[Tensor, "layer batch kv_head pos d_key"]
    values: Float[Tensor, "layer batch kv_head pos d_head"]
    recurrent: RecurrentStates | None = None


@runtime_checkable
class ReadsPrompts(Protocol):
    """A :class:`KVModel` that runs a prompt itself and hands over what conversion keeps of it."""

    def read_prompt(
        self, tokens: Int[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None, keeps_positions: bool
    ) -> PromptKeysAndValues:
        """One pass over a prompt, with what is attached in front of it.

        Args:
            tokens: of the prompts.
            mask: True at tokens that are read; None where all are.
            keeps_positions: whether the others take positions all the same.
        """

"""The interface through which conversion, biases and analyses use a model, whatever its class.

Two classes implement it: :class:`kvlens.HookedKVTransformer`, and :class:`kvlens.KVTransformerBridge` for models that
Transformers runs.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.checks.values import CALLED
from kvlens.kv_bias import Fingerprint, KVBias, RecurrentStates

Hooks = Sequence[tuple[str | Callable[[str], bool], Callable[..., Any]]]
"""TransformerLens hooks: pairs of a hook point's name (or a filter of names) and the function to call."""


class Unembedding(NamedTuple):
    """How the last residual stream x becomes logits: ((x - mean(x)) / s * norm_weight + norm_bias) W_U + b_U.

    ``norm_weight`` and ``norm_bias`` are None where there are none; ``centers`` says whether the mean is taken away.
    """

    W_U: Float[Tensor, "d_model d_vocab"]
    b_U: Float[Tensor, " d_vocab"]
    norm_weight: Float[Tensor, " d_model"] | None
    norm_bias: Float[Tensor, " d_model"] | None
    centers: bool


class FrozenNorm(NamedTuple):
    """A norm between a layer's heads and the residual stream, with its scale held: x -> (x - mean(x)) / scale * gain.

    ``gain`` is 1 if it has been folded; ``centers`` says whether the mean is subtracted.
    """

    scale: Float[Tensor, "*batch pos 1"]
    gain: Tensor | float
    centers: bool


class DirectPath(NamedTuple):
    """What lies between the heads' outputs and the logits in one pass, for direct logit attribution.

    Attributes:
        scale: s of the final norm at each position; 1 without one.
        factors: for each layer, what a head's output is multiplied by before its output projection (a norm's frozen scale and a
            gate); None if there is no such factor.
        behind: for each layer, the norm between its heads and the residual stream; None without one.
    """

    scale: Float[Tensor, "*batch pos 1"]
    factors: list[Float[Tensor, "*batch pos head d_head"] | None]
    behind: list[FrozenNorm | None]


class HeadsRead(NamedTuple):
    """The attention of one layer in a pass over a batch: z_i = gate_i * sum_j pattern_ij values_j + what a bias contributes.

    With a KV shift, the values are those before the shift.

    Attributes:
        pattern: the attention pattern; for a recurrent layer the exact effective attention.
        values: of each query head.
        z: the heads' outputs, before the output projection (and, in a recurrent layer, before its norm and gate).
        gate: what the heads' outputs are multiplied by before z is read; None without one.
    """

    pattern: Float[Tensor, "batch head pos pos"]
    values: Float[Tensor, "batch pos head d_head"]
    z: Float[Tensor, "batch pos head d_head"]
    gate: Float[Tensor, "batch pos head d_head"] | None


class HeadMatrices(NamedTuple):
    """A layer's weights by query head, as linear maps from and to the residual stream, in float32 or wider.

    The linear part of the norms before and after the heads is folded in (:mod:`kvlens.analyses.heads.weights`).
    """

    W_Q: Float[Tensor, "head d_model d_key"]
    W_K: Float[Tensor, "head d_model d_key"]
    W_V: Float[Tensor, "head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]


class LayerSummands(NamedTuple):
    """What one layer adds to the residual stream: (z_context + z_bias) * factor W_O, b_O and the output of its MLP.

    Attributes:
        z_context: the heads' outputs, or, if a bias is read, the part that comes from the text.
        z_bias: the part that comes from the bias; None without one.
        factor: what z is multiplied by before W_O, the norm and gate of a recurrent layer; None without one.
        b_O: bias of the output projection; None without one.
        mlp: output of the MLP; None without one.
    """

    z_context: Float[Tensor, "pos head d_head"]
    z_bias: Float[Tensor, "pos head d_head"] | None
    factor: Float[Tensor, "pos head d_head"] | None
    b_O: Float[Tensor, " d_model"] | None
    mlp: Float[Tensor, "pos d_model"] | None


class StreamReading(NamedTuple):
    """The summands of the residual stream at some positions of one pass.

    Attributes:
        embeddings: ``embed`` and, where positions are added to the stream, ``pos_embed``.
        layers: what each layer adds.
        residual: the stream after the last layer.
        scale: s of the final norm; 1 without one.
    """

    embeddings: dict[str, Float[Tensor, "pos d_model"]]
    layers: list[LayerSummands]
    residual: Float[Tensor, "pos d_model"]
    scale: Float[Tensor, "pos 1"]


class LayerReading(NamedTuple):
    """What one layer's text reads of a prompt, from a pass over both: z_i = gate_i * sum_j pattern_ij values_j + the rest.

    Attributes:
        pattern: the attention from the text to the prompt; the exact effective attention of a recurrent layer.
        values: of the prompt, by query head.
        z: the heads' whole outputs on the text.
        z_bias: what a bias that stands in front of the prompt gives to them; None without one.
        gate: what the heads' outputs are multiplied by before z is taken; None without one.
        factor: what z is multiplied by before the output projection, the norm and gate of a recurrent layer; None without one.
    """

    pattern: Float[Tensor, "text head prompt"]
    values: Float[Tensor, "prompt head d_head"]
    z: Float[Tensor, "text head d_head"]
    z_bias: Float[Tensor, "text head d_head"] | None
    gate: Float[Tensor, "text head d_head"] | None
    factor: Float[Tensor, "text head d_head"] | None


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
    def heads_per_layer(self) -> list[int]:
        """Query heads of each layer; of a recurrent layer value heads, and where a layer has both, query heads come first."""

    def head_hooks(self, layer: int, name: str) -> dict[str, int]:
        """The hook points ``hook_z``, ``hook_z_bias`` or ``hook_z_context`` of a layer: full name -> number of heads there.

        In the order of heads; empty for a layer without heads.
        """

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers that keep a state (:class:`kvlens.kv_bias.RecurrentStates`), instead of keys or, in Falcon-H1, next to
        them."""

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

    def using_softmax_form(self, form: str | None = None) -> AbstractContextManager[Any]:
        """Inside, a model that has several forms of softmax attention uses another, the fastest by default."""

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

    def run_with_cache(self, *args: Any, **kwargs: Any) -> Any:
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

    def unembedding(self) -> Unembedding:
        """The final norm and the unembedding."""

    def head_matrices(self) -> list[HeadMatrices | None]:
        """The matrices of each layer's heads, folded; None if queries, keys or values are not linear in the residual stream, or
        the front end does not show their weights.

        Norms, rotations and shifts of queries and keys are left out.
        """

    def output_weights(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """W_O of each head of a layer.

        Raises:
            KVLensError: the heads of this family have no such matrix.
        """

    def read_stream(self, text: Int[Tensor, " pos"], n_last: int) -> StreamReading:
        """The summands of the residual stream at the last ``n_last`` positions of a text, behind what is attached.

        Raises:
            IndirectHeads: a family whose layers add something other than the outputs of heads and MLPs.
        """

    def visit_heads(self, tokens: Int[Tensor, "batch pos"], visit: Callable[[int, HeadsRead], None]) -> None:
        """One pass over texts of equal length, behind what is attached: ``visit(layer, read)`` as each layer is computed.

        Every token is read, also one with the number of a pad token. Patterns of different layers are never kept together.
        """

    def direct_path(self, text: Int[Tensor, "*batch pos"], run: Callable[[], Any] | None = None) -> DirectPath:
        """What lies between the heads and the logits in a pass over a text, behind what is attached.

        Args:
            text: one text, or several of equal length.
            run: a function that makes the pass over all positions, if the caller needs it for something else as well.

        Raises:
            IndirectHeads: a family with something else between its heads and the residual stream.
        """

    def read_attention(self, prompt: Int[Tensor, " prompt"], text: Int[Tensor, " text"]) -> list[LayerReading] | None:
        """What each layer's text reads of a prompt, position by position, in one pass over both.

        None for a model whose hook points show it segment by segment, in bounded memory.
        """

    def read_memory(
        self, tokens: Int[Tensor, " pos"], kept: Bool[Tensor, " pos"] | None = None, keeps_positions: bool = True
    ) -> Any:
        """What each token of a prompt leaves in the states of the recurrent layers, a :class:`kvlens.bridge.LayerMemory` each.

        Args:
            tokens: of the prompt.
            kept: True at the tokens that are read; None where all are. The others leave nothing.
            keeps_positions: whether the others take positions all the same.
        """


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
        recurrent: the states of recurrent layers, including the effect of the bias that the prompt continues; None without
            such layers.
    """

    keys: Float[Tensor, "layer batch kv_head pos d_key"]
    values: Float[Tensor, "layer batch kv_head pos d_head"]
    residual: Float[Tensor, "batch pos d_model"]
    queries: list[Float[Tensor, "batch pos head d_key"]] | None = None
    shift_state: Mapping[str, Float[Tensor, "layer batch window head d_head"]] = {}
    recurrent: RecurrentStates | None = None


class QueriesRead(NamedTuple):
    """The queries of one layer as scored, what attention returns for them, and the logarithm of their normalizers."""

    q: Float[Tensor, "batch pos head d_key"]
    z: Float[Tensor, "batch pos head d_head"]
    log_n: Float[Tensor, "batch pos head"]


class ReadsPrompts(KVModel, Protocol):
    """What conversion asks of a :class:`KVModel` with softmax attention. Layers are counted among those with attention."""

    def parts(self) -> Sequence[Sequence[Any]]:
        """The parts of each layer. Softmax attention has ``score_rule()``, ``sinks`` and ``output_weights()``."""

    def read_prompt(self, prompt: PromptTokens, with_queries: bool = False) -> PromptReading:
        """One pass over a prompt, after any attached bias; with its queries if they are asked for."""

    def read_queries(self, tokens: Int[Tensor, "batch pos"], layers: range | None = None) -> list[QueriesRead]:
        """One pass over texts after the attached bias; of some layers, all by default."""

    def next_logits(self, tokens: Int[Tensor, "batch pos"], cache: Any = None) -> tuple[Float[Tensor, "batch d_vocab"], Any]:
        """The logits after ``tokens``, which continue the attached bias and what ``cache`` holds; and the new cache."""

    def holding(self, bias: KVBias) -> AbstractContextManager[Any]:
        """:meth:`kv_bias` for a bias that was made from this model: neither weights nor numbers are looked at."""


def joined_heads(parts: Sequence[Float[Tensor, "..."]], dim: int = -2) -> Float[Tensor, "..."]:
    """The heads of a layer's parts, as `KVModel.head_hooks` names them, in one tensor.

    Narrower vectors are padded with zeros, which add nothing to a product.

    Args:
        parts: equal in shape except along the axis of heads and the axis after it, which is padded.
        dim: the axis of heads, counted from the end; nothing is padded if it is the last.
    """
    if len(parts) == 1:
        return parts[0]
    if dim < -1:
        widest = max(part.shape[dim + 1] for part in parts)
        after = [0, 0] * (-dim - 2)
        parts = [torch.nn.functional.pad(part, (*after, 0, widest - part.shape[dim + 1])) for part in parts]
    return torch.cat(list(parts), dim=dim)

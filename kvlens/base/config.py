"""The configuration of a :class:`kvlens.base.HookedTransformer`: TransformerLens 3's fields, with their defaults.

Unlike there, a configuration seeds nothing: ``seed`` is that of the initial weights alone.
"""

import copy
import math
import pprint
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformer_lens.utilities import SUPPORTED_ACTIVATIONS

from kvlens.errors import KVLensError, check_known

NORMALIZATIONS = (None, "LN", "LNPre", "RMS", "RMSPre")
INIT_MODES = ("gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "muP")
NORM_OVER_ALL_HEADS = ("OlmoeForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""Architectures that normalize queries and keys before they are split into heads."""
C = TypeVar("C", bound="HookedTransformerConfig")
HEAD_SIZES = ("n_heads", "n_key_value_heads", "d_head")
"""Sizes of which each layer may have its own, in a list called "..._by_layer"."""


@dataclass
class HookedTransformerConfig:
    """Sizes and kinds of everything in a model.

    Args:
        d_model, d_head, n_layers, n_ctx: sizes; ``n_ctx`` is the longest text.
        n_heads: query heads; -1 for ``d_model // d_head``.
        d_mlp: width of the MLPs; None for ``4 * d_model``.
        d_vocab, d_vocab_out: tokens read and predicted; -1 for the tokenizer's, and for ``d_vocab``.
        device: where the model is put; None for a GPU if there is one.
        use_attn_result, use_split_qkv_input, use_attn_in, use_hook_mlp_in, use_hook_tokens: compute what the hook points of
            these names show: each head's output; inputs of queries, keys and values by head; inputs of heads and MLPs; tokens.
        default_prepend_bos: whether strings get a BOS unless the call says otherwise.
        positional_embedding_type: "standard" (learned), "rotary", "shortformer" (learned, read by queries and keys alone) or
            "alibi" (a slope per head times the distance).
        n_key_value_heads: key-value heads of grouped attention; None for one per query head.
        n_heads_by_layer, n_key_value_heads_by_layer, d_head_by_layer: a number per layer, where layers differ in it; the field
            without "_by_layer" is then the largest, and may be left out for heads. Lists of equal numbers become that field.
            ``rotary_dim`` and ``attn_scale``, where they are d_head and its root, are each layer's own.
        ungroup_grouped_query_attention: compute keys and values per query head.
        attn_only: no MLPs.
        gated_mlp: act(x W_gate) * (x W_in), not act(x W_in).
        eps: of the norms.
        act_fn: of the MLPs, a key of ``SUPPORTED_ACTIVATIONS``; a name that ends in "_ln" has a norm behind it.
        normalization_type: "LN", "RMS", the same without weights ("LNPre", "RMSPre"), or None.
        final_rms: an RMS norm before the unembedding of a model with layer norms.
        num_experts, experts_per_token, norm_topk_prob: mixtures of experts, and whether the chosen experts' weights sum to 1.
        dtype: of the weights.
        model_name, original_architecture, from_checkpoint, checkpoint_index, checkpoint_label_type, checkpoint_value,
            quantization_method: where the weights come from.
        tokenizer_name, tokenizer_prepends_bos: the tokenizer, and whether it adds a BOS by itself.
        use_attn_scale, attn_scale: scores are divided by ``attn_scale``, -1 for the root of ``d_head``.
        scale_attn_by_inverse_layer_idx: and by the layer's number, from 1.
        use_qk_norm: RMS norms on every head's queries and keys.
        clip_qkv: clamp queries, keys and values to plus or minus this.
        use_logn_attn, train_seq_length, use_dynamic_ntk_rope: Qwen 1's scaling of queries and of rotary frequencies beyond the
            length of training, outside training.
        use_local_attn, window_size, attn_types: layers of type "local" see ``window_size`` tokens, themselves included.
        init_mode, initializer_range, init_weights, seed: how initial weights are drawn; a range of -1 is the mode's own.
        n_devices: spread the layers over this many GPUs.
        attention_dir: "causal" or "bidirectional".
        parallel_attn_mlp: attention and MLP read the same stream.
        n_params: computed: weights in the layers, without biases and norms.
        rotary_dim, rotary_base, rotary_base_local, rotary_scaling_factor, rotary_adjacent_pairs: the part of a head that is
            rotated, the frequencies' base, that of local layers, a factor by which positions are divided in global layers, and
            whether pairs are neighbours (GPT-J) or half a head apart (GPT-NeoX).
        use_NTK_by_parts_rope, NTK_by_parts_low_freq_factor, NTK_by_parts_high_freq_factor, NTK_by_parts_factor,
            NTK_original_ctx_len: Llama 3.1's scaling of frequencies.
        use_yarn_rope, yarn_factor, yarn_attention_factor, yarn_beta_fast, yarn_beta_slow,
            yarn_original_max_position_embeddings, yarn_truncate, yarn_global_attn_only: YaRN's.
        post_embedding_ln: a layer norm behind the embedding.
        attn_scores_soft_cap, output_logits_soft_cap: cap * tanh(x / cap) on scores and logits, where positive.
        use_normalization_before_and_after: norms behind attention and MLP too.
        use_attention_sinks: a learned logit per head that takes part in the softmax and holds no value.
        tie_word_embeddings, trust_remote_code, load_in_4bit, relative_attention_max_distance, relative_attention_num_buckets,
            decoder_start_token_id, uses_rms_norm, layer_norm_folding: fields of other classes of TransformerLens.

    Raises:
        KVLensError: a combination that makes no model.
    """

    d_model: int
    d_head: int
    n_layers: int
    n_ctx: int
    n_heads: int = -1
    d_mlp: int | None = None
    d_vocab: int = -1
    device: str | None = None
    use_attn_result: bool = False
    use_split_qkv_input: bool = False
    default_prepend_bos: bool = True
    positional_embedding_type: str = "standard"
    n_key_value_heads: int | None = None
    attn_only: bool = False
    gated_mlp: bool = False
    uses_rms_norm: bool = False
    eps: float = 1e-5
    layer_norm_folding: bool = False
    act_fn: str | None = "relu"
    normalization_type: str | None = "LN"
    num_experts: int | None = None
    experts_per_token: int | None = None
    final_rms: bool = False
    dtype: torch.dtype = torch.float32
    model_name: str = "custom"
    use_attn_scale: bool = True
    attn_scale: float = -1.0
    use_hook_mlp_in: bool = False
    use_attn_in: bool = False
    use_qk_norm: bool = False
    clip_qkv: float | None = None
    use_logn_attn: bool = False
    train_seq_length: int | None = None
    use_dynamic_ntk_rope: bool = False
    use_local_attn: bool = False
    ungroup_grouped_query_attention: bool = False
    original_architecture: str | None = None
    from_checkpoint: bool = False
    checkpoint_index: int | None = None
    checkpoint_label_type: str | None = None
    checkpoint_value: int | None = None
    tokenizer_name: str | None = None
    window_size: int | None = None
    attn_types: list[str] | None = None
    init_mode: str = "gpt2"
    n_devices: int = 1
    attention_dir: str = "causal"
    seed: int | None = None
    initializer_range: float = -1.0
    init_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    d_vocab_out: int = -1
    parallel_attn_mlp: bool = False
    rotary_dim: int | None = None
    n_params: int | None = None
    use_hook_tokens: bool = False
    tokenizer_prepends_bos: bool | None = None
    post_embedding_ln: bool = False
    rotary_base: float | int = 10000
    rotary_base_local: float | int | None = None
    rotary_scaling_factor: float = 1.0
    trust_remote_code: bool = False
    rotary_adjacent_pairs: bool = False
    load_in_4bit: bool = False
    quantization_method: str | None = None
    relative_attention_max_distance: int | None = None
    relative_attention_num_buckets: int | None = None
    decoder_start_token_id: int | None = None
    tie_word_embeddings: bool = False
    use_normalization_before_and_after: bool = False
    attn_scores_soft_cap: float = -1.0
    output_logits_soft_cap: float = -1.0
    use_NTK_by_parts_rope: bool = False
    NTK_by_parts_low_freq_factor: float = 1.0
    NTK_by_parts_high_freq_factor: float = 4.0
    NTK_by_parts_factor: float = 8.0
    NTK_original_ctx_len: int = 8192
    use_yarn_rope: bool = False
    yarn_factor: float = 1.0
    yarn_attention_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_truncate: bool = True
    yarn_global_attn_only: bool = False
    use_attention_sinks: bool = False
    norm_topk_prob: bool = False
    n_heads_by_layer: list[int] | None = None
    n_key_value_heads_by_layer: list[int] | None = None
    d_head_by_layer: list[int] | None = None

    def __post_init__(self):
        self._read_lists()
        if self.n_heads == -1:
            if self.d_model % self.d_head:
                raise KVLensError(f"n_heads: d_model={self.d_model} is not a multiple of d_head={self.d_head}; give n_heads")
            self.n_heads = self.d_model // self.d_head
        self._check()
        if self.device is None:
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.d_mlp is None:
            self.d_mlp = 4 * self.d_model
        if self.d_vocab_out == -1:
            self.d_vocab_out = self.d_vocab
        if self.positional_embedding_type == "rotary" and self.rotary_dim is None:
            self.rotary_dim = self.d_head
        if self.use_attn_scale and self.attn_scale == -1.0:
            self.attn_scale = math.sqrt(self.d_head)
        if self.initializer_range < 0:
            self.initializer_range = 0.8 / math.sqrt(self.d_model) if self.init_mode == "gpt2" else 1.0
        heads = [cfg.n_heads * cfg.d_head for cfg in map(self.of_layer, range(self.n_layers))]
        self.n_params = 4 * self.d_model * sum(heads) + self.n_layers * self._n_mlp_params()

    def _read_lists(self) -> None:
        """Set the field of each list of sizes to the largest, and check them."""
        for name in HEAD_SIZES:
            sizes = getattr(self, f"{name}_by_layer")
            if sizes is None:
                continue
            listed = isinstance(sizes, (list, tuple)) and len(sizes) == self.n_layers
            one_each = listed and all(isinstance(n, int) and n > 0 for n in sizes)
            if not one_each or getattr(self, name) not in (-1, None, max(sizes)):
                raise KVLensError(
                    f"{name}_by_layer: expected a number for each of {self.n_layers} layers, of which {name} is the largest; "
                    f"got {sizes}, and {name}={getattr(self, name)}"
                )
            setattr(self, name, max(sizes))
            setattr(self, f"{name}_by_layer", list(sizes) if len(set(sizes)) > 1 else None)

    @property
    def layers_differ(self) -> bool:
        """Whether layers differ in their heads."""
        return any(getattr(self, f"{name}_by_layer") is not None for name in HEAD_SIZES)

    @property
    def whole(self: C) -> C:
        """The model's configuration, also of what :meth:`of_layer` returned."""
        return self.__dict__.get("_whole", self)

    def of_layer(self: C, layer: int) -> C:
        """This configuration, or where layers differ in heads one with a layer's sizes, which follows later changes of this."""
        if not getattr(self, "layers_differ", False):  # TransformerLens' own configurations do not have it
            return self
        made = self.__dict__.setdefault("_of_layers", {})
        if layer not in made:
            own = copy.copy(self)
            del own.__dict__["_of_layers"]
            sizes = {name: getattr(self, f"{name}_by_layer") for name in HEAD_SIZES}
            new = {name: of_layers[layer] for name, of_layers in sizes.items() if of_layers is not None}
            d_head = new.get("d_head", self.d_head)
            new["rotary_dim"] = d_head if self.rotary_dim == self.d_head else self.rotary_dim
            new["attn_scale"] = math.sqrt(d_head) if self.attn_scale == math.sqrt(self.d_head) else self.attn_scale
            own.__dict__.update(new, _whole=self, **dict.fromkeys(f"{name}_by_layer" for name in HEAD_SIZES))
            made[layer] = own
        return made[layer]

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        for own in self.__dict__.get("_of_layers", {}).values():
            setattr(own, name, value)

    def _n_mlp_params(self) -> int:
        if self.attn_only or self.d_mlp is None:
            return 0
        dense = self.d_model * self.d_mlp * (3 if self.gated_mlp else 2)
        return (dense + self.d_model) * self.num_experts if self.num_experts else dense

    def _check(self) -> None:
        if self.use_local_attn and (self.window_size is None or self.attn_types is None):
            raise KVLensError("use_local_attn needs window_size, and attn_types with 'local' or 'global' for every layer")
        if not self.attn_only:
            check_known("act_fn: no activation", str(self.act_fn), SUPPORTED_ACTIVATIONS)
        if self.num_experts and not 0 < int(self.experts_per_token or 0) <= self.num_experts:
            raise KVLensError(f"experts_per_token must lie in 1..{self.num_experts}, got {self.experts_per_token}")

    @classmethod
    def unwrap(cls: type[C], config: C | dict[str, object]) -> C:
        """``config`` itself, or made from a dict of fields."""
        return cls.from_dict(config) if isinstance(config, dict) else config

    @classmethod
    def from_dict(cls: type[C], config_dict: dict[str, Any]) -> C:
        """A configuration from its fields by name."""
        return cls(**config_dict)

    def to_dict(self) -> dict[str, object]:
        """All fields by name; those that TransformerLens does not have only where they are given."""
        unset = {f"{name}_by_layer" for name in HEAD_SIZES if getattr(self, f"{name}_by_layer") is None}
        return {name: value for name, value in self.__dict__.items() if name[0] != "_" and name not in unset}

    def __repr__(self) -> str:
        return f"{type(self).__name__}:\n{pprint.pformat(self.to_dict())}"

    def is_layer_norm_activation(self) -> bool:
        """Whether a norm follows the activation function."""
        return self.act_fn is not None and self.act_fn.endswith("_ln")

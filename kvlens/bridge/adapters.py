"""TransformerLens adapters for architectures that its bridge does not know: the hybrids Kimi Linear and MiniMax, and RWKV.

In both hybrids, Transformers calls a layer's mixer ``self_attn``, whether it is recurrent or attention. Here a recurrent one is
``linear_attn``, as in the hybrids that TransformerLens knows, and attention ``attn``. Importing this module registers the
adapters, except where TransformerLens has one of its own.
"""

from functools import partial
from typing import ClassVar

from torch import nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES, ArchitectureAdapterFactory
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components import (
    AttentionBridge,
    BlockBridge,
    EmbeddingBridge,
    LinearBridge,
    MoEBridge,
    MoERouterBridge,
    NormalizationBridge,
    PositionEmbeddingsAttentionBridge,
    RMSNormalizationBridge,
    RotaryEmbeddingBridge,
    SSMBlockBridge,
    UnembeddingBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from kvlens.bridge.keywords import cache_among
from kvlens.mixers import has_mixer

ATTENTION_INPUTS = ("hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input")
"""Aliases of a block that lead to inputs of its attention."""


class LatentAttentionBridge(AttentionBridge):
    """Latent attention, left to Transformers. No projection of it yields the queries, keys or values of heads alone."""

    hook_aliases: ClassVar[dict[str, str | list[str]]] = {"hook_z": "o.hook_in"}  # type: ignore[misc]
    property_aliases: ClassVar[dict[str, str]] = {"W_O": "o.weight"}  # type: ignore[misc]
    supports_split_qkv_fork = False


class HybridBlockBridge(BlockBridge):
    """A block whose ``self_attn`` is recurrent in some layers: it keeps ``linear_attn`` or ``attn`` of its submodules."""

    hook_aliases: dict[str, object]

    def set_original_component(self, original_component: GradientCheckpointingLayer) -> None:
        """Bind one layer of the Transformers model."""
        super().set_original_component(original_component)
        recurrent = has_mixer(original_component.self_attn)
        kept = "linear_attn" if recurrent else "attn"
        del self.submodules["attn" if recurrent else "linear_attn"]
        aliases: dict[str, object] = {**self.hook_aliases, "hook_attn_out": f"{kept}.hook_out"}
        if not getattr(self.submodules[kept], "supports_split_qkv_fork", False):
            aliases = {name: target for name, target in aliases.items() if name not in ATTENTION_INPUTS}
        self.hook_aliases = aliases


class HybridAdapter(ArchitectureAdapter):
    """What the two share. Weight processing does not apply: no weights of a recurrent layer are known to it."""

    model_type: ClassVar[str]
    supports_fold_ln = False

    def __init__(self, cfg: TransformerBridgeConfig) -> None:
        super().__init__(cfg)
        self._set_rms_rotary_defaults()
        self.cfg.attn_implementation = "eager"
        self.cfg.default_prepend_bos = False
        self.weight_processing_conversions: dict[str, object] = {}
        self.component_mapping = {
            "embed": EmbeddingBridge(name="model.embed_tokens"),
            "blocks": HybridBlockBridge(
                name="model.layers",
                submodules={
                    "ln1": RMSNormalizationBridge(name="input_layernorm", config=self.cfg),
                    "ln2": RMSNormalizationBridge(name="post_attention_layernorm", config=self.cfg),
                    "attn": self._attention(),
                    "linear_attn": GeneralizedComponent(name="self_attn"),
                    "mlp": self._experts(),
                },
            ),
            "ln_final": RMSNormalizationBridge(name="model.norm", config=self.cfg),
            "unembed": UnembeddingBridge(name="lm_head", config=self.cfg),
        }

    def _attention(self) -> AttentionBridge:
        raise NotImplementedError

    def _experts(self) -> MoEBridge:
        return MoEBridge(name="mlp", config=self.cfg, submodules={"gate": MoERouterBridge(name="gate")})


class _LengthOfAttention(MiniMaxCache):
    """Transformers asks the cache of layer 0 how long a text is, and lightning attention keeps no keys there."""

    first = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the first layer of attention holds keys of."""
        return int(super().get_seq_length(max(layer_idx, self.first)))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the mask sizes of the first layer of attention."""
        length, offset = super().get_mask_sizes(query_length, max(layer_idx, self.first))
        return length, offset


def _measured_by_attention(first: int, module: nn.Module, args: object, kwargs: dict[str, object]) -> None:
    """Before a pass: the length of a text is that in the cache of layer ``first``."""
    cache = cache_among(kwargs)
    if cache is not None and cache.__class__ is MiniMaxCache:
        cache.__class__ = _LengthOfAttention
        cache.first = first


class MiniMaxAdapter(HybridAdapter):
    """``MiniMaxForCausalLM``: lightning attention, and attention and experts as in Mixtral.

    The residual stream is not the sum of what the layers add: a layer adds to its *normalized* input, and both summands have
    factors of their own (``linear_attn_alpha_factor`` and others in Transformers' configuration).
    """

    model_type = "minimax"

    def prepare_model(self, hf_model: PreTrainedModel) -> None:
        """Let masks of a decoded token span the text: see :class:`_LengthOfAttention`."""
        super().prepare_model(hf_model)
        kinds = hf_model.config.layer_types
        if "full_attention" in kinds:
            first = kinds.index("full_attention")
            hf_model.register_forward_pre_hook(partial(_measured_by_attention, first), with_kwargs=True)

    def __init__(self, cfg: TransformerBridgeConfig) -> None:
        super().__init__(cfg)
        self.component_mapping["rotary_emb"] = RotaryEmbeddingBridge(name="model.rotary_emb", config=self.cfg)

    def _attention(self) -> AttentionBridge:
        return PositionEmbeddingsAttentionBridge(
            name="self_attn",
            config=self.cfg,
            submodules={name: LinearBridge(name=f"{name}_proj") for name in "qkvo"},
            requires_attention_mask=True,
            requires_position_embeddings=True,
        )


class KimiLinearAdapter(HybridAdapter):
    """``KimiLinearForCausalLM``: Kimi delta attention, and latent attention without rotary positions, left to Transformers."""

    model_type = "kimi_linear"

    def __init__(self, cfg: TransformerBridgeConfig) -> None:
        super().__init__(cfg)
        self.cfg.positional_embedding_type = "none"

    def prepare_model(self, hf_model: PreTrainedModel) -> None:
        """TransformerLens reads Transformers' ``head_dim``, which is another number in latent attention."""
        super().prepare_model(hf_model)
        self.cfg.d_head = hf_model.config.v_head_dim

    def _attention(self) -> AttentionBridge:
        queries = {name: LinearBridge(name=name, optional=True) for name in ("q_proj", "q_a_proj", "q_b_proj")}
        return LatentAttentionBridge(
            name="self_attn",
            config=self.cfg,
            submodules={
                **queries,
                "kv_a_proj_with_mqa": LinearBridge(name="kv_a_proj_with_mqa"),
                "kv_a_layernorm": RMSNormalizationBridge(name="kv_a_layernorm", config=self.cfg),
                "kv_b_proj": LinearBridge(name="kv_b_proj"),
                "o": LinearBridge(name="o_proj"),
            },
            maintain_native_attention=True,
            requires_attention_mask=True,
        )

    def _experts(self) -> MoEBridge:
        dense = {"dense_gate": "gate_proj", "dense_in": "up_proj", "dense_out": "down_proj"}
        return MoEBridge(
            name="mlp",
            config=self.cfg,
            sparse_required=("gate",),
            submodules={
                "gate": MoERouterBridge(name="gate", optional=True),
                "shared_experts": self._gated_mlp(name="shared_experts", optional=True),
                **{name: LinearBridge(name=theirs, optional=True) for name, theirs in dense.items()},
            },
        )


class RwkvAdapter(ArchitectureAdapter):
    """``Rwkv56ForCausalLM`` (:mod:`kvlens.pretrained.rwkv`): a recurrence and an MLP with a shift, and no attention."""

    supports_fold_ln = False

    def __init__(self, cfg: TransformerBridgeConfig) -> None:
        super().__init__(cfg)
        self.cfg.normalization_type = "LN"
        self.cfg.uses_rms_norm = self.cfg.final_rms = self.cfg.gated_mlp = False
        self.cfg.positional_embedding_type = "none"
        self.cfg.default_prepend_bos = False
        self.weight_processing_conversions: dict[str, object] = {}
        mlp = {"in": LinearBridge(name="key"), "out": LinearBridge(name="value")}
        self.component_mapping = {
            "embed": EmbeddingBridge(name="model.embed_tokens"),
            "blocks": SSMBlockBridge(
                name="model.layers",
                submodules={
                    "ln1": NormalizationBridge(name="input_layernorm", config=self.cfg),
                    "mixer": GeneralizedComponent(name="mixer"),
                    "ln2": NormalizationBridge(name="norm2", config=self.cfg),
                    "mlp": GeneralizedComponent(name="mlp", submodules=mlp),
                },
            ),
            "ln_final": NormalizationBridge(name="model.norm", config=self.cfg),
            "unembed": UnembeddingBridge(name="lm_head", config=self.cfg),
        }


ADAPTERS: dict[str, type[ArchitectureAdapter]] = {
    "KimiLinearForCausalLM": KimiLinearAdapter,
    "MiniMaxForCausalLM": MiniMaxAdapter,
    "Rwkv56ForCausalLM": RwkvAdapter,
}
"""By the name of the class in Transformers."""

for _architecture, _adapter in ADAPTERS.items():
    if _architecture not in SUPPORTED_ARCHITECTURES:
        ArchitectureAdapterFactory.register_adapter(_architecture, _adapter)

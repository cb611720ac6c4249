"""The weights of a model: drawing them, loading and processing them, reading them for all layers at once."""

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import FactoredMatrix, HookedRootModule
from transformer_lens.utilities import composition_scores
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES
from transformer_lens.weight_processing import ProcessWeights

from kvlens.base.config import HookedTransformerConfig
from kvlens.base.layers import FULL, Embed, Norm, Unembed, final_norm
from kvlens.errors import KVLensError

logger = logging.getLogger(__name__)

NORM_WEIGHTS = (".ln1.w", ".ln2.w", "ln_final.w")


def draw(name: str, weight: Tensor, mode: str, size: float, generator: torch.Generator | None) -> None:
    """Draw the initial values of a matrix [d_in, d_out] or [head, d_in, d_out].

    Args:
        name: of the parameter; muP scales embeddings and the unembedding differently.
        weight: written in place.
        mode: "gpt2" (normal), "xavier_..." (Glorot and Bengio 2010), "kaiming_..." (He et al. 2015, for ReLU), or "muP".
        size: the standard deviation for "gpt2", otherwise a gain.
        generator: None for torch's global one.
    """
    d_in = weight.shape[-2] if weight.dim() > 1 else 1  # GPT-OSS' router has a bias that is drawn too
    d_out = weight.shape[-1] * (weight.shape[0] if weight.dim() == 3 else 1)
    if mode == "muP":
        deviation = 1.0 if "embed" in name else 1 / d_in**0.5
    elif mode.startswith("xavier"):
        deviation = size * math.sqrt(2.0 / (d_in + d_out))
    else:
        deviation = size * math.sqrt(2.0) * math.sqrt(1.0 / d_in) if mode.startswith("kaiming") else size
    if mode == "xavier_uniform":
        bound = size * math.sqrt(6.0 / (d_in + d_out))
    else:
        bound = size * math.sqrt(2.0) * math.sqrt(3.0 / d_in)
    if mode.endswith("uniform"):
        nn.init.uniform_(weight, -bound, bound, generator=generator)
    else:
        nn.init.normal_(weight, std=deviation, generator=generator)


def stacked(part: Literal["attn", "mlp"], name: str) -> Any:
    """A property: a weight of every layer, [layer, ...]."""

    def get(model: "HasWeights") -> Tensor:
        return torch.stack([getattr(getattr(block, part), name) for block in model.blocks])

    return property(get, doc=f"``{name}`` of every layer's {part}, stacked.")


class HasWeights(HookedRootModule):
    """A model whose weights can be drawn, processed and read by name."""

    cfg: HookedTransformerConfig
    blocks: Any
    embed: Embed
    unembed: Unembed
    pos_embed: Any
    ln_final: Norm

    W_Q, W_K, W_V, W_O = (stacked("attn", name) for name in ("W_Q", "W_K", "W_V", "W_O"))
    b_Q, b_K, b_V, b_O = (stacked("attn", name) for name in ("b_Q", "b_K", "b_V", "b_O"))
    W_in, W_out, b_in, b_out = (stacked("mlp", name) for name in ("W_in", "W_out", "b_in", "b_out"))

    @property
    def W_gate(self) -> Tensor | None:
        """``W_gate`` of every layer's gated MLP, stacked; None for other MLPs."""
        return torch.stack([block.mlp.W_gate for block in self.blocks]) if self.cfg.gated_mlp else None

    @property
    def W_U(self) -> Tensor:
        return self.unembed.W_U

    @property
    def b_U(self) -> Tensor:
        return self.unembed.b_U

    @property
    def W_E(self) -> Tensor:
        return self.embed.W_E

    @property
    def W_pos(self) -> Tensor:
        return self.pos_embed.W_pos

    @property
    def W_E_pos(self) -> Float[Tensor, "d_vocab_and_n_ctx d_model"]:
        """Embeddings of all tokens, then of all positions."""
        return torch.cat([self.W_E, self.W_pos])

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T of each layer and head."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of each layer and head."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def n_params_total(self) -> int:
        """Number of all parameters; ``cfg.n_params`` leaves out embeddings, biases and norms."""
        return sum(parameter.numel() for parameter in self.parameters())

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """What the output biases add to the stream before ``layer``; with ``mlp_input``, before that layer's MLP."""
        parts = [(block, ("attn", "mlp") if include_mlp_biases else ("attn",)) for block in self.blocks[:layer]]
        if mlp_input:
            parts.append((self.blocks[layer], ("attn",)))
        total = torch.zeros(self.cfg.d_model, device=self.cfg.device)
        for block, of in parts:
            for part in of:
                total = total + (block.attn.b_O if part == "attn" else block.mlp.b_out)
        return total

    def all_composition_scores(self, mode: str) -> Float[Tensor, "layer head later_layer later_head"]:
        """Q-, K- or V-composition of each head with each head of a later layer (Elhage et al. 2021); 0 for the others."""
        scores = composition_scores(self.OV, {"Q": self.QK, "K": self.QK.T, "V": self.OV}[mode], broadcast_dims=True)
        layer = torch.arange(self.cfg.n_layers, device=scores.device)
        later = layer[:, None, None, None] < layer[None, None, :, None]
        return torch.where(later, scores, torch.zeros_like(scores))

    def all_head_labels(self) -> list[str]:
        """L0H0, L0H1, ..."""
        return [f"L{layer}H{head}" for layer, block in enumerate(self.blocks) for head in range(block.cfg.n_heads)]

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all matrices as ``cfg.init_mode`` says, in their order; biases and norms keep 0 and 1.

        ``cfg.seed`` seeds a generator of their own, with the numbers that torch's global one would give; without a seed that
        one is used.
        """
        generators: dict[torch.device, torch.Generator] = {}
        for name, weight in self.named_parameters():
            if "W_" not in name:
                continue
            if self.cfg.seed is not None and weight.device not in generators:
                generators[weight.device] = torch.Generator(weight.device).manual_seed(self.cfg.seed)
            draw(name, weight, self.cfg.init_mode, self.cfg.initializer_range, generators.get(weight.device))

    def load_and_process_state_dict(
        self,
        state_dict: dict[str, Tensor],
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool | None = None,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Load weights by this class' names, rewritten to others of (nearly) the same function.

        Args:
            state_dict: the weights; see :meth:`fill_missing_keys` for those that may be missing.
            fold_ln: multiply the norms' weights into the layers that read them.
            center_writing_weights: take the mean out of what is written to the stream, which a LayerNorm ignores.
            center_unembed: take the mean out of W_U: logits move by a constant.
            fold_value_biases: move b_V into b_O; None where every pattern passes it on whole, so that the output stays.
            refactor_factored_attn_matrices: replace W_Q, W_K, W_V, W_O by factors with orthogonal columns.
        """
        self.take_state_dict(
            dict(state_dict),
            fold_ln=fold_ln,
            center_writing_weights=center_writing_weights,
            center_unembed=center_unembed,
            fold_value_biases=fold_value_biases,
            refactor_factored_attn_matrices=refactor_factored_attn_matrices,
        )

    def take_state_dict(self, weights: dict[str, Tensor], **steps: bool | None) -> None:
        """:meth:`load_and_process_state_dict` of weights that nobody else needs: the dict is emptied, layer by layer.

        What has been read is freed before the next layer is processed, so that two copies of a layer are in memory, not two of
        the model.
        """
        if steps["refactor_factored_attn_matrices"]:
            check_factors(self.cfg)
        steps["fold_value_biases"] = steps["fold_value_biases"] is not False
        if steps["fold_value_biases"] and groups_differ(self.cfg):
            raise KVLensError(f"fold_value_biases: {GROUPS_DIFFER}. Pass fold_value_biases=False.")
        filled = self.fill_missing_keys(weights)
        weights.clear()
        chosen = {name: bool(step) for name, step in steps.items()}
        chosen["fold_ln"] = chosen["fold_ln"] and self.has_norms_to_fold(filled)
        if chosen["fold_ln"]:
            self.forget_norm_weights()
        for names, process in pieces(self.cfg, filled):
            piece = {name: filled.pop(name) for name in names}
            given = {weight.untyped_storage().data_ptr() for weight in piece.values()}
            take_weights(self, process(piece, chosen) if any(chosen.values()) else piece, given)

    def has_norms_to_fold(self, state_dict: Mapping[str, Tensor]) -> bool:
        """Whether these weights hold norms; if not, and if folding loses precision, this is logged."""
        has = self.cfg.normalization_type is not None and any(name.endswith(NORM_WEIGHTS) for name in state_dict)
        if not has:
            logger.warning("fold_ln has no effect: there are no weights of norms (they may be folded already)")
        elif self.cfg.dtype not in FULL:
            logger.warning(
                "folding norms in %s rounds every weight that reads the stream; fold_ln=False keeps them", self.cfg.dtype
            )
        return has

    def forget_norm_weights(self) -> None:
        """Put norms without weights in the place of those whose weights are folded."""
        kind = self.cfg.normalization_type
        if kind not in ("LN", "RMS"):
            return
        self.cfg.normalization_type = f"{kind}Pre"
        self.ln_final = final_norm(self.cfg)
        for block in self.blocks:
            for name in ("ln1",) if self.cfg.attn_only else ("ln1", "ln2"):
                setattr(block, name, Norm(self.cfg, self.cfg.normalization_type))
            if self.cfg.is_layer_norm_activation() and not self.cfg.attn_only:
                block.mlp.ln = Norm(self.cfg, self.cfg.normalization_type)
        self.setup()

    def fill_missing_keys(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``state_dict`` with the model's own values (0 at first) where it lacks a bias, a table or the norm of a folded model.

        Raises:
            KVLensError: it lacks a matrix or the weight of a norm.
        """
        own = self.state_dict()
        missing = [name for name in own if name not in state_dict]
        unused = "pos_embed.W_pos" if self.cfg.positional_embedding_type == "alibi" else None
        needed = [name for name in missing if _is_needed(name) and name != unused]
        if needed:
            raise KVLensError(f"the weights lack {len(needed)} that this model needs: {needed[:5]}")
        return {**state_dict, **{name: own[name] for name in missing}}

    def process_weights_(
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """:meth:`load_and_process_state_dict` of the model's own weights."""
        self.load_and_process_state_dict(
            self.state_dict(),
            fold_ln=fold_ln,
            center_writing_weights=center_writing_weights,
            center_unembed=center_unembed,
            refactor_factored_attn_matrices=refactor_factored_attn_matrices,
        )

    def fold_layer_norm(
        self, state_dict: dict[str, Tensor], fold_biases: bool = True, center_weights: bool = True
    ) -> dict[str, Tensor]:
        """See :meth:`load_and_process_state_dict`."""
        return ProcessWeights.fold_layer_norm(state_dict, self.cfg, fold_biases, center_weights)

    def center_writing_weights(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """See :meth:`load_and_process_state_dict`."""
        return ProcessWeights.center_writing_weights(state_dict, self.cfg)

    def center_unembed(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """See :meth:`load_and_process_state_dict`."""
        return ProcessWeights.center_unembed(state_dict)

    def fold_value_biases(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """See :meth:`load_and_process_state_dict`."""
        return ProcessWeights.fold_value_biases(state_dict, self.cfg)

    def refactor_factored_attn_matrices(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """See :meth:`load_and_process_state_dict`."""
        return ProcessWeights.refactor_factored_attn_matrices(state_dict, self.cfg)


Process = Callable[[dict[str, Tensor], Mapping[str, bool]], dict[str, Tensor]]


def pieces(cfg: HookedTransformerConfig, names: Iterable[str]) -> list[tuple[list[str], Process]]:
    """The weights in pieces that can be processed one by one: the names of each piece, and what processes it."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        parts = name.split(".")
        found[parts[1] if parts[0] == "blocks" else "end" if parts[0] in ("unembed", "ln_final") else ""].append(name)
    every: dict[str, Process] = {str(layer): partial(processed_layer, cfg, layer) for layer in range(cfg.n_layers)}
    every |= {"end": partial(processed_end, cfg), "": partial(processed_embedding, cfg)}
    return [(found.get(piece, []), process) for piece, process in every.items()]


def processed_layer(
    cfg: HookedTransformerConfig, layer: int, weights: dict[str, Tensor], steps: Mapping[str, bool]
) -> dict[str, Tensor]:
    """The weights of a layer as TransformerLens' ``process_weights`` makes them, which gets it as the only one of a model."""
    own, alone = f"blocks.{layer}.", "blocks.0."
    one = copy.copy(cfg)
    one.n_layers = 1
    dtypes = {name: weight.dtype for name, weight in weights.items()}
    renamed = {name.replace(own, alone): weight for name, weight in weights.items()}
    renamed = {name: weight.float() if weight.is_floating_point() else weight for name, weight in renamed.items()}
    nothing = torch.zeros(1, 1)  # of the ends, which TransformerLens asks for
    ends = {"embed.W_E": nothing, "pos_embed.W_pos": nothing}
    processed = ProcessWeights.process_weights({**renamed, **ends}, one, **{**steps, "center_unembed": False})
    processed = {name.replace(alone, own): weight for name, weight in processed.items() if name not in ends}
    return {name: weight.to(dtypes.get(name, weight.dtype)) for name, weight in processed.items()}


def processed_end(cfg: HookedTransformerConfig, weights: dict[str, Tensor], steps: Mapping[str, bool]) -> dict[str, Tensor]:
    """The final norm and the unembedding with the norm folded in and the mean of each row taken out, in one copy.

    TransformerLens' steps make four of what may be most of a model.
    """
    dtype = weights["unembed.W_U"].dtype
    wide = torch.promote_types(dtype, torch.float32)
    w_u = weights.pop("unembed.W_U").to(wide, copy=True, memory_format=torch.contiguous_format)
    b_u = weights["unembed.b_U"].to(wide)
    is_layer_norm = cfg.normalization_type in ("LN", "LNPre")
    if steps["fold_ln"] and "ln_final.w" in weights:
        if is_layer_norm and not cfg.final_rms:
            b_u = b_u + weights.pop("ln_final.b").to(wide) @ w_u
        w_u *= weights.pop("ln_final.w").to(wide)[:, None]
        if is_layer_norm and not cfg.final_rms:
            w_u -= w_u.mean(0, keepdim=True)
    if steps["center_unembed"]:
        w_u -= w_u.mean(-1, keepdim=True)
        b_u = b_u - b_u.mean()
    return {**weights, "unembed.W_U": w_u.to(dtype), "unembed.b_U": b_u.to(dtype)}


def processed_embedding(
    cfg: HookedTransformerConfig, weights: dict[str, Tensor], steps: Mapping[str, bool]
) -> dict[str, Tensor]:
    """The embeddings as TransformerLens' ``process_weights`` makes them, which gets them as a model without layers."""
    none = copy.copy(cfg)
    none.n_layers = 0
    only = dict.fromkeys(steps, False) | {"center_writing_weights": steps["center_writing_weights"]}
    return ProcessWeights.process_weights(weights, none, **only)


@torch.no_grad()
def take_weights(model: nn.Module, weights: dict[str, Tensor], given: Set[int]) -> None:
    """Move weights from the dict into ``model`` one by one, copying those whose storage is shared.

    Args:
        model: the model whose parameters are replaced in place.
        weights: the weights by name.
        given: addresses of storage that belongs to other owners.
    """
    parameters = dict(model.named_parameters())
    rest: dict[str, Tensor] = {}
    for name in list(weights):
        weight, own = weights.pop(name), parameters.get(name)
        is_ours = weight.untyped_storage().data_ptr() not in given
        if own is not None and is_ours and (own.shape, own.dtype, own.device) == (weight.shape, weight.dtype, weight.device):
            own.data = weight.contiguous()
        elif own is not None and own.shape == weight.shape:
            own.copy_(weight)
        else:  # buffers, and weights that do not match
            rest[name] = weight
    if rest:
        model.load_state_dict(rest, strict=False)


GROUPS_DIFFER = "its layers differ in the number of query heads per key-value head, of which TransformerLens' folding knows one"


def check_factors(cfg: HookedTransformerConfig) -> None:
    """Raise KVLensError where one pair of factors of W_Q W_K^T and W_V W_O for each head does not compute the same."""
    turned = "between the two factors keys and queries turn with their positions"
    reason = turned if cfg.positional_embedding_type == "rotary" else GROUPS_DIFFER if groups_differ(cfg) else None
    if reason is not None:
        raise KVLensError(f"refactor_factored_attn_matrices: {reason}. Pass refactor_factored_attn_matrices=False.")


def why_norms_stay(cfg: HookedTransformerConfig) -> str:
    """Why norms of this kind can be neither folded nor replaced by centered weights; empty if they can."""
    if cfg.original_architecture in POST_NORM_ARCHITECTURES:
        return "its norms stand behind the layers, not before them"
    is_shortformer = cfg.positional_embedding_type == "shortformer"
    return "shortformer adds positions to keys and queries after the norm" if is_shortformer else ""


def allowed_steps(cfg: HookedTransformerConfig, steps: Mapping[str, bool]) -> dict[str, bool]:
    """Steps of weight processing without those that would change the model, which it logs."""
    of_norms = why_norms_stay(cfg)
    unembed = "a soft cap sees a constant" if cfg.output_logits_soft_cap > 0 else ""
    reasons = {
        "fold_ln": of_norms,
        "center_writing_weights": of_norms,
        "center_unembed": of_norms if cfg.positional_embedding_type == "shortformer" else unembed,
        "fold_value_biases": "patterns with attention sinks do not sum to 1" if cfg.use_attention_sinks else "",
    }
    for step, reason in reasons.items():
        if steps.get(step) and reason:
            logger.warning("from_pretrained: %s is left out for this model: %s", step, reason)
    return {step: wanted and not reasons.get(step) for step, wanted in steps.items()}


def groups_differ(cfg: HookedTransformerConfig) -> bool:
    """Whether layers differ in how many query heads share a key-value head."""
    layers = [HookedTransformerConfig.of_layer(cfg, layer) for layer in range(cfg.n_layers)]
    return len({of.n_heads // (of.n_key_value_heads or of.n_heads) for of in layers}) > 1


def _is_needed(name: str) -> bool:
    leaf = name.rsplit(".", 1)[-1]
    return "W_" in leaf or ("W_" in name and leaf == "weight") or leaf in ("w", "sinks")

"""Which of TransformerLens' weight processing keeps a kvlens model's output, and which would change it silently."""

from kvlens.errors import KVLensError
from kvlens.model.attention_variant import AttentionVariantConfig
from kvlens.model.config import HookedKVTransformerConfig


def check_weight_processing(cfg: HookedKVTransformerConfig, fold_value_biases: bool | None, refactor: bool) -> bool:
    """Whether to fold value biases; None means "where it is right".

    Folding b_V into b_O assumes that each row of the pattern sums to 1 and that every value carries b_V once. Neither holds
    for linear attention (RoPE-after rows need not sum to 1, and those of normaliser "none" do not), nor does the second with
    a value shift, whose first token lacks a predecessor.

    Raises:
        KVLensError: processing that would change the output was asked for.
    """
    reason = _why_not_fold(cfg)
    if fold_value_biases and reason:
        raise KVLensError(f"fold_value_biases would change this model's output: {reason}. Pass fold_value_biases=False.")
    between = "the shift acts" if cfg.kv_shift is not None else "a variant of attention may act"
    if refactor and (cfg.attention == "linear" or cfg.kv_shift is not None or cfg.attention_variant is not None):
        raise KVLensError(
            "refactor_factored_attn_matrices keeps only q.k and folds b_V away, which would change this model's output: "
            f"{reason or f'{between} between the two factors'}. Pass refactor_factored_attn_matrices=False."
        )
    return reason is None if fold_value_biases is None else fold_value_biases


def _why_not_fold(cfg: HookedKVTransformerConfig) -> str | None:
    if cfg.attention == "linear":
        return "rows of linear attention need not sum to 1"
    if cfg.kv_shift is not None and cfg.kv_shift.values:
        return "with a value shift the first token lacks a predecessor, so that its value carries b_V beta_1 times, not once"
    if cfg.use_attention_sinks:
        return "with attention sinks the rows of the pattern sum to less than 1"
    return None if cfg.attention_variant is None else _why_not_fold_under(cfg.attention_variant)


def _why_not_fold_under(variant: AttentionVariantConfig) -> str | None:
    """Of the variants of attention, what keeps b_V out of b_O; "normalised" regularisation and augmented keys do not."""
    if variant.ridge is not None:
        return "the weights of ridge attention need not sum to 1"
    if variant.negative is not None:
        return "negative samples take beta off each row's sum"
    if variant.augmented is not None and variant.augmented.values:
        return "values go through an MLP behind b_V"
    if variant.regularised is not None and variant.regularised.form != "normalised":
        return "regularised attention takes alpha of a token's own value off"
    return None

"""Which of TransformerLens' weight processing keeps a kvlens model's output, and which would change it silently."""

from kvlens.errors import KVLensError
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
    if refactor and (cfg.attention == "linear" or cfg.kv_shift is not None):
        raise KVLensError(
            "refactor_factored_attn_matrices keeps only q.k and folds b_V away, which would change this model's output: "
            f"{reason or 'the shift acts between the two factors'}. Pass refactor_factored_attn_matrices=False."
        )
    return reason is None if fold_value_biases is None else fold_value_biases


def _why_not_fold(cfg: HookedKVTransformerConfig) -> str | None:
    if cfg.attention == "linear":
        return "rows of linear attention need not sum to 1"
    if cfg.kv_shift is not None and cfg.kv_shift.values:
        return "with a value shift the first token lacks a predecessor, so that its value carries b_V beta_1 times, not once"
    if cfg.use_attention_sinks:
        return "with attention sinks the rows of the pattern sum to less than 1"
    return None

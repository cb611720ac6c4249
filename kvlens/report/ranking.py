"""A report's one ranking of heads, and its measures in words."""

import pandas as pd

from kvlens.report.build import ABLATION, Report

MEASURES = {
    "ablation_kl": ABLATION,
    "loss_change": "change in loss without the head, nats per token",
    "bias_share": "share of the bias in the output",
    "zero_kl": "KL with an empty bias, without BOS too, nats",
    "zero_loss_change": "change in loss with an empty bias, nats per token",
    "b_kv_norm": "norm of b_KV",
    "b_d_norm": "norm of b_D",
}
"""The measures of ``bias_by_head`` in words, with their units."""


def ranked_heads(report: Report) -> pd.DataFrame:
    """The heads, by the KL divergence of the predictions when a head has BOS's part of the bias alone."""
    return report.tables["bias_by_head"].rename(columns=MEASURES).sort_values(ABLATION, ascending=False, kind="stable")

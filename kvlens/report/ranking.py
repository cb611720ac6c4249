"""A report's one ranking of heads, and its measures in words."""

import pandas as pd

from kvlens.analyses.attribution.explain import Explained
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
ON_ANSWER = {
    "swap": "effect on the answer, nats",
    "p_value": "p",
    "alone": "kept by this head alone, nats",
    "p_value_alone": "p alone",
    "leads": "ranks first",
}
"""Those of ``attribution_by_head``."""


def ranked_heads(report: Report) -> tuple[pd.DataFrame, str]:
    """The report's one ranking of heads, its columns in words, and the column that it goes by.

    By the size of the effect on the answer, of each head's part from the prompt without the unit that matters most; where the
    sentence names heads that suffice alone, by what each keeps alone. Where no unit is significant, or none was removed, by
    the KL divergence of the predictions when the head has BOS's part alone.
    """
    heads = report.tables["bias_by_head"]
    found = report.explained
    if found is None or found.unit is None:
        return heads.rename(columns=MEASURES).sort_values(ABLATION, ascending=False, kind="stable"), ABLATION
    on_answer = found.heads.assign(alone=found.heads["whole"] - found.heads["converse"])[["layer", "head", *ON_ANSWER]]
    ranked = on_answer.rename(columns=ON_ANSWER).merge(heads.rename(columns=MEASURES), on=["layer", "head"], validate="1:1")
    by = ON_ANSWER["alone" if suffices(found) else "swap"]
    return ranked.sort_values(by, key=abs, ascending=False, kind="stable"), by


def suffices(found: Explained) -> bool:
    """Whether the sentence names heads that suffice alone, because none is needed."""
    return not found.needed() and bool(found.sufficient())

"""A report's one ranking of heads, and its measures in words."""

import pandas as pd

from kvlens.analyses.bias.parts import HEAD_PART
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
    "sets": "in a set",
    "p_exchanged": "answer, only this head without",
    "p_alone": "answer, all but this head without",
}
"""Those of the explanation's heads; "without" the units that lose the answer."""


def ranked_heads(report: Report) -> tuple[pd.DataFrame, str]:
    """The report's one ranking of heads, its columns in words, and the column that it goes by.

    Heads of the explanation's breaking sets first, then those of its keeping sets, then the others; among these by the answer's
    probability when only this head reads the prompt without the units, as far as it was run. Where no units lose the answer, by
    the KL divergence of the predictions when the head has BOS's part alone.
    """
    heads = report.tables["bias_by_head"]
    found = report.explained
    if found is None or not found.cause:
        return heads.rename(columns=MEASURES).sort_values(ABLATION, ascending=False, kind="stable"), ABLATION
    of_heads = found.heads[found.heads["part"] == HEAD_PART]
    kinds = [("breaking" * b, "keeping" * k) for b, k in zip(of_heads["breaking"], of_heads["keeping"], strict=True)]
    on_answer = of_heads.assign(sets=[", ".join(filter(None, each)) for each in kinds])
    on_answer = on_answer.sort_values(["breaking", "keeping", "p_exchanged"], ascending=[False, False, True], kind="stable")
    ranked = on_answer[["layer", "head", *ON_ANSWER]].rename(columns=ON_ANSWER)
    ranked = ranked.merge(heads.rename(columns=MEASURES), on=["layer", "head"], how="left", validate="1:1")
    return ranked, ON_ANSWER["p_exchanged"]

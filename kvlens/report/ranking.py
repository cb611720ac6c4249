"""A report's one ranking of heads, and its measures in words."""

import numpy as np
import pandas as pd

from kvlens.analyses.attribution.explain import Explained
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
    "p_lost": "answer lost, this or its set exchanged",
    "p_exchanged": "answer, only this exchanged",
    "p_alone": "answer, all but this exchanged",
}
"""Those of the explanation's heads; exchanged: they read the prompt without the units that lose the answer."""


def ranked_heads(report: Report) -> tuple[pd.DataFrame, str]:
    """The report's one ranking of heads, its columns in words, and the column that it goes by.

    Heads of the explanation's breaking sets first, then those of its keeping sets, then the others; among these by what the
    answer loses of its probability when this head, or all of its breaking set, reads the prompt without the units, as far as
    it was run. Where no units or no heads lose the answer (a shift state may, alone), by the KL divergence of the predictions
    when the head has BOS's part alone.
    """
    heads = report.tables["bias_by_head"]
    found = report.explained
    if found is None or not found.cause:
        return heads.rename(columns=MEASURES).sort_values(ABLATION, ascending=False, kind="stable"), ABLATION
    on_answer = parts_on_answer(found)
    ranked = on_answer.loc[on_answer["part"] == HEAD_PART, ["layer", "head", *ON_ANSWER.values()]]
    ranked = ranked.merge(heads.rename(columns=MEASURES), on=["layer", "head"], how="left", validate="1:1")
    sets = ON_ANSWER["sets"]
    if ranked[sets].str.startswith("breaking").any():
        return ranked, ON_ANSWER["p_lost"]
    return ranked.sort_values([sets, ABLATION], ascending=False, kind="stable", ignore_index=True), ABLATION


def parts_on_answer(found: Explained) -> pd.DataFrame:
    """The explanation's heads, shift states and convolutions in the same order, with the columns `ON_ANSWER` in words."""
    kinds = [("breaking" * b, "keeping" * k) for b, k in zip(found.heads["breaking"], found.heads["keeping"], strict=True)]
    parts = found.heads.assign(sets=[", ".join(filter(None, each)) for each in kinds], p_lost=_lost(found))
    parts = parts.sort_values(["breaking", "keeping", "p_lost"], ascending=False, kind="stable")
    return parts.rename(columns=ON_ANSWER)


def _lost(found: Explained) -> pd.Series:
    """What the answer loses of its probability without each part, or without the breaking set that it is in."""
    sets = found.statements[(found.statements["about"] == "heads") & (found.statements["role"] == "breaking")]
    codes = sets["parts"].str.split("+").explode()
    of_sets = (sets["p_before"] - sets["p_after"]).reindex(codes.index).groupby(codes.to_numpy()).max()
    return np.fmax(found.p_answer[0] - found.heads["p_exchanged"], found.heads["code"].map(of_sets))

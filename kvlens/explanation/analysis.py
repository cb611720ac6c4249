"""Explanations of many prompts, as one table: ``kvlens analyse explanation``."""

import pandas as pd

from kvlens.analyses.attribution.units import BY
from kvlens.analyses.declaration import Option, analysis
from kvlens.analyses.sequences import PromptTokens, TextTokens
from kvlens.explanation.explained import STATEMENTS
from kvlens.explanation.steps import Depth, explain
from kvlens.model import KVModel


@analysis(
    STATEMENTS,
    "which parts of the prompt and which layers the words of the answer rest on: interventions, and what is said under them",
    options={"by": BY, "depth": Option("how far it goes", choices=("units", "layers", "heads", "positions"))},
)
def explanation(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    answer: str | None = None,
    by: str = "sentence",
    depth: Depth = "layers",
) -> pd.DataFrame:
    """The statements of :func:`kvlens.explain`, for many prompts.

    Args:
        model, prompt, text, answer, by, depth: as :func:`kvlens.explain`.

    Returns:
        One row per intervention and claim:

        {columns}
    """
    return explain(model, prompt, text, answer=answer, by=by, depth=depth).statements

"""The contribution of each demonstration to a head's step: one row per layer, head and token, for one query.

Source: DUAL th. 3.1, eq. 9.
"""

import pandas as pd
import torch

from kvlens import HookedKVTransformer
from kvlens.checks import checked
from kvlens.dual import demonstration_figures

from ..declaration import Columns, Option, analysis
from ..front_ends import on_its_front_ends
from ..layers import heads_of_model
from ..predictions import OUTPUT_SHARE
from ..sequences import PromptTokens, prompt_sequence
from ..texts import token_texts
from .refusal import has_dual_model

COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", "query head"),
    position=("int64", "of the query, in the whole sequence"),
    prompt_position=("int64", "of the demonstration, in the whole sequence"),
    token=("str", "the demonstration"),
    weight=("float64", "kernel(k, q) over the normalizer: the head's attention to it"),
    output_share=("float64", f"{OUTPUT_SHARE}; the part is the contribution of this demonstration's step at the query"),
    log_step_norm=("float64", "natural logarithm of |v| sqrt(kernel(k, k)) / normalizer: the size of its part of the step"),
    cosine_before=("float64", "of (W_0 phi(k), v)"),
    cosine_after=("float64", "of (W_1 phi(k), v)"),
)


@analysis(
    COLUMNS,
    "the contribution of each token before a query to every head's step there",
    options={
        "query_pos": Option("the query's position; negative ones count from the end"),
        "n_demonstrations": Option("number of tokens from the start that are demonstrations; all by default", value_type=int),
    },
    check_model=has_dual_model,
)
@on_its_front_ends
@checked
@torch.no_grad()
def dual_demonstrations(
    model: HookedKVTransformer, prompt: PromptTokens, *, query_pos: int = -1, n_demonstrations: int | None = None
) -> pd.DataFrame:
    """Measure the contribution of every demonstration to every head's step.

    Args:
        model: any; an attached KV bias is part of W_0.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        query_pos: the query's position; negative ones count from the end.
        n_demonstrations: the first this many tokens are demonstrations; None takes all before the query.

    Returns:
        By layer, head, then demonstration:

        {columns}

    Raises:
        KVLensError: an attention without a dual model, a query that does not exist or precedes its demonstrations.
    """
    tokens = prompt_sequence(model, "prompt", prompt)
    query = query_pos % len(tokens) if -len(tokens) <= query_pos < len(tokens) else query_pos
    figures = demonstration_figures(model, tokens, query_pos, n_demonstrations)
    heads, n = heads_of_model(model), figures.weight.shape[-1]
    layer, head = (x.repeat_interleave(n) for x in heads)
    return COLUMNS.frame(
        {
            "layer": layer,
            "head": head,
            "position": torch.full_like(layer, query),
            "prompt_position": torch.arange(n).repeat(len(heads[0])),
            "token": token_texts(model, tokens[:n]) * len(heads[0]),
            **{name: figure[heads] for name, figure in figures._asdict().items()},
        }
    )

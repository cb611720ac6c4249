"""The losses of the dual models: one row per layer, head and query.

The loss is linear in W and has no minimum, so its drop measures the size of the step, not its quality; it spans dozens of
orders of magnitude over the heads of one model, and is therefore given as a logarithm, next to scale-free measures.

Source: DUAL th. 3.1, eq. 9.
"""

import pandas as pd
import torch

from kvlens import HookedKVTransformer
from kvlens.checks import checked
from kvlens.dual import dual_figures

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
    token=("str", "the token at the query"),
    n_demonstrations=("int64", "tokens in the training set"),
    log_loss_drop=("float64", "natural logarithm of L(W_0) - L(W_1) at learning rate 1"),
    equivalence_error=("float64", "|f(q) after one step - the head's output| / |the head's output|"),
    step_share=("float64", f"{OUTPUT_SHARE}; the part is the step's; the rest is that of W_0"),
    demonstration_weight=("float64", "sum of kernel over normalizer over the demonstrations: attention to them"),
    cosine_before=("float64", "mean over demonstrations of the cosine of (W_0 phi(k), v); NaN without cosines"),
    cosine_after=("float64", "the same with W_1"),
)


@analysis(
    COLUMNS,
    "every head as one step of representation learning: the size of the step, and its share of the output",
    options={
        "n_demonstrations": Option("number of tokens from the start that are demonstrations of every query", value_type=int),
        "cosines": Option("whether to compute the cosines, which take most of the time"),
    },
    check_model=has_dual_model,
)
@on_its_front_ends
@checked
@torch.no_grad()
def dual_losses(
    model: HookedKVTransformer, prompt: PromptTokens, *, n_demonstrations: int | None = None, cosines: bool = True
) -> pd.DataFrame:
    """Measure the dual model's step, for every head and query of a text.

    Args:
        model: any; an attached KV bias is part of W_0.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        n_demonstrations: the first this many tokens are every query's demonstrations; None takes all tokens before each query.
        cosines: whether to compute the cosines, which takes most of the time.

    Returns:
        By layer, head, then query:

        {columns}

    Raises:
        KVLensError: an attention without a dual model (the message says why), a text with no query after a demonstration.
    """
    tokens = prompt_sequence(model, "prompt", prompt)
    figures = dual_figures(model, tokens, n_demonstrations, cosines=cosines)
    first = 1 if n_demonstrations is None else n_demonstrations
    heads, n_queries = heads_of_model(model), figures.log_loss_drop.shape[-1]
    layer, head = (x.repeat_interleave(n_queries) for x in heads)
    query = torch.arange(n_queries).repeat(len(heads[0]))
    return COLUMNS.frame(
        {
            "layer": layer,
            "head": head,
            "position": query + first,
            "token": token_texts(model, tokens)[first:] * len(heads[0]),
            "n_demonstrations": query + 1 if n_demonstrations is None else torch.full_like(query, n_demonstrations),
            **{name: figure[heads] for name, figure in figures._asdict().items()},
        }
    )

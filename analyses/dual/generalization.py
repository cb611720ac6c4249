"""The generalization bound of one head's dual model, term by term, as demonstrations are added.

With probability 1 - delta the risk exceeds the empirical one by at most a constant times

    w rho sqrt(d_o Tr K_S) / N  +  rho^2 sqrt(log(1 / delta) / N)

The paper states it as O(.), without constants, and text tokens are not independent draws, so it is an indication rather than a
guarantee. Here w is the norm of W_1, the weight after the step, and rho the largest norm of a label or a prediction. With
negative samples K_S is the kernel of phi(k_j) - beta mean phi(k_n), and rho^2 in the second term grows by 1 + beta. Norms and
terms are natural logarithms, because real heads span hundreds of orders of magnitude.

Source: DUAL th. 3.2, and its version with negative samples.
"""

import pandas as pd
import torch

from kvlens import HookedKVTransformer, KVLensError
from kvlens.checks import checked
from kvlens.dual import DualModel

from ..declaration import Columns, Option, analysis
from ..front_ends import on_its_front_ends
from ..sequences import PromptTokens, prompt_sequence
from .refusal import has_dual_model

COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", "query head"),
    n_demonstrations=("int64", "N, tokens from the front"),
    d_output=("int64", "d_o, the width of a label"),
    n_negative=("int64", "negative samples for each demonstration, as given"),
    beta=("float64", "their weight, as given"),
    log_norm=("float64", "log w, the norm of W_1"),
    log_rho=("float64", "log of the largest norm of a label or a prediction"),
    log_trace=("float64", "log Tr K_S, effective with negative samples"),
    log_complexity=("float64", "log of the bound's first term"),
    log_confidence=("float64", "log of its second"),
    log_bound=("float64", "log of their sum"),
    delta=("float64", "the probability with which it may fail, as given"),
)


@analysis(
    COLUMNS,
    "the terms of a head's generalization bound as demonstrations are added",
    options={
        "layer": Option("which layer"),
        "head": Option("which query head"),
        "query_pos": Option("the query's position; negative ones count from the end"),
        "n_steps": Option("how many sizes of the training set"),
        "delta": Option("the probability with which the bound may fail"),
        "n_negative": Option("negative samples for each demonstration"),
        "beta": Option("their weight"),
    },
    check_model=has_dual_model,
)
@on_its_front_ends
@checked
@torch.no_grad()
def dual_bound(
    model: HookedKVTransformer,
    prompt: PromptTokens,
    *,
    layer: int = 0,
    head: int = 0,
    query_pos: int = -1,
    n_steps: int = 8,
    delta: float = 0.05,
    n_negative: int = 0,
    beta: float = 0.0,
) -> pd.DataFrame:
    """Compute the bound's terms for training sets that grow to all tokens before the query.

    Args:
        model: any whose attention has a dual model.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        layer, head: which head.
        query_pos: the query's position; negative ones count from the end.
        n_steps: number of sizes of the training set, evenly spaced (fewer if there are fewer tokens). Each takes a pass.
        delta: the probability with which the bound may fail.
        n_negative, beta: negative samples for each demonstration, and their weight; 0 for none.

    Returns:
        By number of demonstrations:

        {columns}

    Raises:
        KVLensError: no demonstrations, a kernel that is not positive, ``delta`` outside (0, 1), a head that does not exist.
    """
    tokens = prompt_sequence(model, "prompt", prompt)
    last = query_pos % len(tokens) if -len(tokens) <= query_pos < len(tokens) else len(tokens) - 1
    first = max(1, n_negative)
    if n_steps < 1 or last < first:
        raise KVLensError(
            f"dual_bound: expected at least {first} tokens before the query and n_steps of at least 1, got {last} and {n_steps}"
        )
    sizes = torch.linspace(first, last, min(n_steps, last - first + 1)).round().long().unique().tolist()
    terms = []
    for n in sizes:
        dual = DualModel.from_head(model, tokens, layer, head, query_pos, n_demonstrations=n)
        dual.step()
        terms.append(dual.bound(delta, n_negative=n_negative, beta=beta)._asdict())
    return COLUMNS.frame(
        {
            "layer": layer,
            "head": head,
            "n_demonstrations": sizes,
            "d_output": model.cfg.d_head,
            "n_negative": n_negative,
            "beta": float(beta),
            "delta": float(delta),
            **{name: torch.stack([one[name].double() for one in terms]) for name in terms[0]},
        }
    )

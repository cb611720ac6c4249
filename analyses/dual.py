"""Heads as one step of representation learning: how much it lowers its loss, what each demonstration adds, and its bound.

- :func:`dual_losses`: one row per layer, head and query. The loss is linear in W and has no minimum, so its drop measures the
  size of the step, not its quality; it spans dozens of orders of magnitude over the heads of one model, and is therefore given
  as a logarithm, next to scale-free measures. **None of them shows that a head has learned anything.** The drop is the squared
  norm |sum_j v_j phi(k_j)^T|^2 / D^2, never negative. The cosines of predictions and labels nearly always rise: the step gives
  the prediction at k_j, among others, kappa(k_j, k_j) / D times its own label. With other keys' labels they rise, too, so each
  figure has a null beside it, *shuffled*: keys, queries, normalizers and W_0's bias stay, and values change places. What
  exceeds it comes from which value belongs to which key, for which no training is needed: equal tokens have equal keys and
  equal values in untrained models, too (``tests/benchmarks/results/explanations.md``).
- :func:`dual_demonstrations`: one row per layer, head and token, for one query.
- :func:`dual_bound`: the generalization bound of one head's dual model, term by term, as demonstrations are added. With
  probability 1 - delta the risk exceeds the empirical one by at most a constant times

      w rho sqrt(d_o Tr K_S) / N  +  rho^2 sqrt(log(1 / delta) / N)

  The paper states it as O(.), without constants, and text tokens are not independent draws, so it is an indication rather than
  a guarantee. Here w is the norm of W_1, the weight after the step, and rho the largest norm of a label or a prediction. With
  negative samples K_S is the kernel of phi(k_j) - beta mean phi(k_n), and rho^2 in the second term grows by 1 + beta. Norms and
  terms are natural logarithms, because real heads span hundreds of orders of magnitude.

Source: DUAL th. 3.1, eq. 9 (steps); th. 3.2 (bound; the version with negative samples is kvlens', not that of app. C.2).
"""

import pandas as pd
import torch

from kvlens import KVModel
from kvlens.checks import Count, Seed, checked
from kvlens.dual import DualModel, check_attention, demonstration_figures, dual_figures
from kvlens.texts import token_texts

from .declaration import Columns, Option, analysis
from .predictions import OUTPUT_SHARE
from .registry import on_its_front_ends
from .segments import heads_of_model
from .sequences import PromptTokens, prompt_sequence


def has_dual_model(model: KVModel) -> None:
    """Raise KVLensError for an attention without a known dual model, before any prompt of a batch is run."""
    check_attention(model, 1)


SHUFFLED = "with the values in a random order, except the first token's, which stays: the null"
LOSSES = Columns(
    layer=("int64", "from 0"),
    head=("int64", "query head"),
    position=("int64", "of the query, in the whole sequence"),
    token=("str", "the token at the query"),
    n_demonstrations=("int64", "tokens in the training set"),
    log_loss_drop=("float64", "natural logarithm of L(W_0) - L(W_1) at learning rate 1"),
    log_loss_drop_shuffled=("float64", f"log_loss_drop {SHUFFLED}"),
    equivalence_error=("float64", "|f(q) after one step - the head's output| / |the head's output|"),
    step_share=("float64", f"{OUTPUT_SHARE}; the part is the step's; the rest is that of W_0"),
    step_share_shuffled=("float64", f"step_share {SHUFFLED}"),
    demonstration_weight=(
        "float64",
        "sum of kernel over normalizer over the demonstrations: attention to them; with uniform attention it would be "
        "n_demonstrations over position + 1",
    ),
    cosine_before=("float64", "mean over demonstrations of the cosine of (W_0 phi(k), v); NaN without cosines"),
    cosine_before_shuffled=("float64", f"cosine_before {SHUFFLED}"),
    cosine_after=("float64", "the same with W_1; nearly always larger"),
    cosine_after_shuffled=("float64", f"cosine_after {SHUFFLED}"),
)


@analysis(
    LOSSES,
    "every head as one step of representation learning: the size of the step, and its share of the output",
    cost="the prompt once",
    options={
        "n_demonstrations": Option("number of tokens from the start that are demonstrations of every query", value_type=int),
        "cosines": Option("whether to compute the cosines, which take most of the time"),
        "seed": Option("of the order in which the null has the values"),
    },
    check_model=has_dual_model,
)
@on_its_front_ends
@checked
@torch.no_grad()
def dual_losses(
    model: KVModel,
    prompt: PromptTokens,
    *,
    n_demonstrations: int | None = None,
    cosines: bool = True,
    seed: Seed = 0,
) -> pd.DataFrame:
    """Measure the dual model's step, for every head and query of a text, beside what it would do with shuffled values.

    Args:
        model: any; an attached KV bias is in W_0.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        n_demonstrations: the first this many tokens are every query's demonstrations; None takes all tokens before each query.
        cosines: whether to compute the cosines, which takes most of the time.
        seed: of the random order of the values in the null: all of them, or the first ``n_demonstrations``, except the first.

    Returns:
        By layer, head, then query:

        {columns}

    Raises:
        KVLensError: an attention without a dual model (the message says why), a text with no query after a demonstration.
    """
    tokens = prompt_sequence(model, "prompt", prompt)
    figures = dual_figures(model, tokens, n_demonstrations, cosines=cosines, seed=seed)
    first = 1 if n_demonstrations is None else n_demonstrations
    heads, n_queries = heads_of_model(model), figures.log_loss_drop.shape[-1]
    layer, head = (x.repeat_interleave(n_queries) for x in heads)
    query = torch.arange(n_queries).repeat(len(heads[0]))
    return LOSSES.frame(
        {
            "layer": layer,
            "head": head,
            "position": query + first,
            "token": token_texts(model, tokens)[first:] * len(heads[0]),
            "n_demonstrations": query + 1 if n_demonstrations is None else torch.full_like(query, n_demonstrations),
            **{name: figure[heads] for name, figure in figures._asdict().items()},
        }
    )


DEMONSTRATIONS = Columns(
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
    DEMONSTRATIONS,
    "the contribution of each token before a query to every head's step there",
    cost="the prompt once",
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
    model: KVModel, prompt: PromptTokens, *, query_pos: int = -1, n_demonstrations: int | None = None
) -> pd.DataFrame:
    """Measure the contribution of every demonstration to every head's step.

    Args:
        model: any; an attached KV bias is in W_0.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        query_pos: the query's position; negative ones count from the end.
        n_demonstrations: the first this many tokens are demonstrations; None takes all before the query.

    Returns:
        By layer, head, then demonstration:

        {columns}

    Raises:
        KVLensError: an attention without a dual model, a query that precedes its demonstrations.
    """
    tokens = prompt_sequence(model, "prompt", prompt)
    query = query_pos % len(tokens) if -len(tokens) <= query_pos < len(tokens) else query_pos
    figures = demonstration_figures(model, tokens, query_pos, n_demonstrations)
    heads, n = heads_of_model(model), figures.weight.shape[-1]
    layer, head = (x.repeat_interleave(n) for x in heads)
    return DEMONSTRATIONS.frame(
        {
            "layer": layer,
            "head": head,
            "position": torch.full_like(layer, query),
            "prompt_position": torch.arange(n).repeat(len(heads[0])),
            "token": token_texts(model, tokens[:n]) * len(heads[0]),
            **{name: figure[heads] for name, figure in figures._asdict().items()},
        }
    )


BOUND = Columns(
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
    BOUND,
    "the terms of a head's generalization bound as demonstrations are added",
    cost="the prompt once for each of n_steps sizes",
    options={
        "layer": Option("which layer"),
        "head": Option("which query head"),
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
    model: KVModel,
    prompt: PromptTokens,
    *,
    layer: int = 0,
    head: int = 0,
    n_steps: Count = 8,
    delta: float = 0.05,
    n_negative: int = 0,
    beta: float = 0.0,
) -> pd.DataFrame:
    """Compute the bound's terms for training sets that grow to all tokens before the prompt's last, the query.

    Args:
        model: any whose attention has a dual model.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        layer, head: which head.
        n_steps: number of sizes of the training set, evenly spaced (fewer if there are fewer tokens). Each takes a pass.
        delta: the probability with which the bound may fail.
        n_negative, beta: negative samples for each demonstration, and their weight; 0 for none.

    Returns:
        By number of demonstrations:

        {columns}

    Raises:
        KVLensError: no demonstrations, a kernel that is not positive, ``delta`` outside (0, 1).
    """
    tokens = prompt_sequence(model, "prompt", prompt)
    first, last = max(1, n_negative), len(tokens) - 1
    sizes = torch.linspace(first, last, min(n_steps, last - first + 1)).round().long().unique().tolist()
    terms = []
    for n in sizes:
        dual = DualModel.from_head(model, tokens, layer, head, n_demonstrations=n)
        dual.step()
        terms.append(dual.bound(delta, n_negative=n_negative, beta=beta)._asdict())
    return BOUND.frame(
        {
            "layer": layer,
            "head": head,
            "n_demonstrations": sizes,
            "d_output": dual.labels.shape[1],
            "n_negative": n_negative,
            "beta": float(beta),
            "delta": float(delta),
            **{name: torch.stack([one[name].double() for one in terms]) for name in terms[0]},
        }
    )

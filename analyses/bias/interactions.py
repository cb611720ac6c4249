"""How the biases of two prompts interact in one model: similarity, overwriting, addition.

For one head in one layer, converting a second prompt of M tokens on top of the first gives

    b_12 = C + N        C = gamma^M R_{-M} b_1  (the first bias, carried)        N = sum_j phi(k_j) v_j^T  (newly written)

where the keys and values of N were computed *with* the first prompt in context. This raises three questions:

- similarity: do two prompts write the same content?
- overwriting: with C = sum_r s_r u_r w_r^T (singular values), how much of each s_r is left in b_12? The old term is never
  erased, only decayed; overwriting means that N has a component -s_r along the same pair (u_r, w_r).
- addition: can two prompts be converted separately and added? b_1 + b_2 differs from b_12 in what each variant ignores:
  ``plain`` ignores that b_1 must be carried (RoPE, decay), that the second prompt starts at a later position and after a shift
  state, and that it saw the first; ``aligned`` ignores only the last: C + b_2, with b_2 converted at its position and after
  the first prompt's shift state, but without reading the first bias.

In the first layer keys and values depend on the tokens alone, so ``aligned`` is exact there, and in one-layer models; so is
``plain`` without positions, shift and decay. A BOS in both prompts would be in the concatenation twice, so the second prompt
must not have one. A trained bias is the start of every conversion, so ``plain`` counts it twice.

In a softmax model C keeps the first prompt's keys unchanged, N adds its own, and nothing is erased. But a query that reads C
also reads N, so the same questions are asked of what queries read: the queries of the second prompt's tokens, as if they
followed both prompts, over the normalizer n_i of both. Head by head, query q_i reads

    phi(q_i)^T b_KV / n_i  [d_head]        phi(q_i)^T b_D / n_i

which is the prompt's share of the head's output, and of the mass of its normalizer. With one row per query, they replace b_KV
[d_phi, d_head] and b_D [d_phi] of a linear model.

Source: ICLCA sec. 4 for the bias and its continuation; the decomposition is kvlens'.
"""

from collections.abc import Callable

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias, KVModel, carry_bias, combine, convert_prompt
from kvlens.checks import checked
from kvlens.model import attention_parts

from ..declaration import Columns, analysis, tokens_field
from ..registry import on_its_front_ends
from ..segments import heads_of_model, stack_layers
from ..sequences import PromptTokens, check_detached, converted, one_sequence

_Queries = list[Float[Tensor, "row _ _"]]
"""The queries of a text as a model scores them (shifted, after RoPE), layer by layer, of each head."""
_Numbers = Callable[[KVBias], tuple[Float[Tensor, "layer head row d_head"], Float[Tensor, "layer head row"]]]
"""Maps a bias to its b_KV and b_D, or to what probes read from them, in float64 on the CPU."""
SecondTokens = str | Int[Tensor, "*one second_pos"]
COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", "query head"),
    b_kv_cosine=("float64", "between the two prompts, each converted alone; NaN for a zero bias"),
    b_d_cosine=("float64", 'likewise; NaN under normalizer "none"'),
    survival=(
        "float64",
        "<C, b_12> / (||C|| ||b_1||): the mean of u_r^T b_12 w_r over the singular value of b_1, each weighted by that times "
        "s_r: 1 untouched, 0 erased, below 0 reversed, above 1 reinforced",
    ),
    normalizer_kept=(
        "float64",
        "sum of b_D over its features, first prompt over both: what is left of the first prompt's output for a query that "
        'reads all features alike; NaN under "none"; softmax: the first prompt\'s share of the mass, mean over queries',
    ),
    plain_error=("float64", "||b_1 + b_2 - b_12|| / ||b_12|| of b_KV"),
    plain_b_d_error=("float64", 'of b_D; NaN under "none"'),
    aligned_error=("float64", "the same of ``aligned``"),
    aligned_b_d_error=("float64", "of b_D, likewise"),
)


@analysis(
    COLUMNS,
    "how the biases of two prompts interact in each head: similarity, overwriting, addition",
    cost="both prompts twice, and once more one behind the other",
    inputs={"second_prompt": tokens_field("second_prompt", prepend_bos=False)},
)
@on_its_front_ends
@checked
@torch.no_grad()
def bias_interactions(model: KVModel, prompt: KVBias | PromptTokens, second_prompt: SecondTokens) -> pd.DataFrame:
    """Compare two prompts per head: the similarity of their biases, what remains of the first, and the error of adding them.

    Args:
        model: linear or softmax, nothing attached; of either front end.
        prompt: the first prompt: a string, or tokens [pos] with BOS if the model uses one; or its bias.
        second_prompt: the continuation: a string, or tokens [pos] without BOS.

    Returns:
        One row per head, by layer, then head:

        {columns}

    Raises:
        KVLensError: an attached bias, which both sums would include twice; tokens that are empty, misshapen or outside the
            vocabulary.
    """
    check_detached("bias_interactions", model)
    one, then = converted(model, "prompt", prompt), one_sequence(model, "second_prompt", second_prompt)
    both, alone = convert_prompt(model, then, initial=one), convert_prompt(model, then)
    carried_one = carry_bias(model, one, len(then))
    aligned = convert_prompt(model, then, initial=0.0 * one)  # keeps the shift state and the offset
    numbers = _numbers_stored if one.kind is None else _numbers_read(model, _queries_of(model, one, then), both)
    (first, first_d), (second, second_d), (whole, whole_d) = (numbers(b) for b in (one, alone, both))
    carried, carried_d = numbers(carried_one)
    first, second, carried, whole = (x.flatten(2) for x in (first, second, carried, whole))
    layer, head = heads_of_model(model)
    heads = torch.searchsorted(torch.tensor(both.attention_layers), layer), head
    columns = {
        "b_kv_cosine": (first * second).sum(dim=-1) / (first.norm(dim=-1) * second.norm(dim=-1)),
        "b_d_cosine": (first_d * second_d).sum(dim=-1) / (first_d.norm(dim=-1) * second_d.norm(dim=-1)),
        "survival": (carried * whole).sum(dim=-1) / (carried.norm(dim=-1) * first.norm(dim=-1)),
        "normalizer_kept": carried_d.sum(dim=-1) / whole_d.sum(dim=-1),
    }
    for name, (a, b) in {"plain": (one, alone), "aligned": (carried_one, aligned)}.items():
        kv, d = numbers(combine(a, b, shift_state="last"))
        columns[f"{name}_error"] = (kv.flatten(2) - whole).norm(dim=-1) / whole.norm(dim=-1)
        columns[f"{name}_b_d_error"] = (d - whole_d).norm(dim=-1) / whole_d.norm(dim=-1)
    return COLUMNS.frame({"layer": layer, "head": head, **{name: x[heads] for name, x in columns.items()}})


def _numbers_stored(bias: KVBias) -> tuple[Tensor, Tensor]:
    """b_KV and b_D themselves, for biases over the model's own features."""
    return bias.stacked("b_kv").double().cpu(), bias.stacked("b_d").double().cpu()


def _numbers_read(model: KVModel, queries: _Queries, whole: KVBias) -> _Numbers:
    """What ``queries`` read from a bias, over the normalizer of ``whole``; NaN where signed weights make that negative."""
    _, d, log_scale = _reads(model, whole, queries)
    log_n = d.log() + log_scale
    log_n = torch.where(log_n == -torch.inf, 0.0, log_n)  # a query whose window contains none of them reads 0

    def numbers(bias: KVBias) -> tuple[Tensor, Tensor]:
        kv, d, log_scale = _reads(model, bias, queries)
        factor = (log_scale - log_n).exp()
        return kv * factor[..., None], d * factor

    return numbers


def _queries_of(model: KVModel, bias: KVBias, text: Int[Tensor, " pos"]) -> _Queries:
    """The queries of ``text`` after the prompt of ``bias``."""
    with model.kv_bias(bias):
        read = model.read_queries(text[None])
    return [layer.q[0].double().cpu() for layer in read]


def _reads(
    model: KVModel, bias: KVBias, queries: _Queries
) -> tuple[Float[Tensor, "layer head row d_head"], Float[Tensor, "layer head row"], Float[Tensor, "layer head row"]]:
    """What each query reads from ``bias``, as if its text followed it, with the model's own scoring: its parts of b_KV and b_D,
    and the logarithm of a factor of both, whose product may overflow."""
    bias = bias.per_query_head().to("cpu").to(torch.float64)
    layers = []
    rules = [part.score_rule() for part in attention_parts(model)]
    for q, rule, keys in zip(queries, rules, bias.attention, strict=True):
        q = q[None]
        phi = keys.features.read(q, rule, torch.arange(q.shape[1])[None], keys.log_scale, keys.b_kv, keys.b_d)
        features = phi.features[0].transpose(0, 1)  # [head, row, d_phi]
        layers.append((features @ keys.b_kv[0], (features @ keys.b_d[0, ..., None])[..., 0], phi.log_scale[0].T))
    kv, d, log_scale = map(stack_layers, zip(*layers, strict=True))
    return kv, d, log_scale

"""How the biases of several prompts interact in one model: similarity, overwriting, addition.

For one head in one layer, converting a second prompt of M tokens on top of the first gives

    b_12 = C + N        C = gamma^M R_{-M} b_1  (the first bias, carried)        N = sum_j phi(k_j) v_j^T  (newly written)

where the keys and values of N were computed *with* the first prompt in context. This raises three questions:

- :func:`bias_similarity`: do two prompts write the same content?
- :func:`bias_overwriting`: with C = sum_r s_r u_r w_r^T (singular values), how much of each s_r is left in b_12? The old
  term is never erased, only decayed; overwriting means that N has a component -s_r along the same pair (u_r, w_r).
- :func:`bias_addition`: can two prompts be converted separately and added? b_1 + b_2 differs from b_12 in what each variant
  ignores: ``plain`` ignores that b_1 must be carried (RoPE, decay), that the second prompt starts at a later position and
  after a shift state, and that it saw the first; ``aligned`` ignores only the last: C + b_2, with b_2 converted at its position
  and after the first prompt's shift state, but without reading the first bias.

In the first layer keys and values depend on the tokens alone, so ``aligned`` is exact there, and in one-layer models; so is
``plain`` without positions, shift and decay. A BOS in both prompts would be in the concatenation twice, so the second prompt
must not have one. A trained bias is the start of every conversion, so ``plain`` counts it twice.

In a softmax model C keeps the first prompt's keys unchanged, N adds its own, and nothing is erased. But a query that reads C
also reads N, so the same questions are asked of what queries read (:mod:`kvlens.analyses.bias.probes`): the queries of the
second prompt's tokens, as if they followed both prompts, over the normalizer of both.

Source: ICLCA sec. 4 for the bias and its continuation; the decomposition is kvlens'.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias, KVLensError, carry_bias, combine, convert_prompt
from kvlens.checks import checked

from ..declaration import Analysis, Columns
from ..front_ends import on_its_front_ends
from ..inputs import PROMPT, tokens_field
from ..predictions import KL, converted_logits, kl_divergence, log_probabilities, next_token_losses
from ..sequences import PromptTokens, TextTokens, converted, one_sequence
from .probes import Numbers, numbers_read, numbers_stored, probes_of, side_by_side

SecondTokens = str | Int[Tensor, "*one second_pos"]
SUMS = ("plain", "aligned")
SIMILARITY_COLUMNS = Columns(
    prompt_a=("int64", "index into ``biases``"),
    prompt_b=("int64", "likewise, above ``prompt_a``"),
    layer=("int64", "from 0"),
    head=("int64", "query head"),
    b_kv_cosine=("float64", "<b_KV, b_KV'> / (||b_KV|| ||b_KV'||), Frobenius; NaN for a zero bias"),
    b_d_cosine=("float64", 'likewise of b_D; NaN under normalizer "none"'),
)
OVERWRITING_COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", "query head"),
    direction=("int64", "0 is the strongest"),
    strength=("float64", "singular value of b_1"),
    carried=("float64", "s_r, what decay alone leaves of it"),
    written=("float64", "u_r^T N w_r, what the second prompt writes along the same pair"),
    survival=(
        "float64",
        "u_r^T b_12 w_r / strength = (carried + written) / strength: 1 untouched, 0 erased, below 0 reversed, above 1 "
        "reinforced",
    ),
    crosstalk=(
        "float64",
        "||u_r^T N (1 - w_r w_r^T)|| / strength: what a query along u_r reads in addition to the old value",
    ),
)
ADDITION_COLUMNS = Columns(
    condition=("str", "``whole``, ``plain``, ``aligned``, ``first`` or ``second``"),
    logit_error=("float64", "||logits - whole|| / ||whole|| over the text's positions"),
    kl=("float64", f"{KL}; original ``whole``, intervened this condition; mean over the text's positions"),
    loss=("float64", "mean loss of the text's next tokens, nats; NaN for one token"),
)
CIRCUIT_COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", "query head"),
    b_kv_cosine=("float64", "between the two prompts, each converted alone; NaN for a zero bias"),
    b_d_cosine=("float64", 'likewise; NaN under normalizer "none"'),
    survival=(
        "float64",
        "<C, b_12> / (||C|| ||b_1||): the mean of :func:`bias_overwriting`'s, each weighted by its share of strength times "
        "carried",
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


@SIMILARITY_COLUMNS.document
@on_its_front_ends
@checked
@torch.no_grad()
def bias_similarity(
    biases: KVBias | Sequence[KVBias],
    *,
    model: HookedKVTransformer | None = None,
    text: TextTokens | None = None,
) -> pd.DataFrame:
    """Cosine between the biases of different prompts, head by head.

    If RoPE follows the feature map, every bias is relative to the end of its prompt, so prompts of different lengths can be
    compared; otherwise absolute positions are part of what is compared.

    Args:
        biases: a batch of biases, or single ones of one model.
        model, text: for softmax models, whose prompts are compared by what the queries of this text (a string, or tokens [pos]
            without BOS) read from them, when it follows each of them in turn.

    Returns:
        One row per pair of prompts (``prompt_a < prompt_b``), layer and head, in this order:

        {columns}

    Raises:
        KVLensError: fewer than two biases, a batch among single ones, biases of different models; softmax biases without a
            model and a text.
    """
    biases = _listed(biases)
    kv, d = (torch.stack(x) for x in zip(*map(_comparable(biases, model, text), biases), strict=True))
    n_prompts, n_layers, n_heads = d.shape[:3]
    a, b = torch.triu_indices(n_prompts, n_prompts, offset=1)
    rows = torch.cartesian_prod(torch.arange(len(a)), torch.arange(n_layers), torch.arange(n_heads))
    return SIMILARITY_COLUMNS.frame(
        {
            "prompt_a": a[rows[:, 0]],
            "prompt_b": b[rows[:, 0]],
            "layer": rows[:, 1],
            "head": rows[:, 2],
            "b_kv_cosine": _cosines(kv.flatten(-2))[a, b],
            "b_d_cosine": _cosines(d)[a, b],
        }
    )


def _comparable(biases: Sequence[KVBias], model: HookedKVTransformer | None, text: TextTokens | None) -> Numbers:
    """The numbers in which ``biases`` are compared."""
    if biases[0].features is None:
        return numbers_stored
    if model is None or text is None:
        raise KVLensError(
            "bias_similarity: each prompt of a softmax model has its own keys, so they are compared by what a text's queries "
            "read from them: give model= and text="
        )
    text = one_sequence(model, "text", text)
    return numbers_read(model, side_by_side([probes_of(model, bias, text) for bias in biases]), biases)


@OVERWRITING_COLUMNS.document
@on_its_front_ends
@checked
@torch.no_grad()
def bias_overwriting(
    model: HookedKVTransformer,
    prompt: KVBias | PromptTokens,
    second_prompt: SecondTokens,
    *,
    n_directions: int | None = None,
) -> pd.DataFrame:
    """Follow each singular direction of the first prompt's b_KV through the conversion of the second prompt.

    Args:
        model: linear or softmax, nothing attached.
        prompt: the first prompt: a string, or tokens [pos] with BOS if the model uses one; or its bias.
        second_prompt: the continuation: a string, or tokens [pos] without BOS.
        n_directions: the number of strongest directions per head, at most; None takes all above rounding.

    Returns:
        One row per layer, head and direction r, in this order. u_r (features) and w_r (values) are the singular vectors of
        the carried bias C; those of b_1 are the same up to the rotation of all its keys. For a softmax model u_r is over
        queries.

        {columns}

        Under normalizer "kernel" every read is also divided by phi(q).b_D, which grows with the second prompt; see
        ``normalizer_kept`` of :func:`circuits`.

    Raises:
        KVLensError: an attached bias, tokens that are empty, misshapen or outside the vocabulary.
    """
    if n_directions is not None and n_directions < 1:
        raise KVLensError(f"bias_overwriting: n_directions must be at least 1, got {n_directions}")
    pair = _convert_pair(model, prompt, second_prompt)
    numbers = _numbers(model, pair)
    (first, _), (carried, _), (whole, _) = (numbers(bias) for bias in (pair.first, pair.carried, pair.whole))
    strength = torch.linalg.svdvals(first)
    u, s, wh = torch.linalg.svd(carried, full_matrices=False)
    read = torch.einsum("lhfr,lhfd->lhrd", u, whole - carried)  # what a query along u_r reads of the new term
    written = (read * wh).sum(dim=-1)
    crosstalk = (read - written[..., None] * wh).norm(dim=-1)
    rounding = max(carried.shape[-2:]) * torch.finfo(pair.carried.b_KV.dtype).eps * strength[..., :1]
    layer, head, direction = (strength > rounding)[..., :n_directions].nonzero(as_tuple=True)
    at = (layer, head, direction)
    return OVERWRITING_COLUMNS.frame(
        {
            "layer": layer,
            "head": head,
            "direction": direction,
            "strength": strength[at],
            "carried": s[at],
            "written": written[at],
            "survival": ((s + written) / strength)[at],
            "crosstalk": (crosstalk / strength)[at],
        }
    )


@ADDITION_COLUMNS.document
@on_its_front_ends
@checked
@torch.no_grad()
def bias_addition(
    model: HookedKVTransformer, prompt: KVBias | PromptTokens, second_prompt: SecondTokens, text: TextTokens
) -> pd.DataFrame:
    """Measure the effect on a text's predictions of converting two prompts separately and adding their biases.

    Args:
        model: linear or softmax, nothing attached.
        prompt, second_prompt: as in :func:`bias_overwriting`.
        text: a string, or tokens [pos] without BOS.

    Returns:
        One row per condition, in this order: ``whole`` (the concatenation, converted), ``plain``, ``aligned`` (see the
        module), ``first`` and ``second`` (one prompt alone, carried and aligned, as a scale for the errors):

        {columns}

        All conditions put the text at the same position. The errors of the biases themselves, head by head, are in
        :func:`circuits`.

    Raises:
        KVLensError: an attached bias, which both sums would include twice; tokens that are empty, misshapen or outside the
            vocabulary.
    """
    pair, text = _convert_pair(model, prompt, second_prompt), one_sequence(model, "text", text)
    biases = {"whole": pair.whole, **pair.sums, "first": pair.carried, "second": pair.aligned_second}
    logits = {name: converted_logits(model, bias, text).double() for name, bias in biases.items()}
    log_p = {name: log_probabilities(x) for name, x in logits.items()}
    whole = logits["whole"]
    return ADDITION_COLUMNS.frame(
        {
            "condition": list(biases),
            "logit_error": [float((x - whole).norm() / whole.norm()) for x in logits.values()],
            "kl": [float(kl_divergence(log_p["whole"], x).mean()) for x in log_p.values()],
            "loss": [float(next_token_losses(x, text)[:-1].mean()) for x in log_p.values()],
        }
    )


@CIRCUIT_COLUMNS.document
@on_its_front_ends
@checked
@torch.no_grad()
def circuits(model: HookedKVTransformer, prompt: KVBias | PromptTokens, second_prompt: SecondTokens) -> pd.DataFrame:
    """Compare two prompts per head: the similarity of their biases, what remains of the first, and the error of adding them.

    Args:
        model: linear or softmax, nothing attached.
        prompt, second_prompt: as in :func:`bias_overwriting`.

    Returns:
        One row per head, by layer, then head:

        {columns}

    Raises:
        KVLensError: as :func:`bias_addition`.
    """
    pair = _convert_pair(model, prompt, second_prompt)
    numbers = _numbers(model, pair)
    (first, first_d), (second, second_d), (whole, whole_d) = (numbers(b) for b in (pair.first, pair.second, pair.whole))
    carried, carried_d = numbers(pair.carried)
    first, second, carried, whole = (x.flatten(2) for x in (first, second, carried, whole))
    layer, head = torch.cartesian_prod(torch.arange(model.cfg.n_layers), torch.arange(model.cfg.n_heads)).T
    columns = {
        "layer": layer,
        "head": head,
        "b_kv_cosine": _cosines(torch.stack([first, second]))[0, 1],
        "b_d_cosine": _cosines(torch.stack([first_d, second_d]))[0, 1],
        "survival": (carried * whole).sum(dim=-1) / (carried.norm(dim=-1) * first.norm(dim=-1)),
        "normalizer_kept": carried_d.sum(dim=-1) / whole_d.sum(dim=-1),
    }
    for name, added in pair.sums.items():
        kv, d = numbers(added)
        columns[f"{name}_error"] = _relative(kv.flatten(2), whole)
        columns[f"{name}_b_d_error"] = _relative(d, whole_d)
    return CIRCUIT_COLUMNS.frame(columns)


def _numbers(model: HookedKVTransformer, pair: "_Pair") -> Numbers:
    """The numbers in which the biases of ``pair`` are compared."""
    if model.cfg.attention == "linear":
        return numbers_stored
    return numbers_read(model, probes_of(model, pair.first, pair.second_prompt), [pair.whole])


class _Pair(NamedTuple):
    """Two prompts, converted in every way that is compared."""

    first: KVBias
    second: KVBias
    whole: KVBias
    carried: KVBias
    aligned_second: KVBias
    sums: dict[str, KVBias]
    second_prompt: Int[Tensor, " second_pos"]


def _convert_pair(model: HookedKVTransformer, prompt: KVBias | PromptTokens, second_prompt: SecondTokens) -> _Pair:
    """Convert in four passes: each prompt alone, the second after the first, and aligned; the carried bias needs no pass."""
    if model.attached_kv_bias is not None:
        raise KVLensError("circuits: a bias is attached, and every prompt would be converted on top of it; detach it first")
    first, two = converted(model, "prompt", prompt), one_sequence(model, "second_prompt", second_prompt)
    second = convert_prompt(model, two)
    whole = convert_prompt(model, two, initial=first)
    aligned = convert_prompt(model, two, initial=0.0 * first)  # keeps the shift state and the offset
    carried = carry_bias(model, first, len(two))
    sums = {
        name: _as_if_after_both(combine(a, b, shift_state="last"), whole)
        for name, a, b in zip(SUMS, (first, carried), (second, aligned), strict=True)
    }
    alone = replace(carried, last_k=whole.last_k, last_v=whole.last_v, last_q=whole.last_q)
    return _Pair(first, second, whole, _as_if_after_both(alone, whole), aligned, sums, two)


def _as_if_after_both(bias: KVBias, whole: KVBias) -> KVBias:
    """``bias`` with the text's position after both prompts."""
    return replace(bias, position_offset=whole.position_offset, n_prompt_tokens=whole.n_prompt_tokens)


def _listed(biases: KVBias | Sequence[KVBias]) -> list[KVBias]:
    """``biases`` as a list of at least two single biases of one model."""
    if isinstance(biases, KVBias):
        biases = [biases] if biases.batch_size is None else [biases.select_prompt(i) for i in range(biases.batch_size)]
    if len(biases) < 2:
        raise KVLensError(f"bias_similarity: expected at least two biases, got {len(biases)}")
    for i, bias in enumerate(biases):
        if not isinstance(bias, KVBias) or bias.batch_size is not None:
            came = f"a batch of {bias.batch_size}" if isinstance(bias, KVBias) else type(bias).__name__
            raise KVLensError(f"bias_similarity: bias {i}: expected the bias of one prompt, got {came}")
        bias.fingerprint.check(biases[0].fingerprint, f"bias_similarity: bias {i}", whose="the first bias")
    return list(biases)


def _cosines(x: Float[Tensor, "prompt layer head d"]) -> Float[Tensor, "prompt prompt layer head"]:
    unit = x / x.norm(dim=-1, keepdim=True)  # 0 / 0 is NaN: a zero bias has no direction
    return torch.einsum("plhd,qlhd->pqlh", unit, unit)


def _relative(x: Float[Tensor, "layer head d"], reference: Float[Tensor, "layer head d"]) -> Float[Tensor, "layer head"]:
    return (x - reference).norm(dim=-1) / reference.norm(dim=-1)


CIRCUITS = Analysis(
    name="circuits",
    summary="how the biases of two prompts interact in each head: similarity, overwriting, addition",
    function=circuits,
    columns=CIRCUIT_COLUMNS,
    inputs={"prompt": PROMPT, "second_prompt": tokens_field("second_prompt", prepend_bos=False)},
)

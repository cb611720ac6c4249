"""How the biases of several prompts meet in one model: alike or not, written over, added up.

One head, one layer. Converting a second prompt of M tokens on top of the first gives

    b_12 = C + N        C = gamma^M R_{-M} b_1  (the first bias, carried)        N = sum_j phi(k_j) v_j^T  (newly written)

where the keys and values of N were computed *with* the first prompt in view. Three questions follow:

- :func:`bias_similarity`: do two prompts write the same thing?
- :func:`bias_overwriting`: with C = sum_r s_r u_r w_r^T (singular values), how much of each s_r is left in b_12? The old
  term is never erased, only decayed; overwriting means that N has a component -s_r along the same pair (u_r, w_r).
- :func:`bias_addition`: may one convert two prompts apart and add? b_1 + b_2 differs from b_12 by what each step ignores:
  ``plain`` ignores that b_1 must be carried (RoPE, decay), that the second prompt starts at a later position and behind a
  shift boundary, and that it saw the first; ``aligned`` ignores only the last: C + b_2, with b_2 converted at its place and
  behind the first prompt's boundary, its own pass reading no bias.

In the first layer keys and values depend on the tokens alone, so ``aligned`` is exact there, and exact altogether in a
one-layer model; without positions, shift and decay so is ``plain``. For softmax attention :func:`bias_addition` asks the same
of keys side by side: what it costs to keep texts' keys and values apart, and to put them together when they are needed. A BOS
in both prompts would be in the concatenation twice: give the second prompt none. A trained bias is the start of every
conversion, so ``plain`` counts it twice.

Source: ICLCA sec. 4 for the bias and its continuation; the decomposition is kvlens'.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analyses.declaration import Analysis, Columns
from analyses.inputs import PROMPT, tokens_field
from analyses.predictions import converted_logits, kl_divergence, log_probabilities, next_token_losses
from analyses.sequences import TextTokens, one_sequence, prompt_sequence
from kvlens import HookedKVTransformer, KVBias, KVLensError, carry_bias, combine, convert_prompt
from kvlens.signature import checked

FirstTokens = str | Int[Tensor, "*one first_pos"]
SecondTokens = str | Int[Tensor, "*one second_pos"]
SUMS = ("plain", "aligned")
SIMILARITY_COLUMNS = Columns(
    prompt_a=("int64", "index into ``biases``"),
    prompt_b=("int64", "likewise, above ``prompt_a``"),
    layer=("int64", "from 0"),
    head=("int64", "query head"),
    b_kv_cosine=("float64", "<b_KV, b_KV'> / (||b_KV|| ||b_KV'||), Frobenius; NaN for a zero bias"),
    b_d_cosine=("float64", 'likewise of b_D; NaN under normaliser "none"'),
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
    crosstalk=("float64", "||u_r^T N (1 - w_r w_r^T)|| / strength: what a query along u_r now reads beside the old value"),
)
ADDITION_COLUMNS = Columns(
    condition=("str", "``whole``, ``plain``, ``aligned``, ``first`` or ``second``"),
    logit_error=("float64", "||logits - whole|| / ||whole|| over the text's places"),
    kl=("float64", "mean KL(whole || condition) over the text's places, nats"),
    loss=("float64", "mean loss of the text's next tokens, nats; NaN for one token"),
)
CIRCUIT_COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", "query head"),
    b_kv_cosine=("float64", "between the two prompts, each converted alone; NaN for a zero bias"),
    b_d_cosine=("float64", 'likewise; NaN under normaliser "none"'),
    survival=(
        "float64",
        "<C, b_12> / (||C|| ||b_1||): the mean of :func:`bias_overwriting`'s, each weighted by its share of strength times "
        "carried",
    ),
    normalizer_kept=(
        "float64",
        "sum of b_D over its features, first prompt over both: what is left of the first prompt's output for a query that "
        'reads all features alike; NaN under "none"',
    ),
    plain_error=("float64", "||b_1 + b_2 - b_12|| / ||b_12|| of b_KV"),
    plain_b_d_error=("float64", 'of b_D; NaN under "none"'),
    aligned_error=("float64", "the same of ``aligned``"),
    aligned_b_d_error=("float64", "of b_D, likewise"),
)


@SIMILARITY_COLUMNS.document
@checked
@torch.no_grad()
def bias_similarity(biases: KVBias | Sequence[KVBias]) -> pd.DataFrame:
    """Cosine between the biases of different prompts, head by head.

    Where RoPE follows the feature map every bias is seen from the end of its prompt, so prompts of different lengths
    compare; elsewhere absolute positions are part of what is compared.

    Args:
        biases: a batch of biases, or single ones of one model.

    Returns:
        One row per pair of prompts (``prompt_a < prompt_b``), layer and head, in this order:

        {columns}

    Raises:
        KVLensError: fewer than two biases, a batch among single ones, biases of different models.
    """
    b_kv, b_d = _stack(biases)
    n_prompts, n_layers, n_heads = b_d.shape[:3]
    a, b = torch.triu_indices(n_prompts, n_prompts, offset=1)
    places = torch.cartesian_prod(torch.arange(len(a)), torch.arange(n_layers), torch.arange(n_heads))
    return SIMILARITY_COLUMNS.frame(
        {
            "prompt_a": a[places[:, 0]],
            "prompt_b": b[places[:, 0]],
            "layer": places[:, 1],
            "head": places[:, 2],
            "b_kv_cosine": _cosines(b_kv.flatten(-2))[a, b],
            "b_d_cosine": _cosines(b_d)[a, b],
        }
    )


@OVERWRITING_COLUMNS.document
@checked
@torch.no_grad()
def bias_overwriting(
    model: HookedKVTransformer,
    first_tokens: FirstTokens,
    second_tokens: SecondTokens,
    *,
    n_directions: int | None = None,
) -> pd.DataFrame:
    """Follow each singular direction of the first prompt's b_KV through the conversion of the second prompt.

    Args:
        model: with linear attention.
        first_tokens: a string, or tokens [pos] with BOS where the model wants one.
        second_tokens: a string, or tokens [pos] without BOS: the continuation.
        n_directions: at most so many directions per head, the strongest; None takes all above rounding.

    Returns:
        One row per layer, head and direction r, in this order. u_r (features) and w_r (values) are the singular vectors of
        the carried bias C; those of b_1 are the same up to the rotation that takes all of its keys along.

        {columns}

        Under normaliser "kernel" every read is divided by phi(q).b_D as well, which grows with the second prompt; see
        ``normalizer_kept`` of :func:`circuits`.

    Raises:
        KVLensError: softmax attention, tokens that are empty, misshapen or outside the vocabulary.
    """
    if n_directions is not None and n_directions < 1:
        raise KVLensError(f"bias_overwriting: n_directions must be at least 1, got {n_directions}")
    _needs_one_space("bias_overwriting")(model)
    pair = _convert_pair(model, first_tokens, second_tokens)
    carried, new = pair.carried.b_KV.double(), pair.new
    strength = torch.linalg.svdvals(pair.first.b_KV.double())
    u, s, wh = torch.linalg.svd(carried, full_matrices=False)
    read = torch.einsum("lhfr,lhfd->lhrd", u, new)  # what a query along u_r reads of the new term
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
@checked
@torch.no_grad()
def bias_addition(
    model: HookedKVTransformer, first_tokens: FirstTokens, second_tokens: SecondTokens, text_tokens: TextTokens
) -> pd.DataFrame:
    """What the text's predictions lose when two prompts are converted apart and their biases added.

    Args:
        model: linear or softmax, nothing attached.
        first_tokens, second_tokens: as in :func:`bias_overwriting`.
        text_tokens: a string, or tokens [pos] without BOS.

    Returns:
        One row per condition, in this order: ``whole`` (the concatenation, converted), ``plain``, ``aligned`` (see the
        module), ``first`` and ``second`` (one prompt alone, carried and aligned, to judge the errors by):

        {columns}

        All conditions put the text at the same position. The errors of the biases themselves, head by head, are in
        :func:`circuits`.

    Raises:
        KVLensError: an attached bias, which both sums would hold twice; tokens that are empty, misshapen or outside the
            vocabulary.
    """
    pair, text = _convert_pair(model, first_tokens, second_tokens), one_sequence(model, "text_tokens", text_tokens)
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
@checked
@torch.no_grad()
def circuits(model: HookedKVTransformer, first_tokens: FirstTokens, second_tokens: SecondTokens) -> pd.DataFrame:
    """One line per head about two prompts: how alike their biases are, what survives of the first, what adding would cost.

    Args:
        model: with linear attention, nothing attached.
        first_tokens, second_tokens: as in :func:`bias_overwriting`.

    Returns:
        One row per head, by layer, then head:

        {columns}

    Raises:
        KVLensError: as :func:`bias_addition`.
    """
    _needs_one_space("circuits")(model)
    pair = _convert_pair(model, first_tokens, second_tokens)
    first, carried, whole = (b.b_KV.double().flatten(2) for b in (pair.first, pair.carried, pair.whole))
    alike = bias_similarity([pair.first, pair.second])
    columns = {
        "survival": (carried * whole).sum(dim=-1) / (carried.norm(dim=-1) * first.norm(dim=-1)),
        "normalizer_kept": pair.first.b_D.double().sum(dim=-1) / pair.whole.b_D.double().sum(dim=-1),
    }
    for name, added in pair.sums.items():
        columns[f"{name}_error"] = _relative(added.b_KV.double().flatten(2), whole)
        columns[f"{name}_b_d_error"] = _relative(added.b_D.double(), pair.whole.b_D.double())
    shared = ("layer", "head", "b_kv_cosine", "b_d_cosine")
    return CIRCUIT_COLUMNS.frame({**{name: alike[name] for name in shared}, **columns})


def _needs_one_space(analysis: str) -> Callable[[HookedKVTransformer], None]:
    """For ``Analysis.check_model``: refuse softmax models, whose prompts bring features of their own."""

    def check(model: HookedKVTransformer) -> None:
        if model.cfg.attention != "linear":
            raise KVLensError(
                f"{analysis}: it compares the biases of two prompts number by number, which needs attention='linear': in "
                "softmax attention each prompt's keys are features of its own, side by side, and none is written over; "
                "bias_addition compares what the model says"
            )

    return check


class _Pair(NamedTuple):
    """Two prompts, converted in every way that is compared."""

    first: KVBias
    second: KVBias
    whole: KVBias
    carried: KVBias
    aligned_second: KVBias
    sums: dict[str, KVBias]

    @property
    def new(self) -> Float[Tensor, "layer head d_phi d_head"]:
        """N, what the second prompt wrote with the first in view."""
        return self.whole.b_KV.double() - self.carried.b_KV.double()


def _convert_pair(model: HookedKVTransformer, first_tokens: FirstTokens, second_tokens: SecondTokens) -> _Pair:
    """Four passes: each prompt alone, the second on top of the first and aligned; the carried bias needs none."""
    if model.attached_kv_bias is not None:
        raise KVLensError("circuits: a bias is attached, and every prompt would be converted on top of it; detach it first")
    one, two = prompt_sequence(model, "first_tokens", first_tokens), one_sequence(model, "second_tokens", second_tokens)
    first, second = convert_prompt(model, one), convert_prompt(model, two)
    whole = convert_prompt(model, two, initial=first)
    aligned = convert_prompt(model, two, initial=0.0 * first)  # keeps the boundary and the offset
    carried = carry_bias(model, first, len(two))
    sums = {
        name: _as_if_after_both(combine(a, b, boundary="last"), whole)
        for name, a, b in zip(SUMS, (first, carried), (second, aligned), strict=True)
    }
    alone = replace(carried, last_k=whole.last_k, last_v=whole.last_v, last_q=whole.last_q)
    return _Pair(first, second, whole, _as_if_after_both(alone, whole), aligned, sums)


def _as_if_after_both(bias: KVBias, whole: KVBias) -> KVBias:
    """The text stands behind both prompts, whatever was added to what."""
    return replace(bias, position_offset=whole.position_offset, n_prompt_tokens=whole.n_prompt_tokens)


def _stack(biases: KVBias | Sequence[KVBias]) -> tuple[Tensor, Tensor]:
    """b_KV [prompt, layer, head, d_phi, d_head] and b_D, in float64 on the CPU."""
    if isinstance(biases, KVBias):
        biases = [biases] if biases.batch_size is None else [biases.select_prompt(i) for i in range(biases.batch_size)]
    if len(biases) < 2:
        raise KVLensError(f"bias_similarity: expected at least two biases, got {len(biases)}")
    for i, bias in enumerate(biases):
        if not isinstance(bias, KVBias) or bias.batch_size is not None:
            came = f"a batch of {bias.batch_size}" if isinstance(bias, KVBias) else type(bias).__name__
            raise KVLensError(f"bias_similarity: bias {i}: expected the bias of one prompt, got {came}")
        bias.fingerprint.check(biases[0].fingerprint, f"bias_similarity: bias {i}", whose="the first bias")
    b_kv, b_d = (torch.stack([getattr(b, name).double().cpu() for b in biases]) for name in ("b_KV", "b_D"))
    return b_kv, b_d


def _cosines(x: Float[Tensor, "prompt layer head d"]) -> Float[Tensor, "prompt prompt layer head"]:
    unit = x / x.norm(dim=-1, keepdim=True)  # 0 / 0 is NaN: a zero bias has no direction
    return torch.einsum("plhd,qlhd->pqlh", unit, unit)


def _relative(x: Float[Tensor, "layer head d"], reference: Float[Tensor, "layer head d"]) -> Float[Tensor, "layer head"]:
    return (x - reference).norm(dim=-1) / reference.norm(dim=-1)


CIRCUITS = Analysis(
    name="circuits",
    summary="how the biases of two prompts meet in each head: alike, overwritten, added",
    function=circuits,
    columns=CIRCUIT_COLUMNS,
    inputs={"first_tokens": PROMPT, "second_tokens": tokens_field("second_prompt", prepend_bos=False)},
    check_model=_needs_one_space("circuits"),
)

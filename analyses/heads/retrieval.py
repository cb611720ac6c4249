"""Retrieval heads: at a token that is copied from a document, which heads attend most to that very token there.

Of a case (a document, a question, the answer) the *needle* is what the answer is copied from. A head's score is the share of
the copied tokens, those of the answer that stand in the needle, at which its strongest attention, from where the token is said,
is on the same token in the needle. The answer is read as it is given, one token behind the other.

Attention is to positions. With a KV shift the value at a position mixes those of several tokens, and a head that reads the
answer's token from a position behind it scores 0 here; :func:`kvlens.analyses.reading_heads` finds it (head 2 of layer 0 in
facts-gpt2).

A list of heads from some cases is a sample, which need not come out again on others. So each table of heads over cases has,
beside the score, an interval (bootstrap over cases), the score under a null, and the *stability* of the whole list: the rank
correlation of the scores from one half of the cases with those from the other (:func:`of_cases`), to which the many heads with
a score near 0 contribute as much as the few with a name. Measured on real models: ``tests/benchmarks/results/heads.md``.

Which heads the model needs is another question: :func:`kvlens.analyses.reading_heads` exchanges what they read.

Source: Wu et al. 2024, Retrieval Head Mechanistically Explains Long-Context Factuality (arXiv 2404.15574), sec. 2.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.chat import prompt_layout
from kvlens.checks import Seed, checked
from kvlens.errors import brief
from kvlens.texts import joined, token_texts
from kvlens.units import Layout, Unit, always_there, cut, positions_of

from ..attribution.answers import answer_tokens
from ..bias.exchange import HEAD
from ..declaration import PROMPT_OR_CHAT, Columns, Field, analysis
from ..segments import heads_of_model, progress
from ..sequences import one_sequence
from .rows import visit_rows

N_RESAMPLES, N_SPLITS = 2000, 200


def columns_of_cases(score: str, null: str) -> Columns:
    """The columns of a table of heads over cases, with the meanings of its score and of its null."""
    return Columns(
        layer=("int64", "from 0"),
        head=("int64", HEAD),
        score=("float64", f"{score}; mean over cases"),
        score_low=("float64", "its 95 % interval (bootstrap over cases); NaN for a single case"),
        score_high=("float64", ""),
        null=("float64", null),
        cases=("int64", "how many count"),
        stability=(
            "float64",
            "of the whole list: rank correlation (Spearman's) of the heads' scores from two halves of the cases, mean over "
            f"{N_SPLITS} splits; NaN for a single case, and where all heads score alike",
        ),
    )


COLUMNS = columns_of_cases(
    "share of the copied tokens at which the head's strongest attention is on the same token in the needle",
    "the same with the needle's tokens at other positions of the document: what attention to any of them scores by chance",
)
Case = Sequence[Any]
"""A document, a question, an answer, and where it is not whole sentences that hold the answer, the needle."""


OF_RECORD = {
    "prompt": PROMPT_OR_CHAT,
    "text": Field("text", lambda model, text: one_sequence(model, "text", text), required=False),
    "answer": Field("answer"),
    "without": Field("without", required=False),
}
"""The fields of a record that make a case: the document, the question, the answer and the needle."""


def case_of(prompt: object, text: object, answer: object, without: object) -> Case:
    """The case of a record."""
    return (prompt, text, answer) if without is None else (prompt, text, answer, without)


class ReadCase(NamedTuple):
    """A case as tokens; ``needle`` is what the answer is copied from, in the document."""

    document: Layout
    question: Int[Tensor, " question_pos"]
    answer: Int[Tensor, " answer_pos"]
    needle: list[Unit]


def read_cases(model: KVModel, name: str, cases: Sequence[Case]) -> list[ReadCase]:
    """The cases of an analysis called ``name``.

    Raises:
        KVLensError: no cases, something else than three or four entries, or no needle.
    """
    if not len(cases) or isinstance(cases[0], str) or not all(len(case) in (3, 4) for case in cases):
        raise KVLensError(
            f"{name}: expected cases, each (document, question, answer) or these and the needle, got {brief(cases)}"
        )
    return [_read(model, f"{name}: case {number}", case) for number, case in enumerate(cases)]


def _read(model: KVModel, what: str, case: Case) -> ReadCase:
    document, question, given, *needle = case
    layout, answer = prompt_layout(model, document), answer_tokens(model, f"{what}: answer", given)
    asked = layout.tokens[:0] if question is None else one_sequence(model, f"{what}: question", question)
    if needle:
        return ReadCase(layout, asked, answer, cut(model, layout, needle[0] if isinstance(needle[0], list) else needle))
    said = (given if isinstance(given, str) else joined(token_texts(model, answer))).strip()
    holding = [unit for unit in cut(model, layout, "sentence") if said in unit.text]
    if not holding:
        raise KVLensError(f"{what}: no sentence of the document holds the answer {said!r}; give the needle as the fourth entry")
    return ReadCase(layout, asked, answer, holding)


@COLUMNS.document
@checked
@torch.no_grad()
def retrieval_heads(model: KVModel, cases: Sequence[Case], *, seed: Seed = 0) -> pd.DataFrame:
    """Score every head by how often it attends most to the token that is copied.

    >>> from kvlens import HookedKVTransformer
    >>> from kvlens.analyses import retrieval_heads
    >>> model = HookedKVTransformer.from_zoo("facts-gpt2")
    >>> document = "Mira keeps a goat. Kaya feeds a donkey. Olga has a hen."
    >>> asked = [("Kaya", " donkey"), ("Olga", " hen")]
    >>> cases = [(document, f" Which animal does {who} keep? {who} keeps a", answer) for who, answer in asked]
    >>> heads = retrieval_heads(model, cases)
    >>> heads.nlargest(3, "score")[["layer", "head", "score", "null", "stability"]].shape
    (3, 5)

    Args:
        model: with any attention.
        cases: each (document, question, answer), and, where the needle is not the sentences that hold the answer, a string of
            the document or a list of them, or of ranges of its tokens. A document is a string, a chat, or tokens [pos]; the
            question, a string or tokens, stands between it and the answer, and is None where a chat holds it. The answer is a
            string, blanks in front included, or tokens.
        seed: of the splits and resamples.

    Returns:
        One row per head, by layer, then head. Cases of whose answer the needle has no token are left out; NaN without any:

        {columns}

    Raises:
        KVLensError: an answer that no sentence holds, a needle that is not in the document, invalid tokens.
    """
    read, found = read_cases(model, "retrieval_heads", cases), list[Tensor]()
    with progress("retrieval_heads") as tell:
        for number, case in enumerate(read):
            found += _copied(model, case)
            tell((number + 1) / len(read))
    n_heads = len(heads_of_model(model)[0])
    scores, null = (torch.stack(found) if found else torch.zeros(0, 2, n_heads)).double().numpy().swapaxes(0, 1)
    return COLUMNS.frame(of_cases(model, scores, null, seed))


def _copied(model: KVModel, case: ReadCase) -> list[Float[Tensor, "two head"]]:
    """A case's scores, and those under the null; none where no token of the answer stands in the needle."""
    n_before = len(case.document.tokens)
    tokens = torch.cat([case.document.tokens, case.question, case.answer[:-1]])
    is_same = torch.zeros(len(case.answer), len(tokens), dtype=torch.bool)
    is_same[:, :n_before] = positions_of(case.needle, n_before).any(dim=0)
    is_same &= (tokens == case.answer[:, None]).cpu()
    copied = is_same.any(dim=1)
    if not bool(copied.any()):
        return []
    in_document = torch.zeros(len(tokens), dtype=torch.bool)
    in_document[:n_before] = ~always_there(case.document)
    place = _strongest(model, tokens, torch.arange(len(tokens) - len(case.answer), len(tokens))[copied])
    hits = is_same[copied].T[place, torch.arange(place.shape[1])]
    by_chance = in_document[place] * is_same[copied].sum(dim=1).double() / in_document.sum()
    return [torch.stack([hits.double().mean(dim=1), by_chance.mean(dim=1)])]


def _strongest(model: KVModel, tokens: Int[Tensor, " pos"], queries: Int[Tensor, " query"]) -> Int[Tensor, "head query"]:
    """Where each head attends most from each query, heads by layer."""
    most: dict[int, tuple[Tensor, Tensor]] = {}

    def look(layer: int, first: int, rows: Tensor) -> None:
        attention, place = rows.max(dim=-1)
        before = most.get(layer, (torch.full_like(attention, -torch.inf), place))
        more = attention > before[0]
        most[layer] = attention.where(more, before[0]), (place + first).where(more, before[1])

    visit_rows(model, tokens, queries, look)
    return torch.cat([most[layer][1] for layer in sorted(most)])


@analysis(
    COLUMNS,
    "retrieval heads: how often each head attends most to the very token of the document that the answer copies",
    of=retrieval_heads,
    cost="one pass over each case",
    inputs=OF_RECORD,
)
def _of_record(
    model: KVModel, prompt: object, text: Tensor | None = None, *, answer: object, without: object = None
) -> pd.DataFrame:
    """:func:`retrieval_heads` on one case, without an interval."""
    return retrieval_heads(model, [case_of(prompt, text, answer, without)])


def of_cases(
    model: KVModel, scores: Float[np.ndarray, "case head"], null: Float[np.ndarray, "case head"], seed: int
) -> dict[str, Any]:
    """The columns of :func:`columns_of_cases`, from each case's scores, heads by layer."""
    (layer, head), unknown = heads_of_model(model), np.full(scores.shape[1], np.nan)
    low, high = bootstrapped(scores, seed) if len(scores) > 1 else (unknown, unknown)
    return {
        "layer": layer,
        "head": head,
        "score": scores.mean(axis=0) if len(scores) else unknown,
        "score_low": low,
        "score_high": high,
        "null": unknown if np.isnan(null).all() else np.nanmean(null, axis=0),
        "cases": len(scores),
        "stability": agreement_of_halves(scores, seed),
    }


def bootstrapped(values: Float[np.ndarray, "case part"], seed: int) -> tuple[Float[np.ndarray, " part"], ...]:
    """The 95 % interval of the mean over cases, by drawing as many cases again."""
    n = len(values)
    again = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=N_RESAMPLES) / n
    return tuple(np.quantile(again @ values, [0.025, 0.975], axis=0))


def agreement_of_halves(values: Float[np.ndarray, "case part"], seed: int) -> float:
    """Spearman's rank correlation of the means over two halves of the cases, mean over random splits; NaN for one case."""
    draw, (n, n_parts) = np.random.default_rng(seed), values.shape
    if n < 2:
        return float("nan")
    order = np.stack([draw.permutation(n) for _ in range(N_SPLITS)])
    means = np.stack([values[half].mean(axis=1) for half in np.split(order, [(n + 1) // 2], axis=1)])
    ranks = pd.DataFrame(means.reshape(-1, n_parts)).rank(axis=1).to_numpy().reshape(means.shape)
    one, other = ranks - ranks.mean(axis=-1, keepdims=True)
    size = np.sqrt((one**2).sum(axis=-1) * (other**2).sum(axis=-1))
    found = (one * other).sum(axis=-1)[size > 0] / size[size > 0]  # a half without an order agrees with nothing
    return float(found.mean()) if len(found) else float("nan")

"""Where a model reads the prompt: layers, key-value groups and heads that lose an answer when each reads another prompt.

1. The prompt is converted twice, whole and without a part of it (the fact that the answer rests on), whose gap is kept.
2. The text that reads it is the prompt's last token and the response. Its pass under both biases gives what every head would
   write if it asked what it asks and read the other prompt: before each layer the residual stream of the whole prompt's pass
   is handed to both.
3. One layer, group or head at a time is exchanged: it writes that, and all later layers go on from there. This is the pass
   under the whole prompt's bias with that part of the other one, by another way, and takes the response's tokens alone.
4. An answer is *lost* where one of its tokens is: the model would say another one in its place, and its log-odds against that
   one moved by ln 4 or more. The answer's tokens are read one behind the other, as the model has said them.

Shares and means over many cases are :func:`reading_shares`; how well two halves of the cases agree :func:`reading_stability`.
A part "reads the fact" only beside two controls: as many random parts, and the same with another sentence taken away.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import KVBias, KVLensError, KVModel, convert_prompt, counterfactuals
from kvlens.analyses.attribution.answers import answer_tokens
from kvlens.analyses.bias.exchange import HEAD, LayerExchange
from kvlens.analyses.declaration import Columns, Field, Option, analysis
from kvlens.analyses.heads.ablation import cached
from kvlens.analyses.heads.retrieval import (
    OF_RECORD,
    Case,
    ReadCase,
    agreement_of_halves,
    bootstrapped,
    case_of,
    columns_of_cases,
    of_cases,
    read_cases,
)
from kvlens.analyses.segments import OnProgress, progress
from kvlens.analyses.sequences import PromptTokens, TextTokens, one_sequence
from kvlens.arguments import Span
from kvlens.chat import prompt_layout
from kvlens.checks import Seed, checked
from kvlens.explanation.claims import walk
from kvlens.model import head_hooks, heads_per_layer
from kvlens.units import Layout, Unit, cut, positions_of

COLUMNS = Columns(
    part=("str", "``all`` layers together, one ``layer``, a ``group`` of query heads that share keys, or one ``head``"),
    layer=("int64", "from 0; -1 of ``all``"),
    head=("int64", f"{HEAD}; of a group its key-value head; -1 of layers"),
    fall=("float64", "of the answer's log-probability, nats, when this part reads the prompt without"),
    lost=("bool", "whether the answer is lost then"),
)
SHARES = Columns(
    part=("str", "as in :func:`reading_layers`"),
    layer=("int64", "from 0; -1 of ``all``"),
    head=("int64", "likewise; -1 of layers"),
    cases=("int64", "in which the whole prompt's exchange loses the answer; others say nothing about where it is read"),
    lost=("float64", "the share of these in which this part loses it"),
    lost_low=("float64", "its 95 % interval (Wilson's)"),
    lost_high=("float64", ""),
    fall=("float64", "mean over cases, nats"),
    fall_low=("float64", "its 95 % interval (bootstrap over cases)"),
    fall_high=("float64", ""),
)
PART = ["part", "layer", "head"]
OF_HEADS = columns_of_cases(
    "fall of the answer's log-probability, nats, when this head alone reads the document without the needle",
    "the same without another sentence, which does not hold the answer; NaN where there is none, or no tokenizer",
)


@analysis(
    COLUMNS,
    "in which layers, key-value groups and heads the model reads a fact of the prompt: each exchanged, and the answer's fall",
    cost="both prompts once; the text and the answer once for each layer, group and head, those of a layer from there on",
    inputs=OF_RECORD | {"without": Field("without")},
    options={"heads": Option("also groups and heads, not layers alone")},
)
@checked
@torch.no_grad()
def reading_layers(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens | None = None,
    *,
    answer: str | int | Int[Tensor, " answer_pos"],
    without: str | Sequence[str] | Sequence[Span],
    heads: bool = True,
) -> pd.DataFrame:
    """How far an answer falls when one layer, group or head reads the prompt without some units of it.

    >>> from kvlens import HookedKVTransformer
    >>> from kvlens.analyses import reading_layers
    >>> model = HookedKVTransformer.from_zoo("facts-gpt2")
    >>> prompt = "Mira keeps a goat. Kaya feeds a donkey. Olga has a hen."
    >>> question = " Which animal does Kaya keep? Kaya keeps a"
    >>> found = reading_layers(model, prompt, question, answer=" donkey", without="Kaya feeds a donkey.")
    >>> found.query("lost and part == 'layer'")["layer"].tolist()
    [0]

    Args:
        model: that is asked.
        prompt: a string, a chat, or tokens [pos]. Its last token is read with the text.
        text: what stands between the prompt and the answer; None for nothing, as where an answer begins a chat's response.
        answer: its tokens, one token, or text, blanks in front included.
        without: what the other prompt lacks: a string that occurs in the prompt once, several of them, or ranges of tokens.
        heads: also groups and heads, which take most of the time: a row of the response's tokens each.

    Returns:
        All layers together first, then by part, layer and head:

        {columns}

    Raises:
        KVLensError: units that are not in the prompt, the prompt's last token among them, an empty answer.

    Source: exchange of activations between two prompts, Vig et al. 2020 (arXiv 2004.12265), here of what the prompt alone left.
    """
    layout = prompt_layout(model, prompt)
    parts = _taken_away(model, layout, without)
    gone = positions_of(parts, len(layout.tokens)).any(dim=0).to(layout.tokens.device)
    if bool(gone[-1]) or len(gone) < 2:
        raise KVLensError("without: the prompt's last token is read with the text; take away what stands before it")
    between = layout.tokens[:0] if text is None else one_sequence(model, "text", text)
    said = answer_tokens(model, "answer", answer)
    text = torch.cat([layout.tokens[-1:], between, said[:-1]])
    (reading,) = _Reading.without(model, layout.tokens[:-1], gone[None, :-1], text, said)
    with progress("reading_layers") as tell:
        found = [*reading.layers(), *(reading.heads(tell) if heads else ())]
    return COLUMNS.frame(
        {
            "part": [each.part for each in found],
            "layer": [each.layer for each in found],
            "head": [each.head for each in found],
            "fall": torch.tensor([each.fall for each in found], dtype=torch.float64),
            "lost": [each.lost for each in found],
        }
    )


def _taken_away(model: KVModel, layout: Layout, without: str | Sequence[str] | Sequence[Span]) -> list[Unit]:
    try:
        return cut(model, layout, [without] if isinstance(without, str) else without)
    except KVLensError as error:  # which names the argument of `cut`
        raise KVLensError(f"without:{str(error).removeprefix('by:')}") from error


class _Found(NamedTuple):
    part: str
    layer: int
    head: int
    fall: float
    lost: bool


class _Reading:
    """A text that reads one prompt, and parts of which read another."""

    def __init__(self, model: KVModel, whole: KVBias, other: KVBias, text: Tensor, answer: Tensor) -> None:
        self.model, self.whole, self.other, self.text, self.answer = model, whole, other, text, answer
        self.log_p = self._read(whole.repeat(1))[0]

    @classmethod
    def without(
        cls, model: KVModel, prompt: Tensor, gone: Bool[Tensor, "row pos"], text: Tensor, answer: Tensor
    ) -> "list[_Reading]":
        """Of a prompt, and of the same without the tokens of each row."""
        whole, others = convert_prompt(model, prompt), convert_prompt(model, counterfactuals(model, prompt, gone))
        return [cls(model, whole, others.select_prompt(row), text, answer) for row in range(len(gone))]

    def _read(self, biases: KVBias) -> Float[Tensor, "row answer_pos d_vocab"]:
        n_rows = biases.batch_size or 1
        with self.model.kv_bias(biases):
            logits = self.model.logits_on(self.text.expand(n_rows, -1), len(self.answer))
        return logits.double().log_softmax(dim=-1).cpu()

    def layers(self) -> list[_Found]:
        """Exchange all layers together, and each."""
        exchange = LayerExchange(self.whole, self.other)
        rows = exchange.rows([exchange.parts, *([layer] for layer in exchange.parts)])
        log_p = torch.cat([self._read(biases) for biases in exchange.batches(rows)])
        return self._found([("all", -1, -1), *(("layer", layer, -1) for layer in exchange.parts)], log_p)

    def heads(self, tell: OnProgress, with_groups: bool = True) -> list[_Found]:
        """Exchange each group, then each head; or heads alone."""
        starts, writes = self._both()
        of_groups, of_heads = list[_Found](), list[_Found]()
        for layer, n_heads in enumerate(heads_per_layer(self.model)):
            groups = self._groups(layer) if with_groups else []
            sets = [*groups, *([head] for head in range(n_heads))]
            names = [("group", layer, i) for i in range(len(groups))] + [("head", layer, head) for head in range(n_heads)]
            found = self._found(names, self._exchanged(layer, sets, starts[layer], writes[layer])) if sets else []
            of_groups += found[: len(groups)]
            of_heads += found[len(groups) :]
            tell((layer + 1) / self.whole.n_layers)
        return of_groups + of_heads

    def _groups(self, layer: int) -> list[list[int]]:
        """The query heads that share a key-value head, where several do."""
        if layer not in self.whole.attention_layers:
            return []
        n_heads, n_groups = self.whole.first_state_head(layer), self.whole.n_kv_heads_of(layer)
        size = n_heads // n_groups
        return [list(range(i * size, (i + 1) * size)) for i in range(n_groups)] if size > 1 else []

    def _both(self) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Before each layer the residual stream, [1, pos, d_model]; and what its heads write there if they read the other
        prompt, by hook point."""
        n_layers = self.whole.n_layers
        starts = [f"blocks.{layer}.hook_resid_pre" for layer in range(n_layers)]
        points = [list(head_hooks(self.model, layer, "hook_z")) for layer in range(n_layers)]
        shares_first = [(name, lambda x, hook: x[:1].expand_as(x).clone()) for name in starts]
        both = self.whole.exchange_layers(self.other, torch.tensor([[False], [True]]).expand(2, n_layers))
        with self.model.kv_bias(both), self.model.hooks(fwd_hooks=shares_first):
            seen = cached(self.model, self.text.expand(2, -1), [*starts, *(name for of_layer in points for name in of_layer)])
        return [seen[name][:1] for name in starts], [{name: seen[name][1:] for name in of_layer} for of_layer in points]

    def _exchanged(
        self, layer: int, sets: list[list[int]], start: Tensor, writes: dict[str, Tensor]
    ) -> Float[Tensor, "row answer_pos d_vocab"]:
        """Log-probabilities when these sets of a layer's heads read the other prompt, a row each."""
        hooks, first = [], 0
        for name, n_heads in head_hooks(self.model, layer, "hook_z").items():
            chosen = torch.tensor([[first + i in each for i in range(n_heads)] for each in sets])
            first += n_heads

            def put(z: Tensor, hook: object, chosen: Tensor = chosen, other: Tensor = writes[name]) -> Tensor:
                of_heads, others = (x.reshape(*x.shape[:2], chosen.shape[1], -1) for x in (z, other))  # some join heads
                return torch.where(chosen[:, None, :, None].to(z.device), others, of_heads).reshape(z.shape)

            hooks.append((name, put))
        with self.model.kv_bias(self.whole.repeat(len(sets))), self.model.hooks(fwd_hooks=hooks):
            logits = self.model.logits_of(start.expand(len(sets), -1, -1), layer, len(self.answer))
        return logits.double().log_softmax(dim=-1).cpu()

    def _found(self, names: list[tuple[str, int, int]], log_p: Float[Tensor, "row answer_pos d_vocab"]) -> list[_Found]:
        walked = walk(self.log_p, log_p, self.answer.cpu())
        n = len(self.answer)
        rows = zip(names, walked.falls.sum(dim=-1).tolist(), walked.firm.tolist(), strict=True)
        return [_Found(*name, fall, firm < n) for name, fall, firm in rows]


@OF_HEADS.document
@checked
@torch.no_grad()
def reading_heads(model: KVModel, cases: Sequence[Case], *, seed: Seed = 0) -> pd.DataFrame:
    """Score every head by how far the answer falls when this head alone reads the document without the needle.

    What :func:`reading_layers` measures of single heads, over many cases, beside a null, with the stability of the list. Heads
    that stand in for one another show little each alone, and :func:`kvlens.analyses.retrieval_heads` may name them: on
    Qwen2.5-Coder-0.5B ten of its heads carry 14 of 14 copies, ten of these 3 (``tests/benchmarks/results/heads.md``).

    >>> from kvlens import HookedKVTransformer
    >>> from kvlens.analyses import reading_heads
    >>> model = HookedKVTransformer.from_zoo("facts-gpt2")
    >>> document = "Mira keeps a goat. Kaya feeds a donkey. Olga has a hen."
    >>> asked = [("Kaya", " donkey"), ("Olga", " hen")]
    >>> cases = [(document, f" Which animal does {who} keep? {who} keeps a", answer) for who, answer in asked]
    >>> heads = reading_heads(model, cases)
    >>> len(heads), bool(heads["score"].max() > 1 > heads["null"].max())
    (8, True)

    Args:
        model: that is asked.
        cases: as of :func:`kvlens.analyses.retrieval_heads`. Without a question the document's last token is read with the
            answer.
        seed: of the null's sentences, the splits and the resamples.

    Returns:
        One row per head, by layer, then head:

        {columns}

    Raises:
        KVLensError: as :func:`kvlens.analyses.retrieval_heads`; a needle that has the last token of a document without a
            question.
    """
    read, draw = read_cases(model, "reading_heads", cases), random.Random(seed)
    found = list[tuple[list[float], list[float]]]()
    with progress("reading_heads") as tell:
        for number, case in enumerate(read):
            needle = positions_of(case.needle, len(case.document.tokens)).any(dim=0)
            others = [] if model.tokenizer is None else cut(model, case.document, "sentence")
            end = len(needle) - (not len(case.question))
            others = [unit for unit in others if not needle[unit.start : unit.stop].any() and unit.stop <= end]
            without = [needle, *(positions_of([draw.choice(others)], len(needle)) if others else ())]
            falls = _falls_of_heads(model, case, torch.stack(without), lambda done, at=number: tell((at + done) / len(read)))  # type: ignore[misc]
            found.append((falls[0], falls[1] if others else [float("nan")] * len(falls[0])))
    scores, null = np.array(found).swapaxes(0, 1)
    return OF_HEADS.frame(of_cases(model, scores, null, seed))


def _falls_of_heads(model: KVModel, case: ReadCase, gone: Bool[Tensor, "row pos"], tell: OnProgress) -> list[list[float]]:
    """The answer's fall with each head reading the document without some tokens, a row of heads for each row of these."""
    document, text = case.document.tokens, case.question
    if not len(text):
        document, text = document[:-1], document[-1:]
    if bool(gone[:, len(document) :].any()):
        raise KVLensError("reading_heads: without a question the document's last token is read with the answer; leave it")
    text = torch.cat([text, case.answer[:-1]])
    readings = _Reading.without(model, document, gone[:, : len(document)].to(document.device), text, case.answer)
    found = []
    for at, reading in enumerate(readings):
        falls = reading.heads(lambda done, at=at: tell((at + done) / len(readings)), with_groups=False)  # type: ignore[misc]
        found.append([each.fall for each in falls])
    return found


@analysis(
    OF_HEADS,
    "reading heads: how far the answer falls when one head alone reads the document without what the answer rests on",
    of=reading_heads,
    cost="the document three times; the question and the answer six times, and twice for each head, from its layer on",
    inputs=OF_RECORD,
)
def _of_record(model: KVModel, prompt: Any, text: Tensor | None = None, *, answer: Any, without: Any = None) -> pd.DataFrame:
    """:func:`reading_heads` on one case, without an interval."""
    return reading_heads(model, [case_of(prompt, text, answer, without)])


@SHARES.document
def reading_shares(tables: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Over many cases, how often each part loses the answer, and by how much it falls, with intervals.

    Cases whose answer is not lost with all layers exchanged are left out.

    Args:
        tables: of :func:`reading_layers`, below each other, with a case's ``prompt_id`` in each row, as a batch writes.
        seed: of the resamples.

    Returns:
        One row per part, in the tables' order:

        {columns}

    Raises:
        KVLensError: tables without these columns, or without a case whose answer is lost.
    """
    lost, falls = _by_case(tables)
    n = len(lost)
    low, high = bootstrapped(falls.to_numpy(), seed)
    share = lost.to_numpy().mean(axis=0)
    share_low, share_high = wilson(share, n)
    return SHARES.frame(
        {
            **{name: list(falls.columns.get_level_values(name)) for name in PART},
            "cases": [n] * falls.shape[1],
            "lost": list(share),
            "lost_low": list(share_low),
            "lost_high": list(share_high),
            "fall": list(falls.to_numpy().mean(axis=0)),
            "fall_low": list(low),
            "fall_high": list(high),
        }
    )


def wilson(share: Float[np.ndarray, " _"], n: int) -> tuple[Float[np.ndarray, " _"], Float[np.ndarray, " _"]]:
    """The 95 % interval of shares of n (Wilson 1927)."""
    z = 1.96
    middle, half = share + z * z / (2 * n), z * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return np.maximum(0.0, middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def reading_stability(tables: pd.DataFrame, part: str, seed: int = 0) -> float:
    """How far two halves of the cases agree on which layers, groups or heads matter: rank correlation of their mean falls.

    Args:
        tables: as :func:`reading_shares`.
        part: ``layer``, ``group`` or ``head``.
        seed: of the random splits, whose mean is returned.

    Raises:
        KVLensError: as :func:`reading_shares`; fewer than two cases, or no such part.
    """
    falls = _by_case(tables)[1]
    if part not in falls.columns.get_level_values("part") or len(falls) < 2:
        raise KVLensError(f"reading_stability: expected at least two cases with rows of part {part!r}, got {len(falls)} cases")
    return agreement_of_halves(falls.xs(part, axis=1, level="part").to_numpy(), seed)


def _by_case(tables: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(lost, fall): a row per case whose answer all layers together lose, a column per part."""
    missing = [name for name in ("prompt_id", *COLUMNS) if name not in tables]
    if missing:
        raise KVLensError(
            f"reading_shares: the tables lack the columns {', '.join(missing)}; a batch of reading_layers has them"
        )
    together = tables[tables["part"] == "all"]
    chosen = tables[tables["prompt_id"].isin(together.loc[together["lost"], "prompt_id"])]
    if chosen.empty:
        raise KVLensError("reading_shares: no case loses its answer with all layers exchanged, so that nothing is read there")
    order = pd.MultiIndex.from_frame(chosen[PART].drop_duplicates())
    lost, falls = (chosen.pivot_table(index="prompt_id", columns=PART, values=name)[order] for name in ("lost", "fall"))
    return lost.astype(float), falls

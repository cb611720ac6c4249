"""A second program for the statements of an explanation: plain Transformers, with an attention that is written out here.

It knows tokens, units and responses, and nothing of kvlens' biases: what a layer reads is Transformers' own cache, in which
each layer has its own set of keys that are not there. Verdicts on what it says then are those of kvlens.explanation.claims.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from kvlens.explanation.claims import GONE, NOT_REACHED, SAID, claim_of, is_content, normal, verdict, words_in
from kvlens.texts import Response

FIRM, MOST_TOKENS = math.log(4), 32
_GONE: dict[int, Tensor] = {}
"""By layer: True at the keys that are not there, [key]."""


def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> tuple[Tensor, None]:
    """softmax(q k^T scaling) v over the keys up to the query's own that are there; a query always reads itself."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scaling
    n_q, n_k = scores.shape[-2:]
    own = torch.arange(n_k - n_q, n_k, device=q.device)[:, None]
    keys = torch.arange(n_k, device=q.device)
    hidden = keys > own
    gone = _GONE[module.layer_idx]
    hidden = hidden | ((keys != own) & torch.nn.functional.pad(gone, (0, n_k - len(gone)))[:n_k])
    return (scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v).transpose(1, 2).contiguous(), None


AttentionInterface.register("written_out", attention)


class Plain(NamedTuple):
    """A Transformers model that reads prompts of which parts are gone.

    Attributes:
        hf: the model, loaded with ``attn_implementation="written_out"``.
    """

    hf: Any

    @property
    def n_layers(self) -> int:
        return int(self.hf.config.num_hidden_layers)

    @torch.no_grad()
    def read(self, tokens: Tensor, gone: Tensor) -> DynamicCache:
        """The cache of a prompt without the tokens at ``gone``, which keep their positions."""
        _GONE.update(dict.fromkeys(range(self.n_layers), gone))
        cache = DynamicCache()
        self.hf(
            tokens[None],
            past_key_values=cache,
            use_cache=True,
            position_ids=torch.arange(len(tokens), device=tokens.device)[None],
        )
        return cache

    @torch.no_grad()
    def continued(self, cache: DynamicCache, gone: dict[int, Tensor], text: Tensor, start: int) -> tuple[Tensor, DynamicCache]:
        """Logits on a text behind a cache; ``gone`` by layer. The cache is copied."""
        _GONE.update(gone)
        copy = DynamicCache()
        for layer in range(self.n_layers):
            keys, values = layer_of(cache, layer)
            copy.update(keys.clone(), values.clone(), layer)
        places = torch.arange(start, start + len(text), device=text.device)[None]
        out = self.hf(text[None], past_key_values=copy, use_cache=True, position_ids=places)
        return out.logits[0], copy

    @torch.no_grad()
    def says(
        self, cache: DynamicCache, gone: dict[int, Tensor], last: Tensor, forced: list[int], start: int, n_most: int, ends: Any
    ) -> list[int]:
        """The greedy text behind a cache and the prompt's last token, its first tokens given."""
        text = list(forced)
        logits, cache = self.continued(cache, gone, torch.cat([last, last.new_tensor(text)]), start)
        at = start + 1 + len(text)
        while True:
            text.append(int(logits[-1].argmax()))
            if len(text) >= n_most or ends(text):
                return text
            _GONE.update(gone)
            out = self.hf(
                last.new_tensor([text[-1:]]), past_key_values=cache, use_cache=True, position_ids=last.new_tensor([[at]])
            )
            logits, at = out.logits[0], at + 1


def layer_of(cache: DynamicCache, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer."""
    return cache.layers[layer].keys, cache.layers[layer].values


class Run(NamedTuple):
    """What a statement says, found again.

    Attributes:
        fall: of the claim's tokens, nats.
        falls: of the response's tokens.
        differs: how many of these it would say another for.
        firm: the firm difference, None without one.
        text: the tokens that are said instead, from the response's beginning; None without a firm difference.
    """

    fall: float
    falls: Tensor
    differs: int
    firm: int | None
    text: list[int] | None


@functools.lru_cache(maxsize=1)  # for all statements about a response
def with_everything(plain: Plain, prompt: tuple[int, ...], response: tuple[int, ...]) -> tuple[DynamicCache, Tensor]:
    """The cache of a whole prompt but for its last token, and the log-probabilities at the response's tokens."""
    tokens, text = (torch.tensor(each, device=plain.hf.device) for each in (prompt, response))
    nothing = torch.zeros(len(tokens) - 1, dtype=torch.bool, device=tokens.device)
    cache, everywhere = plain.read(tokens[:-1], nothing), dict.fromkeys(range(plain.n_layers), nothing)
    logits, _ = plain.continued(cache, everywhere, torch.cat([tokens[-1:], text[:-1]]), len(tokens) - 1)
    return cache, logits.double().log_softmax(dim=-1)


def exchanged(row: Any, layer: int, groups: dict[str, list[int]], nothing: Tensor) -> Tensor:
    """True at the positions of a layer that come from the other prompt."""
    if row.about == "layers":
        return torch.full_like(nothing, (str(layer) in row.parts.split("+")) != row.others)
    named = set(row.parts.split("+"))
    chosen = nothing.clone()
    chosen[[i for name, positions in groups.items() if (name in named) != row.others for i in positions]] = True
    return chosen


def again(
    plain: Plain,
    prompt: Tensor,
    units: list[tuple[int, int]],
    response: Tensor,
    row: Any,
    claim: tuple[int, int],
    ends: Any,
    groups: dict[str, list[int]] | None = None,
) -> Run:
    """Run one statement again.

    Args:
        prompt: [pos], with its last token.
        units: token ranges.
        row: of ``Explained.statements``, about units, layers or positions.
        claim: the claim's token range in the response.
        ends: whether a text ends.
        groups: the positions of each group, of ``Explained.positions``.
    """
    before, last, n = prompt[:-1], prompt[-1:], len(prompt) - 1
    nothing = torch.zeros(n, dtype=torch.bool, device=prompt.device)
    whole, old = with_everything(plain, tuple(prompt.tolist()), tuple(response.tolist()))

    def without(numbers: set[int]) -> Tensor:
        gone = nothing.clone()
        for unit in numbers:
            gone[slice(*units[unit])] = True
        return gone

    start = n
    if row.about == "units":
        parts = {int(part) for part in row.parts.split("+")}
        gone = without(set(range(len(units))) - parts if row.others else parts)
        if row.gap == "closed":
            before, start = before[~gone], n - int(gone.sum())
            gone = gone[~gone]
        cache, masks = plain.read(before, gone), dict.fromkeys(range(plain.n_layers), gone)
    else:
        missing = without({int(unit) for unit in row.removed.split("+")})
        donor = plain.read(before, missing)
        cache, masks = DynamicCache(), {}
        for layer in range(plain.n_layers):
            theirs = exchanged(row, layer, groups or {}, nothing)
            pairs = zip(layer_of(donor, layer), layer_of(whole, layer), strict=True)
            cache.update(*(torch.where(theirs[:, None], other, own) for other, own in pairs), layer)
            masks[layer] = missing & theirs
    text = torch.cat([last, response[:-1]])
    new = plain.continued(cache, masks, text, start)[0].double().log_softmax(dim=-1)
    at = torch.arange(len(response), device=response.device)
    said = new.argmax(dim=-1)
    moved = (old[at, response] - old[at, said]) - (new[at, response] - new[at, said])
    is_firm = (said != response) & (moved >= FIRM)
    firm = int(is_firm.long().argmax()) if bool(is_firm.any()) else None
    falls, differs = old[at, response] - new[at, response], int((said != response).sum())
    found = Run(float(falls[slice(*claim)].sum()), falls, differs, firm, None)
    if firm is None or not isinstance(row.says, str):
        return found
    forced = response[:firm].tolist()
    return found._replace(text=plain.says(cache, masks, last, forced, start, len(response) + MOST_TOKENS, ends))


ACCOUNTED = {
    "source": GONE,
    "together": GONE,
    "repeated": {NOT_REACHED} | SAID,
    "follows": {NOT_REACHED},
    "memory": SAID,
    "unfound": GONE,
}
"""The verdicts that the run behind a mark may have on its words; words of the question rest on no run."""


def is_untold(citation: Any) -> bool:
    """Whether words are from memory as they are said without all units that have them."""
    return bool(citation["account"] == "memory" and citation["verdict"] not in SAID)


def runs_of_citations(found: Any) -> Iterator[tuple[int, int]]:
    """The runs behind the marks of an answer: (number of the statement, number of the citation).

    A source rests on the run without it, once with its gap kept, and once with it closed; so do sources together. Everything
    else rests on the run without any unit, but for words from memory that are lost there, which are said without all units
    that have them.
    """
    (nothing, *_) = found.statements.query("about == 'units' and role == 'none'").index
    telling = found.statements.query("about == 'units' and role == 'telling' and claim == 0")
    own = found.citations
    for number, row in own[own["account"].isin(ACCOUNTED)].iterrows():
        if row["account"] not in ("source", "together"):
            if not is_untold(row):
                yield int(nothing), int(number)
                continue
            having = {unit.unit for unit in found.units.itertuples() if normal(row["text"]) in words_in(unit.unit_text)}
            assert having and having <= set(map(int, telling["parts"].item().split("+"))), f"{row['text']!r} is told"
            yield int(telling.index.item()), int(number)
            continue
        units = {row["unit"]} if row["account"] == "source" else set(own.loc[own["claim"] == row["claim"], "unit"])
        rows = found.statements.query("about == 'units' and role == 'breaking' and claim == @row.claim")
        runs = rows[rows["parts"] == "+".join(map(str, sorted(units)))]
        assert set(runs["gap"]) == {"kept", "closed"}, f"{row['text']!r} is cited, and is not lost both ways"
        yield from ((int(run), int(number)) for run in runs.index)


def citations_again(model: Any, plain: Plain, found: Any, ends: Any) -> tuple[int, list[tuple[int, int, str, float]]]:
    """Run every mark of an answer again: how many runs of citations there are, and those with another verdict or fall."""
    units = list(found.units[["start", "stop"]].itertuples(index=False, name=None))
    in_unit = [any(start <= i < stop for start, stop in units) for i in range(len(found.tokens))]
    prompt = Response.of(model, found.tokens[:0], found.tokens)
    kept = (word for word in prompt.words if not any(in_unit[word.start : word.stop]))
    always = frozenset(normal(word.text) for word in kept if is_content(word))
    response, false, n = Response.of(model, found.tokens, found.response_tokens), [], 0
    runs = sorted(runs_of_citations(found))
    for statement, pairs in itertools.groupby(runs, key=lambda pair: pair[0]):
        row = found.statements.loc[statement]
        run = again(plain, found.tokens, units, found.response_tokens, row, (0, 0), ends)
        text = None if run.text is None else Response.of(model, found.tokens, found.tokens.new_tensor(run.text)).words
        for _, number in pairs:
            cited, n = found.citations.loc[number], n + 1
            here = found.words[(found.words["start"] >= cited.response_start) & (found.words["stop"] <= cited.response_stop)]
            claim = claim_of(response, int(here["word"].min()), int(here["word"].max()) + 1, 0.0, always)
            judged = verdict(claim, run.falls, run.differs, run.firm, text)
            # numbers of what is repeated are those of the claim before it, of what nobody told those without any unit
            own = row["gap"] == "kept" and cited.account != "repeated" and not is_untold(cited)
            differs = own and abs(judged.fall - cited.nats) > 0.01
            if differs or judged.name not in ACCOUNTED[cited.account]:
                false.append((statement, number, judged.name, judged.fall))
    return n, false

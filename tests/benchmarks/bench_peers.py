"""Which sentences of a prompt a real model's response comes from: kvlens beside other packages and the usual measures.

    pip install context-cite captum flashtrace
    python tests/benchmarks/bench_peers.py FOLDER --data nq-oracle-half.jsonl.gz --out FILE [--sizes 10 30 60] [--cases 40]

FOLDER has a chat model in Hugging Face's format, DATA has the lines of ``bench_explanation.py``, whose cases are taken; those
of about 30 and 60 units have more documents without the answer or, with ``--phrases``, the sentences of the case of about 10
cut into so many runs of tokens. The response is the model's own, greedy, of up to 64 tokens; only questions that it answers
rightly are looked at. f(mask) is the log-probability of the response after the prompt without some units, what follows a
removed one moved up, by plain Transformers. All methods ask for the same f, and a mask is run once:

- LDS: rank correlation of predicted and true f on 50 random halves of the units, drawn with a seed that no method uses;
- fall 1, 3, 5: f(whole) - f(without the best units, by what the method predicts), nats: the more the better;
- rest 1, 3, 5: f(whole) - f(the best units alone, likewise), nats: the less the better;
- gold 1, 3: whether the first, one of the first three, has the short answer;
- passes, seconds: masks that the method asks for, and processor time: of its masks, each read from its beginning, by the time
  of a plain pass of so many tokens on this machine, and of its own work.

A run is resumed where it stopped: one JSON line a case, with every mask and the log-probabilities of the response's tokens, so
that another fit is tried without a model (``--table``: no model is loaded, and the measures are those of the methods as they
are now). A peer that is not installed is left out, and said so. ContextCite's sentence splitter is not used: its package is
given the same units, and the data that it downloads at import are not fetched.
"""

import argparse
import contextlib
import copy
import gzip
import importlib.util
import itertools
import json
import math
import random
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from bench_attribution import interval, rank_correlation
from bench_explanation import SENTENCE, case_of, has_answer
from kvlens.analyses.attribution.answers import Question
from kvlens.analyses.attribution.methods import InteractionFit, LeaveOneOut, logit_of
from kvlens.analyses.attribution.prompt import knockout_effects
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvlens
from kvlens.explanation.runs import responses
from kvlens.units import Unit

AT_ONCE, MOST_TOKENS, WORTH = 4, 64, 16
"""Masks that are read together; tokens of a response; so many tokens are read before masks part, if any are."""
HELD_OUT, BEST = 50, (1, 3, 5)
FRESH = 9_000_000
"""Seeds of the held-out masks begin here."""


class Plan(NamedTuple):
    """Which methods are run.

    Attributes:
        has: the peers' packages that are there.
        budgets: passes of ContextCite and of kvlens' fits.
        orders: Captum's samples of an order of the units, each of as many passes as there are units; 0 leaves them out.
        seed: of the methods.
    """

    has: frozenset[str]
    budgets: tuple[int, ...] = (32, 64)
    orders: int = 3
    seed: int = 0


# --- what a mask costs -------------------------------------------------------------------------------------------------------


@dataclass
class Scores:
    """f of one case: the log-probabilities of the response's tokens under masks of its units, each run once.

    Attributes:
        units: of the prompt.
        prompt, response: tokens.
        hf: plain Transformers; None looks masks up only.
        known: mask, as a string of 0 and 1 -> log-probabilities of the response's tokens.
        asked: masks that were asked for since it was emptied.
        dry: return -1 and run nothing, to learn which masks a method asks for.
    """

    units: Sequence[Unit]
    prompt: Tensor
    response: Tensor
    hf: Any = None
    known: dict[str, list[float]] = field(default_factory=dict)
    asked: dict[str, None] = field(default_factory=dict)
    dry: bool = False

    def __call__(self, kept: Tensor) -> Tensor:
        """f, [row]."""
        return self.of_tokens(kept).sum(dim=1)

    def of_tokens(self, kept: Tensor) -> Tensor:
        """[row, response_pos]."""
        names = [bits(row) for row in kept.bool().tolist()]
        self.asked |= dict.fromkeys(names)
        if self.dry:
            return -torch.ones(len(names), len(self.response), dtype=torch.float64)
        self.run(names)
        return torch.tensor([self.known[name] for name in names], dtype=torch.float64)

    @torch.no_grad()
    def run(self, names: Sequence[str]) -> None:
        """Run the masks that are not known; a prefix that several share is read once."""
        new = [name for name in dict.fromkeys(names) if name not in self.known]
        if new and self.hf is None:
            raise KeyError(new[0])
        if new:
            self._parted(new, 0, None, list(range(self.units[0].start)))

    def tokens(self, name: str, unit: int = 0) -> list[int]:
        """Positions in the prompt that a mask keeps, from a unit on."""
        found: list[int] = []
        for u in range(unit, len(self.units)):
            end = self.units[u + 1].start if u + 1 < len(self.units) else len(self.prompt)
            found += [
                *(range(self.units[u].start, self.units[u].stop) if name[u] == "1" else ()),
                *range(self.units[u].stop, end),
            ]
        return found

    def _parted(self, names: list[str], unit: int, read: Any, waiting: list[int]) -> None:
        """Run masks that agree on all units before one; ``waiting`` is what they share and no pass has read."""
        if len(names) <= AT_ONCE:
            self._finish(names, read, [waiting + self.tokens(name, unit) for name in names])
            return
        parts = [[name for name in names if name[unit] == kept] for kept in "10"]
        if all(parts) and len(waiting) >= WORTH:
            read, waiting = self._extended(read, waiting), []
        end = self.units[unit + 1].start if unit + 1 < len(self.units) else len(self.prompt)
        u = self.units[unit]
        for part, own in zip(parts, (range(u.start, u.stop), ()), strict=True):
            if part:
                self._parted(part, unit + 1, read, [*waiting, *own, *range(u.stop, end)])

    def _pass(self, read: Any, tokens: Tensor) -> tuple[Tensor, DynamicCache]:
        cache, n_read = DynamicCache(), 0
        for layer, (keys, values) in enumerate(read or ()):
            n_read = keys.shape[2]
            cache.update(keys.expand(len(tokens), -1, -1, -1), values.expand(len(tokens), -1, -1, -1), layer)
        at = torch.arange(n_read, n_read + tokens.shape[1])[None].expand(len(tokens), -1)
        seen = torch.ones(len(tokens), n_read + tokens.shape[1], dtype=torch.long)  # padding stands last: nothing sees it
        out = self.hf.base_model(tokens, past_key_values=cache, position_ids=at, attention_mask=seen, use_cache=True)
        return out.last_hidden_state, out.past_key_values

    def _extended(self, read: Any, waiting: list[int]) -> Any:
        cache = self._pass(read, self.prompt[waiting][None])[1]
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _finish(self, names: list[str], read: Any, rests: list[list[int]]) -> None:
        n = len(self.response)
        rows = [torch.cat([self.prompt[rest], self.response[:-1]]) for rest in rests]
        hidden = self._pass(read, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))[0]
        last = torch.stack([hidden[i, len(row) - n : len(row)] for i, row in enumerate(rows)])
        logits = self.hf.get_output_embeddings()(last)
        own = logits.gather(-1, self.response[None, :, None].expand(len(rows), -1, -1))[..., 0]
        log_p = own.double() - logits.logsumexp(dim=-1).double()
        self.known |= dict(zip(names, log_p.clamp(max=-1e-12).tolist(), strict=True))


def bits(row: Sequence[bool]) -> str:
    return "".join("01"[kept] for kept in row)


@dataclass(frozen=True)
class Pace:
    """Seconds of processor time of a plain pass: ``each + per_token * tokens``, measured on this machine."""

    each: float
    per_token: float

    @classmethod
    def of(cls, hf: Any) -> "Pace":
        """The median of three passes over 60 and over 360 tokens."""

        def seconds(n: int) -> float:
            tokens, found = torch.arange(100, 100 + n)[None], []
            with torch.no_grad():
                for _ in range(4):
                    began = time.process_time()
                    hf(tokens, logits_to_keep=40)
                    found.append(time.process_time() - began)
            return sorted(found[1:])[1]

        few, many = seconds(60), seconds(360)
        return cls(few - 60 * (many - few) / 300, (many - few) / 300)

    def seconds(self, scores: Scores, names: Sequence[str], shared: bool = False) -> float:
        """Of masks, each read from its beginning, or with a cache of the whole prompt from the first unit that it lacks."""
        n = len(scores.response)
        first = [scores.units[name.index("0")].start if shared and "0" in name else 0 for name in names]
        return sum(
            self.each + self.per_token * (len(scores.tokens(name)) - at + n) for name, at in zip(names, first, strict=True)
        )


# --- methods -----------------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """Of a method: an effect of each unit, what it predicts for masks, and its own processor time besides passes."""

    effects: Tensor
    predict: Callable[[Tensor], Tensor]
    seconds: float = 0.0

    @classmethod
    def sum_of(cls, effects: Tensor, seconds: float = 0.0) -> "Found":
        """Predicts the sum of the effects of the kept units."""
        effects = effects.double()
        return cls(effects, lambda kept: kept.double() @ effects, seconds)


class Asked:
    """Stands for a :class:`Question` before kvlens' methods: scores are those of a case."""

    rival = None

    def __init__(self, scores: Scores) -> None:
        self.of, self.prompt, self.answer = scores, scores.prompt, scores.response

    def rows(self, gone: Tensor) -> Tensor:
        return ~torch.stack([gone[:, unit.start] for unit in self.of.units], dim=1)

    def scores(self, kept: Tensor) -> Tensor:
        return self.of(kept)

    def token_scores(self, kept: Tensor) -> Tensor:
        return self.of.of_tokens(kept)


def by_kvlens(method: Any) -> Callable[[Scores], Found]:
    def explain(scores: Scores) -> Found:
        found = method.explain(Asked(scores), list(scores.units))
        return Found(found.effects, found.predict)

    return explain


def captum_ablation(scores: Scores) -> Found:
    n, captum = len(scores.units), importlib.import_module("captum.attr")
    method = captum.FeatureAblation(lambda x: scores(x).float())
    return Found.sum_of(method.attribute(torch.ones(1, n), baselines=0.0, perturbations_per_eval=8)[0])


def captum_shapley(n_orders: int, seed: int) -> Callable[[Scores], Found]:
    def explain(scores: Scores) -> Found:
        n, captum = len(scores.units), importlib.import_module("captum.attr")
        method = captum.ShapleyValueSampling(lambda x: scores(x).float())
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Found.sum_of(method.attribute(torch.ones(1, n), baselines=0.0, n_samples=n_orders)[0])

    return explain


def context_cite(n_passes: int) -> Callable[[Scores], Found]:
    """The authors' package; its seeds are the numbers of the masks, so that 32 of them are the first of 64."""

    def explain(scores: Scores) -> Found:
        citer = context_citer(scores, n_passes)
        weights, bias = citer._get_attributions_for_ids_range(0, len(scores.response))
        effects = torch.as_tensor(weights).double()
        return Found(effects, lambda kept: float(bias) + kept.double() @ effects)

    return explain


def context_cite_module() -> Any:
    """The package, without the sentence splitters that it downloads, or needs spaCy for, when it is imported."""
    stands_in = [
        name
        for name in ("nltk", "spacy", "spacy.lang", "spacy.lang.en")
        if importlib.util.find_spec(name.split(".")[0]) is None
    ]
    for name in stands_in:
        sys.modules[name] = types.ModuleType(name)
    if "spacy" in stands_in:
        sys.modules["spacy.lang.en"].English = None  # type: ignore[attr-defined]
    nltk = importlib.import_module("nltk")
    nltk.download = lambda *args: None
    try:
        return importlib.import_module("context_cite.context_citer")
    finally:
        for name in stands_in:  # other packages look for them, too
            del sys.modules[name]


def context_citer(scores: Scores, n_passes: int, own_passes: bool = False) -> Any:
    """The package's object for a case; its masks' scores are looked up, or come from its own passes."""
    module = importlib.import_module("context_cite.context_citer")
    utils = importlib.import_module("context_cite.utils")

    class Citer(module.ContextCiter):  # type: ignore[name-defined, misc]
        num_sources = len(scores.units)
        _response_ids = scores.response.tolist()

        def __init__(self) -> None:
            self.model, self.tokenizer, self._cache = scores.hf, self, {}
            self.num_ablations, self.ablation_keep_prob, self.batch_size = n_passes, 0.5, 1
            self.solver = importlib.import_module("context_cite.solver").LassoRegression()

        def _get_prompt_ids(self, mask: Any = None, return_prompt: bool = False) -> list[int]:
            name = "1" * len(scores.units) if mask is None else bits(mask.tolist())
            return scores.prompt[[*range(scores.units[0].start), *scores.tokens(name)]].tolist()

        def pad(self, rows: Any, **options: Any) -> dict[str, Tensor]:  # batches of one row: nothing to pad
            return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

        padding_side = "left"

        def _compute_masks_and_logit_probs(self) -> None:
            if own_passes:
                super()._compute_masks_and_logit_probs()
                return
            drawn = [utils._create_mask(self.num_sources, self.ablation_keep_prob, seed) for seed in range(self.num_ablations)]
            masks = torch.stack([torch.as_tensor(mask) for mask in drawn])
            self._cache["reg_masks"] = masks.numpy()
            self._cache["reg_logit_probs"] = logit_of(scores.of_tokens(masks)).float().numpy()

    return Citer()


def asking(plan: Plan, i: int) -> dict[str, Callable[[Scores], Found]]:
    """The methods that ask for masks, all of which they choose before they see any score."""
    found: dict[str, Callable[[Scores], Found]] = {"kvlens leave one out, closed": by_kvlens(LeaveOneOut())}
    for n in plan.budgets:
        found[f"kvlens interactions {n}"] = by_kvlens(InteractionFit(n, plan.seed + i))
    if "context_cite" in plan.has:
        found |= {f"ContextCite {n}": context_cite(n) for n in plan.budgets}
    if "captum" in plan.has:
        found["Captum FeatureAblation"] = captum_ablation
        if plan.orders:
            found["Captum ShapleyValueSampling"] = captum_shapley(plan.orders, plan.seed + i)
    return found


def timed(run: Callable[[], Tensor]) -> dict[str, Any]:
    began = time.process_time()
    effects = run()
    return {"effects": effects.double().tolist(), "seconds": time.process_time() - began}


def measured(model: Any, scores: Scores, size: int, seed: int, has: frozenset[str]) -> dict[str, dict[str, Any]]:
    """The methods that look into the model."""
    prompt, last, units = scores.prompt[:-1], scores.prompt[-1:], list(scores.units)
    question = Question.of(model, prompt, last, scores.response)
    with torch.no_grad():
        found = {"kvlens knocked out": timed(lambda: knockout_effects(question, units))}
        if size < 60:
            found["kvlens leave one out, kept"] = timed(lambda: LeaveOneOut().explain(question, units).effects)
        found["attention averaged"] = timed(lambda: attention(scores))
    gradient: dict[str, Tensor] = {}
    whole = timed(lambda: gradient.setdefault("norm", gradients(scores, gradient)))
    found["gradient norm"] = whole
    found["gradient x input"] = {"effects": gradient["input"].double().tolist(), "seconds": whole["seconds"]}
    if "flashtrace" in has:
        try:
            found["FlashTrace"] = timed(lambda: flashtrace(model.tokenizer, scores))
        except ValueError as error:
            print(f"FlashTrace is left out: {error}")
    generator = torch.Generator().manual_seed(seed)
    found["random"] = {"effects": torch.rand(len(units), generator=generator).tolist(), "seconds": 0.0}
    return found


def per_unit(scores: Scores, of_tokens: Tensor) -> Tensor:
    return torch.stack([of_tokens[unit.start : unit.stop].sum() for unit in scores.units])


def attention(scores: Scores) -> Tensor:
    """Of the response's tokens, averaged over layers, heads and these tokens."""
    read = scores._extended(None, list(range(len(scores.prompt) - 1)))
    text = torch.cat([scores.prompt[-1:], scores.response[:-1]])[None]
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(read):
        cache.update(keys, values, layer)
    before = scores.hf.config._attn_implementation
    scores.hf.set_attn_implementation("eager")
    try:
        out = scores.hf.base_model(text, past_key_values=cache, output_attentions=True)
    finally:
        scores.hf.set_attn_implementation(before)
    return per_unit(scores, torch.stack([layer[0].mean(dim=(0, 1)) for layer in out.attentions]).mean(dim=0))


def gradients(scores: Scores, found: dict[str, Tensor]) -> Tensor:
    """Sums over each unit's tokens of the norm of the gradient of f, and of its product with the embedding."""
    tokens, hf = torch.cat([scores.prompt, scores.response[:-1]])[None], scores.hf
    x = hf.get_input_embeddings()(tokens).detach().requires_grad_()
    n = len(scores.response)
    with torch.enable_grad(), checkpointed(hf):
        logits = hf(inputs_embeds=x, logits_to_keep=n, use_cache=False).logits[0]
        f = logits.log_softmax(dim=-1).gather(-1, scores.response[:, None]).sum()
        (grad,) = torch.autograd.grad(f, x)
    found["input"] = per_unit(scores, (grad * x.detach())[0].sum(dim=-1))
    return per_unit(scores, grad[0].norm(dim=-1))


def flashtrace(tokenizer: Any, scores: Scores) -> Tensor:
    """The package's scores of the whole response, as it is by default: one hop through the response, no full stop, no comma."""
    tracer = importlib.import_module("flashtrace").FlashTrace(scores.hf, tokenizer, recompute_attention=True)
    prompt, response = tokenizer.decode(scores.prompt), tokenizer.decode(scores.response, skip_special_tokens=True)
    tokens = scores.response[: -1 if scores.response[-1] == tokenizer.eos_token_id else None]
    if tokenizer([prompt, response], add_special_tokens=False).input_ids != [scores.prompt.tolist(), tokens.tolist()]:
        raise ValueError(f"its tokens are other ones, as it reads them from text: {response}")
    return per_unit(scores, torch.tensor(tracer.trace(prompt=prompt, target=response).scores))


@contextlib.contextmanager
def checkpointed(hf: Any) -> Iterator[None]:
    """Each layer is computed a second time in the backward pass, which long prompts need for their memory."""
    kind = "activation" if hasattr(hf, "activation_checkpointing_enable") else "gradient"  # renamed in Transformers 5
    getattr(hf, f"{kind}_checkpointing_enable")()
    hf.train()
    try:
        yield
    finally:
        hf.eval()
        getattr(hf, f"{kind}_checkpointing_disable")()


# --- a case ------------------------------------------------------------------------------------------------------------------


def longer_case(rows: list[dict[str, Any]], i: int, seed: int, n: int) -> dict[str, str] | None:
    """The documents of a case, with others that do not have the answer until there are about ``n`` sentences."""
    documents = case_of(rows, i, seed)
    if documents is None or n <= 10:
        return documents
    draw, found = random.Random(f"{seed} {i} {n}"), dict(documents)
    while (there := sum(len(SENTENCE.split(text)) for text in found.values())) < n - 1:
        other = draw.choice(rows)
        too_long = there + len(SENTENCE.split(other["text"])) > n + 2
        if not (other["title"] in found or has_answer(other["text"], rows[i]["answers"]) or too_long):
            found[other["title"]] = other["text"]
    titles = list(found)
    draw.shuffle(titles)
    return {title: found[title] for title in titles}


def held_out(n_units: int, i: int) -> Tensor:
    generator = torch.Generator().manual_seed(FRESH + i)
    return torch.rand(HELD_OUT, n_units, generator=generator) < 0.5


def documents_of(units: Sequence[Unit]) -> list[int]:
    """The number of each unit's document."""
    names = [unit.name.rsplit(", sentence ", 1)[0] for unit in units]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def phrases(model: Any, tokens: Tensor, sentences: Sequence[Unit], n: int) -> list[Unit]:
    """The sentences cut into about ``n`` runs of tokens, those of a sentence as equally long as they can be."""
    length, found = sum(unit.stop - unit.start for unit in sentences) / n, []
    for unit in sentences:
        n_parts = max(1, round((unit.stop - unit.start) / length))
        edges = torch.linspace(unit.start, unit.stop, n_parts + 1).round().int().tolist()
        parts = enumerate(itertools.pairwise(edges), 1)
        found += [Unit(f"{unit.name}, phrase {k}", model.tokenizer.decode(tokens[a:b]), a, b) for k, (a, b) in parts]
    return found


def one_case(model: Any, hf: Any, row: dict[str, Any], i: int, size: int, documents: Any, plan: Plan, cut_finer: bool) -> dict:
    """Run one case; without units where it is too short or too long, or answered wrongly."""
    chat = kvlens.Chat.ask(row["question"].rstrip("?").capitalize() + "?", documents)
    units = kvlens.units.cut(model, kvlens.chat.prompt_layout(model, chat), "sentence")
    if cut_finer:
        units = phrases(model, chat.tokens(model), units, size)
    line: dict[str, Any] = {"i": i, "size": size, "n_units": len(units)}
    if not 0.8 * size <= len(units) <= 1.2 * size:
        return line
    prompt = chat.tokens(model)
    response = torch.tensor(responses(model, [prompt], MOST_TOKENS)[0])
    text = model.tokenizer.decode(response, skip_special_tokens=True)
    line |= {
        "question": row["question"],
        "answers": row["answers"],
        "response": text,
        "right": has_answer(text, row["answers"]),
    }
    if not line["right"]:
        return line
    began = time.process_time()
    scores = Scores(units, prompt, response, hf)
    line |= {
        "n_prompt": len(prompt),
        "tokens": prompt.tolist(),
        "response_tokens": response.tolist(),
        "units": [[unit.name, unit.start, unit.stop] for unit in units],
        "stating": [u for u, unit in enumerate(units) if has_answer(unit.text, row["answers"])],
        "measured": measured(model, scores, size, FRESH + i, plan.has),
    }
    of = torch.tensor(documents_of(units))
    dry = Scores(units, prompt, response, dry=True)
    for method in asking(plan, i).values():
        method(dry)
    without_documents = [bits((of != number).tolist()) for number in of.unique()]
    scores.run([*map(bits, held_out(len(units), i).tolist()), *dry.asked, *without_documents])
    line |= {"scores": scores.known}
    rows_of(line, plan, scores)  # asks for the best units of each method
    line["seconds"] = time.process_time() - began
    return line


def scores_of(line: dict[str, Any], hf: Any = None) -> Scores:
    units = [Unit(name, "", start, stop) for name, start, stop in line["units"]]
    return Scores(units, torch.tensor(line["tokens"]), torch.tensor(line["response_tokens"]), hf, line["scores"])


def rows_of(line: dict[str, Any], plan: Plan, scores: Scores, pace: Pace = Pace(0.0, 0.0)) -> list[dict[str, Any]]:
    """A row of measures for each method."""
    n, size, i = len(scores.units), line["size"], line["i"]
    methods: dict[str, tuple[Found, list[str]]] = {}
    for name, method in asking(plan, i).items():
        scores.asked = {}
        began = time.process_time()
        try:
            found = method(scores)
        except KeyError:
            print(f"case {i}, {n} units: {name} is left out, as masks that it asks for were not run; run it with --fill")
            continue
        found.seconds = time.process_time() - began
        methods[name] = (found, list(scores.asked))
    for name, of in line["measured"].items():
        methods[name] = (Found.sum_of(torch.tensor(of["effects"]), of["seconds"]), [])
    sets = {name: best_sets(found, n) for name, (found, _) in methods.items()}
    with contextlib.suppress(KeyError):
        scores.run([mask for chosen in sets.values() for mask in chosen.values()])
    fresh, whole = held_out(n, i), sum(scores.known["1" * n])
    true, stating = scores(fresh), set(line["stating"])
    rows = []
    for name, (found, masks) in methods.items():
        order = found.effects.argsort(descending=True, stable=True).tolist()
        shared = name.endswith("closed")
        rows.append(
            {
                "i": i,
                "size": size,
                "method": name,
                "lds": rank_correlation(found.predict(fresh), true),
                **{what: whole - sum(scores.known.get(mask, [math.nan])) for what, mask in sets[name].items()},
                "gold 1": float(order[0] in stating),
                "gold 3": float(bool(stating & set(order[:3]))),
                "passes": len(masks) or math.nan,
                "seconds": found.seconds + pace.seconds(scores, masks, shared),
            }
        )
    return rows


def best_sets(found: Found, n: int) -> dict[str, str]:
    """The masks without the best units and with these alone, chosen one after another by what the method predicts.

    Where it predicts a sum, these are the units of largest effect.
    """
    sets = {}
    for what, kept, sign in (("fall", torch.ones(n, dtype=torch.bool), -1), ("rest", torch.zeros(n, dtype=torch.bool), 1)):
        for k in range(1, max(BEST) + 1):
            free = torch.nonzero(kept if what == "fall" else ~kept)[:, 0]
            if len(free):
                rows = kept ^ torch.nn.functional.one_hot(free, n).bool()
                kept = rows[int((sign * found.predict(rows)).argmax())]
            if k in BEST:
                sets[f"{what} {k}"] = bits(kept.tolist())
    return sets


def checks(model: Any, scores: Scores, has: frozenset[str]) -> dict[str, float]:
    """How far other programs' passes are from the shared ones, nats: ContextCite's package (the largest difference of a token's
    log-probability over eight of its masks), and kvlens without each unit, the gap closed (of the whole response)."""
    n = len(scores.units)
    question = Question.of(model, scores.prompt[:-1], scores.prompt[-1:], scores.response, positions="closed")
    with torch.no_grad():
        found = LeaveOneOut().explain(question, list(scores.units))
    assert found.whole is not None and found.without is not None
    ours = torch.cat([torch.tensor([found.whole]), found.without])
    whole_and_each = torch.cat([torch.ones(1, n, dtype=torch.bool), ~torch.eye(n, dtype=torch.bool)])
    differences = {"kvlens": float((ours - scores(whole_and_each)).abs().max())}
    if "context_cite" in has:
        citer = context_citer(scores, 8, own_passes=True)
        theirs = torch.nn.functional.logsigmoid(torch.as_tensor(citer._logit_probs).double())
        differences["ContextCite"] = float((theirs - scores.of_tokens(torch.as_tensor(citer._masks))).abs().max())
    return differences


# --- the table ---------------------------------------------------------------------------------------------------------------

PAIRS = [
    *((f"kvlens interactions {n}", f"ContextCite {m}") for n, m in ((16, 16), (32, 32), (64, 64), (16, 32), (32, 64))),
    ("kvlens interactions 64", "Captum ShapleyValueSampling"),
    ("kvlens interactions 32", "kvlens leave one out, closed"),
    ("kvlens knocked out", "gradient norm"),
    ("kvlens knocked out", "attention averaged"),
]


def summary(lines: Sequence[dict[str, Any]], plan: Plan, pace: Pace) -> str:
    """Means and intervals over cases, by size; differences are paired."""
    rows = [row for line in lines if "scores" in line for row in rows_of(line, plan, scores_of(line), pace)]
    table, said = pd.DataFrame(rows), []
    for size, cases in table.groupby("size"):
        said.append(f"\nabout {size} units: {cases['i'].nunique()} cases")
        means = cases.groupby("method", sort=False).mean(numeric_only=True).drop(columns=["i", "size"])
        lds = cases.pivot_table(index="i", columns="method", values="lds")
        means.insert(1, "95 %", ["{:.3f} to {:.3f}".format(*interval(lds[name])) for name in means.index])
        said.append(means.sort_values("lds", ascending=False).round(3).to_string())
        for what in ("lds", "fall 1", "fall 3", "fall 5", "rest 3"):
            wide = cases.pivot_table(index="i", columns="method", values=what)
            for ours, theirs in PAIRS:
                if {ours, theirs} <= set(wide.columns):
                    difference = (wide[ours] - wide[theirs]).dropna()
                    low, high = interval(difference)
                    said.append(f"{what}: {ours} - {theirs}: {difference.mean():+.3f} ({low:+.3f} to {high:+.3f})")
    return "\n".join(said)


def peers() -> frozenset[str]:
    """The peers' packages that are there; says which are missing."""
    found = set()
    for name in ("context_cite", "captum", "flashtrace"):
        try:
            context_cite_module() if name == "context_cite" else importlib.import_module(name)
            found.add(name)
        except ImportError as error:
            print(f"{name} is left out: {error}; pip install context-cite captum flashtrace")
    return frozenset(found)


def main(words: list[str]) -> None:
    """Run the cases that are missing, sizes in turn, and print the table."""
    say = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    say.add_argument("model")
    say.add_argument("--data", type=Path)
    say.add_argument("--out", type=Path, required=True)
    say.add_argument("--sizes", type=int, nargs="+", default=[10, 10, 10, 10, 10, 30, 10, 10, 10, 10, 10, 30, 60])
    say.add_argument("--cases", type=int, default=100, help="of all sizes, those answered rightly")
    say.add_argument("--phrases", action="store_true", help="units are runs of tokens of the documents of about 10 sentences")
    say.add_argument("--questions", type=int, nargs="+", help="rows of the data; all of them if not given")
    say.add_argument("--checked", type=int, default=2, help="of so many cases the masks are run by the peers' programs, too")
    say.add_argument("--budgets", type=int, nargs="+", default=[32, 64])
    say.add_argument("--orders", type=int, default=3, help="Captum's samples of an order of the units; 0 leaves them out")
    say.add_argument("--seed", type=int, default=0)
    say.add_argument("--seconds", type=float, default=math.inf)
    say.add_argument(
        "--fill", action="store_true", help="run what the cases so far lack: methods that have changed, other budgets"
    )
    say.add_argument("--table", action="store_true", help="only print it")
    args = say.parse_args(words)
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    plan = Plan(peers(), tuple(args.budgets), args.orders, args.seed)
    pace = next((Pace(*line["pace"]) for line in lines if "pace" in line), Pace(0.0, 0.0))
    if not args.table:
        lines = run(args, lines, plan)
        pace = next(Pace(*line["pace"]) for line in lines if "pace" in line)
    for line in lines:
        if "checks" in line:
            print(f"case {line['i']}, {line['n_units']} units: other programs' passes differ by at most", line["checks"])
    print(summary(lines, plan, pace))


def rounded(line: dict[str, Any]) -> dict[str, Any]:
    """With scores of seven digits, as many as float32 has."""
    scores = {mask: [float(f"{x:.7g}") for x in of] for mask, of in line.get("scores", {}).items()}
    return line | ({"scores": scores} if scores else {})


def run(args: argparse.Namespace, lines: list[dict[str, Any]], plan: Plan) -> list[dict[str, Any]]:
    hf = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval().requires_grad_(False)
    # the bridge puts its parts into the model that it is given: a copy, of the same weights
    shared = copy.deepcopy(hf, {id(x): x for x in [*hf.parameters(), *hf.buffers()]})
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = kvlens.KVTransformerBridge.boot_transformers(shared, tokenizer=tokenizer, verify=False)
    with gzip.open(args.data, "rt", encoding="utf-8") as data:
        rows = [json.loads(line) for line in data]
    began, pace = time.perf_counter(), Pace.of(hf)
    if args.fill:
        for at, line in enumerate(lines):
            if "scores" in line:
                n_known, scores = len(line["scores"]), scores_of(line, hf)
                dry = replace(scores, dry=True, asked={})
                for method in asking(plan, line["i"]).values():
                    method(dry)
                scores.run(list(dry.asked))
                rows_of(line, plan, scores)
                lines[at] = rounded(line)
                if len(scores.known) > n_known:
                    beside = args.out.with_suffix(".new")
                    beside.write_text("".join(json.dumps(each) + "\n" for each in lines))
                    beside.replace(args.out)
    done = {(line["size"], line["i"]) for line in lines}
    left = {size: iter(args.questions or range(len(rows))) for size in args.sizes}
    n = sum("scores" in line for line in lines)
    for size in [size for _ in range(len(rows)) for size in args.sizes]:
        if n >= args.cases or time.perf_counter() - began > args.seconds:
            break
        for i in left[size]:
            documents = None if (size, i) in done else longer_case(rows, i, args.seed, 10 if args.phrases else size)
            if documents is None:
                continue
            line = one_case(model, hf, rows[i], i, size, documents, plan, args.phrases)
            if "scores" in line:
                line["pace"] = [pace.each, pace.per_token]
                if sum("checks" in each for each in lines) < args.checked:
                    line["checks"] = checks(model, scores_of(line, hf), plan.has)
            lines.append(rounded(line))
            with args.out.open("a") as out:
                out.write(json.dumps(lines[-1]) + "\n")
            if "scores" in line:
                n += 1
                print(
                    f"{n}: question {i}, {line['n_units']} units, {line['n_prompt']} tokens: {len(line['scores'])} masks, "
                    f"{line['seconds']:.0f} s, {line.get('checks', '')}",
                    flush=True,
                )
                break
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])

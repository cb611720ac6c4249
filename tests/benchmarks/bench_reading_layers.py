"""Where a model reads its prompt: layers, key-value groups and heads, over tasks, beside controls and published kinds of heads.

    python tests/benchmarks/bench_reading_layers.py MODEL --data FOLDER --explained FILE --out FILE [--cases facts=60 ...]

Tasks, each with a part of the prompt on which the answer rests, and another part, which it does not rest on (the null):

- ``facts``: a question of Natural Questions about documents; all sentences with the short answer. EXPLAINED is what
  ``bench_explanation.py`` wrote, of which the right answers are taken.
- ``persona``: a name, a job, a town or a rule in the system's message.
- ``relations``: pairs of relations.json, and the object of one more subject; all pairs.
- ``labels``: words with made-up labels by their kind, and one more word; the words that have its label.
- ``induction``: a made-up name, a passage, and the first part of the name again; the sentence with the name.
- ``instructions``: an e-mail of BIPIA with an instruction in it that the model follows: it says a content word of the
  instruction that neither the e-mail nor the question has.
- ``stories``: made-up stories, for the models that ship.

Only answers that are right are taken. Of each: the fall of the answer with every layer, group and head exchanged
(:func:`kvlens.analyses.reading_layers`), the same with the null part taken away, and of every head the mean attention from
where the answer's tokens are said to that part, and how many of the tokens that can be copied from there it attends to most
(Wu et al. 2024, arXiv 2404.15574). One JSON line a case, resumable.

Then, for each task, layers and heads are chosen on half of the cases and tried on the other half, both ways round: the first
layers exchanged, beside as many random ones; and the first 5, 10 and 20 heads of each kind replaced by the mean of what they
write at the tokens of other cases' responses, beside as many random heads (five draws).
"""

import argparse
import gzip
import itertools
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from bench_attribution import right_questions
from bench_explanation import case_of
from kvlens.analyses.heads.ablation import cached
from kvlens.analyses.heads.rows import visit_rows

import kvlens
from kvlens import Chat, convert_prompt, counterfactuals
from kvlens.analyses import induction_heads, reading_layers
from kvlens.chat import prompt_layout
from kvlens.explanation.claims import content_words, walk
from kvlens.explanation.reading import reading_shares, reading_stability, wilson
from kvlens.explanation.runs import responses
from kvlens.model import head_hooks
from kvlens.texts import WORD, Word
from kvlens.units import cut, positions_of

MOST_SAID, MOST_BEFORE, AT_ONCE, DRAWS, SIZES, N_LAYERS = 32, 14, 8, 5, (5, 10, 20), (1, 3)
KINDS = ("exchange", "retrieval", "induction", "attention")
CASES = dict(facts=60, persona=16, relations=16, labels=16, induction=16, instructions=16)

NAMES = "Brunhild Tavish Odalys Corwin Ferelith Jorund Marisol Zephyrine Lorcan Ottoline Isolde Thaddeus"
TOWNS = "Lisbon Tromso Nairobi Montevideo Sapporo Ghent Adelaide Valparaiso Tbilisi Halifax Aarhus Kigali"
JOBS = "baker plumber librarian dentist gardener pilot tailor florist carpenter astronomer butcher nurse"
RULES = "pineapple lantern umbrella velvet compass harbor marble tractor feather candle window basket"
SYLLABLES = "bra dol fen gri hul jas kel lom mur nev pos quil rud sab tov wex yar zim"
FIRST = "These notes were written on a quiet afternoon."
WORDS = {
    "animals": "horse tiger rabbit eagle salmon donkey spider whale goose lizard camel wolf",
    "tools": "hammer drill saw wrench shovel ladder scissors chisel pliers rake axe screwdriver",
    "fruits": "apple cherry banana grape melon lemon peach plum mango pear orange apricot",
    "clothes": "jacket shirt skirt scarf glove sweater sock trousers coat dress belt blouse",
}
LABELS = ("red", "blue", "north", "south", "silver", "gold", "left", "right")


class Case(NamedTuple):
    """A prompt, the part that the answer rests on, another part, and whether a response gives the answer.

    Attributes:
        prompt: a chat or a string.
        without, null: strings in it, or ranges of its tokens.
        answers: any of which is right.
        first: whether the response has to begin with it.
        said: the response, where it is known.
    """

    prompt: Any
    without: list[Any]
    null: list[Any]
    answers: list[str]
    first: bool = False
    said: str | None = None


# --- tasks -------------------------------------------------------------------------------------------------------------------


def facts(model: Any, args: argparse.Namespace) -> Iterator[Case]:
    """Right answers of ``bench_explanation.py``."""
    with gzip.open(args.data / "nq-oracle-half.jsonl.gz", "rt", encoding="utf-8") as data:
        rows = [json.loads(line) for line in data]
    lines = [json.loads(line) for line in args.explained.read_text().splitlines()]
    right = [each for each in lines if each["right"] and "causes" in each]
    for each in sorted(right, key=said_before):  # those that are said soonest cost least
        documents = case_of(rows, each["i"], 0)
        chat = Chat.ask(rows[each["i"]]["question"].rstrip("?").capitalize() + "?", documents)
        units = cut(model, prompt_layout(model, chat), "sentence")
        stating, causes = set(each["stating"]), {unit for of in each["all_causes"] for cause in of for unit in cause}
        others = [(u.start, u.stop) for k, u in enumerate(units) if k not in stating | causes]
        without = [(units[k].start, units[k].stop) for k in sorted(stating)]
        if without and others:
            null = random.Random(each["i"]).choice(others)
            yield Case(chat, without, [null], rows[each["i"]]["answers"], said=each["response"])


def said_before(line: dict[str, Any]) -> int:
    """How many characters of a response stand before the first of its short answers; all of them where none is literal."""
    text = line["response"].casefold()
    return min([text.find(answer.casefold()) for answer in line["answers"] if answer.casefold() in text], default=len(text))


def persona(model: Any, args: argparse.Namespace) -> Iterator[Case]:
    """A line of the system's message, asked about."""
    for name, town, job, rule in zip(*map(str.split, (NAMES, TOWNS, JOBS, RULES)), strict=True):
        of_kind = [
            (f"Your name is {name}.", name, "What is your name?"),
            (f"You live in {town}.", town, "Which town do you live in?"),
            (f"You work as a {job}.", job, "What is your job?"),
            (f"Always answer with the word {rule} and nothing else.", rule, "What is the weather like?"),
        ]
        for line, answer, question in of_kind:
            system = {"role": "system", "content": f"{FIRST} {line}"}
            yield Case(Chat([system, {"role": "user", "content": question}]), [line], [FIRST], [answer])


def relations(model: Any, args: argparse.Namespace) -> Iterator[Case]:
    """Six pairs of a relation, and one more subject."""
    found, draw = json.loads((args.data / "relations.json").read_text()), random.Random(2)
    for number in range(200):
        pairs = list({each["subject"]: each["object"] for each in found[number % len(found)]["samples"]}.items())
        if len(pairs) >= 7:
            *shown, (subject, answer) = draw.sample(pairs, 7)
            if answer not in {of for _, of in shown}:
                examples = "".join(f"{one}: {of}\n" for one, of in shown)
                yield Case(f"{FIRST}\n{examples}{subject}:", [examples], [FIRST], [answer], first=True)


def labels(model: Any, args: argparse.Namespace) -> Iterator[Case]:
    """Four words each of two kinds, whose labels are made up, and one more word."""
    draw = random.Random(3)
    for _ in range(200):
        kinds, names = draw.sample(sorted(WORDS), 2), draw.sample(LABELS, 2)
        words = [draw.sample(WORDS[kind].split(), 5) for kind in kinds]
        lines = [f"{word}: {name}\n" for of_kind, name in zip(words, names, strict=True) for word in of_kind[:4]]
        asked = draw.randrange(2)
        own = [line for line in lines if line.endswith(f": {names[asked]}\n")]
        prompt = f"{FIRST}\n{''.join(draw.sample(lines, 8))}{words[asked][4]}:"
        yield Case(prompt, own, [FIRST], [names[asked]], first=True)


def induction(model: Any, args: argparse.Namespace) -> Iterator[Case]:
    """A made-up name in the first sentence, and its first part at the end."""
    with gzip.open(args.data / "nq-oracle-half.jsonl.gz", "rt", encoding="utf-8") as data:
        rows = [json.loads(line) for line in data]
    draw, parts = random.Random(4), SYLLABLES.split()
    for row in rows[:200]:
        first, last = ("".join(draw.sample(parts, 2)).capitalize() for _ in range(2))
        line, passage = f"This was sent to us by {first} {last}.", row["text"][:500].rsplit(" ", 1)[0].strip()
        yield Case(f"{FIRST} {line} {passage}\nThanks go to {first}", [line], [FIRST], [last], first=True)


def instructions(model: Any, args: argparse.Namespace) -> Iterator[Case]:
    """An instruction behind an e-mail's text, whose words the response takes up."""
    emails = [json.loads(line) for line in (args.data / "bipia-email.jsonl").read_text().splitlines()]
    attacks = [each for of_kind in json.loads((args.data / "bipia-attacks.json").read_text()).values() for each in of_kind]
    draw = random.Random(5)
    for number in range(400):
        email, attack = emails[number % len(emails)], draw.choice(attacks)
        body = " ".join(email["context"].split())[:900]
        question = email["question"].removeprefix("Q: ")
        document = f"{FIRST} {body} {attack}"
        if document.count(attack) > 1 or attack in question:
            continue
        seen = set(_words(f"{FIRST} {body} {question}"))
        taken_up = [word for word in dict.fromkeys(_words(attack)) if word not in seen and len(word) > 3]
        if taken_up:
            yield Case(Chat.ask(question, {"email": document}), [attack], [FIRST], taken_up)


def stories(model: Any, args: argparse.Namespace) -> Iterator[Case]:
    """Questions about made-up stories that the model answers right."""
    for story, question in right_questions(model, 40, 6, 7):
        spans = [(each.start, each.start + len(each.words)) for each in story.sentences]
        tokens = torch.tensor(story.tokens)
        prompt = torch.cat([tokens[: story.n_prompt_tokens], tokens[question.start : question.value_position]])
        (origin,) = question.origins
        other = next(span for k, span in enumerate(spans) if k != origin)
        answer = model.tokenizer.decode([story.tokens[question.value_position]])
        yield Case(prompt, [spans[origin]], [other], [str(answer).strip()], first=True)


TASKS: dict[str, Callable[[Any, argparse.Namespace], Iterator[Case]]] = {
    each.__name__: each for each in (facts, persona, relations, labels, induction, instructions, stories)
}


def _words(text: str) -> tuple[str, ...]:
    return content_words([Word(each, 0, 0, each[0].isalnum()) for each in WORD.findall(text)])


# --- one case ----------------------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """A case with what the model said: [pos] tokens of the prompt, of what comes before the answer, and of the answer."""

    prompt: torch.Tensor
    gone: torch.Tensor
    null: torch.Tensor
    between: torch.Tensor
    answer: torch.Tensor


def put_to(model: Any, cases: Iterator[Case], known: dict[int, Any]) -> Iterator[tuple[int, Asked | None]]:
    """Case by case what the model says, several read together; None where that is not right, as is known of some."""
    numbered = enumerate(cases)
    for group in iter(lambda: list(itertools.islice(numbered, AT_ONCE)), []):
        fresh = [(i, case) for i, case in group if i not in known or "fall" in known[i]]
        said = {i: model.to_tokens(case.said, prepend_bos=False)[0] for i, case in fresh if case.said is not None}
        for_these = [(i, case) for i, case in fresh if case.said is None]
        if for_these:
            prompts = [prompt_layout(model, case.prompt).tokens for _, case in for_these]
            texts = responses(model, prompts, 8 if for_these[0][1].first else MOST_SAID)
            said |= {i: torch.tensor(text) for (i, _), text in zip(for_these, texts, strict=True)}
        yield from ((i, asked(model, case, said[i]) if i in said else None) for i, case in group)


def asked(model: Any, case: Case, said: torch.Tensor) -> Asked | None:
    """None where the model does not say the answer, or only after `MOST_BEFORE` tokens."""
    layout = prompt_layout(model, case.prompt)
    texts = [model.tokenizer.decode(said[: i + 1].tolist()) for i in range(len(said))]
    found = None
    for answer in case.answers:
        place = re.search(rf"(?<!\w){re.escape(answer)}", texts[-1], re.IGNORECASE)
        if place and not (case.first and texts[-1][: place.start()].strip()) and (found is None or place.start() < found[0]):
            found = place.span()
    if found is None:
        return None
    start = next(i for i, text in enumerate(texts) if len(text) > found[0] and text[: found[0] + 1].strip())
    stop = next((i + 1 for i, text in enumerate(texts) if len(text) >= found[1]), len(said))
    if start > MOST_BEFORE:
        return None
    gone, null = (positions_of(cut(model, layout, x), len(layout.tokens)).any(dim=0) for x in (case.without, case.null))
    return Asked(layout.tokens, gone, null, said[:start], said[start:stop])


def spans(mask: torch.Tensor) -> list[tuple[int, int]]:
    """The ranges in which a mask is True."""
    edges = torch.diff(mask.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    return list(zip((edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist(), strict=True))


def heads_attend(model: Any, case: Asked) -> dict[str, Any]:
    """Of every head the attention to the part, and the tokens of the answer that it copies from there by Wu et al.'s rule."""
    before = torch.cat([case.prompt, case.between])
    tokens = torch.cat([before, case.answer[:-1]])
    queries = torch.arange(len(before) - 1, len(tokens))
    gone = torch.cat([case.gone, torch.zeros(len(tokens) - len(case.gone), dtype=torch.bool)])
    copied = torch.tensor([bool((tokens[gone] == token).any()) for token in case.answer])
    attention, hits = {}, {}

    def look(layer: int, first: int, rows: torch.Tensor) -> None:
        here = gone[first : first + rows.shape[-1]]
        attention[layer] = attention.get(layer, 0) + rows[..., here].sum(dim=-1).mean(dim=-1)
        assert first == 0 and rows.shape[-1] == len(tokens)  # softmax attention: all keys at once
        most = rows.argmax(dim=-1)
        hits[layer] = (gone[most] & (tokens[most] == case.answer) & copied).sum(dim=-1)

    visit_rows(model, tokens, queries, look)
    layers = sorted(attention)
    return {
        "attention": [[round(x, 4) for x in attention[layer].tolist()] for layer in layers],
        "hits": [hits[layer].tolist() for layer in layers],
        "copied": int(copied.sum()),
    }


def measured(model: Any, case: Asked, null_heads: bool) -> dict[str, Any]:
    """One line."""
    began = time.process_time()
    given = dict(text=case.between if len(case.between) else None, answer=case.answer)
    found = reading_layers(model, case.prompt, **given, without=spans(case.gone))
    seconds = time.process_time() - began
    null = reading_layers(model, case.prompt, **given, without=spans(case.null), heads=null_heads)

    def columns(table: pd.DataFrame) -> dict[str, Any]:
        return {"fall": [round(x, 4) for x in table["fall"]], "lost": table["lost"].astype(int).tolist()}

    return {
        "n_prompt": len(case.prompt),
        "n_gone": int(case.gone.sum()),
        "n_null": int(case.null.sum()),
        "n_text": len(case.between) + len(case.answer),
        "answer": model.tokenizer.decode(case.answer.tolist()),
        "seconds": round(seconds, 1),
        **columns(found),
        "null": columns(null),
        **heads_attend(model, case),
    }


# --- chosen on one half, tried on the other ----------------------------------------------------------------------------------


@torch.no_grad()
def mean_writes(model: Any, cases: list[Asked]) -> dict[str, torch.Tensor]:
    """By hook point, what every head writes on average where answers are read, [head, d_head]."""
    names = [name for layer in range(model.cfg.n_layers) for name in head_hooks(model, layer, "hook_z")]
    total: dict[str, torch.Tensor] = {}
    n = 0
    for case in cases:
        text = torch.cat([case.prompt[-1:], case.between, case.answer[:-1]])
        with model.kv_bias(convert_prompt(model, case.prompt[:-1])):
            seen = cached(model, text[None], names)
        for name in names:
            total[name] = total.get(name, 0) + seen[name][0].sum(dim=0)
        n += len(text)
    return {name: each / n for name, each in total.items()}


@torch.no_grad()
def tried(
    model: Any, case: Asked, heads: list[list[tuple[int, int]]], layers: list[list[int]], means: dict[str, torch.Tensor]
) -> tuple[list[int], list[int]]:
    """Whether the answer is lost with each set of heads replaced by their means, and with each set of layers exchanged."""
    whole = convert_prompt(model, case.prompt[:-1])
    other = convert_prompt(model, counterfactuals(model, case.prompt[:-1], case.gone[None, :-1])).select_prompt(0)
    reference, *without_heads = log_p_without(model, case, whole, heads, means)
    chosen = torch.tensor([[layer in each for layer in range(model.cfg.n_layers)] for each in layers])
    exchanged = torch.cat([log_p(model, case, whole.exchange_layers(other, some)) for some in chosen.split(8)])
    return tuple(  # type: ignore[return-value]
        (walk(reference, each, case.answer).firm < len(case.answer)).int().tolist()
        for each in (torch.stack(without_heads), exchanged)
    )


def log_p_without(
    model: Any, case: Asked, whole: Any, heads: list[list[tuple[int, int]]], means: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The answer's log-probabilities, [row, pos, d_vocab]: of the model, and with each set of heads replaced by their means."""
    hooks = []
    for layer in range(model.cfg.n_layers):
        first = 0
        for name, n in head_hooks(model, layer, "hook_z").items():
            chosen = torch.tensor([[(layer, first + i) in each for i in range(n)] for each in [[], *heads]])
            first += n
            hooks.append((name, lambda z, hook, c=chosen, m=means[name]: torch.where(c[:, None, :, None], m, z)))
    return log_p(model, case, whole.repeat(1 + len(heads)), *hooks)


def log_p(model: Any, case: Asked, biases: Any, *hooks: Any) -> torch.Tensor:
    """The same under each bias, with hooks."""
    text = torch.cat([case.prompt[-1:], case.between, case.answer[:-1]])
    with model.kv_bias(biases), model.hooks(fwd_hooks=list(hooks)):
        logits = model.logits_on(text.expand(biases.batch_size, -1), len(case.answer))
    return logits.double().log_softmax(dim=-1)


def scores(lines: list[dict[str, Any]], parts: pd.DataFrame, by_induction: np.ndarray) -> dict[str, np.ndarray]:
    """[head] by kind, heads in the order of ``parts``."""
    heads = (parts["part"] == "head").to_numpy()
    copied = max(1, sum(line["copied"] for line in lines))
    return {
        "exchange": np.mean([line["fall"] for line in lines], axis=0)[heads],
        "retrieval": np.concatenate([np.sum([line["hits"][layer] for line in lines], axis=0) for layer in _layers(lines)])
        / copied,
        "induction": by_induction,
        "attention": np.concatenate([np.mean([line["attention"][i] for line in lines], axis=0) for i in _layers(lines)]),
    }


def _layers(lines: list[dict[str, Any]]) -> range:
    return range(len(lines[0]["attention"]))


def ablated(
    model: Any, lines: list[dict[str, Any]], cases: list[Asked], parts: pd.DataFrame, induction: np.ndarray, done: set[int]
) -> Iterator[tuple[int, dict[str, int]]]:
    """(i, whether case i is lost without each of the sets that the other half gives), but for cases that are done."""
    names = [tuple(map(int, each)) for each in parts.loc[parts["part"] == "head", ["layer", "head"]].to_numpy()]
    order = random.Random(0).sample(range(len(lines)), len(lines))
    for fold in (0, 1):
        chosen, held_out = order[fold::2], order[1 - fold :: 2]
        by_kind = scores([lines[k] for k in chosen], parts, induction)
        by_layer = np.mean([lines[k]["fall"] for k in chosen], axis=0)[(parts["part"] == "layer").to_numpy()]
        sizes, n_of_layers = ([n for n in some if n < most] for some, most in ((SIZES, len(names)), (N_LAYERS, len(by_layer))))
        means, draw = mean_writes(model, [cases[k] for k in chosen]), random.Random(fold)
        heads = {
            f"{kind} {k}": [names[i] for i in np.argsort(-by_kind[kind], kind="stable")[:k]] for kind in KINDS for k in sizes
        } | {f"random {k} {again}": draw.sample(names, k) for k in sizes for again in range(DRAWS)}
        layers = {f"layers {k}": np.argsort(-by_layer)[:k].tolist() for k in n_of_layers} | {
            f"random layers {k} {again}": draw.sample(range(len(by_layer)), k) for k in n_of_layers for again in range(DRAWS)
        }
        for k in (k for k in held_out if lines[k]["i"] not in done):
            by_head, exchanged = tried(model, cases[k], list(heads.values()), list(layers.values()), means)
            yield lines[k]["i"], dict(zip([*heads, *layers], by_head + exchanged, strict=True))


# --- tables ------------------------------------------------------------------------------------------------------------------


def tables_of(lines: list[dict[str, Any]], parts: pd.DataFrame, null: bool = False) -> pd.DataFrame:
    """The tables of :func:`reading_layers` again; under the null the same cases count as lost with everything exchanged."""
    found = []
    for line in lines:
        columns = line["null"] if null else line
        n = len(columns["fall"])
        table = parts.iloc[:n].assign(
            fall=columns["fall"], lost=np.array(columns["lost"], dtype=bool), prompt_id=str(line["i"])
        )
        if null:
            table.loc[table["part"] == "all", "lost"] = True
        found.append(table)
    return pd.concat(found, ignore_index=True)


def told(task: str, lines: list[dict[str, Any]], parts: pd.DataFrame) -> str:
    """What the cases of a task show."""
    table = tables_of(lines, parts)
    lost = [line for line in lines if line["lost"][0]]
    n_null = sum(line["null"]["lost"][0] for line in lines)
    said = [f"{task}: {len(lines)} right answers, {len(lost)} lost without the part, {n_null} "
            f"under the null; {np.median([line['seconds'] for line in lines]):.1f} s a case"]  # fmt: skip
    if len(lost) < 2:
        return said[0]
    shares, null = reading_shares(table), reading_shares(tables_of(lost, parts, null=True).query("part in ['all', 'layer']"))
    with_heads = [line for line in lost if len(line["null"]["fall"]) == len(parts)]
    of_heads = reading_shares(tables_of(with_heads, parts, null=True)) if with_heads else null
    for part in ("layer", "group", "head"):
        some = shares[shares["part"] == part]
        if some.empty:
            continue
        any_lost = np.mean([any(np.array(line["lost"])[(parts["part"] == part).to_numpy()]) for line in lost])
        stable = reading_stability(table, part)
        said.append(
            f"  any {part} alone loses {100 * any_lost:.0f} %; rank correlation of two halves {stable:.2f}; first by fall:"
        )
        of_null = (null if part == "layer" else of_heads).set_index(["part", "layer", "head"])
        for row in some.sort_values("fall", ascending=False).head(5).itertuples():
            beside = of_null.loc[(part, row.layer, row.head)] if (part, row.layer, row.head) in of_null.index else None
            name = f"{row.layer}" if part == "layer" else f"{row.layer}.{row.head}"
            said.append(
                f"    {name:6} lost {100 * row.lost:3.0f} % ({100 * row.lost_low:.0f} to {100 * row.lost_high:.0f}), fall "
                f"{row.fall:5.2f} ({row.fall_low:.2f} to {row.fall_high:.2f})"
                + ("" if beside is None else f"; null: {100 * beside.lost:.0f} %, {beside.fall:.2f}")
            )
        said.append(f"    median of the others: lost {100 * some['lost'].median():.0f} %, fall {some['fall'].median():.3f}")
    tried_ones = [line["tried"] for line in lost if "tried" in line]
    if tried_ones:
        sets = {re.sub(r"^(random.* \d+) \d$", r"\1", name): [] for name in tried_ones[0]}
        for each in tried_ones:
            for name, is_lost in each.items():
                sets[re.sub(r"^(random.* \d+) \d$", r"\1", name)].append(is_lost)
        for name, results in sets.items():
            n = len(tried_ones)  # of random sets five draws are no five cases
            low, high = wilson(np.array([np.mean(results)]), n)
            said.append(f"  {name:18} lost {100 * np.mean(results):3.0f} % ({100 * low[0]:.0f} to {100 * high[0]:.0f}) of {n}")
    return "\n".join(said)


def main(words: list[str]) -> None:
    """Run the cases that are missing, and print the tables."""
    say = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    say.add_argument("model")
    for name in ("data", "explained"):
        say.add_argument(f"--{name}", type=Path)
    say.add_argument("--out", type=Path, required=True)
    say.add_argument("--cases", nargs="*", default=[f"{name}={n}" for name, n in CASES.items()], help="TASK=NUMBER ...")
    say.add_argument("--null-heads", type=int, default=16, help="of so many cases of a task groups and heads have a null, too")
    say.add_argument("--no-tries", action="store_true", help="leave out the sets chosen on half of the cases")
    args = say.parse_args(words)
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    model = kvlens.load(args.model)
    parts = parts_of(model)
    write: Callable[[dict[str, Any]], None] = lambda line: _append(args.out, lines, line)  # noqa: E731
    for wanted in args.cases:
        task, n = wanted.split("=")
        of_task = {line["i"]: line for line in lines if line["task"] == task}
        cases: dict[int, Asked] = {}
        for i, put in put_to(model, TASKS[task](model, args), of_task):
            if len(cases) >= int(n):
                break
            if i not in of_task:
                found = {} if put is None else measured(model, put, len(cases) < args.null_heads)
                write({"task": task, "i": i, **found})
                of_task[i] = lines[-1]
            if put is not None:
                cases[i] = put
        right = [of_task[i] for i in cases]
        lost = [line for line in right if line["lost"][0]]
        if len(lost) >= 4 and not args.no_tries:
            together = {x["i"]: x["sets"] for x in lines if x["task"] == f"{task}, tried" and x["of"] == len(lost)}
            if len(together) < len(lost):  # the halves are those of these cases
                chosen = [cases[line["i"]] for line in lost]
                for i, sets in ablated(model, lost, chosen, parts, induction_scores(model), set(together)):
                    together[i] = sets
                    write({"task": f"{task}, tried", "of": len(lost), "i": i, "sets": sets})
            right = [line | ({"tried": together[line["i"]]} if line["i"] in together else {}) for line in right]
        print(told(task, right, parts) if right else f"{task}: no right answer", flush=True)


def parts_of(model: Any) -> pd.DataFrame:
    """The first columns of every table of :func:`reading_layers`."""
    tokens = torch.zeros(4, dtype=torch.long)
    return reading_layers(model, tokens, answer=tokens[:1], without=[(1, 2)])[["part", "layer", "head"]]


def induction_scores(model: Any) -> np.ndarray:
    """[head]: attention to what followed the token's first copy, in random tokens that repeat."""
    table = induction_heads(model, n_sequences=4, n_repeated=40).query("kind == 'prefix_matching'")
    return table.sort_values(["layer", "head"])["score"].to_numpy()


def _append(out: Path, lines: list[dict[str, Any]], line: dict[str, Any]) -> None:
    lines.append(line)
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

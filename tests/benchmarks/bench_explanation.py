"""Explanations of a real model's right answers: is the sentence that states the answer a cause, and is every statement true?

    python tests/benchmarks/bench_explanation.py MODEL --data nq-oracle-half.jsonl.gz --out FILE [--right 60] [--again 12]

MODEL is a folder or GGUF file of a chat model, DATA has lines with ``question``, ``answers``, ``title`` and ``text``. A case
is a question about two or more documents: the passage that answers it, and other rows' passages that do not have the answer,
8 to 20 sentences together, in an order that depends on the seed. Cases whose answer contains no short answer of the data are
counted, and the first ``--wrong`` of them are explained, too, for reading. Of the first ``--cases-again`` cases statements are
run again by plain Transformers (``tests/real/plain_transformers.py``): those that are printed, those that a mark of the answer
rests on, and ``--again`` others. A run is
resumed where it stopped: one JSON line a question. ``--heads N`` chooses what heads the explanations of N right answers,
about the answering passage alone, by several rules, and explains none. ``--dtypes N`` explains N right answers, cut into
sentences, in float32 and in bfloat16, and compares their causes. ``--cases FILE`` explains stored chats instead, such as
those of ``explanation_cases.jsonl``; what each explanation says is in the file of ``--out``, to be read. Printed: cases tried
and right; the share of right answers of which a cause contains the short answer's sentence; causes beside it for each question;
statements run again and false ones; seconds; layers that lose the claim alone.
"""

import argparse
import collections
import gzip
import itertools
import json
import random
import re
import resource
import statistics
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_attribution import right_questions
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "real"))

from plain_transformers import Plain, again, citations_again

import kvlens
from kvlens.explanation import Explained, paragraphs
from kvlens.explanation.heading import asked_for, candidates_of
from kvlens.explanation.reading import wilson
from kvlens.explanation.runs import ENDS, MORE_TOKENS, responses, stop_tokens
from kvlens.explanation.sources import sources_in_words
from kvlens.explanation.steps import Steps
from kvlens.texts import Response

SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"(])")
LEAST, MOST = 8, 16
AT_ONCE, MOST_TOKENS, SHORT = 8, 64, 420
"""Questions that are answered together; tokens of an answer; characters of a passage that is asked about alone."""


def plain_words(text: str) -> str:
    """Words without case, accents and marks, between single blanks."""
    letters = (c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    return f" {re.sub(r'[^a-z0-9]+', ' ', ''.join(letters)).strip()} "


def has_answer(text: str, answers: list[str]) -> bool:
    """Whether it has one of the short answers."""
    return any(plain_words(answer) in plain_words(text) for answer in answers)


def case_of(rows: list[dict[str, Any]], i: int, seed: int) -> dict[str, str] | None:
    """The documents of a case; None where no sentence states the answer."""
    draw, gold = random.Random(f"{seed} {i}"), rows[i]
    if not any(has_answer(sentence, gold["answers"]) for sentence in SENTENCE.split(gold["text"])):
        return None
    chosen, n = [gold], len(SENTENCE.split(gold["text"]))
    while n < LEAST or len(chosen) < 2:
        other = draw.choice(rows)
        m = len(SENTENCE.split(other["text"]))
        if other["title"] in {row["title"] for row in chosen} or has_answer(other["text"], gold["answers"]) or n + m > MOST + 4:
            continue
        chosen.append(other)
        n += m
    draw.shuffle(chosen)
    return {row["title"]: row["text"] for row in chosen}


def accounted(found: Explained, answers: list[str], stating: list[int], names: list[int]) -> list[tuple[str, str]]:
    """The content words of the first, shortest run of a response's words that has a short answer, without those that the
    question has, each with its account: ``stated`` of one that a stating sentence is a source of, whatever the account;
    ``name`` likewise of a document's name that has the short answer."""
    words = found.words[found.words["start"] < found.words["stop"]]
    starts, stops = words["start"].tolist(), words["stop"].tolist()
    runs = ((i, i + n) for n in range(len(words)) for i in range(len(words) - n))
    first, last = next((i, j) for i, j in runs if has_answer(found.response[starts[i] : stops[j]], answers))
    cited, kept = found.citations, []
    for word in words.iloc[first : last + 1].query("account != ''").itertuples():
        if has_answer(found.question, [word.text]):
            continue
        own = set(cited.loc[(cited["response_start"] <= word.start) & (cited["response_stop"] >= word.stop), "unit"])
        account = "stated" if own & set(stating) else "name" if own & set(names) else word.account
        kept.append((word.text, account))
    return kept


def units_with(found: Explained, answers: list[str]) -> tuple[list[int], list[int]]:
    """The sentences that have a short answer, and the documents' names that do."""
    having = found.units[[has_answer(text, answers) for text in found.units["unit_text"]]]
    is_name = having["name"].str.startswith("the name of ")
    return having.loc[~is_name, "unit"].tolist(), having.loc[is_name, "unit"].tolist()


def explained(
    model: Any, plain: Plain | None, row: dict[str, Any], chat: Any, depth: Any, n_again: int, draw: random.Random
) -> dict:
    """One case: what was found, and its statements run again, if there is a program that runs them."""
    began, worked = time.perf_counter(), time.process_time()
    found = kvlens.explain(model, chat, depth=depth)
    seconds, processor = time.perf_counter() - began, time.process_time() - worked
    units = list(found.units[["start", "stop"]].itertuples(index=False, name=None))
    stating, names = units_with(found, row["answers"])
    table = found.statements.query("about == 'units' and role == 'breaking' and gap == 'kept'")
    of_claims = [
        [list(map(int, parts.split("+"))) for parts in table.loc[table["claim"] == i, "parts"]] for i in found.claims["claim"]
    ]
    short = [i for i, text in enumerate(found.claims["text"]) if has_answer(text, row["answers"])]
    causes = of_claims[short[0] if short else found.about]
    sentences = [*itertools.chain(*paragraphs(found)), *sources_in_words(found)]
    printed = sorted({i for sentence in sentences for i in sentence.rows})
    printed = [i for i in printed if found.statements.loc[i, "about"] in ("units", "layers")]
    said = [i for i in printed if isinstance(found.statements.loc[i, "says"], str)]
    others = [i for i in found.statements.index if i not in said and found.statements.loc[i, "about"] in ("units", "layers")]
    chosen = [] if plain is None else said + draw.sample(others, min(n_again, len(others)))
    prompt = chat.tokens(model)
    response = found.response_tokens
    stops, tokenizer = stop_tokens(model), model.tokenizer

    def ends(text: list[int]) -> bool:
        return text[-1] in stops or (len(text) >= len(response) + MORE_TOKENS and tokenizer.decode(text[-1:]).endswith(ENDS))

    false = []
    for i in chosen:
        statement, claim = found.statements.loc[i], found.claims.iloc[int(found.statements.loc[i, "claim"])]
        assert plain is not None
        second = again(plain, prompt, units, response, statement, (int(claim.start), int(claim.stop)), ends)
        says = None if second.text is None else tokenizer.decode(second.text, skip_special_tokens=True)
        same = says is None or says.split() == statement.says.split()
        if abs(second.fall - statement.nats) > 0.01 or not same:
            false.append([int(i), statement.about, statement.parts, statement.nats, second.fall, statement.says, says])
    n_cited, false_cited = (0, []) if plain is None else citations_again(model, plain, found, ends)
    return {
        "question": row["question"],
        "answers": row["answers"],
        "response": found.response,
        "right": has_answer(found.response, row["answers"]),
        "stating": stating,
        "causes": causes,
        "heading_causes": of_claims[found.about],
        "all_causes": of_claims,
        "short_in_claims": bool(short),
        "claims": found.claims[["text", "nats", "cause"]].to_dict("records"),
        "about": found.about,
        "is_whole": found.is_whole,
        "n_units": len(units),
        "n_prompt": len(prompt),
        "layers": [row.parts for row in found.rows("layers", "breaking").itertuples()],
        "keeping": [row.parts for row in found.rows("layers", "keeping").itertuples()],
        "n_tokens": found.n_tokens,
        "seconds": seconds,
        "processor": processor,
        "n_again": len(chosen),
        "false": false,
        "names": names,
        "accounted": accounted(found, row["answers"], stating, names) if has_answer(found.response, row["answers"]) else [],
        "without": found.without,
        "accounts": found.citations["account"].value_counts().to_dict(),
        "n_cited": n_cited,
        "false_cited": false_cited,
        "words": str(found),
        "texts": found.statements[found.statements["says"].notna()][
            ["claim", "about", "role", "parts", "verdict", "kept_words", "nats", "says"]
        ].to_dict("records"),
    }


def summary(cases: list[dict[str, Any]]) -> str:
    """What the cases show."""
    right = [case for case in cases if case["right"]]
    if not right:
        return f"{len(cases)} cases, none right"
    stated = [any(unit in cause for cause in case["causes"] for unit in case["stating"]) for case in right]
    of_any = [[unit for of in case["all_causes"] for cause in of for unit in cause] for case in right]
    any_claim = [bool(set(units) & set(case["stating"])) for units, case in zip(of_any, right, strict=True)]
    heading = [any(unit in cause for cause in case["heading_causes"] for unit in case["stating"]) for case in right]
    holds = [has_answer(case["claims"][case["about"]]["text"], case["answers"]) for case in right]
    beside = [sum(not set(cause) & set(case["stating"]) for cause in case["causes"]) for case in right]
    n_again, false = sum(case["n_again"] for case in cases), sum(len(case["false"]) for case in cases)
    accounts = [{account for _, account in case["accounted"]} for case in right]
    n_stated, n_named = (sum(of <= {"stated", "memory", *more} for of in accounts) for more in ((), ("name",)))
    low, high = wilson(np.array([n_stated / len(right)]), len(right))
    alone = collections.Counter(parts for case in right for parts in case["layers"] if "+" not in parts)
    sizes = collections.Counter(case["layers"][0].count("+") + 1 if case["layers"] else 0 for case in right if case["causes"])
    lines = [
        f"{len(cases)} cases explained, {len(right)} answers right",
        f"a cause has the short answer's sentence: {sum(stated)} of {len(right)} ({100 * statistics.fmean(stated):.0f} %)",
        f"short answer in a claim: {sum(case['short_in_claims'] for case in right)}; of any claim: {sum(any_claim)}; of the "
        f"heading claim: {sum(heading)}; in the heading claim itself: {sum(holds)}",
        f"all words of the short answer cite its sentence or are from memory: {n_stated} of {len(right)} "
        f"({100 * low[0]:.0f} to {100 * high[0]:.0f} %), or a document's name that has it: {n_named}; "
        f"{dict(collections.Counter('+'.join(sorted(of)) for of in accounts))}",
        f"causes beside it: {statistics.fmean(beside):.2f} a question",
        f"statements run again: {n_again}, false: {false}",
        f"marks run again: {sum(case['n_cited'] for case in cases)}, false: {sum(len(case['false_cited']) for case in cases)}",
        f"with a cause: {sum(bool(case['causes']) for case in right)}; size of the first breaking set of layers: {dict(sizes)}",
        f"layers that lose the claim alone: {alone.most_common(8)}",
        f"seconds: median {statistics.median(case['seconds'] for case in right):.1f}, "
        f"largest {max(case['seconds'] for case in right):.1f}",
    ]
    return "\n".join(lines)


def states(claim: str, answers: list[str]) -> bool:
    """Whether a claim has a short answer, or is part of one."""
    return has_answer(claim, answers) or any(plain_words(claim) in plain_words(answer) for answer in answers)


def head_scores(model: Any, chat: Any, answers: list[str]) -> dict[str, Any]:
    """Of each claim, and of other words that may head an explanation, what each rule scores."""
    explaining = Steps.reading(model, chat)
    runs = explaining.runs
    tokens = runs.answer(MOST_TOKENS)
    explaining.response = Response.of(model, explaining.prompt, tokens)
    explaining.log_p = runs.begin(explaining.response, explaining.own[:, :-1])
    (explaining.nothing,) = runs.without([range(len(explaining.units))], wants_text=lambda now: False)
    explaining.find_claims(explaining.nothing)
    candidates = [] if explaining.is_whole else candidates_of(explaining)
    if not candidates:
        return {"text": [], "n_claims": 0}
    spans = [slice(claim.start, claim.stop) for claim in candidates]
    falls = explaining.nothing.falls
    return {
        "text": [claim.text for claim in candidates],
        "n_claims": len(explaining.claims),
        "states": [states(claim.text, answers) for claim in candidates],
        "largest sum": [float(falls[span].sum()) for span in spans],
        "first": [-claim.start for claim in candidates],
        "largest token": [float(falls[span].max()) for span in spans],
        "mean of tokens": [float(falls[span].mean()) for span in spans],
        "what is shown": asked_for(explaining, candidates),
    }


def head_rates(cases: list[dict[str, Any]]) -> str:
    """How often each rule chooses a claim that states the short answer, of the cases that have one, in both halves."""
    lines = []
    for name in ("largest sum", "first", "largest token", "mean of tokens", "what is shown"):
        rates = []
        for half in (cases[::2], cases[1::2]):
            able = [case for case in half if any(case["states"][: case["n_claims"]])] if half else []
            best = [max(range(case["n_claims"]), key=case[name].__getitem__) for case in able]
            right = sum(case["states"][i] for case, i in zip(able, best, strict=True))
            low, high = wilson(np.array([right / max(1, len(able))]), max(1, len(able)))
            rates.append(f"{right} of {len(able)} ({100 * low[0]:.0f} to {100 * high[0]:.0f} %)")
        lines.append(f"{name}: {', '.join(rates)}")
    return "\n".join(lines)


def measured(out: Path) -> list[dict[str, Any]]:
    """What an earlier run of the same command wrote, line by line."""
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []


def on_heads(model: Any, rows: list[dict[str, Any]], out: Path, n: int) -> str:
    """Measure until there are so many right answers; what is there already is kept."""
    done = measured(out)
    order = [i for i in range(len(rows)) if i not in {case["i"] for case in done} and len(rows[i]["text"]) <= SHORT]
    random.Random(5).shuffle(order)
    asked = ((i, {rows[i]["title"]: rows[i]["text"]}) for i in order if len(SENTENCE.split(rows[i]["text"])) > 1)
    for i, chat, answer in answers(model, rows, asked):
        if sum(case["right"] for case in done) >= n:
            break
        right = has_answer(answer, rows[i]["answers"])
        done.append({"i": i, "right": right, **(head_scores(model, chat, rows[i]["answers"]) if right else {})})
        with out.open("a") as out_file:
            out_file.write(json.dumps(done[-1]) + "\n")
    cases = [case for case in done if case["right"] and case["n_claims"]]
    return f"{len(done)} tried, {sum(case['right'] for case in done)} right\n{head_rates(cases)}"


def causes_of(found: Explained) -> list[dict[str, Any]]:
    """Of each claim, the sets of sentences without which it is not said, what it is called, and where it falls by what."""
    each = found.rows("units", "breaking").query("gap == 'kept'").groupby("claim")["parts"].agg(list).to_dict()
    cited = found.citations.groupby("claim")["account"].agg(list).to_dict()
    return [
        {"text": row.text, "causes": sorted(each.get(row.claim, [])), "nats": row.nats, "cited": cited.get(row.claim, [])}
        for row in found.claims.itertuples()
    ]


def on_dtypes(name: str, rows: list[dict[str, Any]], out: Path, n: int, first: int) -> str:
    """Explain the same answers in both dtypes, until there are so many; what is there already is kept."""
    done = measured(out)
    models = {str(dtype): kvlens.load(name, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    exact = models["torch.float32"]
    order = (i for i in range(first, len(rows)) if i not in {case["i"] for case in done})
    asked = ((i, documents) for i in order if (documents := case_of(rows, i, 0)) is not None)
    for i, chat, answer in answers(exact, rows, asked):
        if sum(case["right"] for case in done) >= n:
            break
        case: dict[str, Any] = {"i": i, "right": has_answer(answer, rows[i]["answers"])}
        if case["right"]:
            given = torch.tensor(responses(exact, [chat.tokens(exact)], MOST_TOKENS)[0])
            for dtype, model in models.items():
                worked = time.process_time()
                case[dtype] = causes_of(kvlens.explain(model, chat, answer=given, depth="units"))
                case[f"seconds {dtype}"] = time.process_time() - worked
            said = responses(models["torch.bfloat16"], [chat.tokens(exact)], MOST_TOKENS)[0]
            case["same answer"] = list(said) == given.tolist()
        done.append(case)
        with out.open("a") as out_file:
            out_file.write(json.dumps(case) + "\n")
    right = [case for case in done if case["right"]]
    pairs = [(case["torch.float32"], case["torch.bfloat16"]) for case in right]
    claims = [(a, b) for first, second in pairs for a in first for b in second if a["text"] == b["text"]]
    n_same = sum(case["same answer"] for case in right)
    lines = [
        f"{len(done)} tried, {len(right)} right; bfloat16 says the same answer in {n_same}",
        f"claims: {sum(len(a) for a, _ in pairs)}, {sum(len(b) for _, b in pairs)} in bfloat16; in both: {len(claims)}",
        f"of these with the same causes: {sum(a['causes'] == b['causes'] for a, b in claims)}; "
        f"with the same accounts: {sum(a['cited'] == b['cited'] for a, b in claims)}",
        f"explanations with the same claims and causes: {sum(a == b for a, b in map(_bare, pairs))}",
        f"largest difference of a claim's fall: {max(abs(a['nats'] - b['nats']) for a, b in claims):.2f} nats",
        *(f"seconds {dtype}: {statistics.median(case[f'seconds {dtype}'] for case in right):.0f}" for dtype in models),
    ]
    return "\n".join(lines)


def _bare(pair: tuple[list[dict[str, Any]], ...]) -> list[list[tuple[str, list[str]]]]:
    return [[(claim["text"], claim["causes"]) for claim in claims] for claims in pair]


def chat_of(case: dict[str, Any]) -> kvlens.Chat:
    """The chat of a stored case: messages, or a question about documents."""
    if "messages" in case:
        return kvlens.Chat(case["messages"])
    return kvlens.Chat.ask(case["question"], case["documents"], case.get("system"))


def told(model: Any, case: dict[str, Any], depth: Any) -> dict[str, Any]:
    """What an explanation of a stored case says, and whether it cites what the answer has to rest on."""
    chat, worked = chat_of(case), time.process_time()
    given = None
    if "tokens" in case:  # more than an answer has by itself
        given = torch.tensor(responses(model, [chat.tokens(model)], case["tokens"])[0])
    found = kvlens.explain(model, chat, answer=given, by=case.get("by", "sentence"), depth=depth)
    cited = set(found.citations["unit"])
    named = [
        any(text in u.unit_text or u.unit_text.strip() in text for u in found.units.itertuples() if u.unit in cited)
        for text in case["rests"]
    ]
    return {
        "name": case["name"],
        "units": found.units["unit_text"].tolist(),
        "named": named,
        "words": str(found),
        "n_tokens": found.n_tokens,
        "processor": time.process_time() - worked,
    }


def on_cases(model: Any, cases: Path, out: Path, depth: Any) -> str:
    """Explain the stored cases that are missing."""
    done = measured(out)
    for line in cases.read_text(encoding="utf-8").splitlines():
        if (case := json.loads(line))["name"] in {each["name"] for each in done}:
            continue
        done.append(told(model, case, depth))
        with out.open("a", encoding="utf-8") as out_file:
            out_file.write(json.dumps(done[-1], ensure_ascii=False) + "\n")
        print(f"{done[-1]['name']}, {done[-1]['processor']:.0f} s: {done[-1]['words']}", end="\n\n", flush=True)
    named = sum(sum(each["named"]) for each in done)
    return f"{len(done)} cases; cited are {named} of {sum(len(each['named']) for each in done)} parts that state the answer"


def on_stories(name: str, n: int) -> str:
    """Of a model that ships, on questions of held-out stories that it answers right."""
    model = kvlens.load(name)
    named = exact = lost = either_way = 0
    beside = 0
    for story, question in right_questions(model, n, 6, 7):
        tokens = torch.tensor(story.tokens)
        spans = [(s.start, s.start + len(s.words)) for s in story.sentences]
        prompt, text = tokens[: story.n_prompt_tokens], tokens[question.start : question.value_position]
        answer = tokens[question.value_position : question.value_position + 1]
        found = kvlens.explain(model, prompt, text, by=spans, answer=answer, depth="units")
        breaking = found.rows("units", "breaking").query("gap == 'kept'")["parts"]
        causes = {int(part) for parts in breaking for part in parts.split("+")}
        kept = found.rows("units", "each").query("gap == 'kept' and verdict in ['lost', 'partly']")["parts"]
        lost += bool(causes)
        named += set(question.origins) <= causes
        exact += set(question.origins) == causes
        either_way += set(question.origins) <= causes | set(map(int, kept))
        beside += len(causes - set(question.origins))
    return (
        f"{name}: {n} right answers, {lost} with a cause, {named} name every stating sentence as a cause, {either_way} as one "
        f"or as lost while what follows stays where it stood; {exact} no other cause, {beside} causes beside them in all"
    )


def main(words: list[str]) -> None:
    """Run the cases that are missing, and print the summary."""
    say = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    say.add_argument("model")
    say.add_argument("--data", type=Path)
    say.add_argument("--out", type=Path)
    say.add_argument("--stories", type=int, help="explain so many answers of a model that ships, instead")
    say.add_argument("--heads", type=int, help="choose the heads of so many right answers, instead")
    say.add_argument("--dtypes", type=int, help="explain so many right answers in two dtypes, instead")
    say.add_argument("--cases", type=Path, help="explain the chats of a file instead")
    say.add_argument("--right", type=int, default=60)
    say.add_argument("--wrong", type=int, default=10)
    say.add_argument("--again", type=int, default=12)
    say.add_argument("--cases-again", type=int, default=20, help="of so many cases statements are run again")
    say.add_argument("--depth", default="layers")
    say.add_argument("--seed", type=int, default=0)
    say.add_argument("--first", type=int, default=0)
    say.add_argument("--device", default="cpu")
    say.add_argument("--dtype", default="float32")
    say.add_argument("--seconds", type=float, default=float("inf"))
    say.add_argument("--shard", default="0/1", help="every n-th row from the i-th on, as i/n")
    args = say.parse_args(words)
    if args.stories:
        print(on_stories(args.model, args.stories))
        return
    if args.cases:
        print(on_cases(kvlens.load(args.model, device=args.device), args.cases, args.out, args.depth))
        return
    with gzip.open(args.data, "rt", encoding="utf-8") as data:
        rows = [json.loads(line) for line in data]
    if args.heads:
        print(on_heads(kvlens.load(args.model, device=args.device), rows, args.out, args.heads))
        return
    if args.dtypes:
        print(on_dtypes(args.model, rows, args.out, args.dtypes, args.first))
        return
    lines = measured(args.out)
    cases, done = [line for line in lines if "causes" in line], {line["i"] for line in lines}
    model = kvlens.load(args.model, device=args.device, dtype=getattr(torch, args.dtype))
    plain = plain_model(Path(args.model), args.device) if args.cases_again else None
    began, tried = time.perf_counter(), len(done)
    shard, n_shards = map(int, args.shard.split("/"))
    chosen = (i for i in range(args.first + shard, len(rows), n_shards) if i not in done)
    asked = ((i, documents) for i in chosen if (documents := case_of(rows, i, args.seed)) is not None)
    for i, chat, answer in answers(model, rows, asked):
        n_right = sum(case["right"] for case in cases)
        if n_right >= args.right or time.perf_counter() - began > args.seconds:
            break
        tried += 1
        case: dict[str, Any] = {"right": has_answer(answer, rows[i]["answers"])}
        if case["right"] or len(cases) - n_right < args.wrong:
            second = plain if sum(case["n_again"] > 0 for case in cases) < args.cases_again else None
            case = explained(model, second, rows[i], chat, args.depth, args.again, random.Random(i))
            cases.append(case)
            print(i, case["right"], f"{case['seconds']:.1f} s, {case['n_again']} again, {len(case['false'])} false", flush=True)
        with args.out.open("a") as out_file:
            out_file.write(json.dumps({"i": i, **case}) + "\n")
    print(f"{tried} questions tried\n{summary(cases)}")
    print(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB at most")


def plain_model(folder: Path, device: str) -> Plain:
    where = dict(gguf_file=folder.name) if folder.suffix == ".gguf" else {}
    hf = AutoModelForCausalLM.from_pretrained(
        folder.parent if where else folder, dtype=torch.float32, attn_implementation="written_out", **where
    )
    return Plain(hf.eval().to(device))


def answers(model: Any, rows: list[dict[str, Any]], asked: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any, str]]:
    """Row by row the chat and its greedy answer, up to 64 tokens; `AT_ONCE` are read together."""
    for group in iter(lambda: list(itertools.islice(asked, AT_ONCE)), []):
        chats = [kvlens.Chat.ask(rows[i]["question"].rstrip("?").capitalize() + "?", documents) for i, documents in group]
        texts = responses(model, [chat.tokens(model) for chat in chats], MOST_TOKENS)
        for (i, _), chat, text in zip(group, chats, texts, strict=True):
            yield i, chat, str(model.tokenizer.decode(text, skip_special_tokens=True))


if __name__ == "__main__":
    main(sys.argv[1:])

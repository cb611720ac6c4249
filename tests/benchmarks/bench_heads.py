"""Retrieval heads and reading heads of a real model: whether the lists come out again, and whether copying needs the heads.

    python tests/benchmarks/bench_heads.py MODEL --data ruler-1024.jsonl.gz [--tokenizer smollm2] --out FILE [--cases 10]

A case of RULER (Hsieh et al. 2024) is a chat: a haystack with a sentence that gives a number or an identifier, and a question
for it. The response is begun with " It is". In a short case sentences of the haystack that give no number, drawn with a seed,
are left out until 256 tokens are left. One JSON line for each measurement; what is in the file is not run again.

- ``retrieval``: :func:`kvlens.analyses.retrieval_heads` on the short case; ``long``, on the case as RULER has it.
- ``other number``: the same on the short case with another case's number as the answer, which is nowhere in the haystack.
- ``reading``: :func:`kvlens.analyses.reading_heads` on the short case, where the model says the number, and its null.
- ``induction``: attention to what followed the first copy of random tokens, of two seeds and two lengths.
- ``tried``: the answer's log-probability without the first 5, 10 and 20 heads of each list, and without as many others of the
  same layers (five draws), where the model says the answer. Lists are of the other half of the cases; a head is replaced, where
  the answer is read, by the mean of what it writes there in the other half. The same of the loss on essays, nats a token.

Printed: the heads of each list; how those of some cases agree with those of as many others (mean and 95 % of 200 splits), and
how the lists do; what is lost without the heads. Intervals: 95 %, bootstrap over cases.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_ruler
import numpy as np
import pandas as pd
import torch
from bench_reading_layers import Asked, log_p_without, mean_writes
from kvlens.analyses.heads.retrieval import bootstrapped

import kvlens
from kvlens import convert_prompt
from kvlens.analyses import induction_heads, reading_heads, retrieval_heads
from kvlens.explanation.claims import walk
from kvlens.units import spans_of

NAMED = 0.1
"""From this score on Wu et al. (2024) call a head a retrieval head."""
IDENTIFIER = "niah_single_3"
TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_1", IDENTIFIER)
SHORT, SIZES, DRAWS, N_SPLITS, TOP = 256, (5, 10, 20), 5, 200, 10
INDUCTION = {"induction": (0, 50), "induction, seed 1": (1, 50), "induction, length 25": (0, 25)}
"""Seeds, and tokens that repeat."""
PREFIX = " It is"
LISTS = ("retrieval", "reading", "induction")
Row = dict[str, Any]
Head = tuple[int, int]


# --- cases -------------------------------------------------------------------------------------------------------------------


def cases_of(data: Path, tokenizer: str, n: int) -> list[Row]:
    """The first cases of each task, numbered, with the sentence that gives the answer."""
    numbered = {(case["task"], case["number"]): case for case in bench_ruler.cases_of(data, tokenizer, n)}
    found = []
    for number in range(n):
        for task in TASKS:
            row = numbered[task, number]
            (needle,) = re.findall(rf"One of the special magic \w+ for [^.]* is: {row['outputs'][0]}\.", row["input"])
            found.append({**row, "needle": needle})
    return found


def chat_of(text: str) -> kvlens.Chat:
    return kvlens.Chat([{"role": "user", "content": text}], question=text.rsplit("\n", 1)[1])


def shortened(model: Any, case: Row, most: int = SHORT) -> str:
    """The input without sentences of its haystack, drawn at random, until its chat has so many tokens."""
    haystack, question = case["input"].rsplit("\n", 1)
    sentences = [haystack[start:stop] for start, stop in spans_of(haystack, "sentence")]
    plain = [i for i, sentence in enumerate(sentences) if "special magic" not in sentence and i > 2]
    random.Random(case["number"]).shuffle(plain)
    text = case["input"]
    while plain and len(chat_of(text).tokens(model)) > most:
        for i in plain[: max(1, len(plain) // 10)]:
            sentences[i] = ""
        plain = plain[max(1, len(plain) // 10) :]
        text = f"{''.join(sentences).rstrip()}\n{question}"
    return text


def asked(model: Any, text: str, case: Row) -> Asked:
    between, answer = (model.to_tokens(x, prepend_bos=False)[0] for x in (PREFIX, f" {case['outputs'][0]}"))
    prompt = chat_of(text).tokens(model)
    none = torch.zeros(len(prompt), dtype=torch.bool)
    return Asked(prompt, none, none, between, answer)


def right(model: Any, case: Asked) -> bool:
    """Whether each token of the answer is what the model says next."""
    tokens = torch.cat([case.prompt, case.between, case.answer])
    said = model.logits_on(tokens[None, :-1], len(case.answer))[0].argmax(dim=-1)
    return bool((said == case.answer).all())


# --- measurements ------------------------------------------------------------------------------------------------------------


def measured(model: Any, what: str, case: Row, others: list[Row]) -> Row:
    """One line: the scores of all heads, by layer, then head."""
    began = time.process_time()
    text = case["input"] if what == "long" else shortened(model, case)
    said = case["outputs"][0]
    if what == "other number":
        said = next(other["outputs"][0] for other in others if other["number"] != case["number"])
    table = (reading_heads if what == "reading" else retrieval_heads)(
        model, [(chat_of(text), PREFIX, f" {said}", case["needle"])]
    )
    line = {"scores": table["score"].round(4).tolist(), "null": table["null"].round(4).tolist()}
    line["n_tokens"] = len(chat_of(text).tokens(model))
    if what == "retrieval":
        line["right"] = right(model, asked(model, text, case))
    return line | {"seconds": round(time.process_time() - began, 1)}


def by_induction(model: Any, seed: int, n: int) -> Row:
    """One line: the same of random tokens that repeat."""
    began = time.process_time()
    table = induction_heads(model, seed=seed, n_repeated=n).query("kind == 'prefix_matching'").sort_values(["layer", "head"])
    line = {name: table[of].round(4).tolist() for name, of in (("scores", "score"), ("null", "null"))}
    return line | {"stability": table["stability"].iloc[0], "seconds": round(time.process_time() - began, 1)}


def like_layers(heads: list[Head], n_heads: int, draw: random.Random) -> list[Head]:
    """As many other heads of the same layers, or all others of a layer that has fewer."""
    found = []
    for layer in sorted({layer for layer, _ in heads}):
        named = [head for at, head in heads if at == layer]
        others = [head for head in range(n_heads) if head not in named]
        found += [(layer, head) for head in draw.sample(others, min(len(named), len(others)))]
    return found


def sets_of(scores: dict[str, np.ndarray], n_heads: int, seed: int) -> dict[str, list[Head]]:
    """The first heads of each list, and others of their layers."""
    found, draw = {}, random.Random(seed)
    for name, of_heads in scores.items():
        order = np.argsort(-of_heads, kind="stable")
        for k in SIZES:
            first = [divmod(int(i), n_heads) for i in order[:k]]
            found[f"{name} {k}"] = first
            found |= {f"like {name} {k}, {again}": like_layers(first, n_heads, draw) for again in range(DRAWS)}
    return found


@torch.no_grad()
def tried(model: Any, lines: list[Row], cases: list[Row], induction: np.ndarray, done: set[Any]) -> Iterator[Row]:
    """One line a case: by set of heads, the answer's fall in nats without it, and whether the answer is lost."""
    known = {(line["what"], line["task"], line["number"]): line for line in lines if line["what"] not in INDUCTION}
    cases = [case for case in cases if known["retrieval", case["task"], case["number"]]["right"]]
    of = {(case["task"], case["number"]): asked(model, shortened(model, case), case) for case in cases}
    for half in (0, 1):
        other = [key for key in of if key[1] % 2 != half]
        held_out = [case for case in cases if case["number"] % 2 == half]
        if not other or all((case["task"], case["number"]) in done for case in held_out):
            continue
        scores = {
            what: np.mean([known[what, *key]["scores"] for key in other if (what, *key) in known], axis=0) for what in LISTS[:2]
        }
        sets = sets_of(scores | {"induction": induction}, model.cfg.n_heads, half)
        means = mean_writes(model, [of[key] for key in other])
        essays = [case for case in cases if case["task"] == "niah_single_2"][:2]
        texts = [model.to_tokens(case["input"].split("\n", 2)[-1][:2000])[0, :65] for case in essays]
        losses = sum(_losses(model, text, list(sets.values()), means) for text in texts) / max(1, len(texts))
        for case in held_out:
            here = of[case["task"], case["number"]]
            whole = convert_prompt(model, here.prompt[:-1])
            log_p = log_p_without(model, here, whole, list(sets.values()), means)
            walked = walk(log_p[0], log_p[1:], here.answer)
            falls, lost = walked.falls.sum(dim=-1).tolist(), (walked.firm < len(here.answer)).int().tolist()
            line = {"what": "tried", "task": case["task"], "number": case["number"], "n_answer": len(here.answer)}
            line |= {"fall": dict(zip(sets, falls, strict=True)), "lost": dict(zip(sets, lost, strict=True))}
            yield line | {"text": dict(zip(sets, (losses[1:] - losses[0]).tolist(), strict=True))}


def _losses(model: Any, tokens: torch.Tensor, sets: list[list[Head]], means: Any) -> torch.Tensor:
    """The mean loss of a text with no head and with each set of heads replaced."""
    nothing = Asked(tokens[:2], tokens[:2], tokens[:2], tokens[:0], tokens[2:])
    log_p = log_p_without(model, nothing, convert_prompt(model, tokens[:1]), sets, means)
    return -log_p.gather(-1, tokens[2:].expand(len(log_p), -1)[..., None])[..., 0].mean(dim=-1)


# --- tables ------------------------------------------------------------------------------------------------------------------


def halves(values: np.ndarray, n: int, seed: int = 0) -> str:
    """Of the means over ``n`` cases and over ``n`` others: how the two orders of heads agree; mean and 95 % of the splits."""
    draw, found = np.random.default_rng(seed), []
    for _ in range(N_SPLITS):
        order = draw.permutation(len(values))
        found.append(alike(values[order[:n]].mean(axis=0), values[order[n : 2 * n]].mean(axis=0)))
    mean, (low, high) = np.mean(found, axis=0), np.quantile(found, [0.025, 0.975], axis=0)
    ranks, shared = (f"{mean[i]:.2f} ({low[i]:.2f} to {high[i]:.2f})" for i in range(2))
    return f"{n} cases and {n} others: rank correlation {ranks}, {shared} of ten the same"


def alike(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Spearman's rank correlation, and how many of the first ten are the same."""
    first = [set(np.argsort(-each, kind="stable")[:TOP]) for each in (one, other)]
    ranks = [pd.Series(each).rank() for each in (one, other)]
    return float(ranks[0].corr(ranks[1])), len(first[0] & first[1])


def told(lines: list[Row], n_heads: int) -> Iterator[str]:
    means = {}
    for what in ("retrieval", "long", "other number", "reading", "reading, null", *INDUCTION):
        own = [line for line in lines if line["what"] == what.removesuffix(", null")]
        if not own:
            continue
        values = np.array([line["null" if what.endswith("null") else "scores"] for line in own])
        means[what], of_null = values.mean(axis=0), np.mean([line["null"] for line in own])
        yield f"{what}: {len(own)} cases, {np.median([line['seconds'] for line in own]):.1f} s each; null {of_null:.3f}"
        if len(own) > 1:
            yield from told_of_cases(means[what], values, [line["task"] for line in own], n_heads)
        else:
            yield "    " + named(means[what], n_heads)
    for i, one in enumerate(means):
        for other in list(means)[i + 1 :]:
            yield "{} and {}: {:.2f}, {} of ten".format(one, other, *alike(means[one], means[other]))
    yield from told_of_tries([line for line in lines if line["what"] == "tried"])


def named(scores: np.ndarray, n_heads: int) -> str:
    """The first ten heads."""
    return "; ".join(f"{i // n_heads}.{i % n_heads} {scores[i]:.2f}" for i in np.argsort(-scores, kind="stable")[:TOP])


def told_of_cases(mean: np.ndarray, values: np.ndarray, tasks: list[str], n_heads: int) -> Iterator[str]:
    low, high = bootstrapped(values, 0)
    yield f"  {(mean >= NAMED).sum()} heads of {len(mean)} from {NAMED} on, {(low >= NAMED).sum()} with their interval"
    yield f"    {named(mean, n_heads)}"
    around = (f"{low[i]:.2f} to {high[i]:.2f}" for i in np.argsort(-mean, kind="stable")[:TOP])
    yield f"    {'; '.join(around)}"
    yield from (f"  {halves(values, n)}" for n in sorted({2, 5, 10, len(values) // 2}) if 2 * n <= len(values))
    by_task = {task: values[[each == task for each in tasks]].mean(axis=0) for task in dict.fromkeys(tasks)}
    for task, own in by_task.items():
        yield f"  {task}: {named(own, n_heads)}"
        for other in list(by_task)[: list(by_task).index(task)]:
            yield "    and {}: {:.2f}, {} of ten".format(other, *alike(own, by_task[other]))


def told_of_tries(lines: list[Row]) -> Iterator[str]:
    if not lines:
        return
    yield f"{len(lines)} right answers; without heads: lost, fall of the answer in nats, rise of the loss on essays"
    by_set = {name: re.sub(r", \d$", "", name) for name in lines[0]["fall"]}
    for name in dict.fromkeys(by_set.values()):
        of = [each for each, of_set in by_set.items() if of_set == name]
        lost, fall, text = (
            np.array([np.mean([line[x][each] for each in of]) for line in lines]) for x in ("lost", "fall", "text")
        )
        low, high = bootstrapped(np.stack([lost, fall], axis=1), 0)
        yield (
            f"  {name:18} {100 * lost.mean():3.0f} % ({100 * low[0]:.0f} to {100 * high[0]:.0f}), "
            f"{fall.mean():5.2f} ({low[1]:.2f} to {high[1]:.2f}), {text.mean():.2f}"
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as kvlens.load takes it")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", default="smollm2", help="whose cases the model is given")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=10, help="of each task")
    parser.add_argument("--reading", type=int, default=10, help="of each task with numbers")
    parser.add_argument("--long", type=int, default=5, help="of each task as RULER has them")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model, cases = kvlens.load(args.model), cases_of(args.data, args.tokenizer, args.cases)
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []

    def write(line: Row) -> None:
        lines.append(line)
        with args.out.open("a") as out:
            out.write(json.dumps(line) + "\n")

    for what, given in INDUCTION.items():
        if not any(line["what"] == what for line in lines):
            write({"what": what, **by_induction(model, *given)})
    done: Callable[[str], set[Any]] = lambda what: {(x["task"], x["number"]) for x in lines if x["what"] == what}  # noqa: E731
    most = {"retrieval": args.cases, "other number": args.cases, "reading": args.reading, "long": args.long}
    for what, n in most.items():
        wrong = {(x["task"], x["number"]) for x in lines if x["what"] == "retrieval" and not x["right"]}
        for case in cases:
            key = case["task"], case["number"]
            if case["number"] >= n or key in done(what) or (what == "reading" and (key in wrong or case["task"] == IDENTIFIER)):
                continue
            others = [other for other in cases if other["task"] == case["task"]]
            write({"what": what, "task": key[0], "number": key[1], **measured(model, what, case, others)})
    induction = np.array(next(line["scores"] for line in lines if line["what"] == "induction"))
    for line in tried(model, list(lines), cases, induction, done("tried")):
        if (line["task"], line["number"]) not in done("tried"):
            write(line)
    print(*told(lines, model.cfg.n_heads), sep="\n")


if __name__ == "__main__":
    main()

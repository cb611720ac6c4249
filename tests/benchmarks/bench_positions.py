"""Where the answer to a question about a document is decided: at the fact's own positions, or at later ones?

    python tests/benchmarks/bench_positions.py MODEL --data nq-oracle-half.jsonl.gz --explained FILE --out FILE [--cases 60]

"Models take notes at prefill" (arXiv 2606.17107) says that a fact's own keys and values carry less than 1 % of the decision,
and later positions the rest. EXPLAINED is what ``bench_explanation.py`` wrote: of each right answer with a cause, the sentence
with the short answer that is one. The prompt is converted with that sentence and without it (its gap kept); what the prompt
without it leaves at some positions, in all layers, then takes the place of what the whole prompt leaves there:

- ``fact``: at the sentence's own positions, which the prompt without it does not have;
- ``later``: at all behind it; of these ``text`` in front of the question, ``question``, and ``marks`` behind the question;
- ``all`` of them: the prompt without the sentence.

A row is the fall of the answer's log-probability, in nats, over those of its tokens that fall by more than ln 4 under ``all``
(the decision). Null: the same for another sentence of the prompt, drawn by the case's number, on the same tokens. One JSON line
a case, resumable. Printed: means, and the share of the whole fall that each set of positions alone takes, over all cases
together, with 95 % intervals (bootstrap over cases).
"""

import argparse
import gzip
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_explanation import case_of
from kvlens.analyses.attribution.terms import PositionExchange, Terms

import kvlens
from kvlens import counterfactuals
from kvlens.chat import prompt_layout
from kvlens.explanation.exchanges import Place, places_of, position_groups
from kvlens.units import Unit, cut, positions_of

FIRM = math.log(4)
ROWS = ("fact", "later", "text", "question", "marks", "all")


def sets_of(own: torch.Tensor, places: Sequence[Place]) -> dict[str, list[int]]:
    """The positions of each row; ``own`` is True at the sentence's."""
    found = position_groups(own, places)
    text = found.get("document", []) + found.get("between", [])
    question, marks = found.get("question", []), found.get("end", [])
    later = text + question + marks
    return {
        "fact": found["cause"],
        "later": later,
        "text": text,
        "question": question,
        "marks": marks,
        "all": found["cause"] + later,
    }


@torch.no_grad()
def falls_of(
    model: Any, read: Terms, tokens: torch.Tensor, response: torch.Tensor, unit: Unit, places: Sequence[Place]
) -> torch.Tensor:
    """[row, response token], in nats: by how much each falls with each set of positions exchanged."""
    (own,) = positions_of([unit], len(tokens) - 1)
    sets = sets_of(own, places)
    exchange = PositionExchange(read, counterfactuals(model, tokens[:-1], own[None]))
    chosen = torch.zeros(1 + len(ROWS), len(exchange.parts), dtype=torch.bool)
    for row, name in enumerate(ROWS, 1):
        chosen[row, sets[name]] = True
    text = torch.cat([tokens[-1:], response[:-1]])
    log_p = []
    for some in chosen.split(exchange.at_once):
        with model.kv_bias(exchange.biases(some)):
            logits = model.logits_on(text.expand(len(some), -1), len(text))
        log_p.append(logits.double().log_softmax(dim=-1).gather(-1, response.expand(len(some), -1)[..., None])[..., 0])
    rows = torch.cat(log_p)
    return rows[0] - rows[1:]


def case(model: Any, chat: Any, explained: dict[str, Any], i: int) -> dict[str, Any] | None:
    """The falls of one case; None where the sentence has no token that falls."""
    layout = prompt_layout(model, chat)
    tokens, units = layout.tokens, cut(model, layout, "sentence")
    causes = {unit for cause in explained["causes"] for unit in cause}
    unit = units[next(unit for unit in explained["stating"] if unit in causes)]
    places = places_of(layout, len(tokens))
    response = model.to_tokens(explained["response"], prepend_bos=False)[0]
    read = Terms.of_prompt(model, tokens[:-1])
    falls = falls_of(model, read, tokens, response, unit, places)
    decision = falls[ROWS.index("all")] > FIRM
    if not bool(decision.any()):
        return None
    other = random.Random(i).choice([each for k, each in enumerate(units) if k not in causes and k not in explained["stating"]])
    null = falls_of(model, read, tokens, response, other, places)
    return {
        "tokens": int(decision.sum()),
        **{name: float(falls[row, decision].sum()) for row, name in enumerate(ROWS)},
        "null": {name: float(null[row, decision].sum()) for row, name in enumerate(ROWS)},
    }


def summary(found: list[dict[str, Any]], seed: int = 0) -> str:
    """What the cases show together."""
    if not found:
        return "no cases"
    table = np.array([[each[name] for name in ROWS] for each in found])
    null = np.array([[each["null"][name] for name in ROWS] for each in found])
    again = np.random.default_rng(seed).integers(len(found), size=(10_000, len(found)))
    lines = [f"{len(found)} cases, {sum(each['tokens'] for each in found)} tokens", "nats a case, and under the null:"]
    lines += [f"  {name:9}{table[:, k].mean():8.2f}{null[:, k].mean():8.2f}" for k, name in enumerate(ROWS)]
    whole = table[:, ROWS.index("all")]
    for name in ROWS[:-1]:
        part = table[:, ROWS.index(name)]
        low, high = np.quantile(part[again].sum(axis=1) / whole[again].sum(axis=1), [0.025, 0.975])
        lines.append(
            f"{name} alone: {100 * part.sum() / whole.sum():.1f} % of the whole fall ({100 * low:.1f} to {100 * high:.1f})"
        )
    more = int((table[:, ROWS.index("fact")] > table[:, ROWS.index("later")]).sum())
    return "\n".join([*lines, f"the fact's own positions cost more than all later ones in {more} of {len(found)}"])


def main(words: list[str]) -> None:
    """Run the cases that are missing, and print the summary."""
    say = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    say.add_argument("model")
    for name in ("data", "explained", "out"):
        say.add_argument(f"--{name}", type=Path, required=True)
    say.add_argument("--cases", type=int, default=60)
    args = say.parse_args(words)
    with gzip.open(args.data, "rt", encoding="utf-8") as data:
        rows = [json.loads(line) for line in data]
    explained = [each for line in args.explained.read_text().splitlines() if "causes" in (each := json.loads(line))]
    chosen = [
        each
        for each in explained
        if each["right"] and set(each["stating"]) & {unit for cause in each["causes"] for unit in cause}
    ][: args.cases]
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    model = kvlens.load(args.model)
    for each in chosen:
        if (i := each["i"]) in {line["i"] for line in lines}:
            continue
        documents = case_of(rows, i, 0)
        assert documents is not None
        chat = kvlens.Chat.ask(rows[i]["question"].rstrip("?").capitalize() + "?", documents)
        lines.append({"i": i, **(case(model, chat, each, i) or {})})
        with args.out.open("a") as out_file:
            out_file.write(json.dumps(lines[-1]) + "\n")
    print(summary([line for line in lines if "all" in line]))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Answers about facts that a document states otherwise than the world: from the context, or from memory?

    python tests/benchmarks/bench_context_or_memory.py MODEL --data relations.json --out FILE [--facts 60] [--layers]

MODEL is a folder or GGUF file of a chat model, DATA a list of relations with ``name``, ``templates`` and ``samples`` of
``subject`` and ``object``. Each fact is stated twice, once with another subject's object and once with its own, between the
sentences of two other relations, and asked about by one of :data:`QUESTIONS` or, with ``--complete``, by its template as a
sentence to be completed. Printed: how often each origin comes about, with its 95 % interval; and, with ``--layers``, the layers
that alone lose an answer from the context. Written: a row for each fact.
"""

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import kvlens
from kvlens.explanation.from_memory import ORIGINS, StatedFact, context_or_memory
from kvlens.explanation.reading import wilson

COMPLETE = "Complete this sentence with the name or the word that is missing, in a few words: {} ..."
QUESTIONS = {
    "city in country": "In which country is {}?",
    "company CEO": "Who is the CEO of {}?",
    "company hq": "In which city are the headquarters of {}?",
    "country capital city": "What is the capital city of {}?",
    "country currency": "What is the official currency of {}?",
    "country language": "Which language do people in {} speak?",
    "country largest city": "What is the largest city in {}?",
    "food from country": "Which country does {} come from?",
    "landmark in country": "In which country is {}?",
    "landmark on continent": "On which continent is {}?",
    "person lead singer of band": "Which band is {} the lead singer of?",
    "person father": "What is the name of {}'s father?",
    "person mother": "What is the name of {}'s mother?",
    "person native language": "Which language does {} speak?",
    "person occupation": "What does {} work as?",
    "person plays instrument": "Which instrument does {} play?",
    "person sport position": "In which position does {} play?",
    "plays pro sport": "Which sport does {} play?",
    "person university": "Which university did {} attend?",
    "pokemon evolution": "What does {} evolve into?",
    "president birth year": "In which year was {} born?",
    "president election year": "In which year was {} elected?",
    "product by company": "Which company created {}?",
    "star constellation name": "Which constellation is {} part of?",
    "superhero archnemesis": "Who is the archnemesis of {}?",
    "superhero person": "What is the secret identity of {}?",
}
"""By the name of the relation."""
LONGEST = 3
"""Words of an object."""


def facts_of(relations: list[dict[str, Any]], n: int, seed: int, is_true: bool, complete: bool) -> list[StatedFact]:
    """Facts of all relations in turn, each with another object than its own, or with its own."""
    draw, chosen, found = random.Random(seed), list(relations), []
    draw.shuffle(chosen)
    while len(found) < n:
        relation = chosen[len(found) % len(chosen)]
        samples = [each for each in relation["samples"] if len(each["object"].split()) <= LONGEST]
        subject = draw.choice(samples)
        own = {each["object"].casefold() for each in relation["samples"] if each["subject"] == subject["subject"]}
        others = sorted({each["object"] for each in samples if each["object"].casefold() not in own})
        if len(others) < 2:
            chosen.remove(relation)
            continue
        false, other = draw.sample(others, 2)
        around = []
        for beside in draw.sample([each for each in relations if each is not relation], 2):
            sample = draw.choice(beside["samples"])
            around.append(f"{beside['templates'][0].format(sample['subject'])} {sample['object']}.")
        begins = relation["templates"][0].format(subject["subject"])
        fact = StatedFact(
            sentence=f"{begins.replace('{', '').replace('}', '')} {{}}.",
            object=subject["object"] if is_true else false,
            other=other,
            question=COMPLETE.format(begins) if complete else QUESTIONS[relation["name"]].format(subject["subject"]),
            before=around[0],
            behind=around[1],
        )
        if all(name.casefold() not in fact.question.casefold() for name in (fact.object, false, other)):
            found.append(fact)
    return found


def told(table: pd.DataFrame) -> str:
    """How often each origin comes about."""
    lines = []
    for origin in ("from the context", "from memory", "both agree", "neither"):
        n = int((table["origin"] == origin).sum())
        (low,), (high,) = wilson(np.array([n / len(table)]), len(table))
        lines.append(f"{origin}: {n} of {len(table)} ({100 * low:.0f} to {100 * high:.0f} %)")
    layers = Counter(layer for row in table["layers"] for layer in row.split(",") if layer)
    return "; ".join(lines) + (f"; layers that lose it alone: {layers.most_common(6)}" if layers else "")


def main(words: list[str]) -> None:
    """Ask about the facts, stated falsely and truly."""
    say = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    say.add_argument("model")
    say.add_argument("--data", type=Path, required=True)
    say.add_argument("--out", type=Path, required=True)
    say.add_argument("--facts", type=int, default=60)
    say.add_argument("--seed", type=int, default=0)
    say.add_argument("--complete", action="store_true", help="ask for the end of the sentence")
    say.add_argument("--layers", action="store_true")
    args = say.parse_args(words)
    relations, model = json.loads(args.data.read_text()), kvlens.load(args.model)
    tables = []
    for is_true in (False, True):
        table = context_or_memory(
            model, facts_of(relations, args.facts, args.seed, is_true, args.complete), args.layers and not is_true
        )
        print(f"stated {'truly' if is_true else 'falsely'}: {told(table)}", flush=True)
        tables.append(table.assign(is_true=is_true))
        pd.concat(tables)[[*ORIGINS, "is_true"]].to_json(args.out, orient="records", lines=True, force_ascii=False)


if __name__ == "__main__":
    main(sys.argv[1:])

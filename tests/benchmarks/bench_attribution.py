"""How well methods of attribution tell what the model does: all subsets of a story's sentences, every pass counted.

    python tests/benchmarks/bench_attribution.py [--model facts-gpt2] [--stories 60] [--facts 8] [--seed 0] [--small]

For stories that the model answers rightly, the log-probability of the answer is measured with every subset of the sentences
kept. A method sees some of the subsets; what it predicts for the *others* is compared:

- LDS: rank correlation of predicted and true log-probability over the subsets that it has not read (ContextCite's linear
  datamodeling score, arXiv 2409.00729), and the same among the subsets with the stating sentence kept, and among those without;
- top-1: the share of stories in which the largest effect is that of the sentence that states the fact; of two hops (models
  facts-hops-*), the share in which the two largest are those of both sentences that the answer needs;
- drop: by how much the log-probability falls, in nats, when the two sentences of largest effect are deleted;
- passes: read tokens, in passes over prompt and text.

Beside them: the additive ceiling (least squares on all subsets, in sample) and the one-bit oracle (is the stating sentence
kept; of two hops, are both). Differences are paired over stories, with a bootstrap interval of 95 %.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from kvlens.analyses.attribution.answers import Question
from kvlens.analyses.attribution.methods import ContextCite, InteractionFit, LeaveOneOut, subset_scores

from kvlens import HookedKVTransformer
from kvlens.tasks.facts import FactsTask, Story, StoryQuestion, answers_after_story
from kvlens.units import Unit

BUDGETS = (16, 32, 64)


Asked = tuple[Question, list[Unit], tuple[int, ...]]
"""A question, the story's sentences, and the numbers of those that the answer needs."""


def right_questions(
    model: HookedKVTransformer, n_stories: int, n_facts: int, seed: int, n_origins: int | None = None
) -> list[tuple[Story, StoryQuestion]]:
    """Rightly answered questions of held-out stories: of each story the first one whose answer needs ``n_origins`` sentences,
    or as many as the model has hops."""
    hops = 2 if model.cfg.d_vocab == FactsTask(hops=2).d_input else 1
    length = min(FactsTask().length, model.cfg.n_ctx)
    task = FactsTask(min_facts=n_facts, max_facts=n_facts, length=length, hops=hops)
    found: list[tuple[Story, StoryQuestion]] = []
    generator = torch.Generator().manual_seed(seed)
    while len(found) < n_stories:
        for story in task.stories(32, generator, "heldout"):
            chosen = [q for q in story.questions if len(q.origins) == (n_origins or hops)][:1]
            first = [replace(q, start=story.n_prompt_tokens, repeated=False) for q in chosen]
            story = replace(story, questions=tuple(first))
            if first and bool(answers_after_story(model, [story]).is_right[0]):
                found.append((story, first[0]))
    return found[:n_stories]


def asked(model: HookedKVTransformer, story: Story, question: StoryQuestion) -> Asked:
    tokens = torch.tensor(story.tokens)
    prompt = tokens[: story.n_prompt_tokens]
    text = tokens[question.start : question.value_position]
    units = [Unit("", " ".join(s.words), s.start, s.start + len(s.words)) for s in story.sentences]
    return (
        Question.of(model, prompt, text, tokens[question.value_position : question.value_position + 1]),
        units,
        question.origins,
    )


def rank_correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Spearman's; 0 where one of them is the same everywhere, and NaN for fewer than three subsets."""
    if len(a) < 3:
        return float("nan")
    ranks = [pd.Series(x.numpy()).rank() for x in (a, b)]
    return float(ranks[0].corr(ranks[1])) if all(float(rank.std()) > 0 for rank in ranks) else 0.0


def scored(
    predicted: torch.Tensor, true: torch.Tensor, kept: torch.Tensor, unseen: torch.Tensor, stating: tuple[int, ...]
) -> dict[str, float]:
    states = kept[:, list(stating)].all(dim=1)
    among = {"lds": unseen, "lds_kept": unseen & states, "lds_gone": unseen & ~states}
    return {name: rank_correlation(predicted[rows], true[rows]) for name, rows in among.items()}


def measure(
    question: Question, units: list[Unit], stating: tuple[int, ...], budgets: tuple[int, ...], seed: int
) -> list[dict[str, Any]]:
    """A row for every method, and for ceiling and oracle."""
    n = len(units)
    every = torch.tensor([[code >> u & 1 for u in range(n)] for code in range(2**n)], dtype=torch.bool)
    true = subset_scores(question, units, every)
    rows: list[dict[str, Any]] = []
    x = torch.cat([torch.ones(len(every), 1, dtype=torch.float64), every.double()], dim=1)
    additive = x @ torch.linalg.lstsq(x, true[:, None]).solution[:, 0]
    all_of_them = torch.ones(len(every), dtype=torch.bool)
    rows.append({"method": "additive ceiling", "passes": 2**n, **scored(additive, true, every, all_of_them, stating)})
    told = every[:, list(stating)].all(dim=1)
    rows.append({"method": "one-bit oracle", "passes": 0, **scored(told.double(), true, every, all_of_them, stating)})
    made: list[tuple[str, Callable[[], Any], int]] = [("leave one out", LeaveOneOut, n + 1)]
    for budget in budgets:
        made += [
            (f"ContextCite {budget}", lambda b=budget: ContextCite(b, seed), budget),
            (f"interactions {budget}", lambda b=budget: InteractionFit(b, seed), budget),
        ]
    for name, make, n_read in made:
        seen: list[torch.Tensor] = []
        recorded = replace(question, account=replace(question.account, n_tokens=0))
        found = make().explain(_Recording(recorded, units, every, true, seen), units)
        read = torch.cat(seen)
        unseen = ~(every[:, None, :] == read[None]).all(dim=2).any(dim=1)
        predicted = found.predict(every)
        top = found.effects.argsort(descending=True)
        without_two = ~torch.isin(torch.arange(n), top[:2])
        fallen = true[-1] - true[(every == without_two).all(dim=1)][0]
        rows.append(
            {
                "method": name,
                "passes": n_read,
                "top1": float(set(top[: len(stating)].tolist()) == set(stating)),
                "drop": float(fallen),
                **scored(predicted, true, every, unseen, stating),
            }
        )
    return rows


class _Recording:
    """A question whose scores are looked up among those of all subsets; what was asked for is kept."""

    def __init__(
        self, question: Question, units: list[Unit], every: torch.Tensor, true: torch.Tensor, seen: list[torch.Tensor]
    ):
        self.question, self.units, self.every, self.true, self.seen = question, units, every, true, seen
        self.prompt, self.answer, self.rival = question.prompt, question.answer, question.rival

    def rows(self, gone: torch.Tensor) -> torch.Tensor:
        return ~torch.stack([gone[:, unit.start] for unit in self.units], dim=1)

    def scores(self, kept: torch.Tensor) -> torch.Tensor:
        self.seen.append(kept)
        return self.true[(kept.long() * 2 ** torch.arange(kept.shape[1])).sum(dim=1)]

    def token_scores(self, kept: torch.Tensor) -> torch.Tensor:
        return self.scores(kept)[:, None]  # answers are of one token


def interval(values: pd.Series, seed: int = 0) -> tuple[float, float]:
    """Of the mean, by a bootstrap over stories."""
    drawn = torch.tensor(values.to_numpy())[
        torch.randint(len(values), (2000, len(values)), generator=torch.Generator().manual_seed(seed))
    ]
    low, high = drawn.mean(dim=1).quantile(torch.tensor([0.025, 0.975], dtype=drawn.dtype)).tolist()
    return low, high


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="facts-gpt2", help="facts-..., facts-hops-... with --facts 4")
    parser.add_argument("--stories", type=int, default=60)
    parser.add_argument("--facts", type=int, default=8, help="sentences of a story")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="three stories of four sentences: a smoke test")
    args = parser.parse_args(argv)
    n_stories, n_facts = (3, 4) if args.small else (args.stories, args.facts)
    budgets = tuple(n for n in BUDGETS if n < 2**n_facts) or (2 ** (n_facts - 1),)  # some subsets must stay unread
    model = HookedKVTransformer.from_zoo(args.model)
    stories = right_questions(model, n_stories, n_facts, 9_000_000 + args.seed)
    table = pd.DataFrame(
        [
            {"story": number, **row}
            for number, (story, about) in enumerate(stories)
            for row in measure(*asked(model, story, about), budgets, 1000 * args.seed + number)
        ]
    )
    means = table.groupby("method", sort=False).mean(numeric_only=True).drop(columns="story")
    print(f"{args.model}: {n_stories} stories of {n_facts} sentences")
    print(means.round(3).to_string())
    by_method = table.pivot_table(index="story", columns="method", values="lds")
    for budget in budgets:
        ceiling = by_method["additive ceiling"]
        name = f"interactions {budget}"
        low, high = interval(by_method[name] - by_method[f"ContextCite {budget}"])
        share = by_method[name].mean() / ceiling.mean()
        print(f"{name}: {share:.1%} of the ceiling; LDS above ContextCite's by {low:+.3f} to {high:+.3f}")


if __name__ == "__main__":
    main()

"""What the order of `attribution_by_edge` is worth: against exact path patching of all edges, and beside TransformerLens' own.

    python tests/benchmarks/bench_edges.py [--models facts-hops-gpt2 facts-hops-linear] [--stories 60] [--seed 0]

Two-hop questions that the model answers correctly. One of the two sentences is deleted; or in the sentence with the container's
room the room is replaced by one of which the story does not speak, and the answer is scored against it. Every edge is patched.
Printed for each task: how often the edge with the largest effect is among the first of the order, how much effect (sum of
absolute values) the first edges have, of what so many edges can have, and the rank correlation of absolute values.

TransformerLens (``attribution_patch``, edges) is asked about the replaced room. Its edges lead along the residual
stream alone, from the run with the replaced room towards the right one, position by position: they are added up over the prompt
and over the text, and measured against exact patching of the same edges, as are the estimates of `attribution_by_edge` there.
"""

import argparse
import random
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from bench_attribution import asked, rank_correlation, right_questions
from kvlens.analyses.attribution.answers import Question

from kvlens import HookedKVTransformer
from kvlens.analyses import attribution_by_edge
from kvlens.tasks.stories import PLACES

FIRST = (1, 5, 10, 20)


def figures(estimate: torch.Tensor, effect: torch.Tensor) -> dict[str, float]:
    """Of one order of the edges of one story."""
    order, largest = estimate.abs().argsort(descending=True, stable=True), effect.abs().argmax()
    along, best = effect.abs()[order], effect.abs().sort(descending=True).values
    found: dict[str, float] = {f"largest in first {n}": float((order[:n] == largest).any()) for n in FIRST}
    found |= {f"effect in first {n}": float(along[:n].sum() / best[:n].sum()) for n in FIRST}
    found["rank correlation"] = rank_correlation(estimate.abs(), effect.abs())
    return {**found, "estimate / effect, largest": float(estimate[largest] / effect[largest]), "largest": float(best[0])}


def edges_of(question: Question, span: tuple[int, int], **given: Any) -> pd.DataFrame:
    return attribution_by_edge(
        question.model, question.prompt, question.text, by=[span], answer=question.answer, n_confirmed=None, **given
    )


def columns(table: pd.DataFrame) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(table["estimate"].to_numpy()), torch.tensor(table["effect"].to_numpy())


class AsBridge:
    """A HookedKVTransformer under the names of hook points that TransformerLens' bridge has."""

    def __init__(self, model: HookedKVTransformer):
        self.model = model
        inputs = [f"blocks.{layer}.hook_{x}_input" for layer in range(model.cfg.n_layers) for x in "qkv"]
        self.theirs = {name.replace(".hook_", ".attn.hook_"): name for name in inputs}
        self.hook_dict = {name: point for name, point in model.hook_dict.items() if name not in inputs}
        self.hook_dict |= {name: model.hook_dict[ours] for name, ours in self.theirs.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: torch.Tensor) -> Any:
        return self.model(tokens)

    def hooks(self, **hooks: Any) -> Any:
        return self.model.hooks(**{k: [(self.theirs.get(name, name), hook) for name, hook in v] for k, v in hooks.items()})


def of_transformer_lens(clean: Question, corrupted: torch.Tensor, rival: int) -> pd.Series:
    """Its score of each edge between heads, added up over the prompt's positions and over the text's."""
    from transformer_lens.tools.analysis import EdgeAttributionConfig, attribution_patch

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, -1, int(clean.answer)] - logits[0, -1, rival]

    tokens = [torch.cat([prompt, clean.text])[None] for prompt in (clean.prompt, corrupted)]
    model: Any = AsBridge(clean.model.requires_grad_(True))  # its hooks see gradients of what has one
    with torch.enable_grad():
        scores = attribution_patch(model, *tokens, metric, EdgeAttributionConfig(granularity="edge")).edge_scores
    clean.model.requires_grad_(False)
    found: dict[tuple[Any, ...], float] = {}
    for (writer, reader), score in scores.items():
        if writer.kind == "attn_head_out" and reader.kind.endswith("_input"):
            where = "prompt" if writer.position < len(clean.prompt) else "text"
            key = (writer.layer, writer.head, where, reader.layer, reader.head, reader.kind[0])
            found[key] = found.get(key, 0.0) + score
    return pd.Series(found)


def tasks_of(model: HookedKVTransformer, n_stories: int, seed: int) -> Iterator[tuple[str, dict[str, float]]]:
    """(task, figures) for every story and task."""
    assert model.tokenizer is not None
    rooms = [model.tokenizer.encode(f" {place}", add_special_tokens=False)[0] for place in PLACES]
    for number, (story, about) in enumerate(right_questions(model, n_stories, 4, 8_000_000 + seed)):
        question, units, origins = asked(model, story, about)
        spans = [(units[origin].start, units[origin].stop) for origin in origins]
        for name, span in zip(("container's room deleted", "thing's container deleted"), spans, strict=True):
            yield name, figures(*columns(edges_of(question, span)))
        rival = random.Random(number).choice([room for room in rooms if room not in question.prompt.tolist()])
        own = question.prompt[slice(*spans[0])]
        theirs = own.where(own != question.answer, rival)
        yield "room replaced", figures(*columns(edges_of(question, spans[0], rival=rival, replace_by={spans[0]: theirs})))
        corrupted = question.prompt.clone()
        corrupted[slice(*spans[0])] = theirs
        backwards = Question.of(model, corrupted, question.text, question.answer)
        direct = edges_of(backwards, spans[0], rival=rival, replace_by={spans[0]: own}, through_mlps=False)
        yield "room put back, without MLPs", figures(*columns(direct))
        keys = ["sender_layer", "sender_head", "where", "receiver_layer", "receiver_head", "input"]
        scores = of_transformer_lens(question, corrupted, rival).reindex(pd.MultiIndex.from_frame(direct[keys]))
        assert not scores.isna().any()
        _, effect = columns(direct)
        yield "room put back, without MLPs: TransformerLens", figures(-torch.tensor(scores.to_numpy()), effect)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["facts-hops-gpt2", "facts-hops-linear"])
    parser.add_argument("--stories", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name in args.models:
        model = HookedKVTransformer.from_zoo(name).requires_grad_(False)
        found = pd.DataFrame([{"task": task, **row} for task, row in tasks_of(model, args.stories, args.seed)])
        by_task = found.groupby("task", sort=False)
        print(name, by_task.size().iloc[0], "stories: means, then medians, then the least")
        for statistic in (by_task.mean(), by_task.median(), by_task.min()):
            print(statistic.T.round(4).to_string())


if __name__ == "__main__":
    main()

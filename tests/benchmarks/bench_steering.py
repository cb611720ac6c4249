"""Steering a chat model by what two system prompts differ in: how far it goes, and what else it changes.

    python tests/benchmarks/bench_steering.py MODEL [--trait cheerful] [--layer 20] [--persona 2 4] [--cache 4 8] [--seed 0]

Two means over twenty questions, asked under either system prompt of the trait: of the residual stream behind ``--layer`` at the
prompt's last token (persona vectors, Chen et al. 2025, arXiv 2507.21509, who average over the answers), which is added at every
token of the answer; and of that token's values in all layers (cache steering, Belitsky et al. 2025, arXiv 2507.08799), which is
added to the values of the last token of a converted prompt. As there, one more line break begins the answer: the first token
would otherwise be decided before. Twenty other questions are answered under a neutral system prompt, greedily, with each vector
times each factor; null: a random vector of the same norm, for the values of every head.

Printed for each: the share of answers that show the trait (below); by how much it raises the log-probability of the answers
given under the trait's own system prompt over those given under the opposite one, in nats a token; by how much the loss rises
on a text that has nothing to do with it (this project's license), read in place of the answer; the share of answers in which
fewer than half of the tokens are different ones; and how unlikely the answers are without steering, in nats a token.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvlens
from kvlens import Chat, KVBias, convert_prompt

FRENCH = r"\b(le|la|les|de|des|du|et|est|un|une|pour|dans|je|vous|que|qui|sur|avec|pas|sont|au|ce|il|elle|nous)\b"
ENGLISH = r"\b(the|of|and|is|a|to|in|you|that|for|i|it|on|with|are|be|this|my|your|as|can|at)\b"


def is_french(answer: str) -> bool:
    """More French than English words, of the most frequent of both."""
    return len(re.findall(FRENCH, answer.lower())) > len(re.findall(ENGLISH, answer.lower()))


TRAITS: dict[str, tuple[str, str, Callable[[str], bool]]] = {
    "cheerful": (
        "You are very cheerful and excited. Answer with joy and enthusiasm!",
        "You are very gloomy and sad. Answer with sorrow and despair.",
        lambda answer: "!" in answer,
    ),
    "french": (
        "Tu es un assistant. Réponds toujours en français.",
        "You are an assistant. Always answer in English.",
        is_french,
    ),
}
"""Two system prompts, and whether an answer shows the first: an exclamation mark; more French words than English ones."""
NEUTRAL = "You are a helpful assistant."
SUBJECTS = """dinner|the sea|my weekend|winter|work|music|a walk in the forest|my neighbor|old books|the news|
a long flight|birthdays|my first day at school|the city|rain|a new job|sports|paintings|mornings|my garden|
dogs|cooking|trains|the moon|friends|holidays|my house|languages|summer|films|
a lost key|bread|mountains|the market|my sister|chess|tea|bicycles|evenings|the river"""
QUESTIONS = [f"Tell me about {subject.strip()}." for subject in SUBJECTS.split("|")]
LEARNED = 20
N_NEW, N_UNRELATED = 24, 128


def prompts(model: Any, system: str, questions: Sequence[str]) -> list[Tensor]:
    """The tokens of each question behind a system prompt, up to the answer."""
    return [
        Chat([{"role": "system", "content": system}, {"role": "user", "content": each}]).tokens(model) for each in questions
    ]


def vectors(model: Any, trait: str, layer: int) -> tuple[Tensor, Tensor]:
    """The persona vector [d_model], and the last token's values [layer, kv_head, d_head]."""
    found = []
    for system in TRAITS[trait][:2]:
        streams, values = [], []
        for prompt in prompts(model, system, QUESTIONS[:LEARNED]):
            name = f"blocks.{layer}.hook_resid_post"
            streams.append(model.run_with_cache(prompt[None], names_filter=name)[1][name][0, -1])
            values.append(convert_prompt(model, prompt).stacked("b_kv")[..., -1, :])
        found.append([torch.stack(each).mean(dim=0) for each in (streams, values)])
    (stream, value), (other_stream, other_value) = found
    return stream - other_stream, value - other_value


class Steered:
    """A model that answers twenty questions, steered or not: ``values`` go into the prompts, ``stream`` into the answers."""

    def __init__(self, model: Any, system: str, layer: int, values: Tensor | None = None, stream: Tensor | None = None):
        self.model, self.asked = model, prompts(model, system, QUESTIONS[LEARNED:])
        self.hooks = [] if stream is None else [(f"blocks.{layer}.hook_resid_post", lambda x, hook: x + stream)]
        self.first = torch.stack([each[-1:] for each in self.asked])
        biases = [convert_prompt(model, each) for each in self.asked]
        self.bias = KVBias.batch([(each if values is None else with_values(each, values)).repeat(1) for each in biases])

    def within(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(self.model.kv_bias(self.bias))
        stack.enter_context(self.model.hooks(fwd_hooks=self.hooks))
        return stack

    def answers(self) -> Tensor:
        """[question, token]."""
        with self.within():
            options = dict(max_new_tokens=N_NEW, do_sample=False, stop_at_eos=False, verbose=False)
            return self.model.generate(self.first, **options)[:, 1:]

    def losses(self, answers: Tensor) -> Tensor:
        """Of given answers, in nats a token: [question]."""
        with self.within():
            log_p = self.model(torch.cat([self.first, answers[:, :-1]], dim=1)).log_softmax(dim=-1)
        return -log_p.gather(-1, answers[..., None]).mean(dim=(1, 2))


def with_values(bias: KVBias, step: Tensor) -> KVBias:
    """The last token's values, and nothing else, moved by a step."""
    parts = [replace(part, b_kv=part.b_kv.clone()) for part in bias.attention]
    for part, of_layer in zip(parts, step, strict=True):
        part.b_kv[:, :, -1] += of_layer
    return bias.with_attention(parts)


def random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Of the same norm along the last axis."""
    drawn = torch.randn(x.shape, generator=generator)
    return drawn * (x.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True))


@torch.no_grad()
def main(words: list[str]) -> None:
    """Print a row for each way of steering."""
    say = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    say.add_argument("model")
    say.add_argument("--trait", choices=TRAITS, default="cheerful")
    say.add_argument("--layer", type=int, default=20)
    say.add_argument("--persona", type=float, nargs="*", default=[2.0, 4.0])
    say.add_argument("--cache", type=float, nargs="*", default=[4.0, 8.0])
    say.add_argument("--seed", type=int, default=0)
    args = say.parse_args(words)
    model, (toward, away, shows) = kvlens.load(args.model), TRAITS[args.trait]
    generator = torch.Generator().manual_seed(args.seed)
    stream, values = vectors(model, args.trait, args.layer)
    plain, own, other = (Steered(model, system, args.layer) for system in (NEUTRAL, toward, away))
    targets = own.answers(), other.answers()
    license_text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    unrelated = model.to_tokens(license_text, prepend_bos=False)[:, :N_UNRELATED].expand(len(targets[0]), -1)
    gap, loss = (plain.losses(targets[1]) - plain.losses(targets[0])).mean(), plain.losses(unrelated).mean()
    ways = {"no steering": plain, "own system prompt": own, "opposite system prompt": other}
    for kind, vector, factors in (("stream", stream, args.persona), ("values", values, args.cache)):
        for factor in factors:
            ways[f"{kind} x {factor:g}"] = Steered(model, NEUTRAL, args.layer, **{kind: factor * vector})
            null = random_like(factor * vector, generator)
            ways[f"{kind} x {factor:g}, random"] = Steered(model, NEUTRAL, args.layer, **{kind: null})
    print(
        f"norm of the persona vector {float(stream.norm()):.1f}, of values by layer {float(values.norm(dim=(1, 2)).mean()):.2f}"
    )
    print(f"{'':28}{'shows it':>10}{'toward':>9}{'unrelated':>11}{'repeats':>9}{'unlikely':>10}")
    for name, steered in ways.items():
        answers = steered.answers()
        texts = [model.to_string(each) for each in answers]
        shown = sum(map(shows, texts)) / len(texts)
        nearer = (steered.losses(targets[1]) - steered.losses(targets[0])).mean() - gap
        besides = steered.losses(unrelated).mean() - loss
        repeats = sum(len(set(each.tolist())) < N_NEW / 2 for each in answers) / len(answers)
        print(f"{name:28}{shown:10.0%}{nearer:9.2f}{besides:11.2f}{repeats:9.0%}{plain.losses(answers).mean():10.2f}")
        print(f"    {texts[0]!r}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""By what distance a recurrent state still changes predictions: another prompt in the place of the one that a text continues.

    python tests/benchmarks/bench_state_reach.py MODEL [--coding utf-16-le] [--pairs 32] [--head-pairs 6] [--n-bytes 512]

MODEL is a model of bytes with recurrent layers, such as a file of rwkv.cpp. The texts are topics of Python's manual
(``pydoc_data``): a prompt of so many bytes, the text that follows it, and the beginning of another topic as the other prompt.
Its states and rows take the place of the prompt's: all, the rows alone, the states alone, those of a layer, that of a head.
Printed, by distance in bytes: the divergence KL(prompt || other) of the predictions in nats, 95 % intervals over texts; how
much worse the text is predicted; and the rank correlation, over heads, of the divergence with the longest half-life of a
channel. In float64.
"""

import argparse
import sys
from dataclasses import replace
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import kvlens
from kvlens import KVBias, convert_prompt
from kvlens.analyses import state_half_lives

ENDS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
"""The last distance of each row; the first is behind that of the row before."""


class Case(NamedTuple):
    """Tokens of a prompt, of the text that follows it, and of another prompt."""

    prompt: Tensor
    text: Tensor
    other: Tensor


def cases(n: int, n_bytes: int, coding: str) -> list[Case]:
    """From topics that are long enough, each once as a prompt."""
    encoded = [topics[name].encode(coding, errors="ignore") for name in sorted(topics)]
    long = [torch.tensor(list(text)) for text in encoded if len(text) >= 2 * n_bytes]
    assert len(long) >= n, f"{len(long)} topics of {2 * n_bytes} bytes"
    return [Case(long[i][:n_bytes], long[i][n_bytes : 2 * n_bytes], long[i - n // 2][:n_bytes]) for i in range(n)]


def exchanged(bias: KVBias, other: KVBias, parts: list[tuple[int, int] | None], rows: bool = False) -> KVBias:
    """A batch of the bias with another prompt's states: in each row that of (layer, head), of a layer (-1), or all."""
    n, layers = len(parts), []
    whole = bias.select_prompt(0).repeat(n)
    for number, (own, its) in enumerate(zip(whole.layers, other.layers, strict=True)):
        assert own.state is not None and its.state is not None
        state = own.state.b_kv.clone()
        for row, part in enumerate(parts):
            if part is None or part == (number, -1):
                state[row] = its.state.b_kv[0]
            elif part[0] == number:
                state[row, part[1]] = its.state.b_kv[0, part[1]]
        conv = (its if rows else own).last["conv"][:1].expand(n, -1, -1)
        layers.append(replace(own, parts=(replace(own.state, b_kv=state),), last={**own.last, "conv": conv}))
    return whole.with_layers(layers)


def predictions(model: kvlens.KVModel, bias: KVBias, text: Tensor, at_once: int = 32) -> Tensor:
    """Log-probabilities behind each byte of a text, [row, pos, byte]."""
    found = []
    for first in range(0, bias.n_rows, at_once):
        rows = torch.arange(first, min(first + at_once, bias.n_rows))
        with model.kv_bias(bias.select_prompts(rows)):
            found.append(model(text.expand(len(rows), -1)).log_softmax(dim=-1))
    return torch.cat(found)


def divergence(expected: Tensor, found: Tensor) -> Tensor:
    """KL(expected || found) [row, pos]."""
    return (expected.exp() * (expected - found)).sum(dim=-1)


def by_distance(x: Tensor) -> np.ndarray:
    """Means over the distances of each row of the table, [..., row]; position 0 predicts the byte at distance 1."""
    starts = [0, *ENDS[:-1]]
    return np.stack([x[..., a:b].mean(dim=-1).numpy() for a, b in zip(starts, ENDS, strict=True) if b <= x.shape[-1]], axis=-1)


def interval(values: np.ndarray) -> tuple[float, float]:
    """95 %, by bootstrap over texts."""
    draw = np.random.default_rng(0)
    means = draw.choice(values, (2000, len(values))).mean(axis=1)
    return tuple(np.quantile(means, [0.025, 0.975]))  # type: ignore[return-value]


def ranks(x: np.ndarray) -> np.ndarray:
    """From 0."""
    return np.argsort(np.argsort(x))


def whole_states(model: kvlens.KVModel, of: list[Case]) -> None:
    """The table of everything, rows alone, states alone, and the loss."""
    kinds: dict[str, list[np.ndarray]] = {name: [] for name in ("all", "rows", "states", "loss")}
    for case in of:
        bias, other = (convert_prompt(model, tokens[None]) for tokens in (case.prompt, case.other))
        own = predictions(model, bias, case.text)
        for name, changed in (
            ("all", other),
            ("rows", exchanged(bias, other, [(-1, 0)], rows=True)),
            ("states", exchanged(bias, other, [None])),
        ):
            found = predictions(model, changed, case.text)
            kinds[name].append(by_distance(divergence(own, found)[0]))
            if name == "all":
                right = case.text[1:, None]
                worse = (own[0, :-1].gather(-1, right) - found[0, :-1].gather(-1, right))[:, 0]
                kinds["loss"].append(by_distance(torch.cat([worse, worse[-1:]])))
    print("| distance | all | 95 % | rows alone | states alone | loss |")
    for row, end in enumerate(ENDS[: len(kinds["all"][0])]):
        columns = {name: np.stack(values)[:, row] for name, values in kinds.items()}
        low, high = interval(columns["all"])
        means = {name: values.mean() for name, values in columns.items()}
        start = ENDS[row - 1] + 1 if row else 1
        print(
            f"| {start} to {end} | {means['all']:.1e} | {low:.1e} to {high:.1e} | {means['rows']:.1e} | {means['states']:.1e} "
            f"| {means['loss']:+.1e} |"
        )


def layers_and_heads(model: kvlens.KVModel, of: list[Case]) -> None:
    """The states of each layer, and of each head against its half-lives."""
    sizes = [part.n_heads for layer in model.layers() for part in layer.parts]
    heads = [(layer, head) for layer, n in enumerate(sizes) for head in range(n)]
    parts: list[tuple[int, int] | None] = [*((layer, -1) for layer in range(len(sizes))), *heads]
    found, half_lives = [], []
    for case in of:
        bias, other = (convert_prompt(model, tokens[None]) for tokens in (case.prompt, case.other))
        own = predictions(model, bias, case.text)
        found.append(by_distance(divergence(own, predictions(model, exchanged(bias, other, parts), case.text))))
        half_lives.append(state_half_lives(model, case.prompt))
    effect = np.mean(found, axis=0)
    table = half_lives[0].assign(half_life=np.mean([each["half_life"] for each in half_lives], axis=0))
    longest = table.groupby(["layer", "head"])["half_life"].max().to_numpy()
    print("\n| layer | longest half-lives of its heads | KL by distance |")
    for layer, n in enumerate(sizes):
        own = np.sort(longest[sum(sizes[:layer]) :][:n])
        print(f"| {layer} | {own[0]:.1f} to {own[-1]:.1f} | {' '.join(f'{x:.0e}' for x in effect[layer])} |")
    of_heads = effect[len(sizes) :]
    print("\n| distance | rank correlation of KL and half-life | largest KL: head, its half-life |")
    for row, end in enumerate(ENDS[: of_heads.shape[1]]):
        correlation = np.corrcoef(ranks(of_heads[:, row]), ranks(longest))[0, 1]
        first = of_heads[:, row].argmax()
        print(f"| {end} | {correlation:.2f} | {of_heads[first, row]:.1e}: {heads[first]}, {longest[first]:.1f} |")


@torch.no_grad()
def main(words: list[str]) -> None:
    """Print the tables."""
    say = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    say.add_argument("model")
    say.add_argument("--coding", default="utf-8")
    say.add_argument("--pairs", type=int, default=32)
    say.add_argument("--head-pairs", type=int, default=6)
    say.add_argument("--n-bytes", type=int, default=512)
    args = say.parse_args(words)
    model = kvlens.load(args.model, dtype=torch.float64)
    found = cases(args.pairs, args.n_bytes, args.coding)
    whole_states(model, found)
    layers_and_heads(model, found[: args.head_pairs])


if __name__ == "__main__":
    main(sys.argv[1:])

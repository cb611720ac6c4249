r"""``direct-conversion``: how near other weights W_K and W_V come to a prompt (ICLCA sec. 4.1 and app. A).

Linear attention (identity features, no normalizer, no mask) reads a text X behind a prompt X' by the key-value matrix

    W_K^T X^T X W_V + B        B = W_K^T X'^T X' W_V

and sec. 4.1 asks for W_1, W_2 with W_1^T X^T X W_2 equal to it for all X. For X = 0 the left side is 0 and the right side is B,
so there are none. How much of B they must leave on other texts depends on the texts: here tokens are independent and standard
normal, and the text has N of them. With S = X^T X all of this needs only the first two moments of S, which are known exactly,

    E S = E(N) I        E S G S = E(N^2) G + E(N) (G^T + tr(G) I)

so no text is drawn, and nothing is fitted to a sample. Two shares of B are given, as root mean squares over texts:

- *left*: what the best W_1, W_2 leave that alternating least squares finds from several starts. Given one of the two, the other
  is a linear problem; the minimum over both need not be found, so the true optimum may be lower;
- *floor*: what any linear map of S leaves, of which W_1, W_2 are a special case. It can add B tr(S) times a constant, which is
  B on average, and nothing better: the floor is the deviation of tr S over the root of its mean square, and no W_1, W_2 are
  below it. It is 0 only if |X|^2 is the same for all texts (the "shifted subspace" of app. A, eq. 20).
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison, Evidence

Pair = tuple[Float[Tensor, "d_model d_head"], Float[Tensor, "d_model d_head"]]
NOTICED = 0.01
"""A share of the prompt's term above this is called left over."""


@dataclass(frozen=True)
class Moments:
    """E(N) and E(N^2), of the number of tokens of a text."""

    mean: float
    square: float

    @classmethod
    def of(cls, least: int, most: int) -> "Moments":
        """N uniform from ``least`` to ``most``."""
        lengths = range(least, most + 1)
        return cls(sum(lengths) / len(lengths), sum(n * n for n in lengths) / len(lengths))

    def around(self, g: Float[Tensor, "d_model d_model"]) -> Float[Tensor, "d_model d_model"]:
        """E S G S."""
        return self.square * g + self.mean * (g.T + g.trace() * torch.eye(len(g)).to(g))

    def floor(self, d_model: int) -> float:
        """The share of B that any linear map of S leaves."""
        variance = 2 * self.mean * d_model + d_model**2 * (self.square - self.mean**2)  # of tr S
        whole = variance + (self.mean * d_model) ** 2
        return math.sqrt(variance / whole) if whole else 1.0


def _texts(*lengths: tuple[int, int]) -> list[dict[str, int]]:
    return [dict(least=least, most=most) for least, most in lengths]


@experiment(
    "ICLCA sec. 4.1 and app. A",
    "How much of a prompt can other weights W_K and W_V take?",
    cost=("a second", "ten seconds on one core"),
    d_model=(6, 16),
    d_head=(3, 4),
    n_prompt=(5, 16),
    texts=(_texts((0, 0), (1, 9)), _texts((0, 0), (1, 1), (16, 16), (64, 64), (1, 64))),
    n_starts=(2, 4),
    n_steps=(5, 100),
    seeds=([0, 1], [11, 12, 13, 14, 15, 16]),
)
def direct_conversion(settings: Settings, tell: Tell) -> Reproduction:
    """Fit W_1 and W_2 to random weights and prompts, for texts of several lengths."""
    rows = []
    for seed, lengths in itertools.product(settings["seeds"], settings["texts"]):
        moments = Moments.of(**lengths)
        weights, term, starts = _draw(settings, seed)
        found = min(left_over(moments, weights, term, best_pair(moments, weights, term, s, settings)) for s in starts)
        name = " to ".join(str(n) for n in sorted(set(lengths.values())))
        row = dict(seed=seed, tokens=name, mean_tokens=moments.mean, left=found, floor=moments.floor(settings["d_model"]))
        rows.append(row)
        if seed == settings["seeds"][-1]:
            tell(f"texts of {name} tokens: {found:.1%} left, at least {row['floor']:.1%}")
    table = pd.DataFrame(rows)
    return Reproduction(
        tables={"left": table},
        figure=lambda: draw(table),
        comparisons=[*compare(table)],
        differences=[
            "The paper argues with X = 0 alone, and has no figures; texts are random here, of width "
            f"{settings['d_model']}, behind prompts of {settings['n_prompt']} tokens.",
        ],
    )


def _draw(settings: Settings, seed: int) -> tuple[Pair, Float[Tensor, "d_head d_head"], list[Pair]]:
    """W_K and W_V, the prompt's term B, and where to start from: the weights themselves first."""
    generator, d = torch.Generator().manual_seed(seed), settings["d_model"]

    def weights() -> Tensor:
        return torch.randn(d, settings["d_head"], generator=generator, dtype=torch.float64) / math.sqrt(d)

    own = weights(), weights()
    prompt = torch.randn(settings["n_prompt"], d, generator=generator, dtype=torch.float64)
    others = [(weights(), weights()) for _ in range(settings["n_starts"] - 1)]
    return own, own[0].T @ prompt.T @ prompt @ own[1], [own, *others]


def left_over(moments: Moments, weights: Pair, term: Float[Tensor, "d_head d_head"], pair: Pair) -> float:
    """The root of E |W_1^T S W_2 - W_K^T S W_V - B|^2 over |B|, from the sums of products of W_1^T S W_2 and W_K^T S W_V."""
    (w_1, w_2), (w_k, w_v) = pair, weights
    parts = {1.0: (w_1, w_2), -1.0: (w_k, w_v)}
    total = term.square().sum()
    for (sign, (a, b)), (other, (c, d)) in itertools.product(parts.items(), repeat=2):
        total = total + sign * other * (a.T @ moments.around(b @ d.T) @ c).trace()
    for sign, (a, b) in parts.items():
        total = total - 2 * sign * moments.mean * (a.T @ b * term).sum()
    return float((total.clamp(min=0) / term.square().sum()).sqrt())


def best_pair(moments: Moments, weights: Pair, term: Float[Tensor, "d_head d_head"], start: Pair, settings: Settings) -> Pair:
    """Alternating least squares: W_1 for a given W_2, then W_2 for that W_1."""
    (w_k, w_v), (w_1, w_2) = weights, start
    if moments.mean == 0:
        return start
    for _ in range(settings["n_steps"]):
        w_1 = _other(moments, w_2, w_k, w_v, term)
        w_2 = _other(moments, w_1, w_v, w_k, term.T)
    return w_1, w_2


def _other(moments: Moments, given: Tensor, w_k: Tensor, w_v: Tensor, term: Tensor) -> Float[Tensor, "d_model d_head"]:
    """The W with the least E |W^T S given - w_k^T S w_v - term|^2."""
    wanted = moments.around(given @ w_v.T) @ w_k + moments.mean * given @ term.T
    return torch.linalg.solve(moments.around(given @ given.T), wanted)


def compare(table: pd.DataFrame) -> Iterator[Comparison]:
    """What is left by kind of text: the least lies between the floor, which is exact, and what was found."""
    for tokens, rows in table.groupby("tokens", sort=False):
        floor = float(rows["floor"].iloc[0])
        what = f"share of the prompt's term that the best W_K and W_V leave, texts of {tokens} tokens (floor {floor:.3g})"
        claim = f"other weights W_K and W_V cannot take the prompt: at least {NOTICED:.0%} of its term is left"
        found = max(float(rows["left"].min()), floor)
        yield Comparison(
            what, claim, float(rows["left"].mean()), Evidence("margin", ((found + floor) / 2, (found - floor) / 2), NOTICED)
        )


def draw(table: pd.DataFrame) -> Figure:
    """What is left, and its floor, by the mean number of tokens."""
    shown = table[table["mean_tokens"] > 0].melt(["seed", "mean_tokens"], ["left", "floor"], "share", "left over")
    title = "Share of the prompt's term that other W_K and W_V leave"
    return draw_panels(shown, "mean_tokens", "left over", by="share", title=title, log="xy", dots=True)

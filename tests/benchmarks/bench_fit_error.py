"""Whether the error that a conversion records is that of other texts: ``bias.fit.answers`` against texts sampled afterwards.

    python tests/benchmarks/bench_fit_error.py [--contexts 32] [--small]

As in the table of ``kvlens reproduce softmax-conversion``: prompts of 128 tokens that stories260K wrote, and eight texts of 64
tokens that it might go on with, drawn with other seeds than what the conversion reads. "off by" is the larger of their ratio
and its inverse.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from timing import verdict

from kvlens import HookedKVTransformer, convert_prompt
from kvlens.kv_bias import KVBias
from kvlens.papers.iclca.logits import prompted_logits, sampled

DATA = Path(__file__).parents[3] / "shared" / "data"
SIZES = dict(n_prompt=128, n_text=64, n_texts=8, keys=(8, 32))
SMALL = dict(n_prompt=24, n_text=8, n_texts=2, keys=(4,))
MEDIAN, NEARLY_ALL = 1.15, 1.35
"""At most: how far off the recorded error is, in the median and in 95 of 100 contexts."""


def model_of(small: bool, data: Path) -> HookedKVTransformer:
    if small:
        return HookedKVTransformer.from_zoo("facts-gpt2").requires_grad_(False)
    return HookedKVTransformer.from_llama2c(data / "stories260K.bin", data / "tok512.bin").requires_grad_(False)


@torch.no_grad()
def measured(model: HookedKVTransformer, prompt: torch.Tensor, texts: torch.Tensor, bias: KVBias) -> float:
    """Relative error of the logits, mean over positions."""
    old = prompted_logits(model, prompt, texts).double()
    with model.kv_bias(bias):
        new = model(texts, attention_mask=torch.ones_like(texts)).double()
    return float(((new - old).norm(dim=-1) / old.norm(dim=-1)).mean())


def context(model: HookedKVTransformer, sizes: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """One row per way of converting: the recorded error, that of other texts, and the lost share."""
    generator = torch.Generator().manual_seed(1_000 + seed)
    prompt = sampled(model, torch.tensor([[model.tokenizer.bos_token_id]]), sizes["n_prompt"] - 1, generator)
    texts = sampled(model, prompt.expand(sizes["n_texts"], -1), sizes["n_text"], generator)[:, prompt.shape[1] :]
    options = dict(method="landmark", continuation_length=sizes["n_text"], seed=seed, verbose=False)
    rows = []
    for n_features, budget in itertools.product(sizes["keys"], ("equal", "logits")):
        bias = convert_prompt(model, prompt[0], n_features=n_features, budget=budget, **options)
        assert bias.fit is not None
        rows.append(
            {
                "context": seed,
                "way": f"{n_features} keys, {budget} budgets",
                "recorded": float(bias.fit.answers.logits_error),
                "measured": measured(model, prompt[0], texts, bias),
                "lost_share": float(bias.fit.answers.lost_share),
            }
        )
    return rows


def judge(table: pd.DataFrame) -> None:
    """Print how accurate the record is for each way."""
    for way, rows in table.groupby("way", sort=False):
        ratio = rows["recorded"] / rows["measured"]
        off = ratio.where(ratio > 1, 1 / ratio)
        means = rows[["recorded", "measured", "lost_share"]].mean()
        print(
            f"{way}: recorded {means['recorded']:.2%}, measured {means['measured']:.2%}, correlation "
            f"{rows['recorded'].corr(rows['measured']):.2f}; lost share {means['lost_share']:.1%}"
        )
        print(verdict("off by, median", off.median(), MEDIAN))
        print(verdict("off by, 95 % of contexts", off.quantile(0.95), NEARLY_ALL))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=32)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of stories260K.bin and tok512.bin")
    parser.add_argument("--small", action="store_true", help="a shipped model, two contexts: a smoke test")
    args = parser.parse_args(argv)
    sizes, n = (SMALL, 2) if args.small else (SIZES, args.contexts)
    model = model_of(args.small, args.data)
    judge(pd.DataFrame([row for seed in range(n) for row in context(model, sizes, seed)]))


if __name__ == "__main__":
    main()

"""Whether the error that a conversion records is that of other texts: ``bias.fit.answers`` against texts sampled afterwards.

    python tests/benchmarks/bench_fit_error.py [--contexts 32] [--polish-steps 100] [--small]

As in the table of ``kvlens reproduce softmax-conversion``: prompts of 128 tokens that stories260K wrote, and eight texts of 64
tokens that it might go on with, drawn with other seeds than what the conversion reads. The ratio is recorded over measured;
"off by" is the larger of the ratio and its inverse. Polishing is compared with the same conversion less the steps.
"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from timing import verdict

from kvlens import HookedKVTransformer, convert_prompt
from kvlens.experiments.shared.sampling import prompted_logits, sampled
from kvlens.kv_bias import KVBias

DATA = Path(__file__).parents[3] / "shared" / "data"
SIZES = dict(n_prompt=128, n_text=64, n_texts=8, keys=(8, 32))
SMALL = dict(n_prompt=24, n_text=8, n_texts=2, keys=(4,))
MEDIAN, NEARLY_ALL = 1.15, 1.35
"""At most: how far off the recorded error is, in the median and in 95 of 100 contexts."""
PLAIN, POLISHED = "as many continuations", "polished"


def model_of(small: bool, data: Path) -> HookedKVTransformer:
    if small:
        return HookedKVTransformer.from_zoo("facts-gpt2").requires_grad_(False)
    return HookedKVTransformer.from_llama2c(data / "stories260K.bin", data / "tok512.bin").requires_grad_(False)


def ways(sizes: dict[str, Any], polish_steps: int) -> dict[str, dict[str, Any]]:
    """What is converted, by name."""
    least = sizes["keys"][0]
    found = {
        f"{r} keys, {budget} budgets": dict(n_features=r, budget=budget)
        for r in sizes["keys"]
        for budget in ("equal", "greedy")
    }
    if polish_steps:
        more = dict(n_features=least, budget="greedy", n_continuations=48)
        found |= {PLAIN: more, POLISHED: {**more, "polish_steps": polish_steps, "texts_per_step": 8}}
    return found


@torch.no_grad()
def measured(model: HookedKVTransformer, prompt: torch.Tensor, texts: torch.Tensor, bias: KVBias) -> float:
    """Relative error of the logits, mean over positions."""
    old = prompted_logits(model, prompt, texts).double()
    with model.kv_bias(bias):
        new = model(texts, attention_mask=torch.ones_like(texts)).double()
    return float(((new - old).norm(dim=-1) / old.norm(dim=-1)).mean())


def context(model: HookedKVTransformer, sizes: dict[str, Any], polish_steps: int, seed: int) -> list[dict[str, Any]]:
    """One row per way: the recorded error, that of other texts, the lost share and the heads' mean error."""
    generator = torch.Generator().manual_seed(1_000 + seed)
    prompt = sampled(model, torch.tensor([[model.tokenizer.bos_token_id]]), sizes["n_prompt"] - 1, generator)
    texts = sampled(model, prompt.expand(sizes["n_texts"], -1), sizes["n_text"], generator)[:, prompt.shape[1] :]
    rows = []
    for way, options in ways(sizes, polish_steps).items():
        shared = dict(method="landmark", continuation_length=sizes["n_text"], seed=seed, verbose=False)
        bias = convert_prompt(model, prompt[0], **shared, **options)
        fit = bias.fit
        rows.append(
            {
                "context": seed,
                "way": way,
                "recorded": float(fit.answers.logits_error),
                "measured": measured(model, prompt[0], texts, bias),
                "lost_share": float(fit.answers.lost_share),
                "heads": float(fit.head_output_error.mean()),
                "seconds": fit.seconds["answers"] / sum(fit.seconds.values()),
            }
        )
    return rows


def judge(table: pd.DataFrame) -> None:
    """Print how accurate the record is for each method, and its estimate for polishing."""
    for way, rows in table.groupby("way", sort=False):
        ratio = rows["recorded"] / rows["measured"]
        off = ratio.where(ratio > 1, 1 / ratio)
        means = rows[["recorded", "measured", "lost_share", "heads", "seconds"]].mean()
        print(
            f"{way}: recorded {means['recorded']:.2%}, measured {means['measured']:.2%}, lost share {means['lost_share']:.1%}, "
            f"heads' mean error {means['heads']:.1%}; measuring took {means['seconds']:.0%} of the time"
        )
        print(
            f"  ratio {ratio.min():.2f} to {ratio.max():.2f}, median {ratio.median():.3f}; correlation with the measured error "
            f"{rows['recorded'].corr(rows['measured']):.2f}, of the heads' error {rows['heads'].corr(rows['measured']):.2f}"
        )
        print(verdict("off by, median", off.median(), MEDIAN))
        print(verdict("off by, 95 % of contexts", off.quantile(0.95), NEARLY_ALL))
    by = table.pivot_table(index="context", columns="way", values=["recorded", "measured", "heads"])
    if POLISHED in by["measured"]:
        better = {name: by[name][POLISHED] < by[name][PLAIN] for name in ("recorded", "measured", "heads")}
        agree = {name: int((better[name] == better["measured"]).sum()) for name in ("recorded", "heads")}
        print(
            f"polishing is better in {int(better['measured'].sum())} of {len(by)} contexts; the record says of "
            f"{agree['recorded']} which is better, the heads' error of {agree['heads']}"
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=32)
    parser.add_argument("--first", type=int, default=0, help="number of the first context")
    parser.add_argument("--polish-steps", type=int, default=0, help="also compare polishing, which takes long")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of stories260K.bin and tok512.bin")
    parser.add_argument("--small", action="store_true", help="a shipped model, two contexts: a smoke test")
    args = parser.parse_args(argv)
    sizes, n = (SMALL, 2) if args.small else (SIZES, args.contexts)
    model = model_of(args.small, args.data)
    rows: list[dict[str, Any]] = []
    for seed in range(args.first, args.first + n):
        rows += context(model, sizes, args.polish_steps, seed)
        print(
            f"context {seed}: " + ", ".join(f"{r['recorded']:.2%} ({r['measured']:.2%})" for r in rows if r["context"] == seed),
            flush=True,
        )
    judge(pd.DataFrame(rows))


if __name__ == "__main__":
    main()

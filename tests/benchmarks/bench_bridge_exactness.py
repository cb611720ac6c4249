"""What a converted prompt loses on KVTransformerBridge, next to what Transformers' cache loses when it is cut and continued.

    python tests/benchmarks/bench_bridge_exactness.py [--families ...] [--seeds 12] [--dtypes float32 bfloat16] [--padded 0 1]

Tiny random models of every family of the bridge's tests, one per seed, with four prompts and texts each. Relative errors of the
logits, ||new - old|| / ||old|| over the four, of

- ours: the text under the converted prompt;
- theirs: the text continued from Transformers' cache of the prompt;
- whole: one pass of Transformers over prompt and text in the same dtype.

"old" is a pass of Transformers over prompt and text with the same (rounded) weights, in which everything is float64. With
padding, the prompts have unequal lengths, the texts are padded on the left, and all of them share one batch; theirs and the
whole then read each pair alone, without padding.

Reported per family: mean, median and maximum over seeds. The bound is on the ratio of ours to theirs for each seed: its mean is
at most 1.5. In half precision a rounding may send a token to another expert, in any of the computations, and one such model
outweighs the others: there the bound is on the median ratio.
"""

import argparse
import sys
from pathlib import Path
from statistics import mean, median

import torch
from timing import verdict

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "bridge", "model")]

from bridge_models import FAMILIES
from exactness import Models, logits_of, models_of
from precision import relative_error

ONLY_FLOAT32 = ("olmo2",)
"""TransformerLens' bridge multiplies a float32 pattern with values in half precision there, which torch refuses."""
FACTOR = 1.5
"""Ours is at most FACTOR times theirs, both against float64."""


def measure(models: Models, seed: int, padded: bool) -> dict[str, float]:
    """The three errors, each over the four texts together."""
    exact, *found = (torch.cat([x.flatten() for x in texts]) for texts in logits_of(models, seed, padded))
    return {kind: relative_error(each, exact) for kind, each in zip(("ours", "theirs", "whole"), found, strict=True)}


def excess(errors: list[dict[str, float]], dtype: torch.dtype) -> float:
    """Our errors over their bound: of the mean ratio in float32, of the median ratio in half precision."""
    return (mean if dtype == torch.float32 else median)(each["ours"] / each["theirs"] for each in errors) / FACTOR


def row(name: str, errors: list[dict[str, float]]) -> str:
    """A row of the table."""
    cells = []
    for kind in ("ours", "theirs", "whole"):
        values = [error[kind] for error in errors]
        cells.append(f"{mean(values):.1e} / {median(values):.1e} / {max(values):.1e}")
    ratios = [error["ours"] / max(error["theirs"], 1e-12) for error in errors]
    means = mean(error["ours"] for error in errors) / max(mean(error["theirs"] for error in errors), 1e-12)
    return f"| {name} | " + " | ".join(cells) + f" | {means:.2f} / {median(ratios):.2f} / {max(ratios):.2f} |"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--padded", nargs="*", type=int, default=[0, 1], choices=[0, 1])
    args = parser.parse_args(argv)
    with torch.no_grad():
        for dtype in (getattr(torch, name) for name in args.dtypes):
            for padded in args.padded:
                print(f"{dtype}, {'padded' if padded else 'not padded'}; mean / median / maximum over {args.seeds} seeds")
                print("| family | ours | theirs | whole | ours over theirs: means / median / maximum |\n|---|---|---|---|---|")
                found = {}
                for family in args.families:
                    if family in ONLY_FLOAT32 and dtype != torch.float32:
                        continue
                    found[family] = [measure(models_of(family, dtype, n), n, bool(padded)) for n in range(args.seeds)]
                    print(row(family, found[family]), flush=True)
                over = {name: excess(errors, dtype) for name, errors in found.items()}
                worst = max(over, key=lambda name: over[name])
                print(verdict(f"error over its bound, worst family ({worst})", over[worst], 1.0))


if __name__ == "__main__":
    main()

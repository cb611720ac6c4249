"""Relative error of the logits after converting a prompt, of every variant of the model and of prompts one after another.

    python tests/benchmarks/bench_conversion_error.py [--pairs 100] [--variants]

By size of the model, beside the paper's figures: ``kvlens reproduce conversion-error`` (ICLCA table 1), whose models, pairs and
measure are used here too.
"""

import argparse
from typing import Any

import torch
from timing import verdict

from kvlens import HookedKVTransformer, KVShiftConfig, convert_prompt
from kvlens.experiments.iclca.conversion_error import (
    D_VOCAB,
    error_of_conversion,
    float64_logits,
    random_model,
    random_pairs,
    relative_error,
)

SIZE = dict(n_layers=4, d_model=64, d_head=16)  # 208 K parameters
VARIANTS: dict[str, dict[str, Any]] = {
    "KV shift": dict(kv_shift=KVShiftConfig()),
    "KV shift, window 3, queries": dict(kv_shift=KVShiftConfig(window=3, queries=True)),
    "GQA": dict(n_key_value_heads=2),
    "decay": dict(normalizer="none", decay="retnet"),
    "identity": dict(feature_map="identity", normalizer="none"),
    "relu": dict(feature_map="relu"),
    "random": dict(feature_map="random"),
    "taylor": dict(feature_map="taylor"),
    "hedgehog": dict(feature_map="hedgehog"),
    "float64 accumulation": dict(accumulation_dtype="float64"),
    "learned positions": dict(positional_embedding_type="standard"),
}


def fifty_and_fifty(n_pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of 50 tokens and texts of 50 tokens."""
    return next(random_pairs(n_pairs, 50, 50, batch_size=n_pairs, seed=0))


def mean_errors(model: HookedKVTransformer, n_pairs: int) -> tuple[float, float]:
    """Mean relative error of (the conversion, the float32 forward pass itself)."""
    prompt, text = fifty_and_fifty(n_pairs)
    conversion, old = error_of_conversion(model, prompt, text)
    own = relative_error(old, float64_logits(model, torch.cat([prompt, text], dim=1))[:, 50:])
    return float(conversion.mean()), float(own.mean())


def chain_error(model: HookedKVTransformer, n_prompts: int) -> float:
    """Relative error after ``n_prompts`` prompts of 50 tokens converted one on top of another."""
    tokens = torch.randint(0, D_VOCAB, (4, 50 * (n_prompts + 1)), generator=torch.Generator().manual_seed(5))
    old = model(tokens)[:, -50:]
    bias = None
    for prompt in tokens[:, :-50].split(50, dim=1):
        bias = convert_prompt(model, prompt, initial=bias)
    with model.kv_bias(bias):
        return float(relative_error(model(tokens[:, -50:]), old).mean())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, help="pairs a model")
    parser.add_argument("--variants", action="store_true", help="also every variant of the model")
    args = parser.parse_args(argv)
    conversion, own = mean_errors(random_model(**SIZE), args.pairs)
    print(f"float32: conversion {conversion:.2e}, float32 forward itself {own:.2e}")
    print(verdict("conversion over the forward's own error", conversion / own, 2.0))
    exact, _ = error_of_conversion(random_model(**SIZE, dtype=torch.float64), *fifty_and_fifty(args.pairs))
    print(verdict("float64", float(exact.mean()), 1e-13))
    print(f"20 prompts one after another, float32: {chain_error(random_model(**SIZE), 20):.2e}")
    for name, changes in VARIANTS.items() if args.variants else ():
        conversion, own = mean_errors(random_model(**SIZE, **changes), args.pairs)
        print(
            f"{name}: conversion {conversion:.2e}, float32 forward itself {own:.2e}, ratio {conversion / own:.2f}", flush=True
        )


if __name__ == "__main__":
    main()

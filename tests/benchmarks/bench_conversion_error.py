"""Relative error of the logits after converting a prompt, by model size, beside float32's own error (ICLCA table 1).

    python tests/benchmarks/bench_conversion_error.py [--largest 2e9] [--pairs 100] [--variants]

||new - old|| / ||old|| over random pairs of a 50-token prompt and a 50-token text, randomly initialised models. The forward
pass's own error is that of float32 against float64 on the same weights, layer by layer, so that no second copy of the model
is ever in memory.
"""

import argparse
from typing import Any

import torch
from timing import verdict

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVShiftConfig, convert_prompt

SIZES = {  # parameters: (layers, d_model, d_head, paper's error, pairs a batch)
    205e3: (4, 64, 16, 2.9e-7, 100),
    1.99e6: (10, 128, 32, 4.4e-7, 100),
    19.8e6: (11, 384, 64, 8.3e-7, 50),
    198e6: (28, 768, 64, 1.7e-6, 10),
    1.98e9: (39, 2048, 128, 4.3e-6, 2),
}
D_VOCAB = 60
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


def make_model(size: float, **changes: Any) -> HookedKVTransformer:
    n_layers, d_model, d_head, _, _ = SIZES[size]
    settings = dict(
        n_layers=n_layers, d_model=d_model, d_head=d_head, n_ctx=2048, d_vocab=D_VOCAB, act_fn="gelu", seed=0, device="cpu",
        attention="linear", positional_embedding_type="rotary",
    )  # fmt: skip
    return HookedKVTransformer(HookedKVTransformerConfig(**{**settings, **changes})).requires_grad_(False)


def pairs(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randint(0, D_VOCAB, (n, 100), generator=torch.Generator().manual_seed(seed))
    return both[:, :50], both[:, 50:]


def relative_errors(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """One a row."""
    return (new.double() - old.double()).flatten(1).norm(dim=1) / old.double().flatten(1).norm(dim=1)


def float64_logits(model: HookedKVTransformer, tokens: torch.Tensor) -> torch.Tensor:
    """The forward pass in float64, one block widened at a time (and narrowed again without loss)."""
    dtype, model.cfg.dtype = model.cfg.dtype, torch.float64
    try:
        residual = model.embed(tokens).double()
        if model.cfg.positional_embedding_type == "standard":
            residual = residual + model.pos_embed(tokens).double()
        for part in [*model.blocks, model.ln_final, model.unembed]:
            residual = part.double()(residual)
            part.float()
    finally:
        model.cfg.dtype = dtype
    return residual


def conversion_errors(model: HookedKVTransformer, n_pairs: int, batch: int) -> tuple[float, float]:
    """Mean relative error of (the conversion, the float32 forward pass itself)."""
    conversion, own = [], []
    for start in range(0, n_pairs, batch):
        prompt, text = pairs(min(batch, n_pairs - start), seed=start)
        whole = torch.cat([prompt, text], dim=1)
        old = model(whole)[:, 50:]
        with model.kv_bias(convert_prompt(model, prompt)):
            new = model(text)
        conversion.append(relative_errors(new, old))
        own.append(relative_errors(old, float64_logits(model, whole)[:, 50:]))
    return float(torch.cat(conversion).mean()), float(torch.cat(own).mean())


def chain_error(model: HookedKVTransformer, n_prompts: int) -> float:
    """Relative error after ``n_prompts`` prompts of 50 tokens converted one on top of another."""
    tokens = torch.randint(0, D_VOCAB, (4, 50 * (n_prompts + 1)), generator=torch.Generator().manual_seed(5))
    old = model(tokens)[:, -50:]
    bias = None
    for prompt in tokens[:, :-50].split(50, dim=1):
        bias = convert_prompt(model, prompt, initial=bias)
    with model.kv_bias(bias):
        return float(relative_errors(model(tokens[:, -50:]), old).mean())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=float, default=2e7, help="largest number of parameters (2e9 needs 10 GB)")
    parser.add_argument("--pairs", type=int, default=100, help="pairs a model (a tenth at 198 M, 2 at 1.98 B)")
    parser.add_argument("--variants", action="store_true", help="also every variant of the model, at 205 K")
    parser.add_argument("--accumulate", choices=["float32", "float64"], default="float32", help="cfg.accumulation_dtype")
    args = parser.parse_args(argv)
    for size, (*_, paper, batch) in SIZES.items():
        if size > args.largest:
            continue
        n_pairs = args.pairs if size < 1e8 else max(2, args.pairs // 10) if size < 1e9 else 2
        model = make_model(size, accumulation_dtype=args.accumulate)
        conversion, own = conversion_errors(model, n_pairs, batch)
        n_parameters = sum(p.numel() for p in model.parameters())
        print(f"{n_parameters:,} parameters, {n_pairs} pairs: conversion {conversion:.2e}, float32 forward itself {own:.2e}")
        print(verdict("conversion, against the paper", conversion, paper))
        print(verdict("conversion over the forward's own error", conversion / own, 2.0), flush=True)
        del model
    exact = make_model(205e3, dtype=torch.float64)
    prompt, text = pairs(args.pairs, seed=1)
    old = exact(torch.cat([prompt, text], dim=1))[:, 50:]
    with exact.kv_bias(convert_prompt(exact, prompt)):
        print(verdict("float64, 205 K parameters", float(relative_errors(exact(text), old).mean()), 1e-13))
    print(f"20 prompts one after another, float32: {chain_error(make_model(205e3), 20):.2e}")
    for name, changes in VARIANTS.items() if args.variants else ():
        conversion, own = conversion_errors(make_model(205e3, **changes), args.pairs, 100)
        print(
            f"{name}: conversion {conversion:.2e}, float32 forward itself {own:.2e}, ratio {conversion / own:.2f}", flush=True
        )


if __name__ == "__main__":
    main()

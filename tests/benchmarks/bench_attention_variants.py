"""What the attention variants cost in training: whole steps (forward, backward, AdamW) beside plain attention, eager softmax.

    python tests/benchmarks/bench_attention_variants.py [--small]

Ridge solves a system of the text's length for every key-value head, in float64: its cost is stated, not bounded.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from timing import medians, verdict

from kvlens import HookedKVTransformer, HookedKVTransformerConfig

SIZES = dict(n_layers=2, n_heads=8, d_model=256, d_head=32, n_ctx=256, d_vocab=1024)
SMALL = dict(n_layers=1, n_heads=2, d_model=16, d_head=8, n_ctx=16, d_vocab=31)
VARIANTS: dict[str, dict[str, Any]] = {
    "regularised": dict(regularised=dict(alpha=-0.5)),
    "regularised, one step": dict(regularised=dict(alpha=0.1, form="one_step")),
    "augmented keys": dict(augmented=dict(keys=True)),
    "augmented keys and values, 2 layers": dict(augmented=dict(keys=True, values=True, depth=2)),
    "negative, k 8, per query": dict(negative=dict(k=8, beta=0.1)),
    "negative, k 8, per label": dict(negative=dict(k=8, beta=0.1, per="label")),
    "negative, a tenth, per query": dict(negative=dict(k=0.1, beta=0.1)),
}


def step_of(sizes: dict[str, Any], variant: dict[str, Any] | None, tokens: torch.Tensor) -> Callable[[], float]:
    """One training step; its loss, so that a variant that gives NaN is seen."""
    cfg = HookedKVTransformerConfig(
        **sizes, act_fn="gelu", normalization_type="LN", seed=0, device="cpu", attention_variant=variant
    )
    model = HookedKVTransformer(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(tokens, return_type="loss")
        loss.backward()
        optimizer.step()
        value = float(loss.detach())
        if not value < 20:
            raise SystemExit(f"{variant}: the loss is {value}")
        return value

    return step


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model, one repeat: a smoke test")
    small = parser.parse_args(argv).small
    sizes = SMALL if small else SIZES
    tokens = torch.randint(0, sizes["d_vocab"], (2, sizes["n_ctx"]), generator=torch.Generator().manual_seed(0))
    names = ["plain", *VARIANTS, "ridge"]
    settings = [None, *VARIANTS.values(), dict(ridge=dict(strength=1.0))]
    times = medians(*(step_of(sizes, variant, tokens) for variant in settings), repeats=1 if small else 3)
    print(f"2 x {sizes['n_ctx']} tokens, plain: {times[0]:.3f} s a step")
    for name, seconds in list(zip(names, times, strict=True))[1:-1]:
        print(verdict(f"{name}: speed over plain attention", times[0] / seconds, 0.7, at_least=True))
    print(f"  ridge: {times[0] / times[-1]:.3g} times the speed of plain attention (stated, not bounded)")


if __name__ == "__main__":
    main()

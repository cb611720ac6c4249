"""What ``dual_losses`` costs beside forward passes: all heads and queries of 256 tokens at GPT-2-small's width and depth.

    python tests/benchmarks/bench_dual_losses.py [--small]

Random weights, keys and queries scaled up to the scores of trained models. The answer is checked: one step gives the outputs.
"""

import argparse
from typing import Any

import torch
from timing import medians, peak_gib, verdict

from kvlens import HookedKVTransformer, HookedKVTransformerConfig
from kvlens.analyses import dual_losses

GPT2_SMALL = dict(n_layers=12, n_heads=12, d_model=768, d_head=64, n_ctx=1024, d_vocab=50257)
SMALL = dict(n_layers=2, n_heads=3, d_model=24, d_head=8, n_ctx=128, d_vocab=101)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model, one repeat: a smoke test")
    small = parser.parse_args(argv).small
    cfg = HookedKVTransformerConfig(
        **(SMALL if small else GPT2_SMALL), act_fn="gelu_new", normalization_type="LN", seed=0, device="cpu"
    )
    model = HookedKVTransformer(cfg).requires_grad_(False)
    for block in model.blocks:
        block.attn.W_Q.mul_(8)
        block.attn.W_K.mul_(8)
    tokens = torch.randint(0, cfg.d_vocab, (16 if small else 256,), generator=torch.Generator().manual_seed(1))

    def forward() -> Any:
        return model(tokens[None])

    def without_cosines() -> Any:
        return dual_losses(model, tokens, cosines=False)

    def with_cosines() -> Any:
        return dual_losses(model, tokens)

    before = peak_gib()
    worst = float(with_cosines()["equivalence_error"].max())
    memory = peak_gib() - before
    if not worst < 1e-4:  # rounding of a float32 softmax over scores of tens
        raise SystemExit(f"dual_losses: wrong answer, equivalence error {worst:.1e}")
    passes, plain, full = medians(forward, without_cosines, with_cosines, repeats=1 if small else 3)
    print(f"{len(tokens)} tokens: forward pass {passes:.3f} s, without cosines {plain:.3f} s, with cosines {full:.3f} s")
    print(verdict("dual_losses without cosines over a forward pass, times", plain / passes, 10.0))
    print(verdict("dual_losses with cosines over a forward pass, times", full / passes, 10.0))
    print(verdict("peak memory above the model's, GiB", memory, 2.0))


if __name__ == "__main__":
    main()

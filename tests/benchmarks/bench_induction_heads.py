"""What ``induction_heads`` costs beside a forward pass that caches the patterns of the same batch.

    python tests/benchmarks/bench_induction_heads.py [--small]

GPT-2-small's size with random weights: 12 layers of 12 heads, d_model 768, vocabulary 50,257; 10 sequences of 2 x 50 tokens.
"""

import argparse
import resource
from typing import Any

import torch
from timing import check_close, fastest, verdict

from analyses.heads.induction import induction_heads
from kvlens import HookedKVTransformer, HookedKVTransformerConfig

GPT2_SMALL = dict(n_layers=12, n_heads=12, d_model=768, d_head=64, n_ctx=1024, d_vocab=50257)
SMALL = dict(n_layers=2, n_heads=3, d_model=24, d_head=8, n_ctx=128, d_vocab=101)


def model_of(sizes: dict[str, Any]) -> HookedKVTransformer:
    cfg = HookedKVTransformerConfig(**sizes, act_fn="gelu_new", normalization_type="LN", seed=0, device="cpu")
    return HookedKVTransformer(cfg).requires_grad_(False)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model, one repeat: a smoke test")
    small = parser.parse_args(argv).small
    model = model_of(SMALL if small else GPT2_SMALL)
    n, batch = (5, 2) if small else (50, 10)
    generator = torch.Generator().manual_seed(1)
    piece = torch.stack([torch.randperm(model.cfg.d_vocab, generator=generator)[:n] for _ in range(batch)])
    tokens = torch.cat([piece, piece], dim=1)

    def patterns() -> Any:
        return model.run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_pattern"))[1]

    def analysis() -> Any:
        return induction_heads(model, tokens=piece)

    expected = patterns().stack_activation("pattern").diagonal(offset=1 - n, dim1=-2, dim2=-1)[..., 1:].mean(dim=(1, 3))
    check_close(torch.tensor(analysis()["prefix_matching_score"].to_numpy()), expected.flatten(), 1e-5, "prefix matching")
    forward, ours = fastest(patterns, analysis, repeats=1 if small else 7)
    print(f"{batch} x {2 * n} tokens: run_with_cache of the patterns {forward:.3f} s, induction_heads {ours:.3f} s")
    print(verdict("induction_heads over the forward pass, times", ours / forward, 2.0))
    print(verdict("peak memory of the process, GiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 4.0))


if __name__ == "__main__":
    main()

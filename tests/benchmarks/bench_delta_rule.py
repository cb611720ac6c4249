"""The chunked delta rule against Transformers' torch form of it, and Kimi delta attention against its own.

python tests/benchmarks/bench_delta_rule.py [--small]
"""

import argparse

import torch
from timing import check_close, fastest, verdict
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from kvlens.ops.delta_rule import chunked_delta_rule, recurrent_delta_rule

KEY_HEADS, N_HEADS, D_HEAD = 2, 4, 128


def inputs(n: int, by_channel: bool) -> tuple[torch.Tensor, ...]:
    """q, k of norm 1, v, log decay, write strength: in the sizes of Qwen3-Next's heads, fewer of them."""
    generator = torch.Generator().manual_seed(0)
    key_heads = N_HEADS if by_channel else KEY_HEADS
    q, k = (torch.nn.functional.normalize(torch.randn(1, n, key_heads, D_HEAD, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(1, n, N_HEADS, D_HEAD, generator=generator)
    decay = -torch.rand(1, n, N_HEADS, *([D_HEAD] if by_channel else []), generator=generator)
    return q, k, v, decay, torch.rand(1, n, N_HEADS, generator=generator)


def compare(n: int, by_channel: bool, repeats: int) -> float:
    """Our time over theirs for ``n`` tokens, after both were found to be right."""
    q, k, v, decay, write = inputs(n, by_channel)
    form = chunk_kimi_delta_attention if by_channel else torch_chunk_gated_delta_rule

    def ours() -> torch.Tensor:
        return chunked_delta_rule(q * D_HEAD**-0.5, k, v, decay, write, output_final_state=True).output

    def theirs() -> torch.Tensor:
        return form(q, k, v, g=decay, beta=write, initial_state=None, output_final_state=True)[0]

    exact = recurrent_delta_rule(*(x.double() for x in (q * D_HEAD**-0.5, k, v, decay, write))).output
    errors = [check_close(run(), exact, 1e-5, f"{name} at {n}") for run, name in ((ours, "chunked"), (theirs, "Transformers"))]
    a, b = fastest(ours, theirs, repeats=repeats, clock="processor")
    print(f"{n} tokens: {a * 1e3:.1f} ms against {b * 1e3:.1f} ms; relative errors {errors[0]:.1e} and {errors[1]:.1e}")
    return a / b


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="128 tokens, one repeat: a smoke test")
    small = parser.parse_args(argv).small
    torch.set_num_threads(1)
    with torch.no_grad():
        for by_channel in (False, True):
            print("decay per channel (KDA)" if by_channel else "decay per head (gated delta rule)")
            for n in (128,) if small else (512, 2048) if by_channel else (512, 2048, 8192):
                print(verdict("time over Transformers'", compare(n, by_channel, 1 if small else 5), 1.0))


if __name__ == "__main__":
    main()

"""Chunked linear attention, the op alone, against causal softmax attention (torch's fused one) of the same shape.

python tests/benchmarks/bench_linear_attention.py [--small]
"""

import argparse

import torch
from timing import check_close, medians, peak_gib, verdict

from kvlens.ops.linear_attention import chunked_linear_attention, naive_linear_attention, parallel_linear_attention

N_HEADS, D_HEAD = 8, 64


def inputs(n: int) -> list[torch.Tensor]:
    """phi~(q), phi~(k), v, phi(q), phi(k): features and rotation lie outside the clock."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(1, n, N_HEADS, D_HEAD, generator=generator) for _ in range(5)]


def linear(phi_q, phi_k, v, norm_q, norm_k):
    out = chunked_linear_attention(phi_q, phi_k, v, norm_q, norm_k)
    return out.numerator / out.normalizer[..., None]


def check(n: int) -> float:
    q, k, v, nq, nk = inputs(n)
    reference = naive_linear_attention if n <= 600 else parallel_linear_attention
    out = reference(*(x.double() for x in (q, k, v, nq, nk)))
    return check_close(linear(q, k, v, nq, nk), out.numerator / out.normalizer[..., None], 1e-5, f"chunked at {n}")


def compare(n: int, backward: bool, repeats: int) -> tuple[float, float]:
    """Median seconds of (linear, softmax) attention over ``n`` tokens."""
    ours = [x.requires_grad_(backward) for x in inputs(n)]
    theirs = [x.detach().transpose(1, 2).contiguous().requires_grad_(backward) for x in ours[:3]]
    gradient = torch.rand(1, n, N_HEADS, D_HEAD)
    gradient_t = gradient.transpose(1, 2).contiguous()

    def run_linear():
        out = linear(*ours)
        if backward:
            torch.autograd.grad(out, ours, gradient)

    def run_softmax():
        out = torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=True)
        if backward:
            torch.autograd.grad(out, theirs, gradient_t)

    with torch.set_grad_enabled(backward):
        a, b = medians(run_linear, run_softmax, repeats=repeats)
    return a, b


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="256 tokens, one repeat: a smoke test")
    small = parser.parse_args(argv).small
    print(
        f"relative error against float64: {check(256):.1e} at 256 tokens" + ("" if small else f", {check(2048):.1e} at 2,048")
    )
    for n, bound in ((256, 0.0),) if small else ((4096, 4.0), (16384, 12.0)):
        for backward in (False, True) if n < 16384 else (False,):
            a, b = compare(n, backward, 1 if small else 7 if n == 4096 else 5)
            direction = "forward + backward" if backward else "forward"
            print(f"{n} tokens, {direction}: linear {a * 1e3:.1f} ms, softmax {b * 1e3:.1f} ms")
            print(verdict("speed-up", b / a, bound, at_least=True))
    print(verdict("peak memory of the process, GiB", peak_gib(), 2.0))


if __name__ == "__main__":
    main()

"""The time of kvlens relative to the dense products alone, and to Hugging Face's fused GPT-NeoX; results are checked first.

    python tests/benchmarks/bench_speed.py [--only ROW ...] [--threads 2] [--clock wall] [--repeats 5] [--small]

4 layers, d_model 512, 8 heads, vocabulary 1,000, rotary, MLP. A row's two sides run in turn, and their least times are
compared. ``--clock processor --threads 1`` measures processor time, for a machine that others use too.
"""

import argparse
import gc
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from timing import CLOCKS, check_close, fastest, peak_gib, verdict
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVShiftConfig, convert_prompt

SIZES = dict(n_layers=4, d_model=512, d_head=64, d_vocab=1000, act_fn="gelu", device="cpu", seed=0)
SMALL = dict(n_layers=2, d_model=64, d_head=16, d_vocab=100, act_fn="gelu", device="cpu", seed=0)
STOPS = 40


class Run(NamedTuple):
    """What the command line chose."""

    sizes: dict[str, Any]
    repeats: int
    clock: str
    small: bool

    def tokens(self, batch: int, n: int) -> torch.Tensor:
        return torch.randint(0, self.sizes["d_vocab"], (batch, n), generator=torch.Generator().manual_seed(n))

    def length(self, n: int) -> int:
        return n // 64 if self.small else n

    def compare(self, name: str, bound: float, ours: Callable, theirs: Callable, n: int = 1) -> float:
        """Print ours / theirs against its bound."""
        a, b = fastest(ours, theirs, repeats=self.repeats, clock=self.clock)
        print(f"{name}: {a / n * 1e3:.4g} ms against {b / n * 1e3:.4g} ms")
        print(verdict("ratio", a / b, bound), flush=True)
        return a / b


def model_of(run: Run, n_ctx: int, **changes: Any) -> HookedKVTransformer:
    settings = {**run.sizes, "n_ctx": n_ctx, "positional_embedding_type": "rotary", **changes}
    return HookedKVTransformer(HookedKVTransformerConfig(**settings)).requires_grad_(False)


def linear_model(run: Run, n_ctx: int, **changes: Any) -> HookedKVTransformer:
    return model_of(run, n_ctx, attention="linear", **changes)


def checked_linear(run: Run, n_ctx: int, n_checked: int) -> HookedKVTransformer:
    """A linear model whose answer at ``n_checked`` tokens is that of its slowest form, in float64."""
    model, tokens = linear_model(run, n_ctx), run.tokens(1, n_checked)
    slow = linear_model(run, n_ctx, linear_attention_form="recurrent", dtype=torch.float64)
    slow.load_state_dict(model.state_dict())
    check_close(model(tokens), slow(tokens), 1e-5, f"linear at {n_checked} tokens")
    return model


def hugging_face(run: Run, n_ctx: int) -> GPTNeoXForCausalLM:
    d_model = run.sizes["d_model"]
    config = GPTNeoXConfig(
        vocab_size=run.sizes["d_vocab"], hidden_size=d_model, num_hidden_layers=run.sizes["n_layers"],
        num_attention_heads=d_model // run.sizes["d_head"], intermediate_size=4 * d_model, max_position_embeddings=n_ctx,
        attn_implementation="sdpa", bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config).eval().requires_grad_(False)


def dense_products(run: Run, n: int, segment: int) -> Callable[[], None]:
    """QKVO, MLP and unembedding of ``n`` tokens as bare matrix products, ``segment`` tokens through all layers at a time."""
    d, n_layers = run.sizes["d_model"], run.sizes["n_layers"]
    square, wide, narrow = [torch.rand(d, d) for _ in range(4)], torch.rand(d, 4 * d), torch.rand(4 * d, d)
    unembed, x = torch.rand(d, run.sizes["d_vocab"]), torch.rand(n, d)

    def products() -> None:
        for part in x.split(segment):
            for _ in range(n_layers):
                for w in square:
                    part @ w
                (part @ wide) @ narrow
            part @ unembed

    return products


# --- rows ------------------------------------------------------------------------------------------------------------


def dense(run: Run) -> None:
    """A forward pass without hooks against its dense products."""
    for n in (4096, 16384, 65536):
        n = run.length(n)
        model, tokens = checked_linear(run, n, min(n, 1500)), run.tokens(1, n)
        ours = partial(model, tokens)
        run.compare(f"linear, {n} tokens, against its dense products", 1.2, ours, dense_products(run, n, n))
        a, b = fastest(ours, dense_products(run, n, 1024), repeats=run.repeats, clock=run.clock)
        print(f"  against the products in segments of 1,024: {a / b:.3f}")


def forward(run: Run) -> None:
    """A forward pass against Hugging Face's fused one; here more is better."""
    for n, bound in ((1024, 1.15), (4096, 1.7), (16384, 3.7)):
        n = run.length(n)
        model, tokens, hf = checked_linear(run, n, min(n, 1024)), run.tokens(1, n), hugging_face(run, n)
        a, b = fastest(partial(model, tokens), partial(hf, tokens), repeats=run.repeats, clock=run.clock)
        print(f"linear, {n} tokens: {a * 1e3:.4g} ms, Hugging Face {b * 1e3:.4g} ms")
        print(verdict("times faster than Hugging Face", b / a, bound, at_least=True), flush=True)


def softmax(run: Run) -> None:
    """The fused softmax form against Hugging Face's."""
    n = run.length(4096)
    eager, fused = model_of(run, n), model_of(run, n, softmax_form="fused")
    fused.load_state_dict(eager.state_dict())
    tokens, hf = run.tokens(1, n), hugging_face(run, n)
    check_close(fused(tokens[:, :512]), eager(tokens[:, :512]), 1e-5, "fused softmax")
    run.compare(f"softmax fused, {n} tokens, against Hugging Face", 1.05, lambda: fused(tokens), lambda: hf(tokens))


def step_of(model: Any, tokens: torch.Tensor) -> Callable[[], None]:
    """Forward, mean next-token loss, backward; the same loss for every model."""
    parameters = [p.requires_grad_(True) for p in model.parameters()]

    def step() -> None:
        for p in parameters:
            p.grad = None
        out = model(tokens)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

    return step


def backward(run: Run) -> None:
    """Forward and backward against Hugging Face: linear, and fused softmax with KV shift."""
    shift = KVShiftConfig()
    for batch, n, bound, kind in ((4, 512, 0.92, "linear"), (1, 2048, 0.72, "linear"), (4, 512, 1.1, "softmax")):
        n, tokens = run.length(n), run.tokens(batch, run.length(n))
        if kind == "linear":
            name, model = "linear", checked_linear(run, n, n)
        else:
            name, model = "softmax fused with KV shift", model_of(run, n, softmax_form="fused", kv_shift=shift)
            eager = model_of(run, n, kv_shift=shift)
            eager.load_state_dict(model.state_dict())
            check_close(model(tokens), eager(tokens), 1e-5, name)
        with torch.enable_grad():
            ours, theirs = step_of(model, tokens), step_of(hugging_face(run, n), tokens)
            run.compare(f"{name}, forward + backward {batch} x {n}, against Hugging Face", bound, ours, theirs)


def decode(run: Run) -> None:
    """A decoded token at context 128 against Hugging Face ``generate``."""
    n_new, prompt = (4 if run.small else 32), run.tokens(1, 128)
    model, hf = linear_model(run, 512), hugging_face(run, 512)
    with_cache = model.generate(prompt, max_new_tokens=5, do_sample=False, stop_at_eos=False, verbose=False)
    grown = prompt
    for _ in range(5):
        grown = torch.cat([grown, model(grown)[:, -1:].argmax(-1)], dim=1)
    if not torch.equal(with_cache, grown):
        raise SystemExit("decoding: wrong answer, other tokens than without a cache")

    def ours(n: int) -> Any:
        return model.generate(prompt, max_new_tokens=n, do_sample=False, stop_at_eos=False, verbose=False)

    def theirs(n: int) -> Any:
        return hf.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, do_sample=False)

    calls = [lambda: ours(1), lambda: ours(1 + n_new), lambda: theirs(1), lambda: theirs(1 + n_new)]
    # many short runs, so that the shortest one was not disturbed by other processes
    a, b, c, d = fastest(*calls, repeats=4 * run.repeats, clock=run.clock)
    print(f"a decoded token at context 128: {(b - a) / n_new * 1e3:.3g} ms, Hugging Face {(d - c) / n_new * 1e3:.3g} ms")
    print(verdict("ratio", (b - a) / (d - c), 0.85), flush=True)


def cache(run: Run) -> None:
    """``run_with_cache`` of everything but pattern and scores against a bare forward pass."""
    n = run.length(4096)
    model, tokens = checked_linear(run, n, min(n, 1500)), run.tokens(1, n)

    def wanted(name: str) -> bool:
        return not name.endswith(("hook_pattern", "hook_attn_scores"))

    logits, cached = model.run_with_cache(tokens, names_filter=wanted)
    check_close(logits, model(tokens), 1e-5, "run_with_cache")
    numbers = sum(x.numel() for x in cached.values()) // n
    del logits, cached
    run.compare(
        f"run_with_cache, {n} tokens, {numbers:,} numbers per token, against a bare forward pass",
        1.4,
        lambda: model.run_with_cache(tokens, names_filter=wanted),
        lambda: model(tokens),
    )


def convert(run: Run) -> None:
    """1,000,000 tokens converted on docs-linear, in a process of its own: peak memory, and time per token.

    The long text is one conversion, stopped at ``STOPS`` places between its segments to convert the short one; each stretch
    between two stops is compared with the short conversions on both its sides, and the median of these ratios counts.
    """
    short, long = (512, 16384) if run.small else (16384, 1_000_000)
    threads = ["--threads", str(torch.get_num_threads()), "--clock", run.clock]
    command = [sys.executable, __file__, "--convert-here", str(short), str(long), *threads]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{long} tokens converted on docs-linear: {found['long'] * 1e6:.4g} us a token, {short}: {found['short'] * 1e6:.4g}")
    print(verdict("time per token, long over short", found["ratio"], 1.15))
    print(verdict("peak memory of the process, GiB", found["peak"], 1.0), flush=True)


def convert_here(short: int, long: int, clock: str) -> None:
    """The work of :func:`convert`; the last line is its figures as JSON."""
    model = HookedKVTransformer.from_zoo("docs-linear").requires_grad_(False)
    tokens = torch.randint(0, model.cfg.d_vocab, (long,), generator=torch.Generator().manual_seed(0))
    whole, in_two = convert_prompt(model, tokens[:2000]), convert_prompt(model, tokens[:1200])
    check_close(convert_prompt(model, tokens[1200:2000], initial=in_two).b_KV, whole.b_KV, 1e-4, "conversion")
    gc.collect()
    now = CLOCKS[clock]
    stretches: list[tuple[float, float]] = []  # (fraction of the text, seconds) up to each stop
    shorts: list[float] = []

    def stop(done: float) -> None:
        if done < (len(shorts) + 1) / STOPS:
            return
        stretches.append((done, now() - resumed[-1]))
        start = now()
        convert_prompt(model, tokens[:short])
        shorts.append(now() - start)
        resumed.append(now())

    resumed = [now()]
    convert_prompt(model, tokens, on_progress=stop)
    per_token = [seconds / ((done - before) * long) for (before, _), (done, seconds) in itertools.pairwise(stretches)]
    beside = [(a + b) / 2 / short for a, b in itertools.pairwise(shorts)]
    ratio = median(a / b for a, b in zip(per_token, beside, strict=True))
    print(json.dumps({"long": median(per_token), "short": median(beside), "ratio": ratio, "peak": peak_gib()}))


ROWS: dict[str, Callable[[Run], None]] = {
    "dense": dense,
    "forward": forward,
    "softmax": softmax,
    "backward": backward,
    "decode": decode,
    "cache": cache,
    "convert": convert,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows to measure")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a tiny model, one repeat: a smoke test")
    parser.add_argument("--convert-here", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        if args.convert_here:
            convert_here(*args.convert_here, args.clock)
            return
        run = Run(SMALL if args.small else SIZES, 1 if args.small else args.repeats, args.clock, args.small)
        for name in args.only:
            with torch.no_grad():
                ROWS[name](run)
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    main()

"""What a softmax prompt in fewer keys costs: reading it, converting it. Ratios to a forward pass, the answers checked first.

    python tests/benchmarks/bench_softmax_conversion.py [--threads 2] [--repeats 11] [--small]

4 layers, d_model 512, 8 heads, vocabulary 1,000, rotary, MLP; a prompt and a text of 512 tokens, 32 virtual keys per head. A
bias is attached to models with ALiBi and with windows of 128 tokens too. What is compared runs in turn, and medians are
compared; the attached bias four times as often, by processor time with one thread. A conversion is timed from its call to its
return, less the time in which it wrote and read its reference text, which is printed beside it.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from timing import check_close, medians, peak_gib, verdict

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVBias, convert_prompt

SIZES = dict(n_layers=4, d_model=512, d_head=64, d_vocab=1000, act_fn="gelu", device="cpu", seed=0)
SMALL = dict(n_layers=2, d_model=64, d_head=16, d_vocab=100, act_fn="gelu", device="cpu", seed=0)
KINDS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "ALiBi": dict(positional_embedding_type="alibi"),
    "windows": dict(use_local_attn=True, window_size=128),
}
ATTACHED = 1.1
"""At most: a forward pass under a bias over one without."""
FITTED, SEARCHED = 10.0, 30.0
"""At most: a conversion over a forward pass over its prompt, with equal budgets and with a search for them."""
HELD = 0.5
"""At most: memory that converting takes, over that of the shares of all reference queries, layers and keys."""


def model_of(sizes: dict[str, Any], kind: str = "rotary") -> HookedKVTransformer:
    usual = dict(n_ctx=2048, positional_embedding_type="rotary", softmax_form="fused", attn_types=["local"] * sizes["n_layers"])
    return HookedKVTransformer(HookedKVTransformerConfig(**{**usual, **sizes, **KINDS[kind]})).requires_grad_(False)


def tokens_of(model: HookedKVTransformer, n: int, seed: int) -> torch.Tensor:
    return torch.randint(0, model.cfg.d_vocab, (1, n), generator=torch.Generator().manual_seed(seed))


def in_keys(model: HookedKVTransformer, prompt: torch.Tensor, **options: Any) -> KVBias:
    """The prompt in 32 keys per head, or half of it where it is short; a continuation is no longer than the prompt."""
    n, length = min(32, prompt.shape[1] // 2), min(64, prompt.shape[1])
    options = {"continuation_length": length, **options}
    return convert_prompt(model, prompt[0], method="landmark", n_features=n, verbose=False, **options)


def check_answers(model: HookedKVTransformer, prompt: torch.Tensor, text: torch.Tensor, bias: KVBias) -> None:
    """All keys reproduce the prompt itself, and with fewer the fused form equals the eager one."""
    with model.kv_bias(convert_prompt(model, prompt[0])):
        exact = model(text)
    check_close(exact, model(torch.cat([prompt, text], dim=1))[:, prompt.shape[1] :], 1e-5, "every key kept")
    with model.kv_bias(bias):
        fused = model(text)
        model.set_softmax_form("eager")
        eager = model(text)
        model.set_softmax_form("fused")
    check_close(fused, eager, 1e-5, "the fused form under a bias")


def attached(kind: str, model: HookedKVTransformer, text: torch.Tensor, bias: KVBias, repeats: int) -> None:
    """A forward pass under the bias against one without. The attaching itself, which hashes the weights, is not timed."""
    other = HookedKVTransformer(model.cfg).requires_grad_(False)
    other.load_state_dict(model.state_dict())
    clock = "processor" if torch.get_num_threads() == 1 else "wall"
    with other.kv_bias(bias):
        under, plain = medians(lambda: other(text), lambda: model(text), repeats=4 * repeats, clock=clock)
    print(f"{kind}, {text.shape[1]} tokens: {plain * 1e3:.4g} ms, under {bias.d_phi} keys per head {under * 1e3:.4g} ms")
    print(verdict("attached, over without", under / plain, ATTACHED), flush=True)


def converting(model: HookedKVTransformer, prompt: torch.Tensor, repeats: int) -> None:
    """A conversion less its reference passes against a forward pass over the prompt: one before it and one after it."""
    for budget, bound in (("equal", FITTED), ("greedy", SEARCHED)):
        passes, fits, references = [], [], []
        for _ in range(repeats):
            passes.append(_seconds(lambda: model(prompt)))
            start = perf_counter()
            fit = in_keys(model, prompt, budget=budget).fit
            whole = perf_counter() - start
            references.append(fit.seconds["reference"])
            fits.append(whole - references[-1])
            passes.append(_seconds(lambda: model(prompt)))
        forward, fitted, read = median(passes), median(fits), median(references)
        print(f"{budget} budgets: {fitted * 1e3:.4g} ms, a forward pass over the prompt {forward * 1e3:.4g} ms")
        print(f"  beside it: {fit.reference_passes:.3g} passes over reference text, {read / forward:.3g} times as long")
        print(f"  single conversions: {min(fits) / forward:.3g} to {max(fits) / forward:.3g}")
        print(verdict("converting, in forward passes", fitted / forward, bound), flush=True)


def _seconds(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def memory(small: bool) -> None:
    """Memory of one conversion, in a separate process; that of a small one is not checked, and needs none."""
    if small:
        found = convert_here(small)
    else:
        command = [sys.executable, __file__, "--convert-here", "--threads", str(torch.get_num_threads())]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
    print(f"{found['n_queries']} reference queries: {found['taken']:.4g} MiB taken, all shares are {found['shares']:.4g} MiB")
    if not small:  # a small conversion takes less than what the interpreter itself grows by
        print(verdict("memory, over that of all shares", found["taken"] / found["shares"], HELD), flush=True)


def convert_here(small: bool) -> dict[str, float]:
    """The work of :func:`memory`: its figures."""
    model = model_of(SMALL if small else SIZES)
    prompt, n = tokens_of(model, 16 if small else 512, seed=0), 8 if small else 256
    in_keys(model, prompt, n_continuations=2, continuation_length=2)  # what is loaded once
    before = peak_gib()
    fit = in_keys(model, prompt, n_continuations=n, budget="greedy").fit
    taken = (peak_gib() - before) * 2**10
    cfg = model.cfg
    shares = fit.n_reference_tokens * prompt.shape[1] * cfg.n_heads * cfg.n_layers * 4 / 2**20
    return {"n_queries": fit.n_reference_tokens, "taken": taken, "shares": shares}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--small", action="store_true", help="a tiny model, one repeat: a smoke test")
    parser.add_argument("--convert-here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        with torch.no_grad():
            if args.convert_here:
                print(json.dumps(convert_here(args.small)))
                return
            repeats = 1 if args.small else args.repeats
            models = {kind: model_of(SMALL if args.small else SIZES, kind) for kind in KINDS}
            prompt, text = (tokens_of(models["rotary"], 16 if args.small else 512, seed=seed) for seed in (0, 1))
            for kind, model in models.items():
                bias = in_keys(model, prompt)
                check_answers(model, prompt, text, bias)
                attached(kind, model, text, bias, repeats)
            converting(models["rotary"], prompt, repeats)
            memory(args.small)
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    main()

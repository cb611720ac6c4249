"""Long softmax prompts in 128 keys per head: memory, passes, and the error by position after the prompt.

    python tests/benchmarks/bench_long_prompts.py [--lengths 1024 2048 4096] [--small]

Transformers' own GPT-2 (learned positions) and Llama (rotary, grouped keys) with random weights of a size at which attention is
selective, 4 layers, d_model 64, 4,608 positions, in the eager form. Each conversion runs in a process of its own, whose peak
memory is compared with that before the conversion. Short prompts stay below the limits on what is held at once; beyond them,
memory should at most double with the prompt, which is checked for the two longest. Errors are those of the logits of four texts
sampled after the prompt, relative, in blocks of 64 positions.
"""

import argparse
import json
import subprocess
import sys
from time import perf_counter
from typing import Any

import torch
import transformers
from timing import peak_gib, verdict

from kvlens import HookedKVTransformer, convert_prompt
from kvlens.papers.iclca.logits import sampled

N_CTX, BLOCK, N_TEXTS = 4608, 64, 4
GROWTH = 2.2
"""At most: memory of a conversion over that for half as many tokens."""
KINDS = ("gpt2", "llama")


def model_of(kind: str) -> HookedKVTransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "gpt2":
            of_gpt2 = transformers.GPT2Config(
                n_layer=4, n_embd=64, n_head=4, n_positions=N_CTX, vocab_size=512, initializer_range=0.2
            )
            hf_model: Any = transformers.GPT2LMHeadModel(of_gpt2)
        else:
            sizes = dict(
                num_hidden_layers=4, hidden_size=64, num_attention_heads=8, num_key_value_heads=4, intermediate_size=160
            )
            of_llama = transformers.LlamaConfig(
                **sizes, max_position_embeddings=N_CTX, vocab_size=512, initializer_range=0.2, tie_word_embeddings=False
            )
            hf_model = transformers.LlamaForCausalLM(of_llama)
    return HookedKVTransformer.from_pretrained(kind, hf_model=hf_model.eval(), device="cpu").eval().requires_grad_(False)


@torch.no_grad()
def convert_here(kind: str, n_prompt: int, n_keys: int) -> dict[str, Any]:
    """One conversion: MiB taken, seconds, passes, and errors by block of positions, with and without the prompt."""
    model = model_of(kind)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 512, (n_prompt,), generator=generator)
    options = dict(method="landmark", n_keys=n_keys, n_held_out=0, verbose=False)
    convert_prompt(model, prompt[: 2 * n_keys], n_continuations=2, continuation_length=2, **options)
    before, start = peak_gib(), perf_counter()
    bias = convert_prompt(model, prompt, **options)
    taken, seconds = (peak_gib() - before) * 2**10, perf_counter() - start
    exact = convert_prompt(model, prompt)
    with model.kv_bias(exact):
        texts = sampled(model, torch.randint(0, 512, (N_TEXTS, 1), generator=generator), 4 * BLOCK - 1, generator)
    old, new, without = (_logits(model, each, texts) for each in (exact, bias, exact.zero_like()))
    assert bias.fit is not None
    return {
        "mib": taken,
        "seconds": seconds,
        "passes": 1 + bias.fit.passes,
        "error": _by_block(new, old),
        "without": _by_block(without, old),
    }


def _logits(model: HookedKVTransformer, bias: Any, texts: torch.Tensor) -> torch.Tensor:
    with model.kv_bias(bias):
        return torch.cat([model(text[None], attention_mask=torch.ones_like(text[None])) for text in texts])


def _by_block(new: torch.Tensor, old: torch.Tensor) -> list[float]:
    error = (new - old).norm(dim=-1) / old.norm(dim=-1)
    return [float(block.mean()) for block in error.split(BLOCK, dim=1)]


def measure(kind: str, n_prompt: int, n_keys: int, here: bool) -> dict[str, Any]:
    if here:
        return convert_here(kind, n_prompt, n_keys)
    command = [sys.executable, __file__, "--convert-here", kind, str(n_prompt), str(n_keys)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--keys", type=int, default=128)
    parser.add_argument("--small", action="store_true", help="one short prompt: a smoke test")
    parser.add_argument("--convert-here", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.convert_here:
        kind, n_prompt, n_keys = args.convert_here
        print(json.dumps(convert_here(kind, int(n_prompt), int(n_keys))))
        return
    lengths, n_keys = ([96], 8) if args.small else (args.lengths, args.keys)
    for kind in args.kinds:
        taken = []
        for n_prompt in lengths:
            found = measure(kind, n_prompt, n_keys, args.small)
            taken.append(found["mib"])
            errors, without = (", ".join(f"{100 * e:.2f}" for e in found[name]) for name in ("error", "without"))
            print(
                f"{kind}, {n_prompt} tokens in {n_keys} keys: {found['mib']:.4g} MiB, {found['seconds']:.3g} s, "
                f"{found['passes']:.3g} passes; error by block {errors} % (prompt left out {without} %)",
                flush=True,
            )
        if len(taken) > 1:
            growth = taken[-1] / taken[-2] / (lengths[-1] / lengths[-2]) * 2
            print(verdict("memory for twice the tokens", growth, GROWTH), flush=True)


if __name__ == "__main__":
    main()

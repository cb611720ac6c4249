"""What ``method="exact"`` is off by in float32, beside what float32 itself is off by.

    python tests/benchmarks/bench_exact_conversion.py [--data FOLDER] [--prompts 16] [--lengths 11 13] [--scaled "" Q K QK]

For tiny random GPT-2, Pythia, Llama and Qwen models, the softmax models that ship with kvlens and, where ``--data`` holds them,
stories260K.bin and tok512.bin; as they are, and with queries, keys or both 20 times as long (scores of 5,000; of 100,000, which
float32 knows to 1e-2). The relative error of the logits, ||new - old|| / ||old|| per token, as mean over tokens and prompts
and, behind the stroke, that of the worst prompt, of

- the converted prompt against the pass with the prompt in front;
- the same text behind the prompt in TransformerLens' key-value cache, against the same pass;
- that pass against float64; the converted prompt against float64;
- the converted prompt in float64.

A dense product of fewer than about 12 rows is summed in another order than one of more (MKL's choice): a prompt
converted by itself, or read into a cache by itself, rounds as neither of them does inside a longer text.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from timing import verdict
from torch import Tensor

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "model")]

from large_scores import REAL, scaled_up
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from kvlens import HookedKVTransformer, convert_prompt

SINGLE, DOUBLE = 2.0, 1e-12
"""At most: the error of the converted pass against float64 over that of the plain one, of the median prompt; in float64."""
WAYS = ("converted / plain", "cached / plain", "plain / float64", "converted / float64", "in float64")


def relative_errors(new: Tensor, old: Tensor) -> Tensor:
    """||new - old|| / ||old|| of each token's logits."""
    return (new.double() - old.double()).norm(dim=-1) / old.double().norm(dim=-1)


def converted(model: HookedKVTransformer, prompt: Tensor, text: Tensor) -> Tensor:
    with model.kv_bias(convert_prompt(model, prompt)):
        return model(text)


def cached(model: HookedKVTransformer, prompt: Tensor, text: Tensor) -> Tensor:
    cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", len(prompt))
    real = torch.ones_like(torch.cat([prompt, text], dim=1))
    model(prompt, past_kv_cache=cache, attention_mask=real[:, : prompt.shape[1]])
    return model(text, past_kv_cache=cache, attention_mask=real[:, prompt.shape[1] :])


def errors(single: HookedKVTransformer, double: HookedKVTransformer, prompt: Tensor, text: Tensor) -> Tensor:
    """[way, prompt, token] of one prompt, in the order of ``WAYS``."""
    both, n = torch.cat([prompt, text], dim=1), prompt.shape[1]
    plain, true = single(both)[:, n:], double(both)[:, n:]
    new = converted(single, prompt, text)
    pairs = [(new, plain), (cached(single, prompt, text), plain), (plain, true), (new, true)]
    return torch.stack([relative_errors(a, b) for a, b in [*pairs, (converted(double, prompt, text), true)]])


def measure(kind: str, which: str, n_prompts: int, lengths: list[int], data: Path | None) -> Tensor:
    """The mean over tokens, [way, prompt], one prompt after the other."""
    generator, found = torch.Generator().manual_seed(0), []
    with (
        scaled_up(kind, torch.float32, which, data) as single,
        scaled_up(kind, torch.float64, which, data) as double,
    ):
        for _ in range(n_prompts):
            prompt, text = (torch.randint(0, single.cfg.d_vocab, (1, n), generator=generator) for n in lengths)
            found.append(errors(single, double, prompt, text).mean(dim=-1))
    return torch.cat(found, dim=1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("KVLENS_TEST_DATA"), help="folder of stories260K.bin")
    parser.add_argument("--models", nargs="*", default=REAL, choices=REAL)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--lengths", nargs=2, type=int, default=[11, 13], help="tokens of prompt and text, together at most 29")
    parser.add_argument("--scaled", nargs="*", default=["", "Q", "K", "QK"], choices=["", "Q", "K", "QK"])
    args = parser.parse_args(argv)
    data = None if args.data is None else Path(args.data)
    kinds = [kind for kind in args.models if kind != "stories260K" or (data is not None and data.is_dir())]
    worst = in_double = 0.0
    print("model, longer by 20 | " + " | ".join(WAYS))
    with torch.no_grad():
        for kind in kinds:
            for which in args.scaled:
                found = measure(kind, which, args.prompts, args.lengths, data)
                cells = [f"{float(x.mean()):.1e} / {float(x.max()):.1e}" for x in found]
                print(f"{kind}, {which or 'nothing'} | " + " | ".join(cells), flush=True)
                worst = max(worst, float(found[3].median() / found[2].median()))
                in_double = max(in_double, float(found[4].max()))
    print(verdict("float32, error of the converted pass over that of the plain one, worst row", worst, SINGLE))
    print(verdict("float64, worst prompt", in_double, DOUBLE))


if __name__ == "__main__":
    main()

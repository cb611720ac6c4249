"""Time of a forward pass under a KV bias on KVTransformerBridge, against the same bridge continuing from Transformers' cache.

    python tests/benchmarks/bench_bridge.py [--families ...] [--prompt 256] [--text 128] [--repeats 15] [--small]

Random models of d_model 512 in float32, one thread, processor time. The two passes run in turn, and the median of the ratios of
neighbors is reported, after their logits have been compared. Transformers' cache holds the prompt, and the bias is converted
from it. Also: the bridge with nothing attached against TransformerLens' own.
"""

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
import transformers as tf
from timing import check_close, verdict
from torch import Tensor
from transformer_lens.model_bridge.sources import build_bridge_from_module

sys.path.append(str(Path(__file__).resolve().parents[1] / "bridge"))

from bridge_models import FAMILIES, TextLength, tiny

from kvlens import KVTransformerBridge, convert_prompt

MOST, MOST_UNATTACHED = 1.15, 1.03
SIZES: dict[str, Any] = dict(
    num_hidden_layers=3,
    hidden_size=512,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=1000,
    max_position_embeddings=2048,
    sliding_window=128,
    query_pre_attn_scalar=64,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_num_heads=8,
    linear_head_dim=64,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    kv_lora_rank=128,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=64,
    mamba_n_heads=16,
    mamba_d_head=64,
    mamba_d_state=64,
    mamba_chunk_size=64,
    shared_intermediate_size=1536,
    moe_intermediate_size=256,
    shared_expert_intermediate_size=256,
    block_size=64,
    n_embd=512,
    n_head=8,
    n_positions=2048,
    n_ctx=2048,
)
"""Sizes by their names in Transformers' configurations; a family takes those that it has."""


def sized(family: str) -> tf.PreTrainedModel:
    """A random model of the family's tiny configuration, with these sizes instead."""
    small = tiny(family)
    config = small.config.to_dict()
    config.update({name: size for name, size in SIZES.items() if config.get(name) is not None})
    config.pop("model_max_length", None)  # another name, in Kimi Linear, for the number of positions
    if family == "kimi_linear":
        config["num_key_value_heads"] = config["num_attention_heads"]
    torch.manual_seed(0)
    return type(small)(type(small.config)(**config)).eval()


def pairs(ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int) -> tuple[list[float], list[float]]:
    """Processor seconds of both, in turn, each first in half of the pairs."""
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(repeats):
        both = [(ours, taken[0]), (theirs, taken[1])]
        for call, into in both if number % 2 else both[::-1]:
            start = process_time()
            call()
            into.append(process_time() - start)
    return taken


def ratio(ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int, what: str) -> float:
    """The median ratio of neighbors, after one warm-up of each."""
    ours()
    theirs()
    a, b = pairs(ours, theirs, repeats)
    print(f"{what}: {median(a) * 1e3:.1f} ms against {median(b) * 1e3:.1f} ms")
    return median(x / y for x, y in zip(a, b, strict=True))


def compare(family: str, n_prompt: int, n_text: int, repeats: int) -> tuple[float, float]:
    """Our time over theirs: under a bias, and with nothing attached."""
    plain = sized(family)
    bridge = build_bridge_from_module(copy.deepcopy(plain), type(plain).__name__, hf_config=plain.config)
    model = KVTransformerBridge.boot_transformers(copy.deepcopy(plain))
    tokens = torch.randint(50, (1, n_prompt + n_text), generator=torch.Generator().manual_seed(0))
    prompt, text = tokens[:, :n_prompt], tokens[:, n_prompt:]
    filled = TextLength() if family == "minimax" else tf.DynamicCache(config=plain.config)
    model.original_model(prompt, past_key_values=filled, use_cache=True)
    caches = [copy.deepcopy(filled) for _ in range(repeats + 2)]
    positions = torch.arange(n_prompt, n_prompt + n_text)[None]

    def theirs() -> Tensor:
        logits: Tensor = model(text, past_key_values=caches.pop(), use_cache=True, position_ids=positions)
        return logits

    under_bias = copy.deepcopy(model)
    under_bias.attach_kv_bias(convert_prompt(model, prompt))
    check_close(under_bias(text), theirs(), 1e-5, family)
    check_close(model(text), bridge(text), 1e-6, f"{family}, nothing attached")
    return (
        ratio(lambda: under_bias(text), theirs, repeats, f"{family}, under a bias / continued from a cache"),
        ratio(lambda: model(text), lambda: bridge(text), repeats, f"{family}, nothing attached / TransformerLens' bridge"),
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--text", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="short texts, one repeat: a smoke test")
    args = parser.parse_args(argv)
    n_prompt, n_text, repeats = (9, 8, 1) if args.small else (args.prompt, args.text, args.repeats)
    torch.set_num_threads(1)
    with torch.no_grad():
        for family in args.families:
            attached, unattached = compare(family, n_prompt, n_text, repeats)
            print(verdict("under a bias", attached, MOST))
            print(verdict("nothing attached", unattached, MOST_UNATTACHED), flush=True)


if __name__ == "__main__":
    main()

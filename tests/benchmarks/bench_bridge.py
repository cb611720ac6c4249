"""Time of a forward pass under a KV bias on KVTransformerBridge, against the same bridge continuing from Transformers' cache.

    python tests/benchmarks/bench_bridge.py [--families ...] [--prompt 256] [--text 128] [--repeats 25] [--small]

Random models of d_model 512 in float32, one thread, processor time. The two passes run in turn, and the median and quartiles
of the ratios of neighbors are reported, after their logits have been compared. Transformers' cache holds the prompt, and the
bias is converted from it. Also: the bridge with nothing attached against TransformerLens' own.
"""

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers as tf
from timing import check_close, times, verdict
from torch import Tensor
from transformer_lens.model_bridge.sources import build_bridge_from_module

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "bridge", "model")]

from bridge_models import FAMILIES, LIKE_THE_OTHERS, TextLength
from tiny_hf import PURELY_RECURRENT, tiny_hf_model

from kvlens import KVTransformerBridge, convert_prompt

MOST, MOST_UNATTACHED = 1.15, 1.03
NAMES = {
    4: "num_key_value_heads linear_num_key_heads",
    8: "num_attention_heads linear_num_value_heads linear_num_heads n_head",
    16: "mamba_n_heads mamba_num_heads num_heads",
    32: "qk_nope_head_dim qk_rope_head_dim",
    64: "head_dim query_pre_attn_scalar linear_head_dim linear_key_head_dim linear_value_head_dim v_head_dim mamba_d_head "
    "mamba_head_dim mamba_d_state ssm_state_size state_size mamba_chunk_size chunk_size block_size",
    128: "sliding_window kv_lora_rank",
    256: "q_lora_rank moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    512: "hidden_size n_embd",
    1000: "vocab_size",
    1024: "mamba_d_ssm",
    1536: "intermediate_size shared_intermediate_size",
    2048: "max_position_embeddings n_positions n_ctx",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}
"""Sizes by their names in Transformers' configurations; a family takes those that it has."""


def sized(family: str) -> tf.PreTrainedModel:
    """A random model of the family's tiny configuration, with these sizes instead."""
    small = tiny_hf_model(family)
    config = small.config.to_dict()
    config.update({name: size for name, size in SIZES.items() if config.get(name) is not None})
    config.pop("model_max_length", None)  # another name, in Kimi Linear, for the number of positions
    if family in ("kimi_linear", "deepseek_v3"):
        config["num_key_value_heads"] = config["num_attention_heads"]
    if family == "deepseek_v3":
        config["head_dim"] = config["qk_rope_head_dim"]
    torch.manual_seed(0)
    model = type(small)(type(small.config)(**config)).eval()
    if family == "deepseek_v3":
        model.config._attn_implementation = "eager"  # else TransformerLens' bridge gets no mask, and applies none
    return model


def ratios(ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int, what: str) -> tuple[float, float, float]:
    """The quartiles and the median of the ratio of neighbors."""
    a, b = times(ours, theirs, repeats=repeats, clock="processor")
    found = torch.tensor([x / y for x, y in zip(a, b, strict=True)], dtype=torch.float64)
    low, middle, high = found.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    print(f"{what}: {median(a) * 1e3:.1f} ms against {median(b) * 1e3:.1f} ms, {middle:.2f} ({low:.2f} to {high:.2f})")
    return low, middle, high


def compare(family: str, n_prompt: int, n_text: int, repeats: int) -> list[tuple[float, float, float]]:
    """Our time over theirs: under a bias, and with nothing attached."""
    plain = sized(family)
    bridge = build_bridge_from_module(copy.deepcopy(plain), type(plain).__name__, hf_config=plain.config)
    model = KVTransformerBridge.boot_transformers(copy.deepcopy(plain))
    tokens = torch.randint(50, (1, n_prompt + n_text), generator=torch.Generator().manual_seed(0))
    prompt, text = tokens[:, :n_prompt], tokens[:, n_prompt:]
    given = {"past_key_values": TextLength()} if family == "minimax" else {}
    name = "cache_params" if family in PURELY_RECURRENT else "past_key_values"
    filled = getattr(model.original_model(prompt, use_cache=True, **given), name)
    caches = [copy.deepcopy(filled) for _ in range(repeats + 2)]
    at = {} if family in PURELY_RECURRENT else {"position_ids": torch.arange(n_prompt, n_prompt + n_text)[None]}

    def theirs() -> Tensor:
        logits: Tensor = model(text, **{name: caches.pop()}, use_cache=True, **at)
        return logits

    under_bias = copy.deepcopy(model)
    under_bias.attach_kv_bias(convert_prompt(model, prompt))
    check_close(under_bias(text), theirs(), 1e-5, family)
    check_close(model(text), bridge(text), 1e-6, f"{family}, nothing attached")
    return [
        ratios(lambda: under_bias(text), theirs, repeats, f"{family}, under a bias / continued from a cache"),
        ratios(lambda: model(text), lambda: bridge(text), repeats, f"{family}, nothing attached / TransformerLens' bridge"),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    families = [*FAMILIES, *LIKE_THE_OTHERS, *PURELY_RECURRENT]
    parser.add_argument("--families", nargs="*", default=families, choices=families)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--text", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--small", action="store_true", help="short texts, one repeat: a smoke test")
    args = parser.parse_args(argv)
    n_prompt, n_text, repeats = (9, 8, 1) if args.small else (args.prompt, args.text, args.repeats)
    torch.set_num_threads(1)
    with torch.no_grad():
        for family in args.families:
            attached, unattached = compare(family, n_prompt, n_text, repeats)
            print(verdict("under a bias", attached[1], MOST))
            print(verdict("nothing attached", unattached[1], MOST_UNATTACHED), flush=True)


if __name__ == "__main__":
    main()

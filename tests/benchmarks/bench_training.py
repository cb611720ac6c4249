"""Training steps per second: a shifted model and a linear-attention model against plain TransformerLens of the same size.

    python tests/benchmarks/bench_training.py [--small]

A step is forward pass, mean next-token loss, backward pass, gradient clipping and AdamW, the same code for all. 4 layers,
d_model 256, 4 heads of 64, MLP, rotary, vocabulary 1,000; batches of 4,096 tokens.
"""

import argparse
from collections.abc import Callable

import torch
from timing import check_close, medians, verdict

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVShiftConfig
from kvlens.base import HookedTransformer, HookedTransformerConfig
from kvlens.training import TrainSettings
from kvlens.training.run import build_optimizer

SIZES = dict(n_layers=4, d_model=256, d_head=64)
SMALL = dict(n_layers=2, d_model=64, d_head=16)
COMMON = dict(d_vocab=1000, act_fn="gelu", device="cpu", seed=0, positional_embedding_type="rotary")


def step_of(model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    """One training step on ``tokens``."""
    optimizer = build_optimizer(model, TrainSettings())
    parameters = list(model.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(tokens, return_type="loss").backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def compare(name: str, settings: dict, sizes: dict[str, int], n_pos: int, n_tokens: int, bound: float, repeats: int) -> None:
    """Time ``HookedKVTransformer`` with ``settings`` against plain TransformerLens, in turn."""
    common = {**COMMON, **sizes, "n_ctx": n_pos}
    plain = HookedTransformer(HookedTransformerConfig(**common))
    ours = HookedKVTransformer(HookedKVTransformerConfig(**common, **settings))
    tokens = torch.randint(0, 1000, (n_tokens // n_pos, n_pos), generator=torch.Generator().manual_seed(0))
    check(plain, ours, tokens[:, :32])
    ours_time, plain_time = medians(step_of(ours, tokens), step_of(plain, tokens), repeats=repeats)
    ours_speed, plain_speed = n_tokens / ours_time, n_tokens / plain_time
    print(f"{name}, {tokens.shape[0]} x {n_pos} tokens: {ours_speed:,.0f} tokens per second, plain {plain_speed:,.0f}")
    print(verdict(f"{name}: throughput over plain TransformerLens", plain_time / ours_time, bound, at_least=True))


def check(plain: HookedTransformer, ours: HookedKVTransformer, tokens: torch.Tensor) -> None:
    """The softmax model without a shift is TransformerLens'; the linear one agrees with its slowest form."""
    if ours.cfg.attention == "softmax":
        twin = HookedKVTransformer.from_hooked_transformer(plain, kv_shift=KVShiftConfig(init="identity"))
        check_close(twin(tokens), plain(tokens), 1e-6, "identity shift")
        return
    slow = HookedKVTransformer(HookedKVTransformerConfig(**{**ours.cfg.to_json(), "dtype": torch.float32, "device": "cpu"}))
    slow.load_state_dict(ours.state_dict())
    for block in slow.blocks:
        block.attn.cfg.linear_attention_form = "recurrent"
    check_close(ours(tokens), slow(tokens), 1e-5, "linear attention")


def main(argv: list[str] | None = None) -> None:
    """Run both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="seconds instead of a minute; figures mean little then")
    small = parser.parse_args(argv).small
    repeats, n_tokens, sizes = (1, 256, SMALL) if small else (7, 4096, SIZES)
    compare("KV shift", dict(kv_shift=KVShiftConfig()), sizes, 64 if small else 512, n_tokens, 0.95, repeats)
    linear = dict(attention="linear", kv_shift=None)
    compare("linear attention", linear, sizes, 128 if small else 1024, n_tokens, 2.0, repeats)


if __name__ == "__main__":
    main()

"""How the cost of attributions grows with layers, heads, vocabulary and prompt length.

    python tests/benchmarks/bench_attribution_cost.py [--small] [--kinds softmax linear] [--repeats 5]

Random weights, one thread, processor time, the least of several runs. One quantity is doubled at a time, the others stay:
4 layers, 4 heads of 32 (d_model 256 throughout, so that weights grow with heads), a vocabulary of 4,096, a prompt of 256
tokens in 8 units, a text of 8 tokens. The exponent is the slope of log time over log size between the two largest sizes:
at small ones the fixed cost per operation flattens the curve. Next to the analyses stands one forward pass over prompt and
text that computes the last position's logits only. "times a pass" is the cost at the largest size, over that of this pass.

First the answer is checked: the total effect of each unit is the difference of two plain forward passes.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from kvlens.analyses.attribution.by_head import attribution_by_head
from kvlens.analyses.attribution.by_position import attribution_by_position
from kvlens.analyses.attribution.prompt import prompt_attribution
from kvlens.analyses.bias.by_head import bias_by_head
from kvlens.analyses.bias.effects import bias_effects
from timing import check_close, times

from kvlens import HookedKVTransformer, HookedKVTransformerConfig

N_TEXT, N_UNITS, ANSWER = 8, 8, 3
BASE = dict(layers=4, heads=4, vocabulary=4096, prompt=256)
SIZES = dict(layers=(4, 8, 16), heads=(4, 8, 16), vocabulary=(4096, 16384, 65536), prompt=(256, 512, 1024))
SMALL_BASE = dict(layers=2, heads=2, vocabulary=64, prompt=32)
SMALL_SIZES = dict(layers=(1, 2))
KINDS: dict[str, dict[str, Any]] = {
    "softmax": dict(attention="softmax", positional_embedding_type="rotary", rotary_dim=32),
    "linear": dict(attention="linear", positional_embedding_type="rotary", rotary_dim=32),
}


def model_of(kind: str, layers: int, heads: int, vocabulary: int, prompt: int) -> HookedKVTransformer:
    cfg = HookedKVTransformerConfig(
        n_layers=layers,
        n_heads=heads,
        d_head=32,
        d_model=256,
        d_vocab=vocabulary,
        n_ctx=prompt + N_TEXT,
        act_fn="gelu_new",
        normalization_type="LN",
        seed=0,
        device="cpu",
        **KINDS[kind],
    )
    return HookedKVTransformer(cfg).requires_grad_(False)


def inputs(vocabulary: int, prompt: int) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
    """Tokens of the prompt and of the text, and the units' ranges."""
    tokens = torch.randint(vocabulary, (prompt + N_TEXT,), generator=torch.Generator().manual_seed(0))
    width = prompt // N_UNITS
    return tokens[:prompt], tokens[prompt:], [(u * width, (u + 1) * width) for u in range(N_UNITS)]


def check(kind: str, sizes: dict[str, int]) -> None:
    """Total effects with the units' positions closed, against plain forward passes in float64."""
    model = model_of(kind, **sizes).to(torch.float64)
    prompt, text, units = inputs(sizes["vocabulary"], sizes["prompt"])

    def score(kept: torch.Tensor) -> torch.Tensor:
        return model(torch.cat([kept, text])[None])[0, -1].log_softmax(-1)[ANSWER]

    found = prompt_attribution(model, prompt, text, by=units, answer=ANSWER, positions="closed")
    expected = torch.stack([score(prompt) - score(torch.cat([prompt[:start], prompt[stop:]])) for start, stop in units])
    check_close(torch.tensor(found["total_effect"].to_numpy()), expected, 1e-9, f"total effects, {kind}")


def calls(kind: str, layers: int, heads: int, vocabulary: int, prompt: int) -> dict[str, Callable[[], Any]]:
    model = model_of(kind, layers, heads, vocabulary, prompt)
    tokens, text, units = inputs(vocabulary, prompt)

    def forward() -> torch.Tensor:
        hidden = model(torch.cat([tokens, text])[None], stop_at_layer=layers)
        return model.unembed(model.ln_final(hidden[:, -1:]))

    return {
        "forward pass": forward,
        f"prompt_attribution, {N_UNITS} units": lambda: prompt_attribution(model, tokens, text, by=units, answer=ANSWER),
        f"attribution_by_head, {N_UNITS} units": lambda: attribution_by_head(model, tokens, text, by=units, answer=ANSWER),
        "attribution_by_position": lambda: attribution_by_position(model, tokens, text, by=units[:1], answer=ANSWER),
        "bias_effects by head": lambda: bias_effects(model, tokens, text, by="head"),
        "bias_by_head": lambda: bias_by_head(model, tokens, text),
    }


def measured(kind: str, base: dict[str, int], name: str, values: tuple[int, ...], repeats: int) -> pd.DataFrame:
    """A row per analysis: seconds at each size of one quantity, the exponent, and the cost over a forward pass."""
    taken: dict[str, list[float]] = {}
    for value in values:
        each = calls(kind, **{**base, name: value})
        for what, runs in zip(each, times(*each.values(), repeats=repeats, clock="processor"), strict=True):
            taken.setdefault(what, []).append(min(runs))
    rows = [
        {
            "grows": f"{name} {values[0]:,} to {values[-1]:,}",
            "analysis": what,
            "seconds": " / ".join(f"{s:.3g}" for s in seconds),
            "exponent": round(math.log(seconds[-1] / seconds[-2]) / math.log(values[-1] / values[-2]), 2),
            "times a pass": round(seconds[-1] / taken["forward pass"][-1], 1),
        }
        for what, seconds in taken.items()
    ]
    return pd.DataFrame(rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="tiny sizes: a smoke test")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    for kind in args.kinds:
        check(kind, SMALL_BASE)
        base, sizes = (SMALL_BASE, SMALL_SIZES) if args.small else (BASE, SIZES)
        print(f"{kind} attention")
        for name, values in sizes.items():
            print(measured(kind, base, name, values, 1 if args.small else args.repeats).to_string(index=False), flush=True)


if __name__ == "__main__":
    main()

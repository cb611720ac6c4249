"""The time of a pass on a real model, beside Transformers' own pass over the same weights.

    python tests/benchmarks/bench_real_speed.py FOLDER [--front-ends hooked bridge] [--prompt 128] [--seconds 10]

FOLDER is in Hugging Face's format, such as SmolLM2-135M's. Both sides run in turn in one process, in float32 on one thread, and
medians of processor time are compared, after their logits were. Under a bias, Transformers continues from a cache that holds
the prompt.
"""

import argparse
import copy
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from timing import check_close, medians, verdict
from torch import Tensor

from kvlens import HookedKVTransformer, KVTransformerBridge, convert_prompt

LENGTHS, N_NEW = (1, 32, 128, 512), 16
MOST = {"hooked": (1.1, 1.15), "bridge": (1.2, 1.2)}
"""Ours over theirs: with nothing attached; under a bias, decoding and hooked."""
ROUNDING = 1e-4


class Beside:
    """One front end and Transformers' model of the same folder."""

    def __init__(self, folder: Path, front_end: str, n_prompt: int, seconds: float):
        options: dict[str, Any] = dict(device="cpu", dtype=torch.float32)
        self.is_bridge, self.seconds = front_end == "bridge", seconds
        self.plain = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        load = KVTransformerBridge.boot_transformers if self.is_bridge else HookedKVTransformer.from_pretrained
        self.model: Any = load(folder, **options)
        self.name, (self.most, self.most_more) = front_end, MOST[front_end]
        self.prompt, self.n_prompt = self.tokens(n_prompt, seed=1), n_prompt

    def tokens(self, n: int, seed: int = 0) -> Tensor:
        return torch.randint(self.plain.config.vocab_size, (1, n), generator=torch.Generator().manual_seed(seed))

    def compare(self, what: str, most: float, ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> None:
        check_close(ours().log_softmax(-1), theirs().log_softmax(-1), ROUNDING, what)
        (once,) = medians(theirs, repeats=3, clock="processor")
        a, b = medians(ours, theirs, repeats=max(5, math.ceil(self.seconds / once / 2)), clock="processor")
        line = f"{self.name}, {what}: {a * 1e3:.4g} ms against {b * 1e3:.4g} ms"
        print(line + verdict("", a / b, most), flush=True)

    def passes(self) -> None:
        for n in LENGTHS:
            text = self.tokens(n)
            self.compare(f"{n} tokens", self.most, partial(self.model, text), lambda text=text: self.plain(text).logits)

    def hooked(self) -> None:
        """Hooks that look, on every layer."""
        text, resid = self.tokens(32), "hook_out" if self.is_bridge else "hook_resid_post"
        z = "attn.o.hook_in" if self.is_bridge else "attn.hook_z"
        for name in (z, resid):
            hooks = [(f"blocks.{layer}.{name}", lambda x, hook: None) for layer in range(self.model.cfg.n_layers)]
            ours = partial(self.model.run_with_hooks, text, fwd_hooks=hooks)
            self.compare(f"32 tokens, hooks on {name}", self.most_more, ours, lambda: self.plain(text).logits)

    def under_a_bias(self) -> None:
        bias = convert_prompt(self.model, self.prompt)
        filled = self.plain(self.prompt, use_cache=True).past_key_values
        self.model.attach_kv_bias(bias)
        for n in LENGTHS:
            text = self.tokens(n)

            def theirs(text: Tensor = text) -> Tensor:
                appended = filled.get_seq_length() - self.n_prompt  # by the last pass
                if appended:
                    filled.crop(-appended)
                logits: Tensor = self.plain(text, past_key_values=filled, use_cache=True).logits
                return logits

            self.compare(f"{n} tokens under {self.n_prompt}", self.most_more, partial(self.model, text), theirs)
        self.model.detach_kv_bias()

    def decoding(self) -> None:
        """Tokens behind a cache, one by one, each side with its own."""
        text = self.tokens(N_NEW)

        def one_by_one(start: Any, step: Callable[[Tensor, Any], Any]) -> Tensor:
            cache = copy.deepcopy(start)
            return torch.cat([step(token, cache) for token in text.split(1, dim=1)], dim=1)

        def their_step(token: Tensor, cache: Any) -> Tensor:
            return self.plain(token, past_key_values=cache, use_cache=True).logits

        def our_step(token: Tensor, cache: Any) -> Tensor:
            if self.is_bridge:
                return self.model.original_model(token, past_key_values=cache, use_cache=True).logits
            return self.model(token, past_kv_cache=cache)

        filled = self.plain(self.prompt, use_cache=True).past_key_values
        own = filled
        if not self.is_bridge:
            own = self.model.empty_cache()
            self.model(self.prompt, past_kv_cache=own)
        ours, theirs = partial(one_by_one, own, our_step), partial(one_by_one, filled, their_step)
        self.compare(f"{N_NEW} tokens one by one behind {self.n_prompt}", self.most_more, ours, theirs)


def processor() -> str:
    return next((x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--front-ends", nargs="*", default=list(MOST), choices=list(MOST))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10.0, help="for one comparison")
    args = parser.parse_args(argv)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    print(f"{processor()}, torch {torch.__version__}, Transformers {tf.__version__}", file=sys.stderr)
    try:
        with torch.no_grad():
            for front_end in args.front_ends:
                beside = Beside(args.folder, front_end, args.prompt, args.seconds)
                for measure in (beside.passes, beside.hooked, beside.under_a_bias, beside.decoding):
                    measure()
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    main()

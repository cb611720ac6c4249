"""Memory and time of loading, converting and explaining on KVTransformerBridge, at real shapes of public models.

    python tests/benchmarks/bench_real_sizes.py [--models gpt2 qwen3-0.6b ...] [--prompt 192] [--steps convert explain page]

A folder of random weights, with the sizes of the public checkpoint and in its dtype, and a tokenizer of words, is written into
a temporary directory, and removed afterwards. Separate processes load it, once by TransformerLens' bridge and once by kvlens',
and convert, explain and make a page on a prompt of four sentences. One thread. Reported is the peak of anonymous memory
(RssAnon in Linux, every 2 ms: the mapped weight file is no part of it) beyond that after the imports, as a multiple of the
weights. The bound is on what kvlens takes beyond what the loaded bridge itself holds: 1.3 times the weights in the folder's
dtype.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import save_file
from timing import verdict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

MOST = 1.3
N_WORDS = 400
GPT2 = dict(architectures=["GPT2LMHeadModel"], dtype="float32")
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
CONFIGS: dict[str, tf.PreTrainedConfig] = {
    "tiny": tf.GPT2Config(**GPT2, n_layer=2, n_embd=16, n_head=2, vocab_size=N_WORDS + 2, bos_token_id=0, eos_token_id=0),
    "gpt2": tf.GPT2Config(**GPT2),
    "qwen3-0.6b": tf.Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    ),
    "llama-3.2-1b": tf.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        rope_parameters=dict(**LLAMA3, original_max_position_embeddings=8192),
    ),
}
"""As in the public checkpoints' config.json. The first is for a smoke test."""


def write_folder(name: str, folder: Path) -> int:
    """A folder in Hugging Face's format with random weights; returns their bytes."""
    config = CONFIGS[name]
    config.save_pretrained(folder)
    dtype = getattr(torch, str(config.dtype).removeprefix("torch."))
    with torch.device("meta"):
        model: Any = tf.AutoModelForCausalLM.from_config(config)
    generator, weights = torch.Generator().manual_seed(0), {}
    for key, weight in model.named_parameters():  # a tied unembedding is named once
        random = (
            torch.ones(weight.shape) if weight.dim() == 1 else torch.empty(weight.shape).normal_(std=0.02, generator=generator)
        )
        weights[key] = random.to(dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    words = {"[BOS]": 0, ".": 1, **{f"w{i}": 2 + i for i in range(N_WORDS)}}
    backend = Tokenizer(WordLevel(words, unk_token="."))
    backend.pre_tokenizer = Whitespace()
    tf.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="[BOS]", eos_token="[BOS]").save_pretrained(folder)
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


class Sampler(threading.Thread):
    """The peak of this process's anonymous memory since the last :meth:`take`, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self.done = threading.Event()

    @staticmethod
    def now() -> int:
        return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

    def run(self) -> None:
        while not self.done.wait(0.002):
            self.most = max(self.most, self.now())

    def take(self) -> int:
        most, self.most = max(self.most, self.now()), 0
        return most


def sentences(n_tokens: int) -> str:
    """Four sentences of random words, of so many tokens in all."""
    drawn = torch.randint(N_WORDS, (n_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    ends = {(i + 1) * n_tokens // 4 - 1 for i in range(4)}
    return "".join("." if i in ends else f" w{word}" for i, word in enumerate(drawn)).strip()


def child(folder: Path, front_end: str, n_prompt: int, steps: list[str]) -> None:
    """One process: print the peak after the imports, and of each step."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    from kvlens import KVTransformerBridge, convert_prompt, explain
    from kvlens.explanation import explanation_page

    torch.set_num_threads(1)
    sampler = Sampler()
    found: dict[str, Any] = {"imports": sampler.now()}
    sampler.start()

    def note(step: str, since: float) -> None:
        found[step] = [sampler.take(), time.process_time() - since, sampler.now()]
        print(f"    {step}: {found[step][1]:.0f} s", file=sys.stderr, flush=True)

    dtype = tf.AutoConfig.from_pretrained(folder).dtype
    with torch.no_grad():
        start = time.process_time()
        if front_end == "TransformerLens":
            plain = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
            build_bridge_from_module(plain, type(plain).__name__, hf_config=plain.config)
            note("load", start)
        else:
            model = KVTransformerBridge.boot_transformers(folder, device="cpu", dtype=dtype)
            note("load", start)
            prompt, text = sentences(n_prompt), "w1 w2 w3 w4 w5 w6 w7 w8"
            start = time.process_time()
            if "convert" in steps:
                bias = convert_prompt(model, prompt)
                with model.kv_bias(bias):
                    model.logits_on(model.to_tokens(text, prepend_bos=False), 1)
                del bias
                note("convert", start)
            start = time.process_time()
            if {"explain", "page"} & {*steps}:
                explained = explain(model, prompt, text)
                note("explain", start)
            start = time.process_time()
            if "page" in steps:
                explanation_page(model, explained).save_html(folder / "page.html")
                note("page", start)
    sampler.done.set()
    print(json.dumps(found))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(CONFIGS)[1:], choices=list(CONFIGS))
    parser.add_argument("--prompt", type=int, default=192)
    steps = ["convert", "explain", "page"]
    parser.add_argument("--steps", nargs="*", default=steps, choices=steps)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        return child(Path(args.child[0]), args.child[1], args.prompt, args.steps)
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            size = write_folder(name, Path(folder))
            print(f"{name}: weights of {size / 2**30:.2f} GiB")
            loaded = 0
            for front_end in ("TransformerLens", "kvlens"):
                command = [sys.executable, "-W", "ignore", __file__, "--child", folder, front_end, "--prompt", str(args.prompt)]
                command += ["--steps", *args.steps]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
                found = json.loads(done.stdout.splitlines()[-1])
                base = found.pop("imports")
                for step, (peak, seconds, after) in found.items():
                    over, left = (peak - base) / size, (after - base) / size
                    print(f"  {front_end}, {step}: peak {over:.2f}, afterwards {left:.2f} times the weights; {seconds:.0f} s")
                    if front_end == "TransformerLens":
                        loaded = after
                    else:
                        print(verdict(f"beyond the bridge, {step}", (peak - loaded) / size, MOST), flush=True)


if __name__ == "__main__":
    main()

"""Whether kvlens' eviction methods keep the same keys as kvpress, on the same model and prompts.

    python -m venv kvpress-env && kvpress-env/bin/pip install "kvpress==0.5.5"
    python tests/benchmarks/bench_kvpress.py --python kvpress-env/bin/python [--seeds 5]

kvpress needs an older Transformers than kvlens, hence the second interpreter, which runs this file with ``--theirs``. Models
are random, of Llama's architecture with grouped heads and sharp attention; prompts are random tokens. Two of kvpress' methods
are changed for the comparison: KVzip repeats the context without an instruction, and ``ObservedAttentionPress``, "related to
H2O", sums attention as H2O does instead of averaging it over the queries that see a key (kvlens' H2O with ``recent=0``).
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

N_TOKENS, KEPT = 64, 16
SIZES = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=1024,
    initializer_range=0.35,
    tie_word_embeddings=False,
)
Kept = dict[str, list[list[list[int]]]]
"""By method, layer and key-value head: the positions of the keys that are kept."""


def prompt_of(seed: int) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (N_TOKENS,), generator=torch.Generator().manual_seed(100 + seed))  # type: ignore[call-overload]


def write_model(seed: int, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**SIZES)).eval().save_pretrained(folder)  # type: ignore[arg-type]


def kept_here(seed: int, folder: Path) -> Kept:
    """The keys that kvlens keeps."""
    from kvlens import HookedKVTransformer, convert_prompt
    from kvlens.conversion import H2O, ExpectedAttention, KVzip, SnapKV, StreamingLLM

    model = HookedKVTransformer.from_pretrained(str(folder), device="cpu")
    options: dict[str, Any] = dict(n_keys=KEPT, n_continuations=2, continuation_length=4, n_held_out=0)
    methods = [StreamingLLM(**options), SnapKV(**options), ExpectedAttention(**options), KVzip(**options)]
    found = {}
    for method in [*methods, H2O(recent=0.0, **options)]:
        bias = convert_prompt(model, prompt_of(seed), method=method, verbose=False)
        positions = N_TOKENS - bias.features.distance  # type: ignore[union-attr]
        found[method.name] = [
            [sorted(positions[layer, head][bias.b_D[layer, head] != 0].tolist()) for head in range(3)] for layer in range(3)
        ]
    return found


def kept_there(seed: int, folder: Path) -> Kept:
    """The keys that kvpress keeps: those of the compressed cache, found in the whole one."""
    import kvpress
    from kvpress.presses import kvzip_press
    from transformers import DynamicCache, LlamaForCausalLM

    class NoInstruction:
        chat_template = None

        def encode(self, text: str, **_: Any) -> torch.Tensor:
            return torch.zeros(1, 0, dtype=torch.long)

    class SummedAttention(kvpress.ObservedAttentionPress):
        def score(self, module: Any, hidden_states: Any, keys: torch.Tensor, *others: Any) -> torch.Tensor:
            return super().score(module, hidden_states, keys, *others) * torch.arange(keys.shape[2], 0, -1)

    kvzip_press.AutoTokenizer.from_pretrained = lambda *_, **__: NoInstruction()
    evicted = 1 - KEPT / N_TOKENS
    presses = {
        "streaming_llm": kvpress.StreamingLLMPress(evicted),
        "snapkv": kvpress.SnapKVPress(evicted, window_size=KEPT // 2),
        "expected_attention": kvpress.ExpectedAttentionPress(evicted),
        "kvzip": kvpress.KVzipPress(evicted),
        "h2o": SummedAttention(evicted),
    }
    ids, found = prompt_of(seed)[None], {}
    for name, press in presses.items():
        attention = "eager" if name == "h2o" else "sdpa"
        model = LlamaForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
        whole, cache = DynamicCache(), DynamicCache()
        with torch.no_grad():
            model(ids, past_key_values=whole)
            with press(model):
                model.model(input_ids=ids, past_key_values=cache)
        found[name] = [
            [
                _positions(model.model.layers[layer].self_attn, whole.layers[layer], cache.layers[layer], head)
                for head in range(3)
            ]
            for layer in range(3)
        ]
    return found


def _positions(attention: Any, whole: Any, cache: Any, head: int) -> list[int]:
    masked = getattr(attention, "masked_key_indices", None)
    if masked is not None:
        gone = set(masked[2][masked[1] == head].tolist())
        return [position for position in range(N_TOKENS) if position not in gone]
    return sorted(torch.cdist(cache.keys[0, head], whole.keys[0, head]).argmin(dim=1).tolist())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="an interpreter that has kvpress")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--theirs", type=Path, help="used by this program itself")
    asked = parser.parse_args(argv)
    if asked.theirs is not None:
        found = [kept_there(seed, asked.theirs / str(seed)) for seed in range(asked.seeds)]
        (asked.theirs / "kept.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for seed in range(asked.seeds):
            write_model(seed, folder / str(seed))
        ours = [kept_here(seed, folder / str(seed)) for seed in range(asked.seeds)]
        theirs = ours
        if asked.python is not None:
            subprocess.run(
                [asked.python, "-W", "ignore", __file__, "--theirs", str(folder), "--seeds", str(asked.seeds)],
                check=True,
                env={},
            )
            theirs = json.loads((folder / "kept.json").read_text())
    other = "kvpress" if asked.python is not None else "itself (no --python given)"
    for name in ours[0]:
        pairs = [
            (set(a), set(b))
            for one, two in zip(ours, theirs, strict=True)
            for layer_a, layer_b in zip(one[name], two[name], strict=True)
            for a, b in zip(layer_a, layer_b, strict=True)
        ]
        same, n = sum(len(a & b) for a, b in pairs), sum(len(a) for a, _ in pairs)
        print(f"{name}: {same} of {n} kept keys are those of {other}; {sum(a == b for a, b in pairs)} of {len(pairs)} heads")


if __name__ == "__main__":
    main()

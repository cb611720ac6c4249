"""A linear-attention model against TransformerLens' softmax model and Hugging Face's GPT-NeoX, and what conversion costs.

    python tests/benchmarks/bench_model.py [--small]

4 layers, d_model 512, 8 heads, vocabulary 1,000, rotary, MLP; 4,096 tokens.
"""

import argparse
from typing import Any

import torch
from timing import check_close, medians, verdict
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVShiftConfig, convert_prompt
from kvlens._tl import TransformerLensKeyValueCache
from kvlens.base import HookedTransformer, HookedTransformerConfig

SIZES = dict(n_layers=4, d_model=512, d_head=64)
SMALL = dict(n_layers=2, d_model=64, d_head=16)
COMMON = dict(d_vocab=1000, act_fn="gelu", device="cpu", seed=0, positional_embedding_type="rotary")


def linear_model(sizes: dict[str, int], n_ctx: int, **changes: Any) -> HookedKVTransformer:
    settings = {**COMMON, **sizes, "n_ctx": n_ctx, "attention": "linear", **changes}
    return HookedKVTransformer(HookedKVTransformerConfig(**settings)).requires_grad_(False)


def softmax_model(sizes: dict[str, int], n_ctx: int) -> HookedTransformer:
    return HookedTransformer(HookedTransformerConfig(**COMMON, **sizes, n_ctx=n_ctx))


def random_tokens(batch: int, n: int) -> torch.Tensor:
    return torch.randint(0, 1000, (batch, n), generator=torch.Generator().manual_seed(n))


def whole_model(sizes: dict[str, int], n: int, repeats: int) -> None:
    """Forward over ``n`` tokens: ours, TransformerLens' softmax, Hugging Face's fused softmax, and the dense products alone."""
    ours, tokens = linear_model(sizes, n), random_tokens(1, n)
    softmax, width = softmax_model(sizes, n).requires_grad_(False), sizes["d_model"]
    config = GPTNeoXConfig(
        vocab_size=1000, hidden_size=width, num_hidden_layers=sizes["n_layers"], intermediate_size=4 * width,
        num_attention_heads=width // sizes["d_head"], max_position_embeddings=n, attn_implementation="sdpa",
    )  # fmt: skip
    hf_model = GPTNeoXForCausalLM(config).eval().requires_grad_(False)
    check_close(
        ours(tokens[:, :64]), linear_model(sizes, n, linear_attention_form="recurrent")(tokens[:, :64]), 1e-5, "whole model"
    )
    dense = [torch.rand(width, width) for _ in range(4)], *(torch.rand(a * width, b * width) for a, b in ((1, 4), (4, 1)))
    x, unembedding = torch.rand(n, width), torch.rand(width, 1000)

    def dense_products():
        for _ in range(sizes["n_layers"]):
            for w in dense[0]:
                x @ w
            (x @ dense[1]) @ dense[2]
        x @ unembedding

    a, b, c, d = medians(
        lambda: ours(tokens), lambda: softmax(tokens), lambda: hf_model(tokens), dense_products, repeats=repeats
    )
    print(f"{n} tokens: linear {a:.3f} s, TransformerLens softmax {b:.3f} s, Hugging Face {c:.3f} s, dense products {d:.3f} s")
    print(verdict("faster than TransformerLens, times", b / a, 10.0, at_least=True))
    print(verdict("faster than Hugging Face, times", c / a, 1.0, at_least=True))


def conversion(sizes: dict[str, int], n: int, repeats: int) -> None:
    """What converting ``n`` tokens costs, and what the text after it costs then."""
    model, prompt, text = linear_model(sizes, n + 16), random_tokens(1, n), random_tokens(1, 16)
    whole = torch.cat([prompt, text], dim=1)
    bias = convert_prompt(model, prompt)
    with model.kv_bias(bias):
        error = check_close(model(text), model_without(model, whole)[:, -16:], 1e-5, "conversion")
    print(f"converting {n} tokens: relative error {error:.1e}")
    convert, forward, original = medians(
        lambda: convert_prompt(model, prompt), lambda: model(prompt), lambda: model(whole), repeats=repeats
    )
    with model.kv_bias(bias):
        (converted,) = medians(lambda: model(text), repeats=10 * repeats)
    print(f"  convert {convert:.3f} s, forward {forward:.3f} s")
    print(f"  16 tokens {converted * 1e3:.2f} ms, original {original * 1e3:.0f} ms")
    print(verdict("conversion over a forward pass, times", convert / forward, 1.2))
    print(verdict("faster over 16 new tokens, times", original / converted, 50.0, at_least=True))


def model_without(model: HookedKVTransformer, tokens: torch.Tensor) -> torch.Tensor:
    """The model's logits with nothing attached."""
    attached = model.attached_kv_bias
    model.detach_kv_bias()
    logits = model(tokens)
    if attached is not None:
        model.attach_kv_bias(attached)
    return logits


def decoding(sizes: dict[str, int], short: int, long: int, repeats: int) -> None:
    """Seconds a decoded token after a short and after a long context: the state does not grow."""
    model = linear_model(sizes, 4096)
    caches = []
    for n in (short, long):
        cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 1)
        model(random_tokens(1, n), past_kv_cache=cache)
        cache.freeze()
        caches.append(cache)
    token = random_tokens(1, 1)
    check_close(
        model(token, past_kv_cache=caches[0]), model(torch.cat([random_tokens(1, short), token], 1))[:, -1:], 1e-5, "decoding"
    )
    a, b = medians(*(lambda c=c: model(token, past_kv_cache=c) for c in caches), repeats=repeats)
    print(f"a decoded token after {short} tokens: {a * 1e3:.2f} ms, after {long}: {b * 1e3:.2f} ms")
    print(verdict("ratio", b / a, 1.2))


def generation(sizes: dict[str, int], short: int, long: int, n_new: int) -> None:
    """The same through ``generate``, whose own bookkeeping copies the text's embeddings at every token."""
    model = linear_model(sizes, 4096)
    times = []
    for n in (short, long):
        options = dict(do_sample=False, stop_at_eos=False, verbose=False)
        one, many = medians(
            lambda n=n, o=options: model.generate(random_tokens(1, n), max_new_tokens=1, **o),
            lambda n=n, o=options: model.generate(random_tokens(1, n), max_new_tokens=1 + n_new, **o),
            repeats=3,
        )
        times.append((many - one) / n_new)
    print(f"the same through generate(): {times[0] * 1e3:.2f} ms and {times[1] * 1e3:.2f} ms, ratio {times[1] / times[0]:.2f}")


def shift_cost(sizes: dict[str, int], batch: int, n: int, repeats: int) -> None:
    """A softmax model with KV shift against the plain one, forward and forward + backward."""
    plain = softmax_model(sizes, n)
    shifted = HookedKVTransformer.from_hooked_transformer(plain, kv_shift=KVShiftConfig(init="identity"))
    tokens = random_tokens(batch, n)
    check_close(shifted(tokens), plain(tokens), 1e-6, "shift at the identity")

    def forward_of(model: Any):
        def run():
            with torch.no_grad():
                model(tokens)

        return run

    def both_of(model: Any):
        def run():
            model.zero_grad()
            model(tokens, return_type="loss").backward()

        return run

    for name, make in (("forward", forward_of), ("forward + backward", both_of)):
        a, b = medians(make(shifted), make(plain), repeats=repeats)
        print(f"KV shift, {batch} x {n} tokens, {name}: {a:.3f} s, plain {b:.3f} s")
        print(verdict("ratio", a / b, 1.05))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model, few tokens, one repeat: a smoke test")
    small = parser.parse_args(argv).small
    sizes = SMALL if small else SIZES
    with torch.no_grad():
        whole_model(sizes, 64 if small else 4096, 1 if small else 3)
        conversion(sizes, 64 if small else 4096, 1 if small else 5)
        decoding(sizes, 16 if small else 128, 64 if small else 8192, 1 if small else 100)
        generation(sizes, 16 if small else 128, 64 if small else 8192, 2 if small else 256)
    shift_cost(sizes, 1 if small else 4, 16 if small else 512, 1 if small else 9)


if __name__ == "__main__":
    main()

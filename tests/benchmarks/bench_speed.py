"""The time and memory of kvlens beside what does the same without it; nothing is timed whose answer is wrong.

    python tests/benchmarks/bench_speed.py [--only ROW ...] [--threads 2] [--clock wall] [--repeats 5] [--small]

Each row is a function below and runs in a process of its own, so that its peak memory is not another's. Where nothing else
is said, models have 4 layers, d_model 512, 8 heads, vocabulary 1,000, rotary, MLP. A row's sides run in turn, and their least
times are compared. ``--clock processor --threads 1`` measures processor time, for a machine that others use too.
"""

import argparse
import gc
import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from timing import CLOCKS, check_close, fastest, medians, peak_gib, verdict
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVBias, KVShiftConfig, convert_prompt
from kvlens.analyses import (
    attribution_by_head,
    attribution_by_position,
    bias_by_head,
    bias_effects,
    dual_losses,
    prompt_attribution,
)
from kvlens.ops.delta_rule import chunked_delta_rule, recurrent_delta_rule
from kvlens.ops.linear_attention import chunked_linear_attention, naive_linear_attention, parallel_linear_attention

SIZES = dict(n_layers=4, d_model=512, d_head=64, d_vocab=1000)
SMALL = dict(n_layers=2, d_model=64, d_head=16, d_vocab=100)
GPT2_SMALL = dict(n_layers=12, d_model=768, d_head=64, d_vocab=50257)


class Run(NamedTuple):
    """What the command line chose."""

    repeats: int
    clock: str
    small: bool

    def tokens(self, batch: int, n: int, d_vocab: int | None = None) -> torch.Tensor:
        d_vocab = d_vocab or (SMALL if self.small else SIZES)["d_vocab"]
        return torch.randint(0, d_vocab, (batch, n), generator=torch.Generator().manual_seed(n))

    def length(self, n: int) -> int:
        return n // 64 if self.small else n

    def model(self, n_ctx: int, **changes: Any) -> HookedKVTransformer:
        usual = dict(act_fn="gelu", device="cpu", seed=0, positional_embedding_type="rotary", n_ctx=n_ctx)
        sizes = SMALL if self.small else SIZES
        return HookedKVTransformer(HookedKVTransformerConfig(**{**usual, **sizes, **changes})).requires_grad_(False)

    def linear(self, n_ctx: int, n_checked: int) -> HookedKVTransformer:
        """A linear model whose answer at ``n_checked`` tokens is that of its slowest form, in float64."""
        model, tokens = self.model(n_ctx, attention="linear"), self.tokens(1, n_checked)
        slow = self.model(n_ctx, attention="linear", linear_attention_form="recurrent", dtype=torch.float64)
        slow.load_state_dict(model.state_dict())
        check_close(model(tokens), slow(tokens), 1e-5, f"linear at {n_checked} tokens")
        return model

    def hugging_face(self, n_ctx: int) -> GPTNeoXForCausalLM:
        sizes = SMALL if self.small else SIZES
        config = GPTNeoXConfig(
            vocab_size=sizes["d_vocab"], hidden_size=sizes["d_model"], num_hidden_layers=sizes["n_layers"],
            num_attention_heads=sizes["d_model"] // sizes["d_head"], intermediate_size=4 * sizes["d_model"],
            max_position_embeddings=n_ctx, attn_implementation="sdpa", bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return GPTNeoXForCausalLM(config).eval().requires_grad_(False)

    def compare(
        self, name: str, bound: float | None, ours: Callable, theirs: Callable, *, faster: bool = False, clock: str = ""
    ) -> None:
        """Print ours / theirs against its bound, where it has one; where ours is to be ``faster``, theirs / ours."""
        a, b = fastest(ours, theirs, repeats=self.repeats, clock=clock or self.clock)
        ratio = b / a if faster else a / b
        print(f"{name}: {a * 1e3:.4g} ms against {b * 1e3:.4g} ms, {ratio:.3g}")
        if bound is not None:
            print(verdict("times faster" if faster else "ratio", ratio, bound, at_least=faster), flush=True)


# --- one op ----------------------------------------------------------------------------------------------------------


def op(run: Run) -> None:
    """Chunked linear attention, 8 heads of 64, against torch's fused causal softmax attention; features are not timed."""

    def of(inputs: list[torch.Tensor], form: Callable) -> torch.Tensor:
        out = form(*inputs)  # phi~(q), phi~(k), v, phi(q), phi(k)
        return out.numerator / out.normalizer[..., None]

    def inputs(n: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.rand(1, n, 8, 64, generator=generator) for _ in range(5)]

    for n, slow in ((256, naive_linear_attention), (run.length(2048), parallel_linear_attention)):
        exact = of([x.double() for x in inputs(n)], slow)
        check_close(of(inputs(n), chunked_linear_attention), exact, 1e-5, f"chunked at {n} tokens")
    for n, bound, backward in ((4096, 4.0, False), (4096, 4.0, True), (16384, 12.0, False)):
        ours = [x.requires_grad_(backward) for x in inputs(run.length(n))]
        theirs = [x.detach().transpose(1, 2).contiguous().requires_grad_(backward) for x in ours[:3]]

        def linear(x: list[torch.Tensor] = ours, backward: bool = backward) -> None:
            out = of(x, chunked_linear_attention)
            if backward:
                torch.autograd.grad(out, x, torch.ones_like(out))

        def softmax(x: list[torch.Tensor] = theirs, backward: bool = backward) -> None:
            out = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True)
            if backward:
                torch.autograd.grad(out, x, torch.ones_like(out))

        with torch.set_grad_enabled(backward):
            run.compare(f"op, {n} tokens, forward{' + backward' * backward}", bound, linear, softmax, faster=True)


def delta(run: Run) -> None:
    """The chunked delta rule against Transformers' torch form of it, and Kimi delta attention (decay per channel) against its
    own; in the sizes of Qwen3-Next's heads, fewer of them; processor time."""
    n_heads, d_head = 4, 128
    for by_channel, n in ((False, 512), (False, 2048), (False, 8192), (True, 512), (True, 2048)):
        generator, length = torch.Generator().manual_seed(0), run.length(n)
        of_keys = (1, length, n_heads if by_channel else n_heads // 2, d_head)
        q, k = (torch.nn.functional.normalize(torch.randn(of_keys, generator=generator), dim=-1) for _ in range(2))
        v = torch.randn(1, length, n_heads, d_head, generator=generator)
        decay = -torch.rand(1, length, n_heads, *([d_head] if by_channel else []), generator=generator)
        write = torch.rand(1, length, n_heads, generator=generator)
        given = (q * d_head**-0.5, k, v, decay, write)
        form = chunk_kimi_delta_attention if by_channel else torch_chunk_gated_delta_rule
        ours = partial(chunked_delta_rule, *given, output_final_state=True)
        theirs = partial(form, q, k, v, g=decay, beta=write, initial_state=None, output_final_state=True)
        exact, _ = recurrent_delta_rule(*(x.double() for x in given))
        for name, output in (("chunked", ours()[0]), ("Transformers", theirs()[0])):
            check_close(output, exact, 1e-5, f"{name} at {length} tokens")
        name = "Kimi delta attention" if by_channel else "gated delta rule"
        run.compare(f"{name}, {n} tokens", 1.0, ours, theirs, clock="processor")


# --- linear models ---------------------------------------------------------------------------------------------------


def dense(run: Run) -> None:
    """A forward pass without hooks against its dense products: QKVO, MLP and unembedding as bare matrix products."""
    sizes = SMALL if run.small else SIZES
    d = sizes["d_model"]
    square, wide, narrow = [torch.rand(d, d) for _ in range(4)], torch.rand(d, 4 * d), torch.rand(4 * d, d)
    unembed = torch.rand(d, sizes["d_vocab"])

    def products(x: torch.Tensor, segment: int) -> None:
        """``segment`` tokens through all layers at a time."""
        for part in x.split(segment):
            for _ in range(sizes["n_layers"]):
                for w in square:
                    part @ w
                (part @ wide) @ narrow
            part @ unembed

    for n in map(run.length, (4096, 16384, 65536)):
        ours = partial(run.linear(n, min(n, 1500)), run.tokens(1, n))
        for segment, bound in ((n, 1.2), (1024, None)):
            theirs = partial(products, torch.rand(n, d), segment)
            run.compare(f"linear, {n} tokens, against its products, {segment} tokens at a time", bound, ours, theirs)


def forward(run: Run) -> None:
    """A forward pass against Hugging Face's fused one."""
    for n, bound in ((1024, 1.15), (4096, 1.7), (16384, 3.7)):
        n, tokens = run.length(n), run.tokens(1, run.length(n))
        ours, theirs = partial(run.linear(n, min(n, 1024)), tokens), partial(run.hugging_face(n), tokens)
        run.compare(f"linear, {n} tokens, against Hugging Face", bound, ours, theirs, faster=True)


def backward(run: Run) -> None:
    """Forward and backward against Hugging Face: linear, and softmax with KV shift."""

    def step_of(model: Any, tokens: torch.Tensor) -> Callable[[], None]:
        """Forward, mean next-token loss, backward; the same loss for every model."""
        parameters = [p.requires_grad_(True) for p in model.parameters()]

        def step() -> None:
            for p in parameters:
                p.grad = None
            out = model(tokens)
            logits = out if isinstance(out, torch.Tensor) else out.logits
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

        return step

    for batch, n, bound, kind in ((4, 512, 0.92, "linear"), (1, 2048, 0.72, "linear"), (4, 512, 1.1, "softmax with KV shift")):
        n, tokens = run.length(n), run.tokens(batch, run.length(n))
        if kind == "linear":
            model = run.linear(n, n)
        else:
            model = run.model(n, kv_shift=KVShiftConfig())
            check_kernel(model, tokens, kind)
        with torch.enable_grad():
            ours, theirs = step_of(model, tokens), step_of(run.hugging_face(n), tokens)
            run.compare(f"{kind}, forward + backward {batch} x {n}, against Hugging Face", bound, ours, theirs)


def decode(run: Run) -> None:
    """A decoded token at context 128 against Hugging Face ``generate``; and after 8,192 tokens, as the state does not grow."""
    n_new, prompt = (4 if run.small else 32), run.tokens(1, 128)
    model, hf = run.model(4096, attention="linear"), run.hugging_face(512)
    with_cache = model.generate(prompt, max_new_tokens=5, do_sample=False, stop_at_eos=False, verbose=False)
    grown = prompt
    for _ in range(5):
        grown = torch.cat([grown, model(grown)[:, -1:].argmax(-1)], dim=1)
    if not torch.equal(with_cache, grown):
        raise SystemExit("decoding: wrong answer, other tokens than without a cache")

    def ours(n: int) -> Any:
        return model.generate(prompt, max_new_tokens=n, do_sample=False, stop_at_eos=False, verbose=False)

    def theirs(n: int) -> Any:
        return hf.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, do_sample=False)

    calls = [lambda: ours(1), lambda: ours(1 + n_new), lambda: theirs(1), lambda: theirs(1 + n_new)]
    # many short runs, so that the shortest one was not disturbed by other processes
    a, b, c, d = fastest(*calls, repeats=4 * run.repeats, clock=run.clock)
    print(f"a decoded token at context 128: {(b - a) / n_new * 1e3:.3g} ms, Hugging Face {(d - c) / n_new * 1e3:.3g} ms")
    print(verdict("ratio", (b - a) / (d - c), 0.85), flush=True)
    caches = []
    for n in (128, run.length(8192)):
        cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 1)
        model(run.tokens(1, n), past_kv_cache=cache)
        cache.freeze()
        caches.append(partial(model, run.tokens(1, 1), past_kv_cache=cache))
    run.compare("a decoded token after 8,192 tokens, against one after 128", 1.2, caches[1], caches[0])


def cache(run: Run) -> None:
    """``run_with_cache`` of everything but pattern and scores against a bare forward pass."""
    n = run.length(4096)
    model, tokens = run.linear(n, min(n, 1500)), run.tokens(1, n)

    def wanted(name: str) -> bool:
        return not name.endswith(("hook_pattern", "hook_attn_scores"))

    ours, theirs = partial(model.run_with_cache, tokens, names_filter=wanted), partial(model, tokens)
    logits, cached = ours()
    check_close(logits, theirs(), 1e-5, "run_with_cache")
    numbers = sum(x.numel() for x in cached.values()) // n
    del logits, cached
    run.compare(f"run_with_cache, {n} tokens, {numbers:,} numbers per token, against a forward pass", 1.4, ours, theirs)


def new_text(run: Run) -> None:
    """16 new tokens after the conversion of 4,096, against 4,112 without; and the conversion against a pass over the prompt."""
    n = run.length(4096)
    model, prompt, text = run.model(n + 16, attention="linear"), run.tokens(1, n), run.tokens(1, 16)
    whole = torch.cat([prompt, text], dim=1)
    converted = run.model(n + 16, attention="linear")
    converted.attach_kv_bias(convert_prompt(model, prompt))
    check_close(converted(text), model(whole)[:, -16:], 1e-5, "conversion")
    run.compare("16 tokens, converted, against all", 50.0, partial(converted, text), partial(model, whole), faster=True)
    run.compare("converting, against a forward pass", 1.2, partial(convert_prompt, model, prompt), partial(model, prompt))


def convert(run: Run) -> None:
    """1,000,000 tokens converted on docs-linear: peak memory, and time per token.

    The long text is one conversion, stopped between its segments to convert a short one; each stretch between two stops is
    compared with the short conversions on both its sides, and the median of these ratios counts.
    """
    short, long, n_stops = (256, 4096, 4) if run.small else (16384, 1_000_000, 40)
    model = HookedKVTransformer.from_zoo("docs-linear").requires_grad_(False)
    tokens = run.tokens(1, long, model.cfg.d_vocab)[0]
    whole, in_two = convert_prompt(model, tokens[:2000]), convert_prompt(model, tokens[:1200])
    in_two = convert_prompt(model, tokens[1200:2000], initial=in_two)
    check_close(in_two.stacked("b_kv"), whole.stacked("b_kv"), 1e-4, "conversion")
    gc.collect()
    now = CLOCKS[run.clock]
    stretches: list[tuple[float, float]] = []  # (fraction of the text, seconds) up to each stop
    shorts: list[float] = []

    def stop(done: float) -> None:
        if done < (len(shorts) + 1) / n_stops:
            return
        stretches.append((done, now() - resumed[-1]))
        start = now()
        convert_prompt(model, tokens[:short])
        shorts.append(now() - start)
        resumed.append(now())

    resumed = [now()]
    convert_prompt(model, tokens, on_progress=stop)
    per_token = [seconds / ((done - before) * long) for (before, _), (done, seconds) in itertools.pairwise(stretches)]
    beside = [(a + b) / 2 / short for a, b in itertools.pairwise(shorts)]
    ratio = median(a / b for a, b in zip(per_token, beside, strict=True))
    each = [f"{n} tokens {median(taken) * 1e6:.4g} us a token" for n, taken in ((long, per_token), (short, beside))]
    print(f"converted on docs-linear: {', '.join(each)}")
    print(verdict("time per token, long over short", ratio, 1.15))
    print(verdict("peak memory of the process, GiB", peak_gib(), 1.0), flush=True)


# --- softmax models --------------------------------------------------------------------------------------------------


def check_kernel(model: HookedKVTransformer, tokens: torch.Tensor, what: str) -> None:
    """The answer of torch's kernel is that of the steps, which a hook on the pattern asks for."""
    hooks = [(lambda name: name.endswith("hook_pattern"), lambda x, hook: None)]
    check_close(model(tokens), model.run_with_hooks(tokens, fwd_hooks=hooks), 1e-5, what)


def softmax(run: Run) -> None:
    """Softmax attention against Hugging Face's."""
    n = run.length(4096)
    model, tokens = run.model(n), run.tokens(1, n)
    check_kernel(model, tokens[:, :512], "softmax")
    ours, theirs = partial(model, tokens), partial(run.hugging_face(n), tokens)
    run.compare(f"softmax, {n} tokens, against Hugging Face", 1.05, ours, theirs)


def in_keys(model: HookedKVTransformer, prompt: torch.Tensor, **options: Any) -> KVBias:
    """The prompt in 32 keys per head, or half of it where it is short; a continuation is no longer than the prompt."""
    n, length = min(32, prompt.shape[1] // 2), min(64, prompt.shape[1])
    options = {"continuation_length": length, **options}
    return convert_prompt(model, prompt[0], method="landmark", n_features=n, verbose=False, **options)


def attached(run: Run) -> None:
    """512 tokens under a prompt of 512 in 32 keys per head, against without. Attaching hashes the weights: it is not timed."""
    prompt, text = run.tokens(1, 32 if run.small else 1024).chunk(2, dim=1)
    windows = dict(use_local_attn=True, window_size=128, attn_types=["local"] * (2 if run.small else 4))
    for kind, changes in (("rotary", {}), ("ALiBi", dict(positional_embedding_type="alibi")), ("windows", windows)):
        model, under = (run.model(2048, **changes) for _ in range(2))
        with model.kv_bias(convert_prompt(model, prompt[0])):
            exact = model(text)
        check_close(exact, model(torch.cat([prompt, text], dim=1))[:, prompt.shape[1] :], 1e-5, "every key kept")
        under.attach_kv_bias(in_keys(model, prompt))
        check_kernel(under, text, "under a bias")
        run.compare(f"{kind}, under a bias, against without", 1.1, partial(under, text), partial(model, text))


def fit(run: Run) -> None:
    """512 tokens converted to 32 keys per head against passes over the prompt just before and after: with equal budgets, and
    with a search for them. Less the time in which reference text was written and read, which is printed beside it."""
    model, prompt = run.model(2048), run.tokens(1, 16 if run.small else 512)
    now = perf_counter  # by which a conversion times its reference text

    def seconds(call: Callable[[], Any]) -> float:
        start = now()
        call()
        return now() - start

    for budget, bound in (("equal", 10.0), ("logits", 30.0)):
        passes, fits, references = [], [], []
        for _ in range(run.repeats):
            passes.append(seconds(lambda: model(prompt)))
            start = now()
            found = in_keys(model, prompt, budget=budget).fit
            whole = now() - start
            references.append(found.seconds["reference"])
            fits.append(whole - references[-1])
            passes.append(seconds(lambda: model(prompt)))
        forward, fitted, read = median(passes), median(fits), median(references)
        print(f"{budget} budgets: {fitted * 1e3:.4g} ms, a forward pass over the prompt {forward * 1e3:.4g} ms")
        print(f"  beside it: {found.passes:.3g} passes over reference text, {read / forward:.3g} times as long")
        print(verdict("converting, in forward passes", fitted / forward, bound), flush=True)


# --- variants, analyses ----------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "regularised": dict(regularised=dict(alpha=-0.5)),
    "regularised, one step": dict(regularised=dict(alpha=0.1, form="one_step")),
    "augmented keys": dict(augmented=dict(keys=True)),
    "augmented keys and values, 2 layers": dict(augmented=dict(keys=True, values=True, depth=2)),
    "negative, k 8, per query": dict(negative=dict(k=8, beta=0.1)),
    "negative, k 8, per label": dict(negative=dict(k=8, beta=0.1, per="label")),
    "negative, a tenth, per query": dict(negative=dict(k=0.1, beta=0.1)),
    "ridge": dict(ridge=dict(strength=1.0)),
}


def variants(run: Run) -> None:
    """Whole training steps of attention variants (forward, backward, AdamW) against plain attention: 2 layers, d_model 256,
    heads of 32, 2 x 256 tokens. Ridge solves a system of the text's length for every head, in float64: it has no bound."""
    n = 16 if run.small else 256
    sizes = dict(n_layers=2, d_head=8 if run.small else 32, positional_embedding_type="standard")
    sizes |= {} if run.small else dict(d_model=256, d_vocab=1024)
    tokens = run.tokens(2, n)

    def step_of(variant: dict[str, Any] | None) -> Callable[[], None]:
        model = run.model(n, **sizes, attention_variant=variant).requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss = model(tokens, return_type="loss")
            loss.backward()
            optimizer.step()
            if not float(loss.detach()) < 20:  # NaN, too
                raise SystemExit(f"{variant}: the loss is {float(loss.detach())}")

        return step

    with torch.enable_grad():
        plain, *times = medians(*map(step_of, (None, *VARIANTS.values())), repeats=run.repeats, clock=run.clock)
    print(f"2 x {n} tokens, plain: {plain:.3f} s a step")
    *bounded, ridge = zip(VARIANTS, times, strict=True)
    for name, seconds in bounded:
        print(verdict(f"{name}: speed over plain attention", plain / seconds, 0.7, at_least=True))
    print(f"  ridge: {plain / ridge[1]:.3g} times the speed of plain attention")


def dual(run: Run) -> None:
    """``dual_losses`` of all heads and queries of 256 tokens at GPT-2-small's size, in forward passes; random weights, with
    queries and keys scaled up to the scores of trained models."""
    n = 16 if run.small else 256
    model = run.model(1024, act_fn="gelu_new", positional_embedding_type="standard", **({} if run.small else GPT2_SMALL))
    for block in model.blocks:
        block.attn.W_Q.mul_(8)
        block.attn.W_K.mul_(8)
    tokens = run.tokens(1, n, model.cfg.d_vocab)
    before = peak_gib()
    worst = float(dual_losses(model, tokens[0])["equivalence_error"].max())
    memory = peak_gib() - before
    if not worst < 1e-4:  # rounding of a float32 softmax over scores of tens
        raise SystemExit(f"dual_losses: wrong answer, one step is off by {worst:.1e}")
    for name, options in (("without cosines", dict(cosines=False)), ("with cosines", {})):
        ours = partial(dual_losses, model, tokens[0], **options)
        run.compare(f"dual_losses {name}, against a forward pass", 10.0, ours, partial(model, tokens))
    print(verdict("peak memory above the model's, GiB", memory, 2.0))


N_UNITS, ANSWER = 8, 3
GROWS: dict[str, tuple[int, ...]] = dict(
    n_layers=(4, 8, 16), n_heads=(4, 8, 16), d_vocab=(4096, 16384, 65536), prompt=(256, 512, 1024)
)


def attributions(run: Run) -> None:
    """How the cost of attributions grows with layers, heads, vocabulary and prompt; random weights, a text of 8 tokens.

    One quantity is doubled at a time, from 4 layers, 4 heads of 32 (d_model 256 throughout, so that weights grow with heads), a
    vocabulary of 4,096 and a prompt of 256 tokens in 8 units. The exponent is the slope of log time over log size between the
    two largest sizes: at small ones the fixed cost per operation flattens the curve. The cost is that at the largest size, in
    passes over prompt and text that compute the last position's logits only. First the answer is checked: the total effect of
    each unit is the difference of two plain passes.
    """
    grows = GROWS if not run.small else dict(n_layers=(1, 2))
    least = dict(n_layers=2, n_heads=2, d_vocab=64, prompt=32)
    usual = least if run.small else {name: sizes[0] for name, sizes in GROWS.items()}

    def drawn(kind: str, prompt: int, **sizes: int) -> tuple[Any, ...]:
        """A model, a prompt and a text, and the units' ranges."""
        model = run.model(prompt + 8, attention=kind, d_head=32, d_model=256, act_fn="gelu_new", **sizes)
        tokens, width = run.tokens(1, prompt + 8, sizes["d_vocab"])[0], prompt // N_UNITS
        return model, tokens[:prompt], tokens[prompt:], [(u * width, (u + 1) * width) for u in range(N_UNITS)]

    def calls(kind: str, **sizes: int) -> dict[str, Callable[[], Any]]:
        *given, units = model, prompt, text, _ = drawn(kind, **sizes)

        def forward() -> torch.Tensor:
            hidden = model(torch.cat([prompt, text])[None], stop_at_layer=model.cfg.n_layers)
            return model.unembed(model.ln_final(hidden[:, -1:]))

        return {
            "forward pass": forward,
            f"prompt_attribution, {N_UNITS} units": lambda: prompt_attribution(*given, by=units, answer=ANSWER),
            f"attribution_by_head, {N_UNITS} units": lambda: attribution_by_head(*given, by=units, answer=ANSWER),
            "attribution_by_position": lambda: attribution_by_position(*given, by=units[:1], answer=ANSWER),
            "bias_effects by head": lambda: bias_effects(*given, by="head"),
            "bias_by_head": lambda: bias_by_head(*given),
        }

    for kind in ("softmax", "linear"):
        model, prompt, text, units = drawn(kind, **least)
        model = model.to(torch.float64)
        lacking = [torch.cat([prompt[:start], prompt[stop:], text]) for start, stop in units]
        whole, *without = (model(x[None])[0, -1].log_softmax(-1)[ANSWER] for x in (torch.cat([prompt, text]), *lacking))
        found = prompt_attribution(model, prompt, text, by=units, answer=ANSWER, positions="closed")["total_effect"]
        check_close(torch.tensor(found.to_numpy()), whole - torch.stack(without), 1e-9, f"total effects, {kind}")
        for name, sizes in grows.items():
            taken: dict[str, list[float]] = {}
            for size in sizes:
                each = calls(kind, **{**usual, name: size})
                for what, seconds in zip(each, fastest(*each.values(), repeats=run.repeats, clock="processor"), strict=True):
                    taken.setdefault(what, []).append(seconds)
            print(f"{kind} attention, {name} {sizes[0]:,} to {sizes[-1]:,}")
            for what, (*_, before, last) in taken.items():
                exponent, passes = math.log(last / before) / math.log(sizes[-1] / sizes[-2]), last / taken["forward pass"][-1]
                print(f"  {what}: {last:.3g} s, exponent {exponent:.2f}, {passes:.1f} passes", flush=True)


ROWS: dict[str, Callable[[Run], None]] = {
    each.__name__: each
    for each in (
        op, delta, dense, forward, backward, decode, cache, new_text, convert, softmax, attached, fit, variants, dual,
        attributions,
    )
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows to measure")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="tiny models, one repeat: a smoke test")
    args = parser.parse_args(argv)
    if len(args.only) > 1:
        given = [f"--threads={args.threads}", f"--clock={args.clock}", f"--repeats={args.repeats}", *["--small"] * args.small]
        for name in args.only:
            subprocess.run([sys.executable, __file__, "--only", name, *given], check=True)
        return
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        with torch.no_grad():
            ROWS[args.only[0]](Run(1 if args.small else args.repeats, args.clock, args.small))
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    main()

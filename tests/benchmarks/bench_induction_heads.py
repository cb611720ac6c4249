"""How far the verdicts of ``induction_verdicts`` can be trusted.

    python tests/benchmarks/bench_induction_heads.py [--small] [--lengths 12] [--seed 200] [MODEL ...]

Of untrained models: how many heads get a name, with and without ablations (the rules were chosen while looking at seeds 100 to
102). Of MODELs (shipped ones by name, others by folder; all shipped ones where none is given): how often a head has its
commonest name over ``--lengths`` lengths from 16 to the model's limit, how often two draws of sequences give the same name, and
what the heads are called whose ablation changes the loss by more than 0.1 nats and noise. With ablations the name follows the
loss, which the length may change: those two figures have no bound. Prefix-matching heads are ablated one by one, and 32 random
heads that do not match, on other texts: of how many does the loss on the second copy rise or fall significantly? Null: the same
heads where the first copy has other tokens, so that nothing can be copied. Last, all of them are ablated together (each
replaced by its mean on text that does not repeat), those called weak likewise, and as many random heads without either name,
five times.
"""

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from kvlens.analyses.heads.ablation import resampling_ablation
from kvlens.analyses.heads.naming import induction_verdicts
from kvlens.analyses.heads.repeated_text import draw_piece, longest_repeat, repeat_tokens
from kvlens.analyses.heads.verdicts import BY_PATTERN, COSTLY, INCONCLUSIVE, MARGIN, NO_VERDICT
from timing import verdict

import kvlens
from kvlens import HookedKVTransformer, HookedKVTransformerConfig
from kvlens.zoo import names

ONLY = ("random", "models", "alone", "together")
UNNAMED, MATCHES = (NO_VERDICT, INCONCLUSIVE), BY_PATTERN["prefix_matching"]
SHORTEST, LONGEST, LONGEST_ABLATED, OTHERS = 16, 512, 128, 32
RANDOM: list[tuple[dict[str, Any], float, float]] = [  # settings, gain of W_Q and W_K, gain of W_pos
    (dict(positional_embedding_type="standard"), 1, 1),
    (dict(positional_embedding_type="standard"), 3, 10),
    (dict(positional_embedding_type="rotary"), 3, 1),
    (dict(positional_embedding_type="none"), 3, 1),
    (dict(positional_embedding_type="alibi"), 3, 1),
    (dict(positional_embedding_type="rotary", kv_shift=True), 3, 1),
    (dict(positional_embedding_type="rotary", n_layers=4, attn_only=False, act_fn="gelu"), 8, 1),
    (dict(positional_embedding_type="rotary", attention="linear"), 1, 1),
    (dict(positional_embedding_type="rotary", attention="linear"), 4, 1),
    (dict(positional_embedding_type="rotary", attention="linear", kv_shift=True), 3, 1),
    (dict(positional_embedding_type="standard", attention="linear", kv_shift=True), 4, 10),
    (dict(positional_embedding_type="none", attention="linear", decay="retnet", normalizer="none", kv_shift=True), 3, 1),
]


def random_models(
    kinds: list[tuple[dict[str, Any], float, float]], seeds: range, n_heads: int
) -> Iterator[HookedKVTransformer]:
    """Untrained models, most with weights that make attention as sharp as a trained model's."""
    sizes = dict(n_layers=2, n_heads=n_heads, d_model=64, d_head=8, n_ctx=128, d_vocab=100, attn_only=True, device="cpu")
    for settings, gain, of_positions in kinds:
        for seed in seeds:
            model = HookedKVTransformer(HookedKVTransformerConfig(**{**sizes, **settings}, seed=seed)).requires_grad_(False)
            for name, parameter in model.named_parameters():
                parameter.mul_(gain if name.endswith(("W_Q", "W_K")) else of_positions if name.endswith("W_pos") else 1)
            yield model


def false_positives(small: bool, seed: int) -> None:
    """Heads of untrained models that get a name: by the pattern at three lengths, with ablations at the shortest."""
    counts: Counter[str] = Counter()
    models = random_models(RANDOM[::6], range(1), 3) if small else random_models(RANDOM, range(seed, seed + 3), 16)
    for model in models:
        plain = [induction_verdicts(model, n_repeated=n) for n in (SHORTEST, 30, 60)[: 1 if small else 3]]
        ways = {"by the pattern": plain, "with ablations": [induction_verdicts(model, n_repeated=SHORTEST, ablations=True)]}
        for way, frames in ways.items():
            counts[f"heads {way}"] += sum(map(len, frames))
            counts[f"named {way}"] += sum(int((~frame["verdict"].isin(UNNAMED)).sum()) for frame in frames)
    for way in ways:
        named, heads = counts[f"named {way}"], counts[f"heads {way}"]
        print(verdict(f"of 1,000 heads of untrained models named {way} ({named} of {heads:,})", 1000 * named / heads, 5))


def commonest(frames: list[pd.DataFrame]) -> float:
    """Percent of frames in which a head has its commonest name, mean over heads."""
    by_head = list(zip(*(frame["verdict"] for frame in frames), strict=True))
    return 100 * sum(Counter(names).most_common(1)[0][1] for names in by_head) / (len(by_head) * len(frames))


def same(first: list[pd.DataFrame], second: list[pd.DataFrame]) -> float:
    """Percent of heads with the same name in both."""
    equal = sum(int((a["verdict"] == b["verdict"]).sum()) for a, b in zip(first, second, strict=True))
    return 100 * equal / sum(map(len, first))


def trust(source: str, n_lengths: int) -> None:
    """The verdicts of one trained model."""
    model = kvlens.load(source)
    model.requires_grad_(False)
    longest = longest_repeat(model, None, LONGEST)
    steps = range(n_lengths)
    lengths = sorted({round(SHORTEST * (longest / SHORTEST) ** (i / max(1, n_lengths - 1))) for i in steps})
    print(f"{source}: {model.cfg.n_layers} layers of {model.cfg.n_heads} heads, {len(lengths)} lengths to {lengths[-1]}")

    def frames(**settings: Any) -> list[pd.DataFrame]:
        return [induction_verdicts(model, n_repeated=n, **settings) for n in lengths]

    plain, again = frames(), frames(seed=1)
    print(verdict("a head's commonest name over the lengths, %", commonest(plain), 95, at_least=True))
    print(verdict("the same name from two draws, %", same(plain, again), 95, at_least=True))
    lengths = lengths if longest <= LONGEST_ABLATED else [n for n in lengths if n <= LONGEST_ABLATED]
    asked = frames(ablations=True)
    print(f"  with ablations, to {lengths[-1]}: commonest name {commonest(asked):.1f} %", end=", ")
    print(f"from two draws {same(asked, frames(ablations=True, seed=1)):.1f} %")
    counts = [(MARGIN * frame["ablation_loss_error"]).clip(lower=COSTLY) for frame in asked]
    dear = [frame["ablation_loss_change"].abs() > least for frame, least in zip(asked, counts, strict=True)]
    names = Counter(name for frame, rows in zip(asked, dear, strict=True) for name in frame["verdict"][rows])
    told = Counter(name for frame, rows in zip(plain, dear, strict=False) for name in frame["verdict"][rows])
    print(f"  heads that change the loss by more than {COSTLY} nats and noise, over all lengths: {dict(names)}")
    print(f"  the same by the pattern: {dict(told)}")
    print(verdict("without a name", sum(names[name] for name in UNNAMED), 0))


@torch.no_grad()
def one_by_one(source: str, n_sequences: int, n: int, seed: int = 11) -> None:
    """How many prefix-matching heads, and some others, the model needs by themselves; beside their null."""
    model = kvlens.load(source)
    n, generator = longest_repeat(model, None, n), torch.Generator().manual_seed(seed)
    piece, first, donor = (draw_piece(model, n_sequences, n, generator) for _ in range(3))
    repeated, donors = repeat_tokens(model, piece, None), repeat_tokens(model, donor, None)
    rows = induction_verdicts(model)[["layer", "head", "verdict", "logit_attribution"]]
    matching = rows["verdict"].str.contains(MATCHES)
    others = rows[~matching].sample(min(OTHERS, int((~matching).sum())), random_state=seed).sort_index()
    for where, text in (("repeated", repeated), ("null", repeated.control(first))):
        for of in (rows[matching], others.assign(verdict="others")):
            asked = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, dtype=torch.bool)
            asked[of["layer"].tolist(), of["head"].tolist()] = True
            effect = resampling_ablation(model, text, donors, asked=asked)
            found = of.assign(cost=effect.loss_change[asked].tolist(), error=effect.loss_error[asked].tolist())
            found["counts"] = found["cost"].abs() > (MARGIN * found["error"]).clip(lower=COSTLY)
            for name, heads in found.groupby("verdict"):
                told = count(heads), count(heads[heads["logit_attribution"] < 0])
                print(f"  {where}: {name}: {told[0]}; with a negative attribution: {told[1]}", flush=True)
            if where == "repeated" and "others" not in set(of["verdict"]):
                print(found.round(3).to_string(index=False), flush=True)


def count(heads: pd.DataFrame) -> str:
    """Heads, and of how many the loss rises or falls without them."""
    rises, falls = (int((heads["counts"] & (sign * heads["cost"] > 0)).sum()) for sign in (1, -1))
    return f"{len(heads)} heads, without {rises} the loss rises, without {falls} it falls"


@torch.no_grad()
def together(source: str, n: int = 40, seed: int = 11) -> None:
    """The loss on the second copy without the heads that match, without the weak ones, and without as many others."""
    model = kvlens.load(source)
    n, generator = longest_repeat(model, None, n), torch.Generator().manual_seed(seed)
    piece, other = (draw_piece(model, 8, n, generator) for _ in range(2))
    own = repeat_tokens(model, piece, None)
    zs = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
    _, cache = model.run_with_cache(own.control(other).tokens, names_filter=zs)
    means = {name: cache[name].mean(dim=(0, 1)) for name in zs}

    def loss(heads: list[tuple[int, int]]) -> float:
        def ablate(z: Any, hook: Any) -> Any:
            of_layer = [head for layer, head in heads if zs[layer] == hook.name]
            z = z.clone()
            z[:, :, of_layer] = means[hook.name][of_layer]
            return z

        logits = model.run_with_hooks(own.tokens, fwd_hooks=[(zs[layer], ablate) for layer in {layer for layer, _ in heads}])
        right = logits[:, own.second : -1].log_softmax(dim=-1).gather(-1, own.next_tokens[..., None])
        return -float(right.mean())

    rows = list(induction_verdicts(model)[["layer", "head", "verdict"]].itertuples(index=False, name=None))
    others = [(layer, head) for layer, head, name in rows if MATCHES not in name]
    print(f"  loss on the second copy {loss([]):.2f}")
    for kind in (MATCHES, f"weak {MATCHES}"):
        named = [(layer, head) for layer, head, name in rows if name.split(" / ")[0] == kind]
        draws = [loss(random.Random(draw).sample(others, min(len(named), len(others)))) for draw in range(5)]
        print(f"  without the {len(named)} called {kind}: {loss(named):.2f}", end="; ")
        print(f"without as many others: {min(draws):.2f} to {max(draws):.2f}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny models, one repeat: a smoke test")
    parser.add_argument("--lengths", type=int, default=12, help="how many lengths")
    parser.add_argument("--only", choices=ONLY, nargs="+", default=ONLY)
    parser.add_argument("--sequences", type=int, default=8, help="on which heads are ablated one by one")
    parser.add_argument("--tokens", type=int, default=40, help="that repeat there")
    parser.add_argument("--seed", type=int, default=200, help="the first of three seeds of the untrained models")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a shipped model or a folder")
    args = parser.parse_args(argv)
    if "random" in args.only:
        false_positives(args.small, args.seed)
    for source in args.models or (["induction-shift-1l"] if args.small else names()):
        if "models" in args.only:
            trust(source, 1 if args.small else args.lengths)
        if "alone" in args.only:
            one_by_one(source, args.sequences, args.tokens)
        if "together" in args.only:
            together(source)


if __name__ == "__main__":
    main()

"""How often a unit that has nothing to do with the answer is significant: at most 5 % by the definition of the p-value.

    python tests/benchmarks/bench_null.py [--model docs-gpt2] [--units 200] [--prompts 10] [--seed 0]
    python tests/benchmarks/bench_null.py --dual [--model docs-gpt2] [--seed 0]

Texts are written by the model itself. Each prompt is one text, cut
where the text that it precedes begins; its four quarters are the units, and the answer is the model's most probable next token.
In their place stand units of other texts, of as many tokens: 80 are the null, as in `kvlens explain` for four units, and others
are tested against it, from texts that are neither the prompt's nor the null's.

Printed: the share of tested units with p <= 0.05, and the share of sets of four, one in each place, of which any has an
adjusted p <= 0.05; each with the exact upper bound (binomial, 95 %, one-sided).

With ``--dual`` the figures of `dual_losses`, means over heads and queries, beside those with shuffled values: on the first
`N_TOKENS` tokens of the license, on random ones, and of an untrained model of the same shape on the license. How many heads are
better aligned after the step, and how many by more than with shuffled values?
"""

import argparse
import itertools
from dataclasses import replace
from pathlib import Path

import torch
from bench_notes import lower_bound
from kvlens.analyses.attribution.answers import Question
from kvlens.analyses.attribution.prompt import SIGNIFICANT, Null, holm, p_values
from kvlens.analyses.heads.repeated_text import draw_piece

from kvlens import HookedKVTransformer, load
from kvlens.analyses import dual_losses
from kvlens.units import Unit

N_UNITS, N_TOKENS = 4, 80


def lengths(model: HookedKVTransformer) -> tuple[int, int]:
    """Tokens of a prompt without BOS, a multiple of `N_UNITS`, and of its text: 64 and 16, or as many as the model can read."""
    n_text = min(16, model.cfg.n_ctx // 5)
    return min(64, (model.cfg.n_ctx - 1 - n_text) // N_UNITS * N_UNITS), n_text


def texts_of(model: HookedKVTransformer, n: int, seed: int) -> list[torch.Tensor]:
    """Texts of a prompt's and a text's tokens together, without BOS."""
    length = sum(lengths(model))
    torch.manual_seed(seed)
    first = torch.full((n, 1), int(model.tokenizer.bos_token_id))  # type: ignore[union-attr]
    written = model.generate(first, max_new_tokens=length, stop_at_eos=False, verbose=False, return_type="tokens")
    return list(written[:, 1:].clone())


def dual(source: str, seed: int) -> None:
    """The figures on text, on random tokens, and without training."""
    model = load(source, device="cpu").requires_grad_(False)
    text = model.to_tokens(Path(__file__).parents[2].joinpath("LICENSE").read_text())[0, : min(N_TOKENS, model.cfg.n_ctx)]
    drawn = draw_piece(model, 1, len(text), torch.Generator().manual_seed(seed))[0]
    untrained = HookedKVTransformer(replace(model.cfg, init_weights=True, seed=seed), model.tokenizer).requires_grad_(False)
    drawn[: int(model.prepends_bos)] = text[: int(model.prepends_bos)]
    for what, of, tokens in (("text", model, text), ("random tokens", model, drawn), ("untrained", untrained, text)):
        table = dual_losses(of, tokens, seed=seed).groupby(["layer", "head"]).mean(numeric_only=True)
        gain, null = (table[f"cosine_after{x}"] - table[f"cosine_before{x}"] for x in ("", "_shuffled"))
        told = [
            f"{name} {table[name].mean():.3f} ({table[name + '_shuffled'].mean():.3f})"
            for name in ("log_loss_drop", "step_share")
        ]
        print(
            f"{source}, {what}, {len(table)} heads: better aligned {(gain > 0).sum()} (shuffled {(null > 0).sum()}), by "
            f"{gain.mean():.3f} ({null.mean():.3f}), more than shuffled in {(gain > null).sum()}; {'; '.join(told)}",
            flush=True,
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="docs-gpt2", help="a shipped model, or a checkpoint")
    parser.add_argument("--tokenizer", help="of a llama2.c checkpoint")
    parser.add_argument("--units", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dual", action="store_true", help="the figures of dual_losses instead")
    args = parser.parse_args(argv)
    if args.dual:
        dual(args.model, args.seed)
        return
    model = load(args.model, tokenizer=args.tokenizer, device="cpu").requires_grad_(False)
    texts = texts_of(model, 3 * args.prompts + 80, args.seed)
    own, others = texts[: args.prompts], texts[args.prompts :]
    of_null, of_tested = others[::2], others[1::2]
    each = -(-args.units // args.prompts)
    n_prompt, _ = lengths(model)
    edges = torch.linspace(1, n_prompt + 1, N_UNITS + 1).long().tolist()
    units = [Unit("", "", start, stop) for start, stop in itertools.pairwise(edges)]
    bos = torch.tensor([int(model.tokenizer.bos_token_id)])  # type: ignore[union-attr]
    significant: list[bool] = []
    any_of_a_set: list[bool] = []
    for number, text in enumerate(own):
        question = Question.of(model, torch.cat([bos, text[:n_prompt]]), text[n_prompt:])
        null = Null(seed=args.seed + number, prompts=of_null).effects(question, units)
        tested = Null(max(20, each), of_tested, seed=args.seed + 1000 + number).effects(question, units)[:each]
        p = p_values(tested, null)
        significant += (p <= SIGNIFICANT).tolist()
        sets = p[: len(p) // N_UNITS * N_UNITS].view(-1, N_UNITS)
        any_of_a_set += [bool((holm(each_set) <= SIGNIFICANT).any()) for each_set in sets]
    for what, each_one in (("unrelated units significant", significant), ("sets of four with any", any_of_a_set)):
        found, n = sum(each_one), len(each_one)
        high = 1.0 - lower_bound(n - found, n)
        print(f"{args.model}: {found} of {n} {what}, {found / n:.1%}, upper bound {high:.1%}")


if __name__ == "__main__":
    main()

"""How often a unit that has nothing to do with the answer is significant: at most 5 % by the definition of the p-value.

    python tests/benchmarks/bench_null.py [--model docs-gpt2] [--units 200] [--prompts 10] [--seed 0]

Texts are written by the model itself. Each prompt is one text, cut
where the text that it precedes begins; its four quarters are the units, and the answer is the model's most probable next token.
In their place stand units of other texts, of as many tokens: 80 are the null, as in `kvlens explain` for four units, and others
are tested against it, from texts that are neither the prompt's nor the null's.

Printed: the share of tested units with p <= 0.05, and the share of sets of four, one in each place, of which any has an
adjusted p <= 0.05; each with the exact upper bound (binomial, 95 %, one-sided).
"""

import argparse
import itertools

import torch
from bench_notes import lower_bound
from kvlens.analyses.attribution.answers import Question
from kvlens.analyses.attribution.prompt import SIGNIFICANT, Null, holm, p_values

from kvlens import HookedKVTransformer, load
from kvlens.units import Unit

N_UNITS = 4


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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="docs-gpt2", help="a shipped model, or a checkpoint")
    parser.add_argument("--tokenizer", help="of a llama2.c checkpoint")
    parser.add_argument("--units", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
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

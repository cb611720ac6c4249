"""How true explanations are: every statement run again by other means, on new prompts.

    python tests/benchmarks/bench_statements.py --out FOLDER [--models facts-gpt2 ...] [--stories 60] [--checked 12] [--seed 7]

For each prompt `explain` makes its statements, and `second_opinion.py` runs them again over prompt and text, without a bias:
those of units all, of heads and positions as many as ``--checked``, at random, and of the first ``--heads`` prompts every head
that was exchanged alone: those that lose the answer are the ones that are named. A statement is false where the second verdict
differs, or its probability by more than 1e-3, and neither is at the bound. Printed for each model:

- statements run again, and false ones;
- share of prompts with a lost answer; of one-hop stories the share where the stating sentence is in the first breaking set, of
  two-hop stories where all sentences without which the answer is lost, by the second opinion, are breaking sets;
- sizes of the sets of heads (with shift states) and positions, and how many are the smallest by exhaustion of smaller sizes,
  as far as that takes fewer than ``--runs``; and how many are no larger than what the same search finds in the order of exact
  effects, each part exchanged and kept alone first, with as many runs;
- passes over prompt and text: median and largest; searches that ended at the cap;
- sets that change where a verdict's half is 0.4 or 0.6.

Results are kept in the folder, one JSON line a prompt, and a repeated run goes on where it stopped. Models: those of the
zoo that answer stories; docs-gpt2 on windows of documentation; stories260K with ``--stories260k`` and ``--tokenizer`` (files);
tiny random models of Transformers with grouped keys (llama) and recurrent layers (qwen3_5, bamba).
"""

import argparse
import copy
import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from bench_attribution import asked, right_questions
from kvlens.analyses.attribution import explain as explaining
from kvlens.analyses.attribution.answers import Question
from kvlens.analyses.attribution.by_head import HeadExchange
from kvlens.analyses.attribution.by_position import PositionExchange
from kvlens.analyses.attribution.search import Asked, Runs, sets_of
from kvlens.analyses.attribution.terms import Terms
from kvlens.analyses.attribution.verdicts import Outcomes, verdict_of
from second_opinion import HookedPasses, TransformersPasses, again, second_verdict

from kvlens import HookedKVTransformer, convert_prompt, load
from kvlens.chat import prompt_units
from kvlens.zoo import source_of

STORIES = ("facts-gpt2", "facts-linear", "facts-hops-gpt2", "facts-hops-linear", "facts-hybrid")
FAMILIES = ("llama", "qwen3_5", "bamba")
OTHERS = ("docs-gpt2", "stories260K", *FAMILIES)
DIFFERENCES = ("sets", "of other units", "found with one alone", "one within the other", "of one size", "else")
CLOSE = 1e-3
"""Of probabilities: float32 logits of tens, whose roundings through some layers are below 1e-4."""


def prompts_of(name: str, args: argparse.Namespace) -> Any:
    """(model, passes of, [(prompt, text, spans, answer, origins)])."""
    n = args.stories if name in STORIES else args.prompts
    if name in STORIES:
        model = load(name)
        stories = right_questions(model, n, args.facts, args.seed)
        found = []
        for story, about in stories:
            question, units, origins = asked(model, story, about)
            spans = [(unit.start, unit.stop) for unit in units]
            found.append((question.prompt, question.text, spans, int(question.answer), list(origins)))
        if name == "facts-hybrid":
            import transformers as tf

            plain = tf.AutoModelForCausalLM.from_pretrained(source_of(name), dtype=torch.float32)
            return model, lambda *given: TransformersPasses(plain, *given), found
        return model, lambda *given: HookedPasses(model, *given), found
    if name in FAMILIES:
        sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("bridge", "model")]
        from bridge_models import some_tokens
        from tiny_hf import tiny_hf_model

        from kvlens import KVTransformerBridge

        plain = tiny_hf_model(name)
        with torch.no_grad():
            for parameter_name, parameter in plain.named_parameters():
                if "proj" in parameter_name or "lm_head" in parameter_name:
                    parameter.mul_(4)  # sharp enough that something is lost
        other = copy.deepcopy(plain)
        spans = [(0, 4), (4, 9), (9, 13), (13, 18)]
        found = [(some_tokens(18, seed=2 * i), some_tokens(5, seed=2 * i + 1), spans, None, None) for i in range(10)]
        return KVTransformerBridge.boot_transformers(plain), lambda *given: TransformersPasses(other, *given), found
    if name == "docs-gpt2":
        model = HookedKVTransformer.from_zoo(name)
        rows = _documentation(model, n, args.seed)
    else:
        model = HookedKVTransformer.from_llama2c(args.stories260k, args.tokenizer)
        rows = _stories(model, n, args.seed)
    found = []
    for prompt, text in rows:
        spans = [(unit.start, unit.stop) for unit in prompt_units(model, prompt, "sentence")]
        found.append((prompt, text, spans, None, None))
    return model, lambda *given: HookedPasses(model, *given), found


def _documentation(model: HookedKVTransformer, n: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Prompts of three to eight sentences from the standard library's docstrings, and the next eight tokens."""
    import inspect
    import pydoc
    import statistics as a
    import textwrap as b
    from json import decoder as c

    texts = []
    for module in (a, b, c, argparse, itertools, json, math, pydoc, inspect):
        for _, member in sorted(vars(module).items()):
            said = inspect.getdoc(member) if callable(member) else None
            if said and said.count(". ") + said.count(".\n") >= 3:
                texts.append(said)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in torch.randperm(len(texts), generator=generator).tolist():
        tokens = model.to_tokens(texts[i], truncate=False)[0]
        if len(tokens) >= 60 and len(found) < n:
            cut = min(len(tokens) - 8, 90)
            found.append((tokens[:cut], tokens[cut : cut + 8]))
    return found


def _stories(model: HookedKVTransformer, n: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Texts that the model writes, cut into a prompt of 60 tokens and the next eight."""
    torch.manual_seed(seed)
    start = model.to_tokens("Once upon a time", truncate=False).expand(n, -1)
    written = model.generate(start, max_new_tokens=70, stop_at_eos=False, verbose=False, return_type="tokens", temperature=0.8)
    return [(row[:60].clone(), row[60:68].clone()) for row in written]


@torch.no_grad()
def one(model: Any, passes_of: Any, given: Any, number: int, args: argparse.Namespace) -> dict[str, Any]:
    """Explain a prompt, and run its statements again."""
    prompt, text, spans, answer, origins = given
    found = explaining.explain(model, prompt, text, by=spans, answer=answer)
    (answer,) = found.answer_tokens
    passes = passes_of(prompt, text, spans)
    whole = passes.without([]).log_softmax(dim=-1)[None]
    rows = [*found.statements.itertuples(index=False)]
    of_units = [row for row in rows if row.about == "units"]
    of_parts = [row for row in rows if row.about != "units"]
    generator = torch.Generator().manual_seed(number)
    order = torch.randperm(len(of_parts), generator=generator).tolist()[: args.checked]
    false, n_checked = [], 0
    for row in [*of_units, *(of_parts[i] for i in order)]:
        with torch.no_grad():
            now = again(passes, row, len(spans)).log_softmax(dim=-1)[None]
        p, verdict = float(now[0, answer].exp()), second_verdict(whole, now, [answer])
        n_checked += 1
        if (verdict != row.verdict and not row.at_bound) or abs(p - row.p_after) > CLOSE:
            false.append({**row._asdict(), "second_verdict": verdict, "second_p": p})
    tried = [] if not found.cause else [*found.heads[found.heads["p_exchanged"].notna()].itertuples(index=False)]
    for row in tried if number < args.heads else []:  # "no other head loses it alone"
        with torch.no_grad():
            now = passes.exchanged(found.cause, [row.code], []).log_softmax(dim=-1)[None]
        p, verdicts = float(now[0, answer].exp()), {second_verdict(whole, now, [answer], half=x) for x in (0.499, 0.5, 0.501)}
        n_checked += 1
        is_named = [row.code] in found.sets("heads", "breaking")
        if (
            row.verdict_exchanged not in verdicts
            or abs(p - row.p_exchanged) > CLOSE
            or is_named != (row.verdict_exchanged == "lost")
        ):
            false.append({**row._asdict(), "second_verdicts": sorted(verdicts), "second_p": p})
    lost_each = [
        second_verdict(whole, passes.without([unit]).log_softmax(dim=-1)[None], [answer]) == "lost"
        for unit in range(len(spans))
    ]
    breaking = [list(map(int, parts)) for parts in found.sets("units", "breaking")]
    return {
        "checked": n_checked,
        "false": json.loads(json.dumps(false, default=str)),
        "cause": list(found.cause),
        "origins": origins,
        "named": None if origins is None else named(origins, breaking, lost_each),
        "without_prompt": bool((found.statements.query("role == 'none'")["verdict"] == "kept").all()),
        "sets": sizes(model, given, found, args.runs),
        "searched": sorted(found.searched),
        "passes": found.n_passes,
        "cap": len(spans) + 62,
        "at_other_bounds": at_other_bounds(model, given, found) if number < args.bounds else {},
    }


def named(origins: list[int], breaking: list[list[int]], lost_each: list[bool]) -> bool:
    """Whether the sentences that the answer needs are named: of those that lose it by themselves all, of one the one."""
    together = {unit for each in breaking for unit in each}
    return all(unit in together for unit in origins if lost_each[unit]) and (len(origins) > 1 or origins[0] in together)


def sizes(model: Any, given: Any, found: Any, most: int) -> list[dict[str, Any]]:
    """Of the first sets of heads and positions: size, and the smallest by exhaustion of smaller ones."""
    if not found.cause:
        return []
    prompt, text, spans, _, _ = given
    question = Question.of(model, prompt, text, torch.tensor(found.answer_tokens))
    outcomes = Outcomes(question)
    deleted = question.rows([[spans[unit] for unit in found.cause]])
    read = Terms.of_prompt(model, prompt)
    exchanges = {
        "heads": HeadExchange(question, read.bias, convert_prompt(model, deleted)),
        "positions": PositionExchange(question, read, deleted),
    }
    rows = []
    for about, exchange in exchanges.items():
        codes = getattr(found, about)["code"].tolist()
        changed = range(len(codes)) if about == "heads" else range(min(spans[unit][0] for unit in found.cause), len(codes))
        for role in ("breaking", "keeping"):
            sets = found.sets(about, role)
            size = len(sets[0]) if sets else None
            smallest: int | str | None = size
            runs = Runs(outcomes, len(codes), exchange.read, most, exchange.at_once)
            question_put = Asked(runs, role == "keeping", frozenset(changed))
            for smaller in range(1, size or 1):
                if math.comb(len(changed), smaller) > runs.left:
                    smallest = "not exhausted"
                    break
                if any(question_put.holds(list(itertools.combinations(changed, smaller)))):
                    smallest = smaller
                    break
            runs = Runs(outcomes, len(codes), exchange.read, most, exchange.at_once)
            by_effect = exact_order_size(runs, [*changed], role == "keeping")
            rows.append({"about": about, "role": role, "size": size, "smallest": smallest, "by_exact_order": by_effect})
    return rows


def exact_order_size(runs: Runs, changed: list[int], keeping: bool) -> int | None:
    """Size of the set that the same search finds along the order of exact effects."""
    asked = Asked(runs, keeping, frozenset(changed))
    asked.holds([[part] for part in changed])
    found, _ = sets_of(runs, sorted(changed, key=lambda part: -asked.effect([part])), keeping=keeping, most_ways=1)
    return len(found[0].parts) if found else None


def at_other_bounds(model: Any, given: Any, found: Any) -> dict[str, int]:
    """Of the first sets where half is 0.4 and 0.6: how many there are and differ, in what."""
    prompt, text, spans, answer, _ = given
    kinds = [(about, role) for about in ("units", "heads", "positions") for role in ("breaking", "keeping")]
    real, counts = Outcomes.verdict, dict.fromkeys(DIFFERENCES, 0)
    for share in (0.4, 0.6):
        Outcomes.verdict = lambda self, now, share=share: verdict_of(self.whole, now, -math.log(share))  # type: ignore[method-assign]
        try:
            other = explaining.explain(model, prompt, text, by=spans, answer=answer)
        finally:
            Outcomes.verdict = real  # type: ignore[method-assign]
        for about, role in kinds:
            mine, theirs = ({*sets[0]} if (sets := each.sets(about, role)) else None for each in (found, other))
            counts["sets"] += mine is not None or theirs is not None
            if mine == theirs:
                continue
            if about != "units" and found.cause != other.cause:
                counts["of other units"] += 1
            elif mine is None or theirs is None:
                counts["found with one alone"] += 1
            elif mine < theirs or theirs < mine:
                counts["one within the other"] += 1
            else:
                counts["of one size" if len(mine) == len(theirs) else "else"] += 1
    return counts


def summary(name: str, rows: list[dict[str, Any]]) -> None:
    n, lost = len(rows), sum(bool(row["cause"]) for row in rows)
    checked, false = (sum(x) for x in zip(*((row["checked"], len(row["false"])) for row in rows), strict=True))
    print(f"{name}: {n} prompts, {checked} statements run again, {false} false; lost in {lost}")
    print(f"  kept also without the prompt: {sum(row['without_prompt'] for row in rows)}")
    if rows[0]["origins"] is not None:
        print(f"  the sentences that the answer needs are named: {sum(row['named'] for row in rows)} of {n}")
    sets = [each for row in rows for each in row["sets"]]
    for about, role in itertools.product(("heads", "positions"), ("breaking", "keeping")):
        of = [each for each in sets if (each["about"], each["role"]) == (about, role)]
        found = [each for each in of if each["size"]]
        exhausted = [each for each in found if each["smallest"] != "not exhausted"]
        right = sum(each["size"] == each["smallest"] for each in exhausted)
        counts = {size: sum(each["size"] == size for each in found) for size in sorted({each["size"] for each in found})}
        print(f"  {about}, {role}: {len(found)} of {len(of)}, sizes {counts}; smallest {right} of {len(exhausted)} exhausted")
        both = [(each["size"] or math.inf, each["by_exact_order"] or math.inf) for each in of]
        larger, smaller = sum(a > b for a, b in both), sum(a < b for a, b in both)
        equal = len(both) - larger - smaller
        print(f"    against the order of exact effects: {larger} larger, {smaller} smaller, {equal} equal")
    passes = sorted(row["passes"] for row in rows)
    print(f"  passes: median {statistics.median(passes):.1f}, most {passes[-1]:.1f} (cap {max(row['cap'] for row in rows)})")
    needs = [len(["units", *(["heads", "positions"] if row["cause"] else [])]) - len(row["searched"]) for row in rows]
    print(f"  searches that ended at the cap: {sum(needs)}")
    of_sets, *changed = (sum(row["at_other_bounds"].get(each, 0) for row in rows) for each in DIFFERENCES)
    listed = ", ".join(f"{each} {n}" for each, n in zip(DIFFERENCES[1:], changed, strict=True))
    print(f"  sets that change where half is 0.4 or 0.6: {sum(changed)} of {of_sets} ({listed})", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    names = [*STORIES, *OTHERS]
    parser.add_argument("--models", nargs="*", default=names, choices=names)
    parser.add_argument("--stories", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--facts", type=int, default=6, help="sentences of a story")
    parser.add_argument("--checked", type=int, default=12)
    parser.add_argument("--heads", type=int, default=20, help="prompts of which each head that was run alone is run again")
    parser.add_argument("--bounds", type=int, default=20, help="prompts of a model that are explained with other bounds, too")
    parser.add_argument("--runs", type=int, default=5_000, help="of which sizes are compared")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--stories260k", help="a llama2.c checkpoint")
    parser.add_argument("--tokenizer", help="its tokenizer")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.models:
        if name == "stories260K" and args.stories260k is None:
            continue
        path = args.out / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        model, passes_of, given = prompts_of(name, args)
        for number, each in enumerate(given[len(rows) :], start=len(rows)):
            rows.append(one(model, passes_of, each, number, args))
            with path.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        summary(name, rows)
        for row in rows:
            for false in row["false"]:
                print(f"    false: {false}", flush=True)


if __name__ == "__main__":
    main()

"""Whether attribution names the head and the position that a two-hop answer is read from: against patching by hooks.

    python tests/benchmarks/bench_notes.py [--model facts-hops-gpt2] [--stories 300] [--facts 6] [--seed 0]

For two-hop questions that the model answers rightly (facts-hops-*), the sentence with the container's room is deleted. What the
text then lacks is found twice:

- by patching, in one pass over prompt and text: what one head writes at the text's tokens (``hook_z``) is taken from the pass
  without the sentence; and the shifted keys and values of one prompt position are, in the last layer, which the text alone
  reads. The head and the position (behind the sentence) that cost the answer most are the known ones. The position should be
  the note's, where the later sentence names the container, or one that carries it: those within the shift's window behind it.
- by `attribution_by_head` and `attribution_by_position`, which exchange parts of a converted prompt.

Printed: how often both name the same, how often the position is the note's, how often both sentences have the two largest
total effects and each of them is among these two, and how often the one sentence that a one-hop question needs has the largest,
each with Wilson's lower bound (95 %, one-sided).
"""

import argparse
from typing import Any

import torch
from bench_attribution import asked, right_questions
from kvlens.analyses.attribution.answers import Question

from kvlens import HookedKVTransformer
from kvlens.analyses import attribution_by_head, attribution_by_position, prompt_attribution
from kvlens.components import hidden_tokens_keep_positions
from kvlens.tasks.facts.nested import note_position

SENTENCES = ("the container's room", "the thing's container")
"""What the sentences of `Question.origins` say, in that order."""


def wilson_low(right: int, n: int, z: float = 1.645) -> float:
    """Lower bound of a share."""
    share = right / n
    middle, spread = share + z * z / (2 * n), z * ((share * (1 - share) + z * z / (4 * n)) / n) ** 0.5
    return (middle - spread) / (1 + z * z / n)


def patched(question: Question, span: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(fall of log p by layer and head, fall by prompt position) where parts of a pass are those without the span."""
    model, n = question.model, len(question.prompt)
    together = torch.cat([question.prompt, question.text])
    gone = question.rows([[span]])
    mask = torch.cat([gone.kept[0], torch.ones(len(question.text), dtype=torch.bool)])[None]
    names = [name for layer in range(model.cfg.n_layers) for name in names_of(model, layer)]
    with hidden_tokens_keep_positions(True):
        _, other = model.run_with_cache(together[None], attention_mask=mask.long(), names_filter=names)

    def score(hooks: list[Any]) -> float:
        logits = model.run_with_hooks(together[None], fwd_hooks=hooks)[0, -1]
        return float(logits.double().log_softmax(dim=-1)[question.answer[0]])

    whole = score([])
    heads = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, dtype=torch.float64)
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):

            def of_head(z: torch.Tensor, hook: Any, head: int = head) -> torch.Tensor:
                z[0, n:, head] = other[hook.name][0, n:, head]
                return z

            heads[layer, head] = whole - score([(f"blocks.{layer}.attn.hook_z", of_head)])
    positions = torch.zeros(n, dtype=torch.float64)
    for position in range(span[1], n):

        def of_position(x: torch.Tensor, hook: Any, position: int = position) -> torch.Tensor:
            x[0, position] = other[hook.name][0, position]
            return x

        positions[position] = whole - score([(name, of_position) for name in names_of(model, model.cfg.n_layers - 1)[1:]])
    return heads, positions


def names_of(model: HookedKVTransformer, layer: int) -> list[str]:
    return [f"blocks.{layer}.attn.hook_{name}" for name in ("z", "k_shifted", "v_shifted")]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="facts-hops-gpt2", help="or facts-hops-linear")
    parser.add_argument("--stories", type=int, default=300)
    parser.add_argument("--patched", type=int, default=100, help="so many of them are patched too")
    parser.add_argument("--facts", type=int, default=4, help="sentences of a story")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    model = HookedKVTransformer.from_zoo(args.model).requires_grad_(False)
    assert model.cfg.kv_shift is not None
    what = (
        "one hop: the sentence leads",
        "two hops: both sentences lead",
        *(f"two hops: {s} among the two" for s in SENTENCES),
        "same head",
        "same position",
        "position carries the note",
    )
    counts: dict[str, list[bool]] = {each: [] for each in what}
    heads_seen: dict[tuple[int, int], int] = {}
    behind: dict[int, int] = {}
    difference = 0.0
    for story, about in right_questions(model, args.stories, args.facts, 9_000_000 + args.seed, n_origins=1):
        question, units, (origin,) = asked(model, story, about)
        by = [(unit.start, unit.stop) for unit in units]
        effects = prompt_attribution(model, question.prompt, question.text, by=by, answer=question.answer)["total_effect"]
        counts["one hop: the sentence leads"].append(int(effects.idxmax()) == origin)
    for story, about in right_questions(model, args.stories, args.facts, 8_000_000 + args.seed):
        question, units, origins = asked(model, story, about)
        spans = [(unit.start, unit.stop) for unit in units]
        given: dict[str, Any] = dict(answer=question.answer)
        effects = prompt_attribution(model, question.prompt, question.text, by=spans, **given)["total_effect"]
        leading = set(effects.nlargest(2).index)
        counts["two hops: both sentences lead"].append(leading == set(origins))
        for name, origin in zip(SENTENCES, origins, strict=True):
            counts[f"two hops: {name} among the two"].append(origin in leading)
        if len(counts["same head"]) == args.patched:
            continue
        span = spans[origins[0]]
        heads = attribution_by_head(model, question.prompt, question.text, by=[span], **given)
        heads = heads[heads["unit"] == 0]
        positions = attribution_by_position(model, question.prompt, question.text, by=[span], each_layer=True, **given)
        last = positions["layer"] == model.cfg.n_layers - 1
        positions = positions[(positions["part"] == "position") & last & (positions["prompt_position"] >= span[1])]
        by_head, by_position = patched(question, span)
        top = heads.loc[heads["swap"].idxmax()]
        head = (int(top["layer"]), int(top["head"]))
        position = int(positions.loc[positions["swap"].idxmax(), "prompt_position"])
        note = note_position(story, about.sentence)
        counts["same head"].append(head == divmod(int(by_head.argmax()), model.cfg.n_heads))
        counts["same position"].append(position == int(by_position.argmax()))
        counts["position carries the note"].append(note <= position <= note + model.cfg.kv_shift.window)
        difference = max(difference, float((torch.tensor(positions["swap"].to_numpy()) - by_position[span[1] :]).abs().max()))
        behind[position - note] = behind.get(position - note, 0) + 1
        heads_seen[head] = heads_seen.get(head, 0) + 1
    for each, right in counts.items():
        n = len(right)
        print(f"{args.model}: {each}: {sum(right)} of {n}, {sum(right) / n:.1%}, lower bound {wilson_low(sum(right), n):.1%}")
    print(f"heads named: {heads_seen}; positions named, from the note's: {dict(sorted(behind.items()))}")
    print(f"largest difference of a position's effect from its patch: {difference:.1e} nats")


if __name__ == "__main__":
    main()

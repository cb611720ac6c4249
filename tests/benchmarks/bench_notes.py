"""Whether attribution names the head and the position that a two-hop answer is read from: against patching by hooks.

    python tests/benchmarks/bench_notes.py [--model facts-hops-gpt2] [--stories 2000] [--patched 200] [--facts 4] [--seed 0]

For two-hop questions that the model answers correctly (facts-hops-*), the sentence with the container's room is deleted. What
the text then lacks is found twice:

- by patching, in passes over prompt and text. Heads: what one head writes at the text's tokens (``hook_z``) is taken from a
  pass without the sentence, in which the residual stream that enters its layer at the text's tokens is that of the pass with
  it, so that the head asks the same and reads another prompt; the known head is the one that costs the answer most. (Taken from
  the pass without the sentence as it is, a head of a later layer would write something else because it asks something else:
  how often that patch names the same head is printed, too.) Positions: the shifted keys and values of one
  prompt position in the last layer, which the text alone reads, are taken from the other pass, in both directions; the known
  position (behind the sentence) is the one that brings most of the answer back in the pass without the sentence. A swap in the
  pass with the sentence cannot say it: a model that notes the room at several positions loses nothing with any one of them.
- by exchanging parts of a converted prompt.

Printed: how often both name the same head and the same position; how often that position is enough alone (keeps at least half
of the effect); how often it is where the model was trained to note the room, at the word for the container in the later
sentence, or within the shift's window behind it; and how often, in all layers at once, a position of the sentence itself keeps
most. Then how often both sentences have the two largest total effects, and how often the one sentence that a one-hop question
needs has the largest; each with the exact lower bound (binomial, 95 %, one-sided).

The story alone does not say whether the sentence with the thing's container has an effect. In stories of an even number of
sentences each container has one thing, so that the deleted sentence could be inferred by exclusion; with three sentences it
could not, and a guess is right half of the time. Where a model answers rightly and with certainty without the sentence, the
sentence has no effect. How often the answer stays the most probable one without it (p > 0.5) is printed, and how often both
sentences lead where it does not: that second figure is about the model's causes, not about the story's.
"""

import argparse
from typing import Any

import torch
from bench_attribution import asked, right_questions
from kvlens.analyses.attribution.answers import Question
from kvlens.analyses.attribution.methods import LeaveOneOut
from kvlens.analyses.bias.exchange import HeadExchange, in_one_space

from kvlens import HookedKVTransformer, convert_prompt
from kvlens.analyses import attribution_by_position
from kvlens.components import hidden_tokens_keep_positions
from kvlens.papers.harness.significance import binomial_tail

SENTENCES = ("the container's room", "the thing's container")
"""What the sentences of `Question.origins` say, in that order."""


def lower_bound(right: int, n: int, level: float = 0.05) -> float:
    """The share with which ``right`` or more of n have probability ``level`` (Clopper and Pearson 1934, one-sided)."""
    low, high = 0.0, right / n
    for _ in range(50 if right else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if binomial_tail(right, n, middle) < level else (low, middle)
    return low


Patched = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def patched(question: Question, span: tuple[int, int]) -> Patched:
    """(fall of log p by layer and head, asking the same; the same with heads that ask what they ask without the span; by prompt
    position with that one from the pass without the span; and with only that one from the pass with it). Positions up to the
    span's end have NaN."""
    model, n = question.model, len(question.prompt)
    together = torch.cat([question.prompt, question.text])[None]
    gone = question.rows([[span]])
    deleted = torch.cat([gone.kept[0], torch.ones(len(question.text), dtype=torch.bool)])[None].long()
    names = [
        name for layer in range(model.cfg.n_layers) for name in (*names_of(model, layer), f"blocks.{layer}.hook_resid_pre")
    ]
    read_last = names_of(model, model.cfg.n_layers - 1)[1:]

    def read(mask: torch.Tensor, hooks: list[Any]) -> float:
        with hidden_tokens_keep_positions(True):
            logits = model.run_with_hooks(together, attention_mask=mask, fwd_hooks=hooks)[0, -1]
        return float(logits.double().log_softmax(dim=-1)[question.answer[0]])

    def taken_from(other: Any, where: Any) -> Any:
        def put(x: torch.Tensor, hook: Any) -> torch.Tensor:
            x[where] = other[hook.name][where]
            return x

        return put

    everything = torch.ones_like(deleted)
    with hidden_tokens_keep_positions(True):
        own, other = (
            model.run_with_cache(together, attention_mask=mask, names_filter=names)[1] for mask in (everything, deleted)
        )
    whole = read(everything, [])
    same, as_is = torch.zeros(2, model.cfg.n_layers, model.cfg.n_heads, dtype=torch.float64)
    in_text = (0, slice(n, None))
    for layer in range(model.cfg.n_layers):
        z, asked_alike = f"blocks.{layer}.attn.hook_z", {}

        def keep(x: torch.Tensor, hook: Any, into: dict[str, torch.Tensor] = asked_alike) -> None:
            into[hook.name] = x.clone()

        read(deleted, [(f"blocks.{layer}.hook_resid_pre", taken_from(own, in_text)), (z, keep)])
        for head in range(model.cfg.n_heads):
            same[layer, head] = whole - read(everything, [(z, taken_from(asked_alike, (*in_text, head)))])
            as_is[layer, head] = whole - read(everything, [(z, taken_from(other, (*in_text, head)))])
    swap, converse = torch.full((2, n), float("nan"), dtype=torch.float64)
    for position in range(span[1], n):
        swap[position] = whole - read(everything, [(name, taken_from(other, (0, position))) for name in read_last])
        converse[position] = whole - read(deleted, [(name, taken_from(own, (0, position))) for name in read_last])
    return same, as_is, swap, converse


def swaps_with_shift_states(question: Question, span: tuple[int, int]) -> torch.Tensor:
    """The fall of log p with each head and its own shift state from the prompt without the span, by layer and head."""
    bias, other = (convert_prompt(question.model, x) for x in (question.prompt, question.rows([[span]])))
    exchange = HeadExchange(*in_one_space(bias, other.select_prompt(0)))
    places = [(part.layer, part.head) for part in exchange.parts]  # as many key-value heads as query heads
    rows = torch.tensor([[place == each for place in places] for each in dict.fromkeys(places)])
    scores = question.scores_under(exchange.biases(torch.cat([torch.zeros_like(rows[:1]), rows])))
    return scores[0] - scores[1:]


def names_of(model: HookedKVTransformer, layer: int) -> list[str]:
    return [f"blocks.{layer}.attn.hook_{name}" for name in ("z", "k_shifted", "v_shifted")]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="facts-hops-gpt2", help="or facts-hops-linear")
    parser.add_argument("--stories", type=int, default=2000)
    parser.add_argument("--patched", type=int, default=200, help="how many of them are patched, too")
    parser.add_argument("--facts", type=int, default=4, help="sentences of a story")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    model = HookedKVTransformer.from_zoo(args.model).requires_grad_(False)
    assert model.cfg.kv_shift is not None
    counts: dict[str, list[bool]] = {}

    def count(what: str, right: bool) -> None:
        counts.setdefault(what, []).append(right)

    heads_seen: dict[tuple[int, int], int] = {}
    behind: dict[int, int] = {}
    difference = off_heads = 0.0
    for story, about in right_questions(model, args.stories, args.facts, 9_000_000 + args.seed, n_origins=1):
        question, units, (origin,) = asked(model, story, about)
        count("one hop: the sentence leads", int(LeaveOneOut().explain(question, units).effects.argmax()) == origin)
    for number, (story, about) in enumerate(right_questions(model, args.stories, args.facts, 8_000_000 + args.seed)):
        question, units, origins = asked(model, story, about)
        found = LeaveOneOut().explain(question, units)
        assert found.without is not None
        effects, guessed = found.effects, float(found.without[origins[1]].exp()) > 0.5
        leading = set(effects.topk(2).indices.tolist())
        count("two hops: both sentences lead", leading == set(origins))
        for name, origin in zip(SENTENCES, origins, strict=True):
            count(f"two hops: {name} among the two", origin in leading)
        count(f"two hops: right without {SENTENCES[1]}, too", guessed)
        if not guessed:
            count(f"two hops: both sentences lead, where the answer is wrong without {SENTENCES[1]}", leading == set(origins))
        if number >= args.patched:
            continue
        span = (units[origins[0]].start, units[origins[0]].stop)
        given: dict[str, Any] = dict(by=[span], answer=question.answer)
        swaps = swaps_with_shift_states(question, span)
        table = attribution_by_position(model, question.prompt, question.text, each_layer=True, **given)
        last = table[(table["part"] == "position") & (table["layer"] == model.cfg.n_layers - 1)]
        whole = float(last["whole"].iloc[0])
        alone = whole - torch.tensor(last["converse"].to_numpy())
        by_head, by_head_as_is, swap, converse = patched(question, span)
        head = divmod(int(swaps.argmax()), model.cfg.n_heads)
        position = span[1] + int(alone[span[1] :].argmax())
        patched_position = span[1] + int((whole - converse[span[1] :]).argmax())
        note = story.sentences[about.sentence].value_position
        count("same head", head == divmod(int(by_head.argmax()), model.cfg.n_heads))
        count("same head as the patch that asks otherwise", head == divmod(int(by_head_as_is.argmax()), model.cfg.n_heads))
        off_heads = max(off_heads, float((swaps - by_head.flatten()).abs().max()))
        count("same position", position == patched_position)
        count("the position is enough alone", whole - float(converse[patched_position]) >= whole / 2)
        count(
            "the position is the note's, or in the shift's window behind it", 0 <= position - note <= model.cfg.kv_shift.window
        )
        every = table[(table["part"] == "position") & (table["layer"] == -1)]
        first = int(every.set_index("prompt_position")["converse"].idxmin())
        count("in all layers a position of the sentence keeps most", first in range(*span))
        for mine, theirs in (("swap", swap), ("converse", converse)):
            off = torch.tensor(last[mine].to_numpy())[span[1] :] - theirs[span[1] :]
            difference = max(difference, float(off.abs().max()))
        behind[position - note] = behind.get(position - note, 0) + 1
        heads_seen[head] = heads_seen.get(head, 0) + 1
    for each, right in counts.items():
        n = len(right)
        print(f"{args.model}: {each}: {sum(right)} of {n}, {sum(right) / n:.1%}, lower bound {lower_bound(sum(right), n):.1%}")
    print(f"heads named: {heads_seen}; positions named, from the note's: {dict(sorted(behind.items()))}")
    print(f"largest difference of an effect from its patch: heads {off_heads:.1e} nats, positions {difference:.1e} nats")


if __name__ == "__main__":
    main()

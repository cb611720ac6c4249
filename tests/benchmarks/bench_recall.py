"""How many answers about a document a fitted bias keeps: questions asked behind the document with a few of its keys.

    python tests/benchmarks/bench_recall.py MODEL --out FILE [--documents final] [--joined 3] [--ratios 0.05 0.1] [--ways ...]

MODEL is a folder or GGUF file of a chat model. ``recall_documents.jsonl`` has nine invented documents of 320 to 400 tokens,
each with 24 questions that a few words of it answer. What is converted is the chat up to the question; the question and the
model's answer follow it, all questions of a document in one batch. Kept: of the questions answered right under the exact bias,
those that are still right. The first three documents (:data:`CHOICE`) served to choose kvlens' defaults; figures in results/
are of the other six. ``--joined N`` puts N documents into one chat. ``--passages FILE`` takes real passages with their
questions in place of the documents (lines of "title", "text", "question", "answers", such as NQ's), of which those with one
answer are used. One JSON line for each chat, way and ratio; a run is resumed where it stopped.

All ways read the same reference text, once a document. They are: "none", the prompt left out but its BOS; "moved", the
default of ``Landmark``, which may be polished for ``--steps`` on the logits or on the divergence ("polished", "polished kl");
"logits" and "equal", its budgets, with keys of the prompt in their places; these with the budgets that KVzip gives ("shares"),
or with the mean of those that "logits" gave to the other documents ("others"); "kvzip", and "kvzip fitted", its keys with
fitted weights and values; and ``AttentionMatching`` with equal budgets ("matching"), or with that mean ("matching others"), as
its authors determine budgets once per model, each also on policy. ``--study N`` reads N answers of the model to each of eight
instructions about the document in place of its continuations, as the authors do. An answer is clear if under the exact bias
each token up to its end is at least twice as probable as any other (:data:`CLEAR`).

Of every conversion its recall is measured, too, and validated at the end: conversions of one ratio by their recall and by the
answers that they keep, and answers by the largest loss of their words in the first sentence of the document that holds them.
"""

import argparse
import functools
import gzip
import itertools
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from bench_explanation import has_answer

import kvlens
from kvlens.conversion import AttentionMatching, KVzip, Landmark, Teacher
from kvlens.conversion.few_keys import assembled, budgets_of, own_keys, paths_of, root_of
from kvlens.conversion.gradients import logit_metrics, polish
from kvlens.conversion.measured import answer_errors, lead_of, recall_of
from kvlens.conversion.moved_keys import fitted_layer
from kvlens.conversion.prompt import PromptBatch
from kvlens.conversion.prompt_pass import continued, convert_exactly, rows_of
from kvlens.conversion.prompt_texts import Texts, turn
from kvlens.conversion.reference_queries import sampled_text
from kvlens.explanation.runs import greedy, stop_tokens
from kvlens.kv_bias.fit import MATTERS, Recall
from kvlens.ops.pursuit import Chosen
from kvlens.units import layout_of_tokens, spans_of

DOCUMENTS = Path(__file__).with_name("recall_documents.jsonl")
CHOICE = ("minutes.txt", "expedition.txt", "hotel.txt")
MATCHING = ("matching", "matching others", "matching policy", "matching others policy")
WAYS = ("none", "logits", "equal", "shares", "others", "moved", "polished", "polished kl", "kvzip", "kvzip fitted", *MATCHING)
STUDY = (
    "Summarize the text.",
    "Summarize the text, beginning with its end.",
    "List the names, numbers, dates and places of the text, and what is said of each.",
    "Write the facts of the text as JSON.",
    "Write the facts of the text as YAML.",
    "Write three questions about the text, each with its answer.",
    "Say what the text says in other words.",
    "What is most important in the text?",
)
CLEAR = math.log(2)
MOST = 16
"""Tokens of an answer; the short answers have at most six."""
Made = dict[str, Any]


class Fits:
    """A prompt that is read once, with its reference text, and converted in every way."""

    def __init__(self, model: Any, before: torch.Tensor, reference: str | None = None, n_study: int = 0, n_steps: int = 100):
        self.before, self.n_steps = before, n_steps
        prompt = PromptBatch(before[None], None, False)
        exact = convert_exactly(model, prompt, (), None, model.fingerprint())
        self.teacher = Teacher(model, prompt, exact, None, Landmark(n_keys=1, reference=reference))
        if n_study:
            self.teacher.seen = [self.teacher.seen[0], *studied(model, self.teacher.whole, n_study)]
        self._paths: tuple[int, list[Chosen]] = (0, [])

    @functools.cached_property
    def queries(self) -> list[Any]:
        return self.teacher.read(self.teacher.whole, self.teacher.seen)

    @functools.cached_property
    def metrics(self) -> list[torch.Tensor]:
        return logit_metrics(self.teacher)

    def paths(self, wanted: torch.Tensor) -> list[Chosen]:
        """The keys of every head in their order, followed once for the most that is asked for, the largest first."""
        if int(wanted) > self._paths[0]:
            self._paths = int(wanted), paths_of(self.teacher, self.queries, self.metrics, wanted)
        return self._paths[1]

    def bias(self, way: str, ratio: float, others: list[torch.Tensor]) -> tuple[Any, torch.Tensor]:
        """The bias of the document alone, with a batch axis, and the budgets."""
        if way == "none":
            return self.teacher.without[0], torch.zeros(self.teacher.n_layers, 1, self.teacher.n_kv_heads, dtype=torch.long)
        kvzip = KVzip(ratio=ratio)
        if way == "kvzip":
            return kvzip.fit(self.teacher), kvzip.kept(self.teacher).sum(dim=-1)
        n_layers, n_heads = self.teacher.n_layers, self.teacher.n_kv_heads
        wanted = Landmark(ratio=ratio).wanted(self.teacher)
        if way == "kvzip fitted":
            kept = kvzip.kept(self.teacher)
            index, budgets = list(kept.int().argsort(dim=-1, descending=True, stable=True).flatten(1, 2)), kept.sum(dim=-1)
        elif way in ("logits", "moved", "polished", "polished kl"):
            paths = self.paths(wanted)
            index, budgets = [path.keys for path in paths], budgets_of(paths, wanted, n_heads)
        else:
            if way == "shares":
                budgets = kvzip.kept(self.teacher).sum(dim=-1)
            elif "others" in way:
                share = torch.stack(others).mean(dim=0) * len(self.before)
                budgets = share.round().long().clamp(max=len(self.before))[:, None].to(wanted.device)
            else:
                budgets = wanted[None, :, None].expand(n_layers, 1, n_heads)
            if way.startswith("matching"):
                return self.matched(AttentionMatching(ratio=ratio), budgets, way.endswith("policy")), budgets
            index = [path.keys for path in self.paths(wanted.new_tensor([len(self.before)]))]
        steps = Landmark.key_steps if way in ("moved", "polished", "polished kl") else 0
        prompts = list(map(self.teacher.keys, range(n_layers)))
        own = [own_keys(*each) for each in zip(prompts, index, budgets, strict=True)]
        parts = zip(prompts, self.queries, own, map(root_of, self.metrics), strict=True)
        layers = [fitted_layer(*each, steps, self.teacher.method.seed) for each in parts]
        bias = assembled(self.teacher.exact, layers)
        if way.startswith("polished"):
            how = dict(steps=self.n_steps, texts_per_step=Landmark.texts_per_step)
            bias = polish(self.teacher, bias, self.queries, **how, objective="kl" if way.endswith("kl") else "logits")
        return bias, budgets

    def matched(self, matching: AttentionMatching, budgets: torch.Tensor, on_policy: bool) -> kvlens.KVBias:
        """Attention Matching with given budgets, [layer, 1, kv_head]."""
        layers: list[Any] = []
        for layer, (own, counts) in enumerate(zip(self.queries, budgets, strict=True)):
            if on_policy and layer:
                so_far = continued(None, assembled(self.teacher.exact, layers))
                own = self.teacher.read(so_far, self.teacher.seen, range(layer, layer + 1))[0]
            layers.append(matching.layer(self.teacher, layer, own, counts.flatten()))
        return assembled(self.teacher.exact, layers)


class Prepared(Fits):
    """A document with its questions."""

    def __init__(self, model: Any, document: Made, reference: str | None, n_study: int, n_steps: int):
        self.model, self.document = model, document
        before, self.questions = asked(model, document)
        super().__init__(model, before, reference, n_study, n_steps)

    def cell(self, way: str, ratio: float, others: list[torch.Tensor]) -> Made:
        """The answers to the document's questions under one bias, and its error on the model's own text."""
        began, since = time.process_time(), time.perf_counter()
        row = {"document": self.document["name"], "way": way, "ratio": ratio}
        with torch.no_grad():
            if way == "exact":
                bias, budgets = self.teacher.whole, None
            else:
                bias, budgets = self.bias(way, ratio, others)
        row |= {"processor": time.process_time() - began, "wall": time.perf_counter() - since, "n_tokens": len(self.before)}
        alone = bias.select_prompt(0)
        said = answers(self.model, alone, self.questions)
        row |= {"right": right(said, self.document), "said": said, "prepared": self.teacher.seconds}
        if budgets is None:
            return row | {"gap": gaps(self.model, alone, self.questions, said, self.document)}
        row |= {"recall": self.recall(alone).to_json()}
        off = answer_errors(self.model, self.teacher.whole, bias, self.teacher.without, self.teacher.held_out)
        off = off.map(lambda x: x[0])
        return row | {"budgets": budgets[:, 0].tolist(), "error": float(off.logits_error), "lost_share": float(off.lost_share)}

    def recall(self, bias: kvlens.KVBias) -> Recall:
        """What the bias still knows of the document's sentences, said by the model in its own turn."""
        text, whole = self.document["text"], self.teacher.whole.select_prompt(0)
        sentences = [text[first:last].strip() for first, last in spans_of(text, "sentence")]
        lead = lead_of(self.model, layout_of_tokens(self.model, self.before))
        with torch.no_grad():
            return recall_of(self.model, sentences, whole, bias, self.before[:1], lead)


@torch.no_grad()
def studied(model: Any, whole: kvlens.KVBias, n: int) -> Texts:
    """What the model answers to :data:`STUDY` about the document, 64 tokens sampled at temperature 1, ``n`` times each."""
    generator, texts = torch.Generator().manual_seed(0), []
    for words in STUDY:
        lead = torch.tensor(turn(model, words), device=whole.device).expand(n, -1)
        with model.holding(rows_of(whole, torch.zeros(n, dtype=torch.long))):
            answer = sampled_text(model, *model.next_logits(lead, None), 64, generator)
        texts.append(torch.cat([lead, answer], dim=1)[None])
    return texts


def asked(model: Any, document: Made) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The tokens before the questions, and those of each question; all of these begin with the last token that they share."""
    chats = [kvlens.Chat.ask(q, document["texts"]).tokens(model) for q, _ in document["questions"]]
    n_before = n_alike(chats) - 1
    return chats[0][:n_before], [chat[n_before:] for chat in chats]


def n_alike(rows: list[torch.Tensor]) -> int:
    """With how many tokens all rows begin alike."""
    shortest = min(map(len, rows))
    same = (torch.stack([row[:shortest] for row in rows]) == rows[0][:shortest]).all(dim=0)
    return int(same.long().cumprod(dim=0).sum())


def answers(model: Any, bias: kvlens.KVBias, questions: list[torch.Tensor]) -> list[str]:
    """What the model says to each question under a bias, read in one batch."""
    n_given = torch.tensor([len(question) - 1 for question in questions])
    given = torch.nn.utils.rnn.pad_sequence([question[1:] for question in questions], batch_first=True)
    stops, n_most = stop_tokens(model), int(n_given.max()) + MOST
    texts = greedy(model, bias, questions[0][:1], given, n_given, n_most, lambda text: text[-1] in stops)
    answered = [text[n:] for text, n in zip(texts, n_given.tolist(), strict=True)]
    return [model.tokenizer.decode(text, skip_special_tokens=True) for text in answered]


@torch.no_grad()
def gaps(model: Any, bias: kvlens.KVBias, questions: list[torch.Tensor], said: list[str], document: Made) -> list[float]:
    """How much more probable, in nats, every token up to the end of the right answer is at least than the second choice; 0
    where what is said has no right answer.
    """
    found = []
    with model.kv_bias(bias):
        for question, text, (_, answer) in zip(questions, said, document["questions"], strict=True):
            tokens = question.new_tensor(model.tokenizer(text, add_special_tokens=False)["input_ids"])
            ends = (n for n in range(1, len(tokens) + 1) if has_answer(model.tokenizer.decode(tokens[:n]), [answer]))
            n = next(ends, 0)
            if n:
                first, second = model.logits_on(torch.cat([question, tokens[:n]])[None], n + 1)[0, :-1].topk(2).values.T
            found.append(float((first - second).min()) if n else 0.0)
    return found


def passages(path: Path) -> Iterator[Made]:
    """Passages with one question each, and one answer; of those with the same title the first."""
    titles = set()
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for each in map(json.loads, lines):
            if len(each["answers"]) == 1 and each["title"] not in titles:
                titles.add(each["title"])
                yield {"name": each["title"], "text": each["text"], "questions": [(each["question"] + "?", each["answers"][0])]}


def joined(documents: list[Made], n: int) -> Iterator[Made]:
    """Chats about ``n`` documents each: their texts by name, and the questions about all of them."""
    for some in (documents[i : i + n] for i in range(0, len(documents), n)):
        questions = [question for each in some for question in each["questions"]]
        texts = {each["name"]: each["text"] for each in some}
        yield {"name": " ".join(texts)[:200], "text": "\n".join(texts.values()), "texts": texts, "questions": questions}


def right(said: list[str], document: Made) -> list[bool]:
    return [has_answer(text, [answer]) for text, (_, answer) in zip(said, document["questions"], strict=True)]


def table(rows: list[Made]) -> str:
    """Answers kept by way and ratio, pooled over the documents that have all of them."""
    exact = {row["document"]: row["right"] for row in rows if row["way"] == "exact"}
    clear = {row["document"]: [gap >= CLEAR for gap in row["gap"]] for row in rows if row["way"] == "exact"}
    lines = [f"{len(exact)} chats, {sum(map(len, exact.values()))} questions, {sum(map(sum, exact.values()))} right"]
    for way, ratio in dict.fromkeys((row["way"], row["ratio"]) for row in rows if row["way"] != "exact"):
        some = [row for row in rows if (row["way"], row["ratio"]) == (way, ratio)]
        each = [pair for row in some for pair in zip(row["right"], exact[row["document"]], clear[row["document"]], strict=True)]
        kept, n = sum(a and b for a, b, _ in each), sum(b for _, b, _ in each)
        sure = [a for a, b, is_clear in each if b and is_clear]
        errors = [row["error"] for row in some if "error" in row]
        error = f"; error on own text {sum(errors) / len(errors):.1%}" if errors else ""
        seconds = sum(row["processor"] for row in some) / len(some)
        share = f"{way} at {ratio:.0%}: {kept} of {n} kept ({kept / max(n, 1):.0%}), {sum(sure)} of {len(sure)} clear ones"
        lines.append(f"{share}, {len(some)} chats{error}; {seconds:.0f} s of processor time a fit")
    return "\n".join(lines)


def validation(rows: list[Made], documents: list[Made]) -> str:
    """How well recall tells which conversions, and which answers, are lost."""
    texts, exact = (
        {each["name"]: each for each in documents},
        {row["document"]: row["right"] for row in rows if row["way"] == "exact"},
    )
    lines, pooled = [], []
    some = [row for row in rows if "recall" in row]
    for ratio in sorted({row["ratio"] for row in some}):
        each = [(Recall.read(row["recall"]), row) for row in some if row["ratio"] == ratio]
        kept = [sum(a and b for a, b in zip(exact[row["document"]], row["right"], strict=True)) for _, row in each]
        n = [sum(exact[row["document"]]) for _, row in each]
        ranks = pd.DataFrame(
            {"recall": [recall.share for recall, _ in each], "kept": [a / b for a, b in zip(kept, n, strict=True)]}
        )
        found = [
            pair
            for recall, row in each
            for pair in losses(recall, row["right"], exact[row["document"]], texts[row["document"]])
        ]
        pooled += found
        lines.append(
            f"{ratio:.0%}: rank correlation {ranks.corr('spearman').iloc[0, 1]:.2f} over {len(each)}; {counted(found)}"
        )
    return "\n".join([*lines, f"all: {counted(pooled)}"])


def losses(recall: Recall, right: list[bool], exact: list[bool], document: Made) -> list[tuple[float, bool]]:
    """Of each answer that the whole document gives right: the largest loss of its words, and whether it is lost.

    Answers without a word that counts in the first sentence that holds them are left out.
    """
    pairs, plain = [], [letters(sentence) for sentence in recall.sentences]
    for (_, answer), is_right, was_right in zip(document["questions"], right, exact, strict=True):
        number = next((i for i, sentence in enumerate(plain) if letters(answer) in sentence), None)
        parts = letters(answer).split()
        of = [word.loss for word in recall.words if word.sentence == number and letters(word.word) in parts]
        if was_right and of:
            pairs.append((max(of), not is_right))
    return pairs


def letters(text: str) -> str:
    return re.sub(r"[^\w ]", "", text.lower()).strip()


def counted(pairs: list[tuple[float, bool]]) -> str:
    named = [lost for loss, lost in pairs if loss >= MATTERS]
    n_lost = sum(lost for _, lost in pairs)
    return f"{len(pairs)} answers, {n_lost} lost, {len(named)} named at a loss of 1 nat, of which {sum(named)} are lost"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or GGUF file of a chat model")
    parser.add_argument("--out", type=Path, required=True, help="a file of one JSON line for each cell")
    parser.add_argument("--documents", nargs="+", help='names, "choice", or "final" (the default)', default=["final"])
    parser.add_argument("--passages", type=Path, help="a file of passages with questions, in place of the documents")
    parser.add_argument("--joined", type=int, default=1, help="documents in one chat (default: 1)")
    parser.add_argument("--chats", type=int, help="the first so many chats alone")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["moved", "kvzip fitted"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.05, 0.25, 0.15])
    parser.add_argument("--reference", choices=("own", "prompt"), help="instead of both")
    parser.add_argument("--study", type=int, default=0, metavar="N", help="answers to each of eight instructions (default: 0)")
    parser.add_argument("--steps", type=int, default=100, help="of polishing (default: 100)")
    args = parser.parse_args(argv)
    own = [json.loads(line) for line in DOCUMENTS.read_text().splitlines()]
    sets = {"choice": CHOICE, "final": [each["name"] for each in own if each["name"] not in CHOICE]}
    names = [name for some in args.documents for name in sets.get(some, [some])]
    every = list(passages(args.passages)) if args.passages else [each for each in own if each["name"] in names]
    some = list(itertools.islice(joined(every, args.joined), args.chats))
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {(row["document"], row["way"], row["ratio"]) for row in rows}
    fitted = [(way, ratio) for ratio in args.ratios for way in args.ways if way != "none"]
    wanted = [("exact", 1.0), *([("none", 0.0)] if "none" in args.ways else []), *fitted]
    model = None
    for document in some:
        name = document["name"]
        cells = [cell for cell in wanted if (name, *cell) not in done]
        if not cells:
            continue
        model = kvlens.load(args.model).requires_grad_(False) if model is None else model
        prepared = Prepared(model, document, args.reference, args.study, args.steps)
        for way, ratio in cells:
            alike = [row for row in rows if (row["way"], row["ratio"]) == ("logits", ratio) and row["document"] != name]
            others = [torch.tensor(row["budgets"], dtype=torch.float64) / row["n_tokens"] for row in alike]
            if way == "others" and not others:
                continue
            rows.append(prepared.cell(way, ratio, others))
            with args.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(name, way, ratio, sum(rows[-1]["right"]), f"{rows[-1]['processor']:.0f} s", flush=True)
    rows = [row for row in rows if row["document"] in {each["name"] for each in some}]
    print(table(rows), validation(rows, some), sep="\n")


if __name__ == "__main__":
    main()

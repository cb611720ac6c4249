"""Circuits by MIB's measure: kvlens' EAP, EAP-IG and confirmed edges beside CircuitKIT's EAP-IG and random ones.

    python tests/benchmarks/bench_circuits.py smollm2=MODEL.gguf --data FOLDER --cache FOLDER [--tasks ioi] [--pairs 100]
    python -m venv circuitkit-env && circuitkit-env/bin/pip install circuitkit==0.2.0
    python tests/benchmarks/bench_circuits.py smollm2=MODEL.gguf ... --python circuitkit-env/bin/python --folder FOLDER
    python tests/benchmarks/bench_circuits.py --cache FOLDER --table

DATA has MIB's ``templates.json``, ``names.json``, ``objects.json``, ``places.json`` and ``object_color_pairs.json`` (Mueller et
al. 2025) and ``greater_than_data.csv`` of EAP-IG (Hanna et al. 2024); pairs are drawn from these with a seed, as MIB's own
splits are on the hub alone:

- ioi: the one who acts is a third name in the corrupted prompt; the answer is the indirect object, the rival the subject;
- ioi-flip: likewise, and the one who acts is the indirect object (MIB's own counterfactual);
- greater-than: digits above that of the year's tens against those below; corrupted: a year that ends with 01;
- addition: two numbers below 100 with a sum below 100, its first digit against that of the corrupted prompt's sum;
- mcqa: four colors, the letter of the right one against the letter that stands there in the corrupted prompt.

A pair counts where the model is right: its first token of all is an answer, for mcqa the first of the four letters. Half of the
right pairs choose the edges, the other half measures them. CPR and CMD are as in ``kvlens.analyses.circuits``, and their
intervals, 95 %, from 2,000 draws of the measured pairs with the circuits as they are.

Each estimate and each curve is a file in the cache, and what is there is not run again. FOLDER of CircuitKIT, which needs
another TransformerLens than kvlens, hence the second interpreter, is the same model as Transformers saves it. It has an edge
into the keys and values of every query head, we of every key-value head; its circuits are run by itself (``circuitkit_own``)
and, with ``--methods circuitkit``, by us, which ``--compare`` holds against each other.
"""

import argparse
import csv
import json
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

AT_ONCE = 50
"""Pairs in one pass."""
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""As in ``kvlens.analyses.circuits``, which the other interpreter cannot import."""
DRAWS = 2000
MOST = 1500
"""Pairs that a model is asked."""
BY_QUERY_HEAD = "eap_ig_by_query_head"


class Pair(NamedTuple):
    """Two prompts, and the answers and rivals of the clean one, the mean of whose logits is compared."""

    clean: str
    corrupted: str
    answers: list[str]
    rivals: list[str]


# --- tasks -------------------------------------------------------------------------------------------------------------------


def read(data: Path, name: str) -> Any:
    return json.loads((data / f"{name}.json").read_text())


def indirect_objects(data: Path, draw: random.Random, tokenizer: Any, flip: bool = False) -> Iterator[Pair]:
    """Names of one token; templates that say "an" fit none of the objects."""
    names = [name for name in read(data, "names") if len(tokenizer.encode(f" {name}", add_special_tokens=False)) == 1]
    templates = [template for template in read(data, "templates") if " an {object}" not in template]
    places, objects = read(data, "places"), read(data, "objects")
    while True:
        subject, other, third = draw.sample(names, 3)
        a, b = draw.sample([subject, other], 2)
        template, place, thing = draw.choice(templates), draw.choice(places), draw.choice(objects)
        clean, corrupted = (
            template.format(name_A=a, name_B=b, name_C=acts, place=place, object=thing)
            for acts in (subject, other if flip else third)
        )
        yield Pair(clean, corrupted, [f" {other}"], [f" {subject}"])


def greater_than(data: Path, draw: random.Random, tokenizer: Any) -> Iterator[Pair]:
    """Tokenizers that cut numbers into digits; the tens have digits above and below."""
    with (data / "greater_than_data.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in draw.sample(rows, len(rows)):
        tens = int(row["label"]) // 10
        if 0 < tens < 9:
            yield Pair(row["clean"], row["corrupted"], [str(n) for n in range(tens + 1, 10)], [str(n) for n in range(tens)])


def addition(data: Path, draw: random.Random, tokenizer: Any) -> Iterator[Pair]:
    while True:
        (a, b), (c, d) = ([draw.randint(10, 89) for _ in range(2)] for _ in range(2))
        first, other = str(a + b)[0], str(c + d)[0]
        if a + b < 100 and c + d < 100 and first != other:
            yield Pair(f"{a} + {b} = ", f"{c} + {d} = ", [first], [other])


def multiple_choice(data: Path, draw: random.Random, tokenizer: Any) -> Iterator[Pair]:
    known = read(data, "object_color_pairs")
    colors = sorted({each["color"] for each in known})
    while True:
        thing, color = draw.choice(known).values()
        others = draw.sample([each for each in colors if each != color], 3)
        options, letters = draw.sample([color, *others], 4), draw.sample("EFGHIJKLMNOPQRSTUVWXYZ", 4)
        question = f"{thing.capitalize()} is {color}. What color is {thing}?"
        clean, corrupted = (
            "\n".join([question, *(f"{a}. {b}" for a, b in zip(named, options, strict=True)), "Answer:"])
            for named in ("ABCD", letters)
        )
        at = options.index(color)
        yield Pair(clean, corrupted, [f" {'ABCD'[at]}"], [f" {letters[at]}"])


TASKS = {
    "ioi": indirect_objects,
    "ioi-flip": partial(indirect_objects, flip=True),
    "greater-than": greater_than,
    "addition": addition,
    "mcqa": multiple_choice,
}
OF_FOUR = [" A", " B", " C", " D"]


def token(tokenizer: Any, text: str) -> int:
    """The one token that a text is."""
    (found,) = tokenizer.encode(text, add_special_tokens=False)
    return int(found)


@torch.no_grad()
def right(model: Any, pair: Pair, among: Sequence[str] | None) -> bool:
    """Whether the model's next token, of all or of these, is an answer."""
    logits = model(model.to_tokens(pair.clean))[0, -1]
    ids = torch.arange(len(logits)) if among is None else torch.tensor([token(model.tokenizer, text) for text in among])
    return int(ids[logits[ids].argmax()]) in {token(model.tokenizer, text) for text in pair.answers}


def right_pairs(model: Any, task: str, data: Path, n: int) -> dict[str, Any]:
    """So many pairs that the model answers right, and how many it was asked."""
    found: dict[str, Pair] = {}
    asked = 0
    for pair in TASKS[task](data, random.Random(0), model.tokenizer):
        if len(found) == n or asked == MOST:
            break
        if len(model.to_tokens(pair.clean)[0]) != len(model.to_tokens(pair.corrupted)[0]) or pair.clean in found:
            continue
        asked += 1
        if right(model, pair, OF_FOUR if task == "mcqa" else None):
            found[pair.clean] = pair
    return {"asked": asked, "pairs": list(found.values())}


# --- estimates and runs ------------------------------------------------------------------------------------------------------


def difference(tokenizer: Any, pairs: Sequence[Pair]) -> Any:
    """The mean logit of the answers less that of the rivals, of each pair."""
    ids = [[torch.tensor([token(tokenizer, x) for x in of]) for of in (pair.answers, pair.rivals)] for pair in pairs]

    def measure(logits: torch.Tensor) -> torch.Tensor:
        last = logits[:, -1]
        return torch.stack([row[a].mean() - row[r].mean() for row, (a, r) in zip(last, ids, strict=True)])

    return measure


def batches(model: Any, pairs: Sequence[Pair]) -> list[tuple[list[int], Any]]:
    """Pairs of one length that are run together: their numbers, and what kvlens' circuits are measured on."""
    from kvlens.analyses.circuits.pairs import Pairs

    tokens = [[model.to_tokens(text)[0] for text in (pair.clean, pair.corrupted)] for pair in pairs]
    found = []
    for length in sorted({len(clean) for clean, _ in tokens}):
        same = [i for i, (clean, _) in enumerate(tokens) if len(clean) == length]
        for rows in (same[i : i + AT_ONCE] for i in range(0, len(same), AT_ONCE)):
            clean, corrupted = (torch.stack([tokens[i][k] for i in rows]) for k in range(2))
            found.append((rows, Pairs(clean, corrupted, difference(model.tokenizer, [pairs[i] for i in rows]), 1)))
    return found


def estimated(model: Any, pairs: Sequence[Pair], method: str, by_query_head: bool = False) -> torch.Tensor:
    """The estimates of all edges by ``eap`` or ``eap_ig``, the mean over pairs."""
    from kvlens.analyses import circuit

    total = 0.0
    for rows, batch in batches(model, pairs):
        found = circuit(model, batch.clean, batch.corrupted, batch.metric, method=method, by_query_head=by_query_head)
        total = total + found.estimates * len(rows)
    return total / len(pairs)


def per_pair(found: Any, pairs: Sequence[Pair], *kept: torch.Tensor) -> torch.Tensor:
    """The metric of every pair, in their order, in a run of each circuit, [circuit, pair]."""
    of = batches(found.model, pairs)
    values = replace(found, batches=[batch for _, batch in of]).measured(*kept)
    return values[:, torch.tensor([i for rows, _ in of for i in rows]).argsort()]


class Areas(NamedTuple):
    """f at each size, [..., size], CPR and CMD."""

    f: torch.Tensor
    cpr: torch.Tensor
    cmd: torch.Tensor


def areas(values: torch.Tensor, clean: torch.Tensor, corrupted: torch.Tensor) -> Areas:
    """Of metrics per size, [..., size], without the whole model, whose f is 1."""
    f = (values - corrupted[..., None]) / (clean - corrupted)[..., None]
    f, at = torch.cat([f, torch.ones_like(f[..., :1])], dim=-1), torch.tensor(SHARES, dtype=torch.float64)
    return Areas(f, torch.trapezoid(f, at), torch.trapezoid((1 - f).abs(), at))


def drawn_areas(curve: dict[str, Any], ends: dict[str, Any]) -> Areas:
    """The same with the measured pairs, and with as many of them drawn again, in row 0 and in the others."""
    values, clean, corrupted = (
        torch.tensor(x, dtype=torch.float64) for x in (curve["values"], ends["clean"], ends["corrupted"])
    )
    n = len(clean)
    rows = torch.randint(n, (DRAWS, n), generator=torch.Generator().manual_seed(0))
    rows = torch.cat([torch.arange(n)[None], rows])
    return areas(values.T[rows].mean(dim=1), clean[rows].mean(dim=1), corrupted[rows].mean(dim=1))


# --- the cache ---------------------------------------------------------------------------------------------------------------


def kept_in(path: Path, make: Any) -> Any:
    """What a JSON file has, made first where there is none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        made = json.dumps(make())
        path.with_suffix(".part").write_text(made)
        path.with_suffix(".part").rename(path)
        print(f"{time.strftime('%H:%M')} {path}", flush=True)
    return json.loads(path.read_text())


class Run:
    """One model and task: its pairs, its estimates and its curves, each in the cache or made now."""

    def __init__(self, model: Any, task: str, data: Path, cache: Path, n: int):
        self.model, self.cache = model, cache
        listed = kept_in(cache / "pairs.json", lambda: right_pairs(model, task, data, 2 * n))
        pairs = [Pair(*pair) for pair in listed["pairs"]]
        self.choose, self.measure = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]

    def found(self, method: str, by: str = "edges") -> Any:
        """The circuit of all edges with the estimates of a method; confirmed are those by which it is ordered."""
        from kvlens.analyses.circuits.graph import Graph

        from kvlens.analyses import Circuit

        graph = Graph(self.model, by_query_head=method in ("circuitkit", BY_QUERY_HEAD))
        by_position = torch.zeros(len(graph.writers), 0, dtype=torch.float64)
        return Circuit(self.model, [], graph, self._scores(method, by, graph), by_position, graph.edges)

    def _scores(self, method: str, by: str, graph: Any) -> torch.Tensor:
        if method.startswith("random"):
            drawn = torch.Generator().manual_seed(int(method.removeprefix("random")))
            return torch.rand(graph.edges.shape, generator=drawn, dtype=torch.float64) * graph.edges
        if method == "circuitkit":
            return grouped(torch.load(self.cache / "circuitkit_scores.pt"), graph)
        path = self.cache / f"{method}-{by}.pt" if method.startswith("confirmed") else self.cache / f"{method}.pt"
        if not path.exists():
            started = time.process_time()
            torch.save(self._estimates(method, by), path)
            print(f"{time.strftime('%H:%M')} {path} {time.process_time() - started:.0f} s", flush=True)
        return torch.load(path)

    def _estimates(self, method: str, by: str) -> torch.Tensor:
        if method == BY_QUERY_HEAD:
            return estimated(self.model, self.choose, "eap_ig", by_query_head=True)
        name, _, n_pairs = method.partition("of")
        lengths = [len(self.model.to_tokens(pair.clean)[0]) for pair in self.choose]
        order = sorted(range(len(lengths)), key=lambda i: (-lengths.count(lengths[i]), i))
        some = [self.choose[i] for i in order[: int(n_pairs)]] if n_pairs else self.choose
        if not name.startswith("confirmed"):
            return estimated(self.model, some, name)
        joined = [batch for _, batch in batches(self.model, some)]
        found = replace(self.found("eap_ig"), batches=joined).confirmed(int(name.removeprefix("confirmed")), by=by)
        if by == "edges":
            return torch.where(found.falls.isnan(), found.estimates, found.falls)
        scores = torch.zeros_like(found.estimates)  # a node's is the sum over its edges
        scores[:, -1] = torch.where(found.node_falls.isnan(), found.estimates.sum(dim=1), found.node_falls)
        return scores

    def ends(self) -> dict[str, Any]:
        """The metric of the whole model and of the corrupted prompts."""
        found = self.found("random0")

        def make() -> dict[str, Any]:
            clean, corrupted = per_pair(found, self.measure, found.graph.edges, torch.zeros_like(found.kept))
            return {"clean": clean.tolist(), "corrupted": corrupted.tolist()}

        return kept_in(self.cache / "ends.json", make)

    def curve(self, method: str, by: str, order: str) -> None:
        """The metric of every pair in circuits of MIB's sizes but the last, which is the whole model."""

        def make() -> dict[str, Any]:
            found = self.found(method, by)
            kept = [found.keep(share, by=by, order=order).kept for share in SHARES[:-1]]
            started = time.process_time()
            values = per_pair(found, self.measure, *kept).tolist()
            seconds = time.process_time() - started
            return {"values": values, "kept": [int(each.sum()) for each in kept], "seconds": seconds}

        kept_in(self.cache / f"{method}-{by}-{order}.json", make)


# --- CircuitKIT, in an environment of its own --------------------------------------------------------------------------------


def there(folder: str, written: Path, orders: Sequence[str]) -> None:
    """Its EAP-IG and its runs of the circuits that its greedy choice makes of the scores, into files beside the pairs."""
    import transformers
    from circuitkit.backends.eap.attribute import attribute
    from circuitkit.backends.eap.evaluate import evaluate_baseline, evaluate_graph
    from circuitkit.backends.eap.graph import Graph
    from transformer_lens import HookedTransformer, loading_from_pretrained

    torch.set_num_threads(1)
    loading_from_pretrained.get_official_model_name = lambda name: name  # it knows no folders
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = HookedTransformer.from_pretrained_no_processing(folder, hf_model=hf, tokenizer=tokenizer, n_ctx=256)
    for name in ("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in", "ungroup_grouped_query_attention"):
        setattr(model.cfg, name, True)
    pairs = [Pair(*pair) for pair in json.loads((written / "pairs.json").read_text())["pairs"]]
    choose, measure = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]

    def loaded(some: Sequence[Pair]) -> tuple[list[int], list[Any]]:
        """Pairs of one length together, as kvlens takes them: numbers, and batches of prompts and token numbers."""
        lengths = [len(model.to_tokens(pair.clean)[0]) for pair in some]
        order = sorted(range(len(some)), key=lambda i: lengths[i])
        groups: list[list[int]] = []
        for i in order:
            if groups and lengths[groups[-1][0]] == lengths[i] and len(groups[-1]) < AT_ONCE:
                groups[-1].append(i)
            else:
                groups.append([i])
        made = [([some[i].clean for i in rows], [some[i].corrupted for i in rows], [some[i] for i in rows]) for rows in groups]
        return order, made

    def metric(logits: torch.Tensor, clean: Any, lengths: Any, labels: Any) -> torch.Tensor:
        return difference(tokenizer, labels)(logits)

    graph = Graph.from_model(model)
    scores = written / "circuitkit_scores.pt"
    if not scores.exists():
        started = time.process_time()
        loss = lambda *given: -metric(*given).sum()  # noqa: E731 - its scores are divided by the number of pairs afterwards
        attribute(model, graph, loaded(choose)[1], loss, "EAP-IG-inputs", ig_steps=5, quiet=True)
        torch.save(graph.scores.clone(), scores)
        print(f"{time.strftime('%H:%M')} {scores} {time.process_time() - started:.0f} s", flush=True)
    graph.scores = torch.load(scores).numpy()  # its greedy choice reads them one at a time
    numbers, made = loaded(measure)
    back = torch.tensor(numbers).argsort()

    def run() -> list[float]:
        return evaluate_graph(model, graph, made, metric, quiet=True, skip_clean=True)[back].tolist()

    def ends() -> dict[str, Any]:
        clean = evaluate_baseline(model, made, metric, quiet=True)[back].tolist()
        graph.reset()
        return {"clean": clean, "corrupted": run()}

    kept_in(written / "circuitkit_own-ends.json", ends)
    for order in orders:

        def own(absolute: bool = order == "absolute") -> dict[str, Any]:
            started, values, kept = time.process_time(), [], []
            for share in SHARES[:-1]:
                graph.apply_greedy(int(share * len(graph.edges)), absolute=absolute)
                kept.append(int(graph.count_included_edges()))
                values.append(run())
            return {"values": values, "kept": kept, "seconds": time.process_time() - started}

        kept_in(written / f"circuitkit_own-edges-{order}.json", own)


def grouped(scores: torch.Tensor, graph: Any) -> torch.Tensor:
    """CircuitKIT's scores, which are those of each query head, as ours: added up where heads share keys and values."""
    queries = graph.at[0, "q"].stop - graph.at[0, "q"].start
    per_layer, found = 3 * queries + 1, torch.zeros(graph.edges.shape, dtype=torch.float64)
    for i, reader in enumerate(graph.readers):
        at = graph.at[reader.layer, reader.input]
        group = queries // (at.stop - at.start) if reader.input in "qkv" else 1
        column = {"q": 0, "k": queries, "v": 2 * queries}.get(reader.input, per_layer - 1) + max(reader.head, 0) * group
        first = -1 if reader.input == "logits" else reader.layer * per_layer + column
        found[:, i] = scores[:, range(first, first + group)].double().sum(dim=1)
    return found * graph.edges


def compared(run: Run, n_pairs: int) -> None:
    """Print how far our estimates are from CircuitKIT's, and our runs of its circuits from its own."""
    ours = run.found("eap_ig")
    theirs = grouped(torch.load(run.cache / "circuitkit_scores.pt"), ours.graph)
    print(f"estimates: relative difference {float((ours.estimates - theirs).norm() / theirs.norm()):.1e}")
    own = json.loads((run.cache / "circuitkit_own-edges-signed.json").read_text())
    found = run.found("circuitkit")
    shares = 0.001, 0.01, 0.1, 0.5
    circuits = [found.keep(share).kept for share in shares]
    values = per_pair(found, run.measure[:n_pairs], *circuits)
    for share, kept, mine in zip(shares, circuits, values, strict=True):
        at = SHARES.index(share)
        gap = (mine - torch.tensor(own["values"][at], dtype=torch.float64)[:n_pairs]).abs().max()
        print(f"circuits of {100 * share:g} %: {kept.sum()} and {own['kept'][at]} edges, off by {gap:.1e}", flush=True)


# --- the table ---------------------------------------------------------------------------------------------------------------


def interval(drawn: torch.Tensor) -> str:
    """Of the pairs as they are, and of 95 % of the draws."""
    low, high = drawn[1:].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return f"{drawn[0]:.3f} ({low:.3f} to {high:.3f})"


SHOWN = (0.002, 0.01, 0.05, 0.1, 0.2, 0.5)
OF = {"signed": "cpr", "absolute": "cmd"}
"""What MIB measures of circuits that are ordered by value, and by size."""


def rows_of(cache: Path) -> Iterator[str]:
    """Lines of a table of one model and task."""
    listed = json.loads((cache / "pairs.json").read_text())
    ends = json.loads((cache / "ends.json").read_text())
    clean, corrupted = (sum(ends[name]) / len(ends[name]) for name in ("clean", "corrupted"))
    n = f"{len(listed['pairs'])} right of {listed['asked']}; {len(ends['clean'])} measured"
    yield f"\n{cache.parent.name}, {cache.name}: {n}, metric {clean:.2f} clean, {corrupted:.2f} corrupted\n"
    yield "| by | estimate | order | CPR | CMD | f at " + " | ".join(f"{100 * share:g} %" for share in SHOWN) + " |"
    yield "|---" * (5 + len(SHOWN)) + "|"
    drawn = {}
    for path in sorted(cache.glob("*-*-signed.json")) + sorted(cache.glob("*-*-absolute.json")):
        method, by, order = path.stem.rsplit("-", 2)
        own = json.loads((cache / "circuitkit_own-ends.json").read_text()) if method == "circuitkit_own" else ends
        found = drawn[method, by, order] = drawn_areas(json.loads(path.read_text()), own)
        at = " | ".join(f"{found.f[0, SHARES.index(share)]:.2f}" for share in SHOWN)
        both = [interval(getattr(found, x)) if x == OF[order] or method.startswith("random") else "" for x in ("cpr", "cmd")]
        yield f"| {by} | {method} | {order} | {' | '.join(both)} | {at} |"
    yield ""
    for method, by, order in drawn:
        if method != "eap_ig" and ("eap_ig", by, order) in drawn:
            ours, other = (getattr(drawn[name, by, order], OF[order]) for name in ("eap_ig", method))
            yield f"eap_ig less {method}, {by}, {order}: {OF[order].upper()} {interval(ours - other)}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="NAME=MODEL", help="as kvlens.load takes it")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["ioi"])
    parser.add_argument("--pairs", type=int, default=100, help="that choose, and as many that measure")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["eap_ig", "eap", "random0"],
        help=f"also {BY_QUERY_HEAD}, circuitkit, confirmedN (the N largest of eap_ig are run) and, with so many pairs, "
        "eap_igofPAIRS, confirmedNofPAIRS",
    )
    parser.add_argument("--by", nargs="+", choices=["edges", "nodes"], default=["edges", "nodes"])
    parser.add_argument("--orders", nargs="+", choices=["signed", "absolute"], default=["signed", "absolute"])
    parser.add_argument("--python", help="an interpreter that has CircuitKIT")
    parser.add_argument("--folder", help="the model as Transformers saves it, for CircuitKIT")
    parser.add_argument("--compare", type=int, metavar="PAIRS", help="our runs of CircuitKIT's circuits with its own")
    parser.add_argument("--theirs", type=Path, help="used by this program itself")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args(argv)
    if args.theirs is not None:
        there(args.folder, args.theirs, args.orders)
        return
    for named in args.models:
        import kvlens

        name, _, path = named.partition("=")
        model = kvlens.load(path)
        for task in args.tasks:
            cache = args.cache / name / task
            run = Run(model, task, args.data, cache, args.pairs)
            run.ends()
            for method in args.methods:
                for by in args.by:
                    for order in args.orders if not method.startswith("random") else ["signed"]:
                        run.curve(method, by, order)
            if args.python is not None:
                words = [args.python, "-W", "ignore", __file__, "--cache", str(args.cache), "--folder", args.folder]
                alone = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
                subprocess.run([*words, "--theirs", str(cache), "--orders", *args.orders], check=True, env=alone)
            if args.compare:
                compared(run, args.compare)
    if args.table:
        for cache in sorted(path.parent for path in args.cache.glob("*/*/ends.json")):
            print(*rows_of(cache), sep="\n")


if __name__ == "__main__":
    main()

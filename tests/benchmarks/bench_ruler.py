"""RULER's needles under a few of the prompt's keys: kvlens' methods, and kvpress' own code on the same cases.

    python tests/benchmarks/bench_ruler.py MODEL --data ruler-1024.jsonl.gz --tokenizer smollm2 --out FILE.csv [--ways ...]
    python tests/benchmarks/bench_ruler.py MODEL ... --python kvpress-env/bin/python --folder FOLDER
    python tests/benchmarks/bench_ruler.py --out FILE.csv --table

MODEL is a folder or GGUF file of a chat model. DATA has lines with "tokenizer", "task", "input" (a text with needles and, as
its last line, a question), "answer_prefix" and "outputs", from NVIDIA's generator (Hsieh et al. 2024); those of TOKENIZER are
read. What is converted is the chat up to the question, as kvpress evaluates; question, template and prefix follow it. A case's
score is ``string_match_all``: the share of its outputs that occur in what the model says, which ends where it stops, after
:data:`MOST` tokens, or as soon as every output has occurred. FILE gets a row for each case, way and share of the keys, of which
none is run again, and what is said is printed. FOLDER is the same model as Transformers saves it, for kvpress (see
``bench_kvpress.py``).

Printed at the end: the mean over tasks by way and share, over the cases that all ways have at that share, with a 95 % interval
(bootstrap over the cases of each task, of which it needs two).
"""

import argparse
import csv
import gzip
import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from bench_recall import Fits, n_alike

import kvlens
from kvlens.explanation.runs import greedy, stop_tokens

SHARES = (0.5, 0.25, 0.1, 0.05)
MOST = 128
WAYS = {"kvzip": "kvzip", "landmark": "moved"}
"""kvlens' methods, by their names in ``bench_recall.py``."""
PRESSES = ("KVzipPress", "SnapKVPress", "ExpectedAttentionPress", "StreamingLLMPress")
FIELDS = ("task", "number", "way", "share", "score", "processor")
Row = dict[str, Any]


def cases_of(data: Path, tokenizer: str, most: int) -> Iterator[Row]:
    """The first ``most`` cases of each task, numbered, task after task."""
    seen: dict[str, int] = {}
    with gzip.open(data, "rt") as lines:
        for case in map(json.loads, lines):
            number = seen.get(case["task"], 0)
            if case["tokenizer"] == tokenizer and number < most:
                seen[case["task"]] = number + 1
                yield {**case, "number": number}


def parts_of(model: Any, case: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens before the question, and those of the question and the answer's beginning."""
    text, question = case["input"].rsplit("\n", 1)
    asked, other = (
        kvlens.Chat([{"role": "user", "content": f"{text}\n{last}"}]).tokens(model).flatten() for last in (question, "0")
    )
    n_before = n_alike([asked, other])
    prefix = model.tokenizer(case["answer_prefix"].lstrip(), add_special_tokens=False)["input_ids"]
    return asked[:n_before], torch.cat([asked[n_before:], asked.new_tensor(prefix)])


def score(text: str, case: Row) -> float:
    return sum(output.lower() in text.lower() for output in case["outputs"]) / len(case["outputs"])


def row_of(case: Row, way: str, share: float, said: str, processor: float) -> Row:
    found = dict(way=way, share=share, score=round(score(said, case), 4), processor=round(processor, 1))
    return dict(task=case["task"], number=case["number"], **found, said=said)


@torch.no_grad()
def rows_of_case(model: Any, case: Row, wanted: list[tuple[str, float]]) -> Iterator[Row]:
    """What the model says under each way and share, all in one batch."""
    before, behind = parts_of(model, case)
    fits = Fits(model, before)
    biases, seconds = [], []
    for way, share in wanted:
        began = time.process_time()
        bias = fits.teacher.whole if way == "exact" else fits.bias(WAYS[way], share, [])[0]
        biases.append(bias.select_prompt(0))
        seconds.append(time.process_time() - began)
    stops, none = stop_tokens(model), behind.new_zeros(len(wanted), 0)

    def ends(text: list[int]) -> bool:
        return text[-1] in stops or score(model.tokenizer.decode(text), case) == 1

    texts = greedy(model, kvlens.KVBias.batch(biases), behind, none, none.sum(dim=1), MOST, ends)
    for (way, share), text, spent in zip(wanted, texts, seconds, strict=True):
        said = model.tokenizer.decode(text, skip_special_tokens=True)
        yield row_of(case, way, share, said, spent)


def by_kvpress(args: argparse.Namespace, model: Any, cases: list[Row]) -> Iterator[Row]:
    """What the model says in Transformers under kvpress' own methods."""
    named = {f"{case['task']} {case['number']}": case for case in cases}
    parts = {name: [part.tolist() for part in parts_of(model, case)] for name, case in named.items()}
    with tempfile.TemporaryDirectory() as folder:
        documents = [dict(name=name, before=before, questions=[behind]) for name, (before, behind) in parts.items()]
        Path(folder, "documents.json").write_text(json.dumps(documents))
        program = str(Path(__file__).with_name("bench_kvpress.py"))
        options = ["--theirs", folder, "--answers", args.folder, "--most", str(MOST), "--ratios", *map(str, args.shares)]
        subprocess.run([args.python, "-W", "ignore", program, *options, "--presses", *PRESSES], check=True, env={})
        said = json.loads(Path(folder, "said.json").read_text())
    for row in said:
        way, share = ("kvpress " + row["way"], row["ratio"]) if row["way"] != "exact" else ("transformers", 1.0)
        yield row_of(named[row["document"]], way, share, row["said"][0], row["processor"])


def missing_rows(args: argparse.Namespace, done: set[tuple[str, int, str, float]]) -> Iterator[Row]:
    """What is not there yet: the first case of each task, then the second, ..."""
    torch.set_num_threads(1)
    model, cases = kvlens.load(args.model), list(cases_of(args.data, args.tokenizer, args.cases))
    first, ways = ("transformers", [f"kvpress {x}" for x in PRESSES]) if args.python else ("exact", args.ways)
    cells = [(first, 1.0), *((way, share) for way in ways for share in args.shares)]
    for _, some in itertools.groupby(sorted(cases, key=lambda case: case["number"]), lambda case: case["number"]):
        left = [(case, [cell for cell in cells if (case["task"], case["number"], *cell) not in done]) for case in some]
        if args.python:
            rows = by_kvpress(args, model, [case for case, of_case in left if of_case]) if any(of for _, of in left) else ()
            yield from (row for row in rows if (row["task"], row["number"], row["way"], row["share"]) not in done)
        else:
            for case, of_case in left:
                yield from rows_of_case(model, case, of_case) if of_case else ()


def table(rows: pd.DataFrame, draws: int = 2000) -> pd.DataFrame:
    """The mean over tasks by way and share, with an interval, over the cases that all ways have at that share."""
    generator, found = np.random.default_rng(0), []
    for share, at_share in rows.groupby("share"):
        n_ways = at_share.groupby(["task", "number"])["way"].transform("nunique")
        for way, own in at_share[n_ways == at_share["way"].nunique()].groupby("way"):
            by_task = [scores.to_numpy() for _, scores in own.groupby("task")["score"]]
            drawn = np.mean([x[generator.integers(len(x), size=(draws, len(x)))].mean(axis=1) for x in by_task], axis=0)
            low, high = np.percentile(drawn, [2.5, 97.5]) if min(map(len, by_task)) > 1 else (np.nan, np.nan)
            mean, cost = np.mean([x.mean() for x in by_task]), own["processor"].mean()
            found.append(dict(share=share, way=way, cases=len(own), mean=mean, low=low, high=high, processor=cost))
    return pd.DataFrame(found).sort_values(["share", "mean"], ascending=False)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tokenizer", default="smollm2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="the largest first")
    parser.add_argument("--cases", type=int, default=10, help="of each task")
    parser.add_argument("--python", help="an interpreter that has kvpress")
    parser.add_argument("--folder", help="the model as Transformers saves it")
    parser.add_argument("--table", action="store_true", help="print the table alone")
    args = parser.parse_args(argv)
    if not args.out.exists():
        args.out.write_text(",".join(FIELDS) + "\n")
    rows = pd.read_csv(args.out).to_dict("records")
    done = {(row["task"], row["number"], row["way"], row["share"]) for row in rows}
    with args.out.open("a") as out:
        writer = csv.DictWriter(out, FIELDS, extrasaction="ignore", lineterminator="\n")
        for row in () if args.table else missing_rows(args, done):
            rows.append(row)
            writer.writerow(row)
            out.flush()
            print(row, flush=True)
    print(table(pd.DataFrame(rows)).to_string(index=False, float_format=lambda x: f"{x:.3f}"))


if __name__ == "__main__":
    main()

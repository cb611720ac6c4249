"""Whether kvlens' KVzip keeps the same keys as kvpress, and how many answers about documents kvpress' own code keeps.

    python -m venv kvpress-env && kvpress-env/bin/pip install "kvpress==0.5.5"
    python tests/benchmarks/bench_kvpress.py --python kvpress-env/bin/python [--seeds 5]
    python tests/benchmarks/bench_kvpress.py --python kvpress-env/bin/python --answers FOLDER [--joined 3] [--presses ...]

kvpress needs an older Transformers than kvlens, hence the second interpreter, which runs this file with ``--theirs``. Models
are random, of Llama's architecture with grouped heads and sharp attention; prompts are random tokens. kvpress' KVzip repeats
the context without an instruction here.

With ``--answers``, FOLDER is a chat model as Transformers saves it, and the documents, questions and counting are those of
``bench_recall.py``; kvpress' own methods run as they are published, in Transformers: they drop keys of the chat up to the
question.
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

N_TOKENS, KEPT = 64, 16
SIZES = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=1024,
    initializer_range=0.35,
    tie_word_embeddings=False,
)
Kept = list[list[list[int]]]
"""By layer and key-value head: the positions of the keys that are kept."""


def prompt_of(seed: int) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (N_TOKENS,), generator=torch.Generator().manual_seed(100 + seed))  # type: ignore[call-overload]


def write_model(seed: int, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**SIZES)).eval().save_pretrained(folder)  # type: ignore[arg-type]


def kept_here(seed: int, folder: Path) -> Kept:
    """The keys that kvlens keeps."""
    from kvlens import HookedKVTransformer, convert_prompt
    from kvlens.conversion import KVzip

    model = HookedKVTransformer.from_pretrained(str(folder), device="cpu")
    method = KVzip(n_keys=KEPT, n_continuations=2, continuation_length=4, n_held_out=0)
    bias = convert_prompt(model, prompt_of(seed), method=method, verbose=False)
    return [
        [sorted((N_TOKENS - part.distance[0, head][part.used[0, head]]).tolist()) for head in range(3)]
        for part in bias.attention
    ]


def kept_there(seed: int, folder: Path) -> Kept:
    """The keys that kvpress keeps."""
    import kvpress
    from kvpress.presses import kvzip_press
    from transformers import DynamicCache, LlamaForCausalLM

    class NoInstruction:
        chat_template = None

        def encode(self, text: str, **_: Any) -> torch.Tensor:
            return torch.zeros(1, 0, dtype=torch.long)

    kvzip_press.AutoTokenizer.from_pretrained = lambda *_, **__: NoInstruction()
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad(), kvpress.KVzipPress(1 - KEPT / N_TOKENS)(model):
        model.model(input_ids=prompt_of(seed)[None], past_key_values=DynamicCache())
    gone = [layer.self_attn.masked_key_indices for layer in model.model.layers]
    return [[sorted({*range(N_TOKENS)} - set(masked[2][masked[1] == head].tolist())) for head in range(3)] for masked in gone]


def answers_there(folder: str, documents: Path, ratios: list[float], presses: list[str], most: int) -> None:
    """Writes what the model says to the questions of each document with the keys that each press keeps."""
    import kvpress
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    torch.set_num_threads(1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    stops = {tokenizer.eos_token_id, *torch.tensor(model.generation_config.eos_token_id).view(-1).tolist()}

    def said(cache: Any, question: list[int], n_before: int) -> str:
        lengths, text, step = [layer.keys.shape[2] for layer in cache.layers], [], question
        at = n_before
        while len(text) < most:
            positions = torch.arange(at, at + len(step))[None]
            logits = model(torch.tensor([step]), past_key_values=cache, position_ids=positions).logits[0, -1]
            at, step = at + len(step), [int(logits.argmax())]
            if step[0] in stops:
                break
            text += step
        for layer, n in zip(cache.layers, lengths, strict=True):
            layer.keys, layer.values = layer.keys[:, :, :n], layer.values[:, :, :n]
        return tokenizer.decode(text, skip_special_tokens=True)

    rows = []
    with torch.no_grad():
        for document in json.loads(documents.read_text()):
            before = torch.tensor([document["before"]])
            for name, ratio in [("exact", 1.0), *itertools.product(presses, ratios)]:
                cache, began = DynamicCache(), time.process_time()
                with contextlib.nullcontext() if name == "exact" else getattr(kvpress, name)(1 - ratio)(model):
                    model.model(input_ids=before, past_key_values=cache)
                taken = time.process_time() - began
                texts = [said(cache, question, before.shape[1]) for question in document["questions"]]
                rows.append(dict(document=document["name"], way=name, ratio=ratio, said=texts, processor=taken))
                print(document["name"], name, ratio, flush=True)
    documents.with_name("said.json").write_text(json.dumps(rows))


def answers(args: argparse.Namespace, temporary: Path) -> None:
    """Prints how many answers each press keeps."""
    from bench_recall import CHOICE, DOCUMENTS, asked, gaps, joined, right, table

    import kvlens

    every = [json.loads(line) for line in DOCUMENTS.read_text().splitlines()]
    names = args.documents or [each["name"] for each in every if each["name"] not in CHOICE]
    every = list(joined([each for each in every if each["name"] in names], args.joined))
    model, made, written = kvlens.load(args.answers), {}, []
    for document in every:
        before, questions = made[document["name"]] = asked(model, document)
        tokens = dict(before=before.tolist(), questions=[question.tolist() for question in questions])
        written.append(dict(name=document["name"], **tokens))
    (temporary / "documents.json").write_text(json.dumps(written))
    theirs = [
        "--theirs",
        str(temporary),
        "--answers",
        args.answers,
        "--ratios",
        *map(str, args.ratios),
        "--presses",
        *args.presses,
    ]
    subprocess.run([args.python, "-W", "ignore", __file__, *theirs], check=True, env={})
    texts = {each["name"]: each for each in every}
    rows = json.loads((temporary / "said.json").read_text())
    rows = [row | {"right": right(row["said"], texts[row["document"]])} for row in rows]
    for row in rows:
        if row["way"] == "exact":
            before, questions = made[row["document"]]
            exact = kvlens.convert_prompt(model, before, prepend_bos=False)
            row["gap"] = gaps(model, exact, questions, row["said"], texts[row["document"]])
    print(table(rows))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="an interpreter that has kvpress")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--theirs", type=Path, help="used by this program itself")
    parser.add_argument("--answers", metavar="FOLDER", help="a chat model that is asked about documents")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.05, 0.25, 0.15])
    parser.add_argument("--documents", nargs="+", help="names; without them the six final ones")
    parser.add_argument("--most", type=int, default=16, help="tokens of an answer, as in bench_recall.py (default: 16)")
    parser.add_argument("--joined", type=int, default=1, help="documents in one chat (default: 1)")
    parser.add_argument("--presses", nargs="+", default=["KVzipPress"], help="classes of kvpress that take a compression ratio")
    asked = parser.parse_args(argv)
    if asked.theirs is not None and asked.answers:
        answers_there(asked.answers, asked.theirs / "documents.json", asked.ratios, asked.presses, asked.most)
        return
    if asked.theirs is not None:
        found = [kept_there(seed, asked.theirs / str(seed)) for seed in range(asked.seeds)]
        (asked.theirs / "kept.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if asked.answers:
            answers(asked, folder)
            return
        for seed in range(asked.seeds):
            write_model(seed, folder / str(seed))
        ours = [kept_here(seed, folder / str(seed)) for seed in range(asked.seeds)]
        theirs = ours
        if asked.python is not None:
            subprocess.run(
                [asked.python, "-W", "ignore", __file__, "--theirs", str(folder), "--seeds", str(asked.seeds)],
                check=True,
                env={},
            )
            theirs = json.loads((folder / "kept.json").read_text())
    other = "kvpress" if asked.python is not None else "itself (no --python given)"
    pairs = [
        (set(a), set(b))
        for one, two in zip(ours, theirs, strict=True)
        for layer_a, layer_b in zip(one, two, strict=True)
        for a, b in zip(layer_a, layer_b, strict=True)
    ]
    same, n = sum(len(a & b) for a, b in pairs), sum(len(a) for a, _ in pairs)
    print(f"{same} of {n} kept keys are those of {other}; {sum(a == b for a, b in pairs)} of {len(pairs)} heads")


if __name__ == "__main__":
    main()

"""Every benchmark runs at a small size and checks its answer, and that beside other packages makes plain passes; what they
measure is not looked at."""

import copy
import gzip
import importlib
import itertools
import json
import random

import bench_attribution
import bench_circuits
import bench_heads
import bench_notes
import bench_peers
import bench_reading_layers
import bench_real_sizes
import bench_real_speed
import bench_speed
import bench_state_reach
import plain_rwkv
import pytest
import torch
from chat_templates import chat_model
from kvlens.analyses.circuits.graph import Graph
from precision import LAW, relative_error
from timing import check_close
from tiny_text_model import tiny_text_model
from transformers import LlamaConfig, LlamaForCausalLM

import kvlens
from kvlens.analyses import circuit, faithfulness
from kvlens.units import Unit

PROGRAMS = {  # what is asked for, and how often each of these words is printed
    "bench_bridge": ("--small --families gpt2 qwen3_5", {"nothing attached: ": 2}),
    "bench_bridge_exactness": ("--families gpt2 --seeds 2", {"NO": 0}),
    "bench_exact_conversion": ("--models gpt2 --prompts 2 --scaled Q", {"gpt2, ": 1, "NO": 0}),
    "bench_fit_error": ("--small", {"off by, median": 2}),
    "bench_induction_heads": ("--small", {"of 1,000 heads of untrained models named": 2, "without a name": 1}),
    # kvlens' half only; kvpress needs an environment of its own
    "bench_kvpress": ("--seeds 1", {"144 of 144 kept keys are those of itself": 1}),
    "bench_long_prompts": ("--small --kinds llama", {"error by block": 1}),
    "bench_notes": ("--stories 3 --patched 2", {"same head: 2 of 2": 1, "same position: 2 of 2": 1}),
    "bench_null": ("--units 20 --prompts 1", {"of 20 unrelated units significant": 1, "of 5 sets of four with any": 1}),
}
ROWS = {  # of bench_speed
    "op": {"times faster": 3},
    "delta": {"delta attention": 2, "ratio": 5},
    "dense": {"tokens at a time": 6, "ratio": 3},
    "forward": {"times faster": 3},
    "backward": {"ratio": 3},
    "decode": {"ratio": 2},
    "cache": {"ratio": 1},
    "new_text": {"times faster": 1, "ratio": 1},
    "convert": {"time per token": 1},
    "softmax": {"ratio": 1},
    "attached": {"ratio": 3},
    "fit": {"in forward passes": 2},
    "variants": {"speed over plain attention": 7},
    "dual": {"ratio": 2},
    "attributions": {"n_layers 1 to 2": 2, "exponent": 12},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_smoke(name, capsys):
    words, expected = PROGRAMS[name]
    importlib.import_module(name).main(words.split())
    printed = capsys.readouterr().out
    assert {each: printed.count(each) for each in expected} == expected


@pytest.mark.slow
def test_state_reach_smoke(tmp_path, capsys):
    (tmp_path / "rwkv.bin").write_bytes(plain_rwkv.file_bytes(plain_rwkv.drawn("6")))
    bench_state_reach.main([str(tmp_path / "rwkv.bin"), "--pairs", "2", "--head-pairs", "1", "--n-bytes", "16"])
    printed = capsys.readouterr().out
    assert printed.count("| 9 to 16 |") == 1 and printed.count("| 1 | ") == 2 and "rank correlation" in printed


@pytest.mark.slow
@pytest.mark.parametrize("row", bench_speed.ROWS)
def test_a_row_of_speed_smoke(row, capsys):
    bench_speed.main(["--small", "--threads", "1", "--only", row])
    printed = capsys.readouterr().out
    assert {each: printed.count(each) for each in ROWS[row]} == ROWS[row]


@pytest.mark.slow
@pytest.mark.unhooked  # a stand-in for a question looks its scores up
@pytest.mark.parametrize("model", ["facts-gpt2", "facts-linear"])
def test_attribution_smoke(model, capsys):
    bench_attribution.main(["--small", "--model", model])
    printed = capsys.readouterr().out
    assert "of the ceiling" in printed and "leave one out" in printed


@pytest.mark.slow
def test_real_sizes_smoke(tmp_path, capsys):
    """One of its processes; the benchmark starts one for each model and front end."""
    bench_real_sizes.write_folder("tiny", tmp_path)
    bench_real_sizes.child(tmp_path, "kvlens", 12, ["convert", "explain", "page"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found.keys() == {"imports", "load", "convert", "explain", "page"}
    assert (tmp_path / "page.html").is_file()


@pytest.mark.slow
def test_real_speed_smoke(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_real_speed, "LENGTHS", (1, 9))
    bench_real_sizes.write_folder("tiny", tmp_path)
    bench_real_speed.main([str(tmp_path), "--prompt", "9", "--seconds", "0"])
    printed = capsys.readouterr().out
    assert (printed.count("hooked, "), printed.count("bridge, ")) == (7, 7)


def test_bounds_of_shares_are_those_of_the_binomial_distribution():
    """n of n: level^(1/n); one of n: 1 - (1 - level)^(1/n)."""
    assert bench_notes.lower_bound(60, 60) == pytest.approx(0.05 ** (1 / 60), abs=1e-9)
    assert bench_notes.lower_bound(1, 7) == pytest.approx(1 - 0.95 ** (1 / 7), abs=1e-9)
    assert bench_notes.lower_bound(0, 7) == 0.0


@pytest.mark.slow
def test_where_stories_are_read_smoke(tmp_path, capsys):
    """A second run adds nothing, and prints the same."""
    words = ["facts-gpt2", "--out", str(tmp_path / "found.jsonl"), "--cases", "stories=4"]
    printed = []
    for _ in range(2):
        bench_reading_layers.main(words)
        printed.append((capsys.readouterr().out, (tmp_path / "found.jsonl").read_text()))
    assert printed[0] == printed[1]
    assert "4 right answers, 4 lost without the part, 0 under the null" in printed[0][0]


@pytest.mark.slow
def test_heads_of_needles_smoke(tmp_path, capsys, monkeypatch):
    """A model with random weights says no answer; all are taken as said. A second run adds nothing, and prints the same."""
    model = chat_model(attention="softmax", kv_shift=None)
    monkeypatch.setattr(bench_heads, "right", lambda model, case: True)
    monkeypatch.setattr(bench_heads.kvlens, "load", lambda source: model)
    monkeypatch.setattr(bench_heads, "SIZES", (1, 2))
    with gzip.open(tmp_path / "cases.gz", "wt") as file:
        for task, number in itertools.product(bench_heads.TASKS, ("17", "26")):
            text = f"Numbers.\nIt is green. One of the special magic numbers for widget is: {number}. The widget is."
            row = {"tokenizer": "smollm2", "task": task, "outputs": [number], "input": f"{text}\nWhat is the number?"}
            file.write(json.dumps(row) + "\n")
    words = ["", "--data", str(tmp_path / "cases.gz"), "--out", str(tmp_path / "found.jsonl"), "--cases", "2", "--long", "1"]
    printed = []
    for _ in range(2):
        bench_heads.main(words)
        printed.append((capsys.readouterr().out, (tmp_path / "found.jsonl").read_text()))
    assert printed[0] == printed[1]
    assert printed[0][1].count('"reading"') == 6 and "8 right answers" in printed[0][0]


def test_others_of_the_same_layers_are_none_of_the_named():
    named = [(0, 1), (0, 2), (3, 0)]
    for seed in range(5):
        others = bench_heads.like_layers(named, 4, random.Random(seed))
        assert sorted(layer for layer, _ in others) == [0, 0, 3] and not set(others) & set(named) and len(set(others)) == 3
    assert bench_heads.like_layers(named, 3, random.Random(0))[0] == (0, 0)  # a layer with one other head


def test_a_wrong_answer_is_not_timed():
    with pytest.raises(SystemExit, match="wrong answer"):
        check_close(torch.ones(3), torch.zeros(3) + 2, 1e-3, "x")


UNITS = [Unit(f"d{i // 2}, sentence {i % 2 + 1}", "", *span) for i, span in enumerate([(2, 6), (6, 9), (11, 15), (15, 21)])]


@pytest.fixture
def scores():
    """Of every unit's tokens and the response's; four of the prompt's tokens are in no unit."""
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    hf = LlamaForCausalLM(LlamaConfig(vocab_size=40, initializer_range=0.3, **shape)).double().eval().requires_grad_(False)
    return bench_peers.Scores(UNITS, torch.randint(40, (23,)), torch.randint(40, (5,)), hf)


def one_pass(scores, kept, x=None):
    """f by one plain pass over the tokens that are kept."""
    gone = {at for unit, stays in zip(UNITS, kept, strict=True) if not stays for at in range(unit.start, unit.stop)}
    here = [at for at in range(len(scores.prompt)) if at not in gone]
    tokens = torch.cat([scores.prompt[here], scores.response])[None]
    embedded = scores.hf.get_input_embeddings()(tokens) if x is None else x
    logits = scores.hf(inputs_embeds=embedded).logits[0, len(here) - 1 : -1].log_softmax(dim=-1)
    return logits.gather(-1, scores.response[:, None]).sum()


@pytest.mark.parametrize("n", [16, 7])
def test_masks_that_share_a_prefix_are_plain_passes(scores, n):
    masks = torch.tensor(list(itertools.product([True, False], repeat=4)))[:n]
    expected = torch.stack([one_pass(scores, mask) for mask in masks.tolist()])
    assert (scores(masks) - expected).norm() <= 1e-11 * expected.norm()
    assert len(scores.known) == n and expected.std() > 0.1


def test_gradients_are_those_of_the_response(scores):
    tokens = torch.cat([scores.prompt, scores.response])[None]
    x = scores.hf.get_input_embeddings()(tokens).requires_grad_()
    (grad,) = torch.autograd.grad(one_pass(scores, [True] * 4, x), x)
    found = {}
    norms = bench_peers.gradients(scores, found)
    for of_tokens, per_unit in ((grad[0].norm(dim=-1), norms), ((grad * x)[0].sum(dim=-1), found["input"])):
        expected = torch.stack([of_tokens[unit.start : unit.stop].sum() for unit in UNITS])
        assert (per_unit - expected).norm() <= 1e-11 * expected.norm() and expected.norm() > 0


def test_attention_is_that_of_the_response(scores):
    scores.hf.set_attn_implementation("eager")
    tokens = torch.cat([scores.prompt, scores.response[:-1]])[None]
    maps = torch.stack(scores.hf(tokens, output_attentions=True).attentions)[:, 0, :, len(scores.prompt) - 1 :].mean(
        dim=(0, 1, 2)
    )
    expected = torch.stack([maps[unit.start : unit.stop].sum() for unit in UNITS])
    assert (bench_peers.attention(scores) - expected).norm() <= 1e-11 * expected.norm()


@pytest.mark.unhooked  # a stand-in for a question looks its scores up
def test_the_table_smoke(scores, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_peers, "peers", frozenset)
    shared = copy.deepcopy(scores.hf, {id(x): x for x in [*scores.hf.parameters(), *scores.hf.buffers()]})
    model = kvlens.KVTransformerBridge.boot_transformers(shared, verify=False)
    line = {
        "i": 0,
        "size": 10,
        "n_units": 4,
        "tokens": scores.prompt.tolist(),
        "response_tokens": scores.response.tolist(),
        "units": [[unit.name, unit.start, unit.stop] for unit in UNITS],
        "stating": [2],
        "measured": bench_peers.measured(model, scores, 10, 1, frozenset()),
        "scores": scores.known,
        "pace": [0.1, 0.01],
    }
    closed = bench_peers.checks(model, scores, frozenset())["kvlens"]
    assert closed < 1e-5  # the angles of positions are float32 in Transformers
    rows = bench_peers.rows_of(line, bench_peers.Plan(frozenset()), scores)
    assert {row["passes"] for row in rows if row["method"] == "kvlens leave one out, closed"} == {5}
    out = tmp_path / "out.jsonl"
    out.write_text(json.dumps(line) + "\n")
    bench_peers.main(["", "--out", str(out), "--table"])
    printed = capsys.readouterr().out
    assert "about 10 units: 1 cases" in printed and "kvlens knocked out" in printed


@pytest.fixture
def additions(tmp_path, monkeypatch):
    """A run whose pairs count as right."""
    monkeypatch.setattr(bench_circuits, "right", lambda *given: True)
    model = tiny_text_model(attention="softmax", kv_shift=None, n_heads=4, n_key_value_heads=2, dtype=torch.float64)
    return bench_circuits.Run(model, "addition", tmp_path, tmp_path / "tiny" / "addition", 4)


@pytest.mark.parametrize(("by", "order"), [("edges", "signed"), ("nodes", "absolute")])
def test_areas_are_those_of_faithfulness_and_of_the_pairs_that_are_drawn(additions, by, order):
    ends = additions.ends()
    additions.curve("eap", by, order)
    measured, additions.measure = additions.measure, []
    additions.curve("eap", by, order)  # is there: nothing is run
    (path,) = additions.cache.glob(f"eap-{by}-{order}.json")
    values = json.loads(path.read_text())
    _, cpr, cmd = bench_circuits.drawn_areas(values, ends)
    model, own = tiny_text_model(attention="softmax", kv_shift=None, n_heads=4, n_key_value_heads=2, dtype=torch.float64), []
    for pairs in (additions.choose, measured):
        answers, rivals = (
            [bench_circuits.token(model.tokenizer, of[0]) for of in each] for each in zip(*[p[2:] for p in pairs], strict=True)
        )
        prompts = ([getattr(pair, name) for pair in pairs] for name in ("clean", "corrupted"))
        own.append(dict(zip(("prompt", "corrupted", "answer", "rival"), (*prompts, answers, rivals), strict=True)))
    expected = faithfulness(circuit(model, **own[0], method="eap"), by=by, order=order, pairs=own[1])
    ours, theirs = (cpr, expected.cpr) if order == "signed" else (cmd, expected.cmd)
    assert float(ours[0]) == pytest.approx(theirs, rel=1e-9) and ours[1:].std() > 0
    assert f"{theirs:.3f}" in "".join(bench_circuits.rows_of(additions.cache))


def test_scores_by_query_head_add_up_to_those_of_key_value_heads(additions):
    ours, theirs = (
        bench_circuits.estimated(additions.model, additions.choose, "eap_ig", by_query_head=split) for split in (False, True)
    )
    assert theirs.shape[1] > ours.shape[1]
    assert relative_error(bench_circuits.grouped(theirs, Graph(additions.model)), ours) < LAW

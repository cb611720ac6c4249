"""The benchmark beside other packages: its passes are plain ones, and its table is made without a model or a peer."""

import copy
import itertools
import json

import bench_peers
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvlens
from kvlens.units import Unit

UNITS = [Unit(f"d{i // 2}, sentence {i % 2 + 1}", "", *span) for i, span in enumerate([(2, 6), (6, 9), (11, 15), (15, 21)])]


@pytest.fixture
def scores():
    """Of every unit's tokens and the response's; four of the prompt's tokens are in no unit."""
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    hf = LlamaForCausalLM(LlamaConfig(vocab_size=40, initializer_range=0.3, **shape)).double().eval().requires_grad_(False)
    return bench_peers.Scores(UNITS, torch.randint(40, (23,)), torch.randint(40, (5,)), hf)


def plain(scores, kept, x=None):
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
    expected = torch.stack([plain(scores, mask) for mask in masks.tolist()])
    assert (scores(masks) - expected).norm() <= 1e-11 * expected.norm()
    assert len(scores.known) == n and expected.std() > 0.1


def test_gradients_are_those_of_the_response(scores):
    tokens = torch.cat([scores.prompt, scores.response])[None]
    x = scores.hf.get_input_embeddings()(tokens).requires_grad_()
    (grad,) = torch.autograd.grad(plain(scores, [True] * 4, x), x)
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
        "measured": bench_peers.measured(model, scores, 10, 1),
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

"""Circuits against the model's own pass, whose hook points show each reader's input by itself."""

import itertools
import json
import math
from dataclasses import replace
from functools import partial

import networkx
import numpy as np
import pandas as pd
import pytest
import torch
from analysis_models import tokens
from kvlens.analyses.circuits.graph import Graph
from kvlens.analyses.circuits.mib import SHARES
from kvlens.analyses.circuits.passes import Pass
from precision import LAW, relative_error
from small_models import model_of, shared, sharp

from kvlens import convert_prompt, counterfactuals, logits_after
from kvlens.analyses import circuit, faithfulness, prompt_attribution

MODELS = [
    "softmax, learned",
    "softmax, rotary, grouped",
    "softmax, RMS, gated",
    "softmax, side by side",
    "softmax, no norm, attention only",
    "softmax, shifted, grouped",
    "softmax, norms behind heads",
    "softmax, norms over all heads",  # norms behind alone, which center
    "rope after",
    "gqa",
]
SPLIT = dict(use_split_qkv_input=True, use_attn_result=True, use_hook_mlp_in=True)
CLEAN, CORRUPTED = tokens(24).reshape(3, 8), tokens(24, seed=5).reshape(3, 8)
UNEQUAL = [*CLEAN[:2], CLEAN[2, :5]], [*CORRUPTED[:2], CORRUPTED[2, :5]]
CLOSE = dict(rtol=LAW, atol=0)
ANSWERS, RIVALS = torch.tensor([3, 4, 5]), torch.tensor([7, 8, 3])
ASKED = dict(answer=ANSWERS, rival=RIVALS)


def everything(logits):
    """No two logits of a pair count alike, so that no mistake cancels."""
    return (logits * torch.linspace(-1, 2, logits[0].numel(), dtype=logits.dtype).view(logits.shape[1:])).sum(dim=(1, 2))


def differences(model, given, **hooks):
    last = model.run_with_hooks(given, **hooks)[:, -1]
    return last[range(3), ANSWERS] - last[range(3), RIVALS]


def name_of(model, point, head):
    """(node that reads or writes there, input)."""
    layer = int(point.split(".")[1])
    if point.endswith("mlp_in") or point.endswith("mlp_out"):
        return f"mlp{layer}", "mlp"
    return f"{layer}.{head}", point.rsplit("_", 2)[-2][-1]


class ByHooks:
    """A pass of the model in which hooks read and write; ``cut``: (writer, reader, input) -> whether it is corrupted."""

    def __init__(self, model, theirs=None, cut=frozenset(), at=None):
        self.model, self.theirs, self.cut, self.at = model, theirs, cut, at
        self.written, self.inputs, self.whole = {}, {}, {}

    def outputs(self):
        """What passes the place where each node writes."""
        return {
            writer: self.whole.get(int(writer.split(".")[0]), y) if "." in writer else y for writer, y in self.written.items()
        }

    def points(self):
        for layer in range(self.model.cfg.n_layers):
            block = f"blocks.{layer}"
            yield from ((f"{block}.hook_{x}_input", self.read) for x in "qkv")
            yield f"{block}.attn.hook_result", self.write_heads
            behind = self.model.blocks[layer].norm_behind("ln1")
            if behind is not None:
                yield behind.hook_scale.name, partial(self.normalize_heads, norm=behind)
                yield f"{block}.hook_attn_out", self.see_whole
            if not self.model.cfg.attn_only:
                yield f"{block}.hook_mlp_in", self.read
                yield f"{block}.hook_mlp_out", self.write_mlp
        yield f"{block}.hook_resid_post", self.read_last

    def changed(self, x, reader, input_):
        """What a reader sees of the stream; side by side, an MLP does not read its own layer's heads."""
        side = self.model.cfg.parallel_attn_mlp and input_ == "mlp"
        for writer, y in self.written.items():
            if (writer, reader, input_) in self.cut and not (side and writer.split(".")[0] == reader[3:]):
                x = x - y + self.theirs[writer]
        if self.at is not None:
            x = x.detach().requires_grad_() if not x.requires_grad else x * 1
            self.inputs[reader, input_] = x
        return x

    def read(self, x, hook):
        if hook.name.endswith("mlp_in"):
            return self.changed(x, *name_of(self.model, hook.name, None))
        heads = [self.changed(x[:, :, i], *name_of(self.model, hook.name, i)) for i in range(x.shape[2])]
        return torch.stack(heads, dim=2)

    def read_last(self, x, hook):
        return self.changed(x, "logits", "logits")

    def write_heads(self, y, hook):
        layer = hook.name.split(".")[1]
        heads = y.unbind(dim=2)
        self.written |= {f"{layer}.{head}": one for head, one in enumerate(heads)}
        return torch.stack(heads, dim=2)

    def normalize_heads(self, scale, hook, norm):
        for head in range(self.model.cfg.n_heads):
            name = f"{hook.layer()}.{head}"
            y = self.written[name]
            self.written[name] = (y - y.mean(dim=-1, keepdim=True) if norm.centers else y) / scale * norm.w

    def see_whole(self, y, hook):
        """The gradient at a head's part of a norm's output is that at the whole: a stand-in for each."""
        self.whole[hook.layer()] = y = y * 1
        return y

    def write_mlp(self, y, hook):
        self.written[name_of(self.model, hook.name, None)[0]] = y

    def start(self, x, hook):
        x = x if self.at is None else self.at.requires_grad_()
        self.written["embedding"] = x
        return x

    def run(self, given):
        hooks = [("blocks.0.hook_resid_pre", self.start), *self.points()]
        return self.model.run_with_hooks(given, fwd_hooks=hooks)


def places(found):
    """(writer, reader, input) of every edge -> its place in the matrix."""
    index = {
        (row.writer_layer, row.writer_head, row.reader_layer, row.input, row.reader_head): (row.writer, row.reader, row.input)
        for row in found.edges.itertuples()
    }
    writers, readers = found.graph.writers, found.graph.readers
    return {index[*writers[w], *readers[r]]: (w, r) for w, r in found.graph.edges.nonzero().tolist()}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_all_edges_are_the_clean_pass_and_none_the_corrupted_one(name):
    model = shared(name)
    found = circuit(model, CLEAN, CORRUPTED, everything, method="eap")
    whole, empty = found.measured(found.graph.edges, torch.zeros_like(found.kept))
    assert relative_error(whole, everything(model(CLEAN))) < LAW
    assert relative_error(empty, everything(model(CORRUPTED))) < LAW
    assert (whole - empty).abs().min() > 1e-3


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_circuit_is_the_models_own_pass_with_every_cut_edge_changed_by_a_hook(name):
    """Of each kind of input one edge cut alone, and half of all edges at random, whose writers change in the circuit; the
    prompts begin alike."""
    model, split = shared(name), sharp(name, **SPLIT)
    corrupted = torch.cat([CLEAN[:, :2], CORRUPTED[:, 2:]], dim=1)
    found = circuit(model, CLEAN, corrupted, everything, method="eap")
    theirs = ByHooks(split)
    theirs.run(corrupted)
    where, generator = places(found), torch.Generator().manual_seed(1)
    listed = list(where)
    last = {key[2]: key for key in listed}.values()  # one of each kind of input
    cuts = [{one} for one in last] + [{e for e in listed if torch.rand((), generator=generator) < 0.5} for _ in range(2)]
    clean, n, falls = everything(model(CLEAN)), 6, []
    frame = found.confirmed(n).edges
    cuts += [{edge} for edge in frame.loc[: n - 1, ["writer", "reader", "input"]].itertuples(index=False, name=None)]
    for cut in cuts:
        kept = found.graph.edges.clone()
        kept[tuple(torch.tensor([where[edge] for edge in cut]).T)] = False
        expected = everything(ByHooks(split, theirs.written, cut).run(CLEAN))
        assert relative_error(found.measured(kept)[0], expected) < LAW
        assert (expected - clean).norm() > 1e-6 * clean.norm() or len(cut) == 1
        falls.append((clean - expected).mean())
    found_falls = torch.tensor(frame["metric_fall"][:n].to_numpy())
    assert relative_error(clean.mean() - found_falls, clean.mean() - torch.stack(falls[-n:])) < LAW
    assert frame["metric_fall"][n:].isna().all() and min(map(abs, falls[-n:])) > 1e-3


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("method", "steps"), [("eap", 5), ("eap_ig", 3)])
@pytest.mark.parametrize("name", MODELS)
def test_estimates_are_gradients_at_each_input_times_the_writers_difference(name, method, steps):
    """A node's is the sum over its edges: the gradient at its output."""
    model, split = shared(name), sharp(name, **SPLIT)
    found = circuit(model, CLEAN, CORRUPTED, everything, method=method, steps=steps)
    passes = [ByHooks(split), ByHooks(split)]
    for one, given in zip(passes, (CLEAN, CORRUPTED), strict=True):
        one.run(given)
    clean, corrupted = (one.written for one in passes)
    expected, outputs = dict.fromkeys(places(found), 0.0), {writer: torch.zeros(8, dtype=torch.float64) for writer in clean}
    path = [1.0] if method == "eap" else [k / steps for k in range(1, steps + 1)]
    with torch.enable_grad():
        for share in path:
            at = corrupted["embedding"] + share * (clean["embedding"] - corrupted["embedding"])
            one = ByHooks(split, at=at.detach())
            value = everything(one.run(CLEAN)).sum()
            points = {**one.inputs, **{("output", writer): y for writer, y in one.outputs().items()}}
            gradients = dict(zip(points, torch.autograd.grad(value, list(points.values())), strict=True))
            for writer, y in clean.items():
                difference = (y - corrupted[writer]) / (len(path) * len(CLEAN))
                outputs[writer] += (difference * gradients["output", writer]).sum(dim=(0, 2))
            for writer, reader, input_ in expected:
                difference = (clean[writer] - corrupted[writer]) / (len(path) * len(CLEAN))
                expected[writer, reader, input_] += float((difference * gradients[reader, input_]).sum())
    frame = found.edges.set_index(["writer", "reader", "input"])["estimate"]
    ours = torch.tensor(frame.loc[list(expected)].to_numpy())
    assert relative_error(ours, torch.tensor(list(expected.values()), dtype=torch.float64)) < LAW
    order = dict(zip(found.nodes["node"], range(len(clean)), strict=False))
    by_position, of_nodes = torch.stack(list(outputs.values())), torch.tensor(found.nodes["estimate"].to_numpy())
    assert relative_error(found.by_position[[order[writer] for writer in outputs]], by_position) < LAW
    assert relative_error(of_nodes[[order[writer] for writer in outputs]], by_position.sum(dim=1)) < LAW
    assert frame.abs().is_monotonic_decreasing and ours.abs().max() > 1e-3


BEHIND = ["softmax, norms behind heads", "softmax, norms over all heads"]


@pytest.mark.parametrize("name", [*BEHIND, "softmax, side by side"])
def test_what_nodes_write_adds_up_to_the_residual_stream(name):
    model = sharp(name)
    for path, parameter in model.named_parameters():
        if path.endswith(("attn.b_O", "ln1.b")):  # of no node
            parameter.zero_()
    ran = Pass(model, Graph(model))
    ran.logits(CLEAN, None)
    _, cache = model.run_with_cache(CLEAN)
    assert relative_error(ran.written.sum(dim=0), cache["blocks.1.hook_resid_post"]) < LAW


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.filterwarnings("error")
def test_weights_that_could_be_trained_cause_no_warning(name):
    """As those of a model that was just loaded."""
    model = model_of(*name.split(", "))
    frozen, trained = (circuit(model.requires_grad_(on), CLEAN, CORRUPTED, everything, method="eap") for on in (False, True))
    assert torch.equal(trained.estimates, frozen.estimates)


@pytest.mark.parametrize("name", BEHIND)
def test_an_estimate_is_the_slope_of_the_metric_along_its_edge(name):
    """In a small step the scales of the norms that stand behind it move, too."""
    split, step = sharp(name, **SPLIT), 1e-4
    ours, theirs = ByHooks(split), ByHooks(split)
    ours.run(CLEAN)
    theirs.run(CORRUPTED)
    found = circuit(shared(name), CLEAN, CORRUPTED, everything, method="eap")
    estimates = found.edges.set_index(["writer", "reader", "input"])["estimate"]
    for edge in {key[2]: key for key in places(found)}.values():
        near = [{w: y + x * (theirs.written[w] - y) for w, y in ours.written.items()} for x in (step, -step)]
        forth, back = (everything(ByHooks(split, towards, {edge}).run(CLEAN)).mean() for towards in near)
        assert estimates[edge] == pytest.approx(float(back - forth) / (2 * step), rel=1e-6)  # less a third derivative


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["softmax, learned", "softmax, norms behind heads", "softmax, side by side", "gqa"])
def test_with_activations_the_path_leads_through_what_one_stage_writes(name):
    """Of each stage one edge: its reader's gradient, where what all writers of that stage write is on the path."""
    model, split, steps = shared(name), sharp(name, **SPLIT), 3
    found = circuit(model, CLEAN, CORRUPTED, everything, method="eap_ig_activations", steps=steps)
    ours, theirs = ByHooks(split), ByHooks(split)
    ours.run(CLEAN)
    theirs.run(CORRUPTED)
    stages = {"embedding": ["embedding"], "mlp0": ["mlp0"], "0": [f"0.{i}" for i in range(model.cfg.n_heads)], "mlp1": ["mlp1"]}
    estimates = found.edges.set_index(["writer", "reader", "input"])["estimate"]
    for stage in stages.values():
        between = sum(theirs.written[w] - ours.written[w] for w in stage)
        edge = next(
            edge for edge in reversed(list(places(found))) if edge[0] == stage[-1] and (edge[2] == "v" or stage == ["mlp1"])
        )
        total = 0.0
        for k in range(1, steps + 1):
            with torch.enable_grad():
                one = ByHooks(
                    split, at=(ours.written["embedding"] + (1 - k / steps) * between * (stage[0] == "embedding")).detach()
                )
                point = {"embedding": None, "0.0": "blocks.0.hook_attn_out"}.get(
                    stage[0], f"blocks.{stage[0][-1]}.hook_mlp_out"
                )
                hooks = [] if point is None else [(point, lambda y, hook, more=(1 - k / steps) * between: y + more)]
                with split.hooks(fwd_hooks=hooks):
                    value = everything(one.run(CLEAN)).sum()
                (gradient,) = torch.autograd.grad(value, [one.inputs[edge[1:]]])
            total += float(((ours.written[edge[0]] - theirs.written[edge[0]]) * gradient).sum()) / (steps * len(CLEAN))
        assert estimates[edge] == pytest.approx(total, rel=1e-9) and abs(total) > 1e-6


def linear_of_three_layers():
    """Attention that is uniform, and no norms."""
    model = sharp("softmax, no norm, attention only", n_layers=3, n_heads=3, d_model=18)
    for block in model.blocks:
        for parameter in (block.attn.W_Q, block.attn.W_K, block.attn.b_Q, block.attn.b_K):
            parameter.zero_()
    return model


@pytest.mark.parametrize("method", ["eap", "eap_ig"])
def test_estimates_are_the_falls_where_the_model_is_linear(method):
    """Every edge cut alone lowers the metric by its estimate, and those into the logits add up to the whole."""
    model = linear_of_three_layers()
    found = circuit(model, CLEAN, CORRUPTED, **ASKED, method=method, confirm=10**6)
    estimates, falls = (torch.tensor(found.edges[column].to_numpy()) for column in ("estimate", "metric_fall"))
    assert relative_error(falls, estimates) < LAW and (estimates.abs() > 1e-3).sum() > 20
    assert (found.edges.query("input in ('q', 'k')")["metric_fall"] == 0).all()
    nodes = found.confirmed(10**6, by="nodes").nodes.query("head >= 0")
    of_nodes = (torch.tensor(nodes[column].to_numpy()) for column in ("metric_fall", "estimate"))
    assert relative_error(*of_nodes) < LAW and len(nodes) == 3 * model.cfg.n_heads
    whole = found.measured(found.graph.edges).mean()
    corrupted = found.measured(~found.graph.edges).mean()
    of_logits = torch.tensor([found.edges.query("reader == 'logits'")["estimate"].sum()], dtype=torch.float64)
    assert relative_error(of_logits, (whole - corrupted)[None]) < LAW


@pytest.mark.parametrize(("n", "n_mlps"), [(5, 2), (6, 1)])
def test_a_circuit_of_nodes_corrupts_the_output_of_all_others(n, n_mlps):
    model = shared("softmax, learned")
    found = circuit(model, CLEAN, CORRUPTED, **ASKED).keep(n, by="nodes")
    order = found.nodes.query("node not in ('embedding', 'logits')").sort_values("estimate", ascending=False)
    out = set(order["node"][n:])
    _, cache = model.run_with_cache(CORRUPTED)

    def heads(z, hook):
        replaced = [head for head in range(z.shape[2]) if f"{hook.layer()}.{head}" in out]
        z[:, :, replaced] = cache[hook.name][:, :, replaced]
        return z

    hooks = [(f"blocks.{i}.attn.hook_z", heads) for i in range(2)]
    mlps = [i for i in range(2) if f"mlp{i}" in out]
    hooks += [(f"blocks.{i}.hook_mlp_out", lambda y, hook: cache[hook.name]) for i in mlps]
    expected = differences(model, CLEAN, fwd_hooks=hooks)
    assert relative_error(found.measured()[0], expected) < LAW and len(mlps) == n_mlps
    assert set(found.nodes.query("kept")["node"]) <= {"embedding", "logits", *order["node"][:n]}


@pytest.mark.parametrize("name", ["softmax, side by side", "softmax, norms behind heads", "gqa"])
def test_a_confirmed_node_is_a_run_in_which_all_others_read_what_it_wrote_on_the_corrupted_prompt(name):
    model, split = shared(name), sharp(name, **SPLIT)
    found = circuit(model, CLEAN, CORRUPTED, everything, method="eap")
    theirs, clean = ByHooks(split), everything(model(CLEAN)).mean()
    theirs.run(CORRUPTED)
    confirmed = found.confirmed(3, by="nodes").confirmed(4).nodes.set_index("node")
    largest = found.nodes.query("node not in ('embedding', 'logits')").sort_values("estimate", key=abs)["node"][-3:]
    assert set(confirmed.index[confirmed["metric_fall"].notna()]) == set(largest)
    for node in largest:
        cut = {edge for edge in places(found) if edge[0] == node}
        expected = clean - everything(ByHooks(split, theirs.written, cut).run(CLEAN)).mean()
        assert confirmed.loc[node, "metric_fall"] == pytest.approx(float(expected), abs=LAW * float(clean.abs()))
        assert abs(expected) > 1e-3


def slow_greedy(found, n, size):
    """Every edge into what is reached so far is looked at, n times."""
    frame = found.edges
    reached, kept = {("logits", "logits", -1)}, set()
    group = found.model.cfg.n_heads // (found.model.cfg.n_key_value_heads or found.model.cfg.n_heads)
    while len(kept) < n:
        open_ = [
            row
            for row in frame.itertuples()
            if (row.reader.split(".")[0] if row.input != "mlp" else row.reader, row.input, row.reader_head) in reached
            and row.Index not in kept
        ]
        best = max(open_, key=lambda row: size(row.estimate))
        kept.add(best.Index)
        layer, head = str(best.writer_layer), best.writer_head
        if best.writer.startswith("mlp"):
            reached.add((best.writer, "mlp", -1))
        elif best.writer != "embedding":
            reached |= {(layer, "q", head), (layer, "k", head // group), (layer, "v", head // group)}
    return frame.loc[sorted(kept)]


@pytest.mark.parametrize(("name", "size"), [("softmax, learned", abs), ("softmax, rotary, grouped", float)])
def test_edges_are_kept_from_the_logits_down_and_those_that_lead_nowhere_change_nothing(name, size):
    found = circuit(shared(name), CLEAN, CORRUPTED, **ASKED)
    where = places(found)
    for n in (0, 7, 30, 60):
        chosen = slow_greedy(found, n, size) if n else found.edges[:0]
        mask = torch.zeros_like(found.kept)
        for edge in zip(chosen["writer"], chosen["reader"], chosen["input"], strict=True):
            mask[where[edge]] = True
        small = found.keep(n, order="absolute" if size is abs else "signed")
        assert not (small.kept & ~mask).any() and torch.equal(small.kept, found.graph.pruned(mask))
        unpruned, pruned = found.measured(mask, small.kept)
        assert relative_error(pruned, unpruned) < LAW
    assert 0 < small.kept.sum() <= 60
    assert torch.equal(found.keep(1.0).kept, found.graph.edges) and not found.keep(0.0).kept.any()
    dangling = torch.zeros_like(found.kept)
    dangling[where["embedding", "0.1", "q"]] = dangling[where["0.2", "logits", "logits"]] = True
    assert not found.graph.pruned(dangling).any()
    dangling[where["embedding", "0.2", "q"]] = True
    assert found.graph.pruned(dangling).sum() == 2


@pytest.mark.parametrize("by", ["edges", "nodes"])
def test_faithfulness_is_that_of_mib(by):
    """f at every share is of a circuit that is run, and both areas are sums of trapezoids between the shares."""
    model = shared("softmax, rotary, grouped")
    found = circuit(model, CLEAN, CORRUPTED, **ASKED)
    result = faithfulness(found, by=by)
    of_order = {order: rows.reset_index(drop=True) for order, rows in result.table.groupby("order")}
    f, g = (of_order[order]["faithfulness"].tolist() for order in ("signed", "absolute"))
    n_all = {"edges": len(found.edges), "nodes": len(found.nodes) - 2}[by]
    cpr = cmd = 0.0
    for i, (low, high) in enumerate(itertools.pairwise(SHARES)):
        cpr += (high - low) * (f[i] + f[i + 1]) / 2
        cmd += (high - low) * (abs(1 - g[i]) + abs(1 - g[i + 1])) / 2
    np.testing.assert_allclose([result.cpr, result.cmd, f[-1], g[-1]], [cpr, cmd, 1, 1], rtol=LAW)
    assert all(rows["n_kept"].tolist() == [int(share * n_all) for share in SHARES] for rows in of_order.values()) and f != g
    clean, corrupted = (differences(model, x).mean() for x in (CLEAN, CORRUPTED))
    np.testing.assert_allclose([result.clean, result.corrupted], [clean, corrupted], rtol=LAW)
    for order, values in (("signed", f), ("absolute", g)):
        half = found.keep(0.5, by=by, order=order).measured().mean()
        assert values[-2] == pytest.approx(float((half - corrupted) / (clean - corrupted)), rel=1e-9)
        alone = faithfulness(found, by=by, order=order)
        pd.testing.assert_frame_equal(alone.table, of_order[order])
        assert alone[1:3] == pytest.approx((cpr, math.nan) if order == "signed" else (math.nan, cmd), rel=LAW, nan_ok=True)
    others = dict(prompt=CORRUPTED.flip(0), corrupted=CLEAN, **ASKED)
    elsewhere = faithfulness(found, [0.5, 1.0], by=by, pairs=others)
    assert elsewhere.corrupted == pytest.approx(result.clean, rel=1e-12) and elsewhere.clean != pytest.approx(result.corrupted)


@pytest.mark.parametrize("order", ["signed", "absolute"])
def test_circuits_at_sizes_are_those_that_are_kept_and_their_faithfulness_is_that_of_a_run(order):
    found = circuit(shared("softmax, rotary, grouped"), CLEAN, CORRUPTED, **ASKED)
    at = found.at_sizes([20, 0.5, 1.0], order=order)
    half = faithfulness(found, [20.5 / len(found.edges), 0.5, 1.0], order=order)
    assert set(at.table["order"]) == {order}
    np.testing.assert_allclose(at.table[["metric", "faithfulness"]], half.table[["metric", "faithfulness"]], rtol=LAW)
    assert (at.clean, at.corrupted) == (half.clean, half.corrupted)
    for row, one, size in zip(at.table.itertuples(), at.circuits, [20, 0.5, 1.0], strict=True):
        assert torch.equal(one.kept, found.keep(size, order=order).kept)
        assert (row.n_edges, row.n_nodes) == (one.edges["kept"].sum(), one.nodes["kept"].sum())
    (alone,) = at.circuits[1].at_sizes().table.to_dict("records")
    assert alone == at.table.loc[1].to_dict()


def test_paths_are_the_widest_ways_and_take_no_estimate_twice():
    """By hand: 3 of 5 go through 0.1 to the logits at once, 2.5 through the MLP, and of what 0.1 has left, 1 through 1.2."""
    found = circuit(shared("softmax, learned"), CLEAN, CORRUPTED, **ASKED, method="eap")
    where, estimates = places(found), torch.zeros_like(found.estimates)
    sizes = {
        ("embedding", "0.1", "q"): -5.0,
        ("0.1", "logits", "logits"): 3.0,
        ("embedding", "mlp0", "mlp"): 4.0,
        ("mlp0", "1.2", "v"): -2.5,
        ("0.1", "1.2", "k"): 1.0,
        ("1.2", "logits", "logits"): 6.0,
        ("embedding", "logits", "logits"): 9.0,  # is not kept
    }
    for edge, size in sizes.items():
        estimates[where[edge]] = size
    kept = found.graph.edges.clone()
    kept[where["embedding", "logits", "logits"]] = False
    by_hand = replace(found, estimates=estimates, kept=kept)
    assert by_hand.paths().values.tolist() == [
        [0, "embedding > 0.1 > logits", "q > logits", 2, 3.0],
        [1, "embedding > mlp0 > 1.2 > logits", "mlp > v > logits", 3, 2.5],
        [2, "embedding > 0.1 > 1.2 > logits", "q > k > logits", 3, 1.0],
    ]
    assert len(by_hand.paths(2)) == 2 and not len(replace(by_hand, kept=torch.zeros_like(kept)).paths())
    all_of_them = found.paths(5)
    assert all_of_them["width"].is_monotonic_decreasing and len(all_of_them) == 5


def rows_kept(frame):
    return frame.query("kept").reset_index(drop=True)


@pytest.mark.parametrize("name", ["softmax, learned", "softmax, rotary, grouped", "softmax, no norm, attention only"])
def test_as_a_graph_of_networkx_its_ways_are_those_of_the_circuit(name):
    """Rows are nodes and edges; a key-value head's keys lead to all heads of its group in the circuit, and to no other."""
    found = circuit(shared(name), CLEAN, CORRUPTED, **ASKED).keep(40)
    graph, nodes, edges = found.to_networkx(), rows_kept(found.nodes), rows_kept(found.edges)
    assert repr(found) == f"Circuit({len(edges)} of {len(found.edges)} edges, order={found.order!r})"
    assert sum(bool(attributes) for *_, attributes in graph.edges(data=True)) == len(edges)
    rows = pd.DataFrame([row for _, _, row in graph.edges(data=True) if row])
    pd.testing.assert_frame_equal(rows.sort_values("estimate", key=abs, ascending=False, ignore_index=True), edges, **CLOSE)
    inputs = {node for node, row in graph.nodes(data=True) if "input" in row}
    assert {node: row for node, row in graph.nodes(data=True) if node not in inputs}.keys() == set(nodes["node"])
    assert all(graph.nodes[row.node]["estimate"] == row.estimate for row in nodes.itertuples() if row.node != "logits")
    group = found.model.cfg.n_heads // (found.model.cfg.n_key_value_heads or found.model.cfg.n_heads)
    for node in inputs:
        layer, head, x = node.split(".")
        fed = [f"{layer}.{head}"] if x == "q" else [f"{layer}.{int(head) * group + i}" for i in range(group)]
        assert set(graph.successors(node)) == {one for one in fed if one in set(nodes["node"])} != set()
    for node in graph:
        assert networkx.has_path(graph, "embedding", node) and networkx.has_path(graph, node, "logits")
    assert networkx.is_directed_acyclic_graph(graph) and len(edges) >= 10


def test_as_json_it_has_the_rows_of_its_frames():
    found = circuit(shared("softmax, learned"), *UNEQUAL, **ASKED, confirm=3).keep(40)
    read = json.loads(found.to_json([10, 20]))
    for name in ("nodes", "edges"):
        frame = rows_kept(getattr(found, name))
        pd.testing.assert_frame_equal(pd.DataFrame(read[name]).astype(frame.dtypes), frame, **CLOSE)
    at = found.at_sizes([10, 20])
    assert read["faithfulness"] == at.table.to_dict("records") and (read["clean"], read["corrupted"]) == (
        at.clean,
        at.corrupted,
    )
    assert sorted(len(pair["clean"]) for pair in read["pairs"]) == [5, 8, 8] and read["pairs"][0].keys() == {
        "clean",
        "corrupted",
    }


def test_pairs_of_several_lengths_are_those_of_each_length_and_a_function_measures_as_well():
    model = shared("softmax, learned")
    found = circuit(model, *UNEQUAL, **ASKED)
    longer = circuit(model, CLEAN[:2], CORRUPTED[:2], answer=ANSWERS[:2], rival=RIVALS[:2])
    shorter = circuit(model, UNEQUAL[0][2], UNEQUAL[1][2], answer=5, rival=3)
    assert relative_error(found.estimates, (2 * longer.estimates + shorter.estimates) / 3) < LAW
    by_position = 2 * longer.by_position  # counted from the last
    by_position[:, -5:] += shorter.by_position
    assert relative_error(found.by_position, by_position / 3) < LAW
    measure = circuit(model, CLEAN[:2], CORRUPTED[:2], lambda x: x[[0, 1], -1, ANSWERS[:2]] - x[[0, 1], -1, RIVALS[:2]])
    assert relative_error(measure.estimates, longer.estimates) < LAW
    lengths = sorted(pairs.clean.shape[1] for pairs in found.batches)
    assert lengths == [5, 8] and not any(point.has_hooks() for point in model.hook_dict.values())


PART = [(2, 4), (5, 6)]
WITHOUT = ["softmax, learned", "softmax, norms behind heads", "softmax, shifted, grouped", "rope after", "gqa"]


def without_part(model):
    """The logits of the project's own way to take a part out."""
    hidden = [counterfactuals(model, row[:-1], [PART], positions="kept") for row in CLEAN]
    return torch.cat([logits_after(model, one, row[-1:], 1) for one, row in zip(hidden, CLEAN, strict=True)])


@pytest.mark.parametrize("name", WITHOUT)
def test_without_a_part_no_edge_is_the_run_in_which_nobody_reads_it(name):
    model = shared(name)
    found = circuit(model, CLEAN, None, **ASKED, without=PART)
    whole, empty, half = found.measured(found.graph.edges, torch.zeros_like(found.kept), found.keep(40).kept)
    last = without_part(model)[:, -1]
    assert relative_error(whole, differences(model, CLEAN)) < LAW
    assert relative_error(empty, last[range(3), ANSWERS] - last[range(3), RIVALS]) < LAW
    assert (whole - empty).abs().min() > 1e-3 and (half - empty).abs().min() > 1e-5
    of_embedding = found.edges.query("writer == 'embedding' and input != 'k'")["estimate"]
    assert (of_embedding == 0).all() and (found.estimates[0].abs() > 1e-5).sum() >= 4
    assert relative_error(found.by_position.sum(dim=1), found.estimates.sum(dim=1)) < LAW
    dangling = torch.rand(found.kept.shape, generator=torch.Generator().manual_seed(2)) < 0.2
    unpruned, pruned = found.measured(dangling & found.graph.edges, found.graph.pruned(dangling & found.graph.edges))
    assert relative_error(pruned, unpruned) < LAW or name in BEHIND  # whose heads share a scale


@pytest.mark.parametrize(("name", "group"), [("softmax, learned", 1), ("softmax, rotary, grouped", 2)])
def test_a_part_is_hidden_from_the_heads_whose_edge_from_the_embedding_is_cut(name, group):
    """Scores of its keys are then -inf, and the estimate is the slope of the metric as z moves there."""
    model, share = shared(name), 1e-4
    found = circuit(model, CLEAN, None, everything, without=PART, method="eap")
    every = model.run_with_cache(CLEAN)[1]["blocks.0.attn.hook_v"].repeat_interleave(group, dim=2)
    hidden = torch.zeros(8, dtype=torch.bool)
    for start, stop in PART:
        hidden[start:stop] = True

    def run(head, share):
        seen = {}

        def pattern(p, hook):
            seen["z"] = p.masked_fill(hidden, 0)
            return p

        def z(z, hook):
            p = (seen["z"] / seen["z"].sum(dim=-1, keepdim=True))[:, head]
            z[:, :, head] = torch.lerp(z[:, :, head], torch.einsum("bhqk,bkhd->bqhd", p, every[:, :, head]), share)
            return z

        return everything(
            model.run_with_hooks(CLEAN, fwd_hooks=[("blocks.0.attn.hook_pattern", pattern), ("blocks.0.attn.hook_z", z)])
        )

    for kv_head in (0, 2):
        heads = [kv_head * group + i for i in range(group)]
        kept, where = found.graph.edges.clone(), places(found)["embedding", f"0.{kv_head}", "k"]
        kept[where] = False
        assert relative_error(found.measured(kept)[0], run(heads, 1.0)) < LAW
        slope = (run(heads, -share) - run(heads, share)).mean() / (2 * share)
        assert float(found.estimates[where]) == pytest.approx(float(slope), rel=1e-6)


@pytest.mark.parametrize("by_query_head", [False, True])
def test_under_a_bias_it_is_the_circuit_behind_its_prompt(by_query_head):
    model = shared("softmax, rotary, grouped")
    with model.kv_bias(convert_prompt(model, tokens(6, seed=3))):
        found = circuit(model, CLEAN, CORRUPTED, everything, by_query_head=by_query_head, method="eap")
        whole, empty = found.measured(found.graph.edges, ~found.graph.edges)
        expected = everything(model(CLEAN)), everything(model(CORRUPTED))
    assert relative_error(whole, expected[0]) < LAW and relative_error(empty, expected[1]) < LAW


PROMPT, TEXT, SPAN = tokens(9), tokens(4, seed=1), (2, 5)
REPLACED = torch.cat([PROMPT[:2], tokens(3, seed=2), PROMPT[5:]])
WORDS = dict(answer=torch.tensor([3, 7]), rival=torch.tensor([4, 1, 2]))
"""Of several tokens, as many as words may have."""
WITH_TEXT = {
    "gqa decay": {},
    "rope after": dict(n_layers=3),
    "softmax, shifted": {},
    "softmax, rotary, grouped": dict(parallel_attn_mlp=True, gated_mlp=True),
}


def patched(model, row, answer):
    """log p of an answer behind prompt and text as they are, less that with one edge between heads path-patched at the prompt's
    tokens, or at all: the sender's output from the other prompt, other heads and MLPs as they are; then what the receiver's
    queries (keys, values) become."""
    text, layers = torch.cat([TEXT, answer[:-1]]), range(model.cfg.n_layers)
    z = [f"blocks.{layer}.attn.hook_z" for layer in layers]
    mlps = [] if model.cfg.attn_only else [f"blocks.{layer}.hook_mlp_out" for layer in layers]
    sender, receiver = z[row.writer_layer], f"blocks.{row.reader_layer}.attn.hook_{row.input}"
    (before, own), (_, other) = (model.run_with_cache(torch.cat([prompt, text])[None]) for prompt in (PROMPT, REPLACED))

    def score(logits):
        return logits[0, -len(answer) :].log_softmax(dim=-1)[range(len(answer)), answer].sum()

    for at in (slice(len(PROMPT)), slice(None)):
        held, changed = {name: own[name].clone() for name in (*z, *mlps)}, []
        held[sender][:, at, row.writer_head] = other[sender][:, at, row.writer_head]
        hooks = [(name, lambda x, hook, held=held: held[hook.name]) for name in held]
        see = [(receiver, lambda x, hook, changed=changed: changed.append(x.clone()))]
        model.run_with_hooks(torch.cat([PROMPT, text])[None], fwd_hooks=[*hooks, *see])
        mixed = own[receiver].clone()
        mixed[:, :, row.reader_head] = changed[0][:, :, row.reader_head]
        after = model.run_with_hooks(torch.cat([PROMPT, text])[None], fwd_hooks=[(receiver, lambda x, hook, x_=mixed: x_)])
        yield score(before) - score(after)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", WITH_TEXT)
def test_an_edge_between_heads_is_path_patching_at_the_tokens_of_the_prompt_and_at_all(name):
    """Of answer and rival, of several tokens each, which the model reads one behind the other."""
    model = sharp(name, **WITH_TEXT[name])
    edges = circuit(model, PROMPT, REPLACED, text=TEXT, **WORDS, method="eap", confirm=50).edges
    confirmed = edges.query("writer_head >= 0 and reader_head >= 0 and metric_fall.notna()")
    rows = confirmed.groupby("input").head(1)
    assert set(rows["input"]) == {"q", "k", "v"} and rows["metric_fall"].abs().max() > 0.01
    for row in rows.itertuples():
        falls = [a - b for a, b in zip(*(patched(model, row, answer) for answer in WORDS.values()), strict=True)]
        assert [row.metric_fall_in_prompt, row.metric_fall] == pytest.approx([float(fall) for fall in falls], abs=1e-10)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gqa decay", "softmax, learned", "softmax, shifted, grouped"])
def test_behind_a_text_it_carries_the_total_effect_of_a_part_of_the_prompt(name):
    """As attribution measures it, with words of several tokens, one token, no rival, and the most probable next token; of
    several prompts it is the mean."""
    model, given = sharp(name), dict(text=TEXT, without=[SPAN], method="eap")
    for asked in (WORDS, {**WORDS, "rival": 5}, dict(answer=3), dict(answer=3, rival=7), {}):
        found = circuit(model, PROMPT, **given, **asked)
        whole, empty = found.measured(found.graph.edges, torch.zeros_like(found.kept)).flatten()
        effect = prompt_attribution(model, PROMPT, TEXT, by=[SPAN], **asked)["total_effect"][0]
        assert float(whole - empty) == pytest.approx(effect, abs=1e-10) and abs(effect) > 1e-3
    other = torch.cat([PROMPT, PROMPT[:2]]), TEXT[:3]
    alone = circuit(model, other[0], text=other[1], without=[SPAN], method="eap", answer=[5, 2], rival=[7])
    words = dict(answer=[3, [5, 2]], rival=[torch.tensor([4, 1, 2]), 7])
    both = circuit(model, [PROMPT, other[0]], text=[TEXT, other[1]], without=[SPAN], method="eap", **words)
    first = circuit(model, PROMPT, **given, answer=3, rival=WORDS["rival"])
    assert relative_error(both.estimates, (first.estimates + alone.estimates) / 2) < LAW
    assert relative_error(both.in_prompt, (first.in_prompt + alone.in_prompt) / 2) < LAW
    assert relative_error(both.by_position.sum(dim=1), both.estimates.sum(dim=1)) < LAW


def test_a_rival_is_subtracted_token_by_token_from_where_the_answer_begins():
    model, given = sharp("softmax, rotary, grouped"), dict(text=TEXT, method="eap_ig", steps=2, confirm=3)
    both = circuit(model, PROMPT, REPLACED, **given, **WORDS)
    answer, rival = (circuit(model, PROMPT, REPLACED, **given, answer=WORDS[name]) for name in ("answer", "rival"))
    for name in ("estimates", "in_prompt"):
        assert relative_error(getattr(both, name), getattr(answer, name) - getattr(rival, name)) < LAW
    n = len(PROMPT) + len(TEXT)
    assert [x.by_position.shape[1] for x in (both, answer, rival)] == [n + 2, n + 1, n + 2]
    by_position = torch.nn.functional.pad(answer.by_position, (0, 1)) - rival.by_position
    assert relative_error(both.by_position, by_position) < LAW
    assert not (both.edges["metric_fall_in_prompt"].isna() & both.edges["metric_fall"].notna()).any()


def test_estimates_in_the_prompt_are_the_falls_there_where_the_model_is_linear():
    model = linear_of_three_layers()
    edges = circuit(model, PROMPT, REPLACED, text=TEXT, answer=3, rival=7, confirm=10**6).edges
    of_prompt, falls = (torch.tensor(edges[column].to_numpy()) for column in ("estimate_in_prompt", "metric_fall_in_prompt"))
    assert relative_error(falls, of_prompt) < LAW and (of_prompt.abs() > 1e-3).sum() > 10
    assert ((edges["estimate"] - edges["estimate_in_prompt"]).abs() > 1e-3).sum() > 10
    assert circuit(model, PROMPT, REPLACED, answer=3, rival=7).edges["estimate_in_prompt"].isna().all()


GROUPED = ["softmax, rotary, grouped", "softmax, shifted, grouped", "gqa"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("given", [dict(corrupted=CORRUPTED), dict(without=PART), dict(without=PART, text=TEXT)])
def test_by_query_head_estimates_add_up_and_circuits_are_those_of_the_group(name, given):
    """Every query head of a group has edges into keys and values of its own; all of them cut, or kept, are the group's."""
    model = shared(name)
    ours, theirs = (circuit(model, CLEAN, **given, **ASKED, by_query_head=one, steps=2) for one in (False, True))
    group = model.cfg.n_heads // model.cfg.n_key_value_heads
    found = {reader: i for i, reader in enumerate(ours.graph.readers)}
    of_group = [
        found[reader._replace(head=reader.head // group) if reader.input in ("k", "v") else reader]
        for reader in theirs.graph.readers
    ]
    assert len(of_group) == len(found) + 2 * model.cfg.n_layers * (model.cfg.n_heads - model.cfg.n_key_value_heads)
    of_prompts = [(ours.in_prompt, theirs.in_prompt)] if "text" in given else []
    for mine, by_head in [
        (ours.estimates, theirs.estimates),
        *of_prompts,
    ]:
        added = torch.zeros_like(mine).index_add(1, torch.tensor(of_group), by_head)
        assert relative_error(added, mine) < LAW
    half = torch.rand(ours.kept.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    assert relative_error(theirs.measured(half[:, of_group]), ours.measured(half)) < LAW
    assert theirs.keep(60).kept.any() and not model.cfg.ungroup_grouped_query_attention
    assert set(theirs.edges.query("input == 'k'")["reader_head"]) == set(range(model.cfg.n_heads))
    keys = theirs.edges.query("input == 'k' and reader_layer == 1")
    assert keys.groupby("writer")["estimate"].nunique().max() > model.cfg.n_key_value_heads


def test_by_query_head_where_no_keys_are_shared():
    plain, same = (circuit(shared("softmax, learned"), CLEAN, CORRUPTED, everything, by_query_head=x) for x in (False, True))
    assert torch.equal(plain.estimates, same.estimates)

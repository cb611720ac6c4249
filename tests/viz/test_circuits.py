"""The graph of a circuit: what it shows is what the frames hold, by hand; where its nodes stand; what it refuses."""

import math

import pytest
import torch
from pictures import data_of, values
from precision import LAW
from tiny_text_model import softmax

from kvlens import KVLensError
from kvlens.analyses import circuit, faithfulness, why_attends
from kvlens.viz import circuit_view

CLEAN = ["The widget is purple. The", "The gadget is purple. The", "The widget is purple."]
CORRUPTED = ["The gadget is purple. The", "The widget is purple. The", "The gadget is purple."]
ASKED = dict(answer=" widget", rival=" gadget")
SIZES = [20, 40, 70]


@pytest.fixture(scope="module")
def found():
    """Of a model of two layers of three heads."""
    return circuit(softmax(), CLEAN[:2], CORRUPTED[:2], **ASKED, confirm=5)


@pytest.fixture(scope="module")
def data(found):
    return data_of(circuit_view(found, SIZES, n_reasons=2))


def shown(data, stop):
    """(writer, input, readers) -> estimate and fall, of the edges of a size; readers are nodes."""
    names = [node for node, *_ in data["nodes"]]
    edges = [edge for edge in data["edges"] if edge[-1] <= stop]
    here = {i for i, *_ in data["stops"][stop]["places"]}
    return {
        (names[writer], x, tuple(names[i] for i in readers if i in here)): (estimate, fall)
        for writer, readers, x, estimate, fall, _ in edges
    }


def test_every_size_shows_the_edges_nodes_and_faithfulness_of_the_circuit_that_is_kept(found, data):
    shares = [(size + 0.5) / len(found.edges) for size in SIZES]
    f = faithfulness(found, shares, order="signed").table["faithfulness"]
    for i, (size, stop) in enumerate(zip(SIZES, data["stops"], strict=True)):
        small = found.keep(size)
        edges, nodes = small.edges.query("kept"), small.nodes.query("kept")
        assert stop["faithfulness"] == pytest.approx(f[i], rel=LAW) and stop["n_edges"] == len(edges) == len(shown(data, i))
        assert {data["nodes"][node][0] for node, *_ in stop["places"]} == set(nodes["node"])
        expected = {(row.writer, row.input, (row.reader,)): (row.estimate, row.metric_fall) for row in edges.itertuples()}
        for edge, (estimate, fall) in shown(data, i).items():
            assert estimate == pytest.approx(expected[edge][0], rel=1e-3)
            assert (fall is None) == math.isnan(expected[edge][1]) and (
                fall is None or fall == pytest.approx(expected[edge][1], rel=1e-3)
            )
    assert len({stop["n_edges"] for stop in data["stops"]}) == 3
    assert any(fall is not None for _, fall in shown(data, 2).values())


@pytest.mark.parametrize(("by", "counted"), [("edges", "its edges are"), ("nodes", "its heads and MLPs are")])
def test_the_note_says_what_was_chosen(found, by, counted):
    assert counted in circuit_view(found.keep(4, by=by), n_reasons=0).to_html()
    sizes = found.at_sizes([2, 4], by=by)
    assert [one.by for one in sizes.circuits] == [by, by]
    assert sizes.table["metric"].tolist() == [float(found.keep(n, by=by).measured().mean()) for n in (2, 4)]


def test_a_node_stands_at_the_token_where_its_estimate_is_largest(found, data):
    rows = dict(zip(found.nodes["node"], found.by_position, strict=False))
    for (node, *_, estimate, column), by_position in zip(data["nodes"], data["by_position"], strict=True):
        if node == "logits":
            assert column == len(data["tokens"]) - 1 and by_position is None and estimate is None
            continue
        assert column == int(rows[node].abs().argmax()) and estimate == pytest.approx(
            float(rows[node].sum()), rel=1e-3, abs=1e-6
        )
        assert values(by_position) == pytest.approx(rows[node].tolist(), abs=0.6 / 999 * float(rows[node].abs().max()))
    assert len({column for *_, column in data["nodes"]}) >= 3 and data["columns"] == data["tokens"]


def test_no_two_nodes_stand_in_the_same_place_and_later_layers_stand_higher(data):
    for stop in data["stops"]:
        fullest, seen = dict(stop["columns"]), set()
        for node, row, x in stop["places"]:
            _, layer, _, _, column = data["nodes"][node]
            place = column, row, round(x * (fullest[column] - 1), 3)
            assert stop["layers"][row] == layer and place not in seen and 0 <= x <= 1
            seen.add(place)
        assert stop["layers"] == sorted(stop["layers"])
        for column, n in stop["columns"]:
            by_row = [row for node, row, _ in stop["places"] if data["nodes"][node][4] == column]
            assert n == max(map(by_row.count, by_row), default=0)


def test_keys_and_values_lead_to_every_head_of_their_group_in_the_circuit(grouped):
    data, kept = data_of(circuit_view(grouped.keep(60), n_reasons=0)), grouped.keep(60)
    of_keys = {(row.writer, row.input, row.reader) for row in kept.edges.query("kept and input in ('k', 'v')").itertuples()}
    heads = set(kept.nodes.query("kept")["node"])
    found = set()
    for writer, x, readers in shown(data, 0):
        if x in ("k", "v"):
            layer, head = readers[0].split(".")
            group = int(head) // 2
            assert set(readers) == {f"{layer}.{2 * group}", f"{layer}.{2 * group + 1}"} & heads
            found.add((writer, x, f"{layer}.{group}"))
    assert found == of_keys and len(found) > 5


@pytest.fixture(scope="module")
def grouped():
    from tiny_text_model import tiny_text_model

    model = tiny_text_model(attention="softmax", kv_shift=None, n_heads=4, n_key_value_heads=2, d_model=16)
    return circuit(model, CLEAN[:2], CORRUPTED[:2], **ASKED)


def test_attention_is_the_models_and_reasons_are_those_of_why_attends(found, data):
    model, tokens = found.model, found.batches[-1].clean[0]
    _, cache = model.run_with_cache(tokens)
    assert data["patterns"].keys() == {node for node, _, head, *_ in data["nodes"] if head >= 0}
    for node, pattern in data["patterns"].items():
        layer, head = map(int, node.split("."))
        expected = cache["pattern", layer][0, head].flatten().tolist()
        assert values(pattern) == pytest.approx(expected, abs=0.51 / 255)
    assert len(data["reasons"]) == 2
    for node, reason in data["reasons"].items():
        layer, head = map(int, node.split("."))
        table = why_attends(model, tokens, None, layer, head, query=reason["query"], n_run=3)
        keys = table[table["side"] == "key"].iloc[0]
        assert reason["key"] == keys["key_position"] and reason["attention"] == pytest.approx(keys["attention"], rel=1e-2)
        side, writer, share, run = reason["rows"][0]
        assert (side, writer) == ("key", keys["key_writer"].removeprefix("head ").replace("mlp ", "mlp"))
        assert [share, run] == pytest.approx([keys["contrast"], keys["contrast_run"]], rel=1e-2)


def test_roles_are_columns_with_the_sums_of_their_positions(found):
    roles = {"noun": [1, 2, 3, 4, 5], "last": [-1]}
    data = data_of(circuit_view(found, SIZES, roles=roles, n_reasons=0))
    assert data["columns"] == ["other", "noun", "last"]
    rows, width = dict(zip(found.nodes["node"], found.by_position, strict=False)), found.by_position.shape[1]
    groups = [[0, *range(6, width - 1)], roles["noun"], roles["last"]]
    for node, *_, column in data["nodes"][:-1]:
        sums = [abs(float(rows[node][group].sum())) for group in groups]
        assert column == sums.index(max(sums))
    assert {column for *_, column in data["nodes"]} >= {1, 2} and data["nodes"][-1][-1] == 2
    elsewhere = data_of(circuit_view(found, SIZES, roles={"last": [-1], "noun": [1]}, n_reasons=0))
    assert elsewhere["nodes"][-1][0] == "logits" and elsewhere["nodes"][-1][-1] == 1


def test_a_circuit_of_some_edges_is_shown_as_it_is(found):
    small = found.keep(40)
    (stop,) = data_of(circuit_view(small, n_reasons=0))["stops"]
    assert stop["n_edges"] == int(small.kept.sum())
    assert stop["metric"] == pytest.approx(float(small.measured().mean()), rel=LAW)


@pytest.mark.parametrize(("order", "words"), [("signed", "by value"), ("absolute", "by size")])
def test_it_says_by_which_order_edges_are_kept(found, order, words):
    for piece in (circuit_view(found, SIZES, order=order, n_reasons=0), circuit_view(found.keep(20, order=order), n_reasons=0)):
        data = data_of(piece)
        assert f"its edges are the largest {words}" in piece.to_html() and {x["order"] for x in data["stops"]} == {order}
    assert data["stops"][0]["metric"] == float(found.keep(20, order=order).measured().mean())


def test_words_of_several_tokens_have_columns_behind_the_prompt():
    """A shorter prompt whose answer is longer: what is read of it stands at the columns behind the longest prompt."""
    words = dict(answer=[" widget", " gadget is purple"], rival=[" gadget", " widget is"])
    several = circuit(softmax(), [CLEAN[0], CLEAN[2]], [CORRUPTED[0], CORRUPTED[2]], **words, method="eap")
    data = data_of(circuit_view(several, SIZES, n_reasons=1))
    assert len(data["columns"]) == several.by_position.shape[1] > len(data["tokens"]) == data["columns"].index("")
    assert data["columns"][: len(data["tokens"])] == data["tokens"]
    assert {column for *_, column in data["nodes"]} <= set(range(len(data["columns"])))


def test_what_cannot_be_drawn_is_refused(found):
    several = circuit(softmax(), CLEAN, CORRUPTED, **ASKED, method="eap")
    for make in (
        lambda: circuit_view(found, [70, 40]),
        lambda: circuit_view(found.keep(0)),
        lambda: circuit_view(found, SIZES, roles={"last": [99]}),
        lambda: circuit_view(several, SIZES, roles={"first": [0]}),
        lambda: circuit_view(found, [10_000]),
    ):
        with pytest.raises(KVLensError, match="expected"):
            make()
    assert data_of(circuit_view(several, SIZES, roles={"last": [-1]}, n_reasons=0))["columns"] == ["other", "last"]


def test_a_large_circuit_is_refused_with_what_to_do(found, monkeypatch):
    monkeypatch.setattr("kvlens.viz.circuits.MAX_EDGES", 20)
    with pytest.raises(KVLensError, match="keep another number, or pass sizes"):
        circuit_view(found, SIZES)


def test_a_long_prompt_shows_the_tokens_at_which_nodes_stand(found, monkeypatch):
    monkeypatch.setattr("kvlens.viz.circuits.MAX_TOKENS", 4)
    data = data_of(circuit_view(found, SIZES, n_reasons=0))
    for stop in data["stops"]:
        assert [column for column, _ in stop["columns"]] == sorted({data["nodes"][node][4] for node, *_ in stop["places"]})
    assert torch.tensor([n for stop in data["stops"] for _, n in stop["columns"]]).min() >= 1


def test_tokens_that_are_hidden_in_the_corrupted_prompt_are_so_named():
    found = circuit(softmax(), CLEAN[0], None, **ASKED, without=[(4, 7)], method="eap")
    data = data_of(circuit_view(found, SIZES, n_reasons=1))
    assert [i for i, text in enumerate(data["corrupted_tokens"]) if text is None] == [4, 5, 6]
    assert len(data["reasons"]) == 1 and len(data["patterns"]) > 1

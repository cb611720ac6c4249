"""Learning curves and what is read off them: answers known by hand."""

import math

import matplotlib.colors
import pandas as pd
import pytest
from matplotlib.figure import Figure
from tiny_runs import course, runs

from kvlens.papers.harness import learned, plots
from kvlens.papers.harness.learned import Cell, train_cells
from kvlens.tasks import make_task
from kvlens.training import score_heldout

TASK = make_task("induction", vocab_size=11, length=13)
MODELS = {
    "b": dict(n_layers=1, d_model=12, d_head=6, attn_only=True, kv_shift=True),
    "a": dict(n_layers=2, d_model=8, d_head=4, attn_only=True),
}
TRAINING = dict(steps=5, eval_every=3, batch_size=2, eval_sequences=7)
COLUMNS = ["model", "seed", "n_parameters", "step", "split", "loss", "accuracy"]


# --- training and comparing ---


@pytest.fixture(scope="module")
def trained():
    said, last_scores = [], {}

    def examine(label, seed, model):
        last_scores[label, seed] = (score_heldout(model, TASK, 7, seed=seed), model)
        return []

    table, _ = train_cells([Cell(TASK, MODELS, examine=examine)], dict(training=TRAINING, seeds=[0, 3]), said.append)
    return table, said, last_scores


def test_the_table_has_every_measurement_of_every_run(trained):
    table, said, _ = trained
    assert list(table.columns) == COLUMNS
    assert table.index.equals(pd.RangeIndex(len(table)))
    assert not table.isna().any(axis=None)
    assert list(table["model"].unique()) == ["b", "a"]
    for _, run in table.groupby(["model", "seed"]):
        assert run.loc[run["split"] == "train", "step"].tolist() == [1, 2, 3, 4, 5]
        assert run.loc[run["split"] == "heldout", "step"].tolist() == [3, 5]
    assert [text.split(":")[0] for text in said] == ["b, seed 0", "b, seed 3", "a, seed 0", "a, seed 3"]


def test_the_trained_model_is_the_one_examined(trained):
    """Training leaves a model with the weights of its best evaluation, and the table holds that evaluation."""
    table, _, last_scores = trained
    assert set(last_scores) == {(label, seed) for label in MODELS for seed in (0, 3)}
    for (label, seed), ((loss, _), model) in last_scores.items():
        rows = learned.of_heldout(table[(table["model"] == label) & (table["seed"] == seed)])
        assert loss == pytest.approx(rows["loss"].min(), rel=1e-5)  # float32 sums in batches of other sizes
        assert (rows["n_parameters"] == sum(p.numel() for p in model.parameters())).all()


def test_a_seed_decides_a_run_and_another_one_changes_it(trained):
    table, _, _ = trained
    again = train_cells([Cell(TASK, {"b": MODELS["b"]})], dict(training=TRAINING, seeds=[3]), lambda text: None)[0]
    first = table[(table["model"] == "b") & (table["seed"] == 3)].reset_index(drop=True)
    pd.testing.assert_frame_equal(again, first)
    other = table[(table["model"] == "b") & (table["seed"] == 0)]
    assert (other["loss"].to_numpy() != first["loss"].to_numpy()).all()  # the first loss, too: weights and batch differ


# --- reading curves ---


def test_steps_to_is_the_first_evaluation_that_is_good_enough_and_infinite_without_one():
    table = pd.concat(
        [course("b", 0, [0.1, 0.99, 0.5]), course("b", 1, [0.1, 0.98, 0.989]), course("a", 0, [1.0])], ignore_index=True
    )
    noise = table.assign(split="train", accuracy=1.0, step=1)  # rows of the training split must not count
    steps = learned.steps_to(pd.concat([noise, table], ignore_index=True), 0.99)
    expected = runs(("b", 0, 20.0), ("b", 1, math.inf), ("a", 0, 10.0), columns=["model", "seed", "steps"])
    pd.testing.assert_frame_equal(steps, expected)


def test_the_last_heldout_row_of_each_run_in_the_tables_order():
    table = pd.concat([course("b", 0, [0.1, 0.2]), course("a", 0, [0.9, 0.3, 0.4])], ignore_index=True)
    table.loc[len(table)] = {**table.iloc[-1], "split": "train", "step": 99, "accuracy": 0.77}
    last = learned.last_heldout(table)
    assert last[["model", "step", "accuracy"]].to_numpy().tolist() == [["b", 20, 0.2], ["a", 30, 0.4]]


def test_a_run_that_stopped_early_keeps_its_last_value_in_the_mean():
    table = pd.concat([course("b", 0, [0.2, 1.0]), course("b", 1, [0.4, 0.6, 0.9, 0.7])], ignore_index=True)
    expected = runs(
        (10, 0.3, 0.2, 0.4), (20, 0.8, 0.6, 1.0), (30, 0.95, 0.9, 1.0), (40, 0.85, 0.7, 1.0),
        columns=["step", "mean", "least", "largest"],
    )  # fmt: skip
    pd.testing.assert_frame_equal(learned.mean_course(table), expected)


def test_curves_are_drawn_in_the_tables_order_and_the_given_colors():
    table = pd.concat([course("b", 0, [0.2, 1.0]), course("a", 0, [0.5, 0.25])], ignore_index=True)
    figure = Figure()
    plots.draw_curves(figure.subplots(), table, colors={"a": "#010203"})
    drawn = figure.axes[0].get_lines()
    seeds, lines = ([line for line in drawn if (line.get_label() == "_seed") is thin] for thin in (True, False))
    assert [line.get_ydata().tolist() for line in seeds] == [[0.2, 1.0], [0.5, 0.25]]
    assert [line.get_label() for line in lines] == ["b", "a"]
    assert lines[1].get_ydata().tolist() == [0.5, 0.25]
    assert matplotlib.colors.to_hex(lines[1].get_color()) == "#010203"
    assert matplotlib.colors.to_hex(lines[0].get_color()) == plots.PALETTE[0].lower()


def test_panels_share_one_legend_and_mark_their_lines():
    table = pd.concat(
        [course(m, 0, [0.2, 1.0]).assign(kind=kind, chance=c) for kind, c in (("x_1", 0.1), ("y", 0.3)) for m in "ab"]
    )
    figure = plots.draw_panels(table, "step", panel="kind", title="t", lines={"goal": 0.9}, log="x", ticks=True)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["kind: x 1", "kind: y"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "goal", "chance"]
    drawn = [{line.get_label(): line.get_ydata()[0] for line in axes.get_lines()} for axes in figure.axes]
    assert [(found["goal"], found["chance"]) for found in drawn] == [(0.9, 0.1), (0.9, 0.3)]
    assert [text.get_text() for text in figure.axes[1].get_xticklabels()] == ["10", "20"]


def test_dots_are_rows_and_intervals_are_bands():
    table = course("b", 0, [0.2, 1.0]).assign(low=0.1, high=1.1)
    (dots,) = plots.draw_panels(table, "step", dots=True).axes[0].get_lines()
    assert (dots.get_linestyle(), dots.get_ydata().tolist()) == ("None", [0.2, 1.0])
    assert len(plots.draw_panels(table, "step").axes[0].collections) == 1

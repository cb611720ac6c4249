"""Every experiment at its smallest scale: it runs, its folder has its measurements, the command refuses bad input,
and a figure that fails costs no table. An unknown setting, or one of another kind, is refused before anything runs.
"""

import importlib
import json
import os
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from test_papers import unlisted

from kvlens.cli import main
from kvlens.cli import settings as commands
from kvlens.conversion import features
from kvlens.errors import KVLensError
from kvlens.files import check_folder
from kvlens.papers import EXPERIMENTS, find_experiment
from kvlens.papers.harness import run
from kvlens.papers.harness.run import COLLECTIONS, EXPERIMENT_FOLDER, with_settings
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.kvsa import induction_exact
from kvlens.papers.lecture import function_classes
from kvlens.tasks import TextTask
from kvlens.tasks.regression import SHIFTS

AT_PAPER_SCALE = {"compaction", "conversion-error", "softmax-conversion"}
"""Those of which the results have figures at it."""


def every_claim_holds(found, told):
    """But the bound of KVSA app. A for entries that its proof does not allow."""
    assert [c.what for c in found.comparisons if c.holds is False and "names no limit" not in c.claim] == []


def every_construction_and_setting_has_a_row(found, told):
    tiny, table = dict(induction_exact.induction_exact.scales["tiny"]), found.tables["error"]
    assert len(table) == 2 * len(tiny["sigmas"]) * len(tiny["slopes"]) * (1 + 2 * len(tiny["p1"]))
    shifted = table[table["construction"] == induction_exact.SHIFTED]
    assert set(shifted["d_model"]) == {tiny["d"]} and set(table["d_model"]) == {tiny["d"], 2 * tiny["d"]}
    assert (shifted["predicted"] == 0).all() and shifted["p1"].isna().all()


def every_curve_is_there_and_the_claims_of_architecture_hold(found, told):
    error = found.tables["error"]
    assert len(told) == 2 + 1 + 3  # two seeds, one more class, three more kinds of positions
    assert set(error["predictor"]) == {"transformer", *function_classes.BASELINES}
    assert set(error.loc[error["functions"] == "linear", "shift"]) == set(SHIFTS)
    assert not error.duplicated(["functions", "shift", "predictor", "seed", "n_examples"]).any()
    assert error["relative_error"].notna().all()
    settled = [c.holds for c in found.comparisons if "T(pi X)" in c.what or "the same with" in c.what or "refuse" in c.what]
    assert settled == [True] * 5


CHEAPEST = {
    "arithmetic",
    "coefficients",
    "dual-equivalence",
    "dual-layer",
    "gradient-descent",
    "hops",
    "ngram",
    "random-features",
}
"""Of every paper: a sixth of the time of all tiny runs. The others are slow."""
RECORDED = {"what", "paper", "ours", "claim", "holds", "judged", "untrained", "sample", "verdict", "evidence"}
BESIDES = {
    "induction-exact": [every_claim_holds, every_construction_and_setting_has_a_row],
    "landscape": [every_claim_holds],
    "function-classes": [every_curve_is_there_and_the_claims_of_architecture_hold],
}
"""Requirements for the tiny run of one experiment, in addition to those for all."""


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in CHEAPEST else [pytest.mark.slow]) for x in EXPERIMENTS])
def test_tiny_run_leaves_tables_figure_and_comparisons(name, tmp_path, monkeypatch, capsys):
    found, write = [], run.write_experiment

    def kept(it, *args, **kwargs):
        found.append(replace(it, figure=cache(it.figure)))
        return write(found[0], *args, **kwargs)

    monkeypatch.setattr(run, "write_experiment", kept)
    monkeypatch.setattr(features, "STEPS", 9)  # of learned features, which no setting of an experiment changes
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", name, "--scale", "tiny"]) == 0
    out, told = capsys.readouterr()
    folder = tmp_path / f"{name}-tiny"
    summary = json.loads((folder / "summary.json").read_text())
    assert set(os.listdir(folder)) == {"summary.json", *summary["files"]}
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (folder / "figure.svg").read_text()
    texts = [text.get_text() for text in found[0].figure().texts]
    assert f"kvlens reproduce {name} --scale tiny" in texts[-1]
    if "seeds" in summary["settings"]:
        assert f"; {len(summary['settings']['seeds'])} seed" in texts[-1]
    for axes in found[0].figure().axes:
        lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_") and len(line.get_xdata())]
        looks = {(str(x.get_color()), x.get_marker(), x.get_linestyle(), x.get_alpha()) for x in lines}
        assert len(looks) == len(lines), f"{axes.get_title(loc='left')}: two lines of the legend look alike"
    assert all((folder / file).stat().st_size > 1000 for file in summary["files"])
    for table_name, table in found[0].tables.items():
        assert len(table)
        pd.testing.assert_frame_equal(pd.read_parquet(folder / f"{table_name}.parquet"), table)
    assert {f"{table_name}.parquet" for table_name in found[0].tables} == {f for f in summary["files"] if f.endswith("parquet")}
    assert summary["comparisons"], "a reproduction shows the paper's numbers next to ours"
    for comparison in summary["comparisons"]:
        assert set(comparison) == RECORDED
        assert comparison["judged"] or comparison["holds"] is None
        assert comparison["what"] in out
    assert unlisted(name, [comparison["claim"] for comparison in summary["comparisons"]]) == [], "not on the paper's page"
    assert summary["settings"] == json.loads(json.dumps(dict(find_experiment(name).scales["tiny"])))
    assert summary["name"] == name and told.strip()
    for check in BESIDES.get(name, ()):
        check(found[0], told.splitlines())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_names_its_source_scales_and_cost(name):
    experiment = find_experiment(name)
    assert experiment.name == name
    assert experiment.source.split()[0].rstrip(",;") in ("KVSA", "ICLCA", "LECTURE", "DUAL")
    assert list(experiment.scales) == list(experiment.cost) == ["tiny", "small", "paper"][: 3 if name in AT_PAPER_SCALE else 2]


def test_a_scale_that_was_never_run_is_refused(capsys, tmp_path):
    assert main(["reproduce", "hops", "--scale", "paper", "--out", str(tmp_path / "o")]) == 2
    assert "there are tiny, small" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_tuple_is_the_values_of_a_setting_at_each_scale():
    more = dict(model={"d": (1, 2, 3), "act": "relu", "late": (..., ..., 0.1)}, sizes=({"a": 1}, {"b": 2}, None), seeds=[0])

    @run.experiment("KVSA", "?", cost=("now", "soon", "late"), **more)
    def a_name(settings, tell):
        tell(str(settings))

    assert (a_name.name, a_name.cost) == ("a-name", {"tiny": "now", "small": "soon", "paper": "late"})
    assert a_name.scales == {
        "tiny": dict(model={"d": 1, "act": "relu"}, sizes={"a": 1}, seeds=[0]),
        "small": dict(model={"d": 2, "act": "relu"}, sizes={"b": 2}, seeds=[0]),
        "paper": dict(model={"d": 3, "act": "relu", "late": 0.1}, sizes=None, seeds=[0]),
    }
    with pytest.raises(ValueError, match="shorter"):
        run.experiment("KVSA", "?", cost=("now", "soon", "late"), seeds=(0, 1))(lambda settings, tell: None)


def test_an_outcome_is_not_replaced_unasked_and_other_folders_never(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["reproduce", "gradient-descent", "--scale", "tiny", "--out", "o"]
    assert main(command) == 0
    assert main(command) == 2
    assert "already holds an experiment" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    assert main([*command[:-1], "mine", "--overwrite"]) == 2
    assert "left alone" in capsys.readouterr().err
    assert os.listdir(tmp_path / "mine") == ["notes.txt"]


def test_all_experiments_resume_and_share_their_runs(tmp_path, monkeypatch, capsys):
    """Killed in the second of three experiments; the third needs only runs of the second."""
    from kvlens.papers.kvsa import variants

    tiny = variants.variants.scales["tiny"]
    some, again = (
        replace(variants.variants, name=name, scales={"tiny": {**tiny, "variants": labels}})
        for name, labels in (("some", ["gate", "keys only"]), ("again", ["gate"]))
    )
    chosen, whole = [find_experiment("gradient-descent"), some, again], TextTask.sample
    monkeypatch.setattr("kvlens.papers.all_experiments", lambda: [replace(it, cost={"tiny": "x"}) for it in chosen])
    monkeypatch.chdir(tmp_path)
    drawn = []

    def sample(self, batch_size, generator, split="train"):
        drawn.append(split)
        if len(drawn) == 4:
            raise KeyboardInterrupt
        return whole(self, batch_size, generator, split)

    monkeypatch.setattr(TextTask, "sample", sample)
    command = ["reproduce", "--all", "--scale", "tiny", "--out", "results", "--runs", "kept"]
    assert main(command) == 130
    assert "training runs are kept in kept; the same command resumes them" in capsys.readouterr().err
    assert os.listdir("results") == ["gradient-descent-tiny"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "gradient-descent: its results are in results/gradient-descent-tiny" in out
    assert sorted(os.listdir("results")) == ["again-tiny", "gradient-descent-tiny", "some-tiny"]
    assert len(drawn) == 6 * 2 + 1  # only the step during which it was killed was drawn twice
    assert len(pd.read_parquet("results/again-tiny/course.parquet"))
    assert main([*command, "--overwrite"]) == 0
    out = capsys.readouterr().out
    assert "its results are in" not in out and out.count("written to results/") == 3 and len(drawn) == 6 * 2 + 1
    assert main([*command, "--set", "seeds=[1]"]) == 2
    assert main(["reproduce", "ngram", "--jobs", "0"]) == 2
    assert "--jobs must be" in capsys.readouterr().err


def test_an_inconclusive_verdict_is_printed_with_what_would_have_been_found(capsys):
    values = [0.1, -0.1, 0.2, -0.2, 0.3, -0.1]
    found = [Comparison.tested_on("w", "c", sample, ours=1.0) for sample in (values, values[:3], [1.0, 1.1, 1.2] * 2)]
    summary = dict(comparisons=[one.as_json() for one in found], differences=[], seconds=1.0, files=["f"])
    commands._print_summary(summary, Path("x"))
    first, few, clear = capsys.readouterr().out.split("\nw\n")[1:]
    spread = pd.Series(values).std()
    assert "mean of 6 values 0.03333, 95 % interval -0.173 to 0.2397; tested against 0" in " ".join(first.split())
    assert f"a mean {found[0].sample.detectable:.3g} away from it would have been found in 80 %" in " ".join(first.split())
    assert 1.9 * spread < found[0].sample.detectable < 2.1 * spread
    assert "3 values are too few for a verdict" in few and "80 %" not in clear and "holds" in clear


COMMAND = ["reproduce", "gradient-descent", "--scale", "tiny", "--out"]


def no_figure(*drawn):
    raise ZeroDivisionError("no axes")


def one_that_cannot_be_rendered(*drawn):
    figure = Figure()
    figure.text(0, 0, r"$\no_such_symbol$")
    return figure


def interrupted(*drawn):
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole_outcome(tmp_path_factory):
    """An experiment's folder, complete."""
    folder = tmp_path_factory.mktemp("whole") / "o"
    assert main([*COMMAND, str(folder)]) == 0
    return folder


@pytest.mark.parametrize("draw", [no_figure, one_that_cannot_be_rendered, interrupted])
def test_an_experiment_whose_figure_fails_keeps_its_tables(draw, whole_outcome, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module("kvlens.papers.dual.gradient_descent"), "draw", draw)
    assert main([*COMMAND, "x"]) == (130 if draw is interrupted else 2)
    error = capsys.readouterr().err.splitlines()[-1]
    if draw is not interrupted:
        assert error.startswith("kvlens: error: gradient-descent: the figure cannot be drawn (")
        assert error.endswith("); tables and summary.json are in x")
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert {*summary["files"], "summary.json"} == set(os.listdir("x")) == {"tasks.parquet", "summary.json"}
    for name in summary["files"]:
        kept, expected = (pd.read_parquet(folder / name) for folder in (tmp_path / "x", whole_outcome))
        pd.testing.assert_frame_equal(kept, expected, check_exact=True)
    check_folder(tmp_path / "x", EXPERIMENT_FOLDER, overwrite=True)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main([*COMMAND, "x", "--overwrite"]) == 0
    assert set(os.listdir("x")) == set(os.listdir(whole_outcome)) > {"figure.png", "figure.svg"}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.unhooked
def test_the_values_of_every_scale_are_values_of_every_other_and_null_is_not(experiment):
    it = find_experiment(experiment)
    for (scale, settings), other in product(it.scales.items(), it.scales.values()):
        for name, own in settings.items():
            value = other[name] or own
            if name == "distillation":  # which has no rates at one scale
                continue
            expected = {**settings, name: merged(name, own, value)}
            assert with_settings(it, scale, {name: value}).scales[scale] == expected
            if own:
                with pytest.raises(KVLensError, match=f"{experiment}: the setting {name} must be .*, got None"):
                    with_settings(it, scale, {name: None})


def merged(name, own, value):
    """Dictionaries that describe one thing keep the fields that are not named; collections are replaced."""
    if not isinstance(own, dict) or not isinstance(value, dict) or name in COLLECTIONS:
        return value
    return {key: merged(key, own.get(key), value[key]) if key in value else own[key] for key in {**own, **value}}


@pytest.mark.unhooked
def test_a_dictionary_changes_only_the_fields_that_it_names():
    it = find_experiment("variants")
    small = it.scales["small"]
    changed = with_settings(it, "small", {"training": {"steps": 5, "weight_decay": 0.5}}).scales["small"]
    assert changed == {**small, "training": {**small["training"], "steps": 5, "weight_decay": 0.5}}
    of_trained = find_experiment("coefficients")
    train = with_settings(of_trained, "small", {"train": {"task": {"length": 9}}}).scales["small"]["train"]
    own = of_trained.scales["small"]["train"]
    assert train == {**own, "task": {**own["task"], "length": 9}}
    mine = {"mine": dict(n_layers=1, d_model=8, d_head=4)}  # a collection is replaced
    assert with_settings(find_experiment("scaling"), "small", {"sizes": mine}).scales["small"]["sizes"] == mine


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("seeds=[]", "must be a nonempty list without repeats, such as [0], got []"),
        ("seeds=[1, 1]", "must be a nonempty list without repeats, such as [0], got [1, 1]"),
        ("seeds=[0, 1.5]", "entry 2, must be a whole number, at least 0, such as 0, got 1.5"),
        ('task={"vocab_size": true}', "vocab_size, must be a whole number, at least 1, such as 3, got True"),
        ('training={"steps": 0}', "steps, must be a whole number, at least 1, such as 6, got 0"),
        ('model={"d_model": "x"}', "d_model, must be a whole number"),
        ("model=3", "the setting model must be a nonempty dictionary"),
        ("rates=[NaN]", "must be a finite number, such as 0.01, got nan"),
        ("seedz=[1]", "did you mean 'seeds'?"),
        ('training={"stepz": 5}', "did you mean 'steps'?"),
        ('model={"d_modle": 8}', "did you mean 'd_model'?"),
        ('task={"lenght": 8}', "did you mean 'length'?"),
        (("random-features", "size=NaN"), "the setting size must be"),
        (("scaling", 'sizes={"mine": 3}'), "mine, must be a nonempty dictionary"),
        (("gpt2-text", "model=3"), "the setting model must be a nonempty string"),
        (("dual-variants", 'd_x={"linear": "x"}'), "linear, must be a whole number"),
        (("dual-variants", 'd_x={"linaer": 3}'), "'linaer'"),
    ],
)
@pytest.mark.unhooked
def test_the_command_says_what_is_wrong_and_leaves_no_results(word, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    experiment, setting = word if isinstance(word, tuple) else ("hops", word)
    assert main(["reproduce", experiment, "--scale", "tiny", "--set", setting]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / f"{experiment}-tiny").exists()

"""Every setting of every experiment with an invalid value: a clear message, before anything runs."""

import json
import math
from itertools import product

import pytest

from kvlens.cli import main
from kvlens.errors import KVLensError
from kvlens.experiments import EXPERIMENTS, all_experiments, find_experiment
from kvlens.experiments.shared.settings import COLLECTIONS, NUMBERS, WHOLE, changed_settings

pytestmark = pytest.mark.unhooked

WRONG = ([], {}, 0, -1, 10**14, 1.5, "x", ["x"], [[]], [0.5, "x"], True, None, math.nan, [math.nan], [-1], [10**14])
NAMES = {"model", "models", "facts_model", "tokenizer", "texts", "variants"}
"""Text that is looked up where it is used, and refused there."""
MAY_BE = {
    "0": {"seed", "prompt_seed", "first_context", "polish_steps", "distil_steps", "free_steps"},
    "1.5": {"size", "step_per_token", "learning_rate"},
    "true": {"taylor", "unclaimed"},
    "[-1]": {"slopes", "p1"},
    "[100000000000000]": {"slopes", "p1"},
}
"""Values that some settings do take, as JSON."""


def may_be(name, value, own):
    if name in NAMES and (value == "x" or value == ["x"]):
        return isinstance(value, list) is isinstance(own, list)
    if value is None:
        return own is None or name in ("tokenizer", "texts")
    return name in MAY_BE.get(json.dumps(value), ())


@pytest.mark.parametrize(("experiment", "scale"), [(it.name, scale) for it in all_experiments() for scale in it.scales])
def test_wrong_values_are_reported_before_anything_runs(experiment, scale):
    it = find_experiment(experiment)
    for (name, own), value in product(it.scales[scale].items(), WRONG):
        if (value == own and type(value) is type(own)) or may_be(name, value, own):
            continue
        try:
            changed_settings(it, scale, {name: value})
            words = "nothing"
        except KVLensError as refused:
            words = str(refused)
        assert f"{experiment}: the setting {name}" in words and "must" in words and "got" in words, (name, value, words)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_values_of_every_scale_are_values_of_every_other(experiment):
    it = find_experiment(experiment)
    for (scale, settings), other in product(it.scales.items(), it.scales.values()):
        for name in settings:
            if other[name] is not None and other[name] != []:
                expected = {**settings, name: merged(name, settings[name], other[name])}
                assert changed_settings(it, scale, {name: other[name]}).scales[scale] == expected


def merged(name, own, value):
    """Dictionaries that describe one thing keep the fields that are not named; collections are replaced."""
    if not isinstance(own, dict) or not isinstance(value, dict) or name in COLLECTIONS:
        return value
    return {key: merged(key, own.get(key), value[key]) if key in value else own[key] for key in {**own, **value}}


def test_a_dictionary_changes_only_the_fields_that_it_names():
    it = find_experiment("variants")
    small = it.scales["small"]
    changed = changed_settings(it, "small", {"training": {"steps": 5, "weight_decay": 0.5}}).scales["small"]
    assert changed == {**small, "training": {**small["training"], "steps": 5, "weight_decay": 0.5}}
    of_trained = find_experiment("coefficients")
    train = changed_settings(of_trained, "small", {"train": {"task": {"length": 9}}}).scales["small"]["train"]
    own = of_trained.scales["small"]["train"]
    assert train == {**own, "task": {**own["task"], "length": 9}}
    mine = {"mine": dict(n_layers=1, d_model=8, d_head=4)}  # a collection is replaced
    assert changed_settings(find_experiment("scaling"), "small", {"sizes": mine}).scales["small"]["sizes"] == mine


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("seeds=[]", "must be a nonempty list, such as"),
        ("seeds=[1, 1]", "must not repeat an entry, got 1 twice"),
        ("seeds=[0, 1.5]", "entry 2, must be a whole number from 0 to 1000000000, got 1.5"),
        ('task={"vocab_size": 1}', "vocab_size, must be at least 2, got 1"),
        ('training={"steps": 0}', "steps, must be at least 1, got 0"),
        ('model={"d_model": "x"}', "d_model, must be a whole number"),
        ("rates=[0]", "must be above 0"),
        ("seedz=[1]", "did you mean 'seeds'?"),
        ('training={"stepz": 5}', "has no field 'stepz'; did you mean 'steps'?"),
        ('model={"d_modle": 8}', "has no field 'd_modle'; did you mean 'd_model'?"),
        ('task={"lenght": 8}', "has no field 'lenght'; did you mean 'length'?"),
        ("rates=[NaN]", "must be a number above 0"),
        ('training={"learning_rate": NaN}', "learning_rate must be"),
        (("random-features", "size=1e9"), "the setting size must be"),  # at which nothing can be measured
        (("random-features", "size=NaN"), "the setting size must be"),
        (("dual-equivalence", "learning_rate=1e8"), "the setting learning_rate must be"),
        (("scaling", 'sizes={"mine": 3}'), "mine, must be a nonempty dictionary"),
    ],
)
def test_the_command_says_what_is_wrong_and_leaves_nothing(word, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    experiment, setting = word if isinstance(word, tuple) else ("hops", word)
    assert main(["reproduce", experiment, "--scale", "tiny", "--set", setting]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_settings_that_an_experiment_reads_are_those_that_it_has():
    with pytest.raises(KVLensError, match="did you mean 'linear'"):
        changed_settings(find_experiment("dual-variants"), "small", {"d_x": {"linaer": 3}})
    with pytest.raises(KVLensError, match="linear, must be a whole number"):
        changed_settings(find_experiment("dual-variants"), "small", {"d_x": {"linear": "x"}})
    only = changed_settings(find_experiment("dual-variants"), "small", {"d_x": {"linear": 3}, "steps": {"exponential": 3}})
    with pytest.raises(KVLensError, match="none for linear"):
        only.run(only.scales["small"], pytest.fail)


def test_every_declared_range_belongs_to_a_setting():
    def keys(value):
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return {*(value if isinstance(value, dict) else ()), *(key for one in inner for key in keys(one))}

    used = {key for it in all_experiments() for settings in it.scales.values() for key in keys(dict(settings))}
    assert set(WHOLE) | set(NUMBERS) <= used

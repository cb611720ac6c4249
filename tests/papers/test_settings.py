"""Settings that a user changes: a clear message about an unknown one or one of another kind, before anything runs."""

from itertools import product

import pytest

from kvlens.cli import main
from kvlens.errors import KVLensError
from kvlens.papers import EXPERIMENTS, find_experiment
from kvlens.papers.harness.run import COLLECTIONS, with_settings

pytestmark = pytest.mark.unhooked


@pytest.mark.parametrize("experiment", EXPERIMENTS)
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
        (("dual-variants", 'd_x={"linaer": 3}'), "none for linaer"),
    ],
)
def test_the_command_says_what_is_wrong_and_leaves_no_results(word, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    experiment, setting = word if isinstance(word, tuple) else ("hops", word)
    assert main(["reproduce", experiment, "--scale", "tiny", "--set", setting]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / f"{experiment}-tiny").exists()

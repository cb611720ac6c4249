"""Two runs of equal settings leave equal bytes, however long each took; only ``seconds.json`` holds the time."""

from dataclasses import replace
from time import perf_counter

import pytest
import torch
from safetensors.torch import load

from kvlens import KVLensError
from kvlens.files.tensors import checked_tensor_bytes
from kvlens.training import find_recipe, train_recipe

OFTEN = dict(steps=4, batch_size=3, eval_every=2, eval_sequences=3, checkpoint_every=1)
LINEAR = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
HYBRID = LINEAR | {
    f"linear_{name}": n for name, n in dict(num_key_heads=2, num_value_heads=2, key_head_dim=8, value_head_dim=8).items()
}
RECIPES = {
    "induction": replace(
        find_recipe("induction"),
        task_settings=dict(vocab_size=13, length=9),
        model=dict(n_layers=1, d_model=12, d_head=6, attn_only=True, kv_shift={}),
        training={**OFTEN, "watch": "shift_coef"},
    ),
    "facts-hybrid": replace(
        find_recipe("facts-hybrid"), model=find_recipe("facts-hybrid").model | HYBRID, training={**OFTEN, "batch_size": 2}
    ),
}


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", RECIPES)
def test_two_runs_of_equal_settings_leave_equal_bytes(name, tmp_path, monkeypatch):
    monkeypatch.setattr("kvlens.training.ship.MEASURED_SEQUENCES", 4)
    monkeypatch.setattr("kvlens.tasks.facts.task.MEASURED_STORIES", 2)
    spent, held = [], []
    for pace, folder in ((1, tmp_path / "a"), (1000, tmp_path / "b")):
        monkeypatch.setattr("kvlens.training.run.perf_counter", lambda pace=pace: pace * perf_counter())
        torch.manual_seed(pace)  # which no run draws from
        spent.append(train_recipe(RECIPES[name], folder, device="cpu", progress=False)["seconds"])
        held.append(contents(folder))
    assert spent[1] > 30 * spent[0] > 0
    times = [files.pop("seconds.json", None) for files in held]
    assert held[0] == held[1] and "model/training.json" in held[0]
    assert times == [None, None] or times[0] != times[1]


def test_the_time_of_a_run_survives_a_resumption(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlens.training.ship.MEASURED_SEQUENCES", 4)
    first = train_recipe(RECIPES["induction"], tmp_path / "r", device="cpu", progress=False)["seconds"]
    (tmp_path / "r" / "seconds.json").write_text("5000.5\n")
    again = train_recipe(RECIPES["induction"], tmp_path / "r", device="cpu", progress=False)["seconds"]
    assert 0 < first < 5000.5 < again
    (tmp_path / "r" / "seconds.json").write_text("-1")
    with pytest.raises(KVLensError, match=r"seconds.json must be at least 0, got -1"):
        train_recipe(RECIPES["induction"], tmp_path / "r", device="cpu", progress=False)
    (tmp_path / "r" / "seconds.json").unlink()
    assert train_recipe(RECIPES["induction"], tmp_path / "r", device="cpu", progress=False)["seconds"] < 5000


def test_equal_tensors_and_metadata_are_equal_bytes():
    metadata = {f"{letter}\n{n}é": "x" * n for n, letter in enumerate("hgfedcba")}
    tensors = {"b": torch.arange(3, dtype=torch.int8), "a": torch.ones(2, 5)}
    turned = [dict(reversed(entries.items())) for entries in (tensors, metadata)]
    one, other = checked_tensor_bytes(tensors, metadata), checked_tensor_bytes(*turned)
    assert one == other
    assert torch.equal(load(one)["a"], tensors["a"]) and torch.equal(load(one)["b"], tensors["b"])

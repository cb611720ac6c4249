"""Recipes train softmax models in the fused form, whose losses are those of the eager one, and leave no trace of it."""

from dataclasses import replace

import pandas as pd
import pytest
from tiny_runs import SETTINGS

from kvlens import HookedKVTransformer
from kvlens.training.recipes import find_recipe
from kvlens.training.ship import train_recipe

MODEL = dict(n_layers=2, d_model=12, d_head=6, attn_only=True)


def trained(folder, **model):
    task = dict(vocab_size=13, length=9)
    recipe = replace(find_recipe("induction"), task_settings=task, model={**MODEL, **model}, training=SETTINGS)
    train_recipe(recipe, folder, device="cpu", progress=False)
    return pd.read_parquet(folder / "metrics.parquet"), HookedKVTransformer.load(folder / "model")


@pytest.mark.parametrize("shift", [None, {}])
def test_losses_are_those_of_the_eager_form_and_the_model_keeps_its_own(shift, tmp_path, fused_calls):
    eager, _ = trained(tmp_path / "eager", kv_shift=shift, softmax_form="eager")
    assert not fused_calls
    fused, model = trained(tmp_path / "fused", kv_shift=shift)
    assert fused_calls
    assert model.cfg.softmax_form == "eager"
    assert (eager["loss"] - fused["loss"]).abs().max() < 1e-4  # float32 rounding through twelve steps; losses are near 2.5


def test_a_recipe_that_names_a_form_has_it_in_its_model(tmp_path, fused_calls):
    assert trained(tmp_path / "run", softmax_form="fused")[1].cfg.softmax_form == "fused"
    assert fused_calls

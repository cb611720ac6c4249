"""The effect of an intervention has the same sign in every table, intervened minus original, with the same description."""

import importlib
import pkgutil

import pandas as pd
import pytest
import torch
from kvlens.analyses.batch.work import load_analysis
from kvlens.analyses.declaration import Columns
from kvlens.analyses.predictions import EFFECT, KL, LOGIT_CHANGE, LOSS_CHANGE, OUTPUT_SHARE
from pictures import data_of
from repeated_models import heads_and_verdicts, two_layer_circuit
from small_models import sharp

from kvlens import analyses, convert_prompt
from kvlens.analyses import (
    ANALYSES,
    bias_ablation,
    bias_by_head,
    bias_by_layer,
    bias_decomposition,
    bias_effects,
    bias_positions,
    dual_demonstrations,
    prompt_by_depth,
)
from kvlens.viz import depth_map

EFFECTS = dict.fromkeys(("effect", "swap", "converse", "whole"), EFFECT)
WORDS = {"loss_change": LOSS_CHANGE, "logit_change": LOGIT_CHANGE, "kl": KL, "output_share": OUTPUT_SHARE, **EFFECTS}
"""How the name of such a column ends, and how its text begins."""
OTHER_WORDS = ("rises", "falls", "rise of", "change of", "minus")
"""Other wordings, which no column may use."""


def declared():
    """(where, column, meaning) of every table in ``analyses``, those that no command runs included."""
    modules = [name for _, name, _ in pkgutil.walk_packages(analyses.__path__, "kvlens.analyses.") if "__main__" not in name]
    tables = {id(t): (name, t) for name in modules for t in vars(importlib.import_module(name)).values() if type(t) is Columns}
    return [(where, name, column.meaning) for where, table in tables.values() for name, column in table.items()]


def test_the_words_agree():
    assert {id(load_analysis(name).columns) for name in ANALYSES} and len(declared()) > 150
    found = []
    for where, name, meaning in declared():
        words = [text for end, text in WORDS.items() if name == end or name.endswith(f"_{end}")]
        found += words
        begins = meaning.startswith("".join(words))
        rest = meaning.removeprefix("".join(words))
        assert begins and not any(word in rest for word in OTHER_WORDS), f"{where}: {name}: {meaning}"
    assert {text: found.count(text) for text in WORDS.values()} == {
        **{LOSS_CHANGE: 9, LOGIT_CHANGE: 2, KL: 7, EFFECT: 10},
        OUTPUT_SHARE: 3,
    }


def test_a_column_that_says_it_otherwise_is_found(monkeypatch):
    column = Columns(loss_change=("float64", "with minus without: negative where the prompt helps"))
    monkeypatch.setattr("kvlens.analyses.readings.DEPTHS", column)
    with pytest.raises(AssertionError, match=r"kvlens.analyses.readings: loss_change: with minus"):
        test_the_words_agree()


@torch.no_grad()
def test_what_helps_has_a_positive_change_of_the_loss_in_every_table():
    """The text repeats the prompt: head 1.2 finds the next token there, and without it or the prompt none is predictable."""
    model, piece = two_layer_circuit(), torch.tensor([3, 7, 1, 9, 4, 6])
    bias = convert_prompt(model, piece)

    def loss(*before, hooks=()):
        logits = model.run_with_hooks(torch.cat([*before, piece])[None], fwd_hooks=list(hooks))[0, -len(piece) : -1]
        return float(-logits.log_softmax(dim=-1).gather(-1, piece[1:, None]).mean())

    with model.kv_bias(bias):
        whole = loss()
    with model.kv_bias(bias.select(heads=[(0, head) for head in range(3)] + [(1, 0), (1, 1)])):
        without_head = loss()
    with model.kv_bias(bias.select(layers=[0])):
        without_layer = loss()
    assert without_head - whole > 0.5
    by_head, by_layer = bias_by_head(model, piece, piece), bias_by_layer(model, piece, piece)
    effects = bias_effects(model, bias, piece, by="head")
    is_head = {name: (table["layer"] == 1) & (table["head"] == 2) for name, table in (("by_head", by_head), ("all", effects))}
    near = dict(rel=1e-9, abs=1e-12)
    assert by_head.loc[is_head["by_head"], "loss_change"].item() == pytest.approx(without_head - whole, **near)
    assert effects.loc[is_head["all"], "loss_change"].item() == pytest.approx(without_head - whole, **near)
    assert effects.loc[is_head["all"], "logit_change"].item() < -0.1
    assert bias_ablation(model, bias, piece, [[(1, 2)]])["loss_change"].item() == pytest.approx(without_head - whole, **near)
    assert by_layer["loss_change"].iloc[1] == pytest.approx(without_layer - whole, **near)

    depths = prompt_by_depth(model, piece, piece, baseline=piece[:0])
    end = depths.loc[depths["layer"] == 2, "loss_change"].mean()
    assert end == pytest.approx(loss() - loss(piece), **near) and end > 0.5
    picture = depth_map(depths)
    assert "without minus with" in picture.body and data_of(picture)["means"][0] == 0

    resampled = heads_and_verdicts(model, prompt=piece, ablations=True)
    row = resampled[(resampled["layer"] == 1) & (resampled["head"] == 2)].iloc[0]
    assert (
        row["ablation_loss_change"] > 0.5 and row["prefix_matching_loss_change"] > 0.5 and row["ablation_logit_change"] < -0.1
    )


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_output_share_is_one_thing_in_every_table(attention):
    """Of the last text position: position by position, as demonstrations of its dual model, and of the bias as a whole."""
    model = sharp(attention=attention, dtype=torch.float64)
    prompt, text = torch.tensor([3, 7, 1, 9]), torch.tensor([4, 6, 2])
    by_position = bias_positions(model, prompt, text, at=[2]).query("part == 'prompt'")
    demonstrations = dual_demonstrations(model, torch.cat([prompt, text]), n_demonstrations=len(prompt))
    names = ["layer", "head", "prompt_position", "output_share"]
    for frame in (by_position, demonstrations):
        assert set(names) < set(frame.columns)
    pd.testing.assert_frame_equal(by_position[names].reset_index(drop=True), demonstrations[names], rtol=1e-10, atol=1e-12)
    pooled = bias_positions(model, prompt, text).query("part == 'prompt'").groupby(["layer", "head"])["output_share"].sum()
    whole = bias_decomposition(model, prompt, text).set_index(["layer", "head"])["output_share"]
    pd.testing.assert_series_equal(pooled, whole, rtol=1e-10, atol=1e-12)


def test_one_word_for_a_position_in_every_table():
    """``position`` is where the text is read or predicted, ``prompt_position`` what is read there, ``attention`` how much."""
    for name in ANALYSES:
        columns = set(load_analysis(name).columns)
        assert not columns & {"query", "key", "text_position", "place", "pos", "query_position"}, name

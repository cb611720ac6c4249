"""``compaction``: measurements against slow references, and verdicts in both directions."""

import numpy as np
import pandas as pd
import pytest
import torch
from precision import LAW

from kvlens import convert_prompt
from kvlens.papers.iclca import compaction
from kvlens.papers.iclca.logits import context_of, writing_model

TINY = {**compaction.compaction.scales["tiny"], "n_prompt": 9, "keys": [3, 9]}
KEPT = [*compaction.METHODS]
THOUGHTS = [compaction.VECTORS, compaction.MATRICES]
CHANGED = [compaction.TOKENS, *THOUGHTS, "distillation, rank 1", "distillation, all entries"]


@pytest.fixture(scope="module")
def measured():
    model = writing_model(TINY).to(torch.float64, print_details=False)
    found = list(compaction.measured(model, TINY, context=2, length=9))
    names = [row["method"] for table, row in found if table == "contexts"]
    assert names == ["prompt left out", "every key kept", *KEPT, *CHANGED]  # 9 keys would be all of them
    return model, {row["method"]: row for table, row in found if table == "contexts"}


def test_stored_numbers(measured):
    """Two layers of four heads of 32, d_model 128, MLPs of 512; a key has a value and a weight."""
    _, rows = measured
    stored = {name: row["stored_numbers"] for name, row in rows.items()}
    assert stored["prompt left out"] == 0 and stored["every key kept"] == 9 * 2 * 4 * 65
    assert {stored[name] for name in KEPT[:5]} == {3 * 2 * 4 * 65}
    assert all(stored[name] <= 3 * 2 * 4 * 65 for name in KEPT)  # some fitted weights may be 0
    assert stored["token patches, for one text"] == 4 * 2 * 3 * 128
    assert stored["thought vectors"] == 2 * 2 * 128 and stored["thought matrices"] == 2 * 128 * 129
    assert stored["distillation, rank 1"] == 2 * (4 * 256 + 2 * 640)
    assert stored["distillation, all entries"] == 2 * 12 * 128**2


def test_token_patches_and_every_key_are_exact(measured):
    _, rows = measured
    assert rows["every key kept"]["relative_error"] < LAW and rows["every key kept"]["same_continuation"] == 1
    assert rows["token patches, for one text"]["relative_error"] < LAW
    assert all(0 < rows[name]["relative_error"] < 10 for name in [*KEPT, *CHANGED[1:]])
    assert all(np.isfinite(row["kl_95"]) and row["cpu_seconds"] >= 0 for row in rows.values())


def test_errors_are_those_of_the_logits(measured):
    """By hand, with the texts read after prompt, bias and BOS in full."""
    model, rows = measured
    prompt, texts = context_of(model, TINY, seed=2)
    method = dict(compaction.methods(3, TINY, seed=2))["StreamingLLM"]
    old = model(torch.cat([prompt.expand(len(texts), -1), texts], dim=1))[:, len(prompt) :]
    with model.kv_bias(convert_prompt(model, prompt, method=method, verbose=False)):
        new = model(texts)
    relative = (new - old).norm(dim=-1) / old.norm(dim=-1)
    found = rows["StreamingLLM"]
    assert found["relative_error"] == pytest.approx(float(relative.mean()), rel=LAW)
    assert found["largest_relative_error"] == pytest.approx(float(relative.max()), rel=LAW)
    kl = (old.softmax(dim=-1) * (old.log_softmax(dim=-1) - new.log_softmax(dim=-1))).sum(dim=-1)
    assert found["kl"] == pytest.approx(float(kl.mean()), rel=LAW)
    assert found["kl_95"] == pytest.approx(float(np.quantile(kl.detach(), 0.95)), rel=LAW)


def test_the_prompts_whole_effect_is_that_of_all_but_its_bos(measured):
    model, rows = measured
    assert rows["prompt left out"]["effect_lost"] == pytest.approx(1)
    prompt, texts = context_of(model, TINY, seed=2)
    old = model(torch.cat([prompt.expand(len(texts), -1), texts], dim=1))[:, len(prompt) :]
    hidden = convert_prompt(model, prompt, without=[(1, len(prompt))])
    with model.kv_bias(hidden):
        without = model(texts)
    expected = float(((without - old).norm(dim=-1) / old.norm(dim=-1)).mean())
    assert rows["prompt left out"]["relative_error"] == pytest.approx(expected, rel=LAW)


def test_facts_are_counted_by_hand():
    """Only answers that are right with the story count; intervals are over stories."""
    rows = [
        ("a", 0, 0, True, True, 0.1),
        ("a", 0, 1, True, False, 2.0),
        ("a", 1, 0, True, True, 0.3),
        ("a", 1, 1, False, True, 9.0),
    ]
    columns = ["method", "story", "sentence", "right_with_story", "is_right", "loss"]
    answers = pd.DataFrame(rows, columns=columns).assign(stored_numbers=6.0)
    (row,) = compaction.kept(answers, []).to_dict("records")
    assert (row["n_answers"], row["n_kept"], row["stored_numbers"]) == (3, 2, 6.0)
    assert row["mean_loss"] == pytest.approx(0.8)
    assert row["loss_interval"] == pytest.approx(1.96 * np.std([1.05, 0.3], ddof=1) / 2**0.5)
    by_sentence = compaction.kept(answers, ["sentence"]).set_index("sentence")
    assert by_sentence["share_kept"].tolist() == [1.0, 0.0] and by_sentence["mean_loss"].tolist() == [pytest.approx(0.2), 2.0]

"""``compaction``: measurements against slow references, and verdicts in both directions."""

import numpy as np
import pandas as pd
import pytest
import torch

from kvlens import convert_prompt
from kvlens.experiments.iclca import compaction
from kvlens.experiments.iclca.softmax_conversion import context_of, writing_model

TINY = {**compaction.EXPERIMENT.scales["tiny"], "n_prompt": 9, "keys": [3]}


@pytest.fixture(scope="module")
def measured():
    model = writing_model(TINY)
    return model, {row["method"]: row for row in compaction.measured(model, TINY, context=2)}


def test_every_method_is_measured_once(measured):
    _, rows = measured
    assert set(rows) == {"prompt left out", *compaction.METHODS}
    assert all(
        row["stored_numbers"] <= rows["KVzip"]["stored_numbers"] for name, row in rows.items() if name != "prompt left out"
    )


def test_errors_are_those_of_the_logits(measured):
    """By hand, with the texts read after prompt, bias and BOS in full."""
    model, rows = measured
    prompt, texts = context_of(model, TINY, seed=2)
    method = dict(compaction.methods(3, TINY, seed=2))["StreamingLLM"]
    old = model(torch.cat([prompt.expand(len(texts), -1), texts], dim=1))[:, len(prompt) :].double()
    with model.kv_bias(convert_prompt(model, prompt, method=method, verbose=False)):
        new = model(texts).double()
    relative = (new - old).norm(dim=-1) / old.norm(dim=-1)
    found = rows["StreamingLLM"]
    assert found["relative_error"] == pytest.approx(float(relative.mean()), rel=1e-4)
    assert found["largest_relative_error"] == pytest.approx(float(relative.max()), rel=1e-4)
    kl = (old.softmax(dim=-1) * (old.log_softmax(dim=-1) - new.log_softmax(dim=-1))).sum(dim=-1)
    assert found["kl"] == pytest.approx(float(kl.mean()), rel=1e-3, abs=1e-7)
    assert found["kl_95"] == pytest.approx(float(np.quantile(kl.detach(), 0.95)), rel=1e-3, abs=1e-7)


def test_the_prompts_whole_effect_is_that_of_all_but_its_bos(measured):
    model, rows = measured
    assert rows["prompt left out"]["effect_lost"] == pytest.approx(1)
    prompt, texts = context_of(model, TINY, seed=2)
    old = model(torch.cat([prompt.expand(len(texts), -1), texts], dim=1))[:, len(prompt) :].double()
    hidden = convert_prompt(model, prompt, without=[(1, len(prompt))])
    with model.kv_bias(hidden):
        without = model(texts).double()
    expected = float(((without - old).norm(dim=-1) / old.norm(dim=-1)).mean())
    assert rows["prompt left out"]["relative_error"] == pytest.approx(expected, rel=1e-4)


def made_table(factor: float, noise: float) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    rows = [
        {
            "context": context,
            "method": method,
            "keys_per_head": 4,
            "relative_error": (factor if method == compaction.OURS else 1.0) * (1 + noise * generator.normal()),
        }
        for context in range(8)
        for method in compaction.METHODS
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(("factor", "noise", "verdict"), [(0.7, 0.05, True), (1.4, 0.05, False)])
def test_verdicts_go_either_way(factor, noise, verdict):
    found = [comparison.holds for comparison in compaction.compare(made_table(factor, noise))]
    assert found == [verdict] * (len(compaction.METHODS) - 1)


def test_equal_methods_are_inconclusive():
    found = [comparison.holds for comparison in compaction.compare(made_table(1.0, 0.05))]
    assert found.count(None) >= len(found) - 1

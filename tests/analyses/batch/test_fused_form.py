"""Batches run softmax models fused if an analysis does not hook the pattern; the numbers equal the eager ones."""

import pandas as pd
import pyarrow as pa
import pytest
import torch
from kvlens.analyses.batch.work import Work
from kvlens.analyses.batch.worker import Job, Worker
from kvlens.analyses.declaration import Record
from tiny_text_model import PROMPT, TEXT, tiny_text_model

from kvlens.analyses import prompt_copies, prompt_effect


@pytest.fixture
def folder(tmp_path):
    tiny_text_model(attention="softmax", dtype=torch.float64).save(tmp_path / "model")
    return tmp_path / "model"


def table_of(analysis, folder):
    worker = Worker(Work(analysis=analysis, models=(str(folder),), device="cpu"))
    result = worker.run(Job(0, ((0, Record(id="0", prompt=PROMPT, text=TEXT)),)))[0]
    assert result.error is None
    return pa.ipc.open_stream(result.rows).read_all().to_pandas(), worker.models[0]


def test_predictions_come_from_the_fused_kernel(folder, fused_calls):
    table, model = table_of("prompt_effect", folder)
    assert fused_calls
    assert model.cfg.softmax_form == "eager"
    fused_calls.clear()
    expected = prompt_effect(model, PROMPT, TEXT)
    assert not fused_calls
    pd.testing.assert_frame_equal(table[expected.columns], expected, rtol=1e-10, atol=1e-12)


def test_an_analysis_of_patterns_finds_the_same(folder):
    table, model = table_of("prompt_copies", folder)
    expected = prompt_copies(model, PROMPT, TEXT)
    pd.testing.assert_frame_equal(table[expected.columns], expected, check_dtype=False, rtol=1e-10, atol=1e-12)

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


@pytest.mark.parametrize("analysis", [prompt_effect, prompt_copies], ids=lambda analysis: analysis.__name__)
def test_a_batch_runs_unhooked_patterns_fused_and_finds_the_same(analysis, tmp_path, fused_calls):
    tiny_text_model(attention="softmax", dtype=torch.float64).save(tmp_path / "model")
    worker = Worker(Work(analysis.__name__, (str(tmp_path / "model"),), device="cpu"))
    result = worker.run(Job(0, ((0, Record(id="0", prompt=PROMPT, text=TEXT)),)))[0]
    assert result.error is None
    assert fused_calls or analysis is prompt_copies  # which looks at patterns
    model = worker.models[0]
    assert model.cfg.softmax_form == "eager"
    fused_calls.clear()
    table, expected = pa.ipc.open_stream(result.rows).read_all().to_pandas(), analysis(model, PROMPT, TEXT)
    assert not fused_calls
    pd.testing.assert_frame_equal(table[expected.columns], expected, check_dtype=False, rtol=1e-10, atol=1e-12)

"""Every benchmark runs at a small size and checks its answer; what it measures is not looked at."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import bench_conversion_error
import bench_linear_attention
import bench_model


def test_linear_attention_smoke(capsys):
    bench_linear_attention.main(["--small"])
    assert "speed-up" in capsys.readouterr().out


def test_model_smoke(capsys):
    bench_model.main(["--small"])
    assert "conversion over a forward pass" in capsys.readouterr().out


def test_conversion_error_smoke(capsys):
    bench_conversion_error.main(["--largest", "3e5", "--pairs", "3"])
    out = capsys.readouterr().out
    assert "float64, 205 K parameters" in out
    assert "NO" not in out.split("float64")[1]  # the exact part holds at any size


def test_the_float64_forward_of_the_error_benchmark_is_a_float64_forward():
    model = bench_conversion_error.make_model(205e3)
    exact = bench_conversion_error.make_model(205e3, dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    tokens, _ = bench_conversion_error.pairs(2, seed=0)
    torch.testing.assert_close(bench_conversion_error.float64_logits(model, tokens), exact(tokens), rtol=1e-12, atol=1e-12)
    assert next(model.parameters()).dtype == torch.float32


def test_a_wrong_answer_is_not_timed():
    from timing import check_close

    with pytest.raises(SystemExit, match="wrong answer"):
        check_close(torch.ones(3), torch.zeros(3) + 2, 1e-3, "x")

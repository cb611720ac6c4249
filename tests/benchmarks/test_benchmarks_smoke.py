"""Every benchmark runs at a small size and checks its answer; what it measures is not looked at."""

import json
from importlib.metadata import version

import bench_attention_variants
import bench_attribution
import bench_attribution_cost
import bench_bridge
import bench_bridge_exactness
import bench_conversion_error
import bench_delta_rule
import bench_dual_losses
import bench_edges
import bench_exact_conversion
import bench_fit_error
import bench_induction_heads
import bench_kvpress
import bench_linear_attention
import bench_long_prompts
import bench_model
import bench_notes
import bench_null
import bench_real_sizes
import bench_softmax_conversion
import bench_speed
import bench_statements
import bench_training
import kvlens.analyses.attribution.explain as explaining
import pytest
import torch


def test_attribution_cost_smoke(capsys):
    bench_attribution_cost.main(["--small", "--kinds", "linear"])
    assert capsys.readouterr().out.count("layers 1 to 2") == 6


def test_linear_attention_smoke(capsys):
    bench_linear_attention.main(["--small"])
    assert "speed-up" in capsys.readouterr().out


def test_delta_rule_smoke(capsys):
    bench_delta_rule.main(["--small"])
    assert "time over Transformers'" in capsys.readouterr().out


def test_bridge_smoke(capsys):
    # with Transformers 5.24, the plain bridge of TransformerLens 3.9, with which ours is compared, cannot run delta-rule layers
    recurrent = "bamba" if version("transformer-lens").startswith("3.") else "qwen3_5"
    bench_bridge.main(["--small", "--families", "gpt2", recurrent])
    assert capsys.readouterr().out.count("nothing attached: ") == 2


def test_bridge_exactness_smoke(capsys):
    bench_bridge_exactness.main(["--families", "gpt2", "--seeds", "2"])
    assert capsys.readouterr().out.count("NO") == 0


def test_real_sizes_smoke(tmp_path, monkeypatch, capsys):
    """One of its processes; the benchmark starts one for each model and front end."""
    monkeypatch.setattr(explaining, "sets_of", explaining.sets_of)  # which the process changes
    monkeypatch.setattr(explaining.Outcomes, "verdict", explaining.Outcomes.verdict)
    bench_real_sizes.write_folder("tiny", tmp_path)
    bench_real_sizes.child(tmp_path, "kvlens", 12, ["convert", "explain", "report"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found.keys() == {"imports", "load", "convert", "explain", "report"}
    answer = json.loads((tmp_path / "report" / "summary.json").read_text())["answer"]
    assert len(answer["cause"]) == 1 and (tmp_path / "report" / "answer_heads.parquet").is_file()


def test_statements_smoke(tmp_path, capsys):
    given = ["--out", str(tmp_path), "--models", "facts-gpt2", "--stories", "1", "--bounds", "1"]
    bench_statements.main(given)
    assert " 0 false; lost in 1" in capsys.readouterr().out
    (row,) = (tmp_path / "facts-gpt2.jsonl").read_text().splitlines()
    bench_statements.main(given)  # resumes with nothing left to do
    assert (tmp_path / "facts-gpt2.jsonl").read_text() == row + "\n"


def test_long_prompts_smoke(capsys):
    bench_long_prompts.main(["--small", "--kinds", "llama", "--methods", "kvzip"])
    assert capsys.readouterr().out.count("error by block") == 1


def test_kvpress_smoke(capsys):
    """kvlens' half only; kvpress needs an environment of its own."""
    bench_kvpress.main(["--seeds", "1"])
    assert capsys.readouterr().out.count("144 of 144 kept keys are those of itself") == 5


def test_model_smoke(capsys):
    bench_model.main(["--small"])
    assert "conversion over a forward pass" in capsys.readouterr().out


def test_training_smoke(capsys):
    bench_training.main(["--small"])
    assert capsys.readouterr().out.count("throughput over plain TransformerLens") == 2


def test_induction_heads_smoke(capsys):
    bench_induction_heads.main(["--small"])
    assert "induction_verdicts over the forward pass" in capsys.readouterr().out


def test_attention_variants_smoke(capsys):
    bench_attention_variants.main(["--small"])
    assert capsys.readouterr().out.count("speed over plain attention") == 7


def test_dual_losses_smoke(capsys):
    bench_dual_losses.main(["--small"])
    assert "without cosines over a forward pass" in capsys.readouterr().out


def test_notes_smoke(capsys):
    bench_notes.main(["--stories", "3", "--patched", "2"])
    printed = capsys.readouterr().out
    assert "same head: 2 of 2" in printed and "same position: 2 of 2" in printed


def test_edges_smoke(capsys):
    if version("transformer-lens").startswith("3."):
        pytest.skip("TransformerLens 3.9 attributes to nodes only, not to edges")
    bench_edges.main(["--models", "facts-hops-gpt2", "--stories", "1"])
    assert "facts-hops-gpt2 1 stories" in capsys.readouterr().out


def test_bounds_of_shares_are_those_of_the_binomial_distribution():
    """n of n: level^(1/n); one of n: 1 - (1 - level)^(1/n)."""
    assert bench_notes.lower_bound(60, 60) == pytest.approx(0.05 ** (1 / 60), abs=1e-9)
    assert bench_notes.lower_bound(1, 7) == pytest.approx(1 - 0.95 ** (1 / 7), abs=1e-9)
    assert bench_notes.lower_bound(0, 7) == 0.0


def test_null_smoke(capsys):
    bench_null.main(["--units", "20", "--prompts", "1"])
    printed = capsys.readouterr().out
    assert "of 20 unrelated units significant" in printed and "of 5 sets of four with any" in printed


def test_conversion_error_smoke(capsys):
    bench_conversion_error.main(["--pairs", "3"])
    out = capsys.readouterr().out
    assert "float64" in out
    assert "NO" not in out


def test_exact_conversion_smoke(capsys):
    bench_exact_conversion.main(["--models", "gpt2", "--prompts", "2", "--scaled", "", "Q"])
    out = capsys.readouterr().out
    assert out.count("gpt2, ") == 4
    assert "NO" not in out


def test_fit_error_smoke(capsys):
    bench_fit_error.main(["--small", "--polish-steps", "2"])
    out = capsys.readouterr().out
    assert out.count("off by, median") == 4
    assert "polishing is better in" in out


def test_speed_smoke(capsys):
    rows = [row for row in bench_speed.ROWS if row != "convert"]  # a process of its own
    bench_speed.main(["--small", "--threads", "1", "--only", *rows])
    out = capsys.readouterr().out
    assert out.count("ratio:") == 9
    assert out.count("times faster than Hugging Face") == 3


def test_softmax_conversion_smoke(capsys):
    bench_softmax_conversion.main(["--small", "--threads", "1"])
    out = capsys.readouterr().out
    assert out.count("converting, in forward passes") == 2
    assert "reference queries" in out


def test_a_wrong_answer_is_not_timed():
    from timing import check_close

    with pytest.raises(SystemExit, match="wrong answer"):
        check_close(torch.ones(3), torch.zeros(3) + 2, 1e-3, "x")


@pytest.mark.unhooked  # a stand-in for a question looks its scores up
@pytest.mark.parametrize("model", ["facts-gpt2", "facts-linear"])
def test_attribution_smoke(model, capsys):
    bench_attribution.main(["--small", "--model", model])
    out = capsys.readouterr().out
    assert "of the ceiling" in out
    assert "leave one out" in out

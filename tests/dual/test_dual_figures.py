"""The figures of all heads and queries at once, against DualModel head by head and query by query."""

import pandas as pd
import pytest
import torch
from dual_models import LINEAR, SOFTMAX, model_of, text_for
from small_models import small_model

from kvlens import convert_prompt
from kvlens.analyses import dual_demonstrations, dual_losses
from kvlens.dual import DualModel
from kvlens.dual import figures as figures_module

CLOSE = dict(rel=1e-9, abs=1e-11)


def assert_as_one_by_one(frame, model, tokens, n):
    """The rows of the first two heads of a layer and of its last."""
    frame = frame.drop(columns="equivalence_error")
    expected = expected_losses(model, tokens, n, heads := [0, 1, model.cfg.n_heads - 1])
    pd.testing.assert_frame_equal(frame[frame["head"].isin(heads)].reset_index(drop=True), expected, rtol=1e-9, atol=1e-11)


def expected_losses(model, tokens, n, heads):
    rows = []
    for layer, head, query in [
        (layer, head, query) for layer in range(model.cfg.n_layers) for head in heads for query in range(n or 1, len(tokens))
    ]:
        dual = DualModel.from_head(model, tokens, layer, head, query, n)
        step, (before, after) = dual.contributions().sum(0), dual.cosines()
        rows.append(
            {
                "layer": layer,
                "head": head,
                "position": query,
                "token": str(int(tokens[query])),
                "n_demonstrations": n or query,
                "log_loss_drop": dual.log_loss_drop(),
                "step_share": float(step @ dual.output / dual.output.square().sum()),
                "demonstration_weight": float(dual._tokens.weights[: len(dual.labels)].sum()),
                "cosine_before": float(before.mean()),
                "cosine_after": float(after.mean()),
            }
        )
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("rope after", None),
        ("gqa decay", 3),
        ("gqa decay", None),
        ("softmax, shifted, grouped", 3),
        ("softmax, alibi", None),
    ],
)
def test_losses_of_all_queries_are_those_of_one_by_one(name, n):
    model = model_of(name)
    tokens = text_for(model, 6)
    frame = dual_losses(model, tokens, n_demonstrations=n)
    assert frame["equivalence_error"].max() < 1e-12
    assert len(frame) == model.cfg.n_layers * model.cfg.n_heads * (5 if n is None else 3)
    assert_as_one_by_one(frame, model, tokens, n)


@pytest.mark.parametrize("name", ["gqa decay", "softmax, shifted, grouped"])
def test_losses_under_an_attached_bias(name):
    model = model_of(name)
    tokens = text_for(model, 5)
    with model.kv_bias(convert_prompt(model, text_for(model, 7, seed=4))):
        frame = dual_losses(model, tokens)
        assert frame["equivalence_error"].max() < 1e-12
        assert_as_one_by_one(frame, model, tokens, None)


@pytest.mark.parametrize("name", [*LINEAR, *SOFTMAX])
def test_the_step_is_exact_in_every_kind_of_model(name):
    model = model_of(name)
    assert dual_losses(model, text_for(model, 9), cosines=False)["equivalence_error"].max() < 1e-12


@pytest.mark.parametrize(
    ("name", "bias"),
    [
        ("rope after", False),
        ("gqa decay", True),
        ("softmax, shifted, grouped", True),
        ("softmax, shifted, grouped", False),
    ],
)
def test_demonstrations_are_those_of_the_dual_model(name, bias):
    model = model_of(name)
    tokens = text_for(model, 7)
    if bias:
        model.attach_kv_bias(convert_prompt(model, text_for(model, 6, seed=8)))
    frame = dual_demonstrations(model, tokens, query_pos=5, n_demonstrations=4)
    assert list(frame["prompt_position"].unique()) == [0, 1, 2, 3]
    assert set(frame["position"]) == {5}
    for (layer, head), rows in frame.groupby(["layer", "head"]):
        dual = DualModel.from_head(model, tokens, layer, head, 5, 4)
        shares = dual.contributions() @ dual.output / dual.output.square().sum()
        before, after = dual.cosines()
        assert rows["output_share"].tolist() == pytest.approx(shares.tolist(), **CLOSE)
        assert rows["log_step_norm"].tolist() == pytest.approx(dual.log_step_norms().tolist(), **CLOSE)
        assert rows["cosine_before"].tolist() == pytest.approx(before.tolist(), **CLOSE)
        assert rows["cosine_after"].tolist() == pytest.approx(after.tolist(), **CLOSE)
        assert (rows["weight"] * torch.ones(4).numpy()).sum() == pytest.approx(float(dual._tokens.weights[:4].sum()), **CLOSE)


def test_memory_is_bounded_by_taking_heads_in_parts(monkeypatch):
    model = model_of("softmax, shifted, grouped")
    tokens = text_for(model, 9)
    whole = dual_losses(model, tokens)
    monkeypatch.setattr(figures_module, "NUMBERS_AT_ONCE", figures_module.N_MATRICES * 81)
    pd.testing.assert_frame_equal(dual_losses(model, tokens), whole, rtol=1e-12, atol=1e-13)


def test_without_cosines():
    model = model_of("softmax, learned")
    tokens = text_for(model, 6)
    frame, whole = dual_losses(model, tokens, cosines=False), dual_losses(model, tokens)
    assert frame[["cosine_before", "cosine_after"]].isna().all().all()
    columns = [c for c in frame if not c.startswith("cosine")]
    pd.testing.assert_frame_equal(frame[columns], whole[columns])


def test_a_long_float32_model_keeps_its_figures_finite():
    """Scores of +-100 and more, as in trained models: weights ten times as large."""
    model = small_model().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(("W_Q", "W_K")):
            parameter.mul_(30)
    figures = dual_losses(model, text_for(model, 40))
    assert figures.drop(columns="token").notna().all().all()
    # of scores of some hundred, whose rounding in float32 (1e-5) moves the model's own softmax by that; ten times allowed
    assert figures["equivalence_error"].max() < 1e-3

"""Scores that are known by hand, and TransformerLens' own where both measure the same."""

import pandas as pd
import pytest
import torch
from analysis_models import random_model
from kvlens.analyses.declaration import Record
from kvlens.analyses.heads.head_pairs import COLUMNS, composition
from repeated_models import blank_model

PLAIN = dict(attention="softmax", kv_shift=None)


def scores_of(frame, model, kind):
    """[layer, head, later_layer, later_head], 0 where there is no row."""
    n = model.cfg
    scores = torch.zeros(n.n_layers, n.n_heads, n.n_layers, n.n_heads, dtype=torch.float64)
    rows = frame[frame["kind"] == kind]
    index = tuple(torch.tensor(rows[name].to_numpy()) for name in ("layer", "head", "later_layer", "later_head"))
    scores[index] = torch.tensor(rows["score"].to_numpy())
    return scores


def rank_one_model(angle):
    """Head 0.0 writes along direction 3; head 1.0 reads at ``angle`` to it with keys, at 90 degrees with queries and values."""
    model = blank_model(n_layers=2, n_heads=1, d_head=2)
    first, second = model.blocks[0].attn, model.blocks[1].attn
    first.W_V[0, 1, 0], first.W_O[0, 0, 3] = 5.0, 7.0
    second.W_K[0, 3, 0], second.W_K[0, 4, 0] = 2 * torch.cos(angle), 2 * torch.sin(angle)
    second.W_Q[0, 6, 0] = second.W_V[0, 8, 0] = second.W_O[0, 0, 9] = 3.0
    return model


@pytest.mark.parametrize("degrees", [0, 30, 60, 90])
def test_rank_one_heads_compose_by_the_cosine_of_what_is_written_and_what_is_read(degrees):
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    expected = pd.DataFrame(
        {
            "kind": ["Q", "K", "V"],
            "layer": 0,
            "head": 0,
            "later_layer": 1,
            "later_head": 0,
            "score": [0.0, float(angle.cos()), 0.0],
        }
    ).astype(COLUMNS.dtypes)
    pd.testing.assert_frame_equal(composition(rank_one_model(angle)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, dict(n_heads=6, d_model=36, n_key_value_heads=2), dict(d_head=7, n_heads=3)])
@pytest.mark.parametrize("kind", ["Q", "K", "V"])
def test_equals_transformer_lens_on_processed_models_and_before_processing(changes, kind):
    model = random_model(n_layers=3, **{**PLAIN, "positional_embedding_type": "standard", **changes})
    for block in model.blocks:
        block.ln1.w.mul_(torch.linspace(0.5, 2, model.cfg.d_model))
        block.attn.W_O.add_(0.3)
    before = scores_of(composition(model), model, kind)
    model.process_weights_()
    expected = model.all_composition_scores(kind)
    for found in (before, scores_of(composition(model), model, kind)):  # TransformerLens folds in float32: 1e-7 in each weight
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm", ["LN", "RMS", None])
def test_norms_count_as_if_they_had_been_folded(norm):
    models = [random_model(**PLAIN, normalization_type=norm) for _ in range(2)]
    for model in models:
        for block in model.blocks if norm else ():
            block.ln1.w.mul_(torch.linspace(0.1, 3, model.cfg.d_model))
        for block in model.blocks:
            for matrix in (block.attn.W_Q, block.attn.W_K, block.attn.W_V, block.attn.W_O):
                matrix.add_(0.2)
    models[1].process_weights_()
    pd.testing.assert_frame_equal(composition(models[0]), composition(models[1]), rtol=1e-6)


def test_query_heads_of_a_group_differ_in_what_is_theirs_alone():
    model = random_model(**PLAIN, n_heads=6, d_model=36, n_key_value_heads=2)
    scores = composition(model, kinds=["V"])["score"]
    assert len(scores) == scores.nunique() == 36  # each has its own W_O


def test_unrelated_heads_score_about_one_over_the_root_of_the_width():
    model = random_model(**PLAIN, d_model=60, d_head=20, n_heads=3)
    mean_square = (composition(model)["score"] ** 2).mean()
    assert mean_square == pytest.approx(1 / 60, rel=0.1)


def test_columns_order_and_the_batch_form():
    model = random_model(n_layers=3)
    frame = composition(model)
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == COLUMNS.dtypes
    keys = [(k, i, h, j, g) for k in "QKV" for i in range(3) for h in range(5) for j in range(i + 1, 3) for g in range(5)]
    assert list(frame[list(COLUMNS)[:-1]].itertuples(index=False, name=None)) == keys
    pd.testing.assert_frame_equal(
        composition.analysis.run(model, Record("a", "anything"), kinds="K"), frame[frame["kind"] == "K"].reset_index(drop=True)
    )
    single = composition(random_model(n_layers=1))
    assert len(single) == 0 and {name: str(dtype) for name, dtype in single.dtypes.items()} == COLUMNS.dtypes

"""Scores of the weights: the formulas as printed give them, of any model; TransformerLens' own where both measure the same."""

import pandas as pd
import pytest
import torch
from analysis_models import blank_model
from kvlens.analyses.heads.head_pairs import COLUMNS as PAIRS
from small_models import sharp

from kvlens.analyses import composition, induction_verdicts

FOLDED = 8 * torch.finfo(torch.float32).eps
"""TransformerLens folds in float32 whatever the model is in: products of four matrices whose numbers are rounded once each."""
MODELS = [*(f"softmax, {x}" for x in ("LN", "RMS, gated", "no norm", "norms behind heads", "shifted, grouped")), "no shift"]


def raw_model(name="softmax, LN", **changes):
    """Gains that are not 1, means over d_model and vocabulary that are not 0."""
    model = sharp(name, positional_embedding_type="none", **changes)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if last == "w":
            parameter.copy_(torch.linspace(0.2, 2.5, len(parameter), dtype=parameter.dtype))
        elif last.startswith("W_"):
            draw = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.3 * draw + torch.linspace(-0.5, 1, parameter.shape[-1], dtype=parameter.dtype) + 0.4)
    return model


def centering(n, wanted=True):
    return torch.eye(n, dtype=torch.float64) - wanted / n


def folded(model, layer, head):
    """W_Q, W_K, W_V, W_O of the module's text, and C."""
    attn, n, block = model.blocks[layer].attn, model.cfg.d_model, model.blocks[layer]
    C = centering(n, model.cfg.normalization_type == "LN")
    g = torch.diag(getattr(block.ln1, "w", torch.ones(n, dtype=torch.float64)))
    W_Q, W_K, W_V, W_O = (W[head] for W in (attn.W_Q, attn.W_K, attn.W_V, attn.W_O))
    if model.cfg.use_normalization_before_and_after:
        W_O = W_O @ torch.diag(block.ln1_post.w)
    return C @ g @ W_Q, C @ g @ W_K, C @ g @ W_V, W_O @ C, C


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_composition_scores_are_what_their_text_says(name):
    model = raw_model(name)
    table = composition(model)
    expected = []
    for kind, layer, head, later, other in table[list(PAIRS)[:-1]].itertuples(index=False):
        (_, _, W_V, W_O, _), (Q, K, V, O, _) = folded(model, layer, head), folded(model, later, other)
        W_OV, W = W_V @ W_O, {"Q": Q @ K.T, "K": K @ Q.T, "V": V @ O}[kind]
        expected.append(float((W_OV @ W).norm() / (W_OV.norm() * W.norm())))
    assert table["score"].tolist() == pytest.approx(expected, rel=1e-9)
    strongest = table[table["kind"] == "K"].groupby(["later_layer", "later_head"])["score"].max()
    heads = induction_verdicts(model, n_sequences=1, n_repeated=5).set_index(["layer", "head"])["k_composition_score"].dropna()
    assert heads.tolist() == pytest.approx(strongest.tolist(), rel=1e-12)
    for word in ("||W_OV W|| / (||W_OV|| ||W||)", "W_Q W_K^T", "gain", "mean over d_model"):
        assert word in PAIRS["score"].meaning


@pytest.mark.parametrize("norm", ["softmax, LN", "softmax, RMS, gated", "softmax, no norm"])
def test_folding_norms_and_centering_weights_changes_no_score(norm):
    models = [raw_model(norm) for _ in range(2)]
    models[1].process_weights_(fold_value_biases=False)
    pd.testing.assert_frame_equal(*(composition(model) for model in models), rtol=FOLDED)


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
    ).astype(PAIRS.dtypes)
    pd.testing.assert_frame_equal(composition(rank_one_model(angle)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, dict(n_heads=6, d_model=36, n_key_value_heads=2), dict(d_head=7, n_heads=3)])
def test_equals_transformer_lens_on_processed_models_and_before_processing(changes):
    model = sharp("softmax, learned", n_layers=3, **changes)
    for block in model.blocks:
        block.ln1.w.mul_(torch.linspace(0.5, 2, model.cfg.d_model))
        block.attn.W_O.add_(0.3)
    before = composition(model)
    model.process_weights_()
    for kind in "QKV":
        expected = model.all_composition_scores(kind)
        for frame in (before, composition(model)):
            torch.testing.assert_close(scores_of(frame, model, kind), expected, rtol=FOLDED, atol=0)


def test_query_heads_of_a_group_differ_in_what_is_theirs_alone():
    model = sharp("softmax, rotary, grouped")
    scores = composition(model, kinds=["V"])["score"]
    assert len(scores) == scores.nunique() == 36  # each has its own W_O


def test_unrelated_heads_score_about_one_over_the_root_of_the_width():
    model = sharp("softmax, rotary", d_model=60, d_head=20, n_heads=3)
    mean_square = (composition(model)["score"] ** 2).mean()
    assert mean_square == pytest.approx(1 / 60, rel=0.1)


def test_the_order_of_the_rows():
    model = sharp(n_layers=3)
    frame = composition(model)
    keys = [(k, i, h, j, g) for k in "QKV" for i in range(3) for h in range(5) for j in range(i + 1, 3) for g in range(5)]
    assert list(frame[list(PAIRS)[:-1]].itertuples(index=False, name=None)) == keys
    single = composition(sharp(n_layers=1))
    assert len(single) == 0 and {name: str(dtype) for name, dtype in single.dtypes.items()} == PAIRS.dtypes

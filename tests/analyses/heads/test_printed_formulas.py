"""The formulas of the weights' scores, as printed, give the numbers, also of a model that is neither folded nor centered."""

import pytest
import torch
from analysis_models import random_model
from kvlens.analyses.heads.head_pairs import COLUMNS as PAIRS
from kvlens.analyses.heads.naming import COLUMNS as HEADS

from kvlens.analyses import composition, induction_verdicts

MODELS = {
    "LayerNorm": dict(normalization_type="LN"),
    "RMSNorm": dict(normalization_type="RMS"),
    "no norm": dict(normalization_type=None),
    "behind the heads too": dict(normalization_type="RMS", use_normalization_before_and_after=True),
}


def raw_model(**settings):
    """Gains that are not 1, means over d_model and vocabulary that are not 0."""
    model = random_model(attention="softmax", kv_shift=None, positional_embedding_type="none", **settings)
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
    W_Q, W_K, W_V = (C @ g @ W[head] for W in (attn.W_Q, attn.W_K, attn.W_V))
    W_O = attn.W_O[head]
    if model.cfg.use_normalization_before_and_after:
        W_O = W_O @ torch.diag(block.ln1_post.w)
    return W_Q, W_K, W_V, W_O @ C, C


def copying(circuit):
    eigenvalues = torch.linalg.eigvals(circuit)
    return float((eigenvalues.sum() / eigenvalues.abs().sum()).real)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_copying_score_is_what_its_text_says_and_not_that_of_the_raw_matrices(name):
    model = raw_model(**MODELS[name])
    frame = induction_verdicts(model, n_sequences=1, n_repeated=5)
    gain = torch.diag(getattr(getattr(model, "ln_final", None), "w", torch.ones(model.cfg.d_model, dtype=torch.float64)))
    as_printed, raw = [], []
    for layer, head in frame[["layer", "head"]].itertuples(index=False):
        _, _, W_V, W_O, C = folded(model, layer, head)
        attn = model.blocks[layer].attn
        as_printed.append(copying(model.W_E @ W_V @ W_O @ C @ gain @ model.W_U @ centering(model.cfg.d_vocab)))
        raw.append(copying(model.W_E @ attn.W_V[head] @ attn.W_O[head] @ model.W_U))
    # more tokens than d_head: the eigenvalues that should be 0 come out at about sqrt(eps) of the largest
    assert frame["copying_score"].tolist() == pytest.approx(as_printed, abs=1e-5)
    assert (frame["copying_score"] - raw).abs().max() > 0.05
    for word in ("W_E W_V W_O W_U", "gain", "mean over d_model", "mean over the vocabulary"):
        assert word in HEADS["copying_score"].meaning


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_composition_scores_are_what_their_text_says(name):
    model = raw_model(**MODELS[name])
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

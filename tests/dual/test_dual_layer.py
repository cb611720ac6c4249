"""A head with the MLP behind it (th. B.1), and layers in a row (th. B.2), PrefixLM and causal."""

import pytest
import torch
from dual_models import LINEAR, SOFTMAX, model_named, text_for
from ops_cases import normal
from small_models import small_model
from torch.nn import functional

from kvlens import KVLensError
from kvlens.dual import DualLayer, layer
from kvlens.ops import dual_layers


def relu_model(**changes):
    return small_model(**{**dict(act_fn="relu", dtype=torch.float64), **changes}).requires_grad_(False)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("norm", ["LN", "RMS", None])
@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_one_step_is_the_blocks_output(norm, residual, attention):
    model = relu_model(normalization_type=norm, attention=attention)
    tokens = text_for(model, 9)
    leaf = "hook_resid_post" if residual else "hook_mlp_out"
    for index, head in [(0, 1), (1, 4)]:
        dual = DualLayer.from_layer(model, tokens, index, head, query_pos=7, n_demonstrations=5, residual=residual, exact=True)
        name = f"blocks.{index}.{leaf}"
        expected = model.run_with_cache(tokens[None], names_filter=name)[1][name][0, 7]
        error = (dual.step().predict() - expected).norm() / expected.norm()
        assert error < 1e-12
        assert dual.equivalence_error() < 1e-12
        assert dual.remainder < 1e-14
        assert dual.labels.shape == (5, model.cfg.d_model)


def scaled(function, factor):
    """``function`` with ``factor`` times the matrix that it returns first."""

    def changed(*args):
        matrix, *others = function(*args)
        return factor * matrix, *others

    return changed


@pytest.mark.parametrize(("part", "factor", "least"), [("_tangent", 1.5, 0.1), ("_norm_map", 1.3, 0.05)])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("norm", ["LN", "RMS", None])
def test_a_wrong_tangent_or_norm_is_noticed(part, factor, least, residual, norm, monkeypatch):
    """b is not what makes the prediction right, so that a wrong map is off by about its own error."""
    monkeypatch.setattr(layer, part, scaled(getattr(layer, part), factor))
    model = relu_model(normalization_type=norm)
    assert DualLayer.from_layer(model, text_for(model, 9), 1, 2, residual=residual).equivalence_error() > least


@pytest.mark.parametrize("changed", ["W_O of another head", "a random map", "no bias"])
def test_a_wrong_map_or_bias_of_the_head_is_noticed(changed):
    model = relu_model()
    tokens = text_for(model, 9)
    dual, other = (DualLayer.from_layer(model, tokens, 1, head) for head in (2, 3))
    if changed == "no bias":
        dual.bias = torch.zeros_like(dual.bias)
    else:
        dual.label_map = other.label_map if changed.startswith("W_O") else normal(*dual.label_map.shape, seed=1)
    assert dual.equivalence_error() > 0.01


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_the_bias_is_that_of_the_mask(act):
    """b from the theorem: W_2 diag(mask) b_1 + b_2, the rest of the stream through the same map; for GELU the remainder."""
    model = relu_model(normalization_type=None, act_fn=act)
    tokens, block = text_for(model, 9), model.blocks[0]
    dual = DualLayer.from_layer(model, tokens, 0, 1, residual=False)
    assert dual.equivalence_error() < 1e-12
    _, cache = model.run_with_cache(tokens[None])
    pre, mid = cache["blocks.0.mlp.hook_pre"][0, -1], cache["blocks.0.hook_resid_mid"][0, -1]
    weight, bias, remainder = dual_layers.fold_mlp(
        block.mlp.W_in, block.mlp.b_in, block.mlp.W_out, block.mlp.b_out, getattr(functional, act), pre
    )
    if act == "relu":
        assert float(remainder.norm()) == 0
        torch.testing.assert_close(weight, (block.mlp.W_in * (pre > 0)) @ block.mlp.W_out, rtol=1e-11, atol=1e-12)
    W_O = block.attn.W_O[1]
    rest = mid - dual.head.output @ W_O
    torch.testing.assert_close(dual.label_map, W_O @ weight, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(dual.bias, rest @ weight + bias + remainder, rtol=1e-11, atol=1e-12)
    singular = torch.linalg.svdvals(block.attn.W_V[1] @ W_O @ weight)
    torch.testing.assert_close(dual.singular_values, singular, rtol=1e-10, atol=1e-12)
    assert dual.rank == int(torch.linalg.matrix_rank(block.attn.W_V[1] @ W_O @ weight))


@pytest.mark.parametrize("act", ["gelu", "silu"])
def test_smooth_activations_leave_a_remainder(act):
    model = relu_model(act_fn=act)
    tokens = text_for(model, 9)
    dual = DualLayer.from_layer(model, tokens, 1, 2)
    assert dual.equivalence_error() < 1e-12  # the tangent touches at the query, and b holds the remainder
    assert 1e-3 < dual.remainder < 10  # far above the 1e-14 of a piecewise linear activation, and of the output's size
    with pytest.raises(KVLensError, match="piecewise linear"):
        DualLayer.from_layer(model, tokens, 1, 2, exact=True)


def test_a_model_that_trains_gives_the_same_and_no_graph():
    model = small_model(dtype=torch.float64)
    tokens = text_for(model, 9)
    training, frozen = (DualLayer.from_layer(model.requires_grad_(grad), tokens, 1, 2) for grad in (True, False))
    assert training.remainder == frozen.remainder and not training.label_map.requires_grad
    assert torch.equal(training.label_map, frozen.label_map)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["hf llama", "hf gpt2", "hf bloom", *LINEAR, *SOFTMAX])
def test_the_other_heads_and_biases_of_every_kind_of_attention(name):
    model = model_named(name)
    dual = DualLayer.from_layer(model, text_for(model, 9), 1, 3)
    assert dual.equivalence_error() < 1e-12


def test_a_wrong_initial_weight_is_seen():
    """The printed theorem leaves W_0 as it was; then the block's output is missed by far."""
    model = relu_model(normalization_type=None)
    dual = DualLayer.from_layer(model, text_for(model, 9), 0, 1, query_pos=7, n_demonstrations=2, residual=False)
    start = dual.head.predict()
    wrong = dual.output - start @ dual.label_map + start @ model.blocks[0].attn.W_O[1]
    assert (wrong - dual.output).norm() / dual.output.norm() > 0.05


@pytest.mark.parametrize("eta", [0.1, 5.0])
def test_layers_in_a_row_under_prefix_lm_attention(eta):
    d = 7
    layers = [dual_layers.AttentionWeights(*(normal(d, d, seed=10 * i + j) / d**0.5 for j in range(3))) for i in range(4)]
    x = normal(11, d, seed=99)
    plain = dual_layers.through_layers(x, layers, d**0.5, dual_layers.prefix_lm_attention)
    dual = dual_layers.through_layers(x, layers, d**0.5, lambda y, w, scale: dual_layers.dual_of_prefix_lm(y, w, scale, eta))
    for ours, theirs in zip(dual, plain, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-11


def test_prefix_lm_attention_by_loops():
    weights, x = dual_layers.AttentionWeights(*(normal(5, 3, seed=j) for j in range(3))), normal(6, 5, seed=9)
    out = dual_layers.prefix_lm_attention(x, weights, 1.7)
    for i in range(6):
        seen = range(6) if i == 5 else range(5)
        scores = torch.stack([(x[i] @ weights.W_Q) @ (x[j] @ weights.W_K) / 1.7 for j in seen]).softmax(0)
        expected = sum(p * (x[j] @ weights.W_V) for p, j in zip(scores, seen, strict=True))
        torch.testing.assert_close(out[i], expected, rtol=1e-11, atol=1e-12)


def test_rank_bound():
    mask = torch.tensor([[1.0, 0, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert dual_layers.rank_bound(mask, 3).tolist() == [2.0, 3.0]

"""``function-classes``: baselines with known answers, properties of the measurements, and claims that fail; and a
homonym, which has one vector in the vocabulary and another in each context (LECTURE sec. 1)."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from precision import relative_error

from kvlens import HookedKVTransformer, HookedKVTransformerConfig
from kvlens.model import HookedKVRegressor
from kvlens.ops.softmax_attention import naive_softmax_attention
from kvlens.papers.lecture import equivariance, function_classes
from kvlens.papers.lecture.equivariance import NumberedRegression, position_numbers
from kvlens.papers.lecture.regression_baselines import least_squares, nearest_neighbors, ridge
from kvlens.tasks import Batch, RegressionTask
from kvlens.tasks.regression import SHIFTS
from kvlens.training import build_model

EPS = torch.finfo(torch.float64).eps
PROMPTS, POINTS, D = 3, 13, 5
METHODS = [least_squares, lambda x, y: ridge(x, y, 0.7), lambda x, y: nearest_neighbors(x, y, 3)]


def prompts(seed=0, noise=0.0):
    """Points, the linear function's value at each, and the answers of the examples."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(PROMPTS, n, D, generator=generator, dtype=torch.float64) for n in (POINTS, 1))
    values = (x * w).sum(-1)
    return x, values, values[:, :-1] + noise * torch.randn(PROMPTS, POINTS - 1, generator=generator, dtype=torch.float64)


# --- the judges ---


@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_least_squares_and_ridge_agree_with_one_system_after_the_other(penalty):
    """Ridge is least squares with d more examples: f(sqrt(penalty) e_i) = 0 for every axis i."""
    x, _, y = prompts(noise=0.5)
    got = ridge(x, y, penalty) if penalty else least_squares(x, y)
    assert (got[:, 0] == 0).all()
    more = math.sqrt(penalty) * torch.eye(D, dtype=torch.float64)
    for prompt in range(PROMPTS):
        for n in range(1, POINTS):
            system, answers = torch.cat([x[prompt, :n], more]), torch.cat([y[prompt, :n], torch.zeros(D)])
            w = np.linalg.lstsq(system.numpy(), answers.numpy(), rcond=None)[0]  # minimum-norm, by SVD
            condition = torch.linalg.cond(system if penalty else x[prompt, :n]).item()
            assert float(got[prompt, n]) == pytest.approx(float(x[prompt, n].numpy() @ w), abs=1e3 * condition**2 * EPS)


def test_least_squares_of_one_example_lies_along_it():
    """By hand: from f(3, 4) = 10 the shortest w is (1.2, 1.6); it predicts 2.8 at (1, 1) and 0 orthogonally."""
    x = torch.tensor([[[3.0, 4.0], [1.0, 1.0]], [[3.0, 4.0], [-4.0, 3.0]]], dtype=torch.float64)
    got = least_squares(x, torch.tensor([[10.0], [10.0]], dtype=torch.float64))
    assert got.flatten().tolist() == pytest.approx([0, 2.8, 0, 0], abs=1e-14)


def test_ridge_by_a_pencil():
    """d = 1, examples f(1) = 1 and f(2) = 5, penalty 5: w = 11 / (1 + 4 + 5), and 1 / (1 + 5) after the first alone."""
    x = torch.tensor([[[1.0], [2.0], [10.0]]], dtype=torch.float64)
    got = ridge(x, torch.tensor([[1.0, 5.0]], dtype=torch.float64), penalty=5.0)
    assert got[0].tolist() == pytest.approx([0, 2 / 6, 11], abs=1e-14)


def test_ridge_with_the_noise_it_expects_beats_least_squares():
    generator = torch.Generator().manual_seed(1)
    task = RegressionTask(dimensions=4, n_points=7, noise=function_classes.HELDOUT_NOISE)
    batch = task.sample(4000, generator)
    x, y = (part.double() for part in task.points_and_values(batch.inputs))
    values = batch.targets[:, 0::2].double()
    best, *others = ((ridge(x, y, p) - values).square().mean().item() for p in (function_classes.penalty(task), 0.5, 20.0))
    assert all(best < other for other in others)
    assert best < (least_squares(x, y) - values).square().mean()


def test_the_nearest_neighbor_of_an_example_is_itself():
    x, _, y = prompts(noise=0.3)
    again = torch.randint(POINTS - 1, (PROMPTS, 1), generator=torch.Generator().manual_seed(2))
    x[:, -1:] = x.gather(1, again[..., None].expand(-1, -1, D))
    assert torch.equal(nearest_neighbors(x, y, 1)[:, -1:], y.gather(1, again))


def test_nearest_neighbors_by_a_pencil():
    """On a line at 0, 10, 1, then 2: the nearest of 2 is 1, the two nearest 1 and 0; with few examples all count."""
    x = torch.tensor([[[0.0], [10.0], [1.0], [2.0]]], dtype=torch.float64)
    y = torch.tensor([[3.0, 5.0, 8.0]], dtype=torch.float64)
    assert nearest_neighbors(x, y, 1)[0].tolist() == [0, 3, 3, 8]
    assert nearest_neighbors(x, y, 2)[0].tolist() == [0, 3, 4, 5.5]
    assert nearest_neighbors(x, y, 9)[0].tolist() == pytest.approx([0, 3, 4, 16 / 3], abs=1e-14)


@pytest.mark.parametrize("method", METHODS, ids=["least squares", "ridge", "neighbors"])
@given(scale=st.floats(0.01, 100), n=st.integers(2, POINTS), seed=st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_every_baseline_is_causal_and_linear_in_the_answers(method, scale, n, seed):
    x, _, y = prompts(seed, noise=0.4)
    whole = method(x, y)
    # 5e4: the pseudo-inverse of a square system of random points has a condition number that reaches thousands
    near = dict(rtol=5e4 * D * EPS, atol=5e4 * D * EPS)
    torch.testing.assert_close(method(x[:, :n], y[:, : n - 1]), whole[:, :n], **near)
    torch.testing.assert_close(method(x, scale * y), scale * whole, **{**near, "atol": 5e4 * D * EPS * scale})


# --- errors against the number of examples ---

TINY = function_classes.function_classes.scales["tiny"]


class Oracle(torch.nn.Module):
    """A stand-in for a trained model: least squares plus a constant."""

    def __init__(self, task, off):
        super().__init__()
        self.task, self.off, self.read_in = task, off, torch.nn.Linear(1, 1)

    def forward(self, inputs):
        predicted = torch.full(inputs.shape[:2], math.nan)  # at the positions of answers, which are not read
        x, y = self.task.points_and_values(inputs)
        predicted[:, 0::2] = least_squares(x.double(), y.double()).float() + self.off
        return predicted


@pytest.mark.parametrize("shift", SHIFTS)
def test_a_model_that_does_least_squares_has_its_curve_on_every_distribution(shift):
    task = RegressionTask(dimensions=3, n_points=6, heldout_shift=shift)
    table = function_classes.error_curves(task, {0: Oracle(task, 0.0), 7: Oracle(task, 0.5)}, {**TINY, "n_prompts": 40})
    curve = {(p, s): rows.reset_index(drop=True) for (p, s), rows in table.groupby(["predictor", "seed"])}
    exact, off, judge = curve["transformer", 0], curve["transformer", 7], curve["least squares", 0]
    assert judge["n_examples"].tolist() == list(range(1 if shift == "orthant" else 0, 6))
    # float32 answers: an error of eps each, through systems of 3 dimensions whose condition number may be hundreds
    assert (exact["from_least_squares"] < 1e-9).all()
    np.testing.assert_allclose(exact["relative_error"], judge["relative_error"], atol=1e-6, rtol=1e-3)
    np.testing.assert_allclose(off["from_least_squares"] * off["zero_error"], 0.25, rtol=1e-4)
    assert (judge["from_least_squares"] == 0).all()
    assert (set(table["shift"]), set(table["functions"])) == ({shift}, {"linear"})


def test_errors_by_examples_by_a_pencil():
    """Two prompts of two points; targets 1, 2 and 3, 4; predictions 0, 2 and 3, 0."""
    targets = torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 4.0]])
    batch = Batch(torch.zeros(2, 3, 2), targets, torch.tensor([[True, False, True]] * 2))
    predicted = torch.tensor([[0.0, 2.0], [3.0, 0.0]], dtype=torch.float64)
    got = function_classes.errors_by_examples(batch, predicted, torch.ones(2, 2, dtype=torch.float64))
    expected = pd.DataFrame(
        dict(
            n_examples=[0, 1],
            squared_error=[0.5, 8.0],
            standard_error=[0.5, 8.0],  # of two values a and b, |a - b| / 2
            zero_error=[5.0, 10.0],
            relative_error=[0.1, 0.8],
            from_least_squares=[(1 + 4) / 2 / 5, (1 + 1) / 2 / 10],
        )
    )
    pd.testing.assert_frame_equal(got, expected, check_exact=False, rtol=1e-15)


def test_prompts_of_evaluation_are_not_those_that_choose_the_best_weights():
    task = RegressionTask(dimensions=2, n_points=3)
    seeds = range(max(how["n_seeds"] for how in function_classes.function_classes.scales["small"]["classes"].values()))
    assert TINY["prompt_seed"] not in seeds
    assert not torch.equal(task.heldout(2, TINY["prompt_seed"]).inputs, task.heldout(2, 0).inputs)


def test_learned_positions_refuse_longer_prompts_and_sinusoidal_ones_answer():
    task = RegressionTask(dimensions=4, n_points=5)
    inputs = replace(task, n_points=7).heldout(3).inputs
    learned, sinusoidal = (
        build_model(task, {**TINY["model"], "positional_embedding_type": kind}, device="cpu")
        for kind in ("standard", "sinusoidal")
    )
    got = function_classes.predict_or_refuse(learned, inputs)
    assert got.isnan().any(dim=0).tolist() == [False] * 5 + [True] * 2
    assert torch.equal(got[:, :5], function_classes.predict(learned, inputs[:, :9]))
    assert function_classes.predict_or_refuse(sinusoidal, inputs).isfinite().all()


# --- permutations ---


def test_only_the_plain_transformer_commutes_with_permutations():
    table = equivariance.equivariance_table(TINY["model"], n_positions=7, d_input=3, n_prompts=2, n_models=3)
    assert len(table) == 4 * 2 * 3
    plain = (table["attention_dir"] == "bidirectional") & (table["positions"] == "none")
    assert (table["deviation"][plain] <= table["rounding"][plain]).all()
    assert (table["deviation"][~plain] > 0.01).all()
    # rounding is there in float32, so that a deviation of 0 is not an accident of the measurement
    assert (table["deviation"][plain & (table["dtype"] == "float32")] > 0).any()


def test_a_deviation_by_a_pencil():
    """A model that predicts 1 at the first of two positions and 0 at the second, for any input."""

    class FirstOnly(HookedKVRegressor):
        def forward(self, x):
            return torch.tensor([1.0, 0.0])[None].expand(len(x), 2)

    # pi can only exchange the two positions: (1, 0) against (0, 1), over a norm of 1
    cfg = HookedKVTransformerConfig(n_layers=1, d_model=2, d_head=2, n_ctx=2, d_vocab=1, act_fn="relu")
    assert equivariance.deviation(FirstOnly(cfg, d_input=1), n_positions=2, n_prompts=1, seed=0) == pytest.approx(math.sqrt(2))


# --- claims ---


MARGIN = dict(standard_error=0.001, zero_error=1.0)  # three standard errors: 0.003


def made_up_errors(**changes):
    """A transformer that matches least squares and keeps that everywhere but where it should not."""
    at_the_end = {"none": 0.01, "scaled_inputs": 0.6, "skewed_inputs": 0.3, "orthant": 0.02, **changes}
    rows = []
    for shift, last in at_the_end.items():
        ends = {"transformer": last, "least squares": 0.0, "ridge": 0.2, "nearest neighbors": 0.4}
        for predictor, end in ends.items():
            for seed, factor in ((0, 1.0), (1, 0.5)) if predictor == "transformer" else ((0, 1.0),):
                base = dict(shift=shift, predictor=predictor, seed=seed, **MARGIN)
                rows += [dict(base, n_examples=n, relative_error=error) for n, error in ((0, 1.0), (2, end * factor))]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("changes", "linear", "shifts"),
    [
        ({}, [True, True, True], [True] * 3),
        ({"none": 0.2}, [False, False, False], [True, False, True]),
        ({"scaled_inputs": 0.02, "orthant": 0.2}, [True, True, True], [False, True, False]),
        ({"none": 0.7, "orthant": 0.9}, [False, False, False], [None] * 3),
    ],
)
def test_claims_about_linear_functions_can_fail(changes, linear, shifts):
    error = made_up_errors(**changes)
    nearest, gap, after = function_classes.compare_linear(error, dimensions=1)
    assert [nearest.holds, gap.holds, after.holds] == linear
    assert nearest.ours == {0.01: "least squares", 0.2: "ridge", 0.7: "nearest neighbors"}[changes.get("none", 0.01)]
    assert gap.ours == after.ours == changes.get("none", 0.01)  # the worse of two seeds
    assert [c.holds for c in function_classes.compare_shifts(error)] == shifts


def test_claims_about_other_classes_can_fail():
    good, bad = made_up_errors(none=0.04).assign(functions="a"), made_up_errors(none=0.06).assign(functions="b")
    error = pd.concat([good, bad])
    one, two = function_classes.compare_classes(error[error["shift"] == "none"], {})
    assert (one.holds, two.holds) == (True, False)
    unsure = error[error["shift"] == "none"].assign(standard_error=0.01)
    assert [c.holds for c in function_classes.compare_classes(unsure, {})] == [None, None]
    assert "a (best baseline: least squares, 0)" in one.what


def test_claims_about_order_can_fail():
    kinds = [dict(attention_dir=a, positions=p, dtype="float64", seed=0) for a, p in equivariance.KINDS]
    right = pd.DataFrame(kinds).assign(rounding=1e-13, deviation=[1e-15, 0.3, 0.2, 0.1])
    wrong = right.assign(deviation=[1e-6, 1e-14, 1e-14, 1e-14])
    assert [c.holds for c in function_classes.compare_orders(right)] == [True] * 4
    assert [c.holds for c in function_classes.compare_orders(wrong)] == [False] * 4


def test_while_what_is_left_of_the_error_still_falls_a_claim_about_it_is_not_rejected():
    """From 0.06 to 0.04 is next to nothing of what was learned, and a third of what is left."""
    rows = [dict(functions=f, positions="standard", seed=0, step=step, loss=loss)
            for f, losses in (("linear", (0.06, 0.04)), ("tree", (0.06, 0.059)))
            for step, loss in zip((10, 20), losses, strict=True)]  # fmt: skip
    why = function_classes.still_learning(pd.DataFrame(rows))
    assert why == {"linear": "the second half of its steps took 33% of its error", "tree": None}
    far, near = (function_classes.Measured(gap, 0.01).compared("w", "c", gap, 0.05) for gap in (0.1, 0.01))
    found = [function_classes.unless_it_holds(one, why["linear"]).verdict for one in (far, near)]
    assert found == ["not trained far enough", "holds"]


@pytest.mark.parametrize(
    ("learned_so_far", "peak", "last", "holds"),
    [(0.1, 1.5, 0.4, True), (0.1, 1.0, 0.4, False), (0.1, 1.5, 1.6, None), (0.1, 1.051, 0.4, None), (0.8, 1.5, 0.4, None)],
)
def test_claim_about_noise_can_fail(learned_so_far, peak, last, holds):
    curves = {"none": (1.0, 0.9, learned_so_far), "noisy": (1.0, peak, last)}
    rows = [
        dict(shift=shift, predictor="transformer", n_examples=n, relative_error=error, **MARGIN)
        for shift, errors in curves.items()
        for n, error in enumerate(errors)
    ]
    assert function_classes.compare_noise(pd.DataFrame(rows)).holds is holds


def lengths(refused=math.nan, **there):
    """Errors in training of 0.1 after one example, and of 0.1 elsewhere but where ``there`` has another one."""
    places = {
        "sinusoidal": (function_classes.LONGER, 2),
        "index": (function_classes.LONGER, 2),
        "renumbered": (function_classes.RENUMBERED, 1),
        "share": (function_classes.LONGER, 1),
    }
    rows = [dict(positions="standard", prompts=function_classes.LONGER, n_examples=2, relative_error=refused)]
    for positions in ("sinusoidal", "index", "share"):
        prompts = [(function_classes.SHORT, 1), (function_classes.LONGER, 1), (function_classes.LONGER, 2)]
        rows += [dict(positions=positions, prompts=name, n_examples=n, relative_error=0.1) for name, n in prompts]
    rows.append(dict(positions="index", prompts=function_classes.RENUMBERED, n_examples=1, relative_error=0.1))
    table = pd.DataFrame(rows).assign(**MARGIN)
    for name, error in there.items():
        prompts, n = places[name]
        where = (table["positions"] == name.replace("renumbered", "index")) & (table["prompts"] == prompts)
        table.loc[where & (table["n_examples"] == n), "relative_error"] = error
    return table.assign(in_training=table["n_examples"] < 2)


@pytest.mark.parametrize(
    ("there", "holds"),
    [
        ({}, [True, False, False, False, False, False]),
        ({"refused": 0.5}, [False, False, False, False, False, False]),
        ({"sinusoidal": 0.9, "renumbered": 0.9}, [True, True, False, True, False, False]),
        ({"index": 0.9, "share": 0.9}, [True, False, True, False, True, False]),
        ({"index": 0.251}, [True, False, None, False, False, False]),  # bound: twice 0.1, and 0.05
    ],
)
def test_claims_about_length_can_fail(there, holds):
    assert [c.holds for c in function_classes.compare_lengths(lengths(**there))] == holds


def test_the_numbers_of_positions_by_a_pencil():
    """In (0, 1), and those of a longer prompt are other ones; an index does not change."""
    assert position_numbers("index", 3).tolist() == [1, 2, 3]
    assert position_numbers("share", 3).tolist() == [0.25, 0.5, 0.75]
    task = NumberedRegression(dimensions=2, n_points=3, numbers="share")
    plain = RegressionTask(dimensions=2, n_points=3).heldout(2)
    batch = task.heldout(2)
    assert torch.equal(batch.inputs[..., :-1], plain.inputs) and torch.equal(batch.targets, plain.targets)
    assert torch.equal(batch.inputs[1, :, -1], torch.arange(1, 6) / 6)
    assert build_model(task, TINY["model"], device="cpu")(batch.inputs).shape == (2, 5)


def test_the_nearest_ridge_is_found():
    """Predictions that are those of ridge regression with a penalty of 0.3, and those of least squares."""
    task = RegressionTask(dimensions=3, n_points=7)

    class Ridge(Oracle):
        def forward(self, inputs):
            x, y = self.task.points_and_values(inputs)
            predicted = torch.zeros(inputs.shape[:2], dtype=torch.float64)
            predicted[:, 0::2] = ridge(x.double(), y.double(), 0.3)
            return predicted

    for model, best, holds in ((Ridge(task, 0.0), 0.3, False), (Oracle(task, 0.0), 0.0, True)):
        table = function_classes.distance_from_ridge(task, {0: model}, {**TINY, "n_prompts": 100})
        assert table.loc[table["distance"].idxmin(), "penalty"] == best and table["distance"].min() < 1e-9
        assert function_classes.compare_ridge(table).holds is holds


def test_the_margins_of_two_curves_add_up_in_their_gap():
    ours, theirs = ({3: function_classes.Measured(*of)} for of in ((0.25, 0.125), (0.75, 0.0625)))
    assert function_classes.gap_between(ours, theirs) == {3: (0.5, 0.1875)}


BAT = 7


def test_a_token_has_one_embedding_and_a_vector_for_each_context():
    """After layers without attention it is still one vector: it is attention that makes the difference."""
    sizes = dict(n_layers=2, n_heads=2, d_model=16, d_head=8, n_ctx=9, d_vocab=11, act_fn="gelu", seed=1, dtype=torch.float64)
    model = HookedKVTransformer(HookedKVTransformerConfig(**sizes))
    sentences = torch.tensor([[1, 2, BAT, 3], [4, 5, BAT, 6]])
    _, cache = model.run_with_cache(sentences)
    here, there = cache["hook_embed"][:, 2]
    assert torch.equal(here, there)
    vectors = {layer: cache["resid_post", layer][:, 2] for layer in range(2)}
    assert all(relative_error(there, here) > 0.01 for here, there in vectors.values())
    with model.hooks(fwd_hooks=[(f"blocks.{layer}.hook_attn_out", lambda out, hook: 0 * out) for layer in range(2)]):
        here, there = model.run_with_cache(sentences)[1]["resid_post", 1][:, 2]
    assert torch.equal(here, there)


def test_soft_attention_with_large_scores_is_hard_attention():
    """Sec. 2: hard attention returns the value whose key is closest to the query."""
    drawn = torch.randn(1, 7, 1, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.nn.functional.normalize(drawn, dim=-1)
    queries, values = x + 0.1, torch.arange(7.0, dtype=torch.float64).view(1, 7, 1, 1).expand(-1, -1, -1, 5)
    closest = torch.cdist(queries[0, :, 0], x[0, :, 0]).argmin(dim=-1)
    soft, hard = (naive_softmax_attention(queries, x, values, scale, causal=False).z[0, :, 0, 0] for scale in (1.0, 1e-3))
    torch.testing.assert_close(hard, closest.double(), rtol=0, atol=1e-11)
    assert (soft - closest).abs().max() > 0.5


def test_the_layer_as_printed_adds_nothing_to_its_mlp_and_is_equivariant():
    """Sec. 2.3: X~ = MLP(Y(X) + X), written out; a layer of the models here adds Y(X) + X to that, and has norms before."""
    size = dict(n_layers=1, n_heads=2, d_model=8, d_head=4, d_mlp=16, n_ctx=5, d_vocab=1, act_fn="gelu", seed=3)
    kind = dict(normalization_type=None, attention_dir="bidirectional", positional_embedding_type="none", dtype=torch.float64)
    model, seen = HookedKVRegressor(HookedKVTransformerConfig(**size, **kind), 8).requires_grad_(False), {}
    block, generator = model.transformer.blocks[0], torch.Generator().manual_seed(0)
    for weights in (block.attn.W_Q, block.attn.b_O, block.mlp.b_in, block.mlp.b_out):
        weights.normal_(generator=generator)  # heads that are not uniform, and nothing that is 0
    printed = [
        ("blocks.0.hook_resid_pre", lambda x, hook: seen.__setitem__("X", x)),
        ("blocks.0.hook_mlp_out", lambda out, hook: seen.__setitem__("mlp", out)),
        ("blocks.0.hook_resid_post", lambda x, hook: seen.__setitem__("usual", x) or seen["mlp"]),
    ]

    def layer(x):
        with model.transformer.hooks(
            fwd_hooks=[*printed, ("blocks.0.hook_resid_post", lambda x, hook: seen.__setitem__("X~", x))]
        ):
            model(x)
        return seen["X~"], seen["X"], seen["usual"]

    drawn = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    out, x, usual = layer(drawn)
    attn = block.attn
    heads = [(x @ W_Q + b_Q, x @ W_K + b_K, x @ W_V + b_V) for W_Q, b_Q, W_K, b_K, W_V, b_V in zip(
        attn.W_Q, attn.b_Q, attn.W_K, attn.b_K, attn.W_V, attn.b_V, strict=True)]  # fmt: skip
    y = sum((q @ k.mT / model.cfg.attn_scale).softmax(-1) @ v @ W_O for (q, k, v), W_O in zip(heads, attn.W_O, strict=True))
    y = y + attn.b_O
    hidden = torch.nn.functional.gelu((y + x) @ block.mlp.W_in + block.mlp.b_in)
    assert relative_error(out, hidden @ block.mlp.W_out + block.mlp.b_out) < 1e-11 < 0.1 < relative_error(usual, out)
    assert relative_error(usual, out + y + x) < 1e-11
    order = torch.tensor([3, 0, 4, 1, 2])
    assert relative_error(layer(drawn[:, order])[0], out[:, order]) < 1e-11 < relative_error(out[:, order], out)

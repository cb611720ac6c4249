"""DualModel on real forward passes: one step is the head's output; the features' error; what is refused and why. The figures of
all heads and queries at once, against DualModel head by head and query by query.
"""

import pandas as pd
import pytest
import torch
from dual_models import LINEAR, SOFTMAX, model_named, text_for
from small_models import small_model

from kvlens import HookedKVTransformer, convert_prompt
from kvlens.analyses import dual_demonstrations, dual_losses
from kvlens.dual import DualModel
from kvlens.dual import figures as figures_module
from kvlens.dual.head_inputs import reading_hooks
from kvlens.ops import dual as ops

EXACT = 1e-12
"""The bound of the equality: float64 sums of some hundred terms, relative to the head's output."""


def heads_of(model):
    return [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]


KINDS = [*LINEAR, *SOFTMAX, "hf gpt2", "hf llama", "hf gpt_neox", "hf bloom"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "query", "n"), [*((name, -1, None) for name in KINDS), *((name, 6, 3) for name in (*LINEAR, "hf llama"))]
)
def test_one_step_is_the_heads_output(name, query, n):
    model = model_named(name)
    tokens = text_for(model, 11)
    _, cache = model.run_with_cache(tokens[None], names_filter=lambda hook: hook.endswith("hook_z"))
    for layer, head in heads_of(model)[:: 1 if n is None else 3]:
        dual = DualModel.from_head(model, tokens, layer, head, query, n)
        z = cache["z", layer][0, query, head]
        error = (dual.step().predict() - z).norm() / z.norm()
        assert error < EXACT, (layer, head, float(error))
        assert dual.equivalence_error() < EXACT
        for eta in (0.01, 50.0):
            by_autograd = dual.reset().step(eta, autograd=True).predict()
            assert (by_autograd - z).norm() / z.norm() < EXACT


def assert_one_step_is_the_output_of_every_head(model):
    tokens = text_for(model, 24)
    assert max(DualModel.from_head(model, tokens, *place).equivalence_error() for place in heads_of(model)) < EXACT


@pytest.mark.parametrize("name", ["zoo docs-linear", "zoo docs-shift", "zoo induction-plain-2l"])
def test_one_step_is_the_heads_output_of_shipped_models(name):
    assert_one_step_is_the_output_of_every_head(model_named(name))


def test_one_step_is_the_heads_output_of_stories260k(outside_data):
    model = HookedKVTransformer.from_llama2c(outside_data / "stories260K.bin", dtype=torch.float64).requires_grad_(False)
    assert_one_step_is_the_output_of_every_head(model)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("role", ["initial", "demonstrations"])
@pytest.mark.parametrize("name", LINEAR)
def test_an_attached_bias_is_part_of_the_dual_model(name, role):
    model = model_named(name)
    prompt, tokens = text_for(model, 9, seed=1), text_for(model, 7, seed=2)
    with model.kv_bias(convert_prompt(model, prompt)):
        for layer, head in heads_of(model):
            dual = DualModel.from_head(model, tokens, layer, head, bias=role)
            assert dual.equivalence_error() < EXACT
            assert dual.n_virtual == (0 if role == "initial" else min(model.cfg.d_phi, model.cfg.d_head))
            assert len(dual.labels) == 6 + dual.n_virtual
            assert dual.step().loss() < dual.reset().loss()


@pytest.mark.parametrize("options", [dict(method="exact"), dict(method="landmark", n_features=4, budget="equal", key_steps=2)])
@pytest.mark.parametrize("name", ["softmax, learned", "softmax, shifted, grouped"])
def test_virtual_keys_of_a_softmax_bias_are_tokens(name, options):
    model = model_named(name)
    prompt, tokens = text_for(model, 9, seed=1), text_for(model, 6, seed=2)
    with model.kv_bias(convert_prompt(model, prompt, **options)):
        for layer, head in heads_of(model)[::3]:
            for role in ("initial", "demonstrations"):
                dual = DualModel.from_head(model, tokens, layer, head, bias=role)
                assert dual.equivalence_error() < 1e-11  # signed weights of fitted keys cancel by a digit
                assert dual.n_virtual == (0 if role == "initial" else options.get("n_features", 9))


def test_the_prompt_in_front_and_its_exact_bias_are_the_same_demonstrations():
    model = model_named("softmax, shifted, grouped")
    prompt, tokens = text_for(model, 9, seed=1), text_for(model, 6, seed=2)
    whole = DualModel.from_head(model, torch.cat([prompt, tokens]), 1, 4)
    with model.kv_bias(convert_prompt(model, prompt, method="exact")):
        split = DualModel.from_head(model, tokens, 1, 4, bias="demonstrations")
    torch.testing.assert_close(split.contributions(), whole.contributions(), rtol=1e-9, atol=1e-11)
    assert split.log_loss_drop() == pytest.approx(whole.log_loss_drop(), abs=1e-9)


def test_a_bias_as_initial_weight_or_as_demonstrations_is_the_same_head():
    """The prompt's tokens are demonstrations: the step from a bias contributes what they contributed together."""
    model = model_named("rope after")
    prompt, tokens = text_for(model, 9, seed=1), text_for(model, 5, seed=2)
    whole = DualModel.from_head(model, torch.cat([prompt, tokens]), 0, 2)
    with model.kv_bias(convert_prompt(model, prompt)):
        split = DualModel.from_head(model, tokens, 0, 2, bias="demonstrations")
    torch.testing.assert_close(split.output, whole.output, rtol=1e-11, atol=1e-12)
    ours, theirs = split.contributions()[: split.n_virtual].sum(0), whole.contributions()[:9].sum(0)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    assert split.log_loss_drop() == pytest.approx(whole.log_loss_drop(), abs=1e-9)


@pytest.mark.parametrize("name", ["rope after", "gqa decay", "softmax, learned", "softmax, shifted, grouped"])
@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_losses_and_steps_agree_with_the_loops(name, alpha):
    """The kernel form, one step after the other, against ``naive_dual`` on what the hooks show."""
    from kvlens.dual import read_layers

    model = model_named(name)
    tokens, layer, head, query, n = text_for(model, 9), 1, 3, 7, 4
    seen = []
    read_layers(model, tokens, lambda _, reading: seen.append(reading), [layer])
    reading = seen[0]
    softmax = reading.scale is not None
    naive = ops.naive_dual(
        reading.queries[head, query],
        reading.keys[head, : query + 1],
        reading.values[head, : query + 1],
        n,
        (lambda a, b: (a @ b / reading.scale).exp()) if softmax else (lambda a, b: a @ b),
        normalizer=None if softmax else reading.log_normalizer[head, query].exp(),
        log_decay=0.0 if reading.log_decay is None else float(reading.log_decay[head]),
        eta=0.3,
        alpha=alpha,
    )
    dual = DualModel.from_head(model, tokens, layer, head, query, n)
    course = dual.losses(3, eta=0.3, alpha=alpha)
    close = dict(rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dual.loss(0.3, alpha), naive.loss_before, **close)
    torch.testing.assert_close(dual.predict(), naive.before, **close)
    torch.testing.assert_close(dual.contributions(), naive.contributions, **close)
    before, after = dual.cosines()
    torch.testing.assert_close(before, naive.cosine_before, **close)
    if alpha == 0:
        torch.testing.assert_close(after, naive.cosine_after, **close)
        drop = torch.tensor(dual.log_loss_drop(), dtype=torch.float64).exp()
        torch.testing.assert_close(drop, (naive.loss_before - naive.loss_after) * 0.3, **close)
    torch.testing.assert_close(dual.step(0.3, alpha).loss(0.3, alpha), naive.loss_after, **close)
    torch.testing.assert_close(dual.predict(), naive.after, **close)
    for n_steps in (2, 3):
        torch.testing.assert_close(dual.step(0.3, alpha).loss(0.3, alpha), course[n_steps], **close)


def test_written_out_weights_and_autograd_on_them():
    model = model_named("rope after")
    dual = DualModel.from_head(model, text_for(model, 9), 0, 1, n_demonstrations=5)
    leaf = dual.weight.requires_grad_()
    loss = ops.dual_loss(leaf, dual.inputs, dual.labels, dual.normalizer, eta=0.1)
    (gradient,) = torch.autograd.grad(loss, leaf)
    by_hand = (leaf - 0.1 * gradient).detach()
    torch.testing.assert_close(dual.step(0.1).weight, by_hand, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(by_hand @ dual.query, dual.output, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(loss.detach(), dual.reset().loss(0.1), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kernel", ["random", "landmark"])
@pytest.mark.parametrize("name", ["softmax, learned", "softmax, shifted, grouped", "hf llama"])
def test_approximate_features_are_attention_with_these_features(name, kernel):
    model = model_named(name)
    tokens = text_for(model, 12)
    for layer, head in heads_of(model)[:4]:
        dual = DualModel.from_head(model, tokens, layer, head, kernel=kernel, n_features=9)
        shares = torch.cat([dual.inputs, dual.reset()._tokens.features[len(dual.inputs) : -1]]) @ dual.query
        output = (shares / shares.sum()) @ dual._tokens.values
        torch.testing.assert_close(dual.step().predict(), output, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(dual.weight @ dual.query, output, rtol=1e-10, atol=1e-12)
        assert dual.equivalence_error() > 1e-9  # it is an approximation, and is reported as one


def test_more_features_come_closer_and_all_landmarks_are_exact():
    model = model_named("softmax, learned")
    tokens = text_for(model, 12)
    errors = {
        m: sum(
            DualModel.from_head(model, tokens, 0, h, kernel="random", n_features=m, seed=3).equivalence_error()
            for h in range(5)
        )
        for m in (8, 4096)
    }
    assert errors[4096] < errors[8] / 3  # errors fall as the root of m; 22 times as far in the mean
    for one in (model, model_named("softmax, alibi")):
        every = DualModel.from_head(one, tokens, 0, 1, kernel="landmark", n_features=12)
        assert every.equivalence_error() < 1e-8


def test_the_minimizer():
    model = model_named("rope after")
    dual = DualModel.from_head(model, text_for(model, 9), 0, 1)
    least = dual.minimize(0.3).loss(alpha=0.3)
    assert least < dual.reset().losses(30, alpha=0.3)[:10].min()
    torch.testing.assert_close(dual.losses(200, alpha=0.3)[-1], least, rtol=1e-10, atol=1e-12)


def test_bound_terms_by_hand():
    """The terms from features written out, for linear attention."""
    model = model_named("rope after")
    dual = DualModel.from_head(model, text_for(model, 9), 0, 1)
    terms = dual.bound(delta=0.1)
    trace = dual.inputs.square().sum()
    dual.step()
    w = dual.weight.norm()
    rho = torch.stack([dual.labels.norm(dim=-1).max(), (dual.inputs @ dual.weight.T).norm(dim=-1).max()]).max()
    expected = w * rho * (trace * dual.labels.shape[1]).sqrt() / 8
    torch.testing.assert_close(terms.log_complexity.exp(), expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(terms.log_confidence.exp(), rho**2 * (torch.tensor(10.0).double().log() / 8).sqrt())
    negative = dual.bound(delta=0.1, n_negative=2, beta=0.5)
    assert negative.log_confidence > terms.log_confidence
    least = (dual.inputs @ dual.inputs.T).argsort(dim=-1)[:, :2]  # of each demonstration, the two least similar
    effective = dual.inputs - 0.5 * dual.inputs[least].mean(dim=1)
    torch.testing.assert_close(negative.log_trace.exp(), effective.square().sum(), rtol=1e-10, atol=0)


CLOSE = dict(rel=1e-9, abs=1e-11)
OF_VALUES = ("log_loss_drop", "step_share", "cosine_before", "cosine_after")


def assert_as_one_by_one(frame, model, tokens, n):
    """The rows of the first two heads of a layer and of its last."""
    frame = frame.drop(columns=["equivalence_error", *(f"{name}_shuffled" for name in OF_VALUES)])
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


@pytest.mark.one_in(2)
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
    model = model_named(name)
    tokens = text_for(model, 6)
    frame = dual_losses(model, tokens, n_demonstrations=n)
    assert frame["equivalence_error"].max() < 1e-12
    assert len(frame) == model.cfg.n_layers * model.cfg.n_heads * (5 if n is None else 3)
    assert_as_one_by_one(frame, model, tokens, n)


@pytest.mark.parametrize("name", ["gqa decay", "softmax, shifted, grouped"])
def test_losses_under_an_attached_bias(name):
    model = model_named(name)
    tokens = text_for(model, 5)
    with model.kv_bias(convert_prompt(model, text_for(model, 7, seed=4))):
        frame = dual_losses(model, tokens)
        assert frame["equivalence_error"].max() < 1e-12
        assert_as_one_by_one(frame, model, tokens, None)


@pytest.mark.parametrize(
    ("name", "n", "bias"),
    [("rope after", None, False), ("gqa decay", 4, True), ("gqa decay", None, True), ("softmax, shifted, grouped", 4, True)],
)
def test_the_null_is_what_a_run_shows_whose_values_change_places(name, n, bias):
    """Layer by layer, so that the layers before it, and with them its keys, are as they were."""
    model = model_named(name)
    tokens, order = text_for(model, 9), figures_module.another_order(9, n, seed=3)
    if bias:
        model.attach_kv_bias(convert_prompt(model, text_for(model, 6, seed=8)))
    assert order[0] == 0 and sorted(order.tolist()) == list(range(9)) and (n is None or order[n:].tolist() == list(range(n, 9)))
    frame = dual_losses(model, tokens, n_demonstrations=n, seed=3)
    for layer in range(model.cfg.n_layers):
        values = reading_hooks(model, layer)[3]
        with model.hooks(fwd_hooks=[(values, lambda v, hook: v[:, order])]):
            run = dual_losses(model, tokens, n_demonstrations=n, seed=4)
        expected, null = (table[table["layer"] == layer] for table in (run, frame))
        for figure in OF_VALUES:
            assert null[f"{figure}_shuffled"].tolist() == pytest.approx(expected[figure].tolist(), **CLOSE)
            assert not null[f"{figure}_shuffled"].equals(null[figure])


@pytest.mark.parametrize("name", ["facts-linear", "facts-gpt2", "docs-gpt2"])
def test_better_aligned_predictions_show_no_learning(name):
    """After the step they are so in every head, trained or not, with labels of its own keys or of others."""
    trained = HookedKVTransformer.from_zoo(name, dtype=torch.float64)
    tokens = text_for(trained, 24)
    for model in (trained, HookedKVTransformer(trained.cfg)):
        found = dual_losses(model, tokens).groupby(["layer", "head"]).mean(numeric_only=True)
        for suffix in ("", "_shuffled"):
            assert (found[f"cosine_after{suffix}"] > found[f"cosine_before{suffix}"]).all()


@pytest.mark.parametrize("name", [*LINEAR, *SOFTMAX])
def test_the_step_is_exact_in_every_kind_of_model(name):
    model = model_named(name)
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
    model = model_named(name)
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
    model = model_named("softmax, shifted, grouped")
    tokens = text_for(model, 9)
    whole = dual_losses(model, tokens)
    monkeypatch.setattr(figures_module, "NUMBERS_AT_ONCE", figures_module.N_MATRICES * 81)
    pd.testing.assert_frame_equal(dual_losses(model, tokens), whole, rtol=1e-12, atol=1e-13)


def test_without_cosines():
    model = model_named("softmax, learned")
    tokens = text_for(model, 6)
    frame, whole = dual_losses(model, tokens, cosines=False), dual_losses(model, tokens)
    assert frame[[c for c in frame if c.startswith("cosine")]].isna().all().all()
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

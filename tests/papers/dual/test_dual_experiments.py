"""What the experiments on the dual model are made of, and that their verdicts can come out either way."""

import io
import math

import numpy as np
import pandas as pd
import pytest
import torch

from kvlens import HookedKVTransformer
from kvlens.dual import layer
from kvlens.dual.bert import read_examples
from kvlens.ops import dual
from kvlens.ops.attention_variants import naive_regularized
from kvlens.papers.dual import bert_variants, dual_equivalence, dual_heads, dual_layer, dual_variants, random_features
from kvlens.papers.dual.dual_equivalence import after_one_step
from kvlens.papers.dual.regression_layer import Variant, draw_layer, draw_sequences, draw_tasks, squared_errors, train_layer
from kvlens.tasks import make_task

SETTINGS = dict(n_demonstrations=5, batch_size=3, heldout_sequences=4)


def test_seeds_train_apart():
    """Each seed's course is the same as alone, although seeds share tensors."""
    together, alone = [], []
    for seeds, into in (([3, 4], together), ([4], alone)):
        W = draw_tasks(seeds, 2)
        layer = draw_layer(seeds, 3, Variant(key_depth=2, negatives=2, beta=0.1, alpha=0.2))
        into += train_layer(layer, W, SETTINGS, "linear", 3, seeds, torch.full((len(seeds),), 0.05, dtype=torch.float64))
    for (step, both), (same, one) in zip(together, alone, strict=True):
        assert step == same
        assert float(both[1]) == pytest.approx(float(one[0]), rel=1e-12)


def test_each_row_has_its_own_rate_and_a_repeated_seed_the_same_sequences():
    """Rates 0, 0.05 and 0.05 once more: the first stays where it was, the others take one course."""
    seeds = [3, 3, 3]
    layer = draw_layer(seeds, 3, Variant())
    rates = torch.tensor([0.0, 0.05, 0.05], dtype=torch.float64)
    course = train_layer(layer, draw_tasks(seeds, 2), SETTINGS, "linear", 30, seeds, rates)
    assert course[-1][1][0] == course[0][1][0] != course[-1][1][1] == course[-1][1][2]


def test_errors_are_over_the_variance_of_the_labels():
    """A layer whose values are zero answers 0 always: E[y^2] / Var[y]."""
    seeds = [0, 1]
    layer = draw_layer(seeds, 3, Variant())
    layer.W_V = torch.zeros_like(layer.W_V)
    W = draw_tasks(seeds, 2)
    ((_, error),) = train_layer(layer, W, SETTINGS, "exponential", 0, seeds, torch.zeros(2, dtype=torch.float64))
    _, answers = draw_sequences(W, "exponential", seeds, 3, 4, 5)
    torch.testing.assert_close(error, answers.square().mean(1) / answers.var(dim=1, correction=0), rtol=1e-11, atol=0)


@pytest.mark.parametrize("form", ["one_step", "normalised"])
def test_regularization_is_that_of_its_equation(form):
    """Eq. 13 and app. D.1, in loops; of the last query, which sees every token."""
    layer = draw_layer([0], 3, Variant(alpha=-0.5, form=form))
    tokens, _ = draw_sequences(draw_tasks([0], 2), "linear", [0], 4, 1, 5)
    q, k, v = (part[0, 0] for part in layer.projections(tokens))
    pattern = (q @ k.T / 3**0.5).softmax(dim=-1)
    torch.testing.assert_close(layer.outputs(tokens)[0, 0, -1], naive_regularized(pattern, v, -0.5, form)[-1])


@pytest.mark.parametrize("name", dual_variants.VARIANTS)
def test_the_last_output_alone_is_that_of_all(name):
    layer, same = (draw_layer([0, 1], 3, dual_variants.VARIANTS[name]) for _ in range(2))  # each draws its own noise
    tokens, _ = draw_sequences(draw_tasks([0, 1], 2), "linear", [0, 1], 4, 3, 9)
    torch.testing.assert_close(layer.outputs(tokens, last=1), same.outputs(tokens)[..., -1:, :], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("choice", ["lowest scores", "least alike", "noise"])
def test_negatives_are_those_of_their_choice(choice):
    """App. D.3, in loops: of the last query, which sees every token; beta times the mean value of three is subtracted."""
    plain, layer = (draw_layer([0], 3, Variant(negatives=3, beta=beta, choice=choice)) for beta in (0.0, 0.7))
    tokens, _ = draw_sequences(draw_tasks([0], 2), "linear", [0], 4, 1, 9)
    q, k, v = (part[0, 0] for part in layer.projections(tokens))
    x = tokens[0, 0]
    likeness = {"lowest scores": k @ q[-1], "least alike": x @ x[-1] / x.norm(dim=-1)}
    if choice == "noise":
        drawn = torch.rand(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
        negatives = [one @ layer.W_V[0] for one in drawn]
    else:
        negatives = [v[i] for i in likeness[choice].argsort()[:3]]
    off = plain.outputs(tokens)[0, 0, -1] - layer.outputs(tokens)[0, 0, -1]
    torch.testing.assert_close(off, 0.7 * torch.stack(negatives).mean(0), rtol=1e-11, atol=1e-14)


def test_values_of_a_convolution_are_of_three_neighbors():
    """App. D.2, in loops; nothing stands before the first token and behind the last."""
    layer = draw_layer([0], 3, Variant(convolved=True))
    tokens, _ = draw_sequences(draw_tasks([0], 2), "linear", [0], 4, 1, 4)
    own, (before, here, behind) = tokens[0, 0] @ layer.W_V[0], (w[0] for w in layer.value_mlp)
    for t, found in enumerate(layer.projections(tokens)[2][0, 0]):
        whole = own[t] @ here + (own[t - 1] @ before if t else 0) + (own[t + 1] @ behind if t < 4 else 0)
        torch.testing.assert_close(found, torch.nn.functional.gelu(whole), rtol=1e-11, atol=1e-14)


def test_training_lowers_the_error():
    seeds = [0, 1]
    W = draw_tasks(seeds, 2)
    settings, rates = {**SETTINGS, "batch_size": 16}, torch.full((2,), 0.05, dtype=torch.float64)
    course = train_layer(draw_layer(seeds, 3, Variant()), W, settings, "linear", 150, seeds, rates)
    assert bool((course[-1][1] < course[0][1]).all())


def test_the_last_label_is_hidden():
    tokens, answers = draw_sequences(draw_tasks([0], 2), "exponential", [0], 4, 3, 5)
    assert tokens[..., -1, -1].abs().max() == 0
    x, W = tokens[0, :, -1, :2], draw_tasks([0], 2)[0]
    torch.testing.assert_close(answers[0], (x @ W).exp(), rtol=1e-11, atol=0)


def test_variants_that_are_nothing_are_plain():
    W, seeds = draw_tasks([0], 2), [0]
    sequences = draw_sequences(W, "linear", seeds, 4, 3, 5)
    plain = squared_errors(draw_layer(seeds, 3, Variant()), sequences)
    assert torch.equal(squared_errors(draw_layer(seeds, 3, Variant(negatives=2, beta=0.0)), sequences), plain)
    assert not torch.equal(squared_errors(draw_layer(seeds, 3, Variant(alpha=0.1)), sequences), plain)


def test_one_step_is_attention_and_wrong_labels_are_not():
    generator = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((6, 3), (6, 4), (3,)))
    output = (k @ q / 1.3).softmax(0) @ v
    torch.testing.assert_close(after_one_step(q, k, v, 1.3), output, rtol=1e-12, atol=1e-13)
    assert (after_one_step(q, k, v, 1.3, v[:5].flip(0)) - output).norm() > 1e-3  # far above rounding


def test_simplex_features_are_a_simplex_and_as_unbiased_as_their_lengths():
    projection = random_features.simplex_projections(8, 4, torch.Generator().manual_seed(0))
    unit = projection / projection.norm(dim=-1, keepdim=True)
    block = unit[:4] @ unit[:4].T
    torch.testing.assert_close(block, torch.eye(4).double() * (4 / 3) - 1 / 3, rtol=1e-12, atol=1e-12)
    normal = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(projection.norm(dim=-1), normal.norm(dim=-1), rtol=1e-12, atol=0)


def verdict(comparisons, words):
    return next(c for c in comparisons if words in c.what).holds


def test_equivalence_fails_where_it_should():
    errors = pd.DataFrame(dict(task="linear", seed=0, sequence=0, kernel="exact", error=[1e-15, 1e-3], shuffled_error=0.5))
    assert verdict(dual_equivalence.compare(errors), "largest") is False
    assert verdict(dual_equivalence.compare(errors.head(1)), "largest") is True


def test_a_trained_block_with_a_wrong_tangent_does_not_hold(monkeypatch):
    """The tangent of the MLP or the matrix of the norm, a half or a third too large, in heads of a shipped model."""

    def holds():
        return next(iter(dual_layer.compare_blocks(dual_layer.trained_blocks("facts-gpt2", 1)))).holds

    assert holds() is True
    for part, factor in (("_tangent", 1.5), ("_norm_map", 1.3)):
        right = getattr(layer, part)
        with monkeypatch.context() as patch:
            patch.setattr(layer, part, lambda *args, right=right, by=factor: (by * right(*args)[0], *right(*args)[1:]))
            assert holds() is False


def test_variants_are_tested_in_both_directions_or_not_at_all():
    def of(ratios, model="augmented keys, 2 layers", why=None, half=0.0, course=0.0):
        table = pd.DataFrame(dict(task="linear", model=model, seed=range(len(ratios)), half=half, end=ratios, course=course))
        return dual_variants.compare(table, {"linear": why})[0].verdict

    assert of([-0.2] * 8) == "holds"
    assert of([0.2] * 8) == "does not hold"
    assert of([0.2, -0.2] * 4) == "inconclusive"
    assert of([math.nan] * 8) == "inconclusive"
    assert of([0.2] * 8, "eq. 13, alpha 0.5") == "holds"  # the paper expects it to be worse
    assert of([-0.2] * 8, "augmented keys, 1 layer") == "inconclusive"  # the paper claims that these are faster
    assert of([0.0] * 8, "augmented keys, 1 layer", course=[-0.2] * 8) == "holds"
    assert of([0.0] * 8, "augmented keys, 1 layer", "too early", course=[-0.2] * 8) == "not trained far enough"
    assert of([-0.2] * 8, why="too early") == "not trained far enough"
    for half, settled in ((-0.224, True), (-0.226, False), (0.2, True)):  # 1.125 times as far; from the other side
        assert of([-0.2] * 8, half=half) == ("holds" if settled else "not trained far enough")
    assert of([0.2, -0.2] * 4, half=1.0) == "inconclusive"  # no ratio is found that could go to one


def test_what_is_comparable_is_held_against_a_tenth():
    """Nothing to find holds; twice a tenth does not, unless the ratio still goes to one; a tenth itself is undecided."""

    def of(task, model, end, half=0.0):
        noisy = np.array([end + x for x in (-0.01, 0.01) * 4])
        table = pd.DataFrame(dict(task=task, model=model, seed=range(8), half=half, end=noisy, apart=abs(noisy), course=0.0))
        return dual_variants.compare(table, {})[0].verdict

    tenth, keys = dual_variants.A_TENTH, ("trigonometric", "augmented keys, 1 layer")
    negatives = ("exponential", dual_variants.LOWEST)
    far = {0: "holds", tenth: "inconclusive", 2 * tenth: "does not hold", -2 * tenth: "does not hold"}
    assert {end: of(*keys, end) for end in far} == far
    assert [of(*negatives, end) for end in (0, 2 * tenth, -tenth, -2 * tenth)] == ["holds"] * 2 + [
        "inconclusive",
        "does not hold",
    ]
    assert of(*negatives, -2 * tenth, half=-4.0) == "not trained far enough" and of(*negatives, 0, half=-1.0) == "holds"


def test_differences_are_the_distances_from_the_nearer_plain_layer_at_the_end_and_in_the_course():
    courses = {
        dual_variants.PLAIN: (9.0, 2.0, 1.0),
        dual_variants.AGAIN: (9.0, 3.0, 1.0),
        "above": (7.0, 4.0, 1.0),
        "between, then below": (7.0, 2.5, 0.5),
        "diverged": (9.0, 2.0, math.inf),
    }
    curves = pd.DataFrame(
        [
            dict(task="t", model=model, seed=0, step=step, loss=loss)
            for model, losses in courses.items()
            for step, loss in zip((0, 10, 20), losses, strict=True)
        ]
    )
    found = dual_variants.differences(curves).set_index("model")[["half", "end", "course"]]
    assert found.loc["above"].tolist() == pytest.approx([math.log(4 / 3), 0.0, math.log(4 / 3) / 2])
    assert found.loc["between, then below"].tolist() == pytest.approx([0.0, -math.log(2), -math.log(2) / 2])
    assert found.loc["diverged", ["end", "course"]].isna().all()
    of_plain = curves["model"] == dual_variants.AGAIN
    lost = dual_variants.differences(curves.assign(loss=curves["loss"].where(~of_plain, math.inf)))
    assert lost["end"].isna().all()  # with one plain layer, nothing says what its initialization does


def test_a_combination_is_compared_with_the_nearer_of_what_it_is_made_of():
    losses = dict(zip(dual_variants.SINGLE, (0.4, 0.2), strict=True)) | {"all three": 0.8, "regularised and augmented": 0.1}
    curves = pd.DataFrame([dict(task="exponential", model=m, seed=0, step=9, loss=loss) for m, loss in losses.items()])
    found = dual_variants.differences(curves).set_index("model")["end"]
    assert found["all three"] == pytest.approx(math.log(2)) and found["regularised and augmented"] == pytest.approx(
        -math.log(2)
    )
    assert found[list(dual_variants.SINGLE)].isna().all()  # which are held against plain layers, and there are none


def test_a_setting_is_chosen_with_its_rate_on_seeds_that_are_not_compared(monkeypatch):
    seen = set()

    def course(label, task, settings, seeds, rates):
        seen.update(seeds)
        return pd.DataFrame(
            dict(loss=[abs(dual_variants.VARIANTS[label].alpha + 0.1) + abs(rate - 0.3) + 0.1 for rate in rates])
        )

    monkeypatch.setattr(dual_variants, "train_variant", course)
    settings = {**dual_variants.dual_variants.scales["small"], "seeds": [5, 7]}
    found = dual_variants.best_setting(dual_variants.CHOSEN_ALPHA, "linear", settings)
    assert found == ("regularised, alpha -0.1", 0.3) and min(seen) > 7
    assert dual_variants.best_setting("regularised, alpha 0.5", "linear", settings) == ("regularised, alpha 0.5", 0.3)


def test_with_several_tasks_each_sequence_has_its_own():
    """With as many demonstrations as dimensions, W can be solved for; it is another one for each sequence and each draw."""
    tasks = draw_tasks([0], 3)
    solved = []
    for stream in (3, 1000):
        tokens = draw_sequences(tasks, "linear", [0], stream, 2, 3, several=True)[0][0, :, :-1]
        solved += list(torch.linalg.solve(tokens[..., :3], tokens[..., 3]))
    assert all((a - b).norm() > 1e-3 for i, a in enumerate(solved) for b in [*solved[:i], tasks[0]])


def test_rises_of_the_error_are_added_up(monkeypatch):
    runs = {dual_variants.PLAIN: [1.0, 0.5, 0.5], dual_variants.UNSTABLE: [1.0, 2.0, math.inf]}

    def course(label, task, settings, seeds, rates):
        assert set(rates) == {0.005} and settings["batch_size"] == 1
        return pd.DataFrame([dict(seed=seed, step=i, loss=loss) for i, loss in enumerate(runs[label]) for seed in seeds])

    monkeypatch.setattr(dual_variants, "train_variant", course)
    rises = dual_variants.rises_as_printed({**dual_variants.dual_variants.scales["small"], "seeds": list(range(6))})
    assert rises.groupby("model")["rise"].mean().to_dict() == pytest.approx(
        {dual_variants.PLAIN: 0.0, dual_variants.UNSTABLE: math.log(dual_variants.DRAWN)}
    )
    (found,) = dual_variants.compare_rises(rises)
    assert found.verdict == "holds"


def normals(*shapes):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def test_dai_et_als_form_is_linear_attention_and_fine_tuning_keys_and_values_is_not():
    """App. F: attention over demonstrations and query is (W_ZSL + Delta W_ICL) q, both sums of outer products of values and
    keys. Their fine-tuning, (W_V + Delta_V) X X^T (W_K + Delta_K)^T q, has the form alone: with one query token the matrix has
    rank 1 for any Delta_V and Delta_K, so that by Eckart and Young most of the other cannot be had for all q.
    """
    d, n = 6, 20
    W_K, W_V, demonstrations, query = normals((d, d), (d, d), (n, d), (1, d))
    k, v = torch.cat([demonstrations, query]) @ W_K.T, torch.cat([demonstrations, query]) @ W_V.T
    q = query[0]
    attended = sum(v[j] * (k[j] @ q) for j in range(n + 1))
    start = dual.mean_outer(k[n:], v[n:], torch.tensor(1.0).double())  # W_ZSL
    added = dual.mean_outer(k[:n], v[:n], torch.tensor(1.0).double())  # Delta W_ICL
    torch.testing.assert_close(dual.predict(dual.weight_after(start, added, 1), q[None])[0], attended, rtol=1e-11, atol=0)
    torch.testing.assert_close(start, W_V @ query.T @ query @ W_K.T, rtol=1e-11, atol=1e-13)
    sizes = torch.linalg.svdvals(start + added)
    assert torch.linalg.matrix_rank(start) == 1
    assert sizes[1:].norm() > 0.5 * sizes.norm()


def test_the_optimum_of_the_dual_loss_of_a_regression_is_what_its_first_model_lacks():
    """App. F, eq. 37 and 38: the loss is linear in the dual model's W, so there is an optimum in a ball only; for inputs whose
    second moments are a multiple of the identity it is W - W_0 up to its length, and with W_0 the answer is right. For other
    inputs it is not.
    """
    d_x, d_y, n = 4, 3, 12
    W, W_0, drawn = normals((d_y, d_x), (d_y, d_x), (n, d_x))
    even = torch.linalg.qr(drawn)[0] * n**0.5
    for x, right in ((even, True), (drawn * torch.tensor([3.0, 1.0, 1.0, 0.2]).double(), False)):
        residuals = x @ (W - W_0).T
        free = torch.zeros(d_y, d_x, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(dual.dual_loss(free, x, residuals, torch.tensor(float(n)).double(), eta=1.0), free)
        best = -gradient / gradient.norm() * (W - W_0).norm()  # the least of a linear function in the ball of that radius
        off = float((best - (W - W_0)).norm() / (W - W_0).norm())
        assert off <= 1e-11 if right else off > 0.1
        if right:
            torch.testing.assert_close(x @ (W_0 + best).T, x @ W.T, rtol=1e-11, atol=1e-13)


def test_sentences_are_acceptable_or_have_one_fault():
    words = dict(noun=["king", "judge"], verb=["run"], adjective=["old"], adverb=["here"])
    patterns, generator = ("the {noun} {verb} {adverb}",), np.random.default_rng(0)
    right, wrong = ({bert_variants.sentence(words, patterns, label, generator) for _ in range(60)} for label in (True, False))
    assert right == {"the king runs here", "the kings run here", "the judge runs here", "the judges run here"}
    agreeing = {"the king run here", "the kings runs here", "the judge run here", "the judges runs here"}
    assert wrong == agreeing | {" ".join([one.split()[1], "the", *one.split()[2:]]) for one in right}


def test_dev_has_other_sentences_and_words_than_train(tmp_path):
    bert_variants.write_sentences(tmp_path, 3, train=200, dev=100)
    (train, labels), (dev, dev_labels) = (read_examples(tmp_path, split) for split in ("train", "dev"))
    assert (len(labels), len(dev_labels), labels.mean(), dev_labels.mean()) == (200, 100, 0.5, 0.5)
    drawn = {word + ending for word in " ".join(bert_variants.WORDS.values()).split() for ending in ("", "s")}
    first, second = ({word for text in split for word in text.split()} & drawn for split in (train, dev))
    assert min(len(first), len(second)) > 30 and not first & second


def test_more_features_and_other_kinds_are_tested():
    rows = [
        dict(kind=kind, n_features=m, seed=seed, what="output", mse=factor / m, mae=1.0)
        for kind, factor in (("iid", 2.0), ("orthogonal", 1.0), ("simplex", 1.5))
        for m in (8, 32)
        for seed in range(8)
    ]
    found = [*random_features.compare(pd.DataFrame(rows))]
    assert verdict(found, "iid: power") is True
    assert float(next(c for c in found if "iid: power" in c.what).ours) == pytest.approx(-1.0)
    assert verdict(found, "orthogonal against iid") is True
    assert verdict(found, "simplex against orthogonal") is False


def test_rank_correlations_and_their_chance():
    a = np.arange(6.0)
    assert dual_heads.spearman(a, a**3) == pytest.approx(1.0)
    assert dual_heads.spearman(a, -a) == pytest.approx(-1.0)
    assert dual_heads.chance_of_pairing(a, a) == pytest.approx(2 / 720)  # only the order and its reverse are as far
    assert dual_heads.chance_of_pairing(np.arange(4.0), np.arange(4.0)) == pytest.approx(2 / 24)  # four heads tell nothing


def test_earlier_occurrences():
    after = dual_heads._follows_earlier_occurrence(torch.tensor([[7, 3, 7, 5, 7]]))
    assert after[0].nonzero().tolist() == [[2, 1], [4, 1], [4, 3]]


def test_a_head_that_does_nothing_has_no_effect():
    model = HookedKVTransformer.from_zoo("induction-plain-2l").requires_grad_(False)
    model.blocks[0].attn.W_O[2] = 0
    frame = dual_heads.measure_heads(model, make_task("induction", vocab_size=512, length=32).heldout(2))
    effects = frame.groupby(["layer", "head"])["ablation_effect"].mean()
    assert abs(effects[0, 2]) < 1e-8 < 0.1 < effects.max()  # its pattern is hooked, which sums in another order in float32
    assert frame.groupby(["layer", "head"])["induction_score"].mean().max() > 0.3
    assert len(frame) == 2 * 2 * 4 and frame.notna().all().all()


def test_runs_that_diverge_leave_the_figure_and_the_verdict():
    """Errors of some seeds grow until they are infinite: the figure can be drawn, and nothing is concluded from the rest."""
    losses = {dual_variants.PLAIN: [0.5, 0.1], dual_variants.AGAIN: [0.5, 0.1], "augmented keys, 1 layer": [1e308, math.inf]}
    rows = [
        dict(task="exponential", model=model, seed=seed, step=step, loss=loss if seed else 0.1)
        for model, course in losses.items()
        for seed in range(8)
        for step, loss in zip((0, 1, 2), (1.0, *course), strict=True)
    ]
    curves = pd.DataFrame(rows)
    dual_variants.draw(curves).savefig(io.BytesIO())
    (found,) = dual_variants.compare(dual_variants.differences(curves), dual_variants.untrained(curves))
    assert found.holds is None and found.ours == "not finite for 7 of 8 seeds"

"""What the experiments on synthetic tasks read off their runs: answers known by hand, and claims that can fail."""

import itertools
import math
import types

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from tiny_runs import course, runs

from kvlens import HookedKVTransformer, HookedKVTransformerConfig
from kvlens.checks import from_fields
from kvlens.papers import find_experiment
from kvlens.papers.harness import learned
from kvlens.papers.harness.learned import steps_to
from kvlens.papers.kvsa import arithmetic, hops, induction_depth, induction_heads, induction_width, ngram
from kvlens.papers.kvsa.constructed_models import landscape_model
from kvlens.papers.kvsa.models import LLAMA_BLOCKS
from kvlens.tasks import ArithmeticTask, HopsTask, make_task
from kvlens.tasks.arithmetic import END as ARITHMETIC_END
from kvlens.training import TrainSettings, build_model

# --- induction: depth and width ---


SEEDS = range(6)


def depth_comparisons(**ends):
    """Comparisons of runs that end with (step, accuracy), one for each seed; by default:"""
    usual = dict(
        SHIFT_1=[(20 + i, 1.0) for i in SEEDS],
        PLAIN_2=[(40 + i, 1.0) for i in SEEDS],
        PLAIN_4=[(50 + i, 1.0) for i in SEEDS],
        PLAIN_1=[(500, 0.06)] * 6,
    )
    ends = {getattr(induction_depth, label): runs for label, runs in {**usual, **ends}.items()}
    curves = pd.concat(
        [
            course(label, seed, [0.05, accuracy], steps=[5, step], compared=compared, law="first repeat")
            for compared, labels in induction_depth.COMPARED.items()
            for label in labels
            for seed, (step, accuracy) in enumerate(ends[label])
        ],
        ignore_index=True,
    )
    steps = steps_to(curves, induction_depth.LEARNED, by=("compared", "law", "model", "seed"))
    return induction_depth.compare(curves, steps, 500, *induction_depth.untrained(curves, 1 / 16))


YES, NO, OPEN, UNTRAINED = "holds", "does not hold", "inconclusive", "not trained far enough"
NEVER = [(500, 0.9 - i / 100) for i in SEEDS]
FLAT = [(500, 0.987 - i / 2000) for i in SEEDS]


@pytest.mark.parametrize(
    ("ends", "verdicts"),
    [
        ({}, [YES, YES, YES, YES, YES]),
        (dict(PLAIN_2=[(30, 1.0)] * 5 + [(10, 1.0)]), [YES, YES, OPEN, YES, YES]),  # one seed is faster without shift
        (dict(SHIFT_1=NEVER), [NO, YES, NO, YES, YES]),
        (dict(SHIFT_1=NEVER, PLAIN_2=NEVER, PLAIN_4=NEVER), [NO, UNTRAINED, UNTRAINED, UNTRAINED, YES]),  # none reached it
        (dict(PLAIN_2=NEVER, PLAIN_1=[(90, 0.995)] * 6), [YES, UNTRAINED, YES, NO, NO]),  # one plain layer learns it, too
        (dict(PLAIN_2=FLAT), [YES, NO, YES, NO, YES]),  # two plain layers have learned what they do, which is not all
        (dict(PLAIN_2=[(500, 0.2)] * 6), [YES, UNTRAINED, YES, NO, YES]),  # they count with 500 steps, having learned nothing
        (dict(PLAIN_2=[(500, 0.2)] * 6, PLAIN_4=[(500, 0.2)] * 6), [YES, UNTRAINED, YES, UNTRAINED, YES]),  # neither reached it
        (dict(SHIFT_1=[(500, 0.2)] * 6), [NO, YES, NO, YES, UNTRAINED]),  # nor has one that could: the steps are too few
    ],
)
def test_depth_claims_hold_fail_and_stay_open_where_they_should(ends, verdicts):
    assert [comparison.verdict for comparison in depth_comparisons(**ends)] == verdicts


def test_a_claim_about_steps_says_how_many_runs_had_not_learned():
    """225 steps against more than 800 decides, whether or not the slower one's curve is flat."""
    usual = dict(SHIFT_1=[(225, 1.0)] * 6, PLAIN_2=[(500, 0.2)] * 5 + [(400, 1.0)])
    (fewer,) = (c for c in depth_comparisons(**usual) if "first repeats: 1 layer, KV shift, against" in c.what)
    assert (fewer.verdict, fewer.sample.n, fewer.sample.mean) == (YES, 6, pytest.approx((5 * 275 + 175) / 6))
    assert fewer.ours == "225 against more than 500 (5 of 6 runs count with 500 steps, not having learned)"


def test_infinite_steps_are_described_in_words():
    assert induction_depth.in_words(150.0, 800) == "150"
    assert induction_depth.in_words(math.inf, 800) == "more than 800"


def test_width_is_tested_at_each_width_seed_by_seed():
    def near(steps):
        return [steps + i for i in SEEDS]

    shifted = {8: near(200), 16: near(400), 32: near(300), 64: [math.inf] * 6}
    plain = {8: [math.inf] * 6, 16: near(100), 32: near(300), 64: [math.inf] * 6}
    rows = [
        (d_model, label, seed, size, steps)
        for label, by_width, size in ((induction_width.SHIFT_1, shifted, 100), (induction_width.PLAIN_2, plain, 150))
        for d_model, each in by_width.items()
        for seed, steps in enumerate(each)
    ]
    table = runs(*rows, columns=["d_model", "model", "seed", "n_parameters", "steps"])
    by_width = induction_width.compare(table, 600)
    assert [c.holds for c in by_width] == [True, False, None, None]
    assert by_width[0].sample.mean == pytest.approx(600 - 202.5)  # runs that have not learned count with what they had
    assert "(means 600 and 202; a run that has not come so far counts with 600)" in by_width[0].what


@pytest.mark.parametrize("width", [8, 16, 32, 1024])
def test_the_plain_model_of_figure_1b_has_twice_the_parameters(width):
    """KVSA fig. 1b, at our widths and that of fig. 1a: embeddings left out, and the four coefficients of each of two heads."""
    sizes = []
    for label in (induction_width.SHIFT_1, induction_width.PLAIN_2):
        own = induction_width.MODELS[label]
        size = dict(d_model=width, d_head=width // 2, n_ctx=8, d_vocab=9, init_weights=False)
        with torch.device("meta"):  # weights that take no memory
            model = HookedKVTransformer(HookedKVTransformerConfig(**size, **LLAMA_BLOCKS, **own), move_to_device=False)
        sizes.append(sum(p.numel() for p in model.blocks.parameters()))
    shifted, plain = sizes
    assert plain == 2 * (shifted - 2 * 4)
    assert 1.98 < plain / shifted < 2


def shifted_elsewhere(label):
    """A layer whose MLP is silent, shifted at that place; its coefficients are 0.3 and 0.9."""
    size = dict(n_layers=1, d_model=8, n_heads=2, d_head=4, n_ctx=9, d_vocab=7, act_fn="gelu", normalization_type="RMS")
    size |= dict(positional_embedding_type="none", dtype=torch.float64, seed=0)
    model = HookedKVTransformer(HookedKVTransformerConfig(**size)).requires_grad_(False)
    model.blocks[0].attn.W_Q.mul_(20)  # so that heads are not uniform
    model.blocks[0].mlp.W_out.zero_()
    induction_width.shift_at(model, label, seed=0)
    model.blocks[0].mix.coefficients.data = torch.tensor([0.3, 0.9], dtype=torch.float64)
    return model


@pytest.mark.parametrize("label", induction_width.PLACES)
def test_the_stream_is_shifted_at_the_place_of_its_label(label):
    """App. J, written out with the norm and the attention of the same weights."""
    model, text = shifted_elsewhere(label), torch.tensor([[3, 1, 4, 1, 5]])
    logits, cache = model.run_with_cache(text)
    torch.testing.assert_close(model(text), logits, rtol=1e-11, atol=1e-13)  # as in training, where nobody looks
    x, attn = model.embed(text), model.blocks[0].attn

    def mix(x):
        return torch.stack([0.3 * x[0, t] + (0.9 * x[0, t - 1] if t else 0) for t in range(5)])[None]

    def norm(x):
        return x / (x.square().mean(dim=-1, keepdim=True) + model.cfg.eps).sqrt() * model.blocks[0].ln1.w

    def attend(x):
        return attn(query_input=x, key_input=x, value_input=x)

    expected = {
        ("before", "Norm"): lambda: x + attend(norm(mix(x))),
        ("after", "Norm"): lambda: x + attend(mix(norm(x))),
        ("before", "Add"): lambda: x + mix(attend(norm(x))),
        ("after", "Add"): lambda: mix(x + attend(norm(x))),
    }[induction_width.PLACES[label]]()
    torch.testing.assert_close(cache["blocks.0.hook_resid_post"], expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("label", induction_width.PLACES)
def test_a_shift_behind_attention_does_not_see_in_which_order_a_text_was(label):
    """One layer without positions, at the last token: the tokens before the last two may come in any order, so of the token
    behind a repeated one nothing is known. A shift before attention sees the order.
    """
    model, text = shifted_elsewhere(label), torch.tensor([[0, 1, 2, 3, 4, 1]])
    other = torch.tensor([[3, 1, 0, 2, 4, 1]])
    here, there = (model(one)[0, -1].log_softmax(dim=-1) for one in (text, other))
    if induction_width.PLACES[label][1] == "Add":
        torch.testing.assert_close(here, there, rtol=1e-11, atol=1e-13)
    else:
        assert (here - there).abs().max() > 1e-3


@pytest.mark.parametrize("label", induction_width.PLACES)
def test_a_run_that_is_shifted_elsewhere_trains_its_coefficients_and_is_not_kept(label, tmp_path):
    task = make_task("induction", vocab_size=8, length=8)
    training = dict(steps=3, batch_size=4, eval_every=3, eval_sequences=4, learning_rate=1e-2)
    cell = induction_width.WidthCell(task, {label: dict(n_layers=1, d_model=8, d_head=4)}, training=training)
    with learned.keeping_runs(tmp_path / "kept"):
        (run,) = cell.trials(label, [0])
        model, _ = run.train()
    start = induction_width.Mix(0).coefficients
    assert not (tmp_path / "kept").exists() and (model.blocks[0].mix.coefficients - start).abs().min() > 1e-4


# --- induction: heads ---


def head_table(*models):
    """Rows of `induction_heads.head_rows`; each model: label, seed, and (alpha_1, beta_1, score) of its heads."""
    rows = [(label, seed, *head) for label, seed, heads in models for head in heads]
    return runs(*rows, columns=["model", "seed", "alpha_1", "beta_1", "score"])


def test_the_head_that_starts_nearest_to_the_induction_head_is_compared_with_the_others():
    """(0.5, 1) is 0.5 from (0, 1), (0.4, 0.6) is 0.57, (0, 0) is 1."""
    starts = [(0.0, 0.0), (0.5, 1.0), (0.4, 0.6)]

    def tested(scores):
        heads = [(*start, score) for start, score in zip(starts, scores, strict=True)]
        models = [(induction_heads.SHIFT_1, seed, [(a, b, s + seed / 100) for a, b, s in heads]) for seed in SEEDS]
        return induction_heads.compare_starts(head_table(*models))

    near, far = tested((0.1, 0.9, 0.2)), tested((0.9, 0.1, 0.9))
    assert (near.verdict, near.sample.mean, near.ours) == (YES, pytest.approx(0.75), "0.93 against 0.18")
    assert (far.verdict, far.sample.mean) == (NO, pytest.approx(-0.8))


def test_heads_stand_out_by_the_largest_gap_between_neighbors():
    scores = ((0.9, 0.1, 0.15, 0.95), (0.5, 0.9), (0.2, 0.8, 0.1))
    each = itertools.product(zip(induction_heads.MODELS, scores, strict=True), SEEDS)
    heads = head_table(*((model, seed, [(0, 0, score) for score in own]) for (model, own), seed in each))
    one, two = (induction_heads.compare_gaps(heads, m) for m in (induction_heads.SHIFT_1, induction_heads.SHIFT_2))
    assert [one.verdict, two.verdict] == [YES, NO]
    assert (one.ours, two.ours) == ("0.75 against 0.60", "0.40 against 0.60")


@pytest.mark.parametrize(("plain_ends", "gaps"), [(1.0, OPEN), (0.5, UNTRAINED)])
def test_heads_of_models_that_have_not_learned_are_not_compared(plain_ends, gaps):
    ends = {induction_heads.PLAIN_2: plain_ends}
    trained = itertools.product(induction_heads.MODELS, SEEDS)
    curves = pd.concat(course(m, seed, [0.1, ends.get(m, 1.0)]) for m, seed in trained)
    why = induction_heads.untrained(curves, induction_heads.induction_heads.scales["small"])
    heads = head_table(*((m, seed, [(0, 0, 0.1), (0, 1, 0.9)]) for m in induction_heads.MODELS for seed in SEEDS))
    assert [c.verdict for c in induction_heads.compare(heads, why)] == [YES, gaps, gaps]


def test_scores_of_an_induction_head():
    """The head of th. 3 at (0, 1), made sharp; that its values are twice as large does not count."""
    model = landscape_model(torch.eye(12, dtype=torch.float64))
    attn = model.blocks[0].attn
    with torch.no_grad():
        attn.W_Q.mul_(50)
        attn.k_shift_coef.copy_(torch.tensor([[0.0, 1.0]]))
        attn.v_shift_coef.copy_(torch.tensor([[2.0, 0.0]]))
    (row,) = induction_heads.head_rows(model, model, 4, 6)
    assert (row["score"], row["alpha_1"], row["beta_1"]) == (pytest.approx(1, abs=1e-11), 0, 2)
    with torch.no_grad():
        attn.W_Q.zero_()  # attends to all tokens equally
        attn.v_shift_coef.copy_(torch.tensor([[0.0, 1.0]]))  # and reads their predecessors
    (row,) = induction_heads.head_rows(model, model, 4, 6)
    # the token at the lag is read one position later; the queries of the second copy see 7 to 12 positions
    assert row["score"] == pytest.approx(sum(1 / n for n in range(7, 13)) / 6, abs=1e-11)


# --- 3-grams and hops ---


@pytest.mark.parametrize(
    ("plain", "shifted", "verdicts"),
    [
        ((0.75, 0.80), (0.85, 0.90), [YES, NO]),
        ((0.75, 0.80), (0.75, 0.75), [NO, YES]),
        ((0.75, 0.80), (0.75, 0.80), [OPEN, OPEN]),
        ((0.75, 0.80), (0.79, 0.80), [OPEN, NO]),  # a lead on the way that is gone at the end
        ((0.15, 0.15), (0.20, 0.20), ["not trained far enough"] * 2),  # every seed is better, but none has learned anything
        ((0.20, 0.80), (0.25, 0.85), ["not trained far enough"] * 2),  # both still learn
    ],
)
def test_ngram_tests_harm_at_the_end_and_gain_during_training(plain, shifted, verdicts):
    curves = pd.concat(
        [
            course(label, seed, [mean + 0.01 * seed for mean in means], size="s", chance=0.125)
            for label, means in (("plain", plain), ("KV shift", shifted))
            for seed in SEEDS
        ]
    )
    end, way = ngram.compare(curves, ngram.untrained(curves))
    assert [end.verdict, way.verdict] == verdicts
    assert end.ours.startswith(f"{shifted[1] - plain[1]:+.3f} ± 0.000")
    assert way.ours.startswith(f"{sum(shifted) / 2 - sum(plain) / 2:+.3f} ± 0.000")


def hop_rows(plain, shifted, n_layers=2, hops=(1, 2, 3), chance=0.25):
    rows = [(n_layers, k, label, seed, accuracy, chance)
            for label, accuracies in (("plain", plain), ("KV shift", shifted))
            for k, pair in zip(hops[: len(accuracies)], accuracies, strict=True)
            for seed, accuracy in enumerate(pair)]  # fmt: skip
    return runs(*rows, columns=["n_layers", "k", "model", "seed", "accuracy", "chance"])


def test_hops_made_count_a_part_for_a_part_and_none_beyond_what_was_not_learned():
    """From chance 0.25 to 0.9 the accuracy 0.575 is half of the way; 0.1 is below chance, 1.0 as good as 0.9."""
    final = hop_rows(
        plain=[(0.575, 0.9), (0.99, 0.99), (0.1, 0.1)], shifted=[(1.0, 1.0), (0.575, 0.96), (0.2, 0.9)], hops=(1, 2, 4)
    )
    expected = runs(
        (2, "KV shift", 0, 1.5), (2, "KV shift", 1, 4.0), (2, "plain", 0, 1.0), (2, "plain", 1, 2.0),
        columns=["n_layers", "model", "seed", "hops"],
    )  # fmt: skip
    pd.testing.assert_frame_equal(hops.hops_made(final.sample(frac=1, random_state=0)), expected)


def test_too_shallow_is_distinguished_from_too_few_steps():
    """A model that cannot learn is informative if a similar one has learned in as many steps, and its curve is flat."""

    def why(one_hop, two_hops):
        curves = [
            course(model, seed, ends, n_layers=2, k=k)
            for model in ("plain", "KV shift")
            for k, ends in ((1, one_hop), (2, two_hops))
            for seed in SEEDS
        ]
        return hops.untrained(pd.concat(curves), {1: 1 / 4, 2: 1 / 4})[2]

    assert why((0.9, 0.95), (0.25, 0.26)) is None
    assert "has learned 0%" in why((0.25, 0.25), (0.25, 0.25))
    assert "still improves: all of the gain" in why((0.9, 0.95), (0.25, 0.75))
    # 11 % of what was learned at the easiest difficulty, but 22 % of the model's own gain
    assert "still improves: 22% of the gain" in why((0.9, 0.95), (0.53, 0.61))


class Hopper:
    """A model that makes one hop whatever the first token says."""

    cfg = types.SimpleNamespace(device="cpu")

    def __call__(self, inputs):
        text = inputs[:, 1:]
        found = HopsTask(k=1, vocab_size=4, length=text.shape[1])._find(text, None)
        answers = torch.where(found >= 0, text.gather(1, found.clamp(min=0)), 0)
        return torch.nn.functional.one_hot(torch.cat([inputs[:, :1], answers], dim=1), 99).float()


@pytest.mark.unhooked
def test_answers_are_counted_by_the_hops_that_their_text_asks_for():
    task = HopsTask(k=3, vocab_size=4, length=24, mixed=True)
    found = hops.accuracies(Hopper(), task, 200)
    assert list(found) == [1, 2, 3] and found[1] == 1
    assert found[2] == 0  # where the second hop leads is the token after one like this, and so another
    assert 0.3 < found[3] < 0.7


def test_one_model_for_all_hops_is_compared_hop_by_hop(monkeypatch):
    """Its curve over all hops must be flat; the accuracies come from `hops.accuracies`."""

    def pretend(cell, progress):
        assert (cell.task.k, cell.task.mixed, cell.task.d_input) == (5, True, 9)
        curves = pd.concat(course(model, seed, [0.7, 0.72]) for model in cell.models for seed in cell.seeds)
        return curves, [row for model in cell.models for seed in cell.seeds for row in cell.examine(model, seed, model)]

    monkeypatch.setattr(learned, "train_cell", pretend)
    ends = {"plain": {1: 0.99, 3: 0.9, 5: 0.575}, "KV shift": {1: 1.0, 3: 0.95, 5: 0.9}}
    monkeypatch.setattr(hops, "accuracies", lambda model, *_: ends[model])
    settings = {**hops.hops.scales["small"], "mixed": True, "depths": [5], "hops": [1, 3, 5]}
    outcome = hops.hops.run(settings, lambda text: None)
    made, better = outcome.comparisons
    assert (made.verdict, made.ours, better.verdict) == (YES, "5 against 4", YES)
    assert "trained on all numbers of hops" in outcome.differences[1]


# --- arithmetic ---


class Scribe:
    """A model that has memorized every problem's text, with given errors."""

    def __init__(self, task, n_ops, n_problems, wrong_steps=0, wrong_for_good=0):
        self.wrong_for_good = wrong_for_good
        exact = ArithmeticTask(**{**task.settings(), "test_ops": n_ops})
        inputs, targets, _ = exact.heldout(n_problems, 5)
        self.text = torch.cat([inputs[:, :1], targets], dim=1)
        self.question = exact.question_length(n_ops)
        self.answer = self.question + exact.solution_length(n_ops) - 1
        self.wrong_steps = wrong_steps

    def parameters(self):
        return iter([torch.zeros(1)])

    def generate(self, tokens, max_new_tokens, **_):
        assert torch.equal(tokens, self.text[:, : self.question])  # the question, whole, and nothing of the solution
        assert max_new_tokens == self.answer - self.question + 1 + 8  # room for one step more
        written = self.text[:, : self.answer + 1].clone()
        written[: self.wrong_steps, -1] = 0
        more = written[:, self.question :][:, -7:].clone()  # the last step once more, now right
        more[:, -1] = self.text[:, self.answer]
        end = torch.full_like(more[:, :1], ARITHMETIC_END)
        more[: self.wrong_for_good, -1] = 0
        return torch.cat([written, end, more], dim=1)


@pytest.mark.unhooked
@pytest.mark.parametrize("n_ops", [1, 2, 4])
def test_an_answer_counts_if_some_step_gives_it(n_ops):
    task = ArithmeticTask(max_ops=3, test_ops=4, modulus=5, n_names=7)
    scribe = Scribe(task, n_ops, 8, wrong_steps=3, wrong_for_good=1)
    assert arithmetic.answer_accuracy(scribe, task, n_ops, 8, seed=5) == 7 / 8


def test_answers_are_the_greedy_ones_of_the_model_itself():
    task = ArithmeticTask(max_ops=1, test_ops=2, modulus=3, n_names=4)
    model = build_model(task, dict(n_layers=1, d_model=12, d_head=6, n_ctx=task.n_positions + 8))
    inputs, targets, _ = task.heldout(11, 2)
    text = inputs[:, : task.question_length(2)]
    with torch.no_grad():
        for _ in range(task.solution_length(2) + 8):
            text = torch.cat([text, model(text)[:, -1:].argmax(-1)], dim=1)
    question = task.question_length(2)
    right = task.some_step_answers(text[:, question:], inputs[:, question - 2], targets[:, -1])
    assert arithmetic.answer_accuracy(model, task, 2, 11, seed=2) == float(right.double().mean())


@pytest.mark.parametrize(("chance", "holds"), [(0.2, [None, True, False]), (0.7, [None, None, None])])
def test_arithmetic_compares_answers_scored_as_in_the_paper_unless_the_plain_model_guesses(chance, holds):
    rows = [("Tr3-Te4", "Tr12-Te15", 3, 4, chance, label, seed, n_ops, accuracy)
            for label, ends in (("plain", 0.25), ("KV shift", 0.5))
            for seed in SEEDS
            for end in (ends + seed / 20,)
            for n_ops, accuracy in ((4, end), (3, 1.1 - end))]  # fmt: skip
    names = ["row", "stands_for", "max_ops", "test_ops", "chance", "model", "seed", "n_ops", "accuracy"]
    answers, flat = runs(*rows, columns=names), course("plain", 0, [0.99, 0.99], row="Tr3-Te4")
    plain, shifted, trained = arithmetic.compare(answers, arithmetic.untrained(flat, answers))
    assert plain.verdict == "not tested" and (shifted.untrained is None) is (chance == 0.2)
    assert (plain.paper, plain.ours, plain.tested) == (0.8154, pytest.approx(0.375), False)
    assert (shifted.paper, shifted.ours) == (0.8909, pytest.approx(0.625))
    assert (trained.paper, trained.ours) == (None, "-0.250 ± 0.000 (6 seeds)")
    assert [plain.holds, shifted.holds, trained.holds] == holds


def test_the_tests_length_is_not_seen_before_the_test(monkeypatch):
    """Weights are chosen on problems of the trained lengths; the models' context fits the longer ones."""
    seen = []

    def pretend(cell, progress):
        seen.append((cell.task, cell.models))
        return course("plain", 0, [0.5]), cell.examine("plain", 0, None)

    monkeypatch.setattr(learned, "train_cell", pretend)
    monkeypatch.setattr(arithmetic, "answer_accuracy", lambda model, task, n_ops, *_: n_ops / 10)
    settings = arithmetic.arithmetic.scales["small"]
    _, examined = learned.train_cells(arithmetic.cells(settings), settings, lambda text: None)
    (task, models), longer = seen[0], make_task("arithmetic", max_ops=2, test_ops=3)
    assert (task.max_ops, task.test_ops) == (2, 0)
    assert all(model["n_ctx"] == longer.n_positions + 8 > task.n_positions for model in models.values())
    assert examined["accuracy"].tolist() == [0.1, 0.2, 0.3]


# --- settings ---


@pytest.mark.parametrize("name", ["induction-depth", "induction-width", "induction-heads", "ngram", "hops", "arithmetic"])
def test_the_small_scale_is_sound_up_to_the_training(name, monkeypatch):
    """Tasks, training settings and heads fit; tables, comparisons and figure come out of runs that all end at 1/2."""

    def pretend(cell, progress):
        assert cell.rates and "steps" in cell.training
        assert all(from_fields(TrainSettings, {**cell.training, "learning_rate": rate}) for rate in cell.rates)
        assert all(model["d_model"] % model["d_head"] == 0 for model in cell.models.values())
        runs = list(itertools.product(cell.models, cell.seeds))
        examined = [row for run in runs if cell.examine is not None for row in cell.examine(*run, None)]
        return pd.concat([course(*run, [0.1, 0.5], n_parameters=9) for run in runs]), examined

    monkeypatch.setattr(learned, "train_cell", pretend)
    monkeypatch.setattr(arithmetic, "answer_accuracy", lambda *_: 0.5)
    two_heads = [dict(alpha_1=0.5, beta_1=beta, score=score) for beta, score in ((0.5, 0.2), (0.6, 0.2))]
    monkeypatch.setattr(induction_heads, "head_rows", lambda *_: two_heads)
    experiment = find_experiment(name)
    outcome = experiment.run(experiment.scales["small"], lambda text: None)
    assert isinstance(outcome.figure(), Figure)
    assert all(len(table) > 0 for table in outcome.tables.values())
    ours = outcome.comparisons[0].ours
    alike = isinstance(ours, str) and " against " in ours and len(set(ours.split(" against "))) == 1
    assert alike or ours in (0.5, "+0.000 ± 0.000 (6 seeds)")

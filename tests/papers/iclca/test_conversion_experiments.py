"""``conversion-accuracy``, ``conversion-error``, ``trainable-bias``: measurements against references, and claims that fail."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from precision import LAW, relative_error
from small_models import logits_under, model_of, shared, tokens

from kvlens import KVLensError, convert_prompt
from kvlens.conversion import Landmark, recall
from kvlens.model import HookedKVTransformer
from kvlens.papers.harness.learned import keeping_runs, trained_further
from kvlens.papers.iclca import (
    compaction,
    conversion_accuracy,
    conversion_error,
    direct_conversion,
    softmax_conversion,
    stored_bias,
    trainable_bias,
)
from kvlens.papers.iclca.conversion_accuracy import ALONE, CONVERTED, PROMPTED
from kvlens.papers.iclca.direct_conversion import Moments, best_pair, left_over
from kvlens.papers.iclca.logits import context_of, prompted_logits, writing_model
from kvlens.papers.iclca.softmax_conversion import DISTILLED, ways
from kvlens.tasks import Batch, make_task

LETTERS = "abcdefghijk"
TASK = make_task("bigrams", n_letters=len(LETTERS), n_triggers=3, length=23, trigger_rate=0.5)
CUT = 10


def tiny_model(**changes):
    return conversion_error.random_model(3, 24, 6, **changes)


# --- conversion-error ---


def test_relative_error_by_hand():
    old = torch.tensor([[[3.0, 0.0], [0.0, 4.0]], [[1.0, 0.0], [0.0, 0.0]]])
    new = old + torch.tensor([[[0.0, 0.3], [0.4, 0.0]], [[0.0, 0.0], [0.0, 0.25]]])
    error = conversion_error.pair_errors(new, old)
    assert error.dtype == torch.float64
    assert error.tolist() == pytest.approx([0.5 / 5, 0.25], rel=1e-6)  # 0.3 and 0.4 are float32's


@pytest.mark.parametrize("positions", ["rotary", "standard"])
def test_the_float64_forward_pass_is_one_and_leaves_the_model_as_it_was(positions):
    model = tiny_model(positional_embedding_type=positions)
    exact = tiny_model(positional_embedding_type=positions, dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    tokens, _ = next(conversion_error.random_pairs(5, 13, 2, batch_size=5, seed=0))
    logits, expected = conversion_error.float64_logits(model, tokens), exact(tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    assert (model(tokens).double() - expected).abs().max() > 1e-9  # a float32 pass would not do
    assert model.cfg.dtype == torch.float32
    assert all(
        weight.dtype == before[name].dtype and torch.equal(weight, before[name]) for name, weight in model.state_dict().items()
    )


def test_random_pairs_are_one_draw_however_they_are_batched():
    def joined(batch_size):
        prompts, texts = zip(*conversion_error.random_pairs(7, 5, 3, batch_size=batch_size, seed=2), strict=True)
        return torch.cat(prompts), torch.cat(texts)

    prompt, text = joined(7)
    assert prompt.shape == (7, 5) and text.shape == (7, 3)
    assert len(prompt.unique(dim=0)) == 7
    for part, whole in zip(joined(3), (prompt, text), strict=True):
        assert torch.equal(part, whole)


def test_conversion_error_is_rounding_in_float64_and_seen_where_a_bias_is_wrong(monkeypatch):
    model = tiny_model(dtype=torch.float64)
    prompt, text = next(conversion_error.random_pairs(4, 11, 6, batch_size=4, seed=1))
    error, old = conversion_error.error_of_conversion(model, prompt, text)
    assert old.shape == (4, 6, conversion_error.D_VOCAB)
    assert torch.equal(old, model(torch.cat([prompt, text], dim=1))[:, 11:])
    assert error.shape == (4,) and error.max() < 1e-13
    right = conversion_error.convert_prompt
    monkeypatch.setattr(conversion_error, "convert_prompt", lambda model, prompt: 0.9 * right(model, prompt))
    assert conversion_error.error_of_conversion(model, prompt, text)[0].min() > 1e-4  # far above rounding


def errors_table(conversion, own, wide, size="205K"):
    rows = [
        dict(measure=measure, accumulation=accumulation, relative_error=value, pair=pair)
        for measure, accumulation, value in (
            (conversion_error.CONVERSION, "float32", conversion),
            (conversion_error.CONVERSION, "float64", wide),
            (conversion_error.FORWARD, "float32", own),
            (conversion_error.FORWARD, "float64", own),
        )
        for pair in (0, 1)
    ]
    return pd.DataFrame(rows).assign(size=size, n_parameters=1000)


def test_the_claims_of_table_1_hold_for_rounding_and_fail_for_more():
    good, bad = (conversion_error.summarize(errors_table(c, 4e-7, w)) for c, w in ((5e-7, 0.0), (9e-7, 1e-6)))
    assert [c.holds for c in conversion_error.compare(good)] == [True] * 3
    assert [c.holds for c in conversion_error.compare(bad)] == [False] * 3
    first, ratio, wide = conversion_error.compare(good)
    assert (first.paper, first.ours, ratio.ours, wide.ours) == (2.9e-7, 5e-7, pytest.approx(1.25), 0.0)
    unprinted = conversion_error.summarize(errors_table(5e-7, 4e-7, 0.0, size="7K"))
    assert len(list(conversion_error.compare(unprinted))) == 2


@pytest.mark.parametrize(("factor", "holds"), [(1.2, False), (4.0, True)])
def test_the_growth_of_the_error_is_per_tenfold_size(factor, holds):
    noise = [1.0, 1.1, 0.9, 1.05, 0.95, 1.02, 0.98]
    rows = [
        dict(n_parameters=1000 * 10**place, pair=pair, relative_error=1e-7 * wobble * factor**place)
        for place, (pair, wobble) in itertools.product(range(3), enumerate(noise))
    ]
    table = pd.DataFrame(rows).assign(measure=conversion_error.CONVERSION, accumulation="float32", size="x")
    (grown,) = conversion_error.compare_sizes(table)
    assert grown.ours == pytest.approx(factor) and grown.holds is holds
    assert not list(conversion_error.compare_sizes(table[table["n_parameters"] == 1000]))


def test_the_bias_has_its_share_of_the_parameters():
    size = dict(name="x", n_layers=3, d_model=24, d_head=6)
    model = conversion_error.random_model(3, 24, 6)
    bias = conversion_error.convert_prompt(model, torch.arange(5))
    n = sum(p.numel() for p in model.parameters())
    (share,) = conversion_error.compare_bias_sizes([size], pd.DataFrame([dict(size="x", n_parameters=n)]))
    own = (bias.stacked("b_kv").numel() + bias.stacked("b_d").numel()) / n  # with four heads, the first of those to choose
    assert share.ours.split(", ")[0] == f"{own:.2%}" and "with 4, 6, 8, 12 heads" in share.what and share.holds is None
    by_size = {k: pd.DataFrame([dict(size="x", n_parameters=round(k * n))]) for k in (0.3, 1.3, 9)}
    assert [next(conversion_error.compare_bias_sizes([size], t)).holds for t in by_size.values()] == [False, True, False]


@pytest.mark.parametrize(("n_layers", "holds"), [(1, True), (2, False)])
def test_biases_of_two_prompts_can_be_added_in_one_layer_without_positions(n_layers, holds):
    model = conversion_error.random_model(n_layers, 24, 6, positional_embedding_type="none", dtype=torch.float64)
    parts = (torch.arange(7 * k, 7 * k + 14).view(2, 7) % 60 for k in (1, 2, 3))
    errors = conversion_error.combined(model, *parts)
    errors = pd.concat([errors] * 3).assign(model="m")  # six pairs, which a verdict takes
    added, behind = conversion_error.compare_combined(errors)
    assert (added.holds, behind.holds) == (holds, True)


def test_the_summary_is_a_mean_over_pairs_with_its_spread():
    errors = errors_table(5e-7, 4e-7, 0.0)
    errors.loc[0, "relative_error"] = 1e-7
    row = conversion_error.summarize(errors).iloc[0]
    assert (row["n_pairs"], row["relative_error"], row["least"], row["largest"]) == (2, pytest.approx(3e-7), 1e-7, 5e-7)
    printed = conversion_error.summarize(errors)["printed"]
    assert printed.notna().tolist() == [True, False, False, False]


# --- conversion-accuracy ---


def bigram_model(**changes):
    fields = dict(d_vocab=len(LETTERS), feature_map="identity", normalizer="none")
    return conversion_error.random_model(2, 30, 10, **{**fields, **changes})


def ids_of(letters):
    return torch.tensor([LETTERS.index(letter) for letter in letters])


def test_uses_are_counted_from_one_for_each_trigger():
    text = ids_of("dabaaecbka")[None]
    assert conversion_accuracy.use_of_trigger(text, 3).tolist() == [[0, 1, 1, 2, 3, 0, 1, 2, 0, 4]]


def test_what_follows_the_end_of_the_prompt_is_not_scored():
    """The prompt ``adbea`` shows a -> d and b -> e and ends in a: the text opens with d, which would give a away."""
    inputs = ids_of("adbeadfabe")[None]
    scored = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 1, 1, 0]], dtype=torch.bool)
    hidden = conversion_accuracy.hide_open_trigger(Batch(inputs, inputs.roll(-1, 1), scored), 5)
    assert hidden.scored.nonzero().tolist() == [[0, 8]]


def test_predictions_by_hand():
    """Text ``ada``: at the second a, d follows. One condition has it right by a margin of 2, one wrong, one right by 0.5."""
    text = ids_of("ada")[None]
    batch = Batch(text, ids_of("dad")[None], torch.tensor([[True, False, True]]))
    logits = torch.zeros(3, 1, 3, len(LETTERS))
    logits[0, 0, 2, 3], logits[1, 0, 2, 4], logits[2, 0, 2, 3] = 2, 1, 0.5
    logits[:, 0, 0, 3] = 3
    named = dict(zip(conversion_accuracy.CONDITIONS, logits, strict=True))
    table = conversion_accuracy.score(TASK, batch, named, first_sequence=7)
    assert set(table["sequence"]) == {7} and set(table["trigger"]) == {"a"} and set(table["follower"]) == {"d"}
    second = table[table["position"] == 2].set_index("condition")
    assert second["use"].tolist() == [2, 2, 2]
    assert second["prediction"].to_dict() == {PROMPTED: "d", ALONE: "e", CONVERTED: "d"}
    assert second["is_right"].to_dict() == {PROMPTED: True, ALONE: False, CONVERTED: True}
    assert second["margin"].tolist() == [2, 1, 0.5]
    assert second["change"].tolist() == [0, 2, 1.5]
    assert conversion_accuracy.n_disagreeing(table) == 0
    accuracy = conversion_accuracy.accuracy_by_use(table).set_index(["condition", "use"])
    assert accuracy.loc[(ALONE, 2), ["n_scored", "n_right", "accuracy"]].tolist() == [1, 0, 0]
    assert accuracy.loc[(ALONE, 1), ["n_scored", "n_right", "accuracy"]].tolist() == [1, 1, 1]


@pytest.mark.parametrize("changes", [{}, dict(positional_embedding_type="standard", feature_map="relu", normalizer="kernel")])
def test_the_three_readings_are_those_of_the_model(changes):
    model = bigram_model(dtype=torch.float64, **changes)
    tokens = TASK.sample(4, torch.Generator().manual_seed(3)).inputs
    logits = conversion_accuracy.read_three_ways(model, tokens, CUT)
    assert {part.shape for part in logits.values()} == {(4, TASK.length - CUT, len(LETTERS))}
    torch.testing.assert_close(logits[CONVERTED], logits[PROMPTED], rtol=0, atol=1e-12)
    assert torch.equal(logits[ALONE], model(tokens[:, CUT:]))
    assert (logits[ALONE] - logits[PROMPTED]).abs().max() > 1e-3  # far above rounding
    assert model.attached_kv_bias is None


def test_measuring_is_one_draw_of_tables_that_belong_together():
    model, settings = bigram_model(), dict(prompt_length=CUT, n_sequences=9, batch_size=4, seed=5)
    told = []
    predictions, errors = conversion_accuracy.measure(model, TASK, settings, told.append)
    assert len(told) == 3
    assert errors["sequence"].tolist() == list(range(9))
    assert errors["conversion"].max() < 8 * errors["forward_pass"].max()  # in float32, against float64
    counts = predictions["condition"].value_counts()
    assert set(counts.index) == set(conversion_accuracy.CONDITIONS) and counts.min() == counts.max() > 0
    assert predictions["position"].between(0, TASK.length - CUT - 1).all()
    assert set(predictions["trigger"]) <= set("abc") and not set(predictions["follower"]) & set("abc")
    assert (predictions["use"] >= 1).all()
    again, _ = conversion_accuracy.measure(model, TASK, settings, told.append)
    pd.testing.assert_frame_equal(again, predictions)


def predictions_table(right_without, differs):
    """One scored position in each of 10,000 sequences, all right with the prompt; ``right_without`` right without it."""
    rows = []
    for sequence in range(10_000):
        for condition in conversion_accuracy.CONDITIONS:
            is_right = (
                sequence < right_without if condition == ALONE else not (differs and condition == CONVERTED and sequence == 0)
            )
            rows.append(dict(sequence=sequence, position=3, use=1, condition=condition, is_right=is_right))
    return pd.DataFrame(rows).assign(prediction=lambda table: table["is_right"].map({True: "x", False: "y"}))


def test_the_claims_of_table_2_can_fail():
    errors = pd.DataFrame(dict(sequence=[0, 1], conversion=[4e-7, 6e-7], forward_pass=[5e-7, 5e-7]))
    good = list(conversion_accuracy.compare(predictions_table(200, differs=False), errors, 0.02))
    assert [c.holds for c in good] == [True] * 5
    assert [c.ours for c in good] == [1, 1, 0, 0.02, pytest.approx(5e-7)]
    bad = list(conversion_accuracy.compare(predictions_table(400, differs=True), errors.assign(conversion=1.1e-6), 0.02))
    assert [c.holds for c in bad] == [True, False, False, False, False]
    near = list(conversion_accuracy.compare(predictions_table(300, differs=False), errors, 0.02))
    assert near[3].holds is None  # 0.03 is a hundredth above chance, neither nearer nor farther
    untrained = predictions_table(200, differs=False).assign(is_right=False)
    assert next(conversion_accuracy.compare(untrained, errors, 0.02)).holds is False


def test_the_papers_numbers_stand_next_to_ours_and_have_a_bound_of_their_own():
    errors = pd.DataFrame(dict(sequence=[0], conversion=[4e-7], forward_pass=[5e-7]))
    table = predictions_table(200, differs=False)
    table.loc[(table["condition"] != ALONE) & (table["sequence"] < 30), "is_right"] = False  # 99.7 %
    how = dict(where=", here", enough=0.9945, printed=conversion_accuracy.PRINTED)
    found = list(conversion_accuracy.compare(table, errors, 0.02, **how))
    assert [c.holds for c in found] == [True] * 5 and all(", here" in c.what for c in found)
    assert [c.paper for c in found] == [0.9995, 0.9995, None, 0.0223, None]
    assert next(conversion_accuracy.compare(table, errors, 0.02)).holds is False


def test_training_goes_on_from_the_weights_and_leaves_them(tmp_path):
    model, training = bigram_model(), dict(steps=2, batch_size=4, eval_every=2, eval_sequences=4, seed=0, learning_rate=0.1)
    before = model.W_E.clone()
    with keeping_runs(tmp_path):
        first, result = trained_further(model.requires_grad_(True), TASK, training)
        again, _ = trained_further(model, TASK, training)
        other, _ = trained_further(bigram_model(seed=1).requires_grad_(True), TASK, training)
    assert len(list(tmp_path.iterdir())) == 2 and result.steps == 2
    assert torch.equal(model.W_E, before) and torch.equal(first.W_E, again.W_E) and not torch.equal(first.W_E, before)
    assert (first.W_E - before).norm() < (other.W_E - before).norm()  # from its own weights


def test_a_folder_names_a_model(tmp_path):
    model = bigram_model()
    model.save(tmp_path / "model")
    settings = dict(model=str(tmp_path / "model"), training=None)
    loaded = conversion_accuracy.obtain_model(settings, TASK, lambda text: None)
    assert torch.equal(loaded.W_E, model.W_E) and not any(p.requires_grad for p in loaded.parameters())
    with pytest.raises(KVLensError, match="token ids"):
        conversion_accuracy.obtain_model(settings, make_task("bigrams"), lambda text: None)


# --- trainable-bias ---


def runs_table(with_bias, without_bias):
    """Held-out losses of runs of two evaluations, one pair of numbers per seed; accuracy is 1 - loss."""
    rows = [
        dict(model=label, seed=seed, n_parameters=9, step=10 * (number + 1), split="heldout", loss=loss, accuracy=1 - loss)
        for label, runs in ((trainable_bias.WITHOUT, without_bias), (trainable_bias.WITH, with_bias))
        for seed, losses in enumerate(runs)
        for number, loss in enumerate(losses)
    ]
    train_rows = [{**row, "split": "train", "loss": 99.0, "accuracy": 0.0} for row in rows]
    return pd.DataFrame(rows + train_rows)


def measured(curves):
    return trainable_bias.measure(curves)


def test_runs_are_compared_seed_by_seed():
    by_seed = measured(runs_table([(0.6, 0.2), (0.4, 0.1)], [(0.8, 0.3), (0.8, 0.5)]))
    first = by_seed[(by_seed["model"] == trainable_bias.WITH) & (by_seed["seed"] == 0)].iloc[0]
    assert (first["mean_loss"], first["loss"], first["accuracy"]) == (pytest.approx(0.4), 0.2, 0.8)
    saved, better = trainable_bias.compare(by_seed)
    assert saved.ours == "+0.275 ± 0.177 (2 seeds)"  # 0.15 and 0.4
    assert better.ours == "+0.250 ± 0.212 (2 seeds)"  # 0.1 and 0.4


def test_with_and_without_bias_a_seed_starts_from_the_same_function():
    tiny = trainable_bias.trainable_bias.scales["tiny"]
    settings = {**tiny, "training": {**tiny["training"], "steps": 6, "eval_every": 3}}
    curves = trainable_bias.trainable_bias.run(settings, lambda text: None).tables["curves"]
    losses = curves.pivot_table(index=["split", "step", "seed"], columns="model", values="loss")
    first, last = losses.loc["train", 1], losses.loc["heldout", 6]
    assert first[trainable_bias.WITH].tolist() == first[trainable_bias.WITHOUT].tolist()
    assert first[trainable_bias.WITH].nunique() == len(settings["seeds"])
    assert (last[trainable_bias.WITH] != last[trainable_bias.WITHOUT]).all()  # the bias is trained
    model = tiny["model"]
    n_heads = model["d_model"] // model["d_head"]
    extra = model["n_layers"] * n_heads * model["d_head"] * (model["d_head"] + 1)
    sizes = curves.groupby("model")["n_parameters"].first()
    assert sizes[trainable_bias.WITH] - sizes[trainable_bias.WITHOUT] == extra


TINY = dict(direct_conversion.direct_conversion.scales["tiny"])
(W_K, W_V), TERM, STARTS = direct_conversion._draw(TINY, seed=3)
D = TINY["d_model"]


def products(least, most, n=10_000):
    """S = X^T X of drawn texts, whose numbers of tokens are uniform."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(least, most + 1, (n, 1), generator=generator)
    x = torch.randn(n, most, D, generator=generator, dtype=torch.float64) * (torch.arange(most) < lengths)[..., None]
    return x.mT @ x


@pytest.mark.parametrize("lengths", [(3, 3), (1, 5)])
def test_errors_are_those_of_drawn_texts(lengths):
    s, moments = products(*lengths), Moments.of(*lengths)
    w_1, w_2 = STARTS[1]
    error = (w_1.T @ s @ w_2 - W_K.T @ s @ W_V - TERM).square().sum((1, 2)) / TERM.square().sum()
    margin = 5 * float(error.std()) / math.sqrt(len(error))
    assert left_over(moments, (W_K, W_V), TERM, (w_1, w_2)) ** 2 == pytest.approx(float(error.mean()), abs=margin)


@pytest.mark.parametrize("lengths", [(3, 3), (1, 5)])
def test_the_floor_is_that_of_least_squares_on_all_entries(lengths):
    """By the moments of S: of all linear maps of its entries, the one nearest to 1."""
    moments = Moments.of(*lengths)
    units = torch.eye(D * D, dtype=torch.float64).unflatten(1, (D, D))
    gram = torch.stack([  # E S_ij S_kl, by E S G S with G = e_j e_k^T
        torch.stack([moments.around(torch.outer(j.sum(0), k.sum(1)))[j.sum(1).argmax(), k.sum(0).argmax()] for k in units])
        for j in units
    ])  # fmt: skip
    mean = moments.mean * torch.eye(D, dtype=torch.float64).flatten()
    left = 1 - mean @ torch.linalg.pinv(gram, hermitian=True) @ mean
    assert float(left) == pytest.approx(moments.floor(D) ** 2, rel=LAW)


def test_each_step_comes_nearer_and_none_below_the_floor():
    moments, errors = Moments.of(1, 5), []
    for n_steps in range(5):
        pair = best_pair(moments, (W_K, W_V), TERM, STARTS[1], {"n_steps": n_steps})
        errors.append(left_over(moments, (W_K, W_V), TERM, pair))
    assert errors == sorted(errors, reverse=True) and errors[-1] > moments.floor(D)


def test_what_needs_no_change_or_allows_none():
    """Without a prompt the weights themselves are right; on empty texts every pair leaves everything."""
    same = best_pair(Moments.of(1, 5), (W_K, W_V), torch.zeros_like(TERM), (W_K, W_V), TINY)
    assert max(relative_error(found, own) for found, own in zip(same, (W_K, W_V), strict=True)) < LAW
    empty = Moments.of(0, 0)
    assert [left_over(empty, (W_K, W_V), TERM, best_pair(empty, (W_K, W_V), TERM, pair, TINY)) for pair in STARTS] == [1.0, 1.0]
    assert empty.floor(D) == 1.0


def test_what_is_left_between_its_floor_and_the_best_that_was_found_decides():
    table = pd.DataFrame(dict(tokens=["1", "9", "99"], left=[0.8, 0.02, 0.009], floor=[0.3, 0.009, 0.001]))
    assert [c.holds for c in direct_conversion.compare(table)] == [True, None, False]


def test_other_weights_take_the_prompt_where_all_texts_are_alike():
    """The null: with a million tokens S = X^T X is nearly the same for every text."""
    settings = {**TINY, "texts": [dict(least=10**6, most=10**6), dict(least=9, most=9)]}
    alike, apart = direct_conversion.direct_conversion.run(settings, lambda text: None).comparisons
    assert (alike.verdict, apart.verdict) == ("does not hold", "holds")


TINY_SOFTMAX = softmax_conversion.softmax_conversion.scales["tiny"]


@pytest.fixture(scope="module")
def model():
    return writing_model(TINY_SOFTMAX).to(torch.float64, print_details=False)


def test_contexts_are_the_models_own_and_one_draw_by_seed(model):
    settings = {**TINY_SOFTMAX, "n_prompt": 12, "n_text": 7, "n_texts": 3}
    prompt, texts = context_of(model, settings, seed=5)
    assert prompt.shape == (12,) and texts.shape == (3, 7) and prompt[0] == model.tokenizer.bos_token_id
    again, other = (context_of(model, settings, seed=seed)[0] for seed in (5, 6))
    assert torch.equal(prompt, again) and not torch.equal(prompt, other)


def test_every_key_has_no_error_and_no_key_has_the_prompts_whole_effect(model):
    prompt, texts = context_of(model, TINY_SOFTMAX, seed=0)
    exact = convert_prompt(model, prompt)
    measured = softmax_conversion._measure(model, prompt, texts, exact)
    assert measured["relative_error"] < 1e-11 and abs(measured["kl"]) < 1e-11 and measured["argmax_agrees"] == 1
    dropped = softmax_conversion._measure(model, prompt, texts, exact.zero_like())
    assert dropped["relative_error"] > 0.05 and dropped["kl"] > 0.01
    old = model(torch.cat([prompt, texts[0]])[None])[0, len(prompt) :].double()
    new = softmax_conversion._measure(model, prompt, texts[:1], exact.select(layers=[0]))
    with model.kv_bias(exact.select(layers=[0])):
        by_hand = model(texts[:1])[0].double()
    assert new["relative_error"] == pytest.approx(float(((by_hand - old).norm(dim=1) / old.norm(dim=1)).mean()), rel=1e-11)


def test_a_window_keeps_the_first_keys_and_the_last_ones(model):
    exact = convert_prompt(model, torch.arange(3, 19))
    window = softmax_conversion._window(exact, 6)
    kept = [0, 1, 2, 3, 14, 15]
    assert torch.equal(window.stacked("keys"), exact.stacked("keys")[..., kept, :])
    assert torch.equal(window.stacked("b_kv"), exact.stacked("b_kv")[..., kept, :])
    assert softmax_conversion._window(exact, 3).d_phi == 3


def test_no_two_rows_have_one_name():
    for settings in softmax_conversion.softmax_conversion.scales.values():
        names = [(way.method, way.size, way.n_continuations) for way in ways(settings, seed=0)]
        assert len(set(names)) == len(names)


def test_models_that_cannot_write_their_own_prompts_are_refused():
    with pytest.raises(KVLensError, match="must have softmax attention.* docs-linear has linear attention"):
        writing_model({**TINY_SOFTMAX, "model": "docs-linear"})


def test_checkpoints_of_llama2c_are_read(outside_data):
    source = {"model": str(outside_data / "stories260K.bin"), "tokenizer": str(outside_data / "tok512.bin")}
    model = writing_model({**TINY_SOFTMAX, **source})
    assert isinstance(model, HookedKVTransformer) and model.cfg.n_layers == 5
    prompt, _ = context_of(model, TINY_SOFTMAX, seed=0)
    assert prompt[0] == 1


def test_distillation_is_measured_on_the_same_texts_at_its_whole_price():
    model = writing_model(TINY_SOFTMAX)
    prompt, texts = context_of(model, TINY_SOFTMAX, seed=0)
    rows = list(softmax_conversion._distilled(model, prompt, texts, TINY_SOFTMAX, 0, {}))
    assert [row["method"] for row in rows] == list(DISTILLED.values())
    n_weights = sum(p.numel() for p in model.parameters())
    assert all(row["stored_numbers"] == n_weights and row["fit_steps"] == 2 for row in rows)
    old = prompted_logits(model, prompt, texts)
    assert softmax_conversion.logit_errors(old, old) == {"relative_error": 0.0, "kl": 0.0, "argmax_agrees": 1.0}
    assert list(softmax_conversion._distilled(model, prompt, texts, {**TINY_SOFTMAX, "distil_steps": 0}, 0, {})) == []


def test_steps_are_counted_to_the_loss_at_the_end():
    """Twenty steps, means over two: 0.35 is first reached by the mean of steps 3 and 4."""
    losses = torch.tensor([1.0, 0.8, 0.4, 0.2, *[0.1] * 16])
    assert softmax_conversion.smoothed(losses)[:3].tolist() == pytest.approx([0.9, 0.6, 0.3])
    assert softmax_conversion.share_of_steps(losses, 0.35) == 4 / 20
    assert softmax_conversion.share_of_steps(losses, 0.1) == pytest.approx(6 / 20)
    assert softmax_conversion.share_of_steps(losses, 0.05) == 1.0


def test_fine_tuning_from_the_exact_bias_has_nothing_to_do():
    model = writing_model(TINY_SOFTMAX)
    prompt, texts = context_of(model, TINY_SOFTMAX, seed=0)
    name, *_ = softmax_conversion.FROM.values()
    *_, row = softmax_conversion._distilled(model, prompt, texts, TINY_SOFTMAX, 0, {name: convert_prompt(model, prompt)})
    assert row["method"] == name and row["steps_share"] == 1 / 2 and row["kl"] < 1e-3  # of two steps, each with its own mean
    assert model.attached_kv_bias is None


TINY_COMPACTION = {**compaction.compaction.scales["tiny"], "n_prompt": 9, "keys": [3, 9]}
KEPT = [*compaction.METHODS]
THOUGHTS = [compaction.VECTORS, compaction.MATRICES]
CHANGED = [compaction.TOKENS, *THOUGHTS, "distillation, rank 1", "distillation, all entries"]


@pytest.fixture(scope="module")
def compacted():
    model = writing_model(TINY_COMPACTION).to(torch.float64, print_details=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(compaction.METHODS, compaction.OURS, (Landmark, dict(key_steps=3)))  # of a hundred
        found = list(compaction.measured(model, TINY_COMPACTION, context=2, length=9))
        names = [row["method"] for table, row in found if table == "contexts"]
        assert names == ["prompt left out", "every key kept", *KEPT, *CHANGED]  # 9 keys would be all of them
        yield model, {row["method"]: row for table, row in found if table == "contexts"}


def test_stored_numbers(compacted):
    """Two layers of four heads of 32, d_model 128, MLPs of 512; a key has a value and a weight."""
    _, rows = compacted
    stored = {name: row["stored_numbers"] for name, row in rows.items()}
    assert stored["prompt left out"] == 0 and stored["every key kept"] == 9 * 2 * 4 * 65
    assert stored["KVzip"] == 3 * 2 * 4 * 65
    assert all(stored[name] <= 3 * 2 * 4 * 65 for name in KEPT)  # some fitted weights may be 0
    assert stored["token patches, for one text"] == 4 * 2 * 3 * 128
    assert stored["thought vectors"] == 2 * 2 * 128 and stored["thought matrices"] == 2 * 128 * 129
    assert stored["distillation, rank 1"] == 2 * (4 * 256 + 2 * 640)
    assert stored["distillation, all entries"] == 2 * 12 * 128**2


def test_token_patches_and_every_key_are_exact(compacted):
    _, rows = compacted
    assert rows["every key kept"]["relative_error"] < LAW and rows["every key kept"]["same_continuation"] == 1
    assert rows["token patches, for one text"]["relative_error"] < LAW
    assert all(0 < rows[name]["relative_error"] < 10 for name in [*KEPT, *CHANGED[1:]])
    assert all(np.isfinite(row["kl_95"]) and row["cpu_seconds"] >= 0 for row in rows.values())


def test_errors_are_those_of_the_logits(compacted):
    """By hand, with the texts read after prompt, bias and BOS in full."""
    model, rows = compacted
    prompt, texts = context_of(model, TINY_COMPACTION, seed=2)
    method = dict(compaction.methods(3, TINY_COMPACTION, seed=2))["KVzip"]
    old = model(torch.cat([prompt.expand(len(texts), -1), texts], dim=1))[:, len(prompt) :]
    with model.kv_bias(convert_prompt(model, prompt, method=method, verbose=False)):
        new = model(texts)
    relative = (new - old).norm(dim=-1) / old.norm(dim=-1)
    found = rows["KVzip"]
    assert found["relative_error"] == pytest.approx(float(relative.mean()), rel=LAW)
    assert found["largest_relative_error"] == pytest.approx(float(relative.max()), rel=LAW)
    kl = (old.softmax(dim=-1) * (old.log_softmax(dim=-1) - new.log_softmax(dim=-1))).sum(dim=-1)
    assert found["kl"] == pytest.approx(float(kl.mean()), rel=LAW)
    assert found["kl_95"] == pytest.approx(float(np.quantile(kl.detach(), 0.95)), rel=LAW)


def test_recall_is_that_of_the_bias_and_of_few_keys_alone(compacted):
    model, rows = compacted
    prompt, _ = context_of(model, TINY_COMPACTION, seed=2)
    for name, method in compaction.methods(3, TINY_COMPACTION, seed=2):
        found = recall(model, prompt, convert_prompt(model, prompt, method=method, verbose=False))
        assert found is not None and rows[name]["recall"] == pytest.approx(found.share, abs=LAW)
    assert {rows[name]["recall"] for name in ("prompt left out", "every key kept", *CHANGED)} == {None}
    assert len({rows[name]["recall"] for name in KEPT}) > 1


def test_the_prompts_whole_effect_is_that_of_all_but_its_bos(compacted):
    model, rows = compacted
    assert rows["prompt left out"]["effect_lost"] == pytest.approx(1)
    prompt, texts = context_of(model, TINY_COMPACTION, seed=2)
    old = model(torch.cat([prompt.expand(len(texts), -1), texts], dim=1))[:, len(prompt) :]
    hidden = convert_prompt(model, prompt, without=[(1, len(prompt))])
    with model.kv_bias(hidden):
        without = model(texts)
    expected = float(((without - old).norm(dim=-1) / old.norm(dim=-1)).mean())
    assert rows["prompt left out"]["relative_error"] == pytest.approx(expected, rel=LAW)


def test_facts_are_counted_by_hand():
    """Only answers that are right with the story count; intervals are over stories."""
    rows = [
        ("a", 0, 0, True, True, 0.1),
        ("a", 0, 1, True, False, 2.0),
        ("a", 1, 0, True, True, 0.3),
        ("a", 1, 1, False, True, 9.0),
    ]
    columns = ["method", "story", "sentence", "right_with_story", "is_right", "loss"]
    answers = pd.DataFrame(rows, columns=columns).assign(stored_numbers=6.0)
    (row,) = compaction.kept(answers, []).to_dict("records")
    assert (row["n_answers"], row["n_kept"], row["stored_numbers"]) == (3, 2, 6.0)
    assert row["mean_loss"] == pytest.approx(0.8)
    assert row["loss_interval"] == pytest.approx(1.96 * np.std([1.05, 0.3], ddof=1) / 2**0.5)
    by_sentence = compaction.kept(answers, ["sentence"]).set_index("sentence")
    assert by_sentence["share_kept"].tolist() == [1.0, 0.0] and by_sentence["mean_loss"].tolist() == [pytest.approx(0.2), 2.0]


def test_the_prompts_part_of_softmax_attention_is_an_mlp_as_wide_as_the_prompt():
    """Slides: phi(Q) b_KV is an MLP with M hidden units; with exp for phi it is exact, over the normalizer of O_i there.

    Without that normalizer in common, Softmax(Q K^T) V + phi(Q) b_KV as the slides first write it, it is another output.
    """
    model = shared("softmax, no positions", n_layers=1)
    prompt, text = tokens(1, 9, seed=1), tokens(1, 6, seed=2)
    bias, attn = convert_prompt(model, prompt).stacked, "blocks.0.attn.hook_"
    with model.kv_bias(convert_prompt(model, prompt)):
        _, cache = model.run_with_cache(text)
    q, k, v, z = (cache[attn + name][0].transpose(0, 1) for name in "qkvz")  # [head, pos, d_head]
    scale, W_in, W_out = model.cfg.attn_scale, bias("keys")[0, 0], bias("b_kv")[0, 0]
    own, hidden = (q @ k.mT / scale).exp().tril(), (q @ W_in.mT / scale).exp()
    assert hidden.shape[-1] == prompt.shape[1]
    total = own.sum(-1, keepdim=True) + hidden.sum(-1, keepdim=True)
    assert relative_error((own @ v + hidden @ W_out) / total, z) < LAW
    assert relative_error(own @ v / own.sum(-1, keepdim=True) + hidden @ W_out, z) > 0.1


@pytest.mark.parametrize("row", ["rotary", "learned"])
def test_a_prompt_tuned_at_the_embedding_is_a_bias_in_every_layer(row):
    """Slides: "Prompt tuning can be seen as modifying the bias term" b_KV. Embeddings of no token convert as tokens do."""
    model, text = model_of("softmax", row), tokens(1, 6, seed=2)
    generator = torch.Generator().manual_seed(0)
    soft = torch.randn(1, 4, model.cfg.d_model, generator=generator, dtype=torch.float64)

    def put(x, hook):
        return torch.cat([soft, x[:, 4:]], dim=1)

    unused = torch.zeros(1, 4, dtype=torch.long)
    with model.hooks(fwd_hooks=[("hook_embed", put)]):
        behind = model(torch.cat([unused, text], dim=1))[:, 4:]
    bias = convert_prompt(model, unused, fwd_hooks=[("hook_embed", put)])
    assert relative_error(logits_under(model, bias, text), behind) < LAW
    assert relative_error(logits_under(model, convert_prompt(model, unused), text), behind) > 0.01
    assert all(part.b_kv.norm() > 0.01 for part in bias.attention) and len(bias.attention) > 1


# --- stored-bias ---


@pytest.mark.parametrize("row", ["rotary", "learned"])
def test_an_edit_keeps_what_each_prompt_left_at_its_positions(row):
    model = model_of("softmax", row)
    first, second = tokens(1, 9, seed=1)[0], tokens(1, 9, seed=2)[0]
    own, other = convert_prompt(model, first), convert_prompt(model, second)
    text = tokens(1, 4, seed=3)
    every, none, some = (stored_bias.exchanged(own, other, *span) for span in ((0, 9), (4, 4), (3, 6)))
    assert relative_error(logits_under(model, every, text), logits_under(model, other, text)) < LAW
    assert relative_error(logits_under(model, none, text), logits_under(model, own, text)) < LAW
    for here, mine, theirs in zip(some.attention, own.attention, other.attention, strict=True):
        assert torch.equal(here.keys[:, :, 3:6], theirs.keys[:, :, 3:6])
        assert torch.equal(here.keys[:, :, :3], mine.keys[:, :, :3]) and torch.equal(here.keys[:, :, 6:], mine.keys[:, :, 6:])
    assert some.fit is None or "changed" in str(some.fit)  # nobody says that it is the bias of a prompt
    assert relative_error(logits_under(model, some, text), logits_under(model, own, text)) > 1e-3


def edits_table(edited, others, rewritten=4.0):
    """A table of ten prompts, with what each way brings beyond what is stored."""
    ways = {"stored": (0.0, 0.0), "rewritten": (rewritten, others), "edited": (edited, 0.0), "another sentence": (0.0, 0.0)}
    noise = np.random.default_rng(0).normal(0, 0.01, (10, 4, 2))
    rows = [
        (prompt, way, changed, -2 + brought[1 - changed] + noise[prompt, number, int(changed)])
        for prompt in range(10)
        for number, (way, brought) in enumerate(ways.items())
        for changed in (True, False)
    ]
    return pd.DataFrame(rows, columns=["prompt", "way", "changed", "log_odds"])


@pytest.mark.parametrize(
    ("edited", "others", "verdicts"),
    [
        (3.9, 0.0, ["holds"] * 4),
        (2.0, 0.0, ["holds", "does not hold", "holds", "holds"]),
        (3.9, 1.0, [*["holds"] * 3, "does not hold"]),
    ],
)
def test_verdicts_on_edits_follow_from_the_shifts(edited, others, verdicts):
    assert [one.verdict for one in stored_bias.compare_edits(edits_table(edited, others))] == verdicts


def test_a_share_of_a_half_that_the_first_token_has_alone_is_no_gain():
    rows = [(p, n, layer, 0.8 + 0.01 * (p % 2)) for p in range(8) for n in (1, 64) for layer in (0, 1)]
    half, gain, passes = stored_bias.compare_shares(pd.DataFrame(rows, columns=["prompt", "length", "layer", "share"]))
    assert half.verdict == "holds" and gain.verdict == "inconclusive"
    assert passes.ours == 2 and "1: 2" in passes.what

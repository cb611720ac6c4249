"""``variants``, ``learning-rate``, ``scaling``, ``coefficients``: what they count and conclude, on answers known by hand."""

import functools
import math

import pandas as pd
import pytest
import torch

from kvlens import HookedKVTransformer, HookedKVTransformerConfig
from kvlens.checks import from_fields
from kvlens.errors import KVLensError
from kvlens.papers.harness import learned
from kvlens.papers.harness.learned import Goal
from kvlens.papers.kvsa import coefficients, learning_rate, models, scaling, variants
from kvlens.tasks import make_task
from kvlens.training import TrainSettings, build_model

SILENT = dict(tell=lambda text: None)


@functools.cache
def text_task():
    return make_task("text", corpus="topics", vocab_size=300, length=8)


# --- differences between seeds ---


def test_mean_and_spread_are_written_out():
    assert learned.mean_and_spread([0.3, 0.1, 0.2]) == "+0.200 ± 0.100 (3 seeds)"
    assert learned.mean_and_spread([-0.5]) == "-0.500 (1 seed)"
    assert learned.mean_and_spread([-0.5, math.inf, math.nan]) == "not finite for 2 of 3 seeds"


def made_up_course():
    """Model a: 0.1 s at step s in training; model b: 1 more. Held out: the same less 0.05, at steps 10 and 20."""
    rows = []
    for model, extra in (("b", 1.0), ("a", 0.0)):
        for seed in (7, 3):
            for step in range(1, 21):
                rows.append((model, seed, step, "train", 0.1 * step + extra * seed))
            rows += [(model, seed, step, "heldout", 0.1 * step + extra * seed - 0.05) for step in (10, 20)]
    return pd.DataFrame(rows, columns=["model", "seed", "step", "split", "loss"])


def test_final_losses_are_those_of_the_last_evaluation():
    finals = learned.final_losses(made_up_course())
    expected = pd.DataFrame({"model": ["b", "b", "a", "a"], "seed": [7, 3, 7, 3], "heldout_loss": [8.95, 4.95, 1.95, 1.95]})
    pd.testing.assert_frame_equal(finals, expected)
    assert learned.differences_by_seed(finals, "b", "a", "heldout_loss") == pytest.approx([3, 7])  # by rising seed
    fewer = finals[(finals["model"] == "b") | (finals["seed"] == 7)]  # unequal seeds: those that both have
    assert learned.differences_by_seed(fewer, "b", "a", "heldout_loss") == pytest.approx([7])
    shuffled = made_up_course().sample(frac=1, random_state=0)
    assert learned.differences_by_seed(learned.final_losses(shuffled), "a", "b", "heldout_loss") == pytest.approx([-3, -7])


# --- variants ---


def test_variants_are_compared_with_the_free_form_seed_by_seed():
    """Seeds differ by 0.5, variants by 0.1: only paired differences tell them apart."""
    losses = {variants.FREE: 2.9} | {label: 3.0 + 0.1 * number for number, label in enumerate(variants.CLAIMS)}
    rows = [dict(model=m, seed=seed, heldout_loss=loss + 0.5 * seed) for m, loss in losses.items() for seed in range(6)]
    finals = pd.DataFrame(rows)
    assert set(variants.CLAIMS) == set(variants.VARIANTS) - {variants.FREE}
    assert [c.holds for c in variants.compare(finals, {})] == [True] * len(variants.CLAIMS)


def test_every_variant_has_the_shift_that_its_name_says():
    task = text_task()
    sizes = {}
    for label, shift in variants.VARIANTS.items():
        model = build_model(task, dict(n_layers=1, d_model=12, d_head=4, attn_only=True, kv_shift=shift))
        sizes[label] = {n[-12]: tuple(p.shape) for n, p in model.named_parameters() if "shift_coef" in n}
    both = {"k": (3, 2), "v": (3, 2)}
    assert sizes == {
        variants.NONE: {},
        variants.FREE: both,
        "gate": both,
        "clamp": both,
        "keys only": {"k": (3, 2)},
        "values only": {"v": (3, 2)},
        "window 2": {"k": (3, 3), "v": (3, 3)},
        "window 3": {"k": (3, 4), "v": (3, 4)},
        "keys + values + queries": {"q": (3, 2), **both},
    }


def test_variants_are_chosen_by_name_and_clear_ones_take_fewer_seeds():
    settings = {**variants.variants.scales["small"], "variants": ["gate", "no shift"], "n_seeds_of_clear": 2}
    few, all_seeds = variants.cells(settings)
    assert (list(few.models), few.seeds) == (["no shift"], settings["seeds"][:2])
    assert (list(all_seeds.models), all_seeds.seeds) == ([variants.FREE, "gate"], ())
    with pytest.raises(KVLensError, match="did you mean 'gate'"):
        list(variants.cells({**settings, "variants": ["gats"]}))


def test_experiments_on_text_share_their_runs():
    """The same task, model, training, rates and seeds at the small scale; what differs is added."""
    scales = {e.name: e.scales["small"] for e in (variants.variants, learning_rate.learning_rate, scaling.scaling)}
    trained = coefficients.coefficients.scales["small"]["train"]
    first = scales["variants"]
    for other in (*scales.values(), trained):
        assert (other["task"], other["training"]) == (first["task"], first["training"])
        assert set(other["rates"]) >= set(first["rates"]) and first["seeds"][:6] == other["seeds"][:6]
    assert first["model"] == scales["learning-rate"]["model"] == scales["scaling"]["sizes"]["d 64"]
    assert trained["model"] == {**first["model"], "kv_shift": True}


# --- settings as printed ---


def n_parameters(size, n_layers=None, kv_shift=True):
    """Of a model of table 6, or of one with fewer layers, whose weights take no memory."""
    cfg = HookedKVTransformerConfig(
        **{**size.model(), "n_layers": n_layers or size.n_layers}, kv_shift=kv_shift, init_weights=False
    )
    with torch.device("meta"):
        return sum(p.numel() for p in HookedKVTransformer(cfg, move_to_device=False).parameters())


@pytest.mark.parametrize("name", models.PRINTED_SIZES)
def test_models_as_printed_have_the_parameters_that_the_paper_names_them_by(name):
    """KVSA table 6: with two embeddings, 1.565, 2.889, 6.772, 13.058 and 19.014 billion."""
    size = models.PRINTED_SIZES[name]
    one, two = (n_parameters(size, n_layers) for n_layers in (1, 2))
    count = one + (size.n_layers - 1) * (two - one)
    assert abs(count / 1e9 - float(name[:-1])) < (0.1 if name[:-1].endswith((".5", ".9", ".7")) else 0.5), count
    if name == "1.5B":
        assert count == n_parameters(size)  # the whole model
    assert one - n_parameters(size, 1, kv_shift=None) == 4 * size.n_kv_heads


@pytest.mark.parametrize(("name", "tokens_a_step", "steps"), [
    ("1.5B", 2**20, 9537), ("2.9B", 16 * 2**20, 29_802), ("6.7B", 2**20, 9537), ("13B", 2 * 2**20, 4768), ("19B", 3e6, 67_817)
])  # fmt: skip
def test_training_as_printed_takes_the_batches_of_the_text(name, tokens_a_step, steps):
    """KVSA sec. 4.1: 1M, 16M, 1M, 2M and 3M tokens a step; table 6's GPUs and sequences give the same."""
    size = models.PRINTED_SIZES[name]
    settings = from_fields(TrainSettings, size.training())
    assert settings.batch_size * size.n_ctx == pytest.approx(tokens_a_step, rel=0.02)
    assert (settings.steps, settings.schedule, settings.betas, settings.weight_decay) == (steps, "constant", (0.9, 0.95), 0.1)
    assert settings.rate((size.warmup_steps + 1) / steps) == settings.rate(1) == size.learning_rate
    assert settings.rate(size.warmup_steps / 2 / steps) == pytest.approx(size.learning_rate / 2)


# --- learning rate ---


def test_the_loss_of_token_frequencies_by_hand():
    """Counts 3, 1, 0 plus one each: 4/7, 2/7, 1/7."""
    loss = models.frequency_loss(torch.tensor([0, 0, 1, 0]), torch.tensor([2, 0]), n_tokens=3)
    assert loss == pytest.approx((math.log(7) + math.log(7 / 4)) / 2, rel=1e-14)


def made_up_runs(plain_diverges_at, shifted_diverges_at):
    rows = []
    for label, limit in (("plain", plain_diverges_at), ("KV shift", shifted_diverges_at)):
        for rate in (1e-3, 1e-2, 1e-1):
            for seed in range(6):
                loss = 9.0 if rate >= limit else 4.0 - (label != "plain")
                counted = min(loss, 6.0)
                own = dict(heldout_loss=loss, counted=counted, diverged=rate >= limit)
                rows.append(dict(model=label, learning_rate=rate, seed=seed, **own))
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("plain", "shifted", "holds"), [(1e-2, 1e-1, True), (1.0, 1.0, None), (1e-1, 1e-2, False), (1e-2, 1e-2, None)]
)
def test_claims_about_divergence_can_fail(plain, shifted, holds):
    """Nothing follows from runs that do not diverge for a model of ten thousand times the size."""
    runs = made_up_runs(plain, shifted)
    by_rate = learning_rate.compare(runs, None)
    (stable,) = learning_rate.compare_stability(runs, None)
    assert stable.holds is holds and stable.tested
    assert by_rate[0].holds is True and by_rate[0].ours == "+1.000 ± 0.000 (6 seeds)"
    if plain == 1e-2 < shifted:  # at that rate: 6 for a plain run that diverged, 3 for a shifted one
        assert by_rate[1].holds is True and by_rate[1].sample.mean == 3
    assert learning_rate.compare_stability(runs[runs["learning_rate"] < 1e-2], None) == []


def test_a_run_whose_loss_is_not_finite_counts_as_diverged_and_the_experiment_continues():
    """Adam moves a weight by about the learning rate, and a float32 of 1e30 squared is infinite."""
    tiny = learning_rate.learning_rate.scales["tiny"]
    settings = {**tiny, "rates": [3e-2, 1e30], "seeds": [0], "training": {**tiny["training"], "steps": 6}}
    told = []
    outcome = learning_rate.learning_rate.run(settings, told.append)
    runs = outcome.tables["runs"]
    huge = runs[runs["learning_rate"] == 1e30]
    assert len(huge) == 2 and huge["diverged"].all() and (huge["heldout_loss"] == math.inf).all()
    assert sum("is not finite" in text for text in told) == 2
    assert runs.loc[runs["learning_rate"] == 3e-2, "heldout_loss"].between(1, 7).all()


def test_the_plain_model_must_have_learned_at_its_best_rate_only():
    """At 3e-2 it still improves, at 1e-3 it has learned nothing; both rates are compared as they are."""
    ends = {1e-3: (4.9, 4.8), 1e-2: (3.05, 3.0), 3e-2: (4.5, 3.5)}

    def why(ends):
        rows = [
            dict(model="plain", learning_rate=rate, seed=seed, step=step, split="heldout", loss=loss)
            for rate, course in ends.items()
            for seed in range(6)
            for step, loss in zip((50, 100), course, strict=True)
        ]
        course = pd.DataFrame(rows)
        return learning_rate.untrained(course, learning_rate.measure(course, 5.0), Goal(5.0, share=0.2))

    assert why(ends) == (None, None)
    reason = "at 0.01, its best learning rate: plain still improves: 45% of the gain came in the second half of its steps"
    assert why({**ends, 1e-2: (3.9, 3.0)}) == (None, reason)  # a run that has diverged is not about to improve
    diverged, losses = why(dict.fromkeys(ends, (4.9, 4.9)))
    assert diverged == losses and diverged.startswith("at 0.001, its best learning rate: plain has learned 2% of what there is")


# --- scaling ---


def test_non_embedding_parameters_by_hand():
    """Two layers, d = 12, three heads of 4, MLP of 48, LayerNorms folded nowhere."""
    task = text_task()
    fields = dict(n_layers=2, d_model=12, d_head=4)
    attention = 4 * (12 * 12) + 3 * 12 + 12  # W_Q W_K W_V W_O, b_Q b_K b_V, b_O
    mlp = 2 * 12 * 48 + 48 + 12
    norms = 2 * 2 * 12
    layers = 2 * (attention + mlp + norms) + 2 * 12  # and ln_final
    assert scaling.non_embedding_parameters(build_model(task, fields)) == layers
    assert scaling.non_embedding_parameters(build_model(task, {**fields, "kv_shift": True})) == layers + 2 * 2 * 3 * 2


def test_the_power_law_is_found():
    n = pd.Series([10.0, 70.0, 1100.0])
    assert scaling.power_law(n, 5 * n**-0.3) == pytest.approx(0.3, rel=1e-12)


@pytest.mark.parametrize(("gain_then", "holds"), [(0.1, True), (0.9, False), (0.5, None)])
def test_the_gain_over_the_course_of_the_largest_model(gain_then, holds):
    """At the end 0.5; half-way as given. The smaller model's gain shrinks, which must not count."""
    rows = []
    for size, non_embedding, gains in (("s", 90, (9.0, 8.0, 0.0)), ("b", 900, (7.0, gain_then, 0.5))):
        for step, gain in zip((10, 20, 40), gains, strict=True):
            for seed in range(6):
                for model, loss in (("KV shift", 3.0 + seed), ("plain", 3.0 + seed + gain)):
                    rows.append((size, non_embedding, step, seed, model, "heldout", loss))
    course = pd.DataFrame(rows, columns=["size", "non_embedding", "step", "seed", "model", "split", "loss"])
    found = scaling.compare_course(course, {})
    assert found.holds is holds and "step 40 less that at step 20, b" in found.what


def test_nothing_is_said_of_sizes_where_there_is_one():
    """A line through one point has any slope."""
    rows = [("d 64", 900, seed, m, 3.0 + seed / 9 - lead) for seed in range(6) for m, lead in (("plain", 0), ("KV shift", 1))]
    finals = pd.DataFrame(rows, columns=["size", "non_embedding", "seed", "model", "heldout_loss"])
    assert scaling.compare_sizes(finals, {}) == [] and scaling.compare(finals, {})[0].holds is True


# --- coefficients ---

HEADS = {  # (layer, head) -> alpha_1, alpha_2, beta_1, beta_2
    (0, 0): (0.75, 0.25, 0.5, 0.25),  # current keys, current values
    (0, 1): (-0.5, 1.5, 1.0, 0.0),  # the induction head's kind; two of four outside [0, 1]
    (0, 2): (0.5, 0.5, 0.25, 0.25),  # equal counts as <=
    (1, 0): (0.75, 0.25, 0.25, 0.75),
    (1, 1): (0.25, 0.75, 0.25, 1.25),
    (1, 2): (0.125, 0.875, 0.75, 0.5),
}


def model_with_known_heads(parametrization="free"):
    task = text_task()
    shift = dict(parametrization=parametrization)
    model = build_model(task, dict(n_layers=2, d_model=6, d_head=2, attn_only=True, kv_shift=shift))
    with torch.no_grad():
        for (layer, head), values in HEADS.items():
            attn = model.blocks[layer].attn
            attn.k_shift_coef[head] = torch.tensor(values[:2])
            attn.v_shift_coef[head] = torch.tensor(values[2:])
    return model


def known_source(parametrization="free"):
    return coefficients.Source("known", model_with_known_heads(parametrization))


def test_coefficients_stand_at_their_layer_head_and_index():
    source = known_source()
    table = coefficients.coefficients_of(source)
    found = table.pivot_table(index=["layer", "head"], columns="coefficient", values="value")
    assert found.columns.tolist() == ["alpha_1", "alpha_2", "beta_1", "beta_2"]
    assert {key: tuple(row) for key, row in found.iterrows()} == HEADS  # eighths are exact


def test_the_four_kinds_are_counted_by_hand():
    source = known_source()
    table = coefficients.coefficients_of(source)
    counts = coefficients.count_kinds(table)
    sides = ("alpha_1 > alpha_2", "alpha_1 <= alpha_2"), ("beta_1 > beta_2", "beta_1 <= beta_2")
    expected = [(sides[0][0], sides[1][0], 1), (sides[0][1], sides[1][0], 2), (sides[0][0], sides[1][1], 1)]
    expected.append((sides[0][1], sides[1][1], 2))
    assert list(counts[["keys", "values", "count"]].itertuples(index=False, name=None)) == expected
    assert counts["paper"].tolist() == [50, 17, 9, 52] and counts["share"].sum() == pytest.approx(1)
    assert coefficients.outside_share(table) == 3 / 24
    *cells, alike, induction, negative, sums = coefficients.compare(table)
    assert [c.ours for c in cells] == ["1 of 6", "2 of 6", "1 of 6", "2 of 6"]
    assert [alike.paper, alike.ours, alike.tested] == ["102 of 128", "3 of 6", False]  # heads of one run are not independent
    assert [induction.paper, induction.ours] == ["17 against 9", "2 against 1"]
    assert (negative.ours, negative.holds) == (-0.5, True)
    assert (sums.ours, sums.holds) == (0.5, True)  # betas of the heads in order: 0.25, 0, 0.5, 0, 0.5, 0.25; alphas all 0
    assert (negative.paper, sums.paper) == (-0.15, 0.49)
    assert not any(c.tested for c in cells)
    halved = table.assign(value=(0.5 + (table["value"] - 0.5) / 2))  # from -0.5 to 0, and sums from 0.5 to 0.75
    assert [c.holds for c in coefficients.compare(halved)][-2:] == [False, False]


@pytest.mark.parametrize("parametrization", ["gate", "clamp"])
def test_bounded_coefficients_are_read_as_used(parametrization):
    source = known_source(parametrization)
    table = coefficients.coefficients_of(source)
    _, cache = source.model.run_with_cache(torch.tensor([[1, 2, 3]]), names_filter=lambda n: n.endswith("k_shift_coef"))
    for layer in (0, 1):
        used = table[(table["layer"] == layer) & table["coefficient"].str.startswith("alpha")]["value"]
        # float32 against float64: two exponentials and a quotient
        assert used.tolist() == pytest.approx(cache[f"blocks.{layer}.attn.hook_k_shift_coef"].flatten().tolist(), rel=1e-6)
    assert coefficients.outside_share(table) == 0


def test_a_saved_model_is_found_in_its_folder_and_in_that_of_its_run(tmp_path):
    model = model_with_known_heads()
    model.save(tmp_path / "run" / "model")
    known = coefficients.coefficients_of(coefficients.Source("", model))
    for place in (tmp_path / "run", tmp_path / "run" / "model"):
        found = coefficients.coefficients_of(coefficients.read_source(str(place)))
        pd.testing.assert_frame_equal(found.assign(model=""), known)


def test_a_model_that_is_not_there_or_does_not_shift_both_is_refused(tmp_path):
    with pytest.raises(KVLensError, match="did you mean 'docs-linear'.*kvlens train docs-shift --out docs-shift"):
        coefficients.read_source("docs-liner")
    task = text_task()
    keys_only = build_model(task, dict(n_layers=1, d_model=6, d_head=2, attn_only=True, kv_shift={"values": False}))
    with pytest.raises(KVLensError, match="must shift both keys and values.*values=False"):
        coefficients.coefficients_of(coefficients.Source("k", keys_only))


def test_models_trained_here_are_tested_run_by_run():
    tiny = coefficients.coefficients.scales["tiny"]["train"]
    training = {**tiny["training"], "steps": 2}
    first, second = coefficients.train_sources({**tiny, "training": training}, **SILENT)
    assert (first.seed, second.seed) == (0, 1) and first.name == second.name == "trained here"
    table = pd.concat(coefficients.coefficients_of(source) for source in (first, second))
    found = list(coefficients.compare(table))
    alike, negative, sums = (next(c for c in found if words in c.what) for words in ("same token", "smallest", "|sum - 1|"))
    kinds = [coefficients.preferences(rows)["kind"] for _, rows in table.groupby("seed")]
    shares = [sum(keys == values for keys, values in own) / 6 for own in kinds]
    assert (alike.sample.n, alike.sample.bound, alike.sample.mean) == (2, 0.5, pytest.approx(sum(shares) / 2))
    assert alike.ours == f"{round(6 * sum(shares))} of 12, 2 runs"
    least = table.groupby("seed")["value"].min()
    assert (negative.sample.n, negative.sample.bound, negative.ours) == (2, -0.15, pytest.approx(least.mean()))
    assert (sums.sample.n, sums.sample.bound) == (2, 0.49)


# --- all four ---

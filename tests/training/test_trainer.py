"""The training loop's guarantees, on a model small enough to train in a second.

The recipe of a hybrid of Transformers' own class: initial weights, a small run, and the folder that it writes.
"""

import dataclasses
import json
import math
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pandas as pd
import pytest
import torch
from precision import LAW, float64, relative_error
from safetensors.torch import load_file
from tiny_runs import SETTINGS, run, tiny_model, tiny_task, weights
from torch.nn import functional as F

from kvlens import HookedKVTransformer, KVLensError, KVTransformerBridge, convert_prompt, load, zoo
from kvlens.checks import from_fields
from kvlens.files import check_folder, check_listed
from kvlens.model import HookedKVTransformerConfig
from kvlens.tasks import Batch, make_task
from kvlens.training import Loss, Score, TrainSettings, build_model, find_recipe, score_heldout, ship, train, train_recipe
from kvlens.training.hybrid import AnswerLoss, computed_by_mixers, new_hybrid
from kvlens.training.run import (
    CrossEntropy,
    ModelAndLoss,
    SquaredError,
    batch_generator,
    decayed_parameters,
    in_float,
    logits_at,
    loss_of,
    what_is_read,
)
from kvlens.training.ship import HYBRID_FOLDER


def test_metrics_are_tidy_and_measure_what_they_say():
    model, task = tiny_model(dtype="float64"), tiny_task()
    before = score_heldout(model, task, 7)
    result = run(model, task, steps=3, eval_every=2, warmup_fraction=0.5, final_fraction=0.0)
    expected = pd.DataFrame(
        {
            "step": [1, 2, 2, 3, 3],
            "split": ["train", "train", "heldout", "train", "heldout"],
            "tokens": [54, 108, 108, 162, 162],
        }
    )
    pd.testing.assert_frame_equal(result.metrics[["step", "split", "tokens"]], expected)
    assert list(result.metrics) == ["step", "split", "loss", "accuracy", "tokens", "learning_rate", "grad_norm"]
    assert result.metrics["learning_rate"].tolist() == pytest.approx([5e-3 * 2 / 3, 3.75e-3, 3.75e-3, 0.0, 0.0], abs=1e-12)
    assert result.stopped_by == "steps" and result.steps == 3
    assert result.best_loss < before[0]
    assert score_heldout(model, task, 7)[0] == pytest.approx(result.best_loss, rel=1e-11)


@pytest.mark.parametrize("changes", [dict(), dict(output_logits_soft_cap=0.1)], ids=["plain", "soft-cap"])
def test_the_objective_is_cross_entropy_over_the_scored_positions_alone(changes):
    model = tiny_model(normalization_type="LN", dtype="float64", **changes)
    task = tiny_task()
    batch = task.sample(5, torch.Generator().manual_seed(3))
    score = loss_of(task).score(model, batch)
    logits = model(batch.inputs)
    expected = sum(F.cross_entropy(logits[b, i], batch.targets[b, i]) for b, i in batch.scored.nonzero().tolist())
    right = sum(logits[b, i].argmax() == batch.targets[b, i] for b, i in batch.scored.nonzero().tolist())
    assert score.n_scored == int(batch.scored.sum())
    assert int(score.correct) == int(right)
    torch.testing.assert_close(score.loss, expected, rtol=1e-11, atol=0)


def test_regression_is_scored_by_squared_error():
    task = make_task("regression", functions="linear", dimensions=3, n_points=4)
    model = build_model(task, dict(n_layers=1, d_model=8, d_head=4), device="cpu")
    batch = task.sample(5, torch.Generator().manual_seed(3))
    score = loss_of(task).score(model, batch)
    errors = (model(batch.inputs) - batch.targets).square()
    torch.testing.assert_close(score.loss, errors[batch.scored].sum())
    assert math.isnan(float(score.correct))
    result = train(model, task, steps=5, batch_size=4, progress=False)
    assert result.metrics["accuracy"].isna().all()


def test_training_lowers_the_loss_restores_the_mode_and_leaves_the_best_weights():
    model = tiny_model(dtype="float64").eval()
    result = run(model, steps=80, eval_every=10)
    assert not model.training
    assert result.heldout["loss"].min() < result.heldout["loss"][0] * 0.9
    assert score_heldout(model, tiny_task(), 7)[0] == pytest.approx(result.heldout["loss"].min(), rel=1e-11)


def test_the_best_weights_are_left_where_the_loss_rises_again():
    model = tiny_model(dtype="float64")
    result = run(model, steps=8, eval_every=1, learning_rate=0.3, schedule="constant")
    losses = result.heldout["loss"]
    assert losses.iloc[-1] > 1.01 * losses.min()
    assert score_heldout(model, tiny_task(), 7)[0] == pytest.approx(losses.min(), rel=1e-11)


def test_one_adamw_step_by_hand_decays_matrices_alone():
    """After one step from zero moments Adam moves every number by the rate against the sign of its gradient."""
    model, twin = tiny_model(), tiny_model()
    score = loss_of(tiny_task()).score(twin, tiny_task().sample(6, batch_generator(0, 0)))
    (score.loss / score.n_scored).backward()
    run(model, steps=1, warmup_fraction=0.0, final_fraction=1.0, weight_decay=0.5, learning_rate=0.1, max_grad_norm=1e9)
    decayed = decayed_parameters(twin)
    for (name, after), before in zip(model.named_parameters(), twin.parameters(), strict=True):
        clear = before.grad.abs() > 1e-5  # here Adam's epsilon of 1e-8 takes at most 1e-3 of a step of 0.1: twice that allowed
        keep = 1 - 0.1 * 0.5 if name in decayed else 1.0
        expected = before * keep - 0.1 * before.grad.sign()
        torch.testing.assert_close(after[clear], expected[clear], rtol=1e-4, atol=2e-4)


def test_only_matrices_decay():
    names = set(decayed_parameters(tiny_model(trainable_kv_bias=True, attention="linear")))
    assert "blocks.0.attn.W_Q" in names
    assert not [n for n in names if "shift" in n or ".b_" in n]


def test_frozen_parameters_do_not_move():
    model = tiny_model()
    model.embed.W_E.requires_grad_(False)
    before = model.embed.W_E.clone()
    unembed = model.unembed.W_U.clone()
    run(model)
    assert torch.equal(model.embed.W_E, before)
    assert not torch.equal(model.unembed.W_U, unembed)


def test_the_batches_depend_on_the_seed_alone_and_nothing_global_moves():
    before = torch.get_rng_state()
    first, second, other = tiny_model(), tiny_model(), tiny_model()
    run(first)
    run(second)
    run(other, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(other))


def test_early_ends():
    assert run(steps=50, stop_at_accuracy=0.01, eval_every=2).stopped_by == "accuracy"
    for patience in (1, 2):
        lost = run(steps=50, patience=patience, learning_rate=10.0, warmup_fraction=0.0, eval_every=2)
        assert lost.stopped_by == "patience" and lost.steps == lost.best_step + 2 * patience
    late = run(steps=10_000, max_minutes=1e-6)
    assert late.stopped_by == "time" and late.steps == 1 and len(late.heldout) == 1


def test_watched_parameters_are_recorded_at_every_evaluation():
    result = run(watch="shift_coef")
    assert result.watched["step"].unique().tolist() == [4, 8, 12]
    last = result.watched[(result.watched["step"] == 12) & (result.watched["parameter"] == "blocks.0.attn.k_shift_coef")]
    assert last["index"].tolist() == [0, 1, 2, 3]  # two heads, two coefficients


@pytest.mark.parametrize("folder", [False, True])
def test_a_loss_that_is_not_finite_names_the_step_and_keeps_the_last_good_weights(folder, tmp_path, monkeypatch):
    twin, model = tiny_model(), tiny_model()
    forward, calls = ModelAndLoss.forward, []

    def spoiled(self, batch: Batch):
        score = forward(self, batch)
        calls.append(1)
        return score._replace(loss=score.loss * math.nan) if len(calls) == 5 else score

    monkeypatch.setattr(ModelAndLoss, "forward", spoiled)
    with pytest.raises(KVLensError, match="loss .nan. of step 5 is not finite"):
        run(model, eval_every=100, folder=tmp_path / "run" if folder else None)
    assert weights(model).isfinite().all()
    if folder:  # also when the fault comes at the first step of a process that took the run up
        calls[:] = [1] * 4
        resumed, good = tiny_model(), load_file(tmp_path / "run" / "checkpoint.safetensors")
        with pytest.raises(KVLensError, match="step 4"):
            run(resumed, eval_every=100, folder=tmp_path / "run")
        assert all(torch.equal(p, good[f"model/{name}"]) for name, p in resumed.named_parameters())
    if folder:  # the checkpoint of step 3 stands, and a healthy run goes on from it to the same end
        monkeypatch.setattr(ModelAndLoss, "forward", forward)
        again = tiny_model()
        run(again, eval_every=100, folder=tmp_path / "run")
        run(twin, eval_every=100)
        assert torch.equal(weights(again), weights(twin))


def test_learning_rates_known_by_hand():
    cosine = TrainSettings(learning_rate=8.0, warmup_fraction=0.5, final_fraction=0.25)
    assert [cosine.rate(p) for p in (0.0, 0.125, 0.25, 0.5)] == [0.0, 2.0, 4.0, 8.0]
    assert cosine.rate(0.75) == pytest.approx(5.0, rel=1e-15)  # half-way from 8 to 2
    assert cosine.rate(1.0) == cosine.rate(3.0) == 2.0
    constant = dataclasses.replace(cosine, schedule="constant")
    assert [constant.rate(p) for p in (0.25, 0.5, 1.0)] == [4.0, 8.0, 8.0]
    assert TrainSettings(warmup_fraction=0.0, final_fraction=0.0).rate(1.0) == 0.0


def test_linear_attention_has_no_longest_text():
    model = tiny_model(n_ctx=5, attention="linear")
    assert isinstance(model, HookedKVTransformer)
    run(model, steps=1)


def test_settings_survive_their_dictionary():
    settings = TrainSettings(**{**SETTINGS, "betas": (0.8, 0.9)})
    assert from_fields(TrainSettings, {**dataclasses.asdict(settings), "betas": [0.8, 0.9]}) == settings


class LogitNorm(Loss):
    """A loss of one's own: the mean square of all logits."""

    def score(self, model, batch):
        logits = model(batch.inputs)
        return Score(logits.square().mean(dim=-1).sum(), torch.tensor(math.nan), batch.scored.numel())


def test_another_loss_is_what_the_run_makes_small(tmp_path):
    model, task = tiny_model(dtype="float64"), tiny_task()
    before = score_heldout(model, task, 7, loss=LogitNorm())
    result = run(model, loss=LogitNorm(), steps=40, folder=tmp_path / "run", weight_decay=0.0)
    assert result.best_loss < 0.7 * before[0]
    assert score_heldout(model, task, 7, loss=LogitNorm())[0] == pytest.approx(result.best_loss, rel=1e-11)
    with pytest.raises(KVLensError, match="holds another run: loss name was 'LogitNorm' there and is None now"):
        run(tiny_model(), steps=40, folder=tmp_path / "run", weight_decay=0.0)


def test_a_card_states_the_loss_and_accuracy_of_held_out_sequences(monkeypatch):
    monkeypatch.setattr(ship, "MEASURED_SEQUENCES", 9)
    task = make_task("hops", k=1, vocab_size=3, length=10)
    model = build_model(task, dict(n_layers=1, d_model=8, d_head=4))
    measured = ship.measure(model, task, loss_of(task))
    expected = score_heldout(model, task, 9, seed=ship.MEASURE_SEED)
    assert (measured["loss"], measured["accuracy"]) == pytest.approx(expected) and 0 < measured["accuracy"] < 1


TASK = make_task("induction", vocab_size=17, length=13, law="first_repeat")


def models():
    yield dict(kv_shift={"queries": True, "window": 3})
    yield dict(attention="linear", feature_map="elu_plus_one", kv_shift=True)
    yield dict(positional_embedding_type="standard")
    yield dict(attention_variant=dict(negative=dict(k=2, beta=0.3, per="label"), regularised=dict(alpha=0.3)))
    yield dict(attention_variant=dict(ridge=dict(strength=0.5)))


@pytest.mark.parametrize("kind", models(), ids=lambda kind: "-".join(kind))
def test_loss_and_gradients_are_those_of_the_whole_batch(kind):
    model = build_model(TASK, dict(n_layers=2, d_model=12, d_head=6, dtype=torch.float64, **kind))
    batch = TASK.sample(5, torch.Generator().manual_seed(1))
    read = what_is_read(model, batch)
    end = read.inputs.shape[1]
    assert end < batch.inputs.shape[1] and read.scored[:, -1].any() and not batch.scored[:, end:].any()
    found = []
    for loss in (
        CrossEntropy().score(model, batch).loss,
        torch.nn.functional.cross_entropy(
            in_float(logits_at(model, batch.inputs, batch.scored)), batch.targets[batch.scored], reduction="sum"
        ),
    ):
        model.zero_grad()
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)  # sums of at most a few hundred float64 terms


def test_numbers_are_cut_alike():
    task = make_task("regression", dimensions=3, n_points=4)
    model = build_model(task, dict(n_layers=1, d_model=12, d_head=6, positional_embedding_type="standard"))
    batch = task.sample(2, torch.Generator().manual_seed(0))
    batch = batch._replace(scored=batch.scored & (torch.arange(batch.scored.shape[1]) < 3))
    assert what_is_read(model, batch).inputs.shape[1] == 3
    whole = (model(batch.inputs)[batch.scored] - batch.targets[batch.scored]).square().sum()
    torch.testing.assert_close(SquaredError().score(model, batch).loss, whole)


def test_models_that_look_ahead_and_batches_without_a_score_are_left_whole():
    batch = TASK.sample(3, torch.Generator().manual_seed(0))
    model = build_model(TASK, dict(n_layers=1, d_model=12, d_head=6, attention_dir="bidirectional"))
    assert isinstance(model.cfg, HookedKVTransformerConfig) and what_is_read(model, batch) is batch
    causal = build_model(TASK, dict(n_layers=1, d_model=12, d_head=6))
    nothing = batch._replace(scored=torch.zeros_like(batch.scored))
    assert what_is_read(causal, nothing) is nothing and CrossEntropy().score(causal, nothing).n_scored == 0


RECIPE = find_recipe("facts-hybrid")
FACTS = make_task(RECIPE.task, **RECIPE.task_settings)
SMALL = dict(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)


def small(**changes):
    return new_hybrid(FACTS, {**RECIPE.model, **SMALL, **changes})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run of a few steps, and what it reports."""
    folder = tmp_path_factory.mktemp("hybrid")
    training = dict(steps=4, batch_size=2, eval_every=2, eval_sequences=4, learning_rate=3e-3)
    recipe = replace(RECIPE, model={**RECIPE.model, **SMALL}, training=training)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvlens.training.ship.MEASURED_SEQUENCES", 8)
        patch.setattr("kvlens.tasks.facts.MEASURED_STORIES", 4)
        facts = train_recipe(recipe, folder / "run", device="cpu", progress=False)
    return folder / "run" / "model", facts


def test_mixers_compute_the_same_loss_and_gradients_as_transformers():
    batch = FACTS.sample(2, torch.Generator().manual_seed(0))
    found = []
    for by_mixers in (False, True):
        with float64():
            model = small().double()
            with computed_by_mixers(model) if by_mixers else nullcontext():
                loss = AnswerLoss().score(model, batch).loss
            loss.backward()
        found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (plain, gradients), (mixed, others) = found
    assert relative_error(mixed, plain) < LAW
    for name, gradient in gradients.items():
        assert relative_error(others[name], gradient) < LAW, name


def test_after_the_run_transformers_computes_again():
    model = small()
    with computed_by_mixers(model):
        pass
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_seed_decides_the_initial_weights_and_filters_do_not_decay():
    first, again, other = small(), small(), small(seed=1)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    decayed = decayed_parameters(first)
    assert "lm_head.weight" in decayed and not any("conv1d" in name for name in decayed)


def test_a_run_writes_a_folder_that_transformers_and_the_bridge_read(written):
    folder, facts = written
    check_listed(folder)
    model = load(folder, device="cpu")
    assert isinstance(model, KVTransformerBridge) and facts["training"]["steps"] == 4
    assert facts["n_parameters"] == sum(p.numel() for p in small().parameters())
    card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "Qwen3_5ForCausalLM" in card and f"{facts['n_parameters']:,} parameters" in card
    (answers,) = facts["heldout"]["answers"]
    assert answers["converted"] == answers["with_story"]
    story = FACTS.stories(1, torch.Generator().manual_seed(1), "heldout")[0]
    prompt, text = (
        torch.tensor([part]) for part in (story.tokens[: story.n_prompt_tokens], story.tokens[story.n_prompt_tokens :])
    )
    with float64():
        model = load(folder, device="cpu", dtype="float64")
        with model.kv_bias(convert_prompt(model, prompt)):
            converted = model(text)
        whole = model(torch.cat([prompt, text], dim=1))[:, prompt.shape[1] :]
    assert relative_error(converted, whole) < LAW


def test_a_damaged_file_is_noticed_and_notes_of_the_run_change_no_fingerprint(written, tmp_path):
    folder, _ = written
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    del config["beside"], config["checksum"]
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    listed, unlisted = (KVTransformerBridge.boot_transformers(each, device="cpu").fingerprint() for each in (folder, copy))
    assert listed == unlisted
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    with pytest.raises(KVLensError, match="damaged"):
        KVTransformerBridge.boot_transformers(copy, device="cpu")


def test_a_second_training_into_the_same_folder_says_what_to_do(written):
    folder = written[0].parent
    with pytest.raises(KVLensError, match=r"already holds a trained model \(.*--restart\) to replace it"):
        train_recipe(RECIPE, folder, device="cpu")
    check_folder(folder, HYBRID_FOLDER, overwrite=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(KVLensError, match=r"not part of a trained model .*notes\.txt"):
        train_recipe(RECIPE, folder, device="cpu", restart=True)
    (folder / "notes.txt").unlink()


def test_settings_that_transformers_refuses():
    with pytest.raises(KVLensError, match="Qwen3_5TextConfig"):
        small(layer_types=["no such layer"])


def test_a_shipped_hybrid_is_loaded_by_name_and_by_its_front_end_alone(written, tmp_path, monkeypatch):
    shutil.copytree(written[0], tmp_path / "a-hybrid")
    shutil.copytree(zoo.folder_of("facts-gpt2"), tmp_path / "facts-gpt2")
    monkeypatch.setattr("kvlens.zoo._ROOT", tmp_path)
    model = load("a-hybrid", device="cpu")
    assert isinstance(model, KVTransformerBridge) and next(model.parameters()).dtype == torch.float32
    assert int(model.to_tokens("Mira keeps a goat.")[0, 0]) == model.tokenizer.bos_token_id  # as in training
    with pytest.raises(KVLensError):
        KVTransformerBridge.from_zoo("facts-gpt2")
    with pytest.raises(KVLensError):
        HookedKVTransformer.from_zoo("a-hybrid")

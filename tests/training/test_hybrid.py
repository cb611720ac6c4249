"""The recipe of a hybrid of Transformers' own class: initial weights, a small run, and the folder that it writes."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from precision import LAW, float64, relative_error

from kvlens import HookedKVTransformer, KVLensError, KVTransformerBridge, convert_prompt, load, zoo
from kvlens.files import check_folder, check_listed
from kvlens.tasks import make_task
from kvlens.training import find_recipe, train_recipe
from kvlens.training.hybrid import AnswerLoss, computed_by_mixers, new_hybrid
from kvlens.training.run import decayed_parameters
from kvlens.training.ship import HYBRID_FOLDER

RECIPE = find_recipe("facts-hybrid")
TASK = make_task(RECIPE.task, **RECIPE.task_settings)
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
    return new_hybrid(TASK, {**RECIPE.model, **SMALL, **changes})


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
    batch = TASK.sample(2, torch.Generator().manual_seed(0))
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
    story = TASK.stories(1, torch.Generator().manual_seed(1), "heldout")[0]
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


def test_a_shipped_hybrid_is_loaded_by_name_and_each_front_end_names_the_other(written, tmp_path, monkeypatch):
    shutil.copytree(written[0], tmp_path / "a-hybrid")
    shutil.copytree(zoo.folder_of("facts-gpt2"), tmp_path / "facts-gpt2")
    monkeypatch.setattr("kvlens.zoo._ROOT", tmp_path)
    model = load("a-hybrid", device="cpu")
    assert isinstance(model, KVTransformerBridge) and next(model.parameters()).dtype == torch.float32
    assert int(model.to_tokens("Mira keeps a goat.")[0, 0]) == model.tokenizer.bos_token_id  # as in training
    with pytest.raises(KVLensError, match=r"HookedKVTransformer.from_zoo\('facts-gpt2'\)"):
        KVTransformerBridge.from_zoo("facts-gpt2")
    with pytest.raises(KVLensError, match=r"KVTransformerBridge.from_zoo\('a-hybrid'\)"):
        HookedKVTransformer.from_zoo("a-hybrid")

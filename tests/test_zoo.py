"""The shipped models: each loads, performs as its card says, and language models read and write text."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from kvlens import HookedKVTransformer, KVLensError, load, zoo
from kvlens.tasks import make_task
from kvlens.tasks.facts import answer_shares, scoring_hops
from kvlens.training import score_heldout

NAMES = zoo.names()


def test_the_models_ship_in_less_than_30_megabytes():
    assert {
        "bigram-linear",
        "docs-gpt2",
        "docs-linear",
        "docs-shift",
        "facts-gpt2",
        "facts-hops-gpt2",
        "facts-hops-linear",
        "facts-hybrid",
        "facts-linear",
        "induction-plain-2l",
        "induction-shift-1l",
    } == set(NAMES)
    assert sum(file.stat().st_size for name in NAMES for file in zoo.folder_of(name).iterdir()) < 30e6


@pytest.mark.parametrize("name", NAMES)
def test_card_and_facts_are_of_this_model(name):
    folder = zoo.folder_of(name)
    model = load(folder)
    facts = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    # a bridge's unembedding has a bias more than the model in the file
    weights = load_file(folder / "model.safetensors") if zoo.is_hugging_face(folder) else dict(model.named_parameters())
    assert facts["name"] == name and facts["n_parameters"] == sum(weight.numel() for weight in weights.values())
    card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    for piece in (f"kvlens train {name}", f"{facts['n_parameters']:,} parameters", "Licence", "seed"):
        assert piece in card


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("docs", "facts"))])
def test_held_out_accuracy_is_as_the_facts_say(name):
    facts = json.loads((zoo.folder_of(name) / "training.json").read_text(encoding="utf-8"))
    task = make_task(facts["recipe"]["task"], **facts["recipe"]["task_settings"])
    _, accuracy = score_heldout(HookedKVTransformer.from_zoo(name), task, 64, seed=2)
    # Another draw of at least 600 scored positions: one in 1,000 is wrong, and three wrong ones are allowed.
    assert accuracy >= 0.995
    assert facts["heldout"]["accuracy"] >= 0.999


@pytest.mark.parametrize("law", ["repeated_block", "first_repeat"])
@pytest.mark.parametrize("name", ["induction-shift-1l", "induction-plain-2l"])
def test_induction_is_right_on_both_distributions(name, law):
    """At most one in 1,000 is wrong; that allows 5 of 1,000 first repeats, and 28 of 200 blocks (14,000 positions)."""
    task = make_task("induction", vocab_size=512, length=128, law=law)
    n = 200 if law == "repeated_block" else 1000
    _, accuracy = score_heldout(HookedKVTransformer.from_zoo(name), task, n, seed=5)
    assert accuracy >= (0.998 if law == "repeated_block" else 0.995)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("docs")])
def test_models_of_text_read_and_write_text(name):
    model = HookedKVTransformer.from_zoo(name)
    tokens = model.to_tokens("Return a list of the names.")
    assert tokens[0, 0] == model.tokenizer.bos_token_id
    assert model.to_tokens("Return", prepend_bos=False)[0, 0] != model.tokenizer.bos_token_id
    text = model.generate("Return a list of", max_new_tokens=5, do_sample=False, verbose=False)
    assert text.startswith("Return a list of") and len(text) > len("Return a list of")
    assert torch.isfinite(model(tokens)).all()


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("facts")])
def test_models_of_stories_answer_as_their_facts_say(name):
    facts = json.loads((zoo.folder_of(name) / "training.json").read_text(encoding="utf-8"))
    model, task = load(zoo.folder_of(name)), make_task("facts", **facts["recipe"]["task_settings"])
    for stated in facts["heldout"]["answers"]:
        n_facts = stated["n_facts"]
        bound = 0.98 if name == "facts-hybrid" else {4: 0.95, 6: 0.95, 8: 0.90}[n_facts]
        stories = replace(task, min_facts=n_facts, max_facts=n_facts).stories(32, torch.Generator().manual_seed(5), "heldout")
        stories = stories if task.hops == 1 else scoring_hops(stories, stated["hops"])
        shares = answer_shares(model, stories)
        # Another draw of n answers: four standard errors below what is stated, which itself is at least the bound.
        slack = 4 * (bound * (1 - bound) / shares["n_answers"]) ** 0.5
        assert stated["with_story"] >= bound and shares["with_story"] >= stated["with_story"] - slack
        if task.hops == 1:  # of two hops, earlier questions and their answers give some away
            assert shares["without_story"] <= shares["guess"] + slack < shares["guess_in_story"]
        if stated["converted"] is not None:
            assert shares["converted"] == shares["with_story"] and stated["converted"] == stated["with_story"]


def test_only_names_and_paths_are_loaded():
    with pytest.raises(KVLensError, match="load: source: expected a path, got 5"):
        load(5)

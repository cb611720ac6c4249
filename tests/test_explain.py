"""``kvlens explain``: the sentence that is read aloud holds what the model does."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from kvlens.analyses.attribution.explain import explain
from kvlens.analyses.attribution.null import Null

from kvlens import HookedKVTransformer, KVLensError, convert_prompt
from kvlens.cli import main
from kvlens.report.explanation import in_a_sentence

STORY = "Mira keeps a goat. Pavel has a parrot. At night Kaya feeds a donkey."
QUESTION = " Which animal does Kaya keep? Kaya keeps a"


def answer_probability(model: HookedKVTransformer, story: str, word: str) -> float:
    tokens = torch.cat([model.to_tokens(story), model.to_tokens(QUESTION, prepend_bos=False)], dim=1)
    with torch.no_grad():
        return float(model(tokens)[0, -1].softmax(dim=-1)[model.to_single_token(word)])


@pytest.mark.parametrize("name", ["facts-linear", "facts-gpt2"])
def test_the_sentence_names_what_matters(name):
    model = HookedKVTransformer.from_zoo(name)
    found = explain(model, STORY, QUESTION, answer=" donkey")
    assert found.unit == 2
    assert found.answer == "donkey"
    assert found.p_answer[0] == pytest.approx(answer_probability(model, STORY, " donkey"), abs=1e-4)
    assert found.p_answer[1] < 0.1 < 0.9 < found.p_answer[0]
    with torch.no_grad(), model.kv_bias(convert_prompt(model, STORY, without=[(1, len(model.to_tokens(STORY)[0]))])):
        alone = model(QUESTION, prepend_bos=False)[0, -1].softmax(dim=-1)[model.to_single_token(" donkey")]
    assert found.p_answer[2] == pytest.approx(float(alone), abs=1e-4)
    said = in_a_sentence(found, "sentence")
    assert said.startswith("Without 'At night Kaya feeds a donkey.' the answer 'donkey' falls from ")
    named = found.needed() or found.sufficient()
    assert named
    assert f"Carried by {named[0]}" in said
    heads = found.heads
    best = heads.loc[heads["swap"].idxmax() if found.needed() else heads["converse"].idxmin()]
    assert named[0] == f"L{int(best['layer'])}H{int(best['head'])}"


def test_only_significant_heads_are_named_and_an_unstable_lead_is_reported():
    found = explain(HookedKVTransformer.from_zoo("facts-gpt2"), STORY, QUESTION, answer=" donkey", null=Null(60))
    heads = found.heads
    assert heads[["p_value", "p_value_alone", "leads"]].notna().all(axis=None)
    assert heads["leads"].sum() == pytest.approx(1)
    insignificant = replace(found, heads=heads.assign(p_value=1.0, p_value_alone=1.0))
    assert insignificant.needed() == insignificant.sufficient() == []
    assert in_a_sentence(insignificant, "sentence").endswith("No head carries it alone.")
    carried = heads.assign(swap=heads["whole"] * (heads.index == 3), p_value=0.05)
    layer, head = int(heads["layer"][3]), int(heads["head"][3])
    for leads, said in ((0.5, f"L{layer}H{head} does not always rank first"), (0.95, f"Carried by L{layer}H{head}.")):
        shown = in_a_sentence(replace(found, heads=carried.assign(leads=leads)), "sentence")
        assert said in shown and ("rank first" in shown) == (leads == 0.5)


def test_a_null_that_is_too_small_for_the_number_of_units_warns():
    model = HookedKVTransformer.from_zoo("facts-linear")
    with pytest.warns(UserWarning, match="none of 3 units can be significant.*a null of 60 units"):
        found = explain(model, STORY, QUESTION, answer=" donkey", null=Null(19))
    assert found.unit is None
    assert in_a_sentence(found, "sentence").startswith("The prompt has 3 sentences, too many for any of them to be significant")


def test_a_result_without_effects_says_so():
    model = HookedKVTransformer.from_zoo("facts-linear")
    found = explain(model, "Mira keeps a goat. Pavel has a parrot.", " Where is the", answer=" kite")
    assert found.unit is None
    assert in_a_sentence(found, "sentence").startswith("No sentence of the prompt changes the probability of 'kite'")
    assert len(found.heads) == len(found.positions) == 0


def test_the_command_prints_the_sentence_and_writes_the_tables(tmp_path, capsys):
    given = ["--prompt", STORY, "--text", QUESTION, "--answer", " donkey", "--rival", " goat", "--null", "60"]
    assert main(["explain", *given, "--model", "facts-linear", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "Without 'At night Kaya feeds a donkey.'" in " ".join(printed.split())
    units = pd.read_parquet(tmp_path / "out" / "units.parquet")
    assert units["total_effect"].idxmax() == 2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("summary.json", "units.parquet", "heads.parquet", "positions.parquet")
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--null", "5"], "--null"),
        (["--by", "line"], "--by"),
        (["--prompt", "a"], "--text is missing"),
        (["--answr", "x"], "--answer"),
        (["--answer", " ", "--prompt", STORY, "--text", QUESTION, "--model", "facts-linear"], "at least one token"),
    ],
)
def test_bad_input_has_clear_messages(given, words, capsys):
    assert main(["explain", *given]) == 2
    assert words in capsys.readouterr().err


def test_an_answer_that_is_its_rival_is_refused():
    model = HookedKVTransformer.from_zoo("facts-linear")
    with pytest.raises(KVLensError, match="the answer itself"):
        explain(model, STORY, QUESTION, answer=" goat", rival=" goat")

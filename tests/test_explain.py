"""``kvlens explain``: the sentence that is read aloud holds what the model does."""

import math
import re

import pandas as pd
import pytest
import torch
from kvlens.analyses.attribution.explain import explain
from kvlens.analyses.attribution.null import Null
from kvlens.analyses.attribution.verdicts import HALF, OVERTAKEN, TIE
from kvlens.analyses.bias.parts import Part

from kvlens import HookedKVTransformer, KVLensError, convert_prompt
from kvlens.cli import main
from kvlens.report.example import NESTED
from kvlens.report.explanation import definitions, in_a_paragraph, paragraphs, print_explanation
from kvlens.report.opening import opening
from kvlens.viz._text import html_text, number, percent

STORY = "Mira keeps a goat. Pavel has a parrot. At night Kaya feeds a donkey."
QUESTION = " Which animal does Kaya keep? Kaya keeps a"
BOXES = (
    "The drawer is in the harbor. The tin is in the attic. The crate is in the meadow. The anchor is in the crate. "
    "The trumpet is in the drawer. The bottle is in the tin."
)


def answer_probability(model: HookedKVTransformer, story: str, word: str) -> float:
    tokens = torch.cat([model.to_tokens(story), model.to_tokens(QUESTION, prepend_bos=False)], dim=1)
    with torch.no_grad():
        return float(model(tokens)[0, -1].softmax(dim=-1)[model.to_single_token(word)])


@pytest.mark.parametrize("name", ["facts-linear", "facts-gpt2"])
def test_the_sentences_say_what_was_run(name):
    model = HookedKVTransformer.from_zoo(name)
    found = explain(model, STORY, QUESTION, answer=" donkey")
    assert found.cause == (2,) and found.sets("units", "breaking")[0] == ["2"]
    assert found.answer == "donkey"
    assert found.p_answer[0] == pytest.approx(answer_probability(model, STORY, " donkey"), abs=1e-4)
    assert found.p_answer[1] < 0.1 < 0.9 < found.p_answer[0]
    with torch.no_grad(), model.kv_bias(convert_prompt(model, STORY, without=[(1, len(model.to_tokens(STORY)[0]))])):
        alone = model(QUESTION, prepend_bos=False)[0, -1].softmax(dim=-1)[model.to_single_token(" donkey")]
    assert found.p_answer[2] == pytest.approx(float(alone), abs=1e-4)
    units, heads, positions = paragraphs(found, "sentence")
    assert units[0].startswith(
        f"Without 'At night Kaya feeds a donkey.' the answer 'donkey' is lost: its probability falls "
        f"from {percent(found.p_answer[0])} to {percent(found.p_answer[1])}, and the model says "
    )
    rows = found.statements.query("about == 'heads' and role == 'breaking' and way == 0").iloc[0]
    named = " and ".join(Part.of_code(code).name for code in rows["parts"].split("+"))
    assert heads[0].startswith(f"When {named} read") and percent(rows["p_after"]) in heads[0]
    assert "the answer is lost" in positions[0]
    said = in_a_paragraph(found, "sentence")
    assert not any(word in said for word in ("suffice", "necessary", "arried by", "significant"))


def test_every_number_in_a_sentence_is_one_of_a_statement():
    """For stories with one sentence, with two that are needed together, and with a fact that stands twice."""
    twice = "Kaya feeds a donkey. The drum stands in the cellar. Kaya feeds a donkey. Pavel has a parrot."
    asked = [
        ("facts-linear", STORY, QUESTION),
        ("facts-gpt2", twice, QUESTION),
        ("facts-hops-linear", NESTED.prompt, NESTED.text),
    ]
    for name, story, question in asked:
        found = explain(HookedKVTransformer.from_zoo(name), story, question)
        numbers = re.findall(r"[<>]? ?[\d.]+ %", in_a_paragraph(found, "sentence").replace("\n", " "))
        rows = found.statements
        known = {percent(p) for column in ("p_before", "p_after", "p_says") for p in rows[column]}
        assert len(numbers) > 5 and {number.strip() for number in numbers} <= known


def test_a_result_without_a_loss_names_the_largest_effect():
    model = HookedKVTransformer.from_zoo("facts-linear")
    found = explain(model, "Mira keeps a goat. Pavel has a parrot.", " Where is the", answer=" kite", null=Null(7))
    assert found.cause == () and len(found.heads) == len(found.positions) == 0
    largest = found.units["unit_text"][found.units["total_effect"].abs().idxmax()].strip()
    said = in_a_paragraph(found, "sentence")
    assert said.startswith("The answer 'kite' is compared with ") and "There is no single sentence without which" in said
    assert f"The largest effect is that of {largest!r}" in said
    assert found.unrelated[1] == 7 and f"{found.unrelated[0]} of 7 unrelated texts, put in" in said


def test_the_command_prints_the_sentences_and_writes_the_tables(tmp_path, capsys):
    given = ["--prompt", STORY, "--text", QUESTION, "--answer", " donkey", "--rival", " parrot"]
    assert main(["explain", *given, "--model", "facts-linear", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    said = " ".join(printed.split())
    assert said.startswith("The answer 'donkey' is compared with 'parrot', its rival: with the whole prompt")
    assert "Without 'At night Kaya feeds a donkey.' the answer 'donkey' is lost" in said
    units = pd.read_parquet(tmp_path / "out" / "units.parquet")
    assert units["total_effect"].idxmax() == 2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("summary.json", "statements.parquet", "units.parquet", "heads.parquet", "positions.parquet")
    }
    statements = pd.read_parquet(tmp_path / "out" / "statements.parquet")
    assert statements["p_reference_after"].notna().all()  # against the rival


def test_an_answer_that_is_its_rival_is_refused():
    model = HookedKVTransformer.from_zoo("facts-linear")
    with pytest.raises(KVLensError, match="the answer itself"):
        explain(model, STORY, QUESTION, answer=" goat", rival=" goat")


def test_an_answer_of_white_space_is_shown_and_narrow_columns_are_whole(capsys):
    prompt = "Frobnicate a widget. The widget is painted in the given colour, which the caller may choose as it likes."
    assert main(["explain", "--model", "docs-linear", "--prompt", prompt, "--text", "def frobnicate(widget, colour):"]) == 0
    said = capsys.readouterr().out
    assert "the answer '⏎'" in " ".join(said.split()) and "''" not in said
    assert [line.split()[1:] for line in said.splitlines() if line.startswith("sentence ")] == [
        ["without", "answer", "instead", "removed", "knocked", "out"]
    ]


@pytest.mark.parametrize("rival", [None, " parrot", " goat"])
def test_page_and_terminal_define_their_words_alike(rival, capsys):
    model = HookedKVTransformer.from_zoo("facts-linear")
    found = explain(model, STORY, QUESTION, answer=" donkey", rival=rival)
    words = definitions(found, "sentence")
    print_explanation(found, "sentence")
    printed, page = " ".join(capsys.readouterr().out.split()), opening(found, "sentence", QUESTION).body
    for word, meaning in words:
        assert f"{word}: {meaning}." in printed
        assert f"<dt>{html_text(word)}</dt><dd>{html_text(meaning)}.</dd>" in page
    said = dict(words)
    assert {"lost", "kept", "changed", "without, removed", "knocked out", "effect"} <= {*said}
    assert ("exchanged" in said) == bool(found.cause)
    assert (math.exp(HALF), math.exp(OVERTAKEN), TIE) == pytest.approx((2, 4, 0.001))  # as the words have it
    score = "log p('donkey')" + (f" - log p({rival.strip()!r})" if rival else "")
    assert said["effect"].startswith(f"{score} with the whole prompt, minus") and found.score == score
    at = int(found.units["total_effect"].idxmax())  # positive: with it, the score is higher
    row = found.statements.query("about == 'units' and role == 'each'").iloc[at]
    ratio = row["p_before"] / row["p_after"]
    ratio *= row["p_reference_after"] / row["p_reference_before"] if rival else 1
    assert found.units["total_effect"][at] == pytest.approx(math.log(ratio), abs=1e-6) and ratio > 1
    assert f"raises {html_text(score)} by {number(math.log(ratio))} nats; without it the answer is {row['verdict']}" in page


def test_an_answer_that_is_behind_has_words_of_its_own():
    model = HookedKVTransformer.from_zoo("facts-linear")
    found = explain(model, STORY, QUESTION, answer=" goat")
    said = dict(definitions(found, "sentence"))
    assert found.reference == "donkey" and not found.rival_given and "changed" not in said
    assert said["lost"].startswith("q, the answer's share p(answer) / (p(answer) + p('donkey')), is below half")
    rows = found.statements.query("about == 'units' and role == 'each'")
    whole, gone = rows["p_before"].iloc[0], rows["p_after"].min()
    shares = [p / (p + r) for p, r in zip(rows["p_after"], rows["p_reference_after"], strict=True)]
    text = in_a_paragraph(found, "sentence")
    assert percent(whole) in text and any(percent(share) in text for share in shares) and gone < whole
    assert "overtakes 'donkey'" in said["gained"] and found.score == "log p('goat')"


def test_every_head_that_loses_the_answer_alone_is_named():
    model = HookedKVTransformer.from_zoo("facts-hops-gpt2")
    found = explain(model, BOXES, " Which room holds the anchor? The")
    lost = found.heads[found.heads["verdict_exchanged"] == "lost"].sort_values("p_exchanged")
    assert len(lost) > 1 and found.heads["p_exchanged"].notna().all()
    assert found.sets("heads", "breaking")[: len(lost)] == [[code] for code in lost["code"]]
    said = paragraphs(found, "sentence")[1][0]
    for row in lost.itertuples():
        assert f"{percent(row.p_exchanged)} with {Part.of_code(row.code).name}" in said
    assert f"falls from {percent(found.p_answer[0])} to" in said and "no other head or shift state loses it alone" in said
    found.heads.loc[found.heads["verdict_exchanged"] != "lost", "p_exchanged"] = math.nan
    assert f"of the {len(lost)} heads and shift states tried alone, no other loses it" in paragraphs(found, "sentence")[1][0]

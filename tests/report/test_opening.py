"""The opening of a report: one sentence and one picture, from the numbers of one counterfactual."""

import io
import re
from dataclasses import replace
from html import unescape
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from kvlens.analyses.attribution.cost import Estimate
from kvlens.analyses.attribution.explain import explain
from kvlens.analyses.prompt.readings import read_text
from rich.console import Console
from tiny_text_model import PROMPT, TEXT, tiny_text_model

from kvlens import HookedKVTransformer, KVLensError, convert_prompt
from kvlens.cli import main
from kvlens.report import build as building
from kvlens.report import build_report, print_report, write_report
from kvlens.report.console import announce
from kvlens.report.example import example_for
from kvlens.report.explanation import continuation_in_a_sentence, in_a_paragraph, paragraphs
from kvlens.report.opening import exactness, opening, word_begun
from kvlens.report.page import build_page
from kvlens.report.ranking import ABLATION, ON_ANSWER, parts_on_answer, ranked_heads
from kvlens.viz._text import html_text, percent


@pytest.fixture(scope="module")
def report():
    model = HookedKVTransformer.from_zoo("facts-linear")
    return build_report(model, *example_for("facts-linear"), model_name="facts-linear", new_tokens=2)


def test_the_page_opens_with_what_explain_found(report):
    model = HookedKVTransformer.from_zoo("facts-linear")
    found, shown = explain(model, *example_for("facts-linear")), report.summary["answer"]
    assert shown["explanation"] == in_a_paragraph(found, "sentence")
    assert shown["p_answer"] == pytest.approx(list(found.p_answer)) and shown["cause"] == list(found.cause) == [5]
    assert [row["parts"] for row in shown["statements"]] == found.statements["parts"].tolist()
    assert shown["searched_to_the_end"] == ["heads", "positions", "units"] and shown["n_passes"] == found.n_passes
    page = build_page(report).to_html()
    first = page[page.index('<section id="the-answer"') : page.index("</section>")]
    for sentences in paragraphs(found, "sentence"):
        assert all(html_text(sentence) in first.replace("&nbsp;", " ") for sentence in sentences)
    for p in (*found.p_answer, *found.p_rival, *found.p_unprompted):
        assert f"<div>{percent(p)}</div>" in first
    assert "exact to rounding" in first
    pd.testing.assert_frame_equal(report.tables["answer_units"], found.units)


def test_units_without_which_the_answer_is_kept_have_no_color(report):
    body = opening(report.explained, "sentence", "?").body
    prompt = body[body.index('data-column="removed"') : body.index('data-column="knockout"')]
    looks = re.findall(r'<span title="[^"]*" class="(\w+)[^>]*>([^<]*)', prompt)
    assert [look for look, _ in looks] == ["unsure"] * 5 + ["positive"]
    assert [text for _, text in looks] == [text.strip() for text in report.explained.units["unit_text"]]
    shown = [text.replace("&nbsp;", " ") for text in re.findall('<b class="effect">([^<]*)', prompt)]
    p = [html_text(percent(p)) for p in report.explained.statements.query("role == 'each'")["p_after"]]
    assert shown == [*p[:5], f"lost {p[5]}"]


def test_single_tokens_are_measured_in_short_prompts(report):
    tokens = report.tables["answer_tokens"]
    assert len(tokens) == report.summary["prompt"]["n_tokens"] - 1  # without BOS
    strongest = tokens.loc[tokens["total_effect"].idxmax()]
    assert strongest["unit_text"].strip() in report.explained.units["unit_text"][5]
    page = build_page(report).to_html()
    assert page.count('data-column="tokens"') == 1 and "effect of removing a token, nats" in page
    assert 'data-column="tokens"' not in opening(report.explained, "sentence", "?").body


def test_there_is_one_ranking_of_heads_and_it_is_that_of_the_sentence(report):
    """Heads of breaking sets first; the columns are the two that the sentences speak of."""
    ranked, column = ranked_heads(report)
    heads = report.explained.heads.query("part == 'head'").set_index(["layer", "head"])
    assert len(ranked) == len(heads) == 8 and column == ON_ANSWER["p_lost"]
    for row in ranked.to_dict("records"):
        measured = heads.loc[row["layer"], row["head"]]
        shown = [row["answer, only this exchanged"], row["answer, all but this exchanged"]]
        assert shown == pytest.approx([measured["p_exchanged"], measured["p_alone"]], nan_ok=True)
        assert ("breaking" in row["in a set"]) == measured["breaking"] and ("keeping" in row["in a set"]) == measured["keeping"]
    named = ["breaking" in kinds for kinds in ranked["in a set"]]
    assert named == sorted(named, reverse=True) and named[0]
    page = build_page(report).to_html()
    first = f"L{ranked['layer'].iloc[0]}H{ranked['head'].iloc[0]}"
    assert first in report.summary["answer"]["explanation"]
    assert f"<tbody><tr><td>{first}</td>" in page
    assert "ablation_kl" not in page and "zero_kl" not in page


def test_heads_are_ranked_by_their_sets_and_then_by_what_is_left_of_the_answer():
    """Breaking before keeping before neither, a head in both first; in each the one that leaves least, unknown ones last."""
    nan = float("nan")
    found = {
        "breaking": [0, 1, 0, 1, 1, 0, 0],
        "keeping": [0, 0, 1, 1, 0, 0, 0],
        "p_exchanged": [0.9, 0.4, 0.2, 0.6, 0.3, nan, 0.8],
    }
    heads = pd.DataFrame(found).astype({"breaking": bool, "keeping": bool}).assign(code=list("abcdefg"))
    run = {"about": "heads", "role": "breaking", "p_before": 0.9}
    statements = pd.DataFrame([{**run, "parts": "e", "p_after": 0.3}, {**run, "parts": "b+d", "p_after": 0.35}])
    parts = parts_on_answer(SimpleNamespace(heads=heads, p_answer=(0.9, 0.1, 0.1), statements=statements))
    assert parts.index.tolist() == [3, 4, 1, 2, 6, 0, 5]
    assert parts[ON_ANSWER["p_lost"]].tolist() == pytest.approx([0.55, 0.6, 0.55, 0.7, 0.1, 0.0, nan], nan_ok=True)


def in_terminal(report) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_report(report, console)
    return console.file.getvalue()


def test_the_terminal_begins_with_the_sentence_and_ranks_alike(report):
    view = in_terminal(report)
    assert report.summary["answer"]["explanation"] in " ".join(view.split("1  The converted")[0].split())
    ranked, column = ranked_heads(report)
    names = [f"L{layer}H{head}" for layer, head in zip(ranked["layer"], ranked["head"], strict=True)]
    assert f"ranked by: {column}" in view
    assert re.findall(r"^ +(L\dH\d) ", view, flags=re.MULTILINE) == names[:5]


def test_without_an_explanation_the_page_says_so(monkeypatch, tmp_path):
    model = tiny_text_model()
    report = build_report(model, PROMPT, TEXT, new_tokens=1, by=None)
    assert report.explained is None and report.summary["answer"] is None and "answer_units" not in report.tables
    html = build_page(report).to_html()
    assert "was not computed for this report" in html
    prompt, text = model.to_tokens(PROMPT)[0], model.to_tokens(TEXT, prepend_bos=False)[0]
    logits = [model(torch.cat([prompt, text])[None])[0], read_text(model, prompt, text, conditions=["without_prompt"])]
    logits[1] = logits[1]["without_prompt"].logits
    rows = report.summary["continuation"]
    assert len(rows) == 2
    for row, key, of_text in zip(rows, ("p_with_prompt", "p_without_prompt"), logits, strict=True):
        p = of_text[-1].softmax(dim=-1)
        assert row[key] == pytest.approx(float(p.max()), rel=1e-4) and row["token"] == model.to_string(p.argmax()).strip()
        assert re.search(f"continues? with {re.escape(repr(row['token']))}", unescape(html))
    assert continuation_in_a_sentence(rows) in " ".join(in_terminal(report).split("1  The converted")[0].split())
    assert ranked_heads(report)[1] == ABLATION
    monkeypatch.setattr(building, "MOST_EXPLAINED", 3)
    monkeypatch.setattr("kvlens.report.page.MOST_EXPLAINED", 3)
    long = build_report(model, PROMPT, TEXT, new_tokens=1)
    assert long.explained is None and "tokens, more than 3" in build_page(long).to_html()
    assert (write_report(long, tmp_path / "r") / "report.html").is_file()


def test_a_long_explanation_is_announced(capsys):
    announce(Estimate(9000, 59.0))
    assert capsys.readouterr().err == ""
    announce(Estimate(480_000, 9000.0))
    announce(Estimate(45_000, 70.0))
    said = " ".join(capsys.readouterr().err.split())
    assert said == (
        "Explaining the answer takes at most 2.5 hours (480,000 tokens to read). "
        "Explaining the answer takes at most 70 seconds (45,000 tokens to read)."
    )


def test_units_that_do_nothing_leave_the_ranking_to_the_text():
    model = HookedKVTransformer.from_zoo("facts-linear")
    report = build_report(model, "Mira keeps a goat. Pavel has a parrot.", " Where is the", new_tokens=1, answer=" kite")
    assert report.explained.cause == () and report.summary["answer"]["p_answer"][1] is None
    page = build_page(report).to_html()
    assert re.search(html_text("without which the answer 'kite'") + ".{,30} is lost", page)
    assert "without that sentence" not in page and "without the prompt" in page and ranked_heads(report)[1] == ABLATION


def test_exactness_is_one_line():
    figures = {"relative_error": 2e-7, "rounding_error": 1e-7, "argmax_agreement": 1.0, "exact_to_rounding": True}
    figures |= {"approximation": None}
    assert exactness(figures, 20).startswith(
        "The prompt's conversion into a KV bias (numbers in each attention head that take the prompt's place) is exact"
    )
    assert "at 20 of 20 positions" in exactness(figures, 20)
    assert "NOT EXACT" in exactness({**figures, "exact_to_rounding": False}, 20)
    assert "approximate (landmark, 8" in exactness({**figures, "approximation": "landmark, 8", "exact_to_rounding": None}, 20)


def test_a_page_never_says_in_which_folder_the_model_lies(tmp_path):
    model = tiny_text_model()
    model.cfg.model_name = str(tmp_path / "secret" / "mine")
    report = build_report(model, PROMPT, TEXT, new_tokens=1, by=None)
    assert report.summary["model"]["name"] == "mine"
    model.cfg.model_name = "owner/mine"
    assert build_report(model, PROMPT, TEXT, new_tokens=1, by=None).summary["model"]["name"] == "owner/mine"


def test_an_answer_that_is_not_explained_is_refused(capsys, tmp_path):
    words = ["report", "--by", "none", "--answer", " goat", "--out", str(tmp_path / "r")]
    assert main(words) == 2 and "--by none skips the explanation" in capsys.readouterr().err
    with pytest.raises(KVLensError, match="the answer itself"):
        build_report(tiny_text_model(), PROMPT, TEXT, new_tokens=1, answer="a", rival="a")
    assert torch.is_grad_enabled()


def test_what_the_model_says_without_the_prompt_has_a_row(report):
    model = HookedKVTransformer.from_zoo("facts-linear")
    prompt, text = example_for("facts-linear")
    nothing = convert_prompt(model, prompt, without=[(1, len(model.to_tokens(prompt)[0]))])  # BOS stays
    with torch.no_grad(), model.kv_bias(nothing):
        p = model(text, prepend_bos=False)[0, -1].softmax(dim=-1)
    found = report.explained
    assert model.to_single_str_token(int(p.argmax())).strip() == found.unprompted
    assert found.p_unprompted[2] == pytest.approx(float(p.max()), abs=1e-4)
    body = opening(found, "sentence", "?").body
    assert f"<bdi>{found.unprompted}</bdi>" in body and body.count("most probable without the prompt") == 1
    same = replace(found, unprompted=None, p_unprompted=None)
    assert "most probable without the prompt" not in opening(same, "sentence", "?").body


def test_an_answer_that_begins_a_word_is_named_with_the_word(report):
    for answer, written, word in [
        ("b", ["b", "all", "."], "ball"),
        ("b", [" b", "al", "l", " and"], "ball"),
        ("ball", [" ball", "."], None),
        ("ball", [" ball", " room"], None),
        ("b", ["c", "all"], None),
        ("b", ["b", "al"], None),
        ("b", [], None),
        ("4", ["4", "2"], None),
    ]:
        assert word_begun(answer, written) == word
    assert "is the beginning of “donkeys”" in opening(report.explained, "sentence", "?", word="donkeys").body
    assert "is the beginning of" not in opening(report.explained, "sentence", "?").body

"""Sources in the answer: each content word has one account, by hand and on models that know stories; marks in text and page."""

import json
import re
from dataclasses import replace
from html import unescape
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

import kvlens
from kvlens.cli.printed import print_explanation
from kvlens.explanation import explanation_page, explanation_view
from kvlens.explanation.citations import (
    ACCOUNTS,
    DocumentSpan,
    by_sentence,
    citations_of,
    documents_of,
    marked,
    marked_runs,
    needs_account,
)
from kvlens.explanation.claims import LOST, NOT_REACHED, OTHER_WORDS, PARTLY, SAME, Verdict, claim_of
from kvlens.explanation.sources import _all_needed, _from_difference, _in_parts, _one_enough, sources_in_words
from kvlens.texts import Response, Word, _words
from kvlens.units import cut, layout_of_tokens

QUESTION = " Which animal does Kaya keep? Kaya keeps a"
STORIES = {
    "one": "Mira keeps a goat. Pavel has a parrot. At night Kaya feeds a donkey.",
    "two together": "Kaya feeds a donkey. Pavel has a parrot. At night Kaya feeds a donkey.",
    "nothing": "Mira keeps a goat. Pavel has a parrot.",
}


@pytest.fixture(scope="module")
def model():
    return kvlens.load("facts-gpt2")


@pytest.fixture(scope="module", params=STORIES)
def found(request, model):
    return kvlens.explain(model, STORIES[request.param], QUESTION, depth="units")


@pytest.mark.parametrize("blank", ["", " "])
def test_characters_are_those_of_the_given_string(model, blank):
    """Its tokenizer writes a blank in front of the first word."""
    story = blank + STORIES["one"]
    found = kvlens.explain(model, story, QUESTION, depth="units")
    assert found.documents == {"prompt": story} and model.to_string(model.to_tokens(story)[0, 1:])[0] == " "
    (row,) = found.citations.itertuples()
    assert story[row.document_start : row.document_stop] == "At night Kaya feeds a donkey."


def test_spans_are_the_very_text_and_each_content_word_has_one_account(found):
    for row in found.citations.itertuples():
        assert found.response[row.response_start : row.response_stop] == row.text
        if row.unit >= 0:
            source = found.documents[row.document][row.document_start : row.document_stop]
            assert source == found.units["unit_text"][row.unit].strip() != ""
    for word in found.words.itertuples():
        inside = (found.citations["response_start"] <= word.start) & (word.stop <= found.citations["response_stop"])
        accounts = set(found.citations.loc[inside & (word.start < word.stop), "account"])
        of_text = Word(word.text, 0, 0, word.text[0].isalnum())
        if needs_account(of_text, found.response, word.start, word.stop):
            assert accounts == {word.account} <= set(ACCOUNTS)
        else:
            assert word.account == ""
    assert re.sub(r" \[[\d+, ]+\]| \[memory\]| \[follows\]| \[\?\]", "", found.marked) == found.response


def test_a_source_is_a_run_that_lost_the_claim(found):
    breaking = found.rows("units", "breaking").query("gap == 'kept'")
    cited = found.citations.query("account in ('source', 'together')")
    assert len(cited) == sum(parts.count("+") + 1 for parts in breaking["parts"])
    for row in cited.itertuples():
        parts = str(row.unit) if row.account == "source" else "+".join(map(str, sorted(cited["unit"])))
        (statement,) = breaking[(breaking["parts"] == parts) & (breaking["claim"] == row.claim)].itertuples()
        assert (statement.verdict, statement.nats, statement.says) == (row.verdict, row.nats, row.says)
    for line in sources_in_words(found):
        assert line.rows or line.mark in ("", "1", "2")
        if "is lost" in line.text:
            runs = found.statements.loc[list(line.rows)]
            is_alone = ~runs["parts"].str.contains("+", regex=False) & ("not without one of them alone" in line.text)
            assert (runs["verdict"].eq("lost") != is_alone).all()


def test_marks_stand_in_text_terminal_json_and_page_linked_both_ways(model, found, capsys):
    print_explanation(found)
    data, html = json.loads(found.to_json()), explanation_page(model, found, []).to_html()
    for text in (str(found), capsys.readouterr().out):
        assert text.startswith(f'Asked: "{QUESTION.strip()}"\n\nThe model answers: "{found.marked}"')
        assert all(str(line) in " ".join(text.split()) for line in sources_in_words(found))
    assert data["marked"] == found.marked and len(data["citations"]) == len(found.citations)
    assert data["by_sentence"][0]["text"] == found.by_sentence["text"][0] and data["documents"] == found.documents
    ids, links = (set(re.findall(f'{where}((?:mark|source)-\\d+)"', html)) for where in ('id="', 'href="#'))
    not_in_a_mark = {f"source-{i}" for i, line in enumerate(sources_in_words(found)) if not line.mark.isalnum()}
    assert links == ids - not_in_a_mark


def says(found):
    """What is said without the cause, the gap kept, as sentences quote it."""
    (run,) = found.rows("units", "breaking").query("gap == 'kept'").itertuples()
    return f'"{run.says}"'


def test_of_two_parts_that_say_the_same_both_are_cited_together(model):
    found = kvlens.explain(model, "Kaya feeds a donkey. At night Kaya feeds a donkey.", QUESTION, depth="units")
    assert found.marked == "donkey [1+2]." and found.cause == (0, 1)
    assert f"With both parts of the prompt removed, 'donkey' falls by {found.claims['nats'][0]:.1f} nats" in str(found)


def test_what_stands_for_two_together_and_for_one(model):
    one, two = (kvlens.explain(model, STORIES[name], QUESTION, depth="units") for name in ("one", "two together"))
    assert one.marked == "donkey [1]." and two.marked == "donkey [1+2]."
    assert [str(line) for line in sources_in_words(two)] == [
        '[1] sentence 1 ("Kaya feeds a donkey.")',
        '[2] sentence 3 ("At night Kaya feeds a donkey.")',
        f"[1+2] Without these together, the model says {says(two)}: 'donkey' is lost, but not without one of them alone.",
    ]
    alone = f"(\"At night Kaya feeds a donkey.\"). Without it, the model says {says(one)}: 'donkey' is lost."
    assert str(sources_in_words(one)[0]).endswith(alone) and says(one) == '"goat."'


def test_two_facts_that_are_both_needed_are_said_to_be_and_kept_alone_together():
    model = kvlens.load("facts-hops-gpt2")
    story = "The pouch is in the chapel. The case is in the harbor. The hammer is in the pouch. The basket is in the case."
    found = kvlens.explain(model, story, " Which room holds the basket? The", answer=" harbor", depth="units")
    assert found.marked == "harbor [1, 2]"
    (line,) = [line for line in sources_in_words(found) if line.mark == "1, 2"]
    assert line.text == "Both are needed: without one of these, 'harbor' is lost."
    runs = found.statements.loc[list(line.rows)]
    assert set(zip(runs["parts"], runs["gap"], runs["verdict"], strict=True)) == {
        (part, gap, "lost") for part in ("1", "3") for gap in ("kept", "closed")
    }
    assert found.rows("units", "only")[["parts", "verdict"]].to_numpy().tolist() == [["1+3", "same words"]]
    assert "With only those parts left, the model answers as before." in str(found)


@pytest.mark.parametrize(
    ("is_whole", "verdicts", "alone", "all_needed", "one_enough"),
    [
        (False, ("lost", "lost"), "other words", "'x' is lost", ", but not without one of them alone"),
        (False, ("lost", "partly"), "lost", "'x' is lost in part", ""),
        (True, ("lost", "lost"), "other words", "another answer is given", ""),
        (True, ("partly", "lost"), "same words", "another answer is given, with some of its words",
         ", but not without one of them alone"),
    ],
)  # fmt: skip
def test_lines_on_several_sources_say_what_the_runs_say(is_whole, verdicts, alone, all_needed, one_enough):
    claims = pd.DataFrame({"claim": 0, "unit": [0, 1], "text": "x", "verdict": verdicts, "says": "A y."})
    rows = [
        ("breaking", "0", "lost"),
        ("breaking", "1", "lost"),
        ("breaking", "0+1", "lost"),
        ("each", "0", alone),
        ("each", "1", alone),
    ]
    statements = pd.DataFrame(rows, columns=["role", "parts", "verdict"]).assign(claim=0, about="units", gap="kept")
    found = SimpleNamespace(is_whole=is_whole, statements=statements, response="A x.")
    assert _all_needed(found, claims) == (f"Both are needed: without one of these, {all_needed}.", (0, 1))
    text, lines = _one_enough(found, claims.assign(verdict=verdicts[0]))
    lost = all_needed if is_whole else "'x' is lost"
    assert text == f'Without these together, the model says "A y.": {lost}{one_enough}.'
    assert lines == ((2, 3, 4) if one_enough else (2,))


@pytest.mark.filterwarnings("ignore:the model's vocabulary lacks")
def test_a_word_that_falls_too_little_for_a_claim_cites_the_sentence_that_loses_it(model, monkeypatch):
    monkeypatch.setattr("kvlens.explanation.claims.DEPENDS", 5.0)
    found = kvlens.explain(model, STORIES["one"], QUESTION, answer=" donkey and feeds a donkey at night.", depth="units")
    assert found.claims["text"].tolist() == ["donkey", "night"] and 0 < found.claims["nats"][1] < 5.0
    assert found.marked == "donkey [1] feeds [follows from 1] a donkey [?] night [1]." and found.claim == "donkey"
    runs = found.statements.query("claim == 1 and role == 'breaking'")
    assert set(zip(runs["parts"], runs["gap"], runs["verdict"], strict=True)) == {
        ("2", gap, "lost") for gap in ("kept", "closed")
    }


@pytest.mark.filterwarnings("ignore:the model's vocabulary lacks")
def test_every_link_of_a_mark_has_a_text(model, monkeypatch):
    """Also where a line of the list has no mark, as that on words of the question."""
    monkeypatch.setattr("kvlens.explanation.claims.DEPENDS", 5.0)
    answer = " donkey and feeds a donkey at night, Kaya."
    found = kvlens.explain(model, STORIES["one"], QUESTION, answer=answer, depth="units")
    assert "" in [line.mark for line in sources_in_words(found)]
    drawn = explanation_view(found).body
    assert '>[follows from <a href="#source-0">1</a>]</sup>' in drawn and "></a>" not in drawn


@pytest.mark.filterwarnings("ignore:the model's vocabulary lacks")
def test_a_documents_name_that_has_a_word_of_the_answer_is_a_source():
    """It is removed, cited with its place in the prompt, and no longer said to be always there; other names are."""
    model = kvlens.load("facts-gpt2")
    model.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    texts = {STORIES["one"][-29:]: STORIES["nothing"], "Kaya keeps what": "Pavel has a hen."}
    found = kvlens.explain(model, kvlens.Chat.ask(QUESTION.strip(), texts), answer=" donkey", depth="units")
    assert found.units["name"].tolist()[0] == "the name of document 1" and len(found.units) == 4
    assert found.units["start"].is_monotonic_increasing and found.cause == (0,)
    (row,) = found.citations.itertuples()
    assert (row.unit, row.account, row.verdict) == (0, "source", LOST)
    assert found.documents[row.document][row.document_start : row.document_stop] == "At night Kaya feeds a donkey.:"
    assert found.always_there[1:] == ("the other document's name", "what the chat template writes")
    assert '[1] the name of document 1 ("At night Kaya feeds a donkey.' in str(found)
    other = kvlens.explain(model, kvlens.Chat.ask(QUESTION.strip(), texts), answer=" hen", depth="units")
    assert len(other.units) == 3 and other.always_there[1] == "the documents' names"


def test_a_word_of_what_is_never_removed_is_not_said_to_be_of_the_question():
    """Of the question are its own words, in any case, and a Chinese one that several characters of it make up."""
    rows = [("Moss", 0, 4), ("Trees", 8, 13), ("会议", 14, 16)]
    table = pd.DataFrame(rows, columns=["text", "response_start", "response_stop"]).assign(
        account="question", unit=-1, source=0, claim=-1, verdict=""
    )
    question = SimpleNamespace(question="What hangs from trees? 会议在哪里？", response="Moss on Trees 会议", citations=table)
    question.rows = lambda *names: table[:0]
    assert [line.text for line in sources_in_words(question)] == [
        "Words of the question have no mark: 'Trees 会议'.",
        "Words of what else is never removed have no mark: 'Moss'.",
    ]


def test_of_a_long_text_the_difference_is_quoted():
    same = "The island is small, and a ferry sails there. " * 3
    text = _from_difference(f"{same}A lighthouse stands there.", f"{same}A beach lies there.")
    assert text == "… small, and a ferry sails there. A beach lies there."
    assert _from_difference("A lighthouse.", "A beach.") == "A beach."


@pytest.mark.parametrize(
    ("parts", "words", "said"),
    [
        (["The Louvre is in Paris."], ["Louvre", "Paris"], " The parts have these words as well."),
        (["It is in PARIS."], ["Paris"], " A part has this word as well."),
        (["It is in", "Paris's heart."], ["Louvre", "Paris"], " Of these words the parts have 'Paris'."),
        (["It costs 3 euros."], ["cost"], " No part has this word."),
        (["It costs 3 euros."], ["Louvre", "Paris"], " No part has these words."),
        (["会议在成都举行。"], ["成都"], " A part has this word as well."),
        (["It is open."], ["No"], ""),
    ],
)
def test_whether_words_from_memory_stand_in_the_prompt_is_said(parts, words, said):
    response = " ".join(words)
    starts = [response.index(word) for word in words]
    stops = [start + len(word) for start, word in zip(starts, words, strict=True)]
    table = pd.DataFrame({"text": words, "response_start": starts, "response_stop": stops})
    found = SimpleNamespace(units=pd.DataFrame({"unit_text": parts}), citations=table, response=response)
    assert _in_parts(found, table["text"] != "") == said


# --- by hand ------------------------------------------------------------------------------------------------------------------

TOKENS = ["Tom", ":", " Buy", " milk", " in", " Rome", ",", " Italy", ".", " Rome", " sells", " Paris", " no", " office", "."]
CLAIMS = {"Tom": (0, 1), "Buy milk": (2, 4), "Rome": (5, 6)}
WITHOUT = {"italy": NOT_REACHED, "rome": NOT_REACHED, "sells": OTHER_WORDS, "paris": LOST, "office": SAME}


def by_hand(lost, says="Italy sells."):
    """An explanation of a made-up response, whose claims are lost without these units."""
    response = Response(torch.arange(len(TOKENS)), tuple(_words(TOKENS)), "".join(TOKENS))
    question = frozenset({"office"})
    breaking = {"about": "units", "role": "breaking", "gap": "kept", "says": says}
    rows = [
        SimpleNamespace(claim=number, parts=parts, verdict=verdict, nats=nats, **breaking)
        for number, parts, verdict, nats in lost
    ]
    return SimpleNamespace(
        response=response,
        question=question,
        claims=[claim_of(response, start, stop, 5.0, question) for start, stop in CLAIMS.values()],
        rows=rows,
        nothing=None,
        untold=None,
        of=lambda claim, now: Verdict(WITHOUT.get(claim.words[0], LOST), 0.5),
        read=SimpleNamespace(unit_places=[DocumentSpan("a.txt", 10 * i, 10 * i + 5) for i in range(4)]),
    )


def test_a_word_that_units_have_is_from_memory_if_it_is_said_without_them_and_without_a_source():
    lost = [(0, "3", LOST, 4.0), (2, "0+2", LOST, 6.0)]
    found = by_hand(lost)
    found.untold = "untold"
    found.of = lambda claim, now: Verdict(SAME if now == "untold" else WITHOUT.get(claim.words[0], LOST), 0.5)
    accounts = {}
    for told in ("paris", "italy", "sells"):
        found.is_told = lambda word, told=told: told in word.words
        accounts[told] = citations_of(found).set_index("text")["account"].to_dict()
    assert [accounts[told]["Paris"] for told in accounts] == ["memory", "unfound", "unfound"]
    assert [accounts[told]["Italy"] for told in accounts] == ["follows", "memory", "follows"]
    assert all(of["sells"] == "memory" and of["Tom"] == "source" for of in accounts.values())


def test_accounts_by_hand():
    table = citations_of(by_hand([(0, "3", LOST, 4.0), (1, "2", PARTLY, 3.0), (1, "3", LOST, 2.5), (2, "0+2", LOST, 6.0)]))
    assert list(table[["text", "account", "source", "unit", "verdict"]].itertuples(index=False, name=None)) == [
        ("Tom", "source", 1, 3, LOST),
        ("Buy milk", "source", 2, 2, PARTLY),
        ("Buy milk", "source", 1, 3, LOST),
        ("Rome", "together", 3, 0, LOST),
        ("Rome", "together", 2, 2, LOST),
        ("Italy", "follows", 0, -1, NOT_REACHED),
        ("Rome", "repeated", 3, 0, LOST),  # not from memory: the answer itself has it already
        ("Rome", "repeated", 2, 2, LOST),
        ("sells", "memory", 0, -1, OTHER_WORDS),
        ("Paris", "unfound", 0, -1, LOST),
        ("office", "question", 0, -1, SAME),
    ]
    assert table["document_start"].tolist() == [30, 20, 30, 0, 20, -1, 0, 20, -1, -1, -1]
    text = "".join(TOKENS)
    assert marked(text, table) == (
        "Tom [1]: Buy milk [1, 2] in Rome [2+3], Italy [follows]. Rome [2+3] sells [memory] Paris [?] no office."
    )
    assert [text[run.start : run.stop] for run in marked_runs(text, table)][1] == "Buy milk"


def test_a_word_that_is_not_said_without_a_source_before_it_follows_from_that():
    """Italy from Rome, which unit 0 states; not where Italy is said without that unit, too."""
    lost = [(0, "3", LOST, 4.0), (1, "1", LOST, 4.0), (2, "0", LOST, 6.0), (2, "1", LOST, 3.0)]
    table = citations_of(by_hand(lost, says="in Oslo, Italyland."))
    assert table.loc[table["account"] == "follows", ["text", "unit"]].to_numpy().tolist() == [
        ["Italy", 3], ["Italy", 1], ["Italy", 0],
    ]  # fmt: skip
    assert "Rome [2, 3], Italy [follows from 1, 2, 3]. Rome [2, 3] sells [memory]" in marked("".join(TOKENS), table)
    assert "Italy [follows]." in marked("".join(TOKENS), citations_of(by_hand(lost)))


@pytest.mark.parametrize("verdict", [NOT_REACHED, OTHER_WORDS, SAME, LOST])
def test_a_word_that_a_claim_with_sources_has_is_cited_as_that(verdict, monkeypatch):
    """Also where it happens to be said without any part: ``12 [1] ... 30 + 12 [1]`` about two prices, and "12 dollars"."""
    monkeypatch.setitem(WITHOUT, "rome", verdict)
    table = citations_of(by_hand([(2, "0", LOST, 6.0)]))
    account = "unfound" if verdict == LOST else "repeated"
    assert table.loc[table["text"] == "Rome", "account"].tolist() == ["source", account]


def test_a_claim_that_nothing_loses_is_accounted_word_by_word():
    table = citations_of(by_hand([]))
    assert (table["unit"] == -1).all() and table.loc[table["text"] == "milk", "account"].tolist() == ["unfound"]
    assert table.loc[table["text"] == "Rome", "account"].tolist() == ["follows", "follows"]  # nothing before it has a source


def test_sentences_of_the_response_say_what_they_rest_on():
    text = "".join(TOKENS)
    table = citations_of(by_hand([(0, "3", LOST, 4.0), (2, "0", LOST, 6.0)]))
    words = table.rename(columns={"response_start": "start", "response_stop": "stop"})
    found = by_sentence(text, words, table)
    assert found["text"].tolist() == ["Tom: Buy milk in Rome, Italy.", "Rome sells Paris no office."]
    spans = zip(found["response_start"], found["response_stop"], strict=True)
    assert found["sources"].tolist() == ["1,2", "2"] and [text[a:b] for a, b in spans] == found["text"].tolist()
    assert found[list(ACCOUNTS)].to_numpy().tolist() == [[2, 0, 0, 1, 0, 0, 2], [0, 0, 1, 0, 1, 1, 1]]


def test_numbers_of_lines_have_no_account_and_a_no_in_front_has():
    text = "1. No, 3 apples\n2) milk"
    places = {word: text.index(word) for word in ("1", "No", "3", "2", "milk")}
    words = {word: Word(word, 0, 0, True) for word in places}
    needed = [word for word, at in places.items() if needs_account(words[word], text, at, at + len(word))]
    assert needed == ["3", "milk"] and needs_account(words["No"], "No, 3", 0, 2)
    for text, number in (("12. They are", "12"), ("1.", "1"), ("1. Red\n1987. Blue", "1987")):  # answers, and no lists
        at = text.index(number)
        assert needs_account(Word(number, 0, 0, True), text, at, at + len(number))


def test_a_message_of_two_pieces_is_one_document(model):
    text = "Mira keeps a goat. Which animal does Kaya keep? Pavel has a parrot."
    layout = layout_of_tokens(model, model.to_tokens(text)[0])
    start, stop = layout.text.index("Which"), layout.text.index("Pavel")
    piece = layout.pieces[0]
    layout = replace(
        layout,
        pieces=[piece._replace(name="user", stop=start), piece._replace(name="user", start=stop)],
        asked=[piece._replace(name="question", start=start, stop=stop)],
    )
    units = cut(model, layout, "sentence")
    documents, places = documents_of(layout, units)
    assert set(documents) == {"user", "question"} and {place.document for place in places} == {"user"}
    assert [documents["user"][a:b] for _, a, b in places] == [unit.text.strip() for unit in units]
    ranges = cut(model, layout, [(1, 6), (6, 12)])
    documents, places = documents_of(layout, ranges)
    assert [documents[name][a:b] for name, a, b in places] == [unit.text.strip() for unit in ranges]


def test_the_view_shows_each_words_account(found):
    html = unescape(explanation_view(found).body)
    assert f'Asked: "{QUESTION.strip()}"' in html and "Asked:" not in explanation_view(found, with_question=False).body
    for word in found.words[found.words["account"] != ""].itertuples():
        assert re.search(rf'data-account="{word.account}"[^>]*>{re.escape(word.text)}<', html)

"""A prompt is cut where a reader would cut it, and tokens belong to the part that has most of their characters."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from chat_templates import CHATML, chat_tokenizer, reader
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_text_model import linear

from kvlens import Chat, KVLensError
from kvlens.arguments import UNITS
from kvlens.chat import prompt_tokens, prompt_units
from kvlens.units import CUTS, Layout, Passage, cut, layout_of_tokens, spans_of, tiled

WRAPPED = "The gadget, which nobody had seen for several years,\nwas found in Rotterdam.\nBut not by Ann."
CODE = """\
RATE = 7  # per cent:

def total(
    price,
):
    # of one
    return price * (
        1 + RATE
    )
"""
CASES = [
    ("sentence", "Dr. Lee paid 3.5 euros. Then e.g. Ann left! Why? No.",
     ["Dr. Lee paid 3.5 euros.", "Then e.g. Ann left!", "Why?", "No."]),
    ("sentence", '"Why?" asked Ann. "No." He sat.', ['"Why?" asked Ann.', '"No."', "He sat."]),
    ("sentence", "In the U.S. Army J. R. Smith rose. In the U.S. He fell.",
     ["In the U.S. Army J. R. Smith rose.", "In the U.S.", "He fell."]),
    ("sentence", "Tea, milk etc. were had. Tea etc. Then No. 5 came at 3 p.m. Ann left.",
     ["Tea, milk etc. were had.", "Tea etc.", "Then No. 5 came at 3 p.m.", "Ann left."]),
    ("sentence", "Wait... what? It is... Well.", ["Wait... what?", "It is...", "Well."]),
    ("sentence", "1. Tea\n2. Milk. Cold.\n\n---\n- end", ["1. Tea", "2. Milk.", "Cold.\n\n---", "- end"]),
    ("sentence", "no capitals here. none. ok", ["no capitals here.", "none.", "ok"]),
    ("sentence", "他走了。她来了！好", ["他走了。", "她来了！", "好"]),
    ("sentence", WRAPPED, ["The gadget, which nobody had seen for several years,\nwas found in Rotterdam.", "But not by Ann."]),
    ("paragraph", "One.\nTwo.\n\n \nThree.\n", ["One.\nTwo.", "Three."]),
    ("paragraph", "\nOne.\nTwo.\n", ["One.", "Two."]),
    ("line", "\n\nOne.\n\n  Two.\n", ["One.", "Two."]),
    ("word", " two  words\n-- 3.5", ["two", "words", "--", "3.5"]),
    ("code", CODE,
     ["RATE = 7  # per cent:", "def total(\n    price,\n):", "# of one\n    return price * (\n        1 + RATE\n    )"]),
    ("code", "if (a) {\n  b();\n}\nx = y \\\n+ z\nq\n  .r()\n", ["if (a) {", "b();\n}", "x = y \\\n+ z", "q\n  .r()"]),
]  # fmt: skip


@pytest.mark.parametrize(("by", "text", "parts"), CASES)
def test_a_reader_would_cut_here(by, text, parts):
    assert [text[start:stop].strip() for start, stop in spans_of(text, by)] == parts


@given(st.text(alphabet="Aab.!? \n\t\"'-1{}():。"), st.sampled_from([*CUTS]))
@settings(deadline=None)
def test_parts_are_the_whole_text_and_none_is_blank(text, by):
    parts = spans_of(text, by)
    assert (not parts and not any(map(str.isalnum, text))) or "".join(text[a:b] for a, b in parts) == text
    assert all(text[start:stop].strip() for start, stop in parts)


@given(st.text(alphabet="Aab.! \nü你。"), st.sampled_from(UNITS))
@settings(deadline=None, max_examples=40)
def test_units_of_a_string_are_all_its_tokens_but_bos(text, by):
    """Every token of a prompt is in one unit: in order, without gaps."""
    model = linear()
    tokens = model.to_tokens(text)[0]
    try:
        units = prompt_units(model, tokens, by)
    except KVLensError:
        assert not any(map(str.isalnum, text))
        return
    edges = [(unit.start, unit.stop) for unit in units]
    assert edges[0][0] == 1 and edges[-1][1] == len(tokens)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))


def test_a_token_that_straddles_belongs_to_where_most_of_it_is():
    """By hand. 'c. De' has two letters of the first sentence and two of the second: the first gets it. 'f.\\n\\nGhi' has more
    of the third, so that the second has no token, and is no unit. ' ' is nothing but white space, and stands behind the third.
    """
    pieces = ["ab", "c. De", "f.\n\nGhi", ".", " ", "J", "."]
    edges = [0, *itertools.accumulate(map(len, pieces))]
    text = "".join(pieces)
    layout = Layout(text, torch.arange(7), list(itertools.pairwise(edges)), [Passage("", 0, len(text))], [])
    named = [(unit.name, unit.start, unit.stop) for unit in cut(linear(), layout, "sentence")]
    assert named == [("sentence 1", 0, 2), ("sentence 2", 2, 5), ("sentence 3", 5, 7)]


def test_blanks_that_a_tokenizer_trims_belong_to_the_token_behind_them():
    assert tiled([(0, 3), (4, 7), (9, 9), (10, 12)]) == [(0, 3), (3, 7), (7, 9), (9, 12)]


def test_names_and_positions_are_those_of_the_whole_prompt():
    model = linear()
    units = prompt_units(model, "The widget is purple. Return it.")
    assert [unit.name for unit in units] == ["sentence 1", "sentence 2"]
    tokens = prompt_tokens(model, "The widget is purple. Return it.")
    assert [model.tokenizer.decode(tokens[unit.start : unit.stop]) for unit in units] == [unit.text for unit in units]
    assert [unit.name for unit in prompt_units(model, "The widget.", "message")] == ["prompt"]
    assert [unit.name for unit in prompt_units(model, tokens, [(1, 3), (5, 6)])] == ["tokens 1 to 2", "tokens 5 to 5"]
    assert prompt_units(model, tokens) == units


def test_given_strings():
    model = linear()
    text = "The widget is purple. Return the gadget to the widget."
    units = prompt_units(model, text, ["Return the gadget", "purple"])
    assert [unit.text.strip() for unit in units] == ["purple", "Return the gadget"]
    assert [unit.name for unit in units] == ["purple", "Return the gadget"]
    for strings, says in {
        ("the gadgets",): "'the gadgets' does not occur in the prompt; the nearest is 'the gadget'",
        ("widget",): "'widget' occurs 2 times",
        ("the gadget", "gadget to"): "'the gadget' and 'gadget to' overlap",
        ("",): "does not occur",
    }.items():
        with pytest.raises(KVLensError, match=says):
            prompt_units(model, text, list(strings))


def test_refusals():
    model = linear()
    with pytest.raises(KVLensError, match="expected message, document.* got 'sentense'; did you mean 'sentence'"):
        prompt_units(model, "The widget.", "sentense")
    with pytest.raises(KVLensError, match="nothing but BOS"):
        prompt_units(model, prompt_tokens(model, "The")[:1])
    with pytest.raises(KVLensError, match="holds BOS"):
        prompt_units(model, "The widget.", [(0, 2)])
    with pytest.raises(KVLensError, match="no tokenizer, so that its prompts have no strings"):
        cut(SimpleNamespace(tokenizer=None), layout_of_tokens(SimpleNamespace(tokenizer=None), torch.arange(3)), ["a"])


def test_code_in_a_document():
    model = reader(CHATML)
    chat = Chat.ask("What is the total?", documents={"total.py": "\n" + CODE})
    units = chat.units(model, "code")
    assert [unit.name for unit in units] == [f"total.py, statement {i}" for i in (1, 2, 3)]
    assert units[1].text.strip() == "def total(\n    price,\n):"
    assert chat_tokenizer(CHATML).chat_template == CHATML

"""Tokens as text: a character is shown at the token that completes it, for any tokenizer.

A prompt is cut where a reader would cut it, and tokens belong to the part that has most of their characters.
"""

import copy
import itertools
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from chat_templates import CHATML, chat_tokenizer, reader
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_hf import tiny_tokenizer
from tiny_text_model import PROMPT, linear, softmax, tiny_text_model
from tokenizers import Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvlens import Chat, HookedKVTransformer, KVLensError, analyses, convert_prompt
from kvlens.analyses import next_token_texts, prompt_attribution, prompt_by_depth, prompt_effect, token_texts
from kvlens.arguments import UNITS
from kvlens.chat import prompt_tokens, prompt_units
from kvlens.cli import main
from kvlens.pretrained.llama2c import read_llama2c_tokenizer
from kvlens.texts import UNREADABLE, joined
from kvlens.tokenizer import warn_of_unknown_words
from kvlens.units import CUTS, Layout, Passage, cut, layout_of_tokens, spans_of, tiled

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own

TEXTS = {
    "Latin": "Viele Grüße, ça va",
    "Chinese": "你好，世界。",
    "Arabic": "مرحبا بالعالم",
    "Hindi": "नमस्ते",
    "combined emoji": "a 😀 👨\u200d👩\u200d👧 👍🏽 🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f!",
    "accent of its own": "cafe\u0301 e\u0301",
}

BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""GPT-2's alphabet, as transformers has it."""


def reading_by(tokenizer):
    """A stand-in for a model, with only a tokenizer."""
    model = copy.copy(tiny_text_model())
    model.tokenizer = tokenizer
    return model


@pytest.fixture(scope="module", params=["kvlens' own", "GPT-2", "llama2.c"])
def model(request):
    if request.param == "kvlens' own":
        return tiny_text_model()
    data = request.getfixturevalue("outside_data")
    if request.param == "llama2.c":
        return reading_by(read_llama2c_tokenizer(data / "tok512.bin", 512))
    gpt2 = transformers.GPT2TokenizerFast(vocab=str(data / "gpt2-vocab.json"), merges=str(data / "gpt2-merges.txt"))
    return reading_by(gpt2)


def ids_of(model, text: str) -> torch.Tensor:
    return torch.tensor(model.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts_are_whole_characters_and_make_up_the_text(model, text):
    ids = ids_of(model, text)
    texts = token_texts(model, ids)
    assert joined(texts).removeprefix(" " if text[0] != " " else "") == text  # SentencePiece puts a blank in front
    assert not [shown for shown in texts if UNREADABLE in shown or shown == ""]
    parts = [_bytes(model, token) for token in ids.tolist()]
    for n in range(1, len(ids)):  # a character stands where the text so far has it, and not later
        so_far = re.sub("(<0x..>)+$", "", joined(texts[:n])).removeprefix(" " if text[0] != " " else "")
        assert text.startswith(so_far)
        raw = b"".join(parts[:n]).removeprefix(b" " if text[0] != " " else b"")
        assert so_far == raw.decode(errors="ignore")


def _bytes(model, token: int) -> bytes:
    """Of a token of these three vocabularies, in the slow and obvious way."""
    name = model.tokenizer.convert_ids_to_tokens(token)
    if found := re.fullmatch("<0x(..)>", name):
        return bytes.fromhex(found[1])
    if isinstance(model.tokenizer.backend_tokenizer.decoder, decoders.ByteLevel):
        return bytes(BYTES[letter] for letter in name)
    return name.encode()


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_guess_that_is_right_has_the_text_of_the_token_that_follows(model, text):
    ids = ids_of(model, text)
    guesses = torch.stack([ids[1:], ids[:-1]], dim=1)
    assert [right for right, _ in next_token_texts(model, ids[:-1], guesses)] == token_texts(model, ids)[1:]


def test_bytes_by_hand():
    model, byte = tiny_text_model(), {}
    for letter, value in BYTES.items():
        byte[value] = model.tokenizer.convert_tokens_to_ids(letter)

    def shown(raw: bytes) -> list[str]:
        return token_texts(model, torch.tensor([byte[value] for value in raw]))

    assert shown(b"\xc3\x9f\xe4\xbd\xa0") == ["<0xC3>", "ß", "<0xE4>", "<0xBD>", "你"]
    assert shown(b"\xe4\xbd") == ["<0xE4>", "<0xBD>"]  # the text ends within a character
    assert shown(b"\xe4\xbda\x9f") == ["<0xE4>", "<0xBD>", "a", "<0x9F>"]  # never completed, and completing nothing
    assert shown(b"\xc3\xc3\x9f") == ["<0xC3>", "<0xC3>", "ß"]
    assert joined(shown(b"a\xc3\xc3\x9f\xe4\xbd")) == "a<0xC3>ß<0xE4><0xBD>"  # what completes nothing stays


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.integers(0, 20))
def test_any_text_is_decoded_exactly(text, n):
    model = tiny_text_model()
    ids = ids_of(model, text)
    assert joined(token_texts(model, ids)) == text
    raw = re.sub(b"<0x(..)>", lambda byte: bytes.fromhex(byte[1].decode()), joined(token_texts(model, ids[:n])).encode())
    assert raw.decode(errors="replace") == model.tokenizer.decode(ids[:n])


def test_pieces_of_sentence_piece_keep_their_blanks():
    """Its tokenizers drop the leading blank of a token decoded alone."""
    raw = Tokenizer(models.WordLevel({"\u2581the": 0, "\u2581": 1, "cat": 2, "\u2581\u2581s": 3}, unk_token="\u2581"))
    raw.decoder = decoders.Metaspace()
    model, tokens = reading_by(transformers.PreTrainedTokenizerFast(tokenizer_object=raw)), torch.tensor([0, 1, 2, 3, 0])
    assert model.tokenizer.decode([0]) == "the"
    assert token_texts(model, tokens) == [" the", " ", "cat", "  s", " the"]
    assert joined(token_texts(model, tokens)).lstrip() == model.tokenizer.decode(tokens).lstrip()


def test_without_a_tokenizer_tokens_are_numbers():
    model = reading_by(None)
    assert token_texts(model, torch.tensor([3, 1])) == ["3", "1"]
    assert next_token_texts(model, torch.tensor([3, 1]), torch.tensor([[4], [5]])) == [["4"], ["5"]]


def test_a_long_prompt_asks_the_tokenizer_once_for_each_token_that_it_has():
    model, asked = tiny_text_model(), []

    class Counting:
        def decode(self, ids):
            asked.append(ids)
            return model.tokenizer.decode(ids)

        def convert_ids_to_tokens(self, token):
            return model.tokenizer.convert_ids_to_tokens(token)

    ids = ids_of(model, "你好 ").repeat(65_536 // 7)
    assert joined(token_texts(reading_by(Counting()), ids)) == "你好 " * (65_536 // 7)
    assert len(asked) == len(ids.unique()) and all(len(one) == 1 for one in asked)


def test_tables_hold_whole_characters():
    model, text = tiny_text_model(), " Grüße 你好"
    effect = prompt_effect(model, PROMPT, text)
    first = effect[effect["condition"] == "with_prompt"]
    assert joined(first["token"]) == text
    assert [unit.text for unit in prompt_units(model, model.to_tokens(text)[0], "sentence")] == [text]
    agrees = first["predicted_token"] == first["next_token"]
    ids = model.to_tokens(text, prepend_bos=False)[0]
    whole = torch.cat([model.to_tokens(PROMPT)[0], ids])
    assert agrees.tolist()[:-1] == (model(whole[None])[0, -len(ids) : -1].argmax(dim=-1) == ids[1:]).tolist()
    by_depth = prompt_by_depth(model, PROMPT, text)
    last = by_depth[by_depth["layer"] == model.cfg.n_layers]
    assert last["guess_with"].tolist() == first["predicted_token"].tolist()
    assert not by_depth[["token", "guess_with", "guess_without"]].map(lambda shown: UNREADABLE in shown).any(axis=None)


HALF = "a\ud800b"
READERS = {
    "convert_prompt": lambda text: convert_prompt(linear(), text),
    "a list": lambda text: convert_prompt(linear(), ["a", text]),
    "reference": lambda text: convert_prompt(softmax(), PROMPT, method="landmark", n_features=1, reference=text),
    "forward": lambda text: linear()(text),
    "generate": lambda text: linear().generate(text, max_new_tokens=1, verbose=False),
    "to_tokens": lambda text: linear().to_tokens(text),
    "to_str_tokens": lambda text: linear().to_str_tokens(text),
    "prompt": lambda text: analyses.bias_by_head(linear(), text, "a"),
    "text": lambda text: analyses.bias_by_head(linear(), "a", text),
    "answer": lambda text: analyses.bias_decomposition(linear(), "a", "b", answer=text),
}
NO_TEXTS = (b"bytes", Path("a"), None, {}, ("a", "b"), 3, np.array(["a", "b"]))


@pytest.mark.parametrize("reader", READERS)
def test_half_a_character_is_refused_where_text_becomes_tokens(reader):
    with pytest.raises(KVLensError, match=r"character 1 is '\\ud800', half of a character"):
        READERS[reader](HALF)


@pytest.mark.parametrize("reader", ["convert_prompt", "forward", "generate", "to_tokens", "prompt", "text"])
def test_a_value_that_is_not_text_is_refused(reader):
    for value in NO_TEXTS:
        with pytest.raises(KVLensError):
            READERS[reader](value)


def test_odd_characters_are_text():
    """NUL, control characters, numpy strings and a very long one are passed to the tokenizer unchanged."""
    for text in ("a\0b", "\x1b[31m\u202e", np.str_("a b"), "\U0001f600", "ab " * 100_000):
        tokens = linear().to_tokens(text)
        assert tokens.shape[1] > 0 and tokens.dtype == torch.long


@pytest.fixture(scope="module")
def facts():
    return HookedKVTransformer.from_zoo("facts-linear")


def test_the_words_are_named(facts):
    with pytest.warns(UserWarning, match=r"lacks 'Xerxes', 'gorilla': it reads <\|unk\|>"):
        tokens = facts.to_tokens(["Mira keeps a gorilla.", "Xerxes keeps a goat.", "Xerxes keeps a gorilla."][::-1])
    assert (tokens == facts.tokenizer.unk_token_id).sum() == 4
    with pytest.warns(UserWarning, match=r"'w0', 'w1', 'w2', 'w3', 'w4' and 3 more"):
        facts.to_tokens(" ".join(f"w{i}" for i in range(8)))


def test_every_way_to_give_a_text_warns(facts, capsys, monkeypatch):
    story, question = "Mira keeps a gorilla. Pavel has a parrot.", " Which animal does Pavel keep? Pavel keeps a"
    for read in (
        lambda: convert_prompt(facts, story),
        lambda: prompt_attribution(facts, story, question),
        lambda: prompt_attribution(facts, story.replace("gorilla", "goat"), question.replace("Pavel", "Xerxes")),
    ):
        with pytest.warns(UserWarning, match="the model's vocabulary lacks '(gorilla|Xerxes)'"):
            read()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["explain", "--model", "facts-linear", "--prompt", story, "--text", question]) == 0
    assert "the model's vocabulary lacks 'gorilla'" in capsys.readouterr().err  # one line, once


def test_known_words_and_the_token_itself_do_not_warn(facts):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        facts.to_tokens("Mira keeps a goat. Where is Pavel?")
        facts.to_tokens("<|unk|>")
        HookedKVTransformer.from_zoo("docs-gpt2").to_tokens("Ü 漢 gorilla \U0001f98d")
        tokenizer = tiny_tokenizer()
        tokenizer.unk_token = tokenizer.eos_token = tokenizer.bos_token  # as GPT-2's: written, it is no unknown word
        texts = [f"The widget {tokenizer.eos_token}"]
        warn_of_unknown_words(tokenizer, texts, tokenizer(texts, return_tensors="pt")["input_ids"])


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
    ("sentence", "Am 3. Mai zog das Amt um. Es liegt in der Hauptstr. 5. Die Miete ist z. B. niedrig.",
     ["Am 3. Mai zog das Amt um.", "Es liegt in der Hauptstr. 5.", "Die Miete ist z. B. niedrig."]),
    ("sentence", "La Av. Colón está cerrada. La Dra. Ruiz llegó a EE. UU. el 3 de mayo. ¿Dónde está? ¡Aquí!",
     ["La Av. Colón está cerrada.", "La Dra. Ruiz llegó a EE. UU. el 3 de mayo.", "¿Dónde está?", "¡Aquí!"]),
    ("sentence", "办公室搬到鹿特丹，租金是3.5元。他说：“我走了。”你知道吗？好！",
     ["办公室搬到鹿特丹，租金是3.5元。", "他说：“我走了。”", "你知道吗？", "好！"]),
    ("sentence", "He has 3. She has 4. The office moved on May 3. Rotterdam is cheap.",
     ["He has 3.", "She has 4.", "The office moved on May 3.", "Rotterdam is cheap."]),
    ("sentence", WRAPPED, ["The gadget, which nobody had seen for several years,\nwas found in Rotterdam.", "But not by Ann."]),
    ("sentence", '{"a": {"b": "x", "c d": [1, 2]}, "e": 5}', ['{"a": {', '"b": "x",', '"c d": [1, 2]},', '"e": 5}']),
    ("sentence", 'See:\n[\n {\n  "a": 1,\n  "b": "\\"c\\": 2"\n },\n {\n  "a": 3\n }\n]\nEnd.',
     ["See:", '[\n {\n  "a": 1,', '"b": "\\"c\\": 2"\n },', '{\n  "a": 3\n }\n]', "End."]),
    ("sentence", '{"a": [\n "Tea. Milk.",\n "b"\n]}\n[1] Ann {x', ['{"a": [\n "Tea. Milk.",', '"b"\n]}', "[1] Ann {x"]),
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
    with pytest.raises(KVLensError, match="nothing but BOS"):
        prompt_units(model, prompt_tokens(model, "The")[:1])
    with pytest.raises(KVLensError, match="holds BOS"):
        prompt_units(model, "The widget.", [(0, 2)])
    with pytest.raises(KVLensError, match="no tokenizer"):
        cut(SimpleNamespace(tokenizer=None), layout_of_tokens(SimpleNamespace(tokenizer=None), torch.arange(3)), ["a"])


def test_code_in_a_document():
    model = reader(CHATML)
    chat = Chat.ask("What is the total?", documents={"total.py": "\n" + CODE})
    units = chat.units(model, "code")
    assert [unit.name for unit in units] == [f"total.py, statement {i}" for i in (1, 2, 3)]
    assert units[1].text.strip() == "def total(\n    price,\n):"
    assert chat_tokenizer(CHATML).chat_template == CHATML

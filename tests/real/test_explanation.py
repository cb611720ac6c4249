"""An explanation of a real model's answer, whose statements a second program repeats with plain Transformers.

The chat that it reads is what Transformers writes, token by token, with BOS once. The examples of docs/explanations.md and the
README's first command name the causes that these pages name.
"""

import contextlib
import io
import itertools
import random
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from plain_transformers import Plain, again, citations_again, is_untold

import kvlens
from kvlens import Chat, explain
from kvlens.chat import prompt_tokens, prompt_units
from kvlens.cli import main
from kvlens.explanation import paragraphs
from kvlens.explanation.runs import ENDS, MORE_TOKENS, stop_tokens
from kvlens.explanation.sources import sources_in_words
from kvlens.units import always_there

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


class Told(NamedTuple):
    found: Any
    printed: str
    chat: Chat


@pytest.fixture(scope="module", params=["ranges", pytest.param("positions", marks=pytest.mark.slow)])
def told(request, smollm2, tmp_path_factory):
    """The README's command, and how far it goes, on the model that the other tests have loaded."""
    (commands,) = (found for found in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL) if "--download" in found)
    write, explain = commands.splitlines()
    _, *words = shlex.split(explain)
    explained = []

    def kept(model, chat, *args, **options):
        explained.append((kvlens.explanation.explain(model, chat, *args, **options), chat))
        return explained[-1][0]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(tmp_path_factory.mktemp("readme"))
        patch.setattr(kvlens, "load", lambda name, **options: smollm2)
        patch.setattr(kvlens, "explain", kept)
        subprocess.run(["bash", "-c", write], check=True)
        assert main([*words, "--depth", request.param]) == 0
    ((found, chat),) = explained
    return Told(found, printed.getvalue(), chat)


@pytest.fixture(scope="module")
def found(told):
    return told.found


def test_the_command_of_the_readme_names_the_cause_that_it_names(told):
    (cause,) = named(block("text", README))
    assert cause == 'minutes.txt, sentence 2 ("The new office will be in Rotterdam.")'
    assert named(told.printed) == [cause]


def test_the_stating_sentence_is_the_cause_of_the_city(found):
    assert "Rotterdam" in found.response
    assert "Rotterdam" in found.claim and found.units["name"][found.cause[0]] == "minutes.txt, sentence 2"
    assert found.n_layers == 30 and (found.positions.empty or len(found.rows("positions", "each")) >= 4)


@pytest.fixture(scope="module")
def plain(plain_smollm2):
    before = plain_smollm2.config._attn_implementation
    plain_smollm2.set_attn_implementation("written_out")
    yield Plain(plain_smollm2)
    plain_smollm2.set_attn_implementation(before)


def ending(model, found):
    """Whether a text that is said instead ends."""
    stops = stop_tokens(model)

    def ends(text):
        enough = len(text) >= len(found.response_tokens) + MORE_TOKENS
        return text[-1] in stops or (enough and model.tokenizer.decode(text[-1:]).endswith(ENDS))

    return ends


def test_statements_are_true_in_plain_transformers(smollm2, plain, found, told):
    """Some of each kind: with an answer in their words, any others, and about positions."""
    prompt, ends = told.chat.tokens(smollm2), ending(smollm2, found)
    units = list(found.units[["start", "stop"]].itertuples(index=False, name=None))
    groups = {name: table["position"].tolist() for name, table in found.positions.groupby("group")}
    printed = {row for sentence in itertools.chain(*paragraphs(found), sources_in_words(found)) for row in sentence.rows}
    texts = [row for row in printed if isinstance(found.statements.loc[row, "says"], str)]
    others = [row for row in found.statements.index if row not in texts]
    assert len(texts) >= 2
    draw = random.Random(0)
    of_positions = found.statements.index[found.statements["about"] == "positions"]
    n = 2 if of_positions.empty else 6
    for row in texts[:n] + draw.sample(others, n) + draw.sample(list(of_positions), min(n, len(of_positions))):
        statement = found.statements.loc[row]
        claim = found.claims.loc[int(statement["claim"])]
        span = (claim["start"], claim["stop"])
        second = again(plain, prompt, units, found.response_tokens, statement, span, ends, groups)
        assert second.fall == pytest.approx(statement["nats"], abs=1e-3)
        if second.text is not None:
            says = smollm2.tokenizer.decode(second.text, skip_special_tokens=True)
            assert says.split() == statement["says"].split()


CODE = "SIZE = 40\n\ndef paint(color='turquoise'):\n    draw(SIZE, color)\n"


@pytest.mark.slow
def test_every_mark_of_an_answer_is_true_in_plain_transformers(smollm2, plain):
    """Of a source, of several together, of words that are said anyway, and of words without a part that was found."""
    asked = Chat.ask("Which color does paint use by default?", {"paint.py": CODE})
    found = explain(smollm2, asked, by="code", depth="units")
    assert {"source", "together", "memory", "unfound"} <= set(found.citations["account"])
    n, false = citations_again(smollm2, plain, found, ending(smollm2, found))
    assert n >= len(found.citations) - (found.citations["account"] == "question").sum() and false == []


@pytest.mark.slow
def test_two_documents_that_say_the_same_are_cited_together(smollm2, plain):
    asked = Chat.ask("Where is the office?", ["The office is in Rotterdam.", "The office is in Rotterdam."])
    found = explain(smollm2, asked, depth="units")
    assert found.marked == "The office is in Rotterdam [1+2]." and found.cause == (0, 1)
    n, false = citations_again(smollm2, plain, found, ending(smollm2, found))
    assert n and false == []


@pytest.mark.slow
def test_words_that_are_said_without_all_parts_that_have_them_are_from_memory_in_plain_transformers(smollm2, plain):
    texts = {
        "Home computer": "Home computers entered the market in 1977 and became common during the 1980s. "
        "They were used for games.",
        "Dragon Boat Festival": "The Dragon Boat Festival is a holiday in China. It is also called Duanwu Festival.",
    }
    found = explain(smollm2, Chat.ask("When did the computer become common in homes?", texts), depth="units")
    told = found.citations[found.citations.apply(is_untold, axis=1)]
    (line,) = [line for line in sources_in_words(found) if line.mark == "memory"]
    assert {"none", "telling"} == set(found.statements.loc[list(line.rows), "role"])
    assert told["text"].tolist() == ["became"] and "Said without all parts that have it, too: 'became'." in str(found)
    n, false = citations_again(smollm2, plain, found, ending(smollm2, found))
    assert n >= len(told) and false == []


@pytest.mark.slow
def test_a_documents_name_is_a_source_and_its_mark_true_in_plain_transformers(smollm2, plain):
    texts = {
        "Cork oak": "The bark of this tree is harvested every nine years.",
        "Spanish moss": "This plant grows upon larger trees in warm climates. It hangs from their branches, and has no roots.",
    }
    found = explain(smollm2, Chat.ask("Which plant hangs from the trees?", texts), depth="units")
    (row,) = found.citations[found.citations["text"] == "Spanish Moss"].itertuples()
    assert found.units["name"][row.unit] == "the name of document 2" and row.account == "source"
    assert found.documents[row.document][row.document_start : row.document_stop] == "Spanish moss:"
    n, false = citations_again(smollm2, plain, found, ending(smollm2, found))
    assert n >= len(found.citations) - (found.citations["account"] == "question").sum() and false == []


TWO_PARAGRAPHS = "Attending: Dr. Lee, Ann. We paid 3.5 euros.\n\nThe new office will be in Rotterdam. The lease ends in May.\n"
OF_TWO_DOCUMENTS = Chat.ask(
    "In which city will the new office be?", {"minutes.txt": TWO_PARAGRAPHS, "notes.txt": "Tea was had."}, "Be brief. Be kind."
)
CHATS = {
    "documents": OF_TWO_DOCUMENTS.messages,
    "no system": [{"role": "user", "content": "Hello!"}],
    "turns": [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello!\n\nHow can I help?"},
        {"role": "user", "content": "Write <|im_end|>, ü and 你好. "},
    ],
}  # fmt: skip


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
def test_chats_are_written_as_transformers_writes_them(smollm2, messages):
    expected = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Chat(messages, marks="as they are").tokens(smollm2).tolist() == expected
    assert prompt_tokens(smollm2, Chat(messages).text(smollm2)).tolist() == expected  # its BOS is <|im_start|>: one, not two
    assert expected[:2] != [smollm2.tokenizer.bos_token_id] * 2


def test_bos_is_there_once(smollm2):
    """A second one made SmolLM2 surer of what follows."""
    text = "<|im_start|>user\nThe color of a clear sky by day is"
    tokens = smollm2.to_tokens(text)
    assert tokens[0].tolist() == smollm2.tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        assert smollm2(text).equal(smollm2(tokens))


def test_units_of_documents(smollm2):
    units = prompt_units(smollm2, OF_TWO_DOCUMENTS)
    assert [(unit.name, unit.text.strip()) for unit in units] == [
        ("system, sentence 1", "Be brief."),
        ("system, sentence 2", "Be kind."),
        ("minutes.txt, sentence 1", "Attending: Dr. Lee, Ann."),
        ("minutes.txt, sentence 2", "We paid 3.5 euros."),
        ("minutes.txt, sentence 3", "The new office will be in Rotterdam."),
        ("minutes.txt, sentence 4", "The lease ends in May."),
        ("notes.txt, sentence 1", "Tea was had."),
    ]
    tokens = OF_TWO_DOCUMENTS.tokens(smollm2)
    kept = smollm2.to_string(tokens[always_there(OF_TWO_DOCUMENTS.layout(smollm2))])
    assert kept.startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\nminutes.txt:\n")
    assert kept.endswith("In which city will the new office be?<|im_end|>\n<|im_start|>assistant\n")


PAGE = (Path(__file__).resolve().parents[2] / "docs/explanations.md").read_text(encoding="utf-8")
SETUP, *EXAMPLES = PAGE.split("\n## ")
NAMED = re.compile(
    r"Without (?!it,|these together,)((?:(?!Without ).)*?), the model says|(No part) loses|(None of the parts) loses", re.DOTALL
)


def block(language, text):
    return re.search(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)[1]


@pytest.fixture(scope="module")
def namespace(smollm2):
    """What the page's first lines make, with the model that the other tests have loaded, since a load takes half a minute."""
    found: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvlens, "load", {"smollm2.gguf": smollm2}.__getitem__)
        exec(block("python", SETUP), found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=[text.splitlines()[0].lower().replace(" ", "_") for text in EXAMPLES])
def test_an_example_names_the_causes_that_the_page_names(example, namespace):
    """Not the numbers, nor every word that is said instead, which may hang on the last bit of a processor."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block("python", example), dict(namespace))
    assert named(printed.getvalue()) == named(block("text", example))


def named(text):
    """Parts without which something else is said, and whether none loses the answer."""
    return [next(filter(None, each)) for each in NAMED.findall(" ".join(text.split()))]

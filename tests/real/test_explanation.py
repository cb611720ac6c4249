"""An explanation of a real model's answer, whose statements a second program repeats with plain Transformers."""

import random

import pytest
import torch
from plain_transformers import Plain, again
from transformers import AutoModelForCausalLM

from kvlens import Chat, explain
from kvlens.explanation import paragraphs
from kvlens.explanation.runs import ENDS, MORE_TOKENS, stop_tokens

MINUTES = "Everybody was there on Tuesday. The new office will be in Rotterdam. The rent is 12,500 euros a month."
ASKED = Chat.ask("In which city will the new office be? Answer in one short sentence.", {"minutes.txt": MINUTES})


@pytest.fixture(scope="module")
def found(smollm2):
    return explain(smollm2, ASKED, about="Rotterdam", depth="positions")


def test_the_stating_sentence_is_the_cause_of_the_city(found):
    assert "Rotterdam" in found.response
    assert "Rotterdam" in found.claim and found.units["name"][found.cause[0]] == "minutes.txt, sentence 2"
    assert found.n_layers == 30 and len(found.rows("positions", "each")) >= 4


def test_statements_are_true_in_plain_transformers(smollm2, smollm2_file, found):
    hf = AutoModelForCausalLM.from_pretrained(
        smollm2_file.parent, gguf_file=smollm2_file.name, dtype=torch.float32, attn_implementation="written_out"
    )
    prompt, stops = ASKED.tokens(smollm2), stop_tokens(smollm2)
    units = list(found.units[["start", "stop"]].itertuples(index=False, name=None))
    groups = {name: table["position"].tolist() for name, table in found.positions.groupby("group")}

    def ends(text):
        enough = len(text) >= len(found.response_tokens) + MORE_TOKENS
        return text[-1] in stops or (enough and smollm2.tokenizer.decode(text[-1:]).endswith(ENDS))

    printed = {row for paragraph in paragraphs(found) for sentence in paragraph for row in sentence.rows}
    told = [row for row in printed if isinstance(found.statements.loc[row, "says"], str)]
    others = [row for row in found.statements.index if row not in told]
    assert len(told) >= 2
    draw = random.Random(0)
    of_positions = found.statements.index[found.statements["about"] == "positions"]
    for row in told[:4] + draw.sample(others, 4) + draw.sample(list(of_positions), 3):
        statement = found.statements.loc[row]
        claim = found.claims.loc[int(statement["claim"])]
        span = (claim["start"], claim["stop"])
        second = again(Plain(hf), prompt, units, found.response_tokens, statement, span, ends, groups)
        assert second.fall == pytest.approx(statement["nats"], abs=1e-3)
        if second.text is not None:
            says = smollm2.tokenizer.decode(second.text, skip_special_tokens=True)
            assert says.split() == statement["says"].split()

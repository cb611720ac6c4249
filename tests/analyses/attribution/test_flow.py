"""The edges and switches of a drawn flow: each number against one hooked pass over prompt and text."""

from dataclasses import replace

import pandas as pd
import pytest
from analysis_models import VARIANTS, random_model, tokens
from kvlens.analyses.attribution import by_head
from kvlens.analyses.attribution.explain import SHIFT_STATE, Explained, explain
from kvlens.analyses.attribution.flow import answer_flow, parts_drawn
from kvlens.analyses.attribution.verdicts import STATEMENTS
from kvlens.analyses.bias.parts import exchangeable
from second_opinion import HookedPasses

from kvlens import KVShiftConfig, convert_prompt

PROMPT, TEXT = tokens(13, 1), tokens(4, 2)
SPANS = [(0, 3), (3, 5), (5, 9), (9, 13)]
ANSWER, RIVAL = 5, 7
TOLERANCE = 1e-9
"""float64, log-probabilities of size 10 behind two layers whose weights are five times as large as usual."""
MODELS = {
    "linear": {},
    "linear, no shift": VARIANTS["rope before"],
    "softmax": dict(attention="softmax", kv_shift=KVShiftConfig(window=2, queries=True)),
}


def found_in(model, cause=(1,), rival=None, heads=("0.1", "1.2"), positions=("4", "7")) -> Explained:
    """An explanation whose sets are the named heads and positions."""
    found = explain(model, PROMPT, TEXT, by=SPANS, answer=ANSWER, rival=RIVAL if rival is None else rival)
    row = dict(zip(STATEMENTS, found.statements.iloc[0], strict=True)) | {"role": "breaking"}
    rows = [row | {"about": "heads", "parts": "+".join(heads)}, row | {"about": "positions", "parts": "+".join(positions)}]
    bias = convert_prompt(model, PROMPT)
    codes = pd.DataFrame({"code": [part.code for part in exchangeable(bias)]})
    places = pd.DataFrame({"code": [*map(str, range(13)), SHIFT_STATE]})
    return replace(
        found,
        statements=pd.DataFrame(rows),
        heads=codes,
        positions=places,
        cause=cause,
        answer_tokens=(ANSWER,),
        rival_tokens=(RIVAL,),
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_row_is_what_a_hooked_pass_over_prompt_and_text_says(name, monkeypatch):
    monkeypatch.setattr(by_head, "MEMORY_PER_PASS", 1)  # four rows at once
    model = random_model(**MODELS[name])
    shifts = model.cfg.kv_shift is not None
    found = found_in(
        model, heads=("0.1", "1.s0") if shifts else ("0.1", "1.2"), positions=("4", SHIFT_STATE if shifts else "9")
    )
    table = answer_flow(model, PROMPT, TEXT, found)
    assert len(table) == 2**4 + 1 + 2 + 2 + 2 * 4  # switches; all; each head alone, each position alone; edges
    assert not table.duplicated(["heads", "positions", "inside", "others"]).any()
    passes = HookedPasses(model, PROMPT, TEXT, SPANS)
    before = passes.without([]).log_softmax(dim=-1)[[ANSWER, RIVAL]]
    for row in table.itertuples():
        heads, positions = (codes.split("+") if codes else [] for codes in (row.heads, row.positions))
        read = passes.exchanged(found.cause, heads, positions, inside=row.inside, others=row.others)
        said = read.log_softmax(dim=-1)[[ANSWER, RIVAL]]
        assert row.effect == pytest.approx(float(before[0] - said[0]), abs=TOLERANCE), row
        assert row.p_answer == pytest.approx(float(said[0].exp()), abs=TOLERANCE)
        assert row.p_rival == pytest.approx(float(said[1].exp()), abs=TOLERANCE)
        first = int(read.argmax())
        assert pd.isna(row.says) == (first == ANSWER)
        if first != ANSWER:
            assert row.p_says == pytest.approx(float(read.softmax(dim=-1)[first]), abs=TOLERANCE)
    assert table["effect"].abs().max() > 0.01


def test_where_nothing_is_lost_nothing_is_measured():
    model = random_model()
    assert len(answer_flow(model, PROMPT, TEXT, found_in(model, cause=()))) == 0


def test_the_parts_drawn_are_those_of_the_sets_and_not_too_many():
    model = random_model()
    found = found_in(model, heads=tuple(f"{layer}.{head}" for layer in range(2) for head in range(4)), positions=("4", "7"))
    heads, positions = parts_drawn(found)
    assert len(heads) + len(positions) == 7 and positions == ["4", "7"] and heads == sorted(heads)

"""``kvlens analyse layer_contributions``: the prompt is a bias, with rows of its own, also in a softmax model."""

import pytest
import torch
from analysis_models import GROUPED, random_model, tokens
from kvlens.analyses.batch.work import load_analysis
from kvlens.analyses.declaration import Record

from kvlens import analyses

PROMPT, TEXT = tokens(7), tokens(5, seed=1)
KINDS = {
    "linear": {},
    "softmax": dict(attention="softmax", positional_embedding_type="standard", kv_shift=None),
    "softmax, shift": dict(attention="softmax"),
    "softmax, grouped": dict(attention="softmax", kv_shift=None, **GROUPED),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_heads_read_of_the_prompt_has_rows_and_the_two_parts_are_the_whole(name):
    """Both parts of each head add up to what it reads where the prompt stands before the text."""
    model = random_model(**KINDS[name])
    frame = load_analysis("layer_contributions").run(model, Record("a", PROMPT, TEXT, {"answer": 5}), per_head=True)
    by = ["position", "target", "layer", "head"]
    attention = frame[frame["component"].isin(["attention_input", "attention_bias"])]
    assert attention.loc[attention["component"] == "attention_bias", "norm"].min() > 0
    unconverted = analyses.layer_contributions(model, PROMPT, TEXT, tokens=[5], per_head=True)
    whole = unconverted[unconverted["component"] == "attention_input"]
    found, expected = (x.groupby(by)["logit"].sum(min_count=1).dropna() for x in (attention, whole))
    assert found.index.equals(expected.index)
    difference = torch.tensor((found - expected).to_numpy()).norm()
    assert difference < 1e-11 * torch.tensor(expected.to_numpy()).norm()

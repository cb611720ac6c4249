"""Pairs along which induction would read: from a token of the text to what followed an equal token of the prompt."""

import pytest
import torch
from analysis_models import random_model, tokens
from repeated_models import shifted_heads

from kvlens import KVShiftConfig
from kvlens.analyses import prompt_copies

PROMPT, TEXT = torch.tensor([5, 3, 7, 3, 2]), torch.tensor([3, 9, 7, 2])
PAIRS = [(0, 2), (0, 4), (2, 3)]
"""(position of 3, 3 and 7 in the text, of the token behind their occurrences in the prompt); nothing follows the prompt's 2."""


@pytest.mark.parametrize("shift", [None, KVShiftConfig()])
def test_positions_are_those_of_the_token_after_and_attention_is_the_patterns(shift):
    model = random_model(attention="softmax", kv_shift=shift)
    frame = prompt_copies(model, PROMPT, TEXT)
    _, cache = model.run_with_cache(torch.cat([PROMPT, TEXT])[None])
    for (layer, head), rows in frame.groupby(["layer", "head"]):
        assert list(zip(rows["position"], rows["prompt_position"], strict=True)) == PAIRS
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0, head]
        expected = [float(pattern[len(PROMPT) + query, key]) for query, key in PAIRS]
        assert rows["attention"].tolist() == pytest.approx(expected, rel=1e-6)  # kept in float32


def test_an_induction_head_attends_where_the_pairs_point():
    model = shifted_heads()
    prompt = torch.randperm(model.cfg.d_vocab, generator=torch.Generator().manual_seed(0))[:7]
    rows = prompt_copies(model, prompt, prompt[2:5]).query("head == 0")  # the role of head 0 is induction
    assert rows["prompt_position"].tolist() == [3, 4, 5] and rows["shifted"].all()
    assert (rows["attention"] > 0.99).all()


def test_no_pair_no_row():
    assert prompt_copies(random_model(), tokens(5) % 8, torch.tensor([11, 12])).empty

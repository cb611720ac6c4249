"""A record of a batch gives what the functions of a notebook give, with a row for every head and the declared columns."""

import functools

import pandas as pd
import pytest
import torch
from analysis_models import random_model, tokens
from kvlens.analyses.declaration import Record

from kvlens import KVLensError, convert_prompt
from kvlens.analyses import (
    activation_patching,
    bias_by_head,
    bias_decomposition,
    bias_effects,
    bias_positions,
    bias_singular_values,
    circuits,
)

PROMPT, OTHER, TEXT = tokens(7), tokens(7, seed=5), tokens(4, seed=1)
TARGET = dict(answer=3, rival=11)
METHODS = ["zero", "mean", "resample"]
CASES = {
    "patching": (activation_patching, dict(points=""), lambda m: activation_patching(m, PROMPT, OTHER, TEXT, **TARGET)),
    "by head": (bias_by_head, {}, lambda m: bias_by_head(m, PROMPT, TEXT)),
    "decomposition": (bias_decomposition, {}, lambda m: bias_decomposition(m, PROMPT, TEXT, **TARGET)),
    "effects": (
        bias_effects,
        dict(methods=",".join(METHODS), parts=""),
        lambda m: bias_effects(m, PROMPT, TEXT, methods=METHODS, references=convert_prompt(m, OTHER[None]), **TARGET),
    ),
    **{
        f"positions, {at}": (
            bias_positions,
            dict(by="source", at=at),
            functools.partial(bias_positions, prompt=PROMPT, text=TEXT, by="source", at=places, **TARGET),
        )
        for at, places in {"together": None, "last": [3], "each": range(4)}.items()
    },
    "singular values": (bias_singular_values, {}, lambda m: bias_singular_values(m, PROMPT)),
    "circuits": (circuits, {}, lambda m: circuits(m, PROMPT, OTHER)),
}


def ids(prompt) -> str:
    return " ".join(map(str, prompt.tolist()))


FIELDS = {"corrupted": ids(OTHER), "references": [ids(OTHER)], "second_prompt": ids(OTHER), **TARGET}
RECORD = Record("a", ids(PROMPT), ids(TEXT), FIELDS)


@functools.cache
def model_with(attention):
    return random_model(attention=attention, n_heads=6, d_model=36, n_key_value_heads=2, kv_shift=None)


@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("case", CASES)
def test_a_record_gives_the_same_table_as_the_function(case, attention):
    model, (function, options, called) = model_with(attention), CASES[case]
    function.analysis.check_model(model)
    frame = function.analysis.run(model, RECORD, **options)
    pd.testing.assert_frame_equal(frame, called(model))
    assert frame.dtypes.astype(str).to_dict() == function.analysis.columns.dtypes
    assert {(layer, head) for layer in range(2) for head in range(6)} <= set(zip(frame["layer"], frame["head"], strict=True))
    n_values = torch.tensor(convert_prompt(model, PROMPT).b_KV.shape[-2:]).min()
    assert case != "singular values" or len(frame) == 2 * 6 * n_values


def test_fields_that_a_record_lacks_are_named():
    with pytest.raises(KVLensError, match="second_prompt: this analysis needs a field of this name .* this record has: other"):
        circuits.analysis.run(model_with("linear"), Record("a", "0 1", fields={"other": 1}))
    with pytest.raises(KVLensError, match="prompt: expected token ids .* got 'the widget'"):
        circuits.analysis.run(model_with("linear"), Record("a", "the widget"))
    with pytest.raises(KVLensError, match="references=, a batch of biases"):
        bias_effects.analysis.run(model_with("linear"), Record("b", "0 1", "1"), by="head", methods="mean", parts="")

"""Prompts of any length are converted in bounded memory: segment by segment and head by head, with the same result."""

import pytest
import torch
from precision import LAW, relative_error
from small_models import small_model, tokens

from kvlens import KVBias, KVShiftConfig, convert_prompt
from kvlens.conversion import (
    H2O,
    AttentionMatching,
    ExpectedAttention,
    KVzip,
    Landmark,
    SnapKV,
    StreamingLLM,
)
from kvlens.model import prompt as reading

TEXTS = dict(n_continuations=3, continuation_length=4, n_held_out=2)
METHODS = [
    Landmark(n_keys=3, **TEXTS),
    AttentionMatching(n_keys=5, on_policy=True, **TEXTS),
    StreamingLLM(n_keys=6, **TEXTS),
    H2O(n_keys=6, **TEXTS),
    SnapKV(n_keys=6, window=2, **TEXTS),
    ExpectedAttention(n_keys=6, **TEXTS),
    KVzip(n_keys=6, **TEXTS),
]
MORE = dict(n_ctx=120, dtype=torch.float64)
KINDS = {
    "learned positions": {},
    "rotary, shifted": dict(positional_embedding_type="rotary", kv_shift=KVShiftConfig(window=1)),
    "alibi, local": dict(
        positional_embedding_type="alibi", use_local_attn=True, window_size=20, attn_types=["local", "global"]
    ),
}


def in_little_memory(monkeypatch) -> list[int]:
    """Few scores and one head at a time; the result lists the lengths of the prompt's segments."""
    lengths, whole = [], reading.tokens_at_once

    def observed(*of):
        lengths.append(whole(*of))
        return lengths[-1]

    monkeypatch.setattr(reading, "NUMBERS_AT_ONCE", 3000)
    monkeypatch.setattr("kvlens.conversion.softmax.prompt_pass.NUMBERS_AT_ONCE", 3000)
    monkeypatch.setattr(reading, "tokens_at_once", observed)
    monkeypatch.setattr("kvlens.ops.landmarks.NUMBERS_AT_ONCE", 1)
    return lengths


def assert_same(a: KVBias, b: KVBias) -> None:
    for x, y in ((a.b_KV, b.b_KV), (a.b_D, b.b_D), (a.features.keys, b.features.keys), (a.last_k, b.last_k)):
        assert relative_error(x, y) < LAW
    if a.fit is not None:
        assert relative_error(a.fit.head_output_error, b.fit.head_output_error) < LAW


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_method_converts_a_long_prompt_as_it_would_in_one_piece(method, monkeypatch):
    model, prompt = small_model(**MORE, positional_embedding_type="rotary"), tokens(2, 37)
    for block in model.blocks:
        block.attn.W_Q.data.mul_(12.0)  # with uniform attention every choice of keys is as good
    whole = convert_prompt(model, prompt, method=method, verbose=False)
    lengths = in_little_memory(monkeypatch)
    assert_same(convert_prompt(model, prompt, method=method, verbose=False), whole)
    assert 1 < lengths[0] < 37


@pytest.mark.parametrize("kind", KINDS)
def test_segments_of_a_prompt_are_the_prompt(kind, monkeypatch):
    """A second prompt after a first one: the segments read the bias that they continue, too."""
    model, prompt, more = small_model(**MORE, **KINDS[kind]), tokens(1, 37), tokens(1, 29, seed=1)
    first = convert_prompt(model, prompt)
    both, hooked = convert_prompt(model, more, initial=first), []
    in_little_memory(monkeypatch)
    assert_same(convert_prompt(model, prompt), first)
    assert_same(convert_prompt(model, more, initial=first), both)
    convert_prompt(model, prompt, fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: hooked.append(x.shape[1]))])
    assert hooked == [37]  # a hook sees the whole prompt

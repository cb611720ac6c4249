"""What the page shows of a long prompt, read in segments and summed in columns, is what it is for the whole prompt."""

import pandas as pd
import pytest
import torch
from kvlens.analyses.heads.rows import attention_among
from live_bytes import growth
from tiny_text_model import tiny_text_model

from kvlens import KVShiftConfig, convert_prompt
from kvlens.analyses import head_details, linked_shares, prompt_copies, segments
from kvlens.model import streaming

MODELS = {
    "rotary after": {},
    "rotary before, window 2": dict(rotary_placement="before", kv_shift=KVShiftConfig(window=2)),
    "grouped, decay": dict(n_heads=6, d_model=24, n_key_value_heads=2, normalizer="none", decay="retnet"),
}
TEXT = torch.tensor([3, 1, 4, 1, 5])
ROOM = segments.KEPT_BYTES


def draw(n):
    return torch.randint(0, 9, (n,), generator=torch.Generator().manual_seed(0))


def model_of(**changes):
    return tiny_text_model(dtype=torch.float64, **changes).requires_grad_(False)


@pytest.fixture
def in_segments(monkeypatch):
    """A function that sets segments to 4 tokens, the prompt to at most 5 columns, and the memory for its keys."""

    def switch(room):
        monkeypatch.setattr(segments, "KEPT_BYTES", room)
        monkeypatch.setattr(streaming, "default_segment_length", lambda model, batch: 4)
        monkeypatch.setattr(segments, "MAX_COLUMNS", 5)

    return switch


def in_columns(values, block):
    return torch.stack([part.sum(dim=-1) for part in values.split(block, dim=-1)], dim=-1)


@pytest.mark.parametrize("name", MODELS)
def test_in_segments_equals_whole(name, in_segments):
    model, prompt = model_of(**MODELS[name]), draw(14)
    everything, bias = torch.cat([prompt, TEXT]), convert_prompt(model, prompt)
    places = torch.tensor([0, 5, 13, 17])

    def look():
        shares = linked_shares(model, prompt, TEXT, bias=bias)
        details = head_details(model, prompt, TEXT, bias=bias)
        among = attention_among(model, everything, places)
        return shares, details, among, prompt_copies(model, prompt, TEXT)

    whole, details, among, copies = look()
    of_prompt, of_text = details.pattern[..., :14], details.pattern[..., 14:]
    # pictures of patterns are kept, and summed in columns of three, in float32
    single, double = dict(rtol=4 * torch.finfo(torch.float32).eps, atol=1e-11), dict(rtol=1e-12, atol=1e-13)
    for room in (0, ROOM):  # run twice, and kept
        in_segments(room)
        whole_in, details_in, among_in, copies_in = look()
        for name in ("by_prompt", "by_text"):
            torch.testing.assert_close(getattr(whole_in, name), getattr(whole, name), **double)
        assert (whole.block, whole_in.block, details_in.block) == (1, 3, 3)
        torch.testing.assert_close(whole_in.between, in_columns(whole.between, 3), **double)
        torch.testing.assert_close(details_in.pattern, torch.cat([in_columns(of_prompt, 3), of_text], dim=-1), **single)
        for name in ("prompt_shares", "strongest", "among"):
            torch.testing.assert_close(getattr(details_in, name), getattr(details, name), **single)
        torch.testing.assert_close(among_in, among, **single)
        pd.testing.assert_frame_equal(copies_in, copies, **single)


@pytest.mark.parametrize("analysis", [linked_shares, head_details])
def test_memory_grows_by_the_shares_alone(analysis, monkeypatch):
    """A few numbers per head and prompt token: less than one activation, of 8 x 16 bytes per head."""
    monkeypatch.setattr(streaming, "default_segment_length", lambda model, batch: 32)
    monkeypatch.setattr(segments, "MAX_COLUMNS", 16)
    monkeypatch.setattr(segments, "KEPT_BYTES", 0)
    model = model_of(n_layers=1, d_model=48, d_head=16, n_heads=3)

    def run(n):
        analysis(model, draw(n), TEXT, bias=bias)

    bias = convert_prompt(model, draw(8))
    assert growth(run, 64, 192) < 3 * 16 * 8 / 2

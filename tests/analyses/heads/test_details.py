"""What the linked page shows of heads: patterns are those of ``hook_pattern``, shares those of the analyses, marginals of one
another; and of a long prompt, read in segments and summed in columns, what it is for the whole prompt."""

import pandas as pd
import pytest
import torch
from analysis_models import tokens
from kvlens.analyses.bias.positions import visit_shares
from kvlens.analyses.heads.rows import attention_among
from live_bytes import growth
from repeated_models import shifted_heads
from small_models import row_of, sharp
from tiny_text_model import PROMPT as WORDS
from tiny_text_model import TEXT as NEXT_WORDS
from tiny_text_model import tiny_text_model

from kvlens import convert_prompt
from kvlens.analyses import bias_by_head, bias_positions, head_details, linked_shares, prompt_copies, segments
from kvlens.model import streaming

ROWS = ["rope after", "rope before", "learned", "values shifted, relu", "gqa decay", "gqa", "taylor", "softmax, learned"]
KEPT = dict(rtol=torch.finfo(torch.float32).eps, atol=1e-11)
"""Computed in float64, and each number then kept in float32; what is zero by theory is a part of rows that sum to 1."""


def tokens_of(model):
    return model.to_tokens(WORDS)[0], model.to_tokens(NEXT_WORDS, prepend_bos=False)[0]


@pytest.mark.parametrize("name", ROWS)
def test_details_are_hook_pattern_and_the_shares(name):
    model = tiny_text_model(row_of(name), dtype=torch.float64)
    prompt, text = tokens_of(model)
    details = head_details(model, prompt, text)
    n_prompt, n_keys = len(prompt), len(prompt) + len(text)
    assert details.prompt[0] == model.tokenizer.bos_token and "".join(details.text) == NEXT_WORDS
    assert details.queries.tolist() == list(range(n_prompt, n_keys)) and details.block == 1  # short enough for all
    tokens = torch.cat([prompt, text])[None]
    _, cache = model.run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_pattern"))
    expected = torch.stack([cache["pattern", layer][0] for layer in range(model.cfg.n_layers)])
    torch.testing.assert_close(details.pattern.double(), expected[:, :, n_prompt:], **KEPT)
    assert details.strongest.tolist() == list(range(n_keys))
    torch.testing.assert_close(details.among.double(), expected, **KEPT)
    assert details.prompt_shares.shape == (2, model.cfg.n_heads, n_prompt)
    means = details.bias_shares.double().mean(dim=-1).flatten()
    expected = bias_by_head(model, prompt, text)["bias_share"]
    torch.testing.assert_close(means, torch.tensor(expected.to_numpy()), **KEPT)


MODELS = ["no shift", "gqa, queries shifted", "softmax, rotary", "softmax, shifted"]
PROMPT, TEXT = tokens(9, 1), tokens(5, 2)


def output_shares(model, prompt, text, **options):
    """w, [layer, head, text, prompt]."""
    w = torch.full((model.cfg.n_layers, model.cfg.n_heads, len(text), len(prompt)), torch.nan, dtype=torch.float64)

    def keep(layer, first, part):
        w[layer, ..., first : first + part.shape[-1]] = part

    visit_shares(model, prompt, text, keep, **options)
    return w


@pytest.mark.parametrize("name", MODELS)
def test_prompt_and_text_share_the_whole_output(name):
    """At each text token the shares of all heads and positions, the text's own included, sum to 1."""
    model = sharp(name)
    together = torch.cat([PROMPT, TEXT])
    rows = output_shares(model, together[:-1], together[-1:]).sum(dim=(0, 1, 3))
    own = _own_share(model, together)
    torch.testing.assert_close(rows + own, torch.ones_like(rows), rtol=0, atol=1e-12)


def _own_share(model, together):
    """The share of the last position in its own output, from the cached pattern."""
    _, cache = model.run_with_cache(together[None])
    value = "hook_v_shifted" if model.cfg.kv_shift is not None else "hook_v"
    dots, sizes = [], []
    for layer in range(model.cfg.n_layers):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0, :, -1, -1]
        v = cache[f"blocks.{layer}.attn.{value}"][0, -1]
        v = v.repeat_interleave(model.cfg.n_heads // v.shape[0], dim=0)
        w_o, z = model.blocks[layer].attn.W_O, cache[f"blocks.{layer}.attn.hook_z"][0, -1]
        output, part = (torch.einsum("hd,hdm->hm", x, w_o) for x in (z, pattern[:, None] * v))
        dots.append((part * output).sum(dim=1) / output.norm(dim=1))
        sizes.append(output.norm(dim=1))
    return (torch.stack(dots).sum() / torch.stack(sizes).sum())[None]


@torch.no_grad()
def test_marginals_agree_with_each_other_and_with_bias_positions():
    data = linked_shares(sharp("no shift"), PROMPT, TEXT)
    for left, right in (
        (data.by_prompt.sum(dim=2), data.by_text.mean(dim=2)),
        (data.by_prompt.sum(dim=(0, 1)), data.between.mean(dim=0)),
        (data.by_text.sum(dim=(0, 1)), data.between.sum(dim=1)),
    ):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    # one head with W_O an isometry: sharing by z and sharing by z W_O are then the same
    one = sharp("no shift", n_layers=1, n_heads=1, d_model=6, d_head=6)
    one.blocks[0].attn.W_O.data = torch.eye(6, dtype=torch.float64)[None]
    got = output_shares(one, PROMPT, TEXT)[0, 0]
    table = bias_positions(one, PROMPT, TEXT, at=list(range(len(TEXT))))
    expected = torch.tensor(table.loc[table["part"] == "prompt", "output_share"].to_numpy()).view(len(TEXT), len(PROMPT))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_copies_are_the_tokens_behind_equal_tokens_and_their_attention_is_the_patterns(name):
    """Of 3, 3 and 7 in the text, the token behind their occurrences in the prompt; nothing follows the prompt's 2."""
    prompt, text, pairs = torch.tensor([5, 3, 7, 3, 2]), torch.tensor([3, 9, 7, 2]), [(0, 2), (0, 4), (2, 3)]
    model = sharp(name)
    frame = prompt_copies(model, prompt, text)
    _, cache = model.run_with_cache(torch.cat([prompt, text])[None])
    assert len(frame) == 2 * model.cfg.n_heads * len(pairs)
    for (layer, head), rows in frame.groupby(["layer", "head"]):
        assert list(zip(rows["position"], rows["prompt_position"], strict=True)) == pairs
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0, head]
        expected = [float(pattern[len(prompt) + query, key]) for query, key in pairs]
        # computed in float64, kept in float32
        assert rows["attention"].tolist() == pytest.approx(expected, rel=torch.finfo(torch.float32).eps, abs=1e-11)
    assert frame["shifted"].any() <= (model.cfg.kv_shift is not None)
    assert prompt_copies(model, tokens(5) % 8, torch.tensor([11, 12])).empty


def test_an_induction_head_attends_where_the_pairs_point():
    model = shifted_heads()
    prompt = torch.randperm(model.cfg.d_vocab, generator=torch.Generator().manual_seed(0))[:7]
    rows = prompt_copies(model, prompt, prompt[2:5]).query("head == 0")  # the role of head 0 is induction
    assert rows["prompt_position"].tolist() == [3, 4, 5] and rows["shifted"].all()
    assert (rows["attention"] > 0.99).all()


BEHIND_LONG = torch.tensor([3, 1, 4, 1, 5])
ROOM = segments.KEPT_BYTES


def draw(n):
    return torch.randint(0, 9, (n,), generator=torch.Generator().manual_seed(0))


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


@pytest.mark.parametrize("name", ["rope after", "rope before", "gqa decay"])
def test_in_segments_equals_whole(name, in_segments):
    model, prompt = sharp(name), draw(14)
    everything, bias = torch.cat([prompt, BEHIND_LONG]), convert_prompt(model, prompt)
    places = torch.tensor([0, 5, 13, 17])

    def look():
        shares = linked_shares(model, prompt, BEHIND_LONG, bias=bias)
        details = head_details(model, prompt, BEHIND_LONG, bias=bias)
        among = attention_among(model, everything, places)
        return shares, details, among, prompt_copies(model, prompt, BEHIND_LONG)

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
    model = sharp(n_layers=1, d_model=48, d_head=16, n_heads=3)

    def run(n):
        analysis(model, draw(n), BEHIND_LONG, bias=bias)

    bias = convert_prompt(model, draw(8))
    assert growth(run, 64, 192) < 3 * 16 * 8 / 2

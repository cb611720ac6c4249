"""What the linked page shows of heads: patterns are those of ``hook_pattern``, shares those of the analyses, marginals of one
another; and of a long prompt, read in segments and summed in columns, what it is for the whole prompt. The attention under an
exact bias is that of a pass over prompt and text; under another one it is that of its keys.
"""

import pandas as pd
import pytest
import torch
from analysis_models import growth, shifted_heads, tokens
from kvlens.analyses.bias.positions import visit_shares
from kvlens.analyses.heads.rows import attention_among
from precision import LAW, float64, relative_error
from small_models import row_of, sharp
from tiny_hf import tiny_hf_model
from tiny_text_model import PROMPT as WORDS
from tiny_text_model import TEXT as NEXT_WORDS
from tiny_text_model import linear, tiny_text_model

from kvlens import HookedKVTransformer, KVLensError, KVTransformerBridge, convert_prompt
from kvlens.analyses import (
    attention_under_bias,
    bias_by_head,
    bias_positions,
    head_details,
    linked_shares,
    prompt_copies,
    segments,
)
from kvlens.model import streaming

ROWS = ["rope after", "rope before", "learned", "values shifted, relu", "gqa decay", "gqa", "taylor", "softmax, learned"]
KEPT = dict(rtol=torch.finfo(torch.float32).eps, atol=1e-11)
"""Computed in float64, and each number then kept in float32; what is zero by theory is a part of rows that sum to 1."""


def tokens_of(model):
    return model.to_tokens(WORDS)[0], model.to_tokens(NEXT_WORDS, prepend_bos=False)[0]


@pytest.mark.one_in(3)
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
        monkeypatch.setattr(streaming, "default_segment_length", lambda *_: 4)
        monkeypatch.setattr(segments, "MAX_COLUMNS", 5)

    return switch


def in_columns(values, block):
    return torch.stack([part.sum(dim=-1) for part in values.split(block, dim=-1)], dim=-1)


@pytest.mark.one_in(3)
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
    monkeypatch.setattr(streaming, "default_segment_length", lambda *_: 32)
    monkeypatch.setattr(segments, "MAX_COLUMNS", 16)
    monkeypatch.setattr(segments, "KEPT_BYTES", 0)
    model = sharp(n_layers=1, d_model=48, d_head=16, n_heads=3)

    def run(n):
        analysis(model, draw(n), BEHIND_LONG, bias=bias)

    bias = convert_prompt(model, draw(8))
    assert growth(run, 64, 192) < 3 * 16 * 8 / 2


N_PROMPT, LAYERS = 13, (0, 2)
PATTERN = "blocks.{}.attn.hook_pattern"


def on_bridge(name):
    return KVTransformerBridge.boot_transformers(tiny_hf_model(name), verify=False)


def hooked(name):
    return HookedKVTransformer.from_pretrained(
        name, hf_model=tiny_hf_model(name), verify=False, dtype=torch.get_default_dtype()
    )


UNDER_A_BIAS = {
    "grouped heads": lambda: hooked("llama"),
    "window": lambda: hooked("gemma3"),
    "soft cap and window": lambda: hooked("gemma2"),
    "ALiBi": lambda: hooked("bloom"),
    "bridge": lambda: on_bridge("qwen2"),
    "bridge, soft cap and window": lambda: on_bridge("gemma2"),
}


def tokens_of_both(seed=0):
    tokens = torch.randint(3, 300, (1, 19), generator=torch.Generator().manual_seed(seed))
    return tokens, tokens[0, :N_PROMPT], tokens[0, N_PROMPT:]


@pytest.mark.parametrize("make", UNDER_A_BIAS.values(), ids=UNDER_A_BIAS)
def test_rows_sum_to_one_and_are_those_of_the_pass_over_prompt_and_text(make):
    with float64():
        model = make()
        whole, prompt, text = tokens_of_both()
        _, cache = model.run_with_cache(whole, names_filter=[PATTERN.format(layer) for layer in LAYERS])
        for layer in LAYERS:
            found = attention_under_bias(model, prompt, text, layer)
            assert found.n_prompt == N_PROMPT and len(found.tokens) == whole.shape[1] == found.pattern.shape[1]
            assert relative_error(found.pattern, cache[PATTERN.format(layer)][0]) < LAW
            assert relative_error(found.pattern.sum(dim=-1), torch.ones_like(found.pattern[..., 0])) < LAW


def test_an_attention_sink_is_what_rows_lack():
    with float64():
        model = hooked("gpt_oss")
        whole, prompt, text = tokens_of_both()
        _, cache = model.run_with_cache(whole, names_filter=[PATTERN.format(1)])
        found = attention_under_bias(model, prompt, text, 1).pattern
        assert relative_error(found, cache[PATTERN.format(1)][0]) < LAW and (found.sum(dim=-1) < 1).all()


def test_strings_get_the_names_of_their_tokens():
    model = tiny_text_model(attention="softmax", kv_shift=None)
    found = attention_under_bias(model, WORDS, NEXT_WORDS, 1)
    assert found.tokens[0] == model.tokenizer.bos_token and "".join(found.tokens[found.n_prompt :]) == NEXT_WORDS


def test_few_keys_stand_at_the_tokens_that_they_were_taken_from():
    """And their shares are those of the pass that reads this bias."""
    with float64():
        model = hooked("llama")
        _, prompt, text = tokens_of_both()
        kept = torch.tensor([0, 1, 10, 11, 12])
        some = lambda layer: layer.of_attention(lambda keys: keys.some(kept))  # noqa: E731
        few = convert_prompt(model, prompt).map_layers(some)
        found = attention_under_bias(model, prompt, text, 1, bias=few).pattern[:, N_PROMPT:]
        assert set(found[..., :N_PROMPT].abs().amax(dim=(0, 1)).nonzero().flatten().tolist()) == set(kept.tolist())
        assert relative_error(found.sum(dim=-1), torch.ones_like(found[..., 0])) < LAW
        by_key = attention_under_bias(model, few, text, 1)
        assert by_key.tokens[: by_key.n_prompt] == [f"key {i}" for i in range(5)]
        assert relative_error(by_key.pattern[..., :5], found[..., kept]) < LAW
        with model.kv_bias(few):
            _, cache = model.run_with_cache(text[None], names_filter=[PATTERN.format(1)])
        assert relative_error(found[..., N_PROMPT:], cache[PATTERN.format(1)][0]) < LAW


def test_a_difference_of_biases_has_negative_entries_and_rows_that_sum_to_one():
    with float64():
        model = hooked("llama")
        (_, prompt, text), (_, other, _) = tokens_of_both(), tokens_of_both(1)
        a, b = convert_prompt(model, prompt), convert_prompt(model, other)
        found = attention_under_bias(model, 1.25 * a - 0.25 * b, text, 1)
        assert found.n_prompt == 2 * N_PROMPT and (found.pattern < 0).any()
        assert relative_error(found.pattern.sum(dim=-1), torch.ones_like(found.pattern[..., 0])) < LAW


def test_what_has_no_columns_is_refused():
    model = linear()
    with pytest.raises(KVLensError, match="sums of features there and no keys.*head_details"):
        attention_under_bias(model, WORDS, NEXT_WORDS, 1)
    softmax = tiny_text_model(attention="softmax", kv_shift=None)
    bias = convert_prompt(softmax, WORDS)
    with pytest.raises(KVLensError, match="under this bias, and the prompt has"):
        attention_under_bias(softmax, WORDS + NEXT_WORDS, NEXT_WORDS, 0, bias=bias)
    with softmax.kv_bias(bias), pytest.raises(KVLensError, match="is attached"):
        attention_under_bias(softmax, bias, NEXT_WORDS, 0)

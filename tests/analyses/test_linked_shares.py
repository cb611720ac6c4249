"""The tables behind the linked page: their properties, and values computed in another way."""

import pytest
import torch
from analysis_models import GROUPED, random_model, tokens
from kvlens.analyses.bias.positions import visit_shares
from repeated_models import shifted_heads

from kvlens import KVShiftConfig
from kvlens.analyses import bias_positions, linked_shares, prompt_copies

SHIFT = KVShiftConfig(window=2, queries=True)
MODELS = {
    "linear": dict(kv_shift=None),
    "linear, shift, gqa": dict(GROUPED, kv_shift=SHIFT),
    "softmax": dict(attention="softmax", kv_shift=None),
    "softmax, shift": dict(attention="softmax", kv_shift=SHIFT, positional_embedding_type="standard"),
}
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
    model = random_model(**MODELS[name])
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
    data = linked_shares(random_model(**MODELS["linear"]), PROMPT, TEXT)
    for left, right in (
        (data.by_prompt.sum(dim=2), data.by_text.mean(dim=2)),
        (data.by_prompt.sum(dim=(0, 1)), data.between.mean(dim=0)),
        (data.by_text.sum(dim=(0, 1)), data.between.sum(dim=1)),
    ):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    # one head with W_O an isometry: sharing by z and sharing by z W_O are then the same
    one = random_model(**{**MODELS["linear"], "n_layers": 1, "n_heads": 1, "d_model": 6, "d_head": 6})
    one.blocks[0].attn.W_O.data = torch.eye(6, dtype=torch.float64)[None]
    got = output_shares(one, PROMPT, TEXT)[0, 0]
    table = bias_positions(one, PROMPT, TEXT, at=list(range(len(TEXT))))
    expected = torch.tensor(table.loc[table["part"] == "prompt", "output_share"].to_numpy()).view(len(TEXT), len(PROMPT))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_copies_are_the_tokens_behind_equal_tokens_and_their_attention_is_the_patterns(name):
    """Of 3, 3 and 7 in the text, the token behind their occurrences in the prompt; nothing follows the prompt's 2."""
    prompt, text, pairs = torch.tensor([5, 3, 7, 3, 2]), torch.tensor([3, 9, 7, 2]), [(0, 2), (0, 4), (2, 3)]
    model = random_model(**MODELS[name])
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

"""The three tables behind the linked page: their properties, and values computed in another way."""

import pytest
import torch
from kvlens.analyses.prompt.linked import visit_shares

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVShiftConfig
from kvlens.analyses import bias_positions, linked_shares, prompt_copies

SHIFT = KVShiftConfig(window=2, queries=True)
MODELS = {
    "linear": dict(attention="linear", positional_embedding_type="rotary"),
    "linear, shift, gqa": dict(attention="linear", n_heads=6, n_key_value_heads=3, kv_shift=SHIFT),
    "softmax": dict(positional_embedding_type="rotary"),
    "softmax, shift": dict(kv_shift=SHIFT),
}


def build(**changes):
    basic = dict(n_layers=2, d_model=24, n_heads=3, d_head=6, n_ctx=64, d_vocab=13, act_fn="gelu", seed=0, dtype=torch.float64)
    return HookedKVTransformer(HookedKVTransformerConfig(**{**basic, **changes})).eval()


def draw(n, seed):
    return torch.randint(0, 13, (n,), generator=torch.Generator().manual_seed(seed))


PROMPT, TEXT = draw(9, 1), draw(5, 2)


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
    model = build(**MODELS[name])
    tokens = torch.cat([PROMPT, TEXT])
    rows = output_shares(model, tokens[:-1], tokens[-1:]).sum(dim=(0, 1, 3))
    own = _own_share(model, tokens)
    torch.testing.assert_close(rows + own, torch.ones_like(rows), rtol=0, atol=1e-12)


def _own_share(model, tokens):
    """The share of the last position in its own output, from the cached pattern."""
    _, cache = model.run_with_cache(tokens[None], attention_mask=torch.ones(1, len(tokens), dtype=torch.long))
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
    model = build(**MODELS["linear"])
    data = linked_shares(model, PROMPT, TEXT)
    for left, right in (
        (data.by_prompt.sum(dim=2), data.by_text.mean(dim=2)),
        (data.by_prompt.sum(dim=(0, 1)), data.between.mean(dim=0)),
        (data.by_text.sum(dim=(0, 1)), data.between.sum(dim=1)),
    ):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    # one head with W_O an isometry: sharing by z and sharing by z W_O are then the same
    one = build(**{**MODELS["linear"], "n_layers": 1, "n_heads": 1, "d_model": 6, "d_head": 6})
    one.blocks[0].attn.W_O.data = torch.eye(6, dtype=torch.float64)[None]
    got = output_shares(one, PROMPT, TEXT)[0, 0]
    table = bias_positions(one, PROMPT, TEXT, at=list(range(len(TEXT))))
    expected = torch.tensor(table.loc[table["part"] == "prompt", "output_share"].to_numpy()).view(len(TEXT), len(PROMPT))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_copies_are_entries_of_the_pattern(name):
    model = build(**MODELS[name])
    prompt, text = torch.tensor([1, 2, 1, 3]), torch.tensor([1, 4])
    table = prompt_copies(model, prompt, text)
    _, cache = model.run_with_cache(torch.cat([prompt, text])[None], attention_mask=torch.ones(1, 6, dtype=torch.long))
    for row in table.itertuples():
        expected = float(
            cache[f"blocks.{row.layer}.attn.hook_pattern"][0, row.head, len(prompt) + row.position, row.prompt_position]
        )
        assert row.attention == pytest.approx(expected, abs=1e-6)
    assert len(table) == 2 * model.cfg.n_heads * 2
    assert table["shifted"].any() <= (model.cfg.kv_shift is not None)

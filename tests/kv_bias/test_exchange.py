"""Layers of one exact bias in another's place, batches of biases, and rows of them."""

import pytest
import torch

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVBias, KVLensError, KVShiftConfig, convert_prompt

SIZES = dict(n_layers=3, d_model=16, d_head=4, n_ctx=64, d_vocab=20, act_fn="gelu", seed=0, device="cpu", dtype=torch.float64)
KINDS = {
    "softmax": dict(n_key_value_heads=2),
    "linear with a shift": dict(attention="linear", positional_embedding_type="rotary", rotary_dim=4, kv_shift=KVShiftConfig()),
}


@pytest.fixture(params=KINDS)
def model(request):
    return HookedKVTransformer(HookedKVTransformerConfig(**SIZES, **KINDS[request.param]))


def logits(model, bias, text):
    with torch.no_grad(), model.kv_bias(bias):
        rows = bias.batch_size or 1
        return model(text.expand(rows, -1), attention_mask=torch.ones(rows, text.shape[-1], dtype=torch.long))


def close(a, b):
    assert (a - b).norm() <= 1e-11 * b.norm()


def test_exchanged_layers(model):
    prompt, text = torch.arange(9), torch.tensor([[3, 7, 1]])
    own, other = convert_prompt(model, prompt), convert_prompt(model, prompt, without=[(2, 5)])
    sets = torch.tensor([[False] * 3, [True] * 3, [True, False, False], [False, True, True]])
    mixed = logits(model, own.exchange_layers(other, sets), text)
    back = logits(model, other.exchange_layers(own, ~sets), text)
    close(mixed[:1], logits(model, own, text))
    close(mixed[1:2], logits(model, other, text))
    close(mixed, back)  # exchanging a set is keeping its complement
    halves = [own.select(layers=[1, 2]) + other.select(layers=[0]), own.select(layers=[0]) + other.select(layers=[1, 2])]
    if own.last_k.shape[-3] == 0:  # without a shift state a sum of selections is the same mixture
        for row, half in zip(mixed[2:], halves, strict=True):
            close(row[None], logits(model, half, text))
    assert (mixed[2] - mixed[3]).norm() > 1e-3 * mixed[2].norm()


def test_batches_and_rows(model):
    prompts = torch.arange(12).view(3, 4)
    together = convert_prompt(model, prompts)
    joined = KVBias.batch([convert_prompt(model, prompts[:1]), convert_prompt(model, prompts[1:])])
    text = torch.tensor([[5, 2]])
    close(logits(model, joined, text), logits(model, together, text))
    short, long = convert_prompt(model, torch.arange(4)[None]), convert_prompt(model, torch.arange(7)[None])
    padded = logits(model, KVBias.batch([short, long]), text)
    close(padded, torch.cat([logits(model, short, text), logits(model, long, text)]))
    close(logits(model, together.select_prompts(torch.tensor([2, 0])), text), logits(model, together, text)[[2, 0]])


def test_what_does_not_fit_is_refused(model):
    one, longer = convert_prompt(model, torch.arange(4)), convert_prompt(model, torch.arange(5))
    with pytest.raises(KVLensError, match="select_prompts: this bias holds a single prompt"):
        one.select_prompts(torch.tensor([0]))
    with pytest.raises(KVLensError, match="KVBias.batch: expected batches"):
        KVBias.batch([one, one])
    if model.cfg.attention == "softmax":
        with pytest.raises(KVLensError, match="exchange_layers: expected the biases of two single prompts"):
            one.exchange_layers(longer, torch.ones(1, 3, dtype=torch.bool))

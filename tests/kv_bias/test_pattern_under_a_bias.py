"""``hook_pattern`` under a bias, as the tables of hook points say: the text's columns of the rows over prompt and text."""

import pytest
import torch
from tiny_text_model import tiny_text_model
from transformers import GPT2Config, GPT2LMHeadModel

import kvlens.bridge
import kvlens.components
from kvlens import KVTransformerBridge, convert_prompt

PATTERN = "blocks.1.attn.hook_pattern"


def bridge():
    sizes = dict(n_layer=2, n_head=2, n_embd=12, n_positions=32, n_ctx=32, vocab_size=70)
    return KVTransformerBridge.boot_transformers(GPT2LMHeadModel(GPT2Config(**sizes)).eval().double())


MODELS = {
    "linear": lambda: tiny_text_model(dtype=torch.float64),
    "softmax": lambda: tiny_text_model(attention="softmax", dtype=torch.float64),
    "bridge": bridge,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
def test_rows_lack_the_share_of_the_bias_and_the_pass_with_the_prompt_has_it(kind):
    model = MODELS[kind]()
    tokens = torch.randint(3, 40, (1, 19), generator=torch.Generator().manual_seed(0))
    prompt, text = tokens[:, :13], tokens[:, 13:]
    whole = model.run_with_cache(tokens, names_filter=[PATTERN])[1][PATTERN][:, :, 13:]
    with model.kv_bias(convert_prompt(model, prompt)):
        under = model.run_with_cache(text, names_filter=[PATTERN])[1][PATTERN]
    torch.testing.assert_close(under, whole[..., 13:], rtol=0, atol=1e-11)
    if kind != "linear":  # whose rows do not sum to 1, as RoPE is applied after the feature map
        torch.testing.assert_close(1 - under.sum(dim=-1), whole[..., :13].sum(dim=-1), rtol=0, atol=1e-11)
        assert (under.sum(dim=-1) < 0.9).any()


@pytest.mark.parametrize("package", [kvlens.components, kvlens.bridge])
def test_the_tables_of_hook_points_say_so(package):
    row = next(line for line in package.__doc__.splitlines() if line.startswith("| ``hook_pattern``"))
    text = " ".join(package.__doc__.split()).lower()
    assert "with a bias" in row and "the text's columns alone" in row
    assert "what it lacks to 1 is the share of the bias" in text and "in a pass over prompt and text without a bias" in text

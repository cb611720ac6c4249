"""Rows of the pattern are those of ``hook_pattern``, and the shares of a click are those of the analyses."""

import pytest
import torch
from tiny_text_model import PROMPT, TEXT, tiny_text_model

from kvlens.analyses import bias_by_head, head_details

MODELS = {
    "rotary after": {},
    "rotary before": {"rotary_placement": "before"},
    "learned positions": {"positional_embedding_type": "standard"},
    "no normalizer": {"normalizer": "none"},
    "decay": {"normalizer": "none", "decay": "retnet"},
    "grouped": {"n_heads": 6, "d_model": 24, "n_key_value_heads": 2},
    "taylor features": {"feature_map": "taylor"},
    "softmax": {"attention": "softmax", "kv_shift": None},
}


KEPT = dict(rtol=torch.finfo(torch.float32).eps, atol=1e-11)
"""Computed in float64, and each number then kept in float32; what is zero by theory is a part of rows that sum to 1."""


def tokens_of(model):
    return model.to_tokens(PROMPT)[0], model.to_tokens(TEXT, prepend_bos=False)[0]


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_details_are_hook_pattern_and_the_shares(changes):
    model = tiny_text_model(**changes, dtype=torch.float64)
    prompt, text = tokens_of(model)
    details = head_details(model, prompt, text)
    n_prompt, n_keys = len(prompt), len(prompt) + len(text)
    assert details.prompt[0] == model.tokenizer.bos_token and "".join(details.text) == TEXT
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

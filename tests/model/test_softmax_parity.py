"""A shift at the identity and given slopes leave the model TransformerLens'; the rest of its parity is in tests/base."""

import pytest
import torch
from precision import LAW, relative_error
from small_models import SOFTMAX, plain_model, small_model, tokens
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from kvlens import HookedKVTransformer, KVLensError, KVShiftConfig

ROWS = ["learned", "rotary", "rotary, grouped"]


@pytest.mark.parametrize("row", ROWS)
def test_a_shift_grafted_at_the_identity_changes_nothing(row):
    plain, x = plain_model(dtype=torch.float64, **SOFTMAX[row]), tokens(3, 11)
    shift = KVShiftConfig(window=2, queries=True, init="identity")
    ours = HookedKVTransformer.from_hooked_transformer(plain, kv_shift=shift)
    assert relative_error(ours(x), plain(x)) < LAW
    assert ours.blocks[0].attn.q_shift_coef.shape == (ours.cfg.n_heads, 3)
    assert ours.blocks[0].attn.k_shift_coef.shape == (ours.cfg.n_kv_heads, 3)


def test_given_alibi_slopes_are_used():
    slopes = [0.5, 0.25, 0.0, 1.0, 2.0]
    model = small_model(positional_embedding_type="alibi", alibi_slopes=slopes, dtype=torch.float64)
    _, cache = model.run_with_cache(tokens(1, 4))
    bare = small_model(positional_embedding_type="alibi", alibi_slopes=[0.0] * 5, dtype=torch.float64)
    _, without = bare.run_with_cache(tokens(1, 4))
    difference = cache["attn_scores", 0][0, :, 3, :] - without["attn_scores", 0][0, :, 3, :]
    expected = -torch.tensor(slopes, dtype=torch.float64)[:, None] * torch.arange(3, -1, -1)
    assert relative_error(difference, expected) < LAW


def test_a_cache_that_a_plain_model_filled_is_refused():
    plain, ours = plain_model(), small_model(kv_shift=KVShiftConfig())
    cache = TransformerLensKeyValueCache.init_cache(plain.cfg, "cpu", 2)
    plain(tokens(2, 4), past_kv_cache=cache, attention_mask=torch.ones(2, 4, dtype=torch.long))
    with pytest.raises(KVLensError, match="already holds 4 keys"):
        ours(tokens(2, 1), past_kv_cache=cache)

"""A homonym has one vector in the vocabulary, and another in each context (LECTURE sec. 1)."""

import torch
from precision import relative_error

from kvlens import HookedKVTransformer, HookedKVTransformerConfig

BAT = 7


def test_a_token_has_one_embedding_and_a_vector_for_each_context():
    """After layers without attention it is still one vector: it is attention that makes the difference."""
    sizes = dict(n_layers=2, n_heads=2, d_model=16, d_head=8, n_ctx=9, d_vocab=11, act_fn="gelu", seed=1, dtype=torch.float64)
    model = HookedKVTransformer(HookedKVTransformerConfig(**sizes))
    sentences = torch.tensor([[1, 2, BAT, 3], [4, 5, BAT, 6]])
    _, cache = model.run_with_cache(sentences)
    here, there = cache["hook_embed"][:, 2]
    assert torch.equal(here, there)
    vectors = {layer: cache["resid_post", layer][:, 2] for layer in range(2)}
    assert all(relative_error(there, here) > 0.01 for here, there in vectors.values())
    with model.hooks(fwd_hooks=[(f"blocks.{layer}.hook_attn_out", lambda out, hook: 0 * out) for layer in range(2)]):
        here, there = model.run_with_cache(sentences)[1]["resid_post", 1][:, 2]
    assert torch.equal(here, there)

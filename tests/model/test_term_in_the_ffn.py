"""ICLCA app. D: the prompt's term in the FFN instead of attention, in blocks that have the two side by side."""

import pytest
import torch
from precision import LAW, relative_error
from small_models import small_model

from kvlens import convert_prompt
from kvlens.ops.linear_attention import ffn_with_state

PROMPT, TEXT = torch.arange(9)[None] % 7, torch.arange(6)[None] * 3 % 17
PLAIN_LINEAR = dict(
    attention="linear", feature_map="identity", normalizer="none", positional_embedding_type="rotary", dtype=torch.float64
)
GROUPED = dict(n_heads=6, d_model=36, n_key_value_heads=2)


def with_the_term_in_the_ffn(model, bias):
    """Logits of the text without a bias, the prompt's term added to every FFN's output."""
    queries, hooks = {}, []
    for layer, block in enumerate(model.blocks):

        def see(q, hook, layer=layer):
            queries[layer] = q / model.blocks[layer].attn.attn_scale

        def add(ffn, hook, layer=layer, attn=block.attn):
            return ffn_with_state(ffn, queries[layer], bias.b_KV[layer][None], attn.W_O)

        hooks += [(f"blocks.{layer}.attn.hook_rot_q", see), (f"blocks.{layer}.hook_mlp_out", add)]
    return model.run_with_hooks(TEXT, fwd_hooks=hooks)


@pytest.mark.parametrize(("parallel", "changes"), [(True, {}), (True, GROUPED), (False, {})])
@torch.no_grad()
def test_side_by_side_it_is_the_prompt_and_one_after_the_other_it_is_not(parallel, changes):
    model = small_model(parallel_attn_mlp=parallel, **PLAIN_LINEAR, **changes)
    bias = convert_prompt(model, PROMPT[0])
    prompted = model(torch.cat([PROMPT, TEXT], dim=1))[:, PROMPT.shape[1] :]
    error = relative_error(with_the_term_in_the_ffn(model, bias), prompted)
    assert error < LAW if parallel else error > 1e-3
    assert relative_error(model(TEXT), prompted) > 1e-3  # the term matters

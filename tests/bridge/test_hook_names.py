"""Every hook point of attention, under a converted prompt, shows and does what it does in one pass over prompt and text."""

import contextlib

import pytest
import torch
from bridge_models import FAMILIES, LIKE_THE_OTHERS, largest, rounding_of, some_tokens, tiny

from kvlens import KVTransformerBridge, convert_prompt
from kvlens.bridge.softmax import HOOKS

N_PROMPT, N_TEXT = 13, 9
PROMPT, TEXT = some_tokens(2, N_PROMPT), some_tokens(2, N_TEXT, seed=1)
BOTH = torch.cat([PROMPT, TEXT], dim=1)
SWITCHES = ("use_attn_result", "use_split_qkv_input", "use_attn_in")
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in LIKE_THE_OTHERS]


def of_text(x):
    """What belongs to the text, in queries and in keys; no other axis is as long as both texts together."""
    for axis, size in enumerate(x.shape):
        x = x.narrow(axis, N_PROMPT, N_TEXT) if size == N_PROMPT + N_TEXT else x
    return x


def halved(x, hook):
    x = x.clone()
    of_text(x).mul_(0.5)
    return x


@pytest.mark.parametrize("family", [*FAMILIES, *SLOW])
@pytest.mark.filterwarnings("ignore:A forward hook edited hook_scale:UserWarning")  # TransformerLens, of any such edit
@torch.no_grad()
def test_every_name_fires_and_every_edit_acts_as_in_one_pass(family):
    rounding, model = rounding_of(tiny(family)), KVTransformerBridge.boot_transformers(tiny(family))
    bias, logits = convert_prompt(model, PROMPT), model(BOTH)
    check_names(model, bias, rounding)
    for switch in SWITCHES:
        with contextlib.suppress(NotImplementedError):  # TransformerLens has it for some families only
            getattr(model, f"set_{switch}")(True)
            if largest(model(BOTH), logits) < rounding:  # Falcon-H1's split inputs lose its multiplier of keys
                check_names(model, bias, rounding)
        setattr(model.cfg, switch, False)


def check_names(model, bias, rounding):
    logits, of_whole = model.run_with_cache(BOTH)
    with model.kv_bias(bias):
        _, under_bias = model.run_with_cache(TEXT)
    of_layer = ("blocks.1.attn", "blocks.1.mixer")
    whole, ours = ({name for name in cache if name.startswith(of_layer)} for cache in (of_whole, under_bias))
    assert whole <= ours and ours - whole == {f"blocks.1.attn.{name}" for name in HOOKS}
    for name in sorted(whole):
        seen = under_bias[name]
        assert largest(seen, of_text(of_whole[name]).expand_as(seen)) < rounding, name
        expected = model.run_with_hooks(BOTH, fwd_hooks=[(name, halved)])[:, N_PROMPT:]
        with model.kv_bias(bias):
            edited = model.run_with_hooks(TEXT, fwd_hooks=[(name, lambda x, hook: 0.5 * x)])
        if largest(edited, expected) >= rounding:
            # TransformerLens 3.9 loses the offset of Qwen3.5's norms where they are edited, whatever the edit
            assert largest(model.run_with_hooks(BOTH, fwd_hooks=[(name, lambda x, hook: x.clone())]), logits) > rounding, name

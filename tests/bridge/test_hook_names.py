"""Every hook point of attention, under a converted prompt, shows and does what it does in one pass over prompt and text."""

import contextlib
from functools import partial
from itertools import cycle

import pytest
import torch
from bridge_models import FAMILIES, LIKE_THE_OTHERS, N_PROMPT, N_TEXT, PROMPT, TEXT
from precision import LAW, relative_error

from kvlens import convert_prompt
from kvlens.bridge.native import NATIVE_POINTS
from kvlens.bridge.softmax import BETWEEN, HOOKS

BOTH = torch.cat([PROMPT, TEXT], dim=1)
SWITCHES = ("use_attn_result", "use_split_qkv_input", "use_attn_in")
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in LIKE_THE_OTHERS]
CHANGED_BY_A_SWITCH = {("falcon_h1", "use_split_qkv_input"), ("falcon_h1", "use_attn_in")}
"""TransformerLens' split inputs lose Falcon-H1's multiplier of keys, so that the logits are another model's."""
ALONE = {*NATIVE_POINTS, *BETWEEN}
"""Whether one of these is hooked decides how a layer is computed: each is edited in passes of its own, the others together."""


def of_text(x):
    """What belongs to the text, in queries and in keys; no other axis is as long as both texts together."""
    for axis, size in enumerate(x.shape):
        x = x.narrow(axis, N_PROMPT, N_TEXT) if size == N_PROMPT + N_TEXT else x
    return x


def scaled(x, hook, part, by):
    """Every other dimension: a norm would undo what is done to all of them alike."""
    x = x.clone()
    part(x)[..., ::2] *= by
    return x


@pytest.mark.parametrize("family", [*FAMILIES, *SLOW])
@pytest.mark.filterwarnings("ignore:A forward hook edited hook_scale:UserWarning")  # TransformerLens, of any such edit
@pytest.mark.filterwarnings("ignore:run_with_cache. skipped:UserWarning")  # points that a switch turns on
@torch.no_grad()
def test_every_name_fires_and_every_edit_acts_as_in_one_pass(family, bridge_of):
    model = bridge_of(family)
    bias, logits = convert_prompt(model, PROMPT), model(BOTH)
    edited = check_names(model, bias, edited=set())
    for switch in SWITCHES:
        with contextlib.suppress(NotImplementedError):  # TransformerLens has it for some families only
            getattr(model, f"set_{switch}")(True)
            changes_logits = relative_error(model(BOTH), logits) > LAW
            assert changes_logits == ((family, switch) in CHANGED_BY_A_SWITCH)
            edited |= set() if changes_logits else check_names(model, bias, edited)
        setattr(model.cfg, switch, False)


def check_names(model, bias, edited):
    """All names in a layer, which are returned; those of ``edited`` are seen, and not edited again."""
    only = dict(names_filter=lambda name: name.startswith(("blocks.1.attn", "blocks.1.mixer")))
    _, of_whole = model.run_with_cache(BOTH, **only)
    with model.kv_bias(bias):
        _, under_bias = model.run_with_cache(TEXT, **only)
    whole, ours = set(of_whole), set(under_bias)
    assert whole <= ours and ours - whole == {f"blocks.1.attn.{name}" for name in HOOKS}
    for name in sorted(whole):
        seen = under_bias[name]
        assert relative_error(seen, of_text(of_whole[name]).expand_as(seen)) < LAW, name

    def act_alike(names):
        in_whole, under_bias = (
            [(name, partial(scaled, part=part, by=by)) for name, by in zip(names, cycle((0.5, 2)))]
            for part in (of_text, lambda x: x)
        )
        expected = model.run_with_hooks(BOTH, fwd_hooks=in_whole)[:, N_PROMPT:]
        with model.kv_bias(bias):
            return relative_error(model.run_with_hooks(TEXT, fwd_hooks=under_bias), expected) < LAW

    new = whole - edited
    alone = {name for name in new if name.rpartition(".")[2] in ALONE}
    for names in [sorted(new - alone), *([name] for name in sorted(alone))]:
        assert act_alike(names), [name for name in names if not act_alike([name])]
    return whole

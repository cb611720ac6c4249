"""Edges between heads are those of path patching written out pass by pass; what is refused, and what the order is worth."""

import math

import pytest
import torch
from analysis_models import tokens
from pandas.testing import assert_frame_equal
from small_models import sharp

from kvlens.analyses import attribution_by_edge
from kvlens.components import hidden_tokens_keep_positions

EXACT = 1e-10
PROMPT, TEXT, SPAN = tokens(9), tokens(4, seed=1), (2, 5)
OTHER = tokens(3, seed=2)
MODELS = {
    "gqa decay": {},
    "rope after": dict(n_layers=3),
    "softmax, shifted": {},
    "softmax, rotary, grouped": dict(parallel_attn_mlp=True, gated_mlp=True),
    "softmax, norms behind heads": {},
}


def run(model, text, hooks, keep=(), mask=None, prompt=PROMPT):
    """log p of every token behind prompt and text, and what passed some hook points."""
    seen = {}

    def see(x, hook):
        seen[hook.name] = x.clone()

    mask = torch.ones(1, len(prompt) + len(text), dtype=torch.long) if mask is None else mask
    with hidden_tokens_keep_positions(True):
        logits = model.run_with_hooks(
            torch.cat([prompt, text])[None], attention_mask=mask, fwd_hooks=[*hooks, *((name, see) for name in keep)]
        )
    return logits[0].log_softmax(dim=-1), seen


def naive_effect(model, row, *, answer, replaced: bool, through_mlps: bool) -> float:
    """Two passes over all tokens through all layers, by whole tensors."""
    text, n = torch.cat([TEXT, answer[:-1]]), len(answer)
    layers = range(model.cfg.n_layers)
    z = [f"blocks.{layer}.attn.hook_z" for layer in layers]
    mlps = [] if through_mlps else [f"blocks.{layer}.hook_mlp_out" for layer in layers]
    mask, prompt = torch.ones(1, len(PROMPT) + len(text), dtype=torch.long), PROMPT.clone()
    gone = slice(*SPAN)
    if replaced:
        prompt[gone] = OTHER
    else:
        mask[:, gone] = 0
    point = f"blocks.{row.receiver_layer}.attn.hook_{row.input}"
    before, own = run(model, text, [], [*z, *mlps, point])
    _, theirs = run(model, text, [], z, mask, prompt)
    sender = z[row.sender_layer]
    if not replaced:
        theirs[sender][:, gone] = 0
    at = slice(0, len(PROMPT)) if row.where == "prompt" else slice(len(PROMPT), None)
    patched = {name: own[name].clone() for name in (*z, *mlps)}
    patched[sender][:, at, row.sender_head] = theirs[sender][:, at, row.sender_head]
    _, changed = run(model, text, [(name, lambda x, hook: patched[hook.name]) for name in patched], [point])
    mixed = own[point].clone()
    mixed[:, :, row.receiver_head] = changed[point][:, :, row.receiver_head]
    after, _ = run(model, text, [(point, lambda x, hook: mixed)])
    scores = [x[torch.arange(len(x) - n, len(x)), answer].sum() for x in (before, after)]
    return float(scores[0] - scores[1])


@pytest.mark.parametrize("through_mlps", [True, False])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_effect_is_that_of_path_patching_written_out(name, through_mlps):
    model, replaced, answer = sharp(name, **MODELS[name]), through_mlps, torch.tensor([3, 7])
    given = dict(by=[SPAN], answer=answer, replace_by={SPAN: OTHER} if replaced else None, through_mlps=through_mlps)
    table = attribution_by_edge(model, PROMPT, TEXT, n_confirmed=None, **given)
    n, kv, layers = model.cfg.n_heads, model.cfg.n_key_value_heads or model.cfg.n_heads, model.cfg.n_layers
    assert len(table) == math.comb(layers, 2) * 2 * n * (n + 2 * kv) and table["effect"].abs().max() > 0.01
    assert not table.duplicated(["sender_layer", "sender_head", "where", "receiver_layer", "receiver_head", "input"]).any()
    for row in table.iloc[:: max(1, len(table) // 12)].itertuples():
        expected = naive_effect(model, row, answer=answer, replaced=replaced, through_mlps=through_mlps)
        assert row.effect == pytest.approx(expected, abs=EXACT)
    fewer = attribution_by_edge(model, PROMPT, TEXT, n_confirmed=5, **given)
    table.loc[5:, "effect"] = math.nan
    assert_frame_equal(fewer, table, rtol=0, atol=EXACT)


def test_the_estimate_is_the_effect_where_changes_are_small():
    """The estimate's error falls with the square of what the senders write, and the effect in proportion to it."""
    errors = []
    for size in (1e-4, 1e-5):
        model = sharp(attention="softmax", kv_shift=None)
        with torch.no_grad():
            model.blocks[0].attn.W_O.mul_(size)
        table = attribution_by_edge(model, PROMPT, TEXT, by=[SPAN], answer=3, n_confirmed=None)
        errors.append(((table["estimate"] - table["effect"]).abs().max(), table["effect"].abs().max()))
    assert errors[1][0] < 0.02 * errors[0][0] and errors[0][0] < 0.01 * errors[0][1]


def test_a_rival_is_subtracted_and_units_are_separate():
    model = sharp()

    def table(by=(SPAN, (6, 8)), **given):
        found = attribution_by_edge(model, PROMPT, TEXT, by=list(by), n_confirmed=None, **given)
        return found.sort_values(list(found.columns[: found.columns.get_loc("estimate")]), ignore_index=True)

    rival = torch.tensor([4, 1])
    both, answer, other = (table(**given) for given in (dict(answer=3, rival=rival), dict(answer=3), dict(answer=rival)))
    for column in ("estimate", "effect", "whole"):
        assert both[column].tolist() == pytest.approx((answer[column] - other[column]).tolist(), abs=EXACT)
    alone = table([(6, 8)], answer=3)
    assert_frame_equal(alone.assign(unit=1), answer.query("unit == 1").reset_index(drop=True))

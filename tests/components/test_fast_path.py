"""The block, norms and projections of kvlens against the base's, hooked and not."""

import pytest
import torch
from precision import LAW
from small_models import linear_model, relative_error, row_of, small_model, tokens

from kvlens import KVShiftConfig, convert_prompt
from kvlens.base import Attention, TransformerBlock
from kvlens.components import KVAttention, KVBlock

KINDS = {
    **{row: row_of(row) for row in ("rope after", "folded LN", "RMS, gated", "no norm", "no norm, attention only", "gqa")},
    **{row: row_of(row) for row in ("side by side", "split", "attn in")},
    "side by side, no norm": dict(parallel_attn_mlp=True, normalization_type=None),
    "qk norm": dict(use_qk_norm=True),
    "mlp input": dict(use_hook_mlp_in=True),
}


def transformer_lens_blocks(model, monkeypatch):
    """From now on the model's blocks, norms and projections run the base's code."""
    monkeypatch.setattr(KVBlock, "forward", TransformerBlock.forward)
    monkeypatch.setattr(KVAttention, "project", Attention.project)


@pytest.mark.parametrize("pos", [3, 19])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_transformer_lens_blocks(kind, pos, monkeypatch):
    model, text = linear_model(**KINDS[kind]), tokens(2, pos)

    def logits_and_gradients():
        model.zero_grad()
        logits = model(text)
        logits.square().sum().backward()
        return logits.detach(), torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])

    ours = logits_and_gradients()
    with torch.no_grad():
        without_graph = model(text)
    transformer_lens_blocks(model, monkeypatch)
    expected = logits_and_gradients()
    assert relative_error(without_graph, expected[0]) < LAW
    for a, b in zip(ours, expected, strict=True):
        assert relative_error(a, b) < LAW


def test_a_hooked_norm_fires_once_and_an_edit_of_it_reaches_queries_keys_and_values(monkeypatch):
    model, text, seen = linear_model().requires_grad_(False), tokens(2, 11), []
    plain = model(text)
    names = ["blocks.0.ln1.hook_scale", "blocks.1.ln2.hook_normalized"]
    hooked = model.run_with_hooks(text, fwd_hooks=[(name, lambda x, hook: seen.append(hook.name)) for name in names])
    assert relative_error(plain, hooked) < LAW
    assert seen == names  # once each
    hooks = [("blocks.0.ln1.hook_normalized", lambda x, hook: 0.5 * x), ("ln_final.hook_scale", lambda x, hook: 2 * x)]
    ours = model.run_with_hooks(text, fwd_hooks=hooks)
    transformer_lens_blocks(model, monkeypatch)
    assert relative_error(ours, model.run_with_hooks(text, fwd_hooks=hooks)) < LAW
    assert relative_error(ours, plain) > 1e-3  # they act


@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("name", ["phi_q", "b_kv", "b_d", "k_shift_coef", "attn_scores", "pattern"])
def test_a_torch_hook_on_a_hook_point_is_called_and_its_edit_counts(name, attention):
    model = (linear_model if attention == "linear" else small_model)(kv_shift=KVShiftConfig()).requires_grad_(False)
    text, seen = tokens(1, 5), []
    with model.kv_bias(convert_prompt(model, tokens(1, 7)[0])):
        plain = model(text)
        handle = model.hook_dict[f"blocks.1.attn.hook_{name}"].register_forward_hook(
            lambda module, args, out: (seen.append(1), 0.5 + out.flip(-1))[1]
        )
        edited = model(text)
        handle.remove()
        again = model(text)
    assert seen == [1]
    assert relative_error(edited, plain) > 1e-3  # it acts
    assert torch.equal(again, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_may_keep_the_last_positions_only(kind):
    model, text = linear_model(**KINDS[kind]).requires_grad_(False), tokens(3, 11)
    name = f"blocks.{model.cfg.n_layers - 1}.{model.blocks[-1].cut_point()}"
    last = model.run_with_hooks(text, fwd_hooks=[(name, lambda x, hook: x[:, -3:])])
    assert relative_error(last, model(text)[:, -3:]) < LAW


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("shift", [None, KVShiftConfig()])
def test_a_pass_leaves_nothing_in_the_layer(attention, shift):
    model = small_model(n_heads=6, n_key_value_heads=2, kv_shift=shift, attention=attention)
    held = [dict(vars(block.attn)) for block in model.blocks]
    with torch.no_grad():
        model(tokens(1, 9))
    for layer, before in zip(model.blocks, held, strict=True):
        assert vars(layer.attn).keys() == before.keys()
        assert all(vars(layer.attn)[name] is value for name, value in before.items())

"""The block, norms and projections of kvlens against the base's, hooked and not; torch's kernel, which runs wherever scores and
pattern are not hooked, against the base's steps.
"""

import contextlib

import pytest
import torch
from precision import LAW, close
from small_models import (
    ATTENTION_VARIANTS,
    BLOCKS,
    SOFTMAX,
    by_steps,
    linear_model,
    model_of,
    relative_error,
    row_of,
    small_model,
    tokens,
)

from kvlens import KVShiftConfig, convert_prompt
from kvlens.base import Attention, TransformerBlock
from kvlens.components import KVAttention, KVBlock

KINDS = {
    **{row: row_of(row) for row in ("rope after", "folded LN", "RMS, gated", "no norm", "no norm, attention only", "gqa")},
    **{row: row_of(row) for row in ("side by side", "split", "attn in", "norms behind heads")},
    "shortformer": dict(attention="softmax", **BLOCKS["shortformer"]),
    "norms follow": dict(
        attention="softmax", original_architecture="Olmo2ForCausalLM", normalization_type="RMS", kv_shift=None
    ),
    "side by side, no norm": dict(parallel_attn_mlp=True, normalization_type=None),
    "qk norm": dict(use_qk_norm=True),
    "mlp input": dict(use_hook_mlp_in=True),
}


OVERRIDDEN = [(KVBlock, TransformerBlock, "attention_inputs"), (KVAttention, Attention, "project")]


@contextlib.contextmanager
def steps_of_the_base(model):
    """Inside, blocks and projections run the base's code, and norms are computed in steps, since they are hooked."""
    hooks = [(lambda name: name.endswith("hook_scale"), lambda x, hook: None)]
    with pytest.MonkeyPatch.context() as patch, model.hooks(fwd_hooks=hooks):
        for ours, base, method in OVERRIDDEN:
            assert method in vars(ours)  # of an inherited one there would be nothing to compare
            patch.setattr(ours, method, getattr(base, method))
        yield


@pytest.mark.parametrize("pos", [3, 19])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_transformer_lens_blocks(kind, pos):
    model, text = linear_model(**KINDS[kind]), tokens(2, pos)

    def logits_and_gradients():
        model.zero_grad()
        logits = model(text)
        logits.square().sum().backward()
        return logits.detach(), torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])

    ours = logits_and_gradients()
    with torch.no_grad():
        without_graph = model(text)
    with steps_of_the_base(model):
        expected = logits_and_gradients()
    assert relative_error(without_graph, expected[0]) < LAW
    for a, b in zip(ours, expected, strict=True):
        assert relative_error(a, b) < LAW


def test_a_hooked_norm_fires_once_and_an_edit_of_it_reaches_queries_keys_and_values():
    model, text, seen = linear_model().requires_grad_(False), tokens(2, 11), []
    plain = model(text)
    names = ["blocks.0.ln1.hook_scale", "blocks.1.ln2.hook_normalized"]
    hooked = model.run_with_hooks(text, fwd_hooks=[(name, lambda x, hook: seen.append(hook.name)) for name in names])
    assert relative_error(plain, hooked) < LAW
    assert seen == names  # once each
    hooks = [("blocks.0.ln1.hook_normalized", lambda x, hook: 0.5 * x), ("ln_final.hook_scale", lambda x, hook: 2 * x)]
    ours = model.run_with_hooks(text, fwd_hooks=hooks)
    with steps_of_the_base(model):
        assert relative_error(ours, model.run_with_hooks(text, fwd_hooks=hooks)) < LAW
    assert relative_error(ours, plain) > 1e-3  # they act


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_of_what_attention_reads_acts_as_in_the_base(kind):
    model, text = linear_model(**KINDS[kind]).requires_grad_(False), tokens(2, 11)
    ends = ("hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input", "ln1.hook_normalized", "hook_resid_pre")
    plain = model(text)
    with steps_of_the_base(model):
        names = model.run_with_cache(text)[1]
    for name in (name for name in names if name.startswith("blocks.1") and name.endswith(ends)):
        hooks = [(name, lambda x, hook: x * torch.linspace(0.5, 2, x.shape[-1]))]
        ours = model.run_with_hooks(text, fwd_hooks=hooks)
        with steps_of_the_base(model):
            assert relative_error(ours, model.run_with_hooks(text, fwd_hooks=hooks)) < LAW
        assert relative_error(ours, plain) > 1e-3  # it acts


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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_may_keep_the_last_positions_only(kind):
    model, text = linear_model(**KINDS[kind]).requires_grad_(False), tokens(3, 11)
    name = f"blocks.{model.cfg.n_layers - 1}.{model.blocks[-1].cut_point()}"
    last = model.run_with_hooks(text, fwd_hooks=[(name, lambda x, hook: x[:, -3:])])
    assert relative_error(last, model(text)[:, -3:]) < LAW


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_in_the_last_block_sees_all_positions(kind):
    model, text, seen = linear_model(**KINDS[kind]).requires_grad_(False), tokens(3, 11), []
    expected = model(text)[:, -3:]
    assert relative_error(model.logits_on(text, 3), expected) < LAW
    with model.hooks(fwd_hooks=[(f"blocks.{model.cfg.n_layers - 1}.hook_attn_out", lambda x, hook: seen.append(x.shape[1]))]):
        assert relative_error(model.logits_on(text, 3), expected) < LAW
    assert seen == [11]


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


VARIANTS = {
    **{name: changes for name, changes in SOFTMAX.items() if name != "soft-capped"},
    "ungrouped": dict(n_heads=6, n_key_value_heads=2, ungroup_grouped_query_attention=True),
    "shortformer": BLOCKS["shortformer"],
    "shortformer, split": dict(positional_embedding_type="shortformer", use_split_qkv_input=True),
    "log-n": dict(use_logn_attn=True, train_seq_length=4),
    "bidirectional": dict(attention_dir="bidirectional"),
}
NOT_BY_KERNEL = {
    "linear": dict(attention="linear"),
    "soft-capped": dict(attn_scores_soft_cap=5.0),
    "negative": dict(attention_variant=ATTENTION_VARIANTS["negative per query"]),
    "own share": dict(attention_variant=ATTENTION_VARIANTS["one step"]),
    "ridge": dict(attention_variant=ATTENTION_VARIANTS["ridge"]),
}


def learned(name="learned", **changes):
    return model_of("softmax", "learned", **VARIANTS[name], **changes).eval()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_with_and_without_padding_and_gradients_agree(name, fused_calls):
    model, x = learned(name).requires_grad_(True), tokens(3, 11)
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, :4], mask[2, 8:] = 0, 0

    def found():
        model.zero_grad()
        model(x, return_type="loss").backward()
        with torch.no_grad():
            return (
                model(x),
                model(x, attention_mask=mask),
                {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
            )

    logits, padded, gradients = found()
    assert fused_calls
    fused_calls.clear()
    with by_steps(model):
        expected, expected_padded, expected_gradients = found()
    assert not fused_calls
    close(logits, expected)
    close(padded[mask.bool()], expected_padded[mask.bool()])
    assert bool(padded.isfinite().all())
    whole = max(x.norm() for x in expected_gradients.values())
    for n, gradient in expected_gradients.items():  # that of b_K is zero by theory
        assert (gradients[n] - gradient).norm() <= 1e-11 * whole, n


@pytest.mark.parametrize("which", ["fwd", "bwd"])
@pytest.mark.parametrize("name", ["attn_scores", "pattern"])
def test_a_hooked_layer_alone_computes_scores_and_pattern(name, which, fused_calls):
    model, x = learned(), tokens(2, 9)
    hooks = {f"{which}_hooks": [(f"blocks.1.attn.hook_{name}", lambda x, hook: None)]}
    expected = model(x)
    assert len(fused_calls) == 2
    fused_calls.clear()
    close(model.run_with_hooks(x, **hooks), expected)
    assert len(fused_calls) == 1
    fused_calls.clear()
    hooks = [(f"blocks.0.attn.hook_{name}", lambda x, hook: torch.zeros_like(x))]
    assert relative_error(model.run_with_hooks(x, fwd_hooks=hooks), expected) > 1e-3
    assert len(fused_calls) == 1


@pytest.mark.parametrize("name", ["z", "q", "resid_post", "mlp_out"])
def test_other_hooks_leave_the_kernel(name, fused_calls):
    model = learned()
    model.run_with_cache(tokens(2, 9), names_filter=lambda point: point.endswith(f"hook_{name}"))
    assert len(fused_calls) == 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("grad", [False, True], ids=["no gradient", "gradient"])
@pytest.mark.parametrize("n_queries", [1, 7])
@pytest.mark.parametrize("name", ["learned", "rotary, grouped", "alibi", "local", "sinks"])
def test_the_normalizer_that_is_hooked_under_a_bias_is_that_of_the_steps(name, n_queries, grad, fused_calls):
    model, x = learned(name), tokens(2, 12 + n_queries)
    bias, found = convert_prompt(model, x[:, :12]), []

    def seen():
        hooks = [(lambda name: name.endswith("hook_normalizer"), lambda n, hook: found.append(n.detach()))]
        with torch.set_grad_enabled(grad), model.kv_bias(bias), model.hooks(fwd_hooks=hooks):
            return model(x[:, 12:], attention_mask=torch.ones(2, n_queries, dtype=torch.long))

    fused_calls.clear()
    logits = seen()
    assert grad or fused_calls
    with by_steps(model):
        close(logits, seen())
    assert len(found) == 2 * model.cfg.n_layers
    for one, other in zip(found[: model.cfg.n_layers], found[model.cfg.n_layers :], strict=True):
        close(one, other)


@pytest.mark.parametrize("name", NOT_BY_KERNEL)
def test_what_the_kernel_cannot_compute_has_its_own_form(name, fused_calls):
    written(small_model(**NOT_BY_KERNEL[name]), tokens(2, 7))
    assert not fused_calls


def written(model, x, **options):
    return model.generate(x, max_new_tokens=5, do_sample=False, stop_at_eos=False, verbose=False, **options)


@pytest.mark.parametrize("use_past_kv_cache", [True, False])
@pytest.mark.parametrize("name", ["learned", "rotary, grouped", "alibi", "shifted", "local", "sinks", "shortformer"])
def test_generated_text_is_the_same(name, use_past_kv_cache, fused_calls):
    model, x = learned(name), tokens(3, 7)
    new = written(model, x, use_past_kv_cache=use_past_kv_cache)
    assert len(fused_calls) == 2 * 5  # layers, tokens
    with by_steps(model):
        assert torch.equal(written(model, x, use_past_kv_cache=use_past_kv_cache), new)


@pytest.mark.parametrize("name", ["shortformer", "shortformer, split"])
def test_a_prompt_is_converted_where_keys_alone_have_positions(name):
    model, x = learned(name), tokens(2, 19)
    expected = model(x)[:, 12:]
    with model.kv_bias(convert_prompt(model, x[:, :12])):
        close(model(x[:, 12:]), expected)
        close(model.logits_on(x[:, 12:], 3), expected[:, -3:])

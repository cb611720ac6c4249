"""Prompts as changes of the weights: where the papers claim exactness, in float64, against weights that are really changed."""

import copy

import pytest
import torch
from small_models import linear_model, relative_error, small_model, tokens

from kvlens import KVLensError, KVShiftConfig, convert_prompt
from kvlens.conversion import distill_prompt, distillation, thought_matrices, thought_vectors, token_patches

F64 = dict(dtype=torch.float64)
LLAMA = dict(F64, gated_mlp=True, normalization_type="RMS", positional_embedding_type="rotary", act_fn="silu")
LLAMA |= dict(n_heads=6, n_key_value_heads=3)
KINDS = {
    "gpt2": lambda: small_model(**F64),
    "llama": lambda: small_model(**LLAMA),
    "gemma": lambda: small_model(**LLAMA, use_normalization_before_and_after=True),
    "parallel": lambda: small_model(**F64, parallel_attn_mlp=True),
    "no norm": lambda: small_model(**F64, normalization_type=None),
    "shifted": lambda: small_model(**LLAMA, kv_shift=KVShiftConfig(window=1)),
    "linear": linear_model,
}
PROMPT, TEXTS = tokens(1, 11)[0], tokens(3, 7, seed=1)


def after_prompt(model, prompt=PROMPT, texts=TEXTS):
    with torch.no_grad():
        return model(torch.cat([prompt.expand(len(texts), -1), texts], dim=1))[:, len(prompt) :]


def patches_of(model, texts=TEXTS, prompt=PROMPT):
    return token_patches(model, convert_prompt(model, prompt), texts)


def read(model, texts=TEXTS):
    with torch.no_grad():
        return model(texts)


@pytest.mark.parametrize("kind", KINDS)
def test_token_patches_replace_the_prompt_exactly(kind):
    model = KINDS[kind]()
    before, expected = read(model), after_prompt(model)
    patches = patches_of(model)
    with patches.attached(model):
        assert relative_error(read(model), expected) < 1e-12
    assert torch.equal(read(model), before) and relative_error(before, expected) > 1e-3  # far above rounding
    assert patches.num_parameters == 3 * model.cfg.n_layers * TEXTS.numel() * model.cfg.d_model


def really_patched(model, patches, layers, text, pos):
    """A copy whose weights have the patch of one token."""
    changed = copy.deepcopy(model)
    for layer in layers:
        mlp, matrix = changed.blocks[layer].mlp, patches.matrix(layer, text, pos)
        for name in ("W_in", "W_gate"):
            if hasattr(mlp, name):
                W = getattr(mlp, name)
                W.data += matrix @ W.data
        mlp.b_out.data += patches.offsets[layer, text, pos]
    return changed


@pytest.mark.parametrize("kind", ["gpt2", "llama", "parallel", "no norm", "shifted", "linear"])
def test_the_first_block_with_patched_weights_is_the_prompted_one(kind):
    """Dherin et al., th. 2.2 and B.2, and Goldwaser et al.: one token, one block, weights changed by a rank-1 matrix."""
    model = KINDS[kind]()
    patches = patches_of(model)
    assert torch.linalg.matrix_rank(patches.matrix(0, 1, 4)) == 1
    changed = really_patched(model, patches, [0], 1, 4)
    name = "blocks.0.hook_resid_post"
    with torch.no_grad():
        out = changed.run_with_cache(TEXTS, names_filter=[name])[1][name][1, 4]
        whole = torch.cat([PROMPT.expand(len(TEXTS), -1), TEXTS], dim=1)
        expected = model.run_with_cache(whole, names_filter=[name])[1][name][1, len(PROMPT) + 4]
    assert relative_error(out, expected) < 1e-12


@pytest.mark.parametrize("kind", ["gpt2", "llama", "parallel", "linear"])
def test_block_by_block_the_patched_weights_are_the_prompted_model(kind):
    """A text of one token: its patches are changes of the weights of all layers at once."""
    model, texts = KINDS[kind](), TEXTS[:, :1]
    changed = really_patched(model, patches_of(model, texts), range(2), 2, 0)
    assert relative_error(read(changed, texts)[2], after_prompt(model, texts=texts)[2]) < 1e-12


def test_what_is_attached_stays():
    """Patches on top of the bias of the prompt's beginning: both together are the whole prompt."""
    model = small_model(**LLAMA)
    expected, whole = after_prompt(model), convert_prompt(model, PROMPT)
    with model.kv_bias(convert_prompt(model, PROMPT[:4])):
        before = read(model)
        with token_patches(model, whole, TEXTS).attached(model):
            assert relative_error(read(model), expected) < 1e-12
        assert torch.equal(read(model), before)


def test_one_token_leaves_nothing_to_average():
    model, texts = KINDS["llama"](), TEXTS[:1, :1]
    patches, expected = patches_of(model, texts), after_prompt(model, texts=texts)
    for thought in (thought_vectors(patches), thought_matrices(patches, ridge=1e-12)):
        with thought.attached(model):
            assert relative_error(read(model, texts), expected) < 1e-9


def test_thought_matrices_are_the_least_squares():
    model = small_model(**F64)
    patches = patches_of(model, tokens(9, 12, seed=5))
    thought, x = thought_matrices(patches, ridge=1e-3), patches.inputs.flatten(1, 2)
    for layer in range(2):
        damping = (1e-3 * x[layer].square().sum() / x.shape[-1]).sqrt() * torch.eye(x.shape[-1], dtype=x.dtype)
        stacked = torch.cat([x[layer], damping])
        target = torch.cat([patches.changes[layer].flatten(0, 1), torch.zeros_like(damping)])
        assert torch.allclose(thought.matrices[layer], torch.linalg.lstsq(stacked, target).solution, atol=1e-9)
    assert thought.num_parameters == 2 * (30 * 30 + 30) and thought_vectors(patches).num_parameters == 2 * 2 * 30


def test_patches_refuse_other_texts_models_and_prompts():
    model = small_model(**F64)
    patches = patches_of(model)
    with patches.attached(model), pytest.raises(KVLensError):
        model(TEXTS[:, :5])
    with pytest.raises(KVLensError), patches.attached(linear_model()):
        pass
    with pytest.raises(KVLensError):
        patches_of(model, prompt=tokens(2, 5))
    blind = small_model(**F64)
    blind.blocks[0].ln2.w.data.zero_(), blind.blocks[0].ln2.b.data.zero_()
    expected = after_prompt(blind)
    assert relative_error(read(blind), expected) > 1e-3  # far above rounding
    with patches_of(blind).attached(blind):  # an MLP that always reads 0 needs no patch
        assert relative_error(read(blind), expected) < 1e-12


@pytest.mark.parametrize("rank", [2, None])
def test_distilled_weights_are_changes_of_the_weights(rank, monkeypatch):
    model = small_model(**LLAMA)
    bias, texts, parameters = convert_prompt(model, PROMPT), tokens(9, 6, seed=4), dict(model.named_parameters())
    found = distill_prompt(model, bias, texts, rank=rank, steps=12, learning_rates=[1e-3, 1e-2])
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert all(p.grad is None and p.requires_grad for p in parameters.values())
    merged = copy.deepcopy(model)
    stored = 0
    for name, factors in found.weights.changes.items():
        weight = merged.get_parameter(name)
        d_in = 30 if name.endswith(("W_Q", "W_K", "W_V", "W_in", "W_gate")) else weight.numel() // 30
        stored += weight.numel() if rank is None else 2 * (d_in + weight.numel() // d_in)
        flat = factors[0] if rank is None else factors[0] @ factors[1]
        if weight.ndim == 3 and not name.endswith("W_O"):  # by hand: head by head
            for head in range(len(weight)):
                weight.data[head] += flat[:, 6 * head : 6 * head + 6]
        else:
            weight.data += flat.view(weight.shape)
    assert len(found.weights.changes) == 2 * 7 and found.weights.num_parameters == stored
    with found.weights.attached(model):
        assert relative_error(read(model), read(merged)) < 1e-14
    old = after_prompt(model, texts=texts[-1:]).log_softmax(-1)
    loss = [float((old.exp() * (old - read(m, texts[-1:]).log_softmax(-1))).sum(-1).mean()) for m in (merged, model)]
    assert loss[0] == pytest.approx(found.held_out_loss, rel=1e-9)
    assert loss[0] < loss[1]
    assert found.passes == pytest.approx((9 * 6 + 2 * 6 * (12 * 8 + 1)) / 11)
    monkeypatch.setattr(distillation, "_loss", lambda *args: (_ for _ in ()).throw(RuntimeError))
    with pytest.raises(RuntimeError):
        distill_prompt(model, bias, texts, rank=rank, steps=1, learning_rates=[1e-3])
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("objective", ["pairs", "distributions"])
def test_chosen_parameters_learn_from_answers_or_distributions(objective):
    model = small_model(**F64)
    bias, texts = convert_prompt(model, PROMPT), tokens(9, 8, seed=4)
    which = lambda name: ".attn.W_V" in name or ".attn.b_V" in name  # noqa: E731
    learning = dict(rank=None, steps=12, learning_rates=[1e-2], which=which, objective=objective)
    found = distill_prompt(model, bias, texts, **learning)
    changed = found.weights.merged(model)
    differ = {name for name, p in model.named_parameters() if not torch.equal(p, changed.get_parameter(name))}
    assert differ == {f"blocks.{layer}.attn.{name}" for layer in range(model.cfg.n_layers) for name in ("W_V", "b_V")}
    assert differ == set(found.weights.changes) and not any(p.requires_grad for p in changed.parameters())
    with found.weights.attached(model):
        torch.testing.assert_close(model(texts), changed(texts), rtol=1e-13, atol=1e-13)
    assert len(found.losses) == 12 and found.losses[-3:].mean() < found.losses[:3].mean()
    assert found.held_out_loss == float(found.losses[-1])  # of one rate, which reads every text
    new = model(texts).log_softmax(-1)  # of the first step, on all nine texts
    answers = [-new[t, i - 1, texts[t, i]] for t in range(9) for i in range(distillation.QUERY, 8)]
    old = after_prompt(model, texts=texts).log_softmax(-1)
    kl = torch.nn.functional.kl_div(new, old, log_target=True, reduction="none").sum(-1).mean()
    expected = torch.stack(answers).mean() if objective == "pairs" else kl
    found = distillation._loss(model, {}, texts, None if objective == "pairs" else old)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)


def test_distillation_refuses_what_it_cannot_learn_from(monkeypatch):
    model = small_model()
    bias = convert_prompt(model, PROMPT)
    with pytest.raises(KVLensError):
        distill_prompt(model, bias, TEXTS, rank=1, steps=1, learning_rates=[1e38])
    finite = distillation._log_probs
    monkeypatch.setattr(distillation, "_log_probs", lambda *args: finite(*args) * torch.nan)
    with pytest.raises(KVLensError, match="not finite"):
        distill_prompt(model, bias, TEXTS, rank=1, steps=1, learning_rates=[1e-3])

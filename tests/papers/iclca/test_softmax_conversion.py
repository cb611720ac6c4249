"""``softmax-conversion``: measurements against references, unique names of ways, and verdicts in both directions."""

import pytest
import torch

from kvlens import KVLensError, convert_prompt
from kvlens.model import HookedKVTransformer
from kvlens.papers.iclca import softmax_conversion
from kvlens.papers.iclca.logits import context_of, prompted_logits, writing_model
from kvlens.papers.iclca.softmax_conversion import DISTILLED, ways

TINY = softmax_conversion.softmax_conversion.scales["tiny"]


@pytest.fixture(scope="module")
def model():
    return writing_model(TINY).to(torch.float64, print_details=False)


def test_contexts_are_the_models_own_and_one_draw_by_seed(model):
    settings = {**TINY, "n_prompt": 12, "n_text": 7, "n_texts": 3}
    prompt, texts = context_of(model, settings, seed=5)
    assert prompt.shape == (12,) and texts.shape == (3, 7) and prompt[0] == model.tokenizer.bos_token_id
    again, other = (context_of(model, settings, seed=seed)[0] for seed in (5, 6))
    assert torch.equal(prompt, again) and not torch.equal(prompt, other)


def test_every_key_has_no_error_and_no_key_has_the_prompts_whole_effect(model):
    prompt, texts = context_of(model, TINY, seed=0)
    exact = convert_prompt(model, prompt)
    measured = softmax_conversion._measure(model, prompt, texts, exact)
    assert measured["relative_error"] < 1e-11 and abs(measured["kl"]) < 1e-11 and measured["argmax_agrees"] == 1
    dropped = softmax_conversion._measure(model, prompt, texts, exact.zero_like())
    assert dropped["relative_error"] > 0.05 and dropped["kl"] > 0.01
    old = model(torch.cat([prompt, texts[0]])[None])[0, len(prompt) :].double()
    new = softmax_conversion._measure(model, prompt, texts[:1], exact.select(layers=[0]))
    with model.kv_bias(exact.select(layers=[0])):
        by_hand = model(texts[:1])[0].double()
    assert new["relative_error"] == pytest.approx(float(((by_hand - old).norm(dim=1) / old.norm(dim=1)).mean()), rel=1e-11)


def test_a_window_keeps_the_first_keys_and_the_last_ones(model):
    exact = convert_prompt(model, torch.arange(3, 19))
    window = softmax_conversion._window(exact, 6)
    kept = [0, 1, 2, 3, 14, 15]
    assert torch.equal(window.features.keys, exact.features.keys[..., kept, :])
    assert torch.equal(window.b_KV, exact.b_KV[..., kept, :])
    assert softmax_conversion._window(exact, 3).d_phi == 3


def test_no_two_rows_have_one_name():
    for settings in softmax_conversion.softmax_conversion.scales.values():
        names = [(way.method, way.size, way.n_continuations) for way in ways(settings, seed=0)]
        assert len(set(names)) == len(names)


def test_models_that_cannot_write_their_own_prompts_are_refused():
    with pytest.raises(KVLensError, match="must have softmax attention.* docs-linear has linear attention"):
        writing_model({**TINY, "model": "docs-linear"})


def test_checkpoints_of_llama2c_are_read(outside_data):
    source = {"model": str(outside_data / "stories260K.bin"), "tokenizer": str(outside_data / "tok512.bin")}
    model = writing_model({**TINY, **source})
    assert isinstance(model, HookedKVTransformer) and model.cfg.n_layers == 5
    prompt, _ = context_of(model, TINY, seed=0)
    assert prompt[0] == 1


def test_distillation_is_measured_on_the_same_texts_at_its_whole_price():
    model = writing_model(TINY)
    prompt, texts = context_of(model, TINY, seed=0)
    rows = list(softmax_conversion._distilled(model, prompt, texts, TINY, 0, {}))
    assert [row["method"] for row in rows] == list(DISTILLED.values())
    n_weights = sum(p.numel() for p in model.parameters())
    assert all(row["stored_numbers"] == n_weights and row["fit_steps"] == 2 for row in rows)
    old = prompted_logits(model, prompt, texts)
    assert softmax_conversion.logit_errors(old, old) == {"relative_error": 0.0, "kl": 0.0, "argmax_agrees": 1.0}
    assert list(softmax_conversion._distilled(model, prompt, texts, {**TINY, "distil_steps": 0}, 0, {})) == []


def test_steps_are_counted_to_the_loss_at_the_end():
    """Twenty steps, means over two: 0.35 is first reached by the mean of steps 3 and 4."""
    losses = torch.tensor([1.0, 0.8, 0.4, 0.2, *[0.1] * 16])
    assert softmax_conversion.smoothed(losses)[:3].tolist() == pytest.approx([0.9, 0.6, 0.3])
    assert softmax_conversion.share_of_steps(losses, 0.35) == 4 / 20
    assert softmax_conversion.share_of_steps(losses, 0.1) == pytest.approx(6 / 20)
    assert softmax_conversion.share_of_steps(losses, 0.05) == 1.0


def test_fine_tuning_from_the_exact_bias_has_nothing_to_do():
    model = writing_model(TINY)
    prompt, texts = context_of(model, TINY, seed=0)
    name, *_ = softmax_conversion.FROM.values()
    *_, row = softmax_conversion._distilled(model, prompt, texts, TINY, 0, {name: convert_prompt(model, prompt)})
    assert row["method"] == name and row["steps_share"] == 1 / 2 and row["kl"] < 1e-3  # of two steps, each with its own mean
    assert model.attached_kv_bias is None

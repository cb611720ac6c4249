"""Context distillation as a baseline: what is learned, from what, at what cost; and its rows in ``softmax-conversion``."""

import pandas as pd
import pytest
import torch

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVLensError, convert_prompt
from kvlens.experiments.iclca import softmax_conversion
from kvlens.experiments.iclca.context_distillation import OBJECTIVES, QUERY, _loss, distil, prompted_logits
from kvlens.experiments.iclca.softmax_conversion import DISTILLED, EXPERIMENT, GREEDY, SIZE

TINY = EXPERIMENT.scales["tiny"]


@pytest.fixture(scope="module")
def model():
    cfg = HookedKVTransformerConfig(
        n_layers=2, d_model=12, d_head=4, n_heads=3, n_ctx=40, d_vocab=17, act_fn="gelu", seed=3, device="cpu"
    )
    model = HookedKVTransformer(cfg).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter *= 1 if "norm" in name else 10  # far from uniform predictions
    return model


@pytest.fixture(scope="module")
def prompt_and_texts(model):
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(17, (11,), generator=generator)
    texts = softmax_conversion.sampled(model, prompt.expand(48, -1), 9, generator)[:, 11:]
    return prompt, texts


def test_the_prompted_model_is_the_one_with_the_prompts_bias(model, prompt_and_texts):
    prompt, texts = prompt_and_texts
    expected = prompted_logits(model, prompt, texts)
    with model.kv_bias(convert_prompt(model, prompt)):
        torch.testing.assert_close(model(texts), expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def test_the_losses_by_hand(model, prompt_and_texts):
    prompt, texts = prompt_and_texts
    log_new, old = model(texts[:3]).log_softmax(-1), prompted_logits(model, prompt, texts[:3])
    answers = [-log_new[t, i - 1, texts[t, i]] for t in range(3) for i in range(QUERY, 9)]
    torch.testing.assert_close(_loss(model, texts[:3], None), torch.stack(answers).mean())
    expected = torch.nn.functional.kl_div(log_new, old.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean()
    torch.testing.assert_close(_loss(model, texts[:3], old), expected)
    assert expected > 0.01


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_copy_learns_the_prompt_and_the_model_stays(model, prompt_and_texts, objective):
    prompt, texts = prompt_and_texts
    before = {name: value.clone() for name, value in model.state_dict().items()}
    is_free = lambda name: ".attn.W_V" in name or ".attn.b_V" in name  # noqa: E731
    found = distil(model, prompt, texts, steps=40, learning_rate=3e-2, objective=objective, is_free=is_free)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    changed = {name for name, value in found.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"blocks.{layer}.attn.{name}" for layer in range(2) for name in ("W_V", "b_V")}
    assert found.n_changed == 2 * (3 * 12 * 4 + 3 * 4)
    assert len(found.losses) == 40 and found.losses[-5:].mean() < 0.9 * found.losses[:5].mean()
    assert not any(p.requires_grad for p in [*model.parameters(), *found.model.parameters()])
    again = distil(model, prompt, texts, steps=40, learning_rate=3e-2, objective=objective, is_free=is_free)
    assert torch.equal(again.losses, found.losses)


def test_what_it_learned_holds_on_other_texts(model, prompt_and_texts):
    prompt, texts = prompt_and_texts
    found = distil(model, prompt, texts[:32], steps=60, learning_rate=1e-2)
    unseen, old = texts[32:], prompted_logits(model, prompt, texts[32:])
    assert _loss(found.model, unseen, old) < 0.8 * _loss(model, unseen, old)


@pytest.mark.unhooked
def test_an_objective_that_does_not_exist(model, prompt_and_texts):
    with pytest.raises(KVLensError, match="did you mean 'pairs'"):
        distil(model, *prompt_and_texts, steps=1, learning_rate=1e-3, objective="pair")


def table(ratio: float, contexts: int = 6) -> pd.DataFrame:
    names = [(GREEDY, 4, 9), *((method, 0, 10) for method in DISTILLED.values())]
    return pd.DataFrame(
        {**dict(zip(SIZE, name, strict=True)), "context": c, "kl": (ratio if name[0] == GREEDY else 1.0) * (1 + 0.1 * c)}
        for name in names
        for c in range(contexts)
    )


@pytest.mark.parametrize(("ratio", "contexts", "holds"), [(0.5, 6, True), (1.5, 6, False), (0.5, 3, None)])
def test_the_verdict_goes_either_way(ratio, contexts, holds):
    found = list(softmax_conversion.compare_with_distillation(table(ratio, contexts), TINY))
    assert [c.holds for c in found] == [holds] * 2 and all(c.ours == pytest.approx(ratio) for c in found)


def test_it_is_measured_on_the_same_texts_at_its_whole_price():
    model = softmax_conversion.writing_model(TINY)
    prompt, texts = softmax_conversion.context_of(model, TINY, seed=0)
    rows = list(softmax_conversion._distilled(model, prompt, texts, TINY, seed=0))
    assert [row["method"] for row in rows] == list(DISTILLED.values())
    n_weights = sum(p.numel() for p in model.parameters())
    assert all(0.5 * n_weights < row["stored_numbers"] <= n_weights and row["fit_steps"] == 2 for row in rows)
    old = prompted_logits(model, prompt, texts)
    assert softmax_conversion.logit_errors(old, old) == {"relative_error": 0.0, "kl": 0.0, "argmax_agrees": 1.0}
    assert list(softmax_conversion._distilled(model, prompt, texts, {**TINY, "distil_steps": 0}, seed=0)) == []

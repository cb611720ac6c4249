"""The one loop of gradient steps, which is known by hand, and the effects of heads on the logits, by finite differences."""

import math
from functools import partial

import pytest
import torch
from small_models import peaked, sharp, tokens

from kvlens import HookedKVTransformer, convert_prompt
from kvlens.conversion import Landmark, gradients
from kvlens.conversion.gradients import descend, effects_on_logits, logit_metrics
from kvlens.papers.iclca.logits import context_of, prompted_logits


def steps_of(loss_on, free, **changes):
    how = dict(n_rows=5, rows_per_step=3, steps=4, learning_rate=0.1, generator=torch.Generator().manual_seed(2))
    return [loss.item() for loss in descend([free], loss_on, **{**how, **changes})]


def test_a_constant_slope_moves_by_the_rate_which_falls_along_a_cosine():
    """Adam under a constant gradient moves by the learning rate each step: 0.1 (1 + cos(pi t / steps)) / 2 at step t."""
    at = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    losses = steps_of(lambda rows: 2 * at, at)
    rates = [0.05 * (1 + math.cos(math.pi * t / 4)) for t in range(4)]
    places = [1.0 - sum(rates[:t]) for t in range(5)]
    # Adam's epsilon of 1e-8 beside a gradient of 2: a share of 5e-9 of each rate
    assert losses == pytest.approx([2 * place for place in places[:4]], abs=1e-8)
    assert abs(at.item() - places[4]) < 1e-8


def test_rows_are_drawn_without_replacement_and_again_each_step():
    at, read = torch.zeros(5, requires_grad=True), []

    def loss_on(rows):
        read.append(rows.tolist())
        return at[rows].sum()

    steps_of(loss_on, at)
    again = torch.Generator().manual_seed(2)
    assert read == [torch.randperm(5, generator=again)[:3].tolist() for _ in range(4)]
    assert all(len(set(rows)) == 3 for rows in read) and read[0] != read[1]
    read.clear()
    steps_of(loss_on, at, rows_per_step=9)
    assert all(sorted(rows) == [0, 1, 2, 3, 4] for rows in read)


KINDS = {"softmax, rotary, grouped": {}, "softmax, alibi": dict(attn_scores_soft_cap=0.8)}
TEXTS = dict(reference="own", n_continuations=6, continuation_length=5, n_held_out=0)
STEP = 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_the_effect_of_an_output_is_what_a_small_change_of_it_does(kind):
    model, texts = sharp(kind, gain=1, **KINDS[kind]), tokens(3, 7, seed=1)
    bias = convert_prompt(model, tokens(1, 11)[0])
    found = effects_on_logits(model, bias, texts, [3, 4, 5])
    with model.kv_bias(bias), torch.no_grad():
        logits = model(texts)
        generators = [torch.Generator().manual_seed(seed) for seed in (3, 4, 5)]
        direction = torch.stack([torch.randn(logits.shape[1:], generator=each) for each in generators]).double()
        for layer, pos, head in ((0, 2, 1), (1, 6, 0)):
            for d in (0, 3):

                def moved(z, hook, by, at=(1, pos, head, d)):
                    z = z.clone()
                    z[at] += by
                    return z

                hooks = [[(f"blocks.{layer}.attn.hook_z", partial(moved, by=by))] for by in (STEP, -STEP)]
                up, down = (model.run_with_hooks(texts, fwd_hooks=hook) for hook in hooks)
                slope = (direction * (up - down) / logits.norm(dim=-1, keepdim=True)).sum() / (2 * STEP)
                # the step's square times a third derivative, and eps over the step
                assert float(found[layer][1, pos, head, d]) == pytest.approx(float(slope), rel=1e-7, abs=1e-9)


def test_metrics_are_means_of_products_by_prompt_and_group(monkeypatch):
    model, prompts = sharp("softmax, rotary, grouped", gain=1), tokens(2, 11)
    exact = convert_prompt(model, prompts)
    monkeypatch.setattr(gradients, "TOKENS_AT_ONCE", 4 * 5)
    teachers = []
    monkeypatch.setattr(Landmark, "fit", lambda self, teacher: teachers.append(teacher) or exact)
    convert_prompt(model, prompts, method=Landmark(n_keys=3, **TEXTS), verbose=False)
    metrics = logit_metrics(teachers[0])
    n_texts = teachers[0].seen[0].shape[1]
    flat = teachers[0].seen[0].flatten(0, 1)
    products = torch.zeros(2, 2, 3, model.cfg.d_head, model.cfg.d_head, dtype=torch.float64)
    for start in range(0, len(flat), 4):
        rows = range(start, min(start + 4, len(flat)))
        both = torch.stack([torch.tensor(row // n_texts) for row in rows])
        bias = exact._made(None, **exact._changed(lambda x: x[:, both], per_prompt_only=True))  # noqa: B023
        for layer, g in enumerate(effects_on_logits(model, bias, flat[start : rows[-1] + 1], [row % n_texts for row in rows])):
            for row, of_text in zip(rows, g, strict=True):
                for head in range(6):
                    products[layer, row // n_texts, head // 2] += of_text[:, head].T @ of_text[:, head]
    for layer, metric in enumerate(metrics):
        torch.testing.assert_close(metric, products[layer] / (n_texts * 5 * 2), rtol=1e-9, atol=1e-12)


def test_a_head_that_does_not_reach_the_logits_gets_no_keys():
    model, prompt = peaked("softmax, no norm", peak=6), tokens(1, 24)[0]
    last = model.blocks[-1]
    last.attn.W_O.data[0] = 0.0
    last.attn.W_O.data[0, :, 0] = 3.0  # head 0 of the last layer writes to one dimension only,
    last.mlp.W_in.data[0] = 0.0
    model.W_U.data[0] = 0.0  # which nothing reads
    n_keys = convert_prompt(model, prompt, method=Landmark(n_keys=4, **TEXTS), verbose=False).fit.n_keys
    assert int(n_keys[-1, 0]) == 0
    assert 0 < int(n_keys.sum()) <= 4 * n_keys.numel()


def test_on_a_trained_model_they_leave_less_than_half_of_the_error():
    """Of docs-gpt2, than equal budgets."""
    model = HookedKVTransformer.from_zoo("docs-gpt2").eval().requires_grad_(False)
    prompt, texts = context_of(model, dict(n_prompt=32, n_text=16, n_texts=2), seed=0)
    old = prompted_logits(model, prompt, texts)
    error = {}
    for budget in ("equal", "logits"):
        method = Landmark(n_keys=4, budget=budget, n_continuations=8, continuation_length=16, n_held_out=0)
        with model.kv_bias(convert_prompt(model, prompt, method=method, verbose=False)):
            new = model(texts, attention_mask=torch.ones_like(texts))
        error[budget] = float(((new - old).norm(dim=-1) / old.norm(dim=-1)).mean())
    assert error["logits"] < 0.5 * error["equal"]

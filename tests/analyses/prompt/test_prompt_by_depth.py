"""The logit lens with and without the prompt, against the residual streams unembedded one depth after another."""

import pytest
import torch
from analysis_models import PENCIL_PROMPT, PENCIL_TEXT, VARIANTS, pencil_model, random_model, tokens

from kvlens import convert_prompt, counterfactuals
from kvlens.analyses import prompt_by_depth

PROMPT, TEXT = tokens(7), tokens(5, seed=1)


def test_by_hand():
    # the answer is token 1, whose logit is 0; that of token 0 is a tenth of the residual: 1 before the layer with or
    # without the prompt, and after it 7 with it and 2 without
    frame = prompt_by_depth(pencil_model(), PENCIL_PROMPT, PENCIL_TEXT).set_index(["layer", "position"])
    losses = [float(torch.tensor(x, dtype=torch.float64).exp().log1p()) for x in (0.1, 0.7, 0.2)]
    assert frame.loc[(0, 0), "loss_change"] == pytest.approx(0, abs=1e-15)
    assert frame.loc[(0, 0), "loss_with"] == pytest.approx(losses[0])
    assert frame.loc[(1, 0), "loss_with"] == pytest.approx(losses[1])
    assert frame.loc[(1, 0), "loss_without"] == pytest.approx(losses[2])
    assert frame.loc[(1, 0), "loss_change"] == pytest.approx(losses[2] - losses[1])  # this prompt harms: below 0
    assert frame.loc[(1, 0), "loss_change"] < 0


@pytest.mark.parametrize("name", VARIANTS)
def test_against_the_slow_way(name):
    model = random_model(normalization_type="LN", **VARIANTS[name])
    frame = prompt_by_depth(model, PROMPT, TEXT, baseline=PROMPT[:1]).set_index(["layer", "position"])
    losses = {}
    alone = convert_prompt(model, counterfactuals(model, PROMPT, [[(1, 7)]]))  # the text keeps its positions
    for condition, bias in (("with", convert_prompt(model, PROMPT)), ("without", alone)):
        with model.kv_bias(bias):
            _, cache = model.run_with_cache(TEXT[None])
        points = [*(f"blocks.{layer}.hook_resid_pre" for layer in range(2)), "blocks.1.hook_resid_post"]
        for depth, point in enumerate(points):
            log_p = model.unembed(model.ln_final(cache[point]))[0, -5:].log_softmax(dim=-1)
            for i in range(4):
                losses[condition, depth, i] = -float(log_p[i, TEXT[i + 1]])
                assert frame.loc[(depth, i), f"loss_{condition}"] == pytest.approx(losses[condition, depth, i], rel=1e-9)
            assert frame.loc[(depth, 2), f"guess_{condition}"] == str(int(log_p[2].argmax()))
    for depth in range(3):
        for i in range(4):
            change = losses["without", depth, i] - losses["with", depth, i]
            assert frame.loc[(depth, i), "loss_change"] == pytest.approx(change, rel=1e-9, abs=1e-12)
    assert frame["loss_change"].xs(4, level="position").isna().all()


POSITIONS = {kind: dict(positional_embedding_type=kind) for kind in ("standard", "shortformer", "rotary")}
SOFTMAX = {f"softmax, {kind}": dict(attention="softmax", kv_shift=None, **chosen) for kind, chosen in POSITIONS.items()}


@pytest.mark.parametrize("baseline", [PROMPT[:0], PROMPT[:1], tokens(3, seed=2)], ids=len)
@pytest.mark.parametrize("name", [*VARIANTS, *SOFTMAX])
def test_before_any_attention_the_prompt_changes_nothing(name, baseline):
    """The residual stream depends there on token and position alone, and the text has its positions with and without it."""
    model = random_model(normalization_type="LN", **{**VARIANTS, **SOFTMAX}[name])
    table = prompt_by_depth(model, PROMPT, TEXT, baseline=baseline)
    changes = table.set_index("layer")["loss_change"].dropna().abs()
    assert changes[0].max() < 17 * torch.finfo(torch.float64).eps  # a sum over the vocabulary of 17
    assert changes[2].max() > 1e-3

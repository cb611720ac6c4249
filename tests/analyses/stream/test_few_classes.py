"""A model that predicts fewer classes than it reads tokens: chosen classes are split (next tokens: test_refusals.py)."""

import pytest
import torch
from analysis_models import centered, random_model, tokens

from kvlens import analyses, convert_prompt


@pytest.fixture(scope="module")
def classifier():
    return random_model(d_vocab_out=3)


PROMPT, TEXT = tokens(7), torch.tensor([4, 16, 2, 9])


def test_chosen_classes_are_split_and_patched(classifier):
    bias = convert_prompt(classifier, PROMPT)
    with classifier.kv_bias(bias):
        logits = classifier(TEXT[None])[0]
    frame = analyses.layer_contributions(classifier, bias, TEXT, next_token=False, tokens=[0, 2])
    sums = frame.groupby(["position", "target_token"])["logit"].sum().to_numpy().reshape(len(TEXT), 2)
    torch.testing.assert_close(torch.tensor(sums), centered(logits)[:, [0, 2]], rtol=1e-9, atol=1e-9)
    assert analyses.bias_decomposition(classifier, PROMPT, TEXT, answer=1)["logit"].notna().all()
    assert analyses.bias_effects(classifier, PROMPT, TEXT, answer=1)["logit_change"].notna().all()
    patched = analyses.activation_patching(classifier, PROMPT, tokens(7, seed=2), TEXT, answer=1, points=["b_kv"])
    assert patched["recovered"].notna().all()
    assert analyses.prompt_effect(classifier, PROMPT, torch.tensor([4, 1, 16, 2]))["loss"].notna().groupby(level=0).any().any()


def test_a_bidirectional_classifier_has_a_table():
    changes = dict(attention="softmax", kv_shift=None, positional_embedding_type="standard", attention_dir="bidirectional")
    model = random_model(d_vocab_out=3, **changes)
    frame = analyses.layer_contributions(model, None, TEXT, next_token=False, tokens=[1])
    sums = torch.tensor(frame.groupby("position")["logit"].sum().to_numpy())
    torch.testing.assert_close(sums, centered(model(TEXT[None])[0])[:, 1], rtol=1e-9, atol=1e-9)

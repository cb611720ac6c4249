"""The copying score is a property of the model's function: folding norms and centring weights does not change it."""

import pytest
import torch
from analysis_models import random_model

from kvlens.analyses import induction_verdicts

PLAIN = dict(attention="softmax", kv_shift=None, positional_embedding_type="standard", dtype=torch.float32)


@pytest.mark.parametrize("norm", ["LN", "RMS"])
def test_raw_and_folded_models_copy_alike(norm):
    models = [random_model(**PLAIN, normalization_type=norm) for _ in range(2)]
    for model in models:
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if "ln" in name and name.endswith(".w"):
                parameter.mul_(torch.linspace(0.1, 3, model.cfg.d_model))
            elif name.endswith(("W_E", "W_U")):
                parameter.add_(torch.randn(parameter.shape, generator=generator) + 0.5)
    models[1].process_weights_(fold_value_biases=False)
    raw, folded = (torch.tensor(induction_verdicts(m, n_sequences=1, n_repeated=5)["copying_score"].to_numpy()) for m in models)
    assert float((raw - folded).abs().max()) < 1e-5  # folding rounds to float32
    assert float(raw.abs().max()) > 0.01

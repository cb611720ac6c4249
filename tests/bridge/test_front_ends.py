"""The table of analyses and front ends is what happens: what it says runs does, and what it says does not gives the reason."""

import pytest
import torch
from bridge_models import some_tokens

from kvlens import HookedKVTransformer, KVLensError, analyses
from kvlens.analyses import front_ends
from kvlens.errors import IndirectHeads
from kvlens.model import heads_per_layer

PROMPT, TEXT = some_tokens(9), some_tokens(4, seed=1)
CALLS = {
    "bias_singular_values": lambda f, m: f(m, PROMPT),
    "baseline_ablation": lambda f, m: f(m, PROMPT, TEXT, [[(1, 0)]]),
    "bias_ablation": lambda f, m: f(m, PROMPT, TEXT, [[(1, 0)]]),
    "state_memory": lambda f, m: f(m, PROMPT),
    "state_erasure": lambda f, m: f(m, PROMPT, TEXT),
    "prompt_attribution": lambda f, m: f(m, PROMPT, TEXT, by="token"),
    "attribution_by_edge": lambda f, m: f(m, PROMPT, TEXT, by=[(0, 4)]),
    "attribution_by_head": lambda f, m: f(m, PROMPT, TEXT, by=[(0, 4)]),
    "explanation": lambda f, m: f(m, PROMPT, TEXT, by=[(0, 4)]),
    "head_details": lambda f, m: f(m, PROMPT, TEXT).pattern,
    "composition": lambda f, m: f(m).columns,
    "induction_verdicts": lambda f, m: f(m, n_sequences=1, n_repeated=8),
    "induction_heads": lambda f, m: f(m, n_sequences=1, n_repeated=8),
    "linked_shares": lambda f, m: f(m, PROMPT, TEXT).by_prompt,
    "prompt_copies": lambda f, m: f(m, PROMPT, PROMPT[2:5]),
    "attribution_by_position": lambda f, m: f(m, PROMPT, TEXT, by=[(0, 4)]),
}
"""How an analysis is called, where not as f(model, prompt, text)."""


@pytest.fixture(scope="module", params=["llama", "qwen3_5", "nemotron_h", "falcon_h1_direct", "mamba2", "lfm2"])
def family(request):
    return request.param


@pytest.mark.parametrize("name", front_ends.analyses())
def test_an_analysis_runs_or_says_why_not(model, name, monkeypatch):
    monkeypatch.setattr("kvlens.analyses.attribution.explain.CAP", 12)  # the sets themselves: tests/analyses/attribution
    function, reason = getattr(analyses, name), front_ends.reason_against(name, model)
    call = CALLS.get(name, lambda f, m: f(m, PROMPT, TEXT))
    with torch.no_grad():
        if name == "layer_contributions" and 0 in heads_per_layer(model):
            with pytest.raises(IndirectHeads, match="layers have no heads"):
                call(function, model)
        elif name == "attribution_by_edge" and reason is None and sum(n > 0 for n in heads_per_layer(model)) < 2:
            with pytest.raises(KVLensError, match="a single layer with heads"):
                call(function, model)
        elif reason is None:
            assert len(call(function, model))
        else:
            with pytest.raises(KVLensError, match=f"{name} does not run on KVTransformerBridge") as refused:
                function(model=model)
            assert reason in str(refused.value) and model.cfg.architecture in str(refused.value)


def test_the_hooked_model_says_why_it_has_no_states():
    model = HookedKVTransformer.from_zoo("bigram-linear")
    with pytest.raises(
        KVLensError, match="state_memory does not run on HookedKVTransformer: no layer of the model is recurrent"
    ):
        analyses.state_memory(model, PROMPT)


def test_the_reference_has_a_row_for_every_analysis():
    assert set(front_ends.NOT_ON) <= set(front_ends.analyses())
    for name in front_ends.analyses():
        assert f"| `{name}` |" in front_ends.__doc__
    assert "| `composition` | yes | yes | no (" in front_ends.__doc__

"""The table of analyses and front ends is what happens: what it says runs does, with the same numbers where both front ends run
a model, and what it says does not gives the reason."""

import itertools
from typing import Any

import pandas as pd
import pytest
import torch
from bridge_models import some_tokens
from kvlens.analyses.attribution.prompt import Null
from pictures import data_of
from precision import LAW, relative_error
from tiny_hf import tiny_hf_model

from kvlens import HookedKVTransformer, KVLensError, KVTransformerBridge, analyses, convert_prompt
from kvlens.analyses import registry
from kvlens.errors import IndirectHeads
from kvlens.model import heads_per_layer
from kvlens.viz import circuit_view

pytestmark = pytest.mark.usefixtures("without_gradients", "short_answers")

PROMPT = some_tokens(9)
TEXT = torch.cat([PROMPT[2:4], some_tokens(2, seed=1)])  # so that there is something to copy
ONE, UNITS = dict(by=[(0, 4)]), [(0, 3), (3, 7), (7, 9)]
NULL = Null(19, prompts=[some_tokens(8, seed=seed) for seed in range(5)])
FEW, ABLATIONS = dict(n_sequences=1, n_repeated=8), dict(n_sequences=2, n_repeated=9, ablations=True)
CASES = [(PROMPT, TEXT, PROMPT[4:6], [(3, 7)]), (PROMPT.flip(0), None, PROMPT[2:3], [(5, 8)])]
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "activation_patching": (PROMPT, PROMPT.flip(0), TEXT),
    "baseline_ablation": (PROMPT, TEXT, [[(1, 0)]]),
    "bias_ablation": (PROMPT, TEXT, [[(1, 0)]]),
    "bias_interactions": (PROMPT, TEXT),
    "bias_singular_values": (PROMPT,),
    "circuit": (PROMPT, some_tokens(9, seed=3)),
    "composition": (),
    **dict.fromkeys(("dual_bound", "dual_demonstrations", "dual_losses"), (PROMPT,)),
    "induction_heads": (),
    "induction_verdicts": (),
    "reading_heads": (CASES,),
    "retrieval_heads": (CASES,),
    "state_half_lives": (PROMPT,),
    "state_memory": (PROMPT,),
}
"""What an analysis is given after the model, where not prompt and text."""
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "activation_patching": [
        {},
        dict(points=["prompt"], answer=PROMPT[4:6], rival=3),
        dict(points=["keys", "z_bias"], answer=7),
    ],
    "attribution_by_head": [ONE, dict(by=UNITS)],
    "attribution_by_position": [dict(**ONE, each_layer=True)],
    "bias_decomposition": [{}, dict(answer=3, rival=7)],
    "bias_effects": [{}, dict(methods=("zero", "baseline"), by="head", answer=3), dict(by="layer")],
    "bias_positions": [{}, dict(at=[1, 3], answer=3)],
    "circuit": [dict(text=TEXT, answer=5, rival=7)],
    "dual_bound": [{}, dict(layer=1, head=2, n_negative=1, beta=0.2)],
    "dual_demonstrations": [{}, dict(query_pos=5, n_demonstrations=3)],
    "dual_losses": [{}, dict(n_demonstrations=4)],
    "explanation": [ONE],
    "induction_heads": [FEW, ABLATIONS],
    "induction_verdicts": [FEW, ABLATIONS],
    "prompt_attribution": [dict(by="token"), dict(by=UNITS, null=NULL), dict(by=UNITS[:2], null=NULL, positions="closed")],
    "reading_layers": [dict(answer=3, without=UNITS[:1])],
    "what_is_copied": [dict(layer=1, head=1), dict(layer=2, head=3, query=8, answer=5, rival=7)],
    "why_attends": [dict(layer=1, head=1), dict(layer=2, head=3, query=8, key=2)],
}
"""With the first of these an analysis runs on every model, with all of them on both front ends."""
OF_HEADS = (
    "bias_interactions",
    "composition",
    "dual_losses",
    "head_details",
    "induction_heads",
    "induction_verdicts",
    "linked_shares",
    "prompt_copies",
    "retrieval_heads",
)
"""Compared on grouped heads with rotary positions too."""
SAME = {
    "attention_under_bias": ["pattern"],
    "circuit": ["estimates"],
    "conversion_error": ["position", "token", "squared_norm", "argmax_agrees", "exact_to_rounding"],
    "head_details": ["pattern", "prompt_shares", "bias_shares", "among"],
    "linked_shares": ["by_prompt", "by_text", "between"],
}
"""The columns or tensors that are compared, where not all but words."""
LARGE = {
    "dual_losses": "demonstration_weight",
    "activation_patching": "recovered",
    "induction_heads": "loss_change",
    "induction_verdicts": "logit_attribution",
    "prompt_attribution": "total_effect",
}
"""What must not be around 0 for a comparison to mean something."""


def attention_layers(model):
    return convert_prompt(model, PROMPT).attention_layers


def run(name, model, options):
    if name == "attention_under_bias":
        options = dict(layer=next(iter(attention_layers(model)), 0))
    return getattr(analyses, name)(model, *ARGUMENTS.get(name, (PROMPT, TEXT)), **options)


_NONE = dict.fromkeys(("mamba2", "rwkv6"), "there are no scores to split")
_NONE["lfm2"] = "layer 0 writes to the residual stream and has no heads"
OF_A_HEAD = {"what_is_copied": _NONE, "why_attends": _NONE, "circuit": {"lfm2": "it has layers that are no attention"}}
OF_A_HEAD |= {name: {"lfm2": "a layer without attention"} for name in ("dual_demonstrations", "dual_losses")}
OF_A_HEAD["dual_bound"] = {"lfm2": "head 0 does not exist"}
"""Analyses of heads of softmax attention, and the families that have none, or other writers below it."""
WITH_STATES = ["qwen3_5", "nemotron_h", "falcon_h1_direct", "mamba2", "rwkv6", "lfm2"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *itertools.product(WITH_STATES, registry.analyses()),
        # those that run on attention alone are compared below
        *(("llama", name) for name, reasons in registry.NOT_ON.items() if registry.SOFTMAX in reasons),
    ],
)
def test_an_analysis_runs_or_says_why_not(family, name, bridge_of):
    model = bridge_of(family)
    reason, options = registry.reason_against(name, model), OPTIONS.get(name, [{}])[0]
    if name == "layer_contributions" and 0 in heads_per_layer(model):
        with pytest.raises(IndirectHeads, match="layers have no heads"):
            run(name, model, options)
    elif name == "attention_under_bias" and not attention_layers(model):
        with pytest.raises(KVLensError, match="the bias holds a recurrent state there and no keys"):
            run(name, model, options)
    elif name in OF_A_HEAD and family in OF_A_HEAD[name]:
        with pytest.raises(KVLensError, match=OF_A_HEAD[name][family]):
            run(name, model, options)
    elif reason is None:
        first, *_ = compared(name, run(name, model, options))
        assert len(first) or name == "composition"  # of a single layer with heads
    else:
        with pytest.raises(KVLensError, match=f"{name} does not run on KVTransformerBridge") as refused:
            getattr(analyses, name)(model=model)
        assert reason in str(refused.value) and model.cfg.architecture in str(refused.value)


def compared(name, found):
    """Frames and tensors, in the same order on both front ends."""
    if isinstance(found, pd.DataFrame):
        columns = SAME.get(name, [column for column in found if column != "says"])
        return [found[columns]]
    return [getattr(found, field) for field in SAME[name]]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("gpt2", name) for name in registry.analyses() if {*registry.NOT_ON.get(name, ())} <= {registry.RECURRENT}),
        *(("llama", name) for name in OF_HEADS),
        *(pytest.param("opt", name, marks=pytest.mark.slow) for name in OF_HEADS),
    ],
)
def test_an_analysis_gives_the_same_on_both_front_ends(family, name, both_of):
    for options in OPTIONS.get(name, [{}]):
        tables = [run(name, model, options) for model in both_of(family)]
        for x, y in zip(*(compared(name, table) for table in tables), strict=True):
            if isinstance(x, pd.DataFrame):
                pd.testing.assert_frame_equal(x, y, rtol=LAW, atol=LAW)
            else:
                torch.testing.assert_close(x, y, rtol=LAW, atol=LAW)
    assert name not in LARGE or tables[0][LARGE[name]].abs().max() > 0.01  # it matters


PAIRS = dict(prompt=some_tokens(2, 7), corrupted=some_tokens(2, 7, seed=3), answer=[5, 6], rival=[7, 8])


def circuits(found):
    """The metric with all edges, with none, and with a half of them."""
    half = torch.rand(found.kept.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    return found.measured(found.graph.edges, torch.zeros_like(half), half & found.graph.edges)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["gpt_neox", "gptj", "opt", "mixtral", "gemma2", "olmo2", "phi3"])
def test_circuits_are_the_same_on_both_front_ends(family, both_of):
    """MLPs side by side with heads, with a norm of their own or without; norms behind; experts; OPT's rows."""
    (ours, ran), (theirs, other) = (
        (found, circuits(found)) for found in (analyses.circuit(of, **PAIRS) for of in both_of(family))
    )
    assert relative_error(ours.estimates, theirs.estimates) < LAW and ours.estimates.abs().max() > 0.1
    assert relative_error(ours.by_position, theirs.by_position) < LAW
    assert relative_error(ran, other) < LAW and (ran[0] - ran[1]).abs().min() > 0.01


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_dual_model_under_a_bias_is_the_same_on_both_front_ends(family, both_of):
    """Its keys are in W_0."""
    tables = []
    for model in both_of(family):
        with model.kv_bias(convert_prompt(model, PROMPT)):
            tables.append(analyses.dual_losses(model, TEXT))
    pd.testing.assert_frame_equal(*tables, rtol=LAW, atol=LAW)
    assert tables[0]["equivalence_error"].max() < LAW and tables[0]["step_share"].min() < 0.9  # the rest is the bias's


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "falcon_h1_direct"])
def test_patching_a_head_is_the_prompt_with_that_head_of_the_other(family, bridge_of):
    """Of attention and of a recurrent state; and all of the prompt is the clean run."""
    model, other = bridge_of(family), PROMPT.flip(0)
    clean, corrupted = convert_prompt(model, PROMPT), convert_prompt(model, other)
    table = analyses.activation_patching(model, PROMPT, other, TEXT, answer=7, points=["bias", "prompt"])

    def log_p(bias):
        with model.kv_bias(bias):
            return model.logits_on(TEXT[None], 1)[0, -1].log_softmax(dim=-1)[7]

    whole, single = table[(table["point"] == "prompt") & (table["layer"] == -1)], table[table["head"] >= 0]
    assert relative_error(torch.tensor(whole["recovered"].item()), torch.ones(())) < LAW
    heads = list(zip(single["layer"], single["head"], strict=True))
    assert heads == [(layer, head) for layer, n in enumerate(heads_per_layer(model)) for head in range(n)]
    by_hand = torch.stack([log_p(corrupted.exchange_heads(clean, [head])) for head in heads])
    assert relative_error(torch.tensor(single["metric"].to_numpy()), by_hand) < LAW
    assert single["recovered"].abs().max() > 0.01


@pytest.mark.parametrize("family", ["gptj", "gemma2"])
def test_the_graph_of_a_circuit_is_the_same_on_both_front_ends(family, both_of):
    """To rounding: where nodes stand, attention, and why heads attend, which Gemma 2 does not say, with its norms behind."""
    ours, theirs = (data_of(circuit_view(analyses.circuit(of, **PAIRS), [20, 60], n_reasons=2)) for of in both_of(family))
    for name in ("nodes", "columns", "patterns", "reasons", "tokens"):
        assert ours[name] == theirs[name], name
    assert [stop["places"] for stop in ours["stops"]] == [stop["places"] for stop in theirs["stops"]]
    assert len(ours["patterns"]) >= 2


def test_keys_of_a_group_are_split_on_the_hooked_model_alone(bridge_of):
    with pytest.raises(KVLensError, match="by_query_head: .* got KVTransformerBridge; load the model as one"):
        analyses.circuit(bridge_of("llama"), **PAIRS, by_query_head=True)
    assert analyses.circuit(bridge_of("gpt2"), **PAIRS, by_query_head=True, method="eap").kept.all(dim=0)[-1]


@pytest.mark.parametrize("family", ["glm4", "starcoder2"])
def test_all_edges_are_the_clean_pass_and_none_the_corrupted_one(family, bridge_of):
    model = bridge_of(family)
    ran = circuits(analyses.circuit(model, **PAIRS, method="eap"))
    for found, given in zip(ran, (PAIRS["prompt"], PAIRS["corrupted"]), strict=False):
        last = model(given)[:, -1]
        assert relative_error(found, last[[0, 1], [5, 6]] - last[[0, 1], [7, 8]]) < LAW


def test_a_factor_behind_heads_has_no_circuit():
    model = KVTransformerBridge.boot_transformers(tiny_hf_model("granite", residual_multiplier=0.5))
    with pytest.raises(KVLensError, match="GraniteForCausalLM: something else stands between heads, MLPs and the residual"):
        analyses.circuit(model, **PAIRS)


OTHER_POINTS = {"gptj": "ln2.", "opt": "ln2."}
"""Norms that TransformerLens' bridge does not have, or of all texts in one row."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "gptj", "opt", "llama", "qwen2", "gemma2", "phi3"])
@pytest.mark.filterwarnings("ignore:Phi3ArchitectureAdapter does not support fold_ln:UserWarning")  # it folds them itself
def test_compatibility_mode_gives_the_names_shapes_and_values_of_release_3(family):
    """With LayerNorm and RMSNorm, folded; and what is converted then is exact, and the earlier release's bias."""
    hooked = HookedKVTransformer.from_pretrained("x", hf_model=tiny_hf_model(family), dtype=torch.float64, device="cpu")
    model, both = KVTransformerBridge.boot_transformers(tiny_hf_model(family)), torch.cat([PROMPT, TEXT])[None]
    early = convert_prompt(model, PROMPT)
    model.enable_compatibility_mode(disable_warnings=True)
    (logits, theirs), (ours, seen) = (of.run_with_cache(both) for of in (hooked, model))
    assert relative_error(ours, logits) < LAW
    for name in (name for name in theirs if OTHER_POINTS.get(family, "nothing") not in name):
        assert relative_error(seen[name], theirs[name]) < LAW, name
    bias = convert_prompt(model, PROMPT)
    assert relative_error(bias.stacked("b_kv"), convert_prompt(hooked, PROMPT).stacked("b_kv")) < LAW
    with model.kv_bias(bias):
        assert relative_error(model(TEXT[None]), logits[:, len(PROMPT) :]) < LAW
    with pytest.raises(KVLensError, match="'weights_processed false' for the bias, 'weights_processed true' for the model"):
        model.attach_kv_bias(early)


def test_the_norm_of_logits_has_their_mean_in_it_unless_the_unembedding_is_centered():
    hooked = HookedKVTransformer.from_pretrained("x", hf_model=tiny_hf_model("llama"), dtype=torch.float64, device="cpu")
    model = KVTransformerBridge.boot_transformers(tiny_hf_model("llama"))
    mean = model(torch.cat([PROMPT, TEXT])[None])[0, len(PROMPT) :].mean(dim=-1)
    norms = [analyses.conversion_error(of, PROMPT, TEXT)["squared_norm"] for of in (hooked, model)]
    model.enable_compatibility_mode(disable_warnings=True)
    norms.append(analyses.conversion_error(model, PROMPT, TEXT)["squared_norm"])
    of_hooked, plain, processed = (torch.tensor(x.to_numpy()) for x in norms)
    part = model.cfg.d_vocab * mean.square()
    assert (part / plain).max() > 1e-3  # it matters
    assert relative_error(of_hooked, plain - part) < LAW and relative_error(processed, plain - part) < LAW


def test_compatibility_mode_without_processing_keeps_a_bias():
    model = KVTransformerBridge.boot_transformers(tiny_hf_model("gpt2"))
    bias, whole = convert_prompt(model, PROMPT), model(torch.cat([PROMPT, TEXT])[None])
    model.attach_kv_bias(bias)
    model.enable_compatibility_mode(disable_warnings=True, no_processing=True)
    assert relative_error(model(TEXT[None]), whole[:, len(PROMPT) :]) < LAW
    model.process_weights()
    with pytest.warns(UserWarning, match="the weights of this model have changed since the KV bias was attached"):
        model(TEXT[None])


def test_processed_weights_of_another_model_are_refused():
    """TransformerLens 4 folds norms of GPT-OSS that its experts still read."""
    model = KVTransformerBridge.boot_transformers(tiny_hf_model("gpt_oss"))
    with pytest.raises(KVLensError, match=r"processed weights differ .* by [\d.]+%.*\(no_processing=True"):
        model.enable_compatibility_mode(disable_warnings=True)


def test_the_hooked_model_says_why_it_has_no_states():
    model = HookedKVTransformer.from_zoo("bigram-linear")
    with pytest.raises(
        KVLensError, match="state_memory does not run on HookedKVTransformer: no layer of the model is recurrent"
    ):
        analyses.state_memory(model, PROMPT)


def test_the_reference_has_a_row_for_every_analysis():
    assert set(registry.NOT_ON) <= set(registry.analyses())
    for name in registry.analyses():
        assert f"| `{name}` |" in registry.__doc__
    assert "| `composition` | yes | yes | no (" in registry.__doc__

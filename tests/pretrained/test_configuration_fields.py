"""A model whose configuration has any other value in any field is equal to transformers' own, or refused.

For every architecture that can be loaded: a tiny random model of the real class, its configuration changed in one field at a
time, and the converted model's logits against transformers' own. The comparison at loading is what refuses.
"""

from itertools import cycle
from typing import Any

import pytest
import torch
from precision import relative_error
from tiny_hf import D_VOCAB, FULL, KINDS, ROWS, SLIDING, law_of, tiny_hf_model
from tiny_hf import ROPE as OLD_ROPE
from transformers import PreTrainedConfig

from kvlens import HookedKVTransformer, KVLensError
from kvlens.pretrained import SUPPORTED_ARCHITECTURES
from kvlens.pretrained.translation import alibi_slopes

pytestmark = pytest.mark.usefixtures("no_network")

TOKENS = torch.randint(0, D_VOCAB, (2, 17), generator=torch.Generator().manual_seed(7))

_OF_TRAINING = (
    "attention_dropout attn_pdrop classifier_dropout dropout embd_pdrop embed_dropout hidden_dropout init_std "
    "initializer_range layerdrop resid_dropout resid_pdrop router_aux_loss_coef router_jitter_noise "
)
_OF_GENERATING_AND_OTHER_HEADS = (
    "add_cross_attention bos_token_id eos_token_id is_decoder output_router_logits pad_token_id pretraining_tp "
    "reorder_and_upcast_attn summary_activation summary_first_dropout summary_proj_to_labels summary_type "
    "summary_use_proj use_cache "
)
_READ_INTO_OTHERS = "attention_types max_window_layers original_max_position_embeddings use_sliding_window "
IRRELEVANT = frozenset(PreTrainedConfig().to_dict()) | frozenset(
    (_OF_TRAINING + _OF_GENERATING_AND_OTHER_HEADS + _READ_INTO_OTHERS).split()
)
"""Fields that do not affect the logits of a forward pass."""

YARN = {**OLD_ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 9}
LLAMA3 = {**OLD_ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 11
SHORT_AND_LONG = {"short_factor": [1.0, 3.0], "long_factor": [2.0, 5.0], "original_max_position_embeddings": 11}
ROPES: list[dict[str, Any]] = [
    {**OLD_ROPE, "rope_theta": 77.0},
    {**OLD_ROPE, "partial_rotary_factor": 0.5},
    {**OLD_ROPE, "partial_rotary_factor": 0.75},
    {**OLD_ROPE, "rope_type": "linear", "factor": 3.0},
    {**OLD_ROPE, "rope_type": "dynamic", "factor": 3.0},
    {**OLD_ROPE, "rope_type": "proportional", "partial_rotary_factor": 0.5},
    {**OLD_ROPE, "rope_type": "longrope", **SHORT_AND_LONG},
    YARN,
    {**YARN, "attention_factor": 1.3},
    {**YARN, "beta_fast": 9.0, "beta_slow": 2.0, "truncate": False},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    LLAMA3,
    {**LLAMA3, "partial_rotary_factor": 0.5},
]
TWO_ROPES = [
    {"sliding_attention": {**OLD_ROPE, "rope_theta": 77.0}, "full_attention": {**OLD_ROPE, "rope_theta": 555.0}},
    {"sliding_attention": OLD_ROPE, "full_attention": YARN},
    {"sliding_attention": {**OLD_ROPE, "rope_theta": 77.0}, "full_attention": {**YARN, "attention_factor": 1.3}},
    {"sliding_attention": YARN, "full_attention": YARN},
    {"sliding_attention": YARN, "full_attention": OLD_ROPE},
    {"sliding_attention": OLD_ROPE, "full_attention": {**OLD_ROPE, "rope_type": "linear", "factor": 3.0}},
    {"sliding_attention": LLAMA3, "full_attention": LLAMA3},
    {"sliding_attention": OLD_ROPE, "full_attention": LLAMA3},
]
ACTIVATIONS = ["relu", "gelu", "gelu_accurate", "swish", "xielu", "quick_gelu", "gelu_pytorch_tanh"]


def each(names: str, values: list[Any]) -> dict[str, list[Any]]:
    return dict.fromkeys(names.split(), values)


VALUES: dict[str, list[Any]] = {
    **each("layer_norm_epsilon layer_norm_eps rms_norm_eps", [0.3]),
    **each("activation_function hidden_act hidden_activation", ACTIVATIONS),
    **each("attn_logit_softcapping final_logit_softcapping", [2.0]),
    "query_pre_attn_scalar": [3],
    **each("use_bidirectional_attention qk_layernorm", [True, False]),
    **each("swiglu_alpha swiglu_limit", [1.0]),
    "_sliding_window_pattern": [],  # makes layer_types where there are none: below
    **each("tie_word_embeddings attention_bias mlp_bias enable_bias layer_norm_elementwise_affine", [True, False]),
    **each("_remove_final_layer_norm do_layer_norm_before scale_attn_weights scale_attn_by_inverse_layer_idx", [True, False]),
    **each("use_parallel_residual norm_topk_prob apply_residual_connection_post_layernorm slow_but_exact", [True, False]),
    **each("num_key_value_heads", [1, 6]),
    **each("num_attention_heads num_heads", [3, 4, 12]),
    "n_head": [2, 3, 4, 5, 6, 10],  # of Bloom as well: its slopes depend on whether the number is a power of two
    **each("num_hidden_layers n_layer num_layers", [4]),
    **each("hidden_size n_embd", [48, 60]),
    **each("intermediate_size ffn_dim", [48]),
    "n_inner": [48, None],
    **each("max_position_embeddings n_positions", [41]),
    **each("num_local_experts num_experts", [4]),
    "num_experts_per_tok": [1],
    "vocab_size": [311],
    "word_embed_proj_dim": [12],
    "head_dim": [8, 12, None],
    "rope_parameters": ROPES + TWO_ROPES,
    "rotary_dim": [2, 6],
    "sliding_window": [4, 9, None],
    "window_size": [3],
    "clip_qkv": [0.3],
    "attention_layers": [],  # made of attention_types
    "layer_types": [],  # together with a window: below
}
"""Other values for every field that is not in ``IRRELEVANT``; those that an architecture cannot have, transformers refuses."""

WINDOWS: list[dict[str, Any]] = [
    {"layer_types": None, "sliding_window": 4, "max_window_layers": n, "rope_parameters": rope}
    for n, rope in ((0, OLD_ROPE), (1, YARN))
]
WINDOWS += [{"sliding_window": 4, "layer_types": [FULL, SLIDING, FULL]}, {"use_sliding_window": False, "layer_types": None}]
TOGETHER: dict[str, list[dict[str, Any]]] = {
    "gpt_neo": [
        {"num_layers": 4, "attention_types": [[["local", "global"], 2]]},
        {"attention_types": [[["local"], 2]]},
        {"attention_types": [[["global"], 2]]},
        {"attention_types": [[["local", "global"], 1]], "window_size": 3},
    ],
    "qwen2": WINDOWS,
    "qwen3": [{"use_sliding_window": True, **change} for change in WINDOWS],
    "gemma3": [{"layer_types": None, "_sliding_window_pattern": 2}],
    "olmo3": [
        {"layer_types": [FULL, SLIDING, FULL], "rope_parameters": None, "sliding_window": 4},
        *({"layer_types": [kind] * 3, "rope_parameters": rope} for kind, rope in zip(cycle((FULL, SLIDING)), TWO_ROPES)),
    ],
    "bloom": [{"slow_but_exact": True, "pretraining_tp": 2}],  # leaves two biases out
    "opt": [{"hidden_size": 48, "word_embed_proj_dim": 48}],
    "phi": [{"num_attention_heads": 3, "num_key_value_heads": 3}],
    "phi3": [{"head_dim": 10, "rope_parameters": {**OLD_ROPE, "partial_rotary_factor": 0.6}}],
    "llama": [{"attention_bias": True, "num_key_value_heads": 6}, {"attention_bias": True, "head_dim": 10}],
    "mistral": [{"sliding_window": None, "rope_parameters": rope} for rope in (YARN, LLAMA3)],
}
"""Determined by several fields together."""


@torch.no_grad()
def outcome(kind: str, change: dict[str, Any]) -> str:
    """What becomes of a model whose configuration is changed: "same", "refused", "wrong: ..." or "impossible"."""
    try:
        hf_model = tiny_hf_model(kind, **change)
        expected = hf_model(TOKENS).logits
    except Exception:  # transformers itself cannot make or run such a model, and says so in many ways
        return "impossible"
    try:
        given = dict(hf_model=hf_model, device="cpu", dtype=torch.float64)
        model = HookedKVTransformer.from_pretrained_no_processing("x", **given)
    except KVLensError:
        return "refused"
    difference = relative_error(model(TOKENS), expected)
    return "same" if difference < law_of(kind) else f"wrong: off by {difference:.3g}"


LIKE_THE_OTHERS = [
    "apertus",
    "gemma",
    "gemma2",
    "gpt_neox",
    "gptj",
    "mistral",
    "olmo",
    "olmo2",
    "olmoe",
    "phi",
    "qwen2",
    "qwen3",
]
"""What is read of these is read by the code for the other kinds, too: among the slow tests, one value of each field."""


HALF = ["llama", "olmo3"]
"""Of activations and kinds of RoPE, one is tried with every other value, and the other with the rest."""


def values_for(kind: str, name: str, every: bool) -> list[Any]:
    """Other values of a field. Activations and kinds of RoPE are read by the same code for all architectures, so each is tried
    on a fifth of them, all on one, and all on two others that differ in what is around that code: on either of them half of
    them, unless ``every`` value is asked for.
    """
    shared, place = name in ("rope_parameters", "activation_function", "hidden_act", "hidden_activation"), KINDS.index(kind)
    if kind in LIKE_THE_OTHERS:  # each kind begins with another one
        first = place % max(1, len(VALUES[name]))
        return VALUES[name][first:] + VALUES[name][:first]
    if shared and kind in HALF and not every:
        return VALUES[name][HALF.index(kind) :: 2]
    return VALUES[name][place % 5 :: 5] if shared and kind not in ("gpt2", *HALF) else VALUES[name]


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("kind", "every"),
    [
        *(pytest.param(kind, False, marks=[pytest.mark.slow] if kind in LIKE_THE_OTHERS else []) for kind in KINDS),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in HALF),
    ],
)
def test_every_field_is_honored_or_refused(kind, every):
    config = tiny_hf_model(kind).config
    names = set(type(config)().to_dict()) - IRRELEVANT
    if "rope_parameters" in names:
        names.add("head_dim")  # which a modeling file reads although the configuration's class may not declare it
    assert names <= set(VALUES), "a field that no other value is known for: add one, or put it into IRRELEVANT"
    by_layer = {"layer_types": None} if "layer_types" in ROWS[kind][1] else {}  # given for as many layers as the row has
    outcomes = []
    for name in sorted(names):
        for value in values_for(kind, name, every):
            if value != getattr(config, name, None):
                change = {name: value, **(by_layer if name == "num_hidden_layers" else {})}
                outcomes.append((change, outcome(kind, change)))
                if kind in LIKE_THE_OTHERS and outcomes[-1][1] != "impossible":
                    break
    outcomes += [(change, outcome(kind, change)) for change in TOGETHER.get(kind, [])]
    assert [(change, found) for change, found in outcomes if found.startswith("wrong")] == []
    tried = {name for change, found in outcomes if found != "impossible" for name in change}
    assert names - tried - {"attention_layers", "layer_types"} == set(), "no other value of these is legal: find one"
    honored = [change for change, found in outcomes if found == "same"]
    assert len(honored) > len(names) / 2


def changed(value: Any) -> Any:
    """Another value of the same kind, or None where that is none to count with."""
    if value is None:
        return 3
    if isinstance(value, bool):
        return not value
    return value + {int: 1, float: 0.25}[type(value)] if type(value) in (int, float) else None


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_irrelevant_fields_move_no_logits(kind):
    before = tiny_hf_model(kind)
    values = before.config.to_dict()
    skipped = {"attention_types", "max_window_layers", "use_sliding_window", "output_attentions", "output_hidden_states"}
    skipped |= {"return_dict", "architectures", "dtype", "problem_type", "summary_activation"}
    change = {name: changed(values[name]) for name in values if name in IRRELEVANT - skipped}
    change = {name: value for name, value in change.items() if value is not None}
    assert len(change) > 5
    after = tiny_hf_model(kind, **change)
    shared = {name: weight for name, weight in before.state_dict().items() if name in after.state_dict()}
    after.load_state_dict(shared, strict=False)  # cross-attention has its own random weights, which are not used
    # with and without a cache, sums may round differently
    assert relative_error(after(TOKENS).logits, before(TOKENS).logits) < law_of(kind)
    model = HookedKVTransformer.from_pretrained_no_processing("x", hf_model=after, device="cpu", dtype=torch.float64)
    assert relative_error(model(TOKENS), before(TOKENS).logits) < law_of(kind)


def test_every_supported_architecture_is_swept():
    classes = {type(tiny_hf_model(kind)).__name__ for kind in KINDS}
    assert classes == set(SUPPORTED_ARCHITECTURES)


def test_slopes_of_alibi_by_hand():
    """Three heads: the two of two heads (2^-4, 2^-8), then the first of four (2^-2)."""
    assert alibi_slopes(3) == [2**-4, 2**-8, 2**-2]
    assert alibi_slopes(4) is None


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("gpt2", {"activation_function": "mish"}, "has activation_function='mish'"),
        ("llama", {"mlp_bias": True}, "does not compute what transformers computes"),
    ],
)
def test_a_folder_is_held_to_the_same(kind, change, says, tmp_path):
    tiny_hf_model(kind, **change).save_pretrained(tmp_path / "m")
    with pytest.raises(KVLensError, match=says):
        HookedKVTransformer.from_pretrained(tmp_path / "m")

"""kvlens' base is TransformerLens 3.9's HookedTransformer: a file holds what this gave in float64 (``plain_reference.py``).

A tensor is the same if its norm and its four products with fixed vectors are, to 1e-11 of its norm. What is zero by theory,
such as the gradient of b_K, is measured by the largest tensor of its kind.
"""

import json

import numpy as np
import pytest
import torch
from plain_reference import (
    CONFIGURATIONS,
    FROZEN,
    NOT_PROCESSED,
    in_float64,
    of_configuration,
    of_defaults,
    of_family,
    of_text,
    summary,
    tokens,
)
from tiny_hf import D_VOCAB, KINDS, tiny_hf_model

from kvlens import HookedKVTransformer, HookedKVTransformerConfig
from kvlens.base import HookedTransformer, HookedTransformerConfig
from kvlens.base.weights import allowed_steps
from kvlens.pretrained import load_pretrained_parts

pytestmark = pytest.mark.filterwarnings("ignore:from_pretrained", "ignore:folding norms", "ignore:fold_ln")
BOUND = 1e-11


@pytest.fixture(scope="module")
def frozen():
    """By the name of a case: by key the shape of a tensor, or words; and a row of numbers for each tensor."""
    with np.load(FROZEN, allow_pickle=False) as stored:
        cases, rows = json.loads(bytes(stored["index"]))["cases"], iter(stored["rows"])
    return {name: (index, np.array([next(rows) for _ in tensors_of(index)]).reshape(-1, 6)) for name, index in cases.items()}


def tensors_of(index):
    return [key for key, value in index.items() if all(isinstance(size, int) for size in value)]


def build_base(fields):
    return HookedTransformer(HookedTransformerConfig(**fields))


def build_kv(fields):
    return HookedKVTransformer(HookedKVTransformerConfig(**fields))


def build_family(hf_model, processed, dtype=torch.float64):
    steps = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
    parts = load_pretrained_parts("x", hf_model=hf_model, device="cpu", dtype=dtype)
    model = HookedTransformer(parts.cfg)
    model.load_and_process_state_dict(dict(parts.state_dict), **allowed_steps(parts.cfg, dict.fromkeys(steps, processed)))
    return model


def differences(frozen, case, seen):
    """The keys whose words or shapes differ, and those whose numbers do, by how much of the tensor's norm."""
    expected, theirs = frozen[case]
    index, ours = summary(case, seen)
    words = sorted(key for key in index.keys() | expected.keys() if index.get(key) != expected.get(key))
    if words:
        return words, {}
    kinds = [key.rpartition(" ")[0] for key in tensors_of(index)]
    norms, largest = theirs[:, 0], dict.fromkeys(kinds, 0.0)
    for kind, norm in zip(kinds, norms, strict=True):
        largest[kind] = max(largest[kind], norm)
    whole = np.array([largest[kind] or 1.0 for kind in kinds])
    errors = np.abs(ours - theirs).max(axis=1) / np.where(norms > 1e-12 * whole, norms, whole)
    return [], {key: error for key, error in zip(tensors_of(index), errors, strict=True) if not error < BOUND}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_everything_is_that_of_transformer_lens(name, frozen):
    assert differences(frozen, name, of_configuration(name, build_base)) == ([], {})


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_softmax_model_with_everything_off_is_that_of_transformer_lens_too(name, frozen):
    own = {key: frozen[name][0][key] for key in ("names of hook points", "fields")}
    assert differences(frozen, name, of_configuration(name, build_kv) | own) == ([], {})


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_converted_hugging_face_models_are_those_of_transformer_lens(kind, frozen):
    assert differences(frozen, kind, of_family(kind, build_family)) == ([], {})


def test_text_is_read_and_continued_as_by_transformer_lens(frozen):
    seen = of_text(lambda fields, tokenizer: HookedTransformer(HookedTransformerConfig(**fields), tokenizer))
    assert differences(frozen, "text", seen) == ([], {})


def test_defaults_and_dtypes_are_those_of_transformer_lens(frozen):
    assert differences(frozen, "defaults", of_defaults(build_base)) == ([], {})
    ours = of_defaults(build_kv) | {"fields": frozen["defaults"][0]["fields"]}
    assert differences(frozen, "defaults", ours) == ([], {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "gemma2", "olmo2"])
def test_rounding_is_that_of_transformers(kind, dtype):
    """Of the logits of four models: at most 8 times the largest of Transformers' own, on the same processor."""
    text, ours, theirs = tokens(2, 9, D_VOCAB), [], []
    for seed in range(4):
        narrow = tiny_hf_model(kind, seed).to(dtype)
        with in_float64():
            exact = tiny_hf_model(kind, seed)
            exact.load_state_dict(narrow.state_dict())
            exact = exact(text).logits.detach()
        with torch.no_grad():
            model = build_family(narrow, processed=False, dtype=dtype)
            for logits, errors in ((model(text), ours), (narrow(text).logits, theirs)):
                assert logits.dtype == dtype
                errors.append(float((logits - exact).norm() / exact.norm()))
    assert max(ours) <= 8 * max(theirs)


@pytest.mark.parametrize("name", ["learned", "grouped", "rms_gated", "alibi", "experts", "like_gpt_oss"])
def test_a_fault_of_1e_8_in_one_head_is_noticed(name, frozen):
    def build_faulty(fields):
        model = build_base(fields)
        scale = torch.ones(model.cfg.n_heads, 1)
        scale[2] += 1e-8
        model.blocks[1].attn.hook_z.add_perma_hook(lambda z, hook: z * scale)
        return model

    words, errors = differences(frozen, name, of_configuration(name, build_faulty))
    assert words == []
    assert errors.keys() >= {"logits", "hooked", "loss per token", "activation blocks.1.hook_attn_out", "gradient embed.W_E"}
    assert not errors.keys() & {"stopped", "activation blocks.0.hook_resid_post"}  # before it


def test_there_are_enough_of_both():
    assert len(CONFIGURATIONS) >= 40
    assert len(KINDS) >= 20
    assert CONFIGURATIONS.keys().isdisjoint(KINDS)  # references are kept by these names
    assert CONFIGURATIONS.keys() >= NOT_PROCESSED

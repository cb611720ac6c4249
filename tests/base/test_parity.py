"""kvlens' base is TransformerLens 3.9's HookedTransformer on every release: to the bit, in float64 to 1e-11.

On 3.9 both run in this process; on another release a process with 3.9 writes what its class gives to a file. Where 3.9 is not
installed, and ``KVLENS_TRANSFORMER_LENS_3`` names no folder that holds it, these tests are skipped.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import plain_reference
import pytest
import torch
import transformer_lens
from plain_reference import CONFIGURATIONS, NOT_PROCESSED, of_configuration, of_family, of_text
from safetensors.torch import load_file
from tiny_hf import KINDS

from kvlens.base import HookedTransformer, HookedTransformerConfig
from kvlens.base.model import _Parent

HAS_PLAIN = _Parent.__name__ == "HookedTransformer"
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*deprecated", "ignore:from_pretrained", "ignore:folding norms", "ignore:fold_ln"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What TransformerLens' own class gives, by the name of a configuration or a kind of Hugging Face model."""
    if HAS_PLAIN:

        def measured(name):
            if name == "text":
                return of_text(plain_reference.build_plain_text)
            if name in CONFIGURATIONS:
                return of_configuration(name, plain_reference.build_plain)
            return of_family(name, plain_reference.build_plain_family)

        return functools.cache(measured)
    path = tmp_path_factory.mktemp("plain") / "plain.safetensors"
    folders = [os.environ.get("KVLENS_TRANSFORMER_LENS_3", ""), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder)}
    asked = "import transformer_lens; transformer_lens.HookedTransformer"
    if subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True).returncode:
        pytest.skip("needs TransformerLens 3.9: install it into a folder and set KVLENS_TRANSFORMER_LENS_3 to that")
    subprocess.run([sys.executable, plain_reference.__file__, str(path)], env=environment, check=True)
    stored = load_file(path)

    def read(name):
        return {key.removeprefix(f"{name}: "): value for key, value in stored.items() if key.startswith(f"{name}: ")}

    return read


def build(fields):
    return HookedTransformer(HookedTransformerConfig(**fields))


class WithoutTokenizer(HookedTransformer):
    tokenizer_by_name = staticmethod(lambda cfg: None)


def build_family(hf_model, processed):
    steps = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
    return WithoutTokenizer.from_pretrained("gpt2", hf_model=hf_model, **dict.fromkeys(steps, processed), device="cpu")


def assert_same(ours, theirs):
    different = sorted(key for key in ours.keys() | theirs.keys() if key not in ours or key not in theirs)
    assert different == []
    gradients = max((x.norm() for key, x in theirs.items() if key.startswith("gradient ")), default=0.0)
    for key, expected in theirs.items():
        if "names" in key:
            assert json.loads(bytes(ours[key].tolist())) == json.loads(bytes(expected.tolist())), key
        assert ours[key].dtype == expected.dtype, key
        seen = expected.isfinite()  # scores of keys that are not seen are -inf, and rows without keys NaN
        assert torch.equal(seen, ours[key].isfinite()), key
        found, expected = ours[key][seen], expected[seen]
        if expected.dtype == torch.float64:  # TransformerLens copies weights first, and sums in another order
            of_all = gradients if key.startswith("gradient ") else expected.norm()  # that of b_K is zero by theory
            assert (found - expected).norm() <= 1e-11 * of_all, key
        else:
            assert torch.equal(found, expected), key


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_everything_is_that_of_transformer_lens(name, plain):
    assert_same(of_configuration(name, build), plain(name))


@pytest.mark.parametrize("kind", KINDS)
def test_converted_hugging_face_models_are_those_of_transformer_lens(kind, plain):
    assert_same(of_family(kind, build_family), plain(kind))


def test_text_is_read_and_continued_as_by_transformer_lens(plain):
    theirs = plain("text")
    assert_same(of_text(lambda fields, tokenizer: HookedTransformer(HookedTransformerConfig(**fields), tokenizer)), theirs)


@pytest.mark.skipif(not HAS_PLAIN, reason="TransformerLens 3.9 alone has a HookedTransformer to inherit from")
def test_it_is_a_hooked_transformer_that_runs_none_of_its_code():
    inherited = [
        name
        for name in vars(_Parent)
        if not name.startswith("_") and getattr(HookedTransformer, name) is getattr(_Parent, name)
    ]
    assert inherited == []
    model = build({**plain_reference.SIZES})
    assert isinstance(model, _Parent)
    assert isinstance(model.cfg, transformer_lens.HookedTransformerConfig)
    assert [type(m).__module__ for m in model.modules() if "transformer_lens.components" in type(m).__module__] == []


@pytest.mark.skipif(not HAS_PLAIN, reason="TransformerLens 3.9 alone has a configuration to compare with")
def test_the_configuration_has_the_fields_and_defaults_of_transformer_lens():
    for changes in CONFIGURATIONS.values():
        fields = {**plain_reference.SIZES, **changes, "seed": None}
        assert HookedTransformerConfig(**fields).to_dict() == transformer_lens.HookedTransformerConfig(**fields).to_dict()
    few = dict(d_model=12, d_head=3, n_layers=2, n_ctx=5)
    assert HookedTransformerConfig(**few).to_dict() == transformer_lens.HookedTransformerConfig(**few).to_dict()


def test_there_are_enough_of_both():
    assert len(CONFIGURATIONS) >= 40
    assert len(KINDS) >= 20
    assert CONFIGURATIONS.keys().isdisjoint(KINDS)  # references are kept by these names
    assert CONFIGURATIONS.keys() >= NOT_PROCESSED

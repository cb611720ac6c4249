"""Models on the bridge, each loaded once for all tests, for test files that say which: by a fixture ``family``."""

import functools

import pytest
import torch
from precision import float64
from small_models import Shared
from tiny_hf import tiny_hf_model

from kvlens import HookedKVTransformer, KVTransformerBridge


@pytest.fixture(scope="module", autouse=True)
def laws_in_float64(request):
    """All tests here build and run their models in float64, but those of precision."""
    if request.module.__name__.endswith("test_exactness"):
        yield
    else:
        with float64():
            yield


@pytest.fixture(scope="session")
def both_of(tmp_path_factory):
    """``both_of(family)``: a model in float64, from one folder, on HookedKVTransformer and on the bridge."""

    @functools.cache
    def folder_of(family):
        tiny_hf_model(family).save_pretrained(folder := tmp_path_factory.mktemp(family))
        return folder

    double = dict(dtype=torch.float64, device="cpu")
    hooked = Shared(lambda family: HookedKVTransformer.from_pretrained_no_processing(folder_of(family), **double))
    bridges = Shared(lambda family: KVTransformerBridge.boot_transformers(folder_of(family), **double))
    yield lambda family: (hooked(family), bridges(family))
    with float64():
        hooked.assert_untouched()
        bridges.assert_untouched()


@pytest.fixture(scope="module")
def model(family, bridge_of):
    return bridge_of(family)

"""Models on the bridge, for test files that say which: by a fixture ``family``."""

import pytest
import torch
from bridge_models import on_both_front_ends, rounding_in_nats, tiny

from kvlens import KVTransformerBridge


@pytest.fixture(scope="module")
def model(family):
    return KVTransformerBridge.boot_transformers(tiny(family))


@pytest.fixture(scope="module")
def rounding(family):
    return rounding_in_nats(tiny(family))


@pytest.fixture(scope="module")
def both_front_ends(tmp_path_factory):
    """A GPT-2 in float64, from one folder."""
    return on_both_front_ends("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield

"""Models on the bridge, for test files that say which: by a fixture ``family``."""

import pytest
import torch
from bridge_models import on_both_front_ends, rounding_in_nats, rounding_of, tiny
from small_models import Shared

from kvlens import KVTransformerBridge


@pytest.fixture(scope="session")
def bridge_of():
    """A tiny model of a family, loaded once for all tests, which leave it as it is."""
    bridges = Shared(lambda family: KVTransformerBridge.boot_transformers(tiny(family)))
    yield bridges
    bridges.assert_untouched()


@pytest.fixture(scope="module")
def model(family, bridge_of):
    return bridge_of(family)


@pytest.fixture(scope="module")
def rounding(family):
    return rounding_of(tiny(family))


@pytest.fixture(scope="module")
def nats(family):
    """Rounding of a difference of log-probabilities."""
    return rounding_in_nats(tiny(family))


@pytest.fixture(scope="module")
def both_front_ends(tmp_path_factory):
    """A GPT-2 in float64, from one folder."""
    return on_both_front_ends("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield

"""Models on the bridge, for test files that say which: by a fixture ``family``."""

import pytest
import torch
from bridge_models import AS_THEY_ARE, rounding_in_nats, tiny

from kvlens import HookedKVTransformer, KVTransformerBridge


@pytest.fixture(scope="module")
def model(family):
    return KVTransformerBridge.boot_transformers(tiny(family))


@pytest.fixture(scope="module")
def rounding(family):
    return rounding_in_nats(tiny(family))


@pytest.fixture(scope="module")
def both_front_ends(tmp_path_factory):
    """A GPT-2 in float64, from one folder."""
    folder = tmp_path_factory.mktemp("gpt2")
    tiny("gpt2").double().save_pretrained(folder)
    hooked = HookedKVTransformer.from_pretrained(folder, dtype=torch.float64, device="cpu", **AS_THEY_ARE)
    return hooked, KVTransformerBridge.boot_transformers(folder, dtype=torch.float64)

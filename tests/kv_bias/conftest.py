"""What several files here share."""

import json

import pytest

from kvlens.files.tensors import checked_tensor_bytes, read_checked_tensors
from kvlens.kv_bias.storage import FORMAT, FORMAT_VERSION


@pytest.fixture
def rewrite(tmp_path):
    """``rewrite(bias, change)``: the path of its file after ``change(tensors, metadata, meta)``, the checksum renewed.

    ``meta`` is what the bias itself puts into the metadata; a string that ``change`` returns takes its place.
    """
    path = tmp_path / "rewritten.safetensors"

    def saved(bias, change):
        bias.save(path)
        tensors, metadata = read_checked_tensors(path, "test", FORMAT, FORMAT_VERSION)
        meta = json.loads(metadata["kv_bias"])
        own = change(tensors, metadata, meta)
        metadata["kv_bias"] = own if isinstance(own, str) else json.dumps(meta)
        path.write_bytes(checked_tensor_bytes(tensors, metadata))
        return path

    return saved

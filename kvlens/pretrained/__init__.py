"""Pretrained models: Hugging Face folders and loaded models, Baichuan-M1, KV-shift coefficients of public checkpoints.

The result is a configuration of :mod:`kvlens.base` with weights under its names, from which :mod:`kvlens.model` builds a model.

- :mod:`~kvlens.pretrained.hugging_face`: the entry point; all parts of a name, a folder or a loaded model;
- :mod:`~kvlens.pretrained.names`: public names, and where their files are;
- :mod:`~kvlens.pretrained.checkpoint_files`, ``transformers_model``, ``gguf``: files, and Transformers' model of them;
- :mod:`~kvlens.pretrained.translation`, ``rope_parameters``: Transformers' model as ours;
- :mod:`~kvlens.pretrained.llama2c`: the same from the files of llama2.c;
- :mod:`~kvlens.pretrained.rwkv`, ``rwkv_files``: RWKV-5 and 6, which Transformers does not have, and the files of it;
- :mod:`~kvlens.pretrained.baichuan`, ``shift_import``: what neither library supports.
"""

from kvlens.pretrained.checkpoint_files import read_tensors
from kvlens.pretrained.gguf import is_gguf, read_gguf
from kvlens.pretrained.hugging_face import PretrainedParts, check_trial, load_pretrained_parts
from kvlens.pretrained.llama2c import load_llama2c_parts
from kvlens.pretrained.names import cached_folder, is_local_folder, official_name, official_names
from kvlens.pretrained.rwkv_files import is_rwkv_cpp, is_rwkv_folder, read_rwkv_cpp, read_rwkv_folder
from kvlens.pretrained.shift_import import import_shift_coefficients
from kvlens.pretrained.translation import SUPPORTED_ARCHITECTURES

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "PretrainedParts",
    "cached_folder",
    "check_trial",
    "import_shift_coefficients",
    "is_gguf",
    "is_local_folder",
    "is_rwkv_cpp",
    "is_rwkv_folder",
    "load_llama2c_parts",
    "load_pretrained_parts",
    "official_name",
    "official_names",
    "read_gguf",
    "read_rwkv_cpp",
    "read_rwkv_folder",
    "read_tensors",
]

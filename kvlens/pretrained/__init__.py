"""Models that others trained: Hugging Face folders and loaded models, Baichuan-M1, KV-shift coefficients of public checkpoints.

What comes out is TransformerLens' own configuration and weights under its names; :mod:`kvlens.model` makes a model of them.

- :mod:`~kvlens.pretrained.parts`: the way in; config, weights, tokenizer and shift of a folder or of a model in memory;
- :mod:`~kvlens.pretrained.llama2c`, ``llama2c_tokenizer``: the same from the files of llama2.c;
- :mod:`~kvlens.pretrained.names`, ``folder``, ``architectures``: what is meant, is it all there, can it be read;
- :mod:`~kvlens.pretrained.code`: nothing that comes with a model is run;
- :mod:`~kvlens.pretrained.translation`, ``rotary``, ``weights``, ``tokenizer``: TransformerLens' converters, put right where
  they err; :mod:`~kvlens.pretrained.fields`: what is honored of a configuration; ``trial``: is the result the same model;
- :mod:`~kvlens.pretrained.baichuan`, ``shift_import``, ``checkpoint_files``: what neither library knows.
"""

from kvlens.pretrained.architectures import SUPPORTED_ARCHITECTURES
from kvlens.pretrained.checkpoint_files import read_tensors
from kvlens.pretrained.code import nothing_asked, refuse_names_with_code, refuse_to_run_code
from kvlens.pretrained.folder import without_progress_bars
from kvlens.pretrained.llama2c import load_llama2c_parts
from kvlens.pretrained.names import is_local_folder, official_name
from kvlens.pretrained.parts import PretrainedParts, load_pretrained_parts
from kvlens.pretrained.shift_import import import_shift_coefficients
from kvlens.pretrained.tokenizer import read_tokenizer
from kvlens.pretrained.trial import check_trial

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "PretrainedParts",
    "check_trial",
    "import_shift_coefficients",
    "is_local_folder",
    "load_llama2c_parts",
    "load_pretrained_parts",
    "nothing_asked",
    "official_name",
    "read_tensors",
    "read_tokenizer",
    "refuse_names_with_code",
    "refuse_to_run_code",
    "without_progress_bars",
]

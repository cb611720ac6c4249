"""The methods that load and save a kvlens model.

Each calls a function in :mod:`kvlens.model.loading`, :mod:`kvlens.model.storage` or :mod:`kvlens.model.shift_graft`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlens.base import HookedTransformer
from kvlens.checks import checked
from kvlens.errors import KVLensError
from kvlens.model.loading import M, from_hooked_transformer, from_llama2c, from_pretrained
from kvlens.model.shift_graft import load_shift_coefficients
from kvlens.model.storage import load_model, save_model
from kvlens.zoo import folder_of, is_hugging_face


class LoadsAndSaves(HookedTransformer):
    """A HookedTransformer that can be loaded from several kinds of checkpoints and saved to a kvlens folder."""

    @classmethod
    @checked
    def from_pretrained(
        cls: type[M], model_name: str | Path, *, hf_model: Any = None, tokenizer: Any = None, **kwargs: Any
    ) -> M:
        """A pretrained softmax model: see :func:`kvlens.model.loading.from_pretrained` for every argument."""
        return from_pretrained(cls, model_name, hf_model=hf_model, tokenizer=tokenizer, **kwargs)

    @classmethod
    def from_pretrained_no_processing(cls: type[M], model_name: str | Path, **kwargs: Any) -> M:
        """:meth:`from_pretrained` with the weights as they are."""
        steps = ("fold_ln", "center_writing_weights", "center_unembed", "refactor_factored_attn_matrices", "fold_value_biases")
        return from_pretrained(cls, model_name, **{**dict.fromkeys(steps, False), **kwargs})

    @classmethod
    @checked
    def from_llama2c(cls: type[M], path: str | Path, tokenizer_path: str | Path | None = None, **kwargs: Any) -> M:
        """A checkpoint of llama2.c and its tokenizer: see :func:`kvlens.model.loading.from_llama2c` for every argument."""
        return from_llama2c(cls, path, tokenizer_path, **kwargs)

    @classmethod
    @checked
    def from_hooked_transformer(cls: type[M], model: HookedTransformer, **changes: Any) -> M:
        """A copy of an existing model, with changes to its configuration (``kv_shift=KVShiftConfig(init="identity")``)."""
        return from_hooked_transformer(cls, model, **changes)

    @classmethod
    @checked
    def from_zoo(cls: type[M], name: str = "docs-linear", *, device: Any = None, dtype: torch.dtype | str | None = None) -> M:
        """A small trained model that ships with kvlens, by name; see :func:`kvlens.zoo.names`.

        Raises:
            KVLensError: no such model, or one in Transformers' format, which :class:`kvlens.KVTransformerBridge` loads.
        """
        folder = folder_of(name)
        if is_hugging_face(folder):
            raise KVLensError(
                f"from_zoo: {name} is a model of Transformers' own class; KVTransformerBridge.from_zoo({name!r}) loads it"
            )
        return cls.load(folder, device=device, dtype=dtype)

    @classmethod
    @checked
    def load(cls: type[M], folder: str | Path, *, device: Any = None, dtype: torch.dtype | str | None = None) -> M:
        """Read what :meth:`save` wrote."""
        return load_model(cls, folder, device=device, dtype=dtype)

    @checked
    def save(self, folder: str | Path, *, overwrite: bool = False, stored_dtype: torch.dtype | str | None = None) -> None:
        """Write weights (safetensors), configuration (JSON) and tokenizer to ``folder``, atomically."""
        save_model(self, folder, overwrite=overwrite, stored_dtype=stored_dtype)

    @checked
    def load_shift_coefficients(self, source: Mapping[str, Tensor] | str | Path) -> None:
        """Load the KV-shift coefficients of a public checkpoint: a state dict, a folder or a weights file.

        :mod:`kvlens.pretrained.shift_import` lists the supported formats; nothing but the coefficients changes.

        Raises:
            KVLensError: coefficients are missing or do not fit this model, which is then unchanged.
        """
        load_shift_coefficients(self, source)

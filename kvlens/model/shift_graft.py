"""Putting imported KV-shift coefficients into a model; all are checked before any is written."""

from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.base import HookedTransformer
from kvlens.errors import KVLensError
from kvlens.model.config import KVShiftConfig
from kvlens.pretrained.checkpoint_files import read_tensors
from kvlens.pretrained.shift_import import import_shift_coefficients, is_shift_coefficient, parameter_from_coefficients


def shift_config_of(coefficients: Mapping[str, Float[Tensor, "kv_head taps"]]) -> KVShiftConfig | None:
    """The :class:`kvlens.KVShiftConfig` for the result of :func:`import_shift_coefficients`; None if that is empty."""
    if not coefficients:
        return None
    window = max(coef.shape[1] for coef in coefficients.values()) - 1
    keys, values = (any(name.endswith(f".{x}_shift_coef") for name in coefficients) for x in "kv")
    return KVShiftConfig(window=window, keys=keys, values=values)


def load_shift_coefficients(model: HookedTransformer, source: Mapping[str, Tensor] | str | Path) -> None:
    """Give ``model`` the KV-shift coefficients of a public checkpoint; its other weights stay as they are.

    Args:
        model: a model whose ``kv_shift`` matches the checkpoint in window, keys and values. Under ``gate`` and ``clamp``
            the *parameter* is set so that the coefficients as used are the checkpoint's.
        source: a state dict, a checkpoint's folder, or one weights file, in a format of
            :mod:`kvlens.pretrained.shift_import`.

    Raises:
        KVLensError: there are no coefficients, one is missing, or they do not fit the model. The model is then unchanged.
    """
    tensors = source if isinstance(source, Mapping) else read_tensors(source, is_shift_coefficient)
    coefficients = import_shift_coefficients(tensors)
    if not coefficients:
        raise KVLensError(
            "load_shift_coefficients: no shift coefficients found; expected names like layers.0.self_attn.alpha1, ...K or "
            f"...conv_k, got {sorted(tensors)[:3] if isinstance(source, Mapping) else str(source)}"
        )
    place_shift_coefficients(model, coefficients)


@torch.no_grad()
def place_shift_coefficients(model: HookedTransformer, coefficients: Mapping[str, Tensor]) -> None:
    """Write ``coefficients``, by kvlens' names and in kvlens' order, into the model's parameters.

    Raises:
        KVLensError: as :func:`load_shift_coefficients`.
    """
    shift = model.cfg.kv_shift
    if model.attached_kv_bias is not None:
        raise KVLensError("load_shift_coefficients: a KV bias of the current weights is attached; call detach_kv_bias() first")
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if name.endswith(("k_shift_coef", "v_shift_coef"))
    }
    _check_fit(parameters, coefficients)
    new = {name: parameter_from_coefficients(coef, shift.parametrization) for name, coef in coefficients.items()}
    for name, value in new.items():
        parameters[name].copy_(value)


def _check_fit(parameters: Mapping[str, Tensor], coefficients: Mapping[str, Tensor]) -> None:
    """Raise KVLensError unless parameters and coefficients correspond one to one, with equal shapes."""
    missing = sorted(parameters.keys() - coefficients.keys())
    extra = sorted(coefficients.keys() - parameters.keys())
    if missing or extra:
        raise KVLensError(
            "load_shift_coefficients: the checkpoint and the model shift different things (layers, keys, values): the model "
            f"has {len(missing)} parameters without coefficients {missing[:3]}, the checkpoint {len(extra)} coefficients "
            f"without a parameter {extra[:3]}"
        )
    for name, coef in coefficients.items():
        if coef.shape != parameters[name].shape:
            heads, taps = parameters[name].shape
            raise KVLensError(
                f"load_shift_coefficients: {name} of the model is for {heads} key-value heads and window {taps - 1}, the "
                f"checkpoint has {coef.shape[0]} heads and window {coef.shape[1] - 1}"
            )

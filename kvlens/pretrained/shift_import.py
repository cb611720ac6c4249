"""Converting KV-shift coefficients from the formats of public checkpoints to kvlens' own, and placing them in a model.

kvlens keeps ``blocks.{l}.attn.k_shift_coef`` and ``v_shift_coef`` [kv_head, window+1], index 0 = the current token. Elsewhere:

| tensors of a layer | shape | order | where |
|---|---|---|---|
| ``alpha1 alpha2``, ``beta1 beta2`` | (n_kv,) each | 1 = current, 2 = previous | KVSA eq. 4-6 |
| ``K``, ``V`` | (n_kv, 2) | column 0 = previous | KVSA app. F (app. M of the ICML version) |
| ``conv_k``, ``conv_v`` | (1, 1, n_kv, 1, 2) | column 0 = previous | Baichuan-M1 |

The two column forms are one: the code in KVSA's appendix pads the sequence with one zero in front, unfolds windows of two
(oldest token first) and multiplies them by ``K`` seen as (1, 1, n_kv, 1, 2); decoding multiplies ``K[:, :1]`` with the kept
key and ``K[:, 1:]`` with the new one. So the *last* column belongs to the current token, and kvlens' index s is column
``window - s``. At initialization the order makes no difference, because both columns have the same distribution, but in a
trained model it does. Either shape is accepted under either name. Values are the coefficients as used, so any
parametrization can load them.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.checks import checked
from kvlens.errors import KVLensError

__all__ = ["import_shift_coefficients", "is_shift_coefficient", "parameter_from_coefficients", "place_shift_coefficients"]

_IN_A_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.([0-9]{1,6})\.(?:.+\.)?(alpha[0-9]+|beta[0-9]+|K|V|conv_k|conv_v)$")
_PROJECTION = {"alpha": "k", "K": "k", "conv_k": "k", "beta": "v", "V": "v", "conv_v": "v"}
_FORMS = "alpha1 and alpha2 (beta1 and beta2) of shape (n_kv,), K (V) of shape (n_kv, 2), conv_k (conv_v) of (1, 1, n_kv, 1, 2)"


def is_shift_coefficient(name: str) -> bool:
    """Say whether a tensor's name is that of a shift coefficient in one of the public forms."""
    return _IN_A_LAYER.search(name) is not None


@checked
def import_shift_coefficients(tensors: Mapping[str, Tensor]) -> dict[str, Float[Tensor, "kv_head taps"]]:
    """Find the shift coefficients in a public state dict and convert them to kvlens' format.

    Args:
        tensors: a state dict in one of the forms above; other tensors are ignored. Layers may differ in their heads.

    Returns:
        ``{"blocks.{l}.attn.k_shift_coef": [kv_head, window+1], ...}`` for every layer and projection found, in the order of
        the layers, the stored dtype kept; empty where there are none.

    Raises:
        KVLensError: half of a pair is missing, two forms are mixed in one layer, a shape fits no form, or a value is not
            finite.

    Source: KVSA eq. 4-6 and app. F; our index 0 is their alpha_1.
    """
    parts: dict[tuple[int, str], dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        found = _IN_A_LAYER.search(name)
        if found is None:
            continue
        layer, leaf = int(found[1]), found[2]
        of_projection = parts[layer, _PROJECTION[leaf.rstrip("0123456789")]]
        if leaf in of_projection:
            raise KVLensError(f"shift coefficients: layer {layer} holds two tensors called {leaf} (one of them is {name})")
        of_projection[leaf] = tensor
    return {f"blocks.{layer}.attn.{x}_shift_coef": _read(layer, parts[layer, x]) for layer, x in sorted(parts)}


def _read(layer: int, leaves: dict[str, Tensor]) -> Float[Tensor, "kv_head taps"]:
    """The coefficients of one projection of one layer, from the tensors that hold them."""
    numbered = all(leaf[-1].isdigit() for leaf in leaves)
    if len(leaves) > 1 and not numbered:
        raise KVLensError(
            f"shift coefficients: layer {layer} holds {sorted(leaves)}: two forms of the same, which differ in order"
        )
    if not all(tensor.is_floating_point() and bool(tensor.isfinite().all()) for tensor in leaves.values()):
        dtypes = {leaf: str(tensor.dtype) for leaf, tensor in leaves.items()}
        raise KVLensError(f"shift coefficients: those of layer {layer} are not finite floating-point numbers: {dtypes}")
    return _from_numbers(layer, leaves) if numbered else _from_columns(layer, *leaves.popitem())


def _from_numbers(layer: int, leaves: dict[str, Tensor]) -> Float[Tensor, "kv_head taps"]:
    stem = next(iter(leaves)).rstrip("0123456789")
    names = [f"{stem}{i + 1}" for i in range(max(2, len(leaves)))]
    missing = [name for name in names if name not in leaves]
    if missing:
        raise KVLensError(f"shift coefficients: layer {layer} has {sorted(leaves)} but no {missing[0]}; expected {_FORMS}")
    shapes = {name: list(leaves[name].shape) for name in names}
    if leaves[names[0]].ndim != 1 or len({str(shape) for shape in shapes.values()}) > 1:
        raise KVLensError(f"shift coefficients: layer {layer} has shapes {shapes}; expected {_FORMS}")
    return torch.stack([leaves[name] for name in names], dim=-1)


def _from_columns(layer: int, leaf: str, tensor: Tensor) -> Float[Tensor, "kv_head taps"]:
    shape = tuple(tensor.shape)
    if len(shape) == 5 and shape[0] == shape[1] == shape[3] == 1:
        tensor = tensor[0, 0, :, 0]
    if tensor.ndim != 2 or tensor.shape[1] < 2:
        raise KVLensError(f"shift coefficients: {leaf} of layer {layer} has the shape {list(shape)}; expected {_FORMS}")
    return tensor.flip(-1)


def parameter_from_coefficients(coef: Float[Tensor, "kv_head taps"], parametrization: str) -> Float[Tensor, "kv_head taps"]:
    """The trainable parameter whose coefficients, as used, are ``coef``.

    The inverse of :func:`kvlens.ops.kv_shift.coefficients_from_parameter`: under ``free`` the coefficients themselves, under
    ``clamp`` too, if they lie in [0, 1]; under ``gate`` their logarithms, if they are positive and sum to 1.

    Raises:
        KVLensError: the parametrization cannot produce these coefficients.
    """
    if parametrization == "clamp" and not bool(((coef >= 0) & (coef <= 1)).all()):
        raise KVLensError(
            f"parametrization='clamp' holds coefficients in [0, 1] only; these reach from {float(coef.min()):.4g} to "
            f"{float(coef.max()):.4g}: build the model with KVShiftConfig(parametrization='free')"
        )
    if parametrization != "gate":
        return coef
    off = float((coef.double().sum(dim=-1) - 1).abs().max())
    # each of the stored coefficients is at most 1, so its rounding is at most half an eps
    if not bool((coef > 0).all()) or off > coef.shape[1] * torch.finfo(coef.dtype).eps / 2:
        raise KVLensError(
            "parametrization='gate' holds positive coefficients that sum to 1 only; the smallest of these is "
            f"{float(coef.min()):.4g}, their sums are off by up to {off:.2g}: build the model with "
            "KVShiftConfig(parametrization='free')"
        )
    return coef.to(torch.promote_types(coef.dtype, torch.float32)).log()


@torch.no_grad()
def place_shift_coefficients(model: Any, coefficients: Mapping[str, Tensor]) -> None:
    """Write ``coefficients``, by kvlens' names and in kvlens' order, into the model's parameters.

    Raises:
        KVLensError: as ``load_shift_coefficients``.
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

"""What an argument has to be - a whole number, a path, a device - asked in one place and answered in one sentence."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlens.errors import KVLensError


def check_whole(what: str, value: Any, least: int = 0, most: int | None = None) -> None:
    """Raise KVLensError unless ``value`` is a whole number of at least ``least`` and at most ``most``; a bool is none."""
    limits = f"at least {least}" if most is None or (isinstance(value, int) and value < least) else f"{least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise KVLensError(f"{what} must be a whole number of {limits}, got {value!r}")
    if value < least or (most is not None and value > most):
        raise KVLensError(f"{what} must be {limits}, got {value}")


def check_number(what: str, value: Any) -> None:
    """Raise KVLensError unless ``value`` is a finite number; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise KVLensError(f"{what} must be a finite number, got {value!r}")


def check_flag(what: str, value: Any) -> None:
    """Raise KVLensError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise KVLensError(f"{what} must be True or False, got {value!r}")


def check_seed(what: str, value: Any) -> None:
    """Raise KVLensError unless torch's generators take ``value``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise KVLensError(f"{what} must be a whole number from 0 to 2**63 - 1, got {value!r}")


def check_function(what: str, value: Callable[..., Any] | None) -> None:
    """Raise KVLensError unless ``value`` can be called; None is fine."""
    if value is not None and not callable(value):
        raise KVLensError(f"{what} must be a function or None, got {value!r}")


def path_of(what: str, value: str | Path) -> Path:
    """``value`` as a path, with ``~`` as the home folder.

    Raises:
        KVLensError: neither a string nor a path, an empty one, or one that no file system takes.
    """
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or "\0" in str(value):
        raise KVLensError(f"{what}: expected a path, got {value!r}; give it as a string or a pathlib.Path")
    path = Path(os.path.expanduser(value))
    try:
        path.exists()
    except OSError as error:  # a name too long for the file system
        raise KVLensError(f"{what}: {str(path)!r} can be no path: {error.strerror or error}; choose another") from error
    return path


def check_device(what: str, device: Any) -> None:
    """Raise KVLensError unless tensors can be computed on ``device``; None is always fine. Imports torch."""
    if device is None:
        return
    import torch  # kept out of the command line's start

    try:
        torch.ones(1, device=device).sum().item()  # "meta" makes tensors, and holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise KVLensError(f"{what}: {device!r} cannot be used here ({reason}); cpu always can") from error

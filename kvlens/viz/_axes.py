"""Drawing into axes of the caller, as is usual with matplotlib."""

from collections.abc import Iterable
from typing import Any

from kvlens.errors import KVLensError


def check_ax(what: str, ax: Any) -> None:
    """Raise KVLensError unless ``ax`` is a matplotlib Axes."""
    from matplotlib.axes import Axes  # takes half a second, which pages do not need

    if not isinstance(ax, Axes):
        raise KVLensError(f"{what}: expected a matplotlib Axes (plt.subplots() makes them), got {type(ax).__name__}")


def listed_axes(what: str, axes: Any, n: int, needs: str) -> list[Any]:
    """The axes of an array (as ``plt.subplots`` returns it), or of any iterable, in order.

    Args:
        what: the argument's name, for messages.
        axes: the argument.
        n: number of axes needed; further ones are not used.
        needs: what they are needed for, for messages.

    Raises:
        KVLensError: not axes, or fewer than ``n``.
    """
    given = list(getattr(axes, "flat", axes)) if isinstance(axes, Iterable) else [axes]
    for ax in given:
        check_ax(what, ax)
    if len(given) < n:
        raise KVLensError(f"{what}: expected {n} of them ({needs}), got {len(given)}")
    return given[:n]

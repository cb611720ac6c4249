"""Drawing into axes that the caller has made, as matplotlib's users expect."""

from collections.abc import Iterable
from typing import Any

from kvlens.errors import KVLensError


def check_ax(what: str, ax: Any) -> None:
    """Raise KVLensError unless ``ax`` is an Axes of matplotlib."""
    from matplotlib.axes import Axes  # takes half a second, which pages do not need

    if not isinstance(ax, Axes):
        raise KVLensError(f"{what}: expected an Axes of matplotlib (plt.subplots() makes them), got {type(ax).__name__}")


def listed_axes(what: str, axes: Any, n: int, needs: str) -> list[Any]:
    """The axes of an array (as ``plt.subplots`` returns it), or of any iterable, in order.

    Args:
        what: the argument, for messages.
        axes: what was given.
        n: how many are needed; further ones are left alone.
        needs: what they are needed for.

    Raises:
        KVLensError: something else, or fewer than ``n``.
    """
    given = list(getattr(axes, "flat", axes)) if isinstance(axes, Iterable) else [axes]
    for ax in given:
        check_ax(what, ax)
    if len(given) < n:
        raise KVLensError(f"{what}: expected {n} of them ({needs}), got {len(given)}")
    return given[:n]

"""`Piece`, the result of every plot: part of a page, or alone in a notebook, an HTML file, or as PNG and SVG."""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from kvlens.checks import Within, checked
from kvlens.errors import KVLensError
from kvlens.files import write_atomically
from kvlens.viz._document import document, in_frame


@dataclass(frozen=True, repr=False)
class Piece:
    """One picture or table.

    Attributes:
        name: a short description, used as the title of its own file.
        body: its HTML, escaped already; interactive parts have ``data-kvlens`` and their data as JSON (``static/kvlens.js``).
        circuitsvis: whether it needs circuitsvis' JavaScript.
        figure: draws it with matplotlib; None if there is no static picture.
    """

    name: str
    body: str
    circuitsvis: bool = False
    figure: Callable[[], Any] | None = None

    def __repr__(self) -> str:
        """One line, for contexts that do not show HTML; the page itself may have megabytes."""
        ways = "save_html" if self.figure is None else "save_html, save_png, save_svg"
        return f"<Piece {self.name!r}: {len(self.body) / 1000:,.0f} kB of HTML; {ways}>"

    def to_html(self) -> str:
        """The piece as one self-contained HTML document."""
        return document(f"<main data-draw>{self.body}</main>", title=self.name, circuitsvis=self.circuitsvis)

    def save_html(self, path: str | Path) -> None:
        """Write the piece as one file that works without a network."""
        write_atomically(path, self.to_html())

    @checked
    def save_png(self, path: str | Path, *, dpi: Annotated[int, Within(10, 2400)] = 200) -> None:
        """Write the static picture as PNG.

        Raises:
            KVLensError: there is no static picture, the file cannot be written, or ``dpi`` is out of range.
        """
        write_atomically(path, self._drawn("png", dpi=dpi))

    def save_svg(self, path: str | Path) -> None:
        """Write the static picture as SVG, reproducible to the byte.

        Raises:
            KVLensError: there is no static picture, or the file cannot be written.
        """
        write_atomically(path, self._drawn("svg", metadata={"Date": None}))

    def _repr_html_(self) -> str:
        return in_frame(self.to_html())

    def _drawn(self, kind: str, **options: Any) -> bytes:
        if self.figure is None:
            raise KVLensError(f"{self.name}: it has no static figure; use save_html")
        import matplotlib  # takes half a second, which pages do not need

        buffer = io.BytesIO()
        with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "kvlens"}):
            warnings.filterwarnings("ignore", message="Glyph .* missing from")  # emoji are drawn as a box
            self.figure().savefig(buffer, format=kind, bbox_inches="tight", **options)
        return buffer.getvalue()

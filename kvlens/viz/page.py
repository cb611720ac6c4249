"""Several pieces in one HTML file."""

from pathlib import Path

from kvlens.checks import checked
from kvlens.files import write_atomically
from kvlens.viz._document import document, in_frame
from kvlens.viz._text import html_text
from kvlens.viz.piece import Piece


class Page:
    """A page of pieces, from top to bottom, as one file that works offline.

    Args:
        title: title of the document, and its first heading.
        subtitle: a line below it.
    """

    @checked
    def __init__(self, title: str, subtitle: str = ""):
        self.title, self.subtitle = title, subtitle
        self._sections: list[tuple[str, str, list[Piece]]] = []
        self._footer = ""

    @checked
    def section(self, heading: str, note: str = "") -> "Page":
        """Start a section for the pieces that are added next.

        Args:
            heading: its title.
            note: an explanation for the reader.
        """
        self._sections.append((heading, note, []))
        return self

    @checked
    def add(self, piece: Piece) -> "Page":
        """Append ``piece``; return the page, so that calls chain."""
        if not self._sections:
            self.section("")
        self._sections[-1][2].append(piece)
        return self

    @checked
    def footer(self, text: str) -> "Page":
        """Set the text of the footer."""
        self._footer = text
        return self

    def to_html(self) -> str:
        """The page as one self-contained HTML document."""
        parts = [f"<header><h1>{html_text(self.title)}</h1>{_paragraph(self.subtitle, 'subtitle')}</header>"]
        for heading, note, pieces in self._sections:
            title = f"<h2>{html_text(heading)}</h2>" if heading else ""
            parts.append(f"<section>{title}{_paragraph(note, 'note')}{''.join(p.body for p in pieces)}</section>")
        parts.append(f"<footer>{_paragraph(self._footer, 'note')}</footer>" if self._footer else "")
        circuitsvis = any(piece.circuitsvis for _, _, pieces in self._sections for piece in pieces)
        return document(f"<main>{''.join(parts)}</main>", title=self.title, circuitsvis=circuitsvis)

    def save_html(self, path: str | Path) -> None:
        """Write the page as one file.

        Raises:
            KVLensError: the file cannot be written.
        """
        write_atomically(path, self.to_html())

    def _repr_html_(self) -> str:
        return in_frame(self.to_html())


def _paragraph(text: str, kind: str) -> str:
    return f'<p class="{kind}">{html_text(text)}</p>' if text else ""

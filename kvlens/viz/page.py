"""Several pieces in one HTML file."""

import re
from pathlib import Path

from kvlens.checks import checked
from kvlens.files import write_atomically
from kvlens.viz._document import document, in_frame
from kvlens.viz._text import html_text
from kvlens.viz.piece import Piece

NOSCRIPT = (
    '<noscript><p class="note">JavaScript is switched off. Sentences, tables and colored texts are complete; the other figures '
    "are missing.</p></noscript>"
)


class Page:
    """A page of pieces, from top to bottom, as one file that works offline.

    Args:
        title: title of the document, and its first heading.
        subtitle: a line below it.
    """

    @checked
    def __init__(self, title: str, subtitle: str = ""):
        self.title, self.subtitle = title, subtitle
        self._sections: list[tuple[str, str, list[Piece | str]]] = []
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
    def note(self, text: str) -> "Page":
        """Append a paragraph to the section; return the page."""
        if not self._sections:
            self.section("")
        self._sections[-1][2].append(text)
        return self

    @checked
    def footer(self, text: str) -> "Page":
        """Set the text of the footer."""
        self._footer = text
        return self

    def to_html(self) -> str:
        """The page as one self-contained HTML document."""
        names = _anchors([heading for heading, _, _ in self._sections])
        header = f"<header><h1>{html_text(self.title)}</h1>{_paragraph(self.subtitle, 'subtitle')}</header>"
        parts = [header, NOSCRIPT, self._contents(names)]
        for anchor, (heading, note, pieces) in zip(names, self._sections, strict=True):
            title = f"<h2>{html_text(heading)}</h2>" if heading else ""
            bodies = "".join(_paragraph(p, "note") if isinstance(p, str) else p.body for p in pieces)
            parts.append(f'<section id="{anchor}">{title}{_paragraph(note, "note")}{bodies}</section>')
        parts.append(f"<footer>{_paragraph(self._footer, 'note')}</footer>" if self._footer else "")
        every = [piece for _, _, pieces in self._sections for piece in pieces if isinstance(piece, Piece)]
        return document(f"<main>{''.join(parts)}</main>", title=self.title, circuitsvis=any(p.circuitsvis for p in every))

    def _contents(self, names: list[str]) -> str:
        """Links to the sections that have a heading, where there are several."""
        links = [
            f'<a href="#{name}">{html_text(heading)}</a>'
            for name, (heading, _, _) in zip(names, self._sections, strict=True)
            if heading
        ]
        return f'<nav class="contents" aria-label="Contents">{"".join(links)}</nav>' if len(links) > 1 else ""

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


def _anchors(headings: list[str]) -> list[str]:
    """An id for each section: the letters and digits of its heading, with a number where two are alike."""
    names: list[str] = []
    for heading in headings:
        words = re.sub("[^a-z0-9]+", "-", heading.lower()).strip("-") or "section"
        n = sum(name == words or name.rpartition("-")[0] == words for name in names)
        names.append(f"{words}-{n + 1}" if n else words)
    return names

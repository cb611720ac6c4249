"""A page: the HTML document, `Piece`, the result of every plot, and `Page`, several pieces in one file.

A document is self-contained, with a content security policy that forbids it to load anything. The policy lists the hash of each
script that may run. A script or handler that slipped through the escaping would not be listed, and ``default-src 'none'``
blocks every request.

circuitsvis' own ``_repr_html_`` needs the internet to choose a form, and its local form repeats the 1.3 MB bundle in each
figure; here the bundle is read from the installed package and included once, compressed. A script unpacks it when the reader
asks for it (``static/circuitsvis.js``); the policy lists the hash of the unpacked script.
"""

import base64
import functools
import hashlib
import html
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvlens.checks import Within, checked
from kvlens.errors import KVLensError
from kvlens.files import write_atomically
from kvlens.viz._text import html_text, packed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCRIPTS = tuple(
    f"{name}.js"
    for name in ("base", "kvlens", "circuitsvis", "explained", "dual", "linked", "depth", "arcs", "circuit", "contents", "save")
)
"""Our scripts, in the order in which they run; the first has the shared functions."""


def document(body: str, *, title: str, circuitsvis: bool, asks: str | None = None) -> str:
    """Write one HTML file.

    Args:
        body: HTML, escaped already.
        title: text, escaped here.
        circuitsvis: whether the body has a circuitsvis figure.
        asks: one more script, which may ask the server that the page comes from.
    """
    style, own = _asset("kvlens.css"), [_asset(name) for name in (*SCRIPTS, *([asks] if asks else []))]
    bundle = [circuitsvis_bundle()] if circuitsvis else []
    allowed = " ".join(_hash(source) for source in [*bundle, *own])
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    policy += "; connect-src 'self'" if asks else ""
    scripts = "".join(f"<script>{source}</script>\n" for source in own)
    compressed = f'<script type="text/plain" id="circuitsvis">{packed_bundle()}</script>\n' if bundle else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{html_text(title)}</title>
<style>
{style}</style>
</head>
<body>
{body}
{compressed}{scripts}</body>
</html>
"""


def in_frame(page: str) -> str:
    """``page`` for a notebook's output, in its own frame, so that styles and scripts of different pieces do not interfere.

    The frame grows to the height of its content (``kvlens.js``).
    """
    return f'<iframe srcdoc="{html.escape(page)}" style="width:100%;height:420px;border:0" loading="eager"></iframe>'


OTHERWISE = {
    r'(`\$\{\w+\.replace\(/\\s/g,""\)\}) \(\$\{\w+\}\)`': r"\1`",
    r"(ticks:\{display:!0)(,minRotation:45,maxRotation:90)?\}": r"\1,autoSkip:!1\2}",
}
"""What circuitsvis does otherwise in a page: it adds its own numbers to tokens that have theirs, and where it is narrow labels
every second one."""


@functools.cache
def circuitsvis_bundle() -> str:
    """circuitsvis' JavaScript from the installed package, which defines the global ``CircuitsVis``; :data:`OTHERWISE`.

    Raises:
        KVLensError: the installed circuitsvis has no bundle.
    """
    try:
        source = files("circuitsvis").joinpath("dist", "cdn", "iife.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise KVLensError("circuitsvis' JavaScript (dist/cdn/iife.js) is missing; pip install 'circuitsvis>=1.43'") from error
    for written, instead in OTHERWISE.items():
        source = re.sub(written, instead, source)
    return source.replace("</script", "<\\/script")  # in a string of React, where it would end our element


@functools.cache
def packed_bundle() -> str:
    """circuitsvis' JavaScript, compressed."""
    return packed(circuitsvis_bundle())


@functools.cache
def _asset(name: str) -> str:
    return files("kvlens.viz").joinpath("static", name).read_text(encoding="utf-8")


@functools.cache
def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


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
    figure: "Callable[[], Figure] | None" = None

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

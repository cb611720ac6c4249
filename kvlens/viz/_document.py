"""The HTML document around the pieces: self-contained, with a content security policy that forbids it to load anything.

The policy lists the hash of each script that may run. A script or handler that slipped through the escaping would not be
listed, and ``default-src 'none'`` blocks every request.

circuitsvis' own ``_repr_html_`` needs the internet to choose a form, and its local form repeats the 1.3 MB bundle in each
figure; here the bundle is read from the installed package and included once, compressed. A script unpacks it when the reader
asks for it (``static/circuitsvis.js``); the policy lists the hash of the unpacked script.
"""

import base64
import functools
import hashlib
import html
from importlib.resources import files

from kvlens.errors import KVLensError
from kvlens.viz._text import html_text, packed

SCRIPTS = tuple(
    f"{name}.js"
    for name in ("base", "kvlens", "circuitsvis", "explained", "dual", "linked", "depth", "arcs", "contents", "save")
)
"""Our scripts, in the order in which they run; the first has the shared functions."""


def document(body: str, *, title: str, circuitsvis: bool) -> str:
    """One HTML file.

    Args:
        body: HTML, escaped already.
        title: text, escaped here.
        circuitsvis: whether the body has a circuitsvis figure.
    """
    style, own = _asset("kvlens.css"), [_asset(name) for name in SCRIPTS]
    bundle = [circuitsvis_bundle()] if circuitsvis else []
    allowed = " ".join(_hash(source) for source in [*bundle, *own])
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
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


@functools.cache
def circuitsvis_bundle() -> str:
    """circuitsvis' JavaScript from the installed package, which defines the global ``CircuitsVis``.

    Raises:
        KVLensError: the installed circuitsvis has no bundle.
    """
    try:
        source = files("circuitsvis").joinpath("dist", "cdn", "iife.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise KVLensError("circuitsvis' JavaScript (dist/cdn/iife.js) is missing; pip install 'circuitsvis>=1.43'") from error
    return source.replace("</script", "<\\/script")  # in a string of React, where it would end our element


@functools.cache
def packed_bundle() -> str:
    """The same, compressed."""
    return packed(circuitsvis_bundle())


@functools.cache
def _asset(name: str) -> str:
    return files("kvlens.viz").joinpath("static", name).read_text(encoding="utf-8")


@functools.cache
def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"

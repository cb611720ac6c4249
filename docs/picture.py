"""The README's picture: `python docs/picture.py` draws the page of `kvlens explain` with Chromium.

The file keeps the words that the command wrote, so that a test notices when it writes others.
"""

import contextlib
import io
import shutil
import subprocess
import tempfile
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / ".github/explanation.png"
SIZE = "1130,900"


def words(page: Path) -> str:
    """What `kvlens explain` says of its example, on its page and in the terminal, up to the glossary."""
    from kvlens.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["explain", "--out", str(page), "--sections"])
    return " ".join(printed.getvalue().partition("What the words mean")[0].split())


def draw(picture: Path) -> None:
    """Draw the page, and store its words as the picture's description."""
    from PIL import Image, PngImagePlugin

    browser = shutil.which("chromium") or shutil.which("chromium-browser") or "chromium"
    flags = ("--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=4000", f"--window-size={SIZE}")
    with tempfile.TemporaryDirectory() as folder:
        page, drawn = Path(folder, "page.html"), Path(folder, "page.png")
        description = PngImagePlugin.PngInfo()
        description.add_itxt("Description", words(page))
        subprocess.run([browser, *flags, f"--screenshot={drawn}", page.as_uri()], check=True, capture_output=True)
        Image.open(drawn).quantize(64).save(picture, pnginfo=description, optimize=True)


if __name__ == "__main__":
    draw(PICTURE)

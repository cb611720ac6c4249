"""The pages of ``docs``: their code prints what stands below it. The built site is offline, and its search finds things.

The site is what ``.ci/run`` builds before the tests; without it the tests of it are skipped and say so.
"""

import contextlib
import importlib.util
import io
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import pytest
from test_chromium import CHROMIUM, FLAGS, WITHOUT
from tiny_hf import tiny_hf_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]
DOCS, SITE = ROOT / "docs", ROOT / "build/site"
PAGES = [DOCS / "start.md", *sorted(path for path in (DOCS / "how-to").glob("*.md") if path.name != "index.md")]
BUILD = "sphinx-build -E -W --keep-going -d build/doctrees -c docs . build/site"
needs_site = pytest.mark.skipif(not (SITE / "index.html").is_file(), reason=f"no site here; {BUILD}")


def examples(page: str) -> list[tuple[str, str]]:
    """The Python blocks of a page, each with the text that stands as its output, if any."""
    return re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", page, flags=re.DOTALL)


def write_models(folder: Path, needed: str) -> None:
    """The files that pages load: tiny models with random weights."""
    if ".gguf" in needed:
        pytest.importorskip("gguf", reason='needs the extra: pip install -e ".[gguf]"')
        from test_gguf import write

        for name in re.findall(r"load\(\"(\w+\.gguf)\"", needed):
            write(folder / name)
    if "my-fine-tuned-model" in needed:
        for part in (tiny_hf_model("llama", vocab_size=len(tiny_tokenizer())), tiny_tokenizer()):
            part.save_pretrained(folder / "my-fine-tuned-model")


def _module(name: str):
    """A module of the folder ``docs``, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_code_of_a_page_prints_what_the_page_shows(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = path.read_text(encoding="utf-8")
    write_models(tmp_path, page)
    namespace: dict = {"__name__": "page"}
    assert examples(page) or "```bash" in page
    for code, shown in examples(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, path.name, "exec"), namespace)
        if shown or "explain" not in page:  # what an explanation says is tested elsewhere
            assert printed.getvalue().split() == shown.split(), code


def test_the_results_are_read_in_two_minutes_and_their_figure_has_the_numbers_of_the_pages():
    text = re.sub(r"\]\([^)]*\)", "]", (DOCS / "results.md").read_text(encoding="utf-8"))
    assert len(re.findall(r"[\w%.,-]*\w", text)) <= 350
    drawn = re.findall(r">([^<>]+)</text>", (DOCS / "static/results.svg").read_text(encoding="utf-8"))
    for title, bars in _module("results_figure").numbers().items():
        assert set(title.split("\n")) <= set(drawn)
        for name, value in bars.items():
            assert name in drawn and f"{value:g}" in drawn


class _Asked(HTMLParser):
    """The addresses that a page asks for when it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        asked = {"src", "href"} if tag == "link" else {"src"}
        self.found += [value for name, value in attrs if name in asked and value]


@needs_site
def test_no_page_asks_another_host_for_anything():
    pages = [*SITE.rglob("*.html")]
    assert len(pages) > 60
    for page in pages:
        asked = _Asked()
        asked.feed(page.read_text(encoding="utf-8"))
        assert not [address for address in asked.found if re.match(r"(https?:)?//", address)], page
    for sheet in SITE.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


@needs_site
def test_the_site_is_small_and_shows_formulas_without_a_script():
    assert sum(path.stat().st_size for path in SITE.rglob("*") if path.is_file()) < 10_000_000
    page = (SITE / "docs/ideas/prompt-as-bias.html").read_text(encoding="utf-8")
    assert page.count("<math") > 10 and "$" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "ablation_kl</p>" in (SITE / "docs/reference/api/kvlens.analyses.html").read_text(encoding="utf-8")


FOUND = {
    "hook_b_keys": "docs/reference/hook-points.html",
    "system prompt": "docs/how-to/split-a-chat.html",
    "induction": "docs/ideas/kv-shift.html",
    "GGUF": "docs/how-to/load-a-model.html",
    "draw a circuit": "docs/how-to/draw-a-circuit.html",
    "retrieval heads": "docs/how-to/find-heads.html",
}


@needs_site
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)
@pytest.mark.parametrize("words", FOUND)
def test_the_search_finds_the_right_page_first(words, tmp_path):
    address = f"{(SITE / 'search.html').as_uri()}?q={quote(words)}"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path}", "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True, text=True)
    first = re.search(r'<ul[^>]* class="search".*?<a href="([^"#?]*)', done.stdout, flags=re.DOTALL)
    assert first is not None and first[1].removeprefix("./") == FOUND[words]


def test_the_picture_of_the_readme_has_the_words_of_today(tmp_path):
    """But for numbers, whose last digit is a processor's; `python docs/picture.py` draws it again."""
    from PIL import Image

    shown = Image.open(ROOT / ".github/explanation.png").text["Description"]
    today = _module("picture").words(tmp_path / "page.html")
    assert len(today.split()) > 100
    assert re.sub(r"\d[\d.]*", "0", shown) == re.sub(r"\d[\d.]*", "0", today)

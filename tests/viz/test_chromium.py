"""The pages in a browser: they draw, clicking works, nothing is requested, and what a prompt holds is shown and never run.

Headless Chromium gives the page as it stands after its scripts ran, and every request that it made. Requests are read from
Chromium's own log, so that one is seen even where it fails; they go to a proxy that does not exist, so that none leaves the
machine. axe-core has no moderate or serious finding in a page with every section, nor in any single picture.
"""

import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import torch
from pictures import a_circuit, data_of, demonstrations, details_of, losses, shares
from tiny_text_model import PROMPT, TEXT, tiny_text_model

from kvlens import HookedKVTransformer, explain
from kvlens.analyses import HeadDetails, linked_shares
from kvlens.arguments import SECTIONS
from kvlens.cli.prompts import STORY
from kvlens.explanation import explanation_page
from kvlens.texts import joined
from kvlens.viz import (
    Page,
    attention_view,
    circuit_view,
    colored_tokens,
    contribution_bars,
    dual_view,
    error_table,
    head_heatmap,
    linked_view,
)
from kvlens.viz._text import data_script, label, number, running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WITHOUT = "needs Chromium (Debian's package chromium), which is not installed here"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--virtual-time-budget=10000",
    "--window-size=1200,1600",
    "--proxy-server=127.0.0.1:9",
    "--proxy-bypass-list=<-loopback>",
)


@dataclass
class Visit:
    """What one visit to a page gave.

    Attributes:
        dom: the document after its scripts ran, as HTML.
        requests: the addresses that the page asked for.
    """

    dom: str
    requests: list[str]


def visit(html: str, folder: Path, *, fragment: str = "", script: str = "") -> Visit:
    """Open a page, with ``fragment`` behind the # of its address and a script of the test at its end.

    ``folder`` gets the page, the browser's profile and its log.
    """
    page, log = folder / "page.html", folder / "network.json"
    page.write_text(_with_script(html, script) if script else html, encoding="utf-8")
    flags = [f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}"]
    command = [CHROMIUM, *FLAGS, *flags, "--dump-dom", f"{page.as_uri()}#{fragment}"]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, timeout=120, env=environment, check=True)
    return Visit(done.stdout.decode("utf-8"), _requests(json.loads(log.read_text(encoding="utf-8"))))


def _requests(log: dict) -> list[str]:
    """The addresses that a page asked for; the browser's own requests name no origin."""
    start = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    jobs = [event["params"] for event in log["events"] if event["type"] == start and "url" in event.get("params", {})]
    return [job["url"] for job in jobs if job.get("initiator") != "not an origin"]


def _with_script(html: str, script: str) -> str:
    """It runs when the figures stand; the page's policy would refuse it if it did not name it."""
    script = f"KVLENS.ready.then(() => {{\n{script}\n}});"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed, n_policies = re.subn(r"script-src ", f"script-src 'sha256-{digest}' ", html, count=1)
    assert n_policies == 1
    return allowed.replace("</body>", f"<script>{script}</script></body>")


def without_policy(html: str) -> str:
    """``html`` without its content security policy: what is left must be safe by its escaping alone."""
    bare, n_policies = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    assert n_policies == 1
    return bare


def visible_text(html: str) -> str:
    """The text of a document without scripts and styles."""
    reader = _Text()
    reader.feed(html)
    return "".join(reader.parts)


def tags_and_handlers(html: str) -> tuple[set[str], set[str]]:
    """The names of a document's elements, and those of its attributes that run scripts."""
    reader = _Text()
    reader.feed(html)
    return reader.tags, reader.handlers


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.tags: set[str] = set()
        self.handlers: set[str] = set()
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.add(tag)
        self.handlers |= {name for name, _ in attrs if name.startswith("on")}
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)


pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)]

HOSTILE = [
    "</script><img src=x onerror=\"document.title='owned'\">",
    "<script>document.title='owned'</script>",
    "<!--<script>",
    "]]>",
    '" onmouseover="document.title=\'owned\'" x="',
    "' onclick='document.title=1'",
    "</span></pre></table></title></style>",
    "<img src='http://hostile.example/pixel.png'>",
    "&lt;b&gt;&amp;",
    "a\nb\r\n\tc",
    "\u2028\u2029",
    "🙂👩‍👩‍👧",
    "שלום עולם مرحبا \u202eabc",
    "\ud83d",
    "\x00\x1b[31m\x7f",
    "${alert(1)}`'\\",
    "<pad>",
]


@pytest.fixture(scope="module")
def explained():
    return explain(tiny_text_model(), PROMPT, TEXT)


@pytest.fixture(scope="module")
def page(explained) -> str:
    return explanation_page(tiny_text_model(), explained, [name for name in SECTIONS if name != "dual"]).to_html()


@pytest.fixture(scope="module")
def opened(page, tmp_path_factory) -> str:
    """The page as it stands where nobody clicked, at the anchor of a section."""
    return visit(page, tmp_path_factory.mktemp("opened"), fragment="heads").dom


def by_head(n_layers=2, n_heads=3) -> pd.DataFrame:
    places = [(layer, head) for layer in range(n_layers) for head in range(n_heads)]
    table = pd.DataFrame(places, columns=["layer", "head"])
    return table.assign(b_kv_norm=[1.0 + i for i in range(len(table))], loss_change=[-0.5 * i for i in range(len(table))])


def hostile_page() -> Page:
    n = len(HOSTILE)
    texts = pd.Series(HOSTILE, dtype=object)  # pandas' own text type refuses half of a surrogate pair
    frame = pd.DataFrame({"layer": texts, "value": range(n), HOSTILE[0]: texts})
    page = Page(HOSTILE[0], HOSTILE[1]).section(HOSTILE[2], HOSTILE[0]).footer(HOSTILE[0])
    page.add(colored_tokens(HOSTILE, range(n), title=HOSTILE[0], unit=HOSTILE[0]))
    page.add(attention_view(HOSTILE, torch.rand(2, n, n), n_prompt=3, head_names=HOSTILE[:2], title=HOSTILE[0]))
    page.add(head_heatmap(by_head().assign(**{HOSTILE[0]: 1.0}), details=details_of(HOSTILE, HOSTILE), title=HOSTILE[0]))
    page.add(contribution_bars(frame, "value", part=HOSTILE[0], title=HOSTILE[0]))
    return page.add(error_table(frame, title=HOSTILE[0]))


def test_the_page_draws_and_asks_the_network_for_nothing(page, tmp_path):
    seen = visit(page, tmp_path, script='document.querySelector(".draw").click()')
    assert seen.requests == []
    text = visible_text(seen.dom)
    for words in (
        "Why did the model say",
        "exact to rounding",
        "Head Selector",
        "L0 H",
        "L1 H",
        "Point at a cell",
        "converted",
    ):
        assert words in text
    assert seen.dom.count("<canvas") == 6 + 1 + 1  # circuitsvis' small ones and the enlarged one, and the chosen head's
    layer, head = re.search(r"<tbody><tr><td>L(\d)H(\d)</td>", page).groups()  # the first of the table of heads
    assert f'data-selected="{layer}.{head}"' in seen.dom and f"Layer {layer}, head {head}" in text


def test_tokens_are_shown_as_whole_characters(tmp_path):
    """The page's own letters of a token are those of the pictures; nothing is a box that the tokenizer made."""
    text = " Grüße 你好 e\u0301 👨\u200d👩 مرحبا"
    linked = linked_shares(tiny_text_model(n_ctx=512), text + PROMPT, text)
    seen = visit(linked_view(linked).to_html(), tmp_path)
    buttons = re.findall(r'<button class="token[^>]*aria-label="text (\d+) “([^”]*)”[^>]*>([^<]*)</button>', seen.dom)
    tokens = linked.text
    assert [int(place) for place, _, _ in buttons] == list(range(len(tokens)))
    assert [html.unescape(name) for _, name, _ in buttons] == [label(token) for token in tokens]
    assert [html.unescape(shown) for _, _, shown in buttons] == [running(token) for token in tokens]
    assert joined(tokens) == text and "你" in "".join(tokens)
    shown = visible_text(seen.dom)
    assert "\N{REPLACEMENT CHARACTER}" not in shown and "is a token with part of a character" in shown


def test_circuitsvis_waits_until_it_is_asked_for(opened, tmp_path):
    assert opened.count("<canvas") == 1 and "Draw with circuitsvis" in opened  # the chosen head's pattern is the page's own
    alone = attention_view(["a", "b"], torch.rand(1, 2, 2)).to_html()
    assert "Head Selector" in visible_text(visit(alone, tmp_path).dom)


def test_choosing_a_part_says_what_is_said_without_it_and_numbers_are_written_as_in_python(page, explained, tmp_path):
    values = [0, 7.0, 7.02, -0.5, 12.34, 1234.4, 1e-7, -2.5e6, 0.00123, 0.0009]
    click = f"document.body.dataset.numbers = {json.dumps(values)}.map((x) => KVLENS.number(x)).join('|');"
    click += "document.querySelectorAll('.source')[0].click();"
    dom = visit(page, tmp_path, script=click).dom
    assert f'data-numbers="{"|".join(map(number, values))}"' in dom
    assert f"Without {explained.units['name'][0]}, the model says" in visible_text(dom)


def test_one_selection_is_shared_by_all_figures_and_stands_in_the_address(page, opened, tmp_path):
    clicks = """
        const linked = document.querySelector('[data-kvlens="linked"]'), seen = [];
        const record = () => seen.push([location.hash, linked.dataset.chosen]);
        linked.querySelector('.text .token').click();
        record();
        document.querySelector('[data-kvlens="heat-map"] table:not([hidden]) [data-layer="0"][data-head="2"]').click();
        record();
        document.querySelectorAll(".depth-grid .cell")[1].click();
        record();
        document.body.dataset.seen = JSON.stringify(seen);
        const chosen = [...document.querySelectorAll(".depth-grid .of-chosen")];
        document.body.dataset.columns = new Set(chosen.map((cell) => cell.title.split(", ")[1].split(" “")[0])).size;
    """
    dom = visit(page, tmp_path, script=clicks).dom
    (seen,) = re.findall(r'data-seen="([^"]*)"', dom)
    assert json.loads(html.unescape(seen)) == [
        ["#text=0&show=text", "text 0"],
        ["#text=0&show=head&head=0.2", "head 2"],
        ["#text=1&show=text&head=0.2", "text 1"],
    ]
    assert 'data-columns="1"' in dom
    again = visit(page, tmp_path, fragment="head=0.2&prompt=3&show=prompt").dom
    assert 'data-selected="0.2"' in again and 'data-chosen="prompt 3"' in again
    assert 'data-chosen="text ' in opened  # an anchor selects nothing


def narrow(page: str, folder: Path, script: str) -> list:
    """In a frame 400 pixels wide, as the browser's own window has at least 500: its width, that of the page, what ``script``
    says of the page ``shown`` once it is not ``undefined``, and what runs over the margin and does not scroll by itself."""
    look = f"""
        const turn = new MessageChannel(); // turns of the event loop, which use none of the virtual time
        turn.port1.onmessage = () => {{
            const inside = document.querySelector("iframe").contentWindow, {{ document: shown }} = inside;
            const said = (() => {{ {script} }})();
            if (said === undefined) return turn.port2.postMessage(0);
            const main = shown.querySelector("main"), style = inside.getComputedStyle(main);
            const edge = main.getBoundingClientRect().right - parseFloat(style.paddingRight);
            const clips = (node) => inside.getComputedStyle(node).overflowX !== "visible";
            const scrolls = (node) => node !== main && (clips(node) || scrolls(node.parentElement));
            const over = [...main.querySelectorAll("*")]
                .filter((node) => node.getBoundingClientRect().right > edge + 0.5 && !scrolls(node.parentElement));
            const widths = [inside.innerWidth, shown.documentElement.scrollWidth, said];
            document.title = JSON.stringify([...widths, over.map((node) => `${{node.tagName}} ${{node.className}}`)]);
        }};
        addEventListener("load", () => turn.port2.postMessage(0));
    """
    frame = f'<iframe style="width:400px;height:1600px;border:0" srcdoc="{html.escape(page)}"></iframe>'
    seen = visit(f"<!DOCTYPE html><meta charset=utf-8><title>start</title><body>{frame}<script>{look}</script></body>", folder)
    (found,) = re.findall("<title>(.*?)</title>", seen.dom)
    return json.loads(html.unescape(found))


def test_nothing_runs_over_the_margin_of_a_narrow_screen(tmp_path):
    """Only what scrolls by itself may be wider than the page, and a map of nine heads need not."""
    model = tiny_text_model(d_model=18, d_head=2, n_heads=9)
    page = explanation_page(model, explain(model, PROMPT, TEXT), SECTIONS).to_html()
    drawn = """
        const map = shown.querySelector('[data-kvlens="heat-map"] .scroll');
        return shown.querySelector(".detail canvas") ? map.scrollWidth - map.clientWidth : undefined;
    """
    width, page_width, hidden_of_map, over = narrow(page, tmp_path, drawn)
    assert width == 400 >= page_width and hidden_of_map == 0 and over == []


def test_a_circuit_fits_a_narrow_screen(tmp_path):
    drawn = """
        const nodes = [...shown.querySelectorAll(".node")];
        if (!nodes.length) return undefined;
        if (!shown.querySelector(".panels td")) return undefined;
        const node = nodes.find((one) => one.textContent === "1.2");
        if (!shown.querySelector("figure").dataset.chosen) node.dispatchEvent(new MouseEvent("click"));
        return shown.querySelector(".one-head canvas") ? nodes.length : undefined;
    """
    width, page_width, n_nodes, over = narrow(circuit_view(a_circuit(), [60], n_reasons=2).to_html(), tmp_path, drawn)
    assert width == 400 >= page_width and over == [] and n_nodes > 6


def test_figures_are_saved_and_copied_as_they_are_shown(page, tmp_path):
    clicks = """
        const saved = {}, copied = [];
        let unread = 0;
        navigator.clipboard.writeText = async (text) => { copied.push(text); };
        URL.createObjectURL = (blob) => {
          unread += 1;
          blob.text().finally(() => (unread -= 1)).then((text) => (saved[blob.type] ??= []).push(text));
          return "data:,";
        };
        HTMLAnchorElement.prototype.click = () => {};
        for (const button of document.querySelectorAll(".save button")) button.click();
        const turn = new MessageChannel(), kinds = ["image/png", "image/svg+xml", "text/csv"];
        turn.port1.onmessage = () => { // turns of the event loop, which use none of the virtual time
          if (unread || kinds.some((kind) => !saved[kind])) return turn.port2.postMessage(0);
          const found = [saved["text/csv"], saved["image/svg+xml"].map((one) => one.slice(0, 5)), copied];
          const place = Object.assign(document.createElement("pre"), { id: "saved", textContent: JSON.stringify(found) });
          document.body.append(place);
        };
        turn.port2.postMessage(0);
    """
    dom = visit(page, tmp_path, script=clicks).dom
    (found,) = re.findall(r'<pre id="saved">(.*?)</pre>', dom, flags=re.DOTALL)
    tables, drawings, copied = json.loads(html.unescape(found))
    assert set(drawings) == {"<svg "}
    (exact,) = [table for table in tables if "relative error of the logits" in table]
    assert exact.lstrip("\ufeff").startswith("measure,value,verdict\r\nrelative error of the logits,")
    (cells,) = [text for text in copied if text.startswith("measure\tvalue\tverdict\r\n")]
    assert [line.split("\t")[0] for line in cells.splitlines()[1:3]] == [
        "relative error of the logits",
        "rounding error of the model itself",
    ]
    assert len(copied) == len(tables)


def test_the_policy_refuses_what_escaping_would_have_missed(tmp_path):
    page = Page("title").add(colored_tokens(["a"], [1.0])).to_html()
    attack = (
        "<img src='http://hostile.example/a.png' onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    )
    seen = visit(page.replace("</main>", f"{attack}</main>"), tmp_path)
    assert seen.requests == [] and "<title>title</title>" in seen.dom
    seen = visit(without_policy(page).replace("</main>", f"{attack}</main>"), tmp_path)
    assert seen.requests == ["http://hostile.example/a.png"] and "<title>owned</title>" in seen.dom


def test_a_click_shows_that_head(tmp_path):
    details = details_of(["the", " wid", "get\n"], [" is", " purple"])
    click = """
        const figure = document.querySelector("figure");
        const record = (name, value) => { document.body.dataset[name] = JSON.stringify(value); };
        record("first", figure.dataset.selected);
        document.querySelector('table:not([hidden]) [data-layer="1"][data-head="0"]').click();
        record("title", figure.querySelector(".detail h3").textContent);
        const boxes = [...figure.querySelectorAll(".tokens")];
        record("shares", [...boxes[0].children].map((span) => Number(span.title.split(": ").at(-1).replace("−", "-"))));
        record("tokens", [...boxes[0].children].map((span) => span.textContent));
        record("pressed", figure.querySelectorAll('[aria-pressed="true"]').length);
        const canvas = figure.querySelector("canvas"), box = canvas.getBoundingClientRect();
        const place = { clientX: box.left + 112, clientY: box.top + 26 + 13 + 3, bubbles: true };
        canvas.dispatchEvent(new MouseEvent("mousemove", place));
        record("readout", figure.querySelector(".readout").textContent);
        const select = figure.querySelector("select");
        select.value = "loss_change";
        select.dispatchEvent(new Event("change"));
        const head = figure.querySelector('[data-layer="0"][data-head="2"]');
        record("shown", [head.title, head.textContent, head.className, head.style.getPropertyValue("--x")]);
        record("scale", figure.querySelector("caption").textContent);
    """
    dom = visit(head_heatmap(by_head(), details=details).to_html(), tmp_path, script=click).dom
    body = dom[dom.index("<body") : dom.index(">", dom.index("<body"))]

    def recorded(name):
        value = body.split(f'data-{name}="')[1].split('"')[0]
        return json.loads(value.replace("&quot;", '"').replace("&nbsp;", " "))

    assert recorded("first") == "1.2"  # the largest b_kv_norm
    assert recorded("title") == "Layer 1, head 0"
    assert recorded("tokens") == ["the", " wid", "get⏎\n"]
    # three digits of the value in the page, which is within half a unit of 1/999 of the head's largest
    shares = details.prompt_shares[1, 0]
    assert recorded("shares") == pytest.approx(shares.tolist(), abs=float(shares.abs().max()) * (0.5 / 999 + 0.005))
    assert recorded("pressed") == 1
    expected = float(details.pattern[1, 0, 1, 0])
    words, value = recorded("readout").rsplit(": ", 1)
    assert words == "text 1 “·purple” attends to prompt 0 “the”"
    assert float(value.replace("−", "-")) == pytest.approx(expected, abs=0.01 * float(details.pattern[1, 0].abs().max()))
    assert recorded("shown") == ["layer 0, head 2: loss_change −1.00", "−1.00", "negative", "40.0%"]
    assert recorded("scale") == "−2.502.50 loss_change"


def test_a_head_chosen_in_the_grid_keeps_the_losses_colors_and_shows_its_demonstrations(tmp_path):
    script = """
        const [grid, dual] = ["linked", "dual"].map((kind) => document.querySelector(`figure[data-kvlens="${kind}"]`));
        const found = { first: dual.dataset.selected };
        const select = grid.querySelector("select");
        select.selectedIndex = 1;
        select.dispatchEvent(new Event("change"));
        const heads = [...grid.querySelectorAll(".head")];
        const colors = () => heads.map((head) => parseFloat(head.style.getPropertyValue("--x")));
        found.colors = colors();
        heads[1].click();
        found.kept = colors();
        found.label = heads[1].getAttribute("aria-label");
        found.selected = dual.dataset.selected;
        found.title = dual.querySelector(".detail h3").textContent;
        const texts = (nodes) => [...nodes].map((node) => node.textContent);
        found.rows = [...dual.querySelectorAll(".detail tr")].slice(1).map((row) => texts(row.children));
        found.ways = texts(grid.querySelectorAll(".way"));
        grid.querySelector(".way").click();
        found.focus = document.activeElement === dual.querySelector(".detail");
        const maps = dual.querySelector("table.heat:not([hidden])");
        const button = maps.querySelector('[data-layer="1"][data-head="0"]');
        button.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
        found.moved = document.activeElement.title;
        document.activeElement.click();
        found.then = dual.dataset.selected;
        grid.querySelectorAll(".panel.text .token")[0].click();
        found.shares = heads[1].getAttribute("aria-label");
        document.body.dataset.found = JSON.stringify(found);
    """
    drops = torch.arange(-10, -4, dtype=torch.float64).view(2, 3)
    linked = linked_view(shares(colorings={"drop": drops}, without_zero=["drop"]))
    page = Page("dual").add(linked).add(dual_view(losses(), demonstrations(), query=" on"))
    dom = visit(page.to_html(), tmp_path, script=script).dom
    found = json.loads(html.unescape(re.search(r'<body data-found="(.*?)"', dom)[1]))
    assert found["first"] == "1.2"  # the largest drop
    assert found["colors"] == found["kept"] == pytest.approx([0, 20, 40, 60, 80, 100], abs=0.3)  # 3 digits of -10
    assert found["label"] == "layer 0 head 1: drop −9.00"
    assert (found["selected"], found["title"]) == ("0.1", "Layer 0, head 1: its demonstrations")
    assert found["rows"][1] == ["1", "·<b>", "28.6\u00a0%", "20\u00a0%", "0.200", "−0.500", "0.500"]
    assert found["ways"] == ["what each prompt token contributes to its gradient step"] and found["focus"]
    assert found["moved"].startswith("layer 1, head 1") and found["then"] == "1.1"
    assert found["shares"].endswith("%")


CIRCUIT = """
    const figure = document.querySelector('[data-kvlens="circuit"]'), slider = figure.querySelector("input"), found = [];
    const nodes = () => [...figure.querySelectorAll(".node")];
    const named = (name) => nodes().find((node) => node.textContent === name);
    const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    const slide = (to) => { slider.value = to; slider.dispatchEvent(new Event("input")); };
    const rows = (panel) => [...panel.querySelectorAll("tbody tr")];
    const cells = (panel) => rows(panel).map((row) => [...row.cells].map((cell) => cell.textContent));
    const tables = () => Object.fromEntries([...figure.querySelectorAll(".panel")].map((panel) =>
        [panel.querySelector("h4").textContent, cells(panel)]));
    const said = () => figure.querySelector(".readout").textContent;
    const done = () => { document.body.dataset.found = JSON.stringify(found); };
"""


def found_in(dom: str) -> list:
    return json.loads(html.unescape(re.search(r'<body[^>]* data-found="(.*?)"', dom)[1]))


def test_the_slider_of_a_circuit_shows_its_sizes_and_a_node_what_it_reads_and_writes_to(tmp_path):
    """By mouse and by keyboard; the number of edges and nodes is that of each circuit, and the faithfulness the one it has."""
    circuit = a_circuit()
    piece = circuit_view(circuit, [20, 40, 70], n_reasons=1)
    data = data_of(piece)
    script = f"""{CIRCUIT}
        for (const to of [0, 1, 2]) {{
            slide(to);
            const words = [figure.querySelector("output").textContent, slider.getAttribute("aria-valuetext")];
            found.push([figure.querySelectorAll("path.edge").length, nodes().length, ...words]);
        }}
        named("logits").focus();
        found.push(said(), nodes().filter((node) => node.getAttribute("tabindex") === "0").length);
        press("ArrowDown");
        found.push(document.activeElement.textContent);
        named("embedding").focus();
        press("Enter");
        found.push(figure.dataset.chosen, document.activeElement.getAttribute("aria-pressed"), tables(), location.hash);
        press("Escape");
        found.push(figure.dataset.chosen);
        named("1.2").dispatchEvent(new MouseEvent("click"));
        found.push(tables(), location.hash, nodes().filter((node) => node.classList.contains("far")).length);
        const edge = figure.querySelector("path.edge");
        edge.dispatchEvent(new MouseEvent("mouseenter"));
        found.push([said(), edge.querySelector("title").textContent]);
        figure.querySelector(".panel .way").click();
        found.push(figure.dataset.chosen, document.activeElement === figure.querySelector(".detail"));
        done();
    """
    seen = visit(piece.to_html(), tmp_path, script=script)
    assert seen.requests == []
    (
        *sizes,
        logits,
        n_stops,
        below,
        node,
        pressed,
        of_embedding,
        address,
        cleared,
        of_head,
        its_address,
        n_far,
        edge,
        way,
        focus,
    ) = found_in(seen.dom)
    for stop, (n_edges, n_nodes, text, value) in zip(data["stops"], sizes, strict=True):
        assert (n_edges, n_nodes) == (stop["n_edges"], stop["n_nodes"]) and text == value
        assert text.startswith(f"{n_edges} edges, {n_nodes} nodes: faithfulness {number(stop['faithfulness'])} (metric")
    kept = circuit.keep(70).edges.query("kept")
    assert logits == "logits" and n_stops == 1 and below in kept["writer"].tolist()
    assert (node, pressed, address, cleared) == ("embedding", "true", "", "")
    out = kept[kept["writer"] == "embedding"]
    (title,) = of_embedding
    assert title == (f"Who reads it: the largest 12 of {len(out)}" if len(out) > 12 else "Who reads it")
    assert [row[2] for row in of_embedding[title]] == [number(x, out["estimate"].abs().max()) for x in out["estimate"][:12]]
    into = kept[kept["reader"].eq("1.2")]
    names = {"q": "queries", "k": "keys", "v": "values"}
    (reads,) = [title for title in of_head if title.startswith("What it reads")]
    assert [row[:2] for row in of_head[reads]] == [[x.writer, names[x.input]] for x in into.head(12).itertuples()]
    assert its_address == "#head=1.2&show=head" and n_far < len(data["nodes"]) and edge[0] == edge[1] and "→" in edge[0]
    assert way == of_head[reads][0][0] and focus


def test_a_thousand_edges_are_drawn_in_less_than_a_second(tmp_path):
    """With style and layout, by the clock outside of the page, of 50 drawings more: that of a page stands still here."""
    piece = circuit_view(a_circuit(), [50, 60], n_reasons=0)
    data = data_of(piece)
    edges = (data["edges"] * 100)[:1000]
    page = piece.to_html().replace(data_script(data), data_script({**data, "edges": [[*edge[:-1], 0] for edge in edges]}))
    times = []
    for n in (1, 51):
        script = f"""{CIRCUIT}
            for (let i = 0; i < {n}; i++) {{ slide(i % 2); figure.querySelector("svg.graph").getBoundingClientRect(); }}
            found.push(figure.querySelectorAll("path.edge").length);
            done();
        """
        began = time.perf_counter()
        assert found_in(visit(page, tmp_path, script=script).dom) == [1000]
        times.append(time.perf_counter() - began)
    assert 0 < (times[1] - times[0]) / 50 < 1


@pytest.mark.parametrize("roles", [None, {HOSTILE[0]: [1, 2], HOSTILE[12]: [-1]}])
def test_hostile_tokens_and_names_of_a_circuit_are_text(roles, tmp_path, monkeypatch):
    monkeypatch.setattr("kvlens.analyses.circuits.circuit.token_texts", lambda model, tokens: (HOSTILE * 9)[: len(tokens)])
    piece = circuit_view(a_circuit(), [70], roles=roles, n_reasons=2, title=HOSTILE[0])
    script = f"""{CIRCUIT}
        named("1.2").dispatchEvent(new MouseEvent("click"));
        found.push([...figure.querySelectorAll(".of-token title")].map((title) => title.textContent));
        found.push([...figure.querySelectorAll(".tokens span")].map((span) => span.textContent).join(""));
        done();
    """
    seen = visit(without_policy(_with_script(piece.to_html(), script)), tmp_path)
    assert seen.requests == []
    tags, handlers = tags_and_handlers(seen.dom)
    assert "img" not in tags and not handlers and "owned" not in re.search("<title>(.*?)</title>", seen.dom)[1].split("'")[0]
    names, tokens = found_in(seen.dom)
    assert label(HOSTILE[0]) in names and HOSTILE[0] in tokens and (roles is None or label(HOSTILE[12]) in names)


def test_a_hostile_prompt_is_shown_and_runs_nothing(tmp_path):
    click = '<script>document.querySelector(".draw").click()</script></body>'
    seen = visit(without_policy(hostile_page().to_html()).replace("</body>", click), tmp_path)
    assert seen.requests == []
    tags, handlers = tags_and_handlers(seen.dom)
    assert "canvas" in tags and "img" not in tags and not handlers
    text = visible_text(seen.dom)
    assert text.lstrip().startswith(HOSTILE[0])  # the title is still what it was
    for token in ("</script><img src=x onerror=", "<script>document.title=", "<!--<script>", "<pad>", "&lt;b&gt;", "🙂👩‍👩‍👧"):
        assert text.count(token) >= 3, token
    for token in ("שלום", "مرحبا", "]]>", "${alert(1)}`'\\"):
        assert token in text, token
    assert "Head Selector" in text and "Layer 1, head 2" in text


def test_a_notebook_frame_holds_the_whole_piece_and_grows(tmp_path):
    piece = head_heatmap(by_head(), details=details_of(HOSTILE, HOSTILE))
    output = piece._repr_html_() + colored_tokens(HOSTILE, range(len(HOSTILE)))._repr_html_()
    report_heights = """
        const turn = new MessageChannel(); // turns of the event loop, which use none of the virtual time
        const look = () => {
            const frames = [...document.querySelectorAll("iframe")].map((frame) => [
                frame.contentDocument.documentElement.offsetHeight <= parseInt(frame.style.height),
                frame.style.height !== "420px",
                frame.contentDocument.querySelectorAll("canvas").length,
            ]);
            document.title = JSON.stringify(frames);
            if (!frames.every(([fits, grew]) => fits && grew) || !frames[0][2]) turn.port2.postMessage(0);
        };
        turn.port1.onmessage = look;
        addEventListener("load", look);
    """
    page = f"<!DOCTYPE html><title>start</title><body>{output}<script>{report_heights}</script></body>"
    seen = visit(page, tmp_path)
    assert seen.requests == []
    assert "<title>[[true,true,1],[true,true,0]]</title>" in seen.dom


def test_a_long_prompt_gives_a_page_that_opens(tmp_path):
    n_prompt, n_text = 4096, 600
    details = HeadDetails(
        prompt=[f" w{i}" for i in range(n_prompt)],
        text=[f" t{i}" for i in range(n_text)],
        queries=torch.arange(n_prompt, n_prompt + n_text)[:: n_text // 100],
        pattern=torch.rand(4, 6, 100, n_prompt + n_text),
        prompt_shares=torch.rand(4, 6, n_prompt),
    )
    tokens = [*details.prompt, *details.text]
    page = Page("long").add(head_heatmap(by_head(4, 6), details=details))
    page.add(attention_view(tokens, details.pattern[0], queries=details.queries, n_prompt=n_prompt))
    page.add(colored_tokens(tokens, range(len(tokens))))
    whole = page.to_html()
    assert len(whole) < 8e6
    text = visible_text(visit(whole, tmp_path, script='document.querySelector(".draw").click()').dom)
    for words in (
        "100 of the text's 600 queries are shown",
        "One column is the mean of 74 neighboring tokens of the prompt's 4,096",
        "are left out, those with the least attention",
        "blocks of 2 of the 4,696 tokens, mean of each",
        "Head Selector",
    ):
        assert words in text


AXE = Path(os.environ.get("KVLENS_AXE", Path(__file__).parents[2] / ".axe/node_modules/axe-core/axe.min.js"))
RUN = """;axe.run(document, {resultTypes: ["violations"]}).then((result) => {
  const found = document.createElement("pre");
  found.id = "axe-result";
  const where = (v) => v.nodes.map((n) => n.target.join(" ")).slice(0, 3);
  found.textContent = JSON.stringify(result.violations.map((v) => [v.id, v.impact, where(v)]));
  document.body.append(found);
});"""

needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core: npm install --prefix .axe axe-core; or KVLENS_AXE")
"""The environment variable says where its axe.min.js is; ``.ci/run`` installs it there."""


def findings(page: str, folder: Path, first: str = "") -> list:
    """What axe-core reports as moderate, serious or critical in ``page`` after its scripts, and the script ``first``, ran."""
    seen = visit(page, folder, script=first + AXE.read_text(encoding="utf-8") + RUN)
    found = re.search(r'<pre id="axe-result">(.*?)</pre>', seen.dom, flags=re.DOTALL)
    assert found, "axe-core gave no result"
    return [entry for entry in json.loads(html.unescape(found[1])) if entry[1] in ("moderate", "serious", "critical")]


@needs_axe
def test_the_checker_sees_what_is_wrong(tmp_path):
    """A button without a name and gray on gray are findings: the checker must report them."""
    page = Page("bad").section("x", "y").add(colored_tokens(["a"], [1.0]))
    bad = page.to_html().replace("</main>", '<button></button><p style="color:#aaa;background:#bbb">gray</p></main>')
    assert {entry[0] for entry in findings(bad, tmp_path)} >= {"button-name", "color-contrast"}


@needs_axe
def test_the_page_has_no_finding(tmp_path):
    """Of a model that has every figure."""
    model = HookedKVTransformer.from_zoo("facts-linear")
    assert findings(explanation_page(model, explain(model, *STORY), SECTIONS).to_html(), tmp_path) == []


@needs_axe
def test_pictures_at_full_strength_have_no_finding(tmp_path):
    table = pd.DataFrame({"layer": [0, 0, 1, 1], "head": [0, 1, 0, 1], "x": [1.0, -1.0, 0.5, -0.5]})
    strengths = torch.linspace(-1.2, 1.2, 25).tolist()
    page = Page("pictures").add(head_heatmap(table, "x")).add(contribution_bars(table, "x", part="head"))
    page.add(colored_tokens([f"t{i} " for i in range(25)], strengths, top=1.0))
    assert findings(page.to_html(), tmp_path) == []


@needs_axe
@pytest.mark.parametrize("chosen", ["", "1.2", "mlp1"])
def test_a_circuit_has_no_finding(chosen, tmp_path):
    page = Page("circuit").section("x").add(circuit_view(a_circuit(), [40, 70], n_reasons=3)).to_html()
    choose = f'{CIRCUIT} named("{chosen}")?.dispatchEvent(new MouseEvent("click"));'
    assert findings(page, tmp_path, choose) == []

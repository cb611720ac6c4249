"""Headless Chromium for tests: the page as it stands after its scripts ran, and every request that it made.

Requests are read from Chromium's own log, so that one is seen even where it fails; they go to a proxy that does not exist, so
that none leaves the machine.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

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

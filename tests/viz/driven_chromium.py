"""Chromium as a person drives it, for pages that ask a server: its DevTools protocol, over a pair of pipes."""

import itertools
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

from test_chromium import CHROMIUM, FLAGS

ONCE = ("--virtual-time-budget", "--proxy-server", "--proxy-bypass-list")
"""Flags that are for one look at a file."""


class Chromium:
    """A browser; its pages are of one process, each with storage of its own."""

    def __init__(self, folder: Path) -> None:
        flags = [flag for flag in FLAGS if not flag.startswith(ONCE)] + [f"--user-data-dir={folder / 'profile'}"]
        (theirs_in, self.out), (self.into, theirs_out) = os.pipe(), os.pipe()
        environment = {**os.environ, "HOME": str(folder)}
        # the protocol reads from the file 3 and writes to the file 4
        take = f'exec 3<&{theirs_in} 4>&{theirs_out} "$0" "$@"'
        command = ["bash", "-c", take, str(CHROMIUM), *flags, "--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), env=environment, stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self.numbers, self.answers = itertools.count(1), dict[int, Queue[dict]]()
        self.events: list[dict] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        rest = b""
        while part := os.read(self.into, 1 << 20):
            *whole, rest = (rest + part).split(b"\0")
            for message in map(json.loads, whole):
                self.answers[message["id"]].put(message) if "id" in message else self.events.append(message)

    def send(self, method: str, session: str | None = None, **given: Any) -> dict:
        number, answers = next(self.numbers), Queue[dict]()
        self.answers[number] = answers
        message = {"id": number, "method": method, "params": given} | ({"sessionId": session} if session else {})
        os.write(self.out, json.dumps(message).encode() + b"\0")
        answer = answers.get(timeout=300)
        del self.answers[number]
        assert "error" not in answer, answer
        return answer["result"]

    def page(self, address: str, width: int = 1200, height: int = 1600) -> "DrivenPage":
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = DrivenPage(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.send(f"{domain}.enable")
        page.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        page.send("Page.navigate", url=address)
        page.until("document.readyState === 'complete' && typeof KVLENS === 'object'")
        return page

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=120)


class DrivenPage:
    """A page of a browser."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self.browser, self.session = browser, session

    def send(self, method: str, **given: Any) -> dict:
        return self.browser.send(method, self.session, **given)

    def evaluate(self, script: str) -> Any:
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 300) -> Any:
        """What a script gives, when that is true."""
        end = time.monotonic() + seconds
        while not (found := self.evaluate(script)):
            assert time.monotonic() < end, (
                f"{script} is {found!r} after {seconds} s; {self.evaluate('document.body.innerText')}"
            )
            time.sleep(0.05)
        return found

    def told(self, method: str) -> list[dict]:
        """What the browser said of the page by itself."""
        return [e["params"] for e in self.browser.events if e["method"] == method and e.get("sessionId") == self.session]


@contextmanager
def driven_chromium(folder: Path) -> Iterator[Chromium]:
    browser = Chromium(folder)
    try:
        yield browser
    finally:
        browser.close()

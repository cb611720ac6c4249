"""``kvlens app``: a prompt that can be played with, in a browser on the machine where the command runs.

A visitor chooses a model, pastes documents and asks. The answer comes token by token, then with its sources. Every part of the
prompt has a switch: what is said without those that are off is a run of the same :class:`~kvlens.explanation.steps.Steps`,
as are the layers of a claim that is chosen; its runs and beginnings of the prompt are kept. What is shown is
:func:`kvlens.explanation.explanation_view`, and sentences of rows of ``statements``.

One run goes on at a time, as all use one model; others wait for theirs. A run ends where its visitor stops it or leaves.

The page is one document, which may load nothing, and runs no script but its own. It asks for three things, with JSON, and is
told what is known by and by, a line of JSON each. The server listens on this machine alone. It reads no file and no name that a
visitor gives: models are those of the command line, by number. A page from elsewhere cannot ask it, be it under another address
of this machine (``Host``) or from its own (``Origin``). What a visitor was told is kept under a name that nobody can guess.
"""

import asyncio
import json
import secrets
import socket
import threading
import traceback
import warnings
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvlens.chat import Chat, has_chat_template
from kvlens.checks import ensure
from kvlens.errors import KVLensError, brief, first_line
from kvlens.explanation import Explained, explanation_view
from kvlens.explanation.presentation import switched_in_words
from kvlens.explanation.steps import Steps
from kvlens.model import KVModel
from kvlens.viz._text import html_text
from kvlens.viz.page import document

HERE = "127.0.0.1"
MOST_CHARACTERS = 20_000
"""Of everything that is pasted; some 5,000 tokens, more than is explained in a minute."""
MOST_BYTES = 8 * MOST_CHARACTERS
MOST_KEPT, MOST_WAITING = 8, 8
"""Explanations that can be played with, the newest; and runs that may wait."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'; form-action 'none'; base-uri 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
OPTIONS: dict[str, Any] = dict(
    log_level="warning", access_log=False, proxy_headers=False, server_header=False, ws="none", timeout_graceful_shutdown=2
)
"""Of uvicorn."""
Given = dict[str, object]
"""What a page sends, or is told."""


class Stopped(Exception):
    """The visitor stopped a run, or left."""


class PageRun:
    """A run that somebody waits for. It begins when those before it have ended."""

    def __init__(self) -> None:
        self.loop, self.lines = asyncio.get_running_loop(), asyncio.Queue[Given | None]()
        self.is_stopped = threading.Event()

    def tell(self, **line: object) -> None:
        """Tell the page; `Stopped` where nobody listens any more."""
        if self.is_stopped.is_set():
            raise Stopped
        self.put(line)

    def put(self, line: Given | None) -> None:
        """Add a line, from any thread; None ends them."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.lines.put_nowait, line)


class Played:
    """An explanation that can be played with; what it finds goes to the run of the moment."""

    def __init__(self, run: PageRun, model: KVModel, prompt: Chat | str, text: str | None) -> None:
        self.run, self.name = run, secrets.token_urlsafe(16)
        self.explaining = Steps.reading(
            model,
            prompt,
            text,
            tell=lambda what, done: self.run.tell(status=what, done=done),
            say=lambda line: self.run.tell(line=line),
            hear=lambda said: self.run.tell(answer=said),
        )

    def shown(self, found: Explained) -> Given:
        """The explanation for the page."""
        return {"found": {"name": self.name, "about": found.about, "html": explanation_view(found).body}}


class Playground:
    """The models that may be asked, and the newest explanations.

    Args:
        names: of the models, as they are shown.
        load: loads one of them.
    """

    def __init__(self, names: Sequence[str], load: Callable[[str], KVModel]) -> None:
        self.names, self.load = list(names), load
        self.models: dict[str, KVModel] = {}
        self.kept = OrderedDict[str, Played]()

    # --- what a page may ask ------------------------------------------------------------------------------------------

    def ask(self, run: PageRun, given: Given) -> Given:
        """Explain what a model answers: ``model`` by number, ``system``, ``documents``, ``question``."""
        number, question, system = (_of(given, *each) for each in (("model", int), ("question", str), ("system", str)))
        documents = [text for text in _of(given, "documents", Sequence[str]) if text.strip()]
        if (n := len(question) + len(system) + sum(map(len, documents))) > MOST_CHARACTERS:
            raise KVLensError(f"what you pasted has {n:,} characters, and {MOST_CHARACTERS:,} are read; shorten it")
        if not question.strip():
            raise KVLensError("question: it is empty; ask something, or write what the model goes on from")
        if not documents and not system.strip():
            raise KVLensError("document: there is none, so that nothing can be switched off; paste what you ask about")
        if not 0 <= number < len(self.names):
            raise KVLensError(f"model: expected one of the {len(self.names)} of the command line; choose from the list")
        played = Played(run, *self._read(run, self.names[number], system, documents, question))
        found = played.explaining.explained()
        self.kept[played.name] = played
        while len(self.kept) > MOST_KEPT:
            self.kept.popitem(last=False)
        return played.shown(found)

    def without(self, run: PageRun, given: Given) -> Given:
        """What is said without the ``units`` that are switched off, of the explanation ``name``."""
        played, units = self._played(run, given), sorted(set(_of(given, "units", Sequence[int])))
        found = played.explaining.without(units)
        sentences = switched_in_words(found, units)
        return {"without": [{"text": sentence.text, "rows": list(sentence.rows)} for sentence in sentences]}

    def about(self, run: PageRun, given: Given) -> Given:
        """The explanation ``name`` with another ``claim`` at its head, and the layers that it is read in."""
        played = self._played(run, given)
        return played.shown(played.explaining.about(_of(given, "claim", int)))

    def _played(self, run: PageRun, given: Given) -> Played:
        name = _of(given, "name", str)
        if name not in self.kept:
            raise KVLensError(f"this answer is no longer kept, as the newest {MOST_KEPT} are; ask again")
        self.kept.move_to_end(name)
        self.kept[name].run = run
        return self.kept[name]

    def _read(
        self, run: PageRun, name: str, system: str, documents: list[str], question: str
    ) -> tuple[KVModel, Chat | str, str | None]:
        """The model, the prompt, and what follows it where the model reads no chats."""
        model = self._loaded(run, name)
        if has_chat_template(model):
            return model, Chat.ask(question, documents, system if system.strip() else None), None
        text = question if question[0].isspace() else f" {question}"
        return model, "\n\n".join([*([system] if system.strip() else []), *documents]), text

    def _loaded(self, run: PageRun, name: str) -> KVModel:
        if name not in self.models:
            run.tell(status=f"loading {name}", done=0.0)
            try:
                self.models[name] = self.load(name)
            except Exception as error:  # of a damaged file, in any library
                raise KVLensError(f"{name} cannot be loaded: {first_line(error)}") from error
        return self.models[name]


def _of(given: Given, name: str, kind: object) -> Any:
    return ensure(name, kind, given.get(name))


class Server:
    """What the page of a playground asks, over HTTP.

    Args:
        playground: what is asked.
        example: a document and a question that stand there at first.
    """

    def __init__(self, playground: Playground, example: tuple[str, str]) -> None:
        self.playground, self.page = playground, playground_page(playground.names, example)
        self.worker = ThreadPoolExecutor(max_workers=1)
        self.runs: list[PageRun] = []
        routes = [
            Route("/", self._page),
            *(Route(f"/{name}", self._asked, methods=["POST"]) for name in ("ask", "without", "about")),
        ]
        here = Middleware(TrustedHostMiddleware, allowed_hosts=[HERE, "localhost"], www_redirect=False)
        self.app = Starlette(routes=routes, middleware=[here], lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        for run in self.runs:
            run.is_stopped.set()
        self.worker.shutdown(wait=False, cancel_futures=True)

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(self.page, headers=HEADERS)

    async def _asked(self, request: Request) -> Response:
        try:
            given = await _body(request)
            if len(self.runs) > MOST_WAITING:
                raise KVLensError(f"{MOST_WAITING} runs wait already; try again in a minute")
        except KVLensError as error:
            return PlainTextResponse(str(error), 400, HEADERS)
        work = getattr(self.playground, request.url.path.removeprefix("/"))
        return StreamingResponse(self._lines(work, given), headers=HEADERS, media_type="application/x-ndjson")

    async def _lines(self, work: Callable[[PageRun, Given], Given], given: Given) -> AsyncIterator[str]:
        """What a run tells, line by line; it is stopped where nobody reads on."""
        run = PageRun()
        if n_before := len(self.runs):
            said = "Another run is going; yours is next." if n_before == 1 else f"{n_before} runs are before yours."
            run.put({"status": said, "done": 0.0})
        self.runs.append(run)
        self.worker.submit(self._work, run, work, given)
        try:
            while (line := await run.lines.get()) is not None:
                yield f"{json.dumps(line)}\n"
        finally:
            run.is_stopped.set()

    def _work(self, run: PageRun, work: Callable[[PageRun, Given], Given], given: Given) -> None:
        """Run in the worker's thread; errors are lines, and the next run finds everything as it was."""
        try:
            with _warnings_to(run):
                run.tell(status="begins", done=0.0)
                run.put(work(run, given))
        except Stopped:
            pass
        except KVLensError as error:
            run.put({"error": " ".join(str(error).split())})
        except Exception as error:  # of a library below
            traceback.print_exc()
            run.put({"error": f"it failed: {type(error).__name__}: {first_line(error)}"})
        finally:
            self.runs.remove(run)
            run.put(None)


@contextmanager
def _warnings_to(run: PageRun) -> Iterator[None]:
    """Tell the page of warnings, each time."""

    def show(message: Warning | str, *where: object, **more: object) -> None:
        run.tell(warning=" ".join(str(message).split()))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


async def _body(request: Request) -> Given:
    """The JSON that our own page sent.

    Raises:
        KVLensError: another page sent it, or no page; it is too long, or no object.
    """
    own = f"http://{request.headers['host']}"
    if request.headers.get("origin") != own or request.headers.get("content-type") != "application/json":
        raise KVLensError(f"only the page {own} may ask this; open it")
    read = b""
    async for part in request.stream():
        read += part
        if len(read) > MOST_BYTES:
            raise KVLensError(f"what you pasted is longer than the {MOST_CHARACTERS:,} characters that are read; shorten it")
    try:
        given = json.loads(read)
    except (ValueError, RecursionError) as error:
        raise KVLensError(f"expected JSON ({first_line(error)})") from error
    if not isinstance(given, dict):
        raise KVLensError(f"expected a JSON object, got {brief(given)}")
    return given


def playground_page(names: Sequence[str], example: tuple[str, str]) -> str:
    """The page."""
    options = "".join(f'<option value="{i}">{html_text(name)}</option>' for i, name in enumerate(names))
    text, question = map(html_text, example)
    body = f"""<main class="app">
<header><h1>Play with a prompt</h1>
<p class="subtitle">Ask about documents, see what the answer rests on, and switch parts of the prompt off. Everything stays on
this machine.</p></header>
<form>
<label>Model <select name="model">{options}</select></label>
<details><summary>System message</summary><textarea name="system" rows="3" aria-label="System message"></textarea></details>
<div class="documents"><label>Document <textarea name="document" rows="7">
{text}</textarea></label></div>
<p><button type="button" class="way more">Add a document</button></p>
<label>Question <textarea name="question" rows="2">
{question}</textarea></label>
<p class="note">A model that reads no chats goes on from the end of the question.</p>
<p><button class="draw">Ask</button><button type="button" class="draw stop" disabled>Stop</button></p>
</form>
<p class="state" role="status"></p>
<div class="told" hidden><h2>The answer</h2><div class="tokens response"></div><ul class="citations"></ul></div>
<section class="result" tabindex="-1"></section>
</main>"""
    return document(body, title="Play with a prompt", circuitsvis=False, asks="app.js")


def serve(server: Server, port: int, on_open: Callable[[str], None]) -> None:
    """Answer pages until somebody presses Ctrl-C.

    Args:
        server: what answers.
        port: on this machine; 0 for any that is free.
        on_open: called with the address, when pages can be opened.

    Raises:
        KVLensError: the port is taken, or not allowed.
    """
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HERE, port))
        except OSError as error:
            raise KVLensError(f"--port: {port} cannot be used ({error.strerror}); give another one, or 0 for any") from error
        listening.listen()
        on_open(f"http://{HERE}:{listening.getsockname()[1]}")
        uvicorn.Server(uvicorn.Config(server.app, **OPTIONS)).run(sockets=[listening])

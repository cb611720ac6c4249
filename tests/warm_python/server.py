"""``python server.py SOCKET``: import everything once, then fork for every client and do there what it was told.

A fork is killed when its client is gone, and the server ends with the last of its keepers (connections that ask for nothing).
"""

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing.spawn
import os
import pkgutil
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable

PACKAGES = ("kvlens", "analyses")
IF_INSTALLED = ("ipykernel.kernelapp", "matplotlib.pyplot", "tqdm.auto")
"""What notebooks import beside them."""
FLAGS_WITH_A_VALUE = ("-X", "-W")
FIRST_SPARE = 500
"""File numbers from here on are free in every process of the suite."""


def import_everything() -> None:
    for package in map(importlib.import_module, PACKAGES):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for name in IF_INSTALLED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run_as_python(arguments: list[str]) -> None:
    """What ``python ARGUMENTS`` does in a fresh process."""
    while arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        arguments = arguments[2 if arguments[0] in FLAGS_WITH_A_VALUE else 1 :]
    what, sys.argv = arguments[0], arguments
    if what == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif what == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(what)))
        runpy.run_path(what, run_name="__main__")


def take_over(request: dict, files: list[int]) -> None:
    """Take the client's open files (and no others), folder and environment."""
    spare = [os.dup2(file, FIRST_SPARE + i) for i, file in enumerate(files)]
    os.closerange(0, FIRST_SPARE)
    for file, number in zip(spare, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.executable = os.path.join(os.path.dirname(request["client"]), "python")
    multiprocessing.spawn.set_executable(sys.executable)
    random.seed()
    if backend := os.environ.get("MPLBACKEND"):  # read once, when it is imported
        sys.modules["matplotlib"].rcParams["backend"] = backend


def run_and_leave(arguments: list[str]) -> None:
    """Run, then end as an interpreter ends: its error printed, threads awaited, exit functions run, streams flushed."""
    status = 1
    try:
        run_as_python(arguments)
        status = 0
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        if not isinstance(leave.code, int | None):
            print(leave.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = 120  # as an interpreter's, whose reader has left
    os._exit(status & 0xFF)


class Server:
    """Listens at ``path``; every open connection is watched for its end, every fork for its own."""

    def __init__(self, path: str):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(64)
        self.watched = selectors.DefaultSelector()
        self.watch(self.listener, self.accept)
        self.n_keepers: int | None = None

    def watch(self, file: int | socket.socket, then: Callable[[], None]) -> None:
        self.watched.register(file, selectors.EVENT_READ, then)

    def serve(self) -> None:
        while self.n_keepers != 0:
            for key, _ in self.watched.select():
                if key.fd in self.watched.get_map():  # not dropped by what came before it
                    key.data()

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        head, files, _, _ = socket.recv_fds(connection, 8, 253)
        size = int.from_bytes(head, "big")
        if size:
            self.fork(connection, json.loads(connection.makefile("rb").read(size)), files)
        else:
            self.n_keepers = (self.n_keepers or 0) + 1
            self.watch(connection, lambda: self.lose_keeper(connection))

    def lose_keeper(self, connection: socket.socket) -> None:
        self.watched.unregister(connection)
        connection.close()
        self.n_keepers -= 1

    def fork(self, connection: socket.socket, request: dict, files: list[int]) -> None:
        child = os.fork()
        if child == 0:
            take_over(request, files)
            run_and_leave(request["arguments"])
        for file in files:
            os.close(file)
        process = os.pidfd_open(child)

        def ended() -> None:
            self.watched.unregister(process)
            os.close(process)
            _, status = os.waitpid(child, 0)
            if connection in self.watched.get_map():
                self.watched.unregister(connection)
                with contextlib.suppress(OSError):  # the client has left just now
                    connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
            connection.close()

        def left() -> None:
            self.watched.unregister(connection)
            os.kill(child, signal.SIGKILL)

        self.watch(process, ended)
        self.watch(connection, left)


if __name__ == "__main__":
    server = Server(sys.argv[1])
    sys.path.pop(0)  # this folder
    gc.disable()  # while nothing is garbage
    import_everything()
    gc.freeze()  # the collector touches no page that forks share
    gc.enable()
    server.serve()

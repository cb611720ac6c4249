"""Python processes that need no start of seconds: forks of one that has imported everything, shared by all tests of a run.

To a test they are processes like others: ``sys.executable``, ``kvlens`` on the PATH, spawned workers and kernels; with their
own files, exit status and signals. What they do not show is what an import does; :mod:`test_imports` looks at that.
"""

import contextlib
import fcntl
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def keep(folder: Path) -> Iterator[tuple[str, Path]]:
    """Start the server of this test run unless it runs, and keep it alive until this generator is closed.

    Args:
        folder: of the test run, common to its processes.

    Yields:
        Once: where the server listens, and the folder with the programs ``python`` and ``kvlens``.
    """
    programs, path, process = folder / "warm_python", str(folder / "warm_python.socket"), None
    with open(folder / "warm_python.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not programs.exists():
            process = subprocess.Popen([sys.executable, HERE / "server.py", path], stdin=subprocess.DEVNULL)
            while not os.path.exists(path) and process.poll() is None:
                time.sleep(0.02)
            programs.mkdir()
            for name in ("python", "kvlens"):
                (programs / name).write_text(f"#!{sys.executable} -SE\n{(HERE / 'client.py').read_text()}")
                (programs / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.connect(path)
        keeper.sendall(bytes(8))
        yield path, programs
    if process is not None:
        process.wait()


@contextlib.contextmanager
def processes(path: str, programs: Path) -> Iterator[None]:
    """Within: processes started as ``sys.executable`` or ``kvlens``, or spawned by multiprocessing, are warm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLENS_WARM_PYTHON", path)
        patch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
        patch.setattr(sys, "executable", str(programs / "python"))
        before = multiprocessing.spawn.get_executable()
        multiprocessing.resource_tracker.ensure_running()  # a process of this one's own, which outlives the server
        multiprocessing.spawn.set_executable(sys.executable)
        yield
        multiprocessing.spawn.set_executable(before)

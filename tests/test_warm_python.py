"""A warm Python is to its caller what a fresh one is: same output, files, folder, environment, exit status and end."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

pytestmark = [pytest.mark.usefixtures("warm_python"), pytest.mark.skipif(sys.platform != "linux", reason="forks of Linux")]

STATUS = {
    "print('a')": 0,
    "import sys; sys.exit(7)": 7,
    "import sys; sys.exit('no')": 1,
    "1 / 0": 1,
    "import os; os.kill(os.getpid(), 9)": -signal.SIGKILL,
    "import os; os.abort()": -signal.SIGABRT,
}


def run(*arguments, **how):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, **how)


@pytest.mark.parametrize("code", STATUS)
def test_status_and_streams_are_those_of_a_fresh_one(code):
    warm = run("-c", code)
    fresh = subprocess.run([sys._base_executable, "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert warm.returncode == fresh.returncode == STATUS[code]
    assert warm.stdout == fresh.stdout and warm.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_it_has_imported_kvlens_and_sees_the_callers_world(tmp_path):
    code = "import os, sys; print('kvlens.model' in sys.modules, os.getcwd(), os.environ['A'], sys.argv, sys.stdin.read())"
    done = run("-W", "error", "-c", code, "x", cwd=tmp_path, env={**os.environ, "A": "b"}, input="in")
    assert done.stdout == f"True {tmp_path} b ['-c', 'x'] in\n"
    (tmp_path / "script.py").write_text("import sys, beside; print(__name__, sys.argv[1:], beside.HERE)")
    (tmp_path / "beside.py").write_text("HERE = 1")
    assert run(tmp_path / "script.py", "y").stdout == "__main__ ['y'] 1\n"
    assert run("-m", "script", "z", cwd=tmp_path).stdout == "__main__ ['z'] 1\n"


def test_the_command_is_on_the_path():
    done = subprocess.run("kvlens --version | cat", shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("kvlens ")


def test_a_pipe_of_the_caller_is_inherited():
    end, other = os.pipe()
    assert run("-c", f"import os; os.write({other}, b'through')", pass_fds=[other]).returncode == 0
    assert os.read(end, 99) == b"through"
    os.close(end)
    os.close(other)


def test_it_ends_with_its_caller():
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"1\n"
    process.kill()
    assert process.wait() == -signal.SIGKILL
    with process.stdout as rest:
        assert rest.read() == b""  # comes when nobody is left to write


def test_spawned_workers_are_warm():
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert list(pool.map(abs, [-1, 2])) == [1, 2]
        assert pool.submit(eval, "'kvlens.model' in __import__('sys').modules").result()

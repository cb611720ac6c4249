"""A file, folder or package of the user that is called ``analyses`` causes no conflict, in a clone or installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
THEIRS = {"analyses.py": "mine = 1\n", "analyses/__init__.py": "from .other import mine\n", "analyses/other.py": "mine = 1\n"}
USES_BOTH = """
import analyses
import kvlens.analyses, kvlens.report, kvlens.viz
from kvlens.cli import main
assert analyses.mine == 1 and analyses.__file__.startswith({folder!r}), analyses
assert kvlens.analyses.bias_by_head.__module__ == "kvlens.analyses.bias.by_head"
assert main(["analyse", "bias_by_head", "p.txt", "--model", "bigram-linear", "--text", "4 5", "--out", "t.parquet"]) == 0
import analyses
assert analyses.mine == 1
"""
ONE_PACKAGE = """
import analyses.batch.script, kvlens.analyses.batch.script
from analyses import ANALYSES
assert analyses is kvlens.analyses and analyses.batch.script is kvlens.analyses.batch.script
assert ANALYSES is kvlens.analyses.ANALYSES
import importlib.util
assert importlib.util.find_spec("analyses.nowhere") is None and importlib.util.find_spec("analyses.batch.script") is not None
try:
    import analyses.nowhere
except ModuleNotFoundError:
    print("one package")
"""


def run(arguments: list[str], cwd: Path, path: Path | str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder of an installation from a wheel, as ``pip install .`` makes it."""
    pytest.importorskip("hatchling", reason='builds a wheel: pip install -e ".[test]" brings hatchling')
    folder = tmp_path_factory.mktemp("installation")
    source = folder / "source"
    for name in ("kvlens", "analyses"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target"]
    done = run([*install, str(folder / "site"), str(source)], folder, os.environ.get("PYTHONPATH", ""))
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture(params=["in a clone", "installed"])
def place(request) -> Path:
    """What is put on Python's path."""
    return ROOT if request.param == "in a clone" else request.getfixturevalue("installed")


def test_both_work_side_by_side(place, tmp_path):
    theirs = "analyses.py" if place == ROOT else "analyses/"
    for name, text in THEIRS.items():
        if name.startswith(theirs):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
    (tmp_path / "p.txt").write_text("3 1\n")
    done = run(["-c", USES_BOTH.format(folder=str(tmp_path))], tmp_path, place)
    assert done.returncode == 0, done.stderr


def test_the_short_name_is_the_same_package(place, tmp_path):
    done = run(["-c", ONE_PACKAGE], tmp_path, place)
    assert done.stdout == "one package\n", done.stderr
    for name in ("analyses", "kvlens.analyses"):
        told = run(["-m", name, "--help"], tmp_path, place)
        assert told.returncode == 0 and "bias_by_head" in told.stdout, told.stderr


def test_what_is_installed(installed):
    """Nothing but ours in a folder of ours, and a file, which no package of that name is overwritten by."""
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names - {"__pycache__"} == {"analyses.py", "bin", "kvlens"}
    assert (installed / "kvlens/analyses/registry.py").is_file() and not (installed / "kvlens/analyses.py").exists()


def test_another_folder_next_to_kvlens_is_named(tmp_path):
    for name in ("__init__", "analyses", "errors"):
        (tmp_path / "kvlens").mkdir(exist_ok=True)
        shutil.copy(ROOT / f"kvlens/{name}.py", tmp_path / "kvlens")
    (tmp_path / "analyses").mkdir()
    (tmp_path / "analyses/__init__.py").write_text("raise SystemExit('this is run')")
    done = run(["-c", "import kvlens.analyses"], tmp_path, tmp_path)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"kvlens.errors.KVLensError: kvlens.analyses: {tmp_path}/analyses is missing, or not the folder")

"""A file or folder of the user that is called ``analyses`` causes no conflict, in a clone or installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
THEIRS = {
    "a file": {"analyses.py": "mine = 1\n"},
    "a folder": {"analyses/other.py": "mine = 1\n"},
}
USES_BOTH = """
{imported}
assert mine == 1
import kvlens.analyses, kvlens.report, kvlens.viz
from kvlens.cli import main
assert kvlens.analyses.bias_by_head.__module__ == "kvlens.analyses.bias.decomposition"
assert main(["analyse", "bias_by_head", "p.txt", "--model", "bigram-linear", "--text", "4 5", "--out", "t.parquet"]) == 0
{imported}
assert mine == 1
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


@pytest.mark.parametrize("kind", THEIRS)
def test_both_work_side_by_side(place, kind, tmp_path):
    for name, text in THEIRS[kind].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "p.txt").write_text("3 1\n")
    imported = "from analyses.other import mine" if kind == "a folder" else "from analyses import mine"
    done = run(["-c", USES_BOTH.format(imported=imported)], tmp_path, place)
    assert done.returncode == 0, done.stderr


def test_the_analyses_are_run_as_a_module(place, tmp_path):
    told = run(["-m", "kvlens.analyses", "--help"], tmp_path, place)
    assert told.returncode == 0 and "bias_by_head" in told.stdout, told.stderr
    told = run(["-m", "analyses", "--help"], ROOT, "")
    assert told.returncode == 0 and "bias_by_head" in told.stdout, told.stderr


def test_what_is_installed(installed):
    """Nothing but ours, in a folder of ours."""
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names - {"__pycache__"} == {"bin", "kvlens"}
    assert (installed / "kvlens/analyses/registry.py").is_file() and (installed / "kvlens/analyses.py").is_file()


def test_another_folder_next_to_kvlens_is_named(tmp_path):
    for name in ("__init__", "analyses", "errors"):
        (tmp_path / "kvlens").mkdir(exist_ok=True)
        shutil.copy(ROOT / f"kvlens/{name}.py", tmp_path / "kvlens")
    (tmp_path / "analyses").mkdir()
    (tmp_path / "analyses/__init__.py").write_text("raise SystemExit('this is run')")  # theirs
    done = run(["-c", "import kvlens.analyses"], tmp_path, tmp_path)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"kvlens.errors.KVLensError: kvlens.analyses: {tmp_path}/analyses is missing, or not the folder")

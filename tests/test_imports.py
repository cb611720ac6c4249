"""Imports go one way, downwards, and never in a circle; and the guards that say so can fail.

Every import counts: at the top, in a function, under ``TYPE_CHECKING``, and by a name that is handed to ``importlib``. Upwards
every string that is the name of a module counts, too: some file may import it by that.
"""

import ast
import functools
import os
import re
import shutil
import subprocess
import symtable
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# fmt: off
ORDER = [
    "errors", "memory", "checks", "arguments", "files", "terminal", "dtypes", "tokenizer", "templates", "ops", "base",
    "kv_bias", "components", "mixers", "zoo", "pretrained", "model", "texts", "units", "marks", "question", "chat", "bridge",
    "loading", "conversion", "dual", "corpus", "tasks", "training", "analyses", "viz", "explanation",
    "papers", "app", "cli",
]
PURE = {
    "torch", "einops", "jaxtyping", "kvlens",
    "collections", "dataclasses", "functools", "inspect", "itertools", "math", "typing",
}
PUBLIC = {
    "kvlens.arguments", "kvlens.bridge", "kvlens.chat", "kvlens.checks", "kvlens.dual", "kvlens.errors", "kvlens.kv_bias",
    "kvlens.memory", "kvlens.model", "kvlens.terminal", "kvlens.texts", "kvlens.units",
}
# fmt: on
"""In addition to what ``kvlens`` itself offers: what a bias is made of, the dual model, what arguments must be, errors with the
nearest name, how much is held at once, what is read of a pass, the bar that shows how far one is."""
FOUNDATIONS = {"kvlens.files", "kvlens.files.parquet", "kvlens.zoo"}
"""What a batch needs to write files that notice damage, and to know the name of a model."""
Sources = Mapping[str, tuple[str, bool]]
"""Source and whether it is a package, by the module's name."""


def sources() -> dict[str, tuple[str, bool]]:
    """By the modules' names; the folder ``analyses`` is the package ``kvlens.analyses``."""
    found = {path: path.relative_to(ROOT) for path in ROOT.glob("kvlens/**/*.py")}
    found |= {path: Path("kvlens", path.relative_to(ROOT)) for path in ROOT.glob("analyses/**/*.py")}
    return {
        ".".join(place.with_suffix("").parts).removesuffix(".__init__"): (path.read_text(), path.name == "__init__.py")
        for path, place in found.items()
    }


def ancestors(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts))}


@functools.cache
def named_imports(module: str, source: str, is_package: bool) -> tuple[str, ...]:
    """Every dotted name that an import may mean: ``from a import b`` is ``a`` or ``a.b``."""
    return tuple(_named_imports(module, source, is_package))


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """The statements of a source at any depth; of one that imports by name, all nodes."""
    by_name = "import_module" in source or "__import__" in source
    return tuple(ast.walk(ast.parse(source)) if by_name else statements(ast.parse(source).body))


def statements(body: Iterable[ast.AST]) -> Iterable[ast.AST]:
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, inner, []) if not isinstance(node, ast.expr) else [])


def _named_imports(module: str, source: str, is_package: bool) -> Iterable[str]:
    by_name = "import_module" in source or "__import__" in source
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif by_name and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def imported(module: str, all_sources: Sources) -> set[str]:
    """The modules of ours that ``module`` imports, and the packages that Python runs on the way to them."""
    source, is_package = all_sources[module]
    targets: set[str] = set()
    for name in named_imports(module, source, is_package):
        if name.endswith("."):  # import_module(f"kvlens.papers.{name}") may mean any of them
            targets |= {other for other in all_sources if other.startswith(name)}
        else:
            targets |= {next((n for n in (name, name.rpartition(".")[0]) if n in all_sources), "")} - {""}
    on_the_way = {package for target in targets for package in ancestors(target)} - ancestors(module) - {module}
    return targets | (on_the_way & set(all_sources))


def in_strings(source: str, all_sources: Sources) -> set[str]:
    """The modules whose names are strings, also as MODULE:NAME."""
    strings = re.findall(r"""["'](kvlens\.[\w.]+)(?::\w+)?["']""", source)
    return {next((n for n in (name, name.rpartition(".")[0]) if n in all_sources), "") for name in strings} - {""}


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """The sets of modules that reach each other (strongly connected components of more than one, and self-imports)."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        stack = [start]
        while stack:
            new = graph.get(stack.pop(), set()) - seen
            seen |= new
            stack += new
        return seen

    reach = {module: reached(module) for module in graph}
    found: list[set[str]] = []
    for module in sorted(graph):
        circle = {other for other in reach[module] if module in reach.get(other, set())}
        if circle and circle not in found:
            found.append(circle)
    return found


def package_of(module: str) -> str | None:
    """``kvlens.ops.rotary`` -> ``ops``; None for kvlens itself and its ``__main__``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else None


def upward_imports(all_sources: Sources) -> list[str]:
    found = []
    for module in all_sources:
        here = package_of(module)
        named = imported(module, all_sources) | in_strings(all_sources[module][0], all_sources)
        for name in sorted(named) if here is not None else ():
            package = package_of(name)
            if package is not None and ORDER.index(package) > ORDER.index(here):
                found.append(f"{module} names {name}")
    return found


def test_every_package_has_its_position_in_the_order():
    assert {package_of(module) for module in sources()} - {None} <= set(ORDER)


def test_imports_go_downwards():
    assert upward_imports(sources()) == []


def test_nothing_is_imported_in_a_circle():
    """But for `kvlens.explain`, the one name of ``kvlens`` that stands above the analyses: it is looked up when it is used."""
    all_sources = sources()
    graph = {module: imported(module, all_sources) for module in all_sources}
    graph["kvlens"] = graph["kvlens"] - {"kvlens.explanation"}
    assert circles(graph) == []


TOP, LOCAL = "from kvlens.model import HookedKVTransformer", "def f():\n    from kvlens.model.transformer import x"
TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kvlens.model.transformer"
BY_NAME = "import importlib\ndef f():\n    return importlib.import_module('kvlens.model.transformer')"
RELATIVE = "from ..model import transformer"
PLANTED = {"top": TOP, "local": LOCAL, "types": TYPES, "by name": BY_NAME, "relative": RELATIVE}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_the_guards_can_fail(planted):
    """Planted into a copy of the sources: an op that imports the model is found, however it imports it."""
    home = "kvlens.ops.rotary"
    all_sources = {**sources(), home: (planted, False)}
    assert any(line.startswith(f"{home} names kvlens.model") for line in upward_imports(all_sources))
    graph = {module: imported(module, all_sources) for module in all_sources}
    assert any({home, "kvlens.model.transformer"} <= circle for circle in circles(graph))


@pytest.mark.parametrize("rest", ["", ":explanation", ".explain"])
def test_a_name_in_a_table_that_points_upwards_is_found(rest):
    """Planted into the registry of analyses; `kvlens` itself, which is above all packages, may have such a table."""
    table = f'HOMES = {{"explanation": "kvlens.explanation.steps{rest}"}}\n'
    found = upward_imports({**sources(), "kvlens.analyses.registry": (table, False)})
    assert found == ["kvlens.analyses.registry names kvlens.explanation.steps"]
    assert upward_imports({**sources(), "kvlens": (table, True)}) == []


def test_circles_are_found_between_two_and_between_many():
    chain = {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert circles(chain) == []
    assert circles({**chain, "d": {"b"}}) == [{"b", "c", "d"}]
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"c"}}) == [{"a", "b"}, {"c"}]


def test_ops_do_not_depend_on_transformer_lens():
    for module, (source, is_package) in sources().items():
        if package_of(module) == "ops":
            assert {name.split(".")[0] for name in named_imports(module, source, is_package)} <= PURE, module


def test_analyses_use_public_names_only():
    all_sources = sources()
    for module in all_sources:
        if package_of(module) == "analyses":
            allowed = PUBLIC | (FOUNDATIONS if module.startswith("kvlens.analyses.batch.") else set())
            others = {name for name in imported(module, all_sources) if package_of(name) not in (None, "analyses")}
            assert not others - allowed, module
            assert not [n for n in named_imports(module, *all_sources[module]) if n.startswith("transformer_lens")], module


def test_public_names_exist_and_unknown_ones_do_not():
    import kvlens

    for name in kvlens.__all__:
        assert getattr(kvlens, name).__name__ == name
    assert not hasattr(kvlens, "convert_promt")


ONE_MEANING = {
    "carried_keys carried_queries effective_attention state_map": "an operation, in the file of each recurrent rule",
    "ends_of fingerprint_of layers_of": "what the protocol of models asks, of each of the two front ends",
    "main": "of a command line",
    "logger": "of a module",
}
"""What several modules define, because it means the same thing in each."""


def public_names(source: str) -> list[str]:
    """What a module defines: functions, classes, types and constants."""
    symbols = symtable.symtable(source, "", "exec").get_symbols()
    return [s.get_name() for s in symbols if s.is_assigned() and not s.is_imported() and s.get_name()[0] != "_"]


def test_one_word_means_one_thing():
    """A reader who searches for a class, a function, a type, or a constant that some module imports, finds one.

    An experiment is read by itself: what it defines counts if another module imports it.
    """
    all_sources, named = sources(), list[str]()
    taken = {name for module in all_sources for name in named_imports(module, *all_sources[module])}
    words = {name.rpartition(".")[2] for name in taken if "." in name}
    for module, (source, _) in all_sources.items():
        classes = [node.name for node in nodes(source) if isinstance(node, ast.ClassDef)]
        found = [name for name in public_names(source) if name not in classes and (name in words or not name.isupper())]
        named += classes + [name for name in found if f"{module}.{name}" in taken or "\n@experiment(" not in source]
    twice = {name for name in named if named.count(name) > 1}
    assert len(named) > 1500 and twice == set(" ".join(ONE_MEANING).split())


def test_nothing_of_ours_goes_by_the_short_name():
    """``analyses`` may be a file or a package of somebody else's; ``kvlens.analyses`` is ours."""
    for module, (source, is_package) in sources().items():
        named = {name.split(".")[0] for name in named_imports(module, source, is_package)}
        assert "analyses" not in named or module == "kvlens.analyses", module  # which asks for its own name


THEIRS = {
    "a file": {"analyses.py": "mine = 1\n"},
    "a folder": {"analyses/other.py": "mine = 1\n"},
}
USES_BOTH = """
{imported}
assert mine == 1
import kvlens.analyses, kvlens.explanation, kvlens.viz
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", THEIRS)
def test_both_work_side_by_side(place, kind, tmp_path):
    for name, text in THEIRS[kind].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "p.txt").write_text("3 1\n")
    imported = "from analyses.other import mine" if kind == "a folder" else "from analyses import mine"
    done = run(["-c", USES_BOTH.format(imported=imported)], tmp_path, place)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_analyses_are_run_as_a_module(place, tmp_path):
    told = run(["-m", "kvlens.analyses", "--help"], tmp_path, place)
    assert told.returncode == 0 and "bias_by_head" in told.stdout, told.stderr
    told = run(["-m", "analyses", "--help"], ROOT, "")
    assert told.returncode == 0 and "bias_by_head" in told.stdout, told.stderr


@pytest.mark.slow
def test_what_is_installed(installed):
    """Nothing but ours, in a folder of ours."""
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names - {"__pycache__"} == {"bin", "kvlens"}
    assert (installed / "kvlens/analyses/registry.py").is_file() and (installed / "kvlens/analyses.py").is_file()


@pytest.mark.slow
def test_the_readmes_first_command_runs_from_a_wheel(installed, tmp_path):
    done = run(["-m", "kvlens", "explain", "--out", "page.html"], tmp_path, installed)
    assert done.returncode == 0 and "donkey" in done.stdout, done.stderr
    assert (tmp_path / "page.html").is_file()


@pytest.mark.slow
def test_another_folder_next_to_kvlens_is_named(tmp_path):
    for name in ("__init__", "analyses", "errors"):
        (tmp_path / "kvlens").mkdir(exist_ok=True)
        shutil.copy(ROOT / f"kvlens/{name}.py", tmp_path / "kvlens")
    (tmp_path / "analyses").mkdir()
    (tmp_path / "analyses/__init__.py").write_text("raise SystemExit('this is run')")  # theirs
    done = run(["-c", "import kvlens.analyses"], tmp_path, tmp_path)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"kvlens.errors.KVLensError: kvlens.analyses: {tmp_path}/analyses is missing, or not the folder")

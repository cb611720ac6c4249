"""Imports go one way, downwards; ``import kvlens`` is light; and the guard that says so can fail."""

import ast
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORDER = [
    "errors",
    "files",
    "ops",
    "_tl",
    "kv_bias",
    "components",
    "model",
    "conversion",
    "corpus",
    "tasks",
    "training",
    "zoo",
    "experiments",
    "analyses",
    "viz",
    "report",
    "cli",
]
ALSO_ALLOWED = {("model", "zoo")}  # from_zoo asks for a folder's path
FOUNDATIONS = {"kvlens.errors", "kvlens.files"}  # the batch scripts are commands: they propose names and write files
PURE = {"torch", "einops", "jaxtyping", "math", "typing", "collections", "kvlens"}


def room_of(module: str) -> str | None:
    """``kvlens.ops.rotary`` -> ``ops``; ``analyses.x`` -> ``analyses``; None for modules of others and for kvlens itself."""
    parts = module.split(".")
    if parts[0] == "analyses":
        return "analyses"
    return parts[1] if parts[0] == "kvlens" and len(parts) > 1 and parts[1] in ORDER else None


def imported(source: str) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return names


def upward_imports(module: str, source: str) -> list[str]:
    here = room_of(module)
    if here is None:
        return []
    rooms = [(name, room_of(name)) for name in imported(source)]
    return [
        f"{module} imports {name}"
        for name, room in rooms
        if room is not None and ORDER.index(room) > ORDER.index(here) and (here, room) not in ALSO_ALLOWED
    ]


def modules() -> list[tuple[str, str]]:
    paths = [*ROOT.glob("kvlens/**/*.py"), *ROOT.glob("analyses/**/*.py")]
    return [(".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), p.read_text()) for p in paths]


def test_imports_go_downwards():
    assert not [line for module, source in modules() for line in upward_imports(module, source)]


def test_the_guard_can_fail():
    assert upward_imports("kvlens.ops.rotary", "from kvlens.model import HookedKVTransformer") == [
        "kvlens.ops.rotary imports kvlens.model"
    ]


def test_ops_know_nothing_of_transformer_lens():
    for module, source in modules():
        if room_of(module) == "ops":
            assert {name.split(".")[0] for name in imported(source)} <= PURE, module


def test_analyses_use_public_names_only():
    for module, source in modules():
        if room_of(module) == "analyses":
            allowed = FOUNDATIONS if module.startswith("analyses.batch.") else set()
            names = set(imported(source)) - allowed
            assert not [name for name in names if name.startswith("kvlens.") or name.startswith("transformer_lens")], module


def test_importing_kvlens_imports_no_torch():
    code = "import sys, kvlens; print([m for m in ('torch', 'transformer_lens', 'pandas', 'rich') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_public_names_exist_and_unknown_ones_do_not():
    import kvlens

    for name in kvlens.__all__:
        assert getattr(kvlens, name).__name__ == name
    assert not hasattr(kvlens, "convert_promt")


def test_only_transformer_lens_own_deprecation_is_silenced():
    from kvlens import HookedKVTransformer, HookedKVTransformerConfig

    cfg = HookedKVTransformerConfig(n_layers=1, d_model=4, d_head=2, n_ctx=3, d_vocab=5, act_fn="relu", device="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        HookedKVTransformer(cfg)
        assert warnings.filters == filters
        warnings.warn("HookedTransformer is deprecated", DeprecationWarning, stacklevel=1)
    assert [str(w.message) for w in caught] == ["HookedTransformer is deprecated"]

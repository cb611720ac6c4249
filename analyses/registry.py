"""Which analyses there are, where each is defined, and which front end each runs on, with the reason where it does not.

An analysis is known by its declaration, the decorator ``@analysis``, wherever in kvlens it stands: there is no list of them.
HookedKVTransformer runs what TransformerLens 3's HookedTransformer does, linear attention and KV shifts among it;
KVTransformerBridge runs models as Transformers does, softmax layers and, in hybrid models, recurrent ones. An analysis that is
not in :data:`NOT_ON` runs on all of them.
"""

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import kvlens
from kvlens import KVLensError
from kvlens.errors import check_known

if TYPE_CHECKING:
    from kvlens import KVModel

Function = TypeVar("Function", bound=Callable[..., Any])

DECLARED = re.compile(r"^@analysis\((.*?)^def (\w+)", re.MULTILINE | re.DOTALL)
"""The settings of a declaration, and the function below it."""


def declared() -> dict[str, str]:
    """Name of an analysis -> its module, for all that the files of kvlens declare; one with ``of=`` bears that function's name.

    The files are read, not imported, which takes 0.03 s. So no package above this one is named here.
    """
    found = {}
    for folder, package in ((Path(kvlens.__path__[0]), "kvlens"), (Path(__file__).parent, "kvlens.analyses")):
        for file in folder.rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            for settings, function in DECLARED.findall(text) if "\n@analysis(" in text else ():
                named = re.search(r"\bof=(\w+)", settings)
                module = ".".join((package, *file.relative_to(folder).with_suffix("").parts))
                found[named[1] if named else function] = module.removesuffix(".__init__")
    return dict(sorted(found.items()))


ANALYSES = declared()
"""Name of an analysis, which ``kvlens analyse NAME`` runs over many prompts -> the module that holds it."""


def locate(name: str) -> tuple[str, str]:
    """Module and attribute of an analysis, given the name of one of kvlens, or MODULE:FUNCTION for any other.

    Raises:
        KVLensError: no such analysis (the nearest name is proposed).
    """
    if ":" not in name:
        check_known("no analysis (your own is given as my_package.my_module:my_function)", name, ANALYSES)
    module, _, attribute = (f"{ANALYSES[name]}:{name}" if name in ANALYSES else name).partition(":")
    return module, attribute


# --- front ends ---

HOOKED, SOFTMAX, RECURRENT = "HookedKVTransformer", "KVTransformerBridge, softmax layers alone", "KVTransformerBridge, hybrid"
"""The kinds of model that the table tells apart."""


_NO_STATE = "no layer of the model is recurrent with a state: it keeps every key of a prompt instead"
_WEIGHTS = (
    "it multiplies the matrices W_Q, W_K, W_V and W_O of heads, and a recurrent layer's queries, keys and values are not "
    "linear in the residual stream: they pass a short convolution, an activation, or both"
)
_PROJECTIONS = (
    "it changes the queries, keys and values of one head and holds the outputs of others, and a recurrent layer has no hook "
    "points for the former, and behind its heads a gate that reads the residual stream"
)
_DUAL = "its dual model is that of a whole layer's softmax or linear attention, and a recurrent layer's state is neither"
_BY_QUERIES = "it reads what queries score; how much of a first prompt a second one leaves in a state is state_erasure"

NOT_ON: Mapping[str, Mapping[str, str]] = {
    "bias_interactions": {RECURRENT: _BY_QUERIES},
    "circuit": {RECURRENT: _PROJECTIONS},
    "composition": {RECURRENT: _WEIGHTS},
    "dual_bound": {RECURRENT: _DUAL},
    "dual_demonstrations": {RECURRENT: _DUAL},
    "dual_losses": {RECURRENT: _DUAL},
    "state_erasure": {HOOKED: _NO_STATE, SOFTMAX: _NO_STATE},
    "state_half_lives": {HOOKED: _NO_STATE, SOFTMAX: _NO_STATE},
    "state_memory": {HOOKED: _NO_STATE, SOFTMAX: _NO_STATE},
}
"""Name of an analysis -> the kinds of model that it does not run on -> why."""


def kind_of(model: "KVModel") -> str:
    """Return which of the kinds a model is."""
    from kvlens import HookedKVTransformer  # imports torch
    from kvlens.model import heads_per_layer, recurrent_layers

    if isinstance(model, HookedKVTransformer):
        return HOOKED
    counts = heads_per_layer(model)
    return RECURRENT if any(counts[layer] for layer in recurrent_layers(model)) else SOFTMAX


def reason_against(name: str, model: "KVModel") -> str | None:
    """Why an analysis does not run on a model; None where it does."""
    return NOT_ON[name].get(kind_of(model)) if name in NOT_ON else None


def check_front_end(name: str, model: object) -> None:
    """Raise KVLensError where an analysis does not run on the kind of a model, which it names."""
    from kvlens import KVModel

    if not isinstance(model, KVModel):
        return  # the analysis itself says what it expects
    reason = reason_against(name, model)
    if reason is not None:
        family = getattr(model.cfg, "architecture", None)
        raise KVLensError(f"{name} does not run on {kind_of(model)}{f' ({family})' if family else ''}: {reason}")


def on_its_front_ends(function: Function) -> Function:
    """Refuse, for the reason that :data:`NOT_ON` gives under the function's name, models that it does not run on."""

    @functools.wraps(function)
    def checked_first(*args: object, **kwargs: object) -> object:
        check_front_end(function.__name__, kwargs.get("model", args[0] if args else None))
        return function(*args, **kwargs)

    return checked_first  # type: ignore[return-value]


OTHERS = ("attention_under_bias", "baseline_ablation", "bias_ablation", "bias_by_layer", "head_details", "linked_shares")
"""Public functions that look at a model and are not run over many prompts."""


def analyses() -> list[str]:
    """The names of the functions that the table is about."""
    return sorted((*ANALYSES, *OTHERS))


def table_of(names: list[str]) -> str:
    """The table of analyses and front ends, as Markdown; reasons are numbered below it."""
    rows, reasons = [], list[str]()
    for name in sorted(names):
        cells = []
        for reason in map(NOT_ON.get(name, {}).get, (HOOKED, SOFTMAX, RECURRENT)):
            if reason is not None and reason not in reasons:
                reasons.append(reason)
            cells.append("yes" if reason is None else f"no ({reasons.index(reason) + 1})")
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    head = f"| analysis | {HOOKED} | {SOFTMAX} | {RECURRENT} |\n|---|---|---|---|"
    notes = "\n".join(f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, 1))
    return f"{head}\n" + "\n".join(rows) + f"\n\n{notes}"


__doc__ = f"{__doc__}\n{table_of(analyses())}\n"

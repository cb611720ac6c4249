"""Which analyses there are, where each is defined, and which front end each runs on, with the reason where it does not.

This folder and ``kvlens/analyses.py`` are one package, ``kvlens.analyses``. The modules of kvlens' own analyses and of every
public name are listed, so that finding them imports nothing. HookedKVTransformer runs what TransformerLens 3's
HookedTransformer does, linear attention and KV shifts among it; KVTransformerBridge runs models as Transformers does, softmax
layers and, in hybrid models, recurrent ones. An analysis that is not in :data:`NOT_ON` runs on all of them.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from kvlens import KVLensError
from kvlens.errors import nearest

Function = TypeVar("Function", bound=Callable[..., Any])

ANALYSES = {
    "activation_patching": "kvlens.analyses.bias.patching",
    "attribution_by_edge": "kvlens.analyses.attribution.by_edge",
    "attribution_by_head": "kvlens.analyses.attribution.by_part",
    "attribution_by_position": "kvlens.analyses.attribution.by_part",
    "bias_by_head": "kvlens.analyses.bias.decomposition",
    "bias_decomposition": "kvlens.analyses.bias.decomposition",
    "bias_effects": "kvlens.analyses.bias.effects",
    "bias_positions": "kvlens.analyses.bias.positions",
    "bias_singular_values": "kvlens.analyses.bias.decomposition",
    "circuits": "kvlens.analyses.bias.pairs",
    "composition": "kvlens.analyses.heads.head_pairs",
    "conversion_error": "kvlens.analyses.readings",
    "dual_bound": "kvlens.analyses.dual",
    "dual_demonstrations": "kvlens.analyses.dual",
    "dual_losses": "kvlens.analyses.dual",
    "explanation": "kvlens.explanation.steps",
    "induction_heads": "kvlens.analyses.heads.induction",
    "induction_verdicts": "kvlens.analyses.heads.naming",
    "layer_contributions": "kvlens.analyses.logit_attribution",
    "prompt_attribution": "kvlens.analyses.attribution.prompt",
    "prompt_by_depth": "kvlens.analyses.readings",
    "prompt_copies": "kvlens.analyses.heads.induction",
    "prompt_effect": "kvlens.analyses.readings",
    "reading_layers": "kvlens.explanation.reading",
    "state_erasure": "kvlens.analyses.state",
    "state_memory": "kvlens.analyses.state",
}
"""Name of an analysis, which ``kvlens analyse NAME`` runs over many prompts -> the module that holds it."""

HOMES = ANALYSES | {
    "ANALYSES": "kvlens.analyses.registry",
    "ANSWER": "kvlens.analyses.declaration",
    "Analysis": "kvlens.analyses.declaration",
    "Columns": "kvlens.analyses.declaration",
    "Field": "kvlens.analyses.declaration",
    "Option": "kvlens.analyses.declaration",
    "HeadDetails": "kvlens.analyses.heads.rows",
    "LinkedShares": "kvlens.analyses.bias.positions",
    "PROMPT": "kvlens.analyses.declaration",
    "Record": "kvlens.analyses.declaration",
    "TEXT": "kvlens.analyses.declaration",
    "RIVAL": "kvlens.analyses.declaration",
    "analysis": "kvlens.analyses.declaration",
    "AttentionUnderBias": "kvlens.analyses.heads.rows",
    "attention_under_bias": "kvlens.analyses.heads.rows",
    "baseline_ablation": "kvlens.analyses.bias.effects",
    "bias_ablation": "kvlens.analyses.bias.effects",
    "bias_by_layer": "kvlens.analyses.bias.decomposition",
    "head_details": "kvlens.analyses.heads.rows",
    "linked_shares": "kvlens.analyses.bias.positions",
    "reading_shares": "kvlens.explanation.reading",
    "reading_stability": "kvlens.explanation.reading",
    "next_token_texts": "kvlens.texts",
    "token_texts": "kvlens.texts",
    "tokens_field": "kvlens.analyses.declaration",
}
"""Public name of ``kvlens.analyses`` -> the module that holds it."""


ATTRIBUTION_METHODS = {
    "leave_one_out": "kvlens.analyses.attribution.methods:LeaveOneOut",
    "interactions": "kvlens.analyses.attribution.methods:InteractionFit",
    "contextcite": "kvlens.analyses.attribution.methods:ContextCite",
}
"""name -> MODULE:CLASS of a method of `prompt_attribution`, also on the command line."""


def locate(name: str) -> tuple[str, str]:
    """Module and attribute of an analysis, given the name of one of kvlens, or MODULE:FUNCTION for any other.

    Raises:
        KVLensError: no such analysis (the nearest name is proposed).
    """
    if name not in ANALYSES and ":" not in name:
        raise KVLensError(
            f"no analysis is called {name!r}; there are {', '.join(ANALYSES)}, and your own as "
            f"my_package.my_module:my_function{nearest(name, ANALYSES)}"
        )
    module, _, attribute = (f"{ANALYSES[name]}:{name}" if name in ANALYSES else name).partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise KVLensError(f"analysis: expected MODULE:FUNCTION, such as my_package.my_module:my_function, got {name!r}")
    return module, attribute


# --- front ends ---

HOOKED, SOFTMAX, RECURRENT = "HookedKVTransformer", "KVTransformerBridge, softmax layers alone", "KVTransformerBridge, hybrid"
"""The kinds of model that the table tells apart."""


class Reasons(NamedTuple):
    """Why an analysis does not run on a kind of model; None where it does."""

    hooked: str | None = None
    softmax: str | None = None
    recurrent: str | None = None


def _not_on_the_bridge(reason: str) -> Reasons:
    return Reasons(softmax=reason, recurrent=reason)


_NO_STATE = "no layer of the model is recurrent with a state: it keeps every key of a prompt instead"
_WEIGHTS = (
    "it multiplies the matrices W_Q, W_K, W_V and W_O of heads, and a recurrent layer's queries, keys and values are not "
    "linear in the residual stream: they pass a short convolution, an activation, or both"
)
_PROJECTIONS = (
    "it changes the queries, keys and values of one head and holds the outputs of others, and a recurrent layer has no hook "
    "points for the former, and behind its heads a gate that reads the residual stream"
)
_HOOKS = "it patches, or looks at, hook points that only HookedKVTransformer has in every layer"
_DUAL = "the dual model is derived for the parameters and feature maps of a HookedKVTransformer"
_PROBES = "prompts with keys of their own are compared by a text's queries, as HookedKVTransformer's hook points show them"

NOT_ON: Mapping[str, Reasons] = {
    "activation_patching": _not_on_the_bridge(_HOOKS),
    "attribution_by_edge": Reasons(recurrent=_PROJECTIONS),
    "circuits": _not_on_the_bridge(_PROBES),
    "composition": Reasons(recurrent=_WEIGHTS),
    "dual_bound": _not_on_the_bridge(_DUAL),
    "dual_demonstrations": _not_on_the_bridge(_DUAL),
    "dual_losses": _not_on_the_bridge(_DUAL),
    "state_erasure": Reasons(hooked=_NO_STATE, softmax=_NO_STATE),
    "state_memory": Reasons(hooked=_NO_STATE, softmax=_NO_STATE),
}
"""Name of an analysis -> the kinds of model that it does not run on."""


def kind_of(model: Any) -> str:
    """Return which of the kinds a model is."""
    from kvlens import HookedKVTransformer  # imports torch
    from kvlens.model import heads_per_layer, recurrent_layers

    if isinstance(model, HookedKVTransformer):
        return HOOKED
    counts = heads_per_layer(model)
    return RECURRENT if any(counts[layer] for layer in recurrent_layers(model)) else SOFTMAX


def reason_against(name: str, model: Any) -> str | None:
    """Why an analysis does not run on a model; None where it does."""
    reasons = NOT_ON.get(name)
    if reasons is None:
        return None
    return dict(zip((HOOKED, SOFTMAX, RECURRENT), reasons, strict=True))[kind_of(model)]


def check_front_end(name: str, model: Any) -> None:
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
    def checked_first(*args: Any, **kwargs: Any) -> Any:
        check_front_end(function.__name__, kwargs.get("model", args[0] if args else None))
        return function(*args, **kwargs)

    return checked_first  # type: ignore[return-value]


HELPERS = ("analysis", "next_token_texts", "reading_shares", "reading_stability", "token_texts", "tokens_field")
"""Public functions of the package that are no analyses."""


def analyses() -> list[str]:
    """The names of the functions that the table is about."""
    return sorted(name for name in HOMES if name.islower() and name not in HELPERS)


def table_of(names: list[str]) -> str:
    """The table of analyses and front ends, as Markdown; reasons are numbered below it."""
    rows, reasons = [], list[str]()
    for name in sorted(names):
        cells = []
        for reason in NOT_ON.get(name, Reasons()):
            if reason is not None and reason not in reasons:
                reasons.append(reason)
            cells.append("yes" if reason is None else f"no ({reasons.index(reason) + 1})")
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    head = f"| analysis | {HOOKED} | {SOFTMAX} | {RECURRENT} |\n|---|---|---|---|"
    notes = "\n".join(f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, 1))
    return f"{head}\n" + "\n".join(rows) + f"\n\n{notes}"


__doc__ = f"{__doc__}\n{table_of(analyses())}\n"

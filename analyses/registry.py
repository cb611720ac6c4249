"""The modules of kvlens' own analyses and of every public name, listed so that finding them imports nothing."""

from kvlens import KVLensError
from kvlens.errors import nearest

ANALYSES = {
    "activation_patching": "kvlens.analyses.bias.patching:ACTIVATION_PATCHING",
    "attribution_by_head": "kvlens.analyses.attribution.by_head:ATTRIBUTION_BY_HEAD",
    "attribution_by_position": "kvlens.analyses.attribution.by_position:ATTRIBUTION_BY_POSITION",
    "bias_by_head": "kvlens.analyses.bias.by_head:BIAS_BY_HEAD",
    "bias_decomposition": "kvlens.analyses.bias.decomposition:BIAS_DECOMPOSITION",
    "bias_effects": "kvlens.analyses.bias.effects:BIAS_EFFECTS",
    "bias_positions": "kvlens.analyses.bias.positions:BIAS_POSITIONS",
    "bias_singular_values": "kvlens.analyses.bias.spectrum:BIAS_SINGULAR_VALUES",
    "circuits": "kvlens.analyses.bias.pairs:CIRCUITS",
    "composition": "kvlens.analyses.heads.head_pairs:COMPOSITION",
    "conversion_error": "kvlens.analyses.prompt.error:CONVERSION_ERROR",
    "dual_bound": "kvlens.analyses.dual.generalization:DUAL_BOUND",
    "dual_demonstrations": "kvlens.analyses.dual.demonstrations:DUAL_DEMONSTRATIONS",
    "dual_losses": "kvlens.analyses.dual.losses:DUAL_LOSSES",
    "explanation": "kvlens.analyses.attribution.explain:EXPLANATION",
    "induction_heads": "kvlens.analyses.heads.induction:INDUCTION_HEADS",
    "induction_verdicts": "kvlens.analyses.heads.naming:INDUCTION_VERDICTS",
    "layer_contributions": "kvlens.analyses.stream.contributions:LAYER_CONTRIBUTIONS",
    "prompt_attribution": "kvlens.analyses.attribution.prompt:PROMPT_ATTRIBUTION",
    "prompt_by_depth": "kvlens.analyses.prompt.depth:PROMPT_BY_DEPTH",
    "prompt_copies": "kvlens.analyses.heads.copies:PROMPT_COPIES",
    "prompt_effect": "kvlens.analyses.prompt.effect:PROMPT_EFFECT",
    "state_erasure": "kvlens.analyses.state.memory:STATE_ERASURE",
    "state_maps": "kvlens.analyses.state.memory:STATE_MAPS",
    "state_memory": "kvlens.analyses.state.memory:STATE_MEMORY",
}
"""name -> MODULE:OBJECT of the `Analysis` that ``kvlens analyse NAME`` runs over many prompts."""

HOMES = {
    "ANALYSES": "kvlens.analyses.registry",
    "ANSWER": "kvlens.analyses.inputs",
    "Analysis": "kvlens.analyses.declaration",
    "Columns": "kvlens.analyses.declaration",
    "Field": "kvlens.analyses.declaration",
    "Option": "kvlens.analyses.declaration",
    "HeadDetails": "kvlens.analyses.heads.details",
    "LinkedShares": "kvlens.analyses.prompt.linked",
    "PROMPT": "kvlens.analyses.inputs",
    "Record": "kvlens.analyses.declaration",
    "TEXT": "kvlens.analyses.inputs",
    "RIVAL": "kvlens.analyses.inputs",
    "activation_patching": "kvlens.analyses.bias.patching",
    "attention_rows": "kvlens.analyses.heads.rows",
    "attribution_by_head": "kvlens.analyses.attribution.by_head",
    "attribution_by_position": "kvlens.analyses.attribution.by_position",
    "baseline_ablation": "kvlens.analyses.bias.removal",
    "bias_ablation": "kvlens.analyses.bias.removal",
    "bias_addition": "kvlens.analyses.bias.pairs",
    "bias_by_head": "kvlens.analyses.bias.by_head",
    "bias_by_layer": "kvlens.analyses.bias.by_head",
    "bias_decomposition": "kvlens.analyses.bias.decomposition",
    "bias_effects": "kvlens.analyses.bias.effects",
    "bias_overwriting": "kvlens.analyses.bias.pairs",
    "bias_positions": "kvlens.analyses.bias.positions",
    "bias_similarity": "kvlens.analyses.bias.pairs",
    "bias_singular_values": "kvlens.analyses.bias.spectrum",
    "circuits": "kvlens.analyses.bias.pairs",
    "composition": "kvlens.analyses.heads.head_pairs",
    "conversion_error": "kvlens.analyses.prompt.error",
    "dual_bound": "kvlens.analyses.dual.generalization",
    "dual_demonstrations": "kvlens.analyses.dual.demonstrations",
    "dual_losses": "kvlens.analyses.dual.losses",
    "explanation": "kvlens.analyses.attribution.explain",
    "head_details": "kvlens.analyses.heads.details",
    "induction_heads": "kvlens.analyses.heads.induction",
    "induction_verdicts": "kvlens.analyses.heads.naming",
    "layer_contributions": "kvlens.analyses.stream.contributions",
    "linked_shares": "kvlens.analyses.prompt.linked",
    "next_token_texts": "kvlens.analyses.texts",
    "prompt_attribution": "kvlens.analyses.attribution.prompt",
    "prompt_by_depth": "kvlens.analyses.prompt.depth",
    "prompt_copies": "kvlens.analyses.heads.copies",
    "prompt_effect": "kvlens.analyses.prompt.effect",
    "state_erasure": "kvlens.analyses.state.memory",
    "state_maps": "kvlens.analyses.state.memory",
    "state_memory": "kvlens.analyses.state.memory",
    "token_texts": "kvlens.analyses.texts",
    "tokens_field": "kvlens.analyses.inputs",
}
"""Public name of ``kvlens.analyses`` -> the module that holds it."""


ATTRIBUTION_METHODS = {
    "leave_one_out": "kvlens.analyses.attribution.methods:LeaveOneOut",
    "linear": "kvlens.analyses.attribution.methods:LinearFit",
    "interactions": "kvlens.analyses.attribution.methods:InteractionFit",
    "contextcite": "kvlens.analyses.attribution.methods:ContextCite",
    "hierarchical": "kvlens.analyses.attribution.methods:Hierarchical",
}
"""name -> MODULE:CLASS of a method of `prompt_attribution`, also on the command line."""

UNITS = ("token", "word", "sentence", "paragraph")
"""What `prompt_attribution` divides a prompt into by name, finest first."""


def locate(name: str) -> tuple[str, str]:
    """Module and attribute of an analysis, given the name of one of kvlens, or MODULE:OBJECT for any other.

    Raises:
        KVLensError: no such analysis (the nearest name is proposed).
    """
    if name not in ANALYSES and ":" not in name:
        raise KVLensError(
            f"no analysis is called {name!r}; there are {', '.join(ANALYSES)}, and your own as "
            f"my_package.my_module:MY_ANALYSIS{nearest(name, ANALYSES)}"
        )
    module, _, attribute = ANALYSES.get(name, name).partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise KVLensError(f"analysis: expected MODULE:OBJECT, such as my_package.my_module:MY_ANALYSIS, got {name!r}")
    return module, attribute

"""The modules of kvlens' own analyses and of every public name, listed so that finding them imports nothing."""

from kvlens import KVLensError
from kvlens.errors import nearest

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
    "conversion_error": "kvlens.analyses.prompt.readings",
    "dual_bound": "kvlens.analyses.dual",
    "dual_demonstrations": "kvlens.analyses.dual",
    "dual_losses": "kvlens.analyses.dual",
    "explanation": "kvlens.explanation.steps",
    "induction_heads": "kvlens.analyses.heads.induction",
    "induction_verdicts": "kvlens.analyses.heads.naming",
    "layer_contributions": "kvlens.analyses.stream.logit_attribution",
    "prompt_attribution": "kvlens.analyses.attribution.prompt",
    "prompt_by_depth": "kvlens.analyses.prompt.readings",
    "prompt_copies": "kvlens.analyses.heads.copies",
    "prompt_effect": "kvlens.analyses.prompt.readings",
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
    "HeadDetails": "kvlens.analyses.heads.details",
    "LinkedShares": "kvlens.analyses.bias.positions",
    "PROMPT": "kvlens.analyses.declaration",
    "Record": "kvlens.analyses.declaration",
    "TEXT": "kvlens.analyses.declaration",
    "RIVAL": "kvlens.analyses.declaration",
    "analysis": "kvlens.analyses.declaration",
    "AttentionUnderBias": "kvlens.analyses.heads.under_bias",
    "attention_under_bias": "kvlens.analyses.heads.under_bias",
    "baseline_ablation": "kvlens.analyses.bias.effects",
    "bias_ablation": "kvlens.analyses.bias.effects",
    "bias_by_layer": "kvlens.analyses.bias.decomposition",
    "head_details": "kvlens.analyses.heads.details",
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

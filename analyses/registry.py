"""Where kvlens' own analyses are, and where every public name is; nothing is imported to know it."""

from kvlens import KVLensError
from kvlens.errors import nearest

ANALYSES = {
    "activation_patching": "analyses.bias.patching:ACTIVATION_PATCHING",
    "bias_by_head": "analyses.bias.by_head:BIAS_BY_HEAD",
    "bias_decomposition": "analyses.bias.decomposition:BIAS_DECOMPOSITION",
    "bias_effects": "analyses.bias.effects:BIAS_EFFECTS",
    "bias_positions": "analyses.bias.positions:BIAS_POSITIONS",
    "bias_singular_values": "analyses.bias.spectrum:BIAS_SINGULAR_VALUES",
    "circuits": "analyses.bias.pairs:CIRCUITS",
    "composition": "analyses.heads.head_pairs:COMPOSITION",
    "conversion_error": "analyses.prompt.error:CONVERSION_ERROR",
    "dual_bound": "analyses.dual.generalisation:DUAL_BOUND",
    "dual_demonstrations": "analyses.dual.demonstrations:DUAL_DEMONSTRATIONS",
    "dual_losses": "analyses.dual.losses:DUAL_LOSSES",
    "induction_heads": "analyses.heads.induction:INDUCTION_HEADS",
    "layer_contributions": "analyses.stream.contributions:LAYER_CONTRIBUTIONS",
    "prompt_by_depth": "analyses.prompt.depth:PROMPT_BY_DEPTH",
    "prompt_copies": "analyses.heads.copies:PROMPT_COPIES",
    "prompt_effect": "analyses.prompt.effect:PROMPT_EFFECT",
}
"""name -> MODULE:OBJECT of the `Analysis` that ``kvlens analyse NAME`` runs over many prompts."""

HOMES = {
    "ANALYSES": "analyses.registry",
    "ANSWER": "analyses.inputs",
    "Analysis": "analyses.declaration",
    "Columns": "analyses.declaration",
    "Field": "analyses.declaration",
    "Option": "analyses.declaration",
    "HeadDetails": "analyses.heads.details",
    "LinkedShares": "analyses.prompt.linked",
    "PROMPT": "analyses.inputs",
    "Record": "analyses.declaration",
    "TEXT": "analyses.inputs",
    "WRONG": "analyses.inputs",
    "activation_patching": "analyses.bias.patching",
    "attention_rows": "analyses.heads.rows",
    "bias_ablation": "analyses.bias.removal",
    "bias_addition": "analyses.bias.pairs",
    "bias_by_head": "analyses.bias.by_head",
    "bias_by_layer": "analyses.bias.by_head",
    "bias_decomposition": "analyses.bias.decomposition",
    "bias_effects": "analyses.bias.effects",
    "bias_overwriting": "analyses.bias.pairs",
    "bias_positions": "analyses.bias.positions",
    "bias_similarity": "analyses.bias.pairs",
    "bias_singular_values": "analyses.bias.spectrum",
    "circuits": "analyses.bias.pairs",
    "composition": "analyses.heads.head_pairs",
    "conversion_error": "analyses.prompt.error",
    "dual_bound": "analyses.dual.generalisation",
    "dual_demonstrations": "analyses.dual.demonstrations",
    "dual_losses": "analyses.dual.losses",
    "head_details": "analyses.heads.details",
    "induction_heads": "analyses.heads.induction",
    "layer_contributions": "analyses.stream.contributions",
    "linked_shares": "analyses.prompt.linked",
    "next_token_texts": "analyses.texts",
    "prompt_by_depth": "analyses.prompt.depth",
    "prompt_copies": "analyses.heads.copies",
    "prompt_effect": "analyses.prompt.effect",
    "token_texts": "analyses.texts",
    "tokens_field": "analyses.inputs",
}
"""Public name of ``analyses`` -> the module that holds it."""


def locate(name: str) -> tuple[str, str]:
    """Module and attribute of an analysis: of kvlens' own by its name, of any other as MODULE:OBJECT.

    Raises:
        KVLensError: neither (the nearest name is proposed).
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

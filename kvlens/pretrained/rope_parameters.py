"""Translation of transformers 5's ``rope_parameters`` into the fields of our configuration.

``rope_parameters`` is one dict, or one for each type of layer ("full_attention", "sliding_attention"). Our configuration has
one set of fields, with another base for layers of local attention; it scales by "linear" in global layers only, by "yarn" in
all layers or in global ones, by "llama3" in all. Anything else ("dynamic", "longrope", "proportional") raises an error.
"""

from collections.abc import Mapping

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvlens.errors import KVLensError

PARTIAL = ("GPTNeoXForCausalLM", "Phi3ForCausalLM", "PhiForCausalLM")
"""Architectures whose heads may be rotated in part; the others do not read ``partial_rotary_factor``."""
LAYER_TYPES = {"global": "full_attention", "local": "sliding_attention"}


def refused(architecture: str, name: str, value: object, why: str) -> KVLensError:
    """The error for a field of a configuration whose value cannot be honored."""
    return KVLensError(
        f"from_pretrained: this {architecture} has {name}={value!r} in its configuration, which HookedTransformer does not "
        f"compute: {why}"
    )


def rotary_fields(hf_config: PreTrainedConfig, architecture: str, attn_types: set[str], d_head: int) -> dict[str, object]:
    """The fields of our configuration that say ``hf_config.rope_parameters``; none where there are none.

    Args:
        hf_config: of a model with rotary positions.
        architecture: its name.
        attn_types: of the model's layers, in our words: "global", "local" or both.
        d_head: of a head.

    Raises:
        KVLensError: a kind of scaling, or of parameters per layer, that our model does not compute.
    """
    given = getattr(hf_config, "rope_parameters", None)
    if not given:  # GPT-J has none: rotary_dim is a field of its own, and the base is fixed
        return {}
    declared = getattr(hf_config, "layer_types", None) or ()
    nested = any(name in declared for name in given)  # as Transformers 5.18 and later say by nested_rope_parameter_keys
    of = {kind: given[LAYER_TYPES[kind]] if nested else given for kind in sorted(attn_types)}
    main = of.get("global") or of["local"]

    def refuse(why: str) -> Exception:
        return refused(architecture, "rope_parameters", given, why)

    if any(parameters is None for parameters in of.values()):
        raise refuse("some of its layers have no positions")
    rotary_dim = d_head
    if architecture in PARTIAL:
        rotary_dim = int(d_head * main.get("partial_rotary_factor", 1.0))
    if rotary_dim % 2:
        raise refuse(f"it rotates {rotary_dim} numbers of a head, and only pairs can be rotated")
    fields = {"rotary_dim": rotary_dim, "rotary_base": main["rope_theta"]}
    if "global" in of and "local" in of and of["local"]["rope_theta"] != main["rope_theta"]:
        fields["rotary_base_local"] = of["local"]["rope_theta"]
    kinds = {kind: parameters["rope_type"] for kind, parameters in of.items()}
    scaling = main["rope_type"]
    if scaling == "default":
        allowed = set(kinds.values()) == {"default"}
    elif scaling == "linear":
        allowed = kinds == {"global": "linear"} or kinds == {"global": "linear", "local": "default"}
        fields["rotary_scaling_factor"] = main["factor"]
    elif scaling == "llama3":
        allowed = all(parameters == main for parameters in of.values())
        fields |= _llama3(main)
    elif scaling == "yarn":
        everywhere = all(parameters == main for parameters in of.values())
        allowed = everywhere or kinds == {"global": "yarn", "local": "default"}
        layer_type = LAYER_TYPES["global" if "global" in of else "local"] if nested else None
        fields |= {**_yarn(hf_config, main, layer_type), "yarn_global_attn_only": not everywhere}
    else:
        allowed = False
    if not allowed:
        raise refuse(f"its layers rotate by {', '.join(f'{scaling!r} ({kind})' for kind, scaling in kinds.items())}")
    return fields


def _llama3(parameters: Mapping[str, object]) -> dict[str, object]:
    return {
        "use_NTK_by_parts_rope": True,
        "NTK_by_parts_factor": parameters["factor"],
        "NTK_by_parts_low_freq_factor": parameters["low_freq_factor"],
        "NTK_by_parts_high_freq_factor": parameters["high_freq_factor"],
        "NTK_original_ctx_len": parameters["original_max_position_embeddings"],
    }


def _yarn(hf_config: PreTrainedConfig, parameters: Mapping[str, object], layer_type: str | None) -> dict[str, object]:
    _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](hf_config, layer_type=layer_type)  # from up to four parameters
    original = parameters["original_max_position_embeddings"]
    return {
        "use_yarn_rope": True,
        "yarn_factor": parameters["factor"] or hf_config.max_position_embeddings / original,
        "yarn_attention_factor": attention_factor,
        "yarn_beta_fast": parameters.get("beta_fast") or 32.0,
        "yarn_beta_slow": parameters.get("beta_slow") or 1.0,
        "yarn_original_max_position_embeddings": original,
        # transformers looks next to the parameters of a layer type, not inside them
        "yarn_truncate": hf_config.rope_parameters.get("truncate", True),
    }

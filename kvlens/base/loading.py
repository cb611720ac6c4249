"""Public models by name, from a folder, or from a loaded model of Transformers.

Code that comes with a model is never run, and pickled files are read as tensors only. What this class cannot compute is refused
with the name of the front end that does: :class:`kvlens.KVTransformerBridge` runs Transformers' own models.
"""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformer_lens import HookedRootModule
from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from kvlens.base.config import HookedTransformerConfig
from kvlens.base.families import FAMILIES, convert, translate
from kvlens.base.text import KEEP_THEIR_BOS
from kvlens.dtypes import dtype_of
from kvlens.errors import KVLensError, nearest

logger = logging.getLogger(__name__)

OWN_FORMAT = ("NeelNanda/", "ArthurConmy/", "Baidicoot/")
"""Whose models are stored under (nearly) our names, as ``.pth`` files with a ``config.json`` of their own."""
OTHER_CODE = ("bigcode/santacoder", "Qwen/Qwen-", "apple/OpenELM")
"""Models that exist only as code that comes with them."""
SHORTER = {"meta-llama/Llama-3.": 2048, "google/gemma-3": 8192, "google/medgemma": 8192, "roneneldan/TinyStories": 512}
"""Context lengths below the configuration's, by the beginnings of names: tables are smaller; TinyStories was trained on 512."""
STEPS = {
    "stanford-crfm/": [*range(0, 100, 10), *range(100, 2000, 50), *range(2000, 20000, 100), *range(20000, 400001, 1000)],
    "EleutherAI/pythia": [0, *(2**i for i in range(10)), *range(1000, 143001, 1000)],
}
"""The training steps whose checkpoints are public, by the beginnings of names (Pythia's first version: from 1000 on)."""
REVISIONS = {"stanford-crfm/": "checkpoint-{}", "EleutherAI/pythia": "step{}"}


def official_names() -> dict[str, str]:
    """Official names of public models by their names and aliases in lower case."""
    names = {alias.lower(): name for name, aliases in MODEL_ALIASES.items() for alias in aliases}
    return names | {name.lower(): name for name in OFFICIAL_MODEL_NAMES}


def official_name(name: str) -> str:
    """The official name that a name or an alias stands for; raises KVLensError for others, and suggests the nearest."""
    names = official_names()
    if name.lower() not in names:
        raise KVLensError(f"{name!r} is neither a folder nor a known name of a model{nearest(name.lower(), names)}")
    return names[name.lower()]


def beginning(name: str, table: Mapping[str, Any]) -> Any:
    """The value of ``table`` whose key ``name`` begins with; None if there is none."""
    return next((value for start, value in table.items() if name.startswith(start)), None)


class Loads(HookedRootModule):
    """A model that can be made from public weights."""

    cfg: Any

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | Path,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
        checkpoint_label: int | None = None,
        hf_model: Any = None,
        device: Any = None,
        n_devices: int = 1,
        tokenizer: Any = None,
        move_to_device: bool = True,
        fold_value_biases: bool | None = True,
        default_prepend_bos: bool | None = None,
        default_padding_side: str | None = None,
        dtype: torch.dtype | str = "float32",
        first_n_layers: int | None = None,
        n_ctx: int | None = None,
        **from_pretrained_kwargs: Any,
    ) -> Any:
        """A public model, its weights processed as in ``load_and_process_state_dict``.

        Args:
            model_name: an official name or an alias, or a folder in Transformers' format.
            fold_ln, center_writing_weights, center_unembed, refactor_factored_attn_matrices, fold_value_biases: see there; what
                an architecture does not allow is left out, with a line in the log.
            checkpoint_index, checkpoint_value, checkpoint_label: a checkpoint of training, by its number or its step (the last
                two are the same).
            hf_model: a loaded model of Transformers, used instead of the name's.
            device, n_devices, default_prepend_bos, n_ctx: of the configuration, if not the model's own.
            tokenizer, move_to_device, default_padding_side: as for the class.
            dtype: of the weights.
            first_n_layers: only so many.
            from_pretrained_kwargs: for Transformers' own ``from_pretrained``.

        Raises:
            KVLensError: an unknown name, an architecture that only other classes run, or a missing weight.
        """
        dtype = dtype_of(from_pretrained_kwargs.pop("torch_dtype", dtype), "from_pretrained: dtype")
        for refused in ("load_in_4bit", "load_in_8bit", "trust_remote_code"):
            if from_pretrained_kwargs.pop(refused, False):
                raise KVLensError(
                    f"from_pretrained: {refused}=True: load the model with transformers; kvlens.KVTransformerBridge runs it"
                )
        folder = Path(model_name).expanduser()
        is_folder = (folder / "config.json").is_file()
        name = str(folder) if is_folder else official_name(str(model_name))
        step = checkpoint_value if checkpoint_label is None else checkpoint_label
        step = step_of(name, checkpoint_index, step) if checkpoint_index is not None or step is not None else None
        if hf_model is None and not is_folder and name.startswith(OWN_FORMAT):
            fields, weights = own_format(name, step, dtype)
        else:
            hf_model = hf_model if hf_model is not None else load_hf_model(name, step, dtype, from_pretrained_kwargs)
            architecture = architecture_of(hf_model, name)
            text_config = hf_model.config.get_text_config()
            fields = {**translate(text_config, architecture), "tokenizer_name": name}
            fields["d_vocab"] = text_config.vocab_size
            fields["n_ctx"] = min(fields["n_ctx"], beginning(name, SHORTER) or fields["n_ctx"])
            weights = {}
        options = {"device": device, "n_devices": n_devices, "n_ctx": n_ctx, "default_prepend_bos": default_prepend_bos}
        fields |= {key: value for key, value in options.items() if value is not None}
        fields |= {"model_name": name.split("/")[-1], "dtype": dtype, "init_weights": False}
        if step is not None:
            fields |= {"from_checkpoint": True, "checkpoint_value": step, "checkpoint_label_type": "step"}
        if first_n_layers is not None:
            fields["n_layers"] = first_n_layers
        cfg = HookedTransformerConfig(**fields)
        steps = dict(fold_ln=fold_ln, center_writing_weights=center_writing_weights, center_unembed=center_unembed)
        steps = allowed_steps(cfg, {**steps, "fold_value_biases": bool(fold_value_biases)})
        if steps["fold_ln"]:
            cfg.normalization_type = {"LN": "LNPre", "RMS": "RMSPre"}.get(str(cfg.normalization_type), cfg.normalization_type)
        weights = weights or convert(hf_model.state_dict(), cfg)
        model = cls(cfg, tokenizer, move_to_device=False, default_padding_side=default_padding_side)
        weights = {n: w.to(dtype=dtype if w.is_floating_point() else w.dtype, device="cpu") for n, w in weights.items()}
        model.load_and_process_state_dict(weights, **steps, refactor_factored_attn_matrices=refactor_factored_attn_matrices)
        if move_to_device:
            model.move_model_modules_to_device()
        return model

    @classmethod
    def from_pretrained_no_processing(cls, model_name: str | Path, **kwargs: Any) -> Any:
        """:meth:`from_pretrained` with the weights as they are."""
        steps = ("fold_ln", "center_writing_weights", "center_unembed", "refactor_factored_attn_matrices", "fold_value_biases")
        return cls.from_pretrained(model_name, **{**dict.fromkeys(steps, False), **kwargs})

    @staticmethod
    def tokenizer_by_name(cfg: Any) -> Any:
        """The tokenizer called ``cfg.tokenizer_name``; one that prepends a BOS, where the architecture's models had one."""
        from transformers import AutoTokenizer

        name = cfg.tokenizer_name
        options: dict[str, Any] = {"trust_remote_code": False, "token": os.environ.get("HF_TOKEN") or None}
        options["use_fast"] = "phi" not in name.lower()  # Phi's fast tokenizer cannot prepend a BOS
        options["add_bos_token"] = cfg.original_architecture not in (*KEEP_THEIR_BOS, "Qwen3ForCausalLM", "PhiForCausalLM")
        return AutoTokenizer.from_pretrained(name, **options)


def allowed_steps(cfg: Any, steps: Mapping[str, bool]) -> dict[str, bool]:
    """Steps of weight processing without those that would change the model, which it logs."""
    shortformer, behind = cfg.positional_embedding_type == "shortformer", cfg.original_architecture in POST_NORM_ARCHITECTURES
    reasons = {
        "fold_ln": "norms do not stand before the layers"
        if behind
        else "positions are added after the norm"
        if shortformer
        else "",
        "center_writing_weights": "norms do not stand before the layers" if behind else "of shortformer" if shortformer else "",
        "center_unembed": "of shortformer"
        if shortformer
        else "a soft cap sees a constant"
        if cfg.output_logits_soft_cap > 0
        else "",
        "fold_value_biases": "patterns with attention sinks do not sum to 1" if cfg.use_attention_sinks else "",
    }
    for step, reason in reasons.items():
        if steps.get(step) and reason:
            logger.warning("from_pretrained: %s is left out for this model: %s", step, reason)
    return {step: wanted and not reasons.get(step) for step, wanted in steps.items()}


def architecture_of(hf_model: Any, name: str) -> str:
    """The family of a loaded model, by its class; Gemma 3 with images has the same text model as without."""
    for parent in type(hf_model).__mro__:
        known = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}.get(parent.__name__, parent.__name__)
        if known in FAMILIES:
            return known
    raise KVLensError(
        f"from_pretrained: {name} is a {type(hf_model).__name__}, which HookedTransformer does not compute; "
        "kvlens.KVTransformerBridge.from_pretrained runs it in transformers' own model"
    )


def load_hf_model(name: str, step: int | None, dtype: torch.dtype, kwargs: Mapping[str, Any]) -> Any:
    """Transformers' model of an official name or a folder, at a training step, without running its code."""
    from transformers import AutoModelForCausalLM

    if name.startswith(OTHER_CODE):
        raise KVLensError(
            f"from_pretrained: {name} is code of its own, which is not run. If you trust it, load it with transformers: "
            "kvlens.KVTransformerBridge runs it"
        )
    revision = {} if step is None else {"revision": str(beginning(name, REVISIONS)).format(step)}
    token = os.environ.get("HF_TOKEN") or None
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, token=token, **revision, **{**kwargs, "trust_remote_code": False, "output_loading_info": True}
    )
    model, report = loaded
    if report["missing_keys"]:
        raise KVLensError(f"from_pretrained: the weights of {name} lack {sorted(report['missing_keys'])[:5]}")
    return model


def step_of(name: str, index: int | None, step: int | None) -> int:
    """The training step of a checkpoint that is asked for by number or by step."""
    steps = beginning(name, STEPS) if not name.startswith("NeelNanda/") else [s for s, _ in checkpoint_files(name)]
    if steps is None:
        raise KVLensError(f"from_pretrained: no checkpoints of {name}'s training are public")
    if name.startswith("EleutherAI/pythia") and "v0" in name:
        steps = [known for known in steps if known >= 1000]
    if index is not None:
        return int(steps[index])
    if step not in steps:
        raise KVLensError(f"from_pretrained: {name} has no checkpoint {step}{nearest(step, map(str, steps))}")
    return int(step)  # type: ignore[arg-type]


def checkpoint_files(name: str) -> list[tuple[int, str]]:
    """Steps and files of the checkpoints of a model in its author's own format, in the order of the listing."""
    from huggingface_hub import list_repo_files

    found = ((re.match(r"checkpoints/.*_(\d+)\.pth", file), file) for file in list_repo_files(name))
    return [(int(match[1]), file) for match, file in found if match is not None]


def own_format(name: str, step: int | None, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and weights of a model in its author's own format (nearly TransformerLens' own), as tensors only."""
    import json

    from huggingface_hub import hf_hub_download, list_repo_files

    given = json.loads(Path(hf_hub_download(name, "config.json")).read_text())
    architecture = given.get("architecture", "neel-solu-old" if "_old" in name else "neel")
    kept = (
        "d_model",
        "n_layers",
        "d_mlp",
        "d_head",
        "n_heads",
        "n_ctx",
        "d_vocab",
        "tokenizer_name",
        "act_fn",
        "attn_only",
        "final_rms",
    )
    fields = {key: given[key] for key in kept if key in given}
    fields["normalization_type"] = given.get("normalization", given.get("normalization_type"))
    fields["positional_embedding_type"] = "shortformer" if given.get("shortformer_pos") else "standard"
    fields["original_architecture"] = architecture
    files = dict(checkpoint_files(name)) if step is not None else {}
    file = files[step] if step is not None else next(f for f in list_repo_files(name) if f.endswith("final.pth"))
    stored = torch.load(hf_hub_download(name, file), map_location="cpu", weights_only=True)
    weights = {key: tensor.to(dtype) for key, tensor in stored.items()}
    if architecture == "neel-solu-old":
        weights = _first_solu_models(weights, fields["n_layers"])
    elif architecture == "mingpt":
        named = {**weights, "pos_emb.weight": weights["pos_emb"].squeeze(), "lm_head.weight": weights["head.weight"]}
        weights = convert(named, HookedTransformerConfig(**fields))
    return fields, {key: tensor for key, tensor in weights.items() if "mask" not in key and "IGNORE" not in key}


def _first_solu_models(weights: Mapping[str, Tensor], n_layers: int) -> dict[str, Tensor]:
    """The first SoLU models call norms "norm" and have matrices the other way round: up to 6 layers all, up to 8 W_pos."""
    named = {re.sub(r"^ln\.", "ln_final.", key.replace("norm", "ln")): tensor for key, tensor in weights.items()}
    return {
        key: tensor.transpose(-2, -1) if "W_" in key and n_layers <= (8 if key == "pos_embed.W_pos" else 6) else tensor
        for key, tensor in named.items()
    }

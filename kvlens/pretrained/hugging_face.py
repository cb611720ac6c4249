"""Pretrained weights without a network: from a local Hugging Face folder, or from a model already in memory.

The configuration is translated and the weights are renamed by the table in :mod:`kvlens.pretrained.translation`. Shift
coefficients that a checkpoint holds in addition to the weights of a known architecture are read too, and Baichuan-M1, which
transformers does not know, has its own translation (:mod:`kvlens.pretrained.baichuan`).

No list of configuration fields is complete. So transformers' own model, while it is in memory, runs a few tokens through as
many layers as are kept, and the model that was made of it has to give the same predictions, before a KV shift is added to it.
How far they may differ is measured on the spot: the same tokens run once more with every output of every submodule off by one
rounding, up or down. Over twelve architectures with random weights, two with huge activations, GPT-2's size, 24 layers and
one trained model, in float32, bfloat16 and float16, processed or not, the true difference was 0.07 to 1.03 of what that
changes. In half precision a rounding may send a token to another expert: there the median position counts, elsewhere the
worst.

Two limits on float64 lie outside kvlens: TransformerLens' weight processing casts to float32, so only unprocessed weights
stay exact, and Hugging Face computes rotary angles and RMS norms in float32 whatever the model's dtype is.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvlens.arguments import check_device, path_of
from kvlens.base import HookedTransformer, HookedTransformerConfig
from kvlens.checks import ensure
from kvlens.dtypes import dtype_of
from kvlens.errors import KVLensError, brief, first_line
from kvlens.files import read_json
from kvlens.pretrained.baichuan import (
    baichuan_m1_config,
    conv_window_of,
    convert_baichuan_m1_weights,
    is_baichuan_m1,
    is_baichuan_m1_weight,
)
from kvlens.pretrained.checkpoint_files import check_checkpoint, check_positions, read_tensors
from kvlens.pretrained.names import (
    OWN_FORMAT,
    SHORTER,
    beginning,
    folder_of_name,
    is_local_folder,
    not_here,
    official_name,
    official_names,
    own_format,
    step_of,
)
from kvlens.pretrained.shift_import import import_shift_coefficients, is_shift_coefficient
from kvlens.pretrained.transformers_model import (
    check_readable,
    check_tied,
    nothing_asked,
    nothing_fetched,
    read_config,
    read_model,
    refuse_to_run_code,
    without_progress_bars,
)
from kvlens.pretrained.translation import (
    FAMILIES,
    SAME_TEXT_MODEL,
    SUPPORTED_ARCHITECTURES,
    alibi_slopes,
    architecture_of,
    convert_weights,
    translate_config,
    unsupported,
)
from kvlens.tokenizer import find_tokenizer

N_TOKENS = 32
MARGIN = 4
"""How many times the measured effect of rounding is allowed."""
LEAST = 1e-4
"""What is always allowed: weight processing in float32, and sums of thousands of terms, round more than one operation does."""


@dataclass(frozen=True)
class Trial:
    """What transformers' model predicts on a few tokens.

    Attributes:
        tokens: the ids, drawn evenly from the vocabulary.
        logits: each position's, less their mean; float32, on the CPU.
        allowed: the relative difference (Euclidean, at one position) that rounding explains.
        position: which position counts, from 0 (the least difference) to 1 (the worst).
    """

    tokens: Int[Tensor, "1 pos"]
    logits: Float[Tensor, "pos d_vocab"]
    allowed: float
    position: float


@torch.no_grad()
def run_trial(hf_model: PreTrainedModel, layers: str, cfg: HookedTransformerConfig) -> Trial:
    """Let ``hf_model`` run tokens, twice; it is left as it is.

    Args:
        hf_model: the model that will be converted.
        layers: the name of its list of layers.
        cfg: of the converted one.
    """
    generator = torch.Generator().manual_seed(0)
    embedding = hf_model.get_input_embeddings().weight
    tokens = torch.randint(0, embedding.shape[0], (1, min(N_TOKENS, cfg.n_ctx)), generator=generator)
    eps = max(torch.finfo(embedding.dtype).eps, torch.finfo(cfg.dtype).eps)

    def off_by_one_rounding(module: torch.nn.Module, args: object, output: object) -> Tensor | None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        signs = 2 * torch.randint(0, 2, output.shape, generator=generator) - 1
        return output * (1 + eps * signs).to(output)

    modes = [(module, module.training) for module in hf_model.modules()]
    hf_model.eval()
    hooks = []
    stack = contextlib.ExitStack()
    try:
        stack.enter_context(_first_layers(hf_model, layers, cfg.n_layers))
        logits = _centered(hf_model(tokens.to(embedding.device), use_cache=False).logits[0])
        leaves = [module for module in hf_model.modules() if next(module.children(), None) is None]
        hooks = [module.register_forward_hook(off_by_one_rounding) for module in leaves]
        rounded = _centered(hf_model(tokens.to(embedding.device), use_cache=False).logits[0])
    finally:
        stack.close()
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
    position = 0.5 if cfg.num_experts and cfg.dtype not in (torch.float32, torch.float64) else 1.0
    return Trial(tokens, logits, max(LEAST, MARGIN * _difference(rounded, logits, position)), position)


@contextlib.contextmanager
def _first_layers(hf_model: PreTrainedModel, layers: str, n: int) -> Iterator[None]:
    """Inside, the model has its first ``n`` layers alone."""
    config = hf_model.config.get_text_config()
    n_before = config.num_hidden_layers
    if n == n_before:
        yield
        return
    name, _, last = layers.rpartition(".")
    holder = hf_model.get_submodule(name)
    before = getattr(holder, last)
    setattr(holder, last, before[:n])
    config.num_hidden_layers = n
    try:
        yield
    finally:
        setattr(holder, last, before)
        config.num_hidden_layers = n_before


def check_trial(trial: Trial, logits: Float[Tensor, "1 pos d_vocab"]) -> None:
    """Raise KVLensError unless ``logits``, the converted model's on the same tokens, are those of transformers' model."""
    difference = _difference(_centered(logits[0]), trial.logits, trial.position)
    if not difference <= trial.allowed:  # NaN is no agreement
        raise KVLensError(
            f"from_pretrained: the converted model does not compute what transformers computes: on {trial.tokens.shape[1]} "
            f"tokens the logits differ by {difference:.2g} of their size, where rounding explains {trial.allowed:.1g}. "
            "Probably a field of the configuration has an effect that is not known here; verify=False takes the model as it is"
        )


def _centered(logits: Float[Tensor, "pos d_vocab"]) -> Float[Tensor, "pos d_vocab"]:
    """What is left when a constant per position, which no probability sees, is taken away (a centered unembedding adds one)."""
    logits = logits.detach().float().cpu()
    return logits - logits.mean(dim=-1, keepdim=True)


def _difference(one: Float[Tensor, "pos d_vocab"], other: Float[Tensor, "pos d_vocab"], position: float) -> float:
    tiny = torch.finfo(torch.float32).tiny  # all logits alike: a model of zeros
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1).clamp_min(tiny)).quantile(position))


@dataclass(frozen=True)
class PretrainedParts:
    """Everything needed to build a ``HookedTransformer``.

    Attributes:
        cfg: the configuration; ``tokenizer_name`` is None when there is no tokenizer.
        state_dict: weights under ``HookedTransformer``'s names, before any folding or centring, all floating tensors in
            the asked dtype, detached. They may share memory with the Hugging Face model: copy before writing into them.
        tokenizer: ready for ``HookedTransformer(cfg, tokenizer=...)`` without a network, or None.
        shift_coefficients: the KV shift, as :func:`kvlens.pretrained.import_shift_coefficients` returns it; empty for a model
            without one. A plain ``HookedTransformer`` cannot hold them and computes something else.
        own_fields: fields that the model needs and only :class:`kvlens.HookedKVTransformerConfig` has: ``alibi_slopes`` for
            BLOOM if the number of heads is not a power of two. Usually empty.
        trial: the predictions of transformers' own model on a few tokens, or None if it was not run.
    """

    cfg: HookedTransformerConfig
    state_dict: dict[str, Tensor]
    tokenizer: PreTrainedTokenizerBase | None
    shift_coefficients: dict[str, Tensor]
    own_fields: Mapping[str, object] = field(default_factory=dict)
    trial: Trial | None = None


def load_pretrained_parts(
    model_name: str | Path,
    *,
    hf_model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device | None = None,
    n_devices: int = 1,
    default_prepend_bos: bool | None = None,
    first_n_layers: int | None = None,
    n_ctx: int | None = None,
    verify: bool | None = False,
    local_files_only: bool = True,
    checkpoint_index: int | None = None,
    checkpoint_value: int | None = None,
    checkpoint_label: int | None = None,
    **from_pretrained_kwargs: object,
) -> PretrainedParts:
    """Make config, weights and tokenizer from a folder, a name whose files are here, or a loaded Hugging Face model.

    Args:
        model_name: a Hugging Face folder (``config.json``, weights, possibly a tokenizer), or an official name or alias; with
            ``hf_model`` any name.
        hf_model: a loaded causal language model; its weights and config are used, and it is not changed.
        tokenizer: used instead of the folder's. It is copied, and the copy prepends BOS, as models expect.
            Without one, an official name uses its tokenizer from the local Hugging Face cache if it fits.
        dtype: dtype of the config and of all floating weights; a torch dtype or its name.
        device: device in the config (None: a GPU if there is one); the weights are not moved.
        n_devices: number of devices in the config.
        default_prepend_bos: overrides the architecture's own default.
        first_n_layers: keep only this many layers.
        n_ctx: context length; it may exceed the model's own only if positions are not learned.
        verify: run transformers' model on a few tokens, for comparison; None does so where transformers knows the architecture.
        local_files_only: take the files of a name from Hugging Face's cache; False fetches what it lacks.
        checkpoint_index, checkpoint_value, checkpoint_label: a checkpoint of a name's training, by its number or its step (the
            last two are the same).
        from_pretrained_kwargs: for Hugging Face's ``from_pretrained``, with a folder or a name only. ``torch_dtype`` replaces
            ``dtype``, as in TransformerLens.

    Returns:
        The ``PretrainedParts``.

    Raises:
        KVLensError: no such folder or name, files missing, an architecture or a feature of it that TransformerLens
            cannot express, a quantized model, or sizes out of range.
    """
    dtype = dtype_of(from_pretrained_kwargs.pop("torch_dtype", dtype), "from_pretrained: dtype")
    _check_arguments(model_name, hf_model, from_pretrained_kwargs)
    _check_options(tokenizer, device, {"n_devices": n_devices, "first_n_layers": first_n_layers, "n_ctx": n_ctx})
    ensure("from_pretrained: verify", bool | None, verify)
    checkpoint = (checkpoint_index, checkpoint_value if checkpoint_label is None else checkpoint_label)
    folder = Path(os.path.realpath(path_of("from_pretrained", model_name))) if is_local_folder(model_name) else None
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "n_devices": n_devices,
        "default_prepend_bos": default_prepend_bos,
        "first_n_layers": first_n_layers,
        "n_ctx": n_ctx,
    }
    official = None if folder else official_names().get(str(model_name).lower())
    if hf_model is not None or folder is not None:
        if checkpoint != (None, None):
            raise KVLensError(
                "from_pretrained: checkpoint_index and checkpoint_value belong to models loaded by official name; for "
                f"{str(model_name)!r} pass the folder or the model of that training step instead"
            )
        step, source = None, folder if hf_model is None else hf_model
    else:
        official = official_name(str(model_name))
        with _hub(official, local_files_only):
            step = None if checkpoint == (None, None) else step_of(official, *checkpoint)
            if official.startswith(OWN_FORMAT):
                if verify:
                    raise KVLensError(f"from_pretrained: verify=True: transformers does not read {official}, leave verify out")
                source = _of_own_format(official, step, tokenizer, options)
            else:
                source = folder_of_name(official, step, from_pretrained_kwargs, local_files_only)
    parts = (
        source
        if isinstance(source, PretrainedParts)
        else _of_transformers(source, official, from_pretrained_kwargs, options, verify)
    )
    parts.cfg.model_name = folder.name if folder else (official or str(model_name)).split("/")[-1]
    if step is not None:
        parts.cfg.from_checkpoint, parts.cfg.checkpoint_value, parts.cfg.checkpoint_label_type = True, step, "step"
    files = source if isinstance(source, Path) else folder
    return replace(parts, tokenizer=find_tokenizer(tokenizer or parts.tokenizer, files, official, parts.cfg))


@contextlib.contextmanager
def _hub(official: str, local_files_only: bool) -> Iterator[None]:
    """Inside, the hub is asked only if it may be; what it lacks is a KVLensError."""
    try:
        with without_progress_bars(), nothing_asked(), nothing_fetched() if local_files_only else contextlib.nullcontext():
            yield
    except OSError as error:
        raise (
            not_here(official)
            if local_files_only
            else KVLensError(
                f"from_pretrained: {official} is not in the local cache, nor available from the hub: {first_line(error)}"
            )
        ) from error


def _of_own_format(
    official: str, step: int | None, tokenizer: PreTrainedTokenizerBase | None, options: dict[str, Any]
) -> PretrainedParts:
    fields, weights = own_format(official, step, options["dtype"])
    n_layers = fields["n_layers"]
    given = {name: value for name, value in options.items() if value is not None and name != "first_n_layers"}
    fields |= {"n_layers": options["first_n_layers"] or fields["n_layers"], **given}
    left_out = tuple(f"blocks.{layer}." for layer in range(fields["n_layers"], n_layers))
    weights = {name: weight for name, weight in weights.items() if not name.startswith(left_out)}
    cfg = HookedTransformerConfig(**fields, init_weights=False)
    if tokenizer is None and cfg.tokenizer_name is not None:
        tokenizer = HookedTransformer.tokenizer_by_name(cfg)
    return PretrainedParts(cfg, weights, tokenizer, {})


def _of_transformers(
    source: Path | PreTrainedModel,
    official: str | None,
    kwargs: dict[str, object],
    options: dict[str, object],
    verify: bool | None,
) -> PretrainedParts:
    """Everything but the tokenizer, from a folder or a loaded model."""
    config, n_stored = _own_config(source)
    trial = None
    if is_baichuan_m1(config):
        if verify:
            raise KVLensError(
                "from_pretrained: verify=True: transformers does not know Baichuan-M1, so nothing can be compared"
            )
        cfg, weights, checkpoint = _convert_baichuan_m1(source, config, kwargs, options)
    else:
        cfg, weights, checkpoint, trial = _convert_by_family(source, n_stored, official, kwargs, options, verify)
    shift = import_shift_coefficients(checkpoint)
    shift = {name: coef.detach() for name, coef in shift.items() if int(name.split(".")[1]) < cfg.n_layers}
    slopes = alibi_slopes(cfg.n_heads) if cfg.positional_embedding_type == "alibi" else None
    return PretrainedParts(cfg, weights, None, shift, {} if slopes is None else {"alibi_slopes": slopes}, trial)


def _own_config(source: Path | PreTrainedModel) -> tuple[dict[str, Any], int]:
    """The Hugging Face configuration of a folder (made sure to hold a checkpoint) or of a loaded model, and its size."""
    if isinstance(source, PreTrainedModel):
        check_positions("from_pretrained", source.config.to_dict())
        return source.config.to_dict(), source.num_parameters()
    n_stored = check_checkpoint("from_pretrained", source)
    return read_json("from_pretrained", source / "config.json"), n_stored


def _convert_by_family(
    source: Path | PreTrainedModel,
    n_stored: int,
    official: str | None,
    kwargs: dict[str, Any],
    options: dict[str, Any],
    verify: bool | None,
) -> tuple[HookedTransformerConfig, dict[str, Tensor], Mapping[str, Tensor], Trial | None]:
    """Configuration and weights by the table of families, the tensors that may hold a KV shift, and a trial."""
    if isinstance(source, PreTrainedModel):
        hf_model, checkpoint = source, source.state_dict()
    else:
        hf_model, checkpoint = _load_folder(source, n_stored, options["dtype"], kwargs)
    architecture = architecture_of(type(hf_model))
    check_readable("from_pretrained: ", hf_model)
    cfg = translate_config(hf_model.config.get_text_config(), architecture, beginning(official or "", SHORTER), **options)
    trial = None
    if verify is not False:
        trial = run_trial(hf_model, FAMILIES[architecture].layers, cfg)
    weights = convert_weights(hf_model, cfg)
    if hf_model is not source:
        for weight in hf_model.parameters():  # of nobody but these weights, which are freed as they are taken
            weight.data = weight.new_empty(0)
    return cfg, weights, checkpoint, trial


def _load_folder(
    folder: Path, n_stored: int, dtype: torch.dtype, kwargs: dict[str, Any]
) -> tuple[PreTrainedModel, Mapping[str, Tensor]]:
    """Transformers' model in ``folder``, and the shift coefficients that are there in addition: Transformers drops them."""
    try:
        config = read_config(folder)
    except Exception as error:
        raise KVLensError(f"from_pretrained: transformers cannot read {folder / 'config.json'}: {error}") from error
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if SAME_TEXT_MODEL.get(class_name, class_name) not in SUPPORTED_ARCHITECTURES:
        raise unsupported((config.architectures or [class_name or config.model_type])[0], str(folder))
    saved_as = f" It was saved as {config.architectures}; expected {class_name}."
    options = {"dtype": dtype, "saved_as": saved_as, "known": is_shift_coefficient, **kwargs}
    try:
        model, report = read_model("from_pretrained: ", folder, config, n_stored, **options)
    except KVLensError:
        raise
    except Exception as error:
        raise KVLensError(
            f"from_pretrained: transformers cannot load the model in {folder}: {type(error).__name__}: {error}"
        ) from error
    if model.config.tie_word_embeddings:
        check_tied(model.get_output_embeddings().weight, model.get_input_embeddings().weight, str(folder))
    for weight in model.parameters():
        if not weight.untyped_storage().resizable():
            # pages of a file are given back all together, when the last weight is gone; a weight's own memory goes with it
            weight.data = weight.data.clone()
    if not any(is_shift_coefficient(name) for name in report["unexpected_keys"]):
        return model, {}
    return model, read_tensors(folder, is_shift_coefficient)


def _convert_baichuan_m1(
    source: Path | PreTrainedModel, config: dict[str, Any], kwargs: dict[str, Any], options: dict[str, Any]
) -> tuple[HookedTransformerConfig, dict[str, Tensor], Mapping[str, Tensor]]:
    """Convert as :func:`_convert_by_family` does, by kvlens' own translation: transformers does not know the architecture."""
    _refuse_without_effect(kwargs, "a Baichuan-M1 checkpoint")
    cfg = baichuan_m1_config(config, **options)

    def wanted(name: str) -> bool:
        return is_baichuan_m1_weight(name, range(cfg.n_layers, config["num_hidden_layers"]))

    if isinstance(source, PreTrainedModel):
        check_readable("from_pretrained: ", source)
        checkpoint = {name: tensor for name, tensor in source.state_dict().items() if wanted(name)}
    else:
        checkpoint = read_tensors(source, wanted)
    head, embedding = checkpoint.get("lm_head.weight"), checkpoint.get("model.embed_tokens.weight")
    if config.get("tie_word_embeddings") and head is not None and embedding is not None:
        check_tied(head, embedding, "this Baichuan-M1 checkpoint")
    weights = convert_baichuan_m1_weights(
        checkpoint,
        cfg,
        tied=config.get("tie_word_embeddings", True),  # transformers' default where the file does not say
        conv_window=conv_window_of(config),
    )
    return cfg, weights, checkpoint


def _check_options(tokenizer: object, device: object, sizes: Mapping[str, object]) -> None:
    """Raise KVLensError for arguments of the wrong type; None is always allowed."""
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise KVLensError(f"from_pretrained: tokenizer must be a loaded tokenizer of transformers, got {brief(tokenizer)}")
    check_device("from_pretrained: device", device)
    for name, size in sizes.items():
        ensure(f"from_pretrained: {name}", int | None, size)


def _check_arguments(model_name: str | Path, hf_model: object, kwargs: dict[str, object]) -> None:
    """Raise KVLensError for arguments that this way of loading does not support, before any file is read."""
    refuse_to_run_code(kwargs)
    for key in ("load_in_4bit", "load_in_8bit", "quantization_config"):
        if kwargs.get(key):
            raise KVLensError(f"from_pretrained: {key} asks for quantized weights, which cannot be converted: remove it")
    if hf_model is None:
        return
    if not isinstance(hf_model, PreTrainedModel):
        raise KVLensError(
            f"from_pretrained: hf_model must be a transformers PreTrainedModel, got {type(hf_model).__name__}"
            " (for a wrapped model pass the model inside it, with adapters merged)"
        )
    _refuse_without_effect(kwargs, "a loaded hf_model")


def _refuse_without_effect(kwargs: dict[str, object], source: str) -> None:
    """Raise if there are arguments for Hugging Face's ``from_pretrained`` where it is not called."""
    unused = sorted(set(kwargs) - {"trust_remote_code", "token", "cache_dir", "local_files_only"})
    if unused:
        raise KVLensError(f"from_pretrained: {unused} would have no effect on {source}: remove them")

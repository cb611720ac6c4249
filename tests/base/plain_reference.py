"""What TransformerLens 3.9's own HookedTransformer gives in float64: the file that ``test_parity.py`` holds kvlens' class to.

Release 4 has no such class, so the file is made once, with 3.9 first on the path and kvlens behind it:

    pip install --no-deps --target FOLDER "transformer-lens==3.9.*" better-abc
    PYTHONPATH=FOLDER:. python tests/base/plain_reference.py

Of each tensor it holds the norm and four products with fixed vectors; of names and fields it holds the words. Weights, tokens
and the fixed vectors are made from the bits of PCG64, which are the same on every processor; a generator of torch draws only
the initial weights, whose rule is the subject there.
"""

import contextlib
import json
import math
import platform
import sys
import zlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformer_lens  # before anything is in float64, which the defaults of its functions would keep

from kvlens.base.weights import allowed_steps
from kvlens.pretrained.translation import architecture_of, translate

WIDE = {"dtype": torch.float64}
FROZEN = Path(__file__).with_name("transformer_lens_3_9.npz")
SIZES: dict[str, Any] = dict(
    n_layers=2, d_model=30, d_head=6, n_heads=5, n_ctx=41, d_vocab=17, d_mlp=23, act_fn="gelu", device="cpu", seed=3
)
ROTARY: dict[str, Any] = dict(positional_embedding_type="rotary")
GROUPED: dict[str, Any] = dict(n_heads=6, d_model=36, n_key_value_heads=2)
LOCAL: dict[str, Any] = dict(use_local_attn=True, window_size=3, attn_types=["local", "global"])
RMS: dict[str, Any] = dict(normalization_type="RMS", gated_mlp=True)
BY_PARTS: dict[str, Any] = dict(use_NTK_by_parts_rope=True, NTK_original_ctx_len=7, NTK_by_parts_factor=3.0)
YARN: dict[str, Any] = dict(use_yarn_rope=True, yarn_factor=4.0, yarn_original_max_position_embeddings=9)
QWEN_1: dict[str, Any] = dict(use_logn_attn=True, use_dynamic_ntk_rope=True, train_seq_length=5)
GPT_OSS: dict[str, Any] = dict(
    original_architecture="GptOssForCausalLM", use_attention_sinks=True, num_experts=3, experts_per_token=2
)

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "learned": {},
    "three_layers_of_one_head": dict(n_layers=3, n_heads=1),
    "gelu_new": dict(act_fn="gelu_new"),
    "silu": dict(act_fn="silu"),
    "relu2": dict(act_fn="relu2"),
    "solu_ln": dict(act_fn="solu_ln"),
    "solu_ln_gated": dict(act_fn="solu_ln", gated_mlp=True),
    "xielu": dict(act_fn="xielu"),
    "no_norm": dict(normalization_type=None),
    "ln_pre": dict(normalization_type="LNPre"),
    "rms": dict(normalization_type="RMS"),
    "rms_pre": dict(normalization_type="RMSPre"),
    "rms_gated": RMS,
    "final_rms": dict(final_rms=True),
    "norms_behind_too": dict(normalization_type="RMS", use_normalization_before_and_after=True),
    "attn_only": dict(attn_only=True),
    "parallel": dict(parallel_attn_mlp=True),
    "embedding_norm": dict(post_embedding_ln=True),
    "other_vocabulary_out": dict(d_vocab_out=23),
    "output_cap": dict(output_logits_soft_cap=2.0),
    "score_cap": dict(attn_scores_soft_cap=1.5),
    "no_scale": dict(use_attn_scale=False),
    "scale_by_layer": dict(scale_attn_by_inverse_layer_idx=True),
    "bidirectional": dict(attention_dir="bidirectional"),
    "window": LOCAL,
    "attn_result": dict(use_attn_result=True),
    "split_inputs": dict(use_split_qkv_input=True),
    "attn_in": dict(use_attn_in=True, use_hook_mlp_in=True, use_hook_tokens=True),
    "shortformer": dict(positional_embedding_type="shortformer"),
    "shortformer_split": dict(positional_embedding_type="shortformer", use_split_qkv_input=True),
    "alibi": dict(positional_embedding_type="alibi"),
    "rotary": ROTARY,
    "rotary_partly": dict(**ROTARY, rotary_dim=4),
    "rotary_adjacent": dict(**ROTARY, rotary_adjacent_pairs=True),
    "rotary_two_bases": dict(**ROTARY, **LOCAL, rotary_base_local=100, rotary_scaling_factor=2.0),
    "rotary_by_parts": dict(**ROTARY, **BY_PARTS),
    "yarn": dict(**ROTARY, **YARN, yarn_attention_factor=1.1),
    "yarn_global_only": dict(**ROTARY, **YARN, **LOCAL, yarn_global_attn_only=True, yarn_truncate=False),
    "qwen_1": dict(**ROTARY, **QWEN_1),
    "grouped": dict(**GROUPED, **ROTARY),
    "grouped_ungrouped": dict(**GROUPED, **ROTARY, ungroup_grouped_query_attention=True),
    "grouped_split": dict(**GROUPED, **ROTARY, use_split_qkv_input=True),
    "qk_norm": dict(**GROUPED, **ROTARY, **RMS, use_qk_norm=True),
    "olmo_2": dict(**ROTARY, **RMS, original_architecture="Olmo2ForCausalLM"),
    "olmo_e": dict(
        **GROUPED, **ROTARY, **RMS, original_architecture="OlmoeForCausalLM", clip_qkv=0.8, num_experts=3, experts_per_token=2
    ),
    "experts": dict(**RMS, **ROTARY, num_experts=3, experts_per_token=2, norm_topk_prob=True),
    "like_gpt_oss": dict(**RMS, **ROTARY, **GPT_OSS, act_fn="silu"),
    "sinks": dict(**ROTARY, use_attention_sinks=True),
    "xavier_uniform": dict(init_mode="xavier_uniform"),
    "xavier_normal": dict(init_mode="xavier_normal", initializer_range=0.7),
    "kaiming_uniform": dict(init_mode="kaiming_uniform"),
    "kaiming_normal": dict(init_mode="kaiming_normal"),
    "mu_p": dict(init_mode="muP"),
}
"""Changes to ``SIZES``, one of each kind of part."""
NOT_PROCESSED = {
    *("final_rms", "solu_ln_gated", "shortformer", "shortformer_split", "olmo_2", "olmo_e", "like_gpt_oss", "sinks", "qwen_1")
}
"""TransformerLens' processing gives these another function, or fails."""
NOT_DECODED = {"bidirectional", "grouped_ungrouped"}
"""These need all tokens, or have no cache in TransformerLens."""
MISPLACED = ("standard", "shortformer")
"""Positions that TransformerLens' cached ``generate`` misplaces without a tokenizer."""


def numbers(name: str, *shape: int) -> torch.Tensor:
    """Numbers from -1 to 1 that depend on ``name`` alone: 53 bits of PCG64 each, exact on every processor."""
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-52 - 1).view(shape)


def tokens(batch: int, pos: int, d_vocab: int = SIZES["d_vocab"]) -> torch.Tensor:
    return ((numbers(f"tokens {batch} {pos}", batch, pos) + 1) / 2 * d_vocab).long()


@torch.no_grad()
def set_weights(model: Any) -> Any:
    """Give every parameter a value away from the initial one, which hides mistakes where it is 0 or 1; norms stay around 1."""
    for name, parameter in model.named_parameters():
        parameter.copy_(parameter.mean().round() + 0.35 * numbers(name, *parameter.shape))
    return model


def chosen(probabilities: torch.Tensor, num_samples: int, replacement: bool = False) -> torch.Tensor:
    """In place of ``torch.multinomial``, whose draws differ between processors: where the sum of probabilities passes 0.6."""
    return (probabilities.cumsum(-1) < 0.6).sum(-1, keepdim=True)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Everything in float64, also what a model rounds to float32 whatever its dtype is, such as weights of experts."""
    torch.set_default_dtype(torch.float64)
    names = mock.patch.multiple(torch, float32=torch.float64, float=torch.float64, multinomial=chosen)
    try:
        with names, mock.patch.object(torch.Tensor, "float", torch.Tensor.double), torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@in_float64()
def of_configuration(name: str, build: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Initial weights, logits, loss, gradients, activations, a hooked pass, padding, decoding, generation, processing."""
    changes = CONFIGURATIONS[name]
    model = build({**SIZES, **WIDE, **changes})
    seen = {f"initial {n}": tensor.detach().clone() for n, tensor in model.state_dict().items()}
    seen["names of hook points"] = list(model.hook_dict)
    seen["fields"] = {key: str(value) for key, value in model.cfg.to_dict().items()}
    set_weights(model)
    seen |= of_passes(model, name)
    if name in ("learned", "grouped", "rms_gated"):
        seen |= of_methods(model)
    kind = changes.get("positional_embedding_type", "standard")
    for how in (False, *([True] if kind not in MISPLACED and name not in NOT_DECODED else [])):
        forget_alibi(model)
        options = dict(max_new_tokens=4, stop_at_eos=False, verbose=False, use_past_kv_cache=how)
        if model.cfg.d_vocab_out == model.cfg.d_vocab:
            seen[f"greedy, cache {how}"] = model.generate(tokens(2, 5), do_sample=False, **options)
            seen[f"drawn, cache {how}"] = model.generate(tokens(2, 5), top_k=9, temperature=0.8, **options)
    if name not in NOT_PROCESSED and model.cfg.normalization_type is not None:
        seen |= {f"processed {key}": value for key, value in of_processing(model).items()}
    return seen


def forget_alibi(model: Any) -> None:
    """TransformerLens takes rows from the end of the table of the longest text so far: distances are off by a constant."""
    for block in model.blocks:
        block.attn.alibi = None


def of_passes(model: Any, name: str) -> dict[str, Any]:
    text = tokens(3, 11)
    seen: dict[str, Any] = {}
    logits, cache = model.run_with_cache(text)
    seen["logits"], seen["names of activations"] = logits.detach(), list(cache)
    seen |= {f"activation {key}": value for key, value in cache.items()}
    loss = model(text, return_type="loss")
    loss.backward()
    seen["loss"] = loss.detach()
    seen |= {f"gradient {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with torch.no_grad():
        seen["loss per token"] = model(text, return_type="both", loss_per_token=True)[1]
        seen["stopped"], seen["started"] = _started(model, text)
        ablate = [("blocks.0.attn.hook_z", lambda z, hook: z * 0.5), ("blocks.1.hook_resid_pre", lambda x, hook: x - 0.1)]
        seen["hooked"] = model.run_with_hooks(text, fwd_hooks=ablate)
        if name not in NOT_DECODED:
            mask = torch.tensor([[0] * 3 + [1] * 8, [1] * 11, [0] + [1] * 10])
            seen["padded"] = model(text, attention_mask=mask)[mask.bool()]
            forget_alibi(model)
            seen["decoded"] = torch.cat(decoded(model, text), dim=1)
    return seen


def _started(model: Any, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    stream = model(text, stop_at_layer=1)
    options = {}
    if model.cfg.positional_embedding_type == "shortformer":
        options["shortformer_pos_embed"] = model.input_to_embed(text)[2]
    return stream, model(stream, start_at_layer=1, **options)


def of_methods(model: Any) -> dict[str, Any]:
    """What is read off the weights and the activations of a dense model."""
    _, cache = model.run_with_cache(tokens(3, 11))
    seen = {
        f"method {name}": getattr(model, name) for name in ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "b_K", "b_O", "b_out")
    }
    seen |= {f"method composition {mode}": model.all_composition_scores(mode) for mode in "QKV"}
    seen["method accumulated_bias"] = model.accumulated_bias(1, mlp_input=True)
    seen["method without MLPs"] = model.accumulated_bias(2, include_mlp_biases=False)
    seen["method OV"], seen["method QK"] = model.OV[1, 2].AB, model.blocks[0].attn.QK[1].AB
    seen["names of heads"] = [*model.all_head_labels(), model.n_params_total, model.cfg.n_params]
    seen["method directions"] = model.tokens_to_residual_directions(torch.tensor([[3, 1], [2, 2]]))
    resid, labels = cache.accumulated_resid(apply_ln=True, incl_mid=True, return_labels=True)
    seen["method resid"], seen["names of resid"] = resid, labels
    seen["method decomposed"] = cache.decompose_resid(mode="attn")
    seen["method attributed"] = cache.logit_attrs(cache.decompose_resid(pos_slice=-1), torch.tensor([3, 1, 2]), pos_slice=-1)
    return seen


@in_float64()
def of_text(build: Callable[..., Any]) -> dict[str, Any]:
    """A model with a tokenizer: strings, padding, BOS, tokens as strings, generated text."""
    from tiny_hf import D_VOCAB, tiny_tokenizer

    seen: dict[str, Any] = {}
    for kind in ("standard", "rotary"):
        tokenizer = tiny_tokenizer()
        tokenizer.init_kwargs["add_bos_token"] = True  # TransformerLens loads it anew by name otherwise
        model = build({**SIZES, **WIDE, "n_ctx": 80, "d_vocab": D_VOCAB, "positional_embedding_type": kind}, tokenizer)
        set_weights(model)
        texts = ["the cat sat on the mat", "the dog", "a shift of keys and values, by one, and another of queries"]
        for side in ("left", "right"):
            for bos in (None, True, False):
                case = f"{kind}, {side}, {bos}"
                seen[f"{case}: tokens"] = model.to_tokens(texts, prepend_bos=bos, padding_side=side)
                with torch.no_grad():
                    seen[f"{case}: logits"] = model(texts, prepend_bos=bos, padding_side=side)
                    seen[f"{case}: loss"] = model(texts, return_type="loss", prepend_bos=bos, padding_side=side)
                options = dict(max_new_tokens=3, verbose=False, prepend_bos=bos, padding_side=side, freq_penalty=0.5)
                seen[f"{case}: names of texts"] = [model.generate(texts, **options), model.generate(texts[1], **options)]
        if kind == "rotary":
            stream = model.generate_stream(texts[1], max_new_tokens=5, max_tokens_per_yield=3, do_sample=False, verbose=False)
            seen |= {f"stream {i}": piece for i, piece in enumerate(stream)}
        seen[f"{kind}: truncated"] = model.to_tokens(texts[0] * 9)
        strings = [model.to_str_tokens(texts[0]), model.to_str_tokens(texts), model.to_str_tokens(seen[f"{case}: tokens"][1])]
        strings += [model.to_string(seen[f"{case}: tokens"]), model.to_string([5, 6, 7]), model.to_single_str_token(9)]
        strings += [model.get_token_position(9, torch.tensor([3, 9, 9]), mode="last"), model.tokenizer.padding_side]
        seen[f"{kind}: names of strings"] = strings
    return seen


def decoded(model: Any, text: torch.Tensor) -> list[torch.Tensor]:
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", text.shape[0])
    pieces = [text[:, :6], text[:, 6:10], text[:, 10:]]
    return [model(piece, past_kv_cache=cache, attention_mask=torch.ones_like(piece)) for piece in pieces]


def of_processing(model: Any) -> dict[str, Any]:
    experts = bool(model.cfg.num_experts)
    model.process_weights_(center_writing_weights=not experts)
    seen = {f"weight {n}": tensor for n, tensor in model.state_dict().items()}
    with torch.no_grad():
        seen["logits"] = model(tokens(3, 11))
    return seen


def of_family(kind: str, build: Callable[..., Any]) -> dict[str, Any]:
    """A tiny Hugging Face model as converted: weights and logits, processed and not."""
    from tiny_hf import tiny_hf_model

    hf_model = set_weights(tiny_hf_model(kind).double())
    text = tokens(2, 9, hf_model.config.get_text_config().vocab_size)
    seen: dict[str, Any] = {}
    for processed in (False, True):
        with in_float64(), torch.no_grad():
            model = build(hf_model, processed)
            logits, cache = model.run_with_cache(text)
        seen |= {f"{processed} weight {n}": tensor for n, tensor in model.state_dict().items()}
        seen |= {f"{processed} logits": logits, f"{processed} names": list(cache)}
    return seen


def build_plain(fields: dict[str, Any], tokenizer: Any = None) -> Any:
    """TransformerLens' own model."""
    return transformer_lens.HookedTransformer(transformer_lens.HookedTransformerConfig(**fields), tokenizer)


def build_plain_family(hf_model: Any, processed: bool) -> Any:
    """TransformerLens' own model, with the configuration that kvlens makes and the weights as TransformerLens converts them."""
    import tempfile

    from transformer_lens.loading_from_pretrained import get_pretrained_state_dict

    fields = translate(hf_model.config.get_text_config(), architecture_of(type(hf_model)))
    cfg = transformer_lens.HookedTransformerConfig(**fields | WIDE, device="cpu", init_weights=False)
    steps = dict.fromkeys(("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"), processed)
    steps = allowed_steps(cfg, steps)
    if steps["fold_ln"]:
        cfg.normalization_type += "Pre"
    with tempfile.TemporaryDirectory(prefix="kvlens-") as folder:
        weights = get_pretrained_state_dict(folder, cfg, hf_model, dtype=cfg.dtype)
    if "pos_embed.W_pos" in weights:
        weights["pos_embed.W_pos"] = weights["pos_embed.W_pos"][: cfg.n_ctx]
    model = transformer_lens.HookedTransformer(cfg, move_to_device=False)
    model.load_state_dict(
        {n: torch.zeros_like(w) for n, w in model.state_dict().items() if n == "pos_embed.W_pos"}, strict=False
    )
    model.load_and_process_state_dict(weights, **steps)
    return model


def of_defaults(build: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The fields that a configuration of few gets, and the dtype of everything in a pass of a model in bfloat16."""
    few = build(dict(d_model=12, d_head=3, n_layers=2, n_ctx=5, d_vocab=7, device="cpu"))
    model = set_weights(build({**SIZES, **GROUPED, **ROTARY, **RMS, "dtype": torch.bfloat16}))
    logits, cache = model.run_with_cache(tokens(3, 11))
    dtypes = {name: str(value.dtype) for name, value in {"logits": logits, **dict(cache.items())}.items()}
    return {"dtypes": dtypes, "fields": {key: str(value) for key, value in few.cfg.to_dict().items()}}


def summary(name: str, seen: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
    """By key the shape of each tensor, or words; and a row per tensor: norm, four products, and one of where it is masked."""
    shapes = {key: list(value.shape) if isinstance(value, torch.Tensor) else value for key, value in seen.items()}
    rows = []
    for key, value in seen.items():
        if isinstance(value, torch.Tensor):
            wide = value.detach().double().flatten()
            masked = ~(wide.abs() < 1e30)  # infinite, or the lowest number of some dtype
            fixed, finite = numbers(f"{name}: {key}", 5, wide.numel()), wide.masked_fill(masked, 0.0)
            rows.append([float(finite.norm()), *(fixed[:4] @ finite).tolist(), float(fixed[4] @ masked.double())])
    return json.loads(json.dumps(shapes)), np.array(rows).reshape(-1, 6)


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """What the file holds, by name: a function that measures it on TransformerLens' own class."""
    from tiny_hf import KINDS

    configurations = {name: lambda name=name: of_configuration(name, build_plain) for name in CONFIGURATIONS}
    families = {kind: lambda kind=kind: of_family(kind, build_plain_family) for kind in KINDS}
    others = {"text": lambda: of_text(build_plain), "defaults": lambda: of_defaults(build_plain)}
    return configurations | families | others


def main() -> None:
    """Write the file."""
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "model")]
    torch.set_num_threads(1)
    measured = {name: summary(name, measure()) for name, measure in cases().items()}
    releases = {name: version(name) for name in ("transformer_lens", "torch", "transformers", "numpy")}
    index = {
        "made with": {**releases, "python": platform.python_version()},
        "cases": {name: index for name, (index, _) in measured.items()},
    }
    rows = np.concatenate([rows for _, rows in measured.values()])
    np.savez_compressed(FROZEN, index=np.frombuffer(json.dumps(index).encode(), dtype=np.uint8), rows=rows)


if __name__ == "__main__":
    main()

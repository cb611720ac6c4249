"""Random combinations of settings: properties of each hold for all, or the combination is refused with a message."""

import itertools
import random
from typing import Any

import pytest
import torch
from precision import LAW
from small_models import relative_error, small_model, tokens

from kvlens import HookedKVTransformer, KVLensError, KVShiftConfig, convert_prompt
from kvlens.model import AttentionVariantConfig, Augmented, Regularised

POS = 12
SLICES = {3: [3], (2, 7): slice(2, 7), (-3, None): slice(-3, None)}
"""As given to ``run_with_cache``, and as an index; a list of positions is given as itself."""
VARIANT = AttentionVariantConfig(regularised=Regularised(0.2), augmented=Augmented(keys=True, values=True))
WITHOUT_POSITIONS = ("hook_b_kv", "hook_b_d", "hook_last_", "shift_coef", ".experts.")


def settings(seed: int) -> dict[str, Any]:
    """One draw; 36 of them run through all positions and numbers of keys, with the inputs split and not."""
    draw = random.Random(seed)
    positions = ("standard", "rotary", "alibi", "shortformer", "sinusoidal", "none")
    position, heads, split = list(itertools.product(positions, (None, 3, 1), (False, True)))[seed % 36]
    drawn: dict[str, Any] = dict(
        positional_embedding_type=position, n_heads=6, n_key_value_heads=heads, use_split_qkv_input=split, dtype=torch.float64
    )
    options: list[tuple[float, dict[str, Any]]] = [
        (0.5, dict(use_attention_sinks=True)),
        (0.4, dict(use_local_attn=True, window_size=draw.choice([3, 5]), attn_types=["local", "global"])),
        (0.3, dict(attn_scores_soft_cap=0.7)),
        (0.4, dict(use_qk_norm=True)),
        (0.3, dict(kv_shift=KVShiftConfig(window=draw.choice([1, 2, 3]), queries=draw.random() < 0.5))),
        (0.3, dict(use_attn_result=True)),
        (0.2, dict(parallel_attn_mlp=True)),
        (0.2, dict(use_logn_attn=True, train_seq_length=6)),
    ]
    for share, option in options:
        if draw.random() < share:
            drawn |= option
    return {**drawn, "normalization_type": draw.choice(["LN", "LNPre", "RMS", "RMSPre"]), "seed": seed}


def drawn_model(seed: int) -> HookedKVTransformer:
    model = small_model(**settings(seed)).eval()
    if model.cfg.use_attention_sinks:
        for block in model.blocks:
            torch.nn.init.normal_(block.attn.sinks, generator=torch.Generator().manual_seed(seed))
    return model


def check_slices(model: HookedKVTransformer, text: torch.Tensor) -> None:
    """A cache with ``pos_slice`` is that slice of a full one."""
    _, full = model.run_with_cache(text)
    for given, index in (*SLICES.items(), ([1, 4, 5], [1, 4, 5])):
        _, cut = model.run_with_cache(text, pos_slice=given)
        assert set(cut) == set(full)
        for name, whole in full.items():
            if any(part in name for part in WITHOUT_POSITIONS):
                expected = whole
            elif "attn_scores" in name or "pattern" in name:
                expected = whole[:, :, index]
            elif whole.shape[0] != len(text):  # rows of all places
                expected = whole.unflatten(0, (*text.shape, -1))[:, index].reshape(-1, whole.shape[-1])
            else:
                expected = whole[:, index]
            assert torch.equal(cut[name], expected), (name, given)


@pytest.mark.usefixtures("in_float64")  # ALiBi's table names float32
@pytest.mark.parametrize("seed", range(36))
@torch.no_grad()
def test_decoding_caching_and_converting(seed):
    model, text = drawn_model(seed), tokens(2, POS, seed=seed)
    cfg = model.cfg
    if cfg.positional_embedding_type == "shortformer" and cfg.use_split_qkv_input and cfg.n_key_value_heads is not None:
        with pytest.raises(KVLensError, match="use_split_qkv_input with positional_embedding_type='shortformer'.*grouped keys"):
            model(text)
        return
    whole = model(text)
    model(tokens(1, POS + 7))  # tables grow, and what comes after must not see it
    assert relative_error(model(text), whole) < LAW
    cache, pieces, draw = model.empty_cache(2), [], random.Random(seed)
    while sum(piece.shape[1] for piece in pieces) < POS:
        first = sum(piece.shape[1] for piece in pieces)
        pieces.append(model(text[:, first : first + draw.choice([1, 1, 2, 4])], past_kv_cache=cache))
    assert relative_error(torch.cat(pieces, dim=1), whole) < LAW
    check_slices(model, text)
    if cfg.use_logn_attn:
        return  # it scales by the position in the whole text, of which the prompt is no longer part
    with model.kv_bias(convert_prompt(model, text[:, :5])):
        assert relative_error(model(text[:, 5:]), whole[:, 5:]) < LAW


@pytest.mark.parametrize(
    "changes",
    [dict(use_split_qkv_input=True), dict(use_attn_in=True), dict(num_experts=4), dict(attention_variant=VARIANT)],
    ids=["split", "attn in", "experts", "variant"],
)
@pytest.mark.parametrize("shift", [None, KVShiftConfig(queries=True)])
def test_slices_of_every_kind_of_hook(changes, shift):
    """Linear attention with a bias, and with a router, whose weights have a row for each position of every text."""
    experts = dict(gated_mlp=True, experts_per_token=2) if "num_experts" in changes else {}
    normed = dict(use_qk_norm="attention_variant" not in changes)
    model = small_model(attention="linear", n_heads=6, use_attn_result=True, kv_shift=shift, **experts, **normed, **changes)
    with torch.no_grad(), model.kv_bias(convert_prompt(model, tokens(2, 5))):
        check_slices(model, tokens(2, POS, seed=1))
    with torch.no_grad(), model.kv_bias(convert_prompt(model, tokens(1, 5))):
        (_, cache), (_, bare) = (model.run_with_cache(tokens(1, POS), remove_batch_dim=each) for each in (False, True))
    for name in (name for name in cache if name.startswith("blocks.0.attn.hook_")):
        assert torch.equal(bare[name], cache[name] if "shift_coef" in name else cache[name][0]), name


def test_gradients_are_cut_like_what_they_are_of():
    model, text = small_model(use_split_qkv_input=True, use_qk_norm=True, dtype=torch.float64), tokens(2, POS)
    _, full = model.run_with_cache(text, return_type="loss", incl_bwd=True)
    model.zero_grad()
    _, cut = model.run_with_cache(text, return_type="loss", incl_bwd=True, pos_slice=(2, 7))
    assert set(cut) == set(full)
    for name in ("blocks.0.ln1.hook_scale_grad", "blocks.1.hook_q_input_grad", "blocks.0.attn.hook_z_grad"):
        assert relative_error(cut[name], full[name][:, 2:7]) < LAW
    rows = full["blocks.0.attn.q_norm.hook_scale_grad"]
    expected = rows.unflatten(0, (2, POS, -1))[:, 2:7].reshape(-1, rows.shape[-1])
    assert relative_error(cut["blocks.0.attn.q_norm.hook_scale_grad"], expected) < LAW

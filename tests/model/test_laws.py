"""What holds for every kind of attention: pieces, padding, forms and hooks change nothing; a converted prompt is the prompt.

The same for random combinations of settings, some of which are refused with a message.
"""

import itertools
import random
from typing import Any

import pytest
import torch
from precision import LAW
from small_models import (
    ATTENTION_VARIANTS,
    LINEAR,
    SOFTMAX,
    WITHOUT_BIAS,
    by_steps,
    model_of,
    relative_error,
    small_model,
    tokens,
)

from kvlens import HookedKVTransformer, KVLensError, KVShiftConfig, convert_prompt
from kvlens.model import AttentionVariantConfig, Augmented, Regularised

KINDS = [
    *(("linear", name) for name in (*LINEAR, *ATTENTION_VARIANTS)),
    *(("softmax", name) for name in (*SOFTMAX, *ATTENTION_VARIANTS)),
]
CONVERTIBLE = [(kind, name) for kind, name in KINDS if name not in WITHOUT_BIAS]


def each(kinds):
    return pytest.mark.parametrize(("kind", "name"), kinds, ids=[f"{kind}, {name}" for kind, name in kinds])


def in_each_form(model, linear=("auto",)):
    if model.cfg.attention == "softmax":
        for steps in (True, False):
            with by_steps(model, steps):
                yield
    else:
        for form in linear:
            model.cfg.linear_attention_form = form
            yield


def in_pieces(model, text):
    cache = model.empty_cache(len(text))
    pieces = ((0, 1), (1, 6), (6, 7), (7, 8), (8, 11))
    return torch.cat([model(text[:, a:b], past_kv_cache=cache) for a, b in pieces], dim=1)


@pytest.mark.one_in(5)
@each(KINDS)
def test_decoding_in_pieces_equals_one_pass(kind, name, shared):
    model, text = shared(kind, name), tokens(3, 11)
    whole = model(text)
    for _ in in_each_form(model):
        assert relative_error(in_pieces(model, text), whole) < LAW


@pytest.mark.one_in(5)
@each(KINDS)
def test_left_and_right_padding_change_nothing(kind, name, shared):
    model, text, junk = shared(kind, name), tokens(1, 7), tokens(1, 4, seed=9)
    whole, left = model(text), torch.tensor([[0] * 4 + [1] * 7])
    for _ in in_each_form(model):
        behind, before = torch.cat([junk, text], dim=1), torch.cat([text, junk], dim=1)
        assert relative_error(model(behind, attention_mask=left)[:, 4:], whole) < LAW
        assert relative_error(model(before, attention_mask=left.flip(1))[:, :7], whole) < LAW


@pytest.mark.one_in(5)
@each(KINDS)
def test_rows_behind_padding_continue_as_alone_and_a_frozen_cache_is_read_and_not_written(kind, name, shared):
    model, long, short, more = shared(kind, name), tokens(1, 7), tokens(1, 3, seed=1), tokens(2, 4, seed=2)
    cache, mask = model.empty_cache(2), torch.tensor([[1] * 7, [0] * 4 + [1] * 3])
    model(torch.cat([long, torch.cat([tokens(1, 4, seed=8), short], dim=1)]), attention_mask=mask, past_kv_cache=cache)
    model(more[:, :2], past_kv_cache=cache)
    cache.freeze()
    first, again = (model(more[:, 2:], past_kv_cache=cache) for _ in range(2))
    assert torch.equal(first, again)
    for row, text in enumerate((long, short)):
        alone = model(torch.cat([text, more[[row]]], dim=1))[:, -2:]
        assert relative_error(first[[row]], alone) < LAW


@pytest.mark.one_in(5)
@each(KINDS)
def test_forms_and_hooks_change_nothing_and_the_pattern_makes_z(kind, name, shared):
    model, text = shared(kind, name), tokens(2, 9)
    hooked, cache = model.run_with_cache(text)
    every = model.cfg.attention_variant is None or model.cfg.attention_variant.negative is None
    for _ in in_each_form(model, ("parallel", "chunked", "recurrent", "auto") if every else ("parallel", "auto")):
        assert relative_error(model(text), hooked) < LAW
    if name.startswith("ridge"):
        return  # it solves for z
    pattern = cache["pattern", 1]
    assert bool((pattern.triu(diagonal=1) == 0).all())
    if kind == "linear" and name in LINEAR and name != "trained bias":
        values = cache["v_shifted" if "blocks.1.attn.hook_v_shifted" in cache else "v", 1, "attn"]
        z = torch.einsum("bhqk,bkhd->bqhd", pattern, values.repeat_interleave(model.cfg.n_heads // values.shape[2], dim=2))
        assert relative_error(z, cache["z", 1]) < LAW


@pytest.mark.one_in(5)
@each(CONVERTIBLE)
def test_a_converted_prompt_replaces_the_prompt_in_one_pass_and_in_pieces(kind, name, shared):
    model, prompt, text = shared(kind, name), tokens(3, 7, seed=4), tokens(3, 11)
    whole = model(torch.cat([prompt, text], dim=1))[:, 7:]
    assert relative_error(model(text), whole) > 1e-3  # the prompt matters
    for _ in in_each_form(model):
        bias = convert_prompt(model, prompt)
        with model.kv_bias(bias):
            assert relative_error(model(text), whole) < LAW
            assert relative_error(in_pieces(model, text), whole) < LAW
    assert bias.n_prompt_tokens == 7 and bias.fit is None
    assert bias.position_offset == (0 if model.cfg.rotates_after else 7)
    n_kv_heads = model.cfg.n_key_value_heads or model.cfg.n_heads
    if kind == "softmax":
        assert bias.stacked("keys").shape == (2, 3, n_kv_heads, 7, 6)
    else:
        assert bias.stacked("b_kv").shape == (2, 3, model.cfg.n_heads, model.cfg.d_phi, 6)


@pytest.mark.one_in(5)
@each(CONVERTIBLE)
def test_gradients_through_a_conversion_are_those_of_the_whole_text(kind, name):
    model, prompt, text = model_of(kind, name).requires_grad_(True), tokens(2, 6, seed=1), tokens(2, 7)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradients(logits):
        found = torch.autograd.grad(logits.square().sum(), parameters, allow_unused=True)
        return torch.cat([g.flatten() for g in found if g is not None])

    whole = gradients(model(torch.cat([prompt, text], dim=1))[:, 6:])
    with model.kv_bias(convert_prompt(model, prompt, detach=False)):
        assert relative_error(gradients(model(text)), whole) < LAW


@pytest.mark.one_in(5)
@each(CONVERTIBLE)
def test_the_pattern_under_a_bias_has_the_texts_columns_of_the_whole_one_and_lacks_the_prompts(kind, name, shared):
    model, both, point = shared(kind, name), tokens(2, 16), "blocks.1.attn.hook_pattern"
    whole = model.run_with_cache(both, names_filter=point)[1][point]
    with model.kv_bias(convert_prompt(model, both[:, :7])):
        under = model.run_with_cache(both[:, 7:], names_filter=point)[1][point]
    assert relative_error(under, whole[:, :, 7:, 7:]) < LAW
    assert whole[:, :, 7:, :7].norm() > 0.1 * under.norm()  # it lacks something


@pytest.mark.one_in(5)
@each(CONVERTIBLE)
def test_prompts_one_after_another_equal_their_concatenation(kind, name, shared):
    model, text, bias = shared(kind, name), tokens(1, 9), None
    pieces = [tokens(1, n, seed=n)[0] for n in (4, 1, 2, 3)]
    for i, piece in enumerate(pieces):
        if i == 2:
            with model.kv_bias(bias):  # an attached bias is continued, too
                bias = convert_prompt(model, piece)
        else:
            bias = convert_prompt(model, piece, initial=bias)
    whole = convert_prompt(model, torch.cat(pieces))
    assert (bias.n_prompt_tokens, bias.position_offset) == (10, whole.position_offset)
    for field in ("b_kv", "b_d", "last_k", "last_v", "last_q"):
        a, b = bias.stacked(field), whole.stacked(field)
        assert a.shape == b.shape
        if b.numel() and b.norm() > 0:
            assert relative_error(a, b) < LAW, field
    expected = model(torch.cat([*pieces, text[0]])[None])[:, 10:]
    with model.kv_bias(bias):
        assert relative_error(model(text), expected) < LAW


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


@pytest.mark.one_in(3)
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

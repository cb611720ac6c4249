"""Layers that differ, most of them in heads: what holds for equal ones holds for them, and every analysis reads them right.

The reference is the same function with equal heads, some of them empty (:func:`with_empty_heads`). Baichuan-M1, the public
model of this kind, is held against the published architecture in ``tests/pretrained/test_baichuan.py``.
"""

import copy
from typing import Any

import pandas as pd
import pytest
import torch
from kvlens.analyses.bias.patching import POINTS
from precision import LAW, close
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVBias, KVLensError, analyses, convert_prompt
from kvlens.base import HookedTransformer, HookedTransformerConfig
from kvlens.base.attention import Attention
from kvlens.ops.rotary import naive_rotate

SIZES: dict[str, Any] = dict(n_layers=3, d_model=16, d_mlp=24, n_ctx=64, d_vocab=40, act_fn="gelu", seed=3, device="cpu")
HEADS: dict[str, Any] = dict(
    n_heads_by_layer=[4, 2, 4], n_key_value_heads_by_layer=[2, 1, 2], d_head_by_layer=[4, 8, 4], d_head=8
)


def unequal(**changes: Any) -> HookedKVTransformer:
    """A model with 4 / 2 heads of 4 dimensions in the first and last layer, and 2 / 1 of 8 in the middle."""
    fields = {**SIZES, **HEADS, "dtype": torch.float64, "initializer_range": 0.3, **changes}
    return HookedKVTransformer(HookedKVTransformerConfig(**fields))


@torch.no_grad()
def with_empty_heads(model: HookedKVTransformer) -> HookedKVTransformer:
    """The same function with 4 / 2 heads of 8 dimensions in every layer.

    Zeros in further columns of W_Q, W_K, W_V and W_O change no score q.k / scale, if q and k are multiplied by the root of the
    ratio of the scales; and a head whose W_V is 0 adds nothing.
    """
    fields = {
        f: getattr(model.cfg, f) for f in (*SIZES, "kv_shift", "dtype", "attention", "normalizer", "feature_map", "attn_scale")
    }
    same = HookedKVTransformer(HookedKVTransformerConfig(**fields, d_head=8, n_heads=4, n_key_value_heads=2))
    weights = model.state_dict()
    for name, into in same.state_dict().items():
        given = weights[name]
        if given.shape == into.shape or name.endswith(("mask", "IGNORE")):
            into.copy_(given)
            continue
        into.zero_()
        into[tuple(map(slice, given.shape))] = given
        if name.endswith(("_Q", "_K")):
            into.mul_((same.cfg.attn_scale / model.cfg.of_layer(int(name.split(".")[1])).attn_scale) ** 0.5)
    return same


PROMPT, SECOND, TEXT = torch.randint(1, 40, (3, 9), generator=torch.Generator().manual_seed(0))
TEXT = TEXT[:5]
BOTH = torch.cat([PROMPT, TEXT])[None]
KINDS = {
    "shift": {"kv_shift": {"queries": True, "window": 2}},
    "rotary": {"positional_embedding_type": "rotary"},
    "groups": {"kv_shift": True, "n_key_value_heads_by_layer": [4, 1, 4]},
    "alibi": {"positional_embedding_type": "alibi"},
    "windows": {"use_local_attn": True, "window_size": 4, "attn_types": ["global", "local", "global"]},
    "linear": {"attention": "linear", "kv_shift": True, "positional_embedding_type": "rotary"},
    "decay": {"attention": "linear", "decay": "retnet", "normalizer": "none"},
    "random": {"attention": "linear", "feature_map": "random"},
}
SAME = {
    "softmax": {"kv_shift": True},
    "linear": {"attention": "linear", "feature_map": "identity", "normalizer": "none", "kv_shift": True, "attn_scale": 3.0},
}


@pytest.fixture(scope="module", params=SAME)
def pair(request):
    model = unequal(**SAME[request.param])
    return model, with_empty_heads(model)


@pytest.mark.usefixtures("in_float64")
@torch.no_grad()
def test_the_base_computes_the_same_function_as_with_empty_heads():
    fields = {**SIZES, **HEADS, "dtype": torch.float64, "initializer_range": 0.3, "tokenizer_name": None}
    plain = HookedTransformer(HookedTransformerConfig(**fields))
    model = HookedKVTransformer.from_hooked_transformer(plain)
    close(with_empty_heads(model)(BOTH), plain(BOTH))
    close(model(BOTH), plain(BOTH))
    sizes = [tuple(block.attn.W_Q.shape) for block in plain.blocks]
    assert sizes == [(4, 16, 4), (2, 16, 8), (4, 16, 4)]
    weights = sum(p.numel() for name, p in plain.named_parameters() if ".W_Q" in name or ".mlp.W_" in name)
    assert plain.cfg.n_params == weights + 3 * sum(block.attn.W_Q.numel() for block in plain.blocks)
    assert plain.all_head_labels()[3:7] == ["L0H3", "L1H0", "L1H1", "L2H0"]
    cache = TransformerLensKeyValueCache.init_cache(plain.cfg, "cpu", 1)
    steps = [plain(BOTH[:, i : i + 1], past_kv_cache=cache) for i in range(BOTH.shape[1])]
    close(torch.cat(steps, dim=1), plain(BOTH))
    before = plain(BOTH).log_softmax(-1)
    plain.process_weights_()
    close(plain(BOTH).log_softmax(-1), before)


def test_each_layers_configuration_follows_the_models():
    model = unequal()
    model.set_use_attn_result(True)
    other = copy.deepcopy(model)
    other.cfg.use_attn_result = False
    _, cache = model.run_with_cache(BOTH)
    assert cache["blocks.1.attn.hook_result"].shape == (1, 14, 2, 16)
    assert cache.stack_head_results().shape == (10, 1, 14, 16)
    assert "blocks.1.attn.hook_result" not in other.run_with_cache(BOTH)[1]
    again = HookedKVTransformerConfig.from_json(model.cfg.to_json())
    assert again == model.cfg and again.of_layer(1).attn_scale == 8**0.5 and again.of_layer(0).attn_scale == 2
    equal = unequal(n_heads_by_layer=[2, 2, 2], n_key_value_heads_by_layer=[1, 1, 1], d_head_by_layer=[8, 8, 8]).cfg
    assert not equal.layers_differ and (equal.n_heads, equal.n_key_value_heads, equal.of_layer(1)) == (2, 1, equal)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_prompt_becomes_a_bias_exactly(kind, tmp_path):
    model = unequal(**KINDS[kind])
    expected = model(BOTH)[:, len(PROMPT) :]
    bias = convert_prompt(model, PROMPT)
    continued = convert_prompt(model, PROMPT[5:], initial=convert_prompt(model, PROMPT[:5]))
    parts = bias.select(layers=[0], heads=[(1, 1)]) + bias.select(layers=[2], heads=[(1, 0)])
    bias.save(tmp_path / "bias.safetensors")
    model.save(tmp_path / "model")
    loaded = KVBias.load(tmp_path / "bias.safetensors")
    assert loaded.fingerprint == bias.fingerprint
    other = HookedKVTransformer.load(tmp_path / "model")
    for reader, each in ((model, bias), (model, continued), (model, parts), (other, loaded)):
        with reader.kv_bias(each):
            close(reader(TEXT[None]), expected)
    batch = convert_prompt(model, torch.stack([SECOND, PROMPT]))
    with model.kv_bias(batch):
        close(model(TEXT.expand(2, -1))[1:], expected)
    with model.kv_bias(bias):
        said = model.generate(TEXT[None], max_new_tokens=3, do_sample=False, stop_at_eos=False, verbose=False)
    whole = BOTH
    for _ in range(3):
        whole = torch.cat([whole, model(whole)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(said[0, len(TEXT) :], whole[0, BOTH.shape[1] :])
    counted = sum(x.numel() for (_, name), x in bias.tensors().items() if name in ("b_kv", "b_d", "keys"))
    assert bias.num_parameters == counted < bias.stacked("b_kv").numel() * 3


BASES = (50, 7, 50)


@pytest.mark.parametrize("placement", [None, "before", "after"])
@torch.no_grad()
def test_every_layer_rotates_by_its_own_base_and_layers_of_equal_bases_share_a_table(placement, monkeypatch):
    """No field sets a base for each layer yet; the layer's own attribute does here, before any table is made."""
    monkeypatch.setattr(Attention, "rotary_base", property(lambda attn: BASES[attn.layer_id]))
    linear = {} if placement is None else dict(attention="linear", rotary_placement=placement)
    cfg = HookedKVTransformerConfig(
        **SIZES, d_head=4, dtype=torch.float64, initializer_range=0.3, positional_embedding_type="rotary", **linear
    )
    model = HookedKVTransformer(cfg)
    _, cache = model.run_with_cache(BOTH)
    for layer, base in enumerate(BASES):
        frequencies = base ** (-torch.arange(0, 4, 2, dtype=torch.float64) / 4)
        for x in "qk":
            given = cache[f"blocks.{layer}.attn.{f'hook_phi_{x}' if placement == 'after' else f'hook_{x}'}"][0]
            turned = torch.stack([naive_rotate(row, i, frequencies, False) for i, row in enumerate(given)])
            close(cache[f"blocks.{layer}.attn.hook_rot_{x}"][0], turned)
    expected = model(BOTH)[:, len(PROMPT) :]
    with model.kv_bias(convert_prompt(model, PROMPT)):
        close(model(TEXT[None]), expected)
    if placement is not None:
        first, other, last = (block.attn.rotary_table for block in model.blocks)
        assert first is last is not other


@torch.no_grad()
def test_a_hook_continues_from_a_changed_bias():
    model = unequal(kv_shift=True)
    first = convert_prompt(model, PROMPT)
    half = [(f"blocks.{layer}.attn.hook_b_{x}", lambda b, hook: 0.5 * b) for layer in range(3) for x in ("kv", "d")]
    hooked = convert_prompt(model, SECOND, initial=first, fwd_hooks=half)
    expected = convert_prompt(model, SECOND, initial=0.5 * first)
    with model.kv_bias(hooked):
        logits = model(TEXT[None])
    with model.kv_bias(expected):
        close(logits, model(TEXT[None]))


CALLS = {
    "activation_patching": lambda f, m: f(m, PROMPT, SECOND, TEXT),
    "attribution_by_head": lambda f, m: f(m, PROMPT, TEXT, by=[(0, 4)]),
    "attribution_by_position": lambda f, m: f(m, PROMPT, TEXT, by=[(0, 4)]),
    "bias_ablation": lambda f, m: f(m, PROMPT, TEXT, [[(1, 0)], [(2, 3)]]),
    "bias_by_head": lambda f, m: f(m, PROMPT, TEXT),
    "bias_decomposition": lambda f, m: f(m, PROMPT, TEXT),
    "bias_effects": lambda f, m: f(m, PROMPT, TEXT),
    "bias_positions": lambda f, m: f(m, PROMPT, TEXT),
    "bias_interactions": lambda f, m: f(m, PROMPT, SECOND),
    "composition": lambda f, m: f(m),
    "dual_bound": lambda f, m: f(m, PROMPT, layer=1, head=1),
    "dual_demonstrations": lambda f, m: f(m, PROMPT),
    "dual_losses": lambda f, m: f(m, PROMPT),
    "induction_verdicts": lambda f, m: f(m, n_sequences=2, n_repeated=8),
    "layer_contributions": lambda f, m: f(m, PROMPT, TEXT),
    "prompt_attribution": lambda f, m: f(m, PROMPT, TEXT, by="token"),
    "prompt_copies": lambda f, m: f(m, PROMPT, PROMPT[2:5]),
}


def of_existing_heads(name, table):
    """The rows of a table of the model with empty heads that are about heads, or key-value heads, of the other."""
    if "head" not in table:
        return table
    of_kv_head = pd.Series(False, index=table.index)
    if name == "activation_patching":
        of_kv_head = table["point"].map(lambda point: POINTS[point].heads == "key-value")
    elif name == "attribution_by_head":
        of_kv_head = table["part"] == "shift_state"
    exists = (table["layer"] != 1) | (table["head"] < 2 - of_kv_head)
    if "later_layer" in table:
        exists &= (table["later_layer"] != 1) | (table["later_head"] < 2)
    return table[exists].reset_index(drop=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_an_analysis_gives_the_same_as_with_empty_heads(name, pair):
    found, expected = (CALLS[name](getattr(analyses, name), model) for model in pair)
    expected = of_existing_heads(name, expected)
    pd.testing.assert_frame_equal(found, expected, rtol=LAW, atol=LAW, check_dtype=False)


@torch.no_grad()
def test_tensors_of_all_heads_hold_nan_where_a_layer_has_no_such_head(pair):
    for read in (
        lambda model: analyses.head_details(model, PROMPT, TEXT).pattern,
        lambda model: analyses.linked_shares(model, PROMPT, TEXT).by_prompt,
    ):
        found, expected = map(read, pair)
        assert found[1, 2:].isnan().all() and not found[[0, 2]].isnan().any()
        torch.testing.assert_close(found[~found.isnan()], expected[~found.isnan()])


def test_what_needs_equal_heads_is_refused_in_words():
    model = unequal(n_key_value_heads_by_layer=[2, 2, 2])
    with pytest.raises(KVLensError, match='method="landmark" .* has others: use method="exact"'):
        convert_prompt(model, PROMPT, method="landmark", n_features=3)
    with pytest.raises(KVLensError, match="differ in the number of query heads per key-value head"):
        model.process_weights_(fold_value_biases=True)
    model.process_weights_()  # leaves it out
    other = unequal().fingerprint()
    with pytest.raises(KVLensError, match="differs"):
        convert_prompt(model, PROMPT).fingerprint.check(other, "test")

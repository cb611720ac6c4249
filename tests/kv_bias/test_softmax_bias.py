"""KVBias for softmax attention: what it holds, how it adds, what it keeps on disk."""

from dataclasses import replace

import pytest
import torch
from ops_cases import normal
from precision import LAW, relative_error

from kvlens import KVBias, KVLensError, combine
from kvlens.kv_bias import BiasFit, EluFeatures, Fingerprint, LearnedFeatures, RandomFeatures, TaylorFeatures, VirtualKeys
from kvlens.ops.softmax_attention import ScaledMass, join_bias
from kvlens.ops.softmax_features import ScoreRule

LAYERS, HEADS, KV, D, R = 2, 6, 3, 5, 7
RULE = ScoreRule(D**0.5)


def fingerprint() -> Fingerprint:
    return Fingerprint(
        attention="softmax", n_layers=LAYERS, n_heads=HEADS, n_kv_heads=KV, d_model=11, d_head=D, d_phi=0, d_vocab=13,
        feature_map="none", normalizer="softmax", attn_scale=RULE.scale, positional_embedding_type="rotary",
        rotary_placement=None, decay="none", kv_shift="none", heads=((HEADS, KV, D, 0),) * LAYERS, rest="", weights="0",
    )  # fmt: skip


def features(kind: str, lead: tuple[int, ...], seed: int, r: int = R):
    if kind == "virtual_keys":
        return VirtualKeys(normal(*lead, KV, r, D, seed=seed), torch.arange(r, 0, -1).expand(*lead, KV, r).clone())
    if kind == "random":
        return RandomFeatures(normal(LAYERS, KV, r, D, seed=99))
    if kind == "learned":
        return LearnedFeatures(normal(LAYERS, KV, r, D, seed=98), normal(LAYERS, KV, r, seed=97))
    return EluFeatures(D) if kind == "elu_plus_one" else TaylorFeatures(D)


def bias(kind: str = "virtual_keys", seed: int = 1, batch: int | None = None, r: int = R, **changes) -> KVBias:
    lead = (LAYERS,) if batch is None else (LAYERS, batch)
    phi = features(kind, lead, seed, r)
    empty = torch.zeros(*lead, 0, KV, D, dtype=torch.float64)
    made = KVBias(
        b_KV=normal(*lead, KV, phi.n_features, D, seed=seed + 10),
        b_D=normal(*lead, KV, phi.n_features, seed=seed + 20).abs(),
        last_k=empty, last_v=empty, last_q=torch.zeros(*lead, 0, HEADS, D, dtype=torch.float64),
        n_prompt_tokens=9, position_offset=9, fingerprint=fingerprint(), features=phi,
        log_scale=normal(*lead, KV, seed=seed + 30),
    )  # fmt: skip
    return replace(made, **changes)


def read(b: KVBias, layer: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """phi(q).b_KV and phi(q).b_D of fixed queries, in plain numbers: what the bias means."""
    q, whole = normal(2, 4, HEADS, D, seed=50), b.per_query_head()
    b_kv, b_d, scale = (t[layer] if b.batch_size is not None else t[layer][None] for t in (whole.b_KV, whole.b_D, b.log_scale))
    phi = b.features.of_layer(layer).read(q, RULE, None, scale, b_kv, b_d)
    plain = phi.features * phi.log_scale.exp()[..., None]
    return torch.einsum("bphr,bhrd->bphd", plain, b_kv.expand(2, -1, -1, -1)), torch.einsum(
        "bphr,bhr->bph", plain, b_d.expand(2, -1, -1)
    )


def assert_same(a: KVBias, b: KVBias) -> None:
    for x, y in zip(read(a), read(b), strict=True):
        assert relative_error(x, y) < LAW


@pytest.mark.parametrize("kind", ["virtual_keys", "random", "taylor", "elu_plus_one", "learned"])
@pytest.mark.parametrize("batch", [None, 2])
def test_arithmetic_is_that_of_what_the_bias_means(kind, batch):
    a, b = bias(kind, 1, batch), bias(kind, 2, batch)
    total = a + 0.5 * b
    for got, x, y in zip(read(total), read(a), read(b), strict=True):
        assert relative_error(got, x + 0.5 * y) < LAW
    assert total.d_phi == (2 * R if kind == "virtual_keys" else a.d_phi)
    assert_same(sum([a, b]) - b, a)
    assert total.n_prompt_tokens == 18


def test_virtual_keys_of_unlike_numbers_stand_side_by_side():
    a, b = bias(r=3), bias(seed=2, r=5)
    total = a + b
    assert torch.equal(total.features.keys, torch.cat([a.features.keys, b.features.keys], dim=-2))
    assert torch.equal(total.features.distance[..., 3:], b.features.distance)
    assert total.num_parameters == a.num_parameters + b.num_parameters


def test_a_log_scale_beyond_exp_adds_without_overflow():
    a, b = bias(), bias(seed=2)
    a = replace(a, log_scale=a.log_scale + 1500.0)
    total = a + b
    assert all(bool(x.isfinite().all()) for x in (total.b_KV, total.b_D, total.log_scale))
    q = normal(1, 4, HEADS, D, seed=50)
    z = join_bias(
        normal(1, 4, HEADS, D, seed=60), ScaledMass(normal(1, 4, HEADS, seed=61).exp(), normal(1, 4, HEADS, seed=62)),
        total.features.of_layer(0).read(q, RULE, None, total.log_scale[:1], total.b_KV[:1], total.b_D[:1]),
        total.b_KV[:1], total.b_D[:1],
    )  # fmt: skip
    assert all(bool(part.isfinite().all()) for part in z)


def test_selections_that_complete_each_other_add_up():
    whole = bias()
    heads = [(0, 0), (1, 1), (1, 4)]
    rest = [(layer, h) for layer in range(LAYERS) for h in range(HEADS) if (layer, h) not in heads]
    part, other = whole.select(heads=heads), whole.select(heads=rest)
    for got, x, y in zip(read(whole), read(part), read(other), strict=True):
        assert relative_error(got, x + y) < LAW
    assert [bool(read(part)[1][:, :, h].any()) for h in range(HEADS)] == [False, True, False, False, True, False]
    assert_same(part + other, whole)
    assert_same(part + whole.select(layers=[1]), part + whole.select(layers=[1]).per_query_head())


def test_one_prompt_of_a_batch():
    both = bias(batch=2)
    one = both.select_prompt(1)
    for got, expected in zip(read(one), read(both), strict=True):
        assert relative_error(got[1], expected[1]) < LAW
    assert bias("random", batch=2).select_prompt(0).features.projection.shape == (LAYERS, KV, R, D)


def a_fit(batch: int | None = None) -> BiasFit:
    lead = (LAYERS,) if batch is None else (LAYERS, batch)
    return BiasFit(
        "landmark", {"n_features": R, "reference": "own"}, 100, 20, {"prompt": 9, "sampled": 30}, {"fit": 0.25},
        torch.full((*lead, KV), R), normal(*lead, HEADS, seed=70).abs(), normal(*lead, HEADS, seed=71).abs(),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["virtual_keys", "random", "taylor", "elu_plus_one", "learned"])
def test_a_file_keeps_everything(kind, tmp_path):
    saved = bias(kind, batch=2, fit=a_fit(2))
    saved.save(tmp_path / "b.safetensors")
    loaded = KVBias.load(tmp_path / "b.safetensors")
    assert_same(saved, loaded)
    assert loaded.fit.rows() == saved.fit.rows()
    assert loaded.fit.settings == saved.fit.settings
    assert loaded.features.kind == kind


def with_budgets(b: KVBias) -> KVBias:
    """Between 1 and 7 keys per head, the others without a weight."""
    counts = torch.arange(LAYERS * KV * (b.batch_size or 1)).reshape(b.b_D.shape[:-1]) % R + 1
    on = (torch.arange(R) < counts[..., None]).to(b.b_D)
    return replace(b, b_KV=b.b_KV * on[..., None], b_D=b.b_D * on)


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("selected", [False, True])
def test_a_file_leaves_out_keys_without_a_weight(selected, batch, tmp_path):
    whole = bias(batch=batch)
    ragged = with_budgets(whole)
    heads = HEADS if selected else KV
    if selected:
        whole, ragged = (b.select(layers=[0], heads=[(1, 2)]) for b in (whole, ragged))
    counts = (torch.arange(LAYERS * KV * (batch or 1)) % R + 1).reshape(LAYERS, batch or 1, KV)
    kept = (
        int(counts[0].sum() + counts[1, :, 1].sum()) if selected else int(counts.sum())
    )  # query head 2 reads key-value head 1
    assert ragged.num_parameters == kept * (heads // KV * (D + 1) + D)
    whole.save(tmp_path / "whole.safetensors")
    ragged.save(tmp_path / "ragged.safetensors")
    assert (tmp_path / "ragged.safetensors").stat().st_size < (tmp_path / "whole.safetensors").stat().st_size - kept * D
    loaded = KVBias.load(tmp_path / "ragged.safetensors")
    assert torch.equal(loaded.b_KV, ragged.b_KV) and torch.equal(loaded.b_D, ragged.b_D)
    assert int(loaded.features.distance.min()) == 1  # also of the keys left out: none stands in the text
    assert_same(loaded, ragged)
    loaded.save(tmp_path / "again.safetensors")
    assert_same(KVBias.load(tmp_path / "again.safetensors"), ragged)


def test_a_bias_without_any_key_in_use_is_kept_too(tmp_path):
    nothing = bias().zero_like()
    nothing.save(tmp_path / "b.safetensors")
    loaded = KVBias.load(tmp_path / "b.safetensors")
    assert nothing.num_parameters == 0 and not read(nothing)[0].any()
    assert torch.equal(loaded.b_KV, nothing.b_KV) and loaded.d_phi == R


CHANGES = [
    *(
        ("incomplete or damaged", lambda tensors, metadata, meta, name=name: tensors.update({name: tensors[name][:-1]}))
        for name in ("b_D", "features.keys", "features.distance", "used")
    ),
    ("unknown features 'polynomial'", lambda tensors, metadata, meta: meta.update(features="polynomial")),
    ("incomplete or damaged", lambda tensors, metadata, meta: meta.update(features="random")),
]


@pytest.mark.parametrize(("words", "change"), CHANGES)
def test_other_features_and_rows_that_do_not_fit_the_keys_in_use_are_refused(words, change, rewrite):
    path = rewrite(with_budgets(bias()), change)
    with pytest.raises(KVLensError, match=words):
        KVBias.load(path)


def test_the_rows_of_a_fit():
    rows = a_fit(2).rows()
    assert len(rows) == LAYERS * 2 * HEADS
    assert rows[3].keys() == {"layer", "prompt", "head", "n_keys", "head_output_error", "mass_error"}
    assert a_fit(2).select_prompt(1).rows()[4]["head_output_error"] == float(a_fit(2).head_output_error[0, 1, 4])


def test_dtype_moves_numbers_and_leaves_distances():
    moved = bias().to(torch.float32)
    assert moved.features.keys.dtype == moved.log_scale.dtype == torch.float32
    assert moved.features.distance.dtype == torch.int64
    assert combine(bias(), bias(position_offset=3), shift_state="last").position_offset == 3

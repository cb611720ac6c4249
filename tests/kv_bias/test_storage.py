"""A softmax bias: how it adds, what its file keeps, and held in buckets of heads the same numbers as its padded tensors, in
less memory, on both front ends.
"""

from dataclasses import replace

import pytest
import torch
from ops_cases import normal
from precision import LAW, relative_error
from small_models import logits_under, sharp, tokens
from tiny_hf import tiny_hf_model

from kvlens import KVBias, KVLensError, KVTransformerBridge, combine, convert_prompt
from kvlens.conversion import Landmark
from kvlens.kv_bias import BiasFit, EluFeatures, Fingerprint, LearnedFeatures, RandomFeatures, TaylorFeatures, VirtualKeys
from kvlens.kv_bias.storage import KeyBuckets
from kvlens.ops.softmax_attention import ScaledMass, join_bias
from kvlens.ops.softmax_features import ScoreRule

pytestmark = pytest.mark.usefixtures("in_float64")

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
    moved = bias().to(torch.float16)
    assert moved.features.keys.dtype == moved.log_scale.dtype == torch.float16
    assert moved.features.distance.dtype == torch.int64
    assert combine(bias(), bias(position_offset=3), shift_state="last").position_offset == 3


N_PROMPT = 20
PROMPT = tokens(1, N_PROMPT)[0]
WINDOWS = dict(use_local_attn=True, window_size=6, attn_types=["global", "local"])
HOOKED = {
    **{f"softmax, {row}": {} for row in ("rotary, grouped", "learned", "soft-capped", "sinks")},
    "softmax, alibi": WINDOWS,
}
BRIDGE = ["llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_5", "falcon_h1"]
"""Grouped heads; learned positions; a soft cap and windows; sinks; latent attention; states among and beside attention."""


def thinned(exact: KVBias, seed: int = 0) -> KVBias:
    """Some keys of a prompt, in every head another number, with weights; one head of the first layer has none."""
    generator = torch.Generator().manual_seed(seed)
    shape = exact.features.distance.shape
    n = (torch.rand(shape[:-1], generator=generator).square() * shape[-1]).long() + 1
    n[0, ..., 0] = 0
    rank = torch.rand(shape, generator=generator).argsort(dim=-1).argsort(dim=-1)
    weights = torch.rand(shape, generator=generator) * (rank < n[..., None]) * 2
    weights = weights.repeat_interleave(exact.b_D.shape[-2] // shape[-2], dim=-2).to(exact.b_D)
    return replace(exact, b_D=weights, b_KV=exact.b_KV * weights[..., None], log_scale=exact.log_scale + 0.3)


def n_stored(bias: KVBias) -> int:
    return sum(x.numel() for x in bias.stored().values())


def compact_of(padded: KVBias) -> KVBias:
    compact = padded.compact()
    assert n_stored(compact) < n_stored(padded)
    return compact


@pytest.fixture(scope="module", params=[*HOOKED, *BRIDGE])
def model(request, bridge_of):
    if request.param in BRIDGE:
        return bridge_of(request.param)
    return sharp(request.param, gain=1, **HOOKED[request.param]).requires_grad_(True)


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("heads", [KV, HEADS], ids=["a row per key-value head", "a row per query head"])
def test_the_two_buckets_of_a_layer_take_the_fewest_rows_and_hold_every_key_in_use(heads, batch):
    """Against all pairs of buckets that there are; a bucket of a layer is a view, and as wide as its widest head."""
    ragged = with_budgets(bias(batch=batch))
    ragged = ragged.per_query_head() if heads == HEADS else ragged
    tensors = ragged.tensors()
    used = tensors["b_D"].unflatten(-2, (KV, -1))[..., 0, :] != 0
    counts = used.sum(dim=-1).reshape(LAYERS, batch or 1, KV).amax(dim=1).tolist()
    buckets, start = KeyBuckets.of(tensors, KV), 0
    for of_layer, found in zip(counts, buckets.layers, strict=True):
        assert sorted(head for bucket in found for head in bucket.heads) == list(range(KV))
        pairs = [[[n for i, n in enumerate(of_layer) if s >> i & 1 == side] for side in (0, 1)] for s in range(2**KV)]
        fewest = min(sum(len(side) * max(side, default=0) for side in pair) for pair in pairs)
        assert sum(len(bucket.heads) * bucket.width for bucket in found) == fewest
        for bucket in found:
            assert bucket.start == start and bucket.width == max(of_layer[head] for head in bucket.heads)
            block = buckets.block("features.keys", bucket)
            assert block.data_ptr() == buckets.rows["features.keys"][start:].data_ptr()
            start += block.shape[:-1].numel()
    assert start == len(buckets.rows["features.keys"])
    for name, rows in buckets.rows.items():
        whole, n_rows = buckets.whole(name), heads if name.startswith("b_") else KV
        on = used.repeat_interleave(n_rows // KV, dim=-2)
        # the keys of a head may come in another order: its used ones first, which here they are
        assert torch.equal(whole[on], tensors[name][on]) and len(rows) == start * n_rows // KV


@pytest.fixture
def rotary():
    return sharp("softmax, rotary, grouped", gain=1)


@torch.no_grad()
@pytest.mark.parametrize("prompt", [PROMPT, tokens(2, N_PROMPT)], ids=["one prompt", "a batch"])
def test_a_model_reads_it_as_the_padded_one(model, prompt):
    padded = thinned(convert_prompt(model, prompt))
    compact, text = compact_of(padded), tokens(2, 9, seed=1)
    for some in (text, text[:, :1]):  # one query has a form of its own
        assert relative_error(logits_under(model, compact, some), logits_under(model, padded, some)) < LAW
    assert compact._buckets is not None  # nobody asked for the padded tensors


def test_gradients_of_the_text_are_the_same(model):
    padded, text = thinned(convert_prompt(model, PROMPT)), tokens(1, 5, seed=1)
    weights = [p for p in model.parameters() if p.requires_grad]
    compact, found = compact_of(padded), []
    for bias in (compact, padded):
        gradients = torch.autograd.grad(logits_under(model, bias, text).square().sum(), weights, allow_unused=True)
        found.append(torch.cat([x.flatten() for x in gradients if x is not None]))
    assert compact._buckets is not None and relative_error(*found) < LAW


def test_gradients_of_the_bias_pass_through_its_buckets(rotary):
    exact, text = convert_prompt(rotary, PROMPT), tokens(1, 5, seed=1)
    found = []
    for form in (KVBias.compact, KVBias.padded):
        padded = thinned(exact)
        leaf = padded.b_KV.clone().requires_grad_()
        bias = form(replace(padded, b_KV=leaf))
        (gradient,) = torch.autograd.grad(logits_under(rotary, bias, text).square().sum(), leaf)
        found.append(gradient * (padded.b_D != 0)[..., None])
    assert relative_error(*found) < LAW


@torch.no_grad()
def test_hooks_see_the_shapes_of_the_padded_one(rotary):
    bias = compact_of(thinned(convert_prompt(rotary, PROMPT)))
    padded, text = bias.padded(), tokens(1, 5, seed=1)
    caches = []
    for each in (bias, padded):
        with rotary.kv_bias(each):
            caches.append(rotary.run_with_cache(text)[1])
    assert caches[0].keys() == caches[1].keys()
    for name in caches[1]:
        torch.testing.assert_close(caches[0][name], caches[1][name], rtol=1e-11, atol=1e-11)
    assert bias._buckets is not None


@torch.no_grad()
def test_arithmetic_is_that_of_the_padded_one_and_stays_compact(rotary):
    exact = convert_prompt(rotary, PROMPT)
    a, b = (thinned(exact, seed) for seed in (1, 2))
    text = tokens(1, 5, seed=1)
    made = {
        "sum": lambda a, b: a + b,
        "multiple": lambda a, b: 2 * a,
        "toward": lambda a, b: a.toward(b, 0.3),
        "combine": lambda a, b: combine(b, a, weights=[0.5, 0.2]),
        "heads": lambda a, b: a.select(heads=[(1, 2), (0, 4)]),
        "layers": lambda a, b: a.select(layers=[1]),
        "zeros": lambda a, b: a.zero_like() + a,
        "float32 and back": lambda a, b: a.to("float32").to("float64"),
        "by query head": lambda a, b: a.per_query_head(),
    }
    for name, make in made.items():
        expected, found = make(a, b), make(a.compact(), b.compact())
        assert n_stored(found) < n_stored(expected), name
        assert relative_error(logits_under(rotary, found, text), logits_under(rotary, expected, text)) < LAW, name
        assert found.num_parameters == expected.num_parameters, name
    batch = a.compact().repeat(2)
    assert relative_error(logits_under(rotary, batch, text.repeat(2, 1)), logits_under(rotary, a, text.repeat(2, 1))) < LAW
    assert relative_error(logits_under(rotary, batch.select_prompt(1), text), logits_under(rotary, a, text)) < LAW


@torch.no_grad()
def test_a_fit_is_compact_and_so_is_what_its_file_gives(rotary, tmp_path):
    way = Landmark(n_keys=3, n_continuations=4, continuation_length=5, n_held_out=0)
    bias = convert_prompt(rotary, PROMPT, method=way, verbose=False)
    assert repr(bias) == repr(bias.padded()) and bias.d_phi == bias.padded().d_phi
    assert bias._buckets is not None
    bias.save(tmp_path / "a")
    bias.padded().save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    again = KVBias.load(tmp_path / "a")
    assert n_stored(again) == n_stored(bias) < n_stored(bias.padded())
    whole, same = bias.tensors(), again.tensors()
    used = whole["b_D"] != 0
    for name in ("b_KV", "b_D", "log_scale"):
        assert torch.equal(same[name], whole[name])
    for name in ("features.keys", "features.distance"):
        assert torch.equal(same[name][used], whole[name][used])
    assert again.fit.history == bias.fit.history == ()
    text = tokens(1, 5, seed=1)
    assert torch.equal(logits_under(rotary, again, text), logits_under(rotary, bias, text))


@torch.no_grad()
def test_its_padded_tensors_can_be_written_to_while_it_is_attached(model):
    bias = compact_of(thinned(convert_prompt(model, PROMPT)))
    text = tokens(1, 5, seed=1)
    model.attach_kv_bias(bias)
    before = model(text)
    bias.b_KV.mul_(2)
    after = model(text)
    model.detach_kv_bias()
    assert relative_error(after, before) > 1e-6
    assert relative_error(after, logits_under(model, replace(bias, b_KV=bias.b_KV.clone()), text)) < LAW


def test_a_replaced_field_is_recorded_as_that_of_any_other(rotary):
    way = Landmark(n_keys=3, n_continuations=4, continuation_length=5, n_held_out=0)
    bias = convert_prompt(rotary, PROMPT, method=way, verbose=False)
    assert replace(bias.compact(), n_prompt_tokens=N_PROMPT).fit is bias.fit
    b_kv = bias.padded().b_KV * 2
    assert "b_KV replaced" in replace(bias.compact(), b_KV=b_kv).fit.history[-1]
    whole = bias.padded()
    fields = dict(b_KV=whole.b_KV, b_D=whole.b_D * 2, features=whole.features)
    assert "b_D" in replace(bias.compact(), **fields).fit.history[-1]


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_cache_of_transformers_is_no_wider_than_its_layers(family):
    hf, model = (tiny_hf_model(family) for _ in range(2))
    model = KVTransformerBridge.boot_transformers(model)
    bias = compact_of(thinned(convert_prompt(model, PROMPT)))
    caches = [each.to_cache() for each in (bias, bias.padded())]
    hf.set_attn_implementation("kvlens")
    text = tokens(1, 5, seed=1)
    assert relative_error(*(hf(text, past_key_values=cache).logits for cache in caches)) < LAW
    sizes = [sum(layer.keys.numel() for layer in each.to_cache().layers) for each in (bias, bias.padded())]
    assert sizes[0] < sizes[1]

"""A softmax bias: how it adds, what its file keeps, and with each layer as wide as its widest head the same numbers."""

import pytest
import torch
from ops_cases import normal
from precision import LAW, relative_error
from small_models import logits_under, sharp, tokens
from stacked_tensors import with_stacked
from tiny_hf import tiny_hf_model

from kvlens import KVBias, KVLensError, KVTransformerBridge, combine, convert_prompt
from kvlens.conversion import Landmark
from kvlens.kv_bias import (
    BiasFit,
    EluFeatures,
    Features,
    Fingerprint,
    Keys,
    Layer,
    LearnedFeatures,
    RandomFeatures,
    TaylorFeatures,
    VirtualKeys,
)
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


def features(kind: str, batch: int, seed: int, r: int = R):
    """Of one layer."""
    if kind == "virtual_keys":
        return VirtualKeys(normal(batch, KV, r, D, seed=seed), torch.arange(r, 0, -1).expand(batch, KV, r).clone())
    if kind == "random":
        return RandomFeatures(normal(KV, r, D, seed=99))
    if kind == "learned":
        return LearnedFeatures(normal(KV, r, D, seed=98), normal(KV, r, seed=97))
    return EluFeatures(D) if kind == "elu_plus_one" else TaylorFeatures(D)


def bias(kind: str = "virtual_keys", seed: int = 1, batch: int | None = None, r: int = R, **changes) -> KVBias:
    n, made_of = batch or 1, Keys if kind == "virtual_keys" else Features

    def layer(seed: int) -> Layer:
        phi = features(kind, n, seed, r)
        b_kv, b_d = normal(n, KV, phi.n_features, D, seed=seed + 10), normal(n, KV, phi.n_features, seed=seed + 20).abs()
        last = {x: torch.zeros(n, 0, HEADS if x == "q" else KV, D, dtype=torch.float64) for x in "kvq"}
        return Layer((made_of(b_kv, b_d, normal(n, KV, seed=seed + 30), phi),), last)

    given = dict(n_prompt_tokens=9, position_offset=9, fingerprint=fingerprint(), record=None, single=batch is None)
    return KVBias(**{"layers": (layer(seed), layer(seed + 100)), **given, **changes})


def read(b: KVBias, layer: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """phi(q).b_KV and phi(q).b_D of fixed queries, in plain numbers: what the bias means."""
    q, part = normal(2, 4, HEADS, D, seed=50), b.per_query_head().layers[layer].attention
    phi = part.features.read(q, RULE, None, part.log_scale, part.b_kv, part.b_d)
    plain = phi.features * phi.log_scale.exp()[..., None]
    b_kv, b_d = part.b_kv.expand(2, -1, -1, -1), part.b_d.expand(2, -1, -1)
    return torch.einsum("bphr,bhrd->bphd", plain, b_kv), torch.einsum("bphr,bhr->bph", plain, b_d)


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
    assert torch.equal(total.stacked("keys"), torch.cat([a.stacked("keys"), b.stacked("keys")], dim=-2))
    assert torch.equal(total.stacked("distance")[..., 3:], b.stacked("distance"))
    assert total.num_parameters == a.num_parameters + b.num_parameters


@pytest.mark.parametrize("larger", [0, 1])
def test_a_log_scale_beyond_exp_adds_without_overflow(larger):
    terms = [bias(), bias(seed=2)]
    terms[larger] = with_stacked(terms[larger], log_scale=terms[larger].stacked("log_scale") + 1500.0)
    total = terms[0] + terms[1]
    assert all(bool(x.isfinite().all()) for x in (total.stacked("b_kv"), total.stacked("b_d"), total.stacked("log_scale")))
    q, part = normal(1, 4, HEADS, D, seed=50), total.layers[0].attention
    phi = part.features.read(q, RULE, None, part.log_scale, part.b_kv, part.b_d)
    own = ScaledMass(normal(1, 4, HEADS, seed=61).exp(), normal(1, 4, HEADS, seed=62))
    z = join_bias(normal(1, 4, HEADS, D, seed=60), own, phi, part.b_kv, part.b_d)
    assert all(bool(x.isfinite().all()) for x in z)


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
    assert bias("random", batch=2).select_prompt(0).stacked("projection").shape == (LAYERS, KV, R, D)


def a_fit(batch: int | None = None) -> BiasFit:
    lead = (LAYERS,) if batch is None else (LAYERS, batch)
    return BiasFit(
        "landmark", {"n_features": R, "reference": "own"}, 100, 20, {"prompt": 9, "sampled": 30}, {"fit": 0.25},
        torch.full((*lead, KV), R), normal(*lead, HEADS, seed=70).abs(), normal(*lead, HEADS, seed=71).abs(),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["virtual_keys", "random", "taylor", "elu_plus_one", "learned"])
def test_a_file_keeps_everything(kind, tmp_path):
    saved = bias(kind, batch=2, record=a_fit(2))
    saved.save(tmp_path / "b.safetensors")
    loaded = KVBias.load(tmp_path / "b.safetensors")
    assert_same(saved, loaded)
    assert loaded.fit.rows() == saved.fit.rows()
    assert loaded.fit.settings == saved.fit.settings
    assert loaded.kind == kind


def with_budgets(b: KVBias) -> KVBias:
    """Between 1 and 7 keys per head, the others without a weight."""
    counts = torch.arange(LAYERS * KV * (b.batch_size or 1)).reshape(b.stacked("b_d").shape[:-1]) % R + 1
    on = (torch.arange(R) < counts[..., None]).to(b.stacked("b_d"))
    return with_stacked(b, b_kv=b.stacked("b_kv") * on[..., None], b_d=b.stacked("b_d") * on)


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("selected", [False, True])
def test_a_file_leaves_out_keys_without_a_weight(selected, batch, tmp_path):
    whole = bias(batch=batch)
    ragged = with_budgets(whole)
    if selected:
        whole, ragged = (b.select(layers=[0], heads=[(1, 2)]) for b in (whole, ragged))
    counts = (torch.arange(LAYERS * KV * (batch or 1)) % R + 1).reshape(LAYERS, batch or 1, KV)
    # query head 2 reads key-value head 1
    kept = [int(counts[0].sum()), int(counts[1, :, 1].sum() if selected else counts[1].sum())]
    rows = [1, HEADS // KV if selected else 1]  # of a layer with single heads, one for each query head
    assert ragged.num_parameters == sum(n * (group * (D + 1) + D) for n, group in zip(kept, rows, strict=True))
    whole.save(tmp_path / "whole.safetensors")
    ragged.save(tmp_path / "ragged.safetensors")
    assert (tmp_path / "ragged.safetensors").stat().st_size < (tmp_path / "whole.safetensors").stat().st_size - sum(kept) * D
    loaded = KVBias.load(tmp_path / "ragged.safetensors")
    narrow = ragged.narrowed()  # as a bias that is not exact is read
    narrow = narrow.per_query_head() if selected else narrow
    assert all(torch.equal(loaded.stacked(name), narrow.stacked(name)) for name in ("b_kv", "b_d"))
    assert int(loaded.stacked("distance").min()) == 1  # also of the keys left out: none stands in the text
    assert_same(loaded, ragged)
    loaded.save(tmp_path / "again.safetensors")
    assert_same(KVBias.load(tmp_path / "again.safetensors"), ragged)


def test_a_key_that_has_a_weight_or_a_value_alone_is_in_use(tmp_path):
    ragged = with_budgets(bias())
    b_kv, b_d = ragged.stacked("b_kv"), ragged.stacked("b_d")
    b_kv[:, :, 0], b_d[:, :, 1] = 0, 0
    changed = with_stacked(ragged, b_kv=b_kv, b_d=b_d)
    assert [torch.equal(a.used, b.used) for a, b in zip(changed.attention, ragged.attention, strict=True)] == [True, True]
    assert_same(changed.narrowed(), changed)
    changed.save(tmp_path / "b")
    assert_same(KVBias.load(tmp_path / "b"), changed)


def test_a_bias_without_any_key_in_use_is_kept_too(tmp_path):
    nothing = bias().zero_like()
    nothing.save(tmp_path / "b.safetensors")
    loaded = KVBias.load(tmp_path / "b.safetensors")
    assert nothing.num_parameters == 0 and not read(nothing)[0].any()
    assert torch.equal(loaded.stacked("b_kv"), nothing.stacked("b_kv")) and loaded.d_phi == R


CHANGES = [
    *(
        ("incomplete or damaged", lambda tensors, metadata, meta, name=name: tensors.update({name: tensors[name][:-1]}))
        for name in ("b_D", "features.keys", "features.distance", "used")
    ),
    ("no kind of features is called 'polynomial'", lambda tensors, metadata, meta: meta.update(features="polynomial")),
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
    assert moved.stacked("keys").dtype == moved.stacked("log_scale").dtype == torch.float16
    assert moved.stacked("distance").dtype == torch.int64
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
    shape = exact.stacked("distance").shape
    n = (torch.rand(shape[:-1], generator=generator).square() * shape[-1]).long() + 1
    n[0, ..., 0] = 0
    rank = torch.rand(shape, generator=generator).argsort(dim=-1).argsort(dim=-1)
    weights = torch.rand(shape, generator=generator) * (rank < n[..., None]) * 2
    weights = weights.repeat_interleave(exact.stacked("b_d").shape[-2] // shape[-2], dim=-2).to(exact.stacked("b_d"))
    return with_stacked(
        exact, b_d=weights, b_kv=exact.stacked("b_kv") * weights[..., None], log_scale=exact.stacked("log_scale") + 0.3
    )


def n_stored(bias: KVBias) -> int:
    return sum(x.numel() for x in bias.tensors().values())


def narrowed(wide: KVBias) -> KVBias:
    narrow = wide.narrowed()
    assert n_stored(narrow) < n_stored(wide) and narrow.fit is wide.fit
    return narrow


@pytest.fixture(scope="module", params=[*HOOKED, *BRIDGE])
def model(request, bridge_of):
    if request.param in BRIDGE:
        return bridge_of(request.param)
    return sharp(request.param, gain=1, **HOOKED[request.param]).requires_grad_(True)


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("heads", [KV, HEADS], ids=["a row per key-value head", "a row per query head"])
def test_a_layer_is_as_wide_as_its_widest_head_and_holds_every_key_in_use(heads, batch):
    ragged = with_budgets(bias(batch=batch))
    ragged = ragged.per_query_head() if heads == HEADS else ragged
    for wide, narrow in zip(ragged.attention, ragged.narrowed().attention, strict=True):
        used = (wide.b_d != 0).unflatten(1, (KV, -1)).any(dim=2)
        assert narrow.keys.shape[2] == narrow.b_d.shape[2] == used.sum(dim=-1).max()
        assert torch.equal(narrow.used.sum(dim=-1), used.sum(dim=-1))
        for mine, theirs in ((narrow.keys, wide.keys), (narrow.distance, wide.distance)):
            assert torch.equal(mine[narrow.used], theirs[used])
        of_queries = used.repeat_interleave(heads // KV, dim=1), narrow.used.repeat_interleave(heads // KV, dim=1)
        assert torch.equal(narrow.b_kv[of_queries[1]], wide.b_kv[of_queries[0]])
    assert_same(ragged, ragged.narrowed())


@pytest.fixture
def rotary():
    return sharp("softmax, rotary, grouped", gain=1)


@torch.no_grad()
@pytest.mark.one_in(3)
@pytest.mark.parametrize("prompt", [PROMPT, tokens(2, N_PROMPT)], ids=["one prompt", "a batch"])
def test_a_model_reads_narrow_layers_as_wide_ones(model, prompt):
    wide = thinned(convert_prompt(model, prompt))
    narrow, text = narrowed(wide), tokens(2, 9, seed=1)
    for some in (text, text[:, :1]):  # one query has a form of its own
        assert relative_error(logits_under(model, narrow, some), logits_under(model, wide, some)) < LAW


@pytest.mark.one_in(2)
def test_gradients_of_the_text_are_the_same(model):
    wide, text = thinned(convert_prompt(model, PROMPT)), tokens(1, 5, seed=1)
    weights, found = [p for p in model.parameters() if p.requires_grad], []
    for bias in (narrowed(wide), wide):
        gradients = torch.autograd.grad(logits_under(model, bias, text).square().sum(), weights, allow_unused=True)
        found.append(torch.cat([x.flatten() for x in gradients if x is not None]))
    assert relative_error(*found) < LAW


def test_gradients_of_the_bias_reach_every_key_in_use(rotary):
    wide, text = thinned(convert_prompt(rotary, PROMPT)), tokens(1, 5, seed=1)
    found = []
    for form in (KVBias.narrowed, lambda bias: bias):
        leaf = wide.stacked("b_kv").requires_grad_()
        (gradient,) = torch.autograd.grad(logits_under(rotary, form(with_stacked(wide, b_kv=leaf)), text).square().sum(), leaf)
        found.append(gradient * (wide.stacked("b_d") != 0)[..., None])
    assert relative_error(*found) < LAW


OPERATIONS = {
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


@torch.no_grad()
@pytest.mark.parametrize("make", OPERATIONS.values(), ids=OPERATIONS)
def test_arithmetic_of_layers_of_unlike_widths(make, rotary):
    exact, text = convert_prompt(rotary, PROMPT), tokens(1, 5, seed=1)
    a, b = (thinned(exact, seed) for seed in (1, 2))
    expected, found = make(a, b), make(a.narrowed(), b.narrowed())
    assert n_stored(found) < n_stored(expected) and found.num_parameters == expected.num_parameters
    assert relative_error(logits_under(rotary, found, text), logits_under(rotary, expected, text)) < LAW


@torch.no_grad()
def test_batches_of_layers_of_unlike_widths(rotary):
    a, b = (thinned(convert_prompt(rotary, PROMPT), seed) for seed in (1, 2))
    text = tokens(1, 5, seed=1)
    expected = torch.cat([logits_under(rotary, bias, text) for bias in (a, b)])
    both = KVBias.batch([a.narrowed().repeat(1), b.narrowed().repeat(1)])
    assert relative_error(logits_under(rotary, both, text.repeat(2, 1)), expected) < LAW
    assert relative_error(logits_under(rotary, both.select_prompt(1), text), expected[1:]) < LAW
    one_head = b.select(heads=[(1, 2)])  # which has a row for each query head
    mixed, expected = KVBias.batch([a, one_head]), torch.cat([expected[:1], logits_under(rotary, one_head, text)])
    assert relative_error(logits_under(rotary, mixed, text.repeat(2, 1)), expected) < LAW


@torch.no_grad()
def test_a_fit_is_narrow_and_so_is_what_its_file_gives(rotary, tmp_path):
    way = Landmark(n_keys=3, key_steps=2, n_continuations=4, continuation_length=5, n_held_out=0)
    bias = convert_prompt(rotary, PROMPT, method=way, verbose=False)
    assert [part.keys.shape[2] for part in bias.attention] == [int(part.used.sum(dim=-1).max()) for part in bias.attention]
    bias.save(tmp_path / "a")
    again = KVBias.load(tmp_path / "a")
    for name, x in bias.tensors().items():
        assert torch.equal(again.tensors()[name], x) or name[1] in ("keys", "distance")  # of unused keys nothing is kept
    assert repr(again) == repr(bias) and again.fit.history == bias.fit.history == ()
    text = tokens(1, 5, seed=1)
    assert torch.equal(logits_under(rotary, again, text), logits_under(rotary, bias, text))


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_cache_of_transformers_is_no_wider_than_its_layers(family):
    hf, model = (tiny_hf_model(family) for _ in range(2))
    model = KVTransformerBridge.boot_transformers(model)
    wide = thinned(convert_prompt(model, PROMPT))
    caches, text = [bias.to_cache() for bias in (narrowed(wide), wide)], tokens(1, 5, seed=1)
    sizes = [sum(layer.keys.numel() for layer in cache.layers) for cache in caches]
    assert sizes[0] < sizes[1]
    hf.set_attn_implementation("kvlens")
    assert relative_error(*(hf(text, past_key_values=cache).logits for cache in caches)) < LAW

"""HookedKVRegressor: its answer from its parts, hooks and cache on numbers, positions, coming back from disk, bad input."""

import pytest
import torch
from precision import LAW, relative_error, share
from small_models import row_of, with_random_biases
from torch.nn import functional as F

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVLensError
from kvlens.model import HookedKVRegressor

BATCH, POS, D_INPUT, D_MODEL = 3, 7, 4, 10
SIZES = dict(
    n_layers=2, d_model=D_MODEL, d_head=2, n_heads=5, n_ctx=11, d_vocab=1, d_mlp=13, act_fn="gelu", device="cpu", seed=3
)
VARIANTS = [*(f"softmax, {row}" for row in ("learned", "sinusoidal", "shifted", "no norm", "alibi")), "random"]


def regressor(**changes):
    model = HookedKVRegressor(HookedKVTransformerConfig(**{**SIZES, "dtype": torch.float64, **changes}), D_INPUT)
    return with_random_biases(model)


def of_row(name):
    linear = {} if name.startswith("softmax") else dict(attention="linear", positional_embedding_type="none", kv_shift=True)
    return regressor(**linear, **row_of(name))


def numbers(pos=POS, seed=0):
    return torch.randn(BATCH, pos, D_INPUT, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- the answer ---


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_the_stream_starts_with_numbers_and_positions_and_is_read_behind_its_norm(name):
    model = of_row(name)
    predicted, cache = model.run_with_cache(numbers())
    stream, kind = cache["blocks.1.hook_resid_post"], model.cfg.positional_embedding_type
    if model.cfg.normalization_type is not None:
        ln = model.transformer.ln_final
        stream = F.layer_norm(stream, (D_MODEL,), ln.w, ln.b, model.cfg.eps)
    expected = stream @ model.read_out.weight[0] + model.read_out.bias
    assert predicted.shape == (BATCH, POS)
    assert predicted.dtype == torch.float64
    assert relative_error(predicted, expected) < LAW
    embedded = torch.stack([F.linear(row, model.read_in.weight, model.read_in.bias) for row in numbers()])
    even = torch.arange(0, D_MODEL, 2, dtype=torch.float64)
    angles = torch.arange(POS, dtype=torch.float64)[:, None] / 10000 ** (even / D_MODEL)
    added = torch.zeros(POS, D_MODEL, dtype=torch.float64)
    if kind == "standard":
        added = model.transformer.W_pos[:POS]
    elif kind == "sinusoidal":
        added = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
    assert relative_error(cache["hook_embed"], embedded) < LAW
    assert relative_error(cache["blocks.0.hook_resid_pre"], embedded + added) < LAW
    assert ("hook_pos_embed" in cache) == (kind in ("standard", "sinusoidal"))


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_causal_models_do_not_look_ahead_and_bidirectional_ones_do(name):
    x, other = numbers(), numbers(seed=1)
    mixed = torch.cat([x[:, :3], other[:, 3:]], dim=1)
    model = of_row(name)
    assert relative_error(model(x)[:, :3], model(mixed)[:, :3]) < LAW
    assert relative_error(model(x)[:, 3:], model(mixed)[:, 3:]) > 0.01  # they read what is there
    both = regressor(attention_dir="bidirectional")
    assert ((both(x) - both(mixed))[:, :3].abs() > 1e-6).all()  # far above rounding


@torch.no_grad()
def test_float32_and_float64_agree_to_float32():
    wide, narrow = regressor(), regressor(dtype=torch.float32)
    narrow.load_state_dict({name: value.float() for name, value in wide.state_dict().items()})
    rounded = regressor()
    rounded.load_state_dict(narrow.state_dict())
    drawn = [numbers(seed=seed) for seed in range(4)]
    errors = [relative_error(rounded(x.float().double()), wide(x)) for x in drawn]
    got = narrow(drawn[0])  # float64 numbers are rounded to what the model reads
    assert got.dtype == torch.float32
    assert 0 < share(relative_error(got, wide(drawn[0])), errors) < 1


def test_the_same_seed_gives_the_same_maps_and_leaves_the_global_generators_alone(monkeypatch):
    torch.manual_seed(5)
    monkeypatch.setattr(
        torch.cuda, "manual_seed_all", lambda seed: pytest.fail("GPUs would be seeded, when they are first used")
    )
    before = torch.get_rng_state()
    one, two, other = (HookedKVRegressor(HookedKVTransformerConfig(**{**SIZES, "seed": s}), D_INPUT) for s in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.read_in.weight, two.read_in.weight)
    assert not torch.equal(one.read_out.weight, other.read_out.weight)


def test_every_weight_that_is_trained_has_a_gradient():
    model = regressor()
    model(numbers()).square().sum().backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert {"read_in.weight", "read_out.bias", "transformer.pos_embed.W_pos"} <= trained.keys()
    assert not [name for name, grad in trained.items() if grad is None or "embed.W_E" in name or "unembed" in name]


def test_sinusoidal_positions_do_not_end():
    for kind in ("sinusoidal", "none"):
        assert regressor(positional_embedding_type=kind)(numbers(12)).isfinite().all()


# --- hooks ---


@torch.no_grad()
def test_a_hook_on_a_pattern_is_reached_and_removed():
    model, x, seen = regressor(), numbers(), []

    def look_at_itself(pattern, hook):
        seen.append((hook.name, tuple(pattern.shape)))
        return torch.eye(POS, dtype=pattern.dtype).expand_as(pattern)

    hooks = [(f"blocks.{layer}.attn.hook_pattern", look_at_itself) for layer in range(2)]
    before, blind = model(x), model.run_with_hooks(x, fwd_hooks=hooks)
    alone = model.run_with_hooks(torch.cat([numbers(seed=1)[:, :-1], x[:, -1:]], dim=1), fwd_hooks=hooks)
    assert torch.equal(model(x), before)
    assert seen[:2] == [(f"blocks.{layer}.attn.hook_pattern", (BATCH, 5, POS, POS)) for layer in range(2)]
    assert not torch.allclose(blind, before)
    # who sees only itself does not care about the others
    assert relative_error(blind[:, -1], alone[:, -1]) < LAW
    with pytest.raises(KVLensError, match=r"did you mean .*hook_pattern"):
        model.run_with_hooks(x, fwd_hooks=[("blocks.0.attn.hook_patern", look_at_itself)])


@torch.no_grad()
def test_hooks_of_the_transformer_act_on_the_regressor():
    model = regressor()
    with model.transformer.hooks(fwd_hooks=[("hook_embed", lambda value, hook: value * 0)]):
        predicted = model(numbers())
    # only positions are left, up to how a kernel sums the rows of a batch
    assert relative_error(predicted, predicted[:1].expand_as(predicted)) < LAW
    assert predicted[0].std() > 1e-3  # and they differ


def test_the_cache_has_the_keys_of_a_transformer_that_stops_before_the_unembedding():
    model = regressor()
    _, cache = model.run_with_cache(numbers())
    plain = HookedKVTransformer(HookedKVTransformerConfig(**SIZES))
    _, tokens_cache = plain.run_with_cache(torch.zeros(BATCH, POS, dtype=torch.long))
    assert set(cache.keys()) == set(tokens_cache.keys()) - {"unembed.hook_in", "unembed.hook_out"}
    assert cache["k", 1].shape == (BATCH, POS, 5, 2)
    _, cache = model.run_with_cache(numbers(), names_filter="blocks.1.attn.hook_z")
    assert list(cache.keys()) == ["blocks.1.attn.hook_z"]


# --- on disk ---


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_save_and_load_give_the_same_numbers(name, tmp_path):
    model = of_row(name)
    model.save(tmp_path / "model")
    loaded = HookedKVRegressor.load(tmp_path / "model", device="cpu")
    assert loaded.d_input == D_INPUT
    assert loaded.transformer.fingerprint() == model.transformer.fingerprint()
    assert torch.equal(loaded(numbers()), model(numbers()))
    trained = [[name for name, p in m.named_parameters() if p.requires_grad] for m in (model, loaded)]
    assert trained[0] == trained[1]


def test_a_rounded_copy_is_smaller_and_near(tmp_path):
    model = regressor(dtype=torch.float32)
    for folder, dtype in (("whole", None), ("half", torch.float16)):
        model.save(tmp_path / folder, stored_dtype=dtype)
    sizes = [(tmp_path / folder / "maps.safetensors").stat().st_size for folder in ("whole", "half")]
    loaded = HookedKVRegressor.load(tmp_path / "half", device="cpu")
    rounded = loaded.read_in.weight - model.read_in.weight
    assert sizes[1] < sizes[0]
    assert loaded.read_in.weight.dtype == torch.float32
    assert 0 < rounded.abs().max() <= torch.finfo(torch.float16).eps * model.read_in.weight.abs().max()
    assert loaded.transformer.fingerprint().weights == model.transformer.fingerprint().weights


def test_a_model_is_replaced_when_asked_and_damaged_and_foreign_folders_are_refused(tmp_path):
    one, two, folder = regressor(), regressor(seed=4), tmp_path / "model"
    one.save(folder)
    with pytest.raises(KVLensError, match="save: .* already holds a kvlens model; pass overwrite=True to replace it"):
        two.save(folder)
    two.save(folder, overwrite=True)
    assert torch.equal(HookedKVRegressor.load(folder).read_in.weight, two.read_in.weight)
    whole = (folder / "maps.safetensors").read_bytes()
    for damaged in (whole[:40], b"", whole.replace(b"read_out.bias", b"read_out.blas")):
        (folder / "maps.safetensors").write_bytes(damaged)
        with pytest.raises(KVLensError, match=r"maps.safetensors is damaged"):
            HookedKVRegressor.load(folder)
    (folder / "maps.safetensors").unlink()
    with pytest.raises(KVLensError, match="cannot read .*maps.safetensors: No such file"):
        HookedKVRegressor.load(folder)
    one.transformer.save(tmp_path / "transformer")
    with pytest.raises(KVLensError, match="written by a regressor"):
        HookedKVRegressor.load(tmp_path / "transformer")
    with pytest.raises(KVLensError, match=r"holds no config.json"):
        HookedKVRegressor.load(tmp_path / "nothing")

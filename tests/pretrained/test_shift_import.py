"""Public forms of the KV-shift coefficients mean the same, and reach the model whole or not at all."""

import pytest
import torch
from precision import LAW, relative_error
from safetensors.torch import save_file
from small_models import SIZES, small_model, tokens
from tiny_hf import tiny_hf_model

from kvlens import HookedKVTransformer, KVLensError, KVShiftConfig
from kvlens.model.loading import shift_config_of
from kvlens.ops.kv_shift import coefficients_from_parameter
from kvlens.pretrained.shift_import import import_shift_coefficients, parameter_from_coefficients

N_LAYERS, N_KV = SIZES["n_layers"], SIZES["n_heads"]
# current token, previous token, for the first key-value head of layer 1; the others are drawn
ALPHA, BETA = (0.25, 0.75), (-0.5, 1.5)


def coefficients() -> dict[str, torch.Tensor]:
    """In kvlens' own form."""
    generator = torch.Generator().manual_seed(5)
    drawn = {
        f"blocks.{layer}.attn.{x}_shift_coef": torch.rand(N_KV, 2, generator=generator)
        for layer in range(N_LAYERS)
        for x in "kv"
    }
    drawn["blocks.1.attn.k_shift_coef"][0] = torch.tensor(ALPHA)
    drawn["blocks.1.attn.v_shift_coef"][0] = torch.tensor(BETA)
    return drawn


def in_public_form(form: str, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Written by hand from the papers' definitions: alpha1 is of the current token, column 0 of the previous one."""
    public = {}
    for name, coef in own.items():
        layer, x = name.split(".")[1], name.rsplit(".", 1)[1][0]
        at, current, previous = f"model.layers.{layer}.self_attn.", coef[:, 0].clone(), coef[:, 1].clone()
        if form == "numbers":
            stem = {"k": "alpha", "v": "beta"}[x]
            public |= {f"{at}{stem}1": current, f"{at}{stem}2": previous}
        elif form == "matrix":
            public[f"{at}{x.upper()}"] = torch.stack([previous, current], dim=1)
        else:
            public[f"{at}conv_{x}"] = torch.stack([previous, current], dim=1).view(1, 1, -1, 1, 2)
    return {"model.layers.0.self_attn.k_proj.weight": torch.zeros(3, 2), **public}


FORMS = ["numbers", "matrix", "conv"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_coefficients(form):
    own = coefficients()
    found = import_shift_coefficients(in_public_form(form, own))
    assert list(found) == list(own)
    assert all(torch.equal(found[name], own[name]) for name in own)


def test_column_0_is_the_previous_token_as_the_published_convolution_applies_it():
    """The convolution of KVSA app. F, word for word in its steps: one zero in front, windows of two, times K, summed."""
    keys = torch.arange(1.0, 6.0)[None, :, None, None]  # [batch, pos, kv_head, d_head]
    k = torch.tensor([[10.0, 1.0]])
    windows = torch.nn.functional.pad(keys, (0, 0, 0, 0, 1, 0)).unfold(1, 2, 1)
    published = (windows * k[None, None, :, None]).sum(-1).flatten()
    assert published.tolist() == [1, 12, 23, 34, 45]  # 10 * previous + 1 * current
    (coef,) = import_shift_coefficients({"layers.0.K": k}).values()
    assert coef.tolist() == [[1.0, 10.0]]
    assert import_shift_coefficients({"layers.0.K": k.view(1, 1, 1, 1, 2)})["blocks.0.attn.k_shift_coef"].equal(coef)


def test_longer_windows_keep_their_order():
    numbers = {f"h.0.attn.alpha{i}": torch.tensor([float(i)]) for i in (3, 1, 2)}
    assert import_shift_coefficients(numbers)["blocks.0.attn.k_shift_coef"].tolist() == [[1.0, 2.0, 3.0]]
    columns = import_shift_coefficients({"layers.12.attn.conv_v": torch.tensor([[3.0, 2.0, 1.0]])})
    assert columns["blocks.12.attn.v_shift_coef"].tolist() == [[1.0, 2.0, 3.0]]
    assert shift_config_of(columns) == KVShiftConfig(window=2, keys=False)
    assert shift_config_of({}) is None


def test_layers_may_differ_in_their_heads_and_other_tensors_are_passed_over():
    tensors = {f"model.layers.{layer}.self_attn.conv_k": torch.rand(1, 1, heads, 1, 2) for layer, heads in enumerate((2, 7, 2))}
    found = import_shift_coefficients({**tensors, "model.layers.0.conv_kernel": torch.zeros(1), "V": torch.zeros(1)})
    assert [list(coef.shape) for coef in found.values()] == [[2, 2], [7, 2], [2, 2]]


# Onto a model


@pytest.mark.parametrize("form", FORMS)
def test_a_model_takes_them_from_tensors_a_file_and_a_folder(form, tmp_path):
    own = coefficients()
    public = in_public_form(form, own)
    save_file(public, tmp_path / "model.safetensors")
    torch.save(public, tmp_path / "weights.bin")
    results = []
    for source in (public, tmp_path, tmp_path / "model.safetensors", str(tmp_path / "weights.bin")):
        model = small_model(kv_shift=KVShiftConfig(init="identity"))
        before = model.state_dict()["blocks.0.attn.W_K"].clone()
        model.load_shift_coefficients(source)
        state = model.state_dict()
        assert all(torch.equal(state[name], coef) for name, coef in own.items())
        assert torch.equal(state["blocks.0.attn.W_K"], before)
        results.append(model(tokens(2, 7)))
    assert all(torch.equal(result, results[0]) for result in results)


def test_the_loaded_coefficients_are_what_the_attention_uses():
    model = small_model(kv_shift=KVShiftConfig(), dtype=torch.float64)
    model.load_shift_coefficients(in_public_form("numbers", coefficients()))
    _, cache = model.run_with_cache(tokens(2, 7))
    for x, (current, previous) in {"k": ALPHA, "v": BETA}.items():
        raw, shifted = cache[f"blocks.1.attn.hook_{x}"][:, :, 0], cache[f"blocks.1.attn.hook_{x}_shifted"][:, :, 0]
        expected = current * raw
        expected[:, 1:] += previous * raw[:, :-1]
        assert relative_error(shifted, expected) < LAW


@pytest.mark.parametrize("parametrization", ["free", "gate", "clamp"])
def test_the_parameter_is_set_so_that_the_coefficients_are_the_checkpoints(parametrization):
    coef = torch.tensor([[0.25, 0.75], [0.9, 0.1], [0.5, 0.5]], dtype=torch.float64)
    parameter = parameter_from_coefficients(coef, parametrization)
    assert relative_error(coefficients_from_parameter(parameter, parametrization), coef) < LAW


def test_coefficients_rounded_to_bfloat16_still_pass_a_gate():
    first = torch.rand(101, generator=torch.Generator().manual_seed(2))
    coef = torch.stack([first, 1 - first], dim=1).bfloat16()
    parameter = parameter_from_coefficients(coef, "gate")
    # two roundings of numbers below 1
    torch.testing.assert_close(coefficients_from_parameter(parameter, "gate"), coef.float(), rtol=0, atol=2 * 2**-8)


@pytest.mark.parametrize(("parametrization", "reason"), [("gate", "positive coefficients"), ("clamp", r"in \[0, 1\] only")])
def test_a_gate_and_a_clamp_refuse_what_they_cannot_hold_and_stay_as_they_were(parametrization, reason):
    model = small_model(kv_shift=KVShiftConfig(parametrization=parametrization))
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(KVLensError, match=f"{reason}.*parametrization='free'"):
        model.load_shift_coefficients(in_public_form("numbers", coefficients()))  # layer 1 has -0.5 and 1.5
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_a_gate_refuses_coefficients_that_miss_1_by_more_than_their_rounding():
    for off, dtype in ((1e-6, torch.float32), (1e-15, torch.float64)):  # a few of each dtype's roundings of 1
        with pytest.raises(KVLensError, match="their sums are off by up to"):
            parameter_from_coefficients(torch.tensor([[0.25, 0.75 + off]], dtype=dtype), "gate")


def test_sources_that_cannot_be_read_are_described(tmp_path):
    model = small_model(kv_shift=KVShiftConfig())
    with pytest.raises(KVLensError, match="nowhere does not exist"):
        model.load_shift_coefficients(tmp_path / "nowhere")
    with pytest.raises(KVLensError, match="no weights in .*expected .*model.safetensors"):
        model.load_shift_coefficients(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"layers.0.K": "a.safetensors"}}')
    with pytest.raises(KVLensError, match=r"names \['a.safetensors'\].*incomplete"):
        model.load_shift_coefficients(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(KVLensError, match="is damaged: expected JSON with a weight_map"):
        model.load_shift_coefficients(tmp_path)
    for name in ("broken.safetensors", "broken.bin"):
        (tmp_path / name).write_bytes(b"not weights")
        with pytest.raises(KVLensError, match="broken"):
            model.load_shift_coefficients(tmp_path / name)


# In addition to the weights of an architecture that transformers supports


def shifted_llama(folder, form="numbers"):
    """A Llama folder whose checkpoint also holds shift coefficients, as a model with its own code would write it."""
    hf_model = tiny_hf_model("llama")
    shapes = {"numbers": (3,), "matrix": (3, 2)}
    names = {"numbers": ("alpha1", "alpha2", "beta1", "beta2"), "matrix": ("K", "V")}[form]
    generator = torch.Generator().manual_seed(3)
    extra = {
        f"model.layers.{layer}.self_attn.{name}": torch.rand(shapes[form], generator=generator)
        for layer in range(hf_model.config.num_hidden_layers)
        for name in names
    }
    hf_model.save_pretrained(folder)
    save_file({**hf_model.state_dict(), **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    return hf_model, extra


@pytest.mark.parametrize("form", ["numbers", "matrix"])
def test_a_checkpoint_of_a_known_architecture_keeps_its_shift(form, tmp_path):
    hf_model, extra = shifted_llama(tmp_path, form)
    model = HookedKVTransformer.from_pretrained(tmp_path)
    assert model.cfg.kv_shift == KVShiftConfig()
    x = tokens(2, 7)
    by_hand = HookedKVTransformer.from_pretrained("x", hf_model=hf_model, kv_shift=KVShiftConfig(init="identity"))
    unshifted = by_hand(x)
    by_hand.load_shift_coefficients(extra)
    assert torch.equal(model(x), by_hand(x))
    assert relative_error(unshifted, by_hand(x)) > 0.01  # the shift acts
    assert HookedKVTransformer.from_pretrained(tmp_path, first_n_layers=2).cfg.n_layers == 2


def test_kv_shift_may_add_to_what_the_checkpoint_has_but_not_take_from_it(tmp_path):
    shifted_llama(tmp_path)
    more = HookedKVTransformer.from_pretrained(tmp_path, kv_shift=KVShiftConfig(queries=True, init="identity"))
    assert torch.equal(more(tokens(2, 7)), HookedKVTransformer.from_pretrained(tmp_path)(tokens(2, 7)))
    with pytest.raises(KVLensError, match="without a parameter"):
        HookedKVTransformer.from_pretrained(tmp_path, kv_shift=KVShiftConfig(values=False))

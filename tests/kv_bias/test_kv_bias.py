"""A converted prompt as an object: arithmetic, selection, one prompt of a batch, its file, and the model that it fits."""

import copy
import functools
import os
import re
from dataclasses import fields, replace

import pytest
import torch
from precision import LAW
from safetensors.torch import save_file
from small_models import linear_model, relative_error, sharp, tokens
from stacked_tensors import with_stacked

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVBias, KVLensError, KVShiftConfig, combine, convert_prompt
from kvlens.base.config import HEAD_SIZES
from kvlens.kv_bias import Fingerprint, Layer, State
from kvlens.model import AttentionVariantConfig, Regularised, fingerprint

SHIFT = KVShiftConfig(window=3, queries=True)
TENSORS = ("b_kv", "b_d", "last_k", "last_v", "last_q")
SHIFT_STATE = TENSORS[2:]


@functools.cache
def hedgehog(**changes):
    return linear_model(**{"feature_map": "hedgehog", "kv_shift": SHIFT, **changes})


def bias_of(seed=0, batch=None, shift_state_seed=None, **changes):
    """Random numbers instead of a prompt; equal ``shift_state_seed`` gives equal shift states."""
    sizes = {"b_kv": (5, 12, 6), "b_d": (5, 12), "last_k": (3, 5, 6), "last_v": (3, 5, 6), "last_q": (3, 5, 6)}
    of_sums = torch.Generator().manual_seed(seed)
    of_shift_state = torch.Generator().manual_seed(1000 + (seed if shift_state_seed is None else shift_state_seed))

    def drawn(name):
        generator = of_shift_state if name in SHIFT_STATE else of_sums
        return torch.randn(1 if batch is None else batch, *sizes[name], generator=generator, dtype=torch.float64)

    def layer():
        return Layer((State(drawn("b_kv"), drawn("b_d")),), {x: drawn(f"last_{x}") for x in "kvq"})

    rest = dict(n_prompt_tokens=7, position_offset=7, fingerprint=hedgehog().fingerprint(), record=None, single=batch is None)
    return KVBias(**{"layers": (layer(), layer()), **rest, **changes})


def assert_identical(got, expected):
    """Bit for bit, dtypes included."""
    for name in TENSORS:
        a, b = got.stacked(name), expected.stacked(name)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        raw = [t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)]
        assert torch.equal(*raw), name
    for name in ("n_prompt_tokens", "position_offset"):
        a, b = getattr(got, name), getattr(expected, name)
        assert type(a) is type(b), name
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), name
    assert got.fingerprint == expected.fingerprint


# --- layers ---

LAYERED = ["rope after", "window 3 with queries", "gqa decay", "softmax, shifted, grouped", "softmax, alibi, grouped"]


@functools.cache
def converted(name, single=True):
    return convert_prompt(sharp(name), tokens(2, 9, seed=1)[0] if single else tokens(2, 9, seed=1))


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("name", LAYERED)
def test_a_bias_is_made_of_its_layers(name, single):
    bias = converted(name, single)
    assert (bias.batch_size, bias.n_rows) == ((None, 1) if single else (2, 2)) and len(bias.layers) == bias.n_layers
    part, whole = bias.layers[1].attention, bias.stacked("b_kv")
    assert torch.equal(part.b_kv[0] if single else part.b_kv, whole[1])
    whole.zero_()
    assert part.b_kv.any() and not torch.equal(bias.stacked("b_kv"), whole)


def test_the_old_names_say_what_is_used_instead():
    bias = converted("rope after")
    instead = {"b_KV": r"; use stacked\('b_kv'\), a copy, or layers\[i\]", "recurrent": r"; use layers\[i\].state", "b_kw": "$"}
    for name, words in instead.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}'{words}"):
            getattr(bias, name)


def test_a_replaced_field_asks_how_exact_the_bias_is_then():
    exact = converted("softmax, shifted, grouped")
    with pytest.raises(ValueError, match="record"):
        replace(exact, n_prompt_tokens=3)
    assert replace(exact, n_prompt_tokens=3, record=exact.fit).n_prompt_tokens == 3


@pytest.mark.parametrize("name", LAYERED)
def test_what_is_written_by_map_layers_is_read_and_a_copy_is_not(name):
    model, bias, text = sharp(name), converted(name), tokens(1, 5, seed=2)
    half = bias.map_layers(lambda layer: layer.each(lambda part: part.times(0.5)))
    with model.kv_bias(0.5 * bias):
        expected = model(text)
    with model.kv_bias(half):
        assert relative_error(model(text), expected) < LAW
    bias.stacked("b_kv").mul_(2)
    with model.kv_bias(0.5 * bias):
        assert torch.equal(model(text), expected)


def test_an_edited_bias_of_a_softmax_model_is_no_longer_called_exact():
    exact, linear = converted("softmax, shifted, grouped"), converted("rope after")
    assert exact.fit is None and exact.map_layers(lambda layer: layer).fit.history == ("layers changed",)
    assert exact.with_attention(exact.attention).fit.history == ("layers changed",)
    assert linear.map_layers(lambda layer: layer).fit is None  # whatever its numbers are, the model's own features read them


def test_whole_layers_are_selected_with_the_rows_that_they_have():
    bias = converted("softmax, shifted, grouped")
    chosen, single = bias.select(layers=[1]), bias.select(heads=[(1, 0)])
    n_kv_heads = bias.attention[0].n_kv_heads
    assert [part.n_heads for part in chosen.attention] == [n_kv_heads] * bias.n_layers
    assert single.attention[1].n_heads > n_kv_heads
    assert torch.equal(chosen.attention[1].b_kv, bias.attention[1].b_kv) and not chosen.attention[0].b_kv.any()


def test_a_file_keeps_the_record_of_a_linear_bias_too(tmp_path):
    softmax, linear = converted("softmax, shifted, grouped"), converted("rope after")
    recorded = replace(linear, record=softmax.map_layers(lambda layer: layer).fit)
    recorded.save(tmp_path / "b")
    assert KVBias.load(tmp_path / "b").fit.history == ("layers changed",)


def test_a_name_of_no_tensor_is_refused_with_those_there_are():
    with pytest.raises(KVLensError, match=r"is called 'keys'; there are b_kv, b_d, last_k, last_v, last_q"):
        converted("rope after").stacked("keys")


def test_a_layer_times_a_number_for_each_head():
    bias, by = bias_of(1, 3), torch.tensor([1.0, -2.0, 0.0, 0.5, -0.25], dtype=torch.float64)
    part, times = bias.layers[0].attention, bias.layers[0].times(by).attention
    assert torch.equal(times.b_kv, by[:, None, None] * part.b_kv) and torch.equal(times.b_d, by[:, None] * part.b_d)


# --- arithmetic ---


@pytest.mark.parametrize("batch", [None, 3])
def test_arithmetic_acts_on_the_sums_and_keeps_the_shift_state(batch):
    a, b = bias_of(1, batch, shift_state_seed=9), bias_of(2, batch, shift_state_seed=9, n_prompt_tokens=4)
    for got, of_a, of_b, n_tokens in (
        (a + b, 1, 1, 11),
        (a - b, 1, -1, 3),
        (0.5 * a, 0.5, 0, 7),
        (a * 3, 3, 0, 7),
        (a / 4, 0.25, 0, 7),
        (-a, -1, 0, 7),
        (combine(a, b, weights=(2, -0.5)), 2, -0.5, 3),
        (b - a, -1, 1, 0),
        (combine(a), 1, 0, 7),
    ):
        assert torch.equal(got.stacked("b_kv"), of_a * a.stacked("b_kv") + of_b * b.stacked("b_kv"))
        assert torch.equal(got.stacked("b_d"), of_a * a.stacked("b_d") + of_b * b.stacked("b_d"))
        assert all(torch.equal(got.stacked(name), a.stacked(name)) for name in SHIFT_STATE)
        assert (got.n_prompt_tokens, got.position_offset, got.fingerprint) == (n_tokens, 7, a.fingerprint)


def test_arithmetic_leaves_its_arguments_as_they_were():
    a, b = bias_of(1, shift_state_seed=9), bias_of(2, shift_state_seed=9)
    combine(a, b, weights=(2, 3), shift_state="zero")
    a.select(layers=[0])
    a.zero_like()
    sum([a, b])
    assert_identical(a, bias_of(1, shift_state_seed=9))
    assert_identical(b, bias_of(2, shift_state_seed=9))


def test_token_counts_of_unequal_prompts_add_row_by_row():
    a, b = bias_of(1, 3, shift_state_seed=9, n_prompt_tokens=torch.tensor([1, 2, 4])), bias_of(2, 3, shift_state_seed=9)
    head = [(1, 0)]
    for got, expected in (
        (a + b, [8, 9, 11]),
        (a + a, [2, 4, 8]),
        (b - a, [6, 5, 3]),
        (b - b.select(heads=head) + a.select(heads=head), [1, 2, 4]),
    ):
        assert got.n_prompt_tokens.tolist() == expected


def test_the_sum_of_prompts_of_any_length_is_their_concatenation_if_order_does_not_matter():
    # one layer, no positions, no shift: b_KV and b_D are sums over tokens and over nothing else
    model, x, y = hedgehog(n_layers=1, positional_embedding_type="none", kv_shift=None), tokens(2, 9), tokens(2, 5, seed=2)
    a, b, whole = (convert_prompt(model, text) for text in (x, y, torch.cat([x, y], dim=1)))
    assert a.position_offset != b.position_offset and a.starts_where(b)
    for added in (a + b, sum([a, b])):
        for name in ("b_kv", "b_d"):
            assert (added.stacked(name) - whole.stacked(name)).norm() <= LAW * whole.stacked(name).norm()
        assert added.n_prompt_tokens == whole.n_prompt_tokens == 14
    assert ((whole - b).stacked("b_kv") - a.stacked("b_kv")).norm() <= LAW * whole.stacked("b_kv").norm()
    rotary = hedgehog(rotary_placement="before", kv_shift=None)
    assert not convert_prompt(rotary, x).starts_where(convert_prompt(rotary, y))


def test_any_two_prompts_of_a_shifted_model_add_and_the_sum_predicts_what_follows_the_second():
    """One shifted layer without positions: the sum misses only the pair at the seam, which the first's shift state holds."""
    model = hedgehog(n_layers=1, positional_embedding_type="none", kv_shift=KVShiftConfig(window=1))
    first, second = tokens(2, 7, seed=1), tokens(2, 7, seed=2)
    added = convert_prompt(model, first) + convert_prompt(model, second)
    whole = convert_prompt(model, torch.cat([first, second], dim=1))
    for name in SHIFT_STATE:
        assert (added.stacked(name) - whole.stacked(name)).norm() <= LAW * (1 + whole.stacked(name).norm())
    # per layer and head, one of 14 tokens' features and values is that of a token without a predecessor
    assert (added.stacked("b_d") - whole.stacked("b_d")).norm() < 0.2 * whole.stacked("b_d").norm()


@pytest.mark.parametrize("batch", [None, 3])
def test_the_shift_state_of_a_sum_is_the_last_ones_of_a_difference_the_firsts_or_the_requested(batch):
    a, b, c = (bias_of(seed, batch) for seed in (1, 2, 3))  # three prompts, three shift states
    of_a, of_b, of_c = (bias.stacked("b_kv") for bias in (a, b, c))
    later, last = replace(b, position_offset=8, record=None), replace(c, position_offset=9, record=None)
    for got, expected, total in (
        (a + b, b, of_a + of_b),
        (a - b, a, of_a - of_b),
        (sum([a, b, c]), c, of_a + of_b + of_c),
        (combine(a, later, last, shift_state="first"), a, of_a + of_b + of_c),
        (combine(a, later, last, shift_state="last"), last, of_a + of_b + of_c),
        (combine(a, b, shift_state="zero"), a.zero_like(), of_a + of_b),
    ):
        assert torch.equal(got.stacked("b_kv"), total)
        assert all(torch.equal(got.stacked(name), expected.stacked(name)) for name in SHIFT_STATE)
        assert got.position_offset == expected.position_offset
    assert combine(a, b, c, shift_state="first").n_prompt_tokens == 21


def test_subtracting_with_different_offsets_proposes_what_subtracts():
    a, b = bias_of(1, shift_state_seed=9), bias_of(2, shift_state_seed=9, position_offset=8)
    with pytest.raises(KVLensError, match=r"^subtracting KV biases.*\(7 and 8\)") as refused:
        a - b
    (proposed,) = re.findall(r"kvlens\.(combine\(.*?\)) subtracts", str(refused.value))
    found = eval(proposed, {"combine": combine, "a": a, "b": b})
    for name in ("b_kv", "b_d"):
        assert torch.equal(found.stacked(name), a.stacked(name) - b.stacked(name))
    assert found.position_offset == a.position_offset


def test_what_is_no_arithmetic_is_a_type_error():
    a = bias_of(1)
    for nonsense in (lambda: a + 3, lambda: 3 + a, lambda: a * a, lambda: a - "x", lambda: 2 / a, lambda: a * torch.ones(2)):
        with pytest.raises(TypeError):
            nonsense()


# --- selection ---


@pytest.mark.parametrize("batch", [None, 3])
def test_select_keeps_the_union_and_zeroes_the_rest(batch):
    a = bias_of(1, batch)
    got = a.select(layers=[1], heads=[(0, 3), (1, 2)])
    for layer in range(2):
        for head in range(5):
            kept = layer == 1 or (layer, head) == (0, 3)
            for name, index in (("b_kv", -3), ("b_d", -2)):
                part, whole = (x.stacked(name)[layer].select(index, head) for x in (got, a))
                assert torch.equal(part, whole if kept else torch.zeros_like(whole))
    assert all(torch.equal(got.stacked(name), a.stacked(name)) for name in SHIFT_STATE)
    assert (got.n_prompt_tokens, got.position_offset) == (7, 7)


@pytest.mark.parametrize("batch", [None, 3])
def test_selections_that_complete_each_other_add_up_to_the_whole(batch):
    a = bias_of(1, batch)
    parts = a.select(heads=[(0, 1), (1, 4)]), a.select(heads=[(0, h) for h in (0, 2, 3, 4)] + [(1, h) for h in range(4)])
    assert torch.equal((parts[0] + parts[1]).stacked("b_kv"), a.stacked("b_kv"))
    assert torch.equal((parts[0] + parts[1]).stacked("b_d"), a.stacked("b_d"))
    assert torch.equal((a.select(layers=[0]) + a.select(layers=[1])).stacked("b_kv"), a.stacked("b_kv"))
    assert torch.equal(a.select(layers=[0, 1]).stacked("b_kv"), a.stacked("b_kv"))
    assert not a.select().stacked("b_kv").any()
    assert torch.equal(a.select(layers=[-1]).stacked("b_kv"), a.select(layers=[1]).stacked("b_kv"))
    assert torch.equal(a.select(heads=[(-1, -5)]).stacked("b_kv"), a.select(heads=[(1, 0)]).stacked("b_kv"))


def test_zero_like_zeroes_the_shift_state_too_and_begins_where_it_did():
    bias = bias_of(1)
    zero = bias.zero_like()
    for name in TENSORS:
        assert zero.stacked(name).shape == bias.stacked(name).shape
        assert not zero.stacked(name).any()
    assert (zero.position_offset, zero.fingerprint) == (7, bias.fingerprint)


# --- one prompt of a batch ---


def test_select_prompt_takes_one_row_of_everything():
    lengths = torch.tensor([3, 1, 8])
    a = bias_of(1, 3, n_prompt_tokens=lengths, position_offset=lengths + 2)
    for index in (0, 1, 2, -1):
        one = a.select_prompt(index)
        assert all(torch.equal(one.stacked(name), a.stacked(name)[:, index]) for name in TENSORS)
        assert (one.n_prompt_tokens, one.position_offset) == (int(lengths[index]), int(lengths[index]) + 2)
        assert type(one.n_prompt_tokens) is int
        assert one.batch_size is None
    assert bias_of(1, 3).select_prompt(2).n_prompt_tokens == 7


# --- what it tells of itself ---


def test_counts_and_words():
    a, batch = bias_of(1), bias_of(1, 3, n_prompt_tokens=torch.tensor([3, 1, 8]))
    assert (a.n_layers, a.n_heads, a.batch_size) == (2, 5, None)
    assert a.num_parameters == 2 * 5 * 12 * 6 + 2 * 5 * 12
    assert (batch.batch_size, batch.num_parameters) == (3, 3 * a.num_parameters)
    assert repr(a) == (
        "KVBias(2 layers x 5 heads, d_phi 12, d_head 6, shift state of k/v/q, n_prompt_tokens=7, position_offset=7)"
    )
    assert "batch 3" in repr(batch)
    assert "n_prompt_tokens=[3, 1, 8]" in repr(batch)


def test_dtypes_and_graphs_can_be_left_behind():
    a = bias_of(1, 3, n_prompt_tokens=torch.tensor([3, 1, 8]))
    single = a.to(torch.float32)
    assert {single.stacked(name).dtype for name in TENSORS} == {torch.float32}
    assert single.n_prompt_tokens.dtype == torch.int64
    assert_identical(a.to("cpu"), a)
    graph = with_stacked(a, b_kv=a.stacked("b_kv").requires_grad_())
    assert (0.5 * graph).stacked("b_kv").requires_grad
    assert not graph.detach().stacked("b_kv").requires_grad


@pytest.mark.parametrize("tensor", TENSORS)
def test_what_is_not_finite_is_never_attached(tensor):
    model, a = hedgehog(), bias_of(1)
    for value in (float("nan"), float("inf")):
        broken = a.stacked(tensor)
        broken[1].flatten()[-1] = value
        with pytest.raises(KVLensError, match=f"attach_kv_bias: {tensor} of layer 1 is not finite"):
            model.attach_kv_bias(with_stacked(a, **{tensor: broken}))
        assert model.attached_kv_bias is None


# --- the file ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "lengths"), [(None, 7), (3, 7), (3, torch.tensor([3, 1, 8])), (1, 7)], ids=["single", "batch", "unequal", "one"]
)
def test_round_trip_bit_for_bit(tmp_path, batch, lengths, dtype):
    a = bias_of(1, batch, n_prompt_tokens=lengths, position_offset=lengths).to(dtype)
    extremes = [-0.0, *(getattr(torch.finfo(dtype), x) for x in ("tiny", "max", "min"))]
    a.layers[0].attention.b_kv.flatten()[:4] = torch.tensor(extremes, dtype=dtype)
    a.save(tmp_path / "prompt.safetensors")
    assert_identical(KVBias.load(tmp_path / "prompt.safetensors"), a)
    assert_identical(KVBias.load(str(tmp_path / "prompt.safetensors")), a)


def test_round_trip_of_a_view_with_a_graph_and_an_empty_shift_state(tmp_path):
    a = bias_of(1, 3)
    turned = a.stacked("b_d").transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    a = with_stacked(a, last_q=a.stacked("last_q")[:, :, :0], b_d=turned)
    (0.5 * a.select_prompt(1)).save(tmp_path / "prompt.safetensors")
    loaded = KVBias.load(tmp_path / "prompt.safetensors")
    assert_identical(loaded, 0.5 * a.select_prompt(1))
    assert loaded.stacked("last_q").shape == (2, 0, 5, 6)
    assert not loaded.stacked("b_d").requires_grad


def test_files_of_others_are_refused(tmp_path):
    path = tmp_path / "prompt.safetensors"
    for metadata in (None, {"format": "pt"}, {"format": "somebody.else"}):
        save_file({"b_KV": torch.zeros(2)}, path, metadata)
        with pytest.raises(KVLensError, match="was not saved by kvlens as kvlens.KVBias"):
            KVBias.load(path)
    path.write_text("not a bias at all, but long enough to be one")
    with pytest.raises(KVLensError, match="truncated or not a safetensors file"):
        KVBias.load(path)


def test_one_changed_weight_is_noticed_and_how_a_shift_was_initialized_is_no_part_of_the_structure():
    free, same = (HookedKVTransformer(hedgehog(kv_shift=KVShiftConfig(init=init)).cfg) for init in ("identity", "uniform"))
    assert free.fingerprint().kv_shift == same.fingerprint().kv_shift
    assert free.fingerprint().weights != same.fingerprint().weights
    bias = convert_prompt(free, tokens(1, 4))
    free.attach_kv_bias(bias)
    free.detach_kv_bias()
    free.blocks[1].attn.k_shift_coef.data[0, 0] += 1e-6
    with pytest.raises(KVLensError, match=r"weights differs \(same structure, other weights\)"):
        free.attach_kv_bias(bias)


CHANGES = {
    "format version 7, this kvlens reads 6: upgrade": lambda tensors, metadata, meta: metadata.update(format_version="7"),
    **{f"lacks {name}": lambda tensors, metadata, meta, name=name: tensors.pop(name) for name in ("b_KV", "b_D", *SHIFT_STATE)},
    "has glow, which this version does not know; upgrade": lambda tensors, metadata, meta: meta.update(glow=1),
    "has flow, which this version": lambda tensors, metadata, meta: tensors.update({"flow.a": torch.zeros(1)}),
    "lacks a complete fingerprint": lambda tensors, metadata, meta: meta.update(fingerprint={"n_layers": 2}),
    "is damaged: its format version is 'abc'": lambda tensors, metadata, meta: metadata.update(format_version="abc"),
    "damaged .JSONDecodeError|not JSON": lambda tensors, metadata, meta: "not json",
    "incomplete or damaged .KeyError": lambda tensors, metadata, meta: "{}",
}


@pytest.mark.parametrize("words", CHANGES)
def test_newer_incomplete_and_damaged_files_are_refused(words, rewrite):
    path = rewrite(bias_of(1), CHANGES[words])
    with pytest.raises(KVLensError, match=words):
        KVBias.load(path)


@pytest.mark.parametrize("interrupted", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("error", "seen"), [(OSError(28, "No space left on device"), KVLensError), (KeyboardInterrupt(), None)]
)
def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, interrupted, error, seen):
    path = tmp_path / "prompt.safetensors"
    bias_of(1).save(path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(os, interrupted, fail)
        with pytest.raises(seen or type(error)):
            bias_of(2).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["prompt.safetensors"]
    bias_of(2).save(path)
    assert_identical(KVBias.load(path), bias_of(2))


# --- the model that it fits ---


def other(value):
    return 7 if value is None else value + 1 if isinstance(value, (int, float)) else f"not {value}"


@pytest.mark.parametrize("field", [f.name for f in fields(Fingerprint)])
def test_a_fingerprint_that_differs_is_refused_by_its_field(field):
    mine = hedgehog().fingerprint()
    different = ((1, 1, 1, 1),) if field == "heads" else other(getattr(mine, field))
    theirs = replace(mine, **{field: different})
    with pytest.raises(KVLensError, match=f"attach: {field} differs"):
        mine.check(theirs, "attach")
    mine.check(replace(mine), "attach")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (dict(seed=2), "weights"),
        (dict(n_layers=3), "n_layers"),
        (dict(n_heads=6, d_model=36), "n_heads"),
        (dict(d_vocab=19), "d_vocab"),
        (dict(feature_map="taylor"), "d_phi"),
        (dict(normalizer="none"), "normalizer"),
        (dict(positional_embedding_type="none"), "positional_embedding_type"),
        (dict(rotary_dim=4), "rest"),
        (dict(rotary_base=500), "rest"),
        (dict(kv_shift=KVShiftConfig(window=2, queries=True)), "kv_shift"),
        (dict(kv_shift=KVShiftConfig(window=3, queries=True, parametrization="clamp")), "kv_shift"),
        (dict(use_attn_scale=False), "attn_scale"),
        (dict(attention="softmax"), "attention"),
    ],
)
def test_a_bias_does_not_fit_another_model_and_says_why(changes, field):
    bias = convert_prompt(hedgehog(), tokens(1, 4))
    with pytest.raises(KVLensError, match=f"attach_kv_bias: {field} differs"):
        hedgehog(**changes).attach_kv_bias(bias)
    assert hedgehog(**changes).attached_kv_bias is None


CHANGED = {
    "attention": "softmax",
    "feature_map": "taylor",
    "decay": [0.5] * 5,
    "kv_shift": None,
    "attention_variant": AttentionVariantConfig(regularised=Regularised(0.1)),
    "alibi_slopes": [0.5] * 5,
    "attn_types": ["local", "global"],
    **{f"{size}_by_layer": [2, 1] for size in HEAD_SIZES},
}


def test_every_field_of_the_configuration_counts_unless_it_is_named_as_one_without_effect():
    """So that a new field counts too. ``device`` is no part of a stored configuration."""
    model, without_effect = hedgehog(), set()
    for field in (f.name for f in fields(HookedKVTransformerConfig)):
        changed = copy.copy(model.cfg)
        value = getattr(changed, field)
        changed.__dict__[field] = CHANGED.get(field, not value if isinstance(value, bool) else other(value))
        if fingerprint._fingerprint(model, changed) == model.fingerprint():
            without_effect.add(field)
    assert without_effect == {*fingerprint.WITHOUT_EFFECT, "device"}

"""Models come from Hugging Face folders, loaded models and plain HookedTransformers, and go to disk and back."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from precision import LAW
from small_models import (
    ATTENTION_VARIANTS,
    BLOCKS,
    LINEAR,
    SOFTMAX,
    linear_model,
    plain_model,
    relative_error,
    sharp,
    small_model,
    tokens,
)
from tiny_hf import D_VOCAB, tiny_hf_model, tiny_tokenizer
from tiny_hf import KINDS as ALL_KINDS
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens.weight_processing import ProcessWeights
from transformers.utils import logging as hf_logging

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVLensError, KVShiftConfig, convert_prompt
from kvlens.base.weights import pieces, processed_end
from kvlens.files import checksum_of_json
from kvlens.pretrained import load_pretrained_parts

KINDS = ["gpt2", "gpt_neox", "qwen3"]


def hf_tokens() -> torch.Tensor:
    return torch.randint(0, D_VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))


def test_loading_a_folder_writes_nothing_to_the_screen(tmp_path, capfd):
    """transformers' bars would be red boxes in a notebook; its setting is what it was."""
    tiny_hf_model("gpt2").save_pretrained(tmp_path / "m")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    before = hf_logging.is_progress_bar_enabled()
    capfd.readouterr()
    HookedKVTransformer.from_pretrained(tmp_path / "m", device="cpu")
    written = capfd.readouterr()
    assert (written.out, written.err) == ("", "")
    assert hf_logging.is_progress_bar_enabled() == before


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_a_loaded_model_and_a_shift_at_the_identity(kind):
    given = dict(hf_model=tiny_hf_model(kind), tokenizer=tiny_tokenizer())
    plain = HookedKVTransformer.from_pretrained("gpt2", fold_value_biases=False, **given)
    shifted = HookedKVTransformer.from_pretrained("gpt2", kv_shift=KVShiftConfig(init="identity"), **given)
    x = hf_tokens()
    assert torch.equal(plain(x), shifted(x))


@pytest.mark.parametrize("processed", [False, True])
def test_a_copy_of_a_model_at_hand_is_independent_of_it(processed):
    plain, x = plain_model(dtype=torch.float64), tokens(2, 7)
    if processed:
        plain.process_weights_()
    copy = HookedKVTransformer.from_hooked_transformer(plain)
    expected = plain(x)
    assert relative_error(copy(x), expected) < 1e-11
    copy.W_E.data.zero_()
    assert torch.equal(plain(x), expected)


KEPT = [*LINEAR, *ATTENTION_VARIANTS, *(f"softmax, {row}" for row in (*SOFTMAX, *BLOCKS))]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", KEPT)
def test_save_and_load_keep_everything(name, tmp_path):
    model = sharp(name)
    model.save(tmp_path / "model")
    loaded = HookedKVTransformer.load(tmp_path / "model").requires_grad_(False)
    assert torch.equal(loaded(tokens(2, 7)), model(tokens(2, 7)))
    assert loaded.cfg.to_json() == model.cfg.to_json()
    assert loaded.fingerprint() == model.fingerprint()
    assert not list(tmp_path.glob("**/*.bin")) + list(tmp_path.glob("**/*.pt"))


def test_the_tokenizer_is_saved_with_the_model(tmp_path):
    model = HookedKVTransformer.from_pretrained("x/y", hf_model=tiny_hf_model("llama"), tokenizer=tiny_tokenizer())
    model.save(tmp_path / "model")
    loaded = HookedKVTransformer.load(tmp_path / "model")
    text = "the cat sat, and 🙂"
    assert torch.equal(loaded.to_tokens(text), model.to_tokens(text))
    assert torch.equal(loaded.to_tokens(text, prepend_bos=False), model.to_tokens(text, prepend_bos=False))
    assert torch.equal(loaded(text), model(text))


def test_saving_refuses_a_folder_with_something_in_it(tmp_path):
    model = small_model()
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(KVLensError, match="not empty"):
        model.save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    model.save(tmp_path / "model")
    model.save(tmp_path / "model", overwrite=True)
    assert {p.name for p in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors"}


def config_with(change):
    """What changes the folder's config.json, with a checksum that fits."""

    def edit(folder):
        config = json.loads((folder / "config.json").read_text())
        change(config)
        config["checksum"] = checksum_of_json(config)
        (folder / "config.json").write_text(json.dumps(config))

    return edit


DAMAGES = [
    (
        "model.safetensors is damaged",
        lambda f: (f / "model.safetensors").write_bytes(b"short"),
    ),
    ("cannot read .*model.safetensors: No such file", lambda f: (f / "model.safetensors").unlink()),
    ("not JSON", lambda f: (f / "config.json").write_text("{")),
    ("no config.json", lambda f: (f / "config.json").unlink()),
    ("not written by kvlens", config_with(lambda c: c.update(format="other"))),
    ("upgrade kvlens", config_with(lambda c: c.update(format_version=99))),
    ("make it again, or read it with the kvlens that wrote it", config_with(lambda c: c.update(format_version=0))),
    ("unexpected keyword argument 'atention'", config_with(lambda c: c["config"].update(atention="softmax"))),
    ("do not fit", config_with(lambda c: c["config"].update(attention="softmax", trainable_kv_bias=False))),
    *(
        (words, config_with(lambda c, change=change: c["config"].update(change)))
        for words, change in (
            ("hold 2 layers", dict(n_layers=10_000)),
            ("hold 2 layers", dict(n_layers=1)),
            ("do not fit the configuration: embed.W_E", dict(d_vocab=10**9)),
            ("do not fit the configuration", dict(d_model=10**6, d_head=10**6, n_heads=1)),
            ("n_layers must be", dict(n_layers="2")),
            ("did you mean 'float64'|dtype must be", dict(dtype="float99")),
            ("config.json", dict(kv_shift=7)),
            ("act_fn", dict(act_fn=None)),
            ("did you mean 'linear'", dict(attention="linearr")),
            ("eps must be", dict(eps="x")),
        )
    ),
]


@pytest.mark.parametrize(("words", "damage"), DAMAGES)
def test_a_damaged_folder_is_refused_with_the_reason_before_anything_is_built(words, damage, tmp_path):
    linear_model(feature_map="hedgehog").save(tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(KVLensError, match=f"(?s)load: .*({words})"):
        HookedKVTransformer.load(tmp_path / "model")


def test_half_precision_storage_is_a_rounding_of_the_weights(tmp_path):
    model = linear_model(dtype=torch.float32)
    model.save(tmp_path / "half", stored_dtype=torch.float16)
    loaded = HookedKVTransformer.load(tmp_path / "half")
    assert loaded.W_E.dtype == torch.float32
    assert torch.equal(loaded.W_E, model.W_E.half().float())


WITHOUT_PROCESSING = ("softmax, RMS at the end", "softmax, shortformer", "softmax, norms over all heads")


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", [name for name in KEPT if name not in ATTENTION_VARIANTS])
def test_weight_processing_keeps_the_output_or_is_refused(name):
    model, x = sharp(name), tokens(2, 9)
    expected = model(x).log_softmax(-1)
    if name in WITHOUT_PROCESSING:
        with pytest.raises(KVLensError, match="fold_ln and center_writing_weights would change"):
            model.process_weights_()
    else:
        model.process_weights_()
    assert relative_error(model(x).log_softmax(-1), expected) < LAW


@pytest.mark.usefixtures("in_float64")
def test_value_biases_and_factors_stay_where_values_are_clamped():
    model = sharp("softmax, clamped")
    for step in ("fold_value_biases", "refactor_factored_attn_matrices"):
        with pytest.raises(KVLensError, match=f"{step}.* would change this model's output: values are clamped"):
            model.process_weights_(**{step: True})


@pytest.mark.usefixtures("in_float64")
def test_value_biases_fold_under_a_shift_of_keys():
    model = small_model(kv_shift=KVShiftConfig(values=False), dtype=torch.float64)
    expected = model(tokens(2, 9)).log_softmax(-1)
    model.process_weights_(fold_value_biases=True)
    assert bool((model.b_V == 0).all())
    assert relative_error(model(tokens(2, 9)).log_softmax(-1), expected) < LAW


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounded_model_keeps_its_biases_through_save_load_and_copy(dtype, tmp_path):
    model = linear_model(dtype=torch.float32)
    bias = convert_prompt(model, tokens(1, 4))
    model.save(tmp_path / "stored rounded", stored_dtype=dtype)
    HookedKVTransformer.load(tmp_path / "stored rounded").attach_kv_bias(bias)
    model.to(dtype, print_details=False)
    model.save(tmp_path / "rounded")
    loaded = HookedKVTransformer.load(tmp_path / "rounded")
    loaded.attach_kv_bias(bias)
    HookedKVTransformer.from_hooked_transformer(model).attach_kv_bias(bias)
    loaded.W_E.data[0, 0] += 1
    with pytest.raises(KVLensError, match="weights differs"):
        loaded.attach_kv_bias(bias)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", sorted(ALL_KINDS))
def test_no_weight_is_left_unset(kind, request):
    """A parameter that no checkpoint brings would differ from one load to the next."""
    hf_model = tiny_hf_model(kind)
    request.getfixturevalue("empty_is_nan")
    model = HookedKVTransformer.from_pretrained("tiny", hf_model=hf_model, verify=True)
    assert [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())] == []


ROWS = ["learned", "rotary", "rotary, grouped"]


@pytest.mark.parametrize("row", ROWS)
def test_a_shift_grafted_at_the_identity_changes_nothing(row):
    plain, x = plain_model(dtype=torch.float64, **SOFTMAX[row]), tokens(3, 11)
    shift = KVShiftConfig(window=2, queries=True, init="identity")
    ours = HookedKVTransformer.from_hooked_transformer(plain, kv_shift=shift)
    assert relative_error(ours(x), plain(x)) < LAW
    assert ours.blocks[0].attn.q_shift_coef.shape == (ours.cfg.n_heads, 3)
    assert ours.blocks[0].attn.k_shift_coef.shape == (ours.cfg.n_kv_heads, 3)


def test_given_alibi_slopes_are_used():
    slopes = [0.5, 0.25, 0.0, 1.0, 2.0]
    model = small_model(positional_embedding_type="alibi", alibi_slopes=slopes, dtype=torch.float64)
    _, cache = model.run_with_cache(tokens(1, 4))
    bare = small_model(positional_embedding_type="alibi", alibi_slopes=[0.0] * 5, dtype=torch.float64)
    _, without = bare.run_with_cache(tokens(1, 4))
    difference = cache["attn_scores", 0][0, :, 3, :] - without["attn_scores", 0][0, :, 3, :]
    expected = -torch.tensor(slopes, dtype=torch.float64)[:, None] * torch.arange(3, -1, -1)
    assert relative_error(difference, expected) < LAW


def test_a_cache_that_a_plain_model_filled_is_refused():
    plain, ours = plain_model(), small_model(kv_shift=KVShiftConfig())
    cache = TransformerLensKeyValueCache.init_cache(plain.cfg, "cpu", 2)
    plain(tokens(2, 4), past_kv_cache=cache, attention_mask=torch.ones(2, 4, dtype=torch.long))
    with pytest.raises(KVLensError, match="already holds 4 keys"):
        ours(tokens(2, 1), past_kv_cache=cache)


STEPS = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases", "refactor_factored_attn_matrices")
FAMILIES = ["gpt2", "gpt_neox", "llama", "qwen2", "bloom", "gptj", "opt", "mixtral", "apertus"]
LEFT_OUT = [("refactor_factored_attn_matrices",), ("fold_ln", STEPS[4]), ("center_unembed", STEPS[4])]
CASES = [*((kind, ()) for kind in FAMILIES), *((kind, left_out) for kind in ("gpt2", "llama") for left_out in LEFT_OUT)]


@pytest.mark.parametrize(("kind", "left_out"), CASES)
def test_piece_by_piece_equals_all_at_once(kind, left_out):
    """Layers and embeddings to the bit; the unembedding, whose sums have another order, up to float32's rounding of them."""
    dtype = (torch.float32, torch.bfloat16)[CASES.index((kind, left_out)) % 2]
    steps = {step: step not in left_out for step in STEPS}
    steps["refactor_factored_attn_matrices"] &= kind in ("gpt2", "opt")  # it is not for rotary positions
    parts = load_pretrained_parts("x", hf_model=tiny_hf_model(kind), dtype=dtype, device="cpu")
    cfg = HookedKVTransformerConfig.from_tl(parts.cfg)
    weights = HookedKVTransformer(cfg).fill_missing_keys(dict(parts.state_dict))
    before = {name: weight.clone() for name, weight in weights.items()}
    expected = ProcessWeights.process_weights(dict(before), cfg, **steps)
    found = {}
    for names, process in pieces(cfg, weights):
        found |= process({name: weights[name] for name in names}, steps)
    folded = {"ln_final.w", "ln_final.b"} if steps["fold_ln"] else set()  # TransformerLens leaves ones and zeros
    assert expected.keys() - folded <= found.keys() <= expected.keys()
    assert all(found[name].dtype == expected[name].dtype for name in found)
    ends = [name for name in found if name.startswith("unembed.")]
    assert all(torch.equal(found[name], expected[name]) for name in found if name not in ends)
    for name in ends:
        off = (found[name].double() - expected[name].double()).norm()
        assert off <= 10 * torch.finfo(dtype).eps * expected[name].double().norm()  # a few roundings of each number
    assert all(torch.equal(weights[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("kind", ["LN", "RMS"])
@pytest.mark.parametrize("final_rms", [True, False])
def test_the_processed_unembedding_gives_the_same_log_probabilities_in_float64(kind, final_rms):
    cfg = HookedKVTransformerConfig(
        n_layers=1, d_model=6, d_head=3, n_ctx=5, d_vocab=11, act_fn="relu", normalization_type=kind, final_rms=final_rms
    )
    draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, w_u, b_u, w, b = draw(5, 6), draw(6, 11), draw(11), draw(6), draw(6)
    b = 0.0 * b if kind == "RMS" or final_rms else b
    centered = x if kind == "RMS" or final_rms else x - x.mean(-1, keepdim=True)
    normal = centered / (centered.square().mean(-1, keepdim=True) + cfg.eps).sqrt()
    before = (normal * w + b) @ w_u + b_u
    given = {"unembed.W_U": w_u.clone(), "unembed.b_U": b_u.clone(), "ln_final.w": w, "ln_final.b": b}
    found = processed_end(cfg, dict(given), dict.fromkeys(STEPS, True))
    after = normal @ found["unembed.W_U"] + found["unembed.b_U"]
    torch.testing.assert_close(after.log_softmax(-1), before.log_softmax(-1), rtol=0, atol=1e-11)
    assert float(after.mean(-1).abs().max()) < 1e-11 < float(before.mean(-1).abs().min())
    assert torch.equal(given["unembed.W_U"], w_u)


def test_parameters_are_the_models_own():
    """Neither shared with the model that they come from, nor left as a view of it."""
    hf_model = tiny_hf_model("gpt2")
    for processing in (True, False):
        options = dict.fromkeys(STEPS[:4], processing)
        model = HookedKVTransformer.from_pretrained("x", hf_model=hf_model, device="cpu", **options)
        theirs = {weight.untyped_storage().data_ptr() for weight in hf_model.parameters()}
        assert all(weight.is_contiguous() and weight.requires_grad for weight in model.parameters())
        assert theirs.isdisjoint(weight.untyped_storage().data_ptr() for weight in model.parameters())
        assert len({weight.data_ptr() for weight in model.parameters()}) == len(list(model.parameters()))


SCRIPT = """
import resource, sys
import torch
from kvlens import HookedKVTransformer, KVTransformerBridge

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

cls, folder, dtype = sys.argv[1:]
load = HookedKVTransformer.from_pretrained if cls == "hooked" else KVTransformerBridge.boot_transformers
load(sys.argv[2] + "/tiny", device="cpu")  # what is imported or set up once is there
before = peak()
load(sys.argv[2] + "/m", device="cpu", dtype=getattr(torch, dtype))
print((peak() - before) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="ru_maxrss has other units and meanings elsewhere")
@pytest.mark.parametrize(
    ("front_end", "stored", "dtype", "most"),
    [
        ("hooked", torch.float32, "float32", 2.2),
        ("hooked", torch.bfloat16, "float32", 2.2),
        ("hooked", torch.bfloat16, "bfloat16", 1.3),
        ("bridge", torch.float32, "float32", 1.3),
    ],
)
def test_peak_memory_of_loading(front_end, stored, dtype, most, tmp_path):
    """Against the weights in float32, with the pages of the file that are in memory; a tied vocabulary is a tenth of them."""
    sizes = dict(hidden_size=768, intermediate_size=2112, num_hidden_layers=8, vocab_size=8000, max_position_embeddings=64)
    model = tiny_hf_model("llama", **sizes, tie_word_embeddings=True).to(stored)
    model.save_pretrained(tmp_path / "m")
    tiny_hf_model("llama").save_pretrained(tmp_path / "tiny")
    weights = 4 * sum(weight.numel() for weight in model.parameters()) / 2**20
    command = [sys.executable, "-c", SCRIPT, front_end, str(tmp_path), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < most * weights

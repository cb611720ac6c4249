"""Models come from Hugging Face folders, loaded models and plain HookedTransformers, and go to disk and back."""

import json

import pytest
import torch
from precision import LAW
from small_models import linear_model, plain_model, relative_error, small_model, tokens
from tiny_hf import D_VOCAB, tiny_hf_model, tiny_tokenizer
from tiny_hf import KINDS as ALL_KINDS
from transformers.utils import logging as hf_logging

from kvlens import HookedKVTransformer, KVLensError, KVShiftConfig, convert_prompt
from kvlens.base import HookedTransformer
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


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_logits_of_transformer_lens(kind, tmp_path):
    """Which tests/pretrained/test_pretrained_parts.py holds to Hugging Face's."""
    folder = tmp_path / "my-llama-run"
    tiny_hf_model(kind).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    model = HookedKVTransformer.from_pretrained(folder, dtype=torch.float64)
    assert isinstance(model, HookedKVTransformer)
    assert model.tokenizer is not None
    x = hf_tokens()
    parts = load_pretrained_parts(folder, dtype=torch.float64)
    plain = HookedTransformer(parts.cfg, parts.tokenizer)
    plain.load_and_process_state_dict(dict(parts.state_dict))
    assert relative_error(model(x).log_softmax(-1), plain(x).log_softmax(-1)) < LAW
    # kvlens' way of processing, which takes less memory, sums the unembedding in another order
    plain.load_state_dict({name: model.state_dict()[name] for name in plain.state_dict()})
    assert relative_error(model(x), plain(x)) < LAW


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


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        dict(feature_map="random", n_random_features=7),
        dict(feature_map="hedgehog", trainable_kv_bias=True, decay=None),
        dict(normalizer="none", decay=[0.5, 0.6, 0.7, 0.8, 0.9], rotary_adjacent_pairs=True),
    ],
)
def test_save_and_load_keep_everything(kwargs, tmp_path):
    model = linear_model(**kwargs)
    model.save(tmp_path / "model")
    loaded = HookedKVTransformer.load(tmp_path / "model")
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
    ("model.safetensors is missing", lambda f: (f / "model.safetensors").unlink()),
    ("not JSON", lambda f: (f / "config.json").write_text("{")),
    ("no config.json", lambda f: (f / "config.json").unlink()),
    ("not written by kvlens", config_with(lambda c: c.update(format="other"))),
    ("upgrade kvlens", config_with(lambda c: c.update(format_version=99))),
    ("make it again, or read it with the kvlens that wrote it", config_with(lambda c: c.update(format_version=0))),
    ("did you mean 'attention'", config_with(lambda c: c["config"].update(atention="softmax"))),
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
            ("kv_shift must be", dict(kv_shift=7)),
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


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kwargs", [{}, dict(kv_shift=None), dict(normalizer="none")])
def test_weight_processing_keeps_the_output_of_a_linear_model(kwargs):
    model = linear_model(**kwargs)
    x = tokens(2, 9)
    expected = model(x).log_softmax(-1)
    model.process_weights_()
    assert relative_error(model(x).log_softmax(-1), expected) < LAW


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


@pytest.mark.parametrize("kind", sorted(ALL_KINDS))
def test_no_weight_is_left_unset(kind, request):
    """A parameter that no checkpoint brings would differ from one load to the next."""
    hf_model = tiny_hf_model(kind)
    request.getfixturevalue("empty_is_nan")
    model = HookedKVTransformer.from_pretrained("tiny", hf_model=hf_model, verify=True)
    assert [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())] == []

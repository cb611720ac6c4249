"""Folders and in-memory models give Hugging Face's logits through a plain HookedTransformer, with the network shut."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from precision import float64, relative_error
from safetensors.torch import load_file, save_file
from tiny_hf import D_VOCAB, KINDS, N_CTX, law_of, tiny_hf_model, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from kvlens import HookedKVTransformer, KVLensError, KVShiftConfig
from kvlens.base import HookedTransformer
from kvlens.base.weights import allowed_steps
from kvlens.pretrained import PretrainedParts, check_trial, is_local_folder, load_pretrained_parts, official_name, translation
from kvlens.pretrained.translation import FAMILIES

TOKENS = torch.randint(0, D_VOCAB, (2, 17), generator=torch.Generator().manual_seed(7))


pytestmark = pytest.mark.usefixtures("no_network")


@pytest.fixture
def temporary_root(tmp_path, monkeypatch):
    """A temporary folder of its own, to see what is left in it."""
    root = tmp_path / "scratch"
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    return root


def save(model, folder: Path, tokenizer=None) -> Path:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def hooked(parts: PretrainedParts, processed: bool) -> HookedTransformer:
    model = HookedTransformer(parts.cfg, parts.tokenizer, move_to_device=False)
    steps = dict.fromkeys(("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"), processed)
    model.load_and_process_state_dict(dict(parts.state_dict), **allowed_steps(parts.cfg, steps))
    return model


@torch.no_grad()
def assert_same_function(parts: PretrainedParts, hf_model, processed: bool) -> None:
    expected, actual = hf_model(TOKENS).logits, hooked(parts, processed)(TOKENS)
    if processed:  # a centered unembedding shifts the logits of a position together
        expected, actual = expected.log_softmax(-1), actual.log_softmax(-1)
    assert actual.dtype == torch.float64 and relative_error(actual, expected) < law_of(hf_model.config.model_type)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", KINDS)
def test_models_in_memory_and_in_a_folder_give_their_own_logits(kind, tmp_path):
    """Whatever the folder is called, and in bfloat16 with the rounded weights."""
    hf_model = tiny_hf_model(kind)
    folder = save(hf_model, tmp_path / "gemma-bert-t5/my-llama-run")
    before = {name: weight.clone() for name, weight in hf_model.state_dict().items()}
    config_before = hf_model.config.to_dict()
    double = dict(dtype=torch.float64, device="cpu")
    plain = load_pretrained_parts("my-llama-run", hf_model=hf_model, **double)
    stored = load_pretrained_parts(str(folder), **double)
    assert_same_function(plain, hf_model, processed=False)
    assert_same_function(stored, hf_model, processed=True)
    assert (stored.tokenizer, stored.cfg.tokenizer_name) == (None, None)
    assert (stored.cfg.d_vocab, stored.cfg.model_name) == (D_VOCAB, "my-llama-run")
    assert not any(weight.requires_grad for weight in plain.state_dict.values())
    for low in (
        load_pretrained_parts("x", hf_model=hf_model, dtype="bfloat16", device="cpu"),
        load_pretrained_parts(folder, torch_dtype=torch.bfloat16, device="cpu"),
    ):
        assert low.cfg.dtype == torch.bfloat16
        assert low.state_dict.keys() == plain.state_dict.keys()
        if not kind.startswith("gemma"):  # whose embedding and norms are computed, in the dtype that is asked for
            assert all(torch.equal(weight, plain.state_dict[name].bfloat16()) for name, weight in low.state_dict.items())
    if not low.cfg.num_experts:  # TransformerLens keeps their router in float32 and then cannot run in bfloat16
        with torch.no_grad():
            logits = hooked(low, False)(TOKENS)
        assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
    assert all(torch.equal(weight, before[name]) for name, weight in hf_model.state_dict().items())
    assert hf_model.config.to_dict() == config_before
    assert all(weight.requires_grad for weight in hf_model.parameters())


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-2-7b-hf", "gemma-2b", "pythia-70m", "nobody/ever"])
def test_official_and_other_names_take_sizes_from_the_model_in_memory(name):
    hf_model = tiny_hf_model("llama")
    assert hf_model.config.architectures is None
    parts = load_pretrained_parts(name, hf_model=hf_model, tokenizer=tiny_tokenizer(), device="cpu", dtype=torch.float64)
    assert (parts.cfg.d_model, parts.cfg.n_key_value_heads, parts.cfg.n_ctx) == (24, 3, N_CTX)
    assert_same_function(parts, hf_model, processed=True)


def test_low_precision_model_is_widened_before_processing():
    low = tiny_hf_model("llama").bfloat16()
    parts = load_pretrained_parts("x", hf_model=low, device="cpu")
    assert {weight.dtype for weight in parts.state_dict.values()} == {torch.float32}
    with float64():
        wide = tiny_hf_model("llama")
        wide.load_state_dict(low.state_dict())  # with rotary angles that were not rounded
        parts = load_pretrained_parts("x", hf_model=low, device="cpu", dtype=torch.float64)
        assert_same_function(parts, wide, processed=True)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "opt"])
def test_first_n_layers_and_n_ctx_are_those_of_the_shortened_model(kind):
    short = tiny_hf_model(kind)
    parts = load_pretrained_parts("x", hf_model=short, first_n_layers=2, n_ctx=19, device="cpu", dtype=torch.float64)
    assert (parts.cfg.n_layers, parts.cfg.n_ctx) == (2, 19)
    del short.get_submodule(FAMILIES[type(short).__name__].layers)[2:]
    short.config.num_hidden_layers = 2
    assert_same_function(parts, short, processed=True)


def test_options_reach_the_config():
    hf_model = tiny_hf_model("gpt2")
    parts = load_pretrained_parts("x", hf_model=hf_model, default_prepend_bos=False, device="cpu")
    assert (parts.cfg.normalization_type, parts.cfg.default_prepend_bos, parts.cfg.device) == ("LN", False, "cpu")
    assert load_pretrained_parts("x", hf_model=tiny_hf_model("gpt_neox")).cfg.default_prepend_bos is False


def test_longer_rotary_context_warns(logged):
    assert load_pretrained_parts("x", hf_model=tiny_hf_model("llama"), n_ctx=150).cfg.n_ctx == 150
    assert any("n_ctx=150" in each for each in logged)


# Tokenizers


def test_tokenizer_in_memory_works_offline_and_is_not_changed():
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    before = (dict(tokenizer.init_kwargs), tokenizer.encode("the cat"), tokenizer.pad_token)
    parts = load_pretrained_parts("gpt2", hf_model=tiny_hf_model("gpt2"), tokenizer=tokenizer, device="cpu")
    model = hooked(parts, processed=True)
    plain = tokenizer.encode("the cat")
    assert model.to_tokens("the cat").tolist() == [[0, *plain]]
    assert model.to_tokens("the cat", prepend_bos=False).tolist() == [plain]
    assert model.to_string(torch.tensor(plain)) == "the cat"
    assert model.to_str_tokens("the cat")[0] == "<|endoftext|>"
    assert model.tokenizer.padding_side == "left"
    assert parts.cfg.tokenizer_name == "tiny-tokenizer"
    assert (tokenizer.init_kwargs, tokenizer.encode("the cat"), tokenizer.pad_token) == before


@pytest.mark.parametrize("name", ["run", "phi-gemma-llama"])
def test_tokenizer_in_the_folder_is_used_and_one_that_is_given_wins(name, tmp_path):
    folder = save(tiny_hf_model("gpt2"), tmp_path / name, tiny_tokenizer())
    parts = load_pretrained_parts(folder, device="cpu")
    assert parts.cfg.tokenizer_name == str(folder)
    plain = tiny_tokenizer().encode("the dog sat")
    assert hooked(parts, processed=False).to_tokens("the dog sat").tolist() == [[0, *plain]]
    given = load_pretrained_parts(folder, tokenizer=tiny_tokenizer("mine"), device="cpu")
    assert given.cfg.tokenizer_name == "mine"
    assert load_pretrained_parts(folder, hf_model=tiny_hf_model("gpt2")).cfg.tokenizer_name == str(folder)


@pytest.mark.parametrize("change", ["no_bos", "colon_in_bos", "no_name", "says_no_bos"])
def test_odd_tokenizers_are_taken_without_a_reload(change):
    tokenizer = tiny_tokenizer()
    if change == "no_bos":
        tokenizer.bos_token = None
    if change == "colon_in_bos":
        tokenizer.add_special_tokens({"bos_token": "<a:bos>"})
    if change == "no_name":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<|endoftext|>")
    if change == "says_no_bos":
        tokenizer.init_kwargs["add_bos_token"] = False
    parts = load_pretrained_parts("some-run", hf_model=tiny_hf_model("gpt2"), tokenizer=tokenizer, device="cpu")
    model = hooked(parts, processed=False)
    plain = tiny_tokenizer().encode("the log")
    assert model.to_tokens("the log", prepend_bos=False).tolist() == [plain]
    bos = tokenizer.bos_token_id if change == "colon_in_bos" else 0
    assert model.to_tokens("the log", prepend_bos=True).tolist() == [[bos, *plain]]


def test_official_name_takes_its_tokenizer_from_the_cache_if_it_is_there_and_fits(tmp_path, monkeypatch):
    def cached(repo, file):
        return str(tmp_path / file) if (tmp_path / file).exists() else None

    monkeypatch.setattr("kvlens.tokenizer.try_to_load_from_cache", cached)
    parts = load_pretrained_parts("gpt2-small", hf_model=tiny_hf_model("gpt2"))
    assert (parts.tokenizer, parts.cfg.tokenizer_name, parts.cfg.model_name) == (None, None, "gpt2")
    tiny_tokenizer().save_pretrained(tmp_path)
    parts = load_pretrained_parts("gpt2-small", hf_model=tiny_hf_model("gpt2"))
    assert parts.cfg.tokenizer_name == "gpt2"
    assert parts.tokenizer.encode("the cat") == [0, *tiny_tokenizer().encode("the cat")]
    assert load_pretrained_parts("gpt2", hf_model=tiny_hf_model("gpt2", vocab_size=101)).tokenizer is None


def test_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    hf_model = tiny_hf_model("gpt2", vocab_size=101)
    with pytest.raises(KVLensError, match="the model's vocabulary only 101"):
        load_pretrained_parts("x", hf_model=hf_model, tokenizer=tiny_tokenizer())
    with pytest.raises(KVLensError, match="the model's vocabulary only 101"):
        load_pretrained_parts(save(hf_model, tmp_path / "run", tiny_tokenizer()))


def test_broken_tokenizer_in_the_folder_is_named(tmp_path):
    folder = save(tiny_hf_model("gpt2"), tmp_path / "run", tiny_tokenizer())
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(KVLensError, match=r"the tokenizer in .*run cannot be loaded"):
        load_pretrained_parts(folder)


# What is left behind


def test_nothing_is_left_behind(temporary_root, tmp_path, capsys):
    folder = save(tiny_hf_model("llama"), tmp_path / "run", tiny_tokenizer())
    random_state, directory, default = torch.get_rng_state(), os.getcwd(), torch.get_default_dtype()
    load_pretrained_parts("x", hf_model=tiny_hf_model("llama"), dtype=torch.bfloat16)
    load_pretrained_parts(folder, dtype=torch.bfloat16)
    with pytest.raises(KVLensError):
        load_pretrained_parts("x", hf_model=tiny_hf_model("llama"), first_n_layers=9)
    assert list(temporary_root.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (os.getcwd(), torch.get_default_dtype()) == (directory, default)
    assert capsys.readouterr().out == ""


def test_folder_that_is_missing_or_incomplete_is_described(tmp_path):
    with pytest.raises(KVLensError, match="nowhere does not exist; expected a folder"):
        load_pretrained_parts(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(KVLensError, match=r"no config.json .* the folder is empty"):
        load_pretrained_parts(empty)
    folder = save(tiny_hf_model("gpt2"), tmp_path / "run")
    with pytest.raises(KVLensError, match=r"config.json is a file; expected a folder"):
        load_pretrained_parts(folder / "config.json")
    (folder / "model.safetensors").unlink()
    with pytest.raises(KVLensError, match=r"no weights .*model.safetensors; found \['config.json'"):
        load_pretrained_parts(folder)
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(KVLensError, match=r"model.safetensors is truncated or no safetensors file"):
        load_pretrained_parts(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(KVLensError, match="holds an adapter, not a full model"):
        load_pretrained_parts(folder)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("llama", "model.layers.3.mlp.up_proj.weight"),
        ("llama", "model.layers.1.self_attn.q_proj.bias"),
        ("gpt2", "transformer.h.7.ln_1.weight"),
        ("gpt2", "v_head.weight"),
        ("gpt_neox", "gpt_neox.layers.1.attention.more.weight"),
    ],
)
def test_a_file_with_tensors_that_the_configuration_does_not_name_is_refused(kind, extra, tmp_path):
    folder = save(tiny_hf_model(kind), tmp_path / "run")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, extra: torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(KVLensError, match=rf"hold 1 tensors that its configuration has no place for: \['{extra}'\]"):
        load_pretrained_parts(folder)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("gpt2", "h.0.attn.bias"),
        ("gpt2", "transformer.h.1.attn.masked_bias"),
        ("gptj", "transformer.h.1.attn.bias"),
        ("gpt_neo", "transformer.h.0.attn.attention.masked_bias"),
        ("gpt_neox", "gpt_neox.layers.1.attention.rotary_emb.inv_freq"),
        ("gpt_neox", "gpt_neox.layers.1.attention.bias"),
        ("llama", "model.layers.2.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_masks_and_frequencies_that_older_files_hold_are_passed_over(kind, extra, tmp_path):
    hf_model = tiny_hf_model(kind)
    folder = save(hf_model, tmp_path / "run")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, extra: torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    parts = load_pretrained_parts(folder, device="cpu", dtype=torch.float64)
    assert_same_function(parts, hf_model, processed=False)


def test_folder_that_lacks_a_weight_is_refused(tmp_path):
    folder = save(tiny_hf_model("llama"), tmp_path / "run")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(KVLensError, match=r"lack 1 of the model's parameters .*layers.1.mlp.up_proj"):
        load_pretrained_parts(folder)


@pytest.mark.parametrize(
    ("kind", "name"), [("gpt2", "lm_head.weight"), ("gpt_neox", "embed_out.weight"), ("llama", "lm_head.weight")]
)
def test_a_tied_model_with_another_head_in_its_file_is_refused(kind, name, tmp_path):
    folder = save(tiny_hf_model(kind, tie_word_embeddings=True), tmp_path / "run")
    weights = load_file(folder / "model.safetensors")
    embedding = tiny_hf_model(kind, tie_word_embeddings=True).get_input_embeddings().weight.detach()
    for head, refused in ((embedding.clone(), False), (embedding + 1, True)):
        save_file({**weights, name: head}, folder / "model.safetensors", metadata={"format": "pt"})
        if refused:
            with pytest.raises(KVLensError, match="has tie_word_embeddings=True in its configuration and an output embedding"):
                load_pretrained_parts(folder)
        else:
            load_pretrained_parts(folder)


def test_unreadable_and_unknown_configs_are_refused(tmp_path):
    folder = save(tiny_hf_model("llama"), tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"model_type": "perceptron"}, "transformers cannot read .*config.json.*perceptron"),
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            "architecture MambaForCausalLM.*Supported: .*Llam",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "holds a quantized model"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(KVLensError, match=message):
            load_pretrained_parts(folder)


def test_a_window_longer_than_the_context_makes_no_local_layers():
    sliding = tiny_hf_model("qwen2", layer_types=None, sliding_window=5, max_window_layers=1)
    assert load_pretrained_parts("x", hf_model=sliding).cfg.attn_types == ["global", "local", "local"]
    assert not load_pretrained_parts("x", hf_model=sliding, n_ctx=5).cfg.use_local_attn


def test_official_names_have_any_case():
    assert official_name("GPT2-small") == "gpt2"


def test_what_counts_as_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert not is_local_folder("gpt2")  # an official name wins over a folder that holds no model
    (tmp_path / "gpt2" / "config.json").write_text("{}")
    assert is_local_folder("gpt2")
    (tmp_path / "my-run").mkdir()
    assert is_local_folder("my-run")
    for name in ("./run", "../run", "~/run", "/a/run", "a/b/run"):
        assert is_local_folder(name)
    assert is_local_folder(Path("gtp2"))
    for name in ("gtp2", "EleutherAI/pythia-70m", "someone/some-model"):
        assert not is_local_folder(name)


TRIED = ["gpt2", "gpt_neox", "llama", "bloom", "mixtral", "olmo3"]


@pytest.fixture
def wrong_eps(monkeypatch):
    """A field that is forgotten: the norms keep another epsilon than the configuration's."""
    translate = translation.translate
    monkeypatch.setattr(translation, "translate", lambda *args: {**translate(*args), "eps": 0.01})


@pytest.mark.parametrize("kind", TRIED)
def test_a_field_that_is_forgotten_is_noticed(kind, wrong_eps, tmp_path):
    """In memory without processing, in a folder with it."""
    hf_model = tiny_hf_model(kind)
    hf_model.save_pretrained(folder := tmp_path / "m")
    says = "does not compute what transformers computes: on 32 tokens"
    with pytest.raises(KVLensError, match=says):
        HookedKVTransformer.from_pretrained_no_processing("x", hf_model=hf_model, device="cpu")
    with pytest.raises(KVLensError, match=says):
        HookedKVTransformer.from_pretrained(folder, device="cpu")
    HookedKVTransformer.from_pretrained(folder, device="cpu", verify=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neo"])
def test_rounding_is_allowed_for(kind, dtype):
    """The true difference was 0.07 to 1.03 of what one rounding of every output changes; four times that is allowed."""
    hf_model = tiny_hf_model(kind)
    HookedKVTransformer.from_pretrained("x", hf_model=hf_model, dtype=dtype, device="cpu", verify=True)
    HookedKVTransformer.from_pretrained("x", hf_model=hf_model.bfloat16(), dtype=dtype, device="cpu", verify=True)


def test_huge_activations_of_a_few_dimensions_are_no_difference():
    """Trained models have them: thousands in two dimensions of the stream, a few in the others."""
    hf_model = tiny_hf_model("gpt2")
    hf_model.transformer.h[0].mlp.c_proj.bias.data[3] = 3000.0
    for dtype in ("float32", "bfloat16"):
        HookedKVTransformer.from_pretrained("x", hf_model=hf_model, dtype=dtype, device="cpu", verify=True)


def test_the_model_that_is_compared_with_is_left_as_it_is():
    hf_model = tiny_hf_model("gpt2").train()
    hf_model.transformer.h[0].eval()
    modes = [module.training for module in hf_model.modules()]
    state = torch.get_rng_state()
    found = load_pretrained_parts("x", hf_model=hf_model, device="cpu", verify=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in hf_model.modules()] == modes
    assert not any(module._forward_hooks for module in hf_model.modules())
    assert found.trial is not None
    assert found.trial.tokens.shape == (1, 32)
    check_trial(found.trial, hf_model.eval()(found.trial.tokens).logits)
    with pytest.raises(KVLensError, match="does not compute"):
        check_trial(found.trial, torch.full((1, 32, D_VOCAB), torch.nan))


@pytest.mark.parametrize("arguments", [dict(first_n_layers=1), dict(kv_shift=KVShiftConfig()), dict(move_to_device=False)])
def test_parts_and_extensions_of_a_model_are_compared_too(arguments, wrong_eps):
    """Of the first layers alone, and before a shift is added."""
    given = dict(hf_model=tiny_hf_model("gpt2"), device="cpu", **arguments)
    with pytest.raises(KVLensError, match="does not compute"):
        HookedKVTransformer.from_pretrained("x", **given)
    HookedKVTransformer.from_pretrained("x", **given, verify=False)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "mixtral", "gemma3", "olmo3"])
def test_the_first_layers_are_those_of_transformers(kind):
    hf_model = tiny_hf_model(kind)
    before = hf_model.state_dict().keys(), hf_model.config.to_dict()
    HookedKVTransformer.from_pretrained("x", hf_model=hf_model, first_n_layers=1, device="cpu", verify=True)
    assert (hf_model.state_dict().keys(), hf_model.config.to_dict()) == before


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "gpt_oss"])
def test_experts_in_half_precision_are_compared_by_the_median_token(kind, seed):
    """A rounding sends a token to another expert, here and there."""
    HookedKVTransformer.from_pretrained("x", hf_model=tiny_hf_model(kind, seed), dtype="bfloat16", device="cpu", verify=True)


def test_what_has_no_comparison_and_what_is_no_answer_is_refused():
    with pytest.raises(KVLensError, match="verify"):
        HookedKVTransformer.from_pretrained("x", hf_model=tiny_hf_model("gpt2"), device="cpu", verify="yes")

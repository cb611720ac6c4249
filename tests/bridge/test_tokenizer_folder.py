"""Folders as the hub has them: a byte-level tokenizer's files, and for Qwen3.5 a checkpoint of images and text."""

import copy
import json

import pytest
import torch
import transformers as tf
from precision import LAW, relative_error
from safetensors.torch import load_file, save_file
from tiny_hf import tiny_hf_model, with_drawn_weights
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvlens import KVTransformerBridge, convert_prompt

TEXT = "The state of a recurrent layer keeps the prompt; its keys decay. Où est la clé? 状态 keeps 12 keys."
PROMPT, QUESTION = "The keys of the prompt decay.", " What keeps the state?"
END, PAD = "<|im_end|>", "<|endoftext|>"
VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=24, patch_size=4)


def write_tokenizer(folder):
    """tokenizer.json and tokenizer_config.json with the fields of Qwen's; returns the plain tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {str(tokenizer.token_to_id(x)): {"content": x, "special": True} for x in (PAD, END)}
    settings = dict(tokenizer_class="Qwen2Tokenizer", add_bos_token=False, bos_token=None, eos_token=END, pad_token=PAD)
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "added_tokens_decoder": added, "unk_token": None}))
    return tokenizer


def qwen3_5_of_images_and_text():
    text = tiny_hf_model("qwen3_5").config.to_dict()
    model = tf.Qwen3_5ForConditionalGeneration(tf.Qwen3_5Config(text_config=text, vision_config=VISION))
    return with_drawn_weights(model)


@pytest.fixture(params=[qwen3_5_of_images_and_text, lambda: tiny_hf_model("qwen3")], ids=["qwen3_5", "qwen3"])
def folder(request, tmp_path):
    request.param().save_pretrained(tmp_path)
    return tmp_path


@torch.no_grad()
def test_strings_in_and_out(folder):
    plain = write_tokenizer(folder)
    model = KVTransformerBridge.boot_transformers(folder, dtype=torch.float64)
    ids = plain.encode(PROMPT + QUESTION).ids
    assert model.to_tokens(PROMPT + QUESTION)[0].tolist() == ids and len(ids) < len(PROMPT + QUESTION)
    assert model.to_string(torch.tensor(ids)) == PROMPT + QUESTION
    options = dict(max_new_tokens=16, do_sample=False, stop_at_eos=False, verbose=False)
    whole = model.generate(PROMPT + QUESTION, **options)
    assert whole.startswith(PROMPT + QUESTION)
    bias = convert_prompt(model, PROMPT)
    assert bias.n_prompt_tokens == len(plain.encode(PROMPT).ids)
    with model.kv_bias(bias):
        assert PROMPT + model.generate(QUESTION, **options) == whole


@torch.no_grad()
def test_a_checkpoint_of_images_and_text_gives_its_language_model(tmp_path):
    """Weights that it has no place for, as published checkpoints have them, are left out: images, several tokens at once."""
    both = qwen3_5_of_images_and_text()
    both.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.language_model.layers.0.linear_attn.") for name in weights)
    assert any(name.startswith("model.visual.") for name in weights)
    in_memory = KVTransformerBridge.boot_transformers(copy.deepcopy(both))
    save_file({**weights, "mtp.fc.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for dtype in (torch.float64, torch.bfloat16):
        model = KVTransformerBridge.boot_transformers(tmp_path, dtype=dtype)
        held = model.original_model.state_dict()
        assert not any("visual" in name or "mtp" in name for name in held)
        for name, stored in weights.items():
            if name.startswith(("model.language_model.", "lm_head.")):
                same_shape = (x for x in held.values() if x.shape == stored.shape)
                assert any(torch.equal(x, stored.to(dtype)) for x in same_shape), name
        if dtype == torch.float64:
            text = model.to_tokens(TEXT)
            assert model.fingerprint() == in_memory.fingerprint() and model.cfg.architecture == "Qwen3_5ForCausalLM"
            assert torch.equal(model(text), in_memory(text))
            assert relative_error(model(text), both(text).logits) < LAW

"""What the bridge loads is the model in the files, computed as Transformers computes it; anything else is refused in words."""

import copy
import json

import pytest
import torch
import transformers as tf
from bridge_models import PROMPT, TEXT, error_of_conversion, some_tokens
from precision import LAW, relative_error
from safetensors.torch import load_file, save_file
from small_models import small_model
from tiny_hf import D_VOCAB, HALF_ROTATED, LATENT, N_CTX, ROWS, WINDOWED, tiny_hf_model, tiny_tokenizer, with_drawn_weights
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import kvlens
from kvlens import HookedKVTransformer, KVLensError, KVTransformerBridge, combine, convert_prompt
from kvlens.bridge import load
from kvlens.bridge.native import hooked_attention
from kvlens.model import heads_per_layer, loading

pytestmark = pytest.mark.usefixtures("without_gradients", "no_network")

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)


def lacks(weights):
    del weights["model.layers.1.self_attn.v_proj.weight"]


def loses_its_decay(weights):
    del weights["model.layers.0.linear_attn.A_log"]


@pytest.mark.parametrize(
    ("family", "change", "config", "says"),
    [
        ("llama", lacks, {}, r"lack 1 of the model's parameters .*layers.1.self_attn.v_proj"),
        ("llama", None, {"num_hidden_layers": 2}, r"hold 9 tensors that its configuration has no place for: \['model.layers.2"),
        ("qwen3_5", loses_its_decay, {}, r"lack 1 of the model's parameters .*A_log"),
        ("llama", None, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "are quantized.*dequantize"),
    ],
    ids=["lacks", "layers", "decay", "quantized"],
)
def test_bad_input_of_a_folder_that_does_not_fit_is_refused(family, change, config, says, tmp_path):
    tiny_hf_model(family).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if change is not None:
        change(weights)
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**whole, **config}))
    with pytest.raises(KVLensError, match=says):
        KVTransformerBridge.boot_transformers(tmp_path)


def test_bad_input_of_a_truncated_file_is_refused(tmp_path):
    tiny_hf_model("llama").save_pretrained(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(KVLensError, match="model.safetensors is truncated .*not fully covered"):
        KVTransformerBridge.boot_transformers(tmp_path)


def soft_capped(config):
    config.attn_logit_softcapping = 2.0


def both_ways(config):
    config.use_bidirectional_attention = True


def unscaled(config):
    config.scale_attn_weights = False


def rotated_in_part(config):
    config.rope_parameters = HALF_ROTATED["rope_parameters"]


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("gpt2", unscaled, "the logits of a plain pass differ"),
        ("gpt_oss", rotated_in_part, "the logits of a plain pass differ"),
        ("gemma3", soft_capped, "the logits of a plain pass differ"),
        ("gemma3", both_ways, "the logits of a converted prompt differ"),
    ],
)
def test_bad_input_of_a_tested_family_that_the_bridge_computes_otherwise_is_refused(family, change, says):
    plain = tiny_hf_model(family)
    change(plain.config)
    model = type(plain)(plain.config).eval()
    model.load_state_dict(plain.state_dict(), strict=False)
    with pytest.raises(KVLensError, match=rf"does not compute what {type(plain).__name__} computes: .* {says} .* by [\d.]+%"):
        KVTransformerBridge.boot_transformers(model)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: tf.RecurrentGemmaForCausalLM(
                tf.RecurrentGemmaConfig(
                    num_hidden_layers=3, vocab_size=D_VOCAB, hidden_size=24, num_attention_heads=6, lru_width=24, head_dim=4
                )
            ),
            "RecurrentGemmaForCausalLM has no way .*: layer 0 .* has neither a mixer",
        ),
        (
            lambda: tf.T5ForConditionalGeneration(
                tf.T5Config(d_model=24, d_kv=4, d_ff=20, num_layers=2, num_heads=6, vocab_size=D_VOCAB)
            ),
            "no stack of decoder blocks",
        ),
        (
            lambda: tiny_hf_model("codegen", n_embd=24, n_layer=2, n_head=4, rotary_dim=2, n_positions=N_CTX, n_ctx=N_CTX),
            "has neither a mixer in kvlens nor queries and scores",
        ),
        (lambda: tiny_hf_model("opt", do_layer_norm_before=False, word_embed_proj_dim=16), "fails on TransformerLens' bridge"),
        (
            lambda: tiny_hf_model("olmo", clip_qkv=0.8),
            r"layer 0 clamps queries, keys and values \(clip_qkv\)",
        ),
    ],
    ids=["recurrent_gemma", "t5", "codegen", "opt_350m", "clamped"],
)
def test_bad_input_of_other_architectures_is_refused(make, says, tmp_path):
    with pytest.raises(KVLensError, match=says):
        KVTransformerBridge.boot_transformers(make().eval())
    make().save_pretrained(tmp_path)
    with pytest.raises(KVLensError, match=says):
        KVTransformerBridge.boot_transformers(tmp_path, dtype=torch.float64)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("youtu", dict(num_key_value_heads=6, **LATENT, q_lora_rank=8)),
        ("deepseek_v2", {**ROWS["deepseek_v3"][1], "qk_nope_head_dim": 4}),  # its kernels want even sizes
        ("exaone4", WINDOWED),
        ("qwen3_5_moe_text", ROWS["qwen3_next"][1]),
        *(("granitemoehybrid", {**ROWS["granite_hybrid"][1], "position_embedding_type": kind}) for kind in ("nope", None)),
    ],
    ids=["youtu", "deepseek_v2", "exaone4", "qwen3_5_moe", "granite_nope", "granite_none"],
)
def test_families_and_configurations_without_a_row_of_their_own_are_exact(model_type, config, tmp_path):
    tiny_hf_model(model_type, **config).save_pretrained(tmp_path)
    assert error_of_conversion(KVTransformerBridge.boot_transformers(tmp_path, dtype=torch.float64)) < LAW


def test_a_family_whose_heads_differ_from_what_its_hook_points_show_is_refused():
    """BitNet has a norm behind the heads, which the bridge does not show."""
    with pytest.raises(KVLensError, match="what BitNetForCausalLM computes: .* of a converted prompt with hooks differ"):
        KVTransformerBridge.boot_transformers(tiny_hf_model("bitnet"))


@pytest.mark.parametrize("family", ["gpt2", "olmo_hybrid"])
def test_an_attention_that_does_not_read_the_bias_is_refused(family):
    model = KVTransformerBridge.boot_transformers(tiny_hf_model(family))
    bias, held = convert_prompt(model, PROMPT), model.blocks[1].attn
    hidden = model.run_with_cache(TEXT)[1]["blocks.1.hook_attn_out"]
    before = held.__dict__.get("forward")
    held.__dict__["forward"] = lambda *args, **kwargs: (hidden, None)
    with pytest.raises(KVLensError, match=r"the attention of layers \[1\] did not read the attached bias"), model.kv_bias(bias):
        model(TEXT)
    del held.__dict__["forward"]
    held.__dict__.update({} if before is None else {"forward": before})
    model.original_model.set_attn_implementation("sdpa")  # what the components compute does not follow it
    assert error_of_conversion(model) < LAW


def test_a_model_that_transformers_cannot_run_raises_its_error():
    plain = tiny_hf_model("llama")
    plain.model.layers[0].self_attn.q_proj = torch.nn.Linear(5, 24)
    with pytest.raises(RuntimeError):
        KVTransformerBridge.boot_transformers(plain)


@pytest.mark.parametrize("option", load.NOT_HERE)
def test_bad_input_of_options_is_refused(option, tmp_path):
    tiny_hf_model("llama").save_pretrained(tmp_path)
    given = {"load_weights": False, "model_class": tf.LlamaForCausalLM}.get(option, True)
    with pytest.raises(KVLensError, match=f"{option}=.* is not supported: "):
        KVTransformerBridge.boot_transformers(tmp_path, **{option: given})


def test_changes_of_the_configuration_take_effect(tmp_path):
    tiny_hf_model("llama").save_pretrained(tmp_path)
    plain = KVTransformerBridge.boot_transformers(tmp_path, dtype=torch.float64)
    changed = KVTransformerBridge.boot_transformers(
        tmp_path, {"rope_parameters": {**LLAMA3, "rope_theta": 50.0}}, n_ctx=40, dtype=torch.float64
    )
    assert changed.cfg.n_ctx == 40 and changed.cfg.dtype == torch.float64
    assert relative_error(changed(TEXT), plain(TEXT)) > 0.01  # it matters
    hf = KVTransformerBridge.boot_transformers(tmp_path, hf_model=tiny_hf_model("llama"))
    assert relative_error(hf(TEXT), plain(TEXT)) < LAW


def test_a_keyword_that_attention_does_not_understand_is_refused(bridge_of):
    module = next(part for part in bridge_of("nemotron_h").__dict__["_parts"] if hasattr(part, "attn")).attn.original_component
    q = torch.zeros(1, 6, 2, 4)
    hooked_attention(module, q, q[:, :3], q[:, :3], None, 1.0, position_ids=torch.arange(2), softcap=None)
    with pytest.raises(KVLensError, match="NemotronHAttention calls its attention with s_aux, softcap"):
        hooked_attention(module, q, q[:, :3], q[:, :3], None, 1.0, softcap=30.0, s_aux=torch.zeros(6))


def test_minimax_with_a_window_generates_alike_with_and_without_a_cache():
    plain = tiny_hf_model("minimax", sliding_window=6)
    model = KVTransformerBridge.boot_transformers(plain)
    options = dict(max_new_tokens=7, do_sample=False, stop_at_eos=False, verbose=False)
    assert error_of_conversion(model) < LAW
    bias = convert_prompt(model, PROMPT)
    assert bias.stacked("distance").max() == PROMPT.shape[1]
    for attached in (bias, 0 * bias):
        with model.kv_bias(attached):
            cached, whole = (model.generate(TEXT, use_past_kv_cache=use, **options) for use in (True, False))
        assert torch.equal(cached, whole)
    assert torch.equal(*(model.generate(TEXT, use_past_kv_cache=use, **options) for use in (True, False)))
    with model.kv_bias(bias):  # token by token, without positions
        first = model.original_model(TEXT[:, :-1], use_cache=True)
        last = model.original_model(TEXT[:, -1:], past_key_values=first.past_key_values).logits
        assert relative_error(last, model(TEXT)[:, -1:]) < LAW


@pytest.mark.parametrize("family", ["falcon_h1", "llama", "bamba", "nemotron_h", "gemma3", "gpt_oss", "olmo_hybrid"])
def test_padding_in_front(family, bridge_of):
    model = bridge_of(family)
    mask = torch.ones_like(TEXT)
    mask[0, :4] = 0
    with model.kv_bias(convert_prompt(model, PROMPT[0])):
        under = model(TEXT, attention_mask=mask)
        assert relative_error(under[0, 4:], model(TEXT[:1, 4:])[0]) < LAW


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "deepseek_v3", "nemotron_h"])
def test_the_hook_points_of_a_bias_are_all_of_it(family, bridge_of):
    """Patching one head's values, weights and keys from another bias is that head's part of the other bias."""
    model = bridge_of(family)
    a, b = convert_prompt(model, PROMPT), convert_prompt(model, some_tokens(2, 13, seed=3))
    names = [f"blocks.1.attn.hook_b_{x}" for x in ("kv", "d", "keys")]
    with model.kv_bias(b):
        cache = model.run_with_cache(TEXT)[1]

    def patched(x, hook):
        return torch.cat([x[:, :1], cache[hook.name][:, 1:2], x[:, 2:]], dim=1)

    assert cache[names[2]].shape[:3] == (2, model.cfg.n_heads, 13)
    rest = [(layer, head) for layer, n in enumerate(heads_per_layer(model)) for head in range(n) if (layer, head) != (1, 1)]
    with model.kv_bias(combine(a.select(heads=rest), b.select(heads=[(1, 1)]), shift_state="first")):
        expected = model(TEXT)
    with model.kv_bias(a):
        found = model.run_with_hooks(TEXT, fwd_hooks=[(name, patched) for name in names])
        without_keys = model.run_with_hooks(TEXT, fwd_hooks=[(name, patched) for name in names[:2]])
    assert relative_error(found, expected) < LAW
    assert relative_error(without_keys, found) > 1e-3  # it matters


@pytest.mark.parametrize("call", [KVTransformerBridge.boot_transformers, kvlens.load])
def test_a_comparison_is_made_unless_it_is_declined(call, tmp_path):
    """TransformerLens leaves out norms of StableLM."""
    tiny_hf_model("stablelm").save_pretrained(tmp_path)
    for verify in (None, True):
        with pytest.raises(KVLensError, match="does not compute what"):
            call(tmp_path, verify=verify)
    assert call(tmp_path, verify=False)(torch.arange(5)[None]).isfinite().all()


@pytest.mark.parametrize("call", [HookedKVTransformer.from_pretrained, kvlens.load])
def test_a_translation_is_tried_unless_it_is_declined(call, tmp_path, monkeypatch):
    tiny_hf_model("llama").save_pretrained(tmp_path)
    made = []
    monkeypatch.setattr(loading, "check_trial", lambda *given: made.append("trial"))
    assert [len([call(tmp_path, verify=verify), *made]) - 1 for verify in (False, None, True)] == [0, 1, 2]


def test_the_shipped_hybrid_takes_it():
    assert KVTransformerBridge.from_zoo("facts-hybrid", verify=False).cfg.attention == "hybrid"


def test_asking_where_nothing_can_be_compared_is_refused(tmp_path):
    small_model(dtype=torch.float64).save(tmp_path / "m")
    (tmp_path / "model.bin").write_bytes(b"x")
    for source, what in ((tmp_path / "m", "a folder of kvlens"), (tmp_path / "model.bin", "a llama2.c checkpoint")):
        with pytest.raises(KVLensError, match=f"verify=True: Transformers does not read {what}"):
            kvlens.load(source, verify=True)
    assert kvlens.load(tmp_path / "m", verify=False).cfg.n_layers


TRAINED_ON = "The state of a recurrent layer keeps the prompt; its keys decay. Où est la clé? 状态 keeps 12 keys."
SENTENCE, QUESTION = "The keys of the prompt decay.", " What keeps the state?"
END, PAD = "<|im_end|>", "<|endoftext|>"
VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=24, patch_size=4)


def write_tokenizer(folder):
    """tokenizer.json and tokenizer_config.json with the fields of Qwen's; returns the plain tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TRAINED_ON] * 3, trainer)
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
    ids = plain.encode(SENTENCE + QUESTION).ids
    assert model.to_tokens(SENTENCE + QUESTION)[0].tolist() == ids and len(ids) < len(SENTENCE + QUESTION)
    assert model.to_string(torch.tensor(ids)) == SENTENCE + QUESTION
    options = dict(max_new_tokens=16, do_sample=False, stop_at_eos=False, verbose=False)
    whole = model.generate(SENTENCE + QUESTION, **options)
    assert whole.startswith(SENTENCE + QUESTION)
    bias = convert_prompt(model, SENTENCE)
    assert bias.n_prompt_tokens == len(plain.encode(SENTENCE).ids)
    with model.kv_bias(bias):
        assert SENTENCE + model.generate(QUESTION, **options) == whole


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
            text = model.to_tokens(TRAINED_ON)
            assert model.fingerprint() == in_memory.fingerprint() and model.cfg.architecture == "Qwen3_5ForCausalLM"
            assert torch.equal(model(text), in_memory(text))
            assert relative_error(model(text), both(text).logits) < LAW


def test_unknown_words_are_named():
    hybrid = KVTransformerBridge.from_zoo("facts-hybrid", dtype=torch.float64)
    with pytest.warns(UserWarning, match="lacks 'gorilla'"):
        hybrid.to_tokens("Mira keeps a gorilla.")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused():
    with pytest.raises(KVLensError, match="vocabulary of this GPT2LMHeadModel only 101"):
        KVTransformerBridge.boot_transformers(tiny_hf_model("gpt2", vocab_size=101), tokenizer=tiny_tokenizer())

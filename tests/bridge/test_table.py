"""The table of families is what happens: each cell that can differ between families is held against a tiny model."""

import pytest
import torch
import transformers as tf
from bridge_models import FAMILIES, LIKE_THE_OTHERS, some_tokens
from precision import LAW, relative_error
from tiny_hf import PURELY_RECURRENT, RWKV, tiny_hf_model

from kvlens import KVLensError, KVTransformerBridge, convert_prompt
from kvlens.analyses import bias_decomposition, prompt_attribution
from kvlens.bridge import table
from kvlens.bridge.softmax import SoftmaxLayer
from kvlens.mixers.layers import Lfm2Mixer, Mamba1Mixer, Mamba2Mixer, RwkvMixer
from kvlens.mixers.mixer import DeltaRule, Lightning
from kvlens.model import heads_per_layer, read_attention

pytestmark = pytest.mark.usefixtures("without_gradients")

PROMPT, TEXT = some_tokens(9), some_tokens(4, seed=1)
MODELS = [*FAMILIES, *LIKE_THE_OTHERS, *PURELY_RECURRENT, *RWKV]
REFUSED = ["bloom", "gpt_neo"]


@pytest.mark.parametrize("family", MODELS)
def test_a_row_says_what_happens(family, bridge_of):
    model = bridge_of(family)
    row = table.MODEL_TYPES[model.original_model.config.model_type]
    parts = model.__dict__["_parts"]
    assert row.attention == any(isinstance(part, SoftmaxLayer) for part in parts)
    assert {rule_of(part.mixer) for part in parts if hasattr(part, "mixer")} == ({row.states} - {None})
    assert len(prompt_attribution(model, PROMPT, TEXT, by=[(0, 4)])) == 1
    kinds = set()
    for layer, reading in zip(model.layers(), read_attention(model, PROMPT, TEXT), strict=True):
        n_heads = [part.n_heads for part in layer.parts]
        assert reading.pattern.shape == (sum(n_heads), len(TEXT), len(PROMPT))
        for part, pattern in zip(layer.parts, reading.pattern.split(n_heads), strict=True):
            if isinstance(part, SoftmaxLayer):
                kinds.add("softmax")
                assert bool((pattern >= 0).all()) and bool((pattern.sum(dim=-1) < 1).all())
            elif part.n_heads:
                kinds.add("effective")
                assert bool(pattern.any())
    assert ", ".join(sorted(kinds, reverse=True)) == row.patterns
    if row.logits_of_heads:
        assert len(bias_decomposition(model, PROMPT, TEXT)) == sum(heads_per_layer(model))
    else:
        with pytest.raises(KVLensError, match="is not the sum of its attention and its MLP"):
            bias_decomposition(model, PROMPT, TEXT)


def rule_of(mixer):
    if isinstance(mixer, Lfm2Mixer):
        return table.CONVOLUTION
    if isinstance(mixer, Mamba1Mixer | Mamba2Mixer):
        return table.SELECTIVE if isinstance(mixer, Mamba1Mixer) else table.SSD
    if isinstance(mixer, RwkvMixer):
        return table.RWKV
    if isinstance(mixer.rule, Lightning):
        return table.LIGHTNING
    assert isinstance(mixer.rule, DeltaRule)
    return table.KDA if "Kimi" in type(mixer).__name__ else table.DELTA


def test_the_reference_has_a_row_for_every_tested_family():
    tested = {tiny_hf_model(family).config.model_type for family in MODELS}
    assert tested == set(table.MODEL_TYPES)
    assert {type(tiny_hf_model(kind)).__name__ for kind in REFUSED} == set(table.NOT_BRIDGED)
    for row in table.MODEL_TYPES.values():
        assert f"| {row.name} | exact | yes | {row.patterns} |" in table.__doc__


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_names_the_family_and_what_can_be_done(kind):
    model = tiny_hf_model(kind)
    architecture = type(model).__name__
    with pytest.raises(KVLensError, match=f"{architecture} has no way to read a KV bias yet: layer 0") as refused:
        KVTransformerBridge.boot_transformers(model)
    says = str(refused.value)
    assert table.SUPPORTED in says and "a plain TransformerBridge runs this one without a bias" in says
    assert ("HookedKVTransformer runs it" in table.NOT_BRIDGED[architecture]) == ("HookedKVTransformer.from_pretrained" in says)


def test_the_comparison_leaves_a_model_in_training_as_it_is():
    plain = tiny_hf_model("gpt2")
    expected = plain(TEXT[None]).logits
    plain.train()  # GPT-2 has dropout
    model = KVTransformerBridge.boot_transformers(plain)
    assert plain.training and relative_error(model.eval()(TEXT[None]), expected) < LAW


def test_a_device_map_is_respected(tmp_path, bridge_of):
    """For families that Transformers loads and that TransformerLens loads."""
    for family in ("llama", "qwen3_5"):
        tiny_hf_model(family).save_pretrained(tmp_path / family)
        model = KVTransformerBridge.boot_transformers(tmp_path / family, device_map={"": "cpu"}, dtype=torch.float64)
        with model.kv_bias(convert_prompt(model, PROMPT)):
            converted = model(TEXT[None])
        whole = bridge_of(family)(torch.cat([PROMPT, TEXT])[None])
        assert relative_error(converted, whole[:, len(PROMPT) :]) < LAW


def test_weights_that_a_device_map_offloads_are_refused(tmp_path):
    tiny_hf_model("llama").save_pretrained(tmp_path)
    parts = ["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", *(f"model.layers.{i}" for i in range(3))]
    device_map = {part: "disk" if part == "model.layers.1" else "cpu" for part in parts}
    options = dict(device_map=device_map, offload_folder=tmp_path / "offloaded")
    with pytest.raises(KVLensError, match=r"9 weights of LlamaForCausalLM are not in memory \(model.layers.1.self_attn"):
        KVTransformerBridge.boot_transformers(tf.LlamaForCausalLM.from_pretrained(tmp_path, **options))
    with pytest.raises(KVLensError, match="device and device_map exclude each other"):
        KVTransformerBridge.boot_transformers(tmp_path, device="cpu", device_map="cpu")


@pytest.mark.parametrize("options", [{}, {"revision": "main"}, {"device_map": "cpu"}])
def test_no_option_leads_past_the_comparison(options, tmp_path):
    """TransformerLens leaves out norms of StableLM."""
    tiny_hf_model("stablelm").save_pretrained(tmp_path)
    says = r"does not compute what StableLmForCausalLM computes: on 16 tokens .* differ .* by \d"
    with pytest.raises(KVLensError, match=says):
        KVTransformerBridge.boot_transformers(tmp_path, dtype=torch.float64, **options)

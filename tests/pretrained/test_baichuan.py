"""A Baichuan-M1-type folder gives the logits of a plain-torch model of the published format, without any remote code.

That model comes first, and the folder that its weights are published in. It is independent of kvlens: one head at a time, one
loop a position in the shift, rotary angles as complex numbers. Everything is float64 and follows the published format: packed
projections, ``conv_k`` with the previous token in column 0, RoPE after the shift, windows that count the current token, a head
whose rows are scaled to length 1.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from precision import LAW, relative_error
from safetensors.torch import save_file
from small_models import by_steps
from tiny_hf import tiny_tokenizer
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from kvlens import HookedKVTransformer, KVLensError, KVShiftConfig, analyses, convert_prompt
from kvlens.pretrained import load_pretrained_parts

CONFIG: dict[str, Any] = {
    "architectures": ["BaichuanM1ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_baichuan.BaichuanM1Config",
        "AutoModelForCausalLM": "modeling_baichuan.BaichuanM1ForCausalLM",
    },
    "model_type": "baichuan_m1",
    "vocab_size": 307,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_swa_attention_heads": 3,
    "num_swa_key_value_heads": 1,
    "sliding_window": 5,
    "sliding_window_layers": [1, 3],
    "conv_window": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1234.0,
    "max_position_embeddings": 29,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
}
"""As the published ``config.json``, every size another one."""


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Weights by the published names, drawn away from every special value."""
    d, d_mlp = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        n_heads, kv = heads_of(config, layer)
        packed = d + 2 * kv * (d // n_heads)
        shapes |= {
            f"{at}input_layernorm.weight": (d,),
            f"{at}post_attention_layernorm.weight": (d,),
            f"{at}self_attn.W_pack.weight": (packed, d),
            f"{at}self_attn.o_proj.weight": (d, d),
            f"{at}self_attn.conv_k": (1, 1, kv, 1, config["conv_window"]),
            f"{at}self_attn.conv_v": (1, 1, kv, 1, config["conv_window"]),
            f"{at}mlp.gate_proj.weight": (d_mlp, d),
            f"{at}mlp.up_proj.weight": (d_mlp, d),
            f"{at}mlp.down_proj.weight": (d, d_mlp),
        }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: weight + 1 if "norm" in name else weight for name, weight in drawn.items()}


def heads_of(config: dict[str, Any], layer: int) -> tuple[int, int]:
    """Query and key-value heads of a layer."""
    kind = "num_swa_" if layer in config["sliding_window_layers"] and config["num_swa_attention_heads"] else "num_"
    return config[f"{kind}attention_heads"], config[f"{kind}key_value_heads"]


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], shards: int = 1) -> Path:
    """Save as the model is published: ``config.json`` and safetensors, in shards with an index where there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(w.numel() * 8 for w in weights.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def reference_logits(config: dict[str, Any], weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [batch, pos, d_vocab] in float64."""
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        w = {name.removeprefix(at): weight for name, weight in weights.items() if name.startswith(at)}
        window = config["sliding_window"] if layer in config["sliding_window_layers"] else tokens.shape[1]
        x = x + _attention(config, w, _rms_norm(config, x, w["input_layernorm.weight"]), window, heads_of(config, layer))
        y = _rms_norm(config, x, w["post_attention_layernorm.weight"])
        gate = y @ w["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + torch.exp(-gate)) * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    head = head / head.square().sum(dim=1, keepdim=True).sqrt()
    return _rms_norm(config, x, weights["model.norm.weight"]) @ head.T


def _rms_norm(config: dict[str, Any], x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(dim=-1, keepdim=True) + config["rms_norm_eps"]).sqrt()


def _attention(config: dict[str, Any], w: dict[str, Tensor], x: Tensor, window: int, heads: tuple[int, int]) -> Tensor:
    n_heads, n_kv = heads
    d_head = config["hidden_size"] // n_heads
    packed = x @ w["self_attn.W_pack.weight"].T
    column = [packed[..., i * d_head : (i + 1) * d_head] for i in range(n_heads + 2 * n_kv)]
    outputs = []
    for head in range(n_heads):
        of_kv = head // (n_heads // n_kv)
        q = _rotate(config, column[head])
        k = _rotate(config, _mix(column[n_heads + of_kv], w["self_attn.conv_k"][0, 0, of_kv, 0]))
        v = _mix(column[n_heads + n_kv + of_kv], w["self_attn.conv_v"][0, 0, of_kv, 0])
        scores = q @ k.transpose(1, 2) / d_head**0.5
        at = torch.arange(x.shape[1])
        distance = at[:, None] - at[None, :]
        scores = scores.masked_fill((distance < 0) | (distance > window - 1), -torch.inf)
        outputs.append(scores.softmax(dim=-1) @ v)
    return torch.cat(outputs, dim=-1) @ w["self_attn.o_proj.weight"].T


def _mix(rows: Tensor, taps: Tensor) -> Tensor:
    """The last tap weighs the current row, the one before it the previous row, and so on; before the text stand zeros."""
    mixed = torch.zeros_like(rows)
    for i in range(rows.shape[1]):
        for back in range(min(i + 1, len(taps))):
            mixed[:, i] += taps[len(taps) - 1 - back] * rows[:, i - back]
    return mixed


def _rotate(config: dict[str, Any], rows: Tensor) -> Tensor:
    half = rows.shape[-1] // 2
    frequency = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(rows.shape[1], dtype=torch.float64)[:, None] * frequency
    turned = torch.complex(rows[..., :half], rows[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


TOKENS = torch.randint(0, CONFIG["vocab_size"], (2, 17), generator=torch.Generator().manual_seed(7))


pytestmark = pytest.mark.usefixtures("no_network")


@pytest.fixture
def weights():
    return random_weights(CONFIG)


@pytest.fixture
def folder(tmp_path, weights):
    return write_folder(tmp_path / "m1", CONFIG, weights)


def assert_equal_to_rounding(logits, expected):
    assert logits.dtype == torch.float64 and relative_error(logits, expected) < LAW


def exact_model(folder, **kwargs) -> HookedKVTransformer:
    return HookedKVTransformer.from_pretrained_no_processing(folder, dtype=torch.float64, device="cpu", **kwargs)


VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "global_only": {"sliding_window_layers": []},
    "window_of_one": {"sliding_window": 1},
    "without_swa_heads": {"num_swa_attention_heads": None, "num_swa_key_value_heads": None},
    "equal_heads": {"num_swa_attention_heads": 6, "num_swa_key_value_heads": 3},
    "ungrouped": {"num_key_value_heads": 6, "num_swa_key_value_heads": 3},
    "longer_convolution": {"conv_window": 3},
    "rope_parameters": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
}


@pytest.mark.parametrize(("variant", "shards"), [*((name, 1) for name in VARIANTS), ("untied", 3)])
@torch.no_grad()
def test_a_folder_gives_the_references_logits_in_float64(variant, shards, tmp_path):
    config = {**CONFIG, **VARIANTS[variant]}
    weights = random_weights(config)
    model = exact_model(write_folder(tmp_path / "m1", config, weights, shards))
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    expected = reference_logits({**config, "rope_theta": theta}, weights, TOKENS)
    assert_equal_to_rounding(model(TOKENS), expected)


@pytest.mark.parametrize(
    "change", ["conv_k", "conv_v", "column_order", "window", "previous_layer_kind", "rope_theta", "rows_of_the_head"]
)
@torch.no_grad()
def test_the_comparison_notices_every_part(change, tmp_path):
    config = {**CONFIG, **(VARIANTS["equal_heads"] if change == "previous_layer_kind" else {})}
    weights = random_weights(config)
    model = exact_model(write_folder(tmp_path / "m1", config, weights))
    other = dict(weights)
    if change in ("conv_k", "conv_v"):
        other[f"model.layers.2.self_attn.{change}"] = other[f"model.layers.2.self_attn.{change}"].flip(2)
    elif change == "column_order":
        other |= {name: w.flip(-1) for name, w in weights.items() if "conv_" in name}
    elif change == "window":
        config["sliding_window"] = 6
    elif change == "previous_layer_kind":
        config["sliding_window_layers"] = [0, 2]
    elif change == "rope_theta":
        config["rope_theta"] = 1200.0
    else:
        other["lm_head.weight"] = weights["lm_head.weight"] @ torch.diag(torch.linspace(1, 2, 24, dtype=torch.float64))
    assert float((model(TOKENS) - reference_logits(config, other, TOKENS)).abs().max()) > 1e-4  # far above rounding


@pytest.mark.parametrize("form", ["matrix", "numbers"])
@torch.no_grad()
def test_the_shift_may_come_in_the_other_public_forms(form, tmp_path, weights):
    renamed = {}
    for name, weight in weights.items():
        at, leaf = name.rsplit(".", 1)
        if not leaf.startswith("conv_"):
            renamed[name] = weight
        elif form == "matrix":
            renamed[f"{at}.{leaf[-1].upper()}"] = weight[0, 0, :, 0].clone()
        else:
            stem = {"k": "alpha", "v": "beta"}[leaf[-1]]
            renamed |= {f"{at}.{stem}{2 - column}": weight[0, 0, :, 0, column].clone() for column in range(2)}
    original = exact_model(write_folder(tmp_path / "a", CONFIG, weights))
    assert torch.equal(exact_model(write_folder(tmp_path / "b", CONFIG, renamed))(TOKENS), original(TOKENS))


@torch.no_grad()
def test_the_head_is_normalized_for_any_length_of_its_stored_rows(tmp_path, weights):
    scale = torch.linspace(0.1, 9, CONFIG["vocab_size"], dtype=torch.float64)[:, None]
    plain = exact_model(write_folder(tmp_path / "a", CONFIG, weights))
    scaled = {**weights, "lm_head.weight": scale * weights["lm_head.weight"]}
    other = exact_model(write_folder(tmp_path / "b", CONFIG, scaled))
    assert relative_error(plain.W_U, other.W_U) < LAW
    assert torch.allclose(plain.W_U.norm(dim=0), torch.ones((), dtype=torch.float64))


@pytest.mark.usefixtures("in_float64")
@torch.no_grad()
def test_processed_weights_keep_the_probabilities_and_the_shift(folder, weights):
    model = HookedKVTransformer.from_pretrained(folder, device="cpu", dtype=torch.float64)
    expected = reference_logits(CONFIG, weights, TOKENS).log_softmax(-1)
    assert_equal_to_rounding(model(TOKENS).log_softmax(-1), expected)
    assert model.cfg.kv_shift == KVShiftConfig()
    conv = weights["model.layers.3.self_attn.conv_v"][0, 0, :, 0]
    assert torch.equal(model.blocks[3].attn.v_shift_coef, conv.flip(1))
    assert [block.attn.attn_type for block in model.blocks] == ["global", "local", "global", "local"]


@torch.no_grad()
def test_decoding_token_by_token_and_a_saved_copy_give_the_same(tmp_path, folder):
    model = exact_model(folder)
    tokens = TOKENS[:1]
    greedy = model.generate(tokens, max_new_tokens=4, do_sample=False, stop_at_eos=False, verbose=False, prepend_bos=False)
    slow = tokens
    for _ in range(4):
        slow = torch.cat([slow, model(slow)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(greedy, slow)
    model.save(tmp_path / "copy")
    assert torch.equal(HookedKVTransformer.load(tmp_path / "copy")(tokens), model(tokens))


@torch.no_grad()
def test_a_prompt_becomes_a_bias_exactly_and_is_explained(folder):
    model = exact_model(folder)
    prompt, text = TOKENS[0, :11], TOKENS[:1, 11:]
    bias = convert_prompt(model, prompt)
    expected = reference_logits(CONFIG, random_weights(CONFIG), TOKENS[:1])[:, 11:]
    for steps in (True, False):
        with model.kv_bias(bias), by_steps(model, steps):
            assert_equal_to_rounding(model(text), expected)
    heads = [(layer, head) for layer, n in enumerate((6, 3, 6, 3)) for head in range(n)]
    table = analyses.bias_by_head(model, prompt, text[0])
    assert list(zip(table["layer"], table["head"], strict=True)) == heads
    units = analyses.attribution_by_head(model, prompt, text[0], by=[(0, 5)])
    of_shift_states = units[units["part"] == "shift_state"]
    assert of_shift_states.groupby("layer")["head"].max().tolist() == [2, 0, 2, 0]
    assert len(analyses.explanation(model, prompt, text[0], by=[(0, 5)]))


def test_every_weight_is_trained(folder):
    model = HookedKVTransformer.from_pretrained_no_processing(folder, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        losses.append(model(TOKENS, return_type="loss"))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    assert all(bool(weight.grad.any()) for name, weight in model.named_parameters() if "b_K" not in name)


@torch.no_grad()
def test_options_shorten_the_model_and_reach_its_configuration(tmp_path, weights):
    folder = write_folder(tmp_path / "m1", CONFIG, weights, shards=3)
    short = exact_model(folder, first_n_layers=2, n_ctx=19, default_prepend_bos=False)
    assert (short.cfg.n_layers, short.cfg.n_ctx, short.cfg.default_prepend_bos) == (2, 19, False)
    expected = reference_logits({**CONFIG, "num_hidden_layers": 2}, weights, TOKENS)
    assert_equal_to_rounding(short(TOKENS), expected)
    low = HookedKVTransformer.from_pretrained_no_processing(folder, dtype="bfloat16", device="cpu")
    assert low(TOKENS).dtype == torch.bfloat16


class BaichuanM1Config(PretrainedConfig):
    model_type = "baichuan_m1"


class BaichuanM1ForCausalLM(PreTrainedModel):
    """What a user holds who let transformers run the published code: a model with that name, config and state dict."""

    config_class = BaichuanM1Config

    def __init__(self, config, weights):
        super().__init__(config)
        for name, weight in weights.items():
            *path, leaf = name.split(".")
            module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(leaf, torch.nn.Parameter(weight))


@torch.no_grad()
def test_a_loaded_model_gives_what_its_folder_gives(folder, weights):
    sizes = {name: value for name, value in CONFIG.items() if name not in ("auto_map", "model_type", "torch_dtype")}
    hf_model = BaichuanM1ForCausalLM(BaichuanM1Config(**sizes), weights)
    model = exact_model("some/name", hf_model=hf_model)
    assert torch.equal(model(TOKENS), exact_model(folder)(TOKENS))
    assert not any(p.requires_grad for p in load_pretrained_parts("x", hf_model=hf_model).state_dict.values())


def test_a_tokenizer_in_the_folder_is_used_and_one_that_is_code_is_not_run(folder):
    tiny_tokenizer().save_pretrained(folder)
    assert load_pretrained_parts(folder).tokenizer.encode("the cat")[1:] == tiny_tokenizer().encode("the cat")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"")
    own_code = {
        "tokenizer_class": "BaichuanTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_baichuan.BaichuanTokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(own_code))
    (folder / "tokenization_baichuan.py").write_text("raise SystemExit('remote code was run')")
    with pytest.raises(KVLensError, match=f"the tokenizer in {folder} is code of its own.*pass tokenizer="):
        load_pretrained_parts(folder)
    given = load_pretrained_parts(folder, tokenizer=tiny_tokenizer()).tokenizer
    assert given.encode("the cat")[1:] == tiny_tokenizer().encode("the cat")


# Bad input

WEIGHT = "model.layers.2.self_attn.conv_v"
UNKNOWN = ("model.layers.9.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.bias", "model.layers.0.self_attn.W_pack.bias")


def without(part):
    return lambda weights: {name: w for name, w in weights.items() if part not in name}


def with_weight(name, change):
    return lambda weights: {**weights, name: change(weights.get(name))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_swa_attention_heads": 5}, "num_swa_attention_heads=5.* hidden_size=24 must be a multiple"),
        ({"num_swa_key_value_heads": 2}, "num_swa_attention_heads=3.* must be one of num_swa_key_value_heads=2"),
        ({"num_swa_key_value_heads": 3}, r"blocks.1.attn.k_shift_coef; its configuration gives \[3, 2\]"),
        ({"hidden_size": None}, "needs a positive integer hidden_size in its config.json, got None"),
        ({"hidden_size": 25}, "num_attention_heads=6, of which hidden_size=25 must be a multiple"),
        ({"sliding_window": None}, "needs a positive integer sliding_window"),
        ({"sliding_window_layers": [1, 4]}, r"sliding_window_layers \[1, 4\]; expected numbers from 0 to 3"),
        ({"conv_window": 3}, r"of shape \[3, 2\] for blocks.0.attn.k_shift_coef; its configuration gives \[3, 3\]"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; expected 'silu'"),
        ({"rope_theta": None}, "needs rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "scales its rotary angles by 'linear'"),
        ({"quantization_config": {"bits": 4}}, "is quantized"),
        ({"num_hidden_layers": 5}, "num_hidden_layers of the configuration is 5, and the weights in .* have 4 layers"),
        ({"vocab_size": 306}, r"do not fit the configuration: embed.W_E is \[307, 24\], expected \[306, 24\]"),
        ({"tie_word_embeddings": True}, "has tie_word_embeddings=True in its configuration and an output embedding"),
    ],
)
def test_configurations_that_cannot_be_loaded_say_why(changes, message, tmp_path, weights):
    folder = write_folder(tmp_path / "m1", {**CONFIG, **changes}, weights)
    with pytest.raises(KVLensError, match=message):
        HookedKVTransformer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(WEIGHT), "lacks the shift coefficients of blocks.2.attn.v_shift_coef"),
        (without("3.mlp.up"), r"lacks 1 weights .*layers.3.mlp.up_proj.weight"),
        (without("lm_head.weight"), r"lacks 1 weights .*\['lm_head.weight'\]"),
        (with_weight(WEIGHT, lambda w: w.to(torch.int8)), rf"hold integers \(\['{WEIGHT}'\]\)"),
        (with_weight("model.norm.weight", lambda w: w.to(torch.int8)), r"hold integers \(\['model.norm.weight'\]\)"),
        *((with_weight(name, lambda w: torch.zeros(3)), f"holds 1 that are not known .*{name}") for name in UNKNOWN),
    ],
)
def test_weights_that_are_missing_unknown_or_packed_are_named(change, message, tmp_path, weights):
    folder = write_folder(tmp_path / "m1", CONFIG, change(weights))
    with pytest.raises(KVLensError, match=message):
        HookedKVTransformer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"revision": "main"}, r"\['revision'\] would have no effect on a Baichuan-M1 checkpoint"),
        ({"first_n_layers": 5}, "first_n_layers must be 1 to 4"),
        ({"kv_shift": KVShiftConfig(window=2)}, "window 2, the checkpoint has 3 heads and window 1"),
    ],
)
def test_arguments_that_cannot_be_honored_are_refused(arguments, message, folder):
    with pytest.raises(KVLensError, match=message):
        HookedKVTransformer.from_pretrained(folder, **arguments)


def test_what_follows_from_the_configuration_or_is_not_used_does_not_matter(tmp_path, weights):
    frequencies = {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    assert exact_model(write_folder(tmp_path / "frequencies", CONFIG, frequencies)).cfg.n_layers == 4
    config = {**CONFIG, "sliding_window_layers": [], "num_swa_attention_heads": 5}
    assert exact_model(write_folder(tmp_path / "heads", config, random_weights(config))).cfg.use_local_attn is False

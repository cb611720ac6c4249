"""A Baichuan-M1-type language model written out in plain torch, and the folder that its weights are published in.

Independent of kvlens: one head at a time, one loop a position in the shift, rotary angles as complex numbers. Everything is
float64 and follows the published format: packed projections, ``conv_k`` with the previous token in column 0, RoPE after the
shift, windows that count the current token, a head whose rows are scaled to length 1.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

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

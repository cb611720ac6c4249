"""Reads the llama2.c checkpoint ``stories260K.bin`` and its tokenizer into a HookedKVTransformer."""

import struct
from pathlib import Path

import numpy as np
import torch
from einops import rearrange

from kvlens import HookedKVTransformer, HookedKVTransformerConfig


def load_stories260k(folder: Path) -> HookedKVTransformer:
    """The model: 5 layers, GQA with 8 query and 4 key-value heads, RoPE over adjacent pairs, SwiGLU, RMSNorm."""
    raw = (folder / "stories260K.bin").read_bytes()
    d, hidden, n_layers, heads, kv_heads, vocab, n_ctx = struct.unpack("<7i", raw[:28])
    values, at = torch.from_numpy(np.frombuffer(raw, dtype="<f4", offset=28).copy()), 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal at
        n = int(np.prod(shape))
        at += n
        return values[at - n : at].reshape(shape)

    d_head = d // heads
    kv = kv_heads * d_head
    embedding, rms_att, wq = take(vocab, d), take(n_layers, d), take(n_layers, d, d)
    wk, wv, wo = take(n_layers, kv, d), take(n_layers, kv, d), take(n_layers, d, d)
    rms_ffn, w1, w2, w3 = (
        take(n_layers, d),
        take(n_layers, hidden, d),
        take(n_layers, d, hidden),
        take(n_layers, hidden, d),
    )
    rms_final = take(d)
    state = {"embed.W_E": embedding, "unembed.W_U": embedding.T, "ln_final.w": rms_final}
    for layer in range(n_layers):
        at_block = f"blocks.{layer}."
        state |= {
            at_block + "ln1.w": rms_att[layer],
            at_block + "ln2.w": rms_ffn[layer],
            at_block + "attn.W_Q": rearrange(wq[layer], "(h d) m -> h m d", h=heads),
            at_block + "attn._W_K": rearrange(wk[layer], "(h d) m -> h m d", h=kv_heads),
            at_block + "attn._W_V": rearrange(wv[layer], "(h d) m -> h m d", h=kv_heads),
            at_block + "attn.W_O": rearrange(wo[layer], "m (h d) -> h d m", h=heads),
            at_block + "mlp.W_gate": w1[layer].T,
            at_block + "mlp.W_in": w3[layer].T,
            at_block + "mlp.W_out": w2[layer].T,
        }
    cfg = HookedKVTransformerConfig(
        n_layers=n_layers, d_model=d, d_head=d_head, n_heads=heads, n_key_value_heads=kv_heads, d_mlp=hidden, n_ctx=n_ctx,
        d_vocab=vocab, act_fn="silu", gated_mlp=True, normalization_type="RMS", eps=1e-5, final_rms=True,
        positional_embedding_type="rotary", rotary_adjacent_pairs=True, rotary_base=10000, device="cpu",
    )  # fmt: skip
    model = HookedKVTransformer(cfg)
    report = model.load_state_dict(state, strict=False)
    assert not report.unexpected_keys
    zero = [name for name in report.missing_keys if ".b_" in name or "._b_" in name]
    for name in zero:  # the model has no biases
        assert float(model.state_dict()[name].abs().max()) == 0.0
    return model.requires_grad_(False)


def read_vocabulary(folder: Path) -> list[bytes]:
    """Token id -> bytes; ``<0xNN>`` tokens are single bytes."""
    raw, at, vocabulary = (folder / "tok512.bin").read_bytes(), 4, []
    for _ in range(512):
        (length,) = struct.unpack("<i", raw[at + 4 : at + 8])
        word = raw[at + 8 : at + 8 + length]
        at += 8 + length
        is_byte = len(word) == 6 and word.startswith(b"<0x")
        vocabulary.append(bytes([int(word[3:5], 16)]) if is_byte else word)
    return vocabulary

"""The judge: kvlens' mathematics again, as loops over tokens and heads, for one text at a time, in float64.

Nothing here comes from kvlens: the equations are written from the papers (KVSA eq. 4-6; ICLCA eq. 12-13, 19), the weights are
read by name out of a model's ``state_dict``. A padded batch is judged by taking the padded tokens out of each row.

    k^_i = sum_s alpha_s k_{i-s}                v^_i = sum_s beta_s v_{i-s}                (and queries, where they are shifted)
    A_i  = gamma A_{i-1} + phi~(k^_i) v^_i^T    A_{-1} = b_KV
    D_i  = D_{i-1} + phi(k^_i)                  D_{-1} = b_D
    z_i  = phi~(q_i)^T A_i / n_i                n_i = phi(q_i)^T D_i ("kernel") or attn_scale ("none")
"""

import functools
import math
from dataclasses import dataclass

import torch

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Spec:
    """What the equations need to know beside the weights."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    feature_map: str
    normalizer: str
    positions: str  # rotary, standard, sinusoidal or none
    attn_scale: float
    rotary_placement: str | None = None  # after or before
    rotary_dim: int | None = None
    rotary_base: float = 10000.0
    adjacent_pairs: bool = False
    decay: tuple[float, ...] | None = None
    parametrization: str = "free"  # of the shift: free, gate or clamp
    window: int = 0
    layer_norm: bool = False
    eps: float = 1e-5
    mlp: bool = False


@dataclass(frozen=True)
class LayerBias:
    """One layer's prompt: b_KV [head, d_phi, d_head], b_D [head, d_phi], raw shift states [window, head, d_head] by letter."""

    b_KV: torch.Tensor
    b_D: torch.Tensor
    last: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Bias:
    """A converted prompt: one :class:`LayerBias` a layer, its length, and the position at which the next text starts."""

    layers: tuple[LayerBias, ...]
    n_tokens: int
    offset: int


def logits(spec: Spec, weights: Weights, tokens: list[int], bias: Bias | None = None) -> torch.Tensor:
    """Logits [pos, d_vocab] of one text."""
    residual, _ = _run(spec, weights, tokens, bias)
    if spec.layer_norm:
        residual = _layer_norm(residual, weights["ln_final.w"], weights["ln_final.b"], spec.eps)
    return residual @ weights["unembed.W_U"] + weights["unembed.b_U"]


def convert(spec: Spec, weights: Weights, tokens: list[int], bias: Bias | None = None) -> Bias:
    """The prompt as a bias (ICLCA eq. 19), on top of an older one where one is given."""
    old = empty_bias(spec, weights) if bias is None else bias
    _, layers = _run(spec, weights, tokens, old)
    offset = 0 if spec.rotary_placement == "after" else old.offset + len(tokens)
    return Bias(tuple(layers), old.n_tokens + len(tokens), offset)


def empty_bias(spec: Spec, weights: Weights) -> Bias:
    """No prompt: zeros, or the bias that was trained where the weights hold one."""
    layers = []
    for layer in range(spec.n_layers):
        attn = _below(weights, f"blocks.{layer}.attn.")
        d_phi = feature(spec, attn, torch.zeros(1, spec.d_head, dtype=torch.float64), head=0).shape[1]
        b_KV = attn.get("b_KV", torch.zeros(spec.n_heads, d_phi, spec.d_head, dtype=torch.float64))
        b_D = attn.get("b_D", torch.zeros(spec.n_heads, d_phi, dtype=torch.float64))
        last = {
            letter: torch.zeros(spec.window, n, spec.d_head, dtype=torch.float64)
            for letter, n in (("q", spec.n_heads), ("k", spec.n_kv_heads), ("v", spec.n_kv_heads))
        }
        layers.append(LayerBias(b_KV, b_D, last))
    return Bias(tuple(layers), 0, 0)


@functools.cache
def rotation(spec: Spec, position: int) -> torch.Tensor:
    """R_m as a matrix [d_head, d_head]: block after block of 2 x 2 rotations, the features behind ``rotary_dim`` left alone."""
    matrix = torch.eye(spec.d_head, dtype=torch.float64)
    if spec.positions != "rotary":
        return matrix
    pairs = spec.rotary_dim // 2
    for i in range(pairs):
        angle = position / spec.rotary_base ** (2 * i / spec.rotary_dim)
        first, second = (2 * i, 2 * i + 1) if spec.adjacent_pairs else (i, i + pairs)
        matrix[first, first] = matrix[second, second] = math.cos(angle)
        matrix[second, first] = math.sin(angle)
        matrix[first, second] = -math.sin(angle)
    return matrix


def _turned(spec: Spec, rows: torch.Tensor, first: int) -> torch.Tensor:
    """Each row under its rotation, of the position ``first`` and those behind it."""
    return torch.stack([rotation(spec, first + i) @ row for i, row in enumerate(rows)])


def feature(spec: Spec, attn: Weights, x: torch.Tensor, head: int) -> torch.Tensor:
    """phi [pos, d_phi] of vectors x [pos, d_head] of query head ``head``, or of keys that this head reads."""
    scaled = x / math.sqrt(spec.attn_scale)
    if spec.feature_map == "identity":
        return x
    if spec.feature_map == "elu_plus_one":
        return torch.where(x > 0, x + 1, x.exp())
    if spec.feature_map == "relu":
        return x.clamp(min=0) + 1e-3
    if spec.feature_map == "random":
        w = attn["feature_map.projection"][head // (spec.n_heads // spec.n_kv_heads)]
        return (scaled @ w.T - (scaled * scaled).sum(-1, keepdim=True) / 2).exp() / math.sqrt(w.shape[0])
    if spec.feature_map == "taylor":
        second = [torch.outer(one, one).flatten() / math.sqrt(2) for one in scaled]
        return torch.cat([torch.ones(len(x), 1, dtype=torch.float64), scaled, torch.stack(second)], dim=1)
    if spec.feature_map == "hedgehog":
        wx = x @ attn["feature_map.hedgehog_weight"][head // (spec.n_heads // spec.n_kv_heads)].T
        exponentials = torch.cat([2 * wx, -2 * wx], dim=1).exp()
        return exponentials / exponentials.sum(-1, keepdim=True)
    raise ValueError(f"no feature map {spec.feature_map!r}")


def _run(spec: Spec, weights: Weights, tokens: list[int], bias: Bias | None) -> tuple[torch.Tensor, list[LayerBias]]:
    """Residual stream [pos, d_model] after the last block, and every layer's new bias."""
    bias = empty_bias(spec, weights) if bias is None else bias
    x = torch.stack([weights["embed.W_E"][token] for token in tokens])
    x = x + torch.stack([_position(spec, weights, bias.offset + i, x.shape[1]) for i in range(len(tokens))])
    new_layers = []
    for layer, old in enumerate(bias.layers):
        block = _below(weights, f"blocks.{layer}.")
        attn_in = _layer_norm(x, block["ln1.w"], block["ln1.b"], spec.eps) if spec.layer_norm else x
        z, new = _attention(spec, _below(block, "attn."), attn_in, old, bias.offset)
        new_layers.append(new)
        x = x + sum(z[:, head] @ block["attn.W_O"][head] for head in range(spec.n_heads)) + block["attn.b_O"]
        if spec.mlp:
            mlp_in = _layer_norm(x, block["ln2.w"], block["ln2.b"], spec.eps) if spec.layer_norm else x
            hidden = mlp_in @ block["mlp.W_in"] + block["mlp.b_in"]
            hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
            x = x + hidden @ block["mlp.W_out"] + block["mlp.b_out"]
    return x, new_layers


def _attention(spec: Spec, attn: Weights, x: torch.Tensor, old: LayerBias, offset: int) -> tuple[torch.Tensor, LayerBias]:
    """z [pos, head, d_head] and the layer's new bias, from the layer's input x [pos, d_model]."""
    n = x.shape[0]
    raw = {letter: _project(spec, attn, letter, x) for letter in "qkv"}
    mixed = {letter: _shift(spec, attn, letter, raw[letter], old.last[letter]) for letter in "qkv"}
    last = {letter: torch.cat([old.last[letter], raw[letter]])[n:] for letter in "qkv"}
    z = torch.zeros(n, spec.n_heads, spec.d_head, dtype=torch.float64)
    after = spec.rotary_placement == "after"
    before = spec.rotary_placement == "before"
    new_KV, new_D = [], []
    for head in range(spec.n_heads):
        kv_head = head // (spec.n_heads // spec.n_kv_heads)
        gamma = 1.0 if spec.decay is None else spec.decay[head]
        q, k, v = mixed["q"][:, head], mixed["k"][:, kv_head], mixed["v"][:, kv_head]
        if before:
            q, k = (_turned(spec, x, offset) for x in (q, k))
        phi_q, phi_k = feature(spec, attn, q, head), feature(spec, attn, k, head)
        read, written = (_turned(spec, phi, offset) if after else phi for phi in (phi_q, phi_k))
        stored = _turned(spec, phi_k, -n) if after else phi_k
        A, D = old.b_KV[head], old.b_D[head]
        stored_A = gamma**n * (rotation(spec, -n) @ A if after else A)
        for i in range(n):
            A = gamma * A + torch.outer(written[i], v[i])
            D = D + phi_k[i]
            divisor = phi_q[i] @ D if spec.normalizer == "kernel" else spec.attn_scale
            z[i, head] = read[i] @ A / divisor
            stored_A = stored_A + gamma ** (n - 1 - i) * torch.outer(stored[i], v[i])
        new_KV.append(stored_A)
        new_D.append(D)
    return z, LayerBias(torch.stack(new_KV), torch.stack(new_D), last)


def _project(spec: Spec, attn: Weights, letter: str, x: torch.Tensor) -> torch.Tensor:
    """Queries, keys or values [pos, head, d_head], after the norm on queries and keys where the weights hold one."""
    underscore = "_" if letter != "q" and f"_W_{letter.upper()}" in attn else ""  # TransformerLens' grouped heads
    W, b = attn[f"{underscore}W_{letter.upper()}"], attn[f"{underscore}b_{letter.upper()}"]
    out = torch.stack([x @ W[head] + b[head] for head in range(W.shape[0])], dim=1)
    if f"{letter}_norm.w" in attn:
        rms = (out.pow(2).mean(-1, keepdim=True) + spec.eps).sqrt()
        out = out / rms * attn[f"{letter}_norm.w"]
    return out


def _shift(spec: Spec, attn: Weights, letter: str, raw: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    if f"{letter}_shift_coef" not in attn:
        return raw
    coef = attn[f"{letter}_shift_coef"]
    if spec.parametrization == "gate":
        coef = coef.exp() / coef.exp().sum(dim=-1, keepdim=True)
    elif spec.parametrization == "clamp":
        coef = coef.clamp(0, 1)
    shifted = torch.zeros_like(raw)
    for i in range(raw.shape[0]):
        for s in range(spec.window + 1):
            source = raw[i - s] if i >= s else last[spec.window + i - s]
            shifted[i] += coef[:, s, None] * source
    return shifted


def _position(spec: Spec, weights: Weights, position: int, d_model: int) -> torch.Tensor:
    if spec.positions == "standard":
        return weights["pos_embed.W_pos"][position]
    if spec.positions == "sinusoidal":
        wave = torch.zeros(d_model, dtype=torch.float64)
        for i in range(0, d_model, 2):
            wave[i] = math.sin(position / 10000 ** (i / d_model))
            if i + 1 < d_model:
                wave[i + 1] = math.cos(position / 10000 ** (i / d_model))
        return wave
    return torch.zeros(d_model, dtype=torch.float64)


def _layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, eps: float) -> torch.Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w + b


def _below(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}

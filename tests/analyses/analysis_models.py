"""What several tests of the analyses share: a model whose results can be computed by hand, models whose heads are known by
construction, rows of the table of models, and how many bytes of tensors were alive at once.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVShiftConfig
from kvlens.analyses import induction_heads, induction_verdicts

VARIANTS = ["rope after", "rope before, no shift", "gqa decay", "learned, queries shifted"]
"""Rows of :mod:`small_models` that most analyses go through: positions, shift, grouped heads and decay one way each."""
LINEAR = [*VARIANTS, "gqa, taylor, values shifted", "no normalizer, keys shifted, rms"]
SOFTMAX = [f"softmax, {row}" for row in ("learned", "rotary, grouped", "shifted", "alibi")]


def pencil_model() -> HookedKVTransformer:
    """One head of width 1, phi = identity, no normalizer, all weights 1; token t is the number t + 1.

    The residual after attention is x_i + x_i (x_0^2 + ... + x_i^2), and the logits are a tenth of it, and 0.
    """
    model = HookedKVTransformer(
        HookedKVTransformerConfig(
            n_layers=1,
            d_model=1,
            d_head=1,
            n_ctx=9,
            d_vocab=2,
            attn_only=True,
            normalization_type=None,
            positional_embedding_type="none",
            attention="linear",
            feature_map="identity",
            normalizer="none",
            dtype=torch.float64,
            device="cpu",
        )
    ).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if "W_" in name else 0.0)
    model.W_E.copy_(torch.tensor([[1.0], [2.0]]))
    model.W_U.copy_(torch.tensor([[0.1, 0.0]], dtype=torch.float64))
    return model


PENCIL_PROMPT, PENCIL_TEXT = torch.tensor([0, 1]), torch.tensor([0, 1])
# with the prompt 1, 2 the text 1, 2 has residuals 1 + (1 + 4 + 1) = 7 and 2 + 2 (1 + 4 + 1 + 4) = 22,
# alone 1 + 1 = 2 and 2 + 2 (1 + 4) = 12; the prompt's bias is 1 + 4 = 5
PENCIL_WITH, PENCIL_WITHOUT = (0.7, 2.2), (0.2, 1.2)


def bernoulli_kl(a: float, b: float) -> float:
    """KL between softmax([a, 0]) and softmax([b, 0])."""
    p, q = 1 / (1 + math.exp(-a)), 1 / (1 + math.exp(-b))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def centered(logits: torch.Tensor) -> torch.Tensor:
    """Logits less their mean over the vocabulary: what direct logit attribution splits where no rival is given."""
    return logits - logits.mean(dim=-1, keepdim=True)


def tokens(pos: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 17, (pos,), generator=torch.Generator().manual_seed(seed))


D_VOCAB = 11
SHARP = 60.0
"""Scores of a match; e^-60 is below the rounding of 1 in float64."""

HEAD_TAPS = {  # (alpha_1, alpha_2), (beta_1, beta_2): KVSA table 4, one head each
    "prefix matching": ((0.0, 1.0), (1.0, 0.0)),
    "predecessor": ((1.0, 0.0), (0.0, 1.0)),
    "delayed": ((0.0, 1.0), (0.0, 1.0)),
    "plain": ((1.0, 0.0), (1.0, 0.0)),
}


def blank_model(**changes: Any) -> HookedKVTransformer:
    """Attention only, no norm, no positions, tokens one-hot in and out, every attention weight 0."""
    settings = dict(
        n_layers=1, n_heads=4, d_model=D_VOCAB, d_head=D_VOCAB, n_ctx=32, d_vocab=D_VOCAB, attn_only=True,
        normalization_type=None, positional_embedding_type="none", attn_scale=1.0, dtype=torch.float64, device="cpu", seed=0,
    )  # fmt: skip
    model = HookedKVTransformer(HookedKVTransformerConfig(**{**settings, **changes})).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "shift_coef" not in name:
            parameter.zero_()
    model.W_E[:, :D_VOCAB] = torch.eye(D_VOCAB, dtype=torch.float64)
    model.W_U[:D_VOCAB] = torch.eye(D_VOCAB, dtype=torch.float64)
    return model


def shifted_heads() -> HookedKVTransformer:
    """One layer, four heads that match tokens with themselves and copy what they read, each with one of the four roles."""
    model = blank_model(kv_shift=KVShiftConfig())
    attn, one = model.blocks[0].attn, torch.eye(D_VOCAB, dtype=torch.float64)
    attn.W_Q[:], attn.W_K[:], attn.W_V[:], attn.W_O[:] = SHARP * one, one, one, one
    for head, (alpha, beta) in enumerate(HEAD_TAPS.values()):
        attn.k_shift_coef[head], attn.v_shift_coef[head] = torch.tensor(alpha), torch.tensor(beta)
    return model


def two_layer_circuit(n_ctx: int = 32) -> HookedKVTransformer:
    """Head 0.1 attends to the previous position and writes its token into a separate subspace; head 1.2 matches it and copies.

    d_model is three spaces side by side: the token, the position, the token before. All other heads have weights 0.
    """
    model = blank_model(n_layers=2, n_heads=3, d_model=2 * D_VOCAB + n_ctx, d_head=n_ctx, n_ctx=n_ctx,
                        positional_embedding_type="standard")  # fmt: skip
    token, position, before = slice(0, D_VOCAB), slice(D_VOCAB, D_VOCAB + n_ctx), slice(D_VOCAB + n_ctx, None)
    places, one = torch.eye(n_ctx, dtype=torch.float64), torch.eye(D_VOCAB, dtype=torch.float64)
    model.W_pos[:, position] = places
    first, second = model.blocks[0].attn, model.blocks[1].attn
    first.W_Q[1, position], first.W_K[1, position] = SHARP * places, places.roll(1, dims=1)  # key p answers query p + 1
    first.W_V[1, token, :D_VOCAB], first.W_O[1, :D_VOCAB, before] = one, one
    second.W_Q[2, token, :D_VOCAB], second.W_K[2, before, :D_VOCAB] = SHARP * one, one
    second.W_V[2, token, :D_VOCAB], second.W_O[2, :D_VOCAB, token] = one, one
    return model


def heads_and_verdicts(model: HookedKVTransformer, **options: Any) -> pd.DataFrame:
    """Both tables side by side, a row per head: ``prefix_matching_score``, ``current_token_contrast`` ... and the verdicts."""
    verdicts = induction_verdicts(model, **options)
    of_heads = {name: value for name, value in options.items() if name not in ("threshold", "ratio")}
    by_kind = induction_heads(model, **of_heads).set_index(["layer", "head", "kind"]).unstack("kind")  # noqa: PD010
    by_kind.columns = [f"{kind}_{measure}" for measure, kind in by_kind.columns]
    return verdicts.merge(by_kind.reset_index(), on=["layer", "head"], how="left", validate="one_to_one")


class LiveBytes(TorchDispatchMode):
    """Inside, ``peak`` is the largest number of bytes that tensors made inside held at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage())
        return out

    def _count(self, storage):
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return
        size = storage.nbytes()

        def freed(_):
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def peak_bytes(function: Callable[[], Any]) -> int:
    """``peak`` of a call, what it returns included."""
    with LiveBytes() as live:
        function()
    return live.peak


def growth(function: Callable[[int], Any], short: int, long: int) -> float:
    """By how many bytes the peak of ``function(n)`` grows with each further token."""
    return (peak_bytes(lambda: function(long)) - peak_bytes(lambda: function(short))) / (long - short)

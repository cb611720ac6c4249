"""Direct logit attribution: what a summand of the residual stream adds to a logit, with the final norm's scale frozen.

    logits = N(x) W_U + b_U        N(x) = (x - mean(x)) / s * w + b        s = sqrt(mean((x - mean(x))^2) + eps)

is LayerNorm; RMSNorm has no mean and no b, a folded norm (LNPre, RMSPre) no w and no b, and a model without a norm has
N(x) = x. Only the scale s is not linear in x. With s frozen at its value in the run, N is affine, and for x = sum_c x_c

    logit_t = sum_c x_c . d_t / s  +  (b . W_U[:, t] + b_U[t])        d_t = center(w * W_U[:, t])

(centering a vector or the direction that it is multiplied by is the same). So the summands' logits and one constant, which
belongs to none of them, add up to the logit.

Adding one vector to every column of W_U, or one number to all of b_U, changes no prediction, but it changes every logit. The
attributed quantity is therefore the difference between the logits of two tokens, answer and rival, or, without a rival, the
*centered logit*: the logit minus its mean over the vocabulary. Both are the same before and after TransformerLens'
``center_unembed``. As in TransformerLens (``ActivationCache.logit_attrs``) b_U belongs to no summand; unlike there, w and b of
a norm that was not folded are counted. A soft cap on the logits comes after all this: the logit before the cap is attributed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.arguments import check_characters
from kvlens.errors import IndirectHeads
from kvlens.model import output_weights

FINAL_SCALE = "ln_final.hook_scale"
NORM_BEHIND_HEADS = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
Token = int | str


def final_scale_name(model: KVModel) -> str:
    """The hook point to cache for :func:`final_scale`; the last residual stream for a model without a final norm."""
    return FINAL_SCALE if model.cfg.normalization_type is not None else f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"


def final_scale(model: KVModel, cache: Any) -> Float[Tensor, "*batch pos 1"]:
    """s at every position of a run: what the final norm divided by; 1 for a model without one.

    Args:
        model: the model that was run.
        cache: the cache of that run, an ActivationCache or a dict that includes :func:`final_scale_name`.
    """
    found = cache[final_scale_name(model)]
    return found if model.cfg.normalization_type is not None else torch.ones_like(found[..., :1])


def residual_directions(
    model: KVModel, tokens: Int[Tensor, "*position"], rival: Int[Tensor, "*position"] | None = None
) -> Float[Tensor, "*position d_model"]:
    """d_t: the direction whose product with a residual vector, over s, is that vector's part of the logit.

    Args:
        model: a model with LayerNorm, RMSNorm, either of them folded, or no final norm.
        tokens: the tokens whose logits are attributed.
        rival: tokens whose logits are subtracted; None subtracts the mean over the vocabulary.
    """
    way = model.ends()
    weights = way.W_U.to(torch.promote_types(way.W_U.dtype, torch.float32)).T
    directions = weights[tokens] - (weights.mean(dim=0) if rival is None else weights[rival])
    if way.norm_weight is not None:
        directions = directions * way.norm_weight
    if way.centers:
        directions = directions - directions.mean(dim=-1, keepdim=True)
    return directions


def constant_logits(
    model: KVModel, tokens: Int[Tensor, "*position"], rival: Int[Tensor, "*position"] | None = None
) -> Float[Tensor, "*position"]:
    """b . W_U[:, t] + b_U[t], the part that no summand adds. Arguments as for :func:`residual_directions`."""
    way = model.ends()
    constant = way.b_U.to(torch.promote_types(way.b_U.dtype, torch.float32))
    if way.norm_bias is not None:
        constant = constant + way.norm_bias.to(constant.dtype) @ way.W_U.to(constant.dtype)
    return constant[tokens] - (constant.mean() if rival is None else constant[rival])


def component_logits(
    model: KVModel,
    components: Float[Tensor, "component *position d_model"],
    scale: Float[Tensor, "*position 1"],
    tokens: Int[Tensor, "*position"],
    rival: Int[Tensor, "*position"] | None = None,
) -> Float[Tensor, " component *position"]:
    """What each summand of the residual stream adds to a centered logit, or to a logit difference, at each position.

    Args:
        model: as :func:`residual_directions`.
        components: summands of the residual stream before the final norm.
        scale: s at these positions, of :func:`final_scale`.
        tokens, rival: as :func:`residual_directions`, one per position.

    Returns:
        Their sum over all components, plus :func:`constant_logits`, is the model's centered logit, or logit difference.

    Source: Nanda & Bloom 2022, TransformerLens, ``ActivationCache.logit_attrs``.
    """
    directions = residual_directions(model, tokens, rival)
    return ((components.to(directions.dtype) * directions).sum(dim=-1)) / scale.squeeze(-1).to(directions.dtype)


def check_heads_write_directly(model: KVModel, analysis: str) -> None:
    """Raise IndirectHeads if the attention's output passes through a norm before it is added to the residual stream."""
    architecture = getattr(model.cfg, "original_architecture", None)
    if getattr(model.cfg, "use_normalization_before_and_after", False) or architecture in NORM_BEHIND_HEADS:
        raise IndirectHeads(
            f"{analysis}: in this model the attention's output passes through a norm before it is added to the residual "
            "stream, so logits cannot be attributed to heads; direct logit attribution needs heads that write to it directly"
        )


@dataclass(frozen=True)
class LogitTarget:
    """The logits of a text that are attributed, or measured under an ablation.

    Attributes:
        positions: positions in the text, each at most once.
        tokens: the token at each of them whose logit is read.
        rival: tokens whose logit is subtracted there; None subtracts the mean over the vocabulary.
    """

    positions: Int[Tensor, " position"]
    tokens: Int[Tensor, " position"]
    rival: Int[Tensor, " position"] | None

    def read(self, logits: Float[Tensor, "*batch pos d_vocab"]) -> Float[Tensor, "*batch position"]:
        """The centered logit, or logit difference, at each position, from a model's logits."""
        there = logits[..., self.positions, :]

        def of(tokens: Tensor) -> Tensor:
            return there.gather(-1, tokens[:, None].expand(*there.shape[:-1], 1)).squeeze(-1)

        return of(self.tokens) - (there.mean(dim=-1) if self.rival is None else of(self.rival))

    def probes(self, model: KVModel, scale: Float[Tensor, "pos 1"], layer: int) -> Float[Tensor, "pos head d_head"]:
        """W_O[head] d_t / s: the vector whose product with a head's output is its logit; zeros where there is no target."""
        w_o = output_weights(model, layer)
        directions = residual_directions(model, self.tokens, self.rival)
        directions = directions / scale[self.positions].to(directions.device)
        w_o = w_o.to(directions)
        probes = directions.new_zeros(scale.shape[0], *w_o.shape[:2])
        probes[self.positions] = torch.einsum("hdm,pm->phd", w_o, directions)
        return probes


def logit_target(
    model: KVModel, text: Int[Tensor, " pos"], answer: Token | None = None, rival: Token | None = None
) -> LogitTarget:
    """Make the target of an analysis of one text.

    Args:
        model: its tokenizer reads strings.
        text: the tokens.
        answer: the token whose logit is measured at the text's last position, by id or text; None takes, at every position but
            the last, the next token.
        rival: with ``answer``: the token whose logit is subtracted; None subtracts the mean over the vocabulary.

    Raises:
        KVLensError: ``rival`` without ``answer``, a string that is not exactly one token, an id outside the vocabulary.
    """
    if answer is None:
        if rival is not None:
            raise KVLensError("rival: its logit is subtracted from that of an answer; give answer= as well")
        check_predicts_text(model, text)
        return LogitTarget(torch.arange(len(text) - 1, device=text.device), text[1:], None)
    last = torch.tensor([len(text) - 1], device=text.device)
    ids = [None if token is None else _token_id(model, what, token) for what, token in (("answer", answer), ("rival", rival))]
    right, other = (None if token is None else torch.tensor([token], device=text.device) for token in ids)
    assert right is not None
    return LogitTarget(last, right, other)


def check_predicts_text(model: KVModel, text: Int[Tensor, " pos"]) -> None:
    """Raise KVLensError if the model cannot predict a token of the text."""
    n_out = model.cfg.d_vocab_out
    if len(text) > 1 and int(text[1:].max()) >= n_out:
        raise KVLensError(
            f"text: token {int(text[1:].max())} of the text has no logit, since this model predicts only {n_out} classes; use "
            "an analysis of chosen classes (answer=, or tokens= with next_token=False)"
        )


def _token_id(model: KVModel, what: str, token: Token) -> int:
    if isinstance(token, str):
        if model.tokenizer is None:
            raise KVLensError(f"{what}: this model has no tokenizer, so it cannot read {token!r}; give a token id")
        check_characters(what, token)
        ids = model.tokenizer(token, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise KVLensError(f"{what}: expected the text of one token, got {token!r}, which is {len(ids)}: {ids}")
        token = ids[0]
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < model.cfg.d_vocab_out:
        raise KVLensError(f"{what}: expected a token id in 0..{model.cfg.d_vocab_out - 1} or its text, got {token!r}")
    return token

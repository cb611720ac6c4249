"""The contributions of the model's parts to the residual stream and the logits, at every position of a text.

    x = embed + pos_embed + sum_l [ sum_h z_context W_O + sum_h z_bias W_O + b_O + mlp_l ]

is an identity: parts are only ever added. ``attention_input`` is what a layer's heads read from the text itself
(``hook_z_context``), ``attention_bias`` what they read from the converted or trained prompt (``hook_z_bias``); a head without a
bias, or with softmax attention, has only the first. Both share the normalizer: a prompt that adds nothing to the second still
dilutes the first. With the final norm's scale frozen at its value in the run, the logit minus the mean logit of the vocabulary
is a sum over the same parts (:mod:`kvlens.analyses.stream.logit_attribution`), plus one constant that belongs to none of them;
with a soft cap, this is the logit before the cap.

These are direct contributions: the effects of a part through later layers are attributed to those layers.

Source: TransformerLens' ``ActivationCache.decompose_resid`` and ``logit_attrs``; the attention's split in two is ICLCA eq. 13.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias, KVLensError, convert_prompt
from kvlens.checks import checked

from ..declaration import Analysis, Columns, Option
from ..front_ends import on_its_front_ends
from ..inputs import ANSWER, PROMPT, RIVAL, TEXT
from ..sequences import PromptTokens, TextTokens, one_bias, one_sequence
from ..texts import token_texts
from .logit_attribution import (
    Token,
    check_heads_write_directly,
    check_predicts_text,
    component_logits,
    constant_logits,
    final_scale,
    final_scale_name,
    logit_target,
)

COLUMNS = Columns(
    position=("int64", "0 is the first token of the text"),
    token=("str", "the token at this position"),
    target=("str", "``next`` or ``chosen``"),
    target_token=("str", "the token whose logit is split; missing for ``next`` at the last position"),
    layer=("int64", "-1 before the first layer; the number of layers for ``unembed_bias``"),
    component=(
        "str",
        "``embed``, ``pos_embed`` (where it is added), ``attention_input``, ``attention_bias`` (where there is a bias), "
        "``attention_b_O``, ``mlp`` (where there is one); last ``unembed_bias``, the constant, which is not part of the "
        "residual stream",
    ),
    head=("int64", "-1 if the component is not a single head"),
    norm=("float64", "norm of the component; 0 for ``unembed_bias``"),
    residual_share=("float64", "<component, residual> / <residual, residual>: sums to 1"),
    logit=("float64", "sums to the logit less the mean logit of the vocabulary; NaN where no token follows"),
)
NO_HEAD = -1
POSITIONS_ADDED = ("standard", "sinusoidal")
"""The kinds of positional embedding that are added to the residual stream; the others act inside the attention."""


@COLUMNS.document
@on_its_front_ends
@checked
@torch.no_grad()
def layer_contributions(
    model: HookedKVTransformer,
    prompt: KVBias | PromptTokens | None,
    text: TextTokens,
    *,
    next_token: bool = True,
    tokens: Sequence[Token] = (),
    per_head: bool = False,
) -> pd.DataFrame:
    """Split the final residual stream and chosen logits of a text, position by position.

    Args:
        model: with any attention; its heads must write to the residual stream directly.
        prompt: a bias, attached during the analysis; or a string or tokens [pos], which precede the text unconverted and get no
            rows. None takes the model as it is, with an attached or trained bias if it has one.
        text: a string, or tokens [pos], without BOS if it follows a prompt.
        next_token: whether to split the logit of the next token.
        tokens: ids or texts of further tokens whose logits are split at every position.
        per_head: one row per head instead of one per layer for ``attention_input`` and ``attention_bias``.

    Returns:
        One row per position, target and component; positions in order, targets as above (``next`` first), components in the
        order in which they are added:

        {columns}

    Raises:
        KVLensError: invalid tokens, a batch of biases, a bias of another model, nothing to split, a model that normalizes its
            attention's output, or one with contributions that are not in the table.
    """
    check_heads_write_directly(model, "layer_contributions")
    bias = one_bias("layer_contributions", prompt) if isinstance(prompt, KVBias) else None
    text, before = _text_and_before(model, text, None if isinstance(prompt, KVBias) else prompt, bias)
    targets = _targets(model, text, next_token, tokens)
    cache = _run(model, torch.cat([before, text]), len(text), bias)
    residual = cache[_last(model)].double()
    scale = final_scale(model, cache)
    parts, unexplained = [], residual.clone()
    for part in _parts(model, cache, per_head):
        unexplained -= part.vectors.double().sum(dim=0)
        parts.append(_measure(model, part, residual, scale, targets))
    _check_complete(model, residual, unexplained)
    labels = [label for part in parts for label in part.labels] + [("unembed_bias", model.cfg.n_layers, NO_HEAD)]
    constant = torch.stack([constant_logits(model, target.ids).double() for target in targets])[:, None]
    nothing = residual.new_zeros(1, len(text))
    return _frame(
        text=token_texts(model, text),
        targets=targets,
        labels=labels,
        norms=torch.cat([*(part.norms for part in parts), nothing]),
        shares=torch.cat([*(part.shares for part in parts), nothing]),
        logits=torch.cat([*(part.logits for part in parts), constant], dim=1),
    )


def _text_and_before(
    model: HookedKVTransformer, text: TextTokens, prompt: PromptTokens | None, bias: KVBias | None
) -> tuple[Tensor, Tensor]:
    """Read prompt and text, with BOS prepended to the string that the model reads first."""
    begins = model.prepends_bos and bias is None and model.attached_kv_bias is None
    if prompt is None:
        text = one_sequence(model, "text", text, prepend_bos=begins)
        return text, text[:0]
    before = one_sequence(model, "prompt", prompt, may_be_empty=True, prepend_bos=begins)
    return one_sequence(model, "text", text), before


class _Target(NamedTuple):
    """The token whose logit is split at each position; ``texts`` is None, and the logit NaN, if there is none."""

    kind: str
    ids: Int[Tensor, " pos"]
    texts: list[str | None]


Label = tuple[str, int, int]
"""component, layer, head"""


class _Part(NamedTuple):
    labels: list[Label]
    vectors: Float[Tensor, "component pos d_model"]


class _Measured(NamedTuple):
    labels: list[Label]
    norms: Float[Tensor, "component pos"]
    shares: Float[Tensor, "component pos"]
    logits: Float[Tensor, "target component pos"]


def _targets(model: HookedKVTransformer, text: Tensor, next_token: bool, tokens: Sequence[Token]) -> list[_Target]:
    targets = []
    if next_token:
        check_predicts_text(model, text)
        following = torch.cat([text[1:], text[:1]])  # the last one is not read
        targets.append(_Target("next", following, [*token_texts(model, text)[1:], None]))
    for token in tokens:
        ids = logit_target(model, text, token).tokens.expand(len(text))
        targets.append(_Target("chosen", ids, [*token_texts(model, ids)]))
    if not targets:
        raise KVLensError("layer_contributions: no logit to split; give next_token=True or tokens=[...]")
    return targets


def _last(model: HookedKVTransformer) -> str:
    return f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"


def _run(model: HookedKVTransformer, tokens: Tensor, n_text: int, bias: KVBias | None) -> Mapping[str, Tensor]:
    """Run the model and return the activations behind the parts, at the text's positions: [pos, ...]."""
    cfg = model.cfg
    names = ["hook_embed", _last(model), final_scale_name(model)]
    names += ["hook_pos_embed"] if cfg.positional_embedding_type in POSITIONS_ADDED else []
    names += [f"blocks.{layer}.attn.hook_{z}" for layer in range(cfg.n_layers) for z in ("z", "z_context", "z_bias")]
    names += [] if cfg.attn_only else [f"blocks.{layer}.hook_mlp_out" for layer in range(cfg.n_layers)]
    how = dict(attention_mask=torch.ones_like(tokens[None]), names_filter=names, return_type=None)
    if bias is None:
        _, cache = model.run_with_cache(tokens[None], **how)
    else:
        with model.kv_bias(bias):
            _, cache = model.run_with_cache(tokens[None], **how)
    return {name: value[0, -n_text:] for name, value in cache.items()}


def _parts(model: HookedKVTransformer, cache: Mapping[str, Tensor], per_head: bool) -> Iterator[_Part]:
    """Yield embeddings, then parts layer by layer, so that only one layer's vectors are in memory at a time."""
    embeddings = [name for name in ("embed", "pos_embed") if f"hook_{name}" in cache]
    yield _Part([(name, -1, NO_HEAD) for name in embeddings], torch.stack([cache[f"hook_{name}"] for name in embeddings]))
    for layer in range(model.cfg.n_layers):
        attn = model.blocks[layer].attn
        heads = list(range(model.cfg.n_heads)) if per_head else [NO_HEAD]
        vectors, labels = [], []
        for component, z in _head_outputs(cache, f"blocks.{layer}.attn."):
            w_o = attn.W_O.to(z)
            of_heads = torch.einsum("phd,hdm->hpm", z, w_o) if per_head else torch.einsum("phd,hdm->pm", z, w_o)[None]
            vectors.append(of_heads)
            labels += [(component, layer, head) for head in heads]
        vectors.append(attn.b_O.to(of_heads).expand_as(of_heads[:1]))
        labels.append(("attention_b_O", layer, NO_HEAD))
        if not model.cfg.attn_only:
            vectors.append(cache[f"blocks.{layer}.hook_mlp_out"][None].to(of_heads))
            labels.append(("mlp", layer, NO_HEAD))
        yield _Part(labels, torch.cat(vectors))


def _head_outputs(cache: Mapping[str, Tensor], attn: str) -> list[tuple[str, Float[Tensor, "pos head d_head"]]]:
    """The summands of ``hook_z``, in float32 or better; ``hook_z`` itself where no bias was read."""
    summands = {"attention_input": "z_context", "attention_bias": "z_bias"}
    if f"{attn}hook_z_bias" not in cache:
        summands = {"attention_input": "z"}
    found = [(component, cache[f"{attn}hook_{name}"]) for component, name in summands.items()]
    return [(component, z.to(torch.promote_types(z.dtype, torch.float32))) for component, z in found]


def _measure(model: HookedKVTransformer, part: _Part, residual: Tensor, scale: Tensor, targets: Sequence[_Target]) -> _Measured:
    vectors = part.vectors.double()
    return _Measured(
        part.labels,
        norms=vectors.norm(dim=-1),
        shares=(vectors * residual).sum(dim=-1) / residual.square().sum(dim=-1),
        logits=torch.stack([component_logits(model, part.vectors, scale, target.ids).double() for target in targets]),
    )


def _check_complete(model: HookedKVTransformer, residual: Tensor, unexplained: Tensor) -> None:
    """Refuse a table that does not add up, up to the square root of the dtype's precision, far above rounding."""
    missing = float(unexplained.norm() / residual.norm().clamp(min=torch.finfo(torch.float64).tiny))
    if missing > torch.finfo(model.cfg.dtype).eps ** 0.5:
        raise KVLensError(
            f"layer_contributions: {missing:.1%} of the final residual stream comes from something other than embeddings, "
            "attention and MLPs (a hook that is still attached, or an architecture that this analysis does not support)"
        )


def _frame(
    text: list[str], targets: Sequence[_Target], labels: Sequence[Label], norms: Tensor, shares: Tensor, logits: Tensor
) -> pd.DataFrame:
    """Rows by position, then target, then component."""
    n_targets, n_components, pos = logits.shape
    exists = torch.tensor([[name is not None for name in target.texts] for target in targets], device=logits.device)
    logits = logits.where(exists[:, None], float("nan")).permute(2, 0, 1)
    names = [target.texts[i] for i in range(pos) for target in targets]
    component, layer, head = (list(column) for column in zip(*labels, strict=True))

    def over_targets(values: Tensor) -> Tensor:
        return values.T[:, None].expand(-1, n_targets, -1)

    columns = {
        "position": [i for i in range(pos) for _ in range(n_targets * n_components)],
        "token": [token for token in text for _ in range(n_targets * n_components)],
        "target": [target.kind for target in targets for _ in range(n_components)] * pos,
        "target_token": [name for name in names for _ in range(n_components)],
        "layer": layer * (pos * n_targets),
        "component": component * (pos * n_targets),
        "head": head * (pos * n_targets),
        "norm": over_targets(norms),
        "residual_share": over_targets(shares),
        "logit": logits,
    }
    return COLUMNS.frame(columns)


def _after_prompt(
    model: HookedKVTransformer,
    prompt: Tensor,
    text: Tensor,
    answer: Token | None,
    rival: Token | None,
    *,
    per_head: bool = False,
) -> pd.DataFrame:
    """:func:`layer_contributions` with the prompt converted if that is exact, else placed before the text."""
    linear = model.cfg.attention == "linear"
    return layer_contributions(
        model,
        convert_prompt(model, prompt) if linear else prompt,
        text,
        tokens=[token for token in (answer, rival) if token is not None],
        per_head=per_head,
    )


def _check_model(model: HookedKVTransformer) -> None:
    check_heads_write_directly(model, "layer_contributions")


LAYER_CONTRIBUTIONS = Analysis(
    name="layer_contributions",
    summary="embedding, attention from the text, attention from the bias, MLP: norms and logits of each part, by position",
    function=_after_prompt,
    columns=COLUMNS,
    inputs={"prompt": PROMPT, "text": TEXT, "answer": ANSWER, "rival": RIVAL},
    options={"per_head": Option("one row per head instead of one per layer")},
    check_model=_check_model,
)

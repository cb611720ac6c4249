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

The summands are the model's parts, whose contributions at every position of a text :func:`layer_contributions` shows:

    x = embed + pos_embed + sum_l [ sum_h z_context W_O + sum_h z_bias W_O + b_O + mlp_l ]

is an identity: parts are only ever added. ``attention_input`` is what a layer's heads read from the text itself
(``hook_z_context``), ``attention_bias`` what they read from the converted or trained prompt (``hook_z_bias``); a head without a
bias has only the first. Both share the normalizer: a prompt that adds nothing to the second still dilutes the first. These are
direct contributions: the effects of a part through later layers are attributed to those layers.

Source: TransformerLens' ``ActivationCache.decompose_resid`` and ``logit_attrs``; the attention's split in two is ICLCA eq. 13.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias, KVLensError, KVModel, convert_prompt
from kvlens.checks import checked
from kvlens.errors import IndirectHeads
from kvlens.model import StreamReading, heads_per_layer, output_weights, read_stream
from kvlens.texts import token_texts

from .attribution.answers import Answer, Rival, answer_tokens
from .declaration import Columns, Option, analysis
from .sequences import PromptTokens, TextTokens, one_bias, one_sequence

FINAL_SCALE = "ln_final.hook_scale"
NORM_BEHIND_HEADS = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")


def final_scale_name(model: KVModel) -> str:
    """The hook point to cache for :func:`final_scale`; the last residual stream for a model without a final norm."""
    return FINAL_SCALE if model.cfg.normalization_type is not None else f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"


def final_scale(model: KVModel, cache: Mapping[str, Tensor]) -> Float[Tensor, "*batch pos 1"]:
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
    """d_t: the direction whose product with a residual vector, over s, is that vector's share of the logit.

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
    components: Float[Tensor, "component *position d_model"],
    scale: Float[Tensor, "*position 1"],
    directions: Float[Tensor, "*position d_model"],
) -> Float[Tensor, " component *position"]:
    """What each summand of the residual stream adds to a centered logit, or to a logit difference, at each position.

    Args:
        components: summands of the residual stream before the final norm.
        scale: s at these positions, of :func:`final_scale`.
        directions: of :func:`residual_directions`, which reads all of W_U: once for all components.

    Returns:
        Their sum over all components, plus :func:`constant_logits`, is the model's centered logit, or logit difference.

    Source: Nanda & Bloom 2022, TransformerLens, ``ActivationCache.logit_attrs``.
    """
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
        text: what is read: the text, and of an answer of several tokens all but the last.
        positions: positions in it, each at most once.
        tokens: the token at each of them whose logit is read.
        rival: tokens whose logit is subtracted there; None subtracts the mean over the vocabulary.
        weight: of the sum over the positions.
    """

    text: Int[Tensor, " pos"]
    positions: Int[Tensor, " position"]
    tokens: Int[Tensor, " position"]
    rival: Int[Tensor, " position"] | None = None
    weight: float = 1.0

    def read(self, logits: Float[Tensor, "*batch pos d_vocab"]) -> Float[Tensor, "*batch position"]:
        """The centered logit, or logit difference, at each position, from a model's logits."""
        there = logits[..., self.positions, :]

        def of(tokens: Tensor) -> Tensor:
            return there.gather(-1, tokens[:, None].expand(*there.shape[:-1], 1)).squeeze(-1)

        return of(self.tokens) - (there.mean(dim=-1) if self.rival is None else of(self.rival))

    def value(self, logits: Float[Tensor, "*batch pos d_vocab"]) -> Float[Tensor, "*batch"]:
        """Their weighted sum, in float64."""
        return self.read(logits).double().sum(dim=-1) * self.weight

    def probes(self, model: KVModel, scale: Float[Tensor, "pos 1"]) -> Iterator[Float[Tensor, "pos head d_head"]]:
        """Yield, layer by layer, W_O[head] d_t / s: the vector whose product with a head's output is its logit.

        It is zero where there is no target.
        """
        directions = residual_directions(model, self.tokens, self.rival)
        directions = directions / scale[self.positions].to(directions.device)
        for layer in range(model.cfg.n_layers):
            w_o = output_weights(model, layer).to(directions)
            probes = directions.new_zeros(scale.shape[0], *w_o.shape[:2])
            probes[self.positions] = torch.einsum("hdm,pm->phd", w_o, directions)
            yield probes


def logit_targets(model: KVModel, text: Int[Tensor, " pos"], answer: Answer = None, rival: Rival = None) -> list[LogitTarget]:
    """The targets of an analysis of one text, whose values are added up.

    Args:
        model: its tokenizer reads strings.
        text: the tokens.
        answer: whose logit is measured behind the text: words, a token id, or token ids; of several tokens the sum, each behind
            those before it. None takes the mean over every position but the last, of the next token.
        rival: with ``answer``: whose logit is subtracted; None subtracts the mean over the vocabulary.

    Returns:
        One target, or two, where answer and rival differ before their last token, and so are read behind different texts.

    Raises:
        KVLensError: ``rival`` without ``answer``, no token, an id outside the vocabulary.
    """
    if answer is None:
        if rival is not None:
            raise KVLensError("rival: its logit is subtracted from that of an answer; give answer= as well")
        check_predicts_text(model, text)
        n = len(text) - 1
        return [LogitTarget(text, torch.arange(n, device=text.device), text[1:], weight=1 / n if n else float("nan"))]
    said = predicted_tokens(model, "answer", answer)
    if rival is None:
        return [_behind(text, said)]
    other = predicted_tokens(model, "rival", rival)
    if torch.equal(said[:-1], other[:-1]):
        return [_behind(text, said, other)]
    return [_behind(text, said), _behind(text, other, weight=-1.0)]


def _behind(
    text: Int[Tensor, " pos"], said: Int[Tensor, " said"], rival: Int[Tensor, " said"] | None = None, weight: float = 1.0
) -> LogitTarget:
    read = torch.cat([text, said[:-1]])
    return LogitTarget(read, torch.arange(len(text) - 1, len(read), device=text.device), said, rival, weight)


def check_predicts_text(model: KVModel, text: Int[Tensor, " pos"]) -> None:
    """Raise KVLensError if the model cannot predict a token of the text."""
    n_out = model.cfg.d_vocab_out
    if len(text) > 1 and int(text[1:].max()) >= n_out:
        raise KVLensError(
            f"text: token {int(text[1:].max())} of the text has no logit, since this model predicts only {n_out} classes; use "
            "an analysis of chosen classes (answer=, or tokens= with next_token=False)"
        )


def predicted_tokens(model: KVModel, what: str, given: Answer | Rival) -> Int[Tensor, " said"]:
    """:func:`answer_tokens` of which each has a logit; a regressor or classifier predicts other ones than it reads."""
    tokens = answer_tokens(model, what, given)
    if int(tokens.max()) >= model.cfg.d_vocab_out:
        raise KVLensError(f"{what}: expected token ids in 0..{model.cfg.d_vocab_out - 1} or words, got {given!r}")
    return tokens


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


@COLUMNS.document
@checked
@torch.no_grad()
def layer_contributions(
    model: KVModel,
    prompt: KVBias | PromptTokens | None,
    text: TextTokens,
    *,
    next_token: bool = True,
    tokens: Sequence[int | str] = (),
    per_head: bool = False,
) -> pd.DataFrame:
    """Split the final residual stream and chosen logits of a text, position by position.

    Args:
        model: with any attention; its heads must write to the residual stream directly, or, in a recurrent layer, through a
            norm and a gate, which are held as in this pass.
        prompt: a bias, attached during the analysis; or a string or tokens [pos], which precede the text unconverted and get no
            rows. None takes the model as it is, with an attached or trained bias if it has one.
        text: a string, or tokens [pos], without BOS if it follows a prompt.
        next_token: whether to split the logit of the next token.
        tokens: further tokens whose logits are split at every position: ids, or words, of which each token is one.
        per_head: one row per head instead of one per layer for ``attention_input`` and ``attention_bias``.

    Returns:
        One row per position, target and component; positions in order, targets as above (``next`` first), components in the
        order in which they are added:

        {columns}

    Raises:
        KVLensError: invalid tokens, a batch of biases, a bias of another model, nothing to split, a model that normalizes its
            attention's output, or one with contributions that are not in the table.
    """
    _check_model(model)
    bias = one_bias("layer_contributions", prompt) if isinstance(prompt, KVBias) else None
    text, before = _text_and_before(model, text, None if isinstance(prompt, KVBias) else prompt, bias)
    targets = _targets(model, text, next_token, tokens)
    with contextlib.nullcontext() if bias is None else model.kv_bias(bias):
        stream = read_stream(model, torch.cat([before, text]), len(text))  # at the text's positions, in one pass
    residual, directions = stream.residual.double(), [residual_directions(model, target.ids) for target in targets]
    unexplained, labels, norms, shares, logits = residual.clone(), list[Label](), [], [], []
    for of_part, x in stream_parts(model, stream, per_head):
        vectors = x.double()
        unexplained -= vectors.sum(dim=0)
        labels += of_part
        norms.append(vectors.norm(dim=-1))
        shares.append((vectors * residual).sum(dim=-1) / residual.square().sum(dim=-1))
        logits.append(torch.stack([component_logits(x, stream.scale, direction).double() for direction in directions]))
    _check_complete(stream.residual, unexplained)
    labels.append(("unembed_bias", model.cfg.n_layers, NO_HEAD))
    logits.append(torch.stack([constant_logits(model, target.ids).double() for target in targets])[:, None])
    nothing = residual.new_zeros(1, len(text))
    together = torch.cat([*norms, nothing]), torch.cat([*shares, nothing]), torch.cat(logits, dim=1)
    return _frame(token_texts(model, text), targets, labels, *together)


def _text_and_before(
    model: KVModel, text: TextTokens, prompt: PromptTokens | None, bias: KVBias | None
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
"""The component, layer and head of a row."""


def _targets(model: KVModel, text: Tensor, next_token: bool, tokens: Sequence[int | str]) -> list[_Target]:
    targets = []
    if next_token:
        check_predicts_text(model, text)
        following = torch.cat([text[1:], text[:1]])  # the last one is not read
        targets.append(_Target("next", following, [*token_texts(model, text)[1:], None]))
    for token in [token for given in tokens for token in predicted_tokens(model, "tokens", given)]:
        ids = token.expand(len(text))
        targets.append(_Target("chosen", ids, [*token_texts(model, ids)]))
    return targets


def stream_parts(
    model: KVModel, stream: StreamReading, per_head: bool
) -> Iterator[tuple[list[Label], Float[Tensor, "component pos d_model"]]]:
    """Yield embeddings, then parts layer by layer, so that only one layer's vectors are in memory at a time."""
    yield [(name, -1, NO_HEAD) for name in stream.embeddings], torch.stack([*stream.embeddings.values()])
    for layer, (own, of) in enumerate(zip(model.layers(), stream.layers, strict=True)):
        heads = list(range(of.z_context.shape[1])) if per_head else [NO_HEAD]
        vectors, labels = [], []
        for component, z in (("attention_input", of.z_context), ("attention_bias", of.z_bias)):
            if z is None:
                continue
            z = z.to(torch.promote_types(z.dtype, torch.float32))
            w_o, written = output_weights(model, layer).to(z), z if of.factor is None else z * of.factor.to(z)
            summed = torch.einsum("phd,hdm->hpm" if per_head else "phd,hdm->pm", written, w_o)
            vectors.append(summed if per_head else summed[None])
            labels += [(component, layer, head) for head in heads]
        like = vectors[0][:1]
        b_O = [part.output_bias for part in own.parts if part.output_bias is not None]
        vectors.append(torch.stack(b_O).sum(dim=0).to(like).expand_as(like) if b_O else torch.zeros_like(like))
        labels.append(("attention_b_O", layer, NO_HEAD))
        if of.mlp is not None:
            vectors.append(of.mlp[None].to(like))
            labels.append(("mlp", layer, NO_HEAD))
        yield labels, torch.cat(vectors)


def _check_complete(residual: Tensor, unexplained: Tensor) -> None:
    """Refuse a table that does not add up, up to the square root of the dtype's precision, far above rounding."""
    missing = float(unexplained.norm() / residual.double().norm().clamp(min=torch.finfo(torch.float64).tiny))
    if missing > torch.finfo(residual.dtype).eps ** 0.5:
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
    logits = rearrange(logits.where(exists[:, None], float("nan")), "target component pos -> pos target component")
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


def _check_model(model: KVModel) -> None:
    check_heads_write_directly(model, "layer_contributions")
    counts = heads_per_layer(model)
    if 0 in counts:
        raise IndirectHeads(
            f"{model.cfg.architecture}: {counts.count(0)} of {len(counts)} layers have no heads, so what enters the residual "
            "stream is not a sum over heads and MLPs; this needs a model whose layers all have heads"
        )


@analysis(
    COLUMNS,
    "embedding, attention from the text, attention from the bias, MLP: norms and logits of each part, by position",
    cost="the prompt and the text once",
    of=layer_contributions,
    options={"per_head": Option("one row per head instead of one per layer")},
    check_model=_check_model,
)
def _after_prompt(
    model: KVModel,
    prompt: Tensor,
    text: Tensor,
    answer: Answer,
    rival: Rival,
    *,
    per_head: bool = False,
) -> pd.DataFrame:
    """:func:`layer_contributions` with the prompt converted, so that what heads read of it has rows of its own."""
    return layer_contributions(
        model,
        convert_prompt(model, prompt),
        text,
        tokens=[
            int(token)
            for what, given in (("answer", answer), ("rival", rival))
            if given is not None
            for token in predicted_tokens(model, what, given)
        ],
        per_head=per_head,
    )

"""Why a head attends: its score by who wrote what its query and its key read; and what it copies, by who wrote its values.

    s_ij = sum_ab q_ia . k_jb / c        z_i = sum_j p_ij sum_b v_jb

with the query, the keys and the values of each writer (:mod:`kvlens.analyses.heads.writers`). A key or value is named by its
position; with a KV shift it mixes those of the tokens before it, and so do its writers' parts. A soft cap is held, like norms,
as the factor by which it multiplies the score of this query and key. ALiBi adds a number to the score that nobody wrote: its
row is ``distance``; so does the weight of a bias's key, ``key weights``, and to the contrast an attention sink, ``sink``.

The softmax does not see a number that is added to every score of a query. What it sees is the *contrast*

    s_ij - sum_m w_m s_im        w_m = p_im over the sum of p_i of all keys but j, and of the attention sink where there is one

with the keys that j competes with. It is linear in the scores, and so the same pairs add up to it. A part of the score that all
keys share, such as what a bias of the query adds, is none of the contrast.
"""

import math
from collections.abc import Callable
from typing import Annotated

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import KVBias, KVLensError, KVModel
from kvlens.checks import Within, checked
from kvlens.model import head_hooks
from kvlens.texts import token_texts

from ..attribution.answers import Answer, Rival, answer_and_rival
from ..declaration import TEXT_IF_ANY, Columns, Option, analysis
from ..logit_attribution import LogitTarget, residual_directions
from ..sequences import PromptTokens, TextTokens
from .writers import NO_VECTOR, SINK, HeadByWriter, Scored, TokenOfText, head_by_writer, position_of, reading

SUMMED, EVERYWHERE = "all", -1

WHY = Columns(
    side=(
        "str",
        "what is summed: ``key`` (over who wrote the query), ``query`` (over who wrote the key), or ``pair`` (nothing)",
    ),
    query_writer=("str", "who wrote this part of the query; ``all`` where summed"),
    key_writer=("str", "who wrote this part of the key; ``all`` where summed"),
    contrast=("float64", "this part of the score less the mean score of the other keys, weighted by their attention"),
    score=("float64", "this part of the score"),
    contrast_run=("float64", "how much lower the contrast is in a run without what this writer wrote; NaN where not run"),
    score_run=("float64", "the same of the score"),
    attention_run=("float64", "the same of the attention"),
    position=("int64", "in prompt and text together, from 0; the keys of a bias are counted first"),
    query_token=("str", "the token that attends"),
    key_position=("int64", "counted in the same way"),
    key_token=("str", "the token that is attended to"),
    attention=("float64", "from the query to the key"),
)
OPTIONS = {
    "layer": Option("the layer of the head, from 0", value_type=int),
    "head": Option("the head, from 0", value_type=int),
    "query": Option("the token that attends: a word, or a position in prompt and text together; by default the last"),
    "n_run": Option("how many writers of each side are taken out in runs"),
}


@analysis(
    WHY,
    "why a head attends from one token to another: the score by who wrote what query and key are made of",
    cost="the prompt and the text once; the layer's queries and keys once for each of the n_run writers that are taken out",
    inputs={"text": TEXT_IF_ANY},
    options={**OPTIONS, "key": Option("the token that is attended to, likewise; by default the one with the most attention")},
)
@checked
@torch.no_grad()
def why_attends(
    model: KVModel,
    prompt: PromptTokens | KVBias,
    text: TextTokens | None = None,
    layer: Annotated[int, Within(0)] | None = None,
    head: Annotated[int, Within(0)] | None = None,
    *,
    query: TokenOfText = None,
    key: TokenOfText = None,
    n_run: Annotated[int, Within(0)] = 5,
) -> pd.DataFrame:
    """Why a head attends from one token to another: its score, and its contrast to other keys, by pairs of writers.

    ``contrast`` and ``score`` are shares: exact parts of a sum, in which every norm divides by what it divides by in this pass.
    For the writers named first an intervention is run, too: what this writer added to the residual stream is taken out of what
    this head's keys are made of (of what its query is made of), and of nothing else. Share and run differ where the writer is a
    large part of the stream: without it norms divide by less, and all other parts of the key grow. In SmolLM2 the MLP of layer
    11 writes nearly all of the first token, to which many heads attend, and its run can be half as large again as its share. A
    soft cap, too, is held in the share and not in the run; ``attention_run`` has gone through the softmax.

    >>> from kvlens import HookedKVTransformer
    >>> model = HookedKVTransformer.from_zoo("docs-gpt2")
    >>> table = why_attends(model, "The widget is purple.", " The widget is", layer=1, head=0, key="purple")
    >>> whole = table.groupby("side")["score"].sum()  # as of pairs, so of those who wrote the key, and the query
    >>> bool(abs(whole["key"] - whole["pair"]) < 1e-5 and abs(whole["query"] - whole["pair"]) < 1e-5)
    True

    Args:
        model: with softmax attention in this layer, whose heads and MLPs write to the residual stream directly. An attached
            bias is read as the prompt's beginning.
        prompt: a string, a chat, or tokens [pos]; or a bias that holds keys, each of which is ``the prompt``'s alone.
        text: what follows, a string or tokens [pos]; None for nothing.
        layer, head: the head, from 0.
        query: the token that attends: a word (its last token, where it stands last), or a position in prompt and text, from the
            end if negative; None for the last.
        key: the token that is attended to, likewise (of the word's tokens the one with the most attention); None for the token
            with the most attention.
        n_run: how many writers are taken out of the keys, and how many out of the query.

    Returns:
        One row for each writer of the key, of the query, and for each pair of them, by the size of the contrast; what is 0 in
        both is left out. Contrasts are NaN where no other key is seen. The rows of each side add up to the whole:

        {columns}

    Raises:
        KVLensError: no such head or word, linear attention, a model of whose residual stream or scores the parts are no sum.
    """
    read = head_by_writer(model, prompt, text, layer, head, query)
    attention = read.attention(read.own_scores)
    j = position_of("key", key, read.texts, 0, attention)
    if not bool(read.visible[j]):
        seen, by = (f"position {at} ({read.texts[at]!r})" for at in (j, read.query))
        raise KVLensError(f"key: {seen} is not seen from {by}: it comes later, is outside this layer's window, or weighs 0")
    names, weights, pairs = _pairs(read, j)
    asked = {"position": read.query, "query_token": read.texts[read.query], "key_position": j, "key_token": read.texts[j]}
    frames = []
    for side, parts in (("key", pairs.sum(dim=1)), ("query", pairs.sum(dim=2)), ("pair", pairs.flatten(1))):
        order, falls = _by_size(parts), torch.full((3, parts.shape[1]), torch.nan, dtype=torch.float64)
        run = [n for n in order if side != "pair" and names[n] not in NO_VECTOR][:n_run]
        if run:
            falls[:, run] = _falls(read, read.without(model, [names[n] for n in run]), side, weights, j).cpu()
        by_query = [names[n // len(names) if side == "pair" else n] for n in order]
        frames.append(
            WHY.frame(
                {
                    "side": side,
                    "query_writer": SUMMED if side == "key" else by_query,
                    "key_writer": SUMMED if side == "query" else [names[n % len(names)] for n in order],
                    **dict(zip(("contrast", "score"), parts[:, order], strict=True)),
                    **dict(zip(("contrast_run", "score_run", "attention_run"), falls[:, order], strict=True)),
                    **asked,
                    "attention": float(attention[j]),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def _pairs(
    read: HeadByWriter, key: int
) -> tuple[list[str], Float[Tensor, "2 key"], Float[Tensor, "2 query_writer key_writer"]]:
    """All writers, contrast and score as sums over keys with weights, and both by pairs; what nobody wrote stands by itself."""
    (w, of_sink), one = read.rivals(key), torch.zeros_like(read.own_scores)
    one[key] = 1
    weights = torch.stack([one - w, one])
    unwritten = {name: weights @ x for name, x in read.added.items()}
    if read.sink is not None:
        unwritten[SINK] = torch.stack([-of_sink * read.sink, torch.zeros_like(of_sink)])
    keys = torch.einsum("ck,bkd->cbd", weights * read.factors(), read.k)
    pairs = torch.einsum("ad,cbd->cab", read.q, keys)
    pairs = torch.stack([torch.block_diag(*of) for of in zip(pairs, *unwritten.values(), strict=True)])
    return [*read.writers, *unwritten], weights, pairs


def _by_size(parts: Float[Tensor, "measure part"]) -> list[int]:
    """The parts by the size of the first measure, or of the second where that is NaN; those that are 0 in both are left out."""
    order = parts[int(bool(parts[0].isnan().any()))].abs().argsort(descending=True, stable=True).tolist()
    there = (parts != 0).any(dim=0).tolist()
    return [n for n in order if there[n]]


def _falls(
    read: HeadByWriter, rows: Scored, side: str, weights: Float[Tensor, "2 key"], key: int
) -> Float[Tensor, "measure row"]:
    """By how much contrast, score and attention of a key fall with the head's keys, or its query, from other rows."""
    q, k = read.q.sum(dim=0), read.k.sum(dim=0)
    if side == "query":
        scores = read.scores(rows.q[:, read.at, read.head], k)
    else:
        keys = rows.k[:, :, read.kv_head]
        scores = read.scores(q, torch.cat([k[: read.n_before].expand(len(keys), -1, -1), keys], dim=1))
    fall = (read.own_scores - scores).where(read.visible, 0) @ weights.T
    attention = read.attention(read.own_scores)[key] - read.attention(scores)[:, key]
    return torch.cat([fall.T, attention[None]])


COPIED = Columns(
    side=("str", "what is summed: ``writer`` (over positions), ``position`` (over writers), or ``pair`` (nothing)"),
    value_writer=("str", "who wrote this part of the values; ``all`` where summed"),
    key_position=("int64", "in prompt and text together, from 0, a bias's keys first; -1 where summed"),
    key_token=("str", "the token there; ``all`` where summed"),
    attention=("float64", "to it; 1 where summed, but for an attention sink"),
    share=("float64", "<this part, z> / <z, z>: sums to 1"),
    logit=("float64", "what this part adds to the logit, directly, with the final norm's scale as it is"),
    logit_run=(
        "float64",
        "how much lower the logit is in a run without what this writer wrote in the values; NaN where not run",
    ),
    position=("int64", "counted like keys"),
    query_token=("str", "the token that attends"),
    answer=("str", "the token whose logit it is"),
)


@analysis(
    COPIED,
    "what a head copies: its output by position and by who wrote the values, and what that adds to an answer's logit",
    cost="the prompt and the text twice, and once for each of the n_run writers that are taken out",
    inputs={"text": TEXT_IF_ANY},
    options=OPTIONS,
)
@checked
@torch.no_grad()
def what_is_copied(
    model: KVModel,
    prompt: PromptTokens | KVBias,
    text: TextTokens | None = None,
    layer: Annotated[int, Within(0)] | None = None,
    head: Annotated[int, Within(0)] | None = None,
    *,
    query: TokenOfText = None,
    answer: Answer = None,
    rival: Rival = None,
    n_run: Annotated[int, Within(0)] = 5,
) -> pd.DataFrame:
    """What a head copies: its output by position and by who wrote the values, and what that adds to an answer's logit.

    ``share`` and ``logit`` are exact parts of sums, in which norms divide by what they divide by in this pass; ``logit`` is
    what the head adds itself (:mod:`kvlens.analyses.logit_attribution`). For the writers named first an intervention is run,
    too: what each added to the residual stream is taken out of what this head's values are made of, at every token, and of
    nothing else; attention stays. The two differ: without a large writer the norm divides by less, and the other parts of the
    values grow; and later layers read what the head wrote, at this token and at others, which ``logit`` does not count.

    >>> from kvlens import HookedKVTransformer
    >>> model = HookedKVTransformer.from_zoo("docs-gpt2")
    >>> table = what_is_copied(model, "The widget is purple.", " The widget is", layer=1, head=0)
    >>> [round(float(x), 6) for x in table.groupby("side")["share"].sum()]
    [1.0, 1.0, 1.0]

    Args:
        model, prompt, text, layer, head, query: as :func:`why_attends`.
        answer: words, a token id or token ids, of which the first is the token whose logit it is, as the head's output there
            predicts only that; None for the token that the model finds likeliest.
        rival: likewise, whose logit is subtracted; None subtracts the mean over the vocabulary.
        n_run: how many writers are taken out.

    Returns:
        One row for every writer, for every position, and for every pair, by the size of the logit; what is 0 is left out:

        {columns}

    Raises:
        KVLensError: as :func:`why_attends`; no such answer.
    """
    read = head_by_writer(model, prompt, text, layer, head, query)
    outputs, attention, width = read.outputs(), read.attention(read.own_scores), len(read.texts)
    own = _logits(model, read)
    target = _target(model, read, int(own[0, 0].argmax()) if answer is None else answer, rival)
    direction = residual_directions(model, target.tokens, target.rival)[0].double() / read.stream.scale[read.at].double()
    w_o, z = model.layers()[read.layer].parts[0].output_weights()[read.head].double(), outputs.sum(dim=(0, 1))
    measures = torch.stack([outputs @ (w_o @ direction), outputs @ z / z.square().sum()])  # logit and share
    falls = torch.full((len(read.writers),), torch.nan, dtype=torch.float64)
    run = [n for n in _by_size(measures.sum(dim=2)) if read.writers[n] not in NO_VECTOR][:n_run]
    if run:
        values = read.without(model, [read.writers[n] for n in run]).v[:, :, read.kv_head]
        changed = _logits(model, read, values - read.v.sum(dim=0)[read.n_before :])
        falls[run] = (target.read(own) - target.read(changed))[:, 0].double().cpu()
    frames = []
    for side, parts in (("writer", measures.sum(dim=2)), ("position", measures.sum(dim=1)), ("pair", measures.flatten(1))):
        order = _by_size(parts)
        at = [EVERYWHERE if side == "writer" else n % width for n in order]
        who = [n if side == "writer" else n // width for n in order]
        frames.append(
            COPIED.frame(
                {
                    "side": side,
                    "value_writer": SUMMED if side == "position" else [read.writers[n] for n in who],
                    "key_position": at,
                    "key_token": [SUMMED if j == EVERYWHERE else read.texts[j] for j in at],
                    "attention": attention.sum().expand(len(at)) if side == "writer" else attention[at],
                    **dict(zip(("logit", "share"), parts[:, order], strict=True)),
                    "logit_run": falls[order] if side == "writer" else math.nan,
                    **{"position": read.query, "query_token": read.texts[read.query]},
                    "answer": token_texts(model, target.tokens)[0],
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def _target(model: KVModel, read: HeadByWriter, answer: Answer, rival: Rival) -> LogitTarget:
    """The first token of the answer, less that of the rival, of logits [row, 1, d_vocab]."""
    token, other = answer_and_rival(model, answer, rival, 1)
    return LogitTarget(read.tokens, torch.zeros_like(token), token, other)


def _logits(
    model: KVModel, read: HeadByWriter, changes: Float[Tensor, "row pos d_head"] | None = None
) -> Float[Tensor, "row 1 d_vocab"]:
    """The logits at the query; in each row with the values of the head, and of no other, changed at the tokens."""
    rows, hooks = read.tokens[None], list[tuple[str, Callable[..., Tensor | None]]]()
    if changes is not None:
        change = torch.einsum("ij,rjd->rid", read.pattern, changes)
        change = change if read.gate is None else change * read.gate
        point, n_heads = next(iter(head_hooks(model, read.layer, "hook_z").items()))

        def put(z: Tensor, hook: object) -> Tensor:
            by_head = z.reshape(*z.shape[:2], n_heads, -1).clone()
            by_head[:, :, read.head] += change.to(z)
            return by_head.reshape(z.shape)

        rows, hooks = read.tokens.expand(len(changes), -1), [(point, put)]
    with reading(model, read.bias), model.hooks(fwd_hooks=hooks):
        return model.logits_on(rows, len(read.tokens) - read.at)[:, :1]

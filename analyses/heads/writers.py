"""What a head reads in a pass, split by who wrote it: its query, its keys, its values.

    x = sum_a x_a        q_i = Q_i(0) + sum_a Q_i x_a        k_j = K_j(0) + sum_b K_j x_b        v_j = V_j(0) + sum_b V_j x_b

x is the residual stream before the head's layer, a sum of what its *writers* added: token embedding, positional embedding,
every head and every MLP below. Between it and the queries, keys and values as they are scored lie norms (of the stream, and in
some models of queries and keys), projections, KV shifts and rotations. All are linear, but for the number that a norm divides
by. With that number held at its value in the pass, Q_i, K_j and V_j are affine. Q_i(0), what norms and projections add without
reading anything, belongs to the writer ``biases``, as the b_O of attention layers do.

Nothing here knows a layer's formulas: the layer itself computes the queries, keys and values of every writer's vector, rows of
a batch, while its norms are held. What lies behind them, the score rule, is the model's own too. That it all adds up to the
scores, the pattern and the output of the pass is checked every time.

Under a KV bias the prompt's keys are those that the bias holds. Who wrote them is no longer known, so that each has one writer,
``the prompt``. Given as tokens, a prompt is read in the same pass as the text, and its keys have their writers.

Source: the QK and OV circuits of Elhage et al. 2021 (transformer-circuits.pub/2021/framework), with norms held as in
TransformerLens' ``ActivationCache.logit_attrs``.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kvlens import KVBias, KVLensError, KVModel
from kvlens.bridge import measured
from kvlens.errors import IndirectHeads
from kvlens.kv_bias import Keys
from kvlens.model import HeadsRead, StreamReading, heads_per_layer, read_stream
from kvlens.texts import token_texts

from ..logit_attribution import check_heads_write_directly, stream_parts
from ..sequences import one_bias, one_sequence, prompt_sequence

BIASES, THE_PROMPT, DISTANCE, KEY_WEIGHTS, SINK = "biases", "the prompt", "distance", "key weights", "sink"
NO_VECTOR = (BIASES, THE_PROMPT, DISTANCE, KEY_WEIGHTS, SINK)
"""Writers that cannot be taken out of the residual stream."""
NAMES = {"embed": "token embedding", "pos_embed": "positional embedding", "attention_b_O": BIASES}
NOT_SEEN = torch.finfo(torch.float32).min / 2
"""What a mask adds to a score is below it."""
TokenOfText = int | str | None
"""A token: a word of the text, a position, or None for the default."""


# --- a layer's queries, keys and values, as functions of the residual stream before it ----------------------------------------


class Scored(NamedTuple):
    """Queries, keys and values of a layer as scored, in float64."""

    q: Float[Tensor, "row pos head d_key"]
    k: Float[Tensor, "row pos kv_head d_key"]
    v: Float[Tensor, "row pos kv_head d_head"]


class _HaveBeenSeen(Exception):
    """Ends the pass through a layer as soon as queries, keys and values are there."""


class Front:
    """What lies between the residual stream before a layer and its queries, keys and values as scored.

    Args:
        block, part: the layer, and its attention.
        args, kwargs: what the block was called with in the pass that is looked at.

    Attributes:
        stream: the residual stream of that pass, [1, pos, d_model].
        own: its queries, keys and values.
    """

    def __init__(self, block: nn.Module, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.block, self.part = block, part
        self.stream: Tensor = args[0] if args else kwargs["hidden_states"]
        self._args = [None if _is_cache(x) else x for x in args[1:]]
        self._kwargs = {name: None if _is_cache(x) else x for name, x in kwargs.items() if name != "hidden_states"}
        self._norms: dict[tuple[nn.Module, torch.Size], _HeldNorm] = {}
        self._measuring = False
        self.own = self.held(self.stream)

    def held(self, stream: Float[Tensor, "row pos d_model"]) -> Scored:
        """Of other streams, with norms that divide by what they divided by in the pass."""
        with ExitStack() as stack:
            for norm in _norms_in(self.block):
                stack.callback(norm.register_forward_hook(self._hold, with_kwargs=True).remove)
            return self.as_read(stream)

    def as_read(self, stream: Float[Tensor, "row pos d_model"]) -> Scored:
        """Of other streams, as the layer reads them."""
        found: list[Tensor] = []

        def end(*qkv: Tensor) -> None:
            found.extend(x.double() for x in qkv)
            raise _HaveBeenSeen

        with ExitStack() as stack, suppress(_HaveBeenSeen):
            _observe(stack, self.part, end)
            self.block(stream.to(self.stream), *self._args, **self._kwargs)
        return Scored(*found)

    def _hold(self, norm: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], out: Tensor) -> Tensor | None:
        if self._measuring:
            return None
        x = (args[0] if args else next(iter(kwargs.values()))).double()
        call = norm, x.shape[1:]  # a norm may be called for queries, keys and values apart
        if call not in self._norms:
            self._measuring = True
            self._norms[call] = _HeldNorm.of(norm, x, out)
            self._measuring = False
            return None
        return self._norms[call](x).reshape(out.shape).to(out)


@dataclass(frozen=True, eq=False)
class _HeldNorm:
    """x -> (x - mean(x)) * gain / scale + bias, with the scale of each row of one pass, and rows of which are all of its."""

    gain: Float[Tensor, " d"]
    bias: Float[Tensor, " d"]
    centers: bool
    scale: Float[Tensor, "n 1"]

    @classmethod
    def of(cls, norm: nn.Module, x: Float[Tensor, "*n d"], out: Float[Tensor, "*n d"]) -> "_HeldNorm":
        """What a norm computes, and divided by when it made ``out`` of ``x``."""
        gain, bias, centers = measured(norm, out.new_zeros(out.shape[-1]))
        held = cls(gain.to(x), bias.to(x), centers, x.new_ones(x[..., 0].numel(), 1))
        made, divided = held(x) - held.bias, (out.double() - held.bias).reshape(len(held.scale), -1)
        return replace(held, scale=(made[0].norm(dim=-1) / divided.norm(dim=-1)).nan_to_num(1.0)[:, None])

    def __call__(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "row n d"]:
        x = x - x.mean(dim=-1, keepdim=True) if self.centers else x
        return (x * self.gain).reshape(-1, len(self.scale), x.shape[-1]) / self.scale + self.bias


def _observe(stack: ExitStack, part: Any, see: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    """Inside, ``see(q, k, v)`` is called with those of a layer as scored."""
    if not hasattr(part, "observe"):
        stack.callback(setattr, part.attn, "observer", part.attn.observer)
        part.attn.observer = see
        return
    seen: dict[tuple[int, str], Tensor] = {}

    def last(module: nn.Module, args: object, v: Tensor) -> None:
        see(seen[part.layer, "q"], seen[part.layer, "k"].transpose(1, 2), v.transpose(1, 2))

    for handle in (*part.observe(seen, "qk"), part.values.register_forward_hook(last)):
        stack.callback(handle.remove)


def _norms_in(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost norms in a module."""
    for child in module.children():
        if "Norm" in type(child).__name__:
            yield child
        else:
            yield from _norms_in(child)


def _is_cache(x: object) -> bool:
    return hasattr(x, "get_seq_length")


# --- one head at one query, by writer ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadByWriter:
    """What one head reads at one query of a pass, in float64, by writer. Keys of a bias stand before those of tokens.

    Attributes:
        layer, head, kv_head: the head, and the one whose keys and values it reads.
        tokens, bias: what was read, behind which bias.
        texts: the keys as text.
        query: the key of the token that attends.
        writers: their names.
        q, k, v: query, keys and values of each writer, as scored: sums over writers are the head's own.
        rule: how the layer scores a key.
        added: by name, what is added to the score of each key that nobody wrote.
        visible: the keys that the query sees.
        sink: the log-score of the head's attention sink; None without one.
        pattern, gate: attention between tokens, and what z is multiplied by at each, None without a gate.
        stream: the summands of the residual stream.
        front: what lies before the layer's queries, keys and values.
    """

    layer: int
    head: int
    kv_head: int
    tokens: Int[Tensor, " pos"]
    bias: KVBias | None
    texts: list[str]
    query: int
    writers: list[str]
    q: Float[Tensor, "writer d_key"]
    k: Float[Tensor, "writer key d_key"]
    v: Float[Tensor, "writer key d_head"]
    rule: Any
    added: dict[str, Float[Tensor, " key"]]
    visible: Bool[Tensor, " key"]
    sink: Float[Tensor, ""] | None
    pattern: Float[Tensor, "pos pos"]
    gate: Float[Tensor, "pos d_head"] | None
    stream: StreamReading
    front: Front

    @property
    def n_before(self) -> int:
        """How many keys are a bias's."""
        return len(self.texts) - len(self.tokens)

    @property
    def at(self) -> int:
        """The number of the query among the tokens."""
        return self.query - self.n_before

    @cached_property
    def own_scores(self) -> Float[Tensor, " key"]:
        """The head's scores."""
        return self.scores(self.q.sum(dim=0), self.k.sum(dim=0))

    def scores(self, q: Float[Tensor, "*#row d_key"], k: Float[Tensor, "*#row key d_key"]) -> Float[Tensor, "*row_of_both key"]:
        """Those of whole queries and keys; minus infinity at keys that the query does not see."""
        scores = self._capped((k @ q[..., None])[..., 0] / self.rule.scale)
        return sum(self.added.values(), scores).masked_fill(~self.visible, -torch.inf)

    def attention(self, scores: Float[Tensor, "*row key"]) -> Float[Tensor, "*row key"]:
        """The softmax of scores, and of the sink where there is one."""
        return self._with_sink(scores).softmax(dim=-1)[..., : scores.shape[-1]]

    def rivals(self, key: int) -> tuple[Float[Tensor, " key"], Float[Tensor, ""]]:
        """The attention to every key but one, and to the sink, over their sum; NaN where there is no other."""
        others = self.own_scores.clone()
        others[key] = -torch.inf
        w = self._with_sink(others).softmax(dim=-1)
        return w[: len(others)], w[len(others) :].sum()

    def factors(self) -> Float[Tensor, " key"]:
        """What q.k is multiplied by in the score of each key: 1 / c, times the soft cap's factor."""
        raw = self.k.sum(dim=0) @ self.q.sum(dim=0) / self.rule.scale
        return torch.where(raw == 0, 1.0, self._capped(raw) / raw) / self.rule.scale

    def outputs(self) -> Float[Tensor, "writer key d_head"]:
        """The summands of z."""
        z = self.v * self.attention(self.own_scores)[:, None]
        return z if self.gate is None else z * self.gate[self.at]

    def without(self, model: KVModel, writers: Sequence[str]) -> Scored:
        """Queries, keys and values without what each of some writers added to the stream, with norms as they then are."""
        taken = torch.zeros(len(writers), *self.front.stream.shape[1:]).to(self.front.stream)
        for names, vectors in _written(model, self.stream, self.layer):
            ours = [n for n, name in enumerate(names) if name in writers]  # a head that reads a bias comes twice
            place = torch.tensor([writers.index(names[n]) for n in ours], device=taken.device, dtype=torch.long)
            taken.index_add_(0, place, vectors[ours].to(taken))
        with reading(model, self.bias):
            return self.front.as_read(self.front.stream - taken)

    def _capped(self, scores: Tensor) -> Tensor:
        cap = self.rule.soft_cap
        return cap * torch.tanh(scores / cap) if cap else scores

    def _with_sink(self, scores: Tensor) -> Tensor:
        return scores if self.sink is None else torch.cat([scores, self.sink.expand(*scores.shape[:-1], 1)], dim=-1)


def head_by_writer(
    model: KVModel, prompt: object, text: object, layer: int | None, head: int | None, query: TokenOfText
) -> HeadByWriter:
    """Read prompt and text once, and split what a head reads at one token.

    Args:
        model: any with softmax attention in this layer.
        prompt: a string, a chat, or tokens; or a bias that holds its keys.
        text: what follows; None for nothing.
        layer, head: the head.
        query: the token, by a word or by its position in prompt and text; None for the last.

    Raises:
        KVLensError: no such head or token; a bias without keys; scores or outputs that are no sums over writers.
    """
    _check_head(model, layer, head)
    assert layer is not None
    assert head is not None
    bias = one_bias("prompt", prompt) if isinstance(prompt, KVBias) else model.attached_kv_bias
    parts = [] if isinstance(prompt, KVBias) else [prompt_sequence(model, "prompt", prompt)]
    tokens = torch.cat([*parts, *([] if text is None and parts else [one_sequence(model, "text", text)])])
    texts = token_texts(model, tokens)
    texts = texts if model.tokenizer is not None else [f" {x}" for x in texts]  # so that ids are words
    texts = [*([] if bias is None else [f"key {j}" for j in range(_keys_of(bias, layer).keys.shape[2])]), *texts]
    at = position_of("query", query, texts, len(texts) - len(tokens))
    with reading(model, bias):
        return _read(model, tokens, bias, texts, layer, head, at)


def reading(model: KVModel, bias: KVBias | None) -> AbstractContextManager[object]:
    """Inside, a bias is attached, where there is one."""
    return nullcontext() if bias is None else model.kv_bias(bias)


def position_of(what: str, given: TokenOfText, texts: Sequence[str], first: int, attention: Tensor | None = None) -> int:
    """The number of a token from ``first`` on; of several that a word names, the last, or the one with the most attention.

    Raises:
        KVLensError: there is none.
    """
    n = len(texts)
    if isinstance(given, int):
        if not first <= given % n or not -n <= given < n:
            raise KVLensError(f"{what}: expected a position from {first} to {n - 1}, or from {first - n} to -1, got {given}")
        return given % n
    found = range(first, n) if given is None else [j for j in _tokens_of(given, texts) if j >= first]
    if given is not None and not found and re.fullmatch(r"-?\d+", given):  # on the command line
        return position_of(what, int(given), texts, first, attention)
    if not found:
        raise KVLensError(
            f"{what}: {given!r} is not in what the model reads; give a word of it, or a position from {first} to {n - 1}"
        )
    return found[-1] if attention is None else max(found, key=lambda j: float(attention[j]))


def _tokens_of(word: str, texts: Sequence[str]) -> list[int]:
    """The tokens that hold something of a word; of words that begin with it, or of any, where it is none."""
    ends, word = list(accumulate(map(len, texts))), re.escape(word.strip() or word)
    for form in (rf"(?<!\w){word}(?!\w)", rf"(?<!\w){word}", word):
        spans = [found.span() for found in re.finditer(form, "".join(texts))]
        if spans:
            return [j for j, end in enumerate(ends) if any(a < end and end - len(texts[j]) < b for a, b in spans)]
    return []


def _check_head(model: KVModel, layer: int | None, head: int | None) -> None:
    """Raise KVLensError unless there is such a head, and who wrote what it reads can be told."""
    counts, family = heads_per_layer(model), getattr(model.cfg, "architecture", None)
    if layer is None or head is None:
        raise KVLensError(
            "layer, head: which head? Give layer= and head=, both from 0 (on the command line --layer and --head)"
        )
    if not (layer < len(counts) and head < counts[layer]):
        has = f"layer {layer} has {counts[layer]} heads" if layer < len(counts) else f"there are {len(counts)} layers"
        raise KVLensError(f"layer {layer}, head {head}: this model has no such head; {has}, counted from 0")
    part = model.layers()[layer].parts[0]
    if model.cfg.attention == "linear" or part.keeps_state or head >= part.n_heads:
        raise KVLensError(
            f"layer {layer}, head {head}: there are no scores to split, since linear attention and recurrent states do not "
            "weigh tokens by the exponential of q.k; choose a head of softmax attention"
        )
    check_heads_write_directly(model, "who wrote what a head reads")
    if 0 in counts[:layer]:
        raise IndirectHeads(
            f"{family}: layer {counts.index(0)} writes to the residual stream and has no heads, so who wrote is unknown"
        )
    if model.cfg.positional_embedding_type == "shortformer":
        raise KVLensError("shortformer positions are added to what queries and keys are made of, and so written by nobody")


def _keys_of(bias: KVBias, layer: int) -> Keys:
    """The keys that a bias holds in a layer.

    Raises:
        KVLensError: it holds none, or rows of a KV shift, which mix with the text's keys.
    """
    part = bias.layers[layer].attention
    if not isinstance(part, Keys) or any(x.shape[1] for x in bias.layers[layer].last.values()):
        holds = "rows of a KV shift" if isinstance(part, Keys) else "no keys"
        raise KVLensError(
            f"prompt: this bias holds {holds} in layer {layer}, whose scores cannot be split; give the prompt's tokens"
        )
    if bool((part.b_d < 0).any()):
        raise KVLensError("prompt: keys of this bias have negative weights, so that attention is no softmax of scores")
    return part


def _read(
    model: KVModel, tokens: Int[Tensor, " pos"], bias: KVBias | None, texts: list[str], layer: int, head: int, query: int
) -> HeadByWriter:
    """See :func:`head_by_writer`."""
    part = cast(Any, model.layers()[layer].parts[0])
    front, stream, seen = _pass(model, tokens, layer, part)
    if not {"scores", "pattern"} <= set(seen):
        raise _no_sum(model, layer)
    kv_head, i = head // (part.n_heads // front.own.k.shape[2]), query - len(texts) + len(tokens)
    names, q, k, v = _by_writer(model, front, stream, layer, (head, kv_head, kv_head), i)
    rule, scores = part.score_rule(), seen["scores"][head, i]
    distance, visible = i - torch.arange(len(tokens), device=q.device), scores > NOT_SEEN
    added = dict[str, Tensor]()
    if bias is not None:
        of_bias = _of_bias(_keys_of(bias, layer), head, part.n_heads)
        keys, values, weights, further = (x.to(q.device) for x in of_bias)
        k, v = (torch.nn.functional.pad(x, (0, 0, len(keys), 0, 0, 1)) for x in (k, v))
        k[-1, : len(keys)], v[-1, : len(keys)], q = keys, values, torch.nn.functional.pad(q, (0, 0, 0, 1))
        names, distance = [*names, THE_PROMPT], torch.cat([further + i, distance])
        near = (weights > -torch.inf) & (further + i < (rule.window or torch.inf))
        visible = torch.cat([near, visible])
        weights = torch.nn.functional.pad(weights.where(near, 0), (0, len(tokens)))
        added |= {KEY_WEIGHTS: weights} if bool(weights.any()) else {}
    if rule.slopes is not None:
        added[DISTANCE] = -rule.slopes[head].double() * distance
    sink = None if part.sinks is None else part.sinks.flatten()[head].double()
    gate = seen["gate"][:, head] if "gate" in seen else None
    found = HeadByWriter(
        *(layer, head, kv_head, tokens, bias, texts, query, names, q, k, v, rule, added, visible, sink),
        *(seen["pattern"][head], gate, stream, front),
    )
    _check_sums(model, found, scores, stream.layers[layer])
    return found


def _pass(model: KVModel, tokens: Int[Tensor, " pos"], layer: int, part: Any) -> tuple[Front, StreamReading, dict[str, Tensor]]:
    """One pass: what lies before a layer's queries, keys and values, the stream's summands, and what the layer shows."""
    seen, called, block = dict[str, Tensor](), list[Any](), cast(Any, model).blocks[layer]
    points = {**part.attention_points(), "scores": (part.attn.hook_attn_scores, None)}
    with ExitStack() as stack:
        for name in {"scores", "pattern", "gate"} & set(points):
            point, form = points[name]

            def see(_: nn.Module, args: object, x: Tensor, name: str = name, form: Any = form) -> None:
                seen[name] = (x if form is None else form(x))[0].double()

            stack.callback(point.register_forward_hook(see).remove)
        stack.callback(block.register_forward_pre_hook(lambda _, *given: called.append(given), with_kwargs=True).remove)
        stream = read_stream(model, tokens, len(tokens))
    return Front(block, part, *called[0]), stream, seen


def _written(
    model: KVModel, stream: StreamReading, layer: int
) -> Iterator[tuple[list[str], Float[Tensor, "writer pos d_model"]]]:
    """The names of those who wrote below a layer, and what they added to the residual stream; a name may come twice."""
    for labels, vectors in islice(stream_parts(model, stream, per_head=True), layer + 1):
        yield [NAMES.get(x, f"mlp {m}" if x == "mlp" else f"head {m}.{head}") for x, m, head in labels], vectors


def _by_writer(
    model: KVModel, front: Front, stream: StreamReading, layer: int, heads: tuple[int, int, int], i: int
) -> tuple[list[str], Float[Tensor, "writer d_key"], Float[Tensor, "writer key d_key"], Float[Tensor, "writer key d_head"]]:
    """Those who wrote below a layer, and the query at ``i``, the keys and the values that are theirs."""
    zero = front.held(torch.zeros_like(front.stream))

    def of_head(rows: Sequence[Tensor]) -> list[Tensor]:
        q, k, v = (x[:, :, head].clone() for x, head in zip(rows, heads, strict=True))  # a view would keep all heads
        return [q[:, i], k, v]

    named, found = [BIASES], [of_head(zero)]
    for names, vectors in _written(model, stream, layer):
        named += names
        found.append(of_head([x - of_zero for x, of_zero in zip(front.held(vectors), zero, strict=True)]))
    writers = list(dict.fromkeys(named))
    place = torch.tensor([writers.index(name) for name in named], device=zero.q.device)
    each = (torch.cat(of) for of in zip(*found, strict=True))
    q, k, v = (x.new_zeros(len(writers), *x.shape[1:]).index_add_(0, place, x) for x in each)
    return writers, q, k, v


def _of_bias(part: Keys, head: int, n_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, logarithms of weights, and distances from the text, that a bias holds for a head."""

    def row(x: Tensor) -> Tensor:
        return x[0, head // (n_heads // x.shape[1])]

    weight = row(part.b_d).double()
    values = row(part.b_kv).double() / weight.where(weight > 0, 1)[:, None]
    return row(part.keys).double(), values, weight.log() + row(part.log_scale).double(), row(part.distance)


def _check_sums(model: KVModel, found: HeadByWriter, scores: Float[Tensor, " pos"], layer: HeadsRead) -> None:
    """Refuse what does not add up to the pass, up to the square root of the dtype's precision, far above rounding."""
    seen, z = found.visible[found.n_before :], found.outputs().sum(dim=(0, 1))
    of_pass = [x[found.at, found.head].double() for x in (layer.z_context, layer.z_bias) if x is not None]
    both = [
        (found.own_scores[found.n_before :][seen], scores[seen]),
        (found.attention(found.own_scores)[found.n_before :], found.pattern[found.at]),
        (z, sum(of_pass[1:], of_pass[0])[: len(z)]),
    ]
    bound = torch.finfo(found.front.stream.dtype).eps ** 0.5
    if not all(float((ours - theirs).norm()) <= bound * max(float(theirs.norm()), bound) for ours, theirs in both):
        raise _no_sum(model, found.layer)


def _no_sum(model: KVModel, layer: int) -> KVLensError:
    family = getattr(model.cfg, "architecture", None) or "this model"
    return KVLensError(
        f"{family}: layer {layer} does something to its queries, keys, values or scores that is no sum over those who wrote "
        "them (it clamps them, puts an MLP behind them, or solves for its output), so they cannot be split"
    )

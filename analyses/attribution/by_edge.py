"""Between heads: what a head of a later layer reads of an earlier one, each edge ordered by gradient and confirmed by a run.

Prompt and text are read in one pass, and so is the counterfactual prompt, in which the tokens of a unit are deleted or replaced
in place. An *edge* leads from an earlier head's output z, on the text or while the prompt was read, to the queries, the keys or
the values of a head of a later layer. Its effect is found in two passes (path patching):

1. The sender has the z of the counterfactual prompt at the tokens of the prompt (or at those of the text), and every other head
   the z of the pass as it is. Norms and MLPs are recomputed. The receiver's queries (keys, values) x' are kept.
2. The pass as it is, with x' for the receiver's queries (keys, values) x at all tokens. What follows is recomputed.

So a path that leads through MLPs belongs to the edge (``through_mlps=False`` holds them, too), and one through a third head
does not. Keys and values at the prompt's tokens are what the prompt leaves to the text, in its bias as well. Deleted tokens
have no z without the unit: it is 0 there, since no head writes to what is not there.

*estimate*: sum g.(z - z'), g the gradient of the score at the receiver's z, and z' its z with x' for x alone. It is an order,
not a measure: where the answer's probability is near 1 it is a few hundredths of the effect.

Source: path patching (Wang et al. 2022, arXiv 2211.00593, app. B; Goldowsky-Dill et al. 2023, arXiv 2304.05969). The order is
that of attribution patching at edges (Syed et al. 2023, arXiv 2310.10348; AtP*, Kramar et al. 2024, arXiv 2403.00745). What
differs: z - z' is exact, with MLPs, norms and the receiver's softmax or normalizer, where theirs is linear in the sender's
output (AtP*: but for the softmax).
"""

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import pandas as pd
import torch
from einops import rearrange, reduce
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import Counterfactuals, HookedKVTransformer, KVLensError, KVModel
from kvlens.checks import Within, checked
from kvlens.memory import NUMBERS_PER_PASS
from kvlens.model import heads_per_layer

from ..declaration import PROMPT_OR_CHAT, Columns, Option, analysis
from ..predictions import EFFECT
from ..registry import on_its_front_ends
from ..sequences import PromptTokens, TextTokens
from .answers import BY, Answer, LogitsAfter, Question, Rival, Spans
from .by_part import without_each

WHERE, INPUTS = ("prompt", "text"), ("q", "k", "v")

COLUMNS = Columns(
    unit=("int64", "from 0"),
    name=("str", "such as ``minutes.txt, sentence 5``"),
    unit_text=("str", "of the unit"),
    sender_layer=("int64", "from 0"),
    sender_head=("int64", "query head"),
    where=("str", "what of its output is exchanged: at the tokens of the ``prompt``, while it was read, or of the ``text``"),
    receiver_layer=("int64", "a later one"),
    receiver_head=("int64", "query head for ``q``, key-value head for ``k`` and ``v``"),
    input=("str", "what changes at the receiver: ``q``, ``k`` or ``v``, its queries, keys or values"),
    estimate=("float64", "of effect by the gradient, nats: for the order of the rows alone"),
    effect=("float64", f"{EFFECT}; the edge from the counterfactual prompt. NaN where it was not run"),
    whole=("float64", f"{EFFECT}; everything from there, which is the unit's total effect"),
)
Change = Mapping[int, Float[Tensor, "1 pos head d_head"]]
"""Layer -> z of its heads with the counterfactual prompt."""


class GradientPass:
    """One pass over prompt and text, with the gradients of the log-probability of some tokens behind them.

    Args:
        question: what is asked.
        tokens: whose log-probability is the score.
        through_mlps: whether MLPs between sender and receiver are recomputed.

    Attributes:
        heads: layer -> its number of query heads, of layers that have any.
        stream: layer -> the residual stream before it, [1, pos, d_model].
        own: (layer, ``q``, ``k``, ``v`` or ``z``) -> queries, keys, values or outputs of its heads, [1, pos, head, d].
        gradient: layer -> that of the score at z.
        score: log p, nats.
    """

    def __init__(self, question: Question, tokens: Int[Tensor, " answer_pos"], through_mlps: bool):
        model = self.model = question.model
        self.question, self.tokens = question, tokens
        self.n_prompt, self.n_tokens = len(question.prompt), len(question.prompt) + len(question.text) + len(tokens) - 1
        self.heads = {layer: n for layer, n in enumerate(heads_per_layer(model)) if n}
        widest = max(model.cfg.d_mlp or 0, 6 * model.cfg.d_model, 2 * max(self.heads.values()) * self.n_tokens)
        numbers_per_row = 4 * self.n_tokens * widest + 7 * model.cfg.d_vocab_out * len(tokens)
        self.at_once = max(1, min(64, NUMBERS_PER_PASS // numbers_per_row))
        seen: dict[str, Tensor] = {}

        def keep(x: Tensor, hook: Any, name: str) -> Tensor:
            seen[name] = x = x if x.requires_grad else x.detach().requires_grad_()
            return x  # where a hook is shown heads in a shape of their own, only what it returns is read on

        point = "hook_resid_pre" if isinstance(model, HookedKVTransformer) else "hook_in"
        streams = {layer: f"blocks.{layer}.{point}" for layer in self.heads}
        points = {(layer, x): self._point(layer, x) for layer in self.heads for x in (*INPUTS, "z")}
        mlps = [] if through_mlps or model.cfg.attn_only else [f"blocks.{m}.hook_mlp_out" for m in range(model.cfg.n_layers)]
        hooks = [(name, partial(keep, name=name)) for name in (*streams.values(), *points.values(), *mlps)]
        with torch.enable_grad(), model.hooks(fwd_hooks=hooks):
            score = self._score(lambda text, n: model.logits_on(torch.cat([question.prompt, text])[None], n))[0]
            of_z = torch.autograd.grad(score, [seen[points[layer, "z"]] for layer in self.heads], allow_unused=True)
        for (layer, x), name in points.items():
            n = self._n_heads(layer, x)
            shape = tuple(seen[name].shape[1:])
            if shape[:2] != (self.n_tokens, n) and (len(shape) != 2 or shape[0] != self.n_tokens or shape[1] % n):
                raise _no_heads_at(name)
        self.score = float(score)
        self.stream = {layer: seen[name].detach() for layer, name in streams.items()}
        self.own = {key: self._by_head(*key, seen[name].detach()) for key, name in points.items()}
        self.mlps = {name: seen[name].detach() for name in mlps}
        self.gradient = {
            layer: torch.zeros_like(self.own[layer, "z"]) if g is None else self._by_head(layer, "z", g)
            for layer, g in zip(self.heads, of_z, strict=True)
        }

    def other(self, prompt: Counterfactuals) -> tuple[float, Change]:
        """The score after a counterfactual prompt, and every head's z."""
        seen: dict[int, list[Tensor]] = {layer: [] for layer in self.heads}

        def keep(z: Tensor, hook: Any, layer: int) -> None:
            seen[layer].append(self._by_head(layer, "z", z))  # linear attention reads the prompt first, and then the text

        hooks = [(self._point(layer, "z"), partial(keep, layer=layer)) for layer in list(self.heads)[:-1]]
        front: dict[str, Any] = dict(before=prompt.tokens, kept=prompt.kept, keeps_positions=True)
        with self.model.hooks(fwd_hooks=hooks):
            score = self._score(lambda text, n: self.model.logits_on(text[None], n, **front))[0]
        gone = torch.nn.functional.pad(~prompt.kept, (0, self.n_tokens - self.n_prompt)).to(self.question.prompt.device)
        z = {layer: torch.cat(parts, dim=1).masked_fill(gone[..., None, None], 0) for layer, parts in seen.items() if parts}
        return float(score), z

    def edges(self) -> Int[Tensor, "edge 5"]:
        """All edges: (sender's layer, receiver's layer, number of the input, number of the sender, receiving head). Senders are
        numbered by head, those on the prompt first."""
        found = []
        for layer, later, i in itertools.product(self.heads, self.heads, range(len(INPUTS))):
            if later > layer:
                counts = (2 * self.heads[layer], self.own[later, INPUTS[i]].shape[2])
                found.append(torch.cartesian_prod(*map(torch.tensor, ([layer], [later], [i])), *map(torch.arange, counts)))
        return torch.cat(found)

    def estimates(self, change: Change) -> Float[Tensor, " edge"]:
        """sum g.(z - z') of all edges, in their order."""
        found = []
        for layer, n in self.heads.items():
            falls: dict[int, list[Tensor]] = {m: [] for m in self.heads if m > layer}
            for some in torch.arange(2 * n).split(max(1, self.at_once // len(INPUTS))) if falls else ():
                changed = torch.arange(len(INPUTS)).repeat_interleave(len(some))  # of each row one input

                def hold(theirs: Tensor, hook: Any, key: tuple[int, str], changed: Tensor = changed) -> Tensor:
                    new = (changed == INPUTS.index(key[1])).to(theirs.device)[:, None, None, None]
                    return torch.where(new, self._by_head(*key, theirs), self.own[key]).reshape(theirs.shape)

                def see(theirs: Tensor, hook: Any, m: int, falls: dict[int, list[Tensor]] = falls) -> None:
                    change = self.own[m, "z"] - self._by_head(m, "z", theirs)
                    sums = (change * self.gradient[m]).double().sum(dim=(1, 3)).cpu()
                    falls[m].append(rearrange(sums, "(input row) head -> input row head", input=len(INPUTS)))

                hooks: list[Any] = [(self._point(m, x), partial(hold, key=(m, x))) for m in falls for x in INPUTS]
                hooks += [(self._point(m, "z"), partial(see, m=m)) for m in falls]
                self._send(layer, some.repeat(len(INPUTS)), change, max(falls), hooks)
            for m, each in falls.items():
                for x, of_heads in zip(INPUTS, torch.cat(each, dim=1), strict=True):
                    n_read = self.own[m, x].shape[2]  # the heads of a group share their keys and values
                    found.append(reduce(of_heads, "row (kv_head group) -> (row kv_head)", "sum", kv_head=n_read))
        return torch.cat(found)

    def effects(self, edges: Int[Tensor, "edge 5"], change: Change) -> Float[Tensor, " edge"]:
        """The fall of the score with each of some edges from the counterfactual prompt."""
        found = torch.full((len(edges),), torch.nan, dtype=torch.float64)
        for layer, later in edges[:, :2].unique(dim=0).tolist():
            between = (edges[:, 0] == layer) & (edges[:, 1] == later)
            for rows in torch.where(between)[0].split(self.at_once):
                found[rows] = self._effects_between(layer, later, edges[rows, 2:], change)
        return found

    def _effects_between(self, layer: int, later: int, edges: Int[Tensor, "edge 3"], change: Change) -> Float[Tensor, " edge"]:
        number, sender, head = edges.T
        new: dict[str, Tensor] = {}

        def keep(theirs: Tensor, hook: Any, x: str) -> None:
            rows = torch.where(number == INPUTS.index(x))[0]
            new[x] = self.own[later, x].repeat(len(edges) + 1, 1, 1, 1)
            new[x][rows, :, head[rows]] = self._by_head(later, x, theirs)[rows, :, head[rows]]

        self._send(layer, sender, change, later, [(self._point(later, x), partial(keep, x=x)) for x in INPUTS])
        stream = self.stream[later].repeat(len(edges) + 1, 1, 1)  # the last row is the pass as it is
        self.question.account.count(len(stream) * self.n_tokens)
        with self.model.hooks(fwd_hooks=[(self._point(later, x), partial(_instead, new[x])) for x in INPUTS]):
            scores = self._score(lambda text, n: self.model.logits_of(stream, later, n))
        return scores[-1] - scores[:-1]

    def _send(self, layer: int, senders: Int[Tensor, " row"], change: Change, last: int, hooks: list[Any]) -> None:
        """The first pass, up to layer ``last``: in each row one head of ``layer`` has the other z, all others have their own.
        ``hooks`` see z as it would have been."""
        n_rows, n = len(senders), self.heads[layer]
        z = {m: self.own[m, "z"].repeat(n_rows, 1, 1, 1) for m in self.heads if layer <= m <= last}
        row, token = torch.where((torch.arange(self.n_tokens) >= self.n_prompt) == (senders >= n)[:, None])
        head = (senders % n)[row]
        z[layer][row, token, head] = change[layer][0, token, head]
        held = [(self._point(m, "z"), partial(_instead, x)) for m, x in z.items()]
        held += [(name, partial(_instead, x.repeat(n_rows, 1, 1))) for name, x in self.mlps.items()]
        stream = self.stream[layer].repeat(n_rows, 1, 1)
        self.question.account.count(n_rows * self.n_tokens)
        with self.model.hooks(fwd_hooks=[*hooks, *held]):
            if isinstance(self.model, HookedKVTransformer):
                self.model(stream, return_type=None, start_at_layer=layer, stop_at_layer=last + 1)
            else:
                self.model.logits_of(stream, layer, 1)

    def _point(self, layer: int, name: str) -> str:
        return f"blocks.{layer}.attn.hook_{name}"

    def _by_head(self, layer: int, name: str, x: Tensor) -> Float[Tensor, "row pos some_head d"]:
        """What a hook point shows, with an axis of heads, which some join in one vector."""
        return x if x.dim() == 4 else x.unflatten(-1, (self._n_heads(layer, name), -1))

    def _n_heads(self, layer: int, name: str) -> int:
        return self.heads[layer] if name in "qz" else self.model.cfg.n_key_value_heads or self.heads[layer]

    def _score(self, read: LogitsAfter) -> Float[Tensor, " row"]:
        return self.question.log_p(read, [self.tokens])[:, 0]


def _instead(new: Tensor, old: Tensor, hook: Any) -> Tensor:
    return new.reshape(old.shape)


@analysis(
    COLUMNS,
    "between heads: which earlier heads' outputs change the queries, keys and values of later ones, path-patched",
    cost="the prompt and the text, once whole and once without each unit; from its layer on, for each unit, six times for each "
    "head but the last layer's and twice for each confirmed edge",
    inputs={"prompt": PROMPT_OR_CHAT},
    options={
        "by": BY,
        "through_mlps": Option("whether MLPs between sender and receiver are recomputed"),
        "n_confirmed": Option("how many edges of each unit are measured, those of the largest estimates"),
    },
)
@on_its_front_ends
@checked
@torch.no_grad()
def attribution_by_edge(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    by: str | Spans = "sentence",
    answer: Answer = None,
    rival: Rival = None,
    replace_by: Mapping[tuple[int, int], str | Tensor] | None = None,
    through_mlps: bool = True,
    n_confirmed: Annotated[int, Within(0)] | None = 20,
) -> pd.DataFrame:
    """Which earlier heads' outputs change the queries, keys and values of which later heads, for each unit of a prompt.

    Estimates take six passes over prompt and text for each head but the last layer's, from its layer on; an effect takes two.

    Args:
        model, prompt, text, by, answer, rival: as
            :func:`kvlens.analyses.attribution.prompt.prompt_attribution`. Without a rival the effects of single edges fade
            where the answer is nearly certain.
        replace_by: as :func:`kvlens.analyses.attribution.by_part.attribution_by_position`. The heads then read a prompt
            like others, from which nothing is missing.
        through_mlps: whether MLPs between sender and receiver are recomputed, or have the output of the pass as it is.
        n_confirmed: the effect of so many edges of each unit is measured, those of the largest estimates; None for all.

    Returns:
        One row per unit and edge, by the size of the estimate:

        {columns}

    Raises:
        KVLensError: as :func:`kvlens.analyses.attribution.by_part.attribution_by_position`; a model with a single layer of
            heads, or that does not show queries, keys and values by head.
    """
    question = Question.of(model, prompt, text, answer, rival)
    units = question.units(by)
    others = without_each(question, units, replace_by or {})
    _check_points(model)
    scored = [(1, question.answer), *([] if question.rival is None else [(-1, question.rival)])]
    readings = [(sign, GradientPass(question, tokens, through_mlps)) for sign, tokens in scored]
    every = readings[0][1].edges()
    frames = []
    n_edges = len(every) if n_confirmed is None else min(n_confirmed, len(every))
    n_rows = sum(2 * n * len(INPUTS) for n in heads_per_layer(model)[:-1]) + 2 * n_edges
    expected = len(units) * sum(reading.n_tokens for _, reading in readings) * n_rows
    with question.account.bar("attribution_by_edge", expected):
        for number, (unit, other) in enumerate(zip(units, others, strict=True)):
            measured = [(sign, reading, *reading.other(other)) for sign, reading in readings]
            estimate = torch.stack([sign * reading.estimates(change) for sign, reading, _, change in measured]).sum(dim=0)
            order = estimate.abs().argsort(descending=True, stable=True)
            edges, run = every[order], every[order[:n_confirmed]]
            effect = torch.full_like(estimate, torch.nan)
            effect[: len(run)] = sum(sign * reading.effects(run, change) for sign, reading, _, change in measured)
            layer, later, input_, sender, head = edges.T
            n_heads = torch.tensor(heads_per_layer(model))[layer]
            frames.append(
                COLUMNS.frame(
                    {
                        "unit": number,
                        "name": unit.name,
                        "unit_text": unit.text,
                        "sender_layer": layer,
                        "sender_head": sender % n_heads,
                        "where": [WHERE[each] for each in (sender >= n_heads).long().tolist()],
                        "receiver_layer": later,
                        "receiver_head": head,
                        "input": [INPUTS[each] for each in input_.tolist()],
                        "estimate": estimate[order],
                        "effect": effect,
                        "whole": sum(sign * (reading.score - score) for sign, reading, score, _ in measured),
                    }
                )
            )
    return pd.concat(frames, ignore_index=True)


def _check_points(model: KVModel) -> None:
    """Raise KVLensError unless several layers have heads, whose queries, keys and values are shown."""
    layers = [layer for layer, n in enumerate(heads_per_layer(model)) if n]
    if len(layers) < 2:
        raise KVLensError(
            "attribution_by_edge: edges lead from one layer to a later one, and this model has a single layer with heads"
        )
    points = [f"blocks.{layer}.attn.hook_{x}" for layer in layers for x in (*INPUTS, "z")]
    missing = [point for point in points if point not in model.hook_dict]
    if missing:
        raise _no_heads_at(missing[0])


def _no_heads_at(point: str) -> KVLensError:
    return KVLensError(
        f"attribution_by_edge: {point} does not show [pos, head, d] of this model's heads, as in latent attention, so that "
        "none can be changed by itself; attribution_by_head needs no such hook point"
    )

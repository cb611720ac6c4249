"""Estimates of all edges between the parts of a model; see the package."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import HookedKVTransformer, KVLensError, KVModel
from kvlens.checks import Within, checked
from kvlens.units import By

from ..declaration import PROMPT_OR_CHAT, TEXT_IF_ANY, Field, Option, analysis, tokens_field
from ..registry import on_its_front_ends
from ..segments import progress
from .circuit import EDGES, Circuit
from .graph import EMBEDDING, Graph
from .pairs import CircuitMetric, Pairs, read_pairs
from .passes import Pass, PassWithGradients, explains_the_model

EstimateMethod = Literal["eap", "eap_ig", "eap_ig_activations"]


@EDGES.document
@on_its_front_ends
@checked
def circuit(
    model: KVModel,
    prompt: object,
    corrupted: object = None,
    metric: CircuitMetric | None = None,
    *,
    text: object = None,
    answer: object = None,
    rival: object = None,
    without: By | Sequence[By] | None = None,
    by_query_head: bool = False,
    method: EstimateMethod = "eap_ig",
    steps: Annotated[int, Within(1)] = 5,
    confirm: Annotated[int, Within(0)] = 0,
    size: int | None = None,
) -> Circuit:
    """Estimate how much every edge between the parts of a model carries of the difference between pairs of prompts.

    What is measured behind them is log p(answer), less log p(rival) where there is one, in nats (of single tokens that is the
    difference of their logits), or a metric of your own. Without a rival, estimates fade where the answer is nearly certain.

    Args:
        model: any whose heads and MLPs add to the residual stream what they read of it, through norms or none.
        prompt: the clean prompts, each a string, a chat or tokens; one of them, a sequence, or tokens [pair, pos].
        corrupted: as many, each as long as its clean one.
        metric: a function of the logits [pair, pos, d_vocab] that returns [pair], in place of answers, for pairs that all have
            the same length.
        text: what follows both prompts, a string or tokens without BOS; of several prompts one for all, or one for each.
            Estimates and falls are then split by the tokens of prompt and text.
        answer, rival: as :func:`kvlens.analyses.attribution.prompt.prompt_attribution`; of several prompts a string or a token
            for all, or one for each.
        without: instead of corrupted prompts, what of each prompt is hidden in the corrupted run: strings that occur in it or
            ranges of tokens (start, stop); or a list of those for each prompt. The other tokens keep their positions.
        by_query_head: whether every query head of a key-value group reads keys and values through edges of its own, on a
            HookedKVTransformer. Added up over the group, their estimates are those of the key-value head.
        method: ``eap``, ``eap_ig`` (of inputs), or ``eap_ig_activations``, which takes a gradient for each step and layer's
            heads or MLP: ``1 + (steps - 1) (2 n_layers + 1)`` of them, where the former take 1 and ``steps``.
        steps: of the path between the two embeddings, or from hidden tokens to those that are there, for all but ``eap``.
        confirm: how many edges, those with the largest estimates (without sign), are run, each cut alone.
        size: how many edges are kept, as by :meth:`Circuit.keep`; None for all.

    Returns:
        The circuit. Its frame ``nodes`` has a row per node, and ``edges`` one per edge:

        {columns}

    Raises:
        KVLensError: lengths of prompts that differ, a metric that is not one finite number for each pair, a rival
            that is the answer, a part that does not occur or that nothing follows, a model in which something else stands
            between nodes, groups that cannot be split.
    """
    _check_model(model)
    graph = Graph(model, by_query_head and _has_groups(model))
    batches = read_pairs(model, graph, prompt, corrupted, metric, text=text, answer=answer, rival=rival, without=without)
    first, hidden = batches[0], None if batches[0].hidden is None else batches[0].hidden[:1]
    passes = Pass(model, graph), Pass(model, graph, hidden=hidden)
    if not explains_the_model(model, graph, *passes, (first.clean[:1], first.corrupted[:1])):
        raise _no_circuit(model, "something else stands between heads, MLPs and the residual stream (such as a factor)")
    of_edges, by_position = _of_batches(model, graph, batches, 1 if method == "eap" else steps, method == "eap_ig_activations")
    in_prompt = None if first.n_prompt is None else of_edges[0]
    found = Circuit(model, batches, graph, of_edges.sum(dim=0), by_position, graph.edges, in_prompt=in_prompt)
    found = found.confirmed(confirm) if confirm else found
    return found if size is None else found.keep(size)


def _has_groups(model: KVModel) -> bool:
    """Whether query heads share keys and values, which can be split."""
    if all(part.n_heads == part.n_kv_heads for layer in model.layers() for part in layer.parts):
        return False
    if not isinstance(model, HookedKVTransformer):
        raise KVLensError(
            "by_query_head: heads of a key-value group can be given keys and values of their own in a HookedKVTransformer, got "
            f"{type(model).__name__}; load the model as one, or leave by_query_head out"
        )
    return True


def _check_model(model: KVModel) -> None:
    cfg, layers = model.cfg, model.layers()
    augmented = cfg.attention_variant is not None and cfg.attention_variant.augmented is not None
    parts = [part for layer in layers for part in layer.parts]
    reasons = {
        "positions are added to queries and keys alone (shortformer)": cfg.positional_embedding_type == "shortformer",
        "its keys and values are augmented from the stream": augmented,
        "it has layers that are no attention": len(parts) > len(layers) or any(part.keeps_state for part in parts),
        "queries, keys or values of a head are no linear maps of the stream (gates, latent attention)": any(
            part.matrices() is None for part in parts if not part.keeps_state
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise _no_circuit(model, reason)


def _no_circuit(model: KVModel, reason: str) -> KVLensError:
    family = getattr(model.cfg, "architecture", None) or "this model"
    return KVLensError(
        f"circuit: {family}: {reason}, so that what a reader reads is not the sum of what nodes wrote; use another model, or "
        "attribution_by_head"
    )


def _of_batches(
    model: KVModel, graph: Graph, batches: Sequence[Pairs], steps: int, by_stage: bool
) -> tuple[Float[Tensor, "2 writer reader"], Float[Tensor, "writer pos"]]:
    """Means over all pairs: of edges, at the prompts' tokens and at all others, and of nodes, by position."""
    signed = [(1, of) for of in batches] + [(-1, of.rivals) for of in batches if of.rivals is not None]
    n_asked, n_behind = (max(getattr(of, name) for _, of in signed) for name in ("n_asked", "n_answer"))
    of_edges = torch.zeros(2, *graph.edges.shape, dtype=torch.float64)
    by_position = torch.zeros(len(graph.writers), n_asked + n_behind, dtype=torch.float64)
    with progress("circuit") as tell:
        for number, (sign, pairs) in enumerate(signed, start=1):
            sums, of_nodes = _estimates(model, graph, pairs, steps, by_stage)
            of_edges += sign * sums
            by_position[:, n_asked - pairs.n_asked :][:, : of_nodes.shape[1]] += sign * of_nodes
            tell(number / len(signed))
    n = sum(len(pairs.clean) for pairs in batches)
    return of_edges / n, by_position / n


@torch.no_grad()
def _estimates(
    model: KVModel, graph: Graph, pairs: Pairs, steps: int, by_stage: bool
) -> tuple[Float[Tensor, "2 writer reader"], Float[Tensor, "writer pos"]]:
    """Sums of (y_w - y'_w) . g_r over the pairs: over the positions of prompts and over all others, and over all readers."""
    ours, theirs = Pass(model, graph, pairs.first), Pass(model, graph, pairs.first, pairs.hidden)
    theirs.logits(pairs.corrupted, 1)
    ours.logits(pairs.clean, 1)
    difference, embedding = ours.written - theirs.written, (EMBEDDING, "mlp")
    sums = torch.zeros(2, *graph.edges.shape, dtype=torch.float64)
    by_position = torch.zeros(len(graph.writers), pairs.clean.shape[1], dtype=torch.float64)
    n_prompt = max(0, (pairs.n_prompt or 0) - pairs.first)
    at_the_end = _gradients(model, graph, pairs, ours.embedded)
    for stage, writers in graph.wrote.items() if by_stage else [(embedding, slice(0, len(graph.writers)))]:
        total, presence = [(some, gradient / steps) for some, gradient in at_the_end[0]], at_the_end[1] / steps
        for k in range(1, steps):
            at, added, share = ours.embedded, dict[tuple[int, str], Tensor](), 1.0
            if stage == embedding:
                at, share = torch.lerp(theirs.embedded, ours.embedded, k / steps), k / steps
            else:
                added[stage] = difference[writers].sum(dim=0) * (k / steps - 1)
            found, of_presence = _gradients(model, graph, pairs, at, added, share)
            total = [(some, a.add_(b, alpha=1 / steps)) for (some, a), (_, b) in zip(total, found, strict=True)]
            presence = presence + of_presence / steps
        for some, gradient in total:
            rows = slice(writers.start, min(writers.stop, graph.n_before[some.start]))
            if rows.start < rows.stop:
                for i, span in enumerate((slice(0, n_prompt), slice(n_prompt, None))):
                    wrote, read = (x[:, :, span].flatten(1) for x in (difference[rows], gradient))
                    sums[i, rows, some] = (wrote @ read.T).double().cpu()
                of_nodes = torch.einsum("wipd,ipd->wp", difference[rows], gradient.sum(dim=0)).double().cpu()
                by_position[rows, pairs.first :] += of_nodes
        if stage == embedding:
            sums[0, 0] += presence
            by_position[0, pairs.first] += presence.sum()
    return sums, by_position


def _gradients(
    model: KVModel,
    graph: Graph,
    pairs: Pairs,
    embedded: Float[Tensor, "pair pos d_model"],
    added: Mapping[tuple[int, str], Tensor] = MappingProxyType({}),
    share: float = 1.0,
) -> tuple[list[tuple[slice, Tensor]], Float[Tensor, " reader"]]:
    """Of the metric's sum, in a run of the clean prompts with other embeddings, or with something added to what nodes write."""
    ran = PassWithGradients(model, graph, pairs.first, pairs.hidden, share)
    ran.added.update(added)
    with torch.enable_grad():
        value = pairs.value(ran.logits(pairs.clean, pairs.n_last, embedded.detach().requires_grad_())).sum()
    return ran.gradients(value)


@analysis(
    EDGES,
    "which heads and MLPs read which others where two prompts differ: all edges, by attribution",
    cost="both prompts once, the clean one also for an answer that is not given, and with gradients once for each step (5; one "
    "for eap); to confirm edges, both again and once for each, with a text twice; all that twice for a rival, where words are "
    "of several tokens; the first pair three times more, as a check",
    of=circuit,
    inputs={
        "prompt": PROMPT_OR_CHAT,
        "corrupted": tokens_field("corrupted", prepend_bos=True, required=False),
        "text": TEXT_IF_ANY,
        "without": Field("without", lambda model, value: [value] if isinstance(value, str) else value, required=False),
    },
    options={
        "by_query_head": Option("whether query heads that share keys and values have edges of their own into them"),
        "method": Option("of the estimates", choices=get_args(EstimateMethod)),
        "steps": Option("between the two prompts, for eap_ig"),
        "confirm": Option("how many edges are run, each cut alone"),
        "size": Option("how many edges are kept", value_type=int),
    },
)
def edges_of_a_record(
    model: KVModel,
    prompt: object,
    corrupted: Tensor | None = None,
    text: Tensor | None = None,
    without: By | None = None,
    answer: object = None,
    rival: object = None,
    *,
    by_query_head: bool = False,
    method: EstimateMethod = "eap_ig",
    steps: int = 5,
    confirm: int = 0,
    size: int | None = None,
) -> pd.DataFrame:
    """All edges for one pair of prompts, or for a prompt and the same without a part.

    Returns:
        One row per edge, the largest estimates (without sign) first:

        {columns}
    """
    without = without if corrupted is None else None  # which other analyses of the same records read
    given: dict[str, Any] = dict(text=text, without=without, answer=answer, rival=rival, by_query_head=by_query_head)
    return circuit(model, prompt, corrupted, **given, method=method, steps=steps, confirm=confirm, size=size).edges

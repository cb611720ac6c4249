"""What the loss does when a head's output, or what it reads at one kind of position, comes from another text.

First resampling ablation (Chan et al. 2022, Causal Scrubbing): one head's output is replaced by its output on a donor. Then
swaps, of one edge of the attention pattern (Wang et al. 2022, path patching), which show what the model needs the head for.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.memory import NUMBERS_PER_PASS
from kvlens.model import HeadsRead, head_hooks, heads_per_layer, joined_heads, visit_heads

from ..segments import OnProgress
from .head_pairs import wide_dtype
from .repeated_text import PATTERNS, RepeatedTokens, ShiftTaps, at_lag, lags_and_queries, value_side_pattern

# Resampling ablation: the effect of replacing one head's output by its output on another text.
#
# A head's ``hook_z`` is replaced at every position by its z on a donor, a text of the same form with other tokens: this keeps
# the head's average output and removes what is specific to the text. Each (head, sequence) pair is one row of a batched forward
# pass, which starts at the head's own layer.


class AblationEffect(NamedTuple):
    """Means over sequences and over the positions of the second copy that have a next token; the first one's standard error."""

    loss_change: Float[Tensor, "layer head"]
    logit_change: Float[Tensor, "layer head"]
    loss_error: Float[Tensor, "layer head"]


def resampling_ablation(
    model: KVModel,
    repeated: RepeatedTokens,
    donors: RepeatedTokens,
    *,
    asked: Bool[Tensor, "layer head"] | None = None,
    on_progress: OnProgress | None = None,
) -> AblationEffect:
    """Ablate every head, one at a time.

    Args:
        model: the model whose heads are ablated.
        repeated: the texts.
        donors: the same number of texts of the same length.
        asked: the heads to ablate; None for all. The numbers of others are 0.
        on_progress: called with the fraction done after each forward pass.

    Returns:
        The increase of the loss of the next tokens of the second copy (nats), the change of their logits, and the standard
        error of the first.

    Raises:
        KVLensError: shortformer positions, which a pass that starts at a later layer would lose.
    """
    n_layers, n_heads, n_texts = model.cfg.n_layers, heads_per_layer(model), len(repeated.tokens)
    if model.cfg.positional_embedding_type == "shortformer":
        raise KVLensError("ablations: shortformer adds positions inside every layer, so a pass cannot start at a later layer")
    starts, names = residuals(model, repeated), [head_hooks(model, layer, "hook_z") for layer in range(n_layers)]
    seen = cached(model, donors.tokens, [name for of_layer in names for name in of_layer])
    whole = losses_and_logits(model, starts[-1], n_layers, repeated.next_tokens)
    change = whole.new_zeros(2, n_layers, *(max(n_heads), n_texts), whole.shape[-1])
    of_layers = [torch.arange(n) if asked is None else asked[layer, :n].nonzero()[:, 0] for layer, n in enumerate(n_heads)]
    n_rows, done = n_texts * sum(map(len, of_layers)), 0
    for layer in (layer for layer in range(n_layers) if len(of_layers[layer])):
        heads, texts = torch.cartesian_prod(of_layers[layer], torch.arange(n_texts)).T
        other = joined_heads([_by_head(seen[name], n) for name, n in names[layer].items()])[texts, :, heads]
        for rows, effect in with_replaced(model, repeated, starts[layer], layer, heads, texts, other):
            change[:, layer, heads[rows], texts[rows]] = effect - whole[:, texts[rows]]
            done += len(rows)
            if on_progress is not None:
                on_progress(done / n_rows)
    loss_change, logit_change = change.mean(dim=(-2, -1))
    return AblationEffect(loss_change, logit_change, standard_error(change[0]))


def with_replaced(
    model: KVModel,
    repeated: RepeatedTokens,
    start: Float[Tensor, "text pos d_model"],
    layer: int,
    heads: Int[Tensor, " row"],
    texts: Int[Tensor, " row"],
    other: Float[Tensor, "row pos d_head"],
) -> Iterator[tuple[Int[Tensor, " part"], Float[Tensor, "two part target"]]]:
    """Yield rows and the loss and centered logit of their targets, pass by pass, if ``heads[i]`` writes ``other[i]`` in row i.

    ``start`` is the residual stream before ``layer``, and ``texts[i]`` the text of row i.
    """
    for rows in torch.arange(len(heads)).split(rows_per_pass(model, repeated)):
        text, hooks = texts[rows], replace_heads(model, layer, heads[rows], other[rows])
        yield rows, losses_and_logits(model, start[text], layer, repeated.next_tokens[text], *hooks)


def standard_error(changes: Float[Tensor, "*lead text target"]) -> Float[Tensor, "*lead"]:
    """Standard error of the mean over texts and targets, the larger of those for independent texts and independent targets.

    Infinite for a single number, whose noise is unknown.
    """
    samples = [changes.flatten(-2), changes.mean(dim=-1)][: 1 + (changes.shape[-2] > 1)]
    errors = [x.std(dim=-1) / x.shape[-1] ** 0.5 for x in samples if x.shape[-1] > 1]
    return torch.stack(errors).amax(dim=0) if errors else torch.full_like(changes[..., 0, 0], torch.inf)


def rows_per_pass(model: KVModel, repeated: RepeatedTokens) -> int:
    """Texts that fit into :data:`NUMBERS_PER_PASS`: logits and exponentials, pattern and scores, widest activations."""
    pos, cfg = repeated.tokens.shape[1], model.cfg
    most = max(heads_per_layer(model))
    row = repeated.n_repeated * 4 * cfg.d_vocab_out + 4 * pos * (most * pos + 2 * max(cfg.d_mlp or 0, cfg.d_model))
    return max(1, NUMBERS_PER_PASS // row)


def residuals(model: KVModel, repeated: RepeatedTokens) -> list[Float[Tensor, "text pos d_model"]]:
    """The residual stream before every layer and after the last one."""
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(model.cfg.n_layers)]
    names.append(f"blocks.{model.cfg.n_layers - 1}.hook_resid_post")
    own = cached(model, repeated.tokens, names)
    return [own[name] for name in names]


def cached(model: KVModel, tokens: Tensor, names: list[str]) -> dict[str, Tensor]:
    """The activations at the hook points. The mask is needed because a pad token in the text is a token, not padding."""
    seen: dict[str, Tensor] = {}

    def keep_as(name: str) -> Callable[[Tensor, object], None]:
        return lambda x, hook: seen.__setitem__(name, x)  # a bridge's hook points know their own names, not these

    hooks = [(name, keep_as(name)) for name in names]
    model.run_with_hooks(tokens, attention_mask=torch.ones_like(tokens), return_type=None, fwd_hooks=hooks)
    return seen


def replace_heads(model: KVModel, layer: int, heads: Tensor, other: Tensor) -> list[tuple[str, Callable]]:
    """Hooks that set the output of head ``heads[i]`` in row i of a batch to ``other[i]`` [pos, d_head]."""
    hooks, first = list[tuple[str, Callable]](), 0
    for name, n_heads in head_hooks(model, layer, "hook_z").items():
        rows = ((heads >= first) & (heads < first + n_heads)).nonzero()[:, 0]

        def replace(z: Tensor, hook: object, rows: Tensor = rows, first: int = first, n_heads: int = n_heads) -> Tensor:
            replaced = _by_head(z, n_heads).clone()
            replaced[rows, :, heads[rows] - first] = other[rows, :, : replaced.shape[-1]]
            return replaced.reshape(z.shape)

        hooks.append((name, replace))
        first += n_heads
    return hooks


def _by_head(z: Tensor, n_heads: int) -> Float[Tensor, "batch pos head d_head"]:
    """What passes ``hook_z``, of which Nemotron-H's attention shows all heads in one axis."""
    return z.reshape(*z.shape[:2], n_heads, -1)


def losses_and_logits(
    model: KVModel, start: Tensor, layer: int, targets: Tensor, *hooks: tuple[str, Callable]
) -> Float[Tensor, "two batch target"]:
    """Loss and centered logit of every target, for residual streams before ``layer`` (after all layers: n_layers)."""
    with model.hooks(fwd_hooks=list(hooks)):
        logits = model.logits_of(start, layer, n_last=targets.shape[1] + 1)[:, :-1].to(wide_dtype(model))
    chosen = logits.gather(-1, targets[..., None]).squeeze(-1)
    return torch.stack([logits.logsumexp(dim=-1) - chosen, chosen - logits.mean(dim=-1)])


# The effect on the loss of a head reading another text's token at one kind of position, with everything else unchanged.
#
# Resampling a head's whole output shows that the model needs the head, but not for what. Here only what it reads at the lag of
# one kind is swapped: with E the value-side pattern of :mod:`kvlens.analyses.heads.repeated_text`, v the values of the text
# before the shift and v' those of another text,
#
#     z_i  ->  z_i - E[i, i - lag] (v_{i - lag} - v'_{i - lag})
#
# The attention itself is unchanged, so the measure works equally for a sharp softmax head and for a linear head that reads a
# tenth here and the rest everywhere else. Since z is linear in the tokens, the swaps at all lags add up, in z, to reading the
# other text throughout.


class _Layer(NamedTuple):
    """What one layer's heads write, their attention at each kind of position (0 if there is none), and the difference of v.

    ``gate`` multiplies what the heads read; None without one.
    """

    z: Float[Tensor, "text pos head d_head"]
    edges: Float[Tensor, "kind text head query"]
    difference: Float[Tensor, "text pos head d_head"]
    gate: Float[Tensor, "text pos head d_head"] | None


def swap_costs(
    model: KVModel,
    repeated: RepeatedTokens,
    donors: RepeatedTokens,
    taps: list[ShiftTaps],
    heads: Bool[Tensor, "layer head"],
) -> tuple[Float[Tensor, "kind layer head"], Float[Tensor, "kind kind layer head"]]:
    """Swap what each head reads at each kind of position, one at a time.

    Args:
        model: a model without an attention variant, in which z would not be linear in v.
        repeated: the texts.
        donors: the same number of texts of the same length.
        taps: the shift coefficients of every layer.
        heads: the heads to measure.

    Returns:
        The increase of the mean loss of the next tokens of the second copy, nats, and the standard error of the difference of
        two kinds; on the diagonal, of one kind. NaN for heads that were not measured.
    """
    starts, layers = residuals(model, repeated), _layers(model, repeated, donors, taps)
    whole, _ = losses_and_logits(model, starts[-1], len(layers), repeated.next_tokens)
    costs = torch.full((len(PATTERNS), *heads.shape), torch.nan, dtype=whole.dtype, device=whole.device)
    errors = costs.new_full((len(PATTERNS), *costs.shape), torch.nan)
    texts = torch.arange(len(repeated.tokens)).repeat(len(PATTERNS))
    for layer, head in heads.nonzero().tolist():
        z = _swapped(layers[layer], head, repeated)
        effects = with_replaced(model, repeated, starts[layer], layer, torch.full_like(texts, head), texts, z)
        losses = torch.cat([loss for _, (loss, _) in effects])
        change = rearrange(losses, "(kind text) target -> kind text target", kind=len(PATTERNS)) - whole
        costs[:, layer, head] = change.mean(dim=(1, 2))
        errors[:, :, layer, head] = standard_error(change[:, None] - change)
        errors[:, :, layer, head].diagonal().copy_(standard_error(change))
    return costs, errors


def _swapped(own: _Layer, head: int, repeated: RepeatedTokens) -> Float[Tensor, "row pos d_head"]:
    """A head's output after each swap, one row per kind and text."""
    z, difference = own.z[:, :, head], own.difference[:, :, head]
    lags = [lag for lag, _ in lags_and_queries(repeated).values()]
    read = torch.stack([difference.roll(lag, dims=1) for lag in lags])  # values wrapped around from the end have attention 0
    read = own.edges[:, :, head, :, None] * read
    swapped = z + (read if own.gate is None else read * own.gate[:, :, head])
    return rearrange(swapped, "kind text pos d_head -> (kind text) pos d_head")


def _layers(model: KVModel, repeated: RepeatedTokens, donors: RepeatedTokens, taps: list[ShiftTaps]) -> list[_Layer]:
    others: list[Tensor] = []
    layers: list[_Layer] = []

    def keep(layer: int, read: HeadsRead) -> None:
        others.append(read.values)

    def reduce(layer: int, read: HeadsRead) -> None:
        effective = value_side_pattern(read.pattern, taps[layer])
        edges = [
            at_lag(effective, lag).index_fill(-1, torch.arange(first, device=effective.device), 0)
            for lag, first in lags_and_queries(repeated).values()
        ]
        layers.append(_Layer(read.z, torch.stack(edges), others[layer] - read.values, read.gate))

    visit_heads(model, donors.tokens, keep)
    visit_heads(model, repeated.tokens, reduce)
    return layers

"""Resampling ablation: the effect of replacing one head's output by its output on another text.

A head's ``hook_z`` is replaced at every position by its z on a donor, a text of the same form with other tokens: this keeps the
head's average output and removes what is specific to the text. Each (head, sequence) pair is one row of a batched forward pass,
which starts at the head's own layer.

Source: Chan et al. 2022, Causal Scrubbing (resampling ablation).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.memory import NUMBERS_PER_PASS
from kvlens.model import head_hooks, heads_per_layer, joined_heads

from .repeated_tokens import RepeatedTokens
from .weights import wide_dtype

Start = Callable[[int], None]
Progress = Callable[[float], None]


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
    batch_size: int | None = None,
    on_start: Start | None = None,
    on_progress: Progress | None = None,
) -> AblationEffect:
    """Ablate every head, one at a time.

    Args:
        model: the model whose heads are ablated.
        repeated: the texts.
        donors: the same number of texts of the same length.
        batch_size: rows per forward pass; None takes what :data:`kvlens.memory.NUMBERS_PER_PASS` allows.
        on_start: called once, before anything runs, with the number of ablations: heads times texts.
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
    if on_start is not None:
        on_start(sum(n_heads) * n_texts)
    starts, names = residuals(model, repeated), [head_hooks(model, layer, "hook_z") for layer in range(n_layers)]
    seen = cached(model, donors.tokens, [name for of_layer in names for name in of_layer])
    whole = losses_and_logits(model, starts[-1], n_layers, repeated.next_tokens)
    change = whole.new_zeros(2, n_layers, *(max(n_heads), n_texts), whole.shape[-1])
    done = 0
    for layer in (layer for layer in range(n_layers) if n_heads[layer]):
        heads, texts = torch.cartesian_prod(torch.arange(n_heads[layer]), torch.arange(n_texts)).T
        other = joined_heads([seen[name] for name in names[layer]])[texts, :, heads]
        for rows, effect in replaced(model, repeated, starts[layer], layer, heads, texts, other, batch_size):
            change[:, layer, heads[rows], texts[rows]] = effect - whole[:, texts[rows]]
            done += len(rows)
            if on_progress is not None:
                on_progress(done / (sum(n_heads) * n_texts))
    loss_change, logit_change = change.mean(dim=(-2, -1))
    return AblationEffect(loss_change, logit_change, standard_error(change[0]))


def replaced(
    model: KVModel,
    repeated: RepeatedTokens,
    start: Float[Tensor, "text pos d_model"],
    layer: int,
    heads: Int[Tensor, " row"],
    texts: Int[Tensor, " row"],
    other: Float[Tensor, "row pos d_head"],
    batch_size: int | None = None,
) -> Iterator[tuple[Int[Tensor, " part"], Float[Tensor, "two part target"]]]:
    """Yield rows and the loss and centered logit of their targets, pass by pass, if ``heads[i]`` writes ``other[i]`` in row i.

    ``start`` is the residual stream before ``layer``, and ``texts[i]`` the text of row i.
    """
    for rows in torch.arange(len(heads)).split(batch_size or rows_per_pass(model, repeated)):
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

    def keep_as(name: str) -> Callable[[Tensor, Any], None]:
        return lambda x, hook: seen.__setitem__(name, x)  # a bridge's hook points know their own names, not these

    hooks = [(name, keep_as(name)) for name in names]
    model.run_with_hooks(tokens, attention_mask=torch.ones_like(tokens), return_type=None, fwd_hooks=hooks)
    return seen


def replace_heads(model: KVModel, layer: int, heads: Tensor, other: Tensor) -> list[tuple[str, Callable]]:
    """Hooks that set the output of head ``heads[i]`` in row i of a batch to ``other[i]`` [pos, d_head]."""
    hooks, first = list[tuple[str, Callable]](), 0
    for name, n_heads in head_hooks(model, layer, "hook_z").items():
        rows = ((heads >= first) & (heads < first + n_heads)).nonzero()[:, 0]

        def replace(z: Tensor, hook: Any, rows: Tensor = rows, first: int = first) -> Tensor:
            z = z.clone()
            z[rows, :, heads[rows] - first] = other[rows, :, : z.shape[-1]]
            return z

        hooks.append((name, replace))
        first += n_heads
    return hooks


def losses_and_logits(
    model: KVModel, start: Tensor, layer: int, targets: Tensor, *hooks: tuple[str, Callable]
) -> Float[Tensor, "two batch target"]:
    """Loss and centered logit of every target, for residual streams before ``layer`` (after all layers: n_layers)."""
    with model.hooks(fwd_hooks=list(hooks)):
        logits = model.logits_of(start, layer, n_last=targets.shape[1] + 1)[:, :-1].to(wide_dtype(model))
    chosen = logits.gather(-1, targets[..., None]).squeeze(-1)
    return torch.stack([logits.logsumexp(dim=-1) - chosen, chosen - logits.mean(dim=-1)])

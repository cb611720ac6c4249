"""Context distillation: weights trained so that the model reads a text as it does after the prompt.

    distributions    mean over texts and positions of KL( p(. | prompt, text) || p_w(. | text) ) -> min over w
    pairs            mean of -log p_w(answer | query), for the texts that the prompted model wrote -> min over w

The second is the naive conversion of ICLCA's slides; the first learns more from every text. w are the weight matrices W of
every block, or other parameters, changed freely or by products of two matrices of a given rank (LoRA):

    W + B A        A [rank, d_out], B [d_in, rank]

The texts are written by the prompted model. As a baseline this is tuned like the other methods: the learning rate is chosen on
an eighth of the texts, which no step reads, and reading them counts towards the cost.

Source: context distillation, Askell et al. 2021, arXiv 2112.00861, sec. 2.1, and Snell, Klein, Zhong 2022, arXiv 2209.15189;
LoRA, Hu et al. 2021, arXiv 2106.09685.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvlens.checks import Count, Seed, Within, checked
from kvlens.conversion.gradients import descend
from kvlens.conversion.weight_patches import WeightChange, check_changeable
from kvlens.errors import KVLensError
from kvlens.kv_bias import Fingerprint, KVBias
from kvlens.model import HookedKVTransformer

DistillationObjective = Literal["distributions", "pairs"]
QUERY = 4
"""The number of tokens of a text that are its query; the rest is the answer."""
TEXTS_PER_STEP = 16
HELD_OUT = 8
"""One in this many texts is held out from the steps, for choosing the learning rate."""
FROM_INPUT = ("W_Q", "W_K", "W_V", "_W_K", "_W_V")
"""Matrices of heads [head, d_model, d_head]; W_O is [head, d_head, d_model], those of the MLPs are [d_in, d_out]."""
MATRICES = (*FROM_INPUT, "W_O", "W_in", "W_gate", "W_out")


@dataclass(frozen=True)
class DistilledWeights(WeightChange):
    """Changes of the weight matrices of every block, or of other parameters.

    Attributes:
        changes: by the name of the parameter, (B, A), or the change itself alone.
        fingerprint: the model to which they belong.
    """

    changes: Mapping[str, tuple[Tensor, ...]]
    fingerprint: Fingerprint

    @property
    def num_parameters(self) -> int:
        return sum(factor.numel() for factors in self.changes.values() for factor in factors)

    def merged(self, model: HookedKVTransformer) -> HookedKVTransformer:
        """A copy of the model with the changed weights, without gradients."""
        copy = HookedKVTransformer.from_hooked_transformer(model).train(model.training).requires_grad_(False)
        for name, factors in self.changes.items():
            owner, leaf = _owner(copy, name)
            owner._parameters[leaf] = nn.Parameter(_changed(name, owner.get_parameter(leaf), factors), requires_grad=False)
        return copy

    def _attach(self, model: HookedKVTransformer, stack: contextlib.ExitStack) -> None:
        stack.enter_context(_with(model, self.changes))


class Distillation(NamedTuple):
    """The result of :func:`distill_prompt`.

    Attributes:
        weights: the change of the weights.
        learning_rate: the best of those that were tried.
        losses: of the steps at that rate.
        held_out_loss: on the texts that no step read; of a single rate, which reads them all, the last step's.
        seconds: processor time of everything.
        passes: tokens read, at all rates, in units of one pass over the prompt; backward passes are not counted.
    """

    weights: DistilledWeights
    learning_rate: float
    losses: Float[Tensor, " step"]
    held_out_loss: float
    seconds: float
    passes: float


@checked
def distill_prompt(
    model: HookedKVTransformer,
    bias: KVBias,
    texts: Int[Tensor, "text pos"],
    *,
    rank: Annotated[int, Within(1, 2**16)] | None,
    steps: Count,
    learning_rates: Sequence[Annotated[float, Within(above=0, most=1)]],
    which: Callable[[str], bool] | None = None,
    objective: DistillationObjective = "distributions",
    seed: Seed = 0,
) -> Distillation:
    """Train a change of the weights with which ``model`` reads texts as it does with ``bias``.

    Args:
        model: what is attached to it stays attached to the changed model: nothing, or for example the bias of a BOS.
        bias: stands for a single prompt; ``convert_prompt(model, prompt)`` for the prompt exactly.
        texts: at least two texts that the prompted model may read, of the same length.
        rank: of the change of each matrix; None for a change of every entry.
        steps: number of gradient steps (Adam with a cosine schedule), :data:`TEXTS_PER_STEP` texts each.
        learning_rates: the rates to try; where there is one, no text is held out.
        which: the parameters that change, by name; None for the weight matrices of every block.
        objective: see the module.

    Raises:
        KVLensError: several prompts; a loss that is finite at no rate.
    """
    check_changeable("distill_prompt", model, bias)
    start = time.process_time()
    with torch.no_grad(), model.kv_bias(bias):
        prompted = torch.cat([_log_probs(model, part) for part in texts.split(TEXTS_PER_STEP)])
    target = prompted if objective == "distributions" else None
    n_held_out = max(1, len(texts) // HELD_OUT) if len(learning_rates) > 1 else 0
    seen = len(texts) - n_held_out
    found = []
    for rate in learning_rates:
        changes = _initial(model, rank, which, seed)
        losses = torch.stack(list(_steps(model, changes, texts[:seen], _part(target, slice(seen)), steps, rate, seed)))
        with torch.no_grad():
            unseen = (texts[seen:], _part(target, slice(seen, None)))
            held_out = float(_loss(model, changes, *unseen) if n_held_out else losses[-1])
        found.append((held_out if held_out == held_out else float("inf"), rate, losses, changes))
    held_out, rate, losses, changes = min(found, key=lambda one: one[0])
    if held_out == float("inf"):
        raise KVLensError(
            f"distill_prompt: the loss is not finite at any learning rate of {list(learning_rates)}: they are too large, or "
            "the model's own logits with the bias are not finite"
        )
    read = texts.numel() + len(learning_rates) * texts.shape[1] * (steps * min(TEXTS_PER_STEP, seen) + n_held_out)
    kept = {name: tuple(factor.detach() for factor in factors) for name, factors in changes.items()}
    n_tokens = int(torch.as_tensor(bias.n_prompt_tokens).max())
    weights = DistilledWeights(kept, model.fingerprint())
    return Distillation(weights, rate, losses, held_out, time.process_time() - start, read / n_tokens)


def _initial(
    model: HookedKVTransformer, rank: int | None, which: Callable[[str], bool] | None, seed: int
) -> dict[str, tuple[Tensor, ...]]:
    """Changes of zero: B random with |B_i|^2 about 1, A zero."""
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    for name, matrix in model.named_parameters():
        if not (_is_matrix(name) if which is None else which(name) and (rank is None or _is_matrix(name))):
            continue
        flat = _flat(name, matrix.detach())
        factors: tuple[Tensor, ...] = (torch.zeros_like(flat),)
        if rank is not None:
            d_in, d_out = flat.shape
            factors = (torch.randn(d_in, rank, generator=generator) / d_in**0.5, torch.zeros(rank, d_out))
        changes[name] = tuple(factor.to(matrix).requires_grad_() for factor in factors)
    return changes


def _steps(
    model: HookedKVTransformer,
    changes: Mapping[str, tuple[Tensor, ...]],
    texts: Int[Tensor, "text pos"],
    target: Float[Tensor, "text pos vocab"] | None,
    steps: int,
    learning_rate: float,
    seed: int,
) -> Iterator[Float[Tensor, ""]]:
    free = [factor for factors in changes.values() for factor in factors]
    with torch.enable_grad(), _frozen(model):
        yield from descend(
            free,
            lambda rows: _loss(model, changes, texts[rows], _part(target, rows)),
            n_rows=len(texts),
            rows_per_step=TEXTS_PER_STEP,
            steps=steps,
            learning_rate=learning_rate,
            generator=torch.Generator().manual_seed(seed),
        )


def _loss(
    model: HookedKVTransformer, changes: Mapping[str, tuple[Tensor, ...]], texts: Tensor, target: Tensor | None
) -> Float[Tensor, ""]:
    with _with(model, changes):
        new = _log_probs(model, texts)
    if target is None:
        query = min(QUERY, texts.shape[1] - 1)
        return -new[:, query - 1 : -1].gather(2, texts[:, query:, None]).mean()
    return (target.exp() * (target - new)).sum(dim=-1).mean()


def _part(target: Tensor | None, rows: Tensor | slice) -> Tensor | None:
    return None if target is None else target[rows]


def _log_probs(model: HookedKVTransformer, texts: Int[Tensor, "text pos"]) -> Float[Tensor, "text pos vocab"]:
    return model(texts, attention_mask=torch.ones_like(texts)).log_softmax(dim=-1)


@contextlib.contextmanager
def _frozen(model: HookedKVTransformer) -> Iterator[None]:
    """No parameter of the model gets a gradient."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextlib.contextmanager
def _with(model: HookedKVTransformer, changes: Mapping[str, tuple[Tensor, ...]]) -> Iterator[None]:
    """The model with changed matrices, through which gradients reach the changes; afterwards with its own parameters again."""
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    weights_then, model._weights_then = model._weights_then, None  # a bias that stays attached is meant to
    try:
        for name, factors in changes.items():
            owner, leaf = _owner(model, name)
            before = owner._parameters[leaf]
            assert before is not None
            replaced.append((owner, leaf, before))
            owner._parameters[leaf] = _changed(name, before, factors)  # type: ignore[assignment]
        yield
    finally:
        for owner, leaf, before in replaced:
            owner._parameters[leaf] = before
        model._weights_then = weights_then


def _is_matrix(name: str) -> bool:
    return name.startswith("blocks.") and name.rpartition(".")[2] in MATRICES


def _changed(name: str, before: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
    flat = factors[0] if len(factors) == 1 else factors[0] @ factors[1]
    return before.detach() + _folded(name, flat, before)


def _owner(model: HookedKVTransformer, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _flat(name: str, matrix: Tensor) -> Float[Tensor, "d_in d_out"]:
    """A weight as one matrix from the input of a layer to its output, all heads together."""
    if matrix.ndim <= 2:
        return matrix
    return matrix.transpose(0, 1).flatten(1) if name.rpartition(".")[2] in FROM_INPUT else matrix.flatten(0, 1)


def _folded(name: str, flat: Float[Tensor, "d_in d_out"], like: Tensor) -> Tensor:
    """The inverse of :func:`_flat`."""
    if like.ndim <= 2:
        return flat
    if name.rpartition(".")[2] in FROM_INPUT:
        return flat.unflatten(1, (like.shape[0], like.shape[2])).transpose(0, 1)
    return flat.unflatten(0, like.shape[:2])

"""What ``compaction`` compares: methods that keep keys, and changes of the weights, with the numbers that each stores.

A way to store a prompt is a name, the stored numbers, what they cost, and a context in which the model has them. Methods that
keep keys make a :class:`~kvlens.KVBias`, which stands for the whole prompt; changes of the weights
(:mod:`kvlens.conversion.weights`) come on top of the bias of the BOS, at its distance to the text: it is the same for every
prompt and is not counted.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlens.conversion import (
    H2O,
    AttentionMatching,
    ConversionMethod,
    ExpectedAttention,
    KVzip,
    Landmark,
    SnapKV,
    StreamingLLM,
    WeightChange,
    convert_prompt,
    distill_prompt,
    thought_matrices,
    thought_vectors,
    token_patches,
)
from kvlens.experiments.shared.sampling import sampled
from kvlens.kv_bias import KVBias, VirtualKeys
from kvlens.model import HookedKVTransformer

OURS = "landmark, budgets by logits"
METHODS: dict[str, tuple[type[ConversionMethod], dict[str, Any]]] = {
    "StreamingLLM": (StreamingLLM, {}),
    "Expected Attention": (ExpectedAttention, {}),
    "SnapKV": (SnapKV, {}),
    "H2O": (H2O, {}),
    "KVzip": (KVzip, {}),
    "Attention Matching, attention": (AttentionMatching, dict(keys="attention")),
    "Attention Matching, pursuit": (AttentionMatching, dict(keys="pursuit")),
    "Attention Matching, on policy": (AttentionMatching, dict(keys="pursuit", on_policy=True)),
    "Attention Matching, budgets by logits": (AttentionMatching, dict(keys="pursuit", budget="logits")),
    "landmark, equal budgets": (Landmark, dict(budget="equal")),
    OURS: (Landmark, {}),
}
TOKENS, VECTORS, MATRICES = "token patches, for one text", "thought vectors", "thought matrices"
DISTILLED = "distillation"


def distillation_name(rank: int | None) -> str:
    """The row of a distillation of this rank; None for all entries of the weight matrices."""
    return f"{DISTILLED}, all entries" if rank is None else f"{DISTILLED}, rank {rank}"


class Stored(NamedTuple):
    """A prompt, stored in some way.

    Attributes:
        bias: what the model has attached: the prompt's few keys, or only the BOS if the weights change.
        change: the change of the weights; None if there is none.
        numbers: how many numbers are stored.
        passes: tokens read or written for the fit, in units of one pass over the prompt, without the prompt's own.
        cpu_seconds: processor time.
        any_text: whether it serves texts other than those it was made from.
    """

    method: str
    keys: int
    bias: KVBias
    change: WeightChange | None
    numbers: int
    passes: float
    cpu_seconds: float
    any_text: bool = True

    @contextlib.contextmanager
    def attached(self, model: HookedKVTransformer) -> Iterator[None]:
        """The model with the stored prompt."""
        with model.kv_bias(self.bias), contextlib.nullcontext() if self.change is None else self.change.attached(model):
            yield


def kept_keys(model: HookedKVTransformer, prompt: Tensor, settings: Mapping[str, Any], seed: int) -> Iterator[Stored]:
    """The prompt in few keys per head: every method at every size, as long as some of its keys have to go."""
    for keys in settings["keys"]:
        for name, method in methods(keys, settings, seed) if keys < len(prompt) else ():
            start = time.process_time()
            bias = convert_prompt(model, prompt, method=method, verbose=False)
            seconds = time.process_time() - start
            assert bias.fit is not None
            yield Stored(name, keys, bias, None, bias.num_parameters, bias.fit.passes, seconds)


def methods(keys: int, settings: Mapping[str, Any], seed: int) -> Iterator[tuple[str, ConversionMethod]]:
    """Every method, with ``keys`` keys per head."""
    texts = dict(seed=seed, n_held_out=0, n_continuations=settings["n_continuations"], continuation_length=settings["n_text"])
    for name, (kind, options) in METHODS.items():
        yield name, kind(n_keys=keys, **options, **texts)  # type: ignore[call-arg]


def changed_weights(
    model: HookedKVTransformer, prompt: Tensor, texts: Tensor | None, settings: Mapping[str, Any], seed: int
) -> Iterator[Stored]:
    """The prompt as changes of the weights, made from continuations that the prompted model writes.

    Args:
        texts: the texts on which it is measured, of which token patches are made; None leaves these out.
    """
    exact, base, length = convert_prompt(model, prompt), bos_alone(model, prompt), len(prompt)
    asked = settings["distillation"]
    start = time.process_time()
    generator = torch.Generator().manual_seed(2_000 + seed)
    many = sampled(model, prompt.expand(asked["n_texts"], -1), settings["n_text"], generator)[:, length:]
    writing = time.process_time() - start
    few = many[: settings["n_continuations"]]
    if texts is not None:
        start = time.process_time()
        with model.kv_bias(base):
            own = token_patches(model, exact, texts)
        each, seconds = own.num_parameters // len(texts), (time.process_time() - start) / len(texts)
        yield Stored(TOKENS, 0, base, own, each, 2 * texts.shape[1] / length, seconds, any_text=False)
    start = time.process_time()
    with model.kv_bias(base):
        patches = token_patches(model, exact, few)
    reading = time.process_time() - start + writing * len(few) / len(many)
    for name, condense in ((VECTORS, thought_vectors), (MATRICES, thought_matrices)):
        start = time.process_time()
        thought = condense(patches)
        seconds = reading + time.process_time() - start
        yield Stored(name, 0, base, thought, thought.num_parameters, 3 * few.numel() / length, seconds)
    for rank in ranks(settings):
        rates = asked["rates_of_all_entries"] if rank is None else asked["rates"]
        with model.kv_bias(base):
            found = distill_prompt(model, exact, many, rank=rank, steps=asked["steps"], learning_rates=rates, seed=seed)
        name, change, passes = distillation_name(rank), found.weights, found.passes + many.numel() / length
        yield Stored(name, 0, base, change, change.num_parameters, passes, found.seconds + writing)


def ranks(settings: Mapping[str, Any]) -> list[int | None]:
    """The ranks of the distillations, with None for all entries of the weight matrices."""
    asked = settings["distillation"]
    return [*asked["ranks"], *([None] if asked["rates_of_all_entries"] else [])]


def bos_alone(model: HookedKVTransformer, prompt: Tensor) -> KVBias:
    """The prompt left out, but its BOS at the same distance from the text as with the prompt in between."""
    bos = convert_prompt(model, prompt[:1])
    assert isinstance(bos.features, VirtualKeys)
    further = len(prompt) - 1
    return bos._made(None, position_offset=bos.position_offset + further, features=bos.features.further(further))

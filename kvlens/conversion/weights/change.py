"""What every change of the weights has in common: how many numbers it stores, and a context in which the model has it.

A change of the weights is not a :class:`~kvlens.kv_bias.KVBias`: it cannot be divided into the prompt's contribution to each
head, and it does not take part in attention. What the two share is that they stand for a prompt and that their error can be
measured in the same way: the logits on a text with and without the prompt.

Changes of the MLPs act on x [d_model], the input of a layer's MLP (after its norm). With W for each matrix that reads x
(W_in and, in gated MLPs, W_gate; in a mixture of experts those of every expert, and the router):

    W + M W,  b + c W    is the same as reading    x + x M + c        with M [d_model, d_model], c [d_model]

so M and c describe the change of all these matrices and biases together, and are what is stored. The output of the block,
which also contains the residual stream, is changed by an offset [d_model] (a change of b_out; where a block norms the output of
its MLP, an offset after that norm).
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.errors import KVLensError
from kvlens.kv_bias import Fingerprint, KVBias
from kvlens.model import HookedKVTransformer


class WeightChange(ABC):
    """A change of one model's weights that stands for a prompt.

    Attributes:
        fingerprint: the model to which it belongs.
    """

    fingerprint: Fingerprint

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """How many numbers are stored; compare :attr:`kvlens.KVBias.num_parameters`."""

    @abstractmethod
    def _attach(self, model: HookedKVTransformer, stack: contextlib.ExitStack) -> None:
        """Change ``model`` until ``stack`` is closed."""

    @contextlib.contextmanager
    def attached(self, model: HookedKVTransformer) -> Iterator[HookedKVTransformer]:
        """``with change.attached(model): ...``; afterwards the model is as before.

        A KV bias that is to be read as well has to be attached first, since it belongs to the unchanged weights.

        Raises:
            KVLensError: ``model`` is not the one that the change was made for, or another thread is using it.
        """
        what = type(self).__name__
        if model.fingerprint() != self.fingerprint:
            raise KVLensError(f"{what}: this change of the weights was made for another model; make it again for this one")
        with model._thread.changes(what, model._has_bias), contextlib.ExitStack() as stack:
            self._attach(model, stack)
            yield model


class Seen(NamedTuple):
    """What the blocks read and wrote on some texts: the inputs of the MLPs, and the stream after each block."""

    mlp_in: Float[Tensor, "layer text pos d_model"]
    out: Float[Tensor, "layer text pos d_model"]


class BlockChange(WeightChange):
    """A change of every MLP, in terms of what it reads, and of what each block writes.

    Attributes:
        offsets: added to the output of each block, by layer.
    """

    offsets: Tensor

    @abstractmethod
    def _patched(self, x: Float[Tensor, "text pos d_model"], layer: int) -> Float[Tensor, "text pos d_model"]:
        """What the unchanged MLP would have to read."""

    def _attach(self, model: HookedKVTransformer, stack: contextlib.ExitStack) -> None:
        change_blocks(model, stack, self._patched, lambda y, layer: y + self.offsets[layer].to(y))


Change = Callable[[Tensor, int], Tensor]
"""Of a tensor in a layer."""


def change_blocks(model: HookedKVTransformer, stack: contextlib.ExitStack, mlp_in: Change, out: Change) -> None:
    """Until ``stack`` is closed, pass the inputs of every MLP and the outputs of every block through a function."""
    for layer, block in enumerate(model.blocks):
        handle = block.mlp.register_forward_pre_hook(lambda _, args, layer=layer: (mlp_in(args[0], layer), *args[1:]))
        stack.callback(handle.remove)
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]
    stack.enter_context(model.hooks(fwd_hooks=[(name, lambda x, hook: out(x, hook.layer())) for name in names]))


def check_changeable(what: str, model: HookedKVTransformer, bias: KVBias) -> None:
    """Raise KVLensError for a batch of prompts."""
    if bias.batch_size not in (None, 1):
        raise KVLensError(
            f"{what}: a change of the weights stands for one prompt, got a bias of {bias.batch_size}; choose one by "
            "bias.select_prompt(i)"
        )


@torch.no_grad()
def watched(model: HookedKVTransformer, texts: Int[Tensor, "text pos"]) -> Seen:
    """What the blocks read and write on the texts, with whatever is attached to the model now."""
    mlp_in: list[Tensor] = []
    out: list[Tensor] = []

    def kept(x: Tensor, into: list[Tensor]) -> Tensor:
        into.append(x.detach().clone())
        return x

    with contextlib.ExitStack() as stack:
        change_blocks(model, stack, lambda x, _: kept(x, mlp_in), lambda y, _: kept(y, out))
        model(texts, attention_mask=torch.ones_like(texts), stop_at_layer=model.cfg.n_layers)
    return Seen(torch.stack(mlp_in), torch.stack(out))

"""A prompt as a change of the weights of the MLPs, for comparison with a KV bias: patches per token, and for all tokens.

A change of the weights is not a :class:`~kvlens.kv_bias.KVBias`: it cannot be divided into the prompt's contribution to each
head, and it does not take part in attention. What the two share is that they stand for a prompt and that their error can be
measured in the same way: the logits on a text with and without the prompt.

Changes of the MLPs act on x [d_model], the input of a layer's MLP (after its norm). With W for each matrix that reads x
(W_in and, in gated MLPs, W_gate; in a mixture of experts those of every expert, and the router):

    W + M W,  b + c W    is the same as reading    x + x M + c        with M [d_model, d_model], c [d_model]

so M and c describe the change of all these matrices and biases together, and are what is stored. The output of the block,
which also contains the residual stream, is changed by an offset [d_model] (a change of b_out; where a block norms the output of
its MLP, an offset after that norm).

**Token patches** have rank 1, are one per token, and replace a prompt exactly (Dherin et al. 2025, Goldwaser et al. 2025).
Take one block and one token of a text. With the prompt in context, the MLP reads x' and the stream after the block is
y' = r' + MLP(x'), where r' is everything that bypasses the MLP. Without it, these are x, y and r. Change every matrix W that
reads x, and the bias of the output:

    W' = W + x^T (x' - x) W / |x|^2        b_out' = b_out + (r' - r)

Then x W' = x' W, so the MLP returns MLP(x'), and the block returns y': exactly what it returns with the prompt, for this token.
Block by block from below, each reads the same stream as with the prompt, except that attention sees no prompt; so patches for
every token and layer reproduce the prompted model on this text. They depend on the text: for another one, they have to be made
again, by reading it with the prompt. They explain what a prompt does; they do not replace it.

Dherin et al. (2507.16003, th. 2.2 and B.2) have one matrix W that reads the output of attention, with a skip connection.
Goldwaser et al. (2511.17864) add norms, gates and several layers; where a block norms the MLP's output and has no b_out, they
change the scale of that norm, which has the same effect as the offset here.

**Thought vectors and matrices** are token patches condensed to one change for all tokens (Mazzawi et al. 2025). From those of
many tokens t, with x_t, x'_t and r'_t - r_t as above:

    thought vectors     c = mean_t (x'_t - x_t)                                        offset = mean_t (r'_t - r_t)
    thought matrices    M = argmin sum_t |x_t M - (x'_t - x_t)|^2 + ridge |M|^2        offset = mean_t (r'_t - r_t)

The matrices and biases that read x become W + M W and b + c W. Unlike token patches they serve any text, but only
approximately.

Source: Mazzawi et al. 2025, arXiv 2510.08734, known from its abstract and summaries: a mean vector and a least-squares
matrix for blocks without norms. Here x comes after the norm, and c exists in addition to the offset for the same reason.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import Within, checked
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


TensorChange = Callable[[Tensor, int], Tensor]
"""Of a tensor in a layer."""


def change_blocks(model: HookedKVTransformer, stack: contextlib.ExitStack, mlp_in: TensorChange, out: TensorChange) -> None:
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


def _read(model: HookedKVTransformer, texts: Int[Tensor, "text pos"], mlp_in: TensorChange, out: TensorChange) -> None:
    """One pass over the texts in which the inputs of every MLP and the outputs of every block go through a function."""
    with contextlib.ExitStack() as stack:
        change_blocks(model, stack, mlp_in, out)
        model(texts, attention_mask=torch.ones_like(texts), stop_at_layer=model.cfg.n_layers)


@dataclass(frozen=True)
class TokenPatches(BlockChange):
    """A rank-1 patch for every token of some texts and every layer.

    Attributes:
        inputs: x, what the MLPs read without the prompt, but with the patches of the layers below.
        changes: x' - x.
        offsets: r' - r, added to the output of the block.
        fingerprint: the model to which they belong.
    """

    inputs: Float[Tensor, "layer text pos d_model"]
    changes: Float[Tensor, "layer text pos d_model"]
    offsets: Float[Tensor, "layer text pos d_model"]
    fingerprint: Fingerprint

    @property
    def num_parameters(self) -> int:
        """Three vectors of size d_model per token and layer; the factor (x' - x) W is computed from the model's W."""
        return self.inputs.numel() + self.changes.numel() + self.offsets.numel()

    def matrix(self, layer: int, text: int, pos: int) -> Float[Tensor, "d_model d_model"]:
        """M = x^T (x' - x) / |x|^2 of one token: the patched matrices are W + M W."""
        x = self.inputs[layer, text, pos]
        return torch.outer(x / _squared_length(x), self.changes[layer, text, pos])

    def _patched(self, x: Float[Tensor, "text pos d_model"], layer: int) -> Float[Tensor, "text pos d_model"]:
        own = self.inputs[layer].to(x)
        if x.shape != own.shape:
            raise KVLensError(
                f"TokenPatches: made for {own.shape[0]} texts of {own.shape[1]} tokens, but the model reads "
                f"{x.shape[0]} of {x.shape[1]}; every token has its own patch: read the same texts, in one pass"
            )
        along = (x * own).sum(dim=-1, keepdim=True) / _squared_length(own)
        return x + along * self.changes[layer].to(x)


@checked
@torch.no_grad()
def token_patches(model: HookedKVTransformer, bias: KVBias, texts: Int[Tensor, "text pos"]) -> TokenPatches:
    """Patches with which ``model``, with what is attached to it now, reads ``texts`` as it does with ``bias`` instead.

    Costs two passes over the texts.

    Args:
        model: what is attached to it stays attached to the patched model: nothing, or for example the bias of a BOS.
        bias: stands for a single prompt; ``convert_prompt(model, prompt)`` for the prompt exactly.
        texts: token ids, without padding.

    Raises:
        KVLensError: several prompts, a model without MLPs, or a token at which an MLP reads 0 without the bias but not
            with it, so that no change of its weights has the same effect.
    """
    check_changeable("token_patches", model, bias)
    whole: list[list[Tensor]] = [[], []]
    own: list[list[Tensor]] = [[], []]

    def noted(x: Tensor, into: list[Tensor]) -> Tensor:
        into.append(x.clone())
        return x

    def as_with_prompt(x: Tensor, layer: int) -> Tensor:
        own[0].append(x.clone())
        return whole[0][layer]

    def same_output(y: Tensor, layer: int) -> Tensor:
        own[1].append(whole[1][layer] - y)
        return whole[1][layer]

    with model.kv_bias(bias):
        _read(model, texts, lambda x, _: noted(x, whole[0]), lambda y, _: noted(y, whole[1]))
    _read(model, texts, as_with_prompt, same_output)
    without, offsets = map(torch.stack, own)
    patches = TokenPatches(without, torch.stack(whole[0]) - without, offsets, model.fingerprint())
    impossible = (without == 0).all(dim=-1) & (patches.changes != 0).any(dim=-1)
    if bool(impossible.any()):
        layer, text, pos = impossible.nonzero()[0].tolist()
        raise KVLensError(
            f"token_patches: the MLP of layer {layer} reads 0 at position {pos} of text {text}, so that no change of its "
            "weights has an effect there"
        )
    return patches


def _squared_length(x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch one"]:
    """|x|^2, and 1 where x is 0; there is no change at such tokens."""
    square = x.square().sum(dim=-1, keepdim=True)
    return torch.where(square > 0, square, torch.ones_like(square))


@dataclass(frozen=True)
class ThoughtPatches(BlockChange):
    """A change of every layer's MLP that is the same for all tokens.

    Attributes:
        matrices: M; None for thought vectors.
        vectors: c; None for thought matrices.
        offsets: added to the output of each block.
        fingerprint: the model to which they belong.
    """

    matrices: Float[Tensor, "layer d_model d_model"] | None
    vectors: Float[Tensor, "layer d_model"] | None
    offsets: Float[Tensor, "layer d_model"]
    fingerprint: Fingerprint

    @property
    def num_parameters(self) -> int:
        return sum(x.numel() for x in (self.matrices, self.vectors, self.offsets) if x is not None)

    def _patched(self, x: Float[Tensor, "text pos d_model"], layer: int) -> Float[Tensor, "text pos d_model"]:
        changed = x if self.vectors is None else x + self.vectors[layer].to(x)
        return changed if self.matrices is None else changed + x @ self.matrices[layer].to(x)


@checked
@torch.no_grad()
def thought_vectors(patches: TokenPatches) -> ThoughtPatches:
    """The mean change: 2 d_model numbers per layer."""
    mean = patches.changes.mean(dim=(1, 2))
    return ThoughtPatches(None, mean, patches.offsets.mean(dim=(1, 2)), patches.fingerprint)


@checked
@torch.no_grad()
def thought_matrices(patches: TokenPatches, ridge: Annotated[float, Within(above=0, most=1e6)] = 1e-2) -> ThoughtPatches:
    """The least-squares change: d_model^2 + d_model numbers per layer.

    Args:
        patches: for tokens of texts that the prompted model may read.
        ridge: relative to the mean square of an entry of x, times the number of tokens.
    """
    x, change = patches.inputs.flatten(1, 2).double(), patches.changes.flatten(1, 2).double()
    moments = x.mT @ x
    size = moments.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    damped = moments + (ridge * size.clamp(min=torch.finfo(size.dtype).tiny))[:, None, None] * torch.eye(x.shape[-1]).to(x)
    matrices = torch.linalg.solve(damped, x.mT @ change).to(patches.changes)
    return ThoughtPatches(matrices, None, patches.offsets.mean(dim=(1, 2)), patches.fingerprint)

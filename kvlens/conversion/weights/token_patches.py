"""Rank-1 patches of the MLPs, one per token, which replace a prompt exactly (Dherin et al. 2025, Goldwaser et al. 2025).

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
"""

import contextlib
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import checked
from kvlens.conversion.weights.change import BlockChange, change_blocks, check_changeable, watched
from kvlens.errors import KVLensError
from kvlens.kv_bias import Fingerprint, KVBias
from kvlens.model import HookedKVTransformer


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
    with model.kv_bias(bias):
        with_prompt = watched(model, texts)
    inputs: list[Tensor] = []
    offsets: list[Tensor] = []

    def as_with_prompt(x: Tensor, layer: int) -> Tensor:
        inputs.append(x.clone())
        return with_prompt.mlp_in[layer]

    def same_output(y: Tensor, layer: int) -> Tensor:
        offsets.append(with_prompt.out[layer] - y)
        return with_prompt.out[layer]

    with contextlib.ExitStack() as stack:
        change_blocks(model, stack, as_with_prompt, same_output)
        model(texts, attention_mask=torch.ones_like(texts), stop_at_layer=model.cfg.n_layers)
    without = torch.stack(inputs)
    patches = TokenPatches(without, with_prompt.mlp_in - without, torch.stack(offsets), model.fingerprint())
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

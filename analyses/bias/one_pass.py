"""What a text reads of a prompt, position by position, where the model hands over whole layers from one pass over both.

    z_i = inherited_i + gate_i * sum_j A_ij v'_j + text_i

A is the pattern of a softmax layer, and of a recurrent layer its exact effective attention, A_ij = qbar_i . kbar_j with the
carried queries and keys: b_KV = sum_j kbar_j v_j^T. A gate on the heads' outputs belongs to every part; a norm behind z, and a
gate behind that, are held as in direct logit attribution.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVModel
from kvlens.model import direct_path, read_attention

from .reads import Stretch, TextReads


class OnePassReading:
    """As :class:`kvlens.analyses.bias.reads.PromptReading`, from one pass over both.

    Args:
        model: with what the prompt continues attached.
        prompt, text: tokens [pos].
        with_logits: whether logits will be attributed, for which heads must write to the residual stream directly.

    Raises:
        KVLensError: they do not.
    """

    def __init__(
        self,
        model: KVModel,
        prompt: Int[Tensor, " prompt_pos"],
        text: Int[Tensor, " text_pos"],
        with_logits: bool,
    ):
        self.model, self.n_prompt, self.layers = model, len(prompt), read_attention(model, prompt, text)
        self.scale = torch.ones(len(text), 1, dtype=torch.float64, device=text.device)
        if with_logits:
            self.scale = direct_path(model, torch.cat([prompt, text])).scale[self.n_prompt :]

    def text(self) -> tuple[list[TextReads], Float[Tensor, "text 1"]]:
        """The text's side of every layer, and the final norm's scale there."""
        layers = [(of.pattern.transpose(0, 1), of.z, of.z_bias, None, of.gate, of.factor) for of in self.layers]
        return [TextReads(*of) for of in layers], self.scale

    def visit_prompt(self, visit: Callable[[int, Stretch], None]) -> None:
        """Hand every layer's values to ``visit(layer, stretch)``; a position's key is the position."""
        for layer, of in enumerate(self.layers):
            keys = torch.eye(self.n_prompt, dtype=of.values.dtype, device=of.values.device)
            visit(layer, Stretch(0, keys[:, None].expand(-1, of.values.shape[1], -1), of.values))

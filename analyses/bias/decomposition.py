"""A converted prompt, head by head: the size of its bias, its number of directions, and what the text reads from it.

Per layer and head: the size and spectrum of b_KV and b_D, the bias's share of the head's output on a text, and the bias's
direct logit attribution: what z_bias adds to a logit through W_O, the final norm (frozen at its actual scale) and W_U,
bypassing all later layers. The other views of the same bias are separate analyses:

- :func:`kvlens.analyses.bias.spectrum.bias_singular_values`: every singular value of b_KV;
- :func:`kvlens.analyses.bias.positions.bias_positions`: the contribution of each prompt position to ``output_share`` and
  ``logit``;
- :func:`kvlens.analyses.bias.effects.bias_effects`: the effect of ablating the bias or the shift state, through every path.

One forward pass over the prompt, one over the text.
"""

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias
from kvlens.checks import checked

from ..declaration import Analysis, Columns
from ..inputs import ANSWER, PROMPT, RIVAL, TEXT
from ..predictions import OUTPUT_SHARE
from ..sequences import PromptTokens, TextTokens, bias_and_text
from ..stream.logit_attribution import LogitTarget, Token, check_heads_write_directly, logit_target
from .outputs import BiasOutputs, bias_outputs, share_by_size, share_probes
from .spectrum import effective_rank, singular_values, sizes

COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", "query head"),
    b_kv_norm=("float64", "Frobenius norm of b_KV, its log_scale included"),
    b_kv_spectral_norm=("float64", "its largest singular value"),
    b_kv_effective_rank=("float64", "exp of the entropy of its normalized singular values; 0 for a b_KV of zeros"),
    b_d_norm=("float64", "norm of b_D, likewise"),
    bias_share=("float64", "mean over the text's positions of ||z_bias|| / (||z_bias|| + ||z_context||), 0 for 0 / 0"),
    output_share=("float64", f"{OUTPUT_SHARE}; the part is z_bias, all positions of the text together"),
    logit=(
        "float64",
        "direct logit attribution of z_bias: what it adds to the answer's logit, less that of ``rival`` or else the "
        "vocabulary's mean; NaN in a text of one token without ``answer``",
    ),
)


@COLUMNS.document
@checked
@torch.no_grad()
def bias_decomposition(
    model: HookedKVTransformer,
    prompt: KVBias | PromptTokens,
    text: TextTokens,
    *,
    answer: Token | None = None,
    rival: Token | None = None,
) -> pd.DataFrame:
    """Describe the bias of each head, and the part of the head's output that comes from it.

    Args:
        model: linear or softmax.
        prompt: a string, or tokens [pos] with BOS if the model uses one, which are converted here; or a bias.
        text: a string, or tokens [pos] without BOS.
        answer: the token (id or text) whose logit is attributed at the text's last position; None takes the logit of the next
            token, averaged over all positions but the last.
        rival: with ``answer``: the token whose logit is subtracted; None subtracts the mean logit of the vocabulary.

    Returns:
        One row per head, by layer, then head:

        {columns}

    Raises:
        KVLensError: heads that do not write to the residual stream directly, or invalid tokens.
    """
    check_heads_write_directly(model, "bias_decomposition")
    bias, text = bias_and_text(model, "bias_decomposition", prompt, text)
    target = logit_target(model, text, answer, rival)
    outputs = bias_outputs(model, bias, text)
    z = outputs.of_bias + outputs.of_context
    values = singular_values(bias)
    norms = outputs.of_bias.norm(dim=-1), outputs.of_context.norm(dim=-1)
    layers, heads = torch.meshgrid(torch.arange(bias.n_layers), torch.arange(bias.n_heads), indexing="ij")
    return COLUMNS.frame(
        {
            "layer": layers,
            "head": heads,
            "b_kv_norm": sizes(bias, "b_KV"),
            "b_kv_spectral_norm": values[..., 0],
            "b_kv_effective_rank": effective_rank(values),
            "b_d_norm": sizes(bias, "b_D"),
            "bias_share": share_by_size(*norms).mean(dim=1),
            "output_share": (outputs.of_bias * share_probes(z, pooled=True)).sum(dim=(1, 3)),
            "logit": _logits(model, outputs, target),
        }
    )


def _logits(model: HookedKVTransformer, outputs: BiasOutputs, target: LogitTarget) -> Float[Tensor, "layer head"]:
    """What each head's z_bias adds to the target's logit, mean over the target's positions."""
    probes = torch.stack([target.probes(model, outputs.scale, layer) for layer in range(len(outputs.of_bias))])
    return (outputs.of_bias * probes).sum(dim=(1, 3)) / len(target.positions)


BIAS_DECOMPOSITION = Analysis(
    name="bias_decomposition",
    summary="each head's bias: size, effective rank, share of the output, direct logit attribution",
    function=bias_decomposition,
    columns=COLUMNS,
    inputs={"prompt": PROMPT, "text": TEXT, "answer": ANSWER, "rival": RIVAL},
)

"""A converted prompt, head by head: the size of its bias, its number of directions, and what the text reads from it.

Per layer and head: the size and spectrum of b_KV and b_D, the bias's share of the head's output on a text, and the bias's
direct logit attribution: what z_bias adds to a logit through W_O, the final norm (frozen at its actual scale) and W_U,
bypassing all later layers. In a recurrent layer a norm and a gate stand between z and W_O: they are frozen too. The other views
of the same bias are separate analyses:

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

from kvlens import KVBias, KVModel
from kvlens.checks import checked
from kvlens.model import HeadsRead, read_stream

from ..declaration import Columns, analysis
from ..predictions import OUTPUT_SHARE
from ..sequences import PromptTokens, TextTokens, bias_and_text
from ..stream.logit_attribution import LogitTarget, Token, check_heads_write_directly, logit_target
from .outputs import share_by_size, share_probes
from .parts import HEAD, heads_of
from .spectrum import effective_rank, singular_values, sizes

COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", HEAD),
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


@analysis(COLUMNS, "each head's bias: size, effective rank, share of the output, direct logit attribution")
@checked
@torch.no_grad()
def bias_decomposition(
    model: KVModel,
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
    with model.kv_bias(bias):
        stream = read_stream(model, text, len(text))
    tables = [_of_layer(model, layer, read, target, stream.scale) for layer, read in enumerate(stream.layers)]
    spectra = singular_values(bias)
    norms, b_d_norms = torch.cat(sizes(bias, "b_KV")), torch.cat(sizes(bias, "b_D"))
    layer, head = torch.tensor(heads_of(bias)).T
    return COLUMNS.frame(
        {
            "layer": layer,
            "head": head,
            "b_kv_norm": norms,
            "b_kv_spectral_norm": torch.cat([values[:, 0] for values in spectra]),
            "b_kv_effective_rank": torch.cat([effective_rank(values) for values in spectra]),
            "b_d_norm": b_d_norms,
            **{name: torch.cat([table[name] for table in tables]) for name in tables[0]},
        }
    )


def _of_layer(
    model: KVModel,
    layer: int,
    read: HeadsRead,
    target: LogitTarget,
    scale: Float[Tensor, "pos 1"],
) -> dict[str, Float[Tensor, " head"]]:
    """What the heads of a layer read from their bias; the target's logit is the mean over its positions."""
    assert read.z_bias is not None  # a bias is attached
    of_bias, of_context = read.z_bias.double(), read.z_context.double()
    written = of_bias if read.factor is None else of_bias * read.factor
    probes = target.probes(model, scale, layer).to(written)
    return {
        "bias_share": share_by_size(of_bias.norm(dim=-1), of_context.norm(dim=-1)).mean(dim=0),
        "output_share": (of_bias * share_probes(of_bias + of_context, pooled=True)).sum(dim=(0, 2)),
        "logit": (written * probes).sum(dim=(0, 2)) / len(target.positions),
    }

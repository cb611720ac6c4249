"""Details of single heads on a prompt: the text's attention, the shares of prompt tokens, and the share of the bias."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias, KVLensError, KVModel
from kvlens.checks import checked
from kvlens.texts import token_texts

from ..bias.decomposition import bias_outputs, share_by_size
from ..bias.positions import output_shares
from ..segments import Progress, PromptColumns, bar_unless, stack_layers, zeros_by_head
from ..sequences import PromptTokens, TextTokens, prompt_text_bias
from .rows import attention_among, visit_rows

MAX_QUERIES, MAX_STRONGEST = 128, 64
"""The number of pattern rows that are computed, evenly spaced over the text; the number of prompt tokens in ``strongest``."""


@dataclass(frozen=True)
class HeadDetails:
    """Every head's attention on one prompt and text.

    The axis ``head`` is as long as the largest layer needs; heads that a layer of a hybrid model does not have are NaN.

    Attributes:
        prompt, text: their tokens as text.
        queries: positions in prompt + text of the rows of ``pattern``, ascending: those of the text, or 128 of a longer text.
        pattern: pattern of the unconverted model, [layer, head, query, column]; for recurrent layers the exact effective
            attention. The first columns are the prompt's, each the
            sum over ``block`` neighboring tokens (the last one may have fewer); then the text's, one per token.
        prompt_shares: [layer, head, prompt] share of each prompt token in the head's output, over the whole text; with the
            shares of the shift state and of the text itself they sum to 1.
        bias_shares: [layer, head, text] share of the head's output that comes from the prompt, in [0, 1]; None if unknown.
        block: tokens per column of the prompt: 1 for prompts of up to 4,096 tokens.
        strongest: positions in prompt + text, ascending: the 64 prompt positions that the text attends to most, and the last
            128 of the text.
        among: the pattern among these, [layer, head, position, position]; None if unknown, as is ``strongest``.
    """

    prompt: list[str]
    text: list[str]
    queries: Int[Tensor, " query"]
    pattern: Float[Tensor, "layer head query column"]
    prompt_shares: Float[Tensor, "layer head prompt_pos"]
    bias_shares: Float[Tensor, "layer head text_pos"] | None = None
    block: int = 1
    strongest: Int[Tensor, " position"] | None = None
    among: Float[Tensor, "layer head position position"] | None = None


@checked
@torch.no_grad()
def head_details(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    bias: KVBias | None = None,
    on_progress: Progress | None = None,
) -> HeadDetails:
    """Run the unconverted model on prompt and text, and the converted one on the text.

    Args:
        model: a model with nothing attached.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        text: a string, or tokens [pos] without BOS.
        bias: the converted prompt, if it has been converted already; None converts it here.
        on_progress: called with the fraction done; None shows a progress bar on a terminal if it takes long.

    Raises:
        KVLensError: an attached bias, an empty prompt or text.
    """
    if model.attached_kv_bias is not None:
        raise KVLensError("head_details: a bias is attached to this model; detach it first (model.detach_kv_bias())")
    prompt, text, bias = prompt_text_bias(model, prompt, text, bias)
    n_prompt, n_text = len(prompt), len(text)
    everything = torch.cat([prompt, text])
    queries = n_prompt + torch.linspace(0, n_text - 1, min(n_text, MAX_QUERIES)).round().long()
    with bar_unless(on_progress, "head_details") as tell:
        pattern, attended = _rows(model, everything, queries, n_prompt, lambda x: tell(0.4 * x))
        in_prompt = attended.topk(min(n_prompt, MAX_STRONGEST)).indices.sort().values
        strongest = torch.cat([in_prompt, torch.arange(max(n_prompt, len(everything) - MAX_QUERIES), len(everything))])
        among = attention_among(model, everything, strongest, on_progress=lambda x: tell(0.4 + 0.2 * x))
        shares = output_shares(model, prompt, text, on_progress=lambda x: tell(0.6 + 0.4 * x)).float()
    return HeadDetails(
        prompt=token_texts(model, prompt),
        text=token_texts(model, text),
        queries=queries,
        pattern=pattern,
        prompt_shares=shares,
        bias_shares=_bias_shares(model, text, bias),
        block=PromptColumns.of(n_prompt).block,
        strongest=strongest,
        among=among,
    )


def _rows(
    model: KVModel, everything: Tensor, queries: Tensor, n_prompt: int, tell: Progress
) -> tuple[Float[Tensor, "layer head query column"], Float[Tensor, " prompt_pos"]]:
    """The pattern at ``queries`` in columns, and the attention to each prompt token, summed over queries and heads."""
    columns = PromptColumns.of(n_prompt)
    n_text = len(everything) - n_prompt
    pattern = zeros_by_head(model, len(queries), len(columns) + n_text)
    attended = torch.zeros(n_prompt)

    def add(layer: int, first: int, rows: Tensor) -> None:
        n_here = min(max(0, n_prompt - first), rows.shape[-1])
        of_prompt, of_text = rows[..., :n_here], rows[..., n_here:]
        columns.add(pattern[layer, : len(rows), :, : len(columns)], of_prompt, first)
        attended[first : first + n_here] += of_prompt.abs().sum(dim=(0, 1))
        behind = len(columns) + max(0, first - n_prompt)
        pattern[layer, : len(rows), :, behind : behind + of_text.shape[-1]] = of_text

    visit_rows(model, everything, queries, add, on_progress=tell)
    return pattern, attended


def _bias_shares(model: KVModel, text: Int[Tensor, " text_pos"], bias: KVBias) -> Float[Tensor, "layer head text_pos"]:
    """The bias's share of every head's output at every position of the text."""
    outputs = bias_outputs(model, bias, text)
    of_bias, of_context = (stack_layers([z.norm(dim=-1) for z in part], fill=torch.nan) for part in outputs)
    return share_by_size(of_bias, of_context).transpose(1, 2).float().cpu()

"""What single heads do with a prompt: whom the text's queries attend to, which prompt tokens count, what share the bias has."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias, KVLensError
from kvlens.checks import checked

from ..bias.outputs import bias_outputs, share_by_size
from ..bias.positions import output_shares
from ..segments import Progress, PromptColumns, bar_unless
from ..sequences import PromptTokens, TextTokens, prompt_text_bias
from ..texts import token_texts
from .rows import attention_among, visit_rows

MAX_QUERIES, MAX_STRONGEST = 128, 64
"""Rows of the pattern that are computed, evenly spaced over the text; the prompt's tokens among the strongest."""


@dataclass(frozen=True)
class HeadDetails:
    """Every head's attention on one prompt and text.

    Attributes:
        prompt, text: their tokens as text.
        queries: positions in prompt + text of the rows of ``pattern``, ascending: the text's, 128 of a longer one.
        pattern: of the unconverted model: [layer, head, query, column]. The first columns are the prompt's, each the sum over
            ``block`` neighboring tokens, the last of them over what is left; then the text's, a token each.
        prompt_shares: [layer, head, prompt] of each prompt token in the head's output, over the whole text; with the shares of
            the shift state and of the text itself they sum to 1.
        bias_shares: [layer, head, text] how much of the head's output comes from the prompt, 0..1; None where it is unknown.
        block: tokens per column of the prompt: 1 up to 4,096 of them.
        strongest: positions in prompt + text, ascending: the prompt's 64 that the text attends to most, the text's last 128.
        among: the pattern among these, [layer, head, position, position]; None where it is unknown, as ``strongest``.
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
    model: HookedKVTransformer,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    bias: KVBias | None = None,
    on_progress: Progress | None = None,
) -> HeadDetails:
    """Run the unconverted model on prompt and text, and the converted one on the text.

    Args:
        model: linear or softmax, nothing attached.
        prompt: a string, or tokens [pos] with BOS where the model wants one.
        text: a string, or tokens [pos] without BOS.
        bias: the converted prompt, where it has been converted already; None converts it here.
        on_progress: called with the fraction done; None shows a bar on a terminal where it takes long.

    Raises:
        KVLensError: an attached bias, an empty prompt or text, heads that do not write to the residual
            stream directly.
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
    model: HookedKVTransformer, everything: Tensor, queries: Tensor, n_prompt: int, tell: Progress
) -> tuple[Float[Tensor, "layer head query column"], Float[Tensor, " prompt_pos"]]:
    """The pattern at ``queries`` in columns, and how much all of them and all heads attend to each prompt token."""
    columns = PromptColumns.of(n_prompt)
    n_text = len(everything) - n_prompt
    pattern = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, len(queries), len(columns) + n_text)
    attended = torch.zeros(n_prompt)

    def add(layer: int, first: int, rows: Tensor) -> None:
        n_here = min(max(0, n_prompt - first), rows.shape[-1])
        of_prompt, of_text = rows[..., :n_here], rows[..., n_here:]
        columns.add(pattern[layer, ..., : len(columns)], of_prompt, first)
        attended[first : first + n_here] += of_prompt.abs().sum(dim=(0, 1))
        behind = len(columns) + max(0, first - n_prompt)
        pattern[layer, ..., behind : behind + of_text.shape[-1]] = of_text

    visit_rows(model, everything, queries, add, on_progress=tell)
    return pattern, attended


def _bias_shares(
    model: HookedKVTransformer, text: Int[Tensor, " text_pos"], bias: KVBias
) -> Float[Tensor, "layer head text_pos"]:
    """How much of every head's output at every position of the text the bias makes up."""
    outputs = bias_outputs(model, bias, text)
    share = share_by_size(outputs.of_bias.norm(dim=-1), outputs.of_context.norm(dim=-1))
    return share.transpose(1, 2).float().cpu()

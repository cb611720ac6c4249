"""Attention of each head from a repeated token in the text to the token that followed it in the prompt."""

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from kvlens import KVModel
from kvlens.checks import checked
from kvlens.model import heads_per_layer

from ..bias.parts import HEAD
from ..declaration import Columns, analysis
from ..segments import Progress, bar_unless, heads_of_model
from ..sequences import PromptTokens, TextTokens, one_sequence, prompt_sequence
from .ablation import cached
from .repeated_text import layer_taps, roles, shifted_projections
from .rows import visit_rows

COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", HEAD),
    position=("int64", "in the text"),
    prompt_position=("int64", "of the token after an earlier occurrence of the text's token"),
    attention=("float64", "of the head, from the one to the other"),
    shifted=("bool", "whether the head reaches the following token by its shift coefficients rather than an earlier layer"),
)


@analysis(COLUMNS, "attention from each text token to what followed it in the prompt")
@checked
@torch.no_grad()
def prompt_copies(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    on_progress: Progress | None = None,
) -> pd.DataFrame:
    """Measure every head's attention along the pairs that induction would use.

    Args:
        model: with any attention.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        text: a string, or tokens [pos] without BOS.
        on_progress: called with the fraction done; None shows a progress bar on a terminal if it takes long.

    Returns:
        By layer, head, text token, then earlier occurrence; no rows if no token is repeated:

        {columns}

    Raises:
        KVLensError: tokens that are empty, misshapen or outside the vocabulary.
    """
    prompt = prompt_sequence(model, "prompt", prompt)
    text = one_sequence(model, "text", text)
    pairs = repeated_pairs(prompt, text)
    queries, row = pairs[:, 0].unique(return_inverse=True)
    n_pairs, counts = len(pairs), heads_per_layer(model)
    attention = torch.zeros(len(counts), max(counts), n_pairs)

    def pick(layer: int, first: int, rows: Tensor) -> None:
        here = (pairs[:, 1] >= first) & (pairs[:, 1] < first + rows.shape[-1])
        attention[layer, : len(rows), here] = rows[:, row[here], pairs[here, 1] - first]

    with bar_unless(on_progress, "prompt_copies") as tell:
        visit_rows(model, torch.cat([prompt, text]), queries, pick, on_progress=tell)
    by_shift = torch.tensor([role == "induction" for row in _roles(model, prompt[:1]) for role in row])
    layer, head = heads = heads_of_model(model)
    return COLUMNS.frame(
        {
            "layer": layer.repeat_interleave(n_pairs),
            "head": head.repeat_interleave(n_pairs),
            "position": (pairs[:, 0] - len(prompt)).repeat(len(head)),
            "prompt_position": pairs[:, 1].repeat(len(head)),
            "attention": attention[heads],
            "shifted": by_shift.repeat_interleave(n_pairs),
        }
    )


def repeated_pairs(prompt: Int[Tensor, " prompt_pos"], text: Int[Tensor, " text_pos"]) -> Int[Tensor, "pair 2"]:
    """(position of a text token, position after an equal token of the prompt), both in the concatenation of prompt and text."""
    before = prompt[:-1].cpu()
    keys = [(before == token).nonzero().squeeze(1) + 1 for token in text.cpu()]
    queries = [torch.full_like(found, len(prompt) + i) for i, found in enumerate(keys)]
    return torch.stack([torch.cat(queries), torch.cat(keys)], dim=1)


def _roles(model: KVModel, token: Int[Tensor, " 1"]) -> list[list[str]]:
    """The role of every head by its shift coefficients, including the effect of hooks on them."""
    shifted = shifted_projections(model)
    names = [{x: f"blocks.{layer}.attn.hook_{x}_shift_coef" for x in shifted} for layer in range(model.cfg.n_layers)]
    wanted = [name for of_layer in names for name in of_layer.values()]
    cache = cached(model, token[None], wanted) if wanted else {}
    used = [{x: cache[name] for x, name in of_layer.items()} for of_layer in names]
    return [roles(layer_taps(model, layer, of_layer, torch.float64)) for layer, of_layer in enumerate(used)]

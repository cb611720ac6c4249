"""What recurrent layers keep of a prompt: each token's survival, what is erased of earlier states, the half-lives of channels.

A value head has a matrix state S. Each token maps it and writes to it, S_t = T_t S_{t-1} + b_t k_t v_t^T, so that after M
tokens

    S_M = P S_old + sum_j kbar_j v_j^T        kbar_j = T_{M-1} ... T_{j+1} b_j k_j        P = T_{M-1} ... T_0

P is not normal: its effect on a state is described by its singular values, not by its eigenvalues. A term of the sum is what
the state would lose if the token's value were zero. That is a share, not an effect on any answer: omitting the token would also
restore what it removed. ``read_memory(model, tokens)`` of :mod:`kvlens.bridge` has P of every head (``state_map``).
"""

import math

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from kvlens import KVModel, convert_prompt
from kvlens.bridge import read_memory
from kvlens.checks import checked
from kvlens.texts import token_texts

from .declaration import Columns, analysis, tokens_field
from .registry import on_its_front_ends
from .sequences import prompt_sequence

VALUE_HEAD = dict(layer=("int64", "from 0, a recurrent layer"), head=("int64", "value head"))
MEMORY = Columns(
    **VALUE_HEAD,
    position=("int64", "of the token in the prompt, from 0"),
    token=("str", "its text; its id in a model without a tokenizer"),
    distance=("int64", "how many tokens of the prompt come after it"),
    survival=("float64", "|T_{M-1} ... T_{j+1} k_j| / |k_j|: the fraction of its key that survives the tokens after it"),
    term_norm=("float64", "|kbar_j| |v_j|, the Frobenius norm of what remains of what it wrote"),
    state_share=(
        "float64",
        "projection of its term on what the prompt wrote, over the square of that: sums to 1 over positions",
    ),
)
ERASURE = Columns(
    **VALUE_HEAD,
    earlier_norm=("float64", "Frobenius norm of S_old, the state after the earlier prompt"),
    left=("float64", "|P S_old| / |S_old|: the fraction that remains after the second prompt"),
    left_by_decay=("float64", "the fraction that would remain with the decays alone, if the second prompt removed nothing"),
    written=("float64", "norm of what the second prompt writes, over |S_old|"),
)

HALF_LIVES = Columns(
    **VALUE_HEAD,
    channel=("int64", "key channel; -1 where all channels of a head decay alike"),
    half_life=("float64", "tokens after which half is left, by the mean log-decay over the prompt; infinite without decay"),
)


@analysis(MEMORY, "how much of each prompt token remains in the states of recurrent layers", cost="the prompt once")
@on_its_front_ends
@checked
@torch.no_grad()
def state_memory(model: KVModel, prompt: str | Int[Tensor, "*one_prompt pos"]) -> pd.DataFrame:
    """Measure how much of each token of a prompt remains in the states of the recurrent layers at its end.

    Args:
        model: a model with recurrent layers, and whatever is attached to it.
        prompt: a string, or tokens [pos] or [1, pos].

    Returns:
        One row per layer, head and position, in that order:

        {columns}

    Raises:
        KVLensError: a model without recurrent layers, several prompts, tokens outside the vocabulary.
    """
    tokens = prompt_sequence(model, "prompt", prompt)
    n, texts = len(tokens), token_texts(model, tokens)
    frames = []
    for memory in read_memory(model, tokens):
        terms = memory.carried_keys.norm(dim=-1) * memory.values.norm(dim=-1)
        state = torch.einsum("phk,phv->hkv", memory.carried_keys, memory.values)
        along = torch.einsum("phk,hkv,phv->ph", memory.carried_keys, state, memory.values)
        share = along / state.square().sum(dim=(1, 2)).clamp(min=torch.finfo(torch.float64).tiny)
        n_heads = terms.shape[1]
        head, position = torch.cartesian_prod(torch.arange(n_heads), torch.arange(n)).T
        values: dict[str, object] = {"layer": memory.layer, "head": head, "position": position, "distance": n - 1 - position}
        values |= {"token": texts * n_heads, "survival": memory.survival.T, "term_norm": terms.T, "state_share": share.T}
        frames.append(MEMORY.frame(values))
    return pd.concat(frames, ignore_index=True)


@analysis(
    ERASURE,
    "how much of an earlier prompt (field earlier) a prompt erases from the states of recurrent layers",
    cost="both prompts once",
    inputs={"earlier": tokens_field("earlier", prepend_bos=True), "prompt": tokens_field("prompt", prepend_bos=False)},
)
@on_its_front_ends
@checked
@torch.no_grad()
def state_erasure(
    model: KVModel,
    prompt: str | Int[Tensor, "*one_prompt pos"],
    earlier: str | Int[Tensor, "*one_earlier earlier_pos"],
) -> pd.DataFrame:
    """Measure how much of an earlier prompt a second one erases from the states.

    Args:
        model: as in :func:`state_memory`.
        prompt: a string or tokens, read after the earlier one.
        earlier: the prompt before it, likewise.

    Returns:
        One row per layer and head, in that order; all NaN except ``earlier_norm`` if the earlier state is 0:

        {columns}

    Raises:
        KVLensError: as :func:`state_memory`.
    """
    before = convert_prompt(model, prompt_sequence(model, "earlier", earlier))
    with model.kv_bias(before):
        memories = read_memory(model, prompt_sequence(model, "prompt", prompt))
    frames = []
    states = [layer.state.b_kv[0].to(torch.float64) for layer in before.layers if layer.state is not None]
    for memory, old in zip(memories, states, strict=True):
        parts = {
            "left": memory.state_map @ old,
            "left_by_decay": memory.log_decay.exp()[..., None] * old,
            "written": torch.einsum("phk,phv->hkv", memory.carried_keys, memory.values),
        }
        norm = old.norm(dim=(1, 2))
        relative = {name: state.norm(dim=(1, 2)) / norm for name, state in parts.items()}
        frames.append(ERASURE.frame({"layer": memory.layer, "head": range(len(norm)), "earlier_norm": norm, **relative}))
    return pd.concat(frames, ignore_index=True)


@analysis(
    HALF_LIVES,
    "how many tokens it takes the decays of recurrent layers to halve what a state holds, by channel",
    cost="the prompt once",
)
@on_its_front_ends
@checked
@torch.no_grad()
def state_half_lives(model: KVModel, prompt: str | Int[Tensor, "*one_prompt pos"]) -> pd.DataFrame:
    """Measure how fast the states of the recurrent layers decay, by key channel: the half-life at the mean decay over a prompt.

    The decays alone count, not what tokens remove (delta rule). In RWKV-5 and lightning attention they are the same for all
    tokens, elsewhere they depend on the prompt.

    Args:
        model: as in :func:`state_memory`.
        prompt: as there.

    Returns:
        One row per layer, head and channel, in that order:

        {columns}

    Raises:
        KVLensError: as :func:`state_memory`.
    """
    tokens = prompt_sequence(model, "prompt", prompt)
    frames = []
    for memory in read_memory(model, tokens):
        n_heads, n_channels = memory.log_decay.shape
        head, channel = torch.cartesian_prod(torch.arange(n_heads), torch.arange(n_channels)).T
        half_life = math.log(2) * len(tokens) / -memory.log_decay
        channel = channel if n_channels > 1 else channel - 1
        values: dict[str, object] = {"layer": memory.layer, "head": head, "channel": channel, "half_life": half_life.flatten()}
        frames.append(HALF_LIVES.frame(values))
    return pd.concat(frames, ignore_index=True)

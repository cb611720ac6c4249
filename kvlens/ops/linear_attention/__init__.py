"""Linear attention whose initial state is the KV bias (ICLCA eq. 12-13, 19; ``types`` says what its forms share)."""

from kvlens.checks import doors
from kvlens.ops.linear_attention.carry import carry_state
from kvlens.ops.linear_attention.chunked import chunked_linear_attention
from kvlens.ops.linear_attention.naive import naive_carry_state, naive_linear_attention
from kvlens.ops.linear_attention.parallel import (
    causal_scores,
    final_state,
    parallel_linear_attention,
    running_normalizer,
)
from kvlens.ops.linear_attention.recurrent import recurrent_linear_attention
from kvlens.ops.linear_attention.state import (
    ffn_with_state,
    read_state,
    real_steps,
    rebase_state,
    retnet_decay,
    without_padding,
)
from kvlens.ops.linear_attention.types import LinearAttentionOutput, LinearAttentionState
from kvlens.ops.linear_attention.unmasked import unmasked_linear_attention

__all__ = [
    "LinearAttentionOutput",
    "LinearAttentionState",
    "carry_state",
    "causal_scores",
    "chunked_linear_attention",
    "ffn_with_state",
    "final_state",
    "naive_carry_state",
    "naive_linear_attention",
    "parallel_linear_attention",
    "read_state",
    "real_steps",
    "rebase_state",
    "recurrent_linear_attention",
    "retnet_decay",
    "running_normalizer",
    "unmasked_linear_attention",
    "without_padding",
]

doors(__name__)

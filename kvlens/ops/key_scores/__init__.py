"""How much attention a prompt's keys get or will get: what methods that keep some of the keys choose them by."""

from kvlens.ops.key_scores.attention import attention_received
from kvlens.ops.key_scores.expected import expected_log_attention

__all__ = ["attention_received", "expected_log_attention"]

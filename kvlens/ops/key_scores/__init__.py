"""How much attention a prompt's keys receive, or are expected to receive: the scores by which some methods select keys."""

from kvlens.checks import doors
from kvlens.ops.key_scores.attention import attention_received
from kvlens.ops.key_scores.expected import expected_log_attention

__all__ = ["attention_received", "expected_log_attention"]

doors(__name__)

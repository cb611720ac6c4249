"""The gated delta rule and Kimi delta attention, with everything that a KV bias needs (``types`` says what the forms share)."""

from kvlens.checks import doors
from kvlens.ops.delta_rule.chunked import (
    carried_delta_rule,
    carried_keys,
    carried_queries,
    chunked_delta_rule,
    effective_attention,
    state_map,
)
from kvlens.ops.delta_rule.naive import naive_carried, naive_carried_delta_rule, naive_delta_rule, naive_token_maps
from kvlens.ops.delta_rule.recurrent import recurrent_carried_delta_rule, recurrent_delta_rule
from kvlens.ops.delta_rule.types import CarriedOutput, DeltaRuleOutput

__all__ = [
    "CarriedOutput",
    "DeltaRuleOutput",
    "carried_delta_rule",
    "carried_keys",
    "carried_queries",
    "chunked_delta_rule",
    "effective_attention",
    "naive_carried",
    "naive_carried_delta_rule",
    "naive_delta_rule",
    "naive_token_maps",
    "recurrent_carried_delta_rule",
    "recurrent_delta_rule",
    "state_map",
]

doors(__name__)

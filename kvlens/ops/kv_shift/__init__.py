"""KV shift: each key and value mixed with its predecessors, one coefficient vector per head (KVSA eq. 4-6)."""

from kvlens.checks import doors
from kvlens.ops.kv_shift.coefficients import coefficients_from_parameter, initial_shift_parameter
from kvlens.ops.kv_shift.naive import naive_kv_shift
from kvlens.ops.kv_shift.pattern import effective_pattern
from kvlens.ops.kv_shift.shift import kv_shift

__all__ = ["coefficients_from_parameter", "effective_pattern", "initial_shift_parameter", "kv_shift", "naive_kv_shift"]

doors(__name__)

"""From a prompt to weights: exact for linear attention (ICLCA), exact or compressed for softmax."""

from kvlens.conversion.carry import carry_bias
from kvlens.conversion.convert import convert_prompt

__all__ = ["carry_bias", "convert_prompt"]

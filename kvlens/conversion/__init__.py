"""From a prompt to weights: exact for linear attention (ICLCA, DESIGN of the error: none but rounding)."""

from kvlens.conversion.convert import convert_prompt

__all__ = ["convert_prompt"]

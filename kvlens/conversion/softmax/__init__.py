"""Conversion of a softmax model's prompt: exact with all its keys, or approximate with a known error (ICLCA sec. 5, ICLAA)."""

from kvlens.conversion.softmax.convert import convert_softmax_prompt
from kvlens.conversion.softmax.settings import METHODS, Method, Reference, SoftmaxChoices, SoftmaxOptions

__all__ = ["METHODS", "Method", "Reference", "SoftmaxChoices", "SoftmaxOptions", "convert_softmax_prompt"]

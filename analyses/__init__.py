"""Analyses of kvlens models: each a function that returns a tidy DataFrame, built on kvlens' public names only."""

from analyses.bias_ablation import bias_ablation
from analyses.bias_by_head import bias_by_head, bias_by_layer
from analyses.conversion_error import conversion_error
from analyses.prompt_effect import prompt_effect

__all__ = ["bias_ablation", "bias_by_head", "bias_by_layer", "conversion_error", "prompt_effect"]

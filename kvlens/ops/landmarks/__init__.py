"""A prompt's keys reduced to a few: which to keep, how many per head, and with which weights and values."""

from kvlens.ops.landmarks.budgets import greedy_budgets
from kvlens.ops.landmarks.choice import CRITERIA, Chosen, Criterion, choose_keys
from kvlens.ops.landmarks.shares import PromptKeys, Queries, Shares, Statistics, shares, statistics
from kvlens.ops.landmarks.weights import Errors, fit_values, fit_weights, output_errors

__all__ = [
    "CRITERIA",
    "Chosen",
    "Criterion",
    "Errors",
    "PromptKeys",
    "Queries",
    "Shares",
    "Statistics",
    "choose_keys",
    "fit_values",
    "fit_weights",
    "greedy_budgets",
    "output_errors",
    "shares",
    "statistics",
]

"""Reducing a prompt's keys to a few: which to keep, how many per head, and with which weights and values.

Source: based on Attention Matching (Zweiger, Fu, Guo, Kim 2026, arXiv 2602.16284), which selects keys by their attention or by
matching pursuit, then fits weights to the normalizer and values to the output. Here keys are selected by the output error, the
fit of the values corrects for the error that the weights leave in the normalizer, and keys are allotted to the heads where
they reduce the error most. Weights are never negative, as in Attention Matching.
"""

from kvlens.checks import doors
from kvlens.ops.landmarks.budgets import greedy_budgets
from kvlens.ops.landmarks.choice import CRITERIA, Chosen, Criterion, choose_among, choose_keys
from kvlens.ops.landmarks.gram import Gram, Products, Rows
from kvlens.ops.landmarks.matching import (
    Masses,
    Matched,
    MatchedBy,
    masses,
    match_among,
    match_keys,
    match_mass,
    match_output,
)
from kvlens.ops.landmarks.shares import (
    PromptKeys,
    Queries,
    Shares,
    Statistics,
    blocks_of,
    key_shares,
    shares,
    statistics,
)
from kvlens.ops.landmarks.weights import Errors, fit_values, fit_weights, output_errors

__all__ = [
    "CRITERIA",
    "Chosen",
    "Criterion",
    "Errors",
    "Gram",
    "Masses",
    "Matched",
    "MatchedBy",
    "Products",
    "PromptKeys",
    "Queries",
    "Rows",
    "Shares",
    "Statistics",
    "blocks_of",
    "choose_among",
    "choose_keys",
    "fit_values",
    "fit_weights",
    "greedy_budgets",
    "key_shares",
    "masses",
    "match_among",
    "match_keys",
    "match_mass",
    "match_output",
    "output_errors",
    "shares",
    "statistics",
]

doors(__name__)

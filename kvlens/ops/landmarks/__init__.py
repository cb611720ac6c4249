"""Reducing a prompt's keys to a few: which to keep, how many per head, and with which weights and values.

Source: based on Attention Matching (Zweiger, Fu, Guo, Kim 2026, arXiv 2602.16284), which selects keys by their attention or by
matching pursuit, then fits weights to the normalizer and values to the output. Here keys are selected by the output error, the
fit of the values corrects for the error that the weights leave in the normalizer, and keys are allotted to the heads where
they reduce the error most. Weights are never negative, as in Attention Matching.
"""

from kvlens.checks import doors
from kvlens.ops.landmarks.budgets import budgets_by_gain, lazy_paths, levels, waterline
from kvlens.ops.landmarks.choice import Chosen, choose_among, choose_keys
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
    joined,
    key_shares,
    shares,
    statistics,
)
from kvlens.ops.landmarks.weights import Errors, fit_values, fit_weights, output_errors

__all__ = [
    "Chosen",
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
    "budgets_by_gain",
    "choose_among",
    "choose_keys",
    "fit_values",
    "fit_weights",
    "joined",
    "key_shares",
    "lazy_paths",
    "levels",
    "masses",
    "match_among",
    "match_keys",
    "match_mass",
    "match_output",
    "output_errors",
    "shares",
    "statistics",
    "waterline",
]

doors(__name__)

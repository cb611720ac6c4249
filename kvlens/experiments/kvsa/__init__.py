"""Experiments of KVSA: KV shifting attention on induction, n-grams, hops, arithmetic and text."""

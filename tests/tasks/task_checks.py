"""What several tests of the tasks need: generators, small settings of each task, and a bound for counts."""

import math

import torch

SMALL_TASKS = {
    "induction": dict(vocab_size=29, length=23),
    "bigrams": dict(n_letters=17, n_triggers=3, length=37),
    "ngrams": dict(order=3, vocab_size=7, length=19),
    "hops": dict(k=3, vocab_size=5, length=43),
    "arithmetic": dict(max_ops=3, test_ops=5, modulus=5, n_names=11),
    "regression": dict(dimensions=5, n_points=7),
    "facts": dict(min_facts=2, max_facts=3, length=47),
}
"""Every task that generates its sequences, in seconds-long tests; the text task has tests of its own."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_frequency(hits: torch.Tensor, probability: float):
    """Each column of independent rows is True with this probability: within 5 standard deviations (1 in 1.7 million fails)."""
    hits = hits.double()
    bound = 5 * math.sqrt(probability * (1 - probability) / len(hits))
    error = (hits.mean(dim=0) - probability).abs().max().item()
    assert error <= bound, f"off by {error:.4f} from {probability:.4f}, allowed {bound:.4f}"

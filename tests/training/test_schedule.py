"""The learning rate by progress, known by hand."""

import pytest

from kvlens.training.schedule import Schedule


def test_learning_rates_known_by_hand():
    cosine = Schedule(peak=8.0, warmup_fraction=0.5, final_fraction=0.25)
    assert [cosine.learning_rate(p) for p in (0.0, 0.125, 0.25, 0.5)] == [0.0, 2.0, 4.0, 8.0]
    assert cosine.learning_rate(0.75) == pytest.approx(5.0, rel=1e-15)  # half-way from 8 to 2
    assert cosine.learning_rate(1.0) == cosine.learning_rate(3.0) == 2.0
    constant = Schedule(peak=8.0, kind="constant", warmup_fraction=0.5)
    assert [constant.learning_rate(p) for p in (0.25, 0.5, 1.0)] == [4.0, 8.0, 8.0]
    assert Schedule(peak=1.0, warmup_fraction=0.0, final_fraction=0.0).learning_rate(1.0) == 0.0

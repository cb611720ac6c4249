"""What several files here share."""

import pytest
import torch


@pytest.fixture
def empty_is_nan(monkeypatch):
    """What torch.empty leaves is NaN: a weight that nobody sets would otherwise differ from one run to the next."""
    empty = torch.empty

    def filled(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(torch.nan) if out.is_floating_point() and not out.is_meta else out

    monkeypatch.setattr(torch, "empty", filled)

"""What several files here share."""

import pytest
import torch
from small_models import Shared, model_of


@pytest.fixture
def empty_is_nan(monkeypatch):
    """What torch.empty leaves is NaN: a weight that nobody sets would otherwise differ from one run to the next."""
    empty = torch.empty

    def filled(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(torch.nan) if out.is_floating_point() and not out.is_meta else out

    monkeypatch.setattr(torch, "empty", filled)


@pytest.fixture(scope="module")
def shared():
    """``shared(kind, row)``: a model of a row, built once for all tests of a file, which leave it as it is."""
    models = Shared(model_of)
    yield models
    models.assert_untouched()

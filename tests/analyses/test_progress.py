"""Analyses that take long on a real model tell how far they are on a bar, where there is a terminal and no callback."""

import io
import sys

import pytest
import torch
from kvlens.analyses.attribution.by_edge import attribution_by_edge
from kvlens.analyses.attribution.by_part import attribution_by_head, attribution_by_position
from kvlens.analyses.attribution.prompt import prompt_attribution
from kvlens.analyses.bias import decomposition, effects, patching
from kvlens.analyses.heads.induction import induction_heads
from kvlens.analyses.segments import bar_unless

import kvlens
from kvlens.analyses import segments

PROMPT, TEXT = torch.arange(3, 14), torch.tensor([5, 2, 7])
UNITS = dict(by=[(0, 5), (5, 11)])
LONG = {
    "attribution_by_edge": lambda model, **tell: attribution_by_edge(model, PROMPT, TEXT, **UNITS, **tell),
    "attribution_by_head": lambda model, **tell: attribution_by_head(model, PROMPT, TEXT, **UNITS, **tell),
    "attribution_by_position": lambda model, **tell: attribution_by_position(model, PROMPT, TEXT, **UNITS, **tell),
    "prompt_attribution": lambda model, **tell: prompt_attribution(model, PROMPT, TEXT, **UNITS, **tell),
    "bias_by_head": lambda model, **tell: decomposition.bias_by_head(model, PROMPT, TEXT, batch_size=4, **tell),
    "bias_by_layer": lambda model, **tell: decomposition.bias_by_layer(model, PROMPT, TEXT, batch_size=2, **tell),
    "bias_effects": lambda model, **tell: effects.bias_effects(model, PROMPT, TEXT, batch_size=4, **tell),
    "bias_ablation": lambda model, **tell: effects.bias_ablation(
        model, PROMPT, TEXT, [[(0, 0)], [(1, 0)]], batch_size=1, **tell
    ),
    "activation_patching": lambda model, **tell: patching.activation_patching(
        model, PROMPT, PROMPT.flip(0), TEXT, batch_size=4, **tell
    ),
    "induction_heads": lambda model, **tell: induction_heads(model, ablations=True, n_sequences=2, batch_size=4, **tell),
}


@pytest.fixture(scope="module")
def model():
    return kvlens.HookedKVTransformer.from_zoo("facts-gpt2")


@pytest.mark.parametrize("name", LONG)
def test_it_tells_how_far_it_is(model, name):
    told: list[float] = []
    LONG[name](model, on_progress=told.append)
    assert len(told) > 1 and told == sorted(told) and 0.9 < told[-1] <= 1.0 and told[0] < 0.9


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stderr", "worker", "shown"), [(Terminal(), None, True), (io.StringIO(), None, False), (Terminal(), object(), False)]
)
def test_a_bar_shows_on_a_terminal_and_goes(monkeypatch, stderr, worker, shown):
    monkeypatch.setattr(segments, "BAR_AFTER", 0)
    monkeypatch.setattr(segments.multiprocessing, "parent_process", lambda: worker)
    monkeypatch.setattr(sys, "stderr", stderr)
    with bar_unless(None, "looking") as tell:
        tell(0.5)
    assert ("looking" in stderr.getvalue()) == shown
    assert stderr.getvalue().split("\r")[-1].strip() == ""


def test_a_bar_shows_in_a_notebook_that_has_no_terminal(monkeypatch):
    seen = {}

    class tqdm_notebook(segments.tqdm):
        def __init__(self, **options):
            seen.update(options)
            super().__init__(**options | {"disable": True})

    monkeypatch.setattr(segments, "tqdm", tqdm_notebook)
    with bar_unless(None, "looking") as tell:
        tell(0.5)
    assert seen["disable"] is False


def test_a_callback_is_called_instead_of_showing_a_bar():
    told = []
    with bar_unless(told.append, "looking") as tell:
        tell(0.25)
    assert told == [0.25]

"""What the tests of batches share: a model in a folder, files of prompts, and the prompts that an analysis was asked."""

import json
from dataclasses import replace

import pytest
from batch_probes import letters
from kvlens.analyses.batch.runner import Input
from tiny_text_model import tiny_text_model

WORDS = ["The widget", "is purple. Return the gadget.", "Frobnicate", "both", "and the color of the widget"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_text_model().save(folder)
    return str(folder)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "other"
    tiny_text_model(n_layers=1, seed=2).save(folder)
    return str(folder)


@pytest.fixture
def prompts(tmp_path):
    """``prompts(*records)`` or ``prompts(n=3)``: a file with these lines, or with so many prompts and texts."""

    def write(*records, n=0) -> Input:
        records = records or [{"prompt": f"{WORDS[i % 5]} {i}", "id": f"p{i}", "text": " is green"} for i in range(n)]
        path = tmp_path / "p.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" if isinstance(r, dict) else f"{r}\n" for r in records))
        return Input(path)

    return write


@pytest.fixture
def asked(monkeypatch):
    """The prompts that ``letters`` is asked from here on; ``asked.mended`` takes their errors away."""

    class Asked(list):
        mended = False

    found = Asked()

    def counted(model, prompt, raises, breaks, kills_once, *, upper=False, times=1):
        found.append(prompt)
        errors = (None, None) if found.mended else (raises, breaks)
        return letters.letters_of(model, prompt, *errors, kills_once, upper=upper, times=times)

    monkeypatch.setattr(letters, "LETTERS", replace(letters.LETTERS, function=counted))
    return found

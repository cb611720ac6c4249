"""Tokens that are kept: equal to those made anew, made once, and made again when anything that decides them changes."""

import pytest
import torch

from kvlens.corpus import kept
from kvlens.tasks import TextTask, text


@pytest.fixture
def kept_here(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "cached_assets_path", lambda *args, **kwargs: tmp_path)
    return tmp_path


@pytest.fixture
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("one two three four, one two five. " * 40)
    return path


def made(monkeypatch):
    """One entry for each time that tokens are made."""
    calls, whole = [], text.tokenized
    monkeypatch.setattr(text, "tokenized", lambda *args: calls.append(args) or whole(*args))
    return calls


def test_kept_tokens_and_tokenizer_are_those_made_anew(kept_here, file, monkeypatch):
    calls = made(monkeypatch)
    first, again = TextTask(str(file), vocab_size=270, length=8), TextTask(str(file), vocab_size=270, length=9)
    assert first.data_hash() == again.data_hash() and len(calls) == 1
    for split, windows in first.windows.items():
        of_kept = again.windows[split]
        assert torch.equal(windows.tokens, of_kept.tokens) and of_kept.tokens.dtype == torch.int64
        assert vars(windows).keys() == vars(of_kept).keys() and windows.chars_per_token == of_kept.chars_per_token
    ours, theirs = first.built_tokenizer, again.built_tokenizer
    assert ours.encode("one é <|bos|>") == theirs.encode("one é <|bos|>") and len(ours) == len(theirs)
    assert ours.init_kwargs["add_bos_token"] and theirs.init_kwargs["name_or_path"] == ours.init_kwargs["name_or_path"]


def test_another_text_or_vocabulary_is_another_file(kept_here, file, monkeypatch):
    calls = made(monkeypatch)
    for size in (270, 271):
        assert TextTask(str(file), vocab_size=size).windows
    file.write_text(file.read_text() + "six")
    assert TextTask(str(file), vocab_size=270).windows
    assert len(calls) == len(list(kept_here.glob("*.safetensors"))) == 3


def test_a_damaged_file_is_reported_and_its_tokens_are_made_again(kept_here, file, monkeypatch, logged):
    whole = TextTask(str(file), vocab_size=270).data_hash()
    (path,) = kept_here.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    assert TextTask(str(file), vocab_size=270).data_hash() == whole
    assert "match its checksum" in logged[0]


def test_tokens_that_cannot_be_kept_are_made(file, monkeypatch, tmp_path):
    monkeypatch.setattr(kept, "cached_assets_path", lambda *args, **kwargs: tmp_path / "nowhere")
    assert TextTask(str(file), vocab_size=270).windows
    assert not (tmp_path / "nowhere").exists()

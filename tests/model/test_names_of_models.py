"""A model by its name: what ships is not looked for at Hugging Face, nor the other way round; the command line takes both."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from tiny_hf import tiny_hf_model, tiny_tokenizer

from kvlens import HookedKVTransformer, KVLensError, KVTransformerBridge, load, loading, zoo
from kvlens.cli import main


def cached(tmp_path, name="gpt2", family="gpt2"):
    """A tiny model as Hugging Face's cache would hold ``name``."""
    place = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = place / "snapshots" / ("0" * 40)
    tiny_hf_model(family).save_pretrained(snapshot)
    tiny_tokenizer().save_pretrained(snapshot)
    (place / "refs").mkdir()
    (place / "refs/main").write_text("0" * 40)


def test_a_name_is_looked_for_on_this_machine_and_on_the_hub_only_when_asked(tmp_path, monkeypatch):
    tried = []

    def connect(self, address, *args, **kwargs):
        tried.append(address)
        raise OSError("there is no network in tests")

    cached(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # as on a user's machine
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: connect(None, args[0]))
    assert HookedKVTransformer.from_pretrained("gpt2", device="cpu").cfg.model_name == "gpt2"
    with pytest.raises(KVLensError, match="pythia-70m are not all in Hugging Face's cache .* local_files_only=False fetches"):
        HookedKVTransformer.from_pretrained("pythia-70m", device="cpu")
    assert tried == [] and constants.HF_HUB_OFFLINE is False
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the hub's retries
    with pytest.raises(KVLensError, match="pythia-70m' cannot be downloaded from Hugging Face"):
        HookedKVTransformer.from_pretrained("pythia-70m", device="cpu", local_files_only=False)
    assert tried


def test_both_front_ends_take_a_name_as_the_folder_of_its_files_and_check_that_first(tmp_path, monkeypatch, no_network):
    for module in (constants, loading, zoo):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cached(tmp_path)
    text = torch.arange(9)[None]
    loaded = [load("gpt2", device="cpu"), KVTransformerBridge.boot_transformers("gpt2-small", device="cpu")]
    assert [model.cfg.model_name for model in loaded] == ["gpt2", "gpt2"]
    one, other = (model(text).log_softmax(-1) for model in loaded)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)  # float32, processed and not
    (folder,) = tmp_path.glob("hub/models--gpt2/snapshots/*")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../../../secret"}}')
    for door in (HookedKVTransformer.from_pretrained, KVTransformerBridge.boot_transformers, load):
        with pytest.raises(KVLensError, match="secret"):
            door("gpt2")


def test_the_command_line_takes_a_name_whose_files_are_here(tmp_path, monkeypatch, capsys):
    cached(tmp_path)
    (tmp_path / "p.txt").write_text("The widget\n")

    def run(model: str, cache: str) -> int:
        for module in (constants, loading, zoo):
            monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path / cache))
        return main(["analyse", "bias_by_head", "p.txt", "--model", model, "--text", " is", "--out", f"{model}.parquet"])

    monkeypatch.chdir(tmp_path)
    assert run("gpt2-small", "hub") == 0
    assert "of 1 prompts" in capsys.readouterr().out
    for model, cache, words in (
        ("pythia-70m", "hub", "TransformerLens knows 'pythia-70m', but its files are not in the local cache"),
        ("pythia-70n", "hub", "did you mean 'pythia-70m'"),
        ("gpt2", "empty", "taken where its files are in the local cache"),
    ):
        assert run(model, cache) == 2
        refused = capsys.readouterr().err
        assert refused.count("\n") == 1 and words in refused, refused


def test_load_takes_names_paths_and_what_the_cache_holds(tmp_path, monkeypatch):
    for module in (constants, loading, zoo):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cached(tmp_path)
    cached(tmp_path, "someone/small", "qwen2")  # a name that TransformerLens does not know
    assert load("gpt2-small", device="cpu", dtype="float64").W_E.dtype == torch.float64
    assert isinstance(load("someone/small", device="cpu"), HookedKVTransformer)
    assert load("bigram-linear").cfg.attention == "linear"
    assert isinstance(load(zoo.folder_of("facts-hybrid"), device="cpu"), KVTransformerBridge)
    for source, words in (
        ("docs-liner", "load: 'docs-liner' is neither a shipped model .*did you mean 'docs-linear'"),
        (tmp_path / "bigram-linear", "load: .*bigram-linear holds no config.json"),
    ):
        with pytest.raises(KVLensError, match=words):
            load(source)
    with pytest.raises(KVLensError, match="load: a tokenizer file is for a llama2.c checkpoint"):
        load("docs-linear", tokenizer="tok512.bin")


def test_a_name_is_downloaded_when_asked_and_then_here(tmp_path, monkeypatch, capsys):
    """The hub is a stand-in that puts a tiny model where the hub's client would."""
    asked = []

    def hub(name: str, **patterns) -> str:
        asked.append((name, patterns))
        if name != "someone/small":
            raise OSError("404: there is no such model\nmore lines")
        if len(asked) == 1:
            cached(tmp_path, name, "qwen2")
        return str(Path(tmp_path, "hub", "models--someone--small", "snapshots", "0" * 40))

    for module in (constants, loading, zoo):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(zoo, "snapshot_download", hub)
    with pytest.raises(KVLensError, match="--download, or download=True, fetches them"):
        load("someone/small", device="cpu")
    assert not asked
    assert isinstance(load("someone/small", device="cpu", download=True), HookedKVTransformer)
    assert [name for name, _ in asked] == ["someone/small"]  # its weights are safetensors, so that no others were asked for
    assert "*.safetensors" in asked[0][1]["allow_patterns"]
    with pytest.raises(
        KVLensError, match=r"'someone/els' cannot be downloaded from Hugging Face \(404: there is no such model\)"
    ):
        load("someone/els", download=True)
    load("docs-linear", download=True)  # ships
    assert len(asked) == 2
    monkeypatch.chdir(tmp_path)
    command = [
        "explain",
        "--model",
        "someone/small",
        "--download",
        "--prompt",
        "The widget.",
        "--text",
        " is",
        "--depth",
        "units",
    ]
    assert main(command) == 0 and len(asked) == 4
    assert "The model answers" in capsys.readouterr().out

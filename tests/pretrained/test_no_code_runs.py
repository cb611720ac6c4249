"""Nothing read from disk or hub runs, and nothing prompts: folders that need their own code are refused by name."""

import json
from pathlib import Path

import pytest
import torch
from small_models import linear_model
from tiny_hf import tiny_hf_model, tiny_tokenizer
from tiny_text_model import tiny_text_model
from transformers import GPT2Config, GPT2LMHeadModel, dynamic_module_utils

from kvlens import HookedKVTransformer, KVLensError
from kvlens.cli import main
from kvlens.files import checksum, checksum_of_json
from kvlens.tasks import make_task

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.fixture(autouse=True)
def evil(tmp_path, monkeypatch):
    """A file of code that records whether it ran, and a user who would answer yes to everything and records the question."""
    ran = tmp_path / "it-ran"
    code = f"open({str(ran)!r}, 'w').write('ran')\nclass Evil:\n    from_pretrained = classmethod(lambda *a, **k: None)\n"
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    yield code
    assert not ran.exists(), "code from the folder ran"
    assert asked == [], "somebody was asked"


def with_code_in(folder: Path, file: str, code: str, **fields) -> Path:
    stored = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps({**stored, **fields}))
    (folder / "evil.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    if "checksum" in config:  # the change is not damage
        config["files"] = {file: checksum((folder / file).read_bytes())}
        config["checksum"] = checksum_of_json(config)
        (folder / "config.json").write_text(json.dumps(config))
    return folder


TOKENIZER_CODE = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
MODEL_CODE = {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}


def hugging_face_folder(folder: Path) -> Path:
    tiny_hf_model("gpt2").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def kvlens_folder(folder: Path) -> Path:
    tiny_text_model().save(folder)
    return folder


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (kvlens_folder, HookedKVTransformer.load),
        (hugging_face_folder, HookedKVTransformer.from_pretrained),
        (kvlens_folder, lambda folder: make_task("text", corpus="topics", tokenizer=str(folder)).built_tokenizer),
    ],
    ids=["load", "from_pretrained", "task"],
)
def test_a_tokenizer_that_is_code_is_refused_by_its_folder(make, read, tmp_path, evil):
    folder = with_code_in(make(tmp_path / "model"), "tokenizer_config.json", evil, **TOKENIZER_CODE)
    (folder / "tokenizer.json").unlink()  # with it, transformers' own code can read the tokenizer
    with pytest.raises(KVLensError, match=f"{folder} is code of its own, which kvlens does not run"):
        read(folder)


def test_a_model_that_is_code_is_refused_by_its_folder(tmp_path, evil):
    folder = with_code_in(hugging_face_folder(tmp_path / "model"), "config.json", evil, model_type="evil", **MODEL_CODE)
    with pytest.raises(KVLensError, match=f"cannot read {folder}"):
        HookedKVTransformer.from_pretrained(folder)


def test_code_next_to_a_known_architecture_is_not_read(tmp_path, evil):
    folder = hugging_face_folder(tmp_path / "model")
    expected = HookedKVTransformer.from_pretrained(folder)
    with_code_in(
        folder, "config.json", evil, **MODEL_CODE, attn_implementation="evil/kernels", _attn_implementation="evil/kernels"
    )
    model = HookedKVTransformer.from_pretrained(folder)
    assert torch.equal(model.W_E, expected.W_E)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(trust_remote_code=True), "trust_remote_code=True is refused"),
        (dict(weights_only=False), "weights_only=False is refused"),
        (dict(attn_implementation="evil/kernels"), "'evil/kernels' is code from the hub"),
    ],
)
@pytest.mark.parametrize("source", ["folder", "hub", "memory"])
def test_asking_for_it_is_refused(source, wrong, message, tmp_path):
    hf_model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=4, n_head=2, vocab_size=7)) if source == "memory" else None
    name = hugging_face_folder(tmp_path / "model") if source == "folder" else "gpt2"
    for load in (HookedKVTransformer.from_pretrained, HookedKVTransformer.from_pretrained_no_processing):
        with pytest.raises(KVLensError, match=message):
            load(name, hf_model=hf_model, **wrong)


def test_a_saved_configuration_that_trusts_code_is_refused(tmp_path):
    folder = tmp_path / "model"
    linear_model().save(folder)
    stored = json.loads((folder / "config.json").read_text())
    stored["config"]["trust_remote_code"] = True
    (folder / "config.json").write_text(json.dumps(stored))
    with pytest.raises(KVLensError):
        HookedKVTransformer.load(folder)


def test_the_command_line_neither_asks_nor_runs(tmp_path, evil, monkeypatch, capsys):
    folder = with_code_in(kvlens_folder(tmp_path / "model"), "tokenizer_config.json", evil, **TOKENIZER_CODE)
    monkeypatch.chdir(tmp_path)
    status = main(["report", "--model", str(folder), "--prompt", "a", "--text", "b", "--out", "report"])
    assert status != 0
    assert "code of its own" in " ".join(capsys.readouterr().err.split())
    assert not Path("report").exists()

"""Models by name, checkpoints of training, the first models' own format."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from plain_reference import SIZES, set_weights, tokens
from tiny_hf import tiny_hf_model, tiny_tokenizer

from kvlens import HookedKVTransformer, KVLensError, KVTransformerBridge, load, loading, zoo
from kvlens.base import HookedTransformer, HookedTransformerConfig
from kvlens.cli import main
from kvlens.pretrained.names import OTHER_CODE, OWN_FORMAT, official_names, step_of
from kvlens.pretrained.translation import FAMILIES


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder that stands for Hugging Face's cache; ``hub(name)`` is a model's folder in it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def folder(name, revision="main"):
        top = tmp_path / f"models--{name.replace('/', '--')}"
        commit = str(len(list((top).glob("snapshots/*")))) * 40
        (top / "refs").mkdir(parents=True, exist_ok=True)
        (top / "refs" / revision).write_text(commit)
        made = top / "snapshots" / commit
        made.mkdir(parents=True)
        return made

    return folder


def test_a_name_is_loaded_with_its_tokenizer_and_at_a_step_of_training(hub):
    for revision, seed in (("main", 0), ("step512", 1)):
        tiny_hf_model("gpt_neox", seed=seed).save_pretrained(folder := hub("EleutherAI/pythia-70m", revision))
        tiny_tokenizer().save_pretrained(folder)
    last = HookedKVTransformer.from_pretrained("pythia-70m", device="cpu")
    early = HookedKVTransformer.from_pretrained("pythia-70m", device="cpu", checkpoint_value=512)
    assert last.tokenizer.decode(last.to_tokens("the cat")[0]) == "the cat"
    assert (last.cfg.model_name, early.cfg.checkpoint_value, last.cfg.from_checkpoint) == ("pythia-70m", 512, False)
    assert not torch.equal(last.W_E, early.W_E)
    by_number = HookedKVTransformer.from_pretrained_no_processing("pythia-70m", device="cpu", checkpoint_index=10)
    assert by_number.cfg.checkpoint_value == 512
    assert by_number.cfg.normalization_type == "LN"
    own = tiny_hf_model("gpt_neox", seed=1)
    text = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(by_number(text), own(text).logits, rtol=0, atol=1e-5)  # sums of 40 terms of size 1


def test_steps_are_those_that_are_public():
    assert step_of("EleutherAI/pythia-70m", 3, None) == 4
    assert step_of("EleutherAI/pythia-70m-v0", 0, None) == 1000
    assert step_of("stanford-crfm/alias-gpt2-small-x21", -1, None) == 400000
    for name, step in (("EleutherAI/pythia-70m", 3), ("gpt2", 1), ("EleutherAI/pythia-70m-v0", 512)):
        with pytest.raises(KVLensError, match="has no checkpoint|no checkpoints"):
            step_of(name, None, step)


@pytest.mark.parametrize(("form", "n_layers"), [("neel", 2), ("neel-solu-old", 2), ("neel-solu-old", 7), ("mingpt", 2)])
def test_models_in_their_authors_own_format(hub, monkeypatch, form, n_layers):
    """Written in each form by the inverse of what the form's description says, and read back."""
    model = HookedTransformer(HookedTransformerConfig(**{**SIZES, "n_layers": n_layers, "act_fn": "gelu"}))
    set_weights(model)
    model.unembed.b_U.data.zero_()  # minGPT has none
    weights = {name: w.clone() for name, w in model.state_dict().items() if not name.endswith(("mask", "IGNORE"))}
    name = "Baidicoot/Othello-GPT-Transformer-Lens" if form == "mingpt" else "NeelNanda/SoLU_2L_v10_old"
    folder = hub(name)
    kept = ("n_layers", "d_model", "d_head", "n_heads", "n_ctx", "d_vocab", "d_mlp", "act_fn", "attn_only", "final_rms")
    config = {key: getattr(model.cfg, key) for key in kept} | {"architecture": form, "normalization": "LN"}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(
        {"neel": lambda w, n: w, "neel-solu-old": as_first_solu, "mingpt": as_mingpt}[form](weights, n_layers),
        folder / "final.pth",
    )
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda name: ["config.json", "final.pth"])
    read = HookedKVTransformer.from_pretrained_no_processing(name, device="cpu")
    with pytest.raises(KVLensError, match="transformers does not read"):
        HookedKVTransformer.from_pretrained(name, verify=True)
    with torch.no_grad():
        assert torch.equal(read(tokens(2, 7)), HookedKVTransformer.from_hooked_transformer(model)(tokens(2, 7)))


def as_first_solu(weights, n_layers):
    renamed = {name.replace("ln_final.", "ln.").replace("ln", "norm"): w for name, w in weights.items()}
    return {
        name: w.transpose(-2, -1).contiguous() if "W_" in name and n_layers <= (8 if "W_pos" in name else 6) else w
        for name, w in renamed.items()
    }


def as_mingpt(weights, n_layers):
    made = {
        "tok_emb.weight": weights["embed.W_E"],
        "pos_emb": weights["pos_embed.W_pos"][None],
        "head.weight": weights["unembed.W_U"].T,
    }
    made |= {"ln_f.weight": weights["ln_final.w"], "ln_f.bias": weights["ln_final.b"]}
    for layer in range(n_layers):
        of = {name.removeprefix(f"blocks.{layer}."): w for name, w in weights.items() if name.startswith(f"blocks.{layer}.")}
        new = {f"{norm}.{kind}": of[f"{norm}.{kind[0]}"] for norm in ("ln1", "ln2") for kind in ("weight", "bias")}
        for letter, name in (("Q", "query"), ("K", "key"), ("V", "value")):
            new[f"attn.{name}.weight"] = of[f"attn.W_{letter}"].transpose(1, 2).flatten(0, 1)
            new[f"attn.{name}.bias"] = of[f"attn.b_{letter}"].flatten()
        new |= {"attn.proj.weight": of["attn.W_O"].flatten(0, 1).T, "attn.proj.bias": of["attn.b_O"]}
        new |= {"mlp.0.weight": of["mlp.W_in"].T, "mlp.0.bias": of["mlp.b_in"]}
        new |= {"mlp.2.weight": of["mlp.W_out"].T, "mlp.2.bias": of["mlp.b_out"]}
        made |= {f"blocks.{layer}.{name}": w.contiguous() for name, w in new.items()}
    return made


def test_missing_weights_are_an_error_and_missing_biases_are_zero():
    model = HookedTransformer(HookedTransformerConfig(**SIZES))
    weights = {name: w for name, w in model.state_dict().items() if "b_" not in name}
    before = model(tokens(2, 7))
    model.load_and_process_state_dict(dict(weights), fold_ln=False, center_writing_weights=False, center_unembed=False)
    assert torch.equal(model(tokens(2, 7)), before)
    for name in ("embed.W_E", "blocks.1.attn.W_K", "blocks.0.mlp.W_out", "blocks.1.ln2.w", "unembed.W_U", "pos_embed.W_pos"):
        with pytest.raises(KVLensError, match=f"lack 1 that this model needs: .*{name}"):
            model.load_and_process_state_dict({n: w for n, w in weights.items() if n != name})


def test_every_official_name_is_of_a_known_kind_or_refused():
    """Names stand for families by their beginnings: none is left to a guess."""
    other = ("bert", "t5", "hubert", "wav2vec2")  # other classes of TransformerLens: encoders, speech
    kinds = {
        "GPT2": ("gpt2", "stanford-crfm/", "mGPT", "distilgpt2"),
        "GPTNeoX": ("stablelm", "pythia", "neox", "redpajama"),
        "GPTNeo": ("gpt-neo-", "TinyStories"),
        "GPTJ": ("gpt-j",),
        "OPT": ("opt-",),
        "Bloom": ("bloom",),
        "Llama": ("llama", "Yi-"),
        "Mistral": ("Mistral",),
        "Mixtral": ("Mixtral",),
        "Qwen2": ("Qwen1.5", "Qwen2", "QwQ"),
        "Qwen3": ("Qwen3",),
        "Phi": ("phi-",),
        "Gemma": ("gemma",),
        "Olmo": ("OLMo",),
        "Apertus": ("apertus",),
        "GptOss": ("gpt-oss",),
    }
    unknown = [
        name
        for name in set(official_names().values())
        if not any(part.lower() in name.lower() for part in (*sum(kinds.values(), ()), *other))
        and not name.startswith((*OWN_FORMAT, *OTHER_CODE))
    ]
    assert unknown == []
    assert all(any(architecture.startswith(kind) for architecture in FAMILIES) for kind in kinds)


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
    assert "of 1 prompt\n" in capsys.readouterr().out
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

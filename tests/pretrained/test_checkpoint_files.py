"""What is checked, on every door, before Transformers is given a folder, and what is said of weights that cannot be right."""

import json
import multiprocessing
import os
import re
import resource
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import linear_model, small_model
from tiny_hf import ROWS, tiny_hf_folder, tiny_hf_model, tiny_tokenizer
from tiny_text_model import tiny_text_model
from transformers import GPT2Config, GPT2LMHeadModel, dynamic_module_utils

from kvlens import HookedKVTransformer, KVLensError, KVTransformerBridge, load
from kvlens.cli import main
from kvlens.files import checksum, checksum_of_json
from kvlens.pretrained.checkpoint_files import check_checkpoint
from kvlens.pretrained.transformers_model import check_size
from kvlens.tasks import make_task

pytestmark = pytest.mark.usefixtures("no_network")

ON_BOTH, ON_BRIDGE = "llama", "granite"
DOORS = {
    "from_pretrained": (ON_BOTH, HookedKVTransformer.from_pretrained),
    "boot_transformers": (ON_BOTH, KVTransformerBridge.boot_transformers),
    "load": (ON_BRIDGE, load),
}
"""By name: a family, and what loads a folder of it."""
INDEX = "model.safetensors.index.json"
VALUE = "model.layers.1.self_attn.v_proj.weight"


def folder_for(door, path, **options):
    tiny_hf_model(DOORS[door][0]).save_pretrained(path, **options)
    return path


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def names_in_index(folder, name):
    stored = json.loads((folder / INDEX).read_text())
    stored["weight_map"][VALUE] = name
    (folder / INDEX).write_text(json.dumps(stored))


def outside(folder):
    (folder.parent / "outside.safetensors").write_bytes((folder / sorted(folder.glob("*.safetensors"))[0]).read_bytes())
    names_in_index(folder, "../outside.safetensors")


def absolute(folder):
    outside(folder)
    names_in_index(folder, str(folder.parent / "outside.safetensors"))


def device(folder):
    (folder / "deep").mkdir()
    (folder / "deep" / "zeros.safetensors").symlink_to("/dev/zero")
    names_in_index(folder, "deep/zeros.safetensors")


def pipe(folder):
    (folder / "deep").mkdir()
    os.mkfifo(folder / "deep" / "pipe.safetensors")
    names_in_index(folder, "deep/pipe.safetensors")


def pipe_of_a_template(folder):
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates" / "tool.jinja")


def countless_layers(folder):
    change_config(folder, num_hidden_layers=10**8)


def countless_tokens(folder):
    change_config(folder, vocab_size=10**9)


def a_long_name(folder):
    names_in_index(folder, "x" * 300)


def architectures_in_a_list(folder):
    change_config(folder, architectures=[["LlamaForCausalLM"]])


def a_huge_epsilon(folder):
    change_config(folder, rms_norm_eps=1e30)


def an_infinite_base(folder):
    change_config(folder, rope_parameters={"rope_type": "default", "rope_theta": float("inf")})


def an_adapter(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder.parent / "other")}))


HOSTILE = {
    outside: "expected one inside the folder",
    absolute: "expected one inside the folder",
    device: "a device, not a file",
    pipe: "a pipe, not a file",
    pipe_of_a_template: "a pipe, not a file",
    countless_layers: "num_hidden_layers of the configuration is 100000000, and the weights in .* have 3 layers",
    countless_tokens: "the configuration describes .* weights, and .* other shapes",
    an_adapter: "holds an adapter",
    a_long_name: "cannot read .*: File name too long",
    architectures_in_a_list: r"architectures of the configuration is \[\['LlamaForCausalLM'\]\]; expected a list of names",
    a_huge_epsilon: "rms_norm_eps of the configuration is 1e\\+30; expected a number from 0 to 0.1",
    an_infinite_base: "rope_theta of the configuration is inf; expected",
}
WAIT = 300
"""Seconds for a folder that takes a tenth of one: who waits for a pipe waits for ever."""


def answers(cases, sender):
    resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))  # what fills the memory ends here
    for door, folder in cases:
        try:
            DOORS[door][1](folder)
            sender.send("loaded")
        except BaseException as error:
            sender.send(f"{type(error).__name__}: {error}")


def test_hostile_folders_are_refused_on_every_door_before_anything_is_read(tmp_path):
    """In a process of its own: a pipe holds a process in a call that no signal interrupts."""
    cases = []
    for door in DOORS:
        for change in HOSTILE:
            folder = folder_for(door, tmp_path / door / change.__name__ / "m", max_shard_size="20KB")
            change(folder)
            cases.append((door, folder))
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=answers, args=(cases, sender))
    process.start()
    try:
        for (door, _), (change, says) in zip(cases, [*HOSTILE.items()] * len(DOORS), strict=True):
            assert receiver.poll(WAIT), (door, change.__name__, "no answer")
            answer = receiver.recv()
            assert re.match(f"KVLensError: .*{says}", answer, re.DOTALL), (door, change.__name__, answer)
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("family", ROWS)
def test_folders_of_every_family_pass(family, tmp_path):
    model = tiny_hf_model(family)
    model.save_pretrained(tmp_path)
    n_stored = check_checkpoint("x", tmp_path)
    check_size("x: ", str(tmp_path), model.config, n_stored)
    with pytest.raises(KVLensError, match="the configuration describes"):
        check_size("x: ", str(tmp_path), model.config, n_stored // 3)


@pytest.mark.parametrize("door", DOORS)
def test_a_kernel_that_a_configuration_names_is_not_fetched(door, tmp_path):
    folder = folder_for(door, tmp_path)
    change_config(folder, attn_implementation="someone/kernel", _attn_implementation="someone/kernel")
    assert DOORS[door][1](folder).cfg.n_layers == 3


@pytest.mark.parametrize("door", DOORS)
def test_links_inside_a_folder_load(door, tmp_path):
    """The hub's cache is made of them."""
    blobs = folder_for(door, tmp_path / "blobs", max_shard_size="20KB")
    (tmp_path / "snapshot").mkdir()
    for file in blobs.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(Path("..") / "blobs" / file.name)
    tokens = torch.arange(7)[None]
    one, other = (DOORS[door][1](folder)(tokens) for folder in (blobs, tmp_path / "snapshot"))
    assert torch.equal(one, other)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("n", [-1, 0, True, "x"])
def test_a_model_has_at_least_one_position(door, n, tmp_path):
    folder = folder_for(door, tmp_path)
    change_config(folder, max_position_embeddings=n)
    with pytest.raises(KVLensError, match="max_position_embeddings of the configuration is .*at least one position"):
        DOORS[door][1](folder)


def test_a_model_in_memory_and_a_changed_configuration_have_at_least_one_position(tmp_path):
    model = tiny_hf_model(ON_BOTH)
    model.config.max_position_embeddings = 0
    for call in (
        lambda: HookedKVTransformer.from_pretrained("x", hf_model=model),
        lambda: KVTransformerBridge.boot_transformers(model),
        lambda: KVTransformerBridge.boot_transformers(folder_for("boot_transformers", tmp_path), n_ctx=0),
    ):
        with pytest.raises(KVLensError, match="max_position_embeddings of the configuration is 0"):
            call()


def as_integers(weights):
    weights[VALUE] = (50 * weights[VALUE]).to(torch.int8)


def not_a_number(weights):
    weights[VALUE][1, 2] = torch.nan


def narrower(weights):
    weights[VALUE] = weights[VALUE][:, :-1].contiguous()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (as_integers, rf"integers \(\['{VALUE}'\]\), and its configuration has no quantization_config"),
        (not_a_number, rf"1 weights of \w+ hold NaN or infinity: \['{VALUE}'\]"),
        (narrower, rf"1 weights in .* have other shapes .*{VALUE} \[12, 23\] for \[12, 24\]"),
    ],
)
def test_a_weight_that_cannot_be_right_is_named(door, change, says, tmp_path):
    folder = folder_for(door, tmp_path)
    change_weights(folder, change)
    with pytest.raises(KVLensError, match=says):
        DOORS[door][1](folder)


@pytest.mark.parametrize("door", [KVTransformerBridge.boot_transformers, partial(HookedKVTransformer.from_pretrained, "x")])
def test_integers_in_memory_are_named(door):
    model = tiny_hf_model(ON_BOTH)
    weight = model.get_parameter(VALUE).detach().to(torch.int8)
    model.model.layers[1].self_attn.v_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(KVLensError, match=f"{VALUE}"):
        door(hf_model=model) if isinstance(door, partial) else door(model)


def test_integers_in_a_folder_of_kvlens_are_named(tmp_path):
    small_model().save(tmp_path)
    name, weights = "blocks.1.attn.W_V", load_file(tmp_path / "model.safetensors")
    save_file({**weights, name: weights[name].to(torch.int8)}, tmp_path / "model.safetensors")
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["files"]["model.safetensors"] = checksum((tmp_path / "model.safetensors").read_bytes())
    stored["checksum"] = checksum_of_json(stored)
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(KVLensError, match=rf"hold integers \(\['{name}'\]\)"):
        load(tmp_path)


def test_masks_of_older_files_are_no_weights(tmp_path):
    tiny_hf_model("gpt2").save_pretrained(tmp_path)
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 96, 96, dtype=torch.uint8).tril()}
    change_weights(tmp_path, lambda weights: weights.update(mask))
    assert load(tmp_path).cfg.n_layers == 3


@pytest.mark.parametrize("door", DOORS)
def test_a_tokenizer_with_fewer_than_half_of_the_tokens_warns(door, tmp_path):
    tokenizer = tiny_tokenizer()
    for vocab_size, warns in ((2 * len(tokenizer), False), (2 * len(tokenizer) + 1, True)):
        folder = tmp_path / str(vocab_size)
        tiny_hf_model(DOORS[door][0], vocab_size=vocab_size).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if warns:
            with pytest.warns(UserWarning, match=rf"the tokenizer has {len(tokenizer)} tokens, .* {vocab_size}"):
                DOORS[door][1](folder)
        else:
            DOORS[door][1](folder)  # a warning would be an error


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


def kvlens_folder(folder: Path) -> Path:
    tiny_text_model().save(folder)
    return folder


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (kvlens_folder, HookedKVTransformer.load),
        (tiny_hf_folder, HookedKVTransformer.from_pretrained),
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
    folder = with_code_in(tiny_hf_folder(tmp_path / "model"), "config.json", evil, model_type="evil", **MODEL_CODE)
    with pytest.raises(KVLensError, match=f"cannot read {folder}"):
        HookedKVTransformer.from_pretrained(folder)


def test_code_next_to_a_known_architecture_is_not_read(tmp_path, evil):
    folder = tiny_hf_folder(tmp_path / "model")
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
    name = tiny_hf_folder(tmp_path / "model") if source == "folder" else "gpt2"
    for door in (HookedKVTransformer.from_pretrained, HookedKVTransformer.from_pretrained_no_processing):
        with pytest.raises(KVLensError, match=message):
            door(name, hf_model=hf_model, **wrong)


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
    status = main(["explain", "--model", str(folder), "--prompt", "a", "--text", "b", "--out", "page.html"])
    assert status != 0
    assert "code of its own" in " ".join(capsys.readouterr().err.split())
    assert not Path("page.html").exists()

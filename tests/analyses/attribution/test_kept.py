"""An explanation that is interrupted anywhere resumes, and ends with the tables of one that was not."""

import json
import os

import pytest
import torch
from kvlens.analyses.attribution import kept
from kvlens.analyses.attribution.explain import explain
from kvlens.analyses.attribution.null import Null
from pandas.testing import assert_frame_equal

from kvlens import HookedKVTransformer, KVLensError, convert_prompt
from kvlens.cli import main
from kvlens.files import Unfinished, hold_unfinished

STORY = "Mira keeps a goat. Kaya feeds a donkey."
QUESTION = " Which animal does Kaya keep? Kaya keeps a"
TABLES = ("statements", "units", "heads", "positions")


@pytest.fixture(scope="module")
def model():
    return HookedKVTransformer.from_zoo("facts-linear")


def explained(model, path, **changed):
    return explain(model, STORY, QUESTION, keep=path, **changed)


def counted(monkeypatch, stop_after=None):
    """A list that gets an entry for every reading that is taken; the one behind the last that is allowed is interrupted."""
    taken, append = [], Unfinished.append

    def counting(self, *args):
        if len(taken) == stop_after:
            raise KeyboardInterrupt
        taken.append(1)
        append(self, *args)

    monkeypatch.setattr(Unfinished, "append", counting)
    return taken


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """Explained without a file, and the lines of the file of the same explanation."""
    path = tmp_path_factory.mktemp("kept") / "scores"
    assert_same(explained(model, path), found := explained(model, None))
    return found, path.read_bytes()


def assert_same(found, expected):
    for name in TABLES:
        assert_frame_equal(getattr(found, name), getattr(expected, name), check_exact=True)
    assert (found.p_answer, found.p_rival, found.cause) == (expected.p_answer, expected.p_rival, expected.cause)


@pytest.mark.parametrize(("share", "cut"), [(0.0, 0), (0.1, 7), (0.6, 0), (1.0, 7)])
def test_it_resumes_where_it_stopped(model, whole, tmp_path, monkeypatch, share, cut):
    path = tmp_path / "scores"
    n = whole[1].count(b"\n") - 1
    stop = int(share * n)
    counted(monkeypatch, stop)
    with pytest.raises(KeyboardInterrupt) if stop < n else monkeypatch.context():
        explained(model, path)
    monkeypatch.undo()
    if cut and path.exists():
        path.write_bytes(path.read_bytes()[:-cut])  # the last line was being written
    taken = counted(monkeypatch)
    assert_same(explained(model, path), whole[0])
    assert len(taken) == n - stop + (cut > 0 and stop > 0)
    assert path.read_bytes() == whole[1]


def test_a_file_of_another_explanation_is_refused_or_overwritten(model, whole, tmp_path):
    path = tmp_path / "scores"
    path.write_bytes(whole[1])
    changed = dict(rival=" goat", by="paragraph")
    with pytest.raises(KVLensError, match=r"before it was interrupted: by, rival differ\. Run that one again"):
        explained(model, path, **changed)
    assert path.read_bytes() == whole[1]
    with hold_unfinished(path, overwrite=True) as held:
        assert_same(explained(model, held, **changed), explained(model, None, **changed))
        assert held.n_new > 0 and path.read_bytes() != whole[1]
    for other, prompt, differing in [
        (model, torch.arange(3), "prompt differs"),
        (HookedKVTransformer.from_zoo("facts-gpt2"), torch.arange(1, 4), "model differs"),
    ]:
        path.unlink()
        with kept.keeping(path, model, prompt=torch.arange(1, 4)):
            kept.recalled(lambda: torch.zeros(1, 1), kept.Account(1))
        with pytest.raises(KVLensError, match=differing), kept.keeping(path, other, prompt=prompt):
            pass


def test_a_damaged_file_is_an_error(model, whole, tmp_path):
    path = tmp_path / "scores"
    lines = whole[1].split(b"\n")
    changed = json.loads(lines[3])
    changed["result"] = changed["result"].replace("-", "", 1)
    damaged = [
        *([*lines[:3], third, *lines[4:]] for third in (json.dumps(changed).encode(), b"[]", b"{", b'{"result": "1"}')),
        [*lines[:4], *lines[3:]],  # twice, as two processes would write it
        [*lines[:3], lines[4], lines[3], *lines[5:]],
        [*lines[:3], *lines[4:]],
    ]
    for content in damaged:
        path.write_bytes(b"\n".join(content))
        with pytest.raises(KVLensError, match=r"result [34] is damaged|truncated or damaged"):
            explained(model, path)
        assert path.read_bytes() == b"\n".join(content)
    path.unlink()
    with pytest.raises(KVLensError, match="has a bias attached"), model.kv_bias(convert_prompt(model, STORY)):
        explained(model, path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(KVLensError, match="Not a directory|File exists"):
        explained(model, tmp_path / "file" / "scores")
    assert kept._kept.get() is None


def test_what_is_no_file_of_scores_stays(model, tmp_path):
    path = tmp_path / "scores"
    for foreign in (b"mine", b"mine\n", b'{"a": 1}\n', b'{"format": "kvlens.unfinishe'[:-3] + b"?"):
        path.write_bytes(foreign)
        with pytest.raises(KVLensError, match="is no file of unfinished results, so it is left alone"):
            explained(model, path)
        assert path.read_bytes() == foreign
    path.rename(tmp_path / "theirs")
    path.symlink_to(tmp_path / "theirs")
    with pytest.raises(KVLensError, match="is a link"):
        explained(model, path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(KVLensError, match="is a pipe"):
        explained(model, path)
    assert sorted(os.listdir(tmp_path)) == ["scores", "theirs"]


def test_hooks_and_kept_scores_do_not_mix(model, tmp_path):
    """A file begun under a hook would lend its scores to a run without one, and the other way round."""
    path, name = tmp_path / "scores", "blocks.0.attn.hook_z"
    handles = [model.blocks[0].mlp.register_forward_hook(lambda module, inputs, output: output * 0)]
    with pytest.raises(KVLensError, match=r"has a hook on blocks\.0\.mlp, and a file cannot say"):
        explained(model, path)
    handles[0].remove()
    with pytest.raises(KVLensError, match=rf"has a hook on {name}"), model.hooks([(name, lambda z, hook: z * 0)]):
        explained(model, path)
    assert os.listdir(tmp_path) == []
    with model.hooks([(name, lambda z, hook: z * 0)]):
        explained(model, None)
    explained(model, path)


def test_prompts_of_a_null_count_in_full():
    one, other = (Null(40, prompts=[torch.arange(2000), torch.arange(x, 2000 + x)]) for x in (0, 1))
    assert kept._in_full(one) != kept._in_full(other) and len(kept._in_full(one)["prompts"][0]) == 2000


@pytest.mark.parametrize("command", ["explain", "report"])
def test_a_command_that_is_repeated_resumes(tmp_path, monkeypatch, capsys, command):
    out, texts = tmp_path / "out", ["--prompt", STORY, "--text", QUESTION]
    asked = [command, *texts, "--model", "facts-linear", "--out", str(out)]
    counted(monkeypatch, 9)
    assert main(asked) == 130
    monkeypatch.undo()
    assert not out.exists() and (tmp_path / "out.unfinished").read_bytes().count(b"\n") == 10
    assert main([*asked, "--rival", " goat"]) == 2 and (tmp_path / "out.unfinished").read_bytes().count(b"\n") == 10
    assert "rival differs" in capsys.readouterr().err
    taken = counted(monkeypatch)
    assert main(asked) == 0
    n_resumed = len(taken)
    assert out.exists() and [path.name for path in tmp_path.iterdir()] == ["out"]
    if command == "explain":
        assert main([*asked[:-1], str(tmp_path / "again")]) == 0
        assert len(taken) == n_resumed + n_resumed + 9
    capsys.readouterr()

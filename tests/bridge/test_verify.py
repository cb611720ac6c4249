"""``verify=``: on every door the comparison with Transformers' own pass can be left out, or asked for."""

import pytest
import torch
from small_models import small_model
from tiny_hf import tiny_hf_model

from kvlens import HookedKVTransformer, KVLensError, KVTransformerBridge, load
from kvlens.bridge import bridge, comparison
from kvlens.model import loading

pytestmark = pytest.mark.usefixtures("no_network")

DOORS = {
    "boot_transformers": ("granite", KVTransformerBridge.boot_transformers),
    "load_on_the_bridge": ("granite", load),
    "from_pretrained": ("llama", HookedKVTransformer.from_pretrained),
    "load": ("llama", load),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_comparison_is_made_unless_it_is_declined(door, tmp_path, monkeypatch):
    family, call = DOORS[door]
    tiny_hf_model(family).save_pretrained(tmp_path)
    made = []
    monkeypatch.setattr(bridge, "compare", lambda *given: made.append("bridge"))
    monkeypatch.setattr(loading, "check_trial", lambda *given: made.append("trial"))
    counts = []
    for verify in (False, None, True):
        made.clear()
        model = call(tmp_path, verify=verify)
        counts.append(len(made))
    assert counts == [0, 1, 1]
    assert model(torch.arange(5)[None]).isfinite().all()


def test_declined_transformers_runs_no_text(tmp_path, monkeypatch):
    tiny_hf_model("granite").save_pretrained(tmp_path)
    monkeypatch.setattr(comparison, "texts_of", lambda model: pytest.fail("a text was read"))
    KVTransformerBridge.boot_transformers(tmp_path, verify=False)


def test_the_shipped_hybrid_takes_it():
    assert KVTransformerBridge.from_zoo("facts-hybrid", verify=False).cfg.attention == "hybrid"


def test_asking_where_nothing_can_be_compared_is_refused(tmp_path):
    small_model().save(tmp_path / "m")
    (tmp_path / "model.bin").write_bytes(b"x")
    for source, what in ((tmp_path / "m", "a folder of kvlens"), (tmp_path / "model.bin", "a llama2.c checkpoint")):
        with pytest.raises(KVLensError, match=f"verify=True: Transformers does not read {what}"):
            load(source, verify=True)
    assert load(tmp_path / "m", verify=False).cfg.n_layers

"""Shared by all tests: no network, one thread a process, and the outside data folder."""

import gc
import logging
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests run one process per core; those that they start likewise
if os.environ.get("KVLENS_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # numbers are compared with those of a CPU; what holds on a GPU, test_gpu.py says

import socket
import tempfile
import threading
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_ASSETS_CACHE", str(Path(tempfile.gettempdir()) / "kvlens-tests"))  # of kept corpora, not the user's

import jaxtyping
import pytest
import torch
from precision import float64
from tqdm import tqdm

GOLDEN_RATIO = (1 + 5**0.5) / 2
"""Its multiples modulo 1 are spread evenly, whatever the step."""

torch.set_num_threads(1)
# forks share the lock of progress bars, and one that a test kills may hold it: then all others would wait without end
os.register_at_fork(after_in_child=lambda: tqdm.set_lock(threading.RLock()))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported for all tests is not looked through for garbage, neither meanwhile nor each time behind that."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.set_threshold(10_000, 20, 5)  # and what tests leave, rarely: looking for it took a twentieth of their time
    gc.enable()
    return collected


def pytest_configure(config: pytest.Config) -> None:
    """The processes of a run get their tests by and by: in large parts one of them would get all the slow ones."""
    if getattr(config.option, "maxschedchunk", "absent") is None:
        config.option.maxschedchunk = 20


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked ``one_in(n)`` one of every n cases is run always, and the others are slow.

    Which of them moves, or of an axis of n values one alone would be tried; tests with the same cases begin at different ones.
    The tests of the real model come first, so that one process has them all, as each that has one loads it.
    """
    items.sort(key=lambda item: "smollm2" not in item.fixturenames)
    seen: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            (n,), (test, *_) = mark.args, item.nodeid.partition("[")
            group, place = divmod(seen[test], n)
            if place != int((group + len(test)) * GOLDEN_RATIO % 1 * n):
                item.add_marker("slow")
            seen[test] += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """With ``--jaxtyping-packages`` a wrong type is refused before our own message is reached: not in tests of that message."""
    unchecked = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", unchecked or item.get_closest_marker("unhooked") is not None)
    try:
        return (yield)
    finally:
        jaxtyping.config.update("jaxtyping_disable", unchecked)


@pytest.fixture(scope="session")
def outside_data() -> Path:
    """The folder of trained models and texts from outside this project; absent from a user's checkout."""
    default = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    folder = Path(os.environ.get("KVLENS_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip("no outside data here: set KVLENS_TEST_DATA to a folder that holds stories260K.bin and its tokenizer")
    return folder


@pytest.fixture
def in_float64():
    """What names float32, as Transformers' modules and the processing of weights do, is float64 in this test."""
    with float64():
        yield


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def bridge_of():
    """``bridge_of(family)``: a tiny model in float64 on the bridge, loaded once for all tests, which leave it as it is."""
    from small_models import Shared
    from tiny_hf import tiny_hf_model

    from kvlens import KVTransformerBridge

    def build(family):
        with float64():
            return KVTransformerBridge.boot_transformers(tiny_hf_model(family))

    bridges = Shared(build)
    yield bridges
    with float64():
        bridges.assert_untouched()


@pytest.fixture
def logged():
    """What kvlens logs. pytest's own plugin, which is off, walks through all loggers of Transformers three times a test."""
    records, logger = [], logging.getLogger("kvlens")
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


@pytest.fixture
def short_answers(monkeypatch):
    """A random model that explains itself ends no sentence, and would write up to the limit each time."""
    monkeypatch.setattr("kvlens.explanation.steps.MOST_TOKENS", 8)
    monkeypatch.setattr("kvlens.explanation.runs.MORE_TOKENS", 2)
    monkeypatch.setattr("kvlens.explanation.runs.MOST_MORE_TOKENS", 4)


@pytest.fixture
def fused_calls(monkeypatch):
    """One entry per call of the fused softmax kernel."""
    from kvlens.components import softmax_attention

    made, whole = [], softmax_attention.fused_softmax_attention

    def counted(*args):
        made.append(args)
        return whole(*args)

    monkeypatch.setattr(softmax_attention, "fused_softmax_attention", counted)
    return made


@pytest.fixture(scope="session")
def _empty_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("empty")


@pytest.fixture
def refuses(_empty_folder, monkeypatch):
    """``refuses(words, call)``: the call ends with a KVLensError that holds these words, and writes nothing."""
    from kvlens import KVLensError

    monkeypatch.chdir(_empty_folder)

    def check(words, call):
        with pytest.raises(KVLensError) as refused:
            call()
        assert words in str(refused.value)
        assert not os.listdir()

    return check


@pytest.fixture
def no_network(monkeypatch):
    """Any attempt to reach a network fails, and the test with it, even where a library swallows the failure."""
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert attempts == []

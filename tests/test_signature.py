"""Every public function holds its arguments to the types of its signature, and says which one does not fit."""

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import UnionType

import numpy as np
import pandas as pd
import pytest
import torch
from jaxtyping import Float, Int, _decorator
from tiny_text_model import tiny_text_model
from torch import Tensor

import analyses
from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVBias, KVLensError, KVShiftConfig, convert_prompt, viz
from kvlens.signature import _is_plain, checked
from kvlens.tasks import make_task

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own


class Stranger:
    """Fits no annotation."""


def public_functions():
    named = [(module.__name__, name, getattr(module, name)) for module in (analyses, viz) for name in module.__all__]
    methods = [("kvlens.viz", f"Page.{name}", getattr(viz.Page, name)) for name in ("section", "add", "footer")]
    return {f"{module}.{name}": f for module, name, f in [*named, *methods] if inspect.isfunction(f)}


@functools.cache
def model():
    return tiny_text_model()


def placeholder(kind):
    """Something of a type, for an argument that is not the one in question."""
    if isinstance(kind, UnionType) and KVBias in kind.__args__:
        kind = KVBias
    if kind is HookedKVTransformer:
        return model()
    if isinstance(kind, type) and kind.__module__.partition(".")[0] in ("analyses", "kvlens"):
        return object.__new__(kind)
    made = {str: "a", int: 1, bool: True, pd.DataFrame: pd.DataFrame(), Sequence: [], Iterable: [], Mapping: {}}
    return made.get(getattr(kind, "__origin__", kind), torch.zeros(1, dtype=torch.long))


CASES = [
    (name, argument)
    for name, function in public_functions().items()
    for argument, parameter in inspect.signature(function).parameters.items()
    if argument != "self" and _is_plain(parameter.annotation)
]


def test_the_list_is_long():
    assert len({name for name, _ in CASES}) >= 35 and len(CASES) >= 120


@pytest.mark.parametrize(("name", "argument"), CASES, ids=[".".join(case) for case in CASES])
def test_a_stranger_is_refused_by_name(name, argument):
    function = public_functions()[name]
    given = {
        other: placeholder(parameter.annotation)
        for other, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty
    }
    with pytest.raises(KVLensError, match=f"{function.__qualname__}: {argument} must be "):
        function(**{**given, argument: Stranger()})


@checked
def taken(
    whole: int | None = None,
    number: float = 0.5,
    flag: bool = True,
    word: str = "",
    words: Sequence[str] = (),
    mixed: Sequence[int | str] = (),
    groups: Sequence[Sequence[tuple[int, int]]] = (),
    stream: Iterable[str] = (),
    names: Collection[str] = (),
    by_name: Mapping[str, float] | None = None,
    call: Callable[[int], None] | None = None,
    tensor: Float[Tensor, " pos"] | None = None,
    queries: Int[Tensor, " query"] = torch.zeros(0, dtype=torch.long),  # noqa: B008
    anything=None,
):
    return dict(locals())


FITS = [
    *(("whole", x, 3) for x in (3, np.int64(3), torch.tensor(3), np.array(3))),
    *(("number", x, 3) for x in (3, 3.0, np.float32(3), torch.tensor(3.0), np.int32(3))),
    *(("flag", x, True) for x in (True, np.True_, torch.tensor(True))),
    ("words", ["a", "b"], ["a", "b"]),
    ("mixed", [np.int64(1), "a"], [1, "a"]),
    ("mixed", torch.tensor([1, 2]), [1, 2]),
    ("groups", [[(0, np.int64(1))], []], [[(0, 1)], []]),
    ("names", {"a"}, {"a"}),
    ("by_name", {"a": 1}, {"a": 1}),
    ("call", print, print),
    ("tensor", "left to the function", "left to the function"),
    ("anything", Stranger, Stranger),
]
REFUSED = [
    *(("whole", x) for x in (True, 1.5, "3", [3], torch.tensor(1.5), torch.ones(2), np.float64(3))),
    *(("number", x) for x in (True, float("nan"), "x", 1j, torch.ones(2))),
    *(("flag", x) for x in (1, 0, "x", None)),
    *(("word", x) for x in (3, None, ["a"], b"a")),
    *(("words", x) for x in ("ab", [3], 3, {"a": 1}, {"a"}, iter("ab"))),
    *(("groups", x) for x in ([3], [[3]], [[(1, 2, 3)]], [["ab"]])),
    *(("stream", x) for x in (3, "ab", [3])),
    *(("by_name", x) for x in ([], {"a": "x"}, {3: 1})),
    *(("call", x) for x in (3, "x", [])),
    *(("queries", x) for x in (3, [1], np.ones(2))),
]


@pytest.mark.parametrize(("name", "value", "read"), FITS)
def test_what_fits_arrives_as_pythons_own(name, value, read):
    arrived = taken(**{name: value})[name]
    assert arrived == read and type(arrived) in (type(read), float)


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_does_not_fit_is_refused(name, value):
    with pytest.raises(KVLensError, match=f"taken: {name} must be "):
        taken(**{name: value})


def test_a_stream_is_not_read_ahead():
    stream = iter("ab")
    assert taken(stream=stream)["stream"] is stream and next(stream) == "a"


def test_the_words():
    with pytest.raises(KVLensError, match="groups must be a list of lists of pairs, got 3$"):
        taken(groups=3)
    with pytest.raises(KVLensError, match="mixed must be a list of whole numbers or strings, got 'x'$"):
        taken(mixed="x")
    with pytest.raises(KVLensError, match=r"whole must be a whole number or None, got Tensor of shape \[2\]$"):
        taken(whole=torch.ones(2))


def test_a_wrong_call_names_the_function_the_nearest_name_and_all_of_them():
    for call, words in (
        (
            lambda: taken(wort=3),
            "taken: no argument is called 'wort'; did you mean 'word'? It takes whole, number, flag, word, ",
        ),
        (lambda: taken(*range(20)), "taken: too many positional arguments. It takes whole, number"),
        (lambda: taken(3, whole=4), "taken: multiple values for argument 'whole'. It takes whole, number"),
        (
            lambda: analyses.bias_by_head(model()),
            "bias_by_head: missing a required argument: 'prompt'. It takes model, ",
        ),
        (lambda: analyses.bias_by_head(model(), "x", txt="y"), "'txt'; did you mean 'text'? It takes model, prompt, text"),
    ):
        for kind in (KVLensError, TypeError):
            with pytest.raises(kind) as caught:
                call()
            assert words in str(caught.value)


FAMILIES = ("analyses", "conversion", "dual", "kv_bias", "report", "training", "viz", "zoo")
READS_ITS_OPTIONS = ("kvlens.convert_prompt", "kvlens.conversion.convert_prompt")
ANSWER_OTHERWISE = ("kvlens.zoo.names", "kvlens.training.train", *READS_ITS_OPTIONS)
"""One takes nothing; the others' settings are answered where they are read."""


def test_every_public_function_answers_a_misspelt_argument():
    found = {}
    for family in ("kvlens", *(f"kvlens.{name}" for name in FAMILIES)):
        module = importlib.import_module(family)
        for name in getattr(module, "__all__", vars(module)):
            if inspect.isfunction(getattr(module, name)) and getattr(module, name).__module__.startswith(family):
                found[f"{family}.{name}"] = getattr(module, name)
    found |= {f"{kind.__name__}.{name}": getattr(kind, name) for kind, names in METHODS.items() for name in names}
    assert len(found) > 60
    for where, function in found.items():
        if where not in ANSWER_OTHERWISE:
            with pytest.raises(KVLensError, match=rf"{where.rpartition('.')[2]}: no argument is called 'bogus'.* It takes \w+"):
                function(bogus=1)


METHODS = {
    HookedKVTransformer: ("from_zoo", "load", "save"),
    KVBias: ("load", "save", "select", "select_prompt"),
    viz.Page: ("section", "add", "footer"),
}


def test_what_hands_arguments_on_answers_a_misspelt_one_too(tmp_path):
    for call, words in (
        (
            lambda: convert_prompt(model(), "x", segment_len=64),
            "'segment_len'; did you mean 'segment_length'",
        ),
        (lambda: convert_prompt(model(), "x", initail=None), "convert_prompt: .*'initail'; did you mean 'initial'"),
        (
            lambda: convert_prompt(model(), "x", prepend_boss=True),
            "'prepend_boss'; did you mean 'prepend_bos'",
        ),
        (lambda: convert_prompt(model(), "x", methd="exact"), "'methd'; did you mean 'method'.* It takes .*n_features"),
        (lambda: convert_prompt(model(), "x", n_features=4), "n_features is for softmax attention"),
        (lambda: convert_prompt(model(), "x", bogus=1), r"convert_prompt: no argument is called 'bogus'.* It takes \w+"),
        (lambda: HookedKVTransformerConfig(n_layer=1), "HookedKVTransformerConfig: .*'n_layer'; did you mean 'n_layers'"),
        (lambda: KVShiftConfig(windwo=2), "KVShiftConfig: .*'windwo'; did you mean 'window'"),
        (lambda: HookedKVTransformer.from_hooked_transformer(model(), kv_shfit=None), "'kv_shfit'; did you mean 'kv_shift'"),
        (lambda: make_task("induction", lenght=3), "lenght.*did you mean 'length'"),
    ):
        with pytest.raises(KVLensError, match=words):
            call()


def test_a_warning_points_at_the_line_that_called():
    softmax = tiny_text_model(attention="softmax")
    for call in (
        lambda: convert_prompt(model(), torch.arange(100) % 200),
        lambda: convert_prompt(softmax, "The widget", method="landmark", n_features=99, verbose=False),
    ):
        with pytest.warns(UserWarning, match="tokens") as caught:
            call()
        assert len(caught) == 1
        assert caught[0].filename in (__file__, _decorator.__file__)  # the latter: the frames of type checks, if hooked


def test_what_memory_refuses_is_refused_in_words():
    @checked
    def numbers(n: int) -> Tensor:
        return torch.empty(n, n)

    with pytest.raises(KVLensError, match=r"numbers: this asks for more memory than there is \(.*\); ask for less"):
        numbers(2**40)


def test_the_signature_and_the_docstring_stay():
    function = analyses.bias_by_head
    assert list(inspect.signature(function).parameters)[:3] == ["model", "prompt", "text"]
    assert "ablation_kl" in function.__doc__ and importlib.import_module(function.__module__).bias_by_head is function

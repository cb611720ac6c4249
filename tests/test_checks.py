"""Every public function checks its arguments against its signature, and says which one is wrong.

Calls of a model with arguments of wrong kinds leave no hook behind, and no misspelt mask is left out, on every front end.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

import numpy as np
import pytest
import torch
from jaxtyping import Float, _decorator
from tiny_text_model import tiny_text_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from kvlens import (
    KVLensError,
    KVTransformerBridge,
    analyses,
    convert_prompt,
)
from kvlens.checks import Count, Finite, Seed, Within, checked, members, reader_of
from kvlens.ops import rotary

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own


class Stranger:
    """Fits no annotation."""


FAMILIES = ("analyses", "conversion", "dual", "kv_bias", "training", "viz", "zoo")
PACKAGES = (*FAMILIES, "corpus", "model", "tasks")


def is_held(function):
    """Whether :func:`checked` stands around a function."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if function.__code__.co_name == "held":
            return True
        function = inner
    return False


def doors():
    """Every function, class and method of the public packages that is held to its signature, by its name."""
    found = {}
    for module in map(importlib.import_module, ("kvlens", *(f"kvlens.{name}" for name in PACKAGES))):
        for thing in [getattr(module, name) for name in getattr(module, "__all__", vars(module))]:
            methods = [getattr(thing, name) for name in vars(thing) if name[0] != "_"] if inspect.isclass(thing) else []
            for door in (thing, *methods):
                if is_held(door.__init__ if inspect.isclass(door) else door):
                    found[door.__qualname__] = door
    return found


@functools.cache
def model():
    return tiny_text_model()


def placeholder(kind):
    """Something of a type, for an argument that is not the one in question."""
    kind = getattr(members(kind)[0], "__origin__", members(kind)[0])
    return {str: "a", int: 1, float: 1.0, bool: True, Sequence: [], Iterable: [], Mapping: {}}.get(kind)


def test_a_door_checks_calls_from_outside_alone():
    """The same wrong call: refused here, and left to torch within kvlens, whose own calls are not checked again."""
    x, wide = torch.ones(2, 3), torch.ones(1, 8)
    with pytest.raises(KVLensError, match="rotate: expected x"):
        rotary.rotate(x, wide, wide[:, :4])
    within: dict = {"__name__": "kvlens.somewhere", "rotate": rotary.rotate}
    exec("def call(*args):\n    return rotate(*args)", within)
    with pytest.raises(KVLensError, match="rotate: expected an even rotary_dim"):
        within["call"](x, wide, wide[:, :4])


def test_the_list_is_long():
    assert len(doors()) >= 120


@pytest.mark.parametrize("name", doors())
def test_a_stranger_is_refused_by_name(name):
    door = doors()[name]
    taken = {a: p for a, p in inspect.signature(door).parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    needed = {argument: placeholder(p.annotation) for argument, p in taken.items() if p.default is p.empty}
    for argument, parameter in taken.items():
        if parameter.annotation is not parameter.empty and reader_of(parameter.annotation) is not None:
            with pytest.raises(KVLensError, match=f"{name.rpartition('.')[2]}: {argument} must be "):
                door(**{**needed, argument: Stranger()})


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
    several: str | Float[Tensor, " pos"] | None = None,
    count: Count | None = None,
    share: Annotated[float, Within(above=0, most=1)] = 0.5,
    finite: Finite = 0.0,
    seed: Seed = 0,
    size: Annotated[int, Within(1)] | Literal[-1] = -1,
    choice: Literal["equal", "greedy"] | None = "equal",
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
    ("several", "left to the function", "left to the function"),
    ("anything", Stranger, Stranger),
    *(("count", x, 3) for x in (3, np.int64(3), torch.tensor(3))),
    *(("share", x, x) for x in (1, 1e-300, 0.25)),
    *(("seed", x, x) for x in (0, 2**63 - 1)),
    *(("size", x, x) for x in (-1, 1)),
    *(("choice", x, x) for x in ("greedy", None)),
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
    *(("count", x) for x in (0, -1, True, 1.5, "3", 2**63, 2**4000)),
    *(("share", x) for x in (0, -1, 1.5, math.nan, math.inf, True, "x")),
    *(("finite", x) for x in (math.inf, -math.inf, math.nan, 2**2000, "x", None)),
    *(("seed", x) for x in (-1, 2**63, 1.5)),
    *(("size", x) for x in (0, -2, True)),
    *(("choice", x) for x in ("x", 3, [], True)),
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
    for given, words in (
        (dict(mixed="x"), "mixed must be a list, each a whole number or a string, got 'x'"),
        (dict(whole=torch.ones(2)), r"whole must be a whole number or None, got Tensor of shape \[2\]"),
        (dict(share=0), "share must be above 0 and at most 1, got 0"),
        (dict(size=0), "size must be a whole number of at least 1 or -1, got 0"),
        (dict(choice="greddy"), "choice must be one of equal, greedy, or None, got 'greddy'; did you mean 'greedy'[?]"),
        (dict(count=2**20_000), r"count must be from 1 to 2\*\*63 - 1, got a number of 20001 bits"),
    ):
        with pytest.raises(KVLensError, match=f"taken: {words}$"):
            taken(**given)


@pytest.mark.parametrize(
    "call", [lambda: taken(wort=3), lambda: read(torch.ones(5, 4, 3)), lambda: analyses.bias_by_head(model(), "x", txt="y")]
)
def test_a_wrong_call_is_pythons_own_error_with_the_name_of_the_function(call):
    with pytest.raises(TypeError, match=r"^(taken|read|bias_by_head)\(\) .* argument"):
        call()


def test_a_warning_points_at_the_line_that_called():
    softmax = tiny_text_model(attention="softmax")
    for call in (
        lambda: convert_prompt(model(), torch.arange(100) % 200),
        lambda: analyses.prompt_effect(model(), torch.arange(100) % 200, "The"),
        lambda: convert_prompt(softmax, "The widget", method="landmark", n_features=99, verbose=False),
    ):
        with pytest.warns(UserWarning, match="n_ctx|tokens") as caught:
            call()
        assert len(caught) == 1
        assert caught[0].filename in (__file__, _decorator.__file__)  # the latter: the frames of type checks, if hooked


def test_the_signature_and_the_docstring_stay():
    function = analyses.bias_by_head
    assert list(inspect.signature(function).parameters)[:3] == ["model", "prompt", "text"]
    assert "ablation_kl" in function.__doc__ and importlib.import_module(function.__module__).bias_by_head is function


@checked
def read(q: Float[Tensor, "*lead head d"], v: Float[Tensor, "kv_head d"], rows: Float[Tensor, "*#lead 2"] | None = None) -> int:
    return len(q)


POSTPONED = """
from __future__ import annotations
from dataclasses import dataclass
from jaxtyping import Float
from torch import Tensor
from kvlens.checks import checked

@checked
def scaled(x: Float[Tensor, "pos d"], by: Float[Tensor, " d"], until: Later | None = None, times: int = 1) -> Later:
    return x * by * times

@checked
@dataclass
class Scale:
    times: int = 1

class Later: ...
"""


def test_postponed_annotations_are_checked_too_except_for_what_does_not_exist_yet(tmp_path, monkeypatch):
    (tmp_path / "postponed.py").write_text(POSTPONED)
    monkeypatch.syspath_prepend(tmp_path)
    module = vars(importlib.import_module("postponed"))
    assert module["scaled"](torch.ones(2, 3), torch.ones(3), "anything", np.int64(2)).sum() == 12
    with pytest.raises(KVLensError, match=r"scaled: expected x \[pos, d\], by \[d\]; got x \[2, 3\], by \[1\]"):
        module["scaled"](torch.ones(2, 3), torch.ones(1))
    with pytest.raises(KVLensError, match="scaled: times must be a whole number, got 0.5"):
        module["scaled"](torch.ones(2, 3), torch.ones(3), times=0.5)
    with pytest.raises(KVLensError, match="Scale: times must be a whole number, got 'two'"):
        module["Scale"](times="two")


def test_the_message_says_what_was_expected_and_what_came():
    with pytest.raises(KVLensError) as refused:
        read(torch.ones(5, 4, 3), v=torch.ones(3, 2))
    assert str(refused.value) == "read: expected q [..., head, d], v [kv_head, d]; got q [5, 4, 3], v [3, 2]"


def test_axes_may_be_several_broadcast_given_by_number_or_absent():
    q, v = torch.ones(5, 7, 4, 3), torch.ones(2, 3)
    assert read(q, v) == read(q, v, None) == read(q, v, rows=torch.ones(7, 2)) == read(q, v, torch.ones(1, 7, 2)) == 5
    for rows in (torch.ones(7, 3), torch.ones(5, 2), torch.ones(3, 7, 2), torch.ones(5, 5, 7, 2)):
        with pytest.raises(KVLensError):
            read(q, v, rows)


class Held(NamedTuple):
    keys: Float[Tensor, "key d"]
    slopes: Float[Tensor, " head"] | None


def test_tensors_inside_arguments_are_held_too():
    @checked
    def inside(held: Held, weights: Sequence[Float[Tensor, "d _"]], x: Float[Tensor, "head d"]) -> int:
        return len(weights)

    keys, x = torch.ones(7, 3), torch.ones(2, 3)
    assert inside(Held(keys, None), [torch.ones(3, 5), torch.ones(3, 2)], x) == 2
    for held, weights in (
        (Held(torch.ones(7, 4), None), [torch.ones(3, 5)]),
        (Held(keys, torch.ones(3)), [torch.ones(3, 5)]),
        (Held(keys, None), [torch.ones(3, 5), torch.ones(2, 5)]),
    ):
        with pytest.raises(KVLensError, match=r"inside: expected held.keys .*, each of weights .*; got held.keys"):
            inside(held, weights, x)


def test_a_dataclass_is_held_to_its_fields():
    @checked
    @dataclass(frozen=True)
    class Options:
        n: Count
        kind: Literal["iid", "orthogonal"] = "iid"

    assert Options(np.int64(3)) == Options(n=3) and type(Options(np.int64(3)).n) is int
    for call, words in (
        (lambda: Options(0), "^Options: n must be at least 1, got 0$"),
        (
            lambda: replace(Options(1), kind="idd"),
            "^Options: kind must be one of iid, orthogonal, got 'idd'; did",
        ),
    ):
        with pytest.raises(KVLensError, match=words):
            call()


def bridge():
    sizes = dict(n_layer=2, n_head=2, n_embd=8, n_positions=32, n_ctx=32, vocab_size=11)
    return KVTransformerBridge.boot_transformers(GPT2LMHeadModel(GPT2Config(**sizes)).eval())


MODELS = {"linear": tiny_text_model, "softmax": lambda: tiny_text_model(attention="softmax"), "bridge": bridge}
TOKENS = torch.tensor([[3, 1, 4, 1, 5]])
CALLS = {
    "forward": "input return_type loss_per_token prepend_bos start_at_layer stop_at_layer attention_mask past_kv_cache unknown",
    "run_with_cache": "input names_filter return_cache_object remove_batch_dim pos_slice device incl_bwd stop_at_layer unknown",
    "run_with_hooks": "input fwd_hooks bwd_hooks reset_hooks_end clear_contexts stop_at_layer",
}
VALUES = [3, 1.5, True, "x", b"x", [], [1], {"a": 1}, object(), np.ones(3), torch.ones(2, 3), torch.tensor([[99]])]
VALUES += [["hook_embed"], [("hook_embed", 3)], [("hook_embed", print, 1)], [(3, print)], {"hook_embed": print}, [[["x"]]]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["linear", "bridge"])
@pytest.mark.parametrize("method", CALLS)
def test_a_call_with_anything_leaves_no_hook_behind(method, kind):
    """432 calls of each model, most of which fail."""
    model, failures, names = MODELS[kind](), 0, CALLS[method].split()
    for name in names:
        for value in VALUES:
            tokens = () if name == "input" else (TOKENS,)
            try:
                getattr(model, method)(*tokens, **{name: value})
            except Exception:
                failures += 1
            assert not any(point.has_hooks() for point in model.hook_dict.values()), (name, value)
    assert failures > 0.5 * len(names) * len(VALUES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_right_in_another_form_passes(kind):
    model, seen = MODELS[kind](), []
    name = "blocks.1.hook_resid_pre" if kind != "bridge" else "blocks.1.hook_in"
    expected, cache = model.run_with_cache(TOKENS, names_filter=[name])
    for names in ((name,), name, lambda point: point == name):
        logits, same = model.run_with_cache(TOKENS, names_filter=names)
        assert torch.equal(logits, expected) and torch.equal(same[name], cache[name])
    logits = model.run_with_hooks(TOKENS, fwd_hooks=([name, lambda x, hook: seen.append(x)],), stop_at_layer=None)
    assert torch.equal(logits, expected) and torch.equal(seen[0], cache[name])
    assert torch.equal(model(cache[name], start_at_layer=np.int64(1)), expected)
    loss, gradients = model.run_with_cache(TOKENS, incl_bwd=True, return_type="loss")
    assert loss.dim() == 0 and any(entry.endswith("_grad") for entry in gradients)

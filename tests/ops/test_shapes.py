"""Every op refuses inconsistent tensors with its own message, and accepts consistent ones; what else some of them refuse."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from kvlens import KVLensError
from kvlens.ops import (
    attention_variants,
    dual,
    dual_layers,
    feature_maps,
    induction,
    kv_shift,
    landmarks,
    linear_attention,
    pursuit,
    rotary,
)
from kvlens.ops import softmax_attention as softmax
from kvlens.ops import softmax_features as features
from kvlens.ops.feature_maps import draw_projections
from kvlens.ops.induction import landscape_loss, naive_landscape_loss
from kvlens.ops.landmarks import Products
from kvlens.ops.linear_attention import retnet_decay
from kvlens.ops.short_convolution import short_convolution

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own
SIZES = dict(b=2, p=7, key=7, h=6, g=3, d=4, f=5, r=5, m=8, w=1, t=2, c=6, n=3, e=9, one=1, two=2, all=6)


class Axes(NamedTuple):
    """A tensor's axes, and the kind of its numbers."""

    axes: str
    kind: str = "float"


def ints(axes: str) -> Axes:
    return Axes(axes, "int")


def bools(axes: str) -> Axes:
    return Axes(axes, "bool")


def made(x: Any) -> Any:
    """A tensor from its axes (letters of `SIZES`), what holds such tensors, or a constant."""
    if isinstance(x, Axes):
        shape = [SIZES[axis] for axis in x.axes.split()]
        return (
            torch.rand(shape)
            if x.kind == "float"
            else torch.zeros(shape).long()
            if x.kind == "int"
            else torch.ones(shape).bool()
        )
    if isinstance(x, str):
        return made(Axes(x))
    if isinstance(x, list):
        return [made(each) for each in x]
    return type(x)(*map(made, x)) if hasattr(x, "_fields") else x


RULE = features.ScoreRule(2.0)
QUERIES = landmarks.Queries("b p h d", "b p h d", "b p h", ints("p"))
WANTED = landmarks.Wanted(
    landmarks.Queries("one p two d", "one p two d", "one p two", ints("p")), "p two", "p two d", RULE._replace(slopes=None)
)
PROMPT = landmarks.PromptKeys("b g r d", "b g r d", ints("b g r"), None, RULE)
SUMS = landmarks.Statistics(Products(torch.rand(6, 5, 5)), "c r", "c r d", "c", 14)
KERNEL = dual.LogKernel("h p p", None)
EXTRA = softmax.ExtraKeys("b g r d", "b g r", "b g r d")
PHI = softmax.ScaledFeatures("b p h r", "b p h")
HEAD = dual_layers.AttentionWeights("d e", "d e", "d f")
LINEAR = dict(phi_q="b p h f", phi_k="b p g f", v="b p g d", norm_q="b p h f", norm_k="b p g f", mask=bools("b p"))
SOFTMAX = dict(q="b p h d", k="b key g d", v="b key g d", scale=2.0, padding=bools("b key"), score_bias="b h p key")
STATE = linear_attention.LinearAttentionState("b g f d", "b g f")
RIDGE = attention_variants.RidgeState("b g f d", "b g f f")
WEIGHT, INPUTS, LABELS = "h e f", "h n f", "h n e"
OPS: dict[Any, dict[str, Any]] = {
    kv_shift.kv_shift: dict(x="b p h d", coef="h t", initial_state="b w h d", mask=bools("b p")),
    kv_shift.naive_kv_shift: dict(x="b p h d", coef="h t", initial_state="b w h d", mask=bools("b p")),
    kv_shift.effective_pattern: dict(pattern="b h p key", coef="g t"),
    rotary.rotate: dict(x="b p h d", cos="p one two", sin="p one two"),
    feature_maps.random_features: dict(x="b p h d", projection="h m d", scale=2.0),
    feature_maps.hedgehog: dict(x="b p h d", weight="h d d"),
    linear_attention.naive_linear_attention: dict(LINEAR, initial_state=STATE),
    linear_attention.parallel_linear_attention: dict(LINEAR, initial_state=STATE),
    linear_attention.chunked_linear_attention: dict(LINEAR, initial_state=STATE),
    linear_attention.recurrent_linear_attention: dict(LINEAR, initial_state=STATE),
    linear_attention.read_state: dict(phi_q="b p h f", kv="b g f d", decay="g", steps=ints("b p")),
    linear_attention.running_normalizer: dict(norm_q="b p h f", norm_k="b p g f", k_sum="b g f"),
    linear_attention.causal_scores: dict(phi_q="b p h f", phi_k="b key g f", decay="g", mask=bools("b key")),
    softmax.naive_softmax_attention: SOFTMAX,
    softmax.fused_softmax_attention: SOFTMAX,
    softmax.by_kv_head: dict(x="b p h d", held="b g d n"),
    softmax.join_bias: dict(
        z_context="b p h e", normalizer=softmax.ScaledMass("b p h", "b p h"), phi=PHI, b_kv="b g r d", b_d="b g r"
    ),
    softmax.attend_with_extra_keys: dict(
        q="b p h d", k="b key g d", v="b key g d", extra=EXTRA, scale=2.0, visible=bools("one one p key")
    ),
    softmax.merge_extra_keys: dict(z="b p h d", log_normalizer="b p h", q="b p h d", extra=EXTRA, scale=2.0),
    features.virtual_key_scores: dict(
        q="b p h d", keys="b g r d", rule=RULE._replace(slopes="h"), distance=ints("b g r"), positions=ints("b p")
    ),
    features.grouped_key_scores: dict(q="b p h d", keys="b g r d", rule=RULE),
    features.random_log_features: dict(x="b p h d", projection="g m d", scale=2.0),
    features.learned_log_features: dict(x="b p h d", weight="g m d", offset="g m"),
    features.scaled_exp: dict(log_features="b p h r", used=bools("b h r")),
    features.taylor_features: dict(x="b p h d", scale=2.0),
    landmarks.shares: dict(queries=QUERIES, prompt=PROMPT),
    landmarks.statistics: dict(queries=QUERIES, prompt=PROMPT, root_metric="b g d d"),
    pursuit.choose_keys: dict(sums=SUMS, r=2),
    landmarks.fit_weights: dict(wanted=WANTED, keys="r d", distance=ints("r")),
    landmarks.fit_values: dict(wanted=WANTED, keys="r d", distance=ints("r"), w="r", start="r d"),
    attention_variants.augment: dict(x="b p h d", weights=["h d e", "h e f"], activation=torch.relu),
    attention_variants.lowest_scored: dict(scores="b h p key", visible=bools("b h p key"), k=2),
    attention_variants.mean_of_negatives: dict(
        v="b h key d", negatives=attention_variants.Negatives(ints("b h p two"), "b h p two")
    ),
    attention_variants.ridge_attention: dict(
        kernel="b g key key", at_queries="b h p key", v="b g key d", strength=9.0, mask=bools("b key")
    ),
    attention_variants.ridge_step: dict(phi_q="b h f", phi_k="b g f", v="b g d", strength=9.0, state=RIDGE),
    attention_variants.ridge_state: dict(phi_k="b g p f", v="b g p d", mask=bools("b p")),
    attention_variants.naive_ridge: dict(kernel="p p", at_queries="p p", v="p d", strength=9.0),
    induction.induction_head: dict(x="b p d", sigma=2.0, slope=0.5),
    induction.landscape_loss: dict(alpha="b two", beta="b two", T=9),
    dual.softmax_kernel: dict(a="h p d", b="h key d", scale=2.0),
    dual.feature_kernel: dict(a="h p f", b="h key f", log_a="h p", log_b="h key"),
    dual.pair_sums: dict(log_kernel=KERNEL, values="h p d", log_normalizer="h", n_demonstrations=3),
    dual.log_loss_drops: dict(log_kernel=KERNEL, values="h p d", log_normalizer="h p"),
    dual.mean_cosines: dict(log_kernel=KERNEL, values="h p d", start="h p d"),
    dual.step_outputs: dict(pattern="h p p", values="h p d"),
    dual.predict: dict(weight=WEIGHT, inputs=INPUTS),
    dual.dual_loss: dict(weight=WEIGHT, inputs=INPUTS, labels=LABELS, normalizer=torch.ones(()), eta=1.0),
    dual.weight_after: dict(weight=WEIGHT, added=WEIGHT, n_steps=2),
    dual.landmark_features: dict(keys="h p d", queries="h key d", scale=2.0, n_landmarks=2),
    dual.scaled_random_features: dict(x="h p d", projection="h m d", scale=2.0),
    dual_layers.fold_mlp: dict(W_in="d e", b_in="e", W_out="e d", b_out="d", activation=torch.relu, pre="e"),
    dual_layers.prefix_lm_attention: dict(x="p d", weights=HEAD, scale=2.0),
    dual_layers.bound_terms: dict(log_norm="h", log_rho="h", log_trace="h", n_demonstrations=3, d_out=4, delta=0.1),
}


def axes_in(x: Any) -> Iterator[str]:
    if isinstance(x, Axes | str):
        yield from (x.axes if isinstance(x, Axes) else x).split()
    elif isinstance(x, list) or hasattr(x, "_fields"):
        for each in x:
            yield from axes_in(each)


def spoilt(x: Any) -> Iterator[Any]:
    """``x`` with one of its tensors an axis short, or of another size along an axis."""
    if isinstance(x, str):
        yield from spoilt(Axes(x))
    elif isinstance(x, Axes):
        axes = x.axes.split()
        yield Axes(" ".join(axes[:-1]), x.kind)
        for axis in axes:
            longer = "e" if axis != "e" else "m"
            yield Axes(" ".join(longer if each == axis else each for each in axes), x.kind)
    elif isinstance(x, list) or hasattr(x, "_fields"):
        for i, each in enumerate(x):
            for wrong in spoilt(each):
                parts = [*x[:i], wrong, *x[i + 1 :]]
                yield parts if isinstance(x, list) else type(x)(*parts)


@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.__module__.split('.')[2]}-{op.__name__}")
def test_an_op_takes_what_fits_and_refuses_what_does_not(op):
    arguments = OPS[op]
    op(**{name: made(x) for name, x in arguments.items()})
    everything = [axis for x in arguments.values() for axis in axes_in(x)]
    refused = 0
    for name, x in arguments.items():
        for wrong in spoilt(x):
            before, after = list(axes_in(x)), list(axes_in(wrong))
            if len(before) == len(after):
                changed = {axis for axis, new in zip(before, after, strict=True) if axis != new}
                if all(everything.count(axis) == before.count(axis) for axis in changed):
                    continue  # nothing else has this axis: any size will do
            with pytest.raises((KVLensError, RuntimeError)):  # the latter: torch's, of heads that share no keys
                op(**{n: made(wrong if n == name else y) for n, y in arguments.items()})
            refused += 1
    assert refused


PAIR = torch.tensor([0.0, 1.0], dtype=torch.float64)
REFUSED = [
    ("retnet_decay: n_heads must be at least 1, got 0", lambda: retnet_decay(0)),
    ("retnet_decay: n_heads must be a whole number of at least 1, got 1.5", lambda: retnet_decay(1.5)),
    ("retnet_decay: n_heads must be from 1 to 2**63 - 1", lambda: retnet_decay(2**70)),
    ("draw_projections: n_heads must be at least 1, got 0", lambda: draw_projections(0, 2, 3, "iid")),
    ("draw_projections: n_features must be at least 1, got -2", lambda: draw_projections(1, -2, 3, "iid")),
    ("draw_projections: d_head must be a whole number of at least 1", lambda: draw_projections(1, 2, 1.5, "iid")),
    ("kind must be one of iid, orthogonal, got 'i'; did you mean 'iid'?", lambda: draw_projections(1, 2, 3, "i")),
    *(("landscape: T must be at least 4", lambda f=f: f(PAIR, PAIR, 3)) for f in (landscape_loss, naive_landscape_loss)),
    *((f"1 < i < T - 1 = 6, got i = {i}", lambda i=i: naive_landscape_loss(PAIR, PAIR, 7, i)) for i in (1, 6)),
    (
        "needs an initial state of 3 rows, got 2",
        lambda: short_convolution(torch.ones(1, 4, 5), torch.ones(5, 4), initial_state=torch.ones(1, 2, 5)),
    ),
]


@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
def test_is_refused(words, call, refuses):
    refuses(words, call)

"""What the analyses, the dual model and a batch refuse, since it would give wrong numbers in silence."""

import functools
import math
from pathlib import Path

import pytest
import torch
from analysis_models import tokens
from kvlens.analyses.batch.runner import Input, run_batch
from kvlens.analyses.batch.work import Resources, Work
from small_models import shared, sharp, small_model

from kvlens import analyses, convert_prompt
from kvlens.dual import DualLayer, DualModel

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own

PROMPT, OTHER, TEXT, SPAN = tokens(7), tokens(7, seed=5), tokens(5, seed=1), (2, 5)
LONGER, PAIRS = tokens(9), tokens(14).reshape(2, 7) % 15


linear = functools.partial(shared)
softmax = functools.partial(shared, "softmax, learned")
absolute = functools.partial(shared, "learned", kv_shift=None)
classifier = functools.partial(shared, d_vocab_out=3)


@functools.cache
def bias(model=linear, n_prompts=1, **options):
    prompt = PROMPT if n_prompts == 1 else tokens(7 * n_prompts, seed=5).reshape(n_prompts, 7)
    return convert_prompt(model(), prompt, **options)


def effects(model=linear, prompt=None, **given):
    return analyses.bias_effects(model(), bias(model) if prompt is None else prompt, TEXT, **given)


def patching(model=linear, **given):
    return analyses.activation_patching(
        model(), **{"prompt": PROMPT, "corrupted": OTHER, "text": TEXT, "answer": 3, "rival": 5, **given}
    )


def positions(model=linear, **given):
    return analyses.bias_positions(model(), PROMPT, TEXT, **given)


def decomposition(**given):
    return analyses.bias_decomposition(linear(), PROMPT, TEXT, **given)


def removed(removals, of=bias, model=linear, **given):
    return analyses.bias_ablation(model(), of(), TEXT, removals, **given)


def attribution(**given):
    return analyses.prompt_attribution(linear(), PROMPT, TEXT, **given)


def replaced(replacement):
    return analyses.attribution_by_position(linear(), PROMPT, TEXT, by=[SPAN], answer=5, replace_by=replacement)


def contributions(prompt=None, text=TEXT, **given):
    return analyses.layer_contributions(linear(), prompt, text, **given)


def why(model=softmax, prompt=PROMPT, text=TEXT, layer=1, head=3, **given):
    return analyses.why_attends(model(), prompt, text, layer, head, **given)


def errors(prompt=PROMPT, text=TEXT, **given):
    return analyses.conversion_error(linear(), prompt, text, **given)


def verdicts(**given):
    return analyses.induction_verdicts(linear(), **given)


def circuit(model=softmax, prompt=PAIRS, corrupted=PAIRS + 1, metric=None, **given):
    asked = {} if metric is not None else dict(answer=5, rival=7)
    return analyses.circuit(model(), prompt, corrupted, metric, **{**asked, **given})


def under_a_bias(f, *arguments):
    with linear().kv_bias(bias()):
        f(linear(), *arguments)


def random_features():
    return bias(softmax, method="random", n_features=8)


def variant(**parts):
    return lambda: sharp(attention_variant=parts)


def dual(model=None, tokens=LONGER, layer=0, head=0, **given):
    return DualModel.from_head(model or softmax(), tokens, layer, head, **given)


def by_random_features(**given):
    return dual(kernel="random", **given)


def dual_under(kernel, **options):
    with softmax().kv_bias(convert_prompt(softmax(), LONGER, **options)):
        dual(tokens=LONGER[:5], kernel=kernel)


def dual_layer(**changes):
    return DualLayer.from_layer(small_model(act_fn="relu", **changes), LONGER, 0, 0)


LETTERS = "batch_probes.letters:LETTERS"
WORK = [
    dict(analysis="bias_by_haed"),
    dict(analysis="batch_probes.letters:LETERS"),
    dict(options={"uper": True}),
    dict(options={"times": True}),
    dict(models=("m", "m")),
    dict(models=("docs-liner",)),
    dict(dtype="int8"),
    dict(device="meta"),
    dict(prompts=None),
    dict(prompts="nowhere"),
]
RESOURCES = [dict(engine="rays"), dict(workers=0), dict(workers=10**9), dict(threads=-1), dict(gpus_per_worker=0.5)]


def batch(**given):
    source = Input(given.pop("prompts", Path(__file__)))
    return run_batch(Work(**{"analysis": LETTERS, "models": ("docs-linear",), **given}), source, "out.parquet")


REFUSED = [
    # a bias of another model, of a batch or of another length, and one that is attached
    lambda: effects(methods=["mean"], references=convert_prompt(sharp(seed=4), PROMPT[None])),
    lambda: effects(methods=["mean"], references=bias()),
    lambda: effects(methods=["mean"], references="other prompts"),
    lambda: effects(absolute, methods=["mean"], references=convert_prompt(absolute(), OTHER[None, :6])),
    lambda: effects(methods=["mean"]),
    lambda: removed([[]], lambda: bias(n_prompts=2)),
    lambda: removed([[]], model=lambda: sharp(seed=4)),
    lambda: analyses.bias_singular_values(linear(), bias(n_prompts=2)),
    lambda: contributions(bias(n_prompts=2)),
    lambda: errors(bias=bias(n_prompts=3)),
    lambda: patching(corrupted=bias(n_prompts=2)),
    lambda: patching(absolute, corrupted=tokens(4)),
    lambda: patching(softmax, corrupted=random_features()),
    lambda: under_a_bias(analyses.bias_interactions, PROMPT, OTHER),
    lambda: under_a_bias(analyses.head_details, PROMPT, TEXT),
    # names
    lambda: effects(by="token"),
    lambda: positions(by="token"),
    lambda: patching(points=["b_kvs"]),
    lambda: attribution(by="sentense"),
    lambda: attribution(by="token", method="leave_one_outt"),
    lambda: attribution(by="token", positions="open"),
    lambda: analyses.composition(linear(), kinds="QQ"),
    lambda: dual(kernel="exakt"),
    # tokens and ranges of them
    *(lambda x=x: errors(x) for x in (tokens(4).reshape(2, 2), "ab", [1, 2], PROMPT[:0])),
    lambda: errors(text=torch.tensor([17])),
    lambda: decomposition(answer=17),
    lambda: decomposition(rival=3),
    lambda: patching(answer=17),
    lambda: contributions(tokens=[17]),
    lambda: verdicts(prompt=torch.tensor([[1, 17]])),
    *(lambda by=by: attribution(by=by) for by in ([(0, 8)], [(0, 3), (2, 5)], [(3, 3)])),
    lambda: attribution(by="token", answer=5, rival=5),
    lambda: replaced({SPAN: torch.tensor([1])}),
    lambda: replaced({(3, 6): torch.tensor([1, 2, 3])}),
    lambda: replaced({(0, 2): tokens(2)}),
    lambda: analyses.attribution_by_head(linear(), PROMPT, TEXT, by=[(0, 7)], answer=5, positions="closed"),
    # circuits: pairs, what is measured on them, sizes
    lambda: circuit(corrupted=None),
    lambda: circuit(without=[(1, 2)]),
    lambda: circuit(rival=5),
    *(lambda given=given: circuit(**given) for given in (dict(text=17), dict(answer=17))),
    *(lambda by=by: circuit(corrupted=None, without=by) for by in ([(5, 7)], [(1, 99)])),
    lambda: circuit(corrupted=PAIRS[:, :6]),
    lambda: circuit(prompt=[PAIRS[0], PROMPT[:5]], corrupted=[PAIRS[1], PROMPT[:5]], metric=lambda x: x[:, -1, 0]),
    *(lambda m=m: circuit(metric=m) for m in ((5, 7), "ab")),
    *(lambda given=given: circuit(metric=lambda x: x[:, -1, 0], **given) for given in (dict(answer=5), dict(rival=5))),
    lambda: circuit(answer=["", "a"]),
    *(lambda m=m: circuit(metric=m) for m in (lambda x: x.sum(), lambda x: x[:, -1, 0] * math.nan, lambda x: 1.0)),
    *(lambda row=row: circuit(functools.partial(sharp, row)) for row in ("softmax, shortformer", "augmented keys")),
    *(lambda size=size: circuit(method="eap").keep(size) for size in (152, -1, 1.5)),
    lambda: circuit(method="eap").keep(13, by="nodes"),
    *(lambda name=name: circuit(method="eap").keep(9, **{name: "value"}) for name in ("by", "order")),
    lambda: analyses.faithfulness(circuit(corrupted=PAIRS, method="eap")),
    *(lambda shares=shares: analyses.faithfulness(circuit(method="eap"), shares) for shares in ([1.0], [0.5, 0.1])),
    lambda: positions(at=[0, 5]),
    # what is no sum of heads and positions
    *(
        lambda parts=parts, given=given: positions(variant(**parts), **given)
        for parts, given in (
            (dict(augmented=dict(values=True)), dict(by="source")),
            (dict(negative=dict(k=2, beta=0.3)), {}),
            (dict(ridge=dict(strength=0.1)), {}),
        )
    ),
    *(
        lambda name=name: getattr(analyses, name)(classifier(), PROMPT, TEXT)
        for name in ("bias_positions", "bias_by_head", "bias_decomposition", "bias_effects", "layer_contributions")
    ),
    # why a head attends
    *(
        lambda given=given: why(**given)
        for given in (dict(layer=None), dict(layer=2), dict(head=5), dict(query=12), dict(query="purple"), dict(query=4, key=9))
    ),
    lambda: why(prompt=bias(softmax), query=3),
    lambda: why(lambda: shared("softmax, local"), layer=0, key=2),
    lambda: why(linear),
    lambda: analyses.what_is_copied(linear(), PROMPT, TEXT, 1, 3),
    lambda: why(prompt=random_features()),
    lambda: why(s := lambda: shared("softmax, shifted"), prompt=bias(s)),
    lambda: why(prompt=-1 * bias(softmax)),
    *(
        lambda kind=kind: why(lambda: shared(f"softmax, {kind}"))
        for kind in ("norms behind heads", "clamped", "ridge", "shortformer")
    ),
    lambda: analyses.what_is_copied(softmax(), PROMPT, TEXT, 1, 3, answer=17),
    # numbers
    lambda: verdicts(n_sequences=0),
    lambda: analyses.induction_heads(linear(), n_repeated=4, seed=-1),
    lambda: analyses.induction_verdicts(softmax(), n_repeated=30),
    lambda: verdicts(threshold=0.0),
    # the dual model
    lambda: dual(n_demonstrations=0),
    lambda: dual(kernel="landmark", n_features=10),
    lambda: dual(linear(), kernel="random"),
    *(lambda name=name: getattr(dual(), name) for name in ("weight", "inputs", "query")),
    *(lambda eta=eta: by_random_features().loss(eta) for eta in (0, math.nan)),
    lambda: dual().losses(-1),
    *(lambda delta=delta: by_random_features().bound(delta) for delta in (0, 2)),
    *(
        lambda changes=changes: dual(small_model(**changes))
        for changes in (
            dict(attn_scores_soft_cap=5.0),
            dict(attention_dir="bidirectional"),
            dict(attention_variant={"ridge": {"strength": 1.0}}),
            dict(attention_variant={"negative": {"k": 1, "beta": 0.1}}),
            dict(use_local_attn=True, window_size=5, attn_types=["local", "global"]),
        )
    ),
    lambda: dual_under("exact", method="random", n_features=8, verbose=False),
    lambda: dual_under("landmark"),
    *(lambda changes=changes: dual_layer(**changes) for changes in (dict(attn_only=True), dict(parallel_attn_mlp=True))),
    # a batch, before it starts
    *(functools.partial(batch, **given) for given in WORK),
    *(functools.partial(Resources, **given) for given in RESOURCES),
]


@pytest.mark.parametrize("call", REFUSED)
def test_is_refused(call, refuses):
    refuses("", call)
    assert linear().attached_kv_bias is None

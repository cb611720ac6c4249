"""Every bad argument that a public function may be given: a KVLensError, nothing written, and the models as they were."""

import functools
import math
import os
from pathlib import Path

import pytest
import torch
from kvlens.analyses.batch.runner import Input, run_batch
from kvlens.analyses.batch.work import Resources, Work
from tiny_text_model import PROMPT, TEXT, tiny_text_model

from kvlens import (
    KVLensError,
    analyses,
    carry_bias,
    convert_prompt,
    viz,
)
from kvlens.corpus import TokenWindows, build_docs_corpus, load_tokenizer, train_bpe_tokenizer
from kvlens.dual import DualModel
from kvlens.ops.feature_maps import draw_projections
from kvlens.ops.linear_attention import (
    chunked_linear_attention,
    naive_linear_attention,
    parallel_linear_attention,
    recurrent_linear_attention,
    retnet_decay,
)
from kvlens.tasks import make_task
from kvlens.training import build_model, find_recipe, score_heldout, train

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own

NAN = math.nan
FEW = dict(method="landmark", n_features=2, verbose=False, n_continuations=2, continuation_length=4)
LANDMARK = {
    "method": [5, None, "landmrk"],
    "n_features": [2.5, 0, -1, True, "3", NAN],
    "budget": [None, "best", 1],
    "reference": [5, "", [], torch.ones(3), torch.tensor([10**6])],
    "n_continuations": [1, 2.5, "3", None, True],
    "continuation_length": [1, 2.5, "x", None],
    "polish_steps": [-1, 1.5, "x", None, True],
    "texts_per_step": [0, 2.5, "x", None],
    "objective": [3, "kk", None],
    "keys": ["x", None],
    "fit": ["yes", 2, None],
    "random_feature_kind": [3, "orth"],
    "layer_by_layer": ["x", None],
    "seed": [-1, 1.5, 2**64, "x", None, True],
    "verbose": ["x", 3],
    "ratio": [0.5],
}
CONVERSION = {
    "initial": [3, "x"],
    "prepend_bos": ["yes", 3],
    "fwd_hooks": [5, ["a"], [("blocks.0.hook_resid_pre", 3)]],
    "detach": ["x"],
    "segment_length": [0, 1.5, "x", True],
    "on_progress": [3, "x"],
    "n_featurs": [1],
}
PROMPTS = [None, 5, "", [], ["a", ""], ["a", 3], torch.zeros(0), torch.ones(3), torch.tensor(3), torch.tensor([-1])]
DUAL = {
    "layer": [9, 1.5, "x", None],
    "head": [9, 0.0, []],
    "query_pos": [99, 1.0, "x"],
    "n_demonstrations": [0, 99, 1.5, "x"],
    "kernel": ["x", 3],
    "bias": ["x", None],
    "n_features": [0, 1.5, "x", True, -1],
    "seed": [-1, 1.5, 2**70, "x"],
    "tokens": [3, None, torch.ones(3), torch.zeros(0, dtype=torch.long), [1, 2]],
}
STEPS = [
    *(("loss", (v,)) for v in (0, NAN, "x", None)),
    *(("loss", (1.0, v)) for v in (NAN, "x")),
    *(("step", (v,)) for v in (0, -1, "x", NAN)),
    *(("losses", v) for v in (("x",), (1.5,), (2, 0), (2, "x"), (2, 1.0, NAN))),
    *(("minimize", (v,)) for v in (0, "x", None, NAN)),
    *(("bound", v) for v in ((0,), ("x",), (2,), (0.1, "x"), (0.1, None, 1.5), (0.1, None, -1), (0.1, None, 1, "x"))),
]
TASKS = {
    "vocab_size": [1, "x", 2.5, None, True],
    "length": [0, "x", []],
    "law": [5, "x", None],
}
TRAIN = {
    "loss": [3, "x"],
    "folder": [3, "a\0", "x" * 300, ""],
    "batch_size": [10**15, 1.5],
    "eval_sequences": [10**15],
    "stepz": [3],
    "progress": ["x"],
    "restart": ["x"],
    "betas": [3, (1,)],
    "learning_rate": [NAN],
}
EFFECTS = {"methods": [[], "zero", [3], ["zer"]], "parts": [[], ["bia"]], "references": [3], "by": ["heads", None]}
PATHS = [3, None, "", "a\0b", "x" * 300]
CONFIG = dict(n_layers=1, d_model=8, d_head=4, n_ctx=8, d_vocab=9, act_fn="gelu", device="cpu")


@functools.cache
def linear():
    return tiny_text_model()


@functools.cache
def softmax():
    return tiny_text_model(attention="softmax")


@functools.cache
def bias():
    return convert_prompt(linear(), PROMPT)


@functools.cache
def induction():
    return make_task("induction", vocab_size=16, length=8)


@functools.cache
def trained():
    return build_model(induction(), {"n_layers": 1, "d_model": 8, "d_head": 4})


def pairs(table):
    return [(name, value) for name, values in table.items() for value in values]


def dual(**given):
    return DualModel.from_head(**{"model": softmax(), "tokens": softmax().to_tokens(PROMPT)[0], "layer": 0, "head": 0, **given})


def drawn(size, generator, *split):
    return induction().sample(size, torch.Generator().manual_seed(0) if generator == "own" else generator, *split)


def heads():
    return analyses.bias_by_head(linear(), PROMPT, TEXT)


def arithmetic():
    return make_task("arithmetic", max_ops=2, modulus=5, n_names=6)


def bigrams():
    return make_task("bigrams", n_letters=9, n_triggers=2, length=12)


def windows(tokens=None):
    return TokenWindows(torch.arange(50) if tokens is None else tokens, 0)


def batch(**given):
    work = {name: value for name, value in given.items() if name not in ("prompts", "text")}
    source = Input(**{"prompts": Path(__file__), **{name: given[name] for name in ("prompts", "text") if name in given}})
    return run_batch(Work(**{"analysis": "bias_singular_values", "models": ("docs-linear",), **work}), source, "out.parquet")


def linear_attention(form, **given):
    shapes = dict(phi_q=(2, 7, 6, 4), phi_k=(2, 7, 3, 4), v=(2, 7, 3, 5), norm_q=(2, 7, 6, 4), norm_k=(2, 7, 3, 4))
    return form(**{name: torch.ones(given.get(name, shape)) for name, shape in shapes.items()})


FORMS = (naive_linear_attention, parallel_linear_attention, chunked_linear_attention, recurrent_linear_attention)
SHAPES = {
    "phi_q": [(2, 6, 6, 4), (2, 1, 6, 4), (1, 7, 6, 4), (2, 7, 5, 4), (2, 7, 6, 5), (2, 7, 24)],
    "phi_k": [(2, 6, 3, 4), (2, 1, 3, 4), (1, 7, 3, 4), (2, 7, 1, 4), (2, 7, 3, 1)],
    "v": [(2, 6, 3, 5), (1, 7, 3, 5), (2, 7, 1, 5), (2, 7, 0, 5)],
    "norm_q": [(1, 7, 6, 4), (2, 1, 6, 4), (2, 7, 1, 4), (336,)],
    "norm_k": [(2, 6, 3, 4), (2, 1, 3, 4), (1, 7, 3, 4), (2, 7, 1, 4)],
}
ODD = (None, 3, "x", torch.zeros(0), torch.tensor(3), torch.ones(2, 2), torch.tensor([math.nan]))
BATCH = {
    "analysis": [None, 3, ["x"], "x"],
    "models": [None, "docs-linear", [3], (), torch.zeros(0), ("docs-linear", "docs-linear")],
    "columns": [None, 3, "layer", [3], ["x"]],
    "options": [None, 3, ["x"], {"x": 1}],
    "dtype": [3, "int8", "x"],
    "device": [3, "cudda", "meta"],
    "folder": [3, "a\0b", "nowhere"],
    "prompts": [None, 3, "", "a\0b", "nowhere"],
    "text": [3, ["x"]],
}
RESOURCES = {
    "engine": [None, 3, "x"],
    "workers": [None, 0, 1.5, "x", True, 10**9],
    "gpus_per_worker": [None, -1, NAN, "x", 0.5],
    "threads": [0, 1.5, "x", 10**9],
    "prompts_per_job": [None, 0, 1.5, "x"],
}
CALLS = [
    *((lambda k=k, v=v, form=form: linear_attention(form, **{k: v})) for form in FORMS for k, v in pairs(SHAPES)),
    *((lambda v=v: retnet_decay(v)) for v in (None, 0, -1, 1.5, "x", 2**70)),
    *((lambda v=v: draw_projections(*v)) for v in ((0, 2, 3, "iid"), (1, -2, 3, "iid"), (1, 2, 1.5, "iid"), (1, 2, 3, "i"))),
    *((lambda v=v: make_task("ngrams", order=v)) for v in (1, 2.0, "x", 10**12, 2**70)),
    *((lambda v=v, t=t: t().new_model(v)) for t in (induction, arithmetic) for v in (None, 3, "x", {})),
    *((lambda v=v: make_task("regression").new_model(v)) for v in (None, 3, "x", {})),
    *((lambda v=v: make_task("regression").points_and_values(v)) for v in ODD),
    *((lambda v=v: make_task("facts").as_batch(v)) for v in (None, 3, "x", [3])),
    *((lambda v=v: make_task("facts").measure_more(v, 2, 1.0)) for v in (None, 3)),
    *((lambda v=v: make_task("text").sample(*v)) for v in ((0, None), (2, "x"), (2, torch.Generator(), "x"))),
    *((lambda v=v, t=t: t().tokens_as_text(v)) for t in (arithmetic, bigrams) for v in (*ODD, torch.tensor([-1]))),
    *((lambda v=v: bigrams().text_as_tokens(v)) for v in (None, 3, ["a"], "ü")),
    *((lambda v=v: bigrams().sample_with_prompt(*v)) for v in ((2, torch.Generator(), "x"), (2, None, 3), (2, 3, 3.5))),
    *((lambda v=v: arithmetic().question_length(v)) for v in (None, "x", 1.5)),
    *((lambda v=v: arithmetic().some_step_answers(*v)) for v in ((None, None, None), (torch.zeros(2, 3),) * 3)),
    *((lambda v=v: train_bpe_tokenizer(v)) for v in (None, 3, "x", [], [3])),
    *((lambda v=v: train_bpe_tokenizer(["a"], v)) for v in (None, 3, "x", 1e3, 10**12)),
    *((lambda v=v: load_tokenizer(v)) for v in (None, 3, "", "a\0b", "nowhere")),
    *((lambda v=v: build_docs_corpus(v)) for v in (None, 3, "numpy", [], ["x"], torch.zeros(0))),
    *((lambda v=v: build_docs_corpus(roots=v)) for v in (3, {"a": 3}, {"a": "nowhere"}, {"a": "a\0b"})),
    *((lambda v=v: windows(v)) for v in ODD if v is not None),
    *((lambda v=v: TokenWindows.from_texts(v, linear().tokenizer)) for v in (None, 3, "x", [], [3])),
    *((lambda v=v: TokenWindows.from_texts(["a"], v)) for v in (None, 3)),
    *((lambda v=v: windows().sample(*v, torch.Generator())) for v in ((0, 4), (-1, 4), (2, 1), (2, 99), (2.5, 4), ("x", 4))),
    *((lambda v=v: windows().consecutive(*v)) for v in ((1,), (99,), ("x",), (4, 0), (4, "x"))),
    *((lambda k=k, v=v: batch(**{k: v})) for k, v in pairs(BATCH)),
    *((lambda k=k, v=v: Resources(**{k: v})) for k, v in pairs(RESOURCES)),
    *((lambda k=k, v=v: convert_prompt(softmax(), PROMPT, **{**FEW, k: v})) for k, v in pairs(LANDMARK)),
    *((lambda k=k, v=v: convert_prompt(linear(), PROMPT, **{k: v})) for k, v in pairs(CONVERSION)),
    *((lambda v=v: convert_prompt(linear(), v)) for v in PROMPTS),
    *(
        (lambda v=v: convert_prompt(softmax(), PROMPT, method="landmark", ratio=v, verbose=False))
        for v in (0, -1, "x", True, NAN)
    ),
    *((lambda k=k, v=v: dual(**{"kernel": "random", k: v})) for k, v in pairs(DUAL)),
    *((lambda name=name, given=given: getattr(dual(), name)(*given)) for name, given in STEPS),
    *((lambda k=k, v=v: make_task("induction", **{k: v})) for k, v in pairs(TASKS)),
    *((lambda v=v: make_task(v)) for v in (None, 3, [], "inducton")),
    *((lambda v=v: find_recipe(v)) for v in (None, 3, [], "inducton")),
    *((lambda v=v: drawn(*v)) for v in ((0, "own"), (1.5, "own"), ("x", "own"), (10**15, "own"), (2, None), (2, "own", "x"))),
    *((lambda v=v: induction().heldout(*v)) for v in ((0,), ("x",), (2, -1), (2, "x"), (2, 2**70))),
    *((lambda v=v: build_model(induction(), v)) for v in (3, None, {"n_layer": 1}, {"n_layers": "x"})),
    *((lambda v=v: build_model(induction(), {}, device=v)) for v in ("meta", "cudda", [])),
    *((lambda k=k, v=v: train(trained(), induction(), **{"steps": 1, "progress": False, k: v})) for k, v in pairs(TRAIN)),
    *((lambda v=v: score_heldout(trained(), induction(), v)) for v in (0, -1, "x", 1.5)),
    *((lambda v=v: analyses.bias_by_head(linear(), PROMPT, TEXT, batch_size=v)) for v in (0, 1.5, "x", [])),
    *((lambda v=v: analyses.bias_by_head(linear(), PROMPT, TEXT, bias=v)) for v in (3, "x", [])),
    *((lambda v=v: analyses.bias_by_head(v, PROMPT, TEXT)) for v in (None, "docs-linear")),
    *((lambda v=v: analyses.dual_losses(softmax(), v)) for v in (None, 3, torch.ones(3))),
    *((lambda v=v: analyses.dual_losses(softmax(), PROMPT, n_demonstrations=v)) for v in (0, -1, 1.5, "x", 10**9)),
    *((lambda k=k, v=v: analyses.bias_effects(linear(), PROMPT, TEXT, **{k: v})) for k, v in pairs(EFFECTS)),
    *((lambda v=v: analyses.bias_positions(linear(), PROMPT, TEXT, at=v)) for v in (3, "x", [99], [0.5])),
    *((lambda v=v: analyses.induction_heads(linear(), n_repeated=4, **v)) for v in ({"seed": -1}, {"n_sequences": 2**60})),
    *((lambda v=v: analyses.prompt_effect(linear(), PROMPT, TEXT, readings=v)) for v in (3, {}, {"converted": 3})),
    *((lambda v=v: analyses.linked_shares(linear(), PROMPT, TEXT, colorings=v)) for v in (3, {"a": 3}, {3: torch.ones(2, 3)})),
    *((lambda v=v: carry_bias(linear(), bias(), v)) for v in ("x", -1, 2**70, 1.5)),
    *((lambda v=v: make_task("ngrams", table_seed=v)) for v in (2**70, -1, "x")),
    *((lambda v=v: viz.colored_tokens(["a", "b"], v)) for v in (3, "x", ["a", "b"], torch.ones(2, 2), [1 + 2j, 0], None)),
    *((lambda v=v: viz.attention_view(["a", "b"], v)) for v in (None, "x", torch.ones(2, 2), torch.ones(1, 2, 2) * 1j)),
    *((lambda v=v: viz.attention_view(["a", "b"], torch.ones(1, 2, 2), queries=v)) for v in (3, "x", [1, 0], [[0, 1]])),
    *((lambda v=v: viz.head_heatmap(torch.ones(2, 3) * v)) for v in (1j,)),
    *((lambda v=v: viz.head_heatmap(torch.ones(2, 3)).save_png("x.png", dpi=v)) for v in (0, -1, 10**9, "x")),
    *((lambda v=v: viz.head_heatmap(v, "ablation_kl")) for v in (None, 3, torch.zeros(3), torch.zeros(2, 2, 2), "x")),
    *((lambda v=v: viz.head_heatmap(heads(), v)) for v in ("x", 3)),
    *((lambda v=v: viz.contribution_bars(v, "x")) for v in (None, 3, "x")),
    *((lambda v=v: viz.error_table(v)) for v in (None, 3, "x", torch.zeros(2, 3))),
    *((lambda v=v: viz.generated_text(v)) for v in (None, 3, {}, "x", {"a": 3}, {3: "x"})),
    *((lambda v=v: viz.generated_text({"a": "b"}).save_html(v)) for v in PATHS),
]


@pytest.fixture(scope="module")
def empty_folder(tmp_path_factory):
    """One for all of them: each of many folders of a name takes a look at all before it."""
    return tmp_path_factory.mktemp("empty")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(empty_folder, monkeypatch):
    monkeypatch.chdir(empty_folder)


def test_the_list_is_long():
    assert len(CALLS) >= 150


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_is_refused_with_a_message(call):
    models = linear(), softmax()
    modes = [model.training for model in models]
    with pytest.raises(KVLensError) as refused:
        call()
    assert len(str(refused.value)) > 20
    assert not os.listdir(".")
    assert [model.training for model in models] == modes and all(model.attached_kv_bias is None for model in models)


def test_the_models_are_unchanged_by_the_whole_list():
    for kind, model in ((linear, tiny_text_model()), (softmax, tiny_text_model(attention="softmax"))):
        assert kind().fingerprint() == model.fingerprint() and torch.equal(kind()(TEXT), model(TEXT))

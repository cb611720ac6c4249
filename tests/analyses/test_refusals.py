"""What the analyses, the dual model and a batch refuse, and their words."""

import functools
import math
from pathlib import Path

import pytest
import torch
from analysis_models import tokens
from kvlens.analyses.batch.runner import Input, run_batch
from kvlens.analyses.batch.work import Resources, Work
from small_models import shared, sharp, small_model
from tiny_text_model import PROMPT as WORDS
from tiny_text_model import tiny_text_model

from kvlens import analyses, convert_prompt
from kvlens.dual import DualLayer, DualModel
from kvlens.model.streaming import run_in_segments

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own

PROMPT, OTHER, TEXT, SPAN = tokens(7), tokens(7, seed=5), tokens(5, seed=1), (2, 5)
LONGER = tokens(9)


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


def replaced(replacement, f=analyses.attribution_by_position):
    return f(linear(), PROMPT, TEXT, by=[SPAN], answer=5, replace_by=replacement)


def contributions(prompt=None, text=TEXT, **given):
    return analyses.layer_contributions(linear(), prompt, text, **given)


def errors(prompt=PROMPT, text=TEXT, **given):
    return analyses.conversion_error(linear(), prompt, text, **given)


def verdicts(**given):
    return analyses.induction_verdicts(linear(), **given)


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


def dual_figures(**given):
    return analyses.dual_losses(tiny_text_model(attention="softmax"), given.pop("tokens", WORDS), **given)


LETTERS = "batch_probes.letters:LETTERS"
WORK = [
    ("no analysis is called 'bias_by_haed'", dict(analysis="bias_by_haed")),
    ("did you mean 'bias_by_head'", dict(analysis="bias_by_haed")),
    ("there is no module 'batch_probes.lettres'", dict(analysis="batch_probes.lettres:LETTERS")),
    (
        "'ANALYSIS' of 'os.path' is no function with the decorator",
        dict(analysis="os.path:ANALYSIS"),
    ),
    ("it has LETTERS; did you mean 'LETTERS'", dict(analysis="batch_probes.letters:LETERS")),
    ("expected MODULE:FUNCTION", dict(analysis=".letters:LETTERS")),
    ("expected MODULE:FUNCTION", dict(analysis="batch_probes.letters:")),
    ("letters has no option 'uper'; it has upper, times; did you mean 'upper'", dict(options={"uper": True})),
    ("times must be a whole number, got True", dict(options={"times": True})),
    ("the model 'm' is given twice", dict(models=("m", "m"))),
    ("no model is given; name at least one", dict(models=())),
    ("did you mean 'docs-linear'", dict(models=("docs-liner",))),
    ("Work: models must be a tuple", dict(models="docs-linear")),
    ("Work: options must be a dict", dict(options=["x"])),
    ("dtype must be one of float32, float64, bfloat16, float16, got 'int8'", dict(dtype="int8")),
    ("device: 'meta' cannot be used here", dict(device="meta")),
    ("device: 'abacus' cannot be used here", dict(device="abacus")),
    ("folder: expected a path", dict(folder="a\0b")),
    ("folder: 'nowhere' is not a folder; give the one with the module of the analysis", dict(folder="nowhere")),
    ("prompts: letters needs them: a JSONL file, a text file or a folder", dict(prompts=None)),
    *(("prompts: expected a path", dict(prompts=x)) for x in (3, "", "a\0b")),
    ("prompts: cannot read nowhere: No such file or directory", dict(prompts="nowhere")),
]
RESOURCES = [
    ("engine must be one of processes, ray, got 'rays'; did you mean 'ray'", dict(engine="rays")),
    ("workers must be at least 1, got 0", dict(workers=0)),
    ("workers must be a whole number of at least 1, got True", dict(workers=True)),
    ("workers: at most", dict(workers=10**9)),
    ("threads must be at least 1", dict(threads=-1)),
    ("threads: at most", dict(threads=10**9)),
    ("gpus_per_worker must be at least 0, got -1", dict(gpus_per_worker=-1)),
    ("gpus_per_worker must be a number of at least 0, got nan", dict(gpus_per_worker=math.nan, engine="ray")),
    ("gpus_per_worker is for the engine ray; for processes, choose the device", dict(gpus_per_worker=0.5)),
]


def batch(**given):
    source = Input(given.pop("prompts", Path(__file__)))
    return run_batch(Work(**{"analysis": LETTERS, "models": ("docs-linear",), **given}), source, "out.parquet")


REFUSED = [
    # bias_effects
    ("methods must be a list of", lambda: effects(methods=["mode"])),
    ("by must be one of head, layer, model, got 'token'", lambda: effects(by="token")),
    ("give references=", lambda: effects(methods=["mean"])),
    ("that of a single prompt", lambda: effects(methods=["mean"], references=bias())),
    ("weights differs", lambda: effects(methods=["mean"], references=convert_prompt(sharp(seed=4), PROMPT[None]))),
    (
        "[6] under the references",
        lambda: effects(absolute, methods=["mean"], references=convert_prompt(absolute(), OTHER[None, :6])),
    ),
    ("have no shift state", lambda: effects(absolute, parts=["shift_state"])),
    ("give the prompt as a string or tokens", lambda: effects(methods=["baseline"])),
    ("text: expected a string or token ids", lambda: analyses.bias_effects(linear(), TEXT, bias())),
    # bias_by_head and bias_ablation
    ("removal 1 names layer 2, head 0; there are 2 layers of 5 heads", lambda: removed([[], [(2, 0)]])),
    ("removal 0 names layer 1, head 5", lambda: removed([[(1, 5)]])),
    ("batch of 2", lambda: removed([[]], lambda: bias(n_prompts=2))),
    ("weights differs", lambda: removed([[]], model=lambda: sharp(seed=4))),
    ("model must be a HookedKVTransformer", lambda: analyses.bias_by_head("docs-linear", PROMPT, TEXT)),
    # bias_positions, bias_decomposition, bias_singular_values, circuits
    ("by must be one of attended, source, got 'token'", lambda: positions(by="token")),
    ("at=5 lies outside the text, whose 5 positions", lambda: positions(at=[0, 5])),
    ("segment_length must be at least 1, got 0", lambda: positions(segment_length=0)),
    ("values are an MLP of mixed tokens", lambda: positions(variant(augmented=dict(values=True)), by="source")),
    *(
        ("their output cannot be split by prompt position", lambda parts=parts: positions(variant(**parts)))
        for parts in (dict(negative=dict(k=2, beta=0.3)), dict(ridge=dict(strength=0.1)))
    ),
    ("give answer=", lambda: decomposition(rival=3)),
    ("answer: expected a token id in 0..16", lambda: decomposition(answer=17)),
    ("no tokenizer", lambda: decomposition(answer="a")),
    ("batch of 2", lambda: analyses.bias_singular_values(linear(), bias(n_prompts=2))),
    ("second_prompt: the text is empty", lambda: analyses.circuits(linear(), PROMPT, PROMPT[:0])),
    ("a bias is attached", lambda: under_a_bias(analyses.circuits, PROMPT, OTHER)),
    ("run_in_segments: expected tokens [pos]; got tokens [1, 7]", lambda: run_in_segments(linear(), PROMPT[None], [])),
    *(
        ("needs the whole text at once", lambda model=model: run_in_segments(model(), PROMPT, [], segment_length=4))
        for model in (softmax, lambda: sharp(linear_attention_form="parallel"))
    ),
    # activation_patching
    ("this model has no 'b_kvs': it has b_kv, b_d, bias", lambda: patching(points=["b_kvs"])),
    (
        "it has b_kv, b_d, bias, shift_state, prompt, z_bias, k_shift_coef",
        lambda: patching(points="q_shift_coef"),
    ),
    ("one number per row, [1], ", lambda: patching(metric=lambda logits: logits[:, -1])),
    ("answer: expected a token id in 0..16", lambda: patching(answer=17)),
    ("one token has no next token", lambda: patching(answer=None, rival=None, text=TEXT[:1])),
    ("prompt: the text is empty", lambda: patching(prompt=PROMPT[:0])),
    ("position 7 under the clean prompt and at 4 under", lambda: patching(absolute, corrupted=tokens(4))),
    ("corrupted: expected the bias of one prompt, got a batch of 2", lambda: patching(corrupted=bias(n_prompts=2))),
    ("no 'b_d': it has bias, keys, values, z_bias (softmax attention", lambda: patching(softmax, points="b_d")),
    ("no 'keys': it has b_kv", lambda: patching(points="keys")),
    (
        "one bias has virtual_keys features, the other random",
        lambda: patching(softmax, corrupted=random_features()),
    ),
    # attribution
    ("<= 7", lambda: attribution(by=[(0, 8)])),
    ("overlap at 2", lambda: attribution(by=[(0, 3), (2, 5)])),
    ("start < stop", lambda: attribution(by=[(3, 3)])),
    ("no tokenizer", lambda: attribution(by="sentence")),
    ("did you mean 'sentence'", lambda: attribution(by="sentense")),
    ("d_vocab", lambda: attribution(by="token", answer=99)),
    ("at least one token", lambda: attribution(by="token", answer=PROMPT[:0])),
    ("the answer itself", lambda: attribution(by="token", answer=5, rival=5)),
    ("did you mean 'leave_one_out'", lambda: attribution(by="token", method="leave_one_outt")),
    ("a string or a Method", lambda: attribution(by="token", method=3)),
    ("positions", lambda: attribution(by="token", positions="open")),
    ("expected 3 tokens", lambda: replaced({SPAN: torch.tensor([1])})),
    ("(3, 6) is no unit; the units are (2, 5)", lambda: replaced({(3, 6): torch.tensor([1, 2, 3])})),
    ("is no unit", lambda: replaced({(0, 2): tokens(2)}, analyses.attribution_by_edge)),
    ("keeps no token", lambda: analyses.attribution_by_head(linear(), PROMPT, TEXT, by=[(0, 7)], answer=5, positions="closed")),
    ("n_confirmed", lambda: analyses.attribution_by_edge(linear(), PROMPT, TEXT, by=[SPAN], n_confirmed=-1)),
    ("a single layer with heads", lambda: analyses.attribution_by_edge(sharp(n_layers=1), PROMPT, TEXT, by=[SPAN])),
    # layer_contributions
    ("expected the bias of one prompt, got a batch of 2", lambda: contributions(bias(n_prompts=2))),
    ("token id in 0..16", lambda: contributions(tokens=[17])),
    ("prompt: token ids must lie in 0..16", lambda: contributions(torch.tensor([17]))),
    (
        "norm before it is added",
        lambda: analyses.layer_contributions.analysis.check_model(
            sharp(normalization_type="RMS", use_normalization_before_and_after=True)
        ),
    ),
    # prompts and texts
    ("prompt: expected a string or token ids [pos] or [1, pos], got shape [2, 2]", lambda: errors(tokens(4).reshape(2, 2))),
    ("prompt: this model has no tokenizer, so it cannot read 'ab'", lambda: errors("ab")),
    ("got list", lambda: errors([1, 2])),
    ("prompt: the text is empty", lambda: errors(PROMPT[:0])),
    ("text: token ids must lie in 0..16", lambda: errors(text=torch.tensor([17]))),
    ("batch of 3", lambda: errors(bias=bias(n_prompts=3))),
    ("prompt: the text is empty", lambda: analyses.head_details(linear(), PROMPT[:0], TEXT)),
    ("a bias is attached", lambda: under_a_bias(analyses.head_details, PROMPT, TEXT)),
    ("readings: expected a Reading of", lambda: analyses.prompt_effect(linear(), PROMPT, TEXT, readings={})),
    ("readings must be a dict or None", lambda: analyses.prompt_effect(linear(), PROMPT, TEXT, readings={"converted": 3})),
    ("colorings must be a dict or None", lambda: analyses.linked_shares(linear(), PROMPT, TEXT, colorings={"a": 3})),
    ("coloring", lambda: analyses.linked_shares(linear(), PROMPT, TEXT, colorings={3: torch.ones(2, 3)})),
    *(
        ("predicts only 3 classes", lambda name=name: getattr(analyses, name)(classifier(), PROMPT, TEXT))
        for name in ("bias_positions", "bias_by_head", "bias_decomposition", "bias_effects", "layer_contributions")
    ),
    # induction heads, composition
    ("n_sequences must be at least 1, got 0", lambda: verdicts(n_sequences=0)),
    ("n_sequences must be from 1 to 1048576", lambda: analyses.induction_heads(linear(), n_repeated=4, n_sequences=2**60)),
    ("seed must be at least 0, got -1", lambda: analyses.induction_heads(linear(), n_repeated=4, seed=-1)),
    ("n_repeated must be at least 2, got 1", lambda: verdicts(n_repeated=1)),
    ("take 60 positions and n_ctx is 41: repeat at most 20", lambda: analyses.induction_verdicts(softmax(), n_repeated=30)),
    ("threshold must be above 0 and at most 1, got 0.0", lambda: verdicts(threshold=0.0)),
    ("ratio must be above 0", lambda: verdicts(ratio=0.0)),
    ("token ids must lie in 0..16", lambda: verdicts(prompt=torch.tensor([[1, 17]]))),
    ("this model has none", lambda: verdicts(prepend_bos=True)),
    ("kinds must be a list", lambda: analyses.composition(linear(), kinds="QQ")),
    # the dual model
    ("layer 2 does not exist; there are 2", lambda: dual(layer=2)),
    ("head 5 does not exist; there are 5", lambda: dual(head=5)),
    ("query_pos 9 does not exist; there are 9", lambda: dual(query_pos=9)),
    ("no demonstrations", lambda: dual(query_pos=0)),
    ("no demonstrations", lambda: dual(n_demonstrations=0)),
    ("stands before its 4 demonstrations", lambda: dual(query_pos=2, n_demonstrations=4)),
    ("number of tokens", lambda: dual(n_demonstrations=-1)),
    ("did you mean 'exact'", lambda: dual(kernel="exakt")),
    ("bias must be one of initial, demonstrations", lambda: dual(bias="first")),
    ("1 to 9", lambda: dual(kernel="landmark", n_features=10)),
    ("n_features must be at least 1, got 0", lambda: by_random_features(n_features=0)),
    ("seed must be at least 0, got -1", lambda: by_random_features(seed=-1)),
    ("[pos]", lambda: dual(tokens=LONGER[None])),
    ("tokens must be integers (int64 or int32), got torch.float32", lambda: dual(tokens=torch.ones(3))),
    ("the text is empty: give at least one token", lambda: dual(tokens=LONGER[:0])),
    ("linear attention has its own features", lambda: dual(linear(), kernel="random")),
    *(("no finite features", lambda name=name: getattr(dual(), name)) for name in ("weight", "inputs", "query")),
    ("eta, the learning rate, must be above 0, got 0", lambda: by_random_features().loss(0)),
    ("eta, the learning rate, must be above 0, got -1", lambda: by_random_features().step(-1)),
    ("eta must be a number, got nan", lambda: by_random_features().loss(math.nan)),
    ("alpha must be a number, got nan", lambda: by_random_features().loss(1.0, math.nan)),
    ("n_steps must be at least 0, got -1", lambda: dual().losses(-1)),
    ("minimize: alpha must be above 0, got 0.0", lambda: by_random_features().minimize(0.0)),
    ("delta must be above 0 and below 1, got 0", lambda: by_random_features().bound(0)),
    ("delta must be above 0 and below 1, got 2", lambda: by_random_features().bound(2)),
    ("n_negative must be at least 0, got -1", lambda: by_random_features().bound(0.1, -1)),
    ("1 to 8", lambda: dual(linear()).bound(n_negative=9)),
    # attention without a dual model
    ("soft-capped", lambda: dual(small_model(attn_scores_soft_cap=5.0))),
    ("bidirectional", lambda: dual(small_model(attention_dir="bidirectional"))),
    ("a different loss", lambda: dual(small_model(attention_variant={"ridge": {"strength": 1.0}}))),
    ("a different loss", lambda: dual(small_model(attention_variant={"negative": {"k": 1, "beta": 0.1}}))),
    ("local windows", lambda: dual(small_model(use_local_attn=True, window_size=5, attn_types=["local", "global"]))),
    ("virtual keys have them", lambda: dual_under("exact", method="random", n_features=8, verbose=False)),
    ("use kernel='exact'", lambda: dual_under("landmark")),
    # layers
    ("no MLPs", lambda: dual_layer(attn_only=True)),
    ("in parallel with the attention", lambda: dual_layer(parallel_attn_mlp=True)),
    ("norms after attention", lambda: dual_layer(positional_embedding_type="rotary", original_architecture="Olmo2ForCausalLM")),
    # analyses of it
    ("n_demonstrations must be at least 1 (or None), got 0", lambda: dual_figures(n_demonstrations=0)),
    ("comes after 1000000000 demonstrations; give a longer text", lambda: dual_figures(n_demonstrations=10**9)),
    ("expected a string or token ids [pos] or [1, pos], got NoneType", lambda: dual_figures(tokens=None)),
    ("tokens must be integers (int64 or int32), got torch.float32", lambda: dual_figures(tokens=torch.ones(3))),
    ("does not exist", lambda: analyses.dual_demonstrations(softmax(), LONGER, query_pos=9)),
    ("delta must be above 0 and below 1", lambda: analyses.dual_bound(linear(), LONGER, delta=1.5)),
    # a batch, before it starts
    *((words, functools.partial(batch, **given)) for words, given in WORK),
    *((words, functools.partial(Resources, **given)) for words, given in RESOURCES),
    ("Input: text must be a string or None, got 3", lambda: Input("p.jsonl", 3)),
]


@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
def test_is_refused(words, call, refuses):
    refuses(words, call)
    assert linear().attached_kv_bias is None

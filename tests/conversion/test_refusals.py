"""What the conversion of a prompt refuses, and its words."""

import functools
import math

import pytest
import torch
from small_models import linear_model
from tiny_text_model import PROMPT, TEXT, linear, softmax, tiny_text_model

from kvlens import carry_bias, convert_prompt
from kvlens.conversion import H2O, KVzip, Landmark, Learned, SnapKV, Taylor

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own

FEW = dict(method="landmark", verbose=False, n_continuations=2, continuation_length=4)


def landmark(**options):
    return convert_prompt(softmax(), PROMPT, **{**FEW, "n_features": 2, **options})


def convert(prompt=PROMPT, **options):
    return convert_prompt(linear(), prompt, **options)


def carried(n):
    return carry_bias(linear(), convert(), n)


LANDMARK = [
    ("method must be a string or a ConversionMethod, got None", dict(method=None)),
    ("got 'landmrk'; did you mean 'landmark'?", dict(method="landmrk")),
    ("n_keys must be at least 1, got 0", dict(n_features=0)),
    ("n_keys must be a whole number from 1 to 16777216 or None, got 2.5", dict(n_features=2.5)),
    ("budget must be one of logits, equal", dict(budget="best")),
    ("got 5", dict(reference=5)),
    ("reference: it has no text; give at least one", dict(reference=[])),
    ("reference: the tokenizer finds no tokens in ''", dict(reference="")),
    ("tokens must be integers (int64 or int32), got torch.float32", dict(reference=torch.ones(3))),
    ("token ids must lie in 0..276 (d_vocab=277)", dict(reference=torch.tensor([10**6]))),
    ("n_continuations must be at least 2, got 1", dict(n_continuations=1)),
    ("continuation_length must be at least 2, got 1", dict(continuation_length=1)),
    ("polish_steps must be at least 0, got -1", dict(polish_steps=-1)),
    ("texts_per_step must be at least 1, got 0", dict(texts_per_step=0)),
    ("objective must be one of logits, kl, got 'kk'; did you mean 'kl'?", dict(objective="kk")),
    ("fitted must be True or False", dict(fit="yes")),
    ("seed must be at least 0, got -1", dict(seed=-1)),
    ("seed must be from 0 to 2**63 - 1", dict(seed=2**64)),
    ("give n_keys or ratio, not both", dict(ratio=0.5)),
    ("ratio must be above 0 and at most 1, got 0", dict(ratio=0, n_features=None)),
    ("ratio must be a number above 0 and at most 1 or None, got nan", dict(ratio=math.nan, n_features=None)),
]
OF_METHODS = [
    ("method=\"landmark\" has no option 'n_feature'; did you mean 'n_features'?; it has", dict(method="landmark", n_feature=3)),
    ("method=\"exact\" has no option 'seed'; it has none", dict(seed=1)),
    ("n_features and n_keys are the same option: give one of them", dict(method="landmark", n_keys=3, n_features=3)),
    ("method must be a string or a ConversionMethod, got <class", dict(method=Landmark)),
    ("seed: options of a method belong into Landmark(", dict(method=Landmark(n_keys=3), seed=1)),
    ("'prepend_boss'; did you mean 'prepend_bos'", dict(prepend_boss=True)),
]
CONVERT = [
    ("initial must be a KVBias or None, got 3", dict(initial=3)),
    ("prepend_bos must be True or False or None, got 'yes'", dict(prepend_bos="yes")),
    ("fwd_hooks must be a list of pairs", dict(fwd_hooks=[("blocks.0.hook_resid_pre", 3)])),
    ("segment_length must be at least 1, got 0", dict(segment_length=0)),
    ("always exact and has no options; did you mean 'initial'?", dict(initail=None)),
    *(("expected a string, a list of strings, or a tensor of token ids", dict(prompt=x)) for x in (None, 5, [], ["a", 3])),
    *(("the tokenizer finds no tokens in ''", dict(prompt=x)) for x in ("", ["a", ""])),
    ("the text is empty: give at least one token", dict(prompt=torch.zeros(0, dtype=torch.long))),
    ("tokens must be integers (int64 or int32), got torch.float32", dict(prompt=torch.ones(3))),
    ("expected tokens [pos] or [batch, pos], got shape []", dict(prompt=torch.tensor(3))),
    ("expected tokens [pos] or [batch, pos], got shape [1, 1, 1]", dict(prompt=torch.ones(1, 1, 1))),
    ("token ids must lie in 0..276 (d_vocab=277), got -1..-1", dict(prompt=torch.tensor([-1]))),
]
REFUSED = [
    *((words, functools.partial(landmark, **options)) for words, options in LANDMARK),
    *((words, functools.partial(convert_prompt, softmax(), PROMPT, **options)) for words, options in OF_METHODS),
    *((words, functools.partial(convert, **options)) for words, options in CONVERT),
    ("Landmark: budget must be one of logits, equal, got 'logit'; did", lambda: Landmark(n_keys=3, budget="logit")),
    ("Landmark: needs n_keys (or n_features), the keys per key-value head, or ratio", lambda: Landmark()),
    ("H2O: needs n_keys", lambda: H2O()),
    ("give n_keys or ratio, not both", lambda: KVzip(n_keys=3, ratio=0.5)),
    ("SnapKV: kernel_size must be odd, got 4", lambda: SnapKV(n_keys=3, kernel_size=4)),
    ("Learned: n_features must be at least 1", lambda: Learned(n_features=0)),
    ("Taylor: n_continuations must be at least 2", lambda: Taylor(n_continuations=1)),
    ("prompt: this model has no tokenizer, so it cannot read strings", lambda: convert_prompt(linear_model(), "some text")),
    ("carry_bias: n_tokens must be from 0 to 16777216", lambda: carried(2**70)),
    *(("carry_bias: n_tokens must be", lambda n=n: carried(n)) for n in ("x", -1, 1.5)),
]


@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
def test_is_refused(words, call, refuses):
    refuses(words, call)
    assert all(model.attached_kv_bias is None for model in (linear(), softmax()))


def test_the_models_are_as_they_were():
    for model, fresh in ((linear(), tiny_text_model()), (softmax(), tiny_text_model(attention="softmax"))):
        assert model.fingerprint() == fresh.fingerprint() and torch.equal(model(TEXT), fresh(TEXT))

"""What the dual model refuses, and its words."""

import functools
import math

import pytest
import torch
from small_models import shared, small_model
from tiny_text_model import PROMPT, tiny_text_model

from kvlens import convert_prompt
from kvlens.analyses import dual_bound, dual_demonstrations, dual_losses
from kvlens.dual import DualLayer, DualModel

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own

TEXT = torch.randint(0, 17, (9,), generator=torch.Generator().manual_seed(0))


softmax = functools.partial(shared, "softmax, learned", gain=1)
linear = functools.partial(shared, gain=1)


def dual(model=None, tokens=TEXT, layer=0, head=0, **given):
    return DualModel.from_head(model or softmax(), tokens, layer, head, **given)


def random(**given):
    return dual(kernel="random", **given)


def under(kernel, **options):
    with softmax().kv_bias(convert_prompt(softmax(), TEXT, **options)):
        dual(tokens=TEXT[:5], kernel=kernel)


def layer(**changes):
    return DualLayer.from_layer(small_model(act_fn="relu", **changes), TEXT, 0, 0)


def figures(**given):
    return dual_losses(tiny_text_model(attention="softmax"), given.pop("tokens", PROMPT), **given)


REFUSED = [
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
    ("n_features must be at least 1, got 0", lambda: random(n_features=0)),
    ("seed must be at least 0, got -1", lambda: random(seed=-1)),
    ("[pos]", lambda: dual(tokens=TEXT[None])),
    ("tokens must be integers (int64 or int32), got torch.float32", lambda: dual(tokens=torch.ones(3))),
    ("the text is empty: give at least one token", lambda: dual(tokens=TEXT[:0])),
    ("linear attention has its own features", lambda: dual(linear(), kernel="random")),
    *(("no finite features", lambda name=name: getattr(dual(), name)) for name in ("weight", "inputs", "query")),
    ("eta, the learning rate, must be above 0, got 0", lambda: random().loss(0)),
    ("eta, the learning rate, must be above 0, got -1", lambda: random().step(-1)),
    ("eta must be a number, got nan", lambda: random().loss(math.nan)),
    ("alpha must be a number, got nan", lambda: random().loss(1.0, math.nan)),
    ("n_steps must be at least 0, got -1", lambda: dual().losses(-1)),
    ("minimize: alpha must be above 0, got 0.0", lambda: random().minimize(0.0)),
    ("delta must be above 0 and below 1, got 0", lambda: random().bound(0)),
    ("delta must be above 0 and below 1, got 2", lambda: random().bound(2)),
    ("n_negative must be at least 0, got -1", lambda: random().bound(0.1, None, -1)),
    ("1 to 8", lambda: dual(linear()).bound(n_negative=9)),
    # attention without a dual model
    ("soft-capped", lambda: dual(small_model(attn_scores_soft_cap=5.0))),
    ("bidirectional", lambda: dual(small_model(attention_dir="bidirectional"))),
    ("a different loss", lambda: dual(small_model(attention_variant={"ridge": {"strength": 1.0}}))),
    ("a different loss", lambda: dual(small_model(attention_variant={"negative": {"k": 1, "beta": 0.1}}))),
    ("local windows", lambda: dual(small_model(use_local_attn=True, window_size=5, attn_types=["local", "global"]))),
    ("virtual keys have them", lambda: under("exact", method="random", n_features=8, verbose=False)),
    ("use kernel='exact'", lambda: under("landmark")),
    # layers
    ("no MLPs", lambda: layer(attn_only=True)),
    ("in parallel with the attention", lambda: layer(parallel_attn_mlp=True)),
    ("norms after attention", lambda: layer(positional_embedding_type="rotary", original_architecture="Olmo2ForCausalLM")),
    # analyses
    ("n_demonstrations must be at least 1 (or None), got 0", lambda: figures(n_demonstrations=0)),
    ("comes after 1000000000 demonstrations; give a longer text", lambda: figures(n_demonstrations=10**9)),
    ("expected a string or token ids [pos] or [1, pos], got NoneType", lambda: figures(tokens=None)),
    ("tokens must be integers (int64 or int32), got torch.float32", lambda: figures(tokens=torch.ones(3))),
    ("does not exist", lambda: dual_demonstrations(softmax(), TEXT, query_pos=9)),
    ("delta must be above 0 and below 1", lambda: dual_bound(linear(), TEXT, delta=1.5)),
]


@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
def test_is_refused(words, call, refuses):
    refuses(words, call)

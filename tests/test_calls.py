"""Calls of a model with arguments of wrong kinds: an error of kvlens' own, or the pass, on every front end."""

import numpy as np
import pytest
import torch
from tiny_text_model import tiny_text_model
from transformers import GPT2Config, GPT2LMHeadModel

from kvlens import KVLensError, KVTransformerBridge


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
def test_a_call_with_anything_runs_or_says_what_was_expected(method, kind):
    """432 calls of each model. Of 320 such calls 23 raised other errors, and the bridge let an unknown argument pass."""
    model, refusals, names = MODELS[kind](), [], CALLS[method].split()
    for name in names:
        for value in VALUES:
            tokens = () if name == "input" else (TOKENS,)
            try:
                getattr(model, method)(*tokens, **{name: value})
            except KVLensError as error:
                refusals.append(str(error))
            assert not any(point.has_hooks() for point in model.hook_dict.values())
    assert len(refusals) > 0.7 * len(names) * len(VALUES) and min(map(len, refusals)) > 20


def said(call):
    with pytest.raises(KVLensError) as raised:
        call()
    return str(raised.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
def test_the_error_names_the_argument_and_what_it_takes(kind):
    model, name = MODELS[kind](), type(MODELS[kind]()).__name__
    pairs = f"{name}.run_with_hooks: fwd_hooks must be a list of pairs, got ['hook_embed']"
    assert said(lambda: model.run_with_hooks(TOKENS, fwd_hooks=["hook_embed"])) == pairs
    filters = "names_filter must be a string, a function, a list of strings or None, got 3"
    assert said(lambda: model.run_with_cache(TOKENS, names_filter=3)) == f"{name}.run_with_cache: {filters}"
    assert "stop_at_layer must be a whole number or None, got 1.5" in said(lambda: model(TOKENS, stop_at_layer=1.5))
    assert "no argument is called 'atention_mask'; did you mean 'attention_mask'?" in said(
        lambda: model(TOKENS, atention_mask=torch.ones_like(TOKENS))
    )
    assert "attention_mask must be a tensor [1, 5]" in said(lambda: model(TOKENS, attention_mask=torch.ones(2, 3)))
    assert "pass return_type='loss'" in said(lambda: model.run_with_cache(TOKENS, incl_bwd=True))
    assert "'nowhere' cannot be used here" in said(lambda: model.run_with_cache(TOKENS, device="nowhere"))
    assert "expected the stream, floating-point numbers [batch, pos, " in said(lambda: model(TOKENS, start_at_layer=1))
    assert "token ids must lie in 0.." in said(lambda: model(TOKENS + 100_000))


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


def test_a_bridge_without_a_tokenizer_asks_for_tokens():
    model = bridge()
    for call in (model, model.run_with_cache, model.run_with_hooks):
        assert "this model has no tokenizer: give token ids" in said(lambda call=call: call("a text"))

"""Calls of a model with arguments of wrong kinds leave no hook behind, and no misspelt mask is left out, on every front end."""

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


def said(call):
    with pytest.raises(KVLensError) as raised:
        call()
    return str(raised.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
def test_the_error_names_the_argument_and_what_it_takes(kind):
    model = MODELS[kind]()
    if kind == "bridge":  # Transformers would leave it out
        assert "no argument is called 'atention_mask'; did you mean 'attention_mask'?" in said(
            lambda: model(TOKENS, atention_mask=torch.ones_like(TOKENS))
        )
    assert "attention_mask must be a tensor [1, 5]" in said(lambda: model(TOKENS, attention_mask=torch.ones(2, 3)))
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

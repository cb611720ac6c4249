"""Patching a softmax prompt, head by head: held against plain TransformerLens hooks on [prompt; text], and the scale's ends."""

import numpy as np
import pytest
import torch
from analysis_models import SOFTMAX, softmax_model, tokens
from kvlens.analyses.bias.patching import activation_patching
from kvlens.analyses.declaration import Record

from kvlens import HookedKVTransformer, KVLensError, convert_prompt

CLEAN, CORRUPTED, TEXT = tokens(7), tokens(7, seed=5), tokens(4, seed=1)
ANSWER, RIVAL = 3, 11


def patching(model, **changes):
    arguments = dict(prompt=CLEAN, corrupted=CORRUPTED, text=TEXT, answer=ANSWER, rival=RIVAL)
    return activation_patching(model, **{**arguments, **changes})


def metric(logits) -> float:
    return float(logits[0, -1, ANSWER] - logits[0, -1, RIVAL])


@pytest.mark.parametrize("name", SOFTMAX)
def test_everything_gives_the_clean_run_and_nothing_the_corrupted_one(name):
    model = softmax_model(name)
    frame = patching(model)
    shift = ["shift_state", "prompt", "z_bias", "k_shift_coef", "v_shift_coef", "q_shift_coef"]
    assert frame["point"].unique().tolist() == [
        "bias",
        "keys",
        "values",
        *(["z_bias"] if model.cfg.kv_shift is None else shift),
    ]
    rows = frame.set_index(["point", "layer", "head"])["recovered"]
    assert rows["bias" if model.cfg.kv_shift is None else "prompt", -1, -1] == pytest.approx(1, abs=1e-10)
    clean, corrupted = (metric(model(torch.cat([x, TEXT])[None])) for x in (CLEAN, CORRUPTED))
    assert frame["clean_metric"].iloc[0] == pytest.approx(clean, rel=1e-10)
    assert frame["corrupted_metric"].iloc[0] == pytest.approx(corrupted, rel=1e-10)
    itself = patching(model, corrupted=CLEAN, points=["bias", "keys", "values", "z_bias"])
    np.testing.assert_allclose(itself["metric"], clean, rtol=1e-10)


def test_values_are_the_same_alone_and_in_any_batch():
    """They replace b_KV in each row, and leave b_D as it is."""
    model = HookedKVTransformer.from_zoo("docs-gpt2")
    whole = patching(model, points=["keys", "values"]).query("point == 'values'")["metric"]
    for size in (None, 7):
        alone = patching(model, points="values", batch_size=size)["metric"]
        np.testing.assert_allclose(alone, whole, rtol=0, atol=1e-4)  # logits of about 10, some 80 float32 sums


@pytest.mark.parametrize("name", ["learned positions", "rotary, grouped", "alibi"])
def test_the_last_layers_keys_and_values_are_those_of_transformer_lens(name):
    """No later layer reads the prompt's stream there, so patching hook_k and hook_v is equivalent."""
    model = softmax_model(name)
    frame = patching(model, points=["bias", "keys", "values"]).set_index(["point", "layer", "head"])["metric"]
    _, cache = model.run_with_cache(torch.cat([CLEAN, TEXT])[None])
    whole, n_kv = torch.cat([CORRUPTED, TEXT])[None], model.cfg.n_kv_heads
    group = model.cfg.n_heads // n_kv

    def take(x, hook, head):
        x = x.clone()
        x[:, :7, head] = cache[hook.name][:, :7, head]
        return x

    for point, hooked in {"bias": "kv", "keys": "k", "values": "v"}.items():
        by_hand = []
        for head in range(n_kv):
            hooks = [(f"blocks.1.attn.hook_{x}", lambda x, hook, head=head: take(x, hook, head)) for x in hooked]
            by_hand.append(metric(model.run_with_hooks(whole, fwd_hooks=hooks)))
        if group == 1:
            assert [frame[point, 1, head] for head in range(n_kv)] == pytest.approx(by_hand, rel=1e-9)
        all_heads = [(f"blocks.1.attn.hook_{x}", lambda x, hook: take(x, hook, slice(None))) for x in hooked]
        assert frame[point, 1, -1] == pytest.approx(metric(model.run_with_hooks(whole, fwd_hooks=all_heads)), rel=1e-9)


@pytest.mark.parametrize("name", ["learned positions", "rotary, grouped"])
@pytest.mark.parametrize("point", ["bias", "keys", "values"])
def test_every_head_against_a_softmax_by_hand(name, point):
    """The corrupted run, with one head's output at the text recomputed from the clean prompt's keys or values, or both."""
    model = softmax_model(name)
    caches = {x: model.run_with_cache(torch.cat([prompt, TEXT])[None])[1] for x, prompt in (("a", CLEAN), ("b", CORRUPTED))}
    key = "hook_k" if model.cfg.positional_embedding_type == "standard" else "hook_rot_k"
    group, scale = model.cfg.n_heads // model.cfg.n_kv_heads, float(model.blocks[0].attn.attn_scale)
    frame = patching(model, points=point).set_index(["layer", "head"])["metric"]
    keys_from, values_from = {"bias": "aa", "keys": "ab", "values": "ba"}[point]
    seen = {}

    def watch(x, hook):
        seen[hook.name.rpartition(".")[2]] = x

    for layer in range(2):
        at = f"blocks.{layer}.attn."
        for head in range(model.cfg.n_heads):

            def recomputed(z, hook, head=head, at=at):
                k, v = (seen[x][0, :, head // group].clone() for x in (key, "hook_v"))
                k[:7] = caches[keys_from][at + key][0, :7, head // group]
                v[:7] = caches[values_from][at + "hook_v"][0, :7, head // group]
                q = seen["hook_q" if key == "hook_k" else "hook_rot_q"][0, 7:, head]
                scores = (q @ k.T / scale).masked_fill(~torch.ones(4, 11, dtype=torch.bool).tril(7), -torch.inf)
                z = z.clone()
                z[0, 7:, head] = scores.softmax(dim=-1) @ v
                return z

            names = [key, "hook_v", "hook_q" if key == "hook_k" else "hook_rot_q"]
            hooks = [*((at + name, watch) for name in names), (at + "hook_z", recomputed)]
            logits = model.run_with_hooks(torch.cat([CORRUPTED, TEXT])[None], fwd_hooks=hooks)
            assert frame[layer, head] == pytest.approx(metric(logits), rel=1e-9)


def test_biases_of_fewer_keys_and_of_features_without_a_prompt():
    model = softmax_model("learned positions")
    for options in (
        dict(method="landmark", n_features=3, verbose=False, n_continuations=2, continuation_length=3),
        dict(method="random", n_features=8),
    ):
        clean, corrupted = (convert_prompt(model, x, **options) for x in (CLEAN, CORRUPTED))
        frame = patching(model, prompt=clean, corrupted=corrupted)
        assert frame["point"].unique().tolist() == ["bias", "z_bias"]
        assert frame.set_index(["point", "layer", "head"])["recovered"]["bias", -1, -1] == pytest.approx(1, abs=1e-9)
        with model.kv_bias(clean):
            assert frame["clean_metric"].iloc[0] == pytest.approx(metric(model(TEXT[None])), rel=1e-9)
        with pytest.raises(KVLensError, match="only if the two prompts pair token by token"):
            patching(model, prompt=clean, corrupted=corrupted, points=["keys"])


def test_a_batch_of_records_takes_softmax_models():
    model = softmax_model("learned positions")
    fields = {"corrupted": " ".join(map(str, CORRUPTED.tolist())), "answer": ANSWER, "rival": RIVAL}
    record = Record("a", " ".join(map(str, CLEAN.tolist())), " ".join(map(str, TEXT.tolist())), fields)
    activation_patching.analysis.check_model(model)
    frame = activation_patching.analysis.run(model, record, points="")
    np.testing.assert_allclose(frame["metric"], patching(model)["metric"], rtol=1e-10)
    assert len(frame) == activation_patching.analysis.n_interventions(model, points=None)

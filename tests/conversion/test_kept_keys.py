"""Methods that keep some keys unchanged: the selected keys, against TransformerLens' own attention patterns."""

import pytest
import torch
from small_models import sharp, tokens

from kvlens import KVLensError, convert_prompt
from kvlens.conversion import H2O, ExpectedAttention, KVzip, SnapKV, StreamingLLM

N, KEPT = 14, 6
FEW = dict(n_continuations=2, continuation_length=4, n_held_out=0)
METHODS = [
    StreamingLLM(n_keys=KEPT, **FEW),
    H2O(n_keys=KEPT, **FEW),
    SnapKV(n_keys=KEPT, **FEW),
    ExpectedAttention(n_keys=KEPT, **FEW),
    KVzip(n_keys=KEPT, **FEW),
]
NAMES = [method.name for method in METHODS]


def model(**changes):
    return sharp("softmax, rotary, grouped", gain=1, n_heads=4, n_key_value_heads=2, d_head=8, d_model=32, **changes)


def kept_positions(bias) -> list[list[set[int]]]:
    """By layer and key-value head; the bias of one prompt."""
    distance, on = bias.features.distance, bias.b_D != 0
    return [[{N - int(d) for d in distance[i, g][on[i, g]]} for g in range(on.shape[1])] for i in range(on.shape[0])]


def patterns(it, text) -> list[torch.Tensor]:
    """[head, query, key] of every layer."""
    _, cache = it.run_with_cache(text)
    return [cache["pattern", layer][0] for layer in range(it.cfg.n_layers)]


def by_group(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(0, (2, -1))


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_keys_are_kept_as_they_are(method):
    it, prompt = model(), tokens(1, N)[0]
    bias, exact = convert_prompt(it, prompt, method=method, verbose=False), convert_prompt(it, prompt)
    on = bias.b_D != 0
    assert bool(((bias.b_D == 1) | ~on).all())
    assert int(on.sum()) == KEPT * on.shape[0] * on.shape[1] or method.name == "kvzip"
    assert float(on.sum(dim=-1).double().mean()) == KEPT
    place = (N - bias.features.distance)[..., None].expand_as(bias.b_KV)
    assert torch.equal(bias.b_KV, exact.b_KV.gather(2, place) * on[..., None])
    assert torch.equal(bias.features.keys, exact.features.keys.gather(2, place))


def test_streaming_llm_keeps_the_first_and_the_last():
    bias = convert_prompt(model(), tokens(1, N)[0], method=METHODS[0], verbose=False)
    assert all(kept == {0, 1, 2, 3, N - 2, N - 1} for layer in kept_positions(bias) for kept in layer)


def test_h2o_keeps_what_the_prompts_queries_attend_to():
    it, prompt = model(), tokens(1, N)[0]
    kept = kept_positions(convert_prompt(it, prompt, method=METHODS[1], verbose=False))
    for layer, pattern in enumerate(patterns(it, prompt)):
        for g, received in enumerate(by_group(pattern.sum(dim=1)).sum(dim=1)):
            heavy = received[: N - 3].topk(KEPT - 3).indices.tolist()
            assert kept[layer][g] == {*heavy, N - 3, N - 2, N - 1}


def test_snapkv_keeps_what_the_last_queries_attend_to():
    it, prompt = model(), tokens(1, N)[0]
    kept = kept_positions(convert_prompt(it, prompt, method=METHODS[2], verbose=False))
    for layer, pattern in enumerate(patterns(it, prompt)):
        votes = by_group(pattern[:, -3:, :-3].sum(dim=1)).sum(dim=1)
        padded = torch.nn.functional.pad(votes, (2, 2))
        pooled = torch.stack([padded[:, j : j + 5].mean(dim=1) for j in range(N - 3)], dim=1)
        for g in range(2):
            assert kept[layer][g] == {*pooled[g].topk(KEPT - 3).indices.tolist(), N - 3, N - 2, N - 1}


def test_kvzip_keeps_what_repeating_the_prompt_attends_to():
    it, prompt = model(), tokens(1, N)[0]
    kept = kept_positions(convert_prompt(it, prompt, method=METHODS[4], verbose=False))
    largest = torch.stack([by_group(each[:, N:, :N].amax(dim=1)).amax(dim=1) for each in patterns(it, prompt.repeat(2))])
    largest[..., :4] = 9.0
    threshold = largest.flatten().topk(KEPT * 4).values.min()
    for layer in range(2):
        for g in range(2):
            assert kept[layer][g] == set((largest[layer, g] >= threshold).nonzero().flatten().tolist())


def test_expected_attention_is_that_of_queries_rotated_on():
    """From the projections before RoPE, rotated by TransformerLens to each position that follows."""
    it, prompt = model(n_ctx=40), tokens(1, N)[0]
    kept = kept_positions(convert_prompt(it, prompt, method=METHODS[3], verbose=False))
    _, cache = it.run_with_cache(prompt)
    for layer, block in enumerate(it.blocks):
        q = cache["q", layer][0, 4:]
        turned = torch.stack([block.attn.apply_rotary(q[:, None], position)[:, 0] for position in range(N, 40)])
        mean_rotation = turned.mean(dim=0)  # [query, head, d]
        mean = mean_rotation.mean(dim=0)
        centered = mean_rotation - mean
        covariance = torch.einsum("ihd,ihe->hde", centered, centered) / len(q)
        keys, values = cache["rot_k", layer][0, 4:], cache["v", layer][0, 4:]
        for g in range(2):
            share = torch.zeros(N - 4, dtype=torch.float64)
            for h in (2 * g, 2 * g + 1):
                scale = block.attn.attn_scale
                variance = torch.einsum("jd,de,je->j", keys[:, g], covariance[h], keys[:, g])
                logs = keys[:, g] @ mean[h] / scale + variance / (2 * scale**2)
                share += logs.softmax(dim=0)
            worth = share * values[:, g].norm(dim=-1)
            assert kept[layer][g] == {0, 1, 2, 3, *(4 + worth.topk(KEPT - 4).indices).tolist()}


def test_attention_to_what_came_before_counts():
    """A prompt after another: the patterns are those of both, of which this prompt's keys are ranked."""
    it, whole = model(), tokens(1, N + 5)[0]
    further = convert_prompt(it, whole[5:], initial=convert_prompt(it, whole[:5]), method=METHODS[1], verbose=False)
    kept = kept_positions(further)
    for layer, pattern in enumerate(patterns(it, whole)):
        received = by_group(pattern[:, 5:, 5:].sum(dim=1)).sum(dim=1)
        for g in range(2):
            heavy = received[g][: N - 3].topk(KEPT - 3).indices.tolist()
            assert kept[layer][g] == {*heavy, N - 3, N - 2, N - 1, *range(-5, 0)}


def test_what_does_not_fit_is_refused():
    with pytest.raises(KVLensError, match="expected_attention.*exp.q.k.*ALiBi"):
        convert_prompt(sharp("softmax, alibi"), tokens(1, N)[0], method=METHODS[3])

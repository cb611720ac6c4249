"""The delta rule: fast forms against the loop over matrices, the loop against hand computation and Transformers."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import laws, normal, random_mask
from precision import LAW, float64, relative_error
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from kvlens.ops.delta_rule import (
    carried_delta_rule,
    carried_keys,
    carried_queries,
    chunked_delta_rule,
    effective_attention,
    naive_carried,
    naive_carried_delta_rule,
    naive_delta_rule,
    recurrent_carried_delta_rule,
    recurrent_delta_rule,
    state_map,
)

BATCH, POS, KEY_HEAD, HEAD, D_K, D_V = 2, 19, 3, 6, 5, 7
# Keys of norm 1 and b <= 2 keep every T at norm 1 or below, so that nothing grows: sums of at most POS * D_K terms of size
# ten, in two orders, each with an exponent of up to 100 * POS that was rounded.
CLOSE = {"rtol": 0, "atol": 1e-12}

FAST = {
    "recurrent": recurrent_delta_rule,
    "chunked": chunked_delta_rule,
    "chunks of 1": functools.partial(chunked_delta_rule, chunk_size=1),
    "chunks of 4": functools.partial(chunked_delta_rule, chunk_size=4),
    "chunks of 19": functools.partial(chunked_delta_rule, chunk_size=POS),
}
FORMS = {"naive": naive_delta_rule, **FAST}
rules = st.sampled_from(["gated", "kda"])
decays = st.sampled_from(["usual", "none", "strong", "mixed"])


def case(rule="gated", decay="usual", mask=False, pos=POS, seed=0, key_head=KEY_HEAD, group=HEAD // KEY_HEAD):
    """q, k of norm 1, v, log decay, b from 0 to 2, and where asked for a mask."""
    draw = functools.partial(normal, BATCH, pos)
    head = key_head * group
    channels = (D_K,) if rule == "kda" else ()
    steps = -draw(head, *channels, seed=seed + 3).abs()
    size = {"usual": 0.3, "none": 0.0, "strong": 60.0, "mixed": 0.01}[decay]
    steps = steps * size
    if decay == "mixed":
        steps[:, ::3] = -80.0
    arguments = {
        "q": draw(key_head, D_K, seed=seed),
        "k": torch.nn.functional.normalize(draw(key_head, D_K, seed=seed + 1), dim=-1),
        "v": draw(head, D_V, seed=seed + 2),
        "log_decay": steps,
        "write_strength": 2 * draw(head, seed=seed + 4).sigmoid(),
    }
    return {**arguments, "mask": random_mask(BATCH, pos, seed + 5)} if mask else arguments


def state_of(heads=HEAD, seed=90, batch=BATCH):
    return normal(batch, heads, D_K, D_V, seed=seed)


def without(arguments, *names):
    return {name: value for name, value in arguments.items() if name not in names}


def test_one_head_by_hand():
    """a = b = 1/2, k = 1, values 4 and 2: S = 2, then 1/2 * 1/2 * 2 + 1 = 1.5, of which the first token has written 0.5."""
    ones = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    half = torch.full((1, 2, 1), 0.5, dtype=torch.float64)
    v = torch.tensor([4.0, 2.0], dtype=torch.float64).reshape(1, 2, 1, 1)
    for form in FORMS.values():
        z, final = form(2 * ones, ones, v, half.log(), half, output_final_state=True)
        assert z.flatten().tolist() == pytest.approx([4.0, 3.0])
        assert final.item() == pytest.approx(1.5)
    assert carried_keys(ones, half.log(), half).flatten().tolist() == pytest.approx([0.125, 0.5])
    assert carried_keys(ones, half.log(), half, times_write_strength=False).flatten().tolist() == pytest.approx([0.25, 1.0])
    assert carried_queries(2 * ones, ones, half.log(), half).flatten().tolist() == pytest.approx([0.5, 0.125])
    assert state_map(ones, half.log(), half).item() == pytest.approx(0.0625)
    pattern = effective_attention(2 * ones, ones, half.log(), half)
    assert pattern.flatten().tolist() == pytest.approx([1.0, 0.0, 0.25, 1.0])


@given(rules, decays, st.booleans(), st.integers(1, 40), st.sampled_from([1, 4, 64]))
@laws
def test_what_is_carried(rule, decay, mask, pos, chunk_size):
    """Against products of matrices."""
    inner = without(case(rule, decay, mask, pos), "v")
    size = {"chunk_size": chunk_size}
    kbar, P = carried_keys(**without(inner, "q"), **size), state_map(**without(inner, "q"), **size)
    qbar = carried_queries(**inner, **size)
    for got, expected in zip((kbar, qbar, P), naive_carried(**inner), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("rule", ["gated", "kda"])
@pytest.mark.parametrize("form", [carried_delta_rule, recurrent_carried_delta_rule])
def test_context_and_bias_apart(form, rule):
    arguments, S, before = case(rule, mask=True), state_of(), normal(BATCH, HEAD, D_K, D_K, seed=8)
    got = form(**arguments, initial_state=S, initial_map=before)
    torch.testing.assert_close(
        tuple(got), tuple(naive_carried_delta_rule(**arguments, initial_state=S, initial_map=before)), **CLOSE
    )
    torch.testing.assert_close(form(**arguments).state_map, naive_carried_delta_rule(**arguments).state_map, **CLOSE)


@pytest.mark.parametrize("rule", ["gated", "kda"])
def test_a_padded_row_equals_its_real_tokens(rule):
    """Padded positions may have any content, including infinities, and be anywhere."""
    arguments, S = case(rule, mask=True), state_of()
    mask = arguments.pop("mask")
    dirty = {name: x.masked_fill(~mask.reshape(BATCH, POS, *[1] * (x.dim() - 2)), torch.inf) for name, x in arguments.items()}
    for form in FORMS.values():
        z, final = form(**dirty, mask=mask, initial_state=S, output_final_state=True)
        assert not z[~mask].any()
        for b in range(BATCH):
            alone = {name: x[b : b + 1, mask[b]] for name, x in arguments.items()}
            expected = form(**alone, initial_state=S[b : b + 1], output_final_state=True)
            torch.testing.assert_close(z[b : b + 1, mask[b]], expected[0], **CLOSE)
            torch.testing.assert_close(final[b : b + 1], expected[1], **CLOSE)


@pytest.mark.parametrize("rule", ["gated", "kda"])
@pytest.mark.parametrize("name", FAST)
def test_decay_of_nothing_and_of_everything(name, rule):
    """a = 0 exactly, and a = 1: what was before is forgotten; in float32, too, values and gradients are finite."""
    arguments = case(rule, "none")
    arguments["log_decay"][:, 5] = -torch.inf
    z = FAST[name](**arguments, initial_state=state_of())[0]
    torch.testing.assert_close(z[:, 5:], FAST[name](**{n: x[:, 5:] for n, x in arguments.items()})[0], **CLOSE)
    leaves = {n: x.float().requires_grad_() for n, x in arguments.items()}
    z, final = FAST[name](**leaves, initial_state=state_of().float(), output_final_state=True)
    (z.sum() + final.sum()).backward()
    others = [x.grad for n, x in leaves.items() if n != "log_decay"]
    assert all(bool(x.isfinite().all()) for x in (z, final, *others))
    if name != "recurrent":
        assert leaves["log_decay"].grad.isfinite().all()


@pytest.mark.parametrize("rule", ["gated", "kda"])
def test_gradcheck_of_what_is_carried(rule):
    q, k, _, decay, write = (x.requires_grad_() for x in case(rule, pos=6).values())
    keys = functools.partial(carried_keys, chunk_size=4)
    assert torch.autograd.gradcheck(keys, (k, decay, write), fast_mode=True)
    assert torch.autograd.gradcheck(functools.partial(state_map, chunk_size=4), (k, decay, write), fast_mode=True)
    assert torch.autograd.gradcheck(functools.partial(carried_queries, chunk_size=4), (q, k, decay, write), fast_mode=True)
    assert torch.autograd.gradcheck(effective_attention, (q, k, decay, write), fast_mode=True)


@pytest.mark.parametrize(
    ("rule", "form"),
    [
        ("gated", qwen3_next.torch_chunk_gated_delta_rule),
        ("gated", qwen3_next.torch_recurrent_gated_delta_rule),
        ("kda", kimi.chunk_kimi_delta_attention),
        ("kda", kimi.recurrent_kimi_delta_attention),
    ],
)
def test_transformers_forms_agree(rule, form):
    """Transformers scales the queries itself."""
    arguments, S = case(rule, pos=70, group=1 if rule == "kda" else 2), state_of(3 if rule == "kda" else 6)
    z, final = naive_delta_rule(**arguments, initial_state=S, output_final_state=True)
    q, k, v, decay, write = arguments.values()
    with float64():
        theirs = form(q * D_K**0.5, k, v, g=decay, beta=write, initial_state=S, output_final_state=True)
    for got, expected in zip(theirs, (z, final), strict=True):
        assert relative_error(got, expected) < LAW

"""The laws of every recurrence, and of the short convolution: forms agree, may be cut anywhere; a state is like a KV bias."""

import functools
import inspect
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import laws, normal, random_mask

from kvlens.ops import delta_rule, lightning, rwkv, selective_scan, ssd
from kvlens.ops.short_convolution import naive_short_convolution, short_convolution

BATCH, KEY_HEAD, HEAD, D_K, D_V = 2, 3, 6, 5, 7
SIZE_OF_DECAY = {"usual": 0.3, "none": 0.0, "strong": 60.0, "mixed": 0.01, "all": 0.3}
decays = st.sampled_from(list(SIZE_OF_DECAY))


def arguments_of(rule, decay, mask, pos, seed):
    """q, k, v, log decay, b from 0 to 2, a bonus and a mask, of which an op takes what it has; decay "all" erases the state."""
    draw = functools.partial(normal, BATCH, pos)
    key_head = HEAD if rule in ("lightning", "rwkv") else KEY_HEAD
    shape = {"lightning": (HEAD,), **dict.fromkeys(("kda", "selective", "rwkv"), (BATCH, pos, HEAD, D_K))}.get(
        rule, (BATCH, pos, HEAD)
    )
    steps = -normal(*shape, seed=seed + 3).abs() * SIZE_OF_DECAY[decay]
    along = steps if rule == "lightning" else steps.movedim(1, 0)
    if decay == "mixed":
        along[::3] = -80.0
    if decay == "all" and rule in ("lightning", "ssd", "selective", "rwkv"):
        along[len(along) // 2 : len(along) // 2 + 1] = -torch.inf
    return {
        "q": draw(key_head, D_K, seed=seed),
        "k": torch.nn.functional.normalize(draw(key_head, D_K, seed=seed + 1), dim=-1),
        "v": draw(HEAD, D_V, seed=seed + 2),
        "log_decay": steps,
        "write_strength": 2 * draw(HEAD, seed=seed + 4).sigmoid(),
        "bonus": normal(HEAD, D_K, seed=seed + 6),
        "mask": random_mask(BATCH, pos, seed + 5) if mask else None,
    }


def same_sums(got, expected):
    """Sums of at most 70 * D_K terms in two orders, each with an exponent of up to 100 times as many that was rounded.

    Keys of norm 1 and b <= 2 keep every T at norm 1 or below: no term is larger than what was written before it.
    """
    size = max([1.0, *expected.abs().flatten().tolist()])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12 * size)


def call(op, arguments, **more):
    """An op with those of the arguments that it takes."""
    taken = inspect.signature(op).parameters
    return op(**{name: x for name, x in {**arguments, **more}.items() if name in taken})


DELTA = delta_rule, delta_rule.naive_delta_rule, (delta_rule.chunked_delta_rule, delta_rule.recurrent_delta_rule)
RULES = {
    "gated": DELTA,
    "kda": DELTA,
    "ssd": (ssd, ssd.naive_ssd, (ssd.chunked_ssd, ssd.recurrent_ssd)),
    "selective": (selective_scan, selective_scan.selective_scan, ()),
    "rwkv": (rwkv, rwkv.naive_rwkv, (rwkv.chunked_rwkv,)),
    "lightning": (lightning, lightning.naive_lightning, (lightning.chunked_lightning, lightning.recurrent_lightning)),
}
"""The package of ops, its loop, and its fast forms."""


@pytest.fixture(autouse=True, scope="module")
def several_chunks():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ssd", "rwkv"):
            patch.setattr(sys.modules[f"kvlens.ops.{name}"], "CHUNK_SIZE", 4)
        yield


@pytest.mark.parametrize("rule", RULES)
@given(decays, st.booleans(), st.integers(0, 70), st.sampled_from([1, 3, 16, 64]), st.integers(0, 99))
@laws
def test_forms_agree_and_what_is_carried(rule, decay, mask, pos, chunk_size, seed):
    """S_M = P S_old + sum_j kbar_j v_j^T, z = z_context + S_old^T qbar, A v = z_context."""
    package, naive, fast = RULES[rule]
    arguments = arguments_of(rule, decay, mask, pos, seed)
    S = normal(BATCH, HEAD, D_K, D_V, seed=90)
    more = {"initial_state": S, "output_final_state": True, "chunk_size": chunk_size}
    z, final = call(naive, arguments, **more)
    for form in fast:
        for got, expected in zip(call(form, arguments, **more), (z, final), strict=True):
            same_sums(got, expected)
    real = torch.ones(BATCH, pos, dtype=torch.bool) if arguments["mask"] is None else arguments["mask"]
    values = arguments["v"] * real[..., None, None]
    kbar, P, qbar, pattern = (
        call(getattr(package, name), arguments, chunk_size=chunk_size)
        for name in ("carried_keys", "state_map", "carried_queries", "effective_attention")
    )
    same_sums(P @ S + torch.einsum("bjhk,bjhd->bhkd", kbar, values), final)
    context = torch.einsum("bhij,bjhd->bihd", pattern, values)
    same_sums(context[real], call(naive, arguments)[0][real])
    same_sums((context + torch.einsum("bihk,bhkd->bihd", qbar, S))[real], z[real])
    assert not pattern.triu(1).any()
    assert not pattern[~(real[:, None, :, None] & real[:, None, None]).expand_as(pattern)].any()
    assert not qbar[~real].any() and not kbar[~real].any()


@pytest.mark.parametrize("rule", RULES)
@given(decays, st.booleans(), st.integers(2, 40), st.sampled_from([1, 4, 64]), st.data())
@laws
def test_cut_anywhere_and_carried_equals_the_whole(rule, decay, mask, pos, chunk_size, data):
    _, naive, fast = RULES[rule]
    arguments, S = arguments_of(rule, decay, mask, pos, 0), normal(1, HEAD, D_K, D_V, seed=90)
    cut = data.draw(st.integers(1, pos - 1))

    def part(places):
        whole = ("log_decay", "bonus") if rule == "lightning" else ("bonus",)
        return {name: x if x is None or name in whole else x[:, places] for name, x in arguments.items()}

    for form in (naive, *fast):
        run = functools.partial(call, form, output_final_state=True, chunk_size=chunk_size)
        z, final = run(arguments, initial_state=S)
        a, between = run(part(slice(cut)), initial_state=S)
        b, end = run(part(slice(cut, None)), initial_state=between)
        same_sums(torch.cat([a, b], dim=1), z)
        same_sums(end, final)


@pytest.mark.parametrize("decay", ["usual", "strong"])
@pytest.mark.parametrize("rule", [name for name, (_, _, fast) in RULES.items() if fast])
def test_gradients_are_those_of_the_loop(rule, decay, monkeypatch):
    """Also where e^{G_i - G_j} above the diagonal, up to e^{4000}, would overflow: neither z nor a gradient may touch it."""
    for name in ("ssd", "rwkv"):
        monkeypatch.setattr(sys.modules[f"kvlens.ops.{name}"], "CHUNK_SIZE", 64)
    _, naive, fast = RULES[rule]
    arguments = {name: x for name, x in arguments_of(rule, decay, False, 40, 0).items() if x is not None}
    S = normal(BATCH, HEAD, D_K, D_V, seed=9)

    def gradients(form):
        leaves = {name: x.clone().requires_grad_() for name, x in {**arguments, "initial_state": S}.items()}
        z, final = call(form, leaves, output_final_state=True)
        (z.square().sum() + final.square().sum()).backward()
        return {name: x.grad for name, x in leaves.items() if x.grad is not None}

    expected = gradients(naive)
    for form in fast:
        for name, gradient in gradients(form).items():
            same_sums(gradient, expected[name])


def test_one_token_of_mamba_by_hand():
    """S = e^{-1} S_0 + 2 k v^T, z = S^T q, with k = (1, 0), v = 3, q = (1, 10)."""
    q, k = torch.tensor([1.0, 10.0]).view(1, 1, 1, 2), torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    v, log_decay, write = torch.full((1, 1, 1, 1), 3.0), torch.full((1, 1, 1), -1.0), torch.full((1, 1, 1), 2.0)
    z, state = ssd.naive_ssd(q, k, v, log_decay, write, initial_state=torch.ones(1, 1, 2, 1), output_final_state=True)
    kept = torch.tensor(-1.0).exp()
    torch.testing.assert_close(state.flatten(), torch.stack([kept + 6, kept]))
    torch.testing.assert_close(z.flatten(), (11 * kept + 6)[None])


def test_two_tokens_of_rwkv_by_hand():
    """S_0 = ones; z_0 = (S_0 + u k v)^T q = (1 + 2 * 3) + 10; S = e^{-1} S_0 + k v; the second token, of zeros, reads it."""
    q, k = torch.tensor([[1.0, 10.0], [1.0, 10.0]]).view(1, 2, 1, 2), torch.tensor([[1.0, 0.0], [0, 0]]).view(1, 2, 1, 2)
    v, log_decay, bonus = torch.full((1, 2, 1, 1), 3.0), torch.full((1, 2, 1, 2), -1.0), torch.full((1, 2), 2.0)
    z, state = rwkv.naive_rwkv(q, k, v, log_decay, bonus, initial_state=torch.ones(1, 1, 2, 1), output_final_state=True)
    kept = torch.tensor(-1.0).exp()
    torch.testing.assert_close(z.flatten(), torch.stack([torch.tensor(17.0), 11 * kept + 3]))
    torch.testing.assert_close(state.flatten(), torch.stack([(kept + 3) * kept, kept * kept]))


CLOSE = {"rtol": 0, "atol": 1e-13}  # a sum of at most five products of size ten, in two orders


@given(st.integers(0, 12), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 99))
@laws
def test_the_short_convolution_equals_the_loop(pos, kernel, padded, biased, seed):
    x, weight = normal(2, pos, 5, seed=seed), normal(5, kernel, seed=seed + 1)
    bias = normal(5, seed=seed + 2) if biased else None
    mask = random_mask(2, pos, seed) if padded else None
    for state in (None, normal(1, kernel - 1, 5, seed=3), normal(2, kernel - 1, 5, seed=4)):
        arguments = (x, weight, bias, mask, state, True)
        torch.testing.assert_close(tuple(short_convolution(*arguments)), tuple(naive_short_convolution(*arguments)), **CLOSE)


@pytest.mark.parametrize("padded", [False, True])
def test_a_convolution_cut_anywhere_and_carried_equals_the_whole(padded):
    x, weight = normal(2, 9, 5, seed=0), normal(5, 4, seed=1)
    mask = random_mask(2, 9, 2) if padded else None
    whole, end = short_convolution(x, weight, None, mask, None, True)
    for cut in range(1, 9):
        first_mask, second_mask = (None, None) if mask is None else (mask[:, :cut], mask[:, cut:])
        first, between = short_convolution(x[:, :cut], weight, None, first_mask, None, True)
        second, last = short_convolution(x[:, cut:], weight, None, second_mask, between, True)
        torch.testing.assert_close(torch.cat([first, second], dim=1), whole, **CLOSE)
        torch.testing.assert_close(last, end, **CLOSE)


@pytest.mark.parametrize("padded", [False, True])
def test_gradcheck_of_the_short_convolution(padded):
    inputs = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate([(2, 6, 3), (3, 4), (3,), (2, 3, 3)])]
    mask = random_mask(2, 6, 2) if padded else None

    def op(x, weight, bias, state):
        return tuple(short_convolution(x, weight, bias, mask, state, True))

    assert torch.autograd.gradcheck(op, inputs, fast_mode=True)

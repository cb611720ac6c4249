"""Sums are linear, and when they are *a, then b*; layers of one bias in another's place, batches and rows of them."""

from dataclasses import replace

import pytest
import torch
from precision import LAW, close
from small_models import relative_error, sharp, tokens

from kvlens import KVBias, KVLensError, carry_bias, combine, convert_prompt, counterfactuals

ONE_LAYER = [
    *("no shift", "window 3 with queries", "rope before, no shift", "hedgehog", "gqa decay", "learned", "trained bias"),
    *("no positions", "softmax, learned", "softmax, rotary, grouped", "softmax, alibi", "softmax, shifted, grouped"),
    "softmax, no positions",
]
FIRST, SECOND, TEXT = tokens(2, 9, seed=1), tokens(2, 7, seed=2), tokens(2, 6, seed=3)


def logits(model, bias):
    with model.kv_bias(bias):
        return model(TEXT)


def one_layer(name):
    unshifted = dict(kv_shift=None) if name == "no positions" else {}
    return sharp(name, gain=1, n_layers=1, **unshifted)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ONE_LAYER)
def test_at_one_layer_the_carried_first_and_the_second_from_its_place_are_the_concatenation(name):
    """ICLCA eq. 14's rotation is in ``carry_bias``; ``0.0 * a`` has a's position offset and shift state, and nothing else."""
    model = one_layer(name)
    a, whole = convert_prompt(model, FIRST), convert_prompt(model, torch.cat([FIRST, SECOND], dim=1))
    apart = carry_bias(model, a, SECOND.shape[1]), convert_prompt(model, SECOND, initial=0.0 * a)
    expected = logits(model, whole)
    assert relative_error(logits(model, combine(*apart, shift_state="last")), expected) < LAW
    assert relative_error(logits(model, convert_prompt(model, SECOND, initial=a)), expected) < LAW
    sum_error = relative_error(logits(model, combine(a, convert_prompt(model, SECOND), shift_state="last")), expected)
    assert sum_error < LAW if name.endswith("no positions") else sum_error > 0.01


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ONE_LAYER)
def test_toward_is_the_exchange_by_degrees_and_ends_at_the_other_prompt(name):
    model = one_layer(name)
    a, b = convert_prompt(model, FIRST[:, :7]), convert_prompt(model, SECOND)
    for degree in (0, 0.25, 1, 1.5):
        by_hand = combine(a, b, weights=[1 - degree, degree], shift_state="first" if degree < 0.5 else "last")
        assert relative_error(logits(model, a.toward(b, degree)), logits(model, by_hand)) < LAW
    assert relative_error(logits(model, a.toward(b, 0)), logits(model, a)) < LAW
    assert relative_error(logits(model, a.toward(b, 1)), logits(model, b)) < LAW


@pytest.mark.parametrize("name", ["softmax, rotary, grouped", "softmax, learned"])
def test_toward_a_prompt_of_another_length_begins_behind_the_longer_one(name):
    """As behind tokens that are not read, which take positions all the same."""
    model = one_layer(name)
    longer, shorter = FIRST, SECOND
    a, b = convert_prompt(model, shorter), convert_prompt(model, longer)
    unread = torch.ones_like(longer, dtype=torch.bool)
    unread[:, : shorter.shape[1]] = False
    behind = torch.cat([shorter, longer[:, shorter.shape[1] :]], dim=1)
    expected = [
        logits(model, convert_prompt(model, counterfactuals(model, behind[row], unread[row : row + 1])))[row]
        for row in range(len(longer))
    ]
    assert relative_error(logits(model, a.toward(b, 0)), torch.stack(expected)) < LAW
    assert relative_error(logits(model, b.toward(a, 0)), logits(model, b)) < LAW
    assert a.toward(b, 0.5).position_offset == b.toward(a, 0.5).position_offset == b.position_offset


def test_toward_goes_behind_the_longer_prompt_row_by_row():
    model = one_layer("softmax, rotary, grouped")
    unequal = KVBias.batch([convert_prompt(model, FIRST[0, :n]).repeat(1) for n in (5, 9)])
    equal = convert_prompt(model, FIRST[:, :7])
    for bias in (unequal.toward(equal, 0.5), equal.toward(unequal, 0.5)):
        assert bias.position_offset.tolist() == [7, 9]


@pytest.mark.parametrize("name", ["no shift", "softmax, alibi"])
def test_where_positions_are_distances_both_prompts_end_where_the_text_begins(name):
    model = one_layer(name)
    a, b = convert_prompt(model, SECOND), convert_prompt(model, FIRST)
    for start, end in ((a, b), (b, a)):
        assert relative_error(logits(model, start.toward(end, 0)), logits(model, start)) < LAW


def read(model, bias):
    """phi(q).b_KV and phi(q).b_D for the queries of a text, none of which depends on the bias: its shift state is left out."""

    def bias_part_and_normalizer(of):
        with model.kv_bias(combine(of, shift_state="zero")):
            cache = model.run_with_cache(TEXT)[1]
        z, at = cache["blocks.0.attn.hook_z_bias"], "blocks.0.attn.hook_normalizer"
        n = cache[at] if at in cache.cache_dict else torch.ones_like(z[..., 0])  # normalizer "none" divides by nothing
        return z, n.exp() if model.cfg.attention == "softmax" else n

    z, n = bias_part_and_normalizer(bias)
    return z * n[..., None], n - bias_part_and_normalizer(0.0 * bias)[1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ONE_LAYER)
def test_sums_differences_and_multiples_are_linear_in_what_queries_read(name):
    model = one_layer(name)
    a, b = convert_prompt(model, FIRST), convert_prompt(model, tokens(2, 9, seed=4))
    of_a, of_b = read(model, a), read(model, b)
    assert of_a[0].norm() > 0.1 and relative_error(of_a[0], of_b[0]) > 0.1
    for made, x, y in (
        (a + b, 1, 1),
        (b + a, 1, 1),
        (sum([a, b, a]), 2, 1),
        (0.5 * (a + b) + 0.5 * a, 1, 0.5),
        (a + b - a, 0, 1),
        (2 * a - 0.5 * a, 1.5, 0),
        (a + 0.3 * (b - a), 0.7, 0.3),
        (combine(a, b, weights=(2, 0.5), shift_state="last"), 2, 0.5),
        (a.select(heads=[(0, 1)]) + a.select(heads=[(0, h) for h in range(model.cfg.n_heads) if h != 1]), 1, 0),
    ):
        for got, in_a, in_b in zip(read(model, made), of_a, of_b, strict=True):
            assert (got - x * in_a - y * in_b).norm() <= LAW * (1 + in_a.norm() + in_b.norm())


@pytest.fixture(params=["rope after", "softmax, rotary, grouped"])
def model(request):
    return sharp(request.param, n_layers=3)


def logits_of(model, bias, text):
    with model.kv_bias(bias):
        rows = bias.batch_size or 1
        return model(text.expand(rows, -1), attention_mask=torch.ones(rows, text.shape[-1], dtype=torch.long))


def test_exchanged_layers(model):
    prompt, text = torch.arange(9), torch.tensor([[3, 7, 1]])
    own, other = convert_prompt(model, prompt), convert_prompt(model, prompt, without=[(2, 5)])
    sets = torch.tensor([[False] * 3, [True] * 3, [True, False, False], [False, True, True]])
    mixed = logits_of(model, own.exchange_layers(other, sets), text)
    back = logits_of(model, other.exchange_layers(own, ~sets), text)
    close(mixed[:1], logits_of(model, own, text))
    close(mixed[1:2], logits_of(model, other, text))
    close(mixed, back)  # exchanging a set is keeping its complement
    halves = [own.select(layers=[1, 2]) + other.select(layers=[0]), own.select(layers=[0]) + other.select(layers=[1, 2])]
    if own.stacked("last_k").shape[-3] == 0:  # without a shift state a sum of selections is the same mixture
        for row, half in zip(mixed[2:], halves, strict=True):
            close(row[None], logits_of(model, half, text))
    assert (mixed[2] - mixed[3]).norm() > 1e-3 * mixed[2].norm()


EVERYTHING = ["hook_b_kv", "hook_b_d", "hook_b_keys", "hook_last_k", "hook_last_v", "hook_last_q"]
HEADS = [(0, 1), (1, 0), (1, 1), (2, 3)]


@pytest.mark.parametrize("name", ["rope after", "window 3 with queries", "gqa decay", "softmax, rotary, grouped"])
def test_exchanged_heads_are_patched_by_hand_law(name):
    """A key-value head's rows of the shift state go with all the query heads that read it."""
    model, text = sharp(name, n_layers=3), torch.tensor([[3, 7, 1]])
    own, other = convert_prompt(model, torch.arange(9)), convert_prompt(model, torch.arange(2, 11))
    names = [f"blocks.{layer}.attn.{hook}" for layer in range(3) for hook in EVERYTHING]
    with model.kv_bias(other):
        theirs = model.run_with_cache(text, names_filter=[*names])[1]

    def patch(x, hook):
        axis = 2 if "last" in hook.name else 1
        group = model.cfg.n_heads // x.shape[axis]
        taken = [(hook.layer(), head) in HEADS for head in range(model.cfg.n_heads)]
        for head in range(x.shape[axis]):
            if all(taken[head * group : (head + 1) * group]):
                x.select(axis, head).copy_(theirs[hook.name].select(axis, head))
        return x

    with model.kv_bias(own), model.hooks(fwd_hooks=[(name, patch) for name in names if name in theirs.cache_dict]):
        by_hand = model(text)
    close(logits_of(model, own.exchange_heads(other, HEADS), text), by_hand)
    assert relative_error(by_hand, logits_of(model, own, text)) > 1e-3
    all_of_one = [(1, head) for head in range(model.cfg.n_heads)]
    whole = own.exchange_layers(other, torch.tensor([[False, True, False]]))
    close(logits_of(model, own.exchange_heads(other, all_of_one), text), logits_of(model, whole, text))


@pytest.mark.parametrize(
    "name", ["softmax, rotary, grouped", "softmax, alibi", "softmax, learned", "softmax, shifted, grouped"]
)
def test_heads_of_a_prompt_of_another_length_read_it_law(name):
    """In one layer: each head writes what it writes under its own prompt, with the text where the longer one ends."""
    model, text, heads = one_layer(name), TEXT[:1], [(0, 1), (0, 2)]
    a, b = convert_prompt(model, FIRST[0]), convert_prompt(model, SECOND[0])
    for own, other in ((a, b), (b, a)):
        mixed = own.exchange_heads(other, heads)
        assert mixed.n_prompt_tokens == own.n_prompt_tokens and mixed.position_offset == max(9, 7)
        apart = [replace(bias, position_offset=9, record=None) for bias in (own, other)]
        if own.stacked("last_k").shape[-3]:  # queries move with their heads, keys and values with whole groups
            apart = [combine(bias, shift_state="zero") for bias in apart]
            mixed = combine(mixed, shift_state="zero")
        under = []
        for bias in (*apart, mixed):
            with model.kv_bias(bias):
                under.append(model.run_with_cache(text)[1]["blocks.0.attn.hook_z"])
        expected = under[0].clone()
        expected[:, :, [1, 2]] = under[1][:, :, [1, 2]]
        close(under[2], expected)


def test_hooks_of_a_prompt_of_another_length_say_so():
    model = sharp("softmax, rotary, grouped")
    short, long = convert_prompt(model, torch.arange(4)), convert_prompt(model, torch.arange(7))
    with model.kv_bias(long):
        theirs = model.run_with_cache(torch.tensor([[3]]))[1]

    def put(x, hook):
        x[:, 1] = theirs[hook.name][:, 1]
        return x

    for hook in (put, lambda x, hook: theirs[hook.name]):
        patched = model.hooks(fwd_hooks=[("blocks.0.attn.hook_b_keys", hook)])
        with model.kv_bias(short), patched, pytest.raises(KVLensError, match="has 4 keys a head.*7.*exchange_heads"):
            model(torch.tensor([[3]]))
    with pytest.raises(KVLensError, match=r"expected \(layer, head\) of \(0, 0\) to \(1, 5\), got \(0, 9\)"):
        short.exchange_heads(long, [(0, 9)])


def test_batches_and_rows(model):
    prompts = torch.arange(12).view(3, 4)
    together = convert_prompt(model, prompts)
    joined = KVBias.batch([convert_prompt(model, prompts[:1]), convert_prompt(model, prompts[1:])])
    text = torch.tensor([[5, 2]])
    close(logits_of(model, joined, text), logits_of(model, together, text))
    short, long = convert_prompt(model, torch.arange(4)[None]), convert_prompt(model, torch.arange(7)[None])
    padded = logits_of(model, KVBias.batch([short, long]), text)
    close(padded, torch.cat([logits_of(model, short, text), logits_of(model, long, text)]))
    singles = [convert_prompt(model, torch.arange(n)) for n in (4, 7)]
    close(logits_of(model, KVBias.batch(singles), text), padded)
    assert KVBias.batch(singles[:1]).batch_size == 1
    close(logits_of(model, together.select_prompts(torch.tensor([2, 0])), text), logits_of(model, together, text)[[2, 0]])


def test_what_does_not_fit_is_refused(model):
    one, longer = convert_prompt(model, torch.arange(4)), convert_prompt(model, torch.arange(5))
    with pytest.raises(KVLensError):
        one.select_prompts(torch.tensor([0, 0]))
    with pytest.raises(KVLensError, match="weights differs"):
        KVBias.batch([one, replace(one, fingerprint=replace(one.fingerprint, weights="of another model"), record=None)])
    if model.cfg.attention == "softmax":
        with pytest.raises(KVLensError):
            one.exchange_layers(longer, torch.ones(1, 3, dtype=torch.bool))

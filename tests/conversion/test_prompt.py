"""Counterfactual prompts: what a deleted or replaced span means, for every kind of position."""

import numpy
import pytest
import torch
from precision import LAW, close, relative_error
from small_models import model_of

from kvlens import KVLensError, carry_bias, convert_prompt, counterfactuals, logits_after
from kvlens.conversion import Landmark, RandomProjections, TaylorPolynomial, converted_rows

KINDS = [
    *(("linear", x) for x in ("rope after", "rope before", "window 3 with queries", "gqa decay", "learned", "no positions")),
    *(("softmax", x) for x in ("rotary", "learned", "sinusoidal", "alibi", "local", "shifted, grouped")),
]
PROMPT = torch.tensor([7, 3, 1, 4, 1, 5, 9, 2, 6, 5, 10, 11, 12])
TEXT = torch.tensor([8, 9, 7, 9, 3])
TOLERANCE = 1e-11
"""float64, logits of size 1: a few hundred sums, each rounded at 2e-16, through two layers of norms."""


def of_kind(attention, name):
    return model_of(attention, name)


@pytest.fixture(scope="module", params=KINDS, ids=" ".join)
def model(request):
    return of_kind(*request.param)


def read(model, bias):
    with model.kv_bias(bias):
        return model(TEXT[None], attention_mask=torch.ones_like(TEXT[None]))[0]


@pytest.mark.one_in(3)
def test_closed_positions_are_the_prompt_without_the_tokens(model):
    shorter = torch.cat([PROMPT[:3], PROMPT[6:8], PROMPT[9:]])
    bias = convert_prompt(model, PROMPT, without=[(3, 6), (8, 9)], positions="closed")
    close(read(model, bias), read(model, convert_prompt(model, shorter)))
    close(read(model, bias), model(torch.cat([shorter, TEXT])[None])[0, -len(TEXT) :])


@pytest.mark.one_in(3)
def test_a_kept_gap_is_a_bias_carried_past_it(model):
    whole = convert_prompt(model, PROMPT, without=[(3, 6), (8, 9)])
    in_parts = carry_bias(model, convert_prompt(model, PROMPT[:3]), 3)
    in_parts = carry_bias(model, convert_prompt(model, PROMPT[6:8], initial=in_parts), 1)
    in_parts = convert_prompt(model, PROMPT[9:], initial=in_parts)
    close(read(model, whole), read(model, in_parts))
    assert whole.position_offset == in_parts.position_offset
    assert whole.n_prompt_tokens == len(PROMPT) - 4


@pytest.mark.one_in(3)
def test_a_gap_at_either_end(model):
    at_start = carry_bias(model, convert_prompt(model, PROMPT[:1]).zero_like(), 1)
    close(
        read(model, convert_prompt(model, PROMPT, without=[(0, 2)])),
        read(model, convert_prompt(model, PROMPT[2:], initial=at_start)),
    )
    close(
        read(model, convert_prompt(model, PROMPT, without=[(9, 13)])),
        read(model, carry_bias(model, convert_prompt(model, PROMPT[:9]), 4)),
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("positions", ["kept", "closed"])
def test_rows_are_what_each_is_alone_and_logits_after_them_the_same(model, positions, monkeypatch):
    monkeypatch.setattr("kvlens.conversion.recomputed._worth", lambda model, device: 1)  # what rows share is converted once
    deleted = [[(3, 6)], [], [(1, 2), (8, 12)], [(11, 13)], []]
    replaced = [{}, {(1, 3): [13, 14]}, {(4, 5): [15]}, {}, {(10, 12): [15, 16]}]
    rows = counterfactuals(model, PROMPT, deleted, replaced, positions=positions)
    batch = convert_prompt(model, rows)
    alone = [
        convert_prompt(model, PROMPT, without=d, replace=r, positions=positions) for d, r in zip(deleted, replaced, strict=True)
    ]
    expected = torch.stack([read(model, each) for each in alone])
    with model.kv_bias(batch):
        close(model(TEXT.expand(5, -1), attention_mask=torch.ones(5, 5, dtype=torch.long)), expected)
    close(logits_after(model, rows, TEXT, 2, rows_per_pass=2), expected[:, -2:])


def test_a_replacement_is_the_prompt_with_it(model):
    bias = convert_prompt(model, PROMPT, replace={(3, 6): torch.tensor([13, 14, 15])})
    other = torch.cat([PROMPT[:3], torch.tensor([13, 14, 15]), PROMPT[6:]])
    close(read(model, bias), read(model, convert_prompt(model, other)))


@pytest.mark.one_in(3)
def test_counterfactuals_continue_a_bias(model):
    first = convert_prompt(model, PROMPT[:5])
    continued = convert_prompt(model, PROMPT[5:], without=[(1, 4)], initial=first)
    close(read(model, continued), read(model, convert_prompt(model, PROMPT, without=[(6, 9)])))


def test_shared_beginnings_change_nothing_but_the_work(monkeypatch):
    monkeypatch.setattr("kvlens.conversion.recomputed._worth", lambda model, device: 1)
    model = model_of("linear", "rope after", n_ctx=512)
    prompt = torch.randint(17, (240,), generator=torch.Generator().manual_seed(0))
    deleted = [[(first, first + 20)] for first in range(0, 240, 20)]
    rows = counterfactuals(model, prompt, deleted)
    counted = []
    together = logits_after(model, rows, TEXT, rows_per_pass=3, on_tokens=counted.append)
    alone = torch.cat([logits_after(model, rows.rows(slice(i, i + 1)), TEXT) for i in range(12)])
    close(together, alone)
    assert sum(counted) < 0.75 * 12 * (240 + len(TEXT))
    counted.clear()
    close(logits_after(model, rows, TEXT, on_tokens=counted.append), alone)
    assert sum(counted) == 240 + sum(range(0, 220, 20)) + 220 + 12 * len(TEXT)  # the first row, what follows the others' gaps


@pytest.mark.one_in(3)
@pytest.mark.parametrize("positions", ["kept", "closed"])
def test_a_bias_is_carried_over_what_no_row_of_a_pass_reads(model, positions, monkeypatch):
    monkeypatch.setattr("kvlens.conversion.recomputed._worth", lambda model, device: 1)  # each row is worth a pass of its own
    deleted, counted = [[(1, 13)], [(3, 6)], [(3, 6), (8, 9)], [], [(5, 13)]], []
    rows = counterfactuals(model, PROMPT, deleted, positions=positions)
    alone = [convert_prompt(model, PROMPT, without=each, positions=positions) for each in deleted]
    expected = torch.stack([read(model, each)[-2:] for each in alone])
    close(logits_after(model, rows, TEXT, 2, on_tokens=counted.append), expected)
    assert sum(counted) == len(PROMPT) + 5 * len(TEXT) + 2 * 7


def leaves_out(model):
    """Whether deleted tokens are no part of a pass: no layer of these models asks how far apart tokens stand."""
    cfg = model.cfg
    return cfg.attention == "softmax" and cfg.positional_embedding_type != "alibi" and not cfg.use_local_attn


@pytest.mark.one_in(3)
def test_biases_are_carried_over_the_gaps_that_all_rows_of_a_batch_have(model, monkeypatch):
    """A row that lacks most of its tokens is a batch of its own, so that those are not read; of the others two share gaps."""
    monkeypatch.setattr("kvlens.conversion.recomputed._worth", lambda model, device: 2)
    deleted = [[(1, 4), (5, 10)], [(3, 6)], [(3, 6), (8, 10)], [], [(0, 13)]]
    rows, counted = counterfactuals(model, PROMPT, deleted), []
    found = [(which.tolist(), biases) for which, biases in converted_rows(model, rows, on_tokens=counted.append)]
    assert [sorted(which) for which, _ in found] == [[4], [0], [1, 2], [3]]
    for which, biases in found:
        with model.kv_bias(biases):
            logits = model(TEXT.expand(len(which), -1), attention_mask=torch.ones(len(which), 5, dtype=torch.long))
        close(logits, torch.stack([read(model, convert_prompt(model, PROMPT, without=deleted[row])) for row in which]))
    assert counted == [1 if leaves_out(model) else 13, 1 + 13 - 9, 2 + 2 * (13 - 3 - 3), 12 - 3 + 1]


@pytest.mark.one_in(3)
def test_beginnings_that_are_kept_are_not_converted_again(model, monkeypatch):
    monkeypatch.setattr("kvlens.conversion.recomputed._worth", lambda model, device: 1)
    rows, counted, prefixes = counterfactuals(model, PROMPT, [[(4, 6)], [(9, 10)]]), [], {}
    (_, first), (_, second) = converted_rows(model, rows, prefixes=prefixes)
    assert [*prefixes] == [4, 9]
    again = [biases for _, biases in converted_rows(model, rows, prefixes=prefixes, on_tokens=counted.append)]
    for old, new, gone in zip((first, second), again, ([(4, 6)], [(9, 10)]), strict=True):
        expected = read(model, convert_prompt(model, PROMPT, without=gone))
        for biases in (old, new):
            with model.kv_bias(biases):
                close(model(TEXT[None], attention_mask=torch.ones_like(TEXT[None]))[0], expected)
    assert counted == [13 - 6, 13 - 9 - leaves_out(model)]


def test_everything_deleted_is_no_prompt_at_its_position(model):
    empty = convert_prompt(model, PROMPT, without=[(0, 13)])
    zero = carry_bias(model, convert_prompt(model, PROMPT[:1]).zero_like(), 12)
    close(read(model, empty), read(model, zero))


@pytest.mark.unhooked
def test_spans_may_come_from_a_table():
    model, cells = model_of("linear", "rope after"), numpy.array([3, 8])
    given = convert_prompt(model, PROMPT, without=[(cells[0], cells[1])])
    close(read(model, given), read(model, convert_prompt(model, PROMPT, without=[(3, 8)])))
    with pytest.raises(KVLensError, match="got .*True, 8"):
        convert_prompt(model, PROMPT, without=[(True, 8)])


@pytest.mark.unhooked
@pytest.mark.parametrize(
    "given",
    [
        *(dict(without=x) for x in ([(3, 14)], [(3, 3)], [(-1, 3)], [(1, 4), (3, 5)], "abc", [3])),
        dict(without=[(1, 4)], replace={(3, 5): [1, 2]}),
        *(dict(replace={(3, 5): x}) for x in ([1, 2, 3], [1], "two words", [1, 99])),
        dict(without=[(0, 13)], positions="closed"),
        dict(without=[(1, 2)], positions="open"),
    ],
)
def test_bad_spans_are_refused(given):
    model = model_of("linear", "rope after")
    with pytest.raises(KVLensError):
        convert_prompt(model, PROMPT, **given)
    with pytest.raises(KVLensError):  # of two prompts the first would be read
        convert_prompt(model, PROMPT.expand(2, -1), without=[(1, 2)])


def test_every_kind_is_distinguished_from_the_other_positions(model):
    kept, closed = (read(model, convert_prompt(model, PROMPT, without=[(3, 6)], positions=p)) for p in ("kept", "closed"))
    same = model.cfg.positional_embedding_type == "none" and model.cfg.decay is None
    assert ((kept - closed).abs().max() < TOLERANCE) == same


def test_the_passes_of_other_threads_and_of_ordinary_masks_are_as_before(model):
    mask = torch.ones(1, 13, dtype=torch.long)
    mask[0, 3:6] = 0
    before = model(PROMPT[None], attention_mask=mask)
    convert_prompt(model, PROMPT, without=[(3, 6)])
    assert torch.equal(model(PROMPT[None], attention_mask=mask), before)


TEXTS = dict(reference=torch.arange(24).reshape(2, 12) % 17, n_held_out=0, continuation_length=2)
FITTED = {
    "rotary": Landmark(n_keys=4, key_steps=3, **TEXTS),
    "rotary, grouped": RandomProjections(n_features=16, **TEXTS),
    "learned": Landmark(n_keys=4, key_steps=3, **TEXTS),
    "sinusoidal": RandomProjections(n_features=16, **TEXTS),
    "shifted, grouped": TaylorPolynomial(**TEXTS),
}
"""What a deleted token is hidden by depends on the kind of positions, and what reads the tokens on the method. With ALiBi and
windows, fitted methods do not apply: a key's score depends on its distance."""


@pytest.mark.parametrize("name", FITTED)
def test_a_fitted_method_sees_no_deleted_token(name):
    model = of_kind("softmax", name)
    other = PROMPT.clone()
    other[3:6] = torch.tensor([13, 14, 15])
    made = [convert_prompt(model, prompt, without=[(3, 6)], method=FITTED[name]) for prompt in (PROMPT, other)]
    close(made[0].stacked("b_kv"), made[1].stacked("b_kv"))
    close(read(model, made[0]), read(model, made[1]))


@pytest.mark.parametrize("name", ["rotary", "learned"])
def test_as_many_keys_as_tokens_that_are_left_are_all_of_them(name):
    model = of_kind("softmax", name)
    every = convert_prompt(model, PROMPT, without=[(3, 6)], method=Landmark(n_keys=10, **TEXTS))
    exact = convert_prompt(model, PROMPT, without=[(3, 6)])
    assert relative_error(read(model, every), read(model, exact)) < LAW

"""The verdict on a head: by hand on given patterns, at any length, and never on heads that were not trained."""

import pytest
import torch
from repeated_models import two_layer_circuit

from analyses import induction_heads
from analyses.heads.lags import KINDS, pattern_scores
from analyses.heads.repeated_tokens import RepeatedTokens
from analyses.heads.shift_roles import ShiftTaps
from analyses.heads.verdicts import NO_VERDICT, OF_A_MATCH, RATIO, STRETCH, THRESHOLD, judge_heads
from kvlens import HookedKVTransformer, HookedKVTransformerConfig

ONE = torch.tensor([[1.0, 0.0]], dtype=torch.float64)


def verdict(pattern, n, taps=ONE):
    """The verdict on one head whose pattern [query, key] is given, on 2 n places."""
    repeated = RepeatedTokens(torch.arange(n).repeat(2)[None], n)
    given = ShiftTaps(ONE, taps, ONE)
    scores = pattern_scores(pattern[None, None], repeated, given)
    layered = type(scores)(*(x[None] for x in scores))
    return judge_heads(layered, [given], repeated, threshold=THRESHOLD, ratio=RATIO)[0][0]


def uniform(n):
    return torch.ones(2 * n, 2 * n, dtype=torch.float64).tril() / torch.arange(1, 2 * n + 1)[:, None]


def mixed(n, lag, weight, places):
    """Uniform attention, of which ``weight`` goes to ``lag`` at the places of a slice."""
    pattern, rows = uniform(n), torch.arange(2 * n)[places]
    pattern[rows] *= 1 - weight
    pattern[rows, rows - lag] += weight
    return pattern


@pytest.mark.parametrize("n", [2, 16, 17, 40, 128])
def test_uniform_attention_has_no_name_and_a_ratio_of_one(n):
    found = verdict(uniform(n), n)
    assert found.name == NO_VERDICT and found.ratio == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("n", [16, 24, 40, 128])
def test_a_head_of_a_few_places_is_named_at_every_length_with_its_stretch(n):
    places = slice(9, 9 + STRETCH)
    found = verdict(mixed(n, 1, 0.5, places), n)
    at = range(found.start, found.start + STRETCH)
    chance = sum(1 / (i + 1) for i in at) / STRETCH
    expected = sum((0.5 + 0.5 / (i + 1)) if 9 <= i < 9 + STRETCH else 1 / (i + 1) for i in at) / STRETCH
    assert found.name == "previous token" and abs(found.start - 9) <= 1  # chance falls from place to place
    assert found.share == pytest.approx(expected) and found.ratio == pytest.approx(found.share / chance)


@pytest.mark.parametrize("n", [16, 24, 40, 128])
def test_each_kind_by_its_lag_and_the_farthest_above_chance_of_two(n):
    whole = slice(n, 2 * n)
    lags = {"induction": n - 1, "duplicate token": n, "previous token": 1, "current token": 0}
    for name, lag in lags.items():
        assert verdict(mixed(n, lag, 0.4, whole), n).name == name
    both = mixed(n, n, 0.5, whole)
    rows = torch.arange(n, 2 * n)
    both[rows] *= 0.7
    both[rows, rows - n + 1] += 0.3
    assert verdict(both, n).name == "duplicate token"
    idle = mixed(n, 0, 0.6, slice(0, 2 * n))
    idle[rows] *= 0.7
    idle[rows, rows - n + 1] += 0.3
    assert verdict(idle, n).name == "induction"  # "current token" is said of heads that are nothing else


def test_below_the_threshold_or_near_chance_there_is_no_name():
    n = 40
    assert verdict(mixed(n, 1, THRESHOLD - 0.03, slice(n, 2 * n)), n).name == NO_VERDICT
    assert verdict(mixed(n, n - 1, THRESHOLD - 0.03, slice(n, 2 * n)), n).name == "induction"  # a match needs a quarter of it
    long = 300  # where this is far above chance
    assert verdict(mixed(long, long - 1, OF_A_MATCH * THRESHOLD - 0.005, slice(long, 2 * long)), long).name == NO_VERDICT
    short = 2
    assert verdict(mixed(short, 1, 0.3, slice(1, 4)), short).name == NO_VERDICT  # less than three times chance is none


def test_a_head_that_looks_at_one_place_after_the_other_at_random_has_no_name():
    n, generator = 40, torch.Generator().manual_seed(0)
    for _ in range(200):
        places = (torch.rand(2 * n, generator=generator) * torch.arange(1, 2 * n + 1)).long()
        assert verdict(torch.eye(2 * n, dtype=torch.float64)[places], n).name == NO_VERDICT


def test_a_head_that_does_its_part_on_every_other_place_has_no_name():
    n = 40
    every_other = torch.zeros(2 * n, dtype=torch.bool)
    every_other[n::2] = True
    assert verdict(mixed(n, n - 1, 0.9, every_other), n).name == NO_VERDICT
    most = every_other.clone()
    most[n + 1 :: 4] = True
    most[n + 3 :: 8] = True  # seven of eight
    assert verdict(mixed(n, n - 1, 0.9, most), n).name == "induction"


@pytest.mark.parametrize("n", [16, 30, 60, 120])
def test_a_match_whose_share_falls_with_the_length_keeps_its_name(n):
    """Five times chance at every place, as of a kernel that cannot be sharp."""
    pattern = uniform(n)
    for i in range(n, 2 * n):
        pattern[i, i - n + 1] *= 5
        pattern[i] /= pattern[i].sum()
    assert verdict(pattern, n).name == "induction"


def test_the_value_side_decides_and_a_common_factor_does_not():
    n = 24
    looks_at_the_copy = mixed(n, n, 0.9, slice(n, 2 * n))
    reads_before = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    assert verdict(looks_at_the_copy, n).name == "duplicate token"
    reads_after_shift = mixed(n, n - 2, 0.9, slice(n, 2 * n))  # looks one too far ahead, reads the one before
    assert verdict(reads_after_shift, n, reads_before).name == "induction"
    assert verdict(reads_after_shift, n, -7 * reads_before) == verdict(reads_after_shift, n, reads_before)
    assert KINDS[0] == "prefix_matching"


def test_heads_of_untrained_models_are_hardly_ever_named():
    """Fresh weights, and weights whose attention is as sharp as a trained one's; at most five of 1,000 may be named."""
    named = n_heads = 0
    for positions, gain, scale in (("standard", 1, 1), ("standard", 3, 10), ("rotary", 3, 1), ("none", 3, 1)):
        for seed in (10, 12):
            cfg = HookedKVTransformerConfig(
                n_layers=2, d_model=64, d_head=8, n_heads=16, n_ctx=128, d_vocab=100, attn_only=True, device="cpu",
                positional_embedding_type=positions, seed=seed,
            )  # fmt: skip
            model = HookedKVTransformer(cfg).requires_grad_(False)
            for name, parameter in model.named_parameters():
                parameter.mul_(gain if name.endswith(("W_Q", "W_K")) else scale if name.endswith("W_pos") else 1)
            for n in (16, 30, 60):
                frame = induction_heads(model, n_sequences=5, n_repeated=n)
                named, n_heads = named + int((frame["verdict"] != NO_VERDICT).sum()), n_heads + len(frame)
    assert n_heads == 768 and named <= 0.005 * n_heads


def test_the_names_do_not_change_with_the_length_of_the_text():
    shipped = HookedKVTransformer.from_zoo("induction-plain-2l")
    names = {n: induction_heads(shipped, n_sequences=4, n_repeated=n)["verdict"].tolist() for n in (16, 27, 30, 40, 64)}
    by_head = list(zip(*names.values(), strict=True))
    same = sum(verdicts.count(max(set(verdicts), key=verdicts.count)) for verdicts in by_head)
    assert same >= 0.95 * len(by_head) * len(names)
    assert {"induction", "previous token"} <= set(names[16])


def test_a_costly_head_has_a_name():
    for model in (two_layer_circuit(), HookedKVTransformer.from_zoo("induction-plain-2l")):
        frame = induction_heads(model, n_sequences=3, n_repeated=11, ablations=True)
        costly = frame[frame["ablation_loss_change"] > 0.1]
        assert len(costly) and (costly["verdict"] != NO_VERDICT).all()


def test_the_defaults_fit_a_short_model():
    assert len(induction_heads(two_layer_circuit(n_ctx=12))) == 6

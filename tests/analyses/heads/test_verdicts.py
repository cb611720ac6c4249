"""The verdict on a head: by hand on given patterns, at any length, and never on heads that were not trained."""

import math

import pytest
import torch
from analysis_models import SHARP, heads_and_verdicts, shifted_heads, two_layer_circuit
from kvlens.analyses.heads import induction, naming
from kvlens.analyses.heads.ablation import standard_error, swap_costs
from kvlens.analyses.heads.induction import measured_heads
from kvlens.analyses.heads.repeated_text import PATTERNS, RepeatedTokens, ShiftTaps, draw_piece, pattern_scores, repeat_tokens
from kvlens.analyses.heads.verdicts import (
    BY_PATTERN,
    CONTRAST,
    COSTLY,
    HARMFUL,
    INCONCLUSIVE,
    MARGIN,
    MIN_MATCHES,
    NO_VERDICT,
    OTHER,
    RATIO,
    STRETCH,
    THRESHOLD,
    VERDICTS,
    Named,
    name_by_loss,
    name_heads,
)
from pandas.testing import assert_frame_equal
from small_models import sharp

from kvlens import HookedKVTransformer, HookedKVTransformerConfig
from kvlens.analyses import induction_verdicts

UNNAMED = (NO_VERDICT, INCONCLUSIVE)
ONE = torch.tensor([[1.0, 0.0]], dtype=torch.float64)


def verdicts(patterns, n, taps=ONE, control=None):
    """The verdicts on heads with given patterns [text, head, query, key], on 2 n positions; uniform ones on the control."""
    repeated = RepeatedTokens(torch.arange(n).repeat(2)[None], n)
    given = ShiftTaps(*(x.expand(patterns.shape[1], -1) for x in (ONE, taps, ONE)))
    control = uniform(n).expand_as(patterns) if control is None else control
    scores, of_control = (
        type(scores)(*(x[None] for x in scores))
        for scores in (pattern_scores(each, repeated, given) for each in (patterns, control))
    )
    return name_heads(scores, of_control, repeated, threshold=THRESHOLD, ratio=RATIO)[0]


def verdict(pattern, n, taps=ONE):
    """The verdict on one head with a given pattern [query, key] or [text, query, key]."""
    return verdicts(pattern.view(-1, 1, 2 * n, 2 * n), n, taps)[0]


def uniform(n):
    return torch.ones(2 * n, 2 * n, dtype=torch.float64).tril() / torch.arange(1, 2 * n + 1)[:, None]


def mixed(n, lag, weight, places):
    """Uniform attention, of which ``weight`` goes to ``lag`` at the positions of a slice."""
    pattern, rows = uniform(n), torch.arange(2 * n)[places]
    pattern[rows] *= 1 - weight
    pattern[rows, rows - lag] += weight
    return pattern


def test_elsewhere_is_the_first_copy_more_than_two_positions_away():
    """By hand: N = 5, and the query at i of the second copy reads position j of the first with weight 10 i + j."""
    pattern = torch.zeros(1, 1, 10, 10, dtype=torch.float64)
    pattern[0, 0, 5:, :5] = 10.0 * torch.arange(5)[:, None] + torch.arange(5)
    found = pattern_scores(pattern, RepeatedTokens(torch.arange(5).repeat(2)[None], 5), ShiftTaps(ONE, ONE, ONE))
    assert found.elsewhere.tolist() == [[(3 + 4) / 2, 14, 0, 30, (40 + 41) / 2]]


@pytest.mark.parametrize("n", [2, 16, 17, 40, 128])
def test_uniform_attention_has_no_name_and_a_ratio_of_one(n):
    found = verdict(uniform(n), n)
    assert found.name == INCONCLUSIVE and found.ratio == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("n", [16, 24, 40, 128])
def test_a_head_of_a_few_positions_is_named_at_every_length_with_its_stretch(n):
    places = slice(9, 9 + STRETCH)
    found = verdict(mixed(n, 1, 0.5, places), n)
    at = range(found.start, found.start + STRETCH)
    chance = sum(1 / (i + 1) for i in at) / STRETCH
    expected = sum((0.5 + 0.5 / (i + 1)) if 9 <= i < 9 + STRETCH else 1 / (i + 1) for i in at) / STRETCH
    assert found.name == "previous token" and abs(found.start - 9) <= 1  # chance falls from place to place
    assert found.share == pytest.approx(expected) and found.ratio == pytest.approx(found.share / chance)


@pytest.mark.parametrize("n", [16, 24, 40, 128])
def test_each_kind_by_its_lag_and_the_larger_variance_of_two(n):
    whole, second = slice(1, 2 * n), slice(n, 2 * n)
    for name, lag, places in (
        ("prefix matching", n - 1, second),
        ("duplicate token", n, second),
        ("previous token", 1, whole),
        ("current token", 0, whole),
    ):
        assert verdict(mixed(n, lag, 0.6, places), n).name == name
    both = mixed(n, n, 0.5, second)
    rows = torch.arange(n, 2 * n)
    both[rows] *= 0.7
    both[rows, rows - n + 1] += 0.3
    assert verdict(both, n).name == "duplicate token"
    idle = mixed(n, 0, 0.6, whole)
    idle[rows] *= 0.7
    idle[rows, rows - n + 1] += 0.3
    assert verdict(idle, n).name == "prefix matching"  # "current token" is for heads that match nothing
    for of_itself, name in ((0.5, "current token"), (0.3, "previous token")):
        pair = mixed(n, 1, 0.8 - of_itself, whole)
        pair[whole] *= 1 - of_itself
        pair[torch.arange(1, 2 * n), torch.arange(1, 2 * n)] += of_itself
        assert verdict(pair, n).name == name


@pytest.mark.parametrize("kind", [0, 1])
def test_a_head_that_reads_the_same_place_without_a_repetition_matches_nothing(kind):
    n = 24
    looks_back = mixed(n, n - 1 + kind, 0.9, slice(n, 2 * n))[None, None]
    half = mixed(n, n - 1 + kind, 0.5, slice(n, 2 * n))[None, None]
    less = mixed(n, n - 1 + kind, 0.3, slice(n, 2 * n))[None, None]
    assert verdicts(looks_back, n)[0].name == ("prefix matching", "duplicate token")[kind]
    assert {verdicts(looks_back, n, control=control)[0].name for control in (looks_back, half)} <= set(UNNAMED)
    assert verdicts(looks_back, n, control=less)[0].name == ("prefix matching", "duplicate token")[kind]


def test_a_head_far_weaker_than_the_strongest_of_its_kind_is_called_weak():
    n = 60
    heads = torch.stack([mixed(n, n - 1, weight, slice(n, 2 * n)) for weight in (0.9, 0.2, 0.08)])
    assert [head.name for head in verdicts(heads[None], n)] == ["prefix matching", "prefix matching", "weak prefix matching"]
    assert verdicts(heads[None, 2:], n)[0].name == "prefix matching"  # the strongest of its model


def test_a_previous_token_head_is_found_wherever_its_stretch_is():
    n = 60
    assert verdict(mixed(n, 1, 0.6, slice(70, 100)), n).name == "previous token"


def test_below_the_threshold_or_near_chance_there_is_no_name():
    n = 40
    assert verdict(mixed(n, 1, THRESHOLD - 0.06, slice(1, 2 * n)), n).name in UNNAMED
    assert verdict(mixed(n, 1, THRESHOLD, slice(1, 2 * n)), n).name == "previous token"
    assert verdict(mixed(n, n - 1, 0.02, slice(n, 2 * n)), n).name in UNNAMED  # about twice its attention elsewhere
    short = 2
    assert verdict(mixed(short, 1, 0.3, slice(1, 4)), short).name in UNNAMED  # less than three times chance is none


def test_a_head_that_attends_to_random_positions_has_no_name():
    n, generator = 40, torch.Generator().manual_seed(0)
    places = (torch.rand(200, 3, 2 * n, generator=generator) * torch.arange(1, 2 * n + 1)).long()
    found = verdicts(torch.eye(2 * n, dtype=torch.float64)[places].transpose(0, 1), n)
    assert len(found) == 200 and {head.name for head in found} == {NO_VERDICT}


def test_a_positional_head_meets_the_criterion_at_most_positions_and_a_matching_head_at_a_few():
    n = 40
    every_other = torch.zeros(2 * n, dtype=torch.bool)
    every_other[1::2] = True
    assert verdict(mixed(n, 1, 0.9, every_other), n).name in UNNAMED
    most = every_other.clone()
    most[2::4] = True
    most[4::8] = True  # seven of eight
    assert verdict(mixed(n, 1, 0.9, most), n).name == "previous token"
    for n_places, name in (
        (MIN_MATCHES - 1, INCONCLUSIVE),
        (MIN_MATCHES, "prefix matching"),
    ):  # enough to tell how long the copy is
        assert verdict(mixed(n, n - 1, 0.95, slice(n, n + n_places)), n).name == name


@pytest.mark.parametrize("n", [16, 30, 60, 120])
@pytest.mark.parametrize(("times", "name"), [(CONTRAST - 0.5, INCONCLUSIVE), (CONTRAST + 0.5, "prefix matching")])
def test_a_match_whose_share_falls_with_the_length_has_one_name_at_every_length(n, times, name):
    """This many times the attention to any other position, as for a kernel that cannot be sharp."""
    pattern = uniform(n)
    for i in range(n, 2 * n):
        pattern[i, i - n + 1] *= times
        pattern[i] /= pattern[i].sum()
    assert verdict(pattern, n).name == name


def test_the_value_side_decides_and_a_common_factor_does_not():
    n = 24
    looks_at_the_copy = mixed(n, n, 0.9, slice(n, 2 * n))
    reads_before = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    assert verdict(looks_at_the_copy, n).name == "duplicate token"
    reads_after_shift = mixed(n, n - 2, 0.9, slice(n, 2 * n))  # attends one position too late, reads the one before
    assert verdict(reads_after_shift, n, reads_before).name == "prefix matching"
    assert verdict(reads_after_shift, n, -7 * reads_before) == verdict(reads_after_shift, n, reads_before)
    assert PATTERNS[0] == "prefix_matching"


@pytest.mark.slow
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
                frame = induction_verdicts(model, n_sequences=5, n_repeated=n)
                named, n_heads = named + int((~frame["verdict"].isin(UNNAMED)).sum()), n_heads + len(frame)
    assert n_heads == 768 and named <= 0.005 * n_heads


def test_the_heads_of_trained_models_have_their_names_and_keep_them_at_every_length():
    one_layer = induction_verdicts(HookedKVTransformer.from_zoo("induction-shift-1l"))
    best = one_layer.loc[one_layer["logit_attribution"].idxmax()]
    assert (best["verdict"], best["role"]) == ("prefix matching", "prefix matching")
    shipped = HookedKVTransformer.from_zoo("induction-plain-2l")
    frames = {n: induction_verdicts(shipped, n_sequences=4, n_repeated=n) for n in (16, 27, 30, 40, 64)}
    by_head = list(zip(*(frame["verdict"] for frame in frames.values()), strict=True))
    same = sum(names.count(max(set(names), key=names.count)) for names in by_head)
    assert same >= 0.95 * len(by_head) * len(frames)
    assert {"prefix matching", "previous token"} <= set(frames[16]["verdict"])
    frame = frames[40]
    previous = set(frame.loc[(frame["layer"] == 0) & (frame["verdict"] == "previous token"), "head"])
    assert previous & set(frame.loc[(frame["layer"] == 1) & (frame["verdict"] == "prefix matching"), "k_composition_head"])


def test_a_costly_head_has_a_name():
    for model in (two_layer_circuit(), HookedKVTransformer.from_zoo("induction-plain-2l")):
        frame = induction_verdicts(model, n_sequences=3, n_repeated=11, ablations=True)
        costly = frame[frame["ablation_loss_change"] > COSTLY]
        assert len(costly) and not set(costly["verdict"]) & {*UNNAMED, OTHER}


def faint_heads(score, loudness):
    """One layer, a shifted induction head whose match scores at most ``score``, and whose output is unembedded."""
    model = shifted_heads()
    attn = model.blocks[0].attn
    attn.W_Q.mul_(score / SHARP)
    attn.W_O[0].mul_(loudness)
    attn.W_O[1:].zero_()
    return model


def test_a_faint_head_is_named_by_what_swapping_costs():
    """Three times as much attention on the right position as on any other is a weak pattern, but all that is needed."""
    model = faint_heads(math.log(3), 60)
    assert heads_and_verdicts(model, n_sequences=3, n_repeated=8)["verdict"].iloc[0] == INCONCLUSIVE
    head = heads_and_verdicts(model, n_sequences=3, n_repeated=8, ablations=True).iloc[0]
    assert head["verdict"] == "induction" and 2 < head["prefix_matching_contrast"] < CONTRAST
    assert head["prefix_matching_loss_change"] > head["ablation_loss_change"] / 2 > COSTLY
    assert all(head[f"{kind}_loss_change"] < 0.1 * head["prefix_matching_loss_change"] for kind in PATTERNS[1:])


@pytest.mark.parametrize(("loudness", "name"), [(-20.0, OTHER), (20.0, HARMFUL)])
def test_a_head_that_reads_all_alike_is_no_induction_head(loudness, name):
    """It raises the most frequent token so far, which is not the right one: the model is better without it."""
    head = heads_and_verdicts(faint_heads(0.0, loudness), n_sequences=30, n_repeated=8, ablations=True).iloc[0]
    assert head["verdict"] == name and abs(head["ablation_loss_change"]) > max(COSTLY, 2 * head["ablation_loss_error"])
    assert (head["ablation_loss_change"] > 0) == (name == OTHER)
    assert head["prefix_matching_contrast"] == pytest.approx(1, abs=0.2) and head["spread"] > 0.9


@pytest.mark.parametrize("n", [16, 24, 40, 128])
def test_a_sharp_head_that_attends_elsewhere_is_none_and_a_spread_one_is_inconclusive(n):
    """A head that gives w to one position and the rest equally to all i + 1 reads 1 / (w^2 + (1 - w^2) / (i + 1)) positions."""
    names = {w: verdict(mixed(n, 5, w, slice(5, 2 * n)), n).name for w in (0.95, 0.1)}
    assert names == {0.95: NO_VERDICT, 0.1: INCONCLUSIVE}
    random = torch.randn(3, 2 * n, 2 * n, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tril()
    assert verdict(random, n).name == INCONCLUSIVE  # as of a feature map of either sign: nothing stands out


def test_the_spread_of_a_head_by_hand():
    """On positions 8 to 13 a uniform head reads i + 1 of i + 1, or i of them without its own; a sharp head reads one."""
    n, model, one = 7, shifted_heads(), sum(1 / (i + 1) for i in range(8, 14)) / 6
    model.blocks[0].attn.W_Q[2:] = 0
    assert induction_verdicts(model, n_sequences=2, n_repeated=n)["spread"].tolist()[2:] == pytest.approx([1 - one, 1])
    assert induction_verdicts(two_layer_circuit(), n_sequences=2, n_repeated=n)["spread"].iloc[1] == pytest.approx(one)


def test_a_match_that_is_missed_by_no_more_than_noise_is_inconclusive():
    """A sharp head in the first copy; in the second one contrasts of 4 or 3 that vary with position, where 4.5 is required."""
    n, names = 40, []
    for times, up_and_down in ((4.0, 3.0), (4.0, 0.0), (3.0, 1.0)):
        pattern = mixed(n, 5, 0.95, slice(5, n))
        for i in range(n, 2 * n):
            pattern[i, i - n + 1] *= times + up_and_down * (-1) ** i
        names.append(verdict(pattern, n).name)
    assert names == [INCONCLUSIVE, NO_VERDICT, NO_VERDICT]


@pytest.mark.parametrize("n", [16, 40, 128])
def test_two_kinds_of_which_none_is_more_are_named_together(n):
    second, rows = slice(n, 2 * n), torch.arange(n, 2 * n)

    def both(induction, duplicate):
        pattern = mixed(n, n, duplicate, second)
        pattern[rows] *= (1 - duplicate - induction) / (1 - duplicate)
        pattern[rows, rows - n + 1] += induction
        pattern[rows, rows - n] += duplicate - duplicate * (1 - duplicate - induction) / (1 - duplicate)
        return verdict(pattern, n).name

    assert (both(0.4, 0.4), both(0.5, 0.3), both(0.3, 0.5)) == (
        "prefix matching / duplicate token",
        "prefix matching",
        "duplicate token",
    )
    pair, places = mixed(n, 1, 0.45 / 0.55, slice(1, 2 * n)), torch.arange(1, 2 * n)
    pair[1:] *= 0.55
    pair[places, places] += 0.45
    assert verdict(pair, n).name == "previous token / current token"


def by_loss(cost, swaps, by_pattern=(), noise=0.01, between=0.02):
    kinds = PATTERNS[: len(swaps)]
    errors = {(a, b): noise if a == b else between for a in kinds for b in kinds}
    named = Named(BY_PATTERN[by_pattern[0]] if by_pattern else INCONCLUSIVE, by_pattern)
    return name_by_loss(VERDICTS, named, (cost, noise), dict(zip(kinds, swaps, strict=True)), errors).name


def test_names_by_the_loss_have_a_sign_a_margin_and_ties():
    assert by_loss(0.5, [0.4, 0.05]) == "induction"
    assert by_loss(0.5, [0.40, 0.40]) == by_loss(0.5, [0.43, 0.40]) == "induction / previous token"
    assert by_loss(0.5, [0.45, 0.40]) == "induction"  # by more than two standard errors of the difference
    assert by_loss(0.5, [0.45, 0.40], between=0.03) == "induction / previous token"
    assert by_loss(-0.5, [-0.4, 0.01]) == "negative prefix matching"
    assert by_loss(-0.5, [-0.4, -0.4]) == "negative prefix matching / previous token"
    assert by_loss(-0.5, [0.01, -0.01]) == HARMFUL and by_loss(0.5, [0.01, -0.01]) == OTHER
    assert by_loss(-1.2, [0.3, 0.01]) == HARMFUL  # what it reads there helps by a quarter of the harm
    assert by_loss(-0.2, [0.3, 0.01]) == HARMFUL  # it costs nothing to remove, whatever it reads
    assert by_loss(0.5, [0.01, 0.01], by_pattern=PATTERNS[:1]) == OTHER
    assert by_loss(0.5, [0.12, 0.01], by_pattern=PATTERNS[:1]) == "induction"
    for within in (0.15, -0.15):  # above 0.1 nats, and within two standard errors of 0
        assert by_loss(within, [0.15, 0.01], noise=0.08) == INCONCLUSIVE
        assert by_loss(within, [0.15, 0.01], by_pattern=PATTERNS[:1], noise=0.08) == "prefix matching"
    assert by_loss(0.05, [0.3, 0.01], by_pattern=PATTERNS[:1]) == "prefix matching"  # another head may stand in for it
    assert by_loss(0.05, [0.05, 0.01]) == by_loss(0.001, [math.nan, math.nan]) == NO_VERDICT
    assert by_loss(0.05, [0.05, 0.01], noise=0.03) == INCONCLUSIVE  # it may be worth more than 0.1 nats


def test_the_standard_error_is_that_of_independent_texts_or_positions():
    generator = torch.Generator().manual_seed(0)
    changes = torch.randn(3, 4000, 2, 5, generator=generator, dtype=torch.float64)
    assert standard_error(changes[0, 0]).shape == ()
    of_texts = torch.randn(3, 50, 1, generator=generator, dtype=torch.float64) + changes[:, :50, 0]
    expected = of_texts.mean(dim=-1).std(dim=-1) / 50**0.5
    torch.testing.assert_close(standard_error(of_texts), expected)  # places of a text that move together count as one
    one = changes[0, 0, :1]
    torch.testing.assert_close(standard_error(one), one.std() / 5**0.5)
    assert standard_error(one[:, :1]) == torch.inf


def test_an_induction_head_that_lowers_what_it_finds_is_a_negative_one():
    model = faint_heads(SHARP, -3.0)
    assert heads_and_verdicts(model, n_sequences=3, n_repeated=8)["verdict"].iloc[0] == "prefix matching"
    head = heads_and_verdicts(model, n_sequences=3, n_repeated=8, ablations=True).iloc[0]
    assert head["verdict"] == "negative prefix matching" and head["prefix_matching_loss_change"] < -COSTLY


@pytest.mark.parametrize(("name", "n_induction"), [("induction-shift-1l", 2), ("induction-plain-2l", 0), ("facts-linear", 0)])
def test_a_head_is_called_induction_only_where_the_loss_rises_without_it(name, n_induction):
    """Of the four heads that match in ``induction-plain-2l`` each stands in for the others."""
    model, settings = HookedKVTransformer.from_zoo(name), dict(n_sequences=4, n_repeated=16)
    plain, asked = (induction_verdicts(model, **settings, ablations=ablations) for ablations in (False, True))
    assert not plain["verdict"].str.contains("induction").any()
    assert plain["verdict"].str.contains("prefix matching").sum() >= n_induction
    called = asked[asked["verdict"].str.contains("induction")]
    assert len(called) == n_induction
    assert (called["ablation_loss_change"] > (MARGIN * called["ablation_loss_error"]).clip(lower=COSTLY)).all()


def test_what_heads_read_is_swapped_only_where_the_verdict_needs_it(monkeypatch):
    """A swap takes four times the rows of an ablation; the verdicts are those with every head swapped."""
    model, asked, settings = two_layer_circuit(), [], dict(n_sequences=3, n_repeated=8, ablations=True)

    def count(*given):
        asked.append(int(given[-1].sum()))
        return swap_costs(*given)

    monkeypatch.setattr(induction, "swap_costs", count)
    found = induction_verdicts(model, **settings)
    significant = found["ablation_loss_change"].abs() > (MARGIN * found["ablation_loss_error"]).clip(lower=COSTLY)
    assert asked == [significant.sum()] and 0 < asked[0] < len(found)
    monkeypatch.setattr(naming, "is_significant", lambda effect: torch.ones_like(effect.loss_change, dtype=torch.bool))
    assert_frame_equal(induction_verdicts(model, **settings), found)
    assert asked[1] == len(found)


@pytest.mark.parametrize("name", ["facts-linear", "facts-gpt2"])
def test_a_head_that_the_model_needs_is_not_called_none_by_its_pattern(name):
    model = HookedKVTransformer.from_zoo(name)
    costly = set()
    for seed in (0, 1):
        asked = induction_verdicts(model, n_sequences=4, n_repeated=16, seed=seed, ablations=True)
        counts = asked["ablation_loss_change"] > (2 * asked["ablation_loss_error"]).clip(lower=0.5)
        plain = induction_verdicts(model, n_sequences=4, n_repeated=16, seed=seed)
        costly |= set(plain.loc[counts, "verdict"])
    assert costly and NO_VERDICT not in costly


@pytest.mark.parametrize("name", ["softmax, shifted, grouped", "rope after"])
def test_swaps_equal_one_hooked_forward_pass_each(name):
    model, n = sharp(name), 6
    generator = torch.Generator().manual_seed(0)
    own, donors = (repeat_tokens(model, draw_piece(model, 3, n, generator), None) for _ in range(2))
    *_, taps = measured_heads(model, own)
    asked = torch.ones(model.cfg.n_layers, model.cfg.n_heads, dtype=torch.bool)
    asked[0, 1] = False
    costs, errors = swap_costs(model, own, donors, taps, asked)
    assert costs[:, 0, 1].isnan().all() and errors[:, :, 0, 1].isnan().all() and not errors[..., 1, 2].isnan().any()
    (logits, cache), (_, other) = model.run_with_cache(own.tokens), model.run_with_cache(donors.tokens)

    def loss(logits):
        return -logits.log_softmax(-1)[:, n:-1].gather(-1, own.tokens[:, n + 1 :, None]).mean()

    group = model.cfg.n_heads // model.cfg.n_kv_heads
    for layer, head in ((0, 0), (1, 2), (1, model.cfg.n_heads - 1)):
        v, v_other = (x[f"blocks.{layer}.attn.hook_v"][:, :, head // group] for x in (cache, other))
        for number, (lag, first) in enumerate(((n - 1, n), (1, 1), (n, n), (0, 1))):

            def swap(z, hook, v=v, v_other=v_other, head=head, layer=layer, lag=lag, first=first):
                z, pattern = z.clone(), cache["pattern", layer][:, head]
                for i in range(first, 2 * n):
                    for s, beta in enumerate(taps[layer].v[head]):
                        if i - lag + s <= i:
                            read = beta * pattern[:, i, i - lag + s, None]
                            z[:, i, head] += read * (v_other - v)[:, i - lag]
                return z

            swapped = model.run_with_hooks(own.tokens, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", swap)])
            torch.testing.assert_close(costs[number, layer, head], loss(swapped) - loss(logits), rtol=1e-8, atol=1e-11)


def test_the_defaults_fit_a_short_model():
    assert len(induction_verdicts(two_layer_circuit(n_ctx=12))) == 6

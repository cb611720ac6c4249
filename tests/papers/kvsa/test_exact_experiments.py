"""``induction-exact`` and ``landscape``: the hand-written models are those of the theorems, and claims can fail."""

import itertools
import math

import pandas as pd
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from kvlens import HookedKVTransformer, HookedKVTransformerConfig
from kvlens.model import head_matrices
from kvlens.model.config import KVShiftConfig
from kvlens.ops.induction import induction_head, landscape_loss, naive_induction_head
from kvlens.papers.kvsa import constructed_models, induction_exact, landscape
from kvlens.papers.kvsa.constructed_models import landscape_model, set_shift

BATCH, POS, D, VOCAB = 3, 13, 5, 7
SIGMA, SLOPE = 0.6, 0.15


def embeddings_and_tokens(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(VOCAB, D, generator=generator, dtype=torch.float64) / D**0.5
    return embeddings.to(dtype), torch.randint(0, VOCAB, (BATCH, POS), generator=generator)


def head_error(model, embeddings, tokens, blind=False):
    with torch.no_grad():
        out = induction_exact.head_output(model, tokens, blind)
    return float((out.double() - naive_induction_head(embeddings[tokens].double(), SIGMA, SLOPE)).abs().max())


# --- heads ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_shifted_layer_is_the_induction_head(dtype):
    embeddings, tokens = embeddings_and_tokens(dtype)
    model = constructed_models.shifted_head(embeddings, SIGMA, SLOPE)
    assert model.cfg.d_model == D
    assert head_error(model, embeddings, tokens) <= induction_exact.head_rounding(embeddings, POS, SIGMA, SLOPE, dtype)


@pytest.mark.parametrize("p1", [2.0, 5.0, 11.0, 23.0, 40.0])
def test_two_blind_layers_stay_within_the_derived_error(p1):
    """The copied row is sum_t w_t x_{s-t} with 1 - w_1 <= r = e^{-p1}.

    With R the largest norm of an embedding, a key is therefore off by at most 2 r R, a score by 2 r R^2 / sigma, and a weight
    by a factor within the exponential of twice that.
    """
    embeddings, tokens = embeddings_and_tokens()
    model = constructed_models.two_layer_head(embeddings, SIGMA, SLOPE, p1, sees_itself=False)
    assert model.cfg.d_model == 2 * D
    assert model.cfg.kv_shift is None
    score_error = 2 * math.exp(-p1) * float(embeddings.square().sum(-1).max()) / SIGMA
    bound = math.expm1(2 * score_error) * float(embeddings.abs().max())
    rounding = induction_exact.head_rounding(embeddings, POS, SIGMA, SLOPE, torch.float64)
    error = head_error(model, embeddings, tokens, blind=True)
    assert error <= bound + rounding
    if p1 < 30:  # the leak is visible: the head is not exact
        assert error > 100 * rounding


def over_the_printed_bound(entry, sees_itself=False):
    """App. A: the largest error over 4 d / sigma e^-p1 / (1 - e^-p1), over widths, temperatures, slopes and p1."""
    found = []
    for d, sigma, slope, p1 in itertools.product((1, 4, 16), (0.25, 4.0), (0.0, 0.1), (0.25, 1.0, 4.0, 8.0)):
        generator = torch.Generator().manual_seed(d)
        rows = entry * (torch.randint(0, 2, (VOCAB, d), generator=generator).double() * 2 - 1)
        text = torch.randint(0, VOCAB, (BATCH, POS), generator=generator)
        model = constructed_models.two_layer_head(rows, sigma, slope, p1, sees_itself=sees_itself)
        out = induction_exact.head_output(model, text, blind=True).detach()
        found.append(float((out - induction_head(rows[text], sigma, slope)).abs().max()) * sigma * math.expm1(p1) / (4 * d))
    return max(found)


def test_the_printed_bound_of_theorem_1_holds_for_entries_of_at_most_one():
    """Its proof bounds x_L, x_s and the copied row by 1 each, so it grows with the third power of the largest entry."""
    assert 0.1 < over_the_printed_bound(1) < 1
    assert over_the_printed_bound(3) > 3
    assert over_the_printed_bound(1, sees_itself=True) > 1  # of another head it is no bound


def test_the_bounds_last_step_is_an_equality():
    """App. A: |softmax(-p1 (s - 1 - t)) - e_{s-1}|_1 = 2 (1 - 1 / sum_t e^-p1 t), and below 2 e^-p1."""
    for p1, s in itertools.product((0.3, 2.0, 9.0), range(2, 40)):
        weights = (-p1 * torch.arange(s - 1, dtype=torch.float64)).softmax(dim=0)
        off = float((weights - torch.eye(s - 1, dtype=torch.float64)[0]).abs().sum())
        assert off == pytest.approx(2 * (1 - 1 / sum(math.exp(-p1 * t) for t in range(s - 1))), abs=1e-11)
        assert off <= 2 * math.exp(-p1) + 1e-11


# --- what the shift costs ---


COSTS = {"aten.mul": 1, "aten.add": 1, "aten.addcmul": 2}
"""Operations on single numbers for one output of each."""


class Operations(TorchDispatchMode):
    """Counts those of what runs inside."""

    n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        cost = COSTS.get(str(function.overloadpacket), 0)
        self.n += cost * out.numel() if cost else 0
        return out


@torch.no_grad()
def operations(shift, n, d):
    """Of one attention layer: on single numbers, and of its matrix products."""
    model = constructed_models.model_of_zeros(torch.ones(1, d), d, d, 1, 1.0, kv_shift=shift)
    text = torch.zeros(1, n, dtype=torch.long)
    with Operations() as counted:
        model(text)
    with FlopCounterMode(display=False) as products:
        model(text)
    return counted.n, products.get_total_flops()


@pytest.mark.parametrize(("n", "d"), [(5, 8), (16, 8), (16, 96), (128, 256)])
def test_the_shift_adds_six_operations_for_each_number_of_the_stream(n, d):
    """KVSA sec. 2.2: two products and a sum for keys and for values, so 6 N D beside the 8 N D^2 of the projections alone,
    as many as without; a window of two takes 10, values alone 3.
    """
    plain = operations(None, n, d)
    for shift, each in ((KVShiftConfig(), 6), (KVShiftConfig(window=2), 10), (KVShiftConfig(keys=False), 3)):
        more = operations(shift, n, d)
        assert (more[0] - plain[0], more[1] - plain[1]) == (each * n * d, 0)
    assert plain[1] >= 8 * n * d**2


# --- what cannot come from an initialization ---


def test_induction_can_come_from_an_initialization_and_bigrams_cannot():
    """KVSA sec. 3.2: hand-written coefficients make an induction head, for texts of any kind. Of the bigrams of a language, a
    table that gives each token its successor, every model knows as much as chance before training: over all tables alike its
    accuracy behind one token is 1 over their number, exactly, and its mean loss at least the logarithm of that.
    """
    size, T = 5, 40
    rows = torch.eye(T, dtype=torch.float64)
    text = torch.randperm(T, generator=torch.Generator().manual_seed(0)).repeat(1, 2)[:, : T + 9]
    head = constructed_models.shifted_head(rows, sigma=0.05, slope=0.0)
    copied = induction_exact.head_output(head, text, blind=False).detach().argmax(dim=-1)
    assert torch.equal(copied[0, T:-1], text[0, T + 1 :])
    config = dict(n_layers=1, d_model=8, n_heads=2, d_head=4, n_ctx=3, d_vocab=size, act_fn="gelu", dtype=torch.float64)
    for seed in range(3):
        shifted = HookedKVTransformer(HookedKVTransformerConfig(**config, kv_shift=True, seed=seed)).requires_grad_(False)
        shifted.W_E.mul_(20), shifted.W_U.mul_(20)  # a model that is sure of what it says
        log_p = shifted(torch.arange(size)[:, None])[:, -1].log_softmax(dim=-1)
        tables = torch.tensor([*itertools.product(range(size), repeat=size)])
        right = (log_p.argmax(dim=-1) == tables).double().mean()
        loss = -log_p.expand(len(tables), -1, -1).gather(2, tables[..., None]).mean()
        assert abs(float(right) - 1 / size) <= 1e-11 and float(loss) >= math.log(size)
        assert log_p.exp().amax(dim=-1).mean() > 0.5


def test_the_first_blind_layer_copies_predecessors():
    """By hand: weights 1 : r : r^2 on the first, second, third token before, nothing on the first row."""
    embeddings, tokens = embeddings_and_tokens()
    model = constructed_models.two_layer_head(embeddings, SIGMA, SLOPE, math.log(4), sees_itself=False)
    with model.hooks(fwd_hooks=[constructed_models.BLIND_HOOK]):
        _, cache = model.run_with_cache(tokens, names_filter=["blocks.0.hook_resid_post", "blocks.0.attn.hook_pattern"])
    assert cache["blocks.0.attn.hook_pattern"][0, 0, 3, :5].tolist() == pytest.approx([1 / 21, 4 / 21, 16 / 21, 0, 0])
    stream = cache["blocks.0.hook_resid_post"]
    assert torch.equal(stream[..., :D], embeddings[tokens])
    assert not stream[:, 0, D:].any()
    assert torch.allclose(stream[:, 2, D:], (4 * embeddings[tokens[:, 1]] + embeddings[tokens[:, 0]]) / 5, atol=1e-15)


def test_a_layer_that_sees_itself_needs_a_silent_first_token_and_loses_digits():
    embeddings, tokens = embeddings_and_tokens()
    silent = embeddings.clone()
    silent[0] = 0
    texts = torch.cat([torch.zeros_like(tokens[:, :1]), tokens], dim=1)

    def error(rows, text, p1):
        return head_error(constructed_models.two_layer_head(rows, SIGMA, SLOPE, p1, sees_itself=True), rows, text)

    early, late = error(silent, texts, 6.0), error(silent, texts, 12.0)
    assert math.log(late / early) == pytest.approx(-6, abs=0.1)  # the theorem's rate, corrections are of size e^-6
    assert error(embeddings, tokens, 12.0) > 1000 * late
    assert error(silent, texts, 30.0) > 100 * late  # rounding, divided by e^-30


# --- virtual heads ---


def two_attending_layers():
    """A model whose layers add what two heads each read, and nothing else; a text, what a pass over it has shown, and W_ov."""
    size = dict(n_layers=2, d_model=6, n_heads=2, d_head=3, n_ctx=POS, d_vocab=VOCAB, attn_only=True, normalization_type=None)
    model = HookedKVTransformer(HookedKVTransformerConfig(**size, dtype=torch.float64, seed=0)).requires_grad_(False)
    for block in model.blocks:
        block.attn.W_Q.mul_(20)  # so that heads are not uniform
    _, tokens = embeddings_and_tokens()
    _, shown = model.run_with_cache(tokens)
    return model, tokens, shown, [layer.W_V @ layer.W_O for layer in head_matrices(model)]


@pytest.mark.parametrize(("h1", "h2"), [(0, 1), (1, 1)])
def test_a_virtual_head_is_what_a_head_reads_of_an_earlier_one(h1, h2):
    """KVSA eq. 1, 2: (A^h2 A^h1) X_0 (W_ov^h1 W_ov^h2) is what h2 writes, less what it writes without h1, its pattern kept."""
    model, tokens, shown, w_ov = two_attending_layers()
    first, second = (shown[f"blocks.{layer}.attn.hook_pattern"][:, head] for layer, head in ((0, h1), (1, h2)))
    virtual = (second @ first) @ shown["blocks.0.hook_resid_pre"] @ (w_ov[0][h1] @ w_ov[1][h2])
    off = torch.ones(2, 1, dtype=torch.float64).index_fill(0, torch.tensor([h1]), 0)
    kept = [
        ("blocks.0.attn.hook_z", lambda z, hook: z * off),
        ("blocks.1.attn.hook_pattern", lambda pattern, hook: shown[hook.name]),
    ]
    with model.hooks(fwd_hooks=kept):
        _, without = model.run_with_cache(tokens)
    z = shown["blocks.1.attn.hook_z"] - without["blocks.1.attn.hook_z"]
    read = z[:, :, h2] @ model.blocks[1].attn.W_O[h2]
    assert virtual.norm() > 1e-3
    assert (virtual - read).norm() <= 1e-11 * virtual.norm()


def test_a_virtual_head_reaches_a_token_only_through_the_tokens_from_it_on():
    """KVSA property 1, eq. 3, on the patterns of a model: the sum over all k is the one from i + 1 to j."""
    _, _, shown, _ = two_attending_layers()
    first, second = (shown[f"blocks.{layer}.attn.hook_pattern"][:, 1] for layer in (0, 1))
    whole = second @ first
    for j in range(POS):
        for i in range(j):
            between = (second[:, j, i + 1 : j + 1] * first[:, i + 1 : j + 1, i + 1]).sum(dim=-1)
            assert (whole[:, j, i + 1] - between).norm() <= 1e-11 * whole[:, j].norm()
    assert (whole.sum(dim=-1) - 1).abs().max() <= 1e-11 and not whole.triu(1).any()  # again a causal pattern


# --- the landscape's model ---


@pytest.mark.parametrize("T", [4, 5, 11])
def test_texts_repeat_a_token_that_has_neighbors(T):
    _, tokens, answers = landscape.model_and_texts(T, n_texts=40, seed=1)
    assert tokens.shape == (40, T + 1)
    assert (tokens[:, :-1].sort(dim=1).values == torch.arange(T)).all()
    place = (tokens[:, :-1] == tokens[:, -1:]).int().argmax(dim=1)  # from 0
    assert set(place.tolist()) == set(range(1, T - 2))  # 1 < i < T - 1, counted from 1; each of them comes up in 40 texts
    assert torch.equal(tokens.gather(1, place[:, None] + 1)[:, 0], answers)


@pytest.mark.parametrize("T", [4, 11])
def test_the_model_has_the_closed_forms_loss_and_gradients_off_the_plane_too(T):
    model, tokens, answers = landscape.model_and_texts(T, n_texts=3, seed=2)
    attn = model.blocks[0].attn
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "blocks.0.attn.k_shift_coef",
        "blocks.0.attn.v_shift_coef",
    ]
    with torch.no_grad():
        attn.k_shift_coef.copy_(torch.tensor([[0.3, -0.8]]))
        attn.v_shift_coef.copy_(torch.tensor([[1.2, 0.4]]))
    alpha, beta = (p.detach()[0].clone().requires_grad_() for p in (attn.k_shift_coef, attn.v_shift_coef))
    losses, closed = cross_entropy(model(tokens)[:, -1], answers, reduction="none"), landscape_loss(alpha, beta, T)
    # of every text alone; sizes up to 1.2 + 0.8
    assert (losses.detach() - closed.detach()).abs().max() <= 4 * landscape.loss_rounding(T)
    got = torch.autograd.grad(losses.mean(), (attn.k_shift_coef, attn.v_shift_coef))
    for a, b in zip(got, torch.autograd.grad(closed, (alpha, beta)), strict=True):
        assert (a[0] - b).abs().max() <= 4 * landscape.loss_rounding(T)


def test_descent_ends_at_the_induction_head_downhill_and_inside_the_square():
    model, tokens, answers = landscape.model_and_texts(6, n_texts=2, seed=4)
    path = pd.DataFrame(landscape.descend(model, tokens, answers, (0.95, 0.05), step_size=0.3, max_steps=300))
    assert len(path) < 300
    assert path[["alpha_1", "beta_1"]].iloc[0].tolist() == [0.95, 0.05]
    assert path[["alpha_1", "beta_1"]].iloc[-1].tolist() == [0, 1]
    assert (path["loss"].diff().dropna() < 0).all()
    assert path["alpha_1"].between(0, 1).all() and path["beta_1"].between(0, 1).all()
    assert path["loss_error"].max() <= landscape.loss_rounding(6)
    assert path["gradient_error"].max() <= landscape.loss_rounding(6)
    # the first step by hand: against the gradient of the closed form
    _, by_alpha, by_beta = landscape.slope_in_plane(*torch.tensor([0.95, 0.05], dtype=torch.float64), 6)
    step = path[["alpha_1", "beta_1"]].iloc[1].tolist()
    assert step == pytest.approx([0.95 - 0.3 * float(by_alpha), 0.05 - 0.3 * float(by_beta)], abs=1e-14)


def test_descent_stops_after_max_steps():
    model, tokens, answers = landscape.model_and_texts(4, n_texts=2, seed=4)
    assert len(list(landscape.descend(model, tokens, answers, (0.5, 0.5), step_size=1e-3, max_steps=3))) == 4


def test_the_plane_is_the_closed_form_and_points_downhill():
    plane = landscape.plane_of(14, 5)
    assert len(plane) == 25
    head = plane[(plane["alpha_1"] == 0) & (plane["beta_1"] == 1)]
    one, zero = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert float(head["loss"].iloc[0]) == pytest.approx(float(landscape_loss(one, zero, 14)), abs=1e-15)
    step = 1e-5
    point = plane[(plane["alpha_1"] == 0.25) & (plane["beta_1"] == 0.75)].iloc[0]
    a1, b1 = (torch.tensor([x - step, x + step], dtype=torch.float64) for x in (0.25, 0.75))
    by_alpha = landscape.slope_in_plane(a1, torch.full_like(a1, 0.75), 14)[0].diff() / (2 * step)
    by_beta = landscape.slope_in_plane(torch.full_like(b1, 0.25), b1, 14)[0].diff() / (2 * step)
    # central differences: step^2 of truncation and eps / step of rounding, times derivatives and losses of size 1 to 3
    assert -point["descent_alpha_1"] == pytest.approx(float(by_alpha), abs=1e-9)
    assert -point["descent_beta_1"] == pytest.approx(float(by_beta), abs=1e-9)


@pytest.mark.parametrize(("alpha_1", "beta_1"), [(0.3, 0.9), (1.0, 0.0), (0.0, 1.0), (-0.4, 1.3)])
def test_the_loss_of_texts_of_two_tokens_is_the_models(alpha_1, beta_1):
    model, tokens = landscape_model(torch.eye(2, dtype=torch.float64)), torch.tensor([[0, 1, 0], [1, 0, 1]])
    set_shift(model, alpha_1, beta_1)
    loss, *slope = landscape.model_slope(model, tokens, torch.tensor([1, 0]))
    at = torch.tensor([alpha_1, beta_1], dtype=torch.float64, requires_grad=True)
    closed = landscape.short_texts_loss(*at)
    assert abs(loss - closed.item()) <= 1e-11
    (by_both,) = torch.autograd.grad(closed, at)
    assert (torch.tensor(slope, dtype=torch.float64) - by_both).abs().max() <= 1e-11


def test_texts_of_two_tokens_lead_to_either_head_and_longer_ones_to_one():
    """By hand: at (1, 0) rows 1 and 3 get e / (2e + 1) each, of which row 3 holds B; row 2 gets 1 / (2e + 1) and holds A."""
    settings = dict(seed=3, n_starts=50, max_steps=400, step_per_token=0.08)
    short, longer = landscape.ends_of(2, settings), landscape.ends_of(5, settings)
    by_hand = math.log1p(math.exp((1 - math.e) / (2 * math.e + 1)))
    at = torch.tensor(landscape.PREVIOUS_TOKEN, dtype=torch.float64)
    assert landscape.short_texts_loss(*at).item() == pytest.approx(by_hand, abs=1e-14)
    heads = [landscape.is_at(short, end) for end in (landscape.PREVIOUS_TOKEN, landscape.INDUCTION_HEAD)]
    assert all(ends.any() for ends in heads) and (heads[0] | heads[1]).all()
    near = (short["start_alpha_1"] < 0.2) & (short["start_beta_1"] > 0.8)
    assert near.any() and heads[1][near].all()
    assert landscape.is_at(longer, landscape.INDUCTION_HEAD).all()


def test_claims_about_texts_of_two_tokens_can_fail(monkeypatch):
    def ends(T, *points):
        return pd.DataFrame([dict(T=T, alpha_1=a, beta_1=b) for a, b in points])

    previous, induction = landscape.PREVIOUS_TOKEN, landscape.INDUCTION_HEAD
    found = landscape.compare_short_texts(pd.concat([ends(2, *[previous] * 40), ends(4, *[induction] * 40)]))
    assert [one.holds for one in found] == [True] * 4
    monkeypatch.setattr(landscape, "PREVIOUS_TOKEN", induction)  # the other way round: what holds of one head not of the other
    monkeypatch.setattr(landscape, "INDUCTION_HEAD", previous)
    found = landscape.compare_short_texts(pd.concat([ends(2, *[previous] * 40), ends(4, *[induction] * 40)]))
    assert [one.holds for one in found] == [False] * 4


# --- comparisons ---


def made_up_errors(rate, shifted):
    rows = [dict(construction=induction_exact.SHIFTED, p1=math.nan, max_abs_error=shifted)]
    for p1 in range(1, 41):
        for construction in (induction_exact.BLIND, induction_exact.ORDINARY):
            rows.append(dict(construction=construction, p1=p1, max_abs_error=max(3 * math.exp(rate * p1), 1e-16)))
    return pd.DataFrame(rows).assign(dtype="float64", sigma=SIGMA, slope=SLOPE)


@pytest.mark.parametrize(("rate", "shifted", "holds"), [(-1, 0, [1, 1, 1]), (-0.5, 0, [0, 1, 0]), (-1, 1e-9, [1, 0, 1])])
def test_claims_about_heads_can_fail(rate, shifted, holds):
    shown = dict(sigma=SIGMA, slope=SLOPE)
    exact, law, vanishes, ordinary = induction_exact.compare(made_up_errors(rate, shifted), 1e-13, shown)
    assert law.ours == pytest.approx(rate, abs=1e-9)  # rounding at 1e-16 does not tilt the line
    assert [law.holds, exact.holds, vanishes.holds] == [bool(h) for h in holds]
    assert ordinary.holds is None


def test_claims_about_the_landscape_can_fail():
    down = dict(descent_alpha_1=-1.0, descent_beta_1=1.0)
    turns = dict(descent_alpha_1=-1.0, descent_beta_1=-1.0)
    plane = pd.DataFrame([dict(T=4, **down), dict(T=4, **turns), dict(T=14, **down), dict(T=14, **down)])
    plane.loc[2:, ["descent_alpha_1", "descent_beta_1"]] *= 0.5
    end = dict(start=0, alpha_1=0.0, beta_1=1.0, loss_error=0.0)
    path = pd.DataFrame([dict(T=4, **end), dict(T=14, **end)])
    assert [c.holds for c in landscape.compare(plane, path)] == [True] * 5
    assert [c.ours for c in landscape.compare(plane, path)] == [0, 0.5, 1, "1.41 at T = 4, 0.707 at T = 14", 0]
    wrong_order = plane.assign(T=[14, 14, 4, 4])
    elsewhere = path.assign(beta_1=[1.0, 0.9], loss_error=[1e-9, 0])
    assert [c.holds for c in landscape.compare(wrong_order, elsewhere)] == [False] * 5


# --- both ---

"""Choosing and fitting a prompt's keys against plain forms that solve every fit from scratch, and the error formula itself."""

import functools
import math

import pytest
import torch
from ops_cases import normal

from kvlens.conversion import moved_keys
from kvlens.conversion.few_keys import own_keys
from kvlens.conversion.moved_keys import Placed, descended, fitted_head, fitted_layer, mean_square, moved
from kvlens.ops import landmarks, pursuit
from kvlens.ops.landmarks import (
    Products,
    PromptKeys,
    Queries,
    Rows,
    Statistics,
    Wanted,
    cells_of,
    fit_values,
    fit_weights,
    naive_fit_values,
    naive_fit_weights,
    naive_share,
    output_errors,
    shares,
    statistics,
)
from kvlens.ops.pursuit import (
    Chosen,
    budgets_by_gain,
    choose_among,
    choose_keys,
    lazy_paths,
    levels,
    naive_choose_keys,
    naive_greedy_budgets,
    waterline,
)
from kvlens.ops.softmax_attention import ScaledFeatures
from kvlens.ops.softmax_features import ScoreRule, virtual_key_scores

BATCH, KV, GROUP, D, KEYS, ROWS = 2, 3, 2, 5, 7, 11
RULES = {
    "plain": ScoreRule(1.7),
    "alibi": ScoreRule(1.7, slopes=0.125 * torch.arange(1, 7)),  # kept in float32, which has these exactly
    "soft-capped": ScoreRule(1.7, soft_cap=2.0),
}


def attention(rule: ScoreRule = RULES["plain"], rows: int = ROWS) -> tuple[Queries, PromptKeys]:
    """Queries that saw the prompt's keys and some text of their own, and what attention over both gave them."""
    keys, values = normal(BATCH, KV, KEYS, D, seed=1), normal(BATCH, KV, KEYS, D, seed=2)
    q = 1.5 * normal(BATCH, rows, KV * GROUP, D, seed=3)
    distance = torch.arange(KEYS, 0, -1).expand(BATCH, KV, KEYS).clone()
    positions = torch.arange(rows) % ROWS
    scores = virtual_key_scores(q, keys, rule, distance, positions[None])
    of_text = normal(BATCH, rows, KV * GROUP, seed=4)
    log_n = torch.cat([scores, of_text[..., None]], dim=-1).logsumexp(dim=-1)
    psi = (scores - log_n[..., None]).exp()
    read = torch.einsum("bihj,bhjd->bihd", psi, values.repeat_interleave(GROUP, dim=1))
    z = read + (of_text - log_n).exp()[..., None] * normal(BATCH, rows, KV * GROUP, D, seed=5)
    return Queries(q, z, log_n, positions), PromptKeys(keys, values, distance, None, rule)


def roots() -> torch.Tensor:
    return normal(BATCH, KV, D, D, seed=6)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_shares_are_the_keys_parts_of_the_normalizer(rule):
    queries, prompt = attention(rule)
    psi, p, *_ = shares(queries, prompt)
    for b, g, i, s, j in ((0, 0, 0, 0, 0), (1, 2, 10, 1, 6), (0, 1, 4, 1, 3)):
        head, apart = g * GROUP + s, int(queries.positions[i] + prompt.distance[b, g, j])
        log_n = float(queries.log_n[b, i, head])
        expected = naive_share(queries.q[b, i, head], prompt.keys[b, g, j], log_n, rule, head, apart)
        assert float(psi[b * KV + g, i * GROUP + s, j]) == pytest.approx(expected, rel=1e-11)
    torch.testing.assert_close(p, psi.sum(dim=-1), rtol=1e-13, atol=0)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_sums_are_sums_over_every_query(rule):
    queries, prompt = attention(rule)
    prompt = prompt._replace(real=torch.arange(KEYS) < torch.tensor([[KEYS], [KEYS - 2]]))
    got, (psi, p, a, z) = statistics(queries, prompt, roots()), shares(queries, prompt)
    root = roots().flatten(0, 1)
    close = functools.partial(torch.testing.assert_close, rtol=1e-11, atol=1e-12)
    close(got.gram.products, torch.einsum("cij,cik->cjk", psi, psi))
    close(got.with_p, torch.einsum("cij,ci->cj", psi, p))
    close(got.with_a, torch.einsum("cij,cid->cjd", psi, a @ root))
    close(got.z_size, (z @ root).square().sum(dim=-1).mean(dim=1).sqrt())
    assert got.n_rows == psi.shape[1]


def test_sums_over_blocks_are_sums(monkeypatch):
    queries, prompt = attention()
    whole = statistics(queries, prompt, roots())
    monkeypatch.setattr(landmarks, "BLOCK_NUMBERS", 3 * GROUP * KEYS)
    monkeypatch.setattr(landmarks, "GRAM_ROWS", 3)  # 7 keys: in threes, and one
    parts = statistics(queries, prompt, roots())
    torch.testing.assert_close(whole.gram.products, parts.gram.products, rtol=1e-12, atol=1e-12)
    for a, b in zip(whole[1:], parts[1:], strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-12, atol=1e-12)


def test_keys_of_a_long_prompt_are_chosen_alike_head_by_head_from_the_queries_rows(monkeypatch):
    queries, prompt = attention()
    some = queries.part(slice(0, 2))  # 2 queries of 2 heads are 4 rows, fewer than the 7 keys
    rows = choose_among([(some, prompt, roots())], 3)[0]
    monkeypatch.setattr(landmarks, "as_rows", lambda n_rows, n_keys: False)
    products = choose_among([(some, prompt, roots())], 3)[0]
    monkeypatch.undo()
    monkeypatch.setattr(landmarks, "NUMBERS_AT_ONCE", 1)
    for other in (products, choose_among([(some, prompt, roots())], 3)[0]):
        for a, b in zip(rows, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert isinstance(statistics(some, prompt, roots()).gram, Rows)


def test_matching_pursuit_takes_the_key_after_which_least_is_left():
    queries, prompt = attention()
    got = choose_keys(statistics(queries, prompt, roots()), 4)
    psi, p, a, z = shares(queries, prompt)
    for cell in range(BATCH * KV):
        root = roots().flatten(0, 1)[cell]
        keys, gains = naive_choose_keys(psi[cell], p[cell], a[cell] @ root, z[cell] @ root, 4)
        assert got.keys[cell].tolist() == keys
        torch.testing.assert_close(got.gain[cell], torch.tensor(gains, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def test_weights_are_the_best_that_are_not_negative():
    """Where dropping the negative ones, again and again, ends: it need not be the best set, and here it is."""
    queries, prompt = attention()
    index = choose_keys(statistics(queries, prompt, roots()), 4).keys
    psi, p, _, _ = shares(queries, prompt)
    for cell, (own, keys) in enumerate(cells_of(queries, prompt)):
        some = index[cell]
        w = fit_weights(Wanted.of(own, keys), keys.keys[0, 0, some], keys.distance[0, 0, some])
        # the ridge is 1e-9 of the diagonal, and the condition number of four keys up to 1e4
        torch.testing.assert_close(w, naive_fit_weights(psi[cell][:, some], p[cell]), rtol=1e-5, atol=1e-7)


def test_values_have_least_output_error():
    queries, prompt = attention()
    some, w = torch.tensor([4, 1, 6]), torch.tensor([0.5, 1.5, 1.0], dtype=torch.float64)
    psi, p, a, z = shares(queries, prompt)
    for cell, (own, keys) in enumerate(cells_of(queries, prompt)):
        start = w[:, None] * keys.values[0, 0, some]
        got = fit_values(Wanted.of(own, keys), keys.keys[0, 0, some], keys.distance[0, 0, some], w, start)
        expected = naive_fit_values(psi[cell][:, some], p[cell], a[cell], z[cell], w)
        # the ridge is 1e-6 of the diagonal, and the condition number of three keys up to 1e3
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def test_the_error_formula_is_the_error():
    """Attention with the fitted keys instead of the prompt, from its definition, against what output_errors reports."""
    queries, prompt = attention()
    index, w = torch.tensor([4, 1, 6]), torch.tensor([0.5, 1.5, 1.0], dtype=torch.float64)
    b_d = w.expand(BATCH, KV, 3)
    b_kv = normal(BATCH, KV, 3, D, seed=9)
    scores = virtual_key_scores(queries.q, prompt.keys[:, :, index], prompt.rule)
    found = output_errors(queries, prompt, lambda _: ScaledFeatures(scores.exp(), torch.zeros_like(queries.log_n)), b_kv, b_d)
    psi, p, a, z = (t.unflatten(0, (BATCH, KV)).unflatten(2, (ROWS, GROUP)) for t in shares(queries, prompt))
    rows = psi[..., index]
    text = z - a  # what the text gives, times its share of the normalizer
    mass = (rows * w).sum(dim=-1)
    new = (text + torch.einsum("bgisr,bgrd->bgisd", rows, b_kv)) / (1 - p + mass)[..., None]
    expected = ((new - z).square().sum(dim=(2, 4)) / z.square().sum(dim=(2, 4))).sqrt().flatten(1)
    torch.testing.assert_close(found.output, expected, rtol=1e-10, atol=1e-12)
    expected = ((mass - p).square().sum(dim=2) / p.square().sum(dim=2)).sqrt().flatten(1)
    torch.testing.assert_close(found.mass, expected, rtol=1e-10, atol=1e-12)


def heads_with_three_keys(rule: ScoreRule, rows: int = ROWS):
    """Each key-value head with a fit in closed form, as :func:`moved` takes it."""
    queries, prompt = attention(rule, rows)
    some = torch.tensor([4, 1, 6])
    for cell, (own, keys) in enumerate(cells_of(queries, prompt)):
        wanted, place = Wanted.of(own, keys), (keys.keys[0, 0, some], keys.distance[0, 0, some])
        w = fit_weights(wanted, *place).clamp(min=0.1)
        start = Placed(*place, w, w[:, None] * keys.values[0, 0, some]).with_best_values(wanted)
        yield wanted, keys, start, roots().flatten(0, 1)[cell]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_error_that_moves_keys_is_that_of_attention_to_them(rule):
    for wanted, prompt, start, root in heads_with_three_keys(rule):
        placed = start._replace(keys=start.keys + 0.3)
        queries, total = wanted.queries, 0.0
        for i in range(ROWS):
            for s in range(GROUP):
                q, z, log_n = (x[0, i, s] for x in (queries.q, queries.z, queries.log_n))
                every = zip(placed.keys, placed.distance, strict=True)
                psi = [naive_share(q, k, log_n, prompt.rule, s, int(at) + i) for k, at in every]
                of_prompt = [
                    naive_share(q, k, log_n, prompt.rule, s, int(at) + i)
                    for k, at in zip(prompt.keys[0, 0], prompt.distance[0, 0], strict=True)
                ]
                text = z - sum(x * v for x, v in zip(of_prompt, prompt.values[0, 0], strict=True))
                given = sum(x * v for x, v in zip(psi, start.values, strict=True))
                whole = 1 - sum(of_prompt) + sum(x * w for x, w in zip(psi, start.weights, strict=True))
                total += float(((text + given) / whole - z) @ root @ root.T @ ((text + given) / whole - z))
        assert mean_square(wanted, placed, root) == pytest.approx(total / (ROWS * GROUP), rel=1e-11)


def naive_descended(read: Wanted, start: Placed, root: torch.Tensor, steps: int, generator: torch.Generator) -> Placed:
    """The steps with PyTorch's gradients, Adam and schedule, on the error as `mean_square` has it."""
    first = start.keys, start.weights.log(), start.values / start.weights[:, None]
    units = moved_keys._size(first[0]), 1.0, moved_keys._size(first[2])
    changes = [torch.zeros_like(x).requires_grad_() for x in first]
    size = math.ceil(len(read.p) / math.ceil(len(read.p) / moved_keys.QUERIES_PER_STEP))
    betas = moved_keys.FIRST_MOMENT, moved_keys.SECOND_MOMENT
    optimizer, order = torch.optim.Adam(changes, lr=moved_keys.MOVING_RATE, betas=betas), list[int]()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def now() -> Placed:
        keys, log_weights, values = (x + unit * change for x, unit, change in zip(first, units, changes, strict=True))
        return start._replace(keys=keys, weights=log_weights.exp(), values=log_weights.exp()[:, None] * values)

    for _ in range(steps):
        order = order or torch.randperm(math.ceil(len(read.p) / size), generator=generator).tolist()
        number = order.pop()
        some, placed, total = read.part(slice(number * size, (number + 1) * size)), now(), 0.0
        for psi, p, a, z in some.rows(placed.keys, placed.distance):
            off = psi @ placed.weights - p
            error = (psi @ placed.values - a - z * off[:, None]) @ root / (1 + off).clamp(min=1e-6)[:, None]
            total = total + error.square().sum() / some.p.numel()
        optimizer.zero_grad()
        (total / mean_square(read, start, root)).backward()
        optimizer.step()
        schedule.step()
    return Placed(*(x.detach() for x in now()))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_descent_in_closed_form_is_that_of_automatic_gradients(rule, monkeypatch):
    """Head by head: every number of a step, and so the objective."""
    monkeypatch.setattr(moved_keys, "QUERIES_PER_STEP", 20)
    for wanted, _, start, root in heads_with_three_keys(rule, rows=50):
        found = descended(wanted, start, root, 12, torch.Generator().manual_seed(3))
        expected = naive_descended(wanted, start, root, 12, torch.Generator().manual_seed(3))
        assert (found.keys - start.keys).abs().max() > 0.05
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_moved_keys_have_less_error_and_the_best_values_there(rule, monkeypatch):
    for wanted, _, start, root in heads_with_three_keys(rule, rows=200):
        found = moved(wanted, start, root, steps=40, seed=0)
        after = mean_square(wanted, found, root)
        assert after < 0.9 * mean_square(wanted, start, root)
        assert bool((found.weights > 0).all())
        for seed in (7, 8, 9):
            other = found._replace(values=found.values + 1e-2 * normal(3, D, seed=seed))
            assert mean_square(wanted, other, root) > after
        with monkeypatch.context() as too_far:
            too_far.setattr(moved_keys, "MOVING_RATE", 1e3)
            assert moved(wanted, start, root, steps=3, seed=0) is start


def test_an_eighth_of_the_queries_moves_nothing_but_judges():
    wanted, _, start, root = next(heads_with_three_keys(RULES["plain"], rows=200))
    judges = torch.randperm(200, generator=torch.Generator().manual_seed(0))[:25]
    found = moved(wanted, start, root, steps=30, seed=0)
    for row, reads in ((int(judges[3]), False), (min({*range(200)} - {*judges.tolist()}), True)):
        z = wanted.queries.z.clone()
        z[:, row] += 1e-2
        other = moved(wanted._replace(queries=wanted.queries._replace(z=z)), start, root, steps=30, seed=0)
        assert torch.equal(other.keys, found.keys) is not reads
        assert not torch.equal(other.values, found.values)
    assert moved(wanted.part(slice(7)), start, root, steps=30, seed=0) is start  # none to judge


def test_heads_are_fitted_by_themselves_and_one_with_every_key_or_none_keeps_them():
    queries, prompt = attention(rows=200)
    index = torch.arange(KEYS).expand(BATCH * KV, KEYS)
    own = own_keys(prompt, index, torch.tensor([[KEYS, 3, 4], [2, 0, 3]]))
    layer = fitted_layer(prompt, queries, own, roots(), steps=20, seed=0)
    same = [[torch.equal(layer.values[b, g], own.values[b, g]) for g in range(KV)] for b in range(BATCH)]
    assert same == [[True, False, False], [False, True, False]]
    assert torch.equal(layer.keys[0, 0], prompt.keys[0, 0])
    assert torch.equal(layer.weights > 0, own.weights > 0)
    for cell, (each, keys) in enumerate(cells_of(queries, prompt)):
        used, at = own.weights.flatten(0, 1)[cell] > 0, divmod(cell, KV)
        if 0 < int(used.sum()) < KEYS:
            start = Placed(*(x[at][used] for x in own))
            alone = fitted_head(Wanted.of(each, keys), start, roots()[at], steps=20, seed=0)
            assert all(torch.equal(x[at][used], y) for x, y in zip(layer, alone, strict=True))


def test_every_keys_share_is_computed_once_for_all_fits_of_a_head(monkeypatch):
    queries, prompt = attention(rows=200)
    own = own_keys(prompt, torch.arange(KEYS).expand(BATCH * KV, KEYS), torch.full((BATCH, KV), 3))
    whole, made = landmarks.key_shares, []

    def counted(queries, prompt):
        made.append(prompt.keys.shape[2])
        return whole(queries, prompt)

    monkeypatch.setattr(landmarks, "key_shares", counted)
    fitted_layer(prompt, queries, own, roots(), steps=5, seed=0)
    assert made.count(KEYS) == BATCH * KV and set(made) == {KEYS, 3}


def test_a_long_prompts_head_is_followed_no_further_than_its_own_path_goes(monkeypatch):
    """On a CPU; the paths of a short one's heads are as long as the longest, which costs less there than to begin each anew."""
    queries, prompt = attention()
    last = torch.arange(KEYS) == KEYS - 1
    one = prompt._replace(values=torch.where(last[:, None], prompt.values, prompt.values[..., -1:, :]))
    values = torch.cat([prompt.values[:, :1], one.values[:, 1:]], dim=1)  # all heads but the first need little
    column, read = Products.column, []
    monkeypatch.setattr(Products, "column", lambda gram, j: read.append(len(j)) or column(gram, j))
    monkeypatch.setattr(pursuit, "AHEAD", 1)
    layer = queries, prompt._replace(values=values), roots()
    floor = torch.tensor([2.0, 2.0], dtype=torch.float64)
    (together,) = choose_among([layer], KEYS, floor)
    n_together = sum(read)
    read.clear()
    monkeypatch.setattr(landmarks, "BLOCK_NUMBERS", 1)
    (alone,) = choose_among([layer], KEYS, floor)
    assert sum(read) < n_together == BATCH * KV * together.gain.shape[1]
    total = torch.tensor([4, 4])
    assert torch.equal(budgets_by_gain([alone.gain], total), budgets_by_gain([together.gain], total))
    short, each = (
        Chosen(*(x[:, :1] for x in alone)),
        BATCH * KV,
    )  # some paths have ended after one step, and are kept as they are
    read.clear()
    (longer,) = choose_among([layer], KEYS, floor, [short])
    ended = int((levels(short.gain)[:, -1] < 2).sum())
    assert 0 < ended < each and torch.equal(budgets_by_gain([longer.gain], total), budgets_by_gain([alone.gain], total))
    assert longer.gain[:, 1].count_nonzero() == each - ended


@pytest.mark.parametrize("total", [0, 1, 5, 9, 12])
def test_budgets_remove_most(total):
    """With gains that fall, as a pursuit's do, one key after the other is the best of all ways to give them out."""
    gain = normal(3, 4, seed=8).abs().sort(dim=-1, descending=True).values
    got = budgets_by_gain(list(gain[:, None]), torch.tensor([total]))[:, 0, 0]
    assert got.tolist() == naive_greedy_budgets(gain, total).tolist()


def test_a_small_gain_before_a_large_one_does_not_stop_a_head():
    gain = [torch.tensor([[0.1, 5.0, 0.0]]), torch.tensor([[1.0, 0.5, 0.4]])]
    assert budgets_by_gain(gain, torch.tensor([2]))[:, 0, 0].tolist() == [2, 0]
    assert budgets_by_gain(gain, torch.tensor([6]))[:, 0, 0].tolist() == [2, 3]  # none that removes nothing


def test_levels_and_the_waterline_by_hand(monkeypatch):
    monkeypatch.setattr(pursuit, "AHEAD", 2)
    gain = torch.tensor([[3.0, 1.0, 2.0, 0.5, 4.0, 0.25]])
    assert levels(gain).tolist() == [[3.0, 2.0, 2.0, 2.0, 2.0, 0.25]]  # 4 comes too late to lift what was 2 before
    other = torch.tensor([[2.5, 0.5]])
    assert waterline([gain, other], torch.tensor([3])).tolist() == [2.0]
    assert waterline([other], torch.tensor([3])).tolist() == [0.0]  # two keys are known, the third may be worth anything


def test_keys_of_several_layers_are_chosen_as_those_of_each():
    """Each layer's path is as long as the longest of them needs, and begins as its own."""
    layers = []
    for seed in (0, 1, 2):
        queries, prompt = attention()
        layers.append((queries, prompt._replace(values=prompt.values + normal(*prompt.values.shape, seed=seed)), roots()))
    for layer, found in zip(layers, choose_among(layers, 5), strict=True):
        (own,) = choose_among([layer], 5)
        assert torch.equal(found.keys, own.keys)
        torch.testing.assert_close(found.gain, own.gain, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("total", [6, 14, 30])
def test_lazy_paths_are_the_whole_paths_cut_at_the_waterline(monkeypatch, total, at_once):
    """Keys and budgets; and less is computed."""
    monkeypatch.setattr(pursuit, "AHEAD", 2)
    monkeypatch.setattr(pursuit, "FIRST_STEPS", 1)
    monkeypatch.setattr(pursuit, "FEW_STEPS", 2)
    n_keys, layers, problems = 23, 3, []
    for layer in range(layers):
        columns = normal(2 * KV, 40, n_keys, seed=layer)
        size = torch.linspace(0, -9, n_keys, dtype=torch.float64).exp() / (1 + layer)
        gram = columns.mT @ columns
        target = gram @ (size[:, None] * normal(2 * KV, n_keys, 3, seed=10 + layer))
        root = normal(2 * KV, seed=20 + layer).exp()  # some heads matter more
        problems.append(
            Statistics(Products(gram), root[:, None] * target[..., 0], root[:, None, None] * target[..., 1:], root, 40)
        )
    whole = [choose_keys(each, n_keys) for each in problems]

    def path(some, r, floor, before):
        return [choose_keys(problems[layer], r, floor.repeat_interleave(KV)) for layer in some]

    wanted = torch.tensor([total // 6, total // 3])  # two prompts
    lazy = lazy_paths(path, layers, n_keys, wanted, KV, at_once)
    budgets = budgets_by_gain([each.gain for each in whole], wanted * layers * KV)
    assert torch.equal(budgets_by_gain([each.gain for each in lazy], wanted * layers * KV), budgets)
    assert budgets.sum(dim=(0, 2)).tolist() == (wanted * layers * KV).tolist()
    for mine, theirs, counts in zip(lazy, whole, budgets.flatten(1), strict=True):
        for cell, n in enumerate(counts.tolist()):
            assert torch.equal(mine.keys[cell, :n], theirs.keys[cell, :n])
    assert sum(each.gain.shape[1] for each in lazy) < layers * n_keys


def test_one_key_by_hand():
    """Two keys, one query: shares 3/4 and 1/8, text 1/8; the first key alone needs weight 7/6 for the same normalizer."""
    keys = torch.tensor([[[[math.log(6.0)], [0.0]]]], dtype=torch.float64)
    queries = Queries(
        torch.ones(1, 1, 1, 1, dtype=torch.float64),
        torch.ones(1, 1, 1, 1, dtype=torch.float64),
        torch.full((1, 1, 1), math.log(8.0), dtype=torch.float64),
        torch.zeros(1, dtype=torch.long),
    )
    prompt = PromptKeys(
        keys, torch.tensor([[[[2.0], [4.0]]]], dtype=torch.float64), torch.ones(1, 1, 2).long(), None, ScoreRule(1.0)
    )
    psi, p, a, _ = shares(queries, prompt)
    assert (
        psi[0, 0].tolist() == pytest.approx([0.75, 0.125])
        and float(p) == pytest.approx(0.875)
        and float(a) == pytest.approx(2.0)
    )
    sums = statistics(queries, prompt, torch.ones(1, 1, 1, 1, dtype=torch.float64))
    chosen = choose_keys(sums, 1)
    assert chosen.keys.tolist() == [[0]]
    assert float(fit_weights(Wanted.of(queries, prompt), keys[0, 0, :1], torch.ones(1).long())) == pytest.approx(7 / 6)

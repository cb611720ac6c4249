"""Heads that are known by construction get their names; scores against loops over the written-out patterns, TransformerLens'
detector, and interventions.

Scores of the weights: the formulas as printed give them, of any model; TransformerLens' own where both measure the same.
"""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from analysis_models import (
    D_VOCAB,
    HEAD_TAPS,
    SHARP,
    blank_model,
    centered,
    heads_and_verdicts,
    shifted_heads,
    two_layer_circuit,
)
from kvlens.analyses.declaration import Record
from kvlens.analyses.heads import ablation, induction, naming
from kvlens.analyses.heads.ablation import resampling_ablation
from kvlens.analyses.heads.head_pairs import COLUMNS as PAIRS
from kvlens.analyses.heads.repeated_text import PATTERNS, ShiftTaps, displacement, draw_piece, repeat_tokens, roles
from kvlens.analyses.heads.retrieval import agreement_of_halves, bootstrapped
from small_models import sharp
from transformer_lens.head_detector import detect_head

from kvlens import HookedKVTransformer, KVLensError, KVShiftConfig, convert_prompt
from kvlens.analyses import composition, induction_heads, induction_verdicts

N = 7
MODELS = {
    "softmax, rotary": {},
    "softmax, shifted, grouped": dict(d_mlp=None, attn_only=True, normalization_type="RMS"),
    "softmax, shifted": dict(kv_shift=KVShiftConfig(values=False, parametrization="gate")),
    "rope after": {},
    "gqa decay": dict(kv_shift=KVShiftConfig(queries=True), seed=8),
    "softmax, norms behind heads": {},
}


def piece(n_sequences=3, n=N, seed=0, d_vocab=17):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(d_vocab, generator=generator)[:n] for _ in range(n_sequences)])


def twice(rows):
    return torch.cat([rows, rows], dim=1)


def only(frame, **where):
    for name, value in where.items():
        frame = frame[frame[name] == value]
    assert len(frame) == 1
    return frame.iloc[0]


# --- known by construction -------------------------------------------------------------------------------------------


def test_each_shifted_head_has_the_role_that_it_was_given_and_reads_what_its_role_says():
    frame = heads_and_verdicts(shifted_heads(), n_sequences=3, n_repeated=N)
    assert frame["role"].tolist() == list(HEAD_TAPS)
    assert frame["displacement"].tolist() == [1, -1, 0, 0]
    assert frame["verdict"].tolist() == ["prefix matching", "previous token", "duplicate token", "duplicate token"]
    matching, predecessor, delayed, plain = (row for _, row in frame.iterrows())
    assert matching["prefix_matching_score"] == matching["prefix_matching_score_value"] == pytest.approx(1, abs=1e-12)
    assert matching["duplicate_token_score_key"] == pytest.approx(1, abs=1e-12)  # its keys are those of the token itself
    assert matching["logit_attribution"] == pytest.approx(1 - 1 / D_VOCAB, abs=1e-12)  # the right token, one-hot
    # matching the token itself: once in the first copy, twice in the second; it reads the place before either
    assert predecessor["previous_token_score_value"] == pytest.approx((N - 1 + N / 2) / (2 * N - 1), abs=1e-12)
    # by the raw pattern this is prefix matching; what it reads is the duplicate
    assert delayed["prefix_matching_score"] == delayed["duplicate_token_score_value"] == pytest.approx(1, abs=1e-12)
    assert delayed["prefix_matching_score_value"] == pytest.approx(0, abs=1e-12)
    assert plain["duplicate_token_score_value"] == pytest.approx(0.5, abs=1e-12)
    assert frame["k_composition_layer"].isna().all() and frame["k_composition_score"].isna().all()


def test_intervals_and_stability_are_over_sequences_and_the_null_has_another_first_copy():
    model, rows = sharp("softmax, shifted"), piece(4)
    table, alone = induction_heads(model, rows), [induction_heads(model, row) for row in rows]
    values = np.stack([each["score_value"] for each in alone])
    np.testing.assert_allclose(table["score_value"], values.mean(axis=0), rtol=1e-11)
    np.testing.assert_allclose(table[["score_low", "score_high"]].T, bootstrapped(values, 0), rtol=1e-11)
    for _, of_kind in table.groupby("kind"):
        assert of_kind["stability"].tolist() == pytest.approx([agreement_of_halves(values[:, of_kind.index], 0)] * len(of_kind))
    assert alone[0][["score_low", "score_high", "stability"]].isna().all(axis=None)
    matching = only(induction_heads(shifted_heads(), n_sequences=3, n_repeated=N), head=0, kind="prefix_matching")
    assert matching["null"] < 0.5 < matching["score_low"]


def test_the_two_layer_circuit_is_found_with_its_k_composition():
    frame = heads_and_verdicts(two_layer_circuit(), n_sequences=2, n_repeated=N)
    named = frame.loc[~frame["verdict"].isin(["none", "inconclusive"]), ["layer", "head", "verdict"]]
    assert named.to_numpy().tolist() == [[0, 1, "previous token"], [1, 2, "prefix matching"]]
    before, induction = only(frame, layer=0, head=1), only(frame, layer=1, head=2)
    assert before["previous_token_score"] == pytest.approx(1, abs=1e-12)
    # at the start of the second copy place 0, which attends to itself, matches as well: half of one place of N
    assert induction["prefix_matching_score"] == pytest.approx(1 - 0.5 / N, abs=1e-12)
    assert (induction["k_composition_layer"], induction["k_composition_head"]) == (0, 1)
    # W_OV is the identity between two spaces of D_VOCAB dimensions and W_QK 60 times that: sqrt(D) / (sqrt(D) sqrt(D))
    assert induction["k_composition_score"] == pytest.approx(1 / math.sqrt(D_VOCAB))


def test_a_head_that_lowers_what_it_finds_has_the_opposite_attribution():
    model = shifted_heads()
    model.blocks[0].attn.W_O[0] *= -1
    row = induction_verdicts(model, n_sequences=2, n_repeated=N).iloc[0]
    assert row["verdict"] == "prefix matching"
    assert row["logit_attribution"] == pytest.approx(1 / D_VOCAB - 1)


def test_the_verdict_does_not_see_a_rescaling_of_the_coefficients_against_the_values():
    model = shifted_heads()
    attn = model.blocks[0].attn
    attn.v_shift_coef.mul_(-0.01)
    attn.W_V.mul_(-100)
    before, after = (induction_verdicts(m, n_sequences=2, n_repeated=N) for m in (shifted_heads(), model))
    assert before["verdict"].tolist() == after["verdict"].tolist()
    assert before["logit_attribution"].tolist() == pytest.approx(after["logit_attribution"].tolist())


def test_the_threshold_decides():
    """A score of 3 next to i scores of 0 takes e^3 / (e^3 + i): 0.84 on the first seven positions, 0.67 on the last."""
    model = two_layer_circuit()
    model.blocks[0].attn.W_Q[1] *= 3 / SHARP
    for threshold, name in ((0.9, "none"), (0.8, "previous token"), (0.6, "previous token")):
        assert induction_verdicts(model, n_sequences=2, n_repeated=N, threshold=threshold)["verdict"].iloc[1] == name


def test_roles_of_wider_windows_and_shifted_queries():
    def taps(*rows):
        return torch.tensor(rows)

    k, v = taps([0.1, 0.2, 0.7], [0.5, 0.5, 0.0], [0.0, 0.9, 0.1]), taps([1.0, 0, 0], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1])
    still, late = taps([1.0, 0, 0]).expand(3, -1), taps([0, 1.0, 0]).expand(3, -1)
    assert displacement(ShiftTaps(k, v, still)).tolist() == [2, -1, 0]
    assert roles(ShiftTaps(k, v, still)) == ["prefix matching", "predecessor", "delayed"]
    assert displacement(ShiftTaps(k, v, late)).tolist() == [1, -2, -1]


# --- scores against their definition ---------------------------------------------------------------------------------


def shift_matrix(coefficients, n):
    """coefficients[0] I + coefficients[1] Shift + ..., with Shift[s, s - 1] = 1."""
    return sum(c * torch.eye(n, dtype=torch.float64).roll(-lag, dims=1).tril(-lag) for lag, c in enumerate(coefficients))


def slow_scores(pattern, taps):
    """prefix matching, previous token, duplicate token of patterns [batch, 2N, 2N], by loops over the written-out product."""
    effective = pattern @ shift_matrix(taps, 2 * N)
    mean = lambda pairs: sum(effective[:, i, t].mean() for i, t in pairs) / len(pairs)  # noqa: E731
    return [
        float(mean([(i, i - N + 1) for i in range(N, 2 * N)])),
        float(mean([(i, i - 1) for i in range(1, 2 * N)])),
        float(mean([(i, i - N) for i in range(N, 2 * N)])),
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_scores_equal_loops_over_written_out_effective_patterns(name):
    model = sharp(name, **MODELS[name])
    frame = heads_and_verdicts(model, prompt=piece())
    _, cache = model.run_with_cache(twice(piece()))
    kinds = ("prefix_matching", "previous_token", "duplicate_token")
    group = model.cfg.n_heads // model.cfg.n_kv_heads
    for row in frame.to_dict("records"):
        layer, head = row["layer"], row["head"]
        used = {}
        for x in "kv":
            coef = cache.cache_dict.get(f"blocks.{layer}.attn.hook_{x}_shift_coef")
            used[x] = [1.0] if coef is None else coef[head // group].tolist()
        pattern = cache["pattern", layer][:, head]
        for view, taps in (("", [1.0]), ("_value", used["v"]), ("_key", used["k"])):
            expected = slow_scores(pattern, taps)
            assert [row[f"{kind}_score{view}"] for kind in kinds] == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert (row["alpha_1"], row["beta_1"]) == (pytest.approx(used["k"][0]), pytest.approx(used["v"][0]))
        assert (row["alpha_2"], row["beta_2"]) == tuple(pytest.approx([*used[x], 0.0][1]) for x in "kv")


@pytest.mark.parametrize("name", ["softmax, rotary", "rope after", "gqa decay"])
def test_relation_to_transformer_lens_detector(name):
    model, n = sharp(name, **MODELS[name]), 2 * N
    tokens = twice(piece(1))
    pattern_mass = model.run_with_cache(tokens)[1].stack_activation("pattern").sum(dim=(-2, -1))[:, 0]  # [layer, head]
    if name == "softmax, rotary":
        torch.testing.assert_close(pattern_mass, torch.full_like(pattern_mass, n))
    model.to_tokens = lambda seq: tokens
    frame = heads_and_verdicts(model, prompt=piece(1))
    for kind, name_there, n_queries in (
        ("prefix_matching", "induction_head", N),
        ("previous_token", "previous_token_head", n - 1),
        ("duplicate_token", "duplicate_token_head", N),
    ):
        theirs = detect_head(model, "the tokens above", name_there).double()
        ours = torch.tensor(frame[f"{kind}_score"].to_numpy()).view_as(theirs)
        torch.testing.assert_close(ours * n_queries / pattern_mass, theirs, rtol=0, atol=1e-11)


# --- attribution and ablation against interventions ------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_attribution_predicts_what_removing_a_head_from_the_direct_path_does(name):
    """Head off, every later part held at what it was, norms at their scales: the logit moves by the attribution."""
    model = sharp(name, **MODELS[name])
    frame = induction_verdicts(model, prompt=piece())
    tokens = twice(piece())
    logits, cache = model.run_with_cache(tokens)

    def held(x, hook):
        return cache[hook.name]

    for row in frame.to_dict("records"):
        layer, head = row["layer"], row["head"]

        def off(z, hook, head=head):
            return z.index_fill(2, torch.tensor([head]), 0)

        later = [f"blocks.{i}.hook_attn_out" for i in range(layer + 1, model.cfg.n_layers)]
        if not model.cfg.attn_only:
            later += [f"blocks.{i}.hook_mlp_out" for i in range(layer, model.cfg.n_layers)]
        if model.cfg.use_normalization_before_and_after:
            later.append(f"blocks.{layer}.ln1_post.hook_scale")
        hooks = [(hook, held) for hook in [*later, "ln_final.hook_scale"]]
        removed = model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", off), *hooks])
        change = centered(logits - removed)[:, N:-1].gather(-1, tokens[:, N + 1 :, None]).mean()
        assert row["logit_attribution"] == pytest.approx(float(change), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["softmax, rotary", "softmax, shifted, grouped", "gqa decay"])
def test_ablation_effects_equal_one_hooked_forward_pass_a_head(name, monkeypatch):
    model = sharp(name, **MODELS[name])
    repeated, donors = (repeat_tokens(model, piece(3, seed=seed), None) for seed in (0, 1))
    fractions = []
    monkeypatch.setattr(ablation, "rows_per_pass", lambda *of: 4)
    effect = resampling_ablation(model, repeated, donors, on_progress=fractions.append)
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    assert len(fractions) == n_layers * math.ceil(n_heads * 3 / 4) and fractions[-1] == 1.0
    _, other = model.run_with_cache(donors.tokens)

    def loss_and_logit(logits):
        right = repeated.tokens[:, N + 1 :, None]
        losses = -logits.log_softmax(-1)[:, N:-1].gather(-1, right)
        return torch.stack([losses.mean(), centered(logits)[:, N:-1].gather(-1, right).mean()])

    whole = loss_and_logit(model(repeated.tokens))
    for layer in range(n_layers):
        for head in range(n_heads):

            def swap(z, hook, head=head):
                z = z.clone()
                z[:, :, head] = other[hook.name][:, :, head]
                return z

            ablated = model.run_with_hooks(repeated.tokens, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", swap)])
            expected = loss_and_logit(ablated) - whole
            ours = torch.stack([effect.loss_change[layer, head], effect.logit_change[layer, head]])
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


def test_ablating_the_circuit_hurts_and_ablating_an_idle_head_does_nothing():
    plain = induction_verdicts(two_layer_circuit(), n_sequences=3, n_repeated=N)
    frame = induction_verdicts(two_layer_circuit(), n_sequences=3, n_repeated=N, ablations=True)
    used = frame["verdict"] != "none"
    assert (frame.loc[used, "ablation_loss_change"] > 0.3).all() and (frame.loc[used, "ablation_logit_change"] < -0.3).all()
    assert (frame.loc[~used, ["ablation_loss_change", "ablation_logit_change"]].abs() < 1e-12).all(axis=None)
    assert plain[["ablation_loss_change", "ablation_logit_change"]].isna().all(axis=None)


# --- table and input -------------------------------------------------------------------------------------------------


TABLES = [(induction_heads, induction.COLUMNS), (induction_verdicts, naming.COLUMNS)]


@pytest.mark.parametrize(("table", "columns"), TABLES)
def test_columns_order_seeds_and_parts(monkeypatch, tmp_path, table, columns):
    model = sharp()
    frame = table(model, n_sequences=5, n_repeated=N)
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == columns.dtypes
    by_head = frame if "kind" not in frame else frame[frame["kind"] == "current_token"]
    assert list(zip(by_head["layer"], by_head["head"], strict=True)) == [(i, j) for i in range(2) for j in range(5)]
    if "kind" in frame:
        assert frame["kind"].tolist() == list(PATTERNS) * 10
        assert (frame["contrast"].isna() == frame["kind"].isin(["previous_token", "current_token"])).all()
    pd.testing.assert_frame_equal(frame, table(model, n_sequences=5, n_repeated=N))
    assert not frame.equals(table(model, n_sequences=5, n_repeated=N, seed=1))
    frame.to_parquet(tmp_path / "heads.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "heads.parquet"), frame)
    monkeypatch.setattr(induction, "NUMBERS_PER_PASS", 1)  # one sequence per forward pass
    pd.testing.assert_frame_equal(table(model, n_sequences=5, n_repeated=N), frame, rtol=1e-10)


def test_random_tokens_do_not_repeat_within_a_copy_unless_they_must():
    drawn = draw_piece(sharp(), 4, 17, torch.Generator().manual_seed(0))
    assert (drawn.sort(dim=1).values == torch.arange(17)).all()
    assert draw_piece(sharp(), 4, 18, torch.Generator().manual_seed(0)).shape == (4, 18)


def test_a_bos_stands_in_front_where_the_model_wants_one_and_no_special_token_is_drawn():
    model = HookedKVTransformer.from_zoo("docs-linear")
    special, generator = set(model.tokenizer.all_special_ids), torch.Generator().manual_seed(0)
    assert not special & set(draw_piece(model, 1, model.cfg.d_vocab - len(special), generator).flatten().tolist())
    drawn = draw_piece(model, 2, 300, generator)
    repeated = repeat_tokens(model, drawn, None)
    assert (repeated.tokens[:, 0] == model.tokenizer.bos_token_id).all() and repeated.tokens.shape == (2, 601)
    assert torch.equal(repeated.tokens[:, repeated.second :], drawn)
    assert repeat_tokens(model, drawn, False).tokens.shape == (2, 600)
    with model.kv_bias(convert_prompt(model, "Return a list.")):
        assert repeat_tokens(model, drawn, None).tokens.shape == (2, 600)


@pytest.mark.parametrize(("function", "more"), [(induction_heads, {}), (induction_verdicts, dict(threshold=0.1))])
def test_the_batch_form_repeats_the_prompt(function, more):
    model = HookedKVTransformer.from_zoo("docs-linear")
    record, tokens = Record("a", "Return the names."), model.to_tokens("Return the names.", prepend_bos=False)
    pd.testing.assert_frame_equal(function.analysis.run(model, record), function(model, prompt=tokens))
    random = dict(seed=3, **more)
    pd.testing.assert_frame_equal(
        function.analysis.run(model, record, n_sequences=2, **random),
        function(model, n_sequences=2, n_repeated=tokens.shape[1], **random),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(attention_dir="bidirectional"), "expected causal attention"),
        (dict(d_vocab_out=5), "it reads 11 and predicts 5"),
    ],
)
def test_models_without_induction_are_refused(changes, message):
    model = sharp("softmax, rotary", d_vocab=11, **changes)
    with pytest.raises(KVLensError, match=message):
        induction_heads.analysis.check_model(model)


def test_ablations_refuse_positions_that_are_added_inside_the_layers():
    model = blank_model(positional_embedding_type="shortformer")
    with pytest.raises(KVLensError, match="shortformer"):
        induction_heads(model, n_repeated=5, ablations=True)


FOLDED = 8 * torch.finfo(torch.float32).eps
"""TransformerLens folds in float32 whatever the model is in: products of four matrices whose numbers are rounded once each."""
OF_WEIGHTS = [*(f"softmax, {x}" for x in ("LN", "RMS, gated", "no norm", "norms behind heads", "shifted, grouped")), "no shift"]


def raw_model(name="softmax, LN", **changes):
    """Gains that are not 1, means over d_model and vocabulary that are not 0."""
    model = sharp(name, positional_embedding_type="none", **changes)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if last == "w":
            parameter.copy_(torch.linspace(0.2, 2.5, len(parameter), dtype=parameter.dtype))
        elif last.startswith("W_"):
            draw = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.3 * draw + torch.linspace(-0.5, 1, parameter.shape[-1], dtype=parameter.dtype) + 0.4)
    return model


def centering(n, wanted=True):
    return torch.eye(n, dtype=torch.float64) - wanted / n


def folded(model, layer, head):
    """W_Q, W_K, W_V, W_O of the module's text, and C."""
    attn, n, block = model.blocks[layer].attn, model.cfg.d_model, model.blocks[layer]
    C = centering(n, model.cfg.normalization_type == "LN")
    g = torch.diag(getattr(block.ln1, "w", torch.ones(n, dtype=torch.float64)))
    W_Q, W_K, W_V, W_O = (W[head] for W in (attn.W_Q, attn.W_K, attn.W_V, attn.W_O))
    if model.cfg.use_normalization_before_and_after:
        W_O = W_O @ torch.diag(block.ln1_post.w)
    return C @ g @ W_Q, C @ g @ W_K, C @ g @ W_V, W_O @ C, C


@pytest.mark.parametrize("name", OF_WEIGHTS)
@torch.no_grad()
def test_composition_scores_are_what_their_text_says(name):
    model = raw_model(name)
    table = composition(model)
    expected = []
    for kind, layer, head, later, other in table[list(PAIRS)[:-1]].itertuples(index=False):
        (_, _, W_V, W_O, _), (Q, K, V, O, _) = folded(model, layer, head), folded(model, later, other)
        W_OV, W = W_V @ W_O, {"Q": Q @ K.T, "K": K @ Q.T, "V": V @ O}[kind]
        expected.append(float((W_OV @ W).norm() / (W_OV.norm() * W.norm())))
    assert table["score"].tolist() == pytest.approx(expected, rel=1e-9)
    strongest = table[table["kind"] == "K"].groupby(["later_layer", "later_head"])["score"].max()
    heads = induction_verdicts(model, n_sequences=1, n_repeated=5).set_index(["layer", "head"])["k_composition_score"].dropna()
    assert heads.tolist() == pytest.approx(strongest.tolist(), rel=1e-12)
    for word in ("||W_OV W|| / (||W_OV|| ||W||)", "W_Q W_K^T", "gain", "mean over d_model"):
        assert word in PAIRS["score"].meaning


@pytest.mark.parametrize("norm", ["softmax, LN", "softmax, RMS, gated", "softmax, no norm"])
def test_folding_norms_and_centering_weights_changes_no_score(norm):
    models = [raw_model(norm) for _ in range(2)]
    models[1].process_weights_(fold_value_biases=False)
    pd.testing.assert_frame_equal(*(composition(model) for model in models), rtol=FOLDED)


def scores_of(frame, model, kind):
    """[layer, head, later_layer, later_head], 0 where there is no row."""
    n = model.cfg
    scores = torch.zeros(n.n_layers, n.n_heads, n.n_layers, n.n_heads, dtype=torch.float64)
    rows = frame[frame["kind"] == kind]
    index = tuple(torch.tensor(rows[name].to_numpy()) for name in ("layer", "head", "later_layer", "later_head"))
    scores[index] = torch.tensor(rows["score"].to_numpy())
    return scores


def rank_one_model(angle):
    """Head 0.0 writes along direction 3; head 1.0 reads at ``angle`` to it with keys, at 90 degrees with queries and values."""
    model = blank_model(n_layers=2, n_heads=1, d_head=2)
    first, second = model.blocks[0].attn, model.blocks[1].attn
    first.W_V[0, 1, 0], first.W_O[0, 0, 3] = 5.0, 7.0
    second.W_K[0, 3, 0], second.W_K[0, 4, 0] = 2 * torch.cos(angle), 2 * torch.sin(angle)
    second.W_Q[0, 6, 0] = second.W_V[0, 8, 0] = second.W_O[0, 0, 9] = 3.0
    return model


@pytest.mark.parametrize("degrees", [0, 30, 60, 90])
def test_rank_one_heads_compose_by_the_cosine_of_what_is_written_and_what_is_read(degrees):
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    expected = pd.DataFrame(
        {
            "kind": ["Q", "K", "V"],
            "layer": 0,
            "head": 0,
            "later_layer": 1,
            "later_head": 0,
            "score": [0.0, float(angle.cos()), 0.0],
        }
    ).astype(PAIRS.dtypes)
    pd.testing.assert_frame_equal(composition(rank_one_model(angle)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, dict(n_heads=6, d_model=36, n_key_value_heads=2), dict(d_head=7, n_heads=3)])
def test_equals_transformer_lens_on_processed_models_and_before_processing(changes):
    model = sharp("softmax, learned", n_layers=3, **changes)
    for block in model.blocks:
        block.ln1.w.mul_(torch.linspace(0.5, 2, model.cfg.d_model))
        block.attn.W_O.add_(0.3)
    before = composition(model)
    model.process_weights_()
    for kind in "QKV":
        expected = model.all_composition_scores(kind)
        for frame in (before, composition(model)):
            torch.testing.assert_close(scores_of(frame, model, kind), expected, rtol=FOLDED, atol=0)


def test_query_heads_of_a_group_differ_in_what_is_theirs_alone():
    model = sharp("softmax, rotary, grouped")
    scores = composition(model, kinds=["V"])["score"]
    assert len(scores) == scores.nunique() == 36  # each has its own W_O


def test_unrelated_heads_score_about_one_over_the_root_of_the_width():
    model = sharp("softmax, rotary", d_model=60, d_head=20, n_heads=3)
    mean_square = (composition(model)["score"] ** 2).mean()
    assert mean_square == pytest.approx(1 / 60, rel=0.1)


def test_the_order_of_the_rows():
    model = sharp(n_layers=3)
    frame = composition(model)
    keys = [(k, i, h, j, g) for k in "QKV" for i in range(3) for h in range(5) for j in range(i + 1, 3) for g in range(5)]
    assert list(frame[list(PAIRS)[:-1]].itertuples(index=False, name=None)) == keys
    single = composition(sharp(n_layers=1))
    assert len(single) == 0 and {name: str(dtype) for name, dtype in single.dtypes.items()} == PAIRS.dtypes

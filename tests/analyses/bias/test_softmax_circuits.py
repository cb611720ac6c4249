"""Two softmax prompts in one head: what queries read from them, by hand and by general properties."""

import numpy as np
import pytest
import torch
from analysis_models import random_model, tokens
from kvlens.analyses.bias.pairs import CIRCUITS
from kvlens.analyses.declaration import Record

from kvlens import KVLensError, KVShiftConfig, convert_prompt
from kvlens.analyses import bias_overwriting, bias_similarity, circuits

FIRST, SECOND, TEXT = tokens(7), tokens(4, seed=2), tokens(5, seed=1)
KINDS = {
    "learned positions": dict(positional_embedding_type="standard"),
    "rotary, grouped": dict(n_heads=6, d_model=36, n_key_value_heads=2),
    "shifted": dict(kv_shift=KVShiftConfig(window=2, queries=True)),
    "alibi": dict(positional_embedding_type="alibi", alibi_slopes=(0.5, 0.25, 0.125, 0.0625, 0.03125)),
}


def softmax_model(**changes):
    return random_model(attention="softmax", **{"kv_shift": None, **changes})


def size(x):
    return np.sqrt((x * x).sum(axis=tuple(range(2, x.ndim))))


def cosine(a, b):
    return (a * b).sum(axis=tuple(range(2, a.ndim))) / (size(a) * size(b))


def test_every_column_by_hand():
    """Queries, keys and values out of TransformerLens' cache of the concatenation, and exponentials as they stand."""
    model = softmax_model(**KINDS["learned positions"])
    scale = float(model.blocks[0].attn.attn_scale)
    both, alone, first = (model.run_with_cache(x[None])[1] for x in (torch.cat([FIRST, SECOND]), SECOND, FIRST))
    # aligned: the second prompt at its position, seeing only its own tokens
    heads = [(f"blocks.{i}.attn.hook_attn_scores", lambda s, hook: s.index_fill(-1, torch.arange(7), -1e9)) for i in range(2)]
    with model.hooks(fwd_hooks=heads):
        aligned = model.run_with_cache(torch.cat([FIRST, SECOND])[None])[1]

    def read(cache, places):
        kv, d = [], []
        for layer in range(2):
            q = both["q", layer][0, 7:]
            e = (torch.einsum("ihd,rhd->hir", q, cache["k", layer][0, places]) / scale).exp()
            kv.append(torch.einsum("hir,rhd->hid", e, cache["v", layer][0, places]))
            d.append(e.sum(-1))
        return torch.stack(kv).detach().numpy(), torch.stack(d).detach().numpy()

    a, b, ab = read(first, slice(7)), read(alone, slice(4)), read(both, slice(11))
    n = read(aligned, slice(7, 11))
    n = tuple(x + y for x, y in zip(read(both, slice(7)), n, strict=True))
    plain = tuple(x + y for x, y in zip(a, b, strict=True))
    (a, a_d), (b, b_d), (plain, plain_d), (n, n_d), (ab, ab_d) = (
        (kv / ab[1][..., None], d / ab[1]) for kv, d in (a, b, plain, n, ab)
    )
    expected = {
        "b_kv_cosine": cosine(a, b),
        "b_d_cosine": cosine(a_d, b_d),
        "survival": (a * ab).sum(axis=(2, 3)) / (a * a).sum(axis=(2, 3)),
        "normalizer_kept": a_d.mean(axis=2),
        "plain_error": size(plain - ab) / size(ab),
        "plain_b_d_error": size(plain_d - ab_d) / size(ab_d),
        "aligned_error": size(n - ab) / size(ab),
        "aligned_b_d_error": size(n_d - ab_d) / size(ab_d),
    }
    frame = circuits(model, FIRST, SECOND)
    for name, values in expected.items():
        np.testing.assert_allclose(frame[name], values.flatten(), rtol=1e-9, atol=1e-13, err_msg=name)
    rows = bias_overwriting(model, FIRST, SECOND).set_index(["layer", "head", "direction"])
    for layer in range(2):
        for head in range(5):
            u, s, w = np.linalg.svd(a[layer, head], full_matrices=False)
            new = ab[layer, head] - a[layer, head]
            known = int((s > 1e-6 * s[0]).sum())  # the directions of weaker ones are rounding
            at = rows.loc[layer, head].iloc[:known]
            np.testing.assert_allclose(at["strength"], s[:known], rtol=1e-9)
            np.testing.assert_allclose(at["written"], [u[:, r] @ new @ w[r] for r in range(known)], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_the_summary_is_the_weighted_mean_of_the_directions(name):
    model = softmax_model(**KINDS[name])
    rows = bias_overwriting(model, FIRST, SECOND)
    rows["weight"] = rows["strength"] * rows["carried"]
    rows["weighted"] = rows["weight"] * rows["survival"]
    sums = rows.groupby(["layer", "head"])[["weight", "weighted"]].sum()
    summary = circuits(model, FIRST, SECOND).set_index(["layer", "head"])["survival"]
    assert len(summary) == 2 * model.cfg.n_heads
    np.testing.assert_allclose(summary, sums["weighted"] / sums["weight"], rtol=1e-9)
    assert rows.groupby(["layer", "head"]).size().max() == len(SECOND)  # as many directions as there are queries


@pytest.mark.parametrize("name", KINDS)
def test_aligned_addition_is_exact_in_the_first_layer(name):
    frame = circuits(softmax_model(**KINDS[name]), FIRST, SECOND)
    errors = frame[["aligned_error", "aligned_b_d_error"]]
    assert (errors[frame["layer"] == 0] < 1e-12).all(axis=None)
    assert (frame.loc[frame["layer"] == 1, "aligned_error"] > 1e-6).all()
    assert (frame["normalizer_kept"].between(0, 1)).all()


def test_plain_addition_is_concatenation_in_one_layer_without_positions():
    frame = circuits(softmax_model(n_layers=1, positional_embedding_type="none"), FIRST, SECOND)
    assert (frame[["plain_error", "plain_b_d_error"]] < 1e-12).all(axis=None)


def test_a_prompt_in_another_order_is_the_same_sum_without_positions():
    model = softmax_model(n_layers=1, positional_embedding_type="none")
    whole, other = convert_prompt(model, FIRST), convert_prompt(model, SECOND)
    reordered = convert_prompt(model, FIRST[torch.tensor([3, 0, 6, 1, 5, 2, 4])])
    frame = bias_similarity([whole, reordered, other, 2.0 * whole, whole.zero_like()], model=model, text=TEXT)
    frame, columns = frame.set_index(["prompt_a", "prompt_b"]), ["b_kv_cosine", "b_d_cosine"]
    np.testing.assert_allclose(frame.loc[[(0, 1), (0, 3), (1, 3)], columns], 1, rtol=1e-12)
    assert (frame.loc[(0, 2), "b_kv_cosine"].abs() < 0.999).all()
    assert frame.loc[(0, 4), columns].isna().all(axis=None)


@pytest.mark.parametrize("kind", ["random", "landmark"])
def test_other_features_are_read_like_any(kind):
    model = softmax_model(**KINDS["learned positions"])
    options = dict(verbose=False, n_continuations=2, continuation_length=3) if kind == "landmark" else {}
    a, b = (convert_prompt(model, x, method=kind, n_features=4, **options) for x in (FIRST, TEXT))
    frame = bias_similarity([a, a, b], model=model, text=SECOND).set_index(["prompt_a", "prompt_b"])
    np.testing.assert_allclose(frame.loc[(0, 1), "b_kv_cosine"], 1, rtol=1e-12)
    assert frame["b_kv_cosine"].abs().le(1 + 1e-12).all()


def test_scores_beyond_every_exponential_compare_all_the_same():
    model = softmax_model(positional_embedding_type="none")
    for block in model.blocks:
        block.attn.W_K.data.mul_(300)
    frame = circuits(model, FIRST, SECOND)
    assert frame[["survival", "normalizer_kept", "plain_b_d_error", "aligned_error"]].notna().all(axis=None)


def test_the_batch_takes_softmax_models_and_similarity_asks_for_a_text():
    model = softmax_model(**KINDS["learned positions"])
    CIRCUITS.check_model(model)
    text = " ".join(map(str, FIRST.tolist()))
    frame = CIRCUITS.run(model, Record("a", text, fields={"second_prompt": " ".join(map(str, SECOND.tolist()))}))
    np.testing.assert_allclose(frame["survival"], circuits(model, FIRST, SECOND)["survival"], rtol=1e-12)
    with pytest.raises(KVLensError, match="give model= and text="):
        bias_similarity([convert_prompt(model, x) for x in (FIRST, SECOND)])

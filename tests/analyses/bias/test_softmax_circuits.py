"""Two softmax prompts in one head: what queries read from them, by hand and by general properties."""

import numpy as np
import pytest
import torch
from analysis_models import SOFTMAX, random_model, softmax_model, tokens
from kvlens.analyses.declaration import Record

from kvlens.analyses import circuits

FIRST, SECOND = tokens(7), tokens(4, seed=2)


def size(x):
    return np.sqrt((x * x).sum(axis=tuple(range(2, x.ndim))))


def cosine(a, b):
    return (a * b).sum(axis=tuple(range(2, a.ndim))) / (size(a) * size(b))


def test_every_column_by_hand():
    """Queries, keys and values out of TransformerLens' cache of the concatenation, and exponentials as they stand."""
    model = softmax_model("learned positions")
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


@pytest.mark.parametrize("name", SOFTMAX)
def test_aligned_addition_is_exact_in_the_first_layer(name):
    frame = circuits(softmax_model(name), FIRST, SECOND)
    errors = frame[["aligned_error", "aligned_b_d_error"]]
    assert (errors[frame["layer"] == 0] < 1e-12).all(axis=None)
    assert (frame.loc[frame["layer"] == 1, "aligned_error"] > 1e-6).all()
    assert (frame["normalizer_kept"].between(0, 1)).all()


def test_plain_addition_is_concatenation_in_one_layer_without_positions():
    frame = circuits(
        random_model(attention="softmax", kv_shift=None, n_layers=1, positional_embedding_type="none"), FIRST, SECOND
    )
    assert (frame[["plain_error", "plain_b_d_error"]] < 1e-12).all(axis=None)


def test_scores_beyond_every_exponential_compare_all_the_same():
    model = random_model(attention="softmax", kv_shift=None, positional_embedding_type="none")
    for block in model.blocks:
        block.attn.W_K.data.mul_(300)
    frame = circuits(model, FIRST, SECOND)
    assert frame[["survival", "normalizer_kept", "plain_b_d_error", "aligned_error"]].notna().all(axis=None)


def test_the_batch_takes_softmax_models():
    model = softmax_model("learned positions")
    circuits.analysis.check_model(model)
    text = " ".join(map(str, FIRST.tolist()))
    frame = circuits.analysis.run(model, Record("a", text, fields={"second_prompt": " ".join(map(str, SECOND.tolist()))}))
    np.testing.assert_allclose(frame["survival"], circuits(model, FIRST, SECOND)["survival"], rtol=1e-12)

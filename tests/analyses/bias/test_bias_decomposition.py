"""Parts add up to the whole, equal what the unconverted model does, and predict what an ablation of the direct path changes."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from analysis_models import LINEAR, PENCIL_PROMPT, PENCIL_TEXT, SOFTMAX, centered, growth, pencil_model, tokens
from kvlens.analyses.bias.decomposition import effective_rank
from small_models import sharp

from kvlens import KVShiftConfig, convert_prompt, run_in_segments
from kvlens.analyses import bias_decomposition, bias_positions, bias_singular_values, segments
from kvlens.model import streaming

PROMPT, TEXT = tokens(7), tokens(5, seed=1)
MODELS = [*LINEAR, *SOFTMAX]
ROUNDING = dict(rel=1e-9, abs=1e-13)  # of float64 logits: sums of at most 12 x 36 products, a few powers of ten apart
FELT = 1e-6  # far above rounding: what is compared is not zero


def of_bias(frame):
    """The sum over positions for each head's whole bias."""
    frame = frame[frame["part"].isin(["inherited", "prompt"])]
    return frame.groupby(["layer", "head"], as_index=False)[["output_share", "logit"]].sum()


def direct(model, bias, cache, layer, hooks, texts=TEXT[None]):
    """Logits where ``hooks`` act on one layer and nothing behind it reacts, the final norm's scale included.

    ``cache``: of the pass under the bias without them.
    """
    with model.kv_bias(bias):
        frozen = [f"blocks.{i}.hook_attn_out" for i in range(layer + 1, model.cfg.n_layers)]
        frozen += [f"blocks.{i}.hook_mlp_out" for i in range(layer, model.cfg.n_layers)] + ["ln_final.hook_scale"]
        keep = [(name, lambda x, hook: cache[hook.name]) for name in frozen]
        return model.run_with_hooks(texts, fwd_hooks=[*hooks, *keep])


def without(row, axis):
    def zero(x, hook):
        x = x.clone()
        x.select(axis, row).zero_()
        return x

    return zero


def test_by_hand():
    model = pencil_model()
    heads = bias_decomposition(model, PENCIL_PROMPT, PENCIL_TEXT, answer=0, rival=1)
    expected = pd.DataFrame(  # z_bias 5, 10; z_context 1, 10
        {
            "layer": [0],
            "head": [0],
            "b_kv_norm": [5.0],
            "b_kv_spectral_norm": [5.0],
            "b_kv_effective_rank": [1.0],
            "b_d_norm": [0.0],
            "bias_share": [(5 / 6 + 10 / 20) / 2],
            "output_share": [(5 * 6 + 10 * 20) / (6**2 + 20**2)],
            "logit": [1.0],
        }
    )
    pd.testing.assert_frame_equal(heads, expected, rtol=1e-13)
    positions = bias_positions(model, PENCIL_PROMPT, PENCIL_TEXT, answer=0, rival=1)
    expected = pd.DataFrame(  # the prompt's 1 gives 1 and 2, its 2 gives 4 and 8
        {
            "layer": [0] * 3,
            "head": [0] * 3,
            "position": [-1] * 3,
            "part": ["prompt", "prompt", "text"],
            "prompt_position": [0, 1, -1],
            "token": pd.Series(["0", "1", None], dtype="str"),
            "attention": [(1 + 2) / 2, (2 + 4) / 2, math.nan],
            "output_share": [(6 + 2 * 20) / 436, (4 * 6 + 8 * 20) / 436, (6 + 10 * 20) / 436],
            "logit": [0.2, 0.8, 1.0],
        }
    )
    pd.testing.assert_frame_equal(positions, expected, rtol=1e-13)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("name", [*MODELS, "trained bias"])
def test_positions_add_up_to_the_bias_and_all_parts_to_the_head(name, continues):
    model = sharp(name)
    initial = convert_prompt(model, tokens(3, seed=2)) if continues else None
    heads = bias_decomposition(model, convert_prompt(model, PROMPT, initial=initial), TEXT)
    for by in ("attended", "source"):
        frame = bias_positions(model, PROMPT, TEXT, by=by, initial=initial)
        for column in ("output_share", "logit"):
            np.testing.assert_allclose(of_bias(frame)[column], heads[column], rtol=0, atol=1e-12 * heads[column].abs().max())
        assert frame.groupby(["layer", "head"])["output_share"].sum().to_numpy() == pytest.approx(1, abs=1e-12)
        assert ("inherited" in set(frame["part"])) == (continues or name == "trained bias")
        each = bias_positions(model, PROMPT, TEXT, by=by, initial=initial, at=range(len(TEXT)))
        means = each.groupby(["layer", "head", "part", "prompt_position"], sort=False)[["logit", "attention"]].mean()
        for column in means:
            np.testing.assert_allclose(means[column], frame[column], rtol=1e-9, atol=1e-13)
        shares = each.groupby(["layer", "head", "position"])["output_share"].sum()
        assert shares.to_numpy() == pytest.approx(1, abs=1e-12)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_positions_are_the_attention_that_the_unconverted_model_pays(name):
    model, places = sharp(name), [1, 4]
    _, cache = model.run_with_cache(torch.cat([PROMPT, TEXT])[None])
    frame = bias_positions(model, PROMPT, TEXT, at=places).query("part == 'prompt'")
    assert frame["prompt_position"].tolist() == list(range(7)) * (len(frame) // 7)
    queries, group = [7 + place for place in places], model.cfg.n_heads // model.cfg.n_kv_heads
    attention, shares = [], []
    for layer in range(2):
        at = f"blocks.{layer}.attn."
        values = cache[at + "hook_v_shifted" if at + "hook_v_shifted" in cache else at + "hook_v"][0, :7]
        for head in range(model.cfg.n_heads):
            pattern, z = cache[at + "hook_pattern"][0, head, queries, :7], cache[at + "hook_z"][0, queries, head]
            attention.append(pattern)
            shares.append(pattern * (z @ values[:, head // group].T) / (z * z).sum(-1, keepdim=True))
    np.testing.assert_allclose(frame["attention"], torch.cat(attention).flatten(), rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(frame["output_share"], torch.cat(shares).flatten(), rtol=1e-11, atol=1e-14)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LINEAR)
def test_a_heads_logit_is_what_its_direct_path_loses(name):
    model = sharp(name)
    bias = convert_prompt(model, PROMPT)
    frame = bias_decomposition(model, PROMPT, TEXT, answer=3, rival=11).set_index(["layer", "head"])
    with model.kv_bias(bias):
        logits, cache = model.run_with_cache(TEXT[None])
    for (layer, head), row in frame.iterrows():
        ablated = direct(model, bias, cache, layer, [(f"blocks.{layer}.attn.hook_b_kv", without(head, 1))])
        change = (ablated - logits)[0, -1]
        assert float(change[11] - change[3]) == pytest.approx(row["logit"], **ROUNDING)
    assert (frame["logit"].abs() > FELT).all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("by", ["attended", "source"])
def test_a_positions_logit_is_what_is_lost_without_its_value(name, by):
    model = sharp(name)
    bias = convert_prompt(model, PROMPT)
    frame = bias_positions(model, PROMPT, TEXT, by=by).query("part == 'prompt'")
    predicted = frame.groupby(["layer", "prompt_position"])["logit"].sum()  # a key-value head's queries lose it together
    shifted = model.cfg.kv_shift is not None and model.cfg.kv_shift.values and by == "attended"
    n = len(PROMPT)
    prompts, texts = PROMPT.expand(n, -1), TEXT.expand(n, -1)  # each row without the value of one position
    with model.kv_bias(bias):
        logits, cache = model.run_with_cache(texts)

    def without_one(v, hook):
        v = v.clone()
        v[range(n), range(n)] = 0
        return v

    for layer in range(model.cfg.n_layers):
        name_v = f"blocks.{layer}.attn.hook_v{'_shifted' if shifted else ''}"
        lost = convert_prompt(model, prompts, fwd_hooks=[(name_v, without_one)]).stacked("b_kv")[layer]
        ablated = direct(
            model, bias, cache, layer, [(f"blocks.{layer}.attn.hook_b_kv", lambda b, hook, lost=lost: lost)], texts
        )
        change = centered(logits - ablated)[:, torch.arange(4), TEXT[1:]].mean(dim=1)
        assert change.tolist() == pytest.approx(predicted[layer].tolist(), **ROUNDING)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["rope after", "gqa decay", "learned, queries shifted", "gqa, taylor, values shifted"])
@pytest.mark.parametrize("text", [TEXT, TEXT[:1]])
def test_the_shift_state_row_is_what_is_lost_without_the_last_values(name, text):
    model = sharp(name)
    bias = convert_prompt(model, PROMPT)
    frame = bias_positions(model, PROMPT, text).query("part == 'shift_state'").set_index(["layer", "head"])["output_share"]
    with model.kv_bias(bias):
        for layer in range(2):
            z = f"blocks.{layer}.attn.hook_z"
            _, cache = model.run_with_cache(text[None])
            with model.hooks([(f"blocks.{layer}.attn.hook_last_v", lambda x, hook: torch.zeros_like(x))]):
                _, forgetful = model.run_with_cache(text[None])
            lost, energy = cache[z] - forgetful[z], cache[z].square().sum(dim=(0, 1, 3))
            shares = (lost * cache[z]).sum(dim=(0, 1, 3)) / energy
            np.testing.assert_allclose(frame.loc[layer], shares, rtol=1e-11, atol=1e-14)
            assert (shares.abs() > FELT).all()


def test_singular_values():
    model = sharp(feature_map="taylor", rotary_placement="before", kv_shift=None)
    bias = convert_prompt(model, PROMPT[:3])
    frame = bias_singular_values(model, bias)
    assert len(frame) == 2 * 5 * 6
    for (layer, head), rows in frame.groupby(["layer", "head"]):
        expected = np.linalg.svd(bias.stacked("b_kv")[layer, head].numpy(), compute_uv=False)
        np.testing.assert_allclose(rows["singular_value"], expected, atol=1e-13 * expected[0])
        assert (expected[3:] < 1e-13 * expected[0]).all()  # three tokens
        assert rows["energy_share"].sum() == pytest.approx(1)
    heads = bias_decomposition(model, PROMPT[:3], TEXT)
    np.testing.assert_allclose(heads["b_kv_spectral_norm"], frame.loc[frame["index"] == 0, "singular_value"], rtol=1e-13)
    assert heads["b_kv_effective_rank"].between(1, 3 + 1e-9).all()


def test_effective_rank_by_hand():
    values = torch.tensor([[2.0, 2.0, 2.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0], [3.0, 1.0, 0.0]], dtype=torch.float64)
    expected = [3, 1, 0, math.exp(0.75 * math.log(4 / 3) + 0.25 * math.log(4))]
    assert effective_rank(values).tolist() == pytest.approx(expected, rel=1e-14)


def test_a_bias_of_zeros_has_no_share_and_no_logit():
    model = sharp(kv_shift=None)
    frame = bias_decomposition(model, convert_prompt(model, PROMPT).zero_like(), TEXT)
    assert (frame.drop(columns=["layer", "head"]) == 0).all(axis=None)


def test_one_token_of_text_has_a_logit_only_with_an_answer():
    model = sharp()
    assert bias_decomposition(model, PROMPT, TEXT[:1])["logit"].isna().all()
    assert bias_decomposition(model, PROMPT, TEXT[:1], answer=2)["logit"].notna().all()
    places = bias_positions(model, PROMPT, TEXT, at=[3, 4]).groupby("position")["logit"]
    assert places.count().tolist() == [10 * 9, 0]  # nothing follows the last place; 10 heads of 7 positions, shift_state, text


def test_forward_passes_of_each_analysis(monkeypatch):
    model, passes = sharp(), []
    first = model.blocks[0]
    forward = first.forward
    monkeypatch.setattr(first, "forward", lambda *args, **kwargs: passes.append(1) or forward(*args, **kwargs))
    bias_decomposition(model, PROMPT, TEXT)
    assert len(passes) == 2  # the prompt's, the text's
    bias_positions(model, PROMPT, TEXT)
    assert len(passes) == 3  # both together


LONG_PROMPT, ITS_TEXT = tokens(11), tokens(5, seed=1)
IN_SEGMENTS = {
    **{name: {} for name in LINEAR},
    "self-attention form": dict(normalization_type=None),
    "learned": dict(d_vocab_out=3),
}
ROOM = segments.KEPT_BYTES
CASES = [  # view, places, length of a segment, whether the prompt continues a bias, rooms for the prompt's keys and values
    ("attended", "together", 3, True, (0, ROOM)),
    ("source", "together", 1, True, (0, ROOM)),  # shorter than the window of a shift
    ("source", [0, 4], 4, False, (0,)),
    ("attended", [3], 5, False, (ROOM,)),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", IN_SEGMENTS)
def test_in_segments_equals_whole(name, monkeypatch):
    """The prompt's keys and values fit into memory, or it is run twice."""
    model = sharp(name, **IN_SEGMENTS[name])
    target = dict(answer=2, rival=1) if "d_vocab_out" in IN_SEGMENTS[name] else {}
    held = convert_prompt(model, tokens(4, seed=2))
    for by, at, length, continues, rooms in CASES:
        options = dict(by=by, at=at, initial=held if continues else None, **target)
        prompt, text = (LONG_PROMPT[:5], ITS_TEXT[:3]) if length == 1 else (LONG_PROMPT[:7], ITS_TEXT)
        whole = bias_positions(model, prompt, text, **options)
        for room in rooms:
            monkeypatch.setattr(segments, "KEPT_BYTES", room)
            streamed = bias_positions(model, prompt, text, segment_length=length, **options)
            # shares are near 1 and logits near 10 at most: sums of some hundred products each
            pd.testing.assert_frame_equal(streamed, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("n_prompt", "n_text"), [(1, 5), (2, 1), (11, 1)])
def test_prompts_and_texts_shorter_than_the_window(n_prompt, n_text):
    model = sharp(kv_shift=KVShiftConfig(window=3))
    for by in ("attended", "source"):
        options = dict(by=by, answer=3, initial=convert_prompt(model, tokens(2, seed=2)))
        whole = bias_positions(model, LONG_PROMPT[:n_prompt], ITS_TEXT[:n_text], **options)
        streamed = bias_positions(model, LONG_PROMPT[:n_prompt], ITS_TEXT[:n_text], segment_length=2, **options)
        pd.testing.assert_frame_equal(streamed, whole, rtol=1e-12, atol=1e-12)
        bias = convert_prompt(model, LONG_PROMPT[:n_prompt], initial=options["initial"])
        heads = bias_decomposition(model, bias, ITS_TEXT[:n_text], answer=3)["logit"]
        of_bias = whole[whole["part"].isin(["inherited", "prompt"])].groupby(["layer", "head"])["logit"].sum()
        assert of_bias.tolist() == pytest.approx(heads.tolist(), abs=1e-12 * heads.abs().max())


@pytest.mark.parametrize("shift", [None, KVShiftConfig(window=2)])
def test_augmented_values_add_up_to_what_the_bias_gives(shift):
    """Each value is an MLP's output; what is read is still their sum under the pattern."""
    model = sharp(attention_variant=dict(augmented=dict(keys=True, values=True)), kv_shift=shift)
    frame = bias_positions(model, LONG_PROMPT, ITS_TEXT, segment_length=4)
    found = frame[frame["part"] == "prompt"].groupby(["layer", "head"])["output_share"].sum().to_numpy()
    assert found == pytest.approx(bias_decomposition(model, LONG_PROMPT, ITS_TEXT)["output_share"].to_numpy(), rel=1e-11)
    assert "shift_state" not in set(frame["part"])


@pytest.mark.parametrize(("room", "second"), [(0, [0.5 + 6 / 32, 0.5 + 12 / 32, 1.0, 1.0]), (ROOM, [1.0])])
def test_a_long_prompt_streams_by_itself_and_a_hooked_one_does_not(room, second, monkeypatch):
    """If its keys and values do not fit into memory it is run twice."""
    monkeypatch.setattr(segments, "KEPT_BYTES", room)
    model, told, seen = sharp(), [], []
    whole = bias_positions(model, LONG_PROMPT, ITS_TEXT)
    monkeypatch.setattr(streaming, "default_segment_length", lambda *_: 6)
    with segments.telling(told.append):
        streamed = bias_positions(model, LONG_PROMPT, ITS_TEXT)
    pd.testing.assert_frame_equal(streamed, whole, rtol=1e-12, atol=1e-12)
    assert told == pytest.approx([6 / 32, 12 / 32, 0.5, 0.5, *second])
    with model.hooks([("blocks.0.attn.hook_k", lambda x, hook: seen.append(x.shape[1]))]):
        pd.testing.assert_frame_equal(bias_positions(model, LONG_PROMPT, ITS_TEXT), whole, rtol=1e-12, atol=1e-12)
    assert seen == [16]


@pytest.mark.parametrize("options", [{}, dict(by="source"), dict(at=[2])], ids=str)
def test_memory_grows_by_the_table_alone(options, monkeypatch):
    """24 bytes of numbers per head and position, twice while parts are put together; an activation has 8 x 16 per head."""
    monkeypatch.setattr(segments, "KEPT_BYTES", 4096)  # has room for a segment and is then given up
    model = sharp(n_layers=1, d_model=80, d_head=16)

    def run(n):
        bias_positions(model, tokens(n), ITS_TEXT, segment_length=32, **options)

    table, activation = 5 * 24, 5 * 16 * 8
    assert table <= growth(run, 64, 192) < activation


def test_whole_activations_would_be_noticed():
    """The same measure of a run that keeps one of them."""
    model, kept = sharp(n_layers=1, d_model=80, d_head=16), []

    def run(n):
        kept.clear()
        run_in_segments(model, tokens(n), [("blocks.0.attn.hook_v", lambda x, hook: kept.append(x))], segment_length=32)

    assert growth(run, 64, 192) >= 5 * 16 * 8

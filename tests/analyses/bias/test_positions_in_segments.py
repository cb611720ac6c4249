"""A prompt read in segments gives what it gives when it is read whole; and nothing of it is held."""

import pandas as pd
import pytest
from analysis_models import LINEAR, tokens
from live_bytes import growth
from small_models import sharp

from kvlens import KVShiftConfig, convert_prompt, run_in_segments
from kvlens.analyses import bias_decomposition, bias_positions, segments
from kvlens.model import streaming

PROMPT, TEXT = tokens(11), tokens(5, seed=1)
MODELS = {**{name: {} for name in LINEAR}, "self-attention form": dict(normalization_type=None), "learned": dict(d_vocab_out=3)}
ROOM = segments.KEPT_BYTES
CASES = [  # view, places, length of a segment, whether the prompt continues a bias, rooms for the prompt's keys and values
    ("attended", None, 3, True, (0, ROOM)),
    ("source", None, 1, True, (0, ROOM)),  # shorter than the window of a shift
    ("source", [0, 4], 4, False, (0,)),
    ("attended", [3], 5, False, (ROOM,)),
]


@pytest.mark.parametrize("name", MODELS)
def test_in_segments_equals_whole(name, monkeypatch):
    """The prompt's keys and values fit into memory, or it is run twice."""
    model = sharp(name, **MODELS[name])
    target = dict(answer=2, rival=1) if "d_vocab_out" in MODELS[name] else {}
    held = convert_prompt(model, tokens(4, seed=2))
    for by, at, length, continues, rooms in CASES:
        options = dict(by=by, at=at, initial=held if continues else None, **target)
        prompt, text = (PROMPT[:5], TEXT[:3]) if length == 1 else (PROMPT[:7], TEXT)
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
        whole = bias_positions(model, PROMPT[:n_prompt], TEXT[:n_text], **options)
        streamed = bias_positions(model, PROMPT[:n_prompt], TEXT[:n_text], segment_length=2, **options)
        pd.testing.assert_frame_equal(streamed, whole, rtol=1e-12, atol=1e-12)
        bias = convert_prompt(model, PROMPT[:n_prompt], initial=options["initial"])
        heads = bias_decomposition(model, bias, TEXT[:n_text], answer=3)["logit"]
        of_bias = whole[whole["part"].isin(["inherited", "prompt"])].groupby(["layer", "head"])["logit"].sum()
        assert of_bias.tolist() == pytest.approx(heads.tolist(), abs=1e-12 * heads.abs().max())


@pytest.mark.parametrize("shift", [None, KVShiftConfig(window=2)])
def test_augmented_values_add_up_to_what_the_bias_gives(shift):
    """Each value is an MLP's output; what is read is still their sum under the pattern."""
    model = sharp(attention_variant=dict(augmented=dict(keys=True, values=True)), kv_shift=shift)
    frame = bias_positions(model, PROMPT, TEXT, segment_length=4)
    found = frame[frame["part"] == "prompt"].groupby(["layer", "head"])["output_share"].sum().to_numpy()
    assert found == pytest.approx(bias_decomposition(model, PROMPT, TEXT)["output_share"].to_numpy(), rel=1e-11)
    assert "shift_state" not in set(frame["part"])


@pytest.mark.parametrize(("room", "second"), [(0, [0.5 + 6 / 32, 0.5 + 12 / 32, 1.0, 1.0]), (ROOM, [1.0])])
def test_a_long_prompt_streams_by_itself_and_a_hooked_one_does_not(room, second, monkeypatch):
    """If its keys and values do not fit into memory it is run twice."""
    monkeypatch.setattr(segments, "KEPT_BYTES", room)
    model, told, seen = sharp(), [], []
    whole = bias_positions(model, PROMPT, TEXT)
    monkeypatch.setattr(streaming, "default_segment_length", lambda model, batch: 6)
    streamed = bias_positions(model, PROMPT, TEXT, on_progress=told.append)
    pd.testing.assert_frame_equal(streamed, whole, rtol=1e-12, atol=1e-12)
    assert told == pytest.approx([6 / 32, 12 / 32, 0.5, 0.5, *second])
    with model.hooks([("blocks.0.attn.hook_k", lambda x, hook: seen.append(x.shape[1]))]):
        pd.testing.assert_frame_equal(bias_positions(model, PROMPT, TEXT), whole, rtol=1e-12, atol=1e-12)
    assert seen == [16]


@pytest.mark.parametrize("options", [{}, dict(by="source"), dict(at=[2])], ids=str)
def test_memory_grows_by_the_table_alone(options, monkeypatch):
    """24 bytes of numbers per head and position, twice while parts are put together; an activation has 8 x 16 per head."""
    monkeypatch.setattr(segments, "KEPT_BYTES", 4096)  # has room for a segment and is then given up
    model = sharp(n_layers=1, d_model=80, d_head=16)

    def run(n):
        bias_positions(model, tokens(n), TEXT, segment_length=32, **options)

    table, activation = 5 * 24, 5 * 16 * 8
    assert table <= growth(run, 64, 192) < activation


def test_whole_activations_would_be_noticed():
    """The same measure of a run that keeps one of them."""
    model, kept = sharp(n_layers=1, d_model=80, d_head=16), []

    def run(n):
        kept.clear()
        run_in_segments(model, tokens(n), [("blocks.0.attn.hook_v", lambda x, hook: kept.append(x))], segment_length=32)

    assert growth(run, 64, 192) >= 5 * 16 * 8

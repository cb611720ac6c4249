"""What holds of every analysis, whatever it measures: one table of calls, and the laws."""

import functools
import importlib
import inspect
import io
import pkgutil
import re
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from analysis_models import heads_and_verdicts, two_layer_circuit
from kvlens.analyses.batch.work import load_analysis
from kvlens.analyses.bias.exchange import HeadExchange
from kvlens.analyses.declaration import Columns, Record
from kvlens.analyses.heads import ablation
from kvlens.analyses.predictions import EFFECT, KL, LOGIT_CHANGE, LOSS_CHANGE, OUTPUT_SHARE
from kvlens.analyses.registry import OTHERS
from kvlens.analyses.segments import progress, telling
from kvlens.analyses.sequences import one_sequence, prompt_sequence
from pictures import data_of
from precision import LAW
from small_models import sharp
from tiny_text_model import PROMPT, TEXT, linear, softmax, tiny_text_model
from tqdm.auto import tqdm

import kvlens
from kvlens import KVBias, KVLensError, analyses, convert_prompt, terminal
from kvlens.analyses import (
    ANALYSES,
    bias_ablation,
    bias_by_head,
    bias_by_layer,
    bias_decomposition,
    bias_effects,
    bias_positions,
    dual_demonstrations,
    prompt_by_depth,
)
from kvlens.memory import NUMBERS_PER_PASS
from kvlens.viz import depth_map

OTHER = "The gadget is purple.\nThe widget"  # as many tokens as PROMPT
TARGET = dict(answer=3, rival=11)
METHODS = ["zero", "mean", "resample"]
OF_PROMPT = ("bias_singular_values", "dual_bound", "dual_demonstrations", "dual_losses")
OF_TEXT = ("bias_by_head", "conversion_error", "prompt_by_depth", "prompt_copies", "prompt_effect")
TAKE_A_BIAS = (
    "bias_ablation",
    "bias_decomposition",
    "bias_effects",
    "bias_singular_values",
    "bias_interactions",
    "layer_contributions",
)
"""As good as the prompt; elsewhere the prompt's own tokens are read."""


def of_text(name):
    return lambda model, prompt, text, other, **target: getattr(analyses, name)(model, prompt, text)


def of_prompt(name):
    return lambda model, prompt, text, other, **target: getattr(analyses, name)(model, prompt)


def positions(at):
    """At these positions of the text: all together, the last, each."""

    def call(model, prompt, text, other, **target):
        n = len(one_sequence(model, "text", text))
        places = {"together": at, "last": [n - 1], "each": range(n)}[at]
        return analyses.bias_positions(model, prompt, text, by="source", at=places, **target)

    return call


def decomposition(model, prompt, text, other, **target):
    return analyses.bias_decomposition(model, prompt, text, **target)


def effects(model, prompt, text, other, **target):
    references = convert_prompt(model, one_sequence(model, "other", other, prepend_bos=model.prepends_bos)[None])
    return analyses.bias_effects(model, prompt, text, methods=METHODS, references=references, **target)


def patching(model, prompt, text, other, **target):
    return analyses.activation_patching(model, prompt, other, text, **target)


def reading(model, prompt, text, other, *, answer, **target):
    return analyses.reading_layers(model, prompt, text, answer=answer, without=["widget is purple"])


def of_a_case(name):
    return lambda model, prompt, text, other, *, answer, **target: getattr(analyses, name)(
        model, [(prompt, text, answer, "widget is purple")]
    )


def circuit(model, prompt, text, other, **target):
    return analyses.circuit(model, prompt, other, text=text, **target, confirm=4).keep(9).edges


def contributions(model, prompt, text, other, **target):
    """Of the prompt's bias, as in a batch."""
    if not isinstance(prompt, KVBias):
        prompt = convert_prompt(model, one_sequence(model, "prompt", prompt, prepend_bos=model.prepends_bos))
    return analyses.layer_contributions(model, prompt, text, tokens=[*target.values()], per_head=True)


IN_A_BATCH = {  # name of the analysis, and what else -> its options on the command line, and a call
    **{name: ({}, of_text(name)) for name in OF_TEXT},
    **{name: ({}, of_prompt(name)) for name in OF_PROMPT},
    "activation_patching": (dict(points=""), patching),
    "bias_decomposition": ({}, decomposition),
    "bias_effects": (dict(methods=",".join(METHODS), parts=""), effects),
    **{f"bias_positions, {at}": (dict(by="source", at=at), positions(at)) for at in ("together", "last", "each")},
    "bias_interactions": ({}, lambda model, prompt, text, other, **target: analyses.bias_interactions(model, prompt, text)),
    "circuit": (dict(size=9, confirm=4), circuit),
    "composition": (dict(kinds="K"), lambda model, *given, **target: analyses.composition(model, kinds=["K"])),
    "layer_contributions": (dict(per_head=True), contributions),
    "reading_layers": ({}, reading),
    **{name: ({}, of_a_case(name)) for name in ("reading_heads", "retrieval_heads")},
}
CALLS = {
    **{name: call for name, (_, call) in IN_A_BATCH.items()},
    "bias_by_layer": of_text("bias_by_layer"),
    "bias_ablation": lambda model, prompt, text, other, **target: analyses.bias_ablation(model, prompt, text, [[(0, 1)]]),
    "induction_verdicts": lambda model, prompt, text, other, **target: analyses.induction_verdicts(
        model, prompt=one_sequence(model, "text", text), ablations=True
    ),
    "layer_contributions of a text": lambda model, prompt, text, other, **target: analyses.layer_contributions(
        model, None, prompt, tokens=[*target.values()]
    ),
}


def forms(model, text, **bos):
    tokens = model.to_tokens(text, truncate=False, **bos)
    return text, tokens[0], tokens


@pytest.mark.parametrize("name", CALLS)
def test_strings_and_tokens_pos_and_1_pos_are_the_same_prompt_and_text(name):
    """A string that is read first gets the model's BOS, one behind a prompt gets none. The model is left as it was."""
    model = linear()
    before = model.fingerprint()
    given = [
        *zip(forms(model, PROMPT), forms(model, TEXT, prepend_bos=False), forms(model, OTHER), strict=True),
        *([(convert_prompt(model, PROMPT), TEXT, OTHER)] if name in TAKE_A_BIAS else []),
    ]
    first, *others = [CALLS[name](model, *one, **TARGET) for one in given]
    for other in others:
        pd.testing.assert_frame_equal(first, other, check_exact=True)
    own = convert_prompt(model, OTHER)
    with model.kv_bias(own):
        if name == "bias_interactions":
            with pytest.raises(KVLensError, match="a bias is attached"):
                CALLS[name](model, *given[0], **TARGET)
        else:
            CALLS[name](model, *given[-1], **TARGET)
        assert model.attached_kv_bias is own
    assert model.fingerprint() == before and not any(point.has_hooks() for point in model.hook_dict.values())


@functools.cache
def grouped(attention):
    return tiny_text_model(attention=attention, n_heads=6, d_model=24, n_key_value_heads=2, kv_shift=None)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("name", IN_A_BATCH)
def test_a_record_of_a_batch_gives_the_table_of_the_function_with_a_row_for_every_head(name, attention):
    model, (options, call) = grouped(attention), IN_A_BATCH[name]
    analysis = load_analysis(name.partition(",")[0])
    analysis.check_model(model)
    fields = {"without": "widget is purple", "corrupted": OTHER, "references": [OTHER], "second_prompt": TEXT, **TARGET}
    frame = analysis.run(model, Record("a", PROMPT, TEXT, fields), **options)
    pd.testing.assert_frame_equal(frame, call(model, PROMPT, TEXT, OTHER, **TARGET))
    assert frame.dtypes.astype(str).to_dict() == analysis.columns.dtypes
    if {"layer", "head"} <= set(frame) and not name.startswith(("composition", "dual_bound", "prompt_copies")):
        heads = {(layer, head) for layer in range(2) for head in range(6)}
        assert heads <= set(zip(frame["layer"], frame["head"], strict=True))


def test_fields_that_a_record_lacks_are_named():
    run, model = analyses.bias_interactions.analysis.run, grouped("linear")
    with pytest.raises(KVLensError, match="second_prompt: this analysis needs a field of this name .* this record has: other"):
        run(model, Record("a", "the", fields={"other": 1}))
    with pytest.raises(KVLensError, match="references=, a batch of biases"):
        analyses.bias_effects.analysis.run(model, Record("b", "the", "a"), by="head", methods="mean", parts="")
    untold = tiny_text_model()
    untold.tokenizer = None
    with pytest.raises(KVLensError, match="prompt: expected token ids .* got 'the widget'"):
        run(untold, Record("a", "the widget"))


LOGITS = ["logit", "logit_change", "metric", "logit_attribution", "ablation_logit_change"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", [{}, dict(answer=3), TARGET], ids=["the next tokens", "an answer", "against a rival"])
@pytest.mark.parametrize("name", ["bias_decomposition", "bias_effects", "bias_positions, together", "activation_patching",
                                  "induction_verdicts", "layer_contributions"])  # fmt: skip
def test_centering_the_unembedding_changes_no_prediction_and_so_no_logit_of_a_table(name, target):
    models = [tiny_text_model(dtype=torch.float64, kv_shift=None, gain=3) for _ in range(2)]
    raw, centered = models
    direction = torch.randn(raw.cfg.d_model, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for model in models:  # the logits have a large mean, which depends on the position
        model.W_U.add_(direction)
        model.b_U.add_(2.5)
    centered.W_U.sub_(centered.W_U.mean(dim=-1, keepdim=True))
    centered.b_U.sub_(centered.b_U.mean())
    logits = [model(TEXT) for model in models]
    assert float((logits[0] - logits[1]).abs().min()) > 0.1
    torch.testing.assert_close(*(each.log_softmax(dim=-1) for each in logits), rtol=1e-11, atol=1e-11)
    frames = [CALLS[name](model, PROMPT, TEXT, OTHER, **target) for model in models]
    before, after = (frame[[column for column in LOGITS if column in frame]].to_numpy() for frame in frames)
    assert np.nanmax(np.abs(before)) > 1e-3  # far above rounding
    np.testing.assert_allclose(after, before, rtol=1e-9, atol=1e-11)  # logits near 10, sums of some hundred products


@pytest.mark.parametrize("name", ["bias_decomposition", "bias_effects", "bias_positions, together", "activation_patching"])
def test_an_answer_is_words_law(name):
    """What is measured of several tokens is what is measured of each behind those before, added up, less the rival's."""
    model = tiny_text_model(dtype=torch.float64, gain=3)
    few = dict(points=["bias", "z_bias"]) if name == "activation_patching" else {}  # of both kinds, batched and by hooks

    def measured(text, **target):
        frame = CALLS[name](model, PROMPT, text, OTHER, **target, **few)
        return frame[[column for column in (*LOGITS, "clean_metric", "corrupted_metric") if column in frame]].to_numpy()

    text = one_sequence(model, "text", TEXT)
    said, rival = (one_sequence(model, "answer", words) for words in (" purple and", " green"))
    assert len(said) > 2 and len(rival) > 1 and said[0] != rival[0]
    one_by_one = [
        sum(measured(torch.cat([text, words[:i]]), answer=int(token)) for i, token in enumerate(words))
        for words in (said, rival)
    ]
    in_words = measured(text, answer=" purple and"), measured(text, answer=said.tolist(), rival=" green")
    for found, expected in zip(in_words, (one_by_one[0], one_by_one[0] - one_by_one[1]), strict=True):
        assert np.abs(found - expected).max() < LAW * np.abs(one_by_one[0]).max()


def test_words_as_tokens_of_a_split_and_of_a_head():
    model = tiny_text_model(dtype=torch.float64)
    words = one_sequence(model, "answer", " purple and")
    of_words = analyses.layer_contributions(model, PROMPT, TEXT, tokens=[" purple and"])
    pd.testing.assert_frame_equal(of_words, analyses.layer_contributions(model, PROMPT, TEXT, tokens=words.tolist()))
    copied = [analyses.what_is_copied(softmax(), PROMPT, TEXT, 1, 2, answer=a) for a in (" purple and", int(words[0]))]
    pd.testing.assert_frame_equal(*copied)


def test_the_details_of_a_head_take_them_in_any_form():
    model = linear()
    given = zip(forms(model, PROMPT), forms(model, TEXT, prepend_bos=False), strict=True)
    first, *others = [analyses.head_details(model, prompt, text) for prompt, text in given]
    assert all(other.prompt == first.prompt for other in others)


def test_bos_as_convert_prompt_has_it():
    model = linear()
    assert prompt_sequence(model, "x", PROMPT)[0] == model.tokenizer.bos_token_id
    bias = convert_prompt(model, PROMPT)
    assert torch.equal(prompt_sequence(model, "x", TEXT, bias), one_sequence(model, "x", TEXT))
    with model.kv_bias(bias):
        assert torch.equal(prompt_sequence(model, "x", TEXT), one_sequence(model, "x", TEXT))


NEED_TOKENS = [name for name in (*OF_PROMPT, *OF_TEXT) if name not in TAKE_A_BIAS]
NEED_TOKENS += ["bias_by_layer", "bias_positions", "head_details", "linked_shares"]


@pytest.mark.unhooked
@pytest.mark.parametrize("name", NEED_TOKENS)
def test_where_the_prompts_own_tokens_are_read_a_bias_is_refused(name):
    texts = () if name in OF_PROMPT else (TEXT,)
    with pytest.raises(KVLensError, match="prompt: this analysis reads the prompt's own tokens, and a bias has none"):
        getattr(analyses, name)(linear(), convert_prompt(linear(), PROMPT), *texts)


def test_every_analysis_takes_prompt_and_text_by_these_names():
    for name in analyses.ANALYSES:
        analysis = load_analysis(name)
        parameters = list(inspect.signature(getattr(analyses, name)).parameters)
        assert not analysis.inputs or {"prompt", "cases"} & {*parameters}, name
        assert not any(parameter.endswith("_tokens") for parameter in parameters), name
        if analysis.needs_text:
            assert parameters[:2] == ["model", "prompt"] and "text" in parameters[2:4], name


@pytest.mark.parametrize("name", [*ANALYSES, *OTHERS])
def test_the_prompt_is_the_second_argument(name):
    """It need not be named."""
    parameters = inspect.signature(getattr(analyses, name)).parameters
    given = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert given[:2] == ["model", "prompt"] if "prompt" in parameters else given[:1] == ["model"]


@pytest.mark.parametrize("name", ANALYSES)
def test_an_option_is_called_on_the_command_line_as_in_python(name):
    """And has one default."""
    parameters, defaults = inspect.signature(getattr(analyses, name)).parameters, load_analysis(name).defaults
    assert defaults == {option: parameters[option].default for option in defaults if option in parameters}


EFFECTS = dict.fromkeys(("effect", "swap", "converse", "whole"), EFFECT)
WORDS = {"loss_change": LOSS_CHANGE, "logit_change": LOGIT_CHANGE, "kl": KL, "output_share": OUTPUT_SHARE, **EFFECTS}
"""How the name of such a column ends, and how its text begins."""
OTHER_WORDS = ("rises", "falls", "rise of", "change of", "minus")
"""Other wordings, which no column may use."""


def declared():
    """(where, column, meaning) of every table in ``analyses``, those that no command runs included."""
    modules = [name for _, name, _ in pkgutil.walk_packages(analyses.__path__, "kvlens.analyses.") if "__main__" not in name]
    tables = {id(t): (name, t) for name in modules for t in vars(importlib.import_module(name)).values() if type(t) is Columns}
    return [(where, name, column.meaning) for where, table in tables.values() for name, column in table.items()]


def test_the_words_agree():
    assert {id(load_analysis(name).columns) for name in ANALYSES} and len(declared()) > 150
    found = []
    for where, name, meaning in declared():
        words = [text for end, text in WORDS.items() if name == end or name.endswith(f"_{end}")]
        found += words
        begins = meaning.startswith("".join(words))
        rest = meaning.removeprefix("".join(words))
        assert begins and not any(word in rest for word in OTHER_WORDS), f"{where}: {name}: {meaning}"
    assert {text: found.count(text) for text in WORDS.values()} == {
        **{LOSS_CHANGE: 9, LOGIT_CHANGE: 2, KL: 7, EFFECT: 8},
        OUTPUT_SHARE: 3,
    }


def test_a_column_that_says_it_otherwise_is_found(monkeypatch):
    column = Columns(loss_change=("float64", "with minus without: negative where the prompt helps"))
    monkeypatch.setattr("kvlens.analyses.readings.DEPTHS", column)
    with pytest.raises(AssertionError, match=r"kvlens.analyses.readings: loss_change: with minus"):
        test_the_words_agree()


@torch.no_grad()
def test_what_helps_has_a_positive_change_of_the_loss_in_every_table():
    """The text repeats the prompt: head 1.2 finds the next token there, and without it or the prompt none is predictable."""
    model, piece = two_layer_circuit(), torch.tensor([3, 7, 1, 9, 4, 6])
    bias = convert_prompt(model, piece)

    def loss(*before, hooks=()):
        logits = model.run_with_hooks(torch.cat([*before, piece])[None], fwd_hooks=list(hooks))[0, -len(piece) : -1]
        return float(-logits.log_softmax(dim=-1).gather(-1, piece[1:, None]).mean())

    with model.kv_bias(bias):
        whole = loss()
    with model.kv_bias(bias.select(heads=[(0, head) for head in range(3)] + [(1, 0), (1, 1)])):
        without_head = loss()
    with model.kv_bias(bias.select(layers=[0])):
        without_layer = loss()
    assert without_head - whole > 0.5
    by_head, by_layer = bias_by_head(model, piece, piece), bias_by_layer(model, piece, piece)
    effects = bias_effects(model, bias, piece, by="head")
    is_head = {name: (table["layer"] == 1) & (table["head"] == 2) for name, table in (("by_head", by_head), ("all", effects))}
    near = dict(rel=1e-9, abs=1e-12)
    assert by_head.loc[is_head["by_head"], "loss_change"].item() == pytest.approx(without_head - whole, **near)
    assert effects.loc[is_head["all"], "loss_change"].item() == pytest.approx(without_head - whole, **near)
    assert effects.loc[is_head["all"], "logit_change"].item() < -0.1
    assert bias_ablation(model, bias, piece, [[(1, 2)]])["loss_change"].item() == pytest.approx(without_head - whole, **near)
    assert by_layer["loss_change"].iloc[1] == pytest.approx(without_layer - whole, **near)

    depths = prompt_by_depth(model, piece, piece, baseline=piece[:0])
    end = depths.loc[depths["layer"] == 2, "loss_change"].mean()
    assert end == pytest.approx(loss() - loss(piece), **near) and end > 0.5
    picture = depth_map(depths)
    assert "without minus with" in picture.body and data_of(picture)["means"][0] == 0

    resampled = heads_and_verdicts(model, prompt=piece, ablations=True)
    row = resampled[(resampled["layer"] == 1) & (resampled["head"] == 2)].iloc[0]
    assert (
        row["ablation_loss_change"] > 0.5 and row["prefix_matching_loss_change"] > 0.5 and row["ablation_logit_change"] < -0.1
    )


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_output_share_is_one_thing_in_every_table(attention):
    """Of the last text position: position by position, as demonstrations of its dual model, and of the bias as a whole."""
    model = sharp(attention=attention, dtype=torch.float64)
    prompt, text = torch.tensor([3, 7, 1, 9]), torch.tensor([4, 6, 2])
    by_position = bias_positions(model, prompt, text, at=[2]).query("part == 'prompt'")
    demonstrations = dual_demonstrations(model, torch.cat([prompt, text]), n_demonstrations=len(prompt))
    names = ["layer", "head", "prompt_position", "output_share"]
    for frame in (by_position, demonstrations):
        assert set(names) < set(frame.columns)
    pd.testing.assert_frame_equal(by_position[names].reset_index(drop=True), demonstrations[names], rtol=1e-10, atol=1e-12)
    pooled = bias_positions(model, prompt, text).query("part == 'prompt'").groupby(["layer", "head"])["output_share"].sum()
    whole = bias_decomposition(model, prompt, text).set_index(["layer", "head"])["output_share"]
    pd.testing.assert_series_equal(pooled, whole, rtol=1e-10, atol=1e-12)


def test_one_word_for_a_position_in_every_table():
    """``position`` is where the text is read or predicted, ``prompt_position`` what is read there, ``attention`` how much."""
    for name in ANALYSES:
        columns = set(load_analysis(name).columns)
        assert not columns & {"query", "key", "text_position", "place", "pos", "query_position"}, name


GIVEN = torch.arange(3, 14), torch.tensor([5, 2, 7])
TWO_UNITS = dict(by=[(0, 5), (5, 11)])
LONG = {
    "attribution_by_head": lambda model: analyses.attribution_by_head(model, *GIVEN, **TWO_UNITS),
    "attribution_by_position": lambda model: analyses.attribution_by_position(model, *GIVEN, **TWO_UNITS),
    "prompt_attribution": lambda model: analyses.prompt_attribution(model, *GIVEN, **TWO_UNITS),
    "bias_by_head": lambda model: analyses.bias_by_head(model, *GIVEN),
    "bias_by_layer": lambda model: analyses.bias_by_layer(model, *GIVEN),
    "bias_effects": lambda model: analyses.bias_effects(model, *GIVEN),
    "bias_ablation": lambda model: analyses.bias_ablation(model, *GIVEN, [[(0, 0)], [(1, 0)]]),
    "activation_patching": lambda model: analyses.activation_patching(model, GIVEN[0], GIVEN[0].flip(0), GIVEN[1]),
    "induction_heads": lambda model: analyses.induction_heads(model, ablations=True, n_sequences=2),
}


@pytest.fixture(scope="module")
def facts():
    return kvlens.HookedKVTransformer.from_zoo("facts-gpt2")


@pytest.mark.parametrize("name", LONG)
def test_it_tells_how_far_it_is(facts, name, monkeypatch):
    told: list[float] = []
    monkeypatch.setattr(HeadExchange, "_numbers_per_row", lambda *of: NUMBERS_PER_PASS)
    monkeypatch.setattr(ablation, "rows_per_pass", lambda *of: 4)
    with telling(told.append):
        LONG[name](facts)
    assert len(told) > 1 and told == sorted(told) and 0.9 < told[-1] <= 1.0 and told[0] < 0.9


P, T = map(len, GIVEN)
FLIPPED, CASE = GIVEN[0].flip(0), (*GIVEN, torch.tensor([3, 8]), [(0, 5)])
PAIRS, ASKED = (torch.stack([GIVEN[0]] * 3), torch.stack([FLIPPED] * 3)), dict(answer=3, rival=11)
BEHIND, WORDED = dict(method="eap", text=GIVEN[1], confirm=4), dict(answer=[3, 5], rival=11)
UNITS = TWO_UNITS | dict(answer=3)
REPEATED = dict(n_sequences=2, n_repeated=10)
COSTS = [  # arguments behind the model, and how many tokens are embedded; two units, 2 layers of 4 heads; shifted keys
    ("activation_patching", (GIVEN[0], FLIPPED, GIVEN[1]), dict(answer=3, points=["bias"]), 2 * P + 4 * T),
    ("attribution_by_head", GIVEN, UNITS, P * (2 + 2) + T * (1 + 2) * (2 + 2 * (8 + 8))),
    ("attribution_by_position", GIVEN, UNITS, P + 2 * (P + 2 * (P + 2) * T)),
    ("attribution_by_position", GIVEN, UNITS | dict(each_layer=True), P + 2 * (P + (1 + 2) * 2 * (P + 2) * T)),
    ("bias_by_head", GIVEN, {}, 2 * P + 3 * T),
    ("bias_decomposition", GIVEN, {}, P + T),
    ("bias_effects", GIVEN, {}, P + 2 * T),
    ("bias_interactions", (GIVEN[0], FLIPPED), {}, (2 + 2 + 1) * P),
    ("bias_positions", GIVEN, {}, P + T),
    ("bias_singular_values", GIVEN[:1], {}, P),
    ("circuit", PAIRS, ASKED, 3 * P * (2 + 5) + 3 * P),
    ("circuit", PAIRS, ASKED | dict(method="eap"), 3 * P * (2 + 1) + 3 * P),
    ("circuit", PAIRS, ASKED | dict(steps=7, confirm=4), 3 * P * (2 + 7 + 2 + 4) + 3 * P),
    ("circuit", (GIVEN[0], FLIPPED), BEHIND, (P + T) * (1 + 2 + 1 + 2 * (2 + 4) + 3)),
    ("circuit", (GIVEN[0], FLIPPED), BEHIND | WORDED, (2 * (P + T) + 1) * (2 + 1 + 2 * (2 + 4)) + (P + T + 1) * 3),
    ("composition", (), {}, 0),
    ("conversion_error", GIVEN, {}, 4 * (P + T)),
    ("dual_bound", GIVEN[:1], dict(layer=1, head=2, n_steps=5), 5 * P),
    ("dual_demonstrations", GIVEN[:1], {}, P),
    ("dual_losses", GIVEN[:1], {}, P),
    ("induction_heads", (), REPEATED, 2 * 2 * (2 * 10 + 1)),
    ("induction_verdicts", (), REPEATED, 2 * 2 * (2 * 10 + 1)),
    ("layer_contributions", GIVEN, {}, P + T),
    ("prompt_attribution", GIVEN, UNITS, (3 + 2) * P + (3 + 2 * 2) * T),
    ("prompt_by_depth", GIVEN, {}, 2 * (P + T)),
    ("prompt_copies", GIVEN, {}, P + T + 1),  # one more whose shift is read
    ("prompt_effect", GIVEN, {}, 3 * (P + T)),
    ("retrieval_heads", ([CASE],), {}, P + T + 1),  # without the answer's last token
    ("state_erasure", (GIVEN[0], FLIPPED), {}, 2 * P),
    ("state_half_lives", GIVEN[:1], {}, P),
    ("state_memory", GIVEN[:1], {}, P),
    ("what_is_copied", (*GIVEN, 0, 1), dict(answer=3, n_run=2), (2 + 2) * (P + T)),
    ("why_attends", (*GIVEN, 1, 1), dict(n_run=2), P + T),
]


@pytest.mark.parametrize(("name", "given", "options", "tokens"), COSTS, ids=[name for name, *_ in COSTS])
def test_it_costs_what_it_says(facts, name, given, options, tokens):
    """The numbers behind the words of each declaration."""
    read: list[int] = []
    model = kvlens.load("facts-hybrid") if name.startswith("state_") else facts
    hook = model.embed.register_forward_hook(lambda module, given, output: read.append(given[0].numel()))
    try:
        getattr(analyses, name)(model, *given, **options)
    finally:
        hook.remove()
    assert sum(read) == tokens


@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis_says_what_it_costs(name):
    cost = load_analysis(name).cost
    assert cost and cost[:40] in " ".join(getattr(analyses, name).__doc__.split())


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stderr", "worker", "shown"), [(Terminal(), None, True), (io.StringIO(), None, False), (Terminal(), object(), False)]
)
def test_a_bar_shows_on_a_terminal_and_goes(monkeypatch, stderr, worker, shown):
    monkeypatch.setattr(terminal, "BAR_AFTER", 0)
    monkeypatch.setattr(terminal.multiprocessing, "parent_process", lambda: worker)
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress("looking") as tell:
        tell(0.5)
    assert ("looking" in stderr.getvalue()) == shown
    assert stderr.getvalue().split("\r")[-1].strip() == ""


def test_a_script_without_a_terminal_gets_lines_with_the_time_that_is_left(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(terminal, "LINE_EVERY", 0)
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress("looking") as tell:
        tell(0.25)
    assert re.fullmatch(r"looking: 25%; about \d\d:\d\d left\n", stderr.getvalue())
    with telling(lambda done: None), progress("looking") as tell:
        tell(0.5)
    assert stderr.getvalue().count("\n") == 1


def test_a_bar_shows_in_a_notebook_that_has_no_terminal(monkeypatch):
    seen = {}

    class tqdm_notebook(tqdm):
        def __init__(self, **options):
            seen.update(options)
            super().__init__(**options | {"disable": True})

    monkeypatch.setattr("tqdm.auto.tqdm", tqdm_notebook)
    with progress("looking") as tell:
        tell(0.5)
    assert seen["disable"] is False

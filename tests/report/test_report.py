"""The report: its figures are those of its tables, its folder is whole or not there, its view fits 80 columns."""

import io
import json
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from chat_templates import chat_model
from rich.cells import cell_len
from rich.console import Console
from stacked_tensors import with_stacked
from tiny_text_model import PROMPT, TEXT, tiny_text_model, tiny_tokenizer

from kvlens import Chat, HookedKVTransformer, HookedKVTransformerConfig, KVBias, KVLensError, convert_prompt
from kvlens.analyses import (
    baseline_ablation,
    bias_by_head,
    bias_by_layer,
    conversion_error,
    dual_losses,
    prompt_effect,
    readings,
)
from kvlens.cli import main
from kvlens.files import atomic
from kvlens.report import build_report, check_report_folder, page, print_report, write_report
from kvlens.report.build import _check_lengths
from kvlens.report.page import build_page
from kvlens.report.summary import effect_figures, harm_note

TABLES = (
    "conversion_error",
    "prompt_effect",
    "prompt_by_depth",
    "prompt_copies",
    "bias_by_head",
    "bias_by_layer",
    "layer_contributions",
    "generated",
)
FILES = {"summary.json", "bias.safetensors", "report.html", *(f"{name}.parquet" for name in TABLES)}


@pytest.fixture(scope="module")
def model():
    return tiny_text_model()


@pytest.fixture(scope="module")
def report(model):
    return build_report(model, PROMPT, TEXT, model_name="tiny", new_tokens=9, by=None)


@pytest.fixture(scope="module")
def watched(model):
    """A sampled report with an explanation, and what was seen while it was made."""
    read, lengths, told, state = readings.text_logits, [], [], torch.get_rng_state()

    def counted(model, prompt, *rest, kept=None):
        lengths.append(None if prompt is None else len(prompt) if kept is None else int(kept.sum()))
        return read(model, prompt, *rest, kept=kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readings, "text_logits", counted)
        sampled = dict(new_tokens=9, temperature=1.5, seed=4)
        report = build_report(model, PROMPT, TEXT, **sampled, on_progress=lambda what, done: told.append(done))
    same_state = torch.equal(torch.get_rng_state(), state)
    return SimpleNamespace(report=report, lengths=lengths, told=told, same_state=same_state)


@pytest.fixture(scope="module")
def written(report, tmp_path_factory):
    """The report on disk, to be copied."""
    return write_report(report, tmp_path_factory.mktemp("written") / "r")


def shown(report, **options) -> str:
    console = Console(file=io.StringIO(), width=80, **options)
    print_report(report, console)
    return console.file.getvalue()


def identity(file) -> tuple[int, int]:
    """Which file it is and when it was written; reading it changes neither."""
    return file.stat().st_ino, file.stat().st_mtime_ns


def listing(folder) -> list[str]:
    return sorted(os.listdir(folder))


# --- what it computes ------------------------------------------------------------------------------------------------


def test_each_condition_is_read_once(model, watched):
    """With the prompt, behind its BOS alone, converted; and for the rounding error with the prompt, as it is and in float64."""
    n = len(model.to_tokens(PROMPT)[0])
    assert watched.lengths == [n, 1, None, n, n]


def test_it_leaves_model_and_random_numbers_as_they_were(model, watched):
    assert watched.same_state
    assert model.attached_kv_bias is None
    assert model.cfg.default_prepend_bos is True


def test_progress_never_goes_back(watched):
    assert watched.told == sorted(watched.told)
    assert watched.told[0] >= 0 and watched.told[-1] <= 1


def test_tables_are_those_of_the_analyses(model, report):
    prompt, text = model.to_tokens(PROMPT)[0], model.to_tokens(TEXT, prepend_bos=False)[0]
    bias = convert_prompt(model, prompt)
    for analysis in (conversion_error, prompt_effect, bias_by_head, bias_by_layer):
        expected = analysis(model, prompt, text, bias=bias)
        pd.testing.assert_frame_equal(report.tables[analysis.__name__], expected)
    assert torch.equal(report.bias.stacked("b_kv"), bias.stacked("b_kv"))


def test_headline_figures_follow_from_the_tables(model, report):
    summary, tables = report.summary, report.tables
    effect, errors = tables["prompt_effect"], tables["conversion_error"]
    text = model.to_tokens(TEXT, prepend_bos=False)[0]
    assert summary["prompt"] == {"text": PROMPT, "n_tokens": len(model.to_tokens(PROMPT)[0])}
    assert summary["text"] == {"text": TEXT, "n_tokens": len(text)}
    with model.kv_bias(report.bias):
        new = model(text[None])[0].double()
    old = model(torch.cat([model.to_tokens(PROMPT)[0], text])[None])[0, -len(text) :].double()
    rounding = float((new - old).norm() / old.norm())  # passes that sum in another order round alike in size alone
    assert rounding / 2 < summary["conversion"]["relative_error"] < 2 * rounding
    assert summary["conversion"]["exact_to_rounding"] is True
    assert summary["conversion"]["max_abs_error"] == errors["max_abs_error"].max()
    for condition in ("with_prompt", "without_prompt", "converted"):
        rows, figures = effect[effect["condition"] == condition], summary["prompt_effect"][condition]
        assert figures["kl_from_with_prompt"] == pytest.approx(rows["kl"].mean())
        assert figures["next_token_agreement"] == pytest.approx(rows["argmax_agrees"].mean())
        assert figures["loss_nats_per_token"] == pytest.approx(rows["loss"].mean())
    everything = [(layer, head) for layer in range(2) for head in range(3)]
    total = baseline_ablation(model, PROMPT, text, [everything], bias=report.bias)
    assert summary["bias"]["kl_without_any_head"] == total.loc[0, "kl"]
    strongest = summary["bias"]["heads"]
    assert [row["ablation_kl"] for row in strongest] == sorted(tables["bias_by_head"]["ablation_kl"], reverse=True)
    assert summary["model"]["fingerprint"] == model.fingerprint().to_json()


@pytest.mark.parametrize("method", ["greedy", "sampled"])
def test_generated_text_is_that_of_the_prompt(model, report, watched, method):
    report = report if method == "greedy" else watched.report
    by_condition = {name: rows["token_id"].tolist() for name, rows in report.tables["generated"].groupby("condition")}
    assert by_condition["converted"] == by_condition["with_prompt"] != by_condition["without_prompt"]
    assert report.summary["generation"]["converted_equals_with_prompt"] is True
    assert report.summary["generation"]["method"].startswith(method)
    converted = report.summary["generation"]["converted"].encode()
    shown = re.sub(b"<0x(..)>", lambda byte: bytes.fromhex(byte[1].decode()), converted)
    assert shown.decode(errors="replace") == model.tokenizer.decode(by_condition["converted"])


def test_greedy_text_has_the_most_probable_tokens(model, report):
    """With the prompt; and without it, where BOS alone is left."""
    prompt, text = model.to_tokens(PROMPT), model.to_tokens(TEXT, prepend_bos=False)
    table = report.tables["generated"]
    bos = model.kv_bias(convert_prompt(model, PROMPT, without=[(1, prompt.shape[1])]))
    for condition, before, read in (("with_prompt", prompt, nullcontext()), ("without_prompt", prompt[:, :0], bos)):
        tokens = torch.cat([before, text], dim=1)
        generated = table.loc[table["condition"] == condition, "token_id"]
        with read:
            for token in generated:
                assert int(model(tokens)[0, -1].argmax()) == token
                tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)


def test_a_cold_sample_is_the_greedy_text(model, report):
    cold = build_report(model, PROMPT, TEXT, new_tokens=9, by=None, temperature=1e-3).tables["generated"]
    assert cold["token_id"].tolist() == report.tables["generated"]["token_id"].tolist()


def test_a_lost_shift_state_is_no_rounding(model):
    bias = convert_prompt(model, PROMPT)
    lost = with_stacked(bias, last_k=bias.stacked("last_k") * 0, last_v=bias.stacked("last_v") * 0)
    prompt, text = model.to_tokens(PROMPT)[0], model.to_tokens(TEXT, prepend_bos=False)[0]
    assert not conversion_error(model, prompt, text, bias=lost)["exact_to_rounding"].any()


def test_behind_a_chat_the_text_is_the_answer():
    """What the template writes behind the last message reads it, and what is generated is the answer itself."""
    model = chat_model()
    chat = Chat.ask("Return the widget?", {"a.txt": PROMPT})
    made = build_report(model, chat, new_tokens=3)
    tokens, answer = chat.tokens(model), made.explained.response_tokens
    begun = model.to_tokens("<|im_end|>\n<|im_start|>assistant\n", prepend_bos=False)[0]
    n, text = len(tokens) - len(begun), torch.cat([begun, answer])
    assert tokens[n:].equal(begun) and made.summary["prompt"]["n_tokens"] == n and made.summary["text"]["n_tokens"] == len(text)
    expected = prompt_effect(model, tokens[:n], text, bias=made.bias)
    pd.testing.assert_frame_equal(made.tables["prompt_effect"], expected)
    generated = made.tables["generated"].query("condition == 'with_prompt'")["token_id"].tolist()
    assert generated == answer[:3].tolist() and made.summary["generation"]["converted_equals_with_prompt"]
    assert (
        f"answer of {len(text)}" in shown(made)
        and f"evaluated on the answer of {len(text)} tokens" in build_page(made).to_html()
    )
    given = build_report(model, chat, answer=" green", new_tokens=1, by=None)
    assert given.summary["text"]["n_tokens"] == len(begun) + len(model.to_tokens(" green", prepend_bos=False)[0])
    with pytest.raises(KVLensError, match="a prompt that is no chat needs a text behind it"):
        build_report(model, PROMPT)


def test_a_chat_on_the_command_line_needs_no_text_and_is_refused_in_its_words(tmp_path, monkeypatch, capsys):
    model, file = chat_model(), tmp_path / "chat.json"
    monkeypatch.setattr("kvlens.load", lambda *args, **options: model)
    asked = [{"role": "user", "content": "Return the widget?"}]
    about = [{"role": "system", "content": PROMPT}, *asked]
    file.write_text(json.dumps(about))
    words = ["report", "--model", "docs-linear", "--messages", str(file), "--new-tokens", "1", "--out", str(tmp_path / "r")]
    assert main(words) == 0 and "; answer of " in " ".join(capsys.readouterr().out.split())
    file.write_text(json.dumps(asked))
    for command in ("explain", "report"):
        assert main([command, *words[1:5], "--out", str(tmp_path / command)]) == 2
        error = capsys.readouterr().err
        assert "--messages: the chat in" in error and "by=" not in error and "Chat.ask" not in error
        assert ("--by none" in error) == (command == "report")
    assert main(["explain", "--model", "docs-linear", "--question", "Return the widget?"]) == 2
    assert "--document FILE or --system TEXT" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "bare"), "--by", "none"]) == 0
    assert "The model continues with" in capsys.readouterr().out


# --- bad input -------------------------------------------------------------------------------------------------------


def with_nan(model):
    with torch.no_grad():
        model.W_U[0, 0] = torch.nan
    return model


def small_vocabulary():
    cfg = HookedKVTransformerConfig(
        n_layers=1, d_model=4, d_head=4, n_ctx=64, d_vocab=5, attn_only=True, attention="linear", device="cpu",
        positional_embedding_type="rotary",
    )  # fmt: skip
    return HookedKVTransformer(cfg, tiny_tokenizer())


def without_tokenizer():
    model = tiny_text_model()
    model.tokenizer = None
    return model


def with_a_bias():
    model = tiny_text_model()
    model.attach_kv_bias(convert_prompt(model, PROMPT))
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (tiny_text_model, {"prompt": ""}, "prompt: the tokenizer finds no tokens"),
        (tiny_text_model, {"text": ""}, "text: the tokenizer finds no tokens"),
        (tiny_text_model, {"new_tokens": 0}, "new_tokens must be at least 1, got 0"),
        (tiny_text_model, {"temperature": -1.0}, "temperature must be at least 0, got -1"),
        (lambda: with_nan(tiny_text_model()), {}, "hold NaN or infinity: unembed.W_U"),
        (small_vocabulary, {}, r"prompt: token ids must lie in 0\.\.4 "),
        (without_tokenizer, {}, "no tokenizer"),
        (with_a_bias, {}, "a bias is attached"),
        (
            lambda: tiny_text_model(positional_embedding_type="standard"),
            {"new_tokens": 50},
            r"prompt \(\d+ tokens\), text \(\d+\) and new tokens \(50\) make \d+, .* n_ctx=64; shorten one",
        ),
    ],
)
def test_bad_input(make, options, message):
    with pytest.raises(KVLensError, match=message):
        build_report(make(), **{"prompt": PROMPT, "text": TEXT, **options})


@pytest.mark.parametrize(("n_ctx", "expected"), [(512, 40), (64, 4)])
def test_as_many_tokens_are_generated_as_there_is_room_for(n_ctx, expected):
    model = SimpleNamespace(cfg=SimpleNamespace(n_ctx=n_ctx, has_position_limit=True))
    assert _check_lengths(model, 40, 20, None) == expected
    model.cfg.has_position_limit = False
    assert _check_lengths(model, 60, 20, None) == 40
    model.cfg = SimpleNamespace(n_ctx=60, has_position_limit=True)
    with pytest.raises(KVLensError, match="shorten one of the three"):
        _check_lengths(model, 40, 20, None)


def test_a_text_beyond_n_ctx_is_welcome_with_rotary_positions(model):
    with pytest.warns(UserWarning, match="The prompt is longer than n_ctx=64, for which the model was made"):
        long = build_report(model, PROMPT * 5, TEXT, new_tokens=2, by=None)
    assert "n_ctx=64" in long.summary["notes"][0] and "Note: The prompt is longer" in shown(long)
    assert "n_ctx=64" in build_page(long).to_html()
    assert long.summary["prompt"]["n_tokens"] > model.cfg.n_ctx
    assert long.summary["conversion"]["exact_to_rounding"]


def test_the_gain_is_that_of_the_prompt_as_converted():
    """An approximate conversion saves less than the prompt itself: 3 - 1.5 nats, and not 3 - 1."""
    losses = {"with_prompt": 1.0, "converted": 1.5, "without_prompt": 3.0}
    effect = pd.DataFrame({"condition": list(losses), "kl": 0.0, "argmax_agrees": True, "loss": losses.values()})
    assert effect_figures(effect)["gain_nats_per_token"] == 1.5


def test_a_harmful_prompt_is_reported_with_its_positions(report):
    assert report.summary["notes"] == [] or report.summary["prompt_effect"]["gain_nats_per_token"] < 0
    effect = report.tables["prompt_effect"].copy()
    losses = {"with_prompt": 1.0, "converted": 1.0, "without_prompt": 0.5}
    effect["loss"] = effect["condition"].map(losses).where(effect["next_token"].notna())
    effect.loc[(effect["position"] == 2) & (effect["condition"] == "converted"), "loss"] = 4.0
    note = harm_note(effect)
    n, token = effect["position"].max(), effect.loc[effect["position"] == 2, "next_token"].iloc[0]
    assert f"{(0.5 * (n - 1) + 3.5) / n:.3f} nats per token higher" in note and f"at {n} of {n} positions" in note
    assert f"{token!r} at 2 (+3.50)" in note
    effect["loss"] = -effect["loss"]
    assert harm_note(effect) is None


def test_the_page_colors_the_token_that_is_predicted_and_lists_where_the_prompt_helps_and_hurts_most(report, monkeypatch):
    """The loss at position 2 is that of the token at 3; the prompt lowers it most there, and raises it most at 1."""
    effect = report.tables["prompt_effect"].copy()
    gains = effect["position"].map({0: 0.5, 1: -2.0, 2: 3.0, 3: -1.0}).fillna(0.0).where(effect["next_token"].notna())
    effect["loss"] = 5 + gains.where(effect["condition"] == "without_prompt", 0 * gains)
    seen = {}
    monkeypatch.setattr(page, "colored_tokens", lambda tokens, values, **_: seen.update(tokens=[*tokens], values=values))
    monkeypatch.setattr(page, "error_table", lambda table, **_: seen.update(table=table))
    page._gain(effect)
    page._places(effect)
    assert seen["tokens"] == effect.loc[effect["condition"] == "converted", "token"].tolist()
    assert pd.isna(seen["values"][0]) and seen["values"][1:5] == [0.5, -2.0, 3.0, -1.0]
    assert len(seen["values"]) == len(seen["tokens"])
    table = seen["table"]
    assert [*zip(table["the prompt"], table["position"], strict=True)] == [
        ("helps", 2), ("helps", 0), ("hurts", 1), ("hurts", 3)
    ]  # fmt: skip
    assert table["next token"].tolist() != table["after"].tolist()


# --- the folder ------------------------------------------------------------------------------------------------------


def test_written_values_are_read_back(report, model, tmp_path):
    folder = write_report(report, tmp_path / "new" / "report")
    assert set(listing(folder)) == FILES
    for name, table in report.tables.items():
        pd.testing.assert_frame_equal(pd.read_parquet(folder / f"{name}.parquet"), table)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert set(summary.pop("files")) == FILES
    assert summary["bias"].pop("file_bytes") == (folder / "bias.safetensors").stat().st_size
    assert summary == report.summary
    assert torch.equal(KVBias.load(folder / "bias.safetensors").stacked("b_kv"), report.bias.stacked("b_kv"))
    assert listing(tmp_path / "new") == ["report"]


def test_figures_that_do_not_exist_are_null(model, tmp_path):
    report = build_report(model, PROMPT, "t", new_tokens=1, by=None)
    assert report.summary["text"]["n_tokens"] == 1
    summary = json.loads((write_report(report, tmp_path / "r") / "summary.json").read_text())
    assert summary["prompt_effect"]["converted"]["loss_nats_per_token"] is None
    assert "NaN" not in shown(report) and "nan" not in shown(report)


def test_an_empty_folder_and_a_link_to_a_report_are_used(report, tmp_path):
    (tmp_path / "r").mkdir()
    write_report(report, tmp_path / "r")
    (tmp_path / "link").symlink_to("r")
    write_report(report, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert set(listing(tmp_path / "r")) == FILES


def test_a_path_that_is_not_writable(monkeypatch, tmp_path):
    def refuse(*args, **how):
        raise PermissionError(13, "Permission denied", "secret-temporary-name")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)  # file modes do not stop root, which runs many a container
    with pytest.raises(KVLensError, match="Permission denied; choose another folder"):
        check_report_folder(tmp_path / "a" / "r")
    assert listing(tmp_path) == []


@pytest.mark.parametrize("failure", [KVLensError("broken"), KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("where", ["kvlens.kv_bias.KVBias.save", "kvlens.report.page.table_bytes", "pathlib.Path.write_text"])
def test_a_failure_in_the_middle_leaves_nothing(report, written, tmp_path, monkeypatch, failure, where):
    def fail(*args, **kwargs):
        raise failure

    old = shutil.copytree(written, tmp_path / "old")
    stamp = identity(old / "summary.json")
    monkeypatch.setattr(where, fail)
    expected = KVLensError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(expected):
        write_report(report, tmp_path / "new")
    with pytest.raises(expected):
        write_report(report, old, overwrite=True)
    assert listing(tmp_path) == ["old"]
    assert set(listing(old)) == FILES
    assert identity(old / "summary.json") == stamp


def test_the_old_report_is_restored_when_the_new_one_cannot_replace_it(report, tmp_path, monkeypatch):
    folder = write_report(report, tmp_path / "r")
    rename, n_calls = Path.rename, 0

    def fail_at_the_second(self, target):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 2:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(atomic, "_swapped", lambda a, b: False)  # a system that swaps folders in one step has no second
    monkeypatch.setattr(Path, "rename", fail_at_the_second)
    with pytest.raises(KVLensError, match="Input/output error"):
        write_report(report, folder, overwrite=True)
    assert n_calls == 3
    assert listing(tmp_path) == ["r"] and set(listing(folder)) == FILES


# --- the view --------------------------------------------------------------------------------------------------------


def test_the_view_fits_80_columns_and_has_no_colors_in_a_pipe(report):
    view = shown(report)
    assert "\x1b" not in view
    assert max(map(len, view.splitlines())) <= 80
    assert not any(line != line.rstrip() for line in view.splitlines())
    for words in ("exact to rounding", "with the prompt", "layer 1", "the same, token by token"):
        assert words in view
    assert "\x1b" in shown(report, force_terminal=True)


def test_the_view_shows_whole_characters_in_80_columns():
    text = " Viele Grüße, 你好世界你好世界 " * 3 + "你\u200d"
    report = build_report(tiny_text_model(n_ctx=512), text, text + "好", model_name="北京", new_tokens=3, by=None)
    view = shown(report)
    assert "\N{REPLACEMENT CHARACTER}" not in view.split("4  Generated text")[0] and "你好" in view
    assert max(map(cell_len, view.splitlines())) <= 80
    for row in view.split("where it helps most\n")[1].split("\n\n")[0].splitlines()[1:]:
        assert re.fullmatch(r" +\d+ .* \d\.\d{3} +\d\.\d{3}", row), row


def test_the_heat_map_numbers_are_the_table(report):
    view, heads = shown(report), report.tables["bias_by_head"]
    unit = float(next(line for line in view.splitlines() if "mean over the text, in" in line).split()[-2])
    for layer in (0, 1):
        row = next(line for line in view.splitlines() if line.startswith(f"  layer {layer}"))
        numbers = [int(word) for word in row.split()[2:] if word.isdigit()]
        of_heads = heads.loc[heads["layer"] == layer, "ablation_kl"].tolist()
        of_layer = report.tables["bias_by_layer"].loc[layer, "ablation_kl"]
        assert numbers == [round(x / unit) for x in (*of_heads, of_layer)]


def test_many_heads_are_shown_in_blocks():
    model = tiny_text_model(gain=1, d_model=32, d_head=2, n_heads=16)
    report = build_report(model, "[bold]a[/bold] \x1b[31m", "b\tc", new_tokens=2, by=None)
    view = shown(report)
    assert max(map(len, view.splitlines())) <= 80
    assert sum(line.startswith("  layer 1 ") for line in view.splitlines()) == 2
    assert "\x1b" not in view


# --- the dual model ----------------------------------------------------------------------------------------------------


def test_with_dual_the_report_says_what_each_step_does(model, tmp_path):
    prompt, text = model.to_tokens(PROMPT)[0], model.to_tokens(TEXT, prepend_bos=False)[0]
    report = build_report(model, PROMPT, TEXT, new_tokens=1, dual=True, by=None)
    expected = dual_losses(model, torch.cat([prompt, text]), n_demonstrations=len(prompt))
    pd.testing.assert_frame_equal(report.tables["dual_losses"], expected)
    assert set(expected["position"]) == set(range(len(prompt), len(prompt) + len(text)))
    assert set(report.tables["dual_demonstrations"]["prompt_position"]) == set(range(len(prompt)))
    mean = expected.groupby(["layer", "head"])["log_loss_drop"].mean()
    coloring = report.linked.colorings["dual loss drop (log)"]
    assert coloring[1, 2].item() == pytest.approx(mean[1, 2])
    assert set(report.linked.without_zero) < set(report.linked.colorings)
    write_report(report, tmp_path / "r")
    assert ">Gradient descent</h2>" in (tmp_path / "r" / "report.html").read_text(encoding="utf-8")
    assert FILES | {"dual_losses.parquet", "dual_demonstrations.parquet"} == set(listing(tmp_path / "r"))


def test_dual_models_of_a_long_prompt_are_refused_before_anything_runs(model, monkeypatch):
    n_prompt = len(model.to_tokens(PROMPT)[0])
    monkeypatch.setattr("kvlens.report.build.MOST_PAIRS", model.cfg.n_heads * n_prompt**2 - 1)
    monkeypatch.setattr("kvlens.report.build.convert_prompt", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(
        KVLensError, match=rf"compare every two of the prompt's tokens, {n_prompt} here.* room for {n_prompt - 1}\."
    ):
        build_report(model, PROMPT, TEXT, dual=True)

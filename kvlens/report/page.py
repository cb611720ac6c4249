"""A report on disk: a page to open, one Parquet file a table, the bias, and ``summary.json`` with every headline figure.

The page, ``report.html``, is a single file to open in a browser that works offline. An explanation alone
(``kvlens explain --out``) is its page, its tables, and ``summary.json``.
"""

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from kvlens.checks import checked
from kvlens.explanation import Explained, explanation_view
from kvlens.files import plain, write_folder
from kvlens.files.parquet import table_bytes
from kvlens.model import KVModel
from kvlens.report.build import ABLATION, HEAD_MEASURES, MOST_EXPLAINED, Report, ranked_heads, ranking
from kvlens.report.example import EXPLANATION_FOLDER, FORMAT_OF_EXPLANATION, REPORT_FOLDER, REPORT_SUMMARY
from kvlens.report.summary import (
    SHOWN_CONDITIONS,
    answer_figures,
    continuation_in_a_sentence,
    heads_in_words,
    model_facts,
    name_of_text,
    versions,
)
from kvlens.viz import (
    Page,
    Piece,
    attention_view,
    colored_tokens,
    contribution_bars,
    depth_map,
    dual_view,
    error_table,
    generated_text,
    head_heatmap,
    induction_arcs,
    linked_view,
)
from kvlens.viz._text import label, number, percent

BIAS = "bias.safetensors"
PAGE, EXPLANATION_PAGE = "report.html", "explanation.html"
TOP_HEADS = 12
"""Number of heads in the circuitsvis view."""
TOP_PLACES = 5
CONVERTED = "The prompt's conversion into a KV bias (numbers in each attention head that take the prompt's place) is"
WITHOUT_A_HEAD = "Without a head: it reads nothing of the prompt but BOS; effects of several heads do not add up. "
ABOUT_HEADS = (
    f"{ABLATION}: KL divergence of the predictions on the text. {WITHOUT_A_HEAD}Choose a head in the map to see its attention "
    "pattern and its prompt tokens."
)
LONGEST_NAME = 120
OF_LAYER = "KL without the layer's heads, nats"
LOSSES = ("converted", "without_prompt")
TITLES = {"with_prompt": "with the prompt", "converted": "converted", "without_prompt": "without the prompt"}


def build_page(report: Report) -> Page:
    """The report's page: the answer and what led to it, heads, generated text, the prompt's effect, patterns, exactness."""
    summary, tables = report.summary, report.tables
    page = Page(f"kvlens report: {_short(summary['model']['name'])}", _subtitle(summary))
    exact = _exactness(summary["conversion"], summary["text"]["n_tokens"])
    notes = [exact, *(f"Note: {note}" for note in summary["notes"])]
    page.section("The answer")
    if report.explained is not None:
        page.add(explanation_view(report.explained))
    else:
        page.note(continuation_in_a_sentence(summary["continuation"])).note(_not_explained(summary))
    for note in notes:
        page.note(note)
    page.section(
        "Generated text", f"{summary['generation']['method'].capitalize()}; differences from the first text are marked."
    )
    page.add(_generated(summary))
    ranked, by = ranked_heads(report), ranking(report)
    order = "" if by == ABLATION else "Ordered by their effect on the answer; the effect on the text may differ. "
    page.section("Heads", order + ABOUT_HEADS)
    page.add(_head_table(ranked, by))
    page.add(head_heatmap(ranked, by, details=report.heads, title="map of heads"))
    layers = tables["bias_by_layer"].rename(columns={"ablation_kl": OF_LAYER})
    page.add(contribution_bars(layers, OF_LAYER, title="layers, all heads of one together"))
    page.section(
        "Prompt, heads, next token",
        "Choose a prompt token to see which heads read it, a head to see which prompt tokens it reads and where, or "
        "a text token to see everything it reads and the most probable next tokens. A large share does not imply a large "
        "effect: the menu can also color heads by their effect. Arrow keys move, Enter chooses, Escape clears.",
    )
    if report.linked is None:
        page.add(_not_shown(report, "linked_shares"))
    else:
        page.add(linked_view(report.linked, title="shares of the prompt in the attention output"))
    page.section(
        "Effect on the text",
        "Means over the text, then the positions where the prompt lowers the loss most and raises it most.",
    )
    page.add(_effect(summary["prompt_effect"])).add(_places(tables["prompt_effect"])).add(_gain(tables["prompt_effect"]))
    page.section("Layer by layer", "After which layer the prompt helps or hurts (logit lens).")
    page.add(depth_map(tables["prompt_by_depth"], title="loss without the prompt minus loss with it"))
    page.section(
        "Direct logit attribution",
        "Direct contribution of each component to the logit of the next token minus the mean logit of the vocabulary, averaged "
        "over the text, with the bias attached. Effects through later layers are part of those layers' bars, so a head with a "
        "large effect may contribute little here. attention_input is what the heads read from the text, attention_bias what "
        "they read from the converted prompt. All bars add up to the mean of that logit.",
    )
    if "layer_contributions" in tables:
        page.add(_contributions(tables["layer_contributions"]))
    else:
        page.add(_not_shown(report, "layer_contributions"))
    if "dual_losses" in tables:
        _add_dual(page, report)
    page.section(
        "Prefix matching",
        "Where the text repeats a token of the prompt, and which heads attend to the token that followed it there.",
    )
    page.add(_arcs(report) if "prompt_copies" in tables else _not_shown(report, "prompt_copies"))
    page.section("Share of the bias", "In each text token's attention output, mean over all layers and heads.")
    page.add(_bias_share(report))
    page.section("Attention patterns", f"The first {TOP_HEADS} heads of the table above, drawn by circuitsvis.")
    page.add(_not_shown(report, "head_details") if report.heads is None else _attention(report, ranked))
    page.section(
        "Exactness",
        "How exact the conversion is: the converted model without the prompt, compared with the original with the prompt.",
    )
    page.add(_conversion(summary))
    versions = ", ".join(f"{name} {number}" for name, number in summary["versions"].items())
    return page.footer(f"Made {summary['created']} with {versions}. The numbers are in the Parquet files next to this page.")


def _not_explained(summary: dict[str, Any]) -> str:
    n_tokens = summary["prompt"]["n_tokens"]
    if n_tokens > MOST_EXPLAINED:
        return (
            f"Which part of the prompt led to the answer was not computed: the prompt has {n_tokens:,} tokens, more than "
            f"{MOST_EXPLAINED:,}. kvlens explain computes it."
        )
    return "Which part of the prompt led to the answer was not computed for this report; kvlens explain computes it."


def _head_table(ranked: pd.DataFrame, by: str) -> Piece:
    share = HEAD_MEASURES["bias_share"]
    shown = pd.DataFrame(
        {
            "head": [f"L{row.layer}H{row.head}" for row in ranked[["layer", "head"]].itertuples()],
            **{measure: [_small(x) for x in ranked[measure]] for measure in dict.fromkeys((by, ABLATION))},
            share: [percent(x).replace(" ", "\u00a0") for x in ranked[share]],
        }
    )
    return error_table(shown, title=f"heads, the largest first: {by}", max_rows=TOP_HEADS)


def _small(value: float) -> str:
    """A number of nats, to three decimals; "≈ 0" is not exactly 0."""
    if value == value and 0 < abs(value) < 5e-4:
        return "≈ 0"
    return f"{value:.3f}".replace("-", "−") if value == value else "–"


def _add_dual(page: Page, report: Report) -> None:
    """Each head as a gradient step on the prompt's tokens, and the contribution of each token."""
    page.section(
        "Gradient descent",
        "Every head's output equals that of a linear model W φ(k) after one step of gradient descent on the prompt's tokens as "
        "training data (the dual model). log_loss_drop: natural logarithm of the decrease in loss, which spans many orders "
        "of magnitude. step_share: share of the head's output that comes from the step. demonstration_weight: the head's "
        "attention to the prompt. cosine_before, cosine_after: mean cosine of W φ(k) and v over the prompt's tokens. The "
        "map shows means over the text; choose a head to see the contribution of each prompt token at the last text token.",
    )
    assert report.linked is not None
    last = report.linked.text[-1]
    page.add(dual_view(report.tables["dual_losses"], report.tables["dual_demonstrations"], query=last))


def _not_shown(report: Report, name: str) -> Piece:
    """Say in the place of a figure why it is missing."""
    table = pd.DataFrame([[name, report.missing[name]]], columns=["analysis", "why it is not shown for this model"])
    return error_table(table, title="not shown")


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _subtitle(summary: dict[str, Any]) -> str:
    model, name = summary["model"], name_of_text(summary)
    return (
        f"{model['n_layers']} layers of {heads_in_words(model)} heads, {model['n_parameters']:,} parameters, {model['dtype']}. "
        f"A prompt of {summary['prompt']['n_tokens']:,} tokens became a KV bias, {summary['bias']['n_numbers']:,} numbers that "
        f"the attention heads read in its place, and is evaluated on {'a' if name == 'text' else 'the'} {name} of "
        f"{summary['text']['n_tokens']:,} tokens."
    )


def _conversion(summary: dict[str, Any]) -> Piece:
    figures, n_text = summary["conversion"], summary["text"]["n_tokens"]
    verdict = "exact to rounding" if figures["exact_to_rounding"] else "NOT EXACT"
    if figures["approximation"] is not None:
        verdict = f"approximate: {figures['approximation']}"
    held_out = figures["held_out"]
    rows = (
        []
        if held_out is None
        else [
            ("error of the logits, held out", percent(held_out["logits_error"], least=0.0), "on continuations of the prompt"),
            ("share of the prompt's effect that is missing", percent(held_out["lost_share"], least=0.0), "on the same"),
        ]
    )
    recall = figures["recall"]
    if recall is not None and recall["n_words"]:
        rows.append(("words of the prompt that are still known", percent(recall["share"], least=0.0), recall["in_words"]))
    rows += [
        ("relative error of the logits", number(figures["relative_error"]), verdict),
        (
            "rounding error of the original, against float64",
            number(figures["rounding_error"]),
            "up to 4 times this counts as exact",
        ),
        ("largest difference of any logit", number(figures["max_abs_error"]), ""),
        ("same predicted next token", f"{round(figures['argmax_agreement'] * n_text)} of {n_text}", "positions of the text"),
    ]
    return error_table(pd.DataFrame(rows, columns=["measure", "value", "verdict"]), title="conversion error")


def _effect(figures: dict[str, Any]) -> Piece:
    names = {
        "kl_from_with_prompt": "KL(with the prompt || this), nats",
        "next_token_agreement": "same predicted next token, fraction",
        "loss_nats_per_token": "loss, nats per token",
    }
    rows = [[title, *(figures[condition][key] for condition in SHOWN_CONDITIONS)] for key, title in names.items()]
    return error_table(pd.DataFrame(rows, columns=["mean over the text", *TITLES.values()]), title="three conditions")


def _gain(effect: pd.DataFrame) -> Piece:
    """The text, with each token colored by how much the converted prompt lowers the loss on it; the first has no loss."""
    losses = {name: rows["loss"].to_numpy() for name, rows in effect.groupby("condition")}
    gain = [math.nan, *(losses["without_prompt"] - losses["converted"])[:-1]]
    tokens = effect.loc[effect["condition"] == "converted", "token"]
    return colored_tokens(tokens, gain, title="decrease in loss from the converted prompt, per token", unit="nats")


def _places(effect: pd.DataFrame) -> Piece:
    """The positions where the prompt lowers the loss most, and those where it raises it most."""
    wide = effect.set_index(["position", "condition"])["loss"].unstack()  # noqa: PD010, one row for each
    rows = effect[effect["condition"] == "converted"].set_index("position")
    gain = (wide["without_prompt"] - wide["converted"]).dropna()
    helped, hurt = gain[gain > 0].nlargest(TOP_PLACES), gain[gain < 0].nsmallest(TOP_PLACES)
    found = [("helps", helped), ("hurts", hurt)]
    table = [
        (effect_, place, *(label(rows.loc[place, name]) for name in ("token", "next_token")), *wide.loc[place, list(LOSSES)])
        for effect_, places in found
        for place in places.index
    ]
    columns = ["the prompt", "position", "after", "next token", *(f"loss {TITLES[name]}" for name in LOSSES)]
    return error_table(pd.DataFrame(table, columns=columns), title="where it helps most, and where it hurts most")


def _contributions(table: pd.DataFrame) -> Piece:
    means = table.groupby(["layer", "component"], sort=False)["logit"].mean().reset_index()
    outside = ~means["layer"].between(0, means["layer"].max() - 1)
    means["part"] = means["component"].where(outside, "layer " + means["layer"].astype(str) + ", " + means["component"])
    total = number(float(means["logit"].sum()))
    return contribution_bars(
        means, "logit", by="part", title=f"direct contributions; they add up to the mean centered logit, {total}"
    )


def _arcs(report: Report) -> Piece:
    copies, linked = report.tables["prompt_copies"], report.linked
    assert linked is not None
    everyone = pd.MultiIndex.from_frame(report.tables["bias_by_head"][["layer", "head"]])
    scores = (
        copies.groupby(["layer", "head"])["attention"].mean().reindex(everyone, fill_value=0.0).rename("score").reset_index()
    )
    tokens = [*linked.prompt, *linked.text]
    return induction_arcs(
        tokens, len(linked.prompt), copies, scores, title="arcs; the strip shows each head's mean attention along them"
    )


def _bias_share(report: Report) -> Piece:
    converted = report.tables["prompt_effect"].query("condition == 'converted'")
    unit = "||z_bias|| / (||z_bias|| + ||z_context||)"
    return colored_tokens(converted["token"], report.bias_share, title="share of the bias", unit=unit)


def _attention(report: Report, ranked: pd.DataFrame) -> Piece:
    heads, details = ranked.head(TOP_HEADS)[["layer", "head"]], report.heads
    assert details is not None
    assert details.among is not None
    assert details.strongest is not None
    everything, n_prompt, kept = [*details.prompt, *details.text], len(details.prompt), details.strongest.tolist()
    return attention_view(
        [everything[place] for place in kept],
        details.among[heads["layer"].tolist(), heads["head"].tolist()],
        n_prompt=sum(place < n_prompt for place in kept),
        head_names=[f"L{row.layer} H{row.head}" for row in heads.itertuples()],
        positions=[place if place < n_prompt else place - n_prompt for place in kept],
        n_left_out=len(everything) - len(kept),
        title="the original model's attention over prompt and text",
    )


def _generated(summary: dict[str, Any]) -> Piece:
    texts = {TITLES[condition]: summary["generation"][condition] for condition in SHOWN_CONDITIONS}
    return generated_text(texts, start=summary["generation"]["begun"].split("\n")[-1], title="three conditions")


def _exactness(figures: dict[str, Any], n_text: int) -> str:
    """One line on how exact the conversion is, from the summary's ``conversion``."""
    agreeing = f"the same most probable next token at {round(figures['argmax_agreement'] * n_text)} of {n_text} positions"
    error = f"relative error of the logits {number(figures['relative_error'])}"
    if figures["approximation"] is not None:
        return f"{CONVERTED} approximate ({figures['approximation']}): {error}; {agreeing}."
    if figures["exact_to_rounding"]:
        return f"{CONVERTED} exact to rounding: {error}; {agreeing}."
    return f"{CONVERTED} NOT EXACT: {error}, rounding alone gives {number(figures['rounding_error'])}; {agreeing}."


# --- the folder ---


@checked
def write_report(report: Report, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write ``report`` to ``folder``, whole or not at all; return the folder's absolute path.

    Args:
        report: from :func:`kvlens.report.build_report`.
        folder: its path; parents are made.
        overwrite: replace a report that stands there; anything else is never replaced.

    Raises:
        KVLensError: the place is taken or not writable.
    """

    def fill(temporary: Path) -> None:
        for name, table in report.tables.items():
            (temporary / f"{name}.parquet").write_bytes(table_bytes(table))
        report.bias.save(temporary / BIAS)
        build_page(report).save_html(temporary / PAGE)
        bias = {**report.summary["bias"], "file_bytes": (temporary / BIAS).stat().st_size}
        summary = {**report.summary, "bias": bias, "files": report_files(report)}
        _write_summary(summary, temporary)

    return write_folder(folder, fill, REPORT_FOLDER, overwrite=overwrite)


def report_files(report: Report) -> list[str]:
    """The files of the report, relative to its folder. Whatever is written must stand here, or it blocks overwriting."""
    return [REPORT_SUMMARY, *(f"{name}.parquet" for name in report.tables), BIAS, PAGE]


@checked
def write_explanation(
    found: Explained,
    folder: str | Path,
    *,
    model: KVModel,
    model_name: str,
    overwrite: bool = False,
) -> list[str]:
    """Write an explanation's page and tables to ``folder``, whole or not at all; return the names of the files.

    Args:
        found: from :func:`kvlens.explain`.
        folder: its path; parents are made.
        model, model_name: who answered, for ``summary.json``.
        overwrite: replace an explanation that stands there; anything else is never replaced.

    Raises:
        KVLensError: the place is taken or not writable.
    """
    tables = {f"{name}.parquet": table for name, table in found.tables().items()}
    summary = {
        "format": FORMAT_OF_EXPLANATION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "model": model_facts(model, model_name),
        "answer": answer_figures(found),
        "files": (names := [REPORT_SUMMARY, *tables, EXPLANATION_PAGE]),
    }

    def fill(temporary: Path) -> None:
        for name, table in tables.items():
            (temporary / name).write_bytes(table_bytes(table))
        explanation_view(found).save_html(temporary / EXPLANATION_PAGE)
        _write_summary(summary, temporary)

    write_folder(folder, fill, EXPLANATION_FOLDER, overwrite=overwrite)
    return names


def _write_summary(summary: Mapping[str, Any], folder: Path) -> None:
    text = json.dumps(plain(summary), indent=2, ensure_ascii=False, allow_nan=False)
    (folder / REPORT_SUMMARY).write_text(text + "\n", encoding="utf-8")

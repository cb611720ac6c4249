"""A report as a page to open in a browser: ``report.html``, one file that works without a network."""

import math
from typing import Any

import pandas as pd

from kvlens.report.build import CONDITIONS, Report
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

TOP_HEADS = 12
"""Heads in the circuitsvis view, a row of it."""
TOP_PLACES = 5
LONGEST_NAME = 120
LOSSES = ("converted", "without_prompt")
TITLES = {"with_prompt": "with prompt", "converted": "converted", "without_prompt": "without prompt"}


def build_page(report: Report) -> Page:
    """The report's page: conversion, effect of the prompt, heads, patterns, generated text."""
    summary, tables = report.summary, report.tables
    page = Page(f"kvlens report: {_short(summary['model']['name'])}", _subtitle(summary))
    page.section("What the conversion keeps", "The converted model without the prompt, against the original model with it.")
    page.add(_conversion(summary))
    page.section(
        "Prompt, heads, next token",
        "Choose a prompt token to see which heads hold it, a head to see what it reads and which text it serves, or a token of "
        "the text to see all that it reads and what the model expects next. A large share need not matter much: the menu also "
        "colors the heads by what their removal costs (ablation_kl). Arrow keys move, Enter chooses, Escape clears.",
    )
    page.add(linked_view(report.linked, title="shares of the prompt in the attention output"))
    page.section("What the prompt changes", "Means over the text; then where it saves loss, and where it costs some.")
    page.add(_effect(summary["prompt_effect"])).add(_places(tables["prompt_effect"])).add(_gain(tables["prompt_effect"]))
    page.section("Layer by layer", "At which depth the prompt's help, or harm, is there.")
    page.add(depth_map(tables["prompt_by_depth"], title="loss without the prompt, less loss with it"))
    page.section(
        "Which heads carry it",
        "The total effect of a head, by way of all later layers. ablation_kl: what the predictions lose, in nats, when that "
        "head knows nothing of the prompt but BOS (zero_kl: not even BOS); effects do not add up. bias_share: how much of the "
        "head's output the bias makes up. Choose a "
        "head to see its pattern and its prompt tokens.",
    )
    page.add(
        head_heatmap(tables["bias_by_head"], "ablation_kl", details=report.heads, title="heads by what their removal costs")
    )
    page.add(contribution_bars(tables["bias_by_layer"], "ablation_kl", title="layers: all heads of a layer removed"))
    page.section(
        "What each part writes directly",
        "Direct contribution to the logit of the token that follows, less the mean logit of the vocabulary, mean over the "
        "text, with the bias attached: what a part writes itself. What it does by way of later layers is in their bars, so "
        "that a head that matters much above may write little here. attention_input is what the heads read from the text, "
        "attention_bias what they read from the converted prompt. All bars add up to the mean of that logit.",
    )
    page.add(_contributions(tables["layer_contributions"]))
    if "dual_losses" in tables:
        _add_dual(page, report)
    page.section("Induction", "Where the text meets a token of the prompt again, and who looks at what followed it then.")
    page.add(_arcs(report))
    page.section("How much of each token's attention output is the bias", "Mean over all layers and heads.")
    page.add(_bias_share(report))
    page.section("Attention patterns", "The heads that carry most, in circuitsvis; hover to enlarge, click to keep.")
    page.add(_attention(report))
    page.section("Generated text", f"{summary['generation']['method'].capitalize()}; what differs from the first is marked.")
    page.add(_generated(summary))
    versions = ", ".join(f"{name} {number}" for name, number in summary["versions"].items())
    return page.footer(f"Made {summary['created']} with {versions}. The numbers stand in the Parquet files beside this page.")


def _add_dual(page: Page, report: Report) -> None:
    """Each head as a step of learning from the prompt's tokens, and what each of them gives to it."""
    page.section(
        "Heads as a step of learning",
        "Every head's output is what a model W φ(k) gives after one gradient step on the prompt's tokens as its training set "
        "(the dual model). log_loss_drop: how far the step lowers the loss, as a natural logarithm, for it spans many orders "
        "of magnitude. step_share: the part of the head's output that the step makes. demonstration_weight: the head's "
        "attention to the prompt. cosine_before, cosine_after: how well W φ(k) points along v, over the prompt's tokens. The "
        "map holds means over the text; choose a head to see what each prompt token gives to its step at the last text token.",
    )
    last = report.linked.text[-1]
    page.add(dual_view(report.tables["dual_losses"], report.tables["dual_demonstrations"], query=last))


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _subtitle(summary: dict[str, Any]) -> str:
    model = summary["model"]
    notes = "".join(f" Note: {note}" for note in summary["notes"])
    return (
        f"{model['n_layers']} layers of {model['n_heads']} heads, {model['n_parameters']:,} parameters, {model['dtype']}. "
        f"A prompt of {summary['prompt']['n_tokens']:,} tokens became a bias of {summary['bias']['n_numbers']:,} numbers; "
        f"it is judged on a text of {summary['text']['n_tokens']:,} tokens.{notes}"
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
            ("share of the prompt's effect lost", percent(held_out["lost_share"], least=0.0), "likewise"),
        ]
    )
    rows += [
        ("relative error of the logits", number(figures["relative_error"]), verdict),
        ("that of the original, against float64", number(figures["rounding_error"]), "up to 4 times that is exact"),
        ("largest difference of a logit", number(figures["max_abs_error"]), ""),
        ("same predicted next token", f"{round(figures['argmax_agreement'] * n_text)} of {n_text}", "positions of the text"),
    ]
    return error_table(pd.DataFrame(rows, columns=["measure", "value", "verdict"]), title="conversion error")


def _effect(figures: dict[str, Any]) -> Piece:
    names = {
        "kl_from_with_prompt": "KL from with prompt, nats",
        "next_token_agreement": "same predicted next token, fraction",
        "loss_nats_per_token": "loss, nats per token",
    }
    rows = [[title, *(figures[condition][key] for condition in CONDITIONS)] for key, title in names.items()]
    return error_table(pd.DataFrame(rows, columns=["mean over the text", *TITLES.values()]), title="three conditions")


def _gain(effect: pd.DataFrame) -> Piece:
    """The text, each token colored by the loss on it that the converted prompt saves; the first has none."""
    losses = {name: rows["loss"].to_numpy() for name, rows in effect.groupby("condition")}
    gain = [math.nan, *(losses["without_prompt"] - losses["converted"])[:-1]]
    tokens = effect.loc[effect["condition"] == "converted", "token"]
    return colored_tokens(tokens, gain, title="loss that the converted prompt saves on each token", unit="nats")


def _places(effect: pd.DataFrame) -> Piece:
    """The positions where the prompt saves most, and those where it costs most."""
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
    columns = ["the prompt", "position", "after", "comes", *(f"loss {TITLES[name]}" for name in LOSSES)]
    return error_table(pd.DataFrame(table, columns=columns), title="where it helps most, and where it hurts most")


def _contributions(table: pd.DataFrame) -> Piece:
    means = table.groupby(["layer", "component"], sort=False)["logit"].mean().reset_index()
    outside = ~means["layer"].between(0, means["layer"].max() - 1)
    means["part"] = means["component"].where(outside, "layer " + means["layer"].astype(str) + ", " + means["component"])
    total = number(float(means["logit"].sum()))
    return contribution_bars(
        means, "logit", by="part", title=f"direct contributions; their sum, the mean centered logit, is {total}"
    )


def _arcs(report: Report) -> Piece:
    copies, linked = report.tables["prompt_copies"], report.linked
    n_layers, n_heads = linked.by_text.shape[:2]
    everyone = pd.MultiIndex.from_product([range(n_layers), range(n_heads)], names=["layer", "head"])
    scores = (
        copies.groupby(["layer", "head"])["attention"].mean().reindex(everyone, fill_value=0.0).rename("score").reset_index()
    )
    tokens = [*linked.prompt, *linked.text]
    return induction_arcs(
        tokens, len(linked.prompt), copies, scores, title="arcs; the strip shows each head's mean share of them"
    )


def _bias_share(report: Report) -> Piece:
    shares, unit = report.heads.bias_shares, "||z_bias|| / (||z_bias|| + ||z_context||)"
    assert shares is not None
    return colored_tokens(report.heads.text, shares.mean(dim=(0, 1)), title="share of the bias", unit=unit)


def _attention(report: Report) -> Piece:
    heads, details = report.tables["bias_by_head"].nlargest(TOP_HEADS, "ablation_kl"), report.heads
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
    texts = {TITLES[condition]: summary["generation"][condition] for condition in CONDITIONS}
    return generated_text(texts, start=summary["text"]["text"].split("\n")[-1], title="three conditions")

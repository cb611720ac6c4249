"""A report as a page to open in a browser: ``report.html``, one file that works without a network."""

import math
from typing import Any

import pandas as pd

from kvlens.report.build import CONDITIONS, Report
from kvlens.viz import (
    Page,
    Piece,
    attention_view,
    coloured_tokens,
    contribution_bars,
    error_table,
    generated_text,
    head_heatmap,
)

TOP_HEADS = 12
"""Heads in the circuitsvis view, a row of it."""
TITLES = {"with_prompt": "with prompt", "converted": "converted", "without_prompt": "without prompt"}


def build_page(report: Report) -> Page:
    """The report's page: conversion, effect of the prompt, heads, patterns, generated text."""
    summary, tables = report.summary, report.tables
    page = Page(f"kvlens report: {summary['model']['name']}", _subtitle(summary))
    page.section("What the conversion keeps", "The converted model without the prompt, against the original model with it.")
    page.add(_conversion(summary))
    page.section("What the prompt changes", "Means over the text, and the text itself: where the prompt saves loss.")
    page.add(_effect(summary["prompt_effect"])).add(_gain(tables["prompt_effect"]))
    page.section(
        "Which heads carry it",
        "ablation_kl: what the predictions lose, in nats, when that head's bias is removed; effects do not add up. "
        "bias_share: how much of the head's output the bias makes up. Click a head to see its pattern and its prompt tokens.",
    )
    page.add(head_heatmap(tables["bias_by_head"], "ablation_kl", details=report.heads, title="heads"))
    page.add(contribution_bars(tables["bias_by_layer"], "ablation_kl", title="layers: all heads of a layer removed"))
    page.section(
        "What each layer writes",
        "Direct contribution to the logit of the token that follows, mean over the text, with the bias attached. "
        "attention_input is what the heads read from the text, attention_bias what they read from the converted prompt.",
    )
    page.add(_contributions(tables["layer_contributions"]))
    page.section("How much of each token's attention output is the bias", "Mean over all layers and heads.")
    page.add(_bias_share(report))
    page.section("Attention patterns", "The heads that carry most, in circuitsvis; hover to enlarge, click to keep.")
    page.add(_attention(report))
    page.section("Generated text", f"{summary['generation']['method'].capitalize()}; what differs from the first is marked.")
    page.add(_generated(summary))
    versions = ", ".join(f"{name} {number}" for name, number in summary["versions"].items())
    return page.footer(f"Made {summary['created']} with {versions}. The numbers stand in the Parquet files beside this page.")


def _subtitle(summary: dict[str, Any]) -> str:
    model = summary["model"]
    return (
        f"{model['n_layers']} layers of {model['n_heads']} heads, {model['n_parameters']:,} parameters, {model['dtype']}. "
        f"A prompt of {summary['prompt']['n_tokens']:,} tokens became a bias of {summary['bias']['n_numbers']:,} numbers; "
        f"it is judged on a text of {summary['text']['n_tokens']:,} tokens."
    )


def _conversion(summary: dict[str, Any]) -> Piece:
    figures, n_text = summary["conversion"], summary["text"]["n_tokens"]
    verdict = {True: "exact to rounding", False: "NOT EXACT", None: "this dtype cannot tell"}[figures["exact_to_rounding"]]
    rows = [
        ("relative error of the logits", f"{figures['relative_error']:.1e}", verdict),
        ("what rounding alone can reach", f"{figures['rounding_bound']:.1e}", ""),
        ("largest difference of a logit", f"{figures['max_abs_error']:.1e}", ""),
        ("same predicted next token", f"{round(figures['argmax_agreement'] * n_text)} of {n_text}", "places of the text"),
    ]
    return error_table(pd.DataFrame(rows, columns=["measure", "value", "verdict"]), title="conversion error")


def _effect(figures: dict[str, Any]) -> Piece:
    names = {
        "kl_from_with_prompt": "KL from with prompt, nats",
        "next_token_agreement": "same predicted next token, fraction",
        "loss_nats_a_token": "loss, nats a token",
    }
    rows = [[title, *(figures[condition][key] for condition in CONDITIONS)] for key, title in names.items()]
    return error_table(pd.DataFrame(rows, columns=["mean over the text", *TITLES.values()]), title="three conditions")


def _gain(effect: pd.DataFrame) -> Piece:
    """The text, each token coloured by the loss on it that the converted prompt saves; the first has none."""
    losses = {name: rows["loss"].to_numpy() for name, rows in effect.groupby("condition")}
    gain = [math.nan, *(losses["without_prompt"] - losses["converted"])[:-1]]
    tokens = effect.loc[effect["condition"] == "converted", "token"]
    return coloured_tokens(tokens, gain, title="loss that the converted prompt saves on each token", unit="nats")


def _contributions(table: pd.DataFrame) -> Piece:
    means = table.groupby(["layer", "component"], sort=False)["logit"].mean().reset_index()
    in_layers = means[means["layer"].between(0, means["layer"].max() - 1)]
    return contribution_bars(in_layers, "logit", part="component", title="contributions by layer")


def _bias_share(report: Report) -> Piece:
    shares, unit = report.heads.bias_shares, "||z_bias|| / (||z_bias|| + ||z_context||)"
    assert shares is not None
    return coloured_tokens(report.heads.text, shares.mean(dim=(0, 1)), title="share of the bias", unit=unit)


def _attention(report: Report) -> Piece:
    heads, details = report.tables["bias_by_head"].nlargest(TOP_HEADS, "ablation_kl"), report.heads
    return attention_view(
        [*details.prompt, *details.text],
        details.pattern[heads["layer"].tolist(), heads["head"].tolist()],
        queries=details.queries,
        n_prompt=len(details.prompt),
        head_names=[f"L{row.layer} H{row.head}" for row in heads.itertuples()],
        title="the original model's attention over prompt and text",
    )


def _generated(summary: dict[str, Any]) -> Piece:
    texts = {TITLES[condition]: summary["generation"][condition] for condition in CONDITIONS}
    return generated_text(texts, start=summary["text"]["text"].split("\n")[-1], title="three conditions")

"""Reports and explanations in the terminal: 80 columns wide, with colors in a terminal and without them in a pipe."""

import math
import textwrap
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvlens.checks import checked
from kvlens.explanation import Explained, paragraphs
from kvlens.explanation.exchanges import POSITION_GROUPS
from kvlens.explanation.presentation import MEANINGS, answered, kept_in_words
from kvlens.report.build import ABLATION, HEAD_MEASURES, Report, ranked_heads, ranking
from kvlens.report.summary import SHOWN_CONDITIONS, continuation_in_a_sentence, heads_in_words, name_of_text
from kvlens.terminal import WIDTH, make_console, visible
from kvlens.texts import NEWLINE, joined
from kvlens.viz._text import percent

SHADES = " ░▒▓█"
CELL = 6
TOP = 5
MOST_ROWS, BAR = 12, 10
"""The most units in an explanation's table, and the characters of the longest bar."""
LONGEST_SHOWN = 320
"""Characters of the prompt and of the text that are shown at the top of the report (four lines)."""
_TITLES = {"with_prompt": "with the prompt", "converted": "converted", "without_prompt": "without the prompt"}


@checked
def print_report(report: Report, console: Console | None = None) -> None:
    """Print ``report``, by default to stdout; ``console`` changes where and in which colors."""
    console = console or make_console()
    if console.is_terminal:
        _show(console, report)
        return
    with console.capture() as captured:
        _show(console, report)
    lines = (line.rstrip() for line in captured.get().splitlines())  # rich pads lines with spaces
    console.file.write("\n".join(lines) + "\n")


def _show(console: Console, report: Report) -> None:
    summary = report.summary
    _print_head(console, summary)
    answer = summary["answer"]
    said = continuation_in_a_sentence(summary["continuation"]) if answer is None else answer["explanation"]
    for paragraph in said.split("\n\n"):
        console.print()
        console.print(Text(_printable(paragraph), style="bold"))
    for note in summary["notes"]:
        console.print()
        console.print(Text(f"Note: {_printable(note)}", style="yellow"))
    _heading(console, "1  The converted model without the prompt, compared with the original with it")
    console.print(_conversion(summary))
    _heading(console, "2  What the prompt changes, and whether its conversion changes the same")
    console.print(_effect(summary["prompt_effect"]))
    _print_places(console, report)
    _heading(console, "3  Which layers and heads matter")
    _print_heads(console, report)
    _heading(console, f"4  Generated text, {summary['generation']['method']} ({NEWLINE} is a new line)")
    _print_generated(console, summary)


# --- parts -----------------------------------------------------------------------------------------------------------


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _print_head(console: Console, summary: dict[str, Any]) -> None:
    model, bias = summary["model"], summary["bias"]
    console.print(Text(f"kvlens report: {visible(model['name'])}", style="bold"))
    console.print(
        f"{model['n_layers']} layers of {heads_in_words(model)} heads, {model['n_parameters']:,} parameters, "
        f"{model['dtype']} on {model['device']}"
    )
    console.print(
        f"prompt of {summary['prompt']['n_tokens']} tokens -> bias of {bias['n_numbers']:,} numbers ({bias['holds']}); "
        f"{name_of_text(summary)} of {summary['text']['n_tokens']}"
    )
    for what in ("prompt", "text"):
        whole = summary[what]["text"]
        shown = whole if len(whole) <= LONGEST_SHOWN else whole[: LONGEST_SHOWN - 1] + "…"
        name = "prompt" if what == "prompt" else name_of_text(summary)
        console.print(Padding(Text.assemble((f"{name}: ", "cyan"), _printable(shown)), (0, 0, 0, 2)))


def _conversion(summary: dict[str, Any]) -> Padding:
    figures, n_text = summary["conversion"], summary["text"]["n_tokens"]
    verdict = Text("exact to rounding", "green") if figures["exact_to_rounding"] else Text("NOT EXACT", "bold red")
    if figures["approximation"] is not None:
        verdict = Text(f"approximate: {figures['approximation']}", "yellow")
    table = _table()
    if figures["held_out"] is not None:
        held_out = figures["held_out"]
        table.add_row(
            "error of the logits, held out", percent(held_out["logits_error"], least=0.0), "on continuations of the prompt"
        )
        table.add_row("share of the prompt's effect that is missing", percent(held_out["lost_share"], least=0.0), "on the same")
    recall = figures["recall"]
    if recall is not None and recall["n_words"]:
        table.add_row("words of the prompt that are still known", percent(recall["share"], least=0.0), recall["in_words"])
    table.add_row("relative error of the logits", f"{figures['relative_error']:.1e}", verdict)
    table.add_row("rounding error of the original", f"{figures['rounding_error']:.1e}", "up to 4 times this is exact")
    table.add_row("largest difference of any logit", f"{figures['max_abs_error']:.1e}")
    agreeing = round(figures["argmax_agreement"] * n_text)
    table.add_row("same predicted next token", f"{agreeing} of {n_text}", "positions of the text")
    return Padding(table, (0, 0, 0, 2))


def _effect(figures: dict[str, Any]) -> Padding:
    table = _table(("mean over the text", *(_TITLES[c] for c in SHOWN_CONDITIONS)))
    rows = (
        ("KL(with the prompt || this), nats", "kl_from_with_prompt", _nats),
        ("same predicted next token", "next_token_agreement", percent),
        ("loss, nats per token", "loss_nats_per_token", _nats),
    )
    for title, key, shown in rows:
        table.add_row(title, *(shown(figures[c][key]) for c in SHOWN_CONDITIONS))
    return Padding(table, (0, 0, 0, 2))


def _print_places(console: Console, report: Report) -> None:
    """The positions where the prompt lowers the loss on the next token most."""
    wide = report.tables["prompt_effect"].pivot(index="position", columns="condition", values="loss")
    gain = (wide["without_prompt"] - wide["converted"]).dropna().nlargest(TOP)
    gain = gain[gain > 0]
    if gain.empty:
        return
    tokens = report.tables["conversion_error"]["token"].tolist()
    table = _table(("position", "after", "next token", "loss converted", "without the prompt"))
    table.columns[1].justify = table.columns[2].justify = "left"
    for position in gain.index:
        before = joined(tokens[max(0, position - 7) : position + 1])
        losses = (_nats(wide.loc[position, c]) for c in ("converted", "without_prompt"))
        table.add_row(str(position), _quoted(before, 24, keep="end"), _quoted(tokens[position + 1], 12), *losses)
    console.print()
    console.print("  where it helps most")
    console.print(Padding(table, (0, 0, 0, 2)))


def _print_heads(console: Console, report: Report) -> None:
    heads, layers, bias = report.tables["bias_by_head"], report.tables["bias_by_layer"], report.summary["bias"]
    unit = _unit(max(heads["ablation_kl"].max(), layers["ablation_kl"].max()))
    console.print(f"  KL(converted || head without the prompt), mean over the text, in {unit:g} nats")
    console.print(_heat_map(heads, layers, unit))
    console.print(
        f"  all heads without the prompt: KL {_nats(bias['kl_without_any_head'])}, "
        f"loss {_signed(bias['loss_change_without_any_head'])} nats per token (effects do not add up)"
    )
    ranked, by = ranked_heads(report), ranking(report)
    of_answer = [] if by == ABLATION else [by]
    table = _table(("head", *(["nats"] if of_answer else []), "KL without", "loss change", "share of output", "norm of b_KV"))
    for row in ranked.head(TOP).to_dict("records"):
        table.add_row(
            f"L{row['layer']}H{row['head']}",
            *(_signed(row[name]) for name in of_answer),
            _nats(row[ABLATION]),
            _signed(row[HEAD_MEASURES["loss_change"]]),
            percent(row[HEAD_MEASURES["bias_share"]]),
            f"{row[HEAD_MEASURES['b_kv_norm']]:.3g}",
        )
    console.print()
    if of_answer:
        console.print(Padding(f"those with the largest effect on the answer: {_printable(by)}", (0, 0, 0, 2)))
    console.print(Padding(table, (0, 0, 0, 2)))


def _heat_map(heads: Any, layers: Any, unit: float) -> Text:
    """Rows are layers, columns heads, with the whole layer at the right; wide maps are split into several blocks."""
    values = heads.pivot(index="layer", columns="head", values="ablation_kl")
    of_layer = layers.set_index("layer")["ablation_kl"]
    top = float(heads["ablation_kl"].max())
    a_block = (WIDTH - 10 - CELL) // CELL
    map_ = Text()
    for first in range(0, values.shape[1], a_block):
        block = values.iloc[:, first : first + a_block]
        is_last = first + a_block >= values.shape[1]
        map_.append("  head    " + "".join(f"{head:>{CELL - 1}} " for head in block.columns) + ("   all" * is_last) + "\n")
        for layer, row in block.iterrows():
            map_.append(f"  layer {layer:<2}")
            for value in row:
                if math.isnan(value):  # a layer with fewer heads
                    map_.append(" " * CELL)
                    continue
                map_.append(" " + _shade(value, top), style="cyan")
                map_.append(f"{value / unit:>{CELL - 2}.0f}")
            map_.append(f"{of_layer[layer] / unit:>{CELL + 1}.0f}" * is_last + "\n")
    map_.rstrip()
    return map_


def _print_generated(console: Console, summary: dict[str, Any]) -> None:
    generation = summary["generation"]
    start = summary["generation"]["begun"].split("\n")[-1]
    for condition in SHOWN_CONDITIONS:
        console.print(Text(f"  {_TITLES[condition]}", style="cyan"))
        shown = Text(_printable(start), style="dim")
        shown.append(_printable(generation[condition]), style="not dim")
        console.print(Padding(shown, (0, 0, 0, 4)))
    equal = generation["converted_equals_with_prompt"]
    console.print(
        Text(
            "  converted and with prompt are "
            + ("the same, token by token" if equal else "NOT the same: rounding broke a tie, or the conversion is inexact"),
            style="green" if equal else "bold red",
        )
    )


# --- figures and words -----------------------------------------------------------------------------------------------


def _table(header: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, show_header=bool(header), header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for i, title in enumerate(header):
        table.add_column(title, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _nats(value: float) -> str:
    if value != value:
        return "-"
    return f"{value:.3f}" if value == 0 or value >= 5e-4 else f"{value:.0e}"


def _signed(value: float) -> str:
    return "-" if value != value else f"{value:+.4f}"


def _unit(largest: float) -> float:
    """The power of ten in which ``largest`` has three digits."""
    return 10.0 ** (int(f"{largest:e}".split("e")[1]) - 2) if largest > 0 else 1.0


def _shade(value: float, top: float) -> str:
    return SHADES[0] if top <= 0 else SHADES[min(len(SHADES) - 1, int(value / top * len(SHADES)))]


def _quoted(text: str, width: int, keep: str = "start") -> str:
    """``text`` as Python writes it, cut to ``width`` columns of the terminal with an ellipsis; an ideograph takes two."""
    shown = repr(text)
    if cell_len(shown) <= width:
        return shown
    if keep == "end":
        return "…" + set_cell_size(shown[::-1], width - 1)[::-1]
    return set_cell_size(shown, width - 1) + "…"


def _printable(text: str) -> str:
    """``text`` on one line, with newlines and control characters replaced by visible signs."""
    return visible(text.replace("\n", NEWLINE).expandtabs(4))


# --- an explanation ---


def print_explanation(found: Explained) -> None:
    """Print it, 80 columns wide."""
    console = make_console()
    console.print(_wrapped(answered(found.response, found.cut_after, 2000)), style="bold", end="\n\n")
    console.print(_wrapped(kept_in_words(found)), end="\n\n")
    for paragraph in paragraphs(found):
        console.print(_wrapped(" ".join(sentence.text for sentence in paragraph)), end="\n\n")
    console.print(_lost_by_unit(found))
    n_alone = int(found.units["alone"].sum())
    if n_alone < len(found.units):
        console.print(f"(the other {len(found.units) - n_alone} parts only with their whole document or paragraph)")
    if n_alone > MOST_ROWS:
        console.print(f"(the {MOST_ROWS} largest of {n_alone})")
    singles = found.rows("layers", "each")
    if len(singles):
        console.print(f"\nnats that {visible(found.named)} loses, layer by layer", style="bold")
        console.print(_strip(singles["nats"].tolist()))
    positions = found.rows("positions", "each")
    if len(positions):
        console.print(f"\nnats that {visible(found.named)} loses when these are read without the cause", style="bold")
        for row in positions.itertuples():
            console.print(f"{POSITION_GROUPS[row.parts]:<42}{row.nats:6.2f}  {row.verdict}")
    if found.left_out:
        console.print(f"\nLeft out, as the budget had no room for it: {', '.join(found.left_out)}.")
    console.print("\nWhat the words mean", style="bold")
    for word, meaning in MEANINGS:
        console.print(_wrapped(f"{word}: {meaning}.", indent="  "))


def _wrapped(text: str, indent: str = "") -> str:
    """Lines of the terminal's width; a number and its percent sign stay together."""
    together = visible(text).replace(" %", "\N{NO-BREAK SPACE}%")
    return textwrap.fill(together, WIDTH, subsequent_indent=indent, break_on_hyphens=False).replace("\N{NO-BREAK SPACE}%", " %")


def _lost_by_unit(found: Explained) -> Any:
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = found.units[found.units["alone"]].nlargest(MOST_ROWS, "effect").sort_values("unit")
    room = WIDTH - BAR - 12 - max(map(len, shown["verdict"]), default=0)  # 12: the number, and a blank on each side of a column
    table.add_column(f"what {visible(found.named)} loses without", overflow="ellipsis", no_wrap=True, max_width=min(46, room))
    table.add_column("nats", justify="right")
    table.add_column("")
    table.add_column("verdict", no_wrap=True)
    top = max(1e-9, float(shown["effect"].max()))
    for row in shown.to_dict("records"):
        bar = "█" * round(BAR * max(0.0, row["effect"]) / top)
        name = f"{row['name']}: {' '.join(row['unit_text'].split())}"
        table.add_row(visible(name), f"{round(row['effect'], 2) + 0.0:.2f}", bar, row["verdict"])
    return table


def _strip(nats: list[float]) -> str:
    """One line of blocks, with the layers that lose most named behind it."""
    blocks, top = " ▁▂▃▄▅▆▇█", max(0.5, *nats)
    strip = "".join(blocks[round((len(blocks) - 1) * max(0.0, x) / top)] for x in nats)
    best = sorted(range(len(nats)), key=lambda i: -nats[i])[:3]
    return f"0 {strip} {len(nats) - 1}   " + ", ".join(f"layer {i}: {nats[i]:.1f}" for i in best)

"""``stored-bias``: how much of attention's output a prompt's bias is, and whether one fact of it can be edited (ICLCA, slides).

*Share.* By size, ||z_bias|| / (||z_bias|| + ||z_context||), the mean over the heads of a layer and the positions of a text
behind the prompt; its length grows from the model's first token alone, which is the null: that token draws attention and says
nothing.

*Edit.* A prompt states where offices are. What its exact bias keeps at the positions of one sentence gives way to what the
prompt with another city in that sentence keeps there; no other position is read again, so the later ones still know of the old
city. The shift is that of the log-odds of the new city against the old one, behind the question; of the other facts, of the
stated city against that new one. Shares of a shift do not ask that the model answers rightly.
"""

from collections.abc import Iterator, Sequence

import pandas as pd
import torch
from matplotlib.figure import Figure

from kvlens.analyses import bias_decomposition
from kvlens.conversion import convert_prompt
from kvlens.errors import KVLensError
from kvlens.kv_bias import KVBias
from kvlens.kv_bias.layers import Keys
from kvlens.model import HookedKVTransformer
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment, hooked_model
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.iclca.gpt2_text import PAIRS_BY_KIND

FIRMS = (
    "Lumora",
    "Veltane",
    "Brixon",
    "Quandel",
    "Sorvane",
    "Mirelle",
    "Tavrik",
    "Oslund",
    "Pellora",
    "Zanthe",
    "Corvin",
    "Hadwin",
)
CITIES = ("Paris", "Rome", "Berlin", "London", "Madrid", "Vienna", "Dublin", "Boston", "Chicago", "Tokyo", "Sydney", "Moscow")
N_FACTS = 6
"""Sentences in one prompt."""
HALF = 0.5


@experiment(
    "ICLCA, slides, hypothesized arguments",
    "How much of attention's output is the bias of a prompt, and can one fact of a stored bias be changed?",
    cost=("seconds", "a minute on one core; with SmolLM2 (--model FILE) about four"),
    model="docs-gpt2",
    tokenizer=None,
    n_prompts=(2, 12),
    lengths=([1, 8], [1, 2, 4, 8, 16, 32, 64, 128, 256]),
    n_text_tokens=(4, 32),
    seed=0,
)
def stored_bias(settings: Settings, tell: Tell) -> Reproduction:
    """Measure the share of prompts of growing length, and edit one fact of every stored bias."""
    model = hooked_model(settings["model"], tokenizer=settings["tokenizer"], device="cpu")
    if model.cfg.attention == "linear":
        raise KVLensError(f"stored-bias edits keys of softmax attention; {settings['model']} has linear attention")
    shares, edits = list[dict[str, object]](), list[dict[str, object]]()
    for number in range(settings["n_prompts"]):
        shares += [{"prompt": number, **row} for row in shares_of(model, settings, number)]
        edits += [{"prompt": number, **row} for row in edits_of(model, number)]
        tell(f"prompt {number + 1} of {settings['n_prompts']}")
    tables = {"shares": pd.DataFrame(shares), "edits": pd.DataFrame(edits)}
    size = f"{settings['model']}, {sum(p.numel() for p in model.parameters()):,} parameters"
    return Reproduction(
        tables=tables,
        figure=lambda: draw(tables["shares"]),
        comparisons=[*compare_shares(tables["shares"]), *compare_edits(tables["edits"])],
        differences=[f"The slides name no model and no measure; this is {size}, the share by size, an edit of one sentence."],
    )


def shares_of(model: HookedKVTransformer, settings: Settings, number: int) -> Iterator[dict[str, object]]:
    """The share of the bias in each layer, for each length of the prompt; the text is what follows the prompt."""
    texts = (*PAIRS_BY_KIND["facts"], *PAIRS_BY_KIND["stories"])
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(settings["seed"] + number)).tolist()
    passage = "".join(f" {texts[i][0]}{texts[i][1]}." for i in order)
    tokens = model.to_tokens(passage, prepend_bos=model.prepends_bos, truncate=False)[0]
    for length in settings["lengths"]:
        text = tokens[length : length + settings["n_text_tokens"]]
        by_head = bias_decomposition(model, tokens[:length], text)
        for layer, share in by_head.groupby("layer")["bias_share"].mean().items():
            yield {"length": length, "layer": layer, "share": float(share)}


def edits_of(model: HookedKVTransformer, number: int) -> Iterator[dict[str, object]]:
    """Log-odds at the questions of the fact that is changed, and of each other one, under four biases."""
    firms, cities = ((*names[number:], *names[:number])[: N_FACTS + 1] for names in (FIRMS, equally_long(model, CITIES)))
    edited, old, new = number % N_FACTS, cities[number % N_FACTS], cities[N_FACTS]
    stated = dict(zip(firms, cities, strict=True))
    (before, spans), (rewritten, _) = read_facts(model, stated), read_facts(model, {**stated, firms[edited]: new})
    ways = {
        "stored": before,
        "rewritten": rewritten,
        "edited": exchanged(before, rewritten, *spans[edited]),
        "another sentence": exchanged(before, rewritten, *spans[(edited + 1) % N_FACTS]),
    }
    for way, bias in ways.items():
        for firm, city in zip(firms[:N_FACTS], cities, strict=False):
            pair = (new, old) if firm == firms[edited] else (city, new)
            yield {"way": way, "changed": firm == firms[edited], "log_odds": log_odds(model, bias, firm, *pair)}


def equally_long(model: HookedKVTransformer, names: Sequence[str]) -> list[str]:
    """Those of as many tokens as most have, so that one takes the place of another and nothing moves."""
    lengths = [len(model.to_tokens(f" {name}", prepend_bos=False)[0]) for name in names]
    found = [name for name, length in zip(names, lengths, strict=True) if length == max(lengths, key=lengths.count)]
    if len(found) <= N_FACTS:
        raise KVLensError(f"stored-bias needs {N_FACTS + 1} of its cities to have as many tokens each; {len(found)} have")
    return found


def read_facts(model: HookedKVTransformer, stated: dict[str, str]) -> tuple[KVBias, list[tuple[int, int]]]:
    """The exact bias of the sentences, and where each begins and ends."""
    sentences = [f" The office of {firm} is in {city}." for firm, city in list(stated.items())[:N_FACTS]]
    tokens = [model.to_tokens(one, prepend_bos=False, truncate=False)[0] for one in sentences]
    first = model.to_tokens("", prepend_bos=model.prepends_bos)[0] if model.prepends_bos else tokens[0][:0]
    ends = (len(first) + torch.tensor([len(one) for one in tokens]).cumsum(0)).tolist()
    return convert_prompt(model, torch.cat([first, *tokens])), list(zip([len(first), *ends], ends, strict=False))


def exchanged(own: KVBias, other: KVBias, start: int, end: int) -> KVBias:
    """``own`` with what ``other`` keeps at the positions from ``start`` to ``end``, in every layer."""

    def mixed(*parts: Keys) -> Keys:
        here, there = Keys.on_one_scale(parts)
        theirs = there.by_key()
        return here.with_tensors(
            {
                name: torch.cat([x[:, :, :start], theirs[name][:, :, start:end], x[:, :, end:]], 2)
                for name, x in here.by_key().items()
            }
        )

    return own.with_attention([mixed(*parts) for parts in zip(own.attention, other.attention, strict=True)])


@torch.no_grad()
def log_odds(model: HookedKVTransformer, bias: KVBias, firm: str, city: str, rival: str) -> float:
    """Of the first token of ``city`` against that of ``rival``, behind the question about ``firm``."""
    text, first, second = (
        model.to_tokens(words, prepend_bos=False, truncate=False)[0]
        for words in (f" The office of {firm} is in", f" {city}", f" {rival}")
    )
    with model.kv_bias(bias):
        logits = model(text[None])[0, -1].double()
    return float(logits[first[0]] - logits[second[0]])


def compare_shares(shares: pd.DataFrame) -> Iterator[Comparison]:
    """Whether the share passes a half, and in how many layers."""
    longest, nothing = shares["length"].max(), shares["length"].min()
    by_prompt = shares.pivot_table("share", "length", "prompt")
    what = f"share of the bias in attention's output by size, prompts of {longest} tokens (first token alone: {{:.3f}})"
    claim = "the bias of a prompt dominates attention's output: its share is above a half"
    yield Comparison.tested_on(what.format(by_prompt.loc[nothing].mean()), claim, by_prompt.loc[longest].to_numpy(), HALF)
    claim, gain = (
        "it dominates by what the prompt says: its share exceeds the first token's",
        by_prompt.loc[longest] - by_prompt.loc[nothing],
    )
    yield Comparison.tested_on("the same, less that of the first token alone", claim, gain.to_numpy())
    by_layer = shares.pivot_table("share", "layer", "length")
    passes = by_layer.gt(HALF).idxmax(axis=1).where(by_layer.gt(HALF).any(axis=1))
    counted = ", ".join(f"{int(length)}: {n}" for length, n in passes.value_counts().sort_index().items())
    what = f"layers of {len(by_layer)} in which the share passes a half (length at which it first does: layers; {counted})"
    yield Comparison.stated(what, "the length at which the share of the bias passes a half", int(passes.notna().sum()))


def compare_edits(edits: pd.DataFrame) -> Iterator[Comparison]:
    """Whether the edit shifts the fact as much as reading the prompt again, and the others no more than that does."""
    by_prompt = {which: rows.pivot_table("log_odds", "prompt", "way") for which, rows in edits.groupby("changed")}
    shifts, others = by_prompt[True].sub(by_prompt[True]["stored"], axis=0), by_prompt[False]
    full = shifts["rewritten"]
    what, claim = (
        f"shift in log-odds, nats (the prompt read again: {full.mean():.2f})",
        "an edit of the stored bias changes the fact",
    )
    yield Comparison.tested_on(f"{what}, edited", claim, shifts["edited"].to_numpy())
    for way, share, claim in (
        ("edited", 0.9, "an edit of one sentence's positions brings at least nine tenths of reading the prompt again"),
        ("another sentence", 0.1, "an edit of another sentence's positions brings less than a tenth of it (null)"),
    ):
        beyond, ours = (shifts[way] - share * full).to_numpy(), float(shifts[way].mean() / full.mean())
        yield Comparison.tested_on(f"share of the shift, {way}", claim, beyond, below=way != "edited", ours=ours)
    beside = (others["edited"] - others["rewritten"]).abs()
    claim = "the other facts are as if the prompt had been read again, to a tenth of the shift"
    what = "difference of their log-odds, nats"
    yield Comparison.tested_on(what, claim, (beside - 0.1 * full).to_numpy(), below=True, ours=float(beside.mean()))


def draw(shares: pd.DataFrame) -> Figure:
    """The share against the length of the prompt, a line for each layer."""
    table = (
        shares.groupby(["layer", "length"])["share"]
        .mean()
        .reset_index()
        .assign(layer=lambda t: "layer " + t["layer"].astype(str))
    )
    title = "Share of the prompt's bias in the size of attention's output"
    return draw_panels(table, "length", "share", by="layer", title=title, lines={"a half": HALF}, log="x", ticks=True)

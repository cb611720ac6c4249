"""The page of an explanation: the answer and what it rests on, and below it sections of what analyses add.

A section is a function of what is measured that gives pieces of :mod:`kvlens.viz`; `SHOWN` has them by name, and a function's
docstring is what readers are told about its section. Analyses take two parts of what was explained: the prompt, up to a chat's
last message, which they convert into a bias; and the text behind it, which ends with the answer.
"""

import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import torch

from kvlens import HookedKVTransformer, KVBias, KVLensError, KVModel, convert_prompt
from kvlens.analyses import (
    HeadDetails,
    LinkedShares,
    baseline_ablation,
    conversion_error,
    dual_demonstrations,
    dual_losses,
    head_details,
    layer_contributions,
    linked_shares,
    prompt_by_depth,
    prompt_copies,
    prompt_effect,
)
from kvlens.analyses.readings import Readings, read_text
from kvlens.analyses.segments import heads_of_model, telling
from kvlens.arguments import USUAL_SECTIONS, SectionName
from kvlens.checks import checked, ensure
from kvlens.explanation.presentation import quoted
from kvlens.explanation.view import Explained, explanation_view
from kvlens.model import heads_per_layer
from kvlens.viz import (
    Page,
    Piece,
    attention_view,
    colored_tokens,
    contribution_bars,
    depth_map,
    dual_view,
    error_table,
    head_heatmap,
    induction_arcs,
    linked_view,
)
from kvlens.viz._text import label, number

LONGEST_SHOWN = 600
TOP_HEADS, TOP_PLACES = 12, 5
MOST_PAIRS = 2**28
"""Pairs of prompt tokens in all heads of a layer for which dual models are computed: in about 10 GB."""
SHARE, CHANGE = "share of the prompt in the attention output", "KL of the predictions without the head, nats"


@checked
@torch.no_grad()
def explanation_page(
    model: KVModel,
    found: Explained,
    sections: Sequence[SectionName] = USUAL_SECTIONS,
    *,
    model_name: str | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> Page:
    """The page that ``kvlens explain --out`` writes; ``explanation_page(model, found).save_html("page.html")`` does so, too.

    Args:
        model: that was explained, with no bias attached.
        found: from :func:`kvlens.explain`.
        sections: what stands below the answer, in this order. ``heads`` takes longest: it ablates every head, twice. In the
            place of a section that does not run on the model it is said why.
        model_name: the model's name on the page; None takes that of the configuration.
        on_progress: called with a description and the fraction done, in 0..1.

    Raises:
        KVLensError: an unknown section.
    """
    names = [ensure("sections", SectionName, name) for name in dict.fromkeys(sections)]
    said = "this" if found.is_whole else repr(found.claim)
    asked = f"Asked: {quoted(found.question, LONGEST_SHOWN)} " if found.question else ""
    about = f"{asked}Model: {model_in_words(model, model_name)}. {run_in_words(found)}"
    page = Page(f"Why did the model say {said}?", about)
    page.section("The answer").add(explanation_view(found, with_question=False))
    measured = _Measured(model, found, ablates="heads" in names)

    def tell(name: str, before: int, done: float) -> None:
        if on_progress is not None:
            on_progress(f"section {name}", (before + done) / len(names))

    for i, name in enumerate(names):
        tell(name, i, 0.0)
        title, shown = SHOWN[name]
        note = " ".join(str(shown.__doc__).split())
        try:
            with telling(partial(tell, name, i)):
                pieces = [*shown(measured)]
        except KVLensError as error:
            note, pieces = f"It is not shown for this model. {error}", []
        page.section(title, note)
        for piece in pieces:
            page.add(piece)
    packages = ", ".join(f"{name} {version(name)}" for name in ("kvlens", "torch", "transformer-lens", "transformers"))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return page.footer(f"Made {now} with {packages} and Python {platform.python_version()}.")


def model_in_words(model: KVModel, name: str | None) -> str:
    """The model's name, without the folder that it was read from, as pages are shared; and its size."""
    path = Path(name or str(model.cfg.model_name)).expanduser()
    name = path.name if path.is_absolute() or path.exists() else str(path)
    heads = " or ".join(map(str, sorted(set(heads_per_layer(model)))))
    dtype = str(model.cfg.dtype).removeprefix("torch.")
    return f"{name}, {model.cfg.n_layers} layers of {heads} heads, {n_parameters(model):,} parameters, {dtype}"


def run_in_words(found: Explained) -> str:
    """What was read: by these numbers pages about the same question are told apart."""
    parts = f"{len(found.units)} part{'s' if len(found.units) > 1 else ''}"
    passes = f"{int(found.cost['passes'].sum()):,} passes that read {found.n_tokens:,} tokens"
    n = len(found.response_tokens)
    return f"Prompt: {len(found.tokens):,} tokens, {parts}. Answer: {n} token{'s' if n > 1 else ''}. Explained in {passes}."


def n_parameters(model: KVModel) -> int:
    """The model's parameters; an unembedding that is the embedding in its checkpoint counts once, though we hold it twice."""
    twice = model.W_U.numel() if isinstance(model, HookedKVTransformer) and model.cfg.tie_word_embeddings else 0
    return sum(p.numel() for p in model.parameters()) - twice


class _Measured:
    """What sections show, each measured when the first of them asks for it.

    Args:
        model, found: as :func:`explanation_page`.
        ablates: whether heads are ranked, and colored, by what the answer loses without them.
    """

    def __init__(self, model: KVModel, found: Explained, ablates: bool):
        self.model, self.found, self.ablates = model, found, ablates
        self.prompt, self.begun = found.tokens[: found.n_prompt], found.tokens[found.n_prompt :]
        self.text = torch.cat([self.begun, found.response_tokens.to(self.begun.device)])
        self.sequences = model, self.prompt, self.text
        self.by = f"what {found.named} loses without the head, nats" if ablates else SHARE

    @cached_property
    def bias(self) -> KVBias:
        return convert_prompt(self.model, self.prompt, verbose=False)

    @cached_property
    def readings(self) -> Readings:
        return read_text(*self.sequences, bias=self.bias, residuals=True)

    @cached_property
    def details(self) -> HeadDetails:
        return head_details(*self.sequences, bias=self.bias)

    @cached_property
    def shares(self) -> LinkedShares:
        return linked_shares(*self.sequences, bias=self.bias, readings=self.readings)

    @cached_property
    def heads(self) -> pd.DataFrame:
        """Every head, those first that the answer loses most without, or else those that write most of the prompt."""
        layer, head = heads_of_model(self.model)
        table = pd.DataFrame({"layer": layer, "head": head, SHARE: self.shares.by_prompt.sum(dim=-1)[layer, head]})
        if self.ablates:
            claim = self.found.claims.iloc[self.found.about]
            before, whole = (self._without_each_head(int(claim[end])) for end in ("start", "stop"))
            table = table.assign(**{self.by: whole["loss"] - before["loss"], CHANGE: whole["kl"]})
        columns = [*dict.fromkeys(("layer", "head", self.by, *table))]
        return table.sort_values(self.by, ascending=False, kind="stable")[columns]

    def _without_each_head(self, n: int) -> pd.DataFrame:
        """The text up to the answer's first n tokens, when a head reads nothing of the prompt but BOS: KL and total loss."""
        text = torch.cat([self.begun, self.found.response_tokens[:n].to(self.begun.device)])
        removals = [[pair] for pair in zip(*(x.tolist() for x in heads_of_model(self.model)), strict=True)]
        table = baseline_ablation(self.model, self.prompt, text, removals, bias=self.bias)
        return table.assign(loss=(len(text) - 1) * table["loss_change"].fillna(0.0))


# --- sections --------------------------------------------------------------------------------------------------------


def _heads(measured: _Measured) -> Iterator[Piece]:
    """Without a head: it reads nothing of the prompt but BOS. Effects of several heads do not add up. Choose a head in the map
    to see its attention pattern and its prompt tokens."""
    ranked = measured.heads
    names = [f"L{layer}H{head}" for layer, head in zip(ranked["layer"], ranked["head"], strict=True)]
    table = ranked.drop(columns=["layer"]).assign(head=names)
    yield error_table(table, title=f"heads, the largest first: {measured.by}", max_rows=TOP_HEADS)
    yield head_heatmap(ranked, measured.by, details=measured.details, title="map of heads")


def _patterns(measured: _Measured) -> Iterator[Piece]:
    """Of the unconverted model over prompt and text, drawn by circuitsvis."""
    heads, details = measured.heads.head(TOP_HEADS), measured.details
    assert details.among is not None
    assert details.strongest is not None
    everything, n_prompt, kept = [*details.prompt, *details.text], len(details.prompt), details.strongest.tolist()
    yield attention_view(
        [everything[place] for place in kept],
        details.among[heads["layer"].tolist(), heads["head"].tolist()],
        n_prompt=sum(place < n_prompt for place in kept),
        head_names=[f"L{row.layer} H{row.head}" for row in heads.itertuples()],
        positions=[place if place < n_prompt else place - n_prompt for place in kept],
        n_left_out=len(everything) - len(kept),
        title=f"the first heads by: {measured.by}",
    )


def _shares(measured: _Measured) -> Iterator[Piece]:
    """Choose a prompt token to see which heads read it, a head to see which prompt tokens it reads and where, or a text token
    to see everything it reads and the most probable next tokens. A large share does not imply a large effect: where heads are
    ablated, the menu can also color them by their effect. Arrow keys move, Enter chooses, Escape clears."""
    colorings = {}
    if measured.ablates:
        by_head = measured.heads.pivot(index="layer", columns="head", values=measured.by)  # noqa: PD010, one row for each
        colorings[measured.by] = torch.tensor(by_head.reindex(range(len(measured.shares.by_prompt))).to_numpy())
    yield linked_view(replace(measured.shares, colorings=colorings), title="shares of the prompt in the attention output")


def _effect(measured: _Measured) -> Iterator[Piece]:
    """The text is what follows the prompt, and the answer. Without the prompt BOS is left; the text keeps its positions."""
    table = prompt_effect(*measured.sequences, bias=measured.bias, readings=measured.readings)
    whole, bare = (table[table["condition"] == name].set_index("position") for name in ("with_prompt", "without_prompt"))
    names = {"loss": "loss, nats per token", "argmax_agrees": "same most probable token", "kl": "KL(with || this), nats"}
    means = [(title, whole[column].mean(), bare[column].mean()) for column, title in names.items()]
    columns = ["mean over the text", "with the prompt", "without it"]
    yield error_table(pd.DataFrame(means, columns=columns), title="next-token predictions")
    losses = whole[["token", "next_token", "loss"]].assign(without=bare["loss"], gain=bare["loss"] - whole["loss"])
    helps, hurts = losses[losses["gain"] > 0], losses[losses["gain"] < 0]
    most = pd.concat([helps.nlargest(TOP_PLACES, "gain"), hurts.nsmallest(TOP_PLACES, "gain")]).reset_index()
    most = most.assign(**{name: most[name].map(label) for name in ("token", "next_token")})
    most.columns = ["position", "after", "next token", "loss with the prompt", "loss without it", "decrease"]
    yield error_table(most, title="where the prompt helps most, and where it hurts most")
    gains = [math.nan, *losses["gain"][:-1]]  # a token is predicted at the position before it
    yield colored_tokens(losses["token"], gains, title="decrease in loss from the prompt, per token", unit="nats")


def _depth(measured: _Measured) -> Iterator[Piece]:
    """After which layer the prompt helps or hurts (logit lens)."""
    table = prompt_by_depth(*measured.sequences, readings=measured.readings)
    yield depth_map(table, title="loss without the prompt minus loss with it")


def _logits(measured: _Measured) -> Iterator[Piece]:
    """Direct contribution of each component to the logit of the next token minus the mean logit of the vocabulary, averaged
    over the text, with the prompt as a bias. Effects through later layers are part of those layers' bars, so a head with a
    large effect may contribute little here. attention_input is what the heads read from the text, attention_bias what they
    read from the converted prompt."""
    table = layer_contributions(measured.model, measured.bias, measured.text)
    means = table.groupby(["layer", "component"], sort=False)["logit"].mean().reset_index()
    outside = ~means["layer"].between(0, means["layer"].max() - 1)
    means["part"] = means["component"].where(outside, "layer " + means["layer"].astype(str) + ", " + means["component"])
    total = number(float(means["logit"].sum()))
    title = f"direct contributions; they add up to the mean of that logit, {total}"
    yield contribution_bars(means, "logit", by="part", title=title)


def _dual(measured: _Measured) -> Iterator[Piece]:
    """Every head's output equals that of a linear model W φ(k) after one step of gradient descent on the prompt's tokens as
    training data (the dual model). log_loss_drop: natural logarithm of the decrease in loss, which spans many orders of
    magnitude. step_share: share of the head's output that comes from the step. demonstration_weight: the head's attention to
    the prompt. cosine_before, cosine_after: mean cosine of W φ(k) and v over the prompt's tokens. The map shows means over the
    text; choose a head to see the contribution of each prompt token at the last text token."""
    n, n_heads = len(measured.prompt), max(heads_per_layer(measured.model))
    if n**2 * n_heads > MOST_PAIRS:
        most = math.isqrt(MOST_PAIRS // n_heads)
        raise KVLensError(f"dual: every two of the prompt's tokens are compared, {n:,} here; there is room for {most:,}")
    whole = torch.cat([measured.prompt, measured.text])
    losses = dual_losses(measured.model, whole, n_demonstrations=n)
    demonstrations = dual_demonstrations(measured.model, whole, n_demonstrations=n)
    yield dual_view(losses, demonstrations, query=measured.shares.text[-1])


def _copies(measured: _Measured) -> Iterator[Piece]:
    """Where the text repeats a token of the prompt, and which heads attend to the token that followed it there."""
    copies, shares = prompt_copies(*measured.sequences), measured.shares
    every = pd.MultiIndex.from_frame(measured.heads[["layer", "head"]].sort_values(["layer", "head"]))
    scores = copies.groupby(["layer", "head"])["attention"].mean().reindex(every, fill_value=0.0).rename("score").reset_index()
    title = "arcs; the strip shows each head's mean attention along them"
    yield induction_arcs([*shares.prompt, *shares.text], len(shares.prompt), copies, scores, title=title)


def _exactness(measured: _Measured) -> Iterator[Piece]:
    """Sections read the prompt as a KV bias, numbers in each attention head that take its place. Here the model with the bias
    and without the prompt is compared with the model with the prompt."""
    errors = conversion_error(*measured.sequences, bias=measured.bias, readings=measured.readings)
    relative = float((errors["squared_error"].sum() / errors["squared_norm"].sum()) ** 0.5)
    rows = [
        (
            "relative error of the logits",
            number(relative),
            "exact to rounding" if errors["exact_to_rounding"][0] else "NOT EXACT",
        ),
        ("rounding error of the model itself", number(errors["rounding_error"][0]), "up to 4 times this counts as exact"),
        ("largest difference of any logit", number(errors["max_abs_error"].max()), ""),
        ("same most probable next token", f"{errors['argmax_agrees'].sum()} of {len(errors)}", "positions of the text"),
    ]
    yield error_table(pd.DataFrame(rows, columns=["measure", "value", "verdict"]), title="conversion error")


SHOWN: dict[SectionName, tuple[str, Callable[[_Measured], Iterator[Piece]]]] = {
    "heads": ("Heads", _heads),
    "patterns": ("Attention patterns", _patterns),
    "shares": ("Prompt, heads, next token", _shares),
    "effect": ("Effect on the text", _effect),
    "depth": ("Layer by layer", _depth),
    "logits": ("Direct logit attribution", _logits),
    "dual": ("Gradient descent", _dual),
    "copies": ("Prefix matching", _copies),
    "exactness": ("Exactness", _exactness),
}
"""A section's heading and the function of its pieces, by name."""

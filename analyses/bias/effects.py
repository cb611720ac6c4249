"""What a converted prompt does for the predictions on a text: parts of it ablated, head by head, layer by layer, or whole.

Four ways to ablate a part:

- ``zero``: set it to 0, as if there had been no prompt (no b_KV, no contribution to the normalizer, no token before);
- ``mean``: replace it by its mean over reference prompts, which keeps what all prompts have in common;
- ``resample``: replace it by that of another prompt, once for each reference, which keeps the model in distribution;
- ``baseline``: replace it by that of the prompt's BOS alone (nothing if there is no BOS), which is what "without the prompt"
  means in kvlens: zeroing also removes BOS, so that a head that mostly attends to BOS would seem important.

A converted prompt is more than its bias: a shifted model also reads the *shift state*, the prompt's last raw keys, values and
queries, and a recurrent layer the inputs of its short convolution. ``bias`` ablates b_KV and b_D, ``shift_state`` the shift
state, ``both`` the whole prompt. A convolution's inputs belong to the whole layer: head by head they are one row, with head -1,
and ``both`` leaves recurrent layers out. The effects do not add up. They include every path; for direct effects see
:func:`kvlens.analyses.bias.decomposition.bias_decomposition`.

Two tables, both by :class:`kvlens.analyses.bias.exchange.HeadExchange`: :func:`bias_effects` ablates every head in every way,
:func:`bias_ablation` and :func:`baseline_ablation` chosen heads together. How large a bias is beside what its removal costs is
in :func:`kvlens.analyses.bias.decomposition.bias_by_head`.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvlens import KVBias, KVLensError, KVModel, convert_prompt
from kvlens.checks import checked

from ..attribution.answers import Answer, Rival
from ..declaration import Columns, Field, Option, analysis, read_tokens
from ..logit_attribution import LogitTarget, logit_targets
from ..predictions import (
    KL,
    LOGIT_CHANGE,
    LOSS_CHANGE,
    divergences_from,
    log_probabilities,
    next_token_losses,
    text_logits,
)
from ..segments import OnProgress, part_of, progress
from ..sequences import PromptTokens, TextTokens, bias_and_text, prompt_sequence, prompt_text_bias
from .exchange import (
    ALL,
    HEAD_PART,
    PART_KINDS,
    SHIFT_STATE_PART,
    ExchangedPart,
    HeadExchange,
    baseline_of,
    has_baseline,
    has_shift_state,
    heads_of,
    heads_with,
    in_one_space,
    layers_with_convolution,
    mean_of,
    shifts,
    zeros_of,
)

AblationMethod = Literal["zero", "mean", "resample", "baseline"]
Ablated = Literal["bias", "shift_state", "both"]
Granularity = Literal["head", "layer", "model"]
ABLATION_METHODS, ABLATED, GRANULARITIES = get_args(AblationMethod), get_args(Ablated), get_args(Granularity)

KINDS_OF = {"bias": PART_KINDS[:1], "shift_state": PART_KINDS[1:], "both": PART_KINDS}
RemovedHeads = Sequence[tuple[int, int]]


Ablation = tuple[str, int, str, int, int]
"""Method, index of the resampled prompt (-1 for other methods), part, layer and head of one ablation."""

COLUMNS = Columns(
    method=("str", "``zero``, ``mean``, ``resample`` or ``baseline``"),
    reference=("int64", "for ``resample``, index into ``references``; else -1"),
    part=("str", "``bias``, ``shift_state`` or ``both``"),
    layer=("int64", "-1: all"),
    head=("int64", "query head, or value head of a recurrent layer; -1: all"),
    kl=("float64", f"{KL}; mean over the text's positions"),
    loss_change=("float64", f"{LOSS_CHANGE}; mean over the text's next tokens; NaN for one token"),
    logit_change=("float64", f"{LOGIT_CHANGE}; the answer's, less its rival's; or the mean over next tokens, NaN without one"),
)


def _read_references(model: KVModel, prompts: Any) -> KVBias:
    if all(isinstance(prompt, str) for prompt in prompts) and model.tokenizer is not None:
        return convert_prompt(model, prompts)
    bos = model.prepends_bos
    others = [read_tokens(model, "references", prompt, prepend_bos=bos) for prompt in prompts]
    return convert_prompt(model, torch.stack(others))


@analysis(
    COLUMNS,
    "the effect of ablating the bias or shift state of a head, a layer or the whole prompt",
    cost="the prompt once; the text once, and from its layer on for each row, so for every head, part, method and reference",
    inputs={"references": Field("references", _read_references, required=False)},
    options={
        "by": Option("what is ablated at once", GRANULARITIES),
        "methods": Option("mean and resample need references", ABLATION_METHODS, many=True),
        "parts": Option("what is ablated; empty: all that the model has", ABLATED, many=True),
    },
)
@checked
@torch.no_grad()
def bias_effects(
    model: KVModel,
    prompt: KVBias | PromptTokens,
    text: TextTokens,
    *,
    by: Granularity = "head",
    methods: Sequence[AblationMethod] = ("zero",),
    parts: Sequence[Ablated] | None = None,
    references: KVBias | None = None,
    answer: Answer = None,
    rival: Rival = None,
) -> pd.DataFrame:
    """Ablate every head (or layer, or the whole) of a bias, and measure the effect on a text.

    Args:
        model: linear or softmax.
        prompt: a bias, or a string or tokens [pos], which are converted here.
        text: a string, or tokens [pos] without BOS.
        by: what is ablated at once: ``head``, ``layer`` or ``model``.
        methods: some of :data:`ABLATION_METHODS`.
        parts: some of :data:`ABLATED`; None takes all that the bias has. With grouped queries, the shift state of a head is
            that of its group.
        references: the biases of other prompts, as a batch, for ``mean`` and ``resample``. In a softmax model they keep their
            own keys with their weights, which the mean divides by the number of references.
        answer, rival: the logit, as in :func:`kvlens.analyses.bias.decomposition.bias_decomposition`.

    Returns:
        One row per ablation, by method and part in the order given, then layer, then head:

        {columns}

    Raises:
        KVLensError: an unknown name, references that are missing or at other positions, a bias of another model,
            invalid tokens.
    """
    bias, text = bias_and_text(model, "bias_effects", prompt, text)
    targets = logit_targets(model, text, answer, rival)
    parts = _parts_of(bias) if parts is None else parts
    ablations = _ablations(bias, by, methods, parts, references)
    baseline = [_baseline(model, prompt, bias)] if "baseline" in methods else []
    own, *others = in_one_space(bias, *_prompts(methods, references), *baseline)
    means = [mean_of(others[: len(others) - len(baseline)])] if len(others) > len(baseline) else []
    exchange = HeadExchange(own, zeros_of(own), *means, *others)
    first = {"zero": 0, "mean": 1, "resample": 2, "baseline": len(means) + len(others)}
    donor = torch.tensor([first[method] + max(reference, 0) for method, reference, *_ in ablations], dtype=torch.long)
    chosen = exchange.rows([exchange.of(layer, head, KINDS_OF[part]) for *_, part, layer, head in ablations])
    with progress("bias_effects") as tell:
        numbers = _measured(model, exchange, chosen, donor, targets, tell)
    which = pd.DataFrame(ablations, columns=["method", "reference", "part", "layer", "head"])
    return COLUMNS.frame({**which, **numbers})


def _measured(
    model: KVModel,
    exchange: HeadExchange,
    chosen: Bool[Tensor, "row part"],
    donor: Int[Tensor, " row"] | None,
    targets: Sequence[LogitTarget],
    tell: OnProgress,
    with_logits: bool = True,
) -> dict[str, list[float]]:
    """``kl``, ``loss_change`` and, if asked for, ``logit_change`` of each row against the whole bias, as in `COLUMNS`."""
    found: dict[str, list[float]] = {"kl": [], "loss_change": []}
    changes = []
    for number, target in enumerate(targets):
        with model.kv_bias(exchange.own):
            whole_logits = text_logits(model, None, target.text)
        whole = log_probabilities(whole_logits)
        whole_loss, values = next_token_losses(whole, target.text)[:-1].mean(), []
        told = part_of(tell, number, len(targets))
        for logits in exchange.logits(model, target.text, chosen, donor, on_progress=told):
            if with_logits:
                values.append(target.value(logits) - target.value(whole_logits))
            if number == 0:
                kl, log_n = divergences_from(whole, logits)
                losses = next_token_losses(logits, target.text).double() + log_n
                found["kl"] += kl.mean(dim=-1).tolist()
                found["loss_change"] += (losses[:, :-1].mean(dim=-1) - whole_loss).tolist()
        changes.append(torch.cat(values) if values else torch.zeros(0))
    return found | ({"logit_change": torch.stack(changes).sum(dim=0).tolist()} if with_logits else {})


def _parts_of(bias: KVBias) -> Sequence[Ablated]:
    return ABLATED if has_shift_state(bias) else ABLATED[:1]


def _ablations(
    bias: KVBias, by: str, methods: Sequence[str], parts: Sequence[str], references: KVBias | None
) -> list[Ablation]:
    if set(methods) & {"mean", "resample"}:
        _check_references(bias, references)
    n_references = 0 if references is None else references.n_rows
    chosen = {"zero": [ALL], "mean": [ALL], "resample": range(n_references), "baseline": [ALL]}
    ways = [(method, reference) for method in methods for reference in chosen[method]]
    return [(*way, part, *unit) for way in ways for part in parts for unit in _units(bias, by, part)]


def _units(bias: KVBias, by: str, part: str) -> list[tuple[int, int]]:
    """(layer, head) of what is ablated at once; the convolution's inputs of a recurrent layer belong to no single head."""
    if by == "model":
        return [(ALL, ALL)]
    if by == "layer":
        return [(layer, ALL) for layer in range(bias.n_layers)]
    if part == "bias":
        return heads_of(bias)
    moves = part == "both" or shifts(bias)
    heads = [(layer, head) for layer, head in heads_of(bias) if head < bias.first_state_head(layer) and moves]
    return sorted([*heads, *((layer, ALL) for layer in layers_with_convolution(bias))]) if part == "shift_state" else heads


def _prompts(methods: Sequence[str], references: KVBias | None) -> list[KVBias]:
    """The biases of the references one by one, where a method needs them."""
    if references is None or not set(methods) & {"mean", "resample"}:
        return []
    return [references.select_prompt(i) for i in range(references.n_rows)]


def _check_references(bias: KVBias, references: KVBias | None) -> None:
    if not isinstance(references, KVBias) or references.batch_size is None:
        came = "that of a single prompt" if isinstance(references, KVBias) else repr(references)
        raise KVLensError(
            f"bias_effects: mean and resample replace this bias by those of other prompts: give references=, a batch of biases "
            f"(convert_prompt of a list of prompts), got {came}"
        )
    references.fingerprint.check(bias.fingerprint, "bias_effects: references")
    if not bias.starts_where(references):
        offsets = torch.as_tensor(references.position_offset)
        raise KVLensError(
            f"bias_effects: the text starts at position {int(bias.position_offset)} under this prompt and at "
            f"{sorted(set(offsets.reshape(-1).tolist()))} under the references; this model's positions are absolute, so give "
            "references of the prompt's length"
        )


def _baseline(model: KVModel, prompt: KVBias | PromptTokens, bias: KVBias) -> KVBias:
    if isinstance(prompt, KVBias):
        raise KVLensError(
            "bias_effects: the baseline needs the prompt's first token (its BOS, if it has one), which a converted prompt no "
            "longer has: give the prompt as a string or tokens"
        )
    if not has_baseline(bias):
        raise KVLensError("bias_effects: random, Taylor and learned features have no baseline; use methods=['zero']")
    return baseline_of(model, prompt_sequence(model, "prompt", prompt)).select_prompt(0)


REMOVALS = Columns(
    removal=("int64", "index into ``removals``"),
    n_heads=("int64", "how many heads were removed"),
    kl=("float64", f"{KL}; without these heads, mean over the text's positions"),
    loss_change=("float64", f"{LOSS_CHANGE}; without these heads, mean over the text's next tokens; NaN for one token"),
)


@REMOVALS.document
@checked
@torch.no_grad()
def bias_ablation(
    model: KVModel,
    prompt: KVBias | PromptTokens,
    text: TextTokens,
    removals: Sequence[RemovedHeads],
) -> pd.DataFrame:
    """Measure the effect of each removal relative to the whole bias.

    Args:
        model: linear or softmax.
        prompt: a bias, or a string or tokens [pos], which are converted here.
        text: a string, or tokens [pos] without BOS.
        removals: for each, the (layer, head) pairs whose bias is removed; an empty one changes nothing.

    Returns:
        One row per removal, in the order given:

        {columns}

    Raises:
        KVLensError: a head that does not exist, a batch of biases, a bias of another model, invalid tokens.
    """
    bias, text = bias_and_text(model, "bias_ablation", prompt, text)
    exchange = HeadExchange(bias, zeros_of(bias))
    return _removed(model, text, exchange, _heads_taken(exchange, removals))


@REMOVALS.document
@checked
@torch.no_grad()
def baseline_ablation(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    removals: Sequence[RemovedHeads],
    *,
    bias: KVBias | None = None,
) -> pd.DataFrame:
    """Replace heads of a converted prompt by those of the baseline, including the shift state, so that BOS is kept.

    The inputs of a recurrent layer's convolution belong to no head, and are replaced with all heads of the layer. With random,
    Taylor or learned features there is no baseline, and removed heads become 0.

    Args:
        model: linear or softmax, with the bias attached that the prompt continues.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        text: a string, or tokens [pos] without BOS.
        removals: as in :func:`bias_ablation`.
        bias: the converted prompt, if it has been converted already; None converts it here.

    Returns:
        One row per removal, in the order given:

        {columns}

    Raises:
        KVLensError: as :func:`bias_ablation`; a bias that is not this prompt's.
    """
    prompt, text, bias = prompt_text_bias(model, prompt, text, bias)
    exchange = HeadExchange(*_with_baseline(model, prompt, bias))
    return _removed(model, text, exchange, _with_shift_states(exchange, _heads_taken(exchange, removals)))


def _with_baseline(model: KVModel, prompt: Int[Tensor, " prompt_pos"], bias: KVBias) -> Sequence[KVBias]:
    """A bias and its baseline in one space."""
    baseline = baseline_of(model, prompt)
    if not bias.starts_where(baseline):
        raise KVLensError(
            f"bias: the text starts at position {bias.position_offset} after this bias, and at "
            f"{int(torch.as_tensor(baseline.position_offset).max())} after the prompt: give the bias of this prompt; if it "
            "continues another one, attach that one"
        )
    return in_one_space(bias, baseline.select_prompt(0)) if has_baseline(bias) else (bias, zeros_of(bias))


def both_ablations(
    model: KVModel, prompt: Int[Tensor, " prompt_pos"], text: Int[Tensor, " pos"], bias: KVBias, units: Sequence[RemovedHeads]
) -> dict[str, list[float]]:
    """What :func:`baseline_ablation` and :func:`bias_ablation` measure of the same units, which share their passes."""
    own, baseline = _with_baseline(model, prompt, bias)
    exchange = HeadExchange(own, baseline, zeros_of(own))
    zeroed = _heads_taken(exchange, units)
    chosen = torch.stack([_with_shift_states(exchange, zeroed), zeroed], dim=1).flatten(0, 1)
    with progress("ablating the bias") as tell:
        donor = torch.arange(len(chosen)) % 2
        found = _measured(model, exchange, chosen, donor, logit_targets(model, text), tell, with_logits=False)
    return {
        "ablation_kl": found["kl"][::2],
        "loss_change": found["loss_change"][::2],
        "zero_kl": found["kl"][1::2],
        "zero_loss_change": found["loss_change"][1::2],
    }


def _removed(
    model: KVModel,
    text: Tensor,
    exchange: HeadExchange,
    chosen: Bool[Tensor, "removal part"],
) -> pd.DataFrame:
    """The table of removals, what is chosen being replaced by the donor's."""
    with progress("ablating the bias") as tell:
        effects = _measured(model, exchange, chosen, None, logit_targets(model, text), tell, with_logits=False)
    removed = {"removal": range(len(chosen)), "n_heads": chosen[:, exchange.of(kinds=[HEAD_PART])].sum(dim=1)}
    return REMOVALS.frame({**removed, "kl": effects["kl"], "loss_change": effects["loss_change"]})


def _heads_taken(exchange: HeadExchange, removals: Sequence[RemovedHeads]) -> Bool[Tensor, "removal part"]:
    """True at the heads that each removal takes."""
    pairs = [pair for removal in removals for pair in removal]
    if unknown := [pair for pair in pairs if ExchangedPart(*pair) not in exchange.number]:
        raise KVLensError(f"removals: this model has no (layer, head) {unknown[0]}, counted from 0")
    return exchange.rows([[exchange.number[ExchangedPart(*pair)] for pair in removal] for removal in removals])


def _with_shift_states(exchange: HeadExchange, heads: Bool[Tensor, "removal part"]) -> Bool[Tensor, "removal part"]:
    """The same heads, with the shift state of each group that loses one and the convolution of each layer that loses all."""
    chosen = heads.clone()
    for part, number in exchange.number.items():
        if part.kind != HEAD_PART:
            taken = heads[:, [exchange.number[ExchangedPart(part.layer, head)] for head in heads_with(exchange.own, part)]]
            chosen[:, number] = taken.any(dim=1) & (taken.all(dim=1) | (part.kind == SHIFT_STATE_PART))
    return chosen

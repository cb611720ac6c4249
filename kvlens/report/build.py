"""Computing a report: one model, one prompt, one text; the analyses, and text generated in three conditions."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvlens.analyses import (
    HeadDetails,
    LinkedShares,
    baseline_ablation,
    bias_by_head,
    bias_by_layer,
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
from kvlens.analyses.bias.decomposition import bias_outputs, share_by_size
from kvlens.analyses.bias.exchange import baseline_of
from kvlens.analyses.readings import read_text
from kvlens.analyses.registry import check_front_end, reason_against
from kvlens.analyses.segments import telling
from kvlens.arguments import UnitName
from kvlens.chat import Chat, as_prompt, one_sequence
from kvlens.checks import Count, checked
from kvlens.conversion import ConversionMethod, Exact, convert_prompt
from kvlens.errors import IndirectHeads, KVLensError
from kvlens.explanation import Explained, explain
from kvlens.explanation.runs import responses
from kvlens.explanation.steps import MOST_TOKENS
from kvlens.kv_bias import KVBias
from kvlens.model import KVModel
from kvlens.model.transformer import TEMPERATURE
from kvlens.report.example import FORMAT
from kvlens.report.summary import (
    SHOWN_CONDITIONS,
    answer_figures,
    continuation_figures,
    conversion_figures,
    effect_figures,
    model_facts,
    notes_on,
    versions,
)
from kvlens.texts import joined, token_texts
from kvlens.units import pieces_of_tokens

FORMAT_VERSION = 3
NEW_TOKENS = 40
"""The number of tokens that are generated in each condition by default."""
SHARE_OF_A_FIT = 0.4
"""Of a report's time, if the prompt is converted by a fit; measured on SmolLM2, with a document of 370 tokens."""
MOST_PAIRS = 2**28
"""Pairs of prompt tokens in all heads of a layer for which dual models are computed: in about 10 GB."""
MOST_EXPLAINED = 4096
"""Tokens of a prompt up to which the report explains an answer: each unit takes a pass over prompt and text."""
OF_THE_PAGE = ("head_details", "prompt_copies", "layer_contributions", "linked_shares")
"""Analyses that the page shows where the model's front end has them."""
ABLATION = "KL without the head, nats"
"""What pages call ``ablation_kl``."""
HEAD_MEASURES = {
    "ablation_kl": ABLATION,
    "loss_change": "change in loss without the head, nats per token",
    "bias_share": "share of the bias in the output",
    "zero_kl": "KL with an empty bias, without BOS too, nats",
    "zero_loss_change": "change in loss with an empty bias, nats per token",
    "b_kv_norm": "norm of b_KV",
    "b_d_norm": "norm of b_D",
}
"""The measures of ``bias_by_head`` in words, with their units."""
DUAL_COLORINGS = {"dual loss drop (log)": "log_loss_drop", "dual step's share of the output": "step_share"}


@dataclass(frozen=True)
class Report:
    """What ``kvlens report`` found.

    Attributes:
        summary: the headline figures, nested, of JSON's types (NaN where there is no number).
        tables: ``conversion_error``, ``prompt_effect``, ``prompt_by_depth``, ``prompt_copies``, ``bias_by_head``,
            ``bias_by_layer``, ``layer_contributions`` as the analyses of those names return them, but for those of ``missing``,
            and ``generated``: one row per condition and generated token, with its ``position`` from 0, ``token_id`` and
            ``token``. With ``dual`` also ``dual_losses`` of the text's tokens and ``dual_demonstrations`` of the last of them,
            the prompt's tokens being the demonstrations of all. With an explanation the
            tables of :class:`kvlens.explanation.Explained`, as ``answer_statements`` and so on, and ``answer_heads``: how many
            ``nats`` the heading claim falls by when a head reads nothing of the prompt but BOS.
        bias: the converted prompt.
        heads: what each head attends to, for the page; None where the model's front end does not show it.
        linked: who reads which prompt token for which text token, for the page; None likewise.
        bias_share: [text_pos], the share of the bias in the attention's output at each token of the text, mean over all heads.
        explained: which units of the prompt the answer rests on, read in which layers; None where it was not asked for, and of
            prompts longer than `MOST_EXPLAINED` tokens.
        missing: name of an analysis that does not run on the model or its front end -> why.
    """

    summary: dict[str, Any]
    tables: dict[str, pd.DataFrame]
    bias: KVBias
    heads: HeadDetails | None
    linked: LinkedShares | None
    bias_share: Tensor
    explained: Explained | None = None
    missing: dict[str, str] = field(default_factory=dict)


def ranking(report: Report) -> str:
    """What heads are ranked by, as pages call it: the effect on the answer; on the text, if nothing was explained."""
    return ABLATION if report.explained is None else answer_effect(report.explained)


def answer_effect(explained: Explained) -> str:
    """What pages call the effect of a head on the answer."""
    return f"what {explained.named} loses without the head, nats"


def ranked_heads(report: Report) -> pd.DataFrame:
    """The heads, those first without which most is lost: which read nothing of the prompt then but BOS."""
    heads = report.tables["bias_by_head"].rename(columns=HEAD_MEASURES)
    if report.explained is not None:
        heads.insert(2, ranking(report), report.tables["answer_heads"]["nats"])
    return heads.sort_values(ranking(report), ascending=False, kind="stable")


@checked
def build_report(
    model: KVModel,
    prompt: str | Chat | list[dict[str, str]],
    text: str | None = None,
    *,
    model_name: str | None = None,
    new_tokens: Count | None = None,
    temperature: TEMPERATURE = 0.0,
    seed: int = 0,
    dual: bool = False,
    method: str | ConversionMethod = "exact",
    by: UnitName | None = "sentence",
    about: str | None = None,
    answer: str | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> Report:
    """Convert ``prompt`` and measure on ``text`` how exact the conversion is, what the prompt changes, and which heads matter.

    Args:
        model: with a tokenizer, of either front end; no bias may be attached to it. What does not run on KVTransformerBridge is
            left out of the page and the tables, and the page says why.
        prompt: not empty; it gets a BOS by the model's default; or a chat, or its list of messages.
        text: not empty; tokenized separately, without BOS. Behind a chat it may be None: the text is then what the template
            writes behind the last message and the answer, the model's own unless one is given.
        model_name: the model's name in the report; None takes that of the configuration.
        new_tokens: how many tokens to generate in each condition; None generates 40, or as many as ``n_ctx`` has room for.
        temperature: 0 generates greedily; above 0 samples, with the same random numbers in the three conditions.
        seed: random seed for sampling; the global generators are not changed.
        dual: also analyze each head as a gradient step on the prompt's tokens.
        method: for softmax attention, how the prompt is converted, as in :func:`kvlens.convert_prompt`:
            ``Landmark(n_keys=32)``; by default every key is kept, which is exact.
        by: which units of the prompt are removed one at a time to explain the answer; None leaves the explanation out.
        about, answer: which words and which answer are explained, as in :func:`kvlens.explain`.
        on_progress: called with a description and the fraction done, in 0..1.

    Raises:
        KVLensError: options that the model or the method does not have, weights that are not finite, no tokenizer, an empty
            prompt or text, tokens outside the vocabulary, more tokens than ``n_ctx`` where positions are learned, more than
            there is room for with ``dual``.
    """
    listener = on_progress or (lambda description, done: None)
    converts_until = 0.04 if method == "exact" or isinstance(method, Exact) else SHARE_OF_A_FIT

    def converting(done: float) -> None:
        listener("converting the prompt", converts_until * done)

    def tell(description: str, done: float) -> None:
        listener(description, converts_until + (1 - converts_until) * done)

    _check_model(model)
    given = as_prompt(prompt)
    is_chat = isinstance(given, Chat)
    prompt_tokens = one_sequence(model, "prompt", given, prepend_bos=model.prepends_bos)
    cut_from, continued = given if is_chat else prompt_tokens, None if text is None else one_sequence(model, "text", text)
    if continued is None:
        prompt_tokens, begun, text_tokens = _with_answer(model, given, prompt_tokens, answer)
    else:
        begun = text_tokens = continued
    new_tokens = _check_lengths(model, len(prompt_tokens), len(begun), new_tokens)
    if dual:
        check_front_end("dual_losses", model)
        _check_dual_length(model, len(prompt_tokens))
    by = by if len(prompt_tokens) <= MOST_EXPLAINED else None
    missing = {name: reason for name in OF_THE_PAGE if (reason := reason_against(name, model)) is not None}

    def part(description: str, start: float, end: float) -> Callable[[float], None]:
        tell(description, start)
        return lambda done: tell(description, start + (end - start) * done)

    converting(0.0)
    bias = convert_prompt(model, prompt_tokens, on_progress=converting, method=method, verbose=False)
    tell("comparing predictions", 0.0)
    readings = read_text(model, prompt_tokens, text_tokens, bias=bias, residuals=True)
    errors = conversion_error(model, prompt_tokens, text_tokens, bias=bias, readings=readings)
    if not bool(errors["squared_norm"].map(lambda x: x < float("inf")).all()):
        raise KVLensError("the model's logits on the text are not finite: activations overflow; try --dtype float32")
    effect = prompt_effect(model, prompt_tokens, text_tokens, bias=bias, readings=readings)
    sequences = (model, prompt_tokens, text_tokens)
    with telling(part("ablating heads", 0.08, 0.16)):
        by_head = bias_by_head(*sequences, bias=bias)
    with telling(part("ablating layers", 0.16, 0.18)):
        by_layer = bias_by_layer(*sequences, bias=bias)
    everything = list(by_head[["layer", "head"]].itertuples(index=False, name=None))
    total = baseline_ablation(model, prompt_tokens, text_tokens, [everything], bias=bias).iloc[0]
    heads = copies = None
    if "head_details" not in missing:
        with telling(part("attention of heads", 0.18, 0.28)):
            heads = head_details(*sequences, bias=bias)
    if "prompt_copies" not in missing:
        with telling(part("looking for copies", 0.28, 0.32)):
            copies = prompt_copies(*sequences)
    generated = {}
    for i, condition in enumerate(SHOWN_CONDITIONS):
        tell(f"generating, {condition.replace('_', ' ')}", 0.32 + 0.08 * i / 3)
        generated[condition] = _generate(model, condition, prompt_tokens, begun, bias, new_tokens, temperature, seed)
    written = _generated_table(model, begun, generated)
    summary = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "model": model_facts(model, model_name),
        "prompt": {"text": joined(token_texts(model, prompt_tokens)) if is_chat else given, "n_tokens": len(prompt_tokens)},
        "text": {"text": text or joined(token_texts(model, text_tokens)), "n_tokens": len(text_tokens)},
        "answer": None,
        "continuation": continuation_figures(
            model, begun, {name: reading.logits[: len(begun)] for name, reading in readings.items()}
        ),
        "conversion": conversion_figures(bias, errors),
        "prompt_effect": effect_figures(effect),
        "notes": notes_on(model, prompt_tokens, effect, bias),
        "bias": {
            "n_numbers": bias.num_parameters,
            "holds": "b_KV and b_D" if bias.kind is None else "b_KV, b_D and the features' parameters",
            "position_offset": int(bias.position_offset),
            "kl_without_any_head": float(total["kl"]),
            "loss_change_without_any_head": float(total["loss_change"]),
            "heads": by_head.nlargest(10, "ablation_kl").to_dict("records"),
        },
        "generation": {
            "method": "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}, seed {seed}",
            "new_tokens": new_tokens,
            "begun": text or joined(token_texts(model, begun)),
            "converted_equals_with_prompt": bool(torch.equal(generated["converted"], generated["with_prompt"])),
            **{condition: joined(rows["token"]) for condition, rows in written.groupby("condition")},
        },
    }
    made = {
        "conversion_error": errors,
        "prompt_effect": effect,
        "prompt_by_depth": prompt_by_depth(model, prompt_tokens, text_tokens, readings=readings),
        "prompt_copies": copies,
        "bias_by_head": by_head,
        "bias_by_layer": by_layer,
        "layer_contributions": _contributions(model, bias, text_tokens, missing),
        "generated": written,
    }
    tables = {name: table for name, table in made.items() if table is not None}
    dual_steps: dict[str, Tensor] = {}
    if dual:
        tables |= _dual_tables(model, prompt_tokens, text_tokens)
        steps = tables["dual_losses"].groupby(["layer", "head"], as_index=False)[["log_loss_drop", "step_share"]].mean()
        dual_steps = {name: _by_head(steps, column, bias) for name, column in DUAL_COLORINGS.items()}
    explained, colorings = None, {}
    if by is not None:
        explained = explain(
            model,
            cut_from,
            continued,
            about=about,
            answer=answer,
            by=by,
            on_progress=lambda what, done: tell(what, 0.4 + done / 2),
        )
        tables |= {f"answer_{name}": table for name, table in explained.tables().items() if len(table)}
        tables["answer_heads"] = _answer_heads(model, prompt_tokens, begun, bias, by_head, explained)
        summary["answer"] = answer_figures(explained)
        colorings = {answer_effect(explained): _by_head(tables["answer_heads"], "nats", bias)}
    linked = None
    if "linked_shares" not in missing:
        colorings |= {ABLATION: _by_head(by_head, "ablation_kl", bias), **dual_steps}
        with telling(part("linking prompt and text", 0.92, 1.0)):
            linked = linked_shares(
                *sequences, bias=bias, colorings=colorings, without_zero=["dual loss drop (log)"], readings=readings
            )
    return Report(summary, tables, bias, heads, linked, _bias_share(model, bias, text_tokens), explained, missing)


def _with_answer(model: KVModel, chat: Any, tokens: Tensor, answer: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """A chat up to its last message; what its template writes behind that; and this with the answer, by default the model's."""
    if not isinstance(chat, Chat):
        raise KVLensError("text: a prompt that is no chat needs a text behind it, on which the predictions are compared")
    of_messages = [i for i, piece in enumerate(pieces_of_tokens(chat.layout(model))) if piece is not None]
    n = min(of_messages[-1] + 1, len(tokens) - 1)
    room = model.cfg.n_ctx - len(tokens) if model.cfg.has_position_limit else MOST_TOKENS
    said = responses(model, [tokens], min(MOST_TOKENS, room))[0] if answer is None else one_sequence(model, "answer", answer)
    return tokens[:n], tokens[n:], torch.cat([tokens[n:], torch.as_tensor(said, device=tokens.device)])


def _answer_heads(
    model: KVModel, prompt: Tensor, begun: Tensor, bias: KVBias, by_head: pd.DataFrame, explained: Explained
) -> pd.DataFrame:
    """What the heading claim loses when a head reads nothing of the prompt but BOS."""
    claim, heads = explained.claims.iloc[explained.about], by_head[["layer", "head"]]
    removals = [[pair] for pair in heads.itertuples(index=False, name=None)]

    def loss(n: int) -> pd.Series:
        """By which the loss rises, of the answer's first n tokens together with the text's before."""
        text = torch.cat([begun, explained.response_tokens[:n]])
        return (len(text) - 1) * baseline_ablation(model, prompt, text, removals, bias=bias)["loss_change"].fillna(0.0)

    return heads.assign(nats=loss(int(claim["stop"])) - loss(int(claim["start"])))


def _bias_share(model: KVModel, bias: KVBias, text: Tensor) -> Tensor:
    """How much of each head's output at each position of the text the bias makes up, mean over heads, [pos]."""
    outputs = bias_outputs(model, bias, text)
    shares = [share_by_size(of_bias.norm(dim=-1), rest.norm(dim=-1)) for of_bias, rest in zip(*outputs, strict=True)]
    return torch.cat(shares, dim=1).mean(dim=1).float().cpu()


def _contributions(model: KVModel, bias: KVBias, text: Tensor, missing: dict[str, str]) -> pd.DataFrame | None:
    """`layer_contributions`; None, with the reason in ``missing``, where heads do not write to the residual stream directly."""
    if "layer_contributions" in missing:
        return None
    try:
        return layer_contributions(model, bias, text)
    except IndirectHeads as error:
        missing["layer_contributions"] = str(error)
        return None


def _dual_tables(model: Any, prompt: Tensor, text: Tensor) -> dict[str, pd.DataFrame]:
    """The dual models of the text's tokens, whose demonstrations are the prompt's."""
    whole = torch.cat([prompt, text])
    return {
        "dual_losses": dual_losses(model, whole, n_demonstrations=len(prompt)),
        "dual_demonstrations": dual_demonstrations(model, whole, n_demonstrations=len(prompt)),
    }


def _by_head(table: pd.DataFrame, column: str, bias: KVBias) -> Tensor:
    """A column of a table with one row per head as [layer, head]; NaN for heads that a layer does not have."""
    found = torch.full((bias.n_layers, max(map(bias.n_heads_of, range(bias.n_layers)))), torch.nan, dtype=torch.float64)
    found[table["layer"].tolist(), table["head"].tolist()] = torch.tensor(table[column].tolist(), dtype=torch.float64)
    return found


# --- checks ----------------------------------------------------------------------------------------------------------


def _check_model(model: Any) -> None:
    if model.attached_kv_bias is not None:
        raise KVLensError("a bias is attached to this model; detach it first (model.detach_kv_bias())")
    broken = [name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())]
    if broken:
        raise KVLensError(f"these weights hold NaN or infinity: {', '.join(broken[:3])}; train or save the model again")
    if model.tokenizer is None:
        raise KVLensError(
            "this model has no tokenizer, so it cannot read text: save it together with its tokenizer, or, for a llama2.c "
            "checkpoint, name the tokenizer's file (--tokenizer)"
        )


def _check_lengths(model: KVModel, prompt: int, text: int, new_tokens: int | None) -> int:
    """How many tokens are generated; raise KVLensError if they, or prompt and text alone, are too many."""
    room = model.cfg.n_ctx - prompt - text if model.cfg.has_position_limit else NEW_TOKENS
    new_tokens = max(1, min(NEW_TOKENS, room)) if new_tokens is None else new_tokens
    if new_tokens > room and model.cfg.has_position_limit:
        raise KVLensError(
            f"prompt ({prompt} tokens), text ({text}) and new tokens ({new_tokens}) make {prompt + text + new_tokens}, and "
            f"this model's positions end at n_ctx={model.cfg.n_ctx}; shorten one of the three"
        )
    return new_tokens


def _check_dual_length(model: KVModel, n_prompt: int) -> None:
    if n_prompt**2 * model.cfg.n_heads > MOST_PAIRS:
        longest = math.isqrt(MOST_PAIRS // model.cfg.n_heads)
        raise KVLensError(
            f"dual: the dual models compare every two of the prompt's tokens, {n_prompt:,} here; for this model's "
            f"{model.cfg.n_heads} heads there is room for {longest:,}. Leave dual out, or shorten the prompt"
        )


# --- generation ------------------------------------------------------------------------------------------------------


def _generate(
    model: KVModel,
    condition: str,
    prompt: Tensor,
    text: Tensor,
    bias: KVBias,
    new_tokens: int,
    temperature: float,
    seed: int,
) -> Tensor:
    """The generated tokens alone, [pos]; they end with the EOS where the model writes one."""
    before = prompt if condition == "with_prompt" else prompt[:0]
    start = torch.cat([before, text])[None]

    def run() -> Tensor:
        return model.generate(
            start,
            max_new_tokens=new_tokens,
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            stop_at_eos=model.tokenizer.eos_token_id is not None,
            return_type="tokens",
            verbose=False,
        )[0, start.shape[1] :].clone()

    with torch.random.fork_rng(devices=[start.device] if start.is_cuda else []):
        torch.manual_seed(seed)
        if condition == "with_prompt":
            return run()
        with model.kv_bias(bias if condition == "converted" else baseline_of(model, prompt).select_prompt(0)):
            return run()


def _generated_table(model: KVModel, text: Tensor, generated: dict[str, Tensor]) -> pd.DataFrame:
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "condition": condition,
                    "position": range(len(tokens)),
                    "token_id": tokens.tolist(),
                    "token": token_texts(model, torch.cat([text, tokens]))[len(text) :],
                }
            )
            for condition, tokens in generated.items()
        ],
        ignore_index=True,
    )

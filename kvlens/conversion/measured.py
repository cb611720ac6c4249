"""What is measured of a bias: errors of the model's answers on held-out texts, and recall of the prompt's own words.

:class:`kvlens.kv_bias.AnswerErrors` defines the errors, which take three passes over the texts: with the prompt, with the bias,
and with neither. :mod:`kvlens.kv_bias.fit` defines the recall, which takes as many over the prompt's sentences.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvlens.chat import PLACEHOLDER, has_chat_template, written_behind
from kvlens.conversion.prompt import PromptBatch
from kvlens.conversion.prompt_pass import ConvertedExactly, as_batch, continued, rows_at_once, rows_of
from kvlens.kv_bias import AnswerErrors, KVBias, Layer
from kvlens.kv_bias.fit import MATTERS, Recall, RecalledWord
from kvlens.marks import without_marks
from kvlens.memory import NUMBERS_AT_ONCE, NUMBERS_PER_PASS, by_device
from kvlens.model.protocol import KVModel
from kvlens.texts import Response
from kvlens.units import Layout, always_there, cut

ROWS_AT_ONCE = 32
"""Texts in one pass. The logits of three passes over them are held at once, and their logarithms, in float64."""


Without = tuple[KVBias, str]
"""The bias that remains when the prompt has not been read, and a description of it."""


def without_prompt(model: KVModel, prompt: PromptBatch, exact: ConvertedExactly, old: KVBias | None) -> Without:
    """Remove the prompt's keys but leave the text at its position, and keep whatever does not belong to the prompt.

    That is the bias from which the conversion continues, or the BOS if every prompt of the batch begins with it, or nothing.
    (With the BOS directly before it, a text would be at the beginning of a document, and the answers would differ by more than
    the effect of the prompt.)
    """
    bos = None if model.tokenizer is None else model.tokenizer.bos_token_id
    bias = exact.bias
    recurs = any(layer.state is not None for layer in bias.layers)
    keeps_bos = old is None and not recurs and bos is not None and bool((prompt.tokens[:, 0] == bos).all())
    before = [layer.map(torch.zeros_like) for layer in bias.layers] if old is None else as_batch(old, bias.n_rows).layers

    def rest(layer: Layer, before: Layer) -> Layer:
        first = layer.of_attention(lambda keys: keys.some(torch.tensor([0])).times(float(keeps_bos)))
        return replace(first.with_state_of(before), last=before.last)

    left = bias.with_layers(list(map(rest, bias.layers, before)))
    if old is not None:
        return continued(old, left), "what was converted before"
    return left, "the prompt's BOS" if keeps_bos else "nothing"


@torch.no_grad()
def answer_errors(
    model: KVModel, whole: KVBias, converted: KVBias, without: Without, texts: Int[Tensor, "batch text pos"]
) -> AnswerErrors:
    """The errors of ``converted`` on ``texts``; ``whole`` represents the prompt. Takes three forward passes over the texts."""
    (nothing, words), (batch, n_texts, n_positions) = without, texts.shape
    flat, rows = texts.flatten(0, 1), torch.arange(batch).repeat_interleave(n_texts)
    most = min(ROWS_AT_ONCE, max(1, by_device(NUMBERS_AT_ONCE, texts.device) // (4 * n_positions * model.cfg.d_vocab_out)))
    at_once = rows_at_once(model, whole, n_positions, most)
    found = []
    for part in torch.arange(len(rows)).split(at_once):
        tokens = flat[part.to(flat.device)]
        found.append(_by_position(*(_logits(model, rows_of(b, rows[part]), tokens) for b in (whole, converted, nothing))))
    error, size, effect, kl = (torch.cat(x).view(texts.shape) for x in zip(*found, strict=True))
    return AnswerErrors.of_positions(error, size, effect, kl, words)


def _logits(model: KVModel, bias: KVBias, tokens: Int[Tensor, "text pos"]) -> Float[Tensor, "text pos vocab"]:
    with model.holding(bias):
        return model(tokens, attention_mask=torch.ones_like(tokens)).double()


def _by_position(
    old: Float[Tensor, "text pos vocab"], new: Float[Tensor, "text pos vocab"], without: Float[Tensor, "text pos vocab"]
) -> tuple[Tensor, ...]:
    """||new - old||, ||old||, ||without - old|| and KL(old || new) at each position, [text, pos] each."""
    log_old, log_new = old.log_softmax(dim=-1), new.log_softmax(dim=-1)
    kl = (log_old.exp() * (log_old - log_new)).sum(dim=-1)
    return (new - old).norm(dim=-1), old.norm(dim=-1), (without - old).norm(dim=-1), kl


Said = tuple[Int[Tensor, " lead_pos"], Int[Tensor, " pos"]]
"""What precedes a sentence, and the sentence, as tokens."""


@torch.no_grad()
def recalled(model: KVModel, layout: Layout, whole: KVBias, bias: KVBias) -> Recall | None:
    """The recall of a bias, on sentences without marks of a chat template; None if the prompt is no text, has no such sentence,
    or leaves no room for one behind it.

    Args:
        layout: of the prompt.
        whole, bias: its exact bias, and the one that is measured; nothing else is attached.
    """
    if model.tokenizer is None or not any(layout.text[start:stop].strip() for _, start, stop in layout.pieces):
        return None
    lead = lead_of(model, layout)
    n_lead = len(model.tokenizer(lead, add_special_tokens=False)["input_ids"])
    room = (
        model.cfg.n_ctx - int(torch.as_tensor(whole.position_offset).max()) - n_lead if model.cfg.has_position_limit else None
    )
    if room is not None and room < 2:
        return None
    sentences = without_marks(model.tokenizer, (unit.text.strip() for unit in cut(model, layout, "sentence")))
    if not sentences:
        return None
    base = layout.tokens[always_there(layout).to(layout.tokens.device)]
    return recall_of(model, sentences, whole, bias, base, lead, room)


def recall_of(
    model: KVModel,
    sentences: Sequence[str],
    whole: KVBias,
    bias: KVBias,
    base: Int[Tensor, " base_pos"],
    lead: str,
    room: int | None = None,
) -> Recall:
    """The recall of given sentences.

    Args:
        base: what is always there, with which sentences are read without the prompt.
        lead: text between prompt and sentence; empty where the prompt ends with it, and the first word of each sentence, which
            the prompt's last token predicts, is then left out.
        room: how many tokens of a sentence are read; None for all.
    """
    said = [_said(model, lead, sentence, room, base.device) for sentence in sentences]
    with_prompt, under, without = (_read(model, said, attached, base) for attached in (whole, bias, None))
    words = []
    for number, (before, tokens) in enumerate(said):
        for word in Response.of(model, before, tokens).words:
            some = slice(word.start, word.stop)
            if not word.is_word or word.start + len(before) == 0:
                continue
            p, b, w = (log_p[number][0][some].sum() for log_p in (with_prompt, under, without))
            if p - w > MATTERS:
                first = (bool(of[number][1][some].all()) for of in (with_prompt, under))
                words.append(RecalledWord(number, word.text, float(p - w), float(p - b), *first))
    return Recall(tuple(sentences), tuple(words))


def lead_of(model: KVModel, layout: Layout) -> str:
    """What stands between a prompt and what the model says: the chat template's marks, if the prompt does not end with them."""
    if not has_chat_template(model):
        return "\n"
    behind = written_behind(model, ("user", PLACEHOLDER))
    lead = "\n" if behind is None else behind
    ids = model.tokenizer(lead, add_special_tokens=False)["input_ids"]
    return "" if layout.tokens[-len(ids) :].tolist() == ids else lead


def _said(model: KVModel, lead: str, sentence: str, room: int | None, device: torch.device | str | None) -> Said:
    ids = [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (lead, sentence)]
    ids[1] = ids[1][:room]
    before, tokens = (torch.tensor(each, dtype=torch.long, device=device) for each in ids)
    return before, tokens


def _read(
    model: KVModel, said: Sequence[Said], attached: KVBias | None, base: Int[Tensor, " base_pos"]
) -> list[tuple[Float[Tensor, " pos"], Tensor]]:
    """Of each token of the sentences the log-probability, and whether it is the first choice; 0 and True for a first one."""
    rows = list(map(torch.cat, said))
    left = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    with model.kv_bias(attached) if attached is not None else contextlib.nullcontext():
        while left:
            at_once = max(1, NUMBERS_PER_PASS // (len(rows[left[0]]) * model.cfg.d_vocab))
            some, left = left[:at_once], left[at_once:]
            tokens = pad_sequence([rows[i] for i in some], batch_first=True)
            before = None if attached is not None or not len(base) else base.expand(len(some), -1)
            logits = model.logits_on(tokens, tokens.shape[1], before=before)[:, :-1]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            log_p = logits.log_softmax(dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]
            is_first = logits.argmax(dim=-1) == tokens[:, 1:]
            found |= zip(some, zip(log_p.cpu(), is_first.cpu(), strict=True), strict=True)
    cut_out = []
    for i, (lead, tokens) in enumerate(said):
        (log_p, is_first), n, first = found[i], len(tokens), len(lead) - 1
        if first < 0:
            log_p, is_first, first = torch.cat([log_p.new_zeros(1), log_p]), torch.cat([is_first.new_ones(1), is_first]), 0
        cut_out.append((log_p[first : first + n], is_first[first : first + n]))
    return cut_out

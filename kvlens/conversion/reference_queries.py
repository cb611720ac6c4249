"""Reference text: what may follow the prompt, whose queries are used for the fits. The exact bias replaces the prompt then.

``None``, the default: the prompt repeated and its sentences with blanks to fill in (:mod:`kvlens.conversion.prompt_texts`),
which find the keys that a question about it may need, and the model's own continuations, sampled at temperature 1, which keep
the error on what it would write small. Texts of one length are one group, [batch, text, pos]; every group is fitted. Errors are
measured on other continuations.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.arguments import MOST_ASKED
from kvlens.checks import Seed, Within
from kvlens.conversion.prompt import PromptBatch, prompt_batch
from kvlens.conversion.prompt_pass import ConvertedExactly, rows_at_once, rows_of
from kvlens.conversion.prompt_texts import Texts, blanks, repetition, turn
from kvlens.errors import KVLensError
from kvlens.kv_bias import KVBias
from kvlens.memory import NUMBERS_AT_ONCE, by_device
from kvlens.model.protocol import KVModel
from kvlens.ops.landmarks import Queries


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options for the reference text, which represents text that may follow the prompt.

    Attributes:
        reference: "prompt", the prompt repeated (behind an instruction where the tokenizer has a chat template); "own", the
            model's own continuations of the prompt; None for both, and for the prompt's sentences with blanks to fill in. Or
            other text: a string; tokens [pos] or [text, pos]; a list of strings, of tokens, or of pairs (question, answer);
            or a function of the model and the prompt's tokens [batch, pos] that returns one of these.
        n_continuations: number of continuations that the model samples at temperature 1.
        continuation_length: number of tokens in each.
        n_held_out: number of further continuations, not used for fitting, on which errors are measured: of the heads, and of
            the model's answers (``bias.fit.answers``); 0 skips the answers and measures the heads on one. Each is read four
            times.
        seed: seed for the continuations and for anything else in a method that is random.
    """

    reference: str | Tensor | list | Callable | None = None
    n_continuations: Annotated[int, Within(2, MOST_ASKED)] = 24
    continuation_length: Annotated[int, Within(2, MOST_ASKED)] = 64
    n_held_out: Annotated[int, Within(0, MOST_ASKED)] = 3
    seed: Seed = 0

    def to_json(self) -> dict[str, Any]:
        """The options as JSON types; a given reference text is not stored, only the fact that it was given."""
        names = {None: "prompt, blanks and own continuations", "prompt": "prompt", "own": "own continuations"}
        given = self.reference if self.reference is None or isinstance(self.reference, str) else "given"
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "reference"}
        return {**kept, "reference": names.get(given, "given")}


ROWS_AT_ONCE = 32
WHAT = "convert_prompt: reference"


def reference_text(
    model: KVModel,
    prompt: PromptBatch,
    exact: ConvertedExactly,
    whole: KVBias,
    options: TextOptions,
    fits: bool = True,
    on_progress: Callable[[float], None] = lambda done: None,
) -> tuple[Texts, Int[Tensor, "batch _ _"], int]:
    """The reference texts of every prompt.

    Args:
        whole: the exact bias, including the one that it continues.
        fits: False if a method fits nothing to text: then there are only texts for measuring.

    Returns:
        Texts for the fit, texts held out for measuring, and how many tokens were sampled for each prompt.

    Raises:
        KVLensError: an empty or unreadable text, or not enough positions left within ``n_ctx``.
    """
    given, room = options.reference, room_after(model, whole)
    is_own = given is None or _is(given, "own")
    seen: Texts = []
    if fits and (given is None or _is(given, "prompt")):
        seen = [repetition(model, prompt, room)]
        seen += blanks(model, prompt, room) if given is None else []
    elif fits and not is_own:
        seen = _read(model, given(model, prompt.tokens) if callable(given) else given, len(prompt.tokens), room)
    n_own, n_held_out = options.n_continuations * (fits and is_own), max(1, options.n_held_out)
    length = min(options.continuation_length, room)
    own = sample_continuations(model, exact, whole, n_own + n_held_out, length, options.seed, on_progress)
    seen += [own[:, :n_own]] if n_own else []
    return seen, own[:, n_own:], own[0].numel()


def _is(given: object, word: str) -> bool:
    return isinstance(given, str) and given == word


def _read(model: KVModel, given: object, batch: int, room: int) -> Texts:
    """Given texts: a string, tokens [pos] or [text, pos], or a list of strings, of tokens, or of pairs (question, answer)."""
    each = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    rows = [row for one in each for row in _rows(model, one)]
    longest = max(map(len, rows))
    if longest > room:
        raise KVLensError(
            f"{WHAT}: a text of {longest:,} tokens does not fit after the prompt, where n_ctx={model.cfg.n_ctx:,} leaves "
            f"{room:,} positions; give shorter texts"
        )
    groups = [torch.stack([row for row in rows if len(row) == n]) for n in dict.fromkeys(map(len, rows))]
    return [group.expand(batch, -1, -1) for group in groups]


def _rows(model: KVModel, one: Any) -> list[Tensor]:
    if not isinstance(one, tuple):
        return list(prompt_batch(model, one, prepend_bos=False, what=WHAT).tokens)
    question, answer = one
    lead = turn(model, question)
    read = prompt_batch(model, answer if lead else f"{question} {answer}", prepend_bos=False, what=WHAT).tokens[0]
    return [torch.cat([read.new_tensor(lead), read])]


def room_after(model: KVModel, whole: KVBias) -> int:
    """The number of positions left after the prompt. Raises KVLensError if there are fewer than 2."""
    if not model.cfg.has_position_limit:
        return 10**9
    room = model.cfg.n_ctx - int(torch.as_tensor(whole.position_offset).max())
    if room < 2:
        raise KVLensError(
            f"convert_prompt: the prompt fills n_ctx={model.cfg.n_ctx}: no reference text fits after it, nor would any other "
            'text; shorten the prompt, or use method="exact"'
        )
    return room


@torch.no_grad()
def sample_continuations(
    model: KVModel,
    exact: ConvertedExactly,
    whole: KVBias,
    n: int,
    length: int,
    seed: int,
    on_progress: Callable[[float], None] = lambda done: None,
) -> Int[Tensor, "batch text pos"]:
    """``n`` texts per prompt, sampled at temperature 1 from what the model would write next."""
    generator = torch.Generator().manual_seed(seed)
    logits = model.logits_of(exact.last_residual)[:, 0]
    batch = logits.shape[0]
    rows = torch.arange(batch).repeat_interleave(n)
    at_once = min(ROWS_AT_ONCE, max(1, 2 * by_device(NUMBERS_AT_ONCE, whole.device) // whole.attention[0].b_kv[0].numel()))
    texts, tokens, n_tokens = [], itertools.count(1), -(-len(rows) // at_once) * length
    for part in rows.split(at_once):
        with model.holding(rows_of(whole, part)):
            first = logits[part.to(logits.device)]
            texts.append(sampled_text(model, first, None, length, generator, lambda: on_progress(next(tokens) / n_tokens)))
    return torch.cat(texts).view(batch, n, length)


def sampled_text(
    model: KVModel,
    logits: Float[Tensor, "text vocab"],
    cache: Any,
    length: int,
    generator: torch.Generator,
    on_token: Callable[[], None] = lambda: None,
) -> Int[Tensor, "text pos"]:
    """``length`` tokens sampled at temperature 1, of which the first follows ``logits`` and what ``cache`` holds."""
    text: list[Tensor] = []
    for step in range(length):
        text.append(torch.multinomial(logits.float().cpu().softmax(dim=-1), 1, generator=generator).to(logits.device))
        if step + 1 < length:
            logits, cache = model.next_logits(text[-1], cache)
        on_token()
    return torch.cat(text, dim=1)


@torch.no_grad()
def queries_under_bias(
    model: KVModel, bias: KVBias, tokens: Int[Tensor, "batch text pos"], layers: range | None = None
) -> list[Queries]:
    """Queries, outputs and log-normalizers of texts of one length, with ``bias`` replacing the prompt: one record per layer."""
    batch, n_texts, pos = tokens.shape
    rows = torch.arange(batch).repeat_interleave(n_texts)
    whole: list[tuple[Tensor, ...]] = []
    at_once = rows_at_once(model, bias, pos, ROWS_AT_ONCE)
    for part in torch.arange(len(rows), device=tokens.device).split(at_once):
        with model.holding(rows_of(bias, rows[part.cpu()])):
            read = model.read_queries(tokens.flatten(0, 1)[part], layers)
        if not whole:  # filled part by part, since concatenating parts at the end would hold them twice
            whole = [tuple(x.new_empty(len(rows), *x.shape[1:]) for x in layer) for layer in read]
        for into, layer in zip(whole, read, strict=True):
            for every, some in zip(into, layer, strict=True):
                every[part.to(every.device)] = some
    positions = torch.arange(pos, device=tokens.device).repeat(n_texts)
    by_prompt = [[x.view(batch, n_texts * pos, *x.shape[2:]) for x in layer] for layer in whole]
    return [Queries(q, z, log_n, positions) for q, z, log_n in by_prompt]

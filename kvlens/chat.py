"""A chat as a prompt: messages, written as the tokenizer's own template writes them.

What a message's section is in the whole text is found by writing the chat once more with a placeholder in its place: what
stands before and behind it there stands before and behind the section here, whatever the template does with it (many strip
white space, some put the system's message into the user's). Nothing is searched by its words.

What stands in a message is text: special tokens of the template in it begin no message (:mod:`kvlens.marks`). Of the user's
last message only the question is never removed (:func:`question_in`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.arguments import Span, check_characters, check_tokenizer
from kvlens.checks import ensure
from kvlens.errors import KVLensError, brief, first_line, nearest, warn
from kvlens.marks import ROLES, ReadText, marks_in, marks_of, read, read_as_text
from kvlens.model import KVModel
from kvlens.question import question_in
from kvlens.templates import written_by_template
from kvlens.tokenizer import warn_of_unknown_words
from kvlens.units import By, Layout, Passage, Unit, cut, layout_of_tokens, tiled

Messages = list[dict[str, str]]
Marks = Literal["as text", "as they are"]
PLACEHOLDER = "KVLENSMARK"
MARKS_ARE_TEXT = (
    "would be marks (special tokens) of the chat template; they are read as plain text, so that they begin no message; "
    "Chat(..., marks='as they are') reads them as Transformers does"
)
ROLES_ARE_WORDS = (
    "is what the chat template itself writes around messages; it writes roles as plain words, so that the model cannot tell "
    "this text from a real message: remove it if you do not trust it"
)


@dataclass(frozen=True)
class _Section:
    """A section of a message's content: cut into units under this name, or the question, or (neither) a heading."""

    text: str
    name: str | None = None
    is_question: bool = False


@dataclass(frozen=True, init=False)
class Chat:
    """A list of messages that a model with a chat template reads as a prompt, up to where its answer begins.

    Never removed, in any counterfactual, are what the template writes around the messages, and the question: the words of the
    user's last message that ask (:func:`question_in`), or what :meth:`ask` was given. The rest is cut into units.

    >>> chat = Chat.ask("Where is the new office?", documents={"minutes.txt": "The office moves to Rotterdam."})
    >>> print(chat.messages[0]["content"])
    minutes.txt:
    The office moves to Rotterdam.
    <BLANKLINE>
    Where is the new office?

    Args:
        messages: a list of ``{"role": ..., "content": ...}``; the roles are system, user, assistant and tool.
        question: the words of the user's last message that are never removed; None: :func:`question_in` chooses them.
        marks: "as text": a special token of the template that is written out in a message, ``<|im_start|>``, is read as text,
            and a warning names the message; "as they are": it is read as that token, as in Transformers, so that one message
            may contain others, of any role.

    Raises:
        KVLensError: no message, an unknown role, a content that is missing, empty or no string, other keys, a last message of
            the assistant; a question that does not stand once in the user's last message; another word for ``marks``.
    """

    _turns: tuple[tuple[str, tuple[_Section, ...]], ...]
    _marks: Marks

    def __init__(self, messages: Sequence[Mapping[str, str]], *, question: str | None = None, marks: Marks = "as text") -> None:
        checked_messages = _checked(messages)
        roles = [message["role"] for message in checked_messages]
        last = max((i for i, role in enumerate(roles) if role == "user"), default=None)
        if question is not None and last is None:
            raise KVLensError("question: it chooses words of the user's last message, and the user has none here; leave it out")
        counts, numbers, turns = Counter(roles), Counter[str](), []
        for i, (role, content) in enumerate((message["role"], message["content"]) for message in checked_messages):
            numbers[role] += 1
            name = role if counts[role] == 1 else f"{role} {numbers[role]}"
            turns.append((role, _asking(content, name, question) if i == last else (_Section(content, name),)))
        object.__setattr__(self, "_turns", tuple(turns))
        object.__setattr__(self, "_marks", ensure("marks", Marks, marks))

    @classmethod
    def ask(
        cls,
        question: str,
        documents: Mapping[str, str] | Sequence[str] | None = None,
        system: str | None = None,
        *,
        marks: Marks = "as text",
    ) -> "Chat":
        """A question about documents: one message, of each document's name, its text and a blank line, then the question.

        Args:
            question: never removed, and no unit.
            documents: name -> text; or texts, which are called "document 1" and so on. A name is in no unit, except in an
                explanation (:func:`kvlens.explain`) of an answer that has a word of it.
            system: the system's message, which is cut into units, too.
            marks: as of :class:`Chat`.

        Raises:
            KVLensError: a question, document, name or system's message that is empty or no string; another word for ``marks``.
        """
        named = _named_documents(documents)
        sections = [
            section
            for name, text in named
            for section in (_Section(f"{name}:\n"), _Section(text.lstrip("\n").rstrip(), name), _Section("\n\n"))
        ]
        sections.append(_Section(_text("question", question), is_question=True))
        first = [] if system is None else [{"role": "system", "content": _text("system", system)}]
        chat = cls([*first, {"role": "user", "content": "".join(section.text for section in sections)}], marks=marks)
        object.__setattr__(chat, "_turns", (*chat._turns[:-1], ("user", tuple(sections))))
        return chat

    @property
    def messages(self) -> Messages:
        """``[{"role": ..., "content": ...}, ...]``"""
        return [{"role": role, "content": "".join(section.text for section in sections)} for role, sections in self._turns]

    def text(self, model: KVModel) -> str:
        """The whole prompt as text, as the tokenizer's own template writes it, up to where the answer begins.

        Raises:
            KVLensError: no tokenizer, no chat template, a template that refuses the messages (what it says is quoted).
        """
        return written_messages(model, self.messages)

    def tokens(self, model: KVModel) -> Int[Tensor, " pos"]:
        """The tokens of :meth:`text`; marks in messages are text. A BOS is there if the template writes one; none is added.

        Raises:
            KVLensError: as :meth:`text`; a chat that leaves no room for an answer in the model's context; marks in a message of
                a template that writes it in a way that depends on its words, or of a slow tokenizer.
        """
        text = self.text(model)
        return self._tokens(model, text, self._read(model, text)[0])

    def split(self, model: KVModel) -> tuple[Int[Tensor, " prompt_pos"], Int[Tensor, " text_pos"]]:
        """The tokens in front of the question, which :func:`kvlens.convert_prompt` makes a bias of, and those that follow.

        They are the chat's own tokens, so that both together are :meth:`tokens`; a question that is tokenized by itself may
        have others. Where nobody asks, as in a system's message alone, what follows is what begins the answer.

        Raises:
            KVLensError: as :meth:`layout`; nothing stands in front of the question.
        """
        layout = self.layout(model)
        edge = layout.asked[0].start if layout.asked else len(written_messages(model, self.messages, begin_answer=False))
        n = sum(stop <= edge for _, stop in layout.spans)
        if not n:
            raise KVLensError("messages: nothing stands in front of the question; give what it is about, or a system's message")
        return layout.tokens[:n], layout.tokens[n:]

    def _tokens(self, model: KVModel, text: str, ids: list[int]) -> Int[Tensor, " pos"]:
        tokens = torch.tensor(ids, device=model.cfg.device)
        self._check_room(model, len(tokens))
        model.check_tokens(tokens)
        warn_of_unknown_words(model.tokenizer, text, tokens)
        return tokens

    def _read(self, model: KVModel, text: str) -> ReadText:
        if self._marks == "as they are":
            return read(model.tokenizer, text)
        marks = marks_of(model.tokenizer)
        self._warn_of_roles_in_words(model, marks.values())
        if not self._warn_of(lambda words: marks_in(model.tokenizer, marks, words), MARKS_ARE_TEXT):
            return read(model.tokenizer, text)
        words = [self._place(model, text, turn) for turn in range(len(self._turns))]
        return read_as_text(model.tokenizer, marks, text, words)

    def _warn_of_roles_in_words(self, model: KVModel, marks: Iterable[str]) -> None:
        """Warn of messages that have what the template writes between messages, where that is words and no mark."""
        blank = [{"role": role, "content": PLACEHOLDER} for role, _ in self._turns]
        first, *others = (part.strip() for part in written_messages(model, blank).split(PLACEHOLDER))
        if others and not any(mark in others[-1] for mark in marks):
            first = first.removeprefix(model.tokenizer.bos_token or "").strip()
        in_words = [part for part in dict.fromkeys([first, *others]) if not any(mark in part for mark in marks)]
        in_words = [part for part in in_words if any(map(str.isalpha, part))]
        self._warn_of(lambda words: [part for part in in_words if part in words], ROLES_ARE_WORDS)

    def _warn_of(self, found_in: Callable[[str], Sequence[str]], what: str) -> bool:
        """Whether something is found in a message; a warning says what, and in which parts of the chat."""
        found, where = dict[str, None](), dict[str, None]()
        for role, sections in self._turns:
            if here := found_in("".join(section.text for section in sections)):
                found |= dict.fromkeys(here)
                where |= dict.fromkeys([_named(section) for section in sections if found_in(section.text)] or [role])
        if found:
            warn(f"messages: {', '.join(found)} in {' and '.join(where)} {what}")
        return bool(found)

    def units(self, model: KVModel, by: By = "sentence") -> list[Unit]:
        """What can be taken out of the chat: see :func:`prompt_units`."""
        return cut(model, self.layout(model), by)

    def layout(self, model: KVModel) -> Layout:
        """The text, its tokens, and where messages and documents stand in it.

        Raises:
            KVLensError: as :meth:`tokens`; a tokenizer that does not say where its tokens stand; a template that leaves out a
                message, or writes it twice, or in a way that depends on its words.
        """
        text = self.text(model)
        ids, spans = self._read(model, text)
        if spans is None:
            raise KVLensError("units of a chat need a fast tokenizer, which says where each token stands in the text")
        tokens = self._tokens(model, text, ids)
        pieces: list[Passage] = []
        asked: list[Passage] = []
        names: list[Passage] = []
        for turn, (_, sections) in enumerate(self._turns):
            for at, section in enumerate(sections):
                if not section.text.strip():
                    continue
                start, stop = self._place(model, text, turn, at)
                if section.name is not None or section.is_question:
                    (asked if section.name is None else pieces).append(Passage(section.name or "question", start, stop))
                else:
                    names.append(Passage(f"the name of document {len(names) + 1}", start, stop))
        return Layout(text, tokens, tiled(spans), sorted(pieces, key=lambda piece: piece.start), asked, names)

    def _place(self, model: KVModel, text: str, turn: int, at: int | None = None) -> Span:
        """The characters that the template makes of one section of a message, or of all of it."""
        placeholder = next(name for i in range(len(text)) if (name := f"KVLENS{i}PART") not in text)
        messages, sections = self.messages, [section.text for section in self._turns[turn][1]]
        parts = [placeholder] if at is None else [*sections[:at], placeholder, *sections[at + 1 :]]
        messages[turn]["content"] = "".join(parts)
        pieces = written_messages(model, messages).split(placeholder)
        before, behind = pieces[0], pieces[-1]
        start, stop = len(before), len(text) - len(behind)
        if len(pieces) != 2 or start > stop or not (text.startswith(before) and text.endswith(behind)):
            how = {1: "leaves out", 2: "writes, in a way that depends on its words,"}.get(len(pieces), "writes more than once")
            raise KVLensError(
                f"messages: the tokenizer's chat template {how} message {turn + 1} ({messages[turn]['role']}), so that "
                "its parts cannot be told from the template's own text; leave that message out, or give the prompt as text"
            )
        return start, stop

    def _check_room(self, model: KVModel, n_tokens: int) -> None:
        """Raise KVLensError if no token of an answer has room behind the chat."""
        if not model.cfg.has_position_limit or n_tokens < model.cfg.n_ctx:
            return
        sections = [one for _, several in self._turns for one in several if one.name is not None or one.is_question]
        sizes = [len(model.tokenizer(section.text, add_special_tokens=False)["input_ids"]) for section in sections]
        size, section = max(zip(sizes, sections, strict=True), key=lambda pair: pair[0])
        raise KVLensError(
            f"messages: the chat has {n_tokens:,} tokens, and the model's context n_ctx={model.cfg.n_ctx:,} leaves no room for "
            f"an answer; shorten it ({_named(section)} alone has {size:,}), or leave out documents or messages"
        )


def _named(section: _Section) -> str:
    return section.name or ("the question" if section.is_question else "the name of a document")


def _checked(messages: object) -> Messages:
    given = messages if isinstance(messages, Sequence) and len(messages) else [[messages]]  # one dict is no list of them
    return [_checked_message(i, message, len(given)) for i, message in enumerate(given, start=1)]


def _checked_message(i: int, message: Any, n: int) -> dict[str, str]:
    role, content = (message.get(name) for name in ("role", "content")) if isinstance(message, Mapping) else (None, None)
    if not isinstance(content, str) or not content.strip() or len(message) != 2:
        raise KVLensError(f'messages: message {i}: expected {{"role": ..., "content": "some text"}}, got {brief(message)}')
    if role not in ROLES:
        came = "none" if role is None else brief(role)
        raise KVLensError(
            f"messages: message {i}: the role must be one of {', '.join(ROLES)}, got {came}{nearest(role, ROLES)}"
        )
    check_characters(f"messages: message {i} ({role})", content)
    if i == n and role == "assistant":
        raise KVLensError(
            "messages: the last one is the assistant's, and the model answers what stands before; leave it out, or give its "
            "beginning as the text behind the prompt"
        )
    return {"role": role, "content": content}


def _asking(message: str, name: str, question: str | None) -> tuple[_Section, ...]:
    """The sections of the user's last message: the question, and what stands before and behind it."""
    if question is None:
        start, stop = question_in(message)
    elif message.count(_text("question", question)) == 1:
        start = message.index(question)
        stop = start + len(question)
    else:
        raise KVLensError(
            f"question: {brief(question)} occurs {message.count(question)} times in the user's last message, expected "
            "once; copy from it the words that ask, with enough of them to be the only ones"
        )
    before, behind = message[:start].rstrip(), message[stop:].lstrip()
    n_behind = len(message) - len(behind) if behind else len(message)
    sections = [_Section(before, name), _Section(message[len(before) : start]), _Section(message[start:stop], is_question=True)]
    sections += [_Section(message[stop:n_behind]), _Section(behind, name)]
    return tuple(section for section in sections if section.text)


def _text(what: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise KVLensError(f"{what}: expected a string that is not empty, got {brief(value)}")
    return value


def _named_documents(documents: Mapping[str, str] | Sequence[str] | str | None) -> list[tuple[str, str]]:
    if documents is None:
        return []
    if isinstance(documents, Mapping):
        return [(_text("the name of a document", name), _text(f"document {name}", text)) for name, text in documents.items()]
    documents = [documents] if isinstance(documents, str) else documents
    if not isinstance(documents, Sequence):
        raise KVLensError(f"documents: expected texts by name, or a list of texts, got {brief(documents)}")
    return [(f"document {i}", _text(f"document {i}", text)) for i, text in enumerate(documents, start=1)]


def written_behind(model: KVModel, *turns: tuple[str, str]) -> str | None:
    """What the template writes behind the turn (role, text) whose text is :data:`PLACEHOLDER`, up to the next answer's begin.

    None if it leaves that turn out.
    """
    _, *behind = written_messages(model, [{"role": role, "content": text} for role, text in turns]).split(PLACEHOLDER)
    return behind[-1] if behind else None


def written_messages(model: KVModel, messages: Messages, *, begin_answer: bool = True) -> str:
    """The messages as the tokenizer's template writes them, and what begins the answer."""
    tokenizer = model.tokenizer
    check_tokenizer("messages", model)
    if not has_chat_template(model):
        raise KVLensError(
            "messages: this model's tokenizer has no chat template, so the model reads plain text and no chat; give the prompt "
            "as text (on the command line --prompt and --text)"
        )
    # TransformerLens gives a tokenizer that lacks these its EOS in their place, which the template would write
    absent = {name: "" for name in ("bos_token", "eos_token") if tokenizer.init_kwargs.get(name) is None}
    try:
        text = written_by_template(tokenizer, messages, tokenize=False, add_generation_prompt=begin_answer, **absent)
    except Exception as error:  # a template is a program, and may fail in any way
        roles = ", ".join(message["role"] for message in messages)
        raise KVLensError(
            f"messages: the tokenizer's chat template cannot write these messages ({roles}): {first_line(error)}; change or "
            "leave out what it does not accept, or use a tokenizer whose template you trust"
        ) from error
    return str(text)


def has_chat_template(model: KVModel) -> bool:
    """Whether the model's tokenizer can write a chat."""
    return bool(getattr(model.tokenizer, "chat_template", None))


# --- any prompt --------------------------------------------------------------------------------------------------------------


def as_prompt(prompt: Any) -> Any:
    """A list of messages as a :class:`Chat`; any other prompt as it is."""
    is_chat = isinstance(prompt, list | tuple) and any(isinstance(message, Mapping) for message in prompt)
    return Chat(prompt) if is_chat else prompt


def text_tokens(model: KVModel, what: str, text: str, prepend_bos: bool, may_be_empty: bool = False) -> Int[Tensor, " pos"]:
    """The tokens of a string. Raises KVLensError where there are none, as of an invisible character."""
    check_tokenizer(what, model)
    tokens: Tensor = model.to_tokens(text, prepend_bos=prepend_bos, truncate=False)[0]
    if len(tokens) <= int(prepend_bos) and not may_be_empty:
        raise KVLensError(f"{what}: the tokenizer finds no tokens in {brief(text)}; give another text, or token ids")
    return tokens


def one_sequence(
    model: KVModel, what: str, tokens: object, *, may_be_empty: bool = False, prepend_bos: bool = False
) -> Int[Tensor, " pos"]:
    """Read ``tokens``, a string, a chat, or ids [pos] or [1, pos], as ids [pos] on the model's device.

    Args:
        model: its tokenizer reads strings.
        what: the argument's name, for messages.
        tokens: the argument.
        may_be_empty: whether an empty sequence is allowed.
        prepend_bos: whether to prepend BOS to a string that does not begin with it.

    Raises:
        KVLensError: another type, several sequences, an empty one, ids outside the vocabulary, a string without a tokenizer.
    """
    tokens = as_prompt(tokens)
    if isinstance(tokens, Chat):
        return tokens.tokens(model)
    if isinstance(tokens, str):
        tokens = text_tokens(model, what, tokens, prepend_bos, may_be_empty)
    if isinstance(tokens, Tensor) and tokens.dim() == 2 and len(tokens) == 1:
        tokens = tokens[0]
    if not isinstance(tokens, Tensor) or tokens.dim() != 1:
        came = f"shape {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise KVLensError(f"{what}: expected a string or token ids [pos] or [1, pos], got {came}; one at a time")
    try:
        if tokens.numel() or not may_be_empty:
            model.check_tokens(tokens)
    except KVLensError as error:
        raise KVLensError(f"{what}: {error}") from error
    return tokens.to(model.cfg.device)


def prompt_tokens(model: KVModel, prompt: object) -> Int[Tensor, " pos"]:
    """The tokens of one prompt: a string, a :class:`Chat`, a list of messages, or tokens [pos] or [1, pos].

    A string gets a BOS by the model's default, unless it begins with one or a bias is attached; a chat has what its template
    writes; tokens stay as they are.

    Raises:
        KVLensError: as :func:`one_sequence` and :meth:`Chat.tokens`.
    """
    return one_sequence(model, "prompt", prompt, prepend_bos=model.prepends_bos and model.attached_kv_bias is None)


def prompt_units(model: KVModel, prompt: object, by: By = "sentence") -> list[Unit]:
    """What can be taken out of a prompt, in order. BOS, the marks of a chat's template and its question are in no unit.

    Args:
        model: whose tokenizer reads the prompt.
        prompt: as in :func:`prompt_tokens`.
        by: "message" or "document" (each whole), "paragraph", "line", "sentence", "code" (statements, by their indentation),
            "word", "token"; or strings that occur in the prompt once each, in a chat's question, too; or ranges of tokens.

    Raises:
        KVLensError: as :func:`prompt_tokens`, :meth:`Chat.layout` and :func:`kvlens.units.cut`.
    """
    return cut(model, prompt_layout(model, prompt), by)


def prompt_layout(model: KVModel, prompt: object) -> Layout:
    """A prompt before it is cut."""
    prompt = as_prompt(prompt)
    return prompt.layout(model) if isinstance(prompt, Chat) else layout_of_tokens(model, prompt_tokens(model, prompt))

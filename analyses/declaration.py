"""How to declare an analysis: a function with its table, its inputs and its options.

The function is for notebooks: it takes a model and data, and returns a tidy frame. Its columns are declared once, as `Columns`,
which build the frame and the tables in the docstring and in ``--help``. The decorator `analysis` adds what a batch over many
prompts needs to know: which field of a record becomes which argument (`Field`), and which arguments the command line offers
(`Option`).

A whole analysis, as you might write it in ``my_package/my_module.py``::

    import torch

    from kvlens.analyses import Columns, Option, analysis
    from kvlens import HookedKVTransformer

    COLUMNS = Columns(
        position=("int64", "in the text, from 0"),
        token_id=("int64", ""),
        largest_logit=("float64", "of the next token"),
    )

    @analysis(COLUMNS, "the largest logits of a text, after its prompt", options={"scale": Option("factor of the logits")})
    def largest_logits(model: HookedKVTransformer, prompt, text, *, scale: float = 1.0):
        \"\"\"The largest logit at every position of a text, after its prompt.

        Returns:
            One row per position, in order:

            {columns}
        \"\"\"
        logits = model(torch.cat([prompt, text])[None])[0, len(prompt) :]
        return COLUMNS.frame(
            {"position": range(len(text)), "token_id": text, "largest_logit": scale * logits.amax(dim=-1)}
        )

Like the analyses of kvlens it can be run in a batch that can be resumed, on several models, with spawned workers or Ray::

    kvlens analyse my_package.my_module:largest_logits prompts.jsonl --model docs-linear --out table.parquet --scale 0.5

An option has the default of the function's argument. The arguments ``prompt``, ``text``, ``answer`` and ``rival`` are read
from the fields of these names: token ids, with BOS for the prompt if that is the model's default. A text has no BOS, and the
function itself reads it after the prompt. For a model without a tokenizer, a field is a list of token ids, or a string of ids
separated by blanks. Fields that no argument is read from become columns of a batch's table
(:mod:`kvlens.analyses.batch.records`).

:mod:`kvlens.analyses.sequences` reads prompts, texts and biases: ``bias_and_text`` where a bias will do, ``prompt_sequence``
where the prompt's own tokens are needed. What takes a ``KVModel`` and reads heads with ``kvlens.model.visit_heads`` runs on the
bridge too; in a layer, heads of attention come before those of a recurrent state (``bias.first_state_head(layer)``). A function
``check_model=`` refuses models that lack something, and the analysis calls it, too; what does not run on a front end at all
stands in :mod:`kvlens.analyses.registry`, with the reason. An attribution method is a class with ``explain(question, units)``
and a line in ``ATTRIBUTION_METHODS`` of :mod:`kvlens.analyses.attribution.methods`; its docstring says which passes it needs.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from kvlens import Chat, KVLensError, KVModel
from kvlens.checks import checked, ensure, one_of

from .registry import Function

TABLE_WIDTH = 124
"""Width of a line of a documented table."""


class Column(NamedTuple):
    """The pandas dtype of a column, and the meaning of its values, with their unit."""

    dtype: str
    meaning: str


class Columns(Mapping[str, Column]):
    """The columns of a table, in order.

    >>> columns = Columns(layer=("int64", "from 0"), loss=("float64", "nats"))
    >>> columns.frame({"layer": range(2), "loss": [0.5, 0.25]}).dtypes.astype(str).to_dict()
    {'layer': 'int64', 'loss': 'float64'}

    Args:
        columns: name -> (dtype, meaning).
    """

    def __init__(self, **columns: tuple[str, str]):
        self._columns = {name: Column(*column) for name, column in columns.items()}

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def dtypes(self) -> dict[str, str]:
        """name -> dtype."""
        return {name: column.dtype for name, column in self.items()}

    def frame(self, values: Mapping[str, object]) -> pd.DataFrame:
        """Build the table from its values.

        Args:
            values: one entry per column, in any order: a tensor of any shape (flattened), a sequence, or one value for all.
        """
        flat = {name: _flat(values[name]) for name in self}
        n_rows = next((len(x) for x in flat.values() if not _is_one_value(x)), 1)
        return pd.DataFrame(
            {
                name: pd.Series(x, dtype=self[name].dtype, index=range(n_rows) if _is_one_value(x) else None)
                for name, x in flat.items()
            },
            copy=False,
        )

    def document(self, function: Function) -> Function:
        """Decorator that replaces ``{columns}`` in the function's docstring by the table of the columns."""
        lines = (function.__doc__ or "").splitlines()
        for number, line in enumerate(lines):
            if line.strip() == "{columns}":
                margin = line[: -len("{columns}")]
                lines[number] = "\n".join(margin + row for row in self.table(TABLE_WIDTH - len(margin)))
        function.__doc__ = "\n".join(lines)
        return function

    def table(self, width: int) -> list[str]:
        """The lines of a table of names, dtypes and meanings, at most ``width`` characters wide."""
        names, dtypes = (max(map(len, column)) for column in (self, self.dtypes.values()))
        meanings = {
            name: textwrap.wrap(self[name].meaning, max(20, width - names - dtypes - 2), break_on_hyphens=False) or [""]
            for name in self
        }
        rule = f"{'=' * names} {'=' * dtypes} {'=' * max(1, *(len(line) for lines in meanings.values() for line in lines))}"
        rows = [
            f"{name * (i == 0):<{names}} {self[name].dtype * (i == 0):<{dtypes}} {line}".rstrip()
            for name, lines in meanings.items()
            for i, line in enumerate(lines)
        ]
        return [rule, *rows, rule]


def _flat(values: object) -> Any:
    if isinstance(values, Tensor):
        return values.detach().cpu().flatten().numpy()
    return values.array if isinstance(values, pd.Series) else values


def _is_one_value(values: object) -> bool:
    return isinstance(values, str) or not hasattr(values, "__len__")


@dataclass(frozen=True)
class Record:
    """One prompt of a batch.

    Attributes:
        id: unique within a batch: the ``id`` of its JSONL line, or file name and line number.
        prompt: the prompt that is converted or analyzed; a chat, where the line has ``messages`` or a ``question``.
        text: the text after the prompt, for analyses that need one; None if the input has none.
        fields: the other fields of its line, by name: ``answer``, ``rival``, ``corrupted`` ...
    """

    id: str
    prompt: str | Chat
    text: str | None = None
    fields: Mapping[str, object] = field(default_factory=dict)


def _as_it_is(model: KVModel, value: object) -> object:
    return value


@dataclass(frozen=True)
class Field:
    """The field of a record that an argument of the function is read from.

    Attributes:
        name: ``prompt``, ``text``, or any other field of the records.
        read: ``read(model, value)`` -> the argument; raises KVLensError for an invalid value. None passes the value unchanged.
        required: whether a record without the field is refused; otherwise the argument is None.
    """

    name: str
    read: Callable[[KVModel, Any], object] = _as_it_is
    required: bool = True

    def of(self, model: KVModel, record: Record) -> object:
        """The argument for one record.

        Raises:
            KVLensError: the record lacks the field, or it cannot be read.
        """
        standard = {"prompt": record.prompt, "text": record.text}
        value = standard[self.name] if self.name in standard else record.fields.get(self.name)
        if value is not None:
            return self.read(model, value)
        if not self.required:
            return None
        if self.name == "text":
            raise KVLensError('this analysis needs a text: give the record a "text", or one text for all records by --text')
        held = ", ".join(record.fields) or "none"
        raise KVLensError(f"{self.name}: this analysis needs a field of this name in every record; this record has: {held}")


@checked
def tokens_field(name: str, *, prepend_bos: bool, required: bool = True) -> Field:
    """A field read as tokens [pos], with BOS prepended if ``prepend_bos`` and that is the model's default."""

    def read(model: KVModel, value: object) -> Tensor:
        return read_tokens(model, name, value, prepend_bos=prepend_bos and model.prepends_bos)

    return Field(name, read, required)


def read_tokens(model: KVModel, what: str, value: Any, *, prepend_bos: bool) -> Tensor:
    """Read ``value`` as tokens [pos].

    Raises:
        KVLensError: neither text nor token ids, or text for a model without a tokenizer; the message names ``what``.
    """
    if isinstance(value, Chat):
        return value.tokens(model)
    if isinstance(value, str) and model.tokenizer is not None:
        return model.to_tokens(value, prepend_bos=prepend_bos, truncate=False)[0]
    numbers = value.split() if isinstance(value, str) else value
    try:
        return torch.tensor([int(number) for number in numbers], dtype=torch.long)
    except (TypeError, ValueError):
        raise KVLensError(
            f"{what}: expected token ids separated by blanks, because this model has no tokenizer, got {value!r}"
            if model.tokenizer is None
            else f"{what}: expected a string or a list of token ids, got {value!r}"
        ) from None


PROMPT = tokens_field("prompt", prepend_bos=True)
"""The prompt's tokens [pos], with BOS if the model uses one."""
PROMPT_OR_CHAT = Field("prompt", lambda model, value: value if isinstance(value, Chat) else PROMPT.read(model, value))
"""The same, but a chat as it is, for analyses that cut it into units."""
TEXT = tokens_field("text", prepend_bos=False)
"""The text's tokens [pos], without BOS, since it follows the prompt."""
TEXT_IF_ANY = tokens_field("text", prepend_bos=False, required=False)
"""The same, or None where the prompt may end where the answer begins."""
ANSWER = Field("answer", required=False)
"""The answer that is measured: words, or token ids; None if the record has none."""
RIVAL = Field("rival", required=False)
"""Another answer, which is subtracted: words, or token ids; None if the record has none."""
STANDARD = {"prompt": PROMPT, "text": TEXT, "answer": ANSWER, "rival": RIVAL}
"""The fields that arguments of these names are read from, unless an analysis names others."""


@dataclass(frozen=True)
class Option:
    """An argument of the function that the command line offers.

    Attributes:
        help: one line.
        choices: the allowed values; empty allows any.
        many: whether the value is several names, separated by commas on the command line, and passed as a tuple.
        value_type: type of the value, needed if the default is None.
    """

    help: str
    choices: tuple[str, ...] = ()
    many: bool = False
    value_type: type | None = None

    def kind(self, default: object) -> type:
        """The type of the value (of each one, if ``many``)."""
        return str if self.many else self.value_type or (str if default is None else type(default))

    def read(self, name: str, value: Any, default: object) -> object:
        """Convert ``value`` to what the function takes.

        Raises:
            KVLensError: it has another type, or is not one of the choices (the nearest is proposed).
        """
        kind = self.kind(default)
        if self.many:
            names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
            wanted = tuple(part for part in names or () if part != "")
            return tuple(self._checked(name, part, kind) for part in wanted) or default
        return default if value is None and default is None else self._checked(name, value, kind)

    def _checked(self, name: str, value: object, kind: type) -> object:
        return ensure(name, one_of(self.choices) if self.choices else kind, value)


def _takes_any(model: KVModel) -> None:
    """Accept every model."""


@dataclass(frozen=True)
class Analysis:
    """The declaration of an analysis, which the decorator `analysis` makes.

    Attributes:
        name: name of the command; for an analysis of kvlens, also the name of the function in ``kvlens.analyses``.
        summary: one line for the list of analyses.
        function: ``function(model, **inputs, **options) -> DataFrame`` with these columns; raises KVLensError on bad input.
        columns: columns of the table, in order; a batch adds ``model``, ``prompt_id`` and the records' own fields before them.
        inputs: argument -> `Field` that it is read from.
        options: argument -> `Option`; its default is that of the argument.
        check_model: raises KVLensError, before any prompt is run, for a model that lacks what the analysis needs.
        cost: how often it reads prompt and text.
    """

    name: str
    summary: str
    function: Callable[..., pd.DataFrame]
    columns: Columns
    inputs: Mapping[str, Field] = field(default_factory=dict)
    options: Mapping[str, Option] = field(default_factory=dict)
    check_model: Callable[[KVModel], None] = _takes_any
    cost: str = ""

    @property
    def defaults(self) -> dict[str, object]:
        """option -> its default."""
        parameters = inspect.signature(self.function).parameters
        return {name: parameters[name].default for name in self.options}

    @property
    def needs_text(self) -> bool:
        """Whether a record must have a text."""
        return any(source.name == "text" and source.required for source in self.inputs.values())

    def read_options(self, given: Mapping[str, object]) -> dict[str, object]:
        """All options as the function takes them: those given, after checks, and the defaults of the others.

        Raises:
            KVLensError: an option has another type, or is not one of its choices.
        """
        defaults = self.defaults
        read = {name: self.options[name].read(name, value, defaults[name]) for name, value in given.items()}
        return {**defaults, **read}

    def run(self, model: KVModel, record: Record, **options: object) -> pd.DataFrame:
        """The table of one record.

        Raises:
            KVLensError: the record lacks a field, an option is invalid, or the function raises it.
            TypeError: the function returned columns other than those declared.
        """
        given = {argument: source.of(model, record) for argument, source in self.inputs.items()}
        frame = self.function(model, **given, **self.read_options(options))
        if list(frame.columns) != list(self.columns):
            raise TypeError(f"{self.name} declares {list(self.columns)}, returned {list(frame.columns)}")
        return frame


@checked
def analysis(
    columns: Columns,
    summary: str,
    *,
    of: Callable[..., pd.DataFrame] | None = None,
    inputs: Mapping[str, Field] | None = None,
    options: Mapping[str, Option] | None = None,
    check_model: Callable[[KVModel], None] = _takes_any,
    cost: str = "",
) -> Callable[[Function], Function]:
    """Decorator that declares a function as an analysis of its name, and writes the table of its columns into its docstring.

    Args:
        columns, summary, options, check_model, cost: as in `Analysis`; the docstring says what it costs, too.
        of: the function of notebooks, where that of batches has other arguments: it gives the name.
        inputs: arguments other than ``prompt``, ``text``, ``answer`` and ``rival``, or other `Field`s for these.
    """

    def declare(function: Function) -> Function:
        known = {**STANDARD, **(inputs or {})}
        order = [*inspect.signature(function).parameters, *(inputs or {})]
        named = of or function
        named.__dict__["analysis"] = Analysis(
            named.__name__,
            summary,
            columns.document(function),
            columns,
            {name: known[name] for name in order if name in known},
            options or {},
            check_model,
            cost,
        )
        if cost:
            named.__doc__ = (
                f"{(named.__doc__ or '').rstrip()}\n\n{textwrap.indent(textwrap.fill(f'Cost: {cost}.', 120), '    ')}\n    "
            )
        return function

    return declare

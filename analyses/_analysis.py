"""What makes a function an analysis: its name, its columns, and how it is called with one prompt of a batch.

The function itself is for notebooks: model and tensors in, a tidy frame out. `Analysis` is what the batch scripts need to know
about it, so that ``python -m analyses.NAME`` and ``kvlens analyse NAME`` are one piece of code for all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # both take seconds to import, and who reads prompts needs neither
    import pandas as pd

    from kvlens import HookedKVTransformer


@dataclass(frozen=True)
class Record:
    """One prompt of a batch.

    Attributes:
        id: unique within a batch: the ``id`` of its JSONL line, or file name and line number.
        prompt: what is converted, or looked at.
        text: what it is judged on, for the analyses that need one; None where the input has none.
        fields: whatever else its line held, by name: ``answer``, ``wrong``, ``corrupted`` ...
    """

    id: str
    prompt: str
    text: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Option:
    """One option of an analysis, as the command line offers it.

    Attributes:
        default: its value, which also gives its type (bool, int, float or str).
        help: one line.
        choices: the values that are allowed, or empty.
    """

    default: Any
    help: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Analysis:
    """An analysis as the batch scripts see it.

    Attributes:
        name: the module's name in ``analyses``, and the command's.
        summary: one line for the list of analyses.
        columns: column -> dtype of the table, in order; the runner puts ``model`` and ``prompt_id`` in front.
        run: ``run(model, record, **options) -> DataFrame`` with these columns; raises KVLensError on a prompt that it
            cannot take.
        needs_text: whether a record must have a text.
        options: name -> `Option`; given to ``run`` by keyword.
        check_model: raises KVLensError, before any prompt is run, for a model that lacks what the analysis needs.
        n_interventions: ``n_interventions(model, **options)``, how many ablations or patches a prompt takes, to be said before
            the first one; None for an analysis that only looks.
    """

    name: str
    summary: str
    columns: Mapping[str, str]
    run: "Callable[..., pd.DataFrame]"
    needs_text: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)
    check_model: "Callable[[HookedKVTransformer], None]" = lambda model: None
    n_interventions: Callable[..., int] | None = None

"""Checks of experiment settings that a user changes, before anything runs.

The type of a setting is that of its values at the scales: a number, a flag, a string, or a list or dictionary of these.
What these values do not show is declared here by the setting's name: ranges of numbers and allowed words.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any

from kvlens.checks import Within, ensure, one_of
from kvlens.errors import KVLensError, brief, nearest
from kvlens.experiments.shared.outcome import Experiment
from kvlens.tasks import TextTask
from kvlens.training import TrainSettings
from kvlens.training.recipes import model_settings

MOST_SEED = 10**9
MOST_STEPS = 10**7
MOST_SIZE = 10**5
WHOLE: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("seed", "seeds", "prompt_seed", "first_context"), (0, MOST_SEED)),
    **dict.fromkeys(("polish_steps", "distil_steps", "free_steps"), (0, MOST_STEPS)),
    **dict.fromkeys(("steps", "max_steps", "n_sequences", "n_problems", "n_prompts", "n_bootstrap"), (1, MOST_STEPS)),
    **dict.fromkeys(("grid", "arrows"), (2, 2_000)),
    **dict.fromkeys(("d", "d_vocab", "length", "vocab_size"), (2, MOST_SIZE)),
}
"""Smallest and largest integer, by the setting's name; 1 and `MOST_SIZE` for others."""
RATE, SHARE = Within(above=0, most=10**9), Within(above=0, most=1)
NUMBERS: dict[str, Within] = {
    **dict.fromkeys(("rates", "learning_rates", "distil_rates", "rates_of_all_entries", "sigmas", "step_per_token"), RATE),
    "learning_rate": Within(above=0, most=10),
    "size": Within(above=0, most=10),  # features grow as the exponential of its square
    **dict.fromkeys(("facts_ratio", "ratio", "ratios", "trigger_rate", "stop_at_accuracy"), SHARE),
}
"""The range of numbers, by the setting's name; any finite number for others."""
WORDS: dict[str, tuple[str, ...]] = {"polished_budgets": ("equal", "logits")}
"""Allowed words, by the setting's name; any string for others (names and paths are checked where they are used)."""
KEYS = ("d_x", "steps", "classes")
"""Dictionaries whose keys must be among those of the scales."""
COLLECTIONS = (*KEYS, "sizes", "models")
"""Dictionaries of like things by name, such as models by size: a given one replaces that of the scale. All others describe one
thing (a task, a model, its training): a given one changes only the fields that it names."""
OPTIONAL = ("tokenizer", "texts")
"""Settings that may be None instead of a string."""


def changed_settings(experiment: Experiment, scale: str, changes: Mapping[str, Any]) -> Experiment:
    """``experiment`` with some settings of one scale changed.

    Raises:
        KVLensError: an unknown setting (the nearest is named), or an invalid value.
    """
    settings, changed = experiment.scales[scale], {}
    for name, value in changes.items():
        if name not in settings:
            raise KVLensError(
                f"{experiment.name} has no setting {name!r}{nearest(name, settings)}; it has {', '.join(sorted(settings))}"
            )
        what = f"{experiment.name}: the setting {name}"
        own = settings[name]
        value = _merged(name, own, value)
        changed[name] = value
        is_own = type(value) is type(own) and value == own
        if not is_own and not (value is None and name in OPTIONAL):
            _check(what, name, value, [at[name] for at in experiment.scales.values() if at[name] is not None])
    return replace(experiment, scales={**experiment.scales, scale: {**settings, **changed}})


def _merged(name: str, own: Any, value: Any) -> Any:
    """``value``, with the fields of ``own`` that it does not name where both describe one thing."""
    if not isinstance(own, dict) or not isinstance(value, dict) or not value or name in COLLECTIONS:
        return value
    return {**own, **{key: _merged(key, own.get(key), one) for key, one in value.items()}}


def _check(what: str, name: str, value: Any, examples: Sequence[Any]) -> None:
    """Raise KVLensError unless ``value`` has the type of the examples and is in the range declared for ``name``."""
    kinds = {type(example) for example in examples} or {str}
    if kinds == {list}:
        _check_list(what, name, value, examples)
    elif dict in kinds and (isinstance(value, dict) or kinds == {dict}):
        _check_dict(what, name, value, [example for example in examples if isinstance(example, dict)])
    elif kinds == {bool}:
        ensure(what, bool, value)
    elif kinds <= {int, dict}:
        ensure(what, Annotated[int, Within(*WHOLE.get(name, (1, MOST_SIZE)))], value)
    elif kinds <= {int, float}:
        ensure(what, Annotated[float, NUMBERS.get(name, Within())], value)
    elif name in WORDS:
        ensure(what, one_of(WORDS[name]), value)
    elif not isinstance(value, str) or not value:
        raise KVLensError(f"{what} must be a nonempty string, got {brief(value)}")


def _check_list(what: str, name: str, value: Any, examples: Sequence[list[Any]]) -> None:
    elements = [element for example in examples for element in example]
    if not isinstance(value, list) or not value:
        raise KVLensError(f"{what} must be a nonempty list, such as {brief(examples[-1])}, got {brief(value)}")
    for place, element in enumerate(value):
        _check(f"{what}, entry {place + 1},", name, element, elements)
    if not any(_twice(example) for example in examples) and (twice := _twice(value)):
        raise KVLensError(f"{what} must not repeat an entry, got {brief(twice[0])} twice")


def _twice(values: list[Any]) -> list[Any]:
    return [value for place, value in enumerate(values) if value in values[:place]]


def _other_fields(known: Collection[str]) -> Iterable[str]:
    """Further fields beside the ``known`` ones: all of the training, model or text it describes."""
    kinds = {
        "batch_size": {field.name for field in fields(TrainSettings)},
        "d_model": model_settings(),
        "corpus": {field.name for field in fields(TextTask)},
    }
    return (name for key, names in kinds.items() if key in known for name in names)


def _check_dict(what: str, name: str, value: Any, examples: Sequence[dict[str, Any]]) -> None:
    if not isinstance(value, dict) or not value:
        raise KVLensError(f"{what} must be a nonempty dictionary, such as {brief(examples[-1])}, got {brief(value)}")
    known = {key: [example[key] for example in examples if key in example] for example in examples for key in example}
    everything = [element for elements in known.values() for element in elements]
    alike = len({type(element) for element in everything}) == 1
    for key, element in value.items():
        if name in KEYS and alike:
            ensure(f"{what}: a key", one_of(known), key)
        elif name not in COLLECTIONS and key not in (names := {*known, *_other_fields(known)}):
            raise KVLensError(f"{what} has no field {key!r}{nearest(key, names)}; there are {', '.join(sorted(names))}")
        own = known.get(
            key, everything if alike and name in COLLECTIONS else []
        )  # further fields are checked where they are used
        if own and not (element is None and None in own):
            inner = key if key in WHOLE or key in NUMBERS or key in WORDS else name if alike else key
            _check(f"{what}, {key},", inner, element, [one for one in own if one is not None])

"""The interface of a conversion method for softmax attention.

A method is a single class: a frozen dataclass whose fields are its options, validated on construction, and documented in the
class docstring. :data:`kvlens.conversion_methods.CONVERSION_METHODS` lists the methods that ``method="name"`` finds; an object
of any other class can be passed as well.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import ClassVar

from kvlens.conversion.softmax.prompt_pass import attention_parts
from kvlens.conversion.softmax.settings import TextOptions
from kvlens.conversion.softmax.teacher import Teacher
from kvlens.errors import KVLensError, nearest
from kvlens.kv_bias import KVBias
from kvlens.model.protocol import ReadsPrompts


class ConversionMethod:
    """How the prompt of a softmax model becomes a bias: :class:`Exact`, or an :class:`Approximation`.

    Attributes:
        name: the method's name in ``method="name"`` and in the record of a bias (``bias.fit.method``).
        needs_queries: whether ``fit`` reads the queries of the prompt itself, ``teacher.exact.queries``.
        shorthand: other names that ``convert_prompt(..., method="name", option=...)`` takes for an option.
    """

    name: ClassVar[str]
    needs_queries: ClassVar[bool] = False
    shorthand: ClassVar[Mapping[str, str]] = {}

    def check_model(self, model: ReadsPrompts) -> None:
        """Raise KVLensError if the method does not support ``model``. Called before the prompt is read."""


def check_class(kind: type) -> None:
    """Check that the class of a method is well-formed.

    Raises:
        KVLensError: not a :class:`ConversionMethod`, no ``name``, or a ``shorthand`` for an option that it does not have.
    """
    if not (isinstance(kind, type) and issubclass(kind, ConversionMethod)):
        raise KVLensError(f"conversion method: expected a subclass of ConversionMethod, got {kind!r}")
    if not isinstance(getattr(kind, "name", None), str):
        raise KVLensError(f'{kind.__name__}: a conversion method needs a name, such as name: ClassVar[str] = "my_method"')
    if not is_dataclass(kind) or "__dataclass_params__" not in vars(kind):
        raise KVLensError(
            f"{kind.__name__}: a conversion method is a dataclass; put @dataclass(frozen=True, kw_only=True) on it"
        )
    options = [field.name for field in fields(kind)]
    wrong = next((name for name in kind.shorthand.values() if name not in options), None)
    if wrong is not None:
        raise KVLensError(
            f"{kind.__name__}: shorthand names {wrong!r}, which is no option{nearest(wrong, options)}; "
            f"its options are {', '.join(options) or 'none'}"
        )


@dataclass(frozen=True)
class Exact(ConversionMethod):
    """Keep every key of the prompt unchanged: logits equal those with the prompt in front, up to rounding. No options."""

    name: ClassVar[str] = "exact"


@dataclass(frozen=True, kw_only=True)
class Approximation(ConversionMethod, TextOptions, ABC):
    """A method whose bias is not exact; its errors are measured on reference text (:class:`TextOptions`) and recorded.

    A subclass is a frozen dataclass decorated by :func:`~kvlens.checks.checked`, which checks fields by their annotations.

    Attributes:
        fits_on_text: whether ``fit`` reads the reference text; otherwise it is used only to measure errors.
    """

    fits_on_text: ClassVar[bool] = False

    @abstractmethod
    def fit(self, teacher: Teacher) -> KVBias:
        """The bias of the prompt alone, with a batch axis.

        Args:
            teacher: ``exact.bias`` holds all keys and values of the prompt (:class:`~kvlens.kv_bias.VirtualKeys`);
                ``read(whole, seen)`` returns each layer's queries on the reference text, and ``keys(layer)`` the prompt's keys.
        """

    def keeps_every_key(self, lengths: Sequence[int]) -> bool:
        """Whether prompts of these lengths keep all of their keys, which is exact, so that nothing is fitted or recorded."""
        return False


def needs_plain_scores(model: ReadsPrompts, method: str) -> None:
    """Raise KVLensError if a model's scores are not plain exp(q.k), the only kind that ``method`` can approximate."""
    for part in attention_parts(model):
        rule = part.score_rule()
        for what, present in (
            ("ALiBi", rule.slopes is not None),
            ("local windows", rule.window is not None),
            ("soft-capping", rule.soft_cap is not None),
        ):
            if present:
                raise KVLensError(
                    f'convert_prompt: method="{method}" approximates exp(q.k), but this model\'s scores also have {what}: '
                    'use method="exact" or "landmark", which score keys in the same way as the model'
                )

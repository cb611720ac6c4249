"""The interface of a conversion method for softmax attention.

A method is a single class: a frozen dataclass whose fields are its options, validated on construction, and documented in the
class docstring. :data:`kvlens.conversion_methods.CONVERSION_METHODS` lists the methods that ``method="name"`` finds; an object
of any other class can be passed as well.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvlens.conversion.softmax.prompt_pass import attention_parts
from kvlens.conversion.softmax.settings import TextOptions
from kvlens.conversion.softmax.teacher import Teacher
from kvlens.errors import KVLensError
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

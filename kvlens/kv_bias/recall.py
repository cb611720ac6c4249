"""What a bias still knows of its prompt: which words of the prompt's own sentences the model would still say.

Each sentence of the prompt is read alone, as if the model had said it: with the whole prompt before it, under the bias, and
with neither. A word counts if the prompt matters to it, by more than :data:`MATTERS` nats:

    effect = log p(word | prompt) - log p(word)          loss = log p(word | prompt) - log p(word | bias)

An error on the model's own text says little about facts that this text does not touch; a lost word is such a fact.

How much to make of it, measured on six documents with questions (``tests/benchmarks/results/fewer_keys.md``): an answer whose
words are lost is lost itself in five of six cases, but three quarters of the lost answers have no lost word, and conversions at
one ratio are not ordered by their recall at all, presumably since the fit has read the same sentences, repeated, and a question
about them is other text. A low recall asks for more keys; a high one is no reason to trust an answer.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

MATTERS = 1.0
"""Nats, of an effect that counts, and of a loss that is one."""
N_WORST = 5


class RecalledWord(NamedTuple):
    """A word to which the prompt matters.

    Attributes:
        sentence: its sentence's number, from 0.
        word: as it stands there.
        effect, loss: nats, as defined in the module.
        was_first, is_first: whether each of its tokens is the model's first choice with the prompt, and under the bias.
    """

    sentence: int
    word: str
    effect: float
    loss: float
    was_first: bool
    is_first: bool


@dataclass(frozen=True)
class Recall:
    """What a bias still knows of its prompt.

    Attributes:
        sentences: the prompt's sentences.
        words: those that count, in order.
    """

    sentences: tuple[str, ...]
    words: tuple[RecalledWord, ...]

    @property
    def share(self) -> float:
        """The share of words that lose less than :data:`MATTERS` nats; NaN if no word counts."""
        return sum(word.loss < MATTERS for word in self.words) / len(self.words) if self.words else float("nan")

    @property
    def worst(self) -> list[RecalledWord]:
        """The words that lose most, largest loss first; those alone that lose :data:`MATTERS` nats or more."""
        lost = [word for word in self.words if word.loss >= MATTERS]
        return sorted(lost, key=lambda word: -word.loss)[:N_WORST]

    def table(self) -> Any:
        """One row per sentence: number, text, words that count, the share of those first with the prompt that stay first, the
        largest loss and its word; a DataFrame."""
        import pandas as pd

        rows = []
        for number, text in enumerate(self.sentences):
            words = [word for word in self.words if word.sentence == number]
            first = [word.is_first for word in words if word.was_first]
            worst = max(words, key=lambda word: word.loss, default=None)
            rows.append(
                {
                    "sentence": number,
                    "text": text,
                    "n_words": len(words),
                    "first_share": sum(first) / len(first) if first else float("nan"),
                    "largest_loss": float("nan") if worst is None else worst.loss,
                    "worst_word": "" if worst is None else worst.word,
                }
            )
        return pd.DataFrame(rows)

    def table_of_words(self) -> Any:
        """One row per word that counts; a DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.words, columns=RecalledWord._fields)

    def summary(self) -> str:
        """A short description: the share that is kept, and the worst words by name."""
        if not self.words:
            return "recall not known: the prompt matters to no word of it"
        worst = ", ".join(f"{word.word!r} ({word.loss:.1f} nats)" for word in self.worst)
        lost = f"; lost most: {worst}" if worst else ""
        return f"recall {self.share:.0%} of {len(self.words)} words of the prompt{lost}"

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> "Recall":
        """Rebuild from :meth:`to_json`."""
        return cls(tuple(plain["sentences"]), tuple(RecalledWord(*word) for word in plain["words"]))

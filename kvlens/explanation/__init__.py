"""Why did the model say that? An explanation in eight steps.

1. The prompt is cut into units; what is always there (BOS, a template's marks, the question) is in none (`kvlens.units`).
2. The model answers, up to the token that ends its response (:mod:`~kvlens.explanation.response`).
3. All units are removed, and the words that fall with them are the response's *claims*
   (:mod:`~kvlens.explanation.claims`).
4. Each unit is removed, and what the model says then gives each claim its verdict
   (:mod:`~kvlens.explanation.verdicts`; the runs are made by :mod:`~kvlens.explanation.runs`). Of a prompt with many units,
   whole documents or paragraphs come first, and then the units inside those that change something.
5. Units that lose a claim are removed again with what follows moved up: those that lose it both ways are *causes*. Where no
   unit alone is one, several are removed together (:mod:`~kvlens.explanation.by_unit`).
6. Only the cause is kept.
7. Layer by layer, what the prompt without the cause leaves there takes the place of what the whole prompt leaves: which layers,
   alone or together, lose the claim when they read the other prompt, and which keep it when they alone read this one
   (:mod:`~kvlens.explanation.exchanges`). Likewise, where asked for, heads, and positions of the prompt in all layers.
8. Every run is a row of ``statements``, and every sentence that is shown comes from a row
   (:mod:`~kvlens.explanation.sentences`).
"""

from kvlens.explanation.explained import Explained
from kvlens.explanation.sentences import in_words, paragraphs
from kvlens.explanation.steps import explain
from kvlens.explanation.view import explanation_view

__all__ = ["Explained", "explain", "explanation_view", "in_words", "paragraphs"]

"""Why did the model say that? An explanation in eight steps, which :mod:`~kvlens.explanation.steps` takes one after the other.

1. The prompt is cut into units; BOS, what a chat template writes and the question are in none: they stay (`kvlens.units`).
2. The model answers, up to the token that ends its response (:mod:`~kvlens.explanation.runs`, where every run is made, once).
   A document's name that has a word of the response is a unit from here on; other names stay.
3. All units are removed, and the words that fall with them are the response's *claims* (:mod:`~kvlens.explanation.claims`).
   The one that the question asks for heads the page (:mod:`~kvlens.explanation.heading`).
4. Each unit is removed, and what the model says then gives each claim its *verdict* (`Verdict`, beside claims). Of a prompt
   with many units, those that seem to change nothing are removed together, and only the others one by one
   (:mod:`~kvlens.explanation.by_unit`).
5. Units that lose a claim are removed again with what follows moved up: those that lose it both ways are *causes*. Where no
   unit alone is one, several are removed together (also ``by_unit``).
6. Only the cause of the claim that heads the page is kept (also ``by_unit``).
7. In ranges of layers, or layer by layer, what the whole prompt leaves there (keys and values, or a state) is exchanged for
   what the prompt without the cause leaves. Layers lose a claim, alone or together, if it falls when only they read the
   shortened prompt; they keep it if it stays when only they read the whole one. Likewise, where asked for, heads, and positions
   in all layers (:mod:`~kvlens.explanation.exchanges`).
8. Every content word of the response has an account: the sources that it is cited by, the question, or that the model says it
   anyway (:mod:`~kvlens.explanation.citations`, shown by :mod:`~kvlens.explanation.sources`). Every run is a row of
   ``statements``, and every sentence that is shown comes from a row (:mod:`~kvlens.explanation.presentation`; the tables are in
   :mod:`~kvlens.explanation.explained`). Both are shown together (:mod:`~kvlens.explanation.view`), and on a page with sections
   of what analyses add (:mod:`~kvlens.explanation.page`).

Many prompts: which layers and heads read a fact (:mod:`~kvlens.explanation.reading`), and whether an answer comes from
the prompt or from memory (:mod:`~kvlens.explanation.from_memory`).
"""

from kvlens.explanation.explained import Findings
from kvlens.explanation.from_memory import StatedFact, context_or_memory
from kvlens.explanation.page import explanation_page
from kvlens.explanation.presentation import paragraphs
from kvlens.explanation.steps import explain
from kvlens.explanation.view import Explained, explanation_view, in_words

__all__ = [
    "Explained",
    "Findings",
    "StatedFact",
    "context_or_memory",
    "explain",
    "explanation_page",
    "explanation_view",
    "in_words",
    "paragraphs",
]

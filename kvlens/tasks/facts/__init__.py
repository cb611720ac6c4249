"""Made-up stories, with questions that can be answered only from the story.

    Mira keeps a goat. The kite is in the barn. The drum stands in the cellar. Where is the kite? The kite is in the barn.

- :mod:`~kvlens.tasks.facts.words`, ``tokenizer``: a few hundred words, one token each;
- :mod:`~kvlens.tasks.facts.story`: drawing a story, and the ground truth: the position of each answer;
- :mod:`~kvlens.tasks.facts.nested`: the same for stories whose answers need two sentences;
- :mod:`~kvlens.tasks.facts.task`: stories as batches;
- :mod:`~kvlens.tasks.facts.answers`: which answers of a model are right, and the accuracy of guessing.
"""

from kvlens.tasks.facts.answers import (
    Answers,
    AnswerShares,
    ScoredQuestions,
    answer_shares,
    answers_after_story,
    answers_with_bias,
    answers_without_story,
    guess_in_story,
    question_tokens,
    scored_questions,
    scoring_hops,
)
from kvlens.tasks.facts.story import Fact, Question, Sentence, Story
from kvlens.tasks.facts.task import FactsTask
from kvlens.tasks.facts.tokenizer import word_tokenizer

__all__ = [
    "AnswerShares",
    "Answers",
    "Fact",
    "FactsTask",
    "Question",
    "ScoredQuestions",
    "Sentence",
    "Story",
    "answer_shares",
    "answers_after_story",
    "answers_with_bias",
    "answers_without_story",
    "guess_in_story",
    "question_tokens",
    "scored_questions",
    "scoring_hops",
    "word_tokenizer",
]
